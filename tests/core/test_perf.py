"""The step-time model: its published one-stream figures, and what must hold for any parameters."""

import pytest

from gateway import profiles
from gateway.core.perf import PerfModel


@pytest.mark.parametrize(
    ("name", "context", "published", "tolerance"),
    [
        pytest.param("h200-fp8", 166, 75.2, 0.01, id="h200-fp8"),
        pytest.param("h200-bf16", 166, 50.8, 0.02, id="h200-bf16"),
        pytest.param("spark-fp8", 192, 6.91, 0.01, id="spark-fp8-short"),
        pytest.param("spark-fp8", 16_448, 6.3, 0.03, id="spark-fp8-at-16K"),
        pytest.param("spark2-fp8", 2_112, 11.2, 0.03, id="spark2-fp8"),
        pytest.param("spark-nvfp4", 1_024, 6.8, 0.01, id="spark-nvfp4"),
        pytest.param("spark-moe-fp8", 1_024, 36.9, 0.01, id="spark-moe-fp8"),
        pytest.param("spark-moe-fp8-mtp", 1_024, 53.7, 0.01, id="spark-moe-fp8-mtp"),
    ],
)
def test_one_stream_decodes_as_published(name: str, context: int, published: float, tolerance: float) -> None:
    rate = profiles.load(name).perf.lone_tokens_per_s(context)
    assert rate == pytest.approx(published, rel=tolerance)


@pytest.mark.parametrize(
    ("name", "prompt", "seconds"),
    [
        pytest.param("h100-tp1-light", 2_048, 0.37, id="light-2K"),
        pytest.param("h100-tp1-light", 16_384, 4.7, id="light-16K"),
        pytest.param("h100-tp1-light", 32_768, 13.6, id="light-32K-extrapolated"),
        pytest.param("h100-tp2-push", 2_048, 0.23, id="push-2K"),
        pytest.param("h100-tp2-push", 16_384, 2.5, id="push-16K"),
        pytest.param("h100-tp2-push", 131_072, 64.0, id="push-128K-extrapolated"),
        pytest.param("spark-fp8", 16_384, 19.0, id="spark-16K"),
    ],
)
def test_unloaded_prefill_is_what_the_documentation_prints(name: str, prompt: int, seconds: float) -> None:
    assert _prefill_s(name, prompt) == pytest.approx(seconds, rel=0.05)


@pytest.mark.parametrize("name", profiles.names())
def test_every_kind_of_work_makes_a_step_longer_or_no_shorter(name: str) -> None:
    perf = profiles.load(name).perf
    quiet = perf.step_s(decoding=1, context_sum=1_000, context_max=1_000)
    assert 0 < quiet < perf.step_s(decoding=64, context_sum=64_000, context_max=1_000)
    assert quiet <= perf.step_s(decoding=1, context_sum=8_000, context_max=8_000)
    assert quiet < perf.step_s(
        decoding=1, context_sum=1_000, context_max=1_000, prefill_tokens=4_096, prefill_attn=8e6
    )


@pytest.mark.parametrize("name", profiles.names())
def test_batching_pays_up_to_the_knee(name: str) -> None:
    profile = profiles.load(name)
    short = profile.capacity.knee[0].seqs

    def tokens_per_s(seqs: int) -> float:
        step = profile.perf.step_s(decoding=seqs, context_sum=seqs * 1_000, context_max=1_000)
        return seqs * profile.perf.accept / step

    assert tokens_per_s(short) > tokens_per_s(max(1, short // 4))


@pytest.mark.parametrize(
    ("sharp", "seconds"),
    [
        pytest.param(1.0, 0.5 + 3.0 + 4.0, id="one-adds"),
        pytest.param(2.0, 0.5 + 5.0, id="two-is-the-hypotenuse"),
        pytest.param(50.0, 0.5 + 4.0, id="a-sharp-corner-is-the-larger-one"),
    ],
)
def test_sharp_says_how_memory_and_compute_overlap(sharp: float, seconds: float) -> None:
    perf = PerfModel(t_fixed=0.5, t_mem=3.0, kv_read=0, kv_span=0, t_seq=4.0, t_tok=0, t_attn=0, sharp=sharp)
    assert perf.step_s(decoding=1, context_sum=0, context_max=0) == pytest.approx(seconds, rel=1e-3)


def _prefill_s(name: str, prompt: int) -> float:
    """The steps that a lone prompt takes, chunk by chunk, without the overhead before them."""
    profile = profiles.load(name)
    chunk = profile.flags.max_num_batched_tokens
    total, start = 0.0, 0
    while start < prompt:
        tokens = min(chunk, prompt - start)
        total += profile.perf.step_s(
            decoding=0,
            context_sum=0,
            context_max=0,
            prefill_tokens=tokens,
            prefill_attn=tokens * (start + tokens / 2),
        )
        start += tokens
    return total


@pytest.mark.parametrize("prompt", [1, 8_192, 8_193, 30_000])
def test_the_prefill_of_a_prompt_is_the_sum_of_its_chunks(prompt: int) -> None:
    profile = profiles.load("h100-tp1-light")

    assert profile.perf.prefill_s(prompt, profile.flags.max_num_batched_tokens) == pytest.approx(
        _prefill_s("h100-tp1-light", prompt)
    )


def test_an_empty_prompt_takes_no_time() -> None:
    assert profiles.load("h100-tp1-light").perf.prefill_s(0, 8_192) == 0
