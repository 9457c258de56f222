"""`Idempotency-Key` where requests are answered in place: the unmodified SDK, raw sockets, real processes."""

import json
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import anyio
import httpx
import openai
import pytest
from redis.asyncio import Redis
from support import clients
from support.processes import config, running
from support.redis_server import RedisServer, binary, own_server
from support.site import Site, simulated, site

from gateway.core.idempotency import IdempotencyClaim, StoredAnswer, fingerprint
from gateway.simulator import Fault, FaultOrder, simulator

HELLO: Any = [{"role": "user", "content": "Why is the sky blue?"}]
CHAT: dict[str, Any] = {"model": "gemma-4", "messages": HELLO, "max_tokens": 12}
ENDLESS: dict[str, Any] = {**CHAT, "max_tokens": 20_000, "stream": True, "ignore_eos": True}
KEYED = {"Idempotency-Key": "k-1"}
ONE_POOL: dict[str, Any] = {
    "pools": {"light": ["light-0"]},
    "models": {"gemma-4": {"classes": [{"class": "short_chat", "pools": ["light"]}]}},
}
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": "gemma-4", "prompt": "Name a river.", "max_tokens": 12},
    "/v1/responses": {"model": "gemma-4", "input": "Name a river.", "max_output_tokens": 12},
}
OF_THE_FIRST = ("content-type", "cache-control", "x-gateway-class", "x-gateway-pool", "x-gateway-backend")


@asynccontextmanager
async def one_site(folder: Path, **sections: Any) -> AsyncIterator[Site]:
    fleet = simulated({"light-0": "h100-tp1-light"})
    async with site(folder, fleet=fleet, **{**ONE_POOL, **sections}) as running:
        yield running
        await running.eventually(running.idle)


@pytest.fixture(params=["memory", "valkey-9"])
async def one(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Site]:
    if request.param == "memory":
        async with one_site(tmp_path) as running:
            yield running
        return
    with own_server(request.param, tmp_path) as server:
        async with one_site(tmp_path, store=server.url) as running:
            yield running


@pytest.fixture(scope="module")
async def standing(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    """A gateway for those who are refused before anything is asked or kept, wherever keys are kept."""
    async with one_site(tmp_path_factory.mktemp("standing"), health={"interval_s": 5}) as running:
        yield running


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[tuple[Site, Site, RedisServer]]:
    """Two gateways over one store, before one backend."""
    with own_server("valkey-9", tmp_path) as server:
        async with simulator(simulated({"light-0": "h100-tp1-light"})["light-0"]) as backend:
            sections = {
                **ONE_POOL,
                "store": server.url,
                "backends": {"light-0": {"url": backend.url, "profile": "h100-tp1-light"}},
            }
            for name in ("one", "other"):
                (tmp_path / name).mkdir()
            async with (
                site(tmp_path / "one", fleet={}, **sections) as one,
                site(tmp_path / "other", fleet={}, **sections) as other,
            ):
                yield one, other, server


async def post(at: Site, path: str, body: dict[str, Any], headers: dict[str, str] = KEYED) -> httpx.Response:
    async with at.http() as client:
        return await client.post(path, json=body, headers=headers)


def served(at: Site) -> int:
    """Return how many requests a backend was asked for."""
    return sum(len(record.attempts) for record in at.gateway.journal.recent())


async def free_again(at: Site) -> httpx.Response:
    """Return the answer to a repeat as soon as it is not told to wait."""
    with anyio.fail_after(20):
        while (answer := await post(at, "/v1/chat/completions", CHAT)).status_code == 409:
            pass
    return answer


# ---------------------------------------------------------------- the same answer again


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", REQUESTS)
async def test_a_repeat_gets_the_same_bytes(one: Site, path: str, stream: bool) -> None:
    body = {**REQUESTS[path], "stream": stream}

    first = await post(one, path, body)
    again = await post(one, path, body)
    other_key = await post(one, path, body, {"Idempotency-Key": "k-2"})

    assert (first.status_code, again.status_code) == (200, 200)
    assert again.content == first.content != other_key.content
    assert {name: again.headers.get(name) for name in OF_THE_FIRST} == {
        name: first.headers.get(name) for name in OF_THE_FIRST
    }
    assert "x-gateway-replayed" not in first.headers
    assert again.headers["x-gateway-replayed"] == "true"
    assert again.headers["x-gateway-original-request-id"] == first.headers["x-request-id"]
    assert again.headers["x-request-id"] != first.headers["x-request-id"]
    await one.eventually(lambda: served(one) == 2)
    records = {record.id: record for record in one.gateway.journal.recent()}
    assert records[again.headers["x-request-id"]].ending.value == "replayed"
    assert one.gateway.applications._idempotency.recorded_bytes == 0


async def test_the_sdk_gets_the_same_objects(one: Site) -> None:
    client = one.openai()

    chats = [await client.chat.completions.create(**CHAT, extra_headers=KEYED) for _ in range(2)]
    streams = []
    for _ in range(2):
        headers = {"Idempotency-Key": '"k-stream"'}
        stream = await client.chat.completions.create(**CHAT, stream=True, extra_headers=headers)
        streams.append([chunk async for chunk in stream])
    answers = [
        await client.responses.create(**REQUESTS["/v1/responses"], extra_headers=KEYED) for _ in range(2)
    ]

    assert chats[0].choices[0].message.content
    assert chats[0] == chats[1]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streams[0])
    assert streams[0] == streams[1]
    assert answers[0].output_text
    assert answers[0] == answers[1]
    await one.eventually(lambda: served(one) == 3)


