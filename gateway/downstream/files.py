"""The routes under `/v1/files`: the input and output files of batches. Uploads are streamed to the store."""

import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import anyio
from anyio.lowlevel import checkpoint_if_cancelled
from litestar import Request, delete, get, post
from litestar.handlers import BaseRouteHandler
from litestar.params import FromPath
from litestar.response import Stream

from gateway.core.batches import FILE_BYTES_MAX
from gateway.core.errors import BodyTooLarge, FileNotFound, FilesFull, InvalidRequest, StoreUnavailable
from gateway.core.files import (
    EXPIRES_MAX_S,
    EXPIRES_MIN_S,
    FILENAME_MAX,
    PURPOSE_INPUT,
    FileRefusal,
    NewFile,
    StoredFile,
    file_object,
)
from gateway.core.value import valueclass
from gateway.downstream.keys import KeyRing
from gateway.downstream.multipart import Field, FileBegins, parts_of
from gateway.downstream.relay import CallerGone, announced_bytes, check_encoding
from gateway.ports import FileStore

PATH = "/v1/files"

PIECE_BYTES = 1024 * 1024
"""Bytes of an upload that are written at once, and so its maximum memory use. A choice, and the size of a
piece in the store (`store.files.PIECE_BYTES`)."""

READ_BYTES = 128 * 1024
"""Bytes of a file that are read at once. A choice: a caller that reads slowly keeps about twice as many in
memory."""

UPLOADS_MAX = 16
"""Maximum concurrent uploads; others wait. A choice that bounds memory and connections to the store."""

UPLOADS_PER_KEY = 4
"""The same per API key, if there are keys. A choice, so that slow uploads of one key do not block all
others."""

UPLOADS_OVERHEAD = 64 * 1024
"""Maximum size of a form without its file: `multipart.FIELDS_MAX` fields of `multipart.FIELD_BYTES_MAX`."""

FORM_BYTES_MAX = FILE_BYTES_MAX + UPLOADS_OVERHEAD
"""Maximum size of a form, whether announced or received."""

CLEAN_UP_S = 5.0
"""How long deleting an interrupted upload may take. A choice, as for a command (`store.files.COMMAND_S`);
otherwise the store deletes it."""

_PAGE_MAX = 10_000
"""Files per page by default and at most: OpenAI's figure."""


@valueclass(frozen=True, slots=True)
class FileRules:
    """Limits for files.

    Attributes:
        bytes_max: Maximum total size of the files of an API key.
        keep_s: How long a file is kept.
        within_s: Time limit for receiving one piece of an upload.
    """

    bytes_max: int = 1024 * 1024 * 1024
    keep_s: int = EXPIRES_MAX_S
    within_s: float = 60.0


