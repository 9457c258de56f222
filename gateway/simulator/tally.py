"""What the simulated server counts about itself, and its /metrics page.

Names, labels, buckets and order are those of a vLLM 0.33 page, as far as anything reads them; the
families about GPUs, caches it does not have and the Python process are left out. After them, under
`simulator:`, stands what no vLLM tells and a benchmark wants to know.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from gateway.core.engine import Engine
from gateway.core.profile import Profile

_TTFT_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_ITL_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_REQUEST_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
    960.0, 1920.0, 7680.0,
)  # fmt: skip
"""Buckets of times: those of a vLLM 0.33 page."""

_TOKENS = tuple(float(step * 10**power) for power in range(6) for step in (1, 2, 5))
_PREEMPTIONS = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)
"""Buckets of counts: those of the same page."""

_HISTOGRAMS: dict[str, tuple[tuple[float, ...], str]] = {
    "request_prompt_tokens": (_TOKENS, "Number of prefill tokens processed."),
    "request_generation_tokens": (_TOKENS, "Number of generation tokens processed."),
    "request_params_max_tokens": (_TOKENS, "Histogram of the max_tokens request parameter."),
    "time_to_first_token_seconds": (_TTFT_S, "Histogram of time to first token in seconds."),
    "inter_token_latency_seconds": (_ITL_S, "Histogram of inter-token latency in seconds."),
    "request_time_per_output_token_seconds": (_ITL_S, "Histogram of time per output token per request."),
    "e2e_request_latency_seconds": (_REQUEST_S, "Histogram of e2e request latency in seconds."),
    "request_queue_time_seconds": (_REQUEST_S, "Histogram of time spent in WAITING phase for request."),
    "request_inference_time_seconds": (_REQUEST_S, "Histogram of time spent in RUNNING phase for request."),
    "request_prefill_time_seconds": (_REQUEST_S, "Histogram of time spent in PREFILL phase for request."),
    "request_decode_time_seconds": (_REQUEST_S, "Histogram of time spent in DECODE phase for request."),
    "request_num_preemptions": (_PREEMPTIONS, "Histogram of the preemptions of a request."),
}

_HELP = {
    "process_start_time_seconds": "Start time of the process since unix epoch in seconds.",
    "vllm:num_requests_running": "Number of requests in model execution batches.",
    "vllm:num_requests_waiting": "Number of requests waiting to be processed.",
    "vllm:num_requests_waiting_by_reason": "Number of waiting requests by reason.",
    "vllm:engine_sleep_state": "Engine sleep state; awake = 1 means engine is awake.",
    "vllm:kv_cache_usage_perc": "KV-cache usage. 1 means 100 percent usage.",
    "vllm:prefix_cache_queries_total": "Prefix cache queries, in terms of number of queried tokens.",
    "vllm:prefix_cache_hits_total": "Prefix cache hits, in terms of number of cached tokens.",
    "vllm:num_preemptions_total": "Cumulative number of preemption from the engine.",
    "vllm:prompt_tokens_total": "Number of prefill tokens processed.",
    "vllm:prompt_tokens_cached_total": "Number of cached prompt tokens.",
    "vllm:generation_tokens_total": "Number of generation tokens processed.",
    "vllm:request_success_total": "Count of successfully processed requests.",
    "vllm:admission_rejections_total": "Number of admission attempts rejected by a queue limit, by reason.",
    "vllm:cache_config_info": "Information of the LLMEngine CacheConfig",
    "http_requests_total": "Total number of requests by method, status and handler.",
    "simulator:requests_peak": "Most requests held at once, running and waiting.",
    "simulator:kv_cache_usage_peak": "Highest KV-cache usage. 1 means 100 percent usage.",
    "simulator:step_lag_seconds_peak": "Latest end of an engine step, in seconds of the clock.",
    "simulator:lost_seconds_total": "Seconds of the clock by which steps were late and stayed so.",
}
_FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")
_SLEEP_STATES = {"awake": None, "weights_offloaded": 1, "discard_all": 2}

_CHANGES_MAX = 65_536
"""Maximum changes of the number of requests that are kept. A choice that bounds memory: an hour of 18 a
second."""

Series = dict[str, float]
"""Value per label set, as it stands between the braces."""


@dataclass(frozen=True, slots=True)
class Gauges:
    """What an engine sets after each step: sequences in its batch and its queue, and the share of KV in use.

    A vLLM that hangs, or sleeps, takes no step: it shows nothing of the requests that it gets meanwhile.
    """

    running: int
    waiting: int
    kv_usage: float


class Histogram:
    """Counts per bucket, and their sum."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Note a value seen that many times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def lines(self, name: str, labels: str) -> Iterator[str]:
        """Yield its lines of the exposition."""
        total = 0
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{{labels},le="{bound}"}} {float(total)}'
        yield f"{name}_count{{{labels}}} {float(total)}"
        yield f"{name}_sum{{{labels}}} {self._sum}"


