"""Jobs over real servers: accepted once, handed out in order, ended once, and forgotten in time."""

import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import anyio
import pytest
from redis.asyncio import Redis
from support.job_world import LANE, LANES, LEFT, LONG_S, NO_MODELS, QUOTA, Jobs, JobWorld, new_job
from support.redis_server import RedisServer, failover, legs, limited, own_server

from gateway.clock import SystemClock
from gateway.core.errors import StoreUnavailable
from gateway.core.idempotency import Idempotency
from gateway.core.jobs import (
    AfterRefusal,
    Chunk,
    Job,
    JobError,
    JobPriority,
    JobStatus,
    NewJob,
    Quota,
    Refusal,
    Serving,
)
from gateway.jobs.watch import QueueWatch

WITHIN_S = 20.0
BODY = b'{"stream":true}'
SIZE = len(BODY) + len(b"{}")
PROMISE = Idempotency("k", "/v1/responses", "f")


@pytest.fixture
def jobs(world: JobWorld) -> Jobs:
    return world.open()


@asynccontextmanager
async def listening(*stores: Jobs) -> AsyncIterator[None]:
    """Run stores in the background, each after it has begun to listen."""
    async with anyio.create_task_group() as tasks:
        for store in stores:
            tasks.start_soon(store.run)
            await store.waiting(WITHIN_S)
        yield
        tasks.cancel_scope.cancel()


async def get(jobs: Jobs, id: str) -> Job:
    job = await jobs.get(id)
    assert job is not None
    return job


async def claimed(jobs: Jobs, worker: str = "w", lanes: Collection[str] = LANES) -> list[str]:
    """Return the ids of the jobs that can be claimed now, in order."""
    ids = []
    while job := await jobs.claim(worker, lanes, 3):
        ids.append(job.id)
    return ids


# ------------------------------------------------------------------ accepted


@pytest.mark.parametrize(
    "new",
    [
        new_job("a"),
        NewJob(
            id="a",
            key=None,
            lane="org/model:x/no class",
            body=b"\x00\xff" * 1000,
            facts=b'{"echo":"\xe2\x82\xac"}',
            priority=JobPriority.BATCH,
            keep_s=1.5,
            expires_s=60.25,
        ),
        new_job("a", key=""),
    ],
    ids=["plain", "all", "empty-key"],
)
async def test_what_was_handed_over_comes_back(jobs: Jobs, new: NewJob) -> None:
    accepted = await jobs.submit(new, QUOTA)
    assert isinstance(accepted, Job)
    whole = Job(new, JobStatus.QUEUED, created_at=accepted.created_at, position=1, size_bytes=new.size_bytes)
    assert accepted.created_at > 1.7e9
    assert accepted == replace(whole, new=replace(new, body=b"", facts=b""))
    assert await jobs.get("a") == accepted
    assert await jobs.load("a") == whole
    assert await jobs.facts("a") == new.facts
    assert await jobs.get("b") is await jobs.load("b") is None
    assert await jobs.facts("b") is None


async def test_repeating_a_submission_changes_nothing(world: JobWorld, jobs: Jobs) -> None:
    first = await jobs.submit(new_job("a"), QUOTA)
    assert await jobs.submit(new_job("a"), QUOTA) == first
    assert await world.quota() == (1, SIZE)
    assert await claimed(jobs) == ["a"]


async def test_an_idempotency_key_returns_the_job_accepted_first(world: JobWorld, jobs: Jobs) -> None:
    first = await jobs.submit(new_job("a"), QUOTA, PROMISE)
    assert await jobs.submit(new_job("b"), QUOTA, PROMISE) == first
    other = Idempotency("k", "/v1/responses", "another body")
    assert await jobs.submit(new_job("b"), QUOTA, other) is Refusal.IDEMPOTENCY_KEY_REUSED
    assert await world.quota() == (1, SIZE)
    digests = [key async for key in world.redis.scan_iter(match=f"{world.key('submitted')}:*")]
    assert [86_000 < await world.redis.ttl(key) <= 86_400 for key in digests] == [True]


@pytest.mark.parametrize("status", [JobStatus.FAILED, JobStatus.CANCELLED, JobStatus.COMPLETED, None])
async def test_a_job_may_replace_one_that_has_no_answer(jobs: Jobs, status: JobStatus | None) -> None:
    await jobs.submit(new_job("a"), QUOTA, PROMISE)
    if status is JobStatus.CANCELLED:
        await jobs.cancel("a")
    elif status is not None:
        assert await claimed(jobs) == ["a"]
        assert await jobs.finish(*jobs.held("a"), status)
    expected = "b" if status in (JobStatus.FAILED, JobStatus.CANCELLED) else "a"
    for _ in range(2):
        found = await jobs.submit(new_job("b"), QUOTA, PROMISE, replaces=True)
        assert isinstance(found, Job) and found.id == expected
    later = await jobs.submit(new_job("c"), QUOTA, PROMISE)
    assert isinstance(later, Job) and later.id == expected


async def test_a_job_that_is_revoked_never_runs(world: JobWorld, jobs: Jobs) -> None:
    await world.submit(jobs, "queued", "runs")
    assert (await world.claim(jobs)).id == "queued"
    assert [await jobs.revoke(id) for id in ("queued", "runs", "late")] == [True, True, False]
    assert await jobs.beat("w", [jobs.held("queued")], NO_MODELS) == [
        "queued"
    ]  # it is no longer its worker's
    with pytest.raises(StoreUnavailable, match="too late"):
        await jobs.submit(new_job("late"), QUOTA)
    assert await claimed(jobs) == []
    assert await world.quota() == (0, 0)
    assert 0 < await world.redis.ttl(world.key("revoked", "late")) <= 600


async def test_a_full_server_revokes_too(tmp_path: Path) -> None:
    with own_server("valkey-9", tmp_path) as server:
        jobs = Jobs(server.url)
        await jobs.submit(new_job("a"), QUOTA)
        async with Redis.from_url(server.url) as redis:
            await redis.config_set("maxmemory", 1)
        assert await jobs.revoke("a")
        assert not await jobs.revoke("late")
        await jobs.aclose()


@pytest.mark.parametrize(
    ("key", "promise"),
    [
        ("bob", PROMISE),
        (None, PROMISE),
        ("alice", Idempotency("k", "/v1/chat/completions", "f")),
        ("alice", Idempotency("kk", "/v1/responses", "f")),
    ],
)
async def test_an_idempotency_key_is_of_one_caller_and_route(
    jobs: Jobs, key: str | None, promise: Idempotency
) -> None:
    await jobs.submit(new_job("a"), QUOTA, PROMISE)
    second = await jobs.submit(new_job("b", key=key), QUOTA, promise)
    assert isinstance(second, Job) and second.id == "b"


async def test_an_idempotency_key_outlives_a_job_that_was_deleted(jobs: Jobs) -> None:
    await jobs.submit(new_job("a"), QUOTA, PROMISE)
    await jobs.delete("a")
    second = await jobs.submit(new_job("b"), QUOTA, PROMISE)
    assert isinstance(second, Job) and second.id == "b"


async def test_a_quota_of_jobs_counts_those_that_wait_or_run(world: JobWorld, jobs: Jobs) -> None:
    quota = Quota(queued_max=2)
    for id in ("a", "b"):
        assert isinstance(await jobs.submit(new_job(id), quota), Job)
    assert await jobs.submit(new_job("c"), quota) is Refusal.TOO_MANY_JOBS
    assert isinstance(await jobs.submit(new_job("d", key="bob"), quota), Job)
    job = await world.claim(jobs)
    assert await jobs.submit(new_job("c"), quota) is Refusal.TOO_MANY_JOBS

    await jobs.finish(job.id, job.claim, JobStatus.COMPLETED)
    assert isinstance(await jobs.submit(new_job("c"), quota), Job)
    await jobs.cancel("b")
    assert isinstance(await jobs.submit(new_job("e"), quota), Job)
    assert await world.quota() == (2, 4 * SIZE)


async def test_a_quota_of_bytes_counts_answers_until_they_are_forgotten(world: JobWorld, jobs: Jobs) -> None:
    quota = Quota(bytes_max=2 * SIZE + 10)
    await jobs.submit(new_job("a"), quota)
    await world.claim(jobs)
    await jobs.append(*jobs.held("a"), Chunk(0, 1, b"x" * 11))
    await jobs.append(*jobs.held("a"), Chunk(0, 1, b"x" * 11))
    assert await world.quota() == (1, SIZE + 11)
    await jobs.finish(*jobs.held("a"), JobStatus.COMPLETED)
    assert await jobs.submit(new_job("b"), quota) is Refusal.TOO_MANY_BYTES

    await world.keep_is_over("a")
    exact = Quota(bytes_max=SIZE)
    assert isinstance(await jobs.submit(new_job("b"), exact), Job)
    assert await jobs.submit(new_job("c"), exact) is Refusal.TOO_MANY_BYTES
    assert await world.quota() == (1, SIZE)


# ------------------------------------------------------------------ handed out


async def test_the_order_is_by_priority_then_by_arrival(world: JobWorld, jobs: Jobs) -> None:
    for id, priority in zip("abcdef", [*JobPriority, *JobPriority][::-1], strict=True):
        await world.submit(jobs, id, priority=priority)  # batch, normal, high, batch, ...
    positions = {id: (await get(jobs, id)).position for id in "abcdef"}
    assert positions == {"c": 1, "f": 2, "b": 3, "e": 4, "a": 5, "d": 6}
    assert await claimed(jobs) == ["c", "f", "b", "e", "a", "d"]


async def submit_of(world: JobWorld, jobs: Jobs, *ids: str, **changes: Any) -> None:
    """Submit jobs whose ids begin with the name of their key."""
    for id in ids:
        await world.submit(jobs, id, key=id[:-1], **changes)


async def test_keys_take_turns_in_a_lane(world: JobWorld, jobs: Jobs) -> None:
    await submit_of(world, jobs, "alice1", "alice2", "alice3", "alice4", "bob1", "bob2", "carol1")
    turns = ["alice1", "bob1", "carol1", "alice2", "bob2", "alice3", "alice4"]
    assert [(await get(jobs, id)).position for id in turns] == [1, 2, 3, 4, 5, 6, 7]
    assert await claimed(jobs) == turns
    await jobs.finish(*jobs.held("alice1"), JobStatus.COMPLETED)
    await submit_of(world, jobs, "bob3", "alice5", "dave1")
    assert await claimed(jobs) == ["bob3", "dave1", "alice5"]  # alice has had more than these


async def test_keys_without_a_backlog_do_not_hold_up_one_that_has_one(world: JobWorld, jobs: Jobs) -> None:
    await submit_of(world, jobs, "alice1", "alice2", "alice3", "bob1", "carol1")
    order = []
    for number in range(2, 5):
        for _ in range(3):
            job = await world.claim(jobs)
            order.append(job.id)
            if job.new.key != "alice":  # submits its next one once the last has begun
                await submit_of(world, jobs, f"{job.new.key}{number}")
    assert order == ["alice1", "bob1", "carol1", "alice2", "bob2", "carol2", "alice3", "bob3", "carol3"]


