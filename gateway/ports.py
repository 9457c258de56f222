"""The interfaces to the outside, as Protocols, ordered by subject. They are implemented by adapters only.

Each port method is documented here, once. The errors named are those of core/errors.py.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from gateway.core.backends import Backend, Timeouts
from gateway.core.batches import (
    Batch,
    BatchClaim,
    BatchLineError,
    BatchRefusal,
    BatchSnapshot,
    BatchStatus,
    RunningLine,
)
from gateway.core.conversations import Conversations
from gateway.core.decision import Exclusion
from gateway.core.errors import GatewayError
from gateway.core.facts import Attempts, Learned
from gateway.core.files import FileRefusal, NewFile, StoredFile
from gateway.core.health import BackendStatus, Outcome, PeerAttempts, PeerVerdict, Verdict
from gateway.core.idempotency import Idempotency, IdempotencyClaim, KeyState
from gateway.core.jobs import (
    AfterRefusal,
    Chunk,
    Job,
    JobError,
    JobStatus,
    NewJob,
    Queue,
    Quota,
    Refusal,
    Serving,
)
from gateway.core.load import Load
from gateway.core.policy import TemplateCosts
from gateway.core.request import NO_CHANGES, Changes, Endpoint, Estimate, Prefixes, Prompt, Request
from gateway.core.trace import Trace
from gateway.core.usage import AttemptRecord, RequestRecord
from gateway.core.value import valueclass
from gateway.core.webhooks import Delivery, WebhookEndpoint, WebhookEvent

Headers = Sequence[tuple[bytes, bytes]]


class Clock(Protocol):
    """Time, injected so that tests and replays can control it."""

    def now(self) -> float:
        """Return monotonic seconds; only differences are meaningful."""

    def wall(self) -> float:
        """Return seconds since the epoch."""


class Recorder(Protocol):
    """Records attempts and requests. Never raises, never blocks."""

    def attempt(self, record: AttemptRecord) -> None:
        """Record an attempt on a backend. By default, it is recorded with its request only."""
        return

    def finished(self, record: RequestRecord) -> None:
        """Record the end of a request, successful or not."""


# ------------------------------------------------------------------ a request, and both sides of its relay


@valueclass(frozen=True, slots=True)
class Arrival:
    """The arrival of a request.

    Attributes:
        id: The `x-request-id` sent to the caller; unguessable.
        wall_at: Epoch seconds.
        received_at: Monotonic seconds.
        trace: Its place in a trace; None if tracing is off.
        route: The template of the requested path; "" for anything without a route, such as a job.
        job: The id of the job that it is an attempt of; "" if it is none.
        is_awaited: Whether it is an attempt of a job whose caller stays connected, here or elsewhere.
    """

    id: str
    wall_at: float
    received_at: float
    trace: Trace | None = None
    route: str = ""
    job: str = ""
    is_awaited: bool = False


class Incoming(Protocol):
    """A request as received: the fields that the gateway reads, and the bytes to send upstream."""

    @property
    def request(self) -> Request:
        """The fields that the gateway reads."""

    @property
    def forwarded(self) -> Headers:
        """The few request headers that are forwarded (trace context); all others are not."""

    @property
    def arrival(self) -> Arrival:
        """Its time of arrival and its id."""

    @property
    def size_bytes(self) -> int:
        """Memory it occupies, in bytes."""

    @property
    def dropped(self) -> Sequence[str]:
        """Body members that were removed because they give access to engine internals."""

    @property
    def usage_injected(self) -> bool:
        """Whether `body_for` asks for a usage event that the caller did not request."""

    def member(self, name: str) -> Any:
        """Return a body member, decoded; None if it is missing or cannot be decoded."""

    def body_for(self, served_model: str, changes: Changes = NO_CHANGES) -> bytes:
        """Return the body for a backend: as received, except for members the gateway owns and `changes`."""


@valueclass(frozen=True, slots=True)
class Target:
    """The destination of an attempt: a backend, and the parts of the request to send to it."""

    backend: Backend
    endpoint: Endpoint
    headers: Headers
    body: bytes


ChunkMatch = Callable[[bytes, int, int], bytes | None]
"""Returns the bytes to relay for `data[start:end]` if they can be recognized without parsing.

