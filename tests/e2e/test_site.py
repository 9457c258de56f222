"""The gateway as applications and operators see it, over real sockets, before a simulated fleet."""

import base64
import json
import logging
import re
import struct
import zlib
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import httpx
import openai
import pytest
from anyio.abc import SocketStream
from click.testing import CliRunner
from support import clients
from support.engine_events import DONE, delta, role
from support.raw_server import LAST_CHUNK, STREAM_HEAD, answer_of, chunk, raw_server
from support.redis_server import RedisServer
from support.site import SPEED, Site, simulated, site

from gateway import app
from gateway.cli import main
from gateway.core.count_check import SAMPLES
from gateway.core.health import EngineSample, Outcome, State, transitions
from gateway.core.load import Load
from gateway.ports import Slot
from gateway.simulator import Fault, FaultOrder, Simulator

CHATS = {"gemma-4": {"classes": [{"class": "short_chat", "pools": ["light"]}]}}
HELLO: Any = [{"role": "user", "content": "Why is the sky blue?"}]
LONG: Any = [{"role": "user", "content": "The river runs past the old mill. " * 3_000}]
FACTS = ("x-gateway-class", "x-gateway-pool", "x-gateway-backend")


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Site]:
    async with site(tmp_path) as running:
        yield running
        await running.eventually(running.idle)


