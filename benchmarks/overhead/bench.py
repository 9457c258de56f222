"""Compiles the two ends, puts a target between them, and looks at what its processes use meanwhile."""

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from benchmarks.overhead import clocked, machine, targets, verdict
from benchmarks.overhead.scenarios import Load, Scenario, large, scenarios, short, worker_scenarios

SOURCES = Path(__file__).parent
ENGINES = 3
COUNTS = 20
SETTLES_IN_S = 1
LETS_GO_IN_S = 5
"""What a target gets to drop what its callers have dropped."""

Result = dict[str, Any]


class Bench:
    """Engines that run, and how to measure what stands before them. The last core is for them."""

    def __init__(self, folder: Path, vocabulary: Path, seconds: float) -> None:
        """Compile, and start the engines."""
        self._folder = folder
        self._vocabulary = vocabulary
        self._seconds = seconds
        cores = sorted(os.sched_getaffinity(0))
        self._every_core = set(cores)
        self._target_core, self._load_core = {cores[0]}, {cores[-1]}
        for name in ("engine", "load"):
            subprocess.run(
                [os.environ.get("CC", "cc"), "-O2", "-o", str(folder / name), str(SOURCES / f"{name}.c")],
                check=True,
            )
        with machine.on_cores(self._load_core):
            self._engines = subprocess.Popen(
                [str(folder / "engine"), str(ENGINES)], stdout=subprocess.PIPE, start_new_session=True
            )
        assert self._engines.stdout is not None
        self._ports = [int(port) for port in self._engines.stdout.readline().split()]
        self._bodies: dict[bytes, Path] = {}

    def __enter__(self) -> Self:
        """Have the engines stopped at the end."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the engines."""
        machine.stop(self._engines)

    # -------------------------------------------------------------- whole targets

    def measure(self, target: targets.Target, names: Iterable[str]) -> dict[str, Result]:
        """Return the results of these scenarios, for a target on one core that is started for them.

        The gateway is started anew, with a clock around its token counts, for those that want it.
        """
        around = targets.Surroundings(self._folder, self._ports, self._vocabulary)
        wanted = {name: one for name, one in scenarios().items() if name in names}
        if target.command is None:
            wanted = {name: one for name, one in wanted.items() if one.direct}
        timed = {name: one for name, one in wanted.items() if one.clocked and target.name == verdict.GATEWAY}
        rest = {name: one for name, one in wanted.items() if name not in timed}
        found: dict[str, Result] = {}
        if rest:
            found |= self._measure(target, around, self._target_core, rest)
        if timed:
            around = replace(around, clock=clocked.made(self._folder / "clock"))
            found |= self._measure(target, around, self._target_core, timed)
        return found

    def measure_workers(self, target: targets.Target, workers: int) -> dict[str, Result]:
        """Return the results of the gateway with so many processes, which may run on any core."""
        around = targets.Surroundings(self._folder, self._ports, self._vocabulary, workers)
        return self._measure(target, around, self._every_core, worker_scenarios())

    def _measure(
        self,
        target: targets.Target,
        around: targets.Surroundings,
        cores: set[int],
        wanted: Mapping[str, Scenario],
    ) -> dict[str, Result]:
        running = targets.start(target, around, cores, short())
        try:
            found = {name: self._play(running, scenario, around.clock) for name, scenario in wanted.items()}
            if running.process is not None and running.process.poll() is not None:
                raise targets.NotRunning(f"{target.name} has ended:\n{running.last_words()}")
            return found
        finally:
            running.stop()

    def count(self) -> Mapping[str, float]:
        """Return what counting.py says of the token count of the 1 MB request, on the targets' core."""
        command = [sys.executable, "-m", "benchmarks.overhead.counting"]
        command += [str(self._vocabulary), str(self._written(large())), str(COUNTS)]
        with machine.on_cores(self._target_core):
            done = subprocess.run(command, cwd=SOURCES.parents[1], check=True, capture_output=True)
        found: Mapping[str, float] = json.loads(done.stdout)
        return found

    # -------------------------------------------------------------- one scenario

    def _play(self, running: targets.Running, scenario: Scenario, clock: Path | None) -> Result:
        rest = self._at_rest(running) if scenario.clocked else 0.0
        result = self._under_load(running, scenario.load, clock=clock)
        result["at_rest_s"] = rest * result["seconds"]
        if scenario.disturbance is not None:
            result["disturbed"] = self._under_load(running, scenario.load, scenario.disturbance)
        return result

    def _at_rest(self, running: targets.Running) -> float:
        """Return the share of a core that a target uses while nothing is asked of it."""
        family = machine.tree(running.process.pid) if running.process is not None else set()
        time.sleep(SETTLES_IN_S)
        before, began = machine.snapshot(family), time.monotonic()
        time.sleep(self._seconds)
        used = machine.between(before, machine.snapshot(family))
        return sum(used.values()) / (time.monotonic() - began)

    def _under_load(
        self,
        running: targets.Running,
        load: Load,
        disturbance: Load | None = None,
        clock: Path | None = None,
    ) -> Result:
        family = machine.tree(running.process.pid) if running.process is not None else set()
        with self._callers(running, load) as callers:
            assert callers.stdout is not None and callers.stdin is not None
            _expect(callers, b"START\n")
            before = machine.snapshot(family)
            counted_s = 0.0 if clock is None else clocked.read_s(clock)
            if disturbance is not None:
                with self._callers(running, disturbance) as others:
                    bodies = _finish(others)
            _expect(callers, b"END\n")
            family = machine.tree(running.process.pid) if running.process is not None else set()
            after = machine.snapshot(family)
            counted_s = 0.0 if clock is None else clocked.read_s(clock) - counted_s
            resident_mb = machine.resident_mb(family)
            result = _report(callers)
        used = machine.between(before, after)
        result["cpu_s"] = sum(used.values())
        result["counted_s"] = counted_s
        result["processes"] = [[after[pid].name, cpu_s] for pid, cpu_s in used.items()]
        result["resident_mb"] = resident_mb
        result["left_behind"] = self._left_behind()
        if disturbance is not None:
            result["bodies"] = bodies["good"]
        return result

    def _callers(self, running: targets.Running, load: Load) -> "subprocess.Popen[bytes]":
        figures = (load.rate_hz, load.ramp_s, load.warm_s, load.stretch * self._seconds)
        command = [str(self._folder / "load"), str(running.port), str(self._written(load.body))]
        command += [f"Bearer {targets.API_KEY}", str(load.connections), *map(str, figures)]
        with machine.on_cores(self._load_core):
            return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def _written(self, body: bytes) -> Path:
        if body not in self._bodies:
            self._bodies[body] = self._folder / f"body-{len(self._bodies)}.json"
            self._bodies[body].write_bytes(body)
        return self._bodies[body]

    def _left_behind(self) -> int:
        """Return how many requests still run on the engines some seconds after their callers have gone."""
        until = time.monotonic() + LETS_GO_IN_S
        while (count := sum(map(_running, self._ports))) and time.monotonic() < until:
            time.sleep(0.05)
        return count


def _expect(callers: "subprocess.Popen[bytes]", line: bytes) -> None:
    assert callers.stdout is not None
    if (said := callers.stdout.readline()) != line:
        raise RuntimeError(f"the callers said {said!r}, not {line!r}")


def _report(callers: "subprocess.Popen[bytes]") -> Result:
    assert callers.stdout is not None and callers.stdin is not None
    with suppress(BrokenPipeError):
        callers.stdin.write(b"\n")
        callers.stdin.flush()
    result: Result = json.loads(callers.stdout.readline())
    return result


def _finish(callers: "subprocess.Popen[bytes]") -> Result:
    _expect(callers, b"START\n")
    _expect(callers, b"END\n")
    return _report(callers)


def _running(port: int) -> int:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        for line in answer.read().decode().splitlines():
            if line.startswith("vllm:num_requests_running"):
                return int(float(line.rpartition(" ")[2]))
    raise RuntimeError("an engine has no metrics")
