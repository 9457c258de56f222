"""Kept responses: in this process, or in Redis or Valkey, where every gateway finds them.

Both bound what one owner has in bytes, and forget first what would expire first.
"""

import asyncio
import heapq
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import anyio
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from gateway.core.errors import StoreUnavailable
from gateway.ports import Clock
from gateway.store.connections import UNREACHABLE

COMMAND_S = 2.0
"""The longest a command may take, connecting included: a record may be megabytes long."""

CONNECTIONS_MAX = 8
_SPARE = 64
_SCRIPT = resources.files("gateway.store").joinpath("responses.lua").read_text(encoding="utf-8")


@dataclass(slots=True)
class _Shelf:
    """What one owner has: records with the time they expire, and who expires first."""

    records: dict[str, tuple[bytes, float]] = field(default_factory=dict)
    order: list[tuple[float, str]] = field(default_factory=list)  # a heap; may name what is gone
    size: int = 0

    def add(self, id: str, record: bytes, expires: float) -> None:
        self.records[id] = (record, expires)
        self.size += len(record)
        heapq.heappush(self.order, (expires, id))
        if len(self.order) > 2 * len(self.records) + _SPARE:
            self.order = [(expires, id) for id, (_, expires) in self.records.items()]
            heapq.heapify(self.order)

    def drop(self, id: str) -> bool:
        found = self.records.pop(id, None)
        if found is None:
            return False
        self.size -= len(found[0])
        return True

    def drop_until(self, now: float) -> None:
        """Forget what has expired by `now`."""
        while self.order and self.order[0][0] <= now:
            self._drop_first()

    def shrink(self, bytes_max: int) -> None:
        while self.size > bytes_max:
            self._drop_first()

    def _drop_first(self) -> None:
        expires, id = heapq.heappop(self.order)
        if id in self.records and self.records[id][1] == expires:
            self.drop(id)


class MemoryResponseStore:
    """`ports.ResponseStore` for one process. State changes with no `await` between check and change."""

    def __init__(self, clock: Clock, bytes_max: int) -> None:
        """Keep at most `bytes_max` bytes for each owner."""
        self._clock = clock
        self._bytes_max = bytes_max
        self._shelves: dict[str | None, _Shelf] = {}

    async def put(self, owner: str | None, id: str, record: bytes, ttl_s: float) -> bool:
        """See `ports.ResponseStore.put`."""
        if len(record) > self._bytes_max:
            return False
        shelf = self._shelf(owner)
        shelf.drop(id)
        shelf.shrink(self._bytes_max - len(record))
        shelf.add(id, record, self._clock.now() + ttl_s)
        return True

    async def get(self, owner: str | None, id: str) -> bytes | None:
        """See `ports.ResponseStore.get`."""
        found = self._shelf(owner).records.get(id)
        return None if found is None else found[0]

    async def delete(self, owner: str | None, id: str) -> bool:
        """See `ports.ResponseStore.delete`."""
        return self._shelf(owner).drop(id)

    async def aclose(self) -> None:
        """Nothing has to be closed."""

    def _shelf(self, owner: str | None) -> _Shelf:
        shelf = self._shelves.setdefault(owner, _Shelf())
        shelf.drop_until(self._clock.now())
        return shelf


class RedisResponseStore:
    """`ports.ResponseStore` over Redis. Each command is one script, bounded in time and sent once."""

    def __init__(self, url: str, *, prefix: str, bytes_max: int, command_s: float = COMMAND_S) -> None:
        """Prepare to use the server at `url`; connects when first used.

        Args:
            url: `redis://`, `rediss://` or `unix://`.
            prefix: What every key starts with.
            bytes_max: The most bytes kept for each owner.
            command_s: The longest a command may take, waiting for a connection included.
        """
        self._prefix, self._bytes_max, self._command_s = prefix, bytes_max, command_s
        pool = BlockingConnectionPool.from_url(
            url,
            max_connections=CONNECTIONS_MAX,
            timeout=command_s,
            protocol=2,
            retry=Retry(NoBackoff(), 0),
            retry_on_timeout=False,
            socket_connect_timeout=command_s,
            socket_timeout=command_s,
        )
        self._redis = Redis.from_pool(pool)
        self._script: Callable[..., Awaitable[Any]] = self._redis.register_script(_SCRIPT)

    async def put(self, owner: str | None, id: str, record: bytes, ttl_s: float) -> bool:
        """See `ports.ResponseStore.put`."""
        if len(record) > self._bytes_max:
            return False
        await self._run(owner, "put", id, record, max(1, round(ttl_s * 1000)), self._bytes_max)
        return True

    async def get(self, owner: str | None, id: str) -> bytes | None:
        """See `ports.ResponseStore.get`."""
        found: bytes | None = await self._run(owner, "get", id)
        return found

    async def delete(self, owner: str | None, id: str) -> bool:
        """See `ports.ResponseStore.delete`."""
        return bool(await self._run(owner, "delete", id))

    async def aclose(self) -> None:
        """Close every connection."""
        await self._redis.aclose()

    async def _run(self, owner: str | None, *arguments: str | bytes | int) -> Any:
        tag = f"{{{self._prefix}:responses:{owner or ''}}}"
        keys = [f"{tag}:{name}" for name in ("records", "expiries", "bytes")]
        try:
            # As in leases.py: cancelled half way, it would leave in doubt what was done.
            with anyio.CancelScope(shield=True):
                async with asyncio.timeout(self._command_s):
                    return await self._script(keys=keys, args=list(arguments))
        except (TimeoutError, *UNREACHABLE) as error:
            message = "The store of responses does not answer. Please retry."
            raise StoreUnavailable(message, retry_after_s=5) from error
