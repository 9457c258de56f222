"""Methods beside those that do something, over a raw socket."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anyio
import pytest
from litestar.types import Message, Receive, Scope, Send
from support.front import KEY, Got, front

from gateway.downstream.head_requests import HeadAsGet


def asking(method: str, path: str) -> bytes:
    """Return a request without a body."""
    return f"{method} {path} HTTP/1.1\r\nHost: gateway\r\nAuthorization: Bearer {KEY}\r\n\r\n".encode()


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/chat/completions", {"POST"}),
        ("OPTIONS", "/v1/chat/completions", {"POST"}),
        ("PUT", "/v1/completions", {"POST"}),
        ("GET", "/v1/responses", {"POST"}),
        ("HEAD", "/v1/chat/completions", {"POST"}),
        ("POST", "/v1/models", {"GET", "HEAD", "OPTIONS"}),
        ("PUT", "/v1/responses/resp_1", {"GET", "HEAD", "DELETE", "OPTIONS"}),
        ("DELETE", "/readyz", {"GET", "HEAD", "OPTIONS"}),
    ],
)
async def test_who_is_refused_for_the_method_is_told_which_there_are(
    method: str, path: str, allowed: set[str]
) -> None:
    async with front("direct") as site, site.caller() as caller:
        await caller.send(asking(method, path))
        got = await caller.head()

        assert got.status == 405
        assert set((got.header("allow") or "").split(", ")) == allowed
        assert got.header("x-request-id")


@pytest.mark.parametrize(
    "path", ["/livez", "/healthz", "/readyz", "/health", "/v1/models", "/v1/models/gemma-4", "/no"]
)
async def test_head_is_get_without_the_body(path: str) -> None:
    async with front("direct") as site, site.caller() as caller:
        got = await caller.ask(asking("GET", path))
        await caller.send(asking("HEAD", path), asking("GET", "/livez"))
        head = await caller.head()

        assert (head.status, comparable(head)) == (got.status, comparable(got))
        assert (await caller.answer()).body == b"ok"  # and nothing before it


async def test_options_lists_what_there_is() -> None:
    async with front("direct") as site, site.caller() as caller:
        await caller.send(asking("OPTIONS", "/v1/models"))
        got = await caller.head()

        assert (got.status, set((got.header("allow") or "").split(", "))) == (204, {"GET", "HEAD", "OPTIONS"})


def comparable(got: Got) -> list[tuple[str, str]]:
    """Return the headers of an answer that are the same whenever it is given."""
    return sorted(pair for pair in got.headers if pair[0] not in ("date", "x-request-id"))


async def test_the_head_of_what_does_not_end_is_whole() -> None:
    """Of a stream, say, on a connection that a proxy keeps: it would hold up whatever comes next on it."""
    sent: list[Message] = []

    async def endless(scope: Scope, receive: Receive, send: Send) -> None:
        assert scope.get("method") == "GET"
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(3):
            await send({"type": "http.response.body", "body": b"more", "more_body": True})

    async def collect(message: Message) -> None:
        sent.append(message)

    scope: Any = {"type": "http", "method": "HEAD"}
    await HeadAsGet(endless)(scope, anyio.sleep_forever, collect)  # type: ignore[arg-type]

    assert sent[1:] == [{"type": "http.response.body", "body": b"", "more_body": False}]


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/v1/models"])
async def test_answers_that_take_no_time_need_no_thread(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where none can be started, a gateway serves streams and must not be taken for dead."""

    def none_left(*_: object) -> None:
        raise RuntimeError("can't start new thread")  # as Python says it

    async with front("direct") as site, site.caller() as caller:
        monkeypatch.setattr(ThreadPoolExecutor, "submit", none_left)
        await caller.send(asking("GET", path))
        assert (await caller.head()).status == 200
