"""Detects JSON with more values than can be decoded without blocking the process. Pure.

A decoder holds the GIL, in whichever thread, while it creates values: 0.05 to 0.2 us for each. Text costs
next to nothing, however many commas it contains.
"""

from typing import Final

VALUES_MAX: Final = 100_000
"""Maximum values decoded at once. A choice: they take at most 20 ms (docs/performance.md); almost every value
takes at least one token."""

CONTAINERS_MAX: Final = 2 * VALUES_MAX
"""Maximum objects and arrays, which may be nested. A choice, like `VALUES_MAX`."""

STRINGS_MAX: Final = 2 * VALUES_MAX
"""Maximum strings, if more values are allowed because they are numbers. A choice, like `VALUES_MAX`."""

QUOTES_MAX: Final = 1_000_000
"""Maximum quotation marks scanned, including those within text. A choice: no body that fits a window has
more."""

SMALL_BYTES: Final = 131_072
"""Smaller bodies cannot contain enough values, of which each takes two bytes."""

_COUNTED_BYTES = 65_536
"""Bytes counted at once, because `count` holds the GIL: some 0.05 ms of it, at 0.7 ms per MB."""

_BACKSLASH = 0x5C
"""Code of the backslash."""


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


def is_escaped(data: bytes | memoryview, at: int) -> bool:
    """Return whether the character there is preceded by an odd number of backslashes."""
    if data[at - 1] != _BACKSLASH or data[at - 2] != _BACKSLASH:  # true for nearly all
        return at > 0 and data[at - 1] == _BACKSLASH
    size = 64
    while True:
        before = bytes(data[max(0, at - size) : at])
        run = len(before) - len(before.rstrip(b"\\"))
        if run < len(before) or size >= at:
            return run % 2 == 1
        size *= 16
