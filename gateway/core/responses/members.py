"""Typed access to the decoded members of a request. None: a member is missing, or null.

A member of a wrong type raises InvalidRequest, which names it.
"""

from collections.abc import Mapping
from typing import Any

from gateway.core.errors import InvalidRequest


def text_of(members: Mapping[str, Any], name: str, where: str = "") -> str | None:
    """Return a string. `where`: its place, for errors, if that is not its name."""
    value = members.get(name)
    if value is not None and not isinstance(value, str):
        raise InvalidRequest(f"`{name}` must be a string.", param=where or name)
    return value


def flag_of(members: Mapping[str, Any], name: str, where: str = "") -> bool | None:
    """Return a boolean."""
    value = members.get(name)
    if value is not None and not isinstance(value, bool):
        raise InvalidRequest(f"`{name}` must be true or false.", param=where or name)
    return value


def number_of(members: Mapping[str, Any], name: str) -> float | None:
    """Return a number."""
    value = members.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(f"`{name}` must be a number.", param=name)
    return value


def count_of(members: Mapping[str, Any], name: str) -> int | None:
    """Return an integer of at least 1."""
    value = members.get(name)
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():  # of JavaScript, for example
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidRequest(f"`{name}` must be an integer of at least 1.", param=name)
    return value


def object_of(members: Mapping[str, Any], name: str, where: str = "") -> Mapping[str, Any]:
    """Return an object; an empty one if it is missing."""
    value = members.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise InvalidRequest(f"`{name}` must be an object.", param=where or name)
    return value or {}
