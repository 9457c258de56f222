"""The chat template: how many tokens stand around the messages."""

from typing import Any

import pytest

from gateway.simulator import pieces
from gateway.simulator.template import of_ids, raw, render

HI = {"role": "user", "content": "hi"}  # one token
TOOL = {"type": "function", "function": {"name": "f"}}
TEXT = {"type": "text", "text": "hi"}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
AUDIO = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
DECLARATION = 2 + pieces.count('{"name":"f"}')

PROMPTS = [
    pytest.param([HI], {}, 1 + 5 + 1 + 3 + 4, id="thinking-off"),
    pytest.param([HI], {"thinking": True}, 1 + 5 + 2 + 5 + 1 + 3, id="thinking-on-adds-a-system-turn"),
    pytest.param([{"role": "system", "content": "hi"}, HI], {}, 1 + 6 + 6 + 7, id="system"),
    pytest.param([HI, {"role": "assistant", "content": " hi\n"}, HI], {}, 1 + 18 + 7, id="text-is-stripped"),
    pytest.param(
        [HI, {"role": "assistant", "content": "hi"}, {"role": "assistant", "content": "hi"}, HI],
        {},
        1 + 6 + 6 + 3 + 6 + 7,
        id="a-second-answer-in-a-row-opens-no-turn",
    ),
    pytest.param(
        [HI, {"role": "assistant", "content": "<|channel>thought\nso\n<channel|>hi"}, HI],
        {},
        1 + 18 + 7,
        id="earlier-reasoning-is-dropped",
    ),
    pytest.param([HI], {"tools": [TOOL]}, 1 + 5 + DECLARATION + 6 + 7, id="tools"),
    pytest.param([{"role": "user", "content": [TEXT, IMAGE]}], {}, 14 + 282, id="image"),
    pytest.param(
        [{"role": "user", "content": ["hi", IMAGE]}], {"image_tokens": 70}, 14 + 72, id="image-budget"
    ),
    pytest.param([{"role": "user", "content": ["hi", AUDIO]}], {}, 14 + 752, id="audio"),
    pytest.param(
        [HI, {"role": "assistant", "content": "hi"}],
        {"generation_prompt": False, "continue_final": True},
        1 + 6 + 4,
        id="continued",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("messages", "members", "tokens"), PROMPTS)
def test_prompt_length(messages: list[dict[str, Any]], members: dict[str, Any], tokens: int) -> None:
    rendered = render(messages, **members)

    assert rendered.count() == len(rendered.ids()) == len(rendered.strings()) == tokens
    assert rendered.chars == len(rendered.text())


def test_a_chat_reads_as_turns() -> None:
    assert render([HI]).text() == "<bos><|turn>user\nhi<turn|>\n<|turn>model\n<|channel>thought\n<channel|>"


def test_a_tool_round_needs_no_turn_of_its_own() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    messages: list[dict[str, Any]] = [
        HI,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
    ]

    assert render(messages).text() == (
        "<bos><|turn>user\nhi<turn|>\n<|turn>model\n"
        '<|tool_call>call:f{"a":1}<tool_call|><|tool_response>response:tool{value:sunny}<tool_response|>'
    )


def test_arguments_may_come_as_an_object() -> None:
    call = {"function": {"name": "f", "arguments": {"a": 1}}}

    assert 'call:f{"a":1}' in render([{"role": "assistant", "tool_calls": [call]}]).text()


def test_a_completion_gets_a_start_marker() -> None:
    assert raw("Name a river.").count() == 5
    assert raw("").ids() == [pieces.BOS]


def test_ids_stay_as_they_were_sent() -> None:
    numbers = [2, 818, 8178]

    assert of_ids(numbers).ids() == numbers
    assert of_ids(numbers).count() == 3


def test_a_thought_stays_until_the_user_says_something_else() -> None:
    call: dict[str, Any] = {
        "role": "assistant",
        "reasoning": "hm",
        "tool_calls": [{"function": {"name": "f"}}],
    }
    asked: list[dict[str, Any]] = [{"role": "user", "content": "a"}, call, {"role": "tool", "content": "1"}]

    assert "<|channel>thought\nhm\n<channel|><|tool_call>" in render(asked, thinking=True).text()
    assert "hm" not in render([*asked, {"role": "user", "content": "b"}], thinking=True).text()
    assert "hm" not in render([asked[0], {**call, "tool_calls": None}]).text()


def test_a_salt_makes_other_blocks_of_the_same_prompt() -> None:
    asked = [{"role": "user", "content": "a " * 300}]
    (_, none), (_, one), (_, two) = (render(asked, salt=salt).counted() for salt in ("", "1", "2"))

    assert len(none) > 1
    assert len({none[0], one[0], two[0]}) == 3
