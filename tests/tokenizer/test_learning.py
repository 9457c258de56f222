"""What answers teach, and how little any one of them can."""

import math

import pytest

from gateway.core.class_counts import TextKind
from gateway.core.facts import Ratio
from gateway.tokenizer.learning import MARGIN_WINDOW, RATIO_MAX, RATIO_MIN, LearnedMargin, LearnedRatios

LATIN = TextKind.LATIN


def taught(*answers: tuple[int, int], times: int = 1) -> LearnedRatios:
    ratios = LearnedRatios()
    for _ in range(times):
        for counted, true in answers:
            ratios.observe(LATIN, counted, true)
    return ratios


def test_nothing_is_known_at_first() -> None:
    assert LearnedRatios().ratio(LATIN) == 1.0
    assert LearnedMargin().p99_tokens == 0


def test_many_answers_of_one_kind_teach_its_ratio() -> None:
    assert taught((1000, 1100), times=400).ratio(LATIN) == pytest.approx(1.1, abs=0.01)


def test_a_kind_learns_nothing_from_another() -> None:
    assert taught((1000, 1100), times=400).ratio(TextKind.CYRILLIC) == 1.0


@pytest.mark.parametrize("true", [1, 10**9], ids=["far-below", "far-above"])
def test_one_answer_moves_a_ratio_by_two_percent_at_most(true: int) -> None:
    assert taught((1000, true)).ratio(LATIN) == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize(
    ("true", "ratio"), [(1, RATIO_MIN), (10**9, RATIO_MAX)], ids=["far-below", "far-above"]
)
def test_no_number_of_answers_moves_a_ratio_out_of_bounds(true: int, ratio: float) -> None:
    assert taught((1000, true), times=10_000).ratio(LATIN) == ratio


def test_a_ratio_follows_when_the_traffic_changes() -> None:
    ratios = taught((1000, 900), times=5000)
    for _ in range(1000):
        ratios.observe(LATIN, 1000, 1100)

    assert ratios.ratio(LATIN) > 1.05


@pytest.mark.parametrize(
    ("counted", "true"),
    [(199, 400), (0, 10), (1000, 0), (1000, -5)],
    ids=["short", "empty", "none", "negative"],
)
def test_answers_that_cannot_tell_are_left_out(counted: int, true: int) -> None:
    assert taught((counted, true), times=100).ratio(LATIN) == 1.0


def test_the_margin_is_what_99_of_100_errors_stay_below() -> None:
    margin = LearnedMargin()
    for error in range(200):
        margin.observe(error)

    assert margin.p99_tokens == 197


def test_prompts_shorter_than_counted_need_no_margin() -> None:
    margin = LearnedMargin()
    for error in [3, -5000]:
        margin.observe(error)

    assert margin.p99_tokens == 3


def test_a_single_error_in_two_hundred_does_not_set_the_margin() -> None:
    margin = LearnedMargin()
    for error in [1] * 199 + [5000]:
        margin.observe(error)

    assert margin.p99_tokens == 1


def test_old_errors_are_forgotten() -> None:
    margin = LearnedMargin()
    for error in [5000] * 200 + [2] * 200:
        margin.observe(error)

    assert margin.p99_tokens == 2


# ------------------------------------------------------------------ what others have learned


@pytest.mark.parametrize(
    ("own", "elsewhere", "ratio"),
    [
        (0, Ratio(200, math.log(1.1)), 1.1),
        (200, Ratio(200, math.log(1.1)), 1.1),
        (200, Ratio(200, -math.log(1.1)), 1.0),
        (200, Ratio(0, 0.0), 1.1),
        (200, Ratio(10_000, 1.0), RATIO_MAX),
        (0, Ratio(10_000, -1.0), RATIO_MIN),
    ],
    ids=["only-theirs", "both-alike", "both-against", "only-ones-own", "bounded-above", "bounded-below"],
)
def test_a_ratio_is_what_all_answers_taught(own: int, elsewhere: Ratio, ratio: float) -> None:
    ratios = taught((1000, 1100), times=own)
    ratios.elsewhere = {LATIN: elsewhere}

    assert ratios.ratio(LATIN) == pytest.approx(ratio, abs=0.01)


def test_what_others_taught_never_becomes_ones_own() -> None:
    ratios = taught((1000, 1100), times=50)
    alone = dict(ratios.seen)
    ratios.elsewhere = {LATIN: Ratio(200, -0.2)}
    ratios.ratio(LATIN)
    assert ratios.seen == alone

    ratios.observe(LATIN, 1000, 1100)

    assert ratios.seen == taught((1000, 1100), times=51).seen


@pytest.mark.parametrize(("own", "elsewhere", "tokens"), [(30, 0, 30), (30, 90, 90), (90, 30, 90)])
def test_the_larger_margin_counts(own: int, elsewhere: int, tokens: int) -> None:
    margin = LearnedMargin()
    margin.observe(own)
    margin.elsewhere_tokens = elsewhere

    assert (margin.tokens, margin.p99_tokens) == (tokens, own)


def test_the_margin_is_that_of_the_last_answers_whatever_came_before() -> None:
    margin, errors = LearnedMargin(), [(number * 7919) % 503 - 250 for number in range(3 * MARGIN_WINDOW)]
    for seen, error in enumerate(errors, 1):
        margin.observe(error)
        last = sorted(max(0, one) for one in errors[:seen][-MARGIN_WINDOW:])
        assert margin.p99_tokens == last[math.ceil(0.99 * len(last)) - 1]
