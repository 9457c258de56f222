"""Thoughts inside the content go where thoughts belong, at any cut; all other text stays where it is."""

import itertools
import json
from typing import Any

import pytest
from support.engine_events import (
    DONE,
    Asked,
    at_every_cut,
    decoded,
    delta,
    event,
    plan_for,
    role,
    said,
    through,
)

from gateway.core.quirks import mend_whole
from gateway.core.quirks.channels import Channels
from gateway.core.quirks.turn_marker import TurnMarker
from gateway.core.request import Changes, Endpoint, Prompt, Request

EMPTY = "<|channel>thought\n<channel|>"
THOUGHT = "<|channel>thought\nThe <b> caf\u00e9\n<channel|>Loire"


def streamed(*texts: str, index: int = 0) -> bytes:
    return b"".join(delta(index, content=text) for text in texts)


def ended(*texts: str) -> bytes:
    return role() + streamed(*texts) + delta(finish="stop", stop=106) + DONE


def channels(choices: int = 1, **members: Any) -> Channels:
    request = Request(endpoint=Endpoint.CHAT, model="m", prompt=Prompt(), choices=choices)
    return Channels(Asked(request, members))


def both(wire: bytes) -> tuple[str, str]:
    return said(wire, "reasoning"), said(wire)


CASES = [
    pytest.param(THOUGHT, ("The <b> caf\u00e9\n", "Loire"), id="a-thought"),
    pytest.param(EMPTY + "Loire", ("", "Loire"), id="an-empty-one"),
    pytest.param(EMPTY, ("", ""), id="nothing-else"),
    pytest.param(EMPTY + THOUGHT, ("The <b> caf\u00e9\n", "Loire"), id="an-empty-one-first"),
    pytest.param("<|channel>thought\nThe end", ("The end", ""), id="cut-in-the-thought"),
    pytest.param("<|channel>tho", ("tho", ""), id="cut-in-its-name"),
    pytest.param("<|channel>thoughtless<channel|>x", ("less", "x"), id="no-line-end"),
    pytest.param("Loire", ("", "Loire"), id="no-markers"),
    pytest.param("<b>Loire</b>", ("", "<b>Loire</b>"), id="nearly"),
    pytest.param("<|chan", ("", "<|chan"), id="all-but"),
    pytest.param(f"It writes {EMPTY} first", ("", f"It writes {EMPTY} first"), id="talked-about"),
    pytest.param(EMPTY + "A <channel|> ends it", ("", "A <channel|> ends it"), id="a-loose-end"),
]


@pytest.mark.parametrize(("text", "told"), CASES)
def test_whole_answers(text: str, told: tuple[str, str]) -> None:
    message = {"role": "assistant", "content": text, "reasoning": None}
    body = json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}).encode()

    mended, _ = mend_whole([channels()], body)

    found = json.loads(mended)["choices"][0]["message"]
    assert (found["reasoning"] or "", found["content"] or "") == told
    if text == "Loire":
        assert mended == body


@pytest.mark.parametrize(("text", "told"), CASES)
def test_streams_cut_into_any_two_texts(text: str, told: tuple[str, str]) -> None:
    for at in range(len(text) + 1):
        assert both(through([channels()], [ended(text[:at], text[at:])])[0]) == told, at


@pytest.mark.parametrize(("text", "told"), CASES)
def test_streams_character_by_character(text: str, told: tuple[str, str]) -> None:
    assert both(through([channels()], [ended(*text)])[0]) == told


def test_markers_cut_twice() -> None:
    for first, second in itertools.combinations(range(1, len(THOUGHT)), 2):
        texts = THOUGHT[:first], THOUGHT[first:second], THOUGHT[second:]
        assert both(through([channels()], [ended(*texts)])[0]) == ("The <b> caf\u00e9\n", "Loire")


def test_wherever_the_bytes_are_cut() -> None:
    wire = ended("<|channel>", "thought\n", "The <", "b> caf\u00e9", "<channel|>Lo", "ire")

    out = at_every_cut(lambda: [channels()], wire)

    assert both(out) == ("The <b> caf\u00e9", "Loire")
    assert len(decoded(out)) == len(decoded(wire))


def test_a_thought_is_not_held_beyond_what_could_end_it() -> None:
    out, _ = through([channels()], [role() + streamed("<|channel>thought\nThe", " person <", "b")])

    assert [one["choices"][0]["delta"].get("reasoning") for one in decoded(out)] == [
        None,
        "The",
        " person ",
        "<b",
    ]


