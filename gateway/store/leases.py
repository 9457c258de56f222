"""The lease scripts, called: one round trip each."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from gateway.core.admission import COUNTERS
from gateway.core.values import Load
from gateway.store.connections import Connections
from gateway.store.connections import StoreAway as StoreAway
from gateway.store.facts import BYTES_MAX, Told
from gateway.store.wire import Ear, ScriptMissing, Wires, packed

_counters = attrgetter(*COUNTERS)


@dataclass(frozen=True, slots=True)
class Reply:
    """What a script said.

    Attributes:
        outcome: 0 for done; of acquire, the number of the counter that is full, from 1; -1 for a lease
            that was given back already.
        version: Of the backend's sums; grows with every change of them.
        mine: Leases of this owner on the backend.
        others: What all other owners hold there.
    """

    outcome: int
    version: int
    mine: int
    others: Load


@dataclass(frozen=True, slots=True)
class Freed:
    """What became free on a backend, and of whose. `version` is that of the sums without it."""

    backend: str
    owner: str
    version: int
    load: Load


@dataclass(frozen=True, slots=True)
class Urgent:
    """A process whose facts cannot wait for the next look."""

    owner: str


@dataclass(frozen=True, slots=True)
class Beat:
    """What a heartbeat brought.

    Attributes:
        replicas: Gateway processes there are.
        told: What the others say of themselves.
    """

    replicas: int
    told: Sequence[Told]


News = Freed | Urgent
NextNews = Callable[[], Awaitable[News | None]]


class Leases:
    """The scripts of one Redis, for one owner. Every method raises StoreAway."""

    def __init__(
        self, url: str, *, prefix: str, owner: str, ttl_s: float, command_s: float, connections_max: int
    ) -> None:
        """Prepare to use the server at `url`; connects when first used.

        Args:
            url: `redis://`, `rediss://` or `unix://`.
            prefix: What every key and the channel start with.
            owner: Names this process; no colon, no space.
            ttl_s: Life of a lease that is not renewed.
            command_s: The longest a command may take, connecting included; and the longest it may wait
                for its turn before.
            connections_max: Commands at once that concern no lease, each on a connection of its own.
        """
        self._prefix, self._owner = prefix, owner
        self._ttl_ms = max(1, round(ttl_s * 1000))
        self._connections = Connections(
            url, name=f"gateway-{owner}", command_s=command_s, connections_max=connections_max
        )
        self._channel = f"{prefix}:freed"
        self._wires = Wires(self._connections.connection, command_s)
        self._scripts = {
            name: self._connections.script("leases", name)
            for name in ("acquire", "answered", "release", "renew")
        }
        # By script and backend, the words that every call begins with: how many, and packed.
        self._begins: dict[tuple[str, str], tuple[int, bytes]] = {}
        self._heartbeat = self._connections.script("heartbeat")
        self._box = self._connections.script("box")

    async def acquire(self, backend_id: str, lease: str, claim: Load, limits: Load) -> Reply:
        """Take a lease if the backend then holds no more than `limits`. Repeating it changes nothing."""
        return await self._run("acquire", backend_id, (lease, *_counters(claim), *_counters(limits)))

    async def answered(self, backend_id: str, lease: str, claim: Load) -> Reply:
        """Reduce a lease to `claim`."""
        return await self._run("answered", backend_id, (lease, *_counters(claim)))

    async def release(self, backend_id: str, leases: Iterable[str]) -> Reply:
        """Give leases back, for good: an acquire or renewal of one that arrives later does nothing."""
        return await self._run("release", backend_id, tuple(leases))

    async def renew(self, backend_id: str, claims: Mapping[str, Load]) -> Reply:
        """Renew leases, add those the server does not know, and reclaim what has expired."""
        arguments: list[str | int] = []
        for lease, claim in claims.items():
            arguments.append(lease)
            arguments.extend(_counters(claim))
        return await self._run("renew", backend_id, arguments)

    async def heartbeat(self, facts: str = "", *, is_urgent: bool = False) -> Beat:
        """Say that this process is there, and its facts; `is_urgent`: have the others look at once."""
        return await self._beat(self._ttl_ms, facts, self._channel if is_urgent else "")

    async def leave(self) -> None:
        """Say that this process is going."""
        await self._beat(0)

    async def _beat(self, ttl_ms: int, facts: str = "", channel: str = "") -> Beat:
        keys = [f"{{{self._prefix}}}:replicas", f"{{{self._prefix}}}:facts"]
        args: list[str | int] = [self._owner, ttl_ms, facts, BYTES_MAX, channel]
        replicas, *said = await self._connections.bounded(lambda: self._heartbeat(keys=keys, args=args))
        rows = zip(said[::3], said[1::3], said[2::3], strict=True)
        return Beat(replicas, tuple(Told(owner, left_ms / 1000, text) for owner, left_ms, text in rows))

    async def box(self, box_id: str, fence: int, state: str, note: str) -> tuple[int, str, list[str]]:
        """Own a box, or see who does: the fence (0: another does), the state, the others' notes."""
        found, written, notes = await self._on_box(box_id, self._ttl_ms, fence, state, note)
        return int(found), written, notes

    async def leave_box(self, box_id: str) -> None:
        """Own a box no more."""
        await self._on_box(box_id, 0, 0, "", "")

    async def _on_box(self, box_id: str, *arguments: int | str) -> Any:
        tag = f"{{{self._prefix}:box:{box_id}}}"
        keys = [f"{tag}:{name}" for name in ("owner", "fence", "state", "notes")]
        return await self._connections.bounded(lambda: self._box(keys=keys, args=[self._owner, *arguments]))

    async def _run(self, name: str, backend_id: str, arguments: Sequence[str | int]) -> Reply:
        count, begin = self._begins.get((name, backend_id)) or self._begin(name, backend_id)
        command = b"*%d\r\n%b%b" % (count + len(arguments), begin, packed(arguments))
        try:
            outcome, version, mine, *others = await self._wires.ask(command)
        except ScriptMissing:
            text = self._scripts[name].script
            await self._connections.bounded(lambda: self._connections.redis.script_load(text))
            outcome, version, mine, *others = await self._wires.ask(command)
        return Reply(outcome, version, mine, _load(others))

    def _begin(self, name: str, backend_id: str) -> tuple[int, bytes]:
        tag = f"{{{self._prefix}:{backend_id}}}"
        keys = [f"{tag}:leases", f"{tag}:claims", f"{tag}:sums", f"{tag}:gone"]
        words: list[str | int] = ["EVALSHA", self._scripts[name].sha, len(keys)]
        words += [*keys, self._channel, backend_id, self._owner, self._ttl_ms, len(COUNTERS)]
        self._begins[name, backend_id] = begin = len(words), packed(words)
        return begin

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[NextNews]:
        """Yield a function that returns what any process publishes next; None if it is not understood."""
        ear = Ear()

        async def next_news() -> News | None:
            return _news(await ear.heard())

        try:
            connection = self._connections.connection()
            await self._connections.bounded(lambda: ear.subscribe(connection, self._channel))
            yield next_news
        finally:
            ear.close()

    async def aclose(self) -> None:
        """Close every connection."""
        self._wires.close()
        await self._connections.aclose()


def _load(values: Iterable[int]) -> Load:
    return Load(**dict(zip(COUNTERS, values, strict=True)))


def _news(message: str) -> News | None:
    """Return what a message says, or None for one from a gateway that counts otherwise than this one."""
    words = message.split(" ")
    if len(words) == 1:
        return Urgent(message)
    if len(words) != len(COUNTERS) + 3:
        return None
    owner, version, *counters, backend = words
    try:
        return Freed(backend, owner, int(version), _load(map(int, counters)))
    except ValueError:
        return None
