"""What a request was and how it went: the record that metrics, logs and the operator's views share."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from gateway.core.errors import GatewayError, ShedError
from gateway.core.health import Outcome
from gateway.core.trace import Trace
from gateway.core.values import Candidate, Decision, Endpoint, Policy, Prompt, Request


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


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts as a backend reports them in `usage`."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Features:
    """What a request asked, beside its demand, as far as a class may ask for it. Never text.

    Attributes:
        endpoint: The route it came in on, or that a job or response was translated to.
        max_tokens: Output that the caller allowed, or None.
        reasoning: Whether it asked for reasoning by its body.
        tools: Tools that it brought.
        headers: Of the headers that a class of its model asks for, those it had. A value that no class asks
            for is not kept: "".
    """

    endpoint: Endpoint
    max_tokens: int | None
    reasoning: bool
    tools: int
    headers: Mapping[str, str]

    @classmethod
    def of(cls, request: Request, policy: Policy) -> "Features":
        """Return those of a request that came in under a policy."""
        model = policy.model(request.model)
        asked: dict[str, set[str]] = {}
        for one in () if model is None else model.classes:
            for name, accepted in one.when.headers:
                asked.setdefault(name, set()).update(accepted)
        return cls(
            endpoint=request.endpoint,
            max_tokens=request.max_tokens,
            reasoning=request.reasoning,
            tools=request.tools,
            headers={
                name: request.headers[name] if request.headers[name] in accepted else ""
                for name, accepted in asked.items()
                if name in request.headers
            },
        )


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """A request, start to end. Never holds text.

    Attributes:
        id: The `x-request-id` the caller got.
        model: Name the caller sent.
        stream: Whether it was streamed.
        ending: How it ended.
        status: HTTP status the caller saw; 499 when it left before one was sent.
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
        trace: Where it belongs among traces; its attempts are the children 1, 2, ... of its own span.
        route: The path it came to, as its template; "" for a job.
        features: What else it asked; None where it could not be read.
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
    attempts: tuple[AttemptRecord, ...] = field(default=())
    usage: Usage | None = None
    chunks: int = 0
    ttft_target_s: float | None = None
    trace: Trace | None = None
    route: str = ""
    features: Features | None = None

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds per output token after the first, or None where it cannot be known."""
        if self.usage is None or self.first_byte_at is None or self.usage.completion_tokens < 2:
            return None
        return (self.ended_at - self.first_byte_at) / (self.usage.completion_tokens - 1)

    def as_request(self) -> Request | None:
        """Return the request again, without its text: enough to decide anew; None where none was decided."""
        if self.decision is None or self.features is None:
            return None
        demand, features = self.decision.demand, self.features
        return Request(
            endpoint=features.endpoint,
            model=self.model,
            prompt=Prompt(),
            stream=self.stream,
            max_tokens=features.max_tokens,
            seqs=demand.seqs,
            choices=demand.seqs,
            prompts=demand.prompts,
            reasoning=features.reasoning,
            images=demand.images,
            audios=demand.audios,
            tools=features.tools,
            key=self.key,
            headers=features.headers,
        )
