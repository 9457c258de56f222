"""The server's life: boot, faults, stop. Over real sockets."""

import json
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import anyio
import httpx
import pytest
from support import clients
from support.processes import is_refused

from gateway.profiles import load, names
from gateway.simulator import Fault, FaultOrder, Simulator, SimulatorOptions, running, simulator
from gateway.simulator.door import ClientConnection

Chat = Callable[..., dict[str, Any]]
Events = Callable[[str], list[Any]]
Raw = Callable[[Simulator, bytes], Awaitable[bytes]]
Until = Callable[[Callable[[], bool]], Awaitable[None]]
URL = "/v1/chat/completions"
DEAD = {
    "message": "The server had an error while processing your request.",
    "type": "InternalServerError",
    "param": None,
    "code": 500,
}


def request(body: object) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {URL} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(content)}\r\nconnection: close\r\n\r\n".encode() + content


# ------------------------------------------------------------------ boot


async def test_it_refuses_connections_until_it_has_booted(options: SimulatorOptions) -> None:
    async with simulator(replace(options, boot_s=20, speed=100)) as server:
        assert await is_refused(server.url)
        await server.booted.wait()
        assert not await is_refused(server.url)


@pytest.mark.parametrize(("profile", "boot_s"), [("h200-fp8", 147), ("h100-tp1-light", 120)])
async def test_a_profile_s_own_boot_time_is_used_on_request(profile: str, boot_s: float) -> None:
    async with simulator(SimulatorOptions(load(profile), boot_s=None, speed=1_000)) as server:
        before = anyio.current_time()
        await server.booted.wait()

        assert anyio.current_time() - before >= 0.9 * boot_s / 1_000


@pytest.mark.parametrize("fault", [Fault.CRASH, Fault.RESTART, Fault.REFUSE, Fault.SILENT_STOP])
async def test_a_fault_waits_for_the_boot(options: SimulatorOptions, fault: Fault, until: Until) -> None:
    order = FaultOrder(fault, for_s=0.0)
    async with simulator(replace(options, boot_s=20, speed=100, fault=order)) as server:
        before = anyio.current_time()
        await anyio.wait_all_tasks_blocked()
        assert await is_refused(server.url)
        await until(lambda: server.booted.is_set() and server.faults.order is None)
        assert anyio.current_time() - before >= 0.9 * 20 / 100
        assert not await is_refused(server.url)


async def test_its_port_is_its_own_even_while_it_refuses(options: SimulatorOptions) -> None:
    async with simulator(options) as server:
        port = int(server.url.rpartition(":")[2])
        with pytest.raises(OSError, match="in use"):
            async with running(replace(options, port=port)):
                pass


async def test_what_the_block_raises_arrives_as_it_is(options: SimulatorOptions) -> None:
    with pytest.raises(KeyError, match="mine"):
        async with running(options):
            raise KeyError("mine")


async def test_the_port_is_free_again_afterwards(options: SimulatorOptions) -> None:
    async with running(options) as url:
        pass
    async with running(replace(options, port=int(url.rpartition(":")[2]))) as again:
        assert again == url


async def test_every_profile_answers(chat: Chat) -> None:
    for name in names():
        async with running(SimulatorOptions(load(name), speed=1000)) as url, clients.http() as client:
            answer = await client.post(url + URL, json=chat(max_tokens=20, model=load(name).served_model))

        assert answer.json()["usage"]["completion_tokens"] == 20


def test_time_cannot_stand_still(options: SimulatorOptions) -> None:
    with pytest.raises(ValueError, match="above 0"):
        replace(options, speed=0)


async def test_idle_connections_are_closed_after_5_seconds(server: Simulator) -> None:
    assert server._config.timeout_keep_alive == 5


# ------------------------------------------------------------------ bytes


