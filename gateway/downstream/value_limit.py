"""Detects bodies with more JSON values than can be decoded without blocking the process.

While msgspec creates values, it holds the GIL, in whichever thread, for 0.05 to 0.2 us per value. Text costs
next to nothing, however many commas it contains. But telling the two apart requires a scan of all strings,
which takes longer than decoding most bodies. So a few places are sampled first, at random: a body full of
values shows up in nearly all of them.
"""

from random import Random
from typing import Final

from gateway.downstream.long_texts import is_escaped

VALUES_MAX: Final = 100_000
"""Maximum values decoded at once, in at most 20 ms. Almost every value takes at least one token."""

CONTAINERS_MAX: Final = 2 * VALUES_MAX
"""Maximum objects and arrays, which may be nested."""

STRINGS_MAX: Final = 2 * VALUES_MAX
"""Maximum strings, if more values are allowed because they are numbers."""

QUOTES_MAX: Final = 1_000_000
"""Maximum quotation marks scanned, including those within text: no body that fits a window has more."""

PLACE_BYTES: Final = 256
APART_BYTES: Final = 32_768
"""A sample of this length is taken, in 0.4 us, from every block of this length."""

SMALL_BYTES: Final = 131_072
"""Smaller bodies cannot contain enough values."""

_COUNTED_BYTES = 65_536
_MARKS = b",{["
_random = Random().random  # unpredictable for callers


def may_be_crowded(body: bytes, most: int = VALUES_MAX) -> bool:
    """Return whether a body seems to contain more than `most` commas and opening brackets, by sampling."""
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

    Characters within strings do not count. Takes 0.7 us per quotation mark, and never holds the GIL for long.
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
