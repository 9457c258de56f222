"""Gauges, whose values are read when scraped: backends, knees, queues, boxes, the store and the log."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from gateway.core import admission
from gateway.core.backends import Backend
from gateway.core.box import State as BoxState
from gateway.core.box_swaps import SwapCause
from gateway.core.count_check import CountDrift
from gateway.core.decision import Objection
from gateway.core.drift import Drift
from gateway.core.health import NOT_PROBED, BackendStatus, State
from gateway.core.load import NO_LOAD, Load
from gateway.core.selection import unavailable_reason
from gateway.core.swap_policy import Backlog
from gateway.pipeline import BackendSnapshot
from gateway.pipeline.box_controller import BoxSnapshot
from gateway.telemetry.series import AtScrape


def register(
    registry: CollectorRegistry,
    *,
    backends: Callable[[], Mapping[str, Backend]],
    loads: Callable[[], Mapping[str, Load]],
    statuses: Callable[[], Mapping[str, BackendStatus]],
    drifts: Callable[[], Mapping[str, Drift]],
    count_drifts: Callable[[], Mapping[str, CountDrift]],
    snapshots: Callable[[], Mapping[str, BackendSnapshot]],
    waiting: Callable[[], Mapping[tuple[str, str], int]],
    replicas: Callable[[], int],
    store_modes: Callable[[], Mapping[str, bool]],
    oldest_waits_s: Callable[[], Mapping[tuple[str, str], float]],
    wait_limits_s: Callable[[], Mapping[tuple[str, str], float]],
    served: Callable[[], Mapping[tuple[str, str], bool]],
    wants: Callable[[], Mapping[str, Backlog]],
    boxes: Callable[[], Mapping[str, BoxSnapshot]],
    objections: Callable[[], Mapping[str, Objection]],
    connections: Callable[[], Mapping[str, tuple[int, int]]],
    dropped_lines: Callable[[], int],
) -> None:
    """Read gauges from these callables when scraped: per backend id; queues per (model, class).

    `objections` returns why the box of a backend keeps it from serving.
    `served` returns whether a class has a backend that is up, or that its box can bring in. `store_modes`
    returns, per way of counting slots, whether it is in force; empty without a store.
    `connections` returns how many each listener has, and may have.
    `dropped_lines` returns the number of dropped log lines.
    """
    registry.register(
        AtScrape(lambda: _backends(backends(), loads(), statuses(), objections(), drifts(), count_drifts()))
    )
    registry.register(AtScrape(lambda: _knees(snapshots())))
    registry.register(AtScrape(lambda: _queues(waiting(), oldest_waits_s(), wait_limits_s(), wants())))
    registry.register(AtScrape(lambda: _classes(served())))
    registry.register(AtScrape(lambda: _boxes(boxes())))
    registry.register(AtScrape(lambda: _store(replicas(), store_modes())))
    registry.register(AtScrape(lambda: _connections(connections())))
    registry.register(AtScrape(lambda: _log(dropped_lines())))


def _backends(
    backends: Mapping[str, Backend],
    loads: Mapping[str, Load],
    statuses: Mapping[str, BackendStatus],
    objections: Mapping[str, Objection],
    drifts: Mapping[str, Drift],
    count_drifts: Mapping[str, CountDrift],
) -> Iterator[Metric]:
    """Yield the gauges of backends: requests in flight, and engine metrics."""
    gauges = {
        name: GaugeMetricFamily(name, text, labels=["backend"])
        for name, text in {
            "gateway_in_flight": (
                "Sequences in flight on a backend, from all gateways that share the store."
            ),
            "gateway_knee_seqs": "The backend's knee for short prompts, in sequences.",
            "gateway_knee_used_ratio": "Share of the knee in use, taking prompt lengths into account.",
            "gateway_kv_blocks": "KV blocks reserved by requests in flight.",
            "gateway_backend_usable": "1 while the backend can be given requests, capacity aside.",
            "gateway_backend_drained": "1 while the configuration drains the backend.",
            "gateway_engine_running": "Sequences running in the engine, as it reports.",
            "gateway_engine_waiting": "Sequences queued in the engine, as it reports.",
            "gateway_engine_kv_usage_ratio": "Share of KV blocks in use, as the engine reports.",
            "gateway_count_drift_seqs": (
                "Sequences the engine had above the gateway's count at the last sample."
            ),
            "gateway_count_drift_lasting_seqs": (
                "The part of gateway_count_drift_seqs present in every sample of a minute."
            ),
            "gateway_kv_blocks_taken": "KV blocks in use that no gateway has reserved.",
            "gateway_estimate_drift_tokens": (
                "Median of reported minus estimated prompt tokens, over the last 100 text-only answers."
            ),
            "gateway_estimate_drifted": "1 if token counts are off by more than counting error explains.",
        }.items()
    }
    states = GaugeMetricFamily(
        "gateway_backend_state", "1 for the backend's current state.", labels=["backend", "state"]
    )
    for name, backend in backends.items():
        load, status = loads.get(name, NO_LOAD), statuses.get(name, NOT_PROBED)
        values: dict[str, float] = {
            "gateway_in_flight": load.seqs,
            "gateway_backend_usable": name not in objections and unavailable_reason(backend, status) is None,
            "gateway_backend_drained": backend.drain,
            "gateway_knee_seqs": backend.capacity.knee[0].seqs,
            "gateway_knee_used_ratio": load.share / admission.WHOLE,
            "gateway_kv_blocks": load.kv_blocks,
        }
        if (engine := status.reported) is not None:
            values["gateway_engine_running"] = engine.running
            values["gateway_engine_waiting"] = engine.waiting
            values["gateway_engine_kv_usage_ratio"] = engine.kv_usage
        if name in count_drifts:
            values["gateway_count_drift_seqs"] = count_drifts[name].seqs
            values["gateway_count_drift_lasting_seqs"] = count_drifts[name].lasting_seqs
            values["gateway_kv_blocks_taken"] = count_drifts[name].kv_blocks
        if name in drifts:
            values["gateway_estimate_drift_tokens"] = drifts[name].median_tokens
            values["gateway_estimate_drifted"] = drifts[name].drifted or drifts[name].image_drifted
        for metric, value in values.items():
            gauges[metric].add_metric([name], float(value))
        for state in State:
            states.add_metric([name, state.value], float(state is status.state))
    yield from gauges.values()
    yield states


def _knees(snapshots: Mapping[str, BackendSnapshot]) -> Iterator[Metric]:
    """Yield the gauges of the knees in force and the estimated ones."""
    share = GaugeMetricFamily(
        "gateway_knee_share_ratio",
        "Share of the knee in force, if the pool has a tpot_target_ms.",
        labels=["backend"],
    )
    tpot = GaugeMetricFamily(
        "gateway_knee_tpot_seconds",
        "Time per output token on which gateway_knee_share_ratio was last based, in seconds.",
        labels=["backend"],
    )
    seqs = GaugeMetricFamily(
        "gateway_knee_estimate_seqs",
        "Where the knee seems to be, by prompt length (advisory); absent while unknown.",
        labels=["backend", "prompt_tokens_max", "confidence"],
    )
    for name, snapshot in snapshots.items():
        if snapshot.tpot_target_s is not None:
            share.add_metric([name], snapshot.share)
            if snapshot.control.tpot_s is not None:
                tpot.add_metric([name], snapshot.control.tpot_s)
        for step, found in snapshot.knees.items():
            if found.seqs is not None:
                most = "+Inf" if step.prompt_tokens_max is None else str(step.prompt_tokens_max)
                seqs.add_metric([name, most, found.confidence.value], found.seqs)
    yield from (share, tpot, seqs)


def _classes(served: Mapping[tuple[str, str], bool]) -> Iterator[Metric]:
    """Yield the gauge of whether any backend can serve a class."""
    found = GaugeMetricFamily(
        "gateway_class_served",
        "1 while a backend of the class can be given requests, capacity aside, or brought in by its box.",
        labels=["model", "traffic_class"],
    )
    for (model, traffic_class), is_served in served.items():
        found.add_metric([model, traffic_class], float(is_served))
    yield found


def _queues(
    counts: Mapping[tuple[str, str], int],
    oldest_waits_s: Mapping[tuple[str, str], float],
    limits_s: Mapping[tuple[str, str], float],
    wants: Mapping[str, Backlog],
) -> Iterator[Metric]:
    """Yield the gauges of waiting requests."""
    waiting = GaugeMetricFamily(
        "gateway_waiting", "Requests waiting for a slot.", labels=["model", "traffic_class"]
    )
    # Classes that are no longer configured are shown as long as requests wait in them.
    shown = {**dict.fromkeys(limits_s, 0), **{name: count for name, count in counts.items() if count}}
    for (model, traffic_class), count in shown.items():
        waiting.add_metric([model, traffic_class], float(count))
    oldest = GaugeMetricFamily(
        "gateway_oldest_wait_seconds",
        "Time the oldest waiting request has waited, in seconds, excluding jobs; 0 if none waits.",
        labels=["model", "traffic_class"],
    )
    for name in shown:
        oldest.add_metric([*name], oldest_waits_s.get(name, 0.0))
    limit = GaugeMetricFamily(
        "gateway_wait_limit_seconds",
        "The configured maximum wait, in seconds.",
        labels=["model", "traffic_class"],
    )
    for (model, traffic_class), limit_s in limits_s.items():
        limit.add_metric([model, traffic_class], limit_s)
    wanted = GaugeMetricFamily(
        "gateway_backend_waiting",
        "Waiting requests whose first choice is this backend.",
        labels=["backend"],
    )
    for backend, backlog in wants.items():
        wanted.add_metric([backend], float(backlog.count))
    yield from (waiting, oldest, limit, wanted)


def _boxes(boxes: Mapping[str, BoxSnapshot]) -> Iterator[Metric]:
    """Yield the gauges of boxes: their state, and what determines their next action."""
    state = GaugeMetricFamily(
        "gateway_box_state", "1 for the current state of a box.", labels=["box", "state"]
    )
    serving = GaugeMetricFamily(
        "gateway_box_serving",
        "1 for the backend whose model is resident and serving.",
        labels=["box", "backend"],
    )
    waiting = GaugeMetricFamily(
        "gateway_box_waiting",
        "Requests waiting for the backend as their first choice, on all gateways.",
        labels=["box", "backend"],
    )
    stored = GaugeMetricFamily(
        "gateway_box_stored_jobs",
        "Jobs that wait for the backend in the store, and are not yet in any gateway's queue.",
        labels=["box", "backend"],
    )
    oldest = GaugeMetricFamily(
        "gateway_box_oldest_wait_seconds",
        "Time the oldest request or job for the backend has waited, in seconds; absent if none waits.",
        labels=["box", "backend"],
    )
    quarantined = GaugeMetricFamily(
        "gateway_box_quarantined",
        "1 for a quarantined backend, which is no longer started.",
        labels=["box", "backend"],
    )
    planned = GaugeMetricFamily(
        "gateway_box_swap_planned",
        "1 for the next planned swap, by cause; absent if none is planned.",
        labels=["box", "backend", "cause"],
    )
    owner = GaugeMetricFamily(
        "gateway_box_owner", "1 if this gateway owns the box, and so switches its models.", labels=["box"]
    )
    boot_s = GaugeMetricFamily(
        "gateway_box_boot_seconds",
        "Duration of the backend's last boot that one gateway saw from the start command to the first "
        "answer, in seconds; absent before the first.",
        labels=["box", "backend"],
    )
    boots = CounterMetricFamily("gateway_box_boots", "Boots that led to an answer.", labels=["box"])
    for name, snapshot in boxes.items():
        box = snapshot.box
        for one in BoxState:
            state.add_metric([name, one.value], float(one is box.state))
        for backend, wants in snapshot.wants.items():
            is_in = box.state is BoxState.RESIDENT and box.backend == backend
            serving.add_metric([name, backend], float(is_in))
            waiting.add_metric([name, backend], wants.count)
            stored.add_metric([name, backend], snapshot.stored[backend].count)
            oldest_at = (wants + snapshot.stored[backend]).oldest_at
            quarantined.add_metric([name, backend], float(backend in box.quarantine))
            if oldest_at is not None:
                oldest.add_metric([name, backend], max(0.0, snapshot.at - oldest_at))
        if snapshot.plan.target:
            cause = SwapCause.of(snapshot.plan.cause)
            planned.add_metric([name, snapshot.plan.target, cause.value], 1.0)
        owner.add_metric([name], float(snapshot.is_owner))
        boots.add_metric([name], box.swaps)
        for backend, took_s in box.boot_s.items():
            boot_s.add_metric([name, backend], took_s)
    yield from (state, serving, waiting, stored, oldest, quarantined, planned, owner, boots, boot_s)


def _store(replicas: int, store_modes: Mapping[str, bool]) -> Iterator[Metric]:
    """Yield the gauges of the state shared by gateway processes."""
    yield GaugeMetricFamily(
        "gateway_replicas",
        "Gateway processes that share the store, including this one; 1 without a store.",
        value=replicas,
    )
    modes = GaugeMetricFamily(
        "gateway_store_mode",
        "1 for the way slots are counted: shared, or alone while the store does not answer.",
        labels=["mode"],
    )
    for mode, is_in_force in store_modes.items():
        modes.add_metric([mode], float(is_in_force))
    yield modes


def _connections(connections: Mapping[str, tuple[int, int]]) -> Iterator[Metric]:
    """Yield the gauges of the connections to this process."""
    opened = GaugeMetricFamily(
        "gateway_connections",
        "Connections that a listener of this process has, idle ones included.",
        labels=["listener"],
    )
    limit = GaugeMetricFamily(
        "gateway_connections_max", "Connections that a listener may have.", labels=["listener"]
    )
    for name, (count, most) in connections.items():
        opened.add_metric([name], count)
        limit.add_metric([name], most)
    yield from (opened, limit)


def _log(dropped_lines: int) -> Iterator[Metric]:
    """Yield the metrics of the log itself."""
    yield CounterMetricFamily(
        "gateway_log_lines_dropped",
        "Log lines that could not be written.",
        value=dropped_lines,
    )
