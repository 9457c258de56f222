"""What an application gets from engines with known faults, through the gateway and an unmodified SDK."""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from support.site import Site, simulated, site

from gateway.simulator import Quirk

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ASK: Any = [{"role": "user", "content": "Call get_weather for Paris."}]


@asynccontextmanager
async def fleet_with(
    folder: Path,
    *shown: Quirk,
    spare: bool = False,
    quirks: Mapping[str, str] | None = None,
    answers: Mapping[str, str] | None = None,
) -> AsyncIterator[Site]:
    """Run one backend whose engine shows these quirks, and perhaps a spare one whose engine does not.

    `quirks` is what their configuration says.
    """
    fleet = simulated({"light-0": "h100-tp1-light"}, quirks=frozenset(shown))
    if spare:
        fleet |= simulated({"light-1": "h100-tp1-light"})
    classes = [{"class": "chat", "pools": ["light"]}]
    async with site(
        folder,
        fleet=fleet,
        backend={"quirks": quirks},
        answers=answers,
        pools={"light": list(fleet)},
        models={"gemma-4": {"classes": classes}},
    ) as running:
        yield running
        await running.eventually(running.idle)


@pytest.mark.parametrize("worked_around", [True, False])
async def test_a_tool_call_that_would_stand_in_the_text(tmp_path: Path, worked_around: bool) -> None:
    own = None if worked_around else {"remove": "tool_markup_leaks"}
    async with fleet_with(tmp_path, Quirk.TOOL_MARKUP_LEAKS, quirks=own) as fleet:
        answer = await fleet.openai().chat.completions.create(model="gemma-4", messages=ASK, tools=[WEATHER])

    choice: Any = answer.choices[0]
    assert answer.model == "gemma-4"
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 0
    if worked_around:
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        assert json.loads(choice.message.tool_calls[0].function.arguments) == {"city": "Paris"}
    else:
        assert "<|tool_call>" in choice.message.content


async def test_several_assembled_choices(tmp_path: Path) -> None:
    async with fleet_with(tmp_path) as fleet:
        answer = await fleet.openai().chat.completions.create(
            model="gemma-4", messages=ASK, tools=[WEATHER], tool_choice="none", n=3, max_tokens=30
        )
        streamed = await fleet.openai().chat.completions.create(
            model="gemma-4",
            messages=ASK,
            tools=[WEATHER],
            tool_choice="none",
            n=3,
            max_tokens=30,
            stream=True,
        )
        texts = ["", "", ""]
        async for chunk in streamed:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""

    assert [choice.message.content for choice in answer.choices] == texts
    assert all(texts)


@pytest.mark.parametrize(("effort", "thinks"), [(None, False), ("none", False), ("high", True)])
async def test_an_engine_that_thinks_unasked(tmp_path: Path, effort: Any, thinks: bool) -> None:
    options = {} if effort is None else {"reasoning_effort": effort}
    async with fleet_with(
        tmp_path, Quirk.THINKS_UNASKED, quirks={"add": "thinking_default_differs"}
    ) as fleet:
        answer = await fleet.openai().chat.completions.create(model="gemma-4", messages=ASK, **options)

    assert bool((answer.choices[0].message.model_extra or {})["reasoning"]) is thinks


@pytest.mark.parametrize("worked_around", [True, False])
async def test_a_marker_at_the_end_of_a_stream(tmp_path: Path, worked_around: bool) -> None:
    own = {"add": "turn_marker_leaks"} if worked_around else None
    async with fleet_with(tmp_path, Quirk.TURN_MARKER_LEAKS, quirks=own) as fleet:
        whole = await fleet.openai().chat.completions.create(model="gemma-4", messages=ASK)
        stream = await fleet.openai().chat.completions.create(
            model="gemma-4", messages=ASK, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]

    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert chunks[-1].usage is not None
    assert (text == whole.choices[0].message.content) is worked_around
    assert text.endswith("<turn|>") is not worked_around


@pytest.mark.parametrize(
    ("field", "names"),
    [
        ("as_sent", ["reasoning"]),
        ("reasoning_content", ["reasoning_content"]),
        ("both", ["reasoning", "reasoning_content"]),
    ],
)
async def test_a_thought_under_the_name_the_site_wants(tmp_path: Path, field: str, names: list[str]) -> None:
    async with fleet_with(tmp_path, answers={"reasoning_field": field}) as fleet:
        client = fleet.openai()
        asked: Any = {"model": "gemma-4", "messages": ASK, "reasoning_effort": "low", "max_tokens": 60}
        whole = await client.chat.completions.create(**asked)
        stream = await client.chat.completions.create(**asked, stream=True)
        deltas = [chunk.choices[0].delta.model_extra or {} async for chunk in stream]

    message = whole.choices[0].message.model_extra or {}
    assert sorted(name for name in message if name.startswith("reasoning")) == names
    for name in names:
        assert message[name]
        assert "".join(delta.get(name) or "" for delta in deltas) == message[name]
    assert {name for delta in deltas for name in delta if name.startswith("reasoning")} == set(names)


