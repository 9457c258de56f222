"""Values derived from immutable objects, computed once per object."""

from collections.abc import Callable
from functools import wraps
from typing import TypeVar

_Of = TypeVar("_Of")
_Value = TypeVar("_Value")

KEPT_MAX = 256
"""Objects whose value one function keeps. A choice: more than the classes, pools and backends of any
fleet."""


def kept(compute: Callable[[_Of], _Value]) -> Callable[[_Of], _Value]:
    """Keep what a function of one immutable object returns, for as long as that same object is passed.

    Unlike `functools.lru_cache`, it does not hash or compare the object, which for a policy of many parts
    would cost more than the value. An equal copy is another object. The latest `KEPT_MAX` objects are held.
    """
    values: dict[int, tuple[_Of, _Value]] = {}

    @wraps(compute)
    def recall(one: _Of) -> _Value:
        found = values.get(id(one))
        if found is not None and found[0] is one:
            return found[1]
        value = compute(one)
        while len(values) >= KEPT_MAX:
            values.pop(next(iter(values)))
        values[id(one)] = one, value
        return value

    return recall
