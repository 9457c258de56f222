"""Exchanges that a cancellation does not end half way: results, limits, and what is left of them."""

import gc

import anyio
import anyio.lowlevel

from gateway.upstream.exchanges import Exchanges

LONG_S = 60.0


async def answered() -> bytes:
    await anyio.lowlevel.checkpoint()
    return b"answer"


async def silence() -> bytes:
    await anyio.sleep_forever()
    raise AssertionError("for ever")


def scopes() -> int:
    gc.collect()
    return sum(isinstance(one, anyio.CancelScope) for one in gc.get_objects())


async def test_an_exchange_has_its_result_or_none_once_its_time_is_over() -> None:
    exchanges = Exchanges()

    assert await exchanges.run(answered, LONG_S) == b"answer"
    assert await exchanges.run(silence, 0.0) is None


async def test_a_cancelled_task_finishes_its_exchange_and_begins_no_other() -> None:
    exchanges, may_answer, ended = Exchanges(), anyio.Event(), list[str]()

    async def exchange() -> None:
        await may_answer.wait()
        ended.append("first")

    async def run() -> None:
        await exchanges.run(exchange, LONG_S)
        try:
            await anyio.lowlevel.checkpoint()
        finally:
            await exchanges.run(answered, LONG_S)
            ended.append("second")

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
        may_answer.set()

    assert ended == ["first"]


async def test_those_in_progress_can_be_hurried_and_later_ones_have_their_time() -> None:
    exchanges, results = Exchanges(), list[object]()

    async def run() -> None:
        results.append(await exchanges.run(silence, LONG_S))

    with anyio.fail_after(LONG_S / 2):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            tasks.start_soon(run)
            await anyio.wait_all_tasks_blocked()
            exchanges.hurry(0.0)

    assert results == [None, None]
    assert await exchanges.run(answered, LONG_S) == b"answer"


async def test_an_exchange_of_a_cancelled_task_that_is_hurried_has_no_result() -> None:
    """None would say that the server had not answered in time."""
    exchanges, results = Exchanges(), list[object]()

    async def run() -> None:
        results.append(await exchanges.run(silence, LONG_S))

    with anyio.fail_after(LONG_S / 2):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
            exchanges.hurry(0.0)

    assert results == []


async def test_a_hurry_gives_nobody_more_time() -> None:
    exchanges = Exchanges()

    async def exchange() -> bytes:
        exchanges.hurry(LONG_S)
        return await silence()

    with anyio.fail_after(LONG_S / 2):
        assert await exchanges.run(exchange, 0.01) is None


async def test_nothing_is_left_of_exchanges_that_are_over() -> None:
    exchanges = Exchanges()
    await exchanges.run(answered, LONG_S)
    before = scopes()

    for _ in range(20):
        await exchanges.run(answered, LONG_S)

    assert scopes() < before + 20
