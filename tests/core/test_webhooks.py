"""Webhooks, pure: who hears, what is said, what verifies, when it is tried again, and where it never goes."""

import base64
import json
from dataclasses import replace

import pytest
from openai import OpenAI
from openai._exceptions import InvalidWebhookSignatureError

from gateway.clock import SystemClock
from gateway.core.webhooks import (
    EVENT_TYPES,
    RETRY_AFTER_MAX_S,
    SCHEDULE_S,
    Delivery,
    WebhookEndpoint,
    WebhookEvent,
    WebhookOutcome,
    address_refusal,
    failed,
    judge,
    read_secret,
    signed_headers,
)

EVENT = WebhookEvent("1795244911000-0", "response.completed", "resp_1", "team", 1795244911)
DELIVERY = Delivery(EVENT.id, "ops", claim=1, failures=0, body=EVENT.body)


def secret(size: int = 24, fill: bytes = b"k") -> str:
    return "whsec_" + base64.b64encode(fill * size).decode()


def endpoint(**changes: object) -> WebhookEndpoint:
    plain = WebhookEndpoint("ops", "https://example.com/", (b"k" * 24,))
    return replace(plain, **changes)  # type: ignore[arg-type]


# ------------------------------------------------------------------ events


@pytest.mark.parametrize(
    ("changes", "hears"),
    [
        pytest.param({}, True, id="everything"),
        pytest.param({"events": ("response.completed",)}, True, id="the-type"),
        pytest.param({"events": ("response.*",)}, True, id="the-kind"),
        pytest.param({"events": ("response.failed", "batch.*")}, False, id="other-types"),
        pytest.param({"keys": frozenset({"team"})}, True, id="the-key"),
        pytest.param({"keys": frozenset({"others"})}, False, id="another-key"),
    ],
)
def test_who_hears(changes: dict[str, object], hears: bool) -> None:
    assert endpoint(**changes).hears(EVENT) is hears


def test_whoever_names_keys_does_not_hear_of_jobs_without_one() -> None:
    nobodys = replace(EVENT, key=None)
    assert endpoint().hears(nobodys)
    assert not endpoint(keys=frozenset({"team"})).hears(nobodys)


def test_the_body_is_the_thin_event() -> None:
    assert json.loads(EVENT.body) == {
        "id": EVENT.id,
        "object": "event",
        "created_at": 1795244911,
        "type": "response.completed",
        "data": {"id": "resp_1"},
    }


def test_an_event_has_one_id_and_another_event_another() -> None:
    others = [
        replace(EVENT, entry="1795244911000-1"),
        replace(EVENT, type="response.failed"),
        replace(EVENT, subject="resp_2"),
    ]
    ids = {event.id for event in (EVENT, *others)}
    assert len(ids) == 4
    assert replace(EVENT, key=None).id == EVENT.id
    assert EVENT.id.startswith("evt_")


# ------------------------------------------------------------------ signatures


def test_the_specification_s_own_example_is_signed_as_it_says() -> None:
    """The example of the Standard Webhooks libraries' tests."""
    body = b'{"test": 2432232314}'
    delivery = Delivery("msg_p5jXN8AQM9LWM0D4loKWxJek", "ops", 1, 0, body)
    key = read_secret("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    assert signed_headers(delivery, (key,), 1614265330) == {
        "webhook-id": "msg_p5jXN8AQM9LWM0D4loKWxJek",
        "webhook-timestamp": "1614265330",
        "webhook-signature": "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
    }


@pytest.mark.parametrize("type_", EVENT_TYPES)
def test_the_sdk_accepts_every_event(type_: str) -> None:
    event = replace(EVENT, type=type_)
    delivery = replace(DELIVERY, id=event.id, body=event.body)
    headers = signed_headers(delivery, (read_secret(secret()),), int(SystemClock().wall()))
    client = OpenAI(api_key="unused", webhook_secret=secret())
    unwrapped = client.webhooks.unwrap(event.body, headers)
    assert (unwrapped.type, unwrapped.id) == (type_, event.id)
    assert unwrapped.data.id == "resp_1"  # type: ignore[union-attr]


