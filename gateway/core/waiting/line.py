"""The queue itself: queued, offered and running requests. The package docstring states its rules."""

from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from itertools import chain
from math import inf
from types import MappingProxyType

from gateway.core import health, selection
from gateway.core.decision import Candidate, Ranking
from gateway.core.facts import Blocked, Flow, StartedTokens
from gateway.core.load import NO_LOAD, Load
from gateway.core.policy import WhenLate
from gateway.core.selection import BackendView
from gateway.core.swap_policy import Backlog
from gateway.core.value import valueclass
from gateway.core.waiting.expiries import Expiries
from gateway.core.waiting.fairness import LOOKAHEAD, Entry, Home, Lane, Rank, Shares, merged
from gateway.core.waiting.forecast import Forecasts
from gateway.core.waiting.long_waiting import LongWaiting
from gateway.core.waiting.placement import Placement, asks_no_less
from gateway.core.waiting.returns import RETRY_AFTER_MAX_S
from gateway.core.waiting.tickets import Foresight, Offer, Reason, Refused, Ticket, Turn, Waiter

MISS_PAUSE_S = 0.05
"""A backend whose offered slot was gone is not offered again for this long, unless a request ends there. A
choice: several round trips to a store, and a part of the age of a snapshot (`store.redis.TICK_S`)."""

UNKNOWN_WAIT_S = 5.0
"""After what time a refused caller should ask again while no slot can be forecast. A choice: a chat has ended
within it on most backends, and SDKs, which ask again twice, have not given up by then."""

MOVED_WAIT_S = 1.0
"""How long a request that another policy has moved to another class may wait there, whatever it has waited
before: a backend may have a slot for it. A choice: time for a turn, and for a probe of a new backend."""

AGAIN_WAIT_S = 0.1
"""How long a request that is tried again may wait, whatever it has waited before: another backend may be
idle. A choice: time for a turn, and for a second one if the offered slot was gone (`MISS_PAUSE_S`)."""

BLOCKED_S = 1.0
"""A large request keeps room from other processes once it has waited for this long. A choice: what becomes
free soon makes room for it, and others hear of it within another second."""

BLOCKED_KNOWN_S = 3.0
"""How long others leave a large request its room after its process was last heard of, which may be gone. A
choice: processes say every second what waits."""

_NO_BACKENDS: frozenset[str] = frozenset()
_NOTHING_OFFERED: Mapping[str, Load] = MappingProxyType({})


@valueclass(frozen=True, slots=True)
class _Offered:
    """An unanswered offer, the account it was charged to, and the tag of its key before the charge."""

    entry: Entry
    offer: Offer
    shares: Shares
    tag: float

    def uncharge(self) -> None:
        self.shares.uncharge(self.entry.ticket.key, self.entry.cost)