async def test_a_caller_that_closes_at_the_last_event_has_its_answer_kept(one: Site) -> None:
    """It is kept before the last event leaves: nobody waits for the end of the body."""
    async with one.http() as client:
        for _ in range(2):
            request = client.stream(
                "POST", "/v1/chat/completions", json={**CHAT, "stream": True}, headers=KEYED
            )
            seen = b""
            async with request as answer:
                async for data in answer.aiter_bytes():
                    seen += data
                    if seen.endswith(b"data: [DONE]\n\n"):
                        break

    assert answer.headers["x-gateway-replayed"] == "true"


async def test_quoted_and_bare_keys_are_one(one: Site) -> None:
    bare = await post(one, "/v1/chat/completions", CHAT, {"Idempotency-Key": "a-1"})
    quoted = await post(one, "/v1/chat/completions", CHAT, {"Idempotency-Key": '"a-1"'})

    assert quoted.content == bare.content


async def test_without_the_header_every_request_runs(one: Site) -> None:
    answers = [await post(one, "/v1/chat/completions", CHAT, {}) for _ in range(2)]

    assert answers[0].json()["id"] != answers[1].json()["id"]
    assert "x-gateway-replayed" not in answers[1].headers


async def test_a_key_is_of_one_route_and_api_key(tmp_path: Path) -> None:
    keys = {name: {"sha256": sha256(name.encode()).hexdigest()} for name in ("a", "b")}
    async with one_site(tmp_path, keys=keys) as running:
        answers = []
        for name in ("a", "b"):
            headers = {**KEYED, "authorization": f"Bearer {name}"}
            answers += [await post(running, path, body, headers) for path, body in REQUESTS.items()]

    assert {answer.status_code for answer in answers} == {200}
    assert not any("x-gateway-replayed" in answer.headers for answer in answers)


# ---------------------------------------------------------------- refusals


async def test_a_key_that_stands_for_another_body_is_refused(one: Site) -> None:
    client = one.openai()
    await client.chat.completions.create(**CHAT, extra_headers=KEYED)

    with pytest.raises(openai.UnprocessableEntityError) as caught:
        await client.chat.completions.create(**{**CHAT, "max_tokens": 13}, extra_headers=KEYED)

    assert (caught.value.code, caught.value.type) == ("idempotency_key_reused", "invalid_request_error")
    assert caught.value.request_id


async def test_a_repeat_that_comes_too_early_is_told_to_wait(one: Site) -> None:
    client = one.openai()
    stream = await client.chat.completions.create(
        **CHAT | {"max_tokens": 20_000}, stream=True, extra_body={"ignore_eos": True}, extra_headers=KEYED
    )
    await anext(aiter(stream))

    with pytest.raises(openai.ConflictError) as caught:
        await client.chat.completions.create(
            **CHAT | {"max_tokens": 20_000},
            stream=True,
            extra_body={"ignore_eos": True},
            extra_headers=KEYED,
        )
    other = await post(one, "/v1/chat/completions", CHAT)

    assert (caught.value.code, caught.value.type) == ("idempotency_in_progress", "conflict")
    assert caught.value.response.headers["retry-after"] == "2"
    assert other.json()["error"]["code"] == "idempotency_key_reused"
    await stream.close()


@pytest.mark.parametrize("path", REQUESTS)
@pytest.mark.parametrize("key", ["", '"', "k" * 256, "two words"])
async def test_what_is_no_key_is_refused(standing: Site, path: str, key: str) -> None:
    answer = await post(standing, path, REQUESTS[path], {"Idempotency-Key": key})

    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_idempotency_key"
    await standing.eventually(standing.idle)
    assert served(standing) == 0


