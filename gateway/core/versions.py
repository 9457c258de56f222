"""Engine versions and the version ranges that an operator allows. Pure.

A version is the string that `/version` reports, e.g. `0.20.2rc1` or `0.19.1rc1.dev31+gabc`: release numbers,
a stage (dev, alpha, beta, release candidate, final, post), and a local part that is ignored. Versions compare
like those of Python packages: 0.24.0rc1 comes before 0.24.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from operator import eq, ge, gt, le, lt, ne

_VERSION = re.compile(
    r"v?(\d+(?:\.\d+)*)(?:[-_.]?(a|alpha|b|beta|rc|post)[-_.]?(\d*))?(?:\.?dev(\d*))?(?:\+.*)?"
)
_STAGES = {"a": -3, "alpha": -3, "b": -2, "beta": -2, "rc": -1, "post": 1}
_BOUND = re.compile(r"\s*(>=|<=|==|!=|>|<)\s*(\S+)\s*")
_COMPARED: Mapping[str, Callable[["Order", "Order"], bool]] = {
    ">=": ge,
    "<=": le,
    "==": eq,
    "!=": ne,
    ">": gt,
    "<": lt,
}

Order = tuple[tuple[int, ...], tuple[int, int], tuple[int, int]]


@dataclass(frozen=True, slots=True)
class VersionBound:
    """One bound of a range. `text` is its normalized text."""

    text: str
    op: str
    version: Order


@lru_cache(maxsize=256)
def order(version: str) -> Order | None:
    """Return the sort key of a version, or None if it cannot be parsed."""
    match = _VERSION.fullmatch(version.strip())
    if match is None:
        return None
    numbers, stage, count, dev = match.groups()
    release = [int(number) for number in numbers.split(".")]
    while release and release[-1] == 0:  # 0.24.0 is 0.24
        release.pop()
    # A development version precedes the version it leads to; one of a final release precedes all stages.
    early = -4 if dev is not None and stage is None else 0
    where = (_STAGES[stage], int(count or 0)) if stage else (early, 0)
    return tuple(release), where, (0, 0) if dev is None else (-1, int(dev or 0))


def bounds(text: str) -> tuple[VersionBound, ...]:
    """Return the bounds of a range such as `>= 0.20, < 0.24`.

    Raises:
        ValueError: The text has another form.
    """
    found = []
    for part in text.split(","):
        match = _BOUND.fullmatch(part)
        version = order(match[2]) if match else None
        if match is None or version is None:
            raise ValueError('write it as ">= 0.20, < 0.24": >=, >, <=, <, == or !=, and a version')
        found.append(VersionBound(f"{match[1]} {match[2]}", match[1], version))
    return tuple(found)


def misfit(allowed: tuple[VersionBound, ...], version: str) -> str:
    """Return why an engine's version is not allowed, in words; "" if it is allowed."""
    if not allowed:
        return ""
    if not version:
        return "the engine does not report its version"
    known = order(version)
    if known is None:
        return f"engine version {version} cannot be compared"
    broken = [bound.text for bound in allowed if not _COMPARED[bound.op](known, bound.version)]
    return f"engine version {version}, not {', '.join(broken)}" if broken else ""
