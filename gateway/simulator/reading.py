"""A request body's members, read as vLLM's own request model reads them: leniently, but not always.

Numbers may come as strings, absent and null are the same, unknown members are ignored. What cannot be
read is collected, so that one answer names every problem. It is found by what finds it in vLLM: pydantic's
validators.
"""

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from pydantic_core import CoreSchema, SchemaValidator, ValidationError, core_schema

from gateway.simulator.refusals import detail, field_problem, malformed

_NUMBER = SchemaValidator(core_schema.float_schema())
_BOOLEAN = SchemaValidator(core_schema.bool_schema())
_TEXT = SchemaValidator(core_schema.str_schema())
_OBJECT = SchemaValidator(core_schema.dict_schema())
_ARRAY = SchemaValidator(core_schema.list_schema())


@cache
def _integer(least: int | None, most: int | None) -> SchemaValidator:
    return SchemaValidator(core_schema.int_schema(ge=least, le=most))


def object_with(**members: CoreSchema) -> CoreSchema:
    """Return the schema of an object with these members, beside which it may have others."""
    fields = {name: core_schema.model_field(schema) for name, schema in members.items()}
    return core_schema.model_fields_schema(fields, from_attributes=True)  # as FastAPI reads a body


def read_json(body: bytes) -> dict[str, Any]:
    """Return the object in the body.

    Raises:
        Refusal: in the words that fit what is wrong with it.
    """
    if not body:
        raise malformed([field_problem("missing", "body", "Field required", None)])
    try:
        data = json.loads(body)
    except UnicodeDecodeError:
        raise detail(400, "There was an error parsing the body") from None
    except json.JSONDecodeError as problem:
        why, where = {"error": problem.msg}, f"body.{problem.pos}"
        raise malformed([field_problem("json_invalid", where, "JSON decode error", {}, why)]) from None
    except (RecursionError, ValueError):  # nested too deep, or a number too long to read
        raise detail(400, "There was an error parsing the body") from None
    if not isinstance(data, dict):
        text = "Input should be a valid dictionary or object to extract fields from"
        raise malformed([field_problem("model_attributes_type", "body", text, data)])
    return data


class Members:
    """Reads members of one object and keeps what is wrong with them for `finish`."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data
        self._problems: list[Mapping[str, object]] = []

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
        self._problems.append(field_problem(kind, location, message, value, context))

    def integer(self, name: str, least: int | None = None, most: int | None = None) -> int | None:
        """Return a whole number from `least` to `most`, or None when absent or unreadable."""
        found: int | None = self.read(name, _integer(least, most))
        return found

    def number(self, name: str) -> float | None:
        """Return a number, or None when absent or unreadable."""
        found: float | None = self.read(name, _NUMBER)
        return found

    def boolean(self, name: str, default: bool = False) -> bool:
        """Return a truth value, or the default when absent or unreadable."""
        found = self.read(name, _BOOLEAN)
        return default if found is None else bool(found)

    def text(self, name: str) -> str | None:
        """Return a string, or None when absent or unreadable."""
        found: str | None = self.read(name, _TEXT)
        return found

    def object(self, name: str) -> dict[str, Any]:
        """Return an object, empty when absent or unreadable."""
        return self.read(name, _OBJECT) or {}

    def array(self, name: str, *, required: bool = False) -> list[Any]:
        """Return a list, empty when absent or unreadable."""
        if required and name not in self.data:
            self.problem("missing", f"body.{name}", "Field required", self.data)
            return []
        return self.read(name, _ARRAY, is_optional=not required) or []

    def read(self, name: str, kind: SchemaValidator, *, is_optional: bool = True) -> Any:
        """Return what `kind` makes of a member, or None when unreadable or, unless it is required, absent."""
        value = self.data.get(name)
        if value is None and is_optional:
            return None
        try:
            return kind.validate_python(value)
        except ValidationError as error:
            for one in error.errors(include_url=False):
                where = ".".join(filter(None, map(str, ("body", name, *one["loc"]))))
                self.problem(one["type"], where, one["msg"], one["input"], one.get("ctx"))
            return None