# ---------------------------------------------------------------- what frees a key


async def test_an_error_is_not_kept(one: Site) -> None:
    one.backends["light-0"].order(FaultOrder(Fault.ERROR, count=1))

    failed = await post(one, "/v1/chat/completions", CHAT)
    answer = await post(one, "/v1/chat/completions", CHAT)

    assert (failed.status_code, answer.status_code) == (502, 200)
    assert "x-gateway-replayed" not in answer.headers


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
async def test_a_request_that_cannot_be_read_does_not_keep_its_key(one: Site, path: str) -> None:
    bad = await post(one, path, {**REQUESTS[path], "temperature": "hot"})
    answer = await post(one, path, REQUESTS[path])

    assert (bad.status_code, answer.status_code) == (400, 200)


@pytest.mark.parametrize("path", REQUESTS)
async def test_a_broken_stream_is_not_kept(one: Site, path: str) -> None:
    body = {**REQUESTS[path], "stream": True}
    one.backends["light-0"].order(FaultOrder(Fault.DIE_MID_STREAM, after_chunks=5, count=1))

    broken = await post(one, path, body)
    whole = await post(one, path, body)
    again = await post(one, path, body)

    assert b"error" in broken.content
    assert "x-gateway-replayed" not in whole.headers
    assert again.content == whole.content != broken.content


async def test_a_caller_that_leaves_frees_its_key(one: Site) -> None:
    host, port = one.url.removeprefix("http://").split(":")
    body = json.dumps(ENDLESS).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f'Idempotency-Key: "left"\r\nContent-Length: {len(body)}\r\n\r\n'
    )
    async with await anyio.connect_tcp(host, int(port)) as caller:
        await caller.send(head.encode() + body)
        seen = b""
        while b"data: " not in seen:
            seen += await caller.receive()
    await one.eventually(one.idle)

    async with one.http() as client:
        request = client.stream(
            "POST", "/v1/chat/completions", content=body, headers={"Idempotency-Key": "left"}
        )
        async with request as answer:
            assert answer.status_code == 200
            assert "x-gateway-replayed" not in answer.headers


async def test_a_caller_that_leaves_while_it_waits_frees_its_key(tmp_path: Path) -> None:
    fleet = simulated({"light-0": "h100-tp1-light"})
    limits = {"limits": {"knee_seqs": 1}}
    waiting = {"class": "short_chat", "pools": ["light"], "waiting": {"max_wait_s": 60}}
    sections = {**ONE_POOL, "models": {"gemma-4": {"classes": [waiting]}}}
    async with site(tmp_path, fleet=fleet, backend=limits, **sections) as running:
        client = running.openai()
        holder = await client.chat.completions.create(
            **CHAT | {"max_tokens": 20_000}, stream=True, extra_body={"ignore_eos": True}
        )
        await anext(aiter(holder))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(post, running, "/v1/chat/completions", CHAT)
            await running.eventually(lambda: len(running.gateway.pipeline.room.line) == 1)
            tasks.cancel_scope.cancel()
        await running.eventually(lambda: running.gateway.applications.serving.in_flight == 1)
        await holder.close()

        assert (await post(running, "/v1/chat/completions", CHAT)).status_code == 200
        await running.eventually(running.idle)


# ---------------------------------------------------------------- bounds


async def test_an_answer_that_is_too_long_runs_again(tmp_path: Path) -> None:
    async with one_site(tmp_path, idempotency={"max_answer_bytes": 3_000}) as running:
        for body in ({**ENDLESS, "max_tokens": 300}, {**ENDLESS, "stream": False, "max_tokens": 2_000}):
            answers = [await post(running, "/v1/chat/completions", body) for _ in range(2)]
            assert all(len(answer.content) > 3_000 for answer in answers)
            assert not any("x-gateway-replayed" in answer.headers for answer in answers)
        assert (await post(running, "/v1/chat/completions", CHAT)).status_code == 200
        assert "x-gateway-replayed" in (await post(running, "/v1/chat/completions", CHAT)).headers
        assert running.gateway.applications._idempotency.recorded_bytes == 0


async def test_what_a_key_owner_keeps_is_bounded(tmp_path: Path) -> None:
    async with one_site(tmp_path, idempotency={"max_bytes_per_key": 4_000}) as running:
        bodies = [{**CHAT, "seed": number} for number in range(8)]
        for number, body in enumerate(bodies):
            await post(running, "/v1/chat/completions", body, {"Idempotency-Key": f"k-{number}"})
        replayed = [
            "x-gateway-replayed"
            in (await post(running, "/v1/chat/completions", body, {"Idempotency-Key": f"k-{number}"})).headers
            for number, body in reversed(list(enumerate(bodies)))
        ]

    assert replayed[0]
    assert not replayed[-1]


