"""Selection: filter, score, pick. Where may this request go, in which order, and why not elsewhere?

A rule is a function; the order of pools is the operator's. Filters run in the order of `FILTERS`
and the first that objects is the reason shown. Scores are weighted and summed; ties go to the order
in which the pool lists its backends: no dice, so a decision can be explained and replayed.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Protocol

from gateway.core import admission, versions
from gateway.core.health import PROBATION_SEQS, BackendStatus, State, accepts, preference, usable
from gateway.core.quirks.context_buckets import stalls
from gateway.core.value import valueclass
from gateway.core.values import (
    Backend,
    Candidate,
    Capacity,
    Demand,
    Exclusion,
    Load,
    Objection,
    Policy,
    Pool,
    Ranking,
    TrafficClass,
    Weights,
)


@valueclass(frozen=True, slots=True)
class BackendView:
    """A backend as it stands at the moment of a decision.

    Attributes:
        backend: Its configuration.
        load: What the gateway has in flight on it.
        status: Its health.
        prefix_share: Share (0..1) of this conversation it has seen before.
        share_max: How much of its knee may be used: the whole, or less where a target for TPOT says so.
        kv_taken: KV blocks in use there that nobody has reserved who shares this gateway's count.
        long_waiting: Requests with long prompts that wait for it as their first choice.
        away: Why the machine it shares with other models runs none of its own now; None where it does.
    """

    backend: Backend
    load: Load
    status: BackendStatus
    prefix_share: float = 0.0
    share_max: int = admission.WHOLE
    kv_taken: int = 0
    long_waiting: int = 0
    away: Objection | None = None

    @property
    def capacity(self) -> Capacity:
        """What it can hold; a window the engine reports below the configured one wins."""
        reported, configured = self.status.context_tokens, self.backend.capacity
        if reported is None or reported >= configured.context_tokens:
            return configured
        return _narrowed(configured, reported)


@lru_cache(maxsize=256)
def _narrowed(capacity: Capacity, context_tokens: int) -> Capacity:
    return replace(capacity, context_tokens=context_tokens)


@valueclass(frozen=True, slots=True)
class Case:
    """One request before one backend: what a filter judges.

    Attributes:
        demand: What the request asks.
        view: The backend.
        capacity: What it can hold.
        pool: The pool it is considered in.
        claim: What the request would take.
        limits: The most the backend may hold for it to start.
        spill_limits: The same where an earlier pool of the class was the first choice; else None.
    """

    demand: Demand
    view: BackendView
    capacity: Capacity
    pool: Pool
    claim: Load
    limits: Load
    spill_limits: Load | None = None


class BackendCase(Protocol):
    """What filters that look at the backend alone judge."""

    @property
    def view(self) -> BackendView:
        """The backend."""


Filter = Callable[[Case], Objection | None]

_NONE: frozenset[str] = frozenset()


def _drain(case: BackendCase) -> Objection | None:
    if case.view.backend.drain:
        return Exclusion.DRAINING, "drained by the operator"
    if case.view.status.state is State.DRAINING:
        return Exclusion.DRAINING, case.view.status.reason or "the engine is stopping"
    return None


def _fit(case: Case) -> Objection | None:
    demand, capacity = case.demand, case.capacity
    misfit = admission.misfit(capacity, demand, case.claim.kv_blocks)
    if misfit is None:
        return None
    match misfit:
        case Exclusion.CONTEXT_EXCEEDED as reason:
            return reason, f"needs {demand.total_tokens} tokens, holds {capacity.context_tokens}"
        case Exclusion.SEQS_EXCEEDED as reason:
            return (
                reason,
                f"wants {demand.seqs} sequences, knee {admission.knee_seqs(capacity, demand.prompt_tokens)}",
            )
        case reason:
            return (
                reason,
                f"needs {case.claim.kv_blocks} KV blocks, holds {admission.blocks_planned(capacity)}",
            )


def _modality(case: Case) -> Objection | None:
    if not case.demand.images and not case.demand.audios:
        return None
    refused = _refused_parts(case.view.backend, case.demand)
    return (Exclusion.MODALITY, refused) if refused else None


def _refused_parts(backend: Backend, demand: Demand) -> str:
    takes = backend.modalities
    for noun, count, most in (
        ("images", demand.images, takes.images_max),
        ("audio", demand.audios, takes.audios_max),
    ):
        if most is not None and count > most:
            return f"takes no {noun}" if most == 0 else f"takes {most} {noun}, not {count}"
    return ""


def _away(case: Case) -> Objection | None:
    return case.view.away


def _model(case: BackendCase) -> Objection | None:
    served, wanted = case.view.status.served_models, case.view.backend.model
    if wanted is not None and served and wanted not in served:
        return Exclusion.WRONG_MODEL, f"serves {', '.join(served)}, not {wanted}"
    if wanted is None and not served:
        error = case.view.status.model_error
        reason = Exclusion.WRONG_MODEL if error else Exclusion.NOT_ASKED
        return reason, error or "the name of the model it serves is not known yet"
    if wanted is None and len(served) > 1:
        return Exclusion.WRONG_MODEL, f"serves {', '.join(served)}: set `model` to choose one"
    return None


def _version(case: BackendCase) -> Objection | None:
    status, allowed = case.view.status, case.view.backend.versions
    if not allowed:
        return None
    if not status.served_models:  # they are asked for together
        return Exclusion.NOT_ASKED, "its engine's version is not known yet"
    wrong = versions.misfit(allowed, status.version)
    return (Exclusion.WRONG_VERSION, wrong) if wrong else None


def _health(case: BackendCase) -> Objection | None:
    status = case.view.status
    if accepts(status, case.view.load.seqs):
        return None
    if usable(status):
        return Exclusion.AT_KNEE, f"{status.state.value}: a few requests at a time until they succeed"
    return Exclusion.UNHEALTHY, f"{status.state.value}: {status.reason}"


def _room(case: Case) -> Objection | None:
    load, most = case.view.load, case.limits
    if case.claim.long_seqs and case.pool.gates.long_prefills == 0 and load.seqs:
        return Exclusion.LONG_PREFILL, f"{load.seqs} in flight; a long prompt starts there only when none are"
    full = admission.full(load, case.claim, most)
    if full is None:
        return None
    match full:
        case Exclusion.KV_FULL as reason:
            detail = f"{load.kv_blocks} of {most.kv_blocks} KV blocks taken"
            if case.view.kv_taken:
                detail += f", {case.view.kv_taken} more by others"
        case Exclusion.LONG_FULL as reason:
            detail = f"{load.long_seqs} long prompts in flight of {most.long_seqs}"
        case Exclusion.LONG_PREFILL as reason:
            detail = f"{load.long_unanswered} of {most.long_unanswered} long prompts being read"
        case Exclusion.PREFILL_BUSY as reason:
            detail = f"{load.prefill_ms / 1000:.1f} s of prompt work outstanding"
        case reason:
            detail = f"{load.seqs} in flight, {load.share / admission.WHOLE:.0%} of its knee"
            if most.share < admission.WHOLE:
                detail += f"; the TPOT target allows {most.share / admission.WHOLE:.0%}"
    return reason, detail


def _spill(case: Case) -> Objection | None:
    load, most = case.view.load, case.spill_limits
    if most is None:
        return None
    if load.long_unanswered and not case.claim.long_seqs:
        return Exclusion.SPILL_LONG, "it is prefilling a long prompt"
    if case.view.long_waiting:
        return Exclusion.SPILL_LONG, f"{case.view.long_waiting} long prompts wait for it"
    match admission.full(load, case.claim, most):
        case None:
            return None
        case Exclusion.PREFILL_BUSY:
            return Exclusion.SPILL_PREFILL, f"{load.prefill_ms / 1000:.1f} s of prompt work outstanding"
        case _:
            kept = 1 - most.share / admission.WHOLE
            return (
                Exclusion.SPILL_RESERVE,
                f"{load.share / admission.WHOLE:.0%} of its knee, {kept:.0%} is kept for its own class",
            )


FILTERS: Mapping[str, Filter] = {
    # What can never change first, so that a caller whose request fits nowhere is not told to retry.
    "fit": _fit,
    "modality": _modality,
    "drain": _drain,
    "away": _away,
    "health": _health,
    "model": _model,
    "version": _version,
    "room": _room,
    "spill": _spill,
}


_RULES = tuple(FILTERS.values())


@valueclass(frozen=True, slots=True)
class _Alone:
    view: BackendView


def kept_out(backend: Backend, status: BackendStatus) -> Objection | None:
    """Return why a backend would be given nothing now, whatever is asked for; None if it would be.

    One that nobody has probed yet is a last resort, and none to count on.
    """
    if status.state is State.UNKNOWN:
        return Exclusion.UNHEALTHY, "unknown: not probed yet"
    case = _Alone(BackendView(backend, Load(), status))
    return _drain(case) or _health(case) or _model(case) or _version(case)


def is_clear(case: Case) -> bool:
    """Return whether certainly no filter objects: an ordinary request before a backend that is well.

    The same as the filters say of most cases, at a third of their cost. Where this is False, they say why,
    or that nothing objects after all. That a request has room implies that its KV blocks fit, and that a long
    one starts alone where it has to: `admission.limits` sees to both.
    """
    demand, view = case.demand, case.view
    backend, status, load = view.backend, view.status, view.load
    return (
        status.state is State.UP
        and backend.model in status.served_models
        and demand.seqs == 1
        and demand.total_tokens <= case.capacity.context_tokens
        and not (demand.images or demand.audios or backend.drain or backend.versions)
        and view.away is None
        and load.has_room(case.claim, case.limits)
        and (case.spill_limits is None or _may_spill(case, case.spill_limits))
    )


def _may_spill(case: Case, most: Load) -> bool:
    load = case.view.load
    is_read_there = load.long_unanswered or case.view.long_waiting
    return not is_read_there and load.has_room(case.claim, most)


def could_take(backend: Backend, demand: Demand) -> bool:
    """Return whether a backend could ever take a request, however long it would have to wait."""
    return admission.misfit(backend.capacity, demand) is None and not _refused_parts(backend, demand)


def rank(
    policy: Policy,
    traffic_class: TrafficClass,
    demand: Demand,
    views: Mapping[str, BackendView],
    *,
    failed: frozenset[str] = _NONE,
) -> tuple[Candidate, ...]:
    """Return every backend of the class's pools: those that may be tried, best first, then the rest.

    Pools keep their configured order, whatever the scores: a later pool is a spill, never a first
    choice. `failed` are backends this very request has been tried on. One without a view has left the
    configuration since the request came in, and is left out.
    """
    eligible: list[Candidate] = []
    excluded: list[tuple[Case, Objection]] = []
    for place, (pool, names) in enumerate(_pools(policy, traffic_class)):
        fit = _fit_in(pool, names, demand, views, failed, excluded, is_spill=place > 0)
        eligible += [_eligible(one) for one in sorted(_scored(fit, policy.weights))]
    return (*eligible, *[_candidate(case, *objection, {}, 0.0) for case, objection in excluded])


def ranking(
    policy: Policy, traffic_class: TrafficClass, demand: Demand, views: Mapping[str, BackendView]
) -> Ranking:
    """Return what `rank` does, of which no more is worked out at once than who comes first.

    Most requests get a place there. `views` must not change any more: all else follows from it when somebody
    asks.
    """
    first: Candidate | None = None
    excluded: list[tuple[Case, Objection]] = []
    for place, (pool, names) in enumerate(_pools(policy, traffic_class)):
        if place:
            fit = _fit_in(pool, names, demand, views, _NONE, excluded, is_spill=True)
        else:
            fit = _promising_in(policy, pool, names, demand, views, excluded)
        if fit:
            first = _eligible(min(_scored(fit, policy.weights)))
            break
    passed_over = tuple([(case.view.backend.id, objection[0]) for case, objection in excluded])
    return Ranking(first, passed_over, partial(rank, policy, traffic_class, demand, views))


def _pools(policy: Policy, traffic_class: TrafficClass) -> Iterator[tuple[Pool, Sequence[str]]]:
    """Yield the pools of a class in its order, each with those of its backends that no earlier one has."""
    seen: set[str] = set()
    for pool_id in traffic_class.pools:
        pool = policy.pools[pool_id]
        yield pool, [name for name in pool.backends if name not in seen] if seen else pool.backends
        seen.update(pool.backends)


def _fit_in(
    pool: Pool,
    names: Sequence[str],
    demand: Demand,
    views: Mapping[str, BackendView],
    failed: frozenset[str],
    excluded: list[tuple[Case, Objection]],
    *,
    is_spill: bool,
) -> list[Case]:
    """Return those of a pool that may be tried, in its order; the others go to `excluded`."""
    fit: list[Case] = []
    case: Case | None = None
    for name in names:
        view = views.get(name)
        if view is None:
            continue
        case = consider(demand, view, pool, is_spill=is_spill, before=case)
        objection = _objection(case, failed)
        if objection is None:
            fit.append(case)
        else:
            excluded.append((case, objection))
    return fit


def _promising_in(
    policy: Policy,
    pool: Pool,
    names: Sequence[str],
    demand: Demand,
    views: Mapping[str, BackendView],
    excluded: list[tuple[Case, Objection]],
) -> list[Case]:
    """Return what `_fit_in` does for a first pool, less those that another replica of theirs comes before.

    Replicas that are well differ in how much they have to do, and in what they have seen of the conversation.
    So of those that have seen the same only the one with the least to do is kept, of several the first, and
    the others are not scored.
    """
    kinds, backends, weights = policy.kinds, policy.backends, policy.weights
    # Else a millionth of the knee may be lost in the sum of the scores, and their order decides.
    is_strict = weights.spare_knee > 1e-6 * (weights.speed + weights.prefix_affinity + weights.slow_context)
    fit: dict[int | float, tuple[int, Case]] = {}  # with their places: by that, or by what has been seen
    lead: Case | None = None  # of whose replicas only some are kept
    kind: int | None = None
    case: Case | None = None
    for place, name in enumerate(names, 1):
        view = views.get(name)
        if view is None:
            continue
        if (
            lead is not None
            and kinds.get(name) == kind
            and view.backend is backends[name]
            and _stand_alike(view, lead.view)
            and view.load.has_room(lead.claim, lead.limits)
        ):
            best = fit.get(-view.prefix_share)
            if best is None or view.load.share < best[1].view.load.share:
                like = Case(demand, view, lead.capacity, pool, lead.claim, lead.limits)
                fit[-view.prefix_share] = place, like
            continue
        case = consider(demand, view, pool, before=case)
        clear = is_clear(case)
        objection = None if clear else _first_objection(case)
        if objection is not None:
            excluded.append((case, objection))
        elif lead is None and clear and is_strict and view.backend is backends.get(name):
            lead, kind = case, kinds[name]
            fit[-view.prefix_share] = place, case
        else:
            fit[place] = place, case
    return [one for _, one in sorted(fit.values())]


def consider(
    demand: Demand, view: BackendView, pool: Pool, *, is_spill: bool = False, before: Case | None = None
) -> Case:
    """Return what the request would take of a backend, and what that may hold for it.

    `before`: the same request before another backend of the same pool. Replicas are alike, and what holds for
    the one is not worked out again for the other.
    """
    if before is not None and _are_alike(view, before.view):
        capacity, claim, most = before.capacity, before.claim, before.limits
    else:
        capacity = view.capacity
        work_s = admission.prefill_s(view.backend, demand)
        claim = admission.claim(capacity, demand, pool.gates, work_s)
        most = admission.limits(capacity, claim, pool.gates, view.share_max, view.kv_taken)
        if view.status.state is State.PROBATION:
            most = replace(most, seqs=min(most.seqs, PROBATION_SEQS - 1 + claim.seqs))
    tightened = None
    if is_spill:
        tightened = admission.spill_limits(capacity, most, claim, view.load, pool.gates, pool.spill)
    return Case(demand, view, capacity, pool, claim, most, tightened)


def _are_alike(one: BackendView, other: BackendView) -> bool:
    """Return whether a request takes the same of both, and both may hold the same."""
    a, b = one.backend, other.backend
    return (
        a.capacity is b.capacity  # those of one profile share it
        and admission.read_alike(a, b)
        and _stand_alike(one, other)
    )


def _stand_alike(one: BackendView, other: BackendView) -> bool:
    """Return whether what is known of two backends at this moment differs in what they have to do at most."""
    a, b = one.status, other.status
    return (
        a.state is b.state
        and a.served_models == b.served_models
        and a.context_tokens == b.context_tokens
        and one.away == other.away
        and one.share_max == other.share_max
        and one.kv_taken == other.kv_taken
    )


def _objection(case: Case, failed: frozenset[str]) -> Objection | None:
    if failed and case.view.backend.id in failed:
        return Exclusion.FAILED, "already tried for this request"
    return None if is_clear(case) else _first_objection(case)


def _first_objection(case: Case) -> Objection | None:
    for rule in _RULES:
        objection = rule(case)
        if objection is not None:
            return objection
    return None


def _candidate(
    case: Case, excluded: Exclusion | None, detail: str, scores: Mapping[str, float], score: float
) -> Candidate:
    return Candidate(
        case.view.backend.id,
        case.pool.id,
        excluded,
        detail,
        scores,
        score,
        case.view.load,
        admission.knee_seqs(case.capacity, case.demand.prompt_tokens),
        case.claim,
        case.limits if case.spill_limits is None else case.spill_limits,
        case.spill_limits is not None,
    )


_Scores = tuple[float, float, float, float]
"""Spare knee, speed, prefix affinity, slow context."""

_Scored = tuple[int, float, int, Case, float, _Scores]
"""What is sorted by first: how well it is known, its score, the best being the least, and its place in the
pool, which decides among equals."""


def _scored(fit: Sequence[Case], weights: Weights) -> list[_Scored]:
    fastest = max([case.view.backend.tokens_per_s or 0.0 for case in fit], default=0.0)
    found: list[_Scored] = []
    for at, case in enumerate(fit):
        view = case.view
        backend, used = view.backend, (view.load.share + case.claim.share) / admission.WHOLE
        own = backend.tokens_per_s
        spare = 1 - used if used < 1 else 0.0
        # Where no rate is known, all are alike.
        speed = 1.0 if own is None or fastest <= 0 else own / fastest
        affinity = view.prefix_share
        # At some lengths of prompt an engine stalls that has other work.
        is_slow = backend.quirks and stalls(backend.quirks, case.demand.prompt_tokens)
        slow = -min(1.0, used) if is_slow else 0.0
        score = weights.spare_knee * spare + weights.speed * speed
        score += weights.prefix_affinity * affinity + weights.slow_context * slow
        found.append((preference(view.status), -score, at, case, score, (spare, speed, affinity, slow)))
    return found


def _eligible(scored: _Scored) -> Candidate:
    *_, case, score, (spare, speed, affinity, slow) = scored
    scores = {"spare_knee": spare, "speed": speed, "prefix_affinity": affinity, "slow_context": slow}
    return _candidate(case, None, "", scores, score)
