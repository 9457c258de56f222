"""Which host a request is for: it says so once, and in a way that can be one (RFC 9112, 3.2).

Whatever stands before the gateway may choose by it whom a request concerns. What it may read in another way
is not served.
"""

import re
from typing import Any

from gateway.core.errors import InvalidRequest
from gateway.downstream.relay import AsgiDownstream, send_error
from gateway.downstream.serving import new_request_id

_HOST = re.compile(rb"(\[[\w.:~%-]+\]|[\w.~!$&'()*+,;=%-]*)(:[0-9]*)?")
"""A name or an address, and a port (RFC 3986, 3.2.2): any of them can be missing."""


def is_host(value: bytes) -> bool:
    """Return whether a header `Host` can say that."""
    return _HOST.fullmatch(value) is not None


def has_one_host(scope: Any) -> bool:
    """Return whether the request of an ASGI scope names one host. Only HTTP/1.1 demands it."""
    hosts = [value for name, value in scope["headers"] if name == b"host"]
    if not hosts:
        return bool(scope["http_version"] != "1.1")
    return len(hosts) == 1 and is_host(hosts[0])


async def refuse_host(_: object, __: object, send: Any) -> None:
    """Answer a request of no host, of several, or of one that cannot be: an ASGI application."""
    error = InvalidRequest("A request needs one `Host` header, with a host in it.")
    error.headers = ((b"x-request-id", new_request_id().encode()),)
    await send_error(error, AsgiDownstream(send))
