"""Requests whose length is in doubt: refused, or read in the one strict way, and never as two.

A proxy in front of the gateway may see another end of a request than the gateway does. What the gateway then
took for the next request on that connection would be some other caller's. So nothing of a body is ever read
as a head, whichever way a chat comes in, and in whatever pieces.
"""

import json
import select
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import anyio
import pytest
from anyio.abc import SocketStream
from support.front import KEY, WAYS, Closed, Front, Wire, chat, front, post
from support.loops import on_both_loops
from support.raw_server import LAST_CHUNK, STREAM_HEAD, answer_of, chunk
from support.world import DONE, HELLO, WHOLE

from gateway.downstream.relay import BodyLimits

anyio_backend = on_both_loops


@pytest.fixture(params=WAYS)
async def site(request: pytest.FixtureRequest) -> AsyncIterator[Front]:
    async with front(request.param, limits=BodyLimits(bytes_max=100_000)) as running:
        yield running
        await running.idle()


BODY = chat(user="first")
HIDDEN = post(chat(user="hidden"))
UNKNOWN = post(chat(user="hidden"), key=None)
LINE = "POST /v1/chat/completions HTTP/1.1"
NO_LENGTH = post(b"", length=None)[:-2]
"""A chat's head without a length, and without its end."""


def headed(*lines: bytes, end: bytes = b"\r\n\r\n", head: bytes = NO_LENGTH) -> bytes:
    """Return a head with these lines behind the others."""
    return head + b"\r\n".join(lines) + end


def length(value: object = len(BODY), name: bytes = b"Content-Length") -> bytes:
    """Return a header that states a length."""
    return name + b": " + (value if isinstance(value, bytes) else str(value).encode())


def coded(value: bytes = b"chunked") -> bytes:
    return b"Transfer-Encoding: " + value


CHUNKED = chunk(BODY) + LAST_CHUNK


@pytest.mark.parametrize("pieces", [1, 2], ids=["at once", "later"])
@pytest.mark.parametrize("key", [None, "other"], ids=["no key", "wrong key"])
async def test_trailers_are_no_headers(site: Front, key: str | None, pieces: int) -> None:
    head = post(b"", "Transfer-Encoding: chunked", key=key, length=None)
    body = chunk(BODY) + b"0\r\n" + f"Authorization: Bearer {KEY}\r\n\r\n".encode()
    async with site.caller() as caller:
        await caller.send(*([head + body] if pieces == 1 else [head, body]))
        got = await caller.answer()
    assert (got.status, got.code) == (401, "invalid_api_key")
    assert site.backend.requests == []


async def test_trailers_are_not_passed_on(site: Front) -> None:
    head = post(b"", "Transfer-Encoding: chunked", length=None)
    trailers = b"Content-Encoding: gzip\r\ntraceparent: 00-%b-%b-01\r\n\r\n" % (b"a" * 32, b"b" * 16)
    async with site.caller() as caller:
        got = await caller.ask(head + chunk(BODY) + b"0\r\n" + trailers)
    assert got.status == 200
    assert b"a" * 32 not in site.backend.requests[0][0]


@dataclass(frozen=True)
class Attack:
    """What is sent, and all that comes of it.

    Attributes:
        head, rest: What is sent.
        answers: The statuses, in order.
        is_closed: Whether the connection is closed behind them.
        asked: Who the backend heard of.
    """

    head: bytes
    rest: bytes
    answers: Sequence[int] = (400,)
    is_closed: bool = True
    asked: Sequence[str] = ()


def one(head: bytes, rest: bytes = BODY) -> Attack:
    """Read as precisely one request."""
    return Attack(head, rest, (200,), is_closed=False, asked=("first",))


