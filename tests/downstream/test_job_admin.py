"""Jobs as operators see them. Over HTTP: tests/e2e/test_job_operations.py."""

from gateway.core.jobs import Lane
from gateway.downstream.job_admin import lane_view


def test_a_lane_says_how_long_its_oldest_job_has_waited() -> None:
    assert lane_view(Lane("m/c", 2, 1, oldest_s=7.04))["oldest_wait_s"] == 7.0
    assert lane_view(Lane("m/c", 0, 1))["oldest_wait_s"] is None
