"""Processes batches: reads their input files, submits lines as jobs, and collects the results.

Every gateway process runs a `BatchRunner`. A batch is processed by one runner at a time, which holds a lease
on it. Its progress is kept only in the store, so that another process can resume it at any point. Commands of
the store cannot be cancelled, so every loop of them checks whether the runner has been stopped.

Only some lines of a batch are jobs at any time, and further lines follow as these end, so that a batch of
50,000 lines fills neither the queue nor the store. These jobs have the lowest priority.
"""

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import anyio
import anyio.to_thread
from anyio.lowlevel import checkpoint_if_cancelled

from gateway.core.batch_answers import answer_of, refusal, unreadable
from gateway.core.batches import (
    Batch,
    BatchClaim,
    BatchLine,
    BatchLineError,
    BatchLost,
    BatchSnapshot,
    BatchStatus,
    InputReader,
    LineSplitter,
    RawLine,
    RunningLine,
    answered_line,
    request_of,
    unanswered_line,
)
from gateway.core.chat_jobs import failure
from gateway.core.errors import CallerError, GatewayError, StoreUnavailable
from gateway.core.jobs import Job, NewJob, Quota, size_of
from gateway.core.value import valueclass
from gateway.events import about
from gateway.jobs.answer_writer import AGAIN_S
from gateway.ports import BatchStore, FileStore, JobStore
from gateway.tasks import TasksBeside
from gateway.threads import INLINE_BYTES, decoded

log = logging.getLogger("gateway.jobs")

_CUT = "input_file_lost"
RELEASE_S = 5.0
"""How long a stopped runner may take to release its batches. A choice: one command of the store
(`store.batches.COMMAND_S`)."""

WRITTEN_MAX = 32_768
"""Maximum bytes of result lines written at once. A choice: a line of a cancelled batch takes 200, and 40 us
to read and answer, while the event loop stands still. Long lines, which take longer to read, are fewer: not
many more bytes than those of one that is read on the event loop."""

RENEW_S = 3.0
"""Interval for renewing the lease on a batch, apart from each step that does. A choice: a third of the lease
(`store.batches.LEASE_S`)."""

SUBMITTED_MAX = 32
"""Maximum lines submitted between two checks of a batch. A choice: a cancelled batch is noticed soon."""

COLLECTED_AT_ONCE = 2
"""Maximum results that are read at once, each with its request: those of all batches may end together. A
choice that bounds memory and connections, as for answers (`worker.READS_AT_ONCE`)."""


@valueclass(frozen=True, slots=True)
class BatchRules:
    """Limits for processing batches.

    Attributes:
        queued_max: Maximum number of lines per API key that are jobs at once.
        bytes_max: Maximum bytes of those jobs.
        taken_max: Maximum number of batches that one process works on.
        look_s: Maximum interval between two checks of a batch, or for new batches.
        keep_s: How long the result of a line is kept for collection, beyond the batch's own deadline.
    """

    queued_max: int = 1000
    bytes_max: int = 256 * 1024 * 1024
    taken_max: int = 32
    look_s: float = 0.5
    keep_s: float = 7 * 86_400.0


ReadLine = Callable[[Batch, BatchLine], Awaitable[NewJob]]
"""Returns the job for a line. Raises GatewayError; a CallerError if the line itself is invalid."""


