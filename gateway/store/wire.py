"""The ledger's connections: commands are sent without waiting for the replies to earlier ones.

Near a limit every request asks the store three times, and then the client is most of what that costs.
redis-py takes a connection out of its pool for each command, looks whether it is alive, starts a timer,
writes, waits, and reads the reply value by value: 185 us of CPU, most of it in the client and the event loop.
Here it is 28 us: all that the tasks of one round of the event loop have to ask is one write, replies are read
as they arrive, by no task, and one timer watches the oldest command of a connection. docs/store.md has the
figures.

redis-py still opens the connections: addresses, TLS, users, databases and names are its business. What is
promised is what `connections.py` promises: every command is bounded in time, sent once, and never in doubt
silently.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

import anyio
from redis.asyncio.connection import AbstractConnection

from gateway.store.connections import ONCE_MORE_S, UNREACHABLE, StoreAway, patience

WIRES = 2
"""Connections of a process. One would carry all; what hangs on one must not hold up what comes after it."""


class ScriptMissing(StoreAway):
    """The server does not know the script: it was not run."""


class Wires:
    """Connections to one server, opened when there is something to send."""

    def __init__(self, connection: Callable[[], AbstractConnection], command_s: float) -> None:
        """Send on what `connection` makes. `command_s`: as for `Connections`."""
        self._connection, self._command_s = connection, command_s
        self._wires: list[_Wire] = []

    async def ask(self, command: bytes) -> Sequence[int]:
        """Send a packed command and return its reply, to the end or the limit also if the caller leaves.

        Raises:
            ScriptMissing: it was not run.
            StoreAway: what became of it is not known.
        """
        wire = self._next()
        reply = wire.send(command)
        with anyio.CancelScope(shield=True):
            await wire.open()
            await reply
        return reply.result()

    def close(self) -> None:
        """Close every connection."""
        for wire in list(self._wires):
            wire.end("closed")

    def _next(self) -> "_Wire":
        """Return the connection that this round of the event loop fills, or the one that is behind least."""
        wire = min(self._wires, key=_Wire.behind, default=None)
        if wire is None or (wire.behind() > 0 and len(self._wires) < WIRES):
            wire = _Wire(self._connection, self._command_s, self._left)
            self._wires.append(wire)
        return wire

    def _left(self, wire: "_Wire") -> None:
        if wire in self._wires:
            self._wires.remove(wire)


class _Wire(asyncio.Protocol):
    """One connection. Replies come in the order of the commands, which is all that tells whose they are."""

    def __init__(
        self,
        connection: Callable[[], AbstractConnection],
        command_s: float,
        left: Callable[["_Wire"], None],
    ) -> None:
        """Send on what `connection` makes. `left` is called when no more commands may be sent on it."""
        self._connection, self._command_s, self._left = connection, command_s, left
        self._loop = asyncio.get_running_loop()
        self._opening = asyncio.Lock()
        self._open_by = self._loop.time() + command_s
        self._asked: deque[tuple[asyncio.Future[list[int]], float]] = deque()  # and since when
        self._unsent: list[bytes] = []
        self._unread = b""
        self._heard = 0.0
        self._is_filling = self._is_left = False
        self._timer: asyncio.TimerHandle | None = None
        self._overdue: asyncio.Future[list[int]] | None = None
        self._writer: asyncio.StreamWriter | None = None

    def behind(self) -> int:
        """Return how many commands a new one would wait for; -1 where it is sent together with others."""
        return -1 if self._is_filling else len(self._asked)

    async def open(self) -> None:
        """Connect, on behalf of all that have something to send. If one is cancelled at it, the next does."""
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
            self.end(_text(error))
        else:
            if not self._is_left:  # else nobody waits any longer
                self._writer = _taken(connection, self)
                self._heard = self._loop.time()
                self._asked = deque((reply, self._heard) for reply, _ in self._asked)
                self._flush()
        finally:
            await connection.disconnect(nowait=True)

    def send(self, command: bytes) -> asyncio.Future[list[int]]:
        """Send a command with all others of this round of the event loop."""
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
        """Close the connection; what became of the commands that were not answered is not known."""
        self._leave()
        if self._timer is not None:
            self._timer.cancel()
        if self._writer is not None:
            self._writer.transport.abort()
        while self._asked:
            reply, _ = self._asked.popleft()
            _fail(reply, StoreAway(why))

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
            self.end(_text(error))

    def _watch(self) -> None:
        """See that the oldest command is not too old; its time runs from the reply before it.

        Before there is a connection it runs for whoever opens that.
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
        """Give each reply to whoever waits for it."""
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
        """Take a reply: integers, or an error. A connection that a server refuses on is used no more.

        It may lead to one that has become a replica; a new one finds who took its place.

        Raises:
            ValueError: it is none.
            IndexError: nobody has asked.
        """
        numbers = [int(value[1:]) for value in values if value.startswith(b":")]
        is_error = head.startswith(b"-")
        if len(numbers) != len(values) or not (is_error or values):
            raise ValueError(head)
        reply, _ = self._asked.popleft()
        if head.startswith(b"-NOSCRIPT"):
            _fail(reply, ScriptMissing("its script is not there"))
        elif is_error:
            _fail(reply, StoreAway(head[1:].decode(errors="replace")))
            self._leave()
        elif not reply.done():
            reply.set_result(numbers)

    def connection_lost(self, error: Exception | None) -> None:
        """Fail what was asked."""
        self.end("ConnectionError: the server closed the connection" if error is None else _text(error))


