"""Polls every backend and tracks its health: `ports.Fleet`.

Three loops run per backend, each with at most one probe in progress, so that a slow answer to one does not
delay another, and a slow backend is not probed faster than it answers:

    /health                    each interval    may requests be sent? (/v1/models, if there is no such path)
    /metrics                   each interval    running, waiting, KV usage; hangs; restarts
    /v1/models and /version    at first contact, after a restart or a fault, and occasionally

All but /metrics use a new connection for each probe: whether one can be opened is what the next request
depends on. /metrics may reuse a connection, which halves the work, because it is polled often. The result of
a probe becomes an event for the state machine in core/health. An unexpected exception ends `run`, and with
it the process: a fleet that is no longer watched must not continue to look healthy.
"""

import errno
import json
import socket
import ssl
import zlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from types import MappingProxyType

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup

from gateway.core.backends import Backend
from gateway.core.errors import GatewayError, OutOfResources, UpstreamLost, UpstreamUnreachable
from gateway.core.facts import Attempts
from gateway.core.health import (
    NOT_PROBED,
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
    advance,
    awaited,
    put_out,
    usable,
    verdict,
)
from gateway.ports import Clock
from gateway.upstream import backend_clients, exposition
from gateway.upstream.direct import DirectClient
from gateway.upstream.exchanges import Exchanges
from gateway.upstream.faults import NO_SUCH_PATH, causes, tls_fault

PAGE_BYTES_MAX = 4_000_000
"""Maximum bytes read from a probe's answer. A choice: a metrics page of vLLM 0.32 has 72 KB."""

STALE_S = 10.0
"""Older engine metrics say nothing about what the engine does now. A choice: ten of the default intervals."""

HURRY_S = 0.2
"""How long probes in progress may continue when probing ends. A choice: it delays every exit; one that is cut
off costs nothing."""

KEY_REFUSED = (401, 403)
"""The statuses with which a server refuses an API key. Source: RFC 9110, sections 15.5.2 and 15.5.4."""

Listener = Callable[[str, BackendStatus, BackendStatus], None]
"""Receives a backend's id and its status before and after. Must neither raise nor block."""

SampleListener = Callable[[str, EngineSample], None]
"""Receives a backend's id and the latest sample of its engine metrics. Must neither raise nor block."""


