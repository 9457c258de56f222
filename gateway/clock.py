"""The system's clocks, behind the port from which everything else gets its time."""

import time


class SystemClock:
    """`ports.Clock` by the system's clocks."""

    # Called some twenty times per request: aliases avoid a Python frame.
    now = staticmethod(time.monotonic)
    wall = staticmethod(time.time)  # noqa: TID251 - the one place where the wall clock is read
