"""What this process has of one backend: what its requests use, and what is kept for it beyond that.

What is kept is counted by the server for this process, used or not, so it may be used without asking: while a
backend is far from its limits, a request costs no command. How much that is, and whether anything may be kept
at all, the server says (settle.lua). Here is what follows from it. Does no I/O.
"""

import asyncio
from collections.abc import Sequence

import anyio

from gateway.core.admission import COUNTERS
from gateway.core.values import Exclusion, Load
from gateway.ports import Slot
from gateway.store.leases import Freed, Order, Reply

PEAK_TICKS = 5
"""Ticks over which the most that was used is remembered. What was not used for twice that is given back."""

_NOTHING = Load()
_NONE = Load(-1, -1, -1, -1, -1, -1)
"""Of no counter may anything be kept."""


class Asked:
    """A request that wants a place, and what becomes of that."""

    __slots__ = ("claim", "limits", "outcome")

    def __init__(self, claim: Load, limits: Load, outcome: asyncio.Future[Slot | Exclusion]) -> None:
        """Want this much of a backend that may hold so much."""
        self.claim, self.limits, self.outcome = claim, limits, outcome


class Account:
    """One backend's account. Between `order` and `settled` or `failed` nothing is taken from what is kept.

    Attributes:
        backend: Id of the backend.
        others: What all other processes use there, as last heard.
        others_kept: What is kept for them, used or not, as last heard.
        kept: What the server counts for this process.
        keeps: Whether that may be more than what is used.
        keeping: How many other processes keep something, as last heard.
        asked: Requests that want a place, and are not under way to the server.
        told: Who waits for the server to know what is used by now.
        placed: Requests that were given a place without asking since the last order.
        waiters: How many wait for others to give back what they keep.
        is_wanted: Whether others have asked for what is kept.
        says_it_waits: Whether the server was last told that somebody waits here.
        is_looked_at: Whether anybody wanted to know since the last tick.
        is_due, is_under_way: Whether a command will be sent in a moment; whether one has been.
        news: Set when something becomes free; another one from then on.
    """

    def __init__(self, backend: str) -> None:
        """Have nothing yet."""
        self.backend = backend
        self.others = self.others_kept = self.kept = _NOTHING
        self.keeps = self.is_wanted = self.says_it_waits = False
        self.is_looked_at = self.is_due = self.is_under_way = False
        self.keeping = self.placed = self.waiters = 0
        self.asked: list[Asked] = []
        self.told: list[asyncio.Future[None]] = []
        self._is_fresh = False  # whether it was settled since the last tick
        self.news = anyio.Event()
        self._ceiling = _NONE
        self._number = self._version = 0
        self._deaf = 0
        self._settled_at = self._deaf_until = 0.0
        self._peak = self._peak_before = self._ticks = 0

    # -------------------------------------------------------------- without asking

    def covers(self, used: Load, claim: Load, limits: Load, oldest: float) -> bool:
        """Return whether a claim can be had of what is kept, without asking.

        `oldest`: what was said before this moment (monotonic seconds) may be true no more.
        """
        if not self.keeps or self.is_under_way or self._settled_at < oldest:
            return False
        total, ceiling = used + claim, self._ceiling
        if not total.is_within(self.kept) or not (
            (not claim.seqs or 0 <= ceiling.seqs <= limits.seqs)
            and (not claim.share or 0 <= ceiling.share <= limits.share)
            and (not claim.kv_blocks or 0 <= ceiling.kv_blocks <= limits.kv_blocks)
            and (not claim.long_seqs or 0 <= ceiling.long_seqs <= limits.long_seqs)
            and (not claim.long_unanswered or 0 <= ceiling.long_unanswered <= limits.long_unanswered)
            and (not claim.prefill_ms or 0 <= ceiling.prefill_ms <= limits.prefill_ms)
        ):
            return False
        self._peak = max(self._peak, total.seqs)
        return True

    def may_keep(self, freed: Load) -> bool:
        """Return whether what became free here is kept, so that nobody has to be told."""
        ceiling = self._ceiling
        return self.keeps and not (
            (freed.seqs and ceiling.seqs < 0)
            or (freed.share and ceiling.share < 0)
            or (freed.kv_blocks and ceiling.kv_blocks < 0)
            or (freed.long_seqs and ceiling.long_seqs < 0)
            or (freed.long_unanswered and ceiling.long_unanswered < 0)
            or (freed.prefill_ms and ceiling.prefill_ms < 0)
        )

    def is_behind(self, used: Load) -> bool:
        """Return whether the server counts another amount for this process than it should."""
        return not used.is_within(self.kept) or (not self.keeps and used != self.kept)

    def tick(self, used: Load) -> bool:
        """Let a moment pass. Returns whether the server is to be asked."""
        self._ticks += 1
        if self._ticks % PEAK_TICKS == 0:
            self._peak_before, self._peak = self._peak, used.seqs
        was_settled, self._is_fresh = self._is_fresh, False
        if was_settled or not (self.is_looked_at or self.keeps):
            return False
        self.is_looked_at = False
        return True

    # -------------------------------------------------------------- asking

    def order(self, used: Load, claims: Sequence[Asked], *, waits: bool, may_keep: bool, now: float) -> Order:
        """Return what to ask the server for, which is then under way."""
        ceiling = self._ceiling
        for one in claims:
            ceiling = _lower(ceiling, _ceiling(one.claim, one.limits))
        peak = max(self._peak, self._peak_before, used.seqs)
        kept = _part(self.kept, peak, used) if self.keeps else used
        waits = waits or self.waiters > 0
        may_keep = may_keep and not waits and not self.is_wanted and bool(claims or peak) and ceiling != _NONE
        if not may_keep:
            kept = used
        self.is_wanted, self.placed = False, 0
        self._ceiling, self._number, self.is_under_way = ceiling, self._number + 1, True
        self.says_it_waits = waits
        return Order(
            self._number,
            used,
            kept,
            ceiling,
            waits,
            may_keep,
            self._deaf if now < self._deaf_until else 0,
            [(one.claim, one.limits) for one in claims],
        )

    def may_find_more(self, now: float) -> bool:
        """Return whether others keep something that they may still give back."""
        return self.keeping > (self._deaf if now < self._deaf_until else 0)

    def not_given_back(self, until: float) -> None:
        """Note that as many as keep something now do not give it back, and are not asked for a while."""
        self._deaf, self._deaf_until = self.keeping, until

    def settled(self, reply: Reply, now: float) -> bool:
        """Take in what the server said. Returns whether something has become free of which nobody told."""
        self.is_under_way = False
        self.kept, self.keeps, self.keeping = reply.kept, reply.may_keep, reply.keeping
        self._settled_at, self._is_fresh = now, True
        if not self.keeps:
            self._ceiling, self.is_wanted = _NONE, False
        # Redis that has lost its data, and its clock, starts with old versions: what was asked for counts.
        self._version = reply.version
        used, kept = self.others, self.others_kept
        self.others, self.others_kept = reply.others, reply.others_kept
        return not (used.is_within(reply.others) and kept.is_within(reply.others_kept))

    def failed(self, used: Load) -> None:
        """Note that it is not known what the server counts. The next order puts it right."""
        self.is_under_way = self.keeps = False
        self.kept, self._ceiling = used, _NONE

    def heard(self, freed: Freed) -> None:
        """Take in what another process says that it freed."""
        if freed.version > self._version:
            self._version = freed.version
            rest = self.others - freed.load
            self.others = Load(*[max(0, getattr(rest, name)) for name in COUNTERS])
        self.news.set()
        self.news = anyio.Event()


def _ceiling(claim: Load, limits: Load) -> Load:
    """Return up to where places may be kept beside such requests: so that there is room for one more."""
    pairs = [(getattr(claim, name), getattr(limits, name)) for name in COUNTERS]
    return Load(*[max(0, limit - wanted) if wanted else -1 for wanted, limit in pairs])


def _lower(one: Load, other: Load) -> Load:
    """Return the lower of two ceilings, counter by counter, where there are both."""
    pairs = [(getattr(one, name), getattr(other, name)) for name in COUNTERS]
    return Load(*[max(pair) if min(pair) < 0 else min(pair) for pair in pairs])


def _part(kept: Load, seqs: int, used: Load) -> Load:
    """Return of what is kept as much as so many sequences take, and what is used."""
    if seqs >= kept.seqs:
        return kept
    parts = [-(-getattr(kept, name) * seqs // kept.seqs) for name in COUNTERS]
    return Load(*[max(part, getattr(used, name)) for part, name in zip(parts, COUNTERS, strict=True)])
