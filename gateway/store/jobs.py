"""Jobs in Redis or Valkey: a stream with a consumer group dispatches them, scripts keep the state consistent.

Each operation is a single script, so no intermediate state is visible, and a process that dies between two
operations leaves no partial change. Only the server's clock is used. Nothing is retried silently, and all
operations are idempotent: after StoreUnavailable the outcome is unknown, and the caller may retry.
"""

import hashlib
import logging
import secrets
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import anyio
from redis.exceptions import NoPermissionError

from gateway.core.errors import StoreUnavailable
from gateway.core.idempotency import Idempotency
from gateway.core.jobs import (
    AfterRefusal,
    Chunk,
    Job,
    JobError,
    JobPriority,
    JobStatus,
    Lane,
    NewJob,
    Queue,
    Quota,
    Refusal,
    Serving,
)
from gateway.events import about
from gateway.store.connections import StoreAway, milliseconds
from gateway.store.job_scripts import JobScripts
from gateway.store.outages import LoggedConnections
from gateway.store.wire import Subscription, subscribed

log = logging.getLogger("gateway.store")

LOST_S = 10.0
"""A worker not heard from for this long, about three heartbeats, has lost its jobs. A choice: how soon a job
goes on elsewhere, against doing it twice."""

COMMAND_S = 2.0
"""Timeout of a command, and of waiting for a connection. A choice: a body may be megabytes long."""

CONNECTIONS_MAX = 16
"""Connections per process, beside the subscribed one. A choice that bounds a process's connections
(docs/store.md#size-of-jobs)."""

POLL_S = 5.0
"""Polling interval for a job that is waited for. A choice: only in case a message about it is lost."""

POLLS_PER_S = 50
"""Maximum polls per second of all that wait while messages are received: the interval grows with them. A
choice: a thousand waiting streams took 27 % of a core without it."""

AGAIN_S = 1.0
"""Interval between attempts to subscribe while the store is unreachable. A choice, as in
gateway/jobs/answer_writer.py."""

PROMISE_S = 86_400.0
"""How long an idempotency key is remembered. A choice: a day, the default of `idempotency.keep_s`."""

STOPS_MAX = 1000
"""Maximum number of claims ended by other processes that have not been collected. A choice that bounds
memory."""

_LINES = "batch:"
_SCRIPTS = (
    *("submit", "get", "load", "cancel", "delete", "revoke", "retry", "find", "queue"),
    *("claim", "beat", "append", "finish", "give_back", "refuse", "drain"),
)
_SHOWN = (  # as in jobs.lua
    *("owner", "lane", "priority", "keep", "expires", "batch", "status", "attempt", "failures", "created"),
    *("started", "ended", "retry_at", "chunks", "worker", "setback", "error_code", "error_message"),
    *("error_param", "bytes", "token", "body", "facts"),
)


@dataclass(slots=True)
class _Waiters:
    """The tasks waiting for one job."""

    count: int = 0
    heard: anyio.Event = field(default_factory=anyio.Event)

    def wake(self) -> None:
        self.heard.set()
        self.heard = anyio.Event()


