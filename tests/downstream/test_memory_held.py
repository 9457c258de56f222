"""What a request held is free once it is over, without a round of the garbage collector.

The collector counts objects, not bytes: a body of 30 MB is one of some hundred thousand that it waits for.
"""

import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Any
from weakref import ref

import anyio
import pytest
from anyio.abc import SocketStream
from support.front import WAYS, Behaviour, Front, Wire, chat, front, oblige, post
from support.loops import on_uvloop
from support.raw_server import LAST_CHUNK, STREAM_HEAD, answer_of, chunk
from support.world import HELLO, ROLE, WHOLE, Estimates

from gateway.core.policy import Waiting
from gateway.downstream.relay import BodyLimits

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("without_collector")]
anyio_backend = on_uvloop

TEXT = "All that a document says. " * 40_000
LONG: dict[str, Any] = {"messages": [{"role": "user", "content": TEXT}]}
RESPONSE = post(b'{"model": "gemma-4", "store": false, "input": "%b"}' % TEXT.encode(), path="/v1/responses")
REPEATS = 3


async def answer(stream: SocketStream, _: object) -> None:
    await stream.send(answer_of(WHOLE))


async def fail(stream: SocketStream, _: object) -> None:
    await stream.send(answer_of(b"{}", status="500 Internal Server Error"))


async def reject(stream: SocketStream, _: object) -> None:
    await stream.send(answer_of(b'{"error": {"message": "no"}}', status="400 Bad Request"))


async def break_off(stream: SocketStream, _: object) -> None:
    await stream.aclose()


async def break_off_later(stream: SocketStream, _: object) -> None:
    await stream.send(STREAM_HEAD + chunk(ROLE + HELLO))
    await stream.aclose()


async def begin(stream: SocketStream, _: object) -> None:
    await stream.send(STREAM_HEAD + chunk(ROLE + HELLO))
    await be_silent(stream, _)


async def be_silent(stream: SocketStream, _: object) -> None:
    with suppress(anyio.EndOfStream, anyio.BrokenResourceError):
        await stream.receive()


@dataclass(frozen=True)
class Case:
    """A request.

    Attributes:
        request: Its bytes; not all of them if the caller leaves before its end.
        behave: What the backend does.
        status: Of its answer; None if the caller leaves before there is one.
        tokens: Its estimate.
        reads: Whether the caller reads the head of the answer before it leaves.
    """

    request: bytes
    behave: Behaviour = oblige
    status: int | None = 200
    tokens: int = 100
    reads: bool = True


CASES = {
    "answered": Case(post(chat(**LONG))),
    "streamed": Case(post(chat(stream=True, **LONG))),
    "not-json": Case(post(chat(**LONG)[:-1]), status=400),
    "no-model": Case(post(chat(model="none", **LONG)), status=404),
    "too-long": Case(post(chat(**LONG)), status=400, tokens=40_000),
    "too-large": Case(post(chat(**LONG) + b" " * 3_000_000), status=413),
    "rejected": Case(post(chat(**LONG)), reject, 400),
    "failed": Case(post(chat(**LONG)), fail, 502),
    "broken": Case(post(chat(**LONG)), break_off, 502),
    "broken-later": Case(post(chat(stream=True, **LONG)), break_off_later, 200),
    "left-in-its-body": Case(post(chat(**LONG))[:-1], status=None, reads=False),
    "left-before-the-answer": Case(post(chat(**LONG)), be_silent, None, reads=False),
    "left-in-the-answer": Case(post(chat(stream=True, **LONG)), begin, None),
    "idempotent-and-failed": Case(post(chat(**LONG), "Idempotency-Key: {}"), fail, 502),
    "idempotent-and-not-json": Case(post(chat(**LONG)[:-1], "Idempotency-Key: {}"), status=400),
    "response": Case(RESPONSE, answer),
    "response-failed": Case(RESPONSE, fail, 502),
}


@pytest.fixture
def trace() -> Iterator[Callable[[], None]]:
    """What begins to trace memory: all is slower from then on."""
    yield tracemalloc.start
    tracemalloc.stop()


async def play(site: Front, case: Case, number: int) -> None:
    async with site.caller() as caller:
        await caller.send(case.request.replace(b"{}", b"key-%d" % number, 1))
        if case.status is None:
            await leave(site, caller, case)
        else:
            assert (await caller.answer()).status == case.status
    await site.idle()


async def leave(site: Front, caller: Wire, case: Case) -> None:
    before = len(site.backend.requests)
    if case.reads:
        await caller.head()
    elif case.behave is be_silent:
        await site.eventually(lambda: len(site.backend.requests) > before)
    else:
        await site.eventually(lambda: site.applications.serving.uploads.bytes > 1_000_000)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
