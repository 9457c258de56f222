"""What long documents cost a gateway: CPU, memory, and how long everybody else waits meanwhile.

    python benchmarks/long_documents.py                     with a small vocabulary made here
    python benchmarks/long_documents.py --vocab FILE        with your own: a rank file or a tokenizer.json

A gateway process stands before an engine in this process that answers at once. Documents are sources of
Python's library as a chat of one message. The tokenizer is timed within the gateway (overhead/clocked.py):
what is left is everything else, to receive, read, decode, decide, put together, send. The first time, a
document is counted; again, its count is remembered. CPU is that of the gateway's process, all threads; the
best of the rounds counts, because neighbours only add.

Stalls are seen from outside: a process that asks for /livez all the while, on a connection of its own. Its
longest wait is how long the event loop stood still, and what the machine added; so the same is measured
before, idle.
"""

import argparse
import asyncio
import json
import os
import platform
import re
import runpy
import socket
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

if not __package__:  # python benchmarks/long_documents.py
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import before_engine
from benchmarks.before_engine import Caller, Engine
from benchmarks.overhead import clocked, machine

SIZES = (262_144, 1_048_576, 4_000_000)
AT_ONCE, AT_ONCE_BYTES = 64, 4_000_000
PARTS = ("memory", "cost", "waits")
WINDOW_TOKENS = 16_000_000


class Documents:
    """Texts of any size, no two of them alike."""

    def __init__(self) -> None:
        """Read Python's library."""
        paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        self._text = "".join(path.read_text(errors="replace") for path in paths)
        self._text *= 1 + 2 * max(SIZES) // len(self._text)
        self._made = 0

    def text(self, size: int) -> str:
        """Return another text of so many characters."""
        self._made += 1
        start = self._made * 7919 % (len(self._text) - size)
        return f"{self._made:08} {self._text[start : start + size - 9]}"

    async def bodies(self, size: int, count: int) -> list[bytes]:
        """Return so many requests, each of another text, made in a thread: the engine here answers probes."""
        return await asyncio.to_thread(lambda: [body_of(self.text(size)) for _ in range(count)])


def body_of(text: str) -> bytes:
    """Return a request of one message."""
    document = {"model": "gemma-4", "messages": [{"role": "user", "content": text}]}
    return json.dumps(document, ensure_ascii=False).encode()


# ------------------------------------------------------------------ the gateway


@dataclass(frozen=True)
class Gateway:
    """A gateway that runs.

    Attributes:
        running: Its process, and where it listens.
        clock: Where it notes what its token counts take.
    """

    running: before_engine.Process
    clock: Path

    def memory_mb(self, name: str) -> float:
        """Return a figure of its memory: `VmRSS`, what it has now, or `VmHWM`, the most it had."""
        text = Path(f"/proc/{self.running.process.pid}/status").read_text()
        found = re.search(rf"{name}:\s+(\d+) kB", text)
        assert found is not None
        return int(found[1]) / 1024

    def forget_peak(self) -> None:
        """Begin a new `VmHWM`."""
        Path(f"/proc/{self.running.process.pid}/clear_refs").write_text("5")


def start(folder: Path, engine: str, vocab: Path) -> Gateway:
    """Run a gateway before an engine that takes one request at a time: days of work may wait for it."""
    document = {
        "listen": "127.0.0.1:0",
        "admin": "127.0.0.1:0",
        "tokenizer": {"vocab": str(vocab)},
        "backends": {
            "one": {
                "url": engine,
                "profile": "h100-tp2-push",
                "limits": {"knee_seqs": 1, "context_tokens": WINDOW_TOKENS, "kv_blocks": None},
            }
        },
        "pools": {"all": {"backends": ["one"], "gates": {"long_prefills": None, "prefill_s": None}}},
        "models": {
            "gemma-4": {"classes": [{"class": "document", "pools": ["all"], "waiting": {"max_wait_s": 1e6}}]}
        },
    }
    clock = clocked.made(folder / "clock")
    program = ("benchmarks.overhead.clocked", str(clock))
    return Gateway(before_engine.start(folder / "gateway.yaml", document, program), clock)


