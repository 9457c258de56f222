"""Background jobs: submitting, polling, following and cancelling them. Their state is in the store."""

import logging
import random
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from dataclasses import field, replace
from functools import partial
from typing import Any

import anyio
import msgspec

from gateway.core.chat_jobs import whole
from gateway.core.decision import Decision
from gateway.core.errors import (
    Draining,
    GatewayError,
    IdempotencyKeyReused,
    InvalidRequest,
    JobBytesFull,
    JobRefused,
    ResponseNotFound,
    StoreUnavailable,
    StreamBroken,
    let_go,
)
from gateway.core.idempotency import Idempotency
from gateway.core.jobs import (
    Chunk,
    Job,
    JobPriority,
    Lane,
    NewJob,
    Quota,
    Refusal,
    expected_start_s,
    lane_of,
    model_and_class,
    size_of,
)
from gateway.core.request import Changes, Estimate
from gateway.core.responses.draft import Event
from gateway.core.responses.replay import JobFacts, Replay
from gateway.core.usage import Ending, RequestRecord
from gateway.core.value import valueclass
from gateway.events import about
from gateway.pipeline import Pipeline
from gateway.ports import Clock, Headers, Incoming, JobStore, Recorder
from gateway.threads import decoded

log = logging.getLogger("gateway.jobs")

FOLLOW_S = 10.0
"""How long a follower waits for news before it sends a keep-alive: as between comments
(`pipeline.caller.KEEP_ALIVE_S`)."""

AGAIN_S = 1.0, 3.0
"""Shortest and longest interval between attempts while the store is unreachable. A choice: random, so that
callers do not ask in step."""

CHUNKS_AT_ONCE = 64
"""Maximum chunks read at once by a follower. A choice: 16 s of an answer as it is written
(`jobs.answer_writer.CHUNK_S`)."""

LONG_BYTES = 262_144
LONG_AT_ONCE = 2
"""Maximum answers of jobs longer than this that are read at once. A choice: twenty of 7 MB at once took the
store's connections, and the time in which it has to answer, from all other callers."""

AWAY_S = 60.0
"""How long a caller is kept waiting while the store is unreachable. A choice: a failover takes seconds."""

RETRY_AFTER_S = 5
RETRY_AFTER_MAX_S = 59
"""Limits on the time after which a caller should ask for a job again: not in vain each second, a choice, and
not more than what SDKs obey (`core.waiting.line.RETRY_AFTER_MAX_S`)."""

LANES_FOR_S = 2.0
"""Maximum age of the figures from which expected starts are computed. A choice: reading them takes a script
in the store."""

STREAMED: Changes = {("stream",): True, ("stream_options",): {"include_usage": True}}
"""What makes a chat that of a job: its answer is streamed, with usage."""

PRIORITY_HEADER = "x-gateway-priority"
EXPIRES_HEADER = "x-gateway-expires-s"

_NEVER = 2**53
"""More chunks than any job has: integers are exact as floats up to here."""

_SECRETS = frozenset({"key", "token", "secret", "password", "authorization", "credential", "credentials"})
"""Last words of names of headers that hold credentials, such as `x-api-key` and `x-amz-security-token`."""

_HEADERS_KEPT = 32
_HEADER_CHARS_KEPT = 256
"""Maximum headers of a request that are kept with a job, and characters of each. A choice that bounds what
the store keeps."""


@valueclass(frozen=True, slots=True)
class JobRules:
    """Limits for jobs.

    Attributes:
        quota: Per API key.
        keep_s: How long a result is kept after the job's end; unstored_keep_s: the same if `store` is false.
        priorities: Priorities per API key, where not normal.
    """

    quota: Quota = field(default_factory=Quota)
    keep_s: float = 86_400.0
    unstored_keep_s: float = 600.0
    priorities: Mapping[str, JobPriority] = field(default_factory=dict)