async def test_a_key_that_cancelled_its_backlog_waits_no_longer_for_it(world: JobWorld, jobs: Jobs) -> None:
    backlog = [f"alice{number}" for number in range(5)]
    await submit_of(world, jobs, *backlog, "bob1", "bob2")
    for id in backlog[1:]:
        await jobs.cancel(id)
    await submit_of(world, jobs, "alice5")
    assert await claimed(jobs) == ["alice0", "bob1", "bob2", "alice5"]


async def test_keys_take_turns_within_a_priority_and_a_lane(world: JobWorld, jobs: Jobs) -> None:
    await submit_of(world, jobs, "alice1", "alice2", "alice3")
    assert await claimed(jobs) == ["alice1", "alice2", "alice3"]
    await submit_of(world, jobs, "alice4", "bob1", lane="m/push")
    await submit_of(world, jobs, "alice5", "bob2", priority=JobPriority.HIGH)
    assert await claimed(jobs, lanes=["m/push"]) == ["alice4", "bob1"]
    assert await claimed(jobs) == ["alice5", "bob2"]


async def test_a_backlog_in_one_lane_does_not_hold_up_another_lane(world: JobWorld, jobs: Jobs) -> None:
    await submit_of(world, jobs, *(f"alice{number}" for number in range(5)))
    assert [(await world.claim(jobs)).id for _ in range(2)] == ["alice0", "alice1"]
    await submit_of(world, jobs, "bob0", "bob1", "bob2", lane="m/push")
    assert await claimed(jobs, lanes=LANES) == ["bob0", "bob1", "alice2", "bob2", "alice3", "alice4"]


async def test_of_lanes_with_as_many_jobs_in_progress_the_first_job_goes_first(
    world: JobWorld, jobs: Jobs
) -> None:
    await world.submit(jobs, *(f"j{number}" for number in range(5)))  # turns of this lane that are over
    assert len(await claimed(jobs)) == 5
    for number in range(4):
        await jobs.finish(*jobs.held(f"j{number}"), JobStatus.COMPLETED)
    await world.submit(jobs, "a", lane="m/push")
    assert await claimed(jobs, lanes=["m/push"]) == ["a"]
    await world.submit(jobs, "first")
    await world.submit(jobs, "second", lane="m/push")
    assert await claimed(jobs, lanes=LANES) == ["first", "second"]


async def test_a_backlog_is_kept_only_while_it_waits(world: JobWorld, jobs: Jobs) -> None:
    await submit_of(world, jobs, "alice1", "bob1", "bob2", "carol1", "dave1")
    await jobs.cancel("dave1")
    backlogs = [world.key("backlog", "normal", LANE, f"={key}") for key in ("alice", "bob", "carol", "dave")]
    assert await world.redis.exists(*backlogs) == 3
    assert await claimed(jobs) == ["alice1", "bob1", "carol1", "bob2"]
    assert await world.redis.exists(*backlogs) == 0


async def queue_as_before(world: JobWorld, jobs: Jobs, *ids: str) -> None:
    """Submit jobs of alice, and have them queue as the previous version had it."""
    stream, half = world.key("new", "normal", LANE), 2**50 + 2**49
    if not await world.redis.exists(stream):
        await world.redis.xgroup_create(stream, "workers", "0", mkstream=True)
    for id in ids:
        await world.submit(jobs, id)
        await world.redis.delete(world.key("backlog", "normal", LANE, "=alice"))
        entry = await world.redis.xadd(stream, {"job": id})
        await world.redis.hset(world.key("job", id), mapping={"stream": stream, "entry": entry})
        arrival = int(await world.redis.get(world.key("arrivals")) or 0)
        await world.redis.zadd(world.key("waiting", LANE), {id: half + arrival})


async def test_jobs_that_the_previous_version_has_queued_keep_their_places(
    world: JobWorld, jobs: Jobs
) -> None:
    await world.redis.set(world.key("arrivals"), 10**9)
    await queue_as_before(world, jobs, "old1", "old2", "old3")
    await submit_of(world, jobs, "alice1", "bob1", "bob2", "alice2")
    await jobs.cancel("old2")
    assert await claimed(jobs) == ["old1", "old3", "alice1", "bob1", "bob2", "alice2"]
    await world.lose_worker_of("old1", "alice1")
    assert sorted(await claimed(jobs)) == ["alice1", "old1"]
    for id in ("old1", "old3", "alice1", "bob1", "bob2", "alice2"):
        await jobs.finish(*jobs.held(id, 2 if id in ("old1", "alice1") else 1), JobStatus.COMPLETED)
    assert not await world.streams()


async def test_the_previous_version_knows_the_streams_of_claimed_jobs(world: JobWorld, jobs: Jobs) -> None:
    await submit_of(world, jobs, "alice1", "bob1")
    await world.submit(jobs, "high", priority=JobPriority.HIGH)
    assert await claimed(jobs) == ["high", "alice1", "bob1"]
    kinds, priorities = ("again", "left", "new"), ("high", "normal", "batch")
    known = [world.key(kind, priority, LANE) for kind in kinds for priority in priorities]
    assert set(await world.streams()) <= set(known)


async def test_what_the_previous_version_has_claimed_counts_for_no_turn(world: JobWorld, jobs: Jobs) -> None:
    await submit_of(world, jobs, *(f"alice{number}" for number in range(1, 6)))
    backlog = world.key("backlog", "normal", LANE, "=alice")
    async with Redis.from_url(world.url) as raw:
        before = await raw.dump(backlog) or b""
        assert await claimed(jobs) == [f"alice{number}" for number in range(1, 6)]
        await raw.restore(backlog, 0, before)  # which it does not know
    await world.redis.delete(world.key("turns", LANE))
    await submit_of(world, jobs, "bob1", "bob2", "alice6")
    assert await claimed(jobs) == ["bob1", "alice6", "bob2"]
    assert not await world.redis.exists(backlog)


async def test_lanes_do_not_wait_for_each_other(world: JobWorld, jobs: Jobs) -> None:
    await world.submit(jobs, "a", "b", lane="m/light")
    await world.submit(jobs, "c", lane="m/push")
    await world.submit(jobs, "d", lane="m/push", priority=JobPriority.HIGH)
    assert (await get(jobs, "c")).position == 2
    assert await claimed(jobs, lanes=["m/light"]) == ["a", "b"]
    assert await claimed(jobs, lanes=[]) == []
    assert await claimed(jobs, lanes=["m/light", "m/push", "m/none"]) == ["d", "c"]


async def test_of_several_lanes_a_higher_priority_goes_before_fewer_in_progress(
    world: JobWorld, jobs: Jobs
) -> None:
    await world.submit(jobs, "a", "b", lane="m/push", priority=JobPriority.HIGH)
    assert await jobs.claim("w", ["m/push"], 3)
    await world.submit(jobs, "c", "d", lane="m/push")
    await world.submit(jobs, "e", lane="m/light")
    assert await claimed(jobs, lanes=["m/light", "m/push"]) == ["b", "e", "c", "d"]


async def test_of_several_lanes_what_came_first_goes_first(world: JobWorld, jobs: Jobs) -> None:
    for number in range(6):
        await world.submit(jobs, str(number), lane=f"m/{number % 3}")
    assert await claimed(jobs, lanes=["m/0", "m/1", "m/2"]) == list("012345")


async def test_a_claim_says_who_has_it_and_which_attempt_it_is(world: JobWorld, jobs: Jobs) -> None:
    await world.submit(jobs, "a")
    job = await world.claim(jobs, "me")
    assert (job.status, job.attempt, job.worker, job.position) == (JobStatus.IN_PROGRESS, 1, "me", None)
    assert job.started_at is not None and job.started_at >= job.created_at
    assert job.new.body == BODY
    assert await jobs.load("a") == job


async def test_many_workers_get_every_job_once(world: JobWorld, jobs: Jobs) -> None:
    await world.submit(jobs, *(f"j{number}" for number in range(60)))
    got: Counter[str] = Counter()

    async def work(name: str) -> None:
        got.update(await claimed(jobs, name))

    async with anyio.create_task_group() as tasks:
        for number in range(8):
            tasks.start_soon(work, f"w{number}")
    assert got == Counter({f"j{number}": 1 for number in range(60)})


async def test_what_is_given_back_goes_first(world: JobWorld, jobs: Jobs) -> None:
    await world.submit(jobs, "a", "b", "c")
    await world.submit(jobs, "h", priority=JobPriority.HIGH)
    assert [(await world.claim(jobs)).id for _ in range(3)] == ["h", "a", "b"]

    assert await jobs.give_back(*jobs.held("b"), attempts_max=3, failed=True)
    assert await jobs.give_back(*jobs.held("a"), attempts_max=3)
    assert [(await get(jobs, id)).position for id in "bac"] == [1, 2, 3]
    assert [(await get(jobs, id)).failures for id in "bac"] == [1, 0, 0]
    assert [(await get(jobs, id)).retry_at for id in "bac"] == [0, 0, 0]
    assert await claimed(jobs) == ["b", "a", "c"]
    assert [(await get(jobs, id)).attempt for id in "bac"] == [2, 2, 1]


async def test_jobs_that_are_returned_again_and_again_hold_up_no_other_key(
    world: JobWorld, jobs: Jobs
) -> None:
    alices = [f"alice{number}" for number in range(30)]
    await world.submit(jobs, *alices)
    assert await claimed(jobs) == alices
    for id in alices:
        assert await jobs.give_back(*jobs.held(id), attempts_max=3)
    await submit_of(world, jobs, "bob1", "bob2")
    assert [(await get(jobs, id)).position for id in ("alice7", "bob1", "alice8", "bob2")] == [8, 9, 10, 18]
    order: list[str] = []
    while len(order) < 2 or order[-1] != "bob2":
        job = await world.claim(jobs)
        order.append(job.id)
        if job.new.key == "alice":  # comes back at once
            assert await jobs.give_back(job.id, job.claim, attempts_max=3)
    assert order == [*alices[:8], "bob1", *alices[8:16], "bob2"]


async def test_the_returned_jobs_of_several_keys_take_turns(world: JobWorld, jobs: Jobs) -> None:
    alices, bobs = [[f"{key}{number}" for number in range(10)] for key in ("alice", "bob")]
    await submit_of(world, jobs, *alices, *bobs, "carol1")
    await claimed(jobs)
    for id in (*alices, *bobs, "carol1"):
        assert await jobs.give_back(*jobs.held(id), attempts_max=3)
    order = [*alices[:8], *bobs[:8], "carol1", *alices[8:], *bobs[8:]]
    assert [(await get(jobs, id)).position for id in order] == list(range(1, len(order) + 1))
    assert await claimed(jobs) == order


