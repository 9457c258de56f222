"""The routing benchmark over real HTTP: the gateway process in front of simulated servers, time scaled.

`gemma-gateway serve` with a configuration file, one `gemma-gateway simulate` per server, and the callers
of `http_load`, all on this machine, all through sockets. What it measures has the unit and the meaning of
what the virtual fleet measures, so that the two can be compared figure by figure.

How time is scaled. At `--speed s` the servers do in one second of the clock what takes s seconds of
engine time. For the gateway that is simply a fleet that is s times as fast, with callers who want it s
times as fast, and so is it configured:

* Each backend has a profile of its own, the shipped one with every time of the latency model divided by
  s. All that the gateway predicts (a prompt's own reading time in the deadline that orders the line,
  prompt work outstanding, `hang_after_s`) is then in seconds of the clock, like the waits it is compared
  with. Leaving the profile as it is and scaling the bounds alone would not do: the deadline adds
  `prefill_weight` times a prediction to a time of the clock, and the last moment to start takes the
  prediction itself off again, so that no weight makes both right.
* `max_wait_s`, `ttft_target_s`, the `prefill_s` of gates and spill, `hang_s`, and the timeouts of an
  attempt after its connection are divided by s. `total_s` is longer than any answer: the virtual fleet
  has no timeout.
* Knees, KV blocks, weights and all counts have no unit of time and stay.
* Probes stay at one a second: no backend fails here, and s times as many would only cost CPU.

Three things are not scaled. What a process takes for a request is real, so a millisecond of the gateway
counts as s of them, which makes a high speed a strict test. Prompt work is counted in whole
milliseconds of the clock. And the line measures how fast places come free over 5 s of the clock, 5 times
s of engine time; in virtual time a span 4 or 8 times as long moves goodput and refusals by no more
than 0.4 points.

The gateway plans for what it sees: `max_tokens`, which the callers state because the simulator has to
generate exactly that many, and a band of 10 % above the estimate, as for any text counted without a
vocabulary. The virtual run it is compared with (policy `gateway-told`) plans for the same.
"""

import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx

from benchmarks.http_load import Clock, Heard, drive, request_body
from benchmarks.routers import site
from benchmarks.scoring import WARM_UP_S, Score, quantile, score
from benchmarks.traffic import MIXES, Arrival, arrivals
from benchmarks.virtual_fleet import FLEET, Fate, fleet_profiles, holds
from gateway.core import admission
from gateway.core.backends import Backend, Capacity, Pool, Timeouts
from gateway.core.perf import PerfModel
from gateway.core.policy import Policy, TrafficClass, When

T = TypeVar("T")

START_S = 60.0
"""Real seconds a start may take; six interpreters on two busy cores need about five."""

STOP_S = 5.0
TOTAL_S = 86_400.0
_UNGATED = 1_000_000
_PERF_TIMES = ("t_fixed", "t_mem", "kv_read", "kv_span", "t_seq", "t_tok", "t_attn", "overhead_s")

LOST = 0.005
"""Share of the run by which a server's steps may be late for good: what it does not make, it lacks."""

SURE_S = 0.1
"""Seconds of the clock by which a caller may be wrong about when a place was taken and given back. In
overload a freed place is taken at once: with 0.02 one start in 250 looked like one too many, and with 0.1
none."""

LAG_P99_S = 0.1
"""Engine seconds by which one arrival in a hundred may be late: 5 % of the objective of a chat."""

CORE_BUSY, WAITED = 0.85, 0.10
"""Share of a core that a process may use, and share of the time it may wait for one, over a run. At 6 %
two runs of a case agreed with virtual time within a point; at 19 % the gateway stood still for half a
second at a time. On a machine that others keep busy, real-time scheduling (`chrt -r 1 python ...`) helps."""


# ------------------------------------------------------------------ configuration


def config_text(policy: Policy, urls: Mapping[str, str], speed: float) -> str:
    """Return the configuration file that states `policy` for a fleet `speed` times as fast. JSON is YAML."""
    timeouts = Timeouts()
    return json.dumps(
        {
            "listen": "127.0.0.1:0",
            "admin": "127.0.0.1:0",
            "tokenizer": "approximate",
            "profiles": {
                name: {"extends": FLEET[name], "perf": _perf(backend.perf, speed)}
                for name, backend in policy.backends.items()
                if backend.perf is not None
            },
            "backends": {name: _backend(backend, urls[name]) for name, backend in policy.backends.items()},
            "pools": {name: _pool(pool, speed) for name, pool in policy.pools.items()},
            "models": {
                model.id: {"classes": [_class(one, speed) for one in model.classes]}
                for model in policy.models
            },
            "timeouts": {
                "first_byte_s": timeouts.first_byte_s / speed,
                "idle_s": timeouts.idle_s / speed,
                "total_s": TOTAL_S,
            },
            "health": {"hang_s": 30.0 / speed},
            "shutdown": {"drain_s": 0.1},
        },
        indent=2,
    )


