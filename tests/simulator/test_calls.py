"""Requests: what is refused and how, when tools are called, which quirks show."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest
from support import clients
from support.engine_wire import IMAGE, WEATHER, masked, post

from gateway.core.backends import Modalities
from gateway.simulator import Quirk, SimulatorOptions, simulator

Chat = Callable[..., dict[str, Any]]
Events = Callable[[str], list[Any]]


# ------------------------------------------------------------------ tools


@pytest.mark.parametrize(
    "members",
    [
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "get_weather"}}},
        {"text": "Please use GET_WEATHER for Paris."},
    ],
    ids=["required", "named", "asked-for-in-words"],
)
async def test_a_tool_is_called(
    client: httpx.AsyncClient, chat: Chat, events: Events, members: dict[str, Any]
) -> None:
    body = chat(members.pop("text", "Name a river."), tools=[WEATHER], **members)
    whole = (await post(client, body)).json()["choices"][0]
    found = events(masked((await post(client, {**body, "stream": True})).text))
    choices = [event["choices"][0] for event in found[:-1]]

    assert list(whole["message"])[-2:] == ["tool_calls", "reasoning"]
    assert whole["message"]["content"] is None
    assert whole["message"]["tool_calls"][0]["function"] == {
        "name": "get_weather",
        "arguments": '{"city": "Paris"}',
    }
    assert (whole["finish_reason"], whole["stop_reason"]) == ("tool_calls", 50)
    assert [choice["delta"] for choice in choices[1:]] == [
        {
            "tool_calls": [
                {
                    "id": "chatcmpl-tool-ID",
                    "type": "function",
                    "index": 0,
                    "function": {"name": "get_weather"},
                }
            ]
        },
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"city": "Paris"}'}}]},
        {},
    ]
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("tool_calls", 50)


@pytest.mark.parametrize(
    "members",
    [{}, {"tool_choice": "none", "text": "get_weather"}, {"text": "get_weather", "then": "tool"}],
    ids=["not-asked-for", "forbidden", "its-result-is-there"],
)
async def test_a_tool_is_not_called(client: httpx.AsyncClient, chat: Chat, members: dict[str, Any]) -> None:
    then = members.pop("then", None)
    body = chat(members.pop("text", "Name a river."), tools=[WEATHER], **members)
    if then:
        body["messages"] += [{"role": "tool", "tool_call_id": "1", "content": "get_weather: sunny"}]
    message = (await post(client, body)).json()["choices"][0]["message"]

    assert "tool_calls" not in message
    assert message["content"]


TIME = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("text", "members", "expected"),
    [
        ("Use get_time and get_weather.", {}, ["get_weather", "get_time"]),
        ("Use get_time and get_weather.", {"parallel_tool_calls": True}, ["get_weather", "get_time"]),
        ("Use get_time and get_weather.", {"parallel_tool_calls": False}, ["get_weather"]),
        ("Use get_time and get_weather.", {"tool_choice": "required"}, ["get_weather"]),
        ("Use get_time, not get_weather_forecast.", {}, ["get_time"]),
    ],
)
async def test_every_tool_that_the_user_names_is_called(
    client: httpx.AsyncClient,
    chat: Chat,
    events: Events,
    text: str,
    members: dict[str, Any],
    expected: list[str],
) -> None:
    body = chat(text, tools=[WEATHER, TIME], **members)
    calls = (await post(client, body)).json()["choices"][0]["message"]["tool_calls"]
    found = events((await post(client, {**body, "stream": True})).text)
    deltas = [choice["delta"] for event in found[:-1] for choice in event["choices"]]
    parts = [part for delta in deltas for part in delta.get("tool_calls", ())]

    assert [call["function"]["name"] for call in calls] == expected
    assert len({call["id"] for call in calls}) == len(expected)
    assert [part["index"] for part in parts] == [at for at in range(len(expected)) for _ in range(2)]
    assert [part["function"]["name"] for part in parts[::2]] == expected


def _called(*names: str) -> list[dict[str, Any]]:
    """Return the messages of a step in which these tools were called, and answered."""
    functions = [{"name": name, "arguments": "{}"} for name in names]
    calls = [{"id": one["name"], "type": "function", "function": one} for one in functions]
    results = [{"role": "tool", "tool_call_id": name, "content": "Done."} for name in names]
    return [{"role": "assistant", "content": None, "tool_calls": calls}, *results]


@pytest.mark.parametrize(
    ("choice", "then", "expected"),
    [
        pytest.param("required", [], ["get_weather"], id="first"),
        pytest.param("required", _called("get_weather"), ["final_answer"], id="then-the-next"),
        pytest.param(
            "required", [*_called("get_weather"), *_called("final_answer")], ["final_answer"], id="last-again"
        ),
        pytest.param(
            "required",
            [
                *_called("get_weather"),
                {"role": "assistant", "content": "Sun."},
                {"role": "user", "content": "?"},
            ],
            ["get_weather"],
            id="a-new-turn",
        ),
        pytest.param(
            "auto",
            [*_called("get_weather"), {"role": "user", "content": "What get_weather saw."}],
            [],
            id="asked-for-in-words-but-done",
        ),
    ],
)
async def test_a_turn_goes_on_to_another_tool(
    client: httpx.AsyncClient, chat: Chat, choice: str, then: list[dict[str, Any]], expected: list[str]
) -> None:
    final = {"type": "function", "function": {"name": "final_answer", "parameters": {"type": "object"}}}
    body = chat("Name a river.", tools=[WEATHER, final], tool_choice=choice)
    body["messages"] += then
    message = (await post(client, body)).json()["choices"][0]["message"]

    assert [call["function"]["name"] for call in message.get("tool_calls", ())] == expected


# ------------------------------------------------------------------ refusals

LONG = "river stone " * 3_000
VALIDATION = "1 validation error:\n  "
OVERLONG = (
    "This model's maximum context length is 4096 tokens. However, your prompt contains at least 4097 input "
    "tokens, which exceeds this limit even without any output tokens. Please reduce the length of the input "
    "prompt. (parameter=input_tokens, value=4097)"
)
OVERLONG_TEXT = (
    "This model's maximum context length is 4096 tokens. However, your prompt contains 240065 characters "
    "(more than 126976 characters, which is the upper bound for 4096 input tokens). Please reduce the length "
    "of the input prompt. (parameter=input_text, value=240065)"
)
TOO_MANY = (
    "max_tokens=100000 cannot be greater than max_model_len=4096. Please request fewer output tokens. "
    "(parameter=max_tokens, value=100000)"
)

REFUSALS = [
    pytest.param({"text": LONG}, 400, OVERLONG, "input_tokens", id="over-long"),
    pytest.param(
        {"text": "river stone " * 20_000}, 400, OVERLONG_TEXT, "input_text", id="over-long-by-characters"
    ),
    pytest.param({"max_tokens": 100_000}, 400, TOO_MANY, "max_tokens", id="max-tokens-too-large"),
    pytest.param(
        {"max_tokens": 0}, 400, "max_tokens must be at least 1, got 0. (parameter=max_tokens, value=0)",
        "max_tokens", id="max-tokens-zero",
    ),
    pytest.param(
        {"max_tokens": -1}, 400, "max_tokens must be at least 1, got -1. (parameter=max_tokens, value=-1)",
        "max_tokens", id="max-tokens-negative",
    ),
    pytest.param(
        {"temperature": -1}, 400,
        "temperature must be non-negative, got -1.0. (parameter=temperature, value=-1.0)",
        "temperature", id="temperature-negative",
    ),
    pytest.param(
        {"top_p": 0}, 400, "top_p must be in (0, 1], got 0.0. (parameter=top_p, value=0.0)", "top_p",
        id="top-p-zero",
    ),
    pytest.param({"n": 0}, 400, "n must be at least 1, got 0.", None, id="n-zero"),
    pytest.param(
        {"logprobs": True, "top_logprobs": 50}, 400,
        "Requested sample logprobs of 50, which is greater than max allowed: 20 "
        "(parameter=logprobs, value=50)", "logprobs", id="logprobs",
    ),
    pytest.param({"text": IMAGE}, 400, "gemma-4-31b-it is not a multimodal model", None, id="image"),
    pytest.param(
        {"model": "gpt-5"}, 404, "The model `gpt-5` does not exist. Valid aliases: gemma-4-31b-it.", "model",
        id="unknown-model",
    ),
    pytest.param(
        {"messages": []}, 400,
        "Cannot apply chat template to an empty conversation. Provide at least one message.", None,
        id="no-messages",
    ),
    pytest.param(
        {"chat_template": "{{ x }}"}, 400,
        "Chat template is passed with request, but --trust-request-chat-template is not set. Refused request "
        "with untrusted chat template.", None, id="chat-template",
    ),
    pytest.param(
        {"response_format": {"type": "json_schema"}}, 400,
        "When response_format type is 'json_schema', the 'json_schema' field must be provided. "
        "(parameter=response_format)", "response_format", id="no-schema",
    ),
    pytest.param(
        {"messages": "hello"}, 400,
        VALIDATION + "{'type': 'list_type', 'loc': 'body.messages', 'msg': 'Input should be a valid list', "
        "'input': 'hello'}", "body.messages", id="messages-is-a-string",
    ),
    pytest.param(
        {"temperature": "hot"}, 400,
        VALIDATION + "{'type': 'float_parsing', 'loc': 'body.temperature', 'msg': 'Input should be a valid "
        "number, unable to parse string as a number', 'input': 'hot'}", "body.temperature",
        id="temperature-is-a-word",
    ),
    pytest.param(
        {"chat_template_kwargs": [1]}, 400,
        VALIDATION + "{'type': 'dict_type', 'loc': 'body.chat_template_kwargs', 'msg': 'Input should be a "
        "valid dictionary', 'input': '<list of 1 items>'}", "body.chat_template_kwargs",
        id="kwargs-is-a-list",
    ),
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("members", "status", "message", "param"), REFUSALS)
async def test_refusals_before_generation_have_a_status_of_their_own(
    client: httpx.AsyncClient,
    chat: Chat,
    members: dict[str, Any],
    status: int,
    message: str,
    param: str | None,
    stream: bool,
) -> None:
    members = dict(members)
    answer = await post(client, {**chat(members.pop("text", "hi")), **members, "stream": stream})
    kind = {404: "NotFoundError"}.get(
        status, "Bad Request" if message.startswith(VALIDATION) else "BadRequestError"
    )

    assert answer.status_code == status
    assert answer.json() == {"error": {"message": message, "type": kind, "param": param, "code": status}}


async def test_stream_options_need_a_stream(client: httpx.AsyncClient, chat: Chat) -> None:
    answer = await post(client, chat(stream_options={"include_usage": True}))

    assert answer.json()["error"]["message"] == (
        "Stream options can only be defined when `stream=True`. (parameter=stream_options)"
    )


async def test_absent_messages_are_counted_in_the_refusal(client: httpx.AsyncClient) -> None:
    answer = await post(client, {"model": "gemma-4-31b-it", "max_tokens": 12, "temperature": 0})

    assert answer.json()["error"]["message"] == (
        VALIDATION + "{'type': 'missing', 'loc': 'body.messages', 'msg': 'Field required', "
        "'input': '<dict of 3 items>'}"
    )


BODIES = [
    pytest.param(
        b'{"model": "x", "messages": [',
        {
            "error": {
                "message": VALIDATION
                + "{'type': 'json_invalid', 'loc': 'body.28', 'msg': 'JSON decode error', "
                "'input': '<dict of 0 items>', 'ctx': {'error': 'Expecting value'}}",
                "type": "Bad Request",
                "param": "body.28",
                "code": 400,
            }
        },
        id="malformed",
    ),
    pytest.param(b'{"a":"\xff\xfe"}', {"detail": "There was an error parsing the body"}, id="invalid-utf-8"),
    pytest.param(b"[" * 100_000, {"detail": "There was an error parsing the body"}, id="nested-too-deep"),
    pytest.param(
        b"",
        {
            "error": {
                "message": VALIDATION
                + "{'type': 'missing', 'loc': 'body', 'msg': 'Field required', 'input': 'None'}",
                "type": "Bad Request",
                "param": "body",
                "code": 400,
            }
        },
        id="empty",
    ),
    pytest.param(
        b"[1, 2]",
        {
            "error": {
                "message": VALIDATION
                + "{'type': 'model_attributes_type', 'loc': 'body', 'msg': 'Input should be "
                "a valid dictionary or object to extract fields from', 'input': '<list of 2 items>'}",
                "type": "Bad Request",
                "param": "body",
                "code": 400,
            }
        },
        id="array",
    ),
]


@pytest.mark.parametrize(("content", "refusal"), BODIES)
async def test_bodies_that_cannot_be_read(
    client: httpx.AsyncClient, content: bytes, refusal: dict[str, Any]
) -> None:
    headers = {"content-type": "application/json"}
    answer = await client.post("/v1/chat/completions", content=content, headers=headers)

    assert (answer.status_code, answer.json()) == (400, refusal)


async def test_a_body_must_be_declared_to_be_json(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/chat/completions", content=b"{}", headers={"content-type": "text/plain"})

    assert (
        answer.json()["error"]["message"]
        == VALIDATION + "Unsupported Media Type: Only 'application/json' is allowed"
    )


@pytest.mark.parametrize(
    ("method", "path", "status", "body", "allow"),
    [
        ("GET", "/nope", 404, '{"detail":"Not Found"}', None),
        ("GET", "/v1/chat/completions", 405, '{"detail":"Method Not Allowed"}', "POST"),
        ("HEAD", "/health", 405, "", "GET"),
    ],
    ids=["no-such-path", "wrong-method", "head-of-health"],
)
async def test_the_framework_s_own_refusals(
    client: httpx.AsyncClient, method: str, path: str, status: int, body: str, allow: str | None
) -> None:
    answer = await client.request(method, path)

    assert (answer.status_code, answer.text, answer.headers.get("allow")) == (status, body, allow)


@pytest.mark.parametrize(
    ("path", "header", "status"),
    [
        ("/v1/models", None, 401),
        ("/v1/models", "Bearer nope", 401),
        ("/v1/models", "Bearer secret", 200),
        ("/health", None, 200),
        ("/metrics", None, 200),
        ("/version", None, 200),
    ],
)
async def test_only_v1_asks_for_the_key(
    options: SimulatorOptions, path: str, header: str | None, status: int
) -> None:
    async with (
        simulator(replace(options, api_key="secret")) as server,
        clients.http(base_url=server.url) as client,
    ):
        answer = await client.get(path, headers={"authorization": header} if header else {})

    assert answer.status_code == status
    if status == 401:
        assert answer.text == '{"error":"Unauthorized"}'
        assert "vary" not in answer.headers


async def test_images_are_counted_where_they_are_taken(options: SimulatorOptions, chat: Chat) -> None:
    some = replace(options.profile, modalities=Modalities(images_max=1, audios_max=0))
    async with (
        simulator(replace(options, profile=some)) as server,
        clients.http(base_url=server.url) as client,
    ):
        taken = await post(client, chat(IMAGE, max_tokens=1))
        many = await post(client, chat(IMAGE * 2, max_tokens=1))

    assert taken.json()["usage"]["prompt_tokens"] == 13 + 3 + 282
    assert many.json()["error"]["message"] == "At most 1 image(s) may be provided in one prompt."


# ------------------------------------------------------------------ quirks


async def answer_with(options: SimulatorOptions, quirk: Quirk, body: dict[str, Any]) -> str:
    async with (
        simulator(replace(options, quirks=frozenset({quirk}))) as server,
        clients.http(base_url=server.url) as client,
    ):
        return (await post(client, body)).text


async def test_quirk_null_reasoning(options: SimulatorOptions, chat: Chat) -> None:
    answer = json.loads(await answer_with(options, Quirk.NULL_REASONING, chat(reasoning_effort="low")))

    assert answer["choices"][0]["message"]["reasoning"] is None
    assert len(answer["choices"][0]["message"]["content"]) > 1_000


async def test_quirk_null_reasoning_with_its_markers(options: SimulatorOptions, chat: Chat) -> None:
    body = chat(reasoning_effort="low", skip_special_tokens=False)
    message = json.loads(await answer_with(options, Quirk.NULL_REASONING, body))["choices"][0]["message"]

    assert message["reasoning"] is None
    assert message["content"].startswith("<|channel>thought\n")
    assert message["content"].count("<channel|>") == 1


@pytest.mark.parametrize(
    ("said", "thinks"),
    [
        ({}, True),
        ({"reasoning_effort": "none"}, False),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
    ],
)
async def test_quirk_it_thinks_unasked(
    options: SimulatorOptions, chat: Chat, said: dict[str, Any], thinks: bool
) -> None:
    answer = json.loads(await answer_with(options, Quirk.THINKS_UNASKED, chat(**said)))

    assert bool(answer["choices"][0]["message"]["reasoning"]) is thinks


async def test_quirk_channel_markers_lead_the_content(options: SimulatorOptions, chat: Chat) -> None:
    answer = json.loads(await answer_with(options, Quirk.STALE_TEMPLATE, chat()))

    assert answer["choices"][0]["message"]["content"].startswith("<|channel>thought\n<channel|>")


async def test_quirk_turn_marker_ends_a_stream(options: SimulatorOptions, chat: Chat, events: Events) -> None:
    found = events(await answer_with(options, Quirk.TURN_MARKER_LEAKS, chat(stream=True)))

    assert found[-2]["choices"][0]["delta"]["content"].endswith("<turn|>")


async def test_quirk_required_tool_is_not_called(options: SimulatorOptions, chat: Chat) -> None:
    body = chat(tools=[WEATHER], tool_choice="required")
    answer = json.loads(await answer_with(options, Quirk.TOOL_CHOICE_IGNORED, body))

    assert "tool_calls" not in answer["choices"][0]["message"]


async def test_quirk_streamed_arguments_are_broken(options: SimulatorOptions, chat: Chat) -> None:
    body = chat(tools=[WEATHER], tool_choice="required", stream=True)

    assert '"arguments":"{\\"city\\": \\"Paris\\""}' in await answer_with(
        options, Quirk.INVALID_TOOL_JSON, body
    )


async def test_quirk_tool_markup_stands_in_the_text(options: SimulatorOptions, chat: Chat) -> None:
    body = chat(tools=[WEATHER], tool_choice="required")
    answer = json.loads(await answer_with(options, Quirk.TOOL_MARKUP_LEAKS, body))["choices"][0]

    assert answer["message"]["content"] == '<|tool_call>call:get_weather{"city": "Paris"}<tool_call|>'
    assert answer["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "x", "stop": 3}),
        ("/v1/completions", {"prompt": "x", "stop": True}),
        ("/v1/completions", {"prompt": [[]]}),
        ("/v1/completions", {"prompt": "x", "temperature": 10**400}),
        ("/v1/chat/completions", {"messages": [{"role": "assistant", "tool_calls": [3]}]}),
        ("/v1/chat/completions", {"messages": [{"role": "assistant", "tool_calls": [{"function": 3}]}]}),
    ],
    ids=["stop-number", "stop-flag", "no-token", "huge", "call-number", "function-number"],
)
async def test_what_has_another_type_than_vllms_is_refused_as_by_vllm(
    client: httpx.AsyncClient, path: str, fields: dict[str, Any]
) -> None:
    answer = await client.post(path, json=fields)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, 400)
