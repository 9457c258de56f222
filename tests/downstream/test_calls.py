"""Chats on both of their ways, directly on the connection and as ASGI requests: no caller can tell which.

Over real sockets, byte by byte, on both event loops.
"""

import json
from dataclasses import dataclass
from typing import Any

import pytest
from anyio.abc import SocketStream
from support.front import WAYS, Behaviour, Got, chat, front, oblige, post
from support.raw_server import LAST_CHUNK, STREAM_HEAD, answer_of, chunk
from support.world import DONE, HELLO, ROLE

from gateway.downstream.relay import BodyLimits

pytestmark = pytest.mark.anyio


@pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, bool]]:
    """Tests of pytest run on asyncio's own loop, the gateway on uvloop: its transports are others."""
    return "asyncio", {"use_uvloop": request.param}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


LIMITS = BodyLimits(bytes_max=20_000, within_s=0.2, together_max=30_000)


# ---------------------------------------------------------------- the same answer on both ways


@dataclass(frozen=True)
class Case:
    """A request, and what comes of it.

    Attributes:
        request: Its bytes.
        status: Of its answer.
        code: Of the error, if it is one.
        is_ordinary: Whether it is one that is taken directly.
        is_last: Whether the connection is closed behind it.
        behave: What the backend does.
        is_recorded: Whether there is a record of it.
    """

    request: bytes
    status: int
    code: str = ""
    is_ordinary: bool = True
    is_last: bool = False
    behave: Behaviour = oblige
    is_recorded: bool = True


async def reject(stream: SocketStream, _: dict[str, Any]) -> None:
    await stream.send(answer_of(b'{"error":{"message":"no","code":422}}', "422 Unprocessable"))


async def be_busy(stream: SocketStream, _: dict[str, Any]) -> None:
    await stream.send(answer_of(b"busy", "503 Busy"))


async def break_off(stream: SocketStream, _: dict[str, Any]) -> None:
    await stream.send(STREAM_HEAD + chunk(ROLE + HELLO))
    await stream.aclose()


LONG = chat(messages=[{"role": "user", "content": "x" * 10_000}])
TOO_LONG = b" " * 20_001
CHUNKED = post(b"", "Transfer-Encoding: chunked", length=None)
CASES = {
    "whole": Case(post(), 200),
    "stream": Case(post(chat(stream=True)), 200),
    "long body": Case(post(LONG), 200),
    "no key": Case(post(key=None), 401, "invalid_api_key", is_ordinary=False),
    "wrong key": Case(post(key="other"), 401, "invalid_api_key", is_ordinary=False),
    "two keys": Case(post(chat(), "Authorization: Bearer other"), 401, "invalid_api_key"),
    "no json": Case(post(b"{"), 400, "invalid_json"),
    "no object": Case(post(b"[]"), 400, "invalid_request"),
    "no body": Case(post(b""), 400, "invalid_json"),
    "no utf-8": Case(post(b'{"model":"\xff"}'), 400, "invalid_json"),
    "unknown model": Case(post(chat(model="other")), 404, "model_not_found"),
    "method": Case(
        post(b"", line="GET /v1/chat/completions HTTP/1.1", length=None),
        405,
        "method_not_allowed",
        is_ordinary=False,
    ),
    "path": Case(post(path="/v1/other"), 404, "not_found", is_ordinary=False, is_recorded=False),
    "too long": Case(post(TOO_LONG), 413, "request_too_large", is_ordinary=False),
    "rejected": Case(post(), 422, behave=reject),
    "busy": Case(post(), 503, "upstream_busy", behave=be_busy),
    "broken stream": Case(post(chat(stream=True)), 200, behave=break_off),
    "query": Case(post(path="/v1/chat/completions?a=b"), 200, is_ordinary=False),
    "slash": Case(post(path="/v1/chat/completions/"), 200, is_ordinary=False),
    "absolute": Case(post(path="http://gateway/v1/chat/completions"), 200, is_ordinary=False),
    "close": Case(post(chat(), "Connection: close"), 200, is_ordinary=False, is_last=True),
    "close stream": Case(post(chat(stream=True), "Connection: close"), 200, is_ordinary=False, is_last=True),
    "keep": Case(post(chat(), "Connection: keep-alive"), 200),
    "http 1.0": Case(post(line="POST /v1/chat/completions HTTP/1.0"), 200, is_ordinary=False, is_last=True),
    "chunked": Case(
        post(b"", "Transfer-Encoding: chunked", length=None)
        + chunk(chat()[:9])
        + chunk(chat()[9:])
        + LAST_CHUNK,
        200,
        is_ordinary=False,
    ),
    "chunked too long": Case(
        CHUNKED + chunk(TOO_LONG) + LAST_CHUNK,
        413,
        "request_too_large",
        is_ordinary=False,
    ),
    "idempotent": Case(post(chat(), "Idempotency-Key: once"), 200),
    "bad idempotency key": Case(
        post(chat(), "Idempotency-Key: " + "x" * 300), 400, "invalid_idempotency_key"
    ),
    "traced": Case(post(chat(), "traceparent: 00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"), 200),
}


def comparable(got: Got, request_id: str) -> tuple[Any, ...]:
    """Return what is the same of an answer whenever it is given."""
    changing = {"date": "", "x-gateway-queue-ms": ""}
    headers = sorted((name, changing.get(name, value)) for name, value in got.headers)
    text = json.dumps([got.status, headers, got.body.decode()]).replace(request_id, "ID")
    return text.replace(request_id.removeprefix("req-"), "ID"), got.is_whole


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
async def test_the_answer_is_the_same_on_both_ways(case: Case) -> None:
    seen: dict[str, Any] = {}
    for way in WAYS:
        async with front(way, case.behave, limits=LIMITS) as site, site.caller() as caller:
            got = await caller.ask(case.request)

            assert got.status == case.status
            assert got.is_whole
            if case.code:
                assert got.code == case.code
            assert site.taken == (way == "direct" and case.is_ordinary)
            request_id = got.header("x-request-id")
            assert request_id
            await site.idle()
            records = [
                (one.id == request_id, one.status, one.ending, one.error_code, one.route, one.key, one.chunks)
                for one in site.notes.requests
            ]
            assert len(records) == case.is_recorded
            asked = [body for _, body in site.backend.requests]
            seen[way] = comparable(got, request_id), records, asked
            if case.is_last:
                assert got.header("connection") == "close"
                assert await caller.is_closed()
            else:  # and the connection is good for more
                assert got.header("connection") is None
                site.behave = oblige
                again = await caller.ask(post(), post(chat(stream=True)))
                assert (again.status, again.is_whole) == (200, True)
                assert (await caller.answer()).body.endswith(DONE)

    assert seen["direct"] == seen["asgi"]
