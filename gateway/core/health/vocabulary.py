"""The words in which health is told: states, outcomes, what is known of a backend, rules and events."""

from dataclasses import dataclass, field
from enum import StrEnum

from gateway.core.perf import PerfModel


class State(StrEnum):
    """What the gateway believes of a backend."""

    UNKNOWN = "unknown"  # not probed yet: usable only when nothing better is
    BOOTING = "booting"  # refuses connections, within its boot budget: not a fault
    UP = "up"
    PROBATION = "probation"  # back after a fault or restart: a few requests at a time until they succeed
    DRAINING = "draining"  # the engine says it is stopping: finishes what runs, takes nothing new
    HUNG = "hung"  # answers /health, but generates nothing while requests run
    EJECTED = "ejected"  # failed requests: out until its penalty has passed and a probe succeeds
    DOWN = "down"  # does not answer, beyond its boot budget
    OUT = "out"  # its machine runs another model: not asked, and nothing is held against it


class Outcome(StrEnum):
    """How an attempt on a backend ended, as far as its health is concerned."""

    OK = "ok"
    REJECTED = "rejected"  # 4xx about the content: the caller's fault, proof of life
    UNFIT = "unfit"  # a whole answer that is not what was asked for (docs/quirks.md): proof of life
    CANCELLED = "cancelled"  # the caller left: says nothing
    BUSY = "busy"  # it refused for load: no fault
    DRAINING = "draining"  # "cannot schedule new futures", finish_reason "abort": it is stopping
    UNREACHABLE = "unreachable"
    TIMEOUT = "timeout"
    FAILED = "failed"  # 5xx, a broken answer, a broken stream
    MISCONFIGURED = "misconfigured"  # 401/403/404 from the backend: our key or its model name is wrong

    @property
    def is_fault(self) -> bool:
        """Whether it counts against the backend."""
        return self in _FAULTS


_FAULTS = frozenset({Outcome.UNREACHABLE, Outcome.TIMEOUT, Outcome.FAILED, Outcome.MISCONFIGURED})


class ProbeFault(StrEnum):
    """How a probe failed."""

    REFUSED = "refused"  # nothing listens there: the process is gone, or still booting
    UNREACHABLE = "unreachable"  # no route to the host
    UNRESOLVED = "unresolved"  # its name has no address
    TIMEOUT = "timeout"
    STATUS = "status"  # it answered, and not with 200
    OURS = "ours"  # this gateway could not even ask: says nothing of the backend
    BROKEN = "broken"  # TLS or HTTP that cannot be understood, or a connection that was cut


GONE = frozenset({ProbeFault.REFUSED, ProbeFault.UNREACHABLE, ProbeFault.UNRESOLVED})


@dataclass(frozen=True, slots=True)
class EngineSample:
    """One scrape of an engine's own metrics.

    Attributes:
        at: Monotonic seconds of the scrape.
        running, waiting: Sequences in its batch and in its queue.
        kv_usage: Share of its KV blocks in use, 0..1.
        generation_tokens, prompt_tokens: Counters since its start.
        preemptions: Counter since its start; a rise means KV thrash.
        steps: Counter since its start, of batches computed; 0 where it is not exported.
        started_at: Epoch seconds of its start (`process_start_time_seconds`), None where it is not exported.
    """

    at: float
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    generation_tokens: float = 0.0
    prompt_tokens: float = 0.0
    preemptions: float = 0.0
    steps: float = 0.0
    started_at: float | None = None


