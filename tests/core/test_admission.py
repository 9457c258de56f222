"""Both sides of every edge of the admission rule."""

from dataclasses import replace

import pytest

from gateway.core import admission
from gateway.core.backends import Backend, Capacity, Gates, JobRoom, KneeStep, Spill
from gateway.core.decision import Exclusion
from gateway.core.kv import KvFormula
from gateway.core.load import Demand, Load
from gateway.core.perf import PerfModel

ONE_LAYER = KvFormula(sliding_layers=0, global_layers=1)  # 1 block per 32 tokens: easy to add up by hand
CAPACITY = Capacity(
    context_tokens=32_768,
    knee=(KneeStep(2_000, 64), KneeStep(16_000, 32), KneeStep(None, 12)),
    kv=ONE_LAYER,
    kv_blocks=2_000,
    kv_budget=0.9,  # 1,800 blocks
)
UNCOUNTED = Capacity(context_tokens=32_768, knee=(KneeStep(None, 64),))


def refusal(capacity: Capacity, load: Load, wanted: Demand) -> Exclusion | None:
    """Return why the request may not start: what is permanent first, then what is full."""
    claim, most = admission.claim(capacity, wanted), admission.limits(capacity)
    return admission.misfit(capacity, wanted) or admission.full(load, claim, most)


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

    assert refusal(capacity, filled(capacity, 100, knee - 1), demand(100)) is None
    assert refusal(capacity, filled(capacity, 100, knee), demand(100)) is Exclusion.AT_KNEE


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
    assert refusal(CAPACITY, load, wanted) is reason


def test_where_kv_is_not_counted_the_engine_judges() -> None:
    assert admission.claim(UNCOUNTED, demand(30_000)).kv_blocks == 0
    assert admission.blocks_planned(UNCOUNTED) is None
    assert refusal(UNCOUNTED, Load(seqs=63, share=63 * 15_625), demand(30_000)) is None


# ------------------------------------------------------------------ gates

WIDE = Capacity(context_tokens=262_144, knee=(KneeStep(16_000, 64), KneeStep(None, 16)))
READING = Load(seqs=1, share=62_500, long_seqs=1, long_unanswered=1, prefill_ms=20_000)
ANSWERED = READING.after_first_token


def verdict(gates: Gates, load: Load, prompt: int, prefill_s: float = 0.0, seqs: int = 1) -> Exclusion | None:
    claim = admission.claim(WIDE, demand(prompt, seqs=seqs), gates, prefill_s)
    return admission.full(load, claim, admission.limits(WIDE, claim, gates))


@pytest.mark.parametrize(
    ("gates", "load", "prompt", "reason"),
    [
        pytest.param(Gates(), Load(), 50_000, None, id="the-first-document"),
        pytest.param(Gates(), READING, 50_000, Exclusion.LONG_PREFILL, id="one-is-being-read"),
        pytest.param(Gates(), READING, 16_000, Exclusion.LONG_PREFILL, id="the-shortest-long-prompt"),
        pytest.param(Gates(), READING, 15_999, None, id="the-longest-short-prompt"),
        pytest.param(Gates(), ANSWERED, 50_000, None, id="it-has-been-read"),
        pytest.param(Gates(long_prefills=2), READING, 50_000, None, id="two-at-a-time"),
        pytest.param(
            Gates(long_prefills=2), READING + READING, 50_000, Exclusion.LONG_PREFILL, id="not-three"
        ),
        pytest.param(Gates(long_prefills=None), READING + READING, 50_000, None, id="no-gate"),
        pytest.param(Gates(long_prefills=0), Load(), 50_000, None, id="nothing-else-runs"),
        pytest.param(Gates(long_prefills=0), Load(seqs=1), 50_000, Exclusion.AT_KNEE, id="a-chat-runs"),
        pytest.param(Gates(long_prefills=0), Load(seqs=1), 15_999, None, id="chats-may"),
        pytest.param(
            Gates(long_prompt_tokens=8_000), READING, 8_000, Exclusion.LONG_PREFILL, id="own-length"
        ),
        pytest.param(Gates(long_seqs=2), ANSWERED, 50_000, None, id="the-last-document"),
        pytest.param(
            Gates(long_seqs=2), ANSWERED + ANSWERED, 50_000, Exclusion.LONG_FULL, id="one-document-over"
        ),
        pytest.param(Gates(long_seqs=2), ANSWERED + ANSWERED, 1_000, None, id="chats-are-no-documents"),
    ],
)
def test_the_gates_for_long_prompts(gates: Gates, load: Load, prompt: int, reason: Exclusion | None) -> None:
    assert verdict(gates, load, prompt) is reason