class BatchRunner:
    """Processes batches in one process."""

    def __init__(
        self,
        batches: BatchStore,
        files: FileStore,
        jobs: JobStore,
        read_line: ReadLine,
        rules: BatchRules,
    ) -> None:
        """Process the batches of a store."""
        self._batches, self._files, self._jobs = batches, files, jobs
        self._read_line = read_line
        self._rules = rules
        self._quota = Quota(rules.queued_max, rules.bytes_max)
        self._taken = 0
        # One at a time: each thread that computes delays the event loop by some 5 ms whenever it goes on.
        self._validating = anyio.CapacityLimiter(1)
        self._collecting = anyio.Semaphore(COLLECTED_AT_ONCE)
        self._scope = anyio.CancelScope()
        self._ended = anyio.Event()

    async def run(self) -> None:
        """Process batches until stopped or cancelled."""
        try:
            with self._scope:
                async with anyio.create_task_group() as tasks:
                    while True:
                        await checkpoint_if_cancelled()
                        claim = await self._next()
                        if claim is None:
                            await anyio.sleep(self._rules.look_s)
                        else:
                            self._taken += 1
                            tasks.start_soon(self._work, claim)
        finally:
            self._ended.set()

    async def stop(self) -> None:
        """Stop a running `run`, and return when all batches have been released."""
        self._scope.cancel()
        await self._ended.wait()

    async def _next(self) -> BatchClaim | None:
        if self._taken >= self._rules.taken_max:
            return None
        try:
            return await self._batches.take()
        except StoreUnavailable:
            await anyio.sleep(AGAIN_S)
            return None

    # ------------------------------------------------------------ one batch

    async def _work(self, claim: BatchClaim) -> None:
        try:
            async with TasksBeside(BatchLost, StoreUnavailable) as tasks:
                tasks.start_soon(self._renew, claim)
                await self._work_off(claim)
        except BatchLost:
            log.info(
                "batch %s: no longer this process's",
                claim.batch.id,
                extra=about("batch_lost", id=claim.batch.id),
            )
            await self._let_go(claim)  # if the store has lost a step, no other runner holds the batch
        except StoreUnavailable:
            await self._let_go(claim)  # the next runner resumes from what is stored
            await anyio.sleep(AGAIN_S)
        except anyio.get_cancelled_exc_class():
            with anyio.move_on_after(RELEASE_S, shield=True):
                await self._let_go(claim)
            raise
        except Exception:  # the lease is left to expire, so that the batch is not resumed in a tight loop
            log.exception(
                "batch %s failed inside the gateway; it will be resumed",
                claim.batch.id,
                extra=about("internal_error", id=claim.batch.id),
            )
        finally:
            self._taken -= 1

    async def _renew(self, claim: BatchClaim) -> None:
        """Renew the lease while other batches and requests leave a step little of the processor."""
        while True:
            await anyio.sleep(RENEW_S)
            with suppress(BatchLost, StoreUnavailable):  # noticed by the step itself
                await self._batches.look(claim)

    async def _let_go(self, claim: BatchClaim) -> None:
        with suppress(StoreUnavailable):  # its lease expires by itself
            await self._batches.release(claim)

    async def _work_off(self, claim: BatchClaim) -> None:
        if BatchStatus.IN_PROGRESS not in claim.batch.times and not await self._validate(claim):
            return
        lines = _Lines(self._files, claim)
        is_stopped = False
        while True:
            await checkpoint_if_cancelled()
            claim = lines.claim
            snapshot = await self._batches.look(claim)
            for line in snapshot.ended:
                async with self._collecting:
                    await self._collect(claim, snapshot, line)
            is_moving = bool(snapshot.ended)
            if snapshot.status is BatchStatus.FINALIZING:
                await self._move(claim, BatchStatus.FINALIZING, BatchStatus.COMPLETED)
                return
            if snapshot.is_given_up:
                if not is_stopped:
                    await self._stop_jobs(claim, snapshot)
                    is_stopped = True
                is_moving = await self._write_rest(snapshot, lines) or is_moving
            else:
                is_moving = await self._submit_some(snapshot, lines) or is_moving
            if lines.is_over and not is_moving and not snapshot.running:
                new = _end_of(snapshot)
                if new is BatchStatus.FINALIZING and await self._fail_if_cut(claim):
                    return
                if await self._move(claim, snapshot.status, new) and new.is_final:
                    return
            elif not is_moving:
                await anyio.sleep(self._rules.look_s)

    async def _validate(self, claim: BatchClaim) -> bool:
        """Validate the whole file before any of its lines runs. Return whether the batch may run."""
        reader, splitter = InputReader(claim.batch.endpoint), LineSplitter()

        def read(raws: Iterable[RawLine]) -> None:
            for raw in raws:
                reader.read(raw)
                if reader.is_over:
                    return

        offset = 0
        while not reader.is_over:
            snapshot = await self._batches.look(claim)
            if snapshot.is_given_up:
                await self._move(claim, snapshot.status, _end_of(snapshot))
                return False
            piece = await self._files.read(claim.batch.input_file_id, offset)
            offset += len(piece)
            raws = splitter.feed(piece) if piece else splitter.end()
            await anyio.to_thread.run_sync(read, raws, limiter=self._validating)
            if not piece:
                break
        errors: Sequence[BatchLineError] = reader.errors
        if not reader.is_over:
            reader.end()
            file = await self._files.get(claim.batch.input_file_id)
            if file is not None and offset < file.size_bytes:
                errors = [_cut("None of its requests was run.")]
        new = BatchStatus.FAILED if errors else BatchStatus.IN_PROGRESS
        log.info(
            "batch %s: %d requests, %d errors",
            claim.batch.id,
            reader.count,
            len(errors),
            extra=about("batch_read", id=claim.batch.id, requests=reader.count, errors=len(errors)),
        )
        total = 0 if errors else reader.count
        moved = await self._move(claim, BatchStatus.VALIDATING, new, total=total, errors=errors)
        if not moved:  # it was cancelled in the meantime
            await self._move(claim, BatchStatus.CANCELLING, BatchStatus.CANCELLED)
        return moved and not errors

    async def _fail_if_cut(self, claim: BatchClaim) -> bool:
        """End a batch as failed if it has had fewer lines than were validated. Return whether it is over."""
        batch = await self._batches.get(claim.batch.id)
        missing = 0 if batch is None else batch.total - batch.completed - batch.failed
        if batch is None or missing <= 0:
            return False
        errors = [_cut(f"{missing} of {batch.total} requests were not run.")]
        return await self._move(
            claim, BatchStatus.IN_PROGRESS, BatchStatus.FAILED, total=batch.total, errors=errors
        )

    async def _move(
        self,
        claim: BatchClaim,
        old: BatchStatus,
        new: BatchStatus,
        *,
        total: int | None = None,
        errors: Sequence[BatchLineError] = (),
    ) -> bool:
        """Change a batch's status from `old` to `new`, and log its end; see `ports.BatchStore.move`."""
        moved = await self._batches.move(claim, old, new, total=total, errors=errors)
        if moved and any(error.code == _CUT for error in errors):
            log.error(
                "batch %s: the store has lost a part of its input file",
                claim.batch.id,
                extra=about("batch_input_lost", id=claim.batch.id, file=claim.batch.input_file_id),
            )
        if moved and new.is_final:
            log.info(
                "batch %s: %s",
                claim.batch.id,
                new.value,
                extra=about("batch_ended", id=claim.batch.id, status=new.value),
            )
        return moved

    # ------------------------------------------------------------ submitting lines

    async def _submit_some(self, snapshot: BatchSnapshot, lines: "_Lines") -> bool:
        """Submit the next lines, as far as there is room. Return whether any was consumed."""
        for count in range(SUBMITTED_MAX):
            await checkpoint_if_cancelled()
            claim, line = lines.claim, await lines.peek()
            if line is None:
                return count > 0
            try:
                lines.job = lines.job or await self._read_line(claim.batch, line)
            except CallerError as error:
                written = _refused(claim.batch, line, error)
                await self._batches.write(claim, line.number, lines.end, 1, written)
            except StoreUnavailable:
                raise
            except GatewayError as error:
                log.info(
                    "batch %s waits: %s",
                    claim.batch.id,
                    error.message,
                    extra=about("batch_waits", id=claim.batch.id, code=error.code),
                )
                return count > 0
            else:
                left_s = max(1.0, snapshot.left_s)
                job = replace(lines.job, expires_s=left_s, keep_s=left_s + self._rules.keep_s)
                running = RunningLine(job.id, line.number, line.custom_id)
                if not await self._batches.submit(claim, running, lines.end, job, self._quota):
                    return count > 0
            lines.go_on()
        return True

    # ------------------------------------------------------------ collecting results

    async def _collect(self, claim: BatchClaim, snapshot: BatchSnapshot, line: RunningLine) -> None:
        job = await self._jobs.load(line.job_id)
        if job is not None and not job.status.is_final:  # an operator has retried it
            await self._batches.collect(claim, line.job_id, b"", is_answer=False)
            return
        chunks = () if job is None else await self._jobs.all_chunks(job.id)
        if job is not None and len(chunks) < job.chunks and failure(job) is None:
            job = None  # the store has lost some of its answer
        written, is_answer = _unanswered(claim.batch, snapshot, line, job), False
        if job is not None:
            render = partial(answer_of, claim.batch.endpoint, job, chunks)
            try:
                answer = await decoded(job.new.size_bytes + size_of(chunks), render)
            except (ValueError, TypeError, KeyError, RecursionError):
                log.exception(
                    "job %s: its answer cannot be read", job.id, extra=about("answer_unreadable", id=job.id)
                )
                answer = unreadable()
            if answer is not None:
                status, body = answer
                line_id = claim.batch.line_id(line.number)
                write = partial(answered_line, line_id, line.custom_id, status, job.id, body)
                written = await decoded(len(body), write)
                is_answer = status < 400
        await self._batches.collect(claim, line.job_id, written, is_answer=is_answer)

    # ------------------------------------------------------------ cancellation and expiry

    async def _stop_jobs(self, claim: BatchClaim, snapshot: BatchSnapshot) -> None:
        """Cancel running jobs; they are collected like any others."""
        for line in await self._batches.running(claim.batch.id):
            await checkpoint_if_cancelled()
            if await self._jobs.cancel(line.job_id) is None:
                written = _unanswered(claim.batch, snapshot, line, None)
                await self._batches.collect(claim, line.job_id, written, is_answer=False)

    async def _write_rest(self, snapshot: BatchSnapshot, lines: "_Lines") -> bool:
        """Write error lines for the next lines, which will not run. Return whether there were any."""
        claim = lines.claim
        written: list[bytes] = []
        read, size, number, end = 0, 0, 0, 0
        while read < INLINE_BYTES and size < WRITTEN_MAX and (line := await lines.peek()) is not None:
            number, end = line.number, lines.end
            written.append(_unanswered(claim.batch, snapshot, line, None))
            read += len(line.body)
            size += len(written[-1])
            lines.go_on()
        if written:
            await self._batches.write(claim, number, end, len(written), b"".join(written))
        return bool(written)