async def test_small_writes_go_out_at_once(server: Simulator, client: httpx.AsyncClient) -> None:
    await client.get("/health")
    (connection,) = server._state.connections
    assert isinstance(connection, ClientConnection)
    own = connection.transport.get_extra_info("socket")

    assert own.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_every_event_is_one_http_chunk(server: Simulator, raw: Raw, chat: Chat) -> None:
    head, _, body = (await raw(server, request(chat(max_tokens=9, stream=True)))).partition(b"\r\n\r\n")

    assert head.startswith(b"HTTP/1.1 200 OK\r\ndate: ")
    assert b"\r\nserver: uvicorn\r\n" in head
    chunks: list[bytes] = []
    while body:
        size, _, body = body.partition(b"\r\n")
        chunks.append(body[: int(size, 16)])
        body = body[int(size, 16) + 2 :]
    assert chunks[-2:] == [b"data: [DONE]\n\n", b""]
    assert all(chunk.startswith(b"data: ") and chunk.endswith(b"\n\n") for chunk in chunks[:-1])
    assert all(chunk.count(b"\n\n") == 1 for chunk in chunks[:-1])


# ------------------------------------------------------------------ faults of requests


async def fault(client: httpx.AsyncClient, **order: Any) -> None:
    answer = await client.post("/simulator/fault", json=order)
    assert answer.status_code == 200


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_die_mid_stream(client: httpx.AsyncClient, chat: Chat, stream: bool) -> None:
    await fault(client, fault="die_mid_stream", count=1, after_chunks=4)
    received: list[bytes] = []
    with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError)):
        async with client.stream(
            "POST", URL, json=chat(stream=stream, max_tokens=300, ignore_eos=True)
        ) as answer:
            async for part in answer.aiter_raw():
                received.append(part)

    assert bool(received) is stream
    assert (await client.post(URL, json=chat(max_tokens=3))).status_code == 200


async def test_truncate_ends_a_stream_as_if_nothing_were_missing(
    client: httpx.AsyncClient, chat: Chat, events: Events
) -> None:
    await fault(client, fault="truncate", count=1, after_chunks=4)
    answer = await client.post(URL, json=chat(stream=True, max_tokens=300, ignore_eos=True))
    found = events(answer.text)

    assert found[-1] != "[DONE]"
    assert all(event["choices"][0]["finish_reason"] is None for event in found)


async def test_truncate_breaks_off_a_body(client: httpx.AsyncClient, chat: Chat) -> None:
    await fault(client, fault="truncate", count=1)

    with pytest.raises(httpx.RemoteProtocolError):
        await client.post(URL, json=chat(max_tokens=30))


async def test_abort_looks_like_success(client: httpx.AsyncClient, chat: Chat, events: Events) -> None:
    await fault(client, fault="abort", count=2, after_chunks=4)
    options = {"include_usage": True}
    body = chat(max_tokens=300, ignore_eos=True)
    streamed = await client.post(URL, json={**body, "stream": True, "stream_options": options})
    whole = await client.post(URL, json=body)
    found = events(streamed.text)

    assert (streamed.status_code, whole.status_code) == (200, 200)
    assert found[-1] == "[DONE]"
    assert found[-3]["choices"][0]["finish_reason"] == "abort"
    assert 0 < found[-2]["usage"]["completion_tokens"] < 300
    assert whole.json()["choices"][0]["finish_reason"] == "abort"
    assert whole.json()["usage"]["completion_tokens"] < 300


async def test_garbage_is_no_http(server: Simulator, client: httpx.AsyncClient, chat: Chat, raw: Raw) -> None:
    await fault(client, fault="garbage", count=2)
    with pytest.raises(httpx.RemoteProtocolError):
        await client.post(URL, json=chat())

    assert not (await raw(server, request(chat()))).startswith(b"HTTP")


