"""The HTTP session that OTLP exporters send with."""

import os
from typing import Any

import requests

_EXPORTER = "OTEL_PYTHON_EXPORTER_OTLP_HTTP_"


def session() -> requests.Session | None:
    """Return a session that fails on redirects, with `requests.exceptions.HTTPError`.

    Without it, exporters count everything below 400 as accepted, although a redirect has stored nothing.

    None if the environment names a credential provider: it brings the exporter's session, which a session
    given here would replace.
    """
    if any(name.startswith(_EXPORTER) and name.endswith("_CREDENTIAL_PROVIDER") for name in os.environ):
        return None
    made = requests.Session()
    made.hooks["response"].append(_refuse_redirect)
    return made


def _refuse_redirect(response: requests.Response, *_: Any, **__: Any) -> None:
    if 300 <= response.status_code < 400:
        response.close()  # nobody will read it, and its connection would stay open
        where = response.headers.get("location", "nowhere")
        raise requests.exceptions.HTTPError(
            f"{response.status_code}, a redirect to {where}", response=response
        )
