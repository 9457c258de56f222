"""Frees the slots of a process that has ended without returning them, and is known to have ended.

Otherwise they would stay taken until its accounts expire (docs/store.md#accounts).
"""

import logging
from collections.abc import Collection
from itertools import count

import anyio

from gateway.core.load import NO_LOAD
from gateway.events import about
from gateway.store.connections import StoreAway
from gateway.store.leases import Leases, Order
from gateway.store.redis import COMMAND_S, REFRESH_S, TTL_S

log = logging.getLogger("gateway.store")

FIRST_NUMBER = 2**52
"""The number of the first order; no process that is alive gets that far. The scripts' numbers are doubles
(settle.lua)."""


class FormerAccounts:
    """The accounts of a process that has ended, until they have been closed."""

    def __init__(self, url: str, *, prefix: str, owner: str, backends: Collection[str]) -> None:
        """Prepare to close the accounts of `owner` with `backends` in the store at `url`."""
        self._url, self._prefix, self._owner = url, prefix, owner
        self._backends = backends
        self._numbers = count(FIRST_NUMBER)

    async def run(self) -> None:
        """Close them, and return. If the store does not answer, try again until they have expired."""
        with anyio.move_on_after(TTL_S):
            while True:
                try:
                    await self._close()
                    break
                except StoreAway:
                    await anyio.sleep(REFRESH_S)

    async def _close(self) -> None:
        # Uses nothing and wants nothing. A late command of the process that ended is ignored after it, but
        # this one is not ignored where an earlier attempt came half way.
        nothing = Order(next(self._numbers), NO_LOAD, NO_LOAD, NO_LOAD, waits=False, may_keep=False, deaf=0)
        leases = Leases(self._url, prefix=self._prefix, owner=self._owner, ttl_s=TTL_S, command_s=COMMAND_S)
        try:
            for backend_id in self._backends:
                await leases.settle(backend_id, nothing)
            await leases.leave()
        finally:
            await leases.aclose()
        log.info(
            "the slots of %s, which this process replaces, are free",
            self._owner,
            extra=about("slots_freed", process=self._owner),
        )
