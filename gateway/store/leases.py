"""Calls the scripts by which processes share limits and facts: one round trip each."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import chain
from operator import attrgetter

from gateway.core.admission import COUNTERS
from gateway.core.load import Load
from gateway.core.value import valueclass
from gateway.store.connections import Connections, StoreAway, milliseconds
from gateway.store.facts import BYTES_MAX, PeerFacts
from gateway.store.wire import PipelinedConnections, ScriptMissing, packed, subscribed

CONNECTIONS_MAX = 16
"""Connections per process, beside those for `settle` and the subscribed one. A choice: a heartbeat needs one;
a server that has lost the script of `settle` is sent it for several backends at once."""

_counters = attrgetter(*COUNTERS)
_SIZE = len(COUNTERS)

_HEAD = 4
_REPLY = _HEAD + 3 * _SIZE
"""Number of values before the counters of a reply, and with the counters, as the scripts return them."""


@valueclass(frozen=True, slots=True)
class Order:
    """A process's use of a backend, the grant it wants, and its claims for further slots.

    Attributes:
        number: Increases with every order of this process for the backend.
        used: Load of its requests.
        kept: The grant it wants in total, used or not.
        ceiling: Limits up to which surplus may be granted; -1 for counters without any.
        waits: Whether requests are waiting here for capacity.
        may_keep: Whether it may hold surplus.
        deaf: Number of other processes that did not return their surplus when asked.
        claims: Claims of waiting requests, each with the limits of the backend.
    """

    number: int
    used: Load
    kept: Load
    ceiling: Load
    waits: bool
    may_keep: bool
    deaf: int
    claims: Sequence[tuple[Load, Load]] = ()


@valueclass(frozen=True, slots=True)
class Reply:
    """The result of an order.

    Attributes:
        is_known: Whether the server knew this process's account.
        version: Version of the backend's accounts; increases with every order.
        keeping: Number of other processes with surplus there.
        may_keep: Whether this process may hold surplus.
        others: Load of all other processes' requests.
        others_kept: Their grants, used or not.
        kept: This process's grant.
        outcomes: Per claim 0 for counted, or the number of the counter that is full, from 1.
    """

    is_known: bool
    version: int
    keeping: int
    may_keep: bool
    others: Load
    others_kept: Load
    kept: Load
    outcomes: Sequence[int]


@valueclass(frozen=True, slots=True)
class Freed:
    """Capacity freed on a backend, and by which process. `version` is that of the accounts without it."""

    backend: str
    owner: str
    version: int
    load: Load


@valueclass(frozen=True, slots=True)
class Wanted:
    """A process found no room on a backend, and needs the surplus of the others."""

    backend: str
    owner: str


@valueclass(frozen=True, slots=True)
class UrgentFacts:
    """A process has facts that others should read at once."""

    owner: str


@valueclass(frozen=True, slots=True)
class HeartbeatReply:
    """The reply to a heartbeat.

    Attributes:
        replicas: Number of live gateway processes.
        told: Facts of the others.
    """

    replicas: int
    told: Sequence[PeerFacts]


News = Freed | Wanted | UrgentFacts
NextNews = Callable[[], Awaitable[News | None]]


class Leases:
    """The scripts of one Redis, for one owner. All methods raise StoreAway."""

    def __init__(self, url: str, *, prefix: str, owner: str, ttl_s: float, command_s: float) -> None:
        """Prepare to use the server at `url`; connects on first use.

        Args:
            url: `redis://`, `rediss://` or `unix://`.
            prefix: Prefix of all keys and of the channel.
            owner: Name of this process; no colon, no space.
            ttl_s: Expiry of an account unless renewed.
            command_s: Timeout of a command, including connecting; and the maximum time it may wait for a
                free connection before.
        """
        self._prefix, self._owner = prefix, owner
        self._ttl_ms = milliseconds(ttl_s)
        self._connections = Connections(
            url, name=f"gateway-{owner}", command_s=command_s, connections_max=CONNECTIONS_MAX
        )
        self._channel = f"{prefix}:freed"
        self._settling = PipelinedConnections(self._connections.connection, command_s)
        self._settle = self._connections.script("settle")
        # Per backend, the words that every call begins with: their number and their encoded form.
        self._begins: dict[str, tuple[int, bytes]] = {}
        self._heartbeat = self._connections.script("heartbeat")

    async def settle(self, backend_id: str, order: Order) -> Reply:
        """Report this process's use of a backend, and acquire its claims as far as there is room."""
        arguments = [order.number, int(order.waits), int(order.may_keep), order.deaf]
        for load in (order.used, order.kept, order.ceiling, *chain.from_iterable(order.claims)):
            arguments += _counters(load)
        count, begin = self._begins.get(backend_id) or self._begin(backend_id)
        command = b"*%d\r\n%b%b" % (count + len(arguments), begin, packed(arguments))
        try:
            values = await self._settling.ask(command)
        except ScriptMissing:
            text = self._settle.script
            await self._connections.bounded(lambda: self._connections.redis.script_load(text))
            values = await self._settling.ask(command)
        if len(values) != _REPLY + len(order.claims):
            raise StoreAway("a later command was carried out before this one")
        known, version, keeping, may_keep = values[:_HEAD]
        others, others_kept, kept = (Load(*values[at : at + _SIZE]) for at in range(_HEAD, _REPLY, _SIZE))
        outcomes = values[_REPLY:]
        return Reply(bool(known), version, keeping, bool(may_keep), others, others_kept, kept, outcomes)

    async def heartbeat(self, facts: str, *, is_urgent: bool) -> HeartbeatReply:
        """Announce this process and its facts. `is_urgent`: have the others read them at once."""
        return await self._beat(self._ttl_ms, facts, self._channel if is_urgent else "")

    async def leave(self) -> None:
        """Announce that this process is leaving."""
        await self._beat(0)

    async def _beat(self, ttl_ms: int, facts: str = "", channel: str = "") -> HeartbeatReply:
        keys = [f"{{{self._prefix}}}:replicas", f"{{{self._prefix}}}:facts"]
        args: list[str | int] = [self._owner, ttl_ms, facts, BYTES_MAX, channel]
        replicas, *said = await self._connections.bounded(lambda: self._heartbeat(keys=keys, args=args))
        rows = zip(said[::3], said[1::3], said[2::3], strict=True)
        return HeartbeatReply(
            replicas, tuple(PeerFacts(owner, left_ms / 1000, text) for owner, left_ms, text in rows)
        )

    def _begin(self, backend_id: str) -> tuple[int, bytes]:
        words: list[str | int] = ["EVALSHA", self._settle.sha, 1, f"{{{self._prefix}:{backend_id}}}:accounts"]
        words += [self._channel, backend_id, self._owner, self._ttl_ms, _SIZE]
        self._begins[backend_id] = begin = len(words), packed(words)
        return begin

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[NextNews]:
        """Yield a function that returns the next message published by any process; None if it is invalid."""
        async with subscribed(self._connections, self._channel) as subscription:

            async def next_news() -> News | None:
                _, message = await subscription.heard()
                return _news(message)

            yield next_news

    async def aclose(self) -> None:
        """Close all connections."""
        self._settling.close()
        await self._connections.aclose()


def _news(message: str) -> News | None:
    """Decode a message; None if it comes from a gateway with an incompatible way of counting."""
    words = message.split(" ")
    if len(words) == 1:
        return UrgentFacts(message)
    if len(words) == 2:
        return Wanted(words[1], words[0])
    if len(words) != _SIZE + 3:
        return None
    owner, version, *counters, backend = words
    try:
        return Freed(backend, owner, int(version), Load(*map(int, counters)))
    except ValueError:
        return None
