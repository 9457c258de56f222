"""Transitions of a backend's status: one function per kind of event, and `advance`, which dispatches."""

from collections.abc import Sequence
from dataclasses import replace

from gateway.core.health.questions import TRIALS_FAILED_MAX, usable
from gateway.core.health.vocabulary import (
    GONE,
    GONE_S,
    Attempt,
    BackendStatus,
    EngineSample,
    Event,
    HealthRules,
    ModelsFailed,
    Outcome,
    PeerAttempts,
    PeerVerdict,
    ProbeFailed,
    ProbeFault,
    ProbeOk,
    Sample,
    SampleFailed,
    State,
    Verdict,
)

HEARD_MAX = 256
"""Gateways whose last verdict on a backend is remembered. A choice that bounds memory: a restarted gateway
has a new name."""

REPLACED_MAX = 16
"""Processes whose starts are remembered. A choice: more engines than anybody puts behind one URL."""

OWED_SHARE = 1 / 3
"""How long a request must have waited at an engine that shows none, as a share of `hang_s`, if others have
waited there before it. A choice: callers may leave sooner than after `hang_s`, and ask again; refusals come
at once."""

SHARED_S = 600.0
"""How long several engines are taken to answer at a URL after a sample that showed it. A choice: ten times as
long as a connection is kept (`upstream.backend_clients.AGE_S`), so that each of two is seen again."""

SHARED = "several engines answer at its URL by turns: each needs a backend of its own"
"""What operators are told of that."""

ASLEEP = "its engine sleeps: POST /wake_up wakes it"
"""What operators are told of one that takes requests and answers none."""

_TELLING = frozenset({Outcome.FAILED, Outcome.TIMEOUT})
"""Faults reported to other gateways. Unreachable backends are left out because every gateway's probes detect
them, and refused keys or model names because this gateway's own configuration may be at fault."""

_GOING_OR_GONE = frozenset({State.BOOTING, State.DOWN, State.DRAINING})
"""States that a report of its stopping does not change, because reports of broken streams may arrive late."""


_AWAY = frozenset({State.BOOTING, State.DOWN})
"""States in which each failed probe says why it does not answer now."""


def advance(status: BackendStatus, event: Event, now: float, rules: HealthRules) -> BackendStatus:
    """Return the status after `event`, which happened at `now` (monotonic seconds)."""
    if status.state is State.OUT and not isinstance(event, PeerVerdict):
        return status
    match event:
        case ProbeOk():
            return _learned(_probe_ok(status, now, rules), event, rules)
        case ProbeFailed():
            return _probe_failed(status, event, now, rules)
        case ModelsFailed():
            return _models_failed(status, event, now, rules)
        case Sample(engine, awaited_since):
            return _sample(status, engine, awaited_since, now, rules)
        case SampleFailed(detail):
            return replace(_with_sleep(status, is_asleep=False), metrics_error=detail)
        case Attempt(Outcome.OK):
            return _attempt_ok(status, event, now, rules)
        case Attempt():
            return _attempt_not_ok(status, event, now, rules)
        case PeerVerdict(gateway, verdict):
            return _heard(status, gateway, verdict, now, rules)
        case PeerAttempts(served, failed):
            return _elsewhere(status, served, failed, now, rules)


def put_out(status: BackendStatus, now: float, reason: str) -> BackendStatus:
    """Return the status of a backend whose box runs another model from now on."""
    return replace(_anew(status, State.OUT, now, reason), version=status.version)


def awaited(status: BackendStatus, now: float, reason: str) -> BackendStatus:
    """Return the status of a backend that is being started; its boot budget begins now.

    The state of the previous process is cleared, so that the new one does not count as a restart.
    """
    return replace(_anew(status, State.BOOTING, now, reason), down_since=now)


def _anew(status: BackendStatus, state: State, now: float, reason: str) -> BackendStatus:
    """Return a new status that keeps only the counters since the gateway's start."""
    return BackendStatus(
        state,
        now,
        reason,
        restarts=status.restarts,
        served=status.served,
        failed=status.failed,
        verdicts=status.verdicts,
        heard=status.heard,
    )


def _enter(status: BackendStatus, state: State, now: float, reason: str) -> BackendStatus:
    """Return the status in `state`; `since` is reset only if the state changes."""
    if state is status.state:
        return replace(status, reason=reason)
    return replace(
        status,
        state=state,
        since=now,
        reason=reason,
        trials_failed=(),
        is_own_verdict=False,
        is_shunned=status.is_shunned and state is not State.UP,
        is_gone=False,
    )


