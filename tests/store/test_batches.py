"""Batches in a real store: one runner at a time, every line written down once, whatever is repeated."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict, replace
from typing import Any

import pytest
from redis.asyncio import Redis
from support.batch_world import BatchWorld, new_batch
from support.job_world import LANE, LEFT
from support.redis_server import RedisServer

from gateway.core.batches import (
    OPEN_MAX,
    Batch,
    BatchClaim,
    BatchLineError,
    BatchLost,
    BatchRefusal,
    BatchStatus,
    RunningLine,
)
from gateway.core.errors import StoreUnavailable
from gateway.core.files import FileRefusal
from gateway.core.idempotency import Idempotency
from gateway.core.jobs import JobPriority, JobStatus, NewJob, Quota
from gateway.store.batches import RedisBatches

QUOTA = Quota(10, 1_000_000)
S = BatchStatus


@pytest.fixture
async def world(store: Any) -> AsyncIterator[BatchWorld]:
    world = BatchWorld(store.url, store.prefix, store.redis)
    yield world
    await world.aclose()


async def running(world: BatchWorld, batches: RedisBatches, count: int = 3, **changes: Any) -> BatchClaim:
    """Return a batch whose lines may become jobs."""
    await world.batch(batches, count, **changes)
    claim = await world.take(batches)
    assert await batches.move(claim, S.VALIDATING, S.IN_PROGRESS, total=count)
    return claim


def job_of(claim: BatchClaim, number: int, **changes: Any) -> NewJob:
    batch = claim.batch
    fields: dict[str, Any] = {"body": b"{}", "priority": JobPriority.BATCH, **changes}
    return NewJob(id=f"resp_{batch.id}_{number}", key=batch.key, lane=LANE, batch=batch.id, **fields)


async def submit(batches: RedisBatches, claim: BatchClaim, number: int, **changes: Any) -> str:
    job = job_of(claim, number, **changes)
    line = RunningLine(job.id, number, f"r {number}")
    assert await batches.submit(claim, line, number * 100, job, QUOTA)
    return job.id


async def end(world: BatchWorld, id: str) -> None:
    """Let a job, which is next, have its answer."""
    job = await world.jobs.claim("w", [LANE], 3)
    assert job is not None and job.id == id
    assert await world.jobs.finish(id, job.claim, JobStatus.COMPLETED)


# ------------------------------------------------------------------ callers


async def test_a_batch_that_is_revoked_does_not_run(world: BatchWorld) -> None:
    batches = world.open()
    made = await world.batch(batches)
    assert await batches.revoke(made.id)
    after = await batches.get(made.id)
    assert after is not None and after.status is S.CANCELLING

    late = new_batch(id="batch_late")
    assert not await batches.revoke(late.id)
    with pytest.raises(StoreUnavailable, match="too late"):
        await batches.create(late)
    assert await batches.get(late.id) is None


async def test_a_batch_is_accepted_and_shown(world: BatchWorld) -> None:
    batches = world.open()
    made = await world.batch(batches, metadata={"a": "ü"}, headers={"x-team": "t"}, output_keep_s=7200)
    assert made.created_at > 0
    assert await batches.get(made.id) == made
    assert made == new_batch(
        created_at=made.created_at, metadata={"a": "ü"}, headers={"x-team": "t"}, output_keep_s=7200
    )
    assert await batches.create(new_batch(metadata={"b": "c"})) == made  # the reply was lost
    assert await batches.get("batch_2") is None


async def test_an_idempotency_key_stands_for_one_batch(world: BatchWorld) -> None:
    batches = world.open()
    await world.upload(b"")
    await world.upload(b"", "file-2", "bob")
    once = Idempotency("again", "/v1/batches", "body")
    made = await batches.create(new_batch(id="batch_1"), once)
    assert isinstance(made, Batch)
    assert await batches.create(new_batch(id="batch_2"), once) == made
    other = replace(once, fingerprint="another body")
    assert await batches.create(new_batch(id="batch_2"), other) is BatchRefusal.IDEMPOTENCY_KEY_REUSED
    of_bob = await batches.create(new_batch(id="batch_b", key="bob", input_file_id="file-2"), once)
    assert isinstance(of_bob, Batch) and of_bob.id == "batch_b"
    assert isinstance(await batches.create(new_batch(id="batch_3"), replace(once, key="more")), Batch)
    found = await batches.page("alice", after=None, limit=10)
    assert found is not None and [batch.id for batch in found] == ["batch_3", "batch_1"]


async def test_what_was_refused_leaves_its_idempotency_key_free(world: BatchWorld) -> None:
    batches = world.open()
    once = Idempotency("again", "/v1/batches", "body")
    assert await batches.create(new_batch(), once) is BatchRefusal.FILE_NOT_FOUND
    await world.upload(b"")
    assert isinstance(await batches.create(new_batch(), replace(once, fingerprint="another body")), Batch)


async def test_what_is_no_input_file_is_refused(world: BatchWorld) -> None:
    batches = world.open()
    await world.upload(b"", "file-1", "bob")
    assert await batches.create(new_batch()) is BatchRefusal.FILE_NOT_FOUND
    assert await batches.create(new_batch(input_file_id="file-2")) is BatchRefusal.FILE_NOT_FOUND
    claim = await running(world, batches, id="batch_b", input_file_id="file-3")
    await batches.write(claim, 3, 300, 3, b"x\n")
    await batches.move(claim, S.IN_PROGRESS, S.FINALIZING)
    await batches.move(claim, S.FINALIZING, S.COMPLETED)
    output = claim.batch.file_id("error")
    assert await batches.create(new_batch(input_file_id=output)) is BatchRefusal.INVALID_PURPOSE


async def test_a_key_has_only_so_many_open(world: BatchWorld) -> None:
    batches = world.open()
    await world.upload(b"")
    for number in range(OPEN_MAX):
        assert isinstance(await batches.create(new_batch(id=f"batch_{number}")), Batch)
    assert await batches.create(new_batch(id="batch_more")) is BatchRefusal.TOO_MANY_BATCHES
    claim = await world.take(batches)
    await batches.cancel(claim.batch.id)
    await batches.move(claim, S.CANCELLING, S.CANCELLED)
    assert isinstance(await batches.create(new_batch(id="batch_more")), Batch)
    assert await batches.create(new_batch(id="batch_too")) is BatchRefusal.TOO_MANY_BATCHES
    found = await batches.page("alice", after="batch_3", limit=10)
    assert [batch.id for batch in found or ()] == ["batch_2", "batch_1", "batch_0"]
    assert await batches.page("bob", after="batch_3", limit=10) is None
    assert await batches.page("bob", after=None, limit=10) == []


async def test_of_a_key_only_so_many_are_kept(world: BatchWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.store.batches.KEPT_MAX", 2)
    batches = world.open()
    await world.upload(b"")
    for number in range(2):
        await batches.create(new_batch(id=f"batch_{number}"))
    claim = await world.take(batches)
    assert claim.batch.id == "batch_0"
    await batches.move(claim, S.VALIDATING, S.FAILED)

    assert isinstance(await batches.create(new_batch(id="batch_2")), Batch)
    assert await batches.get("batch_0") is None
    # The oldest has not ended yet.
    assert await batches.create(new_batch(id="batch_3")) is BatchRefusal.TOO_MANY_BATCHES
    found = await batches.page("alice", after=None, limit=10)
    assert [batch.id for batch in found or ()] == ["batch_2", "batch_1"]


async def test_a_batch_that_takes_a_day_does_not_end_the_keeping_of_others(
    world: BatchWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.store.batches.KEPT_MAX", 3)
    batches = world.open()
    await world.upload(b"")
    for number in range(3):
        await batches.create(new_batch(id=f"batch_{number}"))
    assert (await world.take(batches)).batch.id == "batch_0"
    for _ in range(2):
        await batches.move(await world.take(batches), S.VALIDATING, S.FAILED)

    assert isinstance(await batches.create(new_batch(id="batch_3")), Batch)
    found = await batches.page("alice", after=None, limit=10)
    assert [batch.id for batch in found or ()] == ["batch_3", "batch_2", "batch_0"]


async def test_a_batch_that_is_refused_makes_the_store_forget_none(
    world: BatchWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.store.batches.KEPT_MAX", 3)
    monkeypatch.setattr("gateway.store.batches.OPEN_MAX", 2)
    batches = world.open()
    await world.upload(b"")
    await batches.create(new_batch(id="batch_0"))
    await batches.move(await world.take(batches), S.VALIDATING, S.FAILED)
    for number in (1, 2):
        await batches.create(new_batch(id=f"batch_{number}"))

    assert await batches.create(new_batch(id="batch_3")) is BatchRefusal.TOO_MANY_BATCHES
    assert await batches.get("batch_0") is not None


async def test_a_file_is_in_use_until_the_last_of_its_batches_is_over(world: BatchWorld) -> None:
    batches = world.open()
    await world.upload(b"")
    for number in range(2):
        await batches.create(new_batch(id=f"batch_{number}"))
    claims = [await world.take(batches) for _ in range(2)]
    for claim in claims:
        assert await world.files.delete("file-1") is FileRefusal.IN_USE
        await batches.move(claim, S.VALIDATING, S.FAILED)
    assert await world.files.delete("file-1") is True


async def test_what_a_later_version_has_added_to_an_error_is_ignored(world: BatchWorld) -> None:
    batches = world.open()
    await world.batch(batches)
    error = BatchLineError("invalid_body", "No.", 2, "body")
    claim = await world.take(batches)
    await batches.move(claim, S.VALIDATING, S.FAILED, total=0, errors=[error])
    later = json.dumps([{**asdict(error), "hint": "Add one."}])
    await world.redis.hset(world.key("batch", "batch_1"), "errors", later)

    found = await batches.get("batch_1")

    assert found is not None and found.errors == (error,)


async def test_a_batch_is_cancelled_while_it_can_be(world: BatchWorld) -> None:
    batches = world.open()
    claim = await running(world, batches)
    first = await batches.cancel(claim.batch.id)
    again = await batches.cancel(claim.batch.id)
    assert first == again and first is not None and first.status is S.CANCELLING
    assert not await batches.move(claim, S.IN_PROGRESS, S.FINALIZING)
    assert await batches.move(claim, S.CANCELLING, S.CANCELLED)
    over = await batches.cancel(claim.batch.id)
    assert over is not None and over.status is S.CANCELLED
    assert list(over.times) == [S.IN_PROGRESS, S.CANCELLING, S.CANCELLED]
    assert await batches.cancel("batch_2") is None


# ------------------------------------------------------------------ one runner at a time


async def test_a_batch_has_one_runner_and_another_once_that_is_lost(world: BatchWorld) -> None:
    one, two = world.open(), world.open()
    made = await world.batch(one)
    first = await world.take(one)
    assert await two.take() is None

    await world.lose_runner_of(made.id)
    second = await world.take(two)
    assert second.batch.id == made.id
    assert second.fence != first.fence

    job = job_of(first, 1)
    asks: list[Callable[[], Awaitable[Any]]] = [
        lambda: one.look(first),
        lambda: one.move(first, S.VALIDATING, S.FAILED),
        lambda: one.submit(first, RunningLine(job.id, 1, "r1"), 100, job, QUOTA),
        lambda: one.write(first, 3, 300, 3, b"lines\n"),
        lambda: one.collect(first, job.id, b"line\n", is_answer=True),
    ]
    for ask in asks:
        with pytest.raises(BatchLost):
            await ask()
    await one.release(first)
    assert await one.take() is None
    found = await one.get(made.id)
    assert found == made
    assert await world.jobs.find() == []
    await two.release(second)
    assert (await world.take(one)).batch.id == made.id


async def test_a_batch_that_is_over_is_given_to_nobody_and_kept_for_a_while(world: BatchWorld) -> None:
    batches = world.open()
    await world.batch(batches)
    claim = await world.take(batches)
    await batches.move(claim, S.VALIDATING, S.FAILED)
    await world.lose_runner_of("batch_1")

    assert await batches.take() is None
    assert await batches.get("batch_1") is not None


async def test_a_batch_that_was_deleted_by_hand_holds_nobody_up(world: BatchWorld) -> None:
    batches = world.open()
    await world.batch(batches)
    await world.batch(batches, id="batch_2", input_file_id="file-2")
    await world.redis.delete(world.key("batch", "batch_1"))

    assert (await world.take(batches)).batch.id == "batch_2"
    assert await world.redis.zrange(world.key("batches_open"), 0, -1) == ["batch_2"]


async def test_an_input_file_that_was_deleted_by_hand_leaves_nothing(world: BatchWorld) -> None:
    batches = world.open()
    await world.batch(batches)
    await world.redis.delete(world.key("file", "file-1"))
    await batches.move(await world.take(batches), S.VALIDATING, S.FAILED)
    assert not await world.redis.exists(world.key("file", "file-1"))


async def test_a_lease_is_no_longer_than_a_lease_though_the_servers_clock_went_back(
    world: BatchWorld,
) -> None:
    batches = world.open(lease_s=10.0)
    await world.batch(batches)
    await world.take(batches)
    until: Any = await world.redis.hget(world.key("batch", "batch_1"), "until")
    assert await batches.take() is None
    assert await world.redis.hget(world.key("batch", "batch_1"), "until") == until
    later = int(until) + 3_600_000
    await world.redis.hset(world.key("batch", "batch_1"), "until", later)

    assert await batches.take() is None
    now: Any = await world.redis.hget(world.key("batch", "batch_1"), "until")
    assert int(until) <= int(now) < int(until) + 60_000


async def test_whatever_a_runner_does_keeps_the_batch_its_own(world: BatchWorld) -> None:
    batches = world.open()
    claim = await running(world, batches)
    for ask in (
        lambda: batches.look(claim),
        lambda: batches.write(claim, 1, 100, 1, b"x\n"),
        lambda: batches.collect(claim, "none", b"x\n", is_answer=True),
    ):
        await world.lose_runner_of(claim.batch.id)
        await ask()
        assert await batches.take() is None


async def test_no_key_takes_all_runners(world: BatchWorld) -> None:
    batches = world.open(each_max=2)
    for number in range(4):
        await world.batch(batches, id=f"batch_a{number}", input_file_id=f"file-{number}")
    await world.batch(batches, id="batch_b", input_file_id="file-b", key="bob")
    taken = [await batches.take() for _ in range(4)]
    assert [claim and claim.batch.id for claim in taken] == ["batch_a0", "batch_a1", "batch_b", None]


async def test_one_that_only_has_to_be_ended_waits_for_none_of_its_key(world: BatchWorld) -> None:
    batches = world.open(each_max=1)
    for number in range(4):
        await world.batch(batches, id=f"batch_{number}", input_file_id=f"file-{number}")
    await world.take(batches)
    await batches.cancel("batch_2")
    await world.is_due("batch_3")
    taken = [await batches.take() for _ in range(3)]
    assert [claim and claim.batch.id for claim in taken] == ["batch_2", "batch_3", None]


# ------------------------------------------------------------------ lines


async def test_a_line_becomes_a_job_once_and_is_written_down_once(world: BatchWorld) -> None:
    batches = world.open()
    claim = await running(world, batches)
    for _ in range(2):
        id = await submit(batches, claim, 1)
    job = await world.jobs.get(id)
    assert job is not None
    assert (job.new.key, job.new.batch, job.new.priority) == ("alice", "batch_1", JobPriority.BATCH)
    snapshot = await batches.look(claim)
    assert snapshot.ended == ()
    assert 0 <= claim.batch.expires_at - claim.batch.created_at - snapshot.left_s < 60
    assert await batches.running("batch_1") == [RunningLine(id, 1, "r 1")]

    await batches.collect(claim, id, b"too soon\n", is_answer=True)
    await end(world, id)
    snapshot = await batches.look(claim)
    assert (snapshot.running, snapshot.ended) == (1, (RunningLine(id, 1, "r 1"),))
    for _ in range(2):
        await batches.collect(claim, id, b"answer\n", is_answer=True)
        assert (await batches.look(claim)).running == 0
    assert await world.jobs.get(id) is None
    await submit(batches, claim, 1)  # a reply that was lost long ago
    assert (await batches.look(claim)).running == 0
    assert await world.read(claim.batch.file_id("output")) == b"answer\n"


async def test_a_line_that_ends_while_it_is_said_to_go_on_is_looked_at_once_more(world: BatchWorld) -> None:
    batches = world.open()
    claim = await running(world, batches)
    id = await submit(batches, claim, 1)
    await end(world, id)
    await batches.collect(claim, id, b"", is_answer=False)

    snapshot = await batches.look(claim)
    assert (snapshot.running, snapshot.ended) == (1, (RunningLine(id, 1, "r 1"),))
    await batches.collect(claim, id, b"answer\n", is_answer=True)
    assert (await batches.look(claim)).ended == ()
    assert await world.read(claim.batch.file_id("output")) == b"answer\n"
    assert await world.read(claim.batch.file_id("error")) == b""


async def test_a_server_that_is_full_takes_no_line_and_those_it_has_are_written_down(
    stoppable: RedisServer,
) -> None:
    redis = Redis.from_url(stoppable.url, decode_responses=True)
    world = BatchWorld(stoppable.url, "gw", redis)
    batches = world.open()
    claim = await running(world, batches, 2)
    id = await submit(batches, claim, 1)
    await redis.config_set("maxmemory", 1)

    with pytest.raises(StoreUnavailable):
        await submit(batches, claim, 2)
    await batches.release(claim)
    claim = await world.take(batches)
    assert claim.number == 1
    await end(world, id)
    assert [line.job_id for line in (await batches.look(claim)).ended] == [id]
    await batches.collect(claim, id, b"answer\n", is_answer=True)
    assert await world.read(claim.batch.file_id("output")) == b"answer\n"
    cancelled = await batches.cancel(claim.batch.id)
    assert cancelled is not None and cancelled.status is S.CANCELLING
    await batches.write(claim, 2, 200, 1, b"never\n")
    assert await batches.move(claim, S.CANCELLING, S.CANCELLED)
    assert not await batches.revoke("never heard of")
    await world.aclose()
    await redis.aclose()


async def test_lines_that_never_run_are_written_down_once(world: BatchWorld) -> None:
    batches = world.open()
    claim = await running(world, batches)
    for _ in range(2):
        await batches.write(claim, 2, 200, 2, b"one\ntwo\n")
    await submit(batches, claim, 1)  # already behind
    await batches.release(claim)
    again = await world.take(batches)
    assert (again.number, again.offset) == (2, 200)
    assert (again.batch.completed, again.batch.failed, again.batch.total) == (0, 2, 3)
    assert await world.read(claim.batch.file_id("error")) == b"one\ntwo\n"
    assert await world.jobs.find() == []


async def test_only_so_many_lines_of_a_key_are_jobs_and_its_own_jobs_do_not_count(world: BatchWorld) -> None:
    batches = world.open()
    claim = await running(world, batches, 20)
    for number in range(20):
        job = NewJob(id=f"mine-{number}", key="alice", lane=LANE, body=b"{}", priority=JobPriority.HIGH)
        assert not isinstance(await world.jobs.submit(job, Quota(20)), str)
    for number in range(1, 11):
        await submit(batches, claim, number)
    eleventh = job_of(claim, 11)
    line = RunningLine(eleventh.id, 11, "r11")
    assert not await batches.submit(claim, line, 1100, eleventh, QUOTA)
    assert not await batches.submit(claim, line, 1100, eleventh, Quota(100, 10))
    await world.jobs.cancel(job_of(claim, 10).id)  # it is not written down yet
    assert not await batches.submit(claim, line, 1100, eleventh, QUOTA)
    assert await batches.submit(claim, line, 1100, eleventh, Quota(11))
    listed = await world.jobs.find(key="alice")
    assert {job.id for job in listed} == {f"mine-{number}" for number in range(20)}


async def test_the_lines_of_a_key_that_are_jobs_hold_only_so_many_bytes(world: BatchWorld) -> None:
    batches = world.open()
    claim = await running(world, batches)
    first, second = (job_of(claim, number, body=b"x" * 60) for number in (1, 2))
    lines = [RunningLine(job.id, number, "r") for number, job in enumerate((first, second), 1)]
    size = first.size_bytes + second.size_bytes
    assert await batches.submit(claim, lines[0], 100, first, Quota(10, size))
    assert not await batches.submit(claim, lines[1], 200, second, Quota(10, size - 1))
    assert await batches.submit(claim, lines[1], 200, second, Quota(10, size))


async def test_a_line_larger_than_all_may_hold_is_a_job_by_itself(world: BatchWorld) -> None:
    batches = world.open()
    claim = await running(world, batches)
    job = job_of(claim, 1, body=b"x" * 100)
    assert await batches.submit(claim, RunningLine(job.id, 1, "r1"), 100, job, Quota(10, 50))
    second = job_of(claim, 2)
    assert not await batches.submit(claim, RunningLine(second.id, 2, "r2"), 200, second, Quota(10, 50))


async def test_long_lines_are_cut_into_pieces_and_read_whole(world: BatchWorld) -> None:
    batches = world.open()
    claim = await running(world, batches, 5)
    lines = [bytes([97 + number]) * 700_000 + b"\n" for number in range(4)] + [b"z" * 3_000_000 + b"\n"]
    for number, line in enumerate(lines, start=1):
        await batches.write(claim, number, number * 100, 1, line)
    await batches.move(claim, S.IN_PROGRESS, S.FINALIZING)
    await batches.move(claim, S.FINALIZING, S.COMPLETED)
    assert await world.read(claim.batch.file_id("error")) == b"".join(lines)


# ------------------------------------------------------------------ ends


async def test_a_batch_ends_once_and_says_so(world: BatchWorld) -> None:
    batches = world.open()
    claim = await running(world, batches, output_keep_s=7200)
    await world.redis.set(world.key("webhooks", "wanted"), 1)
    id = await submit(batches, claim, 1)
    await batches.write(claim, 3, 300, 2, b"failure\n")
    assert not await batches.move(claim, S.IN_PROGRESS, S.EXPIRED)  # a line is a job yet
    assert await world.files.get(claim.batch.file_id("error")) is None
    await end(world, id)
    await batches.collect(claim, id, b"answer\n", is_answer=True)
    for _ in range(2):
        assert await batches.move(claim, S.IN_PROGRESS, S.FINALIZING)
    for _ in range(2):
        assert await batches.move(claim, S.FINALIZING, S.COMPLETED)

    done = await batches.get("batch_1")
    assert done is not None and done.status is S.COMPLETED
    assert (done.completed, done.failed) == (1, 2)
    for file_id, kind in ((done.output_file_id, "output"), (done.error_file_id, "error")):
        assert file_id == claim.batch.file_id(kind)
        file = await world.files.get(file_id)
        assert file is not None
        assert (file.new.purpose, file.new.filename) == ("batch_output", f"batch_1_{kind}.jsonl")
        assert file.expires_at - file.created_at == 7200
    events: Any = await world.redis.xrange(world.key("webhooks", "events"))
    assert [fields for _, fields in events] == [
        {"type": "batch.completed", "subject": "batch_1", "owner": "=alice"}
    ]
    assert await batches.take() is None
    with pytest.raises(BatchLost):
        await batches.look(claim)


async def test_a_step_is_not_taken_for_done_by_who_has_lost_the_batch(world: BatchWorld) -> None:
    batches = world.open()
    claim = await running(world, batches, 1)
    with pytest.raises(BatchLost):  # the store has lost its last line
        await batches.move(replace(claim, number=1), S.VALIDATING, S.IN_PROGRESS)
    await batches.release(claim)
    again = await world.take(batches)
    assert await batches.move(again, S.IN_PROGRESS, S.FAILED)
    assert await batches.move(again, S.IN_PROGRESS, S.FAILED)
    with pytest.raises(BatchLost):  # another has ended it
        await batches.move(claim, S.IN_PROGRESS, S.FAILED)


async def test_a_failed_batch_keeps_its_errors(world: BatchWorld) -> None:
    batches = world.open()
    await world.batch(batches)
    claim = await world.take(batches)
    errors = [BatchLineError("invalid_method", "method must be", 7, "method"), BatchLineError("x", "y")]
    assert await batches.move(claim, S.VALIDATING, S.FAILED, total=0, errors=errors)
    found = await batches.get("batch_1")
    assert found is not None
    assert (found.status, found.errors) == (S.FAILED, tuple(errors))


async def test_nothing_is_left_of_what_is_over_and_forgotten(world: BatchWorld) -> None:
    batches = world.open()
    claim = await running(world, batches)
    id = await submit(batches, claim, 1)
    await end(world, id)
    await batches.collect(claim, id, b"answer\n", is_answer=True)
    await batches.write(claim, 3, 300, 2, b"failure\n")
    await batches.cancel("batch_1")
    await batches.move(claim, S.CANCELLING, S.CANCELLED)
    await world.redis.zadd(world.key("batches_ended"), {"batch_1": 1}, xx=True)
    for file in ("file-1", claim.batch.file_id("output"), claim.batch.file_id("error")):
        await world.expire_file(file)
    await batches.take()
    assert await batches.get("batch_1") is None
    assert await world.names() <= LEFT - {"submitted"} | {"listed"}