class Prober:
    """`ports.Fleet` and `ports.SharedHealth`, fed by probes while `run` runs and by reports at any time."""

    def __init__(
        self,
        backends: Mapping[str, Backend],
        rules: HealthRules,
        clock: Clock,
        *,
        secrets: Mapping[str, str],
        tls: Mapping[str, ssl.SSLContext | bool],
        hang_s: Mapping[str, float] | None = None,
        on_change: Listener | None = None,
        on_sample: SampleListener | None = None,
        on_stale: Callable[[str], None] | None = None,
        awaited_since: Callable[[str], float | None] | None = None,
        silence_s: Callable[[str], float] = lambda _: inf,
    ) -> None:
        """Prepare to probe `backends`; nothing is sent before `run`.

        Args:
            backends: By id. A backend's own boot budget and model override those of `rules`.
            rules: The thresholds of the health state machine.
            clock: Source of times.
            secrets: Per backend id, the API key to send.
            tls: Per backend id, how to verify its certificate; True if missing.
            hang_s: Per backend id, an override of `rules.hang_s`; see `health.hang_after_s`.
            on_change: Called when a state, its reason, the served models, or the sharing of a URL change.
            on_sample: Called with every sample, unless several engines answer by turns.
            on_stale: Called with the id of a backend, once per interval, while it has no recent sample, or
                several engines answer by turns.
            awaited_since: Returns since when an answer of a backend, by id, is waited for; see `Sample`.
            silence_s: Returns for how long no answer in progress of a backend, by id, has brought anything.
        """
        self._clock = clock
        self._on_change = on_change
        self._on_sample = on_sample
        self._on_stale = on_stale
        self._awaited_since = awaited_since
        self._silence_s = silence_s
        self._watched: dict[str, _Watched] = {}
        self._rules: dict[str, HealthRules] = {}
        self._statuses: dict[str, BackendStatus] = {}
        self._served: dict[str, int] = {}  # requests per backend that are not yet part of its status
        self._there_since: dict[str, float] = {}  # per backend, when it got its URL
        self._view = MappingProxyType(self._statuses)
        self._looks: dict[str, anyio.Event] = {}  # set it to query the models at once
        self._doubted: set[str] = set()  # have refused requests: queried with the next probe, not with each
        self._changed = anyio.Event()
        self._tasks: TaskGroup | None = None
        self.update(backends, rules, secrets=secrets, tls=tls, hang_s=hang_s)

    def update(
        self,
        backends: Mapping[str, Backend],
        rules: HealthRules,
        *,
        secrets: Mapping[str, str],
        tls: Mapping[str, ssl.SSLContext | bool],
        hang_s: Mapping[str, float] | None = None,
    ) -> None:
        """Replace the probed backends; arguments as for `__init__`.

        The status of a backend is kept if its URL is unchanged; a new backend starts as unknown.
        """
        for name in set(self._watched) - set(backends):
            self._forget(name)
        for name, backend in backends.items():
            if name in self._rules and self._rules[name].model != backend.model:
                self._looks[name].set()  # its window, and what is wrong with it, are those of another model
            self._rules[name] = replace(
                rules,
                boot_budget_s=backend.boot_budget_s,
                model=backend.model,
                hang_s=(hang_s or {}).get(name, rules.hang_s),
            )
            wanted = _Watched(backend.url, secrets.get(name), tls.get(name, True))
            before = self._watched.get(name)
            if before is not None and before.asks_alike(wanted):
                continue
            if before is not None:
                before.end()
            self._watched[name] = wanted
            if before is None or before.url != backend.url:
                self._statuses[name] = self._anew(self._statuses.get(name, NOT_PROBED))
                self._there_since[name] = self._statuses[name].since
                self._served.pop(name, None)
            self._looks.setdefault(name, anyio.Event())
            if self._tasks is not None:
                self._tasks.start_soon(self._watch, name, wanted, name=f"watch {name}")

    def _anew(self, former: BackendStatus) -> BackendStatus:
        """Return the status of a backend at a URL that it has not had: nothing of before concerns it."""
        # Verdicts are counted on, here and by other gateways: each counts once, though it is repeated.
        now = self._clock.now()
        return BackendStatus(since=now, tried_since=now, verdicts=former.verdicts, heard=former.heard)

    def _forget(self, name: str) -> None:
        self._watched.pop(name).end()
        self._served.pop(name, None)
        self._doubted.discard(name)
        del self._statuses[name], self._rules[name], self._looks[name], self._there_since[name]

    def statuses(self) -> Mapping[str, BackendStatus]:
        """Return the status of every backend by id: a live view, read-only."""
        return self._view

    def report(self, backend_id: str, outcome: Outcome, detail: str, started_at: float) -> None:
        """See `ports.Fleet.report`. Ignored if the backend is no longer probed, or had another URL then."""
        status = self._statuses.get(backend_id)
        if status is None or started_at < self._there_since[backend_id]:
            return
        is_clean = status.state is State.UP and not status.recent_failures and not status.own_failures
        if outcome is Outcome.OK and is_clean:
            self._served[backend_id] = self._served.get(backend_id, 0) + 1  # applied with the next event
        else:
            self._observe(backend_id, Attempt(outcome, detail, started_at))

    def look_again(self, backend_id: str) -> None:
        """See `ports.Fleet.look_again`. Ignored if the backend is no longer probed."""
        if backend_id in self._looks:
            self._doubted.add(backend_id)

    def put_out(self, backend_id: str, reason: str) -> None:
        """See `ports.BoxFleet.put_out`."""
        self._set(backend_id, put_out(self._statuses[backend_id], self._clock.now(), reason))

    def await_boot(self, backend_id: str, reason: str) -> None:
        """See `ports.BoxFleet.await_boot`."""
        self._set(backend_id, awaited(self._statuses[backend_id], self._clock.now(), reason))

    def attempts(self) -> Mapping[str, Attempts]:
        """See `ports.SharedHealth.attempts`."""
        return {
            name: Attempts(self._answered(name), status.failed)
            for name, status in self._statuses.items()
            if status.served or status.failed or name in self._served
        }

    def _answered(self, name: str) -> int:
        return self._statuses[name].served + self._served.get(name, 0)

    def verdicts(self) -> Mapping[str, Verdict]:
        """See `ports.SharedHealth.verdicts`."""
        now = self._clock.now()
        told = {name: verdict(status, now, self._rules[name]) for name, status in self._statuses.items()}
        return {name: one for name, one in told.items() if one is not None}

    def hear(self, backend_id: str, told: PeerVerdict | PeerAttempts) -> None:
        """See `ports.SharedHealth.hear`."""
        if backend_id in self._statuses:
            self._observe(backend_id, told)

    async def wait_for(self, predicate: Callable[[Mapping[str, BackendStatus]], bool]) -> None:
        """Wait until `predicate(statuses())` is true; it is evaluated after every event."""
        while not predicate(self._view):
            await self._changed.wait()

    async def run(self) -> None:
        """Probe until cancelled.

        Raises:
            ExceptionGroup: an unexpected error occurred, which is a bug rather than a backend failure.
        """
        try:
            async with anyio.create_task_group() as self._tasks:
                for name, watched in self._watched.items():
                    self._tasks.start_soon(self._watch, name, watched, name=f"watch {name}")
                await anyio.sleep_forever()
        finally:
            self._tasks = None

    async def _watch(self, name: str, watched: "_Watched") -> None:
        """Probe one backend until it is removed."""
        if watched.is_over:
            return
        async with _Asker(watched) as asker:
            with anyio.CancelScope() as watched.scope:
                async with anyio.create_task_group() as tasks:
                    try:
                        for watch in (self._watch_health, self._watch_metrics, self._watch_models):
                            tasks.start_soon(watch, name, asker, name=f"{watch.__name__} {name}")
                        await anyio.sleep_forever()
                    finally:
                        asker.hurry()

    async def _learn(self, name: str, event: Event) -> None:
        """Apply the result of a probe, unless its backend was removed or has a new URL."""
        await _unless_over()
        self._observe(name, event)

    def _observe(self, name: str, event: Event) -> None:
        status = self._statuses[name]
        served = self._served.pop(name, 0)
        if served:
            status = replace(status, served=status.served + served)
        self._set(name, advance(status, event, self._clock.now(), self._rules[name]))

    def _set(self, name: str, new: BackendStatus) -> None:
        old = self._statuses[name]
        self._statuses[name] = new
        fresh = new.was_up and not old.was_up
        if fresh or new.restarts != old.restarts or (usable(new) and not usable(old)):
            self._looks[name].set()
        changed = (old.state, old.reason, old.served_models) != (new.state, new.reason, new.served_models)
        changed = changed or (old.shared_at is None) != (new.shared_at is None)
        if self._on_change is not None and changed:
            self._on_change(name, old, new)
        self._changed.set()
        self._changed = anyio.Event()

    async def _watch_health(self, name: str, asker: "_Asker") -> None:
        async def probe() -> None:
            if self._statuses[name].state is State.OUT:
                return
            if name in self._doubted:
                self._doubted.discard(name)
                self._looks[name].set()
            asked_at, answered = self._clock.now(), self._answered(name)
            found = await _health(asker, self._rules[name].probe_timeout_s)
            if isinstance(found, ProbeFailed):
                is_heard = self._silence_s(name) < self._clock.now() - asked_at
                found = replace(found, is_answering=is_heard or self._answered(name) > answered)
            await self._learn(name, found)

        await self._paced(name, "health", probe)

    async def _watch_metrics(self, name: str, asker: "_Asker") -> None:
        async def scrape() -> None:
            status = self._statuses[name]
            if status.down_since is None and status.state is not State.OUT:  # otherwise it is not reachable
                found = await _sample(asker, self._rules[name].scrape_timeout_s, self._clock)
                if self._awaited_since is not None and isinstance(found, Sample):
                    found = replace(found, awaited_since=self._awaited_since(name))
                await self._learn(name, found)
                is_shared = self._statuses[name].shared_at is not None
                if self._on_sample is not None and isinstance(found, Sample) and not is_shared:
                    self._on_sample(name, found.engine)
            if self._on_stale is not None and self._is_unsampled(self._statuses[name]):
                self._on_stale(name)

        await self._paced(name, "metrics", scrape)

    def _is_unsampled(self, status: BackendStatus) -> bool:
        """Return whether nothing tells what the engine does now."""
        engine = status.engine
        return engine is None or status.shared_at is not None or self._clock.now() - engine.at > STALE_S

    async def _watch_models(self, name: str, asker: "_Asker") -> None:
        await _unless_over()
        wait_s = self._rules[name].models_every_s
        while True:
            with anyio.move_on_after(wait_s):
                await self._looks[name].wait()
            await _unless_over()
            self._looks[name] = anyio.Event()
            status, rules = self._statuses[name], self._rules[name]
            if status.was_up and status.down_since is None:
                found = await _models(asker, rules)
                await self._learn(name, found)
                is_told = isinstance(found, ProbeOk) and found.version is not None
                is_right = is_told and not self._statuses[name].model_error
                wait_s = rules.models_every_s if is_right else rules.models_every_s / 10

    async def _paced(self, name: str, what: str, step: Callable[[], Awaitable[None]]) -> None:
        """Run `step` once per interval, or less often if it takes longer than that."""
        round_ = 0
        while True:
            await _unless_over()
            started = self._clock.now()
            pause_s = self._rules[name].interval_s * spread(f"{name} {what}", round_)
            await step()
            await anyio.sleep(max(pause_s - (self._clock.now() - started), pause_s / 10))
            round_ += 1


