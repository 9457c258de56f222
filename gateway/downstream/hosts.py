"""Validates the Host header: exactly one, in valid syntax (RFC 9112, 3.2).

A proxy in front of the gateway may route by it. Values that it may interpret differently are rejected.
"""

import re
from typing import Any

from gateway.core.errors import InvalidRequest
from gateway.downstream.serving import send_refusal

_HOST = re.compile(rb"(\[[\w.:~%-]+\]|[\w.~!$&'()*+,;=%-]*)(:[0-9]*)?")
"""A name or an address, and a port (RFC 3986, 3.2.2); each may be missing."""


def is_host(value: bytes) -> bool:
    """Return whether this is a valid value of `Host`."""
    return _HOST.fullmatch(value) is not None


def has_one_host(scope: Any) -> bool:
    """Return whether an ASGI request has exactly one valid host. Before HTTP/1.1, it may have none."""
    hosts = [value for name, value in scope["headers"] if name == b"host"]
    if not hosts:
        return bool(scope["http_version"] != "1.1")
    return len(hosts) == 1 and is_host(hosts[0])


async def refuse_host(_: object, __: object, send: Any) -> None:
    """An ASGI application that rejects a request without exactly one valid host."""
    await send_refusal(InvalidRequest("A request needs one `Host` header, with a host in it."), send)
