"""Questions about a backend's health: may it get requests, what are others told, when has it hung?"""

from gateway.core.health.vocabulary import BackendStatus, HealthRules, ProbeFault, State, Verdict
from gateway.core.perf import PerfModel

PROBATION_SEQS = 2
"""Concurrent sequences on a backend in probation. A choice: enough for evidence, few enough to risk."""

PROBED_WITHIN_S = 1.0
"""Time added to a penalty, since only a probe ends it: the default interval of probes
(`HealthRules.interval_s`)."""

_ANSWERED = frozenset({None, ProbeFault.STATUS})
"""How the last probe of a backend that answers requests may have ended: what is before an engine may answer
`/health` with an error of its own."""

TRIALS_FAILED_MAX = HealthRules().failures_max
"""Failed trials of an ejected backend after which it rests: as many failures as eject one."""

TRIALS_PAUSE_S = HealthRules().penalty_s
"""How long it rests after each failure then: as long as if it were ejected for the first time."""

RETRY_AFTER_UNKNOWN_MAX_S = 10.0
"""Limit on `Retry-After` where nothing tells when a backend will be up. A choice: a person who waits for an
SDK's two retries learns it within 20 s."""

_LOST = frozenset({State.HUNG, State.DOWN})


def lost(status: BackendStatus) -> bool:
    """Return whether requests that it has not answered yet will not be answered, as far as can be told."""
    return status.is_gone or status.is_asleep or status.state in _LOST


_ENDED = frozenset({State.BOOTING, State.DOWN, State.OUT})


def has_ended(status: BackendStatus) -> bool:
    """Return whether the process that it was is there no more, as far as can be told."""
    return status.state in _ENDED


_USABLE = frozenset({State.UP, State.PROBATION, State.UNKNOWN})


def usable(status: BackendStatus) -> bool:
    """Return whether requests may be sent to it at all. See `is_last_resort`."""
    return status.state in _USABLE and not status.is_asleep


def accepts(status: BackendStatus, in_flight: int) -> bool:
    """Return whether it may get another request while the gateway has `in_flight` sequences on it."""
    return usable(status) and (status.state is not State.PROBATION or in_flight < PROBATION_SEQS)


def retry_after_s(status: BackendStatus, now: float) -> float:
    """Return in how many seconds to ask again for a backend that is out of service, at least 1.

    That is when its penalty is over and it has been probed: an ejection's, or that of a hang whose requests
    have left. All other outages have no known end: each is expected to last as long again as it has lasted,
    and at most `RETRY_AFTER_UNKNOWN_MAX_S`. An ejected one may be tried before (`may_be_tried`), but not with
    all requests.
    """
    engine = status.engine
    is_idle = engine is not None and engine.running + engine.waiting == 0
    has_penalty = status.state is State.EJECTED or (status.state is State.HUNG and is_idle)
    began_at = status.ejected_until if has_penalty else status.since
    if now < began_at:
        return began_at - now + PROBED_WITHIN_S
    return max(1.0, min(RETRY_AFTER_UNKNOWN_MAX_S, now - began_at))


def is_last_resort(status: BackendStatus) -> bool:
    """Return whether all other usable backends come first, because it has not been probed yet.

    A backend in probation ranks with the healthy ones: it needs traffic to leave probation, and `accepts`
    limits the damage.
    """
    return status.state is State.UNKNOWN


def is_tried(status: BackendStatus) -> bool:
    """Return whether requests that no other backend takes are tried there, although it is ejected.

    It answers probes, if only with an error, so that some of the requests may succeed.
    """
    return status.state is State.EJECTED and not status.is_asleep and status.probe_fault in _ANSWERED


def may_be_tried(status: BackendStatus, now: float) -> bool:
    """Return whether one of these requests may be tried there now: if trials fail, it rests between them."""
    failed = status.trials_failed
    is_resting = len(failed) >= TRIALS_FAILED_MAX and now - failed[-1] < TRIALS_PAUSE_S
    return is_tried(status) and not is_resting


def verdict(status: BackendStatus, now: float, rules: HealthRules) -> Verdict | None:
    """Return the verdict to publish to other gateways, or None. Verdicts of others are not passed on."""
    if not status.is_own_verdict:
        return None
    until = status.ejected_until if status.state is State.EJECTED else status.since + rules.drain_s
    if until <= now:
        return None
    return Verdict(status.verdicts, status.state, status.reason, until - now, status.ejections)


def served_name(configured: str | None, status: BackendStatus) -> str | None:
    """Return the model name to send: the configured one, else its only served model, else None."""
    if configured is not None:
        return configured
    return status.served_models[0] if len(status.served_models) == 1 else None


def hang_after_s(perf: PerfModel, batched_tokens: int, context_tokens: int, floor_s: float) -> float:
    """Return the seconds without progress after which a deployment counts as hung.

    An engine updates its gauges once per step, and a step that prefills a whole chunk at the end of a long
    prompt takes long: 27 s on the PUSH profile, 48 s on one DGX Spark. The result is twice the longest step
    that the latency model predicts, to allow for errors of the model, and at least `floor_s`.
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
