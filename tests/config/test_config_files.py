"""The files in config/: valid, by the loader and by the schema, with warnings only where intended."""

import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from gateway.settings import check, load, schema

CONFIG = Path(__file__).parents[2] / "config"
FILES = sorted(CONFIG.glob("*.yaml"))
HEADER = "# yaml-language-server: $schema=./gateway.schema.json\n"

INTENDED = {
    "demo.yaml": [
        "class reasoning admits prompts of any length",
        "class long_document admits images and audio",
        "class short_chat admits audio",
    ],
    "gateway.example.yaml": [
        "environment variable PUSH_KEY is not set",
        "there is no file",
        "there is no file",
        "there is no file",
        "spark.key cannot be read",
        "environment variable SWITCH_TOKEN is not set",
        "environment variable REPORTS_KEY is not set",
        "search.key cannot be read",
        "environment variable OTLP_HEADERS is not set",
        "environment variable REPORTS_WEBHOOK_SECRET is not set",
        "webhook.secret cannot be read",
    ],
}
DEPLOYMENTS = {
    "any-server.yaml": ["generic"],
    "2x-h100-light.yaml": ["h100-tp1-light", "h100-tp1-light"],
    "2x-h100-push.yaml": ["h100-tp2-push"],
    "h200-fp8.yaml": ["h200-fp8"],
    "spark.yaml": ["spark-fp8"],
    "2x-spark.yaml": ["spark2-fp8"],
    "spark-swapped-with-qwen.yaml": ["spark-nvfp4", "qwen-on-spark"],
    "tpu-v6e-4.yaml": ["tpu-v6e4-moe"],
    "demo.yaml": [
        *("h100-tp1-light", "h100-tp1-light", "h100-tp2-push", "spark-nvfp4", "tpu-v6e4-moe"),
        "spark-nvfp4",  # for the Qwen that shares its Spark
    ],
}


@pytest.fixture(scope="module")
def described() -> dict[str, Any]:
    return schema()


def test_there_is_a_file_for_every_deployment() -> None:
    names = {file.name for file in FILES}
    assert names == {*DEPLOYMENTS, "mixed-fleet.yaml", "gateway.example.yaml"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_file_has_no_problem_and_only_the_warnings_it_means_to_have(file: Path) -> None:
    report = check(file, {})
    assert report.problems == ()
    expected = INTENDED.get(file.name, [])
    found = [warning.message for warning in report.warnings]
    assert len(found) == len(expected), found
    for message, start in zip(found, expected, strict=True):
        assert start in message


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_file_is_valid_by_the_schema_it_names(file: Path, described: dict[str, Any]) -> None:
    text = file.read_text(encoding="utf-8")
    assert text.startswith(HEADER)
    jsonschema.Draft202012Validator(described).validate(yaml.safe_load(text))


@pytest.mark.parametrize("name", sorted(DEPLOYMENTS))
def test_a_deployments_backends_have_its_profile(name: str) -> None:
    policy = load(CONFIG / name, {}).policy()
    assert [backend.profile for backend in policy.backends.values()] == DEPLOYMENTS[name]


@pytest.mark.parametrize("name", sorted(DEPLOYMENTS.keys() - {"demo.yaml", "any-server.yaml"}))
def test_a_ready_file_names_its_launch_flags_and_the_sources_of_its_figures(name: str) -> None:
    text = (CONFIG / name).read_text(encoding="utf-8")
    assert "vllm serve" in text
    window = next(iter(load(CONFIG / name, {}).policy().backends.values())).capacity.context_tokens
    assert f"--max-model-len {window}" in text
    assert re.search(r"\((OPR|LDI|DSF|DSN|TPU)", text)


def test_the_demo_fleet_is_on_its_six_ports() -> None:
    policy = load(CONFIG / "demo.yaml", {}).policy()
    urls = [backend.url for backend in policy.backends.values()]
    assert urls == [f"http://127.0.0.1:{port}" for port in range(9001, 9007)]


def test_every_key_appears_in_the_documented_example(described: dict[str, Any]) -> None:
    text = (CONFIG / "gateway.example.yaml").read_text(encoding="utf-8")
    sections = {"file": described, **described["$defs"]}
    missing = [
        f"{name}.{key}"
        for name, section in sections.items()
        for key in section.get("properties", ())
        if not re.search(rf"(?<![\w-]){key}\s*:", text)
    ]
    assert missing == []


def test_every_section_of_the_example_is_in_use_but_the_vocabulary(described: dict[str, Any]) -> None:
    data = yaml.safe_load((CONFIG / "gateway.example.yaml").read_text(encoding="utf-8"))
    assert described["properties"].keys() == data.keys()
    used = _keys(data)
    for name in (
        "HealthSection",
        "RequestsSection",
        "ResponsesSection",
        "ShutdownSection",
        "WeightsSection",
        "TimeoutsSection",
    ):
        assert described["$defs"][name]["properties"].keys() <= used, name


def test_values_of_the_example_are_the_defaults_it_says_they_are(tmp_path: Path) -> None:
    bare = "".join(
        line
        for line in (CONFIG / "demo.yaml").read_text(encoding="utf-8").splitlines(keepends=True)
        if not line.startswith(("listen", "admin"))
    )
    path = tmp_path / "bare.yaml"
    path.write_text(bare)
    example, plain = load(CONFIG / "gateway.example.yaml", {}).document, load(path, {}).document
    for section in ("listen", "admin", "timeouts", "routing", "requests", "responses", "health", "shutdown"):
        assert getattr(example, section) == getattr(plain, section), section


def _keys(value: Any) -> set[str]:
    if isinstance(value, dict):
        return set(value) | {key for inner in value.values() for key in _keys(inner)}
    if isinstance(value, list):
        return {key for inner in value for key in _keys(inner)}
    return set()


@pytest.mark.parametrize(
    "file", [file for file in FILES if "\n#   knee " in file.read_text("utf-8")], ids=lambda file: file.stem
)
def test_the_knee_in_a_comment_is_the_one_in_force(file: Path) -> None:
    line = re.search(r"^#   knee (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
    assert line
    for backend in load(file).policy().backends.values():
        figures = iter(re.findall(r"[\d,]*\d", line[1]))
        steps = dict.fromkeys(step.seqs for step in backend.capacity.knee)
        missing = [seqs for seqs in steps if f"{seqs}" not in figures]  # in this order
        assert not missing, f"{backend.id}: {line[1]}"
