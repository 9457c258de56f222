"""Single attempts over real sockets: what is sent, what an answer means, and where nothing ever goes."""

import socket
import ssl
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anyio
import pytest
from anyio.abc import ByteStream, SocketAttribute, SocketStream
from openai import OpenAI
from support.certificates import self_signed
from support.raw_server import STREAM_HEAD, always, answer_of, chunk, raw_server, tls_server

from gateway.clock import SystemClock
from gateway.core.webhooks import (
    Delivery,
    WebhookAttempt,
    WebhookEndpoint,
    WebhookEvent,
    WebhookOutcome,
    read_secret,
)
from gateway.upstream import webhook_calls
from gateway.upstream.webhook_calls import ADDRESSES_MAX, BODY_BYTES_MAX, WebhookCaller

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
EVENT = WebhookEvent("1-0", "response.completed", "resp_1", None, 1795244911)
DELIVERY = Delivery(EVENT.id, "ops", claim=1, failures=0, body=EVENT.body)
NOWHERE = "2d00::1"  # public by every rule, and in a block that nobody has been given


@dataclass
class Names:
    """A resolver that says what a test wants, one answer after the other."""

    answers: list[Sequence[str]]
    asked: list[str] = field(default_factory=list)

    async def __call__(self, host: str) -> Sequence[str]:
        self.asked.append(host)
        return self.answers[min(len(self.asked), len(self.answers)) - 1]


def endpoint(url: str, **changes: Any) -> WebhookEndpoint:
    return replace(WebhookEndpoint("ops", url, (read_secret(SECRET),), allow_private=True), **changes)


@cache
def certificates() -> ssl.SSLContext:
    """Return the system's, which take long to read."""
    return ssl.create_default_context()


def caller_with(**options: Any) -> WebhookCaller:
    return WebhookCaller(SystemClock(), **{"tls": certificates(), **options})


async def attempt(to: WebhookEndpoint, **options: Any) -> WebhookAttempt:
    caller = caller_with(**options)
    try:
        return await caller.attempt(to, DELIVERY)
    finally:
        await caller.aclose()


def head_of(received: bytes) -> tuple[str, dict[str, str]]:
    line, *fields = received.decode().split("\r\n")
    return line, {name.lower(): value for name, value in (one.split(": ", 1) for one in fields)}


def answering(status: str, headers: str = "") -> Any:
    return always(answer_of(b"private words", status, headers))


# ------------------------------------------------------------------ what is sent, and what it means


async def test_what_arrives_is_what_the_sdk_verifies() -> None:
    async with raw_server(answering("204 No Content")) as server:
        made = await attempt(endpoint(f"{server.url}/hooks/a?token=t"))
    assert (made.outcome, made.retry_s) == (WebhookOutcome.DELIVERED, None)

    received, body = server.requests[0]
    line, headers = head_of(received)
    assert line == "POST /hooks/a?token=t HTTP/1.1"
    assert set(headers) == {
        *("host", "user-agent", "content-type", "content-length", "accept"),
        *("webhook-id", "webhook-timestamp", "webhook-signature"),
    }
    assert headers["content-type"] == "application/json"
    assert headers["webhook-id"] == EVENT.id
    unwrapped = OpenAI(api_key="unused", webhook_secret=SECRET).webhooks.unwrap(body, headers)
    assert unwrapped.type == "response.completed"


@pytest.mark.parametrize(
    ("status", "headers", "outcome", "detail"),
    [
        pytest.param("200 OK", "", WebhookOutcome.DELIVERED, "", id="ok"),
        pytest.param("500 Oh", "", WebhookOutcome.FAILED, "HTTP 500", id="error"),
        pytest.param("410 Gone", "", WebhookOutcome.GONE, "HTTP 410", id="gone"),
        pytest.param("307 There", "location: /b\r\n", WebhookOutcome.FAILED, "HTTP 307", id="redirect"),
        pytest.param("302 There", "location: /b\r\n", WebhookOutcome.FAILED, "HTTP 302", id="another"),
    ],
)
async def test_what_an_answer_means(status: str, headers: str, outcome: WebhookOutcome, detail: str) -> None:
    async with raw_server(answering(status, headers)) as server:
        made = await attempt(endpoint(server.url))
    assert (made.outcome, made.detail) == (outcome, detail)
    assert len(server.requests) == 1