class RedisJobs(JobScripts):
    """`ports.JobStore` over Redis. Messages about jobs are received while `run` runs."""

    def __init__(
        self,
        url: str,
        *,
        prefix: str = "gw",
        lost_s: float = LOST_S,
        command_s: float = COMMAND_S,
    ) -> None:
        """Prepare to store jobs in the Redis at `url`; connects on first use.

        Args:
            url: `redis://`, `rediss://` or `unix://`.
            prefix: Prefix of all keys and channels. Gateways with the same prefix share their jobs.
            lost_s: A worker not heard from for this long has lost its jobs.
            command_s: Timeout of a command, and of waiting for a connection.
        """
        connections = LoggedConnections(
            url, store="jobs", title="job store", command_s=command_s, connections_max=CONNECTIONS_MAX
        )
        scripts = {name: connections.script("webhooks", "jobs", f"job_{name}") for name in _SCRIPTS}
        super().__init__(connections, prefix, scripts, milliseconds(lost_s))
        self._tokens: dict[str, str] = {}  # of claims whose reply was lost, by worker
        self._waiters: dict[str, _Waiters] = {}
        self._waiting = 0  # number of tasks that wait for a job
        self._subscription: Subscription | None = None  # while messages are received
        self._work = anyio.Event()  # a message about work has come since the last `waiting`
        self._stops: deque[tuple[str, int]] = deque(maxlen=STOPS_MAX)

    # ------------------------------------------------------------ callers

    async def submit(
        self, job: NewJob, quota: Quota, idempotency: Idempotency | None = None, *, replaces: bool = False
    ) -> Job | Refusal:
        """See `ports.JobStore.submit`."""
        digest, fingerprint = promised(job.key, idempotency)
        reply = await self._run(
            "submit",
            *words_of(job),
            quota.queued_max,
            quota.bytes_max,
            digest,
            fingerprint,
            milliseconds(PROMISE_S),
            int(replaces),
        )
        refuse_revoked(reply)
        if isinstance(reply, bytes):
            return Refusal(reply.decode())
        return _job(reply)

    async def get(self, job_id: str) -> Job | None:
        """See `ports.JobStore.get`."""
        return _job_or_none(await self._run("get", job_id))

    async def load(self, job_id: str) -> Job | None:
        """See `ports.JobStore.load`."""
        return _job_or_none(await self._run("load", job_id))

    async def facts(self, job_id: str) -> bytes | None:
        """See `ports.JobStore.facts`."""
        command = partial(self._connections.redis.hget, self._key("job", job_id), "facts")
        facts: bytes | None = await self._connections.answer("facts", command)
        return facts

    async def chunks(self, job_id: str, start: int = 0, limit: int = 1000) -> Sequence[Chunk]:
        """See `ports.JobStore.chunks`."""
        xrange = self._connections.redis.xrange
        command = partial(xrange, self._key("chunks", job_id), min=f"0-{start + 1}", count=limit)
        entries = await self._connections.answer("chunks", command)
        return [_chunk(entry, values) for entry, values in entries]

    async def all_chunks(self, job_id: str) -> Sequence[Chunk]:
        """See `ports.JobStore.all_chunks`."""
        found: list[Chunk] = []
        while more := await self.chunks(job_id, len(found)):
            found += more
        return found

    async def changed(self, job_id: str, chunks: int, wait_s: float, status: JobStatus) -> bool:
        """See `ports.JobStore.changed`."""
        with anyio.move_on_after(wait_s), self._waiting_for(job_id) as waiters:
            while True:
                heard = waiters.heard  # read before the check, so that messages during it are not missed
                now_status, now_chunks = await self._status_of(job_id)
                if now_chunks > chunks or now_status is not status or status.is_final:
                    return True
                with anyio.move_on_after(self._poll_s()):
                    await heard.wait()
        return False

    def _poll_s(self) -> float:
        return max(POLL_S, self._waiting / POLLS_PER_S) if self._subscription else POLL_S

    async def cancel(self, job_id: str) -> Job | None:
        """See `ports.JobStore.cancel`."""
        return _job_or_none(await self._run("cancel", job_id))

    async def delete(self, job_id: str) -> bool:
        """See `ports.JobStore.delete`."""
        return bool(await self._run("delete", job_id))

    async def revoke(self, job_id: str) -> bool:
        """See `ports.JobStore.revoke`."""
        return bool(await self._run("revoke", job_id))

    async def retry(self, job_id: str) -> Job | None:
        """See `ports.JobStore.retry`."""
        return _job_or_none(await self._run("retry", job_id))

    async def find(
        self,
        *,
        key: str | None = None,
        status: JobStatus | None = None,
        lane: str | None = None,
        limit: int = 100,
    ) -> Sequence[Job]:
        """See `ports.JobStore.find`."""
        index = "jobs" if key is None else f"jobs:{owner_of(key)}"
        found: list[Job] = []
        before = "+inf"
        while before and len(found) < limit:  # page by page, so that no script blocks the server for long
            reply = await self._run("find", index, before, status or "", lane or "", limit - len(found))
            before = reply[0].decode()
            found += map(_job, reply[1:])
        return found

    async def queue(self) -> Queue:
        """See `ports.JobStore.queue`."""
        now_ms, drained_ms, *lanes = await self._run("queue")
        drained_at = None if drained_ms is None else int(drained_ms) / 1000
        return Queue(tuple(map(_lane, lanes)), drained_at, now_ms / 1000)

    async def totals(self) -> Mapping[tuple[str, str], int]:
        """See `ports.JobStore.totals`."""
        command = partial(self._connections.redis.hgetall, self._key("totals"))
        found = await self._connections.answer("totals", command)
        totals = {}
        for name, count in found.items():
            outcome, _, lane = name.decode().partition(" ")
            totals[lane, outcome] = int(count)
        return totals

    async def drain(self, is_drained: bool) -> None:
        """See `ports.JobStore.drain`."""
        await self._run("drain", int(is_drained))

    # ------------------------------------------------------------ workers

    async def claim(self, worker: str, lanes: Collection[str], attempts_max: int, config: str) -> Job | None:
        """See `ports.JobStore.claim`. If a reply was lost, the next call returns the same job."""
        token = self._tokens.setdefault(worker, secrets.token_hex(8))
        reply = await self._run("claim", worker, token, attempts_max, config, *lanes)
        self._tokens.pop(worker, None)
        return _job_or_none(reply)

    async def beat(
        self, worker: str, claims: Collection[tuple[str, str]], serving: Serving
    ) -> Collection[str]:
        """See `ports.JobStore.beat`."""
        flat = [word for claim in claims for word in claim]
        models = serving.models
        reply = await self._run("beat", worker, serving.config, len(models), *models, *flat)
        return [job_id.decode() for job_id in reply]

    async def is_served_elsewhere(self, model: str, config: str) -> bool:
        """See `ports.JobStore.is_served_elsewhere`."""
        command = partial(self._connections.redis.zrange, self._key("serving", model), 0, -1)
        found = await self._connections.answer("serving", command)
        return any(member.decode().rpartition(" ")[2] != config for member in found)

    async def append(self, job_id: str, claim: str, chunk: Chunk) -> bool:
        """See `ports.JobStore.append`.

        Raises:
            ValueError: a chunk is missing before it.
        """
        outcome = await self._run("append", job_id, claim, chunk.number, int(chunk.restarts), chunk.data)
        if outcome < 0:
            raise ValueError(f"a chunk is missing before number {chunk.number} of {job_id}")
        return bool(outcome)

    async def finish(
        self, job_id: str, claim: str, status: JobStatus, error: JobError | None = None, *, chunks: int = 0
    ) -> bool:
        """See `ports.JobStore.finish`.

        Raises:
            ValueError: the last chunks are missing.
        """
        words = () if error is None else _words(error)
        outcome = await self._run("finish", job_id, claim, status, chunks, *words)
        if outcome < 0:
            raise ValueError(f"{job_id} has fewer than {chunks} chunks")
        return bool(outcome)

    async def give_back(
        self,
        job_id: str,
        claim: str,
        *,
        attempts_max: int,
        after_s: float = 0.0,
        failed: bool = False,
        setback: str = "",
    ) -> bool:
        """See `ports.JobStore.give_back`."""
        words = (round(after_s * 1000), int(failed), attempts_max, setback)
        return bool(await self._run("give_back", job_id, claim, *words))

    async def refuse(
        self,
        job_id: str,
        claim: str,
        error: JobError,
        *,
        config: str,
        attempts_max: int,
        after_s: float,
    ) -> AfterRefusal | None:
        """See `ports.JobStore.refuse`."""
        words = (config, round(after_s * 1000), attempts_max, *_words(error))
        reply = await self._run("refuse", job_id, claim, *words)
        return None if reply is None else AfterRefusal(reply.decode())

    async def waiting(self, wait_s: float) -> Collection[tuple[str, int]]:
        """See `ports.JobStore.waiting`."""
        with anyio.move_on_after(wait_s):
            await self._work.wait()
        self._work = anyio.Event()
        stops = list(self._stops)
        self._stops.clear()
        return stops

    # ------------------------------------------------------------ messages

    async def run(self) -> None:
        """Receive messages about jobs, until cancelled. Warn once about a server that may evict jobs."""
        is_checked = False
        while True:
            try:
                if not is_checked:
                    await self._check()
                    is_checked = True
                await self._listen()
            except StoreAway:
                pass  # waiting tasks poll in the meantime
            for waiters in self._waiters.values():  # their interval is shorter from now on
                waiters.wake()
            await anyio.sleep(AGAIN_S)

    @property
    def is_refusing(self) -> bool:
        """See `ports.JobStore.is_refusing`."""
        return self._connections.is_refusing

    async def _check(self) -> None:
        try:
            info = await self._connections.bounded(lambda: self._connections.redis.info())
        except StoreAway as error:
            if isinstance(error.__cause__, NoPermissionError):
                return  # some ACLs do not allow it
            raise
        if (policy := info.get("maxmemory_policy", "noeviction")) != "noeviction":
            log.warning(
                "the job store may lose jobs when it is full: its maxmemory-policy is %s, not noeviction",
                policy,
                extra=about("store_forgets", store="jobs", reason=f"maxmemory-policy {policy}"),
            )
        if not info.get("aof_enabled", 1):
            log.warning(
                "the job store may lose jobs when it restarts: its appendonly is off",
                extra=about("store_forgets", store="jobs", reason="appendonly off"),
            )

    async def _listen(self) -> None:
        async with subscribed(self._connections, self._key("work")) as subscription:
            self._subscription = subscription
            try:
                subscription.follow(list(map(self._channel, self._waiters)))
                self._hear(self._key("work"), "")
                while True:
                    self._hear(*await subscription.heard())
            finally:
                self._subscription = None

    def _channel(self, job_id: str) -> str:
        return self._key("changed", job_id)

    def _hear(self, channel: str, text: str) -> None:
        """Wake the tasks concerned by a message, or by a subscription: they may have missed one before it."""
        if channel != self._key("work"):
            waiters = self._waiters.get(channel.removeprefix(self._channel("")))
            if waiters is not None:
                waiters.wake()
            return
        if text:
            attempt, job_id = text.split(" ", 1)
            self._stops.append((job_id, int(attempt)))
        self._work.set()

    @contextmanager
    def _waiting_for(self, job_id: str) -> Iterator[_Waiters]:
        waiters = self._waiters.get(job_id)
        if waiters is None:
            waiters = self._waiters[job_id] = _Waiters()
            if self._subscription is not None:
                self._subscription.follow([self._channel(job_id)])
        waiters.count += 1
        self._waiting += 1
        try:
            yield waiters
        finally:
            waiters.count -= 1
            self._waiting -= 1
            if waiters.count == 0:
                del self._waiters[job_id]
                if self._subscription is not None:
                    self._subscription.unfollow([self._channel(job_id)])

    async def _status_of(self, job_id: str) -> tuple[JobStatus | None, int]:
        """Return a job's status and number of chunks; None as status if the job does not exist."""
        command = partial(self._connections.redis.hmget, self._key("job", job_id), ["status", "chunks"])
        status, chunks = await self._connections.answer("status", command)
        return (None, 0) if status is None else (JobStatus(status.decode()), int(chunks))


