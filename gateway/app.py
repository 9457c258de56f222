"""The composition root: builds all components, wires them, and runs them as one process.

Nothing else constructs an adapter, and nothing here makes decisions.
"""

import asyncio
import logging
import os
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Protocol

import anyio
from anyio.abc import TaskGroup

from gateway import memory, parts, threads
from gateway.clock import SystemClock
from gateway.cohort import Cohort
from gateway.core.backends import Backend
from gateway.core.count_check import CountTracker
from gateway.core.drift import DriftTracker
from gateway.core.errors import ConfigError
from gateway.core.health import GONE_S, NOT_PROBED, BackendStatus, EngineSample, has_ended, lost
from gateway.core.load import NO_LOAD
from gateway.core.policy import Policy
from gateway.core.reloads import Reload
from gateway.core.selection import BackendView, makes_ready, unavailable_reason
from gateway.core.trace import passed_on
from gateway.core.value import valueclass
from gateway.core.waiting import WaitingLine
from gateway.downstream.config_routes import config_handlers
from gateway.downstream.console_routes import Console
from gateway.downstream.direct_call import Chats
from gateway.downstream.explain_routes import explain_handlers
from gateway.downstream.job_admin import job_handlers
from gateway.downstream.keys import KeyRing
from gateway.downstream.listener import Listener
from gateway.downstream.origins import Origins
from gateway.downstream.relay import BodyLimits
from gateway.downstream.routes import Applications, operators_app
from gateway.downstream.stored_responses import ResponseRetention
from gateway.downstream.wire import WireRules
from gateway.events import about
from gateway.exiting import STOP_S, TOLD_S, signals_heard
from gateway.live import Live
from gateway.open_files import OpenFiles
from gateway.pipeline import BackendWatch, JobQuestions, Peers, Pipeline
from gateway.pipeline.box_controller import BoxController
from gateway.ports import Recorder
from gateway.reload import Reloader
from gateway.settings import Settings
from gateway.sockets import bind, require_free, url_of
from gateway.store.embedded import embedded_url
from gateway.store.keeper import start_store
from gateway.store.memory import MemoryLedger
from gateway.store.prefixes import MemoryPrefixIndex
from gateway.store.process_name import process_name
from gateway.tasks import TasksBeside
from gateway.telemetry import gauges, logs
from gateway.telemetry.journal import Journal
from gateway.telemetry.logs import RequestLog
from gateway.telemetry.loop_watch import LoopWatch
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.recorder import Recorders
from gateway.tokenizer import open_estimator
from gateway.upstream.direct import DirectUpstream
from gateway.upstream.probes import Prober
from gateway.upstream.switches import BoxSwitch
from gateway.views import Views
from gateway.what_if import WhatIf

if TYPE_CHECKING:
    from litestar.types import ASGIApp

    from gateway.job_parts import JobParts
    from gateway.jobs import Worker
    from gateway.store.jobs import RedisJobs

log = logging.getLogger("gateway.process")

CLOSE_S = 30.0
"""How long telemetry may take to send what is left. A choice, longer than its parts should take together: a
thread of theirs may have died for lack of memory, and then never responds."""


@valueclass(frozen=True, slots=True)
class Running:
    """A running gateway.

    Attributes:
        url: Base URL for applications; "" if it does not serve any.
        admin_url: Base URL for operators; None if the admin listener is off.
        gateway: The gateway itself.
    """

    url: str
    admin_url: str | None
    gateway: "Gateway"


class _Part(Protocol):
    async def run(self) -> None: ...


