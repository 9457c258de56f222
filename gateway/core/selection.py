"""Selection: filter, score, pick. Where may this request go, in which order, and why not elsewhere?

A rule is a function; the order of pools is the operator's. Filters run in the order of `FILTERS`
and the first that objects is the reason shown. Scores are weighted and summed; ties go to the order
in which the pool lists its backends: no dice, so a decision can be explained and replayed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from gateway.core import admission
from gateway.core.health import BackendStatus, State, accepts, preference, usable
from gateway.core.values import (
    Backend,
    Candidate,
    Capacity,
    Decision,
    Demand,
    Estimate,
    Exclusion,
    Load,
    Policy,
    TrafficClass,
    Weights,
)


@dataclass(frozen=True, slots=True)
class BackendView:
    """A backend as it stands at the moment of a decision.

    Attributes:
        backend: Its configuration.
        load: What the gateway has in flight on it.
        status: Its health.
        prefix_share: Share (0..1) of this conversation it has seen before.
    """

    backend: Backend
    load: Load
    status: BackendStatus
    prefix_share: float = 0.0

    @property
    def capacity(self) -> Capacity:
        """What it can hold; a window the engine reports below the configured one wins."""
        reported = self.status.context_tokens
        if reported is None or reported >= self.backend.capacity.context_tokens:
            return self.backend.capacity
        return replace(self.backend.capacity, context_tokens=reported)


Objection = tuple[Exclusion, str]
Filter = Callable[[Demand, BackendView], Objection | None]
Score = Callable[[Demand, BackendView, Sequence[BackendView]], float]


def _drain(_: Demand, view: BackendView) -> Objection | None:
    if view.backend.drain:
        return Exclusion.DRAINING, "drained by the operator"
    if view.status.state is State.DRAINING:
        return Exclusion.DRAINING, view.status.reason or "the engine is stopping"
    return None


def _fit(demand: Demand, view: BackendView) -> Objection | None:
    capacity = view.capacity
    match admission.misfit(capacity, demand):
        case None:
            return None
        case Exclusion.CONTEXT_EXCEEDED as reason:
            return reason, f"needs {demand.total_tokens} tokens, holds {capacity.context_tokens}"
        case Exclusion.SEQS_EXCEEDED as reason:
            return (
                reason,
                f"wants {demand.seqs} sequences, knee {admission.knee_seqs(capacity, demand.prompt_tokens)}",
            )
        case reason:
            blocks = admission.claim(capacity, demand).kv_blocks
            return reason, f"needs {blocks} KV blocks of {admission.blocks_planned(capacity)}"


def _modality(demand: Demand, view: BackendView) -> Objection | None:
    takes = view.backend.modalities
    for noun, count, most in (
        ("images", demand.images, takes.images_max),
        ("audio", demand.audios, takes.audios_max),
    ):
        if most is not None and count > most:
            return (
                Exclusion.MODALITY,
                f"takes no {noun}" if most == 0 else f"takes {most} {noun}, not {count}",
            )
    return None


def _model(_: Demand, view: BackendView) -> Objection | None:
    served, wanted = view.status.served_models, view.backend.model
    if wanted is not None and served and wanted not in served:
        return Exclusion.WRONG_MODEL, f"serves {', '.join(served)}, not {wanted}"
    if wanted is None and not served:
        return Exclusion.WRONG_MODEL, "the name it serves the model under is not known yet"
    if wanted is None and len(served) > 1:
        return Exclusion.WRONG_MODEL, f"serves {', '.join(served)}: set `model` to choose one"
    return None


def _health(_: Demand, view: BackendView) -> Objection | None:
    if accepts(view.status, view.load.seqs):
        return None
    if usable(view.status):
        return Exclusion.AT_KNEE, f"{view.status.state.value}: a few requests at a time until they succeed"
    return Exclusion.UNHEALTHY, f"{view.status.state.value}: {view.status.reason}"


def _room(demand: Demand, view: BackendView) -> Objection | None:
    reason = admission.refusal(view.capacity, view.load, demand)
    if reason is Exclusion.AT_KNEE:
        return reason, f"{view.load.seqs} in flight, {view.load.share / admission.WHOLE:.0%} of its knee"
    if reason is Exclusion.KV_FULL:
        return reason, f"{view.load.kv_blocks} of {admission.blocks_planned(view.capacity)} KV blocks taken"
    return None


FILTERS: Mapping[str, Filter] = {
    # What can never change first, so that a caller whose request fits nowhere is not told to retry.
    "fit": _fit,
    "modality": _modality,
    "drain": _drain,
    "health": _health,
    "model": _model,
    "room": _room,
}


def _spare_knee(demand: Demand, view: BackendView, _: Sequence[BackendView]) -> float:
    wanted = admission.claim(view.capacity, demand).share
    return max(0.0, 1 - (view.load.share + wanted) / admission.WHOLE)


def _speed(_: Demand, view: BackendView, rivals: Sequence[BackendView]) -> float:
    own = view.backend.tokens_per_s
    best = max((rival.backend.tokens_per_s or 0.0 for rival in rivals), default=0.0)
    return 1.0 if own is None or best <= 0 else own / best


def _prefix_affinity(_: Demand, view: BackendView, __: Sequence[BackendView]) -> float:
    return view.prefix_share


SCORES: Mapping[str, Score] = {
    "spare_knee": _spare_knee,
    "speed": _speed,
    "prefix_affinity": _prefix_affinity,
}


def rank(
    policy: Policy,
    traffic_class: TrafficClass,
    demand: Demand,
    views: Mapping[str, BackendView],
    *,
    failed: frozenset[str] = frozenset(),
) -> tuple[Candidate, ...]:
    """Return every backend of the class's pools: those that may be tried, best first, then the rest.

    Pools keep their configured order, whatever the scores: a later pool is a spill, never a first
    choice. `failed` are backends this very request has been tried on.
    """
    eligible: list[Candidate] = []
    excluded: list[Candidate] = []
    seen: set[str] = set()
    for pool_id in traffic_class.pools:
        members = [views[name] for name in policy.pools[pool_id].backends if name not in seen]
        seen.update(view.backend.id for view in members)
        fit: list[BackendView] = []
        for view in members:
            objection = _objection(demand, view, failed)
            if objection is None:
                fit.append(view)
            else:
                excluded.append(_candidate(pool_id, demand, view, objection))
        scored = [_scored(pool_id, demand, view, fit, policy.weights) for view in fit]
        tiers = {view.backend.id: preference(view.status) for view in fit}
        # sorted() is stable: among equals, the pool's own order decides.
        eligible += sorted(scored, key=lambda candidate: (tiers[candidate.backend], -candidate.score))
    return (*eligible, *excluded)


def decide(
    policy: Policy,
    model_id: str,
    traffic_class: TrafficClass,
    class_reason: str,
    estimate: Estimate,
    demand: Demand,
    views: Mapping[str, BackendView],
) -> Decision:
    """Return the whole decision for one request."""
    return Decision(
        model=model_id,
        traffic_class=traffic_class.name,
        class_reason=class_reason,
        pools=traffic_class.pools,
        estimate=estimate,
        demand=demand,
        candidates=rank(policy, traffic_class, demand, views),
    )


def _objection(demand: Demand, view: BackendView, failed: frozenset[str]) -> Objection | None:
    if view.backend.id in failed:
        return Exclusion.FAILED, "already tried for this request"
    for rule in FILTERS.values():
        objection = rule(demand, view)
        if objection is not None:
            return objection
    return None


def _candidate(pool_id: str, demand: Demand, view: BackendView, objection: Objection) -> Candidate:
    return Candidate(
        backend=view.backend.id,
        pool=pool_id,
        excluded=objection[0],
        detail=objection[1],
        load=view.load,
        knee_seqs=admission.knee_seqs(view.capacity, demand.prompt_tokens),
    )


def _scored(
    pool_id: str, demand: Demand, view: BackendView, rivals: Sequence[BackendView], weights: Weights
) -> Candidate:
    scores = {name: rule(demand, view, rivals) for name, rule in SCORES.items()}
    return Candidate(
        backend=view.backend.id,
        pool=pool_id,
        scores=scores,
        score=sum(getattr(weights, name) * value for name, value in scores.items()),
        load=view.load,
        knee_seqs=admission.knee_seqs(view.capacity, demand.prompt_tokens),
    )