@pytest.mark.parametrize(
    ("order", "status", "text"),
    [
        ({"fault": "garbled"}, 200, "<html>"),
        ({"fault": "unavailable"}, 503, "currently busy"),
        ({"fault": "error"}, 500, "InternalServerError"),
        ({"fault": "drain"}, 500, '{"error":{"message":"cannot schedule new futures after shutdown"'),
    ],
    ids=["garbled", "unavailable", "error", "drain"],
)
async def test_wrong_answers(
    client: httpx.AsyncClient, chat: Chat, order: dict[str, Any], status: int, text: str
) -> None:
    await fault(client, **order, count=1)
    answer = await client.post(URL, json=chat(stream=True))

    assert answer.status_code == status
    assert text in answer.text
    assert (await client.get("/health")).status_code == 200
    assert (await client.post(URL, json=chat(max_tokens=3))).json()["usage"]["completion_tokens"] == 3


async def test_slow_headers(server: Simulator, client: httpx.AsyncClient, chat: Chat) -> None:
    await fault(client, fault="slow_headers", count=1, for_s=20)
    before = anyio.current_time()
    async with client.stream("POST", URL, json=chat(stream=True)):
        assert anyio.current_time() - before >= 20 / server.options.speed


async def test_a_fault_can_be_seen_and_lifted(client: httpx.AsyncClient, chat: Chat) -> None:
    await fault(client, fault="error")
    assert (await client.get("/simulator/fault")).json()["fault"] == "error"
    assert [(await client.post(URL, json=chat())).status_code for _ in range(3)] == [500] * 3
    await fault(client, fault=None)

    assert (await client.get("/simulator/fault")).json() == {"fault": None}
    assert (await client.post(URL, json=chat())).status_code == 200


async def test_an_order_need_not_say_that_it_is_json(client: httpx.AsyncClient) -> None:
    form = {"content-type": "application/x-www-form-urlencoded"}  # what `curl -d` sends
    answer = await client.post("/simulator/fault", content=b'{"fault": "error"}', headers=form)

    assert answer.json()["fault"] == "error"


async def test_an_unknown_fault_is_refused(client: httpx.AsyncClient) -> None:
    answer = await client.post("/simulator/fault", json={"fault": "explode"})

    assert answer.status_code == 400
    assert "die_mid_stream" in answer.json()["error"]["message"]


async def test_it_can_start_with_a_fault(options: SimulatorOptions, chat: Chat) -> None:
    faulty = replace(options, fault=FaultOrder(Fault.UNAVAILABLE))
    async with running(faulty) as url, clients.http() as client:
        assert (await client.post(url + URL, json=chat())).status_code == 503


# ------------------------------------------------------------------ faults of the server


async def test_a_hung_engine_is_healthy_and_silent(
    server: Simulator, client: httpx.AsyncClient, chat: Chat, until: Until
) -> None:
    answers: list[httpx.Response] = []

    async def ask() -> None:
        answers.append(await client.post(URL, json=chat(max_tokens=5)))

    await fault(client, fault="hang")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await until(lambda: server.host.engine.running == 1)
        assert (await client.get("/health")).status_code == 200
        first, second = [(await client.get("/metrics")).text for _ in range(2)]
        assert first.count("generation_tokens_total{") == second.count("generation_tokens_total{") == 1
        assert 'generation_tokens_total{engine="0",model_name="gemma-4-31b-it"} 0.0' in second
        assert answers == []
        await fault(client, fault=None)

    assert answers[0].json()["usage"]["completion_tokens"] == 5


async def test_a_hang_can_be_for_a_time(server: Simulator, client: httpx.AsyncClient, chat: Chat) -> None:
    await fault(client, fault="hang", for_s=5)

    assert (await client.post(URL, json=chat(max_tokens=5))).status_code == 200
    assert server.faults.order is None


async def test_refusing_keeps_running_answers(
    server: Simulator, client: httpx.AsyncClient, chat: Chat
) -> None:
    async with client.stream("POST", URL, json=chat(stream=True, max_tokens=600, ignore_eos=True)) as answer:
        parts = answer.aiter_text()
        await anext(parts)
        server.order(FaultOrder(Fault.REFUSE, for_s=10_000))
        await anyio.lowlevel.checkpoint()
        assert await is_refused(server.url)
        assert "[DONE]" in "".join([part async for part in parts])
    server.order(None)
    await anyio.lowlevel.checkpoint()
    assert (await client.post(URL, json=chat(max_tokens=3))).status_code == 200


