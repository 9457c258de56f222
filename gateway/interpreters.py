"""Fresh interpreters, in which the gateway's own processes run."""

import os
import sys
from collections.abc import Mapping, Sequence

import anyio
from anyio.abc import Process


def command(module: str) -> list[str]:
    """Return the command that runs a module with this process's code, not the current folder's."""
    try:
        flags = [] if os.getcwd() in sys.path else ["-P"]
    except FileNotFoundError:  # it has been deleted
        flags = ["-P"]
    return [sys.executable, *flags, "-m", module]


async def start(
    command: Sequence[str],
    *,
    stderr: int | None = None,
    env: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
) -> Process:
    """Start a process with pipes for its input and output, and without `stderr`, this process's.

    It has a session of its own: the terminal's Ctrl-C goes to this process only, which ends it in order. A
    start cannot be cancelled midway: nobody would wait for the process.
    """
    with anyio.CancelScope(shield=True):
        process = await anyio.open_process(
            command, stderr=stderr, env=env, pass_fds=pass_fds, start_new_session=True
        )
    return process  # noqa: RET504 - mypy allows for a scope that swallows errors