N = len(BODY)
ATTACKS = {
    # two lengths
    "length, then chunked": Attack(headed(length(), coded()), CHUNKED),
    "chunked, then length": Attack(headed(coded(), length()), CHUNKED),
    "a length that ends in the chunks": Attack(headed(length(4), coded()), LAST_CHUNK + HIDDEN),
    "chunks that end in the length": Attack(headed(coded(), length(5 + len(HIDDEN))), LAST_CHUNK + HIDDEN),
    "no length, then chunked": Attack(headed(length(0), coded()), LAST_CHUNK + HIDDEN),
    "the same length twice": Attack(headed(length(), length()), BODY),
    "two lengths, the shorter first": Attack(headed(length(0), length()), BODY),
    "two lengths, the longer first": Attack(headed(length(N + len(HIDDEN)), length()), BODY + HIDDEN),
    "two lengths in one": Attack(headed(length(f"{N}, {N}")), BODY),
    "a length by another name": one(headed(length(), length(0, b"X-Content-Length"))),
    # lengths that are none
    "plus": Attack(headed(length(f"+{N}")), BODY),
    "minus": Attack(headed(length("-1")), BODY),
    "hexadecimal": Attack(headed(length(f"0x{N:x}")), BODY),
    "underscore": Attack(headed(length("1_0")), BODY),
    "decimal": Attack(headed(length(f"{N}.0")), BODY),
    "words": Attack(headed(length("many")), BODY),
    "empty": Attack(headed(length("")), BODY),
    "a space within": Attack(headed(length("1 0")), BODY),
    "other digits": Attack(headed(length("\u0664\u0665")), BODY),
    "more than can be counted": Attack(headed(length(2**64)), BODY),
    "many zeros": one(headed(length("0" * 300 + str(N)))),
    "more zeros than Python reads": one(headed(length("0" * 5_000 + str(N)))),
    "spaces around": one(headed(length(f"  {N}  "))),
    "tabs around": one(headed(length(f"\t{N}\t"))),
    "a length in small letters": one(headed(length(name=b"content-length"))),
    # chunked, more or less
    "chunked": one(headed(coded()), CHUNKED),
    "chunked in capitals": one(headed(coded(b"CHUNKED")), CHUNKED),
    "chunked twice": Attack(headed(coded(), coded()), CHUNKED),
    "chunked, then identity": Attack(headed(coded(b"chunked, identity")), CHUNKED),
    "identity": Attack(headed(coded(b"identity")), CHUNKED),
    "identity and a length": Attack(headed(coded(b"identity"), length()), BODY),
    "gzip, chunked": one(headed(coded(b"gzip, chunked")), CHUNKED),  # nothing is decompressed
    "xchunked": Attack(headed(coded(b"xchunked")), CHUNKED),
    "chunkedx": Attack(headed(coded(b"chunkedx")), CHUNKED),
    "xchunked and a length": Attack(headed(coded(b"xchunked"), length()), BODY),
    "a quoted chunked": Attack(headed(coded(b'"chunked"')), CHUNKED),
    "no coding, and a length": Attack(headed(coded(b""), length()), BODY),
    "a tab before chunked": one(headed(b"Transfer-Encoding:\tchunked"), CHUNKED),
    "a vertical tab before chunked": Attack(headed(b"Transfer-Encoding:\x0bchunked"), CHUNKED),
    "chunked behind a line break": Attack(headed(b"Transfer-Encoding:\r\n chunked"), CHUNKED),
    "chunked behind a bare line feed": Attack(headed(b"X: y\nTransfer-Encoding: chunked", length()), BODY),
    "a coding with a space before the colon": Attack(headed(b"Transfer-Encoding : chunked", length()), BODY),
    "a coding with an underscore": one(headed(b"Transfer_Encoding: chunked", length())),
    # chunks that are none
    "a size with a plus": Attack(headed(coded()), b"+5\r\nhello\r\n0\r\n\r\n"),
    "a size with 0x": Attack(headed(coded()), b"0x5\r\nhello\r\n0\r\n\r\n"),
    "a size with a space before it": Attack(headed(coded()), b" 5\r\nhello\r\n0\r\n\r\n"),
    "a size that ends in a bare line feed": Attack(headed(coded()), b"5\nhello\r\n0\r\n\r\n"),
    "a chunk that is longer than its size": Attack(headed(coded()), b"2\r\nhello\r\n0\r\n\r\n"),
    "a chunk without its end": Attack(headed(coded()), b"5\r\nhello0\r\n\r\n"),
    "a size that cannot be counted": Attack(headed(coded()), b"f" * 17 + b"\r\nhello\r\n0\r\n\r\n"),
    # lines that are none
    "a folded line": Attack(headed(b"X: y\r\n z", length()), BODY),
    "a folded length": Attack(headed(b"Content-Length:\r\n " + str(N).encode()), BODY),
    "bare line feeds": Attack(headed(length()).replace(b"\r\n", b"\n"), BODY),
    "an end of bare line feeds": Attack(headed(length(), end=b"\n\n"), BODY),
    "a bare carriage return": Attack(headed(b"X: y\rContent-Length: 0", length()), BODY),
    "a space before the colon": Attack(headed(length(name=b"Content-Length ")), BODY),
    "a space before the name": Attack(headed(length(name=b" Content-Length")), BODY),
    "no colon": Attack(headed(b"Content-Length", length()), BODY),
    "no name": Attack(headed(b": 0", length()), BODY),
    "NUL in a value": Attack(headed(b"X: \x00", length()), BODY),
    "NUL in a name": Attack(headed(b"X\x00: y", length()), BODY),
    "NUL in a length": Attack(headed(length(b"\x00" + str(N).encode())), BODY),
    # another protocol
    "upgrade": one(headed(length(), b"Connection: upgrade", b"Upgrade: h2c")),
    "upgrade as Java asks": one(
        headed(
            b"Connection: Upgrade, HTTP2-Settings",
            length(),
            b"HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA",
            b"Upgrade: h2c",
        )
    ),
    "upgrade by two": one(
        headed(
            length(), b"Connection: upgrade", b"Upgrade: h2c", b"Connection: upgrade", b"Upgrade: websocket"
        )
    ),
    "upgrade to a hidden request": Attack(
        headed(length(len(HIDDEN)), b"Connection: upgrade", b"Upgrade: other"),
        HIDDEN,
        (400,),
        is_closed=False,
    ),
    "upgrade in chunks": one(headed(coded(), b"Connection: upgrade", b"Upgrade: websocket"), CHUNKED),
    "upgrade, and the end": Attack(
        headed(length(), b"Connection: close, upgrade", b"Upgrade: h2c"),
        BODY + HIDDEN,
        (200,),
        asked=("first",),
    ),
    "upgrade, and two lengths": Attack(
        headed(length(), length(), b"Connection: upgrade", b"Upgrade: h2c"), BODY
    ),
    "upgrade, length and chunked": Attack(
        headed(length(), coded(), b"Connection: upgrade", b"Upgrade: h2c"), CHUNKED
    ),
    "upgrade with a request behind it": Attack(
        headed(length(), b"Connection: upgrade", b"Upgrade: h2c"),
        BODY + UNKNOWN,
        (200, 401),
        is_closed=False,
        asked=("first",),
    ),
    "upgrade without a body": Attack(
        headed(
            b"Connection: upgrade",
            b"Upgrade: h2c",
            head=NO_LENGTH.replace(LINE.encode(), b"GET /v1/models HTTP/1.1"),
        ),
        HIDDEN,
        (200, 200),
        is_closed=False,
        asked=("hidden",),
    ),
    "connect": Attack(
        headed(length(), head=NO_LENGTH.replace(LINE.encode(), b"CONNECT gateway:80 HTTP/1.1")), HIDDEN
    ),
    "another version": Attack(headed(length(), head=NO_LENGTH.replace(b"HTTP/1.1", b"HTTP/1.9")), BODY),
    "version 2": Attack(b"PRI * HTTP/2.0\r\n\r\n", b"SM\r\n\r\n"),
    # what is behind a request
    "a request without a key behind it": Attack(
        headed(length()), BODY + UNKNOWN, (200, 401), is_closed=False, asked=("first",)
    ),
    "a request that a too short length uncovers": Attack(
        headed(length(1)), b"{" + UNKNOWN, (400, 401), is_closed=False
    ),
    "a request that no length uncovers": Attack(headed(b"X: y"), UNKNOWN, (400, 401), is_closed=False),
    "a request within a body": Attack(headed(length(len(HIDDEN))), HIDDEN, (400,), is_closed=False),
    "a request within a body that is too long": Attack(
        headed(length(100_001)), HIDDEN.ljust(100_001), (413,), is_closed=False
    ),
    "a request within a body without a key": Attack(
        post(HIDDEN, key=None)[: -len(HIDDEN)], HIDDEN, (401,), is_closed=False
    ),
    "a request within chunks": Attack(headed(coded()), chunk(HIDDEN) + LAST_CHUNK, (400,), is_closed=False),
}


