"""A job as a response: what every reader is told alike."""

import json

from gateway.core.jobs import Chunk, Job, JobStatus, NewJob
from gateway.core.responses.replay import JobFacts, Replay
from gateway.core.responses.request import new_response

ANSWER = b'data: {"choices":[{"delta":{"content":"hello"},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'


def test_events_say_that_it_was_created_when_the_store_accepted_it() -> None:
    facts = JobFacts(new_response({}, "t", 1_000), "t", 0, {}, {})
    new = NewJob("resp_t", None, "m/c", b"{}", facts.encoded())
    job = Job(new, JobStatus.COMPLETED, attempt=1, created_at=1_001.9, ended_at=1_002.0, chunks=1)

    events = Replay(JobFacts.of(job)).tell(job, [Chunk(0, 1, ANSWER)])

    assert {event["response"]["created_at"] for event in events if "response" in event} == {1_001}
    assert json.dumps(events[-1]["response"]["output"]).count("hello") == 1


def test_a_reader_whose_look_at_the_job_is_older_than_its_chunks_is_told_the_same() -> None:
    facts = JobFacts(new_response({}, "t", 1_000), "t", 0, {}, {})
    new = NewJob("resp_t", None, "m/c", b"{}", facts.encoded())
    queued = Job(new, JobStatus.QUEUED, created_at=1_001.0)
    over = Job(new, JobStatus.COMPLETED, attempt=1, created_at=1_001.0, ended_at=1_002.0, chunks=1)
    late, early = Replay(JobFacts.of(over)), Replay(JobFacts.of(over))

    told_late = late.tell(over, [Chunk(0, 1, ANSWER)])
    told_early = [*early.tell(queued, []), *early.tell(queued, [Chunk(0, 1, ANSWER)]), *early.tell(over, [])]

    assert told_early == told_late
