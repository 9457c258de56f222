"""Drift: do backends' reported token counts still agree with the gateway's estimates?

Counts go wrong systematically: another vocabulary, an edited chat template, a different image budget. So the
median of the latest answers is checked, per backend, to which a single odd prompt makes no difference.
"""

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from gateway.core.estimation import (
    APPROXIMATE_BAND,
    IMAGE_BUDGETS,
    MARGIN_FLOOR_TOKENS,
    image_budget,
)
from gateway.core.policy import TemplateCosts
from gateway.core.request import CountMode, Estimate, Prompt
from gateway.core.value import valueclass

WINDOW = 100
"""Number of answers per backend that are considered. A choice: a new template shows within as many."""

SAMPLES_MIN = 10
"""Minimum number of answers. A guess: enough that half of them are unlikely to be wrong by chance."""

EXACT_ALLOWANCE = 0.005
"""Share of an exact count by which the median answer may be off. A choice: five times
`estimation.EXACT_MARGIN`."""


@valueclass(frozen=True, slots=True)
class Drift:
    """The difference between a backend's `usage.prompt_tokens` and the gateway's estimates.

    Attributes:
        median_tokens: Median of actual minus estimate, over at most the last 100 text-only answers.
        drifted: Whether that exceeds the error of counting: 16 tokens + 0.5 % with a vocabulary, 16
            tokens + 10 % without.
        image_tokens: The image budget implied by its answers; None if too few had images.
        image_tokens_expected: The budget with which those requests were counted; None likewise.
    """

    median_tokens: float = 0.0
    drifted: bool = False
    image_tokens: int | None = None
    image_tokens_expected: int | None = None

    @property
    def image_drifted(self) -> bool:
        """Whether images use a budget other than the configured one."""
        return self.image_tokens != self.image_tokens_expected


@dataclass(slots=True)
class _Seen:
    text: deque[tuple[int, Estimate]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    images: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=WINDOW))


class DriftTracker:
    """Remembers the latest differences per backend. Not thread-safe."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def observe(
        self,
        backend_id: str,
        prompt: Prompt,
        costs: TemplateCosts,
        estimate: Estimate,
        actual_tokens: int,
        *,
        is_plain: bool,
    ) -> None:
        """Record an answer. Inconclusive ones are ignored: with tools, audio, lists of prompts, bounds.

        `is_plain`: the result of `estimation.is_plain` for the prompt.
        """
        if estimate.mode is CountMode.BOUND or actual_tokens <= 0:
            return
        seen = self._seen.get(backend_id)
        if seen is None:
            seen = self._seen[backend_id] = _Seen()
        if is_plain:
            seen.text.append((actual_tokens, estimate))
            return
        images = sum(turn.images for turn in prompt.turns)
        if images and _only_images(prompt):
            expected = image_budget(prompt, costs)
            text_tokens = estimate.tokens - images * expected
            # If the error band of the text could hide an image, the answer says nothing about images.
            if estimate.mode is CountMode.EXACT or APPROXIMATE_BAND * text_tokens < 0.2 * images * expected:
                per_image = (actual_tokens - text_tokens) / images
                seen.images.append((expected, _budget(per_image, expected)))

    def forget(self, backend_id: str) -> None:
        """Discard the answers of a backend that has left, or is another server now."""
        self._seen.pop(backend_id, None)

    def drift(self, backend_id: str) -> Drift:
        """Return the current drift of a backend."""
        seen = self._seen.get(backend_id, _Seen())
        image_tokens, expected = _image_verdict(seen.images)
        if not seen.text:
            return Drift(image_tokens=image_tokens, image_tokens_expected=expected)
        excess = median(
            (actual - estimate.tokens) / _allowance_tokens(estimate) for actual, estimate in seen.text
        )
        return Drift(
            median_tokens=median(actual - estimate.tokens for actual, estimate in seen.text),
            drifted=len(seen.text) >= SAMPLES_MIN and abs(excess) > 1,
            image_tokens=image_tokens,
            image_tokens_expected=expected,
        )

    def drifts(self) -> Mapping[str, Drift]:
        """Return the current drift of all backends that have answered, by id."""
        return {backend_id: self.drift(backend_id) for backend_id in self._seen}


def _allowance_tokens(estimate: Estimate) -> float:
    share = EXACT_ALLOWANCE if estimate.mode is CountMode.EXACT else APPROXIMATE_BAND
    return MARGIN_FLOOR_TOKENS + share * estimate.tokens


def _only_images(prompt: Prompt) -> bool:
    return not prompt.tools_json and not any(
        turn.audios or turn.tool_calls or turn.role == "tool" for turn in prompt.turns
    )


def _budget(per_image_tokens: float, expected: int) -> int:
    """Return the budget of an image with this many soft tokens.

    An image fills 67..100 % of its budget, whatever its size, and budgets double, so it is the smallest
    budget that holds it; the expected one is preferred if it fits as well.
    """
    slack_tokens = 4  # possible error of the text beside it
    if expected * 0.6 <= per_image_tokens <= expected + slack_tokens:
        return expected
    return next(
        (budget for budget in IMAGE_BUDGETS if per_image_tokens <= budget + slack_tokens), IMAGE_BUDGETS[-1]
    )


def _image_verdict(images: deque[tuple[int, int]]) -> tuple[int | None, int | None]:
    if len(images) < SAMPLES_MIN:
        return None, None
    expected, found = Counter(images).most_common(1)[0][0]
    return found, expected
