"""The result of a batch's line after its job has ended: status and body, as for a single request. Pure."""

import json
from collections.abc import Sequence

from gateway.core.chat_jobs import failure, whole
from gateway.core.errors import GatewayError, JobExpired, UpstreamFailed
from gateway.core.jobs import Chunk, Job, JobStatus
from gateway.core.responses.replay import JobFacts, Replay

RESPONSES = "/v1/responses"


def answer_of(endpoint: str, job: Job, chunks: Sequence[Chunk]) -> tuple[int, bytes] | None:
    """Return status and body for an ended job; None: it has neither an answer nor an error for it.

    Args:
        endpoint: The batch's endpoint.
        job: The job, final.
        chunks: All chunks of its answer.
    """
    error = failure(job)
    if job.status is JobStatus.CANCELLED or isinstance(error, JobExpired):
        return None
    if error is not None:
        return refusal(error)
    if endpoint != RESPONSES:
        return 200, whole(job, chunks)
    replay = Replay(JobFacts.of(job))
    replay.tell(job, chunks)
    return 200, _encoded(replay.response)


def refusal(error: GatewayError) -> tuple[int, bytes]:
    """Return status and body of an error in OpenAI's shape."""
    said = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    return error.status, _encoded({"error": said})


def unreadable() -> tuple[int, bytes]:
    """Return status and body for an invalid answer."""
    return refusal(UpstreamFailed("The answer cannot be read."))


def _encoded(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
