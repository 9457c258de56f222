"""Swaps as they are counted: what a box goes through, and what comes of it."""

import pytest

from gateway.core.box import Box, State
from gateway.core.box_swaps import Swap, SwapCause, SwapTracker
from gateway.core.swap_policy import Cause


def at(state: State, since: float, backend: str, target: str = "", cause: Cause = Cause.NOTHING) -> Box:
    return Box(state=state, since=since, backend=backend, target=target, cause=cause)


HOME = at(State.RESIDENT, 0, "gemma")
LEAVING = at(State.DRAINING, 100, "gemma", "qwen", Cause.AGE)
STOPPING = at(State.STOPPING, 130, "gemma", "qwen", Cause.AGE)
BOOTING = at(State.BOOTING, 140, "qwen")
CHECKING = at(State.CHECKING, 400, "qwen")
SERVING = at(State.RESIDENT, 401, "qwen")
FAULTY = at(State.DRAINING, 402, "qwen", "gemma")
FAILED = at(State.FAILED, 150, "")


@pytest.mark.parametrize(
    ("states", "swaps"),
    [
        pytest.param([HOME, LEAVING, LEAVING, STOPPING, BOOTING, CHECKING, SERVING, SERVING],
                     [Swap("qwen", SwapCause.AGE, 301.0)], id="a-swap"),
        pytest.param([STOPPING, BOOTING, CHECKING, SERVING], [], id="its-beginning-was-not-seen"),
        pytest.param([HOME, LEAVING, HOME], [], id="called-off"),
        pytest.param([HOME, LEAVING, STOPPING, FAILED, CHECKING, SERVING], [], id="it-failed"),
        pytest.param([HOME, LEAVING, BOOTING, FAULTY, at(State.RESIDENT, 800, "gemma")],
                     [Swap("gemma", SwapCause.QUARANTINE, 398.0)], id="back-from-one-that-is-not-trusted"),
        pytest.param([LEAVING, SERVING, FAULTY, HOME],
                     [Swap("qwen", SwapCause.AGE, 301.0), Swap("gemma", SwapCause.QUARANTINE, 0.0)],
                     id="there-and-back"),
    ],
)  # fmt: skip
def test_what_is_counted(states: list[Box], swaps: list[Swap]) -> None:
    tracker = SwapTracker()
    assert [swap for box in states if (swap := tracker.observe(box))] == swaps
