"""The table of all configuration keys in docs/configuration.md, generated from the models.

`python -m gateway.settings.reference` in the project's folder updates it, and config/gateway.schema.json.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gateway.settings.schema import FILLED_IN, schema

BEGIN, END = "<!-- keys: generated -->", "<!-- /keys -->"
_ONCE = {"KneeStepSection"}  # explained where it is first used


def tables() -> str:
    """Return one Markdown table per section: key, value, default, meaning."""
    root = schema()
    return "\n".join(_sections("", root, root["$defs"], set()))


def schema_text() -> str:
    """Return the contents of config/gateway.schema.json."""
    return json.dumps(schema(), indent=2) + "\n"


def _sections(
    path: str, section: Mapping[str, Any], defs: Mapping[str, Any], seen: set[str]
) -> Iterator[str]:
    yield f"### `{path}`\n" if path else "### The file\n"
    if path:
        yield f"{_line(section['description'])}\n"
    yield "| key | takes | default | meaning |\n|---|---|---|---|"
    inner: list[tuple[str, str]] = []
    for key, value in section["properties"].items():
        required = key in section.get("required", ())
        default = "required" if required else _default(value)
        yield f"| `{key}` | {_takes(value, defs)} | {default} | {_line(value['description'])} |"
        inner += [(f"{path}.{key}{suffix}".lstrip("."), name) for name, suffix in _used(value, "")]
    yield ""
    for place, name in inner:
        if name in seen and name in _ONCE:
            continue
        seen.add(name)
        yield from _sections(place, defs[name], defs, seen)


def _used(value: Mapping[str, Any], suffix: str) -> Iterator[tuple[str, str]]:
    """Yield `(name, path suffix)` of the sections that a key refers to, without figures."""
    if "$ref" in value:
        name = value["$ref"].rsplit("/", 1)[-1]
        if not name.endswith("Figure"):
            yield name, suffix
    for option in value.get("anyOf", ()):
        yield from _used(option, suffix)
    if "items" in value:
        yield from _used(value["items"], f"{suffix}[]")
    if (entries := _entries(value)) is not None:
        yield from _used(entries, f"{suffix}.<name>")


def _entries(value: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the schema of the values of a mapping with free keys; None for anything else."""
    named = next(iter(value.get("patternProperties", {}).values()), value.get("additionalProperties"))
    return named if isinstance(named, Mapping) else None


def _takes(value: Mapping[str, Any], defs: Mapping[str, Any]) -> str:
    options = dict.fromkeys(_kinds(value, defs))
    if "comparison" in options:
        return "true, false or a comparison" if "true or false" in options else "a comparison"
    return " or ".join(option for option in options if option)


def _kinds(value: Mapping[str, Any], defs: Mapping[str, Any]) -> Iterator[str]:
    if "anyOf" in value:
        for option in value["anyOf"]:
            yield from _kinds(option, defs)
    elif "$ref" in value:
        name = value["$ref"].rsplit("/", 1)[-1]
        yield "{value, basis, source}" if name.endswith("Figure") else "a section"
    elif "const" in value:
        yield f"`{json.dumps(value['const'])}`".replace('"', "")
    elif "enum" in value:
        yield " or ".join(f"`{json.dumps(one)}`".replace('"', "") for one in value["enum"])
    elif value.get("title") == "comparison":
        yield "comparison"
    else:
        yield from _plain_kinds(value, defs)


_WORDS = {"string": "text", "integer": "whole number", "number": "number", "boolean": "true or false"}


def _plain_kinds(value: Mapping[str, Any], defs: Mapping[str, Any]) -> Iterator[str]:
    types = value.get("type", ())
    for kind in [types] if isinstance(types, str) else types:
        if kind == "string" and value.get("pattern") == FILLED_IN:
            continue  # `${VAR}` is allowed for any value, as the text says
        if kind == "array":
            inner = _takes(value["items"], defs) if "items" in value else ""
            yield f"list of {inner}" if inner and inner != "a section" else "list"
        elif kind == "object":
            entries = _entries(value)
            yield "a section" if entries is None else f"names, each with {_takes(entries, defs)}"
        elif kind != "null":
            yield _WORDS[kind]


def _default(value: Mapping[str, Any]) -> str:
    default = value.get("default")
    if default is None or isinstance(default, dict):
        return ""
    return f"`{json.dumps(default)}`".replace('"', "")


def _line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _rewrite(folder: Path) -> None:
    document = folder / "docs" / "configuration.md"
    text = document.read_text(encoding="utf-8")
    head, rest = text.split(BEGIN)
    tail = rest.split(END)[1]
    document.write_text(f"{head}{BEGIN}\n\n{tables()}\n{END}{tail}", encoding="utf-8")
    (folder / "config" / "gateway.schema.json").write_text(schema_text(), encoding="utf-8")


if __name__ == "__main__":
    _rewrite(Path.cwd())
