"""Metrics on their way to a receiver that does as it likes. What is sent: tests/e2e/test_tracing.py."""

import logging
from typing import Any

import anyio
import pytest
from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult, MetricsData
from prometheus_client import CollectorRegistry

from gateway.clock import SystemClock
from gateway.telemetry.otlp_metrics import MetricsPush


class Moody(MetricExporter):
    """Does the next of what it was told with each export, and says when there was one more."""

    def __init__(self, *moods: MetricExportResult | Exception) -> None:
        super().__init__()
        self._moods = list(moods)
        self.is_through = anyio.Event()

    def export(self, metrics_data: MetricsData, timeout_millis: float = 0, **_: Any) -> MetricExportResult:
        if not self._moods:
            anyio.from_thread.run_sync(self.is_through.set)
            return MetricExportResult.SUCCESS
        mood = self._moods.pop(0)
        if isinstance(mood, Exception):
            raise mood
        return mood

    def force_flush(self, timeout_millis: float = 0) -> bool:
        return True

    def shutdown(self, timeout_millis: float = 0, **_: Any) -> None:
        pass


async def test_a_receiver_that_fails_in_any_way_is_sent_the_next(caplog: pytest.LogCaptureFixture) -> None:
    taken, not_taken = MetricExportResult.SUCCESS, MetricExportResult.FAILURE
    sender = Moody(taken, TimeoutError("no answer"), not_taken, taken)
    push = MetricsPush(CollectorRegistry(), sender, "gateway", 0.001, SystemClock())
    with caplog.at_level(logging.INFO):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(push.run)
            await sender.is_through.wait()
            tasks.cancel_scope.cancel()

    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
