"""Long texts in a body: kept in place, and decoded in pieces when they are counted.

Decoding a document at once takes its size in memory again, or four times that if it contains a single emoji,
and holds the GIL meanwhile. With pieces, a queued request needs almost no additional memory.
"""

import codecs
import sys
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from threading import Lock

import msgspec

from gateway.core.request import LongText
from gateway.core.value_limit import is_escaped

LONG_BYTES = 65_536
"""Minimum size of a long text, as a JSON string with its quotes. A choice: a shorter one is decoded in well
under a millisecond."""

PIECE_BYTES = 255_936
"""Size of a piece, as received, decoded in 0.25 ms. A choice: 62 x 4128, so that runs of blanks or line
breaks, counted in units of 31, are cut without loss."""

TEXT_BYTES_MAX = 8 * 1024 * 1024
"""Maximum size decoded at once. A choice: 32 bytes per token of the longest window, 262,144. Longer texts of
messages are still decoded in pieces, in order to report their length."""

NEAR_BYTES = 4_096
"""The end of a line or word is searched in a range of this size first, because the range is copied. A choice:
prose and code have one within it."""

HASHED_BYTES = 65_536
"""Size hashed or searched at once. A choice: a copy of it stays in the CPU caches."""

SLICE_BYTES = 1_310_720
"""Size processed without a break, in 1.5 ms. A choice. A body up to this size is decoded by the event loop
itself."""

BREAK_S = 0.0001
"""How long a thread sleeps to let others run. A choice: a zero sleep is too short for the waiting thread to
wake up."""

KEPT_BYTES = 16 * 1024 * 1024
"""Maximum decoded text kept between decoding and counting, over all requests. A choice that bounds memory."""

WELL_FORMED_MAX = 16_384
"""Maximum number of texts remembered as well-formed. A choice that bounds memory."""

_UNSURE_BYTES = 12
"""Bytes before a cut that may be part of a character: the longest escape, `\\ud83d\\ude00`."""


def long_text(raw: msgspec.Raw) -> LongText:
    """Return a long text, given as a JSON string that was already validated.

    Raises:
        UnicodeDecodeError: it is not UTF-8, the only possible error left.
    """
    view = memoryview(raw)[1:-1]
    decoder = codecs.getincrementaldecoder("utf-8")()
    for at in range(0, len(view), SLICE_BYTES):
        take_a_break(at)
        decoder.decode(view[at : at + SLICE_BYTES], at + SLICE_BYTES >= len(view))
    return LongText(len(view), key_of(view), Pieces(view, ()))


def long_text_at(view: memoryview) -> LongText | None:
    """Return the long text at this position of a body, without its quotes; None if it is not a single string.

    It has not been validated: it is decoded now, unless an equal text was decoded before.
    """
    key = key_of(view)
    if _well_formed.holds((len(view), key)):
        return LongText(len(view), key, Pieces(view, ()))
    decoded: list[str] | None = []
    kept = done = 0
    try:
        for piece in _pieces(view):
            kept += sys.getsizeof(piece)
            if decoded is not None:
                decoded.append(piece)
                if kept > KEPT_BYTES:
                    decoded = None
            done = _after(done)
    except NotOneText:
        return None
    _well_formed.add((len(view), key))
    return LongText(len(view), key, Pieces(view, decoded or ()))


def whole_text(view: memoryview) -> str | None:
    """Decode the text at this position of a body; None if it is not a single string, or too long."""
    if len(view) > TEXT_BYTES_MAX:
        return None
    try:
        return _decode(_quoted(view))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def beginning_of(view: memoryview, chars: int) -> str | None:
    """Return the first characters of the text at this position; None if it is not a single string."""
    if is_plain(view):
        return bytes(view[:chars]).decode()
    shown: str | None = None
    done = 0
    try:
        for piece in _pieces(view):
            shown = piece[:chars] if shown is None else shown
            done = _after(done)
    except NotOneText:
        return None
    return shown


def is_plain(view: memoryview) -> bool:
    """Return whether these bytes of a body are the inside of a JSON string without any escapes.

    Images and recordings are.
    """
    for at in range(0, len(view), HASHED_BYTES):
        if at % SLICE_BYTES == 0:
            take_a_break(at)
        piece = _quoted(view[at : at + HASHED_BYTES])
        if b"\\" in piece or not piece.isascii():  # a cut could split an escape or a character
            return False
        try:
            _skip(piece)
        except msgspec.DecodeError:
            return False
    return True


def key_of(view: memoryview) -> int:
    """Return a hash of a text, valid only within this process."""
    key = 0
    for at in range(0, len(view), HASHED_BYTES):
        if at % SLICE_BYTES == 0:
            take_a_break(at)
        key = hash((key, bytes(view[at : at + HASHED_BYTES])))
    return key


def take_a_break(done_bytes: int) -> None:
    """Let the event loop run after a thread has processed enough."""
    if done_bytes >= SLICE_BYTES:
        time.sleep(BREAK_S)


