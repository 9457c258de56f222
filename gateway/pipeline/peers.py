"""Exchange of facts with the other gateway processes that share the store.

Each process adopts from its peers what it could not observe itself, so that any number of gateways in front
of one fleet make the same decisions. Adopted facts are kept apart from first-hand ones and never passed on.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from gateway.core.admission import WHOLE
from gateway.core.facts import Facts, increases, least, pooled, summed
from gateway.core.health import PeerAttempts, PeerVerdict
from gateway.core.values import Policy
from gateway.core.waiting import WaitingLine
from gateway.pipeline.watch import BackendWatch
from gateway.ports import Clock, SharedHealth, SharedLearning


class Peers:
    """Collects the facts of this process, and applies those of its peers."""

    def __init__(
        self,
        *,
        fleet: SharedHealth,
        estimator: SharedLearning,
        line: WaitingLine,
        watch: BackendWatch,
        policy: Callable[[], Policy],
        keys: Collection[str],
        clock: Clock,
        on_waiting: Callable[[], None],
    ) -> None:
        """Wire up the sources and sinks of the facts.

        Args:
            fleet: Source of this process's health verdicts; receives those of peers.
            estimator: Source of learned statistics about prompt counting; receives those of peers.
            line: Source of started tokens and waiting long prompts; accounts for those of peers.
            watch: Source of knee shares; applies the lowest one of all peers.
            policy: Returns the current policy; facts about anything it does not contain are ignored.
            keys: Names of the API keys; empty if callers need none.
            clock: Source of times.
            on_waiting: Called when the number of long prompts waiting at peers has changed.
        """
        self._fleet, self._estimator, self._line, self._watch = fleet, estimator, line, watch
        self._policy, self._clock, self._on_waiting = policy, clock, on_waiting
        self._keys: frozenset[str | None] = frozenset(keys or (None,))
        self._known: Mapping[str, Facts] = {}
        self._long_waiting: Mapping[str, int] = {}

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
            knee_shares=self._watch.shares(),
        )

    def hear(self, facts: Mapping[str, Facts]) -> None:
        """Apply the facts of all live peers, by name."""
        before, self._known = self._known, dict(facts)
        self._line.note_peers(len(facts))
        for gateway, told in facts.items():
            old = before.get(gateway)
            self._hear_of_backends(gateway, told, old)
            self._charge(told, old)
        self._estimator.note_learned(pooled(told.learned for told in facts.values()))
        self._watch.note_shares(least(told.knee_shares for told in facts.values()))
        self._note_long_waiting(summed(told.long_waiting for told in facts.values()))

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
                "knee_shares": {name: share / WHOLE for name, share in told.knee_shares.items()},
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

    def _charge(self, told: Facts, old: Facts | None) -> None:
        classes = {
            (model.id, traffic_class.name)
            for model in self._policy().models
            for traffic_class in model.classes
        }
        started = increases(None if old is None else old.started, told.started)
        for (model, name, key), tokens in started.items():
            if (model, name) in classes and key in self._keys:
                self._line.charge(model, name, key, tokens)

    def _note_long_waiting(self, counts: Mapping[str, int]) -> None:
        if counts != self._long_waiting:
            self._long_waiting = counts
            self._line.note_long_waiting(counts)
            self._on_waiting()


def _counts(facts: Facts, which: str) -> dict[str, int]:
    return {name: getattr(attempts, which) for name, attempts in facts.attempts.items()}
