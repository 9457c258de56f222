"""What is known before a job is run."""

from dataclasses import replace

import pytest
from support.world import POLICY, World

from gateway.core.decision import Exclusion
from gateway.core.health import BackendStatus, State
from gateway.core.policy import OnDisconnect


@pytest.mark.parametrize(("queues", "may"), [((None, None), False), ((None, OnDisconnect.CANCEL), True)])
async def test_a_model_may_queue_its_chats_where_a_class_does(
    world: World, queues: tuple[OnDisconnect | None, ...], may: bool
) -> None:
    (model,) = POLICY.models
    classes = [replace(one, queue=queue) for one, queue in zip(model.classes, queues, strict=True)]
    world.policy = replace(POLICY, models=(replace(model, classes=tuple(classes)),))

    assert world.questions.may_queue("gemma-4") is may
    assert not world.questions.may_queue("unknown")


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
    assert world.questions.can_run_lane(lane) is can_run_lane
    world.fleet.known = {}  # those that nobody has probed are a last resort
    assert world.questions.can_run_lane(lane)


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
    assert world.questions.can_run_lane("gemma-4/long_document") is can_run_lane
