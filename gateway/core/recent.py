"""History of the last minutes: latency percentiles per backend, and flows of requests. Pure.

Time is divided into slices. A slice holds only counts per backend and class, so that memory depends on the
policy and not on the traffic. Latencies are counted in histograms with eight bins per doubling (9 % wide), so
a percentile is off by 4.5 % at most.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import floor, inf, log2

from gateway.core.usage import Ending, RequestRecord
from gateway.core.value import valueclass

SLICE_S = 10.0
"""Length of a slice of the history, in seconds. A choice: the resolution of the console's lines."""

SLICES = 60
"""Number of slices kept: ten minutes. A choice; what is older is for Prometheus."""

SPAN_SLICES = 3
"""Number of slices behind one point of a line, up to and including its own: half a minute. A choice: smooth,
and soon right."""

FLOW_SLICES = 30
"""Number of slices over which flows are counted: five minutes. A choice, as above."""

BINS_PER_DOUBLING = 8
"""Resolution of durations. A choice: a bin is 9 % wide, so a quantile is at most 5 % off."""

_LEAST_S, _MOST_S = 1e-4, 1e5
"""Shorter and longer durations count as these. A choice that bounds the number of bins to 240."""


class DurationHistogram:
    """Histogram of durations, bounded to 240 bins between 0.1 ms and a day."""

    __slots__ = ("_bins",)

    def __init__(self) -> None:
        """Start empty."""
        self._bins: dict[int, int] = {}

    def add(self, seconds: float) -> None:
        """Count one duration."""
        if not _LEAST_S <= seconds <= _MOST_S:
            seconds = min(max(seconds, _LEAST_S), _MOST_S)
        bin_number = floor(BINS_PER_DOUBLING * log2(seconds))
        self._bins[bin_number] = self._bins.get(bin_number, 0) + 1


def quantiles(histograms: Iterable[DurationHistogram]) -> tuple[float, ...] | None:
    """Return p50 and p95 of the sum of histograms, or None if it is empty."""
    bins: dict[int, int] = {}
    for one in histograms:
        for number, count in one._bins.items():
            bins[number] = bins.get(number, 0) + count
    if not bins:
        return None
    in_order, total = sorted(bins), sum(bins.values())
    found = []
    for share in (0.5, 0.95):
        below = 0
        for number in in_order:
            below += bins[number]
            if below >= share * total:
                break
        found.append(2 ** ((number + 0.5) / BINS_PER_DOUBLING))
    return tuple(found)


@dataclass(frozen=True, slots=True, order=True)
class Flow:
    """A kind of request.

    Attributes:
        model, traffic_class: From the decision; "" if none was made.
        backend: The backend that served them; "" if none did.
        ending: How they ended.
    """

    model: str
    traffic_class: str
    backend: str
    ending: Ending


@dataclass(slots=True)
class _Slice:
    number: int
    ttft: defaultdict[str, DurationHistogram] = field(default_factory=lambda: defaultdict(DurationHistogram))
    tpot: defaultdict[str, DurationHistogram] = field(default_factory=lambda: defaultdict(DurationHistogram))
    flows: dict[tuple[str, str, str, Ending], int] = field(default_factory=dict)  # by the fields of a `Flow`


@valueclass(frozen=True, slots=True)
class _Point:
    """One point of a backend's lines: p50 and p95, None without data."""

    ttft: tuple[float, ...] | None = None
    tpot: tuple[float, ...] | None = None


_NO_POINT = _Point()


@valueclass(frozen=True, slots=True)
class Lines:
    """The percentiles of one backend in seconds, per slice, oldest first; None where no request ended.

    Attributes:
        ttft_p50, ttft_p95: Time to first token from the request's arrival, as the caller sees it.
        tpot_p50, tpot_p95: Time per output token after the first.
    """

    ttft_p50: tuple[float | None, ...]
    ttft_p95: tuple[float | None, ...]
    tpot_p50: tuple[float | None, ...]
    tpot_p95: tuple[float | None, ...]


