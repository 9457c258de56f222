"""Chats on both of their ways, directly on the connection and as ASGI requests: no caller can tell which.

Over real sockets, byte by byte, on both event loops.
"""

import asyncio
import json
import logging
import select
import socket
import struct
import threading
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
import pytest
from anyio.abc import SocketAttribute, SocketStream
from litestar.types import Receive, Scope, Send
from support.front import KEY, OTHER_KEY, WAYS, Behaviour, Closed, Front, Got, Wire, chat, front, oblige, post
from support.kernel import keepalive_s, vanish
from support.loops import on_uvloop
from support.raw_server import LAST_CHUNK, STREAM_HEAD, answer_of, chunk
from support.world import (
    DONE,
    HELLO,
    LIGHT,
    ROLE,
    STOP,
    WHOLE,
    Estimates,
    Script,
    ScriptedResponse,
    event,
)

from gateway.cohort import Cohort
from gateway.core.backends import Timeouts
from gateway.core.policy import Waiting
from gateway.core.usage import Ending
from gateway.downstream import guard, wire
from gateway.downstream.guard import GuardedProtocol
from gateway.downstream.listener import Listener
from gateway.downstream.origins import Origins
from gateway.downstream.relay import AsgiCall, BodyLimits, Call, Head, HttpDownstream, Uploads
from gateway.pipeline import LEFT_STATUS, CallerStalled
from gateway.ports import Headers, TakeChunk
from gateway.sockets import bind
from gateway.tcp import SILENT_S

anyio_backend = on_uvloop


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
    "two keys": Case(post(chat(), "Authorization: Bearer other"), 401, "invalid_api_key", is_ordinary=False),
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
    "compressed": Case(
        post(zlib.compress(chat()), "Content-Encoding: deflate"),
        415,
        "unsupported_content_encoding",
        is_ordinary=False,
    ),
    "not compressed": Case(post(chat(), "Content-Encoding: Identity"), 200),
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
        patient = Waiting(max_wait_s=60)  # who is refused by one that has answered others asks it again
        async with front(way, case.behave, limits=LIMITS, waiting=patient) as site, site.caller() as caller:
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

            site.behave = case.behave
            site.watched.origins.replace([PAGE])
            async with site.caller() as browser:  # and a page can read all that anybody else can
                got = await browser.ask(from_page(case.request))
                assert (got.status, got.header("access-control-allow-origin")) == (case.status, PAGE)
                exposed = set((got.header("access-control-expose-headers") or "").split(", "))
                assert {name for name, _ in got.headers} <= exposed | SHOWN_ANYWAY | {*said(got)}

    assert seen["direct"] == seen["asgi"]


async def test_a_stream_that_breaks_ends_with_an_error_that_says_so(way: str) -> None:
    async with front(way, break_off) as site, site.caller() as caller:
        got = await caller.ask(post(chat(stream=True)))

    *_, error, done = (event.removeprefix(b"data: ") for event in got.body.split(b"\n\n") if event)
    assert (json.loads(error)["error"]["code"], done) == ("stream_broken", b"[DONE]")
    assert got.is_whole


async def test_a_stream_with_a_fault_in_it_ends_there_though_its_backend_does_not(way: str) -> None:
    is_begun = anyio.Event()
    fault = b'data: {"error": {"message": "out of memory", "code": 500}}\n\n'

    async def fail_later(stream: SocketStream, _: dict[str, Any]) -> None:
        await begin(stream, {})
        await is_begun.wait()
        await stream.send(chunk(fault))

    async with front(way, fail_later) as site, site.caller() as caller:
        await caller.send(post(chat(stream=True)))
        head = await caller.head()
        await caller.chunk()
        is_begun.set()
        with anyio.fail_after(10):
            got = await caller.rest_of(head)
            await site.backend.closed.wait()
        await site.idle()

    error, done = (event.removeprefix(b"data: ") for event in got.body.split(b"\n\n") if event)
    assert (json.loads(error)["error"]["code"], done) == ("stream_broken", b"[DONE]")
    assert got.is_whole


@pytest.mark.parametrize("served", ["served", "gemma-4"], ids=["renamed", "same name"])
async def test_a_stream_is_whole_whether_tokens_come_alone_or_in_pieces(way: str, served: str) -> None:
    tokens = [event(delta={"content": f"word {number}"}) for number in range(8)]
    pieces = [ROLE, *tokens, HELLO[:20], HELLO[20:], STOP]
    pieces = [piece.replace(b'"served"', b'"%b"' % served.encode()) for piece in pieces]

    async def trickle(stream: SocketStream, asked: dict[str, Any]) -> None:
        await stream.send(STREAM_HEAD)
        for piece in pieces:
            await stream.send(chunk(piece))
            for _ in range(5):  # each arrives by itself
                await anyio.lowlevel.checkpoint()
        await stream.send(chunk(DONE) + LAST_CHUNK)

    async with front(way, trickle, served=served) as site, site.caller() as caller:
        got = await caller.ask(post(chat(stream=True)))

    assert got.body == b"".join(pieces).replace(b'"served"', b'"gemma-4"') + DONE
    assert got.is_whole


def completion(**fields: Any) -> bytes:
    """Return the body of a completion."""
    return msgspec.json.encode({"model": "gemma-4", "prompt": "hello?", **fields})


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", chat(), "messages"),
        ("/v1/completions", completion(), "prompt"),
        ("/v1/completions", completion(max_tokens=LIGHT.context_tokens), "max_tokens"),
    ],
)
async def test_what_does_not_fit_is_named_as_its_caller_names_it(path: str, body: bytes, param: str) -> None:
    estimates = Estimates(tokens=LIGHT.context_tokens)
    async with front("direct", estimates=estimates) as site, site.caller() as caller:
        got = await caller.ask(post(body, path=path))

    assert got.status == 400
    assert json.loads(got.body)["error"]["param"] == param


# ---------------------------------------------------------------- callers in a browser

PAGE, STRANGER = "https://app.example.com", "https://app.example.com:8443"
SHOWN_ANYWAY = {"content-length", "content-type", "cache-control"} | {  # and what is of no use to pages
    *("date", "connection", "transfer-encoding", "www-authenticate", "allow", "x-accel-buffering"),
}


def from_page(request: bytes, origin: str = PAGE) -> bytes:
    """Return a request as a browser sends it for a page."""
    return request.replace(b"\r\n", f"\r\nOrigin: {origin}\r\n".encode(), 1)


def said(got: Got) -> dict[str, str]:
    """Return what an answer says to browsers."""
    return {
        name: value for name, value in got.headers if name.startswith("access-control-") or name == "vary"
    }


WHO: tuple[tuple[list[str], str | None, str | None, bool], ...] = (
    ([], PAGE, None, False),
    ([PAGE], None, None, True),  # no browser
    ([PAGE], STRANGER, None, True),
    ([PAGE], "null", None, True),  # a page from a file, for one
    ([PAGE], PAGE, PAGE, True),
    ([STRANGER, PAGE], PAGE, PAGE, True),
    (["*"], PAGE, "*", False),
    (["*"], "null", "*", False),
    (["*"], None, "*", False),
    ([], None, None, False),
)
"""Origins that are allowed, whose page calls, whom the answer allows, and whether that varies by page."""


async def test_who_may_read_an_answer_as_the_origins_change(way: str) -> None:
    async with front(way) as site, site.caller() as caller:
        for origins, origin, allowed, varies in WHO:
            site.watched.origins.replace(origins)
            for request in (
                post(),
                post(chat(stream=True)),
                post(key=None),
                post(path="/v1/completions"),
                asking("GET", "/v1/models"),
                asking("GET", "/v1/no"),
            ):
                got = await caller.ask(request if origin is None else from_page(request, origin))

                assert got.header("access-control-allow-origin") == allowed
                assert bool(got.header("access-control-expose-headers")) == bool(allowed)
                assert got.header("vary") == ("Origin" if varies else None)
            for path in ("/livez", "/readyz", "/no"):  # which are not for pages
                assert said(await caller.ask(from_page(asking("GET", path), origin or PAGE))) == {}


@pytest.mark.parametrize(
    ("origins", "path", "names"),
    [
        ([PAGE], "/v1/chat/completions", "authorization,content-type,x-stainless-lang"),
        ([STRANGER, PAGE], "/v1/responses/resp_1", "x-team , X-Priority"),
        (["*"], "/v1/chat/completions", "authorization"),
        (["*"], "/v1/files", ""),
        (["*"], "/v1/no", "no: name"),
        (["*"], "//v1//chat/completions", "authorization"),
    ],
)
async def test_a_browser_that_asks_is_answered_without_a_key(
    origins: list[str], path: str, names: str
) -> None:
    async with front("direct", origins=origins) as site, site.caller() as caller:
        await caller.send(preflight(path, PAGE, names))
        got = await caller.head()

        assert (got.status, got.header("content-length")) == (204, None)
        assert got.header("x-request-id")
        wanted = {
            "access-control-allow-origin": PAGE if PAGE in origins else "*",
            "access-control-allow-methods": "GET, HEAD, POST, DELETE",
            "access-control-max-age": "7200",
        }
        wanted |= {"access-control-allow-headers": names} if names and ":" not in names else {}
        wanted |= {"vary": "Origin"} if PAGE in origins else {}
        assert said(got) == wanted
        assert (await caller.ask(from_page(post()))).status == 200  # on the same connection, as browsers do