Returns `data` itself if those bytes are relayed unchanged, and None if they were not recognized.
"""


class StreamTransform(Protocol):
    """Transforms a backend's streamed answer into the caller's while it is relayed."""

    @property
    def is_over(self) -> bool:
        """Whether the rest of the answer is to be ignored."""

    def take(self, data: bytes) -> bytes:
        """Return the bytes to relay for some received bytes, possibly b""."""

    @property
    def match(self) -> ChunkMatch:
        """The fast path to try before `take`; bytes that it recognizes must not be passed to `take`."""

    def stalled(self) -> None:
        """Note that the caller has stopped reading: from now on, waiting is not the backend's fault."""

    def resumed(self) -> None:
        """Note that the caller reads again."""


TakeChunk = Callable[[bytes, int, int], bool]
"""Receives a complete HTTP chunk as sent, and the bounds of its data. Returns whether it was consumed."""


class UpstreamResponse(Protocol):
    """A backend's response with a streamed body."""

    @property
    def status(self) -> int:
        """HTTP status code."""

    @property
    def connect_s(self) -> float:
        """Seconds it took to connect; 0 for a kept-alive connection."""

    @property
    def retry_after(self) -> str | None:
        """The header Retry-After, or None."""

    async def read(self) -> bytes:
        """Return the next bytes received, or b"" at the end of the body.

        Raises:
            UpstreamFailed: the connection broke before the end of the body, or what came is not HTTP.
        """

    async def read_whole(self, bytes_max: int) -> bytes:
        """Return the rest of the body. Stops reading when it is longer than `bytes_max`.

        Raises:
            UpstreamFailed: as `read`.
        """

    async def stream_to(self, take: Callable[[bytes], bool], take_chunk: TakeChunk | None = None) -> None:
        """Call `take` with all bytes as they arrive, until it returns False or the body ends.

        `take_chunk`, if given, may be tried first.

        Raises:
            UpstreamFailed: as `read`.
            Exception: anything that `take` or `take_chunk` raises.
        """

    def pause(self) -> None:
        """Stop calling `take` until `resume`, and apply backpressure to the backend."""

    def resume(self) -> None:
        """Continue after `pause`."""


class Upstream(Protocol):
    """The backends' side of the relay."""

    def open(self, target: Target, timeouts: Timeouts) -> AbstractAsyncContextManager[UpstreamResponse]:
        """Send a request, and yield the response once its status is known.

        Leaving the block before the end of the body closes the connection, which tells the backend to stop
        generating. `connect_s` is enforced here, and that the backend reads the request at all; all other
        limits by the pipeline.

        Raises:
            UpstreamUnreachable: no connection within `connect_s`, so nothing was sent.
            UpstreamTimeout: the backend did not read the request in time.
            UpstreamLost: the connection broke after the request was sent and before a status arrived.
            UpstreamFailed: the response is not HTTP.
            OutOfResources: this process has no file descriptors left.
        """


class Downstream(Protocol):
    """The caller's side of the relay. It is cancelled, with all its work, when the caller disconnects."""

    async def start(self, status: int, headers: Headers) -> None:
        """Send the status and headers. Later errors cannot change the status any more."""

    async def send(self, data: bytes) -> None:
        """Send body bytes. Waits while the caller reads slowly.

        Raises:
            CallerStalled, OSError: the caller no longer reads, or is gone. It may also go unnoticed here.
        """

    async def send_whole(self, status: int, headers: Headers, body: bytes) -> None:
        """Send a complete answer: status, headers, the length of the body, and the body.

        This default implementation needs only `start` and `send`.
        """
        await self.start(status, (*headers, (b"content-length", b"%d" % len(body))))
        await self.send(body)

    async def fail(self, error: GatewayError, code: str) -> None:
        """End a started stream with an error under `code`; nothing may be sent after it."""

    async def relay(self, response: UpstreamResponse, transform: StreamTransform) -> None:
        """Send what `transform` makes of a response, until either is over.

        This default implementation needs only `send`, and relays one read at a time.

        Raises:
            UpstreamFailed: as `UpstreamResponse.read`.
        """
        while not transform.is_over and (data := await response.read()):
            passed_on = transform.take(data)
            if passed_on:
                transform.stalled()
                await self.send(passed_on)
                transform.resumed()


# ------------------------------------------------------------------ prompts