class WaitingLine:
    """The queue of one process. The package docstring states its rules."""

    def __init__(self) -> None:
        """Start empty."""
        self._lanes: dict[tuple[str, str], Lane] = {}
        self._waiting: dict[str, Entry] = {}
        self._shares: dict[Home, Shares] = {}
        self._offered: dict[str, _Offered] = {}
        self._forecasts = Forecasts(self._lanes, self._shares)
        self._started_at: dict[str, float] = {}  # per backend, of what has ended there the latest to start
        self._expiries = Expiries(self._waiting)
        self._long_waiting = LongWaiting()
        self._blocked: Mapping[str, tuple[Entry, Load]] = {}  # in the last turn, by backend
        self._blocked_elsewhere: Mapping[str, tuple[float, Load]] = {}  # since when, and what
        self._blocked_until = inf  # then the processes where it waits may be gone
        self._tokens_started = StartedTokens()
        self._gone_until: dict[str, float] = {}  # backends whose offered slot was gone
        self._beyond: dict[int, Entry] = {}  # entered when more of their class waited than a turn looks at
        self._full_classes: Mapping[tuple[str, str], Sequence[Ticket]] = {}  # without room in the last turn
        self._closed: AbstractSet[str] = _NO_BACKENDS  # held for others at the end of the last turn
        self._surplus: list[Entry] = []  # that have come to a full queue since
        self._numbers = 0

    # ------------------------------------------------------------ questions

    def __len__(self) -> int:
        return len(self._waiting)

    def waiting(self) -> Mapping[tuple[str, str], int]:
        """Return the number of queued requests per (model, class)."""
        return {name: len(lane.entries) for name, lane in self._lanes.items()}

    def oldest_waits_s(self, now: float) -> Mapping[tuple[str, str], float]:
        """Return the longest time a queued request has waited, per (model, class); 0 if none is queued.

        Jobs, which may wait without a limit, do not count, because no open connection depends on them.
        """
        return {
            name: max(
                (
                    entry.waited_s(now)
                    for entry in lane.entries.values()
                    if entry.ticket.traffic_class.waiting.max_wait_s < inf
                ),
                default=0.0,
            )
            for name, lane in self._lanes.items()
        }

    def waited_for(self) -> frozenset[str]:
        """Return the backends in the pools of queued requests."""
        if not self._waiting:
            return _NO_BACKENDS
        found: set[str] = set()
        for lane in self._lanes.values():
            entry = next(iter(lane.entries.values()), None)
            if entry is not None:  # requests of one class share their pools
                for name in entry.ticket.traffic_class.pools:
                    found.update(entry.ticket.policy.pools[name].backends)
        return frozenset(found)

    def long_waiting(self) -> Mapping[str, int]:
        """Return the number of queued long prompts, here and elsewhere, per backend; see `LongWaiting`."""
        return self._long_waiting.everywhere()

    def long_waiting_here(self) -> Mapping[str, int]:
        """Return the part of `long_waiting` that is queued here."""
        return dict(self._long_waiting.here)

    def wants(self, backends: Collection[str]) -> Mapping[str, Backlog]:
        """Return, per backend, the queued requests with it in their first pool that could run there."""
        found = {name: Backlog(started_at=self._started_at.get(name)) for name in backends}
        alike: dict[tuple[str, ...], list[float]] = {}  # by first pool: since when those that fit all wait
        for entry in self._waiting.values():
            ticket = entry.ticket
            since = entry.entered_at - ticket.waited_s
            if entry.fits_all and not ticket.failed:
                alike.setdefault(ticket.first_pool, []).append(since)
                continue
            for name in ticket.first_pool:
                if name in found and ticket.may_run_on(name):
                    found[name] += Backlog(1, since)
        for pool, waits in alike.items():
            together = Backlog(len(waits), min(waits))
            for name in found.keys() & set(pool):
                found[name] += together
        return found

    def tokens_started(self, now: float) -> Mapping[Flow, int]:
        """Return the tokens of the requests started from this queue, per flow; see `StartedTokens`."""
        return self._tokens_started.totals(now)

    def drains_per_s(self, now: float) -> Mapping[tuple[str, str], float | None]:
        """Return how many slots per second become free, per (model, class); see `Forecasts.drains_per_s`."""
        return self._forecasts.drains_per_s(now)

    def waiters(self, now: float, most: int = LOOKAHEAD) -> Sequence[Waiter]:
        """Return queued requests in the order in which they would start if all backends became free at once.

        Returns at most `LOOKAHEAD` requests of each class and kind, and at most `most` in total.
        """
        found: list[Waiter] = []
        ahead: dict[tuple[str, ...], int] = {}
        for shared in self._by_priority():
            for entry in merged(shared):
                ticket = entry.ticket
                position = ahead[ticket.first_pool] = ahead.get(ticket.first_pool, 0) + 1
                found.append(_waiter(entry, position, now))
                if len(found) >= most:
                    return found
        return found

    def position(self, ticket_id: str) -> int | None:
        """Return the position of a request (1 is next), or None if it is not queued.

        Requests of other classes that have the same first pool and would start before it count, too.
        """
        entry = self._waiting.get(ticket_id)
        return None if entry is None else self._forecasts.ahead_of(self._lane(entry.ticket), entry) + 1

    def foresee(
        self,
        ticket: Ticket,
        now: float,
        views: Mapping[str, BackendView] | None = None,
        ranking: Ranking | None = None,
    ) -> Foresight:
        """Return how long a request would wait from now on, queued or not, and its refusal if too long.

        Args:
            ticket: The request.
            now: Monotonic seconds.
            views: Current snapshots; by default, what the last turn left, if requests were queued then.
            ranking: See `enter`.
        """
        lane = self._lanes.get(ticket.lane)
        if lane is None or lane.home is None:  # none of its class has come, but others may be before it
            lane = Lane()
            lane.home = (ticket.traffic_class.priority, frozenset(ticket.first_pool))
            lane.shares = self._shares.get(lane.home, lane.shares)
        views = self._forecasts.views if views is None else views
        entry = self._waiting.get(ticket.id)
        if entry is None:
            entry = self._entry(ticket, now)
            if entry.is_long and views:  # others wait for a slot in any case, if they wait
                Placement(views, _NO_BACKENDS, now).place(entry)
                entry.is_full = entry.is_full or not self._has_room(lane, entry)
        ahead, wait_s = self._forecasts.wait_of(lane, entry, now, views)
        is_full = lane.is_full_for(ticket) and not self._is_let_in(lane, entry, ranking)
        reason = Reason.QUEUE_FULL if is_full else _foreseen(entry, wait_s, now)
        if reason is None or _is_demoted(entry, reason):
            return Foresight(wait_s, ahead, None)
        # As in `enter`: what is before it finds no room, so no turn would look for a slot for it.
        is_behind = is_full or not (self._has_room(lane, entry) or lane.is_first(entry))
        return Foresight(wait_s, ahead, _refused(entry, reason, ahead, wait_s, now), is_behind=is_behind)

    # ------------------------------------------------------------ events

    def expect(self, back_at: Mapping[str, float]) -> None:
        """Set the swapped-out backends and the earliest time each can be back, in monotonic seconds."""
        self._forecasts.back_at = back_at

    def enter(
        self, ticket: Ticket, now: float, *, has_waited: bool = False, ranking: Ranking | None = None
    ) -> Refused | None:
        """Add a request to the queue, or return why it is refused.

        Args:
            ticket: The request.
            now: Monotonic seconds.
            has_waited: It was queued before and left only for a new decision, so it is not refused.
            ranking: A fresh ranking of its backends, if there is one: who could start comes into a full queue
                for one turn.
        """
        lane, rules = self._settled(ticket), ticket.traffic_class.waiting
        entry = self._entry(ticket, now)
        if has_waited:
            most_s = rules.max_wait_s
            if ticket.is_demoted and rules.when_late is WhenLate.DEMOTE:
                entry.rank, most_s = Rank.BEHIND, rules.longest_wait_s
            entry.expires_at = _expiry(ticket, now, max(most_s, ticket.waited_s + MOVED_WAIT_S))
            self._insert(lane, entry, now)
            return None
        has_room = self._has_room(lane, entry)
        entry.is_full = not has_room
        ahead, wait_s = self._forecast(entry, now)
        if not ticket.refused and lane.is_full_for(ticket):  # else it was there before those that fill it
            if not self._is_let_in(lane, entry, ranking):
                return self._turn_away(entry, Reason.QUEUE_FULL, ahead, wait_s, now)
            self._surplus.append(entry)
        # The forecast does not apply to a request that may be able to start at once, unless all backends that
        # could serve it are swapped out. The next turn will tell.
        entry.is_unproven = has_room or lane.is_first(entry)
        may_start = entry.is_unproven and not self._forecasts.away_s(ticket, now)
        reason = None if may_start else _foreseen(entry, wait_s, now)
        if reason is not None and _is_demoted(entry, reason):
            entry.rank = Rank.BEHIND
            entry.expires_at = _expiry(ticket, now, rules.longest_wait_s)
        elif reason is not None:
            return self._turn_away(entry, reason, ahead, wait_s, now)
        if entry.is_unproven and lane.in_turn_counts[entry.is_ordinary] >= LOOKAHEAD:
            self._beyond[entry.number] = entry
        self._insert(lane, entry, now)
        return None

    def may_start_at_once(self, ticket: Ticket, now: float) -> bool:
        """Return whether a request could start right now without overtaking any other."""
        if self._waiting or self._gone_until:
            return False
        return _expiry(ticket, now, ticket.traffic_class.waiting.max_wait_s) > now

    def start_at_once(self, ticket: Ticket, place: Candidate, now: float) -> None:
        """Note that a request has started at once on `place`; it counts like an offer that was taken."""
        lane, cost = self._settled(ticket), ticket.cost
        lane.shares.start(ticket.key, cost)
        self._started(ticket, lane, place, cost, now)

    def offer_at_once(self, ticket: Ticket, candidates: tuple[Candidate, ...], now: float) -> Offer | None:
        """Offer a request a slot without a turn, or return None if it has to enter the queue.

        An offer is made only if it overtakes no other request, that is, while the queue is empty.
        `candidates` are the eligible backends, ranked just now with the load of `offered` included.
        """
        if not candidates or not self.may_start_at_once(ticket, now):
            return None
        lane, entry = self._settled(ticket), self._entry(ticket, now)
        offer = Offer(ticket, selection.offered(candidates, ticket.demand, ticket.prefix_shares))
        self._note_offer(entry, offer, lane.shares, now)
        return offer

    def leave(self, ticket_id: str) -> None:
        """Remove a queued request or withdraw its offer. Unknown ids are ignored."""
        entry = self._waiting.get(ticket_id)
        if entry is not None:
            self._remove(entry)
            return
        offered = self._offered.pop(ticket_id, None)
        if offered is not None:
            self._withdraw(offered)

    def offered(self) -> Mapping[str, Load]:
        """Return what is kept from newcomers, per backend.

        That is the load of unanswered offers, and what the first request of another process waits for.
        """
        if not self._offered and not self._blocked_elsewhere:
            return _NOTHING_OFFERED
        claims = {
            name: claim
            for name, (since, claim) in self._blocked_elsewhere.items()
            if since < self._blocked_since(name)
        }
        for offered in self._offered.values():
            first = offered.offer.candidates[0]
            claims[first.backend] = claims.get(first.backend, NO_LOAD) + first.claim
        return claims

    def is_demoted(self, ticket_id: str) -> bool:
        """Return whether a request is queued behind the others of its class because it is late."""
        entry = self._waiting.get(ticket_id)
        return entry is not None and entry.rank is Rank.BEHIND and not entry.ticket.demand.is_job

    def is_offered(self, ticket_id: str) -> bool:
        """Return whether a request has an unanswered offer."""
        return ticket_id in self._offered

    def started(self, ticket_id: str, backend: str, now: float) -> None:
        """Note that a request has taken the slot it was offered on `backend`."""
        offered = self._offered.pop(ticket_id)
        ticket = offered.entry.ticket
        offered.shares.advance(offered.tag)
        self._forecasts.withdrawn(ticket_id, offered.offer.candidates[0].backend)
        place = next(one for one in offered.offer.candidates if one.backend == backend)
        self._started(ticket, self._lane(ticket), place, ticket.cost, now)

    def missed(self, ticket_id: str, backends: Sequence[str], now: float) -> None:
        """Note that the offered slots were gone, and return the request to its position in the queue."""
        for name in backends:
            self._gone_until[name] = now + MISS_PAUSE_S
        offered = self._offered.pop(ticket_id, None)
        if offered is not None:
            self._withdraw(offered)
            self._insert(self._lane(offered.entry.ticket), offered.entry, now)

    def prefilled(self, ticket_id: str, backend: str, now: float) -> None:
        """Note the first token of a long prompt."""
        self._forecasts.prefilled(ticket_id, backend, now)

    def released(self, ticket_id: str, backend: str, now: float, *, answered: bool = True) -> None:
        """Note that a request that ran on `backend` has ended.

        `answered`: whether the backend began an answer. An attempt that failed earlier is left out of the
        drain rate.
        """
        self._gone_until.pop(backend, None)
        self._full_classes = {}  # there may be room again: the next turn will tell
        since = self._forecasts.ended(ticket_id, backend, now, answered=answered)
        if since is not None and since > self._started_at.get(backend, 0.0):
            self._started_at[backend] = since

    def forget_prefixes(self, backend: str) -> None:
        """Note that a backend has lost the conversations of those that wait: nobody waits for them there."""
        for entry in chain(self._waiting.values(), (one.entry for one in self._offered.values())):
            shares = entry.ticket.prefix_shares
            if backend in shares:
                others = {name: share for name, share in shares.items() if name != backend}
                entry.ticket, entry.stays = replace(entry.ticket, prefix_shares=others), ()
                entry.gated_s = entry.ticket.gated_s

    def charge(self, model: str, traffic_class: str, key: str | None, tokens: int) -> None:
        """Charge a key for tokens that another process started, so that fairness spans all processes."""
        lane = self._lanes.setdefault((model, traffic_class), Lane())
        lane.shares.charge_elsewhere(key, max(1, tokens))

    def note_long_waiting(self, elsewhere: Mapping[str, int]) -> None:
        """Set the number of long prompts queued in other processes, per backend of their first pool."""
        self._long_waiting.elsewhere = dict(elsewhere)

    def blocked_here(self, now: float) -> Mapping[str, Blocked]:
        """Return the large requests that come first here, and wait for a backend to have room for them."""
        return {
            name: Blocked(entry.waited_s(now), claim)
            for name, (entry, claim) in self._blocked.items()
            if self._blocked_since(name) <= now - BLOCKED_S
        }

    def note_blocked(self, elsewhere: Mapping[str, Blocked], now: float) -> None:
        """Set the large requests that wait in other processes, per backend the one that waits longest.

        Nothing takes their room, except a large one that has waited here for longer.
        """
        self._blocked_elsewhere = {name: (now - one.waited_s, one.claim) for name, one in elsewhere.items()}
        self._blocked_until = now + BLOCKED_KNOWN_S if elsewhere else inf

    def reading_here(self, now: float) -> Mapping[str, float]:
        """Return, per backend, seconds until the latest long prompt sent there from here should be read."""
        return self._forecasts.reading_here(now)

    def note_reading(self, elsewhere: Mapping[str, Mapping[str, float]]) -> None:
        """Set when other processes expect long prompts to be read, by backend and process."""
        self._forecasts.note_reading(elsewhere)

    def note_peers(self, number: int) -> None:
        """Set the number of other processes that take slots of the same backends."""
        self._forecasts.peers = number

    # ------------------------------------------------------------ the turn

    def turn(self, now: float, views: Mapping[str, BackendView]) -> Turn:
        """Return the requests that may start, the refused ones, and when to run the next turn.

        `views` are current snapshots with the load that the ledger counts. The load of unanswered offers is
        added here.
        """
        refused = self._expire(now)
        self._forget_blocked(now)
        self._full_classes = {}
        self._forecasts.views = {}
        self._closed = _NO_BACKENDS
        if not self._waiting:
            self._blocked = {}
            self._surplus.clear()
            return Turn((), refused, None)
        self._long_waiting.note_windows(views, self._waiting.values())
        seen = self._with_offers(views)
        placement = Placement(seen, self._paused(now), now)
        offers: list[Offer] = []
        hopeless: list[Entry] = []
        looked, has_long = 0, False
        for shared in self._by_priority():
            for shares in shared:
                for lane in shares.lanes:
                    lane.age(now)
            for entry in merged(shared):
                candidates = placement.place(entry)
                looked += 1
                if candidates is None:
                    hopeless.append(entry)
                elif candidates:
                    offers.append(Offer(entry.ticket, candidates))
                    has_long = has_long or entry.is_long
        for offer in offers:
            self._offer(offer, now)
        self._forecasts.views = self._with_offers(views) if offers else seen
        for entry in hopeless:
            no_backend = self._refuse(entry, Reason.NO_BACKEND, now)
            retry_after_s = _first_back_s(entry.ticket, views, now)
            refused.append(replace(no_backend, expected_wait_s=None, retry_after_s=retry_after_s))
        self._full_classes, self._blocked = placement.full_classes, placement.blocked
        self._closed = placement.closed
        sent_away = self._without_place(now)
        refused += sent_away
        late = self._late([*placement.foreseen, *self._found_full()], now, refused)
        # There is more to do if the lookahead limit may have ended the turn while slots were still free, if
        # an entry that held backends in this turn was refused or demoted, or comes after others now that
        # some of its key have started, or if a long prompt has started and keeps no others from spilling.
        may_go_on = bool(offers) and (has_long or placement.has_held or looked >= LOOKAHEAD)
        is_unfinished = self._waiting and (hopeless or sent_away or late or may_go_on)
        if is_unfinished:
            return Turn(offers, refused, now)
        next_look_at = placement.next_look_at
        if placement.has_held:  # for one that may no longer come first then
            next_look_at = min([next_look_at, *(lane.late_at for lane in self._lanes.values())])
        return Turn(offers, refused, self._next_look(next_look_at))

    # ------------------------------------------------------------ inside

    def _lane(self, ticket: Ticket) -> Lane:
        name = ticket.lane
        lane = self._lanes.get(name)
        if lane is None:
            lane = self._lanes[name] = Lane()
        return lane

    def _entry(self, ticket: Ticket, now: float) -> Entry:
        self._numbers += 1
        due_at = ticket.due_at
        start_by = due_at - ticket.prefill_s
        rank = Rank.LATE if now > start_by else Rank.TIMELY
        most_s = ticket.traffic_class.waiting.max_wait_s
        if ticket.failed or ticket.refused:
            most_s = max(most_s, ticket.waited_s + AGAIN_WAIT_S)
        return Entry(
            ticket,
            self._numbers,
            entered_at=now,
            expires_at=_expiry(ticket, now, most_s),
            due_at=due_at,
            start_by=start_by,
            is_long=ticket.is_long,
            gated_s=ticket.gated_s,
            fits_all=ticket.fits_all,
            rank=Rank.BEHIND if ticket.demand.is_job else rank,
        )

    def _has_room(self, lane: Lane, entry: Entry) -> bool:
        """Return whether there may be room for a newcomer, by what the last turn found for its class."""
        ticket = entry.ticket
        without_room = self._full_classes.get(ticket.lane, ())
        # Without a full backend, ordinary ones wait until others are looked at, or read: no forecast of that.
        may_know = entry.is_ordinary or lane.in_turn_counts[False] < LOOKAHEAD
        return may_know and not any(asks_no_less(ticket, one) for one in without_room)

    def _is_let_in(self, lane: Lane, entry: Entry, ranking: Ranking | None) -> bool:
        """Return whether a newcomer comes into a full queue for one turn.

        It does if that turn will look at it, and a backend has room for it that is not held for others.
        """
        if ranking is None or lane.in_turn_counts[entry.is_ordinary] >= LOOKAHEAD:
            return False
        is_open = any(one.backend not in self._closed for one in ranking.eligible)
        return is_open and self._has_room(lane, entry)

    def _without_place(self, now: float) -> Sequence[Refused]:
        """Refuse those that came to a full queue and found no slot, as far as it still is: the last first."""
        refused: list[Refused] = []
        while self._surplus:
            entry = self._surplus.pop()
            is_queued = self._waiting.get(entry.ticket.id) is entry
            if is_queued and self._lane(entry.ticket).is_full_for(entry.ticket, is_queued=True):
                refused.append(self._refuse(entry, Reason.QUEUE_FULL, now))
        return refused

    def _found_full(self) -> Sequence[Entry]:
        """Return newcomers that no turn has looked at, though this one has found that they have no room."""
        if not self._full_classes:
            return ()
        found: list[Entry] = []
        others: dict[int, Entry] = {}
        for number, entry in self._beyond.items():
            if not entry.is_unproven:  # a turn has looked at it
                continue
            if len(found) < LOOKAHEAD and not self._has_room(self._lane(entry.ticket), entry):
                entry.is_unproven, entry.is_full = False, True
                found.append(entry)
            else:
                others[number] = entry
        self._beyond = others
        return found

    def _settled(self, ticket: Ticket) -> Lane:
        """Return the lane of a ticket, moved to the home that the ticket's policy gives it."""
        lane = self._lane(ticket)
        if lane.policy is not ticket.policy:
            lane.policy = ticket.policy
            self._settle(lane, (ticket.traffic_class.priority, frozenset(ticket.first_pool)))
        return lane

    def _settle(self, lane: Lane, home: Home) -> None:
        """Let a lane share its account with lanes of the same home, which changes when the policy does."""
        old = lane.shares
        is_alone = old.lanes == [lane]
        if is_alone and lane.home is not None:
            del self._shares[lane.home]
        lane.home = home
        shares = self._shares.setdefault(home, old if is_alone else Shares([]))
        if shares is not old:
            lane.move_to(shares)
            if is_alone:
                shares.absorb(old)

    def _insert(self, lane: Lane, entry: Entry, now: float) -> None:
        lane.add(entry, now)
        self._waiting[entry.ticket.id] = entry
        self._expiries.note(entry)
        self._long_waiting.add(entry)

    def _remove(self, entry: Entry) -> None:
        self._lane(entry.ticket).remove(entry)
        del self._waiting[entry.ticket.id]
        self._beyond.pop(entry.number, None)
        self._long_waiting.remove(entry)

    def _offer(self, offer: Offer, now: float) -> None:
        entry = self._waiting[offer.ticket.id]
        self._remove(entry)
        self._note_offer(entry, offer, self._lane(entry.ticket).shares, now)

    def _started(self, ticket: Ticket, lane: Lane, place: Candidate, cost: int, now: float) -> None:
        self._forecasts.started(ticket.id, lane, place, now)
        self._tokens_started.add((ticket.model, ticket.traffic_class.name, ticket.key), cost, now)

    def _note_offer(self, entry: Entry, offer: Offer, shares: Shares, now: float) -> None:
        tag = shares.charge(entry.ticket.key, entry.cost)
        self._offered[offer.ticket.id] = _Offered(entry, offer, shares, tag)
        self._forecasts.sent(offer.ticket.id, offer.candidates[0], now)

    def _withdraw(self, offered: _Offered) -> None:
        self._forecasts.withdrawn(offered.entry.ticket.id, offered.offer.candidates[0].backend)
        offered.uncharge()

    def _refuse(self, entry: Entry, reason: Reason, now: float) -> Refused:
        ahead, wait_s = self._forecast(entry, now)
        self._remove(entry)
        return self._turn_away(entry, reason, ahead, wait_s, now)

    def _turn_away(
        self, entry: Entry, reason: Reason, ahead: int, wait_s: float | None, now: float
    ) -> Refused:
        """Return a refusal that tells the caller to ask again after those that were told so before it."""
        refused = _refused(entry, reason, ahead, wait_s, now)
        if reason is Reason.NO_BACKEND:
            return refused
        turn_s = _turn_s(wait_s)
        # A model that is swapped in is back for all at the same time.
        each_s = 0.0 if self._forecasts.away_s(entry.ticket, now) >= turn_s else turn_s / (ahead + 1)
        again_s = self._lane(entry.ticket).shares.returns.next_s(turn_s, each_s, now)
        return replace(refused, retry_after_s=again_s)

    def _forecast(self, entry: Entry, now: float) -> tuple[int, float | None]:
        """Return how many requests are ahead of a queued entry and its expected wait, None while unknown."""
        return self._forecasts.wait_of(self._lane(entry.ticket), entry, now, self._forecasts.views)

    def _late(self, entries: Sequence[Entry], now: float, refused: list[Refused]) -> bool:
        """Refuse or demote entries that found no slot in their first turn and would not get one in time."""
        found = False
        for entry in entries:
            if self._waiting.get(entry.ticket.id) is not entry:  # it has been refused
                continue
            reason = _foreseen(entry, self._forecast(entry, now)[1], now)
            if reason is None:
                continue
            found = True
            if _is_demoted(entry, reason):
                self._send_behind(entry)
            else:
                refused.append(self._refuse(entry, reason, now))
        return found

    def _send_behind(self, entry: Entry) -> None:
        self._lane(entry.ticket).send_behind(entry)
        longest_s = entry.ticket.traffic_class.waiting.longest_wait_s
        entry.expires_at = _expiry(entry.ticket, entry.entered_at, longest_s)
        self._expiries.note(entry)

    def _forget_blocked(self, now: float) -> None:
        if self._blocked_until <= now:
            self.note_blocked({}, now)

    def _blocked_since(self, backend: str) -> float:
        """Return since when the large request has waited that comes first on a backend; inf if none does."""
        entry, claim = self._blocked.get(backend, (None, NO_LOAD))
        if entry is None or claim == NO_LOAD or self._waiting.get(entry.ticket.id) is not entry:
            return inf
        return entry.entered_at - entry.ticket.waited_s

    def _expire(self, now: float) -> list[Refused]:
        refused: list[Refused] = []
        for entry in self._expiries.take(now):
            rules = entry.ticket.traffic_class.waiting
            overdue = entry.ticket.deadline is not None and entry.ticket.deadline <= now
            may_stay = rules.when_late is WhenLate.DEMOTE and entry.rank is not Rank.BEHIND
            if may_stay and not overdue:
                self._send_behind(entry)
            else:
                reason = Reason.DEADLINE if overdue else Reason.WAITED_TOO_LONG
                late = self._refuse(entry, reason, now)
                refused.append(replace(late, expected_wait_s=None) if overdue else late)
        return refused

    def _with_offers(self, views: Mapping[str, BackendView]) -> dict[str, BackendView]:
        """Return the views with the load of unanswered offers and the queued long prompts added."""
        extra = self.offered()
        full = dict(views)
        long_waiting = self.long_waiting()
        for name in {*extra, *long_waiting} & views.keys():
            view = views[name]
            full[name] = replace(
                view,
                load=view.load + extra.get(name, NO_LOAD),
                long_waiting=view.long_waiting + long_waiting.get(name, 0),
            )
        return full

    def _paused(self, now: float) -> frozenset[str]:
        self._gone_until = {name: until for name, until in self._gone_until.items() if until > now}
        return frozenset(self._gone_until)

    def _by_priority(self) -> list[list[Shares]]:
        groups: dict[int, list[Shares]] = {}
        for (priority, _), shares in self._shares.items():
            if any(lane.entries for lane in shares.lanes):
                groups.setdefault(priority, []).append(shares)
        return [groups[priority] for priority in sorted(groups, reverse=True)]

    def _next_look(self, at: float = inf) -> float | None:
        if not self._waiting:
            return None
        found = min([at, self._expiries.next_at(), self._blocked_until, *self._gone_until.values()])
        return None if found == inf else found


