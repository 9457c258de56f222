"""The request pipeline: the order of the steps, and the lifetime of everything a request holds.

A single coroutine owns the slot, the upstream stream and the downstream connection as nested scopes. When
the caller disconnects, the coroutine is cancelled and all three are released.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from math import inf

import anyio
from anyio.abc import TaskGroup

from gateway.cohort import Cohort
from gateway.core import deciding
from gateway.core.count_check import CountTracker
from gateway.core.decision import Candidate, Decision, Objection
from gateway.core.drift import DriftTracker
from gateway.core.errors import (
    NOTHING_RAN,
    AnswerUnfit,
    AtCapacity,
    BodyRefused,
    Draining,
    GatewayError,
    NoBackend,
    OutOfResources,
    ShedError,
    StreamBroken,
    UpstreamBusy,
    UpstreamError,
    is_out_of_resources,
    let_go,
)
from gateway.core.estimation import is_plain
from gateway.core.health import Outcome, served_name
from gateway.core.policy import ModelPolicy, Policy
from gateway.core.request import Endpoint, Estimate, Prefixes
from gateway.core.selection import CACHED_MIN_TOKENS
from gateway.core.usage import Ending
from gateway.core.waiting import Ticket, WaitingLine, fastest_prefill_s, patient
from gateway.pipeline.attempt import Attempt
from gateway.pipeline.caller import (
    SSE_HEADERS,
    CallerStalled,
    KeepAlive,
    patience_s,
    stalled_detail,
    while_caller_reads,
)
from gateway.pipeline.deadline import Deadlines
from gateway.pipeline.failures import Failures
from gateway.pipeline.first_tokens import FirstTokens
from gateway.pipeline.fleet_view import FleetView
from gateway.pipeline.request_context import RequestContext
from gateway.pipeline.waiting_room import PolicyChanged, WaitingRoom
from gateway.pipeline.watch import BackendWatch
from gateway.ports import (
    Clock,
    Downstream,
    Estimator,
    Fleet,
    Incoming,
    Ledger,
    PrefixIndex,
    Recorder,
    Slot,
    Upstream,
)

NO_WAIT_S = 0.001
"""A request that got a slot in less than this counts as not having waited. A choice: a command to the store
may take as long."""

_NO_BACKENDS: frozenset[str] = frozenset()


class Pipeline:
    """Runs requests. One per process; per-request state ends with the request.

    Attributes:
        view: The fleet as decisions see it.
        room: Where requests queue. Its `run` must be running while requests are served.
        watch: Per-backend measurements. Its `run` must be running too.
        first_tokens: Predicts first tokens that cannot be observed. Its `run` must be running too.
        cohort: The requests that are ready.
    """

    def __init__(
        self,
        *,
        policy: Callable[[], Policy],
        estimator: Estimator,
        ledger: Ledger,
        fleet: Fleet,
        upstream: Upstream,
        prefixes: PrefixIndex,
        drift: DriftTracker,
        counts: CountTracker,
        watch: BackendWatch,
        line: WaitingLine,
        recorder: Recorder,
        clock: Clock,
        objections: Callable[[], Mapping[str, Objection]],
        cohort: Cohort,
    ) -> None:
        """Wire up the ports.

        `policy` returns the current policy; a request keeps the policy it started with. `objections` returns,
        for backends whose machine is shared by several models, why a backend is not serving at the moment.
        `cohort` is the one that `upstream` writes for.
        """
        self._policy = policy
        self._estimator = estimator
        self._ledger = ledger
        self._upstream = upstream
        self._prefixes = prefixes
        self._drift = drift
        self._recorder = recorder
        self._clock = clock
        self._running: dict[str, set[Attempt]] = {}
        self._deadlines: Deadlines | None = None  # of the event loop in which requests run
        self.cohort = cohort
        self.watch = watch
        self._failures = Failures(fleet, clock, lambda: self.room.look())
        self.view = FleetView(
            policy(),
            fleet=fleet,
            ledger=ledger,
            watch=watch,
            counts=counts,
            prefixes=prefixes,
            objections=objections,
            failures=self._failures,
            line=line,
            clock=clock,
        )
        self.room = WaitingRoom(line, ledger, self.view.for_line, clock, cohort)
        watch.on_share_raised(self.room.look)
        self.first_tokens = FirstTokens(ledger, clock)
        self._is_ending = False  # a cancelled request does not mean that its caller has left

    async def run(
        self,
        incoming: Incoming,
        downstream: Downstream,
        estimate: Estimate | None = None,
        *,
        on_admitted: Callable[[bool], None] | None = None,
    ) -> None:
        """Serve one request to completion.

        Args:
            incoming: The request.
            downstream: Where its response goes.
            estimate: Its prompt length, if already known.
            on_admitted: Called with True whenever the request has been given a slot: once per attempt; with
                False if it waits for one again, because its backend has refused it for load.

        Raises:
            GatewayError: nothing was sent to the caller yet; `headers` of the error describe the decision.
            CallerStalled, OSError: the caller is gone or no longer reads; close its connection.
        """
        context = RequestContext(incoming, downstream, self._policy(), on_admitted)
        self.cohort.size += 1
        try:
            await self.cohort.catch_up()
            ticket = await self._decide(context, estimate)
            silent_s = ticket.traffic_class.waiting.keep_alive_after_s
            if silent_s is None or not incoming.request.stream:
                await self._place(context, ticket)
            else:
                await self._place_with_comments(context, ticket, ticket.arrived_at + silent_s)
            if context.ending is Ending.COMPLETED:  # a caller that leaves meanwhile changes any other ending
                await self.cohort.catch_up()
        except GatewayError as error:
            context.status, context.error_code = error.status, error.code
            context.ending = _ending_of(error)
            error.headers = (*context.headers(), *error.headers)
            if error.retry_after_s is None and (again_s := self._failures.again_s(context)) is not None:
                error.retry_after(again_s)
            raise
        except (anyio.get_cancelled_exc_class(), CallerStalled, OSError):
            self._note_cancelled(context)
            raise
        except Exception as error:
            kind = OutOfResources if is_out_of_resources(error) else GatewayError
            context.ending = Ending.BROKEN if context.status else Ending.FAILED
            context.status, context.error_code = context.status or kind.status, kind.code
            raise
        finally:
            self.cohort.size -= 1
            self._failures.judge(context)
            self._recorder.finished(context.record(self._clock.now()))

    def _note_cancelled(self, context: RequestContext) -> None:
        """Record why a request was cancelled: its caller left, or this process is shutting down.

        A job interrupted by a shutdown returns to the queue, so nothing is lost.
        """
        if context.attempts and context.attempts[-1].outcome is Outcome.OK:
            if context.ending is not Ending.COMPLETED:  # it had everything
                context.ending = Ending.COMPLETED
                self._learn(context)
            return
        context.ending, context.error_code = Ending.LEFT, ""  # an error event of a broken stream was not read
        if self._is_ending and not context.incoming.request.is_job:
            is_begun = bool(context.status)
            context.ending = Ending.BROKEN if is_begun else Ending.FAILED
            context.error_code = StreamBroken.code if is_begun else Draining.code

    def policy_changed(self) -> None:
        """Apply a new policy: queued requests are decided again, requests in flight continue.

        Backends that the new policy removes are forgotten, and receive no further requests.
        """
        self.view.use(self._policy())
        self.room.redecide()

    async def decision_for(self, incoming: Incoming, estimate: Estimate | None = None) -> Decision:
        """Return the decision for a request without running it. `estimate`: see `run`.

        Raises:
            CallerError: no backend could ever take it.
            ShedError: its tokens cannot be counted at the moment.
        """
        policy, request = self._policy(), incoming.request
        model = deciding.model_of(policy, request.model)
        if estimate is None:
            estimate = await self._estimated(policy, model, incoming)
            policy = self._policy()  # it may have changed while tokens were counted
            model = deciding.model_of(policy, request.model)
        decision, ticket = self._decided(policy, model, incoming, estimate)
        self._check_fit(decision, ticket)
        return decision

    def end(self) -> None:
        """End all requests, because this process is shutting down: each caller is told, and may retry.

        Jobs that run are left to their worker, which returns them: to be cut would be a failure of theirs.
        """
        self._is_ending = True
        self.room.close()
        for attempt in tuple(chain.from_iterable(self._running.values())):
            if not attempt.is_job:
                attempt.cut()

    def abort_attempts(self, backend_id: str, silence_s: float) -> None:
        """Abort all unanswered attempts on a backend, so that their requests are retried elsewhere.

        Called when health checks find that the backend is lost, for example because it hangs. Answers that
        have begun end if the backend is silent for another `silence_s`.
        """
        for attempt in tuple(self._running.get(backend_id, ())):
            attempt.give_up(silence_s)

    def awaited_since(self, backend_id: str) -> float | None:
        """Return since when a request waits for its first token from a backend, in monotonic seconds.

        That of the one that has waited longest; None if none does.
        """
        waits = [attempt.awaited_since for attempt in self._running.get(backend_id, ())]
        return min((since for since in waits if since is not None), default=None)

    def silence_s(self, backend_id: str) -> float:
        """Return for how long no stream from a backend has brought anything, in seconds; `inf` if none is."""
        running = self._running.get(backend_id, ())
        return min((attempt.silence_s for attempt in running), default=inf)

    def forget_prefixes(self, backend_id: str) -> None:
        """Take it that a backend has no conversation in its prefix cache: it has ended, or keeps none."""
        self._prefixes.forget(backend_id)
        self.room.line.forget_prefixes(backend_id)

    async def _place_with_comments(self, context: RequestContext, ticket: Ticket, since: float) -> None:
        """Like `_place`, but sends SSE comments from `since` (monotonic seconds) to the first token.

        Once the first comment is sent, the status code is fixed and a failure becomes an SSE event.
        """
        comments = context.keep_alive = KeepAlive(
            partial(context.open, 200, SSE_HEADERS), context.downstream.send
        )
        failure: Exception | None = None

        async def comment(tasks: TaskGroup) -> None:
            nonlocal failure
            try:
                await comments.run(max(0.0, since - self._clock.now()))
            except CallerStalled as error:
                failure, context.cancelled_detail = error, stalled_detail()
                tasks.cancel_scope.cancel()
            except OSError:
                pass  # the caller is gone; the downstream scope notices and cancels this request

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(comment, tasks)
            try:
                await self._place(context, ticket)
            except (GatewayError, CallerStalled, OSError) as error:
                failure = error
            await comments.stop()
            tasks.cancel_scope.cancel()
        if isinstance(failure, GatewayError) and context.status:
            context.ending, context.error_code = _ending_of(failure), failure.code
            await self._end_with(context, failure)
        elif failure is not None:
            raise failure

    async def _place(self, context: RequestContext, ticket: Ticket) -> None:
        """Get a slot and relay the answer; move on to other backends until one starts to answer."""
        setbacks, has_waited = _Setbacks(), False
        while True:
            ticket = self._under_this_policy(context, ticket)
            decision = context.decision
            assert decision is not None
            # The ranking is fresh for the first attempt only; later the state of the backends has changed.
            # Those that are for other models since have failed without an attempt, and may still be in it.
            ranking = None if context.attempts or has_waited or ticket.failed else decision.candidates
            if ranking is None or ranking.first is None:
                self._check_fit(decision, ticket)
            entered_at = self._clock.now()
            try:
                candidate, slot = await self.room.admit(ticket, ranking, has_waited=has_waited)
            except PolicyChanged as changed:
                ticket = replace(self._waited(ticket, entered_at), is_demoted=changed.was_demoted)
                has_waited = True
                continue
            except ShedError as shed:
                ticket = self._waited(self._after_all(context, ticket, setbacks, shed), entered_at)
                continue
            has_waited = False
            context.admitted(self._clock.now())
            ticket = self._waited(ticket, entered_at)
            try:
                await self.cohort.catch_up()
                await self._try(context, ticket, candidate, slot)
            except (UpstreamError, BodyRefused) as error:
                let_go(error)
                if context.is_answered:
                    context.ending, context.error_code = Ending.BROKEN, StreamBroken.code
                    await self._end_with(context, error)
                    return
                failure = setbacks.note(context, candidate.backend, error)
                if full := self._full(context, candidate, error):
                    refused_after = context.attempts[-1].started_at
                    ticket = self._waited(replace(ticket, refused=ticket.refused | full), refused_after)
                elif context.policy.retry.allows_more(context.tries, context.crashes):
                    ticket = self._elsewhere(context, ticket, setbacks, candidate.backend)
                else:
                    raise failure from None
            else:
                context.ending = Ending.COMPLETED
                self._learn(context)
                return
            finally:
                await self.room.release(ticket, slot, answered=context.is_answered)

    def _after_all(
        self, context: RequestContext, ticket: Ticket, setbacks: "_Setbacks", shed: ShedError
    ) -> Ticket:
        """Return the ticket with which a request that was shed may get a slot after all.

        Backends left out so far may be asked. Or those for which it waited are gone, and by what is decided
        now, others take it with less output planned, because its caller sets no limit.

        Raises:
            GatewayError: it may not: `shed`, or what says more to its caller.
        """
        if to_ask := setbacks.to_ask(shed):
            return replace(ticket, failed=ticket.failed - to_ask)
        anew = self._decided_anew(context, ticket, shed)
        if anew is not None and anew.demand.total_tokens < ticket.demand.total_tokens:
            context.decision = anew
            return replace(ticket, demand=anew.demand)
        is_own = isinstance(shed, Draining) or (isinstance(shed, AtCapacity) and context.lacks_slot)
        if setbacks.failure is None or is_own:
            self._check_fit(anew, ticket)
            raise shed
        raise setbacks.failure from None  # no backend is left to try, and it says more than that

    def _full(self, context: RequestContext, tried: Candidate, error: GatewayError) -> frozenset[str]:
        """Return the backends that a request asks once fewer run there; none if its last attempt failed.

        One that refuses a request because of load while it runs others will have room: it is asked again
        then, if no other has before, for as long as the request may wait. So that is no failed try. One that
        runs nothing may refuse whatever comes, unless it has just answered others: then it may not have noted
        yet that the last one has ended. That is a try, but the request may wait on. So it is if one refuses
        this request again, but took others: it may always refuse it, or another has just been before it.
        Refused by as many as may fail, a request does not ask all the others that have just refused one, too.
        """
        attempts, policy = context.attempts, context.policy
        if not isinstance(error, UpstreamBusy) or attempts[-1].outcome is not Outcome.BUSY:
            return _NO_BACKENDS
        name = tried.backend
        others = max(self._others(tried), min(1, tried.load.seqs))  # what ran before may have ended since
        takes_others = self._failures.refused(policy.backends[name], others, error.retry_after_s or 0)
        if others <= 0 and not takes_others:
            return _NO_BACKENDS
        is_try = takes_others and (others <= 0 or any(one.backend == name for one in attempts[:-1]))
        if is_try and not policy.retry.allows_more(context.tries, context.crashes):
            return _NO_BACKENDS
        context.waits_on(is_try=is_try, lacks_slot=others > 0)
        full = frozenset({name})
        if len(attempts) < policy.retry.attempts_max:
            return full
        now, last = self._clock.now(), self._failures.refusals.last(policy)
        return full | {one for one, refusal in last.items() if refusal.is_recent(now)}

    def _others(self, place: Candidate) -> int:
        """Return how many sequences run on the backend of a request besides its own."""
        return self._ledger.load(place.backend).seqs - place.claim.seqs

    def _elsewhere(
        self, context: RequestContext, ticket: Ticket, setbacks: "_Setbacks", failed: str
    ) -> Ticket:
        """Return the ticket without one that failed; for the last attempt, without those that refuse."""
        without = ticket.failed | {failed}
        if not context.policy.retry.allows_more(context.tries + 1, context.crashes):
            last = self._failures.refusals.last(context.policy)
            refusing = frozenset(name for name, refusal in last.items() if refusal.is_unanswered)
            setbacks.refusing = refusing - without
            without |= refusing
        held = self.view.held(context.policy, context.incoming.request.prefixes)
        return replace(ticket, failed=without, prefix_shares=held)

    def _waited(self, ticket: Ticket, since: float) -> Ticket:
        """Return the ticket with the time since `since` added to its waiting time."""
        waited_s = self._clock.now() - since
        return ticket if waited_s < NO_WAIT_S else replace(ticket, waited_s=ticket.waited_s + waited_s)

    # -------------------------------------------------------------- decide

    async def _decide(self, context: RequestContext, estimate: Estimate | None) -> Ticket:
        """Estimate and classify a request, rank its backends, and return its ticket for the queue."""
        policy, request = context.policy, context.incoming.request
        model = deciding.model_of(policy, request.model)
        if estimate is None:
            estimate = await self._estimated(policy, model, context.incoming)
            await self.cohort.catch_up()
        context.estimated_at = self._clock.now()
        in_force = self._policy()
        if in_force is not policy:  # it changed while tokens were counted
            context.policy = policy = in_force
            model = deciding.model_of(policy, request.model)
        context.estimate = estimate
        context.decision, context.ticket = self._decided(policy, model, context.incoming, estimate)
        return context.ticket

    def _estimated(self, policy: Policy, model: ModelPolicy, incoming: Incoming) -> Awaitable[Estimate]:
        """Estimate the length of a request's prompt as it will be sent."""
        prompt = deciding.prompt_of(policy, incoming)
        return self._estimator.estimate(prompt, model.template, policy.window_tokens)

    def _under_this_policy(self, context: RequestContext, ticket: Ticket) -> Ticket:
        """Return the ticket of an unanswered request under the current policy.

        A request that the current policy would reject keeps the policy under which it was accepted, without
        the backends that are for other models now.
        """
        policy = self._policy()
        if policy is ticket.policy:
            return ticket
        try:
            decision, anew = self._decided_under(policy, context)
            self._check_fit(decision, anew)
        except GatewayError:
            return replace(ticket, failed=ticket.failed | _for_others(ticket, policy))
        context.policy, context.decision, context.ticket = policy, decision, anew
        return replace(
            anew,
            failed=ticket.failed,
            waited_s=ticket.waited_s,
            is_demoted=ticket.is_demoted,
            refused=ticket.refused,
        )

    def _decided_under(self, policy: Policy, context: RequestContext) -> tuple[Decision, Ticket]:
        """Like `_decided`, for a request that has been decided before.

        Raises:
            CallerError: the policy has no model or class for it.
        """
        assert context.estimate is not None
        model = deciding.model_of(policy, context.incoming.request.model)
        return self._decided(policy, model, context.incoming, context.estimate)

    def _decided(
        self, policy: Policy, model: ModelPolicy, incoming: Incoming, estimate: Estimate
    ) -> tuple[Decision, Ticket]:
        """Classify a request and rank its backends. Return the decision, and its ticket for the queue."""
        request, arrival = incoming.request, incoming.arrival
        held = self.view.held(policy, request.prefixes)
        views_of = partial(self.view.of_class, policy, held)
        traffic_class, decision = deciding.decide(policy, model, request, estimate, views_of)
        demand = decision.demand
        wait_s = patience_s(request.headers)
        if request.is_job:
            traffic_class, wait_s = replace(traffic_class, waiting=patient(traffic_class.waiting)), None
        # By position, in the order of the fields: the class is wide, and keywords would cost 2 us.
        return decision, Ticket(
            arrival.id,
            model.id,
            policy,
            traffic_class,
            demand,
            request.key,
            arrival.received_at,
            fastest_prefill_s(policy, traffic_class.pools[0], demand),
            incoming.size_bytes,
            None if wait_s is None else arrival.received_at + wait_s,
            _NO_BACKENDS,
            request.queued_s,
            held,
        )

    # -------------------------------------------------------------- admit

    def _check_fit(self, decision: Decision | None, ticket: Ticket) -> None:
        """Reject a request that no backend of its class could ever take, before it waits or is retried.

        `decision`: None if nothing new is known of it.

        Raises:
            CallerError: its message says what to change.
        """
        if decision is None or ticket.failed:
            return  # others could take it, and have failed: the waiting line reports that
        views = self.view.of(ticket.policy.backends)
        refusal = deciding.refusal(ticket.traffic_class, decision, views)
        if refusal is not None:
            raise refusal

    def _decided_anew(self, context: RequestContext, ticket: Ticket, shed: ShedError) -> Decision | None:
        """Return what is decided now on a request that none of its backends takes any more, else None.

        They may be gone, or have turned out too small: an engine that comes up, as when its box brings it in,
        may have a smaller window than is configured.
        """
        policy = self._policy()
        if not isinstance(shed, NoBackend) or policy is not ticket.policy:
            return None
        return self._decided_under(policy, context)[0]

    # -------------------------------------------------------------- relay, account

    async def _try(self, context: RequestContext, ticket: Ticket, candidate: Candidate, slot: Slot) -> None:
        """Run one attempt in a slot, and report how it ended.

        Raises as `Attempt.run`, and as `deciding.as_it_is_now`, of which nothing is reported.
        """
        backend = context.policy.backends[candidate.backend]
        if context.policy is not self.view.newest:  # it was decided under a former policy
            backend = deciding.as_it_is_now(backend, self._policy(), ticket.model)
        request = context.incoming.request
        served = served_name(backend.model, self.view.status(backend.id)) or request.model
        if self._is_ending and not request.is_job:  # since it got the slot
            raise Draining

        is_visible = request.stream and request.seqs == 1
        watch = self.watch.opened(
            backend, slot, ticket.demand, is_visible=is_visible, is_spill=candidate.is_spill
        )

        # With several prompts in a request, the first token of one does not end the prefill of the others.
        is_seen = request.stream and request.prompts == 1

        # Both now and then, because others that ran at one of these times only may have been refused.
        others = self._others(candidate) if self._failures.refusals.known else -1

        async def on_answer() -> None:
            watch.answered()
            # It has read the prompt: the next turn may come before the end, or instead of it.
            self._remember(request.prefixes, backend.id, ticket.demand.prompt_tokens)
            self._failures.answered(
                context, backend, min(others, self._others(candidate)) if others >= 0 else -1
            )
            if is_seen:
                if slot.load.long_unanswered:
                    self.room.line.prefilled(ticket.id, backend.id, self._clock.now())
                await self._ledger.answered(slot)

        deadlines = self._deadlines
        if deadlines is None:
            deadlines = self._deadlines = Deadlines(asyncio.get_running_loop())
        attempt = Attempt(context, candidate, backend, served, self._clock, on_answer, watch, deadlines)
        running = self._running.setdefault(backend.id, set())
        running.add(attempt)
        if not is_seen:
            self.first_tokens.expect(slot)
        try:
            await attempt.run(self._upstream)
        finally:
            running.discard(attempt)
            self.first_tokens.forget(slot)
            record = context.attempts[-1]
            watch.ended(context.usage if record.outcome is Outcome.OK else None)
            self._recorder.attempt(record)
            self._failures.ended(context, backend, record)

    def _remember(self, prefixes: Prefixes, backend_id: str, prompt_tokens: int) -> None:
        """Remember that a backend has read a prompt, unless its engine says that it keeps none."""
        engine = self.view.status(backend_id).engine
        if engine is not None and not engine.caches_prefixes:
            return
        self._prefixes.remember(
            prefixes,
            backend_id,
            prompt_tokens,
            self._clock.now(),
            resumes_anywhere=prompt_tokens < CACHED_MIN_TOKENS or engine is None or engine.resumes_anywhere,
        )

    def _learn(self, context: RequestContext) -> None:
        """Learn from the usage that a backend has reported at the end of its answer."""
        request, estimate = context.incoming.request, context.estimate
        several_prompts = request.endpoint is Endpoint.COMPLETIONS and request.choices > 1
        if context.usage is None or several_prompts:
            return  # with several prompts, usage is a sum and says nothing about a single one
        if context.incoming.member("truncate_prompt_tokens") is not None:
            return  # usage is that of what the engine left of the prompt
        model = context.policy.model(request.model)
        assert model is not None and estimate is not None  # it was decided
        prompt, actual = request.prompt, context.usage.prompt_tokens
        plain = is_plain(prompt)
        if plain:
            self._estimator.observe(estimate, actual)
        backend = context.attempts[-1].backend
        self._drift.observe(backend, prompt, model.template, estimate, actual, is_plain=plain)

    async def _end_with(self, context: RequestContext, error: GatewayError) -> None:
        """End a stream that failed after its headers were sent, with the error code of `context`."""
        with while_caller_reads():
            await context.downstream.fail(error, context.error_code)


