"""Jobs are accepted once, end once and are answered whole, whatever is killed meanwhile.

Real processes: two gateways, two workers, one Valkey that keeps its data, two simulated engines, and a box
that holds one of two models. Callers hand jobs over with the unmodified SDK, at either gateway, and poll
them, follow their events, or cancel them. Meanwhile all but the box itself are killed with SIGKILL at
random and come back, and workers stall until their jobs are somebody else's. The models are asked to count,
so an answer that is lost, doubled or another's is seen. What became of each job is asked of both gateways,
and of the journal that Valkey keeps on its disk; what the box held, of the box.

JOB_CHAOS_SEED=... tries another seed than the one of every day, or several, by commas; JOB_CHAOS_LOGS=FOLDER
keeps what the processes wrote. For an hour of it:

    JOB_CHAOS_SEED=$(seq -s, 1 40) python -m pytest tests/e2e/test_job_chaos.py
"""

import logging
import os
import random
import sys
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import zip_longest
from pathlib import Path
from typing import Any, cast

import anyio
import anyio.to_thread
import httpx
import pytest
import yaml
from redis.asyncio import Redis
from redis.exceptions import RedisError
from support import clients
from support.job_crowd import Crowd, Follow, HandedOver, drawn
from support.job_world import LEFT, JobWorld
from support.processes import Mortal, reserved_port, running
from support.redis_server import RedisServer, binary
from support.store_journal import JobHistory, job_histories

SEEDS = [int(seed) for seed in os.environ.get("JOB_CHAOS_SEED", "20261121").split(",")]
LOGS = os.environ.get("JOB_CHAOS_LOGS")
JOBS = 150
ARRIVALS_PER_S = 12.0
BLOWS = {"gateways": 3, "workers": 3, "stalls": 2, "engines": 3, "valkey": 2}
"""How often each kind is struck. Each model of the box is killed once, too: the second time is quarantine."""

AWAY_S = (0.2, 3.0)
"""How long what was killed is away, but for a model of the box, which the gateways bring back."""

STALLED_MAX_S = 13.0
"""How long a worker stalls at most: longer than its claims last, and not so long that it loses the box."""

GATEWAYS = ("one", "other")
WORKERS = ("first", "second")
ENGINES = ("light-0", "light-1")
ENGINE_SPEED, BOX_SPEED = 1.0, 20.0
MODELS = ("gemma", "qwen")
RESIDENCY_S = 8.0
RECENT = 200  # jobs among which those are that run
CLAIM_KEPT_MS = 3_600_000  # as in job_claim.lua
SETTLE_S = 60.0
ALL_S = 600.0  # about ten times what it takes: a machine may be slow, a job that never ends is a fault

log = logging.getLogger("chaos")


# ------------------------------------------------------------------ the site


