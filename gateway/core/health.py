"""A backend's health as a state machine: events in, status out. Pure.

                   probe ok                    3 failures
        UNKNOWN ------------> UP <--------+  -----------------> EJECTED
           |                   ^          |                        | penalty over, probe ok
           | refused           | first    | 3 successes            v
           v                   | boot     +------------------- PROBATION <--- restart noticed,
        BOOTING ---------------+                                   ^          tokens move again
           | boot budget over                                      |
           v                     probe ok                          |
         DOWN -----------------------------------------------------+
        DRAINING: the engine said it is stopping.   HUNG: it generates nothing while requests run.
        OUT: its machine runs another model (`put_out`), until that one is started again (`awaited`).

Three kinds of evidence come in. *Probes* say whether the server answers; *samples* of the engine's
own metrics say whether it makes progress and whether it is still the same process; *attempts* say
how real requests fared. No one of them is enough: a hung engine and a draining one both answer
`/health` with 200, and a caller's bad request fails on a healthy backend.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
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


_GONE = frozenset({ProbeFault.REFUSED, ProbeFault.UNREACHABLE, ProbeFault.UNRESOLVED})


@dataclass(frozen=True, slots=True)
class EngineSample:
    """One scrape of an engine's own metrics.

    Attributes:
        at: Monotonic seconds of the scrape.
        running, waiting: Sequences in its batch and in its queue.
        kv_usage: Share of its KV blocks in use, 0..1.
        generation_tokens, prompt_tokens: Counters since its start.
        preemptions: Counter since its start; a rise means KV thrash.
        started_at: Epoch seconds of its start (`process_start_time_seconds`), None where it is not exported.
    """

    at: float
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    generation_tokens: float = 0.0
    prompt_tokens: float = 0.0
    preemptions: float = 0.0
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


Event = ProbeOk | ProbeFailed | ModelsFailed | Sample | SampleFailed | Attempt


# ------------------------------------------------------------------ questions


def usable(status: BackendStatus) -> bool:
    """Return whether it may be sent anything at all. See `preference` for UNKNOWN."""
    return status.state in (State.UP, State.PROBATION, State.UNKNOWN)


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


def served_name(configured: str | None, status: BackendStatus) -> str | None:
    """Return the model name to send: the configured one, else the only one it serves, else None."""
    if configured is not None:
        return configured
    return status.served_models[0] if len(status.served_models) == 1 else None


# ------------------------------------------------------------------ transitions


def advance(status: BackendStatus, event: Event, now: float, rules: HealthRules) -> BackendStatus:
    """Return the status after `event`, which happened at `now` (monotonic seconds)."""
    if status.state is State.OUT:
        return status
    match event:
        case ProbeOk():
            return _learned(_probe_ok(status, now, rules), event, rules)
        case ProbeFailed():
            return _probe_failed(status, event, now, rules)
        case ModelsFailed():
            return _models_failed(status, event, now, rules)
        case Sample(engine):
            return _sample(status, engine, now, rules)
        case SampleFailed(detail):
            return replace(status, metrics_error=detail)
        case Attempt(Outcome.OK):
            return _attempt_ok(status, now, rules)
        case Attempt(Outcome.DRAINING, detail):
            return _attempt_drained(status, detail, now)
        case Attempt(outcome, detail) if outcome.is_fault:
            return _attempt_failed(
                status, f"{outcome.value}: {detail}" if detail else outcome.value, now, rules
            )
    return status  # REJECTED, CANCELLED, BUSY: nothing to hold against it


def put_out(status: BackendStatus, now: float, reason: str) -> BackendStatus:
    """Return the status of a backend whose machine runs another model from now on."""
    return BackendStatus(State.OUT, now, reason, version=status.version, restarts=status.restarts)


def awaited(status: BackendStatus, now: float, reason: str) -> BackendStatus:
    """Return the status of a backend that is being started: it has its whole boot budget from now on.

    What was known of the process before is forgotten, so that the new one is no unexpected restart.
    """
    return BackendStatus(State.BOOTING, now, reason, restarts=status.restarts, down_since=now)


def _enter(status: BackendStatus, state: State, now: float, reason: str) -> BackendStatus:
    """Return the status in `state`; `since` restarts only when that is another state than before."""
    if state is status.state:
        return replace(status, reason=reason)
    return replace(status, state=state, since=now, reason=reason, successes=0)


def _on_probation(status: BackendStatus, now: float, reason: str) -> BackendStatus:
    clean = replace(status, recent_failures=(), successes=0, progress_at=now)
    return _enter(clean, State.PROBATION, now, reason)


# ---- probes


def _learned(status: BackendStatus, event: ProbeOk, rules: HealthRules) -> BackendStatus:
    if event.version is not None:
        status = replace(status, version=event.version)
    if event.models is None:
        return status
    status = _with_model_error(status, _model_error(event.models, rules.model))
    return replace(status, served_models=event.models, context_tokens=event.context_tokens)


def _with_model_error(status: BackendStatus, error: str) -> BackendStatus:
    if error == status.model_error:
        return status
    return replace(status, model_error=error, reason=error or "serves the right model now")


def _models_failed(
    status: BackendStatus, event: ModelsFailed, now: float, rules: HealthRules
) -> BackendStatus:
    status = _with_model_error(status, f"cannot tell what it serves: {event.detail}")
    if event.key_refused:  # every request would be refused too
        return _attempt_failed(status, f"{Outcome.MISCONFIGURED.value}: {event.detail}", now, rules)
    return status


def _model_error(served: Sequence[str], wanted: str | None) -> str:
    if wanted is None:
        return "" if len(served) == 1 else f"serves {len(served)} models: configure which one"
    return "" if wanted in served else f"serves {', '.join(served) or 'nothing'}, not {wanted}"


def _probe_ok(status: BackendStatus, now: float, rules: HealthRules) -> BackendStatus:
    away_s = 0.0 if status.down_since is None else now - status.down_since
    first = not status.was_up
    status = replace(status, probe_failures=0, down_since=None, was_up=True)
    match status.state:
        case State.UNKNOWN:
            return _enter(status, State.UP, now, "answers")
        case State.BOOTING | State.DOWN if first:
            return _enter(status, State.UP, now, f"answers, after {away_s:.0f} s")
        case State.BOOTING | State.DOWN:
            return _on_probation(status, now, f"answers again, after {away_s:.0f} s")
        case State.EJECTED if now >= status.ejected_until:
            return _on_probation(status, now, f"penalty over; it was: {status.last_error}")
        case State.DRAINING if now - status.since >= rules.drain_s:
            return _on_probation(
                status, now, f"said it was stopping, still answers {rules.drain_s:.0f} s later"
            )
        case State.HUNG if status.engine is None or now - status.engine.at >= rules.hang_s:
            # Its metrics fell silent, so nothing could ever show that it recovered.
            return _on_probation(status, now, "was hung; no metrics to judge it by any more")
    return status


def _probe_failed(status: BackendStatus, event: ProbeFailed, now: float, rules: HealthRules) -> BackendStatus:
    detail = event.detail or event.kind.value
    if event.kind is ProbeFault.OURS:
        return replace(status, last_error=f"probe: {detail}")
    since = now if status.down_since is None else status.down_since
    failures = status.probe_failures + 1
    status = replace(status, probe_failures=failures, down_since=since, last_error=f"probe: {detail}")
    # One refusal is certain: the kernel says that nobody listens. The rest may pass.
    certain = event.kind is ProbeFault.REFUSED or not status.was_up
    if not certain and failures < rules.failures_max and status.state is not State.DOWN:
        return status
    if now - since >= rules.boot_budget_s:
        why = f"no answer for more than {rules.boot_budget_s:.0f} s: {detail}"
        return _enter(status, State.DOWN, now, why) if status.state is not State.DOWN else status
    if status.state is State.DOWN:
        return status
    if certain or event.kind in _GONE:
        why = f"{detail}; it has {rules.boot_budget_s:.0f} s to boot"
        return _enter(replace(status, recent_failures=()), State.BOOTING, now, why)
    if status.state in (State.UP, State.PROBATION, State.UNKNOWN):
        return _ejected(status, f"{failures} probes failed in a row: {detail}", now, rules)
    return status


# ---- samples


def _sample(status: BackendStatus, new: EngineSample, now: float, rules: HealthRules) -> BackendStatus:
    old = status.engine
    status = replace(status, engine=new, metrics_error="")
    if old is not None and _restarted(old, new):
        return _after_restart(status, now)
    moved = old is None or _mark(old) != _mark(new)
    if moved or status.progress_at is None or new.running + new.waiting == 0:
        return _after_progress(status, old, new, now, rules)
    stuck_s = now - status.progress_at
    if stuck_s >= rules.hang_s and status.state in (State.UP, State.PROBATION, State.UNKNOWN):
        why = f"no token in {stuck_s:.0f} s with {new.running} running and {new.waiting} waiting"
        return _enter(replace(status, last_error=f"hung: {why}"), State.HUNG, now, why)
    return status


def _restarted(old: EngineSample, new: EngineSample) -> bool:
    if old.started_at is not None and new.started_at is not None:
        return abs(new.started_at - old.started_at) >= 0.01  # one clock tick: no process starts twice in it
    # Several API servers behind one port export no start time; counters cannot fall otherwise.
    return (
        new.generation_tokens < old.generation_tokens
        or new.prompt_tokens < old.prompt_tokens
        or new.preemptions < old.preemptions
    )


def _after_restart(status: BackendStatus, now: float) -> BackendStatus:
    """Return the status of what is a new process: what was known of the old one is forgotten."""
    status = replace(
        status,
        restarts=status.restarts + 1,
        served_models=(),
        context_tokens=None,
        version="",
        model_error="",
    )
    if status.state in (State.BOOTING, State.DOWN):  # the next good probe brings it back
        return replace(status, progress_at=now)
    return _on_probation(status, now, f"restarted, {status.restarts} times so far")


def _mark(engine: EngineSample) -> tuple[float, ...]:
    """Return what moves whenever an engine finishes a step that did something.

    Prompt tokens are counted only once a whole prefill is done, and one of 200,000 tokens takes 139 s.
    But each of its chunks takes KV blocks, and that gauge is set by the engine's own step: one that
    hangs leaves it as it was. Running and waiting are left out, because a request that arrives is no
    progress; preemptions, because they rise in a livelock too.
    """
    return (engine.kv_usage, engine.generation_tokens, engine.prompt_tokens)


def _after_progress(
    status: BackendStatus, old: EngineSample | None, new: EngineSample, now: float, rules: HealthRules
) -> BackendStatus:
    still_s = now - status.since
    status = replace(status, progress_at=now)
    generated = old is not None and new.generation_tokens > old.generation_tokens
    if status.state is State.HUNG:
        how = "generates again" if generated else "moves again"
        return _on_probation(status, now, f"{how}, after {still_s:.0f} s")
    if status.state is State.PROBATION and generated and still_s >= rules.probation_s:
        return _enter(status, State.UP, now, f"generates, {still_s:.0f} s without a failure")
    return status


# ---- attempts


def _attempt_ok(status: BackendStatus, now: float, rules: HealthRules) -> BackendStatus:
    # One success forgives one failure, so that a busy backend is not thrown out for a few in a
    # thousand, and one that fails every other request still is.
    status = replace(status, recent_failures=status.recent_failures[1:])
    if status.state is State.UNKNOWN:
        return _enter(replace(status, was_up=True), State.UP, now, "served a request")
    if status.state is not State.PROBATION:
        return status
    done = status.successes + 1
    if done >= rules.probation_successes:
        return _enter(status, State.UP, now, f"served {done} requests in probation")
    return replace(status, successes=done)


def _attempt_failed(status: BackendStatus, detail: str, now: float, rules: HealthRules) -> BackendStatus:
    status = replace(status, last_error=detail)
    if status.state is State.PROBATION:
        return _ejected(status, f"failed in probation: {detail}", now, rules)
    if status.state not in (State.UP, State.UNKNOWN):
        return status  # it is out already; what was in flight does not make it worse
    kept = (at for at in status.recent_failures if now - at < rules.failure_window_s)
    failures = (*kept, now)
    status = replace(status, recent_failures=failures)
    if len(failures) < rules.failures_max:
        return status
    return _ejected(status, f"{len(failures)} requests failed, the last with {detail}", now, rules)


def _ejected(status: BackendStatus, reason: str, now: float, rules: HealthRules) -> BackendStatus:
    good_spell = status.state is State.UP and now - status.since >= rules.penalty_max_s
    ejections = 1 if good_spell else status.ejections + 1
    penalty_s = min(rules.penalty_s * 2.0 ** min(ejections - 1, 32), rules.penalty_max_s)
    status = replace(status, ejections=ejections, ejected_until=now + penalty_s, recent_failures=())
    return _enter(status, State.EJECTED, now, f"{reason}; out for {penalty_s:.0f} s")


def _attempt_drained(status: BackendStatus, detail: str, now: float) -> BackendStatus:
    if status.state in (State.BOOTING, State.DOWN, State.DRAINING):
        return status  # the report of a stream that was cut comes after the process is gone
    return _enter(
        status,
        State.DRAINING,
        now,
        f"the engine is stopping: {detail}" if detail else "the engine is stopping",
    )
