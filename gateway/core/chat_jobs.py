"""A job as a chat completion: complete, as a stream, or as an error. Pure.

The store has what backends sent, possibly in several attempts. This assembles the answer that a single engine
would have given, with the job's id and time, identical for every reader.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gateway.core.errors import (
    NOT_AGAIN,
    CallerError,
    ContextExceeded,
    GatewayError,
    JobCancelled,
    JobExpired,
    JobPoisoned,
    ModelNotFound,
)
from gateway.core.job_answers import INVALID_EVENT, choices, current, events
from gateway.core.jobs import Chunk, Job, JobStatus
from gateway.core.naming import ModelNames
from gateway.core.quirks import AssemblingReader
from gateway.core.quirks.mending import encode
from gateway.core.sse import TOO_MANY

_JOB, _CHAT = "resp_", "chatcmpl-"
_FAILURES: Mapping[str, type[GatewayError]] = {
    kind.code: kind for kind in (ContextExceeded, ModelNotFound, JobExpired, JobPoisoned)
}
"""Classes of the errors that a job can end with, by code; any other is the caller's fault."""


def chat_id(job_id: str) -> str:
    """Return the id of the chat completion for a job."""
    return _CHAT + job_id.removeprefix(_JOB)


def job_id(chat_id: str) -> str | None:
    """Return the id of the job for a chat completion; None if no job can have it."""
    return _JOB + chat_id.removeprefix(_CHAT) if chat_id.startswith(_CHAT) else None


def whole(job: Job, chunks: Iterable[Chunk]) -> bytes:
    """Return the body of the chat completion for a finished job. Raises ValueError if there is none."""
    model = json.loads(job.new.body)["model"]
    reader = AssemblingReader((), choices=choices(job.new.body), names=ModelNames(model, model))
    for chunk in current(chunks):
        reader.feed(chunk.data)
    if reader.fault is TOO_MANY:
        raise ValueError(TOO_MANY.message)
    answer = json.loads(reader.whole())
    return encode({**answer, "id": chat_id(job.id), "created": int(job.created_at)})


def failure(job: Job) -> GatewayError | None:
    """Return the error of an ended job, for its waiting caller; None if it has an answer."""
    if job.status is JobStatus.CANCELLED:
        return JobCancelled("The request was cancelled.")
    if job.status is not JobStatus.FAILED:
        return None
    if job.error is None:
        return GatewayError("The job failed.")
    error = _FAILURES.get(job.error.code, CallerError)(job.error.message, param=job.error.param)
    error.code = job.error.code
    if not isinstance(error, CallerError):
        error.headers = NOT_AGAIN
    return error


class ChatReplay:
    """The stream of one job from its first event: takes stored chunks, returns bytes to send.

    Sent bytes cannot be taken back. So if the answer starts over, the stream breaks, unless nothing that is
    now invalid was sent.

    Attributes:
        chunks: Number of chunks processed; last: the last of them, or None.
        has_spoken: Whether anything was sent.
        is_broken: Whether the answer started over, or must, after something was sent: nothing more is
            returned.
    """

    def __init__(self, job: Job, *, include_usage: bool) -> None:
        """Start at the beginning. `include_usage`: the caller asked for the usage event."""
        self._id, self._created = chat_id(job.id), int(job.created_at)
        self._include_usage = include_usage
        self._roles: set[int] = set()  # choices whose role was sent; a continued answer repeats it
        self.chunks = 0
        self.last: Chunk | None = None
        self.has_spoken = False
        self.is_broken = False
        self._is_invalid = False  # the answer has an invalid event, so its worker starts it over

    def tell(self, chunks: Sequence[Chunk]) -> bytes:
        """Process further chunks; return the bytes to send, without the final `[DONE]`."""
        self.chunks += len(chunks)
        self.last = chunks[-1] if chunks else self.last
        if any(chunk.restarts for chunk in chunks):
            self.is_broken, self._is_invalid = self.has_spoken, False
        if self.is_broken or self._is_invalid:
            return b""
        try:
            data = b"".join([self._shown(event) for event in events(current(chunks))])
        except INVALID_EVENT:
            self.is_broken, self._is_invalid = self.has_spoken, True
            self._roles.clear()
            return b""
        self.has_spoken = self.has_spoken or bool(data)
        return data

    def _shown(self, event: Mapping[str, Any]) -> bytes:
        listed = event.get("choices") or []
        if not listed and event.get("usage") and not self._include_usage:
            return b""
        kept = [choice for choice in listed if self._says_something(choice)]
        if listed and not kept:
            return b""
        shown = {**event, "id": self._id, "created": self._created, "choices": kept}
        return b"data: " + encode(shown) + b"\n\n"

    def _says_something(self, choice: dict[str, Any]) -> bool:
        """Return whether a choice has content, ignoring a role that was sent before."""
        index, delta = choice.get("index") or 0, choice.get("delta")
        if index not in self._roles or not isinstance(delta, dict):
            self._roles.add(index)
            return True
        delta.pop("role", None)
        return any(delta.values()) or any(
            value is not None for name, value in choice.items() if name not in ("index", "delta")
        )