@pytest.mark.parametrize("pieces", ["at once", "head first", "byte by byte"])
async def test_a_request_has_one_end(site: Front, pieces: str) -> None:
    others = {}
    for name, attack in ATTACKS.items():
        found = await outcome(site, attack, pieces)
        if found != (attack.answers, attack.is_closed, attack.asked):
            others[name] = found

    assert others == {}


async def outcome(site: Front, attack: Attack, pieces: str) -> tuple[Sequence[int], bool, Sequence[str]]:
    """Return the statuses of all answers, whether the connection was closed, and who was heard of.

    A connection that is not closed is asked something else, which is to be answered as that.
    """
    before = len(site.backend.requests)
    answers: list[int] = []
    is_closed = False
    async with site.caller() as caller:
        await send(caller, attack, pieces)
        try:
            for _ in attack.answers:
                answers.append((await caller.answer()).status)
            if attack.is_closed:
                is_closed = await caller.is_closed()
            else:
                assert (await caller.ask(post(chat(user="next")))).status == 200
        except Closed:
            is_closed = True
    await site.idle()
    asked = [json.loads(body)["user"] for _, body in site.backend.requests[before:]]
    if not is_closed:
        assert asked.pop() == "next"
    return tuple(answers), is_closed, tuple(asked)


BYTE_BY_BYTE = 600
"""So many bytes behind what most attacks begin with come alone: all but those of the longest."""


