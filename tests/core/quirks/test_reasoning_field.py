"""A thought stands where the site wants it, whatever the backend calls it."""

import json
from typing import Any

import pytest
from support.engine_events import DONE, at_every_cut, decoded, delta, plan_for, role, through, usage

from gateway.core.policy import ReasoningField
from gateway.core.quirks import mend_whole
from gateway.core.quirks.reasoning_field import RenameReasoning
from gateway.core.request import Endpoint

OLD, NEW = {"reasoning_content": "hm"}, {"reasoning": "hm"}
BOTH = OLD | NEW


@pytest.mark.parametrize(
    ("field", "came", "shown"),
    [
        pytest.param(ReasoningField.REASONING, OLD, NEW, id="old-as-new"),
        pytest.param(ReasoningField.REASONING, NEW, NEW, id="new-as-new"),
        pytest.param(ReasoningField.REASONING, BOTH, NEW, id="both-as-new"),
        pytest.param(ReasoningField.REASONING_CONTENT, NEW, OLD, id="new-as-old"),
        pytest.param(ReasoningField.REASONING_CONTENT, BOTH, OLD, id="both-as-old"),
        pytest.param(
            ReasoningField.REASONING, {"reasoning": None, **OLD}, NEW, id="the-one-that-is-not-null"
        ),
        pytest.param(ReasoningField.BOTH, OLD, BOTH, id="old-as-both"),
        pytest.param(ReasoningField.BOTH, NEW, BOTH, id="new-as-both"),
        pytest.param(ReasoningField.BOTH, {}, {}, id="no-thought"),
        pytest.param(ReasoningField.BOTH, {"reasoning": None}, dict.fromkeys(BOTH), id="a-null"),
    ],
)
def test_streamed_and_whole(field: ReasoningField, came: dict[str, Any], shown: dict[str, Any]) -> None:
    wire = role() + delta(**came) + delta(content="x", **came) + delta(finish="stop", **came) + usage() + DONE
    body = json.dumps(
        {"choices": [{"index": 0, "message": {"content": "x", **came}, "finish_reason": "stop"}]}
    ).encode()

    streamed = decoded(at_every_cut(lambda: [RenameReasoning(field)], wire))
    whole = json.loads(mend_whole([RenameReasoning(field)], body)[0])

    assert [one["choices"][0]["delta"] for one in streamed[1:4]] == [shown, {"content": "x", **shown}, shown]
    assert whole["choices"][0]["message"] == {"content": "x", **shown}


def test_events_without_a_thought_are_not_even_parsed() -> None:
    broken = b'data: {"choices" as long as nobody looks\n\n'
    events = [role() + delta(reasoning="hm"), broken, delta(finish="stop") + DONE]

    out, reader = through([RenameReasoning(ReasoningField.REASONING_CONTENT)], events)

    assert broken in out
    assert reader.is_complete


def test_it_is_for_chats_alone_and_only_where_it_is_wanted() -> None:
    assert plan_for().remedies == []
    assert [type(one) for one in plan_for(reasoning=ReasoningField.BOTH).remedies] == [RenameReasoning]
    assert plan_for(endpoint=Endpoint.COMPLETIONS, reasoning=ReasoningField.BOTH).remedies == []
