"""Encodes every error in the shape that OpenAI clients expect: `{"error": {message, type, param, code}}`."""

import msgspec

from gateway.core.errors import (
    Draining,
    GatewayError,
    InvalidRequest,
    OutOfResources,
    RequestTimeout,
    Unauthorized,
    is_out_of_resources,
)
from gateway.ports import Headers


class InternalError(GatewayError):
    """A fault of the gateway itself. Details are logged, and not sent to the caller."""

    code = "internal_error"


class MethodNotAllowed(InvalidRequest):
    """The path exists, but not with this method.

    Attributes:
        allowed: The supported methods, for the `Allow` header.
    """

    status = 405
    code = "method_not_allowed"

    def __init__(self, message: str, allowed: str) -> None:
        """Reject a method, where only those in `allowed` are supported."""
        super().__init__(message)
        self.allowed = allowed


def fault(error: BaseException, message: str = "The gateway failed.") -> GatewayError:
    """Return what a caller is told of an unexpected error: a lack of resources passes, all else is a bug."""
    if is_out_of_resources(error):
        return OutOfResources("This gateway has run out of memory or threads. Please retry.", retry_after_s=5)
    return InternalError(message)


def envelope(error: GatewayError, code: str | None = None) -> bytes:
    """Return the body of an error response. `code` overrides the error's own, and is always a string."""
    fields = {"message": error.message, "type": error.type, "param": error.param, "code": code or error.code}
    return msgspec.json.encode({"error": fields})


def headers_of(error: GatewayError, body: bytes) -> Headers:
    """Return the headers of an error response, including those that control a client's retries."""
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