class Estimator(Protocol):
    """Counts prompt tokens. Implemented by gateway/tokenizer."""

    async def estimate(self, prompt: Prompt, costs: TemplateCosts, limit_tokens: int) -> Estimate:
        """Return the prompt length, including the chat template.

        Small prompts are counted inline, large ones in a bounded thread pool. Never raises because of the
        text. Counting stops as soon as the prompt certainly exceeds `limit_tokens` (the largest window of
        the fleet); the result then has `CountMode.BOUND` and `tokens > limit_tokens`.

        Raises:
            AtCapacity: too many large prompts are queued for counting.
        """

    def observe(self, estimate: Estimate, actual_tokens: int) -> None:
        """Learn from a backend's own `usage.prompt_tokens` for a prompt estimated earlier.

        Only a prompt for which `estimation.is_plain` holds says anything about how well text is counted.
        """


class SharedLearning(Protocol):
    """Learned statistics about prompt counting, shared between gateways, in addition to `Estimator`."""

    def learned(self) -> Learned:
        """Return the statistics learned from this process's own answers."""

    def note_learned(self, elsewhere: Learned) -> None:
        """Apply the statistics learned by all other gateways, replacing those noted before."""


# ------------------------------------------------------------------ backends


@valueclass(frozen=True, slots=True)
class Slot:
    """A place on a backend, acquired with `Ledger.acquire` and returned with `Ledger.release`."""

    id: str
    backend: str
    load: Load  # what this slot occupies


class Ledger(Protocol):
    """Counts the load in flight. The only place where limits are checked, atomically.

    Attributes:
        is_local: Whether all counting happens in this process, without any communication.
        keeps_to_part: Whether what other processes hold is unknown, so that this one keeps to its part of
            every limit.
    """

    is_local: bool

    @property
    def keeps_to_part(self) -> bool:
        """See above."""

    def load(self, backend_id: str) -> Load:
        """Return a snapshot of the load in flight on a backend, possibly already stale."""

    def others(self, backend_id: str) -> Load:
        """Return the part of `load` held by other gateway processes, as last reported."""

    async def acquire(self, backend_id: str, claim: Load, limits: Load) -> Slot | Exclusion:
        """Acquire a slot if the backend then stays within `limits`; else return which counter is full.

        Counters are compared one by one, atomically with the acquisition. Never raises because of load.
        """

    def acquire_at_once(self, backend_id: str, claim: Load, limits: Load) -> Slot | None:
        """`acquire` without communication. None: the backend is full, or communication is needed."""

    async def answered(self, slot: Slot) -> None:
        """Record the first token of a slot's request: its prefill work is no longer outstanding."""

    async def release(self, slot: Slot) -> None:
        """Release a slot. Idempotent."""

    def release_at_once(self, slot: Slot) -> bool:
        """`release` without communication. Returns False, and changes nothing, if that is not possible."""

    def waits(self, backends: Collection[str]) -> None:
        """Set the backends on which requests are waiting for capacity, replacing the previous set.

        Only for these backends are releases by other processes reported at once.
        """

    async def refresh(self, backends: Collection[str]) -> None:
        """Learn what other processes hold on these backends by now, if they can be heard."""

    def on_freed(self, callback: Callable[[str], None]) -> None:
        """Register a callback that receives a backend's id whenever any process frees capacity there."""


class Fleet(Protocol):
    """The health of all backends, and the sink for the outcomes of attempts."""

    def statuses(self) -> Mapping[str, BackendStatus]:
        """Return the status of every configured backend."""

    def report(self, backend_id: str, outcome: Outcome, detail: str, started_at: float) -> None:
        """Report the outcome of an attempt on a backend; `started_at`: monotonic seconds."""

    def look_again(self, backend_id: str) -> None:
        """Ask a backend soon what it serves: that may have changed."""


class SharedHealth(Protocol):
    """Health information shared between gateways, in addition to `Fleet`."""

    def attempts(self) -> Mapping[str, Attempts]:
        """Return this process's successes and failures per backend that had any."""

    def verdicts(self) -> Mapping[str, Verdict]:
        """Return this process's verdicts on backends, derived from its own requests."""

    def hear(self, backend_id: str, told: PeerVerdict | PeerAttempts) -> None:
        """Apply another gateway's report on a backend. Backends that are not configured are ignored."""


