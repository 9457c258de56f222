"""Whole answers, decoded as far as they are looked at."""

from typing import Any

import msgspec


class _Choice(msgspec.Struct):
    finish_reason: Any = None


class _Whole(msgspec.Struct):
    """The members of a whole answer that are looked at; msgspec skips the rest without building it."""

    error: Any = None
    detail: Any = None
    object: Any = None
    message: Any = None
    choices: list[_Choice] | None = None
    usage: Any = None


_decode_whole = msgspec.json.Decoder(_Whole).decode


def decode_answer(body: bytes) -> object:
    """Return what a whole answer says, as far as it is looked at; None: it is not JSON, or none of ours."""
    try:
        return msgspec.to_builtins(_decode_whole(body))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
