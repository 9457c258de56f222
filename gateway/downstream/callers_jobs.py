"""Jobs as their callers see them: looked up, waited for, followed, cancelled. Their state is in the store."""

import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import anyio
import msgspec

from gateway.core.chat_jobs import whole
from gateway.core.errors import GatewayError, InvalidRequest, ResponseNotFound, StoreUnavailable, StreamBroken
from gateway.core.jobs import Chunk, Job, Lane, expected_start_s, size_of
from gateway.core.responses.draft import Event
from gateway.core.responses.replay import JobFacts, Replay
from gateway.downstream.job_waits import Outage, Waits, rest
from gateway.events import about
from gateway.ports import Clock, JobStore
from gateway.threads import decoded

log = logging.getLogger("gateway.jobs")
T = TypeVar("T")

FOLLOW_S = 10.0
"""How long a follower waits for news before it sends a keep-alive: as between comments
(`pipeline.caller.KEEP_ALIVE_S`)."""

CHUNKS_AT_ONCE = 64
"""Maximum chunks read at once by a follower. A choice: 16 s of an answer as it is written
(`jobs.answer_writer.CHUNK_S`)."""

LONG_BYTES = 262_144
LONG_AT_ONCE = 2
"""Maximum answers of jobs longer than this that are read at once. A choice: twenty of 7 MB at once took the
store's connections, and the time in which it has to answer, from all other callers."""

RETRY_AFTER_S = 5
RETRY_AFTER_MAX_S = 59
"""Limits on the time after which a caller should ask for a job again: not in vain each second, a choice, and
not more than what SDKs obey (`core.waiting.line.RETRY_AFTER_MAX_S`)."""

LANES_FOR_S = 2.0
"""Maximum age of the figures from which expected starts are computed. A choice: reading them takes a script
in the store."""

_NEVER = 2**53
"""More chunks than any job has: integers are exact as floats up to here."""


