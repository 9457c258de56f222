"""What has happened in the demo so far: the one thing that everybody writes to and the view reads.

Times are seconds on this machine's clock since the demo began. What is shown is GPU time: the clock
times the speed of the simulated fleet.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import anyio

from gateway.core.value import valueclass
from gateway.demo.prompts import Ask
from gateway.demo.reasons import RouteReason
from gateway.demo.site import PROFILES


class Stage(StrEnum):
    """How far a request is, as its caller sees it."""

    WAITING = "waiting"  # sent, nothing has come back
    STREAMING = "streaming"
    ANSWERED = "answered"
    REFUSED = "refused"  # with the error it was meant to end in
    FAILED = "failed"  # with anything else

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self in (Stage.ANSWERED, Stage.REFUSED, Stage.FAILED)


@dataclass(slots=True, eq=False)
class Exchange:
    """One request and its answer.

    Attributes:
        ask: What is asked.
        sent_at, first_at, ended_at: When it was sent, when its first token came, when it was over.
        stage: How far it is.
        status, code: HTTP status and error code.
        request_id, traffic_class, pool, backend, prompt_tokens: What the response headers say.
        output_tokens: Tokens generated; of a stream, so far.
        text: The answer so far; the thought, while there is nothing else.
        problem: What went wrong, in words.
        why: The gateway's reason, once the operators' view has told it.
    """

    ask: Ask
    sent_at: float
    first_at: float | None = None
    ended_at: float | None = None
    stage: Stage = Stage.WAITING
    status: int = 0
    code: str = ""
    request_id: str = ""
    traffic_class: str = ""
    pool: str = ""
    backend: str = ""
    prompt_tokens: int | None = None
    output_tokens: int = 0
    text: str = ""
    problem: str = ""
    why: RouteReason | None = None

    def first_s(self, now: float) -> float | None:
        """Return the seconds to the first token of a stream or to a whole answer; so far, while waiting."""
        if self.stage is Stage.WAITING:
            return now - self.sent_at
        return None if self.first_at is None else self.first_at - self.sent_at

    def rate(self, now: float) -> float | None:
        """Return tokens per second: after the first one where streamed, over everything where not."""
        if self.first_at is None or self.output_tokens < 2:
            return None
        end = now if self.ended_at is None else self.ended_at
        if not self.ask.stream:
            return self.output_tokens / max(end - self.sent_at, 1e-6)
        took = end - self.first_at
        return (self.output_tokens - 1) / took if took > 0.01 else None


@valueclass(frozen=True, slots=True)
class Gauge:
    """One backend as the gateway's operators see it.

    Attributes:
        state: The gateway's belief about it; "starting" before the gateway runs.
        reason: Why it is in that state.
        in_flight: Sequences the gateway has there.
        knee_used: Share of its knee they use.
        running, waiting, kv_usage: The engine's own gauges, where known.
        tokens_per_s: Tokens it generates per second of the clock, where known.
    """

    name: str
    state: str = "starting"
    reason: str = ""
    in_flight: int = 0
    knee_used: float = 0.0
    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    tokens_per_s: float | None = None


@valueclass(frozen=True, slots=True)
class BoxGauge:
    """The machine on which two models take turns, as the gateway's operators see it.

    Attributes:
        state: What it does, in the gateway's words; "starting" before the gateway runs.
        backend: Whose model is in, going out, or coming in.
        target: Whose comes next; "" where no swap is planned or under way.
        held: Whether what waited when the model came in has to start before that.
        for_s: How long it has been in that state, seconds of the clock.
        reason: Why it is.
        waiting: Per backend, requests and jobs that wait for it.
        boots: Swaps so far.
    """

    state: str = "starting"
    backend: str = ""
    target: str = ""
    held: bool = False
    for_s: float = 0.0
    reason: str = ""
    waiting: Mapping[str, int] = field(default_factory=dict)
    boots: int = 0


@dataclass(slots=True, eq=False)
class SubmittedJob:
    """A job: a request that nobody waits for.

    Attributes:
        id: As the gateway names it.
        status: As its caller saw it last.
    """

    id: str
    status: str = "queued"

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return self.status not in ("queued", "in_progress")


@valueclass(frozen=True, slots=True)
class Note:
    """Something that happened to the fleet, or that the demo did. `mood`: "good", "bad" or "plain"."""

    at: float
    text: str
    mood: str = "plain"


Entry = Exchange | Note | list[Exchange]
"""A line of the list: a request, an event, or a burst of requests."""

_ENTRIES_MAX = 400
"""Maximum lines of the list. A choice: more than any terminal shows."""


@dataclass(slots=True)
class Story:
    """Everything, oldest first.

    Attributes:
        speed: Engine seconds per second of the clock.
        url: Where the gateway listens; "" before it does.
        caption: What is going on, in a sentence.
        fleet: The backends, by name.
        jobs: What was handed over.
        left_out: What the demo cannot show here, and why; "" where it shows all.
        exchanges: Every request.
        entries: What the list shows.
        bursts: How many requests each burst consists of, by its number.
        problems: What makes the demo fail.
    """

    speed: float
    url: str = ""
    caption: str = ""
    fleet: dict[str, Gauge] = field(default_factory=lambda: {name: Gauge(name) for name in PROFILES})
    box: BoxGauge = field(default_factory=BoxGauge)
    jobs: list[SubmittedJob] = field(default_factory=list)
    left_out: str = ""
    exchanges: list[Exchange] = field(default_factory=list)
    entries: deque[Entry] = field(default_factory=lambda: deque(maxlen=_ENTRIES_MAX))
    bursts: dict[int, list[Exchange]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    _news: anyio.Event = field(default_factory=anyio.Event)

    def changed(self) -> None:
        """Wake whoever waits for a change: an answer is over, or a backend was looked at."""
        self._news.set()
        self._news = anyio.Event()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds, asked after every change."""
        while not condition():
            await self._news.wait()

    def begin(self, ask: Ask, at: float) -> Exchange:
        """Note that a request is sent."""
        exchange = Exchange(ask, at)
        self.exchanges.append(exchange)
        if not ask.burst:
            self.entries.append(exchange)
        elif ask.burst in self.bursts:
            self.bursts[ask.burst].append(exchange)
        else:
            burst = self.bursts[ask.burst] = [exchange]
            self.entries.append(burst)
        return exchange

    def note(self, at: float, text: str, mood: str = "plain") -> None:
        """Note an event."""
        self.entries.append(Note(at, text, mood))

    def counts(self) -> Mapping[Stage, int]:
        """Return how many requests are at each stage."""
        found = dict.fromkeys(Stage, 0)
        for exchange in self.exchanges:
            found[exchange.stage] += 1
        return found

    @property
    def failures(self) -> Sequence[Exchange]:
        """The requests that ended otherwise than they should."""
        return [exchange for exchange in self.exchanges if exchange.stage is Stage.FAILED]

    @property
    def is_good(self) -> bool:
        """Whether everything ended as it should."""
        return not self.problems and all(
            exchange.stage in (Stage.ANSWERED, Stage.REFUSED) for exchange in self.exchanges
        )
