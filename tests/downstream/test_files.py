"""Files for their callers, where the store is a few answers. With a real one: tests/e2e/test_batches.py."""

from collections.abc import Iterator
from typing import Any, cast

import anyio
import pytest
from anyio.lowlevel import checkpoint
from litestar import Litestar, Response
from litestar.testing import AsyncTestClient

from gateway.core.batches import FILE_BYTES_MAX
from gateway.core.errors import BodyTooLarge, GatewayError, StoreUnavailable
from gateway.core.files import FILENAME_MAX, NewFile, StoredFile
from gateway.downstream.files import PIECE_BYTES, READ_BYTES, FileRules, Files
from gateway.downstream.head_requests import HeadAsGet
from gateway.downstream.keys import KeyRing
from gateway.downstream.multipart import parts_of
from gateway.downstream.routes import exception_handlers
from gateway.ports import FileStore


class Stored:
    """What reading and writing a file asks of `ports.FileStore`."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.most = 0
        self.reads = 0
        self.written = 0
        self.is_deleted = False

    async def write(self, file: NewFile, offset: int, data: bytes, bytes_max: int) -> None:
        assert offset == self.written
        self.most, self.written = max(self.most, len(data)), offset + len(data)

    async def close(self, file: NewFile, keep_s: int) -> StoredFile:
        return StoredFile(file, self.written, 0, 0)

    async def delete(self, file_id: str) -> None:
        self.is_deleted = True

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


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [(None, 404, "file_not_found"), (StoreUnavailable("It is away."), 503, "store_unavailable")],
    ids=["deleted", "the-store-is-away"],
)
async def test_a_file_that_cannot_be_read_is_an_error_and_not_the_beginning_of_an_answer(
    error: GatewayError | None, status: int, code: str
) -> None:
    class Lost(Stored):
        async def read(self, file_id: str, offset: int, limit: int | None = None) -> bytes:
            if error is not None:
                raise error
            return b""

    files = Files(cast(FileStore, Lost(b"a")), KeyRing({}), FileRules())
    app = Litestar(files.handlers(), logging_config=None, exception_handlers=exception_handlers({}))
    async with AsyncTestClient(app) as client:
        answer = await client.get("/v1/files/file-1/content")

    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


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


@pytest.mark.parametrize(("more", "status"), [(0, 200), (1, 413)], ids=["as-large-as-may-be", "too-large"])
async def test_a_file_is_as_large_as_may_be_however_it_is_sent(more: int, status: int) -> None:
    store = Stored(b"")
    files = Files(cast(FileStore, store), KeyRing({}), FileRules())

    def refused(_: Any, error: GatewayError) -> Response[Any]:
        return Response({}, status_code=error.status)

    app = Litestar(files.handlers(), logging_config=None, exception_handlers={GatewayError: refused})

    def form() -> Iterator[bytes]:  # in chunks: its size is not announced
        yield b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        yield b'--x\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n'
        for _ in range(FILE_BYTES_MAX // PIECE_BYTES):
            yield bytes(PIECE_BYTES)
        yield b"y" * more + b"\r\n--x--\r\n"

    pieces = form()
    statuses = []

    async def receive() -> Any:
        piece = next(pieces, None)
        return {"type": "http.request", "body": piece or b"", "more_body": piece is not None}

    async def send(message: Any) -> None:
        statuses.append(message.get("status"))

    scope: Any = {"type": "http", "method": "POST", "path": "/v1/files", "raw_path": b"/v1/files"}
    scope |= {"query_string": b"", "http_version": "1.1", "root_path": "", "scheme": "http", "state": {}}
    scope |= {"headers": [(b"content-type", b"multipart/form-data; boundary=x")]}
    await app(scope, receive, send)

    assert (statuses[0], store.is_deleted) == (status, status != 200)
    assert (store.most, store.written) == (PIECE_BYTES, FILE_BYTES_MAX)


@pytest.mark.parametrize("where", ["before", "behind"])
async def test_what_stands_around_the_parts_of_a_form_is_bounded_too(where: str) -> None:
    form = b'--x\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\nab\r\n--x--\r\n'
    around = iter([bytes(1_000)] * 10)  # no line of it begins as the form does
    begun = iter([form] if where == "behind" else [])

    async def receive() -> Any:
        return {"type": "http.request", "body": next(begun, None) or next(around), "more_body": True}

    with pytest.raises(BodyTooLarge):
        async for _ in parts_of("multipart/form-data; boundary=x", receive, 60.0, 5_000):
            pass
    assert len([*around]) == {"before": 4, "behind": 5}[where]


@pytest.mark.parametrize(
    ("sent", "kept"), [("a.jsonl", "a.jsonl"), ("", "file"), ("a" * 1_000, "a" * FILENAME_MAX)]
)
async def test_every_file_has_a_name_and_no_long_one(sent: str, kept: str) -> None:
    files = Files(cast(FileStore, Stored(b"")), KeyRing({}), FileRules())
    form = (
        '--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        f'--x\r\ncontent-disposition: form-data; name="file"; filename="{sent}"\r\n\r\n\r\n--x--\r\n'
    )
    async with AsyncTestClient(Litestar(files.handlers(), logging_config=None)) as client:
        headers = {"content-type": "multipart/form-data; boundary=x"}
        answer = await client.post("/v1/files", content=form, headers=headers)

    assert answer.json()["filename"] == kept
