"""Scripts: what a chat stream says, and the events of the response it becomes, in order."""

import json
from typing import Any

import pytest

from gateway.core.responses.chat_stream import ChatStream
from gateway.core.responses.draft import Draft, Event
from gateway.core.sse import CALLS_MAX

TOKEN = "0123456789abcdef" * 2
NOW = 1_795_244_911
USAGE = {
    "prompt_tokens": 3,
    "completion_tokens": 5,
    "total_tokens": 8,
    "prompt_tokens_details": {"cached_tokens": 2},
    "completion_tokens_details": {"reasoning_tokens": 1},
}
DONE = b"data: [DONE]\n\n"


def opened() -> ChatStream:
    return ChatStream(Draft({"id": f"resp_{TOKEN}", "status": "in_progress"}, TOKEN, first_index=1))


def chunk(delta: dict[str, Any] | None = None, finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta or {}, "finish_reason": finish}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


def usage() -> bytes:
    return b"data: " + json.dumps({"choices": [], "usage": USAGE}).encode() + b"\n\n"


def tool(index: int, **function: str) -> dict[str, Any]:
    call = {"index": index, "function": function}
    return {"tool_calls": [call | ({"id": f"call-{index}"} if "name" in function else {})]}


def run(*parts: bytes) -> list[Event]:
    stream = opened()
    events = stream.draft.begin()
    for part in parts:
        events += stream.feed(part, NOW)
    return events + stream.end()


def names(events: list[Event]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


ROLE = chunk({"role": "assistant", "content": ""})
SCRIPTS: dict[str, list[bytes]] = {
    "text": [ROLE, chunk({"content": "Hel"}), chunk({"content": "lo"}, "stop"), usage(), DONE],
    "thought": [
        ROLE,
        chunk({"reasoning": "H"}),
        chunk({"reasoning": "m", "content": "Y"}),
        chunk({"content": "es"}),
        chunk(finish="stop"),
        usage(),
        DONE,
    ],
    "calls": [
        ROLE,
        chunk({"content": "See."}),
        chunk(tool(0, name="f")),
        chunk(tool(0, arguments='{"a"')),
        chunk(tool(1, name="g", arguments="{}")),
        chunk(tool(0, arguments=":1}")),
        chunk(finish="tool_calls"),
        usage(),
        DONE,
    ],
    "refusal": [chunk({"content": "I "}), chunk({"refusal": "won't."}), chunk(finish="stop"), DONE],
    "cut": [chunk({"content": "Hel"}, "length"), usage(), DONE],
    "wordless": [ROLE, chunk(finish="stop"), usage(), DONE],
    "failed": [
        chunk({"content": "Hel"}),
        b'data: {"error": {"type": "server_error", "message": "It broke.", "code": "stream_broken"}}\n\n',
        DONE,
    ],
}
TEXT = ["output_item.added", "content_part.added"]
TEXT_DONE = ["output_text.done", "content_part.done", "output_item.done"]


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("text", [*TEXT, *["output_text.delta"] * 2, *TEXT_DONE, "completed"]),
        (
            "thought",
            [
                *TEXT,
                *["reasoning_text.delta"] * 2,
                *["reasoning_text.done", "content_part.done", "output_item.done"],
                *TEXT,
                *["output_text.delta"] * 2,
                *TEXT_DONE,
                "completed",
            ],
        ),
        (
            "calls",
            [
                *TEXT,
                "output_text.delta",
                *TEXT_DONE,
                *["output_item.added", "function_call_arguments.delta", "function_call_arguments.delta"],
                *["function_call_arguments.done", "output_item.done"],
                *["output_item.added", "function_call_arguments.delta"],
                *["function_call_arguments.done", "output_item.done"],
                "completed",
            ],
        ),
        (
            "refusal",
            [
                *TEXT,
                "output_text.delta",
                *["output_text.done", "content_part.done", "content_part.added", "refusal.delta"],
                *["refusal.done", "content_part.done", "output_item.done"],
                "completed",
            ],
        ),
        ("cut", [*TEXT, "output_text.delta", *TEXT_DONE, "incomplete"]),
        ("failed", [*TEXT, "output_text.delta", "error", "failed"]),
    ],
)
def test_events_come_in_their_order(script: str, expected: list[str]) -> None:
    events = run(*SCRIPTS[script])

    assert names(events) == ["created", "in_progress", *expected]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


