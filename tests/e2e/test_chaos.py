"""Several gateway processes over one store keep the limits, whatever happens to any of them.

Real processes: two gateways, one Valkey, three simulated engines; callers who leave at random; a gateway
killed with SIGKILL; the store killed, away for five seconds and back empty. What is true is asked of the
engines themselves, which note every change of what they hold, and of the store's own sums.

CHAOS_SEED=... tries another seed than the one of every day.
"""

import json
import logging
import os
import random
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any, cast

import anyio
import httpx
import pytest
from anyio.abc import TaskGroup, TaskStatus
from redis.asyncio import Redis
from support import clients
from support.processes import Process, config, reserved_port, running, until
from support.redis_server import RedisServer, binary

from gateway.clock import SystemClock
from gateway.core.admission import COUNTERS

SEED = int(os.environ.get("CHAOS_SEED", "20261121"))
FLEET = {"light-0": "h100-tp1-light", "light-1": "h100-tp1-light", "push": "h100-tp2-push"}
KNEES = {"light-0": 4, "light-1": 5, "push": 6}
POOLS = {"light": ["light-0", "light-1"], "push": ["push"]}
KEYS = ("alpha", "beta", "gamma")
CHOICES_MAX = 2
SPEED = 3
CALLERS = 14  # per gateway: as many as there are places in the whole fleet
GATEWAYS = ("one", "other")

LEASE_S = 15.0
LOOK_S = 1.0  # between two looks at the store
AWAY_S = 5.0
NOTICE_S = 0.5
"""How long an engine may take to notice a closed connection: other tests run beside it on the same cores."""

SETTLE_S = 20.0
SHED = frozenset({"wait_too_long", "waited_too_long"})
WORDS = ("the", "river", "runs", "past", "an", "old", "mill", "and", "nobody", "knows", "how", "long")

clock = SystemClock()
log = logging.getLogger("chaos")


# ------------------------------------------------------------------ what the engines held


@dataclass(frozen=True)
class History:
    """What an engine held: `(when, held, aborted so far)`, oldest first. Times are epoch seconds."""

    changes: Sequence[tuple[float, int, int]]

    def peak(self, since: float, until: float) -> int:
        """Return the most it held at a time."""
        return max((held for _, held in self._within(since, until)), default=0)

    def above(self, limit: int, since: float, until: float) -> Sequence[tuple[float, int, int]]:
        """Return each moment at which it held more than that, without what no gateway counted any more.

        A gateway closes the connection to the engine, and then gives the place back. The next request may
        reach the engine before it has noticed that the other one's connection is closed. So as many as the
        engine aborts in the next moment may have been there beyond the limit.

        A moment: seconds since `since`, how many it held, how many of them it was about to abort.
        """
        moments = []
        for when, held, aborted in self.changes:
            if since <= when < until:
                last = bisect_right(self.changes, when + NOTICE_S, key=itemgetter(0)) - 1
                moments.append((when - since, held, self.changes[last][2] - aborted))
        return [(when, held, gone) for when, held, gone in moments if held - gone > limit]

    def _within(self, since: float, until: float) -> Iterator[tuple[float, int]]:
        for (when, held, _), (end, _, _) in pairwise([*self.changes, (until, 0, 0)]):
            if end > since and when < until:
                yield max(when, since), held


# ------------------------------------------------------------------ the site


@dataclass
class Member:
    """A gateway on ports of its own, which may be killed and started again.

    Attributes:
        owner: What the store calls its present process.
        lives: Its processes, the present one last.
        outages: When it was not there, epoch seconds; the last one may not have ended.
    """

    file: Path
    url: str
    admin: str
    redis: Redis
    tasks: TaskGroup
    owner: str = ""
    lives: list[Process] = field(default_factory=list)
    outages: list[tuple[float, float]] = field(default_factory=list)

    async def start(self) -> None:
        """Start it, and return once it serves with every backend up and the store knows it."""
        known = await self._replicas()
        await self.tasks.start(self._live)
        await self.process.wait_for(r"operators: ")
        await until(self._is_up)
        await until(lambda: self._is_known_beside(known))
        (self.owner,) = await self._replicas() - known
        if self.outages:
            self.outages[-1] = (self.outages[-1][0], clock.wall())

    async def kill(self) -> None:
        """End it with SIGKILL."""
        self.outages.append((clock.wall(), float("inf")))
        self.process.process.kill()
        await self.process.process.wait()

    @property
    def output(self) -> str:
        """What it has written in all its lives."""
        return "".join(process.output for process in self.lives)

    @property
    def process(self) -> Process:
        """Its present life."""
        return self.lives[-1]

    async def _is_up(self) -> bool:
        async with clients.http() as client:
            backends = (await client.get(f"{self.admin}/admin/backends")).json()
        return all(backend["state"] == "up" for backend in backends.values())

    async def _is_known_beside(self, known: set[str]) -> bool:
        return bool(await self._replicas() - known)

    async def _replicas(self) -> set[str]:
        return set(cast("list[str]", await self.redis.zrange("{gw}:replicas", 0, -1)))

    async def _live(self, *, task_status: TaskStatus[None]) -> None:
        arguments = ("serve", "--config", str(self.file), "--log-level", "warning")
        async with running(*arguments) as process:
            self.lives.append(process)
            task_status.started()
            await process.process.wait()

    def was_away(self, since: float, until: float) -> bool:
        """Return whether it was not there at some moment of that time."""
        return any(begin <= until and since <= end for begin, end in self.outages)


