"""Measures what it is worth to send a conversation back to where it was, in virtual time.

    python benchmarks/conversations.py
    python benchmarks/conversations.py --policy gateway --callers 300 --pause 60 --seeds 101-103

Agents talk to servers of one profile. Each turn sends everything that was said before and a little more, and
comes a while after the answer to the last one; a caller who is refused tries again a little later, with the
same. A conversation that has become too long is followed by another one.

`gateway` is the product's own code. `affinity 0` is the same with `prefix_affinity: 0`, and `least-in-flight`
sends to the server with the fewest requests. Each meets engines that keep what they have computed as long as
it fits (`core.prefix_cache`), and ones that keep nothing. What is changed is tuned on seeds 1-3.
"""

import argparse
import os
import random
import shlex
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, dataclass, replace
from itertools import count
from pathlib import Path
from statistics import fmean, quantiles

if not __package__:  # python benchmarks/conversations.py
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.routing import machine
from benchmarks.traffic import clipped, lognormal
from benchmarks.virtual_fleet import backend_of
from gateway.core.backends import Pool
from gateway.core.estimation import APPROXIMATE_BAND
from gateway.core.policy import Bound, Comparison, ModelPolicy, Policy, TrafficClass, Waiting, Weights, When
from gateway.core.prefix_cache import BLOCK_TOKENS
from gateway.core.profile import Profile
from gateway.core.request import CountMode, Endpoint, Estimate, Prefixes
from gateway.core.request_features import RequestFeatures
from gateway.core.virtual_fleet import Fate, Fleet, Patience, Router
from gateway.profiles import library
from gateway.replay.router import PolicyRouter

POLICIES = ("gateway", "affinity 0", "least-in-flight")
SYSTEM_TOKENS = 1_500
"""What all conversations begin with."""

FIRST_TOKENS, LAST_TOKENS = 2_000, 60_000
"""How long a conversation is at its first turn, and at most."""

ADDED_TOKENS, ANSWER_TOKENS, SIGMA = 1_200, 250, 0.7
"""Means of what a turn adds, the result of a tool or a question, and of an answer; log-normal."""

PAUSE_S = 5.0
"""Mean of the time between an answer and the next turn, if no other is asked for."""

RETRY_S = 5.0
"""How long a caller waits after a refusal."""

WARM_UP_S, DURATION_S = 300.0, 1_500.0
PATIENCE_S = 120.0


@dataclass(frozen=True, slots=True)
class Turn:
    """A request; see `core.virtual_fleet.Arriving`.

    Attributes:
        caller, conversation: Whose it is, and which of all conversations.
        seen_tokens: How much of the prompt the turn before had; 0 for the first turn.
        is_known: Whether engines know its blocks.
    """

    id: int
    at: float
    prompt_tokens: int
    output_tokens: int
    caller: int
    conversation: int
    seen_tokens: int
    is_known: bool
    seqs: int = 1

    @property
    def prefix_keys(self) -> Sequence[int]:
        """The shared beginning has the keys of conversation 0, the rest its own; an answer is read as new."""
        if not self.is_known:
            return ()
        shared, whole = SYSTEM_TOKENS // BLOCK_TOKENS, self.prompt_tokens // BLOCK_TOKENS
        own = self.conversation * LAST_TOKENS
        return [*range(shared), *range(own + shared, own + whole)]

    @property
    def prefixes(self) -> Prefixes:
        """The system prompt, the turn before, and all of it."""
        own = self.conversation * LAST_TOKENS
        parts = [(0, SYSTEM_TOKENS), (own + self.prompt_tokens, self.prompt_tokens)]
        if self.seen_tokens:
            parts.insert(1, (own + self.seen_tokens, self.seen_tokens))
        return tuple((key, tokens / self.prompt_tokens) for key, tokens in parts)


class Callers:
    """Agents that take turns: they say what arrives next, and when."""

    def __init__(self, callers: int, seed: int, *, is_known: bool, pause_s: float = PAUSE_S) -> None:
        self._dice = [random.Random(f"{seed} {number}") for number in range(callers)]
        self._ids, self._conversations = count(), count(1)
        self._is_known, self._pause_s = is_known, pause_s

    def first(self) -> list[Turn]:
        """Return the first turn of each, in order of arrival."""
        starts = sorted((dice.uniform(0, 60.0), caller) for caller, dice in enumerate(self._dice))
        return [self._begin(caller, at) for at, caller in starts]

    def next(self, fate: Fate[Turn], now: float) -> Turn | None:
        """Return what comes after a turn: the next one, or the same again; None at the end."""
        turn = fate.arrival
        dice = self._dice[turn.caller]
        is_over = fate.done_at is not None
        at = now + (dice.expovariate(1 / self._pause_s) if is_over else RETRY_S * dice.uniform(0.5, 1.5))
        if at >= DURATION_S:
            return None
        if not is_over:
            return replace(turn, id=next(self._ids), at=at)
        added = clipped(lognormal(dice, ADDED_TOKENS, SIGMA), 16, 20_000)
        prompt = turn.prompt_tokens + fate.output_tokens + added
        if prompt > LAST_TOKENS:
            return self._begin(turn.caller, at)
        return self._turn(turn.caller, at, prompt, turn.conversation, turn.prompt_tokens)

    def _begin(self, caller: int, at: float) -> Turn:
        return self._turn(caller, at, FIRST_TOKENS, next(self._conversations), 0)

    def _turn(self, caller: int, at: float, prompt: int, conversation: int, seen: int) -> Turn:
        answer = clipped(lognormal(self._dice[caller], ANSWER_TOKENS, SIGMA), 1, 4_000)
        return Turn(next(self._ids), at, prompt, answer, caller, conversation, seen, self._is_known)


