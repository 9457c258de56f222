"""Statistics of requests, recorded or simulated."""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from math import ceil, inf

from gateway.core.errors import InvalidRequest
from gateway.core.policy import Policy
from gateway.core.usage import Ending
from gateway.core.value import valueclass
from gateway.core.virtual_fleet import Fate
from gateway.replay.reading import Entry
from gateway.replay.simulating import Past, Run

ALL = "(all)"
"""The row for all classes together; not a valid name of a class."""


@valueclass(frozen=True, slots=True)
class Figures:
    """Statistics of the requests of a class. Seconds; None if there is nothing to measure.

    Attributes:
        requests: Number of requests.
        shed_share: Share refused for load.
        wait_p50_s, wait_p95_s: From the decision to a slot, of those that got one.
        ttft_p50_s, ttft_p95_s: From arrival to the first token, of streamed answers.
        late_share: Share of admitted streams whose first token came after the class's `ttft_target_s`, or
            never.
        total_p50_s, total_p95_s: From arrival to the end, of completed requests.
        tokens_per_s: Output tokens per second, from the first arrival to the last end.
    """

    requests: int
    shed_share: float
    wait_p50_s: float | None
    wait_p95_s: float | None
    ttft_p50_s: float | None
    ttft_p95_s: float | None
    late_share: float | None
    total_p50_s: float | None
    total_p95_s: float | None
    tokens_per_s: float


@valueclass(frozen=True, slots=True)
class Side:
    """A column of the comparison: figures by class, and requests served by backend."""

    classes: Mapping[str, Figures]
    served: Mapping[str, int]


def quantile(values: Sequence[float], share: float) -> float | None:
    """Return a quantile of the values, to the millisecond; None if there are none."""
    ordered = sorted(values)
    return round(ordered[ceil(share * len(ordered)) - 1], 3) if ordered else None


@valueclass(frozen=True, slots=True)
class _Outcome:
    """The result of one request, recorded or simulated."""

    traffic_class: str
    is_shed: bool
    is_streamed: bool
    wait_s: float | None
    ttft_s: float | None
    total_s: float | None
    tokens: int
    ended_at: float
    backend: str


def _side(outcomes: Sequence[_Outcome], targets: Callable[[str], float], first_at: float) -> Side:
    by_class: dict[str, list[_Outcome]] = defaultdict(list)
    for one in outcomes:
        by_class[one.traffic_class].append(one)
        by_class[ALL].append(one)
    served = Counter(one.backend for one in outcomes if one.backend)
    span_s = max((one.ended_at for one in outcomes), default=first_at) - first_at
    ordered = sorted(by_class, key=lambda name: (name == ALL, name))
    figures = {name: _figures(by_class[name], targets, span_s) for name in ordered}
    return Side(figures, dict(sorted(served.items())))


def _figures(outcomes: Sequence[_Outcome], targets: Callable[[str], float], span_s: float) -> Figures:
    """Return the statistics of one or more requests, which came and ended within `span_s`."""
    waits = [one.wait_s for one in outcomes if one.wait_s is not None]
    totals = [one.total_s for one in outcomes if one.total_s is not None]
    streams = [one for one in outcomes if one.is_streamed and not one.is_shed]
    firsts = [one.ttft_s for one in streams if one.ttft_s is not None]
    late = sum(one.ttft_s is None or one.ttft_s > targets(one.traffic_class) for one in streams)
    return Figures(
        requests=len(outcomes),
        shed_share=round(sum(one.is_shed for one in outcomes) / len(outcomes), 4),
        wait_p50_s=quantile(waits, 0.5),
        wait_p95_s=quantile(waits, 0.95),
        ttft_p50_s=quantile(firsts, 0.5),
        ttft_p95_s=quantile(firsts, 0.95),
        late_share=round(late / len(streams), 4) if streams else None,
        total_p50_s=quantile(totals, 0.5),
        total_p95_s=quantile(totals, 0.95),
        tokens_per_s=round(sum(one.tokens for one in outcomes) / span_s, 2) if span_s > 0 else 0.0,
    )


def targets(policy: Policy) -> Callable[[str], float]:
    """Return a function that returns the target of a class for its first token, in seconds."""
    found = {one.name: one.waiting.ttft_target_s for _, one in policy.classes()}
    return lambda name: found.get(name, inf)


def recorded(decided: Sequence[Entry], targets: Callable[[str], float]) -> Side:
    """Return the statistics of the requests in a log, except those refused for their content."""

    def outcome(entry: Entry) -> _Outcome:
        past = entry.past
        is_complete = past.ending is Ending.COMPLETED
        return _Outcome(
            traffic_class=past.traffic_class,
            is_shed=past.ending is Ending.SHED,
            is_streamed=past.stream,
            wait_s=past.wait_s if past.backend else None,
            ttft_s=past.ttft_s,
            total_s=past.total_s if is_complete else None,
            tokens=past.tokens_out or 0,
            ended_at=past.at + past.total_s,
            backend=past.backend,
        )

    own = [one for one in decided if one.past.traffic_class and one.past.ending is not Ending.REJECTED]
    return _side([*map(outcome, own)], targets, decided[0].past.at if decided else 0.0)


def simulated(run: Run) -> Side:
    """Return the statistics of a simulated run; see `recorded`."""

    def outcome(fate: Fate[Past]) -> _Outcome:
        past, is_done = fate.arrival, fate.done_at is not None
        ended_at = fate.done_at if fate.done_at is not None else past.at
        return _Outcome(
            traffic_class=run.classes[past.id],
            is_shed=bool(fate.refused),
            is_streamed=past.asked.stream,
            wait_s=None if fate.sent_at is None else fate.sent_at - past.at,
            ttft_s=fate.ttft_s,
            total_s=ended_at - past.at if is_done else None,
            tokens=fate.output_tokens * past.seqs if is_done else 0,
            ended_at=ended_at,
            backend=fate.backend,
        )

    let_in = [one for one in run.fates if one.arrival.id in run.classes and one.refused not in _MISFITS]
    first_at = run.fates[0].arrival.at if run.fates else 0.0
    return _side([*map(outcome, let_in)], targets(run.policy), first_at)


_MISFITS = frozenset(
    {"400", "context_length_exceeded", "unsupported_modality", "too_many_choices", InvalidRequest.code}
)
"""Refusals that are unrelated to load."""


def same_pool_share(run: Run) -> float | None:
    """Return the share of served requests that a run serves in the same pool; None if there are none."""
    pools = run.policy.pools
    both = [
        past.pool in pools and fate.backend in pools[past.pool].backends
        for fate in run.fates
        for past in [fate.arrival.entry.past]
        if fate.backend and past.pool
    ]
    return round(sum(both) / len(both), 4) if both else None
