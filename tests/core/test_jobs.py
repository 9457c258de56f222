import pytest

from gateway.core.jobs import Lane, expected_start_s

BUSY = Lane("m/c", 9, 1, drain_per_s=0.5)
SLOW = Lane("m/c", 9, 1)
ALONE = Lane("m/c", 1, 0, drain_per_s=0.01)
TAKEN = Lane("m/c", 0, 1, drain_per_s=0.01)
NEXT = Lane("m/c", 1, 1, drain_per_s=0.01)


@pytest.mark.parametrize(
    ("position", "lane", "away_s", "expected"),
    [
        pytest.param(4, BUSY, 0.0, 8.0, id="at-the-rate-of-late"),
        pytest.param(4, SLOW, 0.0, None, id="none-has-ended-lately"),
        pytest.param(None, BUSY, 0.0, None, id="it-does-not-wait"),
        pytest.param(4, None, 0.0, None, id="no-such-lane"),
        pytest.param(4, BUSY, 300.0, 308.0, id="its-model-comes-back-first"),
        pytest.param(4, SLOW, 300.0, 300.0, id="not-before-its-model-is-back"),
        pytest.param(1, ALONE, 0.0, None, id="it-has-the-lane-for-itself"),
        pytest.param(1, TAKEN, 0.0, None, id="it-has-just-been-taken"),
        pytest.param(1, NEXT, 0.0, 100.0, id="after-the-one-that-runs"),
        pytest.param(1, ALONE, 300.0, 300.0, id="alone-but-its-model-is-out"),
        pytest.param(4, BUSY, None, None, id="nothing-brings-its-model-back"),
    ],
)
def test_when_a_job_would_start(
    position: int | None, lane: Lane | None, away_s: float | None, expected: float | None
) -> None:
    assert expected_start_s(position, lane, away_s) == expected
