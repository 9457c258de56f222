"""Translation of a Responses API request to a chat request and to the members that its response repeats."""

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.core.errors import InvalidRequest
from gateway.core.responses.items import (
    Item,
    Message,
    chat_name,
    messages_of,
    read_input,
    references,
    response_id,
    with_own_ids,
)
from gateway.core.value import valueclass

COPIED = frozenset({"model", "stream", "temperature", "top_p", "parallel_tool_calls"})
"""Members with the same meaning in a chat request, forwarded as sent."""

READ = COPIED | {
    "background",
    "context_management",
    "conversation",
    "include",
    "input",
    "instructions",
    "max_output_tokens",
    "max_tool_calls",
    "metadata",
    "previous_response_id",
    "prompt",
    "prompt_cache_key",
    "reasoning",
    "safety_identifier",
    "store",
    "stream_options",
    "text",
    "tool_choice",
    "tools",
    "top_logprobs",
    "truncation",
    "user",
}
"""Members that are interpreted here."""

_LEFT_OUT = frozenset(
    {
        # members of the Responses API, or of Codex CLI, without a meaning here
        "client_metadata",
        "prompt_cache_retention",
        "prompt_cache_options",
        "service_tier",
        # members of a chat that would conflict with translated ones, or change the form of the answer
        "add_generation_prompt",
        "continue_final_message",
        "echo",
        "function_call",
        "functions",
        "logprobs",
        "max_completion_tokens",
        "max_tokens",
        "messages",
        "n",
        "reasoning_effort",
        "response_format",
        "use_beam_search",
    }
)
_REFUSED: Mapping[str, str] = {
    "conversation": "Conversations are not kept here: use `previous_response_id`, or send the items.",
    "prompt": "Prompt templates are not kept here: send `instructions` and `input`.",
    "context_management": "Conversations are not shortened here: send only the items to keep.",
}
_NO_LOGPROBS = "Log probabilities are not supported in responses: use `/v1/chat/completions`."
_EFFORTS: Mapping[str, str] = {
    "none": "none",
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "high",
    "max": "high",
}
"""Translation to the four efforts that engines accept. Gemma's reasoning is only on or off."""

_METADATA_MAX = 16
_METADATA_KEY_MAX = 64
_METADATA_VALUE_MAX = 512
"""Maximum members of `metadata`, and characters of a name and of a value: OpenAI's limits."""

_CHAT_PARAMS: Mapping[str, str] = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}


@valueclass(frozen=True, slots=True)
class Needs:
    """Stored objects needed to translate a request.

    Attributes:
        previous: Id of the previous response, or None.
        items: Ids of the items it refers to.
    """

    previous: str | None
    items: Sequence[str]


@valueclass(frozen=True, slots=True)
class Translated:
    """A translated request.

    Attributes:
        chat: Members of the chat request, except those that are forwarded as sent.
        items: Its own input items.
        context: The preceding items, from the previous responses.
        echo: Members that its response repeats.
        store: Whether to store the response.
    """

    chat: Mapping[str, Any]
    items: Sequence[Item]
    context: Sequence[Item]
    echo: Mapping[str, Any]
    store: bool


def travels(name: str) -> bool:
    """Return whether a member is forwarded in the chat request as sent; unknown members are."""
    return name in COPIED or (name not in READ and name not in _LEFT_OUT)


def chat_param_here(param: str | None) -> str | None:
    """Return the name in this API of a chat request's member, as named in an error."""
    return None if param is None else _CHAT_PARAMS.get(param.partition(".")[0], param)


def needs(members: Mapping[str, Any], items_max: int) -> Needs:
    """Return the stored objects that a request refers to.

    Raises:
        InvalidRequest: It has too many items, or `previous_response_id` is not a string.
    """
    written = members.get("input")
    if isinstance(written, list) and len(written) > items_max:
        raise InvalidRequest(
            f"`input` has more than {items_max} items.", code="too_many_items", param="input"
        )
    return Needs(_text(members, "previous_response_id"), references(written))


