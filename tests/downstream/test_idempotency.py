"""What runs under an idempotency key: renewed, fenced, bounded, and kept or freed at its end."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from weakref import ref

import anyio
import pytest
from support.world import Notes

from gateway.clock import SystemClock
from gateway.core.errors import (
    GatewayError,
    IdempotencyInProgress,
    InvalidRequest,
    OutOfResources,
    StoreUnavailable,
    UpstreamFailed,
)
from gateway.core.idempotency import IdempotencyClaim, KeyState, StoredAnswer, fingerprint
from gateway.core.usage import Ending
from gateway.downstream import idempotency
from gateway.downstream.idempotency import IdempotencyRules, IdempotentRequests
from gateway.downstream.reading import BodyReaders, Received, Work
from gateway.downstream.relay import HELD_BYTES_MAX, AsgiDownstream, HttpDownstream
from gateway.pipeline import CallerStalled
from gateway.ports import Arrival
from gateway.store.memory import MemoryIdempotency

ROUTE = "/v1/chat/completions"
BODY = b'{"model":"gemma-4"}'
DONE = b"data: [DONE]\n\n"
SSE = [(b"content-type", b"text/event-stream")]


class Headers(dict[str, str]):
    """Headers of a request, to which there are weak references."""


@dataclass
class Desk:
    """Promises in memory, and those who ask."""

    lease_s: float = 30.0
    answer_bytes_max: int = 1_000
    store: MemoryIdempotency = field(default_factory=lambda: MemoryIdempotency(SystemClock(), 10_000))
    sent: list[dict[str, Any]] = field(default_factory=list)
    asked: int = 0
    notes: Notes = field(default_factory=Notes)
    idempotency: IdempotentRequests = field(init=False)

    def __post_init__(self) -> None:
        rules = IdempotencyRules(self.store, 60.0, self.answer_bytes_max, self.lease_s)
        self.idempotency = IdempotentRequests(rules, BodyReaders(), self.notes, SystemClock())

    async def ask(self, work: Callable[[HttpDownstream], Awaitable[None]]) -> None:
        """Ask with the one key; `work` is what would answer it."""
        self.asked += 1
        arrival = Arrival(f"req-{self.asked}", 0.0, 0.0, route=ROUTE)
        received = Received(arrival, BODY, "team", {"idempotency-key": "k-1"}, ())

        async def read(_: Received) -> Work:
            return work

        async def send(message: Any) -> None:
            self.sent.append(message)

        answer = await self.idempotency.read(received, read)
        await answer(AsgiDownstream(send))

    async def lease_passes(self, times: int) -> None:
        """Return when a lease has run out that nobody renews, `times` as long as the desk's."""
        unrenewed = replace(self.claim, key="k-2")
        await self.store.begin(unrenewed, times * self.lease_s)
        with anyio.fail_after(10):
            while await self.store.begin(replace(unrenewed, runner="r"), 60.0) is KeyState.RUNNING:
                await anyio.lowlevel.checkpoint()

    @property
    def claim(self) -> IdempotencyClaim:
        """The promise, as somebody at another gateway would make it."""
        return IdempotencyClaim("team", ROUTE, "k-1", fingerprint(BODY), "req-elsewhere")

    async def standing(self) -> bytes | KeyState:
        """Return what somebody who asks now finds; whoever begins so gives up at once."""
        found = await self.store.begin(self.claim, 60.0)
        await self.store.free(self.claim)
        return found


async def stream(downstream: HttpDownstream, parts: Sequence[bytes] = (b"data: 1\n\n", DONE)) -> None:
    await downstream.start(200, SSE)
    for part in parts:
        await downstream.send(part)
    await downstream.finish()


async def test_what_is_sent_is_passed_on_unchanged_and_at_once() -> None:
    desk, seen = Desk(), []

    async def work(downstream: HttpDownstream) -> None:
        await downstream.start(200, SSE)
        for part in (b"data: 1\n\n", b": keep-alive\n\n", DONE):
            await downstream.send(part)
            seen.append(desk.sent[-1]["body"])
        await downstream.finish()

    await desk.ask(work)

    assert seen == [b"data: 1\n\n", b": keep-alive\n\n", DONE]
    assert [message.get("more_body") for message in desk.sent] == [None, True, True, True, False]
    assert await desk.standing() == StoredAnswer(200, SSE, b"".join(seen)).encoded()


async def test_an_answer_is_kept_before_its_last_bytes_leave() -> None:
    desk, standings = Desk(), []

    class Caller(AsgiDownstream):
        async def send(self, data: bytes) -> None:
            standings.append(await desk.standing())
            await super().send(data)

    async def whole(downstream: HttpDownstream) -> None:
        await downstream.start(200, [(b"content-length", b"4")])
        await downstream.send(b"ab")
        await downstream.send(b"cd")

    async def nothing(message: Any) -> None:
        pass

    received = Received(Arrival("r", 0.0, 0.0, route=ROUTE), BODY, "team", {"idempotency-key": "k-1"}, ())

    async def read(_: Received) -> Work:
        return whole

    await (await desk.idempotency.read(received, read))(Caller(nothing))

    assert standings[0] is KeyState.RUNNING
    assert isinstance(standings[1], bytes)


