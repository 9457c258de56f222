"""Machines that are gone, told by the kernel's figures from those whose processes do not read."""

import asyncio
import socket
import struct
import sys
from typing import Any, cast

import anyio
import pytest
from support.kernel import vanish

from gateway import tcp

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="no other system is asked")


class _End:
    """As much of a transport as is looked at."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def get_extra_info(self, _: str) -> Any:
        return self._connection

    def __call__(self) -> bool:
        return tcp.is_gone(cast("asyncio.BaseTransport", self))

    async def is_asked_again(self, times: int) -> None:
        """Return once the kernel has asked that often whether the other end reads by now."""
        with anyio.fail_after(20):
            while self._connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 5)[4] < times:
                await anyio.lowlevel.checkpoint()


async def test_a_machine_is_gone_if_it_acknowledges_nothing_and_not_if_it_does_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tcp, "GONE_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as near:
        near.connect(server.getsockname())
        far, _ = server.accept()
        is_gone = _End(near)
        with far:
            assert not is_gone()
            near.setblocking(False)
            with pytest.raises(BlockingIOError):
                while True:
                    near.send(bytes(65536))
            await is_gone.is_asked_again(3)
            assert not is_gone()

            vanish(far)
            with anyio.fail_after(20):
                while not is_gone():
                    await anyio.lowlevel.checkpoint()
            monkeypatch.setattr(tcp, "GONE_S", 60.0)
            assert not is_gone()  # it was heard of a moment ago


def test_what_is_closed_is_not_gone() -> None:
    closed = socket.socket()
    closed.close()
    assert not _End(closed)()


def test_the_figures_lie_where_linux_has_them() -> None:
    told = struct.pack("=8B13I", 0, 0, 5, 7, 0, 0, 0, 0, *range(12), 31_000)
    assert tcp._INFO.unpack(told) == (5, 7, 31_000)
