"""Chats through the queue, with the unmodified SDK and on raw sockets, over a real store."""

import json
import re
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx
import openai
import pytest
from support import clients
from support.processes import config, running, until
from support.redis_server import RedisServer
from support.site import Site, jobs_site, simulated, site

from gateway.core.chat_jobs import job_id
from gateway.core.jobs import Job, JobStatus

ASK: dict[str, Any] = {
    "model": "gemma-4",
    "messages": [{"role": "user", "content": "Why is the sky blue?"}],
    "max_tokens": 40,
}
LONG: dict[str, Any] = {**ASK, "max_tokens": 500}
THINKING: dict[str, Any] = {"reasoning_effort": "high"}
FOREVER: dict[str, Any] = {"ignore_eos": True}
ASYNC = {"Prefer": "respond-async"}


@asynccontextmanager
async def chat_site(
    folder: Path,
    store: RedisServer,
    *,
    speed: float = 5.0,
    first_speed: float | None = None,
    on_disconnect: str = "cancel",
    waiting: dict[str, Any] | None = None,
    **sections: Any,
) -> AsyncIterator[Site]:
    """Run a gateway that serves thinking through the queue, and everything else as ever.

    `first_speed`: that of the backend that gets the first request, where it is another.
    """
    fleet = simulated({"light-0": "h100-tp1-light"}, speed=first_speed or speed)
    fleet |= simulated({"light-1": "h100-tp1-light"}, speed=speed)
    reasoning = {
        "class": "reasoning",
        "when": {"reasoning": True},
        "pools": ["light"],
        "queue": {"on_disconnect": on_disconnect},
        "waiting": waiting or {},
    }
    plain = {"class": "short_chat", "pools": ["light"]}
    sections = {"models": {"gemma-4": {"classes": [reasoning, plain]}}, **sections}
    async with jobs_site(folder, store, fleet=fleet, **sections) as running:
        yield running


@pytest.fixture
async def gateway(tmp_path: Path, store: RedisServer) -> AsyncIterator[Site]:
    async with chat_site(tmp_path, store) as running:
        yield running
        await running.eventually(running.idle)


async def jobs_of(running: Site) -> list[Job]:
    return list(await running.jobs.find())


async def job_that_is(running: Site, id: str, *statuses: JobStatus) -> Job:
    """Return a job once it has one of these statuses."""
    jobs = running.jobs
    with anyio.fail_after(60):
        while True:
            job = await jobs.get(id)
            assert job is not None
            if job.status in statuses:
                return job
            await jobs.changed(id, 2**53, 5.0, job.status)


async def ended(running: Site, id: str) -> Job:
    return await job_that_is(running, id, *(status for status in JobStatus if status.is_final))


def text_of(chunks: list[Any]) -> tuple[str, str]:
    """Return thought and words of a stream."""
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    thought = "".join(getattr(delta, "reasoning", None) or "" for delta in deltas)
    return thought, "".join(delta.content or "" for delta in deltas)


def said(completion: Any) -> tuple[str, str]:
    """Return thought and words of a whole answer."""
    message = completion.choices[0].message
    return getattr(message, "reasoning", None) or "", message.content or ""


# ------------------------------------------------------------------ Prefer: respond-async


async def test_a_chat_is_handed_over_and_fetched_in_both_forms(gateway: Site) -> None:
    client = gateway.openai(api_key="a")

    raw = await client.chat.completions.with_raw_response.create(
        **ASK, temperature=0.5, metadata={"n": "1"}, extra_headers=ASYNC
    )
    body = json.loads(raw.content)
    job = await ended(gateway, body["id"])
    response = await client.responses.retrieve(body["id"])
    completion = await client.chat.completions.retrieve(body["id"].replace("resp_", "chatcmpl-"))
    async with clients.http() as http:
        noted = (await http.get(f"{gateway.admin_url}/admin/requests")).json()

    assert raw.status_code == 202
    assert {one["id"]: one["status"] for one in noted}[raw.headers["x-request-id"]] == 202
    assert raw.headers["location"] == f"/v1/responses/{body['id']}"
    assert raw.headers["preference-applied"] == "respond-async"
    assert 1 <= int(raw.headers["retry-after"]) <= 59
    assert raw.headers["x-gateway-job"] == body["id"]
    assert raw.headers["x-gateway-class"] == "short_chat"
    assert int(raw.headers["x-gateway-prompt-tokens"]) > 0
    assert raw.headers["x-request-id"].startswith("req-")
    assert (body["object"], body["background"], body["metadata"]) == ("response", True, {"n": "1"})
    assert body["status"] in {"queued", "in_progress"}
    assert body["temperature"] == 0.5
    assert response.status in {"completed", "incomplete"}
    assert response.max_output_tokens == 40
    assert (completion.object, completion.model) == ("chat.completion", "gemma-4")
    assert completion.created == int(job.created_at)
    assert completion.choices[0].finish_reason in {"stop", "length"}
    assert completion.choices[0].message.content == response.output_text != ""
    assert completion.usage is not None
    assert response.usage is not None
    assert completion.usage.completion_tokens == response.usage.output_tokens > 0


async def test_one_that_ends_in_time_is_answered_as_ever(gateway: Site) -> None:
    client = gateway.openai(api_key="a")

    raw = await client.chat.completions.with_raw_response.create(
        **ASK, seed=1, n=2, extra_headers={"Prefer": "respond-async, wait=60"}
    )
    plain = json.loads((await client.chat.completions.with_raw_response.create(**ASK, seed=1, n=2)).content)
    body = json.loads(raw.content)

    assert raw.status_code == 200
    assert raw.headers["preference-applied"] == "respond-async, wait=60"
    assert raw.headers["x-gateway-job"] == body["id"].replace("chatcmpl-", "resp_")
    for one, other in ((body, plain), *zip(body["choices"], plain["choices"], strict=True)):
        assert {name for name in one if one[name]} == {name for name in other if other[name]}
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert body["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"] > 0
    fetched = await client.chat.completions.with_raw_response.retrieve(body["id"])
    assert json.loads(fetched.content) == body
    response = await client.responses.retrieve(raw.headers["x-gateway-job"])
    assert response.output_text == body["choices"][0]["message"]["content"]  # of its first choice


