"""Serves a caller that waits for its job: comments while it waits, then the stored answer.

The job depends neither on the caller nor on this process. The caller keeps its connection open, and errors
reach it as without the queue: as a status code before the response has begun, as an event after that.
"""

import logging
from collections.abc import Mapping
from functools import partial
from typing import Any

import anyio

from gateway.core.chat_jobs import ChatReplay, chat_id, failure
from gateway.core.errors import (
    AtCapacity,
    Draining,
    GatewayError,
    ResponseNotFound,
    StoreUnavailable,
    StreamBroken,
)
from gateway.core.jobs import Job, JobStatus, size_of
from gateway.core.policy import OnDisconnect
from gateway.core.sse import DONE
from gateway.core.value import valueclass
from gateway.downstream.callers_jobs import CallersJobs
from gateway.downstream.job_waits import Outage
from gateway.downstream.relay import HttpDownstream, send_body
from gateway.events import about
from gateway.pipeline.caller import KEEP_ALIVE, KEEP_ALIVE_S, SSE_HEADERS, while_caller_reads
from gateway.ports import Clock, Headers
from gateway.threads import decoded

log = logging.getLogger("gateway.downstream")

PLACE_S = 2.0
"""Polling interval for a caller that wants to know its position. A choice: each look is a command of the
store."""

LEAVE_S = 5.0
"""Time limit for cancelling the job of a caller that has left. A choice, more than twice what one command may
take."""

_LOOK_S = 60.0
"""Maximum polling interval if nothing else is due. A choice: a backstop, since changes are told."""


def for_submitter(error: GatewayError) -> GatewayError:
    """Return the error for the caller who submitted a job: it never saw the id that is not found any more."""
    if not isinstance(error, ResponseNotFound):
        return error
    message = "The request is no longer in the store: it was deleted, or the store has lost it. Please retry."
    return StoreUnavailable(message, retry_after_s=1)


@valueclass(frozen=True, slots=True)
class Waiter:
    """The state kept in memory while a caller waits for its job; the request itself is in the store.

    Attributes:
        key: Name of its API key, or None.
        headers: Response headers that describe the decision, for answers and errors.
        stream: Whether to stream the answer; `include_usage`: including the usage event.
        silent_until: When to send the headers of a stream, and comments from then on. Monotonic seconds.
        deadline: Latest time for the first token, or None. Monotonic seconds.
        wants_place: Whether to send its position in the queue.
        on_disconnect: What happens to the job if its caller leaves.
    """

    key: str | None
    headers: Headers
    stream: bool
    include_usage: bool
    silent_until: float
    deadline: float | None
    wants_place: bool
    on_disconnect: OnDisconnect


