"""How long it takes until a backend has prefilled its long prompts, and those that wait for it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gateway.core.load import Load
from gateway.core.waiting.drain import Drain

LEFT_MIN = 0.1
"""The part of a prefill that is left at least, however long it has taken. A choice: it has not ended yet."""

KNOWN_S = 10.0
"""How many seconds of prefill as predicted are assumed before the first is timed. A choice: one short prompt
that was held up does not change the forecasts for long ones much."""

KEPT = 0.8
"""What earlier prefills count for, each time another one is timed. A choice: about the last five count."""


@dataclass(slots=True)
class Prefills:
    """The long prompts of one backend: those that hold its gate until their first token.

    Attributes:
        begun: Those that were sent from here and have not ended, in this order: when, in monotonic seconds,
            and how long they were predicted to take. Of some, no first token is seen before the end.
        elsewhere: Per other process that has sent some, when it expects the latest of them to be read.
        drain: The rate at which they leave room for others; those that have been read count, too.
        read_at: When the latest first token was seen.
        took_s, predicted_s: How long the latest took, and was predicted to take, each with its weight.
    """

    begun: dict[str, tuple[float, float]] = field(default_factory=dict)
    elsewhere: Mapping[str, float] = field(default_factory=dict)
    drain: Drain = field(default_factory=Drain)
    read_at: float = 0.0
    took_s: float = KNOWN_S
    predicted_s: float = KNOWN_S

    @property
    def factor(self) -> float:
        """Time that prefills take, compared with what is predicted for an idle backend."""
        return self.took_s / self.predicted_s

    def begin(self, ticket_id: str, claim: Load, now: float) -> None:
        """Note that a long prompt is sent."""
        self.begun.pop(ticket_id, None)
        self.begun[ticket_id] = now, claim.prefill_ms / 1000

    def end(self, ticket_id: str) -> None:
        """Note that a prompt need not be read any longer."""
        self.begun.pop(ticket_id, None)

    def read(self, ticket_id: str, now: float) -> None:
        """Note the first token of a prompt, and learn from it."""
        begun = self.begun.pop(ticket_id, None)
        if begun is not None:
            began_at, predicted_s = begun
            self.took_s = KEPT * self.took_s + self._taken_s(began_at, now)
            self.predicted_s = KEPT * self.predicted_s + predicted_s
            self.read_at = now

    def left_s(self, load: Load, now: float) -> float:
        """Return how long it will take until one more of them is read: of those sent from here, the first.

        `load`: what the ledger counts. Of those known, the ones that have most left have not been read.
        """
        own = self.own_s(now)
        elsewhere = [max(0.0, until - now) for until in self.elsewhere.values()]
        unread = sorted([*own, *elsewhere], reverse=True)[: load.long_unanswered]
        if not unread:
            return self.factor * load.prefill_ms / 1000
        return next((left_s for left_s in own if left_s >= unread[-1]), unread[-1])

    def own_s(self, now: float) -> Sequence[float]:
        """Return how long each of those that were sent from here will still take, as they were sent."""
        found = []
        for began_at, predicted_s in self.begun.values():
            all_s = self.factor * predicted_s
            found.append(max(LEFT_MIN * all_s, all_s - self._taken_s(began_at, now)))
        return found

    def _taken_s(self, began_at: float, now: float) -> float:
        """Return for how long a prompt has been read: one after another, where several may be sent."""
        return now - max(began_at, self.read_at)


def level(amounts: Sequence[float], more: float) -> float:
    """Return the level to which `more` fills up the lowest of these amounts, like water; 0 without any.

    Amounts are how long each backend is busy, and `more` is work for any of them: one is free at that level.
    """
    total, found = more, 0.0
    for number, amount in enumerate(sorted(amounts), 1):
        if number > 1 and found <= amount:
            break
        total += amount
        found = total / number
    return found
