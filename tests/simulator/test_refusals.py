"""What vLLM refuses for its shape or value, and its words for it: captured from vLLM 0.33.0."""

from collections.abc import Callable
from typing import Any

import httpx
import pytest

Chat = Callable[..., dict[str, Any]]

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}

EXACTLY: list[tuple[dict[str, Any], str | None, str]] = [
    (
        {"reasoning_effort": "bogus"},
        "body.reasoning_effort",
        (
            "1 validation error:\n  {'type': 'literal_error', 'loc': 'body.reasoning_effort', 'm"
            "sg': \"Input should be 'none', 'minimal', 'low', 'medium', 'high', 'xhigh' or 'max'"
            "\", 'input': 'bogus', 'ctx': {'expected': \"'none', 'minimal', 'low', 'medium', 'hig"
            "h', 'xhigh' or 'max'\"}}"
        ),
    ),
    (
        {"response_format": {"type": "json_schema"}},
        "response_format",
        (
            "When response_format type is 'json_schema', the 'json_schema' field must be provid"
            "ed. (parameter=response_format)"
        ),
    ),
    (
        {"tools": [{"type": "custom", "custom": {"name": "x"}}]},
        "body.tools.0.type",
        (
            "2 validation errors:\n  {'type': 'literal_error', 'loc': 'body.tools.0.type', 'msg'"
            ": \"Input should be 'function'\", 'input': 'custom', 'ctx': {'expected': \"'function'"
            "\"}}\n  {'type': 'missing', 'loc': 'body.tools.0.function', 'msg': 'Field required',"
            " 'input': '<dict of 2 items>'}"
        ),
    ),
    (
        {"tools": [{"type": "function"}]},
        "body.tools.0.function",
        (
            "1 validation error:\n  {'type': 'missing', 'loc': 'body.tools.0.function', 'msg': '"
            "Field required', 'input': '<dict of 1 items>'}"
        ),
    ),
    (
        {"tools": [{"type": "function", "function": {}}]},
        "body.tools.0.function.name",
        (
            "1 validation error:\n  {'type': 'missing', 'loc': 'body.tools.0.function.name', 'ms"
            "g': 'Field required', 'input': '<dict of 0 items>'}"
        ),
    ),
    (
        {"tools": []},
        "tools",
        (
            "`tools` must not be an empty array. Either provide at least one tool or omit the f"
            "ield entirely. (parameter=tools)"
        ),
    ),
    (
        {"tools": ["x"]},
        "body.tools.0",
        (
            "1 validation error:\n  {'type': 'model_attributes_type', 'loc': 'body.tools.0', 'ms"
            "g': 'Input should be a valid dictionary or object to extract fields from', 'input'"
            ": 'x'}"
        ),
    ),
    (
        {"tools": [TOOL], "tool_choice": "bogus"},
        "tool_choice",
        (
            'Invalid value for `tool_choice`: bogus! Only named tools, "none", "auto" or "requi'
            'red" are supported. (parameter=tool_choice)'
        ),
    ),
    (
        {"tool_choice": "auto"},
        "tool_choice",
        "When using `tool_choice`, `tools` must be set. (parameter=tool_choice)",
    ),
    (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice",
        (
            "The tool specified in `tool_choice` does not match any of the specified `tools` (p"
            "arameter=tool_choice)"
        ),
    ),
    (
        {"tools": [TOOL], "tool_choice": {"type": "function"}},
        "tool_choice.function",
        (
            'Invalid value for `function`: `None` in `tool_choice`! Correct usage: `{"type": "f'
            'unction", "function": {"name": "my_function"}}` (parameter=tool_choice.function)'
        ),
    ),
    (
        {"n": 200000},
        None,
        (
            "n must be at most 16384, got 200000. To increase this limit, set the VLLM_MAX_N_SE"
            "QUENCES environment variable."
        ),
    ),
    ({"top_k": -2}, None, "top_k must be 0 (disable), or at least 1, got -2."),
    (
        {"top_k": 1.5},
        "body.top_k",
        (
            "1 validation error:\n  {'type': 'int_from_float', 'loc': 'body.top_k', 'msg': 'Inpu"
            "t should be a valid integer, got a number with a fractional part', 'input': '1.5'}"
        ),
    ),
    ({"min_p": 2}, None, "min_p must be in [0, 1], got 2.0."),
    ({"frequency_penalty": 3}, None, "frequency_penalty must be in [-2, 2], got 3.0."),
    ({"presence_penalty": -3}, None, "presence_penalty must be in [-2, 2], got -3.0."),
    ({"repetition_penalty": 0}, None, "repetition_penalty must be greater than zero, got 0.0."),
    (
        {"temperature": 5},
        "temperature",
        "temperature must be in [0, 2], got 5.0. (parameter=temperature, value=5.0)",
    ),
    (
        {"top_logprobs": 2},
        "top_logprobs",
        ("when using `top_logprobs`, `logprobs` must be set to true. (parameter=top_logprobs)"),
    ),
    (
        {"logprobs": True, "top_logprobs": -5},
        "top_logprobs",
        "`top_logprobs` must be a positive value or -1. (parameter=top_logprobs, value=-5)",
    ),
    (
        {"stop": ["a", "b", "c", "d", "e"]},
        "body.stop",
        (
            "2 validation errors:\n  {'type': 'string_type', 'loc': 'body.stop', 'msg': 'Input s"
            "hould be a valid string', 'input': '<list of 5 items>'}\n  {'type': 'too_long', 'lo"
            "c': 'body.stop', 'msg': 'List should have at most 4 items after validation, not 5'"
            ", 'input': '<list of 5 items>', 'ctx': {'field_type': 'List', 'max_length': 4, 'ac"
            "tual_length': 5}}"
        ),
    ),
    ({"stop": ""}, None, "stop cannot contain an empty string."),
    (
        {"stop": 3},
        "body.stop",
        (
            "2 validation errors:\n  {'type': 'string_type', 'loc': 'body.stop', 'msg': 'Input s"
            "hould be a valid string', 'input': '3'}\n  {'type': 'list_type', 'loc': 'body.stop'"
            ", 'msg': 'Input should be a valid list', 'input': '3'}"
        ),
    ),
    (
        {"seed": 1180591620717411303424},
        "body.seed",
        (
            "1 validation error:\n  {'type': 'less_than_equal', 'loc': 'body.seed', 'msg': 'Inpu"
            "t should be less than or equal to 9223372036854775807', 'input': '1180591620717411"
            "303424', 'ctx': {'le': 9223372036854775807}}"
        ),
    ),
    (
        {"logit_bias": {"999999999": 1}},
        "logit_bias",
        (
            "token_id(s) [999999999] in logit_bias contain out-of-vocab token ids. Vocabulary s"
            "ize: 262144 (parameter=logit_bias, value=[999999999])"
        ),
    ),
    (
        {"logit_bias": {"a": 1}},
        "logit_bias",
        (
            "logit_bias contains key(s) that cannot be converted to integer token IDs: ['a'] (p"
            "arameter=logit_bias, value=['a'])"
        ),
    ),
    (
        {"logit_bias": {"--3": 1, "\u00b2": 1}},
        "logit_bias",
        (
            "logit_bias contains key(s) that cannot be converted to integer token IDs: ['--3', "
            "'\u00b2'] (parameter=logit_bias, value=['--3', '\u00b2'])"
        ),
    ),
    (
        {"min_tokens": 10, "max_tokens": 3},
        None,
        "min_tokens must be less than or equal to max_tokens=3, got 10.",
    ),
    ({"min_tokens": -3}, None, "min_tokens must be greater than or equal to 0, got -3."),
    (
        {"user": 3},
        "body.user",
        (
            "1 validation error:\n  {'type': 'string_type', 'loc': 'body.user', 'msg': 'Input sh"
            "ould be a valid string', 'input': '3'}"
        ),
    ),
    (
        {"model": 3},
        "body.model",
        (
            "1 validation error:\n  {'type': 'string_type', 'loc': 'body.model', 'msg': 'Input s"
            "hould be a valid string', 'input': '3'}"
        ),
    ),
    (
        {"truncate_prompt_tokens": -2},
        "body.truncate_prompt_tokens",
        (
            "1 validation error:\n  {'type': 'greater_than_equal', 'loc': 'body.truncate_prompt_"
            "tokens', 'msg': 'Input should be greater than or equal to -1', 'input': '-2', 'ctx"
            "': {'ge': -1}}"
        ),
    ),
    (
        {"bad_words": "x"},
        "body.bad_words",
        (
            "1 validation error:\n  {'type': 'list_type', 'loc': 'body.bad_words', 'msg': 'Input"
            " should be a valid list', 'input': 'x'}"
        ),
    ),
    (
        {"parallel_tool_calls": "x"},
        "body.parallel_tool_calls",
        (
            "1 validation error:\n  {'type': 'bool_parsing', 'loc': 'body.parallel_tool_calls', "
            "'msg': 'Input should be a valid boolean, unable to interpret input', 'input': 'x'}"
        ),
    ),
    (
        {"allowed_token_ids": []},
        "allowed_token_ids",
        "allowed_token_ids is not None and empty! (parameter=allowed_token_ids, value=[])",
    ),
    (
        {"stop": ["a", 3]},
        "body.stop",
        (
            "2 validation errors:\n  {'type': 'string_type', 'loc': 'body.stop', 'msg': 'Input s"
            "hould be a valid string', 'input': '<list of 2 items>'}\n  {'type': 'string_type', "
            "'loc': 'body.stop.1', 'msg': 'Input should be a valid string', 'input': '3'}"
        ),
    ),
    (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {}}},
        "tool_choice.function.name",
        (
            'Expected field `name` in `function` in `tool_choice`! Correct usage: `{"type": "fu'
            'nction", "function": {"name": "my_function"}}` (parameter=tool_choice.function.nam'
            "e)"
        ),
    ),
    (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": ""}}},
        "tool_choice.function.name",
        (
            'Invalid `name` in `function`: `` in `tool_choice`! Correct usage: `{"type": "funct'
            'ion", "function": {"name": "my_function"}}` (parameter=tool_choice.function.name)'
        ),
    ),
    (
        {"logprobs": True, "top_logprobs": "x"},
        "top_logprobs",
        "`top_logprobs` must be an integer. (parameter=top_logprobs, value=x)",
    ),
    (
        {"tools": [{"type": "function", "function": "x"}]},
        "body.tools.0.function",
        (
            "1 validation error:\n  {'type': 'model_attributes_type', 'loc': 'body.tools.0.funct"
            "ion', 'msg': 'Input should be a valid dictionary or object to extract fields from'"
            ", 'input': 'x'}"
        ),
    ),
    (
        {"tools": [{"type": "function", "function": {"name": 3}}]},
        "body.tools.0.function.name",
        (
            "1 validation error:\n  {'type': 'string_type', 'loc': 'body.tools.0.function.name',"
            " 'msg': 'Input should be a valid string', 'input': '3'}"
        ),
    ),
]

