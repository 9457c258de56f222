"""The header `Host`: one that says something, or the request is refused, whichever way it comes."""

import pytest
from support.front import WAYS, chat, front, post
from support.loops import on_both_loops
from support.raw_server import LAST_CHUNK, chunk

from gateway.downstream.hosts import is_host

anyio_backend = on_both_loops


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


GOOD = (
    *("gateway", "GATEWAY", "gateway:8080", "a.b.example.", "my_gateway", "a%20b", "a,b", "127.0.0.1:80"),
    *("[::1]", "[::1]:8080", "[fe80::1%25eth0]", "gateway:", "gateway:99999", "", ":80"),
)
BAD = (
    *(
        "a b",
        "a/b",
        "http://gateway",
        "user@gateway",
        "a\\b",
        "a?b",
        "a#b",
        '"a"',
        "<a>",
        "a\tb",
        "g\xe4teway",
    ),
    *("a:80:90", "a:http", "a:-1", "[::1", "::1", "[::1]a", "[]", "[a b]", "a[::1]"),
)


@pytest.mark.parametrize(
    ("value", "is_one"), [*((value, True) for value in GOOD), *((value, False) for value in BAD)]
)
def test_what_can_be_a_host(value: str, is_one: bool) -> None:
    assert is_host(value.encode("latin-1")) is is_one


def naming(request: bytes, *lines: str) -> bytes:
    """Return a request with these lines in place of its host."""
    return request.replace(b"Host: gateway\r\n", b"".join(line.encode("latin-1") + b"\r\n" for line in lines))


NONE_OR_MANY: tuple[tuple[str, ...], ...] = (
    (),
    ("Host: gateway", "host: gateway"),
    ("Host: a b",),
    ("HOST: gateway", "Host: other"),
    ("Host: gateway", "Host:"),
    *((f"Host: {value}",) for value in BAD),
)
ORDINARY = post()
REQUESTS = (
    ORDINARY,
    post(chat(stream=True)),
    post(b"", "Transfer-Encoding: chunked", length=None) + chunk(chat()) + LAST_CHUNK,
    post(key=None),
    post(path="http://gateway/v1/chat/completions"),
    post(chat(), "Connection: upgrade", "Upgrade: h2c"),
    post(path="/v1/other"),
    post(b"", line="GET /livez HTTP/1.1", length=None),
)


async def test_a_request_of_no_host_or_of_several_is_refused_and_the_next_is_served(way: str) -> None:
    async with front(way) as site, site.caller() as caller:
        for request in REQUESTS:
            for lines in NONE_OR_MANY if request is ORDINARY else NONE_OR_MANY[:3]:
                got = await caller.ask(naming(request, *lines))

                assert (got.status, got.code) == (400, "invalid_request"), lines
                assert got.header("x-request-id")
                assert got.header("connection") is None
        assert site.backend.requests == []
        assert (await caller.ask(post())).status == 200
        await site.idle()


async def test_a_request_of_one_host_is_served(way: str) -> None:
    async with front(way) as site, site.caller() as caller:
        for host in GOOD:
            assert (await caller.ask(naming(post(), f"Host: {host}"))).status == 200
            assert (await caller.ask(naming(post(path="/v1/other"), f"hOST:{host}"))).status == 404
        assert site.taken == (len(GOOD) if way == "direct" else 0)


async def test_each_of_a_row_is_refused_in_its_turn(way: str) -> None:
    async with front(way) as site, site.caller() as caller:
        await caller.send(post(chat(stream=True)) + naming(post()) + post())

        assert [(await caller.answer()).status for _ in range(3)] == [200, 400, 200]
        await site.idle()


@pytest.mark.parametrize(
    ("lines", "status"), [((), 200), (("Host: gateway",), 200), (("Host: a", "Host: b"), 400)]
)
async def test_http_1_0_need_not_name_any(way: str, lines: tuple[str, ...], status: int) -> None:
    request = post(line="POST /v1/chat/completions HTTP/1.0")
    async with front(way) as site, site.caller() as caller:
        assert (await caller.ask(naming(request, *lines))).status == status
        assert await caller.is_closed()


async def test_whoever_is_refused_instead_of_being_told_to_go_on_is_refused_for_good(way: str) -> None:
    async with front(way) as site, site.caller() as caller:
        got = await caller.ask(naming(post(b"", "Expect: 100-continue", length=100)))

        assert (got.status, got.header("connection")) == (400, "close")
        assert await caller.is_closed()
