"""Methods that a path does not have, over a raw socket."""

import pytest
from support.front import KEY, front


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
        ("POST", "/v1/models", {"GET", "OPTIONS"}),
        ("PUT", "/v1/responses/resp_1", {"GET", "DELETE", "OPTIONS"}),
        ("DELETE", "/readyz", {"GET", "OPTIONS"}),
    ],
)
async def test_who_is_refused_for_the_method_is_told_which_there_are(
    method: str, path: str, allowed: set[str]
) -> None:
    async with front("direct") as site, site.caller() as caller:
        got = await caller.ask(asking(method, path))

        assert (got.status, got.code) == (405, "method_not_allowed")
        assert set((got.header("allow") or "").split(", ")) == allowed
        assert got.header("x-request-id")