def _waiter(entry: Entry, position: int, now: float) -> Waiter:
    ticket = entry.ticket
    return Waiter(
        id=ticket.id,
        model=ticket.model,
        traffic_class=ticket.traffic_class.name,
        key=ticket.key,
        pool=ticket.traffic_class.pools[0],
        position=position,
        prompt_tokens=ticket.demand.prompt_tokens,
        waited_s=entry.waited_s(now),
        due_in_s=entry.due_at - now,
        is_behind=entry.rank is Rank.BEHIND,
        tries=len(ticket.failed),
        stays_for=entry.stays[0][0].backend if entry.stays else "",
    )


def _expiry(ticket: Ticket, entered_at: float, wait_s: float) -> float:
    """Return when a request will have waited `wait_s` in total, or its deadline if that is earlier."""
    expires_at = entered_at + wait_s - ticket.waited_s
    return expires_at if ticket.deadline is None else min(expires_at, ticket.deadline)


def _foreseen(entry: Entry, wait_s: float | None, now: float) -> Reason | None:
    """Return the reason to refuse a request that would wait another `wait_s`, or None if that is in time."""
    deadline = entry.ticket.deadline
    if wait_s is None:
        return None
    if deadline is not None and now + wait_s > deadline:
        return Reason.DEADLINE
    if entry.waited_s(now) + wait_s > entry.ticket.traffic_class.waiting.max_wait_s:
        return Reason.WAIT_TOO_LONG
    return None


