"""Simulation of a fleet in virtual time: engine models behind a routing policy. Pure.

The servers are instances of `core.engine`'s model of vLLM, with its limitations: no failures and no network.
Every server is up from beginning to end.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from math import inf
from typing import Generic, Protocol, TypeVar

from gateway.core.engine import Deployment, Engine
from gateway.core.value import valueclass


class Arriving(Protocol):
    """One request of the workload."""

    @property
    def id(self) -> int:
        """Its index among all arrivals, from 0."""

    @property
    def at(self) -> float:
        """Time of arrival, in seconds."""

    @property
    def prompt_tokens(self) -> int:
        """The true length of its prompt."""

    @property
    def output_tokens(self) -> int:
        """Length of each of its answers."""

    @property
    def seqs(self) -> int:
        """Sequences it occupies."""

    @property
    def prefix_keys(self) -> Sequence[int]:
        """Keys of its blocks in prefix caches, as for `Engine.submit`; none if they are unknown."""


A = TypeVar("A", bound=Arriving)


@valueclass(frozen=True, slots=True)
class Patience:
    """How long a caller waits, in seconds: for the first token, or for the whole answer."""

    seconds: float = inf
    is_for_all: bool = False


@dataclass(slots=True)
class Fate(Generic[A]):
    """Outcome of one request. Times are virtual seconds; None if that point was not reached.

    `is_undecided`: it was still running when the run ended, and had not missed its target by then.
    """

    arrival: A
    backend: str = ""
    sent_at: float | None = None
    first_at: float | None = None
    done_at: float | None = None
    refused: str = ""
    left: bool = False
    output_tokens: int = 0
    is_undecided: bool = False
    running: set[int] = field(default_factory=set)

    @property
    def ttft_s(self) -> float | None:
        """Seconds to the first token."""
        return None if self.first_at is None else self.first_at - self.arrival.at

    @property
    def tpot_s(self) -> float:
        """Mean seconds per token after the first."""
        if self.first_at is None or self.done_at is None:
            return inf
        return (self.done_at - self.first_at) / max(1, self.output_tokens - 1)


class Router(Protocol[A]):
    """A routing policy. It handles events by calling `Fleet.send` and `Fleet.refuse`."""

    def arrive(self, fleet: "Fleet[A]", arrival: A) -> None:
        """Handle the arrival of a request."""

    def answered(self, fleet: "Fleet[A]", fate: Fate[A]) -> None:
        """Handle the first token of a request."""

    def ended(self, fleet: "Fleet[A]", fate: Fate[A]) -> None:
        """Handle the end of a request that was sent: it finished or was rejected, or its caller left."""

    def left(self, fleet: "Fleet[A]", fate: Fate[A]) -> None:
        """Handle a caller that left before its request was sent."""

    def look(self, fleet: "Fleet[A]") -> None:
        """Handle the timer set with `Fleet.look_at`."""


@dataclass(slots=True)
class Box:
    """One server.

    Attributes:
        name: Name of its backend.
        profile: Its deployment.
        engine: Its engine.
        in_flight: Number of requests in flight.
        kv_usage_max: The highest share of its KV pool in use so far.
        tokens: Tokens generated in the counted time.
        is_running: Whether a step is in progress.
    """

    name: str
    profile: Deployment
    engine: Engine
    in_flight: int = 0
    kv_usage_max: float = 0.0
    tokens: int = 0
    is_running: bool = False


@dataclass(slots=True)
class Fleet(Generic[A]):
    """The simulation's event loop. Call `run` once.

    Attributes:
        router: The routing policy.
        arrivals: The requests, with ids numbered from 0 in this order; `add` continues them.
        profiles: The deployment of each server, by name.
        patience: How long the caller of a request waits.
        counted_from_s, counted_until_s: The period in which tokens are counted.
        now: The current time in virtual seconds.
        boxes: The servers, by name.
        fates: The outcome of each arrival, in the same order.
    """

    router: Router[A]
    arrivals: Sequence[A]
    profiles: Mapping[str, Deployment]
    patience: Callable[[A], Patience]
    counted_from_s: float = 0.0
    counted_until_s: float = inf
    now: float = 0.0
    boxes: dict[str, Box] = field(default_factory=dict)
    fates: list[Fate[A]] = field(default_factory=list)
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _owners: dict[int, Fate[A]] = field(default_factory=dict)  # by id of a sequence in flight
    _seqs: int = 0
    _count: int = 0
    _looks: float = inf

    def run(self) -> None:
        """Process all arrivals until all requests have ended."""
        self.boxes = {name: Box(name, profile, Engine.of(profile)) for name, profile in self.profiles.items()}
        for one in self.arrivals:
            self.add(one)
        while self._events:
            self.now, _, happens = heappop(self._events)
            happens()

    def add(self, arrival: A) -> None:
        """Let a request arrive, whose id is the number of those before: now, or later."""
        fate = Fate(arrival)
        self.fates.append(fate)
        self._at(arrival.at, partial(self.router.arrive, self, arrival))
        patience_s = self.patience(arrival).seconds
        if patience_s < inf:
            self._at(arrival.at + patience_s, partial(self._patience, fate))

    # ------------------------------------------------------------ actions of a router

    def send(self, arrival: A, name: str) -> None:
        """Send a request to a server; a request that it cannot hold is rejected with a 400."""
        box, fate = self.boxes[name], self.fates[arrival.id]
        fate.backend, fate.sent_at = name, self.now
        if not holds(box.profile, arrival):
            fate.refused = "400"
            self.router.ended(self, fate)
            return
        # The output is cut at the end of the context window, as in vLLM.
        room = box.profile.capacity.context_tokens - arrival.prompt_tokens
        fate.output_tokens = min(arrival.output_tokens, room)
        box.in_flight += 1
        for _ in range(arrival.seqs):
            self._seqs += 1
            self._owners[self._seqs] = fate
            fate.running.add(self._seqs)
            box.engine.submit(self._seqs, arrival.prompt_tokens, fate.output_tokens, arrival.prefix_keys)
        if not box.is_running:
            self._step(box)

    def refuse(self, arrival: A, reason: str) -> None:
        """Refuse a request."""
        self.fates[arrival.id].refused = reason

    def look_at(self, at: float) -> None:
        """Schedule a call of `Router.look`; the earliest requested time wins."""
        if at < self._looks:
            self._looks = at
            self._at(max(at, self.now), self._look)

    # ------------------------------------------------------------ events

    def _at(self, when: float, happens: Callable[[], None]) -> None:
        self._count += 1
        heappush(self._events, (when, self._count, happens))

    def _look(self) -> None:
        if self._looks <= self.now:  # else an earlier one has taken its place
            self._looks = inf
            self.router.look(self)

    def _step(self, box: Box) -> None:
        batch = box.engine.schedule()
        box.is_running = batch is not None
        box.kv_usage_max = max(box.kv_usage_max, box.engine.kv_usage)
        if batch is not None:
            self._at(self.now + batch.duration_s, partial(self._stepped, box))

    def _stepped(self, box: Box) -> None:
        result = box.engine.complete()
        if self.counted_from_s <= self.now < self.counted_until_s:
            box.tokens += sum(gained for _, gained in result.emitted)
        seen_at = self.now + box.profile.perf.overhead_s
        answered: list[Fate[A]] = []
        for seq in result.first:
            fate = self._owners[seq]
            if fate.first_at is None:
                fate.first_at = seen_at
                answered.append(fate)
        ended: list[Fate[A]] = []
        for seq in result.finished:
            fate = self._owners.pop(seq)
            fate.running.discard(seq)
            if not fate.running:
                fate.done_at = seen_at
                box.in_flight -= 1
                ended.append(fate)
        for fate in answered:
            if fate.done_at is None:
                self.router.answered(self, fate)
        for fate in ended:
            self.router.ended(self, fate)
        self._step(box)

    def _patience(self, fate: Fate[A]) -> None:
        is_over = fate.first_at is not None and not self.patience(fate.arrival).is_for_all
        if is_over or fate.done_at is not None or fate.refused or fate.left:
            return
        fate.left = True
        if fate.sent_at is None:
            self.router.left(self, fate)
            return
        box = self.boxes[fate.backend]
        for seq in fate.running:
            box.engine.abort(seq)
            del self._owners[seq]
        fate.running.clear()
        box.in_flight -= 1
        self.router.ended(self, fate)


def holds(profile: Deployment, arrival: Arriving) -> bool:
    """Return whether a server's window has room for the prompt and an answer, and its KV pool for both."""
    capacity = profile.capacity
    if arrival.prompt_tokens >= capacity.context_tokens:
        return False
    total = min(arrival.prompt_tokens + arrival.output_tokens, capacity.context_tokens)
    return (
        capacity.kv is None or capacity.kv_blocks is None or capacity.kv.blocks(total) <= capacity.kv_blocks
    )
