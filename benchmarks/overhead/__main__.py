"""Measures what it costs to be in the middle. docs/performance.md explains the tables.

    python -m benchmarks.overhead                           everything: about three minutes per round
    python -m benchmarks.overhead --only gateway,nginx --scenarios short,streams-256
    python -m benchmarks.overhead --gate                    exit status 1 where CPU per unit has grown too far
    python -m benchmarks.overhead --workers 2               one process against two

Needs Linux with two cores, a C compiler, and nginx to compare with. `--bin FOLDER` says where routers are
that are not on PATH, as in a virtual environment of their own.
"""

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

if not __package__:  # python benchmarks/overhead
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.overhead import machine, targets, verdict, vocabulary
from benchmarks.overhead.bench import Bench
from benchmarks.overhead.scenarios import scenarios
from benchmarks.overhead.verdict import Count, Measured, Run

GATED = ("short", "streams-256", "large")
COUNTED = {"large", "streams-1024"}
"""Scenarios of which the token count, or its vocabulary, is subtracted."""
ROOT = Path(__file__).resolve().parents[2]


def parsed() -> argparse.Namespace:
    """Return what was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help="targets, separated by commas; all that are installed by default")
    parser.add_argument("--scenarios", help="by name, separated by commas: " + ", ".join(scenarios()))
    parser.add_argument("--rounds", type=int, default=3, help="of which the best counts")
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="measured per scenario, some half as much again"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="where all results go")
    parser.add_argument(
        "--vocab", type=Path, metavar="FILE", help="a tokenizer.json, or a rank file made of one"
    )
    parser.add_argument("--bin", type=Path, action="append", default=[], metavar="FOLDER")
    parser.add_argument("--gate", action="store_true", help="compare CPU per unit with nginx's, and fail")
    parser.add_argument(
        "--workers", type=int, default=1, help="compare one process of the gateway with so many"
    )
    return parser.parse_args()


def rank_file(given: Path | None, folder: Path) -> Path:
    """Return the vocabulary as the gateway loads it."""
    if given is not None and given.suffix != ".json":
        return given.resolve()
    source = folder / "tokenizer.json" if given is None else given.resolve()
    if given is None:
        vocabulary.write(source)
    built = folder / "vocabulary.tiktoken"
    subprocess.run(
        [sys.executable, "-m", "gateway", "vocab", "build", str(source), "-o", str(built)],
        cwd=ROOT,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return built


def print_lines(lines: Sequence[str]) -> None:
    """Print a paragraph."""
    print(*lines, "", sep="\n", flush=True)


def chosen(options: argparse.Namespace) -> list[targets.Target]:
    """Return what is to be measured, in the order of the tables."""
    found = targets.available(options.bin)
    wanted = options.only.split(",") if options.only else [target.name for target in found]
    if options.gate:
        wanted = [verdict.NGINX, verdict.GATEWAY]
    if missing := set(wanted) - {target.name for target in found}:
        raise SystemExit(f"error: not installed: {', '.join(sorted(missing))}")
    return [target for target in found if target.name in wanted]


def heading(options: argparse.Namespace, measured: Sequence[targets.Target], made: bool) -> list[str]:
    """Return on what, of what and how."""
    versions = ", ".join(f"{one.name} {one.version}" for one in measured if one.version)
    return [
        machine.described(),
        f"Python {platform.python_version()}, {versions}",
        f"{options.rounds} rounds in turns, {options.seconds:g} s or more each; load of this machine before: "
        f"{os.getloadavg()[0]:.1f}",
        "vocabulary: " + ("made here, of Gemma's size" if made else str(options.vocab)),
    ]


def compare(bench: Bench, options: argparse.Namespace, wanted: Sequence[targets.Target]) -> dict[str, Any]:
    """Measure all targets, print the tables, and return everything."""
    names = GATED if options.gate else (options.scenarios or ",".join(scenarios())).split(",")
    if unknown := set(names) - set(scenarios()):
        raise SystemExit(f"error: no such scenario: {', '.join(sorted(unknown))}")
    runs: list[Run] = []
    counts = []
    wanted = list(wanted)
    for number in range(options.rounds):
        for target in tuple(wanted):
            print(f"round {number + 1}: {target.name}", file=sys.stderr, flush=True)
            try:
                runs.append(Run(target.name, number, bench.measure(target, names)))
            except targets.NotRunning as error:
                if target.name in (verdict.GATEWAY, verdict.NGINX):
                    raise SystemExit(f"error: {error}") from error
                print(f"left out: {error}", file=sys.stderr, flush=True)
                wanted.remove(target)
        if COUNTED & set(names) and any(target.name == verdict.GATEWAY for target in wanted):
            counts.append(bench.count())
    count = best_count(counts)
    measured = {
        target.name: Measured(runs, target.name, count if target.name == verdict.GATEWAY else None)
        for target in wanted
    }
    print_lines(verdict.goals_table(measured))
    if count is not None:
        gateway = measured[verdict.GATEWAY]
        whole_us, counted_us = gateway.cpu_us("large"), gateway.counted_us()
        said = []
        if whole_us is not None and counted_us is not None:
            said.append(f"A request of 1 MB costs the gateway {whole_us:,.0f} us in all.")
            said.append(f"The count of its {count.tokens:,} tokens takes {counted_us:,.0f} us of that,")
            said.append(f"and {count.us:,.0f} us in a process of its own.")
        said.append(f"The vocabulary holds {count.vocabulary_mb:.0f} MB.")
        print_lines([" ".join(said)])
    print_lines(verdict.throughput_table(measured))
    print_lines(verdict.others_table(measured))
    for name, one in measured.items():
        for problem in one.unclean():
            print(f"not clean: {name}: {problem}")
    if options.gate:
        exceeded = verdict.gate(measured)
        print_lines(exceeded or ["The gate holds."])
        options.failed = bool(exceeded)
    return {"count": counts, "runs": [asdict(run) for run in runs]}


def best_count(counts: Sequence[Mapping[str, float]]) -> Count | None:
    """Return the count of the best round."""
    if not counts:
        return None
    best = min(counts, key=lambda one: one["count_us"])
    return Count(best["count_us"], int(best["tokens"]), best["vocabulary_mb"])


def compare_workers(bench: Bench, options: argparse.Namespace, gateway: targets.Target) -> dict[str, Any]:
    """Measure one process of the gateway and several, print the table, and return everything."""
    runs: dict[int, list[Run]] = {1: [], options.workers: []}
    for number in range(options.rounds):
        for workers, found in runs.items():
            print(f"round {number + 1}: {workers} workers", file=sys.stderr, flush=True)
            try:
                found.append(Run(verdict.GATEWAY, number, bench.measure_workers(gateway, workers)))
            except targets.NotRunning as error:
                raise SystemExit(f"error: {error}") from error
    measured = {workers: Measured(found, verdict.GATEWAY) for workers, found in runs.items()}
    print_lines(verdict.workers_table(measured))
    for workers, one in measured.items():
        for problem in one.unclean():
            print(f"not clean: {workers} workers: {problem}")
    return {"workers": {workers: [asdict(run) for run in found] for workers, found in runs.items()}}


def main() -> None:
    """Measure, print, and with `--gate` judge."""
    options = parsed()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that nothing is left running
    options.failed = False
    if not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2:
        raise SystemExit(
            "error: this needs Linux, and two cores to keep what is measured from what measures it"
        )
    if shutil.which(os.environ.get("CC", "cc")) is None:
        raise SystemExit("error: this needs a C compiler: cc, or the one that CC names")
    with tempfile.TemporaryDirectory(prefix="overhead-") as name:
        folder = Path(name)
        built = rank_file(options.vocab, folder)
        wanted = chosen(options)
        lines = heading(options, wanted, options.vocab is None)
        print_lines(lines)
        with Bench(folder, built, options.seconds) as bench:
            if options.workers > 1:
                gateway = next(target for target in wanted if target.name == verdict.GATEWAY)
                found = compare_workers(bench, options, gateway)
            else:
                found = compare(bench, options, wanted)
    if options.json is not None:
        options.json.write_text(json.dumps({"about": lines, "seconds": options.seconds, **found}, indent=1))
    sys.exit(1 if options.failed else 0)


if __name__ == "__main__":
    main()
