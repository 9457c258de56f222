"""Finds the long strings that most long requests are made of, and cuts them out of the body.

To read a long body takes a walk over each of its bytes, and nearly all of them are in a few strings as a
rule: the document that somebody asks about, or images. So the ends of those are looked for, from both ends
of the body, what is around them is read as any small body is, and each is walked over once. Where one turns
out to be more than one string, they are looked for message by message; as a last resort the body is read as a
whole.
"""

import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from gateway.core.value import valueclass
from gateway.downstream.long_texts import LONG_BYTES, NEAR_BYTES, is_escaped, is_plain

MARK: Final = secrets.token_hex(16)
"""Stands, with a number of NUMBER_CHARS digits, where a string was. Made anew by each process: nobody can
send it."""

NUMBER_CHARS = 4

ESCAPED_MAX = 64
"""A string with so many quotes in it is taken for a long one, as is one that is long without them."""

QUOTES_MAX = 512
"""Looked at on either side, in 0.1 ms; with more of them around it, a text is not looked for."""

WINDOW_BYTES = LONG_BYTES // 2
"""Any long string fills one of these, of which a body is made, from end to end."""

_QUOTE = b'"'
_UNESCAPED = (b',"', b' "')
_CONTENT = b'"content"'  # not within a text, where there would be backslashes
_MARK = MARK.encode()
_MEDIA_OPENS = re.compile(rb'"(?:url|image_url|audio_url|data)"\s*:\s*"$')
_OPENS_BYTES = 64  # with the white space that there may be

Span = tuple[int, int]
"""Where a string begins in a body, and where it ends, without its quotes."""


@valueclass(frozen=True, slots=True)
class CutOut:
    """A body without the long strings in it.

    Attributes:
        rest: The body, with MARK and a number in the place of each.
        texts: What was there, as it was sent, without its quotes; by number.
    """

    rest: bytes
    texts: Sequence[memoryview]

    def put_back(self, part: bytes) -> bytes:
        """Return a part of the rest, or one made of it, with the strings in their places again."""
        first, *others = part.split(_MARK)
        if not others:
            return part
        found: list[bytes | memoryview] = [first]
        for other in others:
            found += (self.texts[int(other[:NUMBER_CHARS])], memoryview(other)[NUMBER_CHARS:])
        return b"".join(found)


def number_of(value: object) -> int | None:
    """Return the number of the string that a value stands for; None: it stands for itself."""
    return int(value[len(MARK) :]) if isinstance(value, str) and value.startswith(MARK) else None


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


def cuts_of(body: bytes) -> Iterator[CutOut]:
    """Yield a body without its long strings; then once more, should what has quotes be several of them.

    It is not known yet whether each is one string, nor whether the body is JSON. If what was cut out is the
    inside of strings, and the rest is JSON with marks as strings in it, then the body is JSON, and means just
    that: wherever the ends were guessed.
    """
    for spans in _guesses(body):
        if (cut := _cut_out(body, spans)) is not None:
            yield cut


def bytes_beside_media(body: bytes) -> int:
    """Return how large a body, which may be JSON, is beside its images and recordings."""
    return len(body) - max((_media_bytes(body, spans) for spans in _guesses(body)), default=0)


def _media_bytes(body: bytes, spans: Iterable[Span]) -> int:
    """Return how much of some long strings are images and recordings, in which nothing is escaped."""
    view = memoryview(body)
    return sum(
        end - start
        for start, end in spans
        if _MEDIA_OPENS.search(body, max(0, start - _OPENS_BYTES), start) and is_plain(view[start:end])
    )


def _guesses(body: bytes) -> Iterator[Sequence[Span]]:
    """Yield where the long strings of a body may be; at least one each time."""
    spans = _spans(body, 0, len(body))
    if spans:
        yield spans
    apart = [span for begin, end in _messages(body) for span in _spans(body, begin, end)]
    if apart and apart != [*spans]:
        yield apart


def _cut_out(body: bytes, spans: Sequence[Span]) -> CutOut | None:
    view = memoryview(body)
    rest: list[bytes | memoryview] = []
    at = 0
    for number, (start, end) in enumerate(spans):
        rest += (view[at:start], b"%b%0*d" % (_MARK, NUMBER_CHARS, number))
        at = end
    rest.append(view[at:])
    joined = b"".join(rest)
    if joined.count(_MARK) != len(spans):
        return None  # somebody has sent it after all
    return CutOut(joined, tuple([view[start:end] for start, end in spans]))


def _messages(body: bytes) -> Iterator[Span]:
    """Yield what is likely to be a message's content, with what follows it, where that is long."""
    at = body.find(_CONTENT)
    while at >= 0:
        following = body.find(_CONTENT, at + 1)
        end = len(body) if following < 0 else following
        if end - at > LONG_BYTES:
            yield at, end
        at = following


def _spans(body: bytes, begin: int, end: int) -> Sequence[Span]:
    """Return where the long strings are in a part of a body that begins with the quote of one, or before it.

    In order; of those with quotes in them, at most one is found.
    """
    before, start = _from_the_front(body, begin, end)
    if start == 0:
        return before
    behind, last = _from_the_back(body, start, end)
    middle = [(start, last)] if last - start + 2 >= LONG_BYTES else []
    return (*before, *middle, *reversed(behind))


def _from_the_front(body: bytes, begin: int, end: int) -> tuple[list[Span], int]:
    """Return the long strings without quotes, and where the first other begins; 0: none was found."""
    found: list[Span] = []
    opens = at = body.find(_QUOTE, begin, end)
    escaped = 0
    for _ in range(QUOTES_MAX):
        if opens < 0:
            return found, 0
        at = body.find(_QUOTE, at + 1, min(end, opens + LONG_BYTES))
        if at < 0 or escaped == ESCAPED_MAX:
            at = body.find(_QUOTE, opens + LONG_BYTES, end) if at < 0 and not escaped else -1
            if at < 0 or is_escaped(body, at):
                return found, opens + 1
            found.append((opens + 1, at))
        elif is_escaped(body, at):
            escaped += 1
            continue
        opens = at = body.find(_QUOTE, at + 1, end)
        escaped = 0
    return [], 0


def _from_the_back(body: bytes, start: int, end: int) -> tuple[list[Span], int]:
    """Return likewise those behind `start`, the last one first, and where the one that begins there ends."""
    found: list[Span] = []
    closes = at = body.rfind(_QUOTE, start, end)
    escaped = 0
    for _ in range(QUOTES_MAX):
        if closes < 0:
            return [], 0
        at = body.rfind(_QUOTE, max(start, closes - LONG_BYTES), at)
        if at < 0 or escaped == ESCAPED_MAX:
            at = body.rfind(_QUOTE, start, closes - LONG_BYTES) if at < 0 and not escaped else -1
            if at < 0 or is_escaped(body, at):
                return found, closes
            found.append((at + 1, closes))
        elif is_escaped(body, at):
            escaped += 1
            continue
        closes = at = body.rfind(_QUOTE, start, at)
        escaped = 0
    return [], 0