@pytest.mark.parametrize("script", SCRIPTS)
def test_pieces_add_up_to_the_last_state(script: str) -> None:
    """What a client collects from the events is what the last one says."""
    events = run(*SCRIPTS[script])
    items: list[dict[str, Any]] = []
    for event in events:
        is_text = event["type"].startswith("response.output_text.")
        assert event.get("logprobs") == ([] if is_text else None)  # which typed clients want
        match event["type"]:
            case "response.output_item.added":
                assert event["output_index"] == len(items)
                items.append(json.loads(json.dumps(event["item"])))
            case "response.content_part.added":
                item = items[event["output_index"]]
                assert event["item_id"] == item["id"]
                assert event["content_index"] == len(item["content"])
                item["content"].append(dict(event["part"]))
            case "response.function_call_arguments.delta":
                items[event["output_index"]]["arguments"] += event["delta"]
            case kind if kind.endswith(".delta"):
                part = items[event["output_index"]]["content"][event["content_index"]]
                part["refusal" if "refusal" in kind else "text"] += event["delta"]
            case "response.output_item.done":
                done = event["item"]
                assert {**items[event["output_index"]], "status": done["status"]} == done
                items[event["output_index"]] = done
    last = events[-1]["response"]["output"]

    assert [{**item, "status": ""} for item in items] == [{**item, "status": ""} for item in last]
    assert [item["id"][-4:] for item in last] == [f"{1 + index:04x}" for index in range(len(last))]


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("end", [b"\n", b"\r\n"], ids=["lf", "crlf"])
def test_it_does_not_matter_where_the_bytes_are_cut(script: str, end: bytes) -> None:
    whole = b"".join(SCRIPTS[script]).replace(b"\n", end)

    assert run(*(whole[at : at + 1] for at in range(len(whole)))) == run(*SCRIPTS[script])


def test_a_delta_leaves_when_it_comes() -> None:
    stream = opened()
    stream.draft.begin()

    assert stream.feed(ROLE, NOW) == []
    assert stream.feed(chunk({"content": "Hel"}), NOW)[-1]["delta"] == "Hel"
    assert stream.feed(b": keep-alive\n\n", NOW) == []
    assert stream.feed(chunk({"content": "lo"}), NOW)[-1]["delta"] == "lo"


def test_what_was_used_is_known_even_if_more_is_said_behind_it() -> None:
    behind = run(chunk({"content": "Hi"}), usage(), chunk(finish="stop"), DONE)
    last = run(chunk({"content": "Hi"}), chunk(finish="stop"), usage(), DONE)

    assert behind[-1]["response"]["usage"]["output_tokens"] == USAGE["completion_tokens"]
    assert behind == last


def test_a_completed_response_says_what_was_used() -> None:
    response = run(*SCRIPTS["thought"])[-1]["response"]

    assert (response["status"], response["completed_at"]) == ("completed", NOW)
    assert response["incomplete_details"] is None
    assert response["output"] == [
        {
            "type": "reasoning",
            "id": f"rs_{TOKEN}0001",
            "status": "completed",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Hm"}],
        },
        {
            "type": "message",
            "id": f"msg_{TOKEN}0002",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Yes", "annotations": [], "logprobs": []}],
        },
    ]
    assert response["usage"] == {
        "input_tokens": 3,
        "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 1},
        "total_tokens": 8,
    }


@pytest.mark.parametrize("script", [*SCRIPTS, "words-after-calls"])
def test_an_item_ends_before_the_next_begins(script: str) -> None:
    """Many clients, such as pi, add every delta to the item that was announced last."""
    words = [
        chunk(tool(0, name="f", arguments="{}")),
        chunk(tool(1, name="g", arguments='{"b": ')),
        chunk(tool(1, arguments="2}")),
        chunk({"content": "There."}),
        chunk(tool(2, name="h", arguments="{}")),
        chunk(finish="tool_calls"),
        DONE,
    ]
    running: list[int] = []
    for event in run(*SCRIPTS.get(script, words)):
        match event["type"]:
            case "response.output_item.added":
                assert not running
                running = [event["output_index"]]
            case "response.output_item.done":
                assert running.pop() == event["output_index"]
            case _:
                assert event.get("output_index") in (None, *running)


