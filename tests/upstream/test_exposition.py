"""Reading an engine's metrics page."""

from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.health import EngineSample
from gateway.upstream.exposition import RUNNING, sample, values

VLLM = b"""\
# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.
# TYPE process_start_time_seconds gauge
process_start_time_seconds 1.79524865607e+09
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="gemma-4-31b-it"} 4.0
vllm:num_requests_waiting{engine="0",model_name="gemma-4-31b-it"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="gemma-4-31b-it",reason="capacity"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="gemma-4-31b-it",reason="deferred"} 0.0
vllm:kv_cache_usage_perc{engine="0",model_name="gemma-4-31b-it"} 0.842
vllm:num_preemptions_total{engine="0",model_name="gemma-4-31b-it"} 3.0
vllm:num_preemptions_created{engine="0",model_name="gemma-4-31b-it"} 1.7952486996320124e+09
vllm:prompt_tokens_total{engine="0",model_name="gemma-4-31b-it"} 3199.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="gemma-4-31b-it",source="local_compute"} 3199.0
vllm:prompt_tokens_cached_total{engine="0",model_name="gemma-4-31b-it"} 512.0
vllm:generation_tokens_total{engine="0",model_name="gemma-4-31b-it"} 1531.0
vllm:request_generation_tokens_bucket{engine="0",le="1.0",model_name="gemma-4-31b-it"} 9.0
"""


def test_a_page_of_vllm() -> None:
    assert sample(VLLM, 7.0) == EngineSample(
        at=7.0,
        running=4,
        waiting=2,
        kv_usage=0.842,
        generation_tokens=1531.0,
        prompt_tokens=3199.0,
        preemptions=3.0,
        started_at=1795248656.07,
    )


LLAMA_CPP = b"""\
# HELP llamacpp:prompt_tokens_total Number of prompt tokens processed, excluding cached tokens
# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total 216
# HELP llamacpp:prompt_tokens_cached_total Number of prompt tokens reused from the cache
# TYPE llamacpp:prompt_tokens_cached_total counter
llamacpp:prompt_tokens_cached_total 1187
llamacpp:tokens_predicted_total 995
llamacpp:tokens_predicted_seconds_total 0.206379
llamacpp:n_decode_total 1788
llamacpp:requests_processing 1
llamacpp:requests_deferred 2
"""


def test_a_page_of_llama_cpps_server() -> None:
    assert sample(LLAMA_CPP, 7.0) == EngineSample(
        at=7.0, running=1, waiting=2, generation_tokens=995.0, prompt_tokens=216.0, steps=1788.0
    )


SGLANG = b"""\
sglang:num_running_reqs{engine_type="unified",model_name="gemma-4-31b-it",pp_rank="0",tp_rank="0"} 1.0
sglang:num_queue_reqs{engine_type="unified",model_name="gemma-4-31b-it",pp_rank="0",tp_rank="0"} 0.0
sglang:token_usage{engine_type="unified",model_name="gemma-4-31b-it",pp_rank="0",tp_rank="0"} 0.0
sglang:prompt_tokens_total{engine_type="unified",is_streaming="false",model_name="gemma-4-31b-it"} 7.0
sglang:prompt_tokens_total{engine_type="unified",is_streaming="true",model_name="gemma-4-31b-it"} 52.0
sglang:generation_tokens_total{engine_type="unified",is_streaming="false",model_name="gemma-4-31b-it"} 1.0
sglang:generation_tokens_total{engine_type="unified",is_streaming="true",model_name="gemma-4-31b-it"} 10219.0
sglang:realtime_tokens_total{mode="prefill_compute",model_name="gemma-4-31b-it",tp_rank="0"} 150.0
sglang:realtime_tokens_total{mode="prefill_cache",model_name="gemma-4-31b-it",tp_rank="0"} 41.0
sglang:realtime_tokens_total{mode="decode",model_name="gemma-4-31b-it",tp_rank="0"} 11488.0
"""


def test_a_page_of_sglang_tells_the_progress_of_a_request_that_runs() -> None:
    """Only the last three lines changed in 50 seconds of one stream (SGLang 0.5.23, a pool of 500,000)."""
    assert sample(SGLANG, 7.0) == EngineSample(
        at=7.0, running=1, generation_tokens=10220.0, prompt_tokens=59.0, steps=11679.0
    )


@pytest.mark.parametrize("caches", [True, False])
def test_a_page_of_vllm_tells_whether_it_caches_prefixes(caches: bool) -> None:
    config = f'vllm:cache_config_info{{block_size="16",enable_prefix_caching="{caches}",engine="0"}} 1.0\n'
    page = b'vllm:num_requests_running{engine="0"} 1.0\n' + config.encode()

    assert sample(page, 0.0).caches_prefixes is caches


@pytest.mark.parametrize("interval", ["0", "None", "4096"])
def test_a_page_of_vllm_tells_whether_it_keeps_few_windows(interval: str) -> None:
    labels = f'enable_prefix_caching="True",prefix_cache_retention_interval="{interval}"'
    page = f'vllm:num_requests_running{{engine="0"}} 1.0\nvllm:cache_config_info{{{labels}}} 1.0\n'

    assert sample(page.encode(), 0.0).resumes_anywhere is (interval != "0")


