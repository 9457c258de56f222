import json
from dataclasses import replace
from math import inf

import pytest

from gateway.core.box import Box, Quarantine, State
from gateway.core.box_report import Hearing, Note, note, read, read_note, stage, written
from gateway.core.swap_policy import Backlog, Cause

BOX = Box(
    state=State.STOPPING,
    since=990.0,
    reason="4 requests wait for qwen",
    backend="gemma",
    target="qwen",
    cause=Cause.JOBS,
    pending=("phi",),
    number=12,
    fence=1_795_244_911_000,
    is_started=True,
    tries=2,
    failure="HTTP 500",
    resident_since=100.0,
    batch_at=110.0,
    busy_at=980.0,
    served_at=970.0,
    moved_at=960.0,
    oldest_at=90.0,
    due_at=950.0,
    quarantine={"phi": Quarantine("canary failed: its answer is empty", 600.0, gone=True)},
    restarts={"gemma": (500.0,)},
    boot_s={"gemma": 301.5},
    swaps=3,
)


def test_a_box_is_read_as_it_was_written_by_a_clock_of_ones_own() -> None:
    def later(at: float) -> float:
        return at + 70_000.0

    assert read(written(BOX, 1000.0), 71_000.0) == replace(
        BOX,
        since=later(990.0),
        resident_since=later(100.0),
        batch_at=later(110.0),
        busy_at=later(980.0),
        served_at=later(970.0),
        moved_at=later(960.0),
        oldest_at=later(90.0),
        due_at=later(950.0),
        quarantine={"phi": replace(BOX.quarantine["phi"], at=later(600.0))},
        restarts={"gemma": (later(500.0),)},
    )


def test_a_box_of_a_version_that_tells_of_neither_failures_nor_fences_is_read() -> None:
    told = json.loads(written(BOX, 0.0))
    del told["failure"], told["fence"]
    assert read(json.dumps(told), 0.0) == replace(BOX, failure="", fence=0)


def test_a_note_of_a_version_that_does_not_tell_what_it_knows_is_read() -> None:
    assert read_note('{"gemma": [2, 10.0, null]}', 50.0) == Note(wants={"gemma": Backlog(2, 40.0)})


def test_what_one_process_counted_and_planned_stays_with_it() -> None:
    own = replace(BOX, known_restarts={"gemma": 7}, retry_at=1005.0, is_timed=True)
    assert written(own, 1000.0) == written(BOX, 1000.0)


ENDLESS = "[" * 100_000


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", "null", '{"state": "asleep"}', written(BOX, 0.0)[:-9], ENDLESS]
)
def test_what_cannot_be_read_is_no_report(text: str) -> None:
    assert read(text, 0.0) is None


def test_a_field_that_another_version_lacks_is_no_report() -> None:
    assert read(written(BOX, 0.0).replace('"boot_s"', '"boots"'), 0.0) is None


def test_what_waits_is_told_as_ages_and_what_is_known_as_it_is() -> None:
    wants = {"gemma": Backlog(2, 990.0), "qwen": Backlog(), "phi": Backlog(0, None, 995.0)}
    told = {"gemma": Backlog(2, 40.0), "phi": Backlog(0, None, 45.0)}
    assert read_note(note(wants, BOX, 1000.0), 50.0) == Note(("stopping", "gemma"), told)


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "3", "{}", '{"gemma": 3}', '{"gemma": [1, 2]}', ENDLESS),
        *('{"knows": 3, "wants": {}}', '{"knows": ["draining", "gemma"]}'),
        *(
            f'{{"knows": ["draining", "gemma"], "wants": {{"gemma": {wrong}}}}}'
            for wrong in ("3", "[1, 2]", '[1, "x", 1]', "[1e999, 1, 1]")
        ),
    ],
)
def test_a_note_that_cannot_be_read_says_nothing(text: str) -> None:
    assert read_note(text, 0.0) == Note()


DRAINING = Box(State.DRAINING, backend="gemma", target="qwen")
AWARE, UNAWARE = (Note(stage(one)) for one in (DRAINING, Box(State.RESIDENT, backend="gemma")))


@pytest.mark.parametrize(
    ("rounds", "heard_s"),
    [
        pytest.param([(0, []), (3, [])], 3, id="nobody-else"),
        pytest.param([(0, [AWARE, UNAWARE]), (3, [AWARE, UNAWARE])], -inf, id="one-does-not-know"),
        pytest.param([(0, [UNAWARE, UNAWARE]), (2, [AWARE, AWARE]), (3, [AWARE, AWARE])], 1, id="all-know"),
        pytest.param([(0, [AWARE]), (3, [AWARE, UNAWARE])], 3, id="one-that-has-just-started"),
        pytest.param([(0, [AWARE, UNAWARE]), (9, [AWARE]), (10, [AWARE])], 1, id="one-has-gone"),
        pytest.param([(0, [UNAWARE]), (14.9, [UNAWARE])], -inf, id="silence"),
        pytest.param([(0, [UNAWARE]), (15, [UNAWARE]), (16, [UNAWARE])], 1, id="silence-for-too-long"),
        pytest.param([(0, [Note()]), (15, [Note()])], 0, id="one-of-another-version"),
    ],
)
def test_since_when_all_others_know_what_the_box_is_doing(
    rounds: list[tuple[float, list[Note]]], heard_s: float
) -> None:
    hearing = Hearing()
    told = [hearing.heard_s(DRAINING, others, 1000.0 + at) for at, others in rounds]
    assert told[-1] == heard_s


def test_what_was_known_before_another_state_or_a_silence_does_not_count() -> None:
    hearing = Hearing()
    assert hearing.heard_s(DRAINING, [AWARE], 1000.0) == 0
    assert hearing.heard_s(replace(DRAINING, state=State.RESIDENT), [AWARE], 1002.0) == -inf
    assert hearing.heard_s(DRAINING, [AWARE], 1003.0) == 0
    hearing.forget()
    assert hearing.heard_s(DRAINING, [UNAWARE], 1009.0) == -inf
    assert hearing.heard_s(DRAINING, [AWARE], 1010.0) == 0
