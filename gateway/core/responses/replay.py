"""A job as a response, whose events are recomputed from stored chunks for each reader. Pure.

The store holds the chat output of backends. Its translation is deterministic, so an event has the same number
and the same ids for every reader, on every gateway, before and after a restart.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from gateway.core.chat_jobs import failure
from gateway.core.job_answers import INVALID_EVENT
from gateway.core.job_answers import events as chat_events
from gateway.core.jobs import Chunk, Job, JobStatus
from gateway.core.responses.draft import Draft, Event
from gateway.core.value import valueclass


@valueclass(frozen=True, slots=True)
class JobFacts:
    """Data that the response of a job needs in addition to the answer; stored with the job.

    Attributes:
        response: The response without its output.
        token: Identifies the response.
        first_index: Number of input items.
        headers: The request's headers that policy may match on.
        conversation: The conversation up to and including this request, for responses that continue it.
        is_chat: Whether it was submitted as a chat, so that it can be returned as one.
        trace: The span of the submitting request, as a `traceparent`; "" if there is none.
        is_awaited: Whether its caller stays connected until it is answered.
    """

    response: Mapping[str, Any]
    token: str
    first_index: int
    headers: Mapping[str, str]
    conversation: Mapping[str, Any]
    is_chat: bool = False
    trace: str = ""
    is_awaited: bool = False

    def encoded(self) -> bytes:
        """Return the facts as JSON."""
        members = {one.name: getattr(self, one.name) for one in fields(self)}
        return json.dumps(members, separators=(",", ":")).encode()

    @classmethod
    def of(cls, job: Job) -> "JobFacts":
        """Return the facts of a job, with the creation time that the store recorded.

        Members that a later version has added are ignored.
        """
        written = json.loads(job.new.facts)
        known = {one.name: written[one.name] for one in fields(cls) if one.name in written}
        return cls(**known).as_accepted(job)

    def as_accepted(self, job: Job) -> "JobFacts":
        """Return these facts, submitted with a job, with the creation time that the store recorded."""
        return replace(self, response={**self.response, "created_at": int(job.created_at)})


class Replay:
    """Translates one job to events, from the first on: takes updates of the job, returns new events.

    Attributes:
        chunks: Number of chunks processed; last: the last of them, or None.
    """

    def __init__(self, facts: JobFacts) -> None:
        """Start before the first event."""
        self._draft = Draft(dict(facts.response), facts.token, facts.first_index)
        self._is_begun = self._is_started = False
        self._is_invalid = False  # the answer has an invalid event, so its worker starts it over
        self.chunks = 0
        self.last: Chunk | None = None

    @property
    def is_over(self) -> bool:
        """Whether the last event has been returned."""
        return self._draft.is_over

    @property
    def response(self) -> Mapping[str, Any]:
        """The response as of the last event."""
        return self._draft.response

    def tell(self, job: Job, chunks: Sequence[Chunk]) -> list[Event]:
        """Return the new events, given the current job and the chunks added since the last call.

        The chunks may have been read after the job, so they may be ahead of its state.
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
            self.last = chunk
            if chunk.restarts:
                events += self._draft.restart()
                self._is_invalid = False
            events += self._said(chunk)
        if job.status.is_final and self.chunks >= job.chunks:
            events += self._end(job)
        return events

    def _said(self, chunk: Chunk) -> list[Event]:
        events: list[Event] = []
        if self._is_invalid:
            return events
        try:
            for said in chat_events((chunk,)):
                events += self._draft.add(said)
        except INVALID_EVENT:
            self._is_invalid = True
        return events

    def _end(self, job: Job) -> list[Event]:
        if job.status is JobStatus.CANCELLED:
            return self._draft.cancel()
        if (error := failure(job)) is not None:
            return self._draft.fail(error.type, error.message)
        if self._is_invalid:
            return self._draft.fail("server_error", "The backend sent an invalid event.")
        return self._draft.complete(int(job.ended_at or 0))
