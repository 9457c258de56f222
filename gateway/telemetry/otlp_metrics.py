"""Pushes metrics by OTLP over HTTP: a translation of the Prometheus page.

Both use one registry, so they always agree. Names, labels and units are those of the Prometheus page.
"""

import asyncio
import logging
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import groupby

import anyio
from opentelemetry.exporter.otlp.proto.http import metric_exporter
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExporter,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from gateway import __version__, threads
from gateway.events import about
from gateway.ports import Clock
from gateway.telemetry.otlp_session import session
from gateway.telemetry.receiver_status import ReceiverStatus
from gateway.telemetry.series import Collected

log = logging.getLogger("gateway.telemetry")

_SCOPE = InstrumentationScope("gemma-gateway", __version__)


def sender(endpoint: str, headers: Mapping[str, str]) -> MetricExporter:
    """Return an exporter to the base URL `endpoint`, with `headers`; `/v1/metrics` is appended."""
    return OTLPMetricExporter(
        f"{endpoint.rstrip('/')}/v1/metrics", headers=dict(headers), timeout=10, session=session()
    )


class MetricsPush:
    """Sends a registry to an OTLP receiver periodically."""

    def __init__(
        self,
        registry: CollectorRegistry,
        sender: MetricExporter,
        service: str,
        interval_s: float,
        clock: Clock,
    ) -> None:
        """Send through `sender` every `interval_s`."""
        self._registry = registry
        self._clock = clock
        self._sender = sender
        self._resource = Resource.create({"service.name": service, "service.version": __version__})
        self._interval_s = interval_s
        self._since_ns = self._now_ns()
        self._receiver_status = ReceiverStatus(metric_exporter.__name__, on_away=_say_away, on_back=_say_back)

    async def run(self) -> None:
        """Send until cancelled. Values are cumulative, so after a failure the next export catches up."""
        while True:
            await anyio.sleep(self._interval_s)
            self._receiver_status.note(await self._sent(Collected(self._registry), self._now_ns()))

    async def _sent(self, found: Collected, now_ns: int) -> bool:
        """Export, and return whether the receiver has accepted it."""
        send = partial(self._send, found, now_ns)
        try:
            return await threads.in_own(asyncio.get_running_loop(), "OTLP metrics", send)
        except OSError as error:  # no thread could be started
            self._receiver_status.explain(str(error.strerror))
            return False

    def _send(self, found: Collected, now_ns: int) -> bool:
        data = metrics_data(found, self._resource, self._since_ns, now_ns)
        try:
            return self._sender.export(data) is MetricExportResult.SUCCESS
        except Exception as error:  # noqa: BLE001 - some exporters raise where an answer is late: that ends nothing
            self._receiver_status.explain(str(error))
            return False

    def _now_ns(self) -> int:
        return int(self._clock.wall() * 1e9)

    def close(self) -> None:
        """Shut down."""
        self._sender.shutdown()
        self._receiver_status.close()


def _say_away(reason: str) -> None:
    log.warning(
        "the OTLP receiver does not accept metrics (%s); the gateway keeps trying",
        reason,
        extra=about("metrics_not_taken", reason=reason),
    )


def _say_back() -> None:
    log.info("the OTLP receiver accepts metrics again", extra=about("metrics_taken"))


def metrics_data(registry: Collector, resource: Resource, since_ns: int, now_ns: int) -> MetricsData:
    """Convert a registry, counted since `since_ns`, as of `now_ns` (epoch nanoseconds)."""
    metrics = [metric for family in registry.collect() for metric in _metrics(family, since_ns, now_ns)]
    scope = ScopeMetrics(scope=_SCOPE, metrics=metrics, schema_url="")
    return MetricsData([ResourceMetrics(resource=resource, scope_metrics=[scope], schema_url="")])


def _metrics(family: Family, since_ns: int, now_ns: int) -> Iterator[Metric]:
    name, data = family.name, _data(family, since_ns, now_ns)
    if data is None or not data.data_points:
        return
    unit = "s" if name.endswith("_seconds") else "1" if name.endswith("_ratio") else ""
    if family.type == "counter":
        name += "_total"
    yield Metric(name=name, description=family.documentation, unit=unit, data=data)


def _data(family: Family, since_ns: int, now_ns: int) -> Sum | Gauge | Histogram | None:
    match family.type:
        case "counter":
            points = _numbers(_named(family, "_total"), since_ns, now_ns)
            return Sum(points, AggregationTemporality.CUMULATIVE, is_monotonic=True)
        case "gauge":
            return Gauge(_numbers(_named(family, ""), since_ns, now_ns))
        case "histogram":
            histograms = list(_histograms(family, since_ns, now_ns))
            return Histogram(histograms, AggregationTemporality.CUMULATIVE)
    return None


def _named(family: Family, suffix: str) -> Iterator[Sample]:
    return (sample for sample in family.samples if sample.name == family.name + suffix)


def _numbers(samples: Iterable[Sample], since_ns: int, now_ns: int) -> list[NumberDataPoint]:
    return [
        NumberDataPoint(
            attributes=sample.labels,
            start_time_unix_nano=since_ns,
            time_unix_nano=now_ns,
            value=float(sample.value),
        )
        for sample in samples
    ]


def _histograms(family: Family, since_ns: int, now_ns: int) -> Iterator[HistogramDataPoint]:
    def labels(sample: Sample) -> list[tuple[str, str]]:
        return sorted((name, value) for name, value in sample.labels.items() if name != "le")

    for key, grouped in groupby(family.samples, labels):
        samples = list(grouped)
        buckets = [sample for sample in samples if sample.name.endswith("_bucket")]
        below = [int(sample.value) for sample in buckets]
        yield HistogramDataPoint(
            attributes=dict(key),
            start_time_unix_nano=since_ns,
            time_unix_nano=now_ns,
            count=below[-1],
            sum=next(  # OTLP requires no sum if values may be negative
                (sample.value for sample in samples if sample.name.endswith("_sum")),
                None,  # type: ignore[arg-type]
            ),
            bucket_counts=[one - before for one, before in zip(below, [0, *below], strict=False)],
            explicit_bounds=[float(sample.labels["le"]) for sample in buckets[:-1]],
            min=None,  # type: ignore[arg-type]  # not known, which the protocol allows
            max=None,  # type: ignore[arg-type]
        )
