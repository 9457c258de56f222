"""Background jobs: requests are submitted to the store, whose workers run them."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import field, replace

from gateway.core.decision import Decision
from gateway.core.errors import (
    IdempotencyKeyReused,
    InvalidRequest,
    JobBytesFull,
    JobRefused,
    StoreUnavailable,
)
from gateway.core.idempotency import Idempotency
from gateway.core.jobs import Job, JobPriority, NewJob, Quota, Refusal, lane_of, model_and_class
from gateway.core.request import Changes, Estimate
from gateway.core.responses.replay import JobFacts
from gateway.core.usage import Ending, RequestRecord
from gateway.core.value import valueclass
from gateway.downstream.callers_jobs import CallersJobs
from gateway.downstream.reading import arrival_record
from gateway.events import about
from gateway.pipeline import JobQuestions, Pipeline
from gateway.ports import Clock, Headers, Incoming, JobStore, Recorder
from gateway.threads import decoded

log = logging.getLogger("gateway.jobs")

STREAMED: Changes = {("stream",): True, ("stream_options",): {"include_usage": True}}
"""What makes a chat that of a job: its answer is streamed, with usage."""

PRIORITY_HEADER = "x-gateway-priority"
EXPIRES_HEADER = "x-gateway-expires-s"

_SECRETS = frozenset({"key", "token", "secret", "password", "authorization", "credential", "credentials"})
"""Last words of names of headers that hold credentials, such as `x-api-key` and `x-amz-security-token`."""

_HEADERS_KEPT = 32
_HEADER_CHARS_KEPT = 256
"""Maximum headers of a request that are kept with a job, and characters of each. A choice that bounds what
the store keeps."""


@valueclass(frozen=True, slots=True)
class JobRules:
    """Limits for jobs.

    Attributes:
        quota: Per API key.
        keep_s: How long a result is kept after the job's end; unstored_keep_s: the same if `store` is false.
        priorities: Priorities per API key, where not normal.
    """

    quota: Quota = field(default_factory=Quota)
    keep_s: float = 86_400.0
    unstored_keep_s: float = 600.0
    priorities: Mapping[str, JobPriority] = field(default_factory=dict)


class Background:
    """Submits jobs on behalf of callers; one per process.

    Attributes:
        jobs: The jobs, for their callers.
        questions: What is to be known before a job is submitted.
    """

    def __init__(
        self,
        jobs: JobStore,
        pipeline: Pipeline,
        questions: JobQuestions,
        rules: JobRules,
        clock: Clock,
        away_s: Callable[[str], float | None],
        recorder: Recorder,
        revoke: Callable[[str], None],
    ) -> None:
        """Submit jobs to `jobs`, placed as `pipeline` would place them; report each to `recorder`.

        `away_s`: see `CallersJobs`. `revoke`: makes sure that a job never runs; see `Revocations.add`.
        """
        self.questions = questions
        self.revoke = revoke
        self.jobs = CallersJobs(jobs, clock, away_s)
        self._recorder = recorder
        self._store = jobs
        self._pipeline = pipeline
        self._rules = rules
        self._clock = clock

    async def submit(
        self,
        incoming: Incoming,
        facts: JobFacts,
        *,
        id: str,
        store: bool,
        idempotency_key: str | None,
        route: str,
        body: bytes,
        estimate: Estimate | None = None,
        replaces: bool = False,
        status: int = 200,
    ) -> tuple[Job, JobFacts | None]:
        """Submit a request as a job. Return it, and its facts unless it existed before under the same key.

        `replaces`: whether it takes the place of a job under that key which has failed or was cancelled.
        `status`: the HTTP status for its caller, as far as it is known now.

        Raises:
            CallerError: no backend could ever take it, a header is invalid, or the idempotency key belongs to
                another body.
            ShedError: its tokens cannot be counted at the moment.
            JobRefused: its API key has as many jobs as it may have.
            JobBytesFull: its API key has as many bytes of jobs as it may have.
            StoreUnavailable: with an idempotency key, it may have been accepted or not: retry with that key.
                Without one, it is revoked.
        """
        request = incoming.request
        decision = await self._pipeline.decision_for(incoming, estimate)
        decided_at = self._clock.now()
        if (trace := incoming.arrival.trace) is not None:
            facts = replace(facts, trace=trace.own.traceparent)

        def new_job() -> tuple[NewJob, Idempotency | None]:
            job = NewJob(
                id=id,
                key=request.key,
                lane=lane_of(decision.model, decision.traffic_class),
                body=incoming.body_for(request.model, STREAMED),
                facts=facts.encoded(),
                priority=self._priority(request.key, request.headers),
                keep_s=self._rules.keep_s if store else self._rules.unstored_keep_s,
                expires_s=_expires_s(request.headers),
            )
            return job, Idempotency.of(idempotency_key, route, body)

        new, idempotency = await decoded(incoming.size_bytes, new_job)
        try:
            found = await self._store.submit(new, self._rules.quota, idempotency, replaces=replaces)
        except StoreUnavailable:
            if idempotency is None:  # nobody could find it
                self.revoke(id)
            raise
        match found:
            case Refusal.IDEMPOTENCY_KEY_REUSED:
                raise IdempotencyKeyReused()
            case Refusal.TOO_MANY_JOBS:
                message = "This API key has reached its limit of jobs waiting or running."
                raise JobRefused(message, code=found.value, retry_after_s=30)
            case Refusal.TOO_MANY_BYTES:
                raise JobBytesFull()
        if found.id == id:
            log.debug(
                "job %s: accepted, %s, %s",
                id,
                new.lane,
                new.priority.value,
                extra=about("job_accepted", id=id, lane=new.lane, priority=new.priority.value),
            )
        self._recorder.finished(_record(incoming, decision, found.id, status, decided_at, self._clock.now()))
        return found, facts.as_accepted(found) if found.id == id else None

    async def is_served_elsewhere(self, model: str) -> bool:
        """Return whether processes with a different configuration run jobs of a model."""
        return await self._store.is_served_elsewhere(model, self.questions.serving().config)

    def _priority(self, key: str | None, headers: Mapping[str, str]) -> JobPriority:
        """Return the priority of a key's jobs. A caller may lower it, never raise it."""
        most = self._rules.priorities.get(key or "", JobPriority.NORMAL)
        asked = headers.get(PRIORITY_HEADER)
        if asked is None:
            return most
        if asked not in list(JobPriority):
            known = ", ".join(JobPriority)
            raise InvalidRequest(f"`{PRIORITY_HEADER}` must be one of {known}.", param=PRIORITY_HEADER)
        order = list(JobPriority)
        return max(most, JobPriority(asked), key=order.index)


