"""Whether a body is crowded: of more values than can be decoded without holding everybody up.

While values are made the interpreter does nothing else, in whichever thread that is, for 0.05 to 0.2 us each.
Texts cost next to nothing, however many commas they hold. But to tell one from the other takes a walk over
all strings, which is longer than reading most bodies. So a few places are looked at first, chosen at random:
a body of values is seen by nearly each of them.
"""

from random import Random
from typing import Final

from gateway.downstream.long_texts import is_escaped

VALUES_MAX: Final = 100_000
"""Values that are decoded at once, in at most 20 ms. Nearly each of them takes a token of its own."""

STRINGS_MAX: Final = 2 * VALUES_MAX
"""Likewise strings, where more values are allowed because they are numbers."""

QUOTES_MAX: Final = 1_000_000
"""Quotation marks that are looked at, those within texts as well: more stand in none that fits a window."""

PLACE_BYTES: Final = 256
APART_BYTES: Final = 32_768
"""How much is looked at, in 0.4 us, and of how much."""

SMALL_BYTES: Final = 131_072
"""So many bytes cannot hold enough values."""

_COUNTED_BYTES = 65_536
_random = Random().random  # nobody can know it beforehand


def may_be_crowded(body: bytes) -> bool:
    """Return whether a body has commas enough for half of VALUES_MAX, by a few places in it."""
    size = len(body)
    if size <= SMALL_BYTES:
        return False
    places = size // APART_BYTES
    count, last = body.count, size - PLACE_BYTES
    seen = 0
    for _ in range(places):
        at = int(last * _random())
        seen += count(b",", at, at + PLACE_BYTES)
    return seen * size > places * PLACE_BYTES * VALUES_MAX // 2


def is_crowded(body: bytes, most: int = VALUES_MAX) -> bool:
    """Return whether a body has more than `most` commas that stand in no string, or too many strings.

    It takes 0.5 us per quotation mark, and never holds the interpreter for long.
    """
    commas = strings = at = 0
    is_in_string = False
    for _ in range(QUOTES_MAX):
        quote = body.find(b'"', at)
        if not is_in_string:
            strings += 1
            commas += _commas(body, at, len(body) if quote < 0 else quote)
            if commas > most or strings > STRINGS_MAX:
                return True
        if quote < 0:
            return False
        is_in_string = not is_in_string or is_escaped(body, quote)
        at = quote + 1
    return True


def _commas(body: bytes, at: int, end: int) -> int:
    """Return how many there are, counted piece by piece."""
    pieces = range(at, end, _COUNTED_BYTES)
    return sum([body.count(b",", start, min(end, start + _COUNTED_BYTES)) for start in pieces])
