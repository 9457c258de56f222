"""Stored responses, in Redis or Valkey: limited bytes per owner, the first to expire are evicted."""

from functools import partial
from typing import Any

from gateway.store.connections import milliseconds
from gateway.store.outages import LoggedConnections

COMMAND_S = 2.0
"""Timeout of a command, and of waiting for a connection. A choice: a record may be megabytes long."""

CONNECTIONS_MAX = 8
"""Connections per process. A choice, as for idempotency keys."""


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
        self._connections = LoggedConnections(
            url,
            store="responses",
            title="response store",
            command_s=command_s,
            connections_max=CONNECTIONS_MAX,
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

    async def _run(self, owner: str | None, what: str, *arguments: str | bytes | int) -> Any:
        tag = f"{{{self._prefix}:responses:{owner or ''}}}"
        keys = [f"{tag}:{name}" for name in ("records", "expiries", "bytes")]
        return await self._connections.answer(what, partial(self._script, keys=keys, args=[what, *arguments]))
