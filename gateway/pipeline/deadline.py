"""Time limits that are cheap to set and to move.

A stream moves its deadline with every read, forty times a second for each of a thousand streams. An anyio
cancel scope sets a new timer each time. Here, all deadlines of an event loop share one timer, which is set
for the earliest of them: to open, move or close another one is a few assignments.
"""

import asyncio
from math import inf
from types import TracebackType

LATE_S = 0.5
"""A look at the deadlines that is later than this means that the whole process stood still. A choice: long
compared with every stall of its own (docs/performance.md)."""

GRACE_S = 0.1
"""How long they are then left alone, so that what has arrived meanwhile is read first. A choice: a few rounds
of a busy event loop."""

AGAIN_S = 0.01
"""How soon it is tried again to end a block that somebody else is ending. A choice: that takes a round of the
event loop."""


class Deadlines:
    """The open deadlines of one event loop.

    Attributes:
        loop: The event loop.
        at: When they are looked at next, in seconds of its clock; `inf` if none is open.
    """

    __slots__ = ("_opened", "_timer", "_was_late", "at", "loop")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start with none."""
        self.loop = loop
        self.at = inf
        self._timer: asyncio.TimerHandle | None = None
        self._opened: set[Deadline] = set()
        self._was_late = False

    def open(self, deadline: "Deadline") -> None:
        """Watch a deadline until `close`."""
        self._opened.add(deadline)
        self.watch(deadline)

    def close(self, deadline: "Deadline") -> None:
        """Watch a deadline no longer. The timer stays: if it is early for the others, it is set again."""
        self._opened.discard(deadline)

    def watch(self, deadline: "Deadline") -> None:
        """Look at the deadlines early enough for this one."""
        due = deadline.at if deadline.at < deadline.latest else deadline.latest
        if due < self.at:
            self._set(due)

    def _set(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self.at = at
        self._timer = self.loop.call_at(at, self._look)

    def _look(self) -> None:
        """End the blocks whose deadline has passed, and look again when the next one will."""
        now, planned = self.loop.time(), self.at
        self.at, self._timer = inf, None
        self._was_late = not self._was_late and -inf < planned < now - LATE_S
        if self._was_late:  # what has come wakes its reader, who moves the deadline, after the timers
            self._set(now + GRACE_S)
            return
        earliest = inf
        for deadline in tuple(self._opened):
            due = min(deadline.at, deadline.latest)
            if due <= now and not deadline.expire():
                due = now + AGAIN_S
            if now < due < earliest:
                earliest = due
        if earliest < inf:
            self._set(earliest)


class Deadline:
    """A context manager that cancels its block at a given time, by cancelling the current task.

    Attributes:
        at: The deadline. Assign to it to move it to a later time; use `move` for any time.
        latest: An upper bound on the deadline, regardless of `at`. Assign to it to move it to a later time;
            use `bound` for any time.
        has_passed: Whether the deadline ended the block; set when the block has ended.
    """

    __slots__ = ("_all", "_cancelling", "_is_expired", "_task", "at", "has_passed", "latest")

    def __init__(self, all_of_them: Deadlines, at: float) -> None:
        """Set the deadline to `at`, in seconds of the clock of the event loop of `all_of_them`."""
        self.has_passed = False
        self.latest = inf
        self.at = at
        self._all = all_of_them
        self._task: asyncio.Task[object] | None = None
        self._cancelling = 0
        self._is_expired = False

    def move(self, at: float) -> None:
        """Move the deadline to another time, which may be earlier."""
        self.at = at
        if at < self._all.at and self._task is not None:
            self._all.watch(self)

    def bound(self, latest: float) -> None:
        """Move the upper bound to another time, which may be earlier."""
        self.latest = latest
        if self._task is not None:
            self._all.watch(self)

    def __enter__(self) -> "Deadline":
        task = asyncio.current_task(self._all.loop)
        assert task is not None
        self._task, self._cancelling = task, task.cancelling()
        self._all.open(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self._all.close(self)
        task, self._task = self._task, None
        if not self._is_expired:
            return False
        assert task is not None
        # A cancellation from elsewhere in the meantime must propagate.
        self.has_passed = task.uncancel() <= self._cancelling and kind is asyncio.CancelledError
        return self.has_passed

    def expire(self) -> bool:
        """Cancel the block, once. Return False if somebody else is cancelling it: try again later.

        Until the task is told of a cancellation, another one would take its place, and a cancel scope would
        not recognize its own.
        """
        if self._task is not None and not self._is_expired:
            if self._task.cancelling() > self._cancelling:
                return False
            self._is_expired = True
            self._task.cancel()
        return True
