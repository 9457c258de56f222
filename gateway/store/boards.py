"""Ownership and state of boxes, in Redis or Valkey.

Ownership is a lease with a fencing token: each change of owner increases the token, and writes with an old
token are rejected. So a process that was unresponsive for too long cannot overwrite its successor's state,
and a machine that compares tokens can reject its commands as well.
"""

from typing import Any

from gateway.ports import Board
from gateway.store.connections import Connections, StoreAway, milliseconds
from gateway.store.redis import COMMAND_S

BOX_TTL_S = 15.0
"""Lease time of an ownership: how long a box is unmanaged after its owner has crashed. A choice, as for
accounts (`redis.TTL_S`)."""

CONNECTIONS_MAX = 2
"""Connections per process. A choice: boxes take turns at them."""


class RedisBoard:
    """`ports.BoxBoard` over Redis. Close it with `aclose`."""

    def __init__(
        self, url: str, *, prefix: str, owner: str, ttl_s: float = BOX_TTL_S, command_s: float = COMMAND_S
    ) -> None:
        """Prepare to use the server at `url`; connects on first use.

        Args:
            url: `redis://`, `rediss://` or `unix://`.
            prefix: Prefix of all keys.
            owner: Name of this process.
            ttl_s: Lease time of an ownership.
            command_s: Timeout of a command, and of waiting for a connection.
        """
        self._prefix, self._owner, self._ttl_ms = prefix, owner, milliseconds(ttl_s)
        self._connections = Connections(
            url, name=f"gateway-{owner}", command_s=command_s, connections_max=CONNECTIONS_MAX
        )
        self._script = self._connections.script("box")

    async def sync(self, box_id: str, *, fence: int, state: str, note: str) -> Board | None:
        """See `ports.BoxBoard.sync`."""
        try:
            found, written, notes = await self._run(box_id, self._ttl_ms, fence, state, note)
        except StoreAway:
            return None
        return Board(int(found), written, notes)

    async def leave(self, box_id: str) -> None:
        """See `ports.BoxBoard.leave`."""
        try:
            await self._run(box_id, 0, 0, "", "")
        except StoreAway:
            return  # the lease expires by itself

    async def aclose(self) -> None:
        """Close all connections."""
        await self._connections.aclose()

    async def _run(self, box_id: str, *arguments: int | str) -> Any:
        tag = f"{{{self._prefix}:box:{box_id}}}"
        keys = [f"{tag}:{name}" for name in ("owner", "fence", "state", "notes")]
        args = [self._owner, *arguments]
        return await self._connections.bounded(lambda: self._script(keys=keys, args=args))