@pytest.fixture(scope="module")
async def standing(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    """A gateway for all who only ask, and of whose answer nothing depends on who asked before."""
    async with site(tmp_path_factory.mktemp("standing"), health={"interval_s": 5}) as running:
        yield running
        await running.eventually(running.idle)


def facts(headers: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(headers[name] for name in FACTS)


def png() -> str:
    """Return a 2x2 picture as a data URL."""

    def part(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = zlib.compress(b"\x00\xff\x00\x00\x00\xff\x00" * 2)
    head = struct.pack(">IIBBBBB", 2, 2, 8, 2, 0, 0, 0)
    picture = b"\x89PNG\r\n\x1a\n" + part(b"IHDR", head) + part(b"IDAT", rows) + part(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(picture).decode()


# ---------------------------------------------------------------- the right backend, through the real SDK


async def test_a_short_chat_goes_to_a_replica(fleet: Site) -> None:
    raw = await fleet.openai().chat.completions.with_raw_response.create(
        model="gemma-4", messages=HELLO, max_tokens=20
    )

    answer = raw.parse()
    assert facts(raw.headers)[:2] == ("short_chat", "light")
    assert answer.model == "gemma-4"
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert abs(int(raw.headers["x-gateway-prompt-tokens"]) - answer.usage.prompt_tokens) < 10
    assert raw.headers["x-request-id"].startswith("req-")
    assert answer.id == "chatcmpl-" + raw.headers["x-request-id"]


async def test_a_stream_arrives_in_pieces_under_the_public_name(standing: Site) -> None:
    stream = await standing.openai().chat.completions.create(
        model="google/gemma-4-31B-it",
        messages=HELLO,
        max_tokens=1000,
        stream=True,
        extra_body={"ignore_eos": True},
    )

    chunks = [chunk async for chunk in stream]

    assert len(chunks) > 5  # a busy simulator puts tokens together, as an engine does, but not a thousand
    assert {chunk.model for chunk in chunks} == {"google/gemma-4-31B-it"}
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason in {"stop", "length"}
    assert all(chunk.usage is None for chunk in chunks)  # nobody asked for it


async def test_usage_comes_to_who_asks_for_it(standing: Site) -> None:
    stream = await standing.openai().chat.completions.create(
        model="gemma-4", messages=HELLO, max_tokens=10, stream=True, stream_options={"include_usage": True}
    )

    chunks = [chunk async for chunk in stream]

    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens > 0


async def test_a_document_goes_to_push(fleet: Site) -> None:
    raw = await fleet.openai().chat.completions.with_raw_response.create(
        model="gemma-4", messages=LONG, max_tokens=20
    )

    assert facts(raw.headers) == ("long_document", "push", "push")


async def test_reasoning_goes_to_the_faster_of_the_reasoning_boxes(fleet: Site) -> None:
    raw = await fleet.openai().chat.completions.with_raw_response.create(
        model="gemma-4", messages=HELLO, max_tokens=400, reasoning_effort="high"
    )

    assert facts(raw.headers) == ("reasoning", "reasoning", "tpu")
    assert raw.parse().choices[0].message.model_extra["reasoning"]  # type: ignore[index]


async def test_an_image_goes_where_images_are_taken(fleet: Site) -> None:
    content: Any = [
        {"type": "text", "text": "What is it?"},
        {"type": "image_url", "image_url": {"url": png()}},
    ]
    raw = await fleet.openai().chat.completions.with_raw_response.create(
        model="gemma-4", messages=[{"role": "user", "content": content}], max_tokens=20
    )

    usage = raw.parse().usage
    assert facts(raw.headers)[:2] == ("short_chat", "light")
    assert usage is not None
    assert abs(int(raw.headers["x-gateway-prompt-tokens"]) - usage.prompt_tokens) < 20


async def test_a_tool_call_comes_back_whole(standing: Site) -> None:
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    tools: Any = [{"type": "function", "function": {"name": "get_weather", "parameters": parameters}}]
    question: Any = [{"role": "user", "content": "Call get_weather for Paris."}]
    answer: Any = await standing.openai().chat.completions.create(
        model="gemma-4", messages=question, tools=tools, tool_choice="required"
    )

    function = answer.choices[0].message.tool_calls[0].function
    assert function.name == "get_weather"
    assert isinstance(json.loads(function.arguments), dict)


async def test_completions_work_too(fleet: Site) -> None:
    raw = await fleet.openai().completions.with_raw_response.create(
        model="gemma-4", prompt="Name a river.", max_tokens=10
    )

    assert facts(raw.headers)[0] == "short_chat"
    assert raw.parse().choices[0].text


async def test_several_choices_all_finish(standing: Site) -> None:
    stream = await standing.openai().chat.completions.create(
        model="gemma-4", messages=HELLO, max_tokens=10, n=3, stream=True
    )

    finished = [choice.index async for chunk in stream for choice in chunk.choices if choice.finish_reason]

    assert sorted(finished) == [0, 1, 2]


async def test_a_server_that_reports_a_shorter_window_is_taken_at_its_word(tmp_path: Path) -> None:
    """The profile `generic` stands for any server, and so for the longest window that there is."""
    server = {"light-0": "h100-tp1-light"}
    one_pool: dict[str, Any] = {
        "pools": {"light": ["light-0"]},
        "models": {"gemma-4": {"classes": [{"class": "short_chat", "pools": ["light"]}]}},
    }
    async with site(tmp_path, fleet=simulated(server), backend={"profile": "generic"}, **one_pool) as running:
        fleet = running.gateway.fleet
        await running.eventually(lambda: fleet.statuses()["light-0"].context_tokens is not None)
        (model,) = (await running.openai().models.list()).data
        async with clients.http(base_url=running.admin_url) as client:
            shown = (await client.get("/admin/backends")).json()["light-0"]

        assert model.model_extra == {"max_model_len": 32_768, "root": "gemma-4"}
        assert shown["context_tokens"] == 32_768


async def test_models_are_listed(standing: Site) -> None:
    client = standing.openai()

    listed = {model.id: model.model_extra async for model in client.models.list()}

    card = {"max_model_len": 262_144, "root": "gemma-4"}
    assert listed == dict.fromkeys(("gemma-4", "google/gemma-4-31B-it"), card)
    assert (await client.models.retrieve("google/gemma-4-31B-it")).id == "google/gemma-4-31B-it"


# ---------------------------------------------------------------- errors, through the real SDK


async def test_what_fits_nowhere_is_refused_before_any_backend_is_bothered(fleet: Site) -> None:
    endless: Any = [{"role": "user", "content": "river " * 400_000}]

    with pytest.raises(openai.BadRequestError) as caught:
        await fleet.openai().chat.completions.create(model="gemma-4", messages=endless)

    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
    assert "This model's maximum context length is 262144 tokens" in str(caught.value)
    with pytest.raises(openai.BadRequestError) as caught:
        await fleet.openai().completions.create(model="gemma-4", prompt="river " * 400_000)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
    async with clients.http() as client:
        metrics = (await client.get(f"{fleet.backends['push'].url}/metrics")).text
    assert 'handler="/v1/chat/completions"' not in metrics


@pytest.mark.parametrize(
    ("fields", "kind", "code"),
    [
        ({"model": "gpt-5"}, openai.NotFoundError, "model_not_found"),
        ({"messages": []}, openai.BadRequestError, "invalid_request"),
        ({"max_tokens": -1}, openai.BadRequestError, "invalid_request"),
        ({"temperature": -3}, openai.BadRequestError, "invalid_request"),  # the backend's own verdict
        ({"n": 99}, openai.BadRequestError, "too_many_choices"),
    ],
)
async def test_errors_arrive_as_the_sdks_own_exceptions(
    standing: Site, fields: dict[str, Any], kind: type[openai.APIStatusError], code: str
) -> None:
    for stream in (False, True):
        with pytest.raises(kind) as caught:
            await standing.openai().chat.completions.create(
                **{"model": "gemma-4", "messages": HELLO, "stream": stream, **fields}
            )

        assert caught.value.code == code
        assert caught.value.request_id


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("POST", "/v1/embeddings", 404, "no_embeddings"),
        ("POST", "/v1/files", 404, "not_found"),
        ("GET", "/nowhere", 404, "not_found"),
        ("POST", "/v1/responses/compact", 404, "not_found"),
        ("POST", "/v1/responses/input_tokens", 404, "not_found"),
        ("POST", "/v1/responses/resp_1", 405, "method_not_allowed"),
        ("GET", "/v1/models/gpt-5", 404, "model_not_found"),
        ("POST", "/v1/chat/completions", 400, "invalid_json"),
        ("GET", "/metrics", 404, "not_found"),
        ("GET", "/admin/backends", 404, "not_found"),
    ],
)
async def test_every_error_has_the_one_shape(
    standing: Site, method: str, path: str, status: int, code: str
) -> None:
    async with standing.http() as client:
        answer = await client.request(method, path, content=b"{" if method == "POST" else None)

    assert answer.status_code == status
    assert set(answer.json()) == {"error"}
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert answer.json()["error"]["code"] == code


async def test_a_reasoning_alias_gets_reasoning(tmp_path: Path) -> None:
    """Not only the class for it: an engine does not see the name."""
    classes = [
        {"class": "thinking", "when": {"reasoning": True}, "pools": ["light"]},
        {"class": "short_chat", "pools": ["light"]},
    ]
    models = {"gemma-4": {"reasoning_aliases": ["gemma-4-thinking"], "classes": classes}}
    fleet, pools = simulated({"light-0": "h100-tp1-light"}), {"light": ["light-0"]}
    async with site(tmp_path, fleet=fleet, pools=pools, models=models) as running:
        client = running.openai()
        lengths: dict[bool, set[str]] = {True: set(), False: set()}
        for name, fields, thinks in (
            ("gemma-4-thinking", {}, True),
            ("gemma-4", {"reasoning_effort": "high"}, True),
            ("gemma-4-thinking", {"reasoning_effort": "none"}, False),
            ("gemma-4", {}, False),
        ):
            raw = await client.chat.completions.with_raw_response.create(
                model=name, messages=HELLO, max_tokens=30, extra_body=fields
            )
            assert bool(getattr(raw.parse().choices[0].message, "reasoning", None)) is thinks
            assert raw.headers["x-gateway-class"] == ("thinking" if thinks else "short_chat")
            lengths[thinks].add(raw.headers["x-gateway-prompt-tokens"])
        assert [len(found) for found in lengths.values()] == [1, 1]  # counted as it is sent
        assert not lengths[True] & lengths[False]
        response = await client.responses.create(
            model="gemma-4-thinking", input="Why is the sky blue?", max_output_tokens=30
        )
        assert [item.type for item in response.output] == ["reasoning"]


async def test_a_chat_is_not_kept_without_jobs_and_that_is_said(standing: Site) -> None:
    client = standing.openai()
    chat = await client.chat.completions.create(model="gemma-4", messages=HELLO, max_tokens=3, store=True)
    with pytest.raises(openai.NotFoundError) as caught:
        await client.chat.completions.retrieve(chat.id)

    assert caught.value.code == "not_found"
    assert "Only chat completions of jobs are kept" in caught.value.message


async def test_who_wants_a_conversation_kept_is_told_what_to_do_instead(standing: Site) -> None:
    client = standing.openai()
    for call in (client.conversations.create(), client.conversations.delete("conv_1")):
        with pytest.raises(openai.NotFoundError, match="`previous_response_id`") as caught:
            await call
        assert caught.value.code == "not_found"


@pytest.mark.parametrize("ending", ["", "/", "/v1/v1"])
async def test_a_base_url_that_is_wrong_is_corrected(standing: Site, ending: str) -> None:
    client = standing.openai(base_url=f"{standing.url}{ending}")
    for call in (
        client.chat.completions.create(model="gemma-4", messages=HELLO),
        client.responses.create(model="gemma-4", input="Why is the sky blue?"),
        client.models.retrieve("gemma-4"),
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            await call
        assert caught.value.code == "not_found"
        assert "ends with /v1" in caught.value.message


@pytest.mark.parametrize(
    "ending", ["/v1/chat/completions", "/v1/chat/completions/", "/v1/responses", "/api/v1"]
)
async def test_a_base_url_that_is_a_route_is_corrected(standing: Site, ending: str) -> None:
    client = standing.openai(base_url=f"{standing.url}{ending}")
    for call in (
        client.chat.completions.create(model="gemma-4", messages=HELLO),
        client.completions.create(model="gemma-4", prompt="Hello"),
        client.responses.create(model="gemma-4", input="Why is the sky blue?"),
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            await call
        assert caught.value.code == "not_found"
        assert "ends with /v1" in caught.value.message


async def test_who_uses_the_client_for_azure_is_told_so(standing: Site) -> None:
    client = openai.AsyncAzureOpenAI(
        azure_endpoint=standing.url, api_key="k", api_version="2024-10-21", max_retries=0
    )
    async with client:
        with pytest.raises(openai.NotFoundError, match="not Azure's: use the SDK's `OpenAI`"):
            await client.chat.completions.create(model="gemma-4", messages=HELLO)


@pytest.mark.parametrize("path", ["", "/", "/v1", "/v1/"])
async def test_whoever_opens_the_base_url_is_told_where_to_go(standing: Site, path: str) -> None:
    async with standing.http() as client:
        answer = await client.get(f"{standing.url}{path}")

    assert answer.status_code == 404
    assert "GET /v1/models" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/files", "/v1/files/file-1/content", "/v1/batches"])
async def test_where_there_are_no_batches_their_paths_say_what_is_missing(standing: Site, path: str) -> None:
    async with standing.http() as client:
        answer = await client.get(path)

    assert answer.status_code == 404
    assert "there are no `jobs` in its configuration" in answer.json()["error"]["message"]


async def test_each_port_names_the_other_one(standing: Site) -> None:
    """Two addresses in a configuration are easily mixed up, and "not found" would not say so."""
    command = partial(CliRunner().invoke, main, ["jobs", "list", "--admin", standing.url])
    operator = await anyio.to_thread.run_sync(command)
    with pytest.raises(openai.NotFoundError) as application:
        await standing.openai(base_url=f"{standing.admin_url}/v1").chat.completions.create(
            model="gemma-4", messages=HELLO
        )

    assert operator.exit_code == 1
    assert "Operators use the admin port (`admin`)." in operator.output
    assert application.value.code == "not_found"
    assert "Applications use the other one (`listen`)." in application.value.message


async def test_a_body_above_the_limit_is_413(tmp_path: Path) -> None:
    async with site(
        tmp_path,
        fleet=simulated({"light-0": "h100-tp1-light"}),
        **ONE_POOL,
        requests={"max_body_bytes": 1_000},
    ) as running:
        async with running.http() as client:
            announced = await client.post("/v1/chat/completions", content=b"x" * 1_001)
            chunked = await client.post("/v1/chat/completions", content=_pieces(b"x" * 100, 20))

    assert [announced.status_code, chunked.status_code] == [413, 413]
    assert announced.json()["error"]["code"] == "request_too_large"


async def _pieces(piece: bytes, count: int) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield piece


ONE_POOL: dict[str, Any] = {
    "pools": {"light": ["light-0"]},
    "models": {"gemma-4": {"classes": [{"class": "short_chat", "pools": ["light"]}]}},
}


async def test_a_body_that_never_ends_is_408(tmp_path: Path) -> None:
    async with site(
        tmp_path, fleet=simulated({"light-0": "h100-tp1-light"}), **ONE_POOL, requests={"body_timeout_s": 0.1}
    ) as running:
        host, port = running.url.removeprefix("http://").split(":")
        async with await anyio.connect_tcp(host, int(port)) as stream:
            await stream.send(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n{")
            with anyio.fail_after(10):
                answer = await stream.receive()

    assert answer.startswith(b"HTTP/1.1 408")


async def test_keys_are_asked_for_and_name_the_caller(tmp_path: Path) -> None:
    digest = "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b"  # of "secret"
    classes = [
        {"class": "team", "when": {"key": "team-a"}, "pools": ["light"]},
        {"class": "others", "pools": ["light"]},
    ]
    async with site(
        tmp_path,
        fleet=simulated({"light-0": "h100-tp1-light"}),
        pools={"light": ["light-0"]},
        models={"gemma-4": {"classes": classes}},
        keys={"team-a": {"sha256": digest}},
    ) as running:
        good = await running.openai(api_key="secret").chat.completions.with_raw_response.create(
            model="gemma-4", messages=HELLO, max_tokens=5
        )
        with pytest.raises(openai.AuthenticationError) as wrong:
            await running.openai(api_key="guess").chat.completions.create(model="gemma-4", messages=HELLO)
        with pytest.raises(openai.AuthenticationError):
            await running.openai(api_key="guess").models.list()
        sent = running.backends["light-0"]

    assert good.headers["x-gateway-class"] == "team"
    assert wrong.value.code == "invalid_api_key"
    assert sent is not None


# ---------------------------------------------------------------- callers leave, backends fail


async def test_a_caller_that_leaves_mid_stream_stops_the_backends_work(fleet: Site) -> None:
    stream = await fleet.openai().chat.completions.create(
        model="gemma-4", messages=HELLO, max_tokens=20_000, stream=True, extra_body={"ignore_eos": True}
    )
    async for _ in stream:
        break
    assert not fleet.idle()
    await stream.close()

    await fleet.eventually(fleet.idle)
    await fleet.eventually(
        lambda: all(backend.host.engine.running == 0 for backend in fleet.backends.values())
    )


async def test_a_caller_that_leaves_while_waiting_stops_the_backends_work(fleet: Site) -> None:
    async with anyio.create_task_group() as tasks:

        async def ask() -> None:
            await fleet.openai().chat.completions.create(
                model="gemma-4", messages=HELLO, max_tokens=20_000, extra_body={"ignore_eos": True}
            )

        tasks.start_soon(ask)
        await fleet.eventually(lambda: not fleet.idle())
        tasks.cancel_scope.cancel()

    await fleet.eventually(fleet.idle)
    await fleet.eventually(
        lambda: all(backend.host.engine.running == 0 for backend in fleet.backends.values())
    )


@pytest.mark.parametrize(
    "fault",
    [Fault.UNAVAILABLE, Fault.ERROR, Fault.GARBAGE, Fault.GARBLED, Fault.REFUSE, Fault.DRAIN, Fault.CRASH],
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_failing_replica_goes_unnoticed(fleet: Site, fault: Fault, stream: bool) -> None:
    fleet.backends["light-0"].order(FaultOrder(fault, for_s=1_000))

    for _ in range(4):
        answer = await fleet.openai().chat.completions.create(
            model="gemma-4", messages=HELLO, max_tokens=5, stream=stream
        )
        if stream:
            text = [chunk async for chunk in answer]  # type: ignore[union-attr]
            assert text
        else:
            assert answer.choices[0].message.content  # type: ignore[union-attr]

    recent = fleet.gateway.journal.recent()
    assert {record.ending.value for record in recent} == {"completed"}
    assert any(len(record.attempts) > 1 or record.backend == "light-1" for record in recent)


@pytest.mark.parametrize("fault", [Fault.DIE_MID_STREAM, Fault.ABORT, Fault.TRUNCATE])
async def test_a_stream_that_breaks_raises_in_the_sdk(fleet: Site, fault: Fault) -> None:
    for name in ("light-0", "light-1", "push"):
        fleet.backends[name].order(FaultOrder(fault, after_chunks=5))

    with pytest.raises(openai.APIError) as caught:
        stream = await fleet.openai().chat.completions.create(
            model="gemma-4", messages=HELLO, max_tokens=200, stream=True, extra_body={"ignore_eos": True}
        )
        async for _ in stream:
            pass

    assert caught.value.code == "stream_broken"


def hang(server: Simulator) -> None:
    server.order(FaultOrder(Fault.HANG))


def pause(server: Simulator) -> None:
    server.doze(level=0)


@pytest.mark.parametrize(
    ("halt", "stream"), [(hang, False), (pause, True)], ids=["whole-hang", "stream-pause"]
)
async def test_a_backend_that_hangs_or_is_paused_is_noticed_and_left(
    tmp_path: Path, halt: Callable[[Simulator], None], *, stream: bool
) -> None:
    """It has nothing to do when it halts, and so its metrics show nothing of what it is asked then."""
    profiles = {"light-0": "h100-tp1-light", "light-1": "h100-tp1-light", "push": "h100-tp2-push"}
    async with site(
        tmp_path,
        fleet=simulated(profiles),
        pools={"light": ["light-0", "light-1"], "push": ["push"]},
        models={"gemma-4": {"classes": [{"class": "short_chat", "pools": ["light", "push"]}]}},
        health={"interval_s": 0.1, "hang_s": 0.5},
    ) as running:
        halt(running.backends["light-0"])

        with anyio.fail_after(60):
            raw = await running.openai().chat.completions.with_raw_response.create(
                model="gemma-4", messages=HELLO, max_tokens=5, stream=stream
            )

        assert raw.headers["x-gateway-backend"] == "light-1"
        status = running.gateway.fleet.statuses()["light-0"]
        assert status.state is State.HUNG
        assert "requests of which it knows nothing" in status.reason


async def test_an_engine_that_answers_chats_and_no_probe_is_not_taken_out(tmp_path: Path) -> None:
    """As a server too busy for its `/health`, of which no metrics tell either that it works."""
    silent, unheard = False, anyio.Event()

    async def engine(stream: SocketStream, number: int) -> None:
        head, _ = server.requests[number]
        if b"/v1/models" in head:
            await stream.send(answer_of(b'{"data": [{"id": "gemma"}]}'))
        elif b"/v1/chat" in head:
            await stream.send(STREAM_HEAD + chunk(role() + delta(content="Hello")))
            while not unheard.is_set():
                with anyio.move_on_after(0.05):
                    await unheard.wait()
                await stream.send(chunk(delta(content=" again")))
            await stream.send(chunk(delta(finish="stop") + DONE) + LAST_CHUNK)
        elif b"/health" in head and silent:
            await anyio.sleep_forever()
        else:
            await stream.send(answer_of(b""))

    def last_error() -> str:
        return running.gateway.fleet.statuses()["light-0"].last_error

    async with raw_server(engine) as server:
        backends = {"light-0": {"url": server.url, "profile": "h100-tp1-light"}}
        health = {"interval_s": 0.1, "timeout_s": 0.3}
        async with site(
            tmp_path, fleet={}, backends=backends, pools={"light": ["light-0"]}, models=CHATS, health=health
        ) as running:
            asking = running.openai().chat.completions.create(model="gemma-4", messages=HELLO, stream=True)
            with anyio.fail_after(60):
                async for _ in await asking:
                    silent = True
                    if sum(b"/health" in head for head, _ in server.requests) > 15:
                        unheard.set()
            assert last_error() == "probe: no answer in 0.3 s"
            assert running.gateway.fleet.statuses()["light-0"].state is State.UP


async def test_a_backend_that_somebody_puts_to_sleep_is_left_until_it_is_awake(tmp_path: Path) -> None:
    async with site(
        tmp_path,
        fleet=simulated({"light-0": "h100-tp1-light", "light-1": "h100-tp1-light"}),
        pools={"light": ["light-0"], "other": ["light-1"]},
        models={"gemma-4": {"classes": [{"class": "short_chat", "pools": ["light", "other"]}]}},
        health={"interval_s": 0.1, "hang_s": 600},
    ) as running:
        statuses, sleeper = running.gateway.fleet.statuses, running.backends["light-0"]
        completions = running.openai().chat.completions.with_raw_response
        backends = []

        async def ask() -> None:
            raw = await completions.create(model="gemma-4", messages=HELLO, max_tokens=5)
            backends.append(raw.headers["x-gateway-backend"])

        with anyio.fail_after(60):
            await ask()
            sleeper.doze(level=1)
            await ask()  # it waits there until the next sample
            await running.eventually(lambda: statuses()["light-0"].is_asleep)
            await ask()
            await sleeper.wake_up()
            await running.eventually(lambda: not statuses()["light-0"].is_asleep)
            await ask()

        assert backends == ["light-0", "light-1", "light-1", "light-0"]


async def test_a_vllm_that_stops_silently_is_left_and_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transitions, "GONE_S", 0.3)
    monkeypatch.setattr(app, "GONE_S", 0.3)
    ask: Any = {"model": "gemma-4", "messages": HELLO, "max_tokens": 200, "extra_body": {"ignore_eos": True}}
    whole: list[Any] = []

    async def answer(client: openai.AsyncOpenAI) -> None:
        whole.append(await client.chat.completions.with_raw_response.create(**ask))

    async with site(
        tmp_path,
        fleet=simulated({"light-0": "h100-tp1-light", "push": "h100-tp2-push"}, speed=1.0),
        pools={"light": ["light-0"], "push": ["push"]},
        models={"gemma-4": {"classes": [{"class": "short_chat", "pools": ["light", "push"]}]}},
        health={"interval_s": 0.1},
    ) as running:
        client, gone = running.openai(), running.backends["light-0"]
        with anyio.fail_after(60):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(answer, client)
                begun = await client.chat.completions.create(**ask, stream=True)
                await anext(aiter(begun))
                assert len(gone.host.answers) == 2
                gone.order(FaultOrder(Fault.SILENT_STOP, for_s=0.0))
                with pytest.raises(openai.APIError) as caught:
                    async for _ in begun:
                        pass

        assert caught.value.code == "stream_broken"
        assert whole[0].headers["x-gateway-backend"] == "push"
        assert whole[0].parse().choices[0].finish_reason == "length"
        statuses = running.gateway.fleet.statuses
        await running.eventually(lambda: statuses()["light-0"].state in (State.PROBATION, State.UP))
        await running.eventually(running.idle)


async def test_a_backend_that_restarts_comes_back(fleet: Site) -> None:
    fleet.backends["light-0"].order(FaultOrder(Fault.RESTART, for_s=2 * SPEED))

    def restarted() -> bool:
        status = fleet.gateway.fleet.statuses()["light-0"]
        return status.restarts > 0 and status.state in (State.PROBATION, State.UP)

    await fleet.eventually(restarted, within_s=60)
    answers = [
        await fleet.openai().chat.completions.create(model="gemma-4", messages=HELLO, max_tokens=5)
        for _ in range(12)
    ]
    assert all(answer.choices for answer in answers)


async def test_a_stream_that_waits_for_long_gets_comments_where_policy_says_so(tmp_path: Path) -> None:
    models = {
        "gemma-4": {
            "classes": [{"class": "chat", "pools": ["light"], "waiting": {"keep_alive_after_s": 0.1}}]
        }
    }
    slow = simulated({"light-0": "h100-tp1-light"}, speed=2.0)
    async with site(tmp_path, fleet=slow, **(ONE_POOL | {"models": models})) as running:
        fields: Any = {"model": "gemma-4", "messages": LONG, "max_tokens": 5, "stream": True}
        async with (
            running.http() as client,
            client.stream("POST", "/v1/chat/completions", json=fields) as answer,
        ):
            assert answer.status_code == 200
            assert answer.headers["x-gateway-class"] == "chat"
            assert "x-gateway-backend" not in answer.headers  # nobody has answered yet
            body = b"".join([part async for part in answer.aiter_bytes()])
        chunks = [chunk async for chunk in await running.openai().chat.completions.create(**fields)]

        assert body.startswith(b": keep-alive\n\ndata: {")
        assert body.endswith(b"data: [DONE]\n\n")
        assert chunks[-1].choices[0].finish_reason == "length"
        await running.eventually(running.idle)


# ---------------------------------------------------------------- operators


async def test_operators_see_the_fleet_and_why(fleet: Site) -> None:
    await fleet.openai().chat.completions.create(model="gemma-4", messages=HELLO, max_tokens=5)
    raw = await fleet.openai().chat.completions.with_raw_response.create(
        model="gemma-4", messages=HELLO, max_tokens=5
    )
    async with clients.http(base_url=fleet.admin_url) as client:
        backends = (await client.get("/admin/backends")).json()
        requests = (await client.get("/admin/requests")).json()
        last = (await client.get("/admin/requests?limit=1")).json()
        too_many = await client.get("/admin/requests?limit=0")
        metrics = (await client.get("/metrics")).text
        unknown = await client.get("/admin/nothing")

    newest_backend = raw.headers["x-gateway-backend"]
    assert set(backends) == {"light-0", "light-1", "push", "spark", "tpu"}
    assert backends["push"]["state"] == "up"
    assert backends["push"]["knee_seqs"] > 0
    assert backends["push"]["engine"]["running"] == 0
    assert backends["push"]["tpot"] is None
    knee = backends[newest_backend]["knee_estimate"]
    assert knee == []  # no stream has ended there yet
    assert backends["light-0"]["served_models"]
    newest = requests[0]
    assert newest["id"] == raw.headers["x-request-id"]
    assert (last, len(requests)) == ([newest], 2)
    assert (too_many.status_code, too_many.json()["error"]["param"]) == (400, "limit")
    assert newest["decision"]["class_reason"] == "takes everything else"
    assert {candidate["backend"] for candidate in newest["decision"]["candidates"]} == {
        "light-0",
        "light-1",
        "push",
    }
    assert "Why is the sky blue" not in json.dumps(requests)
    assert f'gateway_requests_total{{backend="{newest["backend"]}"' in metrics
    assert 'gateway_backend_state{backend="push",state="up"} 1.0' in metrics
    assert unknown.status_code == 404
    assert "Known views: backends, " in unknown.json()["error"]["message"]


async def test_what_somebody_else_runs_on_a_backend_is_seen(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever goes past the gateway takes blocks that it can then not give out."""
    slow = simulated({"light-0": "h100-tp1-light"}, speed=2.0)
    async with site(tmp_path, fleet=slow, **ONE_POOL) as running:
        drift = running.gateway.counts.drift
        served = running.gateway.fleet.statuses()["light-0"].served_models[0]
        body = {"model": served, "messages": LONG, "max_tokens": 5_000, "stream": True}
        url = f"{running.backends['light-0'].url}/v1/chat/completions"
        async with (
            clients.http(timeout=60) as stranger,
            stranger.stream("POST", url, json=body | {"ignore_eos": True}),
        ):
            await running.eventually(lambda: drift("light-0").seqs == 1 and drift("light-0").kv_blocks > 0)
            async with clients.http(base_url=running.admin_url) as client:
                shown = (await client.get("/admin/backends")).json()["light-0"]["count_drift"]
                metrics = (await client.get("/metrics")).text
            view = running.gateway.pipeline.view.for_line()["light-0"]
        assert shown["kv_blocks_taken"] > 0
        assert 'gateway_count_drift_seqs{backend="light-0"} 1.0' in metrics
        assert view.kv_taken > 0
        await running.eventually(lambda: drift("light-0").kv_blocks == 0)

        caplog.set_level("INFO", logger="gateway.fleet")
        for second in range(61):
            running.gateway._backend_sampled("light-0", EngineSample(at=1e6 + second, running=2))
        said = [record.getMessage() for record in caplog.records if "+2" in record.getMessage()]
        assert said == [
            "light-0: the engine has +2 sequences compared with the gateway's count "
            "(something else uses this server: another gateway without the same store, or a client)"
        ]
        monkeypatch.setattr("gateway.upstream.probes.STALE_S", -1.0)  # no sample is recent
        await running.eventually(lambda: drift("light-0").lasting_seqs == 0)


async def test_a_replica_that_somebody_else_uses_is_asked_last(tmp_path: Path) -> None:
    replicas = simulated({"light-0": "h100-tp1-light", "light-1": "h100-tp1-light"}, speed=2.0)
    pools = {"light": ["light-0", "light-1"]}
    async with site(tmp_path, fleet=replicas, **{**ONE_POOL, "pools": pools}) as running:
        served = running.gateway.fleet.statuses()["light-0"].served_models[0]
        body = {"model": served, "messages": HELLO, "max_tokens": 5_000, "stream": True, "ignore_eos": True}
        url = f"{running.backends['light-0'].url}/v1/chat/completions"
        async with clients.http(timeout=60) as stranger, stranger.stream("POST", url, json=body):
            await running.eventually(lambda: running.gateway.counts.drift("light-0").seqs_taken == 1)
            async with running.http() as client, clients.http(base_url=running.admin_url) as operator:
                asked = {"model": "gemma-4", "messages": HELLO, "max_tokens": 1}
                answer = await client.post("/v1/chat/completions", json=asked)
                shown = (await operator.get("/admin/backends")).json()["light-0"]["count_drift"]

    assert answer.headers["x-gateway-backend"] == "light-1"
    assert shown["seqs_taken"] == 1


async def test_who_waits_for_blocks_is_told_when_it_is_no_longer_known_who_has_them(
    tmp_path: Path, store: RedisServer
) -> None:
    """A gateway that keeps to its part does not know what the others hold, and what strangers do."""
    one = simulated({"light-0": "h100-tp1-light"})
    chats = {"class": "chat", "pools": ["light"], "waiting": {"max_wait_s": 10}}
    sections = {**ONE_POOL, "models": {"gemma-4": {"classes": [chats]}}, "health": {"interval_s": 3_600}}
    answers: list[int] = []
    async with site(tmp_path, fleet=one, store={"url": store.url}, **sections) as running:
        gateway, room = running.gateway, running.gateway.pipeline.room
        full = EngineSample(at=1e6, running=9, kv_usage=1.0)
        for _ in range(SAMPLES):
            gateway._backend_sampled("light-0", full)
        limits = Load(*[10**9] * 6)
        slot = await gateway.ledger.acquire("light-0", Load(seqs=1, kv_blocks=10), limits)
        assert isinstance(slot, Slot)

        async def ask(client: httpx.AsyncClient) -> None:
            body = {"model": "gemma-4", "messages": HELLO, "max_tokens": 3}
            answers.append((await client.post("/v1/chat/completions", json=body)).status_code)

        async with running.http() as client, anyio.create_task_group() as tasks:
            tasks.start_soon(ask, client)
            await running.eventually(lambda: len(room.line) == 1)
            store.kill()
            await running.eventually(lambda: gateway._store is not None and gateway._store.keeps_to_part)
            gateway._backend_sampled("light-0", full)
        await gateway.ledger.release(slot)
    assert answers == [200]


async def test_liveness_and_readiness(standing: Site) -> None:
    async with standing.http() as client:
        assert (await client.get("/livez")).text == "ok"
        ready = [await client.get(path) for path in ("/readyz", "/health")]

    assert [one.status_code for one in ready] == [200, 200]
    checks = {"a_backend_is_up": True, "not_draining": True}
    assert [one.json() for one in ready] == [{"ready": True, "checks": checks}] * 2


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.MISCONFIGURED])
async def test_a_gateway_whose_backends_are_ejected_is_ready_if_they_fare_no_better_elsewhere(
    fleet: Site, outcome: Outcome
) -> None:
    """Load balancers send it nothing otherwise, though some of it would be answered."""
    statuses = fleet.gateway.fleet.statuses
    for name in fleet.backends:
        for _ in range(3):
            fleet.gateway.fleet.report(name, outcome, "", inf)
    assert {one.state for one in statuses().values()} == {State.EJECTED}

    ready = []
    for url in (fleet.url, fleet.admin_url):
        async with clients.http(base_url=url) as client:
            ready.append((await client.get("/readyz")).status_code)

    assert ready == [200 if outcome is Outcome.FAILED else 503] * 2


async def test_a_backend_that_serves_another_model_is_said_and_makes_nothing_ready(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It answers, and gets nothing: who reads the log has to find out why."""
    caplog.set_level("INFO", logger="gateway.fleet")
    light = simulated({"light-0": "h100-tp1-light"})
    async with site(tmp_path, fleet=light, backend={"model": "gemma-4-mini"}, **ONE_POOL) as running:
        served = running.gateway.fleet.statuses()["light-0"].served_models[0]
        async with running.http() as client:
            ready = await client.get("/readyz")

    assert ready.status_code == 503
    assert ready.json()["checks"]["a_backend_is_up"] is False
    fleet_log = [record for record in caplog.records if record.name == "gateway.fleet"]
    assert [one.getMessage() for one in fleet_log if one.levelname == "WARNING"] == [
        f"light-0: serves {served}, not gemma-4-mini"
    ]


@pytest.mark.parametrize(
    ("configured", "why"),
    [
        pytest.param({"model": "another"}, r"wrong_model: serves \S+, not another", id="another-model"),
        pytest.param({"versions": "< 0.1"}, "wrong_version: .*", id="another-version"),
        pytest.param({"drain": True}, "draining: drained by the operator", id="drained"),
        pytest.param({}, "", id="as-configured"),
    ],
)
async def test_a_backend_that_would_be_given_nothing_counts_as_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, configured: dict[str, Any], why: str
) -> None:
    async with (
        site(
            tmp_path,
            fleet=simulated({"light-0": "h100-tp1-light"}),
            backend=configured,
            pools={"light": ["light-0"]},
            models={"gemma-4": {"classes": [{"class": "short_chat", "pools": ["light"]}]}},
        ) as running,
        running.http() as client,
    ):
        answer = await client.post(
            "/v1/chat/completions", json={"model": "gemma-4", "messages": HELLO, "max_tokens": 1}
        )
        ready = await client.get("/readyz")
        shown = (await client.get(f"{running.admin_url}/admin/backends")).json()["light-0"]
        page = (await client.get(f"{running.admin_url}/metrics")).text

    status = 503 if why else 200
    assert (answer.status_code, ready.status_code) == (status, status)
    assert shown["state"] == "up"
    assert re.fullmatch(why, shown["kept_out"])
    assert f'gateway_backend_usable{{backend="light-0"}} {0.0 if why else 1.0}' in page
    assert f'gateway_backend_drained{{backend="light-0"}} {float("drain" in configured)}' in page
    warned = [
        one.getMessage()
        for one in caplog.records
        if one.name == "gateway.fleet" and one.levelno == logging.WARNING
    ]
    assert len(warned) == bool(configured.keys() & {"model", "versions"})
    assert all(shown["kept_out"].split(": ", 1)[1] in message for message in warned)


async def test_draining_finishes_streams_and_refuses_new_work(fleet: Site) -> None:
    stream = await fleet.openai().chat.completions.create(
        model="gemma-4",
        messages=HELLO,
        max_tokens=int(20 * SPEED),
        stream=True,
        extra_body={"ignore_eos": True},
    )
    await anext(aiter(stream))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(fleet.gateway.applications.serving.drain)
        await anyio.lowlevel.checkpoint()
        async with fleet.http() as client:
            ready = await client.get("/readyz")
        with pytest.raises(openai.InternalServerError) as caught:
            await fleet.openai().chat.completions.create(model="gemma-4", messages=HELLO)
        chunks = [chunk async for chunk in stream]

    assert ready.status_code == 503
    assert caught.value.code == "draining"
    assert caught.value.response.headers["retry-after"] == "1"
    assert chunks[-1].choices[0].finish_reason == "length"


async def test_whoever_is_cut_off_and_connects_again_is_refused_at_once(tmp_path: Path) -> None:
    lines: list[str] = []
    begun = anyio.Event()
    async with clients.http(timeout=60) as client, anyio.create_task_group() as reading:
        async with site(tmp_path) as one:
            url, serving = httpx.URL(one.url), one.gateway.applications.serving
            body = {"model": "gemma-4", "messages": HELLO, "stream": True}
            body |= {"max_tokens": 20_000, "ignore_eos": True}

            async def read() -> None:
                with serving.counted():  # for which the gateway's end waits
                    async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
                        async for line in answer.aiter_lines():
                            lines.append(line)
                            begun.set()
                    with pytest.raises(OSError, match="attempts failed"):
                        await (await anyio.connect_tcp(url.host, url.port or 0)).aclose()

            reading.start_soon(read)
            await begun.wait()

    assert any("shutting down" in line for line in lines)
