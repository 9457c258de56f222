"""Jobs in a real store, and a hand on its time: what is pending, expiring or ended can be made older."""

from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from typing import Any, cast

import anyio.lowlevel
from redis.asyncio import Redis

from gateway.core.jobs import Job, NewJob, Quota, Serving
from gateway.store.jobs import RedisJobs

LANE = "m/light"
LANES = (LANE, "m/push")
LONG_S = 1000.0  # nothing is lost by itself
QUOTA = Quota()
NO_MODELS = Serving("c", frozenset())
"""What a process without a model has."""
LEFT = {"arrivals", "clock", "claimed", "submitted", "ends", "totals", "serving"}
"""What the store keeps without any job: counters, and what expires by itself."""


def new_job(id: str, **changes: Any) -> NewJob:
    return NewJob(**{"id": id, "key": "alice", "lane": LANE, "body": b'{"stream":true}', **changes})


class Jobs(RedisJobs):
    """A process's store. It remembers which claims it was given, so that a test need not."""

    def __init__(self, url: str, known: dict[tuple[str, int], str] | None = None, **options: Any) -> None:
        super().__init__(url, **options)
        self._known = {} if known is None else known

    async def claim(
        self, worker: str, lanes: Collection[str], attempts_max: int, config: str = NO_MODELS.config
    ) -> Job | None:
        job = await super().claim(worker, lanes, attempts_max, config)
        if job is not None:
            self._known[job.id, job.attempt] = job.claim
        return job

    def held(self, id: str, attempt: int = 1) -> tuple[str, str]:
        """Return a job's id, and the claim of an attempt at it."""
        return id, self._known.get((id, attempt), "unknown")


async def is_asked_once(asked: Callable[[], int], redis: Redis) -> bool:
    """Wait until something has been asked, and return whether it is not asked again for a while."""
    while not asked():
        await anyio.lowlevel.checkpoint()
    for _ in range(100):
        await redis.ping()
    return asked() == 1


class StoreWorld:
    """What the store keeps under one prefix."""

    def __init__(self, url: str, prefix: str, redis: Redis) -> None:
        self.url, self.prefix, self.redis = url, prefix, redis

    def key(self, *names: str) -> str:
        return ":".join((f"{{{self.prefix}:jobs}}", *names))

    async def names(self) -> set[str]:
        """Return the first words of all keys there are."""
        start = len(self.key(""))
        return {key[start:].split(":")[0] async for key in self._all(self.redis)}

    def _all(self, redis: Redis, **options: Any) -> AsyncIterator[Any]:
        return redis.scan_iter(match=f"{self.key('')}*", count=1000, **options)

    @asynccontextmanager
    async def forgetting(self) -> AsyncIterator[None]:
        """Have the store know nothing of the block at its end, as after a failover to a replica that lags."""
        async with Redis.from_url(self.url) as raw:
            before = {name: await raw.dump(name) or b"" async for name in self._all(raw)}
            yield
            back = raw.pipeline(transaction=True)
            back.delete(*[name async for name in self._all(raw)])
            for name, value in before.items():
                back.restore(name, 0, value)
            await back.execute()

    async def _of(self, reply: Any) -> Any:
        return await cast("Awaitable[Any]", reply)


class JobWorld(StoreWorld):
    """The jobs of one prefix of a server."""

    def __init__(self, url: str, prefix: str, redis: Redis) -> None:
        super().__init__(url, prefix, redis)
        self._opened: list[Jobs] = []
        self._known: dict[tuple[str, int], str] = {}

    def open(self, **options: Any) -> Jobs:
        """Return a process's store. Patient, so that a slow machine is no store that is away."""
        options = {"prefix": self.prefix, "lost_s": LONG_S, "command_s": 10.0, **options}
        jobs = Jobs(self.url, self._known, **options)
        self._opened.append(jobs)
        return jobs

    async def aclose(self) -> None:
        for jobs in self._opened:
            await jobs.aclose()

    async def submit(self, jobs: Jobs, *ids: str, **changes: Any) -> list[Job]:
        accepted = [await jobs.submit(new_job(id, **changes), QUOTA) for id in ids]
        assert all(isinstance(job, Job) for job in accepted)
        return cast("list[Job]", accepted)

    async def claim(self, jobs: Jobs, worker: str = "w", attempts_max: int = 3) -> Job:
        job = await jobs.claim(worker, LANES, attempts_max)
        assert job is not None
        return job

    async def quota(self, owner: str = "=alice") -> tuple[int, int]:
        """Return how many jobs and bytes are counted for an API key."""
        jobs, bytes_ = await self._of(self.redis.hmget(self.key("quota", owner), ["jobs", "bytes"]))
        return int(jobs or 0), int(bytes_ or 0)

    async def streams(self, lane: str = LANE) -> list[str]:
        """Return a lane's streams."""
        found = [key async for key in self._all(self.redis, _type="stream")]
        return sorted(stream for stream in found if lane in stream.removeprefix(self.key("")).split(":"))

    async def serving(self, model: str) -> list[str]:
        """Return "worker config" of the processes that have said that they have a model."""
        return [str(one) for one in await self.redis.zrange(self.key("serving", model), 0, -1)]

    # ------------------------------------------------------------ time

    async def swept_ms(self) -> int:
        """Return when the last sweep was."""
        return int(await self._of(self.redis.hget(self.key("clock"), "swept")))

    async def is_due(self) -> None:
        """Have the next command sweep, as after a second."""
        await self._of(self.redis.hset(self.key("clock"), mapping={"swept": 0, "since": 0}))

    async def lose_worker_of(self, *ids: str) -> None:
        """Let these jobs' workers not have been heard of for a long time."""
        for id in ids:
            stream, entry, worker = await self._of(
                self.redis.hmget(self.key("job", id), ["stream", "entry", "worker"])
            )
            await self.redis.xclaim(stream, "workers", worker, 0, [entry], idle=10**9, justid=True)
        await self.is_due()

    async def expire(self, *ids: str) -> None:
        """Let these jobs' time be over before they have ended."""
        for id in ids:
            await self.redis.zadd(self.key("expiring"), {id: 1}, xx=True)
        await self.is_due()

    async def rest_is_over(self, *ids: str) -> None:
        """Let jobs that rest have rested."""
        for id in ids:
            await self.redis.zadd(self.key("resting", LANE), {id: 1}, xx=True)

    async def keep_is_over(self, *ids: str) -> None:
        """Let the time be over for which these jobs are kept after their end."""
        members = cast("list[str]", await self.redis.zrange(self.key("ended"), 0, -1))
        for member in members:
            if member.split(" ")[0] in ids:
                await self.redis.zadd(self.key("ended"), {member: 1})
        await self.is_due()
