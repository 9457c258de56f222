"""The keeper of a box and the jobs that wait in the store: counted once, and served in whole batches."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import anyio
import pytest
from support.boards import EmulatedBoard
from support.redis_server import own_server

from gateway.core.box import COMMAND_PAUSES_S, Box, BoxRules, State
from gateway.core.box_report import written
from gateway.core.errors import StoreUnavailable
from gateway.core.health import BackendStatus
from gateway.core.health import State as Health
from gateway.core.jobs import Lane, Queue
from gateway.core.swap_policy import Backlog, Cause, SwapRules, Trigger
from gateway.core.values import (
    Backend,
    Capacity,
    Demand,
    Exclusion,
    KneeStep,
    Load,
    ModelPolicy,
    Policy,
    Pool,
    TrafficClass,
    Waiting,
)
from gateway.core.waiting import Ticket, WaitingLine
from gateway.pipeline import box_controller
from gateway.pipeline.box_controller import READY_S, STORE_LOST_S, BoxController, BoxSnapshot
from gateway.ports import Board, BoxBoard, JobStore, Slot
from gateway.store.boards import RedisBoard
from gateway.store.memory import MemoryBoard, MemoryLedger

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
BOOT_S = {"gemma": 306.0, "qwen": 306.0}


@dataclass
class Machine:
    """The box itself, its health as everybody sees it, and the store of jobs: all obey at once."""

    now: float = 10_000.0
    inside: set[str] = field(default_factory=lambda: {"qwen"})
    orders: list[str] = field(default_factory=list)
    lanes_there: Sequence[Lane] = ()
    drained_at: float | None = None
    is_away: bool = False
    unseen_since: float | None = None
    looked: anyio.Event = field(default_factory=anyio.Event)
    looks: int = 0
    stops: anyio.Event | None = None  # when what it is told to stop has stopped; None: at once
    failures: list[str] = field(default_factory=list)  # of the next start commands
    shared: dict[str, Any] = field(default_factory=dict)

    # ports.Switch
    async def is_resident(self, backend_id: str) -> bool:
        return backend_id in self.inside

    async def start(self, backend_id: str, fence: int) -> str:
        if self.failures:
            return self.failures.pop(0)
        self.inside.add(backend_id)
        self.orders.append(f"start {backend_id}")
        return ""

    async def stop(self, backend_id: str, fence: int) -> str:
        if self.stops is not None:
            await self.stops.wait()
        self.inside.discard(backend_id)
        self.orders.append(f"stop {backend_id}")
        return ""

    async def ask(self, backend_id: str) -> str:
        return ""

    # ports.BoxFleet
    def statuses(self) -> Mapping[str, BackendStatus]:
        up, out = BackendStatus(state=Health.UP, served_models=("m",)), BackendStatus()
        if self.unseen_since is not None:
            out = BackendStatus(state=Health.BOOTING, since=self.unseen_since)
        return {name: up if name in self.inside else out for name in ("gemma", "qwen")}

    async def wait_for(self, predicate: Callable[[Mapping[str, BackendStatus]], bool]) -> None:
        assert predicate(self.statuses())

    def put_out(self, backend_id: str, reason: str) -> None:
        pass

    def await_boot(self, backend_id: str, reason: str) -> None:
        assert backend_id in POLICY.backends

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
    changes: int = 0  # how often the line was told to look again

    def __post_init__(self) -> None:
        self.ledger = MemoryLedger()
        shared = EmulatedBoard(
            lambda: self.machine.now, process=self.name, ttl_s=1e9, shared=self.machine.shared
        )
        self.controller = BoxController(
            {"spark": RULES},
            POLICY.backends,
            boot_s=BOOT_S,
            switch=self.machine,
            board=self.board or shared,
            fleet=self.machine,
            ledger=self.ledger,
            line=self.line,
            jobs=cast(JobStore, self.machine),
            policy=lambda: POLICY,
            clock=Clock(self.machine),
            on_change=self._note_change,
        )

    def _note_change(self) -> None:
        self.changes += 1

    @property
    def snapshot(self) -> BoxSnapshot:
        return self.controller.snapshots()["spark"]

    @property
    def at(self) -> tuple[State, str]:
        return self.snapshot.box.state, self.snapshot.box.backend

    def brings(self, name: str, model: int, waited_s: float) -> None:
        """Have a worker bring a job for the first or the second model to the line."""
        policy, now = POLICY.models[model], self.machine.now
        demand = Demand(seqs=1, prompt_tokens=100, total_tokens=200)
        ticket = Ticket(name, policy.id, POLICY, policy.classes[0], demand, None, now, waited_s=waited_s)
        assert self.line.enter(ticket, now) is None

    async def is_at(self, state: State, backend: str) -> None:
        await self.until(lambda: self.at == (state, backend))

    async def until(self, condition: Callable[[], bool]) -> None:
        with anyio.fail_after(10):
            while not condition():
                await self.another_look()

    async def another_look(self) -> None:
        await self.machine.looked.wait()


@pytest.fixture(autouse=True)
def quick_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(box_controller, "LOOK_S", 0.005)


@asynccontextmanager
async def at_work(*processes: Process) -> AsyncIterator[None]:
    async with anyio.create_task_group() as tasks:
        for process in processes:
            tasks.start_soon(process.controller.run)
            await process.is_at(State.RESIDENT, "qwen")
        yield
        tasks.cancel_scope.cancel()


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
        machine.lanes_there = [stored(4, 10.0)]
        await one.until(lambda: one.snapshot.plan.cause is Cause.JOBS)
        machine.now = one.snapshot.box.resident_since + 301
        await one.is_at(State.STOPPING, "qwen")
        machine.now += 20
        await one.another_look()
        await one.another_look()
        assert machine.stops is not None
        machine.stops.set()
        await one.is_at(State.RESIDENT, "gemma")
        assert machine.orders == ["stop qwen", "start gemma"]


async def test_a_gateway_that_ends_leaves_its_box_to_the_others_at_once() -> None:
    machine = Machine()
    async with at_work(Process(machine)):
        pass
    two = Process(machine, "two")
    async with at_work(two):
        await two.until(lambda: two.snapshot.is_owner)


async def test_a_command_that_fails_is_logged_before_it_is_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = Process(Machine(failures=["exit status 7"]))
    async with at_work(one):
        one.machine.lanes_there = [stored(4, 10.0)]
        await one.until(lambda: one.snapshot.plan.cause is Cause.JOBS)
        one.machine.now = one.snapshot.box.resident_since + 301
        await one.until(lambda: one.snapshot.box.reason == "exit status 7")
        said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert said == ["box spark: cannot start gemma (try 1 of 3): exit status 7"]
        one.machine.now += COMMAND_PAUSES_S[0]
        await one.is_at(State.RESIDENT, "gemma")


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


async def test_a_model_that_only_the_owner_has_seen_yet_is_waited_for() -> None:
    machine = Machine()
    other = EmulatedBoard(lambda: machine.now, process="other", ttl_s=1e9, shared=machine.shared)
    resident = written(Box(State.RESIDENT, machine.now, backend="gemma"), machine.now)
    fence = (await other.sync("spark", fence=0, state="", note="")).fence
    await other.sync("spark", fence=fence, state=resident, note="")
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
        tasks.cancel_scope.cancel()


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
    last, other = (
        EmulatedBoard(lambda: machine.now, process=name, ttl_s=1e9, shared=machine.shared)
        for name in ("last", "other")
    )
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
        one.brings("a", 0, waited_s=50.0)
        two.brings("b", 0, waited_s=60.0)
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


async def test_the_batch_is_what_waited_in_the_store_when_the_model_came_in() -> None:
    machine = Machine()
    one = Process(machine)
    async with at_work(one):
        machine.now += 1000
        machine.lanes_there = [Lane("qwen/work", 9, 0, oldest_s=1100.0), stored(50, 900.0)]
        await one.until(lambda: one.snapshot.plan.held_by_batch)
        # Its last one has left the store for the line: of the batch it is, though it has just entered.
        machine.lanes_there = [stored(50, 900.0)]
        one.brings("last", 1, waited_s=1100.0)
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


class BoardAway:
    """A board that does not reply while its machine's store is away."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._board = EmulatedBoard(lambda: machine.now, process="one", ttl_s=1e9, shared=machine.shared)

    async def sync(self, box_id: str, *, fence: int, state: str, note: str) -> Board | None:
        if self._machine.is_away:
            return None
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
        machine.lanes_there = [stored(4, 10.0)]
        await one.until(lambda: one.snapshot.plan.cause is Cause.JOBS)
        machine.now = one.snapshot.box.resident_since + 301
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


async def test_a_report_waits_for_a_store_that_is_away_without_asking_it_all_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with own_server("valkey-9", tmp_path) as server:
        board, other = (RedisBoard.at(server.url, "gw", name) for name in ("one", "two"))
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
