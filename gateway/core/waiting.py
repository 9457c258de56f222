"""The waiting line: who starts where next, and who is told that waiting will not help. Pure.

One line per gateway process. Every request enters it while anybody waits, also when nothing is full, so that
no newcomer passes those that wait for the same place:

    enter(ticket, now)      -> Refused, or None: it waits
    offer_at_once(ticket, candidates, now) -> the same as an offer in its turn, where nobody waits
    turn(now, views)        -> offers: who may start where; refused: who waited too long; look_again_at
    started(id, now)           the place was taken; the request runs
    missed(id, backends, now)  it was gone: back to its place in the line
    released(id, backend, now, answered)  it ended; the line measures how fast places come free
    leave(id)                  the caller left

Order. The higher priority first. Among the classes of one priority with the same first pool, start-time
fair queueing between API keys: each key's share of the tokens started is equal while both have something
waiting, however much one of them sends, and in whatever class. What a key starts in another first pool is
not held against it. Within a key, the earliest deadline among those that can still be met, then the
shortest: at saturation, plain order of arrival and plain earliest-deadline are nearly as bad as each other,
because both spend the place on what is late already (docs/routing.md). A request that was sent behind
(`WhenLate.DEMOTE`) comes after all others of its class.

Who blocks whom. A request that does not fit *holds* the backends of its first pool that are at their
knee, out of KV blocks or busy with prompts: nobody after it is started there, whatever its class, so that
small requests cannot starve a large one. Its class may allow it to be passed `passes_max` times before
that. The gates for long prompts hold nothing: a document that waits for another to be read does not keep
chats from the same backend. Nor does a spill hold the other pool's backends.

Time is an argument. Nothing here waits; whoever owns the line calls `turn` when something was freed, when
somebody entered, and at `look_again_at`.
"""

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum, StrEnum
from heapq import heapify, heappop, heappush
from math import exp, inf
from types import MappingProxyType
from typing import Any, TypeVar

from gateway.core import admission, selection
from gateway.core.facts import Flow, StartedTokens, summed
from gateway.core.health import State
from gateway.core.selection import BackendView
from gateway.core.swap_policy import Wants
from gateway.core.value import valueclass
from gateway.core.values import (
    UNLIMITED,
    Candidate,
    Demand,
    Exclusion,
    Load,
    Policy,
    TrafficClass,
    Waiting,
    WhenLate,
)

_T = TypeVar("_T", bound=Any)

LOOKAHEAD = 64
"""Requests of one class that one turn looks at. Bounds its cost."""

MISS_PAUSE_S = 0.05
"""A backend whose place was gone is not offered again before this, or before something is released there."""

RETRY_AFTER_MAX_S = 59.0
"""Above a minute some SDKs ignore Retry-After and come back at once."""

STARTS_OVER_S = 5.0
"""Time constant over which starts are counted."""

PUT_BACK_TOKENS = 262_144
"""How far a key is put back at most for what it started elsewhere: one request of the largest window. What it
is charged beyond that is forgotten, so that a key whose gateway has gone is not shut out by all others."""

RESIDENCE_WEIGHT = 0.1
"""Weight of the newest request in the mean time that requests stay."""


class Reason(StrEnum):
    """Why a request was not let wait, or not any longer. Few and fixed: a metric label and an error code."""

    QUEUE_FULL = "queue_full"  # as many wait, or as many bytes, as may
    WAIT_TOO_LONG = "wait_too_long"  # at the measured rate it would wait longer than its class allows
    WAITED_TOO_LONG = "waited_too_long"  # it did
    DEADLINE = "deadline"  # its caller's own deadline would pass, or has passed
    NO_BACKEND = "no_backend"  # none that could take it is up


@valueclass(frozen=True, slots=True)
class Ticket:
    """A request that wants a place.

    Attributes:
        id: Unique among those that wait or run.
        model: Id of its model policy; with the class's name it says which line it stands in.
        policy, traffic_class, demand: What decides where it may go.
        key: Name of its caller's API key; None stands for one of its own.
        arrived_at: When it came in, monotonic seconds. A request that is tried again keeps it.
        prefill_s: Unloaded prefill of its prompt on the fastest backend of its first pool.
        size_bytes: What it keeps in memory while it waits.
        deadline: When its caller wants the first token at the latest, or None.
        failed: Backends it was tried on.
        waited_s: How long it waited for the places on which it was tried, or as a job in the store. What the
            tries took is not in it.
        prefix_shares: Per backend, the share of its conversation that was seen there.
    """

    id: str
    model: str
    policy: Policy
    traffic_class: TrafficClass
    demand: Demand
    key: str | None
    arrived_at: float
    prefill_s: float = 0.0
    size_bytes: int = 0
    deadline: float | None = None
    failed: frozenset[str] = frozenset()
    waited_s: float = 0.0
    prefix_shares: Mapping[str, float] = field(default_factory=dict)

    @property
    def first_pool(self) -> tuple[str, ...]:
        """The backends of its first choice."""
        return self.policy.pools[self.traffic_class.pools[0]].backends

    @property
    def is_long(self) -> bool:
        """Whether its prompt counts as long where it would rather go."""
        return admission.is_long(self.policy.pools[self.traffic_class.pools[0]].gates, self.demand)

    @property
    def cost(self) -> int:
        """What a start is charged to its key with, in tokens."""
        return max(1, self.demand.seqs * self.demand.total_tokens)

    @property
    def due_at(self) -> float:
        """When its first token is due: by its class, or earlier by its caller."""
        waiting = self.traffic_class.waiting
        due = self.arrived_at + waiting.ttft_target_s + waiting.prefill_weight * self.prefill_s
        return due if self.deadline is None else min(due, self.deadline)


def patient(waiting: Waiting) -> Waiting:
    """Return the rules by which work waits that nobody holds a connection open for: without a limit."""
    return replace(
        waiting,
        max_wait_s=inf,
        waiting_max=UNLIMITED,
        waiting_bytes_max=UNLIMITED,
        keep_alive_after_s=None,
    )


