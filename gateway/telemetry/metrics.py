"""The `gateway_*` metrics, with stable names. docs/metrics.md lists them, and a test keeps it complete.

The process metrics, `process_*`, are the standard ones of Prometheus clients (Linux only).

Labels are bounded by the configuration (backends, pools, classes, models) or by an enum; none contains a
value that a caller can choose.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import StrEnum
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from gateway.core.box_swaps import Swap, SwapCause
from gateway.core.health import BackendStatus, State
from gateway.core.usage import AttemptRecord, Ending, RequestRecord
from gateway.core.webhooks import WebhookAttempt, WebhookOutcome
from gateway.open_files import has_folder, used
from gateway.telemetry.series import Before, Collected, Counters, Histograms

TTFT_BUCKETS_S = (0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 320, 640)
"""Those of vLLM 0.32 from 20 ms on, with 320 s added, just above the longest published first token (319 s),
and without the last, 2,560 s."""

TPOT_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
"""vLLM's for the same up to 2.5 s, with 5 ms added, because several tokens may come with one step."""

_DURATIONS_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
"""vLLM's for the duration of requests, up to half an hour."""

DURATION_BUCKETS_S = (*_DURATIONS_S, 3840, 7680, 15360)
"""Jobs take longer, including their time in the queue. A choice: buckets up to hours, each twice the last."""

OVERHEAD_BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
"""Buckets of the gateway's own time. A choice around what is measured (docs/performance.md): from short
requests to long documents, and stalls."""

QUEUE_BUCKETS_S = (
    *(0.001, 0.01, 0.1, 0.3, 0.6, 1.2, 2.5, 5, 10, 30),
    *(60, 120, 300, 600, 900, 1800, 3600, 7200, 14400),
)
"""Buckets of waits. A choice: the default waits of the classes (1.2, 600 and 900 s) are among them."""

SWAP_BUCKETS_S = (1, 5, 15, 30, 60, 120, 180, 240, 300, 420, 600, 900, 1800, 3600)
"""Buckets of swaps. A choice, finest around the published boots of minutes (docs/profiles.md); models that
only sleep take seconds."""

PROMPT_BUCKETS = (64, 256, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144)
"""Buckets of prompt lengths in tokens. A choice: powers of two up to the largest window."""

