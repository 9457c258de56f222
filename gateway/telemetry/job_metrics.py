"""Job metrics: the queue as last polled, and the attempts of this process's worker.

A lane is a model and a class of the configuration, so labels are bounded.
"""

from collections.abc import Callable, Collection, Iterator
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from gateway.core.jobs import AttemptEnd, AttemptOutcome, Beginning, JobOutcome, JobStatus, QueueSnapshot
from gateway.telemetry.series import AtScrape, Before

QUEUE_BUCKETS_S = (0.1, 0.5, 1, 5, 15, 60, 300, 900, 1800, 3600, 7200, 14400, 28800, 57600, 86400)
DURATION_BUCKETS_S = (1, 5, 15, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 57600, 86400)
"""Buckets of waits and durations of jobs. A choice: from jobs served at once to those that wait for a night
or a day."""


ENDED_BY_WORKERS = (JobStatus.COMPLETED, JobStatus.INCOMPLETE, JobStatus.FAILED)
"""The statuses that an attempt may give a job."""


class JobMetrics:
    """Metrics of jobs."""

    def __init__(
        self,
        registry: CollectorRegistry,
        *,
        lanes: Callable[[], Collection[str]],
        snapshot: Callable[[], QueueSnapshot | None],
        now: Callable[[], float],
    ) -> None:
        """Register with `registry`; gauges are evaluated when scraped.

        Args:
            registry: Where to register.
            lanes: Returns the lanes of the configuration.
            snapshot: Returns the latest snapshot of the queue; None before the first one.
            now: Returns monotonic seconds.
        """
        self._lanes = lanes
        registry.register(Before(self._begin))
        counter, histogram = partial(Counter, registry=registry), partial(Histogram, registry=registry)
        self.attempts = counter(
            "gateway_job_attempts",
            "Finished attempts at jobs by this process's worker, by how they began and ended.",
            ("lane", "beginning", "outcome"),
        )
        self.ended = counter(
            "gateway_jobs_ended", "Jobs ended by this process's worker, by status.", ("lane", "status")
        )
        self.queued = histogram(
            "gateway_job_queue_seconds",
            "Time from a job's acceptance until a worker first takes it, in seconds.",
            ("lane",),
            buckets=QUEUE_BUCKETS_S,
        )
        self.duration = histogram(
            "gateway_job_duration_seconds",
            "Time from a job's acceptance until a worker ends it, in seconds.",
            ("lane",),
            buckets=DURATION_BUCKETS_S,
        )
        registry.register(AtScrape(lambda: _queue(snapshot(), lanes(), now())))

    def _begin(self) -> None:
        """Start at zero for every lane: a series that appears with its first event shows no increase."""
        for lane in self._lanes():
            for beginning in Beginning:
                for outcome in AttemptOutcome:
                    self.attempts.labels(lane, beginning.value, outcome.value)
            for status in ENDED_BY_WORKERS:
                self.ended.labels(lane, status.value)

    def attempt_ended(self, end: AttemptEnd) -> None:
        """Count a finished attempt at a job."""
        lane = end.job.new.lane
        self.attempts.labels(lane, end.beginning.value, end.outcome.value).inc()
        if end.job.attempt == 1:
            self.queued.labels(lane).observe(end.waited_s)
        if end.outcome in (AttemptOutcome.ENDED, AttemptOutcome.POISONED):
            self.ended.labels(lane, (end.status or JobStatus.FAILED).value).inc()
            self.duration.labels(lane).observe(end.lasted_s)


def _queue(snapshot: QueueSnapshot | None, lanes: Collection[str], now: float) -> Iterator[Metric]:
    """Yield the gauges of queued and running jobs in the store."""
    jobs = GaugeMetricFamily(
        "gateway_jobs", "Jobs in the store that have not ended, by status.", labels=["lane", "status"]
    )
    oldest = GaugeMetricFamily(
        "gateway_jobs_oldest_wait_seconds",
        "Time since the oldest waiting job was accepted, in seconds; 0 if none waits.",
        labels=["lane"],
    )
    drained = GaugeMetricFamily(
        "gateway_jobs_drained", "1 while workers take no jobs, by an operator's order."
    )
    away = GaugeMetricFamily(
        "gateway_jobs_store_away", "1 while the job store does not answer, or refuses to write."
    )
    totals = CounterMetricFamily(
        "gateway_store_jobs_ended",
        "Jobs that have ended in the store, whoever ended them, by outcome. "
        "Every process on the store reports the same value.",
        labels=["lane", "outcome"],
    )
    if snapshot is not None:
        away.add_metric([], float(snapshot.is_away))
    # Until the store has responded, a zero would be wrong: its totals would seem to rise from there.
    if snapshot is not None and snapshot.at is not None:
        since_s = now - snapshot.at
        seen = {lane.name: lane for lane in snapshot.queue.lanes}
        for name in sorted({*lanes, *seen}):
            lane = seen.get(name)
            jobs.add_metric([name, JobStatus.QUEUED.value], lane.queued if lane else 0)
            jobs.add_metric([name, JobStatus.IN_PROGRESS.value], lane.in_progress if lane else 0)
            oldest_s = lane.oldest_s if lane else None
            oldest.add_metric([name], 0.0 if oldest_s is None else oldest_s + since_s)
        # Zeros are exported too: a series that appears with its first event shows no increase.
        for name in sorted({*lanes, *(lane for lane, _ in snapshot.totals)}):
            for outcome in JobOutcome:
                totals.add_metric([name, outcome.value], snapshot.totals.get((name, outcome.value), 0))
        drained.add_metric([], float(snapshot.queue.drained_at is not None))
    yield from (jobs, oldest, drained, away, totals)
