"""Compares what routing policies are worth, in virtual time. docs/routing.md explains the table.

    python benchmarks/routing.py                                      every case, every policy, seeds 101-105
    python benchmarks/routing.py --mix A --load 1.0 --seeds 1-3 --policy gateway,ctx-429
    python benchmarks/routing.py --http --mix A --load 1.0 --seeds 101-102     the gateway as a process
    python benchmarks/routing.py --forecasts --mix A,C --load 1.0              how long who waits is told to

Policy `gateway` is the product's own code; `gateway-40` the same with 40 instead of 64 chats per LIGHT
server; `gateway-told` the same for callers who state `max_tokens`, with which `--http` is compared.
http_fleet.py says how that is scaled, http_load.py who calls. Whatever changes here is tuned on seeds
1-3, and reported on seeds that nobody has tuned on.
"""

import argparse
import os
import platform
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from pathlib import Path
from statistics import quantiles

if not __package__:  # python benchmarks/routing.py
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import http_table
from benchmarks.routers import (
    GatewayRouter,
    GroupRouter,
    context_429,
    context_least,
    least_in_flight,
    round_robin,
    site,
)
from benchmarks.scoring import HEAD, WARM_UP_S, Score, averaged, row, score
from benchmarks.traffic import MIXES, arrivals
from benchmarks.virtual_fleet import Router, fleet_of
from gateway.core.estimation import APPROXIMATE_BAND

DURATION_S = 2400.0
POLICIES = ("gateway", "ctx-429", "ctx-least", "least-in-flight", "round-robin")
FORECASTS_HEAD = "| mix | load | class | waited | times the forecast p10 | p50 | p90 |"
WAITED_MIN_S = 0.5  # who waited less needed no forecast
CASES = (
    ("A", 0.85, POLICIES),
    ("A", 1.0, (*POLICIES, "gateway-40")),
    ("A", 1.2, POLICIES),
    ("A", 1.5, POLICIES),
    ("Ab", 0.85, POLICIES),
    ("B", 1.0, POLICIES),
    ("C", 1.0, POLICIES),
)


def router(policy: str) -> Router:
    """Return a policy by name."""
    match policy:
        case "gateway":
            return GatewayRouter(site())
        case "gateway-40":
            return GatewayRouter(site(knee_seqs=40))
        case "gateway-told":
            return GatewayRouter(site(), band=APPROXIMATE_BAND, is_told_output=True)
        case "ctx-429":
            return GroupRouter(context_429)
        case "ctx-least":
            return GroupRouter(context_least)
        case "least-in-flight":
            return GroupRouter(least_in_flight)
        case "round-robin":
            return GroupRouter(round_robin())
    raise ValueError(f"unknown policy {policy}; known: {', '.join(POLICIES)}, gateway-40, gateway-told")


def run(
    mix: str, load: float, seed: int, policy: str, duration_s: float = DURATION_S, *, reasoning: bool = True
) -> Score:
    """Return what one run of one policy measures."""
    began = time.perf_counter()
    rate = {} if reasoning else {"reasoning_per_s": 0.0}
    chosen = router(policy)
    fleet = fleet_of(
        chosen, arrivals(MIXES[mix], load, seed, duration_s=duration_s, **rate), WARM_UP_S, duration_s
    )
    fleet.run()
    boxes = fleet.boxes.values()
    return score(
        fleet.fates,
        tokens_per_s=sum(box.tokens for box in boxes) / (duration_s - WARM_UP_S),
        misfits=sum(fate.refused == "400" for fate in fleet.fates),
        above_cap=chosen.above_cap,
        kv_max=max(box.kv_usage_max for box in boxes),
        seconds=time.perf_counter() - began,
    )


