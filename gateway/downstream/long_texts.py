"""Long texts of a body: looked at where they lie in it, and decoded piece by piece when they are counted.

Decoded at once, a document takes its size again, and four times that with a single emoji in it; and the
interpreter does nothing else meanwhile. What waits to be counted, or for a backend, takes none of it.
"""

import codecs
import time
from collections.abc import Iterator
from functools import partial

import msgspec

from gateway.core.values import LongText

LONG_BYTES = 65_536
"""From here on a text is a long one."""

PIECE_BYTES = 63_984
"""What is decoded at once, as it was sent, in 30 us: 62 x 1032, so that long runs of blanks or line ends,
which count by 31, lose nothing to a cut."""

SLICE_BYTES = 1_310_720
"""What is looked at without a break, in 0.5 ms. A body up to this is read by the event loop itself."""

BREAK_S = 0.0001
"""Giving the interpreter up for nothing is no break: whoever waits for it takes longer to wake up."""

_UNSURE_BYTES = 12  # a cut falls into an escape of one character at most


def long_text(raw: msgspec.Raw) -> LongText:
    """Return a long text, given as the JSON string that it was sent as.

    Raises:
        UnicodeDecodeError: it is not UTF-8. Nothing else can be wrong with what was cut out of a body.
    """
    view = memoryview(raw)[1:-1]
    key, decoder = 0, codecs.getincrementaldecoder("utf-8")()
    for at in range(0, len(view), SLICE_BYTES):
        take_a_break(at)
        data = bytes(view[at : at + SLICE_BYTES])
        decoder.decode(data, at + SLICE_BYTES >= len(view))
        key = hash((key, data))
    return LongText(len(view), key, partial(_stripped, raw))


def take_a_break(done_bytes: int) -> None:
    """Let the event loop have its turn, once a thread has looked at so much."""
    if done_bytes >= SLICE_BYTES:
        time.sleep(BREAK_S)


def _stripped(raw: msgspec.Raw) -> Iterator[str]:
    """Yield a text in pieces, without the white space at its ends."""
    blanks: list[str] = []  # at the end of what was yielded, unless more follows
    has_begun = False
    for piece in _pieces(raw):
        if not has_begun:
            piece = piece.lstrip()
        text = piece.rstrip()
        if not text:
            blanks.append(piece)
            continue
        yield "".join((*blanks, text)) if has_begun else text
        has_begun, blanks = True, [piece[len(text) :]]


def _pieces(raw: msgspec.Raw) -> Iterator[str]:
    view = memoryview(raw)[1:-1]
    start = 0
    while start < len(view):
        data = bytes(view[start : start + PIECE_BYTES])
        if start + PIECE_BYTES < len(view):
            data = data[: _cut(data)]
        # Cut within a character, it cannot be decoded; the rest of that character goes to the next piece.
        for less in range(min(_UNSURE_BYTES, len(data))):
            try:
                text = msgspec.json.decode(b'"%b"' % data[: len(data) - less], type=str)
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
            yield text
            start += len(data) - less
            break
        else:
            raise AssertionError("a text that was read before cannot be")


def _cut(data: bytes) -> int:
    """Return where a piece had better end: behind its last line, else before its last word, else anywhere."""
    half = len(data) // 2
    end = data.rfind(b"\\n", half)
    # An escaped line end has an odd number of backslashes.
    if end >= 0 and (end + 1 - len(data[: end + 1].rstrip(b"\\"))) % 2:
        return end + 2
    space = data.rfind(b" ", half)
    # A word carries the space before it.
    return space if space >= 0 and data[space - 1] != 0x20 else len(data)
