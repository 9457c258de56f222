"""Jobs: requests that are handed over, and whose answers are fetched later.

    submitted -> QUEUED -> IN_PROGRESS -> COMPLETED | INCOMPLETE | FAILED
                   |            |
                   +------------+------> CANCELLED

A job is kept as the chat request that a backend will get, and its answer as the chat events that a backend
sent, numbered. What a caller sees of either (a Responses object, its events, a chat completion) is computed
from these, so it is the same after a restart and on every gateway.

A job is *claimed* by a worker. The claim carries the number of the attempt; everything a worker writes names
it, and is refused once another worker has the job, or once it has ended. So a job may be started more than
once, but ends once: a final status never changes.

Pure: times are arguments, in epoch seconds of the store's clock.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from gateway.core.idempotency import fingerprint, read_key


class JobStatus(StrEnum):
    """Where a job stands; OpenAI's words."""

    QUEUED = "queued"
    IN_PROGRESS = "in_progress"
    COMPLETED = "completed"
    INCOMPLETE = "incomplete"  # the answer reached its length, or was cut
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        """Whether it never changes again."""
        return self not in (JobStatus.QUEUED, JobStatus.IN_PROGRESS)


class JobPriority(StrEnum):
    """Which of the jobs in one lane goes first. Equal ones go in the order in which they came."""

    HIGH = "high"
    NORMAL = "normal"
    BATCH = "batch"  # lines of batches: when nothing else waits


