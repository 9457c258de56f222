"""Protects the admin port, which has no keys, from web pages in an operator's browser.

A page can send requests to any address, under its own name (DNS rebinding) or cross-site. So requests are
served only under host names that an attacker cannot control, and no page may change anything, except for the
console, which is served by this port itself.
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
_NOT_OWN = (
    "Web pages other than the console cannot change anything here. The console itself can, behind a proxy "
    "too if that passes `Host` on unchanged."
)


class OperatorGuard:
    """ASGI middleware that rejects requests from foreign web pages."""

    def __init__(self, app: ASGIApp, names: Collection[str]) -> None:
        """Wrap `app`; `names` are trusted host names, in addition to those that are always trusted."""
        self._app = app
        self._names = frozenset(name.lower() for name in names)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request, or reject it."""
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
            return None if own else _NOT_OWN
        if _is_from_elsewhere(dict(headers)):
            return "Web pages other than the console cannot read anything here."
        return None

    def _is_trusted(self, host: str) -> bool:
        """Return whether an attacker cannot make this host name resolve to other addresses."""
        match = _HOST.fullmatch(host.lower())
        if match is None:
            return False
        name = match[1]
        return "." not in name or name in self._names or name.endswith(".localhost") or _is_address(name)


def _is_own(headers: Iterable[tuple[bytes, bytes]], host: str) -> bool:
    """Return whether the request comes from no page, or from the console, by headers that no page can set."""
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
    """Return whether a page of another origin is reading; following a link does not count."""
    return headers.get(b"sec-fetch-site") in _ELSEWHERE and headers.get(b"sec-fetch-mode") != b"navigate"


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True
