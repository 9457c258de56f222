"""How often a failed attempt may move on."""

import pytest

from gateway.core.policy import RetryPolicy


@pytest.mark.parametrize(
    ("attempts", "crashes", "allowed"),
    [
        pytest.param(1, 0, True, id="first-failure"),
        pytest.param(2, 0, True, id="one-try-left"),
        pytest.param(3, 0, False, id="attempts-used-up"),
        pytest.param(1, 1, True, id="an-engine-may-die-once"),
        pytest.param(2, 2, False, id="a-request-that-kills-engines-is-not-shown-a-third"),
    ],
)
def test_when_another_attempt_is_allowed(attempts: int, crashes: int, allowed: bool) -> None:
    assert RetryPolicy(attempts_max=3).allows_more(attempts, crashes) is allowed