def _on_probation(status: BackendStatus, now: float, reason: str) -> BackendStatus:
    clean = replace(
        status, recent_failures=(), own_failures=(), successes=0, progress_at=now, tried_since=now
    )
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
    if event.key_refused:  # it would refuse every request, too
        return _attempt_failed(status, Outcome.MISCONFIGURED, event.detail, now, rules)
    return status


def _model_error(served: Sequence[str], wanted: str | None) -> str:
    if wanted is None and not served:
        return "lists no model"
    if wanted is None:
        return "" if len(served) == 1 else f"serves {len(served)} models: set `model` to choose one"
    return "" if wanted in served else f"serves {', '.join(served) or 'nothing'}, not {wanted}"


def _probe_ok(status: BackendStatus, now: float, rules: HealthRules) -> BackendStatus:
    away_s = 0.0 if status.down_since is None else now - status.down_since
    first = not status.was_up
    status = replace(status, probe_failures=0, probe_fault=None, down_since=None, was_up=True)
    match status.state:
        case State.UNKNOWN:
            return _enter(status, State.UP, now, "answers")
        case State.BOOTING | State.DOWN if first:
            return _enter(status, State.UP, now, f"answers, after {away_s:.0f} s")
        case State.BOOTING | State.DOWN:
            return _on_probation(status, now, f"answers again, after {away_s:.0f} s")
        case State.EJECTED if now >= status.ejected_until:
            return _on_probation(status, now, f"penalty over; last error: {status.last_error}")
        case State.EJECTED if away_s > 0:
            return replace(status, trials_failed=())  # those of meanwhile say nothing any more
        case State.DRAINING if now - status.since >= rules.drain_s:
            return _on_probation(
                status, now, f"said it was stopping, but still answers {rules.drain_s:.0f} s later"
            )
        case State.HUNG if now >= status.ejected_until and not _is_sampled(status, now, rules):
            # Without metrics, a recovery could never be detected.
            silent = "was hung; its metrics are no longer available"
            return _on_probation(status, now, f"answers again, after {away_s:.0f} s" if away_s else silent)
    return status


def _is_sampled(status: BackendStatus, now: float, rules: HealthRules) -> bool:
    return status.engine is not None and now - status.engine.at < rules.hang_s


def _probe_failed(status: BackendStatus, event: ProbeFailed, now: float, rules: HealthRules) -> BackendStatus:
    detail = event.detail or event.kind.value
    status = replace(status, last_error=f"probe: {detail}")
    if event.kind is ProbeFault.TIMEOUT and event.is_answering:  # as good an answer
        return _probe_ok(status, now, rules)
    is_busy = event.kind is ProbeFault.TIMEOUT and _is_working(status, now, rules)
    is_limited = event.kind is ProbeFault.LIMITED and status.was_up and status.down_since is None
    if is_busy or is_limited or event.kind is ProbeFault.OURS:
        return status
    since = now if status.down_since is None else status.down_since
    failures = status.probe_failures + 1
    status = replace(status, probe_failures=failures, probe_fault=event.kind, down_since=since)
    # A single refusal is conclusive: no process listens on the port. Other failures may be transient.
    certain = event.kind is ProbeFault.REFUSED or not status.was_up or status.state in _AWAY
    if not certain and failures < rules.failures_max:
        return status
    if now - since >= rules.boot_budget_s:
        why = f"no answer for more than {rules.boot_budget_s:.0f} s: {detail}"
        return _enter(status, State.DOWN, now, why)
    if certain or event.kind in GONE:
        why = detail
        # Only vLLM reports a version. Other engines close their port first, and finish what they have begun.
        is_gone = event.kind is ProbeFault.REFUSED and status.version != "" and now - since >= GONE_S
        if is_gone:
            why += "; what it had not answered is lost"
        if event.kind is not ProbeFault.TLS:
            why += f"; it has {rules.boot_budget_s:.0f} s to boot"
        clean = replace(status, recent_failures=(), own_failures=(), is_asleep=False)
        return replace(_enter(clean, State.BOOTING, now, why), is_gone=is_gone)
    if usable(status):
        return _ejected(status, f"{failures} probes failed in a row: {detail}", now, rules)
    is_silent = event.kind is ProbeFault.TIMEOUT and now - since >= rules.hang_s
    if status.state is State.EJECTED and is_silent and status.engine is not None:
        # It takes connections, and no more. Without metrics, it may be one that does one thing at a time.
        return _enter(status, State.HUNG, now, f"has answered nothing for {now - since:.0f} s")
    return status


