"""A batch runner over a real store: every line is written down once, whatever dies or does not answer."""

import json
import random
import secrets
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import anyio
import pytest
from redis.asyncio import Redis
from support.batch_lines import read_lines
from support.batch_world import CHAT, LONG_S, BatchWorld, jsonl
from support.job_world import is_asked_once
from support.redis_server import NEWEST, legs

from gateway.core import batches
from gateway.core.batches import Batch, BatchClaim, BatchLine, BatchSnapshot, BatchStatus
from gateway.core.errors import AtCapacity, ModelNotFound, StoreUnavailable
from gateway.core.jobs import Chunk, Job, JobError, JobPriority, JobStatus, NewJob
from gateway.jobs import BatchRules, BatchRunner
from gateway.jobs.batches import COLLECTED_AT_ONCE, SUBMITTED_MAX
from gateway.store.batches import RedisBatches
from gateway.store.files import RedisFiles
from gateway.store.jobs import RedisJobs

WITHIN_S = 60.0
RULES = BatchRules(queued_max=8, look_s=0.01)
LANE = "m/light"
ON_EVERY_SERVER = pytest.mark.parametrize("world", legs(), indirect=True)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.jobs.batches.AGAIN_S", 0.01)
    monkeypatch.setattr("gateway.jobs.batches.RELEASE_S", 0.1)  # the dead let nothing go


@pytest.fixture(params=[NEWEST])
async def world(request: pytest.FixtureRequest, servers: Callable[[str], str]) -> AsyncIterator[BatchWorld]:
    url = servers(request.param)
    async with Redis.from_url(url, decode_responses=True) as redis:
        world = BatchWorld(url, f"test-{secrets.token_hex(4)}", redis)
        yield world
        await world.aclose()


async def read_line(batch: Batch, line: BatchLine) -> NewJob:
    """Make a job of a line as the gateway does, of a fleet that knows one model."""
    body = json.loads(line.body)
    if body["model"] != "m":
        raise ModelNotFound("The model does not exist.", param="model")
    return NewJob(
        id=f"resp_{batch.line_token(line.number)}",
        key=batch.key,
        lane=LANE,
        body=line.body,
        facts=json.dumps({"custom_id": line.custom_id}).encode(),
        priority=JobPriority.BATCH,
        batch=batch.id,
    )


def reading_until(is_full: anyio.Event) -> Callable[[Batch, BatchLine], Awaitable[NewJob]]:
    """Return what makes jobs of lines, and sets an event with the first line for which there is no room."""

    async def read(batch: Batch, line: BatchLine) -> NewJob:
        if line.number > RULES.queued_max:
            is_full.set()
        return await read_line(batch, line)

    return read