async def test_one_that_fails_in_time_is_the_error_it_would_have_been(
    tmp_path: Path, store: RedisServer
) -> None:
    async with chat_site(tmp_path, store, jobs={"attempts_max": 1}) as running:
        client = running.openai(api_key="a")
        for backend in running.backends.values():
            await fault(backend.url, "error")
        with pytest.raises(openai.InternalServerError) as caught:
            await client.chat.completions.create(**ASK, extra_headers={"Prefer": "respond-async, wait=60"})
        fetched_as = caught.value.response.headers["x-gateway-job"].replace("resp_", "chatcmpl-")
        with pytest.raises(openai.InternalServerError) as again:
            await client.chat.completions.retrieve(fetched_as)

    for error in (caught.value, again.value):
        assert (error.status_code, error.code) == (502, "job_poisoned")
        assert error.response.headers["x-should-retry"] == "false"
    assert caught.value.response.headers["preference-applied"] == "respond-async, wait=60"


async def fault(url: str, name: str | None) -> None:
    async with clients.http() as http:
        answer = await http.post(f"{url}/simulator/fault", json={"fault": name})
        assert answer.is_success, answer.text


async def test_the_preferences_of_several_headers_count(gateway: Site) -> None:
    async with gateway.http() as http:
        answer = await http.post(
            "/v1/chat/completions",
            json=ASK,
            headers=[
                ("authorization", "Bearer a"),
                ("prefer", "return=minimal"),
                ("prefer", 'Wait="60", RESPOND-async'),
            ],
        )

    assert answer.status_code == 200
    assert answer.headers["preference-applied"] == "respond-async, wait=60"


@pytest.mark.parametrize(
    "headers", [{}, {"Prefer": "wait=1"}, {"Prefer": "return=minimal"}, {"Prefer": "respond-async=no"}]
)
async def test_who_does_not_ask_is_never_told_to_come_back(gateway: Site, headers: dict[str, str]) -> None:
    client = gateway.openai(api_key="a")
    for fields in (ASK, {**ASK, **THINKING}):
        raw = await client.chat.completions.with_raw_response.create(**fields, extra_headers=headers)

        assert raw.status_code == 200
        assert "preference-applied" not in raw.headers
        assert any(said(raw.parse()))


async def test_a_stream_is_served_live_whatever_is_preferred(gateway: Site) -> None:
    client = gateway.openai(api_key="a")
    raw = await client.chat.completions.with_raw_response.create(**ASK, stream=True, extra_headers=ASYNC)

    assert raw.status_code == 200
    assert "preference-applied" not in raw.headers
    assert any(text_of([chunk async for chunk in raw.parse()]))
    assert await jobs_of(gateway) == []


async def test_without_jobs_the_preference_is_ignored(tmp_path: Path) -> None:
    fleet = simulated({"light-0": "h100-tp1-light"})
    classes = [{"class": "short_chat", "pools": ["light"]}]
    sections: Any = {"pools": {"light": ["light-0"]}, "models": {"gemma-4": {"classes": classes}}}
    async with site(tmp_path, fleet=fleet, **sections) as running:
        raw = await running.openai().chat.completions.with_raw_response.create(**ASK, extra_headers=ASYNC)

    assert raw.status_code == 200
    assert raw.parse().choices[0].message.content
    assert "preference-applied" not in raw.headers


async def test_the_same_idempotency_key_is_the_same_job(gateway: Site) -> None:
    client = gateway.openai(api_key="a")
    headers = {**ASYNC, "Idempotency-Key": "k-1"}

    one = await client.chat.completions.with_raw_response.create(**ASK, extra_headers=headers)
    other = await client.chat.completions.with_raw_response.create(
        **ASK, extra_headers={**headers, "Prefer": "respond-async, wait=60"}
    )

    assert (one.status_code, other.status_code) == (202, 200)  # the job is what is found, not an answer
    assert other.headers["x-gateway-job"] == one.headers["x-gateway-job"]
    assert len(await jobs_of(gateway)) == 1
    with pytest.raises(openai.UnprocessableEntityError) as caught:
        await client.chat.completions.create(**{**ASK, "max_tokens": 9}, extra_headers=headers)
    assert caught.value.code == "idempotency_key_reused"


async def test_a_pending_one_is_not_there_yet_and_another_keys_never(
    tmp_path: Path, store: RedisServer
) -> None:
    async with chat_site(tmp_path, store, speed=0.5) as running:
        mine, theirs = running.openai(api_key="a"), running.openai(api_key="b")
        raw = await mine.chat.completions.with_raw_response.create(
            **LONG, extra_body=FOREVER, extra_headers=ASYNC
        )
        id = raw.headers["x-gateway-job"]
        chat_id = id.replace("resp_", "chatcmpl-")

        with pytest.raises(openai.ConflictError) as pending:
            await mine.chat.completions.retrieve(chat_id)
        for client, wanted in ((theirs, chat_id), (mine, "chatcmpl-" + "0" * 32), (mine, id), (mine, "x")):
            with pytest.raises(openai.NotFoundError) as missing:
                await client.chat.completions.retrieve(wanted)
            assert missing.value.code == "response_not_found"
            assert "only those of jobs are" in missing.value.message
        with pytest.raises(openai.NotFoundError):
            await theirs.responses.retrieve(id)
        with pytest.raises(openai.BadRequestError):
            await mine.responses.create(model="gemma-4", input="And?", previous_response_id=id)
        await mine.responses.cancel(id)
        with pytest.raises(openai.APIStatusError) as cancelled:
            await mine.chat.completions.retrieve(chat_id)
        with pytest.raises(openai.BadRequestError) as no_response:
            await mine.responses.create(model="gemma-4", input="And?", previous_response_id=id)
        await running.eventually(running.idle)

    assert pending.value.code == "completion_not_finished"
    assert 1 <= int(pending.value.response.headers["retry-after"]) <= 59
    assert (cancelled.value.status_code, cancelled.value.code) == (410, "job_cancelled")
    assert no_response.value.code == "unsupported_parameter"


