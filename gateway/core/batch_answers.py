"""What a batch's line got once its job has ended: status and body, as the request would have had. Pure."""

import json
from collections.abc import Iterable
from typing import Any

from gateway.core.jobs import Chunk, Job, JobStatus
from gateway.core.naming import ModelNames
from gateway.core.quirks import AssemblingReader
from gateway.core.responses.replay import JobFacts, Replay
from gateway.core.sse import DONE

RESPONSES = "/v1/responses"
_POISONED, _EXPIRED = "job_poisoned", "job_expired"
_STATUSES = {_POISONED: 502, "model_not_found": 404, "request_too_large": 413}


def answer_of(endpoint: str, job: Job, chunks: Iterable[Chunk]) -> tuple[int, bytes] | None:
    """Return status and body of what a job that has ended answers; None: it has no answer, and no verdict.

    Args:
        endpoint: The batch's.
        job: The job, final.
        chunks: All of its answer.
    """
    match job.status:
        case JobStatus.CANCELLED:
            return None
        case JobStatus.FAILED:
            return _refusal(job)
    if endpoint == RESPONSES:
        replay = Replay(JobFacts.of(job))
        replay.tell(job, chunks)
        return 200, _encoded({**replay.response, "created_at": int(job.created_at)})
    return 200, _completion(job, chunks)


def _refusal(job: Job) -> tuple[int, bytes] | None:
    if job.error is None or job.error.code == _EXPIRED:
        return None
    status = _STATUSES.get(job.error.code, 400)
    kind = "invalid_request_error" if status < 500 else "server_error"
    return status, error_body(job.error.message, kind, None, job.error.code)


def unreadable() -> tuple[int, bytes]:
    """Return status and body where the answer is none."""
    return 502, error_body("The answer cannot be read.", "server_error", None, "upstream_failed")


def error_body(message: str, kind: str, param: str | None, code: str) -> bytes:
    """Return the body of an error, in the shape that OpenAI clients read."""
    return _encoded({"error": {"message": message, "type": kind, "param": param, "code": code}})


def _completion(job: Job, chunks: Iterable[Chunk]) -> bytes:
    request = json.loads(job.new.body)
    model = str(request.get("model"))
    reader = _reader(request, model)
    for chunk in chunks:
        if chunk.restarts:
            reader = _reader(request, model)
        reader.feed(chunk.data.replace(DONE, b""))
    answer = json.loads(reader.whole())
    named = {"id": f"chatcmpl-{job.id.removeprefix('resp_')}", "created": int(job.created_at)}
    return _encoded({**answer, **named})


def _reader(request: Any, model: str) -> AssemblingReader:
    return AssemblingReader((), choices=request.get("n") or 1, names=ModelNames(model, model))


def _encoded(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
