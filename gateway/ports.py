"""What the pipeline needs from the outside, as Protocols. Adapters implement these; nothing else does.

A port's method is documented here, once. Errors named are those of core/errors.py.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from gateway.core.batches import (
    Batch,
    BatchClaim,
    BatchLineError,
    BatchRefusal,
    BatchSight,
    BatchStatus,
    RunningLine,
)
from gateway.core.errors import GatewayError
from gateway.core.facts import Attempts, Learned
from gateway.core.files import FileRefusal, NewFile, StoredFile
from gateway.core.health import BackendStatus, Elsewhere, Heard, Outcome, Verdict
from gateway.core.idempotency import Promise, Standing
from gateway.core.jobs import (
    Chunk,
    Idempotency,
    Job,
    JobError,
    JobStatus,
    Lane,
    NewJob,
    Quota,
    Refusal,
    Refused,
    Serving,
)
from gateway.core.trace import Trace
from gateway.core.usage import AttemptRecord, RequestRecord
from gateway.core.value import valueclass
from gateway.core.values import (
    NO_CHANGES,
    Backend,
    Changes,
    Endpoint,
    Estimate,
    Exclusion,
    Load,
    Prefixes,
    Prompt,
    Request,
    TemplateCosts,
    Timeouts,
)
from gateway.core.webhooks import Delivery, WebhookEndpoint, WebhookEvent

Headers = Sequence[tuple[bytes, bytes]]


@valueclass(frozen=True, slots=True)
class Arrival:
    """The first byte of a request.

    Attributes:
        id: The `x-request-id` the caller gets; unguessable.
        wall_at: Epoch seconds.
        received_at: Monotonic seconds.
        trace: Where it belongs among traces; None where nobody asks.
        route: The path it came to, as its template; "" for what came by no route, such as a job.
    """

    id: str
    wall_at: float
    received_at: float
    trace: Trace | None = None
    route: str = ""


class Incoming(Protocol):
    """A request as it came in: what the gateway read of it, and the bytes it will become upstream."""

    @property
    def request(self) -> Request:
        """What the gateway reads of it."""

    @property
    def forwarded(self) -> Headers:
        """The few request headers that travel on (trace context); everything else stays here."""

    @property
    def arrival(self) -> Arrival:
        """When it arrived, and the id it was given."""

    @property
    def size_bytes(self) -> int:
        """Bytes it keeps in memory."""

    @property
    def dropped(self) -> Sequence[str]:
        """Body members that were left out because they reach into the engine."""

    @property
    def usage_injected(self) -> bool:
        """Whether `body_for` asks for a usage event that the caller did not ask for."""

    def member(self, name: str) -> Any:
        """Return a member of the body, decoded; None where there is none, or where it cannot be read."""

    def body_for(self, served_model: str, changes: Changes = NO_CHANGES) -> bytes:
        """Return the body for a backend: as sent, but for the members the gateway owns and `changes`."""


class Clock(Protocol):
    """Time, injected so that tests and replays own it."""

    def now(self) -> float:
        """Return monotonic seconds; only differences mean anything."""

    def wall(self) -> float:
        """Return seconds since the epoch."""


class Estimator(Protocol):
    """Counts prompts. The one implementation is gateway/tokenizer."""

    async def estimate(self, prompt: Prompt, costs: TemplateCosts, limit_tokens: int) -> Estimate:
        """Return the prompt's length, template included.

        Small prompts are counted inline; large ones in a bounded thread pool. Never raises for what
        the text holds. Counting stops once it is certain that the prompt exceeds `limit_tokens` (the largest
        window of the fleet): the answer then has `CountMode.BOUND` and `tokens > limit_tokens`.
        """

    def observe(self, prompt: Prompt, estimate: Estimate, actual_tokens: int) -> None:
        """Learn from a backend's own `usage.prompt_tokens` for a prompt estimated earlier."""


@valueclass(frozen=True, slots=True)
class Slot:
    """A place on a backend, taken by `Ledger.acquire` and given back by `Ledger.release`."""

    id: str
    backend: str
    load: Load  # what this slot itself takes