async def test_what_an_engine_does_not_stream_is_no_job(gateway: Site) -> None:
    raw = await gateway.openai(api_key="a").chat.completions.with_raw_response.create(
        **ASK, extra_body={"prompt_logprobs": 1, **THINKING}, extra_headers=ASYNC
    )

    assert raw.status_code == 200
    assert await jobs_of(gateway) == []


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"model": "gpt-5"}, "model_not_found"),
        ({"messages": [{"role": "user", "content": "word " * 60_000}]}, "context_length_exceeded"),
        ({"extra_headers": {**ASYNC, "x-gateway-priority": "urgent"}}, "invalid_request"),
    ],
)
async def test_what_can_never_run_is_refused_when_it_is_handed_over(
    gateway: Site, fields: dict[str, Any], code: str
) -> None:
    for more in ({}, THINKING):
        with pytest.raises(openai.APIStatusError) as caught:
            await gateway.openai(api_key="a").chat.completions.create(
                **{**ASK, **more, "extra_headers": ASYNC, **fields}
            )

        assert caught.value.code == code
    assert await jobs_of(gateway) == []


# ------------------------------------------------------------------ in place


@pytest.mark.parametrize("include_usage", [False, True])
async def test_a_stream_in_place_is_a_stream_like_any_other(gateway: Site, include_usage: bool) -> None:
    client = gateway.openai(api_key="a")
    options: Any = {"stream_options": {"include_usage": True}} if include_usage else {}

    raw = await client.chat.completions.with_raw_response.create(**ASK, **THINKING, stream=True, **options)
    chunks = [chunk async for chunk in raw.parse()]
    id = raw.headers["x-gateway-job"]
    completion = await client.chat.completions.retrieve(chunks[0].id)

    assert raw.headers["x-gateway-class"] == "reasoning"
    assert raw.headers["content-type"].startswith("text/event-stream")
    assert {chunk.id for chunk in chunks} == {id.replace("resp_", "chatcmpl-")}
    assert len({chunk.created for chunk in chunks}) == 1
    assert [chunk.choices[0].delta.role for chunk in chunks if chunk.choices].count("assistant") == 1
    assert text_of(chunks) == said(completion) != ("", "")
    assert [bool(chunk.usage) for chunk in chunks].count(True) == include_usage
    assert (await client.responses.retrieve(id)).status in {"completed", "incomplete"}


async def test_a_whole_answer_in_place_is_an_answer_like_any_other(gateway: Site) -> None:
    client = gateway.openai(api_key="a")

    raw = await client.chat.completions.with_raw_response.create(**ASK, **THINKING)
    completion = raw.parse()

    assert raw.headers["x-gateway-class"] == "reasoning"
    assert any(said(completion))
    assert completion.usage is not None
    assert (await client.chat.completions.retrieve(completion.id)).to_dict() == completion.to_dict()
    assert len(await jobs_of(gateway)) == 1


async def test_a_job_is_run_in_the_class_in_which_it_was_handed_over(
    tmp_path: Path, store: RedisServer
) -> None:
    """Though it is a stream by then, and headers are gone by which it was told."""
    classes = [
        {
            "class": "careful",
            "when": {"stream": False, "header": {"careful": True}},
            "pools": ["one"],
            "queue": {},
        },
        {"class": "short_chat", "pools": ["other"]},
    ]
    sections: Any = {
        "pools": {"one": ["light-0"], "other": ["light-1"]},
        "models": {"gemma-4": {"classes": classes}},
    }
    async with chat_site(tmp_path, store, **sections) as running:
        raw = await running.openai(api_key="a").chat.completions.with_raw_response.create(
            **ASK, extra_headers={"careful": "yes"}
        )
        async with clients.http() as http:
            requests = (await http.get(f"{running.admin_url}/admin/requests")).json()

    assert raw.headers["x-gateway-class"] == "careful"
    assert raw.headers["x-gateway-job"]
    run, handed_over = requests  # the newest first
    assert run["backend"] == "light-0"
    assert (handed_over["ending"], handed_over["route"]) == ("handed_over", "/v1/chat/completions")


async def test_who_comes_again_finds_the_job_that_was_finished_without_it(
    tmp_path: Path, store: RedisServer
) -> None:
    async with chat_site(tmp_path, store, speed=1.25, on_disconnect="finish") as running:
        client = running.openai(api_key="a")
        request: Any = {**LONG, **THINKING, "extra_body": FOREVER, "extra_headers": {"Idempotency-Key": "k"}}
        stream = await client.chat.completions.create(**request, stream=True)
        first = await anext(stream)
        await stream.close()
        await running.eventually(lambda: not running.gateway.applications.serving.in_flight)

        chunks = [chunk async for chunk in await client.chat.completions.create(**request, stream=True)]

        again = await client.chat.completions.with_raw_response.create(**request, stream=True)

        assert {chunk.id for chunk in chunks} == {first.id}
        assert text_of(chunks) == said(await client.chat.completions.retrieve(first.id))
        assert text_of([chunk async for chunk in again.parse()]) == text_of(chunks)
        assert again.headers["x-gateway-replayed"] == "true"
        assert len(await jobs_of(running)) == 1


async def test_who_comes_again_after_the_end_gets_the_whole_stream(
    tmp_path: Path, store: RedisServer
) -> None:
    async with chat_site(tmp_path, store, on_disconnect="finish") as running:
        client = running.openai(api_key="a")
        request: Any = {**ASK, **THINKING, "extra_headers": {"Idempotency-Key": "k"}}
        stream = await client.chat.completions.create(**request, stream=True)
        first = await anext(stream)
        await stream.close()
        await running.eventually(lambda: not running.gateway.applications.serving.in_flight)
        await ended(running, job_id(first.id) or "")

        chunks = [chunk async for chunk in await client.chat.completions.create(**request, stream=True)]

        assert {chunk.id for chunk in chunks} == {first.id}
        assert text_of(chunks) == said(await client.chat.completions.retrieve(first.id))