class _Lines:
    """Reads the remaining lines of a batch's input file.

    Attributes:
        claim: The claim on the batch, including its last processed line.
        end: Offset of the line after the next one.
        job: The job for the next line, if already known.
        is_over: Whether there are no more lines.
    """

    def __init__(self, files: FileStore, claim: BatchClaim) -> None:
        self.claim = claim
        self._files, self._file_id = files, claim.batch.input_file_id
        self._offset = claim.offset
        self._splitter = LineSplitter(claim.number, claim.offset)
        self._endpoint = claim.batch.endpoint
        self._raws: deque[RawLine] = deque()
        self._is_read = False
        self._next: BatchLine | None = None
        self.end = claim.offset
        self.job: NewJob | None = None

    @property
    def is_over(self) -> bool:
        return self._is_read and not self._raws and self._next is None

    async def peek(self) -> BatchLine | None:
        """Return the next line without consuming it; None at the end."""
        while self._next is None and not self.is_over:
            if not self._raws:
                await self._read_on()
                continue
            raw = self._raws.popleft()
            size = 0 if raw.data is None else len(raw.data)
            read = partial(request_of, raw, self._endpoint, {})  # the file has been validated before
            found = await decoded(size, read)
            if isinstance(found, BatchLineError):
                # Nested too deeply for this stack; a thread's stack has room.
                found = await anyio.to_thread.run_sync(read)
            if isinstance(found, BatchLine):
                self._next, self.end = found, raw.end
        return self._next

    def go_on(self) -> None:
        """Consume the next line."""
        if self._next is not None:
            self.claim = replace(self.claim, number=self._next.number)
        self._next = self.job = None

    async def _read_on(self) -> None:
        piece = await self._files.read(self._file_id, self._offset)
        self._offset += len(piece)
        self._is_read = not piece
        self._raws.extend(self._splitter.feed(piece) if piece else self._splitter.end())


