"""Real processes of the real command, started for a test and surely gone after it."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import httpx
from anyio.streams.text import TextReceiveStream

from support import clients, preloaded

READY_S = 60.0
STARTED_S = 300.0  # where many start at once
LOOK_S = 0.02  # between two looks at another process: a busy loop would slow what it waits for
COMMAND = [sys.executable, "-m", "gateway"]


class Process:
    """A running `gemma-gateway` command.

    Attributes:
        process: The process.
        output: Everything it has written, standard output and error together.
    """

    def __init__(self, process: anyio.abc.Process | preloaded.Forked) -> None:
        """Watch `process`."""
        self.process = process
        self.output = ""
        self._grown = anyio.Event()

    async def read(self) -> None:
        """Collect its output until it ends."""
        assert self.process.stdout is not None
        async for text in TextReceiveStream(self.process.stdout, errors="replace"):
            self.output += text
            self._grown.set()
            self._grown = anyio.Event()
        self.output += "\n<ended>"
        self._grown.set()

    async def wait_for(self, pattern: str, within_s: float = READY_S) -> re.Match[str]:
        """Return the first match of `pattern` in its output, once there is one."""
        with anyio.move_on_after(within_s):
            while True:
                grown = self._grown
                if match := re.search(pattern, self.output):
                    return match
                if self.output.endswith("<ended>"):
                    break
                await grown.wait()
        raise AssertionError(f"no {pattern!r} in:\n{self.output}")

    async def end(self, *signals: signal.Signals, within_s: float = 30.0) -> int:
        """Send signals, and return its exit status."""
        for one in signals:
            self.process.send_signal(one)
        with anyio.fail_after(within_s):
            return await self.process.wait()


def parent_of(pid: int) -> int:
    """Return the process that started `pid`."""
    return int(_state(pid)[1])


def children_of(pid: int) -> set[int]:
    """Return the processes that `pid` has started."""
    children = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if parent_of(int(folder.name)) == pid:
                children.add(int(folder.name))
    return children


def descendants(pid: int) -> set[int]:
    """Return every process that `pid` has started, and those that they have."""
    children = children_of(pid)
    return children.union(*(descendants(child) for child in children))


def is_there(pid: int) -> bool:
    """Return whether a process runs."""
    try:
        # One that has ended stays in the table until whoever inherited it looks.
        return _state(pid)[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


async def until(holds: Callable[[], Awaitable[bool]], within_s: float = 30.0) -> None:
    """Return once `holds()`; what it asks belongs to other processes, so it is asked again and again."""
    with anyio.fail_after(within_s):
        while True:
            if await holds():
                return
            await anyio.sleep(LOOK_S)


async def wait_asleep(pid: int) -> None:
    """Return once a process waits for something.

    CPython runs the handler of a signal that comes just before a system call after that call only.
    """

    async def is_asleep() -> bool:
        return _state(pid)[0] == "S"

    await until(is_asleep)


async def wait_gone(*pids: int) -> None:
    """Return once none of these processes runs."""

    async def are_gone() -> bool:
        return not any(is_there(pid) for pid in pids)

    await until(are_gone)


def _state(pid: int) -> list[str]:
    """Return state, parent, group and so on of a process: what follows its name."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()


@asynccontextmanager
async def running(
    *arguments: str, environ: dict[str, str] | None = None, own_group: bool = False
) -> AsyncIterator[Process]:
    """Run `gemma-gateway ARGUMENTS` while the block runs; killed at its end if still there.

    `own_group`: as a terminal starts it, so that a signal to its process group reaches nobody else.
    """
    variables = {**os.environ, "PYTHONUNBUFFERED": "1", "NO_COLOR": "1", **(environ or {})}
    process: anyio.abc.Process | preloaded.Forked
    if preloaded.IS_POSSIBLE and not any(name.startswith("PYTHON") for name in environ or ()):
        process = await preloaded.start(arguments, variables, own_group=own_group)
    else:
        process = await anyio.open_process(
            [*COMMAND, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=variables,
            start_new_session=own_group,
        )
    watched = Process(process)
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watched.read)
            try:
                yield watched
            finally:
                with anyio.CancelScope(shield=True):
                    if process.returncode is None:
                        with suppress(ProcessLookupError):  # it has ended just now
                            process.kill()
                    await process.wait()
                tasks.cancel_scope.cancel()
    finally:
        await process.aclose()  # nobody reads its output any more


