"""The box benchmark in small: two virtual hours of the traffic it is meant for."""

from functools import cache

import pytest

from benchmarks import box


@cache
def run(seed: int, policy: str) -> box.Outcome:
    return box.run(seed, (8.0, 12.0, box.JOB_TOKENS), policy, hours=2.0)


@pytest.mark.parametrize("seed", [301, 302])
def test_every_job_ends_within_the_hour_and_swaps_are_few(seed: int) -> None:
    found = run(seed, "2 jobs or 600 s; 6 requests or 900 s")

    assert found.jobs > 8
    assert found.within == 1.0
    assert found.qwen == 1.0
    assert 0 < found.swaps_per_h <= 3.5


def test_swapping_on_demand_swaps_more() -> None:
    assert run(301, "on demand").swaps_per_h > run(301, "2 jobs or 600 s; 6 requests or 900 s").swaps_per_h
