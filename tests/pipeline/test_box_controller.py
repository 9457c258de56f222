"""The keeper of a box and the jobs that wait in the store: counted once, and served in whole batches."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import anyio
import pytest
from redis.asyncio import Redis
from support.boards import EmulatedBoard
from support.redis_server import own_server

from gateway.core.backends import Backend, Capacity, KneeStep, Pool
from gateway.core.box import COMMAND_PAUSES_S, COMMAND_TRIES, INSPECT_S, Box, BoxRules, Quarantine, State
from gateway.core.box_report import note, written
from gateway.core.box_swaps import Swap, SwapCause
from gateway.core.decision import Exclusion
from gateway.core.errors import StoreUnavailable
from gateway.core.health import BackendStatus
from gateway.core.health import State as Health
from gateway.core.jobs import Lane, Queue
from gateway.core.load import Demand, Load
from gateway.core.policy import ModelPolicy, Policy, TrafficClass, Waiting
from gateway.core.swap_policy import Backlog, Cause, SwapRules, Trigger
from gateway.core.versions import bounds
from gateway.core.waiting import Refused, Ticket, WaitingLine
from gateway.pipeline import box_controller
from gateway.pipeline.box_controller import READY_S, STORE_LOST_S, BoxController, BoxSnapshot
from gateway.ports import Board, BoxBoard, JobStore, Slot
from gateway.store.boards import RedisBoard
from gateway.store.fallback import FallbackLedger
from gateway.store.memory import MemoryBoard, MemoryLedger
from gateway.store.redis import RedisLedger

PATIENT = Waiting(max_wait_s=36_000, ttft_target_s=2_700)
POLICY = Policy(
    models=tuple(
        ModelPolicy(name, (TrafficClass("work", (name,), waiting=PATIENT),)) for name in ("gemma", "qwen")
    ),
    pools={name: Pool(name, (name,)) for name in ("gemma", "qwen")},
    backends={
        name: Backend(name, f"http://{name}", Capacity(32_768, (KneeStep(None, 4),)))
        for name in ("gemma", "qwen")
    },
)
RULES = BoxRules(SwapRules("qwen", {"gemma": Trigger(4, 1500.0), "qwen": Trigger(4, 600.0)}, 300.0))
SLOW_RULES = replace(RULES, settle_s=3.0)
BOOT_S = {"gemma": 306.0, "qwen": 306.0}


@dataclass
class Machine:
    """The box itself, its health as everybody sees it, and the store of jobs: all obey at once."""

    now: float = 10_000.0
    inside: set[str] = field(default_factory=lambda: {"qwen"})
    strangers: set[str] = field(default_factory=set)  # what only seems to be in: another answers for it
    orders: list[str] = field(default_factory=list)
    lanes_there: Sequence[Lane] = ()
    drained_at: float | None = None
    is_away: bool = False
    unseen_since: float | None = None
    looked: anyio.Event = field(default_factory=anyio.Event)
    looks: int = 0
    stops: anyio.Event | None = None  # when what it is told to stop has stopped; None: at once
    answers: anyio.Event | None = None  # when the canary is answered; None: at once
    answer: str = ""  # what is wrong with its answer
    starts: anyio.Event | None = None  # when the next start goes through; None: at once
    failures: list[str] = field(default_factory=list)  # of the next start commands
    stop_failures: list[str] = field(default_factory=list)  # of the next stop commands
    fences: list[int] = field(default_factory=list)  # of the commands
    restarts: int = 0  # of the model that is in
    awaited: list[str] = field(default_factory=list)  # whose health begins anew
    out: list[tuple[str, str]] = field(default_factory=list)  # whom health checks leave alone, and why
    health: BackendStatus | None = None  # of what is in; None: it answers
    shared: dict[str, Any] = field(default_factory=dict)

    # ports.Switch
    async def is_resident(self, backend_id: str) -> bool:
        return backend_id in self.inside and backend_id not in self.strangers

    async def start(self, backend_id: str, fence: int) -> str:
        self.fences.append(fence)
        if self.failures:
            return self.failures.pop(0)
        if self.starts is not None:
            await self.starts.wait()
        self.inside.add(backend_id)
        self.orders.append(f"start {backend_id}")
        return ""

    async def stop(self, backend_id: str, fence: int) -> str:
        self.fences.append(fence)
        if self.stops is not None:
            await self.stops.wait()
        if self.stop_failures:
            return self.stop_failures.pop(0)
        self.inside.discard(backend_id)
        self.orders.append(f"stop {backend_id}")
        return ""

    async def ask(self, backend_id: str) -> str:
        if self.answers is not None:
            await self.answers.wait()
        return self.answer

    # ports.BoxFleet
    def statuses(self) -> Mapping[str, BackendStatus]:
        up = BackendStatus(state=Health.UP, served_models=("m",), restarts=self.restarts)
        out = BackendStatus()
        if self.unseen_since is not None:
            out = BackendStatus(state=Health.BOOTING, since=self.unseen_since)
        return {name: (self.health or up) if name in self.inside else out for name in ("gemma", "qwen")}

    async def wait_for(self, predicate: Callable[[Mapping[str, BackendStatus]], bool]) -> None:
        while not predicate(self.statuses()):
            await self.looked.wait()

    def put_out(self, backend_id: str, reason: str) -> None:
        self.out.append((backend_id, reason))

    def await_boot(self, backend_id: str, reason: str) -> None:
        assert backend_id in POLICY.backends
        self.awaited.append(backend_id)

    def _note_look(self) -> None:
        self.looks += 1
        self.looked.set()
        self.looked = anyio.Event()

    # what a keeper asks of ports.JobStore
    async def queue(self) -> Queue:
        await anyio.lowlevel.checkpoint()  # a store is never there at once
        self._note_look()
        if self.is_away:
            raise StoreUnavailable("away")
        return Queue(tuple(self.lanes_there), self.drained_at)


class Clock:
    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def now(self) -> float:
        return self._machine.now

    def wall(self) -> float:
        return self._machine.now


@dataclass
class Process:
    """A gateway process as far as boxes go."""

    machine: Machine
    name: str = "one"
    line: WaitingLine = field(default_factory=WaitingLine)
    board: BoxBoard | None = None
    ledger: MemoryLedger | FallbackLedger = field(default_factory=MemoryLedger)
    rules: BoxRules = RULES
    policy: Policy = POLICY
    changes: int = 0  # how often the line was told to look again
    swaps: list[tuple[str, Swap]] = field(default_factory=list)  # that it has completed

    def __post_init__(self) -> None:
        shared = EmulatedBoard(
            lambda: self.machine.now, process=self.name, ttl_s=1e9, shared=self.machine.shared
        )
        self.controller = BoxController(
            {"spark": self.rules},
            self.policy.backends,
            boot_s=BOOT_S,
            switch=self.machine,
            board=self.board or shared,
            fleet=self.machine,
            ledger=self.ledger,
            line=self.line,
            jobs=cast(JobStore, self.machine),
            policy=lambda: self.policy,
            clock=Clock(self.machine),
            on_change=self._note_change,
            on_swap=lambda box_id, swap: self.swaps.append((box_id, swap)),
        )

    def _note_change(self) -> None:
        self.changes += 1

    @property
    def snapshot(self) -> BoxSnapshot:
        return self.controller.snapshots()["spark"]

    @property
    def at(self) -> tuple[State, str]:
        return self.snapshot.box.state, self.snapshot.box.backend

    def brings(self, name: str, model: int, waited_s: float, waiting: Waiting = PATIENT) -> Refused | None:
        """Have a worker bring a job for the first or the second model to the line."""
        policy, now = POLICY.models[model], self.machine.now
        demand = Demand(seqs=1, prompt_tokens=100, total_tokens=200)
        work = replace(policy.classes[0], waiting=waiting)
        ticket = Ticket(name, policy.id, POLICY, work, demand, None, now, waited_s=waited_s)
        return self.line.enter(ticket, now)

    async def is_at(self, state: State, backend: str) -> None:
        await self.until(lambda: self.at == (state, backend))

    async def until(self, condition: Callable[[], bool]) -> None:
        with anyio.fail_after(10):
            while not condition():
                await self.another_look()

    async def is_due_to_swap(self) -> None:
        """Have jobs wait for the other model, until the one that is in has been in for long enough."""
        self.machine.lanes_there = [stored(4, 10.0)]
        await self.until(lambda: self.snapshot.plan.cause is Cause.JOBS)
        self.machine.now = self.snapshot.box.resident_since + 301

    async def another_look(self) -> None:
        await self.machine.looked.wait()


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(box_controller, "LOOK_S", 0.005)


@asynccontextmanager
async def run(*processes: Process) -> AsyncIterator[None]:
    async with anyio.create_task_group() as tasks:
        for process in processes:
            tasks.start_soon(process.controller.run)
        yield
        tasks.cancel_scope.cancel()


@asynccontextmanager
async def at_work(*processes: Process) -> AsyncIterator[None]:
    async with anyio.create_task_group() as tasks:
        for process in processes:
            tasks.start_soon(process.controller.run)
            await process.is_at(State.RESIDENT, "qwen")
        yield
        tasks.cancel_scope.cancel()


async def say(machine: Machine, box: Box) -> EmulatedBoard:
    """Have another process publish the state of the box: as its owner from then on, or again."""
    other = board_of(machine, "other")
    fence = (await other.sync("spark", fence=0, state="", note="")).fence
    await other.sync("spark", fence=fence, state=written(box, machine.now), note="")
    return other


def board_of(machine: Machine, process: str) -> EmulatedBoard:
    return EmulatedBoard(lambda: machine.now, process=process, ttl_s=1e9, shared=machine.shared)


def stored(count: int, oldest_s: float) -> Lane:
    return Lane("gemma/work", count, 0, oldest_s=oldest_s)


async def test_jobs_that_nobody_has_brought_to_a_line_start_a_swap() -> None:
    one = Process(Machine())
    async with at_work(one):
        one.machine.lanes_there = [stored(3, 10.0)]
        await one.until(lambda: one.snapshot.plan.cause is Cause.AGE)
        assert one.snapshot.stored["gemma"] == Backlog(3, one.machine.now - 10)
        # Nothing but the residency holds it from here on.
        one.machine.lanes_there = [stored(4, 10.0)]
        await one.until(lambda: one.snapshot.plan.cause is Cause.JOBS)
        came_in = one.snapshot.box.resident_since
        assert one.snapshot.plan.at == came_in + 300
        one.machine.now = came_in + 299
        await one.another_look()
        assert (one.at, one.machine.orders) == ((State.RESIDENT, "qwen"), [])
        one.machine.now = came_in + 301
        await one.is_at(State.RESIDENT, "gemma")
        assert one.machine.orders == ["stop qwen", "start gemma"]


async def test_a_process_that_stood_still_goes_on_with_the_swap_that_only_it_can_make() -> None:
    machine = Machine(stops=anyio.Event())
    one = Process(machine, board=MemoryBoard())
    async with at_work(one):
        await one.is_due_to_swap()
        await one.is_at(State.STOPPING, "qwen")
        machine.now += 20
        await one.another_look()
        await one.another_look()
        assert machine.stops is not None
        machine.stops.set()
        await one.is_at(State.RESIDENT, "gemma")
        assert machine.orders == ["stop qwen", "start gemma"]


async def test_a_model_is_stopped_once_every_process_knows_that_it_drains() -> None:
    machine = Machine()
    one, other = Process(machine, rules=SLOW_RULES), board_of(machine, "other")
    async with at_work(one):
        resident = one.snapshot.box
        await other.sync("spark", fence=0, state="", note=note({}, resident, machine.now))
        await one.is_due_to_swap()
        await one.is_at(State.DRAINING, "qwen")
        for _ in range(3):  # it may be sending requests there, which nobody has seen
            machine.now += 4
            await one.another_look()
        assert (one.at, machine.orders) == ((State.DRAINING, "qwen"), [])
        assert "a gateway that has not said" in one.snapshot.waits_for
        slot = one.ledger.acquire_at_once("qwen", Load(seqs=2), Load(seqs=4))
        assert slot is not None
        assert one.snapshot.waits_for == "2 running sequences"
        await one.ledger.release(slot)
        await other.sync("spark", fence=0, state="", note=note({}, one.snapshot.box, machine.now))
        await one.until(lambda: "before they knew" in one.snapshot.waits_for)
        machine.now += SLOW_RULES.settle_s
        await one.is_at(State.RESIDENT, "gemma")
        assert machine.orders == ["stop qwen", "start gemma"]
        assert one.snapshot.waits_for == ""


async def test_what_others_knew_of_a_drain_before_the_board_was_away_is_asked_again() -> None:
    machine = Machine()
    one, other = Process(machine, board=BoardAway(machine), rules=SLOW_RULES), board_of(machine, "other")
    slot = await one.ledger.acquire("qwen", Load(seqs=1), Load(seqs=1))
    assert isinstance(slot, Slot)
    async with at_work(one):
        resident = one.snapshot.box
        await one.is_due_to_swap()
        await one.is_at(State.DRAINING, "qwen")
        await other.sync("spark", fence=0, state="", note=note({}, one.snapshot.box, machine.now))
        await one.another_look()
        machine.is_away = True
        await one.another_look()
        await one.another_look()
        # Meanwhile the other one could not know that it drains, and used it again.
        await other.sync("spark", fence=0, state="", note=note({}, resident, machine.now))
        await one.ledger.release(slot)
        machine.is_away = False
        for _ in range(3):
            machine.now += SLOW_RULES.settle_s
            await one.another_look()
        assert (one.at, machine.orders) == ((State.DRAINING, "qwen"), [])


async def test_what_others_knew_of_a_drain_before_the_box_was_another_gateways_is_asked_again() -> None:
    machine = Machine()
    one, third = Process(machine, rules=SLOW_RULES), board_of(machine, "third")
    slot = await one.ledger.acquire("qwen", Load(seqs=1), Load(seqs=1))
    assert isinstance(slot, Slot)
    async with at_work(one):
        resident = one.snapshot.box
        await one.is_due_to_swap()
        await one.is_at(State.DRAINING, "qwen")
        draining = one.snapshot.box
        await third.sync("spark", fence=0, state="", note=note({}, draining, machine.now))
        await one.another_look()
        await board_of(machine, "one").leave("spark")
        other = await say(machine, draining)
        await third.sync("spark", fence=0, state="", note=note({}, resident, machine.now))
        await one.until(lambda: not one.snapshot.is_owner)
        assert one.snapshot.waits_for == "1 running sequence"
        await one.ledger.release(slot)
        assert one.snapshot.waits_for == ""  # of the owner, which this one is not
        await other.leave("spark")
        await one.until(lambda: one.snapshot.is_owner)
        for _ in range(3):
            machine.now += SLOW_RULES.settle_s
            await one.another_look()
        assert one.snapshot.is_owner
        assert (one.at, machine.orders) == ((State.DRAINING, "qwen"), [])


async def test_what_others_knew_of_a_drain_is_asked_again_by_an_owner_that_stood_still_meanwhile() -> None:
    machine = Machine()
    board = BoardThatStandsStill(machine)
    one, third = Process(machine, board=board, rules=SLOW_RULES), board_of(machine, "third")
    slot = await one.ledger.acquire("qwen", Load(seqs=1), Load(seqs=1))
    assert isinstance(slot, Slot)
    async with at_work(one):
        resident, fence = one.snapshot.box, one.snapshot.fence
        await one.is_due_to_swap()
        await one.is_at(State.DRAINING, "qwen")
        draining = one.snapshot.box
        await third.sync("spark", fence=0, state="", note=note({}, draining, machine.now))
        await one.until(lambda: "1 running" in one.snapshot.waits_for)
        board.goes_on = anyio.Event()
        await board_of(machine, "one").leave("spark")
        other = await say(machine, draining)
        await third.sync("spark", fence=0, state="", note=note({}, resident, machine.now))
        await other.leave("spark")
        await one.ledger.release(slot)
        board.goes_on.set()
        await one.until(lambda: one.snapshot.fence > fence)
        for _ in range(3):
            machine.now += SLOW_RULES.settle_s
            await one.another_look()
        assert (one.at, machine.orders) == ((State.DRAINING, "qwen"), [])


async def test_no_model_is_stopped_while_what_other_gateways_have_in_flight_is_unknown(
    tmp_path: Path,
) -> None:
    with own_server("valkey-9", tmp_path) as server:
        shared = RedisLedger(server.url, refresh_s=0.005, command_s=0.1)
        ledger = FallbackLedger(shared, replicas_min=1)
        other = RedisLedger(server.url)
        slot = await other.acquire("qwen", Load(seqs=1), Load(seqs=4))
        assert isinstance(slot, Slot)
        one = Process(Machine(), ledger=ledger)
        async with at_work(one), anyio.create_task_group() as tasks:
            tasks.start_soon(ledger.run)
            await one.until(lambda: ledger.others("qwen").seqs == 1)
            await one.is_due_to_swap()
            await one.until(lambda: one.snapshot.waits_for == "1 running sequence")
            server.stall()
            await one.until(lambda: ledger.keeps_to_part)  # only of the ledger's store: the board answers
            for _ in range(3):
                await one.another_look()
            assert (one.at, one.machine.orders) == ((State.DRAINING, "qwen"), [])
            assert one.snapshot.waits_for.startswith("the store, which has not said")
            server.resume()
            await one.until(lambda: one.snapshot.waits_for == "1 running sequence")
            await other.release(slot)
            await one.is_at(State.RESIDENT, "gemma")
            tasks.cancel_scope.cancel()
        await other.aclose()
        await ledger.aclose()


async def test_a_gateway_that_ends_leaves_its_box_to_the_others_at_once() -> None:
    machine = Machine()
    async with at_work(Process(machine)):
        pass
    two = Process(machine, "two")
    async with at_work(two):
        await two.until(lambda: two.snapshot.is_owner)


async def test_a_box_is_left_before_its_gateway_says_that_it_has_ended() -> None:
    machine = Machine()
    board = SlowToLeave(machine)
    one = Process(machine, board=board)
    with anyio.fail_after(10):
        await one.controller.wait_ended()  # it does not run
        async with anyio.create_task_group() as waiting:
            ended = anyio.Event()

            async def wait() -> None:
                await one.controller.wait_ended()
                ended.set()

            async with at_work(one):
                waiting.start_soon(wait)
                for _ in range(3):
                    await one.another_look()
                assert not ended.is_set()
                board.leaves.set()
            await ended.wait()
    assert machine.shared["spark"].owner == ""


async def test_a_board_that_does_not_answer_keeps_no_gateway_from_ending(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(box_controller, "LEAVE_S", 0.01)
    machine = Machine()
    with anyio.fail_after(10):
        async with at_work(Process(machine, board=SlowToLeave(machine))):
            pass
    assert machine.shared["spark"].owner == "one"  # until it expires


async def test_an_order_that_has_been_carried_out_is_not_waited_for_until_the_next_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(box_controller, "LOOK_S", 3600.0)
    one = Process(Machine())
    async with at_work(one):  # it has been found, and asked
        assert one.machine.looks < 10


async def test_the_line_looks_again_only_when_something_about_a_box_has_changed() -> None:
    one = Process(Machine())
    async with at_work(one):
        await one.another_look()
        before = one.changes
        assert before > 0
        for _ in range(3):
            await one.another_look()
        assert one.changes == before


async def test_no_model_serves_before_it_is_known_what_a_box_holds() -> None:
    assert set(Process(Machine()).controller.objections()) == {"gemma", "qwen"}


async def test_health_checks_are_told_why_they_shall_leave_a_model_alone() -> None:
    machine = Machine()
    one = Process(machine)
    async with at_work(one):
        await one.another_look()
        await one.another_look()
        assert machine.out[-1:] == [("gemma", "the box spark is for another model now")]
        assert len(machine.out) == len(set(machine.out))
        machine.failures = ["exit status 7"] * COMMAND_TRIES
        await one.is_due_to_swap()
        while "gemma" not in one.snapshot.box.quarantine:
            machine.now += max(COMMAND_PAUSES_S)
            await one.another_look()
        await one.is_at(State.RESIDENT, "qwen")
        await one.another_look()
        assert ("gemma", "in quarantine: cannot be started: exit status 7") in machine.out


async def test_a_swap_is_counted_by_the_gateway_that_completes_it() -> None:
    machine = Machine()
    one, two = Process(machine), Process(machine, "two")
    async with anyio.create_task_group() as tasks:
        async with at_work(one):
            tasks.start_soon(two.controller.run)
            await two.is_at(State.RESIDENT, "qwen")
            await one.is_due_to_swap()
            await one.is_at(State.RESIDENT, "gemma")
            await two.is_at(State.RESIDENT, "gemma")
            [(box_id, swap)] = one.swaps
            assert (box_id, swap.backend, swap.cause) == ("spark", "gemma", SwapCause.JOBS)
        await two.until(lambda: two.snapshot.is_owner)
        await two.another_look()
        assert (len(one.swaps), two.swaps) == (1, [])
        tasks.cancel_scope.cancel()


async def test_a_gateway_that_takes_a_box_over_in_a_swap_counts_it() -> None:
    machine = Machine()
    other = await say(
        machine, Box(State.DRAINING, machine.now, backend="qwen", target="gemma", cause=Cause.AGE)
    )
    one = Process(machine)
    async with run(one):
        await one.is_at(State.DRAINING, "qwen")
        machine.inside = {"gemma"}
        await say(machine, Box(State.CHECKING, machine.now, backend="gemma", cause=Cause.AGE))
        await one.is_at(State.CHECKING, "gemma")
        await other.leave("spark")
        await one.is_at(State.RESIDENT, "gemma")
        assert [(swap.backend, swap.cause) for _, swap in one.swaps] == [("gemma", SwapCause.AGE)]


async def a_start_hangs_beyond_its_budget(one: Process) -> None:
    await one.is_due_to_swap()
    await one.is_at(State.BOOTING, "gemma")
    await one.another_look()
    one.machine.now += RULES.boot_budget_s
    await one.is_at(State.STOPPING, "gemma")


async def test_what_waits_behind_a_command_is_not_done_for_a_box_that_is_another_gateways_by_then() -> None:
    machine = Machine(starts=anyio.Event())
    one = Process(machine)
    async with at_work(one):
        await a_start_hangs_beyond_its_budget(one)
        await one.another_look()
        await board_of(machine, "one").leave("spark")
        await say(machine, one.snapshot.box)
        await one.until(lambda: not one.snapshot.is_owner)
        assert machine.starts is not None
        machine.starts.set()
        for _ in range(3):
            await one.another_look()
        assert machine.orders == ["stop qwen", "start gemma"]


@pytest.mark.parametrize(
    "health",
    [
        BackendStatus(state=Health.UP),
        BackendStatus(state=Health.UP, served_models=("m",), down_since=1.0),
        BackendStatus(state=Health.DOWN, served_models=("m",)),
        BackendStatus(state=Health.UP, served_models=("m",), is_asleep=True),
    ],
    ids=["unknown-models", "fails", "down", "asleep"],
)
async def test_a_model_whose_health_is_in_doubt_has_not_been_seen(health: BackendStatus) -> None:
    machine = Machine(health=health)
    await say(machine, Box(State.RESIDENT, machine.now, backend="qwen"))
    one = Process(machine)
    async with run(one):
        await one.is_at(State.RESIDENT, "qwen")
        await one.another_look()
        assert one.controller.objections()["qwen"][0] is Exclusion.SWAPPED_OUT
        machine.health = None
        await one.until(lambda: "qwen" not in one.controller.objections())


async def test_a_command_that_fails_is_logged_before_it_is_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = Process(Machine(failures=["exit status 7"]))
    async with at_work(one):
        await one.is_due_to_swap()
        await one.until(lambda: one.snapshot.waits_for == "another try: exit status 7")
        assert one.snapshot.box.reason == "4 requests wait for gemma; it has to boot"
        said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert said == ["box spark: cannot start gemma (try 1 of 3): exit status 7"]
        one.machine.now += COMMAND_PAUSES_S[0]
        await one.is_at(State.RESIDENT, "gemma")


async def test_a_start_that_hangs_beyond_the_budget_is_not_overtaken_by_what_comes_next() -> None:
    machine = Machine(starts=anyio.Event())
    one = Process(machine)
    async with at_work(one):
        await a_start_hangs_beyond_its_budget(one)
        assert "gemma" in one.snapshot.box.quarantine
        await one.another_look()
        await one.another_look()
        assert machine.orders == ["stop qwen"]
        assert machine.starts is not None
        machine.starts.set()
        await one.is_at(State.RESIDENT, "qwen")
        assert machine.orders == ["stop qwen", "start gemma", "stop gemma", "start qwen"]


async def test_a_model_that_died_before_who_has_the_box_now_saw_it_is_brought_back() -> None:
    machine = Machine()
    one = Process(machine)
    async with at_work(one):
        # It had answered another gateway, which is gone, too; this one knows only that it was being started.
        machine.unseen_since = one.snapshot.box.resident_since - 5
        machine.inside.clear()
        machine.now = one.snapshot.box.resident_since + READY_S - 1
        await one.another_look()
        await one.another_look()
        assert (one.at, machine.orders) == ((State.RESIDENT, "qwen"), [])
        machine.now += 2
        await one.until(lambda: machine.orders == ["stop gemma", "stop qwen", "start qwen"])
        await one.is_at(State.RESIDENT, "qwen")


async def test_a_model_that_dies_as_soon_as_it_is_in_is_brought_back_at_once() -> None:
    machine = Machine()
    one = Process(machine)
    async with at_work(one):
        machine.now += 1
        machine.inside, machine.unseen_since = set(), machine.now
        await one.until(lambda: "start qwen" in machine.orders)
        assert one.snapshot.box.restarts == {"qwen": (machine.now,)}


async def test_a_model_that_only_the_owner_has_seen_yet_is_waited_for() -> None:
    machine = Machine()
    await say(machine, Box(State.RESIDENT, machine.now, backend="gemma"))
    seen, unseen = Process(machine), Process(machine, "two")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(unseen.controller.run)
        await unseen.is_at(State.RESIDENT, "gemma")
        await unseen.another_look()
        assert unseen.controller.objections()["gemma"][0] is Exclusion.SWAPPED_OUT
        # A fault, from then on: what is known of its health decides.
        machine.now += READY_S
        await unseen.until(lambda: "gemma" not in unseen.controller.objections())

        tasks.start_soon(seen.controller.run)
        await seen.is_at(State.RESIDENT, "gemma")
        await seen.another_look()
        assert seen.controller.objections()["gemma"][0] is Exclusion.SWAPPED_OUT
        before = seen.changes
        machine.inside = {"gemma"}
        await seen.until(lambda: "gemma" not in seen.controller.objections())
        assert seen.changes > before  # who waits for it can start
        # From then on, a probe that fails is a matter of its health alone.
        machine.inside = set()
        await seen.another_look()
        await seen.another_look()
        assert "gemma" not in seen.controller.objections()

        await say(machine, Box(State.RESIDENT, machine.now, backend="qwen"))
        await seen.is_at(State.RESIDENT, "qwen")
        await seen.another_look()
        assert seen.controller.objections()["qwen"][0] is Exclusion.SWAPPED_OUT
        tasks.cancel_scope.cancel()


OUT_OF_ORDER = {"gemma": Quarantine("canary failed", 10_000.0)}


@pytest.mark.parametrize(
    ("box", "level", "is_at_work", "awaited"),
    [
        (Box(State.DRAINING, backend="gemma", target="qwen"), "INFO", True, []),
        (Box(State.DRAINING, backend="gemma", target="qwen", quarantine=OUT_OF_ORDER), "WARNING", True, []),
        (Box(State.STOPPING, backend="gemma", target="qwen"), "INFO", True, []),
        (Box(State.BOOTING, backend="qwen"), "INFO", True, ["qwen"]),
        (Box(State.BOOTING, backend="gemma"), "INFO", True, ["gemma"]),
        (Box(State.CHECKING, backend="qwen"), "INFO", True, ["qwen"]),
        (Box(State.FAILED), "ERROR", False, ["qwen"]),
    ],
    ids=["drains", "quarantine", "stops", "boots", "boots-again", "is-checked", "failed"],
)
async def test_what_the_owner_says_of_a_box_is_shown_by_the_others(
    caplog: pytest.LogCaptureFixture, box: Box, level: str, is_at_work: bool, awaited: list[str]
) -> None:
    caplog.set_level("INFO")
    machine = Machine()
    await say(machine, Box(State.RESIDENT, machine.now, backend="gemma"))
    one = Process(machine)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(one.controller.run)
        await one.is_at(State.RESIDENT, "gemma")
        await one.another_look()
        caplog.clear()
        await say(machine, box)
        await one.is_at(box.state, box.backend)
        await one.another_look()
        await one.another_look()
        assert [record.levelname for record in caplog.records] == [level]
        assert one.controller.can_serve_later is is_at_work
        assert machine.awaited == awaited
        tasks.cancel_scope.cancel()


async def test_who_cannot_wait_for_a_boot_is_refused_at_once() -> None:
    machine = Machine()
    await say(machine, Box(State.BOOTING, machine.now - 100, backend="gemma"))
    one = Process(machine)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(one.controller.run)
        await one.is_at(State.BOOTING, "gemma")
        await one.another_look()
        left_s = BOOT_S["gemma"] - 100
        assert one.brings("a", 0, 0.0, replace(PATIENT, max_wait_s=left_s - 1)) is not None
        assert one.brings("b", 0, 0.0, replace(PATIENT, max_wait_s=left_s + 1)) is None
        tasks.cancel_scope.cancel()


async def test_only_a_restart_of_the_gateway_lifts_a_quarantine() -> None:
    machine = Machine()
    old = Process(machine, "old")
    quarantine = {"gemma": Quarantine("canary failed", machine.now + 10)}
    machine.now += 20
    new = Process(machine, "new")
    other = await say(machine, Box(State.RESIDENT, machine.now, backend="qwen", quarantine=quarantine))
    async with anyio.create_task_group() as tasks:
        for one, objection in ((old, Exclusion.UNHEALTHY), (new, Exclusion.SWAPPED_OUT)):
            await other.leave("spark")
            scope = anyio.CancelScope()

            async def run_one(process: Process = one, scope: anyio.CancelScope = scope) -> None:
                with scope:
                    await process.controller.run()

            tasks.start_soon(run_one)
            await one.until(lambda one=one: one.snapshot.is_owner)  # type: ignore[misc]
            await one.is_at(State.RESIDENT, "qwen")
            assert one.controller.objections()["gemma"][0] is objection
            scope.cancel()
            await one.controller.wait_ended()


@pytest.mark.parametrize("is_lost", [False, True], ids=["as-it-was", "with-nothing-in-the-store"])
async def test_a_gateway_that_has_its_box_back_serves_on_without_another_canary(is_lost: bool) -> None:
    machine = Machine()
    one = Process(machine)
    async with at_work(one):
        number = one.snapshot.box.number
        await board_of(machine, "one").leave("spark")  # as after a pause of the whole process
        if is_lost:
            machine.shared["spark"].state = ""
        await one.until(lambda: one.snapshot.fence == 2)
        assert (one.at, one.snapshot.box.number) == ((State.RESIDENT, "qwen"), number)


@pytest.mark.parametrize(
    "then",
    [
        pytest.param((State.STOPPING, "qwen"), id="stopping"),
        pytest.param((State.BOOTING, "gemma"), id="booting"),
    ],
)
async def test_an_order_in_an_old_snapshot_of_the_store_is_not_repeated(
    tmp_path: Path, then: tuple[State, str]
) -> None:
    machine = Machine(stops=anyio.Event(), starts=anyio.Event())
    waits = {State.STOPPING: machine.stops, State.BOOTING: machine.starts}
    with own_server("valkey-9", tmp_path) as server:
        boards = [RedisBoard(server.url, prefix="gw", owner=name) for name in ("one", "two")]
        one, two = (
            Process(machine, name, board=board) for name, board in zip(("one", "two"), boards, strict=True)
        )
        async with at_work(one), Redis.from_url(server.url) as redis, anyio.create_task_group() as tasks:
            tasks.start_soon(two.controller.run)
            await one.is_due_to_swap()
            snapshot: bytes | str | None = None
            for state, backend in ((State.STOPPING, "qwen"), (State.BOOTING, "gemma")):
                await one.is_at(state, backend)
                await two.is_at(state, backend)
                if (state, backend) == then:
                    snapshot = await redis.get("{gw:box:spark}:state")
                event = waits[state]
                assert event is not None
                event.set()
            await one.is_at(State.RESIDENT, "gemma")
            machine.lanes_there = [Lane("qwen/work", 4, 0, oldest_s=10.0)]
            machine.now += 301
            await one.is_at(State.RESIDENT, "qwen")
            await two.is_at(State.RESIDENT, "qwen")
            machine.lanes_there = []
            swapped = ["stop qwen", "start gemma", "stop gemma", "start qwen"]
            assert machine.orders == swapped

            fence = one.snapshot.fence
            async with redis.pipeline() as restart:  # what was leased then is nobody's any more
                assert snapshot is not None
                restart.set("{gw:box:spark}:state", snapshot)
                restart.delete("{gw:box:spark}:owner", "{gw:box:spark}:notes")
                await restart.execute()
            await one.until(lambda: max(one.snapshot.fence, two.snapshot.fence) > fence)
            for _ in range(5):
                await one.another_look()
            await one.is_at(State.RESIDENT, "qwen")
            await two.is_at(State.RESIDENT, "qwen")
            assert machine.orders == swapped
            tasks.cancel_scope.cancel()
        for board in boards:
            await board.aclose()


async def test_what_a_replica_that_lags_says_of_a_box_is_not_believed_by_who_takes_it_over() -> None:
    machine = Machine(inside=set())
    was = Box(
        State.RESIDENT, machine.now - 300, backend="qwen", resident_since=machine.now - 300, number=7, fence=1
    )
    boots = Box(State.BOOTING, machine.now, backend="gemma", number=9, fence=1)
    other, one = await say(machine, boots), Process(machine)
    async with run(one):
        await one.is_at(State.BOOTING, "gemma")
        await other.sync("spark", fence=1, state=written(was, machine.now), note="")
        for _ in range(3):  # its owner has died with the server that it had told
            await one.another_look()
        assert one.at == (State.BOOTING, "gemma")
        await other.leave("spark")
        await one.is_at(State.RESIDENT, "gemma")
        assert machine.orders == ["start gemma"]


async def test_a_drain_is_known_though_a_replica_that_lags_has_not_heard_of_it() -> None:
    machine = Machine()
    one, other = Process(machine, board=BoardAway(machine), rules=SLOW_RULES), Process(machine, "other")
    async with at_work(one, other):
        was = machine.shared["spark"].state
        await one.is_due_to_swap()
        await other.is_at(State.DRAINING, "qwen")
        machine.is_away = True  # for the owner
        machine.shared["spark"].state = was
        for _ in range(6):  # of either process
            await other.another_look()
        assert other.at == (State.DRAINING, "qwen")


async def test_a_drain_that_was_called_off_without_a_store_goes_on_as_its_owner_says() -> None:
    machine = Machine()
    drains = Box(State.DRAINING, machine.now, backend="qwen", target="gemma", number=7, fence=1)
    other, one = await say(machine, drains), Process(machine, board=BoardAway(machine))
    async with run(one):
        await one.is_at(State.DRAINING, "qwen")
        machine.is_away = True
        await one.until(lambda: one.snapshot.waits_for == "the store, which does not answer")
        machine.now += STORE_LOST_S + 1
        await one.is_at(State.RESIDENT, "qwen")
        machine.is_away = False
        await other.sync("spark", fence=1, state=written(drains, machine.now), note="")
        await one.is_at(State.DRAINING, "qwen")


async def test_a_store_that_numbers_ownerships_anew_is_believed() -> None:
    machine = Machine()
    box = Box(State.RESIDENT, machine.now, backend="qwen", number=9, fence=2)
    other, one = await say(machine, box), Process(machine)
    async with run(one):
        await one.is_at(State.RESIDENT, "qwen")
        drains = replace(box, state=State.DRAINING, target="gemma", number=1, fence=1)
        await other.sync("spark", fence=1, state=written(drains, machine.now), note="")
        await one.is_at(State.DRAINING, "qwen")


async def test_a_model_that_restarts_by_itself_is_checked_before_it_serves_on() -> None:
    machine = Machine()
    one = Process(machine)
    async with at_work(one):
        await one.another_look()
        machine.answers = anyio.Event()
        machine.restarts += 1  # of which the probes have seen nothing else
        await one.is_at(State.CHECKING, "qwen")
        assert "qwen" in one.controller.objections()
        machine.answers.set()
        await one.is_at(State.RESIDENT, "qwen")


async def test_a_report_of_what_was_ordered_under_an_earlier_fence_ends_no_later_order() -> None:
    machine = Machine(stops=anyio.Event())
    one = Process(machine)
    async with at_work(one):
        await one.is_due_to_swap()
        await one.is_at(State.STOPPING, "qwen")
        stop = one.snapshot.box.number
        # The store was lost, and another gateway had the box for a moment: numbers of orders come again.
        machine.lanes_there, machine.answers = [], anyio.Event()
        await board_of(machine, "one").leave("spark")
        other = await say(machine, Box(State.CHECKING, machine.now, backend="qwen", number=stop - 1))
        await other.leave("spark")
        await one.is_at(State.CHECKING, "qwen")
        assert one.snapshot.box.number == stop
        assert machine.stops is not None
        machine.stops.set()
        for _ in range(3):
            await one.another_look()
        assert one.at == (State.CHECKING, "qwen")
        machine.inside.add("qwen")
        machine.answers.set()
        await one.is_at(State.RESIDENT, "qwen")
        assert one.snapshot.fence == 3

        machine.lanes_there = [stored(4, 10.0)]
        machine.now += 301
        await one.is_at(State.RESIDENT, "gemma")
        assert machine.fences == [1, 3, 3]


@pytest.mark.parametrize(
    ("is_watched", "found"),
    [
        pytest.param(False, "gemma", id="after-an-outage"),
        pytest.param(True, "qwen", id="beside-another"),
    ],
)
async def test_a_gateway_that_is_the_first_to_be_back_finds_out_what_is_in(
    is_watched: bool, found: str
) -> None:
    machine = Machine(inside={"gemma"})
    last, other = board_of(machine, "last"), board_of(machine, "other")
    resident = written(Box(State.RESIDENT, machine.now, backend="qwen"), machine.now)
    fence = (await last.sync("spark", fence=0, state="", note="")).fence
    await last.sync("spark", fence=fence, state=resident, note="")
    if is_watched:
        await other.sync("spark", fence=0, state="", note="")
    await last.leave("spark")
    one = Process(machine)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(one.controller.run)
        await one.is_at(State.RESIDENT, found)
        assert machine.orders == []
        tasks.cancel_scope.cancel()


async def test_who_takes_over_a_box_that_it_has_watched_goes_on_serving() -> None:
    machine = Machine()
    one, two = Process(machine, "one"), Process(machine, "two")
    async with anyio.create_task_group() as tasks:
        async with at_work(one):
            tasks.start_soon(two.controller.run)
            await two.is_at(State.RESIDENT, "qwen")
            machine.now += 1
            assert one.ledger.acquire_at_once("qwen", Load(seqs=1), Load(seqs=1)) is not None
            await two.until(lambda: two.snapshot.box.served_at == machine.now)
            machine.answers = anyio.Event()  # nobody would be served meanwhile
        await two.until(lambda: two.snapshot.is_owner)
        for _ in range(3):
            await two.another_look()
        assert two.at == (State.RESIDENT, "qwen")
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("is_lost", [False, True], ids=["as-it-was", "with-nothing-in-the-store"])
async def test_a_gateway_that_is_back_within_the_ownership_of_the_one_that_died_has_not_watched(
    is_lost: bool,
) -> None:
    machine = Machine(answers=anyio.Event())
    last = EmulatedBoard(lambda: machine.now, process="last", ttl_s=15, shared=machine.shared)
    fence = (await last.sync("spark", fence=0, state="", note="")).fence
    resident = Box(State.RESIDENT, machine.now, backend="qwen")
    await last.sync("spark", fence=fence, state=written(resident, machine.now), note="")
    one = Process(machine)
    async with run(one):
        await one.is_at(State.RESIDENT, "qwen")
        for _ in range(3):
            machine.now += 4
            await one.another_look()
        assert (one.at, one.snapshot.is_owner) == ((State.RESIDENT, "qwen"), False)
        if is_lost:
            machine.shared["spark"].state = ""
        machine.now += 4
        await one.is_at(State.CHECKING, "qwen")
        assert one.snapshot.is_owner


async def test_a_box_grows_older_while_its_owner_is_silent() -> None:
    machine = Machine()
    since = machine.now - 100
    other = await say(machine, Box(State.RESIDENT, since, backend="qwen", resident_since=since))
    one = Process(machine)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(one.controller.run)
        await one.is_at(State.RESIDENT, "qwen")
        await say(machine, Box(State.RESIDENT, since, backend="qwen", resident_since=since, swaps=1))
        await one.until(lambda: one.snapshot.box.swaps == 1)
        machine.now += 15  # it has died: its ownership expires
        for _ in range(2):
            await one.another_look()
        assert (one.snapshot.box.since, one.snapshot.box.resident_since) == (since, since)
        await other.leave("spark")
        await one.until(lambda: one.snapshot.is_owner)
        assert (one.snapshot.box.since, one.snapshot.box.resident_since) == (since, since)
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("is_watched", [False, True])
async def test_a_boot_that_another_gateway_began_says_nothing_of_how_long_the_next_takes(
    is_watched: bool,
) -> None:
    machine = Machine(inside=set())
    booting = Box(State.BOOTING, machine.now, backend="qwen", boot_s={"qwen": 280.0})
    other = await say(machine, booting)
    if not is_watched:
        machine.now += 299  # it died at once, and nobody was there
        await other.leave("spark")
    one = Process(machine)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(one.controller.run)
        if is_watched:
            await one.is_at(State.BOOTING, "qwen")
            machine.now += 299  # it was silent until its ownership expired
            await other.leave("spark")
        await one.is_at(State.RESIDENT, "qwen")
        assert machine.orders == ["start qwen"]
        assert (one.snapshot.box.boot_s, one.snapshot.box.swaps) == ({"qwen": 280.0}, 1)

        machine.lanes_there = [stored(4, 10.0)]
        machine.now += 301
        await one.is_at(State.RESIDENT, "gemma")
        assert set(one.snapshot.box.boot_s) == {"qwen", "gemma"}
        tasks.cancel_scope.cancel()


async def test_a_box_that_a_gateway_of_another_configuration_has_is_read_and_later_taken_over() -> None:
    machine = Machine()
    other = EmulatedBoard(lambda: machine.now, process="other", ttl_s=60, shared=machine.shared)
    phi = written(Box(State.BOOTING, machine.now, backend="phi"), machine.now)
    fence = (await other.sync("spark", fence=0, state="", note="")).fence
    await other.sync("spark", fence=fence, state=phi, note="")
    one = Process(machine)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(one.controller.run)
        await one.is_at(State.BOOTING, "phi")
        assert set(one.controller.objections()) == {"gemma", "qwen"}
        await other.leave("spark")
        await one.is_at(State.RESIDENT, "qwen")
        assert machine.orders == []
        tasks.cancel_scope.cancel()


async def test_what_the_store_holds_is_counted_once_however_many_gateways_see_it() -> None:
    machine = Machine()
    processes = [Process(machine, name) for name in ("one", "two", "three")]
    one, two, _ = processes
    async with at_work(*processes):
        assert one.brings("a", 0, waited_s=50.0) is None
        assert two.brings("b", 0, waited_s=60.0) is None
        machine.lanes_there = [stored(1, 40.0)]
        await one.until(lambda: [each.snapshot.wants["gemma"].count for each in processes] == [2, 2, 2])
        for process in processes:
            assert process.snapshot.stored["gemma"].count == 1
            assert process.snapshot.wants["gemma"].oldest_at == machine.now - 60
            # Three of four: counted twice, the store's would make it enough.
            assert process.snapshot.plan.cause is Cause.AGE


async def test_jobs_that_nobody_may_take_are_no_reason_to_swap() -> None:
    machine = Machine(drained_at=1.0)
    one = Process(machine)
    async with at_work(one):
        machine.now += 1000
        machine.lanes_there = [stored(50, 900.0)]
        await one.another_look()
        assert one.snapshot.stored["gemma"].count == 0
        assert one.snapshot.plan.target == ""
        machine.drained_at = None
        await one.is_at(State.RESIDENT, "gemma")


async def test_jobs_that_the_model_that_has_just_come_in_can_serve_do_not_call_for_another() -> None:
    both = ModelPolicy("both", (TrafficClass("work", ("both",), waiting=PATIENT),))
    pools = {**POLICY.pools, "both": Pool("both", ("gemma", "qwen"))}
    machine = Machine(lanes_there=[Lane("both/work", 9, 0, oldest_s=700.0)], answers=anyio.Event())
    one = Process(machine, policy=replace(POLICY, models=(both,), pools=pools))
    async with run(one):
        await one.until(lambda: one.snapshot.stored["gemma"].count == 9)
        await one.is_at(State.CHECKING, "qwen")  # they wait for whichever comes in
        assert machine.answers is not None
        machine.answers.set()
        await one.is_at(State.RESIDENT, "qwen")
        assert (one.snapshot.stored["gemma"].count, one.snapshot.box.due_at) == (0, None)


async def test_the_batch_is_what_waited_in_the_store_when_the_model_came_in() -> None:
    machine = Machine()
    one = Process(machine)
    async with at_work(one):
        machine.now += 1000
        machine.lanes_there = [Lane("qwen/work", 9, 0, oldest_s=1100.0), stored(50, 900.0)]
        await one.until(lambda: one.snapshot.plan.held_by_batch)
        # Its last one has left the store for the line: of the batch it is, though it has just entered.
        machine.lanes_there = [stored(50, 900.0)]
        assert one.brings("last", 1, waited_s=1100.0) is None
        await one.another_look()
        assert one.snapshot.plan.held_by_batch
        assert one.at == (State.RESIDENT, "qwen")
        one.line.leave("last")
        await one.is_at(State.RESIDENT, "gemma")


async def test_a_store_that_is_away_for_long_holds_nothing_up() -> None:
    machine = Machine()
    one = Process(machine)
    async with at_work(one):
        machine.lanes_there = [stored(12, 10.0)]
        await one.until(lambda: one.snapshot.stored["gemma"].count == 12)
        machine.is_away = True
        machine.now += STORE_LOST_S
        await one.another_look()
        assert one.snapshot.stored["gemma"].count == 12
        machine.now += 1
        await one.until(lambda: one.snapshot.stored["gemma"].count == 0)
        machine.is_away = False
        await one.until(lambda: one.snapshot.stored["gemma"].count == 12)


class SlowToLeave:
    """A board that is left only once it is told so."""

    def __init__(self, machine: Machine) -> None:
        self.leaves = anyio.Event()
        self._board = board_of(machine, "one")

    async def sync(self, box_id: str, *, fence: int, state: str, note: str) -> Board:
        return await self._board.sync(box_id, fence=fence, state=state, note=note)

    async def leave(self, box_id: str) -> None:
        await self.leaves.wait()
        await anyio.lowlevel.checkpoint()
        await self._board.leave(box_id)

    async def aclose(self) -> None:
        pass


class BoardAway:
    """A board that does not reply while its machine's store is away."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._board = board_of(machine, "one")

    async def sync(self, box_id: str, *, fence: int, state: str, note: str) -> Board | None:
        if self._machine.is_away:
            return None
        return await self._board.sync(box_id, fence=fence, state=state, note=note)

    async def leave(self, box_id: str) -> None:
        await self._board.leave(box_id)

    async def aclose(self) -> None:
        pass


