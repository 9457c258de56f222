"""`ports.BatchStore` over Redis. Each step is a single script, so that a crash leaves no partial change.

A batch, its lines and its jobs share a cluster slot. A runner leases a batch for `lease_s`; every operation
renews the lease, and another runner takes over when it has expired. Only the server's clock is used.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from gateway.core.batches import (
    KEEP_S,
    KEPT_MAX,
    OPEN_MAX,
    WINDOW_S,
    Batch,
    BatchClaim,
    BatchLineError,
    BatchLost,
    BatchRefusal,
    BatchSnapshot,
    BatchStatus,
    RunningLine,
)
from gateway.core.idempotency import Idempotency
from gateway.core.jobs import NewJob, Quota
from gateway.store.connections import milliseconds
from gateway.store.job_scripts import NO_SWEEP, JobScripts
from gateway.store.jobs import PROMISE_S, key_of, owner_of, promised, refuse_revoked, words_of
from gateway.store.outages import LoggedConnections

COMMAND_S = 5.0
"""Timeout of a command, and of waiting for a connection. A choice: a line may be megabytes long."""

LEASE_S = 10.0
"""A runner that runs no operation on a batch for this long loses it. A choice, as for jobs
(`jobs.LOST_S`)."""

EACH_MAX = 4
"""Maximum number of batches per API key in progress. A choice, so that one key cannot occupy all runners."""

CONNECTIONS_MAX = 8
"""Connections per process. A choice that bounds a process's connections (docs/store.md#size-of-jobs)."""

_ENDED_MAX = 32
"""Maximum ended lines that one look returns. A choice: their results are read next, as many commands."""

_SCRIPTS = (
    *("create", "get", "cancel", "revoke", "take", "look", "running", "move", "submit", "write", "collect"),
    "release",
)