def main() -> None:
    """Run the cases asked for and print the table, a line as soon as its seeds are done."""
    arguments = parsed()
    first, _, last = arguments.seeds.partition("-")
    seeds = range(int(first), int(last or first) + 1)
    print(f"{machine()}\n`{shlex.join(['python', 'benchmarks/routing.py', *sys.argv[1:]])}`\n")
    if arguments.http:
        over_http(arguments, seeds)
        return
    duration_s = arguments.duration or DURATION_S
    if arguments.forecasts:
        print_forecasts(arguments, seeds, duration_s)
        return
    print(HEAD + "\n" + "|---" * (HEAD.count("|") - 1) + "|", flush=True)
    began = time.perf_counter()
    spent = 0.0
    with ProcessPoolExecutor(arguments.jobs) as workers:
        waiting = [
            (
                mix,
                load,
                policy,
                [workers.submit(run, mix, load, seed, policy, duration_s) for seed in seeds],
            )
            for mix, load, policy in cases(arguments)
        ]
        for mix, load, policy, futures in waiting:
            score = averaged([future.result() for future in futures])
            spent += score.seconds * len(seeds)
            print(row(mix, load, policy, score), flush=True)
    runs = len(waiting) * len(seeds)
    print(f"\n{runs} runs, {spent / runs:.1f} s each, {time.perf_counter() - began:.0f} s in all")


def forecasts(mix: str, load: float, seed: int, duration_s: float) -> Mapping[str, Sequence[float]]:
    """Return how long requests waited, compared with what was forecast, by class."""
    chosen = GatewayRouter(site())
    fleet = fleet_of(chosen, arrivals(MIXES[mix], load, seed, duration_s=duration_s), WARM_UP_S, duration_s)
    fleet.run()
    found: dict[str, list[float]] = {}
    for fate in fleet.fates:
        expected_s = chosen.expected_s.get(fate.arrival.id)
        waited_s = 0.0 if fate.sent_at is None else fate.sent_at - fate.arrival.at
        if expected_s and waited_s >= WAITED_MIN_S:
            found.setdefault(chosen.classes[fate.arrival.id], []).append(waited_s / expected_s)
    return found


def print_forecasts(arguments: argparse.Namespace, seeds: range, duration_s: float) -> None:
    """Print how long requests waited, compared with what was forecast."""
    print(FORECASTS_HEAD + "\n" + "|---" * (FORECASTS_HEAD.count("|") - 1) + "|", flush=True)
    with ProcessPoolExecutor(arguments.jobs) as workers:
        for mix, load in dict.fromkeys((mix, load) for mix, load, _ in cases(arguments)):
            runs = workers.map(forecasts, repeat(mix), repeat(load), seeds, repeat(duration_s))
            found: dict[str, list[float]] = {}
            for one in runs:
                for name, times in one.items():
                    found.setdefault(name, []).extend(times)
            for name, times in sorted(found.items()):
                if len(times) > 1:
                    tenths = quantiles(times, n=10, method="inclusive")
                    shown = " | ".join(f"{tenths[at]:.2f}" for at in (0, 4, 8))
                    print(f"| {mix} | {load:g} | {name} | {len(times):,} | {shown} |", flush=True)


def over_http(arguments: argparse.Namespace, seeds: range) -> None:
    """Run the cases asked for through sockets and print them beside their virtual-time twins."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no process is left behind
    asked = arguments.mix or arguments.load
    http_table.print_cases(
        [(mix, load) for mix, load, policy in cases(arguments) if policy == "gateway"]
        if asked
        else http_table.CASES,
        seeds,
        duration_s=arguments.duration or http_table.DURATION_S,
        speed=arguments.speed,
        twin=lambda mix, load, seed, duration_s: run(mix, load, seed, "gateway-told", duration_s),
    )


def parsed() -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(description="What routing policies are worth, in virtual time.")
    parser.add_argument("--mix", help=f"one or more of {','.join(MIXES)}")
    parser.add_argument("--load", help="one or more loads; 1.0 is what the fleet makes in a closed loop")
    parser.add_argument("--policy", help=f"one or more of {','.join(POLICIES)},gateway-40")
    parser.add_argument("--seeds", default="101-105", help="a range, e.g. 101-105")
    parser.add_argument("--duration", type=float, help="engine seconds of arrivals")
    parser.add_argument("--http", action="store_true", help="the gateway as a process, over sockets")
    parser.add_argument("--forecasts", action="store_true", help="waits, compared with what was forecast")
    parser.add_argument(
        "--speed", type=float, default=http_table.SPEED, help="with --http: how time is scaled"
    )
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
