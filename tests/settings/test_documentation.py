"""The documentation shows files, and parts of files, that load, and messages that `check` really prints."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.settings import CheckReport
from gateway.settings.document import Document

Check = Callable[..., CheckReport]
ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
WHOLE, FIGURES = re.findall(r"```yaml\n(.*?)```", TEXT, re.S)

REST = """
tokenizer: approximate
backends:
  light-0: {url: "http://127.0.0.1:8000", profile: h100-tp1-light}
  spark-0: {url: "http://127.0.0.1:8001", profile: spark-nvfp4}
  qwen-0: {url: "http://127.0.0.1:8002", profile: spark-nvfp4}
pools: {light: [light-0], spark: [spark-0], qwen: [qwen-0]}
boxes:
  spark:
    default: spark-0
    backends:
      spark-0: {exec: {start: [start], stop: [stop]}}
      qwen-0: {exec: {start: [start], stop: [stop]}}
models:
  gemma-4:
    classes:
      - {class: chat, pools: [light, spark, qwen]}
keys: {nightly: {env: NIGHTLY}}
jobs: {}
"""
"""What the parts of files that the documentation shows refer to, or need beside them."""


def parts() -> Iterator[Any]:
    """Yield every YAML block that is a part of the gateway's configuration, not another program's."""
    for page in (ROOT / "README.md", ROOT / "deploy" / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for number, block in enumerate(re.findall(r"```yaml\n(.*?)```", page.read_text("utf-8"), re.S)):
            if not yaml.safe_load(block).keys().isdisjoint(Document.model_fields):
                yield pytest.param(block, id=f"{page.relative_to(ROOT)}-{number}")


def merged(rest: Any, part: Any) -> Any:
    if not (isinstance(rest, dict) and isinstance(part, dict)):
        return part
    return rest | {key: merged(rest.get(key), value) for key, value in part.items()}


@pytest.mark.parametrize("part", list(parts()))
def test_every_part_of_a_file_that_is_shown_is_one(checked: Check, part: str) -> None:
    is_whole = {"backends", "pools", "models"} <= yaml.safe_load(part).keys()
    text = part if is_whole else yaml.safe_dump(merged(yaml.safe_load(REST), yaml.safe_load(part)))

    assert [str(problem) for problem in checked(text).problems] == []


def test_the_whole_configuration_is_one(checked: Check) -> None:
    report = checked(WHOLE)
    assert report.ok
    assert not report.warnings


def test_the_site_profile_is_one(checked: Check) -> None:
    report = checked(FIGURES + WHOLE.replace("h100-tp1-light", "light-hot"))
    assert report.ok
    assert report.settings is not None
    assert report.settings.profile("light-0").capacity.knee[0].seqs == 48


def test_the_messages_are_what_check_says(checked: Check) -> None:
    bent = WHOLE.replace("h100-tp1-light", "h100-tp1-ligth").replace(
        "h100-tp2-push", "h100-tp2-push, knee_seqs: 4"
    )
    for problem in checked(bent).problems:
        assert str(problem).split("gateway.yaml")[1] in TEXT
    assert TEXT.count("did you mean") == len(checked(bent).problems) == 2


@pytest.mark.parametrize(
    ("lengths", "wait_s"),
    [('">= 8000"', 900.0), ('"> 7999"', 900.0), ('"== 8000"', 900.0), ('">= 7999"', 1.2), ('"<= 8000"', 1.2)],
)
def test_a_class_is_for_documents_if_it_takes_no_prompt_below_8000_tokens(
    checked: Check, lengths: str, wait_s: float
) -> None:
    one = f"      - {{class: c, when: {{prompt_tokens: {lengths}}}, pools: [push]}}\n"
    settings = checked(WHOLE.partition("    classes:\n")[0] + "    classes:\n" + one).settings
    assert settings is not None
    assert settings.policy().models[0].classes[0].waiting.max_wait_s == wait_s


def test_the_defaults_of_each_kind_of_class_are_those_of_the_table(checked: Check) -> None:
    whens = ("{reasoning: true}", '{prompt_tokens: ">= 8000"}', '{prompt_tokens: ">= 4000"}')
    classes = "".join(
        f"      - {{class: c{n}, when: {when}, pools: [push]}}\n" for n, when in enumerate(whens)
    )
    settings = checked(WHOLE.partition("    classes:\n")[0] + "    classes:\n" + classes).settings
    assert settings is not None
    waits = [one.waiting for one in settings.policy().models[0].classes]
    kinds = TEXT.partition("## Kinds of classes")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ")[2:] for line in kinds.splitlines() if line.startswith("| ")][1:]

    assert [[float(cell) for cell in row] for row in rows] == [
        [one.max_wait_s, one.ttft_target_s, one.prefill_weight] for one in waits
    ]