@pytest.mark.parametrize(
    ("origins", "origin", "path"),
    [
        ([], PAGE, "/v1/chat/completions"),
        ([PAGE], STRANGER, "/v1/chat/completions"),
        ([PAGE], "null", "/v1/chat/completions"),
        (["*"], PAGE, "/readyz"),
    ],
)
async def test_a_browser_that_may_not_is_told_what_everybody_is(
    origins: list[str], origin: str, path: str
) -> None:
    async with front("direct", origins=origins) as site, site.caller() as caller:
        await caller.send(preflight(path, origin, "authorization"))
        got = await caller.head()
        async with site.caller() as other:
            await other.send(asking("OPTIONS", path))
            plain = await other.head()

        assert (got.status, got.header("allow")) == (plain.status, plain.header("allow"))
        assert said(got) == said(plain) == ({"vary": "Origin"} if origins == [PAGE] else {})


async def test_an_answer_given_again_is_for_the_page_that_asks_now(way: str) -> None:
    request = post(chat(), "Idempotency-Key: once")
    async with front(way, origins=[PAGE, STRANGER]) as site, site.caller() as caller:
        for origin in (PAGE, STRANGER):
            got = await caller.ask(from_page(request, origin))
            assert got.header("access-control-allow-origin") == origin
        assert got.header("x-gateway-replayed") == "true"
        assert said(await caller.ask(request)) == {"vary": "Origin"}
        assert len(site.backend.requests) == 1


def asking(method: str, path: str) -> bytes:
    """Return a request without a body."""
    return post(b"", line=f"{method} {path} HTTP/1.1", length=None)


def preflight(path: str, origin: str, names: str) -> bytes:
    """Return what a browser asks before it posts for a page."""
    fields = ["Access-Control-Request-Method: POST"]
    fields += [f"Access-Control-Request-Headers: {names}"] if names else []
    return from_page(post(b"", *fields, key=None, line=f"OPTIONS {path} HTTP/1.1", length=None), origin)


# ---------------------------------------------------------------- requests in pieces, and in a row


async def test_a_request_may_come_byte_by_byte(way: str) -> None:
    body = chat(stream=True)
    async with front(way) as site, site.caller() as caller:
        for _ in range(2):
            got = await caller.ask(*(bytes([byte]) for byte in post(body)))
            assert (got.status, got.is_whole) == (200, True)

        assert [one["messages"] for one in asked(site)] == 2 * [json.loads(body)["messages"]]
        assert site.taken == (2 if way == "direct" else 0)


async def test_a_head_may_be_split_anywhere(way: str) -> None:
    request = post(b"[]")
    async with front(way) as site, site.caller() as caller:
        for split in range(1, len(request)):
            await caller.send(request[:split])
            await anyio.lowlevel.checkpoint()
            got = await caller.ask(request[split:])
            assert got.status == 400

        assert site.taken == (len(request) - 1 if way == "direct" else 0)
        await site.idle()


async def test_requests_in_a_row_are_answered_in_their_order(way: str) -> None:
    rows = [
        post(chat(user="a")),
        post(chat(user="b", stream=True)),
        post(b"["),
        post(chat(user="c")),
        post(path="/v1/other"),
    ]
    async with front(way) as site, site.caller() as caller:
        for _ in range(2):
            await caller.send(b"".join(rows))
            answers = [await caller.answer() for _ in rows]

            assert [got.status for got in answers] == [200, 200, 400, 200, 404]
            assert [got.body.endswith(DONE) for got in answers] == [False, True, False, False, False]
        assert [one["user"] for one in asked(site)] == 2 * ["a", "b", "c"]
        await site.idle()


async def test_a_row_that_is_longer_than_may_wait_is_answered_in_its_order(way: str) -> None:
    filler = "x" * 15_000
    async with front(way) as site, site.caller() as caller:

        async def send() -> None:
            for number in range(40):
                await caller.send(post(chat(user=f"{number} {filler}")))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send)
            for _ in range(40):
                assert (await caller.answer()).status == 200
        assert [one["user"].partition(" ")[0] for one in asked(site)] == [str(one) for one in range(40)]


def ending_with(is_over: anyio.Event) -> Callable[[SocketStream, dict[str, Any]], Awaitable[None]]:
    """Return the answer of a backend that begins at once, and ends with the event."""

    async def answer(stream: SocketStream, _: dict[str, Any]) -> None:
        await stream.send(STREAM_HEAD + chunk(ROLE + HELLO))
        await is_over.wait()
        await stream.send(chunk(STOP) + chunk(DONE) + LAST_CHUNK)

    return answer


NOT_REQUESTS = {
    "no head": (b"nonsense\r\n\r\n", 400),
    "no path": (b"GET http://host HTTP/1.1\r\nHost: h\r\n\r\n", 400),
    "a proxy's": (b"CONNECT host:1 HTTP/1.1\r\nHost: h\r\n\r\n", 400),
    "a long head": (post(chat(), "X: " + 70_000 * "x"), 431),
    "no chunks": (post(b"zz\r\n", "Transfer-Encoding: chunked", length=None), 400),
}


@pytest.mark.parametrize(("nonsense", "status"), NOT_REQUESTS.values(), ids=NOT_REQUESTS)
@pytest.mark.parametrize("before", [0, 1, 2])
async def test_what_is_not_a_request_ends_the_connection_behind_the_answers_before_it(
    way: str, before: int, nonsense: bytes, status: int
) -> None:
    is_over = anyio.Event()
    async with front(way, ending_with(is_over)) as site, site.caller() as caller:
        await caller.send(before * post(chat(stream=True)) + nonsense + post(chat(user="hidden")))
        if before:
            head = await caller.head()
            is_over.set()
            assert (await caller.rest_of(head)).is_whole
        for _ in range(1, before):
            assert (await caller.answer()).is_whole
        got = await caller.answer()

        assert (got.status, got.header("connection")) == (status, "close")
        assert await caller.is_closed()
        await site.idle()
        assert len(site.backend.requests) == before


async def test_nonsense_that_goes_on_does_not_come_before_the_answers_before_it(way: str) -> None:
    is_over = anyio.Event()
    async with front(way, ending_with(is_over)) as site, site.caller() as caller:
        await caller.send(post(chat(stream=True)) + CHUNKED + b"zz\r\n")
        head = await caller.head()
        await caller.send(b"zz\r\n")
        async with site.caller() as other:  # so that has been read
            assert (await other.ask(post(b"["))).status == 400
        is_over.set()

        assert (await caller.rest_of(head)).body.endswith(DONE)
        assert (await caller.answer()).status == 400
        assert await caller.is_closed()


async def test_a_caller_may_wait_to_be_told_to_go_on(way: str) -> None:
    request = post(chat(), "Expect: 100-continue")
    split = request.index(b"\r\n\r\n") + 4
    async with front(way) as site, site.caller() as caller:
        await caller.send(request[:split])
        assert await caller.stream.receive() == b"HTTP/1.1 100 Continue\r\n\r\n"
        got = await caller.ask(request[split:])

        assert got.status == 200
        assert site.taken == 0