# ------------------------------------------------------------------ encoding


def owner_of(key: str | None, batch: str = "") -> str:
    """Return the owner for an API key; None gets a value that no key can have. Batches count apart."""
    owner = "-" if key is None else f"={key}"
    return f"{_LINES}{owner}" if batch else owner


def key_of(owner: str) -> str | None:
    """Return the API key of an owner."""
    owner = owner.removeprefix(_LINES)
    return None if owner == "-" else owner[1:]


def refuse_revoked(reply: Any) -> None:
    """Raise StoreUnavailable for what was revoked before it arrived: its caller was told so."""
    if reply == b"revoked":
        raise StoreUnavailable("The store has accepted this too late.")


def promised(key: str | None, idempotency: Idempotency | None) -> tuple[str, str]:
    """Return the id of an idempotency key, and the fingerprint of its request; "" and "" without a key."""
    if idempotency is None:
        return "", ""
    digest = _digest(owner_of(key), idempotency.route, idempotency.key)
    return digest, _digest(idempotency.fingerprint)


def _digest(*words: str) -> str:
    parts = (f"{len(word)}:{word}" for word in words)  # length-prefixed: no two lists collide
    return hashlib.sha256("".join(parts).encode()).hexdigest()


def words_of(job: NewJob) -> Sequence[str | bytes | int]:
    """Return a job as scripts that accept it read it."""
    expires_ms = "" if job.expires_s is None else milliseconds(job.expires_s)
    owner, keep_ms = owner_of(job.key, job.batch), milliseconds(job.keep_s)
    return job.id, owner, job.lane, job.priority, job.body, job.facts, keep_ms, expires_ms


