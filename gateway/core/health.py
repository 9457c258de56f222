"""A backend's health as a state machine: events in, status out. Pure."""

from dataclasses import dataclass, field
from enum import StrEnum


class State(StrEnum):
    """What the gateway believes of a backend."""

    UNKNOWN = "unknown"  # not probed yet: usable only when nothing better is
    BOOTING = "booting"  # refuses connections, within its boot budget: not a fault
    UP = "up"
    PROBATION = "probation"  # back after a fault or restart: a few requests at a time until they succeed
    DRAINING = "draining"  # the engine says it is stopping: finishes what runs, takes nothing new
    HUNG = "hung"  # answers /health, but generates nothing while requests run
    EJECTED = "ejected"  # failed requests: out until its penalty has passed and a probe succeeds
    DOWN = "down"  # does not answer, beyond its boot budget


class Outcome(StrEnum):
    """How an attempt on a backend ended, as far as its health is concerned."""

    OK = "ok"
    REJECTED = "rejected"  # 4xx about the content: the caller's fault, proof of life
    CANCELLED = "cancelled"  # the caller left: says nothing
    BUSY = "busy"  # it refused for load: no fault
    DRAINING = "draining"  # "cannot schedule new futures", finish_reason "abort": it is stopping
    UNREACHABLE = "unreachable"
    TIMEOUT = "timeout"
    FAILED = "failed"  # 5xx, a broken answer, a broken stream
    MISCONFIGURED = "misconfigured"  # 401/403/404 from the backend: our key or its model name is wrong


@dataclass(frozen=True, slots=True)
class EngineSample:
    """One scrape of an engine's own metrics.

    Attributes:
        at: Monotonic seconds of the scrape.
        running, waiting: Sequences in its batch and in its queue.
        kv_usage: Share of its KV blocks in use, 0..1.
        generation_tokens, prompt_tokens: Counters since its start.
        preemptions: Counter since its start; a rise means KV thrash.
        started_at: Epoch seconds of its start (`process_start_time_seconds`), None where it is not exported.
    """

    at: float
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    generation_tokens: float = 0.0
    prompt_tokens: float = 0.0
    preemptions: float = 0.0
    started_at: float | None = None


@dataclass(frozen=True, slots=True)
class BackendStatus:
    """What is known of one backend.

    Attributes:
        state: See `State`.
        since: Monotonic seconds at which it entered that state.
        reason: Why, in a few words for an operator.
        served_models: Names in its `/v1/models`; empty until known.
        context_tokens: `max_model_len` it reports, or None.
        version: Engine version it reports, or "".
        engine: Its last metrics sample, or None.
        restarts: Restarts noticed since the gateway started.
        last_error: The last failure, for an operator; "" if none.
    """

    state: State = State.UNKNOWN
    since: float = 0.0
    reason: str = ""
    served_models: tuple[str, ...] = ()
    context_tokens: int | None = None
    version: str = ""
    engine: EngineSample | None = None
    restarts: int = 0
    last_error: str = ""
    recent_failures: tuple[float, ...] = field(default=())