def test_once_the_answers_have_begun_nothing_more_is_looked_into() -> None:
    broken = b'data: {"choices" as long as nobody looks\n\n'
    begun = role() + role(1) + streamed(EMPTY + "a") + streamed("b", index=1)

    out, _ = through([channels(2)], [begun, broken], choices=2)

    assert (said(out.removesuffix(broken)), said(out.removesuffix(broken), index=1)) == ("a", "b")
    assert out.endswith(broken)


def test_a_choice_that_thinks_when_another_answers_already() -> None:
    wire = role() + role(1) + streamed("a") + streamed(*THOUGHT, index=1)

    out, _ = through([channels(2)], [wire], choices=2)

    assert said(out) == "a"
    assert (said(out, "reasoning", index=1), said(out, index=1)) == ("The <b> caf\u00e9\n", "Loire")


def test_a_choice_without_an_index_has_that_of_its_place() -> None:
    choices = ["no choice", {"message": {"content": THOUGHT}, "finish_reason": "stop"}]

    mended, _ = mend_whole([channels(2)], json.dumps({"choices": choices}).encode())

    assert json.loads(mended)["choices"][1]["message"]["content"] == "Loire"


def test_an_end_without_a_delta_lets_go_of_what_was_held() -> None:
    wire = role() + streamed("<|chan") + event(choices=[{"index": 0, "finish_reason": "stop"}]) + DONE

    assert both(through([channels()], [wire])[0]) == ("", "<|chan")


@pytest.mark.parametrize("index", [-1, 1])
def test_a_choice_that_was_not_asked_for_is_left_alone(index: int) -> None:
    wire = streamed(THOUGHT, index=index)

    assert through([channels()], [wire])[0] == wire


@pytest.mark.parametrize(
    ("given", "told"),
    [
        pytest.param({"reasoning": "So. "}, {"reasoning": "So. hm"}, id="behind-what-was-told"),
        pytest.param({"reasoning_content": None}, {"reasoning_content": "hm"}, id="under-the-engine-s-name"),
        pytest.param(
            {"reasoning_content": None, "reasoning": None},
            {"reasoning_content": None, "reasoning": "hm"},
            id="under-the-newer-name-of-two",
        ),
    ],
)
def test_where_a_thought_is_told(given: dict[str, Any], told: dict[str, Any]) -> None:
    message = {"content": "<|channel>thought\nhm<channel|>Loire", **given}
    body = json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}).encode()

    mended, _ = mend_whole([channels()], body)

    assert json.loads(mended)["choices"][0]["message"] == {"content": "Loire", **told}


def test_a_thought_nobody_wants_to_see() -> None:
    out, _ = through([channels(include_reasoning=False)], [ended(THOUGHT)])

    assert both(out) == ("", "Loire")


@pytest.mark.parametrize("wish", [True, None, "no"])
def test_only_the_word_false_hides_a_thought(wish: object) -> None:
    out, _ = through([channels(include_reasoning=wish)], [ended(THOUGHT)])

    assert both(out) == both(through([channels()], [ended(THOUGHT)])[0])


def test_an_engine_that_parses_by_itself_keeps_its_bytes() -> None:
    wire = role() + delta(reasoning="hm") + streamed("Loire") + delta(finish="stop") + DONE

    assert through([channels()], [wire])[0] == wire


MARKED: Changes = {("skip_special_tokens",): False}


@pytest.mark.parametrize(
    ("quirk", "asked", "changes", "remedies"),
    [
        pytest.param(
            "null_reasoning_content", {"thinking": True}, MARKED, [Channels, TurnMarker], id="thinks"
        ),
        pytest.param(
            "no_reasoning_parser", {"thinking": True}, MARKED, [Channels, TurnMarker], id="no-parser"
        ),
        pytest.param("null_reasoning_content", {}, {}, [], id="does-not-think"),
        pytest.param(
            "null_reasoning_content",
            {"thinking": True, "skip_special_tokens": True},
            {},
            [],
            id="says-so-itself",
        ),
        pytest.param("stale_chat_template", {}, {}, [Channels], id="stale"),
        pytest.param("stale_chat_template", {"thinking": True}, {}, [], id="stale-and-thinks"),
        pytest.param(
            "stale_chat_template", {"endpoint": Endpoint.COMPLETIONS}, {}, [], id="stale-and-no-chat"
        ),
    ],
)
def test_which_requests(quirk: str, asked: dict[str, Any], changes: Changes, remedies: list[type]) -> None:
    plan = plan_for(quirk, **asked)
    assert plan.changes == changes
    assert [type(one) for one in plan.remedies] == remedies


def test_no_remedy_is_there_twice() -> None:
    plan = plan_for(
        "null_reasoning_content", "no_reasoning_parser", "turn_marker_leaks", thinking=True, stream=True
    )
    assert [type(one) for one in plan.remedies] == [Channels, TurnMarker]