class Waits:
    """What waits for jobs on behalf of callers, until this process ends.

    Attributes:
        are_over: Whether it is ending.
    """

    def __init__(self) -> None:
        """Start with nothing."""
        self.are_over = False
        self._scopes: set[anyio.CancelScope] = set()

    def end(self) -> None:
        """End all waiting, because this process is shutting down. Callers are told by those who wait."""
        self.are_over = True
        for scope in self._scopes:
            scope.cancel()

    def check_open(self) -> None:
        """Cut off a follower if this process is ending.

        Raises:
            Draining: it is.
        """
        if self.are_over:
            raise Draining("This gateway is shutting down. Follow the response through another one.")

    @contextmanager
    def until_end(self) -> Iterator[anyio.CancelScope]:
        """Run a block that `end` cancels, whether it was called before or is called meanwhile."""
        with anyio.CancelScope() as scope:
            self._scopes.add(scope)
            if self.are_over:
                scope.cancel()
            try:
                yield scope
            finally:
                self._scopes.remove(scope)


class Background:
    """Jobs on behalf of callers; one per process.

    Attributes:
        waits: What waits for jobs.
    """

    def __init__(
        self,
        jobs: JobStore,
        pipeline: Pipeline,
        rules: JobRules,
        clock: Clock,
        away_s: Callable[[str], float | None],
        recorder: Recorder,
        revoke: Callable[[str], None],
    ) -> None:
        """Submit jobs to `jobs`, placed as `pipeline` would place them; report each to `recorder`.

        `away_s`: seconds until a backend can serve a lane; see `BoxController.away_s`.
        `revoke`: makes sure that a job never runs; see `Revocations.add`.
        """
        self.revoke = revoke
        self.waits = Waits()
        self._recorder = recorder
        self._jobs = jobs
        self._pipeline = pipeline
        self._rules = rules
        self._clock = clock
        self._away_s = away_s
        self._lanes: tuple[float, Mapping[str, Lane]] = (float("-inf"), {})
        self._long = anyio.Semaphore(LONG_AT_ONCE)

    async def submit(
        self,
        incoming: Incoming,
        facts: JobFacts,
        *,
        id: str,
        store: bool,
        idempotency_key: str | None,
        route: str,
        body: bytes,
        estimate: Estimate | None = None,
        replaces: bool = False,
        status: int = 200,
    ) -> tuple[Job, JobFacts | None]:
        """Submit a request as a job. Return it, and its facts unless it existed before under the same key.

        `replaces`: whether it takes the place of a job under that key which has failed or was cancelled.
        `status`: the HTTP status for its caller, as far as it is known now.

        Raises:
            CallerError: no backend could ever take it, a header is invalid, or the idempotency key belongs to
                another body.
            ShedError: its tokens cannot be counted at the moment.
            JobRefused: its API key has as many jobs as it may have.
            JobBytesFull: its API key has as many bytes of jobs as it may have.
            StoreUnavailable: with an idempotency key, it may have been accepted or not: retry with that key.
                Without one, it is revoked.
        """
        request = incoming.request
        decision = await self._pipeline.decision_for(incoming, estimate)
        decided_at = self._clock.now()
        if (trace := incoming.arrival.trace) is not None:
            facts = replace(facts, trace=trace.own.traceparent)

        def new_job() -> tuple[NewJob, Idempotency | None]:
            job = NewJob(
                id=id,
                key=request.key,
                lane=lane_of(decision.model, decision.traffic_class),
                body=incoming.body_for(request.model, STREAMED),
                facts=facts.encoded(),
                priority=self._priority(request.key, request.headers),
                keep_s=self._rules.keep_s if store else self._rules.unstored_keep_s,
                expires_s=_expires_s(request.headers),
            )
            return job, Idempotency.of(idempotency_key, route, body)

        new, idempotency = await decoded(incoming.size_bytes, new_job)
        try:
            found = await self._jobs.submit(new, self._rules.quota, idempotency, replaces=replaces)
        except StoreUnavailable:
            if idempotency is None:  # nobody could find it
                self.revoke(id)
            raise
        match found:
            case Refusal.IDEMPOTENCY_KEY_REUSED:
                raise IdempotencyKeyReused()
            case Refusal.TOO_MANY_JOBS:
                message = "This API key has reached its limit of jobs waiting or running."
                raise JobRefused(message, code=found.value, retry_after_s=30)
            case Refusal.TOO_MANY_BYTES:
                raise JobBytesFull()
        if found.id == id:
            log.debug(
                "job %s: accepted, %s, %s",
                id,
                new.lane,
                new.priority.value,
                extra=about("job_accepted", id=id, lane=new.lane, priority=new.priority.value),
            )
        self._recorder.finished(_record(incoming, decision, found.id, status, decided_at, self._clock.now()))
        return found, facts.as_accepted(found) if found.id == id else None

    async def is_served_elsewhere(self, model: str) -> bool:
        """Return whether processes with a different configuration run jobs of a model."""
        return await self._jobs.is_served_elsewhere(model, self._pipeline.serving().config)

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

    async def finished(self, job: Job, wait_s: float) -> Job:
        """Wait until a job is final, at most `wait_s`, and return its last known state."""
        if wait_s <= 0:
            return job
        with anyio.move_on_after(wait_s):
            while not job.status.is_final:
                try:
                    job = await self.over(job, FOLLOW_S)
                except StoreUnavailable:
                    await _rest()
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
        if not await self._jobs.changed(job.id, _number_after(last), wait_s, job.status):
            return (await self._again(job) if is_placed else job), ()
        chunks = await self._chunks_after(job, last)
        return (job if chunks else await self._again(job)), chunks

    async def answer(self, job: Job) -> bytes:
        """Return the chat completion of a successful job."""
        job = await self._loaded(job)
        async with self._turn(job, 0):
            chunks = await self._chunks_of_final(job)
            return await decoded(len(job.new.body) + size_of(chunks), partial(whole, job, chunks))

    async def facts(self, job: Job) -> JobFacts:
        """Return the facts of a job."""
        job = await self._loaded(job)
        return await decoded(len(job.new.facts), partial(JobFacts.of, job))

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
            yield ({"type": "error", **said, "sequence_number": last},)

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

    async def _chunks_after(self, job: Job, last: Chunk | None) -> Sequence[Chunk]:
        """Return some of a job's chunks after `last`, which is read again.

        A store that has lost it (a failover to a replica that lags) is given others in its place, and what
        follows them does not follow what a reader has seen.

        Raises:
            StreamBroken: it is not there any more.
            ResponseNotFound: nor is the job.
        """
        if last is None:
            return await self._jobs.chunks(job.id, 0, CHUNKS_AT_ONCE)
        chunks = await self._jobs.chunks(job.id, last.number, CHUNKS_AT_ONCE + 1)
        if chunks and chunks[0] == last:
            return chunks[1:]
        await self._again(job)
        raise StreamBroken(
            "The store has lost some of the answer, which is generated again from there: discard what came "
            f"before. The new answer will be at /v1/responses/{job.id}."
        )

    def retry_after_s(self, response: Mapping[str, Any]) -> int:
        """Return when to poll a response again."""
        start_s = (response.get("queue") or {}).get("expected_start_s")
        return max(RETRY_AFTER_S, min(RETRY_AFTER_MAX_S, int(start_s or 0)))

    def _turn(self, job: Job, start: int) -> AbstractAsyncContextManager[object]:
        """Return the turn to read the stored chunks of a job from number `start` on."""
        is_long = start < job.chunks and job.size_bytes > LONG_BYTES
        return self._long if is_long else nullcontext()

    async def _again(self, job: Job) -> Job:
        found = await self._jobs.get(job.id)
        if found is None:
            raise gone(job.id)
        return found

    async def _loaded(self, job: Job) -> Job:
        found = await self._jobs.load(job.id)
        if found is None:
            raise gone(job.id)
        return found

    async def _chunks_of_final(self, job: Job) -> Sequence[Chunk]:
        chunks = await self._jobs.all_chunks(job.id)
        if len(chunks) < job.chunks:  # it has just expired
            raise gone(job.id)
        return chunks

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

    def _priority(self, key: str | None, headers: Mapping[str, str]) -> JobPriority:
        """Return the priority of a key's jobs. A caller may lower it, never raise it."""
        most = self._rules.priorities.get(key or "", JobPriority.NORMAL)
        asked = headers.get(PRIORITY_HEADER)
        if asked is None:
            return most
        if asked not in list(JobPriority):
            known = ", ".join(JobPriority)
            raise InvalidRequest(f"`{PRIORITY_HEADER}` must be one of {known}.", param=PRIORITY_HEADER)
        order = list(JobPriority)
        return max(most, JobPriority(asked), key=order.index)


