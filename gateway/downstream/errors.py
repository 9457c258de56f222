"""Every failure in the one shape that OpenAI clients read: `{"error": {message, type, param, code}}`."""

import msgspec

from gateway.core.errors import (
    Draining,
    GatewayError,
    InvalidRequest,
    OutOfResources,
    RequestTimeout,
    Unauthorized,
)
from gateway.ports import Headers


class MethodNotAllowed(InvalidRequest):
    """The path exists, the method on it does not.

    Attributes:
        allowed: The methods that do, as the header `Allow` lists them.
    """

    status = 405
    code = "method_not_allowed"

    def __init__(self, message: str, allowed: str) -> None:
        """Refuse a method where there are only those `allowed`."""
        super().__init__(message)
        self.allowed = allowed


def envelope(error: GatewayError, code: str | None = None) -> bytes:
    """Return the body of an error answer; `code` in place of the error's own. It is always a string."""
    fields = {"message": error.message, "type": error.type, "param": error.param, "code": code or error.code}
    return msgspec.json.encode({"error": fields})


def headers_of(error: GatewayError, body: bytes) -> Headers:
    """Return the headers of an error answer, with those that steer a client's retries."""
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        *error.headers,
    ]
    if error.retry_after_s is not None:
        headers.append((b"retry-after", str(error.retry_after_s).encode()))
    if isinstance(error, Unauthorized):
        headers.append((b"www-authenticate", b"Bearer"))
    if isinstance(error, MethodNotAllowed):
        headers.append((b"allow", error.allowed.encode()))
    if isinstance(error, Draining | OutOfResources | RequestTimeout):
        headers.append((b"connection", b"close"))
    return headers
