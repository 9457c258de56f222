"""What-if decisions for a request: under the current policy or another, on the live fleet or an idle one.

Uses the gateway's own decision code, without sending anything.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace

from gateway.core import admission, classification, deciding, selection
from gateway.core.decision import Decision
from gateway.core.errors import CallerError, GatewayError, Unauthorized
from gateway.core.policy import Policy, TrafficClass
from gateway.core.request import Endpoint, Estimate, Request
from gateway.core.request_features import matched_headers
from gateway.core.selection import BackendView, counts_cached
from gateway.core.value import valueclass
from gateway.core.waiting import Reason, Refused, Ticket, WaitingLine, fastest_prefill_s, would_stay
from gateway.downstream import response_requests, wire
from gateway.downstream.chat_jobs import ChatJobs, can_be_a_job
from gateway.downstream.explain_routes import Question, RequestForgotten
from gateway.downstream.operator_json import indented
from gateway.downstream.reading import Received
from gateway.parts import wire_rules
from gateway.pipeline import FleetView, patience_s, shed_error
from gateway.ports import Arrival, Clock, Estimator
from gateway.reload import Reloader
from gateway.settings import Settings
from gateway.telemetry.journal import Journal
from gateway.threads import beside

_NOW = Arrival("req-explained", 0.0, 0.0)
_NO_BACKEND = Refused("", Reason.NO_BACKEND, position=1, expected_wait_s=None, retry_after_s=1.0)
_JOB = (
    "it runs as a job, which waits in the queue for as long as it takes, "
    "and starts where jobs may (`jobs` of the pool)."
)
_QUEUED = f"Its class has a `queue`: {_JOB}"
_BACKGROUND = f"It asks for `background`: {_JOB}"
_PREFERRED = f"It prefers `respond-async`: {_JOB}"
_REFERS = (
    "It continues a conversation, or refers to items, that are kept for its caller. They are not counted "
    "here, so the prompt is longer than this."
)


@valueclass(frozen=True, slots=True)
class ClassVerdict:
    """The verdict on one class of the model: whether it matched, and why or why not."""

    name: str
    matched: bool
    why: str


@valueclass(frozen=True, slots=True)
class Refusal:
    """The error the gateway would return. Alone, it is one that it returns before considering any backend."""

    status: int
    code: str
    message: str

    def as_json(self) -> str:
        """Encode as JSON."""
        return json.dumps({"refused": asdict(self)}, indent=2)


@valueclass(frozen=True, slots=True)
class Outlook:
    """The queue in front of the request.

    Attributes:
        waiting: Number of waiting requests, of any class with the same first pool, that come before it.
        expected_wait_s: Expected wait; 0 if it starts at once; None if it is unknown.
        max_wait_s: How long its class lets it wait, or its caller if that is less (`x-gateway-timeout-s`);
            None: for as long as it takes, as a job.
    """

    waiting: int
    expected_wait_s: float | None
    max_wait_s: float | None


@valueclass(frozen=True, slots=True)
class Explanation:
    """A decision and its explanation.

    Attributes:
        classes: All classes of the model, in order.
        decision: The eligible backends and the reasons.
        dropped: Members of the body that are not forwarded.
        policy: Version of the configuration that was applied.
        fleet: "idle": as configured, healthy and empty; "live": in its current state.
        outlook: The queue in front of it; None on an idle fleet.
        changes: Differences of that configuration from the one in force.
        notes: Limits of this explanation, in sentences.
        is_queued: Whether the request is a job served in place, which also waits for a backend that is away.
        refused: The error the gateway would return, as none of these backends could take it, or not in time.
    """

    classes: tuple[ClassVerdict, ...]
    decision: Decision
    dropped: tuple[str, ...] = ()
    policy: str = ""
    fleet: str = "idle"
    outlook: Outlook | None = None
    changes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    is_queued: bool = False
    refused: Refusal | None = None

    def as_json(self) -> str:
        """Encode as JSON."""
        return indented(self).decode()


@valueclass(frozen=True, slots=True)
class Asked:
    """A parsed request.

    Attributes:
        incoming: What is decided on; a chat if it is one for /v1/responses.
        notes: What is unknown about it, in sentences.
        job: Why it runs as a job, in a sentence; "" if it does not; None if that depends on its class.
    """

    incoming: wire.WireRequest
    notes: tuple[str, ...] = ()
    job: str | None = None


def read(
    settings: Settings,
    body: bytes,
    *,
    key: str | None,
    headers: Mapping[str, str],
) -> Asked:
    """Parse a request like the gateway; for which endpoint it is follows from its members.

    Raises:
        CallerError: it would be rejected, or no API key has that name.
    """
    if key is not None and key not in (named := settings.document.keys or {}):
        there_are = f"there are {', '.join(named)}" if named else "it has no `keys`"
        raise Unauthorized(f"The configuration names no API key {key!r}; {there_are}.")
    received, rules = Received(_NOW, body, key, headers or {}, ()), wire_rules(settings)
    has_jobs = settings.document.jobs is not None
    members = wire.members_of(body, values_max=len(body))  # how many there may be depends on the endpoint
    if "messages" not in members and "input" in members:
        found = response_requests.read_alone(received, rules, has_jobs=has_jobs)
        incoming, notes = found.incoming, (_REFERS,) if found.refers else ()
        return Asked(incoming, notes, _BACKGROUND if found.is_background else "")
    if "messages" not in members and "prompt" in members:
        return Asked(wire.read(Endpoint.COMPLETIONS, received, rules), job="")
    chat = wire.read(Endpoint.CHAT, received, rules)
    if has_jobs and ChatJobs.wants_job(chat):
        return Asked(chat, job=_PREFERRED)
    return Asked(chat, job=None if can_be_a_job(chat) else "")


def decided(
    policy: Policy,
    request: Request,
    estimate: Estimate,
    views: Mapping[str, BackendView],
    *,
    now: float = 0.0,
    job: str | None = None,
) -> Explanation:
    """Return the decision for a request, with the verdict on every class. `job`: see `Asked`.

    `now`: in monotonic seconds; any on an idle fleet, of which no backend is out of service.

    Raises:
        CallerError: the gateway would reject it before considering backends.
    """
    model = deciding.model_of(policy, request.model)
    traffic_class, decision = deciding.decide(policy, model, request, estimate, lambda _: views)
    verdicts = [
        ClassVerdict(one.name, matched=True, why=decision.class_reason)
        if one is traffic_class
        else ClassVerdict(
            one.name,
            matched=False,
            why=classification.mismatch(model, one, request, estimate)
            or "would match, but an earlier class already does",
        )
        for one in model.classes
    ]
    if job is None:
        job = _QUEUED if _is_queued(traffic_class, request) else ""
    error: GatewayError | None = deciding.refusal(traffic_class, decision, views)
    if error is None and not job and not decision.candidates.may_start:
        tried = selection.with_trials(views, now)
        on_trial = selection.ranking(policy, traffic_class, decision.demand, tried)
        if on_trial.first is None:
            error = shed_error(_NO_BACKEND)
        else:
            decision = replace(decision, candidates=on_trial)
    return Explanation(
        tuple(verdicts),
        decision,
        policy=policy.version,
        notes=(job,) if job else (),
        is_queued=bool(job),
        refused=None if error is None else _as_refusal(error),
    )


def _as_refusal(error: GatewayError) -> Refusal:
    return Refusal(error.status, error.code, error.message)


def _is_queued(traffic_class: TrafficClass, request: Request) -> bool:
    return traffic_class.queue is not None and request.endpoint is Endpoint.CHAT


class WhatIf:
    """Answers `POST /admin/explain` for the live fleet."""

    def __init__(
        self,
        *,
        settings: Callable[[], Settings],
        policy: Callable[[], Policy],
        reloader: Reloader,
        view: FleetView,
        line: WaitingLine,
        estimator: Estimator,
        journal: Journal,
        clock: Clock,
    ) -> None:
        """Wire up the parts of a running gateway; `settings` and `policy` return those in force."""
        self._settings = settings
        self._policy = policy
        self._reloader = reloader
        self._view = view
        self._line = line
        self._estimator = estimator
        self._journal = journal
        self._clock = clock

    async def explain(self, question: Question) -> Explanation | Refusal:
        """Return the explained decision, or the error that would be returned instead.

        Raises:
            ConfigError: the given configuration is invalid.
            RequestForgotten: the record of the given request is no longer kept.
        """
        settings, policy, changes = self._settings(), self._policy(), tuple[str, ...]()
        if question.config is not None:
            source = question.config.encode("utf-8", "replace")
            settings, reload = await self._reloader.preview(source, question.config_name)
            policy = await beside(settings.policy)
            changes = (*reload.changes.now, *(f"{name}: needs a restart" for name in reload.changes.at_start))
        try:
            if question.request_id:
                found = self._again(policy, question.request_id)
            else:
                found = await self._anew(settings, policy, question)
        except RequestForgotten:
            raise
        except CallerError as error:
            return _as_refusal(error)
        return replace(found, fleet="live", changes=changes)

    async def _anew(self, settings: Settings, policy: Policy, question: Question) -> Explanation:
        headers = {name.lower(): value for name, value in question.headers.items()}
        asked = read(settings, bytes(question.request), key=question.key or None, headers=headers)
        request = asked.incoming.request
        model = deciding.model_of(policy, request.model)
        prompt = deciding.prompt_of(policy, asked.incoming)
        estimate = await self._estimator.estimate(prompt, model.template, policy.window_tokens)
        views, notes = self._views(policy, self._view.held(self._policy(), request.prefixes))
        wait_s = None if asked.job else patience_s(request.headers)
        found = self._decided(
            policy, request, estimate, views, wait_s, asked.incoming.size_bytes, job=asked.job
        )
        told = (*found.notes, *asked.notes, *notes)
        return replace(found, dropped=tuple(asked.incoming.dropped), notes=told)

    def _again(self, policy: Policy, request_id: str) -> Explanation:
        record = self._journal.find(request_id)
        if record is None or record.asked is None or record.decision is None:
            message = "That request is not kept by this process, or too little of it to decide it again."
            raise RequestForgotten(message)
        request = record.asked.request(record.key)
        views, notes = self._views(policy, _held(record.decision))
        wait_s = None if request.is_job else record.asked.patience_s
        found = self._decided(policy, request, record.asked.estimate, views, wait_s, record.asked.size_bytes)
        return replace(found, notes=(*found.notes, *self._unkept(policy, request), *notes))

    def _decided(
        self,
        policy: Policy,
        request: Request,
        estimate: Estimate,
        views: Mapping[str, BackendView],
        wait_s: float | None,
        size_bytes: int,
        *,
        job: str | None = None,
    ) -> Explanation:
        """Return the decision and its outlook. `wait_s`: how long its caller lets it wait, if it says so."""
        found = decided(policy, request, estimate, views, now=self._clock.now(), job=job)
        outlook, refused = self._outlook(policy, request, found, views, wait_s, size_bytes)
        if refused is None and (note := _stays(found.decision, views, outlook.max_wait_s)):
            found = replace(found, notes=(*found.notes, note))
            outlook = replace(
                outlook, expected_wait_s=outlook.expected_wait_s or None
            )  # what runs there may end
        return replace(found, outlook=outlook, refused=found.refused or refused)

    def _views(
        self, policy: Policy, held: Mapping[str, float]
    ) -> tuple[Mapping[str, BackendView], tuple[str, ...]]:
        """Return the current state of a policy's backends, and notes on what is unknown about them."""
        known, idle = self._view.for_operators(self._policy(), held), deciding.idle(policy)
        views, unknown = {}, []
        for name, backend in policy.backends.items():
            view = known.get(name)
            if view is None or (view.backend.url, view.backend.model) != (backend.url, backend.model):
                unknown.append(name)
                views[name] = idle[name]
                continue
            share_max = admission.WHOLE if policy.tpot_target_s(name) is None else view.share_max
            views[name] = replace(view, backend=backend, share_max=share_max)
        if not unknown:
            return views, ()
        return views, (f"Not in the running fleet, so assumed to be idle and healthy: {', '.join(unknown)}.",)

    def _unkept(self, policy: Policy, request: Request) -> Sequence[str]:
        """Return notes on what is unknown about a past request."""
        notes = [
            "Decided again from what is kept of the request: its estimated length, its key and its features. "
            "The text is not kept, so the length is not counted again. The fleet is as it is now."
        ]
        missing = set(matched_headers(policy, request.model)) - set(
            matched_headers(self._policy(), request.model)
        )
        if missing:
            names = ", ".join(sorted(missing))
            notes.append(f"Headers that the policy in force has no conditions on are not kept: {names}.")
        return notes

    def _outlook(
        self,
        policy: Policy,
        request: Request,
        found: Explanation,
        views: Mapping[str, BackendView],
        wait_s: float | None,
        size_bytes: int,
    ) -> tuple[Outlook, Refusal | None]:
        """Return the queue in front of a request, and the error if it would be refused for the wait in it."""
        decision, line, now = found.decision, self._line, self._clock.now()
        model = deciding.model_of(policy, decision.model)
        (its,) = (one for one in model.classes if one.name == decision.traffic_class)
        limits_s = [] if found.is_queued else [its.waiting.longest_wait_s]
        most_s = min(limits_s if wait_s is None else [*limits_s, wait_s], default=None)
        ticket = Ticket(
            id="",
            model=decision.model,
            policy=policy,
            traffic_class=its,
            demand=decision.demand,
            key=request.key,
            arrived_at=now,
            prefill_s=fastest_prefill_s(policy, its.pools[0], decision.demand),
            size_bytes=size_bytes,
            deadline=None if wait_s is None else now + wait_s,
            prefix_shares={name: view.prefix_share for name, view in views.items() if view.prefix_share},
        )
        foreseen = line.foresee(ticket, now, views, decision.candidates)
        starts = decision.candidates.first is not None
        expected_s = None if foreseen.wait_s is None else round(foreseen.wait_s, 2)
        outlook = Outlook(foreseen.ahead, 0.0 if starts and not foreseen.ahead else expected_s, most_s)
        if found.is_queued or foreseen.refused is None or (starts and not foreseen.is_behind):
            return outlook, None
        return outlook, _as_refusal(shed_error(foreseen.refused))


def _stays(decision: Decision, views: Mapping[str, BackendView], most_s: float | None) -> str:
    """Return that a request waits for the busy backend that has its conversation; "" if it does not."""
    shares = {name: view.prefix_share for name, view in views.items() if view.prefix_share}
    free = decision.candidates.eligible
    if not shares or not free or not counts_cached(decision.demand):
        return ""
    found, seconds = would_stay(free, decision.candidates, shares)
    if not found:
        return ""
    up_to_s = seconds if most_s is None else min(seconds, most_s / 2)
    return (
        f"{found[0].backend} has its conversation: it waits for that one for up to {up_to_s:.1f} s, "
        f"though {free[0].backend} has room."
    )


def _held(decision: Decision) -> Mapping[str, float]:
    """Return the prefix shares that a past decision used, for the backends it scored."""
    return {one.backend: one.scores.get("prefix_affinity", 0.0) for one in decision.candidates}
