"""What swapping costs, in virtual time: one box, two models that take turns, hours of traffic.

    python -m benchmarks.box                       the table of docs/boxes.md
    python -m benchmarks.box --seeds 1-8           on other traffic

The gateway's own code decides: the line (core/waiting/), selection, the box (core/box.py), its policy
(core/swap_policy.py) and what the store says to it (core/box_demand.py). The servers are the engine model,
the swap is its measured 306 s, and time is virtual. Jobs are asynchronous: nobody gives up on one. They wait
in the store, in their order, and come to the line as a worker would bring them, two at a time.
"""

import argparse
import os
import random
import shlex
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, fields, replace
from heapq import heappop, heappush
from statistics import fmean

from benchmarks.routers import ESTIMATE_BAND
from benchmarks.routing import machine
from benchmarks.scoring import quantile
from benchmarks.traffic import clipped, lognormal
from gateway.core.backends import Backend, Gates, Pool
from gateway.core.box import (
    Box,
    BoxRules,
    Event,
    Inspected,
    Observation,
    Order,
    OwnershipTaken,
    Task,
    TaskEnded,
    advance,
    objection,
)
from gateway.core.box_demand import stored_wants
from gateway.core.engine import Engine
from gateway.core.health import BackendStatus, State
from gateway.core.jobs import Lane
from gateway.core.load import Demand
from gateway.core.policy import ModelPolicy, Policy, TrafficClass, Waiting
from gateway.core.profile import Profile
from gateway.core.request import CountMode, Endpoint, Estimate, Prompt, Request
from gateway.core.selection import BackendView
from gateway.core.swap_policy import SwapRules, Trigger
from gateway.core.waiting import Ticket, WaitingLine, fastest_prefill_s
from gateway.jobs import WorkerRules
from gateway.ports import Slot
from gateway.profiles import library
from gateway.replay.router import at_once
from gateway.store.memory import MemoryLedger

SWAP_S = 306.0
"""A cold boot of the one published box (docs/measurements.md): what a swap costs."""

CHECK_S = 3.0
"""The canary's answer: 20 tokens at 6.8 a second."""

QWEN_TOKENS_PER_S = 30.0
"""A placeholder: nobody has published this model on this box."""

LOOK_S = 2.0
HOURS = 6.0
LIMIT_S = 3600.0

JOB_TOKENS = 8_192
"""`max_tokens` of the jobs: 1,205 s of generation. Without a bound, one job may run for over an hour."""

END_H = 12.0
"""Hours after the last arrival at which a run ends, whoever still waits."""


@dataclass(frozen=True, slots=True)
class Swapping:
    """A way to decide on swaps. `is_gated`: what was queued when a model came in goes first."""

    gemma: Trigger
    qwen: Trigger
    residency_s: float = 300.0
    is_gated: bool = True


