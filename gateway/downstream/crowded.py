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

CONTAINERS_MAX: Final = 2 * VALUES_MAX
"""Likewise objects and arrays, which may stand within each other."""

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
_MARKS = b",{["
_random = Random().random  # nobody can know it beforehand


def may_be_crowded(body: bytes, most: int = VALUES_MAX) -> bool:
    """Return whether a body has more than about `most` commas and opening brackets, by a few places in it."""
    size = len(body)
    if size <= SMALL_BYTES:
        return False
    places = size // APART_BYTES
    last = size - PLACE_BYTES
    others = 0
    for _ in range(places):
        at = int(last * _random())
        others += len(body[at : at + PLACE_BYTES].translate(None, _MARKS))
    seen = places * PLACE_BYTES
    return (seen - others) * size > seen * most


def is_crowded(body: bytes, most: int = VALUES_MAX) -> bool:
    """Return whether a body has more than `most` commas, or too many brackets or strings.

    What stands in strings does not count. It takes 0.7 us per quotation mark, and never holds the interpreter
    for long.
    """
    commas = brackets = strings = at = 0
    is_in_string = False
    for _ in range(QUOTES_MAX):
        quote = body.find(b'"', at)
        if not is_in_string:
            end = len(body) if quote < 0 else quote
            for start in range(at, end, _COUNTED_BYTES):
                stop = min(end, start + _COUNTED_BYTES)
                commas += body.count(b",", start, stop)
                brackets += body.count(b"{", start, stop) + body.count(b"[", start, stop)
            strings += 1
            if commas > most or brackets > CONTAINERS_MAX or strings > STRINGS_MAX:
                return True
        if quote < 0:
            return False
        is_in_string = not is_in_string or is_escaped(body, quote)
        at = quote + 1
    return True
