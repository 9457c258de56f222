"""Delivers webhooks: turns events into deliveries, and attempts each until it succeeds or is given up.

Every gateway process runs this; the store ensures that a delivery is claimed by one of them at a time. The
result of an attempt is written to the store afterwards, so if a process dies in between, the delivery is
attempted again under the same id (at-least-once delivery).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import anyio
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint_if_cancelled

from gateway.core.errors import StoreUnavailable
from gateway.core.webhooks import Delivery, WebhookAttempt, WebhookEndpoint, WebhookOutcome
from gateway.ports import WebhookStore

if TYPE_CHECKING:
    from gateway.upstream.webhook_calls import WebhookCaller  # with httpx

ATTEMPTS_MAX = 8
"""Maximum concurrent attempts per endpoint. A choice, so that a slow endpoint does not delay others."""

POLL_S = 1.0
"""Interval for checking which deliveries are due. A choice: the delay of a webhook against commands of an
idle gateway."""

EVENTS_AT_ONCE = 100
"""Maximum events turned into deliveries by one round. A choice: if there are more, they follow at once."""

SAY_S = 60.0
"""Maximum interval between two announcements of this process's endpoints. A choice: a small part of the hour
after which the store forgets them (`KNOWN_MS` of webhook_hearers.lua)."""

SETTLE_TRIES = 20
"""How often writing a result to an unreachable store is tried, a second apart. A choice: within
`store.webhooks.CLAIM_S`. Then the delivery repeats."""


class Webhooks:
    """Delivers while `run` runs; `run` closes the store and the caller at its end."""

    def __init__(
        self,
        endpoints: Iterable[WebhookEndpoint],
        store: WebhookStore,
        caller: "WebhookCaller",
        *,
        on_attempt: Callable[[WebhookAttempt], None],
        on_pending: Callable[[Mapping[str, int]], None],
        poll_s: float = POLL_S,
    ) -> None:
        """Prepare to deliver; nothing is sent before `run`.

        Args:
            endpoints: This process's endpoints and the events they subscribe to.
            store: Stores events and deliveries.
            caller: Makes attempts.
            on_attempt: Called with every attempt. Must neither raise nor block.
            on_pending: Called with the number of pending deliveries per endpoint.
            poll_s: Interval for checking which deliveries are due.
        """
        self._endpoints = {endpoint.name: endpoint for endpoint in endpoints}
        self._store = store
        self._caller = caller
        self._on_attempt = on_attempt
        self._on_pending = on_pending
        self._poll_s = poll_s
        self._under_way: Counter[str] = Counter()
        self._gone: set[str] = set()
        self._has_room = anyio.Event()
        self._said_at = float("-inf")

    async def run(self) -> None:
        """Deliver until cancelled. While the store is unreachable, keep trying."""
        try:
            async with anyio.create_task_group() as tasks:
                try:
                    while True:
                        await self._look(tasks)
                finally:
                    self._caller.hurry()
        finally:
            with anyio.CancelScope(shield=True):
                await self._caller.aclose()
                await self._store.aclose()

    async def _look(self, tasks: TaskGroup) -> None:
        self._has_room = anyio.Event()
        try:
            has_more = await self._hand_on()
            await self._take(tasks)
        except StoreUnavailable:
            await anyio.sleep(self._poll_s)
            return
        if not has_more:
            with anyio.move_on_after(self._poll_s):
                await self._has_room.wait()

    async def _hand_on(self) -> bool:
        """Turn events into deliveries, for all processes' endpoints. Return whether there may be more."""
        events = await self._store.events(EVENTS_AT_ONCE)
        known: Sequence[WebhookEndpoint] = ()
        if events or anyio.current_time() - self._said_at > SAY_S:
            known = await self._store.announce_endpoints(self._endpoints.values())
            self._said_at = anyio.current_time()
        for event in events:
            await checkpoint_if_cancelled()  # commands of the store cannot be cancelled
            subscribers = [endpoint for endpoint in known if endpoint.hears(event)]
            for endpoint in await self._store.create_deliveries(event, subscribers):
                lost = Delivery(event.id, endpoint.name, 0, 0, event.body)
                detail = "too many deliveries are already waiting for it"
                self._on_attempt(WebhookAttempt(lost, WebhookOutcome.DROPPED, detail))
        return len(events) == EVENTS_AT_ONCE

    async def _take(self, tasks: TaskGroup) -> None:
        """Start as many attempts as allowed."""
        room = {name: ATTEMPTS_MAX - self._under_way[name] for name in self._endpoints.keys() - self._gone}
        for delivery in await self._store.claim(room):
            self._under_way[delivery.endpoint] += 1
            tasks.start_soon(self._deliver, self._endpoints[delivery.endpoint], delivery)
        self._on_pending(await self._store.pending(list(self._endpoints)))

    async def _deliver(self, endpoint: WebhookEndpoint, delivery: Delivery) -> None:
        try:
            attempt = await self._caller.attempt(endpoint, delivery)
            self._on_attempt(attempt)
            if attempt.outcome is WebhookOutcome.GONE:
                self._gone.add(endpoint.name)  # its deliveries remain stored for the next start
                return
            await self._settle(attempt)
        finally:
            self._under_way[endpoint.name] -= 1
            self._has_room.set()

    async def _settle(self, attempt: WebhookAttempt) -> None:
        for _ in range(SETTLE_TRIES):
            try:
                with anyio.CancelScope(shield=True):  # bounded by the store's timeouts
                    if attempt.retry_s is None:
                        await self._store.end(attempt.delivery)
                    else:
                        await self._store.again(attempt.delivery, attempt.retry_s)
                return
            except StoreUnavailable:
                await anyio.sleep(1.0)
