"""One HTTP request to a server, or to what starts it, by httpx. Chats and probes have `upstream.direct`."""

import ssl
from collections.abc import Mapping

import anyio
import httpx

from gateway import __version__
from gateway.upstream.faults import Failed, tls_fault
from gateway.upstream.transport import Transport

ANSWER_BYTES_MAX = 1_000_000
"""Maximum bytes read from an answer to an order. A choice that bounds memory."""


async def exchange(
    method: str,
    url: str,
    timeout_s: float,
    headers: Mapping[str, str],
    content: bytes | None,
    *,
    verify: ssl.SSLContext | bool,
) -> bytes:
    """Return the body of a successful response. Raises Failed."""
    own = {"user-agent": f"gemma-gateway/{__version__}", "accept-encoding": "identity", **headers}
    if content is not None:
        own["content-type"] = "application/json"
    body = bytearray()
    with anyio.move_on_after(timeout_s):
        try:
            async with (
                httpx.AsyncClient(
                    transport=Transport(verify=verify if url.lower().startswith("https:") else False),
                    timeout=None,  # the exchange as a whole has a timeout
                    follow_redirects=False,
                    trust_env=False,
                ) as client,
                client.stream(method, url, headers=own, content=content) as response,
            ):
                if not 200 <= response.status_code < 300:
                    raise Failed(f"HTTP {response.status_code}", response.status_code)
                async for part in response.aiter_raw():
                    body += part
                    if len(body) > ANSWER_BYTES_MAX:
                        raise Failed(f"more than {ANSWER_BYTES_MAX} bytes")
                return bytes(body)
        except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:  # its text may quote a header
            raise Failed(f"no answer ({tls_fault(error) or type(error).__name__})") from error
    raise Failed(f"no answer in {timeout_s:g} s")