@dataclass
class Site:
    """Everything that runs.

    Attributes:
        gateways, workers, engines: What can be killed and started again, by name.
        admins: Where each gateway tells operators what it does.
        engine_urls: Where the engines tell what they hold.
        box: Where the box takes orders, and tells what it has seen.
        valkey, redis, store: The store, and where its data are.
        valkey_free: Held while the store is away.
        killed: Who was killed when, as the box saw it: (model, epoch seconds), and requests cut by that.
    """

    gateways: Mapping[str, Mortal]
    workers: Mapping[str, Mortal]
    engines: Mapping[str, Mortal]
    urls: Mapping[str, str]
    admins: Mapping[str, str]
    engine_urls: Mapping[str, str]
    box: str
    valkey: RedisServer
    redis: Redis
    store: Path
    http: httpx.AsyncClient
    killed: dict[tuple[str, float], int] = field(default_factory=dict)
    valkey_free: anyio.Lock = field(default_factory=anyio.Lock)

    async def strike(self, kind: str, name: str, away_s: float) -> None:
        """Kill something, and have it back."""
        if kind == "models":
            await self._kill_model(name)
        elif kind == "valkey":
            await self._restart_valkey(away_s)
        elif kind == "stalls":
            await self._stall(self.workers[name])
        else:
            victim = {**self.gateways, **self.workers, **self.engines}[name]
            await victim.kill()
            await anyio.sleep(away_s)
            await victim.start()

    async def _restart_valkey(self, away_s: float) -> None:
        async with self.valkey_free:
            self.valkey.kill()
            await anyio.sleep(away_s)
            await anyio.to_thread.run_sync(self.valkey.start)

    async def _stall(self, worker: Mortal) -> None:
        """Stall a worker until another begins with a job of its own, so that both are at it.

        Valkey is restarted meanwhile: so nobody tells the worker that it has lost its jobs.
        """
        worker.stall()
        await self._restart_valkey(0)
        with anyio.move_on_after(STALLED_MAX_S):
            before = await self._workers()
            while True:
                now = await self._workers()
                if any(before.get(id, one) != one for id, one in now.items()):
                    break
                await anyio.sleep(0.02)
        worker.resume()

    async def _workers(self) -> dict[str, str]:
        """Return who works at each job that is in progress; nobody while the store is away."""
        try:
            ids = cast("list[str]", await self.redis.zrange("{gw:jobs}:jobs", -RECENT, -1))
            async with self.redis.pipeline(transaction=False) as asked:
                for id in ids:
                    asked.hmget(f"{{gw:jobs}}:job:{id}", ["status", "worker"])
                said = await asked.execute()
        except RedisError:
            return {}
        return {id: worker for id, (status, worker) in zip(ids, said, strict=True) if status == "in_progress"}

    async def _kill_model(self, name: str) -> None:
        """Kill a model of the box while it serves: one that dies at its start is in quarantine for good."""
        while not await self._is_resident(name):  # noqa: ASYNC110 - another process's state
            await anyio.sleep(0.1)
        before = (await self.seen())["cut_requests"]
        killed = (await self.http.post(f"{self.box}/models/{name}/kill")).json()
        seen = await self.seen()
        ends = [one["until_s"] for one in seen["residencies"] if one["model"] == name and one["until_s"]]
        ended = [until_s for until_s in ends if abs(until_s - killed["since_s"]) <= 0.1]
        if ended:  # it may be back by now
            self.killed[name, ended[-1]] = seen["cut_requests"] - before
        else:
            await self._kill_model(name)  # it had gone a moment before

    async def _is_resident(self, name: str) -> bool:
        for admin in self.admins.values():
            try:
                box = (await self.http.get(f"{admin}/admin/boxes")).json()["spark"]
            except httpx.TransportError:
                continue
            if box["switched_by_this_gateway"]:
                return (box["state"], box["backend"]) == ("resident", name)
        return False

    async def seen(self) -> dict[str, Any]:
        """Return what the box has counted."""
        return cast("dict[str, Any]", (await self.http.get(f"{self.box}/box")).json())


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with AsyncExitStack() as stack:
        ports = {
            name: stack.enter_context(reserved_port())
            for name in (*GATEWAYS, *ENGINES, *(f"{name} admin" for name in (*GATEWAYS, *WORKERS)))
        }
        urls = {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}
        store = tmp_path / "store"
        store.mkdir()
        valkey = RedisServer(binary("valkey-9"), store, keeps=True)
        valkey.start()
        stack.callback(valkey.kill)
        box, models = await _box(stack)
        tasks = await stack.enter_async_context(anyio.create_task_group())
        stack.callback(tasks.cancel_scope.cancel)
        engines = {name: _engine(ports[name], tasks) for name in ENGINES}
        backends = {name: urls[name] for name in ENGINES} | models
        gateways, workers = {}, {}
        for name in GATEWAYS:
            listen = f"127.0.0.1:{ports[name]}"
            file = _config(tmp_path / name, backends, box, valkey.url, listen, ports[f"{name} admin"])
            gateways[name] = Mortal(("serve", "--config", str(file)), "operators: ", tasks)
        for name in WORKERS:
            file = _config(tmp_path / name, backends, box, valkey.url, "127.0.0.1:0", ports[f"{name} admin"])
            workers[name] = Mortal(("worker", "--config", str(file)), "operators: ", tasks)
        mortals = {**engines, **gateways, **workers}
        async with anyio.create_task_group() as starting:
            for mortal in mortals.values():
                starting.start_soon(mortal.start)
        # No connection is kept: its server may close it, or die, just as it is used again.
        limits = httpx.Limits(max_keepalive_connections=0)
        http = await stack.enter_async_context(clients.http(limits=limits, timeout=30))
        redis = Redis.from_url(valkey.url, decode_responses=True)
        stack.push_async_callback(redis.aclose)
        yield Site(
            gateways,
            workers,
            engines,
            urls={name: urls[name] for name in GATEWAYS},
            admins={name: urls[f"{name} admin"] for name in (*GATEWAYS, *WORKERS)},
            engine_urls={name: urls[name] for name in ENGINES},
            box=box,
            valkey=valkey,
            redis=redis,
            store=store,
            http=http,
        )
        for name, mortal in mortals.items() if LOGS else ():
            (Path(LOGS or "") / f"{name}.log").write_text(mortal.output)


