"""A time limit that is cheap to move.

A stream moves its deadline with every read, forty times a second for each of a thousand streams. An anyio
cancel scope sets a new timer each time. Here, moving a deadline to a later time is a single assignment: the
timer is set again only when it fires too early.
"""

import asyncio
from math import inf
from types import TracebackType


class Deadline:
    """A context manager that cancels its block at a given time, by cancelling the current task.

    Attributes:
        at: The deadline. Assign to it to move it to a later time; use `move` for any time.
        latest: An upper bound on the deadline, regardless of `at`. May be moved while no earlier than `at`.
        has_passed: Whether the deadline ended the block; set when the block has ended.
    """

    __slots__ = (
        "_cancelling",
        "_is_expired",
        "_loop",
        "_task",
        "_timer",
        "_timer_at",
        "at",
        "has_passed",
        "latest",
    )

    def __init__(self, loop: asyncio.AbstractEventLoop, at: float) -> None:
        """Set the deadline to `at`, in seconds of the clock of `loop`, the running event loop."""
        self.has_passed = False
        self.latest = inf
        self.at = at
        self._loop = loop
        self._task: asyncio.Task[object] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._cancelling = 0
        self._is_expired = False

    def move(self, at: float) -> None:
        """Move the deadline to another time, which may be earlier."""
        self.at = at
        if self._timer is not None and at < self._timer_at:
            self._timer.cancel()
            self._set_timer()

    def __enter__(self) -> "Deadline":
        task = asyncio.current_task(self._loop)
        assert task is not None
        self._task, self._cancelling = task, task.cancelling()
        self._set_timer()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        assert self._task is not None
        assert self._timer is not None
        self._timer.cancel()
        task, self._task, self._timer = self._task, None, None
        if not self._is_expired:
            return False
        # A cancellation from elsewhere in the meantime must propagate.
        self.has_passed = task.uncancel() <= self._cancelling and kind is asyncio.CancelledError
        return self.has_passed

    def _set_timer(self) -> None:
        self._timer_at = min(self.at, self.latest)
        self._timer = self._loop.call_at(self._timer_at, self._look)

    def _look(self) -> None:
        if self._task is None or self._is_expired:
            return
        if self._loop.time() < min(self.at, self.latest):
            self._set_timer()
        else:
            self._is_expired = True
            self._task.cancel()
