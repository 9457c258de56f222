"""The name under which a process holds slots, boxes and jobs: in the store, in the log and for operators."""

import re
import secrets
import socket


def process_name() -> str:
    """Return a unique name for this process."""
    host = re.sub(r"[^\w.-]", "-", socket.gethostname())[:24]
    return f"{host}-{secrets.token_hex(4)}"
