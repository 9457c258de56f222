"""A request body's members, read as vLLM's own request model reads them: leniently, but not always.

Numbers may come as strings, absent and null are the same, unknown members are ignored. What cannot be
read is collected, so that one answer names every problem.
"""

import json
from collections.abc import Callable, Mapping
from math import inf
from typing import Any, TypeVar

from gateway.simulator.refusals import FieldProblem, detail, malformed

T = TypeVar("T")


def read_json(body: bytes) -> dict[str, Any]:
    """Return the object in the body.

    Raises:
        Refusal: in the words that fit what is wrong with it.
    """
    if not body:
        raise malformed([FieldProblem("missing", "body", "Field required", None)])
    try:
        data = json.loads(body)
    except UnicodeDecodeError:
        raise detail(400, "There was an error parsing the body") from None
    except json.JSONDecodeError as problem:
        raise malformed(
            [
                FieldProblem(
                    "json_invalid", f"body.{problem.pos}", "JSON decode error", {}, {"error": problem.msg}
                )
            ]
        ) from None
    except (RecursionError, ValueError):  # nested too deep, or a number too long to read
        raise detail(400, "There was an error parsing the body") from None
    if not isinstance(data, dict):
        text = "Input should be a valid dictionary or object to extract fields from"
        raise malformed([FieldProblem("model_attributes_type", "body", text, data)])
    return data


class Members:
    """Reads members of one object and keeps what is wrong with them for `finish`."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data
        self._problems: list[FieldProblem] = []

    def finish(self) -> None:
        """Raise the `Refusal` that names every problem, if there was one."""
        if self._problems:
            raise malformed(self._problems)

    def problem(
        self,
        kind: str,
        location: str,
        message: str,
        value: object,
        context: Mapping[str, object] | None = None,
    ) -> None:
        """Note a problem."""
        self._problems.append(FieldProblem(kind, location, message, value, context))

    def integer(self, name: str, least: float = -inf, most: float = inf) -> int | None:
        """Return a whole number from `least` to `most`, or None when absent or unreadable."""
        value = self._read(name, _integer)
        if value is not None and value > most:
            text = f"Input should be less than or equal to {most}"
            self.problem("less_than_equal", f"body.{name}", text, value, {"le": most})
        elif value is not None and value < least:
            text = f"Input should be greater than or equal to {least}"
            self.problem("greater_than_equal", f"body.{name}", text, value, {"ge": least})
        return value

    def number(self, name: str) -> float | None:
        """Return a number, or None when absent or unreadable."""
        return self._read(name, _number)

    def boolean(self, name: str, default: bool = False) -> bool:
        """Return a truth value, or the default when absent or unreadable."""
        value = self._read(name, _boolean)
        return default if value is None else value

    def text(self, name: str) -> str | None:
        """Return a string, or None when absent or unreadable."""
        return self._read(name, _text)

    def allow(self, location: str, value: object, *allowed: str) -> None:
        """Note a problem unless a value is one of the allowed strings."""
        if value not in allowed:
            *others, last = [f"'{one}'" for one in allowed]
            expected = f"{', '.join(others)} or {last}" if others else last
            text = f"Input should be {expected}"
            self.problem("literal_error", location, text, value, {"expected": expected})

    def object(self, name: str) -> dict[str, Any]:
        """Return an object, empty when absent or unreadable."""
        return self._read(name, _object) or {}

    def array(self, name: str, *, required: bool = False) -> list[Any]:
        """Return a list, empty when absent or unreadable."""
        if required and name not in self.data:
            self.problem("missing", f"body.{name}", "Field required", self.data)
        elif required and self.data[name] is None:
            self.problem("list_type", f"body.{name}", "Input should be a valid list", None)
        return self._read(name, _array) or []

    def _read(self, name: str, read: Callable[[Any], T | tuple[str, str]]) -> T | None:
        value = self.data.get(name)
        if value is None:
            return None
        found = read(value)
        if isinstance(found, tuple):
            kind, message = found
            self.problem(kind, f"body.{name}", message, value)
            return None
        return found


def _integer(value: Any) -> int | tuple[str, str]:
    if isinstance(value, int):  # a bool counts as a number here, as it does there
        return int(value)
    if isinstance(value, float):
        if value.is_integer():
            return int(value)
        return "int_from_float", "Input should be a valid integer, got a number with a fractional part"
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            text = "Input should be a valid integer, unable to parse string as an integer"
            return "int_parsing", text
    return "int_type", "Input should be a valid integer"


def _number(value: Any) -> float | tuple[str, str]:
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return "float_parsing", "Input should be a valid number, unable to parse string as a number"
    return "float_type", "Input should be a valid number"


def _boolean(value: Any) -> bool | tuple[str, str]:
    if isinstance(value, bool):
        return value
    if value in (0, 1):
        return bool(value)
    if isinstance(value, str) and value.lower() in ("true", "false", "on", "off", "yes", "no", "1", "0"):
        return value.lower() in ("true", "on", "yes", "1")
    if isinstance(value, str | int | float):
        return "bool_parsing", "Input should be a valid boolean, unable to interpret input"
    return "bool_type", "Input should be a valid boolean"


def _text(value: Any) -> str | tuple[str, str]:
    return value if isinstance(value, str) else ("string_type", "Input should be a valid string")


def _object(value: Any) -> dict[str, Any] | tuple[str, str]:
    return value if isinstance(value, dict) else ("dict_type", "Input should be a valid dictionary")


def _array(value: Any) -> list[Any] | tuple[str, str]:
    return value if isinstance(value, list) else ("list_type", "Input should be a valid list")
