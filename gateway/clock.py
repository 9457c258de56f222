"""The system's clocks, behind the port that everything else takes its time from."""

import time


class SystemClock:
    """`ports.Clock` by the system's clocks."""

    def now(self) -> float:
        """See `ports.Clock.now`."""
        return time.monotonic()

    def wall(self) -> float:
        """See `ports.Clock.wall`."""
        return time.time()  # noqa: TID251 - the one place where the wall clock is read
