"""The parts of a chat that are decoded, and the ways to do so: all at once, or message by message."""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import msgspec

from gateway.core.errors import InvalidRequest
from gateway.downstream.cut_out import may_hold_long_texts
from gateway.downstream.long_texts import LONG_BYTES, SLICE_BYTES, long_text, take_a_break
from gateway.downstream.wire.members import decoded
from gateway.downstream.wire.request import encoded

_NULL = msgspec.Raw(b"null")

INSPECTED_ROLES = frozenset({"assistant", "tool"})
"""Roles whose texts the chat template inspects: they are always decoded, whatever their length."""

TEMPLATE_KWARGS = "chat_template_kwargs"
SALT = "cache_salt"
ASIDE = frozenset(
    {"tools", "stream_options", TEMPLATE_KWARGS, "reasoning_effort", "mm_processor_kwargs", SALT}
)
"""Members of a chat that are read but not part of `Chat`. Most requests have none of them."""


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


class _LongMessage(Message, gc=False):
    """`Message` whose content may be a long text."""

    content: msgspec.Raw = _NULL  # type: ignore[assignment]


class _LongChat(Chat, gc=False):
    """`Chat` with `_LongMessage`s."""

    messages: list[_LongMessage]  # type: ignore[assignment]


CHAT = msgspec.json.Decoder(Chat)
_LONG_CHAT = msgspec.json.Decoder(_LongChat)
_MESSAGE = msgspec.json.Decoder(_LongMessage)
_CONTENT = msgspec.json.Decoder(str | list[Any] | None)
UNFIT = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def chat_of(members: Mapping[str, msgspec.Raw]) -> Chat | None:
    """Decode a chat from its members; None: it is long, or must be decoded member by member."""
    body = encoded(members)
    return None if len(body) > SLICE_BYTES or may_hold_long_texts(body) else chat_in(body, at_once=True)


def chat_in(body: bytes, *, at_once: bool) -> Chat | None:
    """Decode a chat; None if it must be decoded member by member.

    `at_once`: decode all of it, in half the time of decoding its messages one by one.
    """
    try:
        if at_once:
            return CHAT.decode(body)
        chat = _LONG_CHAT.decode(body)
        take_a_break(len(body))
        messages = [_opened(message) for message in chat.messages]
    except UNFIT:
        return None
    return Chat(chat.model, messages, chat.stream, chat.max_tokens, chat.max_completion_tokens, chat.n)


def _opened(message: _LongMessage) -> Message:
    """Return a message with its content decoded, or as a long text.

    Content of an assistant or a tool is always decoded, because the template inspects it.

    Raises:
        msgspec.DecodeError, UnicodeDecodeError, RecursionError: it must be decoded separately.
    """
    raw = message.content
    content: Any
    if (
        len(memoryview(raw)) < LONG_BYTES
        or bytes(memoryview(raw)[:1]) != b'"'
        or message.tool_calls is not None
        or message.role in INSPECTED_ROLES
    ):
        content = _CONTENT.decode(raw)
    else:
        content = long_text(raw)
    return Message(message.role, content, message.tool_calls, message.reasoning, message.reasoning_content)


def message_of(raw: msgspec.Raw, where: str) -> Message:
    """Decode a single message. `where`: its place, for errors.

    Raises:
        InvalidRequest: it is no message.
    """
    with suppress(*UNFIT):
        return _opened(_MESSAGE.decode(raw))
    message = decoded(raw, where)
    if not isinstance(message, dict):
        raise InvalidRequest("A message must be an object.", param=where)
    role, content, calls = message.get("role"), message.get("content"), message.get("tool_calls")
    if not isinstance(role, str):
        raise InvalidRequest("A message needs a `role`.", param=f"{where}.role")
    if not isinstance(content, str | list | None):
        raise InvalidRequest("`content` must be a string or an array of parts.", param=f"{where}.content")
    thoughts = message.get("reasoning"), message.get("reasoning_content")
    return Message(role, content, calls, *thoughts)
