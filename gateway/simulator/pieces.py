"""The simulated server's own tokenizer: text to pieces, pieces to ids and back.

It is not Gemma's, and shares no entry with it: a piece is what one regular expression finds. English
prose comes to about 4.5 characters per token and every digit is one, as with Gemma's, which is all that
a test of a gateway needs: that the server counts differently from the gateway, deterministically, and
agrees with itself.
"""

import re
import zlib
from collections.abc import Iterator

BOS = 2
"""Id of the beginning of a sequence: Gemma's."""

MARKERS: dict[str, int] = {
    "<bos>": BOS,
    "<|turn>": 40,
    "<turn|>": 41,
    "<|channel>": 42,
    "<channel|>": 43,
    "<|think|>": 44,
    "<|tool>": 45,
    "<tool|>": 46,
    "<|tool_call>": 47,
    "<tool_call|>": 48,
    "<|image>": 51,
    "<image|>": 52,
    "<|image_token|>": 53,
    "<|audio>": 54,
    "<audio|>": 55,
    "<|audio_token|>": 56,
    "<tool_response|>": 57,
    "<|tool_response>": 50,  # what vLLM reports as `stop_reason` after a tool call
}
"""Ids of the markers that are single tokens. Numbers of our own, but for `BOS` and the one that is on the
wire."""

_PIECE = re.compile(r" ?[A-Za-z]{1,10}|[0-9]| ?[^\W\d_A-Za-z]{1,3}|\n{1,31}| {2,31}|\t{1,31}|.", re.DOTALL)

_SLICE = 16_384
"""Characters per call of the regex engine, which holds the interpreter for each. A choice: 0.6 ms."""

_FIRST_ID = 1_000
_IDS = 260_000
"""Range of the ids that pieces get. A choice: behind the markers, and within Gemma's 262,144."""

_LEARNT_MAX = 200_000
"""Maximum ids whose pieces are remembered. A choice that bounds memory."""

_piece_of: dict[int, str] = {number: marker for marker, number in MARKERS.items()}


def pieces(text: str) -> list[str]:
    """Return the text cut into the pieces that are one token each."""
    found: list[str] = []
    for part in _slices(text):
        found += _PIECE.findall(part)
    return found


def count(text: str) -> int:
    """Return the number of tokens in the text. Linear: 1 MB takes about 40 ms."""
    return sum(len(_PIECE.findall(part)) for part in _slices(text))


def piece_id(piece: str) -> int:
    """Return the id of a piece: a hash, remembered so that `text_of` can undo it."""
    number = _FIRST_ID + zlib.crc32(piece.encode("utf-8", "surrogatepass")) % _IDS
    if len(_piece_of) < _LEARNT_MAX:
        _piece_of.setdefault(number, piece)
    return number


def ids(text: str) -> list[int]:
    """Return the ids of the text's tokens."""
    return [piece_id(piece) for piece in pieces(text)]


def text_of(numbers: list[int]) -> str:
    """Return the text of ids that this process gave out before; others read `<unused...>`."""
    return "".join(_piece_of.get(number, f"<unused{number}>") for number in numbers)


def _slices(text: str) -> Iterator[str]:
    """Yield the text in slices, cut before a space where there is one near the end."""
    start = 0
    while len(text) - start > _SLICE:
        end = start + _SLICE
        cut = text.rfind(" ", start + _SLICE // 2, end)
        end = cut if cut > start else end
        yield text[start:end]
        start = end
    yield text[start:]
