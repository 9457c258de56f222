"""The waiting room before a ledger that others use: places that are gone, and places taken at once."""

from collections.abc import Collection
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any

import anyio
import pytest
from support.world import DONE, HELLO, POLICY, ROLE, STOP, Caller, Script, World

from gateway.core.admission import WHOLE
from gateway.core.decision import Exclusion
from gateway.core.errors import AtCapacity, Draining
from gateway.core.load import Load
from gateway.core.policy import TrafficClass, Waiting, WhenLate
from gateway.core.usage import Ending
from gateway.core.waiting import MISS_PAUSE_S
from gateway.pipeline import waiting_room
from gateway.pipeline.waiting_room import REDECIDED_TOGETHER
from gateway.ports import Arrival, Slot
from gateway.store.embedded import temporary_folder, valkey_in
from gateway.store.memory import MemoryLedger, OnFreed
from gateway.store.redis import RedisLedger


class FarAway(MemoryLedger):
    """A ledger that has to be asked for everything."""

    is_local = False

    def acquire_at_once(self, backend_id: str, claim: Load, limits: Load) -> Slot | None:
        return None

    def release_at_once(self, slot: Slot) -> bool:
        return False

    async def release(self, slot: Slot) -> None:
        super().release_at_once(slot)


class TakenElsewhere(FarAway):
    """Every place is taken, though it looked free a moment ago."""

    async def acquire(self, backend_id: str, claim: Load, limits: Load) -> Slot | Exclusion:
        return Exclusion.AT_KNEE


class TwiceTaken(FarAway):
    """Has no place the first two times, and says of none that it is free again."""

    asked = 0

    async def acquire(self, backend_id: str, claim: Load, limits: Load) -> Slot | Exclusion:
        self.asked += 1
        if self.asked <= 2:  # on arrival, and at a turn
            return Exclusion.AT_KNEE
        return await super().acquire(backend_id, claim, limits)


class FreeAlone(FarAway):
    """Has places on one backend alone."""

    def __init__(self, backend_id: str) -> None:
        super().__init__()
        self.backend_id = backend_id

    async def acquire(self, backend_id: str, claim: Load, limits: Load) -> Slot | Exclusion:
        if backend_id != self.backend_id:
            return Exclusion.AT_KNEE
        return await super().acquire(backend_id, claim, limits)


class Slow(FarAway):
    """Grants nothing before two have asked: as a store far away, whose answers take their time."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0
        self.both = anyio.Event()

    async def acquire(self, backend_id: str, claim: Load, limits: Load) -> Slot | Exclusion:
        self.asked += 1
        if self.asked == 2:
            self.both.set()
        await self.both.wait()
        return await super().acquire(backend_id, claim, limits)


class Asked(FarAway):
    """Answers nobody before it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may_answer = anyio.Event()

    async def acquire(self, backend_id: str, claim: Load, limits: Load) -> Slot | Exclusion:
        await self.may_answer.wait()
        return await super().acquire(backend_id, claim, limits)


class TellsNobody(FarAway):
    """Says of no place that it is free again."""

    def on_freed(self, callback: OnFreed) -> None:
        pass


class LateToRelease(FarAway):
    """Answers nobody who gives a place back before it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may_answer = anyio.Event()

    async def release(self, slot: Slot) -> None:
        await self.may_answer.wait()
        await super().release(slot)


class GrantedTooLate(FarAway):
    """Grants a place just as its caller leaves or so long after it, and takes it back only after a while."""

    def __init__(self, late: int) -> None:
        super().__init__()
        self.late = late
        self.is_full = True
        self.caller = anyio.CancelScope()

    async def acquire(self, backend_id: str, claim: Load, limits: Load) -> Slot | Exclusion:
        if self.is_full:
            return Exclusion.AT_KNEE
        slot = await super().acquire(backend_id, claim, limits)
        self.caller.cancel()
        for _ in range(self.late):
            await anyio.lowlevel.checkpoint()
        return slot

    async def release(self, slot: Slot) -> None:
        await anyio.lowlevel.checkpoint()
        await super().release(slot)


class Noted(FarAway):
    """Has no place to give, and notes what is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.waited_for: list[Collection[str]] = []

    async def acquire(self, backend_id: str, claim: Load, limits: Load) -> Slot | Exclusion:
        return Exclusion.AT_KNEE

    async def refresh(self, backends: Collection[str]) -> None:
        await anyio.lowlevel.checkpoint()

    def waits(self, backends: Collection[str]) -> None:
        self.waited_for.append(backends)


