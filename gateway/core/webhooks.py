"""Webhooks: who hears of what ended, in which words, signed how, tried again when, and never sent where.

The form is Standard Webhooks 1.0.0 with the bodies of OpenAI, so that OpenAI's SDKs verify them as they are.

    what ended -> event -> one delivery per endpoint that hears of it -> attempts, until one succeeds

A delivery is attempted at least once and succeeds at most once as far as the gateway knows: an endpoint may
get one twice, under the same `webhook-id`.

Pure: times are arguments, and the jitter comes of the delivery's own id.
"""

import base64
import hashlib
import hmac
import ipaddress
import json
import zlib
from dataclasses import dataclass, field
from email.utils import mktime_tz, parsedate_tz
from enum import StrEnum

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
"""What can be heard of; OpenAI's words."""

SCHEDULE_S = (0, 5, 300, 1_800, 7_200, 18_000, 36_000, 50_400, 72_000, 86_400)
"""Seconds from one attempt to the next, the first being at once: the schedule that Standard Webhooks 1.0.0
gives as its example. The last attempt is a little over three days after the first."""

RETRY_AFTER_MAX_S = 86_400.0
"""An endpoint that asks for more time than this gets this: the longest step of the schedule."""

SECRET_BYTES = range(24, 65)
"""How long a secret may be, by Standard Webhooks 1.0.0."""


class WebhookOutcome(StrEnum):
    """How an attempt, or a delivery, went. Few and fixed: a metric's label."""

    DELIVERED = "delivered"
    FAILED = "failed"  # no 2xx in time; it is tried again
    REFUSED = "refused"  # by this gateway: the host's address is not public; it is tried again
    GIVEN_UP = "given_up"  # the last attempt failed
    GONE = "gone"  # 410: the endpoint gets nothing more until a restart
    DROPPED = "dropped"  # too much waits for the endpoint already


@dataclass(frozen=True, slots=True)
class WebhookEndpoint:
    """Where events are sent.

    Attributes:
        name: Its name in the configuration.
        url: Where to. May hold a token: never logged.
        secrets: Keys of the signatures, one each; several while one replaces another.
        events: Types it hears of; "batch.*" for all of a kind.
        keys: Names of the API keys whose jobs it hears of; None: of all, and of jobs without one.
        allow_private: Whether it may be on a private or loopback address.
    """

    name: str
    url: str = field(repr=False)
    secrets: tuple[bytes, ...] = field(repr=False)
    events: tuple[str, ...] = ("response.*", "batch.*")
    keys: frozenset[str] | None = None
    allow_private: bool = False

    def hears(self, event: "WebhookEvent") -> bool:
        """Return whether it is told of an event."""
        kind = event.type.partition(".")[0]
        named = event.type in self.events or f"{kind}.*" in self.events
        return named and (self.keys is None or event.key in self.keys)


@dataclass(frozen=True, slots=True)
class WebhookEvent:
    """Something that has ended.

    Attributes:
        entry: What the store knows it by until it is handed on.
        type: One of `EVENT_TYPES`.
        subject: Id of what has ended: `resp_...` or `batch_...`.
        key: Name of the API key it belongs to, or None.
        created_at: When it ended, in epoch seconds of the store's clock.
    """

    entry: str
    type: str
    subject: str
    key: str | None
    created_at: int

    @property
    def id(self) -> str:
        """Its id, the same whoever computes it: what endpoints tell a repetition by."""
        text = f"{self.entry} {self.type} {self.subject}"
        return f"evt_{hashlib.sha256(text.encode()).hexdigest()[:32]}"

    @property
    def body(self) -> bytes:
        """What is sent of it. Thin: whoever wants more fetches it, with an API key."""
        members = {
            "id": self.id,
            "object": "event",
            "created_at": self.created_at,
            "type": self.type,
            "data": {"id": self.subject},
        }
        return json.dumps(members, separators=(",", ":")).encode()


@dataclass(frozen=True, slots=True)
class Delivery:
    """An event on its way to one endpoint, claimed for an attempt.

    Attributes:
        id: The event's: `webhook-id`.
        endpoint: Name of the endpoint.
        claim: How often it has been claimed: what its outcome must be reported under.
        failures: Attempts that failed before.
        body: What is sent.
    """

    id: str
    endpoint: str
    claim: int
    failures: int
    body: bytes


@dataclass(frozen=True, slots=True)
class WebhookAttempt:
    """How an attempt went.

    Attributes:
        delivery: What was attempted.
        outcome: How it went.
        detail: Why it failed, in words that hold nothing of the answer's body and nothing of the URL.
        retry_s: Seconds until the next attempt, or None where there is none.
    """

    delivery: Delivery
    outcome: WebhookOutcome
    detail: str = ""
    retry_s: float | None = None


# ------------------------------------------------------------------ signatures


def read_secret(written: str) -> bytes:
    """Return the key in a secret as it is written: `whsec_` and base64 of 24 to 64 bytes.

    Raises:
        ValueError: it is written otherwise. The message does not repeat it.
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
    """Return the headers that make an attempt at `now`, in epoch seconds, verifiable."""
    signed = b"%s.%d.%s" % (delivery.id.encode(), now, delivery.body)
    digests = (hmac.digest(secret, signed, "sha256") for secret in secrets)
    return {
        "webhook-id": delivery.id,
        "webhook-timestamp": str(now),
        "webhook-signature": " ".join(f"v1,{base64.b64encode(digest).decode()}" for digest in digests),
    }


# ------------------------------------------------------------------ attempts


def judge(delivery: Delivery, status: int, retry_after_s: float | None = None) -> WebhookAttempt:
    """Return what an answer with that status means. A redirection is a failure, and is not followed."""
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
    """Return a failed attempt: tried again later, or given up where it was the last."""
    failures = delivery.failures + 1
    if failures >= len(SCHEDULE_S):
        return WebhookAttempt(delivery, WebhookOutcome.GIVEN_UP, detail)
    # All that failed at one moment must not come back at one moment.
    jitter = 0.9 + 0.2 * zlib.crc32(f"{delivery.id} {delivery.endpoint} {failures}".encode()) / 2**32
    asked_s = min(retry_after_s or 0.0, RETRY_AFTER_MAX_S)
    return WebhookAttempt(delivery, outcome, detail, max(SCHEDULE_S[failures] * jitter, asked_s))


def retry_after_s(value: str | None, now: float) -> float | None:
    """Return the seconds that a Retry-After header asks for, by number or date; None where it says none."""
    if value is None:
        return None
    if value.isascii() and value.isdigit():
        return float(value[:12])
    date = parsedate_tz(value)
    try:
        return None if date is None else max(0.0, mktime_tz(date) - now)
    except (ValueError, OverflowError):
        return None


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
"""Where clouds tell a machine its credentials: AWS, Google, Azure and others; AWS, Google and Scaleway by
IPv6; Alibaba; Oracle's classic one; Azure's wire server. The last two look like public addresses."""

_PRIVATE = tuple(
    map(
        ipaddress.ip_network,
        ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fc00::/7", "fec0::/10"),
    )
)
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def address_refusal(text: str, *, allow_private: bool) -> str:
    """Return why nothing is sent to an IP address, or "" where something may be.

    An IPv6 address that leads to an IPv4 one (NAT64, 6to4) is judged by that. `allow_private` lets in
    loopback and private networks, never the rest.
    """
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return "not an IP address"
    if isinstance(address, ipaddress.IPv6Address):
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
