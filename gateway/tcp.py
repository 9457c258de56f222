"""What is set on the connections to callers and backends.

A machine that loses its power, or its network, closes nothing: whoever only waits to hear from it waits for
ever. So the kernel asks the other kernel after 15 s of silence, and gives a connection up that has not
answered in another 15. A machine that is back by then says that it knows of no such connection, which ends it
at once. A process that is busy answers by its kernel: this takes nobody for dead that is slow.
"""

import socket

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