class BoardThatStandsStill:
    """A board of a process that is stopped before it asks, until it goes on."""

    def __init__(self, machine: Machine) -> None:
        self.goes_on: anyio.Event | None = None
        self._board = board_of(machine, "one")

    async def sync(self, box_id: str, *, fence: int, state: str, note: str) -> Board:
        if self.goes_on is not None:
            await self.goes_on.wait()
        return await self._board.sync(box_id, fence=fence, state=state, note=note)

    async def leave(self, box_id: str) -> None:
        await self._board.leave(box_id)

    async def aclose(self) -> None:
        pass


async def test_a_box_that_drains_serves_again_once_its_store_was_away_for_too_long() -> None:
    machine = Machine()
    one = Process(machine, board=BoardAway(machine))
    slot = await one.ledger.acquire("qwen", Load(seqs=1), Load(seqs=1))
    assert isinstance(slot, Slot)
    async with at_work(one):
        await one.is_due_to_swap()
        await one.is_at(State.DRAINING, "qwen")
        await one.another_look()
        machine.is_away = True
        machine.now += STORE_LOST_S
        await one.another_look()
        await one.another_look()
        assert (one.at, one.snapshot.is_owner) == ((State.DRAINING, "qwen"), True)
        machine.now += 1
        await one.is_at(State.RESIDENT, "qwen")
        assert not one.snapshot.is_owner
        # The store has kept what was under way, and nobody else has gone on with it.
        machine.is_away = False
        await one.is_at(State.DRAINING, "qwen")
        await one.ledger.release(slot)
        machine.now += 5
        await one.is_at(State.RESIDENT, "gemma")
        assert (one.snapshot.is_owner, machine.orders) == (True, ["stop qwen", "start gemma"])


