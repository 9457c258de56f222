"""The fleet in virtual time: engine models behind a router, from the first arrival to the last token."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from typing import Protocol

from benchmarks.traffic import Arrival, Kind
from gateway.core.engine import Engine
from gateway.core.profile import Profile
from gateway.profiles import library

ACCEPT = 2.5  # tokens per step with EAGLE3 on real text (measured on MT-Bench)
FLEET = {
    "light-0": "h100-tp1-light",
    "light-1": "h100-tp1-light",
    "push": "h100-tp2-push",
    "tpu": "tpu-v6e4-moe",
    "spark": "spark-nvfp4",
}
PATIENCE_S = {Kind.CHAT: 60.0, Kind.LONG: 900.0}
"""How long callers wait for the first token."""

REASONING_TIMEOUT_S = 600.0
"""How long a caller waits for a whole answer that nobody made a background job of: the SDKs' default."""


def fleet_profiles() -> Mapping[str, Profile]:
    """Return the profile of every server of the fleet."""
    found = {}
    for name, profile_name in FLEET.items():
        profile = library.load(profile_name)
        if profile.flags.max_num_seqs and profile.perf.draft == 3 and name != "tpu":
            profile = replace(profile, perf=replace(profile.perf, accept=ACCEPT))
        found[name] = profile
    return found


@dataclass(slots=True)
class Fate:
    """What became of one request. Times in virtual seconds; None where that point was not reached.

    `is_undecided`: it was still running when the run ended, and nothing that it had promised was broken.
    """

    arrival: Arrival
    backend: str = ""
    sent_at: float | None = None
    first_at: float | None = None
    done_at: float | None = None
    refused: str = ""
    left: bool = False
    output_tokens: int = 0
    is_undecided: bool = False

    @property
    def ttft_s(self) -> float | None:
        """Seconds to the first token."""
        return None if self.first_at is None else self.first_at - self.arrival.at

    @property
    def tpot_s(self) -> float:
        """Mean seconds per token after the first."""
        if self.first_at is None or self.done_at is None:
            return float("inf")
        return (self.done_at - self.first_at) / max(1, self.output_tokens - 1)


class Router(Protocol):
    """A policy. It hears what happens and calls `Fleet.send` and `Fleet.refuse`."""

    is_patient: bool  # whether reasoning runs as a background job, whose caller does not wait
    above_cap: int  # times a server was found to hold more than the policy allows

    def arrive(self, fleet: "Fleet", arrival: Arrival) -> None:
        """A request came in."""

    def answered(self, fleet: "Fleet", fate: Fate) -> None:
        """A request had its first token."""

    def ended(self, fleet: "Fleet", fate: Fate) -> None:
        """A request that was sent has finished, or its caller has left."""

    def left(self, fleet: "Fleet", fate: Fate) -> None:
        """A caller left before its request was sent anywhere."""

    def look(self, fleet: "Fleet") -> None:
        """The time asked for with `Fleet.look_at` has come."""


@dataclass(slots=True)
class Box:
    """One server."""

    name: str
    profile: Profile
    engine: Engine
    in_flight: int = 0
    kv_usage_max: float = 0.0
    tokens: int = 0
    is_running: bool = False
    misfits: int = 0