async def test_a_crash_shows_as_an_error_event_and_done(
    options: SimulatorOptions, chat: Chat, events: Events, until: Until
) -> None:
    texts: list[str] = []
    long = chat(max_tokens=4_000, ignore_eos=True)

    async def ask(client: httpx.AsyncClient, body: dict[str, Any]) -> None:
        texts.append((await client.post(URL, json=body)).text)

    async with (
        simulator(replace(options, boot_s=30)) as server,
        clients.http(base_url=server.url) as client,
    ):
        await server.booted.wait()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, client, {**long, "stream": True})
            tasks.start_soon(ask, client, long)
            await until(lambda: server.generated_tokens > 20)
            server.order(FaultOrder(Fault.CRASH))
        stream, whole = sorted(texts, key=len, reverse=True)
        found = events(stream)

        assert found[-2:] == [{"error": DEAD}, "[DONE]"]
        assert '{"error":{"message":"The server' in stream
        assert json.loads(whole) == {"error": DEAD}
        await until(lambda: not server.booted.is_set())
        assert await is_refused(server.url)
        await server.booted.wait()
        assert (await client.post(URL, json=chat(max_tokens=3))).status_code == 200


async def test_a_dead_engine_answers_new_streams_with_the_error_alone(
    server: Simulator, client: httpx.AsyncClient, chat: Chat, events: Events
) -> None:
    server.host.die()
    streamed = await client.post(URL, json=chat(stream=True))
    whole = await client.post(URL, json=chat())

    assert (streamed.status_code, events(streamed.text)) == (200, [{"error": DEAD}, "[DONE]"])
    assert (whole.status_code, whole.json()) == (500, {"error": DEAD})
    assert (await client.get("/health")).status_code == 503


async def test_a_restart_aborts_answers_and_begins_anew(
    options: SimulatorOptions, chat: Chat, events: Events, until: Until
) -> None:
    streams: list[str] = []

    async def ask(client: httpx.AsyncClient) -> None:
        body = chat(stream=True, max_tokens=4_000, ignore_eos=True)
        streams.append((await client.post(URL, json=body)).text)

    async with (
        simulator(replace(options, boot_s=30)) as server,
        clients.http(base_url=server.url) as client,
    ):
        await server.booted.wait()
        started = server.host.tally.started_wall_s
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, client)
            await until(lambda: server.generated_tokens > 20)
            await fault(client, fault="restart")
        await until(lambda: not server.booted.is_set())
        assert await is_refused(server.url)
        await server.booted.wait()

        found = events(streams[0])
        assert found[-2]["choices"][0]["finish_reason"] == "abort"
        assert found[-1] == "[DONE]"
        assert server.host.tally.started_wall_s > started
        assert server.generated_tokens == 0
        assert (await client.get("/simulator/fault")).json() == {"fault": None}


async def test_a_silent_stop_refuses_and_waits_for_the_last_caller_to_leave(
    options: SimulatorOptions, chat: Chat, until: Until
) -> None:
    async with (
        simulator(replace(options, boot_s=30)) as server,
        clients.http(base_url=server.url) as client,
    ):
        await server.booted.wait()
        started = server.host.tally.started_wall_s
        body = chat(stream=True, max_tokens=4_000, ignore_eos=True)
        async with client.stream("POST", URL, json=body) as stream:
            chunks = stream.aiter_bytes()
            await anext(chunks)
            await fault(client, fault="silent_stop")
            with anyio.fail_after(20):
                while not await is_refused(server.url):
                    pass
            with anyio.move_on_after(0.1) as silence:
                async for _ in chunks:  # what it had sent before
                    pass
            assert silence.cancelled_caught
            assert server.booted.is_set()
        await until(lambda: server.host.tally.started_wall_s > started and server.booted.is_set())
        assert not await is_refused(server.url)