def answer_to(text: str) -> bytes:
    choice = {"index": 0, "delta": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    event = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
    return b"data: " + json.dumps(event).encode() + b"\n\ndata: [DONE]\n\n"


class Workers:
    """Gives every job that is queued its answer: its own custom_id.

    Attributes:
        most: The most jobs there were at once.
        begun: How often each job was.
        ends: How a job ends, by its custom_id, where it is not completed.
    """

    def __init__(self, store: RedisJobs) -> None:
        self._store = store
        self.most = 0
        self.begun: Counter[str] = Counter()
        self.ends: dict[str, tuple[JobStatus, JobError | None]] = {}

    async def run(self) -> None:
        while True:
            lanes = (await self._store.queue()).lanes
            self.most = max(self.most, sum(lane.queued for lane in lanes))
            job = await self._store.claim("w", [LANE], 3, "c") if lanes else None
            if job is None:
                await anyio.sleep(0.005)
                continue
            custom_id = json.loads(job.new.facts)["custom_id"]
            self.begun[custom_id] += 1
            status, error = self.ends.get(custom_id, (JobStatus.COMPLETED, None))
            await self._store.append(job.id, job.claim, Chunk(0, job.attempt, answer_to(custom_id)))
            await self._store.finish(job.id, job.claim, status, error)


@asynccontextmanager
async def running(
    world: BatchWorld, read: Any = read_line, rules: BatchRules = RULES, batches: Any = None
) -> AsyncIterator[BatchRunner]:
    """Run a runner while the block runs."""
    runner = BatchRunner(batches or world.open(), world.files, world.jobs, read, rules)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(runner.run)
        yield runner
        await runner.stop()


@asynccontextmanager
async def working(world: BatchWorld) -> AsyncIterator[Workers]:
    workers = Workers(world.jobs)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(workers.run)
        yield workers
        tasks.cancel_scope.cancel()


async def until(world: BatchWorld, holds: Callable[[Batch], bool], id: str = "batch_1") -> Batch:
    """Return a batch once something holds of it."""
    batches = world.open()
    with anyio.fail_after(WITHIN_S):
        while True:
            batch = await batches.get(id)
            if batch is not None and holds(batch):
                return batch
            await anyio.sleep(0.01)


async def ended(world: BatchWorld, id: str = "batch_1") -> Batch:
    return await until(world, lambda batch: batch.status.is_final, id)


async def make(world: BatchWorld, content: bytes, id: str = "batch_1") -> Batch:
    batches = world.open()
    await world.upload(content, f"file-{id}")
    made = await batches.create(Batch(id, "alice", CHAT, f"file-{id}", 0))
    assert isinstance(made, Batch)
    return made


def names(lines: list[dict[str, Any]]) -> list[str]:
    return sorted(line["custom_id"] for line in lines)


def wanted(count: int) -> list[str]:
    return sorted(f"r{number}" for number in range(1, count + 1))


# ------------------------------------------------------------------ worked off


@ON_EVERY_SERVER
async def test_every_line_gets_its_own_answer_and_few_are_jobs_at_once(
    world: BatchWorld, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    await make(world, jsonl(60))
    async with working(world) as workers, running(world):
        batch = await ended(world)
        await until(world, lambda _: bool(_ends_told(caplog)))

    assert _ends_told(caplog) == ["completed"]
    assert (batch.status, batch.total, batch.completed, batch.failed) == (BatchStatus.COMPLETED, 60, 60, 0)
    lines = await world.lines(batch.output_file_id)
    assert names(lines) == wanted(60)
    for line in lines:
        body = line["response"]["body"]
        assert body["choices"][0]["message"]["content"] == line["custom_id"]
        assert line["id"] == batch.line_id(int(line["custom_id"][1:]))
        assert body["id"] == f"chatcmpl-{line['id'].removeprefix('batch_req_')}"
    assert 0 < workers.most <= RULES.queued_max
    assert set(workers.begun.values()) == {1}
    assert await world.jobs.find() == []


async def test_a_runner_that_is_full_takes_the_next_batch_when_one_is_over(world: BatchWorld) -> None:
    ids = [f"batch_{number}" for number in range(4)]
    for id in ids:
        await make(world, jsonl(1), id)
    async with running(world, rules=replace(RULES, taken_max=2)):
        await until(world, lambda batch: batch.total == 1, ids[1])
        others = world.open()
        left = [await others.take() for _ in range(3)]
        assert [claim and claim.batch.id for claim in left] == [*ids[2:], None]
        for claim in left[:2]:
            assert claim is not None
            await others.release(claim)
        async with working(world):
            for id in ids:
                assert (await ended(world, id)).status is BatchStatus.COMPLETED


@ON_EVERY_SERVER
async def test_what_a_job_has_become_decides_where_its_line_stands(world: BatchWorld) -> None:
    await make(world, jsonl(5) + jsonl(6, model="other").splitlines(keepends=True)[5])
    async with working(world) as workers, running(world):
        workers.ends = {
            "r1": (JobStatus.FAILED, JobError("context_length_exceeded", "Too long.")),
            "r2": (JobStatus.FAILED, JobError("job_poisoned", "It was given up.")),
            "r3": (JobStatus.FAILED, JobError("job_expired", "Its time was over.")),
            "r4": (JobStatus.INCOMPLETE, None),
        }
        batch = await ended(world)

    failures = {line["custom_id"]: line for line in await world.lines(batch.error_file_id)}
    told = {
        name: (line["response"]["status_code"], line["response"]["body"]["error"]["code"])
        for name, line in failures.items()
        if line["response"]
    }
    assert told == {
        "r1": (400, "context_length_exceeded"),
        "r2": (502, "job_poisoned"),
        "r6": (404, "model_not_found"),
    }
    assert failures["r3"]["error"]["code"] == "batch_expired"
    assert names(await world.lines(batch.output_file_id)) == ["r4", "r5"]
    assert (batch.completed, batch.failed) == (2, 4)


async def test_a_line_whose_job_was_cancelled_or_is_gone_says_so(world: BatchWorld) -> None:
    await make(world, jsonl(2))
    batches = world.open()
    async with running(world):
        with anyio.fail_after(WITHIN_S):
            while len(lines := await batches.running("batch_1")) < 2:
                await anyio.lowlevel.checkpoint()
        first, second = sorted(lines, key=lambda line: line.number)
        await world.jobs.cancel(first.job_id)
        await world.jobs.delete(second.job_id)
        batch = await ended(world)
    told = {line["custom_id"]: line["error"]["code"] for line in await world.lines(batch.error_file_id)}
    assert told == {"r1": "request_cancelled", "r2": "request_lost"}


async def test_a_line_that_is_nested_as_deeply_as_can_be_read_is_not_lost(
    world: BatchWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    def line(depth: int) -> bytes:
        deep = f'{{"model":"m","x":{"[" * depth}{"]" * depth}}}'
        text = f'{{"custom_id":"r{depth}","method":"POST","url":"{CHAT}","body":{deep}}}\n'
        return text.encode()

    def readable() -> list[bytes]:
        lines = [line(sys.getrecursionlimit() - left) for left in range(100)]
        return [line for line in lines if isinstance(next(read_lines([line], CHAT)), BatchLine)]

    async def read(batch: Batch, line: BatchLine) -> NewJob:
        return await read_line(batch, replace(line, body=b'{"model":"m"}'))

    lines = await anyio.to_thread.run_sync(readable)
    lines = lines[5:]  # the batch is not read from quite as high in the stack
    monkeypatch.setattr(batches, "LINES_MAX", len(lines))  # and nothing is counted twice
    await make(world, b"".join(lines))
    async with working(world), running(world, read):
        batch = await ended(world)

    assert (batch.status, batch.total) == (BatchStatus.COMPLETED, len(lines))
    assert batch.completed == batch.total


async def test_a_store_that_does_not_answer_for_a_line_costs_no_line(world: BatchWorld) -> None:
    asked = Counter[int]()

    async def read(batch: Batch, line: BatchLine) -> NewJob:
        asked[line.number] += 1
        if line.number == 2 and asked[2] == 1:
            raise StoreUnavailable("once")
        return await read_line(batch, line)

    await make(world, jsonl(3))
    async with working(world), running(world, read):
        batch = await ended(world)
    assert (batch.completed, batch.failed) == (3, 0)


@asynccontextmanager
async def job_given_up(world: BatchWorld, jobs: RedisJobs) -> AsyncIterator[None]:
    """Have the job of a batch of one line fail, which a runner collects from `jobs` from then on."""
    await make(world, jsonl(1))
    runner = BatchRunner(world.open(), world.files, jobs, read_line, RULES)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(runner.run)
        with anyio.fail_after(WITHIN_S):
            while (job := await jobs.claim("w", [LANE], 3, "c")) is None:
                await anyio.lowlevel.checkpoint()
        await jobs.finish(job.id, job.claim, JobStatus.FAILED, JobError("job_poisoned", "It was given up."))
        yield
        await runner.stop()
    await jobs.aclose()


async def test_a_job_that_is_tried_again_is_not_looked_at_before_it_ends(world: BatchWorld) -> None:
    class Retried(RedisJobs):
        loads = 0

        async def load(self, job_id: str) -> Job | None:
            self.loads += 1
            await self.retry(job_id)
            return await super().load(job_id)

    jobs = Retried(world.url, prefix=world.prefix, command_s=10.0)
    async with job_given_up(world, jobs):
        with anyio.fail_after(WITHIN_S):
            assert await is_asked_once(lambda: jobs.loads, world.redis)


async def test_a_job_that_is_tried_again_as_it_is_collected_is_waited_for(world: BatchWorld) -> None:
    class Retried(RedisJobs):
        loads = 0

        async def load(self, job_id: str) -> Job | None:
            self.loads += 1
            if self.loads > 1:
                return await super().load(job_id)
            await self.retry(job_id)
            job = await super().load(job_id)
            again = await self.claim("w", [LANE], 3, "c")
            assert again is not None
            await self.append(again.id, again.claim, Chunk(0, again.attempt, answer_to("r1")))
            await self.finish(again.id, again.claim, JobStatus.COMPLETED)
            return job  # as it was a moment ago

        async def all_chunks(self, job_id: str) -> Sequence[Chunk]:
            return () if self.loads == 1 else await super().all_chunks(job_id)

    async with job_given_up(world, Retried(world.url, prefix=world.prefix, command_s=10.0)):
        batch = await ended(world)
    (line,) = await world.lines(batch.output_file_id)
    assert line["response"]["body"]["choices"][0]["message"]["content"] == "r1"


async def test_a_fleet_that_cannot_say_now_is_asked_again(world: BatchWorld) -> None:
    batches, refused = world.open(), 0

    async def read(batch: Batch, line: BatchLine) -> NewJob:
        nonlocal refused
        now = await batches.get(batch.id)
        assert now is not None
        if line.number == 10 and refused < 5:  # of which several when all others have ended
            refused += now.completed == 9
            raise AtCapacity("Too many long prompts wait to be counted.")
        return await read_line(batch, line)

    await make(world, jsonl(10).rstrip())
    async with working(world), running(world, read):
        batch = await ended(world)
    assert (batch.completed, batch.failed) == (10, 0)


async def test_a_fleet_that_cannot_say_now_is_not_asked_all_the_time(world: BatchWorld) -> None:
    asked = 0

    async def read(batch: Batch, line: BatchLine) -> NewJob:
        nonlocal asked
        asked += 1
        raise AtCapacity("Too many long prompts wait to be counted.")

    await make(world, jsonl(1))
    async with running(world, read, replace(RULES, look_s=LONG_S)):
        with anyio.fail_after(WITHIN_S):
            assert await is_asked_once(lambda: asked, world.redis)


@pytest.mark.parametrize("question", ["take", "look"])
async def test_a_store_that_is_away_is_not_asked_all_the_time(
    world: BatchWorld, monkeypatch: pytest.MonkeyPatch, question: str
) -> None:
    monkeypatch.setattr("gateway.jobs.batches.AGAIN_S", LONG_S)
    batches, asked = world.open(), 0

    async def away(*args: Any) -> None:
        nonlocal asked
        asked += 1
        await anyio.lowlevel.checkpoint()
        raise StoreUnavailable("It is away.")

    monkeypatch.setattr(batches, question, away)
    await make(world, jsonl(1))
    async with running(world, rules=replace(RULES, taken_max=1, look_s=0.0), batches=batches):
        with anyio.fail_after(WITHIN_S):
            assert await is_asked_once(lambda: asked, world.redis)


async def test_a_runner_stops_between_two_lines_although_the_next_could_follow_at_once(
    world: BatchWorld,
) -> None:
    await make(world, jsonl(100))
    read: list[str] = []
    async with anyio.create_task_group() as tasks:

        async def read_and_stop(batch: Batch, line: BatchLine) -> NewJob:
            read.append(line.custom_id)
            tasks.start_soon(runner.stop)
            return await read_line(batch, line)

        runner = BatchRunner(world.open(), world.files, world.jobs, read_and_stop, RULES)
        await runner.run()
    assert read == ["r1"]
    assert (await world.take(world.open())).number == 1


async def test_a_runner_that_is_stopped_as_it_takes_a_batch_takes_no_more(world: BatchWorld) -> None:
    """It would take what it lets go, again and again, if that takes less time than to take it."""

    class Counted(RedisBatches):
        takes = 0

        async def take(self) -> BatchClaim | None:
            self.takes += 1
            if self.takes > 1:
                await anyio.sleep_forever()
            claim = await super().take()
            life.cancel_scope.cancel()
            return claim

    await make(world, jsonl(1))
    batches = Counted(world.url, prefix=world.prefix, command_s=10.0)
    async with anyio.create_task_group() as life:
        life.start_soon(BatchRunner(batches, world.files, world.jobs, read_line, RULES).run)
    assert batches.takes == 1
    assert await world.open().take() is not None
    await batches.aclose()


async def test_a_batch_ends_with_its_lines_even_if_the_last_ones_are_submitted_together(
    world: BatchWorld,
) -> None:
    await make(world, jsonl(SUBMITTED_MAX).rstrip())
    async with running(world, rules=replace(RULES, queued_max=2 * SUBMITTED_MAX)), working(world):
        batch = await ended(world)
    assert (batch.completed, batch.failed) == (SUBMITTED_MAX, 0)


async def test_a_batch_that_meets_a_fault_of_ours_is_resumed(
    world: BatchWorld, caplog: pytest.LogCaptureFixture
) -> None:
    asked = Counter[int]()

    async def read(batch: Batch, line: BatchLine) -> NewJob:
        asked[line.number] += 1
        if line.number == 2 and asked[2] == 1:
            raise ZeroDivisionError
        return await read_line(batch, line)

    await make(world, jsonl(3))
    async with working(world), running(world, read, batches=world.open(lease_s=0.5)):
        batch = await ended(world)
    assert (batch.completed, batch.failed) == (3, 0)
    assert "batch batch_1 failed inside the gateway; it will be resumed" in caplog.messages


class SlowFiles(RedisFiles):
    """Files of which each piece takes longer to come than a lease lasts, unless that is renewed."""

    def __init__(self, world: BatchWorld) -> None:
        super().__init__(world.url, prefix=world.prefix, command_s=10.0)
        self._world = world
        self._others = world.open()
        self.was_free: list[bool] = []  # whether another runner could have taken the batch, at each piece

    async def read(self, file_id: str, offset: int, limit: int | None = None) -> bytes:
        taken = await self._others.take()
        if taken is not None:
            await self._others.release(taken)
        self.was_free.append(taken is not None)
        await self._world.lose_runner_of("batch_1")
        return await super().read(file_id, offset, limit)


async def test_a_file_that_takes_long_to_validate_stays_with_its_runner(world: BatchWorld) -> None:
    await make(world, jsonl(2000, pad="x" * 1000) + b"{}\n")
    slow = SlowFiles(world)
    # This runner looks for no other batch: on a slow machine, it would take its own once more in between.
    runner = BatchRunner(world.open(), slow, world.jobs, read_line, replace(RULES, taken_max=1))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(runner.run)
        assert (await ended(world)).status is BatchStatus.FAILED
        await runner.stop()
    assert len(slow.was_free) > 3
    assert not any(slow.was_free)
    await slow.aclose()


class LongReads(RedisFiles):
    """Files of which each piece takes so long that the lease on the batch has to be renewed meanwhile."""

    def __init__(self, world: BatchWorld) -> None:
        super().__init__(world.url, prefix=world.prefix, command_s=10.0)
        self._world = world

    async def read(self, file_id: str, offset: int, limit: int | None = None) -> bytes:
        await renewed(self._world)
        return await super().read(file_id, offset, limit)


async def renewed(world: BatchWorld) -> None:
    """Wait until the lease on a batch is renewed."""
    held = [await world.redis.hget(world.key("batch", "batch_1"), "until")]
    with anyio.fail_after(WITHIN_S):
        while held[-1] == held[0]:
            await anyio.sleep(0.01)
            held.append(await world.redis.hget(world.key("batch", "batch_1"), "until"))


async def test_a_step_that_takes_longer_than_the_lease_keeps_the_batch(
    world: BatchWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.jobs.batches.RENEW_S", 0.02)

    async def read_long(batch: Batch, line: BatchLine) -> NewJob:
        await renewed(world)
        return await read_line(batch, line)

    await make(world, jsonl(2))
    files = LongReads(world)
    runner = BatchRunner(world.open(), files, world.jobs, read_long, RULES)
    async with working(world), anyio.create_task_group() as tasks:
        tasks.start_soon(runner.run)
        batch = await ended(world)
        await runner.stop()
    assert (batch.status, batch.completed) == (BatchStatus.COMPLETED, 2)
    assert await world.redis.hget(world.key("batch", "batch_1"), "fence") == "1"
    await files.aclose()


class FilesAtWhoseEndSomebodyCancels(RedisFiles):
    """Files whose batch is cancelled between the last check of its validation and its end."""

    def __init__(self, world: BatchWorld) -> None:
        super().__init__(world.url, prefix=world.prefix, command_s=10.0)
        self._others = world.open()

    async def read(self, file_id: str, offset: int, limit: int | None = None) -> bytes:
        piece = await super().read(file_id, offset, limit)
        if not piece:
            await self._others.cancel("batch_1")
        return piece


async def test_a_line_whose_answer_cannot_be_read_says_so(
    world: BatchWorld, caplog: pytest.LogCaptureFixture
) -> None:
    async def read(batch: Batch, line: BatchLine) -> NewJob:
        return replace(await read_line(batch, line), body=b"{}")  # without a model

    await make(world, jsonl(1))
    async with working(world), running(world, read):
        batch = await ended(world)
    (line,) = await world.lines(batch.error_file_id)
    assert line["response"]["status_code"] == 502
    assert line["response"]["body"]["error"]["message"] == "The answer cannot be read."
    assert [text.partition(": ")[2] for text in caplog.messages] == ["its answer cannot be read"]


async def test_a_line_of_whose_answer_the_store_has_lost_some_says_so(world: BatchWorld) -> None:
    """One that evicts does not see which chunks belong together."""
    await make(world, jsonl(1))
    async with running(world):
        with anyio.fail_after(WITHIN_S):
            while (job := await world.jobs.claim("w", [LANE], 3, "c")) is None:
                pass
        await world.jobs.append(job.id, job.claim, Chunk(0, job.attempt, answer_to("r1")))
        await world.redis.delete(world.key("chunks", job.id))
        await world.jobs.finish(job.id, job.claim, JobStatus.COMPLETED)
        batch = await ended(world)
    (line,) = await world.lines(batch.error_file_id)
    assert (line["response"], line["error"]["code"]) == (None, "request_lost")


@pytest.mark.parametrize("content", [jsonl(3), jsonl(3) + b"{}\n"], ids=["valid", "invalid"])
async def test_a_batch_that_is_cancelled_as_its_validation_ends_is_cancelled_at_once(
    world: BatchWorld, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    caplog.set_level("INFO")
    await make(world, content)
    files = FilesAtWhoseEndSomebodyCancels(world)
    runner = BatchRunner(world.open(), files, world.jobs, read_line, RULES)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(runner.run)
        assert (await ended(world)).status is BatchStatus.CANCELLED
        await until(world, lambda _: bool(_ends_told(caplog)))
        await runner.stop()
    assert _ends_told(caplog) == ["cancelled"]
    assert await world.jobs.find() == []
    await files.aclose()


@ON_EVERY_SERVER
async def test_a_bad_file_of_many_pieces_fails_with_its_lines(world: BatchWorld) -> None:
    content = jsonl(2000, pad="x" * 1000)
    assert len(content) > 2_000_000
    await make(world, content + b"{}\n" + content.splitlines()[1999])
    async with running(world):
        batch = await ended(world)
    assert (batch.status, batch.total) == (BatchStatus.FAILED, 0)
    assert [(error.line, error.code) for error in batch.errors] == [
        (2001, "invalid_custom_id"), (2002, "duplicate_custom_id"),
    ]  # fmt: skip
    assert await world.jobs.find() == []


@pytest.mark.parametrize("content", [b"", b"\n\n"])
async def test_a_file_without_requests_fails(
    world: BatchWorld, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    await make(world, content)
    async with running(world):
        batch = await ended(world)
        await until(world, lambda _: "batch batch_1: failed" in caplog.messages)
    assert [error.code for error in batch.errors] == ["empty_file"]


# ------------------------------------------------------------------ a store that evicts


LOSS = {"event": "batch_input_lost", "id": "batch_1", "file": "file-batch_1"}


def said_of_losses(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [vars(record)["fields"] for record in caplog.records if record.levelname == "ERROR"]


async def test_a_batch_of_whose_file_the_rest_is_lost_fails_with_what_it_has(
    world: BatchWorld, caplog: pytest.LogCaptureFixture
) -> None:
    is_full = anyio.Event()
    await make(world, jsonl(40))
    async with running(world, reading_until(is_full)):
        await is_full.wait()
    await world.redis.delete(world.key("piece", "file-batch_1", "0"))
    async with working(world), running(world):
        batch = await ended(world)

    assert (batch.status, batch.total, batch.completed, batch.failed) == (BatchStatus.FAILED, 40, 8, 0)
    assert [(error.line, error.code, error.message) for error in batch.errors] == [
        (
            None,
            "input_file_lost",
            "The store has lost a part of the input file. 32 of 40 requests were not run.",
        )
    ]
    assert names(await world.lines(batch.output_file_id)) == wanted(8)
    assert await world.open().take() is None
    assert said_of_losses(caplog) == [LOSS]


@pytest.mark.parametrize("piece", ["0", "1"])
async def test_a_file_of_which_a_part_is_lost_is_not_taken_for_a_shorter_one(
    world: BatchWorld, caplog: pytest.LogCaptureFixture, piece: str
) -> None:
    await make(world, jsonl(1100, pad="x" * 1000))
    await world.redis.delete(world.key("piece", "file-batch_1", piece))
    async with running(world):
        batch = await ended(world)
        await until(world, lambda _: bool(said_of_losses(caplog)))
    assert (batch.status, batch.total) == (BatchStatus.FAILED, 0)
    assert [(error.code, error.message) for error in batch.errors] == [
        ("input_file_lost", "The store has lost a part of the input file. None of its requests was run.")
    ]
    assert await world.jobs.find() == []
    assert said_of_losses(caplog) == [LOSS]


# ------------------------------------------------------------------ given up


@ON_EVERY_SERVER
@pytest.mark.parametrize("after", [0, 7])
async def test_a_cancelled_batch_says_of_every_line_what_became_of_it(world: BatchWorld, after: int) -> None:
    await make(world, jsonl(40))
    async with running(world):
        async with working(world):
            await until(world, lambda batch: batch.completed >= after and batch.total > 0)
        await world.open().cancel("batch_1")
        batch = await ended(world)

    assert batch.status is BatchStatus.CANCELLED
    answers, failures = await _both(world, batch)
    assert names(answers + failures) == wanted(40)
    assert {line["error"]["code"] for line in failures} == {"batch_cancelled"}
    assert len(answers) == batch.completed >= after
    assert await world.jobs.find() == []


@pytest.mark.parametrize(
    ("pad", "total", "most"), [("", 1500, 250), ("x" * 20_000, 20, 4)], ids=["short", "long"]
)
async def test_few_lines_of_a_cancelled_batch_are_answered_in_one_go(
    world: BatchWorld, monkeypatch: pytest.MonkeyPatch, pad: str, total: int, most: int
) -> None:
    counts: list[int] = []
    write = RedisBatches.write

    async def noted(
        self: RedisBatches, claim: BatchClaim, number: int, offset: int, count: int, data: bytes
    ) -> None:
        counts.append(count)
        await write(self, claim, number, offset, count, data)

    monkeypatch.setattr(RedisBatches, "write", noted)
    await make(world, jsonl(total, pad=pad))
    async with running(world):
        await until(world, lambda batch: batch.total == total)
        await world.open().cancel("batch_1")
        batch = await ended(world)

    assert batch.failed == total
    assert max(counts) <= most  # the event loop stands still meanwhile


async def test_one_batch_is_validated_at_a_time(world: BatchWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    at_once, most = 0, 0
    read = batches.InputReader.read

    def noted(self: batches.InputReader, raw: batches.RawLine) -> Any:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        time.sleep(0)  # another thread may go on
        at_once -= 1
        return read(self, raw)

    monkeypatch.setattr(batches.InputReader, "read", noted)
    for number in range(4):
        await make(world, jsonl(30), f"batch_{number}")
    async with running(world):
        for number in range(4):
            await until(world, lambda batch: batch.total == 30, f"batch_{number}")

    assert most == 1


async def test_few_results_are_read_at_once(world: BatchWorld) -> None:
    ids = [f"batch_{number}" for number in range(4)]  # as many as are processed of a key

    class Looking(RedisBatches):
        async def look(self, claim: BatchClaim) -> BatchSnapshot:
            snapshot = await super().look(claim)
            if snapshot.ended:
                waiting.add(claim.batch.id)
            if len(waiting) == len(ids):
                all_wait.set()
            return snapshot

    class Counted(RedisJobs):
        reading = most = 0

        async def load(self, job_id: str) -> Job | None:
            self.reading += 1
            self.most = max(self.most, self.reading)
            await all_wait.wait()
            await anyio.wait_all_tasks_blocked()
            try:
                return await super().load(job_id)
            finally:
                self.reading -= 1

    waiting, all_wait = set[str](), anyio.Event()
    looking = Looking(world.url, prefix=world.prefix, command_s=10.0, lease_s=LONG_S)
    counted = Counted(world.url, prefix=world.prefix, command_s=10.0)
    for id in ids:
        await make(world, jsonl(1), id)
    runner = BatchRunner(looking, world.files, counted, read_line, RULES)
    async with working(world), anyio.create_task_group() as tasks:
        tasks.start_soon(runner.run)
        assert [(await ended(world, id)).completed for id in ids] == [1] * len(ids)
        await runner.stop()

    assert counted.most == COLLECTED_AT_ONCE
    await looking.aclose()
    await counted.aclose()


@ON_EVERY_SERVER
async def test_a_batch_whose_time_is_over_says_so_of_every_line_that_has_not_ended(world: BatchWorld) -> None:
    await make(world, jsonl(40))
    async with running(world):
        async with working(world):
            await until(world, lambda batch: batch.completed >= 5)
        await world.is_due("batch_1")
        batch = await ended(world)

    assert batch.status is BatchStatus.EXPIRED
    answers, failures = await _both(world, batch)
    assert names(answers + failures) == wanted(40)
    assert {line["error"]["code"] for line in failures} == {"batch_expired"}


@pytest.mark.parametrize("is_due", [True, False])
async def test_one_that_was_never_read_ends_at_once(world: BatchWorld, is_due: bool) -> None:
    await make(world, jsonl(3))
    await (world.is_due("batch_1") if is_due else world.open().cancel("batch_1"))
    async with running(world):
        batch = await ended(world)
    assert batch.status is (BatchStatus.EXPIRED if is_due else BatchStatus.CANCELLED)
    assert (batch.total, batch.output_file_id, batch.error_file_id) == (0, None, None)


async def test_a_result_that_is_gone_is_told_of_when_the_time_is_over(world: BatchWorld) -> None:
    await make(world, jsonl(2))
    async with running(world):
        await until(world, lambda batch: batch.total == 2)
        batches = world.open()
        with anyio.fail_after(WITHIN_S):
            while True:
                if len(await batches.running("batch_1")) == 2:
                    break
                await anyio.sleep(0.01)
        for line in await batches.running("batch_1"):
            await world.redis.delete(world.key("job", line.job_id))
        await world.is_due("batch_1")
        batch = await ended(world)
    assert (batch.status, batch.failed) == (BatchStatus.EXPIRED, 2)


# ------------------------------------------------------------------ whatever dies


class Unreliable:
    """A store some of whose replies are lost: before the command was carried out, or after."""

    def __init__(self, store: Any, dice: random.Random) -> None:
        self._store, self._dice = store, dice

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        async def ask(*arguments: Any, **named: Any) -> Any:
            fate = self._dice.random()
            if fate < 0.06:
                raise StoreUnavailable("before")
            reply = await getattr(self._store, name)(*arguments, **named)
            if fate < 0.12:
                raise StoreUnavailable("after")
            return reply

        return ask


class ThoughtDead:
    """Batches whose lease is over before every fourth command: mostly, another has them by then."""

    def __init__(self, world: BatchWorld, dice: random.Random) -> None:
        self._world, self._store, self._dice = world, world.open(), dice

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        async def ask(*arguments: Any, **named: Any) -> Any:
            fate = self._dice.random()
            if fate < 0.25 and name not in ("take", "release"):
                fence = await self._fence()
                await self._world.lose_runner_of("batch_1")
                while fate < 0.2:
                    if await self._fence() != fence:
                        break
                    await anyio.sleep(0.005)
            return await getattr(self._store, name)(*arguments, **named)

        return ask

    async def _fence(self) -> Any:
        return await self._world.redis.hget(self._world.key("batch", "batch_1"), "fence")


def runner_on(stores: list[Any]) -> BatchRunner:
    batches, files, jobs = stores
    return BatchRunner(batches, files, jobs, read_line, RULES)


@pytest.mark.parametrize("seed", range(4))
async def test_replies_that_are_lost_cost_no_line_and_double_none(world: BatchWorld, seed: int) -> None:
    dice = random.Random(seed)
    for id in ("batch_1", "batch_2"):
        await make(world, jsonl(20), id)
    # Whoever does not hear that it has taken a batch leaves it until the lease is over.
    stores = (world.open(lease_s=0.5), world.files, world.jobs)
    runners = [runner_on([Unreliable(store, dice) for store in stores]) for _ in range(2)]
    async with working(world) as workers, anyio.create_task_group() as tasks:
        for runner in runners:
            tasks.start_soon(runner.run)
        found = [await ended(world, id) for id in ("batch_1", "batch_2")]
        tasks.cancel_scope.cancel()

    for batch in found:
        assert (batch.status, batch.completed, batch.failed) == (BatchStatus.COMPLETED, 20, 0)
        assert names(await world.lines(batch.output_file_id)) == wanted(20)
    assert set(workers.begun.values()) == {2}  # once in each batch
    assert await world.jobs.find() == []


@pytest.mark.parametrize("seed", range(4))
async def test_runners_that_are_thought_dead_double_nothing(world: BatchWorld, seed: int) -> None:
    """Leases are over all the time: whoever believes to have the batch does not."""
    dice = random.Random(seed)
    await make(world, jsonl(40))
    async with working(world) as workers, anyio.create_task_group() as tasks:
        for _ in range(3):
            runner = runner_on([ThoughtDead(world, dice), world.files, world.jobs])
            tasks.start_soon(runner.run)
        batch = await ended(world)
        tasks.cancel_scope.cancel()

    assert (batch.status, batch.completed, batch.failed) == (BatchStatus.COMPLETED, 40, 0)
    assert names(await world.lines(batch.output_file_id)) == wanted(40)
    assert set(workers.begun.values()) == {1}
    fence = await world.redis.hget(world.key("batch", batch.id), "fence")
    assert int(fence or 0) > 10  # so many runners have had it


async def test_runners_that_are_thought_dead_write_every_line_of_a_cancelled_batch_once(
    world: BatchWorld,
) -> None:
    await make(world, jsonl(600))
    async with anyio.create_task_group() as tasks:
        runner = BatchRunner(world.open(), world.files, world.jobs, read_line, RULES)
        tasks.start_soon(runner.run)
        await until(world, lambda batch: batch.total > 0)
        await runner.stop()
    await world.open().cancel("batch_1")

    class Forgetful(RedisBatches):
        async def write(self, *args: Any) -> None:
            await super().write(*args)
            await world.lose_runner_of("batch_1")
            await self.release(await world.take(self))

    batches = Forgetful(world.url, prefix=world.prefix, command_s=10.0, lease_s=LONG_S)
    async with running(world, batches=batches):
        batch = await ended(world)
    assert (batch.status, batch.failed) == (BatchStatus.CANCELLED, 600)
    assert names(await world.lines(batch.error_file_id)) == wanted(600)
    await batches.aclose()


async def test_a_store_that_has_lost_the_last_steps_costs_no_line(world: BatchWorld) -> None:
    """As after a failover to a replica that lags, of which a runner that was waiting hears nothing."""
    is_at_fourth, may_go_on, has_all = anyio.Event(), anyio.Event(), anyio.Event()
    read_on = reading_until(has_all)

    async def read(batch: Batch, line: BatchLine) -> NewJob:
        if line.number == 4:
            is_at_fourth.set()
            await may_go_on.wait()
        return await read_on(batch, line)

    await make(world, jsonl(20))
    async with running(world, read):
        await is_at_fourth.wait()
        async with world.forgetting():
            may_go_on.set()
            await has_all.wait()
        async with working(world):
            batch = await ended(world)

    assert (batch.status, batch.total, batch.completed, batch.failed) == (BatchStatus.COMPLETED, 20, 20, 0)
    assert names(await world.lines(batch.output_file_id)) == wanted(20)


@ON_EVERY_SERVER
async def test_a_runner_that_is_stopped_lets_its_batches_go(world: BatchWorld) -> None:
    class Slow(RedisBatches):
        async def release(self, claim: BatchClaim) -> None:
            await world.redis.ping()
            await super().release(claim)

    await make(world, jsonl(20))
    batches = world.open()
    slow = Slow(world.url, prefix=world.prefix, command_s=10.0, lease_s=LONG_S)
    async with running(world, batches=slow) as runner:
        with anyio.fail_after(WITHIN_S):
            while len(await batches.running("batch_1")) < RULES.queued_max:
                await anyio.lowlevel.checkpoint()
        await runner.stop()
        claim = await batches.take()
    assert claim is not None
    assert claim.number == RULES.queued_max
    # However long nobody is there to collect it, a result outlasts the batch.
    for line in await batches.running("batch_1"):
        job = await world.jobs.load(line.job_id)
        assert job is not None and job.new.expires_s is not None
        assert job.new.keep_s == pytest.approx(job.new.expires_s + RULES.keep_s, abs=0.01)
    await slow.aclose()


async def test_a_store_that_does_not_answer_once_does_not_cost_a_lease(world: BatchWorld) -> None:
    class Away(RedisBatches):
        looks = 0

        async def look(self, claim: BatchClaim) -> BatchSnapshot:
            self.looks += 1
            if self.looks == 1:
                raise StoreUnavailable("once")
            return await super().look(claim)

    await make(world, jsonl(1))
    away = Away(world.url, prefix=world.prefix, command_s=10.0, lease_s=LONG_S)
    async with working(world), running(world, batches=away):
        assert (await ended(world)).status is BatchStatus.COMPLETED
    await away.aclose()


async def test_a_batch_goes_on_from_whatever_step_its_runner_died_in(world: BatchWorld) -> None:
    """It dies after every command in turn, for good; another goes on."""

    class Dies(Exception):
        pass

    class Mortal(Unreliable):
        def __init__(self, store: Any, left: list[int]) -> None:
            super().__init__(store, random.Random(0))
            self._left = left

        def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
            async def ask(*arguments: Any, **named: Any) -> Any:
                if self._left[0] > 0:
                    reply = await getattr(self._store, name)(*arguments, **named)
                    self._left[0] -= 1
                if self._left[0] <= 0:
                    await anyio.sleep_forever()
                return reply

            return ask

    bad = jsonl(6, model="other").splitlines(keepends=True)
    content = (b"".join([bad[0], *jsonl(4).splitlines(keepends=True)[1:], *bad[4:]])).rstrip(b"\n")
    batches = world.open()
    async with working(world) as workers:
        for steps in range(1, 40, 3):
            id = f"batch_{steps}"
            await make(world, content, id)
            left = [steps]
            # A command that is under way when it dies may take the batch yet.
            mortal = world.open(lease_s=0.5)
            stores = (mortal, world.files, world.jobs)
            first = runner_on([Mortal(store, left) for store in stores])
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(first.run)
                with anyio.fail_after(WITHIN_S):
                    while True:
                        batch = await batches.get(id)
                        if left[0] <= 0 or (batch is not None and batch.status.is_final):
                            break
                        await anyio.sleep(0.005)
                if batch is not None and not batch.status.is_final:
                    await world.lose_runner_of(id)
                    async with running(world):
                        await ended(world, id)
                tasks.cancel_scope.cancel()
            batch = await ended(world, id)
            answers, failures = await _both(world, batch)
            assert (names(answers), names(failures)) == (["r2", "r3", "r4"], ["r1", "r5", "r6"])
    assert set(workers.begun.values()) == {len(range(1, 40, 3))}


def _ends_told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return with what status batches have ended, as often as that was logged."""
    told = [getattr(record, "fields", {}) for record in caplog.records]
    return [fields["status"] for fields in told if fields.get("event") == "batch_ended"]


async def _both(world: BatchWorld, batch: Batch) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    return await world.lines(batch.output_file_id), await world.lines(batch.error_file_id)