class _Setbacks:
    """The failed attempts of a request, and the backends that it asks only if no other takes it.

    Attributes:
        failure: The failure to report if no backend answers; None before the first.
        refusing: Backends that have refused one because of load and answered none since: its last attempt
            would most likely be lost there.
        unfit: Those that answered it, but not as requested: they are healthy, and may sample another answer.
    """

    def __init__(self) -> None:
        self.failure: GatewayError | None = None
        self.refusing: frozenset[str] = frozenset()
        self.unfit: frozenset[str] = frozenset()
        self._is_unfit_asked = False

    def note(self, context: RequestContext, backend: str, error: GatewayError) -> GatewayError:
        """Note that a backend has failed the request. Return the failure to report if no other answers.

        An engine that crashed says more than another that is busy.
        """
        before, failure = self.failure, error
        if isinstance(error, AnswerUnfit):
            self.unfit |= {backend}
        if before is not None and context.crashes and isinstance(error, NOTHING_RAN):
            failure = before
        elif isinstance(before, UpstreamBusy) and isinstance(error, UpstreamBusy):  # one is there first
            error.retry_after_s = min(before.retry_after_s or 1, error.retry_after_s or 1)
        self.failure = failure
        return failure

    def to_ask(self, shed: ShedError) -> frozenset[str]:
        """Return those to ask now that a request is shed, each once; none if it is to be shed.

        A room that is closed sheds it again, whoever is left to ask.
        """
        if self.refusing:
            found, self.refusing = self.refusing, frozenset()
            return found
        if self._is_unfit_asked or isinstance(shed, AtCapacity):
            return frozenset()
        self._is_unfit_asked = True
        return self.unfit


def _for_others(ticket: Ticket, policy: Policy) -> frozenset[str]:
    """Return the backends of a ticket's class that are for other models under `policy`."""
    before = ticket.policy.backends
    names = ticket.policy.backends_of(ticket.traffic_class)
    return frozenset(one for one in names if deciding.is_for_others(before[one], policy, ticket.model))


def _ending_of(error: GatewayError) -> Ending:
    return Ending.FAILED if isinstance(error, Draining) else Ending.of(error)  # it was accepted, and is lost