async def test_a_swap_that_waits_for_the_store_says_so() -> None:
    machine = Machine()
    one = Process(machine, board=BoardAway(machine))
    async with at_work(one):
        await one.another_look()
        assert one.snapshot.waits_for == ""
        machine.is_away = True
        await one.another_look()
        await one.another_look()
        assert (one.snapshot.plan.target, one.snapshot.waits_for) == ("", "")  # there is no swap
        machine.is_away = False
        machine.lanes_there = [stored(4, 10.0)]
        machine.now = one.snapshot.box.resident_since + 299
        await one.until(lambda: one.snapshot.plan.at is not None)
        machine.is_away = True
        await one.until(lambda: one.snapshot.plan.at is None)
        machine.now = one.snapshot.box.resident_since + 301
        await one.another_look()
        assert (one.at, one.snapshot.plan.target) == ((State.RESIDENT, "qwen"), "gemma")
        assert one.snapshot.waits_for == "the store, which does not answer"
        assert one.controller.away_s("gemma/work") is None
        machine.is_away = False
        await one.is_at(State.RESIDENT, "gemma")
        assert one.snapshot.waits_for == ""


async def test_the_one_model_that_is_in_serves_though_the_store_was_never_there() -> None:
    machine = Machine(is_away=True)
    one = Process(machine, board=BoardAway(machine))
    async with at_work(one):
        await one.is_at(State.RESIDENT, "qwen")
        assert not one.snapshot.is_owner
        since = one.snapshot.box.since
        machine.now += STORE_LOST_S + 1
        for _ in range(2):
            await one.another_look()
        assert (one.at, one.snapshot.box.since) == ((State.RESIDENT, "qwen"), since)
        machine.is_away = False
        await one.until(lambda: one.snapshot.is_owner and one.at == (State.RESIDENT, "qwen"))
        await one.is_due_to_swap()
        await one.is_at(State.RESIDENT, "gemma")
        assert (one.snapshot.is_owner, machine.orders) == (True, ["stop qwen", "start gemma"])


