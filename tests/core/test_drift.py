"""When what backends report no longer agrees with what is estimated."""

import dataclasses

import pytest

from gateway.core.drift import SAMPLES_MIN, WINDOW, Drift, DriftTracker
from gateway.core.estimation import is_plain, pieces
from gateway.core.policy import TemplateCosts
from gateway.core.request import CountMode, Estimate, Prompt, Turn

COSTS = TemplateCosts()
TEXT = Prompt(turns=(Turn("user", ("hi",)),))
IMAGE = Prompt(turns=(Turn("user", ("hi",), images=2),))


def exact(tokens: int) -> Estimate:
    return Estimate(tokens, tokens + 16, CountMode.EXACT)


def approximate(tokens: int) -> Estimate:
    return Estimate(tokens, tokens * 11 // 10, CountMode.APPROXIMATE)


def after(*answers: tuple[Estimate, int], times: int = 20, prompt: Prompt = TEXT) -> Drift:
    tracker = DriftTracker()
    for _ in range(times):
        for estimate, actual in answers:
            tracker.observe("light-0", prompt, COSTS, estimate, actual, is_plain=is_plain(prompt))
    return tracker.drift("light-0")


@pytest.mark.parametrize(
    ("estimate", "actual", "drifted"),
    [
        (exact(100), 100, False),
        (exact(100), 116, False),
        (exact(100), 117, True),
        (exact(100), 83, True),
        (exact(100_000), 100_516, False),
        (exact(100_000), 100_517, True),
        (approximate(10_000), 11_016, False),
        (approximate(10_000), 11_017, True),
        (approximate(10_000), 8_900, True),
    ],
    ids=[
        "equal",
        "in-16",
        "above-16",
        "below-16",
        "in-0.5%",
        "above-0.5%",
        "in-band",
        "above-band",
        "below-band",
    ],
)
def test_drift_begins_where_counting_explains_no_more(estimate: Estimate, actual: int, drifted: bool) -> None:
    drift = after((estimate, actual))

    assert drift.drifted is drifted
    assert drift.median_tokens == actual - estimate.tokens


def test_a_template_that_is_forty_tokens_longer_is_noticed() -> None:
    def estimated(costs: TemplateCosts) -> Estimate:
        return exact(pieces(TEXT, costs).total([1]))

    true_tokens = estimated(COSTS).tokens
    edited = dataclasses.replace(COSTS, generation_prompt=COSTS.generation_prompt + 40)

    assert not after((estimated(COSTS), true_tokens)).drifted
    assert after((estimated(edited), true_tokens)).drifted


def test_a_few_odd_prompts_are_no_drift() -> None:
    drift = after((exact(100), 100), (exact(100), 100), (exact(100), 900))

    assert not drift.drifted
    assert drift.median_tokens == 0


def test_too_few_answers_say_nothing() -> None:
    assert not after((exact(100), 900), times=SAMPLES_MIN - 1).drifted
    assert after((exact(100), 900), times=SAMPLES_MIN).drifted


def test_only_the_last_answers_count() -> None:
    tracker = DriftTracker()
    for actual in [900] * 300 + [100] * WINDOW:
        tracker.observe("light-0", TEXT, COSTS, exact(100), actual, is_plain=True)

    assert tracker.drift("light-0") == Drift()


def test_each_backend_is_judged_by_its_own_answers() -> None:
    tracker = DriftTracker()
    for _ in range(20):
        tracker.observe("light-0", TEXT, COSTS, exact(100), 100, is_plain=True)
        tracker.observe("push", TEXT, COSTS, exact(100), 140, is_plain=True)

    assert {name: drift.drifted for name, drift in tracker.drifts().items()} == {
        "light-0": False,
        "push": True,
    }


IGNORED = [
    ("a-bound", TEXT, Estimate(100, 100, CountMode.BOUND), 900),
    ("no-usage", TEXT, exact(100), 0),
    ("tools", dataclasses.replace(TEXT, tools_json="[{}]"), exact(100), 900),
    ("tools-with-an-image", dataclasses.replace(IMAGE, tools_json="[{}]"), exact(1000), 9000),
    ("audio", Prompt(turns=(Turn("user", (), audios=1),)), exact(100), 900),
    ("an-image-beside-audio", Prompt(turns=(Turn("user", (), images=1, audios=1),)), exact(100), 900),
    (
        "an-image-beside-a-tool-call",
        dataclasses.replace(IMAGE, turns=(*IMAGE.turns, Turn("assistant", (), tool_calls=(("f", "{}"),)))),
        exact(1000),
        9000,
    ),
    ("an-image-from-a-tool", Prompt(turns=(Turn("tool", ("hi",), images=1),)), exact(1000), 9000),
    ("several-completions", Prompt(raw_texts=("a", "b")), exact(100), 900),
]


@pytest.mark.parametrize(
    ("prompt", "estimate", "actual"), [row[1:] for row in IGNORED], ids=[row[0] for row in IGNORED]
)
def test_answers_that_cannot_tell_are_left_out(prompt: Prompt, estimate: Estimate, actual: int) -> None:
    assert after((estimate, actual), prompt=prompt) == Drift()


def test_a_backend_that_never_answered_has_not_drifted() -> None:
    assert DriftTracker().drift("light-0") == Drift()


# 20 tokens of text beside two images that are counted at 280 + 2 each.
@pytest.mark.parametrize(
    ("per_image", "budget"),
    [
        (280, 280),
        (188, 280),
        (256, 280),
        (284, 280),  # the text beside it may be off a little
        (285, 560),
        (70, 70),
        (130, 140),
        (144, 140),
        (500, 560),
        (1081, 1120),
        (1120, 1120),
        (1200, 1120),
    ],
)
def test_the_image_budget_behind_the_answers_is_named(per_image: int, budget: int) -> None:
    drift = after((exact(20 + 2 * 282), 20 + 2 * (per_image + 2)), prompt=IMAGE)

    assert (drift.image_tokens, drift.image_tokens_expected) == (budget, 280)
    assert drift.image_drifted is (budget != 280)
    assert not drift.drifted
    assert drift.median_tokens == 0


def test_the_budget_a_request_asks_for_is_the_expected_one() -> None:
    prompt = dataclasses.replace(IMAGE, image_budget=1120)
    drift = after((exact(20 + 2 * 1122), 20 + 2 * 1083), prompt=prompt)

    assert (drift.image_tokens, drift.image_tokens_expected) == (1120, 1120)
    assert not drift.image_drifted


def test_a_budget_of_ones_own_is_not_taken_for_the_next_larger() -> None:
    prompt = dataclasses.replace(IMAGE, image_budget=400)
    assert after((exact(20 + 2 * 402), 20 + 2 * 402), prompt=prompt).image_tokens == 400


def test_the_budget_of_most_images_is_named() -> None:
    small, large = (exact(584), 20 + 2 * 282), (exact(584), 20 + 2 * 1122)
    assert after(large, large, small, prompt=IMAGE).image_tokens == 1120


def test_too_few_images_name_no_budget() -> None:
    assert after((exact(584), 2300), prompt=IMAGE, times=SAMPLES_MIN - 1).image_tokens is None


def test_images_beside_a_long_text_that_is_guessed_name_no_budget() -> None:
    assert after((approximate(20_000), 23_000), prompt=IMAGE).image_tokens is None
    assert after((approximate(584), 2264), prompt=IMAGE).image_tokens == 1120
    # Two images weigh as much as one that is twice as large.
    assert after((approximate(1_000 + 560), 1_000 + 2_240), prompt=IMAGE).image_tokens == 1120
    assert after((approximate(1_500 + 560), 1_500 + 2_240), prompt=IMAGE).image_tokens is None
    assert after((exact(20_000 + 560), 20_000 + 2_240), prompt=IMAGE).image_tokens == 1120