class Ledger(Protocol):
    """Counts what is in flight, and is the one place where a limit is checked atomically.

    Attributes:
        is_local: Whether all of it happens here, so that nobody else is ever asked or told.
    """

    is_local: bool

    def load(self, backend_id: str) -> Load:
        """Return what is in flight on a backend: a snapshot, possibly stale by the time it is read."""

    def others(self, backend_id: str) -> Load:
        """Return the part of `load` that other gateway processes hold, as last heard."""

    async def acquire(self, backend_id: str, claim: Load, limits: Load) -> Slot | Exclusion:
        """Take a place if the backend then holds no more than `limits`; else say which counter is full.

        Compared counter by counter; the check and the taking are one. Never raises for load.
        """

    def acquire_at_once(self, backend_id: str, claim: Load, limits: Load) -> Slot | None:
        """Do as `acquire`, if nobody has to be asked. None: the backend is full, or somebody has to be."""

    async def answered(self, slot: Slot) -> None:
        """Note that a slot's request has had its first token: its prompt is work outstanding no more."""

    async def release(self, slot: Slot) -> None:
        """Give a place back. Releasing the same slot twice changes nothing."""

    def release_at_once(self, slot: Slot) -> bool:
        """Do as `release`, if nobody has to be told. Returns whether that is so; if not, nothing was done."""

    def waits(self, backends: Collection[str]) -> None:
        """Note on which backends requests wait for something to become free, in place of those noted before.

        What becomes free there through other processes is told here at once only meanwhile.
        """

    def on_freed(self, callback: Callable[[str], None]) -> None:
        """Have `callback` called with a backend's id whenever something became free there, by anybody."""


@valueclass(frozen=True, slots=True)
class Target:
    """Where an attempt goes: a backend, and the bytes its call is made of."""

    backend: Backend
    endpoint: Endpoint
    headers: Headers
    body: bytes


Glance = Callable[[bytes, int, int], bytes | None]
"""Returns what is to be passed on of `data[start:end]`, given the three, where a glance tells.

`data` itself: just those bytes. None: nothing was done.
"""


class Pouring(Protocol):
    """What makes of a backend's answer what its caller gets, while the one is poured into the other."""

    @property
    def is_over(self) -> bool:
        """Whether nothing more is wanted of the answer."""

    def take(self, data: bytes) -> bytes:
        """Return what is to be passed on of some bytes as they arrived, possibly b""."""

    @property
    def glance(self) -> Glance:
        """What may be asked of bytes before they are taken; if it knows them, they are not."""

    def stalled(self) -> None:
        """Note that the caller takes no more at the moment: from now on, the time is the caller's."""

    def resumed(self) -> None:
        """Note that it does again."""


TakeChunk = Callable[[bytes, int, int], bool]
"""Given a whole chunk of HTTP as it was sent, and where its bytes begin and end; whether it took them."""


class UpstreamResponse(Protocol):
    """A backend's answer whose body is read piece by piece."""

    @property
    def status(self) -> int:
        """HTTP status."""

    @property
    def connect_s(self) -> float:
        """Seconds until there was a connection; 0 where one was kept."""

    async def read(self) -> bytes:
        """Return the next bytes as they arrived, or b"" at the end of the body.

        Raises:
            UpstreamFailed: the connection broke before the body was complete.
        """

    async def pour(self, take: Callable[[bytes], bool], take_chunk: TakeChunk | None = None) -> None:
        """Have `take` called with all bytes as they arrive; return when it wants no more, or at the end.

        `take_chunk` may be asked before that.

        Raises:
            UpstreamFailed: as `read`.
            Exception: whatever `take` or `take_chunk` raises.
        """

    def hold(self) -> None:
        """Call `take` no more until `go_on`, and let the backend wait."""

    def go_on(self) -> None:
        """Go on after `hold`."""


class Upstream(Protocol):
    """The backends' side of the relay."""

    def open(self, target: Target, timeouts: Timeouts) -> AbstractAsyncContextManager[UpstreamResponse]:
        """Send a request and yield the answer once its status is known.

        Leaving the block before the body's end closes the connection, which is how a backend is told
        to stop generating. `connect_s` is enforced here; the other limits by the pipeline's cancel scope.

        Raises:
            UpstreamUnreachable: no connection within `connect_s`, so no byte of the request left.
            UpstreamTimeout: the backend did not take the request in time.
            UpstreamLost: the connection broke after the request was sent and before a status arrived.
            UpstreamFailed: what arrived is not HTTP.
            OutOfResources: this process has no file descriptors left.
        """


