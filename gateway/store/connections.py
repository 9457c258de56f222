"""Connections to one Redis: every command bounded in time, sent once, and never in doubt silently.

redis-py's defaults are made for caches: five seconds of patience, and ten silent repetitions, also of
commands that may have been carried out already. Here a command that fails is the caller's to judge, so
nothing is repeated, and everything has a limit.
"""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from importlib import resources
from typing import Any

import anyio
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.client import PubSub
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.commands.core import AsyncScript
from redis.exceptions import RedisError, ResponseError

from gateway.core.errors import ConfigError
from gateway.tcp import KEEPALIVE

READ_S = 2.0
"""How long one read of a channel lasts before the next: no limit, only a chance to be cancelled."""

UNREACHABLE = (RedisError, OSError, RuntimeError)
"""What a client raises whose server is gone. RuntimeError is uvloop's, for a write to a connection that was
reset before anybody has read so."""

BACKSTOP_S = 60.0
"""redis-py's own limits. Those that count are set here: its own do not know that this process stood still."""

ONCE_MORE_S = 0.01
"""A command whose time is over is given up after one more look at what has come, this long after."""

LOOKS = 10
"""Parts of a command's time, at the end of each of which this process looks at the clock."""

LATE_PART = 0.25
"""What a part counts whose end this process saw late, by as much as the part is long."""

_FOLDER = resources.files("gateway.store")


class StoreAway(Exception):
    """Redis did not answer in time, or refused. What it did of the command is not known."""


class Connections:
    """Some connections for commands, and some that listen."""

    def __init__(
        self, url: str, *, name: str, command_s: float, connections_max: int, decodes: bool = True
    ) -> None:
        """Prepare to use the server at `url`; connects when first used.

        Args:
            url: `redis://`, `rediss://` or `unix://`.
            name: What the server's list of clients shows.
            command_s: The longest a command may take, connecting included; and the longest it may wait
                for its turn before.
            connections_max: Commands at once, each on a connection of its own.
            decodes: Whether replies are text; bytes otherwise.

        Raises:
            ConfigError: the URL has an option that there is not, or not with that value.
        """
        self._command_s = command_s
        self._turns = asyncio.Semaphore(connections_max)
        self._failures = 0
        settings: dict[str, Any] = {
            "protocol": 2,  # understood by every version and every proxy
            "retry": Retry(NoBackoff(), 0),
            "retry_on_timeout": False,
            "decode_responses": decodes,
            "encoding_errors": "replace",  # what others wrote must not raise
            "client_name": name,
        }
        if not url.startswith("unix:"):
            settings["socket_keepalive"] = True
            settings["socket_keepalive_options"] = {
                option: value for level, option, value in KEEPALIVE if level == socket.IPPROTO_TCP
            }
        self._pool = _pool(
            url,
            settings,
            max_connections=connections_max,
            timeout=BACKSTOP_S,
            socket_timeout=BACKSTOP_S,
            socket_connect_timeout=BACKSTOP_S,
        )
        self.redis = Redis.from_pool(self._pool)
        # What is lost while it listens it opens again by itself, which nothing else bounds.
        listener = _pool(
            url,
            settings,
            max_connections=2,
            timeout=command_s,
            socket_timeout=None,
            socket_connect_timeout=command_s,
        )
        self._listener = Redis.from_pool(listener)

    def connection(self) -> AbstractConnection:
        """Return a new connection, not opened yet, that is the caller's."""
        connection: AbstractConnection = self.redis.connection_pool.make_connection()  # type: ignore[no-untyped-call]
        return connection

    def script(self, *names: str) -> AsyncScript:
        """Return the script whose text is in these files of this package, one after the other."""
        texts = [_FOLDER.joinpath(f"{name}.lua").read_text(encoding="utf-8") for name in names]
        return self.redis.register_script("\n".join(texts))

    def channel(self, *, ignores_confirmations: bool = True) -> PubSub:
        """Return a connection that listens. `bounded` is for what is sent on it, `heard` for what comes."""
        return self._listener.pubsub(ignore_subscribe_messages=ignores_confirmations)

    async def heard(self, channel: PubSub) -> dict[str, Any] | None:
        """Return the next message of a channel; now and then None.

        Raises:
            StoreAway: the connection is lost.
        """
        try:
            message: dict[str, Any] | None = await channel.get_message(timeout=READ_S)
        except UNREACHABLE as error:
            raise StoreAway(f"{type(error).__name__}: {error}") from error
        if message is None and (lost := _loss(channel)) is not None:
            raise StoreAway(f"{type(lost).__name__}: {lost}") from lost
        return message

    async def bounded(self, command: Callable[[], Awaitable[Any]]) -> Any:
        """Run a command to its end or its limit, also when the caller leaves meanwhile.

        Waiting for a turn is not the server's time: a burst of requests must not look like a store that is
        away. But once a command has failed, those that waited for it do not try one after the other.

        Raises:
            StoreAway: what became of it is not known.
        """
        failures = self._failures
        try:
            async with patience(self._command_s):
                await self._turns.acquire()
            try:
                if failures != self._failures:
                    raise StoreAway("the commands before this one failed")
                # Cancelled half way, it would leave in doubt what was done. asyncio's timeout cancels once; a
                # cancel scope cancels every await, also those by which redis-py puts its connection back.
                with anyio.CancelScope(shield=True):
                    async with patience(self._command_s):
                        return await command()
            finally:
                self._turns.release()
        except TimeoutError as error:
            self._failures += 1
            raise StoreAway(f"no answer within {self._command_s:g} s") from error
        except UNREACHABLE as error:
            self._failures += 1
            if isinstance(error, ResponseError):
                await self._pool.drop_idle()
            raise StoreAway(f"{type(error).__name__}: {error}") from error

    async def close(self, channel: PubSub) -> None:
        """Close a connection that listens, if that is possible in time."""
        with suppress(StoreAway):
            await self.bounded(channel.aclose)

    async def aclose(self) -> None:
        """Close every connection."""
        for client in (self.redis, self._listener):
            with suppress(StoreAway):
                await self.bounded(client.aclose)


