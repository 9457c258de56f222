"""What a running gateway writes while its store is dead: once that it is away, once that it is back."""

import hashlib
import io
import json
import logging
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import anyio
import httpx
import pytest
from openai import APIError
from support import clients
from support.redis_server import own_server
from support.site import simulated, site

from gateway.simulator import Fault, FaultOrder
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
    stores = ("batches", "files", "idempotency", "jobs", "limits", "responses")
    folder = tmp_path / "store"
    folder.mkdir()
    chat = {"model": "gemma-4", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    job = {"model": "gemma-4", "input": "hi", "background": True}
    continued = {"model": "gemma-4", "input": "hi", "previous_response_id": "resp_a"}
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
                third = await client.post("/v1/responses", json=continued)
                asked = [await client.get(f"/v1/{name}") for name in ("batches", "files")]
                assert {one.status_code for one in (first, second, third, *asked)} == {503}
            away = {("store_away", name): 1 for name in stores}
            await running.eventually(lambda: told(out, "store_away") == away)
            assert told(out, "store_back") == {}

            server.start()

            async def ask() -> None:
                await client.post("/v1/chat/completions", json=chat, headers={"idempotency-key": "again"})
                await client.post("/v1/responses", json=continued)
                for name in ("batches", "files"):
                    await client.get(f"/v1/{name}")

            await ask()
            await running.eventually(lambda: len(told(out, "store_back")) >= 2)
            await ask()
            back = {("store_back", name): 1 for name in stores}
            await running.eventually(lambda: told(out, "store_away", "store_back") == away | back)
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert all("event" in line for line in lines)
    noise = [line for line in lines if line["event"] not in ("request", "store_away", "store_back")]
    assert len(noise) < 15, noise


async def test_what_is_cut_at_the_end_has_not_been_left_by_its_caller(
    tmp_path: Path, out: io.StringIO
) -> None:
    chat = {"model": "gemma-4", "messages": [{"role": "user", "content": "Count from 1 to 5000."}]}
    told: dict[bool, tuple[int, str]] = {}

    async def ask(url: str, *, stream: bool, begun: anyio.Event) -> None:
        body = chat | {"stream": stream}
        async with (
            clients.http(base_url=url, timeout=60) as client,
            client.stream("POST", "/v1/chat/completions", json=body) as got,
        ):
            parts = []
            async for part in got.aiter_bytes():
                begun.set()
                parts.append(part)
            told[stream] = got.status_code, b"".join(parts).decode()

    async with anyio.create_task_group() as tasks:
        async with site(
            tmp_path,
            fleet=simulated({"light-0": "h100-tp1-light"}, speed=0.5),
            pools={"light": ["light-0"]},
            models={"gemma-4": {"classes": [{"class": "short_chat", "pools": ["light"]}]}},
        ) as running:
            begun = anyio.Event()
            tasks.start_soon(partial(ask, running.url, stream=True, begun=begun))
            tasks.start_soon(partial(ask, running.url, stream=False, begun=anyio.Event()))
            await begun.wait()
            await running.eventually(lambda: running.gateway.in_flight == 2)

    assert (told[True][0], told[False][0]) == (200, 503)
    assert told[True][1].endswith('"code":"stream_broken"}}\n\ndata: [DONE]\n\n')
    assert json.loads(told[False][1])["error"]["code"] == "draining"
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    cut = {line["stream"]: line for line in lines if line["event"] == "request"}
    assert {line["level"] for line in cut.values()} == {"error"}
    assert (cut[True]["ending"], cut[True]["code"]) == ("broken", "stream_broken")
    assert (cut[False]["ending"], cut[False]["code"]) == ("failed", "draining")


async def test_a_drain_counts_a_body_that_is_still_being_received(tmp_path: Path) -> None:
    async with site(tmp_path) as running:
        url = httpx.URL(running.url)
        async with await anyio.connect_tcp(str(url.host), url.port or 80) as caller:
            await caller.send(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 99\r\n\r\n{")
            await running.eventually(lambda: running.gateway.in_flight == 1)
        await running.eventually(lambda: running.gateway.in_flight == 0)


async def test_the_line_of_a_refused_request_says_whose_it_was(tmp_path: Path, out: io.StringIO) -> None:
    async def bad(client: httpx.AsyncClient, path: str, body: bytes, **headers: str) -> int:
        known = {"authorization": "Bearer sk-known", "content-type": "application/json", **headers}
        return (await client.post(path, content=body, headers=known)).status_code

    chat = b'{"model": "gemma-4", "messages": "none"}'
    async with (
        site(
            tmp_path,
            fleet=simulated({"light-0": "h100-tp1-light"}),
            pools={"light": ["light-0"]},
            models={"gemma-4": {"classes": [{"class": "short_chat", "pools": ["light"]}]}},
            keys={"reports": {"sha256": hashlib.sha256(b"sk-known").hexdigest()}},
            requests={"max_body_bytes": 1000},
        ) as running,
        running.http() as client,
    ):
        statuses = [
            await bad(client, "/v1/chat/completions", b"{"),
            await bad(client, "/v1/chat/completions", chat),
            await bad(client, "/v1/chat/completions", b"1" * 2000),
            await bad(client, "/v1/completions", b"{}"),
            await bad(client, "/v1/responses", b'{"model": "gemma-4"}'),
            await bad(client, "/v1/chat/completions", b"{", authorization="Bearer sk-unknown"),
        ]
    assert statuses == [400, 400, 413, 400, 400, 401]
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    refused = [line.get("key") for line in lines if line["event"] == "request"]
    assert refused == [*["reports"] * 5, None]


async def test_a_failed_attempt_is_found_by_the_id_that_its_caller_got(
    tmp_path: Path, out: io.StringIO
) -> None:
    chat = {"model": "gemma-4", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    async with (
        site(
            tmp_path,
            fleet=simulated({"light-0": "h100-tp1-light", "light-1": "h100-tp1-light"}),
            pools={"first": ["light-0"], "second": ["light-1"]},
            models={"gemma-4": {"classes": [{"class": "short_chat", "pools": ["first", "second"]}]}},
        ) as running,
        running.http() as client,
    ):
        running.backends["light-0"].order(FaultOrder(Fault.ERROR, count=1))
        answer = await client.post("/v1/chat/completions", json=chat)
    assert answer.status_code == 200
    id = answer.headers["x-request-id"]
    lines = [json.loads(line) for line in out.getvalue().splitlines() if id in line]
    assert [(line["event"], line["backend"]) for line in lines] == [
        ("attempt_failed", "light-0"),
        ("request", "light-1"),
    ]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (Fault.TRUNCATE, "status 200, but the answer ended before it was finished"),
        (Fault.DIE_MID_STREAM, "The connection to the backend broke."),
    ],
)
async def test_a_stream_that_broke_is_found_by_its_id_and_its_line_says_what_was_wrong_with_it(
    tmp_path: Path, out: io.StringIO, fault: Fault, reason: str
) -> None:
    """The SDK's error for it has no request id, unlike that of an answer with a status."""
    async with site(
        tmp_path,
        fleet=simulated({"light-0": "h100-tp1-light"}),
        pools={"light": ["light-0"]},
        models={"gemma-4": {"classes": [{"class": "short_chat", "pools": ["light"]}]}},
    ) as running:
        running.backends["light-0"].order(FaultOrder(fault, count=1))
        stream = await running.openai().chat.completions.create(
            model="gemma-4", messages=[{"role": "user", "content": "Count from 1 to 90."}], stream=True
        )
        chunks = []
        with pytest.raises(APIError) as broken:
            async for chunk in stream:
                chunks.append(chunk)
    id = stream.response.headers["x-request-id"]
    assert not hasattr(broken.value, "request_id")
    assert {chunk.id for chunk in chunks} == {f"chatcmpl-{id}"}
    lines = [json.loads(line) for line in out.getvalue().splitlines() if id in line]
    assert [(line["event"], line["reason"]) for line in lines] == [
        ("attempt_failed", reason),
        ("request", reason),
    ]
