"""What the shared store costs: `python benchmarks/store.py`.

Starts the embedded server, or uses the one at `--url`, and measures one gateway process against it, over
one connection at a time and over many: calls per second, the time of one, and the CPU that it costs the
gateway and the server. The ledger in memory is measured for comparison.
"""

import argparse
import importlib.metadata
import os
import platform
import resource
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count, cycle
from typing import TypeVar

import anyio
from redis.asyncio import Redis

from gateway.core.class_counts import TextKind
from gateway.core.facts import Attempts, Facts, Learned, Ratio
from gateway.core.health import State, Verdict
from gateway.core.jobs import Chunk, Job, JobStatus, NewJob, Quota
from gateway.core.load import UNLIMITED, Load
from gateway.ports import Ledger, Slot
from gateway.store.embedded import temporary_folder, valkey_in
from gateway.store.facts import encode
from gateway.store.jobs import RedisJobs
from gateway.store.memory import MemoryLedger
from gateway.store.redis import RedisLedger

CLAIM = Load(seqs=1, share=15_625, kv_blocks=120, long_unanswered=1, prefill_ms=180)
FREE = Load(UNLIMITED, UNLIMITED, UNLIMITED, UNLIMITED, UNLIMITED, UNLIMITED)
FULL = replace(FREE, share=0)
PREFIX = "benchmark"
CROWD = 10
BODY = b"x" * 4096
CHUNK = b"x" * 512
LANE = "model/class"
QUOTA = Quota(queued_max=10**9, bytes_max=10**15)
T = TypeVar("T")


def main() -> None:
    """Parse the arguments and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", help="a server to measure instead of the embedded one")
    parser.add_argument("--calls", type=int, default=4_000, help="calls per line (default: 4000)")
    options = parser.parse_args()
    anyio.run(report, options.url, options.calls)


async def report(url: str | None, calls: int) -> None:
    """Print the machine, then a line per operation."""
    async with _server(url) as where:
        redis = Redis.from_url(where, decode_responses=True)
        info = await redis.info()
        kind = (
            "Valkey " + info["valkey_version"]
            if "valkey_version" in info
            else "Redis " + info["redis_version"]
        )
        machine = f"{platform.machine()}, {os.cpu_count()} CPUs, {platform.system()}"
        print(f"{machine}, Python {platform.python_version()}, {kind}, redis-py {_version()}\n")
        print(f"{'':42}{'calls/s':>9}{'ms median':>11}{'ms p99':>9}{'us gateway':>12}{'us server':>11}")
        print(
            f"memory\n{await line('  acquire, answered, release', MemoryLedger(), context, calls, 1, None)}"
        )
        for at_once in (1, 32):
            async with _hearing(where) as ledger:
                print(f"shared, far from every limit, {at_once} at once")
                print(await line("  acquire, answered, release", ledger, context, calls, at_once, redis))
        ledger = RedisLedger(where, prefix=PREFIX, command_s=10.0)  # hears nothing, so nothing is kept for it
        for at_once in (1, 32):
            print(f"shared, near a limit, {at_once} at once")
            print(await line("  acquire, answered, release", ledger, context, calls, at_once, redis))
            print(await line("  acquire, refused", ledger, refused, calls, at_once, redis))
        others = [RedisLedger(where, prefix=PREFIX, command_s=10.0) for _ in range(CROWD - 1)]
        for other in others:
            assert isinstance(await other.acquire("b", CLAIM, FREE), Slot)
        print(f"shared by {CROWD}, near a limit")
        print(await line("  acquire, answered, release", ledger, context, calls, 1, redis))
        print(await line("  look at one backend", ledger, look, calls, 1, redis))
        for one in (ledger, *others):
            await one.aclose()
        await report_crowd(where, calls, redis)
        await redis.aclose()
    async with _server(url, keeps=True) as where:
        redis = Redis.from_url(where, decode_responses=True)
        for at_once in (1, 32):
            jobs = JobCalls(where, at_once)
            print(f"jobs, {at_once} at once")
            for name in ("submit", "claim", "append", "finish", "get"):
                print(await line(f"  {name}", jobs, getattr(JobCalls, name), calls, at_once, redis))
            await jobs.aclose(redis)
        await redis.aclose()


class JobCalls:
    """Jobs on their way: each call takes one of them a step further."""

    def __init__(self, url: str, at_once: int) -> None:
        """Keep them in the server at `url`."""
        # No claim is renewed here, and on a slow machine each is held for long.
        self._store = RedisJobs(url, prefix=PREFIX, command_s=10.0, lost_s=3600.0)
        self._workers = [f"w{number}" for number in range(at_once)]
        self._submitted = 0
        self._claimed: list[tuple[str, str, int]] = []  # id, claim, chunks

    async def submit(self) -> None:
        """Accept a job."""
        self._submitted += 1
        job = NewJob(id=f"resp_{self._submitted}", key="key", lane=LANE, body=BODY)
        assert isinstance(await self._store.submit(job, QUOTA), Job)

    async def claim(self) -> None:
        """Take the next one."""
        worker = self._workers.pop()
        job = await self._store.claim(worker, [LANE], 3, "config")
        assert job is not None
        self._claimed.append((job.id, job.claim, 0))
        self._workers.append(worker)

    async def append(self) -> None:
        """Add to one's answer."""
        id, claim, chunks = self._claimed.pop(0)
        assert await self._store.append(id, claim, Chunk(chunks, 1, CHUNK))
        self._claimed.append((id, claim, chunks + 1))

    async def finish(self) -> None:
        """End one."""
        id, claim, _ = self._claimed.pop()
        assert await self._store.finish(id, claim, JobStatus.COMPLETED)

    async def get(self) -> None:
        """Look at one."""
        assert await self._store.get("resp_1") is not None

    async def aclose(self, redis: Redis) -> None:
        """Forget them all."""
        async for key in redis.scan_iter(match=f"{{{PREFIX}:jobs}}:*", count=1000):
            await redis.delete(key)
        await self._store.aclose()


