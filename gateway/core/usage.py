"""What a request was and how it went: the record that metrics, logs and the operator's views share."""

from enum import StrEnum

from gateway.core.asked import Asked
from gateway.core.errors import GatewayError, ShedError
from gateway.core.health import Outcome
from gateway.core.trace import Trace
from gateway.core.value import valueclass
from gateway.core.values import Candidate, Decision


class Ending(StrEnum):
    """How a request ended. Few and fixed: each is a metric label."""

    COMPLETED = "completed"
    REPLAYED = "replayed"  # answered with what its idempotency key was answered with before
    HANDED_OVER = "handed_over"  # as a job, which is a request of its own when it runs
    REJECTED = "rejected"  # the caller's request was at fault
    SHED = "shed"  # refused for load or lack of backends
    FAILED = "failed"  # backends were asked and failed, before the first byte
    BROKEN = "broken"  # the stream failed after its first byte
    LEFT = "left"  # the caller went away

    @classmethod
    def of(cls, error: GatewayError) -> "Ending":
        """Return how a request ended that failed with `error` before its first byte."""
        if isinstance(error, ShedError):
            return cls.SHED
        return cls.REJECTED if error.http_status < 500 else cls.FAILED


@valueclass(frozen=True, slots=True)
class Usage:
    """Token counts as a backend reports them in `usage`."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0


@valueclass(frozen=True, slots=True)
class AttemptRecord:
    """One attempt on one backend. Times are monotonic seconds; None where that point was not reached."""

    backend: str
    pool: str
    traffic_class: str
    outcome: Outcome
    detail: str
    started_at: float
    first_byte_at: float | None
    ended_at: float
    connected_at: float | None = None


@valueclass(frozen=True, slots=True)
class RequestRecord:
    """A request, start to end. Never holds text.

    Attributes:
        id: The `x-request-id` the caller got.
        model: Name the caller sent.
        stream: Whether it was streamed.
        ending: How it ended.
        status: HTTP status the caller saw; 499 when it left, or was cut, before one was sent.
        error_code: `error.code` the caller saw, or "".
        key: Name of its API key, or None.
        wall_at: Epoch seconds of its arrival.
        received_at, estimated_at, admitted_at, first_byte_at, ended_at: Monotonic seconds.
        decision: Where it could go and why, as it came in; None when it failed before one was made.
        placed: The backend that it was given a place on at last, as the line saw it then; None if none.
        is_spill: Whether a later pool of its class served it.
        backend, pool: Where it was served; "" if nowhere.
        attempts: Every try, in order.
        usage: What the backend reported, if it did.
        chunks: Reads relayed after the first byte.
        ttft_target_s: How soon after its arrival its class wants the first token; None where it has no class.
        due_s: How soon after its arrival its first token is due: that, and what is allowed for reading it.
        trace: Where it belongs among traces; its attempts are the children 1, 2, ... of its own span.
        route: The path it came to, as its template; "" for a job.
        asked: What it asked; None when it failed before its prompt was counted.
    """

    id: str
    model: str
    stream: bool
    ending: Ending
    status: int
    error_code: str
    key: str | None
    wall_at: float
    received_at: float
    ended_at: float
    estimated_at: float | None = None
    admitted_at: float | None = None
    first_byte_at: float | None = None
    decision: Decision | None = None
    placed: Candidate | None = None
    is_spill: bool = False
    backend: str = ""
    pool: str = ""
    attempts: tuple[AttemptRecord, ...] = ()
    usage: Usage | None = None
    chunks: int = 0
    ttft_target_s: float | None = None
    due_s: float | None = None
    trace: Trace | None = None
    route: str = ""
    asked: Asked | None = None

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds per output token after the first, or None where it cannot be known.

        The tokens of several sequences are reported as one sum, and come side by side.
        """
        if self.usage is None or self.first_byte_at is None or self.usage.completion_tokens < 2:
            return None
        if self.decision is not None and self.decision.demand.seqs > 1:
            return None
        return (self.ended_at - self.first_byte_at) / (self.usage.completion_tokens - 1)