def _loss(channel: PubSub) -> BaseException | None:
    """Return what ended a channel's connection, if anything has.

    One whose server's machine is gone ends with a TimeoutError, like a read to which nothing came. redis-py
    takes it for that, every time and at once, so that nothing else would ever run again.
    """
    reader = getattr(channel.connection, "_reader", None)
    return None if reader is None else reader.exception()


def milliseconds(seconds: float) -> int:
    """Return a time as scripts take it: at least 1."""
    return max(1, round(seconds * 1000))


@asynccontextmanager
async def patience(seconds: float) -> AsyncIterator[None]:
    """Bound the time of a block by what a server takes, who is asked several things one after the other.

    A process that starts, or that has hardly a processor, stands still again and again, and hears each answer
    only after that. So the time is counted in `LOOKS` parts, and one whose end was seen late as `LATE_PART`.

    Raises:
        TimeoutError: it is over.
    """
    loop = asyncio.get_running_loop()
    part_s = max(seconds, 0.0) / LOOKS
    left, due = float(LOOKS), loop.time() + part_s
    timer: asyncio.TimerHandle
    async with asyncio.timeout(None) as limit:

        def look() -> None:
            nonlocal left, due, timer
            now = loop.time()
            left -= LATE_PART if now - due >= part_s > 0 else 1.0
            due = now + part_s
            if left > 0:
                timer = loop.call_at(due, look)
            else:
                limit.reschedule(now + ONCE_MORE_S)

        timer = loop.call_at(due, look)
        try:
            yield
        finally:
            timer.cancel()


class _Pool(BlockingConnectionPool):
    """Connections to a server whose place another may take."""

    async def drop_idle(self) -> None:
        """Close what nobody uses, now that a server has refused something on one of them.

        They may lead to one that has become a replica; new ones find who took its place.
        """
        for connection in self._available_connections:
            await connection.disconnect(nowait=True)  # so it is done at once: nobody takes one half closed


def _pool(url: str, settings: Mapping[str, Any], **more: Any) -> _Pool:
    try:
        pool = _Pool.from_url(url, **settings, **more)
        pool.make_connection()  # type: ignore[no-untyped-call]  # opens none, and looks at every option
    except (RedisError, TypeError, ValueError) as error:
        raise ConfigError(f"store.url: an option in it is not understood: {error}") from error
    return pool