def _engine(port: int, tasks: anyio.abc.TaskGroup) -> Mortal:
    arguments = ("--profile", "h100-tp1-light", "--port", str(port), "--speed", str(ENGINE_SPEED))
    return Mortal(("simulate", *arguments), "http://127", tasks)


async def _box(stack: AsyncExitStack) -> tuple[str, dict[str, str]]:
    """Run a box, and return where it takes orders and where its models are."""
    arguments = ("--port", "0", "--speed", str(BOX_SPEED), "--boot", "40", "--thought-tokens", "60")
    process = await stack.enter_async_context(running("simulate-box", *arguments, "--resident", "gemma"))
    orders = (await process.wait_for(r"orders at (http://\S+),"))[1]
    return orders, {name: (await process.wait_for(rf"{name}: .* at (http://\S+)/v1"))[1] for name in MODELS}


def _config(folder: Path, backends: Mapping[str, str], box: str, store: str, listen: str, admin: int) -> Path:
    switch = [sys.executable, "-m", "gateway", "box-switch", "--control", box]
    by_command = {
        "exec": {"start": [*switch, "start", "gemma"], "stop": [*switch, "--wait", "stop", "gemma"]}
    }
    by_request = {
        "http": {
            "start": {"method": "POST", "url": f"{box}/models/qwen/start"},
            "stop": {"method": "POST", "url": f"{box}/models/qwen/stop?wait=true"},
        }
    }
    soon = {"jobs": 2, "max_wait_s": 2.0}
    document = {
        "listen": listen,
        "admin": f"127.0.0.1:{admin}",
        "tokenizer": "approximate",
        "store": store,
        "keys": {key: {"sha256": sha256(key.encode()).hexdigest()} for key in ("alpha", "beta")},
        "backends": {
            name: {"url": url, "profile": "spark-nvfp4"}
            if name in MODELS
            else {"url": url, "profile": "h100-tp1-light", "limits": {"knee_seqs": 8}}
            for name, url in backends.items()
        },
        "pools": {"light": list(ENGINES), **{name: [name] for name in MODELS}},
        "boxes": {
            "spark": {
                "default": "gemma",
                "residency_s": RESIDENCY_S,
                "backends": {"gemma": {**by_command, **soon}, "qwen": {**by_request, **soon}},
            }
        },
        "models": {
            "gemma-4": {
                "classes": [
                    {"class": "reasoning", "when": {"reasoning": True}, "pools": ["gemma"]},
                    {"class": "short_chat", "pools": ["light"]},
                ]
            },
            "qwen": {"classes": [{"class": "work", "pools": ["qwen"]}]},
        },
        # However often what a job runs on is killed, it is not given up: here every one has to end well.
        "jobs": {"attempts_max": 50, "work_in_serve": False},
        "health": {"interval_s": 0.5},
    }
    folder.mkdir()
    file = folder / "gateway.yaml"
    file.write_text(yaml.safe_dump(document))
    return file


# ------------------------------------------------------------------ the blows


@dataclass(frozen=True)
class Blow:
    """Something that is killed.

    Attributes:
        at: Once so many jobs have been accepted.
        kind, name: What.
        away_s: How long it is away.
    """

    at: int
    kind: str
    name: str
    away_s: float


