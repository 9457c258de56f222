"""Exchange of facts with the other gateway processes that share the store.

Each process adopts from its peers what it could not observe itself, so that any number of gateways in front
of one fleet make the same decisions. Adopted facts are kept apart from first-hand ones and never passed on.
"""

import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any

from gateway.core.admission import WHOLE
from gateway.core.conversations import HASHING, Conversations
from gateway.core.facts import Blocked, Facts, increases, least, pooled, summed
from gateway.core.health import PeerAttempts, PeerVerdict
from gateway.core.load import Load
from gateway.core.policy import Policy
from gateway.core.waiting import BLOCKED_KNOWN_S, WaitingLine
from gateway.events import about
from gateway.pipeline.watch import BackendWatch
from gateway.ports import Clock, SharedHealth, SharedLearning, SharedPrefixes

log = logging.getLogger("gateway.store")


class Peers:
    """Collects the facts of this process, and applies those of its peers."""

    def __init__(
        self,
        *,
        fleet: SharedHealth,
        estimator: SharedLearning,
        line: WaitingLine,
        watch: BackendWatch,
        prefixes: SharedPrefixes,
        policy: Callable[[], Policy],
        keys: Collection[str],
        clock: Clock,
        on_change: Callable[[], None],
    ) -> None:
        """Wire up the sources and sinks of the facts.

        Args:
            fleet: Source of this process's health verdicts; receives those of peers.
            estimator: Source of learned statistics about prompt counting; receives those of peers.
            line: Source of started tokens and of long prompts, waiting or being read; accounts for those of
                peers.
            watch: Source of knee shares; applies the lowest one of all peers.
            prefixes: Source of where conversations were answered; hears where those of peers were.
            policy: Returns the current policy; facts about anything it does not contain are ignored.
            keys: Names of the API keys; empty if callers need none.
            clock: Source of times.
            on_change: Called when what peers have said may let a request that waits here start.
        """
        self._fleet, self._estimator, self._line, self._watch = fleet, estimator, line, watch
        self._prefixes = prefixes
        self._policy, self._clock, self._on_change = policy, clock, on_change
        self._keys: frozenset[str | None] = frozenset(keys or (None,))
        self._known: Mapping[str, Facts] = {}
        self._long_waiting: Mapping[str, int] = {}
        self._blocked: Mapping[str, Load] = {}
        self._blocked_told: Mapping[str, tuple[Mapping[str, Blocked], float]] = {}  # and since when so
        self._unread: set[str] = set()  # peers that hash differently

    def replace_keys(self, keys: Collection[str]) -> None:
        """Replace the names of the API keys."""
        self._keys = frozenset(keys or (None,))

    def facts(self) -> Facts:
        """Return the facts of this process."""
        return Facts(
            verdicts=self._fleet.verdicts(),
            attempts=self._fleet.attempts(),
            learned=self._estimator.learned(),
            started=self._line.tokens_started(self._clock.now()),
            long_waiting=self._line.long_waiting_here(),
            reading=self._line.reading_here(self._clock.now()),
            knee_shares=self._watch.shares(),
            blocked=self._line.blocked_here(self._clock.now()),
            conversations=self._prefixes.conversations(self._clock.now()),
        )

    def hear(self, facts: Mapping[str, Facts]) -> None:
        """Apply the facts of all live peers, by name."""
        before, self._known = self._known, dict(facts)
        self._line.note_peers(len(facts))
        self._unread &= facts.keys()
        for gateway, told in facts.items():
            old = before.get(gateway)
            self._hear_of_backends(gateway, told, old)
            self._charge(told, old)
            self._hear_of_conversations(gateway, told.conversations, old)
        self._estimator.note_learned(pooled(told.learned for told in facts.values()))
        self._watch.note_shares(least(told.knee_shares for told in facts.values()))
        self._note_reading(facts)
        self._note_long_waiting(summed(told.long_waiting for told in facts.values()))
        self._note_blocked(facts)

    def view(self) -> Mapping[str, Any]:
        """Return each peer's facts for the admin API."""
        return {
            gateway: {
                "verdicts": {name: verdict.reason for name, verdict in told.verdicts.items()},
                "requests_judged": sum(one.served + one.failed for one in told.attempts.values()),
                "answers_learned_from": sum(ratio.answers for ratio in told.learned.ratios.values()),
                "margin_tokens": told.learned.p99_tokens,
                "tokens_started": sum(told.started.values()),
                "long_waiting": told.long_waiting,
                "reading": told.reading,
                "knee_shares": {name: share / WHOLE for name, share in told.knee_shares.items()},
                "blocked": {name: one.waited_s for name, one in told.blocked.items()},
                "conversations": sum(map(len, told.conversations.answered.values())),
                "hashes_alike": told.conversations.hashing == HASHING,
            }
            for gateway, told in self._known.items()
        }

    def _hear_of_backends(self, gateway: str, told: Facts, old: Facts | None) -> None:
        # Verdicts first, so that the failures that led to one are not counted twice.
        for name, verdict in told.verdicts.items():
            self._fleet.hear(name, PeerVerdict(gateway, verdict))
        served, failed = (
            increases(None if old is None else _counts(old, which), _counts(told, which))
            for which in ("served", "failed")
        )
        for name in {**served, **failed}:
            self._fleet.hear(name, PeerAttempts(served.get(name, 0), failed.get(name, 0)))

    def _hear_of_conversations(self, gateway: str, told: Conversations, old: Facts | None) -> None:
        if told.hashing == HASHING:
            backends = self._policy().backends
            for name, key in told.since(Conversations() if old is None else old.conversations):
                if name in backends:
                    self._prefixes.hear(name, key)
        elif told.answered and gateway not in self._unread:
            self._unread.add(gateway)
            log.info(
                "%s hashes texts differently: conversations are not recognized across the two, unless both "
                "are started with the same PYTHONHASHSEED",
                gateway,
                extra=about("conversations_unshared", gateway=gateway),
            )

    def _charge(self, told: Facts, old: Facts | None) -> None:
        classes = {(model.id, one.name) for model, one in self._policy().classes()}
        started = increases(None if old is None else old.started, told.started)
        for (model, name, key), tokens in started.items():
            if (model, name) in classes and key in self._keys:
                self._line.charge(model, name, key, tokens)
                self._on_change()  # one that fits may come before one that does not fit now

    def _note_reading(self, facts: Mapping[str, Facts]) -> None:
        backends, now = self._policy().backends, self._clock.now()
        until: dict[str, dict[str, float]] = {}
        for gateway, told in facts.items():
            for name in told.reading.keys() & backends.keys():
                until.setdefault(name, {})[gateway] = now + told.reading[name]
        self._line.note_reading(until)

    def _note_long_waiting(self, counts: Mapping[str, int]) -> None:
        if counts != self._long_waiting:
            self._long_waiting = counts
            self._line.note_long_waiting(counts)
            self._on_change()

    def _note_blocked(self, facts: Mapping[str, Facts]) -> None:
        found: dict[str, Blocked] = {}
        now, before = self._clock.now(), self._blocked_told
        told_at = {gateway: (told.blocked, now) for gateway, told in facts.items()}
        for gateway, (blocked, _) in told_at.items():
            if gateway in before and before[gateway][0] == blocked:
                told_at[gateway] = before[gateway]  # what waits has waited longer each time it is told
        self._blocked_told = told_at
        for blocked, since in told_at.values():
            for name, one in blocked.items() if now - since < BLOCKED_KNOWN_S else ():
                if name not in found or one.waited_s > found[name].waited_s:
                    found[name] = one
        self._line.note_blocked(found, now)
        claims = {name: one.claim for name, one in found.items()}
        if claims != self._blocked:
            self._blocked = claims
            self._on_change()


def _counts(facts: Facts, which: str) -> dict[str, int]:
    return {name: getattr(attempts, which) for name, attempts in facts.attempts.items()}
