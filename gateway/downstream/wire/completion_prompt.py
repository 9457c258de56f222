"""The prompt of a completion: texts or token ids, one or several."""

import msgspec

from gateway.core.errors import BodyTooLarge, InvalidRequest
from gateway.core.request import Prompt
from gateway.downstream.long_texts import LONG_BYTES, TEXT_BYTES_MAX
from gateway.downstream.occurrences import occurrences
from gateway.downstream.wire.members import Fields, check_values, decoded, items_of
from gateway.downstream.wire.rules import WireRules

_NO_PROMPT = "`prompt` must be a string, an array of strings or of tokens."
_NEAR = 64
"""Bytes in which the beginning of a list in a list is looked for. A choice that leaves room for white
space."""
_decode_ids = msgspec.json.Decoder(list[int]).decode


def prompt_of_completion(fields: Fields, rules: WireRules) -> tuple[Prompt, int]:
    """Return the prompt of a completion (of several lists of ids, the longest), and the number of them.

    Raises:
        InvalidRequest: it is no prompt, or has too many items.
        BodyTooLarge: it is longer than any text a model can read.
    """
    raw = fields.raw("prompt")
    if raw is not None and bytes(memoryview(raw)[:1]) == b"[":
        written = bytes(raw)
        if occurrences(b",", written, rules.token_ids_max) >= rules.token_ids_max:
            message = f"`prompt` has more than {rules.token_ids_max} items."
            raise InvalidRequest(message, code="too_many_items", param="prompt")
        tokens = _token_ids(written)
        if tokens is not None:
            return Prompt(raw_tokens=tokens), 1
        if written[1:_NEAR].lstrip()[:1] == b"[":
            lists = items_of(raw, "prompt", len(written))
            rules.check_choices(len(lists))
            return Prompt(raw_tokens=max(map(_length, lists))), len(lists)
        check_values(written)
    if raw is not None and len(memoryview(raw)) > TEXT_BYTES_MAX:
        raise BodyTooLarge(f"`prompt` is longer than {TEXT_BYTES_MAX:,} bytes.", param="prompt")
    prompt = None if raw is None else decoded(raw, "prompt")
    match prompt:
        case str():
            return Prompt(raw_texts=(prompt,)), 1
        case [int(), *_] if all(isinstance(token, int) for token in prompt):
            return Prompt(raw_tokens=len(prompt)), 1
        case [str(), *_] if all(isinstance(text, str) for text in prompt):
            return Prompt(raw_texts=tuple(prompt)), len(prompt)
    raise InvalidRequest(_NO_PROMPT, param="prompt")


def _length(raw: msgspec.Raw) -> int:
    """Return the number of token ids in an array of a list of prompts."""
    written = bytes(raw)
    tokens = _token_ids(written)
    if tokens is not None:
        return tokens
    check_values(written)
    ids = decoded(raw, "prompt")
    if not isinstance(ids, list):
        raise InvalidRequest(_NO_PROMPT, param="prompt")
    return len(ids)


def _token_ids(written: bytes) -> int | None:
    """Return the number of token ids in a long array; None: it is short, or has other items.

    Decoding a million of them at once would hold the GIL for 30 ms.
    """
    if len(written) < LONG_BYTES:
        return None
    tokens, at = 0, 1
    while at < len(written):
        comma = written.find(b",", at + LONG_BYTES)
        end = len(written) - 1 if comma < 0 else comma
        try:
            tokens += len(_decode_ids(b"[%b]" % written[at:end]))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        at = end + 1
    return tokens
