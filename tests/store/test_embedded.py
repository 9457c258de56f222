"""The embedded server: there when asked for, and gone with whoever asked."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import anyio
import pytest
from redis.asyncio import Redis
from support.processes import parent_of, wait_gone

from gateway.core.errors import ConfigError
from gateway.store import embedded
from gateway.store.embedded import embedded_valkey, server_binary, server_command, valkey_in

WITHIN_S = 20.0


async def server_pid(url: str) -> int:
    redis = Redis.from_url(url)
    try:
        return int((await redis.info("server"))["process_id"])
    finally:
        await redis.aclose()


async def test_it_answers_keeps_nothing_and_ends() -> None:
    async with embedded_valkey() as url:
        folder = Path(url.removeprefix("unix://")).parent
        redis = Redis.from_url(url, decode_responses=True)
        assert await redis.ping()
        config = await redis.config_get("*")
        await redis.aclose()
        pid = await server_pid(url)
        assert folder.stat().st_mode & 0o077 == 0

    assert (config["port"], config["save"], config["appendonly"]) == ("0", "", "no")
    await wait_gone(pid)
    assert not folder.exists()


async def test_its_socket_goes_where_it_is_wanted_and_replaces_a_dead_one(tmp_path: Path) -> None:
    (tmp_path / "valkey.sock").touch()
    async with embedded_valkey(tmp_path) as url:
        assert url == f"unix://{tmp_path}/valkey.sock"
        pid = await server_pid(url)
    await wait_gone(pid)


PARENT = """
import anyio, sys
from gateway.store.embedded import embedded_valkey

async def main():
    async with embedded_valkey() as url:
        print(url, flush=True)
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
            assert await valkey.ended() == 128 + signal.SIGKILL


async def test_one_that_lost_its_watcher_does_not_live_beside_the_next(tmp_path: Path) -> None:
    async with valkey_in(tmp_path) as valkey:
        former = await server_pid(valkey.url)
        os.kill(parent_of(former), signal.SIGKILL)
        await valkey.ended()
    async with valkey_in(tmp_path) as valkey:
        assert await server_pid(valkey.url) != former
        await wait_gone(former)


async def test_without_a_folder_for_its_socket_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    with pytest.raises(ConfigError, match=r"no folder for .*TMPDIR"):
        async with embedded_valkey():
            pass


async def test_the_terminal_s_interrupt_does_not_reach_it() -> None:
    async with embedded_valkey() as url:
        assert os.getsid(await server_pid(url)) != os.getsid(0)


async def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"did not start: .*(No such file|[Cc]an't)"):
        async with embedded_valkey(tmp_path / "nowhere"):
            pass


async def test_a_socket_path_that_is_too_long_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="too long"):
        async with embedded_valkey(tmp_path / ("x" * 100)):
            pass


def test_without_the_package_it_is_taken_from_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"install gemma-gateway\[workers\]"):
        server_binary()

    (tmp_path / "redis-server").touch(mode=0o755)
    assert server_binary() == tmp_path / "redis-server"
    (tmp_path / "valkey-server").touch(mode=0o755)
    assert server_binary() == tmp_path / "valkey-server"


def test_a_port_of_the_loopback_only_if_asked_for(tmp_path: Path) -> None:
    command = server_command(Path("server"), tmp_path, port=7000)
    assert command[command.index("--port") + 1] == "7000"
    assert command[command.index("--bind") + 1] == "127.0.0.1"