# ------------------------------------------------------------------ stop


async def test_a_stop_cuts_running_answers_off(
    server: Simulator, chat: Chat, events: Events, until: Until
) -> None:
    answers: list[httpx.Response] = []
    body = chat(max_tokens=4_000, ignore_eos=True)

    async def ask(members: dict[str, Any]) -> None:
        async with clients.http(base_url=server.url) as client:
            answers.append(await client.post(URL, json={**body, **members}))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask, {"stream": True})
        tasks.start_soon(ask, {})
        await until(lambda: server.generated_tokens > 20)
        await server.stop()
    streamed, whole = sorted(answers, key=lambda answer: "event-stream" not in answer.headers["content-type"])

    found = events(streamed.text)
    assert found[-2]["choices"][0]["finish_reason"] == "abort"
    assert found[-1] == "[DONE]"
    assert whole.status_code == 200
    assert whole.json()["choices"][0]["finish_reason"] == "abort"
    assert whole.json()["choices"][0]["message"]["content"]
    assert await is_refused(server.url)


async def test_a_stop_with_a_timeout_drains(
    options: SimulatorOptions, chat: Chat, events: Events, until: Until
) -> None:
    texts: list[str] = []
    async with (
        simulator(replace(options, shutdown_timeout_s=10_000)) as server,
        clients.http(base_url=server.url) as client,
        anyio.create_task_group() as tasks,
    ):

        async def ask() -> None:
            body = chat(stream=True, max_tokens=600, ignore_eos=True)
            texts.append((await client.post(URL, json=body)).text)

        tasks.start_soon(ask)
        await until(lambda: server.generated_tokens > 0)
        tasks.start_soon(server.stop)
        await until(lambda: server.is_draining)
        refused = await client.post(URL, json=chat())
        health = await client.get("/health")

    assert (refused.status_code, health.status_code) == (500, 200)
    assert refused.json()["error"]["message"] == "cannot schedule new futures after shutdown"
    assert events(texts[0])[-2]["choices"][0]["finish_reason"] == "length"
    assert await is_refused(server.url)


SCRIPT = """
import anyio
from gateway.profiles import load
from gateway.simulator import SimulatorOptions, serve
options = SimulatorOptions(load("h100-tp1-light"), speed=10)
anyio.run(lambda: serve(options, ready=lambda url: print(url, flush=True)))
"""


async def test_a_served_process_ends_well_on_sigterm(chat: Chat, events: Events) -> None:
    async with await anyio.open_process([sys.executable, "-c", SCRIPT], stderr=None) as process:
        assert process.stdout is not None
        url = (await process.stdout.receive()).decode().strip()
        async with (
            clients.http() as client,
            client.stream(
                "POST", url + URL, json=chat(stream=True, max_tokens=9_000, ignore_eos=True)
            ) as answer,
        ):
            parts = answer.aiter_text()
            text = await anext(parts)
            process.send_signal(signal.SIGTERM)
            text += "".join([part async for part in parts])
        status = await process.wait()

    assert events(text)[-2]["choices"][0]["finish_reason"] == "abort"
    assert status == 0


@pytest.mark.parametrize("uses_uvloop", [False, True], ids=["asyncio", "uvloop"])
@pytest.mark.parametrize("rounds", range(8))
def test_of_a_killed_server_no_connection_is_left(
    options: SimulatorOptions, rounds: int, uses_uvloop: bool
) -> None:
    """Nor one that the event loop has accepted and not handed over yet: that takes some of its rounds."""

    async def main() -> None:
        async with simulator(options) as server:
            with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as client:
                client.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" if rounds % 2 else b"GET ")
                for _ in range(rounds):
                    await anyio.lowlevel.checkpoint()
                await server.kill()
                client.settimeout(10)
                with suppress(ConnectionResetError):
                    while await anyio.to_thread.run_sync(client.recv, 4096):
                        pass

    anyio.run(main, backend_options={"use_uvloop": uses_uvloop})