def test_a_call_leaves_when_the_next_one_begins() -> None:
    stream = opened()
    stream.draft.begin()

    stream.feed(chunk(tool(0, name="f", arguments='{"a": {}}')), NOW)
    events = stream.feed(chunk(tool(1, name="g", arguments='{"b": ')), NOW)

    assert names(events) == [
        *["function_call_arguments.done", "output_item.done"],
        *["output_item.added", "function_call_arguments.delta"],
    ]
    assert names(stream.feed(chunk(tool(1, arguments="2")), NOW)) == ["function_call_arguments.delta"]


def test_calls_come_whole_however_their_pieces_mix() -> None:
    output = run(*SCRIPTS["calls"])[-1]["response"]["output"]

    assert [(item.get("call_id"), item.get("name"), item.get("arguments")) for item in output] == [
        (None, None, None),
        ("call-0", "f", '{"a":1}'),
        ("call-1", "g", "{}"),
    ]


def test_a_call_is_not_whole_where_an_object_within_it_ends() -> None:
    nameless = {"tool_calls": [{"index": 1, "function": {"name": "", "arguments": "{}"}}]}
    mixed = [chunk(tool(0, name="f", arguments='{"a": {}')), chunk(tool(1, name="g")), chunk(nameless)]
    events = run(*mixed, chunk(tool(0, arguments="}")), chunk(finish="tool_calls"), DONE)
    output = events[-1]["response"]["output"]

    assert [(item["name"], item["arguments"]) for item in output] == [("f", '{"a": {}}'), ("g", "{}")]


@pytest.mark.parametrize(
    ("script", "statuses"),
    [
        ([chunk({"content": "Hel"}, "length")], ["incomplete"]),
        ([chunk({"content": "Hel"}, ""), chunk(finish="length")], ["incomplete"]),
        (
            [chunk({"reasoning": "Hm"}), chunk({"content": "He"}), chunk(finish="length")],
            ["completed", "incomplete"],
        ),
        ([chunk({"reasoning": "Hm"}, "length")], ["incomplete"]),
        (
            [
                chunk(tool(0, name="f", arguments="{}")),
                chunk(tool(1, name="g", arguments="{")),
                chunk(finish="length"),
            ],
            ["completed", "incomplete"],
        ),
    ],
    ids=["text", "after-empty-reasons", "after-a-thought", "in-a-thought", "in-the-second-call"],
)
def test_what_was_cut_is_incomplete_and_nothing_else(script: list[bytes], statuses: list[str]) -> None:
    response = run(*script, usage(), DONE)[-1]["response"]

    assert (response["status"], response["completed_at"]) == ("incomplete", None)
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in response["output"]] == statuses


def test_filtered_content_is_incomplete_too() -> None:
    response = run(chunk({"content": "x"}, "content_filter"), DONE)[-1]["response"]

    assert response["incomplete_details"] == {"reason": "content_filter"}


def test_an_answer_without_a_word_is_a_message_without_a_word() -> None:
    response = run(ROLE, chunk(finish="stop"), DONE)[-1]["response"]

    assert response["status"] == "completed"
    assert response["output"][0]["content"][0]["text"] == ""
    assert response["usage"] is None


@pytest.mark.parametrize(
    ("parts", "code", "message"),
    [
        (SCRIPTS["failed"], "server_error", "It broke."),
        ([chunk({"content": "x"})], "server_error", "The answer ended before it was finished."),
        ([chunk({"content": "x"}), DONE], "server_error", "The answer ended before it was finished."),
        ([b"data: {\n\n"], "server_error", "The backend sent an invalid event."),
        ([b"data: [1]\n\n"], "server_error", "The backend sent an invalid event."),
        (
            [b'data: {"error": {"type": "rate_limit_error", "message": "Full."}}\n\n'],
            "rate_limit_exceeded",
            "Full.",
        ),
        (
            [b'data: {"error": {"type": "invalid_request_error", "message": "No."}}\n\n'],
            "invalid_prompt",
            "No.",
        ),
    ],
)
def test_a_stream_that_breaks_is_a_response_that_failed(parts: list[bytes], code: str, message: str) -> None:
    events = run(*parts)
    response = events[-1]["response"]

    assert events[-1]["type"] == "response.failed"
    assert response["status"] == "failed"
    assert response["error"] == {"code": code, "message": message}
    assert {item["status"] for item in response["output"]} <= {"incomplete"}
    assert names(events).count("failed") == 1
    for told in (events[-2], events[-2]["error"]):
        assert told.items() >= {"code": code, "message": message, "param": None}.items()


