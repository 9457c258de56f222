"""What keeps workers alive: when one is started again, and that nothing about one brings down the rest."""

import logging
import re
import sys
from collections.abc import Callable
from pathlib import Path

import anyio
import pytest

from gateway import settings
from gateway.core.errors import ConfigError
from gateway.sockets import bind
from gateway.store.keeper import GOOD_SPELL_S, PAUSE_MAX_S, PAUSE_S, next_pause_s
from gateway.supervisor import Order, WorkerGroup


@pytest.mark.parametrize(
    ("before_s", "lived_s", "expected_s"),
    [
        pytest.param(0.0, 1.0, PAUSE_S, id="the-first-early-end"),
        pytest.param(PAUSE_S, 1.0, 2 * PAUSE_S, id="it-grows"),
        pytest.param(20.0, 1.0, PAUSE_MAX_S, id="it-is-bounded"),
        pytest.param(PAUSE_MAX_S, 1.0, PAUSE_MAX_S, id="it-stays-bounded"),
        pytest.param(PAUSE_MAX_S, GOOD_SPELL_S, 0.0, id="a-good-spell-ends-it"),
        pytest.param(0.0, GOOD_SPELL_S - 0.1, PAUSE_S, id="not-quite-a-good-spell"),
    ],
)
def test_pauses(before_s: float, lived_s: float, expected_s: float) -> None:
    assert next_pause_s(before_s, lived_s) == expected_s


class Ends(logging.Handler):
    """Collects what is said of workers that ended."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.said: list[str] = []
        self.twice = anyio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        """Note a line."""
        self.said.append(record.getMessage())
        if len(self.said) == 2:
            self.twice.set()


def script(folder: Path, *lines: str) -> str:
    """Write an interpreter whose every program is these lines."""
    path = folder / "python"
    path.write_text("\n".join(["#!/bin/sh", *lines]))
    path.chmod(0o755)
    return str(path)


def never_ready(urls: tuple[str, ...]) -> None:
    pytest.fail("nothing accepts connections")


async def two_ends(ready: Callable[[tuple[str, ...]], None]) -> list[str]:
    """Run one worker until it has ended twice. Return what was said of it."""
    ends = Ends()
    log = logging.getLogger("gateway.supervisor")
    log.addHandler(ends)
    try:
        with bind("127.0.0.1", 0) as listen, anyio.fail_after(20):
            order = Order(0, 1, "gateway.yaml", "", "info", listen.fileno(), None)
            group = WorkerGroup(600.0, ready)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(group.run, order)
                await ends.twice.wait()
                await group.stop()
    finally:
        log.removeHandler(ends)
    return ends.said


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        pytest.param(["exit 7"], "status 7", id="it-exits"),
        pytest.param(["kill -40 $$"], "killed by signal 40", id="a-signal-without-a-name"),
        pytest.param(None, "status 1: it cannot be started: .*No such file", id="it-cannot-be-started"),
        pytest.param(["exec 0<&- 1>&-", "exit 7"], "status 7", id="it-hears-and-says-nothing"),
    ],
)
async def test_a_worker_that_ends_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str] | None, says: str
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python" if lines is None else script(tmp_path, *lines))
    first, second = await two_ends(never_ready)

    assert re.fullmatch(rf"worker 0 ended \({says}.*\): started again in 0\.5 s", first)
    assert re.fullmatch(rf"worker 0 ended \({says}.*\): started again in 1 s", second)


async def test_a_configuration_that_no_worker_can_use_ends_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The last word of the command is the number. One that starts slowly is not waited for.
    lines = (
        "for number; do :; done",
        "[ $number = 1 ] && exec sleep 60",
        """echo '{"error": "it is wrong"}'""",
        "exit 2",
    )
    monkeypatch.setattr(sys, "executable", script(tmp_path, *lines))
    with bind("127.0.0.1", 0) as listen, anyio.fail_after(20):
        group = WorkerGroup(600.0, never_ready)
        with pytest.raises(ConfigError, match="it is wrong"):
            await group.run(Order(0, 2, "gateway.yaml", "", "info", listen.fileno(), None))


async def test_a_worker_that_cannot_use_its_configuration_later_does_not_end_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = tmp_path / "began"
    lines = (
        f"""[ -e {began} ] && {{ echo '{{"error": "it is wrong"}}'; exit 2; }}""",
        f"touch {began}",
        "echo '{}'",
        "exit 7",
    )
    monkeypatch.setattr(sys, "executable", script(tmp_path, *lines))
    _, second = await two_ends(lambda urls: None)

    assert second == "worker 0 ended (status 2: it is wrong): started again in 1 s"


def test_how_long_workers_may_drain_can_change(tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text(
        """
tokenizer: approximate
backends: {a: {url: http://127.0.0.1:9, profile: h100-tp1-light}}
pools: {a: [a]}
models: {gemma-4: {classes: [{class: a, pools: [a]}]}}
shutdown: {drain_s: 7, notice_s: 1}
"""
    )
    group = WorkerGroup(6.0, lambda urls: None)
    group.follow(None)
    assert group.end_s == 6.0
    group.follow(settings.load(path, {}))
    assert group.end_s == 8.0
    path.write_text(path.read_text().replace("drain_s: 7", "drain_s: 1"))
    group.follow(settings.load(path, {}))
    assert group.end_s == 8.0  # some may still drain by the one before


def test_workers_may_be_started_in_a_folder_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()

    group = WorkerGroup(600.0, lambda urls: None)

    assert "-P" in group.command
