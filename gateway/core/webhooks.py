"""Webhooks: event bodies, subscriptions, signatures, the retry schedule, and blocked addresses.

The format is Standard Webhooks 1.0.0 with OpenAI's bodies, so OpenAI's SDKs verify them without changes.

    ended job or batch -> event -> one delivery per subscribed endpoint -> attempts, until one succeeds

A delivery ends with its first success, or is given up after the last attempt. An endpoint may still receive
an event more than once, if its answer is lost, but always under the same `webhook-id`.

Pure: times are arguments, and the jitter is derived from the id of the delivery.
"""

import base64
import hashlib
import hmac
import ipaddress
import json
import zlib
from dataclasses import dataclass, field
from enum import StrEnum

from gateway.core.value import valueclass

EVENT_TYPES = (
    "response.completed",
    "response.failed",
    "response.cancelled",
    "response.incomplete",
    "batch.completed",
    "batch.failed",
    "batch.expired",
    "batch.cancelled",
)
"""Event types, with OpenAI's names."""

SCHEDULE_S = (0, 5, 300, 1_800, 7_200, 18_000, 36_000, 50_400, 72_000, 86_400)
"""Seconds before each attempt, from the previous one: the example schedule of Standard Webhooks 1.0.0. The
first attempt is immediate, and the last a little over three days later."""

RETRY_AFTER_MAX_S = 86_400.0
"""Limit on the Retry-After of an endpoint: the longest step of the schedule."""

SECRET_BYTES = range(24, 65)
"""Allowed length of a secret, by Standard Webhooks 1.0.0."""


class WebhookOutcome(StrEnum):
    """Outcome of an attempt or a delivery. A small, fixed set: a metric label."""

    DELIVERED = "delivered"
    FAILED = "failed"  # no 2xx in time; retried
    REFUSED = "refused"  # by this gateway, because the host's address is not allowed; retried
    GIVEN_UP = "given_up"  # the last attempt failed
    GONE = "gone"  # 410: the endpoint gets no more events until a restart
    DROPPED = "dropped"  # too many deliveries are queued for the endpoint


@dataclass(frozen=True, slots=True)
class WebhookEndpoint:
    """A receiver of events.

    Attributes:
        name: Its name in the configuration.
        url: Its URL, which may contain a token and is never logged.
        secrets: Signing keys, one signature each; several during a rotation.
        events: Event types it receives; "batch.*" for all of a kind.
        keys: Names of the API keys whose events it receives; None for all, including jobs without a key.
        allow_private: Whether it may be on a private or loopback address.
    """

    name: str
    url: str = field(repr=False)
    secrets: tuple[bytes, ...] = field(repr=False)
    events: tuple[str, ...] = ("response.*", "batch.*")
    keys: frozenset[str] | None = None
    allow_private: bool = False

    def hears(self, event: "WebhookEvent") -> bool:
        """Return whether it receives an event."""
        kind = event.type.partition(".")[0]
        named = event.type in self.events or f"{kind}.*" in self.events
        return named and (self.keys is None or event.key in self.keys)


@valueclass(frozen=True, slots=True)
class WebhookEvent:
    """The end of a job or a batch.

    Attributes:
        entry: Its id in the store until it is turned into deliveries.
        type: One of `EVENT_TYPES`.
        subject: Id of the job or batch: `resp_...` or `batch_...`.
        key: Name of the API key that owns it, or None.
        created_at: When it ended, in epoch seconds of the store's clock.
    """

    entry: str
    type: str
    subject: str
    key: str | None
    created_at: int

    @property
    def id(self) -> str:
        """Its deterministic id, which endpoints use to detect duplicates."""
        text = f"{self.entry} {self.type} {self.subject}"
        return f"evt_{hashlib.sha256(text.encode()).hexdigest()[:32]}"

    @property
    def body(self) -> bytes:
        """The request body. It is thin: receivers fetch the result with an API key."""
        members = {
            "id": self.id,
            "object": "event",
            "created_at": self.created_at,
            "type": self.type,
            "data": {"id": self.subject},
        }
        return json.dumps(members, separators=(",", ":")).encode()


@valueclass(frozen=True, slots=True)
class Delivery:
    """An event to be sent to one endpoint, claimed for an attempt.

    Attributes:
        id: The event's id, sent as `webhook-id`.
        endpoint: Name of the endpoint.
        claim: Number of times it has been claimed: the fencing token for reporting the outcome.
        failures: Number of failed attempts so far.
        body: The request body.
    """

    id: str
    endpoint: str
    claim: int
    failures: int
    body: bytes

    @property
    def subject(self) -> str:
        """Id of the job or batch that has ended."""
        return str(json.loads(self.body)["data"]["id"])