async def test_a_box_that_another_gateway_is_still_looking_into_is_not_judged_while_the_store_is_away() -> (
    None
):
    machine = Machine()
    await say(machine, Box(State.UNKNOWN, machine.now))
    one = Process(machine, board=BoardAway(machine))
    async with run(one):
        for _ in range(2):
            await one.another_look()
        machine.is_away = True
        for _ in range(3):
            await one.another_look()
        assert one.snapshot.box.state is State.UNKNOWN


async def test_a_model_that_answers_from_elsewhere_is_not_taken_for_the_one_that_is_in() -> None:
    machine = Machine(is_away=True, inside={"gemma", "qwen"}, strangers={"gemma"})
    one = Process(machine, board=BoardAway(machine))
    async with at_work(one):
        assert set(one.controller.objections()) == {"gemma"}


async def test_where_two_models_are_in_none_serves_before_the_store_was_there() -> None:
    machine = Machine(is_away=True, inside={"gemma", "qwen"})
    one = Process(machine, board=BoardAway(machine))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(one.controller.run)
        await one.another_look()
        await one.another_look()
        assert one.snapshot.box.state is State.UNKNOWN
        machine.is_away = False
        await one.until(lambda: one.snapshot.box.state is State.RESIDENT)
        assert (len(machine.inside), one.snapshot.is_owner) == (1, True)
        tasks.cancel_scope.cancel()


