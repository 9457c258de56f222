"""The composition root: builds the concrete things, joins them, and runs them as one process.

Nothing else constructs an adapter, and nothing here decides anything.
"""

import logging
import os
import secrets
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import anyio
from anyio.abc import TaskGroup

from gateway import __version__
from gateway.clock import SystemClock
from gateway.core import admission
from gateway.core.canary import Canary
from gateway.core.count_check import CountDrift, CountTracker
from gateway.core.drift import DriftTracker
from gateway.core.errors import ConfigError
from gateway.core.health import (
    BackendStatus,
    EngineSample,
    HealthRules,
    State,
    hang_after_s,
    served_name,
    usable,
)
from gateway.core.jobs import Job, JobPriority, Quota
from gateway.core.responses.replay import JobFacts
from gateway.core.values import Backend, Endpoint, Load
from gateway.core.waiting import WaitingLine
from gateway.core.webhooks import WebhookAttempt
from gateway.downstream import wire
from gateway.downstream.background import Background, JobRules
from gateway.downstream.keys import KeyRing
from gateway.downstream.listener import Listener, bind, url_of
from gateway.downstream.relay import BodyLimits
from gateway.downstream.responses import Keeping
from gateway.downstream.routes import Applications, Operators, new_request_id
from gateway.downstream.wire import WireRules
from gateway.jobs import Worker, WorkerRules
from gateway.pipeline import BackendWatch, Peers, Pipeline, Sight
from gateway.pipeline.box_keeper import SETTLE_S, BoxKeeper, BoxSight
from gateway.ports import Arrival
from gateway.settings import Settings
from gateway.settings.document import MemberSection, RequestSection
from gateway.store.boards import MemoryBoard, RedisBoard
from gateway.store.fallback import FallbackLedger, Mode
from gateway.store.jobs import RedisJobs
from gateway.store.keeper import keep_store
from gateway.store.memory import MemoryLedger
from gateway.store.prefixes import MemoryPrefixIndex
from gateway.store.redis import RedisLedger
from gateway.store.responses import MemoryResponseStore, RedisResponseStore
from gateway.store.webhooks import RedisWebhooks
from gateway.telemetry import logs
from gateway.telemetry.journal import Journal
from gateway.telemetry.logs import RequestLog
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.recorder import Recorders
from gateway.tokenizer import PromptEstimator, open_estimator
from gateway.upstream.client import HttpxUpstream
from gateway.upstream.commands import Command
from gateway.upstream.probes import Prober
from gateway.upstream.switches import BoxSwitch, ByCommand, ByRequest, BySleep, Call, Member
from gateway.upstream.webhook_calls import WebhookCaller
from gateway.upstream.webhooks import Webhooks

log = logging.getLogger("gateway.process")

STOP_S = 5.0
"""Seconds in which connections close once their requests have ended or were cut."""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_LOST = frozenset({State.HUNG, State.DOWN})


@dataclass(frozen=True, slots=True)
class Running:
    """A gateway that serves.

    Attributes:
        url: Base URL for applications.
        admin_url: Base URL for operators, or None where the admin listener is off.
        gateway: What serves it.
    """

    url: str
    admin_url: str | None
    gateway: "Gateway"


