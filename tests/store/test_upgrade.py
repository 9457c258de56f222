"""What an older version has written is read, worked off and ended by this one: records as they were then."""

from collections.abc import Mapping
from typing import Any

import anyio
from redis.asyncio import Redis
from support.redis_server import RedisServer

from gateway.core.batches import BatchStatus, RunningLine
from gateway.core.idempotency import Idempotency, IdempotencyClaim, fingerprint
from gateway.core.jobs import Chunk, Job, JobPriority, JobStatus, NewJob, Quota
from gateway.store.batches import RedisBatches
from gateway.store.files import RedisFiles
from gateway.store.idempotency import RedisIdempotency
from gateway.store.jobs import RedisJobs
from gateway.store.responses import RedisResponseStore

WITHIN_S = 20.0
LATER = 4_102_444_800_000  # in ms: nothing of it is over
NORMAL, BATCH = "{gw:jobs}:new:normal:m/light", "{gw:jobs}:new:batch:m/light"
BODY = '{"stream":true}'
ANSWER = "data: x\n\n"

_JOB: Mapping[str, Any] = {
    "batch": "",
    "bytes": 17,
    "priority": "normal",
    "body": BODY,
    "facts": "{}",
    "lane": "m/light",
    "created": 1795362639048,
    "chunks": 0,
    "owner": "=alice",
    "failures": 0,
    "keep": 86400000,
    "attempt": 0,
    "retry_at": 0,
    "status": "queued",
    "entry": "",
    "stream": "",
}
_BEGUN = {"bytes": 26, "chunks": 1, "attempt": 1, "started": 1795362639060, "worker": "old"}
HASHES: Mapping[str, Mapping[str, Any]] = {
    # Of claims only the number was written down, no token.
    "{gw:jobs}:job:ended": {**_JOB, **_BEGUN, "status": "completed", "ended": 1795362639115},
    "{gw:jobs}:job:running": {**_JOB, **_BEGUN, "status": "in_progress", "entry": "1-0", "stream": NORMAL},
    "{gw:jobs}:job:rests": {**_JOB, **_BEGUN, "failures": 1, "returned": 1, "retry_at": 1795362699116},
    "{gw:jobs}:job:waits": {**_JOB, "entry": "2-0", "stream": NORMAL},
    "{gw:jobs}:job:resp_batch_1_1": {
        **_JOB,
        "batch": "batch_1",
        "bytes": 17,
        "priority": "batch",
        "owner": "batch:=alice",
        "entry": "3-0",
        "stream": BATCH,
    },
    "{gw:jobs}:running": {"m/light": 1},
    "{gw:jobs}:clock": {"heard": 1795362639104, "since": 1795362639048, "swept": 1795362639048},
    "{gw:jobs}:quota:=alice": {"jobs": 3, "bytes": 95},
    "{gw:jobs}:quota:batch:=alice": {"jobs": 1, "bytes": 17},
    "{gw:jobs}:totals": {"completed m/light": 1},
    "{gw:jobs}:batch:batch_1": {
        "owner": "=alice",
        "endpoint": "/v1/chat/completions",
        "input": "file-1",
        "metadata": "",
        "headers": "{}",
        "output_keep": 2592000000,
        "created": 1795362639181,
        "expires": LATER,
        "status": "in_progress",
        "times": "in_progress 1795362639 ",
        "total": 2,
        "completed": 0,
        "failed": 0,
        "errors": "",
        "output": "",
        "error": "",
        "runner": "old",
        "until": 1795362649211,
        "fence": 1,
        "cursor": 1,
        "offset": 19,
    },
    "{gw:jobs}:batches_counts": {"=alice": 1},
    "{gw:jobs}:lines:batch_1": {"resp_batch_1_1": "1 r1"},
    "{gw:jobs}:file:file-1": {
        "owner": "=alice",
        "filename": "in.jsonl",
        "purpose": "batch",
        "bytes": 38,
        "order": 9,
        "created": 1795362639139,
        "state": "whole",
        "uses": 1,
        "expires": LATER,
    },
    "{gw:promises:alice}:records": {
        "a64a41e5227c28ceafd41500520c5d2d677901fb1769d013b7a19aae8914a256": (
            "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8aanswer"
        )
    },
    "{gw:responses:alice}:records": {"resp_kept": "record"},
}
SORTED: Mapping[str, Mapping[str, float]] = {
    "{gw:jobs}:ages:m/light": {
        "rests": 1795362639052,
        "waits": 1795362639054,
        "resp_batch_1_1": 1795362639211,
    },
    "{gw:jobs}:waiting:m/light": {"waits": 1688849860263944, "resp_batch_1_1": 2814749767106572},
    "{gw:jobs}:resting:m/light": {"rests": 1795362699116},
    "{gw:jobs}:ended": {"ended 26 =alice": LATER},
    "{gw:jobs}:jobs": {"ended": 1, "running": 3, "rests": 5, "waits": 7, "resp_batch_1_1": 11},
    "{gw:jobs}:jobs:=alice": {"ended": 1, "running": 3, "rests": 5, "waits": 7},
    "{gw:jobs}:jobs:batch:=alice": {"resp_batch_1_1": 11},
    "{gw:jobs}:batches:=alice": {"batch_1": 10},
    "{gw:jobs}:batches_open": {"batch_1": 10},
    "{gw:jobs}:files:=alice": {"file-1": 9},
    "{gw:jobs}:files_expiring": {"file-1": LATER},
    "{gw:promises:alice}:expiries": {
        "a64a41e5227c28ceafd41500520c5d2d677901fb1769d013b7a19aae8914a256": LATER
    },
    "{gw:responses:alice}:expiries": {"resp_kept": LATER},
}
STRINGS: Mapping[str, str] = {
    "{gw:jobs}:arrivals": "12",
    "{gw:jobs}:claimed:old": "92c017b43bb62d08 running",
    "{gw:jobs}:filed:=alice": "1062",
    "{gw:jobs}:piece:file-1:0": '{"custom_id":"r1"}\n{"custom_id":"r2"}\n',
    "{gw:jobs}:submitted:2ecbdd1a6c4bb39a98ee6710a2e725e43e3aa66a7e8337600d4641acd9c6000c": (
        "41849aa7be66dd7a898069a0b2e1172539672cb09b4f274142ee0f0889315718 waits"
    ),
    "{gw:promises:alice}:bytes": "70",
    "{gw:responses:alice}:bytes": "6",
}


