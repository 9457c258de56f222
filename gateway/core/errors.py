"""Every failure a caller can be told of, as one tree.

    GatewayError            status, type, code, retry_after_s
      CallerError             the caller must change the request; never retried
        InvalidRequest          400 invalid_request_error / invalid_request, invalid_json, ...
        ContextExceeded         400 invalid_request_error / context_length_exceeded
        Unauthorized            401 authentication_error  / invalid_api_key
        Forbidden               403 permission_error      / forbidden
        RouteNotFound           404 invalid_request_error / not_found
        ModelNotFound           404 invalid_request_error / model_not_found
        ResponseNotFound        404 invalid_request_error / response_not_found
        FileNotFound            404 invalid_request_error / file_not_found
        BatchNotFound           404 invalid_request_error / batch_not_found
        JobNotFound             404 invalid_request_error / job_not_found
        JobEnded                409 invalid_request_error / job_ended
        JobNotEnded             409 invalid_request_error / job_not_ended
        JobNotFinished          409 invalid_request_error / completion_not_finished   + Retry-After
        JobCancelled            410 invalid_request_error / job_cancelled
        RequestTimeout          408 invalid_request_error / request_timeout
        BodyTooLarge            413 invalid_request_error / request_too_large
        BodyEncoded             415 invalid_request_error / unsupported_content_encoding
        IdempotencyKeyReused    422 invalid_request_error / idempotency_key_reused
        FilesFull               429 rate_limit_error / too_many_file_bytes
        JobBytesFull            429 rate_limit_error / too_many_bytes
        BackendRejected         4xx the backend's own verdict on the content, in our shape
          BodyRefused             413 / request_too_large   by a proxy: another backend may take it
      ShedError               refused before any backend saw it; safe to retry after a wait
        AtCapacity              429 rate_limit_error / queue_full, ...         + Retry-After
        JobRefused              429 rate_limit_error / too_many_jobs, ...      + Retry-After
        Draining                503 server_error / draining                    + Retry-After
        OutOfResources          503 server_error / out_of_resources            + Retry-After
        StoreUnavailable        503 server_error / store_unavailable           + Retry-After
        NoBackend               503 server_error / no_backend                  + Retry-After
      IdempotencyInProgress   409 conflict / idempotency_in_progress           + Retry-After
      JobExpired              504 server_error / job_expired       it had not ended when its time was over
      UpstreamError           a backend was asked and failed
        UpstreamUnreachable     502 server_error / upstream_unreachable   no byte sent: try the next one
        UpstreamTimeout         504 server_error / upstream_timeout
        UpstreamFailed          502 server_error / upstream_failed
          UpstreamLost            the same: the connection broke before any answer
          UpstreamFaulty          the same: it may answer so to everything
        AnswerUnfit             502 server_error / tool_arguments_invalid, ...  whole, but not as asked for
        ChoicesMissing          502 server_error / choices_missing      it cannot do that many: final
        JobPoisoned             502 server_error / job_poisoned  several failed at it, one after the other
        UpstreamBusy            503 server_error / upstream_busy          it refused for load, or is draining
        StreamBroken            after the first byte: written as an SSE `error` event, never raised to HTTP
    ConfigError             at start and at reload only; exit status 2
      StartupBlocked                  exit status 1: it may be possible when the gateway is started again

Ask of each: who can act on it, and did a backend see the request? Codes are API: they stand in
docs/errors.md, in metrics and in tests. Statuses follow what the OpenAI SDKs do with them: they
retry 408, 409, 429 and 5xx, and honour `Retry-After` up to 60 s (above it some retry at once), so
`retry_after_s` stays within 1..59.
"""

from typing import ClassVar

NOT_AGAIN = ((b"x-should-retry", b"false"),)
"""Headers that keep SDKs from automatically repeating a request."""