class PrefixIndex(Protocol):
    """Remembers which backends have cached which conversation prefixes."""

    def held(self, prefixes: Prefixes) -> Mapping[str, float]:
        """Return, per backend id, the share (0..1) of this conversation's bytes that it has cached."""

    def remember(
        self, prefixes: Prefixes, backend_id: str, prompt_tokens: int, now: float, *, resumes_anywhere: bool
    ) -> None:
        """Record that a backend now, in monotonic seconds, has cached these prefixes of a prompt.

        `resumes_anywhere`: see `core.health.EngineSample`.
        """

    def forget(self, backend_id: str) -> None:
        """Record that a backend has nothing cached: its process has ended, or keeps no cache."""


class SharedPrefixes(Protocol):
    """Which backends hold which conversations, shared between gateways, in addition to `PrefixIndex`."""

    def conversations(self, now: float) -> Conversations:
        """Return where this process had long conversations answered lately; `now` in monotonic seconds."""

    def hear(self, backend_id: str, key: int) -> None:
        """Record that a backend has answered a conversation for another gateway."""


# ------------------------------------------------------------------ boxes


class BoxFleet(Protocol):
    """The part of the fleet's health tracking that a box uses."""

    def statuses(self) -> Mapping[str, BackendStatus]:
        """Return the status of every configured backend."""

    async def wait_for(self, predicate: Callable[[Mapping[str, BackendStatus]], bool]) -> None:
        """Wait until `predicate(statuses())` is true."""

    def put_out(self, backend_id: str, reason: str) -> None:
        """Stop probing a backend, and do not count its silence as a failure."""

    def await_boot(self, backend_id: str, reason: str) -> None:
        """Probe a backend again: it is booting, and its previous state no longer applies."""


class Switch(Protocol):
    """Starts and stops the models of a box. Failures of a machine are returned, never raised."""

    async def is_resident(self, backend_id: str) -> bool:
        """Return whether a model is resident: its server answers and is awake."""

    async def start(self, backend_id: str, fence: int) -> str:
        """Order the start of a model. Return "" or why it could not be ordered.

        `fence` increases with every change of ownership; a machine that can compare rejects a lower one.
        """

    async def stop(self, backend_id: str, fence: int) -> str:
        """Stop a model and wait until it has stopped. Return "" or why it has not."""

    async def ask(self, backend_id: str) -> str:
        """Send a model its canary request. Return "" or why it failed the check."""


@valueclass(frozen=True, slots=True)
class Board:
    """The contents of a box's board.

    Attributes:
        fence: Fencing token of this process's ownership; 0 if it is not the owner.
        state: The state last written by the owner; "" if there is none.
        others: The note of each other process.
    """

    fence: int = 0
    state: str = ""
    others: Sequence[str] = ()


class BoxBoard(Protocol):
    """Where gateway processes agree on the owner of a box, and share its state."""

    async def sync(self, box_id: str, *, fence: int, state: str, note: str) -> Board | None:
        """Acquire or renew ownership, write, and read. Returns None if the store is unreachable.

        `state` is written only by the owner that holds `fence`; `note` by every process, with an expiry. An
        owner that does not return before its lease expires loses the ownership.
        """

    async def leave(self, box_id: str) -> None:
        """Release the ownership, so that another process can take over at once."""


# ------------------------------------------------------------------ what is stored for callers


class ResponseStore(Protocol):
    """Stores responses as bytes, per owner, with an expiry.

    An owner is the name of an API key, or None without API keys. Owners cannot see each other's responses.
    The responses of one owner are bounded in bytes; those that expire first are evicted first.
    """

    async def put(self, owner: str | None, id: str, record: bytes, ttl_s: float) -> bool:
        """Store a record under an id, replacing any previous one. False: it is too large.

        Raises:
            StoreUnavailable: the store does not respond. The record may or may not have been stored.
        """

    async def get(self, owner: str | None, id: str) -> bytes | None:
        """Return the record with that id; None if this owner has none.

        Raises:
            StoreUnavailable: the store does not respond.
        """

    async def delete(self, owner: str | None, id: str) -> bool:
        """Delete a record. False: this owner has none with that id.

        Raises:
            StoreUnavailable: the store does not respond.
        """


