"""Where log lines go. Nobody waits for whoever reads them.

A pipe takes 64 KiB. Once its reader has stopped (a log collector that hangs, a container runtime whose disk
is full), the next write waits for it, and with it the event loop: every stream, every probe, every health
check. So what goes to a pipe or a socket is held back while that takes nothing, and, beyond a limit, dropped
and counted. A file or a terminal is written to as usual.
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
"""Of lines that wait for a reader: some 2,500 requests."""

LAST_S = 1.0
"""How long the end of a process waits for a reader."""

_AGAIN_S = 0.01
_DESCRIPTORS = "/proc/self/fd"


class Outlet(ABC):
    """Takes lines.

    Attributes:
        dropped: How many lines nobody will ever read.
    """

    dropped: int = 0

    @property
    def is_behind(self) -> bool:
        """Whether lines are held back."""
        return False

    @abstractmethod
    def write(self, lines: Sequence[str]) -> None:
        """Write whole lines, and what is held back before them. With none: only what is held back."""

    @abstractmethod
    def close(self) -> None:
        """Write what is held back, if a reader takes it in time. What comes afterwards may be dropped."""


def outlet_of(stream: TextIO) -> Outlet:
    """Return what writes to a stream as its kind demands."""
    try:
        descriptor = stream.fileno()
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISFIFO(mode):
            return _into_pipe(descriptor)
        if stat.S_ISSOCK(mode):
            other = socket.socket(fileno=os.dup(descriptor))
            return Unwaiting(lambda data: other.send(data, socket.MSG_DONTWAIT), other.close)
    except (OSError, ValueError):  # no file at all
        pass
    return Waiting(stream)


def _into_pipe(descriptor: int) -> Outlet:
    """Return what writes into a pipe.

    Not to wait is a property of what was opened, which other processes share, and they are not to be changed.
    So the pipe is opened once more. Where that cannot be done (there is no /proc, or the user is not whom the
    pipe belongs to), the pipe is asked before each write, which fails only if another process fills it in
    that moment.
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

        return Unwaiting(put, lambda: None)
    return Unwaiting(partial(os.write, again), partial(os.close, again))


class Waiting(Outlet):
    """Writes to a stream, and waits until it has taken everything."""

    def __init__(self, stream: TextIO) -> None:
        """Write to `stream`."""
        self._stream = stream

    def write(self, lines: Sequence[str]) -> None:
        """See `Outlet.write`."""
        try:
            if lines:
                self._stream.write("".join(lines))
            self._stream.flush()
        except (OSError, ValueError):  # a full disk, a closed terminal
            self.dropped += len(lines)

    def close(self) -> None:
        """See `Outlet.close`. The stream is not this one's to close."""


class Unwaiting(Outlet):
    """Writes what is taken at once, and holds the rest back."""

    def __init__(self, put: Callable[[bytes], int], release: Callable[[], None]) -> None:
        """Write by `put`, which returns how many bytes were taken, or raises BlockingIOError if none were.

        `release` is called at the end.
        """
        self._put = put
        self._release = release
        self._is_closed = False
        self._held: deque[bytes] = deque()
        self._held_bytes = 0

    @property
    def is_behind(self) -> bool:
        """See `Outlet.is_behind`."""
        return bool(self._held)

    def write(self, lines: Sequence[str]) -> None:
        """See `Outlet.write`."""
        for text in lines:
            line = text.encode(errors="backslashreplace")
            if self._is_closed or self._held_bytes + len(line) > HELD_BYTES_MAX:
                self.dropped += 1
            else:
                self._held.append(line)
                self._held_bytes += len(line)
        self._write_held()

    def close(self) -> None:
        """See `Outlet.close`."""
        end = monotonic() + LAST_S
        while self._held and monotonic() < end:
            sleep(_AGAIN_S)
            self._write_held()
        self._give_up()
        if not self._is_closed:
            self._is_closed = True
            self._release()

    def _write_held(self) -> None:
        """Write until nothing more is taken; up to PIPE_BUF bytes at once, which no other writer's divide."""
        held = self._held
        while held:
            piece = held.popleft()
            while held and len(piece) + len(held[0]) <= select.PIPE_BUF:
                piece += held.popleft()
            try:
                taken = self._put(piece)
            except BlockingIOError:
                taken = 0
            except OSError:  # nobody will ever read it
                held.appendleft(piece)
                self._give_up()
                return
            self._held_bytes -= taken
            if taken < len(piece):
                held.appendleft(piece[taken:])
            if taken == 0:
                return

    def _give_up(self) -> None:
        """Drop what is held back."""
        self.dropped += sum(line.count(b"\n") for line in self._held)
        self._held.clear()
        self._held_bytes = 0
