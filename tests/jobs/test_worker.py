"""A worker over a real store: jobs are worked off; none is lost, whatever ends the worker or the store."""

import gc
import json
import logging
import secrets
import sys
import threading
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import anyio
import pytest
from redis.asyncio import Redis
from support.job_world import LANES, QUOTA, JobWorld, is_asked_once
from support.redis_server import NEWEST, RedisServer, legs, own_server
from support.scripted_backend import (
    AFTER_END,
    ANSWER,
    BODY,
    WITHOUT_SLOT,
    WORDS,
    Asked,
    Backend,
    event,
    read,
    serves,
    tokens_of,
)

from gateway.core.errors import (
    BackendRejected,
    ContextExceeded,
    GatewayError,
    InvalidRequest,
    NoBackend,
    StoreUnavailable,
    StreamBroken,
    UpstreamBusy,
    UpstreamFaulty,
    UpstreamLost,
    UpstreamUnreachable,
)
from gateway.core.job_answers import answer_so_far, continuation
from gateway.core.jobs import (
    AfterRefusal,
    AttemptEnd,
    AttemptOutcome,
    Beginning,
    Chunk,
    Job,
    JobError,
    JobStatus,
    NewJob,
    Serving,
)
from gateway.jobs.worker import READS_AT_ONCE, UNPROVEN_ATTEMPTS, Worker, WorkerRules
from gateway.pipeline import CallerStalled
from gateway.ports import Downstream, Incoming
from gateway.store.jobs import RedisJobs
from gateway.threads import INLINE_BYTES

T = TypeVar("T")
WITHIN_S = 20.0
RULES = WorkerRules(beat_s=0.1, look_s=0.1, retry_s=0.01, retry_max_s=0.02)
TESTS = Path(__file__).parent.parent
ON_EVERY_SERVER = pytest.mark.parametrize("world", legs(), indirect=True)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.jobs.answer_writer.CHUNK_S", 0.001)
    monkeypatch.setattr("gateway.jobs.answer_writer.AGAIN_S", 0.05)
    monkeypatch.setattr("gateway.jobs.worker.AGAIN_S", 0.05)


@pytest.fixture(params=[NEWEST])
async def world(request: pytest.FixtureRequest, servers: Callable[[str], str]) -> AsyncIterator[JobWorld]:
    async with jobs_at(servers(request.param)) as world:
        yield world


@pytest.fixture(params=legs(own=True))
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RedisServer]:
    """Every supported server in turn, with its data on disk."""
    with own_server(request.param, tmp_path, keeps=True) as server:
        yield server


@pytest.fixture
async def kept(server: RedisServer) -> AsyncIterator[JobWorld]:
    """The jobs of a server that a test may end."""
    async with jobs_at(server.url) as world:
        yield world


@asynccontextmanager
async def jobs_at(url: str) -> AsyncIterator[JobWorld]:
    async with Redis.from_url(url, decode_responses=True) as redis:
        world = JobWorld(url, f"test-{secrets.token_hex(4)}", redis)
        yield world
        await world.aclose()


@asynccontextmanager
async def working(
    store: RedisJobs,
    backend: Backend,
    name: str = "w",
    rules: WorkerRules = RULES,
    on_attempt: Callable[[AttemptEnd], None] = lambda _: None,
    serves: Callable[[], Serving] = serves,
    can_run_lane: Callable[[str], bool] = lambda _: True,
    reads: Callable[[Job, bytes], Incoming] = read,
) -> AsyncIterator[Worker]:
    """Run a worker while the block runs."""
    worker = Worker(store, name, reads, backend.run, rules, serves, tokens_of, can_run_lane, on_attempt)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(store.run)
        tasks.start_soon(worker.run)
        yield worker
        tasks.cancel_scope.cancel()


async def submit(store: RedisJobs, *ids: str) -> None:
    for id in ids:
        job = NewJob(id=id, key="alice", lane="m/light", body=BODY)
        assert isinstance(await store.submit(job, QUOTA), Job)


async def ended(store: RedisJobs, id: str) -> Job:
    """Return a job once it has ended."""
    with anyio.fail_after(WITHIN_S):
        while True:
            job = await store.get(id)
            assert job is not None
            if job.status.is_final:
                return job
            await store.changed(id, job.chunks, 0.2, job.status)


async def until_stored(store: RedisJobs, id: str, text: str, *, is_whole: bool = False) -> None:
    """Return once that much of an answer is stored; `is_whole`: its end too."""
    with anyio.fail_after(WITHIN_S):
        while True:
            answer = answer_so_far(await store.all_chunks(id))
            if answer.content == text and bool(answer.finish_reason) is is_whole:
                return


async def content(store: RedisJobs, id: str) -> str:
    return answer_so_far(await store.all_chunks(id)).content


async def claimed_all(store: RedisJobs) -> None:
    """Return once no job waits."""
    with anyio.fail_after(WITHIN_S):
        while any(lane.queued for lane in (await store.queue()).lanes):
            await anyio.lowlevel.checkpoint()


async def served(world: JobWorld, workers: int) -> None:
    """Return once so many workers have said what they serve."""
    with anyio.fail_after(WITHIN_S):
        while len(await world.serving("m")) < workers:
            await anyio.lowlevel.checkpoint()