@valueclass(frozen=True, slots=True)
class History:
    """History of the last minutes.

    Attributes:
        lines: Percentiles per backend that has streamed an answer.
        flows: How many requests of each kind ended in the last `flow_s` seconds.
        flow_s: See `flows`.
    """

    lines: Mapping[str, Lines]
    flows: Sequence[tuple[Flow, int]]
    flow_s: float


class Recent:
    """Records the last minutes of one process."""

    def __init__(self) -> None:
        """Start empty."""
        self._slices: deque[_Slice] = deque(maxlen=SLICES)
        self._current = _Slice(-1)  # the newest of them, once there is one
        self._current_until = -inf
        self._points: dict[int, Mapping[str, _Point]] = {}  # of completed slices

    def note(self, record: RequestRecord) -> None:
        """Count a request that has ended."""
        current = self._current if record.ended_at < self._current_until else self._next(record.ended_at)
        decision, backend = record.decision, record.backend
        model, name = ("", "") if decision is None else (decision.model, decision.traffic_class)
        flow = (model, name, backend, record.ending)
        current.flows[flow] = current.flows.get(flow, 0) + 1
        if not backend or record.first_byte_at is None or not record.stream:
            return  # a non-streaming answer shows no first token before its end
        current.ttft[backend].add(record.first_byte_at - record.received_at)
        if (tpot_s := record.tpot_s) is not None:
            current.tpot[backend].add(tpot_s)

    def history(self, now: float) -> History:
        """Return the history up to `now` (monotonic seconds)."""
        newest = int(now // SLICE_S)
        held = {one.number: one for one in self._slices if one.number > newest - SLICES}
        numbers = range(newest - SLICES + 1, newest + 1)
        points = {number: self._points.get(number) or _points(held, number) for number in numbers}
        self._points = {number: found for number, found in points.items() if number < newest}
        names = sorted({name for one in held.values() for name in one.ttft})
        flows: dict[tuple[str, str, str, Ending], int] = {}
        for one in held.values():
            if one.number > newest - FLOW_SLICES:
                for kind, count in one.flows.items():
                    flows[kind] = flows.get(kind, 0) + count
        return History(
            lines={
                name: _lines([points[number].get(name, _NO_POINT) for number in numbers]) for name in names
            },
            flows=[(Flow(*kind), count) for kind, count in sorted(flows.items())],
            flow_s=FLOW_SLICES * SLICE_S,
        )

    def _close(self, number: int) -> None:
        """Compute the points of a completed slice, so that `history` does not have to compute them all."""
        held = {one.number: one for one in self._slices}
        self._points = {one: found for one, found in self._points.items() if one > number - SLICES}
        self._points[number] = _points(held, number)

    def _next(self, at: float) -> _Slice:
        """Return a new slice, for `at`, which is not before the end of the current one."""
        if self._slices:
            self._close(self._current.number)
        number = int(at // SLICE_S)
        self._current = _Slice(number)
        self._current_until = (number + 1) * SLICE_S
        self._slices.append(self._current)
        return self._current


def _points(held: Mapping[int, _Slice], number: int) -> Mapping[str, _Point]:
    """Return the point of each backend for a slice."""
    span = [held[one] for one in range(number - SPAN_SLICES + 1, number + 1) if one in held]
    found = {}
    for name in {name for one in span for name in one.ttft}:
        ttft = [one.ttft[name] for one in span if name in one.ttft]
        tpot = [one.tpot[name] for one in span if name in one.tpot]
        found[name] = _Point(quantiles(ttft), quantiles(tpot))
    return found


def _lines(points: Sequence[_Point]) -> Lines:
    return Lines(
        ttft_p50=tuple(None if point.ttft is None else point.ttft[0] for point in points),
        ttft_p95=tuple(None if point.ttft is None else point.ttft[1] for point in points),
        tpot_p50=tuple(None if point.tpot is None else point.tpot[0] for point in points),
        tpot_p95=tuple(None if point.tpot is None else point.tpot[1] for point in points),
    )
