"""Decodes the members of a non-streamed answer that the gateway reads."""

from typing import Annotated, Any

import msgspec

from gateway.core.answers import TOKENS_MAX, Answer, read_answer
from gateway.core.usage import Usage

_Count = Annotated[int, msgspec.Meta(ge=0, le=TOKENS_MAX)]


class _Details(msgspec.Struct):
    cached_tokens: _Count = 0
    reasoning_tokens: _Count = 0


class _Usage(msgspec.Struct):
    prompt_tokens: _Count
    completion_tokens: _Count = 0
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None


class _Finished(msgspec.Struct):
    finish_reason: str


class _Ordinary(msgspec.Struct):
    """An answer without anything unusual: no error, every choice finished, usage as it should be."""

    choices: list[_Finished]
    usage: _Usage
    error: None = None
    detail: None = None
    object: str | None = None


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


_UNFIT = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_decode_ordinary = msgspec.json.Decoder(_Ordinary).decode
_decode_whole = msgspec.json.Decoder(_Whole).decode


def read_whole(body: bytes) -> Answer | None:
    """Return a non-streamed answer, as `answers.read_answer` reads it; None if it is not one."""
    try:
        whole = _decode_ordinary(body)
    except _UNFIT:
        return read_answer(decode_answer(body))
    if whole.object == "error":
        return read_answer(decode_answer(body))
    usage = whole.usage
    prompt, completion = usage.prompt_tokens_details, usage.completion_tokens_details
    return Answer(
        None,
        tuple([choice.finish_reason for choice in whole.choices]),
        Usage(
            usage.prompt_tokens,
            usage.completion_tokens,
            0 if prompt is None else prompt.cached_tokens,
            0 if completion is None else completion.reasoning_tokens,
        ),
    )


def decode_answer(body: bytes) -> object:
    """Return the members of a non-streamed answer that the gateway reads; None if it is not a JSON object."""
    try:
        return msgspec.to_builtins(_decode_whole(body))
    except _UNFIT:
        return None
