"""What httpx does not make errors of its own, in the event loop that gateways run in."""

import socket
import ssl
import struct
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import anyio
import httpx
import pytest
from support.certificates import self_signed

from gateway.upstream.faults import causes
from gateway.upstream.transport import Transport

RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing resets
TRIES, AT_ONCE = 10, 50


pytestmark = pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": True})], ids=["uvloop"])


async def test_a_server_that_resets_every_connection_is_one_that_cannot_be_reached() -> None:
    found: Counter[type[Exception]] = Counter()

    def reset_all(listener: socket.socket) -> None:
        for _ in range(TRIES * AT_ONCE):
            connection, _ = listener.accept()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            connection.close()

    with socket.create_server(("127.0.0.1", 0), backlog=AT_ONCE) as listener:
        thread = threading.Thread(target=reset_all, args=(listener,), daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        async with httpx.AsyncClient(transport=Transport(verify=False)) as client:

            async def ask() -> None:
                try:
                    await client.get(url)
                except Exception as error:  # noqa: BLE001 - which it is, is the question
                    found[type(error)] += 1

            for _ in range(TRIES):
                async with anyio.create_task_group() as tasks:
                    for _ in range(AT_ONCE):
                        tasks.start_soon(ask)
    assert found.total() == TRIES * AT_ONCE
    assert all(issubclass(kind, httpx.TransportError) for kind in found), found


# ------------------------------------------------------------------ TLS that fails after the handshake


def wants_a_certificate(connection: ssl.SSLSocket) -> None:
    with suppress(ssl.SSLError):  # TLS 1.3: for the client the handshake is over by then
        connection.do_handshake()


def answers_without_tls(connection: ssl.SSLSocket) -> None:
    connection.do_handshake()
    connection.recv(4096)
    socket.socket.send(connection, b"HTTP/1.1 200 OK\r\n\r\n")


def breaks_in_the_body(connection: ssl.SSLSocket) -> None:
    connection.do_handshake()
    connection.recv(4096)
    connection.send(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nbegun")
    socket.socket.send(connection, b"these are no five bytes of a record")


@pytest.mark.parametrize("breaks", [wants_a_certificate, answers_without_tls, breaks_in_the_body])
async def test_tls_that_fails_later_is_an_error_like_any_other(
    tmp_path: Path, breaks: Callable[[ssl.SSLSocket], None]
) -> None:
    cert, key = self_signed(tmp_path, "localhost")
    serving = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    serving.load_cert_chain(cert, key)
    if breaks is wants_a_certificate:
        serving.verify_mode = ssl.CERT_REQUIRED

    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with serving.wrap_socket(connection, server_side=True, do_handshake_on_connect=False) as tls:
            breaks(tls)
            with suppress(OSError):
                while socket.socket.recv(tls, 4096):  # closed with bytes unread, it would be reset
                    pass

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,), daemon=True)
        thread.start()
        url = f"https://localhost:{listener.getsockname()[1]}/"
        transport = Transport(verify=ssl.create_default_context(cafile=cert))
        async with httpx.AsyncClient(transport=transport) as client:
            with pytest.raises(httpx.ReadError) as caught:
                await client.get(url)
        thread.join()
    assert any(isinstance(cause, ssl.SSLError) for cause in causes(caught.value))
