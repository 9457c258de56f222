"""Deliveries in a real store: handed on once, claimed by one at a time, never lost."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import anyio
import pytest
from redis.asyncio import Redis
from support.redis_server import RedisServer, limited
from support.webhook_store import Announcing

from gateway.core.errors import StoreUnavailable
from gateway.core.jobs import JobStatus, NewJob, Quota
from gateway.core.webhooks import Delivery, WebhookEndpoint
from gateway.store.jobs import RedisJobs

OPS = WebhookEndpoint("ops", "https://example.com/", (b"k" * 24,))
LAB = WebhookEndpoint("lab", "https://example.com/", (b"k" * 24,))


class Store(Protocol):
    """What these tests use of the fixture."""

    url: str
    prefix: str
    redis: Redis


@dataclass
class Deliveries:
    """A gateway process's part of the store, and a look at what is there."""

    webhooks: Announcing
    tag: str
    redis: Redis

    async def announced(self, *subjects: str, key: str | None = None) -> None:
        await self.webhooks.events(1)
        for subject in subjects:
            await self.webhooks.announce("response.completed", subject, key)

    async def handed_on(self, *subjects: str) -> None:
        await self.announced(*subjects)
        for event in await self.webhooks.events(100):
            await self.webhooks.create_deliveries(event, (OPS,))

    async def claimed(self, endpoint: str = "ops", most: int = 100) -> list[Delivery]:
        return list(await self.webhooks.claim({endpoint: most}))

    async def due_in_s(self, delivery: Delivery) -> float:
        """Return in how many seconds a delivery is due, by the server's clock."""
        return (await self.times(delivery.endpoint))[delivery.id] / 1000 - await self.now_ms() / 1000

    async def pass_time(self, endpoint: str = "ops") -> None:
        """Let everything be due."""
        for id_, at_ms in (await self.times(endpoint)).items():
            await self.redis.zadd(self.due(endpoint), {id_: min(at_ms, await self.now_ms())}, xx=True)

    async def times(self, endpoint: str) -> dict[str, float]:
        """Return the deliveries that wait for an endpoint, with the time at which they are due."""
        pairs = await self.redis.zrange(self.due(endpoint), 0, -1, withscores=True)
        return dict(cast("list[tuple[str, float]]", pairs))

    async def now_ms(self) -> int:
        seconds, microseconds = await cast("Awaitable[Any]", self.redis.time())
        return int(seconds) * 1000 + int(microseconds) // 1000

    def due(self, endpoint: str) -> str:
        return f"{self.tag}:webhooks:due:{endpoint}"

    async def keys(self) -> set[str]:
        return {key.removeprefix(self.tag) async for key in self.redis.scan_iter(match=f"{self.tag}*")}


Open = Callable[..., Deliveries]


@pytest.fixture
async def open_() -> AsyncIterator[Open]:
    opened: list[Announcing] = []

    def open_one(store: Store, **options: Any) -> Deliveries:
        webhooks = Announcing(store.url, **{"prefix": store.prefix, "command_s": 10.0, **options})
        opened.append(webhooks)
        return Deliveries(webhooks, f"{{{store.prefix}:jobs}}", store.redis)

    yield open_one
    for webhooks in opened:
        await webhooks.aclose()


async def test_what_ended_becomes_a_delivery_per_endpoint(store: Store, open_: Open) -> None:
    one = open_(store)
    await one.announced("resp_1", key="team")
    (event,) = await one.webhooks.events(100)
    assert (event.type, event.subject, event.key) == ("response.completed", "resp_1", "team")
    assert abs(event.created_at - await one.now_ms() / 1000) < 60

    assert await one.webhooks.create_deliveries(event, [OPS, LAB]) == []
    assert await one.webhooks.events(100) == []
    for name in ("ops", "lab"):
        (delivery,) = await one.claimed(name)
        assert (delivery.id, delivery.endpoint, delivery.failures) == (event.id, name, 0)
        assert delivery.body == event.body
        assert json.loads(delivery.body)["data"] == {"id": "resp_1"}


@pytest.mark.parametrize("key", [None, "team", "-", "="])
async def test_the_key_is_what_it_was(valkey: Store, open_: Open, key: str | None) -> None:
    one = open_(valkey)
    await one.announced("resp_1", key=key)
    (event,) = await one.webhooks.events(100)
    assert event.key == key


async def test_nothing_is_kept_where_nobody_has_endpoints(store: Store, open_: Open) -> None:
    one = open_(store)
    await one.webhooks.announce("response.completed", "resp_1", None)
    assert await one.keys() == set()


async def finish(jobs: RedisJobs) -> None:
    job = await jobs.claim("w", ["m/light"], 3, "c")
    assert job is not None
    assert not await jobs.finish(job.id, "another", JobStatus.FAILED)  # not by another
    assert await jobs.finish(job.id, job.claim, JobStatus.COMPLETED)
    assert await jobs.finish(job.id, job.claim, JobStatus.COMPLETED)  # the reply to the first was lost


async def cancel(jobs: RedisJobs) -> None:
    await jobs.cancel("resp_1")
    await jobs.cancel("resp_1")


