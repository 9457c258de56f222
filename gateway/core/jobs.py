"""Jobs: requests that are submitted, and whose answers are fetched later.

    submitted -> QUEUED -> IN_PROGRESS -> COMPLETED | INCOMPLETE | FAILED
                   |            |
                   +------------+------> CANCELLED

A job is stored as the chat request for a backend, and its answer as the numbered chat events that a backend
sent. What callers see (a response object, its events, a chat completion) is computed from these, so it is the
same after a restart and on every gateway.

A worker *claims* a job. The claim has a unique id, which is part of every write by the worker. Writes are
rejected once another worker has the job, or once it has ended. So a job may be started more than once, but
ends once: a final status changes only if an operator retries the job.

Pure: times are arguments, in epoch seconds of the store's clock.
"""

from collections.abc import Iterable, Mapping
from dataclasses import field
from enum import StrEnum

from gateway.core.value import valueclass


class JobStatus(StrEnum):
    """Status of a job, in OpenAI's terms."""

    QUEUED = "queued"
    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    INCOMPLETE = "incomplete"  # the answer reached its length limit, or was cut off
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        """Whether it never changes again."""
        return self not in (JobStatus.QUEUED, JobStatus.IN_PROGRESS)


class JobPriority(StrEnum):
    """The order of jobs within a lane. API keys with jobs of equal priority take turns."""

    HIGH = "high"
    NORMAL = "normal"
    BATCH = "batch"  # lines of batches: only if nothing else is queued


@valueclass(frozen=True, slots=True)
class NewJob:
    """A job to be accepted.

    Attributes:
        id: `resp_...`, unguessable.
        key: Name of its API key; None if no keys are configured.
        lane: Its queue, named "model/class" after the model's id and the class. Lanes are independent.
        priority: See `JobPriority`.
        body: The chat request for the backend, JSON, with `stream` true.
        facts: Additional data for its views (what to echo, the requested view), JSON.
        keep_s: How long its result is kept after its end.
        expires_s: Time limit after which it is given up unless it has ended; None: no limit.
        batch: Id of the batch it is a line of, or "".
    """

    id: str
    key: str | None
    lane: str
    body: bytes
    facts: bytes = b"{}"
    priority: JobPriority = JobPriority.NORMAL
    keep_s: float = 86_400.0
    expires_s: float | None = None
    batch: str = ""

    @property
    def size_bytes(self) -> int:
        """Bytes it occupies in the store, without its answer."""
        return len(self.body) + len(self.facts)


@valueclass(frozen=True, slots=True)
class JobError:
    """Why a job failed: as in the error envelope."""

    code: str
    message: str
    param: str | None = None


@valueclass(frozen=True, slots=True)
class Job:
    """A job in the store.

    Attributes:
        new: What was submitted. Body and facts are empty unless they were asked for; see `ports.JobStore`.
        status: Its status.
        attempt: Number of claims so far.
        failures: Number of failed attempts: the worker died, or the backend failed.
        created_at: When it was accepted; `started_at`: when last claimed; `ended_at`: when it became final.
            Epoch seconds of the store's clock.
        retry_at: It is not claimed before this time.
        position: Its position in the queue of its lane, from 1; None unless queued.
        chunks: Number of stored chunks of its answer.
        size_bytes: Bytes that it and its answer occupy in the store.
        worker: The worker that has it, or had it last.
        claim: Id of the latest claim, which its worker's writes must repeat. Unique, even compared with
            claims that the store has forgotten.
        error: Why it failed.
        setback: What went wrong in the last attempt that ended without an answer; "" if nothing did.
    """

    new: NewJob
    status: JobStatus
    attempt: int = 0
    failures: int = 0
    created_at: float = 0.0
    started_at: float | None = None
    ended_at: float | None = None
    retry_at: float = 0.0
    position: int | None = None
    chunks: int = 0
    size_bytes: int = 0
    worker: str = ""
    claim: str = ""
    error: JobError | None = None
    setback: str = ""

    @property
    def id(self) -> str:
        """Its id."""
        return self.new.id

    @property
    def expires_at(self) -> float | None:
        """Deadline after which it is given up unless it has ended, or None."""
        return None if self.new.expires_s is None else self.created_at + self.new.expires_s


@valueclass(frozen=True, slots=True)
class Chunk:
    """A part of a job's answer: complete chat events, as bytes.

    Attributes:
        number: From 0, without gaps, across attempts.
        attempt: The attempt that wrote it.
        restarts: Whether the answer starts over with this chunk, which invalidates all before it.
        data: Server-sent events.
    """

    number: int
    attempt: int
    data: bytes
    restarts: bool = False


def size_of(chunks: Iterable[Chunk]) -> int:
    """Return the bytes of an answer."""
    return sum(len(chunk.data) for chunk in chunks)


@valueclass(frozen=True, slots=True)
class Quota:
    """Limits per API key.

    Attributes:
        queued_max: Maximum number of jobs that are queued or running.
        bytes_max: Maximum total bytes of jobs and results.
    """

    queued_max: int = 10_000
    bytes_max: int = 1024 * 1024 * 1024


class Refusal(StrEnum):
    """Why a job was not accepted. A closed set: error codes."""

    TOO_MANY_JOBS = "too_many_jobs"
    TOO_MANY_BYTES = "too_many_bytes"
    IDEMPOTENCY_KEY_REUSED = "idempotency_key_reused"  # with another body


