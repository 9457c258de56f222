"""The demo's fleet: every simulated server, on a port of its own, in one event loop."""

from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack

import anyio

from gateway import simulator
from gateway.demo.site import BOOT_S
from gateway.profiles import load
from gateway.simulator.box_options import profile as of_box

ANSWER_TOKENS = 260
"""Median length of an answer that ends by itself. A choice: long enough that a burst can be watched."""


async def run(
    profiles: Mapping[str, str],
    boxes: Mapping[str, Mapping[str, str]],
    speed: float,
    announce: Callable[[Mapping[str, str]], None],
) -> None:
    """Run a server per entry of `profiles` (backend id to profile name) until cancelled.

    Those of one of the `boxes` share a memory, and the first of them has it. `announce` is called with the
    URLs of all, and those at which the boxes take orders, once they accept connections.
    """
    interval = max(1, round(speed))  # as many events per second of the clock as engines in real time send
    async with AsyncExitStack() as servers:
        urls: dict[str, str] = {}
        for seed, (name, profile) in enumerate(profiles.items()):
            options = simulator.SimulatorOptions(
                profile=load(profile),
                speed=speed,
                seed=seed,
                answer_tokens=ANSWER_TOKENS,
                stream_interval=interval,
                prompt_tokens_details=True,
            )
            urls[name] = await servers.enter_async_context(simulator.running(options))
        for box, members in boxes.items():
            models = {
                name: simulator.SimulatorOptions(
                    profile=of_box(profile),
                    speed=speed,
                    answer_tokens=ANSWER_TOKENS,
                    stream_interval=interval,
                    boot_s=BOOT_S,
                )
                for name, profile in members.items()
            }
            shared = simulator.BoxOptions(models, resident=next(iter(models)))
            machine = await servers.enter_async_context(simulator.simulated_box(shared))
            urls |= {name: model.url for name, model in machine.models.items()}
            urls[box] = machine.url
        announce(urls)
        await anyio.sleep_forever()