async def write(url: str) -> None:
    """Have a store hold those records; the job `running` is a dead worker's."""
    redis: Any = Redis.from_url(url)
    for name, fields in HASHES.items():
        await redis.hset(name, mapping=fields)
    for name, scores in SORTED.items():
        await redis.zadd(name, scores)
    for name, text in STRINGS.items():
        await redis.set(name, text)
    await redis.sadd("{gw:jobs}:lanes", "m/light")
    for id in ("ended", "running", "rests"):
        await redis.xadd(f"{{gw:jobs}}:chunks:{id}", {"attempt": 1, "restarts": 0, "data": ANSWER}, id="0-1")
    for stream, entry, id in (
        (NORMAL, "1-0", "running"),
        (NORMAL, "2-0", "waits"),
        (BATCH, "3-0", "resp_batch_1_1"),
    ):
        await redis.xgroup_create(stream, "workers", "0", mkstream=True) if entry != "2-0" else None
        await redis.xadd(stream, {"job": id}, id=entry)
    await redis.xreadgroup("workers", "old", {NORMAL: ">"}, count=1)
    await redis.aclose()


async def test_jobs_are_known_and_worked_off(stoppable: RedisServer) -> None:
    await write(stoppable.url)
    jobs = RedisJobs(stoppable.url, lost_s=0.2, command_s=10.0)
    ended = await jobs.get("ended")
    assert ended is not None
    assert (ended.status, ended.attempt, ended.worker, ended.claim) == (JobStatus.COMPLETED, 1, "old", "")
    assert [chunk.data.decode() for chunk in await jobs.all_chunks("ended")] == [ANSWER]
    again = NewJob(id="again", key="alice", lane="m/light", body=BODY.encode())
    known = await jobs.submit(again, Quota(), Idempotency.of("k-waits", "/v1/responses", b"{}"))
    assert isinstance(known, Job) and known.id == "waits"

    had: dict[str, tuple[int, int]] = {}
    with anyio.fail_after(WITHIN_S):
        while len(had) < 4:
            if (job := await jobs.claim("new", ["m/light"], 3, "c")) is None:
                continue
            assert await jobs.append(job.id, job.claim, Chunk(job.chunks, job.attempt, b"y"))
            assert await jobs.finish(job.id, job.claim, JobStatus.COMPLETED)
            had[job.id] = job.attempt, job.failures
    assert had == {"rests": (2, 1), "waits": (1, 0), "resp_batch_1_1": (1, 0), "running": (2, 1)}
    assert (await jobs.queue()).lanes == ()
    await jobs.aclose()


async def test_a_batch_goes_on_where_it_was(stoppable: RedisServer) -> None:
    await write(stoppable.url)
    batches = RedisBatches(stoppable.url, command_s=10.0)
    jobs, files = RedisJobs(stoppable.url, command_s=10.0), RedisFiles(stoppable.url, command_s=10.0)
    claim = await batches.take()
    assert claim is not None and (claim.number, claim.offset) == (1, 19)
    assert await files.read("file-1", claim.offset) == b'{"custom_id":"r2"}\n'
    new = NewJob(
        id="resp_batch_1_2",
        key="alice",
        lane="m/light",
        body=b"{}",
        batch="batch_1",
        priority=JobPriority.BATCH,
    )
    assert await batches.submit(claim, RunningLine(new.id, 2, "r2"), 38, new, Quota())
    for id in ("resp_batch_1_1", "resp_batch_1_2"):
        assert await jobs.cancel(id) is not None
        await batches.collect(claim, id, b"{}\n", is_answer=False)
    for old, end in (
        (BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING),
        (BatchStatus.FINALIZING, BatchStatus.COMPLETED),
    ):
        assert await batches.move(claim, old, end)
    done = await batches.get("batch_1")
    assert done is not None and (done.status, done.failed) == (BatchStatus.COMPLETED, 2)
    for one in (batches, jobs, files):
        await one.aclose()


async def test_answers_that_were_kept_are_given(stoppable: RedisServer) -> None:
    await write(stoppable.url)
    idempotency = RedisIdempotency(stoppable.url, prefix="gw", bytes_max=1000)
    responses = RedisResponseStore(stoppable.url, prefix="gw", bytes_max=1000)
    claim = IdempotencyClaim("alice", "/v1/chat/completions", "k", fingerprint(b"{}"), "req-2")
    assert await idempotency.begin(claim, 60.0) == b"answer"
    assert await responses.get("alice", "resp_kept") == b"record"
    assert await responses.delete("alice", "resp_kept")
    for one in (idempotency, responses):
        await one.aclose()
