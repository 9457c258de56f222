"""Both sides of every edge of the admission rule."""

import pytest

from gateway.core import admission
from gateway.core.kv import KvFormula
from gateway.core.values import Capacity, Demand, Exclusion, KneeStep, Load

ONE_LAYER = KvFormula(sliding_layers=0, global_layers=1)  # 1 block per 32 tokens: easy to add up by hand
CAPACITY = Capacity(
    context_tokens=32_768,
    knee=(KneeStep(2_000, 64), KneeStep(16_000, 32), KneeStep(None, 12)),
    kv=ONE_LAYER,
    kv_blocks=2_000,
    kv_budget=0.9,  # 1,800 blocks
)
UNCOUNTED = Capacity(context_tokens=32_768, knee=(KneeStep(None, 64),))


def demand(prompt: int = 1_000, total: int | None = None, seqs: int = 1) -> Demand:
    return Demand(seqs=seqs, prompt_tokens=prompt, total_tokens=prompt if total is None else total)


def filled(capacity: Capacity, prompt: int, seqs: int) -> Load:
    one = admission.claim(capacity, demand(prompt))
    return Load(seqs=seqs, share=seqs * one.share, kv_blocks=seqs * one.kv_blocks)


@pytest.mark.parametrize(
    ("prompt", "knee"),
    [(0, 64), (2_000, 64), (2_001, 32), (16_000, 32), (16_001, 12), (200_000, 12)],
)
def test_the_knee_is_a_curve_over_prompt_length(prompt: int, knee: int) -> None:
    assert admission.knee_seqs(CAPACITY, prompt) == knee


@pytest.mark.parametrize("knee", [1, 3, 4, 7, 12, 56, 64, 96, 128, 256, 999])
def test_exactly_the_knee_fits(knee: int) -> None:
    capacity = Capacity(context_tokens=100_000, knee=(KneeStep(None, knee),))

    assert admission.refusal(capacity, filled(capacity, 100, knee - 1), demand(100)) is None
    assert admission.refusal(capacity, filled(capacity, 100, knee), demand(100)) is Exclusion.AT_KNEE


@pytest.mark.parametrize(
    ("load", "wanted", "reason"),
    [
        pytest.param(Load(), demand(), None, id="idle"),
        pytest.param(Load(), demand(32_000, 32_768), None, id="the-last-token-of-the-window"),
        pytest.param(Load(), demand(32_000, 32_769), Exclusion.CONTEXT_EXCEEDED, id="one-token-over"),
        pytest.param(Load(), demand(100, seqs=64), None, id="as-many-choices-as-the-knee"),
        pytest.param(Load(), demand(100, seqs=65), Exclusion.SEQS_EXCEEDED, id="one-choice-over-the-knee"),
        pytest.param(Load(), demand(100, 30_000, seqs=2), Exclusion.KV_EXCEEDED, id="never-enough-blocks"),
        pytest.param(Load(kv_blocks=1_768), demand(1_000, 1_024), None, id="the-last-planned-block"),
        pytest.param(
            Load(kv_blocks=1_769), demand(1_000, 1_024), Exclusion.KV_FULL, id="one-block-over-plan"
        ),
        pytest.param(
            filled(CAPACITY, 1_000, 32), demand(20_000), None, id="half-full-of-chats-holds-a-document"
        ),
        pytest.param(
            Load(seqs=6, share=6 * (1_000_000 // 12)),
            demand(1_000, seqs=33),
            Exclusion.AT_KNEE,
            id="six-documents-leave-room-for-32-chats",
        ),
        pytest.param(
            Load(seqs=64, share=1_000_000),
            demand(40_000),
            Exclusion.CONTEXT_EXCEEDED,
            id="permanent-reason-first",
        ),
    ],
)
def test_refusal(load: Load, wanted: Demand, reason: Exclusion | None) -> None:
    assert admission.refusal(CAPACITY, load, wanted) is reason


def test_where_kv_is_not_counted_the_engine_judges() -> None:
    assert admission.claim(UNCOUNTED, demand(30_000)).kv_blocks == 0
    assert admission.blocks_planned(UNCOUNTED) is None
    assert admission.refusal(UNCOUNTED, Load(seqs=63, share=63 * 15_625), demand(30_000)) is None


@pytest.mark.parametrize(
    ("seqs", "residence_s", "ahead", "seconds"),
    [(64, 6.4, 0, 0.1), (64, 6.4, 9, 1.0), (0, 5.0, 0, 5.0)],
    ids=["next", "tenth", "nothing-known"],
)
def test_retry_after_is_littles_law(seqs: int, residence_s: float, ahead: int, seconds: float) -> None:
    assert admission.retry_after_s(Load(seqs=seqs), residence_s, ahead) == pytest.approx(seconds)