def fastest_prefill_s(policy: Policy, traffic_class: TrafficClass, demand: Demand) -> float:
    """Return a prompt's unloaded prefill on the fastest backend of the class's first pool, in seconds."""
    fastest_s, before = inf, None
    for name in policy.pools[traffic_class.pools[0]].backends:
        backend = policy.backends[name]
        if before is None or not admission.read_alike(backend, before):
            fastest_s = min(fastest_s, admission.prefill_s(backend, demand))
        before = backend
    return 0.0 if before is None else fastest_s


@dataclass(frozen=True, slots=True)
class Refused:
    """Why a request may not wait, and what to tell its caller.

    Attributes:
        id: The ticket's.
        reason: See `Reason`.
        position: Its place among all that want the same first pool, of whatever class, 1 being next.
        expected_wait_s: How long it would have to wait at the rate measured; None while nothing is known.
        retry_after_s: When to come back, seconds in 1..59.
        waited_s: How long it has waited, before earlier tries too.
    """

    id: str
    reason: Reason
    position: int
    expected_wait_s: float | None
    retry_after_s: float
    waited_s: float = 0.0

    def sentence(self) -> str:
        """Return the same in words, for the caller."""
        match self.reason:
            case Reason.NO_BACKEND:
                return "No backend that could take this request is up."
            case Reason.QUEUE_FULL:
                what = "The queue for requests like this one is full"
            case Reason.WAITED_TOO_LONG:
                what = f"No place came free within {self.waited_s:.1f} s"
            case Reason.DEADLINE:
                what = "A place would come free only after the request's own deadline"
            case Reason.WAIT_TOO_LONG:
                what = "A place would come free too late"
        if self.expected_wait_s is None:
            return f"{what} (position {self.position})."
        return f"{what} (position {self.position}, about {self.expected_wait_s:.1f} s to wait)."


@dataclass(frozen=True, slots=True)
class Waiter:
    """A request that waits, for an operator.

    Attributes:
        id, model, traffic_class, key: See `Ticket`.
        pool: Id of its first pool.
        position: Its place among those that want the same first pool, 1 being next.
        prompt_tokens: Of its prompt.
        waited_s: How long it has waited, for the places of earlier tries too.
        due_in_s: When its first token is due, from now; negative where that has passed.
        is_behind: Whether it was sent behind the others.
        tries: Backends it was tried on.
    """

    id: str
    model: str
    traffic_class: str
    key: str | None
    pool: str
    position: int
    prompt_tokens: int
    waited_s: float
    due_in_s: float
    is_behind: bool
    tries: int


@valueclass(frozen=True, slots=True)
class Offer:
    """A request that may start: take a place on the first of these that still has one."""

    ticket: Ticket
    candidates: tuple[Candidate, ...]


@valueclass(frozen=True, slots=True)
class Turn:
    """What is to be done now.

    Attributes:
        offers: Who may start, in order. Each is answered with `started`, `missed` or `leave`.
        refused: Who must be told that waiting did not help; they have left the line.
        look_again_at: When to ask again if nothing happens before, monotonic seconds; None: not needed.
    """

    offers: Sequence[Offer]
    refused: Sequence[Refused]
    look_again_at: float | None


class _Standing(IntEnum):
    TIMELY = 0  # its deadline can be met
    LATE = 1  # it cannot
    BEHIND = 2  # it was sent behind the others


@dataclass(slots=True, eq=False)
class _Entry:
    """A ticket in the line. Mutable: its standing changes as time goes by."""

    ticket: Ticket
    number: int
    entered_at: float
    expires_at: float
    due_at: float
    start_by: float
    is_long: bool
    standing: _Standing = _Standing.TIMELY
    passed: int = 0
    is_unproven: bool = (
        False  # nobody of its class was ahead: its first turn says whether it has to wait at all
    )

    @property
    def cost(self) -> int:
        """See `Ticket.cost`."""
        return self.ticket.cost

    def waited_s(self, now: float) -> float:
        """Return how long it has waited, for the places of earlier tries too."""
        return self.ticket.waited_s + now - self.entered_at


@dataclass(slots=True, eq=False)
class _Flow:
    """What waits in turn for one key of one class. Lists sorted; the last member is the entry's number."""

    timely: list[tuple[float, int]] = field(default_factory=list)  # by deadline
    late: list[tuple[float, int]] = field(default_factory=list)  # by length

    def __len__(self) -> int:
        return len(self.timely) + len(self.late)

    def in_order(self) -> Iterator[int]:
        for _, number in self.timely:
            yield number
        for _, number in self.late:
            yield number


@dataclass(slots=True)
class _Drain:
    """How fast requests of one class get a place, measured."""

    running: int = 0
    residence_s: float | None = None
    starts: float = 0.0
    at: float = 0.0

    def note_started(self, now: float) -> None:
        self.starts = self._decayed(now) + 1
        self.at = now
        self.running += 1

    def note_released(self, since: float, now: float, *, answered: bool) -> None:
        """Count what started at `since` and has ended: unless it was answered, as if it had never run."""
        self.running -= 1
        if not answered:
            self.starts = max(0.0, self._decayed(now) - exp((since - now) / STARTS_OVER_S))
            self.at = now
            return
        stayed_s = now - since
        if self.residence_s is None:
            self.residence_s = stayed_s
        else:
            self.residence_s += RESIDENCE_WEIGHT * (stayed_s - self.residence_s)

    def _decayed(self, now: float) -> float:
        return self.starts * exp((self.at - now) / STARTS_OVER_S)

    @staticmethod
    def per_s(drains: Sequence["_Drain"], now: float) -> float | None:
        """Return places per second of all these, or None before the first request has ended.

        The better of two measures: Little's law, requests that run over the time they stay, and what
        starts at present. Each is too low at times: the first while a burst fills an idle fleet, the
        second while nothing had to wait. Those of which none has ended yet are taken to stay as long as
        the others.
        """
        known = [(drain.running, drain.residence_s) for drain in drains if drain.residence_s]
        if not known:
            return None
        ended = sum(running / residence_s for running, residence_s in known)
        of_them = sum(running for running, _ in known)
        if of_them:
            ended *= sum(drain.running for drain in drains) / of_them
        started = (sum(drain._decayed(now) for drain in drains) - 1) / STARTS_OVER_S
        best = max(started, ended)
        return best if best > 0 else None