def test_while_a_secret_is_replaced_both_verify_and_no_third() -> None:
    keys = (read_secret(secret(fill=b"a")), read_secret(secret(fill=b"b")))
    headers = signed_headers(DELIVERY, keys, int(SystemClock().wall()))
    assert len(headers["webhook-signature"].split(" ")) == 2
    for fill in (b"a", b"b"):
        OpenAI(api_key="unused", webhook_secret=secret(fill=fill)).webhooks.unwrap(EVENT.body, headers)
    with pytest.raises(InvalidWebhookSignatureError):
        OpenAI(api_key="unused", webhook_secret=secret(fill=b"c")).webhooks.unwrap(EVENT.body, headers)


@pytest.mark.parametrize("size", [24, 64])
def test_secrets_of_24_to_64_bytes_are_read(size: int) -> None:
    assert read_secret(secret(size)) == b"k" * size


@pytest.mark.parametrize(
    "written",
    [
        pytest.param(secret(23), id="short"),
        pytest.param(secret(65), id="long"),
        pytest.param(secret().removeprefix("whsec_"), id="bare"),
        pytest.param("sk_" + secret().removeprefix("whsec_"), id="another-kind"),
        pytest.param("whsec_not base64!", id="no-base64"),
        pytest.param(secret()[:-1], id="cut"),
        pytest.param(secret().replace("_", "_'") + "'", id="in-quotes"),
        pytest.param("whsec_ключ", id="no-ascii"),
        pytest.param("", id="nothing"),
    ],
)
def test_other_secrets_are_refused_and_not_repeated(written: str) -> None:
    with pytest.raises(ValueError, match="24 to 64") as caught:
        read_secret(written)
    assert not written or written not in str(caught.value)


# ------------------------------------------------------------------ attempts


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        (200, WebhookOutcome.DELIVERED),
        (204, WebhookOutcome.DELIVERED),
        (299, WebhookOutcome.DELIVERED),
        (300, WebhookOutcome.FAILED),
        (301, WebhookOutcome.FAILED),
        (307, WebhookOutcome.FAILED),
        (404, WebhookOutcome.FAILED),
        (410, WebhookOutcome.GONE),
        (429, WebhookOutcome.FAILED),
        (500, WebhookOutcome.FAILED),
    ],
)
def test_what_a_status_means(status: int, outcome: WebhookOutcome) -> None:
    assert judge(DELIVERY, status).outcome is outcome


def test_the_schedule_is_the_published_one_and_ends() -> None:
    assert [step / 60 for step in SCHEDULE_S] == [0, 5 / 60, 5, 30, 120, 300, 600, 840, 1200, 1440]
    waits = [failed(replace(DELIVERY, failures=failures), "") for failures in range(len(SCHEDULE_S))]
    for wait, step in zip(waits, SCHEDULE_S[1:], strict=False):
        assert wait.outcome is WebhookOutcome.FAILED
        assert wait.retry_s is not None
        assert 0.9 * step <= wait.retry_s <= 1.1 * step
    assert (waits[-1].outcome, waits[-1].retry_s) == (WebhookOutcome.GIVEN_UP, None)


def test_the_jitter_is_a_delivery_s_own_and_always_the_same() -> None:
    deliveries = [replace(DELIVERY, id=f"evt_{number}", failures=1) for number in range(50)]
    deliveries += [replace(DELIVERY, endpoint=f"other-{number}", failures=1) for number in range(50)]
    waits = [failed(delivery, "").retry_s for delivery in deliveries]
    assert waits == [failed(delivery, "").retry_s for delivery in deliveries]
    assert len(set(waits)) == 100


