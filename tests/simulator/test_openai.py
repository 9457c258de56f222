"""The simulated server through the official client: what an application's SDK makes of it."""

from collections.abc import AsyncIterator
from dataclasses import replace

import openai
import pytest
from support import clients

from gateway.simulator import Fault, FaultOrder, Simulator, SimulatorOptions, simulator

MODEL = "gemma-4-31b-it"


@pytest.fixture
async def server(options: SimulatorOptions) -> AsyncIterator[Simulator]:
    async with simulator(replace(options, api_key="secret")) as running:
        yield running


@pytest.fixture
async def sdk(server: Simulator) -> AsyncIterator[openai.AsyncOpenAI]:
    async with clients.sdk(
        base_url=f"{server.url}/v1", api_key="secret", max_retries=0, timeout=10
    ) as client:
        yield client


async def test_an_answer(sdk: openai.AsyncOpenAI) -> None:
    answer = await sdk.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Name a river."}], max_completion_tokens=20
    )

    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None and answer.usage.completion_tokens == 20


async def test_a_stream(sdk: openai.AsyncOpenAI) -> None:
    stream = await sdk.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Name a river."}],
        stream=True,
        stream_options={"include_usage": True},
    )
    text = ""
    async for chunk in stream:
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage = chunk.usage

    assert text.endswith(".")
    assert usage is not None and usage.completion_tokens > 20


async def test_a_tool_call(sdk: openai.AsyncOpenAI) -> None:
    async with sdk.chat.completions.stream(
        model=MODEL,
        messages=[{"role": "user", "content": "Use get_weather, please."}],
        tools=[
            {
                "type": "function",
                "function": {
                    "name": "get_weather",
                    "strict": True,
                    "parameters": {
                        "type": "object",
                        "properties": {"city": {"type": "string"}},
                        "required": ["city"],
                        "additionalProperties": False,
                    },
                },
            }
        ],
    ) as stream:
        answer = await stream.get_final_completion()

    assert answer.choices[0].finish_reason == "tool_calls"
    calls = answer.choices[0].message.tool_calls
    assert calls is not None
    assert (calls[0].function.name, calls[0].function.parsed_arguments) == ("get_weather", {"city": "Paris"})


async def test_reasoning(sdk: openai.AsyncOpenAI) -> None:
    answer = await sdk.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Why?"}], reasoning_effort="high"
    )
    extra = answer.choices[0].message.model_extra
    assert extra is not None and extra["reasoning"]
    assert answer.usage is not None
    details = answer.usage.completion_tokens_details
    assert details is not None and details.reasoning_tokens


async def test_a_completion(sdk: openai.AsyncOpenAI) -> None:
    answer = await sdk.completions.create(model=MODEL, prompt="Once", max_tokens=7)

    assert answer.choices[0].text


async def test_models(sdk: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in sdk.models.list()] == [MODEL]


async def test_errors_are_raised(sdk: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length is 4096"):
        await sdk.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "river " * 5_000}], stream=True
        )
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        await sdk.chat.completions.create(model="gpt-5", messages=[{"role": "user", "content": "hi"}])
    with pytest.raises(openai.AuthenticationError):
        await sdk.with_options(api_key="wrong").models.list()


async def test_a_crash_raises_from_the_stream(server: Simulator, sdk: openai.AsyncOpenAI) -> None:
    stream = await sdk.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Tell me everything."}],
        stream=True,
        max_tokens=3_000,
        extra_body={"ignore_eos": True},
    )
    with pytest.raises(openai.APIError, match="The server had an error"):
        async for _ in stream:
            if server.faults.order is None:
                server.order(FaultOrder(Fault.CRASH, for_s=1_000))
