"""What another policy would have done: tables of requests and policies, and what must be said about both."""

from collections.abc import Mapping
from typing import Any

import pytest
from support.decisions import SITE, Configure, Logged, classes, everywhere, line, moves

from gateway.core.request import CountMode
from gateway.core.usage import Ending
from gateway.replay.comparing import compare
from gateway.replay.figures import ALL, quantile
from gateway.settings import Settings
from gateway.telemetry.decision_lines import PromptLength

LONG = {"class": "long_document", "when": {"prompt_tokens": ">= 16000"}, "pools": ["push"]}
SHORT = {"class": "short_chat", "pools": ["light", "push"]}
MIXED = [line(at, tokens) for at, tokens in enumerate((100, 5_000, 9_000, 20_000, 50_000, 800))]


# ------------------------------------------------------------------ what moves


def test_under_the_same_policy_nothing_moves_and_both_sides_are_the_same(
    logged: Logged, configured: Configure
) -> None:
    report = compare(logged(*MIXED), configured())

    assert (report.moved, moves(report), report.refusals, report.notes) == (0, {}, [], [])
    assert report.simulated == report.predicted
    assert report.recorded_policy == report.other_policy


@pytest.mark.parametrize(
    ("bound", "moved"),
    [(">= 16000", 0), (">= 9001", 0), (">= 9000", 1), (">= 5000", 2), (">= 20001", 1), (">= 60000", 2)],
)
def test_another_threshold_moves_what_lies_between(
    logged: Logged, configured: Configure, bound: str, moved: int
) -> None:
    bent = LONG | {"when": {"prompt_tokens": bound}}

    report = compare(logged(*MIXED), configured(models=classes(bent, SHORT)))

    assert report.moved == moved
    by_class = moves(report).get("class", {})
    assert sum(by_class.values()) == moved
    assert set(by_class) <= {("short_chat", "long_document"), ("long_document", "short_chat")}


def test_moves_say_from_where_to_where_and_give_an_example(logged: Logged, configured: Configure) -> None:
    pools = {"light": ["light-1", "light-0"], "push": ["push"]}

    report = compare(logged(*MIXED), configured(pools=pools))

    assert moves(report) == {"backend": {("light-0", "light-1"): 4}}
    assert report.moves["backend"][0].example.endswith("decisions.jsonl:2")


# ------------------------------------------------------------------ what would be refused


@pytest.mark.parametrize(
    ("fields", "sections", "code", "words"),
    [
        (
            {"tokens": 50_000},
            {"models": classes({**SHORT, "pools": ["light"]})},
            "context_length_exceeded",
            "maximum context length is 32768 tokens, but the request needs 51040 (50016 input + 1024 output)",
        ),
        (
            {"images": 9},
            {"backends": everywhere(modalities={"images_max": 0})},
            "unsupported_modality",
            "takes this combination of images, audio and length",
        ),
        (
            {"seqs": 8, "choices": 8},
            {"backends": everywhere(limits={"knee_seqs": 4})},
            "too_many_choices",
            "No backend runs that many choices at once.",
        ),
        ({}, {"models": {"gemma-5": {"classes": [SHORT]}}}, "model_not_found", "Known: gemma-5."),
        (
            {},
            {"models": classes({**LONG, "pools": ["push"]})},
            "no_class",
            "No class of model `gemma-4` takes this request.",
        ),
        (
            {"max_tokens": 100_000},
            {"models": classes({**SHORT, "pools": ["light"]})},
            "invalid_request",
            "100000 output tokens are too many: this model holds 32768 tokens, prompt and output together.",
        ),
    ],
    ids=["length", "images", "choices", "model", "class", "output"],
)
def test_what_fits_nowhere_is_refused_in_the_words_its_caller_would_hear(
    logged: Logged,
    configured: Configure,
    fields: Mapping[str, Any],
    sections: Mapping[str, Any],
    code: str,
    words: str,
) -> None:
    with_images = configured(backends=everywhere(modalities={"images_max": 10}))
    log = logged(line(1, **fields), policy=with_images)

    report = compare(log, configured(**sections))

    [refusal] = report.refusals
    assert (refusal.code, refusal.requests, refusal.new) == (code, 1, 1)
    assert words in refusal.words
    assert report.moved == 1
    assert (moves(report)["pool"]).popitem()[0][1] == f"refused ({code})"
    assert all(side.requests == 0 for side in report.predicted.classes.values())


def test_what_was_refused_and_would_be_let_in_is_counted(logged: Logged, configured: Configure) -> None:
    narrow = configured(models=classes({**SHORT, "pools": ["light"]}))
    refused = line(
        1, 50_000, ending=Ending.REJECTED, tries=0, backend="", pool="", traffic_class="short_chat"
    )
    log = logged(refused, line(2), policy=narrow)

    report = compare(log, configured())

    assert (report.accepted, report.refusals) == (1, [])
    assert report.predicted.classes["long_document"].requests == 1
    again = compare(log, narrow)
    assert (again.accepted, again.refusals[0].new, again.moved) == (0, 0, 0)


# ------------------------------------------------------------------ what has to be said