async def test_a_report_waits_for_a_store_that_is_away_without_asking_it_all_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with own_server("valkey-9", tmp_path) as server:
        board, other = (RedisBoard(server.url, prefix="gw", owner=name) for name in ("one", "two"))
        machine = Machine(stops=anyio.Event())
        one = Process(machine, board=board)
        async with at_work(one):
            machine.now += 1000
            machine.lanes_there = [stored(12, 900.0)]
            await one.is_at(State.STOPPING, "qwen")
            server.kill()
            monkeypatch.setattr(box_controller, "LOOK_S", 1.0)
            await one.another_look()
            assert machine.stops is not None
            machine.stops.set()
            before, asked = machine.looks, 100
            for _ in range(asked):
                assert await other.sync("another-box", fence=0, state="", note="") is None
                await anyio.lowlevel.checkpoint()
            assert machine.looks - before < asked / 4  # one a second
            server.start()
            await one.is_at(State.RESIDENT, "gemma")
        await board.aclose()
        await other.aclose()


async def test_callers_are_told_when_their_jobs_can_start() -> None:
    machine = Machine()
    one = Process(machine)
    async with at_work(one):
        assert one.controller.away_s("qwen/work") == 0.0
        assert one.controller.away_s("no-such/class") is None
        assert one.controller.away_s("gemma/work") is None  # nothing brings it in
        machine.lanes_there = [stored(1, 100.0)]
        await one.until(lambda: one.snapshot.plan.cause is Cause.AGE)
        assert one.controller.away_s("gemma/work") == 1400.0 + 306.0


