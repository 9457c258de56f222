"""Compares what routing policies are worth, in virtual time. docs/routing.md explains the table.

    python benchmarks/routing.py                                      every case, every policy, seeds 101-105
    python benchmarks/routing.py --mix A --load 1.0 --seeds 1-3 --policy gateway,ctx-429

Policy `gateway` is the product's own code; `gateway-40` the same with 40 instead of 64 chats per LIGHT
server. Whatever changes here is tuned on seeds 1-3, and reported on seeds that nobody has tuned on.
"""

import argparse
import os
import platform
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.routers import (
    GatewayRouter,
    GroupRouter,
    context_429,
    context_least,
    least_in_flight,
    round_robin,
    site,
)
from benchmarks.traffic import MIXES, Kind, arrivals
from benchmarks.virtual_fleet import Fate, Fleet, Router, fleet_profiles

WARM_UP_S = 120.0
DURATION_S = 2400.0
POLICIES = ("gateway", "ctx-429", "ctx-least", "least-in-flight", "round-robin")
CASES = (
    ("A", 0.85, POLICIES),
    ("A", 1.0, (*POLICIES, "gateway-40")),
    ("A", 1.2, POLICIES),
    ("A", 1.5, POLICIES),
    ("Ab", 0.85, POLICIES),
    ("B", 1.0, POLICIES),
    ("C", 1.0, POLICIES),
)


@dataclass(frozen=True, slots=True)
class Score:
    """What one run measured, of requests that arrived after the warm-up.

    Attributes:
        chat, long, reasoning: Goodput: share of those offered that finished inside their objective.
        chat_60ms: The same for chat with at most 60 ms per output token.
        refused: Share of chats that were turned away.
        chat_ttft_p50_s, chat_ttft_p99_s: Of chats that had a first token.
        chat_tpot_s: Mean, of chats that finished.
        long_ttft_p50_s, long_tpot_s: The same for documents.
        tokens_per_s: Output tokens of the whole fleet.
        misfits: Requests sent where window or KV could never hold them.
        above_cap: Times a server held more than the policy's cap; 0 where it has none.
        kv_max: Highest share of a KV pool in use.
        seconds: Real time the run took.
    """

    chat: float
    long: float
    reasoning: float
    chat_60ms: float
    refused: float
    chat_ttft_p50_s: float
    chat_ttft_p99_s: float
    chat_tpot_s: float
    long_ttft_p50_s: float
    long_tpot_s: float
    tokens_per_s: float
    misfits: float
    above_cap: float
    kv_max: float
    seconds: float


def router(policy: str) -> Router:
    """Return a policy by name."""
    match policy:
        case "gateway":
            return GatewayRouter(site())
        case "gateway-40":
            return GatewayRouter(site(knee_seqs=40))
        case "ctx-429":
            return GroupRouter(context_429)
        case "ctx-least":
            return GroupRouter(context_least)
        case "least-in-flight":
            return GroupRouter(least_in_flight)
        case "round-robin":
            return GroupRouter(round_robin())
    raise ValueError(f"unknown policy {policy}; known: {', '.join(POLICIES)}, gateway-40")


def run(
    mix: str, load: float, seed: int, policy: str, duration_s: float = DURATION_S, *, reasoning: bool = True
) -> Score:
    """Return what one run of one policy measures."""
    began = time.perf_counter()
    rate = {} if reasoning else {"reasoning_per_s": 0.0}
    chosen = router(policy)
    fleet = Fleet(
        chosen, arrivals(MIXES[mix], load, seed, duration_s=duration_s, **rate), WARM_UP_S, duration_s
    )
    fleet.run()
    counted = [fate for fate in fleet.fates if fate.arrival.at >= WARM_UP_S]
    chats = [fate for fate in counted if fate.arrival.kind is Kind.CHAT]
    documents = [fate for fate in counted if fate.arrival.kind is Kind.LONG]
    jobs = [fate for fate in counted if fate.arrival.kind is Kind.REASONING]
    ttfts = sorted(fate.ttft_s for fate in chats if fate.ttft_s is not None)
    boxes = fleet.boxes.values()
    return Score(
        chat=mean([is_good(fate) for fate in chats]),
        long=mean([is_good(fate) for fate in documents]),
        reasoning=mean([is_good(fate) for fate in jobs]),
        chat_60ms=mean([is_good(fate) and fate.tpot_s <= 0.06 for fate in chats]),
        refused=mean([bool(fate.refused) for fate in chats]),
        chat_ttft_p50_s=quantile(ttfts, 0.5),
        chat_ttft_p99_s=quantile(ttfts, 0.99),
        chat_tpot_s=mean([fate.tpot_s for fate in chats if fate.done_at is not None]),
        long_ttft_p50_s=quantile(sorted(fate.ttft_s for fate in documents if fate.ttft_s is not None), 0.5),
        long_tpot_s=mean([fate.tpot_s for fate in documents if fate.done_at is not None]),
        tokens_per_s=sum(box.tokens for box in boxes) / (duration_s - WARM_UP_S),
        misfits=sum(box.misfits for box in boxes),
        above_cap=chosen.above_cap,
        kv_max=max(box.kv_usage_max for box in boxes),
        seconds=time.perf_counter() - began,
    )


