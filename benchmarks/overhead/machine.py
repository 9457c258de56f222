"""What the processes of this machine have used, and where they may run. Linux only."""

import os
import platform
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
TICKS_TOLERATED = 3
"""By how many ticks the two clocks of CPU time may differ: each figure is rounded, and one more."""


@dataclass(frozen=True)
class Used:
    """What one process has used since it began.

    Attributes:
        exact_s: CPU seconds, of the threads that still live.
        ticks_s: The same of all threads that ever were and of children that have ended, in steps of 10 ms.
        name: What it is, in a word or two.
    """

    exact_s: float
    ticks_s: float
    name: str


Snapshot = dict[int, Used]


@contextmanager
def on_cores(cores: set[int]) -> Iterator[None]:
    """Have what is started within run on these cores alone."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _fields(pid: int) -> list[str]:
    """Return what /proc/PID/stat says after a process's name."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def named(words: Sequence[str]) -> str:
    """Return what a command line runs: a program, or a Python module or script with its number."""
    program = Path(" ".join(words[:1]).partition(" ")[0]).name  # some write their title there
    if not program.startswith("python"):
        return program.rstrip(":")
    if "-m" in words[:-1]:
        at = words.index("-m") + 1
        return " ".join([words[at], *(word for word in words[at + 1 : at + 2] if word.isdigit())])
    return next((Path(word).stem for word in words[1:] if not word.startswith("-")), program)


def tree(root: int) -> set[int]:
    """Return a process and all that stem from it or are of its session."""
    children: dict[int, list[int]] = {}
    found = set()
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            fields = _fields(int(entry))
            children.setdefault(int(fields[1]), []).append(int(entry))
            if int(fields[3]) == root:
                found.add(int(entry))
    waiting = [root]
    while waiting:
        pid = waiting.pop()
        found.add(pid)
        waiting += children.get(pid, [])
    return found


def snapshot(pids: set[int]) -> Snapshot:
    """Return what each of these processes has used so far; those that have ended are left out."""
    used = {}
    for pid in pids:
        with suppress(OSError):
            fields = _fields(pid)
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            exact_ns = 0
            for thread in os.listdir(f"/proc/{pid}/task"):
                with suppress(OSError):  # one that has just ended
                    exact_ns += int(Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()[0])
            used[pid] = Used(exact_ns / 1e9, sum(map(int, fields[11:15])) / TICKS_PER_S, named(words))
    return used


def between(before: Snapshot, after: Snapshot) -> dict[int, float]:
    """Return the CPU seconds each process used from one snapshot to the next.

    The exact figure, unless the ticks contradict it: threads that ended in between are lost to it.
    """
    nothing = Used(0, 0, "")
    found = {}
    for pid, now in after.items():
        was = before.get(pid, nothing)
        exact_s, ticks_s = now.exact_s - was.exact_s, now.ticks_s - was.ticks_s
        agree = abs(exact_s - ticks_s) <= max(TICKS_TOLERATED / TICKS_PER_S, 0.03 * ticks_s)
        found[pid] = exact_s if agree else ticks_s
    return found


def resident_mb(pids: set[int]) -> float:
    """Return the memory these processes hold, in MB of 2^20 bytes; what they share counts for each."""
    kilobytes = 0
    for pid in pids:
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                if line.startswith("VmRSS:"):
                    kilobytes += int(line.split()[1])
    return kilobytes / 1024


def free_port() -> int:
    """Return a port that nobody listens on right now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def stop(process: subprocess.Popen[bytes], patience_s: float = 5) -> None:
    """End a process that was started as a session of its own, and everything it has started."""
    family = tree(process.pid)
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in family:
            with suppress(OSError):
                os.kill(pid, number)
        until = time.monotonic() + patience_s
        while time.monotonic() < until:
            ended = process.poll() is not None
            family = {pid for pid in family if pid != process.pid and Path(f"/proc/{pid}").exists()}
            if ended and not family:
                return
            time.sleep(0.02)
        family.add(process.pid)


def described() -> str:
    """Return what this machine is."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    virtual = any(line.startswith("flags") and " hypervisor " in line for line in lines)
    processor = names[0] if names else platform.machine()
    where = " (virtual)" if virtual else ""
    return (
        f"{os.cpu_count()} cores of {processor}{where}, Linux {platform.release()}, {platform.libc_ver()[1]}"
    )


def output_of(command: Sequence[str]) -> str:
    """Return what a command says, on either of its outputs."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return (done.stdout + done.stderr).strip()