class Held:
    """Holds every answer before its word `number`, until it is let go."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._go = anyio.Event()

    async def __call__(self, asked: Asked, number: int) -> None:
        if number == self._number:
            await self._go.wait()

    def go(self) -> None:
        self._go.set()


# ------------------------------------------------------------------ worked off


@ON_EVERY_SERVER
async def test_jobs_are_worked_off_and_their_chunks_are_right(world: JobWorld) -> None:
    store, backend = world.open(), Backend()
    ids = [f"j{number}" for number in range(12)]
    await submit(store, *ids)
    async with working(store, backend):
        for id in ids:
            job = await ended(store, id)
            assert (job.status, job.attempt, job.failures, job.worker) == (JobStatus.COMPLETED, 1, 0, "w")
    for id in ids:
        chunks = await store.all_chunks(id)
        assert [chunk.number for chunk in chunks] == list(range(len(chunks)))
        assert {(chunk.attempt, chunk.restarts) for chunk in chunks} == {(1, False)}
        events = [*(event(content=word) for word in WORDS), event("stop"), b"data: [DONE]\n\n"]
        assert b"".join(chunk.data for chunk in chunks) == b"".join(events)
    assert max(backend.said.values()) == 1
    size = len(BODY) + len(b"{}") + len(b"".join(events))
    assert await world.quota() == (0, len(ids) * size)


async def test_an_answer_that_reached_its_length_is_incomplete(world: JobWorld) -> None:
    store = world.open()
    await submit(store, "a")
    async with working(store, Backend(finish_reason="length")):
        assert (await ended(store, "a")).status is JobStatus.INCOMPLETE


@pytest.mark.parametrize("refuses", [False, True])
async def test_no_more_is_taken_than_can_be_placed(world: JobWorld, refuses: bool) -> None:
    store, held = world.open(), Held(WITHOUT_SLOT)
    await submit(store, *"abcde")
    async with working(store, Backend(held, refuses=refuses)) as worker:
        with anyio.fail_after(WITHIN_S):
            while worker.running < RULES.ahead_max:
                await anyio.lowlevel.checkpoint()
        for _ in range(100):  # the worker could take them all by then
            await store.queue()
        await store.waiting(3 * RULES.look_s)
        assert worker.running == RULES.ahead_max
        assert [lane.queued for lane in (await store.queue()).lanes] == [3]
        held.go()
        for id in "abcde":
            await ended(store, id)


async def test_a_job_that_has_its_slot_makes_room_for_the_next_before_its_first_word(world: JobWorld) -> None:
    """A long prefill does not keep slots free that other jobs could use."""
    store, held = world.open(), Held(0)
    rules = replace(RULES, running_max=4)
    await submit(store, *"abcde")
    async with working(store, Backend(held), rules=rules) as worker:
        with anyio.fail_after(WITHIN_S):
            while worker.running < 4:
                await anyio.lowlevel.checkpoint()
        for _ in range(20):
            assert [lane.queued for lane in (await store.queue()).lanes] == [1]
        held.go()
        for id in "abcde":
            await ended(store, id)


async def test_room_that_comes_while_a_worker_looks_for_jobs_is_not_missed(
    world: JobWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, held, has_room, is_next_here = world.open(), Held(WITHOUT_SLOT), anyio.Event(), anyio.Event()
    claim = store.claim

    async def before(asked: Asked, number: int) -> None:
        await held(asked, number)
        if asked.job.id == "b":
            is_next_here.set()
        elif number == 0:
            has_room.set()
            await is_next_here.wait()

    async def claim_late(worker: str, lanes: Collection[str], *args: Any) -> Job | None:
        if not lanes:  # as many are ahead as may be
            held.go()
            await has_room.wait()
        return await claim(worker, lanes, *args)

    monkeypatch.setattr(store, "claim", claim_late)
    await submit(store, "a", "b")
    rules = replace(RULES, ahead_max=1, look_s=1000.0)
    # The store's `run` would wake it too.
    worker = Worker(store, "w", read, Backend(before).run, rules, serves, tokens_of)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(worker.run)
        await ended(store, "b")
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("question", ["queue", "waiting"])
async def test_a_store_that_is_away_is_not_asked_all_the_time(
    world: JobWorld, monkeypatch: pytest.MonkeyPatch, question: str
) -> None:
    store, asked = world.open(), 0

    async def away(*args: Any) -> None:
        nonlocal asked
        asked += 1
        await anyio.lowlevel.checkpoint()
        raise StoreUnavailable("It is away.")

    monkeypatch.setattr(store, question, away)
    async with working(store, Backend(), rules=replace(RULES, look_s=1000.0)):
        with anyio.fail_after(WITHIN_S):
            assert await is_asked_once(lambda: asked, world.redis)


# ------------------------------------------------------------------ given back, taken over, stopped


async def test_a_worker_whose_claim_the_store_has_forgotten_leaves_the_job_to_who_has_it(
    world: JobWorld, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gateway.jobs")
    first, second, is_asked, has_heard = Held(WITHOUT_SLOT), Held(1), anyio.Event(), anyio.Event()
    outcomes = dict[str, AttemptOutcome]()
    ends = {"first": anyio.Event(), "second": anyio.Event()}
    rules = replace(RULES, beat_s=1000.0, ahead_max=1)
    store, other = world.open(), world.open()
    append = store.append

    async def append_and_hear(*args: Any) -> bool:
        is_held = await append(*args)
        if not is_held:
            has_heard.set()
        return is_held

    async def hold_first(asked: Asked, number: int) -> None:
        is_asked.set()
        await first(asked, number)
        if number == 1:
            await has_heard.wait()  # the next word finds that the job is lost

    monkeypatch.setattr(store, "append", append_and_hear)

    def tell(name: str) -> Callable[[AttemptEnd], None]:
        def told(end: AttemptEnd) -> None:
            outcomes[name] = end.outcome
            ends[name].set()

        return told

    await submit(store, "a")
    async with AsyncExitStack() as stack:
        async with world.forgetting():
            await stack.enter_async_context(
                working(store, Backend(hold_first), "first", rules, tell("first"))
            )
            await is_asked.wait()
        await stack.enter_async_context(working(other, Backend(second), "second", rules, tell("second")))
        await until_stored(other, "a", WORDS[0])
        first.go()
        with anyio.fail_after(WITHIN_S):
            await ends["first"].wait()
            second.go()
            await ends["second"].wait()
        assert await content(other, "a") == ANSWER

    assert outcomes == {"first": AttemptOutcome.LOST, "second": AttemptOutcome.ENDED}
    assert _told(caplog, "job_lost") == [{"event": "job_lost", "id": "a", "lane": "m/light"}]
    assert not _told(caplog, "job_attempt_failed")


async def test_an_answer_of_which_the_store_has_lost_the_last_words_goes_on_from_those_that_it_has(
    world: JobWorld, caplog: pytest.LogCaptureFixture
) -> None:
    store, holds, ends = world.open(), (Held(2), Held(4)), list[AttemptOutcome]()

    async def hold(asked: Asked, number: int) -> None:
        for held in holds:
            await held(asked, number)

    backend = Backend(hold)
    await submit(store, "a")
    async with working(store, backend, on_attempt=lambda end: ends.append(end.outcome)):
        await until_stored(store, "a", "".join(WORDS[:2]))
        async with world.forgetting():
            holds[0].go()
            await until_stored(store, "a", "".join(WORDS[:4]))
        holds[1].go()
        job = await ended(store, "a")
        assert await content(store, "a") == ANSWER

    assert (job.status, job.failures) == (JobStatus.COMPLETED, 0)
    assert [asked.so_far for asked in backend.asked] == ["", "".join(WORDS[:2])]
    assert ends[0] is AttemptOutcome.RETURNED
    assert "failed inside the gateway" not in caplog.text


@pytest.mark.parametrize("lost_as", ["it-ends", "its-end-is-told"])
async def test_an_answer_whose_last_words_the_store_loses_as_it_ends_goes_on_from_those_that_it_has(
    world: JobWorld, lost_as: str
) -> None:
    """All of it was stored, and the loss comes before the job's end is: what is left must not pass for it."""
    first, last, is_told = Held(4), Held(AFTER_END), anyio.Event()
    is_back = anyio.Event()

    class Told(RedisJobs):
        async def finish(self, *args: Any, **options: Any) -> bool:
            is_told.set()
            await is_back.wait()
            return await super().finish(*args, **options)

    async def hold(asked: Asked, number: int) -> None:
        await first(asked, number)
        await last(asked, number)

    store, backend = Told(world.url, prefix=world.prefix, command_s=10.0), Backend(hold)
    await submit(store, "a")
    async with working(store, backend):
        await until_stored(store, "a", "".join(WORDS[:4]))
        async with world.forgetting():
            first.go()
            await until_stored(store, "a", ANSWER, is_whole=True)
            if lost_as == "its-end-is-told":
                last.go()
                await is_told.wait()
        last.go()
        is_back.set()
        job = await ended(store, "a")
        assert await content(store, "a") == ANSWER
    await store.aclose()

    assert (job.status, job.failures, job.attempt) == (JobStatus.COMPLETED, 0, 2)
    assert [asked.so_far for asked in backend.asked] == ["", "".join(WORDS[:4])]


@ON_EVERY_SERVER
async def test_a_worker_that_is_stopped_gives_its_job_back_and_another_goes_on(world: JobWorld) -> None:
    here, there = world.open(), world.open()
    first, second = Backend(Held(3)), Backend()
    await submit(here, "a")
    async with working(here, first, "first") as worker:
        await until_stored(there, "a", "".join(WORDS[:3]))
        await worker.stop()
        job = await there.get("a")
    assert job is not None
    assert (job.status, job.attempt, job.failures, job.retry_at) == (JobStatus.QUEUED, 1, 0, 0)

    async with working(there, second, "second"):
        job = await ended(there, "a")
    assert (job.status, job.attempt, job.failures, job.worker) == (JobStatus.COMPLETED, 2, 0, "second")
    assert [asked.so_far for asked in second.asked] == ["".join(WORDS[:3])]
    assert first.said + second.said == {f"a {number}": 1 for number in range(len(WORDS))}
    assert await content(there, "a") == ANSWER


async def test_a_worker_that_is_stopped_writes_what_it_has_received(
    world: JobWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slow(RedisJobs):
        async def append(self, job_id: str, claim: str, chunk: Chunk) -> bool:
            await world.redis.ping()
            return await super().append(job_id, claim, chunk)

        async def give_back(self, job_id: str, claim: str, **options: Any) -> bool:
            await world.redis.ping()
            return await super().give_back(job_id, claim, **options)

    monkeypatch.setattr("gateway.jobs.answer_writer.CHUNK_S", 1000.0)
    store, backend = Slow(world.url, prefix=world.prefix, command_s=10.0), Backend(Held(3))
    await submit(store, "a")
    async with working(store, backend) as worker:
        with anyio.fail_after(WITHIN_S):
            while not backend.said["a 2"]:
                await anyio.lowlevel.checkpoint()
        await worker.stop()
    job = await store.get("a")
    assert job is not None and job.status is JobStatus.QUEUED
    assert await content(store, "a") == "".join(WORDS[:3])
    await store.aclose()


@pytest.mark.parametrize(
    "error",
    [None, StreamBroken("It broke."), InvalidRequest("It has no place.")],
    ids=["answered", "breaks", "refused-by-us"],
)
async def test_a_job_that_was_lost_as_it_ended_has_not_ended_here(
    world: JobWorld, error: Exception | None
) -> None:
    store, ends = world.open(), list[AttemptEnd]()

    async def before(asked: Asked, number: int) -> None:
        if number == (AFTER_END if error is None else 0) and asked.job.attempt == 1:
            await until_stored(store, "a", "" if error else ANSWER, is_whole=error is None)
            await store.cancel("a")
            if error is not None:
                raise error

    await submit(store, "a")
    worker = Worker(store, "w", read, Backend(before).run, RULES, serves, tokens_of, on_attempt=ends.append)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(worker.run)  # without messages: it hears of the loss as it ends
        with anyio.fail_after(WITHIN_S):
            while not ends:
                await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
    assert [end.outcome for end in ends] == [AttemptOutcome.LOST]


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (None, AttemptOutcome.ENDED),
        (StreamBroken("It broke."), AttemptOutcome.POISONED),
        (InvalidRequest("It has no place."), AttemptOutcome.ENDED),
    ],
    ids=["answered", "breaks", "refused-by-us"],
)
async def test_a_job_whose_last_reply_is_lost_is_not_lost_to_the_heartbeat_that_comes_first(
    world: JobWorld, error: Exception | None, outcome: AttemptOutcome
) -> None:
    class Deaf(RedisJobs):
        """Does not hear the first reply about an end, and is asked again after a heartbeat."""

        finds_it_gone = anyio.Event()

        async def beat(self, *args: Any) -> Collection[str]:
            lost = await super().beat(*args)
            if lost:
                self.finds_it_gone.set()
            return lost

        async def finish(self, *args: Any, **options: Any) -> bool:
            return await self._once_more(super().finish, *args, **options)

        async def give_back(self, *args: Any, **options: Any) -> bool:
            return await self._once_more(super().give_back, *args, **options)

        async def refuse(self, *args: Any, **options: Any) -> AfterRefusal | None:
            return await self._once_more(super().refuse, *args, **options)

        async def _once_more(self, tell: Callable[..., Awaitable[T]], *args: Any, **options: Any) -> T:
            told = await tell(*args, **options)
            if not self.finds_it_gone.is_set():
                await self.finds_it_gone.wait()
                raise StoreUnavailable("Its reply is lost.")
            return told

    async def fails(asked: Asked, number: int) -> None:
        if number == 3 and error is not None:
            raise error

    store, ends = Deaf(world.url, prefix=world.prefix, command_s=10.0), list[AttemptOutcome]()
    await submit(store, "a")
    rules = replace(RULES, attempts_max=1)
    async with working(store, Backend(fails), rules=rules, on_attempt=lambda end: ends.append(end.outcome)):
        with anyio.fail_after(WITHIN_S):
            while not ends:
                await anyio.lowlevel.checkpoint()
    await store.aclose()

    assert ends == [outcome]


