"""What is read of a chat, as msgspec decodes it."""

from typing import Any

import msgspec

_NULL = msgspec.Raw(b"null")

LOOKED_INTO = frozenset({"assistant", "tool"})
"""Whose texts the chat template looks into: they are decoded, however long they are."""


class Message(msgspec.Struct, gc=False):
    """What is read of a message of a chat, where it has the types that it should."""

    role: str
    content: str | list[Any] | None = None
    tool_calls: list[Any] | None = None
    reasoning: Any = None
    reasoning_content: Any = None


class Chat(msgspec.Struct, gc=False):
    """What is read of nearly every chat, likewise."""

    model: str
    messages: list[Message]
    stream: bool | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None


class LongMessage(msgspec.Struct, gc=False):
    """`Message`, where the content may be a long text."""

    role: str
    content: msgspec.Raw = _NULL
    tool_calls: list[Any] | None = None
    reasoning: Any = None
    reasoning_content: Any = None


class LongChat(msgspec.Struct, gc=False):
    """`Chat`, likewise."""

    model: str
    messages: list[LongMessage]
    stream: bool | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None


CHAT = msgspec.json.Decoder(Chat)
LONG_CHAT = msgspec.json.Decoder(LongChat)
LONG_MESSAGE = msgspec.json.Decoder(LongMessage)
CONTENT = msgspec.json.Decoder(str | list[Any] | None)
UNFIT = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
