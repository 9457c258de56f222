"""The facts that gateways in front of one fleet exchange, and how to combine them. Pure.

Each process publishes its *facts*: what it has learned or counted itself, never what it received. All values
are absolute or cumulative, never differences, so lost, late or repeated messages do no harm.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import field
from typing import TypeVar

from gateway.core.class_counts import TextKind
from gateway.core.conversations import Conversations
from gateway.core.health import Verdict
from gateway.core.load import Load
from gateway.core.value import valueclass

_K = TypeVar("_K", bound=Hashable)

STARTED_MAX = 256
"""Maximum number of flows whose starts a process counts: the most recently active ones. A choice that bounds
its facts (`store.facts.BYTES_MAX`)."""

STARTED_IDLE_S = 300.0
"""An idle flow is dropped after this time. A choice: fairness towards it no longer matters."""

Flow = tuple[str, str, str | None]
"""A unit of fairness: the id of a model, the name of a class, the name of an API key or None."""


@valueclass(frozen=True, slots=True)
class Ratio:
    """What was learned about one kind of text.

    Attributes:
        answers: Effective number of answers.
        mean_log: Mean logarithm of actual over counted tokens.
    """

    answers: int
    mean_log: float


@valueclass(frozen=True, slots=True)
class Learned:
    """What was learned about counting prompts.

    Attributes:
        ratios: For counts without a vocabulary.
        p99_tokens: How much longer than their exact counts prompts are, 99th percentile.
    """

    ratios: Mapping[TextKind, Ratio] = field(default_factory=dict)
    p99_tokens: int = 0


@valueclass(frozen=True, slots=True)
class Attempts:
    """Successes and failures of a backend since the process began to count."""

    served: int
    failed: int


@valueclass(frozen=True, slots=True)
class Blocked:
    """The first request of a queue that waits for a backend, and needs more than one end frees there.

    Attributes:
        waited_s: Seconds for which it has waited.
        claim: What it needs: sequences, share of the knee, KV blocks.
    """

    waited_s: float
    claim: Load


@valueclass(frozen=True, slots=True)
class Facts:
    """What one process says of itself.

    Attributes:
        verdicts: Per backend, why it takes nothing, where its own requests showed that.
        attempts: Per backend, how its requests fared.
        learned: What its answers taught.
        started: Tokens of the requests it started, per flow.
        long_waiting: Per backend, the long prompts that wait for it as their first choice.
        reading: Per backend, seconds until the latest long prompt that it sent there should be read.
        knee_shares: Per backend, the share of its knee (millionths) that its own measurements of TPOT lately
            led to.
        blocked: Per backend, the large request that waits there for room, if one comes first.
        conversations: Which backends answered long conversations lately.
    """

    verdicts: Mapping[str, Verdict] = field(default_factory=dict)
    attempts: Mapping[str, Attempts] = field(default_factory=dict)
    learned: Learned = Learned()
    started: Mapping[Flow, int] = field(default_factory=dict)
    long_waiting: Mapping[str, int] = field(default_factory=dict)
    reading: Mapping[str, float] = field(default_factory=dict)
    knee_shares: Mapping[str, int] = field(default_factory=dict)
    blocked: Mapping[str, Blocked] = field(default_factory=dict)
    conversations: Conversations = Conversations()


# ------------------------------------------------------------------ how it adds up


def pooled(all_learned: Iterable[Learned]) -> Learned:
    """Combine what several processes have learned.

    Ratios: the mean, weighted by answers. Margins: the maximum, because they keep prompts from being sent
    where they do not fit, and each process knows its own traffic best.
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
    """Return the sums of several sets of counts."""
    sums: dict[_K, int] = {}
    for counts in all_counts:
        for name, count in counts.items():
            sums[name] = sums.get(name, 0) + count
    return sums


def least(all_counts: Iterable[Mapping[_K, int]]) -> dict[_K, int]:
    """Return the minima of several sets of counts."""
    found: dict[_K, int] = {}
    for counts in all_counts:
        for name, count in counts.items():
            found[name] = min(count, found.get(name, count))
    return found


def increases(before: Mapping[_K, int] | None, now: Mapping[_K, int]) -> dict[_K, int]:
    """Return the increase of one process's counters since they were last seen.

    For a process that was never seen before (None), nothing counts as an increase, because its past is over.
    A counter that was missing began at 0, and one that has decreased was reset.
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
    """Tokens of the requests that this process has started, per flow. Bounded: idle flows are dropped."""

    def __init__(self) -> None:
        """Start with none."""
        self._totals: OrderedDict[Flow, tuple[int, float]] = OrderedDict()  # longest idle first

    def add(self, flow: Flow, tokens: int, now: float) -> None:
        """Count a request of `tokens` that was started at `now`."""
        total, _ = self._totals.pop(flow, (0, 0.0))
        self._totals[flow] = (total + tokens, now)
        if len(self._totals) > STARTED_MAX:
            self._totals.popitem(last=False)

    def totals(self, now: float) -> dict[Flow, int]:
        """Return the totals of all recently active flows."""
        while self._totals and next(iter(self._totals.values()))[1] <= now - STARTED_IDLE_S:
            self._totals.popitem(last=False)
        return {flow: total for flow, (total, _) in self._totals.items()}
