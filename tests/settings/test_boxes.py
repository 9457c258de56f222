"""The `boxes` section: what it yields, and what is wrong with one."""

from collections.abc import Callable

import pytest

from gateway.core.swap_policy import SwapRules, Trigger
from gateway.settings import CheckReport, Settings, beside, changes

Check = Callable[..., CheckReport]

BOXED = """\
tokenizer: approximate
backends:
  gemma: {url: http://127.0.0.1:9001, profile: spark-nvfp4, versions: ">= 0.20, < 0.24"}
  qwen: {url: http://127.0.0.1:9002, profile: spark-nvfp4}
pools: {gemma: [gemma], qwen: [qwen]}
boxes:
  spark:
    default: gemma
    launch_record: launches.json
    backends:
      gemma: {exec: {start: [switch, gemma], stop: [switch, none]}, jobs: 2, max_wait_s: 300}
      qwen: {sleep: {level: 2}}
models:
  gemma-4:
    classes: [{class: chat, when: {total_tokens: "<= 60000"}, pools: [gemma], waiting: {max_wait_s: 3000}},
              {class: rest, pools: [gemma], waiting: {max_wait_s: 3000}}]
  qwen: {classes: [{class: chat, pools: [qwen], waiting: {max_wait_s: 3000}}]}
"""


def test_a_box_yields_its_rules(loaded: Callable[[str], Settings]) -> None:
    settings = loaded(BOXED)
    rules = settings.box_rules("spark", settle_s=4.0)
    triggers = {"gemma": Trigger(2, 300.0), "qwen": Trigger()}
    assert rules.swaps == SwapRules("gemma", triggers, 300.0, 1800.0)
    assert (rules.boot_budget_s, rules.settle_s) == (600.0, 4.0)
    assert settings.launch_record("spark") == settings.path.parent / "launches.json"
    assert [bound.text for bound in settings.policy().backends["gemma"].versions] == [">= 0.20", "< 0.24"]
    assert "box spark: gemma, qwen take turns; gemma by default" in settings.summary


def test_a_url_is_used_as_it_was_checked(loaded: Callable[[str], Settings]) -> None:
    """What verifies certificates goes by its scheme, and a variable may end with a line break."""
    agent = """{http: {start: {url: "HTTPS://Box/A?b=C\\n"}, stop: {url: 'http://box/b%20c'}}}"""
    written = BOXED.replace("{sleep: {level: 2}}", agent).replace(
        "http://127.0.0.1:9001", '"HTTPS://Gemma/A/\\n"'
    )
    document = loaded(written).document
    assert document.backends["gemma"].url == "https://Gemma/A"
    http = document.boxes["spark"].backends["qwen"].http
    assert http is not None
    assert (http.start.url, http.stop.url) == ("https://Box/A?b=C", "http://box/b%20c")


def test_a_boot_within_the_budget_of_the_box_is_no_fault_of_its_backend(
    loaded: Callable[[str], Settings],
) -> None:
    settings = loaded(BOXED.replace("launch_record: launches.json", "boot_budget_s: 1200"))
    assert [one.boot_budget_s for one in settings.policy().backends.values()] == [1200.0, 1200.0]
    longer = BOXED.replace("9002, profile: spark-nvfp4", "9002, profile: spark-nvfp4, boot_budget_s: 1800")
    assert loaded(longer).policy().backends["qwen"].boot_budget_s == 1800.0


def test_a_model_can_be_taken_out_of_the_file_with_a_profile_of_its_own(
    loaded: Callable[[str], Settings],
) -> None:
    own = "profiles: {slow: {extends: spark-nvfp4, served_model: q}}\nboxes:"
    started = loaded(
        BOXED.replace("9002, profile: spark-nvfp4", "9002, profile: slow").replace("boxes:", own)
    )
    alone = BOXED[: BOXED.index("boxes:")] + BOXED[BOXED.index("models:") : BOXED.index("  qwen: {cla")]
    for qwen in ("  qwen: {url: http://127.0.0.1:9002, profile: spark-nvfp4}\n", ", qwen: [qwen]"):
        alone = alone.replace(qwen, "")
    new = loaded(alone)
    running = beside(started, started, new)
    assert running.profile("qwen").served_model == "q"  # as long as it runs
    assert [*running.document.models] == ["gemma-4"]
    found = changes(started.document, new.document, {})
    assert found.now == ("pool qwen is gone", "model qwen is gone")
    assert found.at_start == ("boxes", "backend qwen, which belongs to a box")
    assert beside(started, running, started).document == started.document


