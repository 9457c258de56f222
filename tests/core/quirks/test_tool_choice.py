"""A forced call is made, or nothing of the answer is ever relayed."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from support.engine_events import (
    DONE,
    NAMES,
    arguments,
    delta,
    name_of_call,
    plan_for,
    role,
    through,
    usage,
)

from gateway.core.answers import UnfitAnswer
from gateway.core.quirks import MendingReader, mend_whole
from gateway.core.quirks.tool_choice import ForcedCall
from gateway.core.request import Endpoint

TEXT = delta(content="I will look ") + delta(content="it up.")
THOUGHT = delta(reasoning="\nThe") + delta(reasoning=" person")
CALL = name_of_call() + arguments('{"city": "Paris"}')
LAST = delta(finish="tool_calls", stop=50)


def reader(choices: int = 1, name: str | None = None) -> MendingReader:
    return MendingReader([ForcedCall(choices, name)], choices=choices, names=NAMES, hide_usage=False)


@pytest.mark.parametrize(
    "before", [b"", TEXT, THOUGHT, THOUGHT + TEXT], ids=["at-once", "text", "thought", "both"]
)
@pytest.mark.parametrize(
    ("name", "unfinished"), [(None, b"null"), ("get_weather", b'""')], ids=["any", "named"]
)
def test_it_begins_with_the_call_and_keeps_every_byte(
    before: bytes, name: str | None, unfinished: bytes
) -> None:
    spell = b'"finish_reason":null', b'"finish_reason":' + unfinished
    wire = (role() + before + CALL + LAST + usage() + DONE).replace(*spell)
    begins_at = len((role() + before + name_of_call()).replace(*spell))

    for cut in range(1, len(wire)):
        subject = reader(name=name)
        first = subject.feed(wire[:cut])
        assert subject.may_begin is (cut >= begins_at)
        assert first + subject.feed(wire[cut:]) == wire
        assert subject.is_complete


@pytest.mark.parametrize(
    ("events", "name"),
    [
        pytest.param([TEXT, delta(finish="stop")], None, id="text"),
        pytest.param([TEXT, delta(finish="length")], None, id="text-up-to-the-limit"),
        pytest.param(
            [TEXT, delta(finish="tool_calls", tool_calls=[])], None, id="text-that-says-it-is-a-call"
        ),
        pytest.param([delta(finish="stop")], None, id="nothing"),
        pytest.param([THOUGHT, delta(finish="stop")], None, id="a-thought-alone"),
        pytest.param([CALL, LAST], "get_time", id="another-function"),
        pytest.param([delta(content="x", finish="stop")], None, id="all-in-one-event"),
    ],
)
def test_without_the_call_nothing_ever_begins(events: Sequence[bytes], name: str | None) -> None:
    subject = reader(name=name)

    for one in [role(), *events, DONE]:
        subject.feed(one)
        assert not subject.may_begin

    assert isinstance(subject.fault, UnfitAnswer)
    assert subject.fault.code == "tool_call_missing"


def test_a_limit_within_the_thought_is_the_caller_s_own() -> None:
    wire = role() + THOUGHT + delta(content=" ") + delta(finish="length") + DONE
    subject = reader()

    assert subject.feed(wire) == wire
    assert subject.may_begin


def test_every_choice_must_call() -> None:
    subject = reader(choices=2)

    subject.feed(role() + role(1) + CALL)
    assert not subject.may_begin
    subject.feed(delta(1, content="no") + LAST)
    assert not subject.may_begin
    subject.feed(name_of_call(index=1))
    assert subject.may_begin


def test_once_all_have_called_nothing_more_is_looked_into() -> None:
    broken = b'data: {"choices" as long as nobody looks\n\n'

    out, subject = through([ForcedCall(1, None)], [role() + CALL, broken, LAST + DONE])

    assert broken in out
    assert subject.is_complete


@pytest.mark.parametrize(
    ("message", "finish", "is_fit"),
    [
        pytest.param(
            {"content": "Mod", "tool_calls": [{"function": {"name": "f"}}]}, "tool_calls", True, id="a-call"
        ),
        pytest.param({"content": "prose", "tool_calls": []}, "tool_calls", False, id="an-empty-list"),
        pytest.param({"content": "prose", "tool_calls": None}, "stop", False, id="a-null"),
        pytest.param({"content": "prose"}, "length", False, id="prose-up-to-the-limit"),
        pytest.param({"content": None, "reasoning": "hm"}, "length", True, id="a-limit-within-the-thought"),
    ],
)
def test_whole_answers(message: dict[str, Any], finish: str, is_fit: bool) -> None:
    body = json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": finish}]}).encode()

    mended, fault = mend_whole([ForcedCall(1, None)], body)

    assert mended == body
    assert (fault is None) is is_fit


NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.mark.parametrize(
    ("asked", "looked_at"),
    [
        pytest.param({"tool_choice": "required"}, True, id="required"),
        pytest.param({"tool_choice": NAMED, "stream": True}, True, id="named"),
        pytest.param({"tool_choice": "auto"}, False, id="auto"),
        pytest.param({}, False, id="nothing-said"),
        pytest.param({"tool_choice": {"type": "function"}}, False, id="what-the-engine-refuses"),
        pytest.param({"tool_choice": "required", "tools": 0}, False, id="no-tools"),
        pytest.param({"tool_choice": "required", "endpoint": Endpoint.COMPLETIONS}, False, id="no-chat"),
    ],
)
def test_which_requests_force_a_call(asked: dict[str, Any], looked_at: bool) -> None:
    plan = plan_for("tool_choice_not_enforced", **{"tools": 1, **asked})
    assert [type(one) for one in plan.remedies] == [ForcedCall] * looked_at