class GatewayError(Exception):
    """An error with a place in OpenAI's error envelope.

    Attributes:
        status: HTTP status.
        type: OpenAI's `error.type`.
        code: OpenAI's `error.code`: stable, documented, a metric label.
        param: The request member at fault, or None.
        retry_after_s: Whole seconds, 1..59, or None if a retry is not known to help.
        headers: Response headers that describe the decision before the failure.
    """

    status: int = 500
    type: ClassVar[str] = "server_error"
    code: str = "internal_error"
    headers: tuple[tuple[bytes, bytes], ...] = ()

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code
        self.retry_after_s: int | None = None
        if retry_after_s is not None:
            self.retry_after(retry_after_s)

    def retry_after(self, seconds: float) -> None:
        """Tell the caller when to retry."""
        self.retry_after_s = max(1, min(59, round(seconds)))


class CallerError(GatewayError):
    """The caller must change the request."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_request"


class InvalidRequest(CallerError):
    """The body is not a valid request, or asks for something this fleet does not support."""


class ContextExceeded(CallerError):
    """Prompt plus output exceeds the window of every backend of its class."""

    code = "context_length_exceeded"


class Unauthorized(CallerError):
    """There is no key, or it is unknown."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class Forbidden(CallerError):
    """Not allowed for this caller, whatever the request."""

    status = 403
    type = "permission_error"
    code = "forbidden"


class RouteNotFound(CallerError):
    """The path does not exist, or is deliberately not served."""

    status = 404
    code = "not_found"


class ModelNotFound(CallerError):
    """No model of that name is configured."""

    status = 404
    code = "model_not_found"


class IdempotencyKeyReused(CallerError):
    """The idempotency key belongs to another request."""

    status = 422
    code = "idempotency_key_reused"

    def __init__(self) -> None:
        """Create the error with its fixed message."""
        super().__init__("This Idempotency-Key was used with another request.")


class ResponseNotFound(CallerError):
    """No response with that id is stored for this caller."""

    status = 404
    code = "response_not_found"


class FileNotFound(CallerError):
    """No file with that id is stored for this caller."""

    status = 404
    code = "file_not_found"


class BatchNotFound(CallerError):
    """No batch with that id is stored for this caller."""

    status = 404
    code = "batch_not_found"


class JobNotFound(CallerError):
    """No job with that id is stored; for operators."""

    status = 404
    code = "job_not_found"


class JobEnded(CallerError):
    """The job has an answer, so there is nothing to retry; for operators."""

    status = 409
    code = "job_ended"


class JobNotEnded(CallerError):
    """The job is queued or running, so there is nothing to retry; for operators."""

    status = 409
    code = "job_not_ended"


class JobNotFinished(CallerError):
    """The job has no answer yet. SDKs retry automatically, after `Retry-After`."""

    status = 409
    code = "completion_not_finished"


class JobCancelled(CallerError):
    """The job was cancelled, so there will never be an answer."""

    status = 410
    code = "job_cancelled"


class RequestTimeout(CallerError):
    """The caller was too slow to send its body."""

    status = 408
    code = "request_timeout"


class BodyTooLarge(CallerError):
    """The body exceeds the configured limit."""

    status = 413
    code = "request_too_large"


class BodyEncoded(CallerError):
    """The body is compressed, which the gateway does not undo: a small body could become a huge one."""

    status = 415
    code = "unsupported_content_encoding"


class BackendRejected(CallerError):
    """A backend rejected the content of the request; its own words, in our shape."""

    def __init__(self, message: str, *, status: int, code: str, param: str | None = None) -> None:
        super().__init__(message, code=code, param=param)
        self.status = status  # chosen by the backend


class BodyRefused(BackendRejected):
    """A backend's server, or a proxy before it, does not take a body of this size; another one may."""

    def __init__(self) -> None:
        super().__init__(
            "The request is larger than the backend, or a proxy before it, takes.",
            status=BodyTooLarge.status,
            code=BodyTooLarge.code,
        )


class IdempotencyInProgress(GatewayError):
    """The first request with this idempotency key is still running; a later retry gets its answer."""

    status = 409
    type = "conflict"
    code = "idempotency_in_progress"


class ShedError(GatewayError):
    """Refused because of load or a lack of backends, before any of them saw the request."""

    status = 503


class AtCapacity(ShedError):
    """Every backend that could take it is full, and waiting would not help. The code says why."""

    status = 429
    type = "rate_limit_error"
    code = "queue_full"


class OutOfResources(ShedError):
    """This process has run out of file descriptors or memory for the request."""

    code = "out_of_resources"