class _Lane:
    """The line of one class."""

    def __init__(self) -> None:
        self.entries: dict[int, _Entry] = {}
        self.size_bytes = 0
        self.drain = _Drain()
        self.home: _Home | None = None  # what it shares places with, once one has entered
        self.policy: Policy | None = None  # of which that is
        self.shares = _Shares([self])
        self.behind: list[int] = []
        self._flows: dict[str | None, _Flow] = {}
        self._starts: list[tuple[float, int]] = []  # the timely of all keys, by when they must start

    @property
    def in_turn(self) -> int:
        """How many wait that were not sent behind the others."""
        return len(self.entries) - len(self.behind)

    # ------------------------------------------------------------ membership

    def move_to(self, shares: "_Shares") -> None:
        """Count what waits here among others from now on."""
        for key in self._flows:
            self.shares.part(key)
            shares.join(key)
        self.shares.lanes.remove(self)
        shares.lanes.append(self)
        self.shares = shares

    def add(self, entry: _Entry, now: float) -> None:
        self.entries[entry.number] = entry
        self.size_bytes += entry.ticket.size_bytes
        self._place(entry, now)

    def remove(self, entry: _Entry) -> None:
        del self.entries[entry.number]
        self.size_bytes -= entry.ticket.size_bytes
        self._take_out(entry)

    def send_behind(self, entry: _Entry) -> None:
        self._take_out(entry)
        entry.standing = _Standing.BEHIND
        insort(self.behind, entry.number)

    def _place(self, entry: _Entry, now: float) -> None:
        if entry.standing is _Standing.BEHIND:
            insort(self.behind, entry.number)
            return
        key = entry.ticket.key
        flow = self._flows.get(key)
        if flow is None:
            flow = self._flows[key] = _Flow()
            self.shares.join(key)
        if now > entry.start_by:
            entry.standing = _Standing.LATE
            insort(flow.late, (entry.ticket.prefill_s, entry.number))
        else:
            entry.standing = _Standing.TIMELY
            insort(flow.timely, (entry.due_at, entry.number))
            insort(self._starts, (entry.start_by, entry.number))

    def _take_out(self, entry: _Entry) -> None:
        if entry.standing is _Standing.BEHIND:
            _discard(self.behind, entry.number)
            return
        key = entry.ticket.key
        flow = self._flows[key]
        if entry.standing is _Standing.LATE:
            _discard(flow.late, (entry.ticket.prefill_s, entry.number))
        else:
            _discard(flow.timely, (entry.due_at, entry.number))
            _discard(self._starts, (entry.start_by, entry.number))
        if not flow:
            del self._flows[key]
            self.shares.part(key)

    # ------------------------------------------------------------ order

    def age(self, now: float) -> None:
        """Move those whose deadline can no longer be met behind those whose can."""
        while self._starts and self._starts[0][0] < now:
            _, number = self._starts.pop(0)
            entry = self.entries[number]
            flow = self._flows[entry.ticket.key]
            _discard(flow.timely, (entry.due_at, number))
            entry.standing = _Standing.LATE
            insort(flow.late, (entry.ticket.prefill_s, number))

    def of_key(self, key: str | None) -> Iterator[int]:
        """Yield what waits in turn for a key, in order."""
        flow = self._flows.get(key)
        return iter(()) if flow is None else flow.in_order()

    def ahead_of(self, entry: _Entry) -> tuple[int, float]:
        """Return how many of its key are before an entry of this class, and when the last of them is due."""
        flow = self._flows.get(entry.ticket.key)
        if flow is None:
            return 0, entry.due_at
        if entry.standing is _Standing.TIMELY:
            return bisect_left(flow.timely, (entry.due_at, entry.number)), entry.due_at
        due_at = max(entry.due_at, flow.timely[-1][0]) if flow.timely else entry.due_at
        return len(flow.timely) + bisect_left(flow.late, (entry.ticket.prefill_s, entry.number)), due_at

    def is_first(self, entry: _Entry) -> bool:
        """Return whether nobody of its class would be started before an entry."""
        others = len(self._flows) - (entry.ticket.key in self._flows)
        return not others and not self.ahead_of(entry)[0]

    def due_before(self, key: str | None, due_at: float) -> int:
        """Return how many of a key are before one of another class that is due then."""
        flow = self._flows.get(key)
        if flow is None:
            return 0
        timely = bisect_left(flow.timely, (due_at, 0))
        return timely if timely < len(flow.timely) else len(flow)


_Home = tuple[int, frozenset[str]]
"""What classes have in common that share places: the priority, and the backends of the first pool."""


@dataclass(slots=True)
class _Tag:
    """Where a key stands for which something waits in turn, and in how many lanes it does."""

    tag: float
    number: int
    lanes: int = 1