async def test_a_long_answer_is_replayed_whole_or_to_nobody(
    one: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller that reads nothing is let go, as while the first answer was given."""
    host, port = one.url.removeprefix("http://").split(":")
    body = json.dumps(CHAT, separators=(",", ":")).encode()
    long = b"x" * 16 * 1024 * 1024  # above what the system buffers
    claim = IdempotencyClaim(None, "/v1/chat/completions", "k-1", fingerprint(body), "req-1")
    await one.gateway.idempotency.store.begin(claim, 60.0)
    await one.gateway.idempotency.store.keep(claim, StoredAnswer(200, [], long).encoded(), 60.0)
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Idempotency-Key: k-1\r\nContent-Length: {len(body)}\r\n\r\n"
    )

    assert (await post(one, "/v1/chat/completions", CHAT)).content == long
    monkeypatch.setattr("gateway.pipeline.caller.CALLER_STALL_S", 0.2)
    with socket.create_connection((host, int(port))) as caller:
        caller.sendall(head.encode() + body)
        await one.eventually(lambda: len(one.gateway.journal.recent()) == 2)

    assert {record.ending.value for record in one.gateway.journal.recent()} == {"replayed", "left"}


# ---------------------------------------------------------------- several gateways, and a store that dies


async def test_gateways_on_one_store_keep_one_promise(pair: tuple[Site, Site, RedisServer]) -> None:
    one, other, _ = pair
    stream = await one.openai().chat.completions.create(
        **CHAT | {"max_tokens": 20_000}, stream=True, extra_body={"ignore_eos": True}, extra_headers=KEYED
    )
    await anext(aiter(stream))
    with pytest.raises(openai.ConflictError):
        await other.openai().chat.completions.create(
            **CHAT | {"max_tokens": 20_000},
            stream=True,
            extra_body={"ignore_eos": True},
            extra_headers=KEYED,
        )
    await stream.close()
    await one.eventually(one.idle)

    first = await post(one, "/v1/chat/completions", CHAT)
    again = await post(other, "/v1/chat/completions", CHAT)

    assert again.content == first.content
    assert again.headers["x-gateway-original-request-id"] == first.headers["x-request-id"]


async def test_many_at_once_run_once(pair: tuple[Site, Site, RedisServer]) -> None:
    """Through the SDK, which waits and asks again by itself."""
    one, other, _ = pair
    answers: list[Any] = []

    async def ask(at: Site) -> None:
        client = at.openai(max_retries=10)
        answers.append(await client.chat.completions.create(**CHAT, extra_headers=KEYED))

    async with anyio.create_task_group() as tasks:
        for at in (one, other) * 5:
            tasks.start_soon(ask, at)

    assert len({answer.id for answer in answers}) == 1
    assert served(one) + served(other) == 1


async def test_without_its_store_a_keyed_request_is_refused(pair: tuple[Site, Site, RedisServer]) -> None:
    one, _, server = pair
    server.kill()

    refused = await post(one, "/v1/chat/completions", CHAT)
    unkeyed = await post(one, "/v1/chat/completions", CHAT, {})
    server.start()
    answer = await free_again(one)

    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "store_unavailable")
    assert 1 <= int(refused.headers["retry-after"]) <= 59
    assert unkeyed.status_code == 200
    assert answer.status_code == 200


async def test_a_store_that_dies_meanwhile_costs_no_answer(pair: tuple[Site, Site, RedisServer]) -> None:
    one, _, server = pair
    async with one.http() as client:
        body = {**CHAT, "stream": True, "max_tokens": 300, "ignore_eos": True}
        async with client.stream("POST", "/v1/chat/completions", json=body, headers=KEYED) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            server.kill()
            rest = [line async for line in lines]

    assert "data: [DONE]" in rest


async def test_a_killed_gateway_holds_its_key_no_longer_than_its_lease(tmp_path: Path) -> None:
    rest = """
models: {gemma-4: {classes: [{class: short_chat, pools: [light]}]}}
health: {interval_s: 0.2}
"""
    arguments = ("simulate", "--profile", "h100-tp1-light", "--port", "0", "--speed", "5")
    with own_server("valkey-9", tmp_path) as server:
        redis = Redis.from_url(server.url, decode_responses=True)
        async with running(*arguments) as engine:
            backend = (await engine.wait_for(r"(http://127\.0\.0\.1:\d+)"))[1]
            pools = {"light": ["light-0"]}
            backends = {"light-0": (backend, "h100-tp1-light")}
            file = config(tmp_path, backends, pools, rest + f"store: '{server.url}'\n")
            async with (
                running("serve", "--config", str(file)) as doomed,
                running("serve", "--config", str(file)) as other,
            ):
                urls = [(await one.wait_for(r"serves (http://\S+)/v1"))[1] for one in (doomed, other)]
                async with clients.http(timeout=60) as client:

                    async def ask(url: str) -> httpx.Response:
                        request = client.build_request(
                            "POST", f"{url}/v1/chat/completions", json=ENDLESS, headers=KEYED
                        )
                        return await client.send(request, stream=True)

                    for url in urls:
                        with anyio.fail_after(30):
                            while (await client.get(f"{url}/readyz")).status_code != 200:
                                pass
                    first = await ask(urls[0])
                    await anext(first.aiter_bytes())
                    doomed.process.kill()
                    await doomed.process.wait()
                    refused = await ask(urls[1])
                    await refused.aread()
                    (mark,) = [key async for key in redis.scan_iter("*:running:*")]
                    left_ms = await cast("Any", redis.pttl(mark))
                    await cast("Any", redis.pexpire(mark, 1))  # the rest of the lease passes
                    with anyio.fail_after(30):
                        while (answer := await ask(urls[1])).status_code == 409:
                            await answer.aread()
                    await answer.aclose()
        await redis.aclose()

    assert refused.status_code == 409
    assert 0 < left_ms <= 30_000
    assert answer.status_code == 200
    assert "x-gateway-replayed" not in answer.headers


async def test_workers_without_a_store_share_promises(tmp_path: Path) -> None:
    """The store that is started for them has the keys as well."""
    async with running("simulate", "--profile", "h100-tp1-light", "--port", "0", "--speed", "50") as engine:
        backend = (await engine.wait_for(r"(http://127\.0\.0\.1:\d+)"))[1]
        rest = (
            "models: {gemma-4: {classes: [{class: short_chat, pools: [light]}]}}\nhealth: {interval_s: 0.2}\n"
        )
        file = config(tmp_path, {"light-0": (backend, "h100-tp1-light")}, {"light": ["light-0"]}, rest)
        async with running("serve", "--config", str(file), "--workers", "2") as gateway:
            url = (await gateway.wait_for(r"serves (http://\S+)/v1"))[1]
            ids: set[str] = set()
            workers: set[str] = set()
            with anyio.fail_after(60):
                while len(workers) < 2:  # which worker accepts a connection is chance
                    async with clients.http(base_url=url, timeout=60) as client:
                        answer = await client.post("/v1/chat/completions", json=CHAT, headers=KEYED)
                        if answer.status_code == 200:
                            ids.add(answer.json()["id"])
                            workers |= await _workers_with(gateway.output, answer.headers["x-request-id"])

    assert len(ids) == 1


async def _workers_with(output: str, request_id: str) -> set[str]:
    """Return the operators' addresses of the workers that remember a request."""
    found = set()
    async with clients.http() as client:
        for line in output.splitlines():
            if "operators: http" in line and "(worker" in line:
                admin = line.split("operators: ")[1].split("/admin")[0].split(" ")[0]
                records = (await client.get(f"{admin}/admin/requests")).json()
                found |= {admin for record in records if record["id"] == request_id}
    return found


# ---------------------------------------------------------------- beside jobs


@pytest.fixture
def kept_store(tmp_path: Path) -> Iterator[RedisServer]:
    folder = tmp_path / "store"
    folder.mkdir()
    server = RedisServer(binary("valkey-9"), folder, keeps=True)
    server.start()
    try:
        yield server
    finally:
        server.kill()


async def test_a_job_keeps_its_own_idempotency(tmp_path: Path, kept_store: RedisServer) -> None:
    async with one_site(tmp_path, store=kept_store.url, jobs={}) as running:
        client = running.openai()
        fields = {**REQUESTS["/v1/responses"], "extra_headers": {"Idempotency-Key": "job"}}

        one = await client.responses.create(**fields, background=True)
        bare = await client.responses.create(
            **{**fields, "extra_headers": {"Idempotency-Key": '"job"'}}, background=True
        )
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(
                **{**fields, "extra_headers": {"Idempotency-Key": "a b"}}, background=True
            )
        in_place = await client.responses.create(**fields)
        again = await client.responses.create(**fields)

    assert one.id == bare.id != in_place.id
    assert again.id == in_place.id
    assert caught.value.code == "invalid_idempotency_key"
