"""What a response repeats of a chat: the job of a chat can be fetched as a response, too. Pure."""

from collections.abc import Callable, Mapping
from typing import Any

_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")


def echo_of_chat(member: Callable[[str], Any], model: str, *, store: bool) -> dict[str, Any]:
    """Return the members of a response that echo a chat request, whose members `member` returns.

    Members that a response does not have, or of a wrong type, are left out; a backend rejects the latter.
    """

    def given(name: str, *kinds: type) -> Any:
        value = member(name)
        return (
            value
            if isinstance(value, kinds) and not (isinstance(value, bool) and bool not in kinds)
            else None
        )

    metadata = given("metadata", dict) or {}
    effort = given("reasoning_effort", str)
    tools = [_tool(tool) for tool in given("tools", list) or () if isinstance(tool, dict)]
    return {
        "instructions": None,
        "max_output_tokens": given("max_completion_tokens", int) or given("max_tokens", int),
        "max_tool_calls": None,
        "metadata": {name: value for name, value in metadata.items() if isinstance(value, str)},
        "model": model,
        "parallel_tool_calls": member("parallel_tool_calls") is not False,
        "previous_response_id": None,
        "prompt_cache_key": given("prompt_cache_key", str),
        "reasoning": {"effort": effort if effort in _EFFORTS else None, "summary": None},
        "safety_identifier": given("safety_identifier", str),
        "store": store,
        "temperature": given("temperature", int, float),
        "text": {"format": _format(given("response_format", dict) or {})},
        "tool_choice": _tool_choice(member("tool_choice")),
        "tools": tools,
        "top_p": given("top_p", int, float),
        "truncation": "disabled",
        "user": given("user", str),
    }


def _tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function = tool.get("function")
    function = function if isinstance(function, dict) else {}
    names = ("name", "description", "parameters", "strict")
    return {"type": "function", **{name: function.get(name) for name in names}}


def _format(written: Mapping[str, Any]) -> Mapping[str, Any]:
    schema = written.get("json_schema")
    if written.get("type") == "json_schema" and isinstance(schema, dict):
        return {**schema, "type": "json_schema"}
    return {"type": "json_object" if written.get("type") == "json_object" else "text"}


def _tool_choice(written: object) -> Any:
    if isinstance(written, str):
        return written
    function = written.get("function") if isinstance(written, dict) else None
    return {"type": "function", "name": function.get("name")} if isinstance(function, dict) else "auto"