BAD_JSON = {"add": "streamed_tool_json_invalid"}


async def test_a_streamed_call_that_is_no_json_raises_at_its_end(tmp_path: Path) -> None:
    async with fleet_with(tmp_path, Quirk.INVALID_TOOL_JSON, quirks=BAD_JSON) as fleet:
        stream = await fleet.openai().chat.completions.create(
            model="gemma-4", messages=ASK, tools=[WEATHER], stream=True
        )
        finished: list[str] = []
        with pytest.raises(openai.APIError, match="not a JSON object"):
            async for chunk in stream:
                finished += [choice.finish_reason for choice in chunk.choices if choice.finish_reason]

    assert finished == []


async def test_a_whole_call_that_is_no_json_comes_from_elsewhere(tmp_path: Path) -> None:
    async with fleet_with(tmp_path, Quirk.INVALID_TOOL_JSON, spare=True, quirks=BAD_JSON) as fleet:
        raw = await fleet.openai().chat.completions.with_raw_response.create(
            model="gemma-4", messages=ASK, tools=[WEATHER]
        )

    call: Any = raw.parse().choices[0].message.tool_calls
    assert raw.headers["x-gateway-backend"] == "light-1"
    assert json.loads(call[0].function.arguments) == {"city": "Paris"}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_forced_call_comes_from_elsewhere(tmp_path: Path, choice: Any, stream: bool) -> None:
    async with fleet_with(tmp_path, Quirk.TOOL_CHOICE_IGNORED, spare=True) as fleet:
        raw = await fleet.openai().chat.completions.with_raw_response.create(
            model="gemma-4", messages=ASK, tools=[WEATHER], tool_choice=choice, stream=stream
        )
        answer: Any = raw.parse()
        if stream:
            deltas = [chunk.choices[0].delta async for chunk in answer]
            name = next(delta.tool_calls[0].function.name for delta in deltas if delta.tool_calls)
        else:
            name = answer.choices[0].message.tool_calls[0].function.name

    assert (raw.headers["x-gateway-backend"], name) == ("light-1", "get_weather")


async def test_a_forced_call_that_nobody_makes(tmp_path: Path) -> None:
    async with fleet_with(tmp_path, Quirk.TOOL_CHOICE_IGNORED) as fleet:
        with pytest.raises(openai.InternalServerError) as caught:
            await fleet.openai().chat.completions.create(
                model="gemma-4", messages=ASK, tools=[WEATHER], tool_choice="required", stream=True
            )

    assert (caught.value.status_code, caught.value.code) == (502, "tool_call_missing")


@pytest.mark.parametrize("worked_around", [True, False])
async def test_a_thought_that_runs_into_the_answer(tmp_path: Path, worked_around: bool) -> None:
    own = {"add": "null_reasoning_content"} if worked_around else None
    async with fleet_with(tmp_path, Quirk.NULL_REASONING, quirks=own) as fleet:
        client = fleet.openai()
        answer = await client.chat.completions.create(
            model="gemma-4", messages=ASK, reasoning_effort="low", max_tokens=2_000
        )
        stream = await client.chat.completions.create(
            model="gemma-4", messages=ASK, reasoning_effort="low", max_tokens=2_000, stream=True
        )
        deltas = [chunk.choices[0].delta async for chunk in stream]

    message = answer.choices[0].message
    thought = (message.model_extra or {})["reasoning"]
    assert bool(thought) is worked_around
    assert message.content
    assert "channel" not in f"{thought}{message.content}"
    assert "".join(delta.content or "" for delta in deltas) == message.content
    assert "".join((delta.model_extra or {}).get("reasoning") or "" for delta in deltas) == (thought or "")


@pytest.mark.parametrize("worked_around", [True, False])
async def test_markers_of_an_empty_thought(tmp_path: Path, worked_around: bool) -> None:
    own = None if worked_around else {"remove": "stale_chat_template"}
    async with fleet_with(tmp_path, Quirk.STALE_TEMPLATE, quirks=own) as fleet:
        answer = await fleet.openai().chat.completions.create(model="gemma-4", messages=ASK)
        stream = await fleet.openai().chat.completions.create(model="gemma-4", messages=ASK, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    assert text == answer.choices[0].message.content
    assert text.startswith("<|channel>") is not worked_around
