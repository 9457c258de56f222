"""Answers by idempotency key, in Redis or Valkey.

A running request holds its key with a lease; a successful answer is stored under the key. A runner whose
lease has expired can neither overwrite the answer nor release the lease of a later runner.
"""

import asyncio
from contextlib import suppress
from functools import partial
from typing import Any

from gateway.core.errors import StoreUnavailable
from gateway.core.idempotency import IdempotencyClaim, KeyState
from gateway.store.connections import milliseconds
from gateway.store.outages import LoggedConnections

COMMAND_S = 2.0
"""Timeout of a command, and of waiting for a connection. A choice: an answer may be megabytes long."""

CONNECTIONS_MAX = 8
"""Connections per process. A choice: a command is short unless its answer is long."""


class RedisIdempotency:
    """`ports.IdempotencyStore` over Redis. Each command is one script, with a timeout, and never retried."""

    def __init__(self, url: str, *, prefix: str, bytes_max: int, command_s: float = COMMAND_S) -> None:
        """Prepare to use the server at `url`; connects on first use.

        Args:
            url: `redis://`, `rediss://` or `unix://`.
            prefix: Prefix of all keys. Gateways with the same prefix share their idempotency keys.
            bytes_max: Maximum bytes of stored answers per owner.
            command_s: Timeout of a command, and of waiting for a connection.
        """
        self._prefix, self._bytes_max = prefix, bytes_max
        self._connections = LoggedConnections(
            url,
            store="idempotency",
            title="store for idempotency keys",
            advice="Please retry, or send no key.",
            command_s=command_s,
            connections_max=CONNECTIONS_MAX,
        )
        self._script = self._connections.script("expiring_records", "idempotency")
        self._freeing: set[asyncio.Task[None]] = set()

    async def begin(self, claim: IdempotencyClaim, lease_s: float) -> bytes | KeyState:
        """See `ports.IdempotencyStore.begin`. Perhaps only a reply was lost, so the key is freed then."""
        try:
            reply = await self._run("begin", claim, milliseconds(lease_s))
        except StoreUnavailable:
            freeing = asyncio.get_running_loop().create_task(self._free_if_possible(claim))
            self._freeing.add(freeing)  # the caller is told meanwhile
            freeing.add_done_callback(self._freeing.discard)
            raise
        return claim.answer_in(reply[0]) if isinstance(reply, list) else KeyState(reply.decode())

    async def renew(self, claim: IdempotencyClaim, lease_s: float) -> bool:
        """See `ports.IdempotencyStore.renew`."""
        return bool(await self._run("renew", claim, milliseconds(lease_s)))

    async def keep(self, claim: IdempotencyClaim, answer: bytes, ttl_s: float) -> None:
        """See `ports.IdempotencyStore.keep`."""
        record = claim.record_of(answer)
        if len(record) > self._bytes_max:
            await self.free(claim)
        else:
            await self._run("keep", claim, milliseconds(ttl_s), self._bytes_max, record)

    async def free(self, claim: IdempotencyClaim) -> None:
        """See `ports.IdempotencyStore.free`."""
        await self._run("free", claim)

    async def aclose(self) -> None:
        """Close all connections, once no key is being freed."""
        await asyncio.gather(*self._freeing)
        await self._connections.aclose()

    async def _free_if_possible(self, claim: IdempotencyClaim) -> None:
        with suppress(StoreUnavailable):  # its lease expires
            await self.free(claim)

    async def _run(self, what: str, claim: IdempotencyClaim, *arguments: int | bytes) -> Any:
        tag = f"{{{self._prefix}:promises:{claim.owner or ''}}}"
        keys = [f"{tag}:{name}" for name in ("records", "expiries", "bytes", f"running:{claim.id}")]
        args = [what, claim.id, claim.fingerprint, claim.runner, *arguments]
        return await self._connections.answer(what, partial(self._script, keys=keys, args=args))