class _Shares:
    """What each key has had of the places that some lanes share: start-time fair queueing."""

    def __init__(self, lanes: list[_Lane]) -> None:
        self.lanes = lanes
        self.order: list[tuple[float, int, str | None]] = []  # (tag, number of the tag, key), sorted
        self.numbers = 0
        self._tags: dict[str | None, _Tag] = {}
        self._finish: dict[str | None, float] = {}  # tags of keys with nothing waiting, above `_virtual`
        self._virtual = 0.0

    def __contains__(self, key: str | None) -> bool:
        return key in self._tags

    def join(self, key: str | None) -> None:
        """Note that something of a key waits in one lane more."""
        known = self._tags.get(key)
        if known is not None:
            known.lanes += 1
            return
        self.numbers += 1
        tag = self._tags[key] = _Tag(self.begin(key), self.numbers)
        self._finish.pop(key, None)
        insort(self.order, (tag.tag, tag.number, key))

    def part(self, key: str | None) -> None:
        """Note that nothing of it waits in one of them any more."""
        tag = self._tags[key]
        tag.lanes -= 1
        if not tag.lanes:
            del self._tags[key]
            _discard(self.order, (tag.tag, tag.number, key))
            self._remember(key, tag.tag)

    def begin(self, key: str | None) -> float:
        """Return the tag with which the next of a key would start."""
        tag = self._tags.get(key)
        return max(self._virtual, self._finish.get(key, 0.0)) if tag is None else tag.tag

    def charge(self, key: str | None, cost: float) -> float:
        """Count a start (or, negative, one that did not happen) to a key. Return its tag before that."""
        begin = self.begin(key)
        tag = self._tags.get(key)
        if tag is None:
            self._remember(key, begin + cost)
            return begin
        _discard(self.order, (tag.tag, tag.number, key))
        tag.tag += cost
        insort(self.order, (tag.tag, tag.number, key))
        return begin

    def charge_elsewhere(self, key: str | None, cost: float) -> None:
        """Count a start from another line to a key.

        This line has not come that far: whoever waits here is passed by nobody for it, and who comes now
        begins no later than they do.
        """
        begin = self.begin(key)
        self.charge(key, max(0.0, min(cost, self._virtual + PUT_BACK_TOKENS - begin)))
        self.advance(min(begin, self.order[0][0]) if self.order else begin)

    def absorb(self, other: "_Shares") -> None:
        """Count what was charged elsewhere."""
        for key, tag in other._finish.items():
            self.charge_elsewhere(key, tag - other._virtual)

    def advance(self, tag: float) -> None:
        """Note that what had this tag has started: who comes now begins there."""
        self._virtual = max(self._virtual, tag)

    def _remember(self, key: str | None, tag: float) -> None:
        # A tag at or below the virtual time says nothing: a newcomer begins there.
        if tag > self._virtual:
            self._finish[key] = tag
        else:
            self._finish.pop(key, None)
        if len(self._finish) > 64 + 2 * len(self._tags):
            self._finish = {name: tag for name, tag in self._finish.items() if tag > self._virtual}

    def ahead_of(self, lane: _Lane, entry: _Entry) -> int:
        """Return how many would be started before an entry of a lane, which need not be in it yet."""
        in_turn = sum(one.in_turn for one in self.lanes)
        if entry.standing is _Standing.BEHIND:
            return in_turn + bisect_left(lane.behind, entry.number)
        key = entry.ticket.key
        own, due_at = lane.ahead_of(entry)
        own += sum(one.due_before(key, due_at) for one in self.lanes if one is not lane)
        # The other keys take turns with this one.
        others = len(self._tags) - (key in self._tags)
        return min(in_turn - (entry.number in lane.entries), own + (own + 1) * others)


@dataclass(slots=True)
class _Key:
    """A key in one walk: its tag, charged as it goes, and the next of each lane, by deadline."""

    tag: float
    number: int
    heads: list[tuple[float, int, int, Iterator[int]]]  # (due at, entry, lane, what follows), a heap
    is_queued: bool = True


class _Walk:
    """One look along the lanes that share places: their entries, in the order in which they would start."""

    def __init__(self, shares: _Shares) -> None:
        self._shares = shares
        self._lanes = tuple(shares.lanes)
        self._in_turn = [lane.in_turn for lane in self._lanes]  # not yet come to
        self._left = [min(LOOKAHEAD, len(lane.entries)) for lane in self._lanes]  # that may be looked at
        self._keys: dict[str | None, _Key] = {}
        self._queue: list[tuple[float, int, str | None]] = []  # keys already come to, a heap

    def __iter__(self) -> Iterator[_Entry]:
        for index, in_turn in enumerate(self._in_turn):
            if not in_turn:
                self._come_behind(index)
        following = iter(self._shares.order)
        fresh = next(following, None)
        left = sum(self._left)
        while left and (fresh is not None or self._queue):
            if fresh is not None and (not self._queue or fresh[:2] <= self._queue[0][:2]):
                tag, number, name = fresh
                key = self._keys[name] = _Key(tag, number, [])
                for index, lane in enumerate(self._lanes):
                    self._add(key, index, lane.of_key(name))
                    if not self._in_turn[index]:
                        self._add(key, index, self._behind(index).get(name, ()))
                fresh = next(following, None)
            else:
                _, _, name = heappop(self._queue)
                key = self._keys[name]
            index, entry = self._next(key)
            if entry is None:
                key.is_queued = False
                continue
            left -= 1
            yield entry
            key.tag += entry.cost
            heappush(self._queue, (key.tag, key.number, name))
            if entry.standing is not _Standing.BEHIND:
                self._in_turn[index] -= 1
                if not self._in_turn[index]:
                    self._come_behind(index)

    def _next(self, key: _Key) -> tuple[int, _Entry | None]:
        """Take what is due first of a key, among the lanes that may still be looked at."""
        while key.heads:
            _, number, index, following = heappop(key.heads)
            if self._left[index]:
                self._left[index] -= 1
                self._add(key, index, following)
                return index, self._lanes[index].entries[number]
        return 0, None

    def _add(self, key: _Key, index: int, numbers: Iterable[int]) -> None:
        following = iter(numbers)
        number = next(following, None)
        if number is not None:
            due_at = self._lanes[index].entries[number].due_at
            heappush(key.heads, (due_at, number, index, following))

    def _come_behind(self, index: int) -> None:
        """All others of a lane have been come to: now those that were sent behind them."""
        for name, numbers in self._behind(index).items():
            key = self._keys.get(name)
            if key is None and name in self._shares:
                continue  # not come to yet
            if key is None:
                number = self._shares.numbers + 1 + len(self._keys)
                key = self._keys[name] = _Key(self._shares.begin(name), number, [], is_queued=False)
            self._add(key, index, numbers)
            if not key.is_queued:
                key.is_queued = True
                heappush(self._queue, (key.tag, key.number, name))

    def _behind(self, index: int) -> dict[str | None, list[int]]:
        """Return what was sent behind in a lane, per key."""
        found: dict[str | None, list[int]] = {}
        lane = self._lanes[index]
        for number in lane.behind:
            found.setdefault(lane.entries[number].ticket.key, []).append(number)
        return found


@valueclass(frozen=True, slots=True)
class _Offered:
    """An offer that was made and not answered yet, where it was charged, and the tag of its key before."""

    entry: _Entry
    offer: Offer
    shares: _Shares
    tag: float

    def uncharge(self) -> None:
        self.shares.charge(self.entry.ticket.key, -self.entry.cost)


