"""Answers by idempotency key: in memory for one process, or in Redis or Valkey for several.

A running request holds its key with a lease; a successful answer is stored under the key. A runner whose
lease has expired can neither overwrite the answer nor release the lease of a later runner.
"""

import logging
from typing import Any

from gateway.core.errors import StoreUnavailable
from gateway.core.idempotency import IdempotencyClaim, KeyState
from gateway.events import about
from gateway.ports import Clock
from gateway.store.connections import RETRY_AFTER_S, Connections, StoreAway, milliseconds
from gateway.store.expiring_records import ExpiringRecords

log = logging.getLogger("gateway.store")

COMMAND_S = 2.0
"""Timeout of a command, and of waiting for a connection: an answer may be megabytes long."""

CONNECTIONS_MAX = 8


class MemoryIdempotency:
    """`ports.IdempotencyStore` for one process. State changes with no `await` between check and change."""

    def __init__(self, clock: Clock, bytes_max: int) -> None:
        """Store at most `bytes_max` bytes of answers per owner."""
        self._clock = clock
        self._bytes_max = bytes_max
        self._records_by_owner: dict[str | None, ExpiringRecords] = {}
        self._marks: dict[tuple[str | None, str], tuple[IdempotencyClaim, float]] = {}  # with its expiry

    async def begin(self, claim: IdempotencyClaim, lease_s: float) -> bytes | KeyState:
        """See `ports.IdempotencyStore.begin`."""
        record = self._records(claim).get(claim.id)
        if record is not None:
            return _answer(claim, record)
        mark = self._mark(claim)
        if mark is not None and mark != claim:
            return KeyState.RUNNING if mark.fingerprint == claim.fingerprint else KeyState.REUSED
        self._set_mark(claim, lease_s)
        return KeyState.BEGUN

    async def renew(self, claim: IdempotencyClaim, lease_s: float) -> bool:
        """See `ports.IdempotencyStore.renew`."""
        if not self._is_own(claim):
            return False
        self._set_mark(claim, lease_s)
        return True

    async def keep(self, claim: IdempotencyClaim, answer: bytes, ttl_s: float) -> bool:
        """See `ports.IdempotencyStore.keep`."""
        if not self._is_own(claim):
            return False
        await self.free(claim)
        expires = self._clock.now() + ttl_s
        return self._records(claim).put(claim.id, _record(claim, answer), expires, self._bytes_max)

    async def free(self, claim: IdempotencyClaim) -> None:
        """See `ports.IdempotencyStore.free`."""
        if self._mark(claim) == claim:
            del self._marks[claim.owner, claim.id]

    async def aclose(self) -> None:
        """There is nothing to close."""

    def _is_own(self, claim: IdempotencyClaim) -> bool:
        """Return whether no other runner has the key, and no answer is stored under it."""
        return self._mark(claim) in (claim, None) and self._records(claim).get(claim.id) is None

    def _mark(self, claim: IdempotencyClaim) -> IdempotencyClaim | None:
        found = self._marks.get((claim.owner, claim.id))
        return None if found is None or found[1] <= self._clock.now() else found[0]

    def _set_mark(self, claim: IdempotencyClaim, lease_s: float) -> None:
        now = self._clock.now()
        self._marks.pop((claim.owner, claim.id), None)
        self._marks[claim.owner, claim.id] = claim, now + lease_s
        # All leases have the same length, so they expire in the order in which they were set.
        while (oldest := next(iter(self._marks.items())))[1][1] <= now:
            del self._marks[oldest[0]]

    def _records(self, claim: IdempotencyClaim) -> ExpiringRecords:
        records = self._records_by_owner.setdefault(claim.owner, ExpiringRecords())
        records.drop_until(self._clock.now())
        return records


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
        self._connections = Connections(
            url,
            name="gateway-idempotency",
            command_s=command_s,
            connections_max=CONNECTIONS_MAX,
            decodes=False,
        )
        self._script = self._connections.script("expiring_records", "idempotency")
        self._is_away = False

    async def begin(self, claim: IdempotencyClaim, lease_s: float) -> bytes | KeyState:
        """See `ports.IdempotencyStore.begin`."""
        reply = await self._run("begin", claim, milliseconds(lease_s))
        return _answer(claim, reply[0]) if isinstance(reply, list) else KeyState(reply.decode())

    async def renew(self, claim: IdempotencyClaim, lease_s: float) -> bool:
        """See `ports.IdempotencyStore.renew`."""
        return bool(await self._run("renew", claim, milliseconds(lease_s)))

    async def keep(self, claim: IdempotencyClaim, answer: bytes, ttl_s: float) -> bool:
        """See `ports.IdempotencyStore.keep`."""
        record = _record(claim, answer)
        if len(record) > self._bytes_max:
            await self.free(claim)
            return False
        return bool(await self._run("keep", claim, milliseconds(ttl_s), self._bytes_max, record))

    async def free(self, claim: IdempotencyClaim) -> None:
        """See `ports.IdempotencyStore.free`."""
        await self._run("free", claim)

    async def aclose(self) -> None:
        """Close all connections."""
        await self._connections.aclose()

    async def _run(self, what: str, claim: IdempotencyClaim, *arguments: int | bytes) -> Any:
        tag = f"{{{self._prefix}:promises:{claim.owner or ''}}}"
        keys = [f"{tag}:{name}" for name in ("records", "expiries", "bytes", f"running:{claim.id}")]
        args = [what, claim.id, claim.fingerprint, claim.runner, *arguments]
        try:
            reply = await self._connections.bounded(lambda: self._script(keys=keys, args=args))
        except StoreAway as error:
            if not self._is_away:
                log.error(
                    "the store for idempotency keys is unavailable: %s",
                    error,
                    extra=about("store_away", store="idempotency"),
                )
            self._is_away = True
            message = f"The store for idempotency keys {error.manner}. Please retry, or send no key."
            raise StoreUnavailable(message, retry_after_s=RETRY_AFTER_S) from error
        if self._is_away:
            log.warning(
                "the store for idempotency keys is available again",
                extra=about("store_back", store="idempotency"),
            )
        self._is_away = False
        return reply


def _record(claim: IdempotencyClaim, answer: bytes) -> bytes:
    return claim.fingerprint.encode() + answer


def _answer(claim: IdempotencyClaim, record: bytes) -> bytes | KeyState:
    """Return the answer in a record, unless it belongs to a different request body."""
    fingerprint = claim.fingerprint.encode()
    return record[len(fingerprint) :] if record.startswith(fingerprint) else KeyState.REUSED