async def _unless_over() -> None:
    """Raise if this task was cancelled, because the backend was removed.

    A task whose sleep has just ended runs once more before the cancellation reaches it.
    """
    await anyio.lowlevel.checkpoint_if_cancelled()


def spread(key: str, round_: int) -> float:
    """Return a deterministic jitter factor in 0.9..1.1, so that the probes of backends spread out."""
    return 0.9 + 0.2 * zlib.crc32(f"{key} {round_}".encode()) / 2**32


@dataclass(slots=True)
class _Watched:
    """The probe settings of one backend, and the cancel scope of its probe tasks."""

    url: str
    secret: str | None
    verify: ssl.SSLContext | bool
    scope: anyio.CancelScope | None = None
    is_over: bool = False

    def end(self) -> None:
        """Stop probing."""
        self.is_over = True
        if self.scope is not None:
            self.scope.cancel()

    def asks_alike(self, other: "_Watched") -> bool:
        """Return whether both probe the same server in the same way. SSL contexts compare by identity."""
        return (self.url, self.secret, self.verify) == (other.url, other.secret, other.verify)


# ------------------------------------------------------------------ one probe


class _Unexpected(Exception):
    """A probe did not end in a 200. The text never contains a header or a body."""

    def __init__(self, kind: ProbeFault, detail: str, status: int = 0) -> None:
        super().__init__(detail)
        self.kind = kind
        self.detail = detail
        self.status = status


