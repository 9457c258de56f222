"""The order of the steps, and who holds what meanwhile.

One coroutine owns the slot, the backend's stream and the caller, opened and closed as nested blocks.
It is cancelled as a whole when the caller leaves, and then everything is given back.
"""

import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import anyio

from gateway.core import admission, deciding, retry, selection
from gateway.core.drift import DriftTracker
from gateway.core.errors import (
    AtCapacity,
    ContextExceeded,
    GatewayError,
    InvalidRequest,
    ModelNotFound,
    NoBackend,
    ShedError,
    StreamBroken,
    UpstreamError,
)
from gateway.core.health import BackendStatus, Outcome, served_name
from gateway.core.selection import BackendView
from gateway.core.sse import DONE
from gateway.core.usage import Ending
from gateway.core.values import (
    Candidate,
    CountMode,
    Demand,
    Endpoint,
    Exclusion,
    Policy,
    TrafficClass,
)
from gateway.pipeline.attempt import CALLER_STALL_S, Attempt, CallerStalled
from gateway.pipeline.passage import Passage
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

NO_BACKEND_RETRY_S = 5.0
_REFUSALS = frozenset({Outcome.FAILED, Outcome.MISCONFIGURED})
"""Answers that may be the request's doing as well as the backend's."""

RELEASE_S = 1.0