class Files:
    """The routes for files; one per process."""

    def __init__(self, store: FileStore, keys: KeyRing, rules: FileRules) -> None:
        """Keep files in `store`, each for the API key that uploaded it."""
        self._store = store
        self._keys = keys
        self._rules = rules
        self._turns = anyio.CapacityLimiter(UPLOADS_MAX)
        self._turns_of: dict[str, anyio.CapacityLimiter] = {}

    def handlers(self) -> Sequence[BaseRouteHandler]:
        """Return the route handlers."""

        @post(PATH, status_code=200, request_max_body_size=None)
        async def upload(request: Request[Any, Any, Any]) -> Mapping[str, Any]:
            key = self._keys.name_of(request.headers)
            return file_object(await self._upload(key, request))

        @get(PATH)
        async def list_(request: Request[Any, Any, Any]) -> Mapping[str, Any]:
            key = self._keys.name_of(request.headers)
            query = request.query_params
            limit = limit_of(query, _PAGE_MAX, _PAGE_MAX)
            if (order := query.get("order", "desc")) not in ("asc", "desc"):
                raise InvalidRequest("`order` must be asc or desc.", param="order")
            found = await self._store.page(
                key,
                after=query.get("after"),
                ascending=order == "asc",
                purpose=query.get("purpose"),
                limit=limit + 1,
            )
            if found is None:
                raise InvalidRequest("There is no such file.", param="after")
            return page_of([file_object(file) for file in found], limit)

        @get(PATH + "/{file_id:str}")
        async def retrieve(request: Request[Any, Any, Any], file_id: FromPath[str]) -> Mapping[str, Any]:
            key = self._keys.name_of(request.headers)
            return file_object(await self._find(key, file_id))

        @get(PATH + "/{file_id:str}/content")
        async def content(request: Request[Any, Any, Any], file_id: FromPath[str]) -> Stream:
            key = self._keys.name_of(request.headers)
            file = await self._find(key, file_id)
            headers = {"content-length": str(file.size_bytes)}
            # Its beginning is read before anything is sent, so that a failure has its status.
            begins = await self._store.read(file.id, 0, READ_BYTES)
            if file.size_bytes and not begins:  # deleted in the meantime
                raise _not_found(file.id)
            whole = self._content(file, begins)
            return Stream(whole, headers=headers, media_type="application/octet-stream")

        @delete(PATH + "/{file_id:str}", status_code=200)
        async def forget(request: Request[Any, Any, Any], file_id: FromPath[str]) -> Mapping[str, Any]:
            key = self._keys.name_of(request.headers)
            file = await self._find(key, file_id)
            if await self._store.delete(file.id) is FileRefusal.IN_USE:
                message = "A batch that has not ended reads this file: cancel it, or wait for its end."
                raise InvalidRequest(message, code="file_in_use")
            return {"id": file.id, "object": "file", "deleted": True}

        return [upload, list_, retrieve, content, forget]

    async def _find(self, key: str | None, id: str) -> StoredFile:
        file = await self._store.get(id)
        if file is None or file.new.key != key:
            raise _not_found(id)
        return file

    async def _content(self, file: StoredFile, piece: bytes) -> AsyncIterator[bytes]:
        offset = len(piece)
        yield piece
        while offset < file.size_bytes:
            await checkpoint_if_cancelled()  # a command of the store cannot be cancelled
            piece = await self._store.read(file.id, offset, READ_BYTES)
            if not piece:  # deleted in the meantime: close the connection, so that the caller notices
                raise ConnectionResetError("the file was deleted while it was read")
            offset += len(piece)
            yield piece

    # -------------------------------------------------------------- uploads

    def _turn(self, key: str | None) -> AbstractAsyncContextManager[object]:
        """Return the semaphore for uploads of a key."""
        if key is None:
            return nullcontext()
        return self._turns_of.setdefault(key, anyio.CapacityLimiter(UPLOADS_PER_KEY))

    async def _upload(self, key: str | None, request: Request[Any, Any, Any]) -> StoredFile:
        check_encoding(request.headers.get("content-encoding"))
        announced = request.headers.get("content-length", "0")
        if announced.isdigit() and announced_bytes(announced) > FORM_BYTES_MAX:
            raise _too_large()
        upload = _Upload(self._store, self._rules, key)
        is_whole = False
        try:
            async with self._turn(key), self._turns:
                content_type = request.headers.get("content-type", "")
                async for part in parts_of(
                    content_type, request.receive, self._rules.within_s, FORM_BYTES_MAX
                ):
                    match part:
                        case Field():
                            upload.fields[part.name] = part.value
                        case FileBegins():
                            upload.begin(part)
                        case _:
                            await upload.take(part)
                file = await upload.end()
                is_whole = True
                return file
        except CallerGone:
            raise InvalidRequest("The upload broke off.") from None  # not received: the caller is gone
        finally:
            if not is_whole:
                with anyio.move_on_after(CLEAN_UP_S, shield=True), suppress(StoreUnavailable):
                    await self._store.delete(upload.id)