def _perf(perf: PerfModel, speed: float) -> dict[str, float]:
    figures = asdict(perf)
    return {key: value / speed if key in _PERF_TIMES else value for key, value in figures.items()}


def _backend(backend: Backend, url: str) -> dict[str, Any]:
    knee = [
        {"seqs": step.seqs}
        if step.prompt_tokens_max is None
        else {"prompt_tokens": f"<= {step.prompt_tokens_max}", "seqs": step.seqs}
        for step in backend.capacity.knee
    ]
    return {"url": url, "profile": backend.id, "limits": {"knee_seqs": knee}}


def _pool(pool: Pool, speed: float) -> dict[str, Any]:
    gates: dict[str, Any] = {"long_prompt_tokens": pool.gates.long_prompt_tokens}
    gates["long_prefills"] = _UNGATED if pool.gates.long_prefills is None else pool.gates.long_prefills
    if pool.gates.long_seqs is not None:
        gates["long_seqs"] = pool.gates.long_seqs
    if pool.gates.prefill_s is not None:
        gates["prefill_s"] = pool.gates.prefill_s / speed
    spill = {"reserve": pool.spill.reserve, "prefill_s": pool.spill.prefill_s / speed}
    return {"backends": list(pool.backends), "gates": gates, "spill": spill}


def _class(one: TrafficClass, speed: float) -> dict[str, Any]:
    waiting = one.waiting
    return {
        "class": one.name,
        "when": _when(one.when),
        "pools": list(one.pools),
        "output_reserve_tokens": one.output_reserve_tokens,
        "waiting": {
            "max_wait_s": waiting.max_wait_s / speed,
            "ttft_target_s": waiting.ttft_target_s / speed,
            "prefill_weight": waiting.prefill_weight,
        },
    }


def _when(when: When) -> dict[str, Any]:
    found: dict[str, Any] = {} if when.reasoning is None else {"reasoning": when.reasoning}
    if when.prompt_tokens:
        (bound,) = when.prompt_tokens
        found["prompt_tokens"] = f"{bound.op.value} {bound.value}"
    return found


# ------------------------------------------------------------------ processes


class Child:
    """A process of the product, and what it says."""

    def __init__(self, log: Path, *arguments: str) -> None:
        """Run a `gemma-gateway` command; what it says goes to a file."""
        self._log = log
        with log.open("wb") as said:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "gateway", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=said,
                cwd=Path(__file__).resolve().parents[1],
            )
        self.pid = self._process.pid

    def heard(self, pattern: str) -> str | None:
        """Return what `pattern` captures in what it has said, or None.

        Raises:
            RuntimeError: it has ended.
        """
        found = re.search(pattern, self._log.read_text(errors="replace"))
        if found is None:
            self.check()
        return None if found is None else found.group(1)

    def check(self) -> None:
        """Raise a RuntimeError if it has ended, with what it said last."""
        if (status := self._process.poll()) is not None:
            said = self._log.read_text(errors="replace")
            raise RuntimeError(f"{self._log.stem} ended with status {status}\n{said[-2000:]}")

    def stop(self) -> None:
        """End it, gently first."""
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@dataclass(frozen=True, slots=True)
class Site:
    """What runs: base URLs, and processes by name."""

    url: str
    backends: Mapping[str, str]
    children: Mapping[str, Child]


