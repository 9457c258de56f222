"""The parts of a gateway that concern jobs: built together from the configuration, or not at all.

A gateway without jobs does not even import this module.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from anyio.abc import TaskGroup

from gateway.clock import SystemClock
from gateway.core.jobs import AttemptEnd, Job, JobPriority, Quota, lane_of, model_and_class
from gateway.core.policy import Policy
from gateway.core.request import Endpoint
from gateway.core.responses.replay import JobFacts
from gateway.core.trace import parse
from gateway.downstream import wire
from gateway.downstream.background import Background, JobRules
from gateway.downstream.batches import Batching
from gateway.downstream.files import FileRules
from gateway.downstream.reading import Received
from gateway.downstream.serving import new_request_id
from gateway.downstream.wire import WireRules
from gateway.jobs import BatchRules, BatchRunner, QueueWatch, Revocations, Worker, WorkerRules
from gateway.jobs.batches import ReadLine
from gateway.pipeline import JobQuestions, Pipeline
from gateway.ports import Arrival, Recorder
from gateway.settings import Settings
from gateway.settings.sections.service import JobsSection
from gateway.store.batches import RedisBatches
from gateway.store.files import RedisFiles
from gateway.store.jobs import RedisJobs
from gateway.telemetry import logs
from gateway.telemetry.job_metrics import JobMetrics
from gateway.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from gateway.telemetry.tracing import Tracing


class JobParts:
    """What a gateway with jobs has besides.

    Attributes:
        store: Where jobs are kept.
        revocations: What was submitted, but must not run.
        background: Accepts jobs, and shows them to their callers.
        batching: The stores of batches and files, and their rules.
        worker: Runs jobs; None if this process runs none.
    """

    def __init__(
        self,
        settings: Settings,
        name: str,
        store: RedisJobs,
        *,
        policy: Callable[[], Policy],
        pipeline: Pipeline,
        questions: JobQuestions,
        away_s: Callable[[str], float | None],
        read_line: ReadLine,
        rules: WireRules,
        recorder: Recorder,
        metrics: Metrics,
        tracing: "Tracing | None",
        clock: SystemClock,
    ) -> None:
        """Build them for the process `name`, whose settings have jobs; these are kept in `store`.

        `away_s`: see `CallersJobs`. `read_line`, `rules`: what reads lines of batches, and jobs.
        """
        section, place = settings.document.jobs, settings.jobs_store
        assert section is not None and place is not None
        batches = RedisBatches(place.url, prefix=place.prefix)
        files = RedisFiles(place.url, prefix=place.prefix)
        self.store = store
        self.revocations = Revocations()
        self.background = Background(
            store,
            pipeline,
            questions,
            _rules(section),
            clock,
            away_s,
            recorder,
            partial(self.revocations.add, store=store),
        )
        self.batching = Batching(
            batches,
            files,
            FileRules(
                section.batches.file_bytes_max_per_key,
                section.batches.file_keep_s,
                settings.document.requests.body_timeout_s,
            ),
            partial(self.revocations.add, store=batches),
        )
        self._batch_runner = BatchRunner(
            batches, files, store, read_line, BatchRules(queued_max=section.batches.queued_max_per_key)
        )
        self._queue = QueueWatch(store, clock)
        job_metrics = JobMetrics(
            metrics.registry,
            lanes=lambda: [lane_of(model.id, one.name) for model, one in policy().classes()],
            snapshot=lambda: self._queue.snapshot,
            now=clock.now,
        )

        def attempt_ended(end: AttemptEnd) -> None:
            logs.job_attempt_ended(end)
            job_metrics.attempt_ended(end)

        self.worker: Worker | None = None
        if settings.works_jobs:
            self.worker = Worker(
                store,
                name,
                partial(_read, rules, tracing, clock),
                pipeline.run,
                WorkerRules(
                    running_max=section.running_max,
                    attempts_max=section.attempts_max,
                    continues=section.resume == "continue",
                ),
                questions.serving,
                questions.tokens_of,
                questions.can_run_lane,
                attempt_ended,
            )

    @property
    def store_answers(self) -> bool:
        """Whether the store has answered when it was last asked for its queue."""
        return self._queue.snapshot is not None and not self._queue.snapshot.is_away

    def at_work(self) -> Sequence[RedisJobs | QueueWatch | Revocations | Worker | BatchRunner]:
        """Return the parts that run while the gateway serves."""
        workers = () if self.worker is None else (self.worker,)
        return (self.store, self._queue, self.revocations, *workers, self._batch_runner)

    def stop_in(self, tasks: TaskGroup) -> None:
        """Have jobs and batches that run here returned, in tasks that end when they are."""
        for part in (self._batch_runner, self.worker):
            if part is not None:
                tasks.start_soon(part.stop)

    async def aclose(self) -> None:
        """Close the connections to the store."""
        await self.store.aclose()
        await self.batching.batches.aclose()
        await self.batching.files.aclose()


def _rules(section: JobsSection) -> JobRules:
    return JobRules(
        quota=Quota(section.queued_max_per_key, section.bytes_max_per_key),
        keep_s=section.keep_s,
        unstored_keep_s=section.unstored_keep_s,
        priorities={name: JobPriority(written) for name, written in section.priorities.items()},
    )


def _read(
    rules: WireRules, tracing: "Tracing | None", clock: SystemClock, job: Job, body: bytes
) -> wire.WireRequest:
    """Return the request for a job's chat body.

    Raises:
        CallerError: it is invalid.
    """
    facts = JobFacts.of(job)
    trace = None if tracing is None else tracing.begin(None, parse(facts.trace))
    arrival = Arrival(
        new_request_id(), clock.wall(), clock.now(), trace, job=job.id, is_awaited=facts.is_awaited
    )
    found = wire.read(Endpoint.CHAT, Received(arrival, body, job.new.key, facts.headers, ()), rules)
    queued_s = 0.0 if job.started_at is None else max(0.0, job.started_at - job.created_at)
    _, traffic_class = model_and_class(job.new.lane)
    request = replace(found.request, is_job=True, queued_s=queued_s, handed_over_as=traffic_class)
    return replace(found, request=request)
