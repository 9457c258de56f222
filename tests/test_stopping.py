"""A gateway ends, whatever its threads do."""

import fcntl
import io
import json
import logging
import threading
from pathlib import Path
from typing import Any

import anyio
import pytest
import yaml
from opentelemetry.exporter.otlp.proto.http import metric_exporter, trace_exporter
from redis.asyncio import Redis
from support import clients
from support.processes import until
from support.redis_server import own_server
from support.site import POLICY
from telemetry.test_decision_log import RECORD

from gateway import app, settings
from gateway.core.idempotency import IdempotencyClaim
from gateway.events import about
from gateway.replay import reading
from gateway.telemetry import decision_log, logs
from gateway.telemetry.decision_log import DecisionLog
from gateway.telemetry.logs import CALM_LINES

log = logging.getLogger("gateway.test")


def one_backend(folder: Path, **sections: Any) -> app.Gateway:
    """Return a gateway with a backend that nobody serves."""
    file = folder / "gateway.yaml"
    fleet = {
        "backends": {"light-0": {"url": "http://127.0.0.1:9", "profile": "h100-tp1-light"}},
        "pools": {"light": ["light-0"]},
        "models": {"m": {"classes": [{"class": "c", "pools": ["light"]}]}},
    }
    file.write_text(yaml.safe_dump({**POLICY, **fleet, "reload": {"watch": False}, **sections}))
    return app.Gateway(settings.load(file), {})


def with_decisions(folder: Path) -> tuple[app.Gateway, DecisionLog, Path]:
    """Return a gateway that sends all telemetry there is, its log of decisions, and the file of that."""
    file = folder / "decisions.jsonl"
    telemetry = {"otlp": {"endpoint": "http://127.0.0.1:9"}, "metrics": {"interval_s": 3600}}
    gateway = one_backend(folder, decisions={"file": str(file)}, telemetry=telemetry)
    assert gateway.decisions is not None
    return gateway, gateway.decisions, file


async def test_a_gateway_whose_threads_are_all_taken_writes_its_last_decisions_and_ends(
    tmp_path: Path,
) -> None:
    limiter = anyio.to_thread.current_default_thread_limiter()
    takers = [object() for _ in range(int(limiter.available_tokens))]
    gateway, decisions, file = with_decisions(tmp_path)
    with anyio.fail_after(20):
        async with gateway.running():
            decisions.finished(RECORD)
            for taker in takers:
                limiter.acquire_on_behalf_of_nowait(taker)
    for taker in takers:
        limiter.release_on_behalf_of(taker)

    assert len(reading.read([file]).entries) == 1


async def test_a_gateway_that_can_start_no_thread_writes_its_last_decisions_and_ends_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")  # as Python says it

    gateway, decisions, file = with_decisions(tmp_path)
    with monkeypatch.context() as patch:
        async with gateway.running():
            decisions.finished(RECORD)
            patch.setattr(threading.Thread, "start", fail)

    assert len(reading.read([file]).entries) == 1


async def test_a_gateway_ends_though_its_telemetry_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "CLOSE_S", 0.0)
    monkeypatch.setattr(decision_log, "END_S", 3600.0)
    gateway, decisions, file = with_decisions(tmp_path)
    with file.open() as held:
        async with gateway.running():
            fcntl.flock(held, fcntl.LOCK_EX)  # whoever writes to it waits
            decisions.finished(RECORD)
        assert decisions._thread.is_alive()
    await anyio.to_thread.run_sync(decisions._thread.join)


async def test_lines_that_were_kept_back_are_written_at_the_end(tmp_path: Path) -> None:
    written, root = io.StringIO(), logging.getLogger()
    handlers, level = root.handlers, root.level
    try:
        logs.set_up("info", written)
        async with one_backend(tmp_path).running():
            for number in range(CALM_LINES + 3):
                log.warning("number %d", number, extra=about("store_away", store="jobs"))
    finally:
        root.handlers, root.level = handlers, level

    told = [
        line for line in map(json.loads, written.getvalue().splitlines()) if line["event"] == "store_away"
    ]
    assert [line["message"] for line in told[-2:]] == [
        f"number {number}" for number in (CALM_LINES - 1, CALM_LINES + 2)
    ]
    assert told[-1]["kept_back"] == 2


async def test_a_gateway_that_has_ended_leaves_the_logs_of_libraries_as_they_were(tmp_path: Path) -> None:
    exporters = [logging.getLogger(module.__name__) for module in (trace_exporter, metric_exporter)]
    before = [len(one.filters) for one in exporters]
    gateway, *_ = with_decisions(tmp_path)
    during = [len(one.filters) for one in exporters]
    async with gateway.running():
        pass

    assert during == [count + 1 for count in before]
    assert [len(one.filters) for one in exporters] == before


async def test_a_console_is_not_cut_off_by_the_end(tmp_path: Path) -> None:
    events = list[str]()
    begun = anyio.Event()

    async def watch(url: str) -> None:
        async with clients.http() as client, client.stream("GET", f"{url}/admin/live") as answer:
            async for line in answer.aiter_lines():
                events.append(line)
                begun.set()

    async with anyio.create_task_group() as tasks:
        async with one_backend(tmp_path).running() as running:
            tasks.start_soon(watch, str(running.admin_url))
            await begun.wait()

    assert events


async def test_what_could_not_be_revoked_is_said_at_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gateway = one_backend(tmp_path, store={"url": "redis://127.0.0.1:9"}, jobs={})  # nothing listens there
    assert gateway.jobs is not None
    async with gateway.running():
        gateway.jobs.revocations.add("resp-1", gateway.jobs.store)

    events = [getattr(record, "fields", {}) for record in caplog.records]
    assert [one["id"] for one in events if one.get("event") == "job_not_revoked"] == ["resp-1"]


async def test_a_gateway_that_has_ended_keeps_no_connection_to_its_store(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    with own_server("valkey-9", tmp_path / "store") as store:
        gateway = one_backend(tmp_path, store={"url": store.url}, jobs={})
        async with gateway.running():
            await gateway.responses.get("team-a", "resp-1")
            await gateway.idempotency.store.free(IdempotencyClaim("team-a", "/v1/chat/completions", *"kfr"))
        async with Redis.from_url(store.url) as client:

            async def is_alone() -> bool:
                return len(await client.client_list()) == 1

            await until(is_alone)