class Gateway:
    """One gateway process, joined. Secrets and files are read here, once."""

    def __init__(self, settings: Settings, environ: Mapping[str, str]) -> None:
        """Build everything from a valid configuration.

        Raises:
            ConfigError: something it names is missing or unusable.
        """
        settings.require(environ)
        self.settings = settings
        self.clock = SystemClock()
        self.policy = settings.policy()
        self.ledger = _ledger(settings)
        self._store = self.ledger if isinstance(self.ledger, FallbackLedger) else None
        self.journal = Journal()
        backends = self.policy.backends
        secrets = _backend_keys(settings, environ)
        tls = {name: _verification(settings, name) for name in backends}
        self.fleet = Prober(
            backends,
            _health_rules(settings),
            self.clock,
            secrets=secrets,
            tls=tls,
            hang_s={name: _hang_s(settings, name) for name in backends},
            on_change=self._backend_changed,
            on_sample=self._backend_sampled,
        )
        self.upstream = HttpxUpstream(backends.values(), secrets=secrets, tls=tls)
        self.estimator = open_estimator(settings.vocab)
        _say_how_it_counts(self.estimator)
        drift, line, self.counts = DriftTracker(), WaitingLine(), CountTracker()
        watch = BackendWatch(lambda: self.policy, self.ledger, self.clock)
        self.board = _board(settings, self.clock)
        self.boxes = BoxKeeper(
            {
                name: settings.box_rules(name, 0.0 if settings.store is None else SETTLE_S)
                for name in settings.boxes
            },
            backends,
            boot_s=settings.box_boots_s(),
            switch=BoxSwitch(_members(settings, environ, backends, secrets, tls)),
            board=self.board,
            fleet=self.fleet,
            ledger=self.ledger,
            line=line,
            clock=self.clock,
            on_change=lambda: self.pipeline.room.look(),
        )
        self.metrics = Metrics(
            backends=lambda: self.policy.backends,
            loads=self.ledger.loads,
            statuses=self.fleet.statuses,
            drifts=drift.drifts,
            count_drifts=self.counts.drifts,
            sights=watch.sights,
            waiting=line.waiting,
            boxes=self.boxes.sights,
            replicas=lambda: self._store.replicas if self._store else 1,
            store_modes=lambda: {mode: mode is self._store.mode for mode in Mode} if self._store else {},
        )
        self.metrics.config_info.labels(self.policy.version).set(1)
        self.webhooks = _webhooks(settings, environ, self.clock, self.metrics)
        recorder = Recorders((self.metrics, self.journal, RequestLog()))
        self.pipeline = Pipeline(
            policy=lambda: self.policy,
            estimator=self.estimator,
            ledger=self.ledger,
            fleet=self.fleet,
            upstream=self.upstream,
            prefixes=MemoryPrefixIndex(),
            drift=drift,
            counts=self.counts,
            watch=watch,
            line=line,
            recorder=recorder,
            clock=self.clock,
            away=self.boxes.away,
        )
        digests = settings.key_digests(environ) or {}
        self.peers = Peers(
            fleet=self.fleet,
            estimator=self.estimator,
            line=line,
            watch=watch,
            policy=lambda: self.policy,
            keys=digests,
            clock=self.clock,
            on_waiting=self.pipeline.room.look,
        )
        if self._store is not None:
            self._store.exchange.join(self.peers.facts, self.peers.hear)
        self.responses = _response_store(settings, self.clock)
        self.jobs = _jobs(settings)
        self.worker = _worker(settings, self.jobs, self.pipeline, self.clock)
        self.applications = Applications(
            pipeline=self.pipeline,
            policy=lambda: self.policy,
            keys=KeyRing(digests),
            rules=wire_rules(settings),
            limits=BodyLimits(settings.requests.max_body_bytes, settings.requests.body_timeout_s),
            keeping=Keeping(self.responses, settings.responses.keep_s),
            background=_background(settings, self.jobs, self.pipeline, self.clock),
            readiness=self.readiness,
            recorder=recorder,
            clock=self.clock,
        )
        self.operators = Operators(
            views={
                "backends": self.backends_view,
                "boxes": self.boxes_view,
                "requests": self.journal.recent,
                "policy": self.policy_view,
                "replicas": self.replicas_view,
            },
            metrics=self.metrics.exposition,
        )

    def _backend_changed(self, backend_id: str, old: BackendStatus, new: BackendStatus) -> None:
        logs.backend_changed(backend_id, old, new)
        self.metrics.backend_changed(backend_id, old, new)
        self.pipeline.room.look()
        if new.state is not old.state and new.state in _LOST:
            self.pipeline.abandon(backend_id, new.reason)
        if new.verdicts > old.verdicts and self._store is not None:
            self._store.exchange.publish_now()

    def _backend_sampled(self, backend_id: str, engine: EngineSample) -> None:
        if self._store is not None and self._store.mode is Mode.ALONE:
            self.counts.forget(backend_id)  # what the other gateways have there is not known
            return
        backend = self.policy.backends[backend_id]
        before, after = self.counts.observe(engine, self.ledger.load(backend_id), backend)
        if after.cause is not before.cause:
            logs.count_drifted(after)
        if after.kv_blocks < before.kv_blocks:
            self.pipeline.room.look()

    def readiness(self) -> Mapping[str, bool]:
        """Return what must hold for `/readyz`, each by its name."""
        statuses = self.fleet.statuses()
        up = any(
            usable(status)
            and status.state is not State.UNKNOWN
            and served_name(backend.model, status)
            and not backend.drain
            for backend, status in (
                (backend, statuses[name]) for name, backend in self.policy.backends.items()
            )
        )
        # A box that changes models serves nobody for minutes, but what waits for it is not lost.
        return {"a_backend_is_up": up or self.boxes.can_serve_later}

    def policy_view(self) -> Mapping[str, Any]:
        """Return the policy in force, for operators."""
        return asdict(self.policy) | {"version": self.policy.version, "gateway": __version__}

    def boxes_view(self) -> Mapping[str, Any]:
        """Return every box as an operator wants to see it."""
        now = self.clock.now()
        return {name: _box_view(sight, now) for name, sight in self.boxes.sights().items()}

    def replicas_view(self) -> Mapping[str, Any]:
        """Return which gateway processes share the store, and what they tell each other, for operators."""
        if self._store is None:
            return {"owner": None, "mode": None, "replicas": 1, "others": {}}
        told = self.peers.view()
        return {
            "owner": self._store.owner,
            "mode": self._store.mode,
            "replicas": self._store.replicas,
            "others": {
                owner: {"age_s": round(age_s, 1), **told.get(owner, {})}
                for owner, age_s in self._store.exchange.ages(anyio.current_time()).items()
            },
        }

    def backends_view(self) -> Mapping[str, Any]:
        """Return every backend as an operator wants to see it."""
        now, sights = self.clock.now(), self.pipeline.watch.sights()
        pools = {
            name: [pool.id for pool in self.policy.pools.values() if name in pool.backends]
            for name in self.policy.backends
        }
        return {
            name: {
                "url": backend.url,
                "profile": backend.profile,
                "pools": pools[name],
                "drain": backend.drain,
                "quirks": backend.quirks,
                "in_flight": load.seqs,
                "knee_seqs": admission.knee_seqs(backend.capacity, 0),
                "knee_used": round(load.share / admission.WHOLE, 4),
                "kv_blocks": load.kv_blocks,
                "kv_blocks_planned": admission.blocks_planned(backend.capacity),
                "context_tokens": backend.capacity.context_tokens,
                "count_drift": _count_view(self.counts.drift(name)),
                **_sight_view(sights.get(name)),
                **_status_view(status, now),
            }
            for name, backend in self.policy.backends.items()
            for load in [self.ledger.loads().get(name, Load())]
            for status in [self.fleet.statuses()[name]]
        }

    @asynccontextmanager
    async def running(self, listen: socket.socket | None = None) -> AsyncIterator[Running]:
        """Serve on the configured addresses while the block runs.

        Applications connect to `listen`, if given: a socket that this process was started with.

        Raises:
            ConfigError: an address cannot be bound.
        """
        applications, operators = self.applications.asgi_app(), self.operators.asgi_app()
        listen = listen or bind(*self.settings.listen)
        admin = None if self.settings.admin is None else bind(*self.settings.admin)
        self._listeners = [Listener(applications, listen)]
        if admin is not None:
            self._listeners.append(Listener(operators, admin))
        running = Running(url_of(listen), None if admin is None else url_of(admin), self)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.fleet.run)
            tasks.start_soon(self.pipeline.room.run)
            tasks.start_soon(self.pipeline.watch.run)
            tasks.start_soon(self.boxes.run)
            tasks.start_soon(self.pipeline.first_tokens.run)
            if self._store is not None:
                tasks.start_soon(self._store.run)
            if self.jobs is not None:
                tasks.start_soon(self.jobs.run)
            if self.worker is not None:
                tasks.start_soon(self.worker.run)
            if self.webhooks is not None:
                tasks.start_soon(self.webhooks.run)
            for listener in self._listeners:
                tasks.start_soon(listener.run_until_stopped)
                await listener.wait_started()
            try:
                yield running
            finally:
                with anyio.CancelScope(shield=True):
                    await self._stop(tasks)

    async def _stop(self, tasks: TaskGroup) -> None:
        if self.worker is not None:
            await self.worker.stop()
        for listener in self._listeners:
            listener.cut()
        with anyio.move_on_after(STOP_S):
            for listener in self._listeners:
                await listener.wait_ended()
        tasks.cancel_scope.cancel()
        await self.boxes.wait_ended()
        if isinstance(self.board, RedisBoard):
            await self.board.aclose()
        await self.upstream.aclose()
        if self._store is not None:
            await self._store.aclose()
        await self.responses.aclose()
        if self.jobs is not None:
            await self.jobs.aclose()
        self.estimator.close()


