"""What conditions admit: which include which, what is left, what can never match."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.classification import mismatch
from gateway.core.policy import Bound, Comparison, ModelPolicy, TrafficClass, When
from gateway.core.request import CountMode, Endpoint, Estimate, Prompt, Request
from gateway.settings import reach as reaching
from gateway.settings.reach import Interval, Reach

GE, GT, LE, LT, EQ = Comparison.GE, Comparison.GT, Comparison.LE, Comparison.LT, Comparison.EQ


RESERVE = 1000


def reach(when: When, output_reserve_tokens: int = RESERVE) -> Reach:
    return reaching.reach(when, output_reserve_tokens)


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


@pytest.mark.parametrize(
    ("later", "reserve", "is_within"),
    [
        pytest.param(When(total_tokens=at(GE, 100)), 20, True, id="a-smaller-reserve"),
        pytest.param(When(total_tokens=at(GE, 100)), 21, False, id="a-larger-one-makes-a-longer-total"),
        pytest.param(When(total_tokens=at(GE, 101)), 21, True, id="as-much-longer-as-the-reserve"),
        pytest.param(
            When(total_tokens=at(GE, 100), max_tokens=at(GE, 1)), 21, True, id="where-max-tokens-is-given"
        ),
        pytest.param(When(prompt_tokens=at(GE, 100)), 9000, True, id="a-prompt-is-a-total-by-itself"),
        pytest.param(When(prompt_tokens=at(GE, 99)), 9000, False, id="a-shorter-prompt-is-none"),
    ],
)
def test_a_total_is_one_by_the_reserve_of_its_class(later: When, reserve: int, is_within: bool) -> None:
    assert reach(later, reserve).within(reach(When(total_tokens=at(GE, 100)), 20)) is is_within


def test_an_upper_end_of_totals_holds_by_the_reserve_of_its_class() -> None:
    short = reach(When(total_tokens=at(LE, 100)), 20)

    assert reach(When(total_tokens=at(LE, 100)), 21).within(short), "less of it is prompt"
    assert not reach(When(total_tokens=at(LE, 100)), 19).within(short)


bounds = st.lists(st.builds(Bound, st.sampled_from(Comparison), st.integers(0, 12)), max_size=2).map(tuple)
conditions = st.builds(When, prompt_tokens=bounds, total_tokens=bounds, max_tokens=bounds)
classes = st.lists(
    st.builds(
        TrafficClass,
        st.just("one"),
        st.just(()),
        when=conditions,
        output_reserve_tokens=st.integers(1, 6),
    ),
    min_size=2,
    max_size=2,
)


@settings(deadline=None)
@given(classes)
def test_what_is_said_to_be_taken_is_taken_by_the_earlier_class(pair: list[TrafficClass]) -> None:
    earlier, later = (reach(one.when, one.output_reserve_tokens) for one in pair)
    model = ModelPolicy("m", classes=tuple(pair))
    left = later.without(earlier)

    for prompt, most in product(range(16), (None, *range(1, 16))):
        request = Request(Endpoint.CHAT, "m", Prompt(), max_tokens=most)
        estimate = Estimate(prompt, prompt, CountMode.EXACT)
        first, second = (mismatch(model, one, request, estimate) is None for one in pair)
        assert not (second and later.is_empty)
        assert not (second and not first and later.within(earlier))
        if second and not first:
            assert Interval(prompt, prompt).within(left.counts["prompt_tokens"])


def test_classes_with_another_header_or_key_are_told_apart_without_comparing_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def within(one: Interval, other: Interval) -> bool:
        raise AssertionError("numbers were compared")

    monkeypatch.setattr(Interval, "within", within)
    one, other = (
        reaching.reach(When(headers=(("x-team", ("a",)),)), 0),
        reaching.reach(When(headers=(("x-team", ("b",)),)), 0),
    )
    assert not one.within(other)
    assert one.without(other) is one
    assert not reaching.reach(When(keys=("a",)), 0).within(reaching.reach(When(keys=("b",)), 0))
