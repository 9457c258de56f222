"""A job's stored answer: how pieces from one backend or several add up, and how to go on from them."""

import json
from typing import Any

import pytest

from gateway.core.job_answers import (
    CHOICES_MAX,
    INVALID_EVENT,
    answer_so_far,
    choices,
    continuation,
    current,
)
from gateway.core.jobs import Chunk, JobStatus
from gateway.core.sse import CALLS_MAX


def event(finish_reason: str | None = None, **delta: Any) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


def usage(completion_tokens: int) -> bytes:
    counts = {"prompt_tokens": 7, "completion_tokens": completion_tokens}
    return b"data: " + json.dumps({"choices": [], "usage": counts}).encode() + b"\n\n"


def chunks(*data: bytes | tuple[bytes]) -> list[Chunk]:
    """Return chunks; one in a tuple begins the answer anew."""
    return [
        Chunk(number, 1, one if isinstance(one, bytes) else one[0], restarts=isinstance(one, tuple))
        for number, one in enumerate(data)
    ]


DONE = b"data: [DONE]\n\n"


def test_pieces_add_up_to_one_answer() -> None:
    stored = chunks(
        event(role="assistant", content="") + event(reasoning="Let "),
        b": keep-alive\n\n" + event(reasoning="me see.") + event(content="It "),
        event(content="is 42.") + event("stop"),
        usage(9) + DONE,
    )

    answer = answer_so_far(stored)

    assert answer.content == "It is 42."
    assert answer.thought == "Let me see."
    assert (answer.finish_reason, answer.status) == ("stop", JobStatus.COMPLETED)


def test_what_an_engine_may_leave_out_or_name_otherwise_is_no_fault() -> None:
    choice = b'{"delta": {"reasoning_content": "Hm."}, "finish_reason": "stop"}'
    stored = chunks(b'data: {"choices": [%b]}\n\n' % choice, b'data: {"usage": {}}\n\n')

    answer = answer_so_far(stored)

    assert (answer.thought, answer.finish_reason) == ("Hm.", "stop")


def test_what_an_engine_may_write_as_nothing_is_no_fault() -> None:
    said = [
        b'data: {"choices": null}\n\n',
        b"data:\n\n",
        b'data: {"choices": [{"index": null, "delta": null, "finish_reason": null}]}\n\n',
        b'data: {"choices": [{"index": null, "delta": {"content": null, "reasoning": null}}]}\n\n',
        event(content="It is 42."),
        b'data: {"choices": [{"index": null, "delta": {}, "finish_reason": "stop"}]}\n\n' + event("stop"),
    ]

    answer = answer_so_far(chunks(*said))

    assert (answer.content, answer.thought, answer.finish_reason) == ("It is 42.", "", "stop")
    assert answer_so_far(chunks(*said), choices=2).finish_reason is None  # both ends were of the same choice


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_an_event_may_have_several_lines_of_data(end: bytes) -> None:
    whole = event(content="It is 42.") + event("stop") + DONE
    stored = chunks(whole.replace(b', "delta"', b',\ndata: "delta"').replace(b"\n", end))

    answer = answer_so_far(stored)

    assert (answer.content, answer.finish_reason) == ("It is 42.", "stop")


def test_an_answer_that_began_anew_makes_the_earlier_one_void() -> None:
    stored = chunks(event(content="wrong"), (event(content="right"),), event("length"))

    assert [chunk.number for chunk in current(stored)] == [1, 2]
    assert answer_so_far(stored).content == "right"
    assert answer_so_far(stored).status is JobStatus.INCOMPLETE


def test_an_answer_that_was_cut_has_not_ended() -> None:
    assert answer_so_far(chunks(event(content="It "))).finish_reason is None
    assert answer_so_far([]).content == ""


REQUEST: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Why?"}], "stream": True}


def went_on(request: dict[str, Any], *data: bytes, spent: int = 0) -> dict[str, Any] | None:
    body = continuation(json.dumps(request).encode(), answer_so_far(chunks(*data)), spent)
    found: dict[str, Any] | None = None if body is None else json.loads(body)
    return found


