"""Connections whose server dies, in the event loop that gateways run in."""

from pathlib import Path

import anyio.lowlevel
import pytest
from support.redis_server import own_server

from gateway.store.connections import Connections, StoreAway


@pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": True})], ids=["uvloop"])
async def test_what_is_sent_on_a_connection_that_has_just_been_reset_finds_the_store_away(
    tmp_path: Path,
) -> None:
    with own_server("valkey-9", tmp_path) as server:
        connections = Connections(server.url, name="test", command_s=10.0, connections_max=1)
        channel = connections.channel()
        await connections.bounded(lambda: channel.subscribe("one"))
        server.stall()
        await connections.bounded(lambda: channel.subscribe("two"))
        server.kill()  # with something unread: the connection is reset
        for _ in range(10):  # the loop hears of it; nobody who reads has
            await anyio.lowlevel.checkpoint()

        with pytest.raises(StoreAway):
            await connections.bounded(lambda: channel.subscribe("three"))
        await connections.close(channel)
        await connections.aclose()
