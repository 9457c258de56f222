"""The event loop's delay, measured by a loop that is held up."""

import time

import anyio
import anyio.lowlevel
import pytest
from prometheus_client import CollectorRegistry
from support.world import StillClock

from gateway.clock import SystemClock
from gateway.telemetry.loop_watch import LOOK_S, LoopWatch


def compute(for_s: float) -> None:
    time.sleep(for_s)


async def test_every_look_says_how_late_it_is() -> None:
    registry, clock = CollectorRegistry(), StillClock()
    watch = LoopWatch(registry, clock)

    def seen(name: str) -> float:
        return registry.get_sample_value(f"gateway_event_loop_delay_seconds_{name}") or 0.0

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch.run)
        await anyio.lowlevel.checkpoint()  # it sleeps by now
        clock.time += LOOK_S + 0.6
        with anyio.fail_after(20):
            while seen("count") < 2:  # the second one is in time
                await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
    assert seen("sum") == pytest.approx(0.6)


async def test_a_stall_of_the_loop_is_seen() -> None:
    registry = CollectorRegistry()
    watch = LoopWatch(registry, SystemClock())

    def looks(**bucket: str) -> float:
        name = "bucket" if bucket else "count"
        return registry.get_sample_value(f"gateway_event_loop_delay_seconds_{name}", bucket) or 0.0

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch.run)
        await anyio.lowlevel.checkpoint()  # it sleeps by now
        compute(LOOK_S + 0.6)  # the look is 0.6 s late at least
        with anyio.fail_after(20):
            while not looks():
                await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
    assert looks(le="0.5") < looks(le="+Inf")