class CallersJobs:
    """Jobs for their callers; one per process.

    Attributes:
        waits: What waits for jobs.
    """

    def __init__(self, jobs: JobStore, clock: Clock, away_s: Callable[[str], float | None]) -> None:
        """Read jobs from `jobs`.

        `away_s`: seconds until a backend can serve a lane; see `BoxController.away_s`.
        """
        self.waits = Waits()
        self._jobs = jobs
        self._clock = clock
        self._away_s = away_s
        self._lanes: tuple[float, Mapping[str, Lane]] = (float("-inf"), {})
        self._long = anyio.Semaphore(LONG_AT_ONCE)

    async def get(self, key: str | None, id: str) -> Job | None:
        """Return a job of this API key, or None."""
        job = await self._jobs.get(id)
        is_theirs = job is not None and job.new.key == key and not job.new.batch  # not a batch's line
        return job if is_theirs else None

    async def cancel(self, key: str | None, id: str) -> Job | None:
        """Cancel a job of this API key unless it is final. Return its new state, or None."""
        return None if await self.get(key, id) is None else await self._jobs.cancel(id)

    async def delete(self, key: str | None, id: str) -> bool:
        """Delete a job of this API key. Return whether it existed."""
        return await self.get(key, id) is not None and await self._jobs.delete(id)

    # -------------------------------------------------------------- whole

    async def answer(self, job: Job) -> bytes:
        """Return the chat completion of a successful job."""
        job = _kept(await self._jobs.load(job.id), job.id)
        async with self._turn(job, 0):
            chunks = await self._chunks_of_final(job)
            return await decoded(len(job.new.body) + size_of(chunks), partial(whole, job, chunks))

    async def facts(self, job: Job) -> JobFacts:
        """Return the facts of a job."""
        facts = _kept(await self._jobs.facts(job.id), job.id)
        job = replace(job, new=replace(job.new, facts=facts))
        return await decoded(len(facts), partial(JobFacts.of, job))

    async def response(self, job: Job, facts: JobFacts | None = None) -> dict[str, Any]:
        """Return the current response object of a job. `facts`: its facts, if they are known."""
        facts = facts or await self.facts(job)
        async with self._turn(job, 0):
            chunks = await self._chunks_of_final(job) if job.status.is_final else []
            response = await decoded(size_of(chunks), partial(_replayed, facts, job, chunks))
        if not job.status.is_final:
            response["status"] = job.status.value
            response["queue"] = await self.place(job)
        return response

    async def record(self, job: Job, param: str | None = None) -> bytes:
        """Return a finished job in the format in which a synchronous response would be stored.

        `param`: the request parameter that names it, for errors.

        Raises:
            InvalidRequest: it was a chat.
            ResponseNotFound: its conversation is not kept (`store: false`).
        """
        facts = await self.facts(job)
        if facts.is_chat:
            message = "That was a chat, which a response cannot continue: send its messages as `input`."
            if param is None:
                message = "That was a chat, whose messages are not kept as items."
            raise InvalidRequest(message, code="unsupported_parameter", param=param)
        if not facts.conversation:
            raise gone(job.id, param)
        context, said = (facts.conversation.get(name, []) for name in ("context", "input"))
        response = await self.response(job, facts)
        return msgspec.json.encode({"response": response, "context": context, "input": said})

    async def place(self, job: Job) -> Mapping[str, Any]:
        """Return a job's position in the queue and the seconds until its start; None where unknown."""
        now = self._clock.now()
        if now - self._lanes[0] > LANES_FOR_S:
            self._lanes = now, self._lanes[1]  # concurrent callers use the previous figures
            try:
                queue = await self._jobs.queue()
                self._lanes = now, {lane.name: lane for lane in queue.open_lanes}
            except StoreUnavailable:
                self._lanes = now, {}
        lane = job.new.lane
        start_s = expected_start_s(job.position, self._lanes[1].get(lane), self._away_s(lane))
        return {"position": job.position, "expected_start_s": None if start_s is None else round(start_s, 1)}

    # -------------------------------------------------------------- as it is written

    async def finished(self, job: Job, wait_s: float) -> Job:
        """Wait until a job is final, at most `wait_s`, and return its last known state."""
        if wait_s <= 0:
            return job
        with anyio.move_on_after(wait_s):
            while not job.status.is_final:
                try:
                    job = await self.over(job, FOLLOW_S)
                except StoreUnavailable:
                    await rest()
        return job

    async def over(self, job: Job, wait_s: float) -> Job:
        """Wait until a job's status changes, at most `wait_s`, and return its current state."""
        await self._jobs.changed(job.id, _NEVER, wait_s, job.status)
        return await self._again(job)

    async def news(
        self, job: Job, last: Chunk | None, wait_s: float, *, is_placed: bool
    ) -> tuple[Job, Sequence[Chunk]]:
        """Wait for chunks of a job after `last`, at most `wait_s`, and return some.

        If there are none, the job is refreshed: if it has changed, or if its place is wanted (`is_placed`).

        Raises:
            StreamBroken: the store has lost `last`.
        """
        start = 0 if last is None else last.number + 1
        if not await self._jobs.changed(job.id, start, wait_s, job.status):
            return (await self._again(job) if is_placed else job), ()
        chunks = await self._chunks_after(job, last)
        return (job if chunks else await self._again(job)), chunks

    async def events(self, job: Job, after: int) -> AsyncIterator[Sequence[Event]]:
        """Yield the events of a job after number `after`, as they come; an empty batch from time to time.

        The last batch ends with the event that ends the response; or with an error, if the job is gone, the
        store was unreachable for too long, or this process is shutting down. Its number is that of the event
        before it: follow from there.
        """
        last = after
        try:
            async for new in self._events(job, after):
                last = new[-1]["sequence_number"] if new else last
                yield new
        except GatewayError as error:
            log.warning(
                "a follower of job %s was cut off: %s",
                job.id,
                error.message,
                extra=about("follower_cut", id=job.id, code=error.code),
            )
            said = {"code": error.code, "message": error.message, "param": error.param}
            typed = {"type": error.type, **said}  # on which SDKs raise: see `Draft.fail`
            yield ({"type": "error", **said, "error": typed, "sequence_number": last},)

    async def _events(self, job: Job, after: int) -> AsyncIterator[Sequence[Event]]:
        """Yield the events of a job.

        Raises:
            ResponseNotFound: it is gone.
            StoreUnavailable: the store was unreachable for too long.
            StreamBroken: the store has lost some of the answer.
            Draining: this process is shutting down.
        """
        outage, is_news = Outage(self._clock), True
        replay: Replay | None = None
        while True:
            try:
                replay = replay or Replay(await self.facts(job))
                if not is_news:
                    with self.waits.until_end():
                        if await self._jobs.changed(job.id, replay.chunks, FOLLOW_S, job.status):
                            job = await self._again(job)
                async with self._turn(job, replay.chunks):
                    chunks = await self._chunks_after(job, replay.last)
                outage.over()
            except StoreUnavailable as error:
                yield ()
                with self.waits.until_end():
                    await outage.wait(error)
                self.waits.check_open()
                continue
            told = await decoded(size_of(chunks), partial(replay.tell, job, chunks))
            new = [event for event in told if event["sequence_number"] > after]
            is_news = bool(chunks)
            if new or not is_news:
                yield new
            if replay.is_over:
                return
            self.waits.check_open()

    # -------------------------------------------------------------- what is stored

    async def _chunks_after(self, job: Job, last: Chunk | None) -> Sequence[Chunk]:
        """Return some of a job's chunks after `last`, which is read again.

        A store that has lost it (a failover to a replica that lags) is given others in its place, and what
        follows them does not follow what a reader has seen.

        Raises:
            StreamBroken: it is not there any more.
            ResponseNotFound: nor is the job; or it has ended, and the store has lost the end of its answer.
        """
        start = 0 if last is None else last.number + 1
        if last is None:
            chunks = await self._jobs.chunks(job.id, 0, CHUNKS_AT_ONCE)
        else:
            known, *chunks = await self._jobs.chunks(job.id, last.number, CHUNKS_AT_ONCE + 1) or (None,)
            if known != last:
                await self._again(job)
                raise StreamBroken(
                    "The store has lost some of the answer, which is generated again from there: discard "
                    f"what came before. The new answer will be at /v1/responses/{job.id}."
                )
        if not chunks and job.status.is_final and start < job.chunks:
            job = await self._again(job)  # an operator may have retried it
            if job.status.is_final and start < job.chunks:
                raise gone(job.id)
        return chunks

    def _turn(self, job: Job, start: int) -> AbstractAsyncContextManager[object]:
        """Return the turn to read the stored chunks of a job from number `start` on."""
        is_long = start < job.chunks and job.size_bytes > LONG_BYTES
        return self._long if is_long else nullcontext()

    async def _again(self, job: Job) -> Job:
        return _kept(await self._jobs.get(job.id), job.id)

    async def _chunks_of_final(self, job: Job) -> Sequence[Chunk]:
        chunks = await self._jobs.all_chunks(job.id)
        if len(chunks) < job.chunks:  # it has just expired
            raise gone(job.id)
        return chunks


def retry_after_s(place: Mapping[str, Any]) -> int:
    """Return when to ask again for a job at this `CallersJobs.place`."""
    return max(RETRY_AFTER_S, min(RETRY_AFTER_MAX_S, int(place["expected_start_s"] or 0)))


def gone(id: str, param: str | None = None) -> ResponseNotFound:
    """Return the error for an id that does not exist for this caller."""
    message = f"No response {id[:64]!r} is kept here for this key: it is unknown, deleted or expired."
    return ResponseNotFound(message, param=param)


def _kept(found: T | None, id: str) -> T:
    """Return what the store has of a job. Raises ResponseNotFound if it has nothing."""
    if found is None:
        raise gone(id)
    return found


def _replayed(facts: JobFacts, job: Job, chunks: Sequence[Chunk]) -> dict[str, Any]:
    replay = Replay(facts)
    replay.tell(job, chunks)
    return dict(replay.response)