@pytest.mark.parametrize(
    ("key", "end", "type_"),
    [("team", finish, "response.completed"), (None, cancel, "response.cancelled")],
)
async def test_a_job_that_ends_is_heard_of_once(
    store: Store,
    open_: Open,
    key: str | None,
    end: Callable[[RedisJobs], Awaitable[None]],
    type_: str,
) -> None:
    one = open_(store)
    await one.webhooks.events(1)
    jobs = RedisJobs(store.url, prefix=store.prefix, command_s=10.0)
    await jobs.submit(NewJob("resp_1", key, "m/light", b"{}"), Quota())
    assert await one.webhooks.events(100) == []
    await end(jobs)
    await jobs.aclose()
    assert [(event.type, event.subject, event.key) for event in await one.webhooks.events(100)] == [
        (type_, "resp_1", key)
    ]


async def test_two_processes_hand_an_event_on_once(store: Store, open_: Open) -> None:
    one, other = open_(store), open_(store)
    await one.announced("resp_1")
    (mine,), (theirs,) = await one.webhooks.events(100), await other.webhooks.events(100)
    await one.webhooks.create_deliveries(mine, [OPS])
    (delivery,) = await one.claimed()
    await one.webhooks.end(delivery)
    await other.webhooks.create_deliveries(theirs, [OPS])
    await other.pass_time()
    assert await other.claimed() == []


async def test_a_delivery_is_claimed_by_one_and_after_the_claim_by_another(store: Store, open_: Open) -> None:
    one, other = open_(store), open_(store)
    await one.handed_on("resp_1")
    (first,) = await one.claimed()
    assert await other.claimed() == []
    assert 50 < await one.due_in_s(first) <= 60

    await other.pass_time()
    (second,) = await other.claimed()
    assert (second.id, second.body, second.failures) == (first.id, first.body, 0)
    assert second.claim == first.claim + 1


async def test_a_failure_is_counted_and_waits(store: Store, open_: Open) -> None:
    one = open_(store)
    await one.handed_on("resp_1")
    (delivery,) = await one.claimed()
    await one.webhooks.again(delivery, 300.0)
    await one.webhooks.again(delivery, 300.0)  # the reply to the first was lost
    assert 290 < await one.due_in_s(delivery) <= 300
    assert await one.claimed() == []

    await one.pass_time()
    (delivery,) = await one.claimed()
    assert delivery.failures == 1


async def test_of_a_claim_that_is_over_a_failure_does_not_count_and_an_end_does(
    store: Store, open_: Open
) -> None:
    one, other = open_(store), open_(store)
    await one.handed_on("resp_1")
    (late,) = await one.claimed()
    await one.pass_time()
    (current,) = await other.claimed()
    await one.webhooks.again(late, 0.0)
    assert await one.claimed() == []
    await one.webhooks.end(late)  # it was delivered
    assert await one.webhooks.pending(["ops"]) == {"ops": 0}
    await other.webhooks.again(current, 0.0)
    assert await other.claimed() == []


async def test_at_the_end_nothing_is_left(store: Store, open_: Open) -> None:
    one = open_(store)
    await one.handed_on("resp_1", "resp_2")
    assert await one.webhooks.pending(["ops", "lab"]) == {"ops": 2, "lab": 0}
    for delivery in await one.claimed():
        await one.webhooks.end(delivery)
        await one.webhooks.end(delivery)
    assert await one.webhooks.pending(["ops"]) == {"ops": 0}
    assert await one.keys() - {":webhooks:wanted", ":webhooks:events"} == set()


async def test_no_more_are_claimed_than_there_is_room_for_oldest_first(store: Store, open_: Open) -> None:
    one = open_(store)
    await one.handed_on("resp_1")
    await one.handed_on("resp_2", "resp_3")
    # In one millisecond the order is that of the ids.
    first = {json.loads(delivery.body)["data"]["id"] for delivery in await one.claimed(most=2)}
    second = {json.loads(delivery.body)["data"]["id"] for delivery in await one.claimed(most=2)}
    assert (len(first), len(second)) == (2, 1)
    assert await one.claimed(most=2) == []


async def test_too_much_for_one_endpoint_is_dropped_for_it_alone(store: Store, open_: Open) -> None:
    one = open_(store, pending_max=1)
    await one.handed_on("resp_1")
    await one.announced("resp_2")
    (event,) = await one.webhooks.events(100)
    assert await one.webhooks.create_deliveries(event, [OPS, LAB]) == [OPS]
    assert await one.webhooks.pending(["ops", "lab"]) == {"ops": 1, "lab": 1}


async def test_whatever_nobody_fetches_expires(store: Store, open_: Open) -> None:
    one = open_(store)
    await one.handed_on("resp_1")
    await one.claimed()
    await one.announced("resp_2")
    assert ":webhooks:last:ops" in await one.keys()
    for key in await one.keys():
        assert 6 * 86_400 < await one.redis.ttl(one.tag + key) <= 7 * 86_400, key


