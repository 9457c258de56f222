"""The server's clock has gone back an hour: what it knows lasts as long from now on as it would have."""

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any, cast

import anyio
import httpx
import pytest
from litestar import Litestar
from support.batch_world import BatchWorld
from support.job_world import LANE, NO_MODELS, JobWorld
from support.webhook_store import Announcing

from gateway.core.idempotency import IdempotencyClaim, KeyState, fingerprint
from gateway.core.jobs import Job, JobStatus, Queue, Serving
from gateway.core.load import UNLIMITED, Load
from gateway.core.webhooks import Delivery, WebhookEndpoint
from gateway.downstream.job_admin import job_handlers
from gateway.ports import Board
from gateway.store.boards import RedisBoard
from gateway.store.idempotency import RedisIdempotency
from gateway.store.jobs import RedisJobs
from gateway.store.leases import Leases, Order

HOUR_MS = 3_600_000
TTL_S = 60.0
LOST_S = 0.2
WITHIN_S = 20.0
ONE = Load(seqs=1)
NOTHING, NO_CEILING = Load(), Load(-1, -1, -1, -1, -1, -1)
FREE = Load(UNLIMITED, UNLIMITED, UNLIMITED, UNLIMITED, UNLIMITED, UNLIMITED)


@pytest.fixture
async def open_leases(store: Any) -> AsyncIterator[Callable[[str], Leases]]:
    """Return a function that makes a process's leases."""
    made: list[Leases] = []

    def open_(owner: str) -> Leases:
        made.append(Leases(store.url, prefix=store.prefix, owner=owner, ttl_s=TTL_S, command_s=10.0))
        return made[-1]

    yield open_
    for leases in made:
        await leases.aclose()