@pytest.mark.parametrize(
    ("finish_reason", "status"), [("stop", JobStatus.COMPLETED), ("length", JobStatus.INCOMPLETE)]
)
async def test_an_answer_that_was_whole_when_its_worker_died_is_not_asked_for_again(
    world: JobWorld, finish_reason: str, status: JobStatus
) -> None:
    store, backend = world.open(), Backend()
    await submit(store, "a")
    job = await world.claim(store, "gone")
    whole = event(content=ANSWER) + event(finish_reason) + b"data: [DONE]\n\n"
    await store.append(job.id, job.claim, Chunk(0, job.attempt, whole))
    await world.lose_worker_of("a")
    async with working(store, backend):
        job = await ended(store, "a")
    assert (job.status, job.attempt, job.error) == (status, 2, None)
    assert backend.asked == []
    assert await content(store, "a") == ANSWER


async def test_an_answer_of_whose_choices_one_was_whole_when_its_worker_died_begins_anew(
    world: JobWorld,
) -> None:
    store, backend = world.open(), Backend()
    body = json.dumps({**json.loads(BODY), "n": 2}).encode()
    await store.submit(NewJob(id="a", key="alice", lane="m/light", body=body), QUOTA)
    job = await world.claim(store, "gone")
    await store.append(job.id, job.claim, Chunk(0, job.attempt, event("stop", content=ANSWER)))
    await world.lose_worker_of("a")
    async with working(store, backend):
        assert (await ended(store, "a")).attempt == 2
    assert [asked.so_far for asked in backend.asked] == [""]


async def test_the_loss_of_an_earlier_attempt_does_not_end_this_one(world: JobWorld) -> None:
    store, held = world.open(), Held(1)
    await submit(store, "a")
    await world.claim(store, "gone")
    await world.lose_worker_of("a")
    async with working(store, Backend(held)) as worker:
        with anyio.fail_after(WITHIN_S):
            while worker.running < 1:
                await anyio.lowlevel.checkpoint()
            while not await world.redis.publish(world.key("work"), "1 a"):
                pass  # the worker does not hear yet
        await submit(store, "b")
        await claimed_all(store)
        held.go()
        assert (await ended(store, "a")).attempt == 2


async def test_a_worker_that_is_killed_loses_its_job_and_another_goes_on(world: JobWorld) -> None:
    lost_s = 2.0
    store, backend = world.open(lost_s=lost_s), Backend()
    await submit(store, "a")
    command = [sys.executable, "-m", "support.scripted_backend", world.url, world.prefix, str(lost_s)]
    async with await anyio.open_process(command, cwd=TESTS, stdout=None, stderr=None) as process:
        await until_stored(store, "a", "".join(WORDS[:4]))
        process.kill()
        await process.wait()
    async with working(store, backend, "next"):
        job = await ended(store, "a")
    assert (job.status, job.attempt, job.failures, job.worker) == (JobStatus.COMPLETED, 2, 1, "next")
    assert [asked.so_far for asked in backend.asked] == ["".join(WORDS[:4])]
    assert await content(store, "a") == ANSWER


async def test_a_worker_that_lives_keeps_its_job_for_as_long_as_it_takes(world: JobWorld) -> None:
    lost_s = 2.0
    here, there = world.open(lost_s=lost_s), world.open(lost_s=lost_s)
    held = Held(3)
    await submit(here, "a")
    async with working(here, Backend(held), "first"):
        await until_stored(there, "a", "".join(WORDS[:3]))
        async with working(there, Backend(), "second"):
            await anyio.sleep(2 * lost_s)
            held.go()
            job = await ended(there, "a")
    assert (job.status, job.attempt, job.worker) == (JobStatus.COMPLETED, 1, "first")


async def test_a_worker_that_hears_of_no_loss_learns_of_it_with_its_next_heartbeat(world: JobWorld) -> None:
    store, other, backend = world.open(), world.open(), Backend(Held(3))
    # The store's `run` would tell it at once.
    worker = Worker(store, "w", read, backend.run, RULES, serves, tokens_of)
    await submit(other, "a")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(worker.run)
        await until_stored(other, "a", "".join(WORDS[:3]))
        worker.drain()
        with anyio.fail_after(WITHIN_S):
            taken = None
            while taken is None:  # a heartbeat may come in between
                await world.lose_worker_of("a")
                taken = await other.claim("other", LANES, 3)
            assert taken.attempt == 2
            while worker.running:
                await anyio.lowlevel.checkpoint()
        assert backend.stopped["a"] == 1
        tasks.cancel_scope.cancel()


async def test_a_worker_may_get_a_job_again_that_it_has_lost_without_knowing(world: JobWorld) -> None:
    """It was stalled, or alone, for so long that its job went back, and is told of nothing."""
    store, other = world.open(), world.open()

    async def held(asked: Asked, number: int) -> None:
        if (asked.job.id, asked.job.attempt, number) == ("a", 1, 3):
            await anyio.sleep_forever()
        if (asked.job.id, asked.job.attempt, number) == ("a", 2, 4):
            while not backend.stopped["a"]:
                await anyio.lowlevel.checkpoint()
            await anyio.wait_all_tasks_blocked()
            running.append(worker.running)

    running, backend = list[int](), Backend(held)
    worker = Worker(store, "w", read, backend.run, replace(RULES, beat_s=1000.0), serves, tokens_of)
    await submit(other, "a")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(worker.run)
        await until_stored(other, "a", "".join(WORDS[:3]))
        await world.lose_worker_of("a")
        job = await ended(other, "a")
        await submit(other, "b")
        await ended(other, "b")
        with anyio.fail_after(WITHIN_S):
            while worker.running:
                await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
    assert (job.status, job.attempt, job.failures) == (JobStatus.COMPLETED, 2, 1)
    assert (await content(other, "a"), backend.stopped["a"]) == (ANSWER, 1)
    assert running == [1]  # the end of the first attempt did not take the second one with it


async def test_a_heartbeat_whose_reply_is_late_does_not_end_the_attempt_that_began_meanwhile(
    world: JobWorld,
) -> None:
    other, has_some, is_again, is_renewed = world.open(), anyio.Event(), anyio.Event(), anyio.Event()

    class Late(RedisJobs):
        async def beat(
            self, worker: str, claims: Collection[tuple[str, str]], serving: Serving
        ) -> Collection[str]:
            if is_again.is_set():
                is_renewed.set()  # the heartbeat before has been dealt with
            if not has_some.is_set() or is_again.is_set():
                return await super().beat(worker, claims, serving)
            await world.lose_worker_of("a")
            await other.claim("other", [], 3, "")  # whoever comes next finds that out
            lost = await super().beat(worker, claims, serving)
            await is_again.wait()
            return lost

    async def held(asked: Asked, number: int) -> None:
        if (asked.job.id, asked.job.attempt, number) == ("a", 1, 3):
            has_some.set()
            await anyio.sleep_forever()
        if (asked.job.id, asked.job.attempt, number) == ("a", 2, 4):
            is_again.set()
            await is_renewed.wait()

    here, backend = Late(world.url, prefix=world.prefix, command_s=10.0), Backend(held)
    await submit(other, "a")
    async with working(here, backend):
        job = await ended(other, "a")
    assert (job.status, job.attempt, backend.stopped["a"]) == (JobStatus.COMPLETED, 2, 1)
    await here.aclose()


