"""TCP addresses, options for connections to callers and backends, and the detection of dead peers.

A machine that loses power or its network closes nothing: a peer that only waits for it waits forever. So the
kernel sends keep-alive probes after 15 s of silence, and drops a connection that does not answer them for
another 15 s. A machine that has rebooted by then rejects the connection, which ends it at once. Probes are
answered by the peer's kernel, so a slow process is not taken for a dead machine.

The kernel sends no probes while data is unacknowledged. It retransmits that data for a quarter of an hour.
The limit for that, TCP_USER_TIMEOUT, would also end connections whose peer is alive but does not read for a
while. So `is_gone` is checked every `LOOK_S`.
"""

import asyncio
import select
import socket
import struct
import sys
from collections.abc import Callable, Sequence

PORT_MAX = 65_535

SILENT_S = 15
ASK_EVERY_S = 5
ASKED_MAX = 3
"""Silence before the first keep-alive probe, interval and number of probes. A choice: a dead machine is
noticed within 30 s (30.6 s measured, docs/health.md#machines-that-disappear), and an idle connection costs a
packet every 15 s."""

KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *(
        (socket.IPPROTO_TCP, getattr(socket, name), value)
        for name, value in (
            ("TCP_KEEPIDLE", SILENT_S),
            ("TCP_KEEPINTVL", ASK_EVERY_S),
            ("TCP_KEEPCNT", ASKED_MAX),
        )
        if hasattr(socket, name)  # not every system has all of them
    ),
)
"""Arguments for `setsockopt`. Accepted connections inherit them from the listening socket."""

GONE_S = SILENT_S + ASK_EVERY_S * ASKED_MAX
"""A machine that has not acknowledged any data for this long, although some was sent, is dead: as long as
keep-alive takes."""

LOOK_S = 5.0
"""Interval between checks of all connections. A choice: short compared with `GONE_S`."""

_INFO = struct.Struct("=2x2B52xI")  # of Linux's tcp_info: retransmits, probes, last_ack_recv in ms


def address(host: str, port: int) -> str:
    """Format an address as in a URL: `host:port`, `[v6]:port`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_gone(transport: asyncio.BaseTransport) -> bool:
    """Return whether the peer's machine has recently not acknowledged any data that was sent to it.

    A machine that acknowledges, but whose process does not read, is not gone. Returns False if the system
    does not provide this information.
    """
    if sys.platform != "linux":
        return False
    try:
        connection = transport.get_extra_info("socket")
        info: bytes = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
        retransmits, probes, silent_ms = _INFO.unpack(info)
    except (OSError, RuntimeError, AttributeError, ValueError, struct.error):
        return False  # already closed; ValueError is uvloop's
    # After the first retransmission or window probe, its answer may be on the way.
    is_unheard: bool = max(retransmits, probes) > 1 and silent_ms >= GONE_S * 1000
    return is_unheard


def input_of(transport: asyncio.BaseTransport) -> Callable[[int], Sequence[object]]:
    """Return a function that says whether data, or the end of an open connection, is there to be read.

    It takes the time to wait, in milliseconds, and returns something that is empty if there is nothing.
    """
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN)
    return poll.poll
