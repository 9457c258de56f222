"""Drift: does what backends report still agree with what the gateway estimates?

A count goes wrong as a whole, not here and there: another vocabulary, an edited chat template, another
image budget. So the median of the last answers tells, per backend, and a single odd prompt does not.
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
    is_plain,
)
from gateway.core.values import CountMode, Estimate, Prompt, TemplateCosts

WINDOW = 100
"""Answers per backend that are looked at."""
SAMPLES_MIN = 10
"""Fewer say nothing. A guess: enough that half of them wrong by chance is unlikely."""
EXACT_ALLOWANCE = 0.005


@dataclass(frozen=True, slots=True)
class Drift:
    """How a backend's `usage.prompt_tokens` compares with the gateway's estimates.

    Attributes:
        median_tokens: Median of actual minus estimate, over the last 100 text-only answers at most.
        drifted: Whether that is more than counting explains: 16 tokens + 0.5 % with a vocabulary, 16
            tokens + 10 % without.
        image_tokens: The image budget its answers point to, or None while too few had images.
        image_tokens_expected: The budget those requests were counted with, or None likewise.
    """

    median_tokens: float = 0.0
    drifted: bool = False
    image_tokens: int | None = None
    image_tokens_expected: int | None = None

    @property
    def image_drifted(self) -> bool:
        """Whether images take another budget than the configured one."""
        return self.image_tokens != self.image_tokens_expected


@dataclass(slots=True)
class _Seen:
    text: deque[tuple[int, Estimate]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    images: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=WINDOW))


class DriftTracker:
    """Remembers, per backend, how its last answers compared with their estimates. Not thread-safe."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def observe(
        self, backend_id: str, prompt: Prompt, costs: TemplateCosts, estimate: Estimate, actual_tokens: int
    ) -> None:
        """Note one answer. Those that cannot tell are left out: tools, audio, lists of prompts, bounds."""
        if estimate.mode is CountMode.BOUND or actual_tokens <= 0:
            return
        seen = self._seen.get(backend_id)
        if seen is None:
            seen = self._seen[backend_id] = _Seen()
        if is_plain(prompt):
            seen.text.append((actual_tokens, estimate))
            return
        images = sum(turn.images for turn in prompt.turns)
        if images and _only_images(prompt):
            expected = image_budget(prompt, costs)
            text_tokens = estimate.tokens - images * expected
            # A text may be off by its band: where that could hide an image, it says nothing of images.
            if estimate.mode is CountMode.EXACT or APPROXIMATE_BAND * text_tokens < 0.2 * images * expected:
                per_image = (actual_tokens - text_tokens) / images
                seen.images.append((expected, _budget(per_image, expected)))

    def drift(self, backend_id: str) -> Drift:
        """Return how a backend compares now."""
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
        """Return how every backend that has answered compares now, by id."""
        return {backend_id: self.drift(backend_id) for backend_id in self._seen}


def _allowance_tokens(estimate: Estimate) -> float:
    share = EXACT_ALLOWANCE if estimate.mode is CountMode.EXACT else APPROXIMATE_BAND
    return MARGIN_FLOOR_TOKENS + share * estimate.tokens


def _only_images(prompt: Prompt) -> bool:
    return not prompt.tools_json and not any(
        turn.audios or turn.tool_calls or turn.role == "tool" for turn in prompt.turns
    )


def _budget(per_image_tokens: float, expected: int) -> int:
    """Return the budget that an image of this many soft tokens was given.

    An image fills 67..100 % of its budget, whatever its size, and budgets double, so the smallest budget
    that holds it is the right one; the expected one is preferred where it holds it as well as any.
    """
    slack_tokens = 4  # what the text beside it may be off by
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
