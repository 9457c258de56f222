"""What a kept response hands on to the one that goes on from it, and what the stream of one holds."""

import threading
from typing import Any

import anyio
import msgspec
import pytest
from anyio.abc import SocketStream
from litestar import Litestar
from support.front import front, post
from support.raw_server import LAST_CHUNK, STREAM_HEAD, answer_of, chunk
from support.world import HELLO, ROLE, STOP, USAGE

from gateway.clock import SystemClock
from gateway.core.errors import BodyTooLarge, InvalidRequest
from gateway.core.responses.items import item_id, response_id
from gateway.core.responses.request import Needs
from gateway.core.sse import CALLS_MAX
from gateway.downstream.keys import KeyRing
from gateway.downstream.reading import READERS, BodyReaders, Received
from gateway.downstream.responses import Responses
from gateway.downstream.stored_responses import (
    REFERENCES_MAX,
    ResponseRetention,
    StoredConversation,
    StoredResponses,
)
from gateway.ports import Arrival
from gateway.store.memory import MemoryResponseStore


def test_a_conversation_goes_on_with_all_but_calls_that_broke_off() -> None:
    def call(status: str) -> dict[str, Any]:
        return {"type": "function_call", "id": status, "status": status}

    message = {"type": "message", "id": "cut", "status": "incomplete"}
    output = [call("completed"), message, call("incomplete")]
    kept = StoredConversation(
        msgspec.Raw(msgspec.json.encode({"output": output})), context=[{"id": "a"}], input=[{"id": "b"}]
    )

    assert [item["id"] for item in kept.items()] == ["a", "b", "completed", "cut"]


async def kept_items(count: int) -> tuple[MemoryResponseStore, list[dict[str, Any]]]:
    """Return a store with so many responses, and the one item of each."""
    store, items = MemoryResponseStore(SystemClock(), 1_000_000), []
    for number in range(count):
        item = {"id": item_id("message", f"{number:032x}", 0), "type": "message"}
        record = msgspec.json.encode({"response": {"output": []}, "context": [], "input": [item]})
        await store.put(None, response_id(f"{number:032x}"), record, 60.0)
        items.append(item)
    return store, items


def received(body: bytes) -> Received:
    return Received(Arrival("r", 0.0, 0.0), body, None, {}, ())


async def test_a_request_refers_to_items_of_so_many_responses() -> None:
    store, items = await kept_items(REFERENCES_MAX + 1)
    stored = StoredResponses(store, None, BodyReaders(), 1_000_000)
    ids = [item["id"] for item in items]

    found = await stored.look_up(received(b"{}"), Needs(None, ids[1:]))
    with pytest.raises(InvalidRequest) as refusal:
        await stored.look_up(received(b"{}"), Needs(None, ids))

    assert found.stored == {item["id"]: item for item in items[1:]}
    assert (refusal.value.code, refusal.value.param) == ("too_many_items", "input")


@pytest.mark.parametrize("uses", [1, 3])
async def test_what_a_request_refers_to_fits_a_body_with_it_to_the_byte(uses: int) -> None:
    store, (item,) = await kept_items(1)
    together = len(b"{}") + uses * len(msgspec.json.encode(item))
    wanted = Needs(None, [item["id"]] * uses)

    found = await StoredResponses(store, None, BodyReaders(), together).look_up(received(b"{}"), wanted)
    with pytest.raises(BodyTooLarge):
        await StoredResponses(store, None, BodyReaders(), together - 1).look_up(received(b"{}"), wanted)

    assert found.stored == {item["id"]: item}


