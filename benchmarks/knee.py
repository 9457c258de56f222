"""Where the knee is and what the gateway makes of it: `python benchmarks/knee.py`.

Engines run in virtual time behind a closed loop or Poisson arrivals; every step's length is off by 3 %
(seeded). Only what a gateway sees reaches the code under test: requests that start, get their first
token and end, and how many chunks came between.

    python benchmarks/knee.py                  the estimate: every case and load
    python benchmarks/knee.py --cases light    only cases whose name contains this
    python benchmarks/knee.py --control        the control loop on a TPOT target
"""

import argparse
import math
import random
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean

from gateway.core.admission import WHOLE, blocks_planned
from gateway.core.engine import Engine
from gateway.core.knee_estimate import (
    LESS_GAIN,
    MORE_SEQS,
    ClassShape,
    KneeEstimate,
    StepFit,
    Uncertainty,
    estimate,
)
from gateway.core.profile import Profile
from gateway.core.tpot_control import WINDOW_S, GapMeter, GapWindow, TpotControl, TpotTarget, adjust
from gateway.profiles import load

NOISE = 0.03
"""Standard deviation of a step's length, relative."""

HOUR_S = 3600.0
CONTROLLED = (("LIGHT chat", 0.05), ("LIGHT chat", 0.03), ("LIGHT 4K/512", 0.06), ("PUSH chat", 0.04))
LOADS = (0.3, 0.6, 0.9)
SEEDS = (101, 102, 103, 104, 105)
"""Of the tables in docs/knee.md. None of the figures in the code under test was chosen on these."""
NEAR = 0.15