async def fails(downstream: HttpDownstream) -> None:
    raise UpstreamFailed("no")


async def breaks(downstream: HttpDownstream) -> None:
    await downstream.start(200, SSE)
    await downstream.send(b"data: 1\n\n")
    await downstream.fail(UpstreamFailed("no"), "stream_broken")
    await downstream.finish()


async def ends_badly(downstream: HttpDownstream) -> None:
    await downstream.start(200, SSE)
    await downstream.send_last(b"event: response.failed\n\n", is_good=False)
    await downstream.finish()


async def stalls(downstream: HttpDownstream) -> None:
    await downstream.start(200, SSE)
    raise CallerStalled


async def breaks_off(downstream: HttpDownstream) -> None:
    await downstream.start(200, SSE)
    await downstream.send(b"data: 1\n\n")


async def is_no_success(downstream: HttpDownstream) -> None:
    await downstream.start(404, [(b"content-length", b"2")])
    await downstream.send(b"no")


async def is_a_bug(downstream: HttpDownstream) -> None:
    raise RuntimeError


@pytest.mark.parametrize(
    ("work", "error"),
    [
        (fails, UpstreamFailed),
        (breaks, None),
        (ends_badly, None),
        (stalls, CallerStalled),
        (breaks_off, None),
        (is_no_success, None),
        (is_a_bug, ExceptionGroup),
    ],
)
async def test_what_does_not_end_well_frees_the_key(work: Work, error: type[Exception] | None) -> None:
    desk = Desk()
    if error is None:
        await desk.ask(work)
    else:
        with pytest.raises(error):
            await desk.ask(work)

    assert await desk.standing() is KeyState.BEGUN
    assert desk.idempotency.recorded_bytes == 0


async def test_a_caller_that_leaves_frees_the_key() -> None:
    desk, begun = Desk(), anyio.Event()

    async def work(downstream: HttpDownstream) -> None:
        await downstream.start(200, SSE)
        begun.set()
        await anyio.sleep_forever()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(desk.ask, work)
        await begun.wait()
        assert await desk.standing() is KeyState.RUNNING
        tasks.cancel_scope.cancel()

    assert await desk.standing() is KeyState.BEGUN


async def test_a_request_that_cannot_be_read_frees_the_key() -> None:
    desk = Desk()
    received = Received(Arrival("r", 0.0, 0.0, route=ROUTE), BODY, "team", {"idempotency-key": "k-1"}, ())

    async def read(_: Received) -> Work:
        assert await desk.standing() is KeyState.RUNNING
        raise InvalidRequest("no")

    with pytest.raises(InvalidRequest):
        await desk.idempotency.read(received, read)

    assert await desk.standing() is KeyState.BEGUN


async def test_a_caller_that_leaves_while_its_request_is_read_frees_the_key() -> None:
    desk, begun = Desk(), anyio.Event()
    received = Received(Arrival("r", 0.0, 0.0, route=ROUTE), BODY, "team", {"idempotency-key": "k-1"}, ())

    async def read(_: Received) -> Work:
        begun.set()
        await anyio.sleep_forever()
        raise AssertionError

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(desk.idempotency.read, received, read)
        await begun.wait()
        tasks.cancel_scope.cancel()

    assert await desk.standing() is KeyState.BEGUN


async def test_what_runs_for_longer_than_its_lease_keeps_its_key() -> None:
    desk, over = Desk(lease_s=0.3), anyio.Event()

    async def work(downstream: HttpDownstream) -> None:
        await over.wait()
        await stream(downstream)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(desk.ask, work)
        await desk.lease_passes(3)
        assert await desk.standing() is KeyState.RUNNING
        with pytest.raises(IdempotencyInProgress):
            await desk.ask(fails)
        over.set()

    assert isinstance(await desk.standing(), bytes)


async def test_what_is_read_for_longer_than_its_lease_keeps_its_key() -> None:
    """What a response refers to may be in a store that is slow."""
    desk = Desk(lease_s=0.3)
    received = Received(Arrival("r", 0.0, 0.0, route=ROUTE), BODY, "team", {"idempotency-key": "k-1"}, ())

    async def read(_: Received) -> Work:
        await desk.lease_passes(3)
        assert await desk.standing() is KeyState.RUNNING
        return stream

    await desk.idempotency.read(received, read)

    assert await desk.standing() is KeyState.RUNNING


async def test_an_answer_outlives_the_lease_of_its_request() -> None:
    desk = Desk(lease_s=0.1)

    await desk.ask(stream)
    await desk.lease_passes(1)

    assert isinstance(await desk.standing(), bytes)


