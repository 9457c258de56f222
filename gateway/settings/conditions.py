"""Parses the conditions of a class: `">= 16000"`, `">= 16000, < 100000"`, `true`, `3`."""

import re
from typing import Any

from gateway.core.policy import Bound, Comparison
from gateway.core.request import SECRET_HEADERS

WHOLE_MAX = 2**53
"""The largest integer; up to it, integers are exact as floats, to which most figures are converted."""

_PART = re.compile(r"\s*(>=|>|<=|<|==|=|)\s*([0-9]+(?:_[0-9]+)*)\s*")
_GROUPED = re.compile(r"[0-9]{1,3}(?:,\s?[0-9]{3})+(?![0-9])")
HEADER_NAME = re.compile(r"[0-9a-z!#$%&'*+.^_`|~-]+")
"""A token of RFC 9110, 5.6.2, in lower case."""
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
        return _all(written, [_parse(part) for part in written.split(",")])
    if isinstance(written, list) and written:
        return _all(written, [bound for part in written for bound in bounds(part)])
    raise ValueError(f"this is not a comparison; {_HELP}")


def count_bounds(written: Any) -> tuple[Bound, ...]:
    """Parse a condition on a count: `true` is `> 0`, `false` is `== 0`, otherwise like `bounds`."""
    if isinstance(written, bool):
        return (Bound(Comparison.GT if written else Comparison.EQ, 0),)
    if isinstance(written, str) and written.strip().lower() in {"true", "false"}:  # from ${VAR}
        return count_bounds(written.strip().lower() == "true")
    return bounds(written)


def header_name(written: str) -> str:
    """Return the name of a request header in lower case.

    Raises:
        ValueError: no request has such a header when it is classified.
    """
    name = written.lower()
    if not HEADER_NAME.fullmatch(name):
        raise ValueError("no header can have this name")
    if name in SECRET_HEADERS:
        raise ValueError(
            "this header is removed before requests are classified; for API keys, there is `key`"
        )
    return name


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


def _all(written: Any, found: list[Bound]) -> tuple[Bound, ...]:
    """Return bounds that must all hold. One that demands an exact number can only stand alone."""
    if len(found) > 1 and any(bound.op is Comparison.EQ for bound in found):
        text = ",".join(str(part) for part in written) if isinstance(written, list) else written
        if grouped := _GROUPED.search(text):
            number = re.sub(r"[,\s]", "", grouped[0])
            raise ValueError(
                f"the comma separates two comparisons: write {number} without it, or {int(number):_}"
            )
        raise ValueError(f"all of these must hold, so an exact number cannot be one of several; {_HELP}")
    return tuple(found)


def _parse(part: str) -> Bound:
    match = _PART.fullmatch(part)
    if match is None:
        raise ValueError(f"{part.strip()!r} is not a comparison; {_HELP}")
    sign = match[1]
    number = int(match[2]) if len(match[2]) < 1000 else WHOLE_MAX + 1  # Python refuses longer ones
    return _bound(Comparison.EQ if sign in {"", "="} else Comparison(sign), number)


def _bound(op: Comparison, value: int) -> Bound:
    if value < 0:
        raise ValueError("counts are never negative")
    if value > WHOLE_MAX:
        raise ValueError(f"it must be at most {WHOLE_MAX:,}")
    return Bound(op, value)