class _Asker:
    """Sends probes to one backend, each on a new connection unless it may be `kept`."""

    def __init__(self, watched: _Watched) -> None:
        self._client = DirectClient(watched.url, watched.secret, watched.verify)
        self._has_key = watched.secret is not None
        self._exchanges = Exchanges()

    async def __aenter__(self) -> "_Asker":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._client.aclose()

    async def get(self, path: str, timeout_s: float, *, kept: bool = False) -> bytes:
        """Return the body of a 200 response. `timeout_s` bounds the whole exchange. Raises _Unexpected."""
        body = await self._exchanges.run(partial(self._exchange, path, kept=kept), timeout_s)
        if body is None:
            raise _Unexpected(ProbeFault.TIMEOUT, f"no answer in {timeout_s:g} s")
        return body

    def key_hint(self, status: int) -> str:
        """Return what to know of the API key, in brackets, if the server has refused it; else nothing."""
        if status not in KEY_REFUSED:
            return ""
        refused, wanted = "it refuses the backend's API key", "it wants an API key: `api_key_env`"
        return f" ({refused if self._has_key else wanted})"

    def hurry(self) -> None:
        """Limit probes in progress to `HURRY_S` more seconds, because probing ends."""
        self._exchanges.hurry(HURRY_S)

    async def _exchange(self, path: str, *, kept: bool) -> bytes:
        try:
            status, body = await self._client.get(path, PAGE_BYTES_MAX, kept=kept)
        except GatewayError as error:
            raise _unexpected(error) from error
        if status != 200:
            kind = ProbeFault.LIMITED if status == 429 else ProbeFault.STATUS
            raise _Unexpected(kind, f"HTTP {status}", status)
        if len(body) > PAGE_BYTES_MAX:
            raise _Unexpected(ProbeFault.BROKEN, f"more than {PAGE_BYTES_MAX} bytes")
        return body


async def _health(asker: _Asker, timeout_s: float) -> ProbeOk | ProbeFailed:
    try:
        await asker.get("/health", timeout_s)
    except _Unexpected as error:
        if error.status in NO_SUCH_PATH:  # as Ollama: it is well if it lists its models
            return await _health_by_list(asker, timeout_s, f"/health: {error.detail}")
        detail = f"/health: {error.detail}" if error.status else error.detail
        return ProbeFailed(error.kind, detail)
    return ProbeOk()


async def _health_by_list(asker: _Asker, timeout_s: float, before: str) -> ProbeOk | ProbeFailed:
    try:
        await _listed(asker, timeout_s, None)
    except _Unexpected as error:
        is_nowhere = error.status in NO_SUCH_PATH
        hint = " (is its URL that of an engine?)" if is_nowhere else asker.key_hint(error.status)
        return ProbeFailed(error.kind, f"{before}, /v1/models: {error.detail}{hint}")
    return ProbeOk()


