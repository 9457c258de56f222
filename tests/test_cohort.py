"""Requests that are ready together write together: with real sockets, on both event loops."""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Iterator

import pytest
import uvloop

from gateway.cohort import AT_ONCE_BYTES, Cohort

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


class Connection(asyncio.Protocol):
    """One side of a connection, which writes; `peer` is the other. Two requests are ready, unless said."""

    transport: asyncio.Transport

    def __init__(self, cohort: Cohort, peer: socket.socket) -> None:
        """Write together with `cohort`."""
        self.cohort = cohort
        self.peer = peer
        self.is_paused = False
        self.lost = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Coalesce what is written."""
        self.transport = self.cohort.coalesce(transport, asyncio.get_running_loop())

    def connection_lost(self, exc: Exception | None) -> None:
        """Note it."""
        self.lost.set()

    def pause_writing(self) -> None:
        """Note it."""
        self.is_paused = True

    def received(self) -> bytes | None:
        """Return what one read of the peer brings; None if there is nothing."""
        try:
            return self.peer.recv(10 * AT_ONCE_BYTES)
        except BlockingIOError:
            return None


Connect = Callable[[], Awaitable[Connection]]
Scenario = Callable[[Connect], Awaitable[None]]


@pytest.fixture(params=LOOPS)
def run(request: pytest.FixtureRequest) -> Iterator[Callable[[Scenario], None]]:
    """Run a scenario, and close its connections."""

    async def main(scenario: Scenario) -> None:
        every: list[Connection] = []
        cohort = Cohort()
        cohort.size = 2

        async def connect() -> Connection:
            near, far = socket.socketpair()
            far.setblocking(False)
            loop = asyncio.get_running_loop()
            _, connection = await loop.create_connection(lambda: Connection(cohort, far), sock=near)
            every.append(connection)
            return connection

        try:
            await asyncio.wait_for(scenario(connect), 30)
        finally:
            for one in every:
                one.transport.abort()
                one.peer.close()
            for one in every:
                await one.lost.wait()

    with asyncio.Runner(loop_factory=LOOPS[request.param]) as runner:
        yield lambda scenario: runner.run(main(scenario))


async def end_of_round() -> None:
    """Return once everything that was ready has been handled."""
    for _ in range(2):  # it may have been made ready in this round
        await asyncio.sleep(0)


def test_what_one_round_writes_is_sent_together(run: Callable[[Scenario], None]) -> None:
    async def scenario(connect: Connect) -> None:
        connection = await connect()
        connection.transport.write(b"one ")
        connection.transport.write(b"two")
        assert connection.received() is None
        assert connection.transport.get_write_buffer_size() == len(b"one two")
        await end_of_round()
        assert connection.received() == b"one two"
        assert connection.transport.get_write_buffer_size() == 0
        connection.transport.write(b"three")
        assert connection.received() is None
        await end_of_round()
        assert connection.received() == b"three"

    run(scenario)


def test_what_a_request_writes_that_is_alone_is_sent_at_once(run: Callable[[Scenario], None]) -> None:
    async def scenario(connect: Connect) -> None:
        connection = await connect()
        connection.transport.write(b"with another ")
        connection.cohort.size = 1
        connection.transport.write(b"behind it")
        assert connection.received() is None
        await end_of_round()
        assert connection.received() == b"with another behind it"
        connection.transport.write(b"alone")
        assert connection.received() == b"alone"

    run(scenario)


def test_what_is_written_at_once_comes_behind_what_was_held_back(run: Callable[[Scenario], None]) -> None:
    async def scenario(connect: Connect) -> None:
        connection = await connect()
        connection.transport.write(b"a head")
        write = connection.cohort.at_once(connection.transport)
        write(b" and a chunk")
        assert connection.received() == b"a head and a chunk"

    run(scenario)


def test_a_request_waits_for_others_only() -> None:
    cohort = Cohort()
    assert cohort.size == 0
    for size, turns in ((0, 0), (1, 0), (2, 1), (30, 1)):
        cohort.size = size
        assert len(list(cohort.catch_up().__await__())) == turns


def test_all_connections_are_written_to_at_the_end_of_a_round(run: Callable[[Scenario], None]) -> None:
    async def scenario(connect: Connect) -> None:
        connection = await connect()
        every = [connection, *[await connect() for _ in range(20)]]
        for one in every:
            one.transport.write(b"a")
        for one in every:
            one.transport.write(b"b")
        assert {one.received() for one in every} == {None}
        await end_of_round()
        assert {one.received() for one in every} == {b"ab"}

    run(scenario)


@pytest.mark.parametrize("end", ["close", "write_eof"])
def test_what_was_written_comes_before_the_end(run: Callable[[Scenario], None], end: str) -> None:
    async def scenario(connect: Connect) -> None:
        connection = await connect()
        connection.transport.write(b"the last words")
        getattr(connection.transport, end)()
        await end_of_round()
        assert connection.received() == b"the last words"
        assert connection.received() == b""

    run(scenario)


def test_nothing_is_sent_after_an_abort(run: Callable[[Scenario], None]) -> None:
    async def scenario(connect: Connect) -> None:
        connection = await connect()
        connection.transport.write(b"never said")
        connection.transport.abort()
        assert connection.transport.get_write_buffer_size() == 0
        await end_of_round()
        assert connection.received() == b""

    run(scenario)


def test_much_is_sent_at_once_and_in_order(run: Callable[[Scenario], None]) -> None:
    async def scenario(connect: Connect) -> None:
        connection = await connect()
        body = b"x" * AT_ONCE_BYTES
        connection.transport.write(b"head")
        connection.transport.write(body)
        connection.transport.write(b"tail")
        assert connection.received() == b"head" + body
        await end_of_round()
        assert connection.received() == b"tail"

    run(scenario)


def test_a_peer_that_does_not_read_is_noticed_within_the_round(run: Callable[[Scenario], None]) -> None:
    async def scenario(connect: Connect) -> None:
        connection = await connect()
        written = 0
        while not connection.is_paused:
            connection.transport.write(b"x" * 1000)
            written += 1000
            assert written < 10_000_000
        assert 0 < connection.transport.get_write_buffer_size() < 3 * AT_ONCE_BYTES

    run(scenario)


def test_a_connection_that_fails_does_not_hold_up_the_others(
    run: Callable[[Scenario], None], caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(connect: Connect) -> None:
        connection = await connect()
        other = await connect()
        connection.transport.write_eof()
        connection.transport.write(b"too late")  # which the event loop raises an error for
        other.transport.write(b"in time")
        with caplog.at_level(logging.ERROR):
            await end_of_round()
        assert other.received() == b"in time"
        assert [one.fields["event"] for one in caplog.records] == ["internal_error"]  # type: ignore[attr-defined]
        await connection.lost.wait()

    run(scenario)


def test_a_connection_that_was_closed_meanwhile_is_left_alone(
    run: Callable[[Scenario], None], caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(connect: Connect) -> None:
        connection = await connect()
        other = await connect()
        connection.transport.close()
        connection.transport.write(b"too late")
        other.transport.write(b"in time")
        with caplog.at_level(logging.ERROR):
            await end_of_round()
        assert (connection.received(), other.received()) == (b"", b"in time")
        assert not caplog.records

    run(scenario)


def test_everything_else_is_the_event_loops(run: Callable[[Scenario], None]) -> None:
    async def scenario(connect: Connect) -> None:
        connection = await connect()
        transport = connection.transport
        assert not transport.is_closing()
        assert transport.get_protocol() is connection
        assert transport.get_extra_info("socket") is not None
        transport.pause_reading()
        assert not transport.is_reading()
        transport.resume_reading()
        assert transport.is_reading()
        successor = Connection(connection.cohort, connection.peer)
        transport.set_protocol(successor)
        assert transport.get_protocol() is successor
        transport.set_protocol(connection)  # which is told when it is lost
        transport.close()
        assert transport.is_closing()

    run(scenario)
