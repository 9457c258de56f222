import json
from dataclasses import replace
from typing import Any

import pytest

from gateway.core.canary import Canary, body, fault

PLAIN = Canary("What is 2 + 2?", "four")
THINKING = replace(PLAIN, reasoning=True)


def answer(content: Any, **fields: Any) -> bytes:
    return json.dumps(
        {"choices": [{"message": {"role": "assistant", "content": content, **fields}}]}
    ).encode()


@pytest.mark.parametrize(
    ("canary", "said", "expected"),
    [
        pytest.param(PLAIN, answer("Four."), "", id="right"),
        pytest.param(PLAIN, answer("It is FOUR, I think."), "", id="right-in-a-sentence"),
        pytest.param(PLAIN, answer("Five."), "expected 'four', it said 'Five.'", id="wrong"),
        pytest.param(PLAIN, answer("the the " * 40), "expected 'four', it said 'the the", id="babble"),
        pytest.param(PLAIN, answer(""), "its answer is empty", id="empty"),
        pytest.param(PLAIN, answer(None, reasoning="four"), "its answer is empty", id="all-thought"),
        pytest.param(
            PLAIN,
            answer("<|channel>thought\n<channel|>Four."),
            "its answer contains <|channel: '<|channel>thought",
            id="stale-template",
        ),
        pytest.param(PLAIN, answer("Four.<turn|>"), "its answer contains <turn|>", id="turn-leaks"),
        pytest.param(THINKING, answer("Four.", reasoning="2 and 2 ..."), "", id="thought"),
        pytest.param(THINKING, answer("Four.", reasoning_content="2 and 2 ..."), "", id="thought-of-old"),
        pytest.param(
            THINKING,
            answer("Four.", reasoning=""),
            "it was asked to think, but its reasoning is empty",
            id="empty-thought",
        ),
        pytest.param(
            THINKING,
            answer("Four.", reasoning_content=None),
            "it was asked to think, but its reasoning is empty",
            id="no-thought",
        ),
        pytest.param(
            THINKING,
            answer("Four.", reasoning="<think>hm"),
            "its answer contains <think>",
            id="marked-thought",
        ),
        pytest.param(PLAIN, b"<html>", "its answer is not a chat completion", id="no-json"),
        pytest.param(PLAIN, b"[" * 100_000, "its answer is not a chat completion", id="nested-without-end"),
        pytest.param(PLAIN, b'{"choices": []}', "its answer is not a chat completion", id="no-choice"),
        pytest.param(PLAIN, b"[]", "its answer is not a chat completion", id="no-object"),
    ],
)
def test_what_is_wrong_with_an_answer(canary: Canary, said: bytes, expected: str) -> None:
    found = fault(canary, said)
    assert found.startswith(expected) if expected else found == ""


def test_it_is_asked_without_dice_and_says_whether_to_think() -> None:
    asked = json.loads(body(THINKING, "gemma"))
    assert (asked["model"], asked["temperature"]) == ("gemma", 0)
    assert asked["chat_template_kwargs"] == {"enable_thinking": True}
    assert asked["messages"] == [{"role": "user", "content": "What is 2 + 2?"}]