ALIKE: list[tuple[dict[str, Any], str, str | None]] = [
    ({"response_format": {"type": "xml"}}, "Bad Request", "body.response_format.type"),
    ({"response_format": "json_object"}, "Bad Request", "body.response_format"),
    ({"response_format": {}}, "Bad Request", "body.response_format.type"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}},
        "Bad Request",
        "body.response_format.json_schema.name",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "bogus", "x": 1}]}]}, "BadRequestError", None),
    ({"messages": [{"role": "user", "content": [{"type": ["text"]}]}]}, "BadRequestError", None),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "BadRequestError", None),
    ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "BadRequestError", None),
    (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": "data:image/png;base64,AAAA"}],
                }
            ]
        },
        "BadRequestError",
        None,
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": "x"}},
        "Bad Request",
        "body.response_format.json_schema",
    ),
]
"""Here vLLM lists what each of several alternatives lacks."""


async def refusal(client: httpx.AsyncClient, chat: Chat, members: dict[str, Any]) -> dict[str, Any]:
    answer = await client.post("/v1/chat/completions", json={**chat("hi"), **members})
    assert answer.status_code == 400
    error: dict[str, Any] = answer.json()["error"]
    return error


@pytest.mark.parametrize(("members", "param", "message"), EXACTLY)
async def test_a_refusal_has_vllms_words(
    client: httpx.AsyncClient, chat: Chat, members: dict[str, Any], param: str | None, message: str
) -> None:
    kind = "Bad Request" if "validation error" in message else "BadRequestError"

    assert await refusal(client, chat, members) == {
        "message": message,
        "type": kind,
        "param": param,
        "code": 400,
    }