@dataclass(frozen=True, slots=True)
class BackendStatus:
    """What is known of one backend.

    Attributes:
        state: See `State`.
        since: Monotonic seconds at which it entered that state.
        reason: Why, in a few words for an operator.
        served_models: Names in its `/v1/models`; empty until known.
        context_tokens: `max_model_len` it reports, or None.
        version: Engine version it reports, or "".
        engine: Its last metrics sample, or None.
        restarts: Restarts noticed since the gateway started.
        last_error: The last failure, for an operator; "" if none.
        recent_failures: Monotonic seconds of failed attempts not yet forgiven, oldest first.
        metrics_error: Why its last scrape gave no sample; "" if it did. Without samples a hang goes unseen.
        model_error: What is wrong with the models it serves; "" if nothing is known to be.
        was_up: Whether it ever answered a probe; before that, not answering is booting.
        probe_failures: Failed probes in a row.
        down_since: Monotonic seconds of the first of them, or None while it answers.
        ejections: Times it was ejected without a good spell between; each doubles the penalty.
        ejected_until: Monotonic seconds at which its penalty ends.
        successes: Requests that succeeded in this probation.
        progress_at: Monotonic seconds at which its engine last moved, or was idle; None before any sample.
        served, failed: Requests of this process that spoke for or against it, since the gateway started. What
            every gateway can see by itself, or is its own configuration's doing, is not among them.
        verdicts: Times this process's own requests took it out; see `Verdict`.
        is_own_verdict: Whether that is why it is in its present state.
        heard: Per gateway, the number of the last verdict that was heard from it.
    """

    state: State = State.UNKNOWN
    since: float = 0.0
    reason: str = ""
    served_models: tuple[str, ...] = ()
    context_tokens: int | None = None
    version: str = ""
    engine: EngineSample | None = None
    restarts: int = 0
    last_error: str = ""
    recent_failures: tuple[float, ...] = field(default=())
    metrics_error: str = ""
    model_error: str = ""
    was_up: bool = False
    probe_failures: int = 0
    down_since: float | None = None
    ejections: int = 0
    ejected_until: float = 0.0
    successes: int = 0
    progress_at: float | None = None
    served: int = 0
    failed: int = 0
    verdicts: int = 0
    is_own_verdict: bool = False
    heard: tuple[tuple[str, int], ...] = ()


PROBATION_SEQS = 2
"""Sequences a backend in probation may hold at once: enough to learn from, few enough to lose."""


@dataclass(frozen=True, slots=True)
class HealthRules:
    """When a backend counts as what. Seconds; every default is a choice, none is measured unless it says so.

    Attributes:
        interval_s: Between two probes of one kind.
        probe_timeout_s: How long `/health` may take. It took 1 ms idle on vLLM 0.32, so this is generous
            to a loaded API server.
        scrape_timeout_s: How long `/metrics` may take (216 ms at most under load on vLLM 0.32).
        models_every_s: Between two looks at `/v1/models` and `/version`.
        failures_max: Failures that eject: of attempts, each success forgiving one; of probes, in a row.
        failure_window_s: Older failures of attempts are forgotten.
        penalty_s, penalty_max_s: The first ejection lasts the former; each further one twice as long, up to
            the latter. As long a good spell as the latter forgives them all.
        probation_successes: Successful requests that end probation.
        probation_s: In probation for this long and seen to generate: that ends it too. Where one answer
            takes ten minutes, waiting for three would halve a healthy box for half an hour.
        hang_s: No progress for this long while requests run is a hang; see `hang_after_s`.
        drain_s: A backend that said it was stopping and still answers after this long is tried again.
        boot_budget_s: How long it may take to answer before that counts as a fault.
        model: The name it should serve, or None when any will do.
    """

    interval_s: float = 1.0
    probe_timeout_s: float = 3.0
    scrape_timeout_s: float = 5.0
    models_every_s: float = 30.0
    failures_max: int = 3
    failure_window_s: float = 60.0
    penalty_s: float = 5.0
    penalty_max_s: float = 60.0
    probation_successes: int = 3
    probation_s: float = 15.0
    hang_s: float = 30.0
    drain_s: float = 60.0
    boot_budget_s: float = 600.0
    model: str | None = None


