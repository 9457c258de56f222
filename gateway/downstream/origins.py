"""CORS: the origins whose web pages may call, and the headers that tell browsers about it.

A browser asks before it sends an API key on behalf of a page (a preflight request), and withholds from the
page every response that does not allow its origin. Other clients ignore all of this.
"""

import re
from collections.abc import Collection, Mapping

from gateway.ports import Headers

ANY = "*"
EXPOSED = (
    "x-request-id",
    "x-gateway-class",
    "x-gateway-pool",
    "x-gateway-backend",
    "x-gateway-prompt-tokens",
    "x-gateway-queue-ms",
    "x-gateway-dropped",
    "x-gateway-job",
    "x-gateway-replayed",
    "x-gateway-original-request-id",
    "retry-after",
    "x-should-retry",
    "location",
    "preference-applied",
)
"""Response headers that pages may read, in addition to those that CORS always exposes."""

METHODS = b"GET, HEAD, POST, DELETE"
MAX_AGE_S = 7_200
"""How long a browser may cache a preflight response. Chromium's maximum."""

_EXPOSE = (b"access-control-expose-headers", ", ".join(EXPOSED).encode())
_VARY = (b"vary", b"Origin")
_NAMES = re.compile(rb"[\w!#$%&'*+.^`|~-]+( *, *[\w!#$%&'*+.^`|~-]+)*")


class Origins:
    """The allowed origins. Cookies are never allowed: the gateway has none.

    Attributes:
        allowed: These origins, as browsers send them; `ANY` stands for all. Empty: no CORS headers are sent.
    """

    def __init__(self, allowed: Collection[str] = ()) -> None:
        """Allow these origins."""
        self.allowed: frozenset[str] = frozenset()
        self._fields: Mapping[str, Headers] = {}
        self._otherwise: Headers = ()
        self.replace(allowed)

    def replace(self, allowed: Collection[str]) -> None:
        """Replace the allowed origins."""
        self.allowed = frozenset(allowed)
        if ANY in self.allowed:  # then responses do not depend on the origin
            self._fields, self._otherwise = {}, (_allow(ANY), _EXPOSE)
        elif self.allowed:
            self._fields = {origin: (_allow(origin), _EXPOSE, _VARY) for origin in self.allowed}
            self._otherwise = (_VARY,)
        else:
            self._fields, self._otherwise = {}, ()

    def fields(self, origin: str) -> Headers:
        """Return the CORS headers for a response to a request with that `Origin`; "": it has none."""
        return self._fields.get(origin, self._otherwise)

    def preflight(self, origin: str, names: bytes) -> Headers | None:
        """Return the headers of a preflight response for `origin`; None: it is not allowed.

        `names` are the request headers that the page wants to send. All are allowed, because classes can
        depend on any.
        """
        if not origin or not self.allowed & {origin, ANY}:
            return None
        headers = [
            *(field for field in self.fields(origin) if field != _EXPOSE),
            (b"access-control-allow-methods", METHODS),
            (b"access-control-max-age", b"%d" % MAX_AGE_S),
        ]
        if _NAMES.fullmatch(names):
            headers.append((b"access-control-allow-headers", names))
        return headers


def _allow(origin: str) -> tuple[bytes, bytes]:
    return b"access-control-allow-origin", origin.encode("latin-1")