async def test_who_comes_again_after_a_failure_gets_another_job(tmp_path: Path, store: RedisServer) -> None:
    async with chat_site(tmp_path, store, on_disconnect="finish", jobs={"attempts_max": 1}) as running:
        client = running.openai(api_key="a")
        request: Any = {**ASK, **THINKING, "extra_headers": {"Idempotency-Key": "k"}}
        for backend in running.backends.values():
            await fault(backend.url, "error")
        with pytest.raises(openai.InternalServerError) as caught:
            await client.chat.completions.create(**request)
        for backend in running.backends.values():
            await fault(backend.url, None)
        completion = await client.chat.completions.create(**request)
        again = await client.chat.completions.create(**request)
        assert len(await jobs_of(running)) == 2

    assert caught.value.code == "job_poisoned"
    assert any(said(completion))
    assert again.id == completion.id


async def test_a_stream_waits_for_its_store(tmp_path: Path, store: RedisServer) -> None:
    async with chat_site(tmp_path, store, speed=1.25) as running:
        client = running.openai(api_key="a")
        stream = await client.chat.completions.create(**LONG, **THINKING, extra_body=FOREVER, stream=True)
        chunks = [await anext(stream)]
        store.kill()
        # What is known of a store that is away: that nobody can be handed over.
        with pytest.raises(openai.InternalServerError):
            await client.chat.completions.create(**ASK, extra_headers=ASYNC)
        store.start()
        chunks += [chunk async for chunk in stream]
        completion = await client.chat.completions.retrieve(chunks[0].id)

    assert chunks[-1].choices[0].finish_reason == "length"
    assert text_of(chunks) == said(completion)


@asynccontextmanager
async def occupied(running: Site) -> AsyncIterator[str]:
    """Have the one job that a gateway runs at once be another, while the block runs."""
    client = running.openai(api_key="a")
    raw = await client.chat.completions.with_raw_response.create(
        **{**LONG, **THINKING, "max_tokens": 20_000}, extra_body=FOREVER, extra_headers=ASYNC
    )
    id = raw.headers["x-gateway-job"]
    await job_that_is(running, id, JobStatus.IN_PROGRESS)
    yield id
    await client.responses.cancel(id)


PIECE_BYTES = 16_384
"""A body is kept in pieces of at least this size, if at all."""

WAITING: dict[str, tuple[str, dict[str, Any]]] = {
    "stream": ("/v1/chat/completions", {"stream": True, "reasoning_effort": "high"}),
    "whole": ("/v1/chat/completions", {"reasoning_effort": "high"}),
    "responses": ("/v1/responses", {"background": True, "stream": True, "reasoning": {"effort": "high"}}),
}


@pytest.mark.parametrize("name", WAITING)
@pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": True})], ids=["uvloop"])
async def test_who_waits_for_a_job_has_its_body_in_the_store_alone(
    tmp_path: Path, store: RedisServer, without_collector: None, name: str
) -> None:
    path, members = WAITING[name]
    said = "All that a document says. " * 3_500
    prompt = {"input": said} if name == "responses" else {"messages": [{"role": "user", "content": said}]}
    body = json.dumps({"model": "gemma-4", **members, **prompt}).encode()
    fields = f"host: x\r\nauthorization: Bearer a\r\ncontent-length: {len(body)}\r\n\r\n"
    request = f"POST {path} HTTP/1.1\r\n{fields}".encode() + body
    callers = 20
    async with (
        chat_site(tmp_path, store, speed=1.0, jobs={"running_max": 1}) as running,
        occupied(running),
        AsyncExitStack() as stack,
    ):
        host, _, port = running.url.removeprefix("http://").partition(":")

        async def come(waiting: int) -> None:
            caller = await stack.enter_async_context(await anyio.connect_tcp(host, int(port)))
            await caller.send(request)

            async def waits() -> bool:
                return len(await jobs_of(running)) == waiting + 1  # and the one that runs

            try:
                await until(waits)
            except TimeoutError:
                with anyio.move_on_after(1.0):
                    pytest.fail(f"{await jobs_of(running)}, {await caller.receive()!r}")
                raise

        await come(1)
        tracemalloc.start()
        for number in range(callers):
            await come(number + 2)

        async def has_let_go() -> bool:  # of the last ones a little later, on a busy machine
            held = [block.size for block in tracemalloc.take_snapshot().traces]
            # Whatever else comes and goes meanwhile, such as lines of the log, is in smaller blocks, but for
            # half a megabyte: the words of the simulated answer, and tables of modules that are loaded late.
            return sum(size for size in held if size >= PIECE_BYTES) < callers / 2 * len(said)

        try:
            await until(has_let_go)
        finally:
            tracemalloc.stop()


