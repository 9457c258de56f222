"""Jobs for their callers, where the store is a few answers. With a real one: tests/e2e/test_background.py."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import anyio
import anyio.lowlevel
import pytest
from support.world import Incoming, World

from gateway.core.errors import (
    NOT_AGAIN,
    AtCapacity,
    GatewayError,
    InvalidRequest,
    ResponseNotFound,
    StoreUnavailable,
    StreamBroken,
)
from gateway.core.jobs import Chunk, Job, JobError, JobPriority, JobStatus, Lane, NewJob, Queue, Refusal
from gateway.core.policy import OnDisconnect
from gateway.core.responses.replay import JobFacts
from gateway.downstream.background import Background, JobRules, headers_kept
from gateway.downstream.callers_jobs import LONG_AT_ONCE, LONG_BYTES, CallersJobs, retry_after_s
from gateway.downstream.job_waits import Waits
from gateway.downstream.relay import HttpDownstream
from gateway.downstream.waiting_caller import Waiter, WaitingCaller
from gateway.ports import Headers, JobStore


def background_of(world: World, store: object, rules: JobRules | None = None) -> Background:
    return Background(
        cast(JobStore, store),
        world.pipeline,
        world.questions,
        rules or JobRules(),
        world.clock,
        lambda _: 0.0,
        world.notes,
        lambda _: None,
    )


def jobs_of(world: World, store: object) -> CallersJobs:
    return CallersJobs(cast(JobStore, store), world.clock, lambda _: 0.0)


class Queued:
    """What `CallersJobs.place` asks of `ports.JobStore`; it answers once it is let."""

    def __init__(self) -> None:
        self.asked = 0
        self.may_answer = anyio.Event()
        self.drained_at: float | None = None

    async def queue(self) -> Queue:
        self.asked += 1
        await self.may_answer.wait()
        return Queue((Lane("m/c", 9, 1, drain_per_s=0.5),), self.drained_at)


async def test_all_who_look_at_their_place_at_once_ask_the_store_once() -> None:
    world, store = World(), Queued()
    jobs = jobs_of(world, store)
    job = Job(NewJob("resp_1", None, "m/c", b"{}"), JobStatus.QUEUED, position=4)

    async with anyio.create_task_group() as tasks:
        for _ in range(100):
            tasks.start_soon(jobs.place, job)
        await anyio.wait_all_tasks_blocked()
        store.may_answer.set()

    assert store.asked == 1
    assert await jobs.place(job) == {"position": 4, "expected_start_s": 8.0}
    world.clock.time += 3.0
    await jobs.place(job)
    assert store.asked == 2
    world.clock.time += 3.0
    store.drained_at = 1.0
    assert await jobs.place(job) == {"position": 4, "expected_start_s": None}


class Unsure:
    """What `Background.submit` asks of `ports.JobStore`; nobody knows what came of it."""

    async def submit(self, *_: object, **__: object) -> Job:
        raise StoreUnavailable("The job store does not answer.")


@pytest.mark.parametrize(("idempotency_key", "is_revoked"), [(None, True), ("once", False)])
async def test_a_job_that_may_have_been_accepted_is_revoked_unless_its_caller_can_find_it_by_its_key(
    idempotency_key: str | None, is_revoked: bool
) -> None:
    world, revoked = World(), list[str]()
    background = background_of(world, Unsure())
    background.revoke = revoked.append

    with pytest.raises(StoreUnavailable):
        await background.submit(
            Incoming(world.request(), members={"messages": []}),
            JobFacts({"id": "resp_1"}, "0" * 32, 0, {}, {}),
            id="resp_1",
            store=True,
            idempotency_key=idempotency_key,
            route="/v1/responses",
            body=b"{}",
        )

    assert revoked == (["resp_1"] if is_revoked else [])


class Accepting:
    """What `Background.submit` asks of `ports.JobStore`: it says `says`, or accepts what comes."""

    def __init__(self, says: Job | Refusal | None = None) -> None:
        self.says = says
        self.submitted: list[NewJob] = []

    async def submit(self, job: NewJob, *_: object, **__: object) -> Job | Refusal:
        self.submitted.append(job)
        return self.says or Job(job, JobStatus.QUEUED, created_at=7.9)


def submitting(
    background: Background, headers: Mapping[str, str] | None = None, key: str | None = None, **more: Any
) -> Awaitable[tuple[Job, JobFacts | None]]:
    facts = JobFacts({"id": "resp_1"}, "0" * 32, 0, {}, {})
    given: dict[str, Any] = {
        "id": "resp_1",
        "store": True,
        "idempotency_key": "k",
        "route": "/v1/responses",
        "body": b"{}",
    }
    request = replace(World().request(), headers=headers or {}, key=key)
    return background.submit(Incoming(request, members={"messages": []}), facts, **(given | more))


@pytest.mark.parametrize(
    ("key", "asked", "priority"),
    [
        ("ops", None, "high"),
        ("ops", "normal", "normal"),
        ("ops", "batch", "batch"),
        ("nightly", None, "batch"),
        ("nightly", "normal", "batch"),
        ("nightly", "high", "batch"),
        ("alice", None, "normal"),
        ("alice", "high", "normal"),
        (None, "high", "normal"),
        (None, "batch", "batch"),
    ],
)
async def test_a_caller_may_ask_for_less_priority_than_its_key_has_and_never_for_more(
    key: str | None, asked: str | None, priority: str
) -> None:
    rules = JobRules(priorities={"ops": JobPriority.HIGH, "nightly": JobPriority.BATCH})
    headers = {} if asked is None else {"x-gateway-priority": asked}

    job, _ = await submitting(background_of(World(), Accepting(), rules), headers, key)

    assert job.new.priority == priority


@pytest.mark.parametrize(
    ("written", "expires_s"),
    [(None, None), ("0.5", 0.5), ("2592000", 2_592_000), ("2592001", 0), ("0", 0), ("-1", 0), ("nan", 0)],
)
async def test_how_long_an_answer_is_worth_something_is_within_bounds(
    written: str | None, expires_s: float | None
) -> None:
    headers = {} if written is None else {"x-gateway-expires-s": written}
    submitted = submitting(background_of(World(), Accepting()), headers)

    if expires_s == 0:
        with pytest.raises(InvalidRequest) as refused:
            await submitted
        assert refused.value.param == "x-gateway-expires-s"
    else:
        job, _ = await submitted
        assert job.new.expires_s == expires_s


@pytest.mark.parametrize(("store", "keep_s"), [(True, 86_400.0), (False, 600.0)])
async def test_a_job_that_is_accepted_is_told_with_its_facts_and_kept_as_its_caller_wants(
    store: bool, keep_s: float
) -> None:
    jobs = Accepting()

    job, facts = await submitting(background_of(World(), jobs), store=store)

    assert (job.new, job.new.keep_s) == (jobs.submitted[0], keep_s)
    assert facts is not None and facts.response == {"id": "resp_1", "created_at": 7}


async def test_a_job_that_was_accepted_before_is_told_without_the_facts_of_its_repeat() -> None:
    former = Job(NewJob("resp_0", None, "m/c", b"{}"), JobStatus.COMPLETED)

    assert await submitting(background_of(World(), Accepting(former))) == (former, None)


@pytest.mark.parametrize("refusal", Refusal)
async def test_a_job_that_is_refused_says_why(refusal: Refusal) -> None:
    with pytest.raises(GatewayError) as refused:
        await submitting(background_of(World(), Accepting(refusal)))

    retry_after_s = 30 if refusal is Refusal.TOO_MANY_JOBS else None
    assert (refused.value.code, refused.value.retry_after_s) == (refusal.value, retry_after_s)


async def test_who_has_too_many_bytes_of_jobs_is_told_not_to_come_back_by_itself() -> None:
    with pytest.raises(GatewayError) as refused:
        await submitting(background_of(World(), Accepting(Refusal.TOO_MANY_BYTES)))

    assert (refused.value.status, refused.value.headers) == (429, NOT_AGAIN)


def test_only_headers_of_the_site_that_are_short_are_kept() -> None:
    longest = {"x-team": "a" * 250}
    secrets = {"authorization": "Bearer a", "cookie": "a", "x-api-key": "a", "x-amz-security-token": "a"}

    assert headers_kept({**secrets, **longest, "x-long": "a" * 251}) == longest
    assert headers_kept({"x-max-tokens": "9"}) == {"x-max-tokens": "9"}
    assert len(headers_kept({f"x-{number}": "" for number in range(99)})) == 32


@pytest.mark.parametrize(
    ("start_s", "again_s"),
    [
        (None, 5),
        (3.0, 5),
        (30.4, 30),
        (400.0, 59),
    ],
)
def test_when_a_job_is_to_be_asked_for_again(start_s: float | None, again_s: int) -> None:
    assert retry_after_s({"position": 1, "expected_start_s": start_s}) == again_s


class Answered:
    """What `CallersJobs` asks of `ports.JobStore`: a job that ends after it was waited for `idle` times."""

    def __init__(self, job: Job, *said: bytes, idle: int = 0) -> None:
        self.job = job
        self.idle = idle
        self.said = [Chunk(number, 1, data) for number, data in enumerate(said)]
        self.got = self.asked = 0
        self.known: list[JobStatus] = []

    async def chunks(self, job_id: str, start: int = 0, limit: int = 1000) -> Sequence[Chunk]:
        return self.said[start : start + limit] if self.job.status.is_final else ()

    async def all_chunks(self, job_id: str) -> Sequence[Chunk]:
        return self.said

    async def changed(self, job_id: str, chunks: int, wait_s: float, status: JobStatus) -> bool:
        self.known.append(status)
        if len(self.known) <= self.idle:
            return False
        self.job = replace(self.job, status=JobStatus.COMPLETED, attempt=1, chunks=len(self.said))
        return True

    async def get(self, job_id: str) -> Job:
        self.got += 1
        return replace(self.job, new=replace(self.job.new, body=b"", facts=b""))

    async def load(self, job_id: str) -> Job:
        return self.job

    async def facts(self, job_id: str) -> bytes:
        self.asked += 1
        return self.job.new.facts


async def test_who_follows_a_job_reads_its_facts_once_and_asks_after_it_where_nothing_more_comes() -> None:
    world = World()
    facts = JobFacts({"id": "resp_1", "status": "queued"}, "0" * 32, 0, {}, {}).encoded()
    job = Job(NewJob("resp_1", None, "m/c", b"{}", facts), JobStatus.QUEUED, position=1)
    event = b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":%b}]}\n\n'
    store = Answered(job, event % b"null", event % b"null", event % b'"stop"', idle=2)
    jobs = jobs_of(world, store)

    batches = [batch async for batch in jobs.events(job, -1)]
    told = [event["type"] for batch in batches for event in batch]

    assert [len(batch) for batch in batches[1:3]] == [0, 0]  # signs of life while nothing happens
    assert told[0] == "response.created"
    assert told[-1] == "response.completed"
    assert (store.asked, store.got) == (1, 1)
    assert store.known == 3 * [JobStatus.QUEUED]  # what it was when it was read: nothing is missed in between


class Intermittent(Answered):
    """A store that is away at some of the questions: `answers` tells which it answers."""

    def __init__(self, job: Job, *said: bytes, answers: Sequence[bool]) -> None:
        super().__init__(job, *said)
        self.answers = list(answers)

    async def chunks(self, job_id: str, start: int = 0, limit: int = 1000) -> Sequence[Chunk]:
        if self.answers and not self.answers.pop(0):
            raise StoreUnavailable("The job store does not answer.", retry_after_s=5)
        return await super().chunks(job_id, start, limit)


@pytest.mark.parametrize(
    ("answers", "last"),
    [
        pytest.param([False, True, False, True], "response.completed", id="twice"),
        pytest.param(4 * [False, True], "response.completed", id="often-but-never-for-long"),
        pytest.param([True, *5 * [False]], "error", id="for-too-long"),
        pytest.param(5 * [False], "error", id="before-anything-was-told"),
    ],
)
async def test_a_follower_waits_for_a_store_that_is_away(
    answers: Sequence[bool], last: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World()

    def rest(*_: float) -> float:
        world.clock.time += 25.0
        return 0.0

    monkeypatch.setattr("gateway.downstream.job_waits.random.uniform", rest)
    facts = JobFacts({"id": "resp_1", "status": "queued"}, "0" * 32, 0, {}, {}).encoded()
    job = Job(NewJob("resp_1", None, "m/c", b"{}", facts), JobStatus.QUEUED, position=1)
    event = b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":%b}]}\n\n'
    store = Intermittent(job, event % b"null", event % b'"stop"', answers=answers)
    store.idle = len(answers) - 3  # it ends with the last answer
    jobs = jobs_of(world, store)

    batches = [batch async for batch in jobs.events(job, -1)]
    told = [one for batch in batches for one in batch]

    assert sum(not batch for batch in batches) >= min(answers.count(False), 3)  # signs of life
    assert told[-1]["type"] == last
    numbers = [one["sequence_number"] for one in told]
    expected = list(range(len(told))) if last != "error" else [*range(len(told) - 1), len(told) - 2]
    assert numbers == expected


@pytest.mark.parametrize(("key", "batch"), [("bob", ""), (None, ""), ("alice", "batch_1")])
async def test_a_job_of_another_key_and_a_line_of_a_batch_are_not_there(key: str | None, batch: str) -> None:
    job = Job(NewJob("resp_1", "alice", "m/c", b"", batch=batch), JobStatus.QUEUED)
    jobs = jobs_of(World(), Answered(job))

    assert await jobs.get(key, "resp_1") is None
    assert await jobs.cancel(key, "resp_1") is None
    assert not await jobs.delete(key, "resp_1")


class Gone(Answered):
    """A store that has forgotten a job since its caller has looked."""

    async def get(self, job_id: str) -> Job:
        return cast(Job, None)

    load = get

    async def facts(self, job_id: str) -> bytes:
        return cast(bytes, None)

    async def all_chunks(self, job_id: str) -> Sequence[Chunk]:
        return ()


@pytest.mark.parametrize("status", [JobStatus.QUEUED, JobStatus.COMPLETED])
@pytest.mark.parametrize("way", ["over", "response", "answer", "facts"])
async def test_a_job_that_is_gone_meanwhile_is_not_there(way: str, status: JobStatus) -> None:
    facts = JobFacts({"id": "resp_1", "status": "queued"}, "0" * 32, 0, {}, {})
    job = Job(NewJob("resp_1", None, "m/c", b"{}"), status, chunks=1)
    jobs = jobs_of(World(), Gone(job))
    more: dict[str, tuple[Any, ...]] = {"over": (1.0,)}
    if status.is_final:
        more["response"] = (facts,)

    with pytest.raises(ResponseNotFound):
        await getattr(jobs, way)(job, *more.get(way, ()))


async def test_a_job_that_was_returned_to_the_queue_is_queued() -> None:
    facts = JobFacts({"id": "resp_1", "status": "queued"}, "0" * 32, 0, {}, {})
    job = Job(NewJob("resp_1", None, "m/c", b"{}"), JobStatus.QUEUED, attempt=1, position=1)
    store = Queued()
    store.may_answer.set()

    response = await jobs_of(World(), store).response(job, facts)

    assert (response["status"], response["queue"]["position"]) == ("queued", 1)


class Held(Answered):
    """A store that answers who reads an answer only when it may."""

    def __init__(self, job: Job, *said: bytes) -> None:
        super().__init__(job, *said)
        self.may_answer = anyio.Event()
        self.reading = self.most = 0

    async def chunks(self, job_id: str, start: int = 0, limit: int = 1000) -> Sequence[Chunk]:
        self.reading += 1
        self.most = max(self.most, self.reading)
        await self.may_answer.wait()
        self.reading -= 1
        return self.said[start:]

    async def all_chunks(self, job_id: str) -> Sequence[Chunk]:
        return await self.chunks(job_id)


@pytest.mark.parametrize("way", ["response", "answer", "events"])
@pytest.mark.parametrize(("size_bytes", "at_once"), [(LONG_BYTES, 5), (LONG_BYTES + 1, LONG_AT_ONCE)])
async def test_few_long_answers_are_read_at_once(way: str, size_bytes: int, at_once: int) -> None:
    facts = JobFacts({"id": "resp_1", "status": "queued"}, "0" * 32, 0, {}, {}).encoded()
    new = NewJob("resp_1", None, "m/c", b'{"model":"m"}', facts)
    job = Job(new, JobStatus.COMPLETED, attempt=1, chunks=1, size_bytes=size_bytes)
    store = Held(job, b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":"stop"}]}\n\n')
    jobs, told = jobs_of(World(), store), list[object]()

    async def ask() -> None:
        if way == "events":
            told.append([one async for batch in jobs.events(job, -1) for one in batch][-1])
        else:
            told.append(await getattr(jobs, way)(job))

    with anyio.fail_after(3):
        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(ask)
            await anyio.wait_all_tasks_blocked()
            assert store.reading == at_once
            store.may_answer.set()

    assert store.most == at_once
    assert told == 5 * told[:1]


async def test_who_follows_a_long_answer_takes_no_turn_for_what_is_new() -> None:
    facts = JobFacts({"id": "resp_1", "status": "queued"}, "0" * 32, 0, {}, {}).encoded()
    new = NewJob("resp_1", None, "m/c", b"{}", facts)
    running = Job(new, JobStatus.IN_PROGRESS, attempt=1, size_bytes=LONG_BYTES + 1)
    store = Held(running)
    jobs = jobs_of(World(), store)

    async def follow() -> None:
        async for _ in jobs.events(running, -1):
            pass

    async with anyio.create_task_group() as tasks:
        for _ in range(5):
            tasks.start_soon(follow)
        await anyio.wait_all_tasks_blocked()
        assert store.reading == 5
        tasks.cancel_scope.cancel()


class Unchanged(Answered):
    """A store in which nothing happens any more."""

    async def changed(self, job_id: str, chunks: int, wait_s: float, status: JobStatus) -> bool:
        await anyio.sleep_forever()
        return False


@pytest.mark.parametrize(
    "store",
    [
        pytest.param(Unchanged, id="quiet"),
        pytest.param(partial(Intermittent, answers=9 * [False]), id="away"),
    ],
)
@pytest.mark.parametrize("is_late", [False, True], ids=["waits", "comes-later"])
async def test_a_follower_is_told_that_the_gateway_stops(store: Callable[..., Any], is_late: bool) -> None:
    world = World()
    facts = JobFacts({"id": "resp_1", "status": "queued"}, "0" * 32, 0, {}, {}).encoded()
    job = Job(NewJob("resp_1", None, "m/c", b"{}", facts), JobStatus.QUEUED, position=1)
    jobs = jobs_of(world, store(job))
    told: list[Any] = []

    async def follow() -> None:
        told.extend([one async for batch in jobs.events(job, -1) for one in batch])

    with anyio.fail_after(3):
        async with anyio.create_task_group() as tasks:
            if is_late:
                jobs.waits.end()
            tasks.start_soon(follow)
            await anyio.wait_all_tasks_blocked()
            jobs.waits.end()

    *events, last = told
    assert [one["type"] for one in events] == ["response.created", "response.queued"][: len(events)]
    assert (last["type"], last["code"]) == ("error", "draining")
    assert last["sequence_number"] == len(events) - 1


async def test_what_waits_for_a_job_ends_with_its_process_and_what_is_over_is_forgotten() -> None:
    waits = Waits()
    with waits.until_end() as former:
        pass

    waits.end()
    with anyio.fail_after(3), waits.until_end() as late:
        await anyio.sleep_forever()

    assert late.cancelled_caught
    assert not former.cancel_called


@pytest.mark.parametrize(("is_placed", "got"), [(False, 1), (True, 3)])
async def test_a_job_that_has_not_changed_is_asked_after_only_for_its_place(
    is_placed: bool, got: int
) -> None:
    job = Job(NewJob("resp_1", None, "m/c", b""), JobStatus.QUEUED, position=9)
    store = Answered(job, idle=2)
    jobs = jobs_of(World(), store)

    for _ in range(3):
        job, _ = await jobs.news(job, None, 10.0, is_placed=is_placed)

    assert job.status is JobStatus.COMPLETED
    assert store.got == got


class Lagging(Answered):
    """A store replaced, after some chunks were read, by a replica with others in their place, or none."""

    def __init__(self, job: Job, read: Sequence[Chunk], then: Sequence[Chunk]) -> None:
        super().__init__(job)
        self.lists = [read, then]

    async def chunks(self, job_id: str, start: int = 0, limit: int = 1000) -> Sequence[Chunk]:
        held = self.lists.pop(0) if len(self.lists) > 1 else self.lists[0]
        return held[start : start + limit]

    async def changed(self, job_id: str, chunks: int, wait_s: float, status: JobStatus) -> bool:
        await anyio.lowlevel.checkpoint()
        return True


def _words(*said: str, attempt: int = 1, since: int = 0) -> list[Chunk]:
    event = 'data: {"choices":[{"index":0,"delta":{"content":"%s"},"finish_reason":null}]}\n\n'
    return [Chunk(since + at, attempt, (event % word).encode()) for at, word in enumerate(said)]


@pytest.mark.parametrize("way", ["events", "news"])
@pytest.mark.parametrize(
    "then",
    [
        pytest.param(_words("a"), id="shorter"),
        pytest.param([], id="empty"),
        pytest.param([*_words("a"), *_words("b c", "d", "e", attempt=2, since=1)], id="with-others"),
        pytest.param(_words("a", "b c", "d", "e"), id="with-others-of-the-same-attempt"),
    ],
)
async def test_who_follows_an_answer_of_which_the_store_has_lost_some_is_cut_off(
    way: str, then: Sequence[Chunk]
) -> None:
    """What comes after the loss does not follow what was told before it: it must not pass for one answer."""
    facts = JobFacts({"id": "resp_1", "status": "queued"}, "0" * 32, 0, {}, {}).encoded()
    new = NewJob("resp_1", None, "m/c", b"{}", facts)
    job = Job(new, JobStatus.IN_PROGRESS, attempt=1, chunks=2)
    read = _words("a", "b")
    jobs = jobs_of(World(), Lagging(job, read, then))

    if way == "news":
        assert await jobs.news(job, None, 10.0, is_placed=False) == (job, read)
        with pytest.raises(StreamBroken, match="/v1/responses/resp_1"):
            await jobs.news(job, read[-1], 10.0, is_placed=False)
        return
    with anyio.fail_after(3):
        told = [event async for batch in jobs.events(job, -1) for event in batch]
    assert [event["delta"] for event in told if "delta" in event] == ["a", "b"]
    assert (told[-1]["type"], told[-1].get("code")) == ("error", "stream_broken")


@pytest.mark.parametrize("way", ["events", "news"])
@pytest.mark.parametrize("left", [[], ["a"]], ids=["all", "the-end"])
async def test_who_follows_a_job_that_has_ended_is_told_if_the_store_has_lost_its_answer(
    way: str, left: Sequence[str]
) -> None:
    facts = JobFacts({"id": "resp_1", "status": "queued"}, "0" * 32, 0, {}, {}).encoded()
    job = Job(NewJob("resp_1", None, "m/c", b"{}", facts), JobStatus.COMPLETED, attempt=1, chunks=2)
    read = _words(*left)
    jobs = jobs_of(World(), Lagging(job, read, read))

    if way == "news":
        last = read[-1] if read else None
        with pytest.raises(ResponseNotFound):
            await jobs.news(job, last, 10.0, is_placed=False)
        return
    with anyio.fail_after(3):
        told = [event async for batch in jobs.events(job, -1) for event in batch]
    assert (told[-1]["type"], told[-1].get("code")) == ("error", "response_not_found")


async def test_who_follows_a_job_that_had_failed_goes_on_when_an_operator_retries_it() -> None:
    """Its chunks are gone, but nothing is lost: there will be others."""
    new = NewJob("resp_1", None, "m/c", b"{}")
    failed = Job(new, JobStatus.FAILED, attempt=1, chunks=2, error=JobError("job_poisoned", "no"))
    retried = Job(new, JobStatus.QUEUED)

    jobs = jobs_of(World(), Lagging(retried, [], []))
    job, chunks = await jobs.news(failed, None, 10.0, is_placed=False)

    assert (job.status, job.chunks, list(chunks)) == (JobStatus.QUEUED, 0, [])


class Away:
    """What waiters ask of `ports.JobStore`: each of them finds it away once; then its job has failed."""

    def __init__(self) -> None:
        self.missed: set[str] = set()

    async def changed(self, job_id: str, chunks: int, wait_s: float, status: JobStatus) -> bool:
        if job_id not in self.missed:
            self.missed.add(job_id)
            raise StoreUnavailable("away")
        return True

    async def get(self, job_id: str) -> Job:
        return Job(NewJob(job_id, None, "m/c", b""), JobStatus.FAILED, error=JobError("job_expired", "late"))


@pytest.mark.parametrize("way", ["wait", "in place"])
async def test_those_who_wait_do_not_ask_a_store_that_is_away_in_step(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(anyio, "sleep", sleep)
    world = World()
    jobs = jobs_of(world, Away())
    for number in range(100):
        job = Job(NewJob(f"resp_{number}", None, "m/c", b""), JobStatus.QUEUED)
        if way == "wait":
            assert (await jobs.finished(job, 60.0)).status is JobStatus.FAILED
            continue
        waiter = Waiter(None, (), False, False, 0.0, None, False, OnDisconnect.FINISH)
        with pytest.raises(GatewayError, match="late"):
            await WaitingCaller(waiter, jobs, cast(HttpDownstream, None), world.clock).serve(job)

    assert len(slept) == 100
    assert max(slept) - min(slept) > 0.5


async def test_who_does_not_wait_gets_no_answer_even_if_there_is_one_by_then() -> None:
    job = Job(NewJob("resp_1", None, "m/c", b""), JobStatus.QUEUED)
    jobs = jobs_of(World(), Answered(job))

    assert await jobs.finished(job, 0.0) is job
    assert (await jobs.finished(job, 60.0)).status is JobStatus.COMPLETED


# ------------------------------------------------------------------ a caller with a deadline


EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"%b"},"finish_reason":%b}]}\n\n'


class Caller(HttpDownstream):
    """A caller who reads all that it is sent."""

    def __init__(self) -> None:
        self.read = b""
        self.has_ended = False

    async def start(self, status: int, headers: Headers) -> None:
        assert status == 200

    async def send(self, data: bytes) -> None:
        self.read += data

    async def finish(self) -> None:
        self.has_ended = True


def impatient(jobs: CallersJobs, caller: Caller, world: World, *, stream: bool) -> WaitingCaller:
    """Return a caller who waits for 5 s for the first word."""
    now = world.clock.now()
    waiter = Waiter(None, (), stream, False, now + 1_000, now + 5, False, OnDisconnect.CANCEL)
    return WaitingCaller(waiter, jobs, caller, world.clock)


class EndsAsItIsCancelled(Answered):
    """A job that nobody has heard the end of as it is cancelled."""

    async def cancel(self, job_id: str) -> Job:
        await super().changed(job_id, 0, 0.0, self.job.status)
        return self.job


@pytest.mark.parametrize("stream", [True, False])
async def test_who_has_no_more_patience_as_its_answer_comes_gets_it(stream: bool) -> None:
    world, caller = World(), Caller()
    job = Job(NewJob("resp_1", None, "m/c", b'{"model":"m"}'), JobStatus.QUEUED, position=1)
    store = EndsAsItIsCancelled(job, EVENT % (b"So ", b"null"), EVENT % (b"be it.", b'"stop"'), idle=1)
    waiting = impatient(jobs_of(world, store), caller, world, stream=stream)

    world.clock.time += 5
    await waiting.serve(job)

    assert caller.has_ended
    assert b"be it." in caller.read


class SlowToEnd(Answered):
    """A job whose answer goes on for long after it has begun."""

    def __init__(self, job: Job, *said: bytes, world: World) -> None:
        super().__init__(job, *said)
        self.world = world
        self.waited_s: list[float] = []

    async def chunks(self, job_id: str, start: int = 0, limit: int = 1000) -> Sequence[Chunk]:
        return self.said[: self.job.chunks][start : start + limit]

    async def changed(self, job_id: str, chunks: int, wait_s: float, status: JobStatus) -> bool:
        self.waited_s.append(wait_s)
        if not self.job.chunks:
            self.job = replace(self.job, status=JobStatus.IN_PROGRESS, attempt=1, chunks=1)
            return True
        if self.world.clock.time < 100:
            self.world.clock.time = 100
            return False
        return await super().changed(job_id, chunks, wait_s, status)

    async def cancel(self, job_id: str) -> Job:
        raise AssertionError("what has begun is not cancelled")


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_that_has_begun_in_time_may_take_as_long_as_it_does(stream: bool) -> None:
    world, caller = World(), Caller()
    job = Job(NewJob("resp_1", None, "m/c", b'{"model":"m"}'), JobStatus.QUEUED, position=1)
    store = SlowToEnd(job, EVENT % (b"So ", b"null"), EVENT % (b"be it.", b'"stop"'), world=world)

    await impatient(jobs_of(world, store), caller, world, stream=stream).serve(job)

    assert caller.has_ended
    assert b"be it." in caller.read
    assert world.clock.time == 100
    assert min(store.waited_s) > 0  # the store is not asked all the time


class EndsInTime(Answered):
    """A job that has failed by the time at which its caller has no more patience."""

    def __init__(self, job: Job, world: World) -> None:
        super().__init__(job)
        self.world = world

    async def changed(self, job_id: str, chunks: int, wait_s: float, status: JobStatus) -> bool:
        self.world.clock.time += wait_s
        self.job = replace(self.job, status=JobStatus.FAILED, error=JobError("job_poisoned", "It is over."))
        return True

    async def cancel(self, job_id: str) -> Job:
        raise AssertionError("what has ended is not cancelled")


@pytest.mark.parametrize("stream", [True, False])
async def test_whose_job_has_ended_as_patience_ends_is_told_how(stream: bool) -> None:
    world, caller = World(), Caller()
    job = Job(NewJob("resp_1", None, "m/c", b'{"model":"m"}'), JobStatus.QUEUED, position=1)
    waiting = impatient(jobs_of(world, EndsInTime(job, world)), caller, world, stream=stream)

    with pytest.raises(GatewayError, match="It is over"):
        await waiting.serve(job)


class Waited(Answered):
    """A job in which nothing happens; it is noted for how long it was waited for."""

    def __init__(self, job: Job, world: World, *, is_away: bool) -> None:
        super().__init__(job)
        self.world, self.is_away = world, is_away
        self.waited_s: list[float] = []

    async def changed(self, job_id: str, chunks: int, wait_s: float, status: JobStatus) -> bool:
        self.waited_s.append(wait_s)
        self.world.clock.time += wait_s
        return False

    async def cancel(self, job_id: str) -> Job:
        if self.is_away:
            raise StoreUnavailable("It is away.")
        self.job = replace(self.job, status=JobStatus.CANCELLED)
        return self.job


@pytest.mark.parametrize("is_away", [False, True], ids=["", "the-store-is-away-by-then"])
@pytest.mark.parametrize("stream", [True, False])
async def test_who_has_no_more_patience_is_told_so_at_that_time(
    stream: bool, is_away: bool, caplog: pytest.LogCaptureFixture
) -> None:
    world, caller = World(), Caller()
    job = Job(NewJob("resp_1", None, "m/c", b'{"model":"m"}'), JobStatus.QUEUED, position=1)
    store = Waited(job, world, is_away=is_away)

    with pytest.raises(AtCapacity) as caught:
        await impatient(jobs_of(world, store), caller, world, stream=stream).serve(job)

    assert caught.value.code == "deadline"
    assert store.waited_s == [5]
    assert ("could not be cancelled" in caplog.text) is is_away
