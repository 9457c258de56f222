"""The tools of a request, in the flat form of the Responses API, and in that of a chat."""

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.core.errors import InvalidRequest
from gateway.core.responses.items import Message, chat_name
from gateway.core.responses.members import flag_of, object_of, text_of


def tools_of(written: object) -> list[Mapping[str, Any]]:
    """Return the tools in the API's flat form.

    Raises:
        InvalidRequest: they are malformed, or none that the caller runs.
    """
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
    if not text_of(tool, "name", f"{where}.name"):
        raise InvalidRequest("A function needs a `name`.", param=f"{where}.name")
    return {
        "type": "function",
        "name": tool["name"],
        "description": text_of(tool, "description", f"{where}.description"),
        "parameters": object_of(tool, "parameters", f"{where}.parameters") or None,
        "strict": flag_of(tool, "strict", f"{where}.strict"),
    }


def _namespace(tool: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    if not text_of(tool, "name", f"{where}.name"):
        raise InvalidRequest("A namespace needs a `name`.", param=f"{where}.name")
    members = tool.get("tools")
    if not isinstance(members, list):
        raise InvalidRequest("A namespace needs `tools`, an array.", param=f"{where}.tools")
    return {
        "type": "namespace",
        "name": tool["name"],
        "description": text_of(tool, "description", f"{where}.description") or "",
        "tools": [
            _tool(member, f"{where}.tools.{index}", in_namespace=True) for index, member in enumerate(members)
        ],
    }


def functions_in(tools: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
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


def chat_tools(tools: Sequence[Mapping[str, Any]], choice: object) -> Mapping[str, Any]:
    """Return the members of a chat for these functions and a `tool_choice`.

    Raises:
        InvalidRequest: the choice is invalid.
    """
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
