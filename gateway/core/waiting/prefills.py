"""How long it takes until a backend has prefilled its long prompts, and those that wait for it."""

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.core.values import Load

TIMED_PREFILL_S = 1.0
"""Longer prefills are timed. A choice: who waits for a shorter one needs no better forecast."""

LEFT_MIN = 0.1
"""The part of a prefill that is left at least, however long it has taken. A choice: it has not ended yet."""

KNOWN_S = 10.0
"""How many seconds of prefill as predicted are assumed before the first is timed. A choice: one short prompt
that was held up does not change the forecasts for long ones much."""

KEPT = 0.8
"""What earlier prefills count for, each time another one is timed. A choice: about the last five count."""


@dataclass(slots=True)
class Prefills:
    """The prefills of one backend.

    Attributes:
        began_at: When the last long one began, in monotonic seconds; None before the first.
        took_s, predicted_s: How long the latest took, and was predicted to take, each with its weight.
    """

    began_at: float | None = None
    took_s: float = KNOWN_S
    predicted_s: float = KNOWN_S

    @property
    def factor(self) -> float:
        """Time that prefills take, compared with what is predicted for an idle backend."""
        return self.took_s / self.predicted_s

    def learn(self, load: Load, took_s: float) -> None:
        """Note that a prompt took so long; `load`: what was outstanding until then, itself included."""
        self.took_s = KEPT * self.took_s + took_s
        self.predicted_s = KEPT * self.predicted_s + load.prefill_ms / 1000

    def left_s(self, load: Load, now: float) -> float:
        """Return how long what is outstanding will still take."""
        all_s = self.factor * load.prefill_ms / 1000
        since = now if self.began_at is None else self.began_at
        return max(LEFT_MIN * all_s, all_s - (now - since))


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