class IdempotencyStore(Protocol):
    """Stores answers by idempotency key. All methods raise StoreUnavailable if the store does not respond.

    A running request holds its key with a lease, which expires unless renewed. The answers of one owner are
    bounded in bytes; those that expire first are evicted first.
    """

    async def begin(self, claim: IdempotencyClaim, lease_s: float) -> bytes | KeyState:
        """Acquire a key (BEGUN), or return the answer stored under it, or why neither is possible.

        If the store does not respond, the key is released as soon as it does, if that is soon.
        """

    async def renew(self, claim: IdempotencyClaim, lease_s: float) -> bool:
        """Renew the lease on a key. False: another runner has the key."""

    async def keep(self, claim: IdempotencyClaim, answer: bytes, ttl_s: float) -> None:
        """Store an answer that is not too large, and release the key. Does nothing if another has the key."""

    async def free(self, claim: IdempotencyClaim) -> None:
        """Release a key, so that the next request runs again. Does nothing if another runner has the key."""

    async def aclose(self) -> None:
        """Close all connections. Never raises."""


class JobStore(Protocol):
    """Stores jobs and their answers. All methods raise StoreUnavailable if the store does not respond.

    `submit` returns once the job is durable. All methods are idempotent.

    Jobs are returned without their bodies and facts, which can be megabytes, except by `load` and `claim`.
    """

    @property
    def is_refusing(self) -> bool:
        """Whether it answers, but has refused a command within the last five minutes: full, or read-only."""

    async def submit(
        self, job: NewJob, quota: Quota, idempotency: Idempotency | None = None, *, replaces: bool = False
    ) -> Job | Refusal:
        """Accept a job, or return why not. A repeated idempotency key returns the job accepted first.

        `replaces`: unless that one is FAILED or CANCELLED. Then the job takes its place. Lines of batches are
        submitted by `BatchStore`.
        """

    async def get(self, job_id: str) -> Job | None:
        """Return a job without body and facts; None if it was never accepted, was deleted, or has expired."""

    async def load(self, job_id: str) -> Job | None:
        """Return a whole job: like `get`, with body and facts."""

    async def facts(self, job_id: str) -> bytes | None:
        """Return the facts of a job without its body, which may be megabytes; None if it is gone."""

    async def chunks(self, job_id: str, start: int = 0, limit: int = 1000) -> Sequence[Chunk]:
        """Return up to `limit` chunks of a job's answer, from number `start` on."""

    async def all_chunks(self, job_id: str) -> Sequence[Chunk]:
        """Return all chunks of a job's answer."""

    async def changed(self, job_id: str, chunks: int, wait_s: float, status: JobStatus) -> bool:
        """Wait until a job changes, at most `wait_s`. Return whether it has.

        It has changed if it has more chunks than `chunks`, a status other than `status`, is final or is gone.
        """

    async def cancel(self, job_id: str) -> Job | None:
        """Cancel a job unless it is final, and notify its worker."""

    async def delete(self, job_id: str) -> bool:
        """Delete a job and its answer, cancelling it if it is running. Return whether it existed."""

    async def revoke(self, job_id: str) -> bool:
        """Make sure that a job never runs after `submit` has raised StoreUnavailable.

        It is deleted, or refused if its submission still arrives. Return whether it existed.
        """

    async def retry(self, job_id: str) -> Job | None:
        """Queue a FAILED or CANCELLED job again, from the start; only operators may do this.

        Its partial answer is discarded, and it no longer expires.
        """

    async def find(
        self,
        *,
        key: str | None = None,
        status: JobStatus | None = None,
        lane: str | None = None,
        limit: int = 100,
    ) -> Sequence[Job]:
        """Return jobs, newest first. `key`: only those of this API key."""

    async def queue(self) -> Queue:
        """Return the state of the queue."""

    async def totals(self) -> Mapping[tuple[str, str], int]:
        """Return the total number of ended jobs per (lane, outcome), over all processes.

        Outcomes as in `core.jobs.JobOutcome`; those that have not occurred are missing.
        """

    async def drain(self, is_drained: bool) -> None:
        """Pause the queue (True): jobs are accepted, but not handed to workers until resumed (False)."""

    # ------------------------------------------------------------ workers

    async def claim(self, worker: str, lanes: Collection[str], attempts_max: int, config: str) -> Job | None:
        """Claim the next job of these lanes; None if there is none.

        The highest priority goes first. Within it, the API keys of a lane take turns: up to eight jobs that
        were claimed before, then one of the others. Between lanes, the one with the fewest jobs in progress
        goes first, then the job that was submitted first.

        A job that was refused under the worker's configuration `config` is left to others; see `refuse`.

        A worker must not call this concurrently. If a call raised StoreUnavailable, so that the worker does
        not know whether it got a job, the next call returns that job.

        A job whose worker has missed its heartbeats is claimed again, which counts as a failed attempt. A
        job with `attempts_max` failures becomes FAILED (`job_poisoned`) instead, and one that has passed
        its deadline FAILED (`job_expired`).
        """

    async def beat(
        self, worker: str, claims: Collection[tuple[str, str]], serving: Serving
    ) -> Collection[str]:
        """Renew the claims of `worker`, pairs of (job id, claim), and announce the models it can run.

        Returns the ids of jobs it has lost. The announcement expires after ten minutes.
        """

    async def is_served_elsewhere(self, model: str, config: str) -> bool:
        """Return whether workers with a configuration other than `config` announce a model."""

    # `claim` is the one in `Job`: a store that has lost data may reuse attempt numbers, but not claims.

    async def append(self, job_id: str, claim: str, chunk: Chunk) -> bool:
        """Append a chunk to an answer. A chunk with a known number changes nothing.

        False: this claim no longer holds the job.
        """

    async def finish(
        self, job_id: str, claim: str, status: JobStatus, error: JobError | None = None, *, chunks: int = 0
    ) -> bool:
        """Make a job final. False: this claim no longer holds it, and nothing changed.

        Raises:
            ValueError: the job has fewer than that many `chunks`, and nothing changed.
        """

    async def give_back(
        self,
        job_id: str,
        claim: str,
        *,
        attempts_max: int,
        after_s: float = 0.0,
        failed: bool = False,
        setback: str = "",
    ) -> bool:
        """Return a job to its key's next turn, not to start before `after_s`. `failed`: count a failure.

        `setback`: what went wrong, in words for its caller; "" if nothing did.

        A job that then has `attempts_max` failures becomes FAILED (`job_poisoned`).

        False: this claim no longer holds it.
        """

    async def refuse(
        self,
        job_id: str,
        claim: str,
        error: JobError,
        *,
        config: str,
        attempts_max: int,
        after_s: float,
    ) -> AfterRefusal | None:
        """Return a job that this process's configuration cannot run.

        It is LEFT to workers that serve its model under a configuration that has not refused it. If there
        are none, this counts as a failure and the job rests for `after_s`; the last failure ends it with
        `error`. None: this claim no longer holds it.
        """

    async def waiting(self, wait_s: float) -> Collection[tuple[str, int]]:
        """Wait until there may be a job to claim, or another process has ended a claim; at most `wait_s`.

        Other processes end a claim by cancelling, deleting or taking over its job. Returns the ended claims,
        pairs of (job id, attempt), as far as known. `beat` reports all of them.
        """