class WaitingLine:
    """The line of one process. See the module for its rules."""

    def __init__(self) -> None:
        """Start empty."""
        self._lanes: dict[tuple[str, str], _Lane] = {}
        self._waiting: dict[str, _Entry] = {}
        self._shares: dict[_Home, _Shares] = {}
        self._offered: dict[str, _Offered] = {}
        self._running: dict[str, tuple[_Lane, float]] = {}
        self._expiries: list[tuple[float, int, _Entry]] = []
        self._long_waiting: dict[str, int] = {}
        self._long_elsewhere: Mapping[str, int] = {}
        self._tokens_started = StartedTokens()
        self._gone_until: dict[str, float] = {}  # backends whose place was gone when it was to be taken
        self._back_at: Mapping[str, float] = {}  # backends whose machine runs another model
        self._numbers = 0

    # ------------------------------------------------------------ questions

    def __len__(self) -> int:
        return len(self._waiting)

    def waiting(self) -> Mapping[tuple[str, str], int]:
        """Return how many wait, per (model, class)."""
        return {name: len(lane.entries) for name, lane in self._lanes.items()}

    def oldest_waits_s(self, now: float) -> Mapping[tuple[str, str], float]:
        """Return how long the one that waits longest has waited, per (model, class); 0 where none does.

        What may wait without a limit, a job, is not counted: nobody holds a connection open for it.
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
        """Return the backends that those who wait may go to."""
        if not self._waiting:
            return _NO_BACKENDS
        found: set[str] = set()
        for lane in self._lanes.values():
            entry = next(iter(lane.entries.values()), None)
            if entry is not None:  # those of one class may all go to the same
                for name in entry.ticket.traffic_class.pools:
                    found.update(entry.ticket.policy.pools[name].backends)
        return frozenset(found)

    def long_waiting(self) -> Mapping[str, int]:
        """Return how many requests with long prompts wait, here or elsewhere, per backend of first choice."""
        return summed((self._long_waiting, self._long_elsewhere))

    def long_waiting_here(self) -> Mapping[str, int]:
        """Return how many of them wait in this line."""
        return dict(self._long_waiting)

    def wants(self, backends: Collection[str]) -> Mapping[str, Wants]:
        """Return what waits for each of these backends as its first choice, and could run there."""
        found = dict.fromkeys(backends, Wants())
        for entry in self._waiting.values():
            ticket = entry.ticket
            for name in ticket.first_pool:
                if name in found and name not in ticket.failed:
                    backend = ticket.policy.backends[name]
                    if selection.could_take(backend, ticket.demand):
                        found[name] += Wants(1, entry.entered_at - ticket.waited_s)
        return found

    def tokens_started(self, now: float) -> Mapping[Flow, int]:
        """Return the tokens of what was started from this line, per flow; see `StartedTokens`."""
        return self._tokens_started.totals(now)

    def drain_per_s(self, model: str, traffic_class: str, now: float) -> float | None:
        """Return how many places per second come free for a class, or None while that is unknown.

        Those of other classes with the same first pool are among them: what ends there is room for all.
        """
        lane = self._lanes.get((model, traffic_class))
        return None if lane is None else self._per_s(lane, now)

    def waiters(self, now: float, most: int = LOOKAHEAD) -> Sequence[Waiter]:
        """Return who waits, in the order in which they would start if all backends were free at once.

        Of each class `LOOKAHEAD` at most, `most` in all.
        """
        found: list[Waiter] = []
        ahead: dict[tuple[str, ...], int] = {}
        for shared in self._by_priority():
            for entry in _merged(shared):
                ticket = entry.ticket
                position = ahead[ticket.first_pool] = ahead.get(ticket.first_pool, 0) + 1
                found.append(_waiter(entry, position, now))
                if len(found) >= most:
                    return found
        return found

    def position(self, ticket_id: str) -> int | None:
        """Return a request's place, 1 being next; None if it is not waiting.

        Those of other classes that want the same first pool and would start before it count, too.
        """
        entry = self._waiting.get(ticket_id)
        return None if entry is None else self._ahead_of(self._lane(entry.ticket), entry) + 1

    # ------------------------------------------------------------ events

    def expect(self, back_at: Mapping[str, float]) -> None:
        """Be told which backends are out, and when each can be back at the earliest (monotonic seconds)."""
        self._back_at = back_at

    def enter(self, ticket: Ticket, now: float, *, has_waited: bool = False) -> Refused | None:
        """Let a request wait for its turn, or return why it may not.

        `has_waited`: it was let in before, and has left only to be decided anew.
        """
        lane, rules = self._settled(ticket), ticket.traffic_class.waiting
        entry = self._entry(ticket, now)
        if now > entry.start_by:
            entry.standing = _Standing.LATE
        if has_waited:
            self._insert(lane, entry, now)
            return None
        ahead, wait_s = self._forecast(lane, entry, now)
        if len(lane.entries) >= rules.waiting_max or (
            lane.entries and lane.size_bytes + ticket.size_bytes > rules.waiting_bytes_max
        ):
            return _refused(entry, Reason.QUEUE_FULL, ahead, wait_s, now)
        # A forecast needs one of its kind ahead: who comes first of its class may start at once, unless the
        # models that could serve it are out.
        entry.is_unproven = lane.is_first(entry)
        may_start = entry.is_unproven and not self._away_s(ticket, now)
        reason = None if may_start else _foreseen(entry, wait_s, now)
        if reason is Reason.WAIT_TOO_LONG and rules.when_late is WhenLate.DEMOTE:
            entry.standing = _Standing.BEHIND
            entry.expires_at = _expiry(ticket, now, rules.longest_wait_s)
        elif reason is not None:
            return _refused(entry, reason, ahead, wait_s, now)
        self._insert(lane, entry, now)
        return None

    def may_start_at_once(self, ticket: Ticket, now: float) -> bool:
        """Return whether nobody would be passed by a request that took its place in this very moment."""
        if self._waiting or self._gone_until:
            return False
        return _expiry(ticket, now, ticket.traffic_class.waiting.max_wait_s) > now

    def start_at_once(self, ticket: Ticket, now: float) -> None:
        """Note that it has: it counts as one that was offered its place and took it."""
        lane, cost = self._settled(ticket), ticket.cost
        lane.shares.advance(lane.shares.charge(ticket.key, cost))
        self._started(ticket, lane, cost, now)

    def offer_at_once(self, ticket: Ticket, candidates: tuple[Candidate, ...], now: float) -> Offer | None:
        """Offer a request its place without a turn, where nobody is passed by that: where nobody waits.

        `candidates`: those that it may be tried on, ranked at this very moment with `offered` in mind. None:
        it has to enter.
        """
        if not candidates or not self.may_start_at_once(ticket, now):
            return None
        lane, entry = self._settled(ticket), self._entry(ticket, now)
        offer = Offer(ticket, candidates)
        self._note_offer(entry, offer, lane.shares)
        return offer

    def leave(self, ticket_id: str) -> None:
        """Forget a request that waits or was offered a place; one that is neither changes nothing."""
        entry = self._waiting.get(ticket_id)
        if entry is not None:
            self._remove(entry)
            return
        offered = self._offered.pop(ticket_id, None)
        if offered is not None:
            offered.uncharge()

    def offered(self) -> Mapping[str, Load]:
        """Return what has been offered on backends, and was neither taken nor given up since."""
        if not self._offered:
            return _NOTHING_OFFERED
        claims: dict[str, Load] = {}
        for offered in self._offered.values():
            first = offered.offer.candidates[0]
            claims[first.backend] = claims.get(first.backend, Load()) + first.claim
        return claims

    def is_offered(self, ticket_id: str) -> bool:
        """Return whether a request has been offered a place, and has neither taken it nor left since."""
        return ticket_id in self._offered

    def started(self, ticket_id: str, now: float) -> None:
        """Note that an offered request has taken its place."""
        offered = self._offered.pop(ticket_id)
        ticket = offered.entry.ticket
        offered.shares.advance(offered.tag)
        self._started(ticket, self._lane(ticket), ticket.cost, now)

    def missed(self, ticket_id: str, backends: Sequence[str], now: float) -> None:
        """Note that the places offered were gone: the request is back where it was in the line."""
        for name in backends:
            self._gone_until[name] = now + MISS_PAUSE_S
        offered = self._offered.pop(ticket_id, None)
        if offered is not None:
            offered.uncharge()
            self._insert(self._lane(offered.entry.ticket), offered.entry, now)

    def released(self, ticket_id: str, backend: str, now: float, *, answered: bool = True) -> None:
        """Note that a request that ran on `backend` has ended.

        `answered`: whether the backend began an answer. A try that failed before says nothing of how fast
        places come free.
        """
        self._gone_until.pop(backend, None)
        running = self._running.pop(ticket_id, None)
        if running is not None:
            lane, since = running
            lane.drain.note_released(since, now, answered=answered)

    def charge(self, model: str, traffic_class: str, key: str | None, tokens: int) -> None:
        """Count tokens that another process started for a key, so that keys are treated alike there too."""
        lane = self._lanes.setdefault((model, traffic_class), _Lane())
        lane.shares.charge_elsewhere(key, max(1, tokens))

    def note_long_waiting(self, elsewhere: Mapping[str, int]) -> None:
        """Note how many requests with long prompts wait in other lines, per backend of first choice."""
        self._long_elsewhere = dict(elsewhere)

    # ------------------------------------------------------------ the turn

    def turn(self, now: float, views: Mapping[str, BackendView]) -> Turn:
        """Return who may start, who must be refused, and when to look again.

        `views` are the backends as they stand: their load as the ledger counts it. What has been offered
        and not been answered is added here.
        """
        refused = self._expire(now)
        if not self._waiting:
            return Turn((), refused, None)
        room = _Room(self._with_offers(views), self._paused(now))
        offers: list[Offer] = []
        hopeless: list[_Entry] = []
        looked = 0
        for shared in self._by_priority():
            for shares in shared:
                for lane in shares.lanes:
                    lane.age(now)
            for entry in _merged(shared):
                candidates = room.place(entry)
                looked += 1
                if candidates is None:
                    hopeless.append(entry)
                elif candidates:
                    offers.append(Offer(entry.ticket, candidates))
        for offer in offers:
            self._offer(offer)
        for entry in hopeless:
            refused.append(self._refuse(entry, Reason.NO_BACKEND, now))
        late = self._late(room.found_full, now, refused)
        # Where the look ahead may have ended the turn before the free places did, there is more to do. So
        # there is where somebody held a backend who has gone.
        is_unfinished = self._waiting and (hopeless or late or (offers and looked >= LOOKAHEAD))
        return Turn(offers, refused, now if is_unfinished else self._next_look(now))

    # ------------------------------------------------------------ inside

    def _lane(self, ticket: Ticket) -> _Lane:
        name = (ticket.model, ticket.traffic_class.name)
        lane = self._lanes.get(name)
        if lane is None:
            lane = self._lanes[name] = _Lane()
        return lane

    def _entry(self, ticket: Ticket, now: float) -> _Entry:
        self._numbers += 1
        due_at = ticket.due_at
        return _Entry(
            ticket,
            self._numbers,
            entered_at=now,
            expires_at=_expiry(ticket, now, ticket.traffic_class.waiting.max_wait_s),
            due_at=due_at,
            start_by=due_at - ticket.prefill_s,
            is_long=ticket.is_long,
        )

    def _settled(self, ticket: Ticket) -> _Lane:
        """Return the lane of a ticket, where the ticket's policy wants it."""
        lane = self._lane(ticket)
        if lane.policy is not ticket.policy:
            lane.policy = ticket.policy
            self._settle(lane, (ticket.traffic_class.priority, frozenset(ticket.first_pool)))
        return lane

    def _settle(self, lane: _Lane, home: _Home) -> None:
        """Let a lane share places with those that have the same home. It moves when its policy changes."""
        if lane.home == home:
            return
        old = lane.shares
        is_alone = old.lanes == [lane]
        if is_alone and lane.home is not None:
            del self._shares[lane.home]
        lane.home = home
        shares = self._shares.setdefault(home, old if is_alone else _Shares([]))
        if shares is not old:
            lane.move_to(shares)
            if is_alone:
                shares.absorb(old)

    def _insert(self, lane: _Lane, entry: _Entry, now: float) -> None:
        lane.add(entry, now)
        self._waiting[entry.ticket.id] = entry
        heappush(self._expiries, (entry.expires_at, entry.number, entry))
        if entry.is_long:
            self._count_long(entry, 1)

    def _remove(self, entry: _Entry) -> None:
        self._lane(entry.ticket).remove(entry)
        del self._waiting[entry.ticket.id]
        if entry.is_long:
            self._count_long(entry, -1)

    def _count_long(self, entry: _Entry, change: int) -> None:
        for name in entry.ticket.first_pool:
            count = self._long_waiting.get(name, 0) + change
            if count:
                self._long_waiting[name] = count
            else:
                del self._long_waiting[name]

    def _offer(self, offer: Offer) -> None:
        entry = self._waiting[offer.ticket.id]
        self._remove(entry)
        self._note_offer(entry, offer, self._lane(entry.ticket).shares)

    def _started(self, ticket: Ticket, lane: _Lane, cost: int, now: float) -> None:
        lane.drain.note_started(now)
        self._tokens_started.add((ticket.model, ticket.traffic_class.name, ticket.key), cost, now)
        self._running[ticket.id] = (lane, now)

    def _note_offer(self, entry: _Entry, offer: Offer, shares: _Shares) -> None:
        tag = shares.charge(entry.ticket.key, entry.cost)
        self._offered[offer.ticket.id] = _Offered(entry, offer, shares, tag)

    def _refuse(self, entry: _Entry, reason: Reason, now: float) -> Refused:
        ahead, wait_s = self._forecast(self._lane(entry.ticket), entry, now)
        self._remove(entry)
        return _refused(entry, reason, ahead, wait_s, now)

    def _forecast(self, lane: _Lane, entry: _Entry, now: float) -> tuple[int, float | None]:
        """Return how many are ahead of an entry, and how long it would wait; None where nothing is known."""
        ahead = self._ahead_of(lane, entry)
        per_s = self._per_s(lane, now)
        away_s = self._away_s(entry.ticket, now)
        if per_s is None:
            return ahead, away_s or None
        return ahead, max(away_s, (ahead + 1) / per_s)

    def _away_s(self, ticket: Ticket, now: float) -> float:
        """Return how long no backend of a request's class can be back; 0 where one is in."""
        if not self._back_at:
            return 0.0
        pools = (ticket.policy.pools[name] for name in ticket.traffic_class.pools)
        names = {name for pool in pools for name in pool.backends} - ticket.failed
        back_at = min((self._back_at.get(name, now) for name in names), default=now)
        return max(0.0, back_at - now)

    def _ahead_of(self, lane: _Lane, entry: _Entry) -> int:
        """Return how many that want the same first pool would be started before an entry, of any class."""
        before = lane.shares.ahead_of(lane, entry)
        if lane.home is None:
            return before
        own_priority, own_pool = lane.home
        above = (
            sum(len(one.entries) for one in shares.lanes)
            for (priority, pool), shares in self._shares.items()
            if pool == own_pool and priority > own_priority
        )
        return before + sum(above)

    def _per_s(self, lane: _Lane, now: float) -> float | None:
        """Return the places per second that come free where a lane would rather go."""
        if lane.home is None:
            return _Drain.per_s([lane.drain], now)
        pool = lane.home[1]
        drains = [one.drain for one in self._lanes.values() if one.home is not None and one.home[1] == pool]
        return _Drain.per_s(drains, now)

    def _late(self, full: Sequence[_Entry], now: float, refused: list[Refused]) -> bool:
        """Refuse or send behind who found no place in its first turn and cannot have one in time."""
        found = False
        for entry in full:
            rules = entry.ticket.traffic_class.waiting
            reason = _foreseen(entry, self._forecast(self._lane(entry.ticket), entry, now)[1], now)
            if reason is None:
                continue
            found = True
            if reason is Reason.WAIT_TOO_LONG and rules.when_late is WhenLate.DEMOTE:
                self._send_behind(entry)
            else:
                refused.append(self._refuse(entry, reason, now))
        return found

    def _send_behind(self, entry: _Entry) -> None:
        self._lane(entry.ticket).send_behind(entry)
        longest_s = entry.ticket.traffic_class.waiting.longest_wait_s
        entry.expires_at = _expiry(entry.ticket, entry.entered_at, longest_s)
        heappush(self._expiries, (entry.expires_at, entry.number, entry))

    def _expire(self, now: float) -> list[Refused]:
        refused: list[Refused] = []
        while self._expiries and self._expiries[0][0] <= now:
            expires_at, _, entry = heappop(self._expiries)
            if not self._is_current(expires_at, entry):
                continue
            rules = entry.ticket.traffic_class.waiting
            overdue = entry.ticket.deadline is not None and entry.ticket.deadline <= now
            may_stay = rules.when_late is WhenLate.DEMOTE and entry.standing is not _Standing.BEHIND
            if may_stay and not overdue:
                self._send_behind(entry)
            else:
                reason = Reason.DEADLINE if overdue else Reason.WAITED_TOO_LONG
                refused.append(self._refuse(entry, reason, now))
        return refused

    def _is_current(self, expires_at: float, entry: _Entry) -> bool:
        return self._waiting.get(entry.ticket.id) is entry and entry.expires_at == expires_at

    def _with_offers(self, views: Mapping[str, BackendView]) -> dict[str, BackendView]:
        """Return the views with what was offered and not answered yet, and the long prompts that wait."""
        extra = self.offered()
        full = dict(views)
        long_waiting = self.long_waiting()
        for name in {*extra, *long_waiting} & views.keys():
            view = views[name]
            full[name] = replace(
                view,
                load=view.load + extra.get(name, Load()),
                long_waiting=view.long_waiting + long_waiting.get(name, 0),
            )
        return full

    def _paused(self, now: float) -> frozenset[str]:
        self._gone_until = {name: until for name, until in self._gone_until.items() if until > now}
        return frozenset(self._gone_until)

    def _by_priority(self) -> list[list[_Shares]]:
        groups: dict[int, list[_Shares]] = {}
        for (priority, _), shares in self._shares.items():
            if any(lane.entries for lane in shares.lanes):
                groups.setdefault(priority, []).append(shares)
        return [groups[priority] for priority in sorted(groups, reverse=True)]

    def _next_look(self, now: float) -> float | None:
        while self._expiries and not self._is_current(self._expiries[0][0], self._expiries[0][2]):
            heappop(self._expiries)
        if not self._waiting:
            return None
        return min([self._expiries[0][0], *self._gone_until.values()])


