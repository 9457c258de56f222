"""Learns from the token counts that backends report: a margin for exact counts, ratios for approximate ones.

Both are bounded, because callers influence what is learned. One answer changes a ratio by a few percent at
most, a ratio stays within 0.8..1.25, and the margin never exceeds 5 %. Larger systematic errors are drift
(core/drift.py): they are reported, not silently corrected.

What other gateways have learned is used too, with the same bounds, but kept separate, so that no answer is
counted twice.
"""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping

from gateway.core.class_counts import TextKind
from gateway.core.facts import Learned, Ratio, pooled

MARGIN_WINDOW = 200
"""Number of answers of which the margin is the 99th percentile. A choice: of far fewer, it would be the
maximum."""
RATIO_WINDOW = 200
"""Effective number of answers: older ones decay. A choice: a change of traffic is tracked within a few
hundred."""
RATIO_PRIOR = 20
"""Weight of the prior, in answers, that class counts are correct. A guess."""
RATIO_MIN, RATIO_MAX = 0.8, 1.25
"""Limits of a learned ratio. A choice: callers influence it, and larger errors are reported as drift."""
TEXT_TOKENS_MIN = 200
"""In shorter texts, the template dominates over the kind of text. A choice: more answers to learn from, or
better ones."""
STEP_MAX = 0.3
"""Maximum log ratio that a single answer contributes; thus also the maximum of their mean. A choice, a little
beyond `RATIO_MIN` and `RATIO_MAX`."""
_NOTHING = Ratio(0, 0.0)


class LearnedMargin:
    """How much longer prompts are than their exact counts: the 99th percentile, in tokens.

    A prompt that is shorter than its count counts as 0: the margin is for what must fit.

    Attributes:
        p99_tokens: From this process's own answers.
        elsewhere_tokens: The largest one of other gateways.
    """

    def __init__(self) -> None:
        self._errors: deque[int] = deque(maxlen=MARGIN_WINDOW)
        self._ranked: list[int] = []  # the same, sorted
        self.p99_tokens = 0
        self.elsewhere_tokens = 0

    @property
    def tokens(self) -> int:
        """The margin to add."""
        return max(self.p99_tokens, self.elsewhere_tokens)

    def observe(self, error_tokens: int) -> None:
        """Record the actual length of one prompt minus its count."""
        error, ranked = max(0, error_tokens), self._ranked
        if len(ranked) == MARGIN_WINDOW:
            del ranked[bisect_left(ranked, self._errors[0])]
        self._errors.append(error)
        insort(ranked, error)
        self.p99_tokens = ranked[-(-99 * len(ranked) // 100) - 1]


class LearnedRatios:
    """Actual over counted tokens per kind of text, for counts without a vocabulary.

    Attributes:
        seen: Learned from this process's own answers.
        elsewhere: Learned by other gateways.
    """

    def __init__(self) -> None:
        self.seen: dict[TextKind, Ratio] = {}
        self.elsewhere: Mapping[TextKind, Ratio] = {}

    def ratio(self, kind: TextKind) -> float:
        """Return the factor for class counts of this kind: 1.0 until something was learned."""
        seen = dict(self.seen)  # another thread may learn meanwhile
        known = pooled((Learned(seen), Learned(self.elsewhere))).ratios.get(kind, _NOTHING)
        shrunk = known.mean_log * known.answers / (known.answers + RATIO_PRIOR)
        return min(RATIO_MAX, max(RATIO_MIN, math.exp(shrunk)))

    def observe(self, kind: TextKind, counted_tokens: int, true_tokens: int) -> None:
        """Record one answer: the count before any ratio, and the actual tokens, both without the template."""
        if counted_tokens < TEXT_TOKENS_MIN or true_tokens <= 0:
            return
        before = self.seen.get(kind, _NOTHING)
        step = min(STEP_MAX, max(-STEP_MAX, math.log(true_tokens / counted_tokens)))
        answers = min(before.answers + 1, RATIO_WINDOW)
        self.seen[kind] = Ratio(answers, before.mean_log + (step - before.mean_log) / answers)