async def test_a_body_is_not_held_when_its_request_is_over(
    way: str, name: str, trace: Callable[[], None]
) -> None:
    case = CASES[name]
    limits = BodyLimits(bytes_max=2_000_000)
    async with front(way, case.behave, limits=limits, estimates=Estimates(case.tokens)) as site:
        trace()
        await play(site, case, 0)
        site.backend.requests.clear()
        before, _ = tracemalloc.get_traced_memory()
        for number in range(REPEATS):
            await play(site, case, number + 1)
            site.backend.requests.clear()
        held = tracemalloc.get_traced_memory()[0] - before
    assert held < len(TEXT)


@pytest.mark.parametrize("way", WAYS)
async def test_a_connection_that_stays_open_does_not_hold_its_last_body(
    way: str, trace: Callable[[], None]
) -> None:
    async with front(way, oblige) as site, AsyncExitStack() as stack:
        callers = [await stack.enter_async_context(site.caller()) for _ in range(REPEATS)]
        trace()
        await play(site, CASES["answered"], 0)
        site.backend.requests.clear()
        before, _peak = tracemalloc.get_traced_memory()
        for caller in callers:
            assert (await caller.ask(post(chat(**LONG)))).status == 200
            site.backend.requests.clear()
        await site.idle()
        held = tracemalloc.get_traced_memory()[0] - before
    assert held < len(TEXT)


@pytest.mark.parametrize("way", WAYS)
async def test_the_bodies_of_those_that_are_turned_away_are_not_held(
    way: str, trace: Callable[[], None]
) -> None:
    async with front(way, be_silent, waiting=Waiting(max_wait_s=60, waiting_max=1)) as site:
        trace()
        async with anyio.create_task_group() as tasks, site.caller() as refused:

            async def wait() -> None:
                async with site.caller() as caller:
                    await caller.ask(post())

            for _ in range(3):  # two run, and one waits
                tasks.start_soon(wait)
            await site.eventually(lambda: site.applications.serving.in_flight == 3)
            request = post(chat(**LONG))
            assert (await refused.ask(request)).code == "queue_full"
            before, _peak = tracemalloc.get_traced_memory()
            for _ in range(REPEATS):
                assert (await refused.ask(request)).code == "queue_full"
            held = tracemalloc.get_traced_memory()[0] - before
            tasks.cancel_scope.cancel()
    assert held < len(TEXT)


UPGRADE = post(
    b"", "Connection: upgrade", "Upgrade: h2c", "X: " + 1_200 * "x", line="GET /livez HTTP/1.1", length=None
)


@pytest.mark.parametrize("way", WAYS)
async def test_what_follows_requests_for_an_upgrade_is_held_once_though_it_is_read_again(
    way: str, trace: Callable[[], None]
) -> None:
    row = UPGRADE * 150
    async with front(way) as site, site.caller() as caller:
        trace()
        assert (await caller.ask(UPGRADE)).status == 200
        (connection,) = site.listener.server_state.connections
        before, _peak = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        connection.data_received(row)
        _now, peak = tracemalloc.get_traced_memory()
        for _ in range(150):
            assert (await caller.answer()).status == 200
    assert peak - before < 20 * len(row)


MODELS = post(b"", line="GET /v1/models HTTP/1.1", length=None)
CHUNKED = post(chunk(chat()), "Transfer-Encoding: chunked", length=None)

LEFT: dict[str, tuple[bytes, Behaviour, tuple[int, ...]]] = {
    "idle": (post(), oblige, (200,)),
    "idle-for-asgi": (MODELS, oblige, (200,)),
    "in-a-head": (post()[:20], oblige, ()),
    "in-a-short-body": (post()[:-1], oblige, ()),
    "in-a-long-body": (post(chat(**LONG))[:-1], oblige, ()),
    "in-a-chunked-body": (CHUNKED, oblige, ()),
    "in-a-body-that-was-answered": (post(key=None)[:-1], oblige, (401,)),
    "behind-nonsense": (b"nonsense\r\n\r\n", oblige, (400,)),
    "waiting": (post(), be_silent, ()),
    "with-more-behind": (CHUNKED + LAST_CHUNK + post() * 2, be_silent, ()),
}
"""How callers leave: what they have sent, what the backend does, and the answers that they read before."""


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("sent, behave, answers", LEFT.values(), ids=LEFT)
async def test_a_connection_is_not_held_when_it_is_over(
    way: str, sent: bytes, behave: Behaviour, answers: tuple[int, ...]
) -> None:
    async with front(way, behave) as site:
        connections = site.listener.server_state.connections
        async with site.caller() as caller:
            await caller.send(sent)
            for status in answers:
                assert (await caller.answer()).status == status
            await site.eventually(lambda: len(connections) == 1)
            (held,) = map(ref, connections)
        await site.eventually(lambda: not connections)
        await site.idle()
        site.watched.taken.clear()
        await site.eventually(lambda: held() is None)
