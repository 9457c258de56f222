"""The knee estimate: exact where its formula holds, near the knee of engines, silent where it cannot tell."""

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import knee as bench
from gateway.core.knee_estimate import (
    KNEE_RATIO,
    STEPS_MIN,
    ClassShape,
    Confidence,
    KneeEstimate,
    LimitedBy,
    StepFit,
    Uncertainty,
    estimate,
)
from gateway.core.tpot_control import GapWindow

CASES = {case.name: case for case in bench.CASES}
SHAPE = ClassShape(streams=10, prompt_tokens=10_000, chunks=1000, block_chunks=3000 * 1000)


def window(batch: float, prompt_tokens: float, step_s: float, *, steps: int = 100) -> GapWindow:
    """A window of equal steps."""
    return GapWindow(
        duration_s=steps * step_s,
        busy_s=steps * step_s,
        decoding_seq_s=batch * steps * step_s,
        chunks=round(batch * steps),
        steps=steps,
        prompt_tokens=round(prompt_tokens * steps),
    )


def linear(
    fixed: float, per_seq: float, per_token: float, *, count: int = 200, noise: float = 0.0
) -> StepFit:
    """The fit of windows that follow the formula, but for noise."""
    dice, fit = random.Random(1), StepFit()
    for _ in range(count):
        batch, prompt = dice.randint(1, 40), dice.randint(0, 400)
        step_s = (fixed + per_seq * batch + per_token * prompt) * (1 + dice.gauss(0, noise))
        fit = fit.with_window(window(batch, prompt, step_s))
    return fit


# ------------------------------------------------------------------ where the formula holds


def test_the_knee_is_where_ten_percent_more_buys_one_percent() -> None:
    def speed(batch: float) -> float:
        return batch / (0.01 + 0.002 * batch)

    knee = KNEE_RATIO * 0.01 / 0.002

    assert speed(1.1 * knee) / speed(knee) == pytest.approx(1.01)


def test_steps_that_follow_the_formula_give_its_knee() -> None:
    found = estimate(linear(0.0125, 0.00125, 0.00015), SHAPE)

    # 10 prompt tokens per chunk; 1 % because a sequence of 100 chunks is in flight for 101 steps.
    assert found.seqs == pytest.approx(KNEE_RATIO * 0.0125 / (0.00125 + 0.0015) * 1.01)
    assert (found.confidence, found.doubt) == (Confidence.HIGH, Uncertainty.NONE)
    assert found.limited_by is LimitedBy.COMPUTE


@given(
    fixed=st.floats(0.005, 0.2),
    per_seq=st.floats(0.0005, 0.01),
    per_token=st.floats(0.00005, 0.0005),
    slots=st.floats(1, 500),
)
def test_an_estimate_never_exceeds_the_slots_and_is_a_number_or_unknown(
    fixed: float, per_seq: float, per_token: float, slots: float
) -> None:
    fit = linear(fixed, per_seq, per_token, count=40, noise=0.02)
    found = estimate(fit, SHAPE, round(slots * 3000))

    assert (found.seqs is None) == (found.confidence is Confidence.UNKNOWN)
    if found.seqs is not None:
        assert 0 < found.seqs <= slots + 1
    if found.confidence is not Confidence.HIGH:
        assert found.doubt is not Uncertainty.NONE


def test_blocks_clip_the_estimate() -> None:
    found = estimate(linear(0.0125, 0.00125, 0.00015), SHAPE, kv_blocks=60_000)

    assert (found.seqs, found.limited_by) == (20.0, LimitedBy.KV_SLOTS)


def test_a_few_windows_that_went_wrong_change_little() -> None:
    clean = estimate(linear(0.0125, 0.00125, 0.00015, noise=0.02), SHAPE)
    fit = linear(0.0125, 0.00125, 0.00015, noise=0.02)
    for batch in (2, 20, 40):
        fit = fit.with_window(window(batch, 100, 3.0))  # three stalls: steps forty times as long

    assert clean.seqs is not None
    assert estimate(fit, SHAPE).seqs == pytest.approx(clean.seqs, rel=0.05)