def test_more_sequences_of_a_document_than_the_cap_may_run_alone() -> None:
    assert verdict(Gates(long_seqs=2), Load(), 50_000, seqs=3) is None
    assert verdict(Gates(long_seqs=2), ANSWERED, 50_000, seqs=3) is Exclusion.LONG_FULL


def test_a_request_with_more_long_prompts_than_are_read_at_once_may_run_alone() -> None:
    gates = Gates(long_prefills=2)
    wanted = admission.claim(WIDE, replace(demand(50_000, seqs=3), prompts=3), gates, 20.0)
    most = admission.limits(WIDE, wanted, gates)

    assert (wanted.long_unanswered, wanted.prefill_ms) == (3, 60_000)
    assert admission.full(Load(), wanted, most) is None
    assert admission.full(READING, wanted, most) is Exclusion.LONG_PREFILL


@pytest.mark.parametrize(
    ("blocks", "kv_taken", "reason"),
    [
        (1_700, 0, None),
        (1_700, 50, None),
        (1_700, 51, Exclusion.KV_FULL),
        (0, 1_750, None),
        (0, 5_000, None),  # alone it may always be tried: the figure may be wrong
        (1, 1_750, Exclusion.KV_FULL),
    ],
)
def test_blocks_that_others_hold_are_not_given_out(
    blocks: int, kv_taken: int, reason: Exclusion | None
) -> None:
    wanted = admission.claim(CAPACITY, demand(1_600))  # 50 blocks
    most = admission.limits(CAPACITY, wanted, kv_taken=kv_taken)

    assert admission.full(Load(kv_blocks=blocks), wanted, most) is reason