@dataclass(frozen=True, slots=True)
class NewJob:
    """A job to be accepted.

    Attributes:
        id: `resp_...`, unguessable.
        key: Name of the API key it belongs to; None where the gateway has none.
        lane: What it queues for: the model's id and the class, as "model/class". Lanes do not wait for
            each other.
        priority: See `JobPriority`.
        body: The chat request as it will be sent, JSON; `stream` is true in it.
        facts: What the views of it need beside that (what to echo, which view it was asked for), JSON.
        keep_s: How long its result is kept after its end.
        expires_s: After this long it is worthless unless it has ended; None: never.
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
        """Bytes it keeps in the store before it has any answer."""
        return len(self.body) + len(self.facts)


@dataclass(frozen=True, slots=True)
class JobError:
    """Why a job failed: `code` as in the error envelope, and a sentence for its owner."""

    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Job:
    """A job as the store knows it.

    Attributes:
        new: What was handed over.
        status: Where it stands.
        attempt: How often it has been claimed: the number that its worker's writes must name.
        failures: How many of those ended by themselves: the worker died, or the backend with it.
        created_at: When it was accepted; `started_at`: when last claimed; `ended_at`: when it became final.
            Epoch seconds of the store's clock.
        retry_at: It is not claimed before this.
        position: Its place among those that wait in its lane, 1 being next; None unless queued.
        chunks: Chunks of its answer that are stored.
        size_bytes: Bytes that it and its answer keep in the store.
        worker: Who has it, or had it last.
        claim: What tells the last claim from every other, also from one that the store has forgotten since.
        error: Why it failed.
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

    @property
    def id(self) -> str:
        """Its id."""
        return self.new.id

    @property
    def expires_at(self) -> float | None:
        """When it becomes worthless unless it has ended, or None."""
        return None if self.new.expires_s is None else self.created_at + self.new.expires_s


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a job's answer: whole chat events, as bytes.

    Attributes:
        number: From 0, without gaps, across attempts.
        attempt: The attempt it is of. A restarted answer (not continued) begins with a higher one, and makes
            all chunks of lower attempts void; see `restarts`.
        restarts: Whether the answer begins anew with this chunk.
        data: Server-sent events.
    """

    number: int
    attempt: int
    data: bytes
    restarts: bool = False


@dataclass(frozen=True, slots=True)
class Quota:
    """What one API key may have in the store.

    Attributes:
        queued_max: Jobs that wait or run.
        bytes_max: Bytes of jobs and results together.
    """

    queued_max: int = 10_000
    bytes_max: int = 1024 * 1024 * 1024


class Refusal(StrEnum):
    """Why a job was not accepted. Few and fixed: error codes."""

    TOO_MANY_JOBS = "too_many_jobs"
    TOO_MANY_BYTES = "too_many_bytes"
    IDEMPOTENCY_KEY_REUSED = "idempotency_key_reused"  # with another body


@dataclass(frozen=True, slots=True)
class Idempotency:
    """A caller's promise that equal keys mean the same request.

    Attributes:
        key: As the caller gave it.
        route: Where it was used.
        fingerprint: Hash of the body.
    """

    key: str
    route: str
    fingerprint: str

    @classmethod
    def of(cls, written: str | None, route: str, body: bytes) -> "Idempotency | None":
        """Return what the header of a request promises, or None where it has none.

        Raises:
            InvalidRequest: it is no key.
        """
        return None if written is None else cls(read_key(written), route, fingerprint(body))


@dataclass(frozen=True, slots=True)
class Lane:
    """What waits in a lane.

    Attributes:
        name: "model/class".
        queued: Jobs that wait.
        in_progress: Jobs that workers have.
        oldest_s: How long ago the oldest that waits was accepted, by the store's clock; None: nothing waits.
        drain_per_s: Jobs that ended per second lately, or None while that is not known.
    """

    name: str
    queued: int
    in_progress: int
    oldest_s: float | None = None
    drain_per_s: float | None = None


class JobOutcome(StrEnum):
    """How a job ended, as it is counted. Few and fixed: each is a metric label."""

    COMPLETED = "completed"
    INCOMPLETE = "incomplete"
    FAILED = "failed"  # for any other reason than the last two
    CANCELLED = "cancelled"
    EXPIRED = "expired"  # its time was over
    POISONED = "poisoned"  # too many attempts at it had failed


@dataclass(frozen=True, slots=True)
class QueueSight:
    """What a process saw of the queue when it last looked.

    Attributes:
        lanes: Those that have jobs.
        drained_at: Since when workers take no jobs, by an operator's order; None: they do.
        is_away: Whether the store did not answer; the rest is what it had said before.
        totals: How many jobs have ever ended, per (lane, outcome); see `JobStore.totals`.
        at: When the store last answered, monotonic seconds.
    """

    lanes: tuple[Lane, ...] = ()
    drained_at: float | None = None
    is_away: bool = False
    totals: Mapping[tuple[str, str], int] = field(default_factory=dict)
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class Serving:
    """What a process can run.

    Attributes:
        config: Tells its configuration from others, in a word; "" where it does not say.
        models: All names that its models answer to.
    """

    config: str
    models: frozenset[str]

    def has(self, lane: str) -> bool:
        """Return whether it has the model of a lane."""
        return lane.rpartition("/")[0] in self.models


ELSEWHERE = "elsewhere"
"""The class of a lane whose jobs were accepted for others: for a process that does not know what they are."""


class Refused(StrEnum):
    """What becomes of a job that its worker's configuration does not let it run."""

    LEFT = "left"  # to those who have another configuration and have not refused it
    FAILED = "failed"  # there are none; it counts against the job, which is tried again
    ENDED = "ended"  # the same, for the last time


class Beginning(StrEnum):
    """What an attempt at a job began with."""

    NEW = "new"  # there was no answer yet
    CONTINUED = "continued"  # from the text that was stored
    RESTARTED = "restarted"  # anew: what was stored is void


class AttemptOutcome(StrEnum):
    """What became of an attempt at a job."""

    ENDED = "ended"  # the job is final
    FAILED = "failed"  # it counts against the job, which is tried again
    POISONED = "poisoned"  # the same, for the last time
    RETURNED = "returned"  # given back at no cost: no backend, no place, or its worker was stopped
    LOST = "lost"  # the job was cancelled, deleted, has expired, or another worker has it


@dataclass(frozen=True, slots=True)
class AttemptEnd:
    """An attempt at a job that is over.

    Attributes:
        job: As it was claimed.
        outcome: What became of it.
        beginning: What it began with.
        took_s: Seconds since the claim.
        status: The job's final one, where it ended.
        error: Why the job failed, where it did.
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
    """Return in how many seconds a job at that place would start, or None where nothing is known.

    `away_s`: how long nobody who could serve the lane can be there, because a box runs another model; None
    while nothing brings one back.
    """
    if position is None or lane is None or away_s is None:
        return None
    if not lane.drain_per_s:
        return away_s or None
    return away_s + position / lane.drain_per_s