async def test_a_job_for_a_server_outside_of_all_boxes_can_start_now() -> None:
    elsewhere = replace(POLICY.backends["gemma"], id="elsewhere")
    policy = replace(
        POLICY,
        pools={**POLICY.pools, "gemma": Pool("gemma", ("elsewhere",))},
        backends={**POLICY.backends, "elsewhere": elsewhere},
    )
    one = Process(Machine(), policy=policy)
    assert one.controller.away_s("gemma/work") == 0.0
    assert one.controller.away_s("qwen/work") is None


async def test_who_waits_for_a_box_that_had_failed_is_asked_again_once_it_boots() -> None:
    machine = Machine()
    await say(machine, Box(State.FAILED, machine.now))
    one = Process(machine)
    async with run(one):
        await one.until(lambda: one.snapshot.box.state is State.FAILED)
        await one.another_look()
        before, objections = one.changes, set(one.controller.objections())
        await say(machine, Box(State.BOOTING, machine.now, backend="qwen"))
        await one.is_at(State.BOOTING, "qwen")
        await one.another_look()
        assert (one.changes, set(one.controller.objections())) == (before + 1, objections)


async def test_each_step_of_a_swap_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "gateway.boxes")
    one = Process(Machine())
    async with at_work(one):
        await one.another_look()
        await one.is_due_to_swap()
        await one.is_at(State.RESIDENT, "gemma")
        await one.another_look()
    assert [record.getMessage().removeprefix("box spark: ") for record in caplog.records] == [
        "this gateway now switches its models (fence 1)",
        "inspect it",
        "checking qwen (found running)",
        "check qwen",
        "resident qwen (answers correctly)",
        "draining qwen -> gemma (4 requests wait for gemma)",
        "stopping qwen -> gemma (4 requests wait for gemma)",
        "stop qwen",
        "booting gemma (4 requests wait for gemma; it has to boot)",
        "start gemma",
        "checking gemma (answers, after 0 s)",
        "check gemma",
        "resident gemma (answers correctly)",
    ]


