"""Where one turn of the queue places requests: the backend snapshots minus offers and holds."""

from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from math import inf

from gateway.core import admission, selection
from gateway.core.decision import Candidate, Exclusion
from gateway.core.health import State
from gateway.core.load import NO_LOAD, UNLIMITED, Load
from gateway.core.selection import BackendView
from gateway.core.value import valueclass
from gateway.core.waiting.fairness import LOOKAHEAD, Entry
from gateway.core.waiting.tickets import Ticket

_SHARED = frozenset({Exclusion.AT_KNEE, Exclusion.KV_FULL, Exclusion.PREFILL_BUSY})
"""Shortages that affect every kind of request, unlike the gates for long prompts."""

_FULL = frozenset(
    {
        Exclusion.AT_KNEE,
        Exclusion.KV_FULL,
        Exclusion.LONG_FULL,
        Exclusion.SPILL_LONG,
        Exclusion.SPILL_RESERVE,
    }
)
"""Exclusions that last until a request ends, which the measured drain rate predicts. Prefill ends sooner."""

_FORESEEN = _FULL | {Exclusion.LONG_PREFILL}
"""Exclusions whose end a forecast predicts."""


LARGE = 1.2
"""A request is large if it needs this many times what those that run take on average. A choice: below that,
the next end or the one after it makes room."""

STAYING_MAX = LOOKAHEAD * 3 // 4
"""Maximum requests of a class that wait for the backend that has their conversation, in one turn. A choice: a
turn looks at `LOOKAHEAD` of them. If all of those wait, nobody behind them starts, whatever is idle."""


@valueclass(frozen=True, slots=True)
class _Stuck:
    """A request that has to wait, and whether for it, all backends are `_FULL`, or `_FORESEEN`."""

    ticket: Ticket
    busy: tuple[str, ...]
    is_full: bool
    is_foreseen: bool