async def serve(
    settings: Settings, environ: Mapping[str, str] = os.environ, *, ready: Callable[[Running], None]
) -> None:
    """Run a gateway until SIGTERM, SIGINT or SIGHUP, then drain it; a second signal ends it at once.

    Raises:
        ConfigError: it cannot be built from these settings, or an address cannot be bound.
    """
    failure: ConfigError | None = None
    with anyio.open_signal_receiver(*STOP_SIGNALS) as signals:
        async with anyio.create_task_group() as tasks:
            try:
                if settings.jobs_folder is not None:
                    settings = settings.with_jobs_at(await tasks.start(keep_store, settings.jobs_folder))
                await serve_until(signals, Gateway(settings, environ), ready=ready)
            except ConfigError as error:  # carried out by value: the group would wrap it
                failure = error
            tasks.cancel_scope.cancel()
    if failure is not None:
        raise failure


async def serve_until(
    stops: AsyncIterator[object],
    gateway: Gateway,
    *,
    ready: Callable[[Running], None],
    listen: socket.socket | None = None,
) -> None:
    """Run a gateway until the first of `stops`, then drain it; the second ends it at once.

    Raises:
        ConfigError: an address cannot be bound.
    """
    async with gateway.running(listen) as running:
        ready(running)
        await anext(stops)
        if gateway.worker is not None:
            gateway.worker.drain()
        in_flight = gateway.applications.in_flight
        log.info("draining: %d requests in flight; a second signal ends them", in_flight)
        with anyio.move_on_after(gateway.settings.shutdown.drain_s):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_cancel_on_next, stops, tasks)
                await gateway.applications.drain()
                tasks.cancel_scope.cancel()
        if left := gateway.applications.in_flight:
            log.warning("ending with %d requests in flight", left)
    log.info("stopped")


