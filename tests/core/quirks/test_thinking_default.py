"""Which chats are told whether to think, and that nothing else of them changes."""

from typing import Any

import pytest
from support.engine_events import plan_for

from gateway.core.quirks.plan import Plan
from gateway.core.request import Endpoint

SWITCH = ("chat_template_kwargs", "enable_thinking")


def planned(**fields: Any) -> Plan:
    return plan_for("thinking_default_differs", **fields)


@pytest.mark.parametrize(
    ("plan", "changes"),
    [
        pytest.param(planned(), {SWITCH: False}, id="nothing-said"),
        pytest.param(planned(thinking=True), {SWITCH: True}, id="an-effort"),
        pytest.param(planned(stream=True), {SWITCH: False}, id="streamed"),
        pytest.param(planned(chat_template_kwargs={"level": 3}), {SWITCH: False}, id="beside-others"),
        pytest.param(planned(chat_template_kwargs={"enable_thinking": True}), {}, id="said"),
        pytest.param(planned(chat_template_kwargs={"enable_thinking": None}), {}, id="said-to-be-unsaid"),
        pytest.param(planned(chat_template_kwargs="yes"), {}, id="what-the-engine-refuses"),
        pytest.param(planned(endpoint=Endpoint.COMPLETIONS), {}, id="no-chat"),
    ],
)
def test_which_chats_are_told(plan: Plan, changes: dict[tuple[str, ...], object]) -> None:
    assert plan.changes == changes
    assert plan.remedies == []


def named(*quirks: str, **fields: Any) -> Plan:
    return plan_for(*quirks, reasons_by_name=True, **fields)


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(named(), id="nothing-said"),
        pytest.param(named("thinking_default_differs"), id="where-all-are-told"),
        pytest.param(named(chat_template_kwargs={"level": 3}), id="beside-others"),
    ],
)
def test_the_engine_is_told_of_a_name_that_requests_reasoning(plan: Plan) -> None:
    assert plan.thinks
    assert plan.changes == {SWITCH: True}


def test_what_it_thinks_is_looked_for_in_its_answer() -> None:
    assert not named("stale_chat_template").remedies
    assert len(named("null_reasoning_content").remedies) == 2
