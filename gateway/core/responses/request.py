"""Translation of a Responses API request to a chat request and to the members that its response repeats."""

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.core.errors import InvalidRequest
from gateway.core.responses.items import Item, messages_of, read_input, references, response_id, with_own_ids
from gateway.core.responses.members import count_of, flag_of, number_of, object_of, text_of
from gateway.core.responses.tools import chat_tools, functions_in, tools_of
from gateway.core.value import valueclass

COPIED = frozenset({"model", "stream", "temperature", "top_p", "parallel_tool_calls"})
"""Members with the same meaning in a chat request, forwarded as sent."""

_RENAMED: Mapping[str, str] = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""Members of a chat that have another name here."""

READ = COPIED | {
    *_RENAMED,
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
        "n",
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
    return None if param is None else _RENAMED.get(param.partition(".")[0], param)


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
    return Needs(text_of(members, "previous_response_id"), references(written))


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
    messages = messages_of([*context, *items], text_of(members, "instructions"), own=len(items))
    if not messages:
        raise InvalidRequest("`input` must not be empty.", param="input")
    tools = tools_of(members.get("tools"))
    reasoning = object_of(members, "reasoning")
    text = object_of(members, "text")
    store = flag_of(members, "store")
    chat: dict[str, Any] = {
        "messages": messages,
        **chat_tools(functions_in(tools), members.get("tool_choice")),
        **_chat_format(text),
        **_chat_effort(reasoning.get("effort")),
    }
    if (most := count_of(members, "max_output_tokens")) is not None:
        chat["max_completion_tokens"] = most
    if flag_of(members, "stream"):
        chat["stream_options"] = {"include_usage": True}
    echo = {
        "instructions": members.get("instructions"),
        "max_output_tokens": most,
        "max_tool_calls": count_of(members, "max_tool_calls"),
        "metadata": metadata_of(members.get("metadata")),
        "model": members.get("model"),
        "parallel_tool_calls": flag_of(members, "parallel_tool_calls") is not False,
        "previous_response_id": members.get("previous_response_id"),
        "prompt_cache_key": text_of(members, "prompt_cache_key"),
        "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        "safety_identifier": text_of(members, "safety_identifier"),
        "store": store is not False,
        "temperature": number_of(members, "temperature"),
        "text": {**text, "format": text.get("format") or {"type": "text"}},
        "tool_choice": members.get("tool_choice") or "auto",
        "tools": tools,
        "top_p": number_of(members, "top_p"),
        "truncation": "disabled",
        "user": text_of(members, "user"),
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
    for name, renamed in _RENAMED.items():
        if members.get(name) is not None:
            message = f"`{name}` is a parameter of chat completions; here it is `{renamed}`."
            raise InvalidRequest(message, code="unsupported_parameter", param=name)
    truncation = text_of(members, "truncation")
    if truncation not in (None, "disabled"):
        message = "Prompts that are too long are not truncated: `truncation` must be `disabled`."
        raise InvalidRequest(message, code="unsupported_parameter", param="truncation")
    include = members.get("include")
    if include is not None and not isinstance(include, list):
        raise InvalidRequest("`include` must be an array.", param="include")
    if "message.output_text.logprobs" in (include or ()):
        raise InvalidRequest(_NO_LOGPROBS, code="unsupported_parameter", param="include")
    if number_of(members, "top_logprobs"):
        raise InvalidRequest(_NO_LOGPROBS, code="unsupported_parameter", param="top_logprobs")
    object_of(members, "stream_options")


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


def _chat_format(text: Mapping[str, Any]) -> Mapping[str, Any]:
    if "type" in text:  # as AutoGen's OpenAIAgent sends it
        message = "The `type` of a format belongs in `text.format`."
        raise InvalidRequest(message, code="unsupported_parameter", param="text.type")
    written = text.get("format")
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
            if not text_of(written, "name", "text.format.name"):
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