# ------------------------------------------------------------------ traffic and server


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests whose lengths are lognormal with these means; a sigma of 0 is one length."""

    prompt_tokens: int
    output_tokens: int
    prompt_sigma: float = 0.0
    output_sigma: float = 0.0
    prompt_max: int = 8000

    def draw(self, dice: random.Random) -> tuple[int, int]:
        """Return the prompt and output tokens of one request."""
        prompt = min(self.prompt_max, max(16.0, _lognormal(dice, self.prompt_tokens, self.prompt_sigma)))
        return int(prompt), max(2, int(_lognormal(dice, self.output_tokens, self.output_sigma)))


def _lognormal(dice: random.Random, mean: float, sigma: float) -> float:
    return dice.lognormvariate(math.log(mean) - sigma**2 / 2, sigma) if sigma else mean


@dataclass(slots=True)
class _Stream:
    prompt: int
    output: int
    first_step: int = 0


@dataclass(slots=True)
class Server:
    """One backend behind a gateway that admits `limit_share` of `ceiling_seqs`, in virtual time.

    Attributes:
        profile: What is served.
        traffic, rate: What comes: `rate` requests per second, or None for a queue that never empties.
        ceiling_seqs: The configured knee; a sequence takes that part of the whole.
        limit_share: How much of it the gateway gives out, millionths; it may be changed between windows.
        tokens: Output tokens so far.
        shape: Of the streams that have ended.
    """

    profile: Profile
    traffic: Traffic
    rate: float | None
    ceiling_seqs: int
    seed: int
    noise: float = NOISE
    limit_share: int = WHOLE
    now: float = 0.0
    tokens: int = 0
    steps: int = 0
    in_flight: int = 0
    in_flight_max: int = 0
    shape: ClassShape = field(default_factory=ClassShape)

    def windows(self) -> Iterator[GapWindow]:
        """Yield windows as they close, without end; time passes as they are taken."""
        lengths, arrivals, noise = (random.Random(f"{self.seed} {what}") for what in "lan")
        engine = Engine.of(self.profile)
        meter = GapMeter(self.now)
        streams: dict[int, _Stream] = {}
        queue: deque[float] = deque()
        share = WHOLE // self.ceiling_seqs
        kv = self.profile.capacity.kv
        number, decoding = 0, 0
        arrival = self.now + arrivals.expovariate(self.rate) if self.rate else math.inf
        tick = self.now + WINDOW_S
        while True:
            while self.rate and arrival <= self.now:
                queue.append(arrival)
                arrival += arrivals.expovariate(self.rate)
            while (self.in_flight + 1) * share <= self.limit_share and (queue or not self.rate):
                if queue:
                    queue.popleft()
                stream = streams[number] = _Stream(*self.traffic.draw(lengths))
                engine.submit(number, stream.prompt, stream.output)
                number += 1
                self.in_flight += 1
                self.in_flight_max = max(self.in_flight_max, self.in_flight)
                meter.opened(self.now, share=share)
            batch = engine.schedule()
            if batch is None:
                self.now = arrival
                continue
            self.now += batch.duration_s * max(0.5, noise.gauss(1, self.noise))
            self.steps += 1
            result = engine.complete()
            self.tokens += sum(gained for _, gained in result.emitted)
            # The chunks of a step come in any order: half of them before the first tokens.
            chunks = len(result.emitted) - len(result.first)
            before = chunks // 2 if result.first else chunks
            meter.chunks += before
            for seq_id in result.first:
                streams[seq_id].first_step = self.steps
                meter.answered(self.now, prompt_tokens=streams[seq_id].prompt)
                decoding += 1
            meter.chunks += chunks - before
            for seq_id in result.finished:
                stream = streams.pop(seq_id)
                chunks = self.steps - stream.first_step
                meter.ended(self.now, share=share, tokens=stream.output - 1, chunks=chunks)
                blocks = kv.blocks(stream.prompt + stream.output) if kv else 0
                self.shape = self.shape.with_stream(
                    prompt_tokens=stream.prompt, chunks=chunks, kv_blocks=blocks
                )
                self.in_flight -= 1
            if self.now >= tick:
                tick = self.now + WINDOW_S
                window = meter.close(self.now)
                if window is not None:
                    yield window


def server_of(case: "Case", load_ratio: float | None, seed: int) -> Server:
    """Return a server under that part of what it can do at its ceiling, or kept full."""
    rate = None if load_ratio is None else load_ratio * case.full_tokens_per_s / case.traffic.output_tokens
    return Server(case.profile, case.traffic, rate, case.ceiling_seqs, seed)


# ------------------------------------------------------------------ cases


@dataclass(frozen=True, slots=True)
class Case:
    """A deployment under one kind of traffic.

    Attributes:
        name: What the table calls it.
        profile, traffic: What is served, and to whom.
        ceiling_seqs: What the gateway admits.
        knee_seqs: The true knee, as `python benchmarks/knee.py --true` measures it.
        full_tokens_per_s: What it makes with the ceiling in flight, measured likewise: load 1.
        sweep: Numbers in flight that the curve is measured at.
        minutes: Virtual minutes watched.
    """

    name: str
    profile: Profile
    traffic: Traffic
    ceiling_seqs: int
    knee_seqs: float
    full_tokens_per_s: float
    sweep: tuple[int, ...]
    minutes: int = 20


def deployed(name: str) -> Profile:
    """Return a shipped profile at real text's acceptance, with room above the recipe's max_num_seqs."""
    profile = load(name)
    accept = 2.5 if profile.perf.draft else 1.0
    return replace(
        profile,
        perf=replace(profile.perf, accept=accept),
        flags=replace(profile.flags, max_num_seqs=256),
    )


def _with_corner(profile: Profile) -> Profile:
    """Return it with memory and compute wholly overlapped, and much memory: flat up to about 30 sequences."""
    return replace(
        profile,
        perf=replace(profile.perf, t_mem=0.06, sharp=6.0),
        capacity=replace(profile.capacity, kv=None, kv_blocks=None),
    )


CHAT = Traffic(1024, 300, prompt_sigma=0.9, output_sigma=0.7)
LONGER_CHAT = Traffic(2500, 700, prompt_sigma=0.5, output_sigma=0.7)
REPORTS = Traffic(4096, 512)
SHORT = Traffic(300, 600, prompt_sigma=0.6, output_sigma=0.6)
DOCUMENTS = Traffic(16384, 1024, output_sigma=0.5, prompt_max=20000)
LIGHT = deployed("h100-tp1-light")
PUSH = deployed("h100-tp2-push")
H200 = deployed("h200-fp8")
CORNER = _with_corner(LIGHT)

_LIGHT_SWEEP = (12, 16, 20, 26, 32, 40, 50, 64)
CASES = (
    Case("LIGHT chat", LIGHT, CHAT, 64, 38.9, 859.2, _LIGHT_SWEEP),
    Case("LIGHT 2.5K/700", LIGHT, LONGER_CHAT, 64, 31.5, 715.3, _LIGHT_SWEEP),
    Case("LIGHT 4K/512", LIGHT, REPORTS, 64, 17.7, 415.4, (8, 10, 12, 16, 20, 26, 32, 40)),
    Case("LIGHT 300/600", LIGHT, SHORT, 96, 76.9, 1712.5, (20, 32, 40, 50, 64, 80, 96, 110)),
    Case("H200 chat, KV-bound", H200, CHAT, 128, 134.4, 1815.8, (32, 48, 64, 80, 96, 180, 220)),
    Case("PUSH chat", PUSH, CHAT, 128, 135.5, 1494.2, (40, 50, 64, 80, 100, 125, 160)),
    Case("PUSH 2.5K/700", PUSH, LONGER_CHAT, 128, 162.0, 1314.2, (40, 50, 64, 80, 100, 125, 160)),
    Case("PUSH 16K/1K", PUSH, DOCUMENTS, 64, 68.4, 296.3, (20, 26, 32, 40, 50, 64, 80), minutes=60),
    Case("sharp corner", CORNER, CHAT, 128, 95.4, 1017.8, (40, 50, 64, 80, 100, 125, 160)),
)


def tokens_per_s(case: Case, seqs: int, span_s: float, seed: int = 1) -> float:
    """Return the output tokens/s of a case's server that always has `seqs` in flight."""
    server = Server(case.profile, case.traffic, None, seqs, seed, noise=0.0)
    warm, tokens, since = False, 0, 0.0
    for _ in server.windows():
        if not warm and server.now > span_s / 10:
            warm, tokens, since = True, server.tokens, server.now
        if server.now > span_s:
            break
    return (server.tokens - tokens) / (server.now - since)