@dataclass(slots=True)
class _Upload:
    """An upload in progress.

    Attributes:
        fields: The other fields of the form.
        file: The file, once it has begun.
        gathered: Received bytes that are not written yet, less than a piece.
        written: Number of bytes written.
    """

    store: FileStore
    rules: FileRules
    key: str | None
    id: str = field(default_factory=lambda: f"file-{secrets.token_hex(16)}")
    fields: dict[str, str] = field(default_factory=dict)
    file: NewFile | None = None
    gathered: bytearray = field(default_factory=bytearray)
    written: int = 0

    def begin(self, part: FileBegins) -> None:
        if part.name != "file" or self.file is not None:
            raise InvalidRequest("Send one file, as `file`.", param="file")
        self.file = NewFile(self.id, self.key, part.filename[:FILENAME_MAX] or "file")

    async def take(self, data: bytes) -> None:
        self.gathered += data
        if self.written + len(self.gathered) > FILE_BYTES_MAX:
            raise _too_large()
        while len(self.gathered) >= PIECE_BYTES:
            await self._write(PIECE_BYTES)

    async def end(self) -> StoredFile:
        if self.file is None:
            raise InvalidRequest("`file` is required.", param="file")
        if self.fields.get("purpose") != PURPOSE_INPUT:
            raise InvalidRequest(f'`purpose` must be "{PURPOSE_INPUT}".', param="purpose")
        keep_s = self.rules.keep_s
        if (written := self.fields.get("expires_after[seconds]")) is not None:
            keep_s = expiry_of(
                {
                    "anchor": self.fields.get("expires_after[anchor]"),
                    "seconds": int(written) if written.isascii() and written.isdigit() else None,
                },
                "expires_after",
            )
        if self.gathered or not self.written:
            await self._write(len(self.gathered))
        return await self.store.close(self.file, keep_s)

    async def _write(self, size: int) -> None:
        assert self.file is not None
        data = bytes(self.gathered[:size])
        if await self.store.write(self.file, self.written, data, self.rules.bytes_max) is not None:
            message = f"The files of this key may hold {self.rules.bytes_max:,} bytes together. Delete some."
            raise FilesFull(message)
        del self.gathered[:size]
        self.written += size


def expiry_of(written: object, name: str) -> int:
    """Return the requested seconds until a file expires.

    Raises:
        InvalidRequest: the value is not supported.
    """
    members = written if isinstance(written, Mapping) else {}
    seconds = members.get("seconds")
    if members.get("anchor") != "created_at":
        raise InvalidRequest('`anchor` must be "created_at".', param=f"{name}.anchor")
    if not isinstance(seconds, int) or not EXPIRES_MIN_S <= seconds <= EXPIRES_MAX_S:
        message = f"`seconds` must be an integer from {EXPIRES_MIN_S} to {EXPIRES_MAX_S}."
        raise InvalidRequest(message, param=f"{name}.seconds")
    return seconds


def limit_of(query: Mapping[str, Any], default: int, most: int) -> int:
    """Return the requested page size.

    Raises:
        InvalidRequest: it is not a valid one.
    """
    written = str(query.get("limit", default))
    # More digits are certainly invalid, and int() rejects strings of thousands of digits.
    if not written.isascii() or not written.isdigit() or len(written) > 9 or not 1 <= int(written) <= most:
        raise InvalidRequest(f"`limit` must be an integer from 1 to {most}.", param="limit")
    return int(written)


def page_of(objects: Sequence[Mapping[str, Any]], limit: int) -> Mapping[str, Any]:
    """Return the first `limit` objects as a page. If there are more, `has_more` is true."""
    shown = objects[:limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(objects) > limit,
    }


def _not_found(id: str) -> FileNotFound:
    return FileNotFound(f"No file {id[:64]!r} is kept here for this key: it is unknown, deleted or expired.")


def _too_large() -> BodyTooLarge:
    return BodyTooLarge(f"A file may have at most {FILE_BYTES_MAX:,} bytes.", code="file_too_large")
