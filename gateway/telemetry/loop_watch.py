"""Measures event loop delay: how long everything waits while something computes.

A timer is set for a fixed time, and how late it runs is measured. A stall delays one measurement only, so
those that would have been due meanwhile are recorded with it, each as late as it would have been. Otherwise,
a loop that stands still for two seconds of ten would be late in one measurement of 160.
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

DUE_MAX = 1200
"""The most measurements that are recorded for one stall. A choice: a minute of them; a process that was
suspended for a day would record 1.7 million."""


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
        late_s = max(0.0, self._clock.now() - self._due_at)
        due = min(DUE_MAX, 1 + int(late_s / LOOK_S))
        self._delay.observe_all((), [late_s - LOOK_S * number for number in range(due)])
        self._wait(loop)