class _Room:
    """The backends within one turn: what is offered is counted, what is waited for is held."""

    def __init__(self, views: Mapping[str, BackendView], paused: frozenset[str]) -> None:
        self._views = dict(views)
        self._closed = set(paused)  # backends that nobody may be offered any more in this turn
        self._wanted: dict[str, list[tuple[_Entry, tuple[str, ...]]]] = {}
        self._stuck: dict[tuple[str, str], list[Ticket]] = {}
        self.found_full: list[_Entry] = []  # in their first turn; they wait for something to end

    def place(self, entry: _Entry) -> tuple[Candidate, ...] | None:
        """Return where it may start, best first; () if it has to wait; None if no backend is up for it."""
        ticket = entry.ticket
        is_unproven, entry.is_unproven = entry.is_unproven, False
        stuck = self._stuck.setdefault((ticket.model, ticket.traffic_class.name), [])
        if any(_asks_no_less(ticket, other) for other in stuck):
            return ()
        ranked = selection.rank(
            ticket.policy,
            ticket.traffic_class,
            ticket.demand,
            self._seen_by(ticket),
            failed=ticket.failed,
        )
        able = [one for one in ranked if one.excluded is None]
        free = tuple(one for one in able if one.backend not in self._closed)
        if free:
            self._take(free[0])
            return free
        if not able and not any(one.excluded is not None and one.excluded.is_busy for one in ranked):
            return None
        if is_unproven and not able and all(self._is_full(one) for one in ranked):
            self.found_full.append(entry)
        stuck.append(ticket)
        self._hold(entry, tuple(one.backend for one in ranked if _is_waited_for(one)))
        return ()

    def _seen_by(self, ticket: Ticket) -> Mapping[str, BackendView]:
        if not ticket.prefix_shares:
            return self._views
        return {
            name: replace(view, prefix_share=ticket.prefix_shares.get(name, 0.0))
            for name, view in self._views.items()
        }

    def _is_full(self, candidate: Candidate) -> bool:
        """Whether a backend has room only when something there ends, as far as it can have room at all."""
        if candidate.excluded is None or not candidate.excluded.is_busy:
            return candidate.excluded is not None
        on_trial = self._views[candidate.backend].status.state is State.PROBATION
        return candidate.excluded in _FULL and not on_trial

    def _take(self, candidate: Candidate) -> None:
        name = candidate.backend
        view = self._views[name]
        self._views[name] = replace(view, load=view.load + candidate.claim)
        for passed, wants in self._wanted.pop(name, ()):
            passed.passed += 1
            self._hold(passed, wants)

    def _hold(self, entry: _Entry, wants: tuple[str, ...]) -> None:
        if entry.passed >= entry.ticket.traffic_class.waiting.passes_max:
            self._closed.update(wants)
            return
        for name in wants:
            waiting = self._wanted.setdefault(name, [])
            if all(entry is not other for other, _ in waiting):
                waiting.append((entry, wants))


