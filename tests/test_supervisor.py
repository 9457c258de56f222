"""What keeps workers alive: when one is started again, and that nothing about one brings down the rest."""

import json
import logging
import os
import re
import select
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from support.loops import on_uvloop
from support.processes import until

from gateway import settings, supervisor
from gateway.core.errors import ConfigError, StartupBlocked
from gateway.exiting import RELOAD_SIGNAL, STOP_SIGNALS
from gateway.sockets import bind
from gateway.store import keeper
from gateway.store.keeper import GOOD_SPELL_S, PAUSE_MAX_S, PAUSE_S, next_pause_s
from gateway.supervisor import BEAT_S, SILENT_LOOKS, Order, WorkerGroup

# asyncio's of CPython before 3.11.4 would report what nobody waits for: that a worker's input was closed.
anyio_backend = on_uvloop


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


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """Handle signals as before after `serve`, which leaves them ignored: its process is to exit."""
    handlers = {number: signal.getsignal(number) for number in (*STOP_SIGNALS, RELOAD_SIGNAL)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


class Ends(logging.Handler):
    """Collects what is said of workers that ended."""

    def __init__(self, enough: int) -> None:
        super().__init__(logging.ERROR)
        self._enough = enough
        self.said: list[str] = []
        self.enough = anyio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        """Note a line."""
        self.said.append(record.getMessage())
        if len(self.said) == self._enough:
            self.enough.set()


@pytest.fixture
def ended() -> Iterator[Ends]:
    """What is said of workers that ended, one at least."""
    heard = Ends(1)
    log = logging.getLogger("gateway.supervisor")
    log.addHandler(heard)
    yield heard
    log.removeHandler(heard)


def script(folder: Path, *lines: str) -> str:
    """Write an interpreter whose every program is these lines."""
    path = folder / "python"
    path.write_text("\n".join(["#!/bin/sh", *lines]))
    path.chmod(0o755)
    return str(path)


def configured(folder: Path, *sections: str) -> Path:
    """Write a configuration."""
    path = folder / "gateway.yaml"
    least = (
        "listen: 127.0.0.1:0",
        "tokenizer: approximate",
        "backends: {a: {url: http://127.0.0.1:9, profile: h100-tp1-light}}",
        "pools: {a: [a]}",
        "models: {gemma-4: {classes: [{class: a, pools: [a]}]}}",
    )
    path.write_text("\n".join([*least, *sections]))
    return path


def never_ready(urls: tuple[str, ...]) -> None:
    pytest.fail("nothing accepts connections")


async def ends(
    times: int, ready: Callable[[tuple[str, ...]], None], *, source: str = "", beat_s: float = BEAT_S
) -> list[str]:
    """Run one worker until so much was said of its ends. Return what was said of it."""
    heard = Ends(times)
    log = logging.getLogger("gateway.supervisor")
    log.addHandler(heard)
    try:
        with bind("127.0.0.1", 0) as listen, anyio.fail_after(20):
            order = Order(0, 1, "gateway.yaml", source, "info", listen.fileno(), None, beat_s=beat_s)
            group = WorkerGroup(600.0, ready)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(group.run, order)
                await heard.enough.wait()
                await group.stop()
    finally:
        log.removeHandler(heard)
    return heard.said


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
    first, second = await ends(2, never_ready)

    assert re.fullmatch(rf"worker 0 ended \({says}.*\): started again in 0\.5 s", first)
    assert re.fullmatch(rf"worker 0 ended \({says}.*\): started again in 1 s", second)


@pytest.mark.parametrize(
    ("lines", "drain_s", "end_s", "stops", "status"),
    [
        pytest.param(["exec sleep 60"], 0.01, 0.0, [signal.SIGTERM], 1, id="it-hears-nothing"),
        pytest.param(["head -c 1", "exit 3"], 60, 0.0, [signal.SIGTERM], 1, id="it-fails"),
        pytest.param(["head -c 1", "sleep 0.5"], 60, 0.0, [signal.SIGTERM], 0, id="it-drains"),
        pytest.param(["head -c 1", "sleep 0.5"], 0.01, 60.0, [signal.SIGTERM], 0, id="it-takes-its-steps"),
        pytest.param(["head -c 2", "sleep 0.5"], 60, 60.0, [signal.SIGTERM, signal.SIGINT], 0, id="at-once"),
    ],
)
async def test_how_long_a_worker_that_is_told_to_stop_may_take(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    lines: list[str],
    drain_s: float,
    end_s: float,
    stops: list[signal.Signals],
    status: int,
) -> None:
    caplog.set_level(logging.INFO, "gateway.supervisor")
    monkeypatch.setattr(supervisor, "END_S", end_s)
    monkeypatch.setattr(sys, "executable", script(tmp_path, "read order", "echo '{}'", *lines))
    sections = "shutdown: {drain_s: 0.01}", "store: redis://127.0.0.1:9", "reload: {watch: false}"
    path = configured(tmp_path, *sections)

    def ready(serving: supervisor.Serving) -> None:
        path.write_text(path.read_text().replace("drain_s: 0.01", f"drain_s: {drain_s}"))
        for stop in stops:
            os.kill(os.getpid(), stop)

    with anyio.fail_after(20):
        assert await supervisor.serve(settings.load(path, {}), {}, 1, "info", ready=ready) == status
    events = [record.fields["event"] for record in caplog.records]  # type: ignore[attr-defined]
    assert events[1] == "draining" and events[-1] == "stopped"
    assert ("worker 0 did not stop when told to: killed" in caplog.text) == (drain_s + end_s < 1)
    assert ("instead of draining" in caplog.text) == (status == 1)


UNREAD = "#" * 1_000_000
"""A configuration that no pipe holds: a worker that does not read cannot be told anything more."""


async def test_a_worker_that_is_frozen_before_it_has_read_its_order_does_not_keep_the_gateway_from_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervisor, "END_S", 0.0)
    monkeypatch.setattr(
        sys, "executable", script(tmp_path, 'trap "" TERM', "kill -TERM $PPID", "exec sleep 60")
    )
    sections = "shutdown: {drain_s: 0.01}", "store: redis://127.0.0.1:9", "reload: {watch: false}", UNREAD
    loaded = settings.load(configured(tmp_path, *sections), {})

    with anyio.fail_after(20):
        assert await supervisor.serve(loaded, {}, 1, "info", ready=lambda serving: None) == 1
    assert "worker 0 did not stop when told to: killed" in caplog.text


