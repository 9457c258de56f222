"""Puts what was cut out of a chat where it belongs: into a message, a text part, an image or a recording."""

from collections.abc import Iterator, Sequence
from typing import Any

from gateway.downstream.chat_shapes import LOOKED_INTO, Message
from gateway.downstream.cut_out import MARK
from gateway.downstream.long_texts import is_plain, unread_text

_SOURCES = ("image_url", "audio_url", "input_audio")
_SHOWN_BYTES = 64


def put_long(messages: list[Message], text: memoryview) -> bool:
    """Put what was cut out of a chat where its mark stands; return False where that is no place for it."""
    marked = list(_marked(messages))
    if len(marked) != 1:
        return False
    index, holder, name = marked[0]
    message = messages[index]
    if message.tool_calls is not None or message.role in LOOKED_INTO:
        return False
    if holder is not None and name != "text":
        if not is_plain(text):
            return False
        holder[name] = bytes(text[:_SHOWN_BYTES]).decode()  # all that is looked at of an image
        return True
    long: Any = unread_text(text)
    if long is None:
        return False
    if holder is None:
        thoughts = message.reasoning, message.reasoning_content
        messages[index] = Message(message.role, long, None, *thoughts)
    else:
        holder[name] = long
    return True


def _marked(messages: Sequence[Message]) -> Iterator[tuple[int, dict[str, Any] | None, str]]:
    """Yield which message has the mark in it, and which member of what it is there; None: its content."""
    for index, message in enumerate(messages):
        if message.content == MARK:
            yield index, None, ""
        elif isinstance(message.content, list):
            for part in message.content:
                if isinstance(part, dict):
                    yield from ((index, holder, name) for holder, name in _marked_in(part))


def _marked_in(part: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    for name in ("text", *_SOURCES):
        value = part.get(name)
        if value == MARK:
            yield part, name
        elif isinstance(value, dict):
            yield from ((value, inner) for inner in value if value[inner] == MARK)
