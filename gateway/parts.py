"""Factories for the parts of a gateway, from the sections of the configuration. Files are read here, once.

What only some gateways use, such as the store's client, is imported when it is built: a gateway without a
store takes 13 MB less.
"""

import logging
import ssl
from collections.abc import Callable, Mapping
from itertools import chain
from typing import TYPE_CHECKING

from gateway.clock import SystemClock
from gateway.core.backends import Backend
from gateway.core.canary import Canary
from gateway.core.errors import ConfigError
from gateway.core.health import HealthRules, hang_after_s
from gateway.core.policy import Policy
from gateway.core.webhooks import WebhookAttempt
from gateway.downstream.idempotency import IdempotencyRules
from gateway.downstream.wire import WireRules
from gateway.events import about
from gateway.pipeline.box_controller import JOBS_SETTLE_S, SETTLE_S
from gateway.ports import IdempotencyStore
from gateway.settings import BackendTls, Settings
from gateway.settings.secrets import carried
from gateway.settings.sections.boxes import MemberSection, RequestSection
from gateway.store.memory import MemoryBoard, MemoryIdempotency, MemoryLedger, MemoryResponseStore
from gateway.telemetry import logs
from gateway.telemetry.decision_log import DecisionLog
from gateway.telemetry.metrics import Metrics
from gateway.tokenizer import PromptEstimator
from gateway.upstream.commands import Command
from gateway.upstream.switches import ByCommand, ByRequest, BySleep, Call, Member
from gateway.upstream.webhooks import Webhooks

if TYPE_CHECKING:
    from gateway.store.boards import RedisBoard
    from gateway.store.fallback import FallbackLedger
    from gateway.store.former import FormerAccounts
    from gateway.store.jobs import RedisJobs
    from gateway.store.responses import RedisResponseStore
    from gateway.telemetry.otlp_metrics import MetricsPush
    from gateway.telemetry.tracing import Tracing

log = logging.getLogger("gateway.process")


def ledger(settings: Settings, owner: str) -> "MemoryLedger | FallbackLedger":
    """Return the ledger: for this process, `owner`, alone, or for all that share the store.

    Raises:
        ConfigError: an option in the URL of the store is unknown, or has an invalid value.
    """
    store = settings.document.store
    if store is None:
        return MemoryLedger()
    from gateway.store import connections
    from gateway.store.fallback import FallbackLedger
    from gateway.store.redis import RedisLedger

    try:
        connections.validate(store.url)
    except ConfigError as error:
        raise ConfigError(str(settings.problem(("store", "url"), str(error)))) from error
    return FallbackLedger(
        RedisLedger(
            store.url,
            prefix=store.prefix,
            takes_turns=tuple(chain.from_iterable(settings.box_members().values())),
            owner=owner,
        ),
        replicas_min=settings.workers,
    )


def former_accounts(settings: Settings, owner: str) -> "FormerAccounts | None":
    """Return the accounts of a process that has ended, `owner`; None without a store or such a process."""
    store = settings.document.store
    if store is None or not owner:
        return None
    from gateway.store.former import FormerAccounts

    backends = tuple(settings.policy().backends)
    return FormerAccounts(store.url, prefix=store.prefix, owner=owner, backends=backends)


def board(settings: Settings, owner: str) -> "MemoryBoard | RedisBoard":
    """Return the board on which processes agree on the owners of boxes."""
    store = settings.document.store
    if store is None or not settings.document.boxes:
        return MemoryBoard()
    from gateway.store.boards import RedisBoard

    return RedisBoard(store.url, prefix=store.prefix, owner=owner)