class Gateway:
    """One gateway process, fully wired. Secrets and files are read here, once.

    `name`: what the store, `/admin/replicas` and `jobs list` call this process.
    """

    def __init__(
        self, settings: Settings, environ: Mapping[str, str], *, name: str = "", former: str = ""
    ) -> None:
        """Build everything from a valid configuration.

        Args:
            settings: The configuration.
            environ: The environment that it refers to.
            name: See `process_name`; "" for one of its own.
            former: Name of a process that has ended, whose slots this one is to free; "" for none.

        Raises:
            ConfigError: something that it refers to is missing or unusable.
        """
        settings.require(environ)
        self.settings = settings
        self._environ = environ
        self.clock = SystemClock()
        self.policy = settings.policy()
        self.name = name or process_name()
        self.ledger = parts.ledger(settings, self.name)
        self._store = None if isinstance(self.ledger, MemoryLedger) else self.ledger
        self._former = parts.former_accounts(settings, former)
        self.journal = Journal()
        backends = self.policy.backends
        secrets = parts.backend_keys(settings, environ)
        self._tls_contexts = parts.TlsContexts()
        tls = self._tls_contexts.of(settings)
        self.fleet = Prober(
            backends,
            parts.health_rules(settings),
            self.clock,
            secrets=secrets,
            tls=tls,
            hang_s={name: parts.hang_s(settings, one) for name, one in backends.items()},
            on_change=self._backend_changed,
            on_sample=self._backend_sampled,
            on_stale=self._backend_unsampled,
            awaited_since=lambda name: self.pipeline.awaited_since(name),
            silence_s=lambda name: self.pipeline.silence_s(name),
        )
        cohort = Cohort()
        self.upstream = DirectUpstream(backends.values(), secrets=secrets, tls=tls, cohort=cohort)
        self.estimator = open_estimator(settings.named.vocab)
        parts.say_how_it_counts(self.estimator)
        line, self.counts, self.drift = WaitingLine(), CountTracker(), DriftTracker()
        watch = BackendWatch(lambda: self.policy, self.ledger, self.counts, self.clock)
        self.board = parts.board(settings, self.name)
        job_store = parts.job_store(settings)
        self._switch = BoxSwitch(parts.members(settings, environ, backends, secrets, tls))
        self.boxes = BoxController(
            {name: settings.box_rules(name, parts.box_settle_s(settings)) for name in settings.box_members()},
            backends,
            boot_s=settings.box_boots_s(),
            switch=self._switch,
            board=self.board,
            fleet=self.fleet,
            ledger=self.ledger,
            line=line,
            jobs=job_store,
            policy=lambda: self.policy,
            clock=self.clock,
            on_change=lambda: self.pipeline.room.look(),
            on_swap=lambda box_id, swap: self.metrics.box_swapped(box_id, swap),
        )
        self.metrics = Metrics()
        self.metrics.boxes_known(settings.box_members())
        self.metrics.config_in_force(self.policy.version, self.policy.backends, self.clock.wall())
        self.loop_watch = LoopWatch(self.metrics.registry, self.clock)
        self.open_files = OpenFiles()
        self.webhooks = parts.webhooks(settings, environ, self.clock, self.metrics)
        self.tracing = parts.tracing(settings, environ, lambda: self.policy.backends, self.metrics)
        self.metrics_push = parts.metrics_push(settings, environ, self.metrics, self.clock)
        self.decisions = parts.decision_log(settings, self.metrics, self.clock)
        recorders: list[Recorder | None] = [self.metrics, self.journal, RequestLog()]
        recorders += [self.tracing, self.decisions]
        recorder = Recorders([one for one in recorders if one is not None])
        prefixes = MemoryPrefixIndex()
        self.pipeline = Pipeline(
            policy=lambda: self.policy,
            estimator=self.estimator,
            ledger=self.ledger,
            fleet=self.fleet,
            upstream=self.upstream,
            prefixes=prefixes,
            drift=self.drift,
            counts=self.counts,
            watch=watch,
            line=line,
            recorder=recorder,
            clock=self.clock,
            objections=self.boxes.objections,
            cohort=cohort,
        )
        self._listeners: dict[str, Listener] = {}
        self._register_gauges(line, watch)
        digests = settings.key_digests(environ) or {}
        self.keys = KeyRing(digests)
        self.origins = Origins(settings.document.allowed_origins)
        self.peers = Peers(
            fleet=self.fleet,
            estimator=self.estimator,
            line=line,
            watch=watch,
            prefixes=prefixes,
            policy=lambda: self.policy,
            keys=digests,
            clock=self.clock,
            on_change=self.pipeline.room.look,
        )
        if self._store is not None:
            self._store.exchange.join(self.peers.facts, self.peers.hear)
        self.responses = parts.response_store(settings, self.clock)
        self.idempotency = parts.idempotency(settings, self.clock)
        rules = parts.wire_rules(settings)
        self.jobs = None if job_store is None else self._job_parts(job_store, rules, recorder)
        self.applications = Applications(
            pipeline=self.pipeline,
            policy=lambda: self.policy,
            keys=self.keys,
            origins=self.origins,
            rules=rules,
            limits=BodyLimits(
                settings.document.requests.max_body_bytes, settings.document.requests.body_timeout_s
            ),
            retention=ResponseRetention(self.responses, settings.document.responses.keep_s),
            idempotency=self.idempotency,
            background=None if self.jobs is None else self.jobs.background,
            batching=None if self.jobs is None else self.jobs.batching,
            readiness=self.readiness,
            recorder=recorder,
            clock=self.clock,
            trace_of=passed_on if self.tracing is None else self.tracing.begin,
            window_of=self._window_of,
        )
        self.chats: Chats | None = self.applications.chats  # None: all of them are handled by ASGI
        self.reloader = Reloader(
            settings,
            environ,
            self._prepare,
            lambda: {name: load.seqs for name, load in self.ledger.loads().items()},
            self.clock,
            on_reload=self._reloaded,
        )
        self.console, self._operators_api = self._for_operators(line, watch)

    def _job_parts(self, store: "RedisJobs", rules: WireRules, recorder: Recorder) -> "JobParts":
        from gateway.job_parts import JobParts

        return JobParts(
            self.settings,
            self.name,
            store,
            policy=lambda: self.policy,
            pipeline=self.pipeline,
            questions=JobQuestions(lambda: self.policy, self.pipeline.view, self.estimator),
            away_s=self.boxes.away_s,
            read_line=lambda batch, line: self.applications.batch_lines.job(batch, line),
            rules=rules,
            recorder=recorder,
            metrics=self.metrics,
            tracing=self.tracing,
            clock=self.clock,
        )

    def _register_gauges(self, line: WaitingLine, watch: BackendWatch) -> None:
        gauges.register(
            self.metrics.registry,
            backends=lambda: self.policy.backends,
            loads=self.ledger.loads,
            statuses=self.fleet.statuses,
            drifts=self.drift.drifts,
            count_drifts=self.counts.drifts,
            snapshots=watch.snapshots,
            waiting=line.waiting,
            oldest_waits_s=lambda: line.oldest_waits_s(self.clock.now()),
            wait_limits_s=lambda: {
                (model.id, one.name): one.waiting.longest_wait_s for model, one in self.policy.classes()
            },
            served=lambda: {
                (model.id, one.name): self.pipeline.view.can_serve(self.policy, one)
                for model, one in self.policy.classes()
            },
            wants=lambda: line.wants(self.policy.backends),
            boxes=self.boxes.snapshots,
            objections=self.boxes.objections,
            connections=lambda: {name: one.connections() for name, one in self._listeners.items()},
            dropped_lines=logs.dropped_lines,
            replicas=lambda: self._store.replicas if self._store else 1,
            store_modes=lambda: self._store.modes() if self._store else {},
        )

    def _for_operators(
        self, line: WaitingLine, watch: BackendWatch
    ) -> "tuple[Console, Callable[[], ASGIApp]]":
        """Return the console, and what builds the API for operators; they show all other parts."""
        views = Views(
            policy=lambda: self.policy,
            ledger=self.ledger,
            fleet=self.fleet,
            counts=self.counts,
            watch=watch,
            boxes=self.boxes,
            journal=self.journal,
            store=self._store,
            peers=self.peers,
            refusals=self.pipeline.view.refusals,
            clock=self.clock,
        ).by_name()
        live = Live(
            views=views,
            policy=lambda: self.policy,
            line=line,
            journal=self.journal,
            is_leaving=self._is_leaving,
            clock=self.clock,
        )
        console = Console(live)
        what_if = WhatIf(
            settings=lambda: self.settings,
            policy=lambda: self.policy,
            reloader=self.reloader,
            view=self.pipeline.view,
            line=line,
            estimator=self.estimator,
            journal=self.journal,
            clock=self.clock,
        )
        operators_api = partial(
            operators_app,
            handlers=[
                *config_handlers(self.reloader),
                *job_handlers(None if self.jobs is None else self.jobs.store),
                *console.handlers(),
                *explain_handlers(what_if),
            ],
            views=views,
            metrics=self.metrics.exposition,
            readiness=self._readiness_for_operators,
            names=self.settings.document.admin_names,
        )
        return console, operators_api

    def _prepare(self, settings: Settings) -> Callable[[], Awaitable[None]]:
        """Return a function that applies other settings. Everything that can fail is done before it returns.

        Raises:
            ConfigError: they cannot be applied.
        """
        policy = settings.policy()
        return partial(
            self._put_in_force,
            settings,
            policy,
            parts.backend_keys(settings, self._environ),
            settings.key_digests(self._environ) or {},
            self._tls_contexts.of(settings),
            {name: parts.hang_s(settings, one) for name, one in policy.backends.items()},
        )

    async def _put_in_force(
        self,
        settings: Settings,
        policy: Policy,
        secrets: Mapping[str, str],
        digests: Mapping[str, bytes],
        tls: Mapping[str, ssl.SSLContext | bool],
        hang_s: Mapping[str, float],
    ) -> None:
        """Apply other settings atomically."""
        for name, backend in self.policy.backends.items():
            if name not in policy.backends or policy.backends[name].url != backend.url:
                self.counts.forget(name)
                self.drift.forget(name)
                self.pipeline.watch.forget(name)
                self.pipeline.forget_prefixes(name)
        if self._store is not None:
            self._store.keep_only(policy.backends)
        self.settings, self.policy = settings, policy
        parts.tell_policy(self.decisions, settings, policy)
        self.keys.replace(digests)
        self.origins.replace(settings.document.allowed_origins)
        self.peers.replace_keys(digests)
        self.upstream.update(policy.backends.values(), secrets=secrets, tls=tls)
        self.fleet.update(
            policy.backends,
            parts.health_rules(settings),
            secrets=secrets,
            tls=tls,
            hang_s=hang_s,
        )
        self._switch.update(secrets=secrets, tls=tls)
        self.pipeline.policy_changed()
        self.metrics.config_in_force(policy.version, policy.backends, self.clock.wall())
        await self.upstream.close_retired()

    def _reloaded(self, found: Reload) -> None:
        outcome = "refused" if found.error else "applied"
        self.metrics.reloads.labels(outcome).inc()
        if found.error:
            self.metrics.config_successful.set(0)
        else:
            self.metrics.restart_needed.set(bool(found.changes.at_start))

    def _backend_changed(self, backend_id: str, old: BackendStatus, new: BackendStatus) -> None:
        backend = self.policy.backends.get(backend_id)
        logs.backend_changed(backend_id, old, new, backend.versions if backend is not None else ())
        self.metrics.backend_changed(backend_id, old, new)
        self.pipeline.room.look()
        if lost(new) and not lost(old):
            self.pipeline.abort_attempts(backend_id, GONE_S if new.is_gone else inf)
        if has_ended(new) or new.restarts > old.restarts or new.is_asleep:
            self.pipeline.forget_prefixes(backend_id)
        if new.verdicts > old.verdicts and self._store is not None:
            self._store.exchange.publish_now()

    def _backend_sampled(self, backend_id: str, engine: EngineSample) -> None:
        if not engine.caches_prefixes:
            self.pipeline.forget_prefixes(backend_id)
        if self._store is not None and self._store.keeps_to_part:
            self._backend_unsampled(backend_id)  # what the other gateways hold there is unknown
            return
        backend = self.policy.backends[backend_id]
        before, after = self.counts.observe(engine, self.ledger.load(backend_id), backend)
        if after.cause is not before.cause:
            logs.count_drifted(after)
        if after.kv_blocks < before.kv_blocks:
            self.pipeline.room.look()

    def _backend_unsampled(self, backend_id: str) -> None:
        is_freed = backend_id in self.counts.kv_taken
        self.counts.forget(backend_id)
        if is_freed:
            self.pipeline.room.look()

    def readiness(self) -> Mapping[str, bool]:
        """Return the conditions for `/readyz`, by name."""
        return self._readiness(makes_ready)

    def _readiness(self, serves: Callable[[Backend, BackendStatus], bool]) -> Mapping[str, bool]:
        statuses, objections = self.fleet.statuses(), self.boxes.objections()
        up = any(
            name not in objections and serves(backend, statuses[name])
            for name, backend in self.policy.backends.items()
        )
        # A box that is swapping serves nobody for minutes, but requests that wait for it are not lost.
        return {"a_backend_is_up": up or self.boxes.can_serve_later}

    def _readiness_for_operators(self) -> Mapping[str, bool]:
        leaving = {"not_draining": not self._is_leaving()}
        if not self.settings.is_job_worker or self.worker is None or self.jobs is None:
            return {**self.readiness(), **leaving}
        up = self._readiness(lambda backend, status: unavailable_reason(backend, status) is None)  # jobs wait
        return {**up, **leaving, "the_store_of_jobs_answers": self.jobs.store_answers}

    def _is_leaving(self) -> bool:
        """Return whether it is about to stop: a process that runs jobs and nothing else, or any other."""
        if self.settings.is_job_worker and self.worker is not None:
            return self.worker.is_draining
        return self.applications.serving.is_leaving

    @property
    def worker(self) -> "Worker | None":
        """What runs jobs in this process, if anything does."""
        return None if self.jobs is None else self.jobs.worker

    @property
    def in_flight(self) -> int:
        """Number of requests being received or served; for a process that only runs jobs, its jobs.

        If there are none, of chats that it answers for callers of other processes.
        """
        if self.settings.is_job_worker and self.worker is not None:
            return self.worker.running
        own = self.applications.serving.in_flight + self.applications.serving.uploads.calls
        return own or (0 if self.worker is None else self.worker.awaited)

    @property
    def notice_s(self) -> float:
        """Seconds between the signal to stop and the first rejected request."""
        return 0.0 if self.settings.is_job_worker else self.settings.document.shutdown.notice_s

    async def give_notice(self) -> None:
        """Become unready, but continue to serve for `notice_s`."""
        notice_s = self.notice_s
        if notice_s:
            log.info(
                "leaving: /readyz is 503 from now on; requests are still served for %g s",
                notice_s,
                extra=about("leaving", notice_s=notice_s),
            )
            self.applications.serving.is_leaving = True
            await anyio.sleep(notice_s)

    async def drain(self) -> None:
        """Reject new requests, and return when what it serves has ended, here and for others."""
        if self.worker is not None:
            self.worker.drain(lambda: self.applications.waiting_for_jobs > 0)
        if self.settings.is_job_worker and self.worker is not None:
            await self.worker.wait_idle()
        else:
            await self.applications.serving.drain()
            if self.worker is not None:
                await self.worker.wait_unawaited()

    @asynccontextmanager
    async def running(self, listen: socket.socket | None = None) -> AsyncIterator[Running]:
        """Serve on the configured addresses for the duration of the block.

        Applications connect to `listen`, if given: a socket that this process was started with.

        Raises:
            ConfigError: an address cannot be bound.
        """
        self._listeners.clear()
        if not self.settings.is_job_worker:
            listen = listen or bind(*self.settings.listen)
            self._listeners["applications"] = Listener(self.applications.asgi_app(), listen, self.chats)
        admin = None if self.settings.admin is None else bind(*self.settings.admin)
        if admin is not None:
            self._listeners["operators"] = Listener(self._operators_api(), admin)
        running = Running(
            "" if listen is None else url_of(listen), None if admin is None else url_of(admin), self
        )
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(logs.run, self.clock)
            for part in self._at_work():
                tasks.start_soon(part.run)
            if self.settings.document.reload.watch:
                tasks.start_soon(self.reloader.watch)
            if self.decisions is not None:
                self.decisions.start()
            for listener in self._listeners.values():
                tasks.start_soon(listener.run_until_stopped)
                await listener.wait_started()
            try:
                yield running
            finally:
                with anyio.CancelScope(shield=True):
                    await self._stop(tasks)

    def _window_of(self, backend: Backend) -> int:
        status = self.fleet.statuses().get(backend.id, NOT_PROBED)
        return BackendView(backend, NO_LOAD, status).capacity.context_tokens

    def _at_work(self) -> list[_Part]:
        """Return the parts that run while the gateway serves, as far as they are configured."""
        parts: list[_Part | None] = [
            self.loop_watch,
            self.open_files,
            self.fleet,
            self.pipeline.room,
            self.pipeline.watch,
            self.boxes,
            self.pipeline.first_tokens,
            self._store,
            self._former,
            *([] if self.jobs is None else self.jobs.at_work()),
            self.webhooks,
            self.metrics_push,
        ]
        return [part for part in parts if part is not None]

    async def _stop(self, tasks: TaskGroup) -> None:
        self.applications.serving.refuse()
        async with anyio.create_task_group() as jobs:  # which may wait for a store that does not answer
            if self.jobs is not None:
                self.jobs.stop_in(jobs)
            await anyio.lowlevel.checkpoint()  # they return jobs, which is no failure, before the room closes
            await self.console.stop()
            for listener in self._listeners.values():
                listener.close()  # or callers who are told, and connect again, would meet the cut here
            self.applications.end()
            with anyio.move_on_after(TOLD_S):
                await self.applications.serving.drain()
            for listener in self._listeners.values():
                listener.cut()
            with anyio.move_on_after(STOP_S):
                for listener in self._listeners.values():
                    await listener.wait_ended()
        if self.jobs is not None:
            self.jobs.revocations.give_up()
        tasks.cancel_scope.cancel()
        await self.boxes.wait_ended()
        await self.board.aclose()
        await self.upstream.aclose()
        if self._store is not None:
            await self._store.aclose()
        await self.responses.aclose()
        await self.idempotency.store.aclose()
        if self.jobs is not None:
            await self.jobs.aclose()
        self.estimator.close()
        try:
            closed = threads.in_own(asyncio.get_running_loop(), "telemetry", self._close_telemetry)
        except OSError:  # no thread can be started
            self._close_telemetry()
        else:
            with anyio.move_on_after(CLOSE_S):
                await closed

    def _close_telemetry(self) -> None:
        """Send and write what is left; an unreachable receiver delays this by some seconds."""
        logs.tell_kept_back(inf)
        if self.tracing is not None:
            self.tracing.close()
        if self.metrics_push is not None:
            self.metrics_push.close()
        if self.decisions is not None:
            self.decisions.close()


