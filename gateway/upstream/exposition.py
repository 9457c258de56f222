"""Reads the few figures the gateway needs from an engine's Prometheus page.

A vLLM page is 72 KB and 800 lines long, of which seven matter, and every backend's is read every
second. A full parser (prometheus_client's) takes 10 ms for it, looking for the wanted names 0.1 ms
(a page of vLLM 0.32, Python 3.11, one x86 core). Labels are not looked at: an engine serves one model,
and where a server runs several engines their figures are combined.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from gateway.core.health import EngineSample


@dataclass(frozen=True, slots=True)
class EngineMetrics:
    """What the figures are called, by what they mean. Each may have several names: one per engine or version.

    Attributes:
        running, waiting: Gauges, in sequences; summed over engines.
        kv_usage: Gauge, 0..1; the fullest engine's.
        generation_tokens, prompt_tokens, preemptions, steps: Counters; summed over engines.
        started_at: Gauge, epoch seconds; the latest.
    """

    running: tuple[str, ...]
    waiting: tuple[str, ...]
    kv_usage: tuple[str, ...]
    generation_tokens: tuple[str, ...]
    prompt_tokens: tuple[str, ...]
    preemptions: tuple[str, ...]
    steps: tuple[str, ...]
    started_at: tuple[str, ...]


KNOWN = EngineMetrics(
    running=(
        "vllm:num_requests_running",
        "sglang:num_running_reqs",
        "trtllm_num_requests_running",
        "llamacpp:requests_processing",
    ),
    waiting=(
        "vllm:num_requests_waiting",
        "sglang:num_queue_reqs",
        "trtllm_num_requests_waiting",
        "llamacpp:requests_deferred",
    ),
    kv_usage=(
        "vllm:kv_cache_usage_perc",
        "vllm:gpu_cache_usage_perc",  # until vLLM PR 29330, November 2025
        "sglang:token_usage",
        "trtllm_kv_cache_utilization",
    ),
    generation_tokens=(
        "vllm:generation_tokens_total",
        "sglang:generation_tokens_total",
        "llamacpp:tokens_predicted_total",
    ),
    prompt_tokens=(
        "vllm:prompt_tokens_total",
        "sglang:prompt_tokens_total",
        "llamacpp:prompt_tokens_total",
    ),
    preemptions=("vllm:num_preemptions_total",),
    steps=("llamacpp:n_decode_total",),  # it has no gauge of its cache, which moves in a long prefill
    started_at=("process_start_time_seconds",),
)
"""Names of vLLM 0.19 to 0.33, SGLang, TensorRT-LLM and llama.cpp's server (2026-10)."""

_LIMIT = 1e18  # above it, a figure is nonsense, and sums and conversions could overflow
_LABELS = re.compile(rb'\{(?:[^"}\n]|"(?:[^"\\\n]|\\.)*")*\}')
_VALUE = re.compile(rb"[ \t]+(\S+)")


def values(page: bytes, name: str) -> Iterator[float]:
    """Yield the value of every series of that name; those that are no sane number are left out.

    `page` must begin with a newline, so that a name is only found where a line starts.
    """
    needle = b"\n" + name.encode("ascii")
    at = page.find(needle)
    while at >= 0:
        at += len(needle)
        labels = _LABELS.match(page, at)
        value = _VALUE.match(page, at if labels is None else labels.end())
        if value is not None:  # else a longer name that begins with this one
            try:
                number = float(value[1])
            except ValueError:
                number = math.nan
            if abs(number) < _LIMIT:  # false for NaN
                yield number
        at = page.find(needle, at)


def sample(page: bytes, at: float) -> EngineSample:
    """Return what a scrape at monotonic second `at` says.

    Raises:
        ValueError: the page does not say how many sequences run, so it is no engine's.
    """
    page = b"\n" + page
    running = _all(page, KNOWN.running)
    if not running:
        raise ValueError(f"none of {', '.join(KNOWN.running)} on a page of {len(page) - 1} bytes")
    return EngineSample(
        at=at,
        running=int(sum(running)),
        waiting=int(sum(_all(page, KNOWN.waiting))),
        kv_usage=min(1.0, max(0.0, max(_all(page, KNOWN.kv_usage), default=0.0))),
        generation_tokens=sum(_all(page, KNOWN.generation_tokens)),
        prompt_tokens=sum(_all(page, KNOWN.prompt_tokens)),
        preemptions=sum(_all(page, KNOWN.preemptions)),
        steps=sum(_all(page, KNOWN.steps)),
        started_at=max(_all(page, KNOWN.started_at), default=None),
    )


def _all(page: bytes, names: tuple[str, ...]) -> list[float]:
    for name in names:
        found = list(values(page, name))
        if found:  # an engine that exports an old name beside the new one counts once
            return found
    return []