async def test_a_renewal_that_the_store_does_not_answer_is_not_the_last() -> None:
    class Away(MemoryIdempotency):
        """Does not answer the first renewal."""

        asked = 0

        async def renew(self, claim: IdempotencyClaim, lease_s: float) -> bool:
            self.asked += 1
            if self.asked == 1:
                raise StoreUnavailable("no answer")
            return await super().renew(claim, lease_s)

    desk, over = Desk(lease_s=0.6, store=Away(SystemClock(), 10_000)), anyio.Event()

    async def work(_: HttpDownstream) -> None:
        await over.wait()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(desk.ask, work)
        await desk.lease_passes(2)
        assert await desk.standing() is KeyState.RUNNING
        over.set()


async def test_a_key_that_was_freed_is_not_taken_again_by_a_renewal() -> None:
    desk = Desk(lease_s=0.3)

    async def work(downstream: HttpDownstream) -> None:
        await breaks(downstream)
        await desk.lease_passes(1)  # three renewals would have come
        assert await desk.standing() is KeyState.BEGUN

    await desk.ask(work)


async def test_a_runner_that_lost_its_key_answers_its_caller_and_touches_nothing() -> None:
    """As one whose gateway stood still: its lease ran out, and another has answered meanwhile."""
    desk = Desk()
    others = StoredAnswer(200, SSE, DONE).encoded()

    async def work(downstream: HttpDownstream) -> None:
        desk.store._marks.clear()
        await desk.store.begin(desk.claim, 60.0)
        await desk.store.keep(desk.claim, others, 60.0)
        await stream(downstream)

    await desk.ask(work)

    assert [message.get("body") for message in desk.sent][1:-1] == [b"data: 1\n\n", DONE]
    assert await desk.standing() == others


async def test_an_answer_beyond_the_limit_is_passed_on_and_not_kept() -> None:
    desk = Desk(answer_bytes_max=20)

    await desk.ask(lambda downstream: stream(downstream, [b"data: 1234567890\n\n", DONE]))

    assert desk.sent[-2]["body"] == DONE
    assert await desk.standing() is KeyState.BEGUN
    await desk.ask(lambda downstream: stream(downstream, [b"123456", DONE]))  # just as long
    assert isinstance(await desk.standing(), bytes)


async def test_what_is_written_down_together_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.downstream.idempotency.RECORDED_BYTES_MAX", 40)
    desk = Desk()
    desk.idempotency.recorded_bytes = 30  # others'

    await desk.ask(stream)
    assert desk.idempotency.recorded_bytes == 30
    assert await desk.standing() is KeyState.BEGUN

    desk.idempotency.recorded_bytes = 10
    await desk.ask(stream)
    assert desk.idempotency.recorded_bytes == 10
    assert isinstance(await desk.standing(), bytes)


async def test_errors_come_out_as_they_were_raised() -> None:
    for kind in (GatewayError, CallerStalled, OSError):

        async def work(downstream: HttpDownstream, kind: type[Exception] = kind) -> None:
            raise kind("x")

        with pytest.raises(kind):
            await Desk().ask(work)


async def test_answers_that_are_read_slowly_have_a_bound_together() -> None:
    desk = Desk()
    await desk.ask(stream)

    desk.idempotency.replayed.bytes += HELD_BYTES_MAX  # of others
    with pytest.raises(OutOfResources):
        await desk.ask(stream)
    assert desk.notes.requests[-1].status == 503
    desk.idempotency.replayed.bytes -= HELD_BYTES_MAX
    await desk.ask(stream)

    assert desk.notes.requests[-1].ending is Ending.REPLAYED
    assert desk.idempotency.replayed.bytes == 0


async def test_a_request_whose_answer_is_given_again_is_not_held_meanwhile() -> None:
    desk = Desk()
    await desk.ask(stream)
    headers = Headers({"idempotency-key": "k-1"})
    held = ref(headers)

    async def read(_: Received) -> Work:
        raise AssertionError

    answer = await desk.idempotency.read(
        Received(Arrival("r", 0.0, 0.0, route=ROUTE), BODY, "team", headers, ()), read
    )
    del headers

    assert held() is None
    del answer


async def test_an_answer_is_given_again_byte_for_byte_however_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idempotency, "PIECE_BYTES", 10)
    desk, parts = Desk(), (b"data: 0123456789\n\n", DONE)
    await desk.ask(partial(stream, parts=parts))
    desk.sent.clear()

    await desk.ask(stream)

    pieces = [message["body"] for message in desk.sent if message["type"] == "http.response.body"]
    assert b"".join(pieces) == b"".join(parts)
    assert max(map(len, pieces)) == 10
    (record,) = desk.notes.requests
    assert (record.ending, record.status) == (Ending.REPLAYED, 200)
