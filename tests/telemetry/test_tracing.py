"""What a span says of a decision. How spans are made and sent: e2e/test_tracing.py."""

import pytest
from support.rankings import ranking_of

from gateway.core.decision import Candidate, Exclusion, Ranking
from gateway.telemetry.tracing import WHOLE_MAX, considered

FIRST = Candidate("light-0", "light", score=0.5)
FULL = tuple((f"light-{number}", Exclusion.AT_KNEE) for number in range(1, 101))


def unranked() -> tuple[Candidate, ...]:
    raise AssertionError("the fleet was ranked")


def test_a_small_fleet_is_told_whole() -> None:
    full = Candidate("light-1", "light", excluded=Exclusion.AT_KNEE, detail="64 of 64")

    assert considered(ranking_of(FIRST, full), WHOLE_MAX) == [
        "light-0: score 0.50",
        "light-1: at_knee (64 of 64)",
    ]


@pytest.mark.parametrize(("first", "said"), [(FIRST, ["light-0: first choice"]), (None, [])])
def test_a_large_fleet_is_not_ranked_to_be_told(first: Candidate | None, said: list[str]) -> None:
    told = considered(Ranking(first, FULL, unranked), WHOLE_MAX + 1)

    assert told[: len(said) + 1] == [*said, "light-1: at_knee"]
    assert len(told) == len(said) + WHOLE_MAX
