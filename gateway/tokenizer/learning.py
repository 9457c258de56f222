"""What the backends' own counts teach: a margin for exact counts, ratios for approximate ones.

Both are bounded, because what is learned comes from callers. One answer moves a ratio by a few percent at
most, a kind's ratio stays within 0.8..1.25, and the margin never exceeds 5 %. A systematic error beyond
that is drift (core/drift.py): reported, not corrected in silence.
"""

import math
from collections import deque

from gateway.core.class_counts import TextKind

MARGIN_WINDOW = 200
RATIO_WINDOW = 200
"""Answers that count: older ones fade, so that a change of traffic is followed within a few hundred."""
RATIO_PRIOR = 20
"""Answers' worth of belief that class counts are right as they are. A guess."""
RATIO_MIN, RATIO_MAX = 0.8, 1.25
TEXT_TOKENS_MIN = 200
"""Shorter texts say more about the template than about how their kind is counted."""
_STEP_MAX = 0.3


class LearnedMargin:
    """The 99th percentile of how far off exact counts were, in tokens."""

    def __init__(self) -> None:
        self._errors: deque[int] = deque(maxlen=MARGIN_WINDOW)
        self.p99_tokens = 0

    def observe(self, error_tokens: int) -> None:
        """Note how far one count was off, either way."""
        self._errors.append(abs(error_tokens))
        ranked = sorted(self._errors)
        self.p99_tokens = ranked[math.ceil(0.99 * len(ranked)) - 1]


class LearnedRatios:
    """True over counted tokens, per kind of text, for counts that know no vocabulary."""

    def __init__(self) -> None:
        self._seen: dict[TextKind, tuple[int, float]] = {}

    def ratio(self, kind: TextKind) -> float:
        """Return what to multiply a class count of this kind by: 1.0 until answers say otherwise."""
        answers, mean_log = self._seen.get(kind, (0, 0.0))
        shrunk = mean_log * answers / (answers + RATIO_PRIOR)
        return min(RATIO_MAX, max(RATIO_MIN, math.exp(shrunk)))

    def observe(self, kind: TextKind, counted_tokens: int, true_tokens: int) -> None:
        """Note one answer: the count before any ratio, and the truth; both without the template's tokens."""
        if counted_tokens < TEXT_TOKENS_MIN or true_tokens <= 0:
            return
        answers, mean_log = self._seen.get(kind, (0, 0.0))
        step = min(_STEP_MAX, max(-_STEP_MAX, math.log(true_tokens / counted_tokens)))
        answers = min(answers + 1, RATIO_WINDOW)
        self._seen[kind] = (answers, mean_log + (step - mean_log) / answers)
