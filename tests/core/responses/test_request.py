"""A request's members: what each becomes in a chat, and which are refused."""

from typing import Any

import pytest

from gateway.core.errors import InvalidRequest
from gateway.core.responses.request import chat_param_here, needs, new_response, read, travels

TOKEN = "0123456789abcdef" * 2
HI = [{"role": "user", "content": "Hi"}]
F = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
G = {"type": "function", "name": "g"}
CHAT_F: dict[str, Any] = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object"}, "strict": True},
}
CHAT_G: dict[str, Any] = {"type": "function", "function": {"name": "g"}}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
CHAT_CALL = {"id": "c", "type": "function", "function": {"name": "mcp__f", "arguments": "{}"}}
SCHEMA = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}


def chat(**members: Any) -> dict[str, Any]:
    return dict(read({"model": "m", "input": "Hi", **members}, token=TOKEN).chat)


@pytest.mark.parametrize(
    ("members", "more"),
    [
        ({}, {}),
        ({"max_output_tokens": 7}, {"max_completion_tokens": 7}),
        ({"max_output_tokens": 16.0}, {"max_completion_tokens": 16}),
        ({"stream": True}, {"stream_options": {"include_usage": True}}),
        (
            {"stream": True, "stream_options": {"include_obfuscation": False}},
            {"stream_options": {"include_usage": True}},
        ),
        ({"reasoning": {"effort": "none"}}, {"reasoning_effort": "none"}),
        ({"reasoning": {"effort": "minimal"}}, {"reasoning_effort": "low"}),
        ({"reasoning": {"effort": "xhigh", "summary": "auto"}}, {"reasoning_effort": "high"}),
        ({"reasoning": {}}, {}),
        ({"text": {"format": {"type": "text"}, "verbosity": "low"}}, {}),
        ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
        (
            {"text": {"format": SCHEMA}},
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True},
                }
            },
        ),
        ({"tools": [F, G]}, {"tools": [CHAT_F, CHAT_G]}),
        (
            {"tools": [F, {"type": "namespace", "name": "mcp", "description": "d", "tools": [G]}]},
            {"tools": [CHAT_F, {**CHAT_G, "function": {**CHAT_G["function"], "name": "mcp__g"}}]},
        ),
        (
            {
                "tools": [{"type": "namespace", "name": "mcp", "description": "d", "tools": [F]}],
                "input": [
                    {"role": "user", "content": "Hi"},
                    {**CALL, "namespace": "mcp"},
                    {"type": "function_call_output", "call_id": "c", "output": "42"},
                ],
            },
            {
                "tools": [{**CHAT_F, "function": {**CHAT_F["function"], "name": "mcp__f"}}],
                "messages": [
                    *HI,
                    {"role": "assistant", "content": None, "tool_calls": [CHAT_CALL]},
                    {"role": "tool", "tool_call_id": "c", "name": "mcp__f", "content": "42"},
                ],
            },
        ),
        ({"tools": []}, {}),
        ({"tools": [], "tool_choice": "auto"}, {}),
        ({"tools": [F], "tool_choice": "none"}, {"tools": [CHAT_F], "tool_choice": "none"}),
        ({"tools": [F], "tool_choice": "required"}, {"tools": [CHAT_F], "tool_choice": "required"}),
        (
            {"tools": [F, G], "tool_choice": {"type": "function", "name": "g"}},
            {
                "tools": [CHAT_F, CHAT_G],
                "tool_choice": {"type": "function", "function": {"name": "g"}},
            },
        ),
        (
            {"tools": [F, G], "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [G]}},
            {"tools": [CHAT_G], "tool_choice": "required"},
        ),
        ({"include": ["reasoning.encrypted_content", "file_search_call.results"]}, {}),
        ({"truncation": "disabled", "conversation": None, "prompt": None, "top_logprobs": 0}, {}),
    ],
)
def test_members_become_those_of_a_chat(members: dict[str, Any], more: dict[str, Any]) -> None:
    assert chat(**members) == {"messages": HI, **more}


