"""What a process knows of the queue: it is looked at again and again, and kept while the store is away."""

import logging
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import anyio
import pytest
from redis.asyncio import Redis
from support.job_world import JobWorld
from support.redis_server import RedisServer, legs, own_server
from support.world import StillClock

from gateway.core.jobs import QueueSnapshot
from gateway.jobs import QueueWatch

WITHIN_S = 20.0


@pytest.fixture(params=legs(own=True))
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RedisServer]:
    with own_server(request.param, tmp_path, keeps=True) as server:
        yield server


async def seen(watch: QueueWatch, holds: Callable[[QueueSnapshot], bool]) -> QueueSnapshot:
    """Return a process's view of the queue once something holds of it."""
    with anyio.fail_after(WITHIN_S):
        while watch.snapshot is None or not holds(watch.snapshot):
            await anyio.lowlevel.checkpoint()
    return watch.snapshot


async def test_the_queue_is_looked_at_again_and_again(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="gateway.jobs")
    monkeypatch.setattr("gateway.jobs.watch.LOOK_S", 0.01)
    redis = Redis.from_url(server.url, decode_responses=True)
    world, clock = JobWorld(server.url, f"test-{secrets.token_hex(4)}", redis), StillClock()
    jobs = world.open(command_s=1.0)
    watch = QueueWatch(jobs, clock)

    def told() -> list[str]:
        fields = [getattr(one, "fields", {}) for one in caplog.records if one.name == "gateway.jobs"]
        return [one["event"] for one in fields]

    await world.submit(jobs, "a", "b")
    await jobs.cancel("b")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch.run)
        first = await seen(watch, lambda _: True)
        assert [(lane.name, lane.queued) for lane in first.queue.lanes] == [("m/light", 1)]
        assert (first.totals, first.at, first.is_away) == ({("m/light", "cancelled"): 1}, 10.0, False)
        assert told() == []

        await jobs.drain(True)
        drained = await seen(watch, lambda now: now.queue.drained_at is not None)
        last = await seen(watch, lambda now: now is not drained)
        server.kill()
        away = await seen(watch, lambda now: now.is_away)
        assert away.queue.drained_at == last.queue.drained_at
        assert [(lane.name, lane.queued) for lane in away.queue.lanes] == [("m/light", 1)]
        assert away.at == 10.0

        clock.time = 20.0
        server.start()
        back = await seen(watch, lambda now: not now.is_away)
        assert (back.at, told()) == (20.0, ["jobs_drained"])
        await jobs.drain(False)
        await seen(watch, lambda now: now.queue.drained_at is None)
        assert told() == ["jobs_drained", "jobs_undrained"]
        tasks.cancel_scope.cancel()
    await world.aclose()
    await redis.aclose()


async def test_a_store_that_was_never_there_is_away(server: RedisServer) -> None:
    redis = Redis.from_url(server.url, decode_responses=True)
    world = JobWorld(server.url, "test", redis)
    watch = QueueWatch(world.open(command_s=1.0), StillClock())
    server.kill()
    await watch.look()
    assert watch.snapshot is not None
    assert (watch.snapshot.is_away, watch.snapshot.at, watch.snapshot.queue.lanes) == (True, None, ())
    await world.aclose()
    await redis.aclose()