async def _sample(asker: _Asker, timeout_s: float, clock: Clock) -> Sample | SampleFailed:
    try:
        page = await asker.get("/metrics", timeout_s, kept=True)
        return Sample(exposition.sample(page, clock.now()))
    except _Unexpected as error:
        return SampleFailed(error.detail)
    except ValueError as error:
        return SampleFailed(str(error))


async def _models(asker: _Asker, rules: HealthRules) -> ProbeOk | ModelsFailed:
    try:
        models, context_tokens = await _listed(asker, rules.scrape_timeout_s, rules.model)
    except _Unexpected as error:
        detail = f"/v1/models: {error.detail}{asker.key_hint(error.status)}"
        return ModelsFailed(detail, key_refused=error.status in KEY_REFUSED)
    return ProbeOk(models, context_tokens, await _version(asker, rules))


async def _listed(asker: _Asker, timeout_s: float, wanted: str | None) -> tuple[tuple[str, ...], int | None]:
    """Return the served names, and a window; see `_read_models`. Raises _Unexpected."""
    page = await asker.get("/v1/models", timeout_s)
    try:
        return _read_models(page, wanted)
    except (ValueError, RecursionError):
        raise _Unexpected(ProbeFault.STATUS, "no list of models") from None


async def _version(asker: _Asker, rules: HealthRules) -> str | None:
    """Return the engine's version; "" if it reports none; None if that cannot be told now."""
    try:
        return _read_version(await asker.get("/version", rules.scrape_timeout_s))
    except _Unexpected as error:
        return "" if error.status in NO_SUCH_PATH else None  # other engines do not have it
    except (ValueError, RecursionError):
        return ""


def _read_models(body: bytes, wanted: str | None) -> tuple[tuple[str, ...], int | None]:
    """Return the served names, and the window of `wanted`; None: of the first model. Raises ValueError."""
    document = json.loads(body)
    entries = document.get("data", False) if isinstance(document, dict) else False
    if entries is not None and not isinstance(entries, list):
        raise ValueError
    windows = {
        entry["id"]: entry.get("max_model_len") or _slot_tokens(entry.get("meta"))
        for entry in entries or ()  # None: Ollama has no model
        if isinstance(entry, dict) and isinstance(entry.get("id"), str)
    }
    window = windows.get(wanted) if wanted is not None else next(iter(windows.values()), None)
    return tuple(windows), window if isinstance(window, int) and window > 0 else None


def _slot_tokens(meta: object) -> object:
    """Return the window per slot of llama.cpp's server, which reports it in this field."""
    return meta.get("n_ctx") if isinstance(meta, dict) else None


def _read_version(body: bytes) -> str:
    """Return the version, or "". Raises ValueError."""
    document = json.loads(body)
    version = document.get("version") if isinstance(document, dict) else None
    return version[:64] if isinstance(version, str) else ""


def _unexpected(error: GatewayError) -> _Unexpected:
    """Classify an error of the client by its kind and its causes, none of which quotes a header."""
    if fault := tls_fault(error):
        return _Unexpected(ProbeFault.TLS, fault)
    if isinstance(error, OutOfResources):
        return _Unexpected(ProbeFault.OURS, "this gateway has no file descriptors left")
    if isinstance(error, UpstreamLost):
        return _Unexpected(ProbeFault.BROKEN, "the connection was closed without an answer")
    if not isinstance(error, UpstreamUnreachable):
        is_encoded = error.message == backend_clients.ENCODED
        what = "is compressed" if is_encoded else "is not HTTP, or was cut"
        return _Unexpected(ProbeFault.BROKEN, f"an answer that {what}")
    for cause in causes(error.__cause__):
        match cause:
            case ConnectionRefusedError():
                return _Unexpected(ProbeFault.REFUSED, "connection refused")
            case socket.gaierror():
                return _Unexpected(ProbeFault.UNRESOLVED, "its host name does not resolve")
            case OSError(errno=errno.EHOSTUNREACH | errno.ENETUNREACH | errno.EHOSTDOWN):
                return _Unexpected(ProbeFault.UNREACHABLE, "no route to its host")
            case UnicodeError():  # "xn--"
                return _Unexpected(ProbeFault.BROKEN, "the host name in its URL is invalid")
            case ValueError():
                return _Unexpected(ProbeFault.BROKEN, "its API key cannot be sent: it holds a line break")
    return _Unexpected(ProbeFault.BROKEN, "cannot connect")