def _expires_s(headers: Mapping[str, str]) -> float | None:
    written = headers.get(EXPIRES_HEADER)
    if written is None:
        return None
    try:
        expires_s = float(written)
    except ValueError:
        expires_s = -1.0
    if not 0 < expires_s <= 30 * 86_400:
        raise InvalidRequest(
            f"`{EXPIRES_HEADER}` must be a number of seconds, at most 30 days.", param=EXPIRES_HEADER
        )
    return expires_s


def _record(
    incoming: Incoming, decision: Decision, job: str, status: int, decided_at: float, now: float
) -> RequestRecord:
    """Return the record of a request that was submitted as the job `job`."""
    request = incoming.request
    record = arrival_record(incoming.arrival, request.key, Ending.HANDED_OVER, status, "", now)
    return replace(
        record,
        model=request.model,
        stream=request.stream,
        estimated_at=decided_at,
        decision=decision,
        job=job,
    )


def handover_headers(request: Incoming, job: Job, estimate: Estimate | None = None) -> Headers:
    """Return the headers of the answer to a request that became a job: they describe the decision."""
    headers = [(b"x-request-id", request.arrival.id.encode()), *job_headers(job)]
    if estimate is not None:
        headers.append((b"x-gateway-prompt-tokens", str(estimate.tokens).encode()))
    if request.dropped:
        headers.append((b"x-gateway-dropped", ", ".join(request.dropped).encode()))
    return headers


def job_headers(job: Job) -> Headers:
    """Return the headers that name a job and its class."""
    _, traffic_class = model_and_class(job.new.lane)
    return [(b"x-gateway-class", traffic_class.encode()), (b"x-gateway-job", job.id.encode())]


def headers_kept(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers that are stored with a job: site-specific ones, without credentials."""
    own = {
        name: value
        for name, value in headers.items()
        if name.startswith("x-")
        and len(name) + len(value) <= _HEADER_CHARS_KEPT
        and name.rpartition("-")[2] not in _SECRETS
    }
    return dict(list(own.items())[:_HEADERS_KEPT])