POLICIES: Mapping[str, Swapping] = {
    "2 jobs or 600 s; 6 requests or 900 s": Swapping(Trigger(2, 600.0), Trigger(6, 900.0)),
    "4 or 600 s, both": Swapping(Trigger(4, 600.0), Trigger(4, 600.0)),
    "on demand": Swapping(Trigger(1, 0.0), Trigger(1, 0.0), 0.0),
    "600 s, both, no gate": Swapping(Trigger(99, 600.0), Trigger(99, 600.0), 0.0, is_gated=False),
}
CASES = ((8.0, 12.0, JOB_TOKENS), (8.0, 12.0, 32_000), (4.0, 12.0, JOB_TOKENS), (12.0, 12.0, JOB_TOKENS))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one run.

    Attributes:
        jobs: Jobs that arrived.
        within: Share of those that can that ended within 60 minutes.
        impossible: Those whose answer alone takes longer than that; they are not counted above.
        longest_s: The longest any other took.
        qwen: Share of Qwen's requests that were answered.
        qwen_600: Share of them answered within 10 minutes.
        qwen_p50_s, qwen_p95_s: How long they took.
        swaps_per_h: Boots, while requests arrived.
    """

    jobs: float
    within: float
    impossible: float
    longest_s: float
    qwen: float
    qwen_600: float
    qwen_p50_s: float
    qwen_p95_s: float
    swaps_per_h: float


@dataclass(slots=True)
class _Call:
    model: str
    at: float
    prompt: int
    output: int
    done_at: float | None = None
    is_refused: bool = False

    @property
    def took_s(self) -> float:
        return float("inf") if self.done_at is None else self.done_at - self.at


def _calls(seed: int, seconds: float, rates: Mapping[str, float], job_tokens: int) -> list[_Call]:
    """Return the calls of a run. `job_tokens` is the `max_tokens` that jobs come with."""
    calls = []
    for model, per_h in rates.items():
        dice, at = random.Random(f"{seed} {model}"), 0.0
        while (at := at + dice.expovariate(per_h / 3600)) < seconds:
            if model == "gemma":
                prompt = clipped(lognormal(dice, 2048, 0.9), 16, 32_000)
                output = clipped(lognormal(dice, 4096, 0.7), 1, job_tokens)
            else:
                prompt = clipped(lognormal(dice, 1024, 0.9), 16, 8_000)
                output = clipped(lognormal(dice, 400, 0.7), 1, 8_000)
            calls.append(_Call(model, at, prompt, output))
    return sorted(calls, key=lambda call: call.at)


def _profiles() -> Mapping[str, Profile]:
    gemma = library.load("spark-nvfp4")
    factor = gemma.perf.lone_tokens_per_s() / QWEN_TOKENS_PER_S
    times = ("t_fixed", "t_mem", "kv_read", "kv_span", "t_seq", "t_tok", "t_attn", "overhead_s")
    quick = replace(gemma.perf, **{name: factor * getattr(gemma.perf, name) for name in times})
    return {"gemma": gemma, "qwen": replace(gemma, name="qwen", perf=quick)}


def _policy(profiles: Mapping[str, Profile]) -> Policy:
    waits = {
        "gemma": Waiting(max_wait_s=36_000, ttft_target_s=2_700, prefill_weight=1),
        "qwen": Waiting(max_wait_s=3_600, ttft_target_s=2_700, prefill_weight=1),
    }
    return Policy(
        models=tuple(
            ModelPolicy(name, (TrafficClass(f"{name}_work", (name,), waiting=waits[name]),))
            for name in profiles
        ),
        pools={name: Pool(name, (name,), gates=Gates(long_prefills=None)) for name in profiles},
        backends={
            name: Backend(
                id=name,
                url=f"http://{name}",
                capacity=profile.capacity,
                model=name,
                perf=profile.perf,
                batched_tokens=profile.flags.max_num_batched_tokens,
            )
            for name, profile in profiles.items()
        },
    )


@dataclass(slots=True)
class Run:
    """One run: `go` lives through it."""

    swapping: Swapping
    calls: Sequence[_Call]
    now: float = 0.0
    box: Box = field(default_factory=Box)
    profiles: Mapping[str, Profile] = field(default_factory=_profiles)
    policy: Policy = field(init=False)
    boots: list[float] = field(default_factory=list)
    wrong: int = 0  # tokens a server made while its model was out
    _ledger: MemoryLedger = field(default_factory=MemoryLedger)
    _line: WaitingLine = field(default_factory=WaitingLine)
    _slots: dict[int, Slot] = field(default_factory=dict)
    _stored: deque[int] = field(default_factory=deque)  # jobs that no worker has
    _ahead: set[int] = field(default_factory=set)  # those that a worker has, without an answer
    _events: list[tuple[float, int, str, object]] = field(default_factory=list)
    _count: int = 0
    _stepping: set[str] = field(default_factory=set)
    _ready: frozenset[str] = frozenset()
    _left: int = 0

    def __post_init__(self) -> None:
        self.policy = _policy(self.profiles)

    @property
    def rules(self) -> BoxRules:
        """The rules of the box."""
        triggers = {"gemma": self.swapping.gemma, "qwen": self.swapping.qwen}
        return BoxRules(SwapRules("gemma", triggers, residency_s=self.swapping.residency_s))

    def go(self) -> None:
        """Live until every call has ended, or for `END_H` after the last has come."""
        until = self.calls[-1].at + 3600 * END_H
        engines = {name: Engine.of(profile) for name, profile in self.profiles.items()}
        for number, call in enumerate(self.calls):
            self._at(call.at, "call", number)
        self._left = len(self.calls)
        self._on(OwnershipTaken())
        self._at(0.0, "look", None)
        while self._left and self.now < until:
            self.now, _, what, subject = heappop(self._events)
            match what, subject:
                case "call", int(number):
                    if self.calls[number].model == "gemma":
                        self._stored.append(number)
                    else:
                        self._enter(number)
                case "step", str(name):
                    if not self._stepped(engines[name], name):
                        continue  # nobody's place came free
                case "order", Order() as order:
                    self._carried_out(order)
                case "look", _:
                    self._at(self.now + LOOK_S, "look", None)
                    self._look()
            self._claim()
            self._turn(engines)

    def _at(self, when: float, what: str, subject: object) -> None:
        self._count += 1
        heappush(self._events, (when, self._count, what, subject))

    # ------------------------------------------------------------ the box

    def _on(self, event: Event) -> None:
        self.box, order = advance(self.box, event, self.now, self.rules)
        if order is not None:
            takes_s = {Task.CHECK: CHECK_S, Task.START: SWAP_S}.get(order.task, 0.0)
            self._at(self.now + takes_s, "order", order)

    def _look(self) -> None:
        if not self.swapping.is_gated:
            self.box = replace(self.box, batch_at=-1.0)
        in_flight = {name: self._ledger.load(name).seqs for name in self.profiles}
        oldest_s = self.now - self.calls[self._stored[0]].at if self._stored else None
        lane = Lane("gemma/gemma_work", len(self._stored), 0, oldest_s=oldest_s)
        stored = stored_wants([lane], self.policy, self.box, self.profiles, self.now)
        wants = {name: one + stored[name] for name, one in self._line.wants(self.profiles).items()}
        self._on(Observation(in_flight, wants, ready=self._ready))

    def _carried_out(self, order: Order) -> None:
        match order.task:
            case Task.INSPECT:
                self._ready = frozenset({"gemma"})
                self._on(Inspected(order.number, self._ready))
                return
            case Task.STOP:
                self._ready -= {order.backend}
            case Task.START:
                self._ready |= {order.backend}
                self.boots.append(self.now)
        self._on(TaskEnded(order.number))

    # ------------------------------------------------------------ requests

    def _claim(self) -> None:
        while self._stored and len(self._ahead) < WorkerRules().ahead_max:
            number = self._stored.popleft()
            self._ahead.add(number)
            self._enter(number)

    def _enter(self, number: int) -> None:
        call, policy = self.calls[number], self.policy
        model = policy.model(call.model)
        assert model is not None
        (traffic_class,) = model.classes
        request = Request(Endpoint.CHAT, model.id, Prompt(), stream=True)
        estimate = Estimate(call.prompt, round(call.prompt * (1 + ESTIMATE_BAND)), CountMode.APPROXIMATE)
        demand = Demand.of(request, estimate, call.output)
        prefill_s = fastest_prefill_s(policy, traffic_class.pools[0], demand)
        ticket = Ticket(
            id=str(number),
            model=model.id,
            policy=policy,
            traffic_class=traffic_class,
            demand=demand,
            key=None,
            arrived_at=self.now,
            prefill_s=prefill_s,
            waited_s=self.now - call.at,
        )
        if self._line.enter(ticket, self.now) is not None:
            self._refuse(number)

    def _refuse(self, number: int) -> None:
        self.calls[number].is_refused = True
        self._ahead.discard(number)
        self._left -= 1

    def _turn(self, engines: Mapping[str, Engine]) -> None:
        views = {
            name: BackendView(
                backend,
                self._ledger.load(name),
                BackendStatus(state=State.UP, served_models=(name,)),
                away=objection(self.box, name),
            )
            for name, backend in self.policy.backends.items()
        }
        turn = self._line.turn(self.now, views)
        for refused in turn.refused:
            self._refuse(int(refused.id))
        for offer in turn.offers:
            candidate, number = offer.candidates[0], int(offer.ticket.id)
            slot = at_once(self._ledger.acquire(candidate.backend, candidate.claim, candidate.limits))
            assert isinstance(slot, Slot)
            self._slots[number] = slot
            self._line.started(offer.ticket.id, candidate.backend, self.now)
            call = self.calls[number]
            engines[candidate.backend].submit(number, call.prompt, call.output)
            self._step(engines[candidate.backend], candidate.backend)

    def _step(self, engine: Engine, name: str) -> None:
        if name in self._stepping:
            return
        batch = engine.schedule()
        if batch is not None:
            self._stepping.add(name)
            self._at(self.now + batch.duration_s, "step", name)

    def _stepped(self, engine: Engine, name: str) -> bool:
        self._stepping.discard(name)
        result = engine.complete()
        self.wrong += name not in self._ready
        for number in result.first:
            self._ahead.discard(number)
            at_once(self._ledger.answered(self._slots[number]))
        for number in result.finished:
            self.calls[number].done_at = self.now
            self._left -= 1
            at_once(self._ledger.release(self._slots.pop(number)))
            self._line.released(str(number), name, self.now)
        self._step(engine, name)
        return bool(result.finished or (result.first and self._stored))


def run(seed: int, case: tuple[float, float, int], policy: str, hours: float = HOURS) -> Outcome:
    """Return what came of one seed. `case`: jobs an hour, requests an hour, `max_tokens` of the jobs."""
    seconds, (jobs_per_h, qwen_per_h, job_tokens) = 3600 * hours, case
    calls = _calls(seed, seconds, {"gemma": jobs_per_h, "qwen": qwen_per_h}, job_tokens)
    subject = Run(POLICIES[policy], calls)
    subject.go()
    assert subject.wrong == 0, "a model was stopped while something ran on it"
    speed = subject.profiles["gemma"].perf.lone_tokens_per_s()
    jobs = [call for call in subject.calls if call.model == "gemma"]
    possible = [call for call in jobs if call.output / speed < LIMIT_S]
    asked = [call for call in subject.calls if call.model == "qwen"]
    took = sorted(call.took_s for call in asked if call.done_at is not None)
    return Outcome(
        jobs=len(jobs),
        within=sum(call.took_s <= LIMIT_S for call in possible) / max(1, len(possible)),
        impossible=len(jobs) - len(possible),
        longest_s=max((call.took_s for call in possible), default=0.0),
        qwen=len(took) / max(1, len(asked)),
        qwen_600=sum(one <= 600 for one in took) / max(1, len(asked)),
        qwen_p50_s=quantile(took, 0.5),
        qwen_p95_s=quantile(took, 0.95),
        swaps_per_h=sum(at < seconds for at in subject.boots) / hours,
    )


HEAD = (
    "| jobs/h, Qwen/h, job tokens | what starts a swap | jobs | ended within 60 min | longest, min "
    "| impossible | Qwen answered | within 10 min | p50 / p95 s | swaps/h, worst seed |"
)


def row(case: tuple[float, float, int], policy: str, found: Sequence[Outcome]) -> str:
    """Return one line of the table."""
    means = {one.name: fmean(getattr(outcome, one.name) for outcome in found) for one in fields(Outcome)}
    jobs = sum(outcome.jobs - outcome.impossible for outcome in found)
    within = sum(outcome.within * (outcome.jobs - outcome.impossible) for outcome in found)
    return (
        f"| {case[0]:g}, {case[1]:g}, {case[2]:,} | {policy} "
        f"| {jobs:.0f} | {within:.0f} ({within / jobs:.1%}) "
        f"| {max(outcome.longest_s for outcome in found) / 60:.0f} "
        f"| {sum(outcome.impossible for outcome in found):.0f} "
        f"| {means['qwen']:.1%} | {means['qwen_600']:.0%} "
        f"| {means['qwen_p50_s']:.0f} / {means['qwen_p95_s']:.0f} "
        f"| {means['swaps_per_h']:.1f}, {max(outcome.swaps_per_h for outcome in found):.1f} |"
    )


def main() -> None:
    """Run every case over the seeds and print the table."""
    parser = argparse.ArgumentParser(description="What swapping models on one box costs, in virtual time.")
    parser.add_argument("--seeds", default="501-508", help="a range, e.g. 501-508")
    parser.add_argument("--hours", type=float, default=HOURS, help="hours of arrivals")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes to run them in")
    arguments = parser.parse_args()
    first, _, last = arguments.seeds.partition("-")
    seeds = range(int(first), int(last or first) + 1)
    print(f"{machine()}\n`{shlex.join(['python', '-m', 'benchmarks.box', *sys.argv[1:]])}`\n")
    print(HEAD + "\n" + "|---" * (HEAD.count("|") - 1) + "|", flush=True)
    with ProcessPoolExecutor(arguments.jobs) as workers:
        waiting = [
            (case, policy, [workers.submit(run, seed, case, policy, arguments.hours) for seed in seeds])
            for case in CASES
            for policy in POLICIES
        ]
        for case, policy, futures in waiting:
            print(row(case, policy, [future.result() for future in futures]), flush=True)


if __name__ == "__main__":
    main()
