"""How conditions are written."""

from typing import Any

import pytest

from gateway.core.policy import Bound, Comparison
from gateway.settings.conditions import bounds, count_bounds, header_values

GE, GT, LE, LT, EQ = Comparison.GE, Comparison.GT, Comparison.LE, Comparison.LT, Comparison.EQ


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        pytest.param(">= 16000", [(GE, 16_000)], id="at-least"),
        pytest.param(">16000", [(GT, 16_000)], id="above-without-a-space"),
        pytest.param("<= 2048", [(LE, 2_048)], id="at-most"),
        pytest.param(" < 100 ", [(LT, 100)], id="below-with-spaces"),
        pytest.param("== 4", [(EQ, 4)], id="equal"),
        pytest.param("= 4", [(EQ, 4)], id="one-equals-sign"),
        pytest.param("4", [(EQ, 4)], id="a-number-in-quotes"),
        pytest.param(4, [(EQ, 4)], id="a-number"),
        pytest.param(0, [(EQ, 0)], id="zero"),
        pytest.param(">= 16_000", [(GE, 16_000)], id="underscores"),
        pytest.param(">= 16000, < 100000", [(GE, 16_000), (LT, 100_000)], id="both-must-hold"),
        pytest.param([">= 1", "< 5"], [(GE, 1), (LT, 5)], id="a-list"),
        pytest.param([">= 1, < 9", "> 5"], [(GE, 1), (LT, 9), (GT, 5)], id="a-list-of-anything"),
        pytest.param([4], [(EQ, 4)], id="a-list-of-a-number"),
    ],
)
def test_comparisons(written: Any, meant: list[tuple[Comparison, int]]) -> None:
    assert bounds(written) == tuple(Bound(op, value) for op, value in meant)
    assert count_bounds(written) == bounds(written)


@pytest.mark.parametrize(
    "written",
    [2**53 + 1, f"<= {2**53 + 1}", f"> {'9' * 999}", f"> {'9' * 4300}", f"< {'9' * 5000}"],
    ids=["a-number", "one-more", "long", "as-long-as-python-reads", "longer"],
)
def test_no_number_is_larger_than_what_is_exact(written: Any) -> None:
    """Texts about one of 4,300 digits cannot be written, so that `check` itself ended in an error."""
    with pytest.raises(ValueError, match=r"^it must be at most 9,007,199,254,740,992$"):
        bounds(written)


def test_the_largest_number() -> None:
    assert bounds(f"<= {2**53}") == (Bound(LE, 2**53),)


@pytest.mark.parametrize(
    "written",
    [
        pytest.param("about 16000", id="words"),
        pytest.param(">= 16K", id="a-unit-that-may-mean-two-things"),
        pytest.param("=> 16000", id="a-sign-the-wrong-way-round"),
        pytest.param(">= 16_", id="an-underscore-behind-it"),
        pytest.param(">= 16__000", id="two-underscores"),
        pytest.param(">= -1", id="negative-text"),
        pytest.param(-1, id="negative"),
        pytest.param(">= 1,", id="a-comma-too-many"),
        pytest.param("", id="nothing"),
        pytest.param([], id="an-empty-list"),
        pytest.param(1.5, id="a-fraction"),
        pytest.param(None, id="null"),
        pytest.param({"min": 4}, id="a-mapping"),
    ],
)
def test_what_is_no_comparison_is_told_how_to_be_one(written: Any) -> None:
    with pytest.raises(ValueError, match=r">= 16000|never negative"):
        bounds(written)


@pytest.mark.parametrize(
    "written",
    [">= 16,384", "16,384", ">=16, 384", [">= 16", 384], [">= 16", "384"]],
    ids=["at-least", "exactly", "with-a-space", "a-list", "a-list-of-text"],
)
def test_a_comma_within_a_number_is_an_error(written: Any) -> None:
    """It would be two conditions, of which the second is never meant."""
    with pytest.raises(ValueError, match=r"write 16384 without it, or 16_384"):
        bounds(written)


@pytest.mark.parametrize("written", [[3, 4], ">= 3, == 4", "3, 4", ">= 1000, 7"])
def test_an_exact_number_stands_alone(written: Any) -> None:
    with pytest.raises(ValueError, match=r"an exact number cannot be one of several; write \">= 16000\""):
        bounds(written)


@pytest.mark.parametrize("written", [True, False], ids=["true", "false"])
def test_a_length_is_neither_true_nor_false(written: bool) -> None:
    with pytest.raises(ValueError, match="this needs a number to compare with"):
        bounds(written)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        pytest.param(True, Bound(GT, 0), id="any"),
        pytest.param(False, Bound(EQ, 0), id="none"),
        pytest.param("true", Bound(GT, 0), id="any-from-a-variable"),
        pytest.param("False", Bound(EQ, 0), id="none-from-a-variable"),
    ],
)
def test_a_count_may_be_true_or_false(written: Any, meant: Bound) -> None:
    assert count_bounds(written) == (meant,)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        pytest.param(True, (), id="any-value"),
        pytest.param("search", ("search",), id="one"),
        pytest.param(["search", "ads"], ("search", "ads"), id="several"),
    ],
)
def test_header_values(written: Any, meant: tuple[str, ...]) -> None:
    assert header_values(written) == meant


@pytest.mark.parametrize("written", [False, 5, "", [], [1], None], ids=repr)
def test_other_header_values_are_errors(written: Any) -> None:
    with pytest.raises(ValueError, match="write a value"):
        header_values(written)