async def serve(
    settings: Settings, environ: Mapping[str, str] = os.environ, *, ready: Callable[[Running], None]
) -> None:
    """Run a gateway until SIGTERM or SIGINT, then drain it; a second signal ends it at once.

    SIGHUP reloads the configuration. A signal that arrives before the store is running ends it at once.

    Jobs are stored in an embedded store if the file names none, which a separate worker uses too.

    Raises:
        ConfigError: it cannot be built from these settings, or an address cannot be bound.
    """
    with signals_heard() as (signals, hints):
        settings.require(environ)  # before a store is started, which may read for minutes what it keeps
        async with TasksBeside(ConfigError) as tasks:
            if settings.named.jobs_folder is None:
                own: Settings | None = settings
            elif settings.is_job_worker:
                own = settings.with_jobs_at(embedded_url(settings.named.jobs_folder))
            else:
                require_free(settings.listen, settings.admin)  # before a folder is made, or read for minutes
                url = await start_store(tasks, settings.named.jobs_folder, signals)
                own = None if url is None else settings.with_jobs_at(url)
            if own is not None:
                gateway = Gateway(own, environ)
                tasks.start_soon(reread_on, hints, gateway)
                await serve_until(signals, gateway, ready=ready)
            else:
                log.info("stopped", extra=about("stopped"))