async def arrive(world: World, number: int) -> Any:
    arrival = Arrival(f"req-{number}", 1_000_000.0, world.clock.now())
    return await world.run(world.request(), Caller(), arrival=arrival)


async def test_who_was_offered_a_place_that_was_gone_waits_no_longer_than_it_may() -> None:
    world = World(TakenElsewhere())
    (model,) = POLICY.models
    classes = tuple(replace(one, waiting=Waiting(max_wait_s=1.2)) for one in model.classes)
    world.policy = replace(POLICY, models=(replace(model, classes=classes),))
    refused: list[AtCapacity] = []

    async def ask() -> None:
        with pytest.raises(AtCapacity) as caught:
            await arrive(world, 1)
        refused.append(caught.value)

    async with anyio.create_task_group() as tasks:
        async with anyio.create_task_group() as asking:
            asking.start_soon(ask)
            await anyio.wait_all_tasks_blocked()
            tasks.start_soon(world.pipeline.room.run)
            await anyio.sleep(MISS_PAUSE_S)  # it has looked, and waits
            assert not refused
            world.clock.time += 1.3  # and nothing else happens that anybody could hear of
        tasks.cancel_scope.cancel()

    assert refused[0].code == "waited_too_long"


async def test_who_was_offered_a_place_that_was_gone_is_offered_another_soon() -> None:
    world = World(TwiceTaken())
    classes = tuple(replace(one, pools=("push",)) for one in POLICY.models[0].classes)
    world.policy = replace(POLICY, models=(replace(POLICY.models[0], classes=classes),))
    world.answers(push=Script([ROLE + HELLO, STOP, DONE]))

    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(world.pipeline.room.run)
            tasks.start_soon(arrive, world, 1)
            while not world.notes.requests:
                await anyio.sleep(MISS_PAUSE_S)
                world.clock.time += MISS_PAUSE_S  # and nothing else happens that anybody could hear of
            tasks.cancel_scope.cancel()

    assert [record.ending for record in world.notes.requests] == [Ending.COMPLETED]


async def test_whoever_misses_one_backend_is_served_by_the_next() -> None:
    world = World(FreeAlone("light-1"))
    world.answers(light_1=Script([ROLE + HELLO, STOP, DONE]))
    with anyio.fail_after(10):
        await arrive(world, 1)
    (record,) = world.notes.requests
    assert (record.ending, record.backend) == (Ending.COMPLETED, "light-1")


def filled(world: World, gate: anyio.Event) -> None:
    """Have four requests fill the chat servers, the first until `gate`; later ones end at once."""
    classes = tuple(replace(one, pools=("light",)) for one in POLICY.models[0].classes)
    world.policy = replace(POLICY, models=(replace(POLICY.models[0], classes=classes),))
    for name, first in (("light-0", gate), ("light-1", anyio.Event())):
        lasting = [Script([ROLE + HELLO, one, STOP, DONE]) for one in (first, anyio.Event())]
        world.upstream.scripts[name] = [*lasting, *[Script([ROLE + HELLO, STOP, DONE])] * 2]


async def ask(world: World, number: int, key: str) -> None:
    arrival = Arrival(f"req-{number}", 1_000_000.0, world.clock.now())
    await world.run(world.request(key=key), Caller(), arrival=arrival)


async def test_who_waits_starts_when_a_request_ends_though_the_ledger_does_not_say_so() -> None:
    world, gate = World(TellsNobody()), anyio.Event()
    filled(world, gate)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.pipeline.room.run)
        for number in range(5):
            tasks.start_soon(ask, world, number, "a")
            await anyio.wait_all_tasks_blocked()
        gate.set()
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()

    assert [record.id for record in world.notes.requests][:2] == ["req-0", "req-4"]
    assert [record.ending for record in world.notes.requests][:2] == [Ending.COMPLETED] * 2