async def test_returned_jobs_of_a_key_that_have_gone_put_off_those_of_no_other_key(
    world: JobWorld, jobs: Jobs
) -> None:
    alices, bobs = [[f"{key}{number}" for number in range(5)] for key in ("alice", "bob")]
    await submit_of(world, jobs, *alices, *bobs)
    await claimed(jobs)
    for ids in (alices, bobs):
        for id in ids:
            assert await jobs.give_back(*jobs.held(id), attempts_max=3)
        if ids is alices:
            assert await claimed(jobs) == alices
    await submit_of(world, jobs, "carol1")
    assert await claimed(jobs) == [*bobs, "carol1"]


async def test_a_job_of_an_earlier_turn_that_others_left_takes_no_turn_back(
    world: JobWorld, jobs: Jobs
) -> None:
    for config in ("small", "large"):
        await jobs.beat(config, [], Serving(config, frozenset({"m"})))
    await submit_of(world, jobs, *(f"alice{number}" for number in range(4)))
    refused = await jobs.claim("small", [LANE], 3, "small")
    assert refused is not None
    refusal = JobError("too_long", "It is too long.")
    await jobs.refuse(refused.id, refused.claim, refusal, config="small", attempts_max=3, after_s=0.0)
    for id in ("alice1", "alice2"):
        job = await jobs.claim("small", [LANE], 3, "small")
        assert job is not None and job.id == id
    await submit_of(world, jobs, "carol1", "carol2")
    left = await jobs.claim("large", [LANE], 3, "large")
    assert left is not None and left.id == refused.id
    await submit_of(world, jobs, "bob1")
    assert await claimed(jobs) == ["carol1", "bob1", "alice3", "carol2"]


async def test_what_is_given_back_goes_first_however_many_have_arrived_since(
    world: JobWorld, jobs: Jobs
) -> None:
    await submit_of(world, jobs, "alice1", "bob1")
    await world.claim(jobs)
    await world.redis.set(world.key("arrivals"), 40_000)
    assert await jobs.give_back(*jobs.held("alice1"), attempts_max=3)
    assert await claimed(jobs) == ["alice1", "bob1"]


async def test_a_job_that_rests_while_very_many_arrive_goes_behind_those_that_waited_before(
    world: JobWorld, jobs: Jobs
) -> None:
    await submit_of(world, jobs, "alice1", "bob1", "bob2")
    await world.claim(jobs)
    assert await jobs.give_back(*jobs.held("alice1"), attempts_max=3, after_s=500.0)
    await world.redis.set(world.key("arrivals"), 2**15 - 2)
    await submit_of(world, jobs, "carol1")  # has the first order number of its turn
    for arrivals, position in ((2**15, 1), (10**9, 4)):
        await world.redis.set(world.key("arrivals"), arrivals)
        assert (await get(jobs, "alice1")).position == position
    await world.rest_is_over("alice1")
    assert await claimed(jobs) == ["carol1", "bob1", "bob2", "alice1"]


async def test_a_job_that_rests_has_the_position_that_it_would_get(world: JobWorld, jobs: Jobs) -> None:
    alices = [f"alice{number}" for number in range(10)]
    await submit_of(world, jobs, *alices)
    await claimed(jobs)
    for id in alices[:9]:
        assert await jobs.give_back(*jobs.held(id), attempts_max=3)
    await submit_of(world, jobs, "bob1", "bob2")
    assert await jobs.give_back(*jobs.held("alice9"), attempts_max=3, after_s=500.0)
    assert (await get(jobs, "alice9")).position == 11
    await world.rest_is_over("alice9")
    assert await claimed(jobs) == [*alices[:8], "bob1", "alice8", "alice9", "bob2"]


async def test_jobs_that_the_previous_version_has_returned_go_first(world: JobWorld, jobs: Jobs) -> None:
    await submit_of(world, jobs, "alice1", "alice2", "bob1")
    await world.claim(jobs)
    assert await jobs.give_back(*jobs.held("alice1"), attempts_max=3)
    await world.redis.delete(world.key("backlog", "normal", LANE, "=alice"))
    await world.redis.zadd(world.key("waiting", LANE), {"alice1": 2**50 + 7, "alice2": 2**50 + 8})
    assert [(await get(jobs, id)).position for id in ("alice1", "alice2", "bob1")] == [1, 2, 3]
    assert await claimed(jobs) == ["alice1", "alice2", "bob1"]


async def test_what_rests_does_not_hold_up_what_is_behind_it(world: JobWorld, jobs: Jobs) -> None:
    await world.submit(jobs, "a", "b", "c")
    await world.claim(jobs)
    assert await jobs.give_back(*jobs.held("a"), attempts_max=3, after_s=500.0)
    resting = await get(jobs, "a")
    assert 490 < resting.retry_at - resting.created_at < 510
    assert resting.position == 1
    assert (await world.claim(jobs)).id == "b"

    await world.rest_is_over("a")
    assert await claimed(jobs) == ["a", "c"]
    assert (await get(jobs, "a")).retry_at == 0


async def test_giving_back_twice_is_giving_back_once(world: JobWorld, jobs: Jobs) -> None:
    await world.submit(jobs, "a")
    await world.claim(jobs)
    assert await jobs.give_back(*jobs.held("a"), attempts_max=3, failed=True)
    assert await jobs.give_back(*jobs.held("a"), attempts_max=3, failed=True)
    assert (await get(jobs, "a")).failures == 1
    assert await claimed(jobs) == ["a"]
    assert not await jobs.give_back(*jobs.held("a"), attempts_max=3, failed=True)
    assert await jobs.give_back(*jobs.held("a", 2), attempts_max=3)
    await jobs.cancel("a")
    assert not await jobs.give_back(*jobs.held("a", 2), attempts_max=3)

    await world.submit(jobs, "b")
    await world.claim(jobs)
    for _ in range(2):
        assert await jobs.give_back(*jobs.held("b"), attempts_max=1, failed=True)
    job = await get(jobs, "b")
    assert (job.status, job.failures) == (JobStatus.FAILED, 1)


async def test_refusing_twice_is_refusing_once(world: JobWorld, jobs: Jobs) -> None:
    async def refuse(attempt: int, config: str, code: str = "too_long") -> AfterRefusal | None:
        error = JobError(code, "It is too long.")
        held = jobs.held("a", attempt)
        return await jobs.refuse(*held, error, config=config, attempts_max=2, after_s=500.0)

    await world.submit(jobs, "a")
    await world.claim(jobs)
    assert [await refuse(1, "none") for _ in range(2)] == [AfterRefusal.FAILED] * 2
    for config in ("one", "two"):
        await jobs.beat(config, [], Serving(config, frozenset({"m"})))
    await world.rest_is_over("a")
    assert await jobs.claim("one", [LANE], 2, "one")
    assert [await refuse(2, "one") for _ in range(2)] == [AfterRefusal.LEFT] * 2
    left = await get(jobs, "a")
    assert (left.failures, left.retry_at) == (1, 0)
    assert 86_000 < await world.redis.ttl(world.key("refused", LANE)) <= 86_400
    assert await jobs.claim("two", [LANE], 2, "two")
    assert await refuse(2, "one") is None
    assert [await refuse(3, "two") for _ in range(2)] == [AfterRefusal.ENDED] * 2
    assert await refuse(3, "two", "another") is None
    error = (await get(jobs, "a")).error
    assert error is not None and error.code == "too_long"


# ------------------------------------------------------------------ lost, given up, too late


async def test_who_is_not_heard_of_loses_the_job_for_good(world: JobWorld, jobs: Jobs) -> None:
    await world.submit(jobs, "a", "b")
    await world.claim(jobs, "dead")
    await world.lose_worker_of("a")
    again = await world.claim(jobs, "next")

    assert (again.id, again.attempt, again.failures, again.worker) == ("a", 2, 1, "next")
    assert not await jobs.append(*jobs.held("a"), Chunk(0, 1, b"late"))
    assert not await jobs.finish(*jobs.held("a"), JobStatus.COMPLETED)
    assert not await jobs.give_back(*jobs.held("a"), attempts_max=3)
    assert await jobs.beat("dead", [jobs.held("a")], NO_MODELS) == ["a"]
    assert await jobs.load("a") == again
    assert await jobs.append(*jobs.held("a", 2), Chunk(0, 2, b"x"))


async def test_a_job_can_be_taken_over_though_the_others_of_its_lane_have_ended(
    world: JobWorld, jobs: Jobs
) -> None:
    await world.submit(jobs, "a", "b")
    assert await claimed(jobs) == ["a", "b"]
    await jobs.finish(*jobs.held("a"), JobStatus.COMPLETED)
    (stream,) = await world.streams()
    assert await world.redis.xlen(stream) == 1  # nothing of what has ended
    await world.lose_worker_of("b")
    assert await claimed(jobs) == ["b"]


async def test_a_job_that_others_refused_is_taken_over_and_forgotten_at_its_end(
    world: JobWorld, jobs: Jobs
) -> None:
    await world.submit(jobs, "a", "b")
    for config in ("small", "large"):
        await jobs.beat(config, [], Serving(config, frozenset({"m"})))
    refusal = JobError("too_long", "It is too long.")
    job = await jobs.claim("small", [LANE], 3, "small")
    assert job is not None and job.id == "a"
    refused = await jobs.refuse("a", job.claim, refusal, config="small", attempts_max=3, after_s=0.0)
    assert refused is AfterRefusal.LEFT
    for attempt in (2, 3):
        job = await jobs.claim("large", [LANE], 3, "large")
        assert job is not None and (job.id, job.attempt) == ("a", attempt)
        if attempt == 2:
            await world.lose_worker_of("a")
    await jobs.finish("a", job.claim, JobStatus.COMPLETED)
    assert "refused" not in await world.names()


async def test_an_entry_that_is_lost_takes_no_job_from_who_has_it_by_another(
    world: JobWorld, jobs: Jobs
) -> None:
    await world.submit(jobs, "a")
    await world.claim(jobs)
    (stream,) = await world.streams()
    stray = await world.redis.xadd(stream, {"job": "a"})
    await world.redis.xreadgroup("workers", "nobody", {stream: ">"})
    await world.redis.xclaim(stream, "workers", "nobody", 0, [stray], idle=10**9, justid=True)
    await world.is_due()
    assert await jobs.beat("w", [jobs.held("a")], NO_MODELS) == []
    assert (await get(jobs, "a")).failures == 0
    assert await world.redis.xlen(stream) == 1


async def test_a_late_return_by_who_has_lost_it_does_nothing(world: JobWorld, jobs: Jobs) -> None:
    await world.submit(jobs, "a")
    await world.claim(jobs, "dead")
    await world.lose_worker_of("a")
    await jobs.beat("other", [], NO_MODELS)
    assert (await get(jobs, "a")).status is JobStatus.QUEUED
    assert not await jobs.give_back(*jobs.held("a"), attempts_max=3, after_s=100.0, failed=True)
    refusal = JobError("x", "No.")
    assert await jobs.refuse(*jobs.held("a"), refusal, config="c", attempts_max=3, after_s=100.0) is None
    assert (await world.claim(jobs)).failures == 1
    assert await jobs.give_back(*jobs.held("a", 2), attempts_max=3)
    assert not await jobs.give_back(*jobs.held("a"), attempts_max=3)


