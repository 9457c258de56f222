"""Long answers whose callers read slowly have a bound together."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import pytest

from gateway.downstream.outgoing import LONG_BYTES, Outgoing
from gateway.downstream.relay import PIECE_BYTES

LONG = b"0123456789abcdef" * (LONG_BYTES // 16) + b"end"


def get(path: str = "/v1/responses/resp_1/input_items", method: str = "GET") -> Any:
    return {"type": "http", "method": method, "path": path, "headers": []}


async def receive() -> Any:
    await anyio.sleep_forever()


@dataclass
class Reader:
    """A caller that reads nothing until it is told to."""

    reads: anyio.Event = field(default_factory=anyio.Event)
    got: list[Any] = field(default_factory=list)

    async def send(self, message: Any) -> None:
        self.got.append(message)
        if len(self.got) > 1:
            await self.reads.wait()

    @property
    def status(self) -> int:
        return int(self.got[0]["status"])

    @property
    def body(self) -> bytes:
        assert [message["more_body"] for message in self.got[1:]] == [True] * (len(self.got) - 2) + [False]
        return b"".join(message["body"] for message in self.got[1:])


def app_of(*parts: bytes, length: bool = True) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-length", b"%d" % sum(map(len, parts)))] if length else []
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for number, part in enumerate(parts, 1):
            await send({"type": "http.response.body", "body": part, "more_body": number < len(parts)})

    return app


@asynccontextmanager
async def asked(outgoing: Outgoing, reader: Reader) -> AsyncIterator[None]:
    """Ask for an answer, which is being sent in the block, and read it at its end."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(outgoing, get(), receive, reader.send)
        await anyio.wait_all_tasks_blocked()
        yield
        reader.reads.set()


async def test_long_answers_have_a_bound_together() -> None:
    outgoing = Outgoing(app_of(LONG), together_max=2 * len(LONG))
    first, second, third, later = Reader(), Reader(), Reader(), Reader()
    third.reads.set()

    async with asked(outgoing, first), asked(outgoing, second):
        assert outgoing.held.bytes == 2 * len(LONG)
        await outgoing(get(), receive, third.send)
    async with asked(outgoing, later):
        pass

    assert [one.status for one in (first, second, third, later)] == [200, 200, 503, 200]
    assert b'"out_of_resources"' in third.body
    assert first.body == second.body == later.body == LONG
    assert {len(message["body"]) for message in first.got[1:-1]} == {PIECE_BYTES}
    assert outgoing.held.bytes == 0


async def test_one_answer_may_be_longer_than_the_bound() -> None:
    outgoing, reader = Outgoing(app_of(LONG), together_max=1), Reader()
    async with asked(outgoing, reader):
        pass

    assert (reader.status, reader.body) == (200, LONG)


async def test_the_bytes_of_a_caller_that_leaves_count_no_longer() -> None:
    outgoing, reader = Outgoing(app_of(LONG)), Reader()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(outgoing, get(), receive, reader.send)
        await anyio.wait_all_tasks_blocked()
        assert outgoing.held.bytes == len(LONG)
        tasks.cancel_scope.cancel()

    assert outgoing.held.bytes == 0


@pytest.mark.parametrize(
    "app",
    [app_of(LONG), app_of(b"a", b"b", length=False), app_of(b"a", b"b")],
    ids=["long", "stream", "file"],
)
async def test_a_caller_that_reads_nothing_is_given_up(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.pipeline.caller.CALLER_STALL_S", 0.1)
    ends = []

    async def watched(scope: Any, receive: Any, send: Any) -> None:
        await app(scope, receive, send)
        ends.append("whole")

    outgoing, reader = Outgoing(watched), Reader()
    with anyio.fail_after(20):
        await outgoing(get(), receive, reader.send)

    assert (len(reader.got), ends, outgoing.held.bytes) == (2, [], 0)


async def test_other_answers_are_sent_as_they_are() -> None:
    short, parts = Outgoing(app_of(b"short"), 0), Outgoing(app_of(b"a", b"b", length=False), 0)
    posted = Outgoing(app_of(LONG), 0)
    for outgoing, scope, count in ((short, get(), 2), (parts, get(), 3), (posted, get(method="POST"), 2)):
        reader = Reader()
        reader.reads.set()
        await outgoing(scope, receive, reader.send)
        assert (reader.status, len(reader.got)) == (200, count)