class Downstream(Protocol):
    """The caller's side of the relay. Cancelled, with everything it runs in, when the caller leaves."""

    async def start(self, status: int, headers: Headers) -> None:
        """Send the status and headers. After this an error can no longer be a status."""

    async def send(self, data: bytes) -> None:
        """Send body bytes; waits while the caller is slow to read."""

    async def fail(self, error: GatewayError, code: str) -> None:
        """End a stream that has started with an error, under `code`; nothing is sent after it."""

    async def relay(self, response: UpstreamResponse, pouring: Pouring) -> None:
        """Send what `pouring` makes of an answer, until it is over or the answer is.

        This is how whoever has nothing but `send` does it: one read after the other.

        Raises:
            UpstreamFailed: as `UpstreamResponse.read`.
        """
        while not pouring.is_over and (data := await response.read()):
            passed_on = pouring.take(data)
            if passed_on:
                pouring.stalled()
                await self.send(passed_on)
                pouring.resumed()


class Fleet(Protocol):
    """What is known of the backends' health, and who is told how attempts went."""

    def statuses(self) -> Mapping[str, BackendStatus]:
        """Return the status of every configured backend."""

    def report(self, backend_id: str, outcome: Outcome, detail: str) -> None:
        """Tell how an attempt on a backend ended."""


class BoxFleet(Protocol):
    """What a box needs to know and to say of the health of its backends."""

    def statuses(self) -> Mapping[str, BackendStatus]:
        """Return the status of every configured backend."""

    async def wait_for(self, predicate: Callable[[Mapping[str, BackendStatus]], bool]) -> None:
        """Return as soon as `predicate(statuses())` holds."""

    def put_out(self, backend_id: str, reason: str) -> None:
        """Ask a backend no more, and hold its silence against it no more."""

    def await_boot(self, backend_id: str, reason: str) -> None:
        """Ask it again: it is being started, and what was known of it is past."""


class Switch(Protocol):
    """Starts and stops the models of a box. Never raises for what a machine does or does not do."""

    async def is_in(self, backend_id: str) -> bool:
        """Return whether a model is in: its server answers, and is awake."""

    async def start(self, backend_id: str, fence: int) -> str:
        """Start a model, and return when that has been ordered; "" or why it could not be.

        `fence` grows with every change of owner: a machine that can compare refuses a lower one.
        """

    async def stop(self, backend_id: str, fence: int) -> str:
        """Stop a model, and return when it is out; "" or why it is not."""

    async def ask(self, backend_id: str) -> str:
        """Ask a model its canary; "" or what is wrong with the answer."""


@dataclass(frozen=True, slots=True)
class Board:
    """What a box's board says.

    Attributes:
        fence: Of this process's ownership; 0 where it is not the owner.
        state: What the owner has written last; "" where nobody has.
        others: What each other process has written beside it.
    """

    fence: int = 0
    state: str = ""
    others: Sequence[str] = ()


class BoxBoard(Protocol):
    """Where gateway processes agree on who owns a box, and read what it does."""

    async def sync(self, box_id: str, *, fence: int, state: str, note: str) -> Board | None:
        """Become the owner where there is none, stay it, write and read. None: the store is away.

        `state` is written only by the owner of `fence`, `note` by everybody, for a while. An owner that does
        not come back within the lease's life is one no more.
        """

    async def leave(self, box_id: str) -> None:
        """Give the box up, so that another takes it at once."""


class SharedHealth(Protocol):
    """What gateways tell each other of backends; beside `Fleet`, which they all have."""

    def attempts(self) -> Mapping[str, Attempts]:
        """Return, per backend that had any, the requests of this process that spoke for or against it."""

    def verdicts(self) -> Mapping[str, Verdict]:
        """Return, per backend that has one, the verdict that this process's own requests led to."""

    def hear(self, backend_id: str, told: Heard | Elsewhere) -> None:
        """Take in what another gateway tells of a backend. One that is not configured here is ignored."""


class SharedLearning(Protocol):
    """What gateways tell each other of counting prompts; beside `Estimator`."""

    def learned(self) -> Learned:
        """Return what this process's own answers taught."""

    def note_learned(self, elsewhere: Learned) -> None:
        """Use what the answers of all other gateways taught, in place of what was noted before."""


class PrefixIndex(Protocol):
    """Remembers which backends hold which conversation prefixes."""

    def held(self, prefixes: Prefixes) -> Mapping[str, float]:
        """Return, per backend id, the share (0..1) of this conversation's bytes it has seen before."""

    def remember(self, prefixes: Prefixes, backend_id: str) -> None:
        """Note that a backend now holds these prefixes."""


