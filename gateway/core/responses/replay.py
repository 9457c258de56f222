"""A job as a response: its events, computed again from what is stored whenever somebody asks. Pure.

What is stored is what a backend said. Its translation is the same each time, so an event has the same number
and the same ids for every reader, on every gateway, before and after a restart.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gateway.core.jobs import Chunk, Job, JobStatus
from gateway.core.responses.chat_stream import ChatStream
from gateway.core.responses.draft import Draft, Event
from gateway.core.sse import DONE


@dataclass(frozen=True, slots=True)
class JobFacts:
    """What the response of a job needs beside its answer; kept with the job.

    Attributes:
        response: The response with nothing of its answer yet.
        token: Names it.
        first_index: Items of its input.
        headers: The request's headers that policy may match on.
        conversation: What was said before and asked now, for responses that go on from this one.
        is_chat: Whether it was handed over as a chat, so that it can be shown as one.
        trace: The span of the request that handed it over, as a `traceparent`; "" where there is none.
    """

    response: Mapping[str, Any]
    token: str
    first_index: int
    headers: Mapping[str, str]
    conversation: Mapping[str, Any]
    is_chat: bool = False
    trace: str = ""

    def encoded(self) -> bytes:
        """Return them as JSON."""
        return json.dumps(
            {
                "response": self.response,
                "token": self.token,
                "first_index": self.first_index,
                "headers": self.headers,
                "conversation": self.conversation,
                "is_chat": self.is_chat,
                "trace": self.trace,
            },
            separators=(",", ":"),
        ).encode()

    @classmethod
    def of(cls, job: Job) -> "JobFacts":
        """Return those of a job. It was created when the store accepted it, whichever gateway was told so."""
        facts = cls(**json.loads(job.new.facts))
        return replace(facts, response={**facts.response, "created_at": int(job.created_at)})


class Replay:
    """The events of one job, from the first on. What is new is handed in; what follows from it comes out."""

    def __init__(self, facts: JobFacts, decode: Callable[[bytes], Any] = json.loads) -> None:
        """Begin with nothing told."""
        self._draft = Draft(dict(facts.response), facts.token, facts.first_index)
        self._stream = ChatStream(self._draft, decode)
        self._is_begun = self._is_started = False
        self.chunks = 0

    @property
    def is_over(self) -> bool:
        """Whether the last event has been given out."""
        return self._draft.is_over

    @property
    def response(self) -> Mapping[str, Any]:
        """The response as of the last event."""
        return self._draft.response

    def tell(self, job: Job, chunks: Sequence[Chunk]) -> list[Event]:
        """Return the events that are new, now that the job stands there and has these chunks more.

        The chunks may have been read after the job: what they show to have happened has happened.
        """
        events: list[Event] = []
        if self.is_over:
            return events
        if not self._is_begun:
            self._is_begun = True
            events += self._draft.queue()
        if (job.attempt or chunks) and not self._is_started:
            self._is_started = True
            events += self._draft.start()
        for chunk in chunks:
            self.chunks += 1
            if chunk.restarts:
                events += self._draft.restart()
                self._stream.tail = b""
            events += self._stream.feed(chunk.data.replace(DONE, b""), int(job.started_at or 0))
        if job.status.is_final and self.chunks >= job.chunks and not self.is_over:
            events += self._end(job)
        return events

    def _end(self, job: Job) -> list[Event]:
        now = int(job.ended_at or 0)
        match job.status:
            case JobStatus.CANCELLED:
                return self._draft.cancel()
            case JobStatus.FAILED:
                error_type = "invalid_request_error" if _is_callers(job) else "server_error"
                return self._draft.fail(error_type, job.error.message if job.error else "The job failed.")
        return self._draft.complete(now)


def _is_callers(job: Job) -> bool:
    return job.error is not None and job.error.code in {"context_length_exceeded", "invalid_request"}
