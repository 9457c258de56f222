"""The job worker: claims jobs, runs each through the request pipeline, and stores its answer.

A worker claims no more than it can place: per lane, at most `ahead_max` of its jobs may be waiting for a
slot on a backend. All others wait in the store, in order and available to every worker. No state of a job
exists only in the worker: if one dies, this is noticed within seconds, and another continues from what is
stored.

A job ends with its answer, or when a backend rejects its content. It does not end because a backend fails,
the fleet is full or down, or this process is stopped. In these cases it is returned to the queue, and a
failure is counted only if the attempt took a backend's time, so that an outage of hours costs no job. Nor
does an engine that answers everything with an error cost one soon: see `_note_failure`.

Gateways that share a store may have different configurations. So jobs of a model that this gateway does not
serve are left to the others, and so is a job that this gateway rejects although another has accepted it. A
rejection counts as a failure only once all configurations have rejected the job, which ends, as for other
failures, when it has `attempts_max` of them.
"""

import logging
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, TypeVar

import anyio
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint_if_cancelled

from gateway.core.errors import (
    NOTHING_RAN,
    BackendRejected,
    CallerError,
    GatewayError,
    ShedError,
    StoreUnavailable,
    UpstreamFailed,
    UpstreamFaulty,
    let_go,
)
from gateway.core.job_answers import INVALID_EVENT, AnswerSoFar, answer_so_far, choices, continuation
from gateway.core.jobs import (
    AfterRefusal,
    AttemptEnd,
    AttemptOutcome,
    Beginning,
    Job,
    JobError,
    JobStatus,
    Lane,
    Serving,
    size_of,
)
from gateway.core.value import valueclass
from gateway.events import about
from gateway.jobs.answer_writer import AGAIN_S, SOME_LOST, AnswerWriter, JobLost
from gateway.pipeline import CallerStalled
from gateway.ports import Downstream, Incoming, JobStore
from gateway.threads import decoded

log = logging.getLogger("gateway.jobs")
T = TypeVar("T")

UNPROVEN_ATTEMPTS = 20
"""The attempt of a job from which an error counts even if nothing shows that it is the job's fault. A choice:
with the pauses between them, a quarter of an hour, in which most engines have booted again."""

KNOWN_MAX = 1_024
"""Maximum number of failed jobs that a worker remembers. A choice that bounds memory: of one that is
forgotten, a failure may not count."""

FINISH_S = 5.0
"""How long a stopped worker may take to return its jobs. A choice: some commands of the store."""

READS_AT_ONCE = 2
"""Maximum stored answers that are read at once: many end, or are continued, together. A choice: eight of 7 MB
at once took 0.4 s each, of the time in which the store has to answer; in turn, 0.03 s (Valkey beside it)."""


@valueclass(frozen=True, slots=True)
class WorkerRules:
    """Limits of a worker.

    Attributes:
        running_max: Maximum number of jobs at once.
        ahead_max: Per lane, the maximum number of these that have no slot on a backend.
        attempts_max: A job fails for good after this many failures.
        beat_s: Heartbeat interval. Jobs are taken over after about three missed ones.
        look_s: Maximum interval between two checks of the store without a message.
        retry_s, retry_max_s: Delay before the first retry of a failed job; doubled after each further
            failure, up to the maximum.
        continues: Whether to continue an interrupted answer where possible.
    """

    running_max: int = 256
    ahead_max: int = 2
    attempts_max: int = 3
    beat_s: float = 3.0
    look_s: float = 2.0
    retry_s: float = 1.0
    retry_max_s: float = 60.0
    continues: bool = True


Read = Callable[[Job, bytes], Incoming]
"""Returns the request for a job's chat body. Raises CallerError if it is invalid."""


class Run(Protocol):
    """Serves a request to completion: `Pipeline.run`."""

    async def __call__(
        self, incoming: Incoming, downstream: Downstream, *, on_admitted: Callable[[bool], None]
    ) -> None:
        """Serve a request to its end.

        `on_admitted` is called with True whenever it has been given a slot, with False if it waits again.
        """


Serves = Callable[[], Serving]
"""Returns what this process can serve under the current configuration."""


@dataclass(slots=True)
class _Claim:
    """A job claimed by this worker."""

    job: Job
    at: float  # monotonic seconds
    config: str  # version at the time of the claim
    answers: int  # how many answers of its lane had begun here by then
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    beginning: Beginning = Beginning.NEW
    is_admitted: bool = False  # it has a slot on a backend
    is_awaited: bool = False  # a caller stays connected for its answer
    has_begun: bool = False  # its answer has begun
    is_returned: bool = False  # it is to be returned before its answer begins
    is_reported: bool = False  # the store is being told of its end, and will say itself whether it was held