async def test_who_waits_for_a_stream_gets_comments_and_its_place(
    tmp_path: Path, store: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the raw socket: what the SDK does not show."""
    monkeypatch.setattr("gateway.downstream.waiting_caller.KEEP_ALIVE_S", 0.2)
    waiting = {"keep_alive_after_s": 0.1}
    async with (
        chat_site(tmp_path, store, waiting=waiting, jobs={"running_max": 1}) as running,
        AsyncExitStack() as streams,
    ):
        http = await streams.enter_async_context(running.http())
        request = {**ASK, **THINKING, "stream": True}
        async with occupied(running):
            bodies = [
                await streams.enter_async_context(
                    http.stream(
                        "POST",
                        "/v1/chat/completions",
                        json=request,
                        headers={"authorization": "Bearer a", **more},
                    )
                )
                for more in ({}, {"x-gateway-queue-position": "true"})
            ]
            lines = [body.aiter_lines() for body in bodies]
            began = anyio.current_time()
            plain: list[str] = []
            while plain.count(": keep-alive") < 3:
                plain.append(await anext(lines[0]))
            placed: list[str] = []
            while not any(line.startswith(": queue") for line in placed):
                placed.append(await anext(lines[1]))
        plain += [line async for line in lines[0]]
        assert plain.count(": keep-alive") <= 2 + (anyio.current_time() - began) / 0.2
        placed += [line async for line in lines[1]]
        await running.eventually(running.idle)

    assert not any(line.startswith(": queue") for line in plain)
    places = [line for line in placed if line.startswith(": queue")]
    assert re.fullmatch(r": queue position=2 expected_start_s=(unknown|[0-9.]+)", places[0])
    for got in (plain, placed):
        assert [line for line in got if line][-1] == "data: [DONE]"
        assert all(line.startswith(("data: {", "data: [DONE]", ": ")) for line in got if line)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("on_disconnect", ["cancel", "finish"])
async def test_who_leaves_takes_the_job_along_or_not(
    tmp_path: Path, store: RedisServer, on_disconnect: str, stream: bool
) -> None:
    async with chat_site(tmp_path, store, speed=1.25, on_disconnect=on_disconnect) as running:
        client = running.openai(api_key="a")
        async with anyio.create_task_group() as tasks:

            async def ask() -> None:
                if not stream:
                    await client.chat.completions.create(**LONG, **THINKING, extra_body=FOREVER)
                async for _ in await client.chat.completions.create(
                    **LONG, **THINKING, extra_body=FOREVER, stream=True
                ):
                    pass

            tasks.start_soon(ask)
            await running.eventually(lambda: running.gateway.worker.running == 1)  # type: ignore[union-attr]
            [job] = await jobs_of(running)
            jobs = running.jobs
            await jobs.changed(job.id, 1, 30.0, JobStatus.IN_PROGRESS)
            tasks.cancel_scope.cancel()
        job = await ended(running, job.id)
        await running.eventually(running.idle)
        fetching = running.openai(api_key="a").chat.completions.retrieve(job.id.replace("resp_", "chatcmpl-"))
        if on_disconnect == "finish":
            assert job.status is JobStatus.INCOMPLETE
            assert any(said(await fetching))
        else:
            assert job.status is JobStatus.CANCELLED
            with pytest.raises(openai.APIStatusError) as caught:
                await fetching
            assert caught.value.code == "job_cancelled"


SLOW_THEN_FAST: Any = {"first_speed": 0.5, "speed": 12.0}
"""However slow the machine, an answer is far from its end when its backend dies; the other soon ends it."""


async def crash_the_backend_of_the_one_that_runs(running: Site) -> None:
    loads = running.gateway.ledger.loads()
    await fault(running.backends[next(name for name, load in loads.items() if load.seqs)].url, "crash")


async def test_a_stream_goes_on_where_its_backend_dies(tmp_path: Path, store: RedisServer) -> None:
    async with chat_site(tmp_path, store, first_speed=2.0, speed=50.0) as running:
        client = running.openai(api_key="a")
        request: Any = {**LONG, **THINKING, "max_tokens": 2_000}  # words come only after hundreds of thought
        stream = await client.chat.completions.create(**request, extra_body=FOREVER, stream=True)
        chunks = []
        async for chunk in stream:
            chunks.append(chunk)
            if chunk.choices and chunk.choices[0].delta.content:
                await crash_the_backend_of_the_one_that_runs(running)
                break
        chunks += [chunk async for chunk in stream]
        job = await ended(running, chunks[0].id.replace("chatcmpl-", "resp_"))
        completion = await client.chat.completions.retrieve(chunks[0].id)

    assert (job.attempt, job.failures) == (2, 1)
    assert text_of(chunks) == said(completion)
    assert [chunk.choices[0].delta.role for chunk in chunks if chunk.choices].count("assistant") == 1
    assert chunks[-1].choices[0].finish_reason == "length"


async def test_a_stream_whose_answer_begins_anew_ends_and_the_answer_is_fetched(
    tmp_path: Path, store: RedisServer
) -> None:
    """Nothing is shown twice: what was sent is void, and that is said."""
    async with chat_site(tmp_path, store, **SLOW_THEN_FAST, jobs={"resume": "restart"}) as running:
        client = running.openai(api_key="a")
        stream = await client.chat.completions.create(**LONG, **THINKING, extra_body=FOREVER, stream=True)
        chunks = [await anext(stream)]
        await crash_the_backend_of_the_one_that_runs(running)
        with pytest.raises(openai.APIError) as caught:
            async for chunk in stream:
                chunks.append(chunk)
        job = await ended(running, chunks[0].id.replace("chatcmpl-", "resp_"))
        completion = await client.chat.completions.retrieve(chunks[0].id)

    assert caught.value.code == "stream_broken"
    assert f"/v1/chat/completions/{chunks[0].id}" in caught.value.message
    assert job.status is JobStatus.INCOMPLETE
    assert any(said(completion))
    assert completion.choices[0].finish_reason == "length"


async def test_a_whole_answer_does_not_show_that_its_backend_died(tmp_path: Path, store: RedisServer) -> None:
    async with chat_site(tmp_path, store, **SLOW_THEN_FAST, jobs={"resume": "restart"}) as running:
        client = running.openai(api_key="a")
        answers: list[Any] = []
        async with anyio.create_task_group() as tasks:

            async def ask() -> None:
                answers.append(await client.chat.completions.create(**LONG, **THINKING, extra_body=FOREVER))

            tasks.start_soon(ask)
            await running.eventually(lambda: running.gateway.worker.running == 1)  # type: ignore[union-attr]
            [job] = await jobs_of(running)
            jobs = running.jobs
            await jobs.changed(job.id, 1, 30.0, JobStatus.IN_PROGRESS)
            await crash_the_backend_of_the_one_that_runs(running)
        job = await ended(running, job.id)

    assert job.failures == 1
    assert answers[0].choices[0].finish_reason == "length"
    assert answers[0].usage.completion_tokens == 500


@pytest.mark.parametrize("stream", [True, False])
async def test_who_has_no_patience_is_told_so_and_the_job_ends(
    tmp_path: Path, store: RedisServer, stream: bool
) -> None:
    async with chat_site(tmp_path, store, jobs={"running_max": 1}) as running:
        async with occupied(running) as other:
            with pytest.raises(openai.RateLimitError) as caught:
                await running.openai(api_key="a").chat.completions.create(
                    **ASK, **THINKING, stream=stream, extra_headers={"x-gateway-timeout-s": "0.3"}
                )
            [job] = [job for job in await jobs_of(running) if job.id != other]
        await running.eventually(running.idle)

    assert caught.value.code == "deadline"
    assert caught.value.response.headers["x-gateway-job"] == job.id
    assert job.status is JobStatus.CANCELLED


@pytest.mark.parametrize("how", ["a stream", "in place", "respond-async"])
async def test_whose_job_is_lost_is_told_to_retry_and_not_that_an_id_is_unknown(
    tmp_path: Path, store: RedisServer, how: str
) -> None:
    asked = {"extra_headers": {"Prefer": "respond-async, wait=60"}} if how == "respond-async" else THINKING
    async with chat_site(tmp_path, store, jobs={"running_max": 1}) as running:
        async with occupied(running) as other, anyio.create_task_group() as tasks:

            async def lose() -> None:
                lost: list[Job] = []
                while not lost:
                    lost = [job for job in await jobs_of(running) if job.id != other]
                await running.jobs.delete(lost[0].id)

            tasks.start_soon(lose)
            with pytest.raises(openai.InternalServerError) as caught:
                await running.openai(api_key="a").chat.completions.create(
                    **ASK, **asked, stream=how == "a stream"
                )
        await running.eventually(running.idle)

    assert (caught.value.status_code, caught.value.code) == (503, "store_unavailable")
    assert caught.value.response.headers["retry-after"] == "1"


@pytest.mark.parametrize("stream", [True, False])
async def test_what_a_backend_refuses_is_the_callers_error(gateway: Site, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await gateway.openai(api_key="a").chat.completions.create(
            **ASK, **THINKING, stream=stream, extra_body={"top_p": 7}
        )

    assert (caught.value.code, caught.value.param) == ("invalid_request", "top_p")
    assert caught.value.response.headers["x-gateway-class"] == "reasoning"


async def test_a_job_that_fails_after_words_ends_their_stream(tmp_path: Path, store: RedisServer) -> None:
    async with chat_site(tmp_path, store, speed=0.5, jobs={"attempts_max": 1}) as running:
        client = running.openai(api_key="a")
        stream = await client.chat.completions.create(**LONG, **THINKING, extra_body=FOREVER, stream=True)
        first = await anext(stream)
        await crash_the_backend_of_the_one_that_runs(running)
        with pytest.raises(openai.APIError) as caught:
            _ = [chunk async for chunk in stream]

    assert first.id.startswith("chatcmpl-")
    assert caught.value.code == "job_poisoned"


async def test_without_its_store_a_gateway_serves_such_chats_itself(
    tmp_path: Path, store: RedisServer
) -> None:
    async with chat_site(tmp_path, store) as running:
        store.kill()
        client = running.openai(api_key="a")
        raw = await client.chat.completions.with_raw_response.create(**ASK, **THINKING)
        with pytest.raises(openai.InternalServerError) as caught:
            await client.chat.completions.create(**ASK, extra_headers=ASYNC)

    assert any(said(raw.parse()))
    assert "x-gateway-job" not in raw.headers
    assert caught.value.code == "store_unavailable"


async def test_what_a_store_accepts_too_late_does_not_run(tmp_path: Path, store: RedisServer) -> None:
    async with chat_site(tmp_path, store, on_disconnect="finish") as running:
        client = running.openai(api_key="a")
        assert running.gateway.jobs is not None
        jobs, revocations = running.gateway.jobs.store, running.gateway.jobs.revocations

        async def ask(headers: dict[str, str]) -> None:
            with suppress(openai.InternalServerError):  # where a job is required, it is refused
                raw = await client.chat.completions.with_raw_response.create(
                    **ASK, **THINKING, extra_headers=headers
                )
                assert "x-gateway-job" not in raw.headers

        async def create() -> None:
            with pytest.raises(openai.InternalServerError):
                await client.batches.create(
                    input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
                )

        line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": ASK}
        file = await client.files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch")
        async with anyio.create_task_group() as tasks:
            for _ in range(8):
                tasks.start_soon(jobs.queue)  # connects, so that what follows is sent and not read
        store.stall()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(create)
            for headers in ({}, {"Idempotency-Key": "k"}, ASYNC):
                tasks.start_soon(ask, headers)
        store.resume()
        await running.eventually(lambda: not revocations.waiting)
        assert [job for job in await jobs_of(running) if not job.new.batch] == []
        batches = (await client.batches.list()).data
        assert {batch.status for batch in batches} <= {"cancelling", "cancelled"}


async def test_a_prompt_is_counted_once_where_it_is_not_a_job(
    gateway: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = []
    estimator = gateway.gateway.estimator
    estimate = estimator.estimate

    async def counting(*arguments: Any) -> Any:
        counted.append(arguments)
        return await estimate(*arguments)

    monkeypatch.setattr(estimator, "estimate", counting)
    await gateway.openai(api_key="a").chat.completions.create(**ASK)
    assert len(counted) == 1
    await gateway.openai(api_key="a").chat.completions.create(**ASK, **THINKING)
    assert len(counted) == 3  # once to hand it over, once where it is worked off


async def test_a_gateway_that_is_stopped_cancels_nobodys_job(tmp_path: Path, store: RedisServer) -> None:
    """It cuts its callers off: they have not left."""
    async with chat_site(tmp_path, store, speed=1.25) as running:
        client = running.openai(api_key="a")
        stream = await client.chat.completions.create(**LONG, **THINKING, extra_body=FOREVER, stream=True)
        first = await anext(stream)
    async with chat_site(tmp_path, store, speed=12.0) as running:
        await ended(running, first.id.replace("chatcmpl-", "resp_"))
        completion = await running.openai(api_key="a").chat.completions.retrieve(first.id)

    assert completion.choices[0].finish_reason == "length"


@pytest.mark.parametrize("form", ["stream", "stream-with-comments", "whole", "respond-async"])
async def test_who_waits_for_a_job_is_told_where_its_answer_will_be(
    tmp_path: Path, store: RedisServer, form: str
) -> None:
    """Their gateway stops before it comes."""
    told: list[Any] = []
    headers = {**ASYNC, "Prefer": "respond-async, wait=250"} if form == "respond-async" else {}
    silent = {"keep_alive_after_s": 0.01 if form == "stream-with-comments" else None}
    async with anyio.create_task_group() as asking, AsyncExitStack() as stack:
        one = await stack.enter_async_context(
            chat_site(tmp_path, store, jobs={"running_max": 1}, waiting=silent)
        )
        client = await stack.enter_async_context(clients.http(timeout=60))

        async def ask() -> None:
            body = {**ASK, **THINKING, "stream": form.startswith("stream")}
            headers["authorization"] = "Bearer a"
            told.append(await client.post(f"{one.url}/v1/chat/completions", json=body, headers=headers))

        async with occupied(one):
            asking.start_soon(ask)
            await one.eventually(lambda: len(one.gateway.journal.recent()) == 2)
            job, _ = await jobs_of(one)
            await one.eventually(lambda: one.gateway.applications.serving.in_flight == 1)
            one.gateway.applications.end()
            await one.eventually(lambda: bool(told))

        completion = f"/v1/chat/completions/{job.id.replace('resp_', 'chatcmpl-')}"
        (answer,) = told
        if form == "respond-async":
            assert (answer.status_code, answer.headers["location"]) == (202, f"/v1/responses/{job.id}")
        elif form == "stream-with-comments":
            assert answer.status_code == 200
            assert '"code":"draining"' in answer.text
            assert completion in answer.text
            assert answer.text.endswith("data: [DONE]\n\n")
        else:
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
            assert completion in answer.json()["error"]["message"]
            assert answer.headers["x-gateway-job"] == job.id


async def test_whose_job_is_accepted_as_the_gateway_ends_is_told_so(
    tmp_path: Path, store: RedisServer
) -> None:
    async with chat_site(tmp_path, store) as one, clients.http(timeout=10) as client:
        assert one.gateway.worker is not None
        await one.gateway.worker.stop()
        one.gateway.applications.end()
        answer = await client.post(
            f"{one.url}/v1/chat/completions",
            json={**ASK, **THINKING},
            headers={"authorization": "Bearer a"},
        )

    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
    assert answer.headers["x-gateway-job"].startswith("resp_")


async def test_who_has_a_stream_is_told_of_the_end_while_a_silent_store_takes_no_jobs_back(
    tmp_path: Path, store: RedisServer
) -> None:
    left: list[int] = []
    async with clients.http(timeout=60) as http, anyio.create_task_group() as reading:
        async with chat_site(tmp_path, store, speed=0.25) as one:
            worker = one.gateway.worker
            assert worker is not None
            client = one.openai(api_key="a")
            job = await client.chat.completions.with_raw_response.create(
                **LONG, **THINKING, extra_body=FOREVER, extra_headers=ASYNC
            )
            await job_that_is(one, job.headers["x-gateway-job"], JobStatus.IN_PROGRESS)
            url, begun, answers = f"{one.url}/v1/chat/completions", anyio.Event(), []

            async def ask() -> None:
                body = {**LONG, **FOREVER, "stream": True}
                async with http.stream(
                    "POST", url, json=body, headers={"authorization": "Bearer a"}
                ) as answer:
                    async for line in answer.aiter_lines():
                        begun.set()
                        answers.append(line)
                left.append(worker.running)
                store.resume()

            reading.start_soon(ask)
            await begun.wait()
            store.stall()

    assert any("shutting down" in line for line in answers)
    assert left == [1]


async def test_who_leaves_a_gateway_that_drains_has_left(tmp_path: Path, store: RedisServer) -> None:
    async with chat_site(tmp_path, store, jobs={"running_max": 1}) as one, occupied(one):
        async with (
            clients.http(timeout=60) as client,
            anyio.create_task_group() as asking,
        ):
            body, headers = {**ASK, **THINKING}, {"authorization": "Bearer a"}
            asking.start_soon(
                partial(client.post, f"{one.url}/v1/chat/completions", json=body, headers=headers)
            )
            await one.eventually(lambda: len(one.gateway.journal.recent()) == 2)
            await one.eventually(lambda: one.gateway.applications.waiting_for_jobs == 1)
            job, _ = await jobs_of(one)
            one.gateway.applications.serving.refuse()
            asking.cancel_scope.cancel()
        assert (await ended(one, job.id)).status is JobStatus.CANCELLED


CONFIG = """
models:
  gemma-4:
    classes:
      - {{class: reasoning, when: {{reasoning: true}}, pools: [light], queue: {{}}}}
      - {{class: short_chat, pools: [light]}}
store: {{url: "{url}"}}
jobs: {{running_max: 1, work_in_serve: {works}}}
health: {{interval_s: 0.2}}
"""


@asynccontextmanager
async def processes(
    folder: Path, store: RedisServer, *works: bool, speed: float
) -> AsyncIterator[list[tuple[Any, str]]]:
    """Run gateways in front of one backend, in processes of their own; yields each with its URL.

    `works`: for each, whether it runs jobs.
    """
    async with AsyncExitStack() as stack:
        simulate = running("simulate", "--profile", "h100-tp1-light", "--port", "0", "--speed", str(speed))
        backend = (await (await stack.enter_async_context(simulate)).wait_for(r"(http://127\.0\.0\.1:\d+)"))[
            1
        ]
        started = []
        for number, does_work in enumerate(works):
            own = folder / str(number)
            own.mkdir()
            rest = CONFIG.format(url=store.url, works=str(does_work).lower())
            file = config(own, {"light-0": (backend, "h100-tp1-light")}, {"light": ["light-0"]}, rest)
            started.append(await stack.enter_async_context(running("serve", "--config", str(file))))
        yield [(one, (await one.wait_for(r"serves (http://\S+)/v1"))[1]) for one in started]


async def test_a_gateway_that_drains_serves_those_who_wait_in_its_queue(
    tmp_path: Path, store: RedisServer
) -> None:
    """Nobody else is there to do it; and then it ends, long before its time for that is over."""
    async with (
        processes(tmp_path, store, True, speed=5) as [(gateway, url)],
        clients.sdk(base_url=f"{url}/v1", api_key="x", max_retries=0) as client,
        clients.http(base_url=url, timeout=60) as http,
    ):
        first = await client.chat.completions.create(**LONG, **THINKING, extra_body=FOREVER, stream=True)
        await anext(first)
        request = {**ASK, **THINKING, "stream": True}
        headers = {"x-gateway-queue-position": "true"}
        async with http.stream("POST", "/v1/chat/completions", json=request, headers=headers) as second:
            lines = second.aiter_lines()
            assert (await anext(lines)).startswith(": queue position=1")
            gateway.process.terminate()
            await gateway.wait_for("draining")
            with anyio.fail_after(60):
                chunks = [chunk async for chunk in first]
                got = [line async for line in lines if line]
        with anyio.fail_after(20):
            await gateway.process.wait()

    assert chunks[-1].choices[0].finish_reason == "length"
    assert got[-1] == "data: [DONE]"


@pytest.mark.parametrize("how", ["posted", "fetched", "waited-for"])
async def test_a_gateway_that_drains_runs_the_queued_jobs_that_callers_follow(
    tmp_path: Path, store: RedisServer, how: str
) -> None:
    """Nobody else is there to do it, and the gateway would wait for the followers until its time is over."""
    question: dict[str, Any] = {"model": "gemma-4", "input": "Why is the sky blue?", "background": True}
    async with (
        processes(tmp_path, store, True, speed=5) as [(gateway, url)],
        clients.sdk(base_url=f"{url}/v1", api_key="x", max_retries=0) as client,
        clients.http(base_url=url, timeout=60) as http,
    ):
        running_now = await client.responses.create(
            **question, max_output_tokens=1_000, extra_body=FOREVER, stream=True
        )
        async for event in running_now:
            if event.type == "response.output_text.delta":
                break
        await running_now.close()

        body = {**question, "max_output_tokens": 20}
        asked = http.build_request("POST", "/v1/responses", json={**body, "stream": True})
        if how == "fetched":
            job = await client.responses.create(**body)
            asked = http.build_request("GET", f"/v1/responses/{job.id}?stream=true")
        if how == "waited-for":
            prefer = {"prefer": "respond-async, wait=250"}
            asked = http.build_request("POST", "/v1/chat/completions", json=ASK, headers=prefer)
        begun, said = anyio.Event(), []

        async def ask() -> None:
            answer = await http.send(asked, stream=True)
            async for text in answer.aiter_text():
                said.append(text)
                begun.set()

        async with anyio.create_task_group() as asking:
            asking.start_soon(ask)
            if how == "waited-for":
                await gateway.wait_for("became job ")
            else:
                await begun.wait()
            gateway.process.terminate()
            with anyio.fail_after(60):
                assert await gateway.process.wait() == 0

    told = "".join(said)
    assert ('"object":"chat.completion"' if how == "waited-for" else "event: response.incomplete") in told


async def test_a_gateway_that_drains_finishes_what_callers_of_another_one_wait_for(
    tmp_path: Path, store: RedisServer
) -> None:
    """Their streams do not break off, as in a rolling restart; and then it ends."""
    async with (
        processes(tmp_path, store, False, True, speed=1.25) as [(_, url), (working, _)],
        clients.sdk(base_url=f"{url}/v1", api_key="x", max_retries=0) as client,
    ):
        stream = await client.chat.completions.create(**LONG, **THINKING, extra_body=FOREVER, stream=True)
        chunks = [await anext(stream)]
        working.process.terminate()
        await working.wait_for("draining: 1 requests in flight")
        with anyio.fail_after(60):
            chunks += [chunk async for chunk in stream]
            assert await working.process.wait() == 0

    assert chunks[-1].choices[0].finish_reason == "length"


async def test_the_answer_outlives_the_gateway_that_was_killed(tmp_path: Path, store: RedisServer) -> None:
    """Two gateways on one store: the one with the caller dies in the middle, the other has the answer."""
    async with processes(tmp_path, store, True, True, speed=1.25) as [(gateway, url), (_, other)]:
        async with clients.sdk(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
            stream = await client.chat.completions.create(**LONG, **THINKING, extra_body=FOREVER, stream=True)
            first = await anext(stream)
            gateway.process.kill()
            with pytest.raises((openai.APIConnectionError, httpx.RemoteProtocolError)):  # openai 2
                _ = [chunk async for chunk in stream]
        async with clients.sdk(base_url=f"{other}/v1", api_key="x", max_retries=0) as client:
            with anyio.fail_after(60):
                while True:
                    try:
                        completion = await client.chat.completions.retrieve(first.id)
                        break
                    except openai.ConflictError:
                        await anyio.sleep(0.2)

    assert completion.id == first.id
    assert completion.choices[0].finish_reason == "length"
    assert any(said(completion))


async def test_explain_says_that_a_chat_is_queued_without_a_longest_wait(gateway: Site) -> None:
    chat = {"model": "gemma-4", "messages": [{"role": "user", "content": "hi"}], "reasoning_effort": "high"}
    thought = {"model": "gemma-4", "prompt": "hi", "reasoning_effort": "high"}
    questions: list[dict[str, Any]] = [{"request": chat}, {"request": thought}]
    async with clients.http(base_url=gateway.admin_url) as http:
        queued, direct = [
            (await http.post("/admin/explain", json={**question, "key": "a"})).json()
            for question in questions
        ]

    assert queued["decision"]["traffic_class"] == "reasoning"
    assert queued["outlook"]["max_wait_s"] is None
    assert "runs as a job" in queued["notes"][0]
    assert direct["outlook"]["max_wait_s"] > 0
    assert not direct["notes"]