class Ear(asyncio.Protocol):
    """A connection on which one channel is heard.

    Where somebody waits, each request makes two messages for every process. One that comes alone costs 72 us
    here, what the ledger makes of it included, and 142 us with redis-py's channels.
    """

    def __init__(self) -> None:
        """Hear nothing yet."""
        self._said: deque[str] = deque()
        self._unread = b""
        self._why_closed = ""
        self._is_heard = asyncio.Event()
        self._subscribed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._writer: asyncio.StreamWriter | None = None

    async def subscribe(self, connection: AbstractConnection, channel: str) -> None:
        """Connect, and return once whatever is published will be heard. To be bounded in time.

        Raises:
            StoreAway: it was refused, or the connection is lost. UNREACHABLE: there was none.
        """
        try:
            await connection.connect()  # type: ignore[no-untyped-call]
            self._writer = _taken(connection, self)
        finally:
            await connection.disconnect(nowait=True)
        self._writer.transport.write(b"*2\r\n" + packed(["SUBSCRIBE", channel]))
        await self._subscribed

    async def heard(self) -> str:
        """Return what is published next.

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
        """Hear no more."""
        self._why_closed = self._why_closed or why
        self._is_heard.set()
        _fail(self._subscribed, StoreAway(self._why_closed))
        if self._writer is not None:
            self._writer.transport.abort()

    def data_received(self, data: bytes) -> None:
        """Keep messages until they are asked for; what is none ends the connection."""
        *lines, rest = (self._unread + data).split(b"\r\n")
        at = 0
        while at < len(lines):
            # *3, then each behind its length: `message`, channel, text. Of `subscribe` the last is a number.
            if lines[at] != b"*3":
                self.close(lines[at].decode(errors="replace"))
                return
            kind = lines[at + 2] if at + 2 < len(lines) else b""
            size = 6 if kind == b"subscribe" else 7
            if at + size > len(lines):
                break
            if kind == b"message":
                self._said.append(lines[at + 6].decode(errors="replace"))
                self._is_heard.set()
            elif not self._subscribed.done():
                self._subscribed.set_result(None)
            at += size
        self._unread = b"\r\n".join([*lines[at:], rest])

    def connection_lost(self, error: Exception | None) -> None:
        """Tell whoever listens."""
        self.close("ConnectionError: the server closed the connection" if error is None else _text(error))


def _taken(connection: AbstractConnection, protocol: asyncio.Protocol) -> asyncio.StreamWriter:
    """Give the socket of a connection to `protocol`; redis-py has no public name for it.

    The writer is to be kept: unreferenced, it would close the socket.
    """
    writer, connection._writer = connection._writer, None
    assert writer is not None
    writer.transport.set_protocol(protocol)
    return writer


def _fail(reply: asyncio.Future[Any], failure: StoreAway) -> None:
    if not reply.done():  # else its caller was cancelled
        reply.set_exception(failure)
        reply.exception()  # that is, nobody has to look at it: its caller may be cancelled while it connects


def packed(words: Iterable[str | int]) -> bytes:
    """Return the words of a command, or some of them, as they are sent."""
    return b"".join([_number(word) if isinstance(word, int) else _word(word) for word in words])


@lru_cache(maxsize=4096)
def _number(number: int) -> bytes:
    """Limits are few, and what requests take repeats itself."""
    return _word(str(number))


def _word(word: str) -> bytes:
    text = word.encode()
    return b"$%d\r\n%b\r\n" % (len(text), text)


def _once_more_s(due: float, now: float, command_s: float) -> float:
    """Return how long a command is still waited for that was due then: as long as nobody looked, if possible.

    What a process has not seen because it stood still says nothing of the server.
    """
    return min(max(now - due, ONCE_MORE_S), command_s)


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