def blows(dice: random.Random) -> list[Blow]:
    """Return what is killed, in its order."""
    names = {
        "gateways": GATEWAYS,
        "workers": WORKERS,
        "stalls": WORKERS,
        "engines": ENGINES,
        "valkey": ("valkey",),
    }
    victims = [(kind, dice.choice(names[kind])) for kind, times in BLOWS.items() for _ in range(times)]
    struck = [
        Blow(
            at=dice.randint(20, JOBS - 20),
            kind=kind,
            name=name,
            away_s=dice.uniform(*AWAY_S),
        )
        for kind, name in [*victims, *(("models", name) for name in MODELS)]
    ]
    return sorted(struck, key=lambda blow: blow.at)


async def strike_all(site: Site, crowd: Crowd, due: list[Blow]) -> None:
    """Carry out all blows, each once its time has come; nothing is struck while it is away."""
    free = {blow.name: anyio.Lock() for blow in due}

    async def strike(blow: Blow) -> None:
        async with free[blow.name]:
            await site.strike(blow.kind, blow.name, blow.away_s)

    async with anyio.create_task_group() as tasks:
        for blow in due:
            await crowd.reached(blow.at)
            tasks.start_soon(strike, blow)


async def hand_all_over(crowd: Crowd, seed: int) -> None:
    """Hand all jobs over, one after the other, and return when every caller knows what became of its own."""
    dice = random.Random(f"{seed} arrivals")
    async with anyio.create_task_group() as callers:
        for number in range(JOBS):
            own = random.Random(f"{seed} job {number}")
            callers.start_soon(crowd.live, drawn(number, own), own)
            await anyio.sleep(dice.expovariate(ARRIVALS_PER_S))


# ------------------------------------------------------------------ what must be so


async def differences(crowd: Crowd) -> list[str]:
    """Return where what the gateways say of jobs that are over is not what their callers saw."""
    found: list[str] = []
    async with anyio.create_task_group() as readers:
        seats = anyio.CapacityLimiter(16)

        async def read(job: HandedOver) -> None:
            async with seats:
                found.extend(await differences_of(crowd, job))

        for job in crowd.jobs:
            if job.ending:
                readers.start_soon(read, job)
    return found


async def differences_of(crowd: Crowd, job: HandedOver) -> list[str]:
    """Return where what the gateways say of one job is not what its caller saw."""
    found = []
    for name in crowd.names:
        shown = await crowd.read(job, name)
        found += [
            f"job {job.number} at {name}: {member} is {shown.get(member)!r}, was {job.ending.get(member)!r}"
            for member in {**shown, **job.ending}
            if shown.get(member) != job.ending.get(member)
        ]
    if job.events:
        told = await crowd.events(job, random.Random(job.number).choice(crowd.names))
        if told != job.events:
            pairs = zip_longest(told, job.events)
            other = next((one, seen) for one, seen in pairs if one != seen)
            found.append(f"job {job.number}: an event is {other[0]!r}, and its follower saw {other[1]!r}")
    return found


async def unsettled(site: Site) -> dict[str, Any]:
    """Return what is still queued, held or counted anywhere; nothing, once all jobs are over."""
    world = JobWorld(site.valkey.url, "gw", site.redis)
    names = await world.names()
    waits = {"lanes", "running", "waiting", "resting", "ages", "expiring", "left", "backlog", "turns"}
    found: dict[str, Any] = {"jobs' keys": sorted(names & waits)}
    for key in ("alpha", "beta"):
        found[f"quota of {key}"] = (await world.quota(f"={key}"))[0]
    async for claimed in site.redis.scan_iter(match=f"{world.key('claimed')}:*"):
        if not 0 < await site.redis.pttl(claimed) <= CLAIM_KEPT_MS:
            found[claimed] = "is kept"
    for name in (*ENGINES, *MODELS):
        for owner, account in (await site.redis.hgetall(f"{{gw:{name}}}:accounts")).items():
            if owner != "#" and set(account.split()[4:]) != {"0"}:
                found[f"what {owner!s} has of {name}"] = account
    for name, url in site.engine_urls.items():
        found[f"engine {name}"] = (await site.http.get(f"{url}/simulator/sequences")).json()["held"]
    for name, admin in site.admins.items():
        for backend, shown in (await site.http.get(f"{admin}/admin/backends")).json().items():
            found[f"{name} {backend}"] = shown["in_flight"] + shown["kv_blocks"]
    return {what: count for what, count in found.items() if count}


