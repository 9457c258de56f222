"""Runs the waiting line: requests are queued in it and woken when they have a slot.

The line itself (core/waiting/) is pure and never blocks. A loop here asks it for the next turn on every
change: a request or a first token arrives, a slot is released, a backend's state changes, or a timer fires.
It acquires the offered slots atomically and wakes their requests. A queued request costs one event; there is
no polling.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import NoReturn

import anyio

from gateway.cohort import Cohort
from gateway.core.decision import Candidate, Ranking
from gateway.core.errors import AtCapacity, Draining, NoBackend, ShedError
from gateway.core.selection import BackendView
from gateway.core.waiting import MISS_PAUSE_S, Offer, Reason, Refused, Ticket, WaitingLine
from gateway.ports import Clock, Ledger, Slot

RELEASE_S = 1.0
"""Limit on the wait for the ledger at the end of a request. A choice. One shared through Redis has limits of
its own, and is not cancelled by this one. In this process the slot is free at once."""

REDECIDED_TOGETHER = 16
"""Maximum number of queued requests that ask again in one go when the policy has changed. A choice: each
takes some 0.3 ms, in which every stream stands still, and 10 us for each backend."""

_ONE_TOGETHER_BACKENDS = 1_000
"""In front of as many backends, one request at a time: then it takes 10 ms by itself."""


class PolicyChanged(Exception):
    """The policy has changed since the request was queued.

    Attributes:
        was_demoted: Whether it was behind the others of its class, because it was late.
    """

    def __init__(self, *, was_demoted: bool) -> None:
        super().__init__()
        self.was_demoted = was_demoted


class _Waiter:
    """A queued request, and the result it is waiting for."""

    __slots__ = ("_cohort", "_is_ready", "_woken", "error", "is_outdated", "place")

    def __init__(self, cohort: Cohort) -> None:
        self.is_outdated = False  # it will ask again under a new policy
        self.place: tuple[Candidate, Slot] | None = None
        self.error: ShedError | None = None
        self._cohort = cohort
        self._is_ready = True
        self._woken = anyio.Event()

    async def wait(self) -> None:
        """Wait until it is woken; it is not ready meanwhile."""
        self._is_ready = False
        self._cohort.size -= 1
        try:
            await self._woken.wait()
        finally:
            self._get_ready()

    def wake(self) -> None:
        self._woken.set()
        self._get_ready()  # now, so that those that are woken together take their steps together

    def _get_ready(self) -> None:
        if not self._is_ready:
            self._is_ready = True
            self._cohort.size += 1


class WaitingRoom:
    """Admits requests in the order of the line. `run` must be running while requests are served."""

    def __init__(
        self,
        line: WaitingLine,
        ledger: Ledger,
        views: Callable[[], Mapping[str, BackendView]],
        clock: Clock,
        cohort: Cohort,
    ) -> None:
        """Acquire slots on `ledger` as `line` orders; `views` returns backends without prefix shares.

        A request that is queued leaves `cohort` meanwhile.
        """
        self.line = line
        self._ledger = ledger
        self._views = views
        self._clock = clock
        self._cohort = cohort
        self._waiters: dict[str, _Waiter] = {}
        self._outdated: deque[_Waiter] = deque()  # still to be woken because the policy has changed
        self._waited_for: frozenset[str] = frozenset()
        self._wake = anyio.Event()
        self._is_closed = False
        ledger.on_freed(lambda _: self.look())

    def look(self) -> None:
        """Wake the loop if requests are queued, because a change may allow one of them to start."""
        if self.line or self._waited_for:  # the ledger must also learn that the queue has become empty
            self._wake.set()

    def redecide(self) -> None:
        """Make every queued request ask again under the current policy, a few at a time."""
        for waiter in self._waiters.values():
            if not waiter.is_outdated:
                waiter.is_outdated = True
                self._outdated.append(waiter)
        self._wake.set()

    def close(self) -> None:
        """Turn away every queued request, and all that come from now on: this process is shutting down."""
        self._is_closed = True
        for waiter in self._waiters.values():
            waiter.error = Draining()
            waiter.wake()

    async def admit(
        self, ticket: Ticket, ranking: Ranking | None, *, has_waited: bool
    ) -> tuple[Candidate, Slot]:
        """Wait for this request's turn, and return a candidate with the slot acquired on it.

        Args:
            ticket: The request.
            ranking: A fresh ranking of the backends, if there is one: with an empty queue and a free slot,
                the request starts without queueing.
            has_waited: Whether it was queued before, in which case it cannot be turned away on entry.

        Raises:
            AtCapacity: it may not wait, or has waited as long as its class allows.
            NoBackend: no backend that could take it is up.
            Draining: the room is closed.
            PolicyChanged: it must be decided again.
        """
        if self._is_closed:
            await self._turn_away(ticket, None)
        offer = None
        first = None if ranking is None else ranking.first
        if (
            ranking is not None
            and first is not None
            and not (ranking.passed_over and _may_stay(ticket, ranking))
        ):
            if (slot := self._at_once(ticket, first)) is not None:
                return first, slot
            offer = self.line.offer_at_once(ticket, ranking.eligible, self._clock.now())
        if offer is None:
            now = self._clock.now()
            refused = self.line.enter(ticket, now, has_waited=has_waited, ranking=ranking)
            if refused is not None:
                raise shed_error(refused)
        waiter, was_demoted = _Waiter(self._cohort), False
        self._waiters[ticket.id] = waiter
        try:
            if offer is not None:
                await self._take(offer)
            if waiter.place is None:
                self.look()
                await waiter.wait()
                was_demoted = self.line.is_demoted(ticket.id)
        except anyio.get_cancelled_exc_class():
            if waiter.place is not None:  # the caller left just as its turn came
                await self.release(ticket, waiter.place[1], answered=False)
            raise
        finally:
            del self._waiters[ticket.id]
            self.line.leave(ticket.id)
            self.look()  # offers to this request and reservations for it are free again
        if isinstance(waiter.error, Draining):
            await self._turn_away(ticket, waiter.place)
        if waiter.place is None:
            raise waiter.error or PolicyChanged(was_demoted=was_demoted)
        return waiter.place

    async def _turn_away(self, ticket: Ticket, place: tuple[Candidate, Slot] | None) -> NoReturn:
        if place is not None:  # the room was closed before it could take it
            await self.release(ticket, place[1], answered=False)
        # A job's worker has cancelled it, and returns it: no failure, though the job hears of that late.
        await anyio.lowlevel.checkpoint_if_cancelled()
        raise Draining

    async def release(self, ticket: Ticket, slot: Slot, *, answered: bool) -> None:
        """Release a slot and let the next request start. `answered`: whether its request got a token."""
        if not self._ledger.release_at_once(slot):
            with anyio.move_on_after(RELEASE_S, shield=True):
                await self._ledger.release(slot)
        self.line.released(ticket.id, slot.backend, self._clock.now(), answered=answered)
        self.look()  # needed where the ledger's own notification is not immediate

    async def run(self) -> None:
        """Process turns until cancelled."""
        while True:
            await self._catch_up()
            wake = self._wake = anyio.Event()
            views = self._views()
            turn = self.line.turn(self._clock.now(), views)
            for refused in turn.refused:
                waiter = self._waiters.get(refused.id)
                if waiter is not None and not waiter.is_outdated:  # otherwise it enters the line again
                    waiter.error = shed_error(refused)
                    waiter.wake()
            has_missed = await self._take_all(turn.offers)
            if not self._ledger.is_local:
                self._waited_for = self.line.waited_for()
                self._ledger.waits(self._waited_for)
            patience_s = None
            if turn.next_turn_at is not None:
                patience_s = max(0.0, turn.next_turn_at - self._clock.now())
            together = max(1, min(REDECIDED_TOGETHER, _ONE_TOGETHER_BACKENDS // (1 + len(views))))
            for _ in range(min(together, len(self._outdated))):
                self._outdated.popleft().wake()
            if self._outdated:
                patience_s = 0.0
            elif has_missed:  # requests whose slot was gone are queued again, after this turn was computed
                patience_s = min(MISS_PAUSE_S, inf if patience_s is None else patience_s)
            with anyio.move_on_after(patience_s):
                await wake.wait()

    async def _catch_up(self) -> None:
        """Learn what other processes hold where nobody has waited so far.

        The last report is up to a second old: by that alone, requests would be refused while there is room.
        Once the ledger knows that somebody waits, it hears of what becomes free.
        """
        if self._ledger.is_local:
            return
        while new := self.line.waited_for() - self._waited_for:
            self._waited_for |= new
            self._ledger.waits(self._waited_for)
            await self._ledger.refresh(new)

    def _at_once(self, ticket: Ticket, first: Candidate) -> Slot | None:
        """Acquire a slot without queueing, if the queue is empty and no other process must be asked."""
        now = self._clock.now()
        if not self.line.may_start_at_once(ticket, now):
            return None
        slot = self._ledger.acquire_at_once(first.backend, first.claim, first.limits)
        if slot is not None:
            self.line.start_at_once(ticket, first, now)
        return slot

    async def _take_all(self, offers: Sequence[Offer]) -> bool:
        """Acquire all offered slots concurrently; in sequence, a slow store would limit the rate of starts.

        Returns whether any slot was already gone.
        """
        if len(offers) == 1:
            return not await self._take(offers[0])
        taken: list[bool] = []

        async def take(offer: Offer) -> None:
            taken.append(await self._take(offer))

        async with anyio.create_task_group() as tasks:
            for offer in offers:
                tasks.start_soon(take, offer)
        return not all(taken)

    async def _take(self, offer: Offer) -> bool:
        """Acquire the first free slot of an offer. Return whether there was one."""
        ticket = offer.ticket
        for candidate in offer.candidates:
            slot = await self._ledger.acquire(candidate.backend, candidate.claim, candidate.limits)
            if not isinstance(slot, Slot):
                continue
            if not self.line.is_offered(ticket.id):  # it left in the meantime, and may even be queued again
                await self._ledger.release(slot)
                return True
            waiter = self._waiters[ticket.id]
            if waiter.is_outdated:  # that backend may be one for other requests now
                self.line.missed(ticket.id, (), self._clock.now())
                waiter.wake()
                await self._ledger.release(slot)
                return True
            self.line.started(ticket.id, candidate.backend, self._clock.now())
            waiter.place = (candidate, slot)
            waiter.wake()
            return True
        gone = [candidate.backend for candidate in offer.candidates]
        self.line.missed(ticket.id, gone, self._clock.now())
        return False


def _may_stay(ticket: Ticket, ranking: Ranking) -> bool:
    """Return whether a busy backend has seen more of a conversation than the first choice.

    Whether the request should wait for it is for the line to say (`selection.stay`).
    """
    assert ranking.first is not None
    shares = ticket.prefix_shares
    least = shares.get(ranking.first.backend, 0.0)
    return any(reason.is_busy and shares.get(name, 0.0) > least for name, reason in ranking.passed_over)


def shed_error(refused: Refused) -> ShedError:
    """Return the error that tells a caller of a refusal."""
    if refused.reason is Reason.NO_BACKEND:
        return NoBackend(refused.sentence(), retry_after_s=refused.retry_after_s)
    return AtCapacity(refused.sentence(), code=refused.reason.value, retry_after_s=refused.retry_after_s)
