"""Jobs as operators see them. Over HTTP: tests/e2e/test_job_operations.py."""

from gateway.core.jobs import Lane
from gateway.downstream.job_admin import lane_view


def test_how_long_the_oldest_has_waited_is_for_the_clock_of_the_store_to_say() -> None:
    an_hour_ahead = 4_600.0
    shown = lane_view(Lane("m/c", 2, 1, oldest_at=an_hour_ahead, oldest_s=7.04))

    assert shown["oldest_wait_s"] == 7.0
    assert lane_view(Lane("m/c", 0, 1))["oldest_wait_s"] is None