@pytest.mark.parametrize(
    "before",
    [
        [chunk({"content": "Hel"})],
        [chunk({"reasoning": "Hm"})],
        [
            chunk({"reasoning": "Hm"}),
            chunk({"content": "Let me see."}),
            chunk(tool(0, name="f", arguments="{")),
        ],
        [chunk(tool(0, name="f", arguments="{}")), chunk(tool(1, name="g")), chunk(tool(2, arguments="{"))],
        [],
    ],
    ids=["words", "thought", "call", "calls", "nothing"],
)
@pytest.mark.parametrize("script", ["text", "thought", "calls", "wordless"])
def test_what_begins_anew_ends_what_was_there(before: list[bytes], script: str) -> None:
    """Typed clients take no answer as complete of which an item was begun and never ended."""
    stream = opened()
    events = [event for part in before for event in stream.feed(part, NOW)]
    anew = stream.draft.restart()
    assert {event["type"] for event in anew} <= {"response.output_item.done"}  # half a text is none
    events += anew
    void = [event["item"]["id"] for event in events if event["type"] == "response.output_item.added"]
    events += stream.feed(b"".join(SCRIPTS[script]), NOW)
    ended = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    output = events[-1]["response"]["output"]

    assert output
    assert [item["id"] for item in ended[: len(void)]] == void
    assert ended[len(void) :] == output
    assert len({item["id"] for item in ended}) == len(ended)
    assert void == [] or ended[len(void) - 1]["status"] == "incomplete"


def test_what_was_whole_may_begin_anew_too() -> None:
    stream = opened()
    stream.feed(chunk({"content": "Hel"}, "length") + usage(), NOW)
    stream.draft.restart()
    response = stream.feed(b"".join(SCRIPTS["refusal"]), NOW)[-1]["response"]

    assert (response["status"], response["usage"], len(response["output"])) == ("completed", None, 1)


def test_an_answer_that_says_twice_that_it_ends_ends_once() -> None:
    assert run(chunk({"content": "Hi"}, "stop"), chunk(finish="stop"), DONE) == run(
        chunk({"content": "Hi"}, "stop"), DONE
    )


@pytest.mark.parametrize(
    "more", [{"content": "lo"}, tool(0, name="f", arguments="{}")], ids=["words", "call"]
)
def test_what_is_said_behind_the_end_of_an_answer_is_ended_too(more: dict[str, Any]) -> None:
    events = run(ROLE, chunk({"content": "Hel"}, "stop"), chunk(more), DONE)

    assert names(events)[-2:] == ["output_item.done", "completed"]
    output = events[-1]["response"]["output"]
    assert [item["status"] for item in output] == ["completed"] * 2
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == output


def test_of_a_cancelled_answer_only_what_was_not_whole_is_incomplete() -> None:
    stream = opened()
    stream.feed(chunk({"reasoning": "Hm"}) + chunk({"content": "Hel"}), NOW)
    (event,) = stream.draft.cancel()

    assert (event["type"], event["response"]["status"]) == ("response.incomplete", "cancelled")
    assert [item["status"] for item in event["response"]["output"]] == ["completed", "incomplete"]


def test_nothing_comes_after_the_end() -> None:
    stream = opened()
    stream.feed(b"".join(SCRIPTS["text"]), NOW)

    assert stream.draft.is_over
    assert stream.feed(chunk({"content": "more"}), NOW) == []
    assert stream.end() == []


@pytest.mark.parametrize("script", [name for name in SCRIPTS if name != "failed"])
def test_a_whole_answer_becomes_the_same_response(script: str) -> None:
    streamed = run(*SCRIPTS[script])[-1]["response"]
    messages: dict[str, dict[str, Any]] = {
        "text": {"content": "Hello"},
        "thought": {"content": "Yes", "reasoning_content": "Hm"},
        "calls": {
            "content": "See.",
            "tool_calls": [
                {"id": "call-0", "function": {"name": "f", "arguments": '{"a":1}'}},
                {"id": "call-1", "function": {"name": "g", "arguments": "{}"}},
            ],
        },
        "refusal": {"content": "I ", "refusal": "won't."},
        "cut": {"content": "Hel"},
        "wordless": {"content": ""},
    }
    finish = {"calls": "tool_calls", "cut": "length"}.get(script, "stop")
    draft = opened().draft
    choice = {"message": {"role": "assistant", **messages[script]}, "finish_reason": finish}
    draft.add({"choices": [choice]} | ({} if script == "refusal" else {"usage": USAGE}))
    draft.complete(NOW)

    assert draft.response == streamed


