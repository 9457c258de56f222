"""The benchmark that sends the published loads to a simulated server over HTTP."""

from dataclasses import replace

from benchmarks.published import POINTS
from benchmarks.simulator import over_http


async def test_every_prompt_is_read_as_the_random_ones_of_the_published_runs_were() -> None:
    point = next(point for point in POINTS if point.id == "h100-16k-c64")
    few = replace(point, concurrency=1, requests=3, output_tokens=8)

    measured = await over_http(few, speed=20)

    assert measured.ttft_s > 0.9 * few.run().ttft_s  # however slow this machine is