@pytest.mark.parametrize(
    ("lines", "sections", "says"),
    [
        (
            [line(1)],
            {
                "backends": {name: SITE["backends"][name] for name in ("light-0", "push")},
                "pools": {"light": ["light-0"], "push": ["push"]},
            },
            "recorded with 3 backends, the other policy has 2: without light-1",
        ),
        (
            [line(1)],
            {"backends": {**SITE["backends"], "push": {**SITE["backends"]["push"], "profile": "h200-fp8"}}},
            "capacity differs from the recorded one: push",
        ),
        (
            [line(1)],
            {"models": classes({**SHORT, "class": "team", "when": {"header": {"x-team": "red"}}}, SHORT)},
            "has a condition on header x-team, but no line has it",
        ),
        (
            [line(1, headers={"x-team": True})],
            {"models": classes({**SHORT, "class": "team", "when": {"header": {"x-team": "red"}}}, SHORT)},
            "1 requests had a value in header x-team that no recorded condition named",
        ),
        (
            [line(1)],
            {
                "keys": {"nightly": {"sha256": "0" * 64}},
                "models": classes({**SHORT, "class": "night", "when": {"key": "nightly"}}, SHORT),
            },
            "has conditions on API keys, but the log has no key names",
        ),
        (
            [line(1), line(2, ending=Ending.FAILED, tokens_out=None)],
            {},
            "1 of 2 answers were not completed, or came without usage",
        ),
        ([line(1, out={"push": "unhealthy"})], {}, "1 requests arrived while a backend was out"),
        (
            [line(1)],
            {"pools": {**SITE["pools"], "light": {"backends": ["light-0", "light-1"], "tpot_target_ms": 50}}},
            "pool light: the simulation does not follow tpot_target_ms",
        ),
        (
            [line(1, prompt=PromptLength(40_000, 40_000, CountMode.BOUND), traffic_class="long_document")],
            {},
            "1 prompts were only counted up to the recorded fleet's largest window",
        ),
        (
            [line(1), line(2), line(3, policy="gone")],
            {},
            "2 configurations were in force",
        ),
        (
            [line(1)],
            {"models": classes({**LONG, "when": {"prompt_tokens": ">= 6000"}}, SHORT)},
            "class long_document: max_wait_s was 900, is 1.2, ttft_target_s was 60, is 2; `shed` and `late`",
        ),
        (
            [line(1, traffic_class="long_document")],
            {},
            "1 requests get another class when the recorded policy decides them again",
        ),
    ],
    ids=[
        *("fleet", "capacity", "header", "its value", "keys", "output", "outages", "TPOT", "bounds"),
        *("reload", "waits", "other class"),
    ],
)
def test_what_the_figures_leave_out_is_said(
    logged: Logged, configured: Configure, lines: list[Any], sections: Mapping[str, Any], says: str
) -> None:
    log = logged(*lines)
    report = compare(log, configured(**sections))

    assert [note for note in report.notes if says in note], report.notes
    assert len(report.notes) == 1


def test_without_the_recorded_policy_there_is_no_other_side(logged: Logged, configured: Configure) -> None:
    report = compare(logged(*MIXED, has_policy=False), configured())

    assert report.simulated is None
    assert report.same_pool_share is None
    assert "the recorded policy is not in the log" in report.notes[0]
    assert report.predicted.classes[ALL].requests == len(MIXED)


def test_requests_that_were_never_counted_are_not_decided_again(
    logged: Logged, configured: Configure
) -> None:
    lost = line(0, prompt=None, ending=Ending.REJECTED, model="", traffic_class="", backend="", tries=0)

    report = compare(logged(lost, line(1), lost), configured())

    assert (report.requests, report.decided, report.undecided) == (3, 1, {"rejected": 2})


# ------------------------------------------------------------------ figures


def crowd(count: int, **fields: Any) -> list[Any]:
    return [line(number * 0.05, 2_000, 200, **fields) for number in range(count)]


def small(configured: Configure, *names: str, max_wait_s: float = 60) -> Settings:
    """Return the site with two places per server for chats, and only these servers for them."""
    chats = {**SHORT, "pools": ["light"], "waiting": {"max_wait_s": max_wait_s}}
    limited = {"limits": {"knee_seqs": 2}}
    backends = {
        name: {**one, **limited} for name, one in SITE["backends"].items() if name in (*names, "push")
    }
    return configured(
        models=classes(LONG, chats), backends=backends, pools={"light": list(names), "push": ["push"]}
    )


def test_half_the_fleet_makes_them_wait_twice_as_long(logged: Logged, configured: Configure) -> None:
    log = logged(*crowd(40), policy=small(configured, "light-0", "light-1"))

    report = compare(log, small(configured, "light-0"))

    assert report.simulated is not None
    before, after = report.simulated.classes["short_chat"], report.predicted.classes["short_chat"]
    assert before.wait_p95_s is not None
    assert after.wait_p95_s is not None
    assert before.wait_p95_s > 1
    assert after.wait_p95_s > 1.8 * before.wait_p95_s
    assert (before.shed_share, after.shed_share) == (0, 0)
    assert after.late_share is not None
    assert before.late_share is not None
    assert after.late_share >= before.late_share > 0
    assert after.tokens_per_s < before.tokens_per_s
    assert sum(report.simulated.served.values()) == 40
    assert report.predicted.served == {"light-0": 40}