@pytest.mark.parametrize(("members", "kind", "param"), ALIKE)
async def test_a_refusal_has_vllms_type_and_param(
    client: httpx.AsyncClient, chat: Chat, members: dict[str, Any], kind: str, param: str | None
) -> None:
    error = await refusal(client, chat, members)

    assert (error["type"], error["param"]) == (kind, param)
    assert "1 validation error" in error["message"]


@pytest.mark.parametrize(
    "members",
    [
        {"reasoning_effort": "minimal"},
        {"response_format": {"type": "text"}},
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        {"tools": [{"function": {"name": "f"}}]},
        {"tools": None, "tool_choice": "none"},
        {"temperature": 2, "top_k": -1, "top_p": 1, "min_p": 0, "presence_penalty": -2},
        {"logprobs": True, "top_logprobs": -1},
        {"stop": ["a", "b", "c", "d"], "logit_bias": {"3": 1000}, "stop_token_ids": [1]},
        {"seed": -(2**63), "truncate_prompt_tokens": -1, "min_tokens": 0},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]},
    ],
)
async def test_what_vllm_takes_is_taken(
    client: httpx.AsyncClient, chat: Chat, members: dict[str, Any]
) -> None:
    answer = await client.post("/v1/chat/completions", json={**chat("hi"), **members})

    assert answer.status_code == 200, answer.text
