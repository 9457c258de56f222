"""Requests as chance makes them, the same ones on both ways of a chat: nobody can tell which way one took.

Chance is the same each time. The other tests have what somebody thought of.
"""

import re
from collections.abc import Awaitable, Callable, Container, Sequence
from contextlib import suppress
from random import Random
from typing import Any

import anyio
from anyio.abc import SocketStream
from support.front import KEY, WAYS, Closed, Front, chat, front, oblige
from support.raw_server import LAST_CHUNK, answer_of, chunk

from gateway.downstream.relay import BodyLimits

CASES = 300
CONNECTIONS = 40
PAGE = "https://app.example.com"
PATH = "/v1/chat/completions"
BODY = chat()
LINES = (
    *(
        f"{method} {PATH} HTTP/1.1"
        for method in ("GET", "PUT", "DELETE", "OPTIONS", "Post", "CONNECT", "QUERY")
    ),
    *(
        f"POST {PATH}{tail} HTTP/1.1"
        for tail in ("?", "?a=%ff", "/", "//", "%00", "#a", ";a", "%", "\xe4", " ")
    ),
    *(
        f"POST {target}{PATH} HTTP/1.1"
        for target in ("/", "http://other", "HTTP://u:p@a:1", "//a", "http://[", ".")
    ),
    *(
        f"POST {target} HTTP/1.1"
        for target in ("/v1/chat%2Fcompletions", "/V1/chat/completions", "*", "a:80", "")
    ),
    *(
        f"POST {PATH} {version}"
        for version in ("HTTP/1.0", "HTTP/2.0", "HTTP/1.2", "http/1.1", "HTTP/11", "")
    ),
)
LENGTHS = ("{0}", "0{0}", " {0}\t", "+{0}", "{0}, {0}", "", "x", "-1", str(2**64), "0" * 5_000 + "{0}")
LONE = {  # of each there is one, or another, or none, or two
    "Host": ("gateway", "gateway:80", "", "a:b", "a/b", "a b", "a@b", "[::1]", "[::1", "\xe4", "a" * 5_000),
    "Authorization": (
        f"Bearer {KEY}",
        f"bearer  {KEY} ",
        f"Basic {KEY}",
        "Bearer",
        "Bearer \xe4",
        f"Bearer {KEY}x",
    ),
}
OTHERS = (
    *(f"Origin: {origin}" for origin in (PAGE, "null", "https://other", "", "\xe4")),
    *(f"Connection: {wish}" for wish in ("close", "Close, x", "keep-alive", "upgrade", "", "content-length")),
    *(f"Idempotency-Key: {key}" for key in ("", "a b", '"', "\xe4", "x" * 300)),
    *(f"traceparent: {trace}" for trace in (f"00-{'ab' * 16}-{'cd' * 8}-01", f"ff-{'0' * 49}", "\xe4", "")),
    *(f"Content-Type: {kind}" for kind in ("text/plain", "application/json; charset=utf-16", "", "\xe4")),
    *("Content-Encoding: gzip", "Upgrade: h2c", "X-Gateway-Timeout-S: nan", "Prefer: wait=1", "TE: trailers"),
    *("X: \x01", "X\xe4: y", " X: y", "X : y", ": y", "X", "X: y\nZ: q", "X: y\rZ: q", "X: " + "y" * 5_000),
    *("Transfer-Encoding: chunked", "Transfer-Encoding: gzip", "Expect: x"),
)
ALIKE = (
    *("User-Agent: a/1", "Content-Type: application/json", "Connection: keep-alive", "X:  spaced\t", "Y:"),
    *("Accept: */*", f"Origin: {PAGE}", f"traceparent: 00-{'ab' * 16}-{'cd' * 8}-01", "X-\xc4: y"),
)
BODIES = (
    *(
        chat(stream=True),
        chat(model="other"),
        chat(n=0),
        chat(user="reject"),
        chat(messages=[]),
        BODY + b" ",
        BODY + b"x",
    ),
    *(
        b"",
        b"{",
        b"[]",
        b"null",
        b"\x00",
        b"\xef\xbb\xbf" + BODY,
        BODY[:-1],
        b'{"model":"\xff"}',
        b" " * 5_001,
    ),
)
ENDS = (LAST_CHUNK, b"0\r\nX: y\r\n\r\n", b"0;x=y\r\n\r\n", b"-1\r\n\r\n")
CHANGING = {"date": "", "x-gateway-queue-ms": ""}
ODD = ("line", "length", "body", "chunks", "others", *LONE)