async def test_an_endpoint_says_when_to_come_back() -> None:
    async with raw_server(answering("503 Busy", "retry-after: 1234\r\n")) as server:
        made = await attempt(endpoint(server.url))
    assert made.retry_s == 1234


async def test_a_cookie_is_not_brought_back() -> None:
    async with raw_server(answering("200 OK", "set-cookie: a=b\r\n")) as server:
        to = endpoint(server.url)
        caller = caller_with()
        for _ in range(2):
            await caller.attempt(to, DELIVERY)
        await caller.aclose()
    assert [b"cookie" in received.lower() for received, _ in server.requests] == [False, False]


async def test_a_slow_answer_is_a_failure() -> None:
    async def silent(stream: SocketStream, _: int) -> None:
        await anyio.sleep_forever()

    async with raw_server(silent) as server:
        made = await attempt(endpoint(server.url), attempt_s=0.2)
    assert (made.outcome, made.detail) == (WebhookOutcome.FAILED, "no answer in 0.2 s")


async def test_an_endless_body_is_left_and_the_status_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook_calls, "BODY_S", 3600.0)

    async def endless(stream: SocketStream, _: int) -> None:
        await stream.send(STREAM_HEAD)
        while True:
            await stream.send(chunk(b"x" * BODY_BYTES_MAX))

    with anyio.fail_after(30):
        async with raw_server(endless) as server:
            caller = caller_with()
            made = await caller.attempt(endpoint(server.url), DELIVERY)
            await server.closed.wait()
            await caller.aclose()
    assert made.outcome is WebhookOutcome.DELIVERED


