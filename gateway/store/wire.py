"""Connections without redis-py's costs: pipelined ones, and subscriptions.

The ledger's commands are sent without waiting for earlier replies.

Near a limit every request sends three commands to the store, and then the client is most of their cost. For
each command, redis-py takes a connection from its pool, checks whether it is alive, starts a timer, writes,
waits, and reads the reply value by value: 185 us of CPU, mostly in the client and the event loop. Here it is
28 us: all commands of one event loop iteration are a single write, replies are parsed as they arrive, without
a task, and a single timer watches the oldest command of a connection (one loaded x86 core, Python 3.11).

redis-py still opens the connections, and so handles addresses, TLS, users, databases and names. The
guarantees are those of `connections.py`: every command has a timeout, is sent once, and reports an unknown
outcome.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import lru_cache
from typing import Any

import anyio
from redis.asyncio.connection import AbstractConnection

from gateway.store.connections import ONCE_MORE_S, UNREACHABLE, Connections, StoreAway, patience, text_of

WIRES = 2
"""Connections per process. A choice: one would suffice; with two, a stalled one does not hold up later
commands."""


class ScriptMissing(StoreAway):
    """The server does not know the script, so it was not run."""


class PipelinedConnections:
    """Connections to one server, opened when there is something to send."""

    def __init__(self, connection: Callable[[], AbstractConnection], command_s: float) -> None:
        """Use the connections that `connection` returns. `command_s`: as for `Connections`."""
        self._connection, self._command_s = connection, command_s
        self._wires: list[_PipelinedConnection] = []

    async def ask(self, command: bytes) -> Sequence[int]:
        """Send an encoded command; wait for its reply or timeout, even if the calling task is cancelled.

        Raises:
            ScriptMissing: it was not run.
            StoreAway: its outcome is unknown.
        """
        wire = self._next()
        reply = wire.send(command)
        with anyio.CancelScope(shield=True):
            await wire.open()
            await reply
        return reply.result()

    def close(self) -> None:
        """Close all connections."""
        for wire in list(self._wires):
            wire.end("closed")

    def _next(self) -> "_PipelinedConnection":
        """Return the connection written to in this iteration, or the one with the shortest queue."""
        wire = min(self._wires, key=_PipelinedConnection.behind, default=None)
        if wire is None or (wire.behind() > 0 and len(self._wires) < WIRES):
            wire = _PipelinedConnection(self._connection, self._command_s, self._left)
            self._wires.append(wire)
        return wire

    def _left(self, wire: "_PipelinedConnection") -> None:
        if wire in self._wires:
            self._wires.remove(wire)


class _PipelinedConnection(asyncio.Protocol):
    """One connection. Replies arrive in the order of the commands, which is how they are matched."""

    def __init__(
        self,
        connection: Callable[[], AbstractConnection],
        command_s: float,
        left: Callable[["_PipelinedConnection"], None],
    ) -> None:
        """Use the connection that `connection` returns. `left` is called when it accepts no more commands."""
        self._connection, self._command_s, self._left = connection, command_s, left
        self._loop = asyncio.get_running_loop()
        self._opening = asyncio.Lock()
        self._open_by = self._loop.time() + command_s
        self._asked: deque[tuple[asyncio.Future[list[int]], float]] = deque()  # with the time it was sent
        self._unsent: list[bytes] = []
        self._unread = b""
        self._heard = 0.0
        self._is_filling = self._is_left = False
        self._timer: asyncio.TimerHandle | None = None
        self._overdue: asyncio.Future[list[int]] | None = None
        self._writer: asyncio.StreamWriter | None = None

    def behind(self) -> int:
        """Return how many commands a new one would queue behind; -1 if it would join an unsent write."""
        return -1 if self._is_filling else len(self._asked)

    async def open(self) -> None:
        """Connect on behalf of all waiting commands. If this task is cancelled, the next one does it."""
        if self._writer is not None:
            return
        async with self._opening:
            if self._writer is None and not self._is_left:
                await self._connect()

    async def _connect(self) -> None:
        connection = self._connection()
        try:
            async with patience(self._open_by - self._loop.time()):
                await connection.connect()  # type: ignore[no-untyped-call]
        except TimeoutError:
            self.end(f"no answer within {self._command_s:g} s")
        except UNREACHABLE as error:
            self.end(text_of(error))
        else:
            if not self._is_left:  # otherwise no command is waiting any more
                self._writer = _taken(connection, self)
                self._heard = self._loop.time()
                self._asked = deque((reply, self._heard) for reply, _ in self._asked)
                self._flush()
        finally:
            await connection.disconnect(nowait=True)

    def send(self, command: bytes) -> asyncio.Future[list[int]]:
        """Send a command, together with all others of this event loop iteration."""
        reply: asyncio.Future[list[int]] = self._loop.create_future()
        self._asked.append((reply, self._loop.time()))
        self._unsent.append(command)
        if not self._is_filling:
            self._is_filling = True
            self._loop.call_soon(self._flush)
        if self._timer is None:
            self._watch()
        return reply

    def end(self, why: str) -> None:
        """Close the connection; the outcome of unanswered commands is unknown."""
        self._leave()
        if self._writer is not None:
            self._writer.transport.abort()
        while self._asked:
            reply, _ = self._asked.popleft()
            fail(reply, StoreAway(why))

    def _leave(self) -> None:
        self._is_left = True
        self._left(self)

    def _flush(self) -> None:
        self._is_filling = False
        if self._writer is None or not self._unsent:
            return
        data = b"".join(self._unsent)
        self._unsent.clear()
        try:
            self._writer.transport.write(data)
        except UNREACHABLE as error:
            self.end(text_of(error))

    def _watch(self) -> None:
        """Enforce the timeout of the oldest command.

        It runs from the previous reply, but ends at most two timeouts after the command was sent. Before the
        connection is open, the connecting task enforces its own timeout instead.
        """
        self._timer = None
        if not self._asked:
            return
        if self._writer is None:
            self._timer = self._loop.call_later(self._command_s, self._watch)
            return
        reply, since = self._asked[0]
        now = self._loop.time()
        due = min(max(since, self._heard) + self._command_s, since + 2 * self._command_s)
        if now < due:
            self._timer = self._loop.call_at(due, self._watch)
        elif reply is not self._overdue:
            self._overdue = reply
            self._timer = self._loop.call_later(_once_more_s(due, now, self._command_s), self._watch)
        else:
            self.end(f"no answer within {self._command_s:g} s")

    def data_received(self, data: bytes) -> None:
        """Deliver each reply to its waiter."""
        *lines, rest = (self._unread + data).split(b"\r\n")
        at = 0
        try:
            while at < len(lines):
                following = int(lines[at][1:]) if lines[at].startswith(b"*") else 0
                if at + following >= len(lines):
                    break
                self._answer(lines[at], lines[at + 1 : at + 1 + following])
                at += 1 + following
        except (ValueError, IndexError):
            self.end("ProtocolError: the server sent something that is not a reply")
            return
        self._unread = b"\r\n".join([*lines[at:], rest])
        if at:
            self._heard = self._loop.time()
        if self._is_left and not self._asked and self._writer is not None:
            self._writer.transport.close()

    def _answer(self, head: bytes, values: list[bytes]) -> None:
        """Process a reply: integers, or an error. After a refusal the connection is not used again.

        It may lead to a server that has become a replica; a new connection reaches its replacement.

        Raises:
            ValueError: it is not a valid reply.
            IndexError: no command is waiting for it.
        """
        numbers = [int(value[1:]) for value in values if value.startswith(b":")]
        is_error = head.startswith(b"-")
        if len(numbers) != len(values) or not (is_error or values):
            raise ValueError(head)
        reply, _ = self._asked.popleft()
        if head.startswith(b"-NOSCRIPT"):
            fail(reply, ScriptMissing("its script is not there"))
        elif is_error:
            fail(reply, StoreAway(head[1:].decode(errors="replace")))
            self._leave()
        elif not reply.done():
            reply.set_result(numbers)

    def eof_received(self) -> None:
        """Accept no more commands: the event loop calls `connection_lost` only later."""
        self._leave()

    def connection_lost(self, error: Exception | None) -> None:
        """Fail the commands in progress."""
        self.end("ConnectionError: the server closed the connection" if error is None else text_of(error))


class Subscription(asyncio.Protocol):
    """A connection that is subscribed to channels. Create it with `subscribed`.

    Under contention, each request causes two messages for every process. One that arrives alone costs 72 us
    here, including its processing by the ledger, and 142 us with redis-py's channels.
    """

    def __init__(self) -> None:
        """Start without a subscription."""
        self._said: deque[tuple[str, str]] = deque()
        self._unread = b""
        self._why_closed = ""
        self._is_heard = asyncio.Event()
        self._subscribed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._writer: asyncio.StreamWriter | None = None

    async def subscribe(self, connection: AbstractConnection, channel: str) -> None:
        """Connect, and return once the subscription is confirmed. Needs an external timeout.

        Raises:
            StoreAway: it was refused, or the connection is lost. UNREACHABLE: it could not be opened.
        """
        try:
            await connection.connect()  # type: ignore[no-untyped-call]
            self._writer = _taken(connection, self)
        finally:
            await connection.disconnect(nowait=True)
        self.follow([channel])
        await self._subscribed

    def follow(self, channels: Collection[str]) -> None:
        """Subscribe to more channels."""
        self._send("SUBSCRIBE", channels)

    def unfollow(self, channels: Collection[str]) -> None:
        """Unsubscribe from channels."""
        self._send("UNSUBSCRIBE", channels)

    def _send(self, command: str, channels: Collection[str]) -> None:
        if not channels or self._why_closed or self._writer is None:
            return
        try:
            self._writer.transport.write(b"*%d\r\n" % (1 + len(channels)) + packed([command, *channels]))
        except UNREACHABLE as error:
            self.close(text_of(error))

    async def heard(self) -> tuple[str, str]:
        """Return the channel and the text of the next message.

        Once a channel after the first is subscribed to, it has a message without text.

        Raises:
            StoreAway: the connection is lost.
        """
        while not self._said:
            if self._why_closed:
                raise StoreAway(self._why_closed)
            self._is_heard.clear()
            await self._is_heard.wait()
        return self._said.popleft()

    def close(self, why: str = "closed") -> None:
        """Close the connection."""
        self._why_closed = self._why_closed or why
        self._is_heard.set()
        fail(self._subscribed, StoreAway(self._why_closed))
        if self._writer is not None:
            self._writer.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Queue messages until they are fetched; anything else ends the connection."""
        *lines, rest = (self._unread + data).split(b"\r\n")
        at = 0
        while at < len(lines):
            # *3, then length-prefixed: `message`, channel, text. For others than that, the last is a number.
            if lines[at] != b"*3":
                self.close(lines[at].decode(errors="replace"))
                return
            kind = lines[at + 2] if at + 2 < len(lines) else b""
            size = 7 if kind == b"message" else 6
            if at + size > len(lines):
                break
            if not self._subscribed.done():
                self._subscribed.set_result(None)
            elif kind != b"unsubscribe":
                text = lines[at + 6] if kind == b"message" else b""
                self._said.append((lines[at + 4].decode(errors="replace"), text.decode(errors="replace")))
                self._is_heard.set()
            at += size
        self._unread = b"\r\n".join([*lines[at:], rest])

    def connection_lost(self, error: Exception | None) -> None:
        """Notify the subscriber."""
        self.close("ConnectionError: the server closed the connection" if error is None else text_of(error))