class RedisBatches(JobScripts):
    """`ports.BatchStore` over Redis."""

    def __init__(
        self,
        url: str,
        *,
        prefix: str = "gw",
        lease_s: float = LEASE_S,
        command_s: float = COMMAND_S,
        each_max: int = EACH_MAX,
    ) -> None:
        """Prepare to store batches in the Redis at `url`; connects on first use.

        Args:
            url: `redis://`, `rediss://` or `unix://`.
            prefix: Prefix of all keys.
            lease_s: Lease time of a batch.
            command_s: Timeout of a command, and of waiting for a connection.
            each_max: Maximum number of batches per API key in progress.
        """
        self._lease_ms, self._each_max = milliseconds(lease_s), each_max
        connections = LoggedConnections(
            url, store="batches", title="batch store", command_s=command_s, connections_max=CONNECTIONS_MAX
        )
        before = ("webhooks", "jobs", "files", "batches")
        scripts = {name: connections.script(*before, f"batch_{name}") for name in _SCRIPTS}
        scripts["page"] = connections.script(*before[:3], "file_page")
        super().__init__(connections, prefix, scripts, NO_SWEEP)

    # ------------------------------------------------------------ callers

    async def create(self, batch: Batch, idempotency: Idempotency | None = None) -> Batch | BatchRefusal:
        """See `ports.BatchStore.create`."""
        digest, fingerprint = promised(batch.key, idempotency)
        reply = await self._run(
            "create",
            batch.id,
            owner_of(batch.key),
            batch.endpoint,
            batch.input_file_id,
            "" if batch.metadata is None else json.dumps(batch.metadata),
            json.dumps(dict(batch.headers)),
            milliseconds(batch.output_keep_s),
            milliseconds(WINDOW_S),
            OPEN_MAX,
            KEPT_MAX,
            digest,
            fingerprint,
            milliseconds(PROMISE_S),
        )
        refuse_revoked(reply)
        return BatchRefusal(reply.decode()) if isinstance(reply, bytes) else _batch(reply)

    async def get(self, batch_id: str) -> Batch | None:
        """See `ports.BatchStore.get`."""
        found = await self._run("get", batch_id)
        return _batch(found[0]) if found else None

    async def page(self, key: str | None, *, after: str | None, limit: int) -> Sequence[Batch] | None:
        """See `ports.BatchStore.page`."""
        ids = await self._run("page", "batches", owner_of(key), after or "", "desc", limit)
        if ids is None:
            return None
        return [_batch(values) for values in await self._run("get", *ids)] if ids else []

    async def cancel(self, batch_id: str) -> Batch | None:
        """See `ports.BatchStore.cancel`."""
        found = await self._run("cancel", batch_id)
        return None if found is None else _batch(found)

    async def revoke(self, batch_id: str) -> bool:
        """See `ports.BatchStore.revoke`."""
        return bool(await self._run("revoke", batch_id))

    # ------------------------------------------------------------ runners

    async def take(self) -> BatchClaim | None:
        """See `ports.BatchStore.take`."""
        found = await self._run("take", self._lease_ms, self._each_max)
        if found is None:
            return None
        batch, fence, number, offset = found
        return BatchClaim(_batch(batch), fence.decode(), int(number), int(offset))

    async def look(self, claim: BatchClaim) -> BatchSnapshot:
        """See `ports.BatchStore.look`."""
        status, is_due, left_ms, running, *ended = await self._held("look", claim, _ENDED_MAX)
        return BatchSnapshot(
            BatchStatus(status.decode()), bool(is_due), int(left_ms) / 1000, running, tuple(_lines(ended))
        )

    async def running(self, batch_id: str) -> Sequence[RunningLine]:
        """See `ports.BatchStore.running`."""
        return _lines(await self._run("running", batch_id))

    async def move(
        self,
        claim: BatchClaim,
        old: BatchStatus,
        new: BatchStatus,
        *,
        total: int | None = None,
        errors: Sequence[BatchLineError] = (),
    ) -> bool:
        """See `ports.BatchStore.move`."""
        more: tuple[int | str, ...] = ()
        if total is not None:
            more = (total, json.dumps([asdict(error) for error in errors]) if errors else "")
        return bool(await self._held("move", claim, old, new, milliseconds(KEEP_S), *more))

    async def submit(
        self, claim: BatchClaim, line: RunningLine, offset: int, job: NewJob, quota: Quota
    ) -> bool:
        """See `ports.BatchStore.submit`."""
        words = (line.number, offset, line.custom_id.encode(), quota.queued_max, quota.bytes_max)
        return bool(await self._held("submit", claim, *words, *words_of(job)))

    async def write(self, claim: BatchClaim, number: int, offset: int, count: int, lines: bytes) -> None:
        """See `ports.BatchStore.write`."""
        await self._held("write", claim, number, offset, claim.batch.file_id("error"), count, lines)

    async def collect(self, claim: BatchClaim, job_id: str, line: bytes, *, is_answer: bool) -> None:
        """See `ports.BatchStore.collect`."""
        kind = "output" if is_answer else "error"
        await self._held("collect", claim, job_id, kind, claim.batch.file_id(kind), line)

    async def release(self, claim: BatchClaim) -> None:
        """See `ports.BatchStore.release`."""
        await self._run("release", claim.batch.id, claim.fence)

    # ------------------------------------------------------------ internals

    async def _held(self, name: str, claim: BatchClaim, *arguments: str | bytes | int) -> Any:
        """Run a script that requires the lease on a batch, and return its result."""
        reply = await self._run(name, claim.batch.id, claim.fence, claim.number, self._lease_ms, *arguments)
        if reply is None:
            raise BatchLost(claim.batch.id)
        return reply


def _lines(pairs: Sequence[bytes]) -> list[RunningLine]:
    found = []
    for job_id, written in zip(pairs[::2], pairs[1::2], strict=True):
        number, _, custom_id = written.decode().partition(" ")
        if number:  # already written
            found.append(RunningLine(job_id.decode(), int(number), custom_id))
    return found


def _error(members: Mapping[str, Any]) -> BatchLineError:
    """Decode an error. Members that a later version has added are ignored."""
    return BatchLineError(members["code"], members["message"], members["line"], members["param"])


def _batch(values: Sequence[bytes]) -> Batch:
    id_, owner, endpoint, input_, created, status, times, *rest = (value.decode() for value in values)
    total, completed, failed, errors, output, error, metadata, headers, keep = rest
    written = times.split()
    reached: Mapping[BatchStatus, int] = {
        BatchStatus(name): int(at) for name, at in zip(written[::2], written[1::2], strict=True)
    }
    is_final = BatchStatus(status).is_final
    return Batch(
        id=id_,
        key=key_of(owner),
        endpoint=endpoint,
        input_file_id=input_,
        created_at=int(created) // 1000,
        status=BatchStatus(status),
        times=reached,
        total=int(total),
        completed=int(completed),
        failed=int(failed),
        errors=tuple(_error(members) for members in json.loads(errors or "[]")),
        output_file_id=output if output and is_final else None,
        error_file_id=error if error and is_final else None,
        metadata=json.loads(metadata) if metadata else None,
        headers=json.loads(headers),
        output_keep_s=int(keep) // 1000,
    )