@dataclass
class Site:
    """Everything that runs."""

    gateways: Mapping[str, Member]
    engines: Mapping[str, str]
    valkey: RedisServer
    redis: Redis
    http: httpx.AsyncClient

    async def histories(self) -> Mapping[str, History]:
        found = {}
        for name, url in self.engines.items():
            told = (await self.http.get(f"{url}/simulator/sequences")).json()
            assert told["is_whole"]
            found[name] = History([(when, held, aborted) for when, held, aborted in told["changes"]])
        return found

    async def counted(self) -> Mapping[str, int]:
        """Return how many sequences the store counts, per backend."""
        return {name: sum((await self._kept(name)).values()) for name in self.engines}

    async def is_idle(self) -> bool:
        return not await self.left()

    async def is_full_since(self, since: float) -> bool:
        """Return whether an engine for chats has held as much as it may since then."""
        histories = await self.histories()
        return any(histories[name].peak(since, clock.wall()) == KNEES[name] for name in POOLS["light"])

    async def counts_something_of(self, owner: str) -> bool:
        return owner in await self.owners()

    async def counts_something_of_each(self) -> bool:
        """Return whether it counts something of each gateway, and of nobody else."""
        return {gateway.owner for gateway in self.gateways.values()} == await self.owners()

    async def counts_nothing_of(self, owner: str) -> bool:
        return owner not in await self.owners()

    async def owners(self) -> set[str]:
        """Return the gateway processes that the store counts anything for."""
        return {owner for name in self.engines for owner, seqs in (await self._kept(name)).items() if seqs}

    async def _kept(self, name: str) -> dict[str, int]:
        """Return how many sequences are kept for each gateway process, used or not."""
        accounts = await cast("Awaitable[dict[str, str]]", self.redis.hgetall(f"{{gw:{name}}}:accounts"))
        return {
            owner: int(account.split()[4 + len(COUNTERS)])
            for owner, account in accounts.items()
            if owner != "#"
        }

    async def left(self) -> Mapping[str, Any]:
        """Return everything that is in flight anywhere: empty when nothing is."""
        found: dict[str, Any] = {
            f"store {name}": count for name, count in (await self.counted()).items() if count
        }
        for name, url in self.engines.items():
            found[f"engine {name}"] = (await self.http.get(f"{url}/simulator/sequences")).json()["held"]
        for name, member in self.gateways.items():
            view = (await self.http.get(f"{member.admin}/admin/backends")).json()
            for backend, shown in view.items():
                found[f"{name} {backend}"] = shown["in_flight"] + shown["kv_blocks"]
                found[f"{name} {backend} engine"] = shown["engine"]["running"] + shown["engine"]["waiting"]
            metrics = (await self.http.get(f"{member.admin}/metrics")).text
            waiting = [line for line in metrics.splitlines() if line.startswith("gateway_waiting{")]
            found[f"{name} line"] = sum(float(line.rpartition(" ")[2]) for line in waiting)
        return {what: count for what, count in found.items() if count}


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with AsyncExitStack() as stack:
        valkey = RedisServer(binary("valkey-9"), tmp_path, port=stack.enter_context(reserved_port()))
        valkey.start()
        stack.callback(valkey.kill)
        redis = Redis.from_url(valkey.url, decode_responses=True)
        stack.push_async_callback(redis.aclose)
        simulated = {
            name: await stack.enter_async_context(
                running("simulate", "--profile", profile, "--port", "0", "--speed", str(SPEED))
            )
            for name, profile in FLEET.items()
        }
        engines = {
            name: (await process.wait_for(r"(http://127\.0\.0\.1:\d+)"))[1]
            for name, process in simulated.items()
        }
        lives = await stack.enter_async_context(anyio.create_task_group())
        stack.callback(lives.cancel_scope.cancel)
        gateways = {}
        for name in GATEWAYS:
            listen, admin = (stack.enter_context(reserved_port()) for _ in range(2))
            folder = tmp_path / name
            folder.mkdir()
            file = _config(folder, engines, valkey.tcp_url, listen, admin)
            member = Member(file, f"http://127.0.0.1:{listen}", f"http://127.0.0.1:{admin}", redis, lives)
            await member.start()
            gateways[name] = member
        http = await stack.enter_async_context(clients.http())
        yield Site(gateways, engines, valkey, redis, http)