async def test_workers_that_are_still_being_loaded_do_not_hold_up_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Connections that wait are refused at once: to load a few workers takes seconds."""
    monkeypatch.setattr(sys, "executable", script(tmp_path, "kill -TERM $PPID", "exec sleep 60"))
    sections = "store: redis://127.0.0.1:9", "reload: {watch: false}"
    loaded = settings.load(configured(tmp_path, *sections), {})

    with anyio.fail_after(20):
        assert await supervisor.serve(loaded, {}, 3, "info", ready=lambda serving: None) == 0
    assert "instead of draining" not in caplog.text


async def test_a_frozen_worker_does_not_keep_the_others_from_being_told_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended: Ends
) -> None:
    lines = (
        "for number; do :; done",
        'trap "" TERM',
        f"touch {tmp_path}/$number",
        "[ $number = 0 ] && exec sleep 60",
        "read order",
        "head -c 1 >/dev/null",
        "exit 3",
    )
    monkeypatch.setattr(sys, "executable", script(tmp_path, *lines))

    async def both_run() -> bool:
        return (tmp_path / "0").exists() and (tmp_path / "1").exists()

    with bind("127.0.0.1", 0) as listen, anyio.fail_after(20):
        group = WorkerGroup(600.0, never_ready)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(group.run, Order(0, 2, "gateway.yaml", UNREAD, "info", listen.fileno(), None))
            await until(both_run)
            tasks.start_soon(group.stop)
            await ended.enough.wait()
            group.kill()
    assert ended.said == [
        "worker 1 ended (status 3) instead of draining",
        "worker 0 did not stop when told to: killed",
        "worker 0 ended (killed by SIGKILL) instead of draining",
    ]


async def test_a_worker_that_hangs_is_killed_and_started_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    config = configured(tmp_path)
    with bind("127.0.0.1", 0) as listen, anyio.fail_after(120):
        url = f"redis://127.0.0.1:{listen.getsockname()[1]}"  # which is never asked for anything
        order = Order(0, 1, str(config), config.read_text(), "warning", listen.fileno(), url, beat_s=0.25)
        is_ready = anyio.Event()
        group = WorkerGroup(600.0, lambda urls: is_ready.set())

        def pids() -> list[int]:
            return [int(pid) for pid in re.findall(r"\(pid (\d+)\) accepts", caplog.text)]

        async def again() -> bool:
            return len(pids()) == 2

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(group.run, order)
            await is_ready.wait()
            os.kill(pids()[0], signal.SIGSTOP)
            await until(again)
            await group.stop()
    assert "worker 0 has given no sign of life for 6 s: killed" in caplog.text
    assert "worker 0 ended (killed by SIGKILL): started again in" in caplog.text
    assert group.ended_well


@pytest.mark.parametrize("source", ["", UNREAD], ids=["before-its-report", "before-it-has-read-its-order"])
async def test_a_worker_that_hangs_as_it_starts_is_killed_and_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.setattr(sys, "executable", script(tmp_path, "exec sleep 60"))
    assert await ends(2, never_ready, source=source, beat_s=0.01) == [
        "worker 0 has given no sign of life for 0.24 s: killed",
        "worker 0 ended (killed by SIGKILL): started again in 0.5 s",
    ]


def stand_still(seconds: float) -> None:
    subprocess.run(["sleep", str(seconds)], check=True)


async def test_time_for_which_the_supervisor_was_suspended_does_not_count_as_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its event loop stands still for longer than the limit, as in a container that is paused."""
    lines = "(while echo; do sleep 0.05; done) &", "head -c 1 >/dev/null", "kill $!", "exec 1>&-"
    monkeypatch.setattr(sys, "executable", script(tmp_path, "read order", "echo '{}'", *lines))
    with bind("127.0.0.1", 0) as listen, anyio.fail_after(30):
        order = Order(0, 1, "gateway.yaml", "", "info", listen.fileno(), None, beat_s=0.1)
        is_ready = anyio.Event()
        group = WorkerGroup(600.0, lambda urls: is_ready.set())
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(group.run, order)
            await is_ready.wait()
            stand_still(1.5 * SILENT_LOOKS * order.beat_s)
            for _ in range(20):
                await anyio.lowlevel.checkpoint()
            await group.stop()
    assert group.ended_well