async def now_ms(redis: Any) -> int:
    seconds, microseconds = await redis.time()
    return int(seconds * 1000 + microseconds // 1000)


async def jobs_an_hour_ahead(world: JobWorld, *running: str) -> None:
    """Have what the store wrote down of jobs lie in its future."""
    redis = cast("Any", world.redis)
    ahead = await now_ms(redis) + HOUR_MS
    await redis.hset(world.key("clock"), mapping={"heard": ahead, "since": ahead, "swept": ahead})
    for id in running:
        stream, entry, worker = await redis.hmget(world.key("job", id), ["stream", "entry", "worker"])
        await redis.xclaim(stream, "workers", worker, 0, [entry], time=ahead, justid=True)
    for id in await redis.zrange(world.key("resting", LANE), 0, -1):
        await redis.zadd(world.key("resting", LANE), {id: ahead})


async def test_jobs_of_a_worker_that_died_and_jobs_that_rest_go_on(world: JobWorld) -> None:
    jobs = world.open(lost_s=LOST_S)
    await world.submit(jobs, "dead", "alive", "rests")
    for id, worker in (("dead", "first"), ("alive", "second"), ("rests", "second")):
        assert (await world.claim(jobs, worker)).id == id
    assert await jobs.give_back(*jobs.held("rests"), attempts_max=3, after_s=0.05)
    await jobs_an_hour_ahead(world, "dead", "alive")

    found: dict[str, Job] = {}
    with anyio.fail_after(WITHIN_S):
        while len(found) < 2:
            assert await jobs.beat("second", [jobs.held("alive")], NO_MODELS) == []
            if (job := await jobs.claim("third", [LANE], 3)) is not None:
                found[job.id] = job
            await jobs.beat("third", [(job.id, job.claim) for job in found.values()], NO_MODELS)
    assert {id: (job.attempt, job.failures) for id, job in found.items()} == {"rests": (2, 0), "dead": (2, 1)}
    assert await jobs.finish(*jobs.held("alive"), JobStatus.COMPLETED)


async def test_ends_that_lie_ahead_do_not_count(world: JobWorld) -> None:
    jobs = world.open()
    await world.submit(jobs, "done", "done-too", "waits")
    for id in ("done", "done-too"):
        await world.claim(jobs)
        await jobs.finish(*jobs.held(id), JobStatus.COMPLETED)
        ends = await world.redis.hgetall(world.key("ends", LANE))
        ahead: Any = {int(bucket) + HOUR_MS // 10_000: count for bucket, count in ends.items()}
        await world.redis.delete(world.key("ends", LANE))
        await world.redis.hset(world.key("ends", LANE), mapping=ahead)
        (lane,) = (await jobs.queue()).lanes
        assert (lane.queued, lane.drain_per_s) == (2 if id == "done" else 1, None)

    await world.claim(jobs)
    await jobs.finish(*jobs.held("waits"), JobStatus.COMPLETED)
    assert list((await world.redis.hgetall(world.key("ends", LANE))).values()) == ["1"]


async def test_a_configuration_that_was_given_up_is_forgotten(world: JobWorld) -> None:
    ahead = await now_ms(world.redis) + HOUR_MS
    await world.redis.zadd(world.key("serving", "m"), {"dead old": ahead})
    await world.open().beat("w", [], Serving("new", frozenset({"m"})))
    assert await world.serving("m") == ["w new"]


async def test_a_batch_whose_process_died_is_taken_up(store: Any) -> None:
    world = BatchWorld(store.url, store.prefix, store.redis)
    batches = world.open(lease_s=LOST_S)
    made = await world.batch(batches)
    assert await batches.take() is not None
    await world.redis.hset(world.key("batch", made.id), "until", await now_ms(store.redis) + HOUR_MS)

    with anyio.fail_after(WITHIN_S):
        while (claim := await batches.take()) is None:
            pass
    assert claim.batch.id == made.id
    await world.aclose()


async def test_the_places_of_a_process_that_died_come_free(
    store: Any, open_leases: Callable[[str], Leases]
) -> None:
    dead, alive = open_leases("dead"), open_leases("alive")
    order = Order(1, NOTHING, NOTHING, NO_CEILING, waits=False, may_keep=False, deaf=0, claims=[(ONE, FREE)])
    await dead.settle("b", order)
    key, now = store.key("b", "accounts"), await now_ms(store.redis)
    written = (await store.redis.hget(key, "dead")).partition(" ")[2]
    await store.redis.hset(key, "dead", f"{now + HOUR_MS} {written}")

    assert (await alive.settle("b", order)).others == ONE  # it may be there

    account = (await store.accounts())["dead"]
    assert now + TTL_S * 1000 <= account.expires_ms <= await now_ms(store.redis) + TTL_S * 1000
    assert account.used == ONE


async def test_versions_of_accounts_go_on_rising(store: Any, open_leases: Callable[[str], Leases]) -> None:
    key, leases = store.key("b", "accounts"), open_leases("a")
    ahead = (await now_ms(store.redis) + HOUR_MS) * 1000
    await store.redis.hset(key, "#", ahead)
    for number in (1, 2):
        order = Order(number, ONE, ONE, NO_CEILING, waits=False, may_keep=False, deaf=0)
        assert (await leases.settle("b", order)).version == ahead + number


async def test_a_process_that_died_is_counted_no_longer_than_any(
    store: Any, open_leases: Callable[[str], Leases]
) -> None:
    replicas, now = f"{{{store.prefix}}}:replicas", await now_ms(store.redis)
    await store.redis.zadd(replicas, {"dead": now + HOUR_MS})
    assert (await open_leases("alive").heartbeat("", is_urgent=False)).replicas == 2
    assert await store.redis.zscore(replicas, "dead") <= await now_ms(store.redis) + TTL_S * 1000


async def test_a_box_whose_owner_died_is_owned_again(store: Any) -> None:
    dead, alive = (
        RedisBoard(store.url, prefix=store.prefix, owner=owner, ttl_s=TTL_S, command_s=10)
        for owner in ("dead", "alive")
    )
    owned = await dead.sync("spark", fence=0, state="", note="note")
    assert owned is not None and owned.fence
    tag, now = f"{{{store.prefix}:box:spark}}", await now_ms(store.redis)
    await store.redis.pexpire(f"{tag}:owner", HOUR_MS)
    await store.redis.hset(f"{tag}:notes", "dead", f"{now + HOUR_MS} note")

    assert await alive.sync("spark", fence=0, state="", note="") == Board(0, "", ["note"])

    assert await store.redis.pttl(f"{tag}:owner") <= TTL_S * 1000
    until_ms, _, note = (await store.redis.hget(f"{tag}:notes", "dead")).partition(" ")
    assert int(until_ms) <= await now_ms(store.redis) + TTL_S * 1000 and note == "note"
    await dead.aclose()
    await alive.aclose()


async def test_a_note_that_lies_ahead_keeps_a_box_for_no_owner_but_its_own(store: Any) -> None:
    dead, alive = (
        RedisBoard(store.url, prefix=store.prefix, owner=owner, ttl_s=TTL_S, command_s=10)
        for owner in ("dead", "alive")
    )
    assert await dead.sync("spark", fence=0, state="", note="") is not None
    tag, ahead = f"{{{store.prefix}:box:spark}}", await now_ms(store.redis) + HOUR_MS
    await store.redis.pexpire(f"{tag}:owner", int(TTL_S * 500))
    await store.redis.hset(f"{tag}:notes", "another", f"{ahead} note")

    assert await alive.sync("spark", fence=0, state="", note="") is not None

    assert await store.redis.pttl(f"{tag}:owner") <= TTL_S * 500
    await dead.aclose()
    await alive.aclose()


async def test_the_numbers_of_a_box_s_owners_go_on_rising(store: Any) -> None:
    board = RedisBoard(store.url, prefix=store.prefix, owner="next", ttl_s=TTL_S, command_s=10)
    last = await now_ms(store.redis) + HOUR_MS
    await store.redis.set(f"{{{store.prefix}:box:spark}}:fence", last)
    assert await board.sync("spark", fence=0, state="", note="") == Board(last + 1, "", [])
    await board.aclose()


async def test_an_idempotency_key_whose_runner_died_comes_free(store: Any) -> None:
    idempotency = RedisIdempotency(store.url, prefix=store.prefix, bytes_max=1000, command_s=10.0)
    dead, alive = (
        IdempotencyClaim("alice", "/v1", "k", fingerprint(b"{}"), runner) for runner in ("dead", "alive")
    )
    assert await idempotency.begin(dead, LOST_S) is KeyState.BEGUN
    await store.redis.pexpire(f"{{{store.prefix}:promises:alice}}:running:{dead.id}", HOUR_MS)

    with anyio.fail_after(WITHIN_S):
        while (standing := await idempotency.begin(alive, LOST_S)) is KeyState.RUNNING:
            await anyio.lowlevel.checkpoint()
    assert standing is KeyState.BEGUN
    await idempotency.aclose()


async def test_webhooks_are_claimed_again_and_retried_no_later(store: Any) -> None:
    redis = store.redis
    webhooks = Announcing(store.url, prefix=store.prefix, command_s=10.0, claim_s=LOST_S)
    tag, ops = (
        f"{{{store.prefix}:jobs}}:webhooks",
        WebhookEndpoint("ops", "https://example.com/", (b"k" * 24,)),
    )
    await webhooks.events(1)
    for subject in ("claimed", "retried"):
        await webhooks.announce("response.completed", subject, None)
    for event in await webhooks.events(100):
        await webhooks.create_deliveries(event, [ops])
    _, retried = sorted(await webhooks.claim({"ops": 2}), key=lambda one: b"retried" in one.body)
    await webhooks.again(retried, 60.0)
    for id in await redis.zrange(f"{tag}:due:ops", 0, -1):
        await redis.zincrby(f"{tag}:due:ops", HOUR_MS, id)
    await redis.incrby(f"{tag}:last:ops", HOUR_MS)

    found: list[Delivery] = []
    with anyio.fail_after(WITHIN_S):
        while not found:
            await anyio.lowlevel.checkpoint()
            found += await webhooks.claim({"ops": 2})
    assert [b"claimed" in one.body for one in found] == [True]
    due_ms = await redis.zscore(f"{tag}:due:ops", retried.id)
    assert 0 < due_ms - await now_ms(redis) <= 60_000
    await webhooks.aclose()


class AnHourAhead(RedisJobs):
    """Jobs of a server whose clock is an hour ahead of this process's by now."""

    async def queue(self) -> Queue:
        queue = await super().queue()
        return replace(queue, at=queue.at + HOUR_MS / 1000)


async def test_how_long_ago_things_were_is_told_by_the_servers_clock(world: JobWorld) -> None:
    jobs = AnHourAhead(world.url, prefix=world.prefix, lost_s=TTL_S, command_s=10.0)
    await world.submit(world.open(), "waits")
    await jobs.drain(True)
    app = Litestar([*job_handlers(jobs)], logging_config=None)
    transport = httpx.ASGITransport(app)  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://admin") as http:
        listed = (await http.get("/admin/jobs")).json()
        drained = (await http.post("/admin/jobs/drain")).json()
        shown = (await http.get("/admin/jobs/waits")).json()
    await jobs.aclose()
    ages = listed["jobs"][0]["age_s"], shown["age_s"], listed["drained_for_s"], drained["drained_for_s"]
    assert all(3600 <= age < 3660 for age in ages)
