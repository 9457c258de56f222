"""Selection: filter, score, pick. Which backends may serve a request, in which order, and why not the others?

Each filter is a function. Filters run in the order of `FILTERS`, and the first objection is the reason
shown. Scores are weighted and summed. Pools keep the order that the operator configured, and ties go to the
order of backends in the pool (where others fill several, first to the least full). Nothing is random, so a
decision can be explained and replayed.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import islice

from gateway.core import admission, versions
from gateway.core.backends import Backend, Capacity, Pool
from gateway.core.decision import Candidate, Exclusion, Objection, Ranking
from gateway.core.health import (
    PROBATION_SEQS,
    BackendStatus,
    State,
    accepts,
    is_last_resort,
    is_tried,
    may_be_tried,
    usable,
)
from gateway.core.load import NO_LOAD, UNLIMITED, Demand, Load
from gateway.core.policy import Policy, TrafficClass, Weights
from gateway.core.quirks.context_buckets import stalls
from gateway.core.value import valueclass

CACHED_MIN_TOKENS = 1_000
"""Of shorter prompts, nothing counts as cached. A choice: an H100 reads them in less than 0.2 s
(docs/measurements.md), and as all replicas are alike for them, one is compared instead of two."""


STAY_FULL = 4.0
"""How many times the prefill that it saves a request may wait for the backend that has its conversation,
if it could start on one that is otherwise full; on an idle one, once. A choice: who waits as long as the
detour takes loses at most as much again. But a prefill also delays all who are there: with few slots left
anywhere, waiting requests that take any of them displace each other, each with a prefill of the whole, and
hardly anybody is answered. `benchmarks/conversations.py` shows that; docs/routing.md has its figures."""


@valueclass(frozen=True, slots=True)
class BackendView:
    """Snapshot of a backend at the moment of a decision.

    Attributes:
        backend: Its configuration.
        load: The load in flight on it.
        status: Its health.
        prefix_share: Share (0..1) of this conversation that it has seen before. It counts as cached there.
        share_max: Usable part of its knee, in millionths: `admission.WHOLE`, or less to meet a TPOT target.
        kv_taken: KV blocks in use that no gateway sharing this gateway's ledger has reserved.
        long_waiting: Queued requests with long prompts whose first choice it is.
        away: Why its box, shared with other models, does not run its model now; None if it does.
        refuses: Whether it has just refused a request because of load: the others of its pool come first.
        takes: Up to how many sequences requests that it has refused may go there (`refusals.Refusal.takes`).
        seqs_max: Up to how many this one may.
        refuses_all: Whether those that it has refused are not to wait for it (`refusals.Refusal.is_of_all`).
        seqs_taken: Sequences in the engine that no gateway sharing this gateway's ledger has sent. They lower
            its score, as its own load does, and no limit.
        out: Why it is out of service, though it is tried (`with_trials`); "" otherwise.
    """

    backend: Backend
    load: Load
    status: BackendStatus
    prefix_share: float = 0.0
    share_max: int = admission.WHOLE
    kv_taken: int = 0
    long_waiting: int = 0
    away: Objection | None = None
    refuses: bool = False
    takes: int = UNLIMITED
    seqs_max: int = UNLIMITED
    refuses_all: bool = False
    seqs_taken: int = 0
    out: str = ""

    @property
    def capacity(self) -> Capacity:
        """The configured capacity, with the context window that the engine reports if that is smaller."""
        reported, configured = self.status.context_tokens, self.backend.capacity
        if reported is None or reported >= configured.context_tokens:
            return configured
        return _narrowed(configured, reported)


def with_shares(views: Mapping[str, BackendView], shares: Mapping[str, float]) -> Mapping[str, BackendView]:
    """Return the views for a conversation, given the share of it that each backend has seen."""
    seen = {name: replace(views[name], prefix_share=share) for name, share in shares.items() if name in views}
    return {**views, **seen}


def with_refusals(views: Mapping[str, BackendView], refused: Iterable[str]) -> Mapping[str, BackendView]:
    """Return the views for a request that these backends have refused because of load."""
    seen = {name: replace(views[name], seqs_max=views[name].takes) for name in refused if name in views}
    return {**views, **seen}


def with_trials(views: Mapping[str, BackendView], now: float) -> Mapping[str, BackendView]:
    """Return the views for a request that no backend takes: ejected ones may be tried, as in probation."""
    tried = {
        name: replace(
            view, status=replace(view.status, state=State.PROBATION), out=f"ejected: {view.status.reason}"
        )
        for name, view in views.items()
        if may_be_tried(view.status, now)
    }
    return {**views, **tried} if tried else views


@lru_cache(maxsize=256)
def _narrowed(capacity: Capacity, context_tokens: int) -> Capacity:
    return replace(capacity, context_tokens=context_tokens)


@valueclass(frozen=True, slots=True)
class Case:
    """One request and one backend: the input of a filter.

    Attributes:
        demand: What the request asks for.
        view: The backend.
        capacity: The backend's capacity.
        pool: The pool in which it is considered.
        claim: The load that the request would add.
        limits: The highest load at which the backend may start the request, the claim included.
        spill_limits: The same for a spill, when an earlier pool of the class was the first choice; else None.
        is_displaced: Whether it is one because no earlier pool takes it, now or after a wait.
    """

    demand: Demand
    view: BackendView
    capacity: Capacity
    pool: Pool
    claim: Load
    limits: Load
    spill_limits: Load | None = None
    is_displaced: bool = False


Filter = Callable[[Case], Objection | None]

_NONE: frozenset[str] = frozenset()


def _drain(view: BackendView) -> Objection | None:
    if view.backend.drain:
        return Exclusion.DRAINING, "drained by the operator"
    if view.status.state is State.DRAINING:
        return Exclusion.DRAINING, view.status.reason or "the engine is stopping"
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


def _model(view: BackendView) -> Objection | None:
    served, wanted = view.status.served_models, view.backend.model
    if wanted is not None and served and wanted not in served:
        return Exclusion.WRONG_MODEL, f"serves {', '.join(served)}, not {wanted}"
    if wanted is None and not served:
        error = view.status.model_error
        reason = Exclusion.WRONG_MODEL if error else Exclusion.NOT_ASKED
        return reason, error or "the name of the model it serves is not known yet"
    if wanted is None and len(served) > 1:
        return Exclusion.WRONG_MODEL, f"serves {', '.join(served)}: set `model` to choose one"
    return None


def _version(view: BackendView) -> Objection | None:
    status, allowed = view.status, view.backend.versions
    if not allowed:
        return None
    if not status.served_models:  # models and version are queried together
        return Exclusion.NOT_ASKED, "its engine's version is not known yet"
    wrong = versions.misfit(allowed, status.version)
    return (Exclusion.WRONG_VERSION, wrong) if wrong else None


def _health(view: BackendView) -> Objection | None:
    status = view.status
    if accepts(status, view.load.seqs):
        return None
    if usable(status):
        return Exclusion.AT_KNEE, f"{status.state.value}: a few requests at a time until they succeed"
    what = "asleep" if status.is_asleep else status.state.value
    return Exclusion.UNHEALTHY, f"{what}: {status.reason}"


def _unavailable(case: Case) -> Objection | None:
    return _kept_out(case.view)


def _kept_out(view: BackendView) -> Objection | None:
    """Return why a backend gets no request of any kind now, or None."""
    return _drain(view) or view.away or _health(view) or _model(view) or _version(view)


def _room(case: Case) -> Objection | None:
    load, most = case.view.load, case.limits
    if case.claim.long_unanswered and case.pool.gates.long_prefills == 0 and load.seqs:
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
        case _ if load.seqs >= case.view.seqs_max:
            return full, f"{load.seqs} in flight, and with no more it has refused this request"
        case reason:
            detail = f"{load.seqs} in flight, {load.share / admission.WHOLE:.0%} of its knee"
            detail += _less_than_knee(case)
    return reason, detail


def _less_than_knee(case: Case) -> str:
    """Return why a request may use only a part of the knee, and which; "" if it may use all of it."""
    is_job, most = case.demand.is_job, case.limits.share
    allowed = case.view.share_max if is_job else most
    said = f"; the TPOT target allows {allowed / admission.WHOLE:.0%}" if allowed < admission.WHOLE else ""
    return f"{said}; jobs may use {most / admission.WHOLE:.0%}" if is_job and most < allowed else said


def _spill(case: Case) -> Objection | None:
    load, most = case.view.load, case.spill_limits
    if most is None:
        return None
    if load.long_unanswered and not case.claim.long_seqs and not case.is_displaced:
        return Exclusion.SPILL_LONG, "it is prefilling a long prompt"
    if case.view.long_waiting and not case.is_displaced:
        return Exclusion.SPILL_LONG, f"{case.view.long_waiting} long prompts wait for it"
    match admission.full(load, case.claim, most):
        case None:
            return None
        case Exclusion.PREFILL_BUSY:
            return Exclusion.SPILL_PREFILL, f"{load.prefill_ms / 1000:.1f} s of prompt work outstanding"
        case _:
            reserved = (case.view.share_max - most.share) / admission.WHOLE
            return (
                Exclusion.SPILL_RESERVE,
                f"{load.share / admission.WHOLE:.0%} of its knee, {reserved:.0%} is kept for its own class",
            )


FILTERS: Sequence[Filter] = (
    # Permanent objections first, so that a caller whose request fits nowhere is not told to retry.
    _fit,
    _modality,
    _unavailable,
    _room,
    _spill,
)


def stay(
    busy: Iterable[Candidate], start: Candidate, shares: Mapping[str, float]
) -> tuple[Sequence[Candidate], float]:
    """Return the backends for which a request should wait, and how many seconds, instead of starting at once.

    Those are the ones that have seen more of its conversation, and save a prefill: first the one that saves
    most, for which it waits. None if there are none.

    Args:
        busy: Where it cannot start now, but soon.
        start: Where it could.
        shares: Per backend, the share of its conversation that the backend has seen.
    """
    least = shares.get(start.backend, 0.0)
    used = min(1.0, start.load.share / admission.WHOLE)
    found = [
        one
        for one in busy
        if shares.get(one.backend, 0.0) > least and one.claim.prefill_ms < start.claim.prefill_ms
    ]
    if not found:
        return [], 0.0
    found.sort(key=lambda one: one.claim.prefill_ms)
    saved_s = (start.claim.prefill_ms - found[0].claim.prefill_ms) / 1000
    return found, saved_s * (1 + (STAY_FULL - 1) * used)


def offered(
    candidates: tuple[Candidate, ...], demand: Demand, shares: Mapping[str, float]
) -> tuple[Candidate, ...]:
    """Return where a request may start, without those instead of which it would rather wait for the first.

    The slot on the first may be gone.

    Args:
        candidates: Where it could start, best first.
        demand: What it asks for.
        shares: Per backend, the share of its conversation that the backend has seen.
    """
    if not shares or len(candidates) < 2 or not counts_cached(demand):
        return candidates
    first, *others = candidates
    return first, *[one for one in others if not stay((first,), one, shares)[0]]


def unavailable_reason(backend: Backend, status: BackendStatus) -> Objection | None:
    """Return why a backend would get no request at all now; None if it would get some.

    A backend that has not been probed yet is kept out: selection uses it only as a last resort.
    """
    if status.state is State.UNKNOWN:
        return Exclusion.UNHEALTHY, "unknown: not probed yet"
    return _kept_out(BackendView(backend, NO_LOAD, status))


def makes_ready(backend: Backend, status: BackendStatus) -> bool:
    """Return whether a backend is a reason to send requests to this gateway as well as to any other.

    It is if it gets requests, be it only such as no other takes, unless only this gateway avoids it.
    """
    if is_tried(status) and not status.is_shunned:
        status = replace(status, state=State.PROBATION)
    return unavailable_reason(backend, status) is None


def is_clear(case: Case) -> bool:
    """Return whether it is certain that no filter objects: an ordinary request and a healthy backend.

    Decides most cases at a third of the cost of the filters. False is inconclusive: the filters then find
    the objection, or that there is none. Room for the claim implies that its KV blocks fit, and that a long
    prompt starts alone if it has to, because `admission.limits` accounts for both.
    """
    demand, view = case.demand, case.view
    backend, status, load = view.backend, view.status, view.load
    return (
        status.state is State.UP
        and not status.is_asleep
        and (
            backend.model in status.served_models
            or (backend.model is None and len(status.served_models) == 1)
        )
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
    return (case.is_displaced or not is_read_there) and load.has_room(case.claim, most)


def could_take(backend: Backend, demand: Demand, capacity: Capacity | None = None) -> bool:
    """Return whether a backend could ever serve a request, regardless of the wait.

    `capacity`: with the context window that its engine reports; by default, as configured.
    """
    known = backend.capacity if capacity is None else capacity
    return admission.misfit(known, demand) is None and not _refused_parts(backend, demand)


def rank(
    policy: Policy,
    traffic_class: TrafficClass,
    demand: Demand,
    views: Mapping[str, BackendView],
    *,
    failed: frozenset[str] = _NONE,
) -> tuple[Candidate, ...]:
    """Return every backend of the class's pools: eligible ones first, best first, then the excluded ones.

    Pools keep their configured order regardless of scores: a later pool is a spill, never a first choice.
    It keeps out of the way of long prompts there only while an earlier pool takes it, now or after a wait.
    `failed` are the backends on which this request has already failed. A backend without a view was removed
    from the configuration after the request arrived, and is skipped.
    """
    excluded: list[tuple[Case, Objection]] = []
    by_pool = _fit_by_pool(policy, traffic_class, demand, views, excluded, failed=failed)
    eligible = [_eligible(one) for fit in by_pool for one in sorted(_scored(fit, policy.weights))]
    return (*eligible, *[_candidate(case, *objection, {}, 0.0) for case, objection in excluded])


def ranking(
    policy: Policy, traffic_class: TrafficClass, demand: Demand, views: Mapping[str, BackendView]
) -> Ranking:
    """Return the result of `rank`, computing only the best candidate now and the rest on demand.

    Most requests start on the best candidate. `views` has all backends of the class, and must not change
    afterwards, because the rest is computed from it later.
    """
    excluded: list[tuple[Case, Objection]] = []
    pool = policy.pools[traffic_class.pools[0]]
    fit = _promising_in(policy, pool, demand, views, excluded)
    if not fit:
        spills = _fit_by_pool(policy, traffic_class, demand, views, excluded, skip=1)
        fit = next(filter(None, spills), [])
    first = None
    if fit:  # mostly it is a single one, which need not be scored
        best = fit[0] if len(fit) == 1 else min(_scored(fit, policy.weights))[4]
        first = _candidate(best, None, _why_behind(best.view), {}, 0.0)
    passed_over = [(case.view.backend.id, objection[0]) for case, objection in excluded] if excluded else ()
    return Ranking(first, tuple(passed_over), partial(rank, policy, traffic_class, demand, views))


def _pools(policy: Policy, traffic_class: TrafficClass) -> Iterator[tuple[Pool, Sequence[str]]]:
    """Yield the pools of a class in order, each with its backends that are in no earlier pool."""
    seen: set[str] = set()
    for pool_id in traffic_class.pools:
        pool = policy.pools[pool_id]
        yield pool, [name for name in pool.backends if name not in seen] if seen else pool.backends
        seen.update(pool.backends)


def _fit_by_pool(
    policy: Policy,
    traffic_class: TrafficClass,
    demand: Demand,
    views: Mapping[str, BackendView],
    excluded: list[tuple[Case, Objection]],
    *,
    failed: frozenset[str] = _NONE,
    skip: int = 0,
) -> Iterator[list[Case]]:
    """Yield the eligible backends of each pool, in its order; append the others to `excluded`.

    `skip`: of so many pools, `excluded` holds all backends already.
    """
    has_fit = False
    for place, (pool, names) in islice(enumerate(_pools(policy, traffic_class)), skip, None):
        # An earlier pool takes it neither now nor after a wait.
        is_displaced = not has_fit and not any(reason.is_busy for _, (reason, _) in excluded)
        fit: list[Case] = []
        case: Case | None = None
        for name in names:
            view = views.get(name)
            if view is None:
                continue
            case = consider(demand, view, pool, is_spill=place > 0, is_displaced=is_displaced, before=case)
            objection = _objection(case, failed)
            if objection is None:
                fit.append(case)
            else:
                excluded.append((case, objection))
        has_fit = has_fit or bool(fit)
        yield fit


def _promising_in(
    policy: Policy,
    pool: Pool,
    demand: Demand,
    views: Mapping[str, BackendView],
    excluded: list[tuple[Case, Objection]],
) -> list[Case]:
    """Return the eligible backends of a first pool, without replicas that another replica outranks.

    Appends the others to `excluded`.

    Healthy replicas differ only in load and in the share of the conversation that they have seen. Of those
    with the same share, only the least loaded one is kept (the first, on a tie); the others are not scored.
    """
    kinds, backends = policy.kinds, policy.backends
    fit: dict[int | float, tuple[int, Case]] = {}  # (place, case) by place, or by -prefix_share for replicas
    leads: dict[float, Case] = {}  # the backends whose replicas are thinned out, by what counts as cached
    is_cached = counts_cached(demand)
    kind: int | None = None
    case: Case | None = None
    for place, name in enumerate(pool.backends, 1):
        view = views[name]
        cached = view.prefix_share if is_cached else 0.0
        lead = leads.get(cached)
        if (
            lead is not None
            and kinds.get(name) == kind
            and view.backend is backends[name]
            and same_state(view, lead.view)
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
        elif (
            lead is None
            and clear
            and view.backend is backends.get(name)
            and not view.refuses
            and (kind is None or kinds[name] == kind)
            and _thins_out(policy.weights)
        ):
            leads[cached], kind = case, kinds[name]
            fit[-view.prefix_share] = place, case
        else:
            fit[place] = place, case
    return [one for _, one in sorted(fit.values())]


def _thins_out(weights: Weights) -> bool:
    """Return whether the less loaded of two replicas always has the higher score.

    With a smaller weight, a millionth of the knee may be lost to rounding when scores are summed; then the
    order in the pool decides.
    """
    others = weights.speed + weights.prefix_affinity + weights.slow_context
    return weights.spare_knee > 1e-6 * others


def consider(
    demand: Demand,
    view: BackendView,
    pool: Pool,
    *,
    is_spill: bool = False,
    is_displaced: bool = False,
    before: Case | None = None,
) -> Case:
    """Return a request's claim on a backend and the limits that apply to it.

    `before` is the case of the same request and another backend of the pool. If the two are replicas, its
    claim and limits are reused.
    """
    if before is not None and _are_alike(view, before.view, demand):
        capacity, claim, most = before.capacity, before.claim, before.limits
    else:
        capacity = view.capacity
        cached = view.prefix_share if counts_cached(demand) else 0.0
        work_s = admission.prefill_s(view.backend, demand, cached)
        claim = admission.claim(capacity, demand, pool.gates, work_s, cached)
        most = admission.limits(capacity, claim, pool.gates, view.share_max, view.kv_taken)
        if demand.is_job:
            most = admission.job_limits(capacity, most, claim, pool.jobs)
        if view.status.state is State.PROBATION:
            leaves_one = demand.is_job and pool.jobs.reserve > 0
            most = replace(most, seqs=min(most.seqs, PROBATION_SEQS - 1 - leaves_one + claim.seqs))
        if view.seqs_max < UNLIMITED:
            most = replace(most, seqs=min(most.seqs, view.seqs_max - 1 + claim.seqs))
    tightened = None
    if is_spill:
        tightened = admission.spill_limits(
            capacity, most, claim, view.load, pool.gates, pool.spill, view.share_max
        )
        if is_displaced:  # nor out of the way of other prompts: only the reserve is left free
            tightened = replace(tightened, prefill_ms=most.prefill_ms)
    return Case(demand, view, capacity, pool, claim, most, tightened, is_spill and is_displaced)


def counts_cached(demand: Demand) -> bool:
    """Return whether what a backend has seen of a prompt counts as cached there.

    The share of it is one of bytes, which says little about the tokens where some of them are of an image.
    """
    return demand.prompt_tokens >= CACHED_MIN_TOKENS and not demand.images and not demand.audios


def _are_alike(one: BackendView, other: BackendView, demand: Demand) -> bool:
    """Return whether a request has the same claim and the same limits on both."""
    a, b = one.backend, other.backend
    return (
        a.capacity is b.capacity  # backends of one profile share the object
        and (one.prefix_share == other.prefix_share or not counts_cached(demand))
        and admission.read_alike(a, b)
        and same_state(one, other)
    )


def same_state(one: BackendView, other: BackendView) -> bool:
    """Return whether the current state of two backends differs in load at most."""
    a, b = one.status, other.status
    return (
        a.state is b.state
        and a.served_models == b.served_models
        and a.context_tokens == b.context_tokens
        and one.away == other.away
        and one.share_max == other.share_max
        and one.kv_taken == other.kv_taken
        and one.seqs_taken == other.seqs_taken
        and one.refuses is other.refuses
        and one.seqs_max == other.seqs_max
    )


def _objection(case: Case, failed: frozenset[str]) -> Objection | None:
    if failed and case.view.backend.id in failed:
        return Exclusion.FAILED, "already tried for this request"
    return None if is_clear(case) else _first_objection(case)


def _first_objection(case: Case) -> Objection | None:
    for rule in FILTERS:
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


_Scores = tuple[float, float, float, float, float]
"""Spare knee, speed, prefix affinity, saved prefill, slow context. Affinity is the share of the conversation
that the backend has seen; the prefill that this saves, in seconds, counts with it. By the share alone, a lead
of a fifth of the knee moved conversations whose prefill took several seconds elsewhere (docs/routing.md)."""

_Scored = tuple[bool, float, float, int, Case, _Scores]
"""Sort key first: last resorts last, negated score, what is used beyond the knee, and place in the pool. The
last two break ties: others may fill several backends, of which no knee is free. Then the case and the single
scores."""


def _scored(fit: Sequence[Case], weights: Weights) -> list[_Scored]:
    # A single one is the fastest.
    fastest = max([case.view.backend.tokens_per_s or 0.0 for case in fit]) if len(fit) > 1 else 0.0
    found: list[_Scored] = []
    for at, case in enumerate(fit):
        view, own, quirks = case.view, case.view.backend.tokens_per_s, case.view.backend.quirks
        # A backend with an unknown rate counts as the fastest.
        speed = 1.0 if own is None or fastest <= 0 else own / fastest
        used = (view.load.share + case.claim.share) / admission.WHOLE
        if view.seqs_taken:  # how long their prompts are is unknown
            used += view.seqs_taken / admission.knee_seqs(case.capacity, 0)
        spare, beyond = (1 - used, 0.0) if used < 1 else (0.0, used - 1)
        affinity, saved_s = view.prefix_share, 0.0
        if affinity and counts_cached(case.demand):
            saved_s = admission.prefill_s(view.backend, case.demand) - case.claim.prefill_ms / 1000
        # Some engines stall at certain prompt lengths while other requests run.
        slow = -min(1.0, used) if quirks and stalls(quirks, case.demand.prompt_tokens) else 0.0
        score = weights.spare_knee * spare + weights.speed * speed
        score += weights.prefix_affinity * (affinity + saved_s) + weights.slow_context * slow
        scores = (spare, speed, affinity, saved_s, slow)
        beyond = beyond if weights.spare_knee else 0.0
        found.append((is_last_resort(view.status) or view.refuses, -score, beyond, at, case, scores))
    return found


def _eligible(scored: _Scored) -> Candidate:
    _, negated, _, _, case, (spare, speed, affinity, saved_s, slow) = scored
    scores = {
        "spare_knee": spare,
        "speed": speed,
        "prefix_affinity": affinity,
        "prefill_saved_s": saved_s,
        "slow_context": slow,
    }
    return _candidate(case, None, _why_behind(case.view), scores, -negated)


def _why_behind(view: BackendView) -> str:
    """Return why an eligible backend is behind others whose scores or loads do not explain it; else "".

    One that is out of service is there only because there is no other.
    """
    if view.out:
        return f"{view.out}; tried because no other takes this request"
    if view.refuses:
        return "it has just refused a request because of load: others come first"
    return f"{view.seqs_taken} more in flight by others" if view.seqs_taken else ""
