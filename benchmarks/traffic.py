"""Seeded traffic for the routing benchmark: what arrives when, how long it is, how long its caller waits."""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What a request really is; the gateway has to find out."""

    CHAT = "chat"
    LONG = "long"
    REASONING = "reasoning"


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of the outside world.

    Attributes:
        id: Its number.
        at: Seconds at which it arrives.
        kind: See `Kind`.
        prompt_tokens, output_tokens: Its true lengths.
        estimate_tokens: What the gateway takes the prompt for.
    """

    id: int
    at: float
    kind: Kind
    prompt_tokens: int
    output_tokens: int
    estimate_tokens: int

    @property
    def seqs(self) -> int:
        """Sequences it occupies: nobody asks for several answers."""
        return 1

    @property
    def prefix_keys(self) -> tuple[int, ...]:
        """None: no two have anything in common."""
        return ()


@dataclass(frozen=True, slots=True)
class Mix:
    """Requests per second at load 1.0, and whether they come in bursts."""

    chat_per_s: float
    long_per_s: float
    is_bursty: bool = False


MIXES = {
    "A": Mix(5.8, 0.023),  # chat: what two LIGHT make in a closed loop; long: what PUSH makes
    "B": Mix(9.3, 0.007),
    "C": Mix(2.9, 0.030),
    "Ab": Mix(5.8, 0.023, is_bursty=True),
}
REASONING_PER_S = 0.1
ESTIMATE_ERROR = 0.05
BURST_FACTOR, BURST_SHARE, BURST_PERIOD_S = 2.5, 0.25, 60.0


def arrivals(
    mix: Mix, load: float, seed: int, *, duration_s: float = 2400.0, reasoning_per_s: float = REASONING_PER_S
) -> list[Arrival]:
    """Return all requests of a run, in order. Each kind has its own dice, so that policies meet the same."""
    found: list[Arrival] = []
    spans = (
        list(_spans(random.Random(f"{seed} bursts"), duration_s)) if mix.is_bursty else [(duration_s, 1.0)]
    )
    for kind, per_s in (
        (Kind.CHAT, mix.chat_per_s * load),
        (Kind.LONG, mix.long_per_s * load),
        (Kind.REASONING, reasoning_per_s),
    ):
        dice = random.Random(f"{seed} {kind}")
        own = [(duration_s, 1.0)] if kind is Kind.REASONING else spans
        for at in _times(dice, per_s, own):
            prompt, output = _lengths(kind, dice)
            estimate = max(1, round(prompt * (1 + dice.gauss(0, ESTIMATE_ERROR))))
            found.append(Arrival(0, at, kind, prompt, output, estimate))
    found.sort(key=lambda one: one.at)
    return [
        Arrival(number, one.at, one.kind, one.prompt_tokens, one.output_tokens, one.estimate_tokens)
        for number, one in enumerate(found)
    ]


def _spans(dice: random.Random, duration_s: float) -> Iterator[tuple[float, float]]:
    """Yield (end, factor) of alternating quiet and busy spells of exponential length."""
    quiet = (1 - BURST_FACTOR * BURST_SHARE) / (1 - BURST_SHARE)
    now, is_busy = 0.0, False
    while now < duration_s:
        share = BURST_SHARE if is_busy else 1 - BURST_SHARE
        now += dice.expovariate(1 / (BURST_PERIOD_S * share))
        yield min(now, duration_s), BURST_FACTOR if is_busy else quiet
        is_busy = not is_busy


def _times(dice: random.Random, per_s: float, spans: list[tuple[float, float]]) -> Iterator[float]:
    now = 0.0
    for end, factor in spans:
        rate = per_s * factor
        at = now
        while rate > 0:
            at += dice.expovariate(rate)
            if at >= end:
                break
            yield at
        now = end


def _lengths(kind: Kind, dice: random.Random) -> tuple[int, int]:
    match kind:
        case Kind.CHAT:
            return clipped(lognormal(dice, 1024, 0.9), 16, 8000), clipped(lognormal(dice, 300, 0.7), 1, 8000)
        case Kind.LONG:
            low, high = math.log(16_384), math.log(200_000)
            return round(math.exp(dice.uniform(low, high))), clipped(lognormal(dice, 1024, 0.7), 1, 16_000)
        case Kind.REASONING:
            return clipped(lognormal(dice, 2048, 0.9), 16, 32_000), clipped(
                lognormal(dice, 4096, 0.7), 1, 32_000
            )


def lognormal(dice: random.Random, mean: float, sigma: float) -> float:
    """Return a length of a log-normal distribution with that mean."""
    return dice.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)


def clipped(value: float, least: int, most: int) -> int:
    """Return the whole number nearest to `value` in a range."""
    return max(least, min(most, round(value)))