async def test_a_box_that_has_failed_says_when_it_is_looked_at_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    machine = Machine(stop_failures=["exit status 7"] * (COMMAND_TRIES + 1))
    one = Process(machine)
    async with at_work(one):
        await one.is_due_to_swap()
        while one.snapshot.box.state is not State.FAILED:
            machine.now += max(COMMAND_PAUSES_S)
            await one.another_look()
        machine.inside.clear()  # somebody has switched the machine off
        machine.now += INSPECT_S
        await one.until(lambda: not machine.stop_failures)
        await one.another_look()
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said == [
        *(f"box spark: cannot stop qwen (try {number} of 3): exit status 7" for number in (1, 2, 3)),
        "box spark: cannot stop gemma (the box has failed: again in 30 s): exit status 7",
    ]


async def test_a_state_that_cannot_be_read_changes_nothing() -> None:
    machine = Machine()
    other = await say(machine, Box(State.RESIDENT, machine.now, backend="qwen"))
    one = Process(machine)
    async with run(one):
        await one.is_at(State.RESIDENT, "qwen")
        await other.sync("spark", fence=1, state="of a later version", note="")
        for _ in range(3):
            await one.another_look()
        assert one.at == (State.RESIDENT, "qwen")


async def test_a_model_is_checked_and_serves_only_while_its_health_is_known() -> None:
    machine = Machine()
    one = Process(machine)
    async with at_work(one):
        machine.answers, machine.stops = anyio.Event(), anyio.Event()
        await one.is_due_to_swap()
        await one.is_at(State.STOPPING, "qwen")
        machine.health = BackendStatus(state=Health.BOOTING)
        machine.stops.set()
        await one.is_at(State.BOOTING, "gemma")
        await one.another_look()
        await one.another_look()
        assert one.at == (State.BOOTING, "gemma")
        machine.health = None
        await one.is_at(State.CHECKING, "gemma")
        machine.health = BackendStatus(state=Health.UP)  # what it serves is not known
        machine.answers.set()
        await one.another_look()
        await one.another_look()
        assert one.at == (State.CHECKING, "gemma")
        machine.health = None
        await one.is_at(State.RESIDENT, "gemma")