def _after(done_bytes: int) -> int:
    """Return the bytes processed since the last break, including one more piece. Takes a break if due."""
    done_bytes += PIECE_BYTES
    if done_bytes < SLICE_BYTES:
        return done_bytes
    take_a_break(done_bytes)
    return 0


class NotOneText(Exception):
    """These bytes are not the inside of a single JSON string."""


class Pieces:
    """The pieces of a long text: kept decoded until their first use, and decoded again after that.

    White space at both ends of the text is stripped.
    """

    __slots__ = ("_decoded", "_kept_bytes", "_view")

    def __init__(self, view: memoryview, decoded: Sequence[str]) -> None:
        """Keep the decoded pieces, unless too much is kept already."""
        self._view = view
        self._kept_bytes = 0
        self._decoded: Sequence[str] = ()
        size = sum(map(sys.getsizeof, decoded))
        if _kept.take(size):
            self._kept_bytes, self._decoded = size, decoded

    def __call__(self) -> Iterator[str]:
        """Yield the pieces."""
        decoded = self._decoded
        self._forget()
        return _stripped(decoded or _pieces(self._view))

    def __del__(self) -> None:
        """Release the kept text of a request that has ended."""
        self._forget()

    def _forget(self) -> None:
        self._decoded = ()
        _kept.give_back(self._kept_bytes)
        self._kept_bytes = 0


class _Kept:
    """Accounts for kept decoded text. Thread-safe."""

    def __init__(self) -> None:
        self.bytes = 0
        self._lock = Lock()

    def take(self, size: int) -> bool:
        """Reserve `size`. Return whether there was room."""
        with self._lock:
            if self.bytes + size > KEPT_BYTES:
                return False
            self.bytes += size
            return True

    def give_back(self, size: int) -> None:
        with self._lock:
            self.bytes -= size


class _WellFormed:
    """LRU set of texts that were decoded before. Thread-safe."""

    def __init__(self) -> None:
        self._keys: OrderedDict[tuple[int, int], None] = OrderedDict()
        self._lock = Lock()

    def holds(self, key: tuple[int, int]) -> bool:
        with self._lock:
            if key not in self._keys:
                return False
            self._keys.move_to_end(key)
            return True

    def add(self, key: tuple[int, int]) -> None:
        with self._lock:
            self._keys[key] = None
            if len(self._keys) > WELL_FORMED_MAX:
                self._keys.popitem(last=False)


_kept = _Kept()
_well_formed = _WellFormed()


def _stripped(pieces: Iterable[str]) -> Iterator[str]:
    """Yield the pieces of a text, without white space at both ends of the text."""
    blanks: list[str] = []  # white space after the last yielded text, dropped unless more text follows
    has_begun = False
    for piece in pieces:
        if not has_begun:
            piece = piece.lstrip()
        text = piece.rstrip()
        if not text:
            blanks.append(piece)
            continue
        yield "".join((*blanks, text)) if has_begun and blanks else text
        has_begun, blanks = True, [piece[len(text) :]] if len(piece) > len(text) else []


def _pieces(view: memoryview) -> Iterator[str]:
    """Decode the inside of a JSON string in pieces.

    Raises:
        NotOneText: it is not the inside of a single string.
    """
    start = 0
    while start < len(view):
        end = min(start + PIECE_BYTES, len(view))
        unsure = 1
        if end < len(view):
            cut = _cut(view, end)
            end, unsure = (cut, 1) if cut else (end, _UNSURE_BYTES)
        # A cut may fall within a character, whose bytes then move to the next piece.
        for less in range(min(unsure, end - start)):
            try:
                text: str = _decode(_quoted(view[start : end - less]))
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
            yield text
            start = end - less
            break
        else:
            raise NotOneText


def _quoted(view: memoryview) -> bytes:
    return b"".join((b'"', view, b'"'))


_decode = msgspec.json.Decoder(str).decode
_skip = msgspec.json.Decoder(msgspec.Raw).decode


def _cut(view: memoryview, end: int) -> int:
    """Return the best end of a piece: before its last line break, else before its last word, else 0."""
    half = end - PIECE_BYTES // 2
    near = end - NEAR_BYTES
    return (
        _line_end(view, near, end)
        or _line_end(view, half, end)
        or _word_end(view, near, end)
        or _word_end(view, half, end)
    )


def _line_end(view: memoryview, begin: int, end: int) -> int:
    at = begin + bytes(view[begin:end]).rfind(b"\\n")
    return at if at > begin and not is_escaped(view, at) else 0


def _word_end(view: memoryview, begin: int, end: int) -> int:
    at = begin + bytes(view[begin:end]).rfind(b" ")
    # A word includes the space before it.
    return at if at > begin and view[at - 1] != _SPACE else 0


_SPACE = 0x20
"""Code of the space."""
