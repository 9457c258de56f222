"""Files for their callers, where the store is a few answers. With a real one: tests/e2e/test_batches.py."""

from typing import Any, cast

import anyio
import pytest
from anyio.lowlevel import checkpoint
from litestar import Litestar
from litestar.testing import AsyncTestClient

from gateway.core.files import NewFile, StoredFile
from gateway.downstream.files import READ_BYTES, FileRules, Files
from gateway.downstream.head_requests import HeadAsGet
from gateway.downstream.keys import KeyRing
from gateway.ports import FileStore


class Stored:
    """What reading a file asks of `ports.FileStore`."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.most = 0
        self.reads = 0

    async def get(self, file_id: str) -> StoredFile:
        return StoredFile(NewFile(file_id, None, "a"), len(self.content), 0, 0)

    async def read(self, file_id: str, offset: int, limit: int | None = None) -> bytes:
        part = self.content[offset:] if limit is None else self.content[offset : offset + limit]
        self.most = max(self.most, len(part))
        self.reads += 1
        with anyio.CancelScope(shield=True):  # as commands of the store are
            await checkpoint()
        return part


async def test_little_of_a_file_is_in_memory_while_it_is_read() -> None:
    store = Stored(bytes(range(256)) * 8_000)
    files = Files(cast(FileStore, store), KeyRing({}), FileRules())
    async with AsyncTestClient(Litestar(files.handlers(), logging_config=None)) as client:
        answer = await client.get("/v1/files/file-1/content")

    assert answer.content == store.content
    assert store.most <= 128 * 1024


@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_no_more_of_a_file_is_read_once_its_caller_has_left_or_has_its_answer(method: str) -> None:
    store = Stored(bytes(100 * READ_BYTES))
    files = Files(cast(FileStore, store), KeyRing({}), FileRules())
    app = HeadAsGet(Litestar(files.handlers(), logging_config=None))
    is_over = anyio.Event()
    received = iter([{"type": "http.request", "body": b"", "more_body": False}])

    async def receive() -> Any:
        if (message := next(received, None)) is not None:
            return message
        await is_over.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:  # as uvicorn, which drops what comes after a lost connection
        if message["type"] == "http.response.body":
            is_over.set()

    path = "/v1/files/file-1/content"
    scope: Any = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "headers": []}
    scope |= {"query_string": b"", "http_version": "1.1", "root_path": "", "scheme": "http", "state": {}}
    await app(scope, receive, send)

    assert 1 <= store.reads < 10
