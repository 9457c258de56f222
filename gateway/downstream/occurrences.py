"""Counts occurrences of a character in a body: by `find` while they are few, then by `count`."""

from typing import Final

FOUND_MAX: Final = 1_024
"""Occurrences up to which `find` is used. Measured: it takes 0.04 ms per MB and 0.1 us per occurrence;
`count` 0.7 ms per MB in any case."""

COUNTED_BYTES: Final = 65_536
"""Bytes counted at once, because `count` holds the GIL. A choice: 0.05 ms."""


def occurrences(character: bytes, body: bytes, most: int) -> int:
    """Return how often a character occurs in a body; above `most`, a lower bound."""
    times = at = 0
    while times < FOUND_MAX and times <= most:
        at = body.find(character, at) + 1
        if not at:
            return times
        times += 1
    while times <= most and at < len(body):
        times += body.count(character, at, at + COUNTED_BYTES)
        at += COUNTED_BYTES
    return times
