"""Chats on both of their ways, directly on the connection and as ASGI requests: no caller can tell which.

Over real sockets, byte by byte, on both event loops.
"""

import json
import socket
import struct
from dataclasses import dataclass
from typing import Any

import anyio
import pytest
from anyio.abc import SocketStream
from support.front import WAYS, Behaviour, Front, Got, chat, front, oblige, post
from support.raw_server import LAST_CHUNK, STREAM_HEAD, answer_of, chunk
from support.world import DONE, HELLO, ROLE, Estimates

from gateway.core.usage import Ending
from gateway.downstream.relay import BodyLimits
from gateway.pipeline import LEFT_STATUS


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


async def test_what_is_not_a_request_behind_one_ends_the_connection(way: str) -> None:
    async with front(way) as site, site.caller() as caller:
        await caller.send(post() + b"nonsense\r\n\r\n")
        got = await caller.answer()

        assert (got.status, got.header("connection")) == (400, "close")
        assert await caller.is_closed()
        await site.idle()


async def test_a_caller_may_wait_to_be_told_to_go_on(way: str) -> None:
    request = post(chat(), "Expect: 100-continue")
    split = request.index(b"\r\n\r\n") + 4
    async with front(way) as site, site.caller() as caller:
        await caller.send(request[:split])
        assert await caller.stream.receive() == b"HTTP/1.1 100 Continue\r\n\r\n"
        got = await caller.ask(request[split:])

        assert got.status == 200
        assert site.taken == 0


# ---------------------------------------------------------------- bodies that do not come


async def test_a_body_that_does_not_come_is_given_up(way: str) -> None:
    async with front(way, limits=LIMITS) as site, site.caller() as caller:
        got = await caller.ask(post(length=1_000))

        assert (got.status, got.code) == (408, "request_timeout")
        assert got.header("connection") == "close"  # what follows is no request
        assert await caller.is_closed()
        await site.idle()
        assert [(one.status, one.error_code) for one in site.notes.requests] == [(408, "request_timeout")]
        assert site.taken == (way == "direct")


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


async def test_the_time_of_a_body_is_not_that_of_the_next(way: str) -> None:
    request = post()
    async with front(way, limits=LIMITS) as site, site.caller() as caller:
        for _ in range(3):  # each in two pieces, so that its time begins to run
            await caller.send(request[:-5])
            await site.eventually(lambda: site.applications.uploads.bytes > 0)
            assert (await caller.ask(request[-5:])).status == 200
        with anyio.move_on_after(2 * LIMITS.within_s):
            await caller.is_closed()
            raise AssertionError("closed")
        assert (await caller.ask(request)).status == 200


async def test_bodies_have_a_bound_together(way: str) -> None:
    part = b" " * 14_000
    async with front(way, limits=LIMITS) as site, site.caller() as first, site.caller() as second:
        uploads = site.applications.uploads
        for caller in (first, second):
            await caller.send(post(part, length=16_000))
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


async def test_a_caller_that_leaves_in_its_body_is_recorded_as_that(way: str) -> None:
    async with front(way) as site:
        async with site.caller() as caller:
            await caller.send(post(b" " * 500, length=1_000))
            await site.eventually(lambda: site.applications.uploads.bytes == 500)
        await site.idle()

        assert [(one.ending, one.status) for one in site.notes.requests] == [(Ending.LEFT, LEFT_STATUS)]
        assert site.applications.uploads.bytes == 0
        assert site.backend.requests == []


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


@pytest.mark.parametrize("how", ["closed", "half-closed", "reset"])
async def test_a_caller_that_leaves_in_its_answer_is_noticed(way: str, how: str) -> None:
    async with front(way, begin) as site:
        async with site.caller() as caller:
            await caller.send(post(chat(stream=True)))
            await caller.head()
            assert HELLO in public_to_served(await caller.chunk())
            assert any(site.ledger.claims("b"))
            await leave(caller.stream, how)
            with anyio.fail_after(10):
                await site.backend.closed.wait()
        await site.idle()

        (record,) = site.notes.requests
        assert (record.ending, record.status) == (Ending.LEFT, 200)
        assert not any(site.ledger.claims("b"))


async def go_on(stream: SocketStream, _: dict[str, Any]) -> None:
    await stream.send(STREAM_HEAD + chunk(ROLE))
    while True:
        await stream.send(chunk(HELLO))
        await anyio.sleep(0.01)  # between two tokens


async def test_a_caller_that_leaves_with_requests_in_a_row_is_noticed(way: str) -> None:
    """With the next token at the latest: nothing is read while requests wait, and so no end either."""
    async with front(way, go_on) as site:
        async with site.caller() as caller:
            await caller.send(post(chat(stream=True)) + post() + post(chat(stream=True)))
            await caller.head()
        await site.idle()

        assert len(site.backend.requests) == 1
        assert site.notes.requests[0].ending is Ending.LEFT


# ---------------------------------------------------------------- failures of the gateway's own


class Failing(Estimates):
    """Fails where a test says."""

    fails_before = False

    async def estimate(self, *args: Any) -> Any:
        if self.fails_before:
            raise RuntimeError("a fault")
        return await super().estimate(*args)

    def observe(self, *_: Any) -> None:
        raise RuntimeError("a fault")


async def test_a_fault_before_the_answer_is_one_in_the_one_shape(way: str) -> None:
    faulty = Failing()
    faulty.fails_before = True
    async with front(way, estimates=faulty) as site, site.caller() as caller:
        for _ in range(2):
            got = await caller.ask(post())
            assert (got.status, got.code) == (500, "internal_error")
            assert b"fault" not in got.body
        await site.idle()
        assert site.taken == (2 if way == "direct" else 0)


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "stream"])
async def test_a_fault_in_the_answer_leaves_it_without_its_end(way: str, is_streamed: bool) -> None:
    async with front(way, estimates=Failing()) as site, site.caller() as caller:
        got = await caller.ask(post(chat(stream=is_streamed)))

        assert got.status == 200
        assert got.is_whole != is_streamed  # what has a length is whole with its last byte
        assert await caller.is_closed()
        await site.idle()
        assert site.taken == (way == "direct")


def asked(site: Front) -> list[dict[str, Any]]:
    """Return what came to the backend."""
    return [json.loads(body) for _, body in site.backend.requests]


def public_to_served(data: bytes) -> bytes:
    return data.replace(b'"model":"gemma-4"', b'"model":"served"')


async def leave(stream: SocketStream, how: str) -> None:
    """Leave in one of the ways in which callers do."""
    raw: socket.socket = stream.extra(anyio.abc.SocketAttribute.raw_socket)
    if how == "half-closed":
        await stream.send_eof()
        return
    if how == "reset":
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    await stream.aclose()