def true_knee(case: Case, span_s: float = 2 * HOUR_S) -> tuple[float, float, float]:
    """Return the knee as defined, what makes 90 % of 256 in flight, and the tokens/s at the ceiling.

    The first two are sequences in flight. They agree where the step is a line in the batch.

    The time a token takes with n in flight, n / tokens_per_s(n), is measured at several n and smoothed
    with a parabola, as 1 % more or less is beyond what a run of hours can tell. Where KV ends the curve
    (more in flight make no more), the knee is where the parabola reaches what the full server makes.
    """
    speeds = {n: tokens_per_s(case, n, span_s) for n in case.sweep}
    full = tokens_per_s(case, case.ceiling_seqs, span_s)
    free = [n for n in case.sweep if "KV" not in case.name or n <= 100]
    times = _parabola([(n, n / speeds[n]) for n in free])

    def speed(n: float) -> float:
        return n / (times[0] + times[1] * n + times[2] * n * n)

    best = max(speeds.values()) if len(free) < len(speeds) else math.inf
    knee = 2.0
    while speed(knee * (1 + MORE_SEQS)) > speed(knee) * (1 + LESS_GAIN) and speed(knee) < best:
        knee += 0.1
    most = tokens_per_s(case, 256, span_s)
    nearly = 2.0
    while speed(nearly) < 0.9 * most and nearly < 256:
        nearly += 0.1
    return knee, nearly, full


