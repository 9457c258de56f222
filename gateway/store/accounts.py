"""This process's account with one backend: the slots its requests use, and its grant, which may exceed them.

The server counts the whole grant, used or not, so a slot from it needs no command: while a backend is far
from its limits, requests cost none. The server decides how much is granted, and whether that includes any
surplus (settle.lua). This module implements the rest. No I/O.
"""

import asyncio
from collections.abc import Iterator, Sequence

import anyio

from gateway.core.admission import COUNTERS
from gateway.core.decision import Exclusion
from gateway.core.load import NO_LOAD, Load
from gateway.ports import Slot
from gateway.store.leases import Freed, Order, Reply

PEAK_TICKS = 5
"""Ticks over which the peak use is remembered. Surplus unused for twice as long is returned. A choice: a
second or two (`redis.TICK_S`)."""

_NONE = Load(-1, -1, -1, -1, -1, -1)
"""No surplus of any counter."""


class PendingSlot:
    """A request waiting for a slot, and its outcome."""

    __slots__ = ("claim", "limits", "outcome")

    def __init__(self, claim: Load, limits: Load, outcome: asyncio.Future[Slot | Exclusion]) -> None:
        """Wait for `claim` on a backend that may hold `limits`."""
        self.claim, self.limits, self.outcome = claim, limits, outcome


class Account:
    """An account with one backend. Its grant is frozen between `order` and `settled` or `failed`.

    Attributes:
        backend: Id of the backend.
        others: Slots used by all other processes, as last reported.
        others_kept: Slots counted for them, used or not, as last reported.
        kept: Slots the server counts for this process.
        keeps: Whether that may be more than is used.
        keeping: Number of other processes with surplus, as last reported.
        asked: Requests waiting for a slot that are not yet part of a command.
        told: Futures to resolve once the server knows the current use.
        placed: Requests that got a slot from the grant since the last order.
        waiters: Number of requests waiting for others to return surplus.
        is_wanted: Whether another process has asked for this surplus.
        says_it_waits: Whether the server was last told that requests are waiting here.
        is_looked_at: Whether the account was used since the last tick.
        is_due, is_under_way: Whether a command is about to be sent; whether one is in progress.
        news: Set when capacity becomes free, and replaced by a new event.
    """

    def __init__(self, backend: str, numbers: Iterator[int]) -> None:
        """Start with nothing. `numbers`: rising; the server ignores an order after a larger number."""
        self.backend = backend
        self._numbers = numbers
        self.others = self.others_kept = self.kept = NO_LOAD
        self.keeps = self.is_wanted = self.says_it_waits = False
        self.is_looked_at = self.is_due = self.is_under_way = False
        self.keeping = self.placed = self.waiters = 0
        self.asked: list[PendingSlot] = []
        self.told: list[asyncio.Future[None]] = []
        self._is_fresh = False  # whether it was settled since the last tick
        self.news = anyio.Event()
        self._ceiling = _NONE
        self._version = 0
        self._deaf = 0
        self._settled_at = self._deaf_until = 0.0
        self._peak = self._peak_before = self._ticks = 0

    # -------------------------------------------------------------- without a command

    def covers(self, used: Load, claim: Load, limits: Load, oldest: float) -> bool:
        """Return whether the grant covers a claim.

        A reply received before `oldest` (monotonic seconds) is too old to rely on.
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
        """Return whether freed slots become surplus, so that freeing them needs no command."""
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
        """Return whether the server's count for this process is out of date."""
        return not used.is_within(self.kept) or (not self.keeps and used != self.kept)

    def is_empty(self, used: Load) -> bool:
        """Return whether nothing is held, asked for or to be told."""
        is_busy = self.is_due or self.is_under_way or self.asked or self.told or self.waiters
        return not is_busy and not self.keeps and used == self.kept == NO_LOAD

    def tick(self, used: Load) -> bool:
        """Advance by one tick. Return whether to contact the server."""
        self._ticks += 1
        if self._ticks % PEAK_TICKS == 0:
            self._peak_before, self._peak = self._peak, used.seqs
        was_settled, self._is_fresh = self._is_fresh, False
        if was_settled or not (self.is_looked_at or self.keeps):
            return False
        self.is_looked_at = False
        return True

    # -------------------------------------------------------------- with a command

    def order(
        self, used: Load, claims: Sequence[PendingSlot], *, waits: bool, may_keep: bool, now: float
    ) -> Order:
        """Return the order to send to the server, which is then in progress."""
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
        self._ceiling, self.is_under_way = ceiling, True
        self.says_it_waits = waits
        return Order(
            next(self._numbers),
            used,
            kept,
            ceiling,
            waits,
            may_keep,
            self._deaf if now < self._deaf_until else 0,
            [(one.claim, one.limits) for one in claims],
        )

    def may_find_more(self, now: float) -> bool:
        """Return whether other processes have surplus that they may still return."""
        return self.keeping > (self._deaf if now < self._deaf_until else 0)

    def not_given_back(self, until: float) -> None:
        """Note that the present surplus is not being returned; do not ask again for a while."""
        self._deaf, self._deaf_until = self.keeping, until

    def settled(self, reply: Reply, now: float) -> bool:
        """Apply the server's reply. Return whether capacity became free without a notification."""
        self.is_under_way = False
        self.kept, self.keeps, self.keeping = reply.kept, reply.may_keep, reply.keeping
        self._settled_at, self._is_fresh = now, True
        if not self.keeps:
            self._ceiling, self.is_wanted = _NONE, False
        # Not the maximum: a Redis that lost its data, and whose clock went back, restarts at older versions.
        self._version = reply.version
        used, kept = self.others, self.others_kept
        self.others, self.others_kept = reply.others, reply.others_kept
        return not (used.is_within(reply.others) and kept.is_within(reply.others_kept))

    def failed(self, used: Load) -> None:
        """Note that the server's count is unknown after a failure. The next order corrects it."""
        self.is_under_way = self.keeps = False
        self.kept, self._ceiling = used, _NONE

    def heard(self, freed: Freed) -> None:
        """Apply a notification of capacity freed by another process."""
        if freed.version > self._version:
            self._version = freed.version
            rest = self.others - freed.load
            self.others = Load(*[max(0, getattr(rest, name)) for name in COUNTERS])
        self.news.set()
        self.news = anyio.Event()


def _ceiling(claim: Load, limits: Load) -> Load:
    """Return the limits for surplus beside such a request, which leave room for one more like it."""
    pairs = [(getattr(claim, name), getattr(limits, name)) for name in COUNTERS]
    return Load(*[max(0, limit - wanted) if wanted else -1 for wanted, limit in pairs])


def _lower(one: Load, other: Load) -> Load:
    """Return the minimum of two limits, counter by counter, where both are set."""
    pairs = [(getattr(one, name), getattr(other, name)) for name in COUNTERS]
    return Load(*[max(pair) if min(pair) < 0 else min(pair) for pair in pairs])


def _part(kept: Load, seqs: int, used: Load) -> Load:
    """Return the part of a grant that `seqs` sequences need, and at least `used`."""
    if seqs >= kept.seqs:
        return kept
    parts = [-(-getattr(kept, name) * seqs // kept.seqs) for name in COUNTERS]
    return Load(*[max(part, getattr(used, name)) for part, name in zip(parts, COUNTERS, strict=True)])