class Placement:
    """The placement of requests during one turn: offers count as load, and blocked requests hold backends."""

    def __init__(self, views: Mapping[str, BackendView], paused: frozenset[str], now: float) -> None:
        self._views = dict(views)
        self._now = now
        self._paused = paused
        self._closed = set(paused)  # backends not offered to any further request in this turn
        self._closed_to_jobs: set[str] = set()  # backends not offered to any further job
        self._wanted: dict[str, list[tuple[Entry, tuple[str, ...]]]] = {}
        self._stuck: dict[tuple[str, str, bool], list[_Stuck]] = {}
        self.foreseen: list[Entry] = []  # entries in their first turn whose wait a forecast predicts
        self.full_classes: dict[tuple[str, str], list[Ticket]] = {}  # without room, by (model, class)
        self._staying: Counter[tuple[str, str]] = Counter()  # by (model, class)
        self.next_look_at = inf  # when an entry stops waiting for the backend that has its conversation
        self.blocked: dict[str, tuple[Entry, Load]] = {}  # per backend, which waits first, and for what
        self.has_held = False  # whether an entry waits only because backends are held for others

    @property
    def closed(self) -> AbstractSet[str]:
        """The backends that have been closed to all that come later."""
        return self._closed

    def place(self, entry: Entry) -> tuple[Candidate, ...] | None:
        """Return the backends to offer, best first; () if the entry must wait; None if none takes it."""
        ticket = entry.ticket
        is_unproven, entry.is_unproven = entry.is_unproven, False
        is_job = ticket.demand.is_job
        stayed = [busy.backend for busy, _ in entry.stays]
        if stayed and self._goes_on_staying(entry):
            return ()
        stuck = self._stuck.setdefault((*ticket.lane, is_job), [])
        for other in stuck:
            if asks_no_less(ticket, other.ticket, is_full=other.is_full) and self._may_wait(
                ticket, other.busy
            ):
                entry.is_full = other.is_full
                if is_unproven and other.is_foreseen:
                    self.foreseen.append(entry)
                return ()
        ranked = selection.rank(
            ticket.policy,
            ticket.traffic_class,
            ticket.demand,
            self._seen_by(ticket),
            failed=ticket.failed | self._in_vain(ticket) if ticket.refused else ticket.failed,
        )
        able = [one for one in ranked if one.excluded is None]
        closed = self._closed_to(ticket)
        free = tuple(one for one in able if one.backend not in closed)
        if stayed:
            free = self._stayed_first(free, stayed)
        if free and self._stays(entry, free, ranked):
            return ()
        if free:
            self._take(free[0])
            return selection.offered(free, ticket.demand, ticket.prefix_shares)
        busy = tuple(one.backend for one in ranked if one.excluded is None or one.excluded.is_busy)
        if not busy:
            return self._trial(ticket)
        is_full = entry.is_full = all(self._lasts(one, _FULL) for one in ranked)
        is_foreseen = is_full or all(self._lasts(one, _FORESEEN) for one in ranked)
        if is_unproven and is_foreseen:
            self.foreseen.append(entry)
        is_held = bool(able) and not any(one.backend in self._paused for one in able)
        self.has_held = self.has_held or is_held
        if not is_job and (is_full or is_held):
            self.full_classes.setdefault(ticket.lane, []).append(ticket)
        stuck.append(_Stuck(ticket, busy, is_full, is_foreseen))
        self._wait_for(entry, [one for one in ranked if self._may_hold(ticket, one)])
        return ()

    def _trial(self, ticket: Ticket) -> tuple[Candidate, ...] | None:
        """Return the ejected backends on which to try a request that no other takes; None if there are none.

        Nobody waits for them. Jobs have the time to wait until one is up, and only so many attempts.
        """
        seen = self._seen_by(ticket)
        views = seen if ticket.demand.is_job else selection.with_trials(seen, self._now)
        if views is seen:
            return None
        ranked = selection.rank(
            ticket.policy, ticket.traffic_class, ticket.demand, views, failed=ticket.failed
        )
        closed = self._closed_to(ticket)
        free = tuple(one for one in ranked if one.excluded is None and one.backend not in closed)
        if not free:
            return None
        self._take(free[0])
        return free

    def _wait_for(self, entry: Entry, busy: Sequence[Candidate]) -> None:
        if not entry.ticket.demand.is_job:
            for one in busy:
                if one.backend not in self.blocked:
                    self.blocked[one.backend] = entry, self._lacks(one)
        self._hold(entry, tuple(one.backend for one in busy))

    def _lacks(self, candidate: Candidate) -> Load:
        """Return what a request needs of a busy backend; nothing if any of those that run there frees it.

        By what they take on average: where all take the same, whichever process asks first gets what one
        frees, and has no need to keep it from others.
        """
        claim, load = candidate.claim, self._views[candidate.backend].load
        needed, held = claim.share, load.share
        if candidate.excluded is Exclusion.KV_FULL:
            needed, held = claim.kv_blocks, load.kv_blocks
        is_large = candidate.excluded is not Exclusion.PREFILL_BUSY and needed * load.seqs > held * LARGE
        return Load(claim.seqs, claim.share, claim.kv_blocks) if is_large else NO_LOAD

    def _closed_to(self, ticket: Ticket) -> AbstractSet[str]:
        """Return the backends that are not offered to a request in the rest of this turn."""
        return self._closed | self._closed_to_jobs if ticket.demand.is_job else self._closed

    def _stays(self, entry: Entry, free: Sequence[Candidate], ranked: Sequence[Candidate]) -> bool:
        """Return whether an entry waits for the backend that has its conversation, and note until when.

        Its time runs from when another could first take it: what it waits before costs it nothing. It is no
        more than half of what it may still wait then, because another one may have to do after that.
        """
        ticket, shares = entry.ticket, entry.ticket.prefix_shares
        has_many = self._staying[ticket.lane] >= STAYING_MAX
        if has_many or not shares or not selection.counts_cached(ticket.demand):
            return False
        found, seconds = would_stay(free, ranked, shares)
        if not found:
            return False
        entry.stays = [(one, self._views[one.backend]) for one in found]
        since = entry.stays_since = self._now if entry.stays_since is None else entry.stays_since
        entry.stays_until = since + min(seconds, (entry.expires_at - since) / 2)
        return self._goes_on_staying(entry)

    def _stayed_first(self, free: Sequence[Candidate], stayed: Sequence[str]) -> tuple[Candidate, ...]:
        """Return the backends, first those for which a request has waited.

        By its score, an emptier one may be better, as it was before. Then it would have waited for nothing.
        """

        def is_other(one: Candidate) -> bool:
            return one.backend not in stayed or self._views[one.backend].status.state is not State.UP

        return tuple(sorted(free, key=is_other))

    def _goes_on_staying(self, entry: Entry) -> bool:
        """Return whether an entry waits for another turn for the backends that have its conversation.

        Not if its time is up, or one of them has room or has changed: then a ranking says what else.
        """
        ticket = entry.ticket
        closed = self._closed_to(ticket)
        if (
            self._now >= entry.stays_until
            or self._staying[ticket.lane] >= STAYING_MAX
            or any(self._may_take(busy, known, closed) for busy, known in entry.stays)
        ):
            entry.stays = ()
            return False
        self._staying[ticket.lane] += 1
        self.next_look_at = min(self.next_look_at, entry.stays_until)
        self._hold(entry, (entry.stays[0][0].backend,))
        return True

    def _may_take(self, busy: Candidate, known: BackendView, closed: AbstractSet[str]) -> bool:
        """Return whether a backend may have room by now: if so much else has changed, a ranking says."""
        view = self._views.get(busy.backend)
        return (
            view is None
            or not selection.same_state(view, known)
            or (busy.backend not in closed and admission.full(view.load, busy.claim, busy.limits) is None)
        )

    def _may_wait(self, ticket: Ticket, busy: tuple[str, ...]) -> bool:
        """Return whether one of these busy backends could take a request once it has room."""
        views = (self._views[name] for name in busy if name not in ticket.failed)
        return any(selection.could_take(view.backend, ticket.demand, view.capacity) for view in views)

    def _seen_by(self, ticket: Ticket) -> Mapping[str, BackendView]:
        shares = ticket.prefix_shares
        views = selection.with_shares(self._views, shares) if shares else self._views
        return selection.with_refusals(views, ticket.refused) if ticket.refused else views

    def _in_vain(self, ticket: Ticket) -> frozenset[str]:
        """Return the backends that have refused a request, and refuse all others, too."""
        views = [self._views[name] for name in ticket.refused if name in self._views]
        return frozenset(view.backend.id for view in views if view.refuses_all)

    def _may_hold(self, ticket: Ticket, one: Candidate) -> bool:
        """Return whether a request may hold a backend on which it cannot start.

        Not one that waits there only because it was refused: it may be one of those that this backend refuses
        though it takes others, which need not wait for it.
        """
        if one.backend not in ticket.refused or not _is_waited_for(one):
            return _is_waited_for(one)
        load, most = self._views[one.backend].load, replace(one.limits, seqs=UNLIMITED)
        return admission.full(load, one.claim, most) is not None

    def _lasts(self, candidate: Candidate, lasting: frozenset[Exclusion]) -> bool:
        """Return whether a backend cannot take the request before one of these exclusions ends, if at all."""
        excluded = candidate.excluded
        if excluded is None or not excluded.is_busy:
            return excluded is not None
        return excluded in lasting and self._views[candidate.backend].status.state is not State.PROBATION

    def _take(self, candidate: Candidate) -> None:
        name = candidate.backend
        view = self._views[name]
        self._views[name] = replace(view, load=view.load + candidate.claim)
        for passed, wants in self._wanted.pop(name, ()):
            passed.passed += 1
            self._hold(passed, wants)

    def _hold(self, entry: Entry, wants: tuple[str, ...]) -> None:
        if entry.passed >= entry.ticket.traffic_class.waiting.passes_max:
            # Jobs leave room for others, so one that waits does not keep it from them.
            closed = self._closed_to_jobs if entry.ticket.demand.is_job else self._closed
            closed.update(wants)
            return
        for name in wants:
            waiting = self._wanted.setdefault(name, [])
            if all(entry is not other for other, _ in waiting):
                waiting.append((entry, wants))


