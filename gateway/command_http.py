"""HTTP requests of commands: to the admin port of a gateway, and health checks."""

import ssl
from typing import Any

import httpx

ADMIN_S = 15.0
"""How long the admin port may take to answer. A choice: longer than a store that is away needs to be
noticed."""


def request(method: str, url: str, *, timeout_s: float, **options: Any) -> httpx.Response:
    """Send a request, ignoring proxy settings; certificates are verified against the system's store.

    `options` are those of `httpx.request`.

    Raises:
        httpx.HTTPError, httpx.InvalidURL: there is no response.
    """
    # httpx would use its own list of authorities. Loading the system's takes 20 ms: only for https.
    verify = ssl.create_default_context() if url.lower().startswith("https:") else True
    try:
        return httpx.request(method, url, timeout=timeout_s, verify=verify, trust_env=False, **options)
    except UnicodeError as error:  # the resolver's, for a label that is empty or too long
        raise httpx.InvalidURL(f"the host is not a valid name ({error})") from error
