"""Scheduling order: start-time fair queueing between API keys, deadlines within a key.

There is one `Lane` per class. Lanes of one priority with the same first pool compete for the same slots, so
they share one account of the tokens started per key (`Shares`). A `Walk` iterates over their entries in the
order in which they would start.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from heapq import heappop, heappush, merge
from itertools import islice
from math import inf, nextafter
from typing import TypeVar

from gateway.core.decision import Candidate
from gateway.core.policy import Policy
from gateway.core.selection import BackendView
from gateway.core.waiting.drain import Drain
from gateway.core.waiting.returns import Returns
from gateway.core.waiting.tickets import Ticket

_T = TypeVar("_T", int, tuple[float, int], tuple[float, int, str | None])

LOOKAHEAD = 64
"""Maximum number of requests of one class that one turn considers, of the ordinary ones and of the others
(see `Entry.is_ordinary`). A choice: looking further finds more that fits, and costs more."""

PUT_BACK_TOKENS = 262_144
"""Limit on how far tokens started elsewhere move a key's tag beyond the virtual time: one request of the
largest window. Further charges are dropped, so that a key is not locked out after its gateway has gone."""

FINISH_SPARE = 64
"""A group of classes remembers twice as many keys as had an advantage, and this many more. A choice: pruning
a small group saves nothing."""


class Rank(IntEnum):
    """Rank of an entry in its class. Lower starts first."""

    TIMELY = 0  # can still meet its deadline
    LATE = 1  # can no longer meet its deadline
    BEHIND = 2  # a job, or demoted behind the others


@dataclass(slots=True, eq=False)
class Entry:
    """A queued ticket. Mutable: its rank changes over time.

    `is_long`, `gated_s` and `fits_all` are those of its ticket.
    """

    ticket: Ticket
    number: int
    entered_at: float
    expires_at: float
    due_at: float
    start_by: float
    is_long: bool
    gated_s: float
    fits_all: bool
    rank: Rank = Rank.TIMELY
    passed: int = 0
    is_unproven: bool = False  # may be able to start at once; its first turn shows whether it has to wait
    is_full: bool = False  # it waits for a request to end, whatever gates do
    # The busy backends for which it waits although another has room, best first, and what was known of them.
    stays: Sequence[tuple[Candidate, BackendView]] = ()
    stays_since: float | None = None  # when another first had room for it
    stays_until: float = 0.0  # when it takes another one

    @property
    def is_ordinary(self) -> bool:
        """Whether every backend of its first pool could take it, none has failed or refused it, and no gate
        for long prompts applies.

        Others may have to wait where ordinary requests do not. However many of them wait, a turn considers
        ordinary requests, too.
        """
        return self.fits_all and not (self.is_long or self.ticket.failed or self.ticket.refused)

    @property
    def cost(self) -> int:
        """See `Ticket.cost`."""
        return self.ticket.cost

    def waited_s(self, now: float) -> float:
        """Return how long it has waited, including before earlier attempts."""
        return self.ticket.waited_s + now - self.entered_at


@dataclass(slots=True, eq=False)
class _Flow:
    """Entries of one key in one class, without those behind: sorted lists of (sort key, entry number)."""

    timely: list[tuple[float, int]] = field(default_factory=list)  # by deadline
    late: list[tuple[float, int]] = field(default_factory=list)  # by prefill time

    def __len__(self) -> int:
        return len(self.timely) + len(self.late)

    def in_order(self) -> Iterator[int]:
        for _, number in self.timely:
            yield number
        for _, number in self.late:
            yield number


class Lane:
    """The queue of one class."""

    def __init__(self) -> None:
        self.entries: dict[int, Entry] = {}
        self.counts = [0, 0]  # of the entries, by `is_ordinary`
        self.in_turn_counts = [0, 0]  # the same, without those of rank BEHIND
        self.jobs = 0  # how many of the entries are jobs
        self.size_bytes = 0  # of the others
        self._numbers: Counter[str | None] = Counter()  # of the others, by key
        self.drain = Drain()
        self.home: Home | None = None  # None until the first request enters
        self.policy: Policy | None = None  # the policy from which `home` was derived
        self.shares = Shares([self])
        self.behind: list[int] = []
        self.demoted: dict[str | None, list[tuple[float, int]]] = {}  # those behind but jobs, by deadline
        self._flows: dict[str | None, _Flow] = {}
        self._starts: list[tuple[float, int]] = []  # timely entries of all keys, by latest start

    @property
    def in_turn(self) -> int:
        """Number of entries of rank TIMELY or LATE."""
        return len(self.entries) - len(self.behind)

    # ------------------------------------------------------------ membership

    def move_to(self, shares: "Shares") -> None:
        """Move this lane to another account."""
        for key, flow in self._flows.items():
            self.shares.part(key, len(flow))
            shares.join(key, len(flow))
        self.shares.lanes.remove(self)
        shares.lanes.append(self)
        self.shares = shares

    def add(self, entry: Entry, now: float) -> None:
        """Add an entry at the position given by its rank."""
        self.entries[entry.number] = entry
        self.counts[entry.is_ordinary] += 1
        if entry.ticket.demand.is_job:
            self.jobs += 1
        else:
            self.size_bytes += entry.ticket.size_bytes
            self._numbers[entry.ticket.key] += 1
        self._place(entry, now)

    def remove(self, entry: Entry) -> None:
        """Remove an entry."""
        del self.entries[entry.number]
        self.counts[entry.is_ordinary] -= 1
        if entry.ticket.demand.is_job:
            self.jobs -= 1
        else:
            self.size_bytes -= entry.ticket.size_bytes
            self._numbers[entry.ticket.key] -= 1
            if not self._numbers[entry.ticket.key]:
                del self._numbers[entry.ticket.key]
        self._take_out(entry)

    def is_full_for(self, ticket: Ticket, *, is_queued: bool = False) -> bool:
        """Return whether as many requests are queued as may be. Jobs have limits of their own.

        The first request of a key is admitted up to twice the limits, or one key could fill the queue, and
        the others, whose turn may be next, would never be in it.

        `is_queued`: whether the request itself is queued, and is none of these.
        """
        rules, queued = ticket.traffic_class.waiting, len(self.entries) - self.jobs - is_queued
        times = 1 if self._numbers[ticket.key] > is_queued else 2
        size_bytes = self.size_bytes + (0 if is_queued else ticket.size_bytes)
        return queued >= times * rules.waiting_max or (
            queued > 0 and size_bytes > times * rules.waiting_bytes_max
        )

    def send_behind(self, entry: Entry) -> None:
        """Demote an entry behind all others."""
        self._take_out(entry)
        entry.rank = Rank.BEHIND
        self._place_behind(entry)

    def _place_behind(self, entry: Entry) -> None:
        insort(self.behind, entry.number)
        if not entry.ticket.demand.is_job:
            insort(self.demoted.setdefault(entry.ticket.key, []), (entry.due_at, entry.number))

    def _place(self, entry: Entry, now: float) -> None:
        if entry.rank is Rank.BEHIND:
            self._place_behind(entry)
            return
        key = entry.ticket.key
        flow = self._flows.get(key)
        if flow is None:
            flow = self._flows[key] = _Flow()
            self.shares.join(key)
        self.shares.count(key, 1)
        self.in_turn_counts[entry.is_ordinary] += 1
        if now > entry.start_by:
            entry.rank = Rank.LATE
            insort(flow.late, (entry.ticket.prefill_s, entry.number))
        else:
            insort(flow.timely, (entry.due_at, entry.number))
            insort(self._starts, (entry.start_by, entry.number))

    def _take_out(self, entry: Entry) -> None:
        if entry.rank is Rank.BEHIND:
            _discard(self.behind, entry.number)
            if not entry.ticket.demand.is_job:
                demoted = self.demoted[entry.ticket.key]
                _discard(demoted, (entry.due_at, entry.number))
                if not demoted:
                    del self.demoted[entry.ticket.key]
            return
        key = entry.ticket.key
        flow = self._flows[key]
        if entry.rank is Rank.LATE:
            _discard(flow.late, (entry.ticket.prefill_s, entry.number))
        else:
            _discard(flow.timely, (entry.due_at, entry.number))
            _discard(self._starts, (entry.start_by, entry.number))
        self.shares.count(key, -1)
        self.in_turn_counts[entry.is_ordinary] -= 1
        if not flow:
            del self._flows[key]
            self.shares.part(key)

    # ------------------------------------------------------------ order

    def age(self, now: float) -> None:
        """Rank entries that can no longer meet their deadline as late."""
        while self._starts and self._starts[0][0] < now:
            _, number = self._starts.pop(0)
            entry = self.entries[number]
            flow = self._flows[entry.ticket.key]
            _discard(flow.timely, (entry.due_at, number))
            entry.rank = Rank.LATE
            insort(flow.late, (entry.ticket.prefill_s, number))

    @property
    def late_at(self) -> float:
        """When `age` has something to do next; inf if it has nothing to do."""
        return nextafter(self._starts[0][0], inf) if self._starts else inf

    def of_key(self, key: str | None) -> Iterator[int]:
        """Return the entry numbers of a key in order, without those of rank BEHIND."""
        flow = self._flows.get(key)
        return iter(()) if flow is None else flow.in_order()

    def ahead_of(self, entry: Entry) -> tuple[int, float]:
        """Return how many entries of its key precede an entry here, and when the last of them is due."""
        flow = self._flows.get(entry.ticket.key)
        if flow is None:
            return 0, entry.due_at
        if entry.rank is Rank.TIMELY:
            return bisect_left(flow.timely, (entry.due_at, entry.number)), entry.due_at
        due_at = max(entry.due_at, flow.timely[-1][0]) if flow.timely else entry.due_at
        return len(flow.timely) + bisect_left(flow.late, (entry.ticket.prefill_s, entry.number)), due_at

    def first_of(self, key: str | None, most: int) -> Iterator[Entry]:
        """Yield the first `most` entries of a key in order, without those behind."""
        for number in islice(self.of_key(key), most):
            yield self.entries[number]

    def is_first(self, entry: Entry) -> bool:
        """Return whether no other entry of its class would start before an entry."""
        others = len(self._flows) - (entry.ticket.key in self._flows)
        return not others and not self.ahead_of(entry)[0]

    def due_before(self, key: str | None, due_at: float) -> int:
        """Return how many entries of a key here precede one of another class that is due at `due_at`."""
        flow = self._flows.get(key)
        if flow is None:
            return 0
        timely = bisect_left(flow.timely, (due_at, 0))
        return timely if timely < len(flow.timely) else len(flow)

    def demoted_before(self, key: str | None, due_at: float) -> Sequence[tuple[float, int]]:
        """Return the demoted entries of a key here that precede one of another class that is due at `due_at`.

        There are none while others of this class may come after that one.
        """
        demoted = self.demoted.get(key, ())
        if not demoted or self.in_turn > self.due_before(key, due_at):
            return ()
        return demoted[: bisect_left(demoted, (due_at, 0))]


Home = tuple[int, frozenset[str]]
"""Priority and backends of the first pool. Classes with the same home compete for the same slots."""


@dataclass(slots=True)
class _Tag:
    """Start tag of a key with queued entries, their number, and that of the lanes that have some."""

    tag: float
    number: int
    entries: int
    lanes: int = 1


class Shares:
    """Per-key account of the slots that a group of lanes competes for: start-time fair queueing."""

    def __init__(self, lanes: list[Lane]) -> None:
        self.lanes = lanes
        self.returns = Returns()  # of those that are refused
        self.order: list[tuple[float, int, str | None]] = []  # (tag, number of the tag, key), sorted
        self.numbers = 0
        self._tags: dict[str | None, _Tag] = {}
        self._finish: dict[str | None, float] = {}  # tags above `_virtual` of keys with nothing queued
        self._finish_max = FINISH_SPARE  # with more of them, those that `_virtual` has reached are dropped
        self._virtual = 0.0
        self._heir: Shares | None = None  # the account that has taken over the charges of this one

    def __contains__(self, key: str | None) -> bool:
        return key in self._tags

    def join(self, key: str | None, entries: int = 0) -> None:
        """Note that one more lane has queued entries of a key, and how many (or see `count`)."""
        known = self._tags.get(key)
        if known is not None:
            known.lanes += 1
            known.entries += entries
            return
        self.numbers += 1
        tag = self._tags[key] = _Tag(self.begin(key), self.numbers, entries)
        self._finish.pop(key, None)
        insort(self.order, (tag.tag, tag.number, key))

    def count(self, key: str | None, more: int) -> None:
        """Note that a lane has so many more queued entries of a key."""
        self._tags[key].entries += more

    def part(self, key: str | None, entries: int = 0) -> None:
        """Note that one lane has no more queued entries of a key: it had `entries`, or see `count`."""
        tag = self._tags[key]
        tag.entries -= entries
        tag.lanes -= 1
        if not tag.lanes:
            del self._tags[key]
            _discard(self.order, (tag.tag, tag.number, key))
            self._remember(key, tag.tag)

    def begin(self, key: str | None) -> float:
        """Return the start tag of a key's next entry."""
        tag = self._tags.get(key)
        return max(self._virtual, self._finish.get(key, 0.0)) if tag is None else tag.tag

    def charge(self, key: str | None, cost: float) -> float:
        """Charge a start to a key. Return the key's tag before the charge."""
        begin = self.begin(key)
        tag = self._tags.get(key)
        if tag is None:
            self._remember(key, begin + cost)
            return begin
        _discard(self.order, (tag.tag, tag.number, key))
        tag.tag += cost
        insort(self.order, (tag.tag, tag.number, key))
        return begin

    def start(self, key: str | None, cost: float) -> None:
        """Charge a start where nothing is queued: the same as to `charge` it and `advance` to its tag."""
        begin = self._finish.get(key, 0.0)
        if begin < self._virtual:
            begin = self._virtual
        self._remember(key, begin + cost)
        self._virtual = begin

    def charge_elsewhere(self, key: str | None, cost: float) -> None:
        """Charge a start from another queue to a key.

        The virtual time advances to the key's tag before the charge, but not past the lowest tag queued here:
        this queue has not progressed that far, and newcomers must not begin later than queued keys.
        """
        begin = self.begin(key)
        self.charge(key, max(0.0, min(cost, self._virtual + PUT_BACK_TOKENS - begin)))
        self.advance(min(begin, self.order[0][0]) if self.order else begin)

    def absorb(self, other: "Shares") -> None:
        """Take over the charges of another account."""
        other._heir = self
        for key, tag in other._finish.items():
            self.charge_elsewhere(key, tag - other._virtual)

    def uncharge(self, key: str | None, cost: float) -> None:
        """Undo a charge for a start that did not happen, wherever its charges have gone since."""
        shares = self
        while shares._heir is not None:
            shares = shares._heir
        shares.charge(key, -cost)

    def advance(self, tag: float) -> None:
        """Advance the virtual time, at which new keys begin, to the tag of an entry that has started."""
        self._virtual = max(self._virtual, tag)

    def _remember(self, key: str | None, tag: float) -> None:
        # A tag at or below the virtual time carries no information: new keys begin there anyway.
        if tag > self._virtual:
            self._finish[key] = tag
        else:
            self._finish.pop(key, None)
        if len(self._finish) > self._finish_max:
            self._finish = {name: tag for name, tag in self._finish.items() if tag > self._virtual}
            self._finish_max = FINISH_SPARE + 2 * len(self._finish)

    def ahead_of(self, lane: Lane, entry: Entry) -> int:
        """Return how many entries would start before an entry of a lane, which may not be in it yet."""
        if entry.rank is Rank.BEHIND:
            return sum(one.in_turn for one in self.lanes) + bisect_left(lane.behind, entry.number)
        key = entry.ticket.key
        own, due_at = lane.ahead_of(entry)
        own += sum(one.due_before(key, due_at) for one in self.lanes if one is not lane)
        demoted = self._demoted_beside(lane)
        own += sum(len(one.demoted_before(key, due_at)) for one in demoted)
        # The other keys alternate with this one, as long as they have entries.
        if own:
            others = sum(min(own + 1, tag.entries) for name, tag in self._tags.items() if name != key)
        else:
            others = len(self._tags) - (key in self._tags)
        return own + others + sum(1 for _ in self._demoted_of_others(demoted, key, own))

    def _demoted_beside(self, lane: Lane) -> Sequence[Lane]:
        """Return the other lanes with demoted entries."""
        return [one for one in self.lanes if one.demoted and one is not lane]

    def _demoted_of_others(self, lanes: Sequence[Lane], key: str | None, own: int) -> Iterator[Entry]:
        """Yield the demoted entries of other keys that alternate with `own` entries of a key."""
        for one in lanes:
            if own and not one.in_turn:
                for name, demoted in one.demoted.items():
                    if name != key:
                        in_turn = self._tags[name].entries if name in self._tags else 0
                        for _, number in demoted[: max(0, own - in_turn)]:
                            yield one.entries[number]

    def those_ahead_of(self, lane: Lane, entry: Entry) -> Iterator[Entry]:
        """Yield the entries that would start before an entry of a lane, in no order; see `ahead_of`."""
        if entry.rank is Rank.BEHIND:
            yield from self.in_turn()
            for number in lane.behind[: bisect_left(lane.behind, entry.number)]:
                yield lane.entries[number]
            return
        key = entry.ticket.key
        own, due_at = lane.ahead_of(entry)
        yield from lane.first_of(key, own)
        for one in self.lanes:
            if one is not lane:
                number = one.due_before(key, due_at)
                own += number
                yield from one.first_of(key, number)
        demoted = self._demoted_beside(lane)
        for one in demoted:
            before = one.demoted_before(key, due_at)
            own += len(before)
            yield from (one.entries[number] for _, number in before)
        yield from self._demoted_of_others(demoted, key, own)
        for name in self._tags:
            if name != key:
                for one in self.lanes:
                    yield from one.first_of(name, own + 1)

    def in_turn(self) -> Iterator[Entry]:
        """Yield all entries, without those behind."""
        for name, tag in self._tags.items():
            for one in self.lanes:
                yield from one.first_of(name, tag.entries)