ERROR_BUCKETS = (-0.5, -0.2, -0.1, -0.05, -0.02, -0.01, -0.001, 0.001, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
"""Buckets of the relative error of an estimate. A choice: the margins and the band of `core.estimation` are
among them."""

NOTED_MAX = 256
"""Completed requests that are counted together. A choice: that takes 0.4 ms."""

_Figures = tuple[int, int, int, float, float, float]
"""Of a completed request: tokens estimated, of the prompt and of the answer; seconds of the estimate, of its
wait, and in all."""


class Timeliness(StrEnum):
    """Whether a first token arrived in time."""

    TIMELY = "timely"
    LATE = "late"


_Pace = tuple[float, float | None, Timeliness | None]
"""Of a completed stream: seconds to its first token, and per later one; whether the first was in time."""


class Metrics:
    """All metrics. Each instance has its own registry, so that tests and processes do not share one."""

    def __init__(self) -> None:
        """Start at zero."""
        self.registry = CollectorRegistry(auto_describe=True)
        registry = self.registry
        counters, histograms = partial(Counters, registry=registry), partial(Histograms, registry=registry)
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        self._noted: dict[tuple[str, str, str], list[_Figures]] = {}  # by class, pool and backend
        self._paces: dict[tuple[str, str], list[_Pace]] = {}  # of streams, by class and backend
        self._noted_count = 0
        registry.register(Before(self._count_noted))
        self.requests = counters(
            "gateway_requests",
            "Requests that have ended, by how they ended.",
            ("traffic_class", "pool", "backend", "ending", "code"),
        )
        self.attempts = counters(
            "gateway_attempts", "Attempts on a backend, by outcome.", ("backend", "outcome")
        )
        self.refusals = counters(
            "gateway_exclusions",
            "Times an arriving request passed over a backend, by reason.",
            ("backend", "reason"),
        )
        self.spills = counters(
            "gateway_spills", "Requests served by a later pool of their class.", ("traffic_class", "pool")
        )
        labels = ("traffic_class", "backend")
        self.ttft = histograms(
            "gateway_time_to_first_token_seconds",
            "Time from a streamed request's arrival to its first token, in seconds.",
            labels,
            buckets=TTFT_BUCKETS_S,
        )
        self.first_tokens = counters(
            "gateway_first_tokens",
            "First tokens of streams, by whether they were on time.",
            (*labels, "timeliness"),
        )
        self.tpot = histograms(
            "gateway_time_per_output_token_seconds",
            "Mean time per output token after the first, per streamed request, in seconds.",
            labels,
            buckets=TPOT_BUCKETS_S,
        )
        self.duration = histograms(
            "gateway_request_duration_seconds",
            "Time from a request's arrival to the last byte of its answer, in seconds.",
            labels,
            buckets=DURATION_BUCKETS_S,
        )
        self.estimating = histograms(
            "gateway_estimate_seconds",
            "Time from a request's arrival until its body was there and its prompt counted, in seconds.",
            buckets=OVERHEAD_BUCKETS_S,
        )
        self.waiting_time = histograms(
            "gateway_queue_seconds",
            "Time from the routing decision to a slot on a backend, in seconds.",
            ("traffic_class",),
            buckets=QUEUE_BUCKETS_S,
        )
        self.prompt_tokens = histograms(
            "gateway_prompt_tokens",
            "Estimated prompt length, in tokens.",
            ("traffic_class",),
            buckets=PROMPT_BUCKETS,
        )
        self.estimate_error = histograms(
            "gateway_estimate_error_ratio",
            "Error of the token estimate: (reported - estimated) / estimated.",
            ("backend",),
            buckets=ERROR_BUCKETS,
        )
        self.tokens_in = counters(
            "gateway_input_tokens", "Prompt tokens, as reported by the backend.", labels
        )
        self.tokens_out = counters(
            "gateway_output_tokens", "Generated tokens, as reported by the backend.", labels
        )
        self.state_changes = counter(
            "gateway_backend_state_changes", "Changes of a backend into a state.", ("backend", "state")
        )
        self.restarts = counter("gateway_backend_restarts", "Engine restarts detected.", ("backend",))
        self.config_info = gauge("gateway_config_info", "1 for the configuration in force.", ("version",))
        self.reloads = counter(
            "gateway_config_reloads", "Configurations loaded at run time, by outcome.", ("outcome",)
        )
        for outcome in ("applied", "refused"):
            self.reloads.labels(outcome)
        self.config_successful = gauge(
            "gateway_config_last_reload_successful",
            "1 if the configuration loaded last is in force, 0 if it was refused.",
        )
        self.restart_needed = gauge(
            "gateway_config_restart_needed", "1 while changes of the configuration wait for a restart."
        )
        self.config_loaded_at = gauge(
            "gateway_config_last_reload_success_timestamp_seconds",
            "When the configuration in force was loaded, in Unix seconds.",
        )
        self.traces = counter("gateway_traces", "Requests kept as a trace, by reason.", ("reason",))
        self.decisions = counter(
            "gateway_decisions", "Requests for the decision log, by outcome.", ("outcome",)
        )
        self.webhooks = counter(
            "gateway_webhooks", "Attempts to deliver a webhook, by outcome.", ("endpoint", "outcome")
        )
        self.webhooks_pending = gauge(
            "gateway_webhooks_pending",
            "Webhook deliveries waiting for an endpoint, including those in progress.",
            ("endpoint",),
        )
        self.swaps = counter(
            "gateway_box_swaps",
            "Swaps to the backend carried out by this gateway, by cause.",
            ("box", "backend", "cause"),
        )
        self.swap_time = Histogram(
            "gateway_box_swap_seconds",
            "Duration of swaps to the backend, from the decision until its model serves, in seconds.",
            ("box", "backend"),
            buckets=SWAP_BUCKETS_S,
            registry=registry,
        )
        _Process(registry=registry)

    def attempt(self, record: AttemptRecord) -> None:
        """See `ports.Recorder.attempt`."""
        self.attempts.add((record.backend, record.outcome))

    def finished(self, record: RequestRecord) -> None:
        """See `ports.Recorder.finished`. Ordinary requests are counted later, many at a time."""
        decision, usage = record.decision, record.usage
        at, first = record.estimated_at, record.first_byte_at
        if (
            record.ending is not Ending.COMPLETED
            or usage is None
            or at is None
            or record.admitted_at is None
            or first is None
            or decision is None
            or decision.estimate.tokens <= 0
            or decision.demand.prompts != 1
            or decision.candidates.passed_over
            or record.error_code
            or record.is_spill
        ):
            self._count(record)
            return
        where = (decision.traffic_class, record.pool, record.backend)
        noted = self._noted.get(where)
        if noted is None:
            noted = self._noted[where] = []
        received_at, ended_at = record.received_at, record.ended_at
        # Figures, not the record: that would hold the memory of its request.
        noted.append(
            (
                decision.estimate.tokens,
                usage.prompt_tokens,
                usage.completion_tokens,
                at - received_at,
                record.admitted_at - at,
                ended_at - received_at,
            )
        )
        if record.stream:
            pace = first - received_at, record.tpot_s, _timeliness(record, first)
            self._paces.setdefault((decision.traffic_class, record.backend), []).append(pace)
        self._noted_count += 1
        if self._noted_count >= NOTED_MAX:
            self._count_noted()

    def _count_noted(self) -> None:
        """Count the requests noted so far, as `_count` does."""
        noted, self._noted, self._noted_count = self._noted, {}, 0
        for (name, pool, backend), figures in noted.items():
            where = (name, backend)
            estimated, tokens_in, tokens_out, estimating, waiting, durations = zip(*figures, strict=True)
            errors = [(tokens - guess) / guess for guess, tokens in zip(estimated, tokens_in, strict=True)]
            self.requests.add((name, pool, backend, Ending.COMPLETED, ""), len(figures))
            self.estimating.observe_all((), estimating)
            self.prompt_tokens.observe_all((name,), estimated)
            self.waiting_time.observe_all((name,), waiting)
            self.duration.observe_all(where, durations)
            self.tokens_in.add(where, sum(tokens_in))
            self.tokens_out.add(where, sum(tokens_out))
            self.estimate_error.observe_all((backend,), errors)
        paces, self._paces = self._paces, {}
        for of, streams in paces.items():
            first_tokens, later, timeliness = zip(*streams, strict=True)
            self.ttft.observe_all(of, first_tokens)
            if known := [tpot_s for tpot_s in later if tpot_s is not None]:
                self.tpot.observe_all(of, known)
            for one in Timeliness:
                if count := timeliness.count(one):
                    self.first_tokens.add((*of, one), count)

    def _count(self, record: RequestRecord) -> None:
        if record.ending is Ending.SHED and not record.route:
            return  # a job that finds no room is returned to the queue: it is not a refused request
        decision = record.decision
        name = decision.traffic_class if decision else ""
        self.requests.add((name, record.pool, record.backend, record.ending, record.error_code))
        if record.ending is Ending.HANDED_OVER:
            return  # it is counted when it runs
        if (read_s := record.read_s) is not None:
            self.estimating.observe((), read_s)
        if decision is None:
            return
        self.prompt_tokens.observe((name,), decision.estimate.tokens)
        for passed_over in decision.candidates.passed_over:
            self.refusals.add(passed_over)
        if (queue_s := record.queue_s) is not None:
            self.waiting_time.observe((name,), queue_s)
        if record.first_byte_at is not None:
            self._served(record, name)
        elif record.ending is Ending.LEFT and _timeliness(record, record.ended_at) is Timeliness.LATE:
            # To leave before the first token is due proves nothing.
            self.first_tokens.add((name, record.backend, Timeliness.LATE))

    def _served(self, record: RequestRecord, name: str) -> None:
        decision, first, usage = record.decision, record.first_byte_at, record.usage
        assert decision is not None
        assert first is not None
        where = (name, record.backend)
        if record.stream:
            self.ttft.observe(where, first - record.received_at)
        if (timeliness := _timeliness(record, first)) is not None:
            self.first_tokens.add((*where, timeliness))
        self.duration.observe(where, record.ended_at - record.received_at)
        if record.is_spill:
            self.spills.add((name, record.pool))
        if usage is None:
            return
        self.tokens_in.add(where, usage.prompt_tokens)
        self.tokens_out.add(where, usage.completion_tokens)
        if record.stream and (tpot_s := record.tpot_s) is not None:
            self.tpot.observe(where, tpot_s)
        estimated = decision.estimate.tokens
        if estimated > 0 and decision.demand.prompts == 1:  # of several, a sum is reported
            self.estimate_error.observe((record.backend,), (usage.prompt_tokens - estimated) / estimated)

    def backend_changed(self, backend_id: str, old: BackendStatus, new: BackendStatus) -> None:
        """Record a change of a backend's status."""
        if new.state is not old.state:
            self.state_changes.labels(backend_id, new.state.value).inc()
        if new.restarts > old.restarts:
            self.restarts.labels(backend_id).inc(new.restarts - old.restarts)

    def boxes_known(self, backends: Mapping[str, Iterable[str]]) -> None:
        """Start at zero for these backends: a series that appears with its first event shows no rise."""
        for box_id, names in backends.items():
            for name in names:
                for cause in SwapCause:
                    self.swaps.labels(box_id, name, cause.value)

    def box_swapped(self, box_id: str, swap: Swap) -> None:
        """Record a swap of a box completed by this process."""
        self.swaps.labels(box_id, swap.backend, swap.cause.value).inc()
        self.swap_time.labels(box_id, swap.backend).observe(swap.took_s)

    def config_in_force(self, version: str, backends: Iterable[str], at: float) -> None:
        """Record the configuration in force since `at` (epoch seconds), and its backends."""
        for name in backends:  # a series that appears with its first event shows no increase
            self.restarts.labels(name)
            for state in State:
                self.state_changes.labels(name, state.value)
        self.config_info.clear()
        self.config_info.labels(version).set(1)
        self.config_loaded_at.set(at)
        self.config_successful.set(1)

    def webhooks_known(self, endpoints: Iterable[str]) -> None:
        """Start at zero for these endpoints, like `boxes_known`."""
        for endpoint in endpoints:
            for outcome in WebhookOutcome:
                self.webhooks.labels(endpoint, outcome.value)

    def webhook_attempted(self, attempt: WebhookAttempt) -> None:
        """Record a delivery attempt of a webhook."""
        self.webhooks.labels(attempt.delivery.endpoint, attempt.outcome.value).inc()

    def webhooks_wait(self, pending: Mapping[str, int]) -> None:
        """Record the number of pending deliveries, by endpoint."""
        for endpoint, count in pending.items():
            self.webhooks_pending.labels(endpoint).set(count)

    def exposition(self) -> tuple[Callable[[], bytes], str]:
        """Return a function that writes the page for Prometheus as of now, in any thread, and its type."""
        return Collected(self.registry).page, CONTENT_TYPE_LATEST


def _timeliness(record: RequestRecord, at: float) -> Timeliness | None:
    """Return that of a first token at `at`, or of none by then; None for a job, which nobody watches."""
    if not record.stream or not record.route or record.due_s is None:
        return None
    return Timeliness.LATE if at - record.received_at > record.due_s else Timeliness.TIMELY


class _Process(ProcessCollector):
    """Prometheus' own, which leaves out how many files are open when none is left to count them with."""

    def collect(self) -> Iterator[Metric]:
        found = list(super().collect())
        yield from found
        if has_folder() and not any(one.name == "process_open_fds" for one in found):
            count, limit = used()
            yield GaugeMetricFamily("process_open_fds", "Number of open file descriptors.", count)
            yield GaugeMetricFamily("process_max_fds", "Maximum number of open file descriptors.", limit)
