"""When something that ended is started again."""

import pytest

from gateway.supervisor import GOOD_SPELL_S, PAUSE_MAX_S, PAUSE_S, next_pause_s


@pytest.mark.parametrize(
    ("before_s", "lived_s", "expected_s"),
    [
        pytest.param(0.0, 1.0, PAUSE_S, id="the-first-early-end"),
        pytest.param(PAUSE_S, 1.0, 2 * PAUSE_S, id="it-grows"),
        pytest.param(20.0, 1.0, PAUSE_MAX_S, id="it-is-bounded"),
        pytest.param(PAUSE_MAX_S, 1.0, PAUSE_MAX_S, id="it-stays-bounded"),
        pytest.param(PAUSE_MAX_S, GOOD_SPELL_S, 0.0, id="a-good-spell-ends-it"),
        pytest.param(0.0, GOOD_SPELL_S - 0.1, PAUSE_S, id="not-quite-a-good-spell"),
    ],
)
def test_pauses(before_s: float, lived_s: float, expected_s: float) -> None:
    assert next_pause_s(before_s, lived_s) == expected_s