def would_stay(
    free: Sequence[Candidate], ranked: Sequence[Candidate], shares: Mapping[str, float]
) -> tuple[Sequence[Candidate], float]:
    """Return the result of `selection.stay` for a request that could start on the first of `free`.

    Args:
        free: Where it could start, best first.
        ranked: All backends of its class.
        shares: Per backend, the share of its conversation that the backend has seen.
    """
    # Also one that could take it, but is held for another.
    busy = [one for one in ranked if _is_waited_for(one) or (_is_able(one) and one not in free)]
    return selection.stay(busy, free[0], shares)


def _is_able(candidate: Candidate) -> bool:
    return candidate.excluded is None and not candidate.is_spill


def _is_waited_for(candidate: Candidate) -> bool:
    return candidate.excluded in _SHARED and not candidate.is_spill


def asks_no_less(ticket: Ticket, other: Ticket, *, is_full: bool = False) -> bool:
    """Return whether `ticket` cannot start where `other`, of the same class, cannot: it needs no less.

    `is_full`: whether `other` waits for a request to end everywhere.
    """
    asked, least = ticket.demand, other.demand
    return (
        ticket.failed >= other.failed
        and ticket.refused >= other.refused
        and asked.seqs >= least.seqs
        and asked.prompts >= least.prompts
        and asked.prompt_tokens >= least.prompt_tokens
        and asked.total_tokens >= least.total_tokens
        and asked.images >= least.images
        and asked.audios >= least.audios
        and ticket.policy is other.policy
        # A long prompt needs no long prefill where most of it is cached, but a slot and its KV blocks.
        and (is_full or not (ticket.prefix_shares and ticket.is_long))
        # A spill may have to wait for long prompts only if it is short.
        and all(
            admission.is_long(gates, asked) == admission.is_long(gates, least)
            for gates in (ticket.policy.pools[name].gates for name in ticket.traffic_class.pools)
        )
    )
