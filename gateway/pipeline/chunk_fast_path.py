"""The fast path for relaying a chunk of a stream.

With a thousand streams taking turns, the state of a stream has been evicted from the CPU caches by the time
its next chunk arrives. So the number of objects touched and calls made per chunk matters more than the work
done in them.
"""

from collections.abc import Callable
from typing import Protocol

from gateway.pipeline.deadline import Deadline
from gateway.ports import ChunkMatch


class Counter(Protocol):
    """A counter of chunks.

    Attributes:
        chunks: The count.
    """

    chunks: int


class NullCounter:
    """A counter whose count is ignored."""

    __slots__ = ("chunks",)

    def __init__(self) -> None:
        """Start at zero."""
        self.chunks = 0


class ChunkFastPath:
    """Recognizes chunks that can be relayed unparsed, and accounts for them.

    Attributes:
        chunks: Number of chunks recognized.
    """

    __slots__ = ("_counter", "_deadline", "_idle_s", "_look", "_now", "chunks")

    def __init__(
        self, look: ChunkMatch, counter: Counter, deadline: Deadline, idle_s: float, now: Callable[[], float]
    ) -> None:
        """Recognize chunks with `look`; move `deadline` to `now() + idle_s` after each."""
        self._look = look
        self._counter = counter
        self._deadline = deadline
        self._idle_s = idle_s
        self._now = now
        self.chunks = 0

    def match(self, data: bytes, start: int, end: int) -> bytes | None:
        """See `ports.StreamTransform.match`."""
        shown = self._look(data, start, end)
        if shown is not None:
            self.chunks += 1
            self._counter.chunks += 1
            self._deadline.at = self._now() + self._idle_s
        return shown