@pytest.mark.parametrize(
    "odd",
    [
        {"choices": "x"},
        {"choices": ["x"]},
        {"choices": [{"delta": "x"}]},
        {"choices": [{"delta": {"content": ["x"], "reasoning": 7, "refusal": {}, "tool_calls": "x"}}]},
        {"choices": [{"delta": {"tool_calls": ["x"]}}]},
        {"choices": [{"delta": {"tool_calls": [{"function": "x"}]}}]},
        {"choices": [{"delta": {"tool_calls": [{"function": {"name": 7, "arguments": {"a": 1}}}]}}]},
        {"choices": [{"delta": {}, "finish_reason": ["stop"]}]},
        {"usage": "x"},
    ],
)
def test_what_makes_no_sense_says_nothing(odd: dict[str, Any]) -> None:
    assert opened().draft.add(odd) == []


def test_a_call_keeps_its_first_id_and_other_choices_say_nothing() -> None:
    later = {"tool_calls": [{"index": 0, "id": "", "function": {"arguments": "{}"}}]}
    other = chunk({"content": "x"}).replace(b'"index": 0', b'"index": 1')
    done = run(ROLE, chunk(tool(0, name="f")), chunk(later), other, chunk(finish="tool_calls"), DONE)[-1]
    (call,) = done["response"]["output"]
    assert (call["call_id"], call["arguments"]) == ("call-0", "{}")


def test_a_call_keeps_the_name_that_was_shown() -> None:
    events = run(
        chunk(tool(0, name="f")), chunk(tool(0, name="g", arguments="{}")), chunk(finish="stop"), DONE
    )

    named = [event["item"]["name"] for event in events if "item" in event]
    assert [*named, events[-1]["response"]["output"][0]["name"]] == ["f"] * 3


def test_a_call_names_its_namespace() -> None:
    stream = opened()
    function = {"type": "function", "name": "f", "parameters": None}
    space = {"type": "namespace", "name": "mcp", "description": "", "tools": [function]}
    stream.draft.response["tools"] = [function, space]
    events = stream.feed(chunk(tool(0, name="mcp__f", arguments="{}")), NOW)
    events += stream.feed(chunk(tool(1, name="f", arguments="{}")), NOW)
    events += stream.feed(chunk(finish="tool_calls") + DONE, NOW)

    calls = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [(call["name"], call.get("namespace")) for call in calls] == [("f", "mcp"), ("f", None)]
    assert calls == events[-1]["response"]["output"]


def test_a_call_whose_name_comes_late_is_shown_when_it_comes() -> None:
    late = [
        chunk({"tool_calls": [{"index": 0, "id": "c", "function": {"arguments": "{"}}]}),
        chunk({"tool_calls": [{"index": 0, "function": {"name": "f"}}]}),
        chunk({"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]}),
        chunk({"tool_calls": [{"index": 1, "function": {"arguments": "{}"}}]}),
        chunk(finish="tool_calls"),
        DONE,
    ]
    events = run(*late)
    output = events[-1]["response"]["output"]

    assert names(events)[2:5] == ["output_item.added", *["function_call_arguments.delta"] * 2]
    assert events[2]["item"]["arguments"] == ""
    assert [(item["call_id"], item["name"], item["arguments"]) for item in output] == [
        ("c", "f", "{}"),
        (f"call_{TOKEN}0002", "", "{}"),
    ]


@pytest.mark.parametrize(
    "more", [tool(CALLS_MAX, name="f"), {"tool_calls": [{"function": {"name": "f"}}] * (CALLS_MAX + 1)}]
)
def test_more_calls_than_are_credible_fail(more: dict[str, Any]) -> None:
    events = run(chunk(tool(0, name="f", arguments="{}")), chunk(more), chunk(finish="tool_calls"), DONE)

    assert names(events)[-2:] == ["error", "failed"]