async def test_a_body_that_does_not_come_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook_calls, "BODY_S", 0.1)

    async def stuck(stream: SocketStream, _: int) -> None:
        await stream.send(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n")
        await anyio.sleep_forever()

    async with raw_server(stuck) as server:
        assert (await attempt(endpoint(server.url))).outcome is WebhookOutcome.DELIVERED


async def test_a_short_body_may_be_sent_to_its_end() -> None:
    sent = anyio.Event()

    async def in_parts(stream: SocketStream, _: int) -> None:
        for part in (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n", b"o"):
            await stream.send(part)
            with anyio.move_on_after(0.1):
                await stream.receive()  # raises if the connection is closed
        await stream.send(b"k")
        sent.set()

    async with raw_server(in_parts) as server:
        assert (await attempt(endpoint(server.url))).outcome is WebhookOutcome.DELIVERED
    assert sent.is_set()


async def test_a_body_that_is_cut_takes_nothing_back() -> None:
    async def cut(stream: SocketStream, _: int) -> None:
        await stream.send(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nw")
        await stream.aclose()

    async with raw_server(cut) as server:
        assert (await attempt(endpoint(server.url))).outcome is WebhookOutcome.DELIVERED


@pytest.mark.parametrize(
    ("said", "detail"),
    [
        pytest.param(b"SSH-2.0-OpenSSH_9.6\r\n\r\n", "an answer that is not HTTP, or was cut", id="no-http"),
        pytest.param(b"", "an answer that is not HTTP, or was cut", id="closed"),
        pytest.param(b"HTTP/1.1 200", "an answer that is not HTTP, or was cut", id="cut"),
    ],
)
async def test_what_is_no_answer(said: bytes, detail: str) -> None:
    async def answer(stream: SocketStream, _: int) -> None:
        if said:
            await stream.send(said)
        await stream.aclose()

    async with raw_server(answer) as server:
        made = await attempt(endpoint(server.url), resolve=Names([["127.0.0.1", "127.0.0.1"]]))
    assert (made.outcome, made.detail) == (WebhookOutcome.FAILED, detail)
    assert len(server.requests) == 1  # whoever has got it does not get it again at once


async def test_a_connection_that_breaks_is_a_failure() -> None:
    async def reset(stream: SocketStream, _: int) -> None:
        raw = stream.extra(SocketAttribute.raw_socket)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await stream.aclose()

    async with raw_server(reset) as server:
        made = await attempt(endpoint(server.url), resolve=Names([["127.0.0.1", "127.0.0.1"]]))
    assert (made.outcome, made.detail) == (WebhookOutcome.FAILED, "the connection broke (ReadError)")
    assert len(server.requests) == 1


async def test_nobody_there(free_tcp_port: int) -> None:
    made = await attempt(endpoint(f"http://127.0.0.1:{free_tcp_port}"))
    assert (made.outcome, made.detail) == (WebhookOutcome.FAILED, "connection refused")


async def test_an_attempt_that_is_cut_at_the_end_blames_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook_calls, "HURRY_S", 0.0)
    asked = anyio.Event()
    made: list[WebhookAttempt] = []

    async def silent(stream: SocketStream, _: int) -> None:
        asked.set()
        await stream.receive()

    async with raw_server(silent) as server:
        to = endpoint(server.url)
        caller = caller_with()

        async def run() -> None:
            made.append(await caller.attempt(to, DELIVERY))

        with anyio.fail_after(10):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(run)
                await asked.wait()
                tasks.cancel_scope.cancel()
                caller.hurry()
            await server.closed.wait()
        await caller.aclose()
    assert made == []


async def test_after_the_end_nothing_is_attempted_any_more() -> None:
    async with raw_server(answering("200 OK")) as server:
        with anyio.CancelScope() as scope:
            scope.cancel()
            await attempt(endpoint(server.url))
    assert server.connections == 0


# ------------------------------------------------------------------ where nothing goes


async def test_nothing_is_sent_to_this_machine() -> None:
    async with raw_server(answering("200 OK")) as server:
        for host in ("127.0.0.1", "localhost"):
            url = server.url.replace("127.0.0.1", host)
            made = await attempt(endpoint(url, allow_private=False))
            assert made.outcome is WebhookOutcome.REFUSED
            assert "(loopback)" in made.detail
            assert made.retry_s is not None
    assert server.connections == 0


@pytest.mark.parametrize("allow_private", [False, True])
async def test_one_forbidden_address_among_others_forbids_all(allow_private: bool) -> None:
    async with raw_server(answering("200 OK")) as server:
        names = Names([[*("127.0.0.1",) * ADDRESSES_MAX, "169.254.169.254"]])
        url = server.url.replace("127.0.0.1", "hooks.invalid")
        made = await attempt(endpoint(url, allow_private=allow_private), resolve=names)
    assert made.outcome is WebhookOutcome.REFUSED
    assert server.connections == 0


async def test_a_name_that_changes_its_mind_changes_nothing() -> None:
    """DNS rebinding: a public address for the check, a private one for the connection."""
    async with raw_server(answering("200 OK")) as server:
        names = Names([[NOWHERE], ["127.0.0.1"]])
        url = server.url.replace("127.0.0.1", "hooks.invalid")
        made = await attempt(endpoint(url, allow_private=False), resolve=names, attempt_s=1.0)
    assert made.outcome is WebhookOutcome.FAILED
    assert len(names.asked) == 1
    assert server.connections == 0


async def test_the_connection_goes_to_the_address_that_was_checked_and_keeps_the_name() -> None:
    """No resolver of any system knows a name that ends in .invalid."""
    async with raw_server(answering("200 OK")) as server:
        port = urlsplit(server.url).port
        made = await attempt(endpoint(f"http://hooks.invalid:{port}/"), resolve=Names([["127.0.0.1"]]))
    assert made.outcome is WebhookOutcome.DELIVERED
    assert head_of(server.requests[0][0])[1]["host"] == f"hooks.invalid:{port}"


async def test_every_attempt_asks_anew() -> None:
    names = Names([["127.0.0.1"], ["169.254.169.254"]])
    async with raw_server(answering("200 OK")) as server:
        to = endpoint(server.url.replace("127.0.0.1", "hooks.invalid"))
        caller = caller_with(resolve=names)
        outcomes = [(await caller.attempt(to, DELIVERY)).outcome for _ in range(2)]
        await caller.aclose()
    assert outcomes == [WebhookOutcome.DELIVERED, WebhookOutcome.REFUSED]


async def test_a_connection_is_not_used_again_for_another_name_at_the_same_address() -> None:
    async with raw_server(answering("200 OK")) as server:
        caller = caller_with(resolve=Names([["127.0.0.1"]]))
        for name in ("one.invalid", "other.invalid"):
            await caller.attempt(endpoint(server.url.replace("127.0.0.1", name)), DELIVERY)
        await caller.aclose()
    assert server.connections == 2


async def test_an_address_that_does_not_answer_is_passed_over() -> None:
    async with raw_server(answering("200 OK")) as server:
        url = server.url.replace("127.0.0.1", "hooks.invalid")
        # The server listens on 127.0.0.1 alone.
        made = await attempt(endpoint(url), resolve=Names([["127.0.0.2", "127.0.0.1"]]))
    assert made.outcome is WebhookOutcome.DELIVERED


async def test_no_more_addresses_are_tried_than_there_is_time_for() -> None:
    async with raw_server(answering("200 OK")) as server:
        url = server.url.replace("127.0.0.1", "hooks.invalid")
        for before, outcome in (
            (ADDRESSES_MAX - 1, WebhookOutcome.DELIVERED),
            (ADDRESSES_MAX, WebhookOutcome.FAILED),
        ):
            names = Names([[*("127.0.0.2",) * before, "127.0.0.1"]])
            assert (await attempt(endpoint(url), resolve=names)).outcome is outcome
    assert server.connections == 1


async def test_a_server_that_never_ends_its_handshake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook_calls, "CONNECT_S", 0.1)

    async def hold(stream: ByteStream) -> None:
        async with stream:
            with suppress(anyio.BrokenResourceError, anyio.EndOfStream):
                while True:
                    await stream.receive()

    listener = await anyio.create_tcp_listener(local_host="127.0.0.2")
    to = endpoint(f"https://hooks.invalid:{listener.extra(SocketAttribute.local_port)}/")
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, hold)
        made = await attempt(to, resolve=Names([["127.0.0.2"]]))
        passed_over = await attempt(to, resolve=Names([["127.0.0.2", "127.0.0.1"]]))
        tasks.cancel_scope.cancel()
    assert (made.outcome, made.detail) == (WebhookOutcome.FAILED, "no connection in 0.1 s")
    assert (passed_over.outcome, passed_over.detail) == (WebhookOutcome.FAILED, "connection refused")


