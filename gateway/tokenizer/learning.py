"""What the backends' own counts teach: a margin for exact counts, ratios for approximate ones.

Both are bounded, because what is learned comes from callers. One answer moves a ratio by a few percent at
most, a kind's ratio stays within 0.8..1.25, and the margin never exceeds 5 %. A systematic error beyond
that is drift (core/drift.py): reported, not corrected in silence.

What other gateways have learned is used beside it, under the same bounds, and kept apart, so that no answer
is ever counted twice.
"""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping

from gateway.core.class_counts import TextKind
from gateway.core.facts import Learned, Ratio, pooled

MARGIN_WINDOW = 200
RATIO_WINDOW = 200
"""Answers that count: older ones fade, so that a change of traffic is followed within a few hundred."""
RATIO_PRIOR = 20
"""Answers' worth of belief that class counts are right as they are. A guess."""
RATIO_MIN, RATIO_MAX = 0.8, 1.25
TEXT_TOKENS_MIN = 200
"""Shorter texts say more about the template than about how their kind is counted."""
STEP_MAX = 0.3
"""The most that one answer says, as a logarithm; and so the most that a mean of them can be."""
_NOTHING = Ratio(0, 0.0)


class LearnedMargin:
    """The 99th percentile of how far off exact counts were, in tokens.

    Attributes:
        p99_tokens: By this process's own answers.
        elsewhere_tokens: The same of other gateways, the largest of them.
    """

    def __init__(self) -> None:
        self._errors: deque[int] = deque(maxlen=MARGIN_WINDOW)
        self._ranked: list[int] = []  # the same, in order of size
        self.p99_tokens = 0
        self.elsewhere_tokens = 0

    @property
    def tokens(self) -> int:
        """What to allow for."""
        return max(self.p99_tokens, self.elsewhere_tokens)

    def observe(self, error_tokens: int) -> None:
        """Note how far one count was off, either way."""
        error, ranked = abs(error_tokens), self._ranked
        if len(ranked) == MARGIN_WINDOW:
            del ranked[bisect_left(ranked, self._errors[0])]
        self._errors.append(error)
        insort(ranked, error)
        self.p99_tokens = ranked[-(-99 * len(ranked) // 100) - 1]


class LearnedRatios:
    """True over counted tokens, per kind of text, for counts that know no vocabulary.

    Attributes:
        seen: What this process's own answers taught.
        elsewhere: What the answers of other gateways taught.
    """

    def __init__(self) -> None:
        self.seen: dict[TextKind, Ratio] = {}
        self.elsewhere: Mapping[TextKind, Ratio] = {}

    def ratio(self, kind: TextKind) -> float:
        """Return what to multiply a class count of this kind by: 1.0 until answers say otherwise."""
        known = pooled((Learned(self.seen), Learned(self.elsewhere))).ratios.get(kind, _NOTHING)
        shrunk = known.mean_log * known.answers / (known.answers + RATIO_PRIOR)
        return min(RATIO_MAX, max(RATIO_MIN, math.exp(shrunk)))

    def observe(self, kind: TextKind, counted_tokens: int, true_tokens: int) -> None:
        """Note one answer: the count before any ratio, and the truth; both without the template's tokens."""
        if counted_tokens < TEXT_TOKENS_MIN or true_tokens <= 0:
            return
        before = self.seen.get(kind, _NOTHING)
        step = min(STEP_MAX, max(-STEP_MAX, math.log(true_tokens / counted_tokens)))
        answers = min(before.answers + 1, RATIO_WINDOW)
        self.seen[kind] = Ratio(answers, before.mean_log + (step - before.mean_log) / answers)
