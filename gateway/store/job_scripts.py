"""How the stores of jobs, batches, files and webhooks call their scripts."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from redis.commands.core import AsyncScript

from gateway.store.outages import LoggedConnections

NO_SWEEP = 1
"""First argument of scripts that never look for lost claims, in place of the time after which one is lost
(jobs.lua)."""


class JobScripts:
    """The scripts of a store whose keys share a cluster slot with those of jobs. Close it with `aclose`."""

    def __init__(
        self, connections: LoggedConnections, prefix: str, scripts: Mapping[str, AsyncScript], *first: int
    ) -> None:
        """Call `scripts` on the keys with this prefix. Each gets `first` before its own arguments."""
        self._tag = f"{{{prefix}:jobs}}"
        self._connections = connections
        self._scripts = scripts
        self._first = first

    async def aclose(self) -> None:
        """Close all connections."""
        await self._connections.aclose()

    def _key(self, *names: str) -> str:
        """Return the name of a key or channel, as `key` in jobs.lua does."""
        return ":".join((self._tag, *names))

    async def _run(self, name: str, *arguments: str | bytes | int) -> Any:
        """Call a script once. Raises StoreUnavailable: its outcome is unknown."""
        command = partial(self._scripts[name], keys=[self._tag], args=[*self._first, *arguments])
        return await self._connections.answer(name, command)