@dataclass
class Said:
    """What a command has said, and its exit status."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """What it has written to standard output, read as JSON."""
        return json.loads(self.out)


async def command(*arguments: str, **environ: str) -> Said:
    """Run `gemma-gateway ARGUMENTS` to its end."""
    variables = {**os.environ, "NO_COLOR": "1", **environ}
    if not preloaded.IS_POSSIBLE:
        done = await anyio.run_process([*COMMAND, *arguments], check=False, env=variables)
        return Said(done.returncode, done.stdout.decode(), done.stderr.decode())
    process = await preloaded.start(arguments, variables, errors_apart=True)
    assert process.stderr is not None
    written = {process.stdout: b"", process.stderr: b""}

    async def read(output: preloaded.Output) -> None:
        async for data in output:
            written[output] += data

    try:
        async with anyio.create_task_group() as tasks:
            for output in written:
                tasks.start_soon(read, output)
        out, err = written.values()
        return Said(await process.wait(), out.decode(), err.decode())
    finally:
        await process.aclose()


@contextmanager
def reserved_port() -> Iterator[int]:
    """Keep a port for servers that come and go: nobody else gets it, and connecting to it is refused."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


class Mortal:
    """A `gemma-gateway` command that is killed and started again: the same one, each time."""

    def __init__(self, arguments: Sequence[str], ready: str, tasks: anyio.abc.TaskGroup) -> None:
        """Run `gemma-gateway ARGUMENTS` in `tasks`; it is up once it has written what matches `ready`."""
        self._arguments, self._ready, self._tasks = arguments, ready, tasks
        self._lives: list[Process] = []

    async def start(self) -> None:
        """Start it, and return once it is up."""
        await self._tasks.start(self._live)
        await self._lives[-1].wait_for(self._ready, within_s=STARTED_S)

    async def kill(self) -> None:
        """End it with SIGKILL."""
        process = self._lives[-1].process
        assert process.returncode is None, f"it has ended by itself:\n{self._lives[-1].output}"
        process.kill()
        await process.wait()

    def stall(self) -> None:
        """Have it do nothing, with every connection open."""
        self._lives[-1].process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """End a stall."""
        self._lives[-1].process.send_signal(signal.SIGCONT)

    @property
    def output(self) -> str:
        """What it has written in all its lives."""
        return "".join(life.output for life in self._lives)

    async def _live(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        async with running(*self._arguments) as process:
            self._lives.append(process)
            task_status.started()
            await process.process.wait()


def config(
    folder: Path, backends: Mapping[str, tuple[str, str]], pools: Mapping[str, Sequence[str]], rest: str
) -> Path:
    """Write a configuration: backends as id -> (url, profile), pools, and the rest as YAML."""
    lines = ["listen: 127.0.0.1:0", "admin: 127.0.0.1:0", "tokenizer: approximate", "backends:"]
    lines += [f"  {name}: {{url: {url!r}, profile: {profile}}}" for name, (url, profile) in backends.items()]
    lines += ["pools:", *(f"  {name}: [{', '.join(members)}]" for name, members in pools.items())]
    path = folder / "gateway.yaml"
    path.write_text("\n".join(lines) + "\n" + rest)
    return path


def lonely_config(folder: Path) -> Path:
    """Write the configuration of a gateway whose only backend is not there."""
    rest = "models:\n  gemma-4:\n    classes:\n      - {class: short_chat, pools: [light]}\n"
    return config(folder, {"light-0": ("http://127.0.0.1:9", "h100-tp1-light")}, {"light": ["light-0"]}, rest)


async def is_refused(url: str) -> bool:
    """Return whether nothing listens at a URL."""
    async with clients.http() as client:
        try:
            await client.get(f"{url}/health")
        except httpx.ConnectError:
            return True
    return False
