"""A head that is recognized is one that the parser reads in the same way, and never the end of another."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from hashlib import sha256
from typing import Any

import anyio
import httptools
import pytest
from anyio.abc import SocketStream
from hypothesis import given
from hypothesis import strategies as st
from support.front import KEY, Closed, Front, Wire, chat, front, post
from support.loops import on_both_loops
from support.raw_server import answer_of
from support.world import WHOLE

from gateway.downstream.direct import LEARNED_MAX, DirectProtocol
from gateway.downstream.head_template import HEAD_BYTES_MAX, HeadTemplate
from gateway.downstream.relay import BodyLimits, Head

anyio_backend = on_both_loops

LINE = b"POST /v1/chat/completions HTTP/1.1"
HEAD = Head({}, None)
Request = tuple[list[tuple[bytes, bytes]], bytes]
"""Headers and body."""


class Parsed:
    """What httptools reads: the requests in some bytes, and whether another one begins behind them."""

    def __init__(self, data: bytes) -> None:
        self.requests: list[Request] = []
        self.is_within = False
        httptools.HttpRequestParser(self).feed_data(data)

    def on_message_begin(self) -> None:
        self.is_within = True
        self._headers: list[tuple[bytes, bytes]] = []
        self._body = b""

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        self.is_within = False
        self.requests.append((self._headers, self._body))


def learned(data: bytes) -> HeadTemplate | None:
    return HeadTemplate.learned(data, LINE, Parsed(data).requests[0][0], HEAD)


def read_like(first: bytes, found: tuple[bytes, bytes]) -> list[Request]:
    """Return what the parser should read in a request with the head of `first`, and what was found in it."""
    length, body = found
    headers, _ = Parsed(first).requests[0]
    return [([(name, length if name == b"content-length" else value) for name, value in headers], body)]


NAMES = st.sampled_from([b"Host", b"X-Any", b"x-content-length", b"authorization", b"A"])
VALUES = st.sampled_from([b"", b"a", b"12", b"a: b", b"  spaced\t", b"Content-Length: 3", b"\xe9"])
LENGTHS = st.sampled_from([b"Content-Length: %b", b"content-length:%b", b"CONTENT-LENGTH: \t%b"])
BODIES = st.sampled_from([b"", b"x", b"{}" * 40, b"POST /v1/chat/completions HTTP/1.1\r\n\r\n"])


@st.composite
def heads(draw: st.DrawFn) -> bytes:
    """A head with a place for the length."""
    lines = [name + b": " + value for name, value in draw(st.lists(st.tuples(NAMES, VALUES), max_size=4))]
    lines = [line.replace(b"%", b"%%") for line in lines]
    lines.insert(draw(st.integers(0, len(lines))), draw(LENGTHS))
    return b"\r\n".join([LINE, *lines, b"", b""])


@given(heads(), BODIES, BODIES)
def test_a_request_with_a_learned_head_is_recognized_and_read_like_the_parser_does(
    head: bytes, first: bytes, second: bytes
) -> None:
    learned_from = head % str(len(first)).encode() + first
    template = learned(learned_from)
    assert template is not None

    data = head % str(len(second)).encode() + second
    found = template.body_of(data)

    assert found is not None
    assert Parsed(data).requests == read_like(learned_from, found)


@given(heads(), BODIES, st.data())
def test_what_is_recognized_is_one_whole_request_for_the_parser_too(
    head: bytes, body: bytes, data: st.DataObject
) -> None:
    request = head % str(len(body)).encode() + body
    template = learned(request)
    assert template is not None
    at = data.draw(st.integers(0, len(request)))
    changed = data.draw(
        st.sampled_from(
            [
                request[:at],
                request[at:],
                request[:at] + request[at + 1 :],
                request[:at] + b"\r\n" + request[at:],
                request[:at] + b"0" + request[at:],
                request[:at] + b"+" + request[at + 1 :],
                request[:at] + b" " + request[at:],
                request + request[:at],
                request + request,
                head % b"-1" + body,
                head % b"" + body,
                head % ("\u0661".encode()) + body,
            ]
        )
    )

    found = template.body_of(changed)

    if found is not None:
        parsed = Parsed(changed)
        assert parsed.requests == read_like(request, found)
        assert not parsed.is_within


@pytest.mark.parametrize(
    ("head", "headers"),
    [
        pytest.param(
            b"Content-Length: 2\r\nA: b\r\n c", [(b"content-length", b"2"), (b"a", b"b c")], id="folded"
        ),
        pytest.param(
            b"Content-Length: 2\r\nA: b\r\n c", [(b"content-length", b"2"), (b"a", b"b")], id="a-line-unread"
        ),
        pytest.param(
            b"Content-Length: 2\r\nA: b", [(b"content-length", b"2"), (b"a", b"c")], id="another-value"
        ),
        pytest.param(b"A: b", [(b"a", b"b")], id="no-length"),
        pytest.param(b"Content-Length: 2\nA: b", [(b"content-length", b"2"), (b"a", b"b")], id="bare-feed"),
        pytest.param(
            b"Content-Length: 2\r\nContent-Length: 2",
            [(b"content-length", b"2"), (b"content-length", b"2")],
            id="two-lengths",
        ),
        pytest.param(b"Content-Length: 2, 2", [(b"content-length", b"2, 2")], id="a-list"),
        pytest.param(b"Content-Length: 2 ", [(b"content-length", b"2 ")], id="a-space-behind"),
        pytest.param(b"Content-Length : 2", [(b"content-length", b"2")], id="a-space"),
        pytest.param(
            b"Content-Length: 2\r\nA: " + b"b" * HEAD_BYTES_MAX,
            [(b"content-length", b"2"), (b"a", b"b" * HEAD_BYTES_MAX)],
            id="long",
        ),
    ],
)
def test_what_may_mean_something_else_is_not_learned(head: bytes, headers: list[tuple[bytes, bytes]]) -> None:
    assert HeadTemplate.learned(LINE + b"\r\n" + head + b"\r\n\r\n{}", LINE, headers, HEAD) is None


def test_another_request_line_is_not_learned() -> None:
    data = b"POST /v1/chat/completions?a HTTP/1.1\r\nContent-Length: 0\r\n\r\n"

    assert HeadTemplate.learned(data, LINE, [(b"content-length", b"0")], HEAD) is None


def test_a_head_that_ends_in_its_length_is_no_request_of_that_length() -> None:
    begun = LINE + b"\r\nA: %b\r\nContent-Length: "
    begun %= b"a" * (99 - len(begun % b""))
    template = learned(begun + b"2\r\n\r\n{}")
    assert template is not None

    assert template.body_of(begun + b"100\r") is None


# ---------------------------------------------------------------- on a connection


@pytest.fixture
async def site() -> AsyncIterator[Front]:
    async with front("direct") as running:
        yield running
        await running.idle()


def protocol_of(site: Front) -> DirectProtocol:
    (found,) = site.listener.server_state.connections
    assert isinstance(found, DirectProtocol)
    return found


def asked(site: Front) -> Sequence[bytes]:
    return [body for _, body in site.backend.requests]


async def test_a_head_is_learned_once_and_every_request_keeps_its_own_body(site: Front) -> None:
    async with site.caller() as caller:
        for number in range(5):
            got = await caller.ask(post(chat(user="x" * number)))
            assert got.status == 200
        assert protocol_of(site)._may_learn == LEARNED_MAX - 1

    heads = [call.head for call in site.watched.taken]
    assert len(heads) == 5
    for number, head in enumerate(heads):
        assert head is not None
        assert head.headers["content-length"] == str(len(chat(user="x" * number)))
        assert "authorization" not in head.headers
        assert head.key == "team"
    assert [b'"user":"%b"' % (b"x" * number) in body for number, body in enumerate(asked(site))] == [True] * 5


async def test_heads_that_always_differ_are_not_learned_forever(site: Front) -> None:
    async with site.caller() as caller:
        for number in range(2 * LEARNED_MAX):
            assert (await caller.ask(post(chat(), f"traceparent: {number}"))).status == 200
        assert protocol_of(site)._may_learn == 0

    assert site.taken == 2 * LEARNED_MAX


async def test_in_whatever_pieces_a_repeated_request_comes_it_is_one(site: Front) -> None:
    request = post(chat(user="me"))
    async with site.caller() as caller:
        assert (await caller.ask(request)).status == 200
        server = protocol_of(site)
        for at in range(1, len(request), 7):
            server.data_received(request[:at])
            server.data_received(request[at:])
            assert (await caller.answer()).status == 200

    assert len(set(asked(site))) == 1


async def test_repeated_requests_that_come_together_are_answered_in_order(site: Front) -> None:
    async with site.caller() as caller:
        assert (await caller.ask(post(chat(user="first")))).status == 200
        server = protocol_of(site)
        server.data_received(post(chat(user="second")) + post(chat(user="third")) + post(chat(user="4"))[:50])
        assert (await caller.answer()).status == 200
        assert (await caller.answer()).status == 200
        server.data_received(post(chat(user="4"))[50:])
        assert (await caller.answer()).status == 200
        server.data_received(post(chat(user="fifth")))
        server.data_received(post(chat(user="sixth")))  # while the fifth is being answered
        assert (await caller.answer()).status == 200
        assert (await caller.answer()).status == 200

    users = [b"first", b"second", b"third", b"4", b"fifth", b"sixth"]
    assert [user in body for user, body in zip(users, asked(site), strict=True)] == [True] * 6


async def test_the_rest_of_a_body_that_was_answered_without_it_is_no_repeated_request(site: Front) -> None:
    hidden = post(chat(user="hidden"))
    refused = post(hidden, key=None)
    async with site.caller() as caller:
        assert (await caller.ask(post(chat(user="first")))).status == 200
        assert (await caller.ask(refused.removesuffix(hidden))).status == 401
        protocol_of(site).data_received(hidden)
        assert (await caller.ask(post(chat(user="second")))).status == 200

    users = [b"first", b"second"]
    assert [user in body for user, body in zip(users, asked(site), strict=True)] == [True] * 2


async def test_a_repeated_request_waits_for_the_answer_before_it(site: Front) -> None:
    gate = anyio.Event()

    async def first_last(stream: SocketStream, asked: dict[str, Any]) -> None:
        if asked["user"] == "first":
            await gate.wait()
        await stream.send(answer_of(WHOLE.replace(b"hello", asked["user"].encode())))

    async with site.caller() as caller:
        assert (await caller.ask(post(chat(user="learned")))).status == 200
        site.behave = first_last
        for user in ("first", "second"):
            protocol_of(site).data_received(post(chat(user=user)))
            for _ in range(100):
                await anyio.lowlevel.checkpoint()
        gate.set()
        for user in ("first", "second"):
            assert user in (await caller.answer()).body.decode()


@pytest.mark.parametrize(
    ("request_", "statuses"),
    [
        pytest.param(post(chat(), key="wrong"), [401], id="another-key"),
        pytest.param(post(chat(), key=None), [401], id="no-key"),
        pytest.param(post(chat(), "Transfer-Encoding: chunked"), [400], id="chunked-too"),
        pytest.param(post(chat(), "Content-Length: 3"), [400], id="two-lengths"),
        pytest.param(post(chat(), path="/v1/models"), [405], id="another-path"),
        pytest.param(post(chat(), length=len(chat()) - 1), [400], id="a-length-too-short"),
        pytest.param(post(chat()).replace(b"Host: gateway\r\n", b""), [400], id="no-host"),
        pytest.param(b"\r\n" + post(chat()), [200], id="a-line-before"),
        pytest.param(post(chat()).replace(b"Host", b"hOST"), [200], id="other-capitals"),
        pytest.param(post(chat()) + post(chat(), key="wrong"), [200, 401], id="another-key-behind"),
    ],
)
async def test_what_differs_from_the_learned_head_is_judged_by_itself(
    site: Front, request_: bytes, statuses: Sequence[int]
) -> None:
    async with site.caller() as caller:
        assert (await caller.ask(post(chat()))).status == 200
        protocol_of(site).data_received(request_)
        for status in statuses:
            assert (await caller.answer()).status == status


async def test_a_key_that_is_taken_away_opens_nothing_any_more(site: Front) -> None:
    keys = site.applications.serving._keys
    async with site.caller() as caller:
        assert (await caller.ask(post(chat()))).status == 200
        assert (await caller.ask(post(chat()))).status == 200
        keys.replace({"other": sha256(b"other").digest()})
        assert (await caller.ask(post(chat()))).status == 401
        keys.replace({"renamed": sha256(KEY.encode()).digest()})
        assert (await caller.ask(post(chat()))).status == 200

    last = site.watched.taken[-1].head
    assert last is not None
    assert last.key == "renamed"


async def test_a_gateway_that_shuts_down_refuses_repeated_requests_too(site: Front) -> None:
    async with site.caller() as caller:
        assert (await caller.ask(post(chat()))).status == 200
        site.applications.serving.refuse()
        assert (await caller.ask(post(chat()))).status == 503


async def until(moment: float) -> None:
    """Return once every timer of that moment has had its turn."""
    reached = asyncio.Event()
    asyncio.get_running_loop().call_at(moment, reached.set)
    await reached.wait()


async def test_a_repeated_request_may_have_no_longer_body_than_any_other() -> None:
    async with front("direct", limits=BodyLimits(bytes_max=1_000)) as site, site.caller() as caller:
        assert (await caller.ask(post(chat()))).status == 200
        protocol_of(site).data_received(post(chat(user="x" * 1_000)))
        assert (await caller.answer()).status == 413


async def test_a_timer_that_was_set_before_a_request_does_not_end_its_connection(site: Front) -> None:
    async with site.caller() as caller:
        await site.eventually(lambda: bool(site.listener.server_state.connections))
        protocol_of(site).timeout_keep_alive = 1.0  # type: ignore[assignment]
        assert (await caller.ask(post(chat()))).status == 200
        timer = protocol_of(site).timeout_keep_alive_task
        assert timer is not None
        for from_then_s in (-0.4, 0.1, 0.3):
            await until(timer.when() + from_then_s)
            assert (await caller.ask(post(chat()))).status == 200
        with pytest.raises(Closed):  # but it is closed in its own time
            await caller.answer()


async def test_a_connection_is_closed_when_it_was_idle_and_not_before(site: Front) -> None:
    loop, gate = asyncio.get_running_loop(), anyio.Event()

    async def late(stream: SocketStream, _: object) -> None:
        await gate.wait()
        await stream.send(answer_of(WHOLE))

    async def ask(caller: Wire) -> None:
        assert (await caller.ask(post(chat()))).status == 200

    async with site.caller() as caller:
        await site.eventually(lambda: bool(site.listener.server_state.connections))
        protocol_of(site).timeout_keep_alive = 0.05  # type: ignore[assignment]
        await ask(caller)
        timer = protocol_of(site).timeout_keep_alive_task
        assert timer is not None
        site.behave = late
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask, caller)
            await site.eventually(lambda: site.taken == 2)
            await until(max(timer.when(), loop.time() + 0.06))  # the timer of the pause before the request
            gate.set()
        answered_at = loop.time()
        with pytest.raises(Closed):
            await caller.answer()
        assert loop.time() - answered_at >= 0.04
