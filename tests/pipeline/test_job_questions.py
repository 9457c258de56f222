"""What a worker is told before it runs a job."""

import pytest
from support.world import World

from gateway.core.decision import Exclusion
from gateway.core.health import BackendStatus, State
from gateway.pipeline import JobQuestions


def questions(world: World) -> JobQuestions:
    return JobQuestions(lambda: world.policy, world.pipeline.view, world.estimates)


@pytest.mark.parametrize(
    ("lane", "down", "can_run_lane"),
    [
        ("gemma-4/long_document", {"light-0", "light-1"}, True),
        ("gemma-4/long_document", {"push"}, False),
        ("gemma-4/short_chat", {"light-0", "push"}, True),
        ("gemma-4/short_chat", {"light-0", "light-1", "push"}, False),
        ("gemma-4/was_here_before", {"light-0", "light-1"}, True),
        ("google/gemma-4-31B-it/elsewhere", {"light-0", "light-1", "push"}, False),
    ],
    ids=["its-own-is-up", "its-own-is-down", "one-is-up", "none-is-up", "any-class-is-up", "no-class-is-up"],
)
async def test_jobs_of_a_lane_may_start_where_one_of_its_backends_is_up(
    world: World, lane: str, down: set[str], can_run_lane: bool
) -> None:
    world.fleet.known |= {name: BackendStatus(state=State.DOWN) for name in down}
    assert questions(world).can_run_lane(lane) is can_run_lane
    world.fleet.known = {}  # those that nobody has probed are a last resort
    assert questions(world).can_run_lane(lane)


@pytest.mark.parametrize(
    ("why", "state", "can_run_lane"),
    [
        (Exclusion.SWAPPED_OUT, State.OUT, True),
        (Exclusion.UNHEALTHY, State.OUT, False),
        (Exclusion.UNHEALTHY, State.UP, False),
    ],
)
async def test_a_swap_brings_in_what_is_out_but_not_what_is_in_quarantine(
    world: World, why: Exclusion, state: State, can_run_lane: bool
) -> None:
    world.objections["push"] = why, "its box says so"
    world.fleet.known["push"] = BackendStatus(state=state, served_models=("served",))
    assert questions(world).can_run_lane("gemma-4/long_document") is can_run_lane
