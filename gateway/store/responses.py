"""Stored responses: in memory for one process, or in Redis or Valkey for several.

Both limit the bytes per owner, and evict the records that expire first.
"""

from functools import partial
from typing import Any

from gateway.ports import Clock
from gateway.store.connections import Connections, milliseconds
from gateway.store.expiring_records import ExpiringRecords

COMMAND_S = 2.0
"""Timeout of a command, and of waiting for a connection: a record may be megabytes long."""

CONNECTIONS_MAX = 8


class MemoryResponseStore:
    """`ports.ResponseStore` for one process. State changes with no `await` between check and change."""

    def __init__(self, clock: Clock, bytes_max: int) -> None:
        """Store at most `bytes_max` bytes per owner."""
        self._clock = clock
        self._bytes_max = bytes_max
        self._records_by_owner: dict[str | None, ExpiringRecords] = {}

    async def put(self, owner: str | None, id: str, record: bytes, ttl_s: float) -> bool:
        """See `ports.ResponseStore.put`."""
        return self._records(owner).put(id, record, self._clock.now() + ttl_s, self._bytes_max)

    async def get(self, owner: str | None, id: str) -> bytes | None:
        """See `ports.ResponseStore.get`."""
        return self._records(owner).get(id)

    async def delete(self, owner: str | None, id: str) -> bool:
        """See `ports.ResponseStore.delete`."""
        return self._records(owner).drop(id)

    async def aclose(self) -> None:
        """There is nothing to close."""

    def _records(self, owner: str | None) -> ExpiringRecords:
        records = self._records_by_owner.setdefault(owner, ExpiringRecords())
        records.drop_until(self._clock.now())
        return records


class RedisResponseStore:
    """`ports.ResponseStore` over Redis. Each command is one script, with a timeout, and never retried."""

    def __init__(self, url: str, *, prefix: str, bytes_max: int, command_s: float = COMMAND_S) -> None:
        """Prepare to use the server at `url`; connects on first use.

        Args:
            url: `redis://`, `rediss://` or `unix://`.
            prefix: Prefix of all keys.
            bytes_max: Maximum bytes stored per owner.
            command_s: Timeout of a command, and of waiting for a connection.
        """
        self._prefix, self._bytes_max = prefix, bytes_max
        self._connections = Connections(
            url,
            name="gateway-responses",
            command_s=command_s,
            connections_max=CONNECTIONS_MAX,
            decodes=False,
        )
        self._script = self._connections.script("expiring_records", "responses")

    async def put(self, owner: str | None, id: str, record: bytes, ttl_s: float) -> bool:
        """See `ports.ResponseStore.put`."""
        if len(record) > self._bytes_max:
            return False
        await self._run(owner, "put", id, record, milliseconds(ttl_s), self._bytes_max)
        return True

    async def get(self, owner: str | None, id: str) -> bytes | None:
        """See `ports.ResponseStore.get`."""
        found: bytes | None = await self._run(owner, "get", id)
        return found

    async def delete(self, owner: str | None, id: str) -> bool:
        """See `ports.ResponseStore.delete`."""
        return bool(await self._run(owner, "delete", id))

    async def aclose(self) -> None:
        """Close all connections."""
        await self._connections.aclose()

    async def _run(self, owner: str | None, *arguments: str | bytes | int) -> Any:
        tag = f"{{{self._prefix}:responses:{owner or ''}}}"
        keys = [f"{tag}:{name}" for name in ("records", "expiries", "bytes")]
        command = partial(self._script, keys=keys, args=list(arguments))
        return await self._connections.answer("response", command)