async def serve_until(
    stops: AsyncIterator[object],
    gateway: Gateway,
    *,
    ready: Callable[[Running], None],
    listen: socket.socket | None = None,
) -> None:
    """Run a gateway until the first of `stops`, then drain it; the second one ends it at once.

    Raises:
        ConfigError: an address cannot be bound.
    """
    async with gateway.running(listen) as running:
        memory.settle()
        logs.gather_in(asyncio.get_running_loop())
        ready(running)
        log.info(
            "this process is %s",
            gateway.name,
            extra=about("started", process=gateway.name, admin_url=running.admin_url),
        )
        await anext(stops)
        what = "jobs" if gateway.settings.is_job_worker else "requests"
        with anyio.move_on_after(gateway.notice_s + gateway.settings.document.shutdown.drain_s):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_cancel_on_next, stops, tasks)
                await gateway.give_notice()
                log.info(
                    "draining: %d %s in flight; a second signal cuts them off",
                    gateway.in_flight,
                    what,
                    extra=about("draining", in_flight=gateway.in_flight),
                )
                await gateway.drain()
                tasks.cancel_scope.cancel()
        if left := gateway.in_flight:
            log.error("cutting off %d %s in flight", left, what, extra=about("cut", in_flight=left))
    log.info("stopped", extra=about("stopped"))


async def reread_on(hints: AsyncIterator[object], gateway: Gateway) -> None:
    """Reload the configuration of a gateway for each of `hints`, until cancelled."""
    async for _ in hints:
        await gateway.reloader.reread()


async def _cancel_on_next(stops: AsyncIterator[object], tasks: TaskGroup) -> None:
    await anext(stops)
    tasks.cancel_scope.cancel()