async def test_a_beat_keeps_a_job(world: JobWorld, jobs: Jobs) -> None:
    await world.submit(jobs, "a", "b")
    await world.claim(jobs, "here")
    await world.claim(jobs, "there")
    await world.lose_worker_of("a", "b")
    assert await jobs.beat("here", [jobs.held("a")], NO_MODELS) == []
    assert (await get(jobs, "a")).status is JobStatus.IN_PROGRESS
    assert (await get(jobs, "b")).status is JobStatus.QUEUED
    assert await jobs.beat("there", [jobs.held("b"), jobs.held("c")], NO_MODELS) == ["b", "c"]


async def test_nobody_is_lost_while_nobody_could_be_heard(world: JobWorld, jobs: Jobs) -> None:
    await world.submit(jobs, "a")
    await world.claim(jobs)
    await world.lose_worker_of("a")
    long_ago = int((await world.redis.time())[0] - 600) * 1000
    await world.redis.hset(world.key("clock"), "heard", str(long_ago))

    assert await jobs.claim("other", [LANE], 3) is None
    assert await jobs.beat("w", [jobs.held("a")], NO_MODELS) == []
    await world.is_due()
    assert await jobs.claim("other", [LANE], 3) is None
    await world.lose_worker_of("a")
    assert (await world.claim(jobs, "other")).id == "a"


async def test_a_job_that_keeps_failing_is_given_up(world: JobWorld, jobs: Jobs) -> None:
    await world.submit(jobs, "a", "b")
    for attempt in (1, 2, 3):
        assert (await world.claim(jobs)).attempt == attempt
        if attempt == 3:
            await world.lose_worker_of("a")
        else:
            await jobs.give_back(*jobs.held("a", attempt), attempts_max=3, failed=True)
    assert (await world.claim(jobs)).id == "b"
    job = await get(jobs, "a")
    assert job.status is JobStatus.FAILED
    given_up = "The job was given up: 3 attempts at it failed."
    assert job.error == JobError("job_poisoned", f"{given_up} The last: {DIED}")
    assert (job.attempt, job.failures, job.position) == (3, 3, None)


DIED = "Its worker died, or could not reach the store."


async def test_what_went_wrong_last_is_kept_with_a_job(world: JobWorld, jobs: Jobs) -> None:
    async def setback() -> str:
        return (await get(jobs, "a")).setback

    await world.submit(jobs, "a")
    await world.claim(jobs)
    assert await setback() == ""
    await jobs.give_back(*jobs.held("a"), attempts_max=9, setback="It is away.")
    assert await setback() == "It is away."
    await world.claim(jobs)
    await jobs.give_back(*jobs.held("a", 2), attempts_max=9)  # its worker was stopped
    assert await setback() == ""
    await world.claim(jobs)
    await world.lose_worker_of("a")
    job = await world.claim(jobs)
    assert job.setback == DIED
    refusal = JobError("no_class", "It has no class.")
    await jobs.refuse("a", job.claim, refusal, config="c", attempts_max=9, after_s=0.0)
    assert await setback() == "It has no class."
    await world.claim(jobs)
    await jobs.give_back(*jobs.held("a", 5), attempts_max=1, failed=True, setback="It failed.")
    job = await get(jobs, "a")
    assert job.error is not None
    assert job.error.message.endswith(" attempts at it failed. The last: It failed.")
    await jobs.retry("a")
    assert await setback() == ""


async def test_given_back_without_a_failure_it_is_never_given_up(world: JobWorld, jobs: Jobs) -> None:
    await world.submit(jobs, "a")
    for attempt in range(1, 8):
        assert (await world.claim(jobs)).attempt == attempt
        await jobs.give_back(*jobs.held("a", attempt), attempts_max=3)
    await world.claim(jobs)
    await jobs.give_back(*jobs.held("a", 8), attempts_max=3, failed=True)
    await world.claim(jobs)
    await jobs.give_back(*jobs.held("a", 9), attempts_max=1)  # fewer are allowed by now
    assert (await get(jobs, "a")).status is JobStatus.QUEUED


@pytest.mark.parametrize("is_claimed", [False, True])
async def test_a_job_whose_time_is_over_fails_also_if_nobody_asks_for_it(
    world: JobWorld, jobs: Jobs, is_claimed: bool
) -> None:
    (job,) = await world.submit(jobs, "a", expires_s=300.0)
    assert job.expires_at == job.created_at + 300
    if is_claimed:
        await world.claim(jobs)
    await world.expire("a")
    assert await jobs.claim("other", [], 3) is None
    job = await get(jobs, "a")
    assert job.status is JobStatus.FAILED
    assert job.error == JobError("job_expired", "The job expired before it had ended.")
    assert await jobs.beat("w", [jobs.held("a")], NO_MODELS) == ["a"]
    assert not await jobs.finish(*jobs.held("a"), JobStatus.COMPLETED)
    assert await world.quota() == (0, SIZE)


async def test_a_job_that_expires_is_not_handed_out_before_the_sweep(world: JobWorld, jobs: Jobs) -> None:
    await world.submit(jobs, "a", "b", expires_s=300.0)
    await world.redis.zadd(world.key("expiring"), {"a": 1})
    assert (await world.claim(jobs)).id == "b"
    error = (await get(jobs, "a")).error
    assert error is not None and error.code == "job_expired"


# ------------------------------------------------------------------ ended


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (JobStatus.COMPLETED, None),
        (JobStatus.INCOMPLETE, None),
        (JobStatus.FAILED, JobError("invalid_request", "It was \u2018wrong\u2019.")),
        (JobStatus.FAILED, JobError("invalid_request", "It was wrong.", "top_p")),
    ],
)
async def test_an_end_is_for_good(
    world: JobWorld, jobs: Jobs, status: JobStatus, error: JobError | None
) -> None:
    await world.submit(jobs, "a")
    await world.claim(jobs)
    assert await jobs.finish(*jobs.held("a"), status, error)
    ended = await get(jobs, "a")
    assert (ended.status, ended.error) == (status, error)
    assert ended.ended_at is not None

    assert await jobs.finish(*jobs.held("a"), status, error)  # its reply may have been lost
    assert not await jobs.finish(*jobs.held("a"), JobStatus.FAILED, JobError("x", "y"))
    assert not await jobs.finish(*jobs.held("a", 2), status, error)
    assert not await jobs.append(*jobs.held("a"), Chunk(0, 1, b"x"))
    assert not await jobs.give_back(*jobs.held("a"), attempts_max=3)
    assert await jobs.cancel("a") == ended
    assert await jobs.beat("w", [jobs.held("a")], NO_MODELS) == ["a"]
    assert await claimed(jobs) == []
    assert await get(jobs, "a") == ended


async def test_a_job_that_waits_is_cancelled_and_the_rest_moves_up(world: JobWorld, jobs: Jobs) -> None:
    await world.submit(jobs, "a", "b", "c")
    cancelled = await jobs.cancel("b")
    assert cancelled is not None
    assert (cancelled.status, cancelled.position) == (JobStatus.CANCELLED, None)
    assert (await get(jobs, "c")).position == 2
    assert await claimed(jobs) == ["a", "c"]
    assert await jobs.cancel("nothing") is None


@pytest.mark.parametrize("is_deleted", [False, True], ids=["cancelled", "deleted"])
async def test_the_worker_of_a_cancelled_job_hears_it(world: JobWorld, jobs: Jobs, is_deleted: bool) -> None:
    there = world.open()
    await world.submit(jobs, "a")
    await world.claim(jobs)
    async with listening(jobs):
        await jobs.waiting(0.0)
        await (there.delete("a") if is_deleted else there.cancel("a"))
        assert list(await jobs.waiting(WITHIN_S)) == [("a", 1)]
    assert is_deleted or (await get(jobs, "a")).status is JobStatus.CANCELLED
    assert not await jobs.append(*jobs.held("a"), Chunk(0, 1, b"x"))
    assert not await jobs.finish(*jobs.held("a"), JobStatus.COMPLETED)


@pytest.mark.parametrize("state", ["queued", "in_progress", "resting", "completed"])
async def test_a_deleted_job_leaves_nothing(world: JobWorld, jobs: Jobs, state: str) -> None:
    await world.submit(jobs, "a", expires_s=100.0)
    if state != "queued":
        await world.claim(jobs)
        await jobs.append(*jobs.held("a"), Chunk(0, 1, b"x"))
    if state == "resting":
        await jobs.give_back(*jobs.held("a"), attempts_max=3, after_s=100.0)
    if state == "completed":
        await jobs.finish(*jobs.held("a"), JobStatus.COMPLETED)
    assert await jobs.delete("a")
    assert not await jobs.delete("a")
    assert await jobs.get("a") is None
    assert await jobs.beat("w", [jobs.held("a")], NO_MODELS) == ["a"]
    assert (await world.names()) <= LEFT


async def test_a_job_that_was_given_up_can_be_tried_again(world: JobWorld, jobs: Jobs) -> None:
    await world.submit(jobs, "a", "b", expires_s=100.0)
    await world.claim(jobs)
    await jobs.append(*jobs.held("a"), Chunk(0, 1, b"half"))
    await jobs.finish(*jobs.held("a"), JobStatus.FAILED, JobError("x", "y"))
    await world.redis.hincrby(world.key("job", "a"), "created", -600_000)  # ten minutes ago
    await world.redis.hset(world.key("job", "a"), "failures", 3)
    before = await get(jobs, "a")

    again = await jobs.retry("a")
    assert again is not None
    assert again.created_at > before.created_at + 599  # it has not waited since then
    assert again.status is JobStatus.QUEUED
    assert (again.position, again.chunks, again.failures, again.error, again.ended_at) == (
        2,
        0,
        0,
        None,
        None,
    )
    assert (again.expires_at, again.started_at, again.worker) == (None, None, "")
    assert await jobs.chunks("a") == []
    assert await world.quota() == (2, 2 * SIZE)
    assert await world.redis.ttl(world.key("job", "a")) == -1
    assert await world.redis.zcard(world.key("ended")) == 0  # the sweep would delete it
    assert await jobs.retry("a") == again
    assert await claimed(jobs) == ["b", "a"]
    assert not await jobs.append(*jobs.held("a"), Chunk(0, 1, b"of the first attempt"))
    assert await jobs.append(*jobs.held("a", 2), Chunk(0, 2, b"whole"))
    assert await jobs.finish(*jobs.held("a", 2), JobStatus.COMPLETED)
    completed = await jobs.retry("a")
    assert completed is not None and completed.status is JobStatus.COMPLETED
    assert await jobs.retry("nothing") is None
    assert await jobs.delete("a")
    assert await world.quota() == (1, SIZE)


# ------------------------------------------------------------------ answers