def _merged(shared: Sequence[_Shares]) -> Iterator[_Entry]:
    """Yield what waits at one priority: by first pool in its own order, among them the earliest deadline."""
    heads: list[tuple[float, int, _Entry, Iterator[_Entry]]] = []
    for shares in shared:
        walk = iter(_Walk(shares))
        first = next(walk, None)
        if first is not None:
            heads.append((first.due_at, first.number, first, walk))
    heapify(heads)
    while heads:
        _, _, entry, walk = heappop(heads)
        yield entry
        following = next(walk, None)
        if following is not None:
            heappush(heads, (following.due_at, following.number, following, walk))


def _waiter(entry: _Entry, position: int, now: float) -> Waiter:
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
        is_behind=entry.standing is _Standing.BEHIND,
        tries=len(ticket.failed),
    )


def _is_waited_for(candidate: Candidate) -> bool:
    return candidate.excluded in _SHARED and not candidate.is_spill


_SHARED = frozenset({Exclusion.AT_KNEE, Exclusion.KV_FULL, Exclusion.PREFILL_BUSY})
"""What is short for requests of every kind. The gates for long prompts are not among them."""


_NO_BACKENDS: frozenset[str] = frozenset()
_NOTHING_OFFERED: Mapping[str, Load] = MappingProxyType({})


