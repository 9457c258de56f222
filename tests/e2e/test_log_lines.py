"""What a running gateway writes while its store is dead: once that it is away, once that it is back."""

import io
import json
import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.redis_server import own_server
from support.site import simulated, site

from gateway.telemetry import logs


@pytest.fixture
def out() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    written = io.StringIO()
    logs.set_up("info", written)
    yield written
    root.handlers, root.level = handlers, level


def told(out: io.StringIO, *events: str) -> Counter[tuple[str, str]]:
    """Return how often each of these events was told, by store."""
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    return Counter((line["event"], line["store"]) for line in lines if line.get("event") in events)


async def test_a_dead_store_is_told_once_however_much_is_asked_of_it(
    tmp_path: Path, out: io.StringIO
) -> None:
    stores = ("idempotency", "jobs", "limits")
    folder = tmp_path / "store"
    folder.mkdir()
    chat = {"model": "gemma-4", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    job = {"model": "gemma-4", "input": "hi", "background": True}
    with own_server("valkey-9", folder, keeps=True) as server:
        async with (
            site(
                tmp_path,
                fleet=simulated({"light-0": "h100-tp1-light"}),
                store={"url": server.url},
                jobs={"work_in_serve": False},
                pools={"light": ["light-0"]},
                models={"gemma-4": {"classes": [{"class": "short_chat", "pools": ["light"]}]}},
            ) as running,
            running.http() as client,
        ):
            server.kill()
            for number in range(15):
                first = await client.post(
                    "/v1/chat/completions", json=chat, headers={"idempotency-key": f"k-{number}"}
                )
                second = await client.post("/v1/responses", json=job)
                assert (first.status_code, second.status_code) == (503, 503)
            away = {("store_away", name): 1 for name in stores}
            await running.eventually(lambda: told(out, "store_away") == away)
            assert told(out, "store_back") == {}

            server.start()

            async def ask() -> None:
                await client.post("/v1/chat/completions", json=chat, headers={"idempotency-key": "again"})

            await ask()
            await running.eventually(lambda: len(told(out, "store_back")) >= 2)
            await ask()
            back = {("store_back", name): 1 for name in stores}
            await running.eventually(lambda: told(out, "store_away", "store_back") == away | back)
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert all("event" in line for line in lines)
    noise = [line for line in lines if line["event"] not in ("request", "store_away", "store_back")]
    assert len(noise) < 15, noise
