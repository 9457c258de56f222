"""Ownership and state of boxes: in memory for one process, in Redis or Valkey for several.

Ownership is a lease with a fencing token: each change of owner increases the token, and writes with an old
token are rejected. So a process that was unresponsive for too long cannot overwrite its successor's state,
and a machine that compares tokens can reject its commands as well.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from gateway.ports import Board
from gateway.store.connections import StoreAway
from gateway.store.leases import Leases
from gateway.store.redis import COMMAND_S, process_name

BOX_TTL_S = 15.0
"""Lease time of an ownership: how long a box is unmanaged after its owner has crashed."""


@dataclass(slots=True)
class _Shared:
    owner: str = ""
    owned_until: float = 0.0
    fence: int = 0
    state: str = ""
    notes: dict[str, tuple[float, str]] = field(default_factory=dict)


class MemoryBoard:
    """`ports.BoxBoard` in memory. Instances with the same `shared` behave like processes with one store."""

    def __init__(
        self,
        now: Callable[[], float],
        *,
        process: str = "me",
        ttl_s: float = BOX_TTL_S,
        shared: dict[str, _Shared] | None = None,
    ) -> None:
        """Read the time from `now`, in seconds."""
        self._now, self._process, self._ttl_s = now, process, ttl_s
        self._shared: dict[str, _Shared] = {} if shared is None else shared

    async def sync(self, box_id: str, *, fence: int, state: str, note: str) -> Board:
        """See `ports.BoxBoard.sync`."""
        board, now = self._shared.setdefault(box_id, _Shared()), self._now()
        is_free = not board.owner or board.owned_until <= now
        if is_free:
            board.fence += 1
            board.owner = self._process
        is_owner = board.owner == self._process
        if is_owner:
            board.owned_until = now + self._ttl_s
            if state and fence == board.fence:
                board.state = state
        board.notes[self._process] = (now + self._ttl_s, note)
        board.notes = {name: held for name, held in board.notes.items() if held[0] > now}
        others = [text for name, (_, text) in board.notes.items() if name != self._process]
        return Board(board.fence if is_owner else 0, board.state, others)

    async def leave(self, box_id: str) -> None:
        """See `ports.BoxBoard.leave`."""
        board = self._shared.setdefault(box_id, _Shared())
        if board.owner == self._process:
            board.owner = ""
        board.notes.pop(self._process, None)


class RedisBoard:
    """`ports.BoxBoard` over Redis. Close it with `aclose`."""

    def __init__(self, leases: Leases) -> None:
        """Use these scripts. Their owner is this process, and their TTL is the lease time of a box."""
        self._leases = leases

    @classmethod
    def at(cls, url: str, prefix: str, owner: str = "") -> "RedisBoard":
        """Return a board on the server at `url`. `owner`: see `process_name`; "" for one of its own."""
        return cls(
            Leases(
                url,
                prefix=prefix,
                owner=owner or process_name(),
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