async def metrics(port: int) -> str:
    """Return the operators' metrics."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    text = (await reader.read(-1)).decode()
    writer.close()
    return text


# ------------------------------------------------------------------ what is measured


async def cost_ms(gateway: Gateway, bodies: Sequence[bytes]) -> tuple[float, float]:
    """Return the CPU that the gateway takes for each of these, one after the other: all, and its count."""
    caller = Caller(gateway.running.port)
    await caller.ask(b'{"model":"gemma-4","messages":[{"role":"user","content":"Hi."}]}')
    before, counted_s = machine.snapshot({gateway.running.process.pid}), clocked.read_s(gateway.clock)
    for body in bodies:
        await caller.ask(body)
    used = machine.between(before, machine.snapshot({gateway.running.process.pid}))
    counted_s = clocked.read_s(gateway.clock) - counted_s
    caller.leave()
    return 1000 * used[gateway.running.process.pid] / len(bodies), 1000 * counted_s / len(bodies)


def look(port: int, told: Connection) -> None:
    """Ask for /livez every 2 ms until told to stop; then tell the waits in ms, in order of size."""
    waits: list[float] = []
    with socket.create_connection(("127.0.0.1", port)) as link:
        while not told.poll():
            asked = time.perf_counter()
            link.sendall(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
            data = b""
            while not data.endswith(b"ok"):
                data += link.recv(65_536)
            waits.append(1000 * (time.perf_counter() - asked))
            time.sleep(0.002)
    told.send(sorted(waits))


async def waits_ms(gateway: Gateway, bodies: Sequence[bytes], at_once: int) -> list[float]:
    """Return how long /livez took while these arrived back to back; idle for 3 s where there are none."""
    context = get_context("spawn")
    here, there = context.Pipe()
    looker = context.Process(target=look, args=(gateway.running.port, there), daemon=True)
    looker.start()
    await asyncio.sleep(1.5)  # an interpreter starts
    if not bodies:
        await asyncio.sleep(3)
    callers = [Caller(gateway.running.port) for _ in range(at_once)]
    left = list(bodies)

    async def send(caller: Caller) -> None:
        while left:
            await caller.ask(left.pop())

    await asyncio.gather(*(send(caller) for caller in callers))
    here.send(None)
    found: list[float] = await asyncio.to_thread(here.recv)
    looker.join()
    for caller in callers:
        caller.leave()
    return found


async def held_mb(gateway: Gateway, engine: Engine, bodies: Sequence[bytes]) -> tuple[float, ...]:
    """Return the gateway's memory with these at once, all but one of them in the line.

    In MB: before, at most, once all wait, and afterwards.
    """
    before = gateway.memory_mb("VmRSS")
    gateway.forget_peak()
    engine.is_open.clear()
    callers = [Caller(gateway.running.port) for _ in bodies]
    async with asyncio.TaskGroup() as tasks:
        for caller, body in zip(callers, bodies, strict=True):
            tasks.create_task(caller.ask(body))
        waits = 0.0
        while waits < len(bodies) - 1:
            await asyncio.sleep(0.2)
            waits = sum(map(float, _WAITING.findall(await metrics(gateway.running.admin_port))))
        waiting = gateway.memory_mb("VmRSS")
        engine.is_open.set()
    for caller in callers:
        caller.leave()
    return before, gateway.memory_mb("VmHWM"), waiting, gateway.memory_mb("VmRSS")


_WAITING = re.compile(r"^gateway_waiting\{[^}]*\} (\S+)$", re.MULTILINE)


async def report_cost(gateway: Gateway, documents: Documents, rounds: int) -> None:
    """Print what one request costs, by its size."""
    print("\nCPU per request, ms\n")
    print("| body | whole | its count | whole / count | all but the count | where it is remembered |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: |")
    for size in SIZES:
        several = max(4, 12_000_000 // size)
        first, again = [], []
        for _ in range(rounds):
            bodies = await documents.bodies(size, several)
            first.append(await cost_ms(gateway, bodies))
            again.append((await cost_ms(gateway, bodies * 10))[0])
        whole, count = min(first)
        beyond = min(one - counted for one, counted in first)
        print(f"| {size:,} | {whole:.1f} | {count:.1f} ", end="")
        print(f"| {whole / count:.2f} | {beyond:.2f} | {min(again):.2f} |")


async def report_waits(gateway: Gateway, documents: Documents) -> None:
    """Print how long others wait while documents are read."""
    print("\n/livez while documents arrive back to back, ms\n")
    print("| documents | at once | half | p99 | longest |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for name, size, different, times, at_once in (
        ("none", 0, 0, 1, 1),
        ("1 MB", SIZES[1], 60, 1, 2),
        ("1 MB, seen before", SIZES[1], 1, 300, 2),
        ("4 MB", SIZES[2], 16, 1, 2),
        ("4 MB, seen before", SIZES[2], 1, 100, 2),
    ):
        bodies = await documents.bodies(size, different)
        found = await waits_ms(gateway, bodies * times, at_once)
        p99 = found[int(0.99 * len(found))]
        print(f"| {name} | {at_once} | {found[len(found) // 2]:.1f} | {p99:.1f} | {found[-1]:.1f} |")


async def report_memory(gateway: Gateway, engine: Engine, documents: Documents) -> None:
    """Print what many documents at once hold."""
    print(f"\nMemory with {AT_ONCE} documents of {AT_ONCE_BYTES:,} bytes at once, MB\n")
    print("| before | most | all wait | afterwards | bodies' worth at most | while they wait |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: |")
    bodies = await documents.bodies(AT_ONCE_BYTES, AT_ONCE)
    before, most, waiting, after = await held_mb(gateway, engine, bodies)
    together = sum(map(len, bodies)) / 2**20
    print(
        f"| {before:.0f} | {most:.0f} | {waiting:.0f} | {after:.0f} "
        f"| {(most - before) / together:.2f} | {(waiting - before) / together:.2f} |"
    )


async def measure(vocab: Path, rounds: int, parts: Sequence[str]) -> None:
    """Measure, and print."""
    documents, engine = Documents(), Engine(WINDOW_TOKENS)
    server = await asyncio.start_server(engine.serve, "127.0.0.1", 0, limit=1 << 20)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    with tempfile.TemporaryDirectory() as folder:
        gateway = await asyncio.to_thread(start, Path(folder), url, vocab)
        try:
            if "memory" in parts:  # first: what was freed is kept
                await report_memory(gateway, engine, documents)
            if "cost" in parts:
                await report_cost(gateway, documents, rounds)
            if "waits" in parts:
                await report_waits(gateway, documents)
        finally:
            gateway.running.end()
    server.close()


def main() -> None:
    """Measure, and print tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vocab", type=Path, help="a rank file or a tokenizer.json")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=PARTS, help="one part of it")
    options = parser.parse_args()
    parts = PARTS if options.only is None else (options.only,)
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, ", end="")
    print(" ".join(platform.libc_ver()), f"load {os.getloadavg()[0]:.1f}", end=", ")
    if options.vocab is not None:
        print(f"vocabulary {options.vocab}")
        asyncio.run(measure(options.vocab.resolve(), options.rounds, parts))
        return
    print("a small vocabulary made for this: counts are slower than with Gemma's")
    made = runpy.run_path(str(Path(__file__).parents[1] / "tests" / "support" / "vocabulary.py"))

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        path.write_text(json.dumps(made["gemma_like"]()))
        asyncio.run(measure(path, options.rounds, parts))


if __name__ == "__main__":
    main()
