"""Replaces lone surrogate escapes in a request body, as engines do.

Half of an emoji, as truncated by JavaScript, is valid JSON: one of the two escapes of a surrogate pair.
Strict decoders still reject it. All other bytes are left unchanged.
"""

import re

from gateway.core.value_limit import is_escaped
from gateway.downstream.long_texts import SLICE_BYTES, take_a_break

LOOKS_MAX = 10_000
"""Maximum escapes examined, at 0.6 us each. A choice: a body with more of them is not text."""

_FIRST, _SECOND = rb"\\u[dD][89abAB][0-9a-fA-F]{2}", rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_FIRST_HALF = re.compile(_FIRST)
# Starts with a constant prefix, which is found ten times as fast. Pairs are skipped here, because a text may
# consist of them; escaped backslashes that only look like a pair are not.
_LONE_HALF = re.compile(
    rb"\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?!%b)|[c-fC-F][0-9a-fA-F]{2}(?<![^\\]%b%b))"
    % (_SECOND, _FIRST, _SECOND)
)

_HALF_BYTES = 6
"""Bytes of an escaped half, as `\\ud83d`."""

_INSTEAD = rb"\ufffd"


def replace_lone_surrogates(body: bytes) -> bytes | None:
    """Return a body with all lone surrogates replaced; None if there are none, or too many."""
    parts: list[bytes] = []
    done = looks = 0
    for begin in range(0, len(body), SLICE_BYTES):
        take_a_break(begin)
        end = begin + SLICE_BYTES
        for found in _LONE_HALF.finditer(body, begin, end + 2 * _HALF_BYTES):
            at = found.start()
            looks += 1
            if looks > LOOKS_MAX:
                return None
            if at < end and not is_escaped(body, at) and not _is_second(body, at):
                parts += (body[done:at], _INSTEAD)
                done = at + _HALF_BYTES
    return b"".join((*parts, body[done:])) if parts else None


def _is_second(body: bytes, at: int) -> bool:
    """Return whether the escape there completes a pair."""
    first = at - _HALF_BYTES
    return (
        first >= 0
        and body[at + 3] in b"cdefCDEF"
        and _FIRST_HALF.match(body, first) is not None
        and not is_escaped(body, first)
    )
