"""The gateway's own classify, select, admit, queue and shed code, in front of a fleet in virtual time.

All backends are up. TPOT targets do not lower limits, and all models of a box are resident at once:
docs/replay.md says what that means for the figures.
"""

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any, Generic, TypeVar

from gateway.core import deciding, selection
from gateway.core.errors import GatewayError
from gateway.core.policy import Policy
from gateway.core.request import Prefixes
from gateway.core.request_features import RequestFeatures
from gateway.core.selection import BackendView
from gateway.core.virtual_fleet import Arriving, Fate, Fleet
from gateway.core.waiting import Refused, Ticket, WaitingLine, fastest_prefill_s, patient
from gateway.ports import Slot
from gateway.store.memory import MemoryLedger
from gateway.store.prefixes import MemoryPrefixIndex

T = TypeVar("T")
A = TypeVar("A", bound=Arriving)

Read = Callable[[A], tuple[RequestFeatures, str | None]]
"""Returns the features of an arrival, and the name of its caller's API key."""


def at_once(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that never suspends."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        result: T = stop.value
        return result
    raise RuntimeError("it waited")


class PolicyRouter(Generic[A]):
    """A gateway with this policy, where only time and servers are simulated.

    Attributes:
        classes: Class of each classified arrival, by its id.
    """

    def __init__(self, policy: Policy, read: Read[A]) -> None:
        """Start with an idle fleet and an empty queue."""
        self._policy = policy
        self._read = read
        self._idle = self._seen = deciding.idle(policy)
        self._ledger = MemoryLedger()
        self._line = WaitingLine()
        self._prefixes = MemoryPrefixIndex()
        self._slots: dict[int, Slot] = {}
        self._arrivals: dict[str, A] = {}
        self.classes: dict[int, str] = {}

    def arrive(self, fleet: Fleet[A], arrival: A) -> None:
        """Classify it and queue it; refuse it if it fits nowhere."""
        try:
            ticket = self._ticket(fleet, arrival)
        except GatewayError as error:
            fleet.refuse(arrival, error.code)
            return
        self._arrivals[ticket.id] = arrival
        refused = self._line.enter(ticket, fleet.now)
        if refused is not None:
            self._refuse(fleet, refused)
            return
        self.look(fleet)

    def answered(self, fleet: Fleet[A], fate: Fate[A]) -> None:
        """Its prefill work is done."""
        slot = self._slots[fate.arrival.id]
        if slot.load.long_unanswered:
            self._line.prefilled(str(fate.arrival.id), slot.backend, fleet.now)
        at_once(self._ledger.answered(slot))
        self.look(fleet)

    def ended(self, fleet: Fleet[A], fate: Fate[A]) -> None:
        """Release its slot."""
        at_once(self._ledger.release(self._slots.pop(fate.arrival.id)))
        self._line.released(str(fate.arrival.id), fate.backend, fleet.now)
        self.look(fleet)

    def left(self, fleet: Fleet[A], fate: Fate[A]) -> None:
        """Remove it."""
        self._line.leave(str(fate.arrival.id))

    def look(self, fleet: Fleet[A]) -> None:
        """Process a turn of the waiting line."""
        turn = self._line.turn(fleet.now, self._views())
        for offer in turn.offers:
            candidate = offer.candidates[0]
            slot = at_once(self._ledger.acquire(candidate.backend, candidate.claim, candidate.limits))
            if not isinstance(slot, Slot):
                self._line.missed(offer.ticket.id, [candidate.backend], fleet.now)
                fleet.look_at(fleet.now)
                continue
            arrival = self._arrivals.pop(offer.ticket.id)
            self._prefixes.remember(self.prefixes(arrival), candidate.backend)  # as at its first token
            self._slots[arrival.id] = slot
            self._line.started(offer.ticket.id, candidate.backend, fleet.now)
            fleet.send(arrival, candidate.backend)
            self.sent(fleet, candidate.backend)
        for refused in turn.refused:
            self._refuse(fleet, refused)
        if turn.next_turn_at is not None:
            fleet.look_at(turn.next_turn_at)

    def sent(self, fleet: Fleet[A], name: str) -> None:
        """Note that a request was sent to a backend."""

    def prefixes(self, arrival: A) -> Prefixes:
        """Return the boundaries of an arrival's messages (`request.Request.prefixes`); none if unknown."""
        return ()

    def _ticket(self, fleet: Fleet[A], arrival: A) -> Ticket:
        """Return the ticket of an arrival. Raises GatewayError if it is refused immediately."""
        policy = self._policy
        asked, key = self._read(arrival)
        request = asked.request(key)
        model = deciding.model_of(policy, request.model)
        held = self._prefixes.held(self.prefixes(arrival)) if policy.weights.prefix_affinity else {}
        views = selection.with_shares(self._views(), held) if held else self._views()
        traffic_class, decision = deciding.decide(policy, model, request, asked.estimate, lambda _: views)
        self.classes[arrival.id] = traffic_class.name
        demand = decision.demand
        members = policy.backends_of(traffic_class)
        if not any(selection.could_take(policy.backends[name], demand) for name in members):
            refusal = deciding.refusal(traffic_class, decision, self._idle)
            if refusal is not None:
                raise refusal
        patience_s = asked.patience_s
        if request.is_job or traffic_class.queue is not None:
            traffic_class, patience_s = replace(traffic_class, waiting=patient(traffic_class.waiting)), None
        return Ticket(
            id=str(arrival.id),
            model=model.id,
            policy=policy,
            traffic_class=traffic_class,
            demand=demand,
            key=key,
            arrived_at=fleet.now,
            prefill_s=fastest_prefill_s(policy, traffic_class.pools[0], demand),
            size_bytes=asked.size_bytes,
            deadline=None if patience_s is None else fleet.now + patience_s,
            prefix_shares=held,
        )

    def _views(self) -> Mapping[str, BackendView]:
        self._seen = {
            name: view if view.load == load else replace(view, load=load)
            for name, view in self._seen.items()
            for load in [self._ledger.load(name)]
        }
        return self._seen

    def _refuse(self, fleet: Fleet[A], refused: Refused) -> None:
        fleet.refuse(self._arrivals.pop(refused.id), refused.reason.value)