async def test_an_attempt_may_take_longer_to_end_than_the_one_that_came_after_it(world: JobWorld) -> None:
    """What it still has to write waits for the store, say, and that was done by the other one."""
    store, other = world.open(), world.open()
    outcomes, is_done, is_late = list[tuple[int, AttemptOutcome]](), anyio.Event(), anyio.Event()

    async def held(asked: Asked, number: int) -> None:
        if (asked.job.id, asked.job.attempt, number) == ("a", 1, 3):
            try:
                await anyio.sleep_forever()
            finally:
                with anyio.CancelScope(shield=True):
                    await is_done.wait()

    def told(end: AttemptEnd) -> None:
        outcomes.append((end.job.attempt, end.outcome))
        if end.job.id == "a":
            (is_late if end.job.attempt == 1 else is_done).set()

    await submit(other, "a")
    async with working(store, Backend(held), rules=replace(RULES, beat_s=1000.0), on_attempt=told) as worker:
        await until_stored(other, "a", "".join(WORDS[:3]))
        await world.lose_worker_of("a")
        with anyio.fail_after(WITHIN_S):
            await is_late.wait()
        await submit(other, "b")
        assert (await ended(other, "b")).status is JobStatus.COMPLETED
        with anyio.fail_after(WITHIN_S):
            while worker.running:
                await anyio.lowlevel.checkpoint()
    assert outcomes[:2] == [(2, AttemptOutcome.ENDED), (1, AttemptOutcome.LOST)]
    assert await content(other, "a") == ANSWER


@ON_EVERY_SERVER
@pytest.mark.parametrize("how", ["cancelled", "deleted"])
async def test_a_job_that_is_cancelled_stops_its_worker(world: JobWorld, how: str) -> None:
    here, there = world.open(), world.open()
    backend = Backend(Held(3))
    await submit(here, "a")
    rules = WorkerRules(beat_s=1000.0, look_s=1000.0)  # only what is said at once
    async with working(here, backend, rules=rules) as worker:
        await until_stored(there, "a", "".join(WORDS[:3]))
        if how == "cancelled":
            await there.cancel("a")
        else:
            await there.delete("a")
        with anyio.fail_after(WITHIN_S):
            while worker.running:
                await anyio.lowlevel.checkpoint()
        assert backend.stopped["a"] == 1
        job = await there.get("a")
        if how == "deleted":
            assert job is None
        else:
            assert job is not None and job.status is JobStatus.CANCELLED
            assert await content(there, "a") == "".join(WORDS[:3])


async def lasts_until(
    change: Callable[[], None], wait: Callable[[], Awaitable[None]], world: JobWorld
) -> None:
    """Assert that `wait` ends with a change, and not before."""
    is_over = anyio.Event()

    async def over() -> None:
        await wait()
        is_over.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(over)
        for _ in range(100):  # the worker looks again and again
            await world.redis.ping()
        assert not is_over.is_set()
        change()
        with anyio.fail_after(WITHIN_S):
            await is_over.wait()


@ON_EVERY_SERVER
async def test_a_worker_that_drains_finishes_what_has_begun_and_gives_back_the_rest(world: JobWorld) -> None:
    store, held = world.open(), Held(3)
    ends: list[AttemptEnd] = []

    async def before(asked: Asked, number: int) -> None:
        if asked.job.id == "a":
            await held(asked, number)
        else:
            await anyio.sleep_forever()

    await submit(store, *"abcd")
    rules = replace(RULES, look_s=1000.0)  # it is woken
    async with working(store, Backend(before), rules=rules, on_attempt=ends.append) as worker:
        await until_stored(store, "a", "".join(WORDS[:3]))
        with anyio.fail_after(WITHIN_S):
            while worker.running < 1 + RULES.ahead_max:
                await anyio.lowlevel.checkpoint()
        worker.drain()
        with anyio.fail_after(WITHIN_S):
            while worker.running > 1:
                await anyio.lowlevel.checkpoint()
        await lasts_until(held.go, worker.wait_idle, world)
        assert worker.running == 0
    jobs = {id: await store.get(id) for id in "abcd"}
    assert {
        id: (job.status.value, job.attempt, job.failures, job.retry_at) for id, job in jobs.items() if job
    } == {
        "a": ("completed", 1, 0, 0),
        "b": ("queued", 1, 0, 0),
        "c": ("queued", 1, 0, 0),
        "d": ("queued", 0, 0, 0),
    }
    outcomes = {end.job.id: end.outcome for end in ends}
    returned = AttemptOutcome.RETURNED
    assert outcomes == {"a": AttemptOutcome.ENDED, "b": returned, "c": returned}


@pytest.mark.parametrize("ids", ["a", ""], ids=["one", "none"])
@pytest.mark.parametrize("how", ["drained", "stopped"])
async def test_a_worker_that_ends_returns_a_job_of_which_it_has_not_heard(
    world: JobWorld, how: str, ids: str
) -> None:
    is_claimed, ends = anyio.Event(), list[AttemptOutcome]()

    class Deaf(RedisJobs):
        """Does not hear whether it got a job, and is not asked again before the worker is to end."""

        async def claim(self, worker: str, *args: Any) -> Job | None:
            job = await super().claim(worker, *args)
            if not is_claimed.is_set():
                if job is not None:
                    self._tokens[worker] = job.claim
                await submit(self, "next")  # which it is to leave alone
                is_claimed.set()
                if how == "stopped":
                    life.cancel_scope.cancel()
                raise StoreUnavailable("Its reply is lost.")
            return job

        async def give_back(self, job_id: str, claim: str, **options: Any) -> bool:
            await world.redis.ping()
            return await super().give_back(job_id, claim, **options)

    store = Deaf(world.url, prefix=world.prefix, command_s=10.0)
    backend = Backend(Held(0))
    worker = Worker(
        *(store, "w", read, backend.run, RULES, serves, tokens_of),
        on_attempt=lambda end: ends.append(end.outcome),
    )
    await submit(store, *ids)
    async with anyio.create_task_group() as life:
        life.start_soon(worker.run)
        await is_claimed.wait()
        worker.drain()
        with anyio.fail_after(WITHIN_S):
            await worker.wait_idle()
        assert ends == [AttemptOutcome.RETURNED] * len(ids)
        life.cancel_scope.cancel()
    jobs = [await store.get(id) for id in (*ids, "next")]
    await store.aclose()
    assert [(job.status, job.attempt, job.failures, job.retry_at) for job in jobs if job] == [
        *((JobStatus.QUEUED, 1, 0, 0) for _ in ids),
        (JobStatus.QUEUED, 0, 0, 0),
    ]
    assert ends == [AttemptOutcome.RETURNED] * len(ids)