async def test_a_ledger_that_does_not_answer_holds_no_request_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_room, "RELEASE_S", 0.01)
    ledger = LateToRelease()
    world = World(ledger)
    world.answers(light_0=Script([ROLE + HELLO, STOP, DONE]))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(arrive, world, 1)
        try:
            with anyio.fail_after(10):
                while not world.notes.requests:
                    await anyio.lowlevel.checkpoint()
        finally:
            ledger.may_answer.set()

    assert [record.ending for record in world.notes.requests] == [Ending.COMPLETED]


@pytest.mark.parametrize("ledger_type", [MemoryLedger, FarAway])
async def test_a_key_that_has_started_much_comes_after_one_that_has_not(
    ledger_type: type[MemoryLedger],
) -> None:
    world, gate = World(ledger_type()), anyio.Event()
    filled(world, gate)
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(world.pipeline.room.run)
            for number, key in enumerate("aaaaab"):
                tasks.start_soon(ask, world, number, key)
                await anyio.wait_all_tasks_blocked()
            gate.set()
            while len(world.notes.requests) < 3:
                await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()

    assert [record.id for record in world.notes.requests][1:3] == ["req-5", "req-4"]


async def test_whoever_arrives_as_a_slot_is_free_does_not_take_it_from_who_waits() -> None:
    world, gate = World(), anyio.Event()
    filled(world, gate)
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            for number in range(6):
                if number == 5:
                    gate.set()
                    await anyio.wait_all_tasks_blocked()
                tasks.start_soon(ask, world, number, "a")
                await anyio.wait_all_tasks_blocked()
            tasks.start_soon(world.pipeline.room.run)
            while len(world.notes.requests) < 3:
                await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()

    assert [record.id for record in world.notes.requests][1:3] == ["req-4", "req-5"]


async def test_a_place_that_is_granted_when_the_room_is_closed_is_given_back() -> None:
    ledger = Asked()
    world = World(ledger)
    world.answers(light_0=Script([anyio.Event()]))

    with anyio.fail_after(3):
        async with anyio.create_task_group() as asking:

            async def ask() -> None:
                with pytest.raises(Draining):
                    await arrive(world, 1)

            asking.start_soon(ask)
            await anyio.wait_all_tasks_blocked()
            world.pipeline.end()
            ledger.may_answer.set()

    assert not world.upstream.targets
    assert ledger.load("light-0") == Load()


class AskedToTheEnd(FarAway):
    """Whoever asks waits for the answer, cancelled or not, as that of a shared store."""

    def __init__(self) -> None:
        super().__init__()
        self.may_answer = anyio.Event()

    async def acquire(self, backend_id: str, claim: Load, limits: Load) -> Slot | Exclusion:
        with anyio.CancelScope(shield=True):
            await self.may_answer.wait()
        return await super().acquire(backend_id, claim, limits)


async def test_a_job_that_its_worker_takes_back_as_the_room_is_closed_has_not_failed() -> None:
    ledger = AskedToTheEnd()
    world = World(ledger)

    with anyio.fail_after(3):
        async with anyio.create_task_group() as asking:
            asking.start_soon(world.run, world.request(is_job=True))
            await anyio.wait_all_tasks_blocked()
            asking.cancel_scope.cancel()  # as the worker does
            world.pipeline.end()
            ledger.may_answer.set()

    assert [record.ending for record in world.notes.requests] == [Ending.LEFT]
    assert ledger.load("light-0") == Load()


