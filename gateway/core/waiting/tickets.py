"""Input and output of the queue: tickets, offers, refusals."""

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from enum import StrEnum
from math import inf

from gateway.core import admission, selection
from gateway.core.backends import Pool
from gateway.core.decision import Candidate
from gateway.core.load import UNLIMITED, Demand
from gateway.core.policy import Policy, TrafficClass, Waiting
from gateway.core.value import valueclass


class Reason(StrEnum):
    """Why a request was not queued, or was removed from the queue: a metric label and an error code."""

    QUEUE_FULL = "queue_full"  # the class's limit of queued requests or bytes is reached
    WAIT_TOO_LONG = "wait_too_long"  # the forecast wait exceeds the limit of its class
    WAITED_TOO_LONG = "waited_too_long"  # the actual wait reached that limit
    DEADLINE = "deadline"  # the caller's own deadline would pass, or has passed
    NO_BACKEND = "no_backend"  # no backend that could take it is up


@valueclass(frozen=True, slots=True)
class Ticket:
    """A request that needs a slot.

    Attributes:
        id: Unique among queued and running requests.
        model: Id of its model policy.
        policy, traffic_class, demand: Inputs of the decision where it may run.
        key: Name of the caller's API key. None counts as one key.
        arrived_at: Time of arrival in monotonic seconds, kept across retries.
        prefill_s: Prefill time of its prompt on the fastest backend of its first pool, idle.
        size_bytes: Memory it occupies while queued.
        deadline: Latest time for the first token that the caller set, or None.
        failed: Backends on which it has already failed.
        refused: Backends that have refused it because of load: it waits until fewer run there.
        waited_s: Earlier waiting time: in the queue before previous attempts, or as a job in the store. The
            attempts themselves do not count.
        prefix_shares: Per backend, the share of its conversation that the backend has seen.
        is_demoted: Whether it was queued behind the others of its class when another policy came.
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
    is_demoted: bool = False
    refused: frozenset[str] = frozenset()

    @property
    def lane(self) -> tuple[str, str]:
        """Where it queues: the id of its model and the name of its class."""
        return self.model, self.traffic_class.name

    @property
    def first_pool(self) -> tuple[str, ...]:
        """Ids of the backends in its first pool."""
        return self.policy.pools[self.traffic_class.pools[0]].backends

    @property
    def is_long(self) -> bool:
        """Whether its prompt counts as long in its first pool."""
        return admission.is_long(self.policy.pools[self.traffic_class.pools[0]].gates, self.demand)

    @property
    def reading_pool(self) -> Pool:
        """The first pool of its class with a backend that could take it."""
        pools = [self.policy.pools[name] for name in self.traffic_class.pools]
        return next((pool for pool in pools if any(map(self.may_run_on, pool.backends))), pools[0])

    @property
    def gated_s(self) -> float:
        """Prefill seconds for which it closes the gate for long prompts of `reading_pool`; 0 if none applies.

        On the fastest backend of that pool, idle, without what a backend has of its conversation.
        """
        if not self.is_long:
            return 0.0
        pool, fresh = self.reading_pool, 1.0
        if selection.counts_cached(self.demand):
            fresh -= max(self.prefix_shares.values(), default=0.0)
        is_short = fresh * self.demand.prompt_tokens < pool.gates.long_prompt_tokens
        if is_short or pool.gates.long_prefills is None:
            return 0.0
        return fresh * fastest_prefill_s(self.policy, pool.id, self.demand) * self.demand.prompts

    @property
    def fits_all(self) -> bool:
        """Whether every backend of its first pool could take it."""
        demand, backends = self.demand, self.policy.backends
        return all(selection.could_take(backends[name], demand) for name in self.first_pool)

    def may_run_on(self, name: str) -> bool:
        """Return whether a backend of its class could take it, and has not failed it."""
        return name not in self.failed and selection.could_take(self.policy.backends[name], self.demand)

    @property
    def cost(self) -> int:
        """Tokens charged to its key when it starts."""
        return max(1, self.demand.seqs * self.demand.total_tokens)

    @property
    def due_s(self) -> float:
        """The deadline of its class for its first token, in seconds from its arrival."""
        waiting = self.traffic_class.waiting
        return waiting.ttft_target_s + waiting.prefill_weight * self.prefill_s

    @property
    def due_at(self) -> float:
        """When its first token is due: the deadline of its class, or the caller's if that is earlier."""
        due = self.arrived_at + self.due_s
        return due if self.deadline is None else min(due, self.deadline)


