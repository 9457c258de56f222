"""Types of the health state machine: states, outcomes, backend status, rules and events."""

from enum import StrEnum
from math import inf

from gateway.core.value import valueclass


class State(StrEnum):
    """Health state of a backend, as seen by the gateway."""

    UNKNOWN = "unknown"  # not probed yet: used only as a last resort
    BOOTING = "booting"  # not reachable, but within its boot budget: not a fault
    UP = "up"
    PROBATION = "probation"  # back after a fault or restart: a few requests at a time until they succeed
    DRAINING = "draining"  # the engine is stopping: finishes running requests, takes no new ones
    HUNG = "hung"  # answers /health, but makes no progress while requests run; or has long answered nothing
    EJECTED = "ejected"  # requests or probes failed: out until its penalty ends and a probe succeeds
    DOWN = "down"  # does not answer, beyond its boot budget
    OUT = "out"  # its box runs another model: not probed, and its failures do not count


class Outcome(StrEnum):
    """How an attempt on a backend ended, as it concerns the backend's health."""

    OK = "ok"
    REJECTED = "rejected"  # 4xx because of the content: the caller's fault; the backend is alive
    UNFIT = "unfit"  # a complete answer that does not match the request (docs/quirks.md); it is alive
    CANCELLED = "cancelled"  # the caller left: neutral
    BUSY = "busy"  # refused because of load: not a fault
    DRAINING = "draining"  # "cannot schedule new futures", finish_reason "abort": it is stopping
    UNREACHABLE = "unreachable"
    TIMEOUT = "timeout"
    FAILED = "failed"  # 5xx, a broken answer, a broken stream
    MISCONFIGURED = "misconfigured"  # 401/403/404/405/3xx: its key, model name or URL is wrong here

    @property
    def is_fault(self) -> bool:
        """Whether it counts against the backend."""
        return self in _FAULTS


_FAULTS = frozenset({Outcome.UNREACHABLE, Outcome.TIMEOUT, Outcome.FAILED, Outcome.MISCONFIGURED})


class ProbeFault(StrEnum):
    """How a probe failed."""

    REFUSED = "refused"  # connection refused: the process is gone, or still booting
    UNREACHABLE = "unreachable"  # no route to the host
    UNRESOLVED = "unresolved"  # its host name does not resolve
    TIMEOUT = "timeout"
    STATUS = "status"  # a status other than 200
    LIMITED = "limited"  # 429: something before the engine limits requests, and this was one too many
    OURS = "ours"  # the gateway could not send the probe: says nothing about the backend
    TLS = "tls"  # its certificate, or TLS itself, is wrong: no boot mends that
    BROKEN = "broken"  # invalid HTTP, or the connection was closed early


GONE = frozenset({ProbeFault.REFUSED, ProbeFault.UNREACHABLE, ProbeFault.UNRESOLVED})