class FileStore(Protocol):
    """Stores callers' files in pieces. All methods raise StoreUnavailable if the store does not respond.

    All methods are idempotent. Incomplete files are invisible, and expire after a while.
    """

    async def write(self, file: NewFile, at: int, data: bytes, bytes_max: int) -> FileRefusal | None:
        """Write data at offset `at`, the current end of the file; the first write creates the file.

        TOO_MANY_BYTES: the files of its API key would exceed `bytes_max` in total.
        """

    async def close(self, file: NewFile, keep_s: float) -> StoredFile:
        """Complete a file, to be kept for `keep_s` from now."""

    async def get(self, file_id: str) -> StoredFile | None:
        """Return a file; None if it was never completed, was deleted, or has expired."""

    async def page(
        self, key: str | None, *, after: str | None, ascending: bool, purpose: str | None, limit: int
    ) -> Sequence[StoredFile] | None:
        """Return files of an API key in the order of their upload, starting after the file `after`.

        None: the file `after` does not exist.
        """

    async def read(self, file_id: str, offset: int, limit: int | None = None) -> bytes:
        """Return bytes of a file from `offset` up to the end of a piece; b"" at its end, or if it is gone.

        `limit`: at most so many, at least 1.
        """

    async def delete(self, file_id: str) -> bool | FileRefusal:
        """Delete a file. False: it does not exist. IN_USE: a batch is reading it."""

    async def aclose(self) -> None:
        """Close all connections. Never raises."""


