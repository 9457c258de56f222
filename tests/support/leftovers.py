"""Ends what a test run has started and left: when pytest is interrupted, terminated or killed.

Every process of a run inherits a variable of its environment, by which it and those that it has started are
found. A watcher, out of reach of a terminal's Ctrl-C, waits for the end of the pipe that pytest holds, which
comes however pytest ends.
"""

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

VARIABLE = "GATEWAY_TEST_RUN"


def end_with_this_process() -> Callable[[], None]:
    """Have everything that is started from now on end with this process; return what ends it now."""
    before = os.environ.get(VARIABLE)
    run = os.environ[VARIABLE] = secrets.token_hex(8)
    watcher = subprocess.Popen(
        [sys.executable, "-I", __file__, run], stdin=subprocess.PIPE, start_new_session=True
    )

    def end() -> None:
        watcher.communicate()
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before

    return end


def left_of(run: str) -> set[int]:
    """Return the processes of a run and their descendants, without this one."""
    mark = f"{VARIABLE}={run}".encode()
    found: set[int] = set()
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):  # none on a system without it
        pid = int(folder.name)
        with suppress(OSError):
            state, parent = (folder / "stat").read_text().rpartition(") ")[2].split()[:2]
            if state != "Z":
                parents[pid] = int(parent)
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.add(pid)
    found.discard(os.getpid())
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def main() -> None:
    """Wait for the end of standard input, and kill what is left of the run that the argument names."""
    sys.stdin.read()
    while left := left_of(sys.argv[1]):  # again: one may have started another meanwhile
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