def made(dice: Random) -> bytes:
    """Return a request: an ordinary one but for one or two things."""
    odd = set(dice.choices(ODD, k=dice.randint(1, 2)))
    line = dice.choice(LINES) if "line" in odd else f"POST {PATH} HTTP/1.1"
    body = dice.choice(BODIES) if "body" in odd else BODY
    fields = []
    for name, values in LONE.items():
        count = dice.choice((0, 1, 1, 1, 2)) if name in odd else 1
        fields += [f"{name}: {dice.choice(values) if name in odd else values[0]}" for _ in range(count)]
    if "chunks" in odd:
        fields.append("Transfer-Encoding: chunked")
        size = dice.choice((1, 50, 100_000)) if len(body) < 1_000 else 2_000
        pieces = [chunk(body[at : at + size]) for at in range(0, len(body), size)]
        body = b"".join(pieces) + dice.choice(ENDS)
    if "chunks" not in odd or "length" in odd:
        lengths = dice.choices(LENGTHS, k=dice.choice((1, 1, 1, 2))) if "length" in odd else LENGTHS[:1]
        fields += ["Content-Length: " + length.format(len(body)) for length in lengths]
    if "others" in odd:
        fields += dice.choices(OTHERS, k=dice.randint(1, 2))
    dice.shuffle(fields)
    return "\r\n".join([line, *fields, "", ""]).encode("latin-1") + body


async def behave(stream: SocketStream, asked: dict[str, Any]) -> None:
    """Answer, or refuse whoever says so."""
    if asked.get("user") == "reject":
        await stream.send(answer_of(b'{"error":{"message":"no","code":422}}', "422 Unprocessable"))
    else:
        await oblige(stream, asked)


async def outcome(site: Front, request: bytes) -> Any:
    """Return all that comes of a request: to its caller, on its connection, in records, at the backend."""
    recorded, asked = len(site.notes.requests), len(site.backend.requests)
    async with site.caller() as caller:
        got = await caller.ask(request)
        try:
            following = (await caller.ask(b"GET /livez HTTP/1.1\r\nHost: gateway\r\n\r\n")).status
        except (Closed, anyio.BrokenResourceError):
            following = None
    await site.idle()
    headers = sorted((name, CHANGING.get(name, value)) for name, value in got.headers)
    return told(site, (got.status, headers, got.body, got.is_whole, following), recorded, asked)


def told(site: Front, got: object, recorded: int, asked: int) -> str:
    """Return what callers got, with what was recorded, and came to the backend, since there was that much."""
    records = [
        (one.ending, one.status, one.error_code, one.key, one.model, one.stream, one.trace)
        for one in site.notes.requests[recorded:]
    ]
    said = repr((got, records, site.backend.requests[asked:]))
    return re.sub(r"req-[0-9a-f]{32}|host: [0-9.]+:[0-9]+", "", said)


def made_alike(dice: Random) -> list[bytes]:
    """Return what an application sends on one connection: one head again and again, or with a byte changed.

    Each has an answer, and some have two: none promises more bytes than it has.
    """
    fields = ["Host: gateway", f"Authorization: Bearer {KEY}", "Content-Length:{0}"]
    fields += dice.sample(ALIKE, dice.choice((0, 1, 3)))
    dice.shuffle(fields)
    head = "\r\n".join([f"POST {PATH} HTTP/1.1", *fields, "", ""])
    sent = []
    for _ in range(dice.randint(2, 5)):
        body, changed = dice.choice((BODY, BODY, *BODIES)), head
        if dice.random() < 0.3:
            at = dice.randrange(len(head))
            if head[at] not in "{0}":
                changed = head[:at] + dice.choice(("", "x", " ", ":", "\t", "\xe4", "\r\n")) + head[at + 1 :]
        sent.append(changed.replace("{0}", f" {len(body)}").encode("latin-1") + body)
    return sent


async def outcomes(site: Front, sent: list[bytes]) -> Any:
    """Return all that comes of requests on one connection, each sent when the one before it is answered."""
    recorded, asked = len(site.notes.requests), len(site.backend.requests)
    got: list[object] = []
    async with site.caller() as caller:
        with suppress(Closed, anyio.BrokenResourceError):
            for request in sent:
                answer = await caller.ask(request)
                headers = sorted((name, CHANGING.get(name, value)) for name, value in answer.headers)
                got.append((answer.status, headers, answer.body, answer.is_whole))
    await site.idle()
    return told(site, got, recorded, asked)


async def assert_alike(
    sent: Sequence[Any], outcome: Callable[[Front, Any], Awaitable[str]], taken: Container[int]
) -> None:
    """Check that each of `sent` has the same outcome on both ways, and how many requests avoid ASGI."""
    found: list[list[str]] = []
    avoided = 0
    for way in WAYS:
        async with front(way, behave, limits=BodyLimits(bytes_max=5_000), origins=[PAGE]) as site:
            found.append([await outcome(site, one) for one in sent])
            avoided += site.taken

    assert [(one, *both) for one, *both in zip(sent, *found, strict=True) if len(set(both)) > 1] == []
    assert avoided in taken


async def test_requests_alike_on_a_connection_have_the_same_outcomes_on_both_ways() -> None:
    dice = Random(2)
    connections = [made_alike(dice) for _ in range(CONNECTIONS)]
    # Some of a connection are recognized by the head before them.
    await assert_alike(connections, outcomes, range(CONNECTIONS + 1, 5 * CONNECTIONS))


async def test_what_chance_makes_has_the_same_outcome_on_both_ways() -> None:
    dice = Random(1)
    # Chance makes enough of either kind.
    await assert_alike([made(dice) for _ in range(CASES)], outcome, range(CASES // 5, CASES * 4 // 5))