_FULL = frozenset(
    {
        Exclusion.AT_KNEE,
        Exclusion.KV_FULL,
        Exclusion.LONG_FULL,
        Exclusion.SPILL_LONG,
        Exclusion.SPILL_RESERVE,
    }
)
"""What lasts until something ends: the measured rate speaks of that. Prompt work is done sooner."""


def _asks_no_less(ticket: Ticket, other: Ticket) -> bool:
    """Return whether `ticket` can start nowhere that `other`, of the same class, cannot."""
    asked, least = ticket.demand, other.demand
    return (
        ticket.failed >= other.failed
        and asked.seqs >= least.seqs
        and asked.prompt_tokens >= least.prompt_tokens
        and asked.total_tokens >= least.total_tokens
        and asked.images >= least.images
        and asked.audios >= least.audios
        and ticket.policy is other.policy
    )


def _expiry(ticket: Ticket, entered_at: float, wait_s: float) -> float:
    """Return when a request that entered then has waited `wait_s` in all, or its caller gives up."""
    expires_at = entered_at + wait_s - ticket.waited_s
    return expires_at if ticket.deadline is None else min(expires_at, ticket.deadline)


def _foreseen(entry: _Entry, wait_s: float | None, now: float) -> Reason | None:
    """Return why a request that would wait for `wait_s` from now need not: it would be too late."""
    deadline = entry.ticket.deadline
    if wait_s is None:
        return None
    if deadline is not None and now + wait_s > deadline:
        return Reason.DEADLINE
    if entry.waited_s(now) + wait_s > entry.ticket.traffic_class.waiting.max_wait_s:
        return Reason.WAIT_TOO_LONG
    return None


def _refused(entry: _Entry, reason: Reason, ahead: int, wait_s: float | None, now: float) -> Refused:
    return Refused(
        id=entry.ticket.id,
        reason=reason,
        position=ahead + 1,
        expected_wait_s=wait_s,
        retry_after_s=max(1.0, min(RETRY_AFTER_MAX_S, wait_s or 1.0)),
        waited_s=entry.waited_s(now),
    )


def _discard(members: list[_T], member: _T) -> None:
    """Take one member out of a sorted list that has it."""
    at = bisect_left(members, member)
    if at == len(members) or members[at] != member:
        raise KeyError(member)
    del members[at]