@valueclass(frozen=True, slots=True)
class EngineSample:
    """One scrape of an engine's own metrics.

    Attributes:
        at: Monotonic seconds of the scrape.
        running, waiting: Sequences in its batch and in its queue.
        kv_usage: Share of its KV blocks in use, 0..1.
        generation_tokens, prompt_tokens: Counters since its start.
        preemptions: Counter since its start; a rise means KV thrashing.
        steps: Computed batches since its start, or tokens in them; 0 if not exported.
        started_at: Epoch seconds of its start (`process_start_time_seconds`); None if not exported.
        caches_prefixes: False if it says that it keeps no prefix cache.
        resumes_anywhere: False if it says that of sliding-window layers it keeps only what is needed to go on
            where a prompt ended, or where two have parted.
        is_asleep: Whether it says that its weights are not where it computes (vLLM's sleep mode).
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
    caches_prefixes: bool = True
    resumes_anywhere: bool = True
    is_asleep: bool = False


@valueclass(frozen=True, slots=True)
class BackendStatus:
    """Health status of one backend.

    Attributes:
        state: See `State`.
        since: When it entered that state, in monotonic seconds.
        reason: Short explanation of the state for an operator.
        served_models: Names in its `/v1/models`; empty until known.
        context_tokens: The `max_model_len` that it reports, or None.
        version: The engine version that it reports, or "".
        engine: Its last metrics sample, or None.
        restarts: Restarts noticed since the gateway started.
        replaced: When processes started that others have taken the place of, in epoch seconds, oldest first.
        shared_at: When one of them was last back, in monotonic seconds, so that several engines answer at its
            URL by turns; None if that was long ago.
        last_error: The last failure, for an operator; "" if none.
        recent_failures: Monotonic seconds of failed attempts not yet forgiven, oldest first, through any
            gateway.
        own_failures: The same through this one, which successes through others do not forgive.
        trials_failed: Of an ejected one, monotonic seconds of its last failed trials, less those that trials
            since have made up for, oldest first.
        is_shunned: Whether it was ejected for those alone, or because it refuses this gateway's key or finds
            nothing at its URL, which no other gateway is told, and not up since.
        metrics_error: Why its last scrape failed, or says nothing, or "". Hangs cannot be detected without
            samples.
        model_error: A known problem with the models it serves, or "".
        was_up: Whether it ever answered a probe or served a request; before that, no answer means booting.
        probe_failures: Consecutive failed probes.
        probe_fault: How the last of them failed; None if there are none.
        down_since: When the first of them failed, in monotonic seconds; None while it answers.
        ejections: Ejections and hangs without a long enough healthy period in between; each doubles the
            penalty.
        ejected_until: When its penalty ends, in monotonic seconds.
        successes: Successful requests in this probation; of an ejected one, trials in a row.
        progress_at: When its engine last made progress or was idle, in monotonic seconds; None before the
            first sample.
        served, failed: Successful requests and faults of this process, since the gateway started. Faults that
            every gateway detects itself or that its configuration may have caused do not count.
        verdicts: How many times this process's own requests took it out of service; see `Verdict`.
        is_own_verdict: Whether that is the reason for its current state.
        heard: Per gateway, the number of the last verdict received from it.
        tried_since: When its last probation began, or it got its URL, in monotonic seconds. What was lost
            before does not count.
        is_gone: Whether its process stopped and is only waiting for its callers to leave; see `GONE_S`.
        is_asleep: Whether its engine said last that it sleeps: it takes requests, and answers none before
            somebody wakes it. That is no fault, and so no state.
    """

    state: State = State.UNKNOWN
    since: float = 0.0
    reason: str = ""
    served_models: tuple[str, ...] = ()
    context_tokens: int | None = None
    version: str = ""
    engine: EngineSample | None = None
    restarts: int = 0
    replaced: tuple[float, ...] = ()
    shared_at: float | None = None
    last_error: str = ""
    recent_failures: tuple[float, ...] = ()
    own_failures: tuple[float, ...] = ()
    trials_failed: tuple[float, ...] = ()
    is_shunned: bool = False
    metrics_error: str = ""
    model_error: str = ""
    was_up: bool = False
    probe_failures: int = 0
    probe_fault: ProbeFault | None = None
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
    tried_since: float = -inf
    is_gone: bool = False
    is_asleep: bool = False

    @property
    def reported(self) -> EngineSample | None:
        """Its last metrics sample, while it is reachable and can be scraped: what it says now."""
        return None if self.metrics_error or self.down_since is not None else self.engine


NOT_PROBED = BackendStatus()
"""The status of a backend that has not been probed yet."""

GONE_S = 10.0
"""Seconds after which a vLLM whose port refuses connections has no more to say. It stops its engine before
its port, and what it says of aborted answers came within a second, or never: vLLM 0.32 kills its engine at
SIGTERM without waiting for that, and keeps the connections until their callers leave (three of three stops
of the CPU build on a busy machine). A choice: ten times that second."""


@valueclass(frozen=True, slots=True)
class HealthRules:
    """Thresholds of the health states, in seconds. Defaults are choices, not measurements, unless noted.

    Attributes:
        interval_s: Interval between probes of one kind.
        probe_timeout_s: Timeout of `/health`. It took 1 ms on an idle vLLM 0.32, so this is generous for a
            loaded API server.
        scrape_timeout_s: Timeout of `/metrics` (216 ms at most under load on vLLM 0.32).
        models_every_s: Interval between queries of `/v1/models` and `/version`.
        failures_max: Failures that eject a backend: of attempts, where each success forgives one, or
            consecutive ones of probes.
        failure_window_s: Older failures of attempts are forgotten.
        penalty_s, penalty_max_s: Duration of the first ejection, which doubles with each further one, and
            its maximum. A healthy period of `penalty_max_s` forgives all ejections. An engine that has hung,
            and has nothing left to run, is out for as long.
        probation_successes: Successful requests that end probation.
        probation_s: Probation also ends after this long if the backend generates tokens. Where one answer
            takes ten minutes, waiting for three would halve a healthy server for half an hour.
        hang_s: No progress for this long while requests run is a hang; see `hang_after_s`.
        drain_s: A backend that reported it was stopping and still answers after this long is tried again.
        boot_budget_s: How long it may take to answer before that counts as a fault.
        model: The model name that it should serve, or None for any.
    """

    interval_s: float = 1.0
    probe_timeout_s: float = 2.0
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


# ------------------------------------------------------------------ shared between gateways


@valueclass(frozen=True, slots=True)
class Verdict:
    """A state derived from one gateway's own requests, which other gateways' probes cannot detect.

    Attributes:
        number: Sequence number of this gateway's verdicts on this backend, from 1. Together with the
            gateway's name it identifies a verdict that is repeated.
        state: EJECTED or DRAINING.
        reason: Short explanation for an operator.
        left_s: Remaining validity in seconds.
        ejections: As in `BackendStatus`, so that the next penalty has the same length everywhere.
    """

    number: int
    state: State
    reason: str
    left_s: float
    ejections: int = 0


# ------------------------------------------------------------------ events


@valueclass(frozen=True, slots=True)
class ProbeOk:
    """The backend answers. Carries the results of `/v1/models` and `/version`, None if not queried."""

    models: tuple[str, ...] | None = None
    context_tokens: int | None = None
    version: str | None = None


@valueclass(frozen=True, slots=True)
class ProbeFailed:
    """A probe of `/health` failed.

    Attributes:
        kind, detail: How.
        is_answering: Requests got something from there while the probe waited.
    """

    kind: ProbeFault
    detail: str = ""
    is_answering: bool = False


@valueclass(frozen=True, slots=True)
class ModelsFailed:
    """It answers, but `/v1/models` fails. `key_refused`: it rejected the gateway's API key."""

    detail: str
    key_refused: bool = False


@valueclass(frozen=True, slots=True)
class Sample:
    """A scrape of `/metrics` succeeded.

    Attributes:
        engine: What it showed.
        awaited_since: Since when this process waits for the first byte of an answer from there, in monotonic
            seconds; None if it waits for none.
    """

    engine: EngineSample
    awaited_since: float | None = None


@valueclass(frozen=True, slots=True)
class SampleFailed:
    """A scrape of `/metrics` failed. It does not affect the state, but is shown to operators."""

    detail: str


@valueclass(frozen=True, slots=True)
class Attempt:
    """An attempt on it ended, which started at `started_at` (monotonic seconds)."""

    outcome: Outcome
    detail: str = ""
    started_at: float = inf


@valueclass(frozen=True, slots=True)
class PeerVerdict:
    """Another gateway published its verdict. This is repeated for as long as the verdict holds."""

    gateway: str
    verdict: Verdict


@valueclass(frozen=True, slots=True)
class PeerAttempts:
    """Requests to it through other gateways that ended since the last such event."""

    served: int
    failed: int


Event = ProbeOk | ProbeFailed | ModelsFailed | Sample | SampleFailed | Attempt | PeerVerdict | PeerAttempts
