"""Connections to one Redis: every command has a timeout, is sent once, and reports an unknown outcome.

redis-py's defaults are made for caches: a timeout of five seconds, and ten silent retries, even of commands
that may already have been executed. Here the caller decides what to do about a failed command, so nothing
is retried, and everything has a timeout.
"""

import asyncio
import os
import re
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import cache
from importlib import resources
from typing import Any, ClassVar

import anyio
from redis.asyncio import BlockingConnectionPool, Redis, SSLConnection
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.commands.core import AsyncScript
from redis.exceptions import OutOfMemoryError, RedisError, ResponseError

from gateway.core.errors import ConfigError
from gateway.tcp import KEEPALIVE

try:
    from redis.driver_info import DriverInfo
except ImportError:  # an older redis-py, which looks its version up once
    _DRIVER: Mapping[str, Any] = {}
else:
    _DRIVER = {"driver_info": DriverInfo()}
"""What a connection tells the server of redis-py. By itself each would look the version up, in a file."""

_NAMES_OF_DRIVER = frozenset({"driver_info", "lib_name", "lib_version"})
"""Options of a URL that say something else of it."""

UNREACHABLE = (RedisError, OSError, RuntimeError)
"""Exceptions raised if the server is gone. RuntimeError is uvloop's, for a write to a connection before its
reset is noticed."""

BACKSTOP_S = 60.0
"""redis-py's own timeouts, only a backstop. A choice: those of `patience` are shorter, and allow for
stalls."""

ONCE_MORE_S = 0.01
"""After the timeout of a command, received data is checked once more, this much later. A choice: enough for
one round of the event loop."""

LOOKS = 10
"""A command's timeout is divided into this many parts, after each of which the clock is checked. A choice:
fine enough to tell the store's time from this process's."""

LATE_PART = 0.25
"""Weight of a part whose end was noticed late, by at least the length of a part. A choice: a process that
always stands still gives up in the end."""

_UNKNOWN = re.compile("unexpected keyword argument '(.*)'")

_FOLDER = resources.files("gateway.store")


class StoreAway(Exception):
    """Redis did not reply in time, or refused. The command may or may not have been executed."""

    @property
    def is_refusal(self) -> bool:
        """Whether it has replied: it is full, a replica, or lacks a right."""
        return isinstance(self.__cause__, ResponseError)

    @property
    def manner(self) -> str:
        """What the store does, for callers."""
        return "refuses this" if self.is_refusal else "does not answer"


class Connections:
    """Connections for commands, each of one task at a time."""

    def __init__(
        self, url: str, *, name: str, command_s: float, connections_max: int, decodes: bool = True
    ) -> None:
        """Prepare to use the server at `url`; connects on first use.

        Args:
            url: `redis://`, `rediss://` or `unix://`.
            name: Name shown in the server's client list.
            command_s: Timeout of a command, including connecting. Before that it waits for a free connection
                as long as the server replies to others: that long without a reply is too long.
            connections_max: Maximum concurrent commands, each on its own connection.
            decodes: Whether replies are decoded as text.

        Raises:
            ConfigError: the URL has an unknown option, or an invalid value.
        """
        self._command_s = command_s
        self._turns = asyncio.Semaphore(connections_max)
        self._failures = 0
        self._replies = 0
        settings: dict[str, Any] = {
            "protocol": 2,  # supported by every version and every proxy
            "retry": Retry(NoBackoff(), 0),
            "retry_on_timeout": False,
            "decode_responses": decodes,
            "encoding_errors": "replace",  # data written by others must not raise
            "client_name": name,
            "max_connections": connections_max,
            "timeout": BACKSTOP_S,
            "socket_timeout": BACKSTOP_S,
            "socket_connect_timeout": BACKSTOP_S,
        }
        if not url.startswith("unix:"):
            settings["socket_keepalive"] = True
            settings["socket_keepalive_options"] = {
                option: value for level, option, value in KEEPALIVE if level == socket.IPPROTO_TCP
            }
        self._pool = _pool(url, settings)
        self.redis = Redis.from_pool(self._pool)

    def connection(self) -> AbstractConnection:
        """Return a new, unopened connection that belongs to the caller."""
        connection: AbstractConnection = self._pool.make_connection()  # type: ignore[no-untyped-call]
        return connection

    def script(self, *names: str) -> AsyncScript:
        """Return the script made of these files of this package, concatenated."""
        return self.redis.register_script("\n".join(map(_text_of_file, names)))

    async def bounded(self, command: Callable[[], Awaitable[Any]]) -> Any:
        """Run a command until it completes or times out, even if the calling task is cancelled.

        Waiting for a connection has a separate timeout, of the same length. It begins anew with every reply
        of the server: a burst of requests must not look like an unreachable store. Once a command has got no
        answer, those queued behind it fail at once.

        Raises:
            StoreAway: the outcome of the command is unknown.
        """
        failures = self._failures
        try:
            async with patience(self._command_s, lambda: self._replies):
                await self._turns.acquire()
            try:
                if failures != self._failures:
                    raise StoreAway("the commands before this one failed")
                # If it were cancelled half way, its outcome would be unknown. asyncio's timeout cancels once;
                # anyio's cancels every await, including those by which redis-py returns its connection.
                with anyio.CancelScope(shield=True):
                    async with patience(self._command_s):
                        reply = await command()
                self._replies += 1
                return reply
            finally:
                self._turns.release()
        except TimeoutError as error:
            self._failures += 1
            raise StoreAway(f"no answer within {self._command_s:g} s") from error
        except UNREACHABLE as error:
            if not isinstance(error, ResponseError):
                self._failures += 1
            else:
                self._replies += 1
                if not _is_full(error):
                    await self._pool.drop_idle()
            raise StoreAway(text_of(error)) from error

    async def aclose(self) -> None:
        """Close all connections."""
        with suppress(StoreAway):
            await self.bounded(self.redis.aclose)