async def send(caller: Wire, attack: Attack, pieces: str) -> None:
    """Send an attack, and let the server, in this very event loop, read each piece before the next."""
    if pieces == "at once":
        parts = [attack.head + attack.rest]
    elif pieces == "head first":
        parts = [attack.head, attack.rest]
    else:
        said = attack.head + attack.rest
        shared = len(NO_LENGTH) if said.startswith(NO_LENGTH) else 0
        last = shared + BYTE_BY_BYTE
        parts = [said[:shared], *(bytes([byte]) for byte in said[shared:last]), said[last:]]
    raw = caller.stream.extra(anyio.abc.SocketAttribute.raw_socket)
    for part in filter(None, parts):
        if attack.is_closed and select.select([raw], [], [], 0)[0]:
            return  # it is refused: more would drown the answer
        await caller.send(part)
        for _ in range(3 if pieces == "byte by byte" else 20):
            await anyio.lowlevel.checkpoint()


# ---------------------------------------------------------------- the other side


ANOTHER = answer_of(b'{"of":"nobody"}')
BEHIND = {
    "bytes": b"rubbish",
    "line breaks": b"\r\n\r\n",
    "an answer": ANOTHER,
    "half an answer": ANOTHER[:20],
    "an early hint": b"HTTP/1.1 103 Early Hints\r\n\r\n",
    "a chunk": chunk(HELLO),
}


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "stream"])
async def test_what_a_backend_sends_behind_an_answer_reaches_nobody(site: Front, is_streamed: bool) -> None:
    behind = b""

    async def say_more(stream: SocketStream, asked: dict[str, Any]) -> None:
        said = asked["user"].encode()
        if is_streamed:
            event = b'data: {"choices":[{"index":0,"delta":{"content":"%b"},"finish_reason":"stop"}]}\n\n'
            await stream.send(STREAM_HEAD + chunk(event % said + DONE) + LAST_CHUNK + behind)
        else:
            await stream.send(answer_of(WHOLE.replace(b"hello", said)) + behind)

    site.behave = say_more
    for name, said_behind in BEHIND.items():
        behind = said_behind
        for user in (f"{name}, first", f"{name}, second"):
            async with site.caller() as caller:
                got = await caller.ask(post(chat(user=user, stream=is_streamed)))
            assert (got.status, got.is_whole) == (200, True)
            assert user.encode() in got.body
            assert b"nobody" not in got.body
            await site.idle()
