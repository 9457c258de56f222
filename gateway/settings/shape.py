"""Translates pydantic's errors to the terms of the configuration file, with suggestions."""

import re
import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from gateway.settings.descriptions import descriptions
from gateway.settings.document import Document
from gateway.settings.problems import Finding, closest
from gateway.settings.yaml_tree import Path

_SECRET_PARTS = frozenset(
    {
        *("keys", "url", "endpoint", "allowed_origins", "body"),
        *("api_key_env", "api_key_file", "secret_env", "secret_file", "headers_env", "token_env"),
    }
)  # values at these paths are never quoted


_SECRET_TEXT = re.compile("://|@")
"""What a text has that may hold a password: a URL, for example in place of a section with one."""


def findings(error: ValidationError) -> Iterator[Finding]:
    """Yield one finding per error of a failed validation of `Document`."""
    details = error.errors(include_url=False)
    around = {detail["loc"][:end] for detail in details for end in range(len(detail["loc"]))}
    for detail in details:
        if detail["type"] == "too_short" and detail["loc"] in around:
            continue  # invalid entries are not counted: the list is not too short
        path = tuple(part for part in detail["loc"] if part != "[key]")
        name = str(path[-1]) if path else "the file"
        kind = detail["type"]
        if kind == "extra_forbidden":
            yield _unknown_key(path)
        elif kind == "missing":
            yield Finding(path[:-1], _missing(path), at_key=True)
        else:
            said = _said(kind, detail["msg"], path, detail["input"])
            at_key = detail["loc"][-1:] == ("[key]",)
            given = _given(path, detail["input"])
            message = f"{_dotted(path) or name}: {said}"
            is_said = not given or re.search(rf"(?<![\w.]){re.escape(given)}(?![\w.])", message) is not None
            yield Finding(path, message if is_said else f"{message}, not {given}", at_key=at_key)


_ELSEWHERE = {"knee": "knee_seqs", "max_model_len": "context_tokens", "context": "context_tokens"}
"""Our names of keys that other programs, or their users, call differently."""


def _unknown_key(path: Path) -> Finding:
    key = str(path[-1])
    section = _section(path[:-1])
    fields = _keys(section) if section is not None else {}
    key, colon, _ = key.partition(":")  # what stands behind it may be a secret
    if colon and key in fields:
        return Finding(path, f'put a space after "{key}:"', at_key=True)
    meant = _ELSEWHERE.get(key, key)
    suggestion = closest(meant, fields)
    if not suggestion:
        homes = [outer for outer, inner in fields.items() if inner is not None and meant in _keys(inner)]
        suggestion = f'"{homes[0]}: {{{meant}: ...}}"' if homes else ""
    listing = "" if suggestion else f"; known here: {', '.join(sorted(fields))}"
    where = _dotted(path[:-1])
    message = f'unknown key "{key}{colon}"{f" in {where}" if where else ""}{listing}'
    return Finding(path, message, suggestion, at_key=True)


def _missing(path: Path) -> str:
    section = _section(path[:-1])
    meaning = descriptions(section).get(str(path[-1])) if section is not None else None
    purpose = f": {meaning}".replace("\n", " ").rstrip(".") if meaning else ""
    where = _dotted(path[:-1])
    return f'{f"{where} needs" if where else "the file needs"} "{path[-1]}"{purpose}'


_PLAIN = {
    "model_type": "a mapping of keys to values is needed",
    "dict_type": "a mapping of keys to values is needed",
    "tuple_type": "a list is needed",
    "too_short": "at least one is needed",
    "string_too_short": "it must not be empty",
    "string_type": "text is needed; put it in quotes",
    "bool_type": "it must be true or false",
    "bool_parsing": "it must be true or false",
    "int_type": "it must be a whole number",
    "int_parsing": "it must be a whole number",
    "int_from_float": "it must be a whole number",
    "float_type": "it must be a number",
    "float_parsing": "it must be a number",
}
"""Pydantic's error types in the words of people who edit YAML."""

_UNITS = {"s": "seconds", "ms": "milliseconds", "bytes": "bytes", "tokens": "tokens"}
"""What a number counts whose key has this part: `total_s: 10m` is a common mistake."""


def _said(kind: str, message: str, path: Path, value: Any) -> str:
    if value is None and kind != "value_error":  # which says in its own words what is missing
        return "a value is missing"
    if kind == "string_type" and isinstance(value, dict | list):
        return f"text is needed, not a {'mapping' if isinstance(value, dict) else 'list'}"
    plain = message.removeprefix("Value error, ").replace("Input should be", "it must be")
    said = _PLAIN.get(kind, plain)
    if said.endswith("number"):
        units = [_UNITS[part] for part in str(path[-1]).split("_") if part in _UNITS]
        said += f" of {units[-1]}" if units else ""
    section = _section(path) if kind == "model_type" else None
    return said if section is None else f"{said} (known here: {', '.join(sorted(_keys(section)))})"


def _given(path: Path, value: Any) -> str:
    """Return the value found instead, if it is short and not a secret."""
    if _SECRET_PARTS & {part for part in path if isinstance(part, str)}:
        return ""
    if isinstance(value, str) and _SECRET_TEXT.search(value):
        return ""
    if isinstance(value, str | int | float | bool) and len(str(value)) <= 40:
        return repr(value) if isinstance(value, str) else str(value).lower()
    return ""


def _dotted(path: Path) -> str:
    if path[:1] == ("keys",):  # a key may stand where its name belongs
        path = (*path[:1], *path[2:])
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")


# ------------------------------------------------------------------ the section at a path


def _section(path: Path) -> type[BaseModel] | None:
    """Return the model of the section at `path`, or None."""
    here: Any = Document
    for step in path:
        model = _model(here)
        if model is not None:
            field = _fields(model).get(str(step))
            if field is None:
                return None
            here = field.annotation
        else:
            here = _item(here)
    return _model(here)


def _fields(model: type[BaseModel]) -> Mapping[str, Any]:
    return {field.alias or name: field for name, field in model.model_fields.items()}


def _keys(model: type[BaseModel]) -> dict[str, type[BaseModel] | None]:
    return {name: _model(field.annotation) for name, field in _fields(model).items()}


def _model(annotation: Any) -> type[BaseModel] | None:
    """Return the model in an annotation, possibly within `Annotated` and `| None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in {Annotated, Union, types.UnionType}:
        options = get_args(annotation)[:1] if get_origin(annotation) is Annotated else get_args(annotation)
        return next((found for option in options if (found := _model(option)) is not None), None)
    return None


def _item(annotation: Any) -> Any:
    """Return the type of the entries of a dict or tuple."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin in {Annotated, Union, types.UnionType}:
        return _item(args[0])
    if origin is dict:
        return args[1]
    return args[0] if args else None
