"""The lease scripts' connections: whose reply is whose, also when servers stall, die, refuse or babble."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from anyio.abc import SocketStream
from anyio.streams.buffered import BufferedByteReceiveStream
from redis.asyncio import Redis
from support.processes import reserved_port
from support.redis_server import RedisServer, binary

from gateway.core.load import UNLIMITED, Load
from gateway.ports import Slot
from gateway.store.connections import Connections, StoreAway
from gateway.store.redis import RedisLedger
from gateway.store.wire import WIRES, PipelinedConnections, Subscription, packed, subscribed

pytestmark = pytest.mark.parametrize(
    "anyio_backend",
    [("asyncio", {"use_uvloop": False}), ("asyncio", {"use_uvloop": True})],
    ids=["asyncio", "uvloop"],
)

CLAIM = Load(seqs=1, share=500_000, kv_blocks=10, long_seqs=1, long_unanswered=1, prefill_ms=700)
FREE = Load(UNLIMITED, UNLIMITED, UNLIMITED, UNLIMITED, UNLIMITED, UNLIMITED)
WITHIN_S = 20.0

Store = Any  # tests/store/conftest.py
Outcome = Sequence[int] | BaseException


def command(*words: str | int) -> bytes:
    return b"*%d\r\n" % len(words) + packed(words)


def echo(number: int) -> bytes:
    return command("EVAL", "return {tonumber(ARGV[1]), 7}", 0, number)


@asynccontextmanager
async def wires_to(url: str, command_s: float = 10.0) -> AsyncIterator[PipelinedConnections]:
    connections = Connections(url, name="wired", command_s=command_s, connections_max=1)
    wires = PipelinedConnections(connections.connection, command_s)
    yield wires
    wires.close()
    await connections.aclose()


async def ask(wires: PipelinedConnections, *numbers: int) -> list[Outcome]:
    """Ask all of it at once."""
    with anyio.fail_after(WITHIN_S):
        return await asyncio.gather(*(wires.ask(echo(number)) for number in numbers), return_exceptions=True)


def away(outcomes: list[Outcome]) -> set[str]:
    """Return why each of them failed, which they have to have done."""
    assert all(isinstance(outcome, StoreAway) for outcome in outcomes), outcomes
    return set(map(str, outcomes))


# ------------------------------------------------------------------ servers as they should be


async def test_each_caller_gets_the_reply_to_its_own_command(store: Store) -> None:
    async with wires_to(store.url) as wires:
        for _ in range(3):
            assert await ask(wires, *range(200)) == [[number, 7] for number in range(200)]
        assert len(wires._wires) == 1  # none waited behind another write


async def test_a_database_behind_a_password(tmp_path: Path) -> None:
    with reserved_port() as port:
        server = RedisServer(binary("valkey-9"), tmp_path, port)
        server.start()
        redis = Redis.from_url(server.url, db=3)
        try:
            await redis.set("one", 1)
            await redis.config_set("requirepass", "hunter2")
            size = command("EVAL", "return {redis.call('DBSIZE')}", 0)
            async with wires_to(f"redis://:hunter2@127.0.0.1:{port}/3") as wires:
                assert await wires.ask(size) == [1]
            async with wires_to(f"redis://:wrong@127.0.0.1:{port}/3") as wires:
                with pytest.raises(StoreAway, match="AuthenticationError"):
                    await wires.ask(size)
        finally:
            await redis.aclose()
            server.kill()


async def test_words_are_packed_by_their_bytes() -> None:
    assert command("Äpfel", -12) == b"*2\r\n$6\r\n\xc3\x84pfel\r\n$3\r\n-12\r\n"


# ------------------------------------------------------------------ servers that stall, die and come back


async def test_whoever_waits_for_a_stalled_server_is_told_and_late_replies_reach_nobody(
    stoppable: RedisServer,
) -> None:
    async with wires_to(stoppable.url, command_s=0.3) as wires:
        assert await ask(wires, 1) == [[1, 7]]
        stoppable.stall()
        assert away(await ask(wires, *range(50))) == {"no answer within 0.3 s"}
        stoppable.resume()
        with anyio.fail_after(WITHIN_S):
            while isinstance((await ask(wires, 100))[0], StoreAway):
                pass  # it may still be at work
        assert await ask(wires, 101, 102) == [[101, 7], [102, 7]]


async def test_a_server_that_stalls_after_a_time_without_commands_is_noticed(
    stoppable: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with wires_to(stoppable.url, command_s=0.1) as wires:
        assert await ask(wires, 1) == [[1, 7]]
        await anyio.sleep(0.2)  # by now nothing watches the connection
        stoppable.stall()
        assert away(await ask(wires, 2)) == {"no answer within 0.1 s"}
    assert caplog.text == ""


async def test_a_server_killed_in_the_middle_of_a_batch_fails_all_of_it_and_leaves_nothing(
    stoppable: RedisServer, store_type: Callable[..., Store]
) -> None:
    ledger = RedisLedger(stoppable.url, command_s=10.0)
    kept = await ledger.acquire("b", CLAIM, FREE)
    stoppable.stall()
    async with asyncio.timeout(WITHIN_S), asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(outcome_of(ledger)) for _ in range(50)]
        for _ in range(20):  # by now it is sent
            await anyio.lowlevel.checkpoint()
        asked.pop(7).cancel()
        await anyio.lowlevel.checkpoint()
        stoppable.kill()
    assert all(isinstance(task.result(), StoreAway) for task in asked)

    stoppable.start()
    await ledger.sync()
    redis = Redis.from_url(stoppable.url, decode_responses=True)
    seen = store_type(stoppable.url, "gw", redis)
    assert isinstance(kept, Slot)
    assert await seen.sums() == await seen.added() == ledger.load("b") == CLAIM
    await redis.aclose()
    await ledger.aclose()


async def outcome_of(ledger: RedisLedger) -> object:
    try:
        return await ledger.acquire("b", CLAIM, FREE)
    except StoreAway as failure:
        return failure


async def test_a_server_that_has_forgotten_the_scripts_is_told_them_again(stoppable: RedisServer) -> None:
    ledger = RedisLedger(stoppable.url, command_s=10.0)
    await ledger.acquire("b", CLAIM, FREE)
    stoppable.kill()
    stoppable.start()
    with suppress(StoreAway):  # unless the loop has heard of its end by now
        await ledger.sync()

    async with asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(outcome_of(ledger)) for _ in range(20)]
    assert all(isinstance(task.result(), Slot) for task in asked)
    await ledger.aclose()


async def close_idle(store: Store) -> None:
    """Close the connections of `wires_to`, as a server or a proxy does after a time without commands."""
    for client in await store.redis.client_list():
        if client["name"] == "wired":
            await store.redis.client_kill_filter(_id=client["id"])


async def test_a_connection_that_was_closed_while_idle_is_replaced(store: Store) -> None:
    async with wires_to(store.url) as wires:
        await ask(wires, 1)
        await close_idle(store)
        await store.redis.ping()
        assert await ask(wires, 2) == [[2, 7]]


async def test_so_it_is_before_the_event_loop_has_said_that_it_is_lost(store: Store) -> None:
    async with wires_to(store.url) as wires:
        await ask(wires, 1)
        (wire,) = wires._wires
        assert wire._writer is not None
        await close_idle(store)
        with anyio.fail_after(WITHIN_S):
            while not wire._writer.transport.is_closing():
                await anyio.lowlevel.checkpoint()
            assert await wires.ask(echo(2)) == [2, 7]


async def test_who_is_cancelled_takes_nobody_along_and_keeps_no_place(
    stoppable: RedisServer, store_type: Callable[..., Store]
) -> None:
    ledger = RedisLedger(stoppable.url, command_s=10.0)
    await ledger.acquire("b", Load(), FREE)
    stoppable.stall()
    async with asyncio.timeout(WITHIN_S), asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(ledger.acquire("b", Load(seqs=number), FREE)) for number in range(1, 11)]
        for _ in range(20):  # by now it is sent
            await anyio.lowlevel.checkpoint()
        asked[3].cancel()
        await anyio.lowlevel.checkpoint()
        stoppable.resume()

    assert asked.pop(3).cancelled()
    slots = [task.result() for task in asked]
    assert [slot.load.seqs for slot in slots if isinstance(slot, Slot)] == [1, 2, 3, 5, 6, 7, 8, 9, 10]
    await ledger.sync()
    redis = Redis.from_url(stoppable.url, decode_responses=True)
    seen = store_type(stoppable.url, "gw", redis)
    assert await seen.sums() == await seen.added() == ledger.load("b") == Load(seqs=55 - 4)
    await redis.aclose()
    await ledger.aclose()


async def test_whoever_connects_for_all_may_be_cancelled(store: Store) -> None:
    async with wires_to(store.url) as wires, asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(ask(wires, number)) for number in range(10)]
        for number in range(5):  # each connects in its turn
            await anyio.lowlevel.checkpoint()
            asked[number].cancel()
    assert [task.cancelled() for task in asked] == [True] * 5 + [False] * 5
    assert [task.result() for task in asked[5:]] == [[[number, 7]] for number in range(5, 10)]


# ------------------------------------------------------------------ servers that are none


class Puppet:
    """A server that says what a test has it say.

    Attributes:
        url: Where it is.
        connections: How many it has had.
        closed: How many of them the other side has closed.
    """

    def __init__(self, folder: Path, says: Callable[[int], list[bytes]], pace_s: float = 0.0) -> None:
        """Answer the command with a number by the pieces that `says` returns for it, after `pace_s`."""
        self._path, self._says, self._pace_s = folder / "puppet.sock", says, pace_s
        self.url = f"unix://{self._path}"
        self.connections = self.closed = 0

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        listener = await anyio.create_unix_listener(self._path)
        async with listener, anyio.create_task_group() as tasks:
            tasks.start_soon(listener.serve, self._serve)
            yield
            with anyio.fail_after(WITHIN_S):
                while self.closed < self.connections:
                    await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()

    async def _serve(self, stream: SocketStream) -> None:
        self.connections += 1
        came = BufferedByteReceiveStream(stream)
        with suppress(anyio.IncompleteRead, anyio.BrokenResourceError):
            async with stream:
                while True:
                    await self._answer(stream, await self._words(came))
        self.closed += 1

    async def _words(self, came: BufferedByteReceiveStream) -> list[bytes]:
        words = []
        for _ in range(int((await came.receive_until(b"\r\n", 16))[1:])):
            length = int((await came.receive_until(b"\r\n", 16))[1:])
            words.append((await came.receive_exactly(length + 2))[:-2])
        return words

    async def _answer(self, stream: SocketStream, words: list[bytes]) -> None:
        if words[0] not in {b"EVAL", b"SUBSCRIBE"}:  # redis-py's greetings
            await stream.send(b"+OK\r\n")
            return
        await anyio.sleep(self._pace_s)
        for piece in self._says(int(words[-1])):
            await stream.send(piece)


def reply(number: int) -> bytes:
    return b"*2\r\n:%d\r\n:7\r\n" % number


@pytest.mark.parametrize(
    "nonsense",
    [
        b"+OK\r\n",
        b":1\r\n",
        b"$1\r\n1\r\n",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"*x\r\n",
        b"*-1\r\n",
        b"*0\r\n",
        b"*2\r\n:1\r\n+1\r\n",
        b"*2\r\n:1\r\n:x\r\n",
        b"\r\n",
    ],
)
async def test_bytes_that_are_no_reply_end_the_connection(tmp_path: Path, nonsense: bytes) -> None:
    puppet = Puppet(tmp_path, lambda number: [nonsense if number == 1 else reply(number)])
    async with puppet.run(), wires_to(puppet.url) as wires:
        assert away(await ask(wires, 1, 2)) == {
            "ProtocolError: the server sent something that is not a reply"
        }
        assert await ask(wires, 3) == [[3, 7]]
        assert puppet.connections == 2


async def test_a_reply_too_many_is_not_taken_for_the_next_one(tmp_path: Path) -> None:
    puppet = Puppet(tmp_path, lambda number: [reply(number) * (2 if number == 1 else 1)])
    async with puppet.run(), wires_to(puppet.url) as wires:
        assert await ask(wires, 1) == [[1, 7]]
        assert await ask(wires, 2) == [[2, 7]]
        assert puppet.connections == 2


async def test_a_reply_in_pieces_is_put_together(tmp_path: Path) -> None:
    puppet = Puppet(tmp_path, lambda number: [bytes([byte]) for byte in reply(number)])
    async with puppet.run(), wires_to(puppet.url) as wires:
        assert await ask(wires, 1, -2, 345678) == [[1, 7], [-2, 7], [345678, 7]]


async def test_a_refusal_is_one_command_s_and_the_next_goes_elsewhere(tmp_path: Path) -> None:
    refusal = b"-READONLY You can't write against a read only replica.\r\n"
    puppet = Puppet(tmp_path, lambda number: [refusal if number == 2 else reply(number)])
    async with puppet.run(), wires_to(puppet.url) as wires:
        first, second, third = await ask(wires, 1, 2, 3)
        assert (first, third) == ([1, 7], [3, 7])
        assert away([second]) == {refusal[1:-2].decode()}
        assert puppet.connections == 1
        assert await ask(wires, 4) == [[4, 7]]
        assert (puppet.connections, puppet.closed) == (2, 1)


async def test_what_hangs_holds_up_nothing_that_comes_after_it(tmp_path: Path) -> None:
    asked = anyio.Event()

    def says(number: int) -> list[bytes]:
        asked.set()
        return [reply(number)] if number > 1 else []

    puppet = Puppet(tmp_path, says)
    async with puppet.run(), wires_to(puppet.url) as wires, anyio.create_task_group() as tasks:
        tasks.start_soon(ask, wires, 1)
        await asked.wait()
        for number in range(2, 50):
            assert await ask(wires, number) == [[number, 7]]
        assert puppet.connections == 2
        wires.close()


async def test_a_server_that_answers_nothing_gets_few_connections(tmp_path: Path) -> None:
    heard: list[int] = []

    def says(number: int) -> list[bytes]:
        heard.append(number)
        return []

    puppet = Puppet(tmp_path, says)
    async with puppet.run(), wires_to(puppet.url) as wires, anyio.create_task_group() as tasks:
        for number in range(10):
            tasks.start_soon(ask, wires, number)
            with anyio.fail_after(WITHIN_S):
                while len(heard) <= number:
                    await anyio.lowlevel.checkpoint()
        wires.close()
        assert not wires._wires
    assert puppet.connections == WIRES


async def test_a_server_that_is_slow_for_many_is_not_away(tmp_path: Path) -> None:
    puppet = Puppet(tmp_path, lambda number: [reply(number)], pace_s=1.2)
    async with puppet.run(), wires_to(puppet.url, command_s=2.0) as wires:
        assert await ask(wires, 1, 2) == [[1, 7], [2, 7]]


async def test_a_reply_that_comes_after_this_process_stood_still_is_waited_for(tmp_path: Path) -> None:
    puppet = Puppet(tmp_path, lambda number: [reply(number)], pace_s=0.2)
    async with puppet.run(), wires_to(puppet.url, command_s=0.4) as wires:
        assert await ask(wires, 1) == [[1, 7]]
        loop = asyncio.get_running_loop()
        loop.call_soon(loop.call_soon, time.sleep, 0.8)  # once it is asked, and before it is written
        assert await ask(wires, 2) == [[2, 7]]


async def test_who_has_waited_for_a_turn_for_too_long_waits_no_longer(tmp_path: Path) -> None:
    puppet = Puppet(tmp_path, lambda number: [reply(number)], pace_s=0.3)
    async with puppet.run(), wires_to(puppet.url, command_s=1.0) as wires:
        first, *_, last = await ask(wires, *range(10))
        assert first == [0, 7]
        assert away([last]) == {"no answer within 1 s"}


# ------------------------------------------------------------------ what is published


@asynccontextmanager
async def ear_at(url: str, channel: str) -> AsyncIterator[Subscription]:
    connections = Connections(url, name="ear", command_s=10.0, connections_max=1)
    try:
        with anyio.fail_after(WITHIN_S):
            async with subscribed(connections, channel) as ear:
                yield ear
    finally:
        await connections.aclose()


def message(text: str) -> bytes:
    return b"*3\r\n" + packed(["message", "7", text])


SUBSCRIBED = b"*3\r\n" + packed(["subscribe", "7"]) + b":1\r\n"


async def test_everything_that_is_published_after_subscribing_is_heard_in_its_order(store: Store) -> None:
    async with ear_at(store.url, store.prefix) as ear:
        for number in range(100):
            await store.redis.publish(store.prefix, f"Ä {number}")
        assert [await ear.heard() for _ in range(100)] == [
            (store.prefix, f"Ä {number}") for number in range(100)
        ]


async def test_channels_are_followed_and_let_go_in_the_order_of_the_calls(store: Store) -> None:
    one, two, three = (f"{store.prefix}:{number}" for number in range(3))
    async with ear_at(store.url, one) as ear:
        ear.follow([two, three])
        assert [await ear.heard(), await ear.heard()] == [(two, ""), (three, "")]
        ear.follow([])
        ear.unfollow([two, one])
        ear.follow([two])
        assert await ear.heard() == (two, "")
        for channel in (one, two, three):
            await store.redis.publish(channel, "news")
        assert [await ear.heard(), await ear.heard()] == [(two, "news"), (three, "news")]


async def test_a_message_in_pieces_is_put_together(tmp_path: Path) -> None:
    said = SUBSCRIBED + message("one") + message("two")
    puppet = Puppet(tmp_path, lambda number: [bytes([byte]) for byte in said])
    async with puppet.run(), ear_at(puppet.url, "7") as ear:
        assert [await ear.heard(), await ear.heard()] == [("7", "one"), ("7", "two")]


async def test_who_may_not_listen_is_told_so_at_once(tmp_path: Path) -> None:
    puppet = Puppet(tmp_path, lambda number: [b"-NOPERM this user may not\r\n"])
    async with puppet.run():
        with pytest.raises(StoreAway, match="NOPERM"):
            async with ear_at(puppet.url, "7"):
                pass


@pytest.mark.parametrize("nonsense", [b"+OK\r\n", b"\r\n", message("a\r\nb")])
async def test_what_is_no_message_ends_the_connection_and_nothing_before_it_is_lost(
    tmp_path: Path, nonsense: bytes
) -> None:
    puppet = Puppet(tmp_path, lambda number: [SUBSCRIBED + message("one") + nonsense])
    async with puppet.run(), ear_at(puppet.url, "7") as ear:
        assert await ear.heard() == ("7", "one")
        with pytest.raises(StoreAway):
            for _ in range(2):
                await ear.heard()


async def test_a_connection_lost_while_nobody_speaks_is_noticed(stoppable: RedisServer) -> None:
    async with ear_at(stoppable.url, "7") as ear:
        stoppable.kill()
        with pytest.raises(StoreAway, match="ConnectionError"):
            await ear.heard()