@pytest.mark.parametrize(
    ("states", "is_asleep"),
    [
        ({"awake": 1, "weights_offloaded": 0, "discard_all": 0}, False),
        ({"awake": 0, "weights_offloaded": 1, "discard_all": 0}, True),
        ({"awake": 0, "weights_offloaded": 0, "discard_all": 1}, True),
        ({"awake": 0, "weights_offloaded": 0, "discard_all": 0}, False),
    ],
    ids=["awake", "level-1", "level-2", "level-0-even-if-resumed"],
)
def test_a_page_of_vllm_tells_whether_it_sleeps(states: Mapping[str, int], is_asleep: bool) -> None:
    page = VLLM + b"".join(
        b'vllm:engine_sleep_state{engine="0",model_name="gemma-4-31b-it",sleep_state="%s"} %d.0\n'
        % (state.encode(), value)
        for state, value in states.items()
    )

    assert sample(page, 0.0).is_asleep is is_asleep


@pytest.mark.parametrize(
    ("line", "is_asleep"),
    [
        (b"vllm:engine_sleep_state{%s} 1.0\n", True),
        (b"vllm:engine_sleep_state{%s} 0.0\n", False),
        (b"vllm:engine_sleep_state{%s\n", False),
        (b'vllm:engine_sleep_state{a="%s"} 1.0\n', False),
    ],
    ids=["asleep", "awake", "unfinished", "within-a-text"],
)
def test_a_line_of_megabytes_is_read_once(line: bytes, is_asleep: bool) -> None:
    """Searched for each of its labels from the beginning, it would take minutes."""
    label = b'sleep_state="discard_all",' if b'"' not in line else b"sleep_state=discard_all,"
    page = VLLM + line % (label * 150_000)

    assert sample(page, 0.0).is_asleep is is_asleep


def test_several_engines_behind_one_port_are_combined() -> None:
    page = b"".join(
        b'vllm:num_requests_running{engine="%d"} %d\nvllm:kv_cache_usage_perc{engine="%d"} 0.%d\n'
        % (i, i + 1, i, i)
        for i in range(4)
    )
    engine = sample(page, 0.0)
    assert (engine.running, engine.kv_usage, engine.started_at) == (10, 0.3, None)


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        (b"vllm:num_requests_running 1\nvllm:gpu_cache_usage_perc 0.5", (1, 0, 0.5)),
        (
            b"vllm:num_requests_running 1\nvllm:gpu_cache_usage_perc 0.5\nvllm:kv_cache_usage_perc 0.5",
            (1, 0, 0.5),
        ),
        (b"sglang:num_running_reqs 3\nsglang:num_queue_reqs 4\nsglang:token_usage 0.25", (3, 4, 0.25)),
        (
            b"trtllm_num_requests_running 3\ntrtllm_num_requests_waiting 4\ntrtllm_kv_cache_utilization 0.25",
            (3, 4, 0.25),
        ),
    ],
    ids=["older-vllm", "both-names-count-once", "sglang", "tensorrt-llm"],
)
def test_other_engines_and_versions(page: bytes, expected: tuple[int, int, float]) -> None:
    engine = sample(page, 0.0)
    assert (engine.running, engine.waiting, engine.kv_usage) == expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b"x 1", [1.0]),
        (b"x\t1 1795248656000", [1.0]),
        (b'x{a="1"} 2', [2.0]),
        (b'x{a="} 9"} 2', [2.0]),
        (b'x{a="\\" } 9"} 2', [2.0]),
        (b"x{} 2", [2.0]),
        (b'x{a="1"} 2 # {trace="t"} 9', [2.0]),
        (b"x_total 1", []),
        (b"# x 1", []),
        (b"yx 1", []),
        (b"x NaN", []),
        (b"x +Inf", []),
        (b"x 1e308", []),
        (b"x nonsense", []),
        (b"x", []),
        (b'x{a="1" 2', []),
        (b'x{a="1"} 2\nx{a="2"} 3', [2.0, 3.0]),
    ],
    ids=lambda value: repr(value) if isinstance(value, bytes) else "",
)
def test_lines_of_the_text_format(line: bytes, expected: list[float]) -> None:
    assert list(values(b"\n" + line + b"\n", "x")) == expected


def test_a_usage_outside_its_range_is_brought_back() -> None:
    assert sample(b"vllm:num_requests_running 0\nvllm:kv_cache_usage_perc 1.7", 0.0).kv_usage == 1.0
    assert sample(b"vllm:num_requests_running 0\nvllm:kv_cache_usage_perc -1", 0.0).kv_usage == 0.0


@pytest.mark.parametrize("page", [b"", b"<html>login</html>", b"process_start_time_seconds 1"], ids=repr)
def test_a_page_that_is_no_engines(page: bytes) -> None:
    with pytest.raises(ValueError, match="none of vllm:num_requests_running"):
        sample(page, 0.0)


pieces = st.sampled_from(
    [name.encode() for name in RUNNING] + [b"\n", b"{", b"}", b'"', b"\\", b" ", b"1", b"="]
)


@settings(deadline=None)
@given(st.lists(st.one_of(pieces, st.binary(max_size=4)), max_size=60).map(b"".join))
def test_no_page_raises_anything_but_value_error(page: bytes) -> None:
    try:
        engine = sample(page, 0.0)
    except ValueError:
        return
    assert 0.0 <= engine.kv_usage <= 1.0
