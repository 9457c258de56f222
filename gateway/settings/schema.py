"""The JSON Schema of the configuration file, generated from its models."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from gateway.settings.descriptions import descriptions
from gateway.settings.document import Document
from gateway.settings.fields import Section

FILLED_IN = r"\$\{"
"""Matches text with `${NAME}`, which cannot be validated before it is substituted."""

_NAMED, _LISTED = ("properties", "patternProperties", "$defs"), ("anyOf", "oneOf", "allOf", "prefixItems")
_ONE = ("items", "additionalProperties")
_FIGURES = frozenset({"integer", "number", "boolean"})


def schema() -> dict[str, Any]:
    """Return the JSON Schema of a configuration file, including short forms, for editors."""
    generated = Document.model_json_schema(by_alias=True)
    definitions: dict[str, Any] = generated["$defs"]
    meanings = {kind.__name__: descriptions(kind) for kind in _kinds(Section)}
    for name, section in ((Document.__name__, generated), *definitions.items()):
        for key, value in section.get("properties", {}).items():
            _complete(value, meanings.get(name, {}).get(key), definitions)
    generated = json.loads(json.dumps(generated))  # unshare parts that occur several times
    _may_be_filled_in(generated)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Gemma Gateway configuration",
        **{key: value for key, value in generated.items() if key != "title"},
    }


def _kinds(section: type[Section]) -> Iterator[type[Section]]:
    yield section
    for kind in section.__subclasses__():
        yield from _kinds(kind)


def _complete(key: dict[str, Any], meaning: str | None, definitions: Mapping[str, Any]) -> None:
    """Add what a key means; without words of its own, what its section does."""
    if meaning is not None:
        in_order = sorted({**key, "description": meaning}.items())
        key.clear()
        key.update(in_order)
    elif "description" not in key and "$ref" in key:
        key["description"] = definitions[key["$ref"].rsplit("/", 1)[-1]]["description"]
    if "patternProperties" in key:
        key["additionalProperties"] = False
    if isinstance(key.get("default"), dict):
        del key["default"]  # the section itself has defaults


def _may_be_filled_in(schema: dict[str, Any]) -> None:
    """Allow `${NAME}` in place of any value, but not in keys, as in the file."""
    inner = [one for name in _NAMED for one in schema.get(name, {}).values()]
    inner += [one for name in _LISTED for one in schema.get(name, ())]
    inner += [schema[name] for name in _ONE if isinstance(schema.get(name), dict)]
    for one in inner:
        _may_be_filled_in(one)
    pattern, types = schema.get("pattern", ""), schema.get("type", [])
    types = [types] if isinstance(types, str) else types
    if not _FIGURES.isdisjoint(types) and "string" not in types and "enum" not in schema:
        schema.update(type=[*types, "string"], pattern=FILLED_IN)
    elif pattern and "${" not in pattern.replace("\\", ""):
        schema["pattern"] = f"{pattern}|{FILLED_IN}"
    elif "enum" in schema or isinstance(schema.get("const"), str):
        own = {name: schema.pop(name) for name in ("type", "enum", "const") if name in schema}
        schema["anyOf"] = [own, {"type": "string", "pattern": FILLED_IN}]
