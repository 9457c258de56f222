"""Answers on the wire: bodies and events. Samples are vLLM 0.33's, shortened."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import pytest
from support import clients
from support.engine_wire import masked, post

from gateway.simulator import SimulatorOptions, simulator

Chat = Callable[..., dict[str, Any]]
Events = Callable[[str], list[Any]]


async def test_a_chat_answer_has_vllm_s_members_in_vllm_s_order(
    client: httpx.AsyncClient, chat: Chat
) -> None:
    answer = await post(client, chat(max_tokens=5))

    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["vary"] == "Origin"
    assert masked(answer.text) == (
        '{"id":"chatcmpl-ID","object":"chat.completion","created":0,"model":"gemma-4-31b-it","choices":'
        '[{"index":0,"message":{"role":"assistant","content":"Think of it as a","refusal":null,'
        '"annotations":null,"audio":null,"function_call":null,"reasoning":null},"logprobs":null,'
        '"finish_reason":"length","stop_reason":null,"token_ids":null,"routed_experts":null,'
        '"weight_versions":null}],'
        '"service_tier":null,"system_fingerprint":"FP","usage":{"prompt_tokens":17,"total_tokens":22,'
        '"completion_tokens":5,"prompt_tokens_details":null,"completion_tokens_details":'
        '{"reasoning_tokens":0}},"prompt_logprobs":null,"prompt_token_ids":null,"prompt_text":null,'
        '"kv_transfer_params":null,"ec_transfer_params":null,"metrics":null}'
    )


async def test_a_completion_has_vllm_s_members_in_vllm_s_order(client: httpx.AsyncClient) -> None:
    answer = await post(client, {"prompt": "Name a river.", "max_tokens": 5}, "/v1/completions")

    assert masked(answer.text) == (
        '{"id":"cmpl-ID","object":"text_completion","created":0,"model":"gemma-4-31b-it","choices":'
        '[{"index":0,"text":"Let me walk through it","logprobs":null,"finish_reason":"length",'
        '"stop_reason":null,"token_ids":null,"prompt_logprobs":null,"prompt_token_ids":null,'
        '"routed_experts":null,"weight_versions":null}],"service_tier":null,"system_fingerprint":"FP","usage":{"prompt_tokens":5,'
        '"total_tokens":10,"completion_tokens":5,"prompt_tokens_details":null,'
        '"completion_tokens_details":null},"kv_transfer_params":null,"ec_transfer_params":null,'
        '"metrics":null}'
    )


async def test_a_stream_opens_with_the_role_and_closes_with_fingerprint_and_done(
    client: httpx.AsyncClient, chat: Chat
) -> None:
    answer = await post(client, chat(max_tokens=1, stream=True))

    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    head = (
        'data: {"id":"chatcmpl-ID","object":"chat.completion.chunk","created":0,"model":"gemma-4-31b-it",'
        '"choices":[{"index":0,"delta":'
    )
    assert masked(answer.text) == (
        f'{head}{{"role":"assistant","content":""}},"logprobs":null,"finish_reason":null}}],'
        '"prompt_token_ids":null,"prompt_text":null}\n\n'
        f'{head}{{"content":"Think"}},"logprobs":null,"finish_reason":"length","stop_reason":null,'
        '"token_ids":null,"weight_versions":null}],"system_fingerprint":"FP","kv_transfer_params":null}\n\n'
        "data: [DONE]\n\n"
    )


async def test_the_usage_event_takes_the_fingerprint(
    client: httpx.AsyncClient, chat: Chat, events: Events
) -> None:
    body = chat(max_tokens=5, stream=True, stream_options={"include_usage": True})
    found = events((await post(client, body)).text)

    assert [list(event)[4:] for event in found[:-1]] == [
        ["choices", "prompt_token_ids", "prompt_text"],
        *[["choices", "kv_transfer_params"]] * (len(found) - 3),
        ["choices", "usage", "system_fingerprint"],
    ]
    assert found[-2]["choices"] == []
    assert found[-2]["usage"] == {
        "prompt_tokens": 17,
        "total_tokens": 22,
        "completion_tokens": 5,
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


async def test_continuous_usage_counts_up_in_every_event(
    client: httpx.AsyncClient, chat: Chat, events: Events
) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    found = events((await post(client, chat(max_tokens=9, stream=True, stream_options=options))).text)
    counts = [event["usage"]["completion_tokens"] for event in found[:-1]]

    assert counts[0] == 0
    assert counts[-1] == counts[-2] == 9
    assert counts == sorted(counts)


async def test_a_completion_stream_has_no_role_event(client: httpx.AsyncClient, events: Events) -> None:
    body = {"prompt": [2, 818, 8178], "max_tokens": 6, "stream": True, "return_token_ids": True}
    found = events((await post(client, body, "/v1/completions")).text)
    choices = [event["choices"][0] for event in found[:-1]]

    assert list(choices[0]) == [
        "index", "text", "logprobs", "finish_reason", "stop_reason", "prompt_token_ids", "token_ids",
        "weight_versions",
    ]  # fmt: skip
    assert [choice["prompt_token_ids"] for choice in choices] == [[2, 818, 8178]] + [None] * (
        len(choices) - 1
    )
    assert sum(len(choice["token_ids"]) for choice in choices) == 6
    assert found[-2]["system_fingerprint"]


async def test_streamed_and_whole_answers_to_the_same_question_are_the_same(
    client: httpx.AsyncClient, chat: Chat, events: Events
) -> None:
    body = chat(chat_template_kwargs={"enable_thinking": True})
    whole = (await post(client, body)).json()
    streamed = events((await post(client, {**body, "stream": True})).text)
    deltas = [event["choices"][0]["delta"] for event in streamed[:-1]]

    message = whole["choices"][0]["message"]
    assert "".join(delta.get("content") or "" for delta in deltas) == message["content"]
    assert "".join(delta.get("reasoning") or "" for delta in deltas) == message["reasoning"]
    assert streamed[-2]["choices"][0]["finish_reason"] == "stop"
    last_thought = max(index for index, delta in enumerate(deltas) if "reasoning" in delta)
    assert not any(delta.get("content") for delta in deltas[:last_thought])


@pytest.mark.parametrize(
    ("members", "thinks"),
    [
        ({}, False),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "low"}, True),
        ({"chat_template_kwargs": {"enable_thinking": True}}, True),
        ({"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "high"}, False),
    ],
    ids=["plain", "effort-none", "effort-low", "template", "template-wins"],
)
async def test_thinking_is_asked_for_in_two_ways(
    client: httpx.AsyncClient, chat: Chat, members: dict[str, Any], thinks: bool
) -> None:
    answer = (await post(client, chat(**members))).json()

    assert bool(answer["choices"][0]["message"]["reasoning"]) is thinks
    assert (answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0) is thinks


async def test_a_thought_can_be_cut_or_hidden(client: httpx.AsyncClient, chat: Chat) -> None:
    cut = (await post(client, chat(max_tokens=6, reasoning_effort="low"))).json()
    hidden = (await post(client, chat(reasoning_effort="low", include_reasoning=False))).json()

    assert cut["choices"][0]["message"]["content"] is None
    assert cut["usage"]["completion_tokens_details"] == {"reasoning_tokens": 5}
    assert hidden["choices"][0]["message"]["reasoning"] is None
    assert hidden["usage"]["completion_tokens_details"]["reasoning_tokens"] > 5


async def test_choices_of_one_request_interleave(
    client: httpx.AsyncClient, chat: Chat, events: Events
) -> None:
    found = events((await post(client, chat(max_tokens=6, n=2, stream=True))).text)[:-1]
    indexes = [event["choices"][0]["index"] for event in found]
    texts = [
        "".join(e["choices"][0]["delta"].get("content", "") for e in found if i == e["choices"][0]["index"])
        for i in (0, 1)
    ]

    assert indexes[:2] == [0, 1]
    assert [event["choices"][0]["delta"].get("role") for event in found[:3]] == [
        "assistant",
        "assistant",
        None,
    ]
    assert texts[0] != texts[1]
    assert ["system_fingerprint" in event for event in found] == [False] * (len(found) - 1) + [True]


async def test_several_prompts_and_choices_of_a_completion(client: httpx.AsyncClient) -> None:
    body = {"prompt": ["one", "two three"], "n": 2, "max_tokens": 3}
    answer = (await post(client, body, "/v1/completions")).json()

    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert answer["usage"]["prompt_tokens"] == 2 + 3
    assert answer["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize(("everywhere", "asked"), [(1, {"stream_interval": 10}), (10, {})])
async def test_stream_interval_merges_tokens(
    options: SimulatorOptions, chat: Chat, events: Events, everywhere: int, asked: dict[str, int]
) -> None:
    async with (
        simulator(replace(options, stream_interval=everywhere)) as server,
        clients.http(base_url=server.url) as client,
    ):
        found = events((await post(client, chat(max_tokens=40, stream=True, **asked))).text)

    assert len(found) <= 1 + 1 + 4 + 1


async def test_a_stop_string_ends_the_answer(client: httpx.AsyncClient, chat: Chat) -> None:
    answer = (await post(client, chat(stop=["rather"]))).json()["choices"][0]

    assert answer["message"]["content"] == "Think of it as a place "
    assert (answer["finish_reason"], answer["stop_reason"]) == ("stop", "rather")


async def test_token_ids_are_returned_on_request(
    client: httpx.AsyncClient, chat: Chat, events: Events
) -> None:
    body = chat(max_tokens=12, return_token_ids=True, return_prompt_text=True)
    whole = (await post(client, body)).json()
    found = events((await post(client, {**body, "stream": True})).text)[:-1]

    assert len(whole["prompt_token_ids"]) == whole["usage"]["prompt_tokens"]
    assert whole["prompt_text"].startswith("<bos><|turn>user\nName a river.")
    assert found[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    streamed = [number for event in found for number in event["choices"][0].get("token_ids") or ()]
    assert streamed == whole["choices"][0]["token_ids"]
    assert len(streamed) == 12


async def test_json_comes_when_json_is_asked_for(client: httpx.AsyncClient, chat: Chat) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = (await post(client, chat(response_format=wanted))).json()
    free = (await post(client, chat(response_format={"type": "json_object"}))).json()

    assert json.loads(answer["choices"][0]["message"]["content"]) == {"a": 3}
    assert isinstance(json.loads(free["choices"][0]["message"]["content"]), dict)


@pytest.mark.parametrize(
    ("headers", "body", "id"),
    [
        ({"X-Request-Id": "gw-1"}, {}, "chatcmpl-gw-1"),
        ({}, {"request_id": "body-1"}, "chatcmpl-body-1"),
        ({"X-Request-Id": "gw-1"}, {"request_id": "body-1"}, "chatcmpl-gw-1"),
    ],
    ids=["header", "body", "both"],
)
async def test_the_caller_s_id_is_part_of_the_answer_s(
    client: httpx.AsyncClient, chat: Chat, headers: dict[str, str], body: dict[str, Any], id: str
) -> None:
    answer = await client.post("/v1/chat/completions", json=chat(max_tokens=1, **body), headers=headers)

    assert answer.json()["id"] == id
    assert "x-request-id" not in answer.headers


async def test_max_completion_tokens_wins(client: httpx.AsyncClient, chat: Chat) -> None:
    answer = (await post(client, chat(max_tokens=3, max_completion_tokens=5))).json()

    assert answer["usage"]["completion_tokens"] == 5


async def test_a_limit_that_does_not_fit_beside_the_prompt_is_cut_in_silence(
    client: httpx.AsyncClient, chat: Chat
) -> None:
    answer = await post(client, chat("river " * 2_000, max_tokens=3_000, ignore_eos=True))

    assert answer.status_code == 200
    assert answer.json()["usage"]["total_tokens"] == 4_096
    assert answer.json()["choices"][0]["finish_reason"] == "length"


async def test_a_prompt_can_be_truncated(client: httpx.AsyncClient, chat: Chat) -> None:
    answer = await post(client, chat("river " * 9_000, max_tokens=3, truncate_prompt_tokens=100))

    assert answer.json()["usage"]["prompt_tokens"] == 100
