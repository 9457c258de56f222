"""Any history of jobs: each that was accepted ends once, in its turn, and nothing of it is left in the end.

Callers, workers that die, time that passes, and a server that is killed and comes back with its data. What
should be there is modelled beside it, job by job, and compared after every step.
"""

import asyncio
import secrets
from collections import Counter
from collections.abc import Awaitable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from redis.asyncio import Redis
from redis.exceptions import RedisError
from support.job_world import LEFT, NO_MODELS, JobWorld, new_job
from support.redis_server import RedisServer, legs, own_server

from gateway.core.errors import StoreUnavailable
from gateway.core.jobs import (
    AfterRefusal,
    Chunk,
    Job,
    JobError,
    JobPriority,
    JobStatus,
    Quota,
    Refusal,
    Serving,
)

LANES = ("m/light", "m/push")
KEYS = ("alice", "bob")
WORKERS = 3
ATTEMPTS_MAX = 2
AGAIN_PER_TURN = 8
QUOTA = Quota(queued_max=5, bytes_max=400)
PRIORITIES = list(JobPriority)
ENDS = (JobStatus.COMPLETED, JobStatus.INCOMPLETE, JobStatus.FAILED)
T = TypeVar("T")
picks = st.integers(0, 100)
workers = st.integers(0, WORKERS - 1)


@dataclass
class Model:
    """What a job should be."""

    id: str
    key: str
    lane: str
    priority: JobPriority
    status: JobStatus = JobStatus.QUEUED
    attempt: int = 0
    failures: int = 0
    code: str | None = None
    data: list[bytes] = field(default_factory=list)
    worker: int | None = None
    is_new: bool = True  # never claimed since it was queued from the start
    rests: bool = False
    is_due: bool = False  # it has rested, and will be seen by whoever claims
    turn: float = 0  # when the owners of its lane and priority have had as many (returned) jobs each
    arrival: int = 0  # its place among those of the same turn
    accepted: int = 0
    returned: int | None = None  # the attempt that gave it back last
    refused: set[int] = field(default_factory=set)  # by workers of which each has its own configuration
    is_kept: bool = True

    @property
    def rank(self) -> tuple[int, int, bool, int]:
        return PRIORITIES.index(self.priority), int(self.turn), self.is_new, self.arrival

    @property
    def step(self) -> float:
        return 1 if self.is_new else 1 / AGAIN_PER_TURN

    @property
    def line(self) -> tuple[str, JobPriority, str, bool]:
        return self.lane, self.priority, self.key, self.is_new

    @property
    def size_bytes(self) -> int:
        return new_job(self.id).size_bytes + sum(map(len, self.data))


