"""Decodes the members of a non-streamed answer that the gateway reads."""

from typing import Any

import msgspec


class _Choice(msgspec.Struct):
    finish_reason: Any = None


class _Whole(msgspec.Struct):
    """The members that are read; msgspec skips the rest without allocating it."""

    error: Any = None
    detail: Any = None
    object: Any = None
    message: Any = None
    choices: list[_Choice] | None = None
    usage: Any = None


_decode_whole = msgspec.json.Decoder(_Whole).decode


def decode_answer(body: bytes) -> object:
    """Return the members of a non-streamed answer that the gateway reads; None if it is not a JSON object."""
    try:
        return msgspec.to_builtins(_decode_whole(body))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
