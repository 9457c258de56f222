"""Finds the long strings that make up most long requests, and cuts them out of the body.

Decoding a long body scans every byte, nearly all of which are usually in a few strings: documents, images.
So these strings are located from both ends of the body, the rest is decoded like any small body, and each
string is scanned only once. If a supposed string turns out to be several, strings are located message by
message; as a last resort the body is decoded as a whole.
"""

import re
import secrets
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final

from gateway.core.value import valueclass
from gateway.core.value_limit import is_escaped
from gateway.downstream.long_texts import LONG_BYTES, NEAR_BYTES, TEXT_BYTES_MAX

MARK: Final = secrets.token_hex(16)
"""Placeholder for a string, followed by a number of NUMBER_CHARS digits. Random per process: callers cannot
send it."""

NUMBER_CHARS = 4
CUTS_MAX = 10**NUMBER_CHARS
"""Digits of a placeholder's number, and so the maximum strings that are cut out. A choice: more images than
any engine takes."""

ESCAPED_MAX = 64
"""A string with this many escaped quotes is assumed to be long, and not scanned further. A choice: the effort
of finding its end against cutting out a short one."""

QUOTES_MAX = 8_192
"""Maximum strings and escaped quotes examined from either end, 512 in 0.1 ms. A choice: behind a document may
be the tools of an agent, with some 25 strings each."""

MEDIA_BYTES = 4_096
"""Shorter images and recordings are read like any other string. A choice: cutting them out saves nothing."""

MEDIA_QUOTES_MAX = 262_144
"""Maximum quotes among which images and recordings are looked for. A choice: it takes 40 ms, in a thread."""

WINDOW_BYTES = LONG_BYTES // 2
"""The body is divided into windows of this size: any long string fills at least one of them completely."""

_QUOTE = b'"'
_UNESCAPED = (b',"', b' "')
_CONTENT = b'"content"'  # cannot occur within text, where quotes are escaped
_MARK = MARK.encode()
_MEDIA_OPENS = re.compile(rb'"(?:url|image_url|audio_url|data)"\s*:\s*"$')

_OPENS_BYTES = 64
"""Bytes before an image in which its member's name is looked for. A choice: twice the longest, for white
space."""

_MEDIA_CHARS = (
    b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
    b"+/=-_\\:;,. "  # base64, escapes, the beginning of a data URL
)
_MEDIA_ESCAPES = (rb"\/", rb"\u002")  # by PHP and .NET

Span = tuple[int, int]
"""Start and end of a string in a body, without its quotes."""


@valueclass(frozen=True, slots=True)
class CutOut:
    """A body without its long strings.

    Attributes:
        rest: The body, with MARK and a number in place of each long string.
        texts: The strings by number, as received, without quotes.
    """

    rest: bytes
    texts: Sequence[memoryview]

    def put_back(self, part: bytes) -> bytes:
        """Return `part`, taken or derived from `rest`, with the strings restored."""
        first, *others = part.split(_MARK)
        if not others:
            return part
        found: list[bytes | memoryview] = [first]
        for other in others:
            found += (self.texts[int(other[:NUMBER_CHARS])], memoryview(other)[NUMBER_CHARS:])
        return b"".join(found)


def number_of(value: object) -> int | None:
    """Return the number of the string that a value is a placeholder for, or None."""
    return int(value[len(MARK) :]) if isinstance(value, str) and value.startswith(MARK) else None


def may_hold_long_texts(body: bytes) -> bool:
    """Return whether a body, which may be JSON, may contain a long string. False is certain.

    Quotes within strings are escaped: a quote preceded by a space or a comma begins or ends a string. For a
    conversation with many messages, this usually takes 10 us.
    """
    marks = sorted(_UNESCAPED, key=lambda mark: body.find(mark, 0, NEAR_BYTES) < 0)  # the likelier one first
    for at in range(0, len(body) - WINDOW_BYTES + 1, WINDOW_BYTES):
        if all(body.find(mark, at, at + WINDOW_BYTES) < 0 for mark in marks):
            return True
    return False


def cuts_of(body: bytes) -> Iterator[CutOut]:
    """Yield a body without its long strings: cut as a whole, then cut message by message.

    The cuts are guesses: a supposed string may be several, and the body may not be JSON at all. But if the
    parts that were cut out are the inside of strings, and the rest is JSON with placeholders as strings, then
    the body is JSON with the same meaning, no matter where the cuts were made.
    """
    for spans in _guesses(body):
        if (cut := _cut_out(body, spans)) is not None:
            yield cut


def bytes_beside_media(body: bytes) -> int:
    """Return the size of a body, which may be JSON, without its images and recordings."""
    return len(body) - sum(end - start for start, end in _media(body))


def _media(body: bytes) -> Iterator[Span]:
    """Yield the images and recordings of a body, whatever is around them."""
    view = memoryview(body)
    at = body.find(_QUOTE)
    for _ in range(MEDIA_QUOTES_MAX):
        following = body.find(_QUOTE, at + 1)
        if following < 0:
            return
        start = at + 1
        if (
            following - start >= MEDIA_BYTES
            and _MEDIA_OPENS.search(body, max(0, start - _OPENS_BYTES), start)
            and _is_media(view[start:following])
        ):
            yield start, following
        at = following


def _is_media(view: memoryview) -> bool:
    """Return whether a string in a body has only what base64 and the beginning of a data URL have."""
    for at in range(0, len(view), LONG_BYTES):
        piece = bytes(view[at : at + LONG_BYTES])
        others = piece.count(b"\\") - sum(map(piece.count, _MEDIA_ESCAPES))
        if piece.translate(None, _MEDIA_CHARS) or others > 1:  # one may be cut in two
            return False
    return True


def _guesses(body: bytes) -> Iterator[Sequence[Span]]:
    """Yield guesses of the positions of a body's long strings, each with at least one."""
    spans = _spans(body, 0, len(body))
    if spans:
        yield spans
    apart = [span for begin, end in _messages(body) for span in _spans(body, begin, end)]
    if apart and apart != [*spans]:
        yield apart
    if len(body) > TEXT_BYTES_MAX and (media := [*islice(_media(body), CUTS_MAX)]):
        yield media


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
        return None  # a caller has sent the placeholder by chance
    return CutOut(joined, tuple([view[start:end] for start, end in spans]))


def _messages(body: bytes) -> Iterator[Span]:
    """Yield the long parts from one `"content"` key to the next. Each probably has a message's content."""
    at = body.find(_CONTENT)
    while at >= 0:
        following = body.find(_CONTENT, at + 1)
        end = len(body) if following < 0 else following
        if end - at > LONG_BYTES:
            yield at, end
        at = following


def _spans(body: bytes, begin: int, end: int) -> Sequence[Span]:
    """Return the long strings in a part of a body, in order. The part must not begin within a string.

    Of the strings with escaped quotes, at most one is found.
    """
    before, start = _from_the_front(body, begin, end)
    if start == 0:
        return before
    behind, last = _from_the_back(body, start, end)
    middle = [(start, last)] if last - start + 2 >= LONG_BYTES else []
    return (*before, *middle, *reversed(behind))


def _from_the_front(body: bytes, begin: int, end: int) -> tuple[list[Span], int]:
    """Return the long strings without quotes, and the start of the first other string; 0 if there is none."""
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
    return found, 0


def _from_the_back(body: bytes, start: int, end: int) -> tuple[list[Span], int]:
    """Return the long strings after `start`, last one first, and the end of the string beginning there."""
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
    return found, 0