class JobStore(Protocol):
    """Keeps jobs and their answers. Every method raises StoreUnavailable when the store does not answer.

    What is accepted is kept: `submit` returns once it is written. Every method may be repeated.
    """

    async def submit(
        self, job: NewJob, quota: Quota, idempotency: Idempotency | None = None
    ) -> Job | Refusal:
        """Accept a job, or say why not. With the same idempotency key: the job accepted first."""

    async def get(self, job_id: str) -> Job | None:
        """Return a job, or None for one that was never accepted, was deleted, or whose time is over."""

    async def chunks(self, job_id: str, start: int = 0, limit: int = 1000) -> Sequence[Chunk]:
        """Return chunks of a job's answer from number `start` on, as many as there are, up to `limit`."""

    async def all_chunks(self, job_id: str) -> Sequence[Chunk]:
        """Return all chunks of a job's answer."""

    async def changed(self, job_id: str, chunks: int, wait_s: float, status: JobStatus | None = None) -> None:
        """Return when a job has more chunks than `chunks`, or another status than `status` (None: than when
        this was called), or is final or gone; after `wait_s` anyway."""

    async def cancel(self, job_id: str) -> Job | None:
        """Make a job CANCELLED unless it is final. Its worker is told."""

    async def delete(self, job_id: str) -> bool:
        """Forget a job and its answer, cancelling it if it runs. Returns whether there was one."""

    async def retry(self, job_id: str) -> Job | None:
        """Queue a FAILED or CANCELLED job again, from the start; the operator's exception to the rule.

        What there was of its answer is forgotten, and it expires no more.
        """

    async def find(
        self,
        *,
        key: str | None = None,
        status: JobStatus | None = None,
        lane: str | None = None,
        limit: int = 100,
    ) -> Sequence[Job]:
        """Return jobs, newest first; `key`: only this API key's. Without their bodies and facts."""

    async def lanes(self) -> Sequence[Lane]:
        """Return every lane that has jobs, queued or in progress."""

    async def totals(self) -> Mapping[tuple[str, str], int]:
        """Return how many jobs have ever ended, per (lane, outcome), whoever ended them.

        Outcomes as in `core.jobs.JobOutcome`; one that has not been there is left out.
        """

    async def drain(self, is_drained: bool | None = None) -> float | None:
        """Hand out no more jobs, to no worker, until this is called with False; they are accepted as ever.

        Returns since when none is handed out, in epoch seconds, or None. None as argument: only ask.
        """

    # ------------------------------------------------------------ workers

    async def claim(
        self, worker: str, lanes: Collection[str] | None, attempts_max: int, config: str = ""
    ) -> Job | None:
        """Take the next job of these lanes (None: of any), or None where nothing is to be done.

        One that was refused under the worker's configuration `config` is left to others; see `refuse`.

        A worker asks once at a time. Where it does not know whether it got a job (StoreUnavailable), the next
        call returns that one.

        A job whose worker has not been heard of for a while is taken over, which counts as a failure. One
        that has failed `attempts_max` times is made FAILED (`job_poisoned`) instead, and one that is by now
        worthless FAILED (`job_expired`).
        """

    async def beat(
        self, worker: str, claims: Collection[tuple[str, int]], serving: Serving | None = None
    ) -> Collection[str]:
        """Say that `worker` still has these (job id, attempt), and what it can run from now on.

        Returns the ids of those it has lost. What it can run is remembered for ten minutes after that.
        """

    async def is_served_elsewhere(self, model: str, config: str) -> bool:
        """Return whether workers with another configuration than `config` say that they have a model."""

    # `claim`, as in `Job`, tells an attempt from one of the same number that the store has forgotten.

    async def append(self, job_id: str, attempt: int, chunk: Chunk, claim: str = "") -> bool:
        """Add a chunk to an answer; one whose number is there already changes nothing.

        False: this attempt no longer has the job.
        """

    async def finish(
        self, job_id: str, attempt: int, status: JobStatus, error: JobError | None = None, claim: str = ""
    ) -> bool:
        """Make a job final. False: this attempt no longer has it, and nothing changed."""

    async def give_back(
        self,
        job_id: str,
        attempt: int,
        *,
        after_s: float = 0.0,
        failed: bool = False,
        attempts_max: int | None = None,
        claim: str = "",
    ) -> bool:
        """Queue a job again, at the front, not before `after_s`; `failed`: count it as a failure of the job.

        One that has failed `attempts_max` times then (None: any number) is made FAILED (`job_poisoned`).

        False: this attempt no longer has it.
        """

    async def refuse(
        self,
        job_id: str,
        attempt: int,
        error: JobError,
        *,
        config: str,
        attempts_max: int,
        after_s: float,
        claim: str = "",
    ) -> Refused | None:
        """Give a job back that this process's configuration does not let it run.

        It is LEFT to workers that have its model under a configuration that has not refused it. Where there
        are none, it counts as a failure of the job, which rests for `after_s`; the last one ends it with
        `error`. None: this attempt no longer has it.
        """

    async def waiting(self, wait_s: float) -> Collection[tuple[str, int]]:
        """Return when there may be something to claim, or when somebody's claim has ended by another hand
        (the job was cancelled, deleted, taken over); at the latest after `wait_s`.

        Returns such claims, (job id, attempt), as far as they were heard of. `beat` tells of all.
        """