async def test_chunks_come_back_as_they_were_written(world: JobWorld, jobs: Jobs) -> None:
    await world.submit(jobs, "a")
    await world.claim(jobs)
    first = [Chunk(0, 1, b"data: 1\n\n"), Chunk(1, 1, b"\x00\xff\r\n")]
    for chunk in first:
        assert await jobs.append(*jobs.held("a"), chunk)
    await jobs.give_back(*jobs.held("a"), attempts_max=3)
    job = await world.claim(jobs)
    assert job.chunks == 2
    third = Chunk(2, 2, b"anew", restarts=True)
    assert await jobs.append(*jobs.held("a", 2), third)

    assert await jobs.chunks("a") == [*first, third]
    assert await jobs.chunks("a", 1) == [first[1], third]
    assert await jobs.chunks("a", 1, limit=1) == [first[1]]
    assert await jobs.chunks("a", 3) == []
    assert await jobs.chunks("nothing") == []


async def test_a_chunk_is_written_once_and_none_is_left_out(world: JobWorld, jobs: Jobs) -> None:
    await world.submit(jobs, "a")
    await world.claim(jobs)
    assert await jobs.append(*jobs.held("a"), Chunk(0, 1, b"x"))
    assert await jobs.append(*jobs.held("a"), Chunk(0, 1, b"another"))
    with pytest.raises(ValueError, match="missing before number 2"):
        await jobs.append(*jobs.held("a"), Chunk(2, 1, b"y"))
    assert await jobs.chunks("a") == [Chunk(0, 1, b"x")]
    assert (await get(jobs, "a")).chunks == 1


async def test_a_job_does_not_end_without_the_last_chunks_of_its_answer(world: JobWorld, jobs: Jobs) -> None:
    await world.submit(jobs, "a")
    await world.claim(jobs)
    for number in range(2):
        assert await jobs.append(*jobs.held("a"), Chunk(number, 1, b"x"))
    with pytest.raises(ValueError, match="a has fewer than 3 chunks"):
        await jobs.finish(*jobs.held("a"), JobStatus.COMPLETED, chunks=3)
    assert (await get(jobs, "a")).status is JobStatus.IN_PROGRESS
    for _ in range(2):
        assert await jobs.finish(*jobs.held("a"), JobStatus.COMPLETED, chunks=2)
    assert (await get(jobs, "a")).status is JobStatus.COMPLETED


@pytest.mark.parametrize("leg", legs(own=True))
async def test_a_replica_that_takes_over_has_who_has_which_job(leg: str, tmp_path: Path) -> None:
    with failover(leg, tmp_path) as servers:
        async with cast("Any", Redis.from_url(servers.url, decode_responses=True)) as redis:
            world = JobWorld(servers.url, "test", redis)
            jobs = world.open()
            await servers.follow()
            await world.submit(jobs, "kept", "lost", "back", "rests", "queued")
            for worker in ("w", "dead", "w", "w"):
                await world.claim(jobs, worker)
            assert await jobs.append(*jobs.held("kept"), Chunk(0, 1, b"x"))
            assert await jobs.give_back(*jobs.held("back"), attempts_max=3)
            assert await jobs.give_back(*jobs.held("rests"), attempts_max=3, after_s=LONG_S)
            assert await jobs.beat("w", [jobs.held("kept")], NO_MODELS) == []
            await servers.follow()
            await servers.promote()
            assert (await world.claim(jobs)).id == "back"
            assert (await world.claim(jobs)).id == "queued"  # the replica does not hear of these
            await world.submit(jobs, "unheard")
            servers.fail()

            with pytest.raises(StoreUnavailable):
                await jobs.append(*jobs.held("queued"), Chunk(0, 1, b"x"))
            for held in (jobs.held("queued"), jobs.held("back", 2), jobs.held("unheard")):
                assert not await jobs.append(*held, Chunk(0, 1, b"x"))
            assert await jobs.beat("w", [jobs.held("kept"), jobs.held("queued")], NO_MODELS) == ["queued"]
            assert await jobs.append(*jobs.held("kept"), Chunk(1, 1, b"y"))
            await world.lose_worker_of("lost")
            await world.rest_is_over("rests")
            assert await claimed(jobs) == ["back", "lost", "rests", "queued"]
            for id in ("kept", "back", "lost", "rests", "queued"):
                job = await get(jobs, id)
                assert await jobs.finish(id, job.claim, JobStatus.COMPLETED)
                await jobs.delete(id)
            assert await jobs.get("unheard") is None
            assert await world.names() - LEFT == set()
            await world.aclose()


# ------------------------------------------------------------------ kept, and forgotten


async def test_a_job_is_kept_from_its_end_and_then_nothing_of_it_is_left(world: JobWorld, jobs: Jobs) -> None:
    await world.submit(jobs, "a", "b", keep_s=50.0, expires_s=1000.0)
    await world.claim(jobs)
    await jobs.append(*jobs.held("a"), Chunk(0, 1, b"x"))
    keys = [world.key("job", "a"), world.key("chunks", "a")]
    assert [await world.redis.pttl(key) for key in keys] == [-1, -1]

    await jobs.finish(*jobs.held("a"), JobStatus.COMPLETED)
    await jobs.cancel("b")
    assert [49_000 < await world.redis.pttl(key) <= 50_000 for key in keys] == [True, True]
    assert await world.quota() == (0, 2 * SIZE + 1)
    await world.keep_is_over("a", "b")
    await jobs.claim("w", [LANE], 3)
    assert (await world.names()) <= LEFT
    assert await jobs.find() == []


async def test_bytes_are_given_back_though_the_job_has_expired_before_the_sweep(
    world: JobWorld, jobs: Jobs
) -> None:
    await world.submit(jobs, "a")
    await jobs.cancel("a")
    await world.redis.delete(world.key("job", "a"))
    assert await jobs.get("a") is None
    assert await jobs.find() == []
    await world.keep_is_over("a")
    await jobs.beat("w", [], NO_MODELS)
    assert await world.quota() == (0, 0)


async def test_what_a_sweep_leaves_over_is_swept_by_the_next_command(world: JobWorld, jobs: Jobs) -> None:
    ended, expired = ([f"{kind}-{number}" for number in range(201)] for kind in ("ended", "expired"))
    await world.submit(jobs, *ended, *expired, expires_s=1000.0)
    for id in ended:
        await jobs.cancel(id)
    await world.keep_is_over(*ended)
    await world.expire(*expired)
    await jobs.beat("w", [], NO_MODELS)
    assert await world.quota() == (1, 202 * SIZE)
    await jobs.beat("w", [], NO_MODELS)
    assert await world.quota() == (0, 201 * SIZE)


# ------------------------------------------------------------------ waiting


