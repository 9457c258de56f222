"""How often a character stands in a body: found one by one while there are few, then counted."""

from typing import Final

FOUND_MAX: Final = 1_024
"""`find` takes 0.04 ms per MB and 0.1 us for each that it finds; `count` 0.7 ms per MB, whatever is there."""

COUNTED_BYTES: Final = 65_536
"""Counted at once: the interpreter is held meanwhile."""


def occurrences(character: bytes, body: bytes, most: int) -> int:
    """Return how often a character stands in a body; above `most`, a lower bound."""
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
