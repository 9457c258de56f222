"""Answers by idempotency key: in memory for one process, or in Redis or Valkey for several.

A running request holds its key with a lease; a successful answer is stored under the key. A runner whose
lease has expired can neither overwrite nor release what another one has done since.
"""

import logging
from typing import Any

from gateway.core.errors import StoreUnavailable
from gateway.core.idempotency import Promise, Standing
from gateway.events import about
from gateway.ports import Clock
from gateway.store.connections import Connections, StoreAway, milliseconds
from gateway.store.shelf import Shelf

log = logging.getLogger("gateway.store")

COMMAND_S = 2.0
"""Timeout of a command, and of waiting for a connection: an answer may have megabytes."""

CONNECTIONS_MAX = 8
RETRY_AFTER_S = 5.0
"""`Retry-After` for callers."""


class MemoryPromises:
    """`ports.PromiseStore` for one process. State changes with no `await` between check and change."""

    def __init__(self, clock: Clock, bytes_max: int) -> None:
        """Store at most `bytes_max` bytes of answers per owner."""
        self._clock = clock
        self._bytes_max = bytes_max
        self._shelves: dict[str | None, Shelf] = {}
        self._marks: dict[tuple[str | None, str], tuple[Promise, float]] = {}  # with its expiry

    async def begin(self, promise: Promise, lease_s: float) -> bytes | Standing:
        """See `ports.PromiseStore.begin`."""
        record = self._shelf(promise).get(promise.id)
        if record is not None:
            return _answer(promise, record)
        mark = self._mark(promise)
        if mark is not None and mark != promise:
            return Standing.RUNNING if mark.fingerprint == promise.fingerprint else Standing.REUSED
        self._set_mark(promise, lease_s)
        return Standing.BEGUN

    async def renew(self, promise: Promise, lease_s: float) -> bool:
        """See `ports.PromiseStore.renew`."""
        if not self._is_own(promise):
            return False
        self._set_mark(promise, lease_s)
        return True

    async def keep(self, promise: Promise, answer: bytes, ttl_s: float) -> bool:
        """See `ports.PromiseStore.keep`."""
        if not self._is_own(promise):
            return False
        await self.free(promise)
        expires = self._clock.now() + ttl_s
        return self._shelf(promise).put(promise.id, _record(promise, answer), expires, self._bytes_max)

    async def free(self, promise: Promise) -> None:
        """See `ports.PromiseStore.free`."""
        if self._mark(promise) == promise:
            del self._marks[promise.owner, promise.id]

    async def aclose(self) -> None:
        """There is nothing to close."""

    def _is_own(self, promise: Promise) -> bool:
        """Return whether no other runner has the key, and no answer is stored under it."""
        return self._mark(promise) in (promise, None) and self._shelf(promise).get(promise.id) is None

    def _mark(self, promise: Promise) -> Promise | None:
        found = self._marks.get((promise.owner, promise.id))
        return None if found is None or found[1] <= self._clock.now() else found[0]

    def _set_mark(self, promise: Promise, lease_s: float) -> None:
        now = self._clock.now()
        self._marks.pop((promise.owner, promise.id), None)
        self._marks[promise.owner, promise.id] = promise, now + lease_s
        # All leases have the same length, so they expire in the order in which they were set.
        while (oldest := next(iter(self._marks.items())))[1][1] <= now:
            del self._marks[oldest[0]]

    def _shelf(self, promise: Promise) -> Shelf:
        shelf = self._shelves.setdefault(promise.owner, Shelf())
        shelf.drop_until(self._clock.now())
        return shelf


class RedisPromises:
    """`ports.PromiseStore` over Redis. Each command is one script, with a timeout, and never retried."""

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
            name="gateway-promises",
            command_s=command_s,
            connections_max=CONNECTIONS_MAX,
            decodes=False,
        )
        self._script = self._connections.script("shelf", "promise")
        self._is_away = False

    async def begin(self, promise: Promise, lease_s: float) -> bytes | Standing:
        """See `ports.PromiseStore.begin`."""
        reply = await self._run("begin", promise, milliseconds(lease_s))
        return _answer(promise, reply[0]) if isinstance(reply, list) else Standing(reply.decode())

    async def renew(self, promise: Promise, lease_s: float) -> bool:
        """See `ports.PromiseStore.renew`."""
        return bool(await self._run("renew", promise, milliseconds(lease_s)))

    async def keep(self, promise: Promise, answer: bytes, ttl_s: float) -> bool:
        """See `ports.PromiseStore.keep`."""
        record = _record(promise, answer)
        if len(record) > self._bytes_max:
            await self.free(promise)
            return False
        return bool(await self._run("keep", promise, milliseconds(ttl_s), self._bytes_max, record))

    async def free(self, promise: Promise) -> None:
        """See `ports.PromiseStore.free`."""
        await self._run("free", promise)

    async def aclose(self) -> None:
        """Close all connections."""
        await self._connections.aclose()

    async def _run(self, what: str, promise: Promise, *arguments: int | bytes) -> Any:
        tag = f"{{{self._prefix}:promises:{promise.owner or ''}}}"
        keys = [f"{tag}:{name}" for name in ("records", "expiries", "bytes", f"running:{promise.id}")]
        args = [what, promise.id, promise.fingerprint, promise.runner, *arguments]
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
            message = "The store for idempotency keys does not answer. Please retry, or send no key."
            raise StoreUnavailable(message, retry_after_s=RETRY_AFTER_S) from error
        if self._is_away:
            log.warning(
                "the store for idempotency keys is available again",
                extra=about("store_back", store="idempotency"),
            )
        self._is_away = False
        return reply


def _record(promise: Promise, answer: bytes) -> bytes:
    return promise.fingerprint.encode() + answer


def _answer(promise: Promise, record: bytes) -> bytes | Standing:
    """Return the answer in a record, unless it belongs to a different request body."""
    fingerprint = promise.fingerprint.encode()
    return record[len(fingerprint) :] if record.startswith(fingerprint) else Standing.REUSED