def test_it_follows_a_server_that_changed() -> None:
    fit = linear(0.0125, 0.00125, 0.00015, noise=0.02)
    dice = random.Random(2)
    for _ in range(400):
        batch, prompt = dice.randint(1, 40), dice.randint(0, 400)
        fit = fit.with_window(window(batch, prompt, 0.025 + 0.0025 * batch + 0.0001 * prompt))

    assert estimate(fit, SHAPE).seqs == pytest.approx(KNEE_RATIO * 0.025 / 0.0035 * 1.01, rel=0.1)


def test_short_windows_are_put_together() -> None:
    fit = StepFit()
    for _ in range(3):
        fit = fit.with_window(window(4, 10, 1.0, steps=STEPS_MIN // 2 - 1))

    assert fit.windows == 1
    assert fit.batch_max == pytest.approx(4)
    assert fit.pending.steps == 0


def test_windows_with_much_hidden_do_not_count() -> None:
    seen = window(4, 10, 0.02)
    hidden = replace(seen, hidden_seq_s=seen.decoding_seq_s)

    assert StepFit().with_window(hidden).windows == 0
    assert StepFit().with_window(replace(seen, hidden_seq_s=seen.decoding_seq_s / 10)).windows == 1


def test_what_strangers_have_in_the_engine_is_part_of_its_batch() -> None:
    """They make every step longer; left out, they would pass for a larger fixed part."""
    strangers, told, untold = 4, StepFit(), StepFit()
    dice = random.Random(1)
    for _ in range(200):
        batch, prompt = dice.randint(20, 40), dice.randint(0, 400)
        seen = window(batch, prompt, 0.0125 + 0.00125 * (batch + strangers) + 0.00015 * prompt)
        told = told.with_window(seen.beside(strangers))
        untold = untold.with_window(seen)

    knee = KNEE_RATIO * 0.0125 / (0.00125 + 0.0015) * 1.01
    assert estimate(told, SHAPE).seqs == pytest.approx(knee)
    assert estimate(untold, SHAPE).seqs == pytest.approx(1.4 * knee)


# ------------------------------------------------------------------ where it cannot tell


@pytest.mark.parametrize(
    ("fit", "shape", "doubt"),
    [
        (StepFit(), SHAPE, Uncertainty.FEW_WINDOWS),
        (linear(0.0125, 0.00125, 0.00015, count=25), SHAPE, Uncertainty.FEW_WINDOWS),
        (linear(0.0125, 0.00125, 0.00015), ClassShape(), Uncertainty.NO_STREAMS),
        (linear(0.0125, -0.00025, 0.0), SHAPE, Uncertainty.NO_LINE),
        (linear(0.0125, 0.00125, 0.00015, count=40, noise=0.3), SHAPE, Uncertainty.NOISY),
        (linear(0.0125, 0.0001, 0.00001), SHAPE, Uncertainty.OUT_OF_REACH),
    ],
    ids=["nothing", "too-early", "no-stream-of-that-class", "falling", "scatter", "flat"],
)
def test_it_says_why_there_is_no_figure(fit: StepFit, shape: ClassShape, doubt: Uncertainty) -> None:
    found = estimate(fit, shape)

    assert (found.seqs, found.confidence, found.doubt) == (None, Confidence.UNKNOWN, doubt)


def test_a_batch_that_never_changes_tells_nothing() -> None:
    fit, dice = StepFit(), random.Random(3)
    for _ in range(200):
        batch, prompt = dice.uniform(38, 42), dice.randint(0, 400)
        fit = fit.with_window(window(batch, prompt, 0.01 + 0.001 * batch + 0.00015 * prompt))

    found = estimate(fit, SHAPE)
    assert found.doubt is Uncertainty.NO_SPREAD
    assert 39 < found.decoding_seqs < 41 < found.decoding_seqs_max <= 42


def test_prompts_that_cost_more_in_a_large_batch_are_a_bend() -> None:
    fit, dice = StepFit(), random.Random(4)
    for _ in range(300):
        batch, prompt = dice.randint(1, 40), dice.randint(0, 400)
        step_s = max(0.06, 0.001 * batch + 0.00015 * prompt) * (1 + dice.gauss(0, 0.01))
        fit = fit.with_window(window(batch, prompt, step_s))

    assert estimate(fit, SHAPE).doubt is Uncertainty.BENT


numbers = st.floats(0, 1e6, allow_nan=False)


@given(
    seen=st.lists(
        st.builds(
            GapWindow,
            duration_s=st.floats(0.01, 1e4),
            busy_s=numbers,
            decoding_seq_s=numbers,
            waiting_seq_s=numbers,
            hidden_seq_s=numbers,
            chunks=st.integers(1, 10**6),
            steps=st.floats(0.1, 1e5),
            prompt_tokens=st.integers(0, 10**6),
        ).filter(lambda w: w.busy_s > 1e-3),
        max_size=60,
    )
)
def test_no_windows_make_it_fail(seen: list[GapWindow]) -> None:
    fit = StepFit()
    for one in seen:
        fit = fit.with_window(one)
    found = estimate(fit, SHAPE, 10**6)

    assert found.seqs is None or 0 < found.seqs < math.inf


# ------------------------------------------------------------------ with engines


def found_by(name: str, load: float | None, seed: int, minutes: int) -> KneeEstimate:
    return bench.watch(bench.server_of(CASES[name], load, seed), minutes).last


@pytest.mark.parametrize(
    ("name", "load", "seed", "minutes"),
    [
        ("LIGHT chat", 0.6, 1, 20),
        ("LIGHT chat", 0.6, 2, 20),
        ("LIGHT chat", 0.6, 3, 5),
        ("LIGHT chat", 0.9, 1, 20),
        ("LIGHT chat", 0.9, 2, 20),
        ("LIGHT chat", 0.9, 3, 10),
        ("LIGHT 2.5K/700", 0.6, 1, 20),
        ("LIGHT 2.5K/700", 0.9, 2, 20),
        ("LIGHT 4K/512", 0.6, 1, 10),
    ],
)
def test_ordinary_traffic_shows_the_knee_within_15_percent(
    name: str, load: float, seed: int, minutes: int
) -> None:
    found = found_by(name, load, seed, minutes)

    assert found.seqs == pytest.approx(CASES[name].knee_seqs, rel=0.15)
    assert found.confidence is Confidence.HIGH


def test_kv_slots_end_the_curve_of_a_large_card_before_compute_does() -> None:
    found = found_by("H200 chat, KV-bound", 0.6, 1, 5)

    assert found.limited_by is LimitedBy.KV_SLOTS
    assert found.seqs == pytest.approx(CASES["H200 chat, KV-bound"].knee_seqs, rel=0.15)


@pytest.mark.parametrize("name", ["LIGHT chat", "PUSH 16K/1K", "sharp corner"])
def test_a_full_server_gives_no_figure(name: str) -> None:
    found = found_by(name, None, 1, 10)

    assert found.seqs is None
    assert found.doubt in (Uncertainty.NO_SPREAD, Uncertainty.FEW_WINDOWS)


@pytest.mark.parametrize("load", [0.3, 0.6])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_sharp_corner_is_never_reported_with_confidence_below_it(load: float, seed: int) -> None:
    assert found_by("sharp corner", load, seed, 20).confidence is not Confidence.HIGH


def test_documents_are_never_reported_with_confidence_at_low_load() -> None:
    assert found_by("PUSH 16K/1K", 0.3, 1, 40).confidence is not Confidence.HIGH