async def _cancel_on_next(stops: AsyncIterator[object], tasks: TaskGroup) -> None:
    await anext(stops)
    tasks.cancel_scope.cancel()


def _ledger(settings: Settings) -> MemoryLedger | FallbackLedger:
    if settings.store is None:
        return MemoryLedger()
    return FallbackLedger(
        RedisLedger(settings.store.url, prefix=settings.store.prefix),
        on_change=_store_changed,
        replicas_min=settings.workers,
    )


def _board(settings: Settings, clock: SystemClock) -> MemoryBoard | RedisBoard:
    if settings.store is None or not settings.boxes:
        return MemoryBoard(clock.now)
    return RedisBoard.at(settings.store.url, settings.store.prefix)


def _members(
    settings: Settings,
    environ: Mapping[str, str],
    backends: Mapping[str, Backend],
    secrets: Mapping[str, str],
    tls: Mapping[str, ssl.SSLContext | bool],
) -> Mapping[str, Member]:
    return {
        member: Member(
            backends[member],
            _way(section, settings.box_token(name, member, environ)),
            Canary(**section.canary.model_dump()),
            secrets.get(member),
            tls[member],
            settings.launch_record(name),
        )
        for name, box in settings.boxes.items()
        for member, section in box.backends.items()
    }


def _way(section: MemberSection, token: str | None) -> ByCommand | ByRequest | BySleep:
    if section.exec is not None:
        rest = (section.exec.shell, section.exec.timeout_s, section.exec.kill_with_gateway)
        return ByCommand(Command(section.exec.start, *rest), Command(section.exec.stop, *rest))
    if section.http is not None:
        start, stop = _call(section.http.start), _call(section.http.stop)
        return ByRequest(start, stop, token, section.http.timeout_s)
    assert section.sleep is not None
    return BySleep(section.sleep.level, section.sleep.timeout_s)


