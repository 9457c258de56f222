"""Metrics and log lines of jobs, as Prometheus and a person read them."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from gateway.core.jobs import (
    AttemptEnd,
    AttemptOutcome,
    Beginning,
    Job,
    JobError,
    JobStatus,
    Lane,
    NewJob,
    Queue,
    QueueSnapshot,
)
from gateway.telemetry import logs
from gateway.telemetry.job_metrics import JobMetrics

LANE = "m/chat"
NOW = 1_000_000.0


def end(outcome: AttemptOutcome, *, attempt: int = 1, failures: int = 0, **changes: Any) -> AttemptEnd:
    """Return an attempt at a job that was taken 7,000 s after its acceptance, and took 20 s."""
    job = Job(
        NewJob(id="resp_1", key="alice", lane=LANE, body=b"secret"),
        JobStatus.IN_PROGRESS,
        attempt=attempt,
        failures=failures,
        created_at=NOW,
        started_at=NOW + 7_000,
    )
    return AttemptEnd(
        **{"job": job, "outcome": outcome, "beginning": Beginning.NEW, "took_s": 20.0, **changes}
    )


class World:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.snapshot: QueueSnapshot | None = None
        self.metrics = JobMetrics(
            self.registry, lanes=lambda: [LANE, "m/push"], snapshot=lambda: self.snapshot, now=lambda: NOW
        )

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, labels)


@pytest.fixture
def world() -> Iterator[World]:
    yield World()


def test_gauges_are_of_the_last_look_and_of_every_lane(world: World) -> None:
    assert world.value("gateway_jobs", lane=LANE, status="queued") is None
    world.snapshot = QueueSnapshot(
        Queue((Lane(LANE, 3, 2, oldest_s=80.0), Lane("old/lane", 1, 0, oldest_s=0.0)), drained_at=1.0),
        totals={(LANE, "completed"): 7, ("gone lane", "expired"): 1},
        at=NOW - 10.0,
    )
    assert world.value("gateway_store_jobs_ended_total", lane=LANE, outcome="completed") == 7
    assert world.value("gateway_store_jobs_ended_total", lane="gone lane", outcome="expired") == 1
    assert world.value("gateway_store_jobs_ended_total", lane="m/push", outcome="poisoned") == 0
    for lane, queued, running, waits_s in (
        (LANE, 3, 2, 90.0),
        ("m/push", 0, 0, 0.0),
        ("old/lane", 1, 0, 10.0),
    ):
        assert world.value("gateway_jobs", lane=lane, status="queued") == queued
        assert world.value("gateway_jobs", lane=lane, status="in_progress") == running
        assert world.value("gateway_jobs_oldest_wait_seconds", lane=lane) == waits_s
    assert (world.value("gateway_jobs_drained"), world.value("gateway_jobs_store_away")) == (1, 0)
    world.snapshot = replace(world.snapshot, queue=Queue(), is_away=True)
    assert (world.value("gateway_jobs_drained"), world.value("gateway_jobs_store_away")) == (0, 1)


def test_of_a_store_that_never_answered_only_that_is_known(world: World) -> None:
    world.snapshot = QueueSnapshot(is_away=True)
    assert world.value("gateway_jobs_store_away") == 1
    assert world.value("gateway_jobs_drained") is None
    assert world.value("gateway_jobs", lane=LANE, status="queued") is None
    assert world.value("gateway_store_jobs_ended_total", lane=LANE, outcome="poisoned") is None


def test_counters_are_there_before_their_first_event(world: World) -> None:
    generate_latest(world.registry)  # a first scrape; a query cannot see a rise from nothing
    for lane in (LANE, "m/push"):
        for status in ("completed", "incomplete", "failed"):
            assert world.value("gateway_jobs_ended_total", lane=lane, status=status) == 0
        for one in product(Beginning, AttemptOutcome):
            labels = dict(zip(("beginning", "outcome"), one, strict=True))
            assert world.value("gateway_job_attempts_total", lane=lane, **labels) == 0


def test_a_job_that_is_given_up_has_ended(world: World) -> None:
    world.metrics.attempt_ended(end(AttemptOutcome.POISONED))
    assert world.value("gateway_jobs_ended_total", lane=LANE, status="failed") == 1
    assert world.value("gateway_job_duration_seconds_count", lane=LANE) == 1


def test_attempts_are_counted_and_hours_are_told_apart(world: World) -> None:
    world.metrics.attempt_ended(end(AttemptOutcome.FAILED))
    world.metrics.attempt_ended(
        end(AttemptOutcome.ENDED, attempt=2, beginning=Beginning.CONTINUED, status=JobStatus.COMPLETED)
    )
    for beginning, outcome in (("new", "failed"), ("continued", "ended")):
        assert world.value("gateway_job_attempts_total", lane=LANE, beginning=beginning, outcome=outcome) == 1
    assert world.value("gateway_jobs_ended_total", lane=LANE, status="completed") == 1
    assert world.value("gateway_job_queue_seconds_count", lane=LANE) == 1
    for name, total_s in (("queue", 7_000), ("duration", 7_020)):
        assert world.value(f"gateway_job_{name}_seconds_sum", lane=LANE) == total_s
        assert world.value(f"gateway_job_{name}_seconds_bucket", lane=LANE, le="3600.0") == 0
        assert world.value(f"gateway_job_{name}_seconds_bucket", lane=LANE, le="7200.0") == 1
        assert world.value(f"gateway_job_{name}_seconds_bucket", lane=LANE, le="86400.0") == 1


@pytest.mark.parametrize(
    ("ended", "level", "line"),
    [
        (
            end(AttemptOutcome.ENDED, status=JobStatus.COMPLETED),
            "INFO",
            "job resp_1: completed, m/chat, attempt 1, taken after 7000.0 s, took 20.0 s",
        ),
        (
            end(
                AttemptOutcome.ENDED, status=JobStatus.FAILED, error=JobError("invalid_request", "your words")
            ),
            "INFO",
            "job resp_1: failed (invalid_request), m/chat, attempt 1, taken after 7000.0 s, took 20.0 s",
        ),
        (
            end(AttemptOutcome.POISONED, attempt=3, failures=2),
            "WARNING",
            "job resp_1: failed (job_poisoned), m/chat, attempt 3, taken after 7000.0 s, took 20.0 s",
        ),
        (end(AttemptOutcome.FAILED), None, None),
        (end(AttemptOutcome.RETURNED), None, None),
        (end(AttemptOutcome.LOST), None, None),
    ],
    ids=["completed", "failed", "poisoned", "tried-again", "returned", "lost"],
)
def test_a_job_that_has_ended_has_one_line(
    caplog: pytest.LogCaptureFixture, ended: AttemptEnd, level: str | None, line: str | None
) -> None:
    with caplog.at_level(logging.DEBUG):
        logs.job_attempt_ended(ended)
    assert [(record.levelname, record.message) for record in caplog.records] == (
        [] if line is None else [(level, line)]
    )
    for record in caplog.records:
        fields = record.fields  # type: ignore[attr-defined]
        assert (fields["key"], fields["failures"]) == (
            "alice",
            ended.job.attempt if level == "WARNING" else 0,
        )
        assert "words" not in str(fields) + record.message