@pytest.mark.parametrize(
    ("status", "asked_s", "failures", "least", "most"),
    [
        pytest.param(429, 120.0, 0, 120, 120, id="longer-than-the-schedule"),
        pytest.param(503, 120.0, 0, 120, 120, id="also-503"),
        pytest.param(503, 1.0, 1, 270, 330, id="shorter-than-the-schedule"),
        pytest.param(503, 1e9, 0, RETRY_AFTER_MAX_S, RETRY_AFTER_MAX_S, id="without-reason"),
        pytest.param(500, 120.0, 0, 4, 6, id="another-status"),
        pytest.param(429, None, 0, 4, 6, id="says-nothing"),
    ],
)
def test_retry_after_within_reason(
    status: int, asked_s: float | None, failures: int, least: float, most: float
) -> None:
    wait = judge(replace(DELIVERY, failures=failures), status, asked_s).retry_s
    assert wait is not None
    assert least <= wait <= most


# ------------------------------------------------------------------ addresses


@pytest.mark.parametrize(
    ("address", "why", "why_in_private"),
    [
        ("93.184.215.14", "", ""),
        ("2606:2800:21f:cb07:6820:80da:af6b:8b2c", "", ""),
        ("64:ff9b::5db8:d70e", "", ""),
        ("127.0.0.1", "loopback", ""),
        ("127.8.8.8", "loopback", ""),
        ("::1", "loopback", ""),
        ("10.0.0.1", "private", ""),
        ("172.16.0.1", "private", ""),
        ("192.168.1.1", "private", ""),
        ("100.64.0.1", "private", ""),
        ("fd12::1", "private", ""),
        ("64:ff9b::a00:1", "private", ""),
        ("2002:a00:1::", "private", ""),
        ("64:ff9b::7f00:1", "loopback", ""),
        ("169.254.1.1", "link-local", "link-local"),
        ("fe80::1", "link-local", "link-local"),
        ("fe80::1%eth0", "link-local", "link-local"),
        ("224.0.0.1", "multicast", "multicast"),
        ("ff02::1", "multicast", "multicast"),
        ("0.0.0.0", "unspecified", "unspecified"),
        ("::", "unspecified", "unspecified"),
        ("0.1.2.3", "reserved", "reserved"),
        ("240.0.0.1", "reserved", "reserved"),
        ("255.255.255.255", "reserved", "reserved"),
        ("192.0.2.1", "reserved", "reserved"),
        ("198.18.0.1", "reserved", "reserved"),
        ("2001:db8::1", "reserved", "reserved"),
        ("2001:0:a00:1::", "reserved", "reserved"),
        ("::7f00:1", "reserved", "reserved"),
        ("fec0::1", "private", ""),
        ("::ffff:127.0.0.1", "IPv4-mapped", "IPv4-mapped"),
        ("::ffff:93.184.215.14", "IPv4-mapped", "IPv4-mapped"),
        ("169.254.169.254", "a cloud's metadata service", "a cloud's metadata service"),
        ("64:ff9b::a9fe:a9fe", "a cloud's metadata service", "a cloud's metadata service"),
        ("fd00:ec2::254", "a cloud's metadata service", "a cloud's metadata service"),
        ("100.100.100.200", "a cloud's metadata service", "a cloud's metadata service"),
        ("168.63.129.16", "a cloud's metadata service", "a cloud's metadata service"),
        ("fd20:ce::254", "a cloud's metadata service", "a cloud's metadata service"),
        ("fd00:42::42", "a cloud's metadata service", "a cloud's metadata service"),
        ("192.0.0.192", "a cloud's metadata service", "a cloud's metadata service"),
        ("fd00:ec2::254%1", "a cloud's metadata service", "a cloud's metadata service"),
        ("fd12::1%eth0", "private", ""),
        ("10.0.0.1%1", "not an IP address", "not an IP address"),
        ("example.com", "not an IP address", "not an IP address"),
        ("", "not an IP address", "not an IP address"),
    ],
)
def test_where_nothing_is_sent(address: str, why: str, why_in_private: str) -> None:
    assert address_refusal(address, allow_private=False) == why
    assert address_refusal(address, allow_private=True) == why_in_private


def test_a_url_and_a_secret_never_show() -> None:
    shown = repr(endpoint(url="https://example.com/?token=t", secrets=(b"s" * 24,)))
    assert "token" not in shown
    assert "sss" not in shown