class Sequences:
    """How many sequences the engine holds, running and waiting, and how that changed. Times: epoch seconds.

    Attributes:
        held: How many at present.
        aborted: How many were aborted before their end, since the start, mostly because their client left;
            or ended when their client had left, before that was noticed.
        changes: `(when, held, aborted)` after every change since `forget`, oldest first.
        is_whole: Whether none of these changes was dropped for want of room.
    """

    def __init__(self) -> None:
        self.held = self.aborted = 0
        self.changes: deque[tuple[float, int, int]] = deque(maxlen=_CHANGES_MAX)
        self.is_whole = True

    def note(self, when: float, held: int, aborted: int = 0) -> None:
        """Note how many there are from now on; `aborted` of those that went were aborted."""
        self.held = held
        self.aborted += aborted
        self.is_whole = self.is_whole and len(self.changes) < _CHANGES_MAX
        self.changes.append((when, held, self.aborted))

    def forget(self) -> None:
        """Drop the history. What is held stays."""
        self.changes.clear()
        self.is_whole = True


@dataclass(slots=True)
class Tally:
    """Everything counted since the process started. Times are real seconds.

    Attributes:
        started_wall_s: Epoch seconds of the start.
        prompt_tokens, generation_tokens: Counters.
        rejected: Requests refused because the queue was full.
        requests_peak: Most sequences the engine held at once, running and waiting.
        kv_usage_peak: Highest share of the KV blocks in use.
        step_lag_peak_s: Latest end of a step: a busy machine, not the model.
        lost_s: By how much steps were late where that is not made up for.
        finished: Sequences per finish reason.
        requests: HTTP requests per (handler, method, status class).
        histograms: By the name of the metric, without `vllm:`.
        sequences: How many the engine holds. Not on the page: vLLM has no such history.
    """

    started_wall_s: float
    prompt_tokens: int = 0
    generation_tokens: int = 0
    rejected: int = 0
    requests_peak: int = 0
    kv_usage_peak: float = 0.0
    step_lag_peak_s: float = 0.0
    lost_s: float = 0.0
    finished: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_FINISH_REASONS, 0))
    requests: dict[tuple[str, str, str], int] = field(default_factory=dict)
    histograms: dict[str, Histogram] = field(
        default_factory=lambda: {name: Histogram(bounds) for name, (bounds, _) in _HISTOGRAMS.items()}
    )
    sequences: Sequences = field(default_factory=Sequences)

    def observe(self, name: str, value: float, times: int = 1) -> None:
        """Note a value of a histogram."""
        self.histograms[name].observe(value, times)

    def request(self, handler: str, method: str, status: int) -> None:
        """Note an answered HTTP request."""
        key = (handler, method, f"{status // 100}xx")
        self.requests[key] = self.requests.get(key, 0) + 1

    def page(
        self,
        engine: Engine,
        profile: Profile,
        model: str,
        *,
        gauges: Gauges,
        prefix_caching: bool,
        sleep_level: int | None,
    ) -> bytes:
        """Return the /metrics page.

        Args:
            engine, profile, model: What is served.
            gauges: Its gauges.
            prefix_caching: Whether the engine has a prefix cache.
            sleep_level: How deep it sleeps; None if it is awake.
        """
        name = f'model_name="{model}"'
        labels = f'engine="0",{name}'
        lines: list[str] = []
        simple = self._simple(engine, name, labels, gauges, sleep_level)
        simple["vllm:cache_config_info"] = {_cache_config(profile, prefix_caching): 1.0}
        for metric, series in simple.items():
            kind = "counter" if metric.endswith("_total") else "gauge"
            lines += (f"# HELP {metric} {_HELP[metric]}", f"# TYPE {metric} {kind}")
            lines += (f"{metric}{{{labels}}} {value}" for labels, value in series.items())
        for metric, (_, text) in _HISTOGRAMS.items():
            lines += (f"# HELP vllm:{metric} {text}", f"# TYPE vllm:{metric} histogram")
            lines += self.histograms[metric].lines(f"vllm:{metric}", labels)
        return ("\n".join(lines) + "\n").replace("{}", "").encode()

    def _simple(
        self, engine: Engine, name: str, labels: str, gauges: Gauges, sleep_level: int | None
    ) -> dict[str, Series]:
        """Return the values of the counters and gauges, in the order of the page."""
        waiting = float(gauges.waiting)
        return {
            "process_start_time_seconds": {"": self.started_wall_s},
            "vllm:num_requests_running": {labels: float(gauges.running)},
            "vllm:num_requests_waiting": {labels: waiting},
            "vllm:num_requests_waiting_by_reason": {
                f'{labels},reason="capacity"': waiting,
                f'{labels},reason="deferred"': 0.0,
            },
            "vllm:engine_sleep_state": {
                f'{labels},sleep_state="{state}"': float(sleep_level == level)
                for state, level in _SLEEP_STATES.items()
            },
            "vllm:kv_cache_usage_perc": {labels: gauges.kv_usage},
            "vllm:prefix_cache_queries_total": {labels: float(engine.queried_tokens)},
            "vllm:prefix_cache_hits_total": {labels: float(engine.found_tokens)},
            "vllm:num_preemptions_total": {labels: float(engine.preemptions)},
            "vllm:prompt_tokens_total": {labels: float(self.prompt_tokens)},
            "vllm:prompt_tokens_cached_total": {labels: float(engine.found_tokens)},
            "vllm:generation_tokens_total": {labels: float(self.generation_tokens)},
            "vllm:request_success_total": {
                f'engine="0",finished_reason="{reason}",{name}': float(count)
                for reason, count in self.finished.items()
            },
            "vllm:admission_rejections_total": {
                f'{name},reason="max_num_queued_reqs"': float(self.rejected),
                f'{name},reason="max_num_queued_tokens"': 0.0,
            },
            "http_requests_total": {
                f'handler="{handler}",method="{method}",status="{status}"': float(count)
                for (handler, method, status), count in self.requests.items()
            },
            "simulator:requests_peak": {"": float(self.requests_peak)},
            "simulator:kv_cache_usage_peak": {"": self.kv_usage_peak},
            "simulator:step_lag_seconds_peak": {"": self.step_lag_peak_s},
            "simulator:lost_seconds_total": {"": self.lost_s},
        }


def _cache_config(profile: Profile, prefix_caching: bool) -> str:
    """Return the labels of the cache's description; its size in tokens is concurrency x window."""
    capacity = profile.capacity
    labels = {"block_size": "16", "enable_prefix_caching": str(prefix_caching), "engine": "0"}
    labels["prefix_cache_retention_interval"] = "0"
    if capacity.kv is not None and capacity.kv_blocks is not None:
        per_seq = capacity.kv.boot_blocks(capacity.context_tokens, profile.flags.max_num_batched_tokens)
        concurrency = capacity.kv_blocks / per_seq
        labels["kv_cache_max_concurrency"] = str(concurrency)
        labels["kv_cache_size_tokens"] = str(int(concurrency * capacity.context_tokens))
        labels["num_gpu_blocks"] = str(capacity.kv_blocks)
    return ",".join(f'{key}="{value}"' for key, value in labels.items())
