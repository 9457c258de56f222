"""Polls the queue for metrics and logs, so that scrapes do not wait for the store."""

import logging
from dataclasses import replace

import anyio

from gateway.core.errors import StoreUnavailable
from gateway.core.jobs import QueueSnapshot
from gateway.events import about
from gateway.ports import Clock, JobStore

log = logging.getLogger("gateway.jobs")

LOOK_S = 5.0
"""Polling interval of the queue's figures. A choice: every process asks the store."""


class QueueWatch:
    """One process's view of the queue.

    Attributes:
        snapshot: The latest snapshot; None before the first one.
    """

    def __init__(self, store: JobStore, clock: Clock) -> None:
        """Poll the jobs of `store`."""
        self._store, self._clock = store, clock
        self.snapshot: QueueSnapshot | None = None

    async def run(self) -> None:
        """Poll until cancelled."""
        while True:
            await self.look()
            await anyio.sleep(LOOK_S)

    async def look(self) -> None:
        """Poll once. Logs the beginning and the end of a drain."""
        before = self.snapshot or QueueSnapshot()
        try:
            queue, totals = await self._store.queue(), await self._store.totals()
        except StoreUnavailable:
            self.snapshot = replace(before, is_away=True)
            return
        self.snapshot = QueueSnapshot(queue, self._store.is_refusing, totals, at=self._clock.now())
        if queue.drained_at is not None and before.queue.drained_at is None:
            log.warning(
                "jobs are drained: workers take none until `gemma-gateway jobs drain --undo`",
                extra=about("jobs_drained"),
            )
        elif queue.drained_at is None and before.queue.drained_at is not None:
            log.warning("jobs are no longer drained: workers take them again", extra=about("jobs_undrained"))
