"""The system's clocks, behind the port that everything else takes its time from."""

import time


class SystemClock:
    """`ports.Clock` by the system's clocks."""

    # Called some twenty times for a request: without a frame of Python's in between.
    now = staticmethod(time.monotonic)
    wall = staticmethod(time.time)  # noqa: TID251 - the one place where the wall clock is read