@pytest.mark.parametrize("late", [0, 10])
async def test_a_place_that_is_granted_when_its_caller_leaves_is_given_back(late: int) -> None:
    ledger = GrantedTooLate(late)
    world = World(ledger)

    async def ask() -> None:
        with ledger.caller:
            await arrive(world, 1)

    with anyio.fail_after(3):
        async with anyio.create_task_group() as tasks:
            async with anyio.create_task_group() as asking:
                asking.start_soon(ask)
                await anyio.wait_all_tasks_blocked()  # it has missed a place, and waits
                ledger.is_full = False
                world.clock.time += 1
                tasks.start_soon(world.pipeline.room.run)
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()

    assert ledger.caller.cancelled_caught
    assert not world.upstream.targets
    assert set(ledger.loads().values()) <= {Load()}


async def test_others_are_told_what_is_waited_for_and_when_nobody_waits_any_more() -> None:
    ledger = Noted()
    world = World(ledger)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.pipeline.room.run)
        async with anyio.create_task_group() as asking:
            asking.start_soon(arrive, world, 1)
            await anyio.wait_all_tasks_blocked()
            assert "light-0" in ledger.waited_for[-1]
            asking.cancel_scope.cancel()  # the only one that waits leaves
        await anyio.wait_all_tasks_blocked()
        assert not ledger.waited_for[-1]
        tasks.cancel_scope.cancel()


async def test_others_are_told_of_the_first_that_is_waited_for_when_another_is_too() -> None:
    ledger = Noted()
    world = World(ledger)
    (model,) = POLICY.models
    classes = model.classes[0], replace(model.classes[1], pools=("light",))
    world.policy = replace(POLICY, models=(replace(model, classes=classes),))

    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(world.pipeline.room.run)
            for number, tokens in enumerate((100, 16_000)):
                world.estimates.tokens = tokens
                tasks.start_soon(arrive, world, number)
                await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()

    lights = {"light-0", "light-1"}
    assert ledger.waited_for[0] == lights
    assert ledger.waited_for[-1] == {*lights, "push"}
    assert all(lights <= set(waited_for) for waited_for in ledger.waited_for)


async def test_nobody_is_refused_for_what_another_process_no_longer_runs() -> None:
    """By what the last reply said of the other process, no slot becomes free in time."""
    slow: Any = {"command_s": 10.0, "refresh_s": 60.0, "tick_s": 60.0}  # it looks only when it is made to
    async with AsyncExitStack() as stack:
        store = await stack.enter_async_context(valkey_in(stack.enter_context(temporary_folder())))
        own, other = RedisLedger(store.url, **slow), RedisLedger(store.url, **slow)
        for ledger in (own, other):
            stack.push_async_callback(ledger.aclose)
        world, gate = World(own), anyio.Event()  # type: ignore[arg-type]
        chats = TrafficClass("short_chat", ("light",), waiting=Waiting(max_wait_s=1.2))
        pool = replace(POLICY.pools["light"], backends=("light-0",))
        world.policy = replace(
            POLICY, models=(replace(POLICY.models[0], classes=(chats,)),), pools={"light": pool}
        )
        world.pipeline.room.line.note_peers(1)
        world.answers(light_0=Script([ROLE + HELLO, gate, STOP, DONE]))
        world.answers(light_0=Script([ROLE + HELLO, STOP, DONE]))
        tasks = await stack.enter_async_context(anyio.create_task_group())
        tasks.start_soon(world.pipeline.room.run)
        with anyio.fail_after(20):
            async with anyio.create_task_group() as asking:
                asking.start_soon(arrive, world, 1)
                while not world.upstream.targets:
                    await anyio.lowlevel.checkpoint()
                world.clock.time += 60.0  # that is how long an answer takes here
                gate.set()
            whole = Load(seqs=1, share=WHOLE)
            slot = await other.acquire("light-0", whole, replace(whole, seqs=2))
            assert isinstance(slot, Slot)
            await own.sync()
            await other.release(slot)
            assert own.load("light-0") == whole

            await arrive(world, 2)
        tasks.cancel_scope.cancel()

    assert [record.ending for record in world.notes.requests] == [Ending.COMPLETED] * 2