def test_a_new_backend_gets_no_requests_before_its_box_runs(loaded: Callable[[str], Settings]) -> None:
    alone = BOXED[: BOXED.index("boxes:")] + BOXED[BOXED.index("models:") : BOXED.index("  qwen: {cla")]
    for qwen in ("  qwen: {url: http://127.0.0.1:9002, profile: spark-nvfp4}\n", ", qwen: [qwen]"):
        alone = alone.replace(qwen, "")
    started, new = loaded(alone), loaded(BOXED)
    running = beside(started, started, new)
    again = beside(started, running, loaded(BOXED.replace("max_wait_s: 300,", "max_wait_s: 400,")))
    for settings in (running, again):  # gemma has served without a box, and does so until there is one
        assert {name: one.drain for name, one in settings.policy().backends.items()} == {
            "gemma": False,
            "qwen": True,
        }
    found = changes(started.document, new.document, {})
    qwen = "backend qwen is new (spark-nvfp4, http://127.0.0.1:9002), drained until its box runs"
    assert found.now[0] == qwen
    assert found.at_start == ("boxes",)
    own = running.document.model_copy(update={"boxes": {}})
    assert changes(own, new.document, {}).now == ()


@pytest.mark.parametrize(
    ("good", "bad", "message"),
    [
        ("qwen: {sleep", "phi: {sleep", 'there is no backend "phi"; there are gemma, qwen'),
        ("default: gemma", "default: phi", 'there is no backend of this box "phi"; there are gemma, qwen'),
        ("qwen: {sleep: {level: 2}}", "", "a box needs two backends or more"),
        ("{sleep: {level: 2}}", "{jobs: 3}", "qwen: give exactly one of exec, http and sleep"),
        (
            "{sleep: {level: 2}}",
            "{sleep: {}, exec: {start: a, stop: b}}",
            "boxes.spark.backends.qwen: give exactly one of exec, http and sleep",
        ),
        ("start: [switch, gemma]", "start: switch gemma", "write a command as a list of its words, or set"),
        ("stop: [switch, none]", "stop: [switch, none], shell: true", "a command is one text, not a list"),
        (
            "{sleep: {level: 2}}",
            "{http: {start: {url: 'http://u:secret@box/a'}, stop: {url: 'http://box/b'}}}",
            "no credentials in URLs; name the variable with them (token_env, headers_env)",
        ),
        (
            "{sleep: {level: 2}}",
            "{http: {start: {url: 'http://box/a', body: {since: 2026-01-01}}, stop: {url: 'http://box/b'}}}",
            "http.start.body: this cannot be sent as JSON (Object of type date is not JSON serializable)",
        ),
        (
            "{sleep: {level: 2}}",
            "{http: {start: {url: 'http://box/a'}, stop: {url: 'http://box/b', body: {all: [.nan]}}}}",
            "http.stop.body: this cannot be sent as JSON",
        ),
        ('">= 0.20, < 0.24"', '"0.20"', 'write it as ">= 0.20, < 0.24"'),
        ('">= 0.20, < 0.24"', "0.20", "write it in quotes"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(checked: Check, good: str, bad: str, message: str) -> None:
    assert good in BOXED
    problems = [problem.message for problem in checked(BOXED.replace(good, bad)).problems]
    assert any(message in problem for problem in problems), problems
    assert not any("secret" in problem for problem in problems)


def test_a_backend_is_in_one_box_only(checked: Check) -> None:
    twice = BOXED.replace("models:", "  other: {default: qwen, backends: {qwen: {sleep: {}}}}\nmodels:", 1)
    problems = [problem.message for problem in checked(twice).problems]
    assert "qwen is in the box spark already" in problems


def test_a_class_that_cannot_wait_for_a_swap_is_warned_of(checked: Check) -> None:
    def waiting(model: str) -> list[str]:
        written = f"pools: [{model}], waiting: {{max_wait_s: 3000}}}}"
        assert written in BOXED
        report = checked(BOXED.replace(written, f"pools: [{model}]}}", 1))
        return [one.message for one in report.warnings if "take turns" in one.message]

    assert waiting("gemma")[0].startswith("class chat waits 1.2 s at most")
    assert waiting("qwen") == []  # it only has to wake up
    assert not any("take turns" in warning.message for warning in checked(BOXED).warnings)
