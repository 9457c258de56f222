"""A time limit that moves: it ends its block and nothing else, and hides no cancellation of anybody else's.

What passes in these tests is a moment of the event loop's own clock, waited for on that clock.
"""

import asyncio
import socket
import time
from collections.abc import Callable
from math import inf

import anyio
import pytest
from support.loops import on_both_loops

from gateway.pipeline import deadline as deadlines
from gateway.pipeline.deadline import Deadline, Deadlines
from gateway.pipeline.failures import EARLY_S

anyio_backend = on_both_loops


def cancellations() -> int:
    task = asyncio.current_task()
    assert task is not None
    return task.cancelling()


async def until(moment: float) -> None:
    """Return once every timer of that moment has had its turn."""
    reached = asyncio.Event()
    asyncio.get_running_loop().call_at(moment, reached.set)
    await reached.wait()
    await rounds()


async def rounds() -> None:
    """Let the event loop go round: a cancellation that is due comes in one of these."""
    for _ in range(3):
        await asyncio.sleep(0)


def deadline_at(at: float) -> Deadline:
    return Deadline(Deadlines(asyncio.get_running_loop()), at)


def together(first: str, deadline: Deadline, cancel: Callable[[], object]) -> None:
    """Have the deadline pass and `cancel` called, both before the block is told of either."""
    loop = asyncio.get_running_loop()
    if first == "the deadline":
        loop.call_soon(loop.call_soon, cancel)
    else:
        loop.call_soon(cancel)
    deadline.move(-inf)


async def test_it_ends_its_block_when_the_time_has_come() -> None:
    deadline = deadline_at(anyio.current_time() + 0.01)
    with anyio.fail_after(10):
        with deadline:
            await anyio.sleep_forever()

    assert deadline.has_passed
    assert cancellations() == 0
    await rounds()


@pytest.mark.parametrize("at", [-inf, 0.0], ids=["minus-infinity", "past"])
async def test_a_time_that_is_over_ends_the_block_where_it_waits(at: float) -> None:
    deadline, begun, ended = deadline_at(at), False, False
    with anyio.fail_after(10):
        with deadline:
            begun = True
            await anyio.sleep_forever()
            ended = True

    assert (begun, ended, deadline.has_passed) == (True, False, True)


async def test_a_block_that_ends_in_time_is_left_alone() -> None:
    with deadline_at(inf) as deadline:
        await rounds()
        at = anyio.current_time() + 0.01
        deadline.move(at)  # the block ends in the same round of the event loop, so in time on any machine

    await until(at)
    assert not deadline.has_passed
    assert cancellations() == 0


async def test_a_block_that_never_waits_ends_by_itself_however_late() -> None:
    with deadline_at(-inf) as deadline:
        pass

    await rounds()
    assert not deadline.has_passed
    assert cancellations() == 0


async def test_moved_to_later_it_does_nothing_at_its_first_time() -> None:
    at = anyio.current_time() + 0.01
    with deadline_at(at) as deadline:
        deadline.move(inf)
        await until(at)
        assert cancellations() == 0

    assert not deadline.has_passed


async def test_moved_to_later_it_ends_the_block_then() -> None:
    first = anyio.current_time() + 0.01
    last = first + 0.02
    with anyio.fail_after(10):
        with deadline_at(first) as deadline:
            deadline.move(last)
            await until(first)
            await anyio.sleep_forever()

    assert deadline.has_passed
    assert anyio.current_time() >= last - 0.001  # uvloop counts in milliseconds


async def test_moved_over_and_over_it_counts_from_its_last_place() -> None:
    with anyio.fail_after(10):
        with deadline_at(inf) as deadline:
            for wait_s in (9, 0.01, 8, inf, 0.02, 7, 0.01):
                deadline.move(anyio.current_time() + wait_s)
            await anyio.sleep_forever()

    assert deadline.has_passed


async def test_put_off_it_does_nothing_at_its_first_time() -> None:
    at = anyio.current_time() + 0.01
    with deadline_at(at) as deadline:
        deadline.at = inf
        await until(at)
        assert cancellations() == 0

    assert not deadline.has_passed


@pytest.mark.parametrize("is_set_within", [False, True])
async def test_put_off_beyond_the_latest_it_ends_the_block_then(is_set_within: bool) -> None:
    first = anyio.current_time() + 0.01
    latest = first + 0.02
    deadline = deadline_at(first)
    if not is_set_within:
        deadline.latest = latest
    with anyio.fail_after(10):
        with deadline:
            deadline.latest = latest
            deadline.at = inf
            await until(first)
            await anyio.sleep_forever()

    assert deadline.has_passed
    assert anyio.current_time() >= latest - 0.001  # uvloop counts in milliseconds