@contextmanager
def running(policy: Policy, speed: float) -> Iterator[Site]:
    """Run the fleet and the gateway in front of it while the block runs; all backends are up.

    Raises:
        RuntimeError: something did not start, or not in time.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gemma-gateway-benchmark-")))
        children: dict[str, Child] = {}

        def start(name: str, *arguments: str) -> Child:
            child = children[name] = Child(folder / f"{name}.log", *arguments)
            stack.callback(child.stop)
            return child

        for seed, (name, profile) in enumerate(fleet_profiles().items()):
            options = ("--accept", str(profile.perf.accept), "--seed", str(seed), "--speed", str(speed))
            start(name, "simulate", "--profile", FLEET[name], "--port", "0", *options)
        urls = {name: _soon(partial(child.heard, r" at (http://\S+)/v1")) for name, child in children.items()}
        config = folder / "gateway.json"
        config.write_text(config_text(policy, urls, speed), encoding="utf-8")
        gateway = start("gateway", "serve", "--config", str(config), "--log-level", "warning")
        url = _soon(partial(gateway.heard, r"serves (http://\S+)/v1"))
        operators = _soon(partial(gateway.heard, r"operators: (http://\S+)"))
        _soon(partial(_are_up, operators))
        yield Site(url, urls, children)


def _soon(ask: Callable[[], T | None]) -> T:
    """Return what `ask` returns as soon as it is something."""
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        found = ask()
        if found is not None:
            return found
        time.sleep(0.05)
    raise RuntimeError(f"not ready after {START_S:g} s")


def _are_up(operators: str) -> bool | None:
    backends = httpx.get(operators, trust_env=False).json()
    return all(backend["state"] == "up" for backend in backends.values()) or None


# ------------------------------------------------------------------ what the machine did


@dataclass(slots=True)
class Meter:
    """What processes had of the CPU between `start` and `stop`. Empty where there is no Linux /proc.

    Attributes:
        used: Per process, the share of a core it used.
        waited: Per process, the share of the time in which its main thread was ready to run and had no
            core: the machine is too busy, whether with this or with something else.
        machine: Share of all cores in use, by whomever.
        seconds: How long it was.
    """

    pids: Mapping[str, int]
    used: dict[str, float] = field(default_factory=dict)
    waited: dict[str, float] = field(default_factory=dict)
    machine: float = 0.0
    seconds: float = 0.0
    _before: dict[str, tuple[float, float]] = field(default_factory=dict)
    _began: float = 0.0

    def start(self) -> None:
        """Begin to count."""
        self._before, self._began = self._read(), time.monotonic()

    def stop(self) -> None:
        """Work out the shares."""
        after, self.seconds = self._read(), time.monotonic() - self._began
        for name in after.keys() & self._before.keys():
            first, second = (new - old for new, old in zip(after[name], self._before[name], strict=True))
            if name == "":
                self.machine = first / (first + second)
            else:
                self.used[name], self.waited[name] = first / self.seconds, second / self.seconds

    def _read(self) -> dict[str, tuple[float, float]]:
        """Return seconds (used, waited) of every process, and under "" those (used, idle) of the machine."""
        found: dict[str, tuple[float, float]] = {}
        with suppress(OSError):
            ticks = os.sysconf("SC_CLK_TCK")
            for name, pid in self.pids.items():
                # The name of a process stands in brackets and may hold anything.
                columns = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                waited_ns = int(Path(f"/proc/{pid}/schedstat").read_text().split()[1])
                found[name] = (int(columns[11]) + int(columns[12])) / ticks, waited_ns / 1e9
            columns = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
            idle = int(columns[3]) + int(columns[4])
            found[""] = (sum(map(int, columns)) - idle) / ticks, idle / ticks
        return found


@dataclass(frozen=True, slots=True)
class Engine:
    """What one simulated server said about itself."""

    tokens: float
    peak: int
    kv_peak: float
    preemptions: int
    rejected_4xx: int
    lag_peak_s: float
    lost_s: float


async def _engines(site: Site) -> dict[str, Engine]:
    """Ask every simulated server for its figures."""
    async with httpx.AsyncClient(trust_env=False) as client:
        pages = await asyncio.gather(*(client.get(f"{url}/metrics") for url in site.backends.values()))
    return {name: _engine(page.text) for name, page in zip(site.backends, pages, strict=True)}


def _engine(page: str) -> Engine:
    def total(start: str, end: str = "") -> float:
        lines = [line.rpartition(" ") for line in page.splitlines() if line.startswith(start)]
        return sum(float(value) for key, _, value in lines if end in key)

    return Engine(
        tokens=total("vllm:generation_tokens_total"),
        peak=int(total("simulator:requests_peak")),
        kv_peak=total("simulator:kv_cache_usage_peak"),
        preemptions=int(total("vllm:num_preemptions_total")),
        rejected_4xx=int(total('http_requests_total{handler="/v1/chat', 'status="4xx"')),
        lag_peak_s=total("simulator:step_lag_seconds_peak"),
        lost_s=total("simulator:lost_seconds_total"),
    )


# ------------------------------------------------------------------ one run


@dataclass(frozen=True, slots=True)
class Run:
    """What one run measured, and whether it may be believed.

    Attributes:
        score: As in virtual time.
        fates: Of all requests, in order.
        heard: What the callers heard.
        engines: What each server said at the end.
        meter: What the machine did.
        speed: Engine seconds per second of the clock.
    """

    score: Score
    fates: Sequence[Fate]
    heard: Heard
    engines: Mapping[str, Engine]
    meter: Meter
    speed: float

    @property
    def lag_p99_s(self) -> float:
        """Engine seconds by which one arrival in a hundred was late."""
        return quantile(sorted(self.heard.lags_s), 0.99) * self.speed

    def doubts(self) -> list[str]:
        """Return why the figures are not to be believed: the machine did not keep up, or something broke."""
        found = []
        if self.lag_p99_s > LAG_P99_S:
            found.append(f"arrivals late by {self.lag_p99_s:.2f} s (p99)")
        meter = self.meter
        found += [
            f"{name} used {used:.0%} of a core" for name, used in meter.used.items() if used > CORE_BUSY
        ]
        found += [
            f"{name} waited for a core {waited:.0%} of the time"
            for name, waited in meter.waited.items()
            if waited > WAITED
        ]
        found += [
            f"{name} lost {engine.lost_s:.1f} s of the clock"
            for name, engine in self.engines.items()
            if engine.lost_s > LOST * meter.seconds
        ]
        if self.heard.flaws:
            found.append(f"{len(self.heard.flaws)} broken answers, the first: {self.heard.flaws[0]}")
        if self.heard.prompt_errors:
            found.append(f"{self.heard.prompt_errors} prompts of another length than planned")
        return found


def measure(
    mix: str,
    load: float,
    seed: int,
    *,
    duration_s: float,
    speed: float,
    warm_up_s: float = WARM_UP_S,
    reasoning: bool = True,
) -> Run:
    """Run the mix against a gateway and a fleet of its own; durations are engine seconds.

    Raises:
        RuntimeError: a process did not start, or ended before the run did.
    """
    began = time.perf_counter()
    policy = site()
    rate = {} if reasoning else {"reasoning_per_s": 0.0}
    plan = [
        (one, request_body(one)) for one in arrivals(MIXES[mix], load, seed, duration_s=duration_s, **rate)
    ]
    with running(policy, speed) as place:
        meter = Meter({"callers": os.getpid(), **{name: child.pid for name, child in place.children.items()}})
        meter.start()
        fates, heard, tokens = asyncio.run(_driven(place, plan, speed, (warm_up_s, duration_s)))
        meter.stop()
        for child in place.children.values():
            child.check()
        engines = asyncio.run(_engines(place))
    profiles = fleet_profiles()
    result = score(
        fates,
        tokens_per_s=tokens / (duration_s - warm_up_s),
        misfits=sum(engine.rejected_4xx for engine in engines.values())
        + sum(bool(fate.backend) and not holds(profiles[fate.backend], fate.arrival) for fate in fates),
        above_cap=sum(max(0, engine.peak - most_seqs(policy, name)) for name, engine in engines.items())
        + sum(above_knee(policy.backends[name].capacity, name, fates, SURE_S * speed) for name in FLEET),
        kv_max=max(engine.kv_peak for engine in engines.values()),
        seconds=time.perf_counter() - began,
        warm_up_s=warm_up_s,
    )
    return Run(result, fates, heard, engines, meter, speed)


async def _driven(
    place: Site, plan: Sequence[tuple[Arrival, bytes]], speed: float, counted: tuple[float, float]
) -> tuple[list[Fate], Heard, float]:
    """Return what became of all requests, what the callers heard, and the tokens that the fleet made
    between two moments of the run."""
    address = urlsplit(place.url)
    clock = Clock(speed)
    async with asyncio.TaskGroup() as tasks:
        totals = [tasks.create_task(_tokens_at(place, clock, at)) for at in counted]
        fates, heard = await drive(plan, str(address.hostname), int(address.port or 0), clock)
    return fates, heard, totals[1].result() - totals[0].result()


async def _tokens_at(place: Site, clock: Clock, at: float) -> float:
    await clock.until(at)
    return sum(engine.tokens for engine in (await _engines(place)).values())


def above_knee(capacity: Capacity, name: str, fates: Sequence[Fate], sure_s: float) -> int:
    """Return how many requests started on a backend that held more than its knee curve allows, as far as
    that can be told from outside.

    A caller sees a request start and end a little off the moment at which its place is taken and given
    back, so the first and last `sure_s` of each are left out; and where a request may have been taken for
    a shorter one, it counts as that.
    """
    changes: list[tuple[float, float]] = []
    for fate in fates:
        if fate.backend != name or fate.sent_at is None:
            continue
        tokens = min(fate.arrival.prompt_tokens, fate.arrival.estimate_tokens)
        share = 1 / admission.knee_seqs(capacity, tokens)
        end = float("inf") if fate.done_at is None else fate.done_at - sure_s
        if end > fate.sent_at + sure_s:
            changes += [(fate.sent_at + sure_s, share), (end, -share)]
    found, held = 0, 0.0
    for _, change in sorted(changes):
        held += change
        found += change > 0 and held > 1 + 1e-6
    return found


def most_seqs(policy: Policy, name: str) -> int:
    """Return the most requests that a backend's knee allows, at any prompt length."""
    return max(step.seqs for step in policy.backends[name].capacity.knee)
