"""vLLM's sleep mode, as far as a gateway meets it. Over real sockets."""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any

import anyio
import httpx
import pytest
from support import clients

from gateway.simulator import Fault, FaultOrder, Simulator, SimulatorOptions, simulator

Chat = Callable[..., dict[str, Any]]
Events = Callable[[str], list[Any]]
Until = Callable[[Callable[[], bool]], Awaitable[None]]
URL = "/v1/chat/completions"


@pytest.fixture
async def server(options: SimulatorOptions) -> AsyncIterator[Simulator]:
    async with simulator(replace(options, sleep_mode=True)) as running:
        yield running


async def is_sleeping(client: httpx.AsyncClient) -> bool:
    answer = (await client.get("/is_sleeping")).json()
    assert set(answer) == {"is_sleeping"}
    return bool(answer["is_sleeping"])


def sleep_states(page: str) -> dict[str, float]:
    lines = [line for line in page.splitlines() if line.startswith("vllm:engine_sleep_state{")]
    return {line.split('sleep_state="')[1].split('"')[0]: float(line.rsplit(" ", 1)[1]) for line in lines}


async def test_without_sleep_mode_there_is_no_such_route(options: SimulatorOptions) -> None:
    async with simulator(options) as server, clients.http(base_url=server.url) as client:
        found = [await client.post("/sleep"), await client.post("/wake_up"), await client.get("/is_sleeping")]

    assert [(answer.status_code, answer.json()) for answer in found] == [(404, {"detail": "Not Found"})] * 3


async def test_it_sleeps_and_wakes_in_its_time(server: Simulator, client: httpx.AsyncClient) -> None:
    assert not await is_sleeping(client)
    before = anyio.current_time()
    slept = await client.post("/sleep", params={"level": 1})
    assert anyio.current_time() - before >= server.options.sleep_s / server.options.speed
    assert (slept.status_code, slept.content) == (200, b"")
    assert await is_sleeping(client)
    assert (await client.get("/health")).status_code == 200
    before = anyio.current_time()
    woke = await client.post("/wake_up")

    assert anyio.current_time() - before >= server.options.wake_s / server.options.speed
    assert (woke.status_code, woke.content) == (200, b"")
    assert not await is_sleeping(client)
    assert (await client.post("/wake_up")).status_code == 200


async def test_its_prefix_cache_is_empty_after_it_has_slept(
    server: Simulator, client: httpx.AsyncClient, chat: Chat
) -> None:
    found = []
    for level in (0, 0, 1, 0):
        await client.post("/sleep", params={"level": level})
        await client.post("/wake_up")
        await client.post(URL, json=chat("river stone " * 300, max_tokens=1))
        page = (await client.get("/metrics")).text
        found.append(float(page.partition("vllm:prefix_cache_hits_total{")[2].split()[1]))

    assert found == [0, 512, 512, 1024]


@pytest.mark.parametrize(
    ("level", "asleep"), [(0, None), (1, "weights_offloaded"), (2, "discard_all")], ids=str
)
async def test_its_metrics_say_how_deep_it_sleeps(
    client: httpx.AsyncClient, level: int, asleep: str | None
) -> None:
    awake = sleep_states((await client.get("/metrics")).text)
    await client.post(f"/sleep?level={level}")
    found = sleep_states((await client.get("/metrics")).text)

    assert awake == {"awake": 1, "weights_offloaded": 0, "discard_all": 0}
    assert found == {state: float(state == asleep) for state in awake}


async def test_a_sleeping_engine_takes_requests_and_says_nothing(
    server: Simulator, client: httpx.AsyncClient, chat: Chat, until: Until
) -> None:
    await client.post("/sleep?level=1")
    answers: list[httpx.Response] = []

    async def ask() -> None:
        answers.append(await client.post(URL, json=chat(max_tokens=5)))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        async with client.stream("POST", URL, json=chat(stream=True, max_tokens=5)) as stream:
            assert stream.status_code == 200
            await until(lambda: server.load == 2)
            page = (await client.get("/metrics")).text
            assert 'num_requests_waiting{engine="0",model_name="gemma-4-31b-it"} 0.0' in page  # as vLLM 0.32
            assert 'num_requests_running{engine="0",model_name="gemma-4-31b-it"} 0.0' in page
            assert (answers, server.generated_tokens) == ([], 0)
            await client.post("/wake_up")
            assert (await stream.aread()).endswith(b"data: [DONE]\n\n")

    assert answers[0].json()["usage"]["completion_tokens"] == 5
    assert server.cut == 0


async def test_a_caller_who_leaves_a_sleeping_engine_is_forgotten(
    server: Simulator, client: httpx.AsyncClient, chat: Chat, until: Until
) -> None:
    await client.post("/sleep?level=1")
    async with client.stream("POST", URL, json=chat(stream=True, max_tokens=5)):
        assert server.load == 1
    await until(lambda: server.load == 0)
    await client.post("/wake_up")

    assert server.host.answers == []


async def test_falling_asleep_cuts_off_what_runs(
    server: Simulator, client: httpx.AsyncClient, chat: Chat, events: Events, until: Until
) -> None:
    texts: list[str] = []

    async def ask() -> None:
        body = chat(stream=True, max_tokens=4_000, ignore_eos=True)
        texts.append((await client.post(URL, json=body)).text)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await until(lambda: server.generated_tokens > 5)
        await client.post("/sleep")

    found = events(texts[0])
    assert (found[-2]["choices"][0]["finish_reason"], found[-1]) == ("abort", "[DONE]")
    assert server.cut == 1


async def test_with_mode_wait_it_finishes_what_runs(
    server: Simulator, client: httpx.AsyncClient, chat: Chat, events: Events, until: Until
) -> None:
    texts: list[str] = []

    async def ask() -> None:
        body = chat(stream=True, max_tokens=300, ignore_eos=True)
        texts.append((await client.post(URL, json=body)).text)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask)
        await until(lambda: server.generated_tokens > 5)
        await client.post("/sleep?mode=wait")
        assert server.host.is_idle

    assert events(texts[0])[-2]["choices"][0]["finish_reason"] == "length"
    assert server.cut == 0


@pytest.mark.parametrize("query", ["level=3", "level=deep", "mode=gently"])
async def test_what_it_cannot_do_is_500(client: httpx.AsyncClient, query: str) -> None:
    assert (await client.post(f"/sleep?{query}")).status_code == 500
    assert not await is_sleeping(client)


async def test_weights_that_were_thrown_away_do_not_come_back_by_themselves(
    client: httpx.AsyncClient, chat: Chat
) -> None:
    await client.post("/sleep?level=2")
    await client.post("/wake_up")
    answer = await client.post(URL, json=chat('Say "OK".'))

    assert answer.json()["choices"][0]["message"]["content"] == "!"


async def test_a_restart_wakes_it(
    server: Simulator, client: httpx.AsyncClient, chat: Chat, until: Until
) -> None:
    await client.post("/sleep")
    server.order(FaultOrder(Fault.RESTART, for_s=20))
    await until(lambda: not server.booted.is_set())
    await server.booted.wait()

    assert not await is_sleeping(client)
    assert (await client.post(URL, json=chat(max_tokens=5))).status_code == 200
