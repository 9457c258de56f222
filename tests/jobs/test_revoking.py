"""What is revoked: all of it, in the end, however long its store is away."""

import logging

import anyio
import anyio.lowlevel
import pytest

from gateway.core.errors import StoreUnavailable
from gateway.jobs import revoking
from gateway.jobs.revoking import Revocations


class Store:
    """A store that does not answer for the first `missed` times, per id."""

    def __init__(self, **missed: int) -> None:
        self.missed = missed
        self.asked: list[str] = []

    async def revoke(self, id: str, /) -> bool:
        self.asked.append(id)
        if self.missed.get(id, 0) > 0:
            self.missed[id] -= 1
            raise StoreUnavailable("no answer")
        return id != "b"  # which never reached it


async def test_what_cannot_be_revoked_now_is_tried_again_behind_the_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(revoking, "AGAIN_S", 0.0)
    revocations, store = Revocations(), Store(a=2)
    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(revocations.run)
            await anyio.wait_all_tasks_blocked()
            revocations.add("a", store)
            revocations.add("b", store)
            while revocations.waiting:
                await anyio.lowlevel.checkpoint()
            await anyio.wait_all_tasks_blocked()
            revocations.add("c", store)
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()

    assert store.asked == ["a", "b", "a", "a", "c"]
    assert revocations.waiting == 0
    assert [text.split()[0] for text in caplog.messages] == ["a", "c"]


async def test_a_store_that_is_away_is_not_asked_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(revoking, "AGAIN_S", 1000.0)
    revocations, store = Revocations(), Store(a=1)
    revocations.add("a", store)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(revocations.run)
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()

    assert (store.asked, revocations.waiting) == (["a"], 1)


def test_of_more_than_can_be_remembered_the_oldest_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(revoking, "KEPT_MAX", 2)
    revocations = Revocations()
    for id in "abc":
        revocations.add(id, Store())

    assert list(revocations._stores) == ["b", "c"]


def test_what_is_left_at_the_end_is_said(caplog: pytest.LogCaptureFixture) -> None:
    revocations = Revocations()
    revocations.add("a", Store())
    revocations.add("b", Store())
    revocations.give_up()

    assert [text.split()[0] for text in caplog.messages] == ["a", "b"]
