"""Simulates the arrivals of a log in virtual time, under any policy."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from gateway.core.backends import Capacity
from gateway.core.perf import PerfModel
from gateway.core.policy import Policy, TrafficClass
from gateway.core.profile import EngineFlags
from gateway.core.request_features import RequestFeatures
from gateway.core.usage import Ending
from gateway.core.value import valueclass
from gateway.core.virtual_fleet import Fate, Fleet, Patience
from gateway.replay.reading import Entry
from gateway.replay.router import PolicyRouter
from gateway.telemetry.decision_lines import RequestLine

UNKNOWN_OUTPUT_TOKENS = TrafficClass("", ()).output_reserve_tokens
"""Output of a request without a limit if no similar one has ever completed: a class's default reserve."""


@valueclass(frozen=True, slots=True)
class Past:
    """A recorded request that arrives again; see `core.virtual_fleet.Arriving`.

    Attributes:
        entry: The request as it was recorded.
        asked, key: Its features, and the name of its caller's API key.
        patience: How long its caller waits.
        is_guessed: Whether the length of its answer is unknown.
    """

    id: int
    at: float
    prompt_tokens: int
    output_tokens: int
    seqs: int
    entry: Entry
    asked: RequestFeatures
    key: str | None
    patience: Patience
    is_guessed: bool

    @property
    def prefix_keys(self) -> tuple[int, ...]:
        """None: the log does not know what prompts have in common."""
        return ()


@dataclass(frozen=True, slots=True)
class Server:
    """The engine of a backend; see `core.engine.Deployment`."""

    capacity: Capacity
    perf: PerfModel
    flags: EngineFlags


@valueclass(frozen=True, slots=True)
class Run:
    """The results of arrivals under a policy: fates in their order, classes by their ids."""

    policy: Policy
    fates: Sequence[Fate[Past]]
    classes: Mapping[int, str]


def arrivals(entries: Sequence[Entry]) -> Sequence[Past]:
    """Return the requests that a fleet would see again, the first at second 0.

    Requests whose content a backend rejected are left out: they cost an engine nothing.
    """
    typical = _typical_outputs(entries)
    found: list[Past] = []
    for entry in entries:
        past, asked = entry.past, entry.asked
        if asked is None or (past.ending is Ending.REJECTED and past.tries):
            continue
        output, is_guessed = _output_tokens(past, asked, typical)
        read = past.tokens_in // max(1, asked.prompts) if past.tokens_in else asked.estimate.tokens
        found.append(
            Past(
                id=len(found),
                at=past.at - entries[0].past.at,
                prompt_tokens=max(1, read),
                output_tokens=output,
                seqs=asked.seqs,
                entry=entry,
                asked=asked,
                key=past.key,
                patience=_patience(past),
                is_guessed=is_guessed,
            )
        )
    return found


def run(policy: Policy, engines: Mapping[str, EngineFlags], pasts: Sequence[Past]) -> Run:
    """Simulate arrivals under a policy."""
    servers = {
        name: Server(backend.capacity, backend.perf, engines[name])
        for name, backend in policy.backends.items()
        if backend.perf is not None
    }
    router = PolicyRouter[Past](policy, lambda past: (past.asked, past.key))
    fleet = Fleet[Past](router, pasts, servers, lambda past: past.patience)
    fleet.run()
    return Run(policy, fleet.fates, router.classes)


def _typical_outputs(entries: Sequence[Entry]) -> Mapping[str, int]:
    """Return the median output length per class, of completed requests."""
    lengths: dict[str, list[int]] = defaultdict(list)
    for entry in entries:
        past = entry.past
        if past.ending is Ending.COMPLETED and past.tokens_out:
            lengths[past.traffic_class].append(max(1, past.tokens_out // past.seqs))
    return {name: round(median(found)) for name, found in lengths.items()}


def _output_tokens(past: RequestLine, asked: RequestFeatures, typical: Mapping[str, int]) -> tuple[int, bool]:
    """Return the output length, and whether it is a guess."""
    if past.ending is Ending.COMPLETED and past.tokens_out:
        return max(1, past.tokens_out // asked.seqs), False
    if past.ending is Ending.LEFT and past.ttft_s is not None:
        return max(1, past.chunks // asked.seqs), False  # as far as its caller has read it
    guess = typical.get(past.traffic_class, asked.max_tokens or UNKNOWN_OUTPUT_TOKENS)
    return max(1, guess if asked.max_tokens is None else min(guess, asked.max_tokens)), True


def _patience(past: RequestLine) -> Patience:
    """Return how long a caller waits: one that left before the first token leaves as early again."""
    if past.ending is Ending.LEFT and past.ttft_s is None:
        return Patience(past.total_s, is_for_all=not past.stream)
    return Patience()
