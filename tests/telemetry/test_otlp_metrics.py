"""Metrics and spans on their way to a receiver that does as it likes. What is sent: e2e/test_tracing.py."""

import asyncio
import logging
import ssl
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
import requests
from anyio.abc import SocketAttribute, SocketStream
from anyio.streams.tls import TLSStream
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult, MetricsData, Sum
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from prometheus_client import CollectorRegistry, Counter, Gauge
from support.certificates import self_signed
from support.raw_server import answer_of, raw_server
from support.world import StillClock

from gateway.clock import SystemClock
from gateway.core.usage import Ending, RequestRecord
from gateway.telemetry import tracing
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.otlp_metrics import MetricsPush, metrics_data
from gateway.telemetry.otlp_metrics import sender as metric_sender
from gateway.telemetry.otlp_session import session
from gateway.telemetry.receiver_status import ReceiverStatus
from gateway.telemetry.tracing import Sender, TraceRules, Tracing

PATIENCE_S = 10.0  # a bound for a broken test, not a time anything is expected to take


class Moody(MetricExporter):
    """Does the next of what it was told with each export, and says when there was one more."""

    def __init__(self, *moods: MetricExportResult | Exception) -> None:
        super().__init__()
        self._moods = list(moods)
        self._loop = asyncio.get_running_loop()
        self.is_through = anyio.Event()
        self.is_shut_down = False

    def export(self, metrics_data: MetricsData, timeout_millis: float = 0, **_: Any) -> MetricExportResult:
        if not self._moods:
            self._loop.call_soon_threadsafe(self.is_through.set)
            return MetricExportResult.SUCCESS
        mood = self._moods.pop(0)
        if isinstance(mood, Exception):
            raise mood
        return mood

    def force_flush(self, timeout_millis: float = 0) -> bool:
        return True

    def shutdown(self, timeout_millis: float = 0, **_: Any) -> None:
        self.is_shut_down = True


def test_whatever_counts_seconds_says_so() -> None:
    registry = Metrics().registry
    Gauge("gateway_used_ratio", "Share in use.", registry=registry)
    (found,) = metrics_data(registry, Resource.get_empty(), 0, 1).resource_metrics
    metrics = [one for scope in found.scope_metrics for one in scope.metrics]
    units = {one.name: one.unit for one in metrics}
    seconds = {name: unit for name, unit in units.items() if "_seconds" in name}
    assert "process_cpu_seconds_total" in seconds
    assert set(seconds.values()) == {"s"}
    assert units["process_open_fds"] == ""
    assert units["gateway_used_ratio"] == "1"
    assert all(one.data.data_points for one in metrics)  # what has no value yet is not sent


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
    assert "no answer" in caplog.text
    push.close()
    assert sender.is_shut_down


async def test_what_is_pushed_says_since_when_it_was_counted_and_until_when() -> None:
    class Walking(StillClock):
        def wall(self) -> float:
            return self.time

    class Keeping(Moody):
        def export(
            self, metrics_data: MetricsData, timeout_millis: float = 0, **_: Any
        ) -> MetricExportResult:
            pushed.append(metrics_data)
            return super().export(metrics_data)

    pushed: list[MetricsData] = []
    registry, sender, clock = CollectorRegistry(), Keeping(), Walking()
    Counter("gateway_tries", "Tries.", registry=registry).inc(3)
    push = MetricsPush(registry, sender, "gateway", 0.001, clock)
    clock.time += 5.0
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(push.run)
        await sender.is_through.wait()
        tasks.cancel_scope.cancel()
    push.close()

    (found,) = pushed[0].resource_metrics
    data = found.scope_metrics[0].metrics[0].data
    assert isinstance(data, Sum)
    assert data.is_monotonic
    (point,) = data.data_points
    times = (point.start_time_unix_nano, point.time_unix_nano)
    assert (times, point.value) == ((10_000_000_000, 15_000_000_000), 3.0)


