"""Files for their callers, where the store is a few answers. With a real one: tests/e2e/test_batches.py."""

from typing import cast

from litestar import Litestar
from litestar.testing import AsyncTestClient

from gateway.core.files import NewFile, StoredFile
from gateway.downstream.files import FileRules, Files
from gateway.downstream.keys import KeyRing
from gateway.ports import FileStore


class Stored:
    """What reading a file asks of `ports.FileStore`."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.most = 0

    async def get(self, file_id: str) -> StoredFile:
        return StoredFile(NewFile(file_id, None, "a"), len(self.content), 0, 0)

    async def read(self, file_id: str, offset: int, limit: int | None = None) -> bytes:
        part = self.content[offset:] if limit is None else self.content[offset : offset + limit]
        self.most = max(self.most, len(part))
        return part


async def test_little_of_a_file_is_in_memory_while_it_is_read() -> None:
    store = Stored(bytes(range(256)) * 8_000)
    files = Files(cast(FileStore, store), KeyRing({}), FileRules())
    async with AsyncTestClient(Litestar(files.handlers(), logging_config=None)) as client:
        answer = await client.get("/v1/files/file-1/content")

    assert answer.content == store.content
    assert store.most <= 128 * 1024