async def test_places_are_taken_at_once() -> None:
    world = World(Slow())
    for name in ("light_0", "light_1"):
        world.answers(**{name: Script([ROLE + HELLO, STOP, DONE])})

    async with anyio.create_task_group() as tasks:
        async with anyio.create_task_group() as asking:
            for number in range(2):
                asking.start_soon(arrive, world, number)
            await anyio.wait_all_tasks_blocked()
            tasks.start_soon(world.pipeline.room.run)  # both are in the line at its first turn
        tasks.cancel_scope.cancel()

    assert {record.backend for record in world.notes.requests} == {"light-0", "light-1"}


async def test_whoever_is_sent_on_between_an_offer_and_its_place_comes_back_for_another() -> None:
    world = World()
    for name in ("light_0", "light_1"):
        world.answers(**{name: Script([ROLE + HELLO, STOP, DONE])})

    async with anyio.create_task_group() as tasks:
        async with anyio.create_task_group() as asking:
            for number in range(2):
                asking.start_soon(arrive, world, number)
            await anyio.wait_all_tasks_blocked()
            tasks.start_soon(world.pipeline.room.run)  # offers both a place, to be taken later
            world.pipeline.policy_changed()  # before that, both are back in the line
        tasks.cancel_scope.cancel()

    assert [record.ending for record in world.notes.requests] == [Ending.COMPLETED] * 2
    assert not any(load.seqs for load in world.ledger.loads().values())


async def test_nobody_who_is_sent_on_is_refused_for_backends_that_have_just_left() -> None:
    """The queue may be looked at before those that wait have heard of a policy that is in force."""
    ledger = FreeAlone("push")
    world = World(ledger)
    world.answers(push=Script([ROLE + HELLO, STOP, DONE]))
    classes = tuple(replace(one, pools=("push",)) for one in POLICY.models[0].classes)
    moved = replace(
        POLICY,
        models=(replace(POLICY.models[0], classes=classes),),
        pools={"push": POLICY.pools["push"]},
        backends={"push": POLICY.backends["push"]},
    )
    (model,) = POLICY.models
    chats = tuple(replace(one, pools=("light",)) for one in model.classes)
    world.policy = replace(POLICY, models=(replace(model, classes=chats),))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.pipeline.room.run)
        async with anyio.create_task_group() as asking:
            asking.start_soon(arrive, world, 1)
            await anyio.wait_all_tasks_blocked()
            world.policy = moved
            world.pipeline.room.look()  # something has ended at the same moment
            world.pipeline.policy_changed()
        tasks.cancel_scope.cancel()

    (record,) = world.notes.requests
    assert (record.ending, record.backend) == (Ending.COMPLETED, "push")
    assert record.decision is not None
    assert record.decision.pools == ("push",)


async def test_who_is_decided_anew_keeps_what_it_has_waited_and_is_not_refused() -> None:
    world = World(TakenElsewhere())
    (model,) = POLICY.models
    none_may_wait = TrafficClass("chat", ("light",), waiting=Waiting(max_wait_s=60.0, waiting_max=0))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.pipeline.room.run)
        tasks.start_soon(arrive, world, 1)
        await anyio.wait_all_tasks_blocked()
        world.clock.time += 1.5
        world.policy = replace(POLICY, models=(replace(model, classes=(none_may_wait,)),))
        world.pipeline.policy_changed()
        await anyio.wait_all_tasks_blocked()

        (waiter,) = world.pipeline.room.line.waiters(world.clock.now())
        assert (waiter.traffic_class, waiter.waited_s) == ("chat", 1.5)
        tasks.cancel_scope.cancel()


async def test_a_place_that_is_granted_after_the_policy_has_changed_is_given_back() -> None:
    ledger = Asked()
    world = World(ledger)
    world.answers(light_0=Script([ROLE + HELLO, STOP, DONE]), push=Script([ROLE + HELLO, STOP, DONE]))
    (model,) = POLICY.models
    elsewhere = TrafficClass("chat", ("push",))

    with anyio.fail_after(3):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(world.pipeline.room.run)
            async with anyio.create_task_group() as asking:
                asking.start_soon(arrive, world, 1)
                await anyio.wait_all_tasks_blocked()
                world.policy = replace(POLICY, models=(replace(model, classes=(elsewhere,)),))
                world.pipeline.policy_changed()
                ledger.may_answer.set()
            tasks.cancel_scope.cancel()

    assert [attempt.backend for attempt in world.notes.attempts] == ["push"]
    assert set(ledger.loads().values()) <= {Load()}


