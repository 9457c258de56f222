"""The downstream side of a job: writes the answer of a backend to the store, chunk by chunk."""

from collections.abc import Callable

import anyio

from gateway.core.errors import GatewayError, StoreUnavailable, UpstreamFailed
from gateway.core.jobs import Chunk, Job
from gateway.core.sse import KEPT_BYTES_MAX
from gateway.pipeline import CallerStalled
from gateway.ports import Downstream, Headers, JobStore

CHUNK_S = 0.25
"""How long events are collected into a chunk. A choice: the maximum delay for a client that follows the
answer, against four commands a second per job (docs/store.md#size-of-jobs)."""

GATHERED_MAX = 1024 * 1024
"""Maximum unwritten bytes while the store is slow or unreachable; above this, backpressure is applied. A
choice that bounds memory."""

AGAIN_S = 1.0
"""Interval between attempts while the store is unreachable. A choice: soon, and no load on a store that comes
back."""


SOME_LOST = "The store has lost some of the answer."
"""What is said of an attempt whose chunks are not all there: after a failover to a lagging replica."""


class JobLost(CallerStalled):
    """This attempt no longer holds the job: another worker has it, it was cancelled, or it is final."""


class AnswerWriter(Downstream):
    """`ports.Downstream` of one attempt at a job. `run` must be running while the answer arrives.

    Attributes:
        chunks: The job's current number of chunks.
        error: Why an answer failed after it had begun; None if it has not.
        is_lost: Whether this attempt no longer holds the job.
    """

    def __init__(self, store: JobStore, job: Job, *, restarts: bool, on_start: Callable[[], None]) -> None:
        """Write the answer of `job` as it was claimed.

        Args:
            store: Where to write it.
            job: The job; its number of chunks is where to continue.
            restarts: Whether the answer starts over, which invalidates stored chunks.
            on_start: Called when an answer has begun.
        """
        self._store = store
        # Not the job: the end of `run` is an error in a cycle, which would hold the body for long.
        self._id, self._attempt, self._claim = job.id, job.attempt, job.claim
        self.chunks = job.chunks
        self._restarts = restarts
        self._on_start: Callable[[], None] | None = on_start
        self._bytes = 0
        self._gathered = bytearray()
        self._unwritten: Chunk | None = None
        self._has_some = anyio.Event()
        self._has_room = anyio.Event()
        self.error: GatewayError | None = None
        self.is_lost = False
        self._has_gap = False  # the store has lost chunks: the job must continue from the stored ones

    async def start(self, status: int, headers: Headers) -> None:
        """See `ports.Downstream.start`."""
        if self._on_start is not None:
            self._on_start()

    async def send(self, data: bytes) -> None:
        """See `ports.Downstream.send`. Waits for the store only if too much is unwritten.

        Raises:
            JobLost: the attempt no longer holds the job.
            CallerStalled: the store has lost chunks.
            UpstreamFailed: the answer is too long.
        """
        self._bytes += len(data)
        if self._bytes > KEPT_BYTES_MAX:
            raise UpstreamFailed("The answer of the backend is too long.")
        while len(self._gathered) > GATHERED_MAX and not self._is_over:
            self._has_room = anyio.Event()
            await self._has_room.wait()
        if self._is_over:
            raise JobLost if self.is_lost else CallerStalled
        self._gathered += data
        self._has_some.set()

    async def fail(self, error: GatewayError, code: str) -> None:
        """See `ports.Downstream.fail`. What was received is kept: the next attempt may continue it."""
        self.error = error

    async def run(self) -> None:
        """Write chunks until cancelled, lost or stopped by a gap. Retries while the store is unreachable."""
        try:
            while not self._is_over:
                if not self._is_behind:
                    self._has_some = anyio.Event()
                    await self._has_some.wait()
                await anyio.sleep(CHUNK_S)
                try:
                    await self._write()
                except StoreUnavailable:
                    await anyio.sleep(AGAIN_S)
        finally:
            self._on_start = None

    async def write_all(self) -> None:
        """Write everything received. Retries while the store is unreachable, until cancelled."""
        while not self._is_over and self._is_behind:
            try:
                await self._write()
            except StoreUnavailable:
                await anyio.sleep(AGAIN_S)

    async def _write(self) -> None:
        """Write one chunk: the one that failed before, or else everything collected.

        Raises:
            StoreUnavailable: it may not have been written; call `_write` again.
        """
        if self._unwritten is None and self._gathered:
            self._unwritten = self._next_chunk()
        if self._unwritten is not None and not self._is_over:
            await self._append(self._unwritten)
            self._unwritten = None
        self._has_room.set()

    async def _append(self, chunk: Chunk) -> None:
        try:
            is_held = await self._store.append(self._id, self._claim, chunk)
        except ValueError:
            self._has_gap = True
            self.error = StoreUnavailable(SOME_LOST)
        else:
            self.is_lost = not is_held

    def _next_chunk(self) -> Chunk:
        chunk = Chunk(self.chunks, self._attempt, bytes(self._gathered), self._restarts)
        self.chunks += 1
        self._restarts = False
        self._gathered.clear()
        return chunk

    @property
    def _is_over(self) -> bool:
        return self.is_lost or self._has_gap

    @property
    def _is_behind(self) -> bool:
        return self._unwritten is not None or bool(self._gathered)
