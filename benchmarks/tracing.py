"""What tracing costs a request: CPU of the gateway's process with it and without, in one run.

    python benchmarks/tracing.py [--requests 3000] [--rounds 5]

One gateway per way of tracing runs before the same engine, a server in this process that answers at once.
Requests go to them in turns, so that what the machine does meanwhile is shared fairly; the CPU is what each
gateway's process has used, and the best of the rounds counts: neighbours only ever add. Spans are taken by a
receiver in this process, so that they are really encoded and sent.
"""

import argparse
import asyncio
import json
import os
import platform
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if not __package__:  # python benchmarks/tracing.py
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import before_engine

WAYS: Mapping[str, float | None] = {"off": None, "1 %": 0.01, "100 %": 1.0}
"""Share of requests that is kept, by the name of a way; None: no tracing at all."""

CONNECTIONS = 8
BODY = json.dumps(
    {"model": "gemma-4", "messages": [{"role": "user", "content": "Why is the sky blue? " * 10}]}
).encode()


@dataclass(frozen=True)
class Gateway:
    """A gateway that runs, and what its process has used per request, round by round."""

    running: before_engine.Process
    cpu_us: list[float] = field(default_factory=list)

    def used_s(self) -> float:
        """Return the CPU seconds its process has used so far, in user and system."""
        fields = Path(f"/proc/{self.running.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    async def ask(self, count: int) -> None:
        """Send it that many requests, one after the other on one connection."""
        caller = before_engine.Caller(self.running.port)
        for _ in range(count):
            await caller.ask(BODY)
        caller.leave()


def start(folder: Path, name: str, engine: str, share: float | None) -> Gateway:
    """Run a gateway that traces so."""
    document: dict[str, Any] = {
        "listen": "127.0.0.1:0",
        "admin": "off",
        "tokenizer": "approximate",
        "backends": {"light": {"url": engine, "profile": "h100-tp1-light"}},
        "pools": {
            "light": {"backends": ["light"], "gates": {"prefill_s": 3600}}
        },  # this engine reads at once
        "models": {
            "gemma-4": {"classes": [{"class": "chat", "pools": ["light"], "waiting": {"max_wait_s": 60}}]}
        },
    }
    if share is not None:
        document["telemetry"] = {"otlp": {"endpoint": engine}, "traces": {"share": share}}
    return Gateway(before_engine.start(folder / f"{name.split()[0]}.yaml", document))


async def measure(requests: int, rounds: int) -> Mapping[str, Gateway]:
    """Return the gateways with what they used."""
    serve = before_engine.Engine(window_tokens=32_768).serve
    server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=1 << 24)
    engine = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    with tempfile.TemporaryDirectory() as folder:
        gateways = {
            name: await asyncio.to_thread(start, Path(folder), name, engine, share)
            for name, share in WAYS.items()
        }
        try:
            for gateway in gateways.values():
                await asyncio.gather(*(gateway.ask(50) for _ in range(CONNECTIONS)))  # to warm up
            for _ in range(rounds):
                for gateway in gateways.values():
                    before = gateway.used_s()
                    each = requests // CONNECTIONS
                    await asyncio.gather(*(gateway.ask(each) for _ in range(CONNECTIONS)))
                    gateway.cpu_us.append((gateway.used_s() - before) / (each * CONNECTIONS) * 1e6)
        finally:
            for gateway in gateways.values():
                gateway.running.end()
    server.close()
    return gateways


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=3000, help="per gateway and round")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    gateways = asyncio.run(measure(options.requests, options.rounds))
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    print(f"{options.requests} requests, {options.rounds} rounds, CPU of the gateway's process\n")
    print("| kept | us per request, best | rounds | against none |")
    print("|---|---|---|---|")
    none = min(gateways["off"].cpu_us)
    for name, gateway in gateways.items():
        best = min(gateway.cpu_us)
        shown = " ".join(f"{one:.0f}" for one in gateway.cpu_us)
        print(f"| {name} | {best:.0f} | {shown} | {best / none - 1:+.1%} |")


if __name__ == "__main__":
    main()