async def test_an_export_for_which_no_thread_is_left_is_followed_by_the_next(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start, failed = threading.Thread.start, list[threading.Thread]()

    def start_later(thread: threading.Thread) -> None:
        if not failed:
            failed.append(thread)
            raise RuntimeError("can't start new thread")  # as Python says it
        start(thread)

    sender = Moody()
    push = MetricsPush(CollectorRegistry(), sender, "gateway", 0.001, SystemClock())
    monkeypatch.setattr(threading.Thread, "start", start_later)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(push.run)
        await sender.is_through.wait()
        tasks.cancel_scope.cancel()
    push.close()

    assert failed
    assert "can't start new thread" in caplog.text  # and the receiver is not blamed


async def test_the_end_does_not_wait_for_a_receiver_that_does_not_answer() -> None:
    class Silent(Moody):
        def export(
            self, metrics_data: MetricsData, timeout_millis: float = 0, **_: Any
        ) -> MetricExportResult:
            self._loop.call_soon_threadsafe(self.is_through.set)
            over.wait()
            return MetricExportResult.SUCCESS

    over = threading.Event()
    sender = Silent()
    before = set(threading.enumerate())
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(MetricsPush(CollectorRegistry(), sender, "gateway", 0.001, SystemClock()).run)
        await sender.is_through.wait()
        tasks.cancel_scope.cancel()

    (sending,) = set(threading.enumerate()) - before
    assert sending.daemon  # what Python does not wait for
    over.set()
    sending.join()


async def test_spans_that_are_not_taken_are_one_line_until_they_are(caplog: pytest.LogCaptureFixture) -> None:
    async def answer(stream: SocketStream, number: int) -> None:
        status = b"400 Wrong Door" if number < 5 else b"200 OK"
        await stream.send(b"HTTP/1.1 %b\r\ncontent-length: 0\r\n\r\n" % status)

    async with raw_server(answer) as server:
        sender = Sender(server.url, {})
        with caplog.at_level(logging.INFO):
            for _ in range(7):
                await anyio.to_thread.run_sync(sender.export, [])
        await anyio.to_thread.run_sync(sender.shutdown)

    assert [getattr(record, "fields", {}).get("event") for record in caplog.records] == [
        "traces_not_taken",
        "traces_taken",
    ]
    assert "Wrong Door" in caplog.text


def test_while_a_receiver_is_away_the_library_does_not_say_what_it_drops(
    caplog: pytest.LogCaptureFixture,
) -> None:
    library = logging.getLogger("opentelemetry.sdk._shared_internal")
    status = ReceiverStatus("library", on_away=lambda _: None, on_back=lambda: None)
    for is_taken, text in ((True, "before"), (False, "meanwhile"), (True, "after")):
        status.note(is_taken)
        library.warning(text)
    status.close()

    assert [text for text in caplog.messages if text in ("before", "meanwhile", "after")] == [
        "before",
        "after",
    ]


@pytest.mark.parametrize("before_host", ["http://user:secret@", ""])
async def test_an_error_that_may_be_a_proxys_names_it(
    before_host: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def answer(stream: SocketStream, number: int) -> None:
        await stream.send(b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\n\r\n")

    async with raw_server(answer) as proxy:
        address = proxy.url.removeprefix("http://")
        monkeypatch.setenv("http_proxy", f"{before_host}{address}")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        for url in ("http://collector.internal:4318", proxy.url):
            sender = Sender(url, {})
            await anyio.to_thread.run_sync(sender.export, [])
            await anyio.to_thread.run_sync(sender.shutdown)

    through, straight = (record.getMessage() for record in caplog.records)
    assert f"Forbidden, through the proxy {address}" in through
    assert "secret" not in through
    assert "proxy" not in straight


@pytest.mark.parametrize(
    ("name", "value", "brings_one"),
    [
        ("OTEL_PYTHON_EXPORTER_OTLP_HTTP_CREDENTIAL_PROVIDER", "cloud", True),
        ("OTEL_PYTHON_EXPORTER_OTLP_HTTP_METRICS_CREDENTIAL_PROVIDER", "cloud", True),
        ("OTEL_PYTHON_EXPORTER_OTLP_HTTP_CREDENTIAL_PROVIDER", "", False),  # which exporters ignore
        ("ANOTHER_CREDENTIAL_PROVIDER", "cloud", False),
    ],
)
def test_a_session_that_a_credential_provider_brings_is_not_replaced(
    name: str, value: str, brings_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    assert (session() is None) == brings_one


async def test_a_receivers_own_ca_counts_more_than_that_of_all_programs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "other").mkdir()
    cert, key = self_signed(tmp_path, "localhost")
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(self_signed(tmp_path / "other", "localhost")[0]))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", str(cert))
    serving = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    serving.load_cert_chain(cert, key)

    async def answer(stream: SocketStream) -> None:
        async with await TLSStream.wrap(
            stream, server_side=True, ssl_context=serving, standard_compatible=False
        ) as tls:
            await tls.receive()
            await tls.send(answer_of(b""))

    async with (
        await anyio.create_tcp_listener(local_host="127.0.0.1") as listener,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(listener.serve, answer)
        sender = Sender(f"https://localhost:{listener.extra(SocketAttribute.local_port)}", {})
        result = await anyio.to_thread.run_sync(sender.export, [])
        await anyio.to_thread.run_sync(sender.shutdown)
        tasks.cancel_scope.cancel()

    assert result is SpanExportResult.SUCCESS


@pytest.mark.parametrize("status", [b"302 Found", b"308 Permanent Redirect"])
async def test_a_redirect_is_not_taken_for_success(status: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async def answer(stream: SocketStream, number: int) -> None:
        head = b"HTTP/1.1 %b\r\nlocation: /elsewhere\r\ncontent-length: 0\r\n\r\n"
        await stream.send(head % status)

    async with raw_server(answer) as server:
        where, headers = f"{server.url}/", {"x-key": "secret"}
        spans, metrics = Sender(where, headers), metric_sender(where, headers)
        results = [
            await anyio.to_thread.run_sync(spans.export, []),
            await anyio.to_thread.run_sync(metrics.export, MetricsData([])),
        ]
        await anyio.to_thread.run_sync(spans.shutdown)
        metrics.shutdown()

    assert results == [SpanExportResult.FAILURE, MetricExportResult.FAILURE]
    asked = [head.partition(b" HTTP/")[0] for head, _ in server.requests]
    assert asked == [b"POST /v1/traces", b"POST /v1/metrics"]
    assert all(b"x-key: secret" in head for head, _ in server.requests)
    assert "a redirect to /elsewhere" in caplog.text


def test_an_exporter_that_raises_is_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def export(*_: object) -> SpanExportResult:  # as OpenTelemetry 1.36 does on a redirect
        raise requests.exceptions.HTTPError("302, a redirect to /elsewhere")

    monkeypatch.setattr(OTLPSpanExporter, "export", export)
    sender = Sender("http://127.0.0.1:9", {})
    assert [sender.export([]) for _ in range(3)] == [SpanExportResult.FAILURE] * 3
    sender.shutdown()
    (record,) = caplog.records
    assert "a redirect to /elsewhere" in record.getMessage()


def test_the_end_does_not_wait_for_spans_that_nobody_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "END_S", 0.05)
    begun, over, ended = threading.Event(), threading.Event(), threading.Event()

    class Silent(SpanExporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            begun.set()
            over.wait()
            ended.set()
            return SpanExportResult.FAILURE

        def shutdown(self) -> None:
            pass

    subject = Tracing(TraceRules(share=1), Silent(), "gateway", dict)
    patience = threading.Timer(PATIENCE_S, over.set)
    patience.start()
    subject.finished(
        RequestRecord(
            *("1", "gemma-4"),
            stream=False,
            ending=Ending.FAILED,
            status=502,
            error_code="upstream_failed",
            key=None,
            wall_at=1.0,
            received_at=1.0,
            ended_at=2.0,
            trace=subject.begin(None),
        )
    )
    subject.close()

    assert begun.is_set()
    assert not ended.is_set()
    over.set()
    patience.cancel()
