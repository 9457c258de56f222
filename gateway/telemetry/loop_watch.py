"""How late the event loop is: what everybody waits for when somebody computes.

A task that sleeps for a while and looks how much longer that took. 20 looks a second cost 5 ms of CPU (one
loaded x86 core, Python 3.11); a stall of any length is seen by the one look that it delays.
"""

import anyio
from prometheus_client import CollectorRegistry, Histogram

from gateway.ports import Clock

LOOK_S = 0.05
# A stall of 25 ms is the most that the gateway allows itself; what a scheduler does is below 5.
BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class LoopWatch:
    """Measures the event loop that it runs in."""

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
        """Look until cancelled."""
        while True:
            due_at = self._clock.now() + LOOK_S
            await anyio.sleep(LOOK_S)
            self._delay.observe(max(0.0, self._clock.now() - due_at))