def _call(section: RequestSection) -> Call:
    return Call(section.method, section.url, section.body)


def _response_store(settings: Settings, clock: SystemClock) -> MemoryResponseStore | RedisResponseStore:
    bytes_max = settings.responses.max_bytes_per_key
    if settings.store is None:
        return MemoryResponseStore(clock, bytes_max)
    return RedisResponseStore(settings.store.url, prefix=settings.store.prefix, bytes_max=bytes_max)


def _jobs(settings: Settings) -> RedisJobs | None:
    store = settings.jobs_store
    return None if store is None else RedisJobs(store.url, prefix=store.prefix)


def _background(
    settings: Settings, jobs: RedisJobs | None, pipeline: Pipeline, clock: SystemClock
) -> Background | None:
    section = settings.jobs
    if section is None or jobs is None:
        return None
    rules = JobRules(
        quota=Quota(section.queued_max_per_key, section.bytes_max_per_key),
        keep_s=section.keep_s,
        unstored_keep_s=section.unstored_keep_s,
        priorities={name: JobPriority(written) for name, written in section.priorities.items()},
    )
    return Background(jobs, pipeline, rules, clock)


def _worker(
    settings: Settings, jobs: RedisJobs | None, pipeline: Pipeline, clock: SystemClock
) -> Worker | None:
    section = settings.jobs
    if section is None or jobs is None:
        return None
    rules = WorkerRules(
        running_max=section.running_max,
        attempts_max=section.attempts_max,
        continues=section.resume == "continue",
    )
    name = f"{socket.gethostname()}-{secrets.token_hex(4)}"
    wanted = wire_rules(settings)

    def read(job: Job, body: bytes) -> wire.WireRequest:
        arrival = Arrival(new_request_id(), clock.wall(), clock.now())
        headers = JobFacts.of(job).headers
        found = wire.read(Endpoint.CHAT, body, wanted, arrival=arrival, key=job.new.key, headers=headers)
        return replace(found, request=replace(found.request, is_job=True))

    return Worker(jobs, name, read, pipeline.run, rules)


def _webhooks(
    settings: Settings, environ: Mapping[str, str], clock: SystemClock, metrics: Metrics
) -> Webhooks | None:
    endpoints = settings.webhooks(environ)
    store = settings.jobs_store or settings.store
    if not endpoints or store is None:
        return None

    def attempted(attempt: WebhookAttempt) -> None:
        logs.webhook_attempted(attempt)
        metrics.webhook_attempted(attempt)

    return Webhooks(
        endpoints,
        RedisWebhooks(store.url, prefix=store.prefix),
        WebhookCaller(endpoints, clock),
        on_attempt=attempted,
        on_pending=metrics.webhooks_wait,
    )


def _store_changed(mode: Mode) -> None:
    if mode is Mode.ALONE:
        log.error("the store does not answer: this gateway goes on under its own part of every limit")
    else:
        log.warning("the store answers again: limits are shared")


