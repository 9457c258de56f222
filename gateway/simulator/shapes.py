"""The shapes that vLLM's request models demand of tools, response formats and parts of messages.

As vLLM 0.33.0 has them, compared with a real server: status, type and param are its own. Where it lists what
each of several alternatives lacks, the message here names the first only.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic_core import SchemaValidator
from pydantic_core.core_schema import (
    any_schema,
    list_schema,
    literal_schema,
    nullable_schema,
    str_schema,
    with_default_schema,
)

from gateway.simulator.reading import Members, object_with
from gateway.simulator.refusals import bad_request

_USAGE = 'Correct usage: `{"type": "function", "function": {"name": "my_function"}}`'

_EFFORT = SchemaValidator(literal_schema(["none", "minimal", "low", "medium", "high", "xhigh", "max"]))
_TOOLS = SchemaValidator(
    list_schema(
        object_with(
            type=with_default_schema(literal_schema(["function"]), default="function"),
            function=object_with(name=str_schema()),
        )
    )
)
_FORMAT = SchemaValidator(
    object_with(
        type=literal_schema(["text", "json_object", "json_schema"]),
        json_schema=with_default_schema(nullable_schema(object_with(name=any_schema())), default=None),
    )
)

_PARTS = frozenset(
    {
        *("text", "thinking", "input_text", "output_text", "refusal", "tool_reference", "prompt_embeds"),
        *("image_url", "input_image", "image", "image_embeds", "image_pil"),
        *("input_audio", "audio_url", "audio", "audio_embeds", "video_url", "video_embeds"),
    }
)
"""Types of parts of a message."""

_UNTYPED = ("image_url", "image_pil", "image_embeds", "audio_url", "input_audio", "video_url", "refusal")
"""Members by which a part without a type is recognized."""


def check_tool_use(data: Mapping[str, Any]) -> None:
    """Raise the `Refusal` for tools and a choice among them that do not go together."""
    tools, choice = data.get("tools"), data.get("tool_choice")
    if tools == []:
        raise bad_request(
            "`tools` must not be an empty array. "
            "Either provide at least one tool or omit the field entirely.",
            "tools",
        )
    if choice is None or choice == "none":
        return
    if tools is None:
        raise bad_request("When using `tool_choice`, `tools` must be set.", "tool_choice")
    if isinstance(choice, Mapping):
        _check_named(choice, tools)
    elif choice not in ("auto", "required"):
        raise bad_request(
            f"Invalid value for `tool_choice`: {choice}! "
            'Only named tools, "none", "auto" or "required" are supported.',
            "tool_choice",
        )


def _check_named(choice: Mapping[str, Any], tools: object) -> None:
    function = choice.get("function")
    if not isinstance(function, Mapping):
        text = f"Invalid value for `function`: `{function}` in `tool_choice`! {_USAGE}"
        raise bad_request(text, "tool_choice.function")
    if "name" not in function:
        text = f"Expected field `name` in `function` in `tool_choice`! {_USAGE}"
        raise bad_request(text, "tool_choice.function.name")
    name = function["name"]
    if not isinstance(name, str) or not name:
        text = f"Invalid `name` in `function`: `{name}` in `tool_choice`! {_USAGE}"
        raise bad_request(text, "tool_choice.function.name")
    known = tools if isinstance(tools, list) else []
    functions = [tool.get("function") for tool in known if isinstance(tool, Mapping)]
    if not any(isinstance(one, Mapping) and one.get("name") == name for one in functions):
        text = "The tool specified in `tool_choice` does not match any of the specified `tools`"
        raise bad_request(text, "tool_choice")


def note_tools(members: Members) -> None:
    """Note what is wrong with the tools."""
    if isinstance(members.data.get("tools"), list):
        members.read("tools", _TOOLS)


def note_effort(members: Members) -> str | None:
    """Return `reasoning_effort`; note what is wrong with it."""
    effort = members.data.get("reasoning_effort")
    members.read("reasoning_effort", _EFFORT)
    return None if effort is None else str(effort)


def check_response_format(data: Mapping[str, Any]) -> None:
    """Raise the `Refusal` for a JSON schema that is missing."""
    wanted = data.get("response_format")
    if not isinstance(wanted, Mapping) or wanted.get("type") != "json_schema":
        return
    if wanted.get("json_schema") is None:
        text = "When response_format type is 'json_schema', the 'json_schema' field must be provided."
        raise bad_request(text, "response_format")


def note_response_format(members: Members) -> None:
    """Note what is wrong with the response format."""
    wanted = members.data.get("response_format")
    if not (isinstance(wanted, Mapping) and wanted.get("type") == "structural_tag"):
        members.read("response_format", _FORMAT)


def check_parts(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise the `Refusal` for a part of a message that is none."""
    for message in messages:
        content = message.get("content")
        for index, part in enumerate(content if isinstance(content, list) else ()):
            if not isinstance(part, Mapping):
                raise _no_part(index, "Input should be a valid dictionary", "dict_type", part)
            kind = part.get("type")
            if kind is None and not any(name in part for name in _UNTYPED):
                raise _no_part(f"{index}.type", "Field required", "missing", part)
            is_known = isinstance(kind, str) and kind in _PARTS
            if kind is not None and not is_known and "uuid" not in part:
                raise _no_part(f"{index}.type", "Input should be 'text'", "literal_error", kind)
            if kind == "image_url" and not isinstance(image := part.get("image_url"), Mapping):
                where = f"{index}.ChatCompletionContentPartImageParam.image_url"
                raise _no_part(where, "Input should be a valid dictionary", "dict_type", image)


def _no_part(where: object, text: str, kind: str, value: object) -> Exception:
    told = f"[type={kind}, input_value={value!r}, input_type={type(value).__name__}]"
    return bad_request(f"1 validation error for ValidatorIterator\n{where}\n  {text} {told}")