@pytest.mark.parametrize(
    ("members", "code", "param"),
    [
        ({"input": None}, "invalid_request", "input"),
        ({"input": 7}, "invalid_request", "input"),
        ({"input": []}, "invalid_request", "input"),
        ({"input": [{"type": "reasoning"}]}, "invalid_request", "input"),
        ({"instructions": ["x"]}, "invalid_request", "instructions"),
        ({"max_output_tokens": 0}, "invalid_request", "max_output_tokens"),
        ({"max_output_tokens": 1.5}, "invalid_request", "max_output_tokens"),
        ({"max_output_tokens": True}, "invalid_request", "max_output_tokens"),
        ({"max_tool_calls": "1"}, "invalid_request", "max_tool_calls"),
        ({"temperature": "hot"}, "invalid_request", "temperature"),
        ({"top_p": True}, "invalid_request", "top_p"),
        ({"stream": "yes"}, "invalid_request", "stream"),
        ({"store": 1}, "invalid_request", "store"),
        ({"parallel_tool_calls": "no"}, "invalid_request", "parallel_tool_calls"),
        ({"stream_options": True}, "invalid_request", "stream_options"),
        ({"user": 1}, "invalid_request", "user"),
        ({"safety_identifier": 1}, "invalid_request", "safety_identifier"),
        ({"prompt_cache_key": 1}, "invalid_request", "prompt_cache_key"),
        ({"metadata": []}, "invalid_request", "metadata"),
        ({"metadata": {"a": 1}}, "invalid_request", "metadata"),
        ({"metadata": {"a": "x" * 513}}, "invalid_request", "metadata"),
        ({"metadata": {"a" * 65: "x"}}, "invalid_request", "metadata"),
        ({"metadata": {str(n): "x" for n in range(17)}}, "invalid_request", "metadata"),
        ({"conversation": "conv_1"}, "unsupported_parameter", "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "unsupported_parameter", "prompt"),
        ({"context_management": [{"type": "compaction"}]}, "unsupported_parameter", "context_management"),
        ({"truncation": "auto"}, "unsupported_parameter", "truncation"),
        ({"max_tokens": 5}, "unsupported_parameter", "max_tokens"),
        ({"messages": []}, "unsupported_parameter", "messages"),
        ({"response_format": {"type": "json_object"}}, "unsupported_parameter", "response_format"),
        ({"text": {"type": "json_object"}}, "unsupported_parameter", "text.type"),
        ({"include": "x"}, "invalid_request", "include"),
        ({"include": ["message.output_text.logprobs"]}, "unsupported_parameter", "include"),
        ({"top_logprobs": 5}, "unsupported_parameter", "top_logprobs"),
        ({"reasoning": "high"}, "invalid_request", "reasoning"),
        ({"reasoning": {"effort": "very"}}, "invalid_request", "reasoning.effort"),
        ({"reasoning": {"effort": ["low"]}}, "invalid_request", "reasoning.effort"),
        ({"text": "json"}, "invalid_request", "text"),
        ({"text": {"format": "json"}}, "invalid_request", "text.format"),
        ({"text": {"format": {"type": "grammar"}}}, "invalid_request", "text.format.type"),
        ({"text": {"format": {**SCHEMA, "name": ""}}}, "invalid_request", "text.format.name"),
        ({"text": {"format": {**SCHEMA, "schema": 1}}}, "invalid_request", "text.format.schema"),
        ({"tools": {}}, "invalid_request", "tools"),
        ({"tools": ["f"]}, "invalid_request", "tools.0"),
        ({"tools": [F, {"type": "web_search"}]}, "unsupported_parameter", "tools.1.type"),
        ({"tools": [{"type": "custom", "name": "x"}]}, "unsupported_parameter", "tools.0.type"),
        ({"tools": [{"type": "function"}]}, "invalid_request", "tools.0.name"),
        ({"tools": [{"type": "function", "name": 1}]}, "invalid_request", "tools.0.name"),
        ({"tools": [{"type": "namespace", "tools": []}]}, "invalid_request", "tools.0.name"),
        ({"tools": [{"type": "namespace", "name": "n"}]}, "invalid_request", "tools.0.tools"),
        (
            {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "custom", "name": "x"}]}]},
            "unsupported_parameter",
            "tools.0.tools.0.type",
        ),
        (
            {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "namespace", "name": "m"}]}]},
            "unsupported_parameter",
            "tools.0.tools.0.type",
        ),
        (
            {"input": [{**CALL, "namespace": 7}]},
            "invalid_request",
            "input.0.namespace",
        ),
        ({"tools": [{**F, "parameters": 1}]}, "invalid_request", "tools.0.parameters"),
        ({"tools": [{**F, "strict": 1}]}, "invalid_request", "tools.0.strict"),
        ({"tool_choice": "required"}, "invalid_request", "tool_choice"),
        ({"tools": [F], "tool_choice": "f"}, "invalid_request", "tool_choice"),
        ({"tools": [F], "tool_choice": 7}, "invalid_request", "tool_choice"),
        ({"tools": [F], "tool_choice": {"type": "function", "name": "g"}}, "invalid_request", "tool_choice"),
        ({"tools": [F], "tool_choice": {"type": "function", "name": []}}, "invalid_request", "tool_choice"),
        ({"tools": [F], "tool_choice": {"type": "file_search"}}, "unsupported_parameter", "tool_choice.type"),
        (
            {"tools": [F], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [G]}},
            "invalid_request",
            "tool_choice.tools",
        ),
        (
            {"tools": [F], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}},
            "invalid_request",
            "tool_choice.tools",
        ),
        (
            {"tools": [F], "tool_choice": {"type": "allowed_tools", "mode": "auto"}},
            "invalid_request",
            "tool_choice.tools",
        ),
        (
            {"tools": [F], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": ["f"]}},
            "invalid_request",
            "tool_choice.tools",
        ),
        (
            {"tools": [F], "tool_choice": {"type": "allowed_tools", "mode": "x", "tools": [F]}},
            "invalid_request",
            "tool_choice.mode",
        ),
    ],
)
def test_what_cannot_be_is_named(members: dict[str, Any], code: str, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(**members)

    assert (caught.value.code, caught.value.param) == (code, param)


def test_instructions_stand_before_the_conversation_so_far() -> None:
    earlier = read({"input": "Hi"}, token=TOKEN).items
    asked = read({"input": "And?", "instructions": "Be brief."}, token=TOKEN, context=earlier)

    assert asked.chat["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "user", "content": "And?"},
    ]
    assert [item["content"][0]["text"] for item in asked.items] == ["And?"]
    assert asked.context == earlier


@pytest.mark.parametrize(
    ("name", "goes"),
    [
        ("model", True),
        ("temperature", True),
        ("stream", True),
        ("top_k", True),
        ("chat_template_kwargs", True),
        ("cache_salt", True),
        ("input", False),
        ("metadata", False),
        ("client_metadata", False),
        ("store", False),
        ("messages", False),
        ("n", False),
        ("max_tokens", False),
        ("response_format", False),
        ("service_tier", False),
    ],
)
def test_only_what_a_chat_means_alike_travels_as_it_is(name: str, goes: bool) -> None:
    assert travels(name) is goes


@pytest.mark.parametrize(
    ("param", "here"),
    [
        (None, None),
        ("model", "model"),
        ("tools.0.name", "tools.0.name"),
        ("messages", "input"),
        ("messages.3.content.0", "input"),
        ("max_completion_tokens", "max_output_tokens"),
        ("response_format", "text.format"),
    ],
)
def test_errors_name_the_members_of_this_api(param: str | None, here: str | None) -> None:
    assert chat_param_here(param) == here


def test_what_a_request_refers_to_is_known_before_it_is_read() -> None:
    reference = {"type": "item_reference", "id": "msg_1"}

    assert needs({"input": [reference], "previous_response_id": "resp_1"}, 5) == needs(
        {"previous_response_id": "resp_1", "input": [reference, {"role": "user"}]}, 5
    )
    assert needs({"input": "Hi, this is long"}, 5).previous is None  # a text is not many items
    with pytest.raises(InvalidRequest) as caught:
        needs({"input": [reference] * 6}, 5)
    assert caught.value.code == "too_many_items"
    with pytest.raises(InvalidRequest) as caught:
        needs({"input": "Hi", "previous_response_id": 1}, 5)
    assert caught.value.param == "previous_response_id"


def test_a_response_repeats_its_request_and_has_every_member() -> None:
    members = {
        "model": "m",
        "input": "Hi",
        "tools": [G],
        "metadata": {"a": "b"},
        "reasoning": {"effort": "max"},
        "parallel_tool_calls": False,
        "text": {"format": {"type": "json_object"}, "verbosity": "low"},
        "tool_choice": "required",
    }
    plain = new_response(read({"model": "m", "input": "Hi"}, token=TOKEN).echo, TOKEN, 1_795_244_911)
    asked = new_response(read({**members, "store": False}, token=TOKEN).echo, TOKEN, 1)

    assert plain == {
        "id": f"resp_{TOKEN}",
        "object": "response",
        "created_at": 1_795_244_911,
        "status": "in_progress",
        "background": False,
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "max_output_tokens": None,
        "max_tool_calls": None,
        "metadata": {},
        "model": "m",
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "prompt_cache_key": None,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": None,
        "service_tier": None,
        "store": True,
        "temperature": None,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": None,
        "truncation": "disabled",
        "usage": None,
        "user": None,
    }
    assert (asked["metadata"], asked["reasoning"]["effort"], asked["store"]) == ({"a": "b"}, "max", False)
    for name in ("parallel_tool_calls", "text", "tool_choice"):
        assert asked[name] == members[name]
    assert asked["tools"] == [
        {"type": "function", "name": "g", "description": None, "parameters": None, "strict": None}
    ]