def policy_of(profiles: Mapping[str, Profile], weights: Weights) -> Policy:
    """Return what an operator would configure for these servers."""
    backends = {name: backend_of(name, profile) for name, profile in profiles.items()}
    classes = (
        TrafficClass(
            "long_document",
            ("pool",),
            When(prompt_tokens=(Bound(Comparison.GE, 16_000),)),
            waiting=Waiting(max_wait_s=900, ttft_target_s=60, prefill_weight=1),
        ),
        TrafficClass("short_chat", ("pool",)),
    )
    pools = {"pool": Pool("pool", tuple(backends))}
    return Policy(models=(ModelPolicy("gemma", classes),), pools=pools, backends=backends, weights=weights)


class Gateway(PolicyRouter[Turn]):
    """The product's own code."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy, self._asked)

    def prefixes(self, arrival: Turn) -> Prefixes:
        """See `PolicyRouter`."""
        return arrival.prefixes

    @staticmethod
    def _asked(arrival: Turn) -> tuple[RequestFeatures, None]:
        tokens = arrival.prompt_tokens
        estimate = Estimate(tokens, round(tokens * (1 + APPROXIMATE_BAND)), CountMode.APPROXIMATE)
        return RequestFeatures("", estimate, 0, None, {}, "gemma", Endpoint.CHAT, stream=True), None


class LeastInFlight:
    """Sends to the server with the fewest requests."""

    def arrive(self, fleet: Fleet[Turn], arrival: Turn) -> None:
        """See `Router`."""
        fleet.send(arrival, min(fleet.boxes, key=lambda name: fleet.boxes[name].in_flight))

    def answered(self, fleet: Fleet[Turn], fate: Fate[Turn]) -> None:
        """Not of interest."""

    def ended(self, fleet: Fleet[Turn], fate: Fate[Turn]) -> None:
        """Not of interest."""

    def left(self, fleet: Fleet[Turn], fate: Fate[Turn]) -> None:
        """Cannot be: everything is sent at once."""

    def look(self, fleet: Fleet[Turn]) -> None:
        """Cannot be: nothing is asked for."""


@dataclass(slots=True)
class TakingTurns:
    """A policy whose callers come back."""

    policy: Router[Turn]
    callers: Callers

    def arrive(self, fleet: Fleet[Turn], arrival: Turn) -> None:
        """See `Router`."""
        self.policy.arrive(fleet, arrival)

    def answered(self, fleet: Fleet[Turn], fate: Fate[Turn]) -> None:
        """See `Router`."""
        self.policy.answered(fleet, fate)

    def ended(self, fleet: Fleet[Turn], fate: Fate[Turn]) -> None:
        """See `Router`."""
        self.policy.ended(fleet, fate)
        self.go_on(fleet, fate)

    def left(self, fleet: Fleet[Turn], fate: Fate[Turn]) -> None:
        """See `Router`."""
        self.policy.left(fleet, fate)
        self.go_on(fleet, fate)

    def look(self, fleet: Fleet[Turn]) -> None:
        """See `Router`."""
        self.policy.look(fleet)

    def go_on(self, fleet: Fleet[Turn], fate: Fate[Turn]) -> None:
        """Let the caller of a request that has ended come back."""
        turn = self.callers.next(fate, fleet.now)
        if turn is not None:
            fleet.add(turn)


class Conversations(Fleet[Turn]):
    """The fleet, in which callers who are refused come back, too."""

    def __init__(self, router: TakingTurns, profiles: Mapping[str, Profile]) -> None:
        super().__init__(router, router.callers.first(), profiles, lambda _: Patience(PATIENCE_S))
        self._turns = router

    def refuse(self, arrival: Turn, reason: str) -> None:
        """See `Fleet`."""
        super().refuse(arrival, reason)
        self._turns.go_on(self, self.fates[arrival.id])


@dataclass(frozen=True, slots=True)
class Score:
    """What one run measured: of requests that arrived after the warm-up, but `cached` is of the whole run.

    Attributes:
        answered: Answers per second.
        refused, left: Share of the requests that were refused, or whose caller left.
        ttft_p50_s, ttft_p90_s: Of those that had a first token.
        tpot_ms: Mean time per token after the first.
        cached: Share of the prompt tokens that engines found in their caches.
    """

    answered: float
    refused: float
    left: float
    ttft_p50_s: float
    ttft_p90_s: float
    tpot_ms: float
    cached: float


def run(
    policy: str,
    *,
    is_known: bool,
    callers: int,
    servers: int,
    profile: str,
    seed: int,
    pause_s: float = PAUSE_S,
) -> Score:
    """Return what one run of one policy measures."""
    profiles = {f"server-{number}": library.load(profile) for number in range(servers)}
    router: Router[Turn]
    match policy:
        case "gateway":
            router = Gateway(policy_of(profiles, Weights()))
        case "affinity 0":
            router = Gateway(policy_of(profiles, Weights(prefix_affinity=0)))
        case "least-in-flight":
            router = LeastInFlight()
        case _:
            raise ValueError(f"unknown policy {policy}; known: {', '.join(POLICIES)}")
    agents = Callers(callers, seed, is_known=is_known, pause_s=pause_s)
    fleet = Conversations(TakingTurns(router, agents), profiles)
    fleet.run()
    fates = [fate for fate in fleet.fates if fate.arrival.at >= WARM_UP_S]
    ttfts = quantiles([fate.ttft_s for fate in fates if fate.ttft_s is not None], n=100)
    done = [fate for fate in fates if fate.done_at is not None]
    engines = [box.engine for box in fleet.boxes.values()]
    return Score(
        answered=len(done) / (DURATION_S - WARM_UP_S),
        refused=fmean(bool(fate.refused) for fate in fates),
        left=fmean(fate.left for fate in fates),
        ttft_p50_s=ttfts[49],
        ttft_p90_s=ttfts[89],
        tpot_ms=1000 * fmean(fate.tpot_s for fate in done),
        cached=sum(engine.found_tokens for engine in engines)
        / max(1, sum(engine.queried_tokens for engine in engines)),
    )


def averaged(scores: Sequence[Score]) -> Score:
    """Return the means over seeds."""
    return Score(*(fmean(values) for values in zip(*map(astuple, scores), strict=True)))


def main() -> None:
    """Print the table, a line as soon as its seeds are done."""
    parser = argparse.ArgumentParser(description="What it is worth to keep conversations where they are.")
    parser.add_argument("--policy", default=",".join(POLICIES), help="one or more of the policies")
    parser.add_argument("--callers", default="50", help="one or more numbers of agents")
    parser.add_argument("--pause", type=float, default=PAUSE_S, help="mean seconds between turns")
    parser.add_argument("--servers", type=int, default=4)
    parser.add_argument("--profile", default="h100-tp2-push", help="the servers' profile")
    parser.add_argument("--seeds", default="101-105", help="a range, e.g. 101-105")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes to run them in")
    arguments = parser.parse_args()
    first, _, last = arguments.seeds.partition("-")
    seeds = range(int(first), int(last or first) + 1)
    print(f"{machine()}\n`{shlex.join(['python', 'benchmarks/conversations.py', *sys.argv[1:]])}`\n")
    print(f"{arguments.servers} x {arguments.profile}, {len(seeds)} seeds\n")
    head = ("callers", "engines keep", "policy", "answers/s", "refused", "left", "TTFT p50", "TTFT p90")
    print(f"| {' | '.join((*head, 'TPOT', 'prompt tokens found'))} |\n" + "|---" * 10 + "|", flush=True)
    with ProcessPoolExecutor(arguments.jobs) as workers:
        cases = [
            (callers, is_known, policy)
            for callers in map(int, arguments.callers.split(","))
            for is_known in (True, False)
            for policy in arguments.policy.split(",")
        ]
        waiting = [
            [
                workers.submit(
                    run,
                    policy,
                    is_known=is_known,
                    callers=callers,
                    servers=arguments.servers,
                    profile=arguments.profile,
                    seed=seed,
                    pause_s=arguments.pause,
                )
                for seed in seeds
            ]
            for callers, is_known, policy in cases
        ]
        for (callers, is_known, policy), futures in zip(cases, waiting, strict=True):
            found = averaged([future.result() for future in futures])
            keep = "what fits" if is_known else "nothing"
            print(
                f"| {callers} | {keep} | {policy} | {found.answered:.2f} | {found.refused:.1%} "
                f"| {found.left:.1%} | {found.ttft_p50_s:.2f} s | {found.ttft_p90_s:.2f} s "
                f"| {found.tpot_ms:.1f} ms | {found.cached:.0%} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