async def report_crowd(where: str, calls: int, redis: Redis) -> None:
    """Print what it costs to tell each other facts that change all the time."""
    size = len(encode(facts(0)))
    print(f"{CROWD} gateways, each with facts of {size:,} bytes")
    crowd = [RedisLedger(where, prefix=PREFIX, command_s=10.0) for _ in range(CROWD)]
    numbers, turns = count(), cycle(crowd)
    for ledger in crowd:
        ledger.exchange.join(lambda: facts(next(numbers)), lambda heard: None)

    async def tell(_: Ledger) -> None:
        await next(turns).sync()

    print(await line("  one tells its own, hears all others", crowd[0], tell, max(1, calls // 10), 1, redis))
    for ledger in crowd:
        await ledger.aclose()


def facts(number: int) -> Facts:
    """Return what a process tells in front of 12 backends, with 20 keys in 4 classes; never the same."""
    return Facts(
        verdicts={"backend-0": Verdict(1, State.EJECTED, "3 requests failed, the last with status 500", 4.0)},
        attempts={f"backend-{name}": Attempts(100_000 + number, 3) for name in range(12)},
        learned=Learned({kind: Ratio(200, 0.03125 + number / 1e9) for kind in TextKind}, 34),
        started={
            ("gemma-4", f"class-{name}", f"team-{key}"): 10_000_000 + number
            for name in range(4)
            for key in range(20)
        },
        long_waiting={"backend-1": 2},
    )


async def context(ledger: Ledger) -> None:
    """All that one request asks of the ledger."""
    slot = ledger.acquire_at_once("b", CLAIM, FREE) or await ledger.acquire("b", CLAIM, FREE)
    assert isinstance(slot, Slot)
    await ledger.answered(slot)
    if not ledger.release_at_once(slot):
        await ledger.release(slot)


async def refused(ledger: Ledger) -> None:
    """A request that finds the backend full."""
    await ledger.acquire("b", CLAIM, FULL)


async def look(ledger: Ledger) -> None:
    """What every second costs, per backend, and the heartbeat."""
    assert isinstance(ledger, RedisLedger)
    await ledger.sync()


async def line(
    name: str,
    subject: T,
    work: Callable[[T], Awaitable[None]],
    calls: int,
    at_once: int,
    redis: Redis | None,
) -> str:
    """Return what `calls` of `work` took, `at_once` at a time."""
    times: list[float] = []

    async def one_after_the_other() -> None:
        for _ in range(calls // at_once):
            began = time.perf_counter()
            await work(subject)
            times.append(time.perf_counter() - began)

    for _ in range(min(100, calls)):
        await work(subject)
    server, own, began = await _server_cpu_s(redis), _own_cpu_s(), time.perf_counter()
    async with anyio.create_task_group() as tasks:
        for _ in range(at_once):
            tasks.start_soon(one_after_the_other)
    took, own = time.perf_counter() - began, _own_cpu_s() - own
    server = await _server_cpu_s(redis) - server
    done = len(times)
    p99 = statistics.quantiles(times, n=100)[98]
    served = f"{server / done * 1e6:11.0f}" if redis is not None else f"{'-':>11}"
    median = statistics.median(times)
    return f"{name:42}{done / took:9.0f}{median * 1e3:11.3f}{p99 * 1e3:9.3f}{own / done * 1e6:12.0f}{served}"


@asynccontextmanager
async def _hearing(url: str) -> AsyncIterator[RedisLedger]:
    """Yield a ledger that runs, as that of a gateway does."""
    ledger, synced = RedisLedger(url, prefix=PREFIX, command_s=10.0), anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ledger.run, lambda failure: synced.set())
        await synced.wait()
        yield ledger
        tasks.cancel_scope.cancel()
    await ledger.aclose()


@asynccontextmanager
async def _server(url: str | None, *, keeps: bool = False) -> AsyncIterator[str]:
    if url is not None:
        yield url
        return
    with temporary_folder() as folder:
        async with valkey_in(folder, keeps=keeps) as own:
            yield own.url


async def _server_cpu_s(redis: Redis | None) -> float:
    if redis is None:
        return 0.0
    cpu = await redis.info("cpu")
    return float(cpu["used_cpu_user"]) + float(cpu["used_cpu_sys"])


def _own_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _version() -> str:
    return importlib.metadata.version("redis")


if __name__ == "__main__":
    main()
