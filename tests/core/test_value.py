"""Value classes: to a type checker frozen dataclasses, at run time something faster that acts alike."""

from collections.abc import Mapping
from dataclasses import asdict, field, fields, replace

import pytest

from gateway.core.value import valueclass


@valueclass(frozen=True, slots=True)
class Part:
    """What a whole has."""

    size: int = 1


@valueclass(frozen=True, slots=True)
class Whole:
    """Something of several parts."""

    name: str
    part: Part = Part()
    notes: Mapping[str, int] = field(default_factory=dict)

    @property
    def shouted(self) -> str:
        return self.name.upper()

    @classmethod
    def called(cls, name: str) -> "Whole":
        return cls(name)


@valueclass(frozen=True, slots=True)
class Better(Whole):
    """More of the same."""

    grade: int = 0


def test_it_compares_and_hashes_by_its_fields() -> None:
    assert Part(2) == Part(size=2) != Part(3)
    assert {Part(2): "two"}[Part(2)] == "two"
    assert Whole("a") != Better("a")
    assert repr(Part(2)) == "Part(size=2)"


def test_it_never_changes() -> None:
    whole = Whole("a")

    with pytest.raises(AttributeError):
        whole.name = "b"  # type: ignore[misc]
    assert whole.notes is not Whole("b").notes


def test_it_keeps_what_was_written_beside_its_fields() -> None:
    assert Whole.__doc__ == "Something of several parts."
    assert Whole.called("a").shouted == "A"
    assert Better.called("a") == Better("a")
    assert Whole.__module__ == __name__


@pytest.mark.parametrize("kind", [Whole, Better])
def test_it_is_a_dataclass_to_the_functions_for_those(kind: type[Whole]) -> None:
    one = kind("a", Part(2), {"x": 1})

    assert asdict(one).items() >= {"name": "a", "part": {"size": 2}, "notes": {"x": 1}}.items()
    assert replace(one, name="b") == kind("b", Part(2), {"x": 1})
    assert [each.name for each in fields(one)][:3] == ["name", "part", "notes"]
