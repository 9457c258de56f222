"""A gateway that notes how much CPU its tokenizer takes: what it does beyond the count is the rest.

    python -m benchmarks.overhead.clocked FILE serve -c gateway.yaml

is `python -m gateway serve -c gateway.yaml`, but for a clock around the engine that tiktoken's `Encoding`
calls: the CPU of the calling thread, from the call to its return. FILE has the sum in nanoseconds, as eight
bytes, little endian. Whatever the gateway does to a text before and after that is outside.

A count in a process of its own is faster than one between requests, whose caches others use as well: by more
than everything else that a gateway does with a document.
"""

import mmap
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from time import thread_time_ns
from typing import Any

import tiktoken.core

from gateway.cli import main as gateway

_SUM = struct.Struct("<Q")
_tiktoken: Any = vars(tiktoken.core)["_tiktoken"]  # the compiled part of it, which has no types


def made(path: Path) -> Path:
    """Return the file of a clock that has not run yet."""
    path.write_bytes(_SUM.pack(0))
    return path


def read_s(path: Path) -> float:
    """Return the CPU seconds that a clock has counted so far."""
    return float(_SUM.unpack(path.read_bytes())[0]) / 1e9


class Clock:
    """A sum of CPU time, of all threads, in a file."""

    def __init__(self, path: Path) -> None:
        """Go on with the sum in a file."""
        with path.open("r+b") as file:
            self._sum = mmap.mmap(file.fileno(), _SUM.size)
        self._lock = Lock()

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function whose CPU time is added."""

        def timed(*args: Any) -> Any:
            began = thread_time_ns()
            try:
                return function(*args)
            finally:
                used = thread_time_ns() - began
                with self._lock:
                    _SUM.pack_into(self._sum, 0, _SUM.unpack_from(self._sum)[0] + used)

        return timed


def timed_engine(clock: Clock) -> type:
    """Return tiktoken's engine with its encoding timed."""
    engine = _tiktoken.CoreBPE

    class Timed:
        """`CoreBPE`: what encodes is timed, everything else is as it was."""

        def __init__(self, *args: Any) -> None:
            self._engine = engine(*args)

        def __getattr__(self, name: str) -> Any:
            found = getattr(self._engine, name)
            if name.startswith("encode"):
                found = clock.around(found)
            setattr(self, name, found)  # looked up once
            return found

    return Timed


def put_around_counts(path: Path) -> None:
    """Have a file's clock run in whatever tiktoken's encodings are made from now on."""
    _tiktoken.CoreBPE = timed_engine(Clock(path))


def main() -> None:
    """Run a gateway."""
    put_around_counts(Path(sys.argv.pop(1)))
    gateway()


if __name__ == "__main__":
    main()