def _config(folder: Path, engines: Mapping[str, str], store: str, listen: int, admin: int) -> Path:
    waiting = "waiting: {max_wait_s: 4}"
    rest = f"""
store: {store}
health: {{interval_s: 0.5}}
keys: {{{", ".join(f"{key}: {{sha256: {sha256(key.encode()).hexdigest()}}}" for key in KEYS)}}}
models:
  gemma-4:
    classes:
      - {{class: long_document, when: {{prompt_tokens: ">= 1500"}}, pools: [push], {waiting}}}
      - {{class: short_chat, pools: [light, push], {waiting}}}
"""
    backends = {name: (url, FLEET[name]) for name, url in engines.items()}
    file = config(folder, backends, POOLS, rest)
    text = file.read_text()
    text = text.replace("listen: 127.0.0.1:0", f"listen: 127.0.0.1:{listen}")
    text = text.replace("admin: 127.0.0.1:0", f"admin: 127.0.0.1:{admin}")
    for name, profile in FLEET.items():
        old = f"{engines[name]!r}, profile: {profile}"
        text = text.replace(old, f"{old}, limits: {{knee_seqs: {KNEES[name]}}}")
    file.write_text(text)
    return file


# ------------------------------------------------------------------ the callers


@dataclass
class Crowd:
    """Callers who never stop asking, and what became of what they asked.

    Attributes:
        endings: How requests ended, counted.
        faults: Endings that nothing explains.
        stay_s: The longest that one which was answered had its place, and a little more, per backend.
        leaves: Whether callers leave at random.
    """

    site: Site
    endings: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    stay_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    leaves: bool = False
    is_over: bool = False

    async def caller(self, home: str, number: int) -> None:
        """Ask one gateway for one thing after the other, and the next gateway where that one fails."""
        dice = random.Random(f"{SEED} {home} {number}")
        async with AsyncExitStack() as stack:
            callers = {}
            for name, member in self.site.gateways.items():
                client = clients.http(base_url=member.url, timeout=60)
                callers[name] = await stack.enter_async_context(client)
            name = home
            while not self.is_over:
                began = clock.wall()
                fields, patience_s = _drawn(dice), _patience_s(dice) if self.leaves else None
                try:
                    ending = await self._ask(callers[name], fields, dice.choice(KEYS), patience_s)
                    name = home
                except httpx.TransportError as error:
                    ending = "cut off"
                    if not self.site.gateways[name].was_away(began, clock.wall()):
                        self.faults.append(f"{name}: {type(error).__name__} {error}")
                    name = next(other for other in callers if other != name)
                self.endings[ending] += 1
                if ending == "shed":
                    await anyio.sleep(dice.uniform(0.05, 0.3))

    async def _ask(
        self, client: httpx.AsyncClient, fields: dict[str, Any], key: str, patience_s: float | None
    ) -> str:
        headers = {"authorization": f"Bearer {key}"}
        with anyio.move_on_after(patience_s):
            began = clock.wall()
            async with client.stream("POST", "/v1/chat/completions", json=fields, headers=headers) as answer:
                body = await answer.aread()
            if answer.status_code == 200:
                waited_s = float(answer.headers["x-gateway-queue-ms"]) / 1000
                backend, took_s = answer.headers["x-gateway-backend"], clock.wall() - began - waited_s
                self.stay_s[backend] = max(self.stay_s[backend], took_s)
            return self._judged(answer, body, fields)
        return "left"  # the block above was cut short

    def _judged(self, answer: httpx.Response, body: bytes, fields: dict[str, Any]) -> str:
        if answer.status_code == 429:
            retry, code = answer.headers["retry-after"], json.loads(body)["error"]["code"]
            if not retry.isdigit() or not 1 <= int(retry) <= 59 or code not in SHED:
                self.faults.append(f"429 {code}, retry-after {retry!r}")
            return "shed"
        if answer.status_code != 200 or not _is_whole(body, fields):
            self.faults.append(f"{answer.status_code}: ...{body[-300:]!r}")
            return "failed"
        return "answered"


def _drawn(dice: random.Random) -> dict[str, Any]:
    """Return one request of a mixed stream."""
    is_document = dice.random() < 0.1
    words = dice.randint(2_000, 4_000) if is_document else dice.randint(5, 60)
    stream = dice.random() < 0.6
    return {
        "model": "gemma-4",
        "messages": [{"role": "user", "content": " ".join(dice.choices(WORDS, k=words))}],
        "max_tokens": dice.randint(2, 24),
        "n": CHOICES_MAX if dice.random() < 0.1 else 1,
        "stream": stream,
    }