def members(
    settings: Settings,
    environ: Mapping[str, str],
    backends: Mapping[str, Backend],
    secrets: Mapping[str, str],
    tls: Mapping[str, ssl.SSLContext | bool],
) -> Mapping[str, Member]:
    """Return how each model of a box is started, stopped and checked."""
    return {
        member: Member(
            backends[member],
            _way(section, settings.box_token(name, member, environ)),
            Canary(**section.canary.model_dump()),
            secrets.get(member),
            tls[member],
            settings.launch_record(name),
        )
        for name, box in settings.document.boxes.items()
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


def box_settle_s(settings: Settings) -> float:
    """Return the minimum drain time of a box, so that no request on its way to it is missed."""
    if settings.document.store is not None:
        return SETTLE_S
    return JOBS_SETTLE_S if settings.jobs_store is not None else 0.0


def response_store(settings: Settings, clock: SystemClock) -> "MemoryResponseStore | RedisResponseStore":
    """Return the store for responses."""
    store, bytes_max = settings.document.store, settings.document.responses.max_bytes_per_key
    if store is None:
        return MemoryResponseStore(clock, bytes_max)
    from gateway.store.responses import RedisResponseStore

    return RedisResponseStore(store.url, prefix=store.prefix, bytes_max=bytes_max)


def idempotency(settings: Settings, clock: SystemClock) -> IdempotencyRules:
    """Return the store for answers by idempotency key, and its rules."""
    section, store = settings.document.idempotency, settings.jobs_store or settings.document.store
    bytes_max = section.max_bytes_per_key
    kept: IdempotencyStore
    if store is None:
        kept = MemoryIdempotency(clock, bytes_max)
    else:
        from gateway.store.idempotency import RedisIdempotency

        kept = RedisIdempotency(store.url, prefix=store.prefix, bytes_max=bytes_max)
    return IdempotencyRules(kept, section.keep_s, section.max_answer_bytes)


def job_store(settings: Settings) -> "RedisJobs | None":
    """Return the store for jobs; None without jobs."""
    store = settings.jobs_store
    if store is None:
        return None
    from gateway.store.jobs import RedisJobs

    return RedisJobs(store.url, prefix=store.prefix)


def webhooks(
    settings: Settings, environ: Mapping[str, str], clock: SystemClock, metrics: Metrics
) -> Webhooks | None:
    """Return what delivers webhooks; None without endpoints."""
    endpoints = settings.webhooks(environ)
    store = settings.jobs_store or settings.document.store
    if not endpoints or store is None:
        return None
    from gateway.store.webhooks import RedisWebhooks
    from gateway.upstream.webhook_calls import WebhookCaller

    metrics.webhooks_known(endpoint.name for endpoint in endpoints)

    def attempted(attempt: WebhookAttempt) -> None:
        logs.webhook_attempted(attempt)
        metrics.webhook_attempted(attempt)

    return Webhooks(
        endpoints,
        RedisWebhooks(store.url, prefix=store.prefix),
        WebhookCaller(clock),
        on_attempt=attempted,
        on_pending=metrics.webhooks_wait,
    )


def tracing(
    settings: Settings,
    environ: Mapping[str, str],
    backends: Callable[[], Mapping[str, Backend]],
    metrics: Metrics,
) -> "Tracing | None":
    """Return what creates and exports traces; None without a receiver."""
    section, otlp = settings.document.telemetry.traces, settings.document.telemetry.otlp
    if section is None or otlp is None:
        return None
    from gateway.telemetry.tracing import Conventions, Sender, TraceRules, Tracing

    rules = TraceRules(
        share=section.share,
        follows_callers=section.follow_callers,
        slow_factor=section.slow_factor,
        slow_total_s=section.slow_total_s,
        conventions=Conventions(section.genai_conventions),
    )
    sender = Sender(otlp.endpoint, settings.otlp_headers(environ))
    return Tracing(
        rules, sender, otlp.service_name, backends, lambda why: metrics.traces.labels(why.value).inc()
    )


def metrics_push(
    settings: Settings, environ: Mapping[str, str], metrics: Metrics, clock: SystemClock
) -> "MetricsPush | None":
    """Return what pushes metrics; None without a receiver."""
    section, otlp = settings.document.telemetry.metrics, settings.document.telemetry.otlp
    if section is None or otlp is None:
        return None
    from gateway.telemetry.otlp_metrics import MetricsPush, sender

    to = sender(otlp.endpoint, settings.otlp_headers(environ))
    return MetricsPush(metrics.registry, to, otlp.service_name, section.interval_s, clock)


def decision_log(settings: Settings, metrics: Metrics, clock: SystemClock) -> DecisionLog | None:
    """Return the decision log; None if it is off.

    Raises:
        ConfigError: the file cannot be written.
    """
    section, file = settings.document.decisions, settings.named.decisions_file
    if section is None or file is None:
        return None
    found = DecisionLog(
        file,
        max_bytes=section.max_bytes,
        files=section.files,
        has_keys=section.key_names,
        clock=clock,
        on_lines=lambda outcome, count: metrics.decisions.labels(outcome).inc(count),
    )
    tell_policy(found, settings, settings.policy())
    return found


def tell_policy(log: DecisionLog | None, settings: Settings, policy: Policy) -> None:
    """Register a policy, which is that of these settings, with the decision log."""
    if log is not None:
        log.policy_in_force(policy, settings.engines(), settings.box_members())


def say_how_it_counts(estimator: PromptEstimator) -> None:
    """Log how prompts are counted, and with which vocabulary."""
    vocabulary = estimator.vocabulary
    if vocabulary is None:
        log.warning(
            "prompts are counted approximately: for exact counts, set `tokenizer: {vocab: FILE}`",
            extra=about("counts_approximately"),
        )
        return
    log.info(
        "vocabulary: %d entries, sha256 %s",
        vocabulary.entries,
        vocabulary.sha256,
        extra=about("vocabulary", entries=vocabulary.entries, sha256=vocabulary.sha256),
    )
    for warning in vocabulary.warnings:
        log.warning("vocabulary: %s", warning, extra=about("vocabulary_doubt", reason=warning))


def health_rules(settings: Settings) -> HealthRules:
    """Return the thresholds of the health state machine."""
    section = settings.document.health
    return HealthRules(
        interval_s=section.interval_s,
        probe_timeout_s=section.timeout_s,
        failures_max=section.failures,
        penalty_s=section.ejection_s,
        penalty_max_s=section.ejection_max_s,
        probation_successes=section.probation_successes,
        hang_s=section.hang_s,
    )


def hang_s(settings: Settings, backend: Backend) -> float:
    """Return how long a backend may be silent before it counts as hung."""
    profile, floor_s = settings.profile(backend.id), settings.document.health.hang_s
    batched = profile.flags.max_num_batched_tokens
    return hang_after_s(profile.perf, batched, backend.capacity.context_tokens, floor_s)


def wire_rules(settings: Settings) -> WireRules:
    """Return what the configuration allows in a request body."""
    section = settings.document.requests
    return WireRules(
        choices_max=section.max_choices,
        remote_media=section.remote_media,
        drop_fields=frozenset(section.drop_fields),
        usage_in_streams=section.usage_in_streams,
    )


class TlsContexts:
    """The SSL contexts for backends. Equal settings with equal files share one, across reloads.

    So the system's certificates are read once, by the start or the reload that first has to verify a backend
    by them: each time takes 20 to 70 ms, in which nothing else happens, and 0.9 MB (OpenSSL 3.0, 144
    authorities).
    """

    def __init__(self) -> None:
        """Start with no contexts."""
        self._known: dict[tuple[BackendTls, tuple[bytes, ...]], ssl.SSLContext] = {}

    def of(self, settings: Settings) -> Mapping[str, ssl.SSLContext | bool]:
        """Return the context per backend. One with an http URL, which needs none, has True or False instead.

        Contexts that are not among these are dropped.

        Raises:
            ConfigError: a file is missing or unusable.
        """
        contexts = {
            name: self._context(name, section.url, settings.named.tls(name))
            for name, section in settings.document.backends.items()
        }
        self._known = {found: one for found, one in self._known.items() if one in contexts.values()}
        return contexts

    def _context(self, backend_id: str, url: str, tls: BackendTls) -> ssl.SSLContext | bool:
        if not tls.verify:
            log.warning(
                "backend %s: its certificate is not verified",
                backend_id,
                extra=about("tls_unverified", backend=backend_id),
            )
        if not tls.files and not url.startswith("https:"):
            return tls.verify
        try:
            found = tls, tuple(file.read_bytes() for file in tls.files)
            if found not in self._known:
                self._known[found] = tls.context()
        except OSError as error:
            raise ConfigError(f"backend {backend_id}: {error.filename}: {error.strerror}") from error
        except ValueError as error:
            raise ConfigError(f"backend {backend_id}: {error}") from error
        return self._known[found]


def backend_keys(settings: Settings, environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return the API keys to send to backends.

    Raises:
        ConfigError: a key is not a valid header value.
    """
    keys = {}
    for name in settings.document.backends:
        key = settings.backend_key(name, environ)
        if key is None:
            continue
        if not carried(key):
            raise ConfigError(f"backend {name}: its API key has a character that no header can carry")
        keys[name] = key
    return keys