async def test_who_was_demoted_stays_behind_when_the_policy_changes() -> None:
    """Who has come since would be told of a longer wait, and might be refused."""
    world = World(TakenElsewhere())
    (model,) = POLICY.models
    rules = Waiting(max_wait_s=1.0, when_late=WhenLate.DEMOTE)
    world.policy = replace(
        POLICY, models=(replace(model, classes=(TrafficClass("chat", ("light",), waiting=rules),)),)
    )

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.pipeline.room.run)
        tasks.start_soon(arrive, world, 1)
        await anyio.wait_all_tasks_blocked()
        world.clock.time += 2.0
        tasks.start_soon(arrive, world, 2)
        await anyio.wait_all_tasks_blocked()
        world.policy = replace(world.policy)
        world.pipeline.policy_changed()
        await anyio.wait_all_tasks_blocked()

        assert [one.is_behind for one in world.pipeline.room.line.waiters(world.clock.now())] == [False, True]
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize(("backends_max", "together"), [(1_000, REDECIDED_TOGETHER), (12, 3), (1, 1)])
async def test_of_many_that_wait_a_few_at_a_time_are_decided_anew(
    backends_max: int, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes its time, the longer the more backends there are, and streams go on between two turns."""
    monkeypatch.setattr(waiting_room, "_ONE_TOGETHER_BACKENDS", backends_max)
    world = World(TakenElsewhere())
    count = 3 * together
    patient = Waiting(max_wait_s=60.0, waiting_max=count)
    (model,) = POLICY.models
    in_light, in_push = (
        replace(
            POLICY,
            models=(replace(model, classes=(TrafficClass("chat", (pool,), waiting=patient),)),),
        )
        for pool in ("light", "push")
    )
    world.policy = in_light
    line = world.pipeline.room.line
    moved: list[int] = []

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.pipeline.room.run)
        for number in range(count):
            tasks.start_soon(arrive, world, number)
        while len(line) < count:
            await anyio.lowlevel.checkpoint()
        world.policy = in_push
        world.pipeline.policy_changed()
        while not moved or moved[-1] < count:
            await anyio.lowlevel.checkpoint()
            moved.append(sum(one.pool == "push" for one in line.waiters(0.0, count)))
        tasks.cancel_scope.cancel()

    assert max(now - before for before, now in pairwise([0, *moved])) <= together


@pytest.mark.parametrize(
    "end, ended", [("served", 3), ("left", 2), ("refused", 2), ("closed", 2), ("decided anew", 0)]
)
async def test_whoever_is_queued_is_not_ready_before_it_is_woken(end: str, ended: int) -> None:
    world, gate = World(), anyio.Event()
    filled(world, gate)
    cohort, room = world.pipeline.cohort, world.pipeline.room

    async def queue(number: int, caller: anyio.CancelScope) -> None:
        with caller, suppress(AtCapacity, Draining):
            await ask(world, number, "a")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(room.run)
        for number in range(4):
            tasks.start_soon(ask, world, number, "a")
        await anyio.wait_all_tasks_blocked()
        callers = [anyio.CancelScope() for _ in range(2)]
        for number, caller in enumerate(callers, 4):
            tasks.start_soon(queue, number, caller)
        await anyio.wait_all_tasks_blocked()
        assert (len(room.line), cohort.size) == (2, 4)

        match end:
            case "served":
                gate.set()
            case "left":
                for caller in callers:
                    caller.cancel()
            case "refused":
                world.clock.time += 1_000.0
                room.look()
            case "closed":
                room.close()
                assert cohort.size == 6  # both, before the first of them goes on
            case "decided anew":
                world.pipeline.policy_changed()
        await anyio.wait_all_tasks_blocked()
        assert len(world.notes.requests) == ended
        assert cohort.size == (3 if end == "served" else 4)
        tasks.cancel_scope.cancel()

    assert cohort.size == 0
