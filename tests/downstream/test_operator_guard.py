"""The admin port over a raw socket: what a web page could send is refused, what an operator sends is not."""

from collections.abc import AsyncIterator

import anyio
import pytest
from litestar import Litestar, get, post

from gateway.downstream.listener import Listener
from gateway.downstream.operator_guard import OperatorGuard
from gateway.sockets import bind


@get("/admin/thing")
async def thing() -> str:
    return "shown"


@post("/admin/thing", status_code=200)
async def change() -> str:
    return "altered"


@get(["/metrics", "/livez", "/readyz"])
async def machine() -> str:
    return "shown"


@pytest.fixture
async def port() -> AsyncIterator[int]:
    app = Litestar([thing, change, machine], openapi_config=None, logging_config=None)
    with bind("127.0.0.1", 0) as bound:
        listener = Listener(OperatorGuard(app, ["Ops.Example.com"]), bound)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(listener.run_until_stopped)
            await listener.wait_started()
            yield bound.getsockname()[1]
            listener.cut()


async def answer(port: int, request: str, *headers: str) -> tuple[int, str]:
    """Return status and body of the answer to these very bytes."""
    lines = (f"{request} HTTP/1.1", *headers, "Content-Length: 0", "Connection: close", "", "")
    async with await anyio.connect_tcp("127.0.0.1", port) as connection:
        await connection.send("\r\n".join(lines).encode("latin-1"))
        said = b""
        try:
            while True:
                said += await connection.receive()
        except anyio.EndOfStream:
            head, _, body = said.decode().partition("\r\n\r\n")
            return int(head.split()[1]), body


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "127.0.0.1:9090", "10.0.0.7:9090", "[::1]", "[::1]:9090", "[::ffff:127.0.0.1]:1"),
        *("localhost", "LOCALHOST:9090", "gateway.localhost", "gateway:9090", "my_gateway"),
        *("ops.example.com", "OPS.example.com:9090"),
    ],
)
async def test_whoever_calls_it_by_its_name_is_answered(port: int, host: str) -> None:
    assert await answer(port, "GET /admin/thing", f"Host: {host}") == (200, "shown")
    assert await answer(port, "POST /admin/thing", f"Host: {host}") == (200, "altered")


@pytest.mark.parametrize(
    "headers",
    [
        ("Host: attacker.example",),
        ("Host: attacker.example:9090",),
        ("Host: 127.0.0.1.attacker.example",),
        ("Host: localhost.attacker.example",),
        ("Host: ops.example.com.attacker.example",),
        ("Host: notops.example.com",),
        ("Host: localhost.",),
        ("Host: 127.0.0.1@attacker.example",),
        ("Host: [::1].attacker.example",),
        ("Host: ",),
        (),
        ("Host: 127.0.0.1", "Host: attacker.example"),
        ("Host: attacker.example", "X-Forwarded-Host: localhost"),
    ],
)
@pytest.mark.parametrize("request_line", ["GET /admin/thing", "POST /admin/thing", "GET //admin/thing"])
async def test_a_name_that_a_stranger_may_own_is_refused(
    port: int, headers: tuple[str, ...], request_line: str
) -> None:
    status, body = await answer(port, request_line, *headers)
    assert status in {400, 403}
    assert "shown" not in body and "altered" not in body
    if len(headers) == 1 and headers[0].startswith("Host: attacker"):
        assert status == 403
        assert '"code":"forbidden"' in body


@pytest.mark.parametrize(
    "headers",
    [
        ("Origin: https://attacker.example",),
        ("Origin: null",),
        ("origin: http://127.0.0.1:9090",),  # by another name than it was called
        ("Origin: http://localhost:3000",),
        ("Origin: http://localhost",),
        ("Sec-Fetch-Site: cross-site",),
        ("Sec-Fetch-Site: same-site",),
        ("Sec-Fetch-Site: none",),
        ("Sec-Fetch-Site: same-origin", "Origin: https://attacker.example"),
        ("Sec-Fetch-Site: cross-site", "Origin: http://localhost:9090"),
    ],
)
async def test_nothing_is_changed_for_a_web_page(port: int, headers: tuple[str, ...]) -> None:
    for method in ("POST", "PUT", "DELETE"):
        status, body = await answer(port, f"{method} /admin/thing", "Host: localhost:9090", *headers)
        assert (status, "altered" in body) == (403, False)
        assert "behind a proxy too if that passes `Host` on" in body  # what an operator behind one has to do


@pytest.mark.parametrize(
    "headers",
    [
        ("Sec-Fetch-Site: same-origin", "Origin: http://localhost:9090"),
        ("Sec-Fetch-Site: same-origin",),
        ("Origin: http://LOCALHOST:9090",),  # a browser says no more of a page that came by plain HTTP
        ("Origin: https://localhost:9090",),  # behind something that speaks TLS
    ],
)
async def test_the_console_may_change_what_operators_may(port: int, headers: tuple[str, ...]) -> None:
    found = await answer(port, "POST /admin/thing", "Host: localhost:9090", *headers)
    assert found == (200, "altered")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (("Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: cors"), 403),
        (("Sec-Fetch-Site: same-site", "Sec-Fetch-Mode: no-cors"), 403),
        (("Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: navigate"), 200),  # a link in somebody's notes
        (("Sec-Fetch-Site: none", "Sec-Fetch-Mode: navigate"), 200),
        (("Sec-Fetch-Site: same-origin", "Sec-Fetch-Mode: cors"), 200),
        ((), 200),
    ],
)
async def test_no_other_page_reads_along(port: int, headers: tuple[str, ...], status: int) -> None:
    found = await answer(port, "GET /admin/thing", "Host: localhost:9090", *headers)
    assert found[0] == status


@pytest.mark.parametrize("path", ["/metrics", "/livez", "/readyz"])
async def test_machines_may_call_it_by_any_name(port: int, path: str) -> None:
    assert await answer(port, f"GET {path}", "Host: gateway-0.prod.example.com:9090") == (200, "shown")
