"""Ownership and state of boxes, in Redis or Valkey.

Ownership is a lease with a fencing token: each change of owner increases the token, and writes with an old
token are rejected. So a process that was unresponsive for too long cannot overwrite its successor's state,
and a machine that compares tokens can reject its commands as well.
"""

from gateway.ports import Board
from gateway.store.connections import StoreAway
from gateway.store.leases import Leases
from gateway.store.redis import COMMAND_S

BOX_TTL_S = 15.0
"""Lease time of an ownership: how long a box is unmanaged after its owner has crashed."""


class RedisBoard:
    """`ports.BoxBoard` over Redis. Close it with `aclose`."""

    def __init__(self, leases: Leases) -> None:
        """Use these scripts. Their owner is this process, and their TTL is the lease time of a box."""
        self._leases = leases

    @classmethod
    def at(cls, url: str, prefix: str, owner: str) -> "RedisBoard":
        """Return a board on the server at `url` for the process `owner`."""
        return cls(
            Leases(
                url,
                prefix=prefix,
                owner=owner,
                ttl_s=BOX_TTL_S,
                command_s=COMMAND_S,
                connections_max=2,
            )
        )

    async def sync(self, box_id: str, *, fence: int, state: str, note: str) -> Board | None:
        """See `ports.BoxBoard.sync`."""
        try:
            return Board(*await self._leases.box(box_id, fence, state, note))
        except StoreAway:
            return None

    async def leave(self, box_id: str) -> None:
        """See `ports.BoxBoard.leave`."""
        try:
            await self._leases.leave_box(box_id)
        except StoreAway:
            return  # the lease expires by itself

    async def aclose(self) -> None:
        """Close all connections."""
        await self._leases.aclose()