@valueclass(frozen=True, slots=True)
class WebhookAttempt:
    """Result of an attempt.

    Attributes:
        delivery: The attempted delivery.
        outcome: Its outcome.
        detail: Why it failed, without any part of the response body or the URL.
        retry_s: Seconds until the next attempt, or None if there is none.
    """

    delivery: Delivery
    outcome: WebhookOutcome
    detail: str = ""
    retry_s: float | None = None


# ------------------------------------------------------------------ signatures


def read_secret(written: str) -> bytes:
    """Return the key in a secret of the form `whsec_` and base64 of 24 to 64 bytes.

    Raises:
        ValueError: The secret has another form. The message does not repeat it.
    """
    kind, _, text = written.partition("_")
    try:
        key = base64.b64decode(text, validate=True)
    except ValueError:
        key = b""
    if kind != "whsec" or len(key) not in SECRET_BYTES:
        raise ValueError("a webhook's secret must be whsec_ followed by the base64 of 24 to 64 random bytes")
    return key


def signed_headers(delivery: Delivery, secrets: tuple[bytes, ...], now: int) -> dict[str, str]:
    """Return the id, timestamp and signature headers of an attempt at `now`, in epoch seconds."""
    signed = b"%s.%d.%s" % (delivery.id.encode(), now, delivery.body)
    digests = (hmac.digest(secret, signed, "sha256") for secret in secrets)
    return {
        "webhook-id": delivery.id,
        "webhook-timestamp": str(now),
        "webhook-signature": " ".join(f"v1,{base64.b64encode(digest).decode()}" for digest in digests),
    }


# ------------------------------------------------------------------ attempts


def judge(delivery: Delivery, status: int, retry_after_s: float | None = None) -> WebhookAttempt:
    """Return the result of an attempt answered with this status. Redirects count as failures."""
    if 200 <= status < 300:
        return WebhookAttempt(delivery, WebhookOutcome.DELIVERED)
    if status == 410:
        return WebhookAttempt(delivery, WebhookOutcome.GONE, "HTTP 410")
    asked_s = retry_after_s if status in (429, 503) else None
    return failed(delivery, f"HTTP {status}", asked_s)


def failed(
    delivery: Delivery,
    detail: str,
    retry_after_s: float | None = None,
    outcome: WebhookOutcome = WebhookOutcome.FAILED,
) -> WebhookAttempt:
    """Return the result of a failed attempt: retried later, or given up after the last one."""
    failures = delivery.failures + 1
    if failures >= len(SCHEDULE_S):
        return WebhookAttempt(delivery, WebhookOutcome.GIVEN_UP, detail)
    # Jitter, so that deliveries that failed at the same moment are not retried at the same moment.
    jitter = 0.9 + 0.2 * zlib.crc32(f"{delivery.id} {delivery.endpoint} {failures}".encode()) / 2**32
    asked_s = min(retry_after_s or 0.0, RETRY_AFTER_MAX_S)
    return WebhookAttempt(delivery, outcome, detail, max(SCHEDULE_S[failures] * jitter, asked_s))


# ------------------------------------------------------------------ addresses

_METADATA = frozenset(
    map(
        ipaddress.ip_address,
        (
            "169.254.169.254",
            "fd00:ec2::254",
            "fd20:ce::254",
            "fd00:42::42",
            "100.100.100.200",
            "192.0.0.192",
            "168.63.129.16",
        ),
    )
)
"""Metadata services of clouds, which hand out credentials: AWS, Google, Azure and others; AWS, Google and
Scaleway over IPv6; Alibaba; Oracle Classic; Azure's wire server. The last two look like public addresses."""

_PRIVATE = tuple(
    map(
        ipaddress.ip_network,
        ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fc00::/7", "fec0::/10"),
    )
)
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def address_refusal(text: str, *, allow_private: bool) -> str:
    """Return why an IP address is blocked, or "" if it is allowed.

    An IPv6 address that maps to an IPv4 one (NAT64, 6to4) is checked as that address. `allow_private` permits
    loopback and private networks, but no other blocked address.
    """
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return "not an IP address"
    if isinstance(address, ipaddress.IPv6Address):
        address = ipaddress.IPv6Address(int(address))  # without its zone, with which it is equal to no other
        if address.ipv4_mapped is not None:
            return "IPv4-mapped"
        if address.sixtofour is not None:
            address = address.sixtofour
        elif address in _NAT64:
            address = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    if address in _METADATA:
        return "a cloud's metadata service"
    for kind in ("unspecified", "multicast", "link_local"):
        if getattr(address, f"is_{kind}"):
            return kind.replace("_", "-")
    if address.is_loopback:
        return "" if allow_private else "loopback"
    if any(address in network for network in _PRIVATE):
        return "" if allow_private else "private"
    return "" if address.is_global and not address.is_reserved else "reserved"
