"""The caller of a job is its record: what a backend sends is written to the store, a chunk at a time."""

from collections.abc import Callable

import anyio

from gateway.core.errors import GatewayError, StoreUnavailable
from gateway.core.jobs import Chunk, Job
from gateway.pipeline import CallerStalled
from gateway.ports import Downstream, Headers, JobStore

CHUNK_S = 0.25
"""How long events are gathered into a chunk: what a reader that follows may be behind."""

GATHERED_MAX = 1024 * 1024
"""Bytes that may wait to be written, while the store is slow or away; above it the backend waits."""

AGAIN_S = 1.0
"""Time between two tries to write while the store is away."""


class JobLost(CallerStalled):
    """This attempt no longer has the job: another worker has it, it was cancelled, or it is over."""


class JobRecord(Downstream):
    """`ports.Downstream` of one attempt of a job. `run` must run while the answer comes.

    Attributes:
        error: Why an answer that had begun has failed; None while it has not.
        is_lost: Whether the job is no longer this attempt's.
        has_gap: Whether the store has lost what was written: the job has to go on from what is there.
    """

    def __init__(self, store: JobStore, job: Job, *, restarts: bool, on_start: Callable[[], None]) -> None:
        """Write for `job` as it was claimed.

        Args:
            store: Where to.
            job: The job; its number of chunks says where to go on.
            restarts: Whether the answer begins anew, so that what is stored is void.
            on_start: Called when an answer has begun.
        """
        self._store = store
        self._job = job
        self._number = job.chunks
        self._restarts = restarts
        self._on_start = on_start
        self._gathered = bytearray()
        self._unwritten: Chunk | None = None
        self._has_some = anyio.Event()
        self._has_room = anyio.Event()
        self._writing = anyio.Lock()
        self.error: GatewayError | None = None
        self.is_lost = self.has_gap = False

    async def start(self, status: int, headers: Headers) -> None:
        """See `ports.Downstream.start`."""
        self._on_start()

    async def send(self, data: bytes) -> None:
        """See `ports.Downstream.send`. Waits for the store only where much has gathered.

        Raises:
            JobLost: there is no point in going on.
            CallerStalled: nor is there after a gap.
        """
        while len(self._gathered) > GATHERED_MAX and not self._is_over:
            self._has_room = anyio.Event()
            await self._has_room.wait()
        if self._is_over:
            raise JobLost if self.is_lost else CallerStalled
        self._gathered += data
        self._has_some.set()

    async def fail(self, error: GatewayError, code: str) -> None:
        """See `ports.Downstream.fail`. What has come so far stays: the next attempt may go on from it."""
        self.error = error

    async def run(self) -> None:
        """Write what gathers, until cancelled or lost. A store that is away is tried again."""
        while not self._is_over:
            if not self._is_behind:
                self._has_some = anyio.Event()
                await self._has_some.wait()
            await anyio.sleep(CHUNK_S)
            try:
                await self.write()
            except StoreUnavailable:
                await anyio.sleep(AGAIN_S)

    async def write_all(self) -> None:
        """Write all that has come. A store that is away is tried again, until cancelled."""
        while not self._is_over and self._is_behind:
            try:
                await self.write()
            except StoreUnavailable:
                await anyio.sleep(AGAIN_S)

    async def write(self) -> None:
        """Write a chunk: what could not be written before, or else what has gathered.

        Raises:
            StoreUnavailable: it has not been written, or nobody knows; `write` again.
        """
        async with self._writing:
            if self._unwritten is None and self._gathered:
                self._unwritten = self._next_chunk()
            if self._unwritten is not None and not self._is_over:
                await self._append(self._unwritten)
                self._unwritten = None
            self._has_room.set()

    async def _append(self, chunk: Chunk) -> None:
        try:
            is_held = await self._store.append(self._job.id, self._job.attempt, chunk, self._job.claim)
        except ValueError:
            self.has_gap = True
            self.error = StoreUnavailable("The store has lost some of the answer.")
        else:
            self.is_lost = not is_held

    def _next_chunk(self) -> Chunk:
        chunk = Chunk(self._number, self._job.attempt, bytes(self._gathered), self._restarts)
        self._number += 1
        self._restarts = False
        self._gathered.clear()
        return chunk

    @property
    def _is_over(self) -> bool:
        return self.is_lost or self.has_gap

    @property
    def _is_behind(self) -> bool:
        return self._unwritten is not None or bool(self._gathered)

    @property
    def chunks(self) -> int:
        """How many chunks the job has by now."""
        return self._number