async def test_a_stop_reaches_a_worker_at_any_moment_of_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        sys, "executable", script(tmp_path, 'trap "" TERM', "read order", "head -c 1 >/dev/null")
    )
    for steps in range(12):
        with bind("127.0.0.1", 0) as listen, anyio.fail_after(20):
            group = WorkerGroup(600.0, never_ready)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(group.run, Order(0, 1, "gateway.yaml", "", "info", listen.fileno(), None))
                for _ in range(steps):
                    await anyio.lowlevel.checkpoint()
                await group.stop()
            assert group.ended_well


@pytest.mark.parametrize(
    ("heard", "notice_s"),
    [
        pytest.param(b"!!", 300, id="twice-at-once"),
        pytest.param(b"!", 0, id="once"),
        pytest.param(b"", 0, id="its-parent-has-ended"),
    ],
)
def test_a_worker_hears_what_comes_with_its_order(tmp_path: Path, heard: bytes, notice_s: int) -> None:
    path = configured(tmp_path, "admin: off", f"shutdown: {{notice_s: {notice_s}}}")
    with bind("127.0.0.1", 0) as listen:
        order = Order(0, 1, str(path), path.read_text(), "info", listen.fileno(), None)
        done = subprocess.run(
            [sys.executable, "-m", "gateway.worker", "0"],
            input=json.dumps(asdict(order)).encode() + b"\n" + heard,
            capture_output=True,
            pass_fds=[order.listen_fd],
            timeout=60,
        )
    report, _, beats = done.stdout.partition(b"\n")
    assert json.loads(report) == {"admin_url": None, "error": None}
    assert set(beats) <= set(b".")
    assert (done.returncode, b'"stopped"' in done.stderr) == (0, True)


