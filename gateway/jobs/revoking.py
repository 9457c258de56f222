"""Makes sure that a job or batch that nobody knows of does not run.

If the store does not answer a submission, it may have accepted it, or may accept it later. If the caller was
told otherwise, what was submitted is revoked.
"""

import logging
from typing import Protocol

import anyio

from gateway.core.errors import StoreUnavailable
from gateway.events import about
from gateway.jobs.answer_writer import AGAIN_S

log = logging.getLogger("gateway.jobs")

KEPT_MAX = 10_000
"""How many are remembered; of more, the oldest are left to run. A choice that bounds memory."""


class Revoking(Protocol):
    """A store that can revoke what was submitted to it."""

    async def revoke(self, id: str, /) -> bool:
        """See `ports.JobStore.revoke` and `ports.BatchStore.revoke`."""


class Revocations:
    """What one process has to revoke."""

    def __init__(self) -> None:
        """Start with nothing."""
        self._stores: dict[str, Revoking] = {}  # by id
        self._wanted = anyio.Event()

    @property
    def waiting(self) -> int:
        """How much is still to be revoked."""
        return len(self._stores)

    def add(self, id: str, store: Revoking) -> None:
        """Revoke a job or a batch as soon as its store answers."""
        if len(self._stores) >= KEPT_MAX:
            del self._stores[next(iter(self._stores))]
        self._stores[id] = store
        self._wanted.set()

    def give_up(self) -> None:
        """Say what cannot be revoked any more, because this process ends."""
        for id in self._stores:
            log.warning(
                "%s may run although its caller knows nothing of it: the store did not answer until the end",
                id,
                extra=about("job_not_revoked", id=id),
            )

    async def run(self) -> None:
        """Revoke until cancelled."""
        while True:
            await self._wanted.wait()
            self._wanted = anyio.Event()
            while self._stores:
                id, store = next(iter(self._stores.items()))
                try:
                    was_accepted = await store.revoke(id)
                except StoreUnavailable:
                    await anyio.sleep(AGAIN_S)
                    self._stores[id] = self._stores.pop(id, store)  # behind the others
                    continue
                self._stores.pop(id, None)
                if was_accepted:
                    log.info(
                        "%s was accepted although the store did not say so: it was revoked",
                        id,
                        extra=about("job_revoked", id=id),
                    )