@pytest.mark.parametrize("to", [-inf, 0.0], ids=["minus-infinity", "past"])
@pytest.mark.parametrize("how", [Deadline.move, Deadline.bound])
async def test_moved_to_the_past_by_somebody_else_it_ends_the_block(
    how: Callable[[Deadline, float], None], to: float
) -> None:
    with anyio.fail_after(10):
        with deadline_at(inf) as deadline:
            asyncio.get_running_loop().call_soon(how, deadline, to)
            await anyio.sleep_forever()

    assert deadline.has_passed


async def test_moved_after_its_block_it_does_nothing() -> None:
    with deadline_at(inf) as deadline:
        await rounds()
    deadline.move(-inf)
    await rounds()

    assert not deadline.has_passed
    assert cancellations() == 0


async def test_moved_after_it_has_passed_it_passes_once() -> None:
    shared = Deadlines(asyncio.get_running_loop())
    with anyio.fail_after(10):
        with Deadline(shared, 0.0) as deadline:
            try:
                await anyio.sleep_forever()
            finally:
                deadline.move(-inf)
                await rounds()
                assert shared.at == inf  # however long the block takes to end

    assert deadline.has_passed
    assert cancellations() == 0


async def test_what_is_raised_in_its_block_is_raised() -> None:
    with pytest.raises(ValueError, match="mine"):
        with deadline_at(inf):
            raise ValueError("mine")


async def test_what_is_raised_for_its_passing_is_raised() -> None:
    with pytest.raises(ValueError, match="mine"):
        with deadline_at(-inf) as deadline:
            try:
                await anyio.sleep_forever()
            except asyncio.CancelledError:
                raise ValueError("mine") from None

    assert not deadline.has_passed
    assert cancellations() == 0


@pytest.mark.parametrize("first", ["the deadline", "the scope"])
async def test_a_scope_around_it_that_is_cancelled_at_the_same_time_is_seen(first: str) -> None:
    went_on = False
    with anyio.CancelScope() as scope:
        with deadline_at(inf) as deadline:
            together(first, deadline, scope.cancel)
            await anyio.sleep_forever()
        await rounds()
        went_on = True

    assert scope.cancelled_caught
    assert not went_on
    assert cancellations() == 0


async def test_a_scope_around_it_that_was_cancelled_before_is_seen() -> None:
    with anyio.CancelScope() as scope:
        scope.cancel()
        with deadline_at(-inf) as deadline:
            await anyio.sleep_forever()
        await anyio.lowlevel.checkpoint()
        raise AssertionError("went on")

    assert scope.cancelled_caught
    assert not deadline.has_passed
    assert cancellations() == 0


async def test_a_scope_within_it_that_is_cancelled_does_not_end_it() -> None:
    with deadline_at(inf) as deadline:
        with anyio.CancelScope() as scope:
            scope.cancel()
            await anyio.sleep_forever()
        await rounds()

    assert scope.cancelled_caught
    assert not deadline.has_passed


@pytest.mark.parametrize("first", ["the deadline", "the scope"])
async def test_a_scope_within_it_that_is_cancelled_at_the_same_time_does_not_hide_it(first: str) -> None:
    with anyio.fail_after(10):
        with deadline_at(inf) as deadline:
            with anyio.CancelScope() as scope:
                together(first, deadline, scope.cancel)
                await anyio.sleep_forever()
            await anyio.sleep_forever()

    assert deadline.has_passed
    assert cancellations() == 0


@pytest.mark.parametrize("first", ["the deadline", "the task"])
async def test_a_task_that_is_cancelled_at_the_same_time_is_cancelled(first: str) -> None:
    went_on = False

    async def limited() -> None:
        nonlocal went_on
        with deadline_at(inf) as deadline:
            together(first, deadline, task.cancel)
            await anyio.sleep_forever()
        went_on = True

    task = asyncio.get_running_loop().create_task(limited())
    with anyio.fail_after(10):
        await asyncio.wait([task])

    assert task.cancelled()
    assert not went_on


async def test_a_task_that_is_cancelled_is_cancelled() -> None:
    async def limited() -> None:
        with deadline_at(inf):
            await anyio.sleep_forever()

    task = asyncio.get_running_loop().create_task(limited())
    await rounds()
    task.cancel()
    await asyncio.wait([task])

    assert task.cancelled()


