import pytest

from gateway.core.jobs import Lane, expected_start_s

BUSY = Lane("m/c", 9, 1, drain_per_s=0.5)
SLOW = Lane("m/c", 9, 1)


@pytest.mark.parametrize(
    ("position", "lane", "away_s", "expected"),
    [
        pytest.param(4, BUSY, 0.0, 8.0, id="at-the-rate-of-late"),
        pytest.param(4, SLOW, 0.0, None, id="none-has-ended-lately"),
        pytest.param(None, BUSY, 0.0, None, id="it-does-not-wait"),
        pytest.param(4, None, 0.0, None, id="no-such-lane"),
        pytest.param(4, BUSY, 300.0, 308.0, id="its-model-comes-back-first"),
        pytest.param(4, SLOW, 300.0, 300.0, id="not-before-its-model-is-back"),
        pytest.param(4, BUSY, None, None, id="nothing-brings-its-model-back"),
    ],
)
def test_when_a_job_would_start(
    position: int | None, lane: Lane | None, away_s: float | None, expected: float | None
) -> None:
    assert expected_start_s(position, lane, away_s) == expected