class Outage:
    """The patience of one caller with an unreachable store."""

    def __init__(self, clock: Clock) -> None:
        """Begin with a store that responds."""
        self._clock = clock
        self._since: float | None = None

    def over(self) -> None:
        """Note that the store has responded."""
        self._since = None

    async def wait(self, error: StoreUnavailable) -> None:
        """Wait until it is time to ask again.

        Raises:
            StoreUnavailable: it has been unreachable for too long.
        """
        now = self._clock.now()
        self._since = now if self._since is None else self._since
        if now - self._since > AWAY_S:
            raise error
        let_go(error)
        await _rest()


def _number_after(last: Chunk | None) -> int:
    return 0 if last is None else last.number + 1


async def _rest() -> None:
    """Wait until it is time to ask the store again; random, so that its waiters do not ask in step."""
    await anyio.sleep(random.uniform(*AGAIN_S))


def gone(id: str, param: str | None = None) -> ResponseNotFound:
    """Return the error for an id that does not exist for this caller."""
    message = f"No response {id[:64]!r} is kept here for this key: it is unknown, deleted or expired."
    return ResponseNotFound(message, param=param)


def _record(
    incoming: Incoming, decision: Decision, job: str, status: int, decided_at: float, now: float
) -> RequestRecord:
    """Return the record of a request that was submitted as the job `job`."""
    request, arrival = incoming.request, incoming.arrival
    return RequestRecord(
        id=arrival.id,
        model=request.model,
        stream=request.stream,
        ending=Ending.HANDED_OVER,
        status=status,
        error_code="",
        key=request.key,
        wall_at=arrival.wall_at,
        received_at=arrival.received_at,
        estimated_at=decided_at,
        ended_at=now,
        decision=decision,
        trace=arrival.trace,
        route=arrival.route,
        job=job,
    )


