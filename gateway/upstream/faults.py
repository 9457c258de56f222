"""What an exchange with a server has failed for."""

import ssl
from collections.abc import Iterator

NO_SUCH_PATH = frozenset({404, 405, 501})
"""Statuses with which a server says that it does not have a path."""


def tls_fault(error: BaseException) -> str:
    """Return the TLS problem that caused an error, or "" if there was none.

    It never contains text sent by the server.
    """
    for cause in causes(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"TLS: {cause.verify_message.rstrip('.')}"
        if isinstance(cause, ssl.SSLError) and not isinstance(cause, ssl.SSLWantReadError):  # not an error
            return f"TLS: {(cause.reason or 'failed').replace('_', ' ').lower()}"
    return ""


def is_refused(error: BaseException) -> bool:
    """Return whether an error means that nothing listens on the port: the connection was refused."""
    return any(isinstance(cause, ConnectionRefusedError) for cause in causes(error))


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes; for several addresses that were tried, the causes of each."""
    while error is not None:
        yield error
        if isinstance(error, BaseExceptionGroup):
            for member in error.exceptions:
                yield from causes(member)
        error = error.__cause__ or error.__context__


class Failed(Exception):
    """A request failed, with `status` if there was one. The message never contains headers or bodies."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status
