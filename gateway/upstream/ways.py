"""The ways to backends: one per backend, with connections of its own, kept while anything runs on it.

A configuration may change while requests run. A way that is not configured any more is called no more, and
closed when what runs on it has ended.
"""

import ssl
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Generic, TypeVar

import anyio

from gateway.core.errors import UpstreamUnreachable
from gateway.core.values import Backend


class Way(ABC):
    """How one backend is called.

    Attributes:
        url: Its base URL.
        secret: The API key to present, or None.
        verify: How to verify its certificate.
        in_flight: Calls under way.
    """

    def __init__(self, url: str, secret: str | None, verify: ssl.SSLContext | bool) -> None:
        """Prepare; nothing is opened."""
        self.url, self.secret, self.verify = url, secret, verify
        self.in_flight = 0

    @abstractmethod
    async def aclose(self) -> None:
        """Close every connection."""


KEEPALIVE_S = 4.0
"""vLLM closes an idle connection after 5.0 s (measured); one given up earlier is never written into."""

AGE_S = 60.0
"""A connection older than this is used no more: where a name has got another address, requests go there."""

STALE_S = 1.0
"""A kept connection that ends within this of a request was being closed when that was written, as far as can
be told. Later, whoever read the request may have died of it."""

CLOSE_S = 1.0
"""How long closing may take: whoever waits for it has its answer."""

ENCODED = "The backend compresses its answers, although it is asked not to."
"""What is said of an answer with status 200 and a content-encoding."""

W = TypeVar("W", bound=Way)


class Ways(ABC, Generic[W]):
    """The ways to all backends: what every `ports.Upstream` keeps. Close it with `aclose`."""

    def __init__(
        self,
        backends: Iterable[Backend],
        *,
        secrets: Mapping[str, str],
        tls: Mapping[str, ssl.SSLContext | bool],
    ) -> None:
        """Prepare a way per backend.

        Args:
            backends: Those that may be called.
            secrets: Per backend id, the API key to present.
            tls: Per backend id, how to verify its certificate; True where absent.
        """
        self._ways: dict[str, W] = {}
        self._retired: list[W] = []
        self.update(backends, secrets=secrets, tls=tls)

    @abstractmethod
    def _way(self, url: str, secret: str | None, verify: ssl.SSLContext | bool) -> W:
        """Return a new way."""

    def update(
        self,
        backends: Iterable[Backend],
        *,
        secrets: Mapping[str, str],
        tls: Mapping[str, ssl.SSLContext | bool],
    ) -> None:
        """Call these from now on; arguments as at the start. What runs elsewhere is run to its end."""
        before, self._ways = self._ways, {}
        for backend in backends:
            kept = before.get(backend.id)
            wanted = (backend.url, secrets.get(backend.id), tls.get(backend.id, True))
            if kept is not None and (kept.url, kept.secret, kept.verify) == wanted:
                self._ways[backend.id] = before.pop(backend.id)
            else:
                self._ways[backend.id] = self._way(*wanted)
        self._retired += before.values()

    @property
    def retired(self) -> int:
        """How many ways are called no more, and not closed because something still runs on them."""
        return len(self._retired)

    async def close_retired(self) -> None:
        """Close what is called no more and has nothing under way; the rest is closed when it has ended."""
        idle = [way for way in self._retired if not way.in_flight]
        self._retired = [way for way in self._retired if way.in_flight]
        for way in idle:
            await way.aclose()

    async def aclose(self) -> None:
        """Close every connection."""
        for way in (*self._ways.values(), *self._retired):
            await way.aclose()

    def _take(self, backend: Backend) -> W:
        """Return the way to a backend, in use until `_give_back`.

        Raises:
            UpstreamUnreachable: it is not configured any more.
        """
        way = self._ways.get(backend.id)
        if way is None or way.url != backend.url:
            raise UpstreamUnreachable("The backend is no longer configured.")
        way.in_flight += 1
        return way

    async def _give_back(self, way: W) -> None:
        """Note that a call is over."""
        way.in_flight -= 1
        if way in self._retired:
            with anyio.move_on_after(CLOSE_S, shield=True):
                await self.close_retired()