def test_a_worker_leaves_signals_to_its_parent(tmp_path: Path) -> None:
    """As those of `pkill`, or of a terminal, which its parent gets, too."""
    path = configured(tmp_path, "admin: off")
    with bind("127.0.0.1", 0) as listen:
        order = Order(0, 1, str(path), path.read_text(), "info", listen.fileno(), None)
        with subprocess.Popen(
            [sys.executable, "-m", "gateway.worker", "0"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            pass_fds=[order.listen_fd],
        ) as worker:
            assert worker.stdin is not None
            assert worker.stdout is not None
            worker.stdin.write(json.dumps(asdict(order)).encode() + b"\n")
            worker.stdin.flush()
            assert json.loads(worker.stdout.readline())["error"] is None
            for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
                worker.send_signal(number)
            worker.communicate(b"!!", timeout=60)
        assert worker.returncode == 0


def test_a_worker_whose_parent_ends_before_it_has_an_order_ends() -> None:
    command = [sys.executable, "-m", "gateway.worker", "0"]
    done = subprocess.run(command, input=b"{", capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


async def test_a_stop_is_not_held_up_by_the_pause_before_a_worker_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "PAUSE_S", 1000.0)
    monkeypatch.setattr(keeper, "PAUSE_MAX_S", 1000.0)
    monkeypatch.setattr(sys, "executable", script(tmp_path, "exit 7"))
    assert await ends(1, never_ready) == ["worker 0 ended (status 7): started again in 1000 s"]


async def test_a_worker_that_ran_well_is_started_again_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, ...]] = []
    monkeypatch.setattr(keeper, "GOOD_SPELL_S", 0.0)
    monkeypatch.setattr(sys, "executable", script(tmp_path, "echo '{}'", "exit 7"))
    assert await ends(2, told.append) == ["worker 0 ended (status 7): started again in 0 s"] * 2
    assert told == [()]


async def told_of_two(worker: str, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Run a group of two workers until it is ready, and return which URLs of theirs it has told."""
    monkeypatch.setattr(sys, "executable", worker)
    told: list[tuple[str, ...]] = []
    with bind("127.0.0.1", 0) as listen, anyio.fail_after(20):
        is_told = anyio.Event()

        def ready(urls: tuple[str, ...]) -> None:
            told.append(urls)
            is_told.set()

        group = WorkerGroup(600.0, ready)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(group.run, Order(0, 2, "gateway.yaml", "", "info", listen.fileno(), None))
            await is_told.wait()
            await group.stop()
    return told


async def test_what_is_told_of_is_where_the_workers_are_that_accept_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One ends before the other is ready, and is started again."""
    began, again = tmp_path / "began", tmp_path / "again"
    lines = (
        "for number; do :; done",
        "read order",
        f"if [ $number = 1 ]; then until [ -e {again} ]; do sleep 0.01; done",
        f'elif [ ! -e {began} ]; then touch {began}; echo \'{{"admin_url": "old"}}\'; exit 7',
        f"else touch {again}; sleep 0.3; fi",
        """echo "{\\"admin_url\\": \\"$number\\"}\"""",
        "head -c 1 >/dev/null",
    )
    told = await told_of_two(script(tmp_path, *lines), monkeypatch)
    assert told == [("0", "1")]


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(None, id="none"),
        pytest.param("", id="empty"),
        pytest.param("random", id="random"),  # as many images for containers have it
        pytest.param("7", id="a-number"),
    ],
)
async def test_workers_hash_alike_whatever_the_environment_says_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if given is not None:
        monkeypatch.setenv("PYTHONHASHSEED", given)
    hashing = [sys.executable, "-c", 'print(hash("a"))']
    seven = {**os.environ, "PYTHONHASHSEED": "7"}
    with_seed_7 = (await anyio.run_process(hashing, env=seven)).stdout.decode().strip()
    lines = (
        "read order",
        f"hash=$({shlex.join(hashing)})",
        """echo "{\\"admin_url\\": \\"$hash\\"}\"""",
        "head -c 1 >/dev/null",
    )
    told = await told_of_two(script(tmp_path, *lines), monkeypatch)
    [(one, other)] = told
    assert one == other
    assert (one == with_seed_7) is (given == "7")