def _is_working(status: BackendStatus, now: float, rules: HealthRules) -> bool:
    """Whether an engine's metrics show that it works on requests, so that they tell whether it hangs.

    SGLang's `/health` generates a token, which waits for the step in progress: seconds in a long prefill.
    """
    engine, progress_at = status.engine, status.progress_at
    if engine is None or progress_at is None or status.metrics_error or engine.running + engine.waiting == 0:
        return False
    is_fresh = now - engine.at < rules.probe_timeout_s + 2 * rules.interval_s
    return is_fresh and now - progress_at < rules.hang_s


# ---- samples


def _sample(
    status: BackendStatus, new: EngineSample, awaited_since: float | None, now: float, rules: HealthRules
) -> BackendStatus:
    old, is_other = status.engine, False
    status = replace(status, engine=new, metrics_error="")
    if old is not None and _restarted(old, new):
        is_other, status = True, _replaced(status, old.started_at, new.started_at, now)
    if status.shared_at is not None:
        if now - status.shared_at < SHARED_S:  # figures of different engines: nothing follows from a change
            status = _with_sleep(status, is_asleep=False)
            return _after_progress(replace(status, metrics_error=SHARED), None, new, now, rules)
        status = replace(status, shared_at=None)
    status = _with_sleep(status, is_asleep=new.is_asleep)
    if is_other:
        return _after_restart(status, now)
    if status.is_asleep:
        return replace(status, progress_at=now)
    moved = old is None or _counted(old) != _counted(new) or new.kv_usage > old.kv_usage
    is_idle = new.running + new.waiting == 0
    if moved or status.progress_at is None or (is_idle and awaited_since is None):
        return _after_progress(status, old, new, now, rules)
    # vLLM sets its gauges after each step: if it was idle when it hung, or sleeps, they stay at zero.
    is_owed = awaited_since is not None and now - awaited_since >= rules.hang_s * OWED_SHARE
    stuck_s = now - status.progress_at
    if stuck_s >= rules.hang_s and (is_owed or not is_idle) and usable(status):
        why = f"no token in {stuck_s:.0f} s with {new.running} running and {new.waiting} waiting"
        if is_idle:
            why = f"no token in {stuck_s:.0f} s for requests of which it knows nothing"
        status = _with_penalty(status, status.progress_at, now, rules)
        return _enter(replace(status, last_error=f"hung: {why}"), State.HUNG, now, why)
    return status


def _with_sleep(status: BackendStatus, *, is_asleep: bool) -> BackendStatus:
    if is_asleep is status.is_asleep:
        return status
    return replace(status, is_asleep=is_asleep, reason=ASLEEP if is_asleep else "is awake again")


def _restarted(old: EngineSample, new: EngineSample) -> bool:
    if old.started_at is not None and new.started_at is not None:
        return not _are_same(old.started_at, new.started_at)
    # Several API servers behind one port export no start time. Counters fall only at a restart.
    return (
        new.generation_tokens < old.generation_tokens
        or new.prompt_tokens < old.prompt_tokens
        or new.preemptions < old.preemptions
    )


def _are_same(one: float, other: float) -> bool:
    """Return whether two starts are those of one process."""
    return abs(one - other) < 0.01  # one clock tick; a restart takes longer


def _replaced(status: BackendStatus, former: float | None, start: float | None, now: float) -> BackendStatus:
    """Return the status after another process than before has answered. One that is gone is never back."""
    if former is None or start is None:
        return status
    is_back = any(_are_same(one, start) for one in status.replaced)
    others = (one for one in status.replaced if not _are_same(one, start))
    return replace(
        status,
        replaced=(*others, former)[-REPLACED_MAX:],
        shared_at=now if is_back else status.shared_at,
    )


def _after_restart(status: BackendStatus, now: float) -> BackendStatus:
    """Return the status after a restart, without the facts about the old process."""
    status = replace(
        status,
        restarts=status.restarts + 1,
        served_models=(),
        context_tokens=None,
        version="",
        model_error="",
    )
    if status.state in _AWAY:  # the next good probe brings it back
        return replace(status, progress_at=now)
    return _on_probation(status, now, f"restarted; restarts so far: {status.restarts}")


def _counted(engine: EngineSample) -> tuple[float, ...]:
    """Return the counters of which one changes, or KV usage rises, whenever a step makes progress.

    Prompt tokens are counted only at the end of a whole prefill, which takes 139 s for 200,000 tokens. But
    each of its chunks takes KV blocks, and the engine's step sets that gauge, so a hung engine does not raise
    it. It falls when requests leave, too, such as those of another gateway that has noticed the hang first.
    Running and waiting are left out, because the arrival of a request is not progress; preemptions, because
    they also rise in a livelock. llama.cpp has no KV gauge, but counts its steps; SGLang rounds its gauge and
    counts the tokens of a request at its end, but also those of each step.
    """
    return (engine.generation_tokens, engine.prompt_tokens, engine.steps)


