"""`ports.WebhookStore` over Redis: pending deliveries survive the death of a gateway process.

The script that ends a job also creates its event (`announce` in webhooks.lua), so an event exists if and
only if its job has ended. Creating deliveries, claiming and settling them are one script each. A claim that
is not settled expires after `CLAIM_S`, and the delivery is due again.
"""

import json
from collections.abc import Iterable, Mapping, Sequence

from gateway.core.webhooks import Delivery, WebhookEndpoint, WebhookEvent
from gateway.store.connections import milliseconds
from gateway.store.job_scripts import JobScripts
from gateway.store.jobs import key_of
from gateway.store.outages import LoggedConnections

COMMAND_S = 2.0
"""Timeout of a command. A choice: no caller waits for one."""

CLAIM_S = 60.0
"""Expiry of a claim: three times the maximum duration of an attempt (`upstream.webhook_calls.ATTEMPT_S`)."""

PENDING_MAX = 100_000
"""Maximum number of pending deliveries per endpoint. A choice: 75 MB (docs/webhooks.md)."""

CONNECTIONS_MAX = 4
"""Connections per process. A choice: no caller waits for one."""

_SCRIPTS = ("events", "hearers", "hand_on", "claim", "settle", "pending")


class RedisWebhooks(JobScripts):
    """`ports.WebhookStore` over Redis."""

    def __init__(
        self,
        url: str,
        *,
        prefix: str = "gw",
        command_s: float = COMMAND_S,
        claim_s: float = CLAIM_S,
        pending_max: int = PENDING_MAX,
    ) -> None:
        """Prepare to store deliveries in the Redis at `url`; connects on first use.

        Args:
            url: `redis://`, `rediss://` or `unix://`.
            prefix: Prefix of all keys.
            command_s: Timeout of a command.
            claim_s: Expiry of a claim.
            pending_max: Maximum number of pending deliveries per endpoint.
        """
        self._claim_ms, self._pending_max = milliseconds(claim_s), pending_max
        connections = LoggedConnections(
            url,
            store="webhooks",
            title="webhook store",
            command_s=command_s,
            connections_max=CONNECTIONS_MAX,
            decodes=True,
        )
        scripts = {name: connections.script("webhooks", f"webhook_{name}") for name in _SCRIPTS}
        super().__init__(connections, prefix, scripts)

    async def events(self, limit: int) -> Sequence[WebhookEvent]:
        """See `ports.WebhookStore.events`."""
        return [_event(entry, fields) for entry, fields in await self._run("events", limit)]

    async def announce_endpoints(self, endpoints: Iterable[WebhookEndpoint]) -> Sequence[WebhookEndpoint]:
        """See `ports.WebhookStore.announce_endpoints`."""
        said = [word for endpoint in endpoints for word in (endpoint.name, _said(endpoint))]
        return [_heard(name, hears) for name, hears in await self._run("hearers", *said)]

    async def create_deliveries(
        self, event: WebhookEvent, endpoints: Iterable[WebhookEndpoint]
    ) -> Sequence[WebhookEndpoint]:
        """See `ports.WebhookStore.create_deliveries`."""
        named = {endpoint.name: endpoint for endpoint in endpoints}
        dropped = await self._run("hand_on", event.entry, event.id, event.body, self._pending_max, *named)
        return [named[name] for name in dropped]

    async def claim(self, room: Mapping[str, int]) -> Sequence[Delivery]:
        """See `ports.WebhookStore.claim`."""
        pairs = [value for name, most in room.items() for value in (name, most)]
        return [
            Delivery(id_, endpoint, claim, failures, body.encode())
            for endpoint, id_, claim, failures, body in await self._run("claim", self._claim_ms, *pairs)
        ]

    async def end(self, delivery: Delivery) -> None:
        """See `ports.WebhookStore.end`."""
        await self._run("settle", delivery.endpoint, delivery.id, delivery.claim)

    async def again(self, delivery: Delivery, wait_s: float) -> None:
        """See `ports.WebhookStore.again`."""
        again = (delivery.failures + 1, round(wait_s * 1000))
        await self._run("settle", delivery.endpoint, delivery.id, delivery.claim, *again)

    async def pending(self, endpoints: Sequence[str]) -> Mapping[str, int]:
        """See `ports.WebhookStore.pending`."""
        return dict(zip(endpoints, await self._run("pending", *endpoints), strict=True))


def _said(endpoint: WebhookEndpoint) -> str:
    """Encode an endpoint's subscriptions, without its URL."""
    keys = None if endpoint.keys is None else sorted(endpoint.keys)
    return json.dumps({"events": endpoint.events, "keys": keys})


def _heard(name: str, hears: str) -> WebhookEndpoint:
    said = json.loads(hears)
    keys = None if said["keys"] is None else frozenset(said["keys"])
    return WebhookEndpoint(name, "", (), tuple(said["events"]), keys)


def _event(entry: str, fields: Sequence[str]) -> WebhookEvent:
    values = dict(zip(fields[::2], fields[1::2], strict=True))
    at_ms = int(entry.partition("-")[0])
    return WebhookEvent(entry, values["type"], values["subject"], key_of(values["owner"]), at_ms // 1000)