@pytest.mark.parametrize(("status", "kind"), [(1, StartupBlocked), (2, ConfigError)])
async def test_a_configuration_that_no_worker_can_use_ends_all_of_them(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    status: int,
    kind: type[ConfigError],
) -> None:
    # The last word of the command is the number. One that starts slowly is not waited for.
    lines = (
        "for number; do :; done",
        "[ $number = 1 ] && exec sleep 60",
        """echo '{"error": "it is wrong"}'""",
        f"exit {status}",
    )
    monkeypatch.setattr(sys, "executable", script(tmp_path, *lines))
    with bind("127.0.0.1", 0) as listen, anyio.fail_after(20):
        group = WorkerGroup(600.0, never_ready)
        with pytest.raises(ConfigError, match="it is wrong") as caught:
            await group.run(Order(0, 2, "gateway.yaml", "", "info", listen.fileno(), None))
    assert type(caught.value) is kind
    assert caplog.text == ""


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
    _, second = await ends(2, lambda urls: None)

    assert second == "worker 0 ended (status 2: it is wrong): started again in 1 s"


@pytest.mark.parametrize(
    "worse",
    [
        pytest.param(("drain_s: 1", "drain_s: of a while"), id="invalid"),
        pytest.param(("light}", "light, api_key_env: NOT_SET}"), id="its-secret-is-missing"),
    ],
)
async def test_a_worker_that_is_started_later_gets_what_the_file_says_then_if_it_is_usable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, worse: tuple[str, str]
) -> None:
    monkeypatch.setattr(supervisor, "LOOK_S", 0.01)
    monkeypatch.setattr(keeper, "PAUSE_S", 0.02)
    monkeypatch.setattr(keeper, "PAUSE_MAX_S", 0.02)
    orders, better = tmp_path / "orders", tmp_path / "better.yaml"
    path = configured(tmp_path, "shutdown: {drain_s: 1}", "store: redis://127.0.0.1:9")
    started = path.read_text()
    # What is missing of a section that only a start reads is not in the way.
    better.write_text(started.replace("drain_s: 1", "drain_s: 7") + "\ndecisions: {file: nowhere/decisions}")
    lines = (
        "read -r order",
        f"printf '%s\\n' \"$order\" >> {orders}",
        "echo '{}'",
        f"[ $(wc -l < {orders}) = 5 ] && cp {better} {path}",
        'case "$order" in *"drain_s: 7"*) kill -TERM $PPID; head -c 1 >/dev/null; exit 0; esac',
        "exit 7",
    )
    monkeypatch.setattr(sys, "executable", script(tmp_path, *lines))

    def ready(serving: supervisor.Serving) -> None:
        path.write_text(started.replace(*worse))

    with anyio.fail_after(30):
        assert await supervisor.serve(settings.load(path, {}), {}, 1, "info", ready=ready) == 0
    received = [json.loads(order) for order in orders.read_text().splitlines()]
    assert {order["source"] for order in received} == {started}
    assert {order["changed"] for order in received} == {None, better.read_text()}


async def test_a_worker_that_is_started_after_a_signal_to_reload_gets_what_was_read_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders = tmp_path / "orders"
    sections = "shutdown: {drain_s: 1}", "store: redis://127.0.0.1:9", "reload: {watch: false}"
    path = configured(tmp_path, *sections)
    started = path.read_text()
    lines = (
        "read -r order",
        f"printf '%s\\n' \"$order\" >> {orders}",
        "echo '{}'",
        'case "$order" in *"drain_s: 7"*) kill -TERM $PPID; head -c 1 >/dev/null; exit 0; esac',
        "head -c 1 >/dev/null",  # it is told to reload
        "exit 7",
    )
    monkeypatch.setattr(sys, "executable", script(tmp_path, *lines))

    def ready(serving: supervisor.Serving) -> None:
        path.write_text(started.replace("drain_s: 1", "drain_s: 7"))
        os.kill(os.getpid(), signal.SIGHUP)

    with anyio.fail_after(20):
        assert await supervisor.serve(settings.load(path, {}), {}, 1, "info", ready=ready) == 0
    received = [json.loads(order) for order in orders.read_text().splitlines()]
    assert [order["source"] for order in received] == [started] * 2
    assert [order["changed"] for order in received] == [None, path.read_text()]