def read(
    members: Mapping[str, Any],
    *,
    token: str,
    context: Sequence[Item] = (),
    stored: Mapping[str, Item] | None = None,
) -> Translated:
    """Translate a request to a chat request.

    Args:
        members: The decoded members of `READ` that were sent.
        token: Identifies the response: 32 hex digits.
        context: The items of the previous responses.
        stored: The items that it refers to, by id, if they are stored.

    Raises:
        InvalidRequest: A member has a wrong type or an unsupported value.
    """
    _refuse_what_is_not_offered(members)
    if members.get("input") is None:
        raise InvalidRequest("`input` is required.", param="input")
    items = with_own_ids(read_input(members["input"], token, stored or {}), context, token)
    messages = messages_of([*context, *items], _text(members, "instructions"), own=len(items))
    if not messages:
        raise InvalidRequest("`input` must not be empty.", param="input")
    tools = _tools(members.get("tools"))
    reasoning = _object(members, "reasoning")
    text = _object(members, "text")
    store = _flag(members, "store")
    chat: dict[str, Any] = {
        "messages": messages,
        **_chat_tools(_functions(tools), members.get("tool_choice")),
        **_chat_format(text.get("format")),
        **_chat_effort(reasoning.get("effort")),
    }
    if (most := _count(members, "max_output_tokens")) is not None:
        chat["max_completion_tokens"] = most
    if _flag(members, "stream"):
        chat["stream_options"] = {"include_usage": True}
    echo = {
        "instructions": members.get("instructions"),
        "max_output_tokens": most,
        "max_tool_calls": _count(members, "max_tool_calls"),
        "metadata": metadata_of(members.get("metadata")),
        "model": members.get("model"),
        "parallel_tool_calls": _flag(members, "parallel_tool_calls") is not False,
        "previous_response_id": members.get("previous_response_id"),
        "prompt_cache_key": _text(members, "prompt_cache_key"),
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "safety_identifier": _text(members, "safety_identifier"),
        "store": store is not False,
        "temperature": _number(members, "temperature"),
        "text": {**text, "format": text.get("format") or {"type": "text"}},
        "tool_choice": members.get("tool_choice") or "auto",
        "tools": tools,
        "top_p": _number(members, "top_p"),
        "truncation": "disabled",
        "user": _text(members, "user"),
    }
    return Translated(chat=chat, items=items, context=context, echo=echo, store=store is not False)


def new_response(echo: Mapping[str, Any], token: str, created_at: int) -> dict[str, Any]:
    """Return a response without output.

    `temperature` and `top_p` are None if they were not sent, because the model's defaults then apply.
    """
    return {
        "id": response_id(token),
        "object": "response",
        "created_at": created_at,
        "status": "in_progress",
        "background": False,
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "output": [],
        "service_tier": None,
        "top_logprobs": 0,
        "usage": None,
        **echo,
    }


# ------------------------------------------------------------------ members


def _refuse_what_is_not_offered(members: Mapping[str, Any]) -> None:
    for name, message in _REFUSED.items():
        if members.get(name):
            raise InvalidRequest(message, code="unsupported_parameter", param=name)
    truncation = _text(members, "truncation")
    if truncation not in (None, "disabled"):
        message = "Prompts that are too long are not truncated: `truncation` must be `disabled`."
        raise InvalidRequest(message, code="unsupported_parameter", param="truncation")
    include = members.get("include")
    if include is not None and not isinstance(include, list):
        raise InvalidRequest("`include` must be an array.", param="include")
    if "message.output_text.logprobs" in (include or ()):
        raise InvalidRequest(_NO_LOGPROBS, code="unsupported_parameter", param="include")
    if _number(members, "top_logprobs"):
        raise InvalidRequest(_NO_LOGPROBS, code="unsupported_parameter", param="top_logprobs")
    _object(members, "stream_options")


def _text(members: Mapping[str, Any], name: str, where: str = "") -> str | None:
    value = members.get(name)
    if value is not None and not isinstance(value, str):
        raise InvalidRequest(f"`{name}` must be a string.", param=where or name)
    return value


def _flag(members: Mapping[str, Any], name: str, where: str = "") -> bool | None:
    value = members.get(name)
    if value is not None and not isinstance(value, bool):
        raise InvalidRequest(f"`{name}` must be true or false.", param=where or name)
    return value


def _number(members: Mapping[str, Any], name: str) -> float | None:
    value = members.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(f"`{name}` must be a number.", param=name)
    return value


def _count(members: Mapping[str, Any], name: str) -> int | None:
    value = members.get(name)
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():  # of JavaScript, for example
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidRequest(f"`{name}` must be an integer of at least 1.", param=name)
    return value


def _object(members: Mapping[str, Any], name: str, where: str = "") -> Mapping[str, Any]:
    value = members.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise InvalidRequest(f"`{name}` must be an object.", param=where or name)
    return value or {}


def metadata_of(written: object) -> Mapping[str, str]:
    """Return a request's `metadata`.

    Raises:
        InvalidRequest: It is malformed or too large.
    """
    if written is None:
        return {}
    if (
        not isinstance(written, Mapping)
        or len(written) > _METADATA_MAX
        or any(len(key) > _METADATA_KEY_MAX for key in written)
        or any(not isinstance(value, str) or len(value) > _METADATA_VALUE_MAX for value in written.values())
    ):
        raise InvalidRequest(
            f"`metadata` must be an object of at most {_METADATA_MAX} strings of at most "
            f"{_METADATA_VALUE_MAX} characters, with names of at most {_METADATA_KEY_MAX}.",
            param="metadata",
        )
    return written


def _tools(written: object) -> list[Mapping[str, Any]]:
    """Return the tools in the API's flat form."""
    if written is None:
        return []
    if not isinstance(written, list):
        raise InvalidRequest("`tools` must be an array.", param="tools")
    return [_tool(tool, f"tools.{index}") for index, tool in enumerate(written)]