async def test_a_model_that_has_answered_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(box_controller, "READY_S", 0.01)
    machine = Machine(answers=anyio.Event())
    one = Process(machine)
    async with run(one):
        await one.is_at(State.CHECKING, "qwen")
        machine.health = BackendStatus(state=Health.UP)
        assert machine.answers is not None
        machine.answers.set()
        await one.is_at(State.RESIDENT, "qwen")


async def test_a_model_that_gives_the_wrong_answer_is_not_waited_for() -> None:
    machine = Machine(answers=anyio.Event(), answer="the canary is dead")
    one = Process(machine)
    async with run(one):
        await one.is_at(State.CHECKING, "qwen")
        machine.health = BackendStatus(state=Health.UP)
        assert machine.answers is not None
        machine.answers.set()
        await one.until(lambda: one.snapshot.box.state is not State.CHECKING)
        assert "the canary is dead" in one.snapshot.box.quarantine["qwen"].reason


@pytest.mark.parametrize(
    ("health", "reason"),
    [
        (BackendStatus(last_error="probe: connection refused"), "connection refused"),
        (
            BackendStatus(
                state=Health.UP, served_models=("m",), down_since=1.0, last_error="x", model_error="serves n"
            ),
            "serves n",
        ),
    ],
    ids=["probe", "other-model"],
)
async def test_a_model_that_is_not_ready_in_time_is_said_to_be_kept_from_it_by_what_its_probes_found(
    health: BackendStatus, reason: str
) -> None:
    machine = Machine(stops=anyio.Event())
    one = Process(machine)
    async with at_work(one):
        await one.is_due_to_swap()
        await one.is_at(State.STOPPING, "qwen")
        assert machine.stops is not None
        machine.stops.set()
        machine.health = health
        await one.until(lambda: one.snapshot.box.is_started)
        machine.now += RULES.boot_budget_s
        await one.until(lambda: "gemma" in one.snapshot.box.quarantine)
        said = f"not ready {RULES.boot_budget_s:.0f} s after its start: {reason}"
        assert one.snapshot.box.quarantine["gemma"].reason == said


async def test_a_version_that_is_not_known_yet_is_not_a_wrong_one() -> None:
    qwen = replace(POLICY.backends["qwen"], versions=bounds(">= 0.20"))
    machine = Machine(answers=anyio.Event())
    machine.health = BackendStatus(state=Health.UP, served_models=("m",), version="0.21")
    one = Process(machine, policy=replace(POLICY, backends={**POLICY.backends, "qwen": qwen}))
    async with run(one):
        await one.is_at(State.CHECKING, "qwen")
        machine.health = BackendStatus(state=Health.UP)  # it has restarted: what it serves is asked again
        for _ in range(2):
            await one.another_look()
        assert one.at == (State.CHECKING, "qwen")
        machine.health = BackendStatus(state=Health.UP, served_models=("m",), version="0.19")
        await one.until(lambda: "qwen" in one.snapshot.box.quarantine)
        assert one.snapshot.box.quarantine["qwen"].reason == "engine version 0.19, not >= 0.20"
