"""The routes about the server, and how answers behave over time."""

import json
import socket
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import anyio
import anyio.to_thread
import httpx
import pytest
from support import clients
from support.engine_wire import WEATHER, post

from gateway.core.backends import Modalities
from gateway.simulator import Simulator, SimulatorOptions, running, simulator
from gateway.simulator.tally import Sequences

Chat = Callable[..., dict[str, Any]]
Until = Callable[[Callable[[], bool]], Awaitable[None]]
Events = Callable[[str], list[Any]]


# ------------------------------------------------------------------ about the server


async def test_models_names_the_window(client: httpx.AsyncClient) -> None:
    card = (await client.get("/v1/models")).json()["data"][0]

    assert list(card) == [
        "id", "object", "created", "owned_by", "root", "parent", "max_model_len", "permission",
    ]  # fmt: skip
    assert (card["id"], card["max_model_len"]) == ("gemma-4-31b-it", 4096)


async def test_small_routes(client: httpx.AsyncClient) -> None:
    assert (await client.get("/version")).json() == {"version": "0.33.0"}
    assert (await client.get("/load")).json() == {"server_load": 0}
    assert (await client.get("/health")).content == (await client.post("/ping")).content == b""


@pytest.mark.parametrize(
    "members",
    [
        {},
        {"tools": [WEATHER]},
        {"chat_template_kwargs": {"enable_thinking": True}},
        {"text": "river stone " * 900},
        {"text": "5 € für 12 Äpfel, bitte!\n\n\t{}"},
    ],
    ids=["plain", "tools", "thinking", "long", "mixed"],
)
async def test_tokenize_agrees_with_usage(
    client: httpx.AsyncClient, chat: Chat, members: dict[str, Any]
) -> None:
    body = chat(members.pop("text", "Name a river."), **members)
    counted = (await post(client, {**body, "return_token_strs": True}, "/tokenize")).json()
    usage = (await post(client, {**body, "max_tokens": 1})).json()["usage"]

    assert counted["count"] == len(counted["tokens"]) == len(counted["token_strs"]) == usage["prompt_tokens"]
    assert counted["max_model_len"] == 4096


async def test_tokens_read_back(client: httpx.AsyncClient) -> None:
    tokens = (await post(client, {"prompt": "Name a river."}, "/tokenize")).json()
    text = (await post(client, {"tokens": tokens["tokens"]}, "/detokenize")).json()

    assert tokens["count"] == 5
    assert tokens["token_strs"] is None
    assert text == {"prompt": "<bos>Name a river."}


async def test_tokenize_has_no_length_limit_but_knows_its_models(client: httpx.AsyncClient) -> None:
    assert (await post(client, {"prompt": "river " * 50_000}, "/tokenize")).json()["count"] > 50_000
    assert (await post(client, {"model": "gpt-5", "prompt": "a"}, "/tokenize")).status_code == 404
    assert (await post(client, {}, "/tokenize")).status_code == 400


async def test_metrics_follow_the_engine(client: httpx.AsyncClient, chat: Chat) -> None:
    await post(client, chat(max_tokens=10))
    await post(client, {"messages": []})
    page = await client.get("/metrics")
    lines = page.text.splitlines()
    labels = 'engine="0",model_name="gemma-4-31b-it"'

    assert page.headers["content-type"] == "text/plain; version=1.0.0; charset=utf-8"
    for line in (
        f"vllm:num_requests_running{{{labels}}} 0.0",
        f"vllm:num_requests_waiting{{{labels}}} 0.0",
        f'vllm:num_requests_waiting_by_reason{{{labels},reason="capacity"}} 0.0',
        f"vllm:kv_cache_usage_perc{{{labels}}} 0.0",
        f"vllm:prompt_tokens_total{{{labels}}} 17.0",
        f"vllm:generation_tokens_total{{{labels}}} 10.0",
        f"vllm:num_preemptions_total{{{labels}}} 0.0",
        f"vllm:time_to_first_token_seconds_count{{{labels}}} 1.0",
        f'vllm:time_to_first_token_seconds_bucket{{{labels},le="+Inf"}} 1.0',
        f"vllm:request_generation_tokens_sum{{{labels}}} 10.0",
        'vllm:request_success_total{engine="0",finished_reason="length",model_name="gemma-4-31b-it"} 1.0',
        'http_requests_total{handler="/v1/chat/completions",method="POST",status="2xx"} 1.0',
        'http_requests_total{handler="/v1/chat/completions",method="POST",status="4xx"} 1.0',
    ):
        assert line in lines
    assert 'kv_cache_max_concurrency="' in page.text
    assert any(line.startswith("process_start_time_seconds 1") for line in lines)