def is_good(fate: Fate) -> bool:
    """Return whether a request finished inside its objective."""
    if fate.done_at is None or fate.ttft_s is None:
        return False
    match fate.arrival.kind:
        case Kind.CHAT:
            return fate.ttft_s <= 2 and fate.tpot_s <= 0.2
        case Kind.LONG:
            push = PROFILES["push"]
            unloaded_s = push.perf.prefill_s(fate.arrival.prompt_tokens, push.flags.max_num_batched_tokens)
            return fate.ttft_s <= 60 + unloaded_s
        case Kind.REASONING:
            return fate.done_at - fate.arrival.at <= 3600


PROFILES = fleet_profiles()


def mean(values: Sequence[float]) -> float:
    """Return the arithmetic mean; 0 of nothing."""
    return fmean(values) if values else 0.0


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the value that `share` of an ascending list lies below; 0 of nothing."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def averaged(scores: Sequence[Score]) -> Score:
    """Return the means over several seeds."""
    return Score(**{one.name: fmean(getattr(score, one.name) for score in scores) for one in fields(Score)})


HEAD = (
    "| mix, load | policy | chat / long / reasoning | chat, TPOT <= 60 ms | refused | chat TTFT p50 / p99 s "
    "| chat TPOT ms | long TTFT p50 s | tokens/s | misfits | above cap | KV max |"
)


def row(mix: str, load: float, policy: str, score: Score) -> str:
    """Return one line of the table."""
    return (
        f"| {mix} {load:g} | {policy} | {score.chat:.2f} / {score.long:.2f} / {score.reasoning:.2f} "
        f"| {score.chat_60ms:.2f} | {score.refused:.1%} "
        f"| {score.chat_ttft_p50_s:.1f} / {score.chat_ttft_p99_s:.1f} | {1000 * score.chat_tpot_s:.0f} "
        f"| {score.long_ttft_p50_s:.0f} | {score.tokens_per_s:.0f} | {score.misfits:.0f} "
        f"| {score.above_cap:.0f} | {score.kv_max:.0%} |"
    )


def main() -> None:
    """Run the cases asked for and print the table, a line as soon as its seeds are done."""
    arguments = parsed()
    first, _, last = arguments.seeds.partition("-")
    seeds = range(int(first), int(last or first) + 1)
    print(f"{machine()}\n`{shlex.join(['python', 'benchmarks/routing.py', *sys.argv[1:]])}`\n")
    print(HEAD + "\n" + "|---" * (HEAD.count("|") - 1) + "|", flush=True)
    began = time.perf_counter()
    spent = 0.0
    with ProcessPoolExecutor(arguments.jobs) as workers:
        waiting = [
            (
                mix,
                load,
                policy,
                [workers.submit(run, mix, load, seed, policy, arguments.duration) for seed in seeds],
            )
            for mix, load, policy in cases(arguments)
        ]
        for mix, load, policy, futures in waiting:
            score = averaged([future.result() for future in futures])
            spent += score.seconds * len(seeds)
            print(row(mix, load, policy, score), flush=True)
    runs = len(waiting) * len(seeds)
    print(f"\n{runs} runs, {spent / runs:.1f} s each, {time.perf_counter() - began:.0f} s in all")


def parsed() -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(description="What routing policies are worth, in virtual time.")
    parser.add_argument("--mix", help=f"one or more of {','.join(MIXES)}")
    parser.add_argument("--load", help="one or more loads; 1.0 is what the fleet makes in a closed loop")
    parser.add_argument("--policy", help=f"one or more of {','.join(POLICIES)},gateway-40")
    parser.add_argument("--seeds", default="101-105", help="a range, e.g. 101-105")
    parser.add_argument("--duration", type=float, default=DURATION_S, help="seconds of arrivals")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes to run them in")
    return parser.parse_args()


def cases(arguments: argparse.Namespace) -> Iterator[tuple[str, float, str]]:
    """Yield the (mix, load, policy) asked for; where nothing is said, those of `CASES`."""
    if arguments.mix is None and arguments.load is None:
        for mix, load, policies in CASES:
            for policy in policies:
                if arguments.policy is None or policy in arguments.policy.split(","):
                    yield mix, load, policy
        return
    for mix in (arguments.mix or "A").split(","):
        for wanted in (arguments.load or "1.0").split(","):
            for policy in (arguments.policy or ",".join(POLICIES)).split(","):
                yield mix, float(wanted), policy


def machine() -> str:
    """Return what this runs on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    processor = names[0] if names else platform.machine()
    return f"{processor}, {os.cpu_count()} cores, Python {platform.python_version()}"


if __name__ == "__main__":
    main()