@pytest.mark.parametrize("count", [1, 5_000], ids=["one", "many"])
async def test_a_head_has_a_bound(way: str, count: int) -> None:
    field = b"x: " + b"y" * (600_000 // count) + b"\r\n"
    async with front(way) as site, site.caller() as caller:
        await caller.send(post(b"", length=None)[:-2])
        await send_until_answered(caller, count * field)
        got = await caller.answer()

        assert (got.status, got.code, got.header("connection")) == (431, "headers_too_large", "close")
        assert await caller.is_closed()
        await site.idle()


async def test_who_sends_all_of_too_long_a_head_still_gets_the_answer(way: str) -> None:
    field = b"x: " + b"y" * 6_000_000 + b"\r\n"
    async with front(way) as site, site.caller() as caller:
        await caller.send(post(b"", length=None)[:-2], field, field + b"\r\n" + post())
        got = await caller.answer()

        assert (got.status, got.code, got.header("connection")) == (431, "headers_too_large", "close")
        assert await caller.is_closed()
        await caller.stream.aclose()
        await site.idle()
        assert site.backend.requests == []


async def test_what_comes_behind_nonsense_is_neither_answered_nor_in_the_way_of_its_answer(way: str) -> None:
    async with front(way) as site, site.caller() as caller:
        await caller.send(post() + b"nonsense\r\n\r\n" + post() * 3, *[post() * 400] * 8)
        statuses = [(await caller.answer()).status for _ in range(2)]

        assert statuses == [200, 400]
        assert await caller.until_closed() == b""
        await caller.stream.aclose()
        await site.idle()
        assert len(site.backend.requests) == 1


@pytest.mark.parametrize("count", [1, 900], ids=["one", "many"])
async def test_a_head_has_a_bound_though_it_comes_at_once(way: str, count: int) -> None:
    fields = [f"x-{number}: {'y' * (90_000 // count)}" for number in range(count)]
    async with front(way) as site, site.caller() as caller:
        got = await caller.ask(post(chat(), *fields))

        assert (got.status, got.code, got.header("connection")) == (431, "headers_too_large", "close")
        assert await caller.is_closed()
        await site.idle()
        assert site.backend.requests == []


async def test_the_bound_of_a_head_is_not_that_of_the_body_before_it(way: str) -> None:
    following = post(chat(), "X: " + "y" * 8_000)
    async with front(way) as site, site.caller() as caller:
        await caller.send(post(chat() + b" " * 60_000) + following[:7_000])
        assert (await caller.answer()).status == 200
        assert (await caller.ask(following[7_000:])).status == 200


async def test_a_head_behind_another_request_has_a_bound(way: str) -> None:
    async with front(way) as site, site.caller() as caller:
        await caller.send(post() + b"GET / HTTP/1.1\r\nX: ")
        assert (await caller.answer()).status == 200
        got = await caller.ask(*[b"y" * 20_000] * 4)

        assert (got.status, got.header("connection")) == (431, "close")


async def test_a_head_that_began_behind_another_request_has_the_bound_of_any_other(way: str) -> None:
    following = post(chat(user="hidden"), "X: " + "y" * 100_000)
    async with front(way) as site, site.caller() as caller:
        assert (await caller.ask(post() + following[:100_000])).status == 200
        got = await caller.ask(following[100_000:])

        assert (got.status, got.code, got.header("connection")) == (431, "headers_too_large", "close")
        await site.idle()
        assert len(site.backend.requests) == 1


async def test_a_head_that_does_not_come_breaks_off_no_answer(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "HEAD_WITHIN_S", 0.1)
    is_over = anyio.Event()
    async with front(way, ending_with(is_over)) as site, site.caller() as caller:
        await caller.send(post(chat(stream=True)) + b"GET / HT")
        head = await caller.head()
        async with site.caller() as silent:  # its time began later
            assert (await silent.answer()).status == 408
        is_over.set()

        assert (await caller.rest_of(head)).is_whole
        assert (await caller.answer()).status == 408
        assert await caller.is_closed()


async def test_a_head_that_waits_to_be_read_is_not_late(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While requests wait for answers, what follows them is not read: it may have come long ago."""
    monkeypatch.setattr(guard, "HEAD_WITHIN_S", 0.1)
    is_over, request = anyio.Event(), post()
    async with front(way, ending_with(is_over)) as site, site.caller() as caller:
        await caller.send(2 * post(chat(stream=True)) + request[:20])
        head = await caller.head()
        await caller.send(request[20:])
        async with site.caller() as silent:  # its time began later
            assert (await silent.answer()).status == 408
        monkeypatch.setattr(guard, "HEAD_WITHIN_S", 60.0)
        await anyio.sleep(0.2)  # the time that runs now is over before, and the next is long enough
        site.behave = oblige
        is_over.set()

        assert (await caller.rest_of(head)).is_whole
        assert [(await caller.answer()).status for _ in range(2)] == [200, 200]


async def test_a_head_that_does_not_come_is_given_up_behind_an_answer_too(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "HEAD_WITHIN_S", 0.1)
    async with front(way) as site, site.caller() as caller:
        assert (await caller.ask(post())).status == 200
        got = await caller.ask(b"GET / HT")

        assert (got.status, got.code, got.header("connection")) == (408, "request_timeout", "close")
        assert await caller.is_closed()


async def test_what_is_more_than_may_wait_is_refused(way: str) -> None:
    async with (
        front(way, stay_silent, waiting=Waiting(waiting_max=0), origins=[PAGE]) as site,
        AsyncExitStack() as stack,
    ):
        for _ in range(LIGHT.knee[0].seqs):
            caller = await stack.enter_async_context(site.caller())
            await caller.send(post())
        await site.eventually(lambda: len(site.backend.requests) == LIGHT.knee[0].seqs)
        async with site.caller() as caller:
            for _ in range(2):
                got = await caller.ask(from_page(post()))
                assert (got.status, got.code) == (429, "queue_full")
                assert got.header("access-control-allow-origin") == PAGE
                assert got.header("retry-after")
                assert got.header("x-request-id")
        assert [(one.status, one.error_code) for one in site.notes.requests] == 2 * [(429, "queue_full")]


# ---------------------------------------------------------------- bodies that do not come


async def test_a_body_that_does_not_come_is_given_up(way: str) -> None:
    async with front(way, limits=LIMITS, origins=[PAGE]) as site, site.caller() as caller:
        got = await caller.ask(from_page(post(length=1_000)))

        assert (got.status, got.code) == (408, "request_timeout")
        assert got.header("access-control-allow-origin") == PAGE
        assert got.header("connection") == "close"  # what follows is no request
        assert await caller.is_closed()
        await site.idle()
        assert [(one.status, one.error_code) for one in site.notes.requests] == [(408, "request_timeout")]
        assert site.taken == (way == "direct")


async def test_a_request_has_arrived_with_its_head_though_its_body_takes_long(way: str) -> None:
    async with front(way) as site, site.caller() as caller:
        request = post()
        await caller.send(request[:-7])
        await has_come(site, len(chat()) - 7)
        begun_at = site.clock.now()
        assert (await caller.ask(request[-7:])).status == 200

        await site.idle()
        [record] = site.notes.requests
        assert record.received_at <= begun_at < (record.estimated_at or 0.0)
        assert site.taken == (way == "direct")


async def test_who_leaves_in_a_body_had_come_with_its_head(way: str) -> None:
    async with front(way) as site:
        async with site.caller() as caller:
            await caller.send(post(b" " * 500, length=1_000))
            await has_come(site, 500)
            begun_at = site.clock.now()
        await site.idle()

        [record] = site.notes.requests
        assert (record.ending, record.received_at <= begun_at < record.ended_at) == (Ending.LEFT, True)


async def test_each_request_of_a_connection_has_its_own_arrival(way: str) -> None:
    async with front(way) as site, site.caller() as caller:
        for _ in range(3):
            before = site.clock.now()
            assert (await caller.ask(post())).status == 200
            await site.idle()
            assert site.notes.requests[-1].received_at >= before
        assert site.taken == (3 if way == "direct" else 0)


async def test_a_body_has_its_time_however_often_it_comes(way: str) -> None:
    async with front(way, limits=LIMITS) as site, site.caller() as caller:
        await caller.send(post(b"", length=19_000))
        got: list[Got] = []

        async def answered() -> None:
            got.append(await caller.answer())
            tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(answered)
            for _ in range(1_000):
                await caller.send(b" ")
                await anyio.sleep(0.001)
        assert got[0].status == 408
        await site.idle()


async def has_come(site: Front, size: int) -> None:
    """Return once that much of all bodies is there."""
    await site.eventually(lambda: site.applications.serving.uploads.bytes == size)


async def test_the_time_of_a_body_is_not_that_of_the_next(way: str) -> None:
    limits, request = BodyLimits(within_s=1.0), post()
    async with front(way, limits=limits) as site, site.caller() as caller:
        begun = anyio.current_time()
        for done_s in (0.5, 1.2):  # the second ends when the time of the first is over
            for left, part in ((7, request[:-7]), (6, request[-7:-6]), (5, request[-6:-5])):
                await caller.send(part)
                await has_come(site, len(chat()) - left)
            await anyio.sleep_until(begun + done_s)
            assert (await caller.ask(request[-5:])).status == 200
        await site.idle()
        assert site.taken == (2 if way == "direct" else 0)


async def test_bodies_have_a_bound_together(way: str) -> None:
    part, limits = b" " * 14_000, replace(LIMITS, within_s=30.0)  # not that which is looked at here
    async with front(way, limits=limits) as site, site.caller() as first, site.caller() as second:
        uploads = site.applications.serving.uploads
        await first.send(post(part, length=16_000))
        await second.send(post(part, key=OTHER_KEY, length=16_000))
        await site.eventually(lambda: uploads.bytes == 28_000)
        async with site.caller() as third:
            got = await third.ask(post(b" " * 3_000, length=4_000))

            assert (got.status, got.code) == (503, "out_of_resources")
            assert got.header("retry-after") == "5"
        await site.eventually(lambda: uploads.bytes == 28_000)
        assert (await first.ask(b" " * 2_000)).code == "invalid_json"
        assert (await second.ask(b" " * 2_000)).code == "invalid_json"
        await site.idle()
        assert [one.status for one in site.notes.requests] == [503, 400, 400]


async def test_one_key_leaves_others_room_for_their_bodies(way: str) -> None:
    limits = replace(LIMITS, within_s=30.0)
    async with front(way, limits=limits) as site, site.caller() as first:
        await first.send(post(b" " * 19_000, length=20_000))
        await site.eventually(lambda: site.applications.serving.uploads.bytes == 19_000)
        got = {}
        for key in (KEY, OTHER_KEY):
            async with site.caller() as caller:
                got[key] = (await caller.ask(post(b" " * 4_000, key=key))).code

        assert got == {KEY: "out_of_resources", OTHER_KEY: "invalid_json"}
        assert (await first.ask(b" " * 1_000)).code == "invalid_json"
        await site.idle()


async def test_a_caller_that_leaves_in_its_body_is_recorded_as_that(
    way: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with front(way) as site:
        async with site.caller() as caller:
            await caller.send(post(b" " * 500, length=1_000))
            await site.eventually(lambda: site.applications.serving.uploads.bytes == 500)
        await site.idle()

        assert [(one.ending, one.status) for one in site.notes.requests] == [(Ending.LEFT, LEFT_STATUS)]
        assert site.applications.serving.uploads.bytes == 0
        assert site.backend.requests == []
        await site.eventually(lambda: not tasks_at_work())
    assert not any(one.exc_info for one in caplog.records)


# ---------------------------------------------------------------- answers that come before the request


LAST = "Connection: close"
MUCH = b" " * 5_000_000
LINE_1_0 = "POST /v1/chat/completions HTTP/1.0"
EARLY = {
    "wrong key": (post(MUCH, LAST, key="other"), 401, BodyLimits()),
    "wrong key, HTTP/1.0": (post(MUCH, line=LINE_1_0, key="other"), 401, BodyLimits()),
    "too long": (post(MUCH, LAST), 413, BodyLimits(bytes_max=1_000)),
    "more than may wait": (post(MUCH), 503, BodyLimits(together_max=1_000_000)),
}


@pytest.mark.parametrize(("request_", "status", "limits"), EARLY.values(), ids=EARLY.keys())
async def test_a_last_answer_reaches_a_caller_that_is_still_sending(
    way: str, request_: bytes, status: int, limits: BodyLimits
) -> None:
    async with front(way, limits=limits) as site, site.caller() as caller:
        await caller.send(request_)
        got = await caller.answer()

        assert (got.status, got.is_whole, got.header("connection")) == (status, True, "close")
        assert await caller.until_closed() == b""
        await site.idle()


async def test_so_does_an_error_behind_a_request(way: str) -> None:
    broken = post(b"-1\r\n", "Transfer-Encoding: chunked", length=None)
    async with front(way) as site, site.caller() as caller:
        await caller.send(post() + broken + MUCH)

        assert [(await caller.answer()).status for _ in range(2)] == [200, 400]
        assert await caller.until_closed() == b""
        await site.idle()


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        pytest.param(post(line="POST http://[/v1 HTTP/1.1"), 400, id="no-url"),
        pytest.param(post(b"{}", "X: " + "y" * guard.HEAD_BYTES_MAX), 431, id="long-head"),
    ],
)
@pytest.mark.parametrize("before", [b"", post()], ids=["alone", "behind-another"])
async def test_of_several_errors_in_what_came_together_the_first_is_told(
    way: str, before: bytes, request_: bytes, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with front(way) as site, site.caller() as caller:
        await caller.send(before + request_ + b"\x00")
        answers = [await caller.answer() for _ in range(2 if before else 1)]

        assert answers[-1].status == status
        assert await caller.until_closed() == b""
        await site.idle()
    assert not any(one.exc_info for one in caplog.records)


async def test_an_answer_instead_of_being_told_to_go_on_is_the_last(way: str) -> None:
    """What comes next on such a connection may be the body, or another request: nobody can say."""
    expecting = post(b"", "Expect: 100-continue", key="other", length=5)
    async with front(way) as site, site.caller() as caller:
        got = await caller.ask(expecting)
        await caller.send(post())

        assert (got.status, got.header("connection")) == (401, "close")
        assert await caller.until_closed() == b""
        await site.idle()
        assert site.backend.requests == []


async def test_the_rest_of_a_last_request_is_not_waited_for(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.downstream.guard.LINGER_S", 0.05)
    async with front(way) as site, site.caller() as caller:
        assert (await caller.ask(post(b"{", LAST, key="other", length=9))).status == 401
        await site.eventually(lambda: not site.listener.server_state.connections)


async def test_nor_is_that_of_one_that_was_given_up(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.downstream.guard.LINGER_S", 0.05)
    async with front(way, limits=LIMITS) as site, site.caller() as caller:
        assert (await caller.ask(post(length=1_000))).status == 408
        await site.eventually(lambda: not site.listener.server_state.connections)


async def test_a_connection_for_which_there_was_no_room_is_not_kept(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "CONNECTIONS_MAX", 1)
    async with front(way, stay_silent) as site, site.caller() as caller:
        await caller.send(post())
        await site.eventually(lambda: len(site.backend.requests) == 1)
        async with site.caller() as other:
            assert (await other.answer()).status == 503
            await site.eventually(lambda: len(site.listener.server_state.connections) == 1)


async def test_a_connection_is_idle_when_the_rest_of_its_request_has_come(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.downstream.listener.KEEPALIVE_S", 0.3)
    async with front(way) as site, site.caller() as caller:
        got = await caller.ask(post(b"{", key="other", length=2))
        assert (got.status, got.header("connection")) == (401, None)
        await caller.send(b"}")
        await site.eventually(lambda: not site.listener.server_state.connections)


async def test_a_request_that_comes_together_with_that_rest_has_all_the_time_it_needs(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.downstream.listener.KEEPALIVE_S", 0.1)

    is_asked, may_answer = anyio.Event(), anyio.Event()

    async def answer_late(stream: SocketStream, body: dict[str, Any]) -> None:
        is_asked.set()
        await may_answer.wait()
        await oblige(stream, body)

    async with front(way, answer_late) as site, site.caller() as caller:
        assert (await caller.ask(post(b"{", key="other", length=2))).status == 401
        await caller.send(b"}" + post(chat(stream=True)))
        await is_asked.wait()
        async with site.caller() as idle:  # its time began later
            assert (await idle.ask(post(key="other"))).status == 401
            assert await idle.is_closed()
        may_answer.set()
        got = await caller.answer()
        assert (got.status, got.is_whole) == (200, True)
        await site.idle()


async def test_what_comes_behind_an_upload_that_is_given_up_is_no_request(way: str) -> None:
    async with front(way, limits=BodyLimits(together_max=100)) as site, site.caller() as caller:
        await caller.send(post(chat(user="x" * 200)) + post(chat(user="behind")))
        got = await caller.answer()

        assert (got.status, got.code) == (503, "out_of_resources")
        assert await caller.until_closed() == b""
        await site.idle()
        assert site.backend.requests == []
        assert len(site.notes.requests) == 1


async def test_line_breaks_do_not_keep_a_connection(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.downstream.listener.KEEPALIVE_S", 0.3)
    async with front(way) as site, site.caller() as caller:
        assert (await caller.ask(post(chat()))).status == 200
        await caller.send(b"\r\n")
        assert (await caller.ask(post(chat()))).status == 200
        await caller.send(b"\r\n\r\n")
        assert await caller.is_closed()
        await site.idle()


# ---------------------------------------------------------------- callers that leave


async def stay_silent(_: SocketStream, __: dict[str, Any]) -> None:
    """Answer nothing."""


async def begin(stream: SocketStream, _: dict[str, Any]) -> None:
    await stream.send(STREAM_HEAD + chunk(ROLE + HELLO))


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("how", ["closed", "half-closed", "reset"])
async def test_a_caller_that_leaves_before_its_answer_is_noticed(
    way: str, how: str, is_streamed: bool
) -> None:
    async with front(way, stay_silent) as site:
        async with site.caller() as caller:
            await caller.send(post(chat(stream=is_streamed)))
            await site.eventually(lambda: len(site.backend.requests) == 1)
            await leave(caller.stream, how)
            with anyio.fail_after(10):
                await site.backend.closed.wait()  # which tells it to stop
        await site.idle()

        (record,) = site.notes.requests
        assert (record.ending, record.status) == (Ending.LEFT, LEFT_STATUS)
        assert site.taken == (way == "direct")


async def test_a_caller_that_leaves_while_its_request_is_read_is_noticed(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_go_on, read = threading.Event(), threading.Event(), wire.read

    def read_late(*args: Any, **kwargs: Any) -> wire.WireRequest:
        begun.set()
        may_go_on.wait(10)
        return read(*args, **kwargs)

    monkeypatch.setattr(wire, "read", read_late)
    async with front(way, stay_silent) as site:
        async with site.caller() as caller:
            await caller.send(post(chat(messages=[{"role": "user", "content": "{" * 20_000}])))  # by a thread
            await site.eventually(begun.is_set)
            await leave(caller.stream, "reset")
            await site.eventually(lambda: not site.listener.server_state.connections)
        may_go_on.set()
        await site.idle()

        assert [one.ending for one in site.notes.requests] == [Ending.LEFT]
        assert site.backend.requests == []


@pytest.mark.parametrize("how", ["closed", "half-closed", "reset"])
async def test_nothing_is_kept_of_a_caller_that_leaves_behind_its_answer(way: str, how: str) -> None:
    async with front(way) as site:
        async with site.caller() as caller:
            assert (await caller.ask(post(chat()))).status == 200
            (connection,) = site.listener.server_state.connections
            await leave(caller.stream, how)
            await site.eventually(lambda: not site.listener.server_state.connections)
        assert isinstance(connection, GuardedProtocol)
        await site.eventually(lambda: connection.timeout_keep_alive_task is None)


async def test_nor_of_one_that_leaves_instead_of_reading(way: str) -> None:
    async with front(way, Flood()) as site:
        async with site.caller() as caller:
            await caller.send(post(chat(stream=True)))
            await site.eventually(lambda: is_stalled(site))
            (connection,) = site.listener.server_state.connections
            assert isinstance(connection, GuardedProtocol)
            assert connection._stall_timer is not None
            await leave(caller.stream, "reset")
        await site.idle()
        assert connection._stall_timer is None


@pytest.mark.parametrize("rest", [b"", b"zz\r\n"], ids=["nothing", "nonsense"])
async def test_nor_of_one_that_leaves_in_a_body_that_was_answered(way: str, rest: bytes) -> None:
    async with front(way) as site:
        connections = site.listener.server_state.connections
        async with site.caller() as caller:
            got = await caller.ask(post(b"", "Transfer-Encoding: chunked", key=None, length=None))
            assert got.status == 401
            (connection,) = connections
            assert isinstance(connection, GuardedProtocol)
            timer = connection._rest_timer
            assert timer is not None
            if rest:
                await caller.send(rest)
                assert await caller.until_closed() == b""
            await leave(caller.stream, "reset")
            await site.eventually(lambda: not connections)
        assert timer.cancelled()
        assert connection._rest_timer is None


def tasks_at_work() -> list[str]:
    """The tasks that answer requests, or wait for one on a connection."""
    names = [getattr(task.get_coro(), "__qualname__", "") for task in asyncio.all_tasks()]
    return [name for name in names if name in ("CallTask._run", "RequestResponseCycle.run_asgi")]


@pytest.mark.parametrize("how", ["closed", "half-closed", "reset"])
async def test_leaving_on_a_kept_connection_cancels_its_chat_and_leaves_no_task(way: str, how: str) -> None:
    async with front(way) as site:
        async with site.caller() as caller:
            for _ in range(2):
                assert (await caller.ask(post(chat()))).status == 200
            site.behave = stay_silent
            await caller.send(post(chat()))
            await site.eventually(lambda: len(site.backend.requests) == 3)
            await leave(caller.stream, how)
            with anyio.fail_after(10):
                await site.backend.closed.wait()
        await site.idle()
        await site.eventually(lambda: not tasks_at_work())

        assert [record.ending for record in site.notes.requests] == [*[Ending.COMPLETED] * 2, Ending.LEFT]


async def test_a_kept_connection_that_is_idle_leaves_no_task_when_it_ends(way: str) -> None:
    async with front(way) as site:
        async with site.caller() as caller:
            for _ in range(2):
                assert (await caller.ask(post(chat()))).status == 200
            await site.eventually(lambda: not site.listener.server_state.tasks)  # a shutdown waits for none
            assert len(tasks_at_work()) == (way == "direct")
        await site.eventually(lambda: not tasks_at_work())


async def test_a_chat_may_follow_while_the_answer_before_it_is_being_stored(way: str) -> None:
    async with front(way) as site:
        async with site.caller() as caller:
            for number in range(4):
                got = await caller.ask(post(chat(), f"Idempotency-Key: {number}"))
                assert got.status == 200
        await site.idle()

    assert len(site.backend.requests) == 4


async def test_a_caller_is_asked_for_life_while_it_waits(way: str) -> None:
    """One whose machine has lost its power ends no connection."""
    async with front(way, stay_silent) as site:
        async with site.caller() as caller:
            await caller.send(post(chat()))
            await site.eventually(lambda: len(site.backend.requests) == 1)
            port = caller.stream.extra(SocketAttribute.remote_port)
            assert 0 < await keepalive_s(port, of_server=True) <= SILENT_S
        await site.idle()


async def test_callers_that_leave_while_all_are_looked_at_are_no_trouble(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are looked at a few at a time: some have closed their connections when their turn comes."""
    monkeypatch.setattr("gateway.tcp.LOOK_S", 0.0)
    monkeypatch.setattr("gateway.downstream.listener.LOOKS_MAX", 1)
    monkeypatch.setattr("gateway.downstream.listener.LOOKS_S", 0.02)
    monkeypatch.setattr("gateway.downstream.listener.TICK_S", 0.02)
    async with front(way) as site:
        connections = site.listener.server_state.connections
        for _ in range(3):
            async with AsyncExitStack() as callers:
                for _ in range(8):
                    caller = await callers.enter_async_context(site.caller())
                    assert (await caller.ask(post())).status == 200
                await site.eventually(lambda: len(site.listener._to_look_at) > 4)
                looked_at = list(connections)
            await site.eventually(lambda: not connections)
            await site.eventually(lambda: not site.listener._to_look_at)
            assert [one._stall_timer for one in looked_at if isinstance(one, GuardedProtocol)] == [None] * 8
        async with site.caller() as caller:
            assert (await caller.ask(post())).status == 200


async def test_a_caller_whose_machine_vanishes_in_its_answer_is_noticed(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it was sent last is never acknowledged, and then no kernel asks for life."""
    monkeypatch.setattr("gateway.tcp.GONE_S", 0.2)
    monkeypatch.setattr("gateway.tcp.LOOK_S", 0.05)
    has_gone = anyio.Event()

    async def fail_later(stream: SocketStream, asked: dict[str, Any]) -> None:
        await begin(stream, asked)
        await has_gone.wait()
        await stream.send(chunk(HELLO))

    async with front(way, fail_later) as site:
        async with site.caller() as caller:
            await caller.send(post(chat(stream=True)))
            await caller.head()
            assert served_to_public(HELLO) in await caller.chunk()
            vanish(caller.stream.extra(SocketAttribute.raw_socket))
            has_gone.set()
            with anyio.fail_after(10):
                await site.backend.closed.wait()
        await site.idle()

        (record,) = site.notes.requests
        assert record.ending is Ending.LEFT
        assert not any(site.ledger.claims("b"))


@pytest.mark.parametrize("how", ["closed", "half-closed", "reset"])
async def test_a_caller_that_leaves_in_its_answer_is_noticed(way: str, how: str) -> None:
    async with front(way, begin) as site:
        async with site.caller() as caller:
            await caller.send(post(chat(stream=True)))
            await caller.head()
            assert served_to_public(HELLO) in await caller.chunk()
            assert any(site.ledger.claims("b"))
            await leave(caller.stream, how)
            with anyio.fail_after(10):
                await site.backend.closed.wait()
        await site.idle()

        (record,) = site.notes.requests
        assert (record.ending, record.status) == (Ending.LEFT, 200)
        assert not any(site.ledger.claims("b"))


async def fail_later(stream: SocketStream, _: dict[str, Any]) -> None:
    await stream.send(STREAM_HEAD + chunk(ROLE))
    while True:
        await stream.send(chunk(HELLO))
        await anyio.sleep(0.01)  # between two tokens


async def test_a_caller_that_leaves_with_requests_in_a_row_is_noticed(way: str) -> None:
    """With the next token at the latest: nothing is read while requests wait, and so no end either."""
    async with front(way, fail_later) as site:
        async with site.caller() as caller:
            await caller.send(post(chat(stream=True)) + post() + post(chat(stream=True)))
            await caller.head()
        await site.idle()

        assert len(site.backend.requests) == 1
        assert site.notes.requests[0].ending is Ending.LEFT


# ---------------------------------------------------------------- failures of the gateway's own


class Failing(Estimates):
    """Fails where a test says."""

    fails_before: Exception | None = None

    async def estimate(self, *args: Any) -> Any:
        if self.fails_before is not None:
            raise self.fails_before
        return await super().estimate(*args)

    def observe(self, *_: Any) -> None:
        raise RuntimeError("a fault")


FAULTS = [
    pytest.param(RuntimeError("a fault"), 500, "internal_error", id="bug"),
    pytest.param(MemoryError("a fault"), 503, "out_of_resources", id="memory"),
    pytest.param(RuntimeError("can't start new thread"), 503, "out_of_resources", id="threads"),
]


@pytest.mark.parametrize(("fault", "status", "code"), FAULTS)
async def test_a_fault_before_the_answer_is_one_in_the_one_shape(
    way: str, fault: Exception, status: int, code: str
) -> None:
    faulty = Failing()
    faulty.fails_before = fault
    async with front(way, estimates=faulty) as site, site.caller() as caller:
        for _ in range(2):
            got = await caller.ask(post())
            assert (got.status, got.code) == (status, code)
            assert b"fault" not in got.body
            assert got.header("x-request-id") == site.notes.requests[-1].id
            if status == 503:
                assert got.header("connection") == "close"
                assert await caller.is_closed()
                break
        await site.idle()
        records = [(one.ending, one.status, one.error_code) for one in site.notes.requests]
        asked = 1 if status == 503 else 2
        assert records == [(Ending.FAILED, status, code)] * asked
        assert site.taken == (asked if way == "direct" else 0)


@pytest.mark.parametrize(("fault", "status", "code"), FAULTS)
async def test_a_fault_while_a_head_is_read_is_not_the_callers(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fault: Exception,
    status: int,
    code: str,
) -> None:
    def fail(_: object) -> None:
        raise fault

    async with front("direct") as site, site.caller() as caller:
        monkeypatch.setattr(site.watched, "head", fail)
        got = await caller.ask(post())
        await site.idle()

    assert (got.status, got.code) == (status, code)
    assert str(fault).encode() not in got.body
    (record,) = (one for one in caplog.records if one.exc_info)
    assert record.exc_info is not None
    assert record.exc_info[1] is fault


async def test_a_body_that_nobody_takes_is_not_counted_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(_: Call) -> None:
        raise RuntimeError("a fault")

    async with front("direct") as site, site.caller() as caller:
        monkeypatch.setattr(site.watched, "chat", fail)
        with pytest.raises(Closed):
            await caller.ask(post())
        await site.idle()


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "stream"])
async def test_a_fault_in_the_answer_leaves_it_without_its_end(way: str, is_streamed: bool) -> None:
    async with front(way, estimates=Failing()) as site, site.caller() as caller:
        got = await caller.ask(post(chat(stream=is_streamed)))

        assert got.status == 200
        assert got.is_whole != is_streamed  # what has a length is whole with its last byte
        assert await caller.is_closed()
        await site.idle()
        assert site.taken == (way == "direct")


# ---------------------------------------------------------------- callers that do not read


FEW_RECEIVED = (socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 18)
FEW_SENT = (socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
PIECES = [event(delta={"content": f"{number} " + "x" * 60_000}) for number in range(400)]


class Flood:
    """Streams more than fits between it and a caller that does not read."""

    def __init__(self) -> None:
        self.sent = 0
        self.is_over = anyio.Event()

    async def __call__(self, stream: SocketStream, _: dict[str, Any]) -> None:
        self.sent = 0
        await stream.send(STREAM_HEAD + chunk(ROLE))
        for piece in PIECES:
            await stream.send(chunk(piece))
            self.sent += 1
        await stream.send(chunk(STOP + DONE) + LAST_CHUNK)
        self.is_over.set()


def unread(site: Front) -> int:
    """Return the bytes that wait in the gateway for callers to read them."""
    return sum(one.transport.get_write_buffer_size() for one in site.listener.server_state.connections)


def is_stalled(site: Front) -> bool:
    """Return whether a caller does not read."""
    connections = site.listener.server_state.connections
    return any(isinstance(one, GuardedProtocol) and one.flow.write_paused for one in connections)


async def test_a_caller_that_does_not_read_holds_its_backend_and_nothing_is_lost(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine its last chunk may come late behind [DONE], and its connection rest for long then,
    # until the caller has read what is left: it would be given up.
    monkeypatch.setattr("gateway.pipeline.attempt.END_OF_BODY_S", 30.0)
    monkeypatch.setattr("gateway.upstream.backend_clients.KEEPALIVE_S", 60.0)
    # By itself a kernel grows what it receives into, up to 32 MB where this was seen: more than there is.
    monkeypatch.setattr("gateway.tcp.KEEPALIVE", (FEW_RECEIVED,))
    flood = Flood()
    expected = sha256(served_to_public(b"".join([ROLE, *PIECES, STOP, DONE]))).digest()
    async with front(way, flood) as site, site.caller() as caller:
        caller.stream.extra(SocketAttribute.raw_socket).setsockopt(*FEW_RECEIVED)
        for _ in range(2):  # the second time on the same connections
            flood.is_over = anyio.Event()
            await caller.send(post(chat(stream=True)))
            await site.eventually(lambda: is_stalled(site))
            with anyio.move_on_after(0.5):  # it has all the time it needs to send everything, and cannot
                await flood.is_over.wait()
            assert flood.sent < len(PIECES)
            assert unread(site) < 1_000_000
            got = await caller.answer()

            assert got.is_whole
            assert sha256(got.body).digest() == expected
        await site.idle()
        assert [one.ending for one in site.notes.requests] == 2 * [Ending.COMPLETED]
        assert site.backend.connections == 1
        assert site.taken == (2 if way == "direct" else 0)


async def test_what_a_backend_still_sends_behind_done_keeps_nobody_waiting(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.pipeline.attempt.END_OF_BODY_S", 0.2)

    async def fail_later(stream: SocketStream, _: dict[str, Any]) -> None:
        await stream.send(STREAM_HEAD + chunk(ROLE))
        for piece in (HELLO, STOP, DONE):
            await stream.send(chunk(piece))
        with suppress(anyio.BrokenResourceError):
            while True:  # as a proxy does that keeps the connection alive
                await stream.send(chunk(b": keep-alive\n\n"))
                await anyio.lowlevel.checkpoint()

    async with front(way, fail_later) as site, site.caller() as caller:
        with anyio.fail_after(10):
            got = await caller.ask(post(chat(stream=True)))

        assert got.is_whole
        assert got.body == served_to_public(ROLE + HELLO + STOP + DONE)
        await site.idle()
        assert [one.ending for one in site.notes.requests] == [Ending.COMPLETED]


async def test_a_caller_that_does_not_read_holds_its_backend_token_by_token_too(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.tcp.KEEPALIVE", (FEW_RECEIVED, FEW_SENT))
    is_over = anyio.Event()

    async def trickle(stream: SocketStream, asked: dict[str, Any]) -> None:
        await stream.send(STREAM_HEAD + chunk(ROLE))
        for number in range(1_000):
            await stream.send(chunk(event(delta={"content": f"{number:04}" + "x" * 1_500})))
            for _ in range(5):  # each arrives by itself
                await anyio.lowlevel.checkpoint()
        await stream.send(chunk(STOP + DONE) + LAST_CHUNK)
        is_over.set()

    async with front(way, trickle) as site, site.caller() as caller:
        caller.stream.extra(SocketAttribute.raw_socket).setsockopt(*FEW_RECEIVED)
        await caller.send(post(chat(stream=True)))
        await site.eventually(lambda: is_stalled(site))
        with anyio.move_on_after(5):
            await is_over.wait()
        assert unread(site) < 600_000  # of 1.5 MB: a read may bring 256 KB at once, beside 64 that wait
        assert (await caller.answer()).is_whole


async def test_a_caller_that_reads_now_and_then_gets_everything(way: str) -> None:
    async with front(way, Flood()) as site, site.caller() as caller:
        await caller.send(post(chat(stream=True)))
        got, parts = await caller.head(), []
        for turn in range(10_000):
            if turn < 20:
                await site.eventually(lambda: is_stalled(site))
            part = await caller.chunk()
            parts.append(part)
            if not part:
                break

        assert got.status == 200
        assert b"".join(parts) == served_to_public(b"".join([ROLE, *PIECES, STOP, DONE]))
        await site.idle()


async def test_a_backend_that_is_silent_is_to_blame_though_its_caller_had_been_slow(way: str) -> None:
    async def fall_silent(stream: SocketStream, _: dict[str, Any]) -> None:
        await stream.send(STREAM_HEAD + b"".join(chunk(piece) for piece in (ROLE, *PIECES)))
        await anyio.sleep_forever()

    async with front(way, fall_silent, timeouts=Timeouts(idle_s=1.0)) as site, site.caller() as caller:
        await caller.send(post(chat(stream=True)))
        await site.eventually(lambda: is_stalled(site))
        got = await caller.answer()

        assert got.is_whole
        assert b"did not send anything for 1 s" in got.body[-1_000:]
        await site.idle()


async def test_a_caller_that_reads_no_more_is_given_up(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.pipeline.caller.CALLER_STALL_S", 0.1)
    async with front(way, Flood()) as site, site.caller() as caller:
        await caller.send(post(chat(stream=True)))
        with anyio.fail_after(10):
            await site.backend.closed.wait()
        await site.idle()
        (record,) = site.notes.requests
        assert record.ending is Ending.LEFT

        got = await caller.answer()  # what was written, and no end
        assert not got.is_whole
        assert not got.body.endswith(DONE)


async def test_the_connection_of_a_caller_that_reads_no_more_is_dropped(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.pipeline.caller.CALLER_STALL_S", 0.1)
    monkeypatch.setattr("gateway.downstream.guard.LINGER_S", 0.3)
    async with front(way, Flood()) as site, site.caller() as caller:
        await caller.send(post(chat(stream=True)))
        await site.eventually(lambda: is_stalled(site))
        await site.eventually(lambda: not site.listener.server_state.connections)
        await site.idle()


async def test_a_caller_that_asks_on_and_on_and_reads_nothing_is_dropped(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.downstream.guard.LINGER_S", 0.05)
    monkeypatch.setattr("gateway.downstream.guard.STALLED_S", 0.2)
    monkeypatch.setattr("gateway.tcp.KEEPALIVE", (FEW_RECEIVED, FEW_SENT))
    async with front(way) as site, site.caller() as caller:
        caller.stream.extra(SocketAttribute.raw_socket).setsockopt(*FEW_RECEIVED)
        state = site.listener.server_state
        await site.eventually(lambda: bool(state.connections))
        with suppress(anyio.BrokenResourceError):  # on a busy machine, it may be dropped between two looks
            while state.connections and not is_stalled(site):
                expected = state.total_requests + 50
                await caller.send(asking("GET", "/v1/models") * 50)
                await site.eventually(
                    lambda: is_stalled(site) or not state.connections or state.total_requests >= expected  # noqa: B023
                )
        await site.eventually(lambda: not state.connections)
        assert state.total_requests > 0
        await site.idle()


async def test_a_caller_that_leaves_only_little_unread_is_dropped_too(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = 1 << 11
    monkeypatch.setattr("gateway.downstream.guard.LINGER_S", 0.05)
    monkeypatch.setattr("gateway.downstream.listener.KEEPALIVE_S", 0.05)
    monkeypatch.setattr("gateway.downstream.listener.TICK_S", 0.02)
    monkeypatch.setattr("gateway.tcp.LOOK_S", 0.0)
    sizes = ((socket.SOL_SOCKET, name, few) for name in (socket.SO_RCVBUF, socket.SO_SNDBUF))
    monkeypatch.setattr("gateway.tcp.KEEPALIVE", tuple(sizes))
    whole = WHOLE.replace(b"hello", b"x" * 40_000)

    async def answer(stream: SocketStream, _: dict[str, Any]) -> None:
        await stream.send(answer_of(whole))

    async with front(way, answer) as site:
        with socket.socket() as stream:
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, few)  # before it connects: its window
            stream.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(stream, ("127.0.0.1", site.port))
            await loop.sock_sendall(stream, post())
            await site.eventually(lambda: unread(site) > 0)
            assert not is_stalled(site)  # too little for that
            await site.eventually(lambda: not site.listener.server_state.connections)
        await site.idle()


async def test_a_caller_that_sends_too_many_requests_at_once_is_dropped(way: str) -> None:
    async with front(way) as site, site.caller() as caller:
        await caller.send(post(chat()) * (guard.PIPELINED_MAX + 2))
        with pytest.raises(Closed):
            while True:
                await caller.answer()
        await site.idle()
        assert not site.listener.server_state.connections
        assert len(site.backend.requests) <= 1


async def test_no_more_is_read_than_is_answered(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "PIPELINED_MAX", 20)
    filler = "X-Filler: " + "x" * 15_000  # so what is read at once is 18 requests at most
    request = post(b"", filler, line="GET /v1/models HTTP/1.1", length=None)
    async with front(way) as site, site.caller() as caller, anyio.create_task_group() as tasks:
        tasks.start_soon(caller.send, 200 * request)
        for _ in range(200):
            assert (await caller.answer()).status == 200


async def test_a_caller_that_was_slow_once_is_not_dropped_later(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "LINGER_S", 0.05)
    may_end = anyio.Event()

    async def pause(stream: SocketStream, _: dict[str, Any]) -> None:
        await stream.send(STREAM_HEAD + b"".join(chunk(piece) for piece in (ROLE, *PIECES)))
        await may_end.wait()
        await stream.send(chunk(STOP + DONE) + LAST_CHUNK)

    async with front(way, pause) as site, site.caller() as caller:
        await caller.send(post(chat(stream=True)))
        await site.eventually(lambda: is_stalled(site))
        head, left = await caller.head(), len(served_to_public(b"".join([ROLE, *PIECES])))
        while left:
            left -= len(await caller.chunk())
        assert not is_stalled(site)
        monkeypatch.setattr(guard, "STALLED_S", 0.0)
        await anyio.sleep(0.2)  # a time that still ran would be over before
        may_end.set()

        assert (await caller.rest_of(head)).is_whole


async def test_a_caller_that_is_slow_is_not_dropped(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.downstream.guard.LINGER_S", 0.02)
    async with front(way, Flood()) as site, site.caller() as caller:
        await caller.send(post(chat(stream=True)))
        await site.eventually(lambda: is_stalled(site))
        with anyio.move_on_after(0.2):
            await site.backend.closed.wait()
        assert (await caller.answer()).is_whole


# ---------------------------------------------------------------- the end of a process


class Gated:
    """Begins an answer, and ends it when a test says."""

    def __init__(self) -> None:
        self.gate = anyio.Event()

    async def __call__(self, stream: SocketStream, _: dict[str, Any]) -> None:
        await begin(stream, {})
        await self.gate.wait()
        await stream.send(chunk(STOP + DONE) + LAST_CHUNK)


async def test_a_drain_lets_streams_end_and_takes_nothing_new(way: str) -> None:
    gated = Gated()
    async with (
        front(way, gated) as site,
        site.caller() as running,
        site.caller() as idle,
        anyio.create_task_group() as tasks,
    ):
        site.behave = oblige
        assert (await idle.ask(post())).status == 200
        site.behave = gated
        await running.send(post(chat(stream=True)))
        begun = await running.head()
        tasks.start_soon(site.applications.serving.drain)
        await site.eventually(lambda: site.applications.serving.is_draining)
        async with site.caller() as new:
            for caller in (idle, new):
                got = await caller.ask(post())
                assert (got.status, got.code, got.header("connection")) == (503, "draining", "close")
                assert got.header("retry-after") == "1"
                assert await caller.is_closed()
        assert site.applications.serving.in_flight == 1
        gated.gate.set()
        got = await running.rest_of(begun)

        assert got.is_whole
        assert got.body.endswith(DONE)
        with anyio.fail_after(10):
            await site.applications.serving.drain()
        assert site.taken == (2 if way == "direct" else 0)  # neither of the refused


@pytest.mark.parametrize("comes", [True, False], ids=["comes", "does not"])
async def test_a_drain_waits_for_bodies(way: str, comes: bool) -> None:
    request, is_drained, gated = post(), anyio.Event(), Gated()
    async with front(way) as site, site.caller() as other, anyio.create_task_group() as tasks:

        async def drain() -> None:
            await site.applications.serving.drain()
            is_drained.set()

        site.behave = gated
        await other.send(post(chat(stream=True)))
        begun = await other.head()
        async with site.caller() as caller:
            await caller.send(request[:-5])
            await site.eventually(lambda: site.applications.serving.uploads.bytes > 0)
            tasks.start_soon(drain)
            await site.eventually(lambda: site.applications.serving.is_draining)
            gated.gate.set()
            assert (await other.rest_of(begun)).is_whole  # which is not the last
            await site.eventually(lambda: len(site.notes.requests) == 1)
            await anyio.wait_all_tasks_blocked()
            assert not is_drained.is_set()
            site.behave = oblige
            if comes:
                assert (await caller.ask(request[-5:])).status == 200
        with anyio.fail_after(10):
            await is_drained.wait()
        assert site.notes.requests[1].ending is (Ending.COMPLETED if comes else Ending.LEFT)
        assert site.taken == (2 if way == "direct" else 0)


async def test_a_drain_waits_for_a_body_beside_which_nothing_runs(way: str) -> None:
    request, is_drained = post(), anyio.Event()
    async with front(way) as site, site.caller() as caller, anyio.create_task_group() as tasks:

        async def drain() -> None:
            await site.applications.serving.drain()
            is_drained.set()

        await caller.send(request[:-5])
        await site.eventually(lambda: site.applications.serving.uploads.bytes > 0)
        tasks.start_soon(drain)
        await anyio.wait_all_tasks_blocked()
        assert not is_drained.is_set()
        assert (await caller.ask(request[-5:])).status == 200
        with anyio.fail_after(10):
            await is_drained.wait()


async def test_a_later_drain_waits_for_what_began_behind_the_first(way: str) -> None:
    is_drained = anyio.Event()
    async with front(way) as site, anyio.create_task_group() as tasks:
        serving = site.applications.serving

        async def drain() -> None:
            await serving.drain()
            is_drained.set()

        serving.refuse()
        async with site.caller() as caller:
            assert (await caller.ask(post())).code == "draining"
        with serving.counted():  # such as a file that is read, which a drain does not refuse
            tasks.start_soon(drain)
            await anyio.wait_all_tasks_blocked()
            assert not is_drained.is_set()
        with anyio.fail_after(10):
            await is_drained.wait()


async def test_a_server_that_ends_gracefully_lets_streams_end(way: str) -> None:
    gated = Gated()
    async with front(way, gated) as site, site.caller() as running, site.caller() as idle:
        await running.send(post(chat(stream=True)))
        begun = await running.head()
        assert (await idle.ask(post(b""))).status == 400
        site.listener.should_exit = True
        assert await idle.is_closed()
        gated.gate.set()

        assert (await running.rest_of(begun)).is_whole
        assert await running.is_closed()
        with anyio.fail_after(10):
            await site.listener.wait_ended()
        await site.idle()


async def test_a_chat_that_a_gateway_ends_before_its_answer_is_the_last_on_its_connection(way: str) -> None:
    async def hang(*_: object) -> None:
        await anyio.sleep_forever()

    async with front(way, hang) as site, site.caller() as caller:
        await caller.send(post())
        await site.eventually(lambda: len(site.backend.requests) == 1)
        site.applications.end()
        got = await caller.answer()

        assert (got.status, got.code, got.header("connection")) == (503, "draining", "close")
        assert await caller.is_closed()


async def test_a_cut_ends_everything_at_once(way: str) -> None:
    async with front(way, begin) as site, site.caller() as streaming, site.caller() as sending:
        await streaming.send(post(chat(stream=True)))
        begun = await streaming.head()
        await streaming.chunk()
        await sending.send(post(b" ", length=1_000))
        await site.eventually(lambda: site.applications.serving.uploads.bytes == 1)
        site.listener.cut()
        with anyio.fail_after(10):
            await site.backend.closed.wait()
            await site.listener.wait_ended()

        assert not (await streaming.rest_of(begun)).is_whole
        assert await sending.is_closed()
        await site.idle()
        assert not site.listener.server_state.connections
        assert {one.ending for one in site.notes.requests} == {Ending.LEFT}
        assert site.taken == (2 if way == "direct" else 0)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
async def test_an_upload_cut_at_the_end_of_a_gateway_is_not_said_to_have_left(
    way: str, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with front(way) as site, site.caller() as sending:
        await sending.send(post(b" ", path=path, length=1_000))
        await site.eventually(lambda: site.applications.serving.uploads.bytes == 1)
        site.applications.serving.is_ending = True
        site.listener.cut()
        with anyio.fail_after(10):
            await site.listener.wait_ended()

        assert await sending.is_closed()
        await site.idle()
        (record,) = site.notes.requests
        assert (record.ending, record.status, record.error_code) == (Ending.FAILED, LEFT_STATUS, "draining")
    assert not any(one.exc_info for one in caplog.records if one.name == "gateway.downstream")


# ---------------------------------------------------------------- what answers a call, misused


@asynccontextmanager
async def answering(way: str, answer: Callable[[HttpDownstream], Awaitable[None]]) -> AsyncIterator[Wire]:
    """A connection to a server whose calls are all answered by `answer`."""

    class Desk:
        limits = BodyLimits()
        uploads = Uploads()
        origins = Origins()
        cohort = Cohort()

        def head(self, headers: Headers) -> Head:
            return Head({}, None)

        def head_again(self, head: Head, length: str) -> Head | None:
            return head

        async def chat(self, call: Call) -> None:
            await call.body(self.limits, self.uploads, None)
            await call.run(lambda: answer(call.downstream))

    desk = Desk()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert way == "asgi"
        await desk.chat(AsgiCall(scope, receive, send))

    bound = bind("127.0.0.1", 0)
    listener = Listener(app, bound, desk if way == "direct" else None)
    async with anyio.create_task_group() as tasks:
        port = bound.getsockname()[1]
        tasks.start_soon(listener.run_until_stopped)
        await listener.wait_started()
        try:
            async with await anyio.connect_tcp("127.0.0.1", port) as stream:
                yield Wire(stream)
        finally:
            listener.cut()
            with anyio.CancelScope(shield=True):
                await listener.wait_ended()


async def test_a_head_does_not_wait_for_its_body(way: str) -> None:
    has_head = anyio.Event()

    async def answer(downstream: HttpDownstream) -> None:
        await downstream.start(200, [])
        await has_head.wait()
        await downstream.send(b"late")
        await downstream.finish()

    async with answering(way, answer) as caller:
        await caller.send(post())
        with anyio.fail_after(10):
            begun = await caller.head()
        has_head.set()

        assert (await caller.rest_of(begun)).body == b"late"


class Unchanged:
    """Relays everything as it is."""

    is_over = False

    def take(self, data: bytes) -> bytes:
        return data

    def match(self, data: bytes, start: int, end: int) -> bytes | None:
        return None

    def stalled(self) -> None:
        pass

    def resumed(self) -> None:
        pass


async def test_nothing_ends_no_answer_and_what_is_relayed_comes_behind_its_head(way: str) -> None:
    async def answer(downstream: HttpDownstream) -> None:
        await downstream.start(200, [])
        await downstream.send(b"")
        await downstream.relay(ScriptedResponse(Script([b"relayed, ", b"at once"])), Unchanged())
        await downstream.send(b"")
        await downstream.send(b", and sent")
        await downstream.finish()

    async with answering(way, answer) as caller:
        got = await caller.ask(post())
        assert (got.body, got.is_whole) == (b"relayed, at once, and sent", True)


async def test_who_leaves_while_its_answer_is_being_stored_leaves_no_task(way: str) -> None:
    is_stored = anyio.Event()

    async def answer(downstream: HttpDownstream) -> None:
        await downstream.send_whole(200, [], b"stored")
        await downstream.finish()
        with anyio.CancelScope(shield=True):
            await is_stored.wait()

    async with answering(way, answer) as caller:
        assert (await caller.ask(post())).body == b"stored"
        assert len(tasks_at_work()) == 1
        await caller.stream.send_eof()
        assert await caller.is_closed()
        is_stored.set()
        with anyio.fail_after(10):
            while tasks_at_work():
                await anyio.lowlevel.checkpoint()


class Recognized(Unchanged):
    """Recognizes every chunk."""

    def match(self, data: bytes, start: int, end: int) -> bytes | None:
        return data


class InChunks(ScriptedResponse):
    """Comes in chunks, each complete and alone."""

    async def stream_to(self, take: Callable[[bytes], bool], take_chunk: TakeChunk | None = None) -> None:
        while data := await self.read():
            assert take_chunk is None or take_chunk(data, 0, len(data))


async def give_in_parts(downstream: HttpDownstream) -> None:
    await downstream.start(200, [])
    await downstream.send(b"late")
    await downstream.finish()


async def give_whole(downstream: HttpDownstream) -> None:
    await downstream.send_whole(200, [], b"late")
    await downstream.finish()


async def give_what_comes(downstream: HttpDownstream) -> None:
    await downstream.start(200, [])
    await downstream.relay(ScriptedResponse(Script([b"late"])), Unchanged())
    await downstream.finish()


async def give_chunks(downstream: HttpDownstream) -> None:
    await downstream.start(200, [])
    await downstream.relay(InChunks(Script([chunk(b"late")])), Recognized())
    await downstream.finish()


@pytest.mark.parametrize("give", [give_in_parts, give_whole, give_what_comes, give_chunks])
async def test_nothing_is_written_to_a_caller_that_has_left(
    way: str, give: Callable[[HttpDownstream], Awaitable[None]], caplog: pytest.LogCaptureFixture
) -> None:
    has_come, is_over = anyio.Event(), anyio.Event()

    async def answer(downstream: HttpDownstream) -> None:
        has_come.set()
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await give(downstream)
            is_over.set()

    async with answering(way, answer) as caller:
        await caller.send(post())
        with anyio.fail_after(10):
            await has_come.wait()
            await leave(caller.stream, "reset")
            await is_over.wait()
    assert [one for one in caplog.records if one.levelno >= logging.WARNING] == []


async def test_what_is_sent_waits_for_a_caller_that_reads_slowly(way: str) -> None:
    sent: list[bytes] = []
    has_sent = anyio.Event()

    async def answer(downstream: HttpDownstream) -> None:
        await downstream.start(200, [])
        for part in (b"x" * 10_000_000, b"y", b"z"):
            await downstream.send(part)
            sent.append(part)
            has_sent.set()
        await downstream.finish()

    async with answering(way, answer) as caller:
        await caller.send(post())
        await has_sent.wait()
        for _ in range(100):
            await anyio.lowlevel.checkpoint()
        assert len(sent) == 1
        got = await caller.answer()

    assert (got.body, got.is_whole) == (b"x" * 10_000_000 + b"yz", True)


async def test_an_end_waits_for_a_caller_that_reads_slowly(way: str) -> None:
    is_sent, is_over = anyio.Event(), anyio.Event()

    async def answer(downstream: HttpDownstream) -> None:
        await downstream.start(200, [])
        await downstream.send(b"x" * 10_000_000)
        is_sent.set()
        await downstream.finish()
        is_over.set()

    async with answering(way, answer) as caller:
        await caller.send(post())
        await is_sent.wait()
        await anyio.wait_all_tasks_blocked()
        assert not is_over.is_set()
        got = await caller.answer()

        assert (len(got.body), got.is_whole) == (10_000_000, True)


async def test_an_end_that_cannot_be_written_is_none(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.downstream.relay.FINISH_S", 0.1)
    monkeypatch.setattr("gateway.downstream.direct_call.FINISH_S", 0.1)
    is_over = anyio.Event()

    async def answer(downstream: HttpDownstream) -> None:
        await downstream.start(200, [])
        await downstream.send(b"x" * 30_000_000)
        await downstream.finish()
        is_over.set()

    async with answering(way, answer) as caller:
        await caller.send(post())
        with anyio.fail_after(10):
            await is_over.wait()
        got = await caller.answer()

        assert len(got.body) == 30_000_000
        assert not got.is_whole


@pytest.mark.parametrize("body", [b"four!", b"two"], ids=["longer", "shorter"])
async def test_an_answer_that_is_not_as_long_as_announced_ends_its_connection(way: str, body: bytes) -> None:
    async def answer(downstream: HttpDownstream) -> None:
        await downstream.start(200, [(b"content-length", b"4")])
        await downstream.send(body)
        await downstream.finish()

    async with answering(way, answer) as caller:
        got = await caller.ask(post())
        assert not got.is_whole


async def test_a_whole_answer_announces_its_length_and_keeps_its_connection(way: str) -> None:
    bodies = [b"first", b"", b"x" * 3_000_000]
    left = iter(bodies)

    async def answer(downstream: HttpDownstream) -> None:
        await downstream.send_whole(200, [(b"content-type", b"text/plain")], next(left))
        await downstream.finish()

    async with answering(way, answer) as caller:
        for body in bodies:
            got = await caller.ask(post())
            assert (got.status, got.body, got.is_whole) == (200, body, True)
            assert got.header("content-type") == "text/plain"
            assert got.header("content-length") == str(len(body))
            assert got.header("transfer-encoding") is None


@pytest.mark.parametrize("value", [b"a\r\nb: c", b"a\nb: c", b"a\r"])
async def test_a_whole_answer_with_a_line_break_in_a_header_is_never_sent(way: str, value: bytes) -> None:
    async def answer(downstream: HttpDownstream) -> None:
        await downstream.send_whole(200, [(b"a", value)], b"never")

    async with answering(way, answer) as caller:
        with pytest.raises(Closed):
            await caller.ask(post())


@pytest.mark.parametrize("value", [b"a\r\nb: c", b"a\nb: c", b"a\r"])
async def test_a_header_with_a_line_break_is_never_sent(way: str, value: bytes) -> None:
    async def answer(downstream: HttpDownstream) -> None:
        await downstream.start(200, [(b"a", value)])
        await downstream.send(b"never")

    async with answering(way, answer) as caller:
        with pytest.raises(Closed):
            await caller.ask(post())


async def test_an_answer_that_was_never_begun_ends_its_connection(way: str) -> None:
    async def answer(_: HttpDownstream) -> None:
        raise CallerStalled

    async with answering(way, answer) as caller:
        try:
            got = await caller.ask(post())
        except Closed:
            return
        assert got.status == 500
        assert got.header("connection") == "close"


async def send_until_answered(caller: Wire, data: bytes) -> None:
    """Send data in pieces, and stop where it is answered: more would drown the answer."""
    raw = caller.stream.extra(anyio.abc.SocketAttribute.raw_socket)
    for start in range(0, len(data), 10_000):
        if select.select([raw], [], [], 0)[0]:
            return
        await caller.send(data[start : start + 10_000])
        for _ in range(20):  # the server, in this very event loop, reads it
            await anyio.lowlevel.checkpoint()


def asked(site: Front) -> list[dict[str, Any]]:
    """Return what came to the backend."""
    return [json.loads(body) for _, body in site.backend.requests]


def served_to_public(data: bytes) -> bytes:
    """Return what a caller gets of what a backend says."""
    return data.replace(b'"model":"served"', b'"model":"gemma-4"')


async def leave(stream: SocketStream, how: str) -> None:
    """Leave in one of the ways in which callers do."""
    raw: socket.socket = stream.extra(anyio.abc.SocketAttribute.raw_socket)
    if how == "half-closed":
        await stream.send_eof()
        return
    if how == "reset":
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    await stream.aclose()