async def test_what_has_expired_leaves_no_place_behind(store: Store, open_: Open) -> None:
    one = open_(store, pending_max=1)
    await one.handed_on("resp_1")
    (delivery,) = await one.claimed()
    await one.redis.delete(f"{one.tag}:webhooks:delivery:ops:{delivery.id}")
    await one.redis.zadd(one.due("ops"), {delivery.id: await one.now_ms() - 8 * 86_400_000})
    await one.handed_on("resp_2")
    assert [json.loads(delivery.body)["data"]["id"] for delivery in await one.claimed()] == ["resp_2"]


async def test_what_has_expired_takes_no_turn(store: Store, open_: Open) -> None:
    one = open_(store)
    await one.handed_on("resp_1")
    await one.redis.zadd(one.due("ops"), {"evt_gone": await one.now_ms() - 8 * 86_400_000})
    assert [json.loads(delivery.body)["data"]["id"] for delivery in await one.claimed(most=1)] == ["resp_1"]


async def test_what_is_tried_again_is_kept_anew(store: Store, open_: Open) -> None:
    one = open_(store)
    await one.handed_on("resp_1")
    (delivery,) = await one.claimed()
    kept = one.due("ops"), f"{one.tag}:webhooks:delivery:ops:{delivery.id}"
    for key in kept:
        await one.redis.expire(key, 60)
    await one.webhooks.again(delivery, 300.0)
    for key in kept:
        assert 6 * 86_400 < await one.redis.ttl(key) <= 7 * 86_400, key


async def test_one_that_was_lost_holds_no_other_up(store: Store, open_: Open) -> None:
    one = open_(store)
    await one.handed_on("resp_1")
    (lost,) = await one.times("ops")
    await one.redis.delete(f"{one.tag}:webhooks:delivery:ops:{lost}")
    await one.redis.zadd(one.due("ops"), {lost: await one.now_ms() - 1000})
    await one.handed_on("resp_2")
    assert await one.claimed(most=1) == []
    assert len(await one.claimed(most=1)) == 1


@pytest.mark.parametrize(
    ("said_ago_s", "is_known"),
    [
        pytest.param(3500, True, id="lately"),
        pytest.param(3700, False, id="long-ago"),
        pytest.param(-7200, True, id="clock-went-back"),
    ],
)
async def test_an_endpoint_that_no_process_has_is_known_for_an_hour(
    store: Store, open_: Open, said_ago_s: int, is_known: bool
) -> None:
    one, gone = open_(store), replace(OPS, name="gone")
    await one.webhooks.announce_endpoints([OPS, gone])
    key = f"{one.tag}:webhooks:endpoints"
    hears = str(await cast("Awaitable[Any]", one.redis.hget(key, "gone"))).partition(" ")[2]
    said = await one.now_ms() - 1000 * said_ago_s
    await cast("Awaitable[Any]", one.redis.hset(key, "gone", f"{said} {hears}"))

    known = await one.webhooks.announce_endpoints([OPS])

    assert [endpoint.name for endpoint in known if endpoint.name == "gone"] == ["gone"] * is_known
    assert 3500 < await one.redis.ttl(key) <= 3600
    after = await cast("Awaitable[Any]", one.redis.hget(key, "gone"))
    assert after is None or int(after.split(" ")[0]) <= await one.now_ms()


async def test_what_a_server_tells_of_that_is_full_is_delivered(stoppable: RedisServer) -> None:
    redis = Redis.from_url(stoppable.url, decode_responses=True)
    one = Deliveries(Announcing(stoppable.url, command_s=10.0), "{gw:jobs}", redis)
    await one.announced("resp_1")
    await redis.config_set("maxmemory", 1)

    (event,) = await one.webhooks.events(100)
    await one.webhooks.create_deliveries(event, (OPS,))
    (delivery,) = await one.claimed()
    await one.webhooks.again(delivery, 300.0)
    assert 290 < await one.due_in_s(delivery) <= 300
    await one.webhooks.end(delivery)
    await one.webhooks.aclose()
    await redis.aclose()


async def test_a_store_that_is_away_is_said_to_be(stoppable: RedisServer) -> None:
    webhooks = Announcing(stoppable.url, command_s=0.5)
    await webhooks.events(1)
    stoppable.kill()
    with pytest.raises(StoreUnavailable):
        await webhooks.events(1)
    stoppable.start()
    await webhooks.announce("response.completed", "resp_1", None)
    with anyio.fail_after(10):
        assert await webhooks.events(1) == []
    await webhooks.aclose()


async def test_the_documented_acl_is_enough(stoppable: RedisServer) -> None:
    async with limited(stoppable) as url:
        webhooks = Announcing(url)
        await webhooks.events(1)
        await webhooks.announce("response.completed", "resp_1", None)
        (event,) = await webhooks.events(1)
        await webhooks.create_deliveries(event, [OPS])
        (delivery,) = await webhooks.claim({"ops": 1})
        await webhooks.again(delivery, 0.0)
        await webhooks.end(delivery)
        assert await webhooks.pending(["ops"]) == {"ops": 0}
        await webhooks.aclose()
