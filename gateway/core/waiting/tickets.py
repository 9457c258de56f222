"""What goes into the line and what comes out of it: tickets, offers, refusals."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import inf

from gateway.core import admission
from gateway.core.value import valueclass
from gateway.core.values import UNLIMITED, Candidate, Demand, Policy, TrafficClass, Waiting


class Reason(StrEnum):
    """Why a request was not let wait, or not any longer. Few and fixed: a metric label and an error code."""

    QUEUE_FULL = "queue_full"  # as many wait, or as many bytes, as may
    WAIT_TOO_LONG = "wait_too_long"  # at the measured rate it would wait longer than its class allows
    WAITED_TOO_LONG = "waited_too_long"  # it did
    DEADLINE = "deadline"  # its caller's own deadline would pass, or has passed
    NO_BACKEND = "no_backend"  # none that could take it is up


@valueclass(frozen=True, slots=True)
class Ticket:
    """A request that wants a place.

    Attributes:
        id: Unique among those that wait or run.
        model: Id of its model policy; with the class's name it says which line it stands in.
        policy, traffic_class, demand: What decides where it may go.
        key: Name of its caller's API key; None stands for one of its own.
        arrived_at: When it came in, monotonic seconds. A request that is tried again keeps it.
        prefill_s: Unloaded prefill of its prompt on the fastest backend of its first pool.
        size_bytes: What it keeps in memory while it waits.
        deadline: When its caller wants the first token at the latest, or None.
        failed: Backends it was tried on.
        waited_s: How long it waited for the places on which it was tried, or as a job in the store. What the
            tries took is not in it.
        prefix_shares: Per backend, the share of its conversation that was seen there.
    """

    id: str
    model: str
    policy: Policy
    traffic_class: TrafficClass
    demand: Demand
    key: str | None
    arrived_at: float
    prefill_s: float = 0.0
    size_bytes: int = 0
    deadline: float | None = None
    failed: frozenset[str] = frozenset()
    waited_s: float = 0.0
    prefix_shares: Mapping[str, float] = field(default_factory=dict)

    @property
    def first_pool(self) -> tuple[str, ...]:
        """The backends of its first choice."""
        return self.policy.pools[self.traffic_class.pools[0]].backends

    @property
    def is_long(self) -> bool:
        """Whether its prompt counts as long where it would rather go."""
        return admission.is_long(self.policy.pools[self.traffic_class.pools[0]].gates, self.demand)

    @property
    def cost(self) -> int:
        """What a start is charged to its key with, in tokens."""
        return max(1, self.demand.seqs * self.demand.total_tokens)

    @property
    def due_at(self) -> float:
        """When its first token is due: by its class, or earlier by its caller."""
        waiting = self.traffic_class.waiting
        due = self.arrived_at + waiting.ttft_target_s + waiting.prefill_weight * self.prefill_s
        return due if self.deadline is None else min(due, self.deadline)


def patient(waiting: Waiting) -> Waiting:
    """Return the rules by which work waits that nobody holds a connection open for: without a limit."""
    return replace(
        waiting,
        max_wait_s=inf,
        waiting_max=UNLIMITED,
        waiting_bytes_max=UNLIMITED,
        keep_alive_after_s=None,
    )


def fastest_prefill_s(policy: Policy, traffic_class: TrafficClass, demand: Demand) -> float:
    """Return a prompt's unloaded prefill on the fastest backend of the class's first pool, in seconds."""
    distinct = policy.distinct[traffic_class.pools[0]]
    return min([admission.prefill_s(backend, demand) for backend in distinct], default=0.0)


@dataclass(frozen=True, slots=True)
class Refused:
    """Why a request may not wait, and what to tell its caller.

    Attributes:
        id: The ticket's.
        reason: See `Reason`.
        position: Its place among all that want the same first pool, of whatever class, 1 being next.
        expected_wait_s: How long it would have to wait at the rate measured; None while nothing is known.
        retry_after_s: When to come back, seconds in 1..59.
        waited_s: How long it has waited, before earlier tries too.
    """

    id: str
    reason: Reason
    position: int
    expected_wait_s: float | None
    retry_after_s: float
    waited_s: float = 0.0

    def sentence(self) -> str:
        """Return the same in words, for the caller."""
        match self.reason:
            case Reason.NO_BACKEND:
                return "No backend that could take this request is up."
            case Reason.QUEUE_FULL:
                what = "The queue for requests like this one is full"
            case Reason.WAITED_TOO_LONG:
                what = f"No slot became free within {self.waited_s:.1f} s"
            case Reason.DEADLINE:
                what = "A slot would become free only after the request's own deadline"
            case Reason.WAIT_TOO_LONG:
                what = "A slot would become free too late"
        if self.expected_wait_s is None:
            return f"{what} (position {self.position})."
        return f"{what} (position {self.position}, about {self.expected_wait_s:.1f} s to wait)."


@dataclass(frozen=True, slots=True)
class Waiter:
    """A request that waits, for an operator.

    Attributes:
        id, model, traffic_class, key: See `Ticket`.
        pool: Id of its first pool.
        position: Its place among those that want the same first pool, 1 being next.
        prompt_tokens: Of its prompt.
        waited_s: How long it has waited, for the places of earlier tries too.
        due_in_s: When its first token is due, from now; negative where that has passed.
        is_behind: Whether it was sent behind the others.
        tries: Backends it was tried on.
    """

    id: str
    model: str
    traffic_class: str
    key: str | None
    pool: str
    position: int
    prompt_tokens: int
    waited_s: float
    due_in_s: float
    is_behind: bool
    tries: int


@valueclass(frozen=True, slots=True)
class Offer:
    """A request that may start: take a place on the first of these that still has one."""

    ticket: Ticket
    candidates: tuple[Candidate, ...]


@valueclass(frozen=True, slots=True)
class Turn:
    """What is to be done now.

    Attributes:
        offers: Who may start, in order. Each is answered with `started`, `missed` or `leave`.
        refused: Who must be told that waiting did not help; they have left the line.
        look_again_at: When to ask again if nothing happens before, monotonic seconds; None: not needed.
    """

    offers: Sequence[Offer]
    refused: Sequence[Refused]
    look_again_at: float | None
