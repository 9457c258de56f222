"""The HTTP session that OTLP exporters send with."""

import os
from typing import Any
from urllib.parse import urlsplit

import requests
from requests.utils import select_proxy

_EXPORTER = "OTEL_PYTHON_EXPORTER_OTLP_HTTP_"


class _Session(requests.Session):
    """Prefers the certificates it was given (`OTEL_EXPORTER_OTLP_CERTIFICATE`) to `REQUESTS_CA_BUNDLE`."""

    def merge_environment_settings(self, url: Any, proxies: Any, stream: Any, verify: Any, cert: Any) -> Any:
        """See `requests.Session.merge_environment_settings`."""
        if verify is None and isinstance(self.verify, str):
            verify = self.verify
        return super().merge_environment_settings(url, proxies, stream, verify, cert)


def session() -> requests.Session | None:
    """Return a session that fails on redirects, with `requests.exceptions.HTTPError`.

    Without it, exporters count everything below 400 as accepted, although a redirect has stored nothing.

    It uses a proxy that the environment names. The reason of an error then names the proxy, whose own
    answer it may be.

    None if the environment names a credential provider: it brings the exporter's session, which a session
    given here would replace.
    """
    if any(
        value and name.startswith(_EXPORTER) and name.endswith("_CREDENTIAL_PROVIDER")
        for name, value in os.environ.items()
    ):
        return None
    made = _Session()
    made.hooks["response"] += [_name_proxy, _refuse_redirect]
    return made


def _name_proxy(
    response: requests.Response, *_: Any, proxies: dict[str, str] | None = None, **__: Any
) -> None:
    proxy = select_proxy(response.url, proxies)
    if proxy and response.status_code >= 400:
        where = urlsplit(proxy if "//" in proxy else f"//{proxy}").netloc.rpartition("@")[2]
        response.reason = f"{response.reason}, through the proxy {where}"


def _refuse_redirect(response: requests.Response, *_: Any, **__: Any) -> None:
    if 300 <= response.status_code < 400:
        response.close()  # nobody will read it, and its connection would stay open
        where = response.headers.get("location", "nowhere")
        raise requests.exceptions.HTTPError(
            f"{response.status_code}, a redirect to {where}", response=response
        )