def _words(error: JobError) -> tuple[str, str, str]:
    return error.code, error.message, error.param or ""


def _job_or_none(reply: Sequence[Any] | None) -> Job | None:
    return None if reply is None else _job(reply)


def _job(reply: Sequence[Any]) -> Job:
    """Decode a job as returned by `show` in jobs.lua."""
    job_id, position, *values = reply
    given = dict(zip(_SHOWN, values, strict=False))  # a brief one lacks body and facts

    def text(name: str) -> str:
        return (given[name] or b"").decode()

    owner, code = text("owner"), text("error_code")
    new = NewJob(
        id=job_id.decode(),
        key=key_of(owner),
        lane=text("lane"),
        body=given.get("body", b""),
        facts=given.get("facts", b""),
        priority=JobPriority(text("priority")),
        keep_s=int(text("keep")) / 1000,
        expires_s=_seconds(text("expires")),
        batch=text("batch"),
    )
    return Job(
        new=new,
        status=JobStatus(text("status")),
        attempt=int(text("attempt")),
        failures=int(text("failures")),
        created_at=int(text("created")) / 1000,
        started_at=_seconds(text("started")),
        ended_at=_seconds(text("ended")),
        retry_at=int(text("retry_at")) / 1000,
        position=position,
        chunks=int(text("chunks")),
        size_bytes=int(text("bytes")),
        worker=text("worker"),
        claim=text("token"),
        setback=text("setback"),
        error=JobError(code, text("error_message"), text("error_param") or None) if code else None,
    )


def _seconds(ms: str) -> float | None:
    return int(ms) / 1000 if ms else None


def _chunk(entry: bytes, values: dict[bytes, bytes]) -> Chunk:
    number = int(entry.split(b"-")[1]) - 1
    return Chunk(number, int(values[b"attempt"]), values[b"data"], values[b"restarts"] == b"1")


def _lane(values: Iterable[Any]) -> Lane:
    name, queued, in_progress, oldest_ms, ended, lately_ms, is_worked = values
    return Lane(
        name=name.decode(),
        queued=queued,
        in_progress=in_progress,
        oldest_s=None if oldest_ms is None else oldest_ms / 1000,
        drain_per_s=ended * 1000 / lately_ms if ended else None,
        is_worked=bool(is_worked),
    )