class BatchStore(Protocol):
    """Stores batches. All methods raise StoreUnavailable if the store does not respond.

    All methods are idempotent. Those that take a claim raise BatchLost if another runner has the batch, the
    batch is over, or the store has lost the claim's last line; otherwise they renew the claim.
    """

    async def create(self, batch: Batch, idempotency: Idempotency | None = None) -> Batch | BatchRefusal:
        """Accept a batch, or return why not. A repeated idempotency key returns the batch accepted first."""

    async def get(self, batch_id: str) -> Batch | None:
        """Return a batch, or None if it does not exist."""

    async def page(self, key: str | None, *, after: str | None, limit: int) -> Sequence[Batch] | None:
        """Return batches of an API key, newest first, starting after the batch `after`.

        None: the batch `after` does not exist.
        """

    async def cancel(self, batch_id: str) -> Batch | None:
        """Cancel a batch unless it is over or ending. Return the batch with its new status."""

    async def revoke(self, batch_id: str) -> bool:
        """Make sure that a batch does not run after `create` has raised StoreUnavailable.

        It is cancelled, or refused if its creation still arrives. Return whether it existed.
        """

    # ------------------------------------------------------------ runners

    async def take(self) -> BatchClaim | None:
        """Claim the oldest batch without a runner; None if there is none."""

    async def look(self, claim: BatchClaim) -> BatchSnapshot:
        """Return the current state of a batch."""

    async def running(self, batch_id: str) -> Sequence[RunningLine]:
        """Return the lines that have become jobs, ended or not."""

    async def move(
        self,
        claim: BatchClaim,
        old: BatchStatus,
        new: BatchStatus,
        *,
        total: int | None = None,
        errors: Sequence[BatchLineError] = (),
    ) -> bool:
        """Change a batch's status from `old` to `new`. False: its status is not `old`, or jobs remain."""

    async def submit(
        self, claim: BatchClaim, line: RunningLine, offset: int, job: NewJob, quota: Quota
    ) -> bool:
        """Submit a line as a job; the next line begins at `offset`.

        False: the jobs of its API key have reached their maximum number or size.
        """

    async def write(self, claim: BatchClaim, number: int, offset: int, count: int, lines: bytes) -> None:
        """Append the results of `count` lines that never became jobs, up to `number`, to the error file."""

    async def collect(self, claim: BatchClaim, job_id: str, line: bytes, *, is_answer: bool) -> None:
        """Append a line's result to the output or the error file, and delete its job.

        Does nothing if the job has not ended.
        """

    async def release(self, claim: BatchClaim) -> None:
        """Release a batch to other runners at once."""

    async def aclose(self) -> None:
        """Close all connections. Never raises."""


class WebhookStore(Protocol):
    """Stores events and their deliveries. All methods raise StoreUnavailable if the store does not respond.

    All methods are idempotent. A claimed delivery that is not settled in time is due again.
    """

    async def events(self, limit: int) -> Sequence[WebhookEvent]:
        """Return events without deliveries, oldest first, and announce that endpoints are configured."""

    async def announce_endpoints(self, endpoints: Iterable[WebhookEndpoint]) -> Sequence[WebhookEndpoint]:
        """Announce this process's endpoints, and return those of all processes.

        An announcement expires after an hour. Of other processes' endpoints only the subscribed events are
        known, not the URLs.
        """

    async def create_deliveries(
        self, event: WebhookEvent, endpoints: Iterable[WebhookEndpoint]
    ) -> Sequence[WebhookEndpoint]:
        """Create a delivery per endpoint for an event, due now. Does nothing if that was done before.

        Returns the endpoints left out because too many deliveries are pending for them.
        """

    async def claim(self, room: Mapping[str, int]) -> Sequence[Delivery]:
        """Claim due deliveries: for each endpoint, by name, at most as many as there is room for."""

    async def end(self, delivery: Delivery) -> None:
        """Delete a delivery that was made or given up."""

    async def again(self, delivery: Delivery, wait_s: float) -> None:
        """Count a failed delivery, due again after `wait_s`. Does nothing if it was claimed again."""

    async def pending(self, endpoints: Sequence[str]) -> Mapping[str, int]:
        """Return the number of deliveries per endpoint that are pending or in progress."""

    async def aclose(self) -> None:
        """Close all connections. Never raises."""