def _parabola(points: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Return the least-squares parabola through points, each weighted by its relative precision."""
    rows = [((1 / y, x / y, x * x / y), 1.0) for x, y in points]
    table = [
        [sum(row[i] * row[j] for row, _ in rows) for j in range(3)] + [sum(row[i] for row, _ in rows)]
        for i in range(3)
    ]
    for i in range(3):
        table[i] = [value / table[i][i] for value in table[i]]
        for j in range(3):
            if j != i:
                factor = table[j][i]
                table[j] = [a - factor * b for a, b in zip(table[j], table[i], strict=True)]
    return table[0][3], table[1][3], table[2][3]


# ------------------------------------------------------------------ the estimate


@dataclass(frozen=True, slots=True)
class Watched:
    """What was estimated at the end of every minute, and the largest number in flight."""

    by_minute: tuple[KneeEstimate, ...]
    in_flight_max: int

    @property
    def last(self) -> KneeEstimate:
        """The last estimate."""
        return self.by_minute[-1]

    def near_minutes(self, knee_seqs: float) -> int | None:
        """Return after how many minutes it was within 15 % for good, None for never."""
        near = [e.seqs is not None and abs(e.seqs / knee_seqs - 1) <= NEAR for e in self.by_minute]
        if not near[-1]:
            return None
        return len(near) - next((i for i, is_near in enumerate(reversed(near)) if not is_near), len(near)) + 1


def watch(server: Server, minutes: int) -> Watched:
    """Return what is estimated of a server, minute by minute."""
    kv_blocks = blocks_planned(server.profile.capacity)
    fit = StepFit()
    found: list[KneeEstimate] = []
    began = server.now
    for window in server.windows():
        fit = fit.with_window(window)
        while server.now - began >= 60 * (len(found) + 1):
            found.append(estimate(fit, server.shape, kv_blocks))
        if len(found) >= minutes:
            break
    return Watched(tuple(found[:minutes]), server.in_flight_max)


def table(cases: Sequence[Case], seeds: Sequence[int] = SEEDS) -> Iterator[str]:
    """Yield the lines of the estimate's table, as Markdown."""
    yield "| case | load | true knee | estimate | worst error | confidence | within 15 % after |"
    yield "| --- | ---: | ---: | ---: | ---: | --- | ---: |"
    for case in cases:
        for ratio in (*LOADS, None):
            runs = [watch(server_of(case, ratio, seed), case.minutes) for seed in seeds]
            shown = "full" if ratio is None else f"{ratio:.0%}"
            yield f"| {case.name} | {shown} | {case.knee_seqs:.0f} | {_row(case, runs)} |"


def _row(case: Case, runs: Sequence[Watched]) -> str:
    answers = sorted(run.last.seqs for run in runs if run.last.seqs is not None)
    verdicts = Counter(_verdict(run.last) for run in runs).most_common()
    confidence = ", ".join(f"{count} {name}" for name, count in verdicts)
    if not answers:
        return f"none | | {confidence} | "
    worst = max((seqs / case.knee_seqs - 1 for seqs in answers), key=abs)
    spans = [run.near_minutes(case.knee_seqs) for run in runs if run.last.seqs is not None]
    near = sorted(span for span in spans if span is not None)
    after = f"{near[0]}-{near[-1]} min ({len(near)} of {len(runs)})" if near else "never"
    return f"{answers[0]:.0f}-{answers[-1]:.0f} | {worst:+.0%} | {confidence} | {after}"


def _verdict(found: KneeEstimate) -> str:
    name = found.confidence.value
    return name if found.doubt is Uncertainty.NONE else f"{name} ({found.doubt.value})"


# ------------------------------------------------------------------ the control


@dataclass(frozen=True, slots=True)
class Controlled:
    """What the control did.

    Attributes:
        shares: `(time, sequences it allowed)` after every window.
        seen: The windows.
        accept: Tokens per chunk.
        moves: How often it moved.
    """

    shares: tuple[tuple[float, float], ...]
    seen: tuple[GapWindow, ...]
    accept: float
    moves: int

    def mean_seqs(self, since_s: float, until_s: float = math.inf) -> float:
        """Return the mean of what it allowed in that time."""
        return fmean(seqs for at, seqs in self.shares if since_s <= at < until_s)

    def range_seqs(self, since_s: float, until_s: float = math.inf) -> tuple[float, float]:
        """Return the least and the most it allowed in that time."""
        seqs = [seqs for at, seqs in self.shares if since_s <= at < until_s]
        return min(seqs), max(seqs)

    def mean_tpot_s(self, since_s: float, until_s: float = math.inf) -> float:
        """Return the mean TPOT that callers saw in that time."""
        chosen = [w for (at, _), w in zip(self.shares, self.seen, strict=True) if since_s <= at < until_s]
        chunks = sum(window.chunks for window in chosen)
        return sum(window.decoding_seq_s for window in chosen) / chunks / self.accept

    def settled_s(self, low: float, high: float) -> float | None:
        """Return when the two-minute mean of what it allowed was in that range for good; None for never."""
        outside = 0.0
        for end, _ in self.shares:
            if end >= 120 and not low <= self.mean_seqs(end - 120, end + 1e-9) <= high:
                outside = end
        return outside if outside < self.shares[-1][0] else None


def control(
    server: Server,
    target: TpotTarget,
    start_seqs: float,
    span_s: float,
    change: tuple[float, Traffic] | None = None,
) -> Controlled:
    """Return what the control does with a server, from so many sequences on.

    `change` is when the traffic becomes another, and which.
    """
    per_seq = WHOLE / server.ceiling_seqs
    state = TpotControl(share=round(start_seqs * per_seq))
    shares: list[tuple[float, float]] = []
    seen: list[GapWindow] = []
    moves = 0
    server.limit_share = state.share
    for window in server.windows():
        before = state.share
        state = adjust(state, window, target)
        moves += state.share != before
        server.limit_share = state.share
        shares.append((server.now, state.share / per_seq))
        seen.append(window)
        if change is not None and server.now >= change[0]:
            server.traffic = change[1]
        if server.now >= span_s:
            break
    return Controlled(tuple(shares), tuple(seen), server.profile.perf.accept, moves)


def seqs_at(case: Case, tpot_s: float, span_s: float = HOUR_S) -> float:
    """Return how many sequences in flight give that TPOT, between the two nearest of the sweep."""
    low, low_tpot_s = 0.0, 0.0
    for seqs in case.sweep:
        server = Server(case.profile, case.traffic, None, seqs, seed=1)
        seen = GapWindow()
        for window in server.windows():
            seen += window if server.now > 120 else GapWindow()
            if server.now > span_s:
                break
        reached_s = (seen.gap_s or 0.0) / case.profile.perf.accept
        if reached_s >= tpot_s:
            return low + (seqs - low) * (tpot_s - low_tpot_s) / (reached_s - low_tpot_s)
        low, low_tpot_s = seqs, reached_s
    return low


def control_table(seeds: Sequence[int] = SEEDS) -> Iterator[str]:
    """Yield the lines of the control's table, as Markdown."""
    yield "| case | target ms | seqs at target | start | allowed after 15 min | TPOT ms | settled after |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    cases = {case.name: case for case in CASES}
    for name, tpot_s in CONTROLLED:
        case = cases[name]
        seqs = seqs_at(case, tpot_s)
        target = TpotTarget(tpot_s, WHOLE // case.ceiling_seqs, WHOLE // case.ceiling_seqs)
        for start in (8, case.ceiling_seqs):
            runs = [control(server_of(case, None, seed), target, start, HOUR_S / 2) for seed in seeds]
            means = [run.mean_seqs(900) for run in runs]
            tpots = [run.mean_tpot_s(900) * 1e3 for run in runs]
            spans = [run.settled_s(seqs * 0.8, seqs * 1.1) for run in runs]
            settled = sorted(span for span in spans if span is not None)
            after = (
                f"{settled[0]:.0f}-{settled[-1]:.0f} s ({len(settled)} of {len(runs)})"
                if settled
                else "never"
            )
            yield (
                f"| {name} | {tpot_s * 1e3:.0f} | {seqs:.0f} | {start} | {min(means):.0f}-{max(means):.0f} "
                f"| {min(tpots):.1f}-{max(tpots):.1f} | {after} |"
            )


def main() -> None:
    """Print what the arguments ask for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default="", help="only cases whose name contains this")
    parser.add_argument("--true", action="store_true", help="measure the true knees")
    parser.add_argument("--control", action="store_true", help="the control loop instead of the estimate")
    arguments = parser.parse_args()
    cases = [case for case in CASES if arguments.cases.lower() in case.name.lower()]
    if arguments.true:
        for case in cases:
            knee, nearly, full = true_knee(case)
            print(
                f"{case.name:20} knee {knee:6.1f}   90 % of the most at {nearly:6.1f}   "
                f"{full:7.1f} tokens/s at {case.ceiling_seqs}",
                flush=True,
            )
    else:
        for line in control_table() if arguments.control else table(cases):
            print(line, flush=True)


if __name__ == "__main__":
    main()
