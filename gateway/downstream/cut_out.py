"""Finds the one long text that most long requests are made of, and cuts it out of the body.

To read a long body takes a walk over each of its bytes, and nearly all of them are one string as a rule: the
document that somebody asks about. So the ends of that string are looked for, from both ends of the body,
what is around it is read as any small body is, and the text is walked over once: when it is decoded. Where it
turns out to be more than one string, the body is read as a whole.
"""

import secrets
from typing import Final

from gateway.core.value import valueclass
from gateway.downstream.long_texts import LONG_BYTES, NEAR_BYTES, is_escaped

MARK: Final = secrets.token_hex(16)
"""Stands where the text was. Made anew by each process: nobody can send it."""

ESCAPED_MAX = 64
"""A string with so many quotes in it is taken for the long one, as is one that is long without them."""

QUOTES_MAX = 512
"""Looked at on either side, in 50 us; with more of them around it, a text is not looked for."""

WINDOW_BYTES = LONG_BYTES // 2
"""Any long string fills one of these, of which a body is made, from end to end."""

_QUOTE = b'"'
_UNESCAPED = (b',"', b' "')
_MARK = MARK.encode()


@valueclass(frozen=True, slots=True)
class CutOut:
    """A body without the longest text in it.

    Attributes:
        rest: The body, with MARK in the text's place.
        text: What was there, as it was sent, without its quotes.
    """

    rest: bytes
    text: memoryview

    def put_back(self, part: bytes) -> bytes:
        """Return a part of the rest, or one made of it, with the text in its place again."""
        before, mark, behind = part.partition(_MARK)
        return b"".join((before, self.text, behind)) if mark else part


def may_hold_long_texts(body: bytes) -> bool:
    """Return whether a string of a body, which may be JSON, may be a long one. False is certain.

    Within a string there is a backslash before every quote: wherever there is a space or a comma before one,
    a string begins or ends. As a rule that is seen in 10 us, where a conversation is of many messages.
    """
    marks = sorted(_UNESCAPED, key=lambda mark: body.find(mark, 0, NEAR_BYTES) < 0)  # as this body is written
    for at in range(0, len(body) - WINDOW_BYTES + 1, WINDOW_BYTES):
        if all(body.find(mark, at, at + WINDOW_BYTES) < 0 for mark in marks):
            return True
    return False


def cut_out(body: bytes) -> CutOut | None:
    """Return a body without its long text; None where there is none that is easily found.

    It is not known yet whether that is one text, nor whether the body is JSON. If what was cut out is the
    inside of a string, and the rest is JSON with MARK as a string in it, then the body is JSON, and means
    just that: wherever the ends were guessed.
    """
    start = _opening(body)
    end = 0 if start == 0 else _closing(body, start)
    if end - start + 2 < LONG_BYTES:
        return None
    view = memoryview(body)
    return CutOut(b"".join((view[:start], _MARK, view[end:])), view[start:end])


def _opening(body: bytes) -> int:
    """Return where the first long text begins; 0: nowhere near the beginning."""
    opens = at = body.find(_QUOTE)
    escaped = 0
    for _ in range(QUOTES_MAX):
        if opens < 0:
            return 0
        at = body.find(_QUOTE, at + 1, opens + LONG_BYTES)
        if at < 0 or escaped == ESCAPED_MAX:
            return opens + 1
        if is_escaped(body, at):
            escaped += 1
        else:
            opens = at = body.find(_QUOTE, at + 1)
            escaped = 0
    return 0


def _closing(body: bytes, start: int) -> int:
    """Return where the last long text ends, which does not before `start`; 0: nowhere near the end."""
    closes = at = body.rfind(_QUOTE, start)
    escaped = 0
    for _ in range(QUOTES_MAX):
        if closes < 0:
            return 0
        at = body.rfind(_QUOTE, max(start, closes - LONG_BYTES), at)
        if at < 0 or escaped == ESCAPED_MAX:
            return closes
        if is_escaped(body, at):
            escaped += 1
        else:
            closes = at = body.rfind(_QUOTE, start, at)
            escaped = 0
    return 0
