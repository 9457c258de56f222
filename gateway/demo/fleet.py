"""The demo's fleet: every simulated server, on a port of its own, in one event loop."""

from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack

import anyio

from gateway import simulator
from gateway.profiles import load

ANSWER_TOKENS = 260
"""Median length of an answer that ends by itself: long enough that a burst can be watched."""


async def run(
    profiles: Mapping[str, str], speed: float, announce: Callable[[Mapping[str, str]], None]
) -> None:
    """Run a server per entry of `profiles` (backend id to profile name) until cancelled.

    `announce` is called with their URLs once all of them accept connections.
    """
    async with AsyncExitStack() as servers:
        urls: dict[str, str] = {}
        for seed, (name, profile) in enumerate(profiles.items()):
            options = simulator.SimulatorOptions(
                profile=load(profile), speed=speed, seed=seed, answer_tokens=ANSWER_TOKENS
            )
            urls[name] = await servers.enter_async_context(simulator.running(options))
        announce(urls)
        await anyio.sleep_forever()
