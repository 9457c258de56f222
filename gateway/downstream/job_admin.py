"""Jobs for operators: list, inspect, cancel, retry, drain. Prompts and answers are never shown."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from litestar import MediaType, Request, Response, get, post
from litestar.handlers import BaseRouteHandler
from litestar.params import FromPath

from gateway.core.chat_jobs import job_id as id_for_chat
from gateway.core.errors import InvalidRequest, JobEnded, JobNotEnded, JobNotFound, RouteNotFound
from gateway.core.jobs import Job, JobStatus, Lane, Queue
from gateway.downstream.files import limit_of
from gateway.downstream.operator_json import indented
from gateway.events import about
from gateway.ports import JobStore

log = logging.getLogger("gateway.jobs")

PATH = "/admin/jobs"

LIMIT, LIMIT_MAX = 100, 1000
"""Jobs that are listed by default and at most. A choice: each is read from the store."""

_FILTERS = ("key", "lane", "limit", "status")


def job_handlers(jobs: JobStore | None) -> Sequence[BaseRouteHandler]:
    """Return the route handlers under `/admin/jobs`. `jobs` is None if there are no jobs."""
    return _Handlers(jobs).handlers()


class _Handlers:
    """State shared by the handlers."""

    def __init__(self, jobs: JobStore | None) -> None:
        self._kept = jobs

    def handlers(self) -> Sequence[BaseRouteHandler]:

        @get(PATH)
        async def jobs(request: Request[Any, Any, Any]) -> Response[bytes]:
            return _json(await self._overview(list(request.query_params.multi_items())))

        @get(f"{PATH}/{{job_id:str}}")
        async def job(job_id: FromPath[str]) -> Response[bytes]:
            job_id = _own_id(job_id)
            return await self._shown(await self._jobs.get(job_id), job_id)

        @post(f"{PATH}/{{job_id:str}}/cancel", status_code=200)
        async def cancel(job_id: FromPath[str]) -> Response[bytes]:
            job_id = _own_id(job_id)
            found = await self._jobs.cancel(job_id)
            if found is not None and found.status is JobStatus.CANCELLED:
                log.info(
                    "an operator cancelled job %s", job_id, extra=about("operator_cancelled_job", id=job_id)
                )
            return await self._shown(found, job_id)

        @post(f"{PATH}/{{job_id:str}}/retry", status_code=200)
        async def retry(job_id: FromPath[str]) -> Response[bytes]:
            job_id = _own_id(job_id)
            found = await self._jobs.get(job_id)
            if found is not None:
                if found.status not in {JobStatus.FAILED, JobStatus.CANCELLED}:
                    kind = JobEnded if found.status.is_final else JobNotEnded
                    raise kind(
                        f"The job is {found.status.value}: only failed and cancelled ones can be retried."
                    )
                found = await self._jobs.retry(job_id)
            if found is not None:
                log.info("an operator retried job %s", job_id, extra=about("operator_retried_job", id=job_id))
            return await self._shown(found, job_id)

        @post(f"{PATH}/drain", status_code=200)
        async def drain() -> Response[bytes]:
            return _json(await self._drained(True))

        @post(f"{PATH}/undrain", status_code=200)
        async def undrain() -> Response[bytes]:
            return _json(await self._drained(False))

        return (jobs, job, cancel, retry, drain, undrain)

    @property
    def _jobs(self) -> JobStore:
        if self._kept is None:
            raise RouteNotFound("This gateway has no `jobs` in its configuration.")
        return self._kept

    async def _overview(self, query: Sequence[tuple[str, str]]) -> Mapping[str, Any]:
        for name, _ in query:
            if name not in _FILTERS:
                raise InvalidRequest(f"Jobs can be filtered by {', '.join(_FILTERS)}.", param=name)
        asked = dict(query)
        found = await self._jobs.find(
            key=asked.get("key"),
            status=_status(asked.get("status")),
            lane=asked.get("lane"),
            limit=limit_of(asked, LIMIT, LIMIT_MAX),
        )
        queue = await self._jobs.queue()
        return {
            **_drain_view(queue),
            "lanes": [lane_view(lane) for lane in sorted(queue.lanes, key=lambda lane: lane.name)],
            "jobs": [job_view(job, queue.at) for job in found],
        }

    async def _drained(self, is_drained: bool) -> Mapping[str, Any]:
        await self._jobs.drain(is_drained)
        return _drain_view(await self._jobs.queue())

    async def _shown(self, job: Job | None, job_id: str) -> Response[bytes]:
        if job is None:
            raise JobNotFound(f"There is no job {job_id[:100]}.")
        return _json(job_view(job, (await self._jobs.queue()).at))


def _drain_view(queue: Queue) -> Mapping[str, Any]:
    return {"drained": queue.drained_at is not None, "drained_for_s": _ago(queue.drained_at, queue.at)}


def lane_view(lane: Lane) -> Mapping[str, Any]:
    """Return a lane as JSON."""
    return {
        "lane": lane.name,
        "queued": lane.queued,
        "in_progress": lane.in_progress,
        "oldest_wait_s": None if lane.oldest_s is None else round(lane.oldest_s, 1),  # by the store's clock
        "drain_per_s": None if lane.drain_per_s is None else round(lane.drain_per_s, 4),
    }


def job_view(job: Job, now: float) -> Mapping[str, Any]:
    """Return a job as JSON; times in epoch seconds, like `now`, by the store's clock."""
    until = job.ended_at if job.ended_at is not None else now
    is_running = job.status is JobStatus.IN_PROGRESS
    return {
        "id": job.id,
        "status": job.status.value,
        "lane": job.new.lane,
        "priority": job.new.priority.value,
        "key": job.new.key,
        "batch": job.new.batch or None,
        "position": job.position,
        "attempts": job.attempt,
        "failures": job.failures,
        "setback": job.setback or None,
        "worker": job.worker or None,
        "created_at": job.created_at,
        "started_at": job.started_at,
        "ended_at": job.ended_at,
        "age_s": _ago(job.created_at, now),
        "total_s": _ago(job.created_at, until),
        "running_s": _ago(job.started_at, now) if is_running else None,
        "rests_s": _ago(now, job.retry_at) if job.retry_at > now else None,
        "expires_in_s": None if job.expires_at is None or job.status.is_final else _ago(now, job.expires_at),
        "chunks": job.chunks,
        "bytes": job.size_bytes,
        "error": None if job.error is None else {"code": job.error.code, "message": job.error.message},
    }


def _own_id(written: str) -> str:
    """Return the id of a job. That of its chat completion names it, too."""
    return id_for_chat(written) or written


def _ago(then: float | None, now: float) -> float | None:
    return None if then is None else round(max(0.0, now - then), 1)


def _status(written: str | None) -> JobStatus | None:
    if written is not None and written not in list(JobStatus):
        raise InvalidRequest(f"`status` must be one of {', '.join(JobStatus)}.", param="status")
    return None if written is None else JobStatus(written)


def _json(view: Mapping[str, Any]) -> Response[bytes]:
    return Response(indented(view), media_type=MediaType.JSON)