def _is_demoted(entry: Entry, reason: Reason) -> bool:
    """Return whether a request that would wait too long waits behind the others, instead of being refused."""
    when_late = entry.ticket.traffic_class.waiting.when_late
    return reason is Reason.WAIT_TOO_LONG and when_late is WhenLate.DEMOTE


def _first_back_s(ticket: Ticket, views: Mapping[str, BackendView], now: float) -> float:
    """Return when to ask again for a backend of a request's class, if none of them is up."""
    known = [views[name] for name in ticket.policy.backends_of(ticket.traffic_class) if name in views]
    out = [
        health.retry_after_s(view.status, now)
        for view in known
        if not health.usable(view.status) and selection.could_take(view.backend, ticket.demand)
    ]
    return min(RETRY_AFTER_MAX_S, *out) if out else 1.0


def _turn_s(wait_s: float | None) -> float:
    """Return after what time a caller's turn would come, as far as its forecast wait tells."""
    return UNKNOWN_WAIT_S if wait_s is None else wait_s


def _refused(entry: Entry, reason: Reason, ahead: int, wait_s: float | None, now: float) -> Refused:
    return Refused(
        id=entry.ticket.id,
        reason=reason,
        position=ahead + 1,
        expected_wait_s=wait_s,
        retry_after_s=max(1.0, min(RETRY_AFTER_MAX_S, _turn_s(wait_s))),
        waited_s=entry.waited_s(now),
    )
