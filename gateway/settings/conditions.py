"""Parses the conditions of a class: `">= 16000"`, `">= 16000, < 100000"`, `true`, `3`."""

import re
from typing import Any

from gateway.core.values import Bound, Comparison

_PART = re.compile(r"\s*(>=|>|<=|<|==|=|)\s*([0-9]+(?:_[0-9]+)*)\s*")
_HELP = 'write ">= 16000", "< 100", 4, or several as ">= 16000, < 100000"'


def bounds(written: Any) -> tuple[Bound, ...]:
    """Parse a numeric condition to bounds, all of which must hold.

    An integer means equality; a string contains comparisons separated by commas; a list contains either.

    Raises:
        ValueError: the syntax is invalid; the message explains it.
    """
    if isinstance(written, bool):
        raise ValueError(f"this needs a number to compare with, not {str(written).lower()}; {_HELP}")
    if isinstance(written, int):
        return (_bound(Comparison.EQ, written),)
    if isinstance(written, str):
        return tuple(_parse(part) for part in written.split(","))
    if isinstance(written, list) and written:
        return tuple(bound for part in written for bound in bounds(part))
    raise ValueError(f"this is not a comparison; {_HELP}")


def count_bounds(written: Any) -> tuple[Bound, ...]:
    """Parse a condition on a count: `true` is `> 0`, `false` is `== 0`, otherwise like `bounds`."""
    if isinstance(written, bool):
        return (Bound(Comparison.GT if written else Comparison.EQ, 0),)
    if isinstance(written, str) and written.strip().lower() in {"true", "false"}:  # from ${VAR}
        return count_bounds(written.strip().lower() == "true")
    return bounds(written)


def header_values(written: Any) -> tuple[str, ...]:
    """Parse the accepted values of a request header; empty means that it only has to be present.

    Raises:
        ValueError: it is neither `true`, a value, nor a list of values.
    """
    if written is True:
        return ()
    if isinstance(written, str) and written:
        return (written,)
    if isinstance(written, list) and written and all(isinstance(value, str) and value for value in written):
        return tuple(written)
    raise ValueError("write a value, a list of values, or true for any value; put numbers in quotes")


def _parse(part: str) -> Bound:
    match = _PART.fullmatch(part)
    if match is None:
        raise ValueError(f"{part.strip()!r} is not a comparison; {_HELP}")
    sign = match[1]
    return _bound(Comparison.EQ if sign in {"", "="} else Comparison(sign), int(match[2]))


def _bound(op: Comparison, value: int) -> Bound:
    if value < 0:
        raise ValueError("counts are never negative")
    return Bound(op, value)
