"""What conditions admit: which include which, what is left, what can never match."""

import pytest

from gateway.core.values import Bound, Comparison, When
from gateway.settings.reach import Interval, reach

GE, GT, LE, LT, EQ = Comparison.GE, Comparison.GT, Comparison.LE, Comparison.LT, Comparison.EQ


def at(op: Comparison, value: int) -> tuple[Bound, ...]:
    return (Bound(op, value),)


@pytest.mark.parametrize(
    ("bounds", "low", "high"),
    [
        pytest.param((), 0, None, id="everything"),
        pytest.param(at(GE, 5), 5, None, id="at-least"),
        pytest.param(at(GT, 5), 6, None, id="above"),
        pytest.param(at(LE, 5), 0, 5, id="at-most"),
        pytest.param(at(LT, 5), 0, 4, id="below"),
        pytest.param(at(EQ, 5), 5, 5, id="equal"),
        pytest.param((*at(GE, 5), *at(LT, 9), *at(LE, 20)), 5, 8, id="the-tightest-of-each-side"),
    ],
)
def test_bounds_are_an_interval(bounds: tuple[Bound, ...], low: int, high: int | None) -> None:
    assert reach(When(prompt_tokens=bounds)).counts["prompt_tokens"] == Interval(low, high)


@pytest.mark.parametrize(
    ("inner", "outer"),
    [
        pytest.param(When(reasoning=True), When(), id="anything-in-everything"),
        pytest.param(When(prompt_tokens=at(GE, 9)), When(prompt_tokens=at(GE, 5)), id="longer-in-long"),
        pytest.param(
            When(prompt_tokens=at(GE, 9)), When(total_tokens=at(GE, 9)), id="a-long-prompt-is-a-long-total"
        ),
        pytest.param(When(max_tokens=at(GE, 9)), When(total_tokens=at(GE, 5)), id="so-is-a-long-answer"),
        pytest.param(When(keys=("a",)), When(keys=("a", "b")), id="one-key-of-two"),
        pytest.param(When(headers=(("x", ("1",)),)), When(headers=(("x", ()),)), id="a-value-in-any-value"),
        pytest.param(
            When(headers=(("x", ("1",)), ("y", ()))),
            When(headers=(("x", ("1", "2")),)),
            id="more-headers-asked-for",
        ),
        pytest.param(When(images=at(EQ, 2)), When(images=at(GT, 0)), id="two-images-in-any"),
    ],
)
def test_one_condition_within_another_and_not_the_reverse(inner: When, outer: When) -> None:
    assert reach(inner).within(reach(outer))
    assert not reach(outer).within(reach(inner))


@pytest.mark.parametrize(
    "when",
    [
        pytest.param(When(prompt_tokens=(*at(GE, 9), *at(LT, 9))), id="an-empty-interval"),
        pytest.param(When(images=at(LT, 0)), id="below-zero"),
        pytest.param(When(prompt_tokens=at(GE, 100), total_tokens=at(LE, 50)), id="prompt-above-total"),
        pytest.param(When(max_tokens=at(GE, 100), total_tokens=at(LE, 50)), id="answer-above-total"),
    ],
)
def test_what_can_never_match(when: When) -> None:
    assert reach(when).is_empty


def test_everything_is_everything_and_a_bound_that_excludes_nothing_too() -> None:
    assert reach(When()).is_everything
    assert reach(When(prompt_tokens=at(GE, 0))).is_everything
    assert not reach(When(max_tokens=at(GE, 0))).is_everything, "it needs max_tokens to be given"
    assert not reach(When(stream=False)).is_everything


@pytest.mark.parametrize(
    ("earlier", "later", "high"),
    [
        pytest.param(When(prompt_tokens=at(GE, 16)), When(), 15, id="the-long-ones-are-gone"),
        pytest.param(When(prompt_tokens=at(GE, 16)), When(prompt_tokens=at(LE, 9)), 9, id="were-never-there"),
        pytest.param(When(prompt_tokens=at(LE, 16)), When(), None, id="the-short-ones-leave-no-upper-end"),
        pytest.param(
            When(prompt_tokens=at(GE, 16), reasoning=True),
            When(),
            None,
            id="only-some-of-the-long-ones-are-gone",
        ),
        pytest.param(
            When(prompt_tokens=at(GE, 16), reasoning=True),
            When(reasoning=True),
            15,
            id="all-of-those-meant-here",
        ),
    ],
)
def test_what_an_earlier_class_leaves(earlier: When, later: When, high: int | None) -> None:
    assert reach(later).without(reach(earlier)).counts["prompt_tokens"].high == high
