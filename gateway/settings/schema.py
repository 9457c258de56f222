"""The JSON Schema of the configuration file, generated from its models."""

from collections.abc import Mapping
from typing import Any

from gateway.settings.document import Document


def schema() -> dict[str, Any]:
    """Return the JSON Schema of a configuration file, short forms included. Editors complete by it."""
    generated = Document.model_json_schema(by_alias=True)
    definitions: dict[str, Any] = generated["$defs"]
    for section in (generated, *definitions.values()):
        for key in section.get("properties", {}).values():
            _complete(key, definitions)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Gemma Gateway configuration",
        **{key: value for key, value in generated.items() if key != "title"},
    }


def _complete(key: dict[str, Any], definitions: Mapping[str, Any]) -> None:
    """Give a key the description that pydantic leaves out where it repeats its section's."""
    if "description" not in key and "$ref" in key:
        key["description"] = definitions[key["$ref"].rsplit("/", 1)[-1]]["description"]
    if "patternProperties" in key:
        key["additionalProperties"] = False
    if isinstance(key.get("default"), dict):
        del key["default"]  # a section's defaults stand in the section