@asynccontextmanager
async def subscribed(connections: Connections, channel: str) -> AsyncIterator[Subscription]:
    """Yield a connection that is subscribed to a channel.

    Raises:
        StoreAway: it was refused, or was not confirmed in time.
    """
    subscription = Subscription()
    try:
        connection = connections.connection()
        await connections.bounded(lambda: subscription.subscribe(connection, channel))
        yield subscription
    finally:
        subscription.close()


def _taken(connection: AbstractConnection, protocol: asyncio.Protocol) -> asyncio.StreamWriter:
    """Hand the socket of a redis-py connection to `protocol`; redis-py has no public API for that.

    Keep a reference to the returned writer: once it is collected, the socket is closed.
    """
    writer, connection._writer = connection._writer, None
    assert writer is not None
    writer.transport.set_protocol(protocol)
    return writer


def fail(reply: asyncio.Future[Any], failure: StoreAway) -> None:
    """Have a future raise `failure`."""
    if not reply.done():  # otherwise its caller was cancelled
        reply.set_exception(failure)
        reply.exception()  # marks the exception as retrieved: its caller may be cancelled while connecting


def packed(words: Iterable[str | int]) -> bytes:
    """Encode the words of a command, or some of them."""
    return b"".join([_number(word) if isinstance(word, int) else _word(word) for word in words])


@lru_cache(maxsize=4096)
def _number(number: int) -> bytes:
    """Encode a number. Cached: limits are few, and claims repeat."""
    return _word(str(number))


def _word(word: str) -> bytes:
    text = word.encode()
    return b"$%d\r\n%b\r\n" % (len(text), text)


def _once_more_s(due: float, now: float, command_s: float) -> float:
    """Return how much longer to wait for an overdue command, to make up for the time this process stalled.

    Replies that were not seen because this process stalled say nothing about the server.
    """
    return min(max(now - due, ONCE_MORE_S), command_s)
