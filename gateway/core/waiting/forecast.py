"""How long a queued request will wait: for a slot, for the gate for long prompts, for its model. Pure.

A slot becomes free at the measured rate at which requests end (`Drain`). The gate for long prompts opens when
what is before a prompt has been read (`Prefills`). A model that is swapped out is back no sooner than its box
says. The longest of these waits counts.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from gateway.core import health, selection
from gateway.core.decision import Candidate
from gateway.core.selection import BackendView
from gateway.core.waiting.drain import Drain
from gateway.core.waiting.fairness import Entry, Home, Lane, Shares
from gateway.core.waiting.prefills import Prefills, level
from gateway.core.waiting.tickets import Ticket

Views = Mapping[str, BackendView]


class Forecasts:
    """What runs and what is read, and how long others will wait for it.

    Attributes:
        peers: Number of other processes that take slots of the same backends.
        back_at: The swapped-out backends, and the earliest time each can be back, in monotonic seconds.
        views: What the last turn left, with its offers; empty if nobody was queued.
    """

    def __init__(self, lanes: Mapping[tuple[str, str], Lane], shares: Mapping[Home, Shares]) -> None:
        """Start with nothing running. `lanes` and `shares` are those of the queue, now and later."""
        self.peers = 0
        self.back_at: Mapping[str, float] = {}
        self.views: Views = {}
        self._lanes = lanes
        self._shares = shares
        self._running: dict[str, tuple[Lane, float, bool, bool]] = {}  # since when; has spilled; is long
        self._spilled: dict[str, Counter[Lane]] = {}  # running ones, by backend
        self._prefills: dict[str, Prefills] = {}  # of long prompts, by backend

    # ------------------------------------------------------------ what runs

    def started(self, ticket_id: str, lane: Lane, place: Candidate, now: float) -> None:
        """Note that a request of a lane has started."""
        backend, is_long = place.backend, place.claim.long_seqs > 0
        lane.drain.note_started(now)
        if is_long:
            self._prefills_of(backend).drain.note_started(now)
            self.sent(ticket_id, place, now)
        has_spilled = lane.home is not None and backend not in lane.home[1]
        if has_spilled:
            self._count_spilled(lane, backend, 1)
        self._running[ticket_id] = (lane, now, has_spilled, is_long)

    def ended(self, ticket_id: str, backend: str, now: float, *, answered: bool) -> float | None:
        """Note that a request has ended. Return since when it ran; None if it is not known."""
        running = self._running.pop(ticket_id, None)
        if running is None:
            return None
        lane, since, has_spilled, is_long = running
        if has_spilled:
            self._count_spilled(lane, backend, -1)
        lane.drain.note_released(since, now, answered=answered)
        if is_long:
            prefills = self._prefills_of(backend)
            prefills.end(ticket_id)
            prefills.drain.note_released(since, now, answered=answered)
        return since

    def sent(self, ticket_id: str, place: Candidate, now: float) -> None:
        """Note that a prompt is sent to a backend, or will be: if it is long, it holds the gate there."""
        if place.claim.long_unanswered:
            self._prefills_of(place.backend).begin(ticket_id, place.claim, now)

    def withdrawn(self, ticket_id: str, backend: str) -> None:
        """Note that a prompt is not sent to a backend after all."""
        if backend in self._prefills:
            self._prefills[backend].end(ticket_id)

    def prefilled(self, ticket_id: str, backend: str, now: float) -> None:
        """Note the first token of a long prompt."""
        self._prefills_of(backend).read(ticket_id, now)

    def reading_here(self, now: float) -> Mapping[str, float]:
        """Return, per backend, seconds until the latest long prompt sent there from here should be read."""
        return {name: known.own_s(now)[-1] for name, known in self._prefills.items() if known.begun}

    def note_reading(self, elsewhere: Mapping[str, Mapping[str, float]]) -> None:
        """Set when other processes expect long prompts to be read, by backend and process."""
        for name in elsewhere.keys() | self._prefills.keys():
            self._prefills_of(name).elsewhere = elsewhere.get(name, {})

    # ------------------------------------------------------------ what is to be expected

    def wait_of(self, lane: Lane, entry: Entry, now: float, views: Views) -> tuple[int, float | None]:
        """Return how many requests are ahead of an entry and its expected wait, None while unknown."""
        ahead = self.ahead_of(lane, entry)
        wait_s = self.away_s(entry.ticket, now)
        if entry.gated_s:
            wait_s = max(wait_s, self._gate_s(lane, entry, now, views))
        if entry.is_full or not entry.is_long:
            wait_s = max(wait_s, self._slot_s(lane, entry, ahead, now, views))
        return ahead, wait_s or None

    def ahead_of(self, lane: Lane, entry: Entry) -> int:
        """Return how many requests of any class with the same first pool would start before an entry."""
        assert lane.home is not None  # it got one from the entry's ticket
        above = (len(one.entries) - one.jobs for shares in self._above(lane.home) for one in shares.lanes)
        return lane.shares.ahead_of(lane, entry) + sum(above)

    def away_s(self, ticket: Ticket, now: float) -> float:
        """Return the time until the first backend that could take a request is back; 0 if one is running.

        One that the operator drains is not waited for, in or out. If all are drained, no time tells: 0.
        """
        if not self.back_at:
            return 0.0
        known = ticket.policy.backends
        names = [one for one in ticket.policy.backends_of(ticket.traffic_class) if not known[one].drain]
        back_at = min((self.back_at.get(name, now) for name in names if ticket.may_run_on(name)), default=now)
        return max(0.0, back_at - now)

    def drains_per_s(self, now: float) -> Mapping[tuple[str, str], float | None]:
        """Return how many slots per second become free, per (model, class); None while that is unknown.

        Slots of other classes with the same first pool count, because any of these classes can use them, and
        slots of requests that have spilled there.
        """
        pools: dict[frozenset[str], list[Drain]] = {}
        for lane in self._lanes.values():
            if lane.home is not None:
                pools.setdefault(lane.home[1], []).append(lane.drain)
        rates = {pool: self._rate(pool, drains, now) for pool, drains in pools.items()}
        return {
            name: None if lane.home is None else rates[lane.home[1]] for name, lane in self._lanes.items()
        }

    # ------------------------------------------------------------ inside

    def _gate_s(self, lane: Lane, entry: Entry, now: float, views: Views) -> float:
        """Return the time until what has to be prefilled before a long prompt is done, where it can run.

        Slots that other requests free meanwhile are of no use to it.
        """
        busy_s, factors = [], []
        at_once = entry.ticket.reading_pool.gates.long_prefills or 1
        for view in _readers(entry.ticket, views):
            prefills = self._prefills_of(view.backend.id)
            is_open = view.load.long_unanswered < at_once
            busy_s.append(0.0 if is_open else prefills.left_s(view.load, now))
            factors.append(prefills.factor)
        if not factors:
            return 0.0
        ahead_s = sum(one.gated_s for one in self._those_ahead_of(lane, entry))
        return level(busy_s, ahead_s * sum(factors) / len(factors))

    def _slot_s(self, lane: Lane, entry: Entry, ahead: int, now: float, views: Views) -> float:
        """Return the time until a slot for an entry becomes free, behind so many others; 0 if unknown."""
        full = _full_of_documents(entry.ticket, views) if entry.is_long else ()
        if full:  # what else ends there makes no room for it
            ahead = sum(one.is_long for one in self._those_ahead_of(lane, entry))
            drains = [self._prefills_of(view.backend.id).drain for view in full]
            running = sum(view.load.long_seqs for view in full) / (1 + self.peers) if self.peers else 0.0
            per_s = Drain.per_s(drains, now, running)
        else:
            per_s = self._per_s(lane, now)
        return 0.0 if per_s is None else (ahead + 1) / per_s

    def _per_s(self, lane: Lane, now: float) -> float | None:
        """Return the slots per second that become free in a lane's first pool, or None while unknown."""
        assert lane.home is not None  # it got one from the entry's ticket
        pool = lane.home[1]
        drains = [one.drain for one in self._lanes.values() if one.home is not None and one.home[1] == pool]
        return self._rate(pool, drains, now)

    def _rate(self, pool: frozenset[str], drains: Sequence[Drain], now: float) -> float | None:
        """Return the slots per second that become free in a pool, which is the first one of these classes."""
        guests = [
            (lane.drain, running)
            for name in pool & self._spilled.keys()
            for lane, running in self._spilled[name].items()
        ]
        return Drain.per_s(drains, now, self._even_part(pool), guests)

    def _even_part(self, pool: frozenset[str]) -> float:
        """Return this process's even part of what all processes run on a pool; 0 without peers.

        Whichever process waits may take a slot that another one frees. By its own requests alone, a process
        that runs hardly any would expect to wait until one of these ends.
        """
        if not self.peers:
            return 0.0
        running = sum(self.views[name].load.seqs for name in pool & self.views.keys())
        return running / (1 + self.peers)

    def _those_ahead_of(self, lane: Lane, entry: Entry) -> Iterator[Entry]:
        """Yield the requests of any class with the same first pool that would start before an entry."""
        assert lane.home is not None  # it got one from the entry's ticket
        yield from lane.shares.those_ahead_of(lane, entry)
        for shares in self._above(lane.home):
            yield from shares.in_turn()

    def _above(self, home: Home) -> Iterator[Shares]:
        """Yield the accounts of higher priority with the same first pool."""
        own_priority, own_pool = home
        for (priority, pool), shares in self._shares.items():
            if pool == own_pool and priority > own_priority:
                yield shares

    def _count_spilled(self, lane: Lane, backend: str, change: int) -> None:
        spilled = self._spilled.setdefault(backend, Counter())
        spilled[lane] += change
        if not spilled[lane]:
            del spilled[lane]
        if not spilled:
            del self._spilled[backend]

    def _prefills_of(self, backend: str) -> Prefills:
        known = self._prefills.get(backend)
        if known is None:
            known = self._prefills[backend] = Prefills()
        return known


def _full_of_documents(ticket: Ticket, views: Views) -> Sequence[BackendView]:
    """Return the backends that could read a long prompt, if each has as many of them as it may."""
    pool = ticket.reading_pool
    if pool.gates.long_seqs is None:
        return ()
    most = max(pool.gates.long_seqs, ticket.demand.seqs) - ticket.demand.seqs
    found = _readers(ticket, views)
    return found if all(view.load.long_seqs > most for view in found) else ()


def _readers(ticket: Ticket, views: Views) -> Sequence[BackendView]:
    """Return the backends that could read a long prompt."""
    names = [name for name in ticket.reading_pool.backends if name in views and name not in ticket.failed]
    return [
        view
        for view in map(views.__getitem__, names)
        if health.usable(view.status) and selection.could_take(view.backend, ticket.demand, view.capacity)
    ]
