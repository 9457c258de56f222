"""Batches and files in a real store, and a hand on its time."""

import json
from typing import Any

from redis.asyncio import Redis

from gateway.core.batches import Batch, BatchClaim
from gateway.core.files import NewFile, StoredFile
from gateway.store.batches import RedisBatches
from gateway.store.files import PIECE_BYTES, RedisFiles
from support.job_world import Jobs, StoreWorld

CHAT = "/v1/chat/completions"
LONG_S = 1000.0  # no lease ends by itself
BYTES_MAX = 1024 * 1024 * 1024


def jsonl(count: int, **body: Any) -> bytes:
    """Return an input file of requests r1, r2, ..."""
    lines = [
        {"custom_id": f"r{number}", "method": "POST", "url": CHAT, "body": {"model": "m", **body}}
        for number in range(1, count + 1)
    ]
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


class BatchWorld(StoreWorld):
    """The batches of one prefix of a server."""

    def __init__(self, url: str, prefix: str, redis: Redis) -> None:
        super().__init__(url, prefix, redis)
        self._opened: list[RedisBatches | RedisFiles | Jobs] = []
        self.files: RedisFiles = self._kept(RedisFiles(url, prefix=prefix, command_s=10.0))
        self.jobs: Jobs = self._kept(Jobs(url, prefix=prefix, command_s=10.0, lost_s=LONG_S))

    def open(self, **options: Any) -> RedisBatches:
        """Return a process's store. Patient, so that a slow machine is no store that is away."""
        options = {"prefix": self.prefix, "command_s": 10.0, "lease_s": LONG_S, **options}
        batches: RedisBatches = self._kept(RedisBatches(self.url, **options))
        return batches

    async def aclose(self) -> None:
        for one in self._opened:
            await one.aclose()

    async def upload(self, content: bytes, id: str = "file-1", key: str | None = "alice") -> StoredFile:
        file = NewFile(id, key, "in.jsonl")
        for at in range(0, max(1, len(content)), PIECE_BYTES):
            assert await self.files.write(file, at, content[at : at + PIECE_BYTES], BYTES_MAX) is None
        return await self.files.close(file, LONG_S)

    async def read(self, id: str) -> bytes:
        """Return all of a file."""
        content = b""
        while piece := await self.files.read(id, len(content)):
            content += piece
        return content

    async def lines(self, id: str | None) -> list[dict[str, Any]]:
        """Return what stands in a file of lines."""
        return [] if id is None else [json.loads(line) for line in (await self.read(id)).splitlines()]

    async def batch(self, batches: RedisBatches, count: int = 3, **changes: Any) -> Batch:
        """Make a batch of so many requests."""
        made = new_batch(**changes)
        await self.upload(jsonl(count), made.input_file_id, made.key)
        found = await batches.create(made)
        assert isinstance(found, Batch)
        return found

    async def take(self, batches: RedisBatches) -> BatchClaim:
        claim = await batches.take()
        assert claim is not None
        return claim

    async def used(self, owner: str = "=alice") -> int:
        """Return the bytes that are counted for the files of an API key."""
        return int(await self.redis.get(self.key("filed", owner)) or 0)

    # ------------------------------------------------------------ time

    async def lose_runner_of(self, id: str) -> None:
        """Let a batch's runner not have been heard of for a long time."""
        await self._of(self.redis.hset(self.key("batch", id), "until", 1))

    async def is_due(self, id: str) -> None:
        """Let a batch's time be over."""
        await self._of(self.redis.hset(self.key("batch", id), "expires", 1))

    async def expire_file(self, id: str) -> None:
        """Let a file's time be over, or that of an upload that goes no further."""
        await self._of(self.redis.hset(self.key("file", id), "expires", 1))
        await self.redis.zadd(self.key("files_expiring"), {id: 1}, xx=True)

    def _kept(self, one: Any) -> Any:
        self._opened.append(one)
        return one


def new_batch(**changes: Any) -> Batch:
    return Batch(
        **{
            "id": "batch_1",
            "key": "alice",
            "endpoint": CHAT,
            "input_file_id": "file-1",
            "created_at": 0,
            **changes,
        }
    )
