"""`ports.FileStore` over Redis. Files are stored in pieces of 1 MiB, so that no operation handles much more.

A file belongs to an API key, and all files of a key are bounded in bytes. A file becomes visible once it is
complete; incomplete uploads expire, as do files past their expiry that no batch is reading.
"""

from collections.abc import Sequence
from functools import partial

from gateway.core.errors import StoreUnavailable
from gateway.core.files import FileRefusal, NewFile, StoredFile
from gateway.store.connections import milliseconds
from gateway.store.job_scripts import NO_SWEEP, JobScripts
from gateway.store.jobs import key_of, owner_of
from gateway.store.outages import LoggedConnections

COMMAND_S = 5.0
"""Timeout of a command, and of waiting for a connection. A choice: a piece is a megabyte."""

PIECE_BYTES = 1024 * 1024
"""Size of the pieces of a file, as in files.lua. A choice: no command should hold up the server."""

CONNECTIONS_MAX = 8
"""Connections per process. A choice that bounds a process's connections (docs/store.md#size-of-jobs); half of
`downstream.files.UPLOADS_MAX`, since uploads wait for their callers most of the time."""

_PAGE = 500
"""Files listed by one script. A choice, so that none blocks the server for long."""

_SCRIPTS = ("write", "close", "get", "page", "delete")


class RedisFiles(JobScripts):
    """`ports.FileStore` over Redis."""

    def __init__(self, url: str, *, prefix: str = "gw", command_s: float = COMMAND_S) -> None:
        """Prepare to store files in the Redis at `url`; connects on first use.

        Args:
            url: `redis://`, `rediss://` or `unix://`.
            prefix: Prefix of all keys.
            command_s: Timeout of a command, and of waiting for a connection.
        """
        connections = LoggedConnections(
            url, store="files", title="file store", command_s=command_s, connections_max=CONNECTIONS_MAX
        )
        before = ("webhooks", "jobs", "files")
        scripts = {name: connections.script(*before, f"file_{name}") for name in _SCRIPTS}
        super().__init__(connections, prefix, scripts, NO_SWEEP)

    async def write(self, file: NewFile, at: int, data: bytes, bytes_max: int) -> FileRefusal | None:
        """See `ports.FileStore.write`."""
        owner = owner_of(file.key)
        written = await self._run("write", file.id, owner, file.filename, file.purpose, at, bytes_max, data)
        if written < 0:
            raise StoreUnavailable("The store has lost the upload. Please retry.")
        return None if written else FileRefusal.TOO_MANY_BYTES

    async def close(self, file: NewFile, keep_s: float) -> StoredFile:
        """See `ports.FileStore.close`."""
        found = await self._run("close", file.id, owner_of(file.key), file.purpose, milliseconds(keep_s))
        if found is None:
            raise StoreUnavailable("The store has lost the upload. Please retry.")
        return _file(found)

    async def get(self, file_id: str) -> StoredFile | None:
        """See `ports.FileStore.get`."""
        found = await self._run("get", file_id)
        return _file(found[0]) if found else None

    async def page(
        self, key: str | None, *, after: str | None, ascending: bool, purpose: str | None, limit: int
    ) -> Sequence[StoredFile] | None:
        """See `ports.FileStore.page`."""
        found: list[StoredFile] = []
        order = "asc" if ascending else "desc"
        while len(found) < limit:  # page by page, so that no script blocks the server for long
            ids = await self._run("page", "files", owner_of(key), after or "", order, _PAGE)
            if ids is None:
                return None
            files = [_file(values) for values in await self._run("get", *ids)] if ids else []
            found += [file for file in files if purpose in (None, file.new.purpose)]
            if len(ids) < _PAGE:
                break
            after = ids[-1].decode()
        return found[:limit]

    async def read(self, file_id: str, offset: int, limit: int | None = None) -> bytes:
        """See `ports.FileStore.read`."""
        piece, start = divmod(offset, PIECE_BYTES)
        last = -1 if limit is None else start + limit - 1
        name = self._key("piece", file_id, str(piece))
        command = partial(self._connections.redis.getrange, name, start, last)
        data: bytes = await self._connections.answer("read", command)
        return data

    async def delete(self, file_id: str) -> bool | FileRefusal:
        """See `ports.FileStore.delete`."""
        deleted = await self._run("delete", file_id)
        return FileRefusal.IN_USE if deleted < 0 else bool(deleted)


def _file(values: Sequence[bytes]) -> StoredFile:
    id_, owner, filename, purpose, size, created, expires = (value.decode() for value in values)
    new = NewFile(id_, key_of(owner), filename, purpose)
    return StoredFile(new, int(size), int(created) // 1000, int(expires) // 1000)
