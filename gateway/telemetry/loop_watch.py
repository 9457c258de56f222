"""Measures event loop delay: how long everything waits while something computes.

A task sleeps for a fixed time and measures how much longer it took. 20 measurements a second cost 5 ms of CPU
(one loaded x86 core, Python 3.11); a stall of any length is seen by the measurement that it delays.
"""

import anyio
from prometheus_client import CollectorRegistry, Histogram

from gateway.ports import Clock

LOOK_S = 0.05
# The gateway tolerates stalls of up to 25 ms; those caused by the OS scheduler are below 5.
BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class LoopWatch:
    """Measures the delay of the running event loop."""

    def __init__(self, registry: CollectorRegistry, clock: Clock) -> None:
        """Register with `registry`."""
        self._clock = clock
        self._delay = Histogram(
            "gateway_event_loop_delay_seconds",
            "How late the event loop ran a due task, in seconds.",
            buckets=BUCKETS_S,
            registry=registry,
        )

    async def run(self) -> None:
        """Measure until cancelled."""
        while True:
            due_at = self._clock.now() + LOOK_S
            await anyio.sleep(LOOK_S)
            self._delay.observe(max(0.0, self._clock.now() - due_at))
