"""Comments for streams that wait: when they begin, what they make impossible, and when they stop."""

import json
from dataclasses import replace
from math import inf
from typing import Any

import anyio
import pytest
from support.world import CRASH, DONE, HELLO, POLICY, ROLE, STOP, Caller, Script, World

from gateway.core.backends import Timeouts
from gateway.core.errors import NoBackend
from gateway.core.health import Outcome, State
from gateway.core.policy import Policy, Waiting
from gateway.core.usage import Ending
from gateway.pipeline import CallerStalled
from gateway.ports import Arrival

COMMENT = b": keep-alive\n\n"
GOOD = Script([ROLE + HELLO, STOP, DONE])


def talking(after_s: float | None, **fields: Any) -> Policy:
    """Return the policy with comments after that time, for every class."""
    (model,) = POLICY.models
    waiting = Waiting(**{"max_wait_s": 30.0, "keep_alive_after_s": after_s, **fields})
    classes = tuple(replace(one, waiting=waiting) for one in model.classes)
    return replace(POLICY, models=(replace(model, classes=classes),))


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.pipeline.caller.KEEP_ALIVE_S", 0.01)


async def commented(caller: Caller) -> None:
    """Return once the caller has got a few comments."""
    with anyio.fail_after(10):
        while caller.parts.count(COMMENT) < 3:
            await anyio.lowlevel.checkpoint()


def event_of(caller: Caller) -> Any:
    """Return the error of the event before the end."""
    assert caller.parts[-1].endswith(DONE)
    return json.loads(caller.parts[-1].removesuffix(DONE).removeprefix(b"data: "))["error"]


async def test_a_stream_that_waits_for_its_first_token_gets_comments(world: World) -> None:
    gate = anyio.Event()
    world.policy = talking(0.01)
    world.answers(light_0=Script([ROLE, gate, HELLO, STOP, DONE]))
    caller = Caller()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.run, world.request(), caller)
        await commented(caller)
        assert set(caller.parts) == {COMMENT}
        assert caller.status == 200
        assert caller.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert caller.headers["x-gateway-class"] == "short_chat"
        gate.set()

    answer = [part for part in caller.parts if part != COMMENT]
    assert b"hello" in answer[0]
    assert answer[-1] == DONE
    assert caller.parts[-len(answer) :] == answer  # none after the first token
    assert world.notes.requests[0].ending is Ending.COMPLETED


async def test_a_stream_that_waits_in_line_gets_comments(world: World) -> None:
    gate = anyio.Event()
    world.policy = talking(0.01)
    for name in ("light-0", "light-0", "light-1", "light-1", "push", "push"):
        world.upstream.scripts.setdefault(name, []).append(Script([ROLE + HELLO, gate, STOP, DONE]))
    world.answers(light_0=GOOD, light_1=GOOD, push=GOOD)
    waiting = Caller()

    async with anyio.create_task_group() as tasks:
        for number in range(6):
            tasks.start_soon(_run, world, f"a{number}", Caller())
        await anyio.wait_all_tasks_blocked()
        tasks.start_soon(_run, world, "w", waiting)
        await commented(waiting)
        gate.set()

    assert waiting.parts[-1] == DONE
    assert b"hello" in waiting.body


async def test_a_stream_whose_time_is_over_before_it_is_decided_on_gets_comments_too(world: World) -> None:
    gate = anyio.Event()
    world.policy = talking(0.01)
    world.answers(light_0=Script([ROLE, gate, HELLO, STOP, DONE]))
    caller = Caller()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_run_since, world, world.clock.now() - 1.0, caller)
        await commented(caller)
        gate.set()

    assert caller.parts[-1] == DONE


async def _run_since(world: World, arrived_at: float, caller: Caller) -> None:
    await world.run(world.request(), caller, arrival=Arrival("late", 1_000_000.0, arrived_at))


async def test_before_its_time_there_is_silence_and_a_real_status(world: World) -> None:
    world.policy = talking(20.0)
    for name in POLICY.backends:
        world.fleet.known[name] = replace(world.fleet.known[name], state=State.DOWN)
    caller = Caller()

    with pytest.raises(NoBackend):
        await world.run(world.request(), caller)

    assert caller.status == 0


async def test_another_backend_is_asked_as_long_as_no_token_has_come(world: World) -> None:
    gate = anyio.Event()
    world.policy = talking(0.01)
    world.answers(light_0=Script([ROLE, gate, CRASH]), light_1=GOOD)
    caller = Caller()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.run, world.request(), caller)
        await commented(caller)
        gate.set()

    assert [attempt.outcome for attempt in world.notes.attempts] == [Outcome.FAILED, Outcome.OK]
    assert caller.body.count(b"hello") == 1
    assert caller.parts[-1] == DONE


