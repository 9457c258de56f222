"""Failed attempts: when they count against their backends, and which backends are passed over until then.

A failure may be the fault of the backend or of the request. It is reported to the fleet once another backend
has answered the request, or at the request's end.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace

from gateway.core.backends import Backend
from gateway.core.blame import IN_A_ROW, PAUSE_S, REPEATED_S, Blame, Doubts
from gateway.core.decision import Exclusion, Objection
from gateway.core.health import NOT_PROBED, RETRY_AFTER_UNKNOWN_MAX_S, BackendStatus, Outcome, State
from gateway.core.policy import Policy
from gateway.core.refusals import REFUSED_S, Refusals
from gateway.core.selection import unavailable_reason
from gateway.core.usage import AttemptRecord
from gateway.pipeline.request_context import RequestContext
from gateway.ports import Clock, Fleet

EARLY_S = 0.01
"""No timer of an event loop is early by as much. A choice: uvloop counts whole milliseconds, and one timer in
three is early, by up to one."""

_UNCLEAR = frozenset({Outcome.FAILED, Outcome.MISCONFIGURED})
"""Outcomes that may be caused by the request itself rather than by the backend."""

_IN_DOUBT: Objection = (
    Exclusion.UNHEALTHY,
    f"the last {IN_A_ROW} requests on it, or more, have failed; whose fault it was is not known yet",
)


class Failures:
    """Attributes failures for all requests of a process, and reports the outcomes of attempts to the fleet.

    Attributes:
        doubts: The backends that are in doubt; without any, `doubting` changes nothing.
        refusals: The backends that have refused a request because of load.
    """

    def __init__(self, fleet: Fleet, clock: Clock, look: Callable[[], None]) -> None:
        """Report to `fleet`; call `look` when more may start on a backend that was in doubt, or refused."""
        self._fleet = fleet
        self._clock = clock
        self._look = look
        self._blame = Blame()
        self.doubts = Doubts()
        self.refusals = Refusals()
        self._next_look: asyncio.TimerHandle | None = None  # while there are refusals

    def answered(self, context: RequestContext, backend: Backend, others: int) -> None:
        """Note that `backend` has begun to answer: earlier attempts did not fail because of the request.

        `others`: how many sequences of others ran there when it took the request; -1 if that is not known.
        """
        if self.doubts.rows and self.doubts.answered(backend):
            self._look()  # more may start there than in doubt
        if self.refusals.known:
            self.refusals.answered(backend, others)
        if context.unreported:
            self._report(context)

    def refused(self, backend: Backend, others: int, again_s: float) -> bool:
        """Note that `backend` has refused a request because of load. See `Refusals.refused`."""
        takes_others = self.refusals.refused(backend, others, self._clock.now(), again_s)
        self._look_after_refusals()
        return takes_others

    def ended(self, context: RequestContext, backend: Backend, attempt: AttemptRecord) -> None:
        """Report an attempt on `backend`; one for which the request may be at fault is kept until later."""
        if attempt.outcome is Outcome.OK and self.refusals.known:
            self.refusals.answered(backend, 0)  # beside how many is not known any more
        if attempt.outcome is Outcome.MISCONFIGURED:  # by another name than it goes by now, perhaps
            self._fleet.look_again(backend.id)
        if attempt.outcome not in _UNCLEAR:
            self._fleet.report(backend.id, attempt.outcome, attempt.detail, attempt.started_at)
            return
        context.unreported.append(attempt)
        if self.doubts.failed(backend, context.digest, self._clock.now()):
            for ends_s in (PAUSE_S, REPEATED_S):  # of its pause, and of the doubt
                asyncio.get_running_loop().call_later(ends_s + EARLY_S, self._look)

    def judge(self, context: RequestContext) -> None:
        """Report the remaining attempts. If several backends refused the request, the request is at fault.

        A request that was tried on one backend only counts against it once: if the caller repeats it and it
        fails again, the request is at fault. Attempts of a request that crashed an engine always count. So do
        those on an ejected backend whose probes fail as well: it is the backend that is at fault.
        """
        left = context.unreported
        if not left:
            return
        if not context.crashes and (len(left) > 1 or self._is_repeated(context, left[0])):
            context.unreported = [
                one if self._is_unwell(one.backend) else replace(one, outcome=Outcome.REJECTED)
                for one in left
            ]
        self._report(context)

    def again_s(self, context: RequestContext) -> float | None:
        """Return in how many seconds to repeat a request that all have failed; None if waiting may not help.

        It may where each of them fails whatever it is asked. Like any outage whose end is unknown, that is
        expected to last as long again as it has lasted (`health.retry_after_s`).
        """
        if not self.doubts.rows or any(one.outcome not in _UNCLEAR for one in context.attempts):
            return None
        now, backends = self._clock.now(), context.policy.backends
        tried = [backends.get(one.backend) for one in context.attempts]
        lasted = [None if backend is None else self.doubts.lasted_s(backend, now) for backend in tried]
        known = [one for one in lasted if one is not None]
        return min(*known, RETRY_AFTER_UNKNOWN_MAX_S) if known and len(known) == len(lasted) else None

    def doubting(
        self, policy: Policy, statuses: Mapping[str, BackendStatus], objections: Mapping[str, Objection]
    ) -> tuple[Mapping[str, BackendStatus], Mapping[str, Objection]]:
        """Return the statuses and objections that apply while backends are in doubt (`core.blame`)."""

        def is_available(name: str) -> bool:
            status = statuses.get(name, NOT_PROBED)
            return name not in objections and unavailable_reason(policy.backends[name], status) is None

        of_doubts, probation = dict[str, Objection](), dict[str, BackendStatus]()
        for name, is_paused in self.doubts.passed_over(policy, is_available, self._clock.now()).items():
            status = statuses.get(name, NOT_PROBED)
            if is_paused:
                of_doubts[name] = _IN_DOUBT
            elif status.state is State.UP:
                probation[name] = replace(status, state=State.PROBATION)
        return {**statuses, **probation}, {**of_doubts, **objections}

    def _look_after_refusals(self) -> None:
        """Call `look` every `REFUSED_S` until the last one is forgotten: more may be tried each time."""
        if self._next_look is None and self.refusals.known:
            self._next_look = asyncio.get_running_loop().call_later(REFUSED_S + EARLY_S, self._look_again)

    def _look_again(self) -> None:
        self._next_look = None
        self.refusals.forget(self._clock.now())
        self._look()
        self._look_after_refusals()

    def _report(self, context: RequestContext) -> None:
        for attempt in context.unreported:
            self._fleet.report(attempt.backend, attempt.outcome, attempt.detail, attempt.started_at)
        context.unreported.clear()

    def _is_unwell(self, name: str) -> bool:
        status = self._fleet.statuses().get(name, NOT_PROBED)
        return status.state is State.EJECTED and status.probe_fault is not None

    def _is_repeated(self, context: RequestContext, attempt: AttemptRecord) -> bool:
        if attempt.outcome is not Outcome.FAILED:
            return False
        return not self._blame.count(attempt.backend, context.digest, self._clock.now())