async def test_a_url_that_is_none_is_a_failure() -> None:
    made = await attempt(endpoint("http://10.0.0.256/"))
    assert (made.outcome, made.detail) == (WebhookOutcome.FAILED, "its URL is invalid")


async def test_a_name_without_an_address() -> None:
    made = await attempt(endpoint("http://hooks.invalid/"))
    assert (made.outcome, made.detail) == (WebhookOutcome.FAILED, "its host name does not resolve")
    long = await attempt(endpoint(f"http://{'a' * 70}.invalid/"))
    assert (long.outcome, long.detail) == (WebhookOutcome.FAILED, "its host name does not resolve")


# ------------------------------------------------------------------ TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for hooks.invalid, and its key."""
    return self_signed(tmp_path_factory.mktemp("tls"), "hooks.invalid")


@pytest.mark.parametrize(
    ("host", "outcome"),
    [("hooks.invalid", WebhookOutcome.DELIVERED), ("others.invalid", WebhookOutcome.FAILED)],
)
async def test_the_certificate_is_checked_against_the_name(
    certificate: tuple[Path, Path], host: str, outcome: WebhookOutcome
) -> None:
    cert, key = certificate
    names: list[str | None] = []
    serving = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    serving.load_cert_chain(cert, key)
    serving.sni_callback = lambda _, name, __: names.append(name)
    async with tls_server(serving, answer_of(b"")) as (port, _):
        made = await attempt(
            endpoint(f"https://{host}:{port}/"),
            resolve=Names([["127.0.0.1"]]),
            tls=ssl.create_default_context(cafile=cert),
        )
    assert made.outcome is outcome
    assert names == [host]
    if outcome is WebhookOutcome.FAILED:
        assert made.detail == ("TLS: Hostname mismatch, certificate is not valid for 'others.invalid'")
