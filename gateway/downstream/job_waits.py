"""Waiting for jobs: until this process ends, and while the store is unreachable."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import anyio

from gateway.core.errors import Draining, StoreUnavailable, let_go
from gateway.ports import Clock

AGAIN_S = 1.0, 3.0
"""Shortest and longest interval between attempts while the store is unreachable. A choice: random, so that
callers do not ask in step."""

AWAY_S = 60.0
"""How long a caller is kept waiting while the store is unreachable. A choice: a failover takes seconds."""


class Waits:
    """What waits for jobs on behalf of callers, until this process ends.

    Attributes:
        are_over: Whether it is ending.
        callers: Number of callers who stay connected for a job.
    """

    def __init__(self) -> None:
        """Start with nothing."""
        self.are_over = False
        self.callers = 0
        self._scopes: set[anyio.CancelScope] = set()

    def end(self) -> None:
        """End all waiting, because this process is shutting down. Callers are told by those who wait."""
        self.are_over = True
        for scope in self._scopes:
            scope.cancel()

    def check_open(self) -> None:
        """Cut off a follower if this process is ending.

        Raises:
            Draining: it is.
        """
        if self.are_over:
            raise Draining("This gateway is shutting down. Follow the response through another one.")

    @contextmanager
    def of_a_caller(self) -> Iterator[None]:
        """Run a block for a caller who stays connected for a job meanwhile."""
        self.callers += 1
        try:
            yield
        finally:
            self.callers -= 1

    @contextmanager
    def until_end(self) -> Iterator[anyio.CancelScope]:
        """Run a block that `end` cancels, whether it was called before or is called meanwhile."""
        with anyio.CancelScope() as scope:
            self._scopes.add(scope)
            if self.are_over:
                scope.cancel()
            try:
                yield scope
            finally:
                self._scopes.remove(scope)


class Outage:
    """The patience of one caller with an unreachable store."""

    def __init__(self, clock: Clock) -> None:
        """Begin with a store that responds."""
        self._clock = clock
        self._since: float | None = None

    def over(self) -> None:
        """Note that the store has responded."""
        self._since = None

    async def wait(self, error: StoreUnavailable) -> None:
        """Wait until it is time to ask again.

        Raises:
            StoreUnavailable: it has been unreachable for too long.
        """
        now = self._clock.now()
        self._since = now if self._since is None else self._since
        if now - self._since > AWAY_S:
            raise error
        let_go(error)
        await rest()


async def rest() -> None:
    """Wait until it is time to ask the store again; random, so that its waiters do not ask in step."""
    await anyio.sleep(random.uniform(*AGAIN_S))
