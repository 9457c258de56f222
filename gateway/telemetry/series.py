"""Fast counters and histograms for per-request metrics, exported through prometheus_client.

prometheus_client's own take a lock per value and scan the buckets one by one, which was a third of the cost
of finishing a request. These may be used by the event loop's thread only; anything counted rarely or in
another thread uses prometheus_client's.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from math import inf

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from gateway.clock import SystemClock

Labels = tuple[str, ...]

_CLOCK = SystemClock()


class Before(Collector):
    """No metric: does something before the metrics that are registered later are collected."""

    def __init__(self, act: Callable[[], None]) -> None:
        """Do this."""
        self._act = act

    def describe(self) -> Iterable[Metric]:
        """Return nothing; without this, the registry would collect it when it is registered."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Do it, and yield nothing."""
        self._act()
        yield from ()


class AtScrape(Collector):
    """Metrics whose values are read when scraped."""

    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        """Have `read` return them."""
        self._read = read

    def collect(self) -> Iterable[Metric]:
        """Return them as they are now."""
        return self._read()


class Collected(Collector):
    """The metrics of a registry at one moment. They may be read and written in any thread."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """Collect them now."""
        self._families = list(registry.collect())

    def collect(self) -> Iterator[Metric]:
        """Yield them."""
        yield from self._families

    def page(self) -> bytes:
        """Write the Prometheus page."""
        return generate_latest(self)


class _Family(Metric):
    """A metric whose samples are worked out when they are read: those of 200 backends are 87,000."""

    def __init__(
        self, name: str, documentation: str, kind: str, work_out: Callable[[], Iterator[Sample]]
    ) -> None:
        """`work_out` yields the samples, in any thread: it reads nothing that changes."""
        super().__init__(name, documentation, kind)
        del self.__dict__["samples"]
        self._work_out = work_out

    @cached_property
    def samples(self) -> list[Sample]:  # type: ignore[override]  # there, an attribute
        """The samples."""
        return list(self._work_out())


class Counters(Collector):
    """A counter. Label values are given in order, and must be bounded."""

    def __init__(
        self,
        name: str,
        documentation: str,
        labels: Sequence[str],
        *,
        registry: CollectorRegistry,
    ) -> None:
        """Register with `registry`."""
        self._name, self._documentation, self._labelnames = name, documentation, tuple(labels)
        self._totals: dict[Labels, float] = {}
        self._created: dict[Labels, float] = {}
        registry.register(self)

    def add(self, labels: Labels, amount: float = 1) -> None:
        """Increment the counter.

        Raises:
            ValueError: `amount` is negative.
        """
        if amount < 0:
            raise ValueError(f"{self._name} cannot go down, by {amount}")
        total = self._totals.get(labels)
        if total is None:
            total = self._totals[labels] = 0.0
            self._created[labels] = _CLOCK.wall()
        self._totals[labels] = total + amount

    def collect(self) -> Iterator[Metric]:
        """Yield the metric for Prometheus."""
        found = [(labels, total, self._created[labels]) for labels, total in self._totals.items()]

        def samples() -> Iterator[Sample]:
            shows_created = _shows_created()
            for labels, total, created in found:
                named = _named(self._labelnames, labels)
                yield Sample(f"{self._name}_total", named, total)
                if shows_created:
                    yield Sample(f"{self._name}_created", named, created)

        yield _Family(self._name, self._documentation, "counter", samples)


class _Buckets:
    """The values of one set of labels: counts by bucket, and their sum."""

    __slots__ = ("counts", "created", "sum")

    def __init__(self, buckets: int, created: float) -> None:
        self.counts = [0] * buckets
        self.sum = 0.0
        self.created = created


class Histograms(Collector):
    """A histogram. Label values are given in order, and must be bounded."""

    def __init__(
        self,
        name: str,
        documentation: str,
        labels: Sequence[str] = (),
        *,
        buckets: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        """Register with `registry`. `buckets`: upper bounds, ascending."""
        self._name, self._documentation, self._labelnames = name, documentation, tuple(labels)
        self._bounds = (*buckets, inf)
        self._les = [floatToGoString(bound) for bound in self._bounds]  # type: ignore[no-untyped-call]
        self._spreads: dict[Labels, _Buckets] = {}
        if not labels:
            self._begin(())  # without labels, its only series exists before the first value
        registry.register(self)

    def observe(self, labels: Labels, value: float) -> None:
        """Record a value."""
        spread = self._spreads.get(labels) or self._begin(labels)
        spread.sum += value
        spread.counts[bisect_left(self._bounds, value)] += 1

    def observe_all(self, labels: Labels, values: Sequence[float]) -> None:
        """Record one or more values."""
        spread = self._spreads.get(labels) or self._begin(labels)
        spread.sum += sum(values)
        bounds, counts = self._bounds, spread.counts
        for value in values:
            counts[bisect_left(bounds, value)] += 1

    def collect(self) -> Iterator[Metric]:
        """Yield the metric for Prometheus."""
        found = [(labels, one.counts.copy(), one.sum, one.created) for labels, one in self._spreads.items()]

        def samples() -> Iterator[Sample]:
            shows_created = _shows_created()
            for labels, counts, total, created in found:
                named = _named(self._labelnames, labels)
                below = list(accumulate(counts))
                for le, count in zip(self._les, below, strict=True):
                    yield Sample(f"{self._name}_bucket", {**named, "le": le}, count)
                yield Sample(f"{self._name}_count", named, below[-1])
                if self._bounds[0] >= 0:  # Prometheus cannot use a sum that may decrease
                    yield Sample(f"{self._name}_sum", named, total)
                if shows_created:
                    yield Sample(f"{self._name}_created", named, created)

        yield _Family(self._name, self._documentation, "histogram", samples)

    def _begin(self, labels: Labels) -> _Buckets:
        spread = self._spreads[labels] = _Buckets(len(self._bounds), _CLOCK.wall())
        return spread


def _named(names: Labels, values: Labels) -> dict[str, str]:
    # An enum member equals its value as a dict key; on the page it must be the plain value.
    return {name: str(value) for name, value in zip(names, values, strict=True)}


def _shows_created() -> bool:
    """Return whether prometheus_client exports creation times, as it does by default."""
    (family,) = Counter("gateway_probe", "", registry=None).collect()
    return any(sample.name.endswith("_created") for sample in family.samples)