def hang_after_s(perf: PerfModel, batched_tokens: int, context_tokens: int, floor_s: float = 30.0) -> float:
    """Return how long a deployment may show no progress before that is a hang, in seconds.

    An engine's gauges move once per step, and a step that prefills a whole chunk at the end of a long
    prompt is long: 27 s on the PUSH profile, 48 s on one DGX Spark. Twice the longest step its latency
    model predicts, so that an error of the model is no hang.
    """
    start = max(0, context_tokens - batched_tokens)
    tokens = min(batched_tokens, context_tokens)
    step = perf.step_s(
        decoding=1,
        context_sum=context_tokens,
        context_max=context_tokens,
        prefill_tokens=tokens,
        prefill_attn=tokens * (start + tokens / 2),
    )
    return max(floor_s, 2 * step)


# ------------------------------------------------------------------ what gateways tell each other


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one gateway's requests showed it of a backend, and no other gateway's probes can see.

    Attributes:
        number: Which of this gateway's verdicts on this backend it is, from 1. With the gateway's name it
            says which verdict this is, however often it is repeated.
        state: EJECTED or DRAINING.
        reason: Why, in a few words for an operator.
        left_s: For how many more seconds it holds.
        ejections: As in `BackendStatus`, so that the next penalty is as long everywhere.
    """

    number: int
    state: State
    reason: str
    left_s: float
    ejections: int = 0


# ------------------------------------------------------------------ events


@dataclass(frozen=True, slots=True)
class ProbeOk:
    """It answers. What `/v1/models` and `/version` said, where they were asked; None where not."""

    models: tuple[str, ...] | None = None
    context_tokens: int | None = None
    version: str | None = None


@dataclass(frozen=True, slots=True)
class ProbeFailed:
    """A probe of `/health` failed."""

    kind: ProbeFault
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ModelsFailed:
    """It answers, but `/v1/models` does not say what it serves. `key_refused`: it wants another API key."""

    detail: str
    key_refused: bool = False


@dataclass(frozen=True, slots=True)
class Sample:
    """A scrape of `/metrics` succeeded."""

    engine: EngineSample


@dataclass(frozen=True, slots=True)
class SampleFailed:
    """A scrape failed. That is no verdict on the backend, but an operator wants to know."""

    detail: str


@dataclass(frozen=True, slots=True)
class Attempt:
    """A request to it ended."""

    outcome: Outcome
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Heard:
    """Another gateway tells its verdict. It is repeated for as long as it holds."""

    gateway: str
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """So many requests to it through other gateways ended since this was last told."""

    served: int
    failed: int


Event = ProbeOk | ProbeFailed | ModelsFailed | Sample | SampleFailed | Attempt | Heard | Elsewhere


# ------------------------------------------------------------------ questions


_USABLE = frozenset({State.UP, State.PROBATION, State.UNKNOWN})


def usable(status: BackendStatus) -> bool:
    """Return whether it may be sent anything at all. See `preference` for UNKNOWN."""
    return status.state in _USABLE


def accepts(status: BackendStatus, in_flight: int) -> bool:
    """Return whether it may be sent one more request while it has `in_flight` sequences of ours."""
    if status.state is State.PROBATION:
        return in_flight < PROBATION_SEQS
    return usable(status)


def preference(status: BackendStatus) -> int:
    """Return a rank among usable backends, the lowest first: one that is not probed yet is the last resort.

    A backend in probation ranks with the healthy ones: without traffic it could not prove itself, and
    `accepts` bounds what it can spoil.
    """
    return 1 if status.state is State.UNKNOWN else 0


def verdict(status: BackendStatus, now: float, rules: HealthRules) -> Verdict | None:
    """Return what to tell other gateways, or None. What was heard from one of them is not passed on."""
    if not status.is_own_verdict:
        return None
    until = status.ejected_until if status.state is State.EJECTED else status.since + rules.drain_s
    if until <= now:
        return None
    return Verdict(status.verdicts, status.state, status.reason, until - now, status.ejections)


def served_name(configured: str | None, status: BackendStatus) -> str | None:
    """Return the model name to send: the configured one, else the only one it serves, else None."""
    if configured is not None:
        return configured
    return status.served_models[0] if len(status.served_models) == 1 else None