async def test_a_failure_after_comments_is_an_event(world: World) -> None:
    gate = anyio.Event()
    world.policy = replace(talking(0.01), retry=replace(POLICY.retry, attempts_max=1))
    world.answers(light_0=Script([ROLE, gate, CRASH]))
    caller = Caller()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.run, world.request(), caller)
        await commented(caller)
        gate.set()

    assert event_of(caller)["code"] == "upstream_failed"
    record = world.notes.requests[0]
    assert (record.ending, record.status, record.error_code) == (Ending.FAILED, 200, "upstream_failed")


async def test_a_wait_that_was_too_long_is_an_event(world: World) -> None:
    gate = anyio.Event()
    world.policy = talking(0.01, max_wait_s=5.0)
    for name in ("light-0", "light-0", "light-1", "light-1", "push", "push"):
        world.upstream.scripts.setdefault(name, []).append(Script([ROLE + HELLO, gate, STOP, DONE]))
    waiting = Caller()

    async with anyio.create_task_group() as tasks:
        for number in range(6):
            tasks.start_soon(_run, world, f"a{number}", Caller())
        await anyio.wait_all_tasks_blocked()
        tasks.start_soon(_run, world, "w", waiting)
        await commented(waiting)
        world.clock.time += 6.0
        world.pipeline.room.look()
        with anyio.fail_after(10):
            while not waiting.parts[-1].endswith(DONE):
                await anyio.lowlevel.checkpoint()
        gate.set()

    assert event_of(waiting)["code"] == "waited_too_long"
    assert event_of(waiting)["type"] == "rate_limit_error"


async def test_an_answer_in_one_piece_gets_none(world: World) -> None:
    gate = anyio.Event()
    world.policy = talking(0.0)
    world.answers(light_0=Script([gate, b'{"choices":[{"finish_reason":"stop","message":{}}]}']))
    caller = Caller()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.run, world.request(stream=False), caller)
        await anyio.wait_all_tasks_blocked()
        assert caller.status == 0
        gate.set()

    assert COMMENT not in caller.parts


async def test_a_caller_that_does_not_read_comments_is_gone(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.pipeline.caller.CALLER_STALL_S", 0.05)
    world.policy = talking(0.0)
    world.answers(light_0=Script([ROLE, anyio.Event()]))

    with pytest.raises(CallerStalled), anyio.fail_after(10):
        await world.run(world.request(), Caller(stalls=True))

    assert world.upstream.closed == ["light-0"]
    (record,) = world.notes.requests
    assert record.ending is Ending.LEFT
    assert record.attempts[-1].detail == "the caller read nothing for 0.05 s"


@pytest.mark.parametrize("is_lost", [False, True], ids=["up", "lost"])
async def test_a_first_token_that_waits_for_the_caller_to_read_a_comment_is_not_late(
    world: World, is_lost: bool
) -> None:
    gate, reads = anyio.Event(), anyio.Event()
    world.policy = talking(0.0)
    world.answers(light_0=Script([ROLE, gate, HELLO, STOP, DONE]))
    caller = Caller()

    async def slowly(_: bytes) -> None:
        gate.set()
        await reads.wait()

    caller.before_send = slowly
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.run, world.request(), caller)
        with anyio.fail_after(10):
            while world.pipeline.awaited_since("light-0") is not None or not gate.is_set():
                await anyio.lowlevel.checkpoint()
        await anyio.wait_all_tasks_blocked()
        (attempt,) = world.pipeline._running["light-0"]
        limits = POLICY.pools["light"].timeouts
        assert attempt._deadline.at > anyio.current_time() + limits.total_s
        assert attempt._deadline.latest == inf
        if is_lost:
            world.pipeline.abort_attempts("light-0", 0.0)
            await anyio.wait_all_tasks_blocked()
        reads.set()

    assert caller.body.endswith(DONE)
    assert world.fleet.reports == [("light-0", Outcome.OK)]
    assert [record.ending for record in world.notes.requests] == [Ending.COMPLETED]


async def test_a_caller_that_leaves_while_it_gets_comments_frees_its_place(world: World) -> None:
    world.policy = talking(0.0)
    world.answers(light_0=Script([ROLE, anyio.Event()]))
    caller = Caller()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.run, world.request(), caller)
        await commented(caller)
        tasks.cancel_scope.cancel()

    assert world.upstream.closed == ["light-0"]
    assert world.ledger.load("light-0").seqs == 0


async def test_time_limits_of_the_backend_hold_with_comments(world: World) -> None:
    world.policy = replace(
        talking(0.0),
        pools={
            name: replace(pool, timeouts=Timeouts(first_byte_s=0.1)) for name, pool in POLICY.pools.items()
        },
        retry=replace(POLICY.retry, attempts_max=1),
    )
    world.answers(light_0=Script([ROLE, anyio.Event()]))
    caller = Caller()

    with anyio.fail_after(10):
        await world.run(world.request(), caller)

    assert event_of(caller)["code"] == "upstream_timeout"
    assert COMMENT in caller.parts


async def _run(world: World, number: str, caller: Caller) -> None:
    arrival = Arrival(f"req-{number}", 1_000_000.0, world.clock.now())
    await world.run(world.request(), caller, arrival=arrival)