def handover_headers(request: Incoming, job: Job, estimate: Estimate | None = None) -> Headers:
    """Return the headers of the answer to a request that became a job: they describe the decision."""
    headers = [(b"x-request-id", request.arrival.id.encode()), *job_headers(job)]
    if estimate is not None:
        headers.append((b"x-gateway-prompt-tokens", str(estimate.tokens).encode()))
    if request.dropped:
        headers.append((b"x-gateway-dropped", ", ".join(request.dropped).encode()))
    return headers


def job_headers(job: Job) -> Headers:
    """Return the headers that name a job and its class."""
    _, traffic_class = model_and_class(job.new.lane)
    return [(b"x-gateway-class", traffic_class.encode()), (b"x-gateway-job", job.id.encode())]


def headers_kept(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers that are stored with a job: site-specific ones, without credentials."""
    own = {
        name: value
        for name, value in headers.items()
        if name.startswith("x-")
        and len(name) + len(value) <= _HEADER_CHARS_KEPT
        and name.rpartition("-")[2] not in _SECRETS
    }
    return dict(list(own.items())[:_HEADERS_KEPT])


def _expires_s(headers: Mapping[str, str]) -> float | None:
    written = headers.get(EXPIRES_HEADER)
    if written is None:
        return None
    try:
        expires_s = float(written)
    except ValueError:
        expires_s = -1.0
    if not 0 < expires_s <= 30 * 86_400:
        raise InvalidRequest(
            f"`{EXPIRES_HEADER}` must be a number of seconds, at most 30 days.", param=EXPIRES_HEADER
        )
    return expires_s


def _replayed(facts: JobFacts, job: Job, chunks: Sequence[Chunk]) -> dict[str, Any]:
    replay = Replay(facts)
    replay.tell(job, chunks)
    return dict(replay.response)
