"""Keeps web pages away from the admin port, which has no keys, and which an operator's browser can reach.

A page can send requests to any address, under its own name (DNS rebinding) or across sites. So what shows
or changes the gateway is answered only under names that no stranger can own, and nothing is changed for any
page but the console, which comes from this very port.
"""

import ipaddress
import re
from collections.abc import Collection, Iterable, Mapping

from litestar.enums import ScopeType
from litestar.types import ASGIApp, Receive, Scope, Send

from gateway.core.errors import Forbidden
from gateway.downstream.relay import AsgiDownstream, send_error

_OPEN = frozenset({"/metrics", "/livez", "/healthz", "/readyz"})  # for machines, under any name
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::[0-9]*)?")
_ELSEWHERE = frozenset({b"cross-site", b"same-site"})


class OperatorGuard:
    """The admin application, for those who may have it."""

    def __init__(self, app: ASGIApp, names: Collection[str]) -> None:
        """Let requests through to `app`; `names` are those it is called by, beside what is always trusted."""
        self._app = app
        self._names = frozenset(name.lower() for name in names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        message = self._refusal(scope) if scope["type"] == ScopeType.HTTP else None
        if message is None:
            await self._app(scope, receive, send)
        else:
            await send_error(Forbidden(message), AsgiDownstream(send))

    def _refusal(self, scope: Scope) -> str | None:
        headers = list(scope["headers"])
        hosts = [value.decode("latin-1") for name, value in headers if name == b"host"]
        if scope["path"] not in _OPEN and not (len(hosts) == 1 and self._is_trusted(hosts[0])):
            return (
                "The admin port does not accept this host name: use its address, localhost, a name without a "
                "dot, or one of `admin_names` in the configuration."
            )
        if scope.get("method") not in _SAFE:
            own = _is_own(headers, hosts[0] if hosts else "")
            return None if own else "Web pages other than the console cannot change anything here."
        if _is_from_elsewhere(dict(headers)):
            return "Web pages other than the console cannot read anything here."
        return None

    def _is_trusted(self, host: str) -> bool:
        """Return whether no stranger can have this name lead wherever they like."""
        match = _HOST.fullmatch(host.lower())
        if match is None:
            return False
        name = match[1]
        return "." not in name or name in self._names or name.endswith(".localhost") or _is_address(name)


def _is_own(headers: Iterable[tuple[bytes, bytes]], host: str) -> bool:
    """Return whether no page asks, or the console does: what a browser says of that, no page can choose."""
    for name, value in headers:
        if name == b"sec-fetch-site" and value != b"same-origin":
            return False
        if name == b"origin" and value.decode("latin-1").lower() not in (
            f"http://{host.lower()}",
            f"https://{host.lower()}",
        ):
            return False
    return True


def _is_from_elsewhere(headers: Mapping[bytes, bytes]) -> bool:
    """Return whether a page of another origin reads; following a link is no reading."""
    return headers.get(b"sec-fetch-site") in _ELSEWHERE and headers.get(b"sec-fetch-mode") != b"navigate"


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True
