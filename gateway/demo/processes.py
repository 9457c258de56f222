"""The demo's processes: a fleet and a gateway, started together, watched, and never left behind."""

import json
import os
import re
import subprocess
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import httpx
from anyio.abc import ByteReceiveStream, Process, TaskGroup
from anyio.streams.text import TextReceiveStream

from gateway import interpreters
from gateway.core.value import valueclass
from gateway.demo.site import BOX, BOXED, PROFILES, config_text, keeps_jobs

START_S = 60.0
"""Real seconds after which a start that has not succeeded never will. A choice: a busy machine needs about
5."""

STOP_S = 5.0
"""Real seconds that a process may take to stop before it is killed. A choice."""

_SERVES = re.compile(r"serves (http://\S+)/v1")
_OPERATORS = re.compile(r"operators: (http://\S+?)/admin/")


class StartError(Exception):
    """The demo's processes could not be started."""


@valueclass(frozen=True, slots=True)
class Site:
    """A fleet with a gateway in front.

    Attributes:
        url: Base URL for applications, without /v1.
        admin_url: Base URL for operators.
        backends: Base URL of every simulated server.
        config: The gateway's configuration file; gone when the demo ends.
        no_jobs: Why jobs cannot be handed over, "" where they can.
    """

    url: str
    admin_url: str
    backends: Mapping[str, str]
    config: Path
    no_jobs: str = ""


class Child:
    """A child process and what it says."""

    def __init__(self, role: str, process: Process) -> None:
        self.role = role
        self.last_words: deque[str] = deque(maxlen=12)
        self._process = process
        self._heard = anyio.Event()
        self._said: list[str] = []
        self._is_stopping = False

    async def order(self, order: Mapping[str, Any]) -> None:
        """Tell it what to do.

        Raises:
            StartError: it is gone.
        """
        assert self._process.stdin is not None
        try:
            await self._process.stdin.send(json.dumps(order).encode() + b"\n")
        except (anyio.BrokenResourceError, anyio.ClosedResourceError) as error:
            raise StartError(self.obituary()) from error

    async def heard(self, pattern: re.Pattern[str]) -> str:
        """Return what `pattern` first captures in what it has said or will say.

        Raises:
            StartError: it ended instead.
        """
        while True:
            for line in self._said:
                if found := pattern.search(line):
                    return found.group(1)
            if self._process.returncode is not None:
                raise StartError(self.obituary())
            await self._heard.wait()

    def obituary(self) -> str:
        """Return a sentence about its end, with what it said last."""
        words = "\n".join(self.last_words)
        return (
            f"the {self.role} process ended unexpectedly (status {self._process.returncode})\n{words}".strip()
        )

    async def listen(self, stream: ByteReceiveStream | None) -> None:
        """Take note of every line of a stream until it ends."""
        assert stream is not None
        rest = ""
        with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):
            async for text in TextReceiveStream(stream, errors="replace"):
                *whole, rest = (rest + text).split("\n")
                for line in whole:
                    self._note(line)
        self._note(rest)

    async def watch(self, lost: Callable[[str], None]) -> None:
        """Call `lost` if it ends before it is told to."""
        await self._process.wait()
        self._wake()
        if not self._is_stopping:
            lost(self.obituary())

    async def stop(self) -> None:
        """End it, gently first."""
        self._is_stopping = True
        process = self._process
        if process.returncode is None:
            process.terminate()
            with anyio.move_on_after(STOP_S):
                await process.wait()
        if process.returncode is None:
            process.kill()
        with anyio.move_on_after(STOP_S):
            await process.wait()

    def _note(self, line: str) -> None:
        if line.strip():
            self.last_words.append(line)
            if len(self._said) < 100:  # what a start waits for is among the first
                self._said.append(line)
            self._wake()

    def _wake(self) -> None:
        self._heard.set()
        self._heard = anyio.Event()


@asynccontextmanager
async def running(
    speed: float,
    port: int,
    lost: Callable[[str], None],
) -> AsyncIterator[Site]:
    """Run a fleet at `speed` and a gateway on `port` (0 for a free one) while the block runs.

    `lost` is called with an explanation when one of them ends before the block does.

    Raises:
        StartError: one of them does not come up, or there is no folder for their files.
    """
    try:
        temporary = tempfile.TemporaryDirectory(prefix="gemma-gateway-demo-")
    except OSError as error:
        problem = f"cannot make a folder for its files: {error.strerror or error}"
        raise StartError(f"{problem}; set TMPDIR to a writable folder") from error
    with temporary as folder:
        async with (
            anyio.create_task_group() as tasks,
            _child("fleet", tasks, lost) as fleet,
            _child("gateway", tasks, lost) as front,
        ):
            try:
                with anyio.fail_after(START_S):
                    site = await _start(fleet, front, speed, port, Path(folder))
            except TimeoutError as error:
                raise StartError(f"not ready after {START_S:g} s") from error
            yield site


async def _start(fleet: Child, front: Child, speed: float, port: int, folder: Path) -> Site:
    alone = {name: profile for name, profile in PROFILES.items() if name not in BOXED}
    await fleet.order({"profiles": alone, "boxes": {BOX: dict(BOXED)}, "speed": speed})
    urls: dict[str, str] = json.loads(await fleet.heard(re.compile(r"^(\{.*\})$")))
    config = folder / "demo.yaml"
    data = folder / "jobs"
    no_jobs = keeps_jobs(data)
    config.write_text(config_text(urls, port, None if no_jobs else data), encoding="utf-8")
    await front.order({"config": str(config), "folder": str(folder)})
    url = await front.heard(_SERVES)
    admin_url = await front.heard(_OPERATORS)
    await _ready(url)
    for child in (fleet, front):
        child.last_words.clear()  # where it serves says nothing about its end
    return Site(url, admin_url, urls, config, no_jobs)


async def _ready(url: str) -> None:
    """Return once the gateway says it is ready for requests."""
    async with httpx.AsyncClient(trust_env=False, timeout=5.0) as client:
        while True:
            if (await client.get(f"{url}/readyz")).status_code == 200:
                return
            await anyio.sleep(0.05)


@asynccontextmanager
async def _child(role: str, tasks: TaskGroup, lost: Callable[[str], None]) -> AsyncIterator[Child]:
    # If the demo is killed, the end of its pipe tells its children.
    process = await interpreters.start(
        [*interpreters.command("gateway.demo.child"), role],
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    child = Child(role, process)
    tasks.start_soon(child.listen, process.stdout)
    tasks.start_soon(child.listen, process.stderr)
    tasks.start_soon(child.watch, lost)
    try:
        yield child
    finally:
        with anyio.CancelScope(shield=True):
            await child.stop()
            await process.aclose()
