"""The JSON Schema and the tables of keys: fresh, complete, and of one mind with the loader."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from gateway.settings import CheckReport, schema
from gateway.settings.reference import BEGIN, END, schema_text, tables

ROOT = Path(__file__).parents[2]


def validator() -> Any:
    return jsonschema.Draft202012Validator(schema())


def test_the_schema_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(schema())


def test_the_shipped_schema_is_fresh() -> None:
    shipped = (ROOT / "config" / "gateway.schema.json").read_text(encoding="utf-8")
    assert shipped == schema_text(), "run: python -m gateway.settings.reference"


def test_the_documented_keys_are_fresh() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    generated = text.split(BEGIN)[1].split(END)[0]
    assert generated.strip() == tables().strip(), "run: python -m gateway.settings.reference"


def test_every_key_has_a_title_and_a_description() -> None:
    root = schema()
    for name, section in (("file", root), *root["$defs"].items()):
        assert section["description"], name
        for key, value in section.get("properties", {}).items():
            assert value["description"], f"{name}.{key}"
            assert "title" in value or "$ref" in value or "anyOf" in value, f"{name}.{key}"


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(("approximate", "{vocab: v.tiktoken}"), id="vocabulary"),
        pytest.param(("[push]\n", "{backends: [push], timeouts: {idle_s: 9}}\n"), id="pool-in-full"),
        pytest.param(("9001,", "9001, limits: {knee_seqs: 4},"), id="a-knee"),
        pytest.param(
            ("9001,", '9001, limits: {knee_seqs: [{prompt_tokens: "<= 9", seqs: 4}, {seqs: 1}]},'), id="curve"
        ),
        pytest.param(
            ("{images: true}", "{images: '> 2', tools: 0, max_tokens: ['> 1', '< 9']}"), id="comparisons"
        ),
        pytest.param(("{images: true}", "{header: {x: true, y: a, z: [a]}, key: k}"), id="headers"),
        pytest.param(("backends:", "admin: off\nbackends:"), id="admin-off"),
        pytest.param(("backends:", "keys: {k: {env: K}}\nbackends:"), id="keys"),
        pytest.param(
            ("backends:", "webhooks: {w: {url: https://a/, secret_env: S, events: batch.*}}\nbackends:"),
            id="a-webhook",
        ),
        pytest.param(
            (
                "backends:",
                "profiles: {p: {extends: x, boot_s: null, perf: {draft: {value: 3, basis: measured}}}}\n"
                "backends:",
            ),
            id="figures",
        ),
    ],
)
def test_short_forms_and_long_ones_are_in_the_schema(plain: str, change: tuple[str, str]) -> None:
    bent = plain.replace(*change, 1)
    assert bent != plain
    validator().validate(yaml.safe_load(bent))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(("approximate", "exact"), id="tokenizer"),
        pytest.param(("approximate", "{}"), id="tokenizer-without-a-file"),
        pytest.param(("tokenizer", "tokeniser"), id="unknown-key"),
        pytest.param(("9001,", "9001, knee_seqs: 4,"), id="key-in-the-wrong-section"),
        pytest.param(("9001,", "9001, limits: {kv_budget: 2},"), id="out-of-range"),
        pytest.param(("9001,", "9001, limits: {knee_seqs: 1000},"), id="a-knee-out-of-range"),
        pytest.param(("light: {url", "li ght: {url"), id="name"),
        pytest.param(("class: image,", "class: image, priority: yes,"), id="priority"),
        pytest.param(("http://", "ftp://"), id="scheme"),
        pytest.param(("[push]\n", "[]\n"), id="empty-pool"),
        pytest.param(('">= 16000"', '"many"'), id="comparison"),
        pytest.param(("backends:", "keys: {k: {}}\nbackends:"), id="key-of-nothing"),
        pytest.param(("backends:", "webhooks: {w: {url: https://a/}}\nbackends:"), id="webhook-unsigned"),
        pytest.param(
            ("backends:", "webhooks: {w: {url: https://a/, secret_env: S, events: [done]}}\nbackends:"),
            id="unknown-event",
        ),
    ],
)
def test_what_the_loader_refuses_an_editor_marks(
    checked: Callable[..., CheckReport], plain: str, change: tuple[str, str]
) -> None:
    bent = plain.replace(*change, 1)
    assert bent != plain
    assert not checked(bent).ok
    with pytest.raises(jsonschema.ValidationError):
        validator().validate(yaml.safe_load(bent))


FILLED_IN = [
    pytest.param(("9001,", "9001, limits: {knee_seqs: '${KNEE}', kv_budget: '${SHARE}'},"), id="figures"),
    pytest.param(("backends:", "reload: {watch: '${FLAG}'}\nbackends:"), id="a-flag"),
    pytest.param(("class: image", "class: '${NAME}'"), id="a-name"),
    pytest.param(("tokenizer: approximate", "tokenizer: '${COUNT:-approximate}'"), id="the-tokenizer"),
    pytest.param(("light: [light]", "light: ['${LIGHT:-light}']"), id="a-list"),
    pytest.param(("{images: true}", "{images: '${FLAG}', prompt_tokens: '${LONG}'}"), id="conditions"),
    pytest.param(
        ("pools: [push]}", "pools: [push], waiting: {when_late: '${WORD}', max_wait_s: '${SHARE}'}}"),
        id="a-word-of-several",
    ),
    pytest.param(
        (
            "models:",
            "boxes: {b: {default: light, backends: {light: {sleep: {level: '${LEVEL}'}},"
            " push: {sleep: {}}}}}\nmodels:",
        ),
        id="a-number-of-several",
    ),
]


@pytest.mark.parametrize("change", FILLED_IN)
def test_what_is_filled_in_by_the_loader_is_no_mistake_to_an_editor(
    checked: Callable[..., CheckReport], plain: str, change: tuple[str, str]
) -> None:
    bent = plain.replace(*change, 1)
    assert bent != plain
    known = {"KNEE": "4", "SHARE": "0.5", "FLAG": "true", "NAME": "image", "LONG": ">= 9", "WORD": "demote"}
    known["LEVEL"] = "2"
    assert checked(bent, known).ok
    validator().validate(yaml.safe_load(bent))


def test_keys_are_not_filled_in_and_plain_text_is_no_figure(plain: str) -> None:
    for change in (("  light: {url", "  '${LIGHT}': {url"), ("9001,", "9001, limits: {knee_seqs: many},")):
        bent = plain.replace(*change, 1)
        assert bent != plain
        with pytest.raises(jsonschema.ValidationError):
            validator().validate(yaml.safe_load(bent))
