"""What is set on the connections to callers and backends.

A machine that loses its power, or its network, closes nothing: whoever only waits to hear from it waits for
ever. So the kernel asks the other kernel after 15 s of silence, and gives a connection up that has not
answered in another 15. A machine that is back by then says that it knows of no such connection, which ends it
at once. A process that is busy answers by its kernel: this takes nobody for dead that is slow.

The kernel only asks where nothing is under way. What it was given to send it sends again and again, for a
quarter of an hour, and meanwhile asks nothing. Its own limit for that, TCP_USER_TIMEOUT, also ends
connections whose other side is there and does not read for a while. So `is_gone` is asked every `LOOK_S`.
"""

import asyncio
import socket
import struct
import sys

SILENT_S = 15
ASK_EVERY_S = 5
ASKED_MAX = 3

KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *(
        (socket.IPPROTO_TCP, getattr(socket, name), value)
        for name, value in (
            ("TCP_KEEPIDLE", SILENT_S),
            ("TCP_KEEPINTVL", ASK_EVERY_S),
            ("TCP_KEEPCNT", ASKED_MAX),
        )
        if hasattr(socket, name)  # not every system has them all
    ),
)
"""Options of a socket, as `setsockopt` takes them. What is accepted by a socket has those of that."""

GONE_S = SILENT_S + ASK_EVERY_S * ASKED_MAX
"""A machine that has acknowledged nothing for this long, although it was sent something, is gone."""

LOOK_S = 5.0
"""How often whoever has connections looks at them."""

_INFO = struct.Struct("=2x2B52xI")  # of Linux's tcp_info: retransmits, probes, last_ack_recv in ms


def is_gone(transport: asyncio.BaseTransport) -> bool:
    """Return whether the machine at the other end has acknowledged nothing of late that was sent to it.

    One that acknowledges, and takes nothing because nobody reads there, is not gone. False where the system
    does not tell.
    """
    if sys.platform != "linux":
        return False
    try:
        connection = transport.get_extra_info("socket")
        info: bytes = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
        retransmits, probes, silent_ms = _INFO.unpack(info)
    except (OSError, RuntimeError, AttributeError, struct.error):  # closed by now
        return False
    # The first time that it is sent again, or asked whether it reads by now, it may be answering already.
    is_unheard: bool = max(retransmits, probes) > 1 and silent_ms >= GONE_S * 1000
    return is_unheard