class Worker:
    """Runs jobs in one process."""

    def __init__(
        self,
        store: JobStore,
        name: str,
        read: Read,
        run: Run,
        rules: WorkerRules,
        serves: Serves,
        tokens_of: Callable[[str], Awaitable[int]],
        can_run_lane: Callable[[str], bool] = lambda _: True,
        on_attempt: Callable[[AttemptEnd], None] = lambda _: None,
    ) -> None:
        """Run jobs of `store` under the unique name `name`.

        `tokens_of` counts the tokens of an answer that is to be continued.

        Lanes whose model is not in `serves()` are skipped, as are lanes for which `can_run_lane` returns
        False because no backend could serve them now. `on_attempt` is called at the end of every attempt.
        """
        self._store = store
        self._name = name
        self._read = read
        self._run = run
        self._rules = rules
        self._on_attempt = on_attempt
        self._serves = serves
        self._tokens_of = tokens_of
        self._can_run_lane = can_run_lane
        self._reads = anyio.Semaphore(READS_AT_ONCE)
        self._answers = Counter[str]()  # how many have begun here, by lane
        self._failed = OrderedDict[str, int]()  # the same at the last failure of a job, by its id
        self._foreign: frozenset[str] = frozenset()  # lanes of models that are not served here
        self._claims: dict[str, _Claim] = {}
        self._is_unanswered = False  # whether the last claim may have got a job that is not among these
        self._room = anyio.Event()
        self._idle = anyio.Event()
        self._unawaited = anyio.Event()
        self._scope = anyio.CancelScope()
        self._ended = anyio.Event()
        self.is_draining = False
        self._is_needed: Callable[[], bool] = lambda: False

    @property
    def running(self) -> int:
        """Number of jobs claimed."""
        return len(self._claims)

    @property
    def awaited(self) -> int:
        """Number of jobs whose answers have begun, and whose callers stay connected for them."""
        return sum(claim.is_awaited and claim.has_begun for claim in self._claims.values())

    async def run(self) -> None:
        """Run jobs until stopped or cancelled; unfinished ones are returned then."""
        try:
            with self._scope:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._beat)
                    while True:
                        job = await self._next()
                        if job is not None:
                            self._start(job, tasks)
        finally:
            if self._is_unanswered:
                with anyio.move_on_after(FINISH_S, shield=True):
                    await self._return_unheard()
            self._ended.set()

    async def stop(self) -> None:
        """Stop a running `run`, and return when all jobs have been returned."""
        self._scope.cancel()
        await self._ended.wait()

    def drain(self, is_needed: Callable[[], bool] = lambda: False) -> None:
        """Claim no more jobs, except while `is_needed()`, because a caller here is waiting for one.

        Jobs whose answers have not begun are returned.
        """
        self.is_draining = True
        self._is_needed = is_needed
        self._room.set()

    async def wait_idle(self) -> None:
        """Wait until no jobs are left, after `drain`; `run` must be running."""
        await self._idle.wait()

    async def wait_unawaited(self) -> None:
        """Wait until none are `awaited`, after `drain` and the last `is_needed()`; `run` must be running."""
        self._room.set()
        await self._unawaited.wait()

    # ------------------------------------------------------------ claiming

    async def _next(self) -> Job | None:
        """Return the next job; None after a while without one."""
        self._room = anyio.Event()  # before the look, so that no room is missed that comes during it
        is_leaving = self.is_draining and not self._is_needed()
        if is_leaving and self._is_unanswered:
            await self._return_unheard()
        if is_leaving:
            for claim in self._claims.values():
                if not claim.has_begun:
                    claim.is_returned = True
                    claim.scope.cancel()
            if not self.awaited:
                self._unawaited.set()
            if not self._claims:
                self._idle.set()
        if is_leaving or len(self._claims) >= self._rules.running_max:
            await self._changed()
            return None
        try:
            queue = await self._store.queue()
            serving = self._serves()
            own = filter(self._can_run_lane, self._own_lanes(queue.lanes, serving))
            ahead = Counter(claim.job.new.lane for claim in self._claims.values() if not claim.is_admitted)
            open_lanes = [name for name in own if ahead[name] < self._rules.ahead_max]
            await checkpoint_if_cancelled()  # commands of the store cannot be cancelled
            job = await self._claimed(open_lanes, serving)
            if job is None:
                await self._changed()
            return job
        except StoreUnavailable:
            await anyio.sleep(self._rules.look_s)
            return None

    async def _claimed(self, lanes: Collection[str], serving: Serving) -> Job | None:
        self._is_unanswered = True
        job = await self._store.claim(self._name, lanes, self._rules.attempts_max, serving.config)
        self._is_unanswered = False
        return job

    async def _return_unheard(self) -> None:
        """Return the job that the last claim may have got although its reply was lost."""
        serving = self._serves()
        with suppress(StoreUnavailable):  # its claim will be lost, which counts as a failure
            job = await self._claimed((), serving)
            if job is not None:
                claim = self._claim_of(job, serving)
                await self._give_back(claim, after_s=0.0, failed=False)

    def _own_lanes(self, lanes: Iterable[Lane], serving: Serving) -> list[str]:
        """Return the lanes whose model is served here. Others are logged, once each."""
        own, foreign = [], set[str]()
        for lane in lanes:
            if serving.has(lane.name):
                own.append(lane.name)
            elif lane.queued:
                foreign.add(lane.name)
                if lane.name not in self._foreign:
                    log.warning(
                        "jobs of %s are left to other processes (%d waiting): this one has no such model",
                        lane.name,
                        lane.queued,
                        extra=about("jobs_left_alone", lane=lane.name, queued=lane.queued),
                    )
        self._foreign = frozenset(foreign)
        return own

    async def _changed(self) -> None:
        """Wait until there may be a job to claim and room for it."""
        async with anyio.create_task_group() as tasks:

            async def heard() -> None:
                try:
                    for job_id, attempt in await self._store.waiting(self._rules.look_s):
                        self._lose(job_id, attempt)
                except StoreUnavailable:
                    await anyio.sleep(self._rules.look_s)
                tasks.cancel_scope.cancel()

            tasks.start_soon(heard)
            await self._room.wait()
            tasks.cancel_scope.cancel()

    def _claim_of(self, job: Job, serving: Serving) -> _Claim:
        return _Claim(job, anyio.current_time(), serving.config, self._answers[job.new.lane])

    def _start(self, job: Job, tasks: TaskGroup) -> None:
        if (former := self._claims.get(job.id)) is not None:
            former.scope.cancel()  # it was lost, and claimed again before the loss was reported
        claim = self._claims[job.id] = self._claim_of(job, self._serves())
        tasks.start_soon(self._work, claim)

    # ------------------------------------------------------------ heartbeats

    async def _beat(self) -> None:
        while True:
            with suppress(StoreUnavailable):  # writes of an attempt that was taken over are rejected anyway
                await self._renew()
            await anyio.sleep(self._rules.beat_s)

    async def _renew(self) -> None:
        # Not the claims: a reply may be late, and a job that has ended meanwhile is to be free with its body.
        held = [(claim.job.id, claim.job.claim) for claim in self._claims.values()]
        lost = await self._store.beat(self._name, held, self._serves())
        for job_id, token in held:
            claim = self._claims.get(job_id) if job_id in lost else None
            if claim is not None and claim.job.claim == token and not claim.is_reported:
                claim.scope.cancel()

    def _lose(self, job_id: str, attempt: int) -> None:
        """Stop working on a job that this worker no longer holds."""
        claim = self._claims.get(job_id)
        if claim is not None and claim.job.attempt == attempt:
            claim.scope.cancel()

    # ------------------------------------------------------------ one job

    async def _work(self, claim: _Claim) -> None:
        job = claim.job
        try:
            with claim.scope:
                await self._attempt(claim)
            if claim.scope.cancelled_caught and not claim.is_returned:
                raise JobLost
            if claim.scope.cancelled_caught:
                await self._give_back(claim, after_s=0.0, failed=False)
        except JobLost:
            log.info(
                "job %s: no longer this worker's",
                job.id,
                extra=about("job_lost", id=job.id, lane=job.new.lane),
            )
            self._tell(claim, AttemptOutcome.LOST)
        except anyio.get_cancelled_exc_class():
            with anyio.move_on_after(FINISH_S, shield=True):
                await self._give_back(claim, after_s=0.0, failed=False)
            raise
        except Exception:
            log.exception(
                "job %s failed inside the gateway",
                job.id,
                extra=about("internal_error", id=job.id, lane=job.new.lane),
            )
            setback = "The gateway failed."
            await self._give_back(claim, after_s=self._rules.retry_s, failed=True, setback=setback)
        finally:
            if self._claims.get(job.id) is claim:  # otherwise this worker has claimed the job again
                del self._claims[job.id]
            self._room.set()

    async def _attempt(self, claim: _Claim) -> None:
        job = claim.job
        stored = await self._answer_so_far(job) if job.chunks else None
        if job.chunks:
            claim.beginning = Beginning.CONTINUED
        if stored is not None and stored.finish_reason is not None:
            await self._end(claim, stored.status, job.chunks)  # only the final status was missing
            return
        body = None
        if stored is not None and self._rules.continues:
            spent_tokens = await self._tokens_of(stored.thought + stored.content)
            further = partial(continuation, job.new.body, stored, spent_tokens)
            body = await decoded(job.new.size_bytes + len(stored.content), further)
        if body is not None:
            chunks, failure = await self._relay(claim, body, restarts=False)
            if not isinstance(failure, CallerError):
                await self._conclude(claim, failure, chunks)
                return
            # This engine does not continue answers, or the answer has become too long for a prompt.
            job = claim.job = replace(job, chunks=chunks)
        if job.chunks:
            claim.beginning = Beginning.RESTARTED
        chunks, failure = await self._relay(claim, job.new.body, restarts=job.chunks > 0)
        await self._conclude(claim, failure, chunks)

    async def _relay(self, claim: _Claim, body: bytes, *, restarts: bool) -> tuple[int, GatewayError | None]:
        """Run a request of a job. Return the job's new number of chunks, and the failure or None.

        Raises:
            JobLost: this worker no longer holds the job.
        """
        job = claim.job
        claim.is_admitted = False  # a request before it, of the same attempt, may have been

        def admitted(is_admitted: bool) -> None:
            claim.is_admitted = is_admitted
            self._room.set()

        def begun() -> None:
            claim.has_begun = True
            self._answers[job.new.lane] += 1

        writer = AnswerWriter(self._store, job, restarts=restarts, on_start=begun)
        failure: GatewayError | None = None
        try:
            incoming = await decoded(len(body) + len(job.new.facts), partial(self._read, job, body))
        except GatewayError as error:
            return writer.chunks, error
        claim.is_awaited = incoming.arrival.is_awaited
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(writer.run)
                try:
                    await self._run(incoming, writer, on_admitted=admitted)
                except GatewayError as error:
                    let_go(error)
                    failure = error
                except CallerStalled:
                    failure = StoreUnavailable("The store was unavailable for too long to save the answer.")
                tasks.cancel_scope.cancel()
            await writer.write_all()
        finally:
            with anyio.move_on_after(FINISH_S, shield=True):
                await writer.write_all()
        if writer.is_lost:
            raise JobLost
        return writer.chunks, writer.error or failure

    async def _conclude(self, claim: _Claim, failure: GatewayError | None, chunks: int) -> None:
        """End or return a job whose answer, of that many chunks, has come to its end or failed."""
        job = claim.job
        match failure:
            case None:
                if (stored := await self._answer_so_far(job)) is not None:
                    await self._end(claim, stored.status, chunks)
                else:
                    invalid = UpstreamFailed("The backend sent an invalid event.")
                    await self._conclude(claim, invalid, chunks)
            case BackendRejected():
                await self._finish(claim, JobStatus.FAILED, _error_of(failure))
            case CallerError():
                await self._refuse(claim, failure)
            case _:
                # A backend that refuses is asked ever less often, too, though that is no failure of the job.
                is_failure = self._note_failure(claim, failure)
                tries = job.failures if is_failure or isinstance(failure, ShedError) else job.attempt - 1
                rest_s = min(self._rules.retry_s * 2.0 ** min(tries, 16), self._rules.retry_max_s)
                _log_failed(job, failure)
                await self._give_back(
                    claim,
                    after_s=max(failure.retry_after_s or 0.0, rest_s),
                    failed=is_failure,
                    setback=failure.message,
                )

    def _note_failure(self, claim: _Claim, error: GatewayError) -> bool:
        """Note that an attempt ended with `error`. Return whether that counts as a failure of the job.

        An engine that is broken, a proxy whose engine boots, or a changed key give an error to every job. So
        after the first, one without a crash counts only if another answer of the lane has begun here since.
        """
        if isinstance(error, (ShedError, *NOTHING_RAN)):
            return False
        job, answers = claim.job, self._answers[claim.job.new.lane]
        before = self._failed.pop(job.id, claim.answers)
        self._failed[job.id] = answers
        if len(self._failed) > KNOWN_MAX:
            self._failed.popitem(last=False)
        is_unproven = isinstance(error, UpstreamFaulty) and answers == before
        return not (is_unproven and job.failures and job.attempt < UNPROVEN_ATTEMPTS)

    # ------------------------------------------------------------ reporting to the store

    async def _answer_so_far(self, job: Job) -> AnswerSoFar | None:
        """Return the stored part of a job's answer; None if it has an invalid event, so must start over."""
        async with self._reads:
            chunks = await _until_answered(lambda: self._store.all_chunks(job.id))
            body = job.new.body
            size = len(body) + size_of(chunks)
            try:
                return await decoded(size, lambda: answer_so_far(chunks, choices(body)))
            except INVALID_EVENT:
                return None

    async def _end(self, claim: _Claim, status: JobStatus, chunks: int) -> None:
        """Make a job final whose answer is whole with that many chunks; return it if the store lost some."""
        try:
            await self._finish(claim, status, chunks=chunks)
        except ValueError:
            await self._conclude(claim, StoreUnavailable(SOME_LOST), chunks)

    async def _finish(
        self, claim: _Claim, status: JobStatus, error: JobError | None = None, *, chunks: int = 0
    ) -> None:
        job = claim.job
        claim.is_reported = True  # else a heartbeat that crosses the reply, or its loss, would end this
        has_ended = await _until_answered(
            lambda: self._store.finish(job.id, job.claim, status, error, chunks=chunks)
        )
        if not has_ended:
            raise JobLost
        self._tell(claim, AttemptOutcome.ENDED, status, error)

    async def _give_back(self, claim: _Claim, *, after_s: float, failed: bool, setback: str = "") -> None:
        job = claim.job
        claim.is_reported = True
        is_back = await _until_answered(
            lambda: self._store.give_back(
                job.id,
                job.claim,
                attempts_max=self._rules.attempts_max,
                after_s=after_s,
                failed=failed,
                setback=setback,
            )
        )
        if not is_back:
            outcome = AttemptOutcome.LOST
        elif not failed:
            outcome = AttemptOutcome.RETURNED
        elif job.failures + 1 < self._rules.attempts_max:
            outcome = AttemptOutcome.FAILED
        else:
            outcome = AttemptOutcome.POISONED
        self._tell(claim, outcome)

    async def _refuse(self, claim: _Claim, failure: CallerError) -> None:
        """Return a job that the configuration cannot run here."""
        job, error = claim.job, _error_of(failure)
        claim.is_reported = True
        became = await _until_answered(
            lambda: self._store.refuse(
                job.id,
                job.claim,
                error,
                config=claim.config,
                attempts_max=self._rules.attempts_max,
                after_s=self._rules.retry_max_s,  # leaves time for gateways with another configuration
            )
        )
        match became:
            case None:
                raise JobLost
            case AfterRefusal.LEFT:
                log.info(
                    "job %s is left to other processes: %s",
                    job.id,
                    failure.message,
                    extra=about(
                        "job_left", id=job.id, lane=job.new.lane, code=failure.code, reason=failure.message
                    ),
                )
                self._tell(claim, AttemptOutcome.RETURNED)
            case AfterRefusal.FAILED:
                _log_failed(job, failure)
                self._tell(claim, AttemptOutcome.FAILED)
            case AfterRefusal.ENDED:
                self._tell(claim, AttemptOutcome.ENDED, JobStatus.FAILED, error)

    def _tell(
        self,
        claim: _Claim,
        outcome: AttemptOutcome,
        status: JobStatus | None = None,
        error: JobError | None = None,
    ) -> None:
        took_s = anyio.current_time() - claim.at
        self._on_attempt(AttemptEnd(claim.job, outcome, claim.beginning, took_s, status, error))


def _log_failed(job: Job, failure: GatewayError) -> None:
    log.warning(
        "job %s: attempt %d failed: %s",
        job.id,
        job.attempt,
        failure.message,
        extra=about(
            "job_attempt_failed",
            id=job.id,
            lane=job.new.lane,
            attempt=job.attempt,
            code=failure.code,
            reason=failure.message,
        ),
    )


def _error_of(failure: GatewayError) -> JobError:
    return JobError(failure.code, failure.message, failure.param)


async def _until_answered(ask: Callable[[], Awaitable[T]]) -> T:
    """Repeat a call until the store responds, so that a short outage does not waste finished work."""
    while True:
        try:
            return await ask()
        except StoreUnavailable:
            await anyio.sleep(AGAIN_S)
