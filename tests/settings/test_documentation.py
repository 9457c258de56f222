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
