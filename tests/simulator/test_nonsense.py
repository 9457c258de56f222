"""What a simulated model gets right when it is asked for it, and what it says when it is out of its mind."""

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from gateway.simulator import Fault
from gateway.simulator.nonsense import spoilt
from gateway.simulator.recall import asked_for
from gateway.simulator.script import Script, ToolCall

Chat = Callable[..., dict[str, Any]]
Events = Callable[[str], list[Any]]
URL = "/v1/chat/completions"

PLAIN = Script(["A", " river", ".", ""])
THINKING = Script(["", "", "Hm", ".", "", "Yes", ""], thought_end=5)
CUT = Script(["A", " river"], finish_reason="length")
CALL = Script(["", "", "", ""], calls=[ToolCall("f", "{}")], finish_reason="tool_calls", stop_reason=50)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        pytest.param('Reply with exactly "OK".', "OK", id="quoted"),
        pytest.param("Reply with the single word: pong", "pong", id="bare"),
        pytest.param(
            "Please answer only with the word heron and nothing else.", "heron", id="and-nothing-else"
        ),
        pytest.param("What is 2 + 2? Answer with the number only.", "4", id="sum"),
        pytest.param("what is 17 times 3", "51", id="product"),
        pytest.param("Calculate 3-10.", "-7", id="difference"),
        pytest.param("Count from 8 to 11.", "8, 9, 10, 11", id="count"),
        pytest.param("Count from 2 to 1", "", id="count-nothing"),
        pytest.param("Name a river.", None, id="neither"),
        pytest.param("Say it first in one line, then at length.", None, id="says-no-word"),
        pytest.param('Reply with "OK".\nThen tell me about "rivers".', None, id="asks-for-more"),
        pytest.param('Reply with "' + "a" * 500 + '"', None, id="too-long"),
        pytest.param("", None, id="empty"),
    ],
)
def test_what_can_be_asked_for(text: str, answer: str | None) -> None:
    assert asked_for(text) == answer


WORD = 'Reply with the word "heron".'


@pytest.mark.parametrize("content", [WORD, [{"type": "text", "text": WORD}]], ids=["string", "part"])
async def test_it_repeats_a_word_word_for_word(client: httpx.AsyncClient, chat: Chat, content: Any) -> None:
    answer = (await client.post(URL, json=chat(content, temperature=0))).json()

    assert answer["choices"][0]["message"]["content"] == "heron"
    assert answer["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("so_far", "left"),
    [
        pytest.param("8, 9", ", 10, 11", id="between-numbers"),
        pytest.param("8, 9, 1", "0, 11", id="within-one"),
        pytest.param("8, 9, 10, ", "11", id="behind-a-space"),
        pytest.param("8, 9, 10, 11", "", id="all-there"),
    ],
)
async def test_it_counts_on_where_an_answer_was_cut(
    client: httpx.AsyncClient, chat: Chat, so_far: str, left: str
) -> None:
    begun = chat(
        "Count from 8 to 11.",
        continue_final_message=True,
        add_generation_prompt=False,
        reasoning_effort="low",
    )
    begun["messages"].append({"role": "assistant", "content": so_far})
    message = (await client.post(URL, json=begun)).json()["choices"][0]["message"]

    assert (message["content"] or "") == left
    assert message["reasoning"] is None


async def test_what_was_begun_otherwise_is_no_count(client: httpx.AsyncClient, chat: Chat) -> None:
    begun = chat("Count from 8 to 11.", continue_final_message=True, add_generation_prompt=False)
    begun["messages"].append({"role": "assistant", "content": "8, 10"})
    content = (await client.post(URL, json=begun)).json()["choices"][0]["message"]["content"]

    assert not content.startswith(", 9")
    assert any(char.isalpha() for char in content)


@pytest.mark.parametrize(
    ("fault", "script", "content", "thought"),
    [
        (Fault.CHANNEL_MARKERS, PLAIN, "<|channel>thought\n<channel|>A river.", ""),
        (Fault.CHANNEL_MARKERS, THINKING, "<|channel>thought\nHm.<channel|>Yes", ""),
        (Fault.CHANNEL_MARKERS, CUT, "<|channel>thought\n<channel|>A river", ""),
        (Fault.EMPTY_ANSWER, PLAIN, "", ""),
        (Fault.EMPTY_ANSWER, CUT, "", ""),
        (Fault.WRONG_TEXT, PLAIN, "!!!", ""),
        (Fault.WRONG_TEXT, THINKING, "!", "!!!!!"),
        (Fault.WRONG_TEXT, CUT, "!!", ""),
        (Fault.WRONG_TEXT, CALL, "!!!", ""),
    ],
)
def test_what_becomes_of_a_script(fault: Fault, script: Script, content: str, thought: str) -> None:
    spoiled = spoilt(script, fault)

    assert spoiled.content(0, len(spoiled.tokens)) == content
    assert spoiled.thought(0, len(spoiled.tokens)) == thought


@pytest.mark.parametrize(("script", "reason"), [(PLAIN, "stop"), (CUT, "length"), (CALL, "stop")])
def test_nonsense_ends_as_the_answer_would_have(script: Script, reason: str) -> None:
    spoiled = spoilt(script, Fault.WRONG_TEXT)

    assert (spoiled.finish_reason, spoiled.stop_reason, spoiled.calls) == (reason, None, ())


@pytest.mark.parametrize(
    ("fault", "text"),
    [("channel_markers", "<|channel>thought\n<channel|>OK"), ("empty_answer", ""), ("wrong_text", "!")],
)
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_nonsense_comes_on_a_wire_that_is_in_order(
    client: httpx.AsyncClient, chat: Chat, events: Events, fault: str, text: str, stream: bool
) -> None:
    await client.post("/simulator/fault", json={"fault": fault, "count": 1})
    spoiled, sound = [await client.post(URL, json=chat('Say "OK".', stream=stream)) for _ in range(2)]

    assert (spoiled.status_code, sound.status_code) == (200, 200)
    assert said(spoiled, events, stream) == (text, "stop")
    assert said(sound, events, stream) == ("OK", "stop")


def said(answer: httpx.Response, events: Events, stream: bool) -> tuple[str, str]:
    if not stream:
        choice = answer.json()["choices"][0]
        return choice["message"]["content"], choice["finish_reason"]
    *parts, done = events(answer.text)
    assert done == "[DONE]"
    choices = [part["choices"][0] for part in parts]
    return "".join(choice["delta"].get("content", "") for choice in choices), choices[-1]["finish_reason"]