def _after_progress(
    status: BackendStatus, old: EngineSample | None, new: EngineSample, now: float, rules: HealthRules
) -> BackendStatus:
    still_s = now - status.since
    status = replace(status, progress_at=now)
    generated = old is not None and new.generation_tokens > old.generation_tokens
    if status.state is State.HUNG:
        how = "generates again" if generated else "makes progress again"
        if not generated and new.running + new.waiting == 0:
            # It has let its requests go, and may hang with the next ones, too.
            if now < status.ejected_until:
                return status
            how = "was hung, has nothing left to run, and is tried again"
        return _on_probation(status, now, f"{how}, after {still_s:.0f} s")
    if status.state is State.PROBATION and generated and still_s >= rules.probation_s:
        return _enter(status, State.UP, now, f"generates, {still_s:.0f} s without a failure")
    return status


# ---- attempts


def _attempt_not_ok(status: BackendStatus, event: Attempt, now: float, rules: HealthRules) -> BackendStatus:
    if event.started_at < status.tried_since:
        return status  # lost with those for which it was taken out
    if event.outcome is Outcome.DRAINING:
        return _attempt_drained(status, event.detail, now)
    is_refused = event.outcome is Outcome.BUSY  # what is before an engine that is dead may say so of all
    is_trial = status.state is State.EJECTED and event.started_at >= status.since
    if is_trial and (event.outcome.is_fault or is_refused):
        failed = (*_recent(status.trials_failed, now, rules), now)[-TRIALS_FAILED_MAX:]
        told = status.failed + (event.outcome in _TELLING and not status.is_shunned)
        status = replace(status, successes=0, trials_failed=failed, failed=told)
    if event.outcome.is_fault:
        return _attempt_failed(status, event.outcome, event.detail, now, rules)
    return status  # REJECTED, UNFIT, CANCELLED, BUSY: not faults


def _attempt_ok(status: BackendStatus, event: Attempt, now: float, rules: HealthRules) -> BackendStatus:
    # One success forgives one failure, so that a busy backend is not ejected for a few failures in a thousand
    # requests, but one that fails most requests is.
    status = replace(
        status,
        served=status.served + 1,
        recent_failures=status.recent_failures[1:],
        own_failures=status.own_failures[1:],
    )
    if status.state is State.UNKNOWN and event.started_at >= status.tried_since:
        return _enter(replace(status, was_up=True), State.UP, now, "served a request")
    if status.state is State.EJECTED and event.started_at >= status.since:
        return _trial_ok(status, now, rules)
    return _succeeded(status, 1, now, rules)


def _trial_ok(status: BackendStatus, now: float, rules: HealthRules) -> BackendStatus:
    """Return the status of an ejected backend that has answered a request that no other took.

    As many as end a probation, in a row, end its penalty: the next good probe begins the probation. What is
    over early doubles no penalty to come: it would soon be out for the longest time, and remain so when all
    is well, because another that is up is asked instead of trying it.
    """
    status = replace(status, successes=status.successes + 1, trials_failed=status.trials_failed[1:])
    if now >= status.ejected_until or status.successes < rules.probation_successes:
        return status
    return replace(status, ejected_until=now, ejections=status.ejections - 1)


def _succeeded(status: BackendStatus, served: int, now: float, rules: HealthRules) -> BackendStatus:
    if status.state is not State.PROBATION:
        return status
    done = status.successes + served
    if done >= rules.probation_successes:
        return _enter(status, State.UP, now, f"served {done} requests in probation")
    return replace(status, successes=done)


def _attempt_failed(
    status: BackendStatus, outcome: Outcome, detail: str, now: float, rules: HealthRules
) -> BackendStatus:
    detail = f"{outcome.value}: {detail.removesuffix('.')}" if detail else outcome.value
    status = replace(status, last_error=detail)
    if not usable(status):
        return status  # already out of service; requests that were in flight do not count
    is_telling = outcome in _TELLING
    is_shunned = status.is_shunned or outcome is Outcome.MISCONFIGURED
    status = replace(status, failed=status.failed + is_telling)
    if status.state is State.PROBATION:
        out = _ejected(status, f"failed in probation: {detail}", now, rules, is_shunned=is_shunned)
    else:
        own_failures = (*_recent(status.own_failures, now, rules), now)
        status = replace(_with_failures(status, 1, now, rules), own_failures=own_failures)
        failures, own = len(status.recent_failures), len(status.own_failures)
        if failures >= rules.failures_max:
            why = f"{failures} failures, the last: {detail}"
            out = _ejected(status, why, now, rules, is_shunned=is_shunned)
        elif own >= rules.failures_max:
            # The engine is well: what is between it and this gateway is not, which concerns no other gateway.
            why = f"{own} failures from here, though it serves other gateways; the last: {detail}"
            out = _ejected(status, why, now, rules, is_shunned=True)
        else:
            return status
    return _own_verdict(out) if is_telling and not out.is_shunned else out