async def settled(site: Site) -> dict[str, Any]:
    """Return what is unsettled when nothing is, or the time is over."""
    with anyio.move_on_after(SETTLE_S):
        while await unsettled(site):  # noqa: ASYNC110 - the state of other processes
            await anyio.sleep(0.2)
    return await unsettled(site)


async def miscounted(site: Site, crowd: Crowd) -> dict[str, int]:
    """Return how many jobs the store says to have ended how, if its callers saw otherwise."""
    counted: Counter[str] = Counter()
    totals = cast("dict[str, str]", await site.redis.hgetall("{gw:jobs}:totals"))
    for name, count in totals.items():
        counted[name.partition(" ")[0]] += int(count)
    return {} if counted == Counter(job.ending.get("status") for job in crowd.jobs) else dict(counted)


def short_stays(seen: Mapping[str, Any], killed: Mapping[tuple[str, float], int]) -> list[dict[str, Any]]:
    """Return the stays of models in the box that were ended too early, and not by a blow."""
    return [
        stay
        for stay in seen["residencies"]
        if stay["until_s"] is not None
        and (stay["model"], stay["until_s"]) not in killed
        and stay["until_s"] - stay["from_s"] < RESIDENCY_S
    ]


def journal_faults(histories: Mapping[str, JobHistory], crowd: Crowd) -> list[str]:
    """Return what the store's journal says that must not be, or that callers were told otherwise."""
    found = [f"{id}: {fault}" for id, history in histories.items() for fault in history.faults]
    known = {job.id: job for job in crowd.jobs}
    found += [f"{id}: accepted, and nobody knows" for id in histories.keys() - known]
    found += [
        f"job {job.number}: {histories[id].statuses if id in histories else 'never there'}, told {status}"
        for id, job in known.items()
        if id not in histories or (status := job.ending.get("status")) != histories[id].status
    ]
    return found


@pytest.mark.parametrize("seed", SEEDS)
async def test_every_job_ends_once_and_whole_whatever_is_killed(site: Site, seed: int) -> None:
    due = blows(random.Random(f"{seed} blows"))
    log.warning("seed %d: %s", seed, "; ".join(f"{one.kind} {one.name} at {one.at}" for one in due))
    async with AsyncExitStack() as stack:
        crowd = Crowd(site.urls, stack)
        began = anyio.current_time()
        with anyio.move_on_after(ALL_S):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(strike_all, site, crowd, due)
                tasks.start_soon(hand_all_over, crowd, seed)
        over = anyio.current_time()
        histories = job_histories(site.store)
        seen = await site.seen()
        log.warning(
            "%s; %s; %d claims, %d swaps; over after %.0f s",
            Counter(job.ending.get("status") for job in crowd.jobs),
            dict(crowd.troubles),
            sum(history.attempt for history in histories.values()),
            len(seen["swaps"]),
            over - began,
        )
        found: dict[str, Any] = {
            "callers": [fault for job in crowd.jobs for fault in job.judged()],
            "journal": journal_faults(histories, crowd),
            "left": await settled(site),
            "read again": await differences(crowd),
            "counted otherwise": await miscounted(site, crowd),
            "two models at once": seen["violation_log"],
            "short stays": short_stays(seen, site.killed),
            "cut by swaps": seen["cut_requests"] - sum(site.killed.values()),
        }
        stays = f"stays of models: {seen['residencies']}, killed: {site.killed}"
        assert {what: faults for what, faults in found.items() if faults} == {}, f"seed {seed}; {stays}"
        assert len(histories) == crowd.accepted == JOBS
        # One may be enough: blows can keep the box from swapping until the first model's jobs are over.
        assert seen["swaps"], "the box has not been tried"

        for number, job in enumerate(crowd.jobs):
            await crowd.forget(job, crowd.names[number % len(crowd.names)])
        assert await JobWorld(site.valkey.url, "gw", site.redis).names() <= LEFT, f"seed {seed}"
    assert {job.follow for job in crowd.jobs} == set(Follow)
