"""Runs an operator's command: bounded in time, its output in the log, without a shell unless asked for.

A command goes on in a session of its own. Its output goes to a file that nobody else sees: where it
starts a server that forgets to let go of its output, nothing waits for that, and nothing breaks it.
"""

import contextlib
import logging
import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO

import anyio

from gateway.events import about

log = logging.getLogger("gateway.boxes")

OUTPUT_BYTES_MAX = 4_000
"""Of what a command writes, this much is logged."""

LOOK_S = 0.05
"""Between two looks at whether a command has ended."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command.

    Attributes:
        words: The program and its arguments; with `shell`, one text for /bin/sh.
        shell: Whether a shell runs it.
        timeout_s: How long it may take.
        dies_with_us: Whether it is killed when whoever waits for it is cancelled.
    """

    words: Sequence[str]
    shell: bool = False
    timeout_s: float = 60.0
    dies_with_us: bool = False


async def run(command: Command, environ: Mapping[str, str]) -> str:
    """Run a command to its end. Returns "", or why it failed: one line, with the last it wrote."""
    try:
        with tempfile.TemporaryFile() as output:
            failure = await _ended(command, _started(command, environ, output))
            said = _said(output)
    except OSError as error:  # no such program, no more processes, no space left
        return f"{command.words[0]}: {error.strerror or error}"
    for line in said:
        program = "sh" if command.shell else command.words[0]
        log.info("%s: %s", program, line, extra=about("command_output", command=program))
    return f"{failure}: {said[-1]}" if failure and said else failure


async def _ended(command: Command, process: "subprocess.Popen[bytes]") -> str:
    """Return how a process has ended; one that takes too long is killed."""
    try:
        with anyio.move_on_after(command.timeout_s):
            while process.poll() is None:  # noqa: ASYNC110 - asyncio kills what it does not wait for
                await anyio.sleep(LOOK_S)
    except anyio.get_cancelled_exc_class():
        if command.dies_with_us:
            _kill(process)
        else:
            process.returncode = 0  # left to finish: nobody here will hear of its end
        raise
    if process.returncode is None:
        _kill(process)
        return f"took more than {command.timeout_s:g} s"
    return f"exit status {process.returncode}" if process.returncode else ""


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


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """End a command and all that it has started and not let go of."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _said(output: IO[bytes]) -> list[str]:
    output.seek(0)
    text = output.read(OUTPUT_BYTES_MAX + 1)
    lines = text[:OUTPUT_BYTES_MAX].decode(errors="replace").splitlines()
    return [line for line in lines if line.strip()] + (["..."] if len(text) > OUTPUT_BYTES_MAX else [])
