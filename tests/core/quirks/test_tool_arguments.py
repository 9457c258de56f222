"""No tool call whose arguments are not JSON ever looks finished."""

import json

import pytest
from support.engine_events import (
    DONE,
    arguments,
    at_every_cut,
    decoded,
    delta,
    name_of_call,
    plan_for,
    role,
    through,
)

from gateway.core.answers import UnfitAnswer
from gateway.core.quirks import mend_whole
from gateway.core.quirks.tool_arguments import ARGUMENTS_CHARS_MAX, ToolArguments
from gateway.core.request import Endpoint

LAST = delta(finish="tool_calls", stop=50)
TODO = json.dumps({"todo": 'say "\u00e9\U0001f30a" <b>&amp;</b>\n'}, ensure_ascii=False)
MISREAD = '{"todos": [{"content": "<|\\Demonstrate<|\\"|", "status": "<|\\"in_progress<|\\"}]}'


def call(*parts: str, number: int = 0) -> bytes:
    return name_of_call(call=number) + b"".join(arguments(part, call=number) for part in parts)


@pytest.mark.parametrize(
    "calls",
    [
        pytest.param(call(TODO), id="at-once"),
        pytest.param(call(*TODO), id="character-by-character"),
        pytest.param(call("{", "}"), id="none"),
        pytest.param(call("{}") + call('{"a": ', "[1]}", number=1), id="two"),
        pytest.param(
            name_of_call()
            + name_of_call(call=1)
            + arguments('{"a"')
            + arguments("{}", call=1)
            + arguments(":1}"),
            id="interleaved",
        ),
        pytest.param(b"", id="no-call"),
    ],
)
def test_good_calls_keep_their_bytes(calls: bytes) -> None:
    wire = role() + delta(content="x") + calls + LAST + DONE

    out, reader = through([ToolArguments()], [wire])

    assert out == wire
    assert reader.is_complete


@pytest.mark.parametrize(
    "calls",
    [
        pytest.param(call('{"city": "Paris"'), id="cut"),
        pytest.param(call(MISREAD), id="misread"),
        pytest.param(call(), id="nothing"),
        pytest.param(call('"Paris"'), id="no-object"),
        pytest.param(call("{}", "{}"), id="twice"),
        pytest.param(call("{}") + call("{]", number=1), id="the-second"),
        pytest.param(delta(tool_calls=[{"index": 0, "function": None}]), id="null"),
        pytest.param(call("[" * 100_000), id="endless"),
    ],
)
def test_a_bad_call_never_finishes(calls: bytes) -> None:
    out, reader = through([ToolArguments()], [role() + calls, LAST + DONE])

    assert out == role() + calls
    assert isinstance(reader.fault, UnfitAnswer)
    assert reader.fault.code == "tool_arguments_invalid"


def test_wherever_it_is_cut() -> None:
    bad = role() + call(MISREAD[:20], MISREAD[20:]) + LAST + DONE

    out = at_every_cut(lambda: [ToolArguments()], bad)

    assert decoded(out)[-1]["choices"][0]["finish_reason"] is None
    assert b"[DONE]" not in out


def test_a_choice_that_reached_its_limit_says_so_itself() -> None:
    wire = role() + call('{"city": "Pa') + delta(finish="length") + DONE

    out, reader = through([ToolArguments()], [wire])

    assert out == wire
    assert reader.is_complete


def test_each_choice_is_judged_at_its_own_end() -> None:
    bad = name_of_call(index=1) + arguments("{", index=1)
    out, reader = through(
        [ToolArguments()], [role() + role(1) + call("{}") + bad, LAST, delta(1, "stop")], choices=2
    )

    assert LAST in out
    assert isinstance(reader.fault, UnfitAnswer)


@pytest.mark.parametrize(("written", "is_good"), [(TODO, True), (MISREAD, False)])
def test_whole_answers_too(written: str, is_good: bool) -> None:
    calls = [
        {"id": "x", "type": "function", "function": {"name": "f", "arguments": one}}
        for one in ("{}", written)
    ]
    choice = {"index": 0, "message": {"content": None, "tool_calls": calls}, "finish_reason": "tool_calls"}
    body = json.dumps({"choices": [choice]}).encode()

    assert mend_whole([ToolArguments()], body)[0] == body
    assert (mend_whole([ToolArguments()], body)[1] is None) is is_good


def test_which_answers_are_looked_at() -> None:
    quirk = "streamed_tool_json_invalid"
    assert [type(one) for one in plan_for(quirk, tools=1).remedies] == [ToolArguments]
    assert [type(one) for one in plan_for(quirk, tools=1, stream=True).remedies] == [ToolArguments]
    assert plan_for(quirk, stream=True).remedies == []
    assert plan_for(quirk, tools=1, endpoint=Endpoint.COMPLETIONS).remedies == []


def test_arguments_without_an_end_are_a_fault() -> None:
    piece = call("x" * (ARGUMENTS_CHARS_MAX // 8))
    _, reader = through([ToolArguments()], [role(), *[piece] * 9])

    assert isinstance(reader.fault, UnfitAnswer)
    assert "without an end" in reader.fault.message


def test_a_choice_that_ends_again_and_again_is_judged_once() -> None:
    remedy = ToolArguments()
    _, reader = through([remedy], [role(), call("{}"), *[LAST] * 3])

    assert reader.fault is None
    assert not remedy._calls