class JobHistories(RuleBasedStateMachine):
    """Steps that callers, workers, time and the server can take."""

    server: RedisServer

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.redis = Redis.from_url(self.server.url, decode_responses=True)
        self.world = JobWorld(self.server.url, f"test-{secrets.token_hex(4)}", self.redis)
        self.callers = self.world.open()
        self.stores = [self.world.open() for _ in range(WORKERS)]
        self.models: dict[str, Model] = {}
        self.claims: list[tuple[str, int]] = []  # every one there ever was
        self.arrivals = 0
        self.reached: dict[tuple[str, JobPriority], int] = {}  # turns
        self.had: dict[tuple[str, JobPriority, str, bool], float] = {}
        for number, store in enumerate(self.stores):
            self.run(store.beat(f"w{number}", [], Serving(f"c{number}", frozenset({"m"}))))

    def run(self, work: Awaitable[T]) -> T:
        async def wait() -> T:
            return await work

        return self.runner.run(wait())

    # ------------------------------------------------------------------ the model

    def of(self, *statuses: JobStatus) -> list[Model]:
        return [job for job in self.models.values() if job.is_kept and job.status in statuses]

    def queue(self, job: Model, *, is_new: bool, rests: bool = False) -> None:
        self.arrivals += 1
        job.status, job.worker = JobStatus.QUEUED, None
        job.is_new, job.rests, job.is_due, job.arrival = is_new, rests, False, self.arrivals
        job.turn = self.next_turn(job)

    def next_turn(self, job: Model) -> float:
        queued = [other for other in self.of(JobStatus.QUEUED) if not other.rests and other is not job]
        last = max((other.turn for other in queued if other.line == job.line), default=-1)
        return max(self.reached.get(job.line[:2], 0), self.had.get(job.line, 0), last + job.step)

    def end(self, job: Model, status: JobStatus, code: str | None = None) -> None:
        assert not job.status.is_final
        job.status, job.code, job.worker, job.rests = status, code, None, False
        job.refused.clear()
        if not any(it.lane == job.lane for it in self.of(JobStatus.QUEUED, JobStatus.IN_PROGRESS)):
            self.reached = {line: turn for line, turn in self.reached.items() if line[0] != job.lane}
            self.had = {line: turn for line, turn in self.had.items() if line[0] != job.lane}

    def ahead(self, job: Model) -> int:
        """Return how many would go before a job that is queued."""
        rank = (job.rank[0], int(self.next_turn(job)), False, self.arrivals + 1) if job.rests else job.rank
        queued = [other for other in self.of(JobStatus.QUEUED) if other.lane == job.lane and not other.rests]
        return sum(other.rank < rank for other in queued)

    def heads(self, lanes: tuple[str, ...], worker: int) -> list[Model]:
        queued = [job for job in self.of(JobStatus.QUEUED) if not job.rests]
        queued = [job for job in queued if worker not in job.refused or len(job.refused) == WORKERS]
        by_lane = [[job for job in queued if job.lane == lane] for lane in lanes]
        return [min(jobs, key=lambda job: job.rank) for jobs in by_lane if jobs]

    def holds(self, claim: tuple[str, int]) -> bool:
        job = self.models[claim[0]]
        return job.is_kept and job.status is JobStatus.IN_PROGRESS and job.attempt == claim[1]

    # ------------------------------------------------------------------ callers

    @rule(key=st.sampled_from(KEYS), lane=st.sampled_from(LANES), priority=st.sampled_from(PRIORITIES))
    def submit(self, key: str, lane: str, priority: JobPriority) -> None:
        id = f"j{len(self.models)}"
        kept = [job for job in self.models.values() if job.is_kept and job.key == key]
        job = new_job(id, key=key, lane=lane, priority=priority, expires_s=1000.0)
        outcome = self.run(self.callers.submit(job, QUOTA))
        if sum(not other.status.is_final for other in kept) >= QUOTA.queued_max:
            assert outcome is Refusal.TOO_MANY_JOBS
        elif sum(other.size_bytes for other in kept) + job.size_bytes > QUOTA.bytes_max:
            assert outcome is Refusal.TOO_MANY_BYTES
        else:
            assert isinstance(outcome, Job)
            self.models[id] = Model(id, key, lane, priority, accepted=len(self.models))
            self.queue(self.models[id], is_new=True)

    @precondition(lambda self: self.models)
    @rule(pick=picks)
    def submit_again(self, pick: int) -> None:
        job = list(self.models.values())[pick % len(self.models)]
        if job.is_kept:
            again = new_job(job.id, key=job.key, lane=job.lane, priority=job.priority)
            outcome = self.run(self.callers.submit(again, QUOTA))
            assert isinstance(outcome, Job) and outcome.status is job.status

    @precondition(lambda self: self.models)
    @rule(pick=picks)
    def cancel(self, pick: int) -> None:
        job = list(self.models.values())[pick % len(self.models)]
        self.run(self.callers.cancel(job.id))
        if job.is_kept and not job.status.is_final:
            self.end(job, JobStatus.CANCELLED)

    @precondition(lambda self: self.models)
    @rule(pick=picks)
    def delete(self, pick: int) -> None:
        job = list(self.models.values())[pick % len(self.models)]
        assert self.run(self.callers.delete(job.id)) is job.is_kept
        job.is_kept = False

    @precondition(lambda self: self.of(JobStatus.FAILED, JobStatus.CANCELLED))
    @rule(pick=picks)
    def retry(self, pick: int) -> None:
        jobs = self.of(JobStatus.FAILED, JobStatus.CANCELLED)
        job = jobs[pick % len(jobs)]
        self.run(self.callers.retry(job.id))
        job.failures, job.code, job.returned = 0, None, None
        job.data.clear()
        self.queue(job, is_new=True)

    # ------------------------------------------------------------------ workers

    @rule(worker=workers, lanes=st.sampled_from([("m/light",), ("m/push",), LANES]))
    def claim(self, worker: int, lanes: tuple[str, ...]) -> None:
        due = [job for job in self.of(JobStatus.QUEUED) if job.rests and job.is_due]
        claimed = self.run(self.stores[worker].claim(f"w{worker}", lanes, ATTEMPTS_MAX, f"c{worker}"))
        for job in sorted(due, key=lambda job: (job.lane, job.id)):
            if job.lane in lanes:
                self.queue(job, is_new=False)
        while heads := self.heads(lanes, worker):
            running = Counter(job.lane for job in self.of(JobStatus.IN_PROGRESS))
            head = min(heads, key=lambda job: (job.rank[0], running[job.lane], job.accepted))
            if head.failures < ATTEMPTS_MAX:
                break
            self.end(head, JobStatus.FAILED, "job_poisoned")
        if not heads:
            assert claimed is None
            return
        assert claimed is not None
        assert claimed.id == head.id
        self.reached[head.line[:2]] = max(int(head.turn), self.reached.get(head.line[:2], 0))
        self.had[head.line] = head.turn + head.step
        head.status, head.worker, head.attempt = JobStatus.IN_PROGRESS, worker, head.attempt + 1
        assert claimed.attempt == head.attempt
        self.claims.append((head.id, head.attempt))

    @precondition(lambda self: self.claims)
    @rule(pick=picks, times=st.integers(1, 2), restarts=st.booleans())
    def append(self, pick: int, times: int, restarts: bool) -> None:
        claim = self.claims[-1 - pick % len(self.claims)]
        job = self.models[claim[0]]
        chunk = Chunk(len(job.data), claim[1], b"x" * (1 + pick % 7), restarts)
        held = self.holds(claim)
        for _ in range(times):
            assert self.run(self.stores[0].append(*self.callers.held(*claim), chunk)) is held
        if held:
            job.data.append(chunk.data)

    @precondition(lambda self: self.claims)
    @rule(pick=picks, status=st.sampled_from(ENDS))
    def finish(self, pick: int, status: JobStatus) -> None:
        claim = self.claims[-1 - pick % len(self.claims)]
        job = self.models[claim[0]]
        error = JobError("x", "It failed.") if status is JobStatus.FAILED else None
        code = error.code if error else None
        held = self.holds(claim)
        repeats = job.is_kept and (job.status, job.attempt, job.code) == (status, claim[1], code)
        assert self.run(self.stores[0].finish(*self.callers.held(*claim), status, error)) is (held or repeats)
        if held:
            self.end(job, status, code)

    @precondition(lambda self: self.claims)
    @rule(pick=picks, rests=st.booleans(), failed=st.booleans())
    def give_back(self, pick: int, rests: bool, failed: bool) -> None:
        claim = self.claims[-1 - pick % len(self.claims)]
        job = self.models[claim[0]]
        held = self.holds(claim)
        is_back = job.status is JobStatus.QUEUED or job.code == "job_poisoned"
        repeats = job.is_kept and is_back and job.attempt == job.returned == claim[1]
        after_s = 1000.0 if rests else 0.0
        words = self.callers.held(*claim)
        given = self.run(
            self.stores[0].give_back(*words, attempts_max=ATTEMPTS_MAX, after_s=after_s, failed=failed)
        )
        assert given is (held or repeats)
        if held:
            job.failures += failed
            job.returned = claim[1]
        if held and failed and job.failures >= ATTEMPTS_MAX:
            self.end(job, JobStatus.FAILED, "job_poisoned")
        elif held:
            self.queue(job, is_new=False, rests=rests)

    @precondition(lambda self: self.claims)
    @rule(pick=picks, worker=workers)
    def refuse(self, pick: int, worker: int) -> None:
        claim = self.claims[-1 - pick % len(self.claims)]
        job = self.models[claim[0]]
        held = self.holds(claim)
        repeats = job.is_kept and job.attempt == claim[1] and (job.code == "x" or job.returned == claim[1])
        refused = self.run(
            self.stores[worker].refuse(
                *self.callers.held(*claim),
                JobError("x", "It failed."),
                config=f"c{worker}",
                attempts_max=ATTEMPTS_MAX,
                after_s=1000.0,
            )
        )
        if not held:
            final = job.status is JobStatus.FAILED if job.code == "x" else job.status is JobStatus.QUEUED
            assert (refused is not None) is (repeats and final)
            return
        is_left = len(job.refused | {worker}) < WORKERS
        if not is_left and job.failures + 1 >= ATTEMPTS_MAX:
            assert refused is AfterRefusal.ENDED
            self.end(job, JobStatus.FAILED, "x")
            return
        assert refused is (AfterRefusal.LEFT if is_left else AfterRefusal.FAILED)
        job.refused.add(worker)
        job.failures += not is_left
        job.returned = claim[1]
        self.queue(job, is_new=False, rests=not is_left)

    @rule(worker=workers)
    def beat(self, worker: int) -> None:
        claims = [self.callers.held(*claim) for claim in self.claims]
        lost = self.run(self.stores[worker].beat(f"w{worker}", claims, NO_MODELS))
        assert list(lost) == [claim[0] for claim in self.claims if not self.holds(claim)]

    @rule(worker=workers)
    def die(self, worker: int) -> None:
        for lane in LANES:  # one after the other: else which goes first is the server's choice
            lost = [job for job in self.of(JobStatus.IN_PROGRESS) if (job.worker, job.lane) == (worker, lane)]
            self.run(self.world.lose_worker_of(*(job.id for job in lost)))
            self.run(self.stores[(worker + 1) % WORKERS].beat("another", [], NO_MODELS))
            for job in sorted(lost, key=lambda job: self.placed(job)):
                job.failures += 1
                self.queue(job, is_new=False)

    def placed(self, job: Model) -> int:
        """Return where a job of a dead worker is now: of several, which goes first is the server's choice."""
        found = self.run(self.callers.get(job.id))
        assert found is not None and found.position is not None
        return found.position

    # ------------------------------------------------------------------ time

    @precondition(lambda self: self.of(JobStatus.QUEUED, JobStatus.IN_PROGRESS))
    @rule(pick=picks)
    def expire(self, pick: int) -> None:
        jobs = self.of(JobStatus.QUEUED, JobStatus.IN_PROGRESS)
        job = jobs[pick % len(jobs)]
        if self.run(self.redis.zscore(self.world.key("expiring"), job.id)) is None:
            return  # it was tried again, and expires no more
        self.run(self.world.expire(job.id))
        self.run(self.stores[0].claim("w0", [], ATTEMPTS_MAX))
        self.end(job, JobStatus.FAILED, "job_expired")

    @precondition(lambda self: any(job.rests for job in self.of(JobStatus.QUEUED)))
    @rule()
    def rest_is_over(self) -> None:
        for job in self.of(JobStatus.QUEUED):
            if job.rests:
                job.is_due = True
                self.run(self.redis.zadd(self.world.key("resting", job.lane), {job.id: 1}, xx=True))

    @rule()
    def forget(self) -> None:
        jobs = [job for job in self.models.values() if job.status.is_final]
        self.run(self.world.keep_is_over(*(job.id for job in jobs)))
        self.run(self.stores[0].beat("w0", [], NO_MODELS))
        for job in jobs:
            job.is_kept = False

    # ------------------------------------------------------------------ misfortune

    @rule()
    def restart(self) -> None:
        """The server is killed, and comes back with what it has kept."""
        self.server.kill()
        self.server.start()
        self.run(self.is_back())

    async def is_back(self) -> None:
        for store in (self.callers, *self.stores):
            while True:
                try:
                    await store.queue()
                    await self.redis.ping()
                    break
                except (StoreUnavailable, RedisError):
                    await asyncio.sleep(0)

    @rule()
    def forget_scripts(self) -> None:
        self.run(self.redis.script_flush())

    # ------------------------------------------------------------------ always

    @invariant()
    def every_job_is_what_it_should_be(self) -> None:
        self.run(self.compare_jobs())

    async def compare_jobs(self) -> None:
        for model in self.models.values():
            job = await self.callers.get(model.id)
            if not model.is_kept:
                assert job is None
                continue
            assert job is not None
            place = self.ahead(model) + 1 if model.status is JobStatus.QUEUED else None
            assert (job.status, job.position) == (model.status, place)
            assert (job.attempt, job.failures, job.chunks) == (model.attempt, model.failures, len(model.data))
            assert (job.error.code if job.error else None) == model.code
            chunks = await self.callers.chunks(model.id)
            assert [(chunk.number, chunk.data) for chunk in chunks] == list(enumerate(model.data))

    @invariant()
    def what_is_counted_is_there(self) -> None:
        self.run(self.compare_counts())

    async def compare_counts(self) -> None:
        for key in KEYS:
            kept = [job for job in self.models.values() if job.is_kept and job.key == key]
            active = sum(not job.status.is_final for job in kept)
            assert await self.world.quota(f"={key}") == (active, sum(job.size_bytes for job in kept))
        lanes = {lane.name: (lane.queued, lane.in_progress) for lane in (await self.callers.queue()).lanes}
        for lane in LANES:
            queued = sum(job.lane == lane for job in self.of(JobStatus.QUEUED))
            running = sum(job.lane == lane for job in self.of(JobStatus.IN_PROGRESS))
            assert lanes.get(lane, (0, 0)) == (queued, running)
            assert await self.entries(lane) == (running, running)

    async def entries(self, lane: str) -> tuple[int, int]:
        """Return how many entries a lane's streams have, and how many of these are pending."""
        entries, pending = 0, 0
        for stream in await self.world.streams(lane):
            entries += await self.redis.xlen(stream)
            pending += (await self.redis.xpending(stream, "workers"))["pending"]
        return entries, pending

    def teardown(self) -> None:
        for worker in range(WORKERS):
            self.die(worker)
        self.run(self.work_off())
        for model in self.models.values():
            job = self.run(self.callers.get(model.id))
            assert (job is not None) is model.is_kept
            if job is not None:
                assert job.status.is_final
                if model.status.is_final:  # it was before: for good
                    assert job.status is model.status
                model.status = job.status
        self.forget()
        assert self.run(self.world.names()) <= LEFT
        self.run(self.world.aclose())
        self.run(self.redis.aclose())
        self.runner.close()

    async def work_off(self) -> None:
        """Have whatever is left done."""
        for lane in LANES:
            for id in await self.redis.zrange(self.world.key("resting", lane), 0, -1):
                await self.redis.zadd(self.world.key("resting", lane), {str(id): 1})
        while job := await self.stores[0].claim("w0", LANES, ATTEMPTS_MAX):
            assert await self.stores[0].finish(job.id, job.claim, JobStatus.COMPLETED)


@pytest.mark.parametrize(("leg", "examples"), list(zip(legs(own=True), (15, 10), strict=False)))
def test_any_history_of_jobs(tmp_path: Path, leg: str, examples: int) -> None:
    with own_server(leg, tmp_path, keeps=True) as own:

        class OverLeg(JobHistories):
            server = own

        run_state_machine_as_test(
            OverLeg,
            settings=settings(
                max_examples=examples,
                stateful_step_count=40,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
