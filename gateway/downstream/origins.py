"""Which web pages may call (CORS): by their origins, and in the headers by which browsers learn of it.

A browser asks before it sends an API key for a page (a preflight), and keeps from the page every answer that
does not name its origin. Callers that are no browsers look at none of this.
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
"""Headers of answers that pages may read, besides the few that browsers show them anyway."""

METHODS = b"GET, HEAD, POST, DELETE"
MAX_AGE_S = 7_200
"""For how long a browser need not ask again. Chromium does not remember longer."""

_EXPOSE = (b"access-control-expose-headers", ", ".join(EXPOSED).encode())
_VARY = (b"vary", b"Origin")
_NAMES = re.compile(rb"[\w!#$%&'*+.^`|~-]+( *, *[\w!#$%&'*+.^`|~-]+)*")


class Origins:
    """The origins whose pages may call. Cookies are never allowed: the gateway has none.

    Attributes:
        allowed: These origins, as browsers write them; `ANY` stands for all. Empty: answers say nothing.
    """

    def __init__(self, allowed: Collection[str] = ()) -> None:
        """Let the pages of these call."""
        self.allowed: frozenset[str] = frozenset()
        self._fields: Mapping[str, Headers] = {}
        self._otherwise: Headers = ()
        self.replace(allowed)

    def replace(self, allowed: Collection[str]) -> None:
        """Let the pages of these call from now on, and no others."""
        self.allowed = frozenset(allowed)
        if ANY in self.allowed:  # every answer is the same then, whoever asks
            self._fields, self._otherwise = {}, (_allow(ANY), _EXPOSE)
        elif self.allowed:
            self._fields = {origin: (_allow(origin), _EXPOSE, _VARY) for origin in self.allowed}
            self._otherwise = (_VARY,)
        else:
            self._fields, self._otherwise = {}, ()

    def fields(self, origin: str) -> Headers:
        """Return what an answer to a request with that `Origin` says besides; "": it has none."""
        return self._fields.get(origin, self._otherwise)

    def preflight(self, origin: str, names: bytes) -> Headers | None:
        """Return the headers that agree to what a page of `origin` wants to send; None: it may not.

        `names` are those of its request's headers. All may come: classes can depend on any.
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