class FileStore(Protocol):
    """Keeps callers' files, in pieces. Every method raises StoreUnavailable when the store does not answer.

    Every method may be repeated. What is not whole is seen by nobody, and forgotten after a while.
    """

    async def write(self, file: NewFile, at: int, data: bytes, bytes_max: int) -> FileRefusal | None:
        """Put data at offset `at`, behind what there is; the first data make the file.

        TOO_MANY_BYTES: the files of its API key would have more than `bytes_max` together.
        """

    async def close(self, file: NewFile, keep_s: float) -> StoredFile:
        """Make a file whole, to be kept for so long from now."""

    async def get(self, file_id: str) -> StoredFile | None:
        """Return a file, or None for one that was never whole, was deleted, or has expired."""

    async def page(
        self, key: str | None, *, after: str | None, ascending: bool, purpose: str | None, limit: int
    ) -> Sequence[StoredFile] | None:
        """Return files of an API key in the order of their uploads, behind the file `after`.

        None: there is no such file to go on behind.
        """

    async def read(self, file_id: str, offset: int) -> bytes:
        """Return bytes of a file from `offset` on, up to a piece's end; b"" at its end, or if it is gone."""

    async def delete(self, file_id: str) -> bool | FileRefusal:
        """Forget a file. False: there is none. IN_USE: a batch reads it."""

    async def aclose(self) -> None:
        """Close every connection. Raises nothing."""


class BatchStore(Protocol):
    """Keeps batches. Every method raises StoreUnavailable when the store does not answer.

    Every method may be repeated. Those that name a claim raise BatchLost where another has taken the batch,
    or it is over, or the store knows nothing of the claim's last line; and they tell the others that it is
    being worked at.
    """

    async def create(self, batch: Batch, idempotency: Idempotency | None = None) -> Batch | BatchRefusal:
        """Accept a batch, or say why not. Under an idempotency key used before it is the one of then."""

    async def get(self, batch_id: str) -> Batch | None:
        """Return a batch, or None for one that there is not."""

    async def page(self, key: str | None, *, after: str | None, limit: int) -> Sequence[Batch] | None:
        """Return batches of an API key, newest first, behind the batch `after`.

        None: there is no such batch to go on behind.
        """

    async def cancel(self, batch_id: str) -> Batch | None:
        """Have a batch cancelled, unless it is over or about to be. Return it as it is then."""

    # ------------------------------------------------------------ runners

    async def take(self, runner: str) -> BatchClaim | None:
        """Take the oldest batch that nobody works at, or None."""

    async def look(self, claim: BatchClaim) -> BatchSight:
        """Return how a batch stands."""

    async def running(self, batch_id: str) -> Sequence[RunningLine]:
        """Return the lines that are jobs, ended or not."""

    async def move(
        self,
        claim: BatchClaim,
        old: BatchStatus,
        new: BatchStatus,
        *,
        total: int | None = None,
        errors: Sequence[BatchLineError] = (),
    ) -> bool:
        """Give a batch that is in one status another. False: it is not, or has lines that are jobs yet."""

    async def submit(
        self, claim: BatchClaim, line: RunningLine, offset: int, job: NewJob, quota: Quota
    ) -> bool:
        """Hand a line over as a job; the next one begins at `offset`.

        False: the lines of its API key that are jobs are as many, or hold as many bytes, as they may.
        """

    async def write(self, claim: BatchClaim, number: int, offset: int, count: int, lines: bytes) -> None:
        """Write into the error file what became of the next `count` lines, up to `number`, without a job."""

    async def collect(self, claim: BatchClaim, job_id: str, line: bytes, *, is_answer: bool) -> None:
        """Write into the output or the error file what became of a line, and forget its job.

        A job that has not ended is left alone, and the line not written.
        """

    async def release(self, claim: BatchClaim) -> None:
        """Let another take a batch at once."""

    async def aclose(self) -> None:
        """Close every connection. Raises nothing."""


