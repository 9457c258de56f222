"""The routing benchmark over HTTP, as a table: every case beside its virtual-time twin."""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from textwrap import fill

from benchmarks.http_fleet import Run, measure, most_seqs
from benchmarks.http_load import STREAM_INTERVAL
from benchmarks.routers import site
from benchmarks.scoring import HEAD, Score, averaged, quantile, row
from benchmarks.virtual_fleet import FLEET

CASES = (("A", 0.85), ("A", 1.0), ("A", 1.2), ("B", 1.0), ("C", 1.0))
SPEED = 4.0
DURATION_S = 1200.0

CHECK_HEAD = (
    "| mix, load | answered / refused / left | Retry-After s | broken | 400s | most held / knee | preempted "
    "| CPU: gateway / callers / busiest server / machine | waited for a core | arrivals late p99 "
    "| latest step |"
)


def notes(speed: float) -> str:
    """Return what has to be said before the figures."""
    events = ", ".join(f"{tokens} ({kind})" for kind, tokens in STREAM_INTERVAL.items())
    return fill(
        f"{speed:g} engine seconds per second of the clock{scheduling()}. The gateway is configured for a "
        f"fleet {speed:g} times as fast: the times of its profiles, max_wait_s, ttft_target_s, the prefill_s "
        f"of gates and spill, hang_s and the timeouts of an attempt are divided by {speed:g}. All figures "
        "are engine seconds, but for Retry-After and the latest step. Reasoning is a plain streamed request "
        "that waits up to an hour and whose caller never leaves; what still runs at the end counts neither "
        f"way. Tokens per event after the first: {events}.",
        110,
    )


def scheduling() -> str:
    """Return how this process and its children are scheduled, where that is not the usual way."""
    is_real_time = hasattr(os, "sched_getscheduler") and os.sched_getscheduler(0) in (
        os.SCHED_FIFO,
        os.SCHED_RR,
    )
    return ", real-time scheduling" if is_real_time else ""


def print_cases(
    cases: Iterable[tuple[str, float]],
    seeds: Sequence[int],
    *,
    duration_s: float,
    speed: float,
    twin: Callable[[str, float, int, float], Score],
) -> None:
    """Run the cases one after the other; print three lines for each, and what was checked at the end.

    `twin` returns what virtual time makes of (mix, load, seed, seconds).
    """
    print(notes(speed) + "\n")
    print(HEAD + "\n" + "|---" * (HEAD.count("|") - 1) + "|", flush=True)
    checks = []
    for mix, load in cases:
        runs = [measure(mix, load, seed, duration_s=duration_s, speed=speed) for seed in seeds]
        virtual = averaged([twin(mix, load, seed, duration_s) for seed in seeds])
        http = averaged([run.score for run in runs])
        doubts = sorted({doubt for run in runs for doubt in run.doubts()})
        if doubts:
            print(f"| {mix} {load:g} | **not to be believed**: {'; '.join(doubts)} |", flush=True)
        print(row(mix, load, "HTTP" if not doubts else "(HTTP)", http))
        print(row(mix, load, "virtual time", virtual))
        print(difference(mix, load, http, virtual), flush=True)
        checks.append(check_row(mix, load, runs))
    print("\n" + CHECK_HEAD + "\n" + "|---" * (CHECK_HEAD.count("|") - 1) + "|")
    print("\n".join(checks), flush=True)


def difference(mix: str, load: float, http: Score, virtual: Score) -> str:
    """Return the line of the table that says how far apart the two are."""
    gap = {one.name: getattr(http, one.name) - getattr(virtual, one.name) for one in fields(Score)}
    return (
        f"| {mix} {load:g} | difference | {gap['chat']:+.2f} / {gap['long']:+.2f} / {gap['reasoning']:+.2f} "
        f"| {gap['chat_60ms']:+.2f} | {100 * gap['refused']:+.1f} "
        f"| {gap['chat_ttft_p50_s']:+.1f} / {gap['chat_ttft_p99_s']:+.1f} | {1000 * gap['chat_tpot_s']:+.0f} "
        f"| {gap['long_ttft_p50_s']:+.0f} | {gap['tokens_per_s'] / virtual.tokens_per_s:+.1%} "
        f"| {gap['misfits']:+.0f} | {gap['above_cap']:+.0f} | {100 * gap['kv_max']:+.0f} |"
    )


def check_row(mix: str, load: float, runs: Sequence[Run]) -> str:
    """Return one line about what the runs of a case did besides: sums, and the worst of them."""
    policy = site()
    statuses = sum((run.heard.statuses for run in runs), Counter[str]())
    refused = sum(count for status, count in statuses.items() if status[0] in "45")
    retries = sorted({after for run in runs for after in run.heard.retry_after_s})
    held = ", ".join(
        f"{name} {max(run.engines[name].peak for run in runs)}/{most_seqs(policy, name)}" for name in FLEET
    )
    used = {
        name: max(run.meter.used.get(name, 0.0) for run in runs) for name in ("gateway", "callers", *FLEET)
    }
    waited = max((share for run in runs for share in run.meter.waited.values()), default=0.0)
    late_s = max(quantile(sorted(run.heard.lags_s), 0.99) * run.speed for run in runs)
    step_s = max(engine.lag_peak_s for run in runs for engine in run.engines.values())
    after = f"{retries[0]:g} to {retries[-1]:g}" if retries else "none"
    return (
        f"| {mix} {load:g} | {statuses['200']} / {refused} / {statuses['left']} | {after} "
        f"| {sum(len(run.heard.flaws) for run in runs)} "
        f"| {sum(engine.rejected_4xx for run in runs for engine in run.engines.values())} | {held} "
        f"| {sum(engine.preemptions for run in runs for engine in run.engines.values())} "
        f"| {used['gateway']:.0%} / {used['callers']:.0%} / {max(used[name] for name in FLEET):.0%} "
        f"/ {max(run.meter.machine for run in runs):.0%} "
        f"| {waited:.1%} | {late_s:.2f} s | {1000 * step_s:.0f} ms |"
    )
