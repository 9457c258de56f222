"""The admin API's views: the parts of a running gateway, as JSON for operators."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import anyio

from gateway import __version__
from gateway.core import admission
from gateway.core.count_check import CountDrift, CountTracker
from gateway.core.health import BackendStatus
from gateway.core.load import NO_LOAD
from gateway.core.policy import Policy
from gateway.core.refusals import Refusal
from gateway.core.selection import BackendView, unavailable_reason
from gateway.pipeline import BackendSnapshot, BackendWatch, Peers
from gateway.pipeline.box_controller import BoxController, BoxSnapshot
from gateway.ports import Clock, Fleet
from gateway.store.memory import MemoryLedger
from gateway.telemetry.journal import Journal

if TYPE_CHECKING:
    from gateway.store.fallback import FallbackLedger


class Views:
    """The views of one gateway process."""

    def __init__(
        self,
        *,
        policy: Callable[[], Policy],
        ledger: "MemoryLedger | FallbackLedger",
        fleet: Fleet,
        counts: CountTracker,
        watch: BackendWatch,
        boxes: BoxController,
        journal: Journal,
        store: "FallbackLedger | None",
        peers: Peers,
        refusals: Callable[[], Mapping[str, Refusal]],
        clock: Clock,
    ) -> None:
        """Show these parts; `store` is what gateways share, or None. `refusals`: see `FleetView.refusals`."""
        self._policy = policy
        self._ledger = ledger
        self._fleet = fleet
        self._counts = counts
        self._watch = watch
        self._boxes = boxes
        self._journal = journal
        self._store = store
        self._peers = peers
        self._refusals = refusals
        self._clock = clock

    def by_name(self) -> Mapping[str, Callable[[], Any]]:
        """Return the views by name."""
        return {
            "backends": self.backends,
            "boxes": self.boxes,
            "requests": self._journal.recent,
            "policy": self.policy,
            "replicas": self.replicas,
        }

    def policy(self) -> Mapping[str, Any]:
        """Return the policy in force."""
        policy = self._policy()
        found = {one.name: getattr(policy, one.name) for one in fields(policy)}
        return found | {"version": policy.version, "gateway": __version__}

    def boxes(self) -> Mapping[str, Any]:
        """Return all boxes."""
        now = self._clock.now()
        return {name: _box_view(snapshot, now) for name, snapshot in self._boxes.snapshots().items()}

    def replicas(self) -> Mapping[str, Any]:
        """Return the gateway processes that share the store, and the facts they exchange."""
        if self._store is None:
            return {"owner": None, "mode": None, "replicas": 1, "others": {}}
        told = self._peers.view()
        return {
            "owner": self._store.owner,
            "mode": self._store.mode,
            "replicas": self._store.replicas,
            "others": {
                owner: {"age_s": round(age_s, 1), **told.get(owner, {})}
                for owner, age_s in self._store.exchange.ages(anyio.current_time()).items()
            },
        }

    def backends(self) -> Mapping[str, Any]:
        """Return all backends."""
        policy, now, snapshots = self._policy(), self._clock.now(), self._watch.snapshots()
        loads, statuses, objections = self._ledger.loads(), self._fleet.statuses(), self._boxes.objections()
        refusals = self._refusals()
        return {
            name: {
                "url": backend.url,
                "profile": backend.profile,
                "pools": [pool.id for pool in policy.pools_of(name)],
                "drain": backend.drain,
                "kept_out": ": ".join(unavailable_reason(backend, status) or objections.get(name) or ()),
                "quirks": backend.quirks,
                "in_flight": load.seqs,
                "knee_seqs": admission.knee_seqs(backend.capacity, 0),
                "knee_used": round(load.share / admission.WHOLE, 4),
                "kv_blocks": load.kv_blocks,
                "kv_blocks_planned": admission.blocks_planned(backend.capacity),
                "context_tokens": BackendView(backend, load, status).capacity.context_tokens,
                "count_drift": _count_view(self._counts.drift(name)),
                "refused_for_load": _refusal_view(refusals.get(name), now),
                **_sight_view(snapshots.get(name)),
                **_status_view(status, now),
            }
            for name, backend in policy.backends.items()
            for load in [loads.get(name, NO_LOAD)]
            for status in [statuses[name]]
        }


def _count_view(drift: CountDrift) -> Mapping[str, Any]:
    return {
        "seqs": drift.seqs,
        "lasting_seqs": drift.lasting_seqs,
        "seqs_taken": drift.seqs_taken,
        "kv_blocks_taken": drift.kv_blocks,
        "cause": drift.cause.sentence(),
    }


def _refusal_view(refusal: Refusal | None, now: float) -> Mapping[str, Any] | None:
    """Return the last refusal of a backend because of load; None if there was none of late."""
    if refusal is None:
        return None
    return {"ago_s": round(now - refusal.at, 1), "in_flight": refusal.others}


def _box_view(snapshot: BoxSnapshot, now: float) -> Mapping[str, Any]:
    box, plan = snapshot.box, snapshot.plan
    return {
        "state": box.state.value,
        "for_s": round(now - box.since, 1),
        "reason": box.reason,
        "backend": box.backend,
        "waits_for": snapshot.waits_for,
        "next": {
            "cause": plan.cause.value,
            "backend": plan.target,
            "in_s": None if plan.at is None else round(max(0.0, plan.at - now), 1),
            "held_by_batch": plan.held_by_batch,
        },
        "waiting": {
            name: {
                "requests": wants.count,
                "stored_jobs": snapshot.stored[name].count,
                "oldest_s": None if oldest_at is None else round(now - oldest_at, 1),
            }
            for name, wants in snapshot.wants.items()
            for oldest_at in [(wants + snapshot.stored[name]).oldest_at]
        },
        "quarantine": {name: held.reason for name, held in box.quarantine.items()},
        "unexpected_restarts": {name: len(times) for name, times in box.restarts.items()},
        "boot_s": {name: round(took, 1) for name, took in box.boot_s.items()},
        "boots": box.swaps,
        "switched_by_this_gateway": snapshot.is_owner,
        "fence": snapshot.fence,
    }


def _sight_view(snapshot: BackendSnapshot | None) -> Mapping[str, Any]:
    if snapshot is None:
        return {"tpot": None, "knee_estimate": []}
    control, target_s = snapshot.control, snapshot.tpot_target_s
    return {
        "tpot": None
        if target_s is None
        else {
            "target_ms": round(1000 * target_s, 1),
            "measured_ms": None if control.tpot_s is None else round(1000 * control.tpot_s, 1),
            "knee_share": round(snapshot.share, 4),
            "move": control.move.value,
        },
        "knee_estimate": [
            {
                "prompt_tokens_max": step.prompt_tokens_max,
                "configured_seqs": step.seqs,
                "seqs": None if found.seqs is None else round(found.seqs, 1),
                "confidence": found.confidence.value,
                "doubt": found.doubt.value,
                "limited_by": found.limited_by.value,
                "decoding_seqs": round(found.decoding_seqs, 1),
                "decoding_seqs_max": round(found.decoding_seqs_max, 1),
            }
            for step, found in snapshot.knees.items()
        ],
    }


def _status_view(status: BackendStatus, now: float) -> Mapping[str, Any]:
    engine = status.reported
    return {
        "state": status.state.value,
        "for_s": round(now - status.since, 1),
        "reason": status.reason,
        "served_models": status.served_models,
        "engine_version": status.version,
        "restarts": status.restarts,
        "last_error": status.last_error,
        "model_error": status.model_error,
        "metrics_error": status.metrics_error,
        "engine": None
        if engine is None
        else {
            "running": engine.running,
            "waiting": engine.waiting,
            "kv_usage": round(engine.kv_usage, 4),
            "prompt_tokens": round(engine.prompt_tokens),
            "generation_tokens": round(engine.generation_tokens),
            "preemptions": engine.preemptions,
            "age_s": round(now - engine.at, 1),
        },
    }
