"""Half characters in a request body, replaced as engines do.

Half an emoji, which JavaScript cuts off, is legal JSON: one of the two escapes that make a character. Strict
decoders refuse it all the same. All else keeps its bytes.
"""

import re

from gateway.downstream.long_texts import SLICE_BYTES, is_escaped, take_a_break

LOOKS_MAX = 10_000
"""A body with more that looks like half a character is no text; 0.6 us each."""

_FIRST, _SECOND = rb"\\u[dD][89abAB][0-9a-fA-F]{2}", rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_FIRST_HALF = re.compile(_FIRST)
# Begins with what never varies, which is found ten times as fast. Pairs are passed over here, because a text
# may be made of them; what only looks like a pair, behind backslashes, is not.
_LONE_HALF = re.compile(
    rb"\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?!%b)|[c-fC-F][0-9a-fA-F]{2}(?<![^\\]%b%b))"
    % (_SECOND, _FIRST, _SECOND)
)
_HALF_BYTES = 6
_INSTEAD = rb"\ufffd"


def mended(body: bytes) -> bytes | None:
    """Return a body with each half character in it replaced; None if there is none, or no end of them."""
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
    """Return whether the escape there ends a pair."""
    first = at - _HALF_BYTES
    return (
        first >= 0
        and body[at + 3] in b"cdefCDEF"
        and _FIRST_HALF.match(body, first) is not None
        and not is_escaped(body, first)
    )
