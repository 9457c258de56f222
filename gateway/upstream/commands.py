"""Runs an operator's command: with a timeout, its output in the log, without a shell unless requested.

A command runs in its own session. Its output goes to an unlinked file (in memory, if no folder is writable),
so a server that it starts and that keeps its output open neither blocks anything nor is affected.
"""

import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO

import anyio

from gateway.core.value import valueclass
from gateway.events import about

log = logging.getLogger("gateway.boxes")

OUTPUT_BYTES_MAX = 4_000
"""Maximum bytes of a command's output that are logged: of more, the beginning and the end. A choice: a stack
trace fits, and the line stays readable."""

PRINTED_BYTES_MAX = 100_000_000
"""Maximum bytes that a command may print. A choice: far more than any prints on purpose. One that asks a
question over and over, because nobody answers, prints gigabytes before its time is up."""

LOOK_S = 0.05
"""Interval for checking whether a command has ended. A choice: a swap takes minutes."""

DIES_S = 2.0
"""How long a killed command may take to die. A choice: one that waits for a driver or a network disk does
not."""


_left: set[int] = set()
"""Ids of processes that could not be killed. One that dies later keeps its place in the process table until
it is waited for."""


@valueclass(frozen=True, slots=True)
class Command:
    """A command.

    Attributes:
        words: The program and its arguments; with `shell`, a single text for /bin/sh.
        shell: Whether to run it in a shell.
        timeout_s: Time limit.
        dies_with_us: Whether to kill it if the task that waits for it is cancelled.
    """

    words: Sequence[str]
    shell: bool = False
    timeout_s: float = 60.0
    dies_with_us: bool = False


async def run(command: Command, environ: Mapping[str, str]) -> str:
    """Run a command to its end. Return "", or why it failed: one line with the end of its output."""
    _wait_for_dead()
    try:
        with _output() as output:
            failure = await _ended(command, _started(command, environ, output), output)
            said = _said(output)
    except OSError as error:  # no such program, no more processes, no disk space
        return f"{command.words[0]}: {error.strerror or error}"
    for line in said:
        program = "sh" if command.shell else command.words[0]
        log.info("%s: %s", program, line, extra=about("command_output", command=program))
    return f"{failure}: {said[-1]}" if failure and said else failure


async def _ended(command: Command, process: "subprocess.Popen[bytes]", output: IO[bytes]) -> str:
    """Return how a process ended; kill it if it takes too long or prints too much."""
    excess = f"took more than {command.timeout_s:g} s"
    try:
        with anyio.move_on_after(command.timeout_s):
            while process.poll() is None:
                if os.fstat(output.fileno()).st_size > PRINTED_BYTES_MAX:
                    excess = f"printed more than {PRINTED_BYTES_MAX} bytes"
                    break
                await anyio.sleep(LOOK_S)  # asyncio kills what it does not wait for
    except anyio.get_cancelled_exc_class():
        if command.dies_with_us:
            await _kill(process)
        else:
            process.returncode = 0  # left running: its exit status is of no interest
        raise
    if process.poll() is None:  # it may have ended since the last look
        left = await _kill(process)
        return f"{excess}, and cannot be killed: {left}" if left else excess
    return f"exit status {process.returncode}" if process.returncode else ""


def _output() -> IO[bytes]:
    """Return a file for a command's output.

    Raises:
        OSError: it cannot be created.
    """
    try:
        return tempfile.TemporaryFile()
    except OSError:  # no folder is writable, as in a container with a read-only file system
        if sys.platform != "linux":
            raise
        return open(os.memfd_create("output"), "w+b")


def _started(command: Command, environ: Mapping[str, str], output: IO[bytes]) -> "subprocess.Popen[bytes]":
    words = ["/bin/sh", "-c", *command.words] if command.shell else list(command.words)
    return subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env={**os.environ, **environ},
        start_new_session=True,
    )


async def _kill(process: "subprocess.Popen[bytes]") -> str:
    """Kill a command and all its child processes in the same session.

    Return why it is left running, as one that runs as another user, as with sudo; "" if it is dead.
    """
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    except PermissionError:
        _leave(process)
        return "it runs as another user"
    with anyio.move_on_after(DIES_S, shield=True):
        while process.poll() is None:  # noqa: ASYNC110
            await anyio.sleep(LOOK_S)
    if process.returncode is not None:
        return ""
    _leave(process)
    return "it does not die"


def _leave(process: "subprocess.Popen[bytes]") -> None:
    process.returncode = 0  # its exit status is of no interest
    _left.add(process.pid)


def _wait_for_dead() -> None:
    for pid in list(_left):
        with suppress(ChildProcessError):
            if os.waitpid(pid, os.WNOHANG) == (0, 0):  # it is still running
                continue
        _left.discard(pid)


def _said(output: IO[bytes]) -> list[str]:
    size = output.seek(0, os.SEEK_END)
    output.seek(0)
    if size <= OUTPUT_BYTES_MAX:
        return _lines(output.read(OUTPUT_BYTES_MAX))
    beginning = output.read(OUTPUT_BYTES_MAX // 2)
    output.seek(size - OUTPUT_BYTES_MAX // 2)
    end = output.read(OUTPUT_BYTES_MAX // 2)
    return [*_lines(beginning), "...", *_lines(end)]


def _lines(text: bytes) -> list[str]:
    return [line for line in text.decode(errors="replace").splitlines() if line.strip()]
