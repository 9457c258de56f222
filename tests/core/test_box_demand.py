"""What jobs in the store want of a box, by whose model is in and by who else could serve them."""

from dataclasses import replace

import pytest

from gateway.core.backends import Backend, Capacity, KneeStep, Pool
from gateway.core.box import Box, State
from gateway.core.box_demand import stored_wants
from gateway.core.jobs import Lane
from gateway.core.policy import ModelPolicy, Policy, TrafficClass
from gateway.core.swap_policy import Backlog

CAPACITY = Capacity(32_768, (KneeStep(None, 4),))
POOLS = {
    "gemma": ("gemma",),
    "qwen": ("qwen",),
    "either": ("gemma", "qwen"),
    "tpu": ("tpu",),
    "mixed": ("tpu", "gemma"),
    "with-old": ("gemma", "old"),
}
CLASSES = {
    "gemma": ("gemma",),
    "qwen": ("qwen",),
    "either": ("either",),
    "gemma-first": ("gemma", "qwen"),
    "mixed": ("mixed",),
    "spills-out": ("gemma", "tpu"),
    "with-old": ("with-old",),
}
POLICY = Policy(
    models=(ModelPolicy("org/m", tuple(TrafficClass(name, pools) for name, pools in CLASSES.items())),),
    pools={name: Pool(name, backends) for name, backends in POOLS.items()},
    backends={
        name: Backend(name, f"http://{name}", CAPACITY, drain=name == "old")
        for name in ("gemma", "qwen", "tpu", "old")
    },
)
NOW = 5000.0
GEMMA_IN = Box(State.RESIDENT, backend="gemma")
QWEN_IN = Box(State.RESIDENT, backend="qwen")
BOOTING = Box(State.BOOTING, backend="qwen")
DRAINING = Box(State.DRAINING, backend="qwen", target="gemma")


def test_jobs_that_no_worker_would_take_start_no_swap() -> None:
    found = stored_wants([replace(lane("gemma"), is_worked=False)], POLICY, QWEN_IN, ("gemma", "qwen"), NOW)
    assert found == {"gemma": NOTHING, "qwen": NOTHING}


def lane(name: str, queued: int = 12, oldest_s: float | None = 40.0) -> Lane:
    return Lane(f"org/m/{name}", queued, 2, oldest_s=oldest_s)


TWELVE = Backlog(12, NOW - 40)
NOTHING = Backlog()


@pytest.mark.parametrize(
    ("name", "box", "gemma", "qwen"),
    [
        pytest.param("gemma", QWEN_IN, TWELVE, NOTHING, id="all-of-them-for-the-model-that-is-out"),
        pytest.param("gemma", GEMMA_IN, TWELVE, NOTHING, id="and-for-the-batch-of-the-model-that-is-in"),
        pytest.param("gemma", BOOTING, TWELVE, NOTHING, id="while-it-boots-the-other"),
        pytest.param("either", QWEN_IN, NOTHING, TWELVE, id="the-model-that-is-in-can-serve-them"),
        pytest.param("either", DRAINING, NOTHING, TWELVE, id="so-it-can-while-it-drains"),
        pytest.param("either", BOOTING, TWELVE, TWELVE, id="whichever-comes"),
        pytest.param("gemma-first", QWEN_IN, NOTHING, NOTHING, id="as-its-spill-it-can-serve-them"),
        pytest.param("gemma-first", GEMMA_IN, TWELVE, NOTHING, id="first-choice-only"),
        pytest.param("mixed", QWEN_IN, NOTHING, NOTHING, id="somebody-outside-can-serve-them"),
        pytest.param("spills-out", QWEN_IN, NOTHING, NOTHING, id="so-somebody-can-as-a-spill"),
        pytest.param("with-old", QWEN_IN, TWELVE, NOTHING, id="not-one-that-the-operator-drains"),
        pytest.param("gone", QWEN_IN, NOTHING, NOTHING, id="a-class-of-an-older-configuration"),
    ],
)
def test_whom_a_lane_waits_for(name: str, box: Box, gemma: Backlog, qwen: Backlog) -> None:
    found = stored_wants([lane(name)], POLICY, box, ("gemma", "qwen"), NOW)
    assert found == {"gemma": gemma, "qwen": qwen}


def test_lanes_add_up_and_those_without_a_queue_say_nothing() -> None:
    lanes = [lane("gemma", 3, 100.0), lane("gemma-first", 2, 7.0), lane("qwen", 0, None)]
    found = stored_wants(lanes, POLICY, GEMMA_IN, ("gemma", "qwen"), NOW)
    assert found == {"gemma": Backlog(5, NOW - 100), "qwen": NOTHING}
