"""Items, the elements of a conversation in the Responses API, and their translation to chat messages.

Items are kept in one form: with a type, an id, and the content as a list of parts. An item's id contains the
id of its response, so that references to items can be resolved without an index.

Gemma's chat template imposes some limits. It has one place for system text, at the head. It renders reasoning
only in a message that calls tools. A tool result is rendered with the name of its tool, and only its text.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gateway.core.errors import InvalidRequest
from gateway.core.responses.members import text_of

Item = Mapping[str, Any]
Message = dict[str, Any]

ROLES = frozenset({"user", "assistant", "system", "developer"})
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}
_ID = re.compile(r"(?:msg|rs|fc|fco)_([0-9a-f]{32})[0-9a-f]{4,}")
_TEXTS = frozenset({"input_text", "output_text", "text"})


def response_id(token: str) -> str:
    """Return the id of the response with this token (32 hex digits)."""
    return f"resp_{token}"


def item_id(kind: str, token: str, index: int) -> str:
    """Return the id of an item of that kind in a response; `index` counts input and output items together."""
    return f"{_PREFIXES[kind]}_{token}{index:04x}"


def home_of(item: str) -> str | None:
    """Return the id of the response in an item's id, or None if there is none."""
    found = _ID.fullmatch(item)
    return response_id(found[1]) if found else None


def chat_name(namespace: str | None, name: str) -> str:
    """Return a function's name in a chat, where functions have no namespace."""
    return f"{namespace}__{name}" if namespace else name


# ------------------------------------------------------------------ reading


def read_input(written: object, token: str, stored: Mapping[str, Item]) -> list[Item]:
    """Return the `input` of a request as items.

    Args:
        written: A string or a list, as sent; its length has been checked.
        token: Identifies the response they belong to.
        stored: The items that items of type `item_reference` refer to, by id.

    Raises:
        InvalidRequest: An item is malformed, of an unsupported kind, or refers to one that is not stored.
    """
    if isinstance(written, str):
        written = [{"role": "user", "content": written}]
    if not isinstance(written, list):
        raise InvalidRequest("`input` must be a string or an array of items.", param="input")
    return [_read_item(item, f"input.{index}", token, index, stored) for index, item in enumerate(written)]


def with_own_ids(items: Sequence[Item], context: Sequence[Item], token: str) -> list[Item]:
    """Return items with ids that are unique in their conversation: readers page through it by them."""
    seen = {item["id"] for item in context}
    own: list[Item] = []
    for index, item in enumerate(items):
        if item["id"] in seen:
            item = {**item, "id": item_id(item["type"], token, index)}
        seen.add(item["id"])
        own.append(item)
    return own


def references(written: object) -> list[str]:
    """Return the ids of the items that the `input` of a request refers to."""
    items = written if isinstance(written, list) else ()
    ids = [item.get("id") for item in items if _is_reference(item)]
    return [id_ for id_ in ids if isinstance(id_, str)]


def without_references(written: Sequence[Any]) -> tuple[list[Any], list[Item]]:
    """Return the items of an `input` that are no references, and calls for the results that have none.

    The calls are placeholders for those of items that are not at hand: a result is refused without its call.
    """
    own = [item for item in written if not _is_reference(item)]
    calls, results = (
        [item["call_id"] for item in own if _is_of(item, kind) and isinstance(item.get("call_id"), str)]
        for kind in ("function_call", "function_call_output")
    )
    call = {"type": "function_call", "name": "function", "arguments": "{}"}
    missing = [call_id for call_id in dict.fromkeys(results) if call_id not in calls]
    return own, [{**call, "id": f"fc_{call_id}", "call_id": call_id} for call_id in missing]


def _is_of(item: object, kind: str) -> bool:
    return isinstance(item, Mapping) and item.get("type") == kind


def _is_reference(item: Any) -> bool:
    return isinstance(item, Mapping) and (item.get("type") == "item_reference" or set(item) == {"id"})


def _read_item(item: object, where: str, token: str, index: int, stored: Mapping[str, Item]) -> Item:
    if not isinstance(item, Mapping):
        raise InvalidRequest("An item must be an object.", param=where)
    if _is_reference(item):
        found = stored.get(str(item.get("id")))
        if found is None:
            raise InvalidRequest(
                "The item is not stored here. Send the item itself.",
                code="item_not_found",
                param=f"{where}.id",
            )
        return found
    kind = item.get("type") or "message"
    read = _READERS.get(kind) if isinstance(kind, str) else None
    if read is None:
        message = f"Items of type {str(kind)[:40]!r} are not supported."
        raise InvalidRequest(message, code="unsupported_content", param=f"{where}.type")
    given = text_of(item, "id", f"{where}.id")
    return {"id": given or item_id(kind, token, index), "type": kind, **read(item, where)}