class WaitingCaller:
    """Serves one waiting caller."""

    def __init__(self, waiter: Waiter, jobs: CallersJobs, downstream: HttpDownstream, clock: Clock) -> None:
        """Serve `waiter` through `downstream`."""
        self._waiter = waiter
        self._jobs = jobs
        self._downstream = downstream
        self._clock = clock
        self._comment_at = waiter.silent_until
        self._is_open = False
        self._place_said = b""
        self._outage = Outage(clock)

    async def serve(self, job: Job) -> None:
        """Answer with the result of a job, to completion.

        Raises:
            GatewayError: nothing has been sent yet.
            CallerStalled, OSError: the caller is gone or no longer reads.
        """
        try:
            if self._waiter.stream:
                await self._stream(job)
            else:
                await self._whole(job)
        except GatewayError as error:
            await self._fail(for_submitter(error))

    async def cut(self, job: Job) -> None:
        """Answer that this process is shutting down, after `serve` was cancelled.

        Raises:
            Draining: nothing has been sent yet.
            CallerStalled, OSError: the caller is gone or no longer reads.
        """
        await self._fail(Draining(f"This gateway is shutting down. The answer will be {_where(job)}."))

    async def _fail(self, error: GatewayError) -> None:
        error.headers = (*self._waiter.headers, *error.headers)
        if not self._is_open:
            raise error
        with while_caller_reads():
            await self._downstream.fail(error, error.code)
            await self._downstream.finish()

    # -------------------------------------------------------------- a non-streamed answer

    async def _whole(self, job: Job) -> None:
        body = b""
        while not body:
            if (failed := failure(job)) is not None:
                raise failed
            try:
                if job.status.is_final:
                    body = await self._jobs.answer(job)
                else:
                    job = await self._jobs.over(job, self._wait_s(job, has_begun=job.chunks > 0))
                self._outage.over()
            except StoreUnavailable as error:
                await self._outage.wait(error)
            job = await self._in_time(job, has_begun=job.chunks > 0)
        await send_body(body, self._downstream, headers=self._waiter.headers)

    # -------------------------------------------------------------- a stream

    async def _stream(self, job: Job) -> None:
        include_usage = self._waiter.include_usage
        replay = ChatReplay(job, include_usage=include_usage)
        await self._comment(job, has_begun=False)
        while not (job.status.is_final and replay.chunks >= job.chunks):
            wait_s = self._wait_s(job, has_begun=replay.chunks > 0)
            try:
                job, chunks = await self._jobs.news(
                    job, replay.last, wait_s, is_placed=self._waiter.wants_place
                )
                self._outage.over()
            except StoreUnavailable as error:
                await self._outage.wait(error)
                chunks = ()
            if data := await decoded(size_of(chunks), partial(replay.tell, chunks)):
                await self._send(data)
            if replay.is_broken:
                raise StreamBroken(
                    "The answer broke off, and was started again: discard what came before. "
                    f"The new answer will be {_where(job)}."
                )
            job = await self._in_time(job, has_begun=replay.chunks > 0)
            await self._comment(job, has_begun=replay.chunks > 0)
        if (failed := failure(job)) is not None:
            raise failed
        await self._send(DONE)
        await self._downstream.finish()

    async def _comment(self, job: Job, *, has_begun: bool) -> None:
        """Send a comment if one is due."""
        if self._waiter.wants_place and not has_begun:
            place = await self._jobs.place(job) if job.status is JobStatus.QUEUED else None
            said = _place_comment(place)
            if said != self._place_said:
                self._place_said = said
                await self._send(said)
        if self._clock.now() >= self._comment_at:
            await self._send(KEEP_ALIVE)

    async def _send(self, data: bytes) -> None:
        """Send a part of the stream, preceded by the headers if it is the first."""
        with while_caller_reads():
            if not self._is_open:
                self._is_open = True
                await self._downstream.start(200, (*SSE_HEADERS, *self._waiter.headers))
            await self._downstream.send(data)
        self._comment_at = self._clock.now() + KEEP_ALIVE_S

    # -------------------------------------------------------------- time

    def _wait_s(self, job: Job, *, has_begun: bool) -> float:
        """Return how long to wait for news until something else is due."""
        due = [self._clock.now() + _LOOK_S]
        if self._waiter.stream:
            due.append(self._comment_at)
        if self._waiter.deadline is not None and not has_begun:
            due.append(self._waiter.deadline)
        if self._waiter.stream and self._waiter.wants_place and job.status is JobStatus.QUEUED:
            due.append(self._clock.now() + PLACE_S)
        return max(0.0, min(due) - self._clock.now())

    async def _in_time(self, job: Job, *, has_begun: bool) -> Job:
        """Return the job, or cancel it if its first token is too late for its caller.

        Raises:
            AtCapacity: it was cancelled.
        """
        deadline = self._waiter.deadline
        if has_begun or deadline is None or self._clock.now() < deadline or job.status.is_final:
            return job
        try:
            job = await self._jobs.cancel(self._waiter.key, job.id) or job
        except StoreUnavailable as error:
            log.warning(
                "job %s: its caller stopped waiting, but it could not be cancelled and keeps running: %s",
                job.id,
                error,
                extra=about("job_not_cancelled", id=job.id),
            )
        if job.status.is_final and job.status is not JobStatus.CANCELLED:
            return job
        raise AtCapacity(
            "The request's own deadline has passed without an answer.", code="deadline", retry_after_s=5
        )

    # -------------------------------------------------------------- disconnects

    async def left(self, job: Job) -> None:
        """Apply `on_disconnect` to a job whose caller has left."""
        if self._waiter.on_disconnect is OnDisconnect.FINISH:
            return
        try:
            with anyio.fail_after(LEAVE_S, shield=True):
                await self._jobs.cancel(self._waiter.key, job.id)
        except (StoreUnavailable, TimeoutError) as error:
            log.warning(
                "job %s: its caller has left, but it could not be cancelled and keeps running: %s",
                job.id,
                str(error) or f"no answer within {LEAVE_S:g} s",
                extra=about("job_not_cancelled", id=job.id),
            )


def _where(job: Job) -> str:
    return f"at /v1/chat/completions/{chat_id(job.id)}"


def _place_comment(place: Mapping[str, Any] | None) -> bytes:
    """Return the comment with a job's position. `place` is None if the job is no longer queued."""
    if place is None:
        return b": queue position=0 expected_start_s=0\n\n"
    start_s = place["expected_start_s"]
    expected = "unknown" if start_s is None else f"{start_s:g}"
    return f": queue position={place['position']} expected_start_s={expected}\n\n".encode()
