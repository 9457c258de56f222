"""Makes sure that a job nobody knows of does not run.

If the store does not answer a submission, it may have accepted the job, or may accept it later. If the caller
was told otherwise, the job is revoked.
"""

import logging

import anyio

from gateway.core.errors import StoreUnavailable
from gateway.events import about
from gateway.ports import JobStore

log = logging.getLogger("gateway.jobs")

AGAIN_S = 1.0
"""How soon it is tried again while the store does not answer."""

KEPT_MAX = 10_000
"""How many jobs are remembered; of more, the oldest are left to run."""


class Revocations:
    """The jobs to be revoked by one process."""

    def __init__(self, store: JobStore) -> None:
        """Revoke jobs in `store`."""
        self._store = store
        self._ids: dict[str, None] = {}
        self._wanted = anyio.Event()

    @property
    def waiting(self) -> int:
        """How many jobs are still to be revoked."""
        return len(self._ids)

    def add(self, job_id: str) -> None:
        """Revoke a job as soon as the store answers."""
        if len(self._ids) >= KEPT_MAX:
            del self._ids[next(iter(self._ids))]
        self._ids[job_id] = None
        self._wanted.set()

    async def run(self) -> None:
        """Revoke jobs until cancelled."""
        while True:
            await self._wanted.wait()
            self._wanted = anyio.Event()
            while self._ids:
                job_id = next(iter(self._ids))
                try:
                    was_accepted = await self._store.revoke(job_id)
                except StoreUnavailable:
                    await anyio.sleep(AGAIN_S)
                    continue
                self._ids.pop(job_id, None)
                if was_accepted:
                    log.info(
                        "job %s was accepted although the store did not say so: it was deleted",
                        job_id,
                        extra=about("job_revoked", id=job_id),
                    )
