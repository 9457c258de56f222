"""One delivery attempt of a webhook: resolve the host, check its addresses, POST to one of them.

A name is resolved once per attempt, and the connection goes to an address that was checked, so a name server
cannot answer differently in between (DNS rebinding). The Host header and TLS use the name, so certificates
are verified as usual. Proxy settings are ignored, cookies are not kept, and redirects are not followed. Of
the response body, only the beginning is read (`BODY_BYTES_MAX`), so that the endpoint can finish a short one.
"""

import socket
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from functools import partial
from typing import cast

import anyio
import httpx

from gateway import __version__
from gateway.core.retry_after import retry_after_s
from gateway.core.webhooks import (
    Delivery,
    WebhookAttempt,
    WebhookEndpoint,
    WebhookOutcome,
    address_refusal,
    failed,
    judge,
    signed_headers,
)
from gateway.ports import Clock
from gateway.upstream.exchanges import Exchanges
from gateway.upstream.faults import is_refused, tls_fault
from gateway.upstream.transport import Transport

ATTEMPT_S = 20.0
"""Time limit for an attempt, including name resolution and connecting. Standard Webhooks: 15 to 30 s."""

CONNECT_S = 5.0
"""Time limit for connecting to one address before the next one is tried. A choice: a part of `ATTEMPT_S`."""

ADDRESSES_MAX = 4
"""Maximum number of addresses tried per host. A choice: `CONNECT_S` for each makes `ATTEMPT_S`."""

BODY_BYTES_MAX = 4096
"""Maximum bytes read of a response body. A choice: reading it spares its sender a broken connection."""

BODY_S = 1.0
"""How long that may take. A choice: the status is known."""

HURRY_S = 1.0
"""How long attempts in progress may continue when delivery ends. A choice: others repeat them."""

Resolve = Callable[[str], Awaitable[Sequence[str]]]
"""Returns the IP addresses of a host in order of preference. Raises OSError."""


async def resolve(host: str) -> Sequence[str]:
    """Return the IP addresses of a host according to the system's resolver."""
    found = await anyio.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return [str(address[4][0]) for address in found]


class WebhookCaller:
    """Makes attempts. Close it with `aclose`."""

    def __init__(
        self,
        clock: Clock,
        *,
        resolve: Resolve = resolve,
        tls: ssl.SSLContext | bool = True,
        attempt_s: float = ATTEMPT_S,
    ) -> None:
        """Prepare to call endpoints.

        Args:
            clock: Source of times.
            resolve: Resolves host names.
            tls: How to verify certificates; True: by the system's.
            attempt_s: Time limit for an attempt.
        """
        self._clock = clock
        self._resolve = resolve
        self._attempt_s = attempt_s
        # A transport rather than a client: no cookies, no redirects.
        self._transport = Transport(
            verify=tls, limits=httpx.Limits(max_connections=None, max_keepalive_connections=0)
        )
        self._exchanges = Exchanges()

    async def attempt(self, endpoint: WebhookEndpoint, delivery: Delivery) -> WebhookAttempt:
        """Make an attempt and return its result. Never raises because of the endpoint."""
        found = await self._exchanges.run(partial(self._exchange, endpoint, delivery), self._attempt_s)
        return found or failed(delivery, f"no answer in {self._attempt_s:g} s")

    def hurry(self) -> None:
        """Limit attempts in progress to `HURRY_S` more seconds, because delivery ends."""
        self._exchanges.hurry(HURRY_S)

    async def aclose(self) -> None:
        """Close all connections."""
        await self._transport.aclose()

    async def _exchange(self, endpoint: WebhookEndpoint, delivery: Delivery) -> WebhookAttempt:
        try:
            url = httpx.URL(endpoint.url)
        except httpx.InvalidURL:
            return failed(delivery, "its URL is invalid")
        try:
            addresses = await self._resolve(url.raw_host.decode())
        except OSError:
            addresses = ()
        if not addresses:
            return failed(delivery, "its host name does not resolve")
        for address in addresses:  # check all of them: the result must not depend on which one is used
            if why := address_refusal(address, allow_private=endpoint.allow_private):
                detail = f"its host resolves to {address} ({why}), where webhooks are never sent"
                return failed(delivery, detail, outcome=WebhookOutcome.REFUSED)
        detail = ""
        for address in addresses[:ADDRESSES_MAX]:
            try:
                return await self._post(self._request(endpoint, delivery, url, address), delivery)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                detail = _words(error)  # nothing was sent
            except httpx.HTTPError as error:
                return failed(delivery, _words(error))
        return failed(delivery, detail)

    def _request(
        self, endpoint: WebhookEndpoint, delivery: Delivery, url: httpx.URL, address: str
    ) -> httpx.Request:
        headers = {
            "host": url.netloc.decode(),
            "user-agent": f"gemma-gateway/{__version__}",
            "content-type": "application/json",
            "accept": "*/*",
            **signed_headers(delivery, endpoint.secrets, int(self._clock.wall())),
        }
        return httpx.Request(
            "POST",
            url.copy_with(host=address),
            headers=headers,
            content=delivery.body,
            extensions={
                "sni_hostname": url.raw_host.decode(),
                "timeout": httpx.Timeout(None, connect=CONNECT_S).as_dict(),
            },
        )

    async def _post(self, request: httpx.Request, delivery: Delivery) -> WebhookAttempt:
        response = await self._transport.handle_async_request(request)
        try:
            with anyio.move_on_after(BODY_S), suppress(httpx.HTTPError):
                await _read_some(response)
        finally:
            await response.aclose()
        asked_s = retry_after_s(response.headers.get("retry-after"), self._clock.wall())
        return judge(delivery, response.status_code, asked_s)


async def _read_some(response: httpx.Response) -> None:
    size = 0
    async with aclosing(cast("AsyncGenerator[bytes, None]", response.aiter_raw())) as parts:
        async for part in parts:
            size += len(part)
            if size > BODY_BYTES_MAX:
                break


def _words(error: httpx.HTTPError) -> str:
    """Describe an error. Its own text is not used, because it may quote secrets."""
    if is_refused(error):
        return "connection refused"
    if fault := tls_fault(error):
        return fault
    if isinstance(error, httpx.RemoteProtocolError):
        return "an answer that is not HTTP, or was cut"
    if isinstance(error, httpx.ConnectTimeout):
        return f"no connection in {CONNECT_S:g} s"
    if isinstance(error, httpx.ConnectError):
        return "cannot connect"
    return f"the connection broke ({type(error).__name__})"
