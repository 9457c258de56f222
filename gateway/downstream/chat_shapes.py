"""The parts of a chat request that are decoded, as msgspec structs."""

from typing import Any

import msgspec

_NULL = msgspec.Raw(b"null")

INSPECTED_ROLES = frozenset({"assistant", "tool"})
"""Roles whose texts the chat template inspects: they are always decoded, whatever their length."""


class Message(msgspec.Struct, gc=False):
    """The decoded members of a chat message."""

    role: str
    content: str | list[Any] | None = None
    tool_calls: list[Any] | None = None
    reasoning: Any = None
    reasoning_content: Any = None


class Chat(msgspec.Struct, gc=False):
    """The decoded members of a chat request."""

    model: str
    messages: list[Message]
    stream: bool | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None


class LongMessage(msgspec.Struct, gc=False):
    """`Message` whose content may be a long text."""

    role: str
    content: msgspec.Raw = _NULL
    tool_calls: list[Any] | None = None
    reasoning: Any = None
    reasoning_content: Any = None


class LongChat(msgspec.Struct, gc=False):
    """`Chat` with `LongMessage`s."""

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