def _text(item: Item, name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise InvalidRequest(f"`{name}` must be a string.", param=f"{where}.{name}")
    return value


def _read_message(item: Item, where: str) -> Item:
    role, content = item.get("role"), item.get("content")
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidRequest(f"`role` must be one of {', '.join(sorted(ROLES))}.", param=f"{where}.role")
    if isinstance(content, str):
        content = [{"type": "input_text", "text": content}]
    parts = _read_parts(content, f"{where}.content", _PART_READERS)
    if role == "assistant":
        parts = [
            {"type": "output_text", "text": part["text"], "annotations": []}
            if part["type"] in _TEXTS
            else part
            for part in parts
        ]
    return {"role": role, "status": "completed", "content": parts}


def _read_call(item: Item, where: str) -> Item:
    call = {name: _text(item, name, where) for name in ("call_id", "name", "arguments")}
    if item.get("namespace") is not None:
        call["namespace"] = _text(item, "namespace", where)
    return {**call, "status": "completed"}


def _read_output(item: Item, where: str) -> Item:
    output = item.get("output")
    if not isinstance(output, str):
        output = _read_parts(output, f"{where}.output", _OUTPUT_READERS)
    return {"call_id": _text(item, "call_id", where), "output": output, "status": "completed"}


def _read_reasoning(item: Item, where: str) -> Item:
    readers = {"reasoning_text": _read_text, "summary_text": _read_text}
    return {
        name: _read_parts(item.get(name) or [], f"{where}.{name}", readers) for name in ("summary", "content")
    }


_READERS: Mapping[str, Callable[[Item, str], Item]] = {
    "message": _read_message,
    "function_call": _read_call,
    "function_call_output": _read_output,
    "reasoning": _read_reasoning,
}

PartReaders = Mapping[str, Callable[[Item, str], Item]]


def _read_parts(parts: object, where: str, readers: PartReaders) -> list[Item]:
    if not isinstance(parts, list):
        name = where.rpartition(".")[2]
        raise InvalidRequest(f"`{name}` must be a string or an array of parts.", param=where)
    return [_read_part(part, f"{where}.{index}", readers) for index, part in enumerate(parts)]


def _read_part(part: object, where: str, readers: PartReaders) -> Item:
    if not isinstance(part, Mapping):
        raise InvalidRequest("A part must be an object.", param=where)
    kind = part.get("type")
    read = readers.get(kind) if isinstance(kind, str) else None
    if read is None:
        names = ", ".join(sorted(readers))
        message = f"Parts of type {str(kind)[:40]!r} are not supported here, only {names}."
        raise InvalidRequest(message, code="unsupported_content", param=f"{where}.type")
    return {"type": kind, **read(part, where)}


def _read_text(part: Item, where: str) -> Item:
    return {"text": _text(part, "text", where)}


def _read_refusal(part: Item, where: str) -> Item:
    return {"refusal": _text(part, "refusal", where)}


def _read_image(part: Item, where: str) -> Item:
    if part.get("file_id") is not None:
        message = "Images cannot be given by `file_id`. Send the image itself as a `data:` URL."
        raise InvalidRequest(message, code="unsupported_content", param=f"{where}.file_id")
    detail = text_of(part, "detail", f"{where}.detail")
    return {"image_url": _text(part, "image_url", where), "detail": detail or "auto"}


def _read_audio(part: Item, where: str) -> Item:
    audio = part.get("input_audio")
    if not isinstance(audio, Mapping):
        raise InvalidRequest("`input_audio` must be an object.", param=f"{where}.input_audio")
    names = ("data", "format")
    return {"input_audio": {name: _text(audio, name, f"{where}.input_audio") for name in names}}


_OUTPUT_READERS: PartReaders = {**{name: _read_text for name in _TEXTS}, "input_image": _read_image}
_PART_READERS: PartReaders = {**_OUTPUT_READERS, "refusal": _read_refusal, "input_audio": _read_audio}


# ------------------------------------------------------------------ translation to chat messages


def messages_of(items: Sequence[Item], instructions: str | None, *, own: int) -> list[Message]:
    """Return the chat messages for a conversation, in the form that Gemma's template accepts.

    Args:
        items: The whole conversation.
        instructions: System text to precede it.
        own: How many of `items`, at the end, are from this request; errors name these by index.

    Raises:
        InvalidRequest: A tool result has no matching call.
    """
    chat = _Chat()
    if instructions:
        chat.messages.append({"role": "system", "content": instructions})
    for index, item in enumerate(items, start=own - len(items)):
        chat.add(item, f"input.{index}.call_id" if index >= 0 else "previous_response_id")
    return _one_system_message(chat.end())


class _Chat:
    """Merges the items of an assistant turn (reasoning, text and calls) into one message.

    Images in the results of its calls follow after all of these results, in a user message.
    """

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._open: Message | None = None
        self._joined: list[str] = []  # further words of the open message
        self._thought = ""
        self._tools: dict[str, str] = {}  # tool name by call id
        self._callers: dict[str, Message] = {}  # the message with the call, by call id
        self._results: dict[int, list[Message]] = {}  # of a message's calls, by its identity
        self._images: list[Item] = []  # content parts from the most recent tool results

    def add(self, item: Item, where: str) -> None:
        """Add an item; `where` is the parameter to name in an error if a result has no matching call."""
        kind = item["type"]
        if kind != "function_call_output":
            self._show_images()
        if kind == "function_call":
            self._call(item)
            return
        is_words = kind == "message" and item["role"] == "assistant"
        if is_words and self._joins(_content(item)):
            return
        if not (is_words and self._open is None):
            self.close()
        if is_words:
            self._open = {"role": "assistant", "content": _content(item)}
        elif kind == "reasoning":
            thought = item.get("content") or item.get("summary") or ()
            self._thought = "".join(part["text"] for part in thought)
        elif kind == "function_call_output":
            self._output(item, where)
        else:
            role = "user" if item["role"] == "user" else "system"
            self.messages.append({"role": role, "content": _content(item)})

    def _joins(self, words: str | list[Item]) -> bool:
        """Add words to the open message if it has calls. Return whether that was done.

        Behind a message of its own, the calls' results would not be rendered: the template looks for them
        directly behind the calls.
        """
        if self._open is None or "tool_calls" not in self._open or not isinstance(words, str):
            return False
        if not isinstance(self._open["content"] or "", str):
            return False
        self._joined.append(words)
        return True

    def end(self) -> list[Message]:
        """End the conversation. Return its messages, with the results of calls directly behind them."""
        self.close()
        self._show_images()
        return [message for said in self.messages for message in (said, *self._results.get(id(said), ()))]

    def close(self) -> None:
        """Close the assistant's message. Its reasoning is kept only if it calls tools, as in the template."""
        if self._open is not None:
            if self._joined:
                self._open["content"] = "".join([self._open["content"] or "", *self._joined])
            if self._thought and "tool_calls" in self._open:
                self._open["reasoning"] = self._thought
            self.messages.append(self._open)
        self._open, self._joined, self._thought = None, [], ""

    def _call(self, item: Item) -> None:
        if self._open is None:
            self._open = {"role": "assistant", "content": None}
        name = chat_name(item.get("namespace"), item["name"])
        function = {"name": name, "arguments": item["arguments"]}
        call = {"id": item["call_id"], "type": "function", "function": function}
        self._open.setdefault("tool_calls", []).append(call)
        self._callers[item["call_id"]] = self._open
        self._tools[item["call_id"]] = name

    def _output(self, item: Item, where: str) -> None:
        name = self._tools.get(item["call_id"])
        if name is None:
            message = "There is no function call with this `call_id` in the conversation before it."
            raise InvalidRequest(message, param=where)
        output = item["output"]
        if not isinstance(output, str):
            output = "\n".join(self._shown(part, name) for part in output)
        result = {"role": "tool", "tool_call_id": item["call_id"], "name": name, "content": output}
        self._results.setdefault(id(self._callers[item["call_id"]]), []).append(result)

    def _shown(self, part: Item, name: str) -> str:
        """Return the text for a part of a tool result: the text itself, or a reference to an image."""
        if part["type"] != "input_image":
            return str(part["text"])
        mark = f"[image {len(self._images) // 2 + 1}]"
        self._images += [{"type": "text", "text": f"{mark} of {name}:"}, _chat_part(part)]
        return mark

    def _show_images(self) -> None:
        if self._images:
            self.messages.append({"role": "user", "content": self._images})
            self._images = []


def _content(item: Item) -> str | list[Item]:
    """Return a message's content: a string if it is a single text or can be joined into one, else parts."""
    parts = [_chat_part(part) for part in item["content"]]
    texts = [part["text"] for part in parts if "text" in part]
    if len(texts) == len(parts):
        if item["role"] == "assistant":
            return "".join(texts)
        if item["role"] != "user" or len(texts) < 2:
            return "\n".join(texts)
    return parts


def _chat_part(part: Item) -> Item:
    match part["type"]:
        case "input_image":
            return {"type": "image_url", "image_url": {"url": part["image_url"], "detail": part["detail"]}}
        case "input_audio":
            return {"type": "input_audio", "input_audio": part["input_audio"]}
        case "refusal":
            return {"type": "text", "text": part["refusal"]}
    return {"type": "text", "text": part["text"]}


def _one_system_message(messages: list[Message]) -> list[Message]:
    """Merge the leading system messages into one."""
    count = 0
    for message in messages:
        if message["role"] != "system" or not isinstance(message["content"], str):
            break
        count += 1
    if count < 2:
        return messages
    text = "\n\n".join(message["content"] for message in messages[:count])
    return [{"role": "system", "content": text}, *messages[count:]]