def test_where_waiting_is_short_the_rest_is_shed(logged: Logged, configured: Configure) -> None:
    patient, hasty = (small(configured, "light-0", max_wait_s=wait_s) for wait_s in (60, 1))
    report = compare(logged(*crowd(40), policy=patient), hasty)

    assert report.simulated is not None
    assert report.simulated.classes[ALL].shed_share == 0
    assert 0.3 < report.predicted.classes[ALL].shed_share < 1
    assert report.moved == 0  # each of them would go where it went, were there room


def test_jobs_wait_without_a_limit(logged: Logged, configured: Configure) -> None:
    hasty = small(configured, "light-0", max_wait_s=1)
    report = compare(logged(*crowd(40, is_job=True), policy=hasty), hasty)

    assert report.predicted.classes[ALL].shed_share == 0


@pytest.mark.parametrize(
    ("tokens", "handed_over_as", "moved"),
    [(9_000, "short_chat", 1), (1_000, "short_chat", 0), (1_000, "long_document", 0)],
)
def test_a_job_is_classified_anew_where_its_class_is_explained(
    logged: Logged, configured: Configure, tokens: int, handed_over_as: str, moved: int
) -> None:
    job = line(1, tokens, is_job=True, handed_over_as=handed_over_as, traffic_class=handed_over_as)
    bent = LONG | {"when": {"prompt_tokens": ">= 8000"}}

    report = compare(logged(job), configured(models=classes(bent, SHORT)))

    assert report.moved == moved
    assert report.notes == []


def test_callers_that_left_leave_again(logged: Logged, configured: Configure) -> None:
    gone = [
        line(at=0.001 * n, ending=Ending.LEFT, total_s=0.01, ttft_s=None, tokens_out=None) for n in range(9)
    ]

    report = compare(logged(*gone, line(1.0)), small(configured, "light-0"))

    assert report.predicted.classes[ALL].requests == 10
    assert report.predicted.classes[ALL].late_share == 0.9  # who leaves never had a first token
    assert report.predicted.classes[ALL].wait_p95_s == 0.008  # a place comes free when one leaves


def test_recorded_figures_are_those_of_the_log(logged: Logged, configured: Configure) -> None:
    log = logged(
        line(0.0, wait_s=0.1, ttft_s=0.5, total_s=4.0),
        line(1.0, wait_s=0.3, ttft_s=2.5, total_s=5.0),
        line(2.0, stream=False, ttft_s=6.0, total_s=6.0),
        line(
            3.0, ending=Ending.SHED, backend="", pool="", tries=0, ttft_s=None, tokens_out=None, total_s=1.0
        ),
        line(4.0, ending=Ending.BROKEN, ttft_s=1.0, tokens_out=None, total_s=4.0),
        line(5.0, ending=Ending.REJECTED, tokens_out=None, ttft_s=None),  # by its backend
    )

    report = compare(log, configured())

    found = report.recorded.classes["short_chat"]
    assert (found.requests, found.shed_share) == (5, 0.2)
    assert (found.wait_p50_s, found.wait_p95_s) == (0.0, 0.3)
    assert (found.ttft_p50_s, found.ttft_p95_s) == (1.0, 2.5)
    assert found.late_share == pytest.approx(1 / 3, abs=1e-4)  # the target of chats is 2 s
    assert (found.total_p50_s, found.total_p95_s) == (5.0, 6.0)
    assert found.tokens_per_s == 300 / 8
    assert report.recorded.served == {"light-0": 4}
    assert report.predicted.classes["short_chat"].requests == 5  # what a backend refused is not sent again


def test_the_simulation_says_how_often_it_serves_in_the_pool_that_served(
    logged: Logged, configured: Configure
) -> None:
    log = logged(line(0.0), line(10.0), line(20.0), line(30.0, pool="push", backend="push", is_spill=True))

    assert compare(log, configured()).same_pool_share == 0.75


@pytest.mark.parametrize(
    ("values", "share", "found"),
    [
        ([], 0.5, None),
        ([3], 0.95, 3),
        ([4, 1, 2, 3], 0.5, 2),
        ([4, 1, 2, 3], 0.95, 4),
        ([1] * 19 + [9], 0.95, 1),
    ],
)
def test_a_quantile_is_one_of_the_values(values: list[float], share: float, found: float | None) -> None:
    assert quantile(values, share) == found


def test_the_tried_engines_are_those_of_its_profiles(logged: Logged, configured: Configure) -> None:
    slow = {"slow": {"extends": "h100-tp2-push", "perf": {"t_fixed": 1.0}}}

    report = compare(logged(*MIXED), configured(profiles=slow, backends=everywhere(profile="slow")))

    assert report.simulated is not None
    before, after = report.simulated.classes[ALL], report.predicted.classes[ALL]
    assert before.total_p50_s is not None
    assert after.total_p50_s is not None
    assert after.total_p50_s > 10 * before.total_p50_s