async def test_of_many_each_ends_its_own_block_in_time() -> None:
    shared, now = Deadlines(asyncio.get_running_loop()), anyio.current_time()
    early: dict[float, float] = {}  # how much too early each block ended, by when it should

    async def limited(at: float, moved_to: float | None = None) -> None:
        with Deadline(shared, at) as deadline:
            if moved_to is not None:
                deadline.move(moved_to)
            await anyio.sleep_forever()
        assert deadline.has_passed
        due = at if moved_to is None else moved_to
        early[round(due - now, 3)] = max(0.0, due - anyio.current_time())

    async def brief() -> None:
        with Deadline(shared, now + 0.005):  # its timer finds nothing left of it
            await rounds()

    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(brief)
            tasks.start_soon(limited, now + 0.06)
            tasks.start_soon(limited, now + 100, now + 0.02)
            tasks.start_soon(limited, now + 0.04)
            tasks.start_soon(limited, now + 0.01, now + 0.08)

    assert early == {0.02: 0, 0.04: 0, 0.06: 0, 0.08: 0}
    assert shared.at == inf  # nothing is looked for any more
    assert shared._timer is None


@pytest.mark.parametrize("passing", ["inner", "outer", "both"])
async def test_one_within_another(passing: str) -> None:
    went_on = False
    with anyio.fail_after(10):
        with deadline_at(inf) as outer:
            with deadline_at(inf) as inner:
                if passing != "inner":
                    outer.move(-inf)
                if passing != "outer":
                    inner.move(-inf)
                await anyio.sleep_forever()
            await rounds()
            went_on = True

    assert outer.has_passed == (passing != "inner")
    assert inner.has_passed == (passing == "inner")
    assert went_on == (passing == "inner")
    assert cancellations() == 0


@pytest.mark.parametrize("has_come", [True, False], ids=["it-had-come", "nothing-had-come"])
async def test_what_came_while_the_process_stood_still_is_read_before_a_deadline_counts(
    has_come: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deadlines, "LATE_S", 0.01)
    loop, is_readable = asyncio.get_running_loop(), asyncio.Event()
    here, there = socket.socketpair()

    async def read() -> None:
        await is_readable.wait()
        await rounds()
        deadline.move(inf)

    with here, there:
        at = loop.time() + 0.02
        with deadline_at(at) as deadline:
            reader = loop.create_task(read())
            await rounds()
            loop.add_reader(here, is_readable.set)
            if has_come:
                there.send(b"x")
            time.sleep(0.1)  # noqa: ASYNC251 - this is the process that stands still
            await until(loop.time() + 2 * deadlines.GRACE_S)
        loop.remove_reader(here)
        reader.cancel()

    assert deadline.has_passed is not has_come
    assert cancellations() == 0


async def test_a_process_that_never_catches_up_still_ends_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "LATE_S", -1.0)  # every look is late
    with anyio.fail_after(10):
        with deadline_at(anyio.current_time() + 0.01) as deadline:
            await anyio.sleep_forever()

    assert deadline.has_passed


async def test_what_is_to_end_at_once_is_given_no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "GRACE_S", 1_000.0)
    with anyio.fail_after(10):
        with deadline_at(inf) as deadline:
            deadline.move(-inf)
            await anyio.sleep_forever()

    assert deadline.has_passed


async def test_a_process_that_is_in_time_gives_no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "LATE_S", inf)  # no look is late
    at = anyio.current_time() + 0.01
    with deadline_at(at) as deadline:
        await until(at + deadlines.GRACE_S / 2)

    assert deadline.has_passed


@pytest.mark.parametrize("first", ["the deadline", "the scope"])
async def test_a_scope_cancelled_between_two_steps_of_the_block_recognizes_it(first: str) -> None:
    loop = asyncio.get_running_loop()
    with anyio.fail_after(10):
        with anyio.CancelScope() as scope:
            with deadline_at(inf) as deadline:
                # Not `move`: the turn of its timer comes after the step.
                both: list[Callable[[], object]] = [deadline.expire, scope.cancel]
                for cancel in both if first == "the deadline" else reversed(both):
                    loop.call_soon(cancel)
                await asyncio.sleep(0)
                await anyio.sleep_forever()

    assert scope.cancelled_caught or deadline.has_passed
    assert cancellations() == 0


async def test_a_timer_that_allows_for_early_ones_is_never_early() -> None:
    """A backend's pause would not be over yet, and nothing would look again."""
    loop, early_s = asyncio.get_running_loop(), []
    for number in range(50):
        wait_s, reached, began_at = 0.005 + number / 10_000, asyncio.Event(), time.monotonic()
        loop.call_later(wait_s + EARLY_S, reached.set)
        await reached.wait()
        early_s.append(began_at + wait_s - time.monotonic())
    assert max(early_s) <= 0
