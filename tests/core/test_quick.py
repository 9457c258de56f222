"""Values that are cheap to make are the values that they were."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

import pytest

from gateway.core.quick import quick
from gateway.core.values import CountMode, Estimate
from gateway.tokenizer.estimator import TextEstimate


@dataclass(frozen=True, slots=True)
class Guarded:
    """As the standard library makes it."""

    name: str
    sizes: Sequence[int] = field(default_factory=list)
    is_good: bool = True


@quick
@dataclass(frozen=True, slots=True)
class Quick:
    """The same, quick."""

    name: str
    sizes: Sequence[int] = field(default_factory=list)
    is_good: bool = True


@pytest.mark.parametrize(
    "values",
    [{"name": "a"}, {"name": "a", "sizes": [1], "is_good": False}],
    ids=["defaults", "all-given"],
)
def test_it_holds_what_it_held(values: dict[str, object]) -> None:
    quick_one, guarded = Quick(**values), Guarded(**values)  # type: ignore[arg-type]

    assert [getattr(quick_one, one.name) for one in fields(Quick)] == [
        getattr(guarded, one.name) for one in fields(Guarded)
    ]
    assert repr(quick_one) == repr(guarded).replace("Guarded", "Quick")
    assert quick_one == Quick(**values)  # type: ignore[arg-type]
    assert replace(quick_one, name="b").name == "b"


def test_a_default_is_made_anew_for_each() -> None:
    assert Quick("a").sizes is not Quick("b").sizes


def test_equal_ones_are_one_key() -> None:
    assert {Quick("a", ()): 1}[Quick("a", ())] == 1


@pytest.mark.parametrize("given", [(), ("a", [], True, 4)], ids=["too-few", "too-many"])
def test_it_is_made_of_its_fields_alone(given: tuple[object, ...]) -> None:
    with pytest.raises(TypeError):
        Quick(*given)  # type: ignore[arg-type]


def test_one_that_builds_on_another() -> None:
    estimate = TextEstimate(3, 19, CountMode.EXACT, None, 1, 2)

    assert isinstance(estimate, Estimate)
    assert (estimate.tokens, estimate.counted_tokens) == (3, 2)
    assert estimate != Estimate(3, 19, CountMode.EXACT)
