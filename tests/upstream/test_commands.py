"""An operator's commands, run for real: their end, their limit, their output, their children."""

import errno
import logging
import os
import signal
import tempfile
from pathlib import Path

import anyio
import pytest

from gateway.upstream import commands
from gateway.upstream.commands import OUTPUT_BYTES_MAX, Command, run


def sh(text: str, **options: object) -> Command:
    return Command([text], shell=True, **options)  # type: ignore[arg-type]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"


def until_dead(pid: int) -> None:
    """Return once a child is dead, and leave it in the process table. Nothing else runs meanwhile."""
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)


async def until_written(path: Path) -> int:
    with anyio.fail_after(20):
        while not path.exists() or not path.read_text().endswith("\n"):  # noqa: ASYNC110, ASYNC240
            await anyio.sleep(0.01)
    return int(path.read_text())  # noqa: ASYNC240


async def test_a_command_that_succeeds_says_nothing() -> None:
    assert await run(Command(["true"]), {}) == ""


async def test_a_command_that_fails_says_how_it_ended_and_what_it_said_last() -> None:
    assert await run(sh("echo first; echo no route to host >&2; exit 255"), {}) == (
        "exit status 255: no route to host"
    )


async def test_what_it_says_last_is_known_whatever_its_bytes_and_blank_lines() -> None:
    assert await run(sh(r"printf 'caf\351\n \n\n'; exit 1"), {}) == "exit status 1: caf\ufffd"


async def test_it_has_the_environment_of_the_gateway(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSH_AUTH_SOCK", "/run/agent")
    monkeypatch.setenv("MORE", "of the gateway itself")
    assert await run(sh('echo "$SSH_AUTH_SOCK $MORE"; exit 1'), {"MORE": "and more"}) == (
        "exit status 1: /run/agent and more"
    )


async def test_it_has_nobody_to_ask() -> None:
    """Also where the gateway runs in a terminal."""
    read, write = os.pipe()
    own = os.dup(0)
    os.dup2(read, 0)
    try:
        assert await run(sh("readlink /proc/self/fd/0; exit 1"), {}) == "exit status 1: /dev/null"
    finally:
        os.dup2(own, 0)
        for one in (read, write, own):
            os.close(one)


async def test_a_command_that_is_not_there_has_failed() -> None:
    assert await run(Command(["/nowhere/switch"]), {}) == "/nowhere/switch: No such file or directory"


async def test_a_command_needs_no_writable_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "not-there"))
    assert await run(sh("echo no route to host; exit 255"), {}) == "exit status 255: no route to host"


