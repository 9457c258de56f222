"""The event loop's delay, measured by a loop that is held up."""

import time
from collections.abc import Sequence

import anyio
import anyio.lowlevel
import pytest
from prometheus_client import CollectorRegistry
from support.world import StillClock

from gateway.clock import SystemClock
from gateway.telemetry.loop_watch import DUE_MAX, LOOK_S, LoopWatch


def compute(for_s: float) -> None:
    time.sleep(for_s)


@pytest.mark.parametrize(
    ("late_s", "delays_s"),
    [
        (0.04, [0.04]),
        (0.22, [0.22, 0.17, 0.12, 0.07, 0.02]),  # of the looks that would have been due meanwhile, too
        (86_400, [86_400 - LOOK_S * number for number in range(DUE_MAX)]),
    ],
)
async def test_every_look_says_how_late_it_is(late_s: float, delays_s: Sequence[float]) -> None:
    registry, clock = CollectorRegistry(), StillClock()
    watch = LoopWatch(registry, clock)

    def seen(name: str) -> float:
        return registry.get_sample_value(f"gateway_event_loop_delay_seconds_{name}") or 0.0

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch.run)
        await anyio.lowlevel.checkpoint()  # it sleeps by now
        clock.time += LOOK_S + late_s
        with anyio.fail_after(20):
            while seen("count") <= len(delays_s):  # the last one is in time
                await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
    assert seen("count") == len(delays_s) + 1
    assert seen("sum") == pytest.approx(sum(delays_s))


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
    assert watch._timer is not None
    assert watch._timer.cancelled()  # nothing is measured any more
