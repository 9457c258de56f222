"""Writes log lines without ever blocking on their reader.

A pipe holds 64 KiB. If its reader stops (a hanging log collector, a container runtime with a full disk), the
next write blocks, and with it the event loop: all streams, probes and health checks. So lines for a pipe or a
socket are buffered while it accepts nothing, and beyond a limit dropped and counted. Files and terminals are
written to directly.
"""

import os
import select
import socket
import stat
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from time import monotonic, sleep
from typing import TextIO

HELD_BYTES_MAX = 1024 * 1024
"""Maximum bytes buffered. A choice: some 2,500 requests."""

LAST_S = 1.0
"""How long the end of a process waits for a reader. A choice: the last lines, which say why, against the end
of the process."""

_AGAIN_S = 0.01
"""Interval between attempts meanwhile. A choice: a small part of `LAST_S`."""

_DESCRIPTORS = "/proc/self/fd"


class LogOutput(ABC):
    """A destination for log lines.

    Attributes:
        dropped: Number of dropped lines.
    """

    dropped: int = 0

    @property
    def is_behind(self) -> bool:
        """Whether lines are buffered."""
        return False

    @abstractmethod
    def write(self, lines: Sequence[str]) -> None:
        """Write complete lines, after any buffered ones. Without lines: only flush the buffer."""

    @abstractmethod
    def close(self) -> None:
        """Flush the buffer, if the reader reads in time. Later lines may be dropped."""


def outlet_of(stream: TextIO) -> LogOutput:
    """Return the writer for a stream according to its kind."""
    try:
        descriptor = stream.fileno()
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISFIFO(mode):
            return _into_pipe(descriptor)
        if stat.S_ISSOCK(mode):
            other = socket.socket(fileno=os.dup(descriptor))
            return NonBlockingOutput(lambda data: other.send(data, socket.MSG_DONTWAIT), other.close)
    except (OSError, ValueError):  # not a file descriptor
        pass
    return BlockingOutput(stream)


def _into_pipe(descriptor: int) -> LogOutput:
    """Return a non-blocking writer for a pipe.

    O_NONBLOCK is a property of the open file description, which other processes share and must not see
    changed. So the pipe is opened again. If that is impossible (no /proc, or a pipe of another user), the
    pipe is polled before each write, which can block only if another process fills it in that moment.
    """
    try:
        again = os.open(f"{_DESCRIPTORS}/{descriptor}", os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        poll = select.poll()
        poll.register(descriptor, select.POLLOUT)

        def put(data: bytes) -> int:
            if not poll.poll(0):
                raise BlockingIOError
            return os.write(descriptor, data[: select.PIPE_BUF])

        return NonBlockingOutput(put, lambda: None)
    return NonBlockingOutput(partial(os.write, again), partial(os.close, again))


class BlockingOutput(LogOutput):
    """Writes to a stream, blocking until it has accepted everything."""

    def __init__(self, stream: TextIO) -> None:
        """Write to `stream`."""
        self._stream = stream
        self._begin = ""  # a line break after a failure, which may have cut off a line

    def write(self, lines: Sequence[str]) -> None:
        """See `LogOutput.write`."""
        try:
            if lines:
                self._stream.write(self._begin + "".join(lines))
            self._stream.flush()
        except (OSError, ValueError):  # a full disk, a closed terminal
            self.dropped += len(lines)
            self._begin = "\n"
        else:
            self._begin = ""

    def close(self) -> None:
        """See `LogOutput.close`. The stream itself is not closed."""


class NonBlockingOutput(LogOutput):
    """Writes what is accepted without blocking, and buffers the rest."""

    def __init__(self, put: Callable[[bytes], int], release: Callable[[], None]) -> None:
        """Write with `put`, which returns the number of bytes accepted, or raises BlockingIOError.

        `release` is called at the end.
        """
        self._put = put
        self._release = release
        self._is_closed = False
        self._held: deque[bytes] = deque()
        self._held_bytes = 0

    @property
    def is_behind(self) -> bool:
        """See `LogOutput.is_behind`."""
        return bool(self._held)

    def write(self, lines: Sequence[str]) -> None:
        """See `LogOutput.write`."""
        for text in lines:
            line = text.encode(errors="backslashreplace")
            if self._is_closed or self._held_bytes + len(line) > HELD_BYTES_MAX:
                self.dropped += 1
            else:
                self._held.append(line)
                self._held_bytes += len(line)
        self._write_held()

    def close(self) -> None:
        """See `LogOutput.close`."""
        end = monotonic() + LAST_S
        while self._held and monotonic() < end:
            sleep(_AGAIN_S)
            self._write_held()
        self._give_up()
        if not self._is_closed:
            self._is_closed = True
            self._release()

    def _write_held(self) -> None:
        """Write until nothing more is accepted; PIPE_BUF bytes at a time, so that lines stay intact."""
        held = self._held
        while held:
            piece = held.popleft()
            while held and len(piece) + len(held[0]) <= select.PIPE_BUF:
                piece += held.popleft()
            try:
                taken = self._put(piece)
            except BlockingIOError:
                taken = 0
            except OSError:  # the reader is gone
                held.appendleft(piece)
                self._give_up()
                return
            self._held_bytes -= taken
            if taken < len(piece):
                held.appendleft(piece[taken:])
            if taken == 0:
                return

    def _give_up(self) -> None:
        """Drop the buffer."""
        self.dropped += sum(line.count(b"\n") for line in self._held)
        self._held.clear()
        self._held_bytes = 0
