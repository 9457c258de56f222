"""Real servers for the ledger's tests, and a look at what they hold."""

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
from redis.asyncio import Redis
from support.job_world import JobWorld
from support.redis_server import RedisServer, any_server, legs, own_server

from gateway.core.admission import COUNTERS
from gateway.core.values import Load
from gateway.store.redis import RedisLedger


@dataclass(frozen=True)
class Store:
    """A server, a part of it that is the test's own, and what the gateway keeps there."""

    url: str
    prefix: str
    redis: Redis

    def key(self, backend: str, name: str) -> str:
        return f"{{{self.prefix}:{backend}}}:{name}"

    async def sums(self, backend: str = "b", owner: str = "*") -> Load:
        """Return the sums that the server keeps, of one owner or of all."""
        text = await cast("Awaitable[str | None]", self.redis.hget(self.key(backend, "sums"), owner))
        return Load(**dict(zip(COUNTERS, map(int, text.split()[1:]), strict=True))) if text else Load()

    async def added(self, backend: str = "b") -> Load:
        """Return what the leases that the server holds add up to."""
        claims = await cast("Awaitable[dict[str, str]]", self.redis.hgetall(self.key(backend, "claims")))
        leases = await self.leases(backend)
        assert claims.keys() == leases.keys()
        total = Load()
        for claim in claims.values():
            total += Load(**dict(zip(COUNTERS, map(int, claim.split()), strict=True)))
        return total

    async def leases(self, backend: str = "b") -> dict[str, float]:
        """Return every lease with the time of its expiry."""
        pairs = await self.redis.zrange(self.key(backend, "leases"), 0, -1, withscores=True)
        return dict(cast("list[tuple[str, float]]", pairs))

    async def expire(self, owner: str, backend: str = "b") -> None:
        """Let the time of an owner's leases be over."""
        for lease in await self.leases(backend):
            if lease.startswith(f"{owner}:"):
                await self.redis.zadd(self.key(backend, "leases"), {lease: 1}, xx=True)

    async def lose(self) -> None:
        """Lose everything the gateway keeps, as a server that was restarted has."""
        async for key in self.redis.scan_iter(match=f"*{self.prefix}*"):
            await self.redis.delete(key)


OpenStore = Callable[[str], Awaitable[Store]]


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """Return a function that gives the URL of a leg's server, which is started when first asked for."""
    running = {}
    urls: dict[str, str] = {}

    def url(leg: str) -> str:
        if leg not in urls:
            running[leg] = any_server(leg, tmp_path_factory.mktemp("s"))
            urls[leg] = running[leg].__enter__()
        return urls[leg]

    yield url
    for server in running.values():
        server.__exit__(None, None, None)


@pytest.fixture
async def open_store(servers: Callable[[str], str]) -> AsyncIterator[OpenStore]:
    """Return a function that opens an empty part of a leg's server."""
    opened: list[Store] = []

    async def open_(leg: str) -> Store:
        url = servers(leg)
        store = Store(url, f"test-{secrets.token_hex(4)}", Redis.from_url(url, decode_responses=True))
        opened.append(store)
        return store

    yield open_
    for store in opened:
        await store.lose()
        await store.redis.aclose()


Connect = Callable[..., RedisLedger]


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    """Return a function that makes a gateway process's ledger over a store."""
    made: list[RedisLedger] = []

    def connect_(store: Store, **options: Any) -> RedisLedger:
        # Patient, so that a slow machine is no store that is away.
        made.append(RedisLedger(store.url, **{"prefix": store.prefix, "command_s": 10.0, **options}))
        return made[-1]

    yield connect_
    for ledger in made:
        await ledger.aclose()


@pytest.fixture(params=legs())
async def store(request: pytest.FixtureRequest, open_store: OpenStore) -> Store:
    """Every supported server in turn."""
    return await open_store(request.param)


@pytest.fixture
async def world(store: Store) -> AsyncIterator[JobWorld]:
    """Jobs in every supported server in turn."""
    world = JobWorld(store.url, store.prefix, store.redis)
    yield world
    await world.aclose()


@pytest.fixture
async def valkey(open_store: OpenStore) -> Store:
    """The newest supported server."""
    return await open_store("valkey-9")


@pytest.fixture(params=legs(own=True))
def stoppable(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RedisServer]:
    """Every supported server in turn, as a process of the test's own."""
    with own_server(request.param, tmp_path) as server:
        yield server


@pytest.fixture
def store_type() -> type[Store]:
    return Store