@dataclass(slots=True)
class Fleet:
    """The event loop. `run` it once."""

    router: Router
    arrivals: Sequence[Arrival]
    counted_from_s: float
    counted_until_s: float
    now: float = 0.0
    boxes: dict[str, Box] = field(default_factory=dict)
    fates: list[Fate] = field(default_factory=list)
    _events: list[tuple[float, int, str, object]] = field(default_factory=list)
    _count: int = 0
    _looks: float = float("inf")

    def __post_init__(self) -> None:
        for name, profile in fleet_profiles().items():
            self.boxes[name] = Box(name, profile, Engine.of(profile))

    def run(self) -> None:
        """Live through all arrivals and until everything has ended."""
        self.fates = [Fate(one) for one in self.arrivals]
        for one in self.arrivals:
            self._at(one.at, "arrive", one.id)
            patience = PATIENCE_S.get(one.kind, float("inf"))
            if one.kind is Kind.REASONING and not self.router.is_patient:
                patience = REASONING_TIMEOUT_S
            if patience < float("inf"):
                self._at(one.at + patience, "patience", one.id)
        while self._events:
            self.now, _, what, subject = heappop(self._events)
            match what:
                case "step":
                    self._stepped(self.boxes[str(subject)])
                case "arrive":
                    self.router.arrive(self, self.arrivals[int(str(subject))])
                case "patience":
                    self._patience(self.fates[int(str(subject))])
                case _ if self._looks <= self.now:
                    self._looks = float("inf")
                    self.router.look(self)

    # ------------------------------------------------------------ what a router does

    def send(self, arrival: Arrival, name: str) -> None:
        """Send a request to a server; one that its window does not hold comes back as a 400."""
        box, fate = self.boxes[name], self.fates[arrival.id]
        fate.backend, fate.sent_at = name, self.now
        if not holds(box.profile, arrival):
            box.misfits += 1
            fate.refused = "400"
            self.router.ended(self, fate)
            return
        # A caller that sets no limit gets what the window holds, as with vLLM.
        room = box.profile.capacity.context_tokens - arrival.prompt_tokens
        fate.output_tokens = min(arrival.output_tokens, room)
        box.in_flight += 1
        box.engine.submit(arrival.id, arrival.prompt_tokens, fate.output_tokens)
        if not box.is_running:
            self._step(box)

    def refuse(self, arrival: Arrival, reason: str) -> None:
        """Turn a request away."""
        self.fates[arrival.id].refused = reason

    def look_at(self, at: float) -> None:
        """Have `Router.look` called at a time; the earliest wish counts."""
        if at < self._looks:
            self._looks = at
            self._at(max(at, self.now), "look", None)

    # ------------------------------------------------------------ events

    def _at(self, when: float, what: str, subject: object) -> None:
        self._count += 1
        heappush(self._events, (when, self._count, what, subject))

    def _step(self, box: Box) -> None:
        batch = box.engine.schedule()
        box.is_running = batch is not None
        box.kv_usage_max = max(box.kv_usage_max, box.engine.kv_usage)
        if batch is not None:
            self._at(self.now + batch.duration_s, "step", box.name)

    def _stepped(self, box: Box) -> None:
        result = box.engine.complete()
        if self.counted_from_s <= self.now < self.counted_until_s:
            box.tokens += sum(gained for _, gained in result.emitted)
        for number in result.first:
            fate = self.fates[number]
            fate.first_at = self.now + box.profile.perf.overhead_s
        for number in result.finished:
            self.fates[number].done_at = self.now + box.profile.perf.overhead_s
            box.in_flight -= 1
        for number in result.first:
            if self.fates[number].done_at is None:
                self.router.answered(self, self.fates[number])
        for number in result.finished:
            self.router.ended(self, self.fates[number])
        self._step(box)

    def _patience(self, fate: Fate) -> None:
        is_over = fate.first_at is not None if fate.arrival.kind is not Kind.REASONING else False
        if is_over or fate.done_at is not None or fate.refused or fate.left:
            return
        fate.left = True
        if fate.sent_at is None:
            self.router.left(self, fate)
            return
        box = self.boxes[fate.backend]
        box.engine.abort(fate.arrival.id)
        box.in_flight -= 1
        self.router.ended(self, fate)


def holds(profile: Profile, arrival: Arrival) -> bool:
    """Return whether a server's window and KV pool can hold the prompt and any answer at all."""
    capacity = profile.capacity
    if arrival.prompt_tokens >= capacity.context_tokens:
        return False
    total = min(arrival.prompt_tokens + arrival.output_tokens, capacity.context_tokens)
    return (
        capacity.kv is None or capacity.kv_blocks is None or capacity.kv.blocks(total) <= capacity.kv_blocks
    )
