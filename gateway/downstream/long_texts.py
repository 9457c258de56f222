"""Long texts of a body: looked at where they lie in it, and decoded piece by piece when they are counted.

Decoded at once, a document takes its size again, and four times that with a single emoji in it; and the
interpreter does nothing else meanwhile. What waits to be counted, or for a backend, takes next to none of it.
"""

import codecs
import sys
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from threading import Lock

import msgspec

from gateway.core.values import LongText

LONG_BYTES = 65_536
"""From here on a text is a long one, as a JSON string with its quotes."""

PIECE_BYTES = 255_936
"""What is decoded at once, as it was sent, in 0.25 ms: 62 x 4128, so that long runs of blanks or line ends,
which count by 31, lose nothing to a cut."""

TEXT_BYTES_MAX = 8 * 1024 * 1024
"""What is decoded at once at most: 32 bytes for each token of the longest window, 262,144. Longer texts of
messages are still read, piece by piece, to say how long they are."""

NEAR_BYTES = 4_096
"""Where the end of a line or a word is looked for first: copied for it."""

HASHED_BYTES = 65_536
"""What is hashed or looked through at once: a copy of it stays in the processor's caches."""

SLICE_BYTES = 1_310_720
"""What is looked at without a break, in 1.5 ms. A body up to this is read by the event loop itself."""

BREAK_S = 0.0001
"""Giving the interpreter up for nothing is no break: whoever waits for it takes longer to wake up."""

KEPT_BYTES = 16 * 1024 * 1024
"""Decoded text that is kept from its reading to its counting, of all requests together."""

WELL_FORMED_MAX = 16_384
"""Texts that are known to be well-formed, by their keys."""

_UNSURE_BYTES = 12  # a cut falls into an escape of one character at most


def long_text(raw: msgspec.Raw) -> LongText:
    """Return a long text, given as the JSON string that it was sent as, read before.

    Raises:
        UnicodeDecodeError: it is not UTF-8. Nothing else can be wrong with what was cut out of a body.
    """
    view = memoryview(raw)[1:-1]
    decoder = codecs.getincrementaldecoder("utf-8")()
    for at in range(0, len(view), SLICE_BYTES):
        take_a_break(at)
        decoder.decode(view[at : at + SLICE_BYTES], at + SLICE_BYTES >= len(view))
    return LongText(len(view), key_of(view), Pieces(view, ()))


def unread_text(view: memoryview) -> LongText | None:
    """Return the long text that lies in a body there, without its quotes; None where it is no single text.

    Nothing has looked at it before: it is decoded, unless one like it was before.
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
    """Return the text that lies in a body there, all at once; None: it is no single text, or too long."""
    if len(view) > TEXT_BYTES_MAX:
        return None
    try:
        return _decode(_quoted(view))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def beginning_of(view: memoryview, chars: int) -> str | None:
    """Return the first characters of the text that lies in a body there; None where it is no single text."""
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
    """Return whether what lies in a body there is the inside of a JSON string, in which nothing is escaped.

    As an image is, or a recording.
    """
    for at in range(0, len(view), HASHED_BYTES):
        if at % SLICE_BYTES == 0:
            take_a_break(at)
        piece = _quoted(view[at : at + HASHED_BYTES])
        if b"\\" in piece or not piece.isascii():  # neither of which may be cut into
            return False
        try:
            _skip(piece)
        except msgspec.DecodeError:
            return False
    return True


def key_of(view: memoryview) -> int:
    """Return a hash of a text, which means something in this process alone."""
    key = 0
    for at in range(0, len(view), HASHED_BYTES):
        if at % SLICE_BYTES == 0:
            take_a_break(at)
        key = hash((key, bytes(view[at : at + HASHED_BYTES])))
    return key


def take_a_break(done_bytes: int) -> None:
    """Let the event loop have its turn, once a thread has looked at so much."""
    if done_bytes >= SLICE_BYTES:
        time.sleep(BREAK_S)


def _after(done_bytes: int) -> int:
    """Return how much was done without a break once another piece is."""
    done_bytes += PIECE_BYTES
    if done_bytes < SLICE_BYTES:
        return done_bytes
    take_a_break(done_bytes)
    return 0


class NotOneText(Exception):
    """What was taken for the inside of a JSON string is none."""


class Pieces:
    """What a long text is in pieces: decoded by now, until they are asked for; decoded anew from then on.

    Asked for, they come without the white space at the text's ends.
    """

    __slots__ = ("_decoded", "_kept_bytes", "_view")

    def __init__(self, view: memoryview, decoded: Sequence[str]) -> None:
        """Keep what was decoded, unless too much is kept already."""
        self._view = view
        self._kept_bytes = 0
        self._decoded: Sequence[str] = ()
        size = sum(map(sys.getsizeof, decoded))
        if _kept.take(size):
            self._kept_bytes, self._decoded = size, decoded

    def __call__(self) -> Iterator[str]:
        """Return them."""
        decoded = self._decoded
        self._forget()
        return _stripped(decoded or _pieces(self._view))

    def __del__(self) -> None:
        """Keep nothing of a request that has gone."""
        self._forget()

    def _forget(self) -> None:
        self._decoded = ()
        _kept.give_back(self._kept_bytes)
        self._kept_bytes = 0


class _Kept:
    """How much decoded text is kept. Thread-safe."""

    def __init__(self) -> None:
        self.bytes = 0
        self._lock = Lock()

    def take(self, size: int) -> bool:
        """Return whether so much more may be kept, which counts from now on."""
        with self._lock:
            if self.bytes + size > KEPT_BYTES:
                return False
            self.bytes += size
            return True

    def give_back(self, size: int) -> None:
        with self._lock:
            self.bytes -= size


class _WellFormed:
    """Texts that were decoded before; the least recently met are forgotten. Thread-safe."""

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
    """Yield a text in pieces, without the white space at its ends."""
    blanks: list[str] = []  # at the end of what was yielded, unless more follows
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
    """Yield the text that the inside of a JSON string stands for, in pieces.

    Raises:
        NotOneText: it is not the inside of one string.
    """
    start = 0
    while start < len(view):
        end = min(start + PIECE_BYTES, len(view))
        unsure = 1
        if end < len(view):
            cut = _cut(view, end)
            end, unsure = (cut, 1) if cut else (end, _UNSURE_BYTES)
        # Cut within a character, it cannot be decoded; the rest of that character goes to the next piece.
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
    """Return where a piece had better end: before its last line end, else before its last word, else 0."""
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
    # A word carries the space before it.
    return at if at > begin and view[at - 1] != _SPACE else 0


def is_escaped(data: bytes | memoryview, at: int) -> bool:
    """Return whether the character there stands behind an odd number of backslashes."""
    if data[at - 1] != _BACKSLASH or data[at - 2] != _BACKSLASH:  # as nearly all do
        return at > 0 and data[at - 1] == _BACKSLASH
    size = 64
    while True:
        before = bytes(data[max(0, at - size) : at])
        run = len(before) - len(before.rstrip(b"\\"))
        if run < len(before) or size >= at:
            return run % 2 == 1
        size *= 16


_BACKSLASH, _SPACE = 0x5C, 0x20
