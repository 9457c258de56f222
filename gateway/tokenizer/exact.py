"""Counts tokens with the site's own vocabulary, with bounded work and no way to raise.

tiktoken releases the interpreter's lock while it encodes, and no list of ids is asked for. Text is cut into
pieces all the same, so that counting can stop early, what holds the lock is over in well under a millisecond,
and one piece that the engine chokes on costs the accuracy of that piece alone.
"""

import re
from collections import Counter
from collections.abc import Iterator

from gateway.core.class_counts import class_count_tokens
from gateway.core.value import valueclass
from gateway.tokenizer.vocab import Vocabulary, ids_in

PIECE_CHARS = 255_936
"""Characters per piece: 31 x 8256, so that long runs of blanks, which count by 31, lose nothing to a cut.

To begin with a piece takes 0.1 ms: the engine has just filled the processor's caches with its tables.
"""

BEYOND_ASCII_CHARS = PIECE_CHARS // 8
"""Likewise beyond ASCII: such characters are looked at one by one as well, and may be four tokens each."""

_ASCII = re.compile("[\0-\x7f]+")
_SURROGATE = re.compile(f"[{chr(0xD800)}-{chr(0xDFFF)}]")
SEARCHED_CHARS = 2_000


@valueclass(frozen=True, slots=True)
class Counted:
    """How many tokens a text has.

    Attributes:
        tokens: The count; above the limit it was given, a lower bound.
        guessed_tokens: How many of them come from pieces that could not be encoded.
        complete: False where counting stopped early.
    """

    tokens: int
    guessed_tokens: int = 0
    complete: bool = True


def count_exact(vocabulary: Vocabulary, text: str, stop_above_tokens: int | None = None) -> Counted:
    """Return the tokens in `text`, without `<bos>`; a marker such as `<|turn>` counts as the token it is.

    Stops after the first piece that takes the count above `stop_above_tokens`. Never raises, whatever
    the text: a piece that cannot be encoded is guessed by class counts.
    """
    tokens = guessed = 0
    for piece in (text,) if len(text) <= BEYOND_ASCII_CHARS else pieces(text):
        try:
            tokens += _count_piece(vocabulary, piece)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:  # noqa: BLE001  a Rust panic arrives as a BaseException of its own
            guess = class_count_tokens(piece)
            tokens += guess
            guessed += guess
        if stop_above_tokens is not None and tokens > stop_above_tokens:
            return Counted(tokens, guessed, complete=False)
    return Counted(tokens, guessed)


def pieces(text: str) -> Iterator[str]:
    """Yield `text` in pieces of at most PIECE_CHARS characters, cut where a token is likely to end."""
    size = PIECE_CHARS if text.isascii() else BEYOND_ASCII_CHARS
    start = 0
    while len(text) - start > size:
        end = start + size
        half = start + size // 2
        newline = text.rfind("\n", half, end)
        if newline >= 0:
            end = newline + 1
        else:
            # A word carries the space before it, so the cut falls in front of that.
            space = text.rfind(" ", half, end)
            if space >= 0 and text[space - 1] != " ":
                end = space
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]


def _may_hold_markers(vocabulary: Vocabulary, piece: str) -> bool:
    """Return whether a text may hold a marker: a short one is searched for all, a long one for beginnings."""
    for start, markers in vocabulary.markers.items():
        if start in piece and (len(piece) > SEARCHED_CHARS or any(marker in piece for marker in markers)):
            return True
    return False


def _count_piece(vocabulary: Vocabulary, piece: str) -> int:
    beyond = ""
    if not piece.isascii():
        # The source writes a space as U+2581 and cannot tell the two apart. Half a surrogate pair is no text.
        piece = piece.replace("▁", " ")
        beyond = _ASCII.sub("", piece)
        if _SURROGATE.search(beyond):
            piece = piece.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            beyond = _ASCII.sub("", piece)
    # Looking for markers costs tiktoken 10 us before the first character is looked at.
    has_markers = _may_hold_markers(vocabulary, piece)
    tokens = ids_in(vocabulary.encoding, piece, with_markers=has_markers)
    if beyond and not vocabulary.characters.issuperset(beyond):
        for character, times in Counter(beyond).items():
            if character not in vocabulary.characters:
                tokens += times * vocabulary.glued_tokens(character)
    return tokens
