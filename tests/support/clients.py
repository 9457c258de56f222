"""HTTP clients for tests. Each would read the certificates of all authorities, which takes 60 ms of CPU."""

import ssl
from typing import Any

import httpx
import openai

PATIENCE_S = 60.0
"""For an answer, unless a test says otherwise. A choice: httpx waits 5 s, a busy machine may take more."""

_TRUSTS_NOBODY = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def http(**options: Any) -> httpx.AsyncClient:
    """Return a client for URLs of http, whatever proxies the environment names."""
    return httpx.AsyncClient(
        **{"verify": _TRUSTS_NOBODY, "trust_env": False, "timeout": PATIENCE_S, **options}
    )


def sdk(limits: Any = openai.DEFAULT_CONNECTION_LIMITS, **options: Any) -> openai.AsyncOpenAI:
    """Return an unmodified SDK client for URLs of http."""
    carrier = openai.DefaultAsyncHttpxClient(verify=_TRUSTS_NOBODY, limits=limits)
    return openai.AsyncOpenAI(http_client=carrier, **options)