def test_a_cut_text_is_put_before_what_follows() -> None:
    found = went_on({**REQUEST, "temperature": 0.5}, event(reasoning="Hm."), event(content="Because it "))

    assert found == {
        **REQUEST,
        "temperature": 0.5,
        "messages": [*REQUEST["messages"], {"role": "assistant", "content": "Because it "}],
        "continue_final_message": True,
        "add_generation_prompt": False,
    }


@pytest.mark.parametrize(
    ("name", "limit", "left"),
    [
        ("max_tokens", 100, 90),
        ("max_completion_tokens", 5, 1),
        ("min_tokens", 100, 90),  # vLLM's own, refused if it is above the other two
        ("min_tokens", 5, 0),
    ],
)
def test_what_was_said_is_taken_off_the_limit(name: str, limit: int, left: int) -> None:
    found = went_on({**REQUEST, name: limit}, event(content="x"), spent=10)

    assert found is not None
    assert found[name] == left


@pytest.mark.parametrize(
    ("request_", "data"),
    [
        pytest.param(REQUEST, b"", id="nothing-yet"),
        pytest.param(REQUEST, event(reasoning="Let me"), id="a-thought-only"),
        pytest.param(REQUEST, event(content=" \n"), id="blanks-only"),
        pytest.param(
            REQUEST, event(content="Look: ") + event(tool_calls=[{"index": 0}]), id="a-tool-call-has-begun"
        ),
        pytest.param(
            REQUEST, event(tool_calls=[{"index": 0}]) + event(content="So"), id="text-behind-a-tool-call"
        ),
        pytest.param({**REQUEST, "n": 2}, event(content="x"), id="several-choices"),
        pytest.param({**REQUEST, "echo": True}, event(content="x"), id="an-echo"),
        pytest.param({**REQUEST, "continue_final_message": True}, event(content="x"), id="the-callers-own"),
        pytest.param(
            {**REQUEST, "response_format": {"type": "json_object"}}, event(content="{"), id="a-form"
        ),
        pytest.param({**REQUEST, "structured_outputs": {"regex": "a"}}, event(content="a"), id="a-grammar"),
        pytest.param({**REQUEST, "logprobs": True}, event(content="a"), id="logprobs"),
        pytest.param({"model": "m", "prompt": "x"}, event(content="a"), id="no-chat"),
    ],
)
def test_what_cannot_be_continued_starts_anew(request_: dict[str, Any], data: bytes) -> None:
    assert went_on(request_, data) is None


@pytest.mark.parametrize(
    "asked", [{"response_format": {"type": "text"}}, {"n": 1}, {"n": None}, {"max_tokens": None}]
)
def test_what_changes_nothing_may_be_asked_for_by_name(asked: dict[str, Any]) -> None:
    assert went_on({**REQUEST, **asked}, event(content="a")) is not None


def test_an_answer_with_several_choices_is_over_when_all_of_them_are() -> None:
    def ended(index: int, finish_reason: str) -> bytes:
        choice = {"index": index, "delta": {}, "finish_reason": finish_reason}
        return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"

    some, rest = ended(1, "length"), ended(0, "stop")

    assert answer_so_far(chunks(some), choices=2).finish_reason is None
    assert answer_so_far(chunks(some, rest), choices=2).status is JobStatus.INCOMPLETE
    assert answer_so_far(chunks(rest, rest), choices=2).finish_reason is None
    assert answer_so_far(chunks(some, rest), choices=1).status is JobStatus.INCOMPLETE


@pytest.mark.parametrize(("n", "expected"), [(None, 1), (1, 1), (3, 3), (2.0, 2), (0, 1), ("2", 1)])
def test_how_many_choices_a_request_has(n: object, expected: int) -> None:
    assert choices(json.dumps({"n": n}).encode()) == expected


@pytest.mark.parametrize(
    "bad",
    [
        event(tool_calls=[{"index": CALLS_MAX, "function": {"name": "f"}}]),
        b'data: {"choices": [{"index": %d, "delta": {"content": "x"}}]}\n\n' % CHOICES_MAX,
        b'data: {"choices": [{"delta": {"content": "x"}, "more": %b%b}]}\n\n' % (b"[" * 9999, b"]" * 9999),
    ],
    ids=["calls", "choices", "nested"],
)
def test_more_than_is_credible_makes_an_event_invalid(bad: bytes) -> None:
    with pytest.raises(INVALID_EVENT):
        answer_so_far(chunks(bad + event("stop")))