class Pipeline:
    """Runs requests. One per process; what it holds of a request ends with that request."""

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
        recorder: Recorder,
        clock: Clock,
    ) -> None:
        """Join the ports. `policy` returns the policy in force; a request keeps the one it started with."""
        self._policy = policy
        self._estimator = estimator
        self._ledger = ledger
        self._fleet = fleet
        self._upstream = upstream
        self._prefixes = prefixes
        self._drift = drift
        self._recorder = recorder
        self._clock = clock
        self._running: dict[str, set[Attempt]] = {}

    async def run(self, incoming: Incoming, downstream: Downstream) -> None:
        """Serve one request, to its end.

        Raises:
            GatewayError: nothing has been sent yet; its `headers` say what was decided.
            CallerStalled, OSError: the caller is gone, or as good as: drop its connection.
        """
        passage = Passage(incoming=incoming, downstream=downstream, policy=self._policy())
        try:
            await self._serve(passage)
        except GatewayError as error:
            passage.status, passage.error_code = error.http_status, error.code
            passage.ending = Ending.of(error)
            error.headers = tuple(passage.headers())
            raise
        except (anyio.get_cancelled_exc_class(), CallerStalled, OSError):
            passage.ending = Ending.LEFT
            raise
        finally:
            self._judge(passage)
            self._recorder.finished(passage.record(self._clock.now()))

    def abandon(self, backend_id: str, reason: str) -> None:
        """Give up the tries on a backend that have not been answered yet, so that they move on.

        Called when the fleet learns that it is lost (it hangs, say) while requests wait for it.
        """
        for attempt in tuple(self._running.get(backend_id, ())):
            attempt.give_up(reason)

    async def _serve(self, passage: Passage) -> None:
        traffic_class, demand = await self._decide(passage)
        failed: set[str] = set()
        failure: UpstreamError | None = None
        while True:
            try:
                candidate, slot = await self._admit(passage, traffic_class, demand, frozenset(failed))
            except ShedError as shed:
                if failure is None or isinstance(shed, AtCapacity):
                    raise
                # Nobody is left to ask: what the last one said is the better answer.
                raise failure from None
            try:
                async with self._holding(slot):
                    await self._try(passage, candidate, slot)
            except UpstreamError as error:
                if passage.status:
                    await self._break(passage, error)
                    return
                failed.add(candidate.backend)
                failure = error
                if not retry.may_retry(passage.policy.retry, len(passage.attempts), passage.crashes):
                    raise
            else:
                passage.ending = Ending.COMPLETED
                self._learn(passage, candidate)
                return

    # -------------------------------------------------------------- decide

    async def _decide(self, passage: Passage) -> tuple[TrafficClass, Demand]:
        policy, request = passage.policy, passage.incoming.request
        model = policy.model(request.model)
        if model is None:
            known = ", ".join(sorted(known.id for known in policy.models))
            raise ModelNotFound(f"The model `{request.model}` does not exist. Known: {known}.", param="model")
        estimate = await self._estimator.estimate(request.prompt, model.template, policy.window_tokens)
        passage.estimated_at = self._clock.now()
        traffic_class, passage.decision = deciding.decide(
            policy, model, request, estimate, lambda chosen: self._views(passage, chosen)
        )
        return traffic_class, passage.decision.demand

    def _views(self, passage: Passage, traffic_class: TrafficClass) -> Mapping[str, BackendView]:
        policy = passage.policy
        statuses = self._fleet.statuses()
        held = self._prefixes.held(passage.incoming.request.prefixes)
        return {
            name: BackendView(
                backend=policy.backends[name],
                load=self._ledger.load(name),
                status=statuses.get(name, _UNKNOWN),
                prefix_share=held.get(name, 0.0),
            )
            for pool in traffic_class.pools
            for name in policy.pools[pool].backends
        }

    # -------------------------------------------------------------- admit

    async def _admit(
        self, passage: Passage, traffic_class: TrafficClass, demand: Demand, failed: frozenset[str]
    ) -> tuple[Candidate, Slot]:
        """Return a candidate and the slot taken on it: the best one that has room at this moment."""
        policy = passage.policy
        views = self._views(passage, traffic_class)
        candidates = selection.rank(policy, traffic_class, demand, views, failed=failed)
        refused: list[Exclusion] = [c.excluded for c in candidates if c.excluded is not None]
        for candidate in candidates:
            if candidate.excluded is not None:
                continue
            # The ranking is a snapshot; this is the check.
            capacity = views[candidate.backend].capacity
            slot = await self._ledger.acquire(
                candidate.backend, admission.claim(capacity, demand), admission.limits(capacity)
            )
            if isinstance(slot, Slot):
                return candidate, slot
            refused.append(slot)
        window = max(view.capacity.context_tokens for view in views.values())
        raise self._refusal(passage, traffic_class, refused, window)

    def _refusal(
        self, passage: Passage, traffic_class: TrafficClass, reasons: Sequence[Exclusion], window: int
    ) -> GatewayError:
        """Return the error that tells the caller what to do about it."""
        name = traffic_class.name
        if full := [reason for reason in reasons if reason in (Exclusion.AT_KNEE, Exclusion.KV_FULL)]:
            message = f"Every backend for {name} requests is at its limit. Please retry."
            return AtCapacity(message, code=full[0].value, retry_after_s=1)
        if any(not reason.is_permanent for reason in reasons):
            return NoBackend(
                f"No backend for {name} requests is available right now.", retry_after_s=NO_BACKEND_RETRY_S
            )
        if Exclusion.MODALITY in reasons:
            return InvalidRequest(
                f"No backend for {name} requests takes this combination of images, audio and length.",
                code="unsupported_modality",
                param="messages",
            )
        if Exclusion.SEQS_EXCEEDED in reasons:
            return InvalidRequest(
                "No backend runs that many choices at once.", code="too_many_choices", param="n"
            )
        return _overlong(passage, window, is_kv=Exclusion.CONTEXT_EXCEEDED not in reasons)

    @asynccontextmanager
    async def _holding(self, slot: Slot) -> AsyncIterator[None]:
        try:
            yield
        finally:
            with anyio.move_on_after(RELEASE_S, shield=True):
                await self._ledger.release(slot)

    # -------------------------------------------------------------- relay, account

    async def _try(self, passage: Passage, candidate: Candidate, slot: Slot) -> None:
        backend = passage.policy.backends[candidate.backend]
        status = self._fleet.statuses().get(backend.id, _UNKNOWN)
        served = served_name(backend.model, status) or passage.incoming.request.model

        async def on_answer() -> None:
            self._report(passage)
            await self._ledger.answered(slot)

        attempt = Attempt(passage, candidate, backend, served, self._clock, on_answer)
        running = self._running.setdefault(backend.id, set())
        running.add(attempt)
        try:
            await attempt.run(self._upstream)
        finally:
            running.discard(attempt)
            record = passage.attempts[-1]
            self._recorder.attempt(record)
            if record.outcome in _REFUSALS:
                passage.unreported.append(record)
            else:
                self._fleet.report(backend.id, record.outcome, record.detail)

    def _report(self, passage: Passage) -> None:
        """Tell the fleet of the tries so far: another backend has answered, so these failed by themselves."""
        for attempt in passage.unreported:
            self._fleet.report(attempt.backend, attempt.outcome, attempt.detail)
        passage.unreported.clear()

    def _judge(self, passage: Passage) -> None:
        """Tell the fleet of what is left. Backends that all refused a request alike: it is the request."""
        if len(passage.unreported) > 1 and not passage.crashes:
            passage.unreported = [replace(one, outcome=Outcome.REJECTED) for one in passage.unreported]
        self._report(passage)

    def _learn(self, passage: Passage, candidate: Candidate) -> None:
        request, decision = passage.incoming.request, passage.decision
        self._prefixes.remember(request.prefixes, candidate.backend)
        model = passage.policy.model(request.model)
        several_prompts = request.endpoint is Endpoint.COMPLETIONS and request.choices > 1
        if decision is None or model is None or passage.usage is None or several_prompts:
            return  # the usage of several prompts is their sum, and says nothing of one
        actual = passage.usage.prompt_tokens
        self._estimator.observe(request.prompt, decision.estimate, actual)
        self._drift.observe(candidate.backend, request.prompt, model.template, decision.estimate, actual)

    async def _break(self, passage: Passage, error: UpstreamError) -> None:
        """End a stream that failed after its first byte, in the way that every SDK raises on."""
        passage.ending, passage.error_code = Ending.BROKEN, StreamBroken.code
        envelope = {"message": error.message, "type": error.type, "param": None, "code": StreamBroken.code}
        event = b"data: " + json.dumps({"error": envelope}).encode() + b"\n\n"
        with anyio.move_on_after(CALLER_STALL_S) as patience:
            await passage.downstream.send(event + DONE)
        if patience.cancelled_caught:
            raise CallerStalled


_UNKNOWN = BackendStatus()


def _overlong(passage: Passage, window: int, *, is_kv: bool) -> ContextExceeded:
    """Return the refusal in the words by which clients recognise an overflow."""
    decision = passage.decision
    assert decision is not None
    demand, estimate = decision.demand, decision.estimate
    output = demand.total_tokens - estimate.tokens_max
    about = "at least " if estimate.mode is CountMode.BOUND else ""
    cache = " and fits into no backend's cache" if is_kv else ""
    return ContextExceeded(
        f"This model's maximum context length is {window} tokens, but the request needs {about}"
        f"{demand.total_tokens} ({estimate.tokens_max} input + {output} output){cache}. "
        "Input tokens exceed the configured limit [context_length_exceeded].",
        param="messages",
    )