def _tool(tool: object, where: str, *, in_namespace: bool = False) -> Mapping[str, Any]:
    if not isinstance(tool, Mapping):
        raise InvalidRequest("A tool must be an object.", param=where)
    kind = tool.get("type")
    if kind == "namespace" and not in_namespace:
        return _namespace(tool, where)
    if kind != "function":
        message = f"Tools of type {str(kind)[:40]!r} are not supported: only functions that the caller runs."
        raise InvalidRequest(message, code="unsupported_parameter", param=f"{where}.type")
    if not _text(tool, "name", f"{where}.name"):
        raise InvalidRequest("A function needs a `name`.", param=f"{where}.name")
    return {
        "type": "function",
        "name": tool["name"],
        "description": _text(tool, "description", f"{where}.description"),
        "parameters": _object(tool, "parameters", f"{where}.parameters") or None,
        "strict": _flag(tool, "strict", f"{where}.strict"),
    }


def _namespace(tool: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    if not _text(tool, "name", f"{where}.name"):
        raise InvalidRequest("A namespace needs a `name`.", param=f"{where}.name")
    members = tool.get("tools")
    if not isinstance(members, list):
        raise InvalidRequest("A namespace needs `tools`, an array.", param=f"{where}.tools")
    return {
        "type": "namespace",
        "name": tool["name"],
        "description": _text(tool, "description", f"{where}.description") or "",
        "tools": [
            _tool(member, f"{where}.tools.{index}", in_namespace=True) for index, member in enumerate(members)
        ],
    }


def _functions(tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the functions, those in namespaces by their names in a chat."""
    functions: list[Mapping[str, Any]] = []
    for tool in tools:
        if tool["type"] == "namespace":
            members = tool["tools"]
            functions += [{**member, "name": chat_name(tool["name"], member["name"])} for member in members]
        else:
            functions.append(tool)
    return functions


def own_name(tools: object, name: str) -> tuple[str, str]:
    """Return the namespace (or "") and the own name of a function by its name in a chat.

    `tools`: those of the response, as read here.
    """
    for tool in tools if isinstance(tools, list) else ():
        if tool["type"] == "namespace":
            for member in tool["tools"]:
                if chat_name(tool["name"], member["name"]) == name:
                    return tool["name"], member["name"]
    return "", name


def _chat_tools(tools: Sequence[Mapping[str, Any]], choice: object) -> Mapping[str, Any]:
    names = {tool["name"] for tool in tools}
    chosen: Any = choice
    if isinstance(choice, Mapping):
        match choice.get("type"):
            case "function":
                [name] = _names([choice], names, "tool_choice")
                chosen = {"type": "function", "function": {"name": name}}
            case "allowed_tools":
                names = _names(choice.get("tools"), names, "tool_choice.tools")
                chosen = choice.get("mode")
                if chosen not in ("auto", "required"):
                    raise InvalidRequest("`mode` must be auto or required.", param="tool_choice.mode")
            case kind:
                message = f"Tools of type {str(kind)[:40]!r} are not supported."
                raise InvalidRequest(message, code="unsupported_parameter", param="tool_choice.type")
    elif choice not in (None, "none", "auto", "required"):
        raise InvalidRequest("`tool_choice` must be none, auto, required or an object.", param="tool_choice")
    if not tools:
        if chosen not in (None, "none", "auto"):
            raise InvalidRequest("`tool_choice` needs `tools`.", param="tool_choice")
        return {}
    listed = [_chat_tool(tool) for tool in tools if tool["name"] in names]
    return {"tools": listed} if chosen is None else {"tools": listed, "tool_choice": chosen}


def _names(written: object, known: set[str], where: str) -> set[str]:
    tools = written if isinstance(written, list) else []
    names = {str(tool.get("name")) if isinstance(tool, Mapping) else "" for tool in tools}
    if not names or not names <= known:
        raise InvalidRequest("`tool_choice` names a function that is not in `tools`.", param=where)
    return names


def _chat_tool(tool: Mapping[str, Any]) -> Message:
    function = {name: value for name, value in tool.items() if name != "type" and value is not None}
    return {"type": "function", "function": function}


def _chat_format(written: object) -> Mapping[str, Any]:
    if written is None:
        return {}
    if not isinstance(written, Mapping):
        raise InvalidRequest("`format` must be an object.", param="text.format")
    match written.get("type"):
        case "text":
            return {}
        case "json_object":
            return {"response_format": {"type": "json_object"}}
        case "json_schema":
            if not _text(written, "name", "text.format.name"):
                raise InvalidRequest("A format needs a `name`.", param="text.format.name")
            if not isinstance(written.get("schema"), Mapping):
                raise InvalidRequest("A format needs a `schema`, an object.", param="text.format.schema")
            names = ("name", "description", "schema", "strict")
            schema = {name: written[name] for name in names if written.get(name) is not None}
            return {"response_format": {"type": "json_schema", "json_schema": schema}}
    raise InvalidRequest("`type` must be text, json_object or json_schema.", param="text.format.type")


def _chat_effort(effort: object) -> Mapping[str, Any]:
    if effort is None:
        return {}
    if not isinstance(effort, str) or effort not in _EFFORTS:
        raise InvalidRequest(f"`effort` must be one of {', '.join(_EFFORTS)}.", param="reasoning.effort")
    return {"reasoning_effort": _EFFORTS[effort]}
