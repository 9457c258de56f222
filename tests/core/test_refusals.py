"""Backends that have refused a request because of load."""

from dataclasses import replace

import pytest
from support.world import POLICY

from gateway.core.refusals import KEPT_S, REFUSED_S, Refusal, Refusals

LIGHT_0 = POLICY.backends["light-0"]
BACKENDS = {**POLICY.backends, "gone": replace(LIGHT_0, id="gone")}


def _last(refusals: Refusals) -> Refusal:
    return refusals.last(POLICY)["light-0"]


def _recent(refusals: Refusals, now: float) -> list[str]:
    return [name for name, last in refusals.last(POLICY).items() if last.is_recent(now)]


def _unanswered(refusals: Refusals) -> list[str]:
    return [name for name, last in refusals.last(POLICY).items() if last.is_unanswered]


def test_what_has_refused_a_request_is_known_for_a_while() -> None:
    made = Refusals()
    assert not made.known
    made.refused(LIGHT_0, 4, 100.0)
    made.refused(LIGHT_0, 4, 100.5)
    made.refused(BACKENDS["gone"], 4, 100.5)
    made.refused(replace(BACKENDS["light-1"], url="http://elsewhere"), 4, 100.5)
    assert _recent(made, 100.4 + REFUSED_S) == ["light-0"]
    assert _recent(made, 100.5 + REFUSED_S) == []
    made.forget(100.4 + KEPT_S)
    assert _unanswered(made) == ["light-0"]
    made.forget(100.5 + KEPT_S)
    assert not made.known
    assert _unanswered(made) == []


def test_what_answers_a_request_no_longer_refuses_all_of_them() -> None:
    made = Refusals()
    made.refused(LIGHT_0, 4, 100.0)
    made.answered(LIGHT_0, 0)
    assert _recent(made, 100.0) == ["light-0"]
    assert _unanswered(made) == []
    made.refused(LIGHT_0, 4, 100.1)
    assert _unanswered(made) == ["light-0"]


def test_what_has_refused_a_request_is_tried_with_one_more_and_then_with_many() -> None:
    made = Refusals()
    made.refused(LIGHT_0, 4, 100.0)
    later = (0, 0.9, 1, 1.9, 2, 3, 6)
    assert [_last(made).takes(100.0 + one * REFUSED_S) for one in later] == [
        4,
        4,
        5,
        5,
        7,
        11,
        67,
    ]


@pytest.mark.parametrize(
    ("before_s", "others", "takes"), [(0.9, 6, 4), (0.9, 3, 3), (1.0, 6, 6), (1.0, 3, 3)]
)
def test_of_refusals_in_a_row_the_least_counts(before_s: float, others: int, takes: int) -> None:
    made = Refusals()
    made.refused(LIGHT_0, 4, 100.0 - before_s * REFUSED_S)
    made.refused(LIGHT_0, others, 100.0)
    assert _last(made).takes(100.0) == takes


def test_one_that_says_when_to_ask_it_again_is_asked_after_others_and_with_no_more_until_then() -> None:
    made = Refusals()
    made.refused(LIGHT_0, 4, 100.0, again_s=30.0)
    assert _recent(made, 129.9) == ["light-0"]
    assert _recent(made, 130.0) == []
    assert [_last(made).takes(now) for now in (129.9, 130.0, 131.0)] == [4, 5, 7]
    made.refused(LIGHT_0, 9, 129.0, again_s=0.0)
    assert _last(made).takes(129.0) == 4
    assert _recent(made, 129.0 + REFUSED_S) == []


@pytest.mark.parametrize(
    ("taken", "others", "takes_others", "takes"),
    [(-1, 4, False, 4), (3, 4, False, 4), (4, 4, True, 4), (6, 4, True, 4), (6, 7, False, 6)],
)
def test_what_has_taken_one_while_no_fewer_ran_refuses_another_for_what_it_is(
    taken: int, others: int, takes_others: bool, takes: int
) -> None:
    made = Refusals()
    assert not made.refused(LIGHT_0, 4, 100.0)
    made.answered(LIGHT_0, taken)
    assert _last(made).takes(100.0) == max(4, taken)
    assert made.refused(LIGHT_0, others, 100.1) == takes_others
    assert _last(made).takes(100.1) == takes
    assert not made.refused(LIGHT_0, others, 100.2)


def test_what_refuses_while_it_runs_nothing_refuses_all_until_it_answers_one() -> None:
    made = Refusals()
    for others, at, refuses_all in [
        (3, 100.0, False),
        (0, 100.1, False),
        (3, 101.1, False),
        (0, 101.2, True),
    ]:
        made.refused(LIGHT_0, others, at)
        assert _last(made).is_of_all(at) == refuses_all
    assert _last(made).is_of_all(101.1 + REFUSED_S)
    assert not _last(made).is_of_all(101.3 + REFUSED_S)  # one may ask again
    made.answered(LIGHT_0, 0)
    assert not _last(made).is_of_all(101.2)
    made.refused(LIGHT_0, 0, 101.3)
    assert not _last(made).is_of_all(101.3)


def test_what_the_server_at_a_former_url_has_refused_says_nothing_of_the_one_there_now() -> None:
    made = Refusals()
    made.refused(replace(LIGHT_0, url="http://elsewhere"), 1, 100.0)
    made.refused(LIGHT_0, 4, 100.0)
    assert _last(made).takes(100.0) == 4
