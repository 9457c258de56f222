"""How often a failed attempt may move on, and when a caller may come again."""

import pytest

from gateway.core.errors import ShedError
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


@pytest.mark.parametrize(
    ("wait_s", "told_s"), [(None, None), (0, 1), (1.4, 1), (1.6, 2), (58.6, 59), (59, 59), (3_600, 59)]
)
def test_a_caller_is_told_a_time_that_every_sdk_waits_for(wait_s: float | None, told_s: int | None) -> None:
    """docs/errors.md: an integer from 1 to 59."""
    assert ShedError("full", retry_after_s=wait_s).retry_after_s == told_s
