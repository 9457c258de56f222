"""KV blocks: the formula against every published figure, and its edges."""

import pytest

from gateway.core.kv import KvFormula

DENSE = KvFormula(sliding_layers=50, global_layers=10)
DRAFTED = KvFormula(sliding_layers=50, global_layers=10, drafter_layers=1)
FULL_CONTEXT = KvFormula(sliding_layers=0, global_layers=30, global_block_tokens=16)


@pytest.mark.parametrize(
    ("formula", "logged_tokens", "window", "batched", "published"),
    [
        pytest.param(DENSE, 120_624, 32_768, 8_192, 11.57, id="h200-fp8"),
        pytest.param(DENSE, 60_752, 32_768, 8_192, 5.83, id="h200-bf16"),
        pytest.param(DRAFTED, 244_816, 262_144, 16_384, 6.11, id="push-with-the-drafter-as-a-layer"),
        pytest.param(DENSE, 37_392, 262_144, 2_048, 1.53, id="vllm-issue-39734"),
    ],
)
def test_published_concurrency_comes_out(
    formula: KvFormula, logged_tokens: int, window: int, batched: int, published: float
) -> None:
    concurrency = formula.total_blocks(logged_tokens) / formula.boot_blocks(window, batched)
    assert round(concurrency, 2) == published


def test_the_drafter_is_what_makes_push_come_out() -> None:
    assert DENSE.total_blocks(244_816) / DENSE.boot_blocks(262_144, 16_384) > 6.5


@pytest.mark.parametrize(
    ("formula", "pool", "context", "held"),
    [
        pytest.param(DRAFTED, 324_032, 1_300, 86, id="light-1.3K"),
        pytest.param(DRAFTED, 324_032, 4_608, 65, id="light-4.6K"),
        pytest.param(DRAFTED, 324_032, 17_408, 33, id="light-17.4K"),
        pytest.param(DRAFTED, 933_361, 4_608, 187, id="push-4.6K"),
        pytest.param(DRAFTED, 933_361, 17_408, 95, id="push-17.4K-not-the-14-of-a-token-budget"),
        pytest.param(DRAFTED, 933_361, 132_000, 17, id="push-132K"),
        pytest.param(DRAFTED, 933_361, 201_000, 11, id="push-201K-not-1"),
        pytest.param(FULL_CONTEXT, 450_000, 6_144, 39, id="tpu-6K"),
    ],
)
def test_sequences_that_fit_at_once(formula: KvFormula, pool: int, context: int, held: int) -> None:
    assert pool // formula.blocks(context) == held


@pytest.mark.parametrize(
    ("formula", "context", "blocks"),
    [
        pytest.param(DENSE, 1, 50 * 2 + 10, id="one-token"),
        pytest.param(DENSE, 16, 50 * 2 + 10, id="a-full-sliding-block"),
        pytest.param(DENSE, 17, 50 * 3 + 10, id="one-over"),
        pytest.param(DENSE, 33, 50 * 4 + 20, id="one-over-a-global-block"),
        pytest.param(DENSE, 1_024, 50 * 65 + 320, id="the-window"),
        pytest.param(DENSE, 1_025, 50 * 65 + 330, id="past-the-window-only-global-layers-grow"),
        pytest.param(DRAFTED, 1_025, 50 * 65 + 330 + 65, id="and-the-drafter"),
        pytest.param(FULL_CONTEXT, 16_384, 30 * 1_024, id="no-sliding-layer-costs-nothing-extra"),
    ],
)
def test_blocks_at_the_edges(formula: KvFormula, context: int, blocks: int) -> None:
    assert formula.blocks(context) == blocks


def test_a_longer_sequence_never_takes_fewer_blocks() -> None:
    counts = [DRAFTED.blocks(context) for context in range(1, 5_000)]
    assert counts == sorted(counts)


def test_a_prefill_chunk_is_held_on_top_of_the_window() -> None:
    # 16,384 tokens are 1,024 blocks in each sliding layer
    extra = DRAFTED.boot_blocks(262_144, 16_384) - DRAFTED.boot_blocks(262_144, 1)
    assert extra == 50 * 1_024
    # but no more than the sequence has
    assert DRAFTED.boot_blocks(1_000, 16_384) == DRAFTED.blocks(1_000)
