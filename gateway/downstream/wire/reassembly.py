"""Puts the strings that were cut out of a chat back: into messages, text parts, images and recordings."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

from gateway.core.value import valueclass
from gateway.downstream.cut_out import number_of
from gateway.downstream.long_texts import beginning_of, long_text_at, whole_text
from gateway.downstream.wire.chat_decoding import INSPECTED_ROLES, Message

_TEXT: Final = "text"
_SOURCES = ("image_url", "audio_url", "input_audio")

_SHOWN_CHARS = 64
"""Characters of an image's URL that are looked at. A choice: enough for its scheme."""


@valueclass(frozen=True, slots=True)
class _Place:
    """The place of a string in a chat.

    Attributes:
        message: Index of its message.
        part: The object that contains it; None: it is the message's content.
        name: Its name in that object.
        number: Number of the string.
    """

    message: int
    part: dict[str, Any] | None
    name: str
    number: int


def put_long(messages: list[Message], texts: Sequence[memoryview]) -> bool:
    """Put strings back in place of their marks. Return False if a mark is where no long string belongs."""
    places = list(_places(messages))
    if sorted(place.number for place in places) != list(range(len(texts))):
        return False
    have_long: set[int] = set()
    return all(_put(messages, place, texts[place.number], have_long) for place in places)


def _put(messages: list[Message], place: _Place, text: memoryview, have_long: set[int]) -> bool:
    """`have_long`: messages that already have a long text. A second one is decoded like a short one."""
    part, name = place.part, place.name
    if part is not None and name != _TEXT:
        shown = beginning_of(text, _SHOWN_CHARS)  # nothing else of an image is examined
        part[name] = shown
        return shown is not None
    message = messages[place.message]
    is_decoded = (
        message.role in INSPECTED_ROLES or message.tool_calls is not None or place.message in have_long
    )
    found: Any = whole_text(text) if is_decoded else long_text_at(text)
    if found is None:
        return False
    have_long.add(place.message)
    if part is not None:
        part[name] = found
        return True
    thoughts = message.reasoning, message.reasoning_content
    messages[place.message] = Message(message.role, found, message.tool_calls, *thoughts)
    return True


def _places(messages: Sequence[Message]) -> Iterator[_Place]:
    for index, message in enumerate(messages):
        if (number := number_of(message.content)) is not None:
            yield _Place(index, None, "", number)
        elif isinstance(message.content, list):
            for part in message.content:
                if isinstance(part, dict):
                    yield from _places_in(part, index)


def _places_in(part: dict[str, Any], index: int) -> Iterator[_Place]:
    for name in (_TEXT, *_SOURCES):
        value = part.get(name)
        if (number := number_of(value)) is not None:
            yield _Place(index, part, name, number)
        elif isinstance(value, dict):
            for inner, source in value.items():
                if (number := number_of(source)) is not None:
                    yield _Place(index, value, inner, number)
