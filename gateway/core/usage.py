"""The record of a completed request, shared by metrics, logs and the operator's views."""

from enum import StrEnum

from gateway.core.decision import Candidate, Decision
from gateway.core.errors import GatewayError, ShedError
from gateway.core.health import Outcome
from gateway.core.request_features import RequestFeatures
from gateway.core.trace import Trace
from gateway.core.value import valueclass


class Ending(StrEnum):
    """How a request ended. A small, fixed set: each is a metric label."""

    COMPLETED = "completed"
    REPLAYED = "replayed"  # got the stored answer of its idempotency key
    HANDED_OVER = "handed_over"  # became a job, which runs as a separate request
    REJECTED = "rejected"  # the caller's request was at fault
    SHED = "shed"  # refused because of load or lack of backends
    FAILED = "failed"  # its attempts failed before the first byte
    BROKEN = "broken"  # the stream failed after its first byte
    LEFT = "left"  # the caller disconnected

    @classmethod
    def of(cls, error: GatewayError) -> "Ending":
        """Return the ending of a request that failed with `error` before its first byte."""
        if isinstance(error, ShedError):
            return cls.SHED
        return cls.REJECTED if error.status < 500 else cls.FAILED


@valueclass(frozen=True, slots=True)
class Usage:
    """Token counts reported by a backend in `usage`."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0


@valueclass(frozen=True, slots=True)
class AttemptRecord:
    """One attempt of a request on one backend. Times are monotonic seconds; None if it never got that far."""

    request_id: str
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
    """A request from start to end. Never contains any of its text.

    Attributes:
        id: The `x-request-id` sent to the caller.
        model: The model name that the caller sent.
        stream: Whether it was streamed.
        ending: How it ended.
        status: HTTP status sent to the caller; 499 if it left, or was disconnected, before one was sent.
        error_code: `error.code` sent to the caller, or "".
        key: Name of its API key, or None.
        wall_at: Epoch seconds of its arrival.
        received_at, estimated_at, admitted_at, first_byte_at, ended_at: Monotonic seconds. It is admitted
            with its first slot, or if it is refused there because of load, and waits on, with the next.
        decision: The routing decision made on arrival; None if it failed before that.
        placed: The last backend on which it got a slot, as seen by the queue at that moment; None if none.
        is_spill: Whether a later pool of its class served it.
        backend, pool: Where it was served; "" if nowhere.
        attempts: All attempts, in order.
        usage: The usage reported by the backend, or None.
        chunks: Reads relayed after the first byte.
        ttft_target_s: TTFT target of its class, from arrival; None if it has no class.
        due_s: Deadline of its first token, from arrival: the target plus the allowance for prefill.
        trace: Its trace; the attempts are the children 1, 2, ... of its own span.
        route: Template of the request path; "" for a job.
        job: The id of the job that it became, or is an attempt of; "" if there is none.
        asked: The recorded request; None if it failed before its prompt was counted.
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
    job: str = ""
    asked: RequestFeatures | None = None

    @property
    def read_s(self) -> float | None:
        """Seconds until its body had been received, decoded and counted; None if it never was."""
        return None if self.estimated_at is None else self.estimated_at - self.received_at

    @property
    def queue_s(self) -> float | None:
        """Seconds that it waited until it was admitted; None if it never was."""
        if self.admitted_at is None or self.estimated_at is None:
            return None
        return self.admitted_at - self.estimated_at

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds per output token after the first, or None if unknown.

        It is unknown for several sequences, because they are generated in parallel but reported as one sum.
        """
        if self.usage is None or self.first_byte_at is None or self.usage.completion_tokens < 2:
            return None
        if self.decision is not None and self.decision.demand.seqs > 1:
            return None
        return (self.ended_at - self.first_byte_at) / (self.usage.completion_tokens - 1)
