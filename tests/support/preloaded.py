"""The command, forked from a process that has loaded its modules, which takes 2 s of CPU on a slow machine.

What a test starts is a process of its own, with its own environment, directory and standard streams, and runs
what `gemma-gateway` runs, from its command line on. What it does not show is what loading does: tests of
that, and of what an interpreter does by itself, start one (`processes.COMMAND`).
"""

import atexit
import functools
import gc
import importlib
import json
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import anyio
import anyio.abc
from litestar import Litestar

MODULES = (
    *("gateway.__main__", "gateway.process", "gateway.app", "gateway.supervisor", "gateway.job_commands"),
    *("gateway.simulator", "gateway.simulator.server", "gateway.store.keeper", "gateway.upstream.control"),
    *("gateway.store.redis", "gateway.store.jobs", "gateway.store.batches", "gateway.store.files"),
    *("gateway.telemetry.tracing", "gateway.telemetry.otlp_metrics", "gateway.store.webhooks"),
    *("gateway.cli", "anyio._backends._asyncio", "uvicorn.lifespan.off"),
)


def _is_possible() -> bool:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):  # not Linux, or before 5.3, or in a sandbox
        return False
    return True


IS_POSSIBLE = _is_possible()

# ------------------------------------------------------------------ in the test


class Output(anyio.abc.ByteReceiveStream):
    """What a process writes into a pipe."""

    def __init__(self, pipe: int) -> None:
        """Read from `pipe`."""
        self._pipe = pipe

    async def receive(self, max_bytes: int = 65536) -> bytes:
        """Return some of it."""
        await anyio.wait_readable(self._pipe)
        if data := os.read(self._pipe, max_bytes):
            return data
        raise anyio.EndOfStream

    async def aclose(self) -> None:
        """Read no more of it."""
        os.close(self._pipe)


class Forked:
    """A process, as far as `anyio.abc.Process` is used here.

    Attributes:
        pid: Its number.
        stdout: What it writes to standard output, and to standard error if that is not apart.
        stderr: What it writes to standard error, if that is apart.
    """

    def __init__(self, pid: int, told: socket.socket, stdout: int, stderr: int | None) -> None:
        """Adopt a process whose end is told on `told` and which writes into these pipes."""
        self.pid = pid
        self.stdout = Output(stdout)
        self.stderr = None if stderr is None else Output(stderr)
        self._told = told
        self._status: int | None = None
        self._waiting = anyio.Lock()  # one task at a time may wait for a socket
        self._pidfd: int | None = None
        with suppress(ProcessLookupError):  # it has ended
            self._pidfd = os.pidfd_open(pid)

    @property
    def returncode(self) -> int | None:
        """Its exit status, negative for the signal that ended it; None while it runs."""
        if self._status is None:
            with suppress(BlockingIOError):
                self._status = int(self._told.recv(32) or -signal.SIGKILL)
        return self._status

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal; ProcessLookupError if it has ended."""
        if self._pidfd is None:
            raise ProcessLookupError
        signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    async def wait(self) -> int:
        """Return its exit status, once it has ended."""
        async with self._waiting:
            while (status := self.returncode) is None:
                await anyio.wait_readable(self._told)
        return status

    async def aclose(self) -> None:
        """Forget it."""
        self._told.close()
        await self.stdout.aclose()
        if self.stderr is not None:
            await self.stderr.aclose()
        if self._pidfd is not None:
            os.close(self._pidfd)


async def start(
    arguments: Sequence[str],
    environ: Mapping[str, str],
    *,
    own_group: bool = False,
    errors_apart: bool = False,
) -> Forked:
    """Run `gemma-gateway ARGUMENTS` in this directory, without standard input."""
    order = {"arguments": [*arguments], "environ": {**environ}, "group": own_group, "cwd": os.getcwd()}
    return await anyio.to_thread.run_sync(_ordered, json.dumps(order).encode(), errors_apart)


def _ordered(order: bytes, errors_apart: bool) -> Forked:
    told, theirs = socket.socketpair()
    pipes = [os.pipe() for _ in range(1 + errors_apart)]
    written = [end for _, end in pipes]
    try:
        with socket.socket(socket.AF_UNIX) as asked, theirs:
            asked.connect(_loaded())
            socket.send_fds(asked, [b"."], [written[0], written[-1], theirs.fileno()])
            asked.sendall(order)
    finally:
        for end in written:
            os.close(end)
    pid = int(told.recv(32))
    told.setblocking(False)
    return Forked(pid, told, pipes[0][0], pipes[1][0] if errors_apart else None)


@functools.cache
def _loaded() -> str:
    """Return where this process's loaded one listens; it ends with this process."""
    name = secrets.token_hex(16)
    process = subprocess.Popen(
        [sys.executable, "-P", __file__, name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    )
    atexit.register(process.communicate)
    assert process.stdout is not None
    assert process.stdout.readline() == b"loaded\n"
    return _address(name)


def _address(name: str) -> str:
    return f"\0{name}"  # in Linux's own namespace, not the file system's


# ------------------------------------------------------------------ in the process that is forked


def main() -> None:
    """Fork a process for each that is ordered, until standard input ends."""
    for module in MODULES:
        importlib.import_module(module)
    Litestar([], logging_config=None)  # the first one imports eighty modules: half of a start
    assert threading.active_count() == 1
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(_address(sys.argv[1]))
    listener.listen(64)
    gc.freeze()
    sys.stdout.write("loaded\n")
    asked = selectors.DefaultSelector()
    asked.register(sys.stdin, selectors.EVENT_READ)
    asked.register(listener, selectors.EVENT_READ)
    while True:
        for key, _ in asked.select():
            if key.fileobj is listener:
                order, outputs, told = _order(listener)
                pid = os.fork()
                if pid == 0:
                    _let_go(asked)
                    told.close()
                    _become(order, outputs)
                    return
                for output in outputs:
                    os.close(output)
                told.send(b"%d" % pid)
                asked.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, told))
            elif key.fileobj is sys.stdin:
                os._exit(0)
            else:
                asked.unregister(key.fileobj)
                os.close(key.fd)
                _tell_end(*key.data)


def _let_go(asked: selectors.BaseSelector) -> None:
    """Close everything that only the process that forks needs."""
    for key in list(asked.get_map().values()):
        if isinstance(key.fileobj, socket.socket):
            key.fileobj.close()
        elif key.data is not None:
            os.close(key.fd)
            key.data[1].close()
    asked.close()


def _tell_end(pid: int, told: socket.socket) -> None:
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with told, suppress(OSError):  # the test may be over
        told.send(b"%d" % status)


def _order(listener: socket.socket) -> tuple[dict[str, Any], Sequence[int], socket.socket]:
    """Return what is ordered, its standard output and error, and whom to tell about it."""
    asked, _ = listener.accept()
    with asked:
        _, (*outputs, told), _, _ = socket.recv_fds(asked, 1, 3)
        order = b"".join(iter(lambda: asked.recv(65536), b""))
    return json.loads(order), outputs, socket.socket(fileno=told)


def _become(order: Mapping[str, Any], outputs: Sequence[int]) -> None:
    """Be the process that was ordered, up to its program."""
    if order["group"]:
        os.setsid()
    os.chdir(order["cwd"])
    os.environ.clear()
    os.environ.update(order["environ"])
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, stream in enumerate((nothing, *outputs)):
        os.dup2(stream, number)
    for stream in (nothing, *outputs):
        os.close(stream)
    sys.argv = ["gemma-gateway", *order["arguments"]]


if __name__ == "__main__":
    main()
    from gateway.__main__ import main as command

    command()
