"""Several processes before one board, without a server and with a clock of the test's own."""

from collections.abc import Callable
from dataclasses import dataclass, field

from gateway.ports import Board


@dataclass(slots=True)
class _Shared:
    owner: str = ""
    owned_until: float = 0.0
    fence: int = 0
    state: str = ""
    notes: dict[str, tuple[float, str]] = field(default_factory=dict)


class EmulatedBoard:
    """`ports.BoxBoard` in memory, held to the contract of the real one by tests/store/test_boards.py.

    Instances with the same `shared` behave like processes with one store.
    """

    def __init__(
        self,
        now: Callable[[], float],
        *,
        process: str,
        ttl_s: float,
        shared: dict[str, _Shared],
    ) -> None:
        """Read the time from `now`, in seconds."""
        self._now, self._process, self._ttl_s = now, process, ttl_s
        self._shared = shared

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