class Slow(dict[str, str]):
    """An environment that keeps whoever examines a configuration waiting until something can be read.

    `begun` is called once, by the first: the thread of a later one may outlive what it would signal.
    """

    def __init__(self, awaited: int, begun: Callable[[], None]) -> None:
        super().__init__(DRAIN="60")
        self._awaited = awaited
        self._begun = [begun]
        self.in_vain = False

    def get(self, name: str, default: Any = None) -> Any:
        """Return a variable; see `os.environ`."""
        while self._begun:
            self._begun.pop()()
        self.in_vain |= not select.select([self._awaited], [], [], 5.0)[0]
        return super().get(name, default)


@pytest.mark.parametrize("watch", ["true", "false"])
async def test_a_stop_is_not_held_up_by_a_file_that_takes_long_to_examine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watch: str
) -> None:
    monkeypatch.setattr(supervisor, "LOOK_S", 0.01)
    told = tmp_path / "told"
    os.mkfifo(told)
    awaited = os.open(told, os.O_RDONLY | os.O_NONBLOCK)
    lines = "read order", "echo '{}'", "head -c 1 >/dev/null", f"echo > {told}"
    monkeypatch.setattr(sys, "executable", script(tmp_path, *lines))
    path = configured(tmp_path, "store: redis://127.0.0.1:9", f"reload: {{watch: {watch}}}")
    stop = partial(os.kill, os.getpid(), signal.SIGTERM)
    slow = Slow(awaited, stop if watch == "true" else lambda: None)

    def ready(serving: supervisor.Serving) -> None:
        path.write_text(path.read_text() + '\nshutdown: {drain_s: "${DRAIN}"}')
        if watch == "false":
            stop()

    with anyio.fail_after(20):
        assert await supervisor.serve(settings.load(path, {}), slow, 1, "info", ready=ready) == 0
    os.close(awaited)
    assert not slow.in_vain


class Faulty(dict[str, str]):
    """An environment with a fault, which stops this process when it is first met."""

    def __init__(self) -> None:
        super().__init__(DRAIN="60")
        self.times_met = 0

    def get(self, name: str, default: Any = None) -> Any:
        """Return a variable; see `os.environ`."""
        self.times_met += 1
        if self.times_met == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        raise TypeError("a fault")


@pytest.mark.parametrize("watch", ["true", "false"])
async def test_a_fault_of_the_gateway_s_own_in_a_new_file_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watch: str
) -> None:
    monkeypatch.setattr(supervisor, "LOOK_S", 0.01)
    lines = "read order", "echo '{}'", """until [ "$(head -c 1)" = ! ]; do :; done"""
    monkeypatch.setattr(sys, "executable", script(tmp_path, *lines))
    path = configured(tmp_path, "store: redis://127.0.0.1:9", f"reload: {{watch: {watch}}}")
    faulty = Faulty()

    def ready(serving: supervisor.Serving) -> None:
        path.write_text(path.read_text() + '\nshutdown: {drain_s: "${DRAIN}"}')
        if watch == "false":
            os.kill(os.getpid(), signal.SIGHUP)

    with anyio.fail_after(20):
        assert await supervisor.serve(settings.load(path, {}), faulty, 1, "info", ready=ready) == 0
    assert faulty.times_met


def test_how_long_workers_may_drain_can_change(tmp_path: Path) -> None:
    path = configured(tmp_path, "shutdown: {drain_s: 7, notice_s: 1}")
    group = WorkerGroup(6.0, lambda urls: None)
    group.follow(None)
    assert group.end_s == 6.0
    group.follow(settings.load(path, {}))
    assert group.end_s == 8.0
    path.write_text(path.read_text().replace("drain_s: 7", "drain_s: 1"))
    group.follow(settings.load(path, {}))
    assert group.end_s == 8.0  # some may still drain by the one before