def lane_of(model: str, traffic_class: str) -> str:
    """Return the name of the lane in which the jobs of a class are queued."""
    return f"{model}/{traffic_class}"


def model_and_class(lane: str) -> tuple[str, str]:
    """Return the names of a lane's model, which may contain slashes, and of its class."""
    model, _, traffic_class = lane.rpartition("/")
    return model, traffic_class


@valueclass(frozen=True, slots=True)
class Lane:
    """The state of a lane.

    Attributes:
        name: Of its model and class: see `lane_of`.
        queued: Number of queued jobs.
        in_progress: Number of claimed jobs.
        oldest_s: Age of the oldest queued job, by the store's clock; None if there is none.
        drain_per_s: Recent rate of ended jobs per second; None if unknown.
        is_worked: Whether a worker that serves the lane's model is running.
    """

    name: str
    queued: int
    in_progress: int
    oldest_s: float | None = None
    drain_per_s: float | None = None
    is_worked: bool = True


class JobOutcome(StrEnum):
    """How a job ended, for counting. A closed set: used as a metric label."""

    COMPLETED = "completed"
    INCOMPLETE = "incomplete"
    FAILED = "failed"  # for any reason other than the last two
    CANCELLED = "cancelled"
    EXPIRED = "expired"  # its deadline passed
    POISONED = "poisoned"  # too many attempts failed


@valueclass(frozen=True, slots=True)
class Queue:
    """The jobs of all processes that have not ended.

    Attributes:
        lanes: Every lane with jobs that are queued or in progress.
        drained_at: Since when an operator has paused the queue, in epoch seconds; None: it is not paused.
        at: The time, by the clock that all times of jobs are taken from: the store's. Epoch seconds.
    """

    lanes: tuple[Lane, ...] = ()
    drained_at: float | None = None
    at: float = 0.0

    @property
    def open_lanes(self) -> tuple[Lane, ...]:
        """The lanes from which workers are given jobs: none of a paused queue."""
        return self.lanes if self.drained_at is None else ()


@valueclass(frozen=True, slots=True)
class QueueSnapshot:
    """The latest snapshot of the queue.

    Attributes:
        queue: Its lanes, and whether it is paused.
        is_away: Whether the store did not respond, and the other values are older; or refuses to write.
        totals: Total number of ended jobs per (lane, outcome); see `JobStore.totals`.
        at: When the store last responded, monotonic seconds; None if it never has: then all but `is_away` is
            unknown.
    """

    queue: Queue = Queue()
    is_away: bool = False
    totals: Mapping[tuple[str, str], int] = field(default_factory=dict)
    at: float | None = None


@valueclass(frozen=True, slots=True)
class Serving:
    """What a process can run.

    Attributes:
        config: Identifies its configuration.
        models: All names and aliases of its models.
    """

    config: str
    models: frozenset[str]

    def has(self, lane: str) -> bool:
        """Return whether it serves the model of a lane."""
        return model_and_class(lane)[0] in self.models


ELSEWHERE = "elsewhere"
"""The class of lanes for jobs that were accepted for other processes, whose classes are unknown here."""


class AfterRefusal(StrEnum):
    """What happens to a job that its worker's configuration cannot run."""

    LEFT = "left"  # to workers with another configuration that has not refused it
    FAILED = "failed"  # there are none; counts as a failure, and is retried
    ENDED = "ended"  # the same, for the last time


class Beginning(StrEnum):
    """How an attempt at a job began."""

    NEW = "new"  # there was no answer yet
    CONTINUED = "continued"  # continuing the stored text
    RESTARTED = "restarted"  # starting over: the stored answer is invalid


class AttemptOutcome(StrEnum):
    """How an attempt at a job ended."""

    ENDED = "ended"  # the job is final
    FAILED = "failed"  # counts as a failure, and the job is retried
    POISONED = "poisoned"  # the same, for the last time
    RETURNED = "returned"  # requeued without a failure: no backend, no slot, or its worker was stopped
    LOST = "lost"  # the job was cancelled, deleted, expired, or taken over by another worker


@valueclass(frozen=True, slots=True)
class AttemptEnd:
    """A finished attempt at a job.

    Attributes:
        job: The job as claimed.
        outcome: How the attempt ended.
        beginning: How it began.
        took_s: Seconds since the claim.
        status: The job's final status, if it has ended.
        error: Why the job failed, if it has.
    """

    job: Job
    outcome: AttemptOutcome
    beginning: Beginning
    took_s: float
    status: JobStatus | None = None
    error: JobError | None = None

    @property
    def waited_s(self) -> float:
        """Seconds from the job's acceptance to this claim."""
        return max(0.0, (self.job.started_at or self.job.created_at) - self.job.created_at)

    @property
    def lasted_s(self) -> float:
        """Seconds from the job's acceptance to the end of this attempt."""
        return self.waited_s + self.took_s


def expected_start_s(position: int | None, lane: Lane | None, away_s: float | None) -> float | None:
    """Return the seconds until a job at that position starts; None if unknown.

    `away_s`: seconds until a backend can serve the lane, if a box runs another model; None if no swap back is
    planned. The rate at which jobs end says nothing of a job that has the lane for itself: it waits for none.
    """
    if position is None or lane is None or away_s is None:
        return None
    if not lane.drain_per_s or lane.queued + lane.in_progress <= 1:
        return away_s or None
    return away_s + position / lane.drain_per_s