def _with_failures(status: BackendStatus, failed: int, now: float, rules: HealthRules) -> BackendStatus:
    kept = _recent(status.recent_failures, now, rules)
    return replace(status, recent_failures=(*kept, *(now for _ in range(failed))))


def _recent(failures: Sequence[float], now: float, rules: HealthRules) -> Sequence[float]:
    return [at for at in failures if now - at < rules.failure_window_s]


def _own_verdict(status: BackendStatus) -> BackendStatus:
    return replace(status, verdicts=status.verdicts + 1, is_own_verdict=True)


def _ejected(
    status: BackendStatus, reason: str, now: float, rules: HealthRules, *, is_shunned: bool = False
) -> BackendStatus:
    status = _with_penalty(status, now, now, rules)
    status = replace(status, recent_failures=(), own_failures=(), successes=0, is_shunned=is_shunned)
    penalty_s = status.ejected_until - now
    return _enter(status, State.EJECTED, now, f"{reason}; out for at least {penalty_s:.0f} s")


def _with_penalty(status: BackendStatus, good_until: float, now: float, rules: HealthRules) -> BackendStatus:
    """Return the status with a penalty that begins now. It was in good health until `good_until`."""
    good_spell = status.state is State.UP and good_until - status.since >= rules.penalty_max_s
    ejections = 1 if good_spell else status.ejections + 1
    penalty_s = min(rules.penalty_s * 2.0 ** min(ejections - 1, 32), rules.penalty_max_s)
    return replace(status, ejections=ejections, ejected_until=now + penalty_s)


def _attempt_drained(status: BackendStatus, detail: str, now: float) -> BackendStatus:
    if status.state in _GOING_OR_GONE:
        return status
    reason = f"the engine is stopping: {detail}" if detail else "the engine is stopping"
    return _own_verdict(_enter(status, State.DRAINING, now, reason))


# ---- other gateways


def _heard(
    status: BackendStatus, gateway: str, verdict: Verdict, now: float, rules: HealthRules
) -> BackendStatus:
    """Return the status after another gateway's verdict, which counts once even if it is repeated."""
    heard = dict(status.heard)
    if verdict.number <= heard.pop(gateway, 0):
        return status
    known = (*heard.items(), (gateway, verdict.number))[-HEARD_MAX:]
    status = replace(status, heard=known)
    if verdict.left_s <= 0 or status.state is State.OUT:
        return status
    reason = f"seen by {gateway}: {verdict.reason}"
    if verdict.state is State.DRAINING and status.state not in _GOING_OR_GONE:
        since = now - max(0.0, rules.drain_s - verdict.left_s)
        return replace(_enter(status, State.DRAINING, now, reason), since=since)
    if verdict.state is not State.EJECTED:
        return status
    until = now + min(verdict.left_s, rules.penalty_max_s)
    ejections = max(status.ejections, verdict.ejections)
    if status.state is State.EJECTED:
        until = max(status.ejected_until, until)
        return replace(status, ejections=ejections, ejected_until=until, is_shunned=False)
    if not usable(status):
        return status
    status = replace(
        status,
        ejections=ejections,
        ejected_until=until,
        recent_failures=(),
        own_failures=(),
        successes=0,
        is_shunned=False,
        last_error=reason,
    )
    return _enter(status, State.EJECTED, now, reason)


def _elsewhere(
    status: BackendStatus, served: int, failed: int, now: float, rules: HealthRules
) -> BackendStatus:
    """Return the status after requests of other gateways, whose order is unknown.

    In probation only successes count, because the gateway whose request failed ejects the backend and
    publishes that verdict.
    """
    if status.state is State.PROBATION:
        return _succeeded(status, served, now, rules) if served and not failed else status
    if status.state not in (State.UP, State.UNKNOWN):
        return status
    if failed <= served:
        return replace(status, recent_failures=status.recent_failures[served - failed :])
    status = _with_failures(status, min(failed - served, rules.failures_max), now, rules)
    failures = len(status.recent_failures)
    if failures < rules.failures_max:
        return status
    why = f"{failures} failures, some of them through other gateways"
    return _own_verdict(_ejected(status, why, now, rules))
