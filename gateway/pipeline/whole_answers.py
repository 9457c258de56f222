"""Decodes the members of a non-streamed answer that the gateway reads."""

from typing import Annotated, Any

import msgspec

from gateway.core.answers import TOKENS_MAX, Answer, error_of, usage_of
from gateway.core.decoding import decode
from gateway.core.usage import Usage

MEMBER_BYTES_MAX = 1024 * 1024
"""Maximum bytes of an error, or of a usage. A choice: it has room for an error that quotes a long prompt."""

_Count = Annotated[int, msgspec.Meta(ge=0, le=TOKENS_MAX)]


class _Details(msgspec.Struct):
    cached_tokens: _Count = 0
    reasoning_tokens: _Count = 0


class _Usage(msgspec.Struct):
    prompt_tokens: _Count
    completion_tokens: _Count = 0
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None


class _Finished(msgspec.Struct, gc=False):
    finish_reason: str


class _Ordinary(msgspec.Struct):
    """An answer without anything unusual: no error, every choice finished, usage as it should be."""

    choices: list[_Finished]
    usage: _Usage
    error: None = None
    detail: None = None
    object: str | None = None


class _Choice(msgspec.Struct, gc=False):
    finish_reason: str | float | bool | None


_NULL = msgspec.Raw(b"null")


class _Whole(msgspec.Struct):
    """The members that are read; msgspec skips the rest without allocating it."""

    error: msgspec.Raw = _NULL
    object: msgspec.Raw = _NULL
    message: msgspec.Raw = _NULL
    choices: list[_Choice] | None = None
    usage: msgspec.Raw = _NULL


_UNFIT = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_decode_ordinary = msgspec.json.Decoder(_Ordinary).decode
_decode_whole = msgspec.json.Decoder(_Whole).decode


def read_whole(body: bytes) -> Answer | None:
    """Return a non-streamed answer; None if it has neither an error nor a list of choices."""
    try:
        whole = _decode_ordinary(body)
    except _UNFIT:
        return read_by_member(body)
    if whole.object == "error":
        return read_by_member(body)
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


def read_by_member(body: bytes) -> Answer | None:
    """Return an answer that need not be an ordinary one, as `read_whole`.

    Every choice must have a `finish_reason`, and no other member that is read may be long. Otherwise, a body
    of 60 MB could take 5 GB to decode, and hold up the event loop for 12 s.
    """
    try:
        whole = _decode_whole(body)
        error = error_of(
            {
                "error": _decoded(whole.error),
                "object": _decoded(whole.object),
                "message": _decoded(whole.message),
            }
        )
        usage = usage_of(_decoded(whole.usage))
    except _UNFIT:
        return None
    if error is None and whole.choices is None:
        return None
    reasons: list[Any] = [choice.finish_reason for choice in whole.choices or ()]
    return Answer(error, tuple(reasons), usage)


def _decoded(member: msgspec.Raw) -> object:
    """Return the value of a member. Raises ValidationError if it is too long."""
    if len(memoryview(member)) > MEMBER_BYTES_MAX:
        raise msgspec.ValidationError("a member is too long")
    return decode(member)
