"""What gateways in front of one fleet tell each other of themselves, and how it adds up. Pure.

Each process publishes its *facts*: what it has learned or counted itself, and never what it was told. They
are absolute or cumulative, never changes, so that one that is lost, late or repeated changes nothing.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from gateway.core.class_counts import TextKind
from gateway.core.health import Verdict

_K = TypeVar("_K", bound=Hashable)

STARTED_MAX = 256
"""Callers whose starts a process counts: those that started something last."""

STARTED_IDLE_S = 300.0
"""A caller that has started nothing for so long is no longer counted: there is nothing to be fair about."""

Flow = tuple[str, str, str | None]
"""Who is treated fairly to whom: the id of a model, the name of a class, the name of an API key or None."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """What answers taught of one kind of text.

    Attributes:
        answers: How many count.
        mean_log: Mean of the logarithm of true over counted tokens.
    """

    answers: int
    mean_log: float


@dataclass(frozen=True, slots=True)
class Learned:
    """What answers taught of counting prompts.

    Attributes:
        ratios: For counts without a vocabulary.
        p99_tokens: 99th percentile of how far off exact counts were.
    """

    ratios: Mapping[TextKind, Ratio] = field(default_factory=dict)
    p99_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Attempts:
    """Requests to a backend that spoke for it or against it, since the process began to count."""

    served: int
    failed: int


@dataclass(frozen=True, slots=True)
class Facts:
    """What one process says of itself.

    Attributes:
        verdicts: Per backend, why it takes nothing, where its own requests showed that.
        attempts: Per backend, how its requests fared.
        learned: What its answers taught.
        started: Tokens of the requests it started, per flow.
        long_waiting: Per backend, the long prompts that wait for it as their first choice.
        knee_shares: Per backend, the share of its knee (millionths) that its own measurements of TPOT lately
            led to.
    """

    verdicts: Mapping[str, Verdict] = field(default_factory=dict)
    attempts: Mapping[str, Attempts] = field(default_factory=dict)
    learned: Learned = Learned()
    started: Mapping[Flow, int] = field(default_factory=dict)
    long_waiting: Mapping[str, int] = field(default_factory=dict)
    knee_shares: Mapping[str, int] = field(default_factory=dict)


# ------------------------------------------------------------------ how it adds up


def pooled(all_learned: Iterable[Learned]) -> Learned:
    """Return what several processes have learned together.

    Of ratios the mean, each answer weighing the same. Of margins the largest: they keep a prompt from
    being sent where it does not fit, and each process knows its own traffic best.
    """
    sums: dict[TextKind, tuple[int, float]] = {}
    p99_tokens = 0
    for learned in all_learned:
        p99_tokens = max(p99_tokens, learned.p99_tokens)
        for kind, ratio in learned.ratios.items():
            answers, log_sum = sums.get(kind, (0, 0.0))
            sums[kind] = (answers + ratio.answers, log_sum + ratio.answers * ratio.mean_log)
    ratios = {kind: Ratio(answers, log_sum / answers) for kind, (answers, log_sum) in sums.items() if answers}
    return Learned(ratios, p99_tokens)


def summed(all_counts: Iterable[Mapping[_K, int]]) -> dict[_K, int]:
    """Return counts of the same things, added up."""
    sums: dict[_K, int] = {}
    for counts in all_counts:
        for name, count in counts.items():
            sums[name] = sums.get(name, 0) + count
    return sums


def least(all_counts: Iterable[Mapping[_K, int]]) -> dict[_K, int]:
    """Return the smallest count of each thing."""
    found: dict[_K, int] = {}
    for counts in all_counts:
        for name, count in counts.items():
            found[name] = min(count, found.get(name, count))
    return found


def increases(before: Mapping[_K, int] | None, now: Mapping[_K, int]) -> dict[_K, int]:
    """Return by how much one process's counters have grown since they were last seen.

    A process that was never seen before (None) says where it begins: nothing of it is new, since what it
    did long ago is over. A counter that was not there began at 0, and one that fell began again.
    """
    if before is None:
        return {}
    grown = {}
    for name, count in now.items():
        old = before.get(name, 0)
        increase = count - old if count >= old else count
        if increase:
            grown[name] = increase
    return grown


class StartedTokens:
    """Tokens of the requests that one process started, per flow. Bounded: the idle are forgotten."""

    def __init__(self) -> None:
        """Start at nothing."""
        self._totals: OrderedDict[Flow, tuple[int, float]] = OrderedDict()  # the longest idle first

    def add(self, flow: Flow, tokens: int, now: float) -> None:
        """Count a request of `tokens` that was started at `now`."""
        total, _ = self._totals.pop(flow, (0, 0.0))
        self._totals[flow] = (total + tokens, now)
        if len(self._totals) > STARTED_MAX:
            self._totals.popitem(last=False)

    def totals(self, now: float) -> dict[Flow, int]:
        """Return the totals of all that have started something lately."""
        while self._totals and next(iter(self._totals.values()))[1] <= now - STARTED_IDLE_S:
            self._totals.popitem(last=False)
        return {flow: total for flow, (total, _) in self._totals.items()}
