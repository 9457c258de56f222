"""What an attempt writes down while its store is slow, away or has lost something, which a test's does."""

from typing import cast

import anyio
import pytest

from gateway.core.errors import StoreUnavailable, UpstreamFailed
from gateway.core.jobs import Chunk, Job, JobStatus, NewJob
from gateway.jobs.answer_writer import AnswerWriter, JobLost
from gateway.pipeline import CallerStalled
from gateway.ports import JobStore

WITHIN_S = 20.0
TOO_MUCH = b"12345"


class Store:
    """What an attempt asks of ports.JobStore: it answers once it may, and each time with the next answer."""

    def __init__(self, *answers: bool | Exception) -> None:
        self.answers = list(answers)
        self.chunks: list[tuple[int, bool, bytes]] = []
        self.asked, self.may = anyio.Event(), anyio.Event()

    async def append(self, job_id: str, claim: str, chunk: Chunk) -> bool:
        self.asked.set()
        await self.may.wait()
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        self.chunks.append((chunk.number, chunk.restarts, chunk.data))
        return answer


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.jobs.answer_writer.CHUNK_S", 0.0)
    monkeypatch.setattr("gateway.jobs.answer_writer.AGAIN_S", 0.0)
    monkeypatch.setattr("gateway.jobs.answer_writer.GATHERED_MAX", len(TOO_MUCH) - 1)


def writer_to(store: Store) -> AnswerWriter:
    new = NewJob(id="a", key="alice", lane="m/light", body=b"{}")
    job = Job(new, JobStatus.IN_PROGRESS, created_at=0.0, attempt=1, claim="1")
    return AnswerWriter(cast(JobStore, store), job, restarts=True, on_start=lambda: None)


async def test_an_answer_waits_while_too_much_of_it_is_unwritten() -> None:
    store = Store(StoreUnavailable("away"), True, True)
    writer = writer_to(store)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(writer.run)
        await writer.send(TOO_MUCH)
        await store.asked.wait()
        await writer.send(TOO_MUCH)  # the first is under way
        store.may.set()
        with anyio.fail_after(WITHIN_S):
            await writer.send(b"6")
        tasks.cancel_scope.cancel()
    assert store.chunks == [(0, True, TOO_MUCH), (1, False, TOO_MUCH)]


async def test_who_has_nothing_to_write_rests() -> None:
    store = Store(True)
    store.may.set()
    writer = writer_to(store)
    with anyio.fail_after(WITHIN_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(writer.run)
            await anyio.wait_all_tasks_blocked()
            await writer.send(b"1")
            await store.asked.wait()
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
    assert store.chunks == [(0, True, b"1")]


async def test_what_is_left_at_an_answer_s_end_is_written_once_the_store_is_back() -> None:
    store = Store(StoreUnavailable("away"), True)
    store.may.set()
    writer = writer_to(store)
    await writer.send(b"1")
    await writer.write_all()
    await writer.write_all()  # there is nothing left
    assert store.chunks == [(0, True, b"1")]


@pytest.mark.parametrize("way", ["run", "write_all"])
async def test_a_store_that_is_away_is_not_asked_all_the_time(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.jobs.answer_writer.AGAIN_S", 1000.0)
    store = Store(StoreUnavailable("away"), True)
    store.may.set()
    writer = writer_to(store)
    await writer.send(b"1")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(getattr(writer, way))
        await store.asked.wait()
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    assert store.chunks == []


@pytest.mark.parametrize("answer", [False, ValueError("a gap")], ids=["lost", "gap"])
async def test_an_answer_that_cannot_be_written_any_more_does_not_wait(answer: bool | Exception) -> None:
    store = Store(answer)
    writer = writer_to(store)

    async def go() -> None:
        store.may.set()

    with anyio.fail_after(WITHIN_S):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(writer.run)
            await writer.send(TOO_MUCH)
            await store.asked.wait()
            await writer.send(TOO_MUCH)  # the first is under way
            tasks.start_soon(go)
            with pytest.raises(CallerStalled) as raised:
                await writer.send(b"6")
        await writer.write_all()  # it is given up
    assert isinstance(raised.value, JobLost) is (answer is False)


async def test_an_answer_without_an_end_is_the_backends_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.jobs.answer_writer.KEPT_BYTES_MAX", 3)
    writer = writer_to(Store())

    await writer.send(b"123")
    with pytest.raises(UpstreamFailed):
        await writer.send(b"4")