class Draining(ShedError):
    """This gateway is shutting down."""

    code = "draining"

    def __init__(self, message: str = "This gateway is shutting down. Please retry.") -> None:
        super().__init__(message, retry_after_s=1)


class FilesFull(CallerError):
    """The files of this API key have reached their size limit. SDKs are told not to retry."""

    status = 429
    type = "rate_limit_error"
    code = "too_many_file_bytes"
    headers = NOT_AGAIN


class JobBytesFull(CallerError):
    """The jobs of this API key, ended ones too, have reached their size limit. SDKs are told not to retry."""

    status = 429
    type = "rate_limit_error"
    code = "too_many_bytes"
    headers = NOT_AGAIN

    def __init__(self) -> None:
        super().__init__(
            "The jobs of this API key, with those that have ended and are kept, have reached their limit of "
            "bytes. Delete some."
        )


class JobRefused(ShedError):
    """This API key has reached a limit on the number of its jobs."""

    status = 429
    type = "rate_limit_error"
    code = "too_many_jobs"


class StoreUnavailable(ShedError):
    """Redis does not respond, and the request depends on it."""

    code = "store_unavailable"


class NoBackend(ShedError):
    """No backend that could take the request is up."""

    code = "no_backend"


class JobExpired(GatewayError):
    """The job did not end before its deadline."""

    status = 504
    code = "job_expired"


class UpstreamError(GatewayError):
    """A backend was asked and failed."""

    status = 502
    code = "upstream_failed"


class UpstreamUnreachable(UpstreamError):
    """No connection could be opened, so nothing was sent.

    Attributes:
        cause: What was wrong with TLS, for operators; "" if nothing is known to be.
    """

    code = "upstream_unreachable"
    cause = ""


class UpstreamTimeout(UpstreamError):
    """The backend took longer than its pool allows."""

    status = 504
    code = "upstream_timeout"


class UpstreamFailed(UpstreamError):
    """The backend's response is an error, or invalid."""


class UpstreamLost(UpstreamFailed):
    """The connection broke after the request was sent, before any answer: the backend may have crashed."""


class UpstreamFaulty(UpstreamFailed):
    """The backend answered with an error that is nobody's in particular: it may answer so to everything."""


class AnswerUnfit(UpstreamError):
    """The backend's answer is not what was asked for. The code says what is wrong."""


class ChoicesMissing(UpstreamError):
    """The backend answered with fewer choices than asked for. SDKs are told not to retry."""

    code = "choices_missing"
    headers = NOT_AGAIN


class JobPoisoned(UpstreamError):
    """The job has reached the maximum number of failed attempts."""

    code = "job_poisoned"


class UpstreamBusy(UpstreamError):
    """The backend refused because of load, or because it is stopping: not the request's fault, no crash."""

    status = 503
    code = "upstream_busy"


NOTHING_RAN = (UpstreamUnreachable, UpstreamBusy)
"""Failures of an attempt on which the backend spent no time."""


class StreamBroken(UpstreamError):
    """A stream failed after its first byte had been sent to the caller."""

    code = "stream_broken"


class ConfigError(Exception):
    """The configuration is unusable. The message has one line per problem."""


class StartupBlocked(ConfigError):
    """The start failed for a reason that may be temporary: an address is in use or not assigned to this
    machine yet, a data directory is in use, an embedded store does not start."""


def is_out_of_resources(error: BaseException) -> bool:
    """Return whether an error, or one in a group, is a lack of memory or of threads."""
    if isinstance(error, BaseExceptionGroup):
        return any(is_out_of_resources(one) for one in error.exceptions)
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and str(error) == _NO_THREAD)


_NO_THREAD = "can't start new thread"  # Python has no type of its own for it


def let_go(error: BaseException) -> None:
    """Drop the tracebacks of an error that has been handled, and of those that led to it.

    The frames of a traceback keep their variables: the request with its body, and often the error itself,
    stored to be raised later. Such a cycle stays until the garbage collector's next round, for which it waits
    until there are many new objects, however large they are.
    """
    pending: list[BaseException | None] = [error]
    while pending:
        one = pending.pop()
        if one is not None and one.__traceback__ is not None:
            one.__traceback__ = None
            pending += (one.__cause__, one.__context__)