@dataclass(slots=True)
class _Key:
    """A key in one walk: its tag, charged per yielded entry, and its next entry per lane, by deadline."""

    tag: float
    number: int
    heads: list[tuple[float, int, int, Iterator[int]]]  # a heap of (due at, entry, lane, further entries)
    is_queued: bool = True


class Walk:
    """One pass over the lanes of an account: yields their entries in the order in which they would start."""

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._lanes = tuple(shares.lanes)
        # What is still to be yielded: without those behind, and of all, by `is_ordinary`.
        self._in_turn = [sum(min(LOOKAHEAD, count) for count in lane.in_turn_counts) for lane in self._lanes]
        self._left = [[min(LOOKAHEAD, count) for count in lane.counts] for lane in self._lanes]
        self._behind: list[dict[str | None, list[int]] | None] = [None] * len(self._lanes)
        self._keys: dict[str | None, _Key] = {}
        self._queue: list[tuple[float, int, str | None]] = []  # a heap of the keys reached so far

    def __iter__(self) -> Iterator[Entry]:
        for index, in_turn in enumerate(self._in_turn):
            if not in_turn:
                self._come_behind(index)
        following = iter(self._shares.order)
        fresh = next(following, None)
        left = sum(map(sum, self._left))
        while left and (fresh is not None or self._queue):
            if fresh is not None and (not self._queue or fresh[:2] <= self._queue[0][:2]):
                tag, number, name = fresh
                key = self._keys[name] = _Key(tag, number, [])
                for index, lane in enumerate(self._lanes):
                    self._add(key, index, lane.of_key(name))
                    if not self._in_turn[index]:
                        self._add(key, index, self._of_behind(index).get(name, ()))
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
            if entry.rank is not Rank.BEHIND:
                self._in_turn[index] -= 1
                if not self._in_turn[index]:
                    self._come_behind(index)

    def _next(self, key: _Key) -> tuple[int, Entry | None]:
        """Take the key's entry that is due first, among the lanes within their lookahead."""
        while key.heads:
            _, number, index, following = heappop(key.heads)
            entry, left = self._lanes[index].entries[number], self._left[index]
            is_left = left[entry.is_ordinary] > 0
            left[entry.is_ordinary] -= is_left
            self._add(key, index, following)
            if is_left:
                return index, entry
        return 0, None

    def _add(self, key: _Key, index: int, numbers: Iterable[int]) -> None:
        entries, left, following = self._lanes[index].entries, self._left[index], iter(numbers)
        if not any(left):
            return
        for number in following:
            entry = entries[number]
            if left[entry.is_ordinary]:
                heappush(key.heads, (entry.due_at, number, index, following))
                return

    def _come_behind(self, index: int) -> None:
        """Add the entries of a lane that are behind, once all its others have been yielded."""
        for name, numbers in self._of_behind(index).items():
            key = self._keys.get(name)
            if key is None and name in self._shares:
                continue  # not reached yet
            if key is None:
                number = self._shares.numbers + 1 + len(self._keys)
                key = self._keys[name] = _Key(self._shares.begin(name), number, [], is_queued=False)
            self._add(key, index, numbers)
            if not key.is_queued:
                key.is_queued = True
                heappush(self._queue, (key.tag, key.number, name))

    def _of_behind(self, index: int) -> dict[str | None, list[int]]:
        """Return the entries of a lane that are behind, per key."""
        found = self._behind[index]
        if found is None:
            found = self._behind[index] = {}
            lane = self._lanes[index]
            for number in lane.behind:
                found.setdefault(lane.entries[number].ticket.key, []).append(number)
        return found


def merged(shared: Iterable[Shares]) -> Iterable[Entry]:
    """Return the entries of one priority: the orders of all first pools, merged by earliest deadline."""
    return merge(*map(Walk, shared), key=lambda entry: (entry.due_at, entry.number))


def _discard(members: list[_T], member: _T) -> None:
    """Remove a member from a sorted list; KeyError if it is missing."""
    at = bisect_left(members, member)
    if at == len(members) or members[at] != member:
        raise KeyError(member)
    del members[at]