def _say_how_it_counts(estimator: PromptEstimator) -> None:
    vocabulary = estimator.vocabulary
    if vocabulary is None:
        log.warning("prompts are counted approximately: a vocabulary would make counts exact")
        return
    log.info("vocabulary: %d entries, sha256 %s", vocabulary.entries, vocabulary.sha256)
    for warning in vocabulary.warnings:
        log.warning("vocabulary: %s", warning)


def _health_rules(settings: Settings) -> HealthRules:
    section = settings.health
    return HealthRules(
        interval_s=section.interval_s,
        probe_timeout_s=section.timeout_s,
        failures_max=section.failures,
        penalty_s=section.ejection_s,
        penalty_max_s=section.ejection_max_s,
        probation_successes=section.probation_successes,
        hang_s=section.hang_s,
    )


def _hang_s(settings: Settings, backend_id: str) -> float:
    profile = settings.profile(backend_id)
    batched = profile.flags.max_num_batched_tokens
    return hang_after_s(profile.perf, batched, profile.capacity.context_tokens, settings.health.hang_s)


def wire_rules(settings: Settings) -> WireRules:
    """Return what the configuration allows in a request body."""
    section = settings.requests
    return WireRules(
        choices_max=section.max_choices,
        remote_media=section.remote_media,
        drop_fields=frozenset(section.drop_fields),
        usage_in_streams=section.usage_in_streams,
    )


def _verification(settings: Settings, backend_id: str) -> ssl.SSLContext | bool:
    tls = settings.tls(backend_id)
    if not tls.verify:
        log.warning("backend %s: its certificate is not verified", backend_id)
        return False
    if tls.ca_file is None:
        return True
    try:
        return ssl.create_default_context(cafile=str(tls.ca_file))
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"backend {backend_id}: {tls.ca_file} holds no certificates: {error}") from error


def _backend_keys(settings: Settings, environ: Mapping[str, str]) -> Mapping[str, str]:
    keys = {}
    for name in settings.document.backends:
        key = settings.backend_key(name, environ)
        if key is None:
            continue
        if not key.isascii() or not key.isprintable():
            raise ConfigError(f"backend {name}: its API key has a character that no header can carry")
        keys[name] = key
    return keys


def _count_view(drift: CountDrift) -> Mapping[str, Any]:
    return {
        "seqs": drift.seqs,
        "lasting_seqs": drift.lasting_seqs,
        "kv_blocks_taken": drift.kv_blocks,
        "cause": drift.cause.sentence(),
    }


def _box_view(sight: BoxSight, now: float) -> Mapping[str, Any]:
    box, plan = sight.box, sight.plan
    return {
        "state": box.state.value,
        "for_s": round(now - box.since, 1),
        "reason": box.reason,
        "backend": box.backend,
        "next": {
            "cause": plan.cause.value,
            "backend": plan.target,
            "in_s": None if plan.at is None else round(max(0.0, plan.at - now), 1),
            "held_by_batch": plan.held_by_batch,
        },
        "waiting": {
            name: {
                "requests": wants.count,
                "oldest_s": None if wants.oldest_at is None else round(now - wants.oldest_at, 1),
            }
            for name, wants in sight.wants.items()
        },
        "quarantine": {name: held.reason for name, held in box.quarantine.items()},
        "unexpected_restarts": {name: len(times) for name, times in box.restarts.items()},
        "boot_s": {name: round(took, 1) for name, took in box.boot_s.items()},
        "boots": box.swaps,
        "switched_by_this_gateway": sight.is_owner,
        "fence": sight.fence,
    }


def _sight_view(sight: Sight | None) -> Mapping[str, Any]:
    if sight is None:
        return {"tpot": None, "knee_estimate": []}
    control, target_s = sight.control, sight.tpot_target_s
    return {
        "tpot": None
        if target_s is None
        else {
            "target_ms": round(1000 * target_s, 1),
            "measured_ms": None if control.tpot_s is None else round(1000 * control.tpot_s, 1),
            "knee_share": round(sight.share, 4),
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
            for step, found in sight.knees.items()
        ],
    }


def _status_view(status: BackendStatus, now: float) -> Mapping[str, Any]:
    engine = status.engine
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
