"""Real servers for the ledger's tests, and a look at what they hold."""

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
from redis.asyncio import Redis
from support.job_world import JobWorld
from support.redis_server import NEWEST, RedisServer, legs, own_server, shared_servers

from gateway.core.admission import COUNTERS
from gateway.core.load import Load
from gateway.store.redis import RedisLedger


@dataclass(frozen=True)
class Account:
    """What a server says of one owner and one backend. `number`: of the last command about it."""

    expires_ms: int
    number: int
    waits: bool
    keeps: bool
    used: Load
    kept: Load

    @classmethod
    def of(cls, text: str) -> "Account":
        expires_ms, number, waits, keeps, *counters = map(int, text.split())
        used, kept = counters[: len(COUNTERS)], counters[len(COUNTERS) :]
        return cls(expires_ms, number, bool(waits), bool(keeps), Load(*used), Load(*kept))


@dataclass(frozen=True)
class Store:
    """A server, a part of it that is the test's own, and what the gateway keeps there."""

    url: str
    prefix: str
    redis: Redis

    def key(self, backend: str, name: str) -> str:
        return f"{{{self.prefix}:{backend}}}:{name}"

    async def sums(self, owner: str | None = None) -> Load:
        """Return what counts against the limits, of one owner or of all: what is kept for them."""
        total = Load()
        for name, account in (await self.accounts()).items():
            total += account.kept if owner in (None, name) else Load()
        return total

    async def added(self) -> Load:
        """Return what all of them said that they use."""
        total = Load()
        for account in (await self.accounts()).values():
            total += account.used
        return total

    async def accounts(self, backend: str = "b") -> dict[str, Account]:
        """Return what each owner has, except those that have nothing."""
        found = await cast("Awaitable[dict[str, str]]", self.redis.hgetall(self.key(backend, "accounts")))
        found.pop("#", None)
        accounts = {owner: Account.of(text) for owner, text in found.items()}
        return {owner: account for owner, account in accounts.items() if account.kept != Load()}

    async def account(self, owner: str, backend: str = "b") -> Account:
        """Return what an owner has, or had until it was closed."""
        text = await cast("Awaitable[str]", self.redis.hget(self.key(backend, "accounts"), owner))
        return Account.of(text)

    async def expire(self, owner: str, backend: str = "b") -> None:
        """Let the time of an owner's account be over."""
        key = self.key(backend, "accounts")
        text = await cast("Awaitable[str | None]", self.redis.hget(key, owner))
        if text is not None:
            rest = text.partition(" ")[2]
            await self.redis.hset(key, owner, f"1 {rest}")

    async def lose(self) -> None:
        """Lose everything the gateway keeps, as a server that was restarted has."""
        keys = [key async for key in self.redis.scan_iter(match=f"*{self.prefix}*", count=1000)]
        if keys:
            await self.redis.delete(*keys)


OpenStore = Callable[[str], Awaitable[Store]]


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    """Return a function that gives the URL of a leg's server, for all tests of this folder."""
    with shared_servers(tmp_path_factory.mktemp) as servers:
        yield servers


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
    return await open_store(NEWEST)


@pytest.fixture(params=legs(own=True))
def stoppable(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RedisServer]:
    """Every supported server in turn, as a process of the test's own."""
    with own_server(request.param, tmp_path) as server:
        yield server


@pytest.fixture
def store_type() -> type[Store]:
    return Store