PROMPT_METRICS = ("prefix_cache_queries", "prefix_cache_hits", "prompt_tokens_cached", "prompt_tokens")


async def counted(client: httpx.AsyncClient) -> list[float]:
    """Return what the page says of prompts: tokens looked for, found, cached, and all."""
    page = (await client.get("/metrics")).text.splitlines()
    return [
        float(line.rpartition(" ")[2])
        for metric in PROMPT_METRICS
        for line in page
        if line.startswith(f"vllm:{metric}_total{{")
    ]


@pytest.mark.parametrize("caches", [True, False])
async def test_a_prompt_that_was_seen_before_is_found_in_whole_blocks(
    options: SimulatorOptions, chat: Chat, caches: bool
) -> None:
    asked = chat("river stone " * 300, max_tokens=1)
    async with (
        simulator(replace(options, prefix_caching=caches)) as server,
        clients.http(base_url=server.url) as client,
    ):
        usages = [(await post(client, asked)).json()["usage"] for _ in range(2)]
        page = (await client.get("/metrics")).text
        tokens = usages[0]["prompt_tokens"]

        assert 513 < tokens < 640
        assert await counted(client) == [2 * tokens, *(2 * [512.0 if caches else 0.0]), 2 * tokens]
    assert f'enable_prefix_caching="{caches}"' in page
    assert [usage["prompt_tokens_details"] for usage in usages] == [None, None]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_usage_says_how_much_of_a_prompt_was_cached_if_told_to(
    options: SimulatorOptions, chat: Chat, events: Events, stream: bool
) -> None:
    """As vLLM 0.32 with `--enable-prompt-tokens-details`."""
    asked = chat("river stone " * 300, max_tokens=1, stream=stream)
    if stream:
        asked["stream_options"] = {"include_usage": True}
    async with (
        simulator(replace(options, prompt_tokens_details=True)) as server,
        clients.http(base_url=server.url) as client,
    ):
        answers = [await post(client, asked) for _ in range(2)]
    usages = [events(answer.text)[-2]["usage"] if stream else answer.json()["usage"] for answer in answers]

    assert [usage["prompt_tokens_details"] for usage in usages] == [
        {"cached_tokens": cached, "created_cache_tokens": 512 - cached}
        | ({} if stream else {"multimodal_tokens": None})
        for cached in (0, 512)
    ]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_usage_of_a_completion_does_not_say_what_was_kept_of_it(
    options: SimulatorOptions, events: Events, stream: bool
) -> None:
    """As vLLM 0.32 with `--enable-prompt-tokens-details`."""
    asked = {"model": "gemma-4-31b-it", "prompt": "river stone " * 300, "max_tokens": 1, "stream": stream}
    if stream:
        asked["stream_options"] = {"include_usage": True}
    async with (
        simulator(replace(options, prompt_tokens_details=True)) as server,
        clients.http(base_url=server.url) as client,
    ):
        answer = await post(client, asked, "/v1/completions")
    usage = events(answer.text)[-2]["usage"] if stream else answer.json()["usage"]

    assert usage["prompt_tokens_details"] == {"cached_tokens": 0} | (
        {} if stream else {"created_cache_tokens": None, "multimodal_tokens": None}
    )


