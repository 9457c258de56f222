"""Measures event loop delay: how long everything waits while something computes.

A timer is set for a fixed time, and how late it runs is measured. A stall of any length is seen by the
measurement that it delays.
"""

import asyncio

import anyio
from prometheus_client import CollectorRegistry

from gateway.ports import Clock
from gateway.telemetry.series import Histograms

LOOK_S = 0.05
"""Interval between two measurements. A choice: 20 a second take 2.2 ms of CPU."""

BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
"""Buckets of the delay. A choice around what counts: stalls of up to 25 ms are tolerated
(docs/performance.md), and those caused by the OS scheduler are below 5."""


class LoopWatch:
    """Measures the delay of the running event loop.

    By timers of the loop, not in a sleeping task: 20 looks a second take 2.2 ms of CPU instead of 3.5 with
    `anyio.sleep` and prometheus_client's histogram (one loaded x86 core, Python 3.11).
    """

    def __init__(self, registry: CollectorRegistry, clock: Clock) -> None:
        """Register with `registry`."""
        self._clock = clock
        self._due_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._delay = Histograms(
            "gateway_event_loop_delay_seconds",
            "How late the event loop ran a due task, in seconds.",
            buckets=BUCKETS_S,
            registry=registry,
        )

    async def run(self) -> None:
        """Measure until cancelled."""
        self._wait(asyncio.get_running_loop())
        try:
            await anyio.sleep_forever()
        finally:
            if self._timer is not None:
                self._timer.cancel()

    def _wait(self, loop: asyncio.AbstractEventLoop) -> None:
        self._due_at = self._clock.now() + LOOK_S
        self._timer = loop.call_later(LOOK_S, self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._delay.observe((), max(0.0, self._clock.now() - self._due_at))
        self._wait(loop)
