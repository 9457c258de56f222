"""Connections that are reset as they are made, in the event loop that gateways run in."""

import socket
import struct
import threading
from collections import Counter

import anyio
import httpx
import pytest

from gateway.upstream.transport import Transport

RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing resets
TRIES, AT_ONCE = 10, 50


@pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": True})], ids=["uvloop"])
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
        async with httpx.AsyncClient(transport=Transport(trust_env=False)) as client:

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