class PromiseStore(Protocol):
    """Keeps what became of idempotency keys. Every method raises StoreUnavailable when it does not answer.

    What runs is marked, with a lease; a mark that is not renewed in time is gone. All answers of an owner are
    bounded in bytes: what would expire first goes first.
    """

    async def begin(self, promise: Promise, lease_s: float) -> bytes | Standing:
        """Mark a key as running (BEGUN), or return the answer that is kept under it, or why neither."""

    async def renew(self, promise: Promise, lease_s: float) -> bool:
        """Renew a runner's mark. False: the key is another's by now."""

    async def keep(self, promise: Promise, answer: bytes, ttl_s: float) -> bool:
        """Keep the answer, and end the mark. False: the key is another's by now, or the answer too large."""

    async def free(self, promise: Promise) -> None:
        """End a runner's mark, so that the next one begins anew. Nothing, if it is not this runner's."""

    async def aclose(self) -> None:
        """Close every connection. Raises nothing."""


class WebhookStore(Protocol):
    """Keeps events and their deliveries. Every method raises StoreUnavailable when the store does not answer.

    Every method may be repeated. What has been claimed and is not settled in time is due again.
    """

    async def events(self, limit: int) -> Sequence[WebhookEvent]:
        """Return events that are not handed on yet, oldest first; and say that there are endpoints."""

    async def hearers(self, endpoints: Iterable[WebhookEndpoint]) -> Sequence[WebhookEndpoint]:
        """Say that this process has these endpoints, and return those of all processes.

        One is remembered for an hour. Of another process's it is only known what they hear of, not where
        they are.
        """

    async def hand_on(
        self, event: WebhookEvent, endpoints: Iterable[WebhookEndpoint]
    ) -> Sequence[WebhookEndpoint]:
        """Make an event into a delivery per endpoint, due now. One that is handed on already is left alone.

        Returns the endpoints that do not get it because too much waits for them.
        """

    async def claim(self, room: Mapping[str, int]) -> Sequence[Delivery]:
        """Take deliveries that are due, as many per endpoint, by name, as there is room for."""

    async def end(self, delivery: Delivery) -> None:
        """Forget a delivery: it was made, or is given up."""

    async def again(self, delivery: Delivery, wait_s: float) -> None:
        """Count a failure of a delivery, and have it due after `wait_s`. Nothing, if it is claimed anew."""

    async def pending(self, endpoints: Sequence[str]) -> Mapping[str, int]:
        """Return how many deliveries wait for each endpoint, or are under way to it."""

    async def aclose(self) -> None:
        """Close every connection. Raises nothing."""


class Recorder(Protocol):
    """Takes note of what happened. Never raises, never blocks."""

    def attempt(self, record: AttemptRecord) -> None:
        """Note one attempt on one backend."""

    def finished(self, record: RequestRecord) -> None:
        """Note a request that ended, however it ended."""


class ResponseStore(Protocol):
    """Keeps responses for the callers they belong to, as bytes, for a time.

    An owner is the name of an API key, or None where no keys are configured; what one owner has kept is
    nothing to another. All an owner has is bounded in bytes: what would expire first goes first.
    """

    async def put(self, owner: str | None, id: str, record: bytes, ttl_s: float) -> bool:
        """Keep a record under an id, in place of what was there. False: it is larger than may be kept.

        Raises:
            StoreUnavailable: the store does not answer. Whether the record is kept is not known.
        """

    async def get(self, owner: str | None, id: str) -> bytes | None:
        """Return the record of that id, or None if this owner has none.

        Raises:
            StoreUnavailable: the store does not answer.
        """

    async def delete(self, owner: str | None, id: str) -> bool:
        """Forget a record. False: this owner has none of that id.

        Raises:
            StoreUnavailable: the store does not answer.
        """
