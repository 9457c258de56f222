"""Commands that are forked for tests are like those that a shell starts."""

import os
import signal
from pathlib import Path

import anyio
import pytest
from support import preloaded
from support.processes import command, lonely_config, running

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(not preloaded.IS_POSSIBLE, reason="this system has no pidfd"),
]


async def test_it_runs_in_the_directory_of_its_test_and_ends_for_all_who_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lonely_config(tmp_path).rename("gateway.yaml")
    async with running("serve", "gateway.yaml", own_group=True) as process:
        await process.wait_for("serves http")
        pid = process.process.pid
        assert Path(os.readlink(f"/proc/{pid}/cwd")) == tmp_path
        assert os.getpgid(pid) == os.getsid(pid) == pid
        async with anyio.create_task_group() as tasks:  # two may wait
            tasks.start_soon(process.process.wait)
            assert await process.end(signal.SIGKILL) == -signal.SIGKILL
        assert process.process.returncode == -signal.SIGKILL
        with pytest.raises(ProcessLookupError):
            process.process.kill()


async def test_its_exit_status_and_words_are_the_command_s() -> None:
    async with running("serve", "--no-such-option") as process:
        assert await process.process.wait() == 2
        await process.wait_for("No such option")


async def test_what_it_says_and_its_errors_are_told_apart() -> None:
    good, bad = await command("--version"), await command("serve", "--no-such-option")

    assert (good.status, good.err) == (0, "")
    assert good.out
    assert (bad.status, bad.out) == (2, "")
    assert "No such option" in bad.err
