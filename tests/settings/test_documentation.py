"""docs/configuration.md shows files that load, and messages that `check` really prints."""

import re
from collections.abc import Callable
from pathlib import Path

from gateway.settings import CheckReport

Check = Callable[..., CheckReport]
TEXT = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text(encoding="utf-8")
WHOLE, FIGURES = re.findall(r"```yaml\n(.*?)```", TEXT, re.S)


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
