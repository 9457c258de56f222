"""Hand-written fakes of the ports around the pipeline, and the real ledger in the middle."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import anyio

from gateway.cohort import Cohort
from gateway.core.backends import Backend, Capacity, KneeStep, Pool, Timeouts
from gateway.core.count_check import CountTracker
from gateway.core.decision import Objection
from gateway.core.drift import DriftTracker
from gateway.core.errors import GatewayError
from gateway.core.health import BackendStatus, Outcome, State
from gateway.core.policy import Bound, Comparison, ModelPolicy, Policy, TemplateCosts, TrafficClass, When
from gateway.core.request import NO_CHANGES, Changes, CountMode, Endpoint, Estimate, Prompt, Request, Turn
from gateway.core.usage import AttemptRecord, RequestRecord
from gateway.core.waiting import WaitingLine
from gateway.pipeline import BackendWatch, JobQuestions, Pipeline
from gateway.ports import Arrival, Downstream, Headers, TakeChunk, Target
from gateway.store.memory import MemoryLedger
from gateway.store.prefixes import MemoryPrefixIndex
from gateway.upstream.backend_clients import read_on

Step = bytes | GatewayError | anyio.Event
"""What a scripted backend does next: send bytes, fail, or wait for an event."""


@dataclass
class Script:
    """One answer of a scripted backend."""

    steps: Sequence[Step] = ()
    status: int = 200
    opening: GatewayError | None = None  # raised instead of an answer
    retry_after: str | None = None


@dataclass
class Incoming:
    """`ports.Incoming` of a request made up by a test."""

    request: Request
    forwarded: Headers = ()
    dropped: Sequence[str] = ()
    usage_injected: bool = False
    size_bytes: int = 100
    arrival: Arrival = Arrival("req-1", 1_000_000.0, 10.0)  # noqa: RUF009 - frozen
    members: Mapping[str, Any] = field(default_factory=dict)

    def member(self, name: str) -> Any:
        return self.members.get(name)

    def body_for(self, served_model: str, changes: Changes = NO_CHANGES) -> bytes:
        changed = {".".join(path): value for path, value in changes.items()}
        return json.dumps({"model": served_model, **self.members, **changed}).encode()


class ScriptedResponse:
    def __init__(self, script: Script) -> None:
        self.status = script.status
        self.retry_after = script.retry_after
        self.headers: Headers = ()
        self._steps = list(script.steps)

    @property
    def connect_s(self) -> float:
        return 0.0

    async def read(self) -> bytes:
        while self._steps:
            step = self._steps.pop(0)
            if isinstance(step, anyio.Event):
                await step.wait()
            elif isinstance(step, GatewayError):
                raise step
            else:
                return step
        return b""

    async def read_whole(self, bytes_max: int) -> bytes:
        return await read_on(self, b"", bytes_max)

    async def stream_to(self, take: Callable[[bytes], bool], take_chunk: TakeChunk | None = None) -> None:
        while (data := await self.read()) and take(data):
            pass

    def pause(self) -> None:
        raise NotImplementedError

    def resume(self) -> None:
        raise NotImplementedError


@dataclass
class ScriptedUpstream:
    """`ports.Upstream` that plays scripts, per backend, in order."""

    scripts: dict[str, list[Script]] = field(default_factory=dict)
    targets: list[Target] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)

    @asynccontextmanager
    async def open(self, target: Target, timeouts: Timeouts) -> AsyncIterator[ScriptedResponse]:
        self.targets.append(target)
        script = self.scripts[target.backend.id].pop(0)
        if script.opening is not None:
            raise script.opening
        try:
            yield ScriptedResponse(script)
        finally:
            self.closed.append(target.backend.id)


@dataclass
class Caller(Downstream):
    """`ports.Downstream` that keeps what it gets."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    parts: list[bytes] = field(default_factory=list)
    before_send: Callable[[bytes], Awaitable[None]] | None = None
    broken: bool = False
    stalls: bool = False  # never reads

    @property
    def body(self) -> bytes:
        return b"".join(self.parts)

    async def fail(self, error: GatewayError, code: str) -> None:
        fields = {"message": error.message, "type": error.type, "param": error.param, "code": code}
        await self.send(b"data: " + json.dumps({"error": fields}).encode() + b"\n\n" + DONE)

    async def start(self, status: int, headers: Headers) -> None:
        self.status = status
        self.headers = {name.decode(): value.decode() for name, value in headers}

    async def send(self, data: bytes) -> None:
        if self.broken:
            raise OSError("the caller's socket is gone")
        if self.stalls:
            await anyio.sleep_forever()
        if self.before_send is not None:
            await self.before_send(data)
        self.parts.append(data)
        await anyio.lowlevel.checkpoint()


@dataclass
class Fleet:
    """`ports.Fleet` whose statuses a test sets."""

    known: dict[str, BackendStatus] = field(default_factory=dict)
    reports: list[tuple[str, Outcome]] = field(default_factory=list)
    looks: list[str] = field(default_factory=list)

    def statuses(self) -> Mapping[str, BackendStatus]:
        return self.known

    def report(self, backend_id: str, outcome: Outcome, detail: str, started_at: float) -> None:
        self.reports.append((backend_id, outcome))

    def look_again(self, backend_id: str) -> None:
        self.looks.append(backend_id)