async def test_a_worker_that_ends_does_not_wait_for_a_store_that_is_away(
    world: JobWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it got a job with its last claim, it cannot find out."""
    store, is_asked = world.open(), anyio.Event()

    async def away(*args: Any) -> None:
        is_asked.set()
        await anyio.lowlevel.checkpoint()
        raise StoreUnavailable("It is away.")

    monkeypatch.setattr(store, "claim", away)
    worker = Worker(store, "w", read, Backend().run, RULES, serves, tokens_of)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(worker.run)
        await is_asked.wait()
        worker.drain()
        with anyio.fail_after(WITHIN_S):
            await worker.wait_idle()
            await worker.stop()


async def test_a_worker_that_is_stopped_as_it_claims_a_job_claims_no_more(world: JobWorld) -> None:
    """It would claim what it gives back, again and again, if that takes less time than to claim."""

    class Counted(RedisJobs):
        claims = 0

        async def claim(self, *args: Any) -> Job | None:
            self.claims += 1
            if self.claims > 1:
                await anyio.sleep_forever()
            job = await super().claim(*args)
            life.cancel_scope.cancel()
            return job

    store = Counted(world.url, prefix=world.prefix, command_s=10.0)
    await submit(store, "a", "b")
    async with anyio.create_task_group() as life:
        worker = Worker(store, "w", read, Backend(Held(0)).run, RULES, serves, tokens_of)
        life.start_soon(worker.run)
    jobs = [await store.get(id) for id in "ab"]
    assert [(job.status, job.attempt, job.failures) for job in jobs if job] == [
        (JobStatus.QUEUED, 1, 0),
        (JobStatus.QUEUED, 0, 0),
    ]
    assert store.claims == 1
    await store.aclose()


async def test_a_worker_that_drains_takes_jobs_as_long_as_callers_wait_for_them(world: JobWorld) -> None:
    rules, needs = replace(RULES, look_s=1000.0), True  # it is woken
    store, held = world.open(), Held(3)
    await submit(store, "a")
    async with working(store, Backend(held), rules=rules) as worker:
        worker.drain(lambda: needs)
        await until_stored(store, "a", "".join(WORDS[:3]))
        await submit(store, "b")
        await until_stored(store, "b", "".join(WORDS[:3]))
        needs = False
        held.go()
        assert {(await ended(store, id)).attempt for id in "ab"} == {1}
        with anyio.fail_after(WITHIN_S):
            await worker.wait_idle()
        await submit(store, "c")
        for _ in range(100):
            await world.redis.ping()
        job = await store.get("c")
        assert job is not None and job.status is JobStatus.QUEUED


async def test_a_worker_that_drains_can_wait_for_answers_that_callers_stay_connected_for(
    world: JobWorld,
) -> None:
    rules = replace(RULES, look_s=1000.0)  # it is woken
    store, held = world.open(), Held(3)

    async def before(asked: Asked, number: int) -> None:
        if asked.job.id == "awaited":
            await held(asked, number)
        elif number == 3 or asked.job.id == "awaited-too":
            await anyio.sleep_forever()

    backend = Backend(before)
    await submit(store, "awaited", "b")
    async with working(store, backend, rules=rules) as worker:
        for id in ("awaited", "b"):
            await until_stored(store, id, "".join(WORDS[:3]))
        await submit(store, "awaited-too")
        with anyio.fail_after(WITHIN_S):
            while len(backend.asked) < 3:
                await anyio.lowlevel.checkpoint()
        worker.drain()
        assert worker.awaited == 1
        await lasts_until(held.go, worker.wait_unawaited, world)
        assert worker.running == 1
    jobs = {id: await store.get(id) for id in ("awaited", "awaited-too", "b")}
    assert {id: (job.status.value, job.attempt) for id, job in jobs.items() if job} == {
        "awaited": ("completed", 1),
        "awaited-too": ("queued", 1),
        "b": ("queued", 1),
    }


async def test_a_worker_for_which_callers_wait_no_more_notices_it_when_it_is_waited_for(
    world: JobWorld,
) -> None:
    store, is_needed, has_looked = world.open(), True, anyio.Event()

    class Waiting(RedisJobs):
        async def waiting(self, wait_s: float) -> Collection[tuple[str, int]]:
            for _ in range(10):  # this ends here if it was to look again anyway
                await anyio.lowlevel.checkpoint()
            if worker.is_draining:
                has_looked.set()
            return await super().waiting(wait_s)

    here = Waiting(world.url, prefix=world.prefix, command_s=10.0)
    rules = replace(RULES, look_s=1000.0)
    # The store's `run` would wake it too.
    worker = Worker(here, "w", read, Backend(Held(3)).run, rules, serves, tokens_of)
    await submit(store, "a")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(worker.run)
        await until_stored(store, "a", "".join(WORDS[:3]))
        worker.drain(lambda: is_needed)
        with anyio.fail_after(WITHIN_S):
            await has_looked.wait()
            is_needed = False
            await worker.wait_unawaited()
        assert worker.running == 1
        tasks.cancel_scope.cancel()
    await here.aclose()


# ------------------------------------------------------------------ the store stops


@pytest.mark.parametrize("at", [0, 2, AFTER_END], ids=["refused", "in-the-answer", "at-its-end"])
@pytest.mark.parametrize("how", ["stalled", "restarted"])
async def test_a_store_that_is_away_for_longer_than_a_worker_may_be_costs_nothing(
    server: RedisServer, kept: JobWorld, monkeypatch: pytest.MonkeyPatch, how: str, at: int
) -> None:
    monkeypatch.setattr("gateway.jobs.worker.FINISH_S", 0.5)
    lost_s = 2.0
    store, other = (kept.open(lost_s=lost_s, command_s=0.5) for _ in range(2))
    held, asked, end = Held(at), anyio.Event(), anyio.Event()

    async def before(request: Asked, number: int) -> None:
        asked.set()
        await held(request, number)
        if number == AFTER_END:
            end.set()
        elif number == at == 0:
            end.set()
            raise BackendRejected("It is wrong.", status=400, code="wrong")

    await submit(store, "a")
    async with working(store, Backend(before), "first"), working(other, Backend(before), "second"):
        with anyio.fail_after(WITHIN_S):
            await asked.wait()
        await until_stored(store, "a", "".join(WORDS[:at]), is_whole=at == AFTER_END)
        if how == "stalled":
            server.stall()
        else:
            server.kill()
        held.go()
        with anyio.fail_after(WITHIN_S):
            await end.wait()  # the rest comes while nobody can write it down
        await anyio.sleep(lost_s * 1.2)
        if how == "stalled":
            server.resume()
        else:
            await anyio.to_thread.run_sync(server.start)
        with anyio.fail_after(WITHIN_S):
            await is_back(store)
        job = await ended(store, "a")
    status = JobStatus.FAILED if at == 0 else JobStatus.COMPLETED
    assert (job.status, job.attempt, job.failures) == (status, 1, 0)
    assert await content(store, "a") == ("" if at == 0 else ANSWER)


async def is_back(store: RedisJobs) -> None:
    while True:
        try:
            await store.queue()
        except GatewayError:
            await anyio.sleep(0.05)
        else:
            return


# ------------------------------------------------------------------ attempts fail


def failing(error: Exception, times: int, number: int) -> Any:
    """Return what fails an answer before its word `number`, so many times; it has begun unless that is 0."""
    left = [times]

    async def before(asked: Asked, at: int) -> None:
        if at == number and left[0]:
            left[0] -= 1
            raise error

    return before


@pytest.mark.parametrize(
    ("error", "times", "number", "status", "code", "failures"),
    [
        (StreamBroken("It broke."), 2, 3, JobStatus.COMPLETED, None, 2),
        (StreamBroken("It broke."), 3, 0, JobStatus.FAILED, "job_poisoned", 3),
        (UpstreamFaulty("It errs."), UNPROVEN_ATTEMPTS - 1, 0, JobStatus.COMPLETED, None, 1),
        (UpstreamFaulty("It errs."), UNPROVEN_ATTEMPTS + 1, 0, JobStatus.FAILED, "job_poisoned", 3),
        (UpstreamLost("It died."), 3, 0, JobStatus.FAILED, "job_poisoned", 3),
        (NoBackend("None is up."), 5, 0, JobStatus.COMPLETED, None, 0),
        (UpstreamBusy("It is busy."), 5, 0, JobStatus.COMPLETED, None, 0),
        (UpstreamUnreachable("It is away."), 5, 0, JobStatus.COMPLETED, None, 0),
        (BackendRejected("It is wrong.", status=400, code="wrong"), 1, 0, JobStatus.FAILED, "wrong", 0),
        (InvalidRequest("It has no place."), 2, 0, JobStatus.COMPLETED, None, 2),
        (InvalidRequest("It has no place."), 3, 0, JobStatus.FAILED, "invalid_request", 2),
        (CallerStalled(), 1, 3, JobStatus.COMPLETED, None, 0),
        (ZeroDivisionError(), 1, 3, JobStatus.COMPLETED, None, 1),
    ],
    ids=[
        "breaks",
        "keeps-breaking",
        "errs-for-a-while",
        "errs-on-and-on",
        "dies-of-it",
        "fleet-down",
        "backends-busy",
        "backends-away",
        "refused",
        "refused-by-us",
        "always-refused-by-us",
        "store-too-slow",
        "fault-of-ours",
    ],
)
async def test_what_a_failure_costs(
    world: JobWorld,
    error: Exception,
    times: int,
    number: int,
    status: JobStatus,
    code: str | None,
    failures: int,
) -> None:
    store = world.open()
    await submit(store, "a")
    async with working(store, Backend(failing(error, times, number))):
        job = await ended(store, "a")
    assert (job.status, job.failures) == (status, failures)
    assert (job.error.code if job.error else None) == code
    if status is JobStatus.COMPLETED:
        assert await content(store, "a") == ANSWER


@pytest.mark.parametrize(
    ("errors", "rests_s"),
    [
        pytest.param([UpstreamBusy("It is busy.")] * 5, [1, 2, 4, 5, 5], id="busy"),
        pytest.param([UpstreamUnreachable("It is away.", retry_after_s=30)], [30], id="says-when"),
        pytest.param([UpstreamBusy("It is busy.", retry_after_s=1)] * 2, [1, 2], id="too-soon"),
        pytest.param([StreamBroken("It broke.")] * 3, [1, 2, 4], id="breaks"),
        pytest.param([NoBackend("None is up.")] * 3, [1, 1, 1], id="fleet-down"),
        pytest.param([UpstreamBusy("It is busy."), StreamBroken("It broke.")], [1, 1], id="no-failure-yet"),
        pytest.param([ZeroDivisionError()], [1], id="fault-of-ours"),
    ],
)
async def test_how_long_a_job_rests_after_each_failure(
    world: JobWorld, monkeypatch: pytest.MonkeyPatch, errors: list[Exception], rests_s: list[float]
) -> None:
    store, rested_s, left = world.open(), [], iter(errors)
    give_back = store.give_back

    async def give_back_at_once(*args: Any, after_s: float, **options: Any) -> bool:
        rested_s.append(after_s)
        return await give_back(*args, after_s=0.0, **options)

    async def before(asked: Asked, number: int) -> None:
        if number == 0 and (error := next(left, None)) is not None:
            raise error

    monkeypatch.setattr(store, "give_back", give_back_at_once)
    await submit(store, "a")
    rules = replace(RULES, retry_s=1.0, retry_max_s=5.0, attempts_max=9)
    async with working(store, Backend(before), rules=rules):
        assert (await ended(store, "a")).status is JobStatus.COMPLETED
    assert rested_s == rests_s


async def test_a_job_that_was_refused_for_days_is_refused_as_any_other(world: JobWorld) -> None:
    store = world.open()
    await submit(store, "a")
    await cast("Any", world.redis).hset(world.key("job", "a"), "attempt", 2000)
    async with working(store, Backend(failing(UpstreamBusy("It is busy."), 1, 0))):
        job = await ended(store, "a")
    assert (job.status, job.attempt, job.failures) == (JobStatus.COMPLETED, 2002, 0)


async def test_what_an_attempt_held_is_free_when_it_has_failed(
    world: JobWorld, without_collector: None
) -> None:
    store, tried = world.open(), []

    async def fail(asked: Asked, number: int) -> None:
        tried.append(weakref.ref(asked))
        backend.asked.clear()
        raise InvalidRequest("It is too long for every backend.")

    backend = Backend(fail)
    await submit(store, "a")
    async with working(store, backend):
        assert (await ended(store, "a")).status is JobStatus.FAILED
        assert len(tried) == RULES.attempts_max
        with anyio.fail_after(WITHIN_S):
            while any(asked() for asked in tried):
                await anyio.lowlevel.checkpoint()


async def test_the_body_of_an_answered_job_is_free(world: JobWorld, without_collector: None) -> None:
    store, backend = world.open(), Backend()
    async with working(store, backend):
        await submit(store, "first")  # of which redis-py keeps frames, because the server knows no script yet
        await ended(store, "first")
        for id in ("answered-1", "answered-2"):
            await submit(store, id)
            assert (await ended(store, id)).status is JobStatus.COMPLETED
        backend.asked.clear()
        with anyio.fail_after(WITHIN_S):
            while any(type(one) is NewJob and "answered" in one.id for one in gc.get_objects()):
                await anyio.lowlevel.checkpoint()


async def test_errors_count_against_the_one_job_that_has_them(world: JobWorld) -> None:
    """Its backend has answered others meanwhile."""
    store, tries = world.open(), 0

    async def errs(asked: Asked, number: int) -> None:
        nonlocal tries
        if asked.job.id != "poison" or number:
            return
        tries += 1
        if tries > 1:
            await submit(store, f"other-{tries}")
            await ended(store, f"other-{tries}")
        raise UpstreamFaulty("It errs.")

    await submit(store, "poison")
    async with working(store, Backend(errs)):
        job = await ended(store, "poison")
    assert (job.error and job.error.code, job.failures, job.attempt) == ("job_poisoned", 3, 3)


async def test_an_answer_before_a_job_s_last_error_says_nothing_of_it(world: JobWorld) -> None:
    """The engine broke after that one."""
    store, tries = world.open(), 0

    async def errs(asked: Asked, number: int) -> None:
        nonlocal tries
        if asked.job.id == "before" or number:
            return
        tries += 1
        if tries < 8:
            raise UpstreamFaulty("It errs.")

    async with working(store, Backend(errs)):
        await submit(store, "before")
        await ended(store, "before")
        await submit(store, "a")
        job = await ended(store, "a")
    assert (job.status, job.failures, job.attempt) == (JobStatus.COMPLETED, 1, 8)
    assert job.setback == "It errs."


async def test_what_a_worker_remembers_of_errors_is_bounded(
    world: JobWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those it has forgotten, no error counts that the next answer does not follow."""
    monkeypatch.setattr("gateway.jobs.worker.KNOWN_MAX", 1)
    store, tries = world.open(), Counter[str]()

    async def errs(asked: Asked, number: int) -> None:
        if not number:
            tries[asked.job.id] += 1
            if tries[asked.job.id] < 8:
                raise UpstreamFaulty("It errs.")

    await submit(store, "a", "b", "c")
    async with working(store, Backend(errs), rules=replace(RULES, attempts_max=9)) as worker:
        jobs = [await ended(store, id) for id in "abc"]
        assert len(worker._failed) == 1
    assert {job.status for job in jobs} == {JobStatus.COMPLETED}


async def test_a_worker_remembers_the_jobs_that_have_failed_last(
    world: JobWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one that it has forgotten, an answer before its next attempt says nothing."""
    monkeypatch.setattr("gateway.jobs.worker.KNOWN_MAX", 2)
    monkeypatch.setattr("gateway.jobs.worker.UNPROVEN_ATTEMPTS", sys.maxsize)
    store, may_end = world.open(), set[str]()
    errs_after, erred, told = dict[str, int](), dict[str, int](), set[tuple[str, int]]()

    async def before(asked: Asked, number: int) -> None:
        id, attempt = asked.job.id, asked.job.attempt
        if number:
            return
        if attempt > errs_after.get(id, sys.maxsize):
            del errs_after[id]
            erred[id] = attempt
            raise UpstreamFaulty("It errs.")
        if id not in may_end:
            raise NoBackend("None is up.")

    async def err(id: str) -> None:
        """Have the next attempt at a job fail."""
        job = await store.get(id)
        errs_after[id] = job.attempt if job else 0
        if job is None:
            await submit(store, id)
        with anyio.fail_after(WITHIN_S):
            while id in errs_after or (id, erred[id]) not in told:
                await anyio.lowlevel.checkpoint()

    def tell(end: AttemptEnd) -> None:
        told.add((end.job.id, end.job.attempt))

    failures = dict[str, int]()
    async with working(store, Backend(before), on_attempt=tell):
        for id in "abac":
            await err(id)
        for id in "cab":  # the first is the answer in between
            if id != "c":
                await err(id)
            may_end.add(id)
            failures[id] = (await ended(store, id)).failures
    assert failures == {"a": 2, "b": 1, "c": 1}


async def test_a_job_is_given_up_though_it_took_the_last_backend_with_it(
    world: JobWorld, caplog: pytest.LogCaptureFixture
) -> None:
    """While none is up, nobody claims it to find that out."""
    store, asked = world.open(), 0

    async def dies(_: Asked, __: int) -> None:
        nonlocal asked
        asked += 1
        raise StreamBroken("It broke.")

    await submit(store, "a")
    async with working(store, Backend(dies), can_run_lane=lambda _: asked < RULES.attempts_max):
        job = await ended(store, "a")
    message = "The job was given up: 3 attempts at it failed. The last: It broke."
    assert job.error == JobError("job_poisoned", message)
    told = [(fields["attempt"], fields["reason"]) for fields in _told(caplog, "job_attempt_failed")]
    assert told == [(attempt, "It broke.") for attempt in range(1, RULES.attempts_max + 1)]


async def test_jobs_of_a_model_that_a_worker_has_not_wait_for_one_that_has_it(
    world: JobWorld, caplog: pytest.LogCaptureFixture
) -> None:
    store, other, models = world.open(), world.open(), {"m"}
    both = Serving("new", frozenset({"m", "new"}))
    await store.submit(NewJob(id="a", key="alice", lane="new/light", body=BODY), QUOTA)
    await submit(store, "b")
    held = await other.claim("other", ["new/light"], 3)
    assert held is not None

    async with working(store, Backend(), serves=lambda: Serving("old", frozenset(models))):
        await ended(store, "b")
        assert not _told(caplog, "jobs_left_alone")  # somebody has it
        await other.give_back(held.id, held.claim, attempts_max=3)
        await submit(store, "c")
        await ended(store, "c")
        waits = await store.get("a")
        assert waits is not None
        assert (waits.status, waits.attempt, waits.position) == (JobStatus.QUEUED, 1, 1)
        async with working(other, Backend(), "other", serves=lambda: both):
            assert (await ended(store, "a")).worker == "other"
        await submit(store, "e")
        await ended(store, "e")  # it has seen by then that nothing is left to others

        await store.submit(NewJob(id="d", key="alice", lane="new/light", body=BODY), QUOTA)
        with anyio.fail_after(WITHIN_S):
            while len(told := _told(caplog, "jobs_left_alone")) < 2:
                await anyio.lowlevel.checkpoint()
        assert told == [{"event": "jobs_left_alone", "lane": "new/light", "queued": 1}] * 2
        models.add("new")  # the configuration has it by now
        assert (await ended(store, "d")).worker == "w"


async def test_jobs_wait_in_the_store_while_no_backend_is_up_here(world: JobWorld) -> None:
    here, there, up = world.open(), world.open(), set[str]()
    for lane in ("m/light", "m/push"):
        await here.submit(NewJob(id=lane, key="alice", lane=lane, body=BODY), QUOTA)
    async with working(here, Backend(), "here", can_run_lane=lambda lane: lane in up):
        up.add("m/light")
        assert (await ended(here, "m/light")).worker == "here"
        waits = await here.get("m/push")
        assert waits is not None
        assert (waits.status, waits.attempt, waits.position) == (JobStatus.QUEUED, 0, 1)
        async with working(there, Backend(), "there"):
            assert (await ended(there, "m/push")).worker == "there"


async def test_a_job_that_one_configuration_refuses_waits_for_a_process_that_has_another(
    world: JobWorld, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gateway.jobs")
    here, there, held = world.open(), world.open(), Held(WITHOUT_SLOT)
    ends = list[AttemptEnd]()

    async def refuse(asked: Asked, number: int) -> None:
        if asked.job.id.startswith("long"):
            raise InvalidRequest("It is too long for every backend.")

    async with working(there, Backend(held), "there"):
        await submit(there, "b1", "b2")
        await claimed_all(there)
        long = [f"long{number}" for number in range(2 * RULES.attempts_max)]
        await submit(here, *long, "short")
        small = Serving("small", frozenset({"m"}))
        async with working(
            here, Backend(refuse), "here", serves=lambda: small, on_attempt=ends.append
        ) as worker:
            assert (await ended(here, "short")).worker == "here"  # what is left to others holds up nobody
            await here.waiting(3 * RULES.look_s)
            assert worker.running == 0
            waiting = [await here.get(id) for id in long]
            assert {(job.attempt, job.failures) for job in waiting if job} == {(1, 0)}
            assert {job.position for job in waiting if job} == set(range(1, len(long) + 1))
            held.go()
            for id in long:
                job = await ended(here, id)
                assert (job.status, job.worker, job.attempt) == (JobStatus.COMPLETED, "there", 2)

    outcomes = {end.job.id: end.outcome for end in ends}
    assert outcomes == {**dict.fromkeys(long, AttemptOutcome.RETURNED), "short": AttemptOutcome.ENDED}
    assert sorted(fields["id"] for fields in _told(caplog, "job_left")) == long
    assert not await world.names() & {"refused", "left"}


@ON_EVERY_SERVER
async def test_a_job_that_every_configuration_refuses_ends_with_the_refusal(world: JobWorld) -> None:
    stores = [world.open(), world.open()]

    async def refuse(asked: Asked, number: int) -> None:
        raise InvalidRequest("It is too long for every backend.")

    backends = [Backend(refuse), Backend(refuse)]
    async with AsyncExitStack() as stack:
        for number, store in enumerate(stores):
            serves = partial(Serving, f"config{number}", frozenset({"m"}))
            await stack.enter_async_context(working(store, backends[number], f"w{number}", serves=serves))
            await served(world, number + 1)
        await submit(stores[0], "a")
        job = await ended(stores[0], "a")
    assert job.error == JobError("invalid_request", "It is too long for every backend.")
    asked = [len(backend.asked) for backend in backends]
    assert min(asked) > 0
    assert sum(asked) == 1 + RULES.attempts_max  # the first was left to the other


async def test_a_job_whose_request_every_configuration_refuses_ends_with_the_refusal(
    world: JobWorld, caplog: pytest.LogCaptureFixture
) -> None:
    def reads(job: Job, body: bytes) -> Incoming:
        raise InvalidRequest("Images have to come as `data:` URLs.")

    store, backend = world.open(), Backend()
    async with working(store, backend, reads=reads):
        await submit(store, "a")
        job = await ended(store, "a")
    assert job.error == JobError("invalid_request", "Images have to come as `data:` URLs.")
    assert (job.attempt, len(backend.asked)) == (RULES.attempts_max, 0)
    assert [fields["attempt"] for fields in _told(caplog, "job_attempt_failed")] == [1, 2]


async def test_a_configuration_that_is_given_up_is_not_waited_for(world: JobWorld) -> None:
    """A process that has read another one has it, and whoever is gone is remembered for a while only."""
    store, config = world.open(), "old"

    async def refuse(asked: Asked, number: int) -> None:
        if config == "new":
            raise InvalidRequest("It is too long for every backend.")

    async with working(store, Backend(refuse), serves=lambda: Serving(config, frozenset({"m"}))):
        await served(world, 1)
        await cast("Any", world.redis).zadd(world.key("serving", "m"), {"gone other": 1})
        config = "new"
        with anyio.fail_after(WITHIN_S):
            while await world.serving("m") != ["w new"]:
                await anyio.lowlevel.checkpoint()
        await submit(store, "a")
        job = await ended(store, "a")
    assert (job.status, job.attempt) == (JobStatus.FAILED, RULES.attempts_max)


async def test_a_refusal_is_the_configuration_s_under_which_the_job_was_claimed(world: JobWorld) -> None:
    """A process may have read another one meanwhile, which is to have its own say."""
    store, config = world.open(), "old"

    async def refuse(asked: Asked, number: int) -> None:
        nonlocal config
        if config == "old":
            config = "new"
            with anyio.fail_after(WITHIN_S):
                while await world.serving("m") != ["w new"]:
                    await anyio.lowlevel.checkpoint()
            raise InvalidRequest("It is too long for every backend.")

    async with working(store, Backend(refuse), serves=lambda: Serving(config, frozenset({"m"}))):
        await submit(store, "a")
        job = await ended(store, "a")
    assert (job.status, job.attempt, job.failures) == (JobStatus.COMPLETED, 2, 0)


async def test_a_job_that_every_configuration_refuses_rests_for_as_long_as_can_be(
    world: JobWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, rested_s = world.open(), list[float]()
    refuse = store.refuse

    async def refuse_at_once(*args: Any, after_s: float, **options: Any) -> AfterRefusal | None:
        rested_s.append(after_s)
        return await refuse(*args, after_s=0.0, **options)

    monkeypatch.setattr(store, "refuse", refuse_at_once)
    await submit(store, "a")
    rules = replace(RULES, retry_s=1.0, retry_max_s=5.0)
    error = InvalidRequest("It is too long for every backend.", param="messages")
    async with working(store, Backend(failing(error, RULES.attempts_max, 0)), rules=rules):
        job = await ended(store, "a")
    assert job.error == JobError("invalid_request", "It is too long for every backend.", "messages")
    assert rested_s == [5.0] * RULES.attempts_max


@pytest.mark.parametrize(
    "error",
    [BackendRejected("No such thing.", status=400, code="invalid_request"), ContextExceeded("Too long.")],
    ids=["by-the-engine", "by-the-gateway"],
)
@pytest.mark.parametrize("is_late", [False, True], ids=["at-once", "after-a-word"])
async def test_an_answer_whose_continuation_is_refused_begins_anew(
    world: JobWorld, error: GatewayError, is_late: bool
) -> None:
    class Refusing(Backend):
        async def run(self, incoming: Incoming, downstream: Downstream, **more: Any) -> None:
            if cast("Asked", incoming).so_far and is_late:
                await downstream.send(event(content="and "))
                await downstream.fail(error, error.code)
                return
            if cast("Asked", incoming).so_far:
                raise error
            await super().run(incoming, downstream, **more)

    store = world.open()
    backend = Refusing(failing(StreamBroken("It broke."), 1, 3))
    await submit(store, "a")
    async with working(store, backend):
        assert (await ended(store, "a")).status is JobStatus.COMPLETED
    chunks = await store.all_chunks("a")
    assert [chunk.number for chunk in chunks] == list(range(len(chunks)))
    assert sum(chunk.restarts for chunk in chunks) == 1
    assert await content(store, "a") == ANSWER


async def test_an_answer_that_begins_anew_waits_for_a_slot_again(world: JobWorld) -> None:
    held, is_waiting = Held(WITHOUT_SLOT), anyio.Event()

    async def before(asked: Asked, number: int) -> None:
        if asked.job.id == "b":
            return
        if asked.so_far and number > WITHOUT_SLOT:
            raise BackendRejected("It cannot continue.", status=400, code="wrong")
        if not asked.so_far and number == WITHOUT_SLOT:
            is_waiting.set()
            await held(asked, number)

    store, rules = world.open(), replace(RULES, ahead_max=1)
    await submit(store, "a")
    job = await world.claim(store, "gone")
    await store.append(job.id, job.claim, Chunk(0, job.attempt, event(content=WORDS[0])))
    await world.lose_worker_of("a")
    async with working(store, Backend(before), rules=rules):
        with anyio.fail_after(WITHIN_S):
            await is_waiting.wait()
        await submit(store, "b")
        for _ in range(100):  # the worker could take it by then
            await store.queue()
        await store.waiting(3 * RULES.look_s)
        assert [lane.queued for lane in (await store.queue()).lanes] == [1]
        held.go()
        for id in "ab":
            assert (await ended(store, id)).status is JobStatus.COMPLETED
    assert await content(store, "a") == ANSWER


async def test_a_continuation_may_be_as_long_as_the_answer_has_tokens_left(world: JobWorld) -> None:
    store, backend = world.open(), Backend(failing(StreamBroken("It broke."), 1, 3))
    body = json.dumps({**json.loads(BODY), "max_tokens": 20}).encode()
    await store.submit(NewJob(id="a", key="alice", lane="m/light", body=body), QUOTA)
    async with working(store, backend):
        assert (await ended(store, "a")).status is JobStatus.COMPLETED
    first, second = backend.asked
    assert (first.body["max_tokens"], len(second.so_far.split())) == (20, 3)
    assert second.body["max_tokens"] == 17


@pytest.mark.parametrize(
    "bad",
    [
        b"{",
        b"[]",
        b'{"choices": ["x"]}',
        b'{"choices": [{"delta": {"content": 1}}]}',
        # What `json.loads` takes; those who read the answer do not.
        b'{"choices": [{"delta": {"content": "\\ud83d"}}]}',
        b'{"choices": [], "cost": NaN}',
        b'{"choices": [], "cost": 1e999}',
    ],
)
@pytest.mark.parametrize(("times", "code"), [(1, None), (3, "job_poisoned")])
async def test_an_answer_with_an_invalid_event_begins_anew(
    world: JobWorld, caplog: pytest.LogCaptureFixture, bad: bytes, times: int, code: str | None
) -> None:
    store, backend = world.open(), Backend()

    async def run(incoming: Incoming, downstream: Downstream, *, on_admitted: Callable[[bool], None]) -> None:
        if len(backend.asked) < times:
            await downstream.send(b"data: " + bad + b"\n\n")
        await Backend.run(backend, incoming, downstream, on_admitted=on_admitted)

    await submit(store, "a")
    worker = Worker(store, "w", read, run, RULES, serves, tokens_of)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(worker.run)
        job = await ended(store, "a")
        tasks.cancel_scope.cancel()
    assert ((job.error.code if job.error else None), job.failures) == (code, times)
    assert [asked.so_far for asked in backend.asked] == [""] * (times if code else times + 1)
    if code is None:
        assert await content(store, "a") == ANSWER
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_few_answers_are_read_at_once(world: JobWorld) -> None:
    class Counted(RedisJobs):
        reading = most = 0

        async def all_chunks(self, job_id: str) -> Sequence[Chunk]:
            self.reading += 1
            self.most = max(self.most, self.reading)
            try:
                return await super().all_chunks(job_id)
            finally:
                self.reading -= 1

    ready = anyio.Event()

    async def together(asked: Asked, number: int) -> None:
        if number == AFTER_END:
            if sum(backend.said.values()) == len(WORDS) * len(ids):
                ready.set()
            await ready.wait()

    ids = [f"a{number}" for number in range(6)]
    store, backend = Counted(world.url, prefix=world.prefix, command_s=10.0), Backend(together)
    await submit(store, *ids)
    async with working(store, backend, rules=replace(RULES, ahead_max=len(ids))):
        assert {(await ended(store, id)).status for id in ids} == {JobStatus.COMPLETED}
    assert store.most == READS_AT_ONCE
    await store.aclose()


async def test_what_an_answer_has_thought_counts_as_part_of_its_length(world: JobWorld) -> None:
    store, backend = world.open(), Backend()
    body = json.dumps({**json.loads(BODY), "max_completion_tokens": 20}).encode()
    await store.submit(NewJob(id="a", key="alice", lane="m/light", body=body), QUOTA)
    job = await world.claim(store, "gone")
    begun = event(reasoning_content="One two three four five. ") + event(content=WORDS[0])
    await store.append(job.id, job.claim, Chunk(0, job.attempt, begun))
    await world.lose_worker_of("a")
    async with working(store, backend):
        assert (await ended(store, "a")).status is JobStatus.COMPLETED
    assert [asked.body["max_completion_tokens"] for asked in backend.asked] == [14]


@pytest.mark.parametrize(
    ("begun", "more", "facts", "beside"),
    [
        pytest.param("", "", b"{}", set(), id="short"),
        pytest.param("x" * INLINE_BYTES, "", b"{}", {"continued", "read", "answer"}, id="long-answer"),
        pytest.param("", "x" * INLINE_BYTES, b"{}", {"continued", "read", "answer"}, id="long-request"),
        pytest.param("", "", b'"%b"' % (b"x" * INLINE_BYTES), {"continued", "read"}, id="long-facts"),
    ],
)
async def test_what_is_long_is_read_beside_the_event_loop_however_short_the_rest(
    world: JobWorld, monkeypatch: pytest.MonkeyPatch, begun: str, more: str, facts: bytes, beside: set[str]
) -> None:
    own, threads = threading.get_ident(), dict[str, set[bool]]()

    def noted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any) -> Any:
            threads.setdefault(name, set()).add(threading.get_ident() == own)
            return call(*args)

        return called

    monkeypatch.setattr("gateway.jobs.worker.continuation", noted("continued", continuation))
    monkeypatch.setattr("gateway.jobs.worker.answer_so_far", noted("answer", answer_so_far))
    store, body = world.open(), json.dumps({**json.loads(BODY), "user": more}).encode()
    await store.submit(NewJob(id="a", key="alice", lane="m/light", body=body, facts=facts), QUOTA)
    job = await world.claim(store, "gone")
    await store.append(job.id, job.claim, Chunk(0, job.attempt, event(content=f"{begun} {WORDS[0]}")))
    await world.lose_worker_of("a")
    async with working(store, Backend(), reads=noted("read", read)):
        assert (await ended(store, "a")).status is JobStatus.COMPLETED
    assert threads == {name: {name not in beside} for name in ("continued", "read", "answer")}


# ------------------------------------------------------------------ what is told of attempts


@pytest.mark.parametrize(
    ("before", "continues", "told"),
    [
        ([], True, ["new ended completed"]),
        ([StreamBroken("It broke.")], True, ["new failed", "continued ended completed"]),
        ([StreamBroken("It broke.")], False, ["new failed", "restarted ended completed"]),
        ([NoBackend("None is up.")], True, ["new returned", "continued ended completed"]),
        ([BackendRejected("It is wrong.", status=400, code="wrong")], True, ["new ended failed"]),
        (
            [InvalidRequest("It has no place.")] * 5,  # the continuation, and then the whole
            True,
            ["new failed", "restarted failed", "restarted ended failed"],
        ),
        (
            [StreamBroken("It broke.")] * 3,
            True,
            ["new failed", "continued failed", "continued poisoned"],
        ),
    ],
    ids=["well", "continued", "restarted", "returned", "refused", "refused-by-us", "poisoned"],
)
async def test_every_attempt_is_told_of(
    world: JobWorld, before: list[Exception], continues: bool, told: list[str]
) -> None:
    store, ends = world.open(), list[AttemptEnd]()
    errors = iter(before)

    async def fails(asked: Asked, number: int) -> None:
        if number == len(WORDS) - 1 and (error := next(errors, None)) is not None:
            raise error

    rules = replace(RULES, continues=continues)
    await submit(store, "a")
    async with working(store, Backend(fails), rules=rules, on_attempt=ends.append):
        job = await ended(store, "a")
    assert [
        " ".join(filter(None, (end.beginning.value, end.outcome.value, end.status and end.status.value)))
        for end in ends
    ] == told
    assert all(0 <= end.waited_s <= end.lasted_s for end in ends)
    assert all(0 <= end.took_s < WITHIN_S for end in ends)
    assert [end.job.attempt for end in ends] == list(range(1, len(told) + 1))
    assert job.status is not JobStatus.QUEUED


async def test_a_job_that_was_taken_away_is_told_of(
    world: JobWorld, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gateway.jobs")
    store, ends = world.open(), list[AttemptEnd]()
    await submit(store, "a")
    async with working(store, Backend(Held(3)), on_attempt=ends.append) as worker:
        await until_stored(store, "a", "".join(WORDS[:3]))
        await store.cancel("a")
        with anyio.fail_after(WITHIN_S):
            while worker.running:
                await anyio.lowlevel.checkpoint()
    assert [(end.beginning, end.outcome) for end in ends] == [(Beginning.NEW, AttemptOutcome.LOST)]
    assert _told(caplog, "job_lost") == [{"event": "job_lost", "id": "a", "lane": "m/light"}]


def _told(caplog: pytest.LogCaptureFixture, event: str) -> list[dict[str, Any]]:
    """Return the fields of an event, as often as it was logged."""
    told = [getattr(record, "fields", {}) for record in caplog.records]
    return [fields for fields in told if fields.get("event") == event]
