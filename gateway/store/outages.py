"""Connections of one store, whose outages are logged, and raised for callers as StoreUnavailable."""

import logging
from collections.abc import Awaitable, Callable
from typing import Any

import anyio

from gateway.core.errors import StoreUnavailable
from gateway.events import about
from gateway.store.connections import Connections, StoreAway

log = logging.getLogger("gateway.store")

RETRY_AFTER_S = 5.0
"""`Retry-After` for callers of a store that does not answer. A choice: a failover takes seconds."""

REFUSED_S = 300.0
"""A store that has refused a command is back after this long without a refusal, if not before. A choice: much
longer than the minute after which `GatewayJobsStoreAway` fires, for a site with few jobs."""


class LoggedConnections(Connections):
    """Connections for the commands of one store, each on behalf of a caller."""

    def __init__(
        self,
        url: str,
        *,
        store: str,
        title: str,
        advice: str = "Please retry.",
        command_s: float,
        connections_max: int,
        decodes: bool = False,
    ) -> None:
        """Prepare to use the server at `url`; connects on first use. See `Connections` for the rest.

        Args:
            url: `redis://`, `rediss://` or `unix://`.
            store: What is stored, in log lines and in the server's client list: `jobs`.
            title: Its name for people: `job store`.
            advice: What callers are told to do during an outage.
            command_s, connections_max, decodes: See `Connections`.
        """
        super().__init__(
            url,
            name=f"gateway-{store}",
            command_s=command_s,
            connections_max=connections_max,
            decodes=decodes,
        )
        self._store, self._title, self._advice = store, title, advice
        self._refused: dict[str, float] = {}  # commands refused, and when; "" while there is no answer

    @property
    def is_refusing(self) -> bool:
        """Whether the store has refused a command, and has not been seen to take it again."""
        return any(self._refused)

    async def answer(self, name: str, command: Callable[[], Awaitable[Any]]) -> Any:
        """Run a command as `bounded` does. `name` is what a store may refuse while it takes others.

        An outage ends with the next answer. One that began with a refusal (the server is full, or a replica)
        ends with an answer to a command of the same name, or `REFUSED_S` later.

        Raises:
            StoreUnavailable: the outcome of the command is unknown.
        """
        try:
            reply = await self.bounded(command)
        except StoreAway as error:
            self._failed(name if error.is_refusal else "", error)
            message = f"The {self._title} {error.manner}. {self._advice}"
            raise StoreUnavailable(message, retry_after_s=RETRY_AFTER_S) from error
        if self._refused:
            self._succeeded(name)
        return reply

    def _failed(self, name: str, reason: StoreAway) -> None:
        """Log the beginning of an outage. `name`: the command that was refused; "": there was no answer."""
        if not self._refused or (not name and "" not in self._refused):
            log.error(
                "the %s is unavailable: %s",
                self._title,
                reason,
                extra=about("store_away", store=self._store),
            )
        if name:
            self._refused.pop("", None)
        self._refused[name] = anyio.current_time()

    def _succeeded(self, name: str) -> None:
        """Log the end of an outage. A server that is full, or a replica, still answers some commands."""
        since = anyio.current_time() - REFUSED_S
        self._refused = {
            other: at for other, at in self._refused.items() if other not in ("", name) and at > since
        }
        if not self._refused:
            log.warning(
                "the %s is available again", self._title, extra=about("store_back", store=self._store)
            )
