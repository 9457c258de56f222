"""Jobs for their callers, where the store is a few answers. With a real one: tests/e2e/test_background.py."""

from collections.abc import Sequence
from typing import cast

import anyio
from support.world import World

from gateway.core.jobs import Job, JobStatus, Lane, NewJob
from gateway.downstream.background import Background, JobRules
from gateway.ports import JobStore


class Lanes:
    """What `Background.place` asks of `ports.JobStore`; it answers once it is let."""

    def __init__(self) -> None:
        self.asked = 0
        self.may_answer = anyio.Event()

    async def lanes(self) -> Sequence[Lane]:
        self.asked += 1
        await self.may_answer.wait()
        return [Lane("m/c", 9, 1, drain_per_s=0.5)]


async def test_all_who_look_at_their_place_at_once_ask_the_store_once() -> None:
    world, lanes = World(), Lanes()
    background = Background(
        cast(JobStore, lanes), world.pipeline, JobRules(), world.clock, lambda _: 0.0, world.notes
    )
    job = Job(NewJob("resp_1", None, "m/c", b"{}"), JobStatus.QUEUED, position=4)

    async with anyio.create_task_group() as tasks:
        for _ in range(100):
            tasks.start_soon(background.place, job)
        await anyio.wait_all_tasks_blocked()
        lanes.may_answer.set()

    assert lanes.asked == 1
    assert await background.place(job) == {"position": 4, "expected_start_s": 8.0}
    world.clock.time += 3.0
    await background.place(job)
    assert lanes.asked == 2