@pytest.mark.parametrize(
    ("share", "seqs", "reason"),
    [
        (0, 4, None),
        (0, 16, None),
        (1, 16, Exclusion.AT_KNEE),
        (125_000, 8, None),
        (125_001, 8, Exclusion.AT_KNEE),
    ],
)
def test_a_lower_share_of_the_knee(share: int, seqs: int, reason: Exclusion | None) -> None:
    wanted = admission.claim(CAPACITY, demand(seqs=seqs))
    most = admission.limits(CAPACITY, wanted, share_max=admission.WHOLE // 4)

    assert admission.full(Load(share=share), wanted, most) is reason


def test_what_needs_more_than_a_lower_share_runs_alone() -> None:
    claim = admission.claim(UNCOUNTED, demand(100, seqs=48))
    most = admission.limits(UNCOUNTED, claim, share_max=admission.WHOLE // 2)

    assert admission.full(Load(), claim, most) is None
    assert admission.full(Load(share=1), claim, most) is Exclusion.AT_KNEE


def test_exactly_the_blocks_there_are_fit() -> None:
    assert admission.misfit(CAPACITY, demand(1_000), kv_blocks=1_800) is None
    assert admission.misfit(CAPACITY, demand(1_000), kv_blocks=1_801) is Exclusion.KV_EXCEEDED


@pytest.mark.parametrize(
    ("outstanding_ms", "prefill_s", "reason"),
    [
        pytest.param(0, 5.0, None, id="any-prompt-on-an-idle-server"),
        pytest.param(599, 0.1, None, id="just-below-the-bound"),
        pytest.param(599, 5.0, None, id="size-does-not-matter"),
        pytest.param(600, 0.1, Exclusion.PREFILL_BUSY, id="at-the-bound"),
        pytest.param(600, 0.0, None, id="no-latency-model-no-bound"),
    ],
)
def test_prompt_work_outstanding_is_bounded(
    outstanding_ms: int, prefill_s: float, reason: Exclusion | None
) -> None:
    assert verdict(Gates(prefill_s=0.6), Load(prefill_ms=outstanding_ms), 1_000, prefill_s) is reason


def test_a_bound_of_less_than_a_millisecond_admits_a_prompt_to_an_idle_server() -> None:
    gates = Gates(prefill_s=0.0001)

    assert verdict(gates, Load(), 1_000, 5.0) is None
    assert verdict(gates, Load(prefill_ms=1), 1_000, 5.0) is Exclusion.PREFILL_BUSY


def test_prompt_work_ends_with_the_first_token() -> None:
    claim = admission.claim(WIDE, demand(50_000), Gates(), 20.0)

    assert (claim.long_seqs, claim.long_unanswered, claim.prefill_ms) == (1, 1, 20_000)
    assert claim.after_first_token == Load(claim.seqs, claim.share, claim.kv_blocks, long_seqs=1)


def test_a_backend_without_a_latency_model_predicts_no_prompt_work() -> None:
    perf = PerfModel(t_fixed=0, t_mem=0, kv_read=0, kv_span=0, t_seq=0, t_tok=0.001, t_attn=0, sharp=1)
    known = Backend("a", "http://a", WIDE, perf=perf, batched_tokens=2_048)

    assert admission.prefill_s(known, demand(5_000)) == pytest.approx(5.0)
    assert admission.prefill_s(Backend("b", "http://b", WIDE), demand(5_000)) == 0.0


def test_what_is_cached_of_a_prompt_is_no_prompt_work() -> None:
    perf = PerfModel(t_fixed=0, t_mem=0, kv_read=0, kv_span=0, t_seq=0, t_tok=0.001, t_attn=1e-6, sharp=1)
    known = Backend("a", "http://a", WIDE, perf=perf, batched_tokens=2_048)
    attention_s = 1e-6 * 1_000 * 4_500  # each of the rest attends to all before it, cached or not

    assert admission.prefill_s(known, demand(5_000), 0.8) == pytest.approx(1.0 + attention_s)
    assert admission.prefill_s(known, demand(5_000), 1.0) == 0.0


@pytest.mark.parametrize(("cached", "unanswered"), [(0.0, 1), (0.5, 1), (0.6, 0), (1.0, 0)])
def test_a_long_prompt_is_no_long_prefill_where_most_of_it_is_cached(cached: float, unanswered: int) -> None:
    gates = Gates(long_prefills=0)
    claim = admission.claim(WIDE, demand(32_000), gates, 0.1, cached)
    on_a_busy_one = admission.full(ANSWERED, claim, admission.limits(WIDE, claim, gates))

    assert claim == Load(1, 62_500, claim.kv_blocks, 1, unanswered, 100)
    assert on_a_busy_one is (Exclusion.AT_KNEE if unanswered else None)


def test_the_work_of_a_prompt_without_measure_is_that_of_the_longest_predicted() -> None:
    perf = PerfModel(t_fixed=0, t_mem=0, kv_read=0, kv_span=0, t_seq=0, t_tok=0.001, t_attn=0, sharp=1)
    known = Backend("a", "http://a", WIDE, perf=perf, batched_tokens=2_048)
    longest_s = admission.prefill_s(known, demand(admission.PROMPT_TOKENS_MAX))

    assert longest_s == pytest.approx(admission.PROMPT_TOKENS_MAX / 1000)
    assert admission.prefill_s(known, demand(100 * admission.PROMPT_TOKENS_MAX)) == longest_s


# ------------------------------------------------------------------ spill


@pytest.mark.parametrize(
    ("load", "prefill_s", "reason"),
    [
        pytest.param(Load(share=859_375), 0.1, None, id="up-to-the-reserve"),
        pytest.param(Load(share=859_376), 0.1, Exclusion.AT_KNEE, id="into-the-reserve"),
        pytest.param(
            Load(share=921_875, long_seqs=1),
            0.1,
            None,
            id="a-document-that-runs-uses-its-part-of-the-reserve",
        ),
        pytest.param(Load(share=921_876, long_seqs=1), 0.1, Exclusion.AT_KNEE, id="but-not-more"),
        pytest.param(Load(share=984_375, long_seqs=3), 0.1, None, id="the-knee-holds-all-the-same"),
        pytest.param(Load(share=984_376, long_seqs=3), 0.1, Exclusion.AT_KNEE, id="never-above-it"),
        pytest.param(Load(prefill_ms=499), 3.0, None, id="little-prompt-work"),
        pytest.param(Load(prefill_ms=500), 0.1, Exclusion.PREFILL_BUSY, id="too-much-prompt-work"),
    ],
)
def test_spilled_work_leaves_a_reserve(load: Load, prefill_s: float, reason: Exclusion | None) -> None:
    claim = admission.claim(WIDE, demand(1_000), Gates(), prefill_s)
    most = admission.limits(WIDE, claim, Gates())
    rules = Spill(reserve=0.125, prefill_s=0.5)  # two of sixteen documents

    tightened = admission.spill_limits(WIDE, most, claim, load, Gates(), rules)

    assert admission.full(load, claim, tightened) is reason


@pytest.mark.parametrize(
    ("prompt_tokens", "seqs"),
    [pytest.param(20_000, 1, id="a-knee-of-one"), pytest.param(100, 4, id="choices")],
)
def test_spilled_work_that_needs_the_whole_knee_runs_alone(prompt_tokens: int, seqs: int) -> None:
    capacity = Capacity(context_tokens=32_768, knee=(KneeStep(16_000, 4), KneeStep(None, 1)))
    claim = admission.claim(capacity, demand(prompt_tokens, seqs=seqs), Gates())
    most = admission.limits(capacity, claim, Gates())

    def reason(load: Load) -> Exclusion | None:
        tightened = admission.spill_limits(capacity, most, claim, load, Gates(), Spill(reserve=0.125))
        return admission.full(load, claim, tightened)

    assert claim.share == admission.WHOLE
    assert reason(Load()) is None
    assert reason(Load(seqs=1, share=1)) is Exclusion.AT_KNEE


def test_a_pools_own_bounds_hold_for_spilled_work_too() -> None:
    gates = Gates(prefill_s=0.2)
    claim = admission.claim(WIDE, demand(1_000), gates, 0.1)
    most = admission.limits(WIDE, claim, gates, share_max=500_000)

    tightened = admission.spill_limits(WIDE, most, claim, Load(), gates, Spill(), 500_000)

    assert (tightened.share, tightened.prefill_ms) == (500_000 - 62_500, 199 + 100)


def test_what_holds_for_jobs_holds_for_those_that_spill_too() -> None:
    claim = admission.claim(WIDE, demand(1_000))
    most = admission.job_limits(WIDE, admission.limits(WIDE, claim), claim, JobRoom(reserve=0.5))

    assert admission.spill_limits(WIDE, most, claim, Load(), Gates(), Spill(reserve=0.125)) == most


# ------------------------------------------------------------------ jobs


@pytest.mark.parametrize(
    ("load", "prefill_s", "reason"),
    [
        pytest.param(Load(share=55 * 15_625), 0.1, None, id="up-to-the-reserve"),
        pytest.param(Load(share=56 * 15_625), 0.1, Exclusion.AT_KNEE, id="into-the-reserve"),
        pytest.param(Load(kv_blocks=1_543), 0.1, None, id="blocks-up-to-the-reserve"),
        pytest.param(Load(kv_blocks=1_544), 0.1, Exclusion.KV_FULL, id="blocks-into-the-reserve"),
        pytest.param(Load(prefill_ms=499), 3.0, None, id="little-prompt-work"),
        pytest.param(Load(prefill_ms=500), 0.1, Exclusion.PREFILL_BUSY, id="too-much-prompt-work"),
    ],
)
def test_jobs_leave_room_for_those_whose_callers_wait(
    load: Load, prefill_s: float, reason: Exclusion | None
) -> None:
    wanted = demand(1_000)  # a 64th of the knee, 32 of 1,800 blocks
    claim = admission.claim(CAPACITY, wanted, Gates(), prefill_s)
    most = admission.limits(CAPACITY, claim, Gates())

    tightened = admission.job_limits(CAPACITY, most, claim, JobRoom(reserve=0.125, prefill_s=0.5))

    assert admission.full(load, claim, most) is None
    assert admission.full(load, claim, tightened) is reason


@pytest.mark.parametrize(("knee", "seqs"), [(1, 1), (4, 4), (7, 7), (8, 7), (12, 11), (64, 56), (128, 112)])
def test_what_jobs_leave_of_the_knee_is_whole_sequences(knee: int, seqs: int) -> None:
    capacity = Capacity(context_tokens=100_000, knee=(KneeStep(None, knee),))
    claim = admission.claim(capacity, demand(100))
    most = admission.job_limits(capacity, admission.limits(capacity, claim), claim, JobRoom())

    assert admission.full(filled(capacity, 100, seqs - 1), claim, most) is None
    assert admission.full(filled(capacity, 100, seqs), claim, most) is Exclusion.AT_KNEE


def test_jobs_leave_a_part_of_what_may_be_used() -> None:
    claim = admission.claim(CAPACITY, demand(1_000), Gates(prefill_s=0.2))
    most = admission.limits(CAPACITY, claim, Gates(prefill_s=0.2), share_max=admission.WHOLE // 2)
    tightened = admission.job_limits(CAPACITY, most, claim, JobRoom(reserve=0.25, prefill_s=0.5))

    assert (most.share, tightened.share) == (500_000, 375_000)
    assert tightened.prefill_ms == most.prefill_ms == 199  # the pool's own bound is the lower one


def test_a_job_that_needs_more_than_jobs_may_use_runs_alone() -> None:
    capacity = replace(CAPACITY, knee=(KneeStep(None, 8),))
    wanted = demand(1_000, 30_000, seqs=8)
    claim = admission.claim(capacity, wanted)
    claim = replace(claim, kv_blocks=1_800)
    most = admission.job_limits(capacity, admission.limits(capacity, claim), claim, JobRoom())

    assert admission.full(Load(), claim, most) is None
    assert admission.full(Load(share=1), claim, most) is Exclusion.AT_KNEE
    assert admission.full(Load(kv_blocks=1), claim, most) is Exclusion.KV_FULL


def test_where_nothing_is_kept_free_jobs_may_use_everything() -> None:
    wanted = demand(1_000)
    claim = admission.claim(CAPACITY, wanted, Gates(), 3.0)
    most = admission.limits(CAPACITY, claim, Gates())

    assert admission.job_limits(CAPACITY, most, claim, JobRoom(reserve=0.0, prefill_s=None)) == most


@pytest.mark.parametrize(("tokens", "counted"), [(1, 256), (256, 256), (257, 512), (2_049, 2_304)])
def test_prompt_work_is_counted_by_buckets_where_the_engine_pads_to_them(tokens: int, counted: int) -> None:
    perf = PerfModel(t_fixed=0, t_mem=0, kv_read=0, kv_span=0, t_seq=0, t_tok=0.001, t_attn=0, sharp=1)
    plain = Backend("a", "http://a", WIDE, perf=perf, batched_tokens=4_096)
    padding = replace(plain, quirks=("token_buckets_256",))

    assert admission.prefill_s(plain, demand(tokens)) == pytest.approx(tokens / 1000)
    assert admission.prefill_s(padding, demand(tokens)) == pytest.approx(counted / 1000)