@pytest.fixture(autouse=True)
def no_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what is said wakes those who wait."""
    monkeypatch.setattr("gateway.store.jobs.POLL_S", 1000.0)


async def is_heard(world: JobWorld, id: str) -> None:
    """Return once somebody is subscribed to a job."""
    with anyio.fail_after(WITHIN_S):
        while not await world.redis.pubsub_channels(world.key("changed", id)):
            pass


async def waits(jobs: Jobs, id: str, chunks: int, status: JobStatus = JobStatus.QUEUED) -> None:
    with anyio.fail_after(WITHIN_S):
        assert await jobs.changed(id, chunks, 1000.0, status)


async def test_whoever_waits_for_a_job_hears_of_every_change(world: JobWorld, jobs: Jobs) -> None:
    there = world.open()
    await world.submit(there, "a")
    async with listening(jobs), world.redis.pubsub(ignore_subscribe_messages=True) as said:
        await said.subscribe(world.key("changed", "a"))
        await said.get_message(timeout=WITHIN_S)

        async def changes(status: JobStatus, chunks: int, change: Any) -> None:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(waits, jobs, "a", chunks, status)
                await is_heard(world, "a")
                await change
            assert await said.get_message(timeout=WITHIN_S)  # not only seen by a look before it

        await changes(JobStatus.QUEUED, 0, there.claim("w", [LANE], 3))
        await changes(JobStatus.IN_PROGRESS, 0, there.append(*there.held("a"), Chunk(0, 1, b"x")))
        await changes(JobStatus.IN_PROGRESS, 1, there.append(*there.held("a"), Chunk(1, 1, b"x")))
        await changes(JobStatus.IN_PROGRESS, 2, there.give_back(*there.held("a"), attempts_max=3))
        await changes(JobStatus.QUEUED, 2, there.cancel("a"))
        await waits(jobs, "a", 2, JobStatus.CANCELLED)  # there is nothing to wait for any more
        await waits(jobs, "nothing", 0)


async def test_what_was_missed_is_not_waited_for(world: JobWorld, jobs: Jobs) -> None:
    await world.submit(jobs, "a")
    await world.claim(jobs)
    await waits(jobs, "a", 0, JobStatus.QUEUED)
    await jobs.append(*jobs.held("a"), Chunk(0, 1, b"x"))
    await waits(jobs, "a", 0, JobStatus.IN_PROGRESS)


async def test_nothing_happens_for_as_long_as_one_waits(world: JobWorld, jobs: Jobs) -> None:
    await world.submit(jobs, "a")
    async with listening(jobs):
        assert not await jobs.changed("a", 0, 0.05, JobStatus.QUEUED)
        await jobs.waiting(0.0)
        assert list(await jobs.waiting(0.05)) == []


async def test_without_the_messages_a_look_now_and_then_does(
    world: JobWorld, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.store.jobs.POLL_S", 0.05)
    await world.submit(jobs, "a")
    async with anyio.create_task_group() as tasks:  # nobody listens
        tasks.start_soon(waits, jobs, "a", 0)
        await jobs.cancel("a")


async def test_many_who_wait_look_more_rarely_as_long_as_messages_come(
    world: JobWorld, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.store.jobs.POLL_S", 1.0)
    await world.submit(jobs, "a")
    async with anyio.create_task_group() as tasks:
        for _ in range(200):
            tasks.start_soon(waits, jobs, "a", 0)
        await anyio.wait_all_tasks_blocked()
        alone = jobs._poll_s()
        async with listening(jobs):
            told = jobs._poll_s()
            await jobs.cancel("a")

    assert (alone, told, jobs._poll_s()) == (1.0, 4.0, 1.0)


async def test_who_waits_looks_at_once_when_messages_end(
    world: JobWorld, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"POLL_S": 0.05, "POLLS_PER_S": 0.001, "AGAIN_S": 1000.0}.items():
        monkeypatch.setattr(f"gateway.store.jobs.{name}", value)
    await world.submit(jobs, "a")
    async with listening(jobs), anyio.create_task_group() as tasks:
        tasks.start_soon(waits, jobs, "a", 0)
        await is_heard(world, "a")
        await world.redis.client_kill_filter(_type="pubsub")
        await world.open().cancel("a")


async def test_any_number_of_waiters_takes_one_connection(
    world: JobWorld, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.store.jobs.CONNECTIONS_MAX", 2)
    ids = [f"j{number}" for number in range(50)]
    await world.submit(jobs, *ids)
    jobs = world.open()
    async with listening(jobs):
        async with anyio.create_task_group() as tasks:
            for id in ids * 4:
                tasks.start_soon(waits, jobs, id, 0)
            channels: list[Any] = []
            with anyio.fail_after(WITHIN_S):
                while len(channels) < len(ids):
                    channels = await world.redis.pubsub_channels(f"{world.key('changed')}:*")
            clients = [client["name"] for client in await world.redis.client_list()]
            assert clients.count("gateway-jobs") <= 3 + 16  # those of the other store too
            for id in ids:
                await jobs.cancel(id)
        with anyio.fail_after(WITHIN_S):
            while await world.redis.pubsub_channels(f"{world.key('changed')}:*"):
                pass


async def test_workers_are_woken_by_new_jobs_and_by_those_given_back(world: JobWorld, jobs: Jobs) -> None:
    there = world.open()
    async with listening(jobs):

        async def wakes(change: Any) -> None:
            with anyio.fail_after(WITHIN_S):
                assert await jobs.claim("w", [LANE], 3) is None
                await change  # between the look and the wait
                await jobs.waiting(1000.0)

        await wakes(there.submit(new_job("a"), QUOTA))
        await world.claim(jobs)
        await wakes(there.give_back(*there.held("a"), attempts_max=3))


async def test_workers_are_woken_by_what_they_heard_during_a_look_that_came_too_early_for_it(
    world: JobWorld, jobs: Jobs
) -> None:
    there = world.open()
    await world.submit(jobs, "a")
    async with listening(jobs):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(waits, jobs, "a", 0)
            await is_heard(world, "a")
            assert [lane.name for lane in (await jobs.queue()).lanes] == [LANE]
            await there.submit(new_job("b", lane=LANES[1]), QUOTA)
            await there.cancel("a")  # which is heard after it
        assert await jobs.claim("w", [LANE], 3) is None
        with anyio.fail_after(WITHIN_S):
            assert list(await jobs.waiting(1000.0)) == [("a", 0)]


# ------------------------------------------------------------------ for operators


async def test_every_end_is_counted_whoever_made_it(world: JobWorld, jobs: Jobs) -> None:
    assert await jobs.totals() == {}
    await world.submit(jobs, "done", "short", "bad", "poison")
    for id, status in (("done", "completed"), ("short", "incomplete"), ("bad", "failed")):
        assert (await world.claim(jobs)).id == id
        assert await jobs.finish(*jobs.held(id), JobStatus(status))
        assert await jobs.finish(*jobs.held(id), JobStatus(status))  # the reply was lost
    await world.claim(jobs, attempts_max=1)
    await jobs.give_back(*jobs.held("poison"), attempts_max=3, failed=True)
    await world.submit(jobs, "late", lane="a model/with blanks", expires_s=300.0)
    await world.expire("late")
    await world.submit(jobs, "unwanted")
    assert await jobs.claim("w", [LANE], 1) is not None  # finds that one is to be given up
    await jobs.cancel("unwanted")
    assert await jobs.totals() == {
        (LANE, "completed"): 1,
        (LANE, "incomplete"): 1,
        (LANE, "failed"): 1,
        (LANE, "poisoned"): 1,
        (LANE, "cancelled"): 1,
        ("a model/with blanks", "expired"): 1,
    }


async def test_lanes_say_what_waits_and_how_fast_it_goes(world: JobWorld, jobs: Jobs) -> None:
    assert (await jobs.queue()).lanes == ()
    await world.submit(jobs, "a", "b", "c", "d")
    await world.submit(jobs, "e", lane="m/push", priority=JobPriority.BATCH)
    await world.claim(jobs)
    await world.claim(jobs)
    await jobs.give_back(*jobs.held("a"), attempts_max=3, after_s=100.0)
    lanes = {lane.name: lane for lane in (await jobs.queue()).lanes}
    assert set(lanes) == {LANE, "m/push"}
    light, push = lanes[LANE], lanes["m/push"]
    assert (light.queued, light.in_progress, light.drain_per_s) == (3, 1, None)
    assert light.oldest_s is not None and 0 <= light.oldest_s < 60
    await world.redis.zincrby(world.key("ages", LANE), -60_000, "a")  # a minute goes by
    (light,) = [lane for lane in (await jobs.queue()).lanes if lane.name == LANE]
    assert light.oldest_s is not None and 60 <= light.oldest_s < 120
    assert (push.queued, push.in_progress) == (1, 0)
    await world.redis.zincrby(world.key("ages", "m/push"), 3_600_000, "e")  # the server's clock has gone back
    (push,) = [lane for lane in (await jobs.queue()).lanes if lane.name == "m/push"]
    assert push.oldest_s == 0

    await jobs.cancel("d")  # it was nobody's: that says nothing of how fast jobs are done
    ends = world.key("ends", LANE)
    assert not await world.redis.exists(ends)
    await world.redis.hset(ends, "1", 4)  # long ago
    await jobs.finish(*jobs.held("b"), JobStatus.COMPLETED)
    (light,) = [lane for lane in (await jobs.queue()).lanes if lane.name == LANE]
    assert light.in_progress == 0
    assert light.drain_per_s == 1 / 300
    assert await world.redis.pttl(ends) > 0
    (bucket,) = [int(name) for name in await world.redis.hkeys(ends)]
    await world.redis.hset(ends, mapping={str(bucket - 6): 4, str(bucket - 3): 4, str(bucket): 4})
    await world.redis.hset(ends, mapping={str(bucket - 99): 4, str(bucket + 99): 4})  # neither was lately
    (light,) = [lane for lane in (await jobs.queue()).lanes if lane.name == LANE]
    assert light.drain_per_s is not None and 8 / 81 <= light.drain_per_s <= 8 / 60
    for id in "acde":
        await jobs.cancel(id)
    assert (await jobs.queue()).lanes == ()
    assert not {"new", "again", "waiting", "lanes", "running"} & await world.names()


async def test_lanes_say_whether_a_worker_has_their_model(world: JobWorld, jobs: Jobs) -> None:
    await world.submit(jobs, "a")
    await world.submit(jobs, "b", lane="other/light")
    await jobs.beat("w", [], Serving("one", frozenset({"m"})))
    assert {lane.name: lane.is_worked for lane in (await jobs.queue()).lanes} == {
        LANE: True,
        "other/light": False,
    }
    await world.redis.zincrby(world.key("serving", "m"), -3_600_000, "w one")  # nothing for an hour
    assert [lane.is_worked for lane in (await jobs.queue()).lanes] == [False, False]


async def test_who_has_not_been_heard_of_for_long_serves_no_model(world: JobWorld, jobs: Jobs) -> None:
    """Else jobs that all others have refused would be left to it."""
    await jobs.beat("gone", [], Serving("old", frozenset({"m"})))
    await world.redis.zincrby(world.key("serving", "m"), -3_600_000, "gone old")
    await jobs.beat("w", [], Serving("new", frozenset({"m"})))
    assert await world.serving("m") == ["w new"]
    assert 0 < await world.redis.ttl(world.key("serving", "m")) <= 600


async def test_a_job_that_nobody_else_may_run_rests_after_its_refusal(world: JobWorld, jobs: Jobs) -> None:
    await world.submit(jobs, "a")
    job = await world.claim(jobs)
    refusal = JobError("too_long", "It is too long.")
    refused = await jobs.refuse("a", job.claim, refusal, config="c", attempts_max=3, after_s=500.0)
    assert refused is AfterRefusal.FAILED
    resting = await get(jobs, "a")
    assert 490 < resting.retry_at - resting.created_at < 510
    assert await jobs.refuse("a", "none", refusal, config="c", attempts_max=3, after_s=0.0) is None


async def test_a_model_is_served_elsewhere_under_another_configuration(jobs: Jobs) -> None:
    await jobs.beat("w", [], Serving("small", frozenset({"m"})))
    assert not await jobs.is_served_elsewhere("m", "small")
    assert await jobs.is_served_elsewhere("m", "large")
    assert not await jobs.is_served_elsewhere("n", "large")
    for worker in "xy":
        await jobs.beat(worker, [], Serving("small", frozenset({"m"})))
    await jobs.beat("z", [], Serving("large", frozenset({"m"})))
    assert await jobs.is_served_elsewhere("m", "small")


async def test_find_is_newest_first_by_key_and_by_status(world: JobWorld, jobs: Jobs) -> None:
    await world.submit(jobs, "a", "b", "c")
    await world.submit(jobs, "d", key=None)
    await world.submit(jobs, "e", key="bob")
    await jobs.cancel("a")
    await jobs.cancel("e")

    async def found(**options: Any) -> list[str]:
        return [job.id for job in await jobs.find(**options)]

    assert await found() == ["e", "d", "c", "b", "a"]
    assert await found(key="alice") == ["c", "b", "a"]
    assert await found(status=JobStatus.CANCELLED) == ["e", "a"]
    assert await found(key="alice", status=JobStatus.QUEUED, limit=1) == ["c"]
    assert await found(limit=2) == ["e", "d"]
    await world.submit(jobs, "f", lane="m/push")
    assert await found(lane="m/push") == ["f"]
    assert await found(lane="m/light", status=JobStatus.QUEUED, limit=2) == ["d", "c"]
    await jobs.delete("f")
    first = (await jobs.find(limit=1))[0]
    assert first.new.body == first.new.facts == b""
    assert first.status is JobStatus.CANCELLED


async def test_find_goes_through_many(world: JobWorld, jobs: Jobs) -> None:
    await world.submit(jobs, *(f"j{number}" for number in range(601)))  # of which it looks at 500 at a time
    await jobs.cancel("j0")
    assert [job.id for job in await jobs.find(status=JobStatus.CANCELLED)] == ["j0"]
    assert len(await jobs.find(limit=2000)) == 601
    assert [job.id for job in await jobs.find(limit=550)] == [f"j{number}" for number in range(600, 50, -1)]


async def test_while_jobs_are_drained_none_is_handed_out_and_all_are_accepted(
    world: JobWorld, jobs: Jobs
) -> None:
    other = world.open()
    await world.submit(jobs, "a", "b")
    await world.claim(jobs, "w")
    assert (await jobs.queue()).drained_at is None

    await jobs.drain(True)
    since = (await other.queue()).drained_at
    await world.submit(jobs, "c")
    await jobs.give_back(*jobs.held("a"), attempts_max=3)

    assert since is not None and since >= (await get(jobs, "a")).created_at
    await jobs.drain(True)
    assert (await other.queue()).drained_at == since
    assert [await claimed(store, "v") for store in (jobs, other)] == [[], []]
    assert [lane.queued for lane in (await jobs.queue()).lanes] == [3]
    await jobs.drain(False)
    assert (await jobs.queue()).drained_at is None
    assert await claimed(other) == ["a", "b", "c"]


async def test_while_jobs_are_drained_those_that_run_end(world: JobWorld, jobs: Jobs) -> None:
    await world.submit(jobs, "a", "b", expires_s=1000.0)
    await world.claim(jobs)
    await jobs.drain(True)
    assert await jobs.append(*jobs.held("a"), Chunk(0, 1, b"x"))
    assert await jobs.beat("w", [jobs.held("a")], NO_MODELS) == []
    assert await jobs.finish(*jobs.held("a"), JobStatus.COMPLETED)
    assert (await get(jobs, "a")).size_bytes == SIZE + 1
    await world.expire("b")
    await jobs.beat("w", [], NO_MODELS)
    assert (await get(jobs, "b")).status is JobStatus.FAILED


async def test_workers_are_woken_when_a_drain_is_over(world: JobWorld, jobs: Jobs) -> None:
    worker = world.open()
    await world.submit(jobs, "a")
    await jobs.drain(True)
    async with listening(worker):
        assert await claimed(worker) == []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(jobs.drain, False)
            with anyio.fail_after(WITHIN_S):
                await worker.waiting(1000.0)
        assert await claimed(worker) == ["a"]


async def test_a_drain_outlives_its_server(tmp_path: Path) -> None:
    with own_server("valkey-9", tmp_path, keeps=True) as server:
        before, after = Jobs(server.url, command_s=10.0), Jobs(server.url, command_s=10.0)
        await before.drain(True)
        since = (await before.queue()).drained_at
        server.kill()
        server.start()
        assert since is not None
        assert (await after.queue()).drained_at == since
        await before.aclose()
        await after.aclose()


# ------------------------------------------------------------------ misfortune


async def test_after_everything_was_lost_it_begins_anew(world: JobWorld, jobs: Jobs) -> None:
    await world.submit(jobs, "a")
    await world.claim(jobs)
    async for key in world.redis.scan_iter(match=f"{world.key('')}*"):
        await world.redis.delete(key)
    await world.redis.script_flush()
    assert await jobs.beat("w", [jobs.held("a")], NO_MODELS) == ["a"]
    assert not await jobs.append(*jobs.held("a"), Chunk(0, 1, b"x"))
    await world.submit(jobs, "b")
    assert await claimed(jobs) == ["b"]


async def test_of_two_attempts_of_one_number_the_one_that_the_store_knows_has_the_job(
    world: JobWorld, jobs: Jobs
) -> None:
    await world.submit(jobs, "a", "b")
    async with world.forgetting():
        forgotten = await world.claim(jobs, "first")
        assert await jobs.append("a", forgotten.claim, Chunk(0, 1, b"its words"))
    known = await world.claim(jobs, "second")
    assert (known.id, known.attempt) == (forgotten.id, forgotten.attempt)

    assert not await jobs.append("a", forgotten.claim, Chunk(0, 1, b"others"))
    assert not await jobs.finish("a", forgotten.claim, JobStatus.COMPLETED)
    assert not await jobs.give_back("a", forgotten.claim, attempts_max=3)
    assert await jobs.beat("first", [("a", forgotten.claim)], NO_MODELS) == ["a"]
    assert await jobs.beat("second", [("a", known.claim)], NO_MODELS) == []
    assert await jobs.append("a", known.claim, Chunk(0, 1, b"words"))
    for _ in range(2):
        assert await jobs.finish("a", known.claim, JobStatus.COMPLETED)
    assert not await jobs.finish("a", forgotten.claim, JobStatus.COMPLETED)
    assert [chunk.data for chunk in await jobs.chunks("a")] == [b"words"]


async def test_a_stream_that_was_deleted_or_written_to_is_put_right(world: JobWorld, jobs: Jobs) -> None:
    await queue_as_before(world, jobs, "a", "b")
    await world.redis.delete(world.key("new", "normal", LANE))
    assert await claimed(jobs) == ["a", "b"]
    await jobs.give_back(*jobs.held("a"), attempts_max=3)
    (stream,) = await world.streams()
    await world.redis.xadd(stream, {"job": "stranger"})
    await world.submit(jobs, "c")
    assert await claimed(jobs) == ["a", "c"]
    assert await world.redis.xlen(stream) == 3


@pytest.mark.parametrize("is_made_again", [False, True])
async def test_jobs_whose_stream_was_deleted_are_kept_by_beats_and_taken_over(
    world: JobWorld, jobs: Jobs, is_made_again: bool
) -> None:
    await world.submit(jobs, "a", "b", "c")
    await world.claim(jobs)
    await world.claim(jobs)
    (stream,) = await world.streams()
    await world.redis.delete(stream)
    if is_made_again:
        await world.claim(jobs)
    assert await jobs.beat("w", [jobs.held("a"), jobs.held("b")], NO_MODELS) == []
    assert (await world.redis.xpending(stream, "workers"))["pending"] == 2 + is_made_again
    await world.lose_worker_of("a")
    await jobs.beat("another", [jobs.held("b")], NO_MODELS)
    assert [(await get(jobs, id)).status for id in "ab"] == [JobStatus.QUEUED, JobStatus.IN_PROGRESS]
    assert await jobs.finish(*jobs.held("b"), JobStatus.COMPLETED)
    for id in "ac":
        await jobs.cancel(id)
    assert not await world.streams()


async def test_a_beat_keeps_a_job_though_others_have_written_to_its_new_stream(
    world: JobWorld, jobs: Jobs
) -> None:
    await world.submit(jobs, "a", "b")
    await world.claim(jobs)
    (stream,) = await world.streams()
    await world.redis.delete(stream)
    await world.claim(jobs)
    for _ in range(2):
        await world.redis.xadd(stream, {"job": "stranger"})
    assert await jobs.beat("w", [jobs.held("a"), jobs.held("b")], NO_MODELS) == []
    assert await world.redis.xlen(stream) == 2
    assert (await world.redis.xpending(stream, "workers"))["pending"] == 2
    await world.lose_worker_of("a")
    await jobs.beat("another", [jobs.held("b")], NO_MODELS)
    assert [(await get(jobs, id)).status for id in "ab"] == [JobStatus.QUEUED, JobStatus.IN_PROGRESS]


@pytest.mark.parametrize("first", ["claim", "beat", "sweep"])
async def test_jobs_whose_group_was_destroyed_are_kept_by_beats_and_taken_over(
    world: JobWorld, jobs: Jobs, first: str
) -> None:
    await world.submit(jobs, "a", "b", "c")
    await world.claim(jobs)
    await world.claim(jobs)
    (stream,) = await world.streams()
    await world.redis.xgroup_destroy(stream, "workers")
    if first == "sweep":
        await world.is_due()
    if first == "beat":
        assert await jobs.beat("w", [jobs.held("b")], NO_MODELS) == []
    assert await claimed(jobs) == ["c"]
    await world.lose_worker_of("a")
    await jobs.beat("another", [jobs.held("b")], NO_MODELS)
    assert [(await get(jobs, id)).status for id in "ab"] == [JobStatus.QUEUED, JobStatus.IN_PROGRESS]
    for id in "abc":
        await jobs.cancel(id)
    assert not await world.streams()


@pytest.mark.parametrize("is_rested", [False, True], ids=["new", "rested"])
async def test_a_job_that_was_deleted_by_hand_holds_nobody_up(
    world: JobWorld, jobs: Jobs, is_rested: bool
) -> None:
    await world.submit(jobs, "a", "b")
    if is_rested:
        await world.claim(jobs)
        await jobs.give_back(*jobs.held("a"), attempts_max=3, after_s=1000.0)
        await world.rest_is_over("a")
    await world.redis.delete(world.key("job", "a"))
    assert await claimed(jobs) == ["b"]
    await jobs.finish(*jobs.held("b"), JobStatus.COMPLETED)
    assert (await jobs.queue()).lanes == ()


async def test_a_store_in_constant_use_is_swept_too(world: JobWorld, jobs: Jobs) -> None:
    await world.submit(jobs, "a")
    await world.redis.hincrby(world.key("clock"), "swept", -500)
    first = await world.swept_ms()
    await world.submit(jobs, "b")
    second = await world.swept_ms()
    assert second == first or second - first >= 1000  # the next sweep is due as long after the first


async def test_consumers_do_not_pile_up(world: JobWorld, jobs: Jobs) -> None:
    await world.submit(jobs, "keeps the stream", "a")
    await world.claim(jobs, "first")
    for number in range(5):
        await world.claim(jobs, f"w{number}", attempts_max=99)
        await world.lose_worker_of("a")
    await jobs.beat("w", [], NO_MODELS)
    consumers = 0
    for stream in await world.streams():
        consumers += len(await world.redis.xinfo_consumers(stream, "workers"))
    assert consumers == 1


async def test_a_store_that_is_away_says_so_and_comes_back(
    stoppable: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    jobs = Jobs(stoppable.url, command_s=0.3)
    await jobs.submit(new_job("b"), QUOTA)
    stoppable.stall()
    with pytest.raises(StoreUnavailable) as failure:
        await jobs.submit(new_job("a"), QUOTA)
    assert (failure.value.status, failure.value.retry_after_s) == (503, 5)
    calls: list[Any] = [
        lambda: jobs.get("a"),
        lambda: jobs.chunks("a"),
        lambda: jobs.changed("a", 0, 10.0, JobStatus.QUEUED),
        lambda: jobs.claim("w", [LANE], 3),
        lambda: jobs.queue(),
    ]
    for call in calls:
        with pytest.raises(StoreUnavailable):
            await call()
    stoppable.resume()
    with anyio.fail_after(WITHIN_S):
        while (await jobs.get("a")) is None:  # what was sent is done when its turn comes
            pass
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "the job store is unavailable",
        "the job store is available again",
    ]
    await jobs.aclose()


@pytest.mark.parametrize("refused_s", [300.0, 0.0])
async def test_a_store_that_refuses_is_not_back_because_it_can_be_read(
    refused_s: float, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.store.outages.REFUSED_S", refused_s)
    with own_server("valkey-9", tmp_path) as server:
        jobs, redis = Jobs(server.url), Redis.from_url(server.url)
        await redis.config_set("maxmemory", 1)
        for number in range(3):
            with pytest.raises(StoreUnavailable, match="The job store refuses this"):
                await jobs.submit(new_job(f"{number}"), QUOTA)
            assert await jobs.get("0") is await jobs.claim("w", [LANE], 3) is None
        assert jobs.is_refusing is (refused_s > 0)
        watch = QueueWatch(jobs, SystemClock())
        await watch.look()
        assert watch.snapshot is not None and watch.snapshot.is_away is (refused_s > 0)
        await redis.config_set("maxmemory", 0)
        await jobs.submit(new_job("b"), QUOTA)
        assert not jobs.is_refusing
        await jobs.aclose()
        await redis.aclose()
    turns = 1 if refused_s else 3  # at last, it is told with the next reply
    assert [record.message.split(":")[0] for record in caplog.records] == turns * [
        "the job store is unavailable",
        "the job store is available again",
    ]


async def test_a_store_that_refuses_and_then_does_not_answer_is_said_to_be_away_again(
    stoppable: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    jobs = Jobs(stoppable.url, command_s=WITHIN_S)
    away, back = "the job store is unavailable", "the job store is available again"

    async def hold(most_bytes: int) -> None:
        async with Redis.from_url(stoppable.url) as redis:  # a former one may not know yet that it is cut off
            await redis.config_set("maxmemory", most_bytes)

    async def told(command: Callable[[], Awaitable[Any]], reason: str) -> list[str]:
        caplog.clear()
        with pytest.raises(StoreUnavailable, match=reason):
            await command()
        return [record.message.split(":")[0] for record in caplog.records]

    for _ in range(2):  # silence, and it is back only to refuse
        stoppable.kill()
        assert await told(lambda: jobs.get("a"), "does not answer") == [away]
        assert await told(lambda: jobs.get("a"), "does not answer") == []
        stoppable.start()
        await hold(1)
        assert await told(lambda: jobs.submit(new_job("a"), QUOTA), "refuses this") == []
    assert await jobs.get("a") is None
    await hold(0)
    await jobs.submit(new_job("a"), QUOTA)
    assert [record.message.split(":")[0] for record in caplog.records] == [back]
    await jobs.aclose()


async def test_a_store_that_is_full_is_asked_on_the_same_connections(tmp_path: Path) -> None:
    with own_server("valkey-9", tmp_path) as server:
        jobs, redis = Jobs(server.url), Redis.from_url(server.url)
        await redis.config_set("maxmemory", 1)
        opened = []
        for number in range(3):
            with pytest.raises(StoreUnavailable):
                await jobs.submit(new_job(f"{number}"), QUOTA)
            opened.append((await redis.info("stats"))["total_connections_received"])
        await jobs.aclose()
        await redis.aclose()
    assert opened[0] == opened[2]


async def test_a_claim_whose_reply_was_lost_is_the_next_one_s_answer(stoppable: RedisServer) -> None:
    jobs = Jobs(stoppable.url, command_s=0.3)
    await jobs.submit(new_job("a"), QUOTA)
    await jobs.submit(new_job("b"), QUOTA)
    await jobs.claim("w", [], 3)
    stoppable.stall()
    with pytest.raises(StoreUnavailable):
        await jobs.claim("w", [LANE], 3)
    stoppable.resume()
    with anyio.fail_after(WITHIN_S):
        while (await get(jobs, "a")).status is not JobStatus.IN_PROGRESS:
            pass
    job = await jobs.claim("w", [LANE], 3)
    assert job is not None and (job.id, job.attempt) == ("a", 1)
    job = await jobs.claim("w", [LANE], 3)
    assert job is not None and job.id == "b"
    await jobs.aclose()


async def test_a_claim_whose_reply_was_lost_is_none_of_a_job_that_was_cancelled(
    world: JobWorld, jobs: Jobs
) -> None:
    await world.submit(jobs, "a")
    jobs._tokens["w"] = (await world.claim(jobs)).claim
    await jobs.cancel("a")
    assert await jobs.claim("w", [LANE], 3) is None


async def test_a_claim_whose_reply_was_lost_is_none_of_a_job_that_another_has_by_now(
    world: JobWorld, jobs: Jobs
) -> None:
    await world.submit(jobs, "a")
    jobs._tokens["w"] = (await world.claim(jobs)).claim
    await world.lose_worker_of("a")
    assert (await world.claim(jobs, "another")).attempt == 2
    assert await jobs.claim("w", [LANE], 3) is None


async def test_a_claim_may_be_asked_for_again_long_after(world: JobWorld) -> None:
    jobs = world.open(lost_s=1.0)
    await world.submit(jobs, "a")
    await world.claim(jobs)
    assert await world.redis.ttl(world.key("claimed", "w")) > 600


async def test_what_is_left_of_a_claim_whose_job_was_deleted_by_hand_goes_with_it(
    world: JobWorld, jobs: Jobs
) -> None:
    await world.submit(jobs, "a")
    await world.claim(jobs)
    (stream,) = await world.streams()
    await world.lose_worker_of("a")
    await world.redis.delete(world.key("job", "a"))
    await jobs.beat("w", [], NO_MODELS)
    assert await world.redis.xlen(stream) == 0


async def test_a_dead_worker_s_jobs_are_found_behind_many_others(world: JobWorld, jobs: Jobs) -> None:
    await world.submit(jobs, "alive", "dead")
    await world.claim(jobs, "alive")
    (stream,) = await world.streams()
    others = world.redis.pipeline()
    for _ in range(2_100):  # the server looks at 2000 entries at a time
        others.xadd(stream, {"job": "alive"})
    others.xreadgroup("workers", "alive", {stream: ">"})
    await others.execute()
    assert (await world.claim(jobs, "dead")).id == "dead"
    await world.lose_worker_of("dead")
    assert await claimed(jobs, "another") == ["dead"]


async def test_a_job_is_found_behind_many_that_others_are_to_run(world: JobWorld, jobs: Jobs) -> None:
    ids = [f"{number}" for number in range(201)]  # of which it looks at 100 at a time
    await world.submit(jobs, *ids, "behind")
    for config in ("one", "two"):
        await jobs.beat(config, [], Serving(config, frozenset({"m"})))
    error = JobError("no_backend", "No backend can take it.")
    for _ in ids:
        job = await jobs.claim("w", [LANE], 3, "one")
        assert job is not None
        await jobs.refuse(job.id, job.claim, error, config="one", attempts_max=3, after_s=0.0)
    job = await jobs.claim("w", [LANE], 3, "one")
    assert job is not None and job.id == "behind"


async def test_whoever_listens_hears_again_after_the_store_was_away(
    stoppable: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.store.jobs.AGAIN_S", 0.05)
    jobs = Jobs(stoppable.url)
    async with listening(jobs):
        stoppable.kill()
        await anyio.to_thread.run_sync(stoppable.start)  # empty
        await jobs.submit(new_job("a"), QUOTA)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(waits, jobs, "a", 0)
            redis = Redis.from_url(stoppable.url, decode_responses=True)
            await is_heard(JobWorld(stoppable.url, "gw", redis), "a")
            await redis.aclose()
            await jobs.cancel("a")
    await jobs.aclose()


async def test_without_the_right_to_info_changes_are_heard(stoppable: RedisServer) -> None:
    redis: Any = Redis.from_url(stoppable.url, decode_responses=True)
    async with limited(stoppable) as url:
        await redis.execute_command("ACL", "SETUSER", "gateway", "-info")
        jobs = Jobs(url)
        await jobs.submit(new_job("a"), QUOTA)
        async with listening(jobs), anyio.create_task_group() as tasks:
            tasks.start_soon(waits, jobs, "a", 0)
            await is_heard(JobWorld(stoppable.url, "gw", redis), "a")
            await jobs.cancel("a")
        await jobs.aclose()
        assert {refused["object"] for refused in await redis.acl_log()} == {"info"}
        await redis.acl_log_reset()
    await redis.aclose()


async def test_the_documented_acl_is_enough(stoppable: RedisServer) -> None:
    async with limited(stoppable) as url:
        jobs = Jobs(url, lost_s=0.2)
        async with listening(jobs):
            new = new_job("a", expires_s=100.0, keep_s=0.001)
            assert isinstance(await jobs.submit(new, QUOTA, PROMISE), Job)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(waits, jobs, "a", 0, JobStatus.QUEUED)
                assert await claimed(jobs) == ["a"]
            with anyio.fail_after(WITHIN_S):
                await jobs.give_back(*jobs.held("a"), attempts_max=3, after_s=0.001)
                while not await claimed(jobs):
                    pass
                while (await jobs.claim("another", [LANE], 3)) is None:  # until the first is lost
                    pass
            assert await jobs.beat("another", [jobs.held("a", 3)], Serving("one", frozenset({"m"}))) == []
            await jobs.beat("w", [], Serving("two", frozenset({"m"})))
            assert await jobs.is_served_elsewhere("m", "one")
            error = JobError("x", "No.")
            left = await jobs.refuse(*jobs.held("a", 3), error, config="one", attempts_max=3, after_s=1.0)
            assert left is AfterRefusal.LEFT
            assert await jobs.claim("another", [LANE], 3, "one") is None
            assert await jobs.claim("w", [LANE], 3, "two")
            await jobs.append(*jobs.held("a", 4), Chunk(0, 4, b"x"))
            assert (
                len(await jobs.chunks("a")) == len(await jobs.find()) == len((await jobs.queue()).lanes) == 1
            )
            await jobs.cancel("a")
            await jobs.retry("a")
            await jobs.cancel("a")
            with anyio.fail_after(WITHIN_S):
                while await jobs.get("a"):
                    pass
            assert not await jobs.delete("a")
            await jobs.drain(True)
            await jobs.drain(False)
        await jobs.aclose()


async def test_a_server_that_is_full_takes_no_job_and_those_it_has_come_to_their_end(
    stoppable: RedisServer,
) -> None:
    redis = Redis.from_url(stoppable.url, decode_responses=True)
    world = JobWorld(stoppable.url, "gw", redis)
    jobs = world.open()
    await world.submit(jobs, "a", "b", "c")
    await world.submit(jobs, "d", expires_s=100.0)
    await world.claim(jobs)
    await redis.config_set("maxmemory", 1)

    with pytest.raises(StoreUnavailable):
        await jobs.submit(new_job("e"), QUOTA)
    assert await jobs.get("e") is None
    assert await jobs.give_back(*jobs.held("a"), attempts_max=3)
    assert (await world.claim(jobs)).id == "a"
    refusal = JobError("x", "No.")
    assert await jobs.refuse(*jobs.held("a", 2), refusal, config="c", attempts_max=3, after_s=0.0)
    assert (await world.claim(jobs)).id == "a"
    assert (await world.claim(jobs)).id == "b"
    for held in (jobs.held("a", 3), jobs.held("b")):
        assert await jobs.append(*held, Chunk(0, 1, b"x"))
        assert await jobs.finish(*held, JobStatus.COMPLETED)
    assert await jobs.cancel("c") is not None
    await redis.config_set("maxmemory", 0)
    await world.expire("d")
    await redis.config_set("maxmemory", 1)
    assert await jobs.beat("w", [], NO_MODELS) == []
    assert (await get(jobs, "d")).status is JobStatus.FAILED
    await jobs.drain(True)
    assert (await jobs.queue()).drained_at
    await world.aclose()
    await redis.aclose()


async def test_a_server_that_may_forget_jobs_is_warned_of(
    stoppable: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    redis = Redis.from_url(stoppable.url)
    await redis.config_set("maxmemory-policy", "allkeys-lru")
    jobs = Jobs(stoppable.url)
    with caplog.at_level(logging.WARNING):
        async with listening(jobs):
            pass
    assert [record.message for record in caplog.records] == [
        "the job store may lose jobs when it is full: its maxmemory-policy is allkeys-lru, not noeviction",
        "the job store may lose jobs when it restarts: its appendonly is off",
    ]
    await redis.config_set("maxmemory-policy", "noeviction")
    await redis.config_set("appendonly", "yes")
    caplog.clear()
    async with listening(jobs):
        pass
    assert caplog.records == []
    await jobs.aclose()
    await redis.aclose()


async def test_a_server_that_was_away_at_first_is_warned_of_when_it_is_back(
    stoppable: RedisServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("gateway.store.jobs.AGAIN_S", 0.05)
    stoppable.kill()
    jobs = Jobs(stoppable.url)
    async with listening(jobs):  # it has found the server away
        await anyio.to_thread.run_sync(stoppable.start)
        with anyio.fail_after(WITHIN_S):
            while not caplog.messages:
                await anyio.lowlevel.checkpoint()
    assert caplog.messages == ["the job store may lose jobs when it restarts: its appendonly is off"]
    await jobs.aclose()
