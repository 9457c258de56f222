"""A stream put together again must be the answer that the engine writes when it does not stream."""

import json
from functools import partial
from typing import Any

import pytest
from support.engine_events import (
    DONE,
    HEAD,
    NAMES,
    USAGE,
    arguments,
    delta,
    event,
    name_of_call,
    one_by_one,
    plan_for,
    role,
    usage,
)

from gateway.core.naming import ModelNames
from gateway.core.quirks import AssemblingReader
from gateway.core.quirks.plan import Plan
from gateway.core.quirks.turn_marker import MARKER
from gateway.core.request import Changes, Endpoint


def assembled(wire: bytes, *, choices: int = 1) -> dict[str, Any]:
    """Return the answer a stream makes, having seen that it does not depend on where its bytes are cut."""

    def whole(*pieces: bytes) -> bytes:
        reader = AssemblingReader((), choices=choices, names=NAMES)
        assert b"".join([*(reader.feed(piece) for piece in pieces)]) == b""
        reader.end()
        assert reader.fault is None
        return reader.whole()

    body = whole(wire)
    for cut in range(1, len(wire)):
        assert whole(wire[:cut], wire[cut:]) == body, cut
    assert whole(*one_by_one(wire)) == body
    answer: dict[str, Any] = json.loads(body)
    return answer


def expected(*choices: dict[str, Any], **fields: Any) -> dict[str, Any]:
    top = {
        **HEAD,
        "object": "chat.completion",
        "service_tier": None,
        "system_fingerprint": None,
        "usage": None,
    }
    return {**top, "choices": list(choices), **fields}


def choice(
    content: str | None, finish: str, *, index: int = 0, logprobs: Any = None, stop: Any = None, **said: Any
) -> dict[str, Any]:
    message = {
        "role": "assistant",
        "content": content,
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "reasoning": None,
        **said,
    }
    return {
        "index": index,
        "message": message,
        "logprobs": logprobs,
        "finish_reason": finish,
        "stop_reason": stop,
        "token_ids": None,
    }


CALL = {"id": "chatcmpl-tool-0", "type": "function"}


def test_text_with_everything_around_it() -> None:
    text = 'caf\u00e9 "\\" \U0001f30a \u2028 <b>&amp;</b>\n'
    wire = role() + delta(content=text) + delta(finish="stop", content=" end") + usage() + DONE

    answer = assembled(wire)

    assert answer == expected(
        choice(text + " end", "stop"),
        usage=USAGE,
        system_fingerprint="vllm-0.32.0-ef74b8d6",
        prompt_token_ids=None,
        prompt_text=None,
    )


def test_a_tool_call_after_some_text() -> None:
    wire = (
        role()
        + delta(content="Mod")
        + name_of_call()
        + arguments('{"city": ')
        + arguments('"Orl\u00e9ans"}')
        + delta(finish="tool_calls", stop=50)
        + usage()
        + DONE
    )

    function = {"name": "get_weather", "arguments": '{"city": "Orl\u00e9ans"}'}
    assert assembled(wire)["choices"] == [
        choice("Mod", "tool_calls", stop=50, tool_calls=[{**CALL, "function": function}])
    ]


def test_several_calls_and_no_text() -> None:
    wire = (
        role()
        + name_of_call()
        + arguments("{}")
        + name_of_call("get_time", call=1)
        + arguments('{"zone":', call=1)
        + arguments('"UTC"}', call=1)
        + delta(finish="tool_calls", stop=50)
        + DONE
    )

    message = assembled(wire)["choices"][0]["message"]

    assert message["content"] is None
    assert [(call["id"], call["function"]) for call in message["tool_calls"]] == [
        ("chatcmpl-tool-0", {"name": "get_weather", "arguments": "{}"}),
        ("chatcmpl-tool-1", {"name": "get_time", "arguments": '{"zone":"UTC"}'}),
    ]
    assert all("index" not in call for call in message["tool_calls"])


@pytest.mark.parametrize(
    ("content", "expected_content"),
    [(" Loire", " Loire"), (None, None)],
    ids=["answered", "cut-in-the-thought"],
)
def test_a_thought(content: str | None, expected_content: str | None) -> None:
    wire = role() + delta(reasoning="\nThe") + delta(reasoning=" person")
    wire += (delta(content=content) if content else b"") + delta(finish="length") + DONE

    assert assembled(wire)["choices"] == [choice(expected_content, "length", reasoning="\nThe person")]


def test_an_empty_answer_is_an_empty_text() -> None:
    assert assembled(role() + delta(finish="stop") + DONE)["choices"] == [choice("", "stop")]


def test_a_thought_under_its_older_name_keeps_it() -> None:
    message = assembled(role() + delta(reasoning_content="hm") + delta(finish="stop") + DONE)["choices"][0][
        "message"
    ]

    assert message["reasoning_content"] == "hm"
    assert "reasoning" not in message


def test_a_refusal() -> None:
    answer = assembled(role() + delta(refusal="I ") + delta(refusal="won't.") + delta(finish="stop") + DONE)

    assert answer["choices"] == [choice("", "stop", refusal="I won't.")]


