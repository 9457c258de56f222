"""The policies that the routing benchmark compares: the gateway's own code, and four that others use."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import count
from typing import TypeVar

from benchmarks.traffic import Arrival, Kind
from benchmarks.virtual_fleet import Fate, Fleet, backend_of, fleet_profiles
from gateway.core.backends import Gates, KneeStep, Pool, Spill
from gateway.core.policy import Bound, Comparison, ModelPolicy, Policy, TrafficClass, Waiting, When
from gateway.core.request import CountMode, Endpoint, Estimate
from gateway.core.request_features import RequestFeatures
from gateway.core.waiting import Ticket
from gateway.replay.router import PolicyRouter

T = TypeVar("T")

ESTIMATE_BAND = 0.15
"""How far above the estimate the gateway plans: three times the estimate's error."""


# ------------------------------------------------------------------ the gateway


def site(knee_seqs: int | None = None, long_seqs: int | None = None) -> Policy:
    """Return the policy of the benchmark's site: what an operator would configure for this fleet.

    `knee_seqs`: cap of each LIGHT server for short prompts, where it is not the profile's 64.
    `long_seqs`: documents in flight on PUSH.
    """
    backends = {}
    for name, profile in fleet_profiles().items():
        capacity = profile.capacity
        if knee_seqs is not None and name.startswith("light"):
            steps = [KneeStep(step.prompt_tokens_max, min(step.seqs, knee_seqs)) for step in capacity.knee]
            capacity = replace(capacity, knee=tuple(steps))
        backends[name] = backend_of(name, profile, capacity)
    pools = (
        Pool("light", ("light-0", "light-1"), gates=Gates(long_prefills=0, prefill_s=0.6)),
        Pool("push", ("push",), gates=Gates(long_seqs=long_seqs), spill=Spill(reserve=0.125, prefill_s=0.5)),
        Pool("tpu", ("tpu",)),
        Pool("spark", ("spark",)),
    )
    is_long = When(prompt_tokens=(Bound(Comparison.GE, 16_000),))
    documents = Waiting(max_wait_s=900, ttft_target_s=60, prefill_weight=1)
    jobs = Waiting(max_wait_s=3600, ttft_target_s=600, prefill_weight=1)
    classes = (
        TrafficClass("reasoning", ("tpu", "spark"), When(reasoning=True), 4096, waiting=jobs),
        TrafficClass("long_document", ("push",), is_long, waiting=documents),
        TrafficClass("short_chat", ("light", "push")),
    )
    return Policy(
        models=(ModelPolicy("gemma", classes),), pools={pool.id: pool for pool in pools}, backends=backends
    )


class GatewayRouter(PolicyRouter[Arrival]):
    """The product's own classify, select, admit, queue and shed code; only time and servers are models."""

    is_patient = True

    def __init__(self, policy: Policy, *, band: float = ESTIMATE_BAND, is_told_output: bool = False) -> None:
        """Start with an idle fleet and an empty line.

        `band`: how far above the estimate it plans. `is_told_output`: callers give `max_tokens`.
        """
        super().__init__(policy, self._asked)
        self._band = band
        self._is_told_output = is_told_output
        self._ticket_of: dict[int, Ticket] = {}
        self.above_cap = 0
        self.expected_s: dict[int, float | None] = {}  # by arrival, of those that had to wait

    def arrive(self, fleet: Fleet, arrival: Arrival) -> None:
        """Note what a request is told that has to wait."""
        super().arrive(fleet, arrival)
        ticket = self._ticket_of.pop(arrival.id, None)
        if ticket is not None and self._line.position(ticket.id) is not None:
            self.expected_s[arrival.id] = self._line.foresee(ticket, fleet.now).wait_s

    def _ticket(self, fleet: Fleet, arrival: Arrival) -> Ticket:
        ticket = self._ticket_of[arrival.id] = super()._ticket(fleet, arrival)
        return ticket

    def _asked(self, arrival: Arrival) -> tuple[RequestFeatures, None]:
        tokens = arrival.estimate_tokens
        asked = RequestFeatures(
            policy="",
            estimate=Estimate(tokens, round(tokens * (1 + self._band)), CountMode.APPROXIMATE),
            size_bytes=0,
            patience_s=None,
            headers={},
            model="gemma",
            endpoint=Endpoint.CHAT,
            stream=True,
            max_tokens=arrival.output_tokens if self._is_told_output else None,
            reasoning=arrival.kind is Kind.REASONING,
        )
        return asked, None

    def sent(self, fleet: Fleet, name: str) -> None:
        """Compare what the server really holds with what policy allows: the ledger has no say in this."""
        capacity, box = self._policy.backends[name].capacity, fleet.boxes[name]
        is_over_kv = capacity.kv_blocks is not None and box.engine.kv_usage > capacity.kv_budget
        self.above_cap += is_over_kv or box.in_flight > max(step.seqs for step in capacity.knee)


# ------------------------------------------------------------------ the others

Choice = Callable[[Fleet, Arrival, tuple[str, ...]], str | None]

CHAT_GROUP = ("light-0", "light-1", "push")
REASONING_GROUP = ("tpu", "spark")
CAPS: Mapping[str, int] = {"light-0": 64, "light-1": 64, "push": 100, "tpu": 64, "spark": 4}


class GroupRouter:
    """Two model groups, a rule that chooses within them, and no queue but the engines' own."""

    is_patient = False
    above_cap = 0

    def __init__(self, choose: Choice) -> None:
        """Choose with this rule; where it returns None the request gets a 429."""
        self._choose = choose

    def arrive(self, fleet: Fleet, arrival: Arrival) -> None:
        """Send it on at once."""
        group = REASONING_GROUP if arrival.kind is Kind.REASONING else CHAT_GROUP
        name = self._choose(fleet, arrival, group)
        if name is None:
            fleet.refuse(arrival, "429")
        else:
            fleet.send(arrival, name)

    def answered(self, fleet: Fleet, fate: Fate) -> None:
        """Not of interest."""

    def ended(self, fleet: Fleet, fate: Fate) -> None:
        """Not of interest: what is in flight is the servers' to count."""

    def left(self, fleet: Fleet, fate: Fate) -> None:
        """Cannot be: everything is sent at once."""

    def look(self, fleet: Fleet) -> None:
        """Cannot be: nothing is asked for."""


def round_robin() -> Choice:
    """Return the rule that takes the servers of a group in turn."""
    turns = {CHAT_GROUP: count(), REASONING_GROUP: count()}
    return lambda _, __, group: group[next(turns[group]) % len(group)]


def least_in_flight(fleet: Fleet, _: Arrival, group: tuple[str, ...]) -> str | None:
    """Return the server with the fewest requests."""
    return min(group, key=lambda name: fleet.boxes[name].in_flight, default=None)


def context_least(fleet: Fleet, arrival: Arrival, group: tuple[str, ...]) -> str | None:
    """Return the least busy of those whose window holds the request."""
    return least_in_flight(fleet, arrival, _fitting(fleet, arrival, group))


def context_429(fleet: Fleet, arrival: Arrival, group: tuple[str, ...]) -> str | None:
    """Return the same among those below their cap."""
    free = tuple(n for n in _fitting(fleet, arrival, group) if fleet.boxes[n].in_flight < CAPS[n])
    return least_in_flight(fleet, arrival, free)


def _fitting(fleet: Fleet, arrival: Arrival, group: tuple[str, ...]) -> tuple[str, ...]:
    need = arrival.prompt_tokens + arrival.output_tokens
    return tuple(name for name in group if need <= fleet.boxes[name].profile.capacity.context_tokens)