@pytest.mark.parametrize("path", ["resp_1", "resp_1/input_items"])
async def test_a_long_response_is_read_in_its_turn_beside_the_event_loop(path: str) -> None:
    items = [{"id": "msg_1", "type": "message", "content": "All that was said. " * 100_000}]
    response = {"id": "resp_1", "output": items}
    record = msgspec.json.encode({"response": response, "context": [], "input": items})
    retention = ResponseRetention(MemoryResponseStore(SystemClock(), 2 * len(record)), 60.0)
    await retention.store.put(None, "resp_1", record, 60.0)
    readers, is_free, answers = BodyReaders(), threading.Event(), []
    nothing: Any = None
    responses = Responses(
        pipeline=nothing,
        keys=KeyRing({}),
        rules=nothing,
        readers=readers,
        body_bytes_max=0,
        retention=retention,
        idempotency=nothing,
        background=None,
        clock=SystemClock(),
    )

    app = Litestar(responses.handlers(), logging_config=None)
    scope: Any = {"type": "http", "method": "GET", "path": f"/v1/responses/{path}", "headers": []}
    scope |= {"query_string": b"", "http_version": "1.1", "root_path": "", "scheme": "http", "state": {}}

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        if message.get("body"):
            answers.append(msgspec.json.decode(message["body"]))

    async with anyio.create_task_group() as tasks:
        for _ in range(READERS):
            tasks.start_soon(readers.run, is_free.wait, record)
        await anyio.wait_all_tasks_blocked()
        tasks.start_soon(app, scope, receive, send)
        await anyio.wait_all_tasks_blocked()
        try:
            assert answers == []
        finally:
            is_free.set()

    page = {"object": "list", "data": items, "first_id": "msg_1", "last_id": "msg_1", "has_more": False}
    assert answers == [response if path == "resp_1" else page]


async def test_a_comment_of_the_backend_is_passed_on_without_what_comes_with_it() -> None:
    is_heard, has_pinged = anyio.Event(), anyio.Event()

    async def behave(stream: SocketStream, _: dict[str, Any]) -> None:
        await stream.send(STREAM_HEAD + chunk(ROLE + HELLO))
        await is_heard.wait()
        await stream.send(chunk(b": ping\n" + USAGE))
        await has_pinged.wait()
        await stream.send(chunk(STOP) + LAST_CHUNK)

    body = msgspec.json.encode({"model": "gemma-4", "input": "hello?", "stream": True})
    said = b""
    async with front("asgi", behave) as site, site.caller() as caller:
        await caller.send(post(body, path="/v1/responses"))
        await caller.head()
        while b"hello" not in said:
            said += await caller.chunk()
        is_heard.set()
        while b": ping\n\n" not in said:
            said += await caller.chunk()
        has_pinged.set()
        while part := await caller.chunk():
            said += part

    assert b"event: response.completed\n" in said
    assert b'"choices"' not in said


async def test_a_whole_answer_with_more_calls_than_are_credible_is_an_error() -> None:
    call = {"type": "function", "id": "c", "function": {"name": "f", "arguments": "{}"}}
    message = {"role": "assistant", "content": None, "tool_calls": [call] * (CALLS_MAX + 1)}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}

    async def behave(stream: SocketStream, _: dict[str, Any]) -> None:
        await stream.send(answer_of(msgspec.json.encode({"choices": [choice]})))

    body = msgspec.json.encode({"model": "gemma-4", "input": "hello?"})
    async with front("asgi", behave) as site, site.caller() as caller:
        answer = await caller.ask(post(body, path="/v1/responses"))

    assert answer.status == 502
    assert b"too many choices or tool calls" in answer.body


async def test_a_stream_without_an_end_fails_and_its_backend_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.downstream.response_answers.KEPT_BYTES_MAX", 100_000)
    is_left = anyio.Event()

    async def behave(stream: SocketStream, _: dict[str, Any]) -> None:
        await stream.send(STREAM_HEAD + chunk(ROLE))
        try:
            while True:
                await stream.send(chunk(HELLO * 100))
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            is_left.set()

    body = msgspec.json.encode({"model": "gemma-4", "input": "hello?", "stream": True})
    async with front("asgi", behave) as site, site.caller() as caller:
        with anyio.fail_after(20):
            answer = await caller.ask(post(body, path="/v1/responses"))
            await is_left.wait()

    assert b"event: response.failed\n" in answer.body
    assert b"The answer of the backend is too long." in answer.body