def _patience_s(dice: random.Random) -> float | None:
    return dice.uniform(0, 0.5) if dice.random() < 0.3 else None


def _is_whole(body: bytes, fields: dict[str, Any]) -> bool:
    if fields["stream"]:
        events = body.decode().split("\n\n")
        reasons = [
            choice["finish_reason"]
            for event in events
            if event.startswith("data: {")
            for choice in json.loads(event[6:]).get("choices", ())
            if choice["finish_reason"]
        ]
        if events[-2:] != ["data: [DONE]", ""]:
            return False
    else:
        reasons = [choice["finish_reason"] for choice in json.loads(body)["choices"]]
    return len(reasons) == fields["n"] and set(reasons) <= {"stop", "length"}


async def ended(crowd: Crowd, count: int) -> None:
    """Return once that many more requests have ended."""
    goal = crowd.endings.total() + count

    async def are_over() -> bool:
        return crowd.endings.total() >= goal

    await until(are_over, within_s=60)


# ------------------------------------------------------------------ the proof


def part(knee: int) -> int:
    """Return what one of two gateways that count alone lets run at once; one request always may."""
    return max(knee // 2, CHOICES_MAX)


async def test_two_gateways_keep_every_limit_whatever_happens(site: Site) -> None:
    log.warning("CHAOS_SEED=%d", SEED)  # shown where the test fails
    crowd, (one, other) = Crowd(site), site.gateways.values()
    async with anyio.create_task_group() as tasks:
        for name in GATEWAYS:
            for number in range(CALLERS):
                tasks.start_soon(crowd.caller, name, number)
        await ended(crowd, 100)  # all are busy

        calm_at = clock.wall()
        await ended(crowd, 400)
        crowd.leaves = True
        leaving_at = clock.wall()
        await ended(crowd, 400)

        dead = other.owner
        await until(lambda: site.counts_something_of(dead))
        await other.kill()
        await until(lambda: site.counts_nothing_of(dead), within_s=LEASE_S + 3 * LOOK_S)
        returned_at = clock.wall()
        await until(
            lambda: site.is_full_since(returned_at), within_s=60
        )  # what the dead one had is used again
        await other.start()
        await ended(crowd, 200)
        await until(site.counts_something_of_each)

        away_at = clock.wall()
        site.valkey.kill()
        await anyio.sleep(AWAY_S)
        back_at = clock.wall()
        site.valkey.start()
        for member in (one, other):
            await member.process.wait_for("the store is available again", within_s=SETTLE_S)
        await ended(crowd, 400)
        over_at = clock.wall()
        crowd.is_over = True

    left = await nothing_left(site)
    histories = await site.histories()
    zero_s = clock.wall() - over_at
    log.warning("%s; stayed at most %s; idle after %.2f s", crowd.endings, dict(crowd.stay_s), zero_s)

    for name, history in histories.items():
        knee, stay_s = KNEES[name], crowd.stay_s[name]
        log.warning(
            "%s: %d held at most where callers left, of %d", name, history.peak(leaving_at, away_at), knee
        )
        assert history.peak(calm_at, over_at) >= knee, name  # the limit is what holds them back
        # Nobody leaves: never above, not by one.
        assert history.peak(calm_at, leaving_at) <= knee, name
        # Callers leave, a gateway dies, its leases run out, it comes again: never above what is counted.
        assert history.above(knee, calm_at, away_at) == [], name
        # The store is away. Before, all places may have been one gateway's; the other has its part besides.
        assert history.above(knee + part(knee), away_at, away_at + stay_s) == [], name
        # As soon as those have ended, each has its part and no more.
        assert history.above(2 * part(knee), away_at + stay_s, back_at) == [], name
        # The store is back, empty: nobody takes more than its part before the other can have registered.
        assert history.above(knee, max(back_at, away_at + stay_s), over_at) == [], name
    assert left == {}
    assert crowd.faults == []
    assert crowd.endings["answered"] > 1_000
    assert min(crowd.endings[ending] for ending in ("left", "cut off")) > 0
    for member in (one, other):
        errors = [line for line in member.output.splitlines() if '"level": "error"' in line]
        # Said once each time: a machine that stands still for a moment sees it away once more.
        assert len(errors) == member.output.count("the store is unavailable (") > 0, errors
        assert "this process counts alone, with every limit divided by 2" in errors[0]


async def nothing_left(site: Site) -> Mapping[str, Any]:
    """Return what is still in flight anywhere, once that is nothing or the time is over."""
    with anyio.move_on_after(SETTLE_S):
        await until(site.is_idle)
    return await site.left()
