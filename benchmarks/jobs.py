"""What jobs and chats get of the same backends: `python benchmarks/jobs.py`, about five minutes.

Two simulated H100s at the speed of real ones, a gateway with jobs and a Valkey beside it (the extra
`workers`, or `valkey-server` on PATH). More jobs than the fleet can hold are submitted, of 200 tokens of
output each; from five seconds later on, 60 chats come at 2.5 a second. Printed is how long these wait for
their first token, once where jobs may use everything, and once with what they leave free by default. Then,
with nothing else to do, how long 120 jobs take.

The gateway, the simulated servers and the callers share one process, so that milliseconds beyond the
simulated ones are theirs together.
"""

import argparse
import logging
import os
import platform
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import openai
import yaml

if not __package__:  # python benchmarks/jobs.py
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gateway import profiles, settings
from gateway.app import Gateway
from gateway.core.health import State
from gateway.simulator.options import SimulatorOptions
from gateway.simulator.server import simulator
from gateway.store.embedded import valkey_in

PROFILE = "h100-tp1-light"
BACKENDS = ("light-0", "light-1")
RULES: Mapping[str, Mapping[str, float]] = {
    "jobs use everything": {"reserve": 0.0, "prefill_s": 86_400.0},
    "with the limits": {},
}
LENGTHS = {4_000: 400, 400: 800}
"""Words of a job's prompt, and how many jobs are submitted: more than end while the chats come."""

CHATS, CHATS_PER_S, LEAD_S = 60, 2.5, 5.0
JOBS_ALONE, WORDS_ALONE = 120, 4_000
WORDS = ["report", "figure", "number", "quarter", "plan", "result", "engine", "memory"]


@asynccontextmanager
async def site(rules: Mapping[str, float]) -> AsyncIterator[openai.AsyncOpenAI]:
    """Run the fleet and the gateway while the block runs; jobs leave free what `rules` say."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gemma-gateway-benchmark-")))
        options = SimulatorOptions(profile=profiles.load(PROFILE))
        urls = {name: (await stack.enter_async_context(simulator(options))).url for name in BACKENDS}
        config = folder / "gateway.yaml"
        document = {
            "listen": "127.0.0.1:0",
            "admin": False,
            "tokenizer": "approximate",
            "backends": {name: {"url": url, "profile": PROFILE} for name, url in urls.items()},
            "pools": {"light": {"backends": list(urls), "jobs": dict(rules)}},
            "models": {"gemma-4": {"classes": [{"class": "chat", "pools": ["light"]}]}},
            "store": {"url": (await stack.enter_async_context(valkey_in(folder))).url},
            "jobs": {},
        }
        config.write_text(yaml.safe_dump(document), encoding="utf-8")
        gateway = Gateway(settings.load(config), {})
        running = await stack.enter_async_context(gateway.running())
        await gateway.fleet.wait_for(
            lambda known: all(status.state is State.UP and status.served_models for status in known.values())
        )
        client = openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="unused", max_retries=0)
        yield await stack.enter_async_context(client)


async def submitted(client: openai.AsyncOpenAI, count: int, words: int) -> list[str]:
    """Submit jobs with prompts of that many words, and return their ids."""
    text = " ".join(WORDS[number % len(WORDS)] for number in range(words))
    fields: dict[str, Any] = {"model": "gemma-4", "background": True, "max_output_tokens": 200}
    return [(await client.responses.create(input=f"{number} {text}", **fields)).id for number in range(count)]


async def first_tokens_s(client: openai.AsyncOpenAI) -> tuple[list[float], int]:
    """Send the chats. Return how long each waited for its first token, sorted, and how many were refused."""
    waits: list[float] = []
    refused = 0

    async def chat(number: int) -> None:
        nonlocal refused
        asked_at = time.monotonic()
        try:
            stream = await client.chat.completions.create(
                model="gemma-4",
                messages=[{"role": "user", "content": f"Hello {number}"}],
                max_tokens=50,
                stream=True,
            )
        except openai.RateLimitError:
            refused += 1
            return
        async with stream:
            async for chunk in stream:
                if chunk.choices and chunk.choices[0].delta.content:
                    waits.append(time.monotonic() - asked_at)
                    break

    async with anyio.create_task_group() as tasks:
        for number in range(CHATS):
            tasks.start_soon(chat, number)
            await anyio.sleep(1 / CHATS_PER_S)
    return sorted(waits), refused


async def beside_chats(name: str, words: int) -> None:
    """Print a row: what chats get beside jobs."""
    async with site(RULES[name]) as client:
        await submitted(client, LENGTHS[words], words)
        await anyio.sleep(LEAD_S)
        waits, refused = await first_tokens_s(client)
    p50, p90 = waits[len(waits) // 2], waits[int(0.9 * len(waits))]
    print(f"| {words:,} words, {name} | {p50:.2f} s, {p90:.2f} s | {refused} of {CHATS} |", flush=True)


async def alone(name: str) -> None:
    """Print a row: how long jobs take that have the fleet for themselves."""
    async with site(RULES[name]) as client:
        began_at = time.monotonic()
        left = await submitted(client, JOBS_ALONE, WORDS_ALONE)
        while left:
            status = (await client.responses.retrieve(left[-1])).status
            if status in ("queued", "in_progress"):
                await anyio.sleep(0.2)
            else:
                left.pop()
        took_s = time.monotonic() - began_at
    print(f"| {name} | {took_s:.0f} s |", flush=True)


async def measure() -> None:
    """Measure, and print the tables."""
    print("\n| beside jobs of | first token of the chats, p50 and p90 | refused |\n|---|---|---|")
    for words in LENGTHS:
        for name in RULES:
            await beside_chats(name, words)
    print(f"\n| {JOBS_ALONE} jobs of {WORDS_ALONE:,} words alone | took |\n|---|---|")
    for name in RULES:
        await alone(name)


def main() -> None:
    """Measure, and print tables."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, ", end="")
    print(f"load {os.getloadavg()[0]:.1f}")
    logging.getLogger("gateway").setLevel(logging.ERROR)  # refusals are counted
    anyio.run(measure)


if __name__ == "__main__":
    main()