async def test_words_are_no_shell_text(tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    assert await run(Command(["echo", f"; touch {trap}", "$(touch {trap})"]), {}) == ""
    assert not trap.exists()


async def test_it_is_told_who_it_is_for(tmp_path: Path) -> None:
    said = tmp_path / "said"
    assert await run(sh(f'echo "$GATEWAY_BACKEND $GATEWAY_FENCE" > {said}'), {
        "GATEWAY_BACKEND": "qwen", "GATEWAY_FENCE": "7",
    }) == ""  # fmt: skip
    assert said.read_text() == "qwen 7\n"


async def test_one_that_takes_too_long_is_killed_with_all_it_started(tmp_path: Path) -> None:
    child = tmp_path / "child"
    assert await run(sh(f"sleep 600 & echo $! > {child}; wait", timeout_s=0.5), {}) == "took more than 0.5 s"
    pid = await until_written(child)
    with anyio.fail_after(20):
        while is_alive(pid):  # noqa: ASYNC110
            await anyio.sleep(0.01)


async def test_one_that_runs_as_another_user_is_left_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(group: int, number: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    child = tmp_path / "child"
    with monkeypatch.context() as patch:
        patch.setattr(os, "killpg", refused)  # as by the kernel for a command under sudo
        failure = await run(sh(f"echo $$ > {child}; echo so far; exec sleep 600", timeout_s=0.5), {})
    pid = await until_written(child)
    assert failure == "took more than 0.5 s, and cannot be killed: it runs as another user: so far"
    assert is_alive(pid)
    os.kill(pid, signal.SIGKILL)


async def test_one_that_does_not_die_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child = tmp_path / "child"
    with monkeypatch.context() as patch:
        patch.setattr(commands, "DIES_S", 0.1)
        patch.setattr(os, "killpg", lambda group, number: None)  # as of a process that waits for a driver
        failure = await run(sh(f"echo $$ > {child}; exec sleep 10", timeout_s=0.5), {})
    pid = await until_written(child)
    assert failure == "took more than 0.5 s, and cannot be killed: it does not die"
    assert is_alive(pid)
    os.kill(pid, signal.SIGKILL)
    until_dead(pid)
    assert await run(Command(["true"]), {}) == ""
    assert not Path(f"/proc/{pid}").exists()  # noqa: ASYNC240 - what died holds no place for ever


async def test_one_that_has_ended_in_time_is_not_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long ago it was looked at."""
    monkeypatch.setattr(commands, "LOOK_S", 3600.0)
    own, gate = tmp_path / "own", tmp_path / "gate"
    os.mkfifo(gate)
    command = sh(f"echo $$ > {own}; cat {gate}; exit 3", timeout_s=0.5)
    found: list[str] = []

    async def carry_out() -> None:
        found.append(await run(command, {}))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(carry_out)
        await anyio.lowlevel.checkpoint()  # from here on nothing else runs, until the command has ended
        gate.write_text("on\n")
        until_dead(int(own.read_text()))
    assert found == ["exit status 3: on"]


async def test_nobody_waits_for_a_server_that_it_started(tmp_path: Path) -> None:
    child = tmp_path / "child"
    try:
        with anyio.fail_after(20):
            assert await run(sh(f"sleep 600 & echo $! > {child}"), {}) == ""
        assert is_alive(await until_written(child))
    finally:
        os.kill(await until_written(child), signal.SIGKILL)


async def test_its_output_is_logged_up_to_a_limit(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger=commands.log.name):
        assert await run(sh("echo booting; yes | head -c 100000"), {}) == ""
    assert caplog.messages[0] == "sh: booting"
    assert caplog.messages[-1] == "sh: y"
    assert caplog.messages.count("sh: ...") == 1
    assert sum(map(len, caplog.messages)) < 4 * OUTPUT_BYTES_MAX


async def test_what_fits_is_told_whole() -> None:
    said = "x" * OUTPUT_BYTES_MAX
    assert await run(sh(f"printf {said}; exit 1"), {}) == f"exit status 1: {said}"


async def test_a_command_that_says_much_is_told_by_its_end() -> None:
    said = await run(sh("seq 1 2000; echo no space left; exit 1"), {})
    assert said == "exit status 1: no space left"


async def test_one_that_prints_without_end_is_killed_before_it_fills_the_disk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(commands, "PRINTED_BYTES_MAX", 1000)
    asks = "while :; do echo retry?; read answer; done"  # and nobody is there
    with anyio.fail_after(20):
        assert await run(sh(asks, timeout_s=600), {}) == "printed more than 1000 bytes: retry?"


@pytest.mark.parametrize("dies", [True, False])
async def test_whether_it_outlives_the_gateway_is_configured(tmp_path: Path, dies: bool) -> None:
    own = tmp_path / "own"
    command = sh(f"echo $$ > {own}; exec sleep 600", dies_with_us=dies, timeout_s=600)
    ended: list[str] = []

    async def carry_out() -> None:
        ended.append(await run(command, {}))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(carry_out)
        pid = await until_written(own)
        tasks.cancel_scope.cancel()
    assert ended == []  # whoever waited for it is told nothing
    assert is_alive(pid) is not dies
    if not dies:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)  # noqa: ASYNC222 - it has just been killed