@cache
def _text_of_file(name: str) -> str:
    """Return a file of which scripts are made; each is in many of them."""
    return _FOLDER.joinpath(f"{name}.lua").read_text(encoding="utf-8")


def validate(url: str) -> None:
    """Check the options in a URL, without connecting.

    Raises:
        ConfigError: an option is unknown, or has an invalid value.
    """
    _pool(url, {})


def text_of(error: BaseException) -> str:
    """Return what an error says, and of which kind it is."""
    return f"{type(error).__name__}: {error}"


def _is_full(error: ResponseError) -> bool:
    """Return whether a server refuses a command, or one in a script, for lack of memory."""
    return isinstance(error, OutOfMemoryError) or "OOM command not allowed" in str(error)


def milliseconds(seconds: float) -> int:
    """Convert a time for use in scripts: whole milliseconds, at least 1."""
    return max(1, round(seconds * 1000))


@asynccontextmanager
async def patience(seconds: float, progress: Callable[[], int] = int) -> AsyncIterator[None]:
    """Apply a timeout to a block, with an allowance for stalls of this process.

    The timeout begins anew whenever the value of `progress` has changed.

    A process that is starting or short of CPU stalls repeatedly, and sees each reply only after a stall. So
    the time is counted in `LOOKS` parts, and a part whose end was noticed late counts as `LATE_PART`.

    Raises:
        TimeoutError: the time is over.
    """
    async with asyncio.timeout(None) as limit:
        looks = _Looks(limit, max(seconds, 0.0) / LOOKS, progress)
        try:
            yield
        finally:
            looks.end()


class _Looks:
    """Counts the time of a block in parts of `part_s`, and sets its `limit` after `LOOKS` of them.

    Not functions of each other: such a cycle per command would wait for the garbage collector.
    """

    def __init__(self, limit: asyncio.Timeout, part_s: float, progress: Callable[[], int]) -> None:
        self._limit = limit
        self._part_s = part_s
        self._progress, self._seen = progress, progress()
        self._left = float(LOOKS)
        self._loop = asyncio.get_running_loop()
        self._wait(self._loop.time())

    def _wait(self, now: float) -> None:
        self._due = now + self._part_s
        self._timer = self._loop.call_at(self._due, self._look)

    def _look(self) -> None:
        now = self._loop.time()
        if (seen := self._progress()) != self._seen:
            self._seen, self._left = seen, float(LOOKS)
        self._left -= LATE_PART if now - self._due >= self._part_s > 0 else 1.0
        if self._left > 0:
            self._wait(now)
        else:
            self._limit.reschedule(now + ONCE_MORE_S)

    def end(self) -> None:
        self._timer.cancel()


class _TlsConnection(SSLConnection):
    """Shares its SSL context with all others that have the same settings.

    Making one takes 20 to 70 ms, in which nothing else happens: redis-py has the system's certificates read,
    even where the URL names others. It is made anew when a file has changed: some certificates live for hours
    only.
    """

    _shared: ClassVar[dict[str, tuple[Sequence[object], ssl.SSLContext]]] = {}  # by settings

    async def connect(self) -> None:
        """See `AbstractConnection.connect`. Called before each command, too."""
        if self.is_connected:
            return
        own, paths = self.ssl_context, ssl.get_default_verify_paths()
        # Older versions of redis-py have no `ca_path`.
        files = [getattr(own, name, None) for name in ("ca_certs", "ca_path", "certfile", "keyfile")]
        stamps = [_stamp(file) for file in (*files, paths.cafile, paths.capath)]
        settings = repr([getattr(own, name) for name in own.__slots__ if name != "context"])
        if settings not in self._shared or self._shared[settings][0] != stamps:
            own.context = None
            self._shared[settings] = stamps, own.get()
        own.context = self._shared[settings][1]
        await super().connect()  # type: ignore[no-untyped-call]


def _stamp(file: str | None) -> object:
    """Return what changes with a file: None if there is none."""
    with suppress(OSError):
        if file is not None:
            status = os.stat(file)
            return status.st_mtime_ns, status.st_size, status.st_ino
    return None


class _Pool(BlockingConnectionPool):
    """A connection pool for a server that may fail over."""

    async def drop_idle(self) -> None:
        """Close idle connections after the server has rejected a command.

        They may lead to a server that has become a replica; new connections reach its replacement.
        """
        for connection in self._available_connections:
            await connection.disconnect(nowait=True)  # does not suspend: none is acquired half closed


def _pool(url: str, settings: Mapping[str, Any]) -> _Pool:
    try:
        pool = _Pool.from_url(url, **settings)
        if pool.connection_kwargs.keys().isdisjoint(_NAMES_OF_DRIVER):
            pool.connection_kwargs |= _DRIVER
        if pool.connection_class is SSLConnection:
            pool.connection_class = _TlsConnection
        pool.make_connection()  # type: ignore[no-untyped-call]  # validates the options, opens nothing
    except (RedisError, TypeError, ValueError) as error:
        unknown = _UNKNOWN.search(str(error))
        if unknown is not None:
            raise ConfigError(f"store.url: there is no option `{unknown[1]}`") from error
        raise ConfigError(f"store.url: an option in it is not understood: {error}") from error
    return pool