def patient(waiting: Waiting) -> Waiting:
    """Return the rules without limits, for work that no open connection depends on."""
    return replace(
        waiting,
        max_wait_s=inf,
        waiting_max=UNLIMITED,
        waiting_bytes_max=UNLIMITED,
        keep_alive_after_s=None,
    )


def fastest_prefill_s(policy: Policy, pool: str, demand: Demand) -> float:
    """Return the prefill seconds of a prompt on the fastest backend of a pool, idle."""
    distinct = policy.distinct[pool]
    if len(distinct) == 1:
        return admission.prefill_s(distinct[0], demand)
    return min([admission.prefill_s(backend, demand) for backend in distinct], default=0.0)


@valueclass(frozen=True, slots=True)
class Refused:
    """A refusal, with the details for the caller.

    Attributes:
        id: The ticket's id.
        reason: See `Reason`.
        position: Its position among the requests of all classes with the same first pool; 1 is next.
        expected_wait_s: Forecast wait at the measured drain rate; None while there is no rate, and where the
            request's own deadline has passed.
        retry_after_s: Seconds until the caller should retry, 1..59.
        waited_s: Time spent waiting, including before earlier attempts.
    """

    id: str
    reason: Reason
    position: int
    expected_wait_s: float | None
    retry_after_s: float
    waited_s: float = 0.0

    def sentence(self) -> str:
        """Return the refusal as a sentence for the caller."""
        match self.reason:
            case Reason.NO_BACKEND:
                return "No backend that could take this request is up."
            case Reason.QUEUE_FULL:
                what = "The queue for requests like this one is full"
            case Reason.WAITED_TOO_LONG:
                what = f"No slot became free within {self.waited_s:.1f} s"
            case Reason.DEADLINE if self.expected_wait_s is None:
                what = "No slot became free before the request's own deadline"
            case Reason.DEADLINE:
                what = "A slot would become free only after the request's own deadline"
            case Reason.WAIT_TOO_LONG:
                what = "A slot would become free too late"
        if self.expected_wait_s is None or self.reason is Reason.WAITED_TOO_LONG:
            return f"{what} (position {self.position})."
        return f"{what} (position {self.position}, about {self.expected_wait_s:.1f} s to wait)."


@valueclass(frozen=True, slots=True)
class Foresight:
    """What would become of a request that came now and found no slot.

    Attributes:
        wait_s: Forecast wait; None while it is unknown.
        ahead: How many requests, of any class with the same first pool, would start before it.
        refused: Its refusal, if it would not be queued.
        is_behind: Whether it would be refused even if there is a slot: those before it come first.
    """

    wait_s: float | None
    ahead: int
    refused: Refused | None
    is_behind: bool = False


@valueclass(frozen=True, slots=True)
class Waiter:
    """A queued request, as shown to an operator.

    Attributes:
        id, model, traffic_class, key: See `Ticket`.
        pool: Id of its first pool.
        position: Its position among requests with the same first pool; 1 is next.
        prompt_tokens: Estimated length of its prompt.
        waited_s: Time spent waiting, including before earlier attempts.
        due_in_s: Seconds until its first token is due; negative when overdue.
        is_behind: Whether it comes after the others of its class: a job, or demoted.
        tries: Number of backends on which it has failed.
        stays_for: The busy backend that has its conversation, if it waits for that one; "" otherwise.
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
    stays_for: str


@valueclass(frozen=True, slots=True)
class Offer:
    """A request that may start, on the first of the candidates that still has a slot."""

    ticket: Ticket
    candidates: tuple[Candidate, ...]


@valueclass(frozen=True, slots=True)
class Turn:
    """Result of one turn of the queue.

    Attributes:
        offers: Requests that may start, in order. Answer each with `started`, `missed` or `leave`.
        refused: Refused requests; they have already left the queue.
        next_turn_at: When to run the next turn if nothing happens before, in monotonic seconds; None if not
            needed.
    """

    offers: Sequence[Offer]
    refused: Sequence[Refused]
    next_turn_at: float | None