async def test_what_follows_an_image_is_never_found(options: SimulatorOptions, chat: Chat) -> None:
    """Two images are the same to it."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGVsbG8="}}
    takes_images = replace(options.profile, modalities=Modalities(images_max=None, audios_max=0))
    asked = chat("", max_tokens=1)
    asked["messages"][-1]["content"] = [
        {"type": "text", "text": "river stone " * 100},
        image,
        {"type": "text", "text": "river stone " * 300},
    ]
    async with (
        simulator(replace(options, profile=takes_images)) as server,
        clients.http(base_url=server.url) as client,
    ):
        for _ in range(2):
            await post(client, asked)

        assert (await counted(client))[1] == 128


async def test_metrics_remember_the_most_that_was_held(client: httpx.AsyncClient, chat: Chat) -> None:
    async with anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(post, client, chat(max_tokens=200, ignore_eos=True))
    values = dict(line.rsplit(" ", 1) for line in (await client.get("/metrics")).text.splitlines())

    assert values["simulator:requests_peak"] == "3.0"
    assert 0 < float(values["simulator:kv_cache_usage_peak"]) < 0.01
    assert float(values["simulator:step_lag_seconds_peak"]) > 0
    assert values['vllm:num_requests_running{engine="0",model_name="gemma-4-31b-it"}'] == "0.0"


# ------------------------------------------------------------------ behaviour over time


async def test_the_status_comes_at_admission_and_nothing_before_the_first_token(
    options: SimulatorOptions, chat: Chat, until: Until
) -> None:
    one_at_a_time = replace(options.profile, flags=replace(options.profile.flags, max_num_seqs=1))
    async with (
        simulator(replace(options, profile=one_at_a_time)) as server,
        clients.http(base_url=server.url) as client,
        client.stream(
            "POST", "/v1/chat/completions", json=chat(stream=True, max_tokens=4_000, ignore_eos=True)
        ) as first,
    ):
        assert first.status_code == 200
        first_chunks = first.aiter_raw()
        await anext(first_chunks)
        server.host.hang()
        async with client.stream("POST", "/v1/chat/completions", json=chat(stream=True)) as second:
            assert second.status_code == 200
            await until(lambda: server.host.engine.waiting == 1)
            assert (await client.get("/load")).json() == {"server_load": 2}
            metrics = (await client.get("/metrics")).text
            assert 'vllm:num_requests_running{engine="0",model_name="gemma-4-31b-it"} 1.0' in metrics
            assert 'vllm:num_requests_waiting{engine="0",model_name="gemma-4-31b-it"} 0.0' in metrics
            assert 'vllm:num_requests_running{engine="0",model_name="gemma-4-31b-it"} 1.0' in metrics


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_the_first_token_pays_the_overhead(options: SimulatorOptions, chat: Chat, stream: bool) -> None:
    slow = replace(options.profile, perf=replace(options.profile.perf, overhead_s=20.0))
    async with running(replace(options, profile=slow)) as url, clients.http(base_url=url) as client:
        before = anyio.current_time()
        answer = await post(client, chat(max_tokens=1, stream=stream))

        assert answer.status_code == 200
        assert anyio.current_time() - before >= 20 / options.speed


async def test_all_streams_of_a_server_get_their_tokens_in_the_same_step(
    server: Simulator, client: httpx.AsyncClient, chat: Chat, until: Until
) -> None:
    steps: list[set[int]] = []
    inner = server.host._hand_out

    def note(result: Any, now: float) -> None:
        steps.append({number for number, _ in result.emitted})
        inner(result, now)

    server.host._hand_out = note  # type: ignore[method-assign]
    server.host.hang()
    async with anyio.create_task_group() as tasks:
        for index in range(5):
            tasks.start_soon(post, client, chat(f"{index}", max_tokens=30, ignore_eos=True))
        await until(lambda: len(server.host.answers) == 5)
        server.host.resume()

    assert {0, 1, 2, 3, 4} in steps


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_a_client_that_leaves_stops_the_work(
    server: Simulator, client: httpx.AsyncClient, chat: Chat, until: Until, stream: bool
) -> None:
    body = chat(max_tokens=4_000, ignore_eos=True, stream=stream)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(post, client, body)
        await until(lambda: server.host.engine.running == 1)
        tasks.cancel_scope.cancel()
    await until(lambda: not server.load)

    assert (server.host.engine.running, server.host.engine.waiting, server.host.engine.kv_usage) == (
        0,
        0,
        0.0,
    )
    aborted = 'finished_reason="abort",model_name="gemma-4-31b-it"} 0.0'
    assert aborted in (await client.get("/metrics")).text


async def test_a_client_that_leaves_after_a_long_body_stops_the_work(
    server: Simulator, client: httpx.AsyncClient, chat: Chat, until: Until
) -> None:
    body = chat(max_tokens=4_000, ignore_eos=True, unknown="x" * 200_000)
    server.host.hang()  # nothing ends by itself
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(post, client, body)
        await until(lambda: server.load == 1)
        tasks.cancel_scope.cancel()
    await until(lambda: not server.load)


async def test_a_client_that_leaves_while_its_prompt_is_read_never_reaches_the_engine(
    server: Simulator, client: httpx.AsyncClient, chat: Chat, until: Until
) -> None:
    capacity = replace(server.options.profile.capacity, context_tokens=1_000_000)
    server.options = replace(server.options, profile=replace(server.options.profile, capacity=capacity))
    readers = anyio.to_thread.current_default_thread_limiter()
    async with AsyncExitStack() as busy:
        for _ in range(int(readers.total_tokens)):
            await readers.acquire_on_behalf_of(held := object())
            busy.callback(readers.release_on_behalf_of, held)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(post, client, chat("river stone " * 15_000, max_tokens=3))
            await until(lambda: readers.statistics().tasks_waiting == 1)
            tasks.cancel_scope.cancel()
        await until(lambda: not server._state.connections)
    await until(lambda: not server._state.tasks)

    assert not server.host.tally.sequences.changes


async def test_the_history_of_what_the_engine_held(
    server: Simulator, client: httpx.AsyncClient, chat: Chat, until: Until
) -> None:
    await post(client, chat(max_tokens=3, n=2))
    told = (await client.get("/simulator/sequences")).json()
    assert (told["held"], told["aborted"], told["is_whole"]) == (0, 0, True)
    held = [change[1] for change in told["changes"]]
    assert (held[0], held[-1]) == (2, 0)
    assert (await client.delete("/simulator/sequences")).status_code == 204

    server.host.hang()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(post, client, chat(max_tokens=3))
        await until(lambda: bool(server.host.answers))
        assert (await client.get("/simulator/sequences")).json()["held"] == 1
        tasks.cancel_scope.cancel()
    await until(lambda: not server.host.answers)

    told = (await client.get("/simulator/sequences")).json()
    assert [change[1:] for change in told["changes"]] == [[1, 0], [0, 1]]
    first, second = (change[0] for change in told["changes"])
    assert first <= second


async def test_a_client_that_left_in_the_moment_of_the_end_counts_as_one_that_left(
    server: Simulator, chat: Chat, until: Until
) -> None:
    # Whoever counts places has given this one back by then: the next request may come before the end of this.
    body = json.dumps(chat(max_tokens=1)).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n"
    server.host.hang()
    url = httpx.URL(server.url)
    with socket.create_connection((url.host, url.port)) as client:
        client.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        await until(lambda: server.host.engine.running == 1)
    server.host.resume()
    await until(lambda: server.host.is_idle)

    assert [change[1:] for change in server.host.tally.sequences.changes] == [(1, 0), (0, 1)]


def test_a_history_that_grew_too_long_says_so() -> None:
    sequences = Sequences()
    for number in range(65_537):
        sequences.note(number, number)
    assert not sequences.is_whole
    assert len(sequences.changes) == 65_536
    sequences.forget()
    assert (sequences.is_whole, list(sequences.changes), sequences.held) == (True, [], 65_536)


async def test_a_full_server_answers_503(options: SimulatorOptions, chat: Chat, until: Until) -> None:
    async with (
        simulator(replace(options, max_num_queued_reqs=1)) as server,
        clients.http(base_url=server.url) as client,
    ):
        server.host.hang()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(post, client, chat(max_tokens=5))
            await until(lambda: server.load == 1)
            refused = await post(client, chat(stream=True))
            metrics = (await client.get("/metrics")).text
            server.host.resume()

    assert refused.status_code == 503
    assert "retry-after" not in refused.headers
    assert refused.json()["error"] == {
        "message": "The engine is currently busy and cannot accept new requests. "
        "Please try again later or on a different instance.",
        "type": "Service Unavailable",
        "param": None,
        "code": 503,
    }
    assert 'reason="max_num_queued_reqs"} 1.0' in metrics