@dataclass
class Notes:
    """`ports.Recorder` that keeps everything."""

    attempts: list[AttemptRecord] = field(default_factory=list)
    requests: list[RequestRecord] = field(default_factory=list)

    def attempt(self, record: AttemptRecord) -> None:
        self.attempts.append(record)

    def finished(self, record: RequestRecord) -> None:
        self.requests.append(record)


@dataclass
class Estimates:
    """`ports.Estimator` that says what a test says."""

    tokens: int = 100
    observed: list[int] = field(default_factory=list)
    meanwhile: Callable[[], None] | None = None  # what happens while a prompt is counted

    async def estimate(self, prompt: Prompt, costs: TemplateCosts, limit_tokens: int) -> Estimate:
        if self.meanwhile is not None:
            self.meanwhile()
        return Estimate(self.tokens, self.tokens + 16, CountMode.EXACT)

    def observe(self, estimate: Estimate, actual_tokens: int) -> None:
        self.observed.append(actual_tokens)


class StillClock:
    """`ports.Clock` that stands still until a test moves it."""

    def __init__(self) -> None:
        self.time = 10.0

    def now(self) -> float:
        return self.time

    def wall(self) -> float:
        return 1_000_000.0


LIGHT = Capacity(context_tokens=32_768, knee=(KneeStep(None, 2),))
PUSH = Capacity(context_tokens=262_144, knee=(KneeStep(None, 2),))
POLICY = Policy(
    models=(
        ModelPolicy(
            id="gemma-4",
            aliases=("google/gemma-4-31B-it",),
            classes=(
                TrafficClass("long_document", ("push",), When(prompt_tokens=(Bound(Comparison.GE, 16_000),))),
                TrafficClass("short_chat", ("light", "push")),
            ),
        ),
    ),
    pools={
        "light": Pool("light", ("light-0", "light-1"), Timeouts(first_byte_s=5, idle_s=5, total_s=10)),
        "push": Pool("push", ("push",)),
    },
    backends={
        "light-0": Backend("light-0", "http://light-0", LIGHT),
        "light-1": Backend("light-1", "http://light-1", LIGHT),
        "push": Backend("push", "http://push", PUSH),
    },
)


class World:
    """A pipeline with everything around it."""

    def __init__(self, ledger: MemoryLedger | None = None) -> None:
        self.policy = POLICY
        self.clock = StillClock()
        self.ledger = ledger or MemoryLedger()
        self.upstream = ScriptedUpstream()
        self.fleet = Fleet(
            {name: BackendStatus(state=State.UP, served_models=("served",)) for name in POLICY.backends}
        )
        self.notes = Notes()
        self.estimates = Estimates()
        self.prefixes = MemoryPrefixIndex()
        self.counts = CountTracker()
        self.objections: dict[str, Objection] = {}
        self.pipeline = Pipeline(
            policy=lambda: self.policy,
            estimator=self.estimates,
            ledger=self.ledger,
            fleet=self.fleet,
            upstream=self.upstream,
            prefixes=self.prefixes,
            drift=DriftTracker(),
            counts=self.counts,
            watch=BackendWatch(lambda: self.policy, self.ledger, self.counts, self.clock),
            line=WaitingLine(),
            recorder=self.notes,
            clock=self.clock,
            objections=lambda: self.objections,
            cohort=Cohort(),
        )
        self.questions = JobQuestions(lambda: self.policy, self.pipeline.view, self.estimates)

    def answers(self, **scripts: Script) -> None:
        for name, script in scripts.items():
            self.upstream.scripts.setdefault(name.replace("_", "-"), []).append(script)

    async def run(self, request: Request, caller: Caller | None = None, **fields: Any) -> Caller:
        caller = caller or Caller()
        await self.pipeline.run(Incoming(request, **fields), caller)
        return caller

    async def run_to_any_end(self, request: Request, **fields: Any) -> None:
        """Run a request; its record says whether it failed."""
        with suppress(GatewayError):
            await self.run(request, **fields)

    def request(self, *, stream: bool = True, **fields: object) -> Request:
        fields = {"prompt": Prompt(turns=(Turn("user", ("hello?",)),)), **fields}
        return Request(endpoint=Endpoint.CHAT, model="gemma-4", stream=stream, **fields)  # type: ignore[arg-type]


# ---------------------------------------------------------------- what a backend sends


def event(**choice: object) -> bytes:
    body = {"model": "served", "choices": [{"index": 0, "finish_reason": None, **choice}]}
    return b"data: " + json.dumps(body, separators=(",", ":")).encode() + b"\n\n"


ROLE = event(delta={"role": "assistant", "content": ""})
HELLO = event(delta={"content": "hello"})
STOP = event(delta={}, finish_reason="stop")
ABORT = event(delta={"content": "x"}, finish_reason="abort")
USAGE = b'data: {"model":"served","choices":[],"usage":{"prompt_tokens":101,"completion_tokens":2}}\n\n'
DONE = b"data: [DONE]\n\n"
CRASH = b'data: {"error": {"message": "EngineCore encountered an issue.", "code": 500}}\n\n'
CRASH_OF_0_33 = b'{"error":{"message":"The server had an error while processing your request.","code":500}}'
WHOLE = json.dumps(
    {
        "model": "served",
        "choices": [{"message": {"content": "hello"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 101, "completion_tokens": 2},
    }
).encode()
