"""Exchanges that a cancellation does not end half way."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio
import anyio.lowlevel

T = TypeVar("T")


class Exchanges:
    """Exchanges in progress, each with a time limit.

    They are shielded, because a connection that opens at the moment of a cancellation would leak (anyio's
    connect_tcp drops it). `hurry` bounds how long the end of a cancelled task then takes.
    """

    def __init__(self) -> None:
        """Begin without any."""
        self._under_way: set[anyio.CancelScope] = set()

    async def run(self, exchange: Callable[[], Awaitable[T]], limit_s: float) -> T | None:
        """Return the result of an exchange; None if it is not there after `limit_s`."""
        await anyio.lowlevel.checkpoint_if_cancelled()
        with anyio.CancelScope(shield=True, deadline=anyio.current_time() + limit_s) as scope:
            self._under_way.add(scope)
            try:
                return await exchange()
            finally:
                self._under_way.discard(scope)
        await anyio.lowlevel.checkpoint_if_cancelled()  # cut short by `hurry`: not the server's fault
        return None

    def hurry(self, limit_s: float) -> None:
        """Limit those in progress to `limit_s` more seconds."""
        for scope in self._under_way:
            scope.deadline = min(scope.deadline, anyio.current_time() + limit_s)
