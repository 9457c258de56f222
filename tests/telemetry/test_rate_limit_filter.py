"""What goes wrong again and again does not fill the log, and how things stand is written last."""

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from gateway.core.health import BackendStatus, State
from gateway.events import about
from gateway.telemetry import logs
from gateway.telemetry.logs import CALM_LINES, CALM_S, RateLimitFilter

log = logging.getLogger("gateway.test")


class Written:
    """What a log has written, with lines that are written at any time."""

    def __init__(self) -> None:
        self.out = io.StringIO()
        logs.set_up("info", self.out)
        (self.handler,) = logging.getLogger().handlers
        (self.calm,) = (one for one in self.handler.filters if isinstance(one, RateLimitFilter))

    def say(self, at: float, name: str, **fields: Any) -> None:
        record = log.makeRecord(
            log.name, logging.WARNING, "", 0, "at %s", (at,), None, extra=about(name, **fields)
        )
        record.created = at
        self.handler.handle(record)

    def take(self) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.out.getvalue().splitlines()]
        self.out.seek(0)
        self.out.truncate()
        return lines


@pytest.fixture
def written() -> Iterator[Written]:
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    yield Written()
    root.handlers, root.level = handlers, level


@pytest.mark.parametrize("name", ["request", "config_change", "operator_retried_job", "webhook_lost"])
def test_what_is_said_of_one_thing_each_is_always_written(written: Written, name: str) -> None:
    for number in range(3 * CALM_LINES):
        written.say(1000.0 + number / 100, name)
    assert len(written.take()) == 3 * CALM_LINES


def test_the_newest_of_what_was_kept_back_is_told_when_the_minute_is_over(written: Written) -> None:
    for number in range(CALM_LINES + 5):
        written.say(1000.0 + number, "store_away", store="jobs")
    lines = written.take()
    assert [line["message"] for line in lines] == [f"at {1000.0 + number}" for number in range(CALM_LINES)]
    logs.tell_kept_back(1000.0 + CALM_S - 0.1)
    assert written.take() == []
    logs.tell_kept_back(1000.0 + CALM_S)
    (last,) = written.take()
    assert (last["message"], last["kept_back"]) == (f"at {1000.0 + CALM_LINES + 4}", 4)
    logs.tell_kept_back(1e12)
    assert written.take() == []


@pytest.mark.parametrize("said", [CALM_LINES + 1, CALM_LINES + 2, 100])
def test_what_was_written_and_what_was_not_add_up(written: Written, said: int) -> None:
    for _ in range(said):
        written.say(1000.0, "attempt_failed", backend="a")
    logs.tell_kept_back(1e12)
    lines = written.take()
    assert len(lines) + sum(line.get("kept_back", 0) for line in lines) == said


def test_after_a_minute_lines_are_written_again_though_nobody_asked(written: Written) -> None:
    for _ in range(CALM_LINES + 3):
        written.say(1000.0, "store_away", store="jobs")
    written.take()
    written.say(1000.0 + CALM_S, "store_away", store="jobs")
    (line,) = written.take()
    assert line["kept_back"] == 3
    written.say(1001.0 + CALM_S, "store_away", store="jobs")
    assert "kept_back" not in written.take()[0]


def test_each_subject_has_lines_of_its_own(written: Written) -> None:
    for number in range(CALM_LINES + 1):
        for backend in ("a", "b"):
            written.say(1000.0 + number, "attempt_failed", backend=backend)
        written.say(1000.0 + number, "store_back", store="jobs")
    assert len(written.take()) == 3 * CALM_LINES


@pytest.mark.parametrize("name", ["request", "request_queued", "job_ended", "batch_ended"])
def test_what_there_is_one_of_is_always_written(written: Written, name: str) -> None:
    for number in range(3 * CALM_LINES):
        written.say(1000.0, name, id=f"id-{number}", lane="m/chat")
    assert len(written.take()) == 3 * CALM_LINES


def test_a_library_that_repeats_itself_is_kept_back_as_well(written: Written) -> None:
    for number in range(CALM_LINES + 2):
        logging.getLogger("library").warning("attempt %d", number)
    assert len(written.take()) == CALM_LINES


def test_a_backend_that_flaps_ends_in_the_state_that_it_is_in(written: Written) -> None:
    states = [BackendStatus(state=State.UP), BackendStatus(state=State.EJECTED, reason="failed")]
    for number in range(101):
        old, new = states[number % 2], states[(number + 1) % 2]
        logs.backend_changed("light-0", old, new)
    assert len(written.take()) == CALM_LINES
    logs.tell_kept_back(1e12)
    (last,) = written.take()
    assert (last["state"], last["kept_back"]) == ("ejected", 90)


def test_nothing_is_kept_of_subjects_that_are_quiet(written: Written) -> None:
    for number in range(100):
        written.say(1000.0, "job_lost", lane=f"m/{number}")
    assert len(written.calm._seen) == 100
    logs.tell_kept_back(1000.0 + CALM_S)
    assert not written.calm._seen


def test_a_clock_that_is_set_back_keeps_nothing_back_for_hours(written: Written) -> None:
    for number in range(CALM_LINES + 3):
        written.say(100_000.0 + number, "store_away", store="jobs")
    written.take()
    logs.tell_kept_back(90_000.0)
    (last,) = written.take()
    assert (last["message"], last["kept_back"]) == (f"at {100_000.0 + CALM_LINES + 2}", 2)
    for number in range(CALM_LINES + 3):
        written.say(100_000.0 + number, "backend_state", backend="a")
    written.take()
    written.say(90_000.0, "backend_state", backend="a")
    (line,) = written.take()
    assert (line["message"], line["kept_back"]) == ("at 90000.0", 3)