def test_choices_that_interleave() -> None:
    wire = role() + role(1) + delta(1, content="System") + delta(content="Component")
    wire += delta(finish="length", content=" against") + delta(1, "stop", content=" waves") + DONE

    assert assembled(wire, choices=2)["choices"] == [
        choice("Component against", "length"),
        choice("System waves", "stop", index=1),
    ]


def test_log_probabilities_and_token_ids_stand_behind_each_other() -> None:
    def token(text: str, number: int, logprob: float) -> bytes:
        one = {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
        said = {
            "index": 0,
            "delta": {"content": text},
            "logprobs": {"content": [one]},
            "finish_reason": None,
            "token_ids": [number],
        }
        return event(choices=[said])

    none = {"index": 0, "delta": {}, "logprobs": {"content": None}, "finish_reason": "length"}
    wire = (
        role()
        + token("Text", 2067, -4.287398338317871)
        + token(" consist", 4551, -1.4463537931442e-07)
        + event(choices=[none])
    )

    answer = assembled(wire + DONE)["choices"][0]

    assert [one["logprob"] for one in answer["logprobs"]["content"]] == [
        -4.287398338317871,
        -1.4463537931442e-07,
    ]
    assert answer["token_ids"] == [2067, 4551]


def test_it_goes_by_the_public_name() -> None:
    reader = AssemblingReader((), choices=1, names=ModelNames("gemma-4", "ours"))
    reader.feed(role() + delta(finish="stop", content='"model":"gemma-4"') + DONE)

    answer = json.loads(reader.whole())
    assert (answer["model"], answer["choices"][0]["message"]["content"]) == ("ours", '"model":"gemma-4"')


def test_members_it_does_not_know_are_kept_as_they_were_last_said() -> None:
    said = {"annotations": [{"type": "file_citation"}], "channel": "final"}
    silent = dict.fromkeys(said)
    wire = event(choices=[{"index": 0, "delta": silent}], service_tier=None, usage=None)
    wire += event(choices=[{"index": 0, "delta": said}], service_tier="flex", usage=USAGE)
    wire += event(
        choices=[{"index": 0, "delta": silent, "finish_reason": "stop"}], service_tier=None, usage=None
    )

    answer = assembled(wire + DONE)

    message = answer["choices"][0]["message"]
    assert {name: message[name] for name in said} == said
    assert (answer["service_tier"], answer["usage"]) == ("flex", USAGE)


def test_what_is_assembled_is_mended() -> None:
    plan = plan_for("tool_markup_leaks", "turn_marker_leaks", tools=1)
    reader = AssemblingReader(plan.remedies, choices=1, names=NAMES)
    reader.feed(role() + delta(content="Loire" + MARKER) + delta(finish="stop") + DONE)

    assert json.loads(reader.whole())["choices"][0]["message"]["content"] == "Loire"


# ---------------------------------------------------------------- when it is done


planned = partial(plan_for, "tool_markup_leaks", tools=1)
STREAMED: Changes = {("stream",): True, ("stream_options",): {"include_usage": True}}


@pytest.mark.parametrize(
    ("plan", "assembles"),
    [
        pytest.param(planned(), True, id="with-tools"),
        pytest.param(planned(tools=0), False, id="without"),
        pytest.param(planned(stream=True), False, id="streamed-anyway"),
        pytest.param(planned(endpoint=Endpoint.COMPLETIONS), False, id="no-chat"),
        pytest.param(planned(prompt_logprobs=0), True, id="asks-for-no-prompt-logprobs"),
        pytest.param(planned(prompt_logprobs=3), False, id="what-no-stream-has"),
        pytest.param(planned(use_beam_search=True), False, id="what-cannot-be-streamed"),
    ],
)
def test_which_requests_are_streamed_for_it(plan: Plan, assembles: bool) -> None:
    assert plan.assembles is assembles
    assert plan.changes == (STREAMED if assembles else {})


@pytest.mark.parametrize(
    "event",
    [
        {"choices": 7},
        {"choices": [{"index": 0, "delta": {"tool_calls": [{"function": {"name": 7, "arguments": {}}}]}}]},
        {"choices": [{"index": 0, "delta": {"content": 7, "reasoning": {}}}]},
        {"choices": [{"index": 0, "delta": {"tool_calls": None, "reasoning_content": None}}]},
        {"choices": [{"index": None, "delta": {"content": ""}}]},
    ],
    ids=["choices", "call", "texts", "null-for-none", "index"],
)
def test_members_of_a_wrong_type_are_left_out(event: dict[str, object]) -> None:
    reader = AssemblingReader((), choices=1, names=ModelNames("gemma-4", "ours"))
    end = {"choices": [{"index": 0, "delta": {"content": "a"}, "finish_reason": "stop"}]}
    for one in (event, end):
        reader.feed(b"data: " + json.dumps(one).encode() + b"\n\n")
    reader.feed(b"data: [DONE]\n\n")
    assert reader.fault is None
    (choice,) = json.loads(reader.whole())["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("a", "stop")
