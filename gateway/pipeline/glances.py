"""What is done for nearly every read of a stream: as little as can be.

A thousand streams take turns, and by the time one of them has its next chunk, what belongs to it has left
the processor's caches. So it counts how many objects are touched for a chunk, and how many calls are made,
more than what is done in them.
"""

from collections.abc import Callable
from typing import Protocol

from gateway.pipeline.deadline import Deadline
from gateway.ports import Glance


class Counter(Protocol):
    """What counts chunks.

    Attributes:
        chunks: How many.
    """

    chunks: int


class Uncounted:
    """Counts what nobody asks for."""

    __slots__ = ("chunks",)

    def __init__(self) -> None:
        """Begin with none."""
        self.chunks = 0


class Glances:
    """Knows chunks of one stream at a glance, and notes each.

    Attributes:
        chunks: How many it knew.
    """

    __slots__ = ("_counter", "_deadline", "_idle_s", "_look", "_now", "chunks")

    def __init__(
        self, look: Glance, counter: Counter, deadline: Deadline, idle_s: float, now: Callable[[], float]
    ) -> None:
        """Know what `look` knows; put `deadline` off to `idle_s` after each, in the seconds of `now`."""
        self._look = look
        self._counter = counter
        self._deadline = deadline
        self._idle_s = idle_s
        self._now = now
        self.chunks = 0

    def glance(self, data: bytes, start: int, end: int) -> bytes | None:
        """See `ports.Pouring.glance`."""
        shown = self._look(data, start, end)
        if shown is not None:
            self.chunks += 1
            self._counter.chunks += 1
            self._deadline.at = self._now() + self._idle_s
        return shown
