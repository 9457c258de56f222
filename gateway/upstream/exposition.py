"""Reads the few metrics that the gateway needs from an engine's Prometheus page.

A vLLM page has 72 KB and 800 lines, seven of which matter, and the page of every backend is read every
second. A full parser (prometheus_client's) takes 10 ms, a search for the names 0.1 ms (a page of vLLM 0.32,
Python 3.11, one x86 core). Labels are ignored: an engine serves one model, and if a server runs several
engines, their values are combined.
"""

import math
import re
from collections.abc import Iterator

from gateway.core.health import EngineSample

# The metrics by meaning, under the names of vLLM 0.19 to 0.33, SGLang, TensorRT-LLM and llama.cpp's server
# (2026-10). Those of several engines are summed, unless noted.
RUNNING = (
    "vllm:num_requests_running",
    "sglang:num_running_reqs",
    "trtllm_num_requests_running",
    "llamacpp:requests_processing",
)
WAITING = (
    "vllm:num_requests_waiting",
    "sglang:num_queue_reqs",
    "trtllm_num_requests_waiting",
    "llamacpp:requests_deferred",
)
KV_USAGE = (  # 0..1; the maximum over engines
    "vllm:kv_cache_usage_perc",
    "vllm:gpu_cache_usage_perc",  # until vLLM PR 29330, November 2025
    "sglang:token_usage",
    "trtllm_kv_cache_utilization",
)
GENERATION_TOKENS = (
    "vllm:generation_tokens_total",
    "sglang:generation_tokens_total",
    "llamacpp:tokens_predicted_total",
)
PROMPT_TOKENS = (
    "vllm:prompt_tokens_total",
    "sglang:prompt_tokens_total",
    "llamacpp:prompt_tokens_total",
)
PREEMPTIONS = ("vllm:num_preemptions_total",)
STEPS = (  # of engines whose other metrics may all stay the same for as long as a request takes
    "llamacpp:n_decode_total",  # no cache gauge
    "sglang:realtime_tokens_total",  # each step; the others wait for the end of a request
)
STARTED_AT = ("process_start_time_seconds",)  # epoch seconds; the latest

_NO_PREFIX_CACHE = b'enable_prefix_caching="False"'
_FEW_WINDOWS = b'prefix_cache_retention_interval="0"'
"""Labels of `vllm:cache_config_info` (vLLM 0.32: with `--no-enable-prefix-caching`; and by default)."""

_SLEEP_STATE = "vllm:engine_sleep_state"
_ASLEEP = re.compile(rb'\bsleep_state="(?:weights_offloaded|discard_all)"')
"""The label of an engine without weights on its card (sleep levels 1 and 2). `awake` is not asked: after
level 0, a pause, it stays 0 even if `/resume` has ended that (vLLM 0.33)."""

_LIMIT = 1e18
"""Larger values are invalid. A choice: they could overflow sums and conversions, and none is real."""

_LABELS = re.compile(rb'\{(?:[^"}\n]++|"(?:[^"\\\n]++|\\.)*")*\}')
_VALUE = re.compile(rb"[ \t]+(\S+)")


def values(page: bytes, name: str) -> Iterator[float]:
    """Yield the value of every series of a metric; invalid numbers are skipped. `page` as for `_series`."""
    return (value for _, value in _series(page, name))


def _series(page: bytes, name: str) -> Iterator[tuple[bytes, float]]:
    """Yield labels and value of every series of a metric; invalid numbers are skipped.

    `page` must begin with a newline, so that a name is only found at the start of a line.
    """
    needle = b"\n" + name.encode("ascii")
    at = page.find(needle)
    while at >= 0:
        at += len(needle)
        labels = _LABELS.match(page, at)
        value = _VALUE.match(page, at if labels is None else labels.end())
        if value is not None:  # otherwise the name is a prefix of a longer one
            try:
                number = float(value[1])
            except ValueError:
                number = math.nan
            if abs(number) < _LIMIT:  # false for NaN
                yield b"" if labels is None else labels[0], number
        at = page.find(needle, at)


def sample(page: bytes, at: float) -> EngineSample:
    """Return the sample in a page scraped at monotonic second `at`.

    Raises:
        ValueError: the page lacks the number of running sequences, so it is not an engine's.
    """
    page = b"\n" + page
    running = _all(page, RUNNING)
    if not running:
        raise ValueError(f"none of {', '.join(RUNNING)} on a page of {len(page) - 1} bytes")
    return EngineSample(
        at=at,
        running=int(sum(running)),
        waiting=int(sum(_all(page, WAITING))),
        kv_usage=min(1.0, max(0.0, max(_all(page, KV_USAGE), default=0.0))),
        generation_tokens=sum(_all(page, GENERATION_TOKENS)),
        prompt_tokens=sum(_all(page, PROMPT_TOKENS)),
        preemptions=sum(_all(page, PREEMPTIONS)),
        steps=sum(_all(page, STEPS)),
        started_at=max(_all(page, STARTED_AT), default=None),
        caches_prefixes=page.find(_NO_PREFIX_CACHE) < 0,
        resumes_anywhere=page.find(_FEW_WINDOWS) < 0,
        is_asleep=any(
            value == 1 and _ASLEEP.search(labels) is not None for labels, value in _series(page, _SLEEP_STATE)
        ),
    )


def _all(page: bytes, names: tuple[str, ...]) -> list[float]:
    for name in names:
        found = list(values(page, name))
        if found:  # if an engine exports an old name beside a new one, use one of them
            return found
    return []