def _end_of(snapshot: BatchSnapshot) -> BatchStatus:
    """Return the status that follows once no line of a batch is left to run."""
    if snapshot.status is BatchStatus.CANCELLING:
        return BatchStatus.CANCELLED
    return BatchStatus.EXPIRED if snapshot.is_due else BatchStatus.FINALIZING


def _cut(consequence: str) -> BatchLineError:
    """Return the error of an input file of which the store has lost a part."""
    return BatchLineError(_CUT, f"The store has lost a part of the input file. {consequence}")


def _refused(batch: Batch, line: BatchLine, error: CallerError) -> bytes:
    """Return the error line for a request that was rejected before it became a job."""
    status, body = refusal(error)
    line_id = batch.line_id(line.number)
    return answered_line(line_id, line.custom_id, status, line_id, body)


def _unanswered(
    batch: Batch, snapshot: BatchSnapshot, line: BatchLine | RunningLine, job: Job | None
) -> bytes:
    """Return the error line for a request without an answer."""
    has_expired = job is not None and job.error is not None and job.error.code == "job_expired"
    if snapshot.status is BatchStatus.CANCELLING:
        code, message = "batch_cancelled", "The batch was cancelled before this request had ended."
    elif snapshot.is_due or has_expired:
        code, message = "batch_expired", "The batch expired before this request had ended."
    elif job is None:
        code, message = "request_lost", "The result of this request was lost."
    else:
        code, message = "request_cancelled", "This request was cancelled by an operator."
    return unanswered_line(batch.line_id(line.number), line.custom_id, code, message)
