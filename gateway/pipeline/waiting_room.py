"""The waiting line at work: requests enter, and are woken when a place is theirs.

The line itself (core/waiting/) decides and never waits. Here one loop asks it for its next turn whenever
something has happened: a request came, a place was freed, a prompt was answered, a backend's state changed,
or a time has come. It takes the places offered, atomically, and wakes whom they belong to. A request that
waits costs an event; nobody polls.
"""

from collections.abc import Callable, Mapping, Sequence
from math import inf

import anyio

from gateway.core.errors import AtCapacity, NoBackend, ShedError
from gateway.core.selection import BackendView
from gateway.core.values import Candidate, Ranking
from gateway.core.waiting import MISS_PAUSE_S, Offer, Reason, Refused, Ticket, WaitingLine
from gateway.ports import Clock, Ledger, Slot

RELEASE_S = 1.0


class PolicyChanged(Exception):
    """Another policy is in force than when the request began to wait."""


class _Waiter:
    """Somebody who waits, and what became of it."""

    __slots__ = ("error", "place", "woken")

    def __init__(self) -> None:
        self.woken = anyio.Event()
        self.place: tuple[Candidate, Slot] | None = None
        self.error: ShedError | None = None


class WaitingRoom:
    """Admits requests, in the order of the line. `run` must run as long as requests do."""

    def __init__(
        self,
        line: WaitingLine,
        ledger: Ledger,
        views: Callable[[], Mapping[str, BackendView]],
        clock: Clock,
    ) -> None:
        """Take places on `ledger`, as `line` says; `views`: the backends as they stand, prefixes aside."""
        self.line = line
        self._ledger = ledger
        self._views = views
        self._clock = clock
        self._waiters: dict[str, _Waiter] = {}
        self._waited_for: frozenset[str] = frozenset()
        self._wake = anyio.Event()
        ledger.on_freed(lambda _: self.look())

    def look(self) -> None:
        """Have the line looked at, if anybody waits: something has happened that may let somebody start."""
        if self.line or self._waited_for:  # that nobody waits any more, others want to know
            self._wake.set()

    def send_on(self) -> None:
        """Have everybody who waits ask again, under the policy that is in force by now."""
        for waiter in self._waiters.values():
            waiter.woken.set()

    async def admit(
        self, ticket: Ticket, ranking: Ranking | None, *, has_waited: bool
    ) -> tuple[Candidate, Slot]:
        """Return a candidate and the slot taken on it, as soon as it is this request's turn.

        Args:
            ticket: The request.
            ranking: The backends, where they were ranked just now: if nobody waits and one of them has room,
                it is this request's turn already.
            has_waited: It was in the line before, so that nothing at its door keeps it out.

        Raises:
            AtCapacity: it may not wait, or has waited as long as it may.
            NoBackend: none that could take it is up.
            PolicyChanged: it has to be decided anew.
        """
        offer = None
        if ranking is not None and ranking.first is not None and not self.line:
            if (slot := self._at_once(ticket, ranking.first)) is not None:
                return ranking.first, slot
            offer = self.line.offer_at_once(ticket, ranking.eligible, self._clock.now())
        if offer is None:
            refused = self.line.enter(ticket, self._clock.now(), has_waited=has_waited)
            if refused is not None:
                raise _shed(refused)
        waiter = self._waiters[ticket.id] = _Waiter()
        try:
            if offer is not None:
                await self._take(offer)
            if waiter.place is None:
                self.look()
                await waiter.woken.wait()
        except anyio.get_cancelled_exc_class():
            if waiter.place is not None:  # the caller left at the very moment its turn came
                await self.release(ticket, waiter.place[1], answered=False)
            raise
        finally:
            del self._waiters[ticket.id]
            self.line.leave(ticket.id)
            self.look()  # what it was offered or held back may be another's
        if waiter.place is not None:
            return waiter.place
        raise waiter.error or PolicyChanged

    async def release(self, ticket: Ticket, slot: Slot, *, answered: bool) -> None:
        """Give a place back, and let the next one start; `answered`: whether a token came there."""
        if not self._ledger.release_at_once(slot):
            with anyio.move_on_after(RELEASE_S, shield=True):
                await self._ledger.release(slot)
        self.line.released(ticket.id, slot.backend, self._clock.now(), answered=answered)
        self.look()  # also where the ledger could not say so

    async def run(self) -> None:
        """Take turns until cancelled."""
        while True:
            wake = self._wake = anyio.Event()
            turn = self.line.turn(self._clock.now(), self._views())
            for refused in turn.refused:
                waiter = self._waiters.get(refused.id)
                if waiter is not None and not waiter.woken.is_set():  # else it is sent on, to ask again
                    waiter.error = _shed(refused)
                    waiter.woken.set()
            has_missed = await self._take_all(turn.offers)
            if not self._ledger.is_local:
                self._waited_for = self.line.waited_for()
                self._ledger.waits(self._waited_for)
            patience_s = None
            if turn.look_again_at is not None:
                patience_s = max(0.0, turn.look_again_at - self._clock.now())
            if has_missed:  # they are back in the line, of which the turn knew nothing
                patience_s = min(MISS_PAUSE_S, inf if patience_s is None else patience_s)
            with anyio.move_on_after(patience_s):
                await wake.wait()

    def _at_once(self, ticket: Ticket, first: Candidate) -> Slot | None:
        """Take a place without a turn, where nobody waits and nobody else has to be asked for it."""
        now = self._clock.now()
        if not self.line.may_start_at_once(ticket, now):
            return None
        slot = self._ledger.acquire_at_once(first.backend, first.claim, first.limits)
        if slot is not None:
            self.line.start_at_once(ticket, now)
        return slot

    async def _take_all(self, offers: Sequence[Offer]) -> bool:
        """Take the places offered, all at once: one after the other, a slow store would bound how many start.

        Returns whether one was gone.
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
        """Take the first place of an offer that is still free. Returns whether there was one."""
        ticket = offer.ticket
        for candidate in offer.candidates:
            slot = await self._ledger.acquire(candidate.backend, candidate.claim, candidate.limits)
            if not isinstance(slot, Slot):
                continue
            if not self.line.is_offered(ticket.id):  # it left meanwhile; it may stand in the line again
                await self._ledger.release(slot)
                return True
            self.line.started(ticket.id, self._clock.now())
            waiter = self._waiters[ticket.id]
            waiter.place = (candidate, slot)
            waiter.woken.set()
            return True
        gone = [candidate.backend for candidate in offer.candidates]
        self.line.missed(ticket.id, gone, self._clock.now())
        return False


def _shed(refused: Refused) -> ShedError:
    if refused.reason is Reason.NO_BACKEND:
        return NoBackend(refused.sentence(), retry_after_s=refused.retry_after_s)
    return AtCapacity(refused.sentence(), code=refused.reason.value, retry_after_s=refused.retry_after_s)
