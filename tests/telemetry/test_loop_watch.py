"""The event loop's delay, measured by a loop that is held up."""

import time

import anyio
import anyio.lowlevel
from prometheus_client import CollectorRegistry

from gateway.clock import SystemClock
from gateway.telemetry.loop_watch import LOOK_S, LoopWatch


def compute(for_s: float) -> None:
    time.sleep(for_s)


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
