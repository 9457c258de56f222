"""A job as a response: what every reader is told alike."""

import json
from dataclasses import replace

import pytest

from gateway.core.jobs import Chunk, Job, JobError, JobStatus, NewJob
from gateway.core.responses.replay import JobFacts, Replay
from gateway.core.responses.request import new_response
from gateway.core.sse import DONE

ANSWER = b'data: {"choices":[{"delta":{"content":"hello"},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'


def test_events_say_that_it_was_created_when_the_store_accepted_it() -> None:
    facts = JobFacts(new_response({}, "t", 1_000), "t", 0, {}, {})
    new = NewJob("resp_t", None, "m/c", b"{}", facts.encoded())
    job = Job(new, JobStatus.COMPLETED, attempt=1, created_at=1_001.9, ended_at=1_002.0, chunks=1)

    events = Replay(JobFacts.of(job)).tell(job, [Chunk(0, 1, ANSWER)])

    assert {event["response"]["created_at"] for event in events if "response" in event} == {1_001}
    assert json.dumps(events[-1]["response"]["output"]).count("hello") == 1


def test_what_a_later_version_has_added_to_the_facts_is_ignored() -> None:
    facts = JobFacts(new_response({}, "t", 1_000), "t", 0, {}, {})
    later = json.dumps({**json.loads(facts.encoded()), "mood": "good"}).encode()
    job, same = (
        Job(NewJob("resp_t", None, "m/c", b"{}", text), JobStatus.QUEUED) for text in (later, facts.encoded())
    )

    assert JobFacts.of(job) == JobFacts.of(same)


def test_a_reader_whose_look_at_the_job_is_older_than_its_chunks_is_told_the_same() -> None:
    facts = JobFacts(new_response({}, "t", 1_000), "t", 0, {}, {})
    new = NewJob("resp_t", None, "m/c", b"{}", facts.encoded())
    queued = Job(new, JobStatus.QUEUED, created_at=1_001.0)
    over = Job(new, JobStatus.COMPLETED, attempt=1, created_at=1_001.0, ended_at=1_002.0, chunks=1)
    late, early = Replay(JobFacts.of(over)), Replay(JobFacts.of(over))

    told_late = late.tell(over, [Chunk(0, 1, ANSWER)])
    assert [event["response"]["status"] for event in told_late[:3]] == ["queued", "queued", "in_progress"]
    told_early = [*early.tell(queued, []), *early.tell(queued, [Chunk(0, 1, ANSWER)]), *early.tell(over, [])]

    assert told_early == told_late


def piece(text: str, finish_reason: str | None = None) -> bytes:
    choice = {"delta": {"content": text}, "finish_reason": finish_reason}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


def jobs() -> tuple[Job, Job]:
    """Return a job that is running, and the same when its three chunks are there."""
    facts = JobFacts(new_response({}, "t", 1_000), "t", 0, {}, {})
    new = NewJob("resp_t", None, "m/c", b"{}", facts.encoded())
    running = Job(new, JobStatus.IN_PROGRESS, attempt=1, created_at=1_001.0, started_at=1_001.5)
    return running, replace(running, status=JobStatus.COMPLETED, ended_at=1_002.0, chunks=3)


def test_a_response_ends_when_its_job_has_ended_and_all_of_its_answer_was_told() -> None:
    running, over = jobs()
    replay = Replay(JobFacts.of(running))

    begun = ["response.created", "response.queued", "response.in_progress"]
    assert [event["type"] for event in replay.tell(replace(running, attempt=0), [])] == begun[:2]
    assert [event["type"] for event in replay.tell(running, [])] == begun[2:]
    replay.tell(running, [Chunk(0, 1, piece("one "))])
    replay.tell(over, [Chunk(1, 1, piece("two "))])
    assert not replay.is_over
    replay.tell(running, [Chunk(2, 1, piece("three", "stop") + DONE)])
    assert not replay.is_over
    (*_, last) = replay.tell(over, [])

    assert (last["type"], replay.is_over) == ("response.completed", True)
    assert last["response"]["output"][0]["content"][0]["text"] == "one two three"
    assert replay.tell(over, []) == []


def test_an_answer_that_starts_over_is_told_from_its_new_beginning() -> None:
    running, over = jobs()
    replay = Replay(JobFacts.of(running))

    half = piece("one ") + piece("more")[:9]
    replay.tell(running, [Chunk(0, 1, half), Chunk(1, 2, piece("again "), restarts=True)])
    (*_, last) = replay.tell(over, [Chunk(2, 2, piece("two", "stop"))])

    assert [item["content"][0]["text"] for item in last["response"]["output"]][-1] == "again two"


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (JobError("job_poisoned", "It was given up."), "server_error", "It was given up."),
        (JobError("context_length_exceeded", "It is too long."), "invalid_prompt", "It is too long."),
        (JobError("no_class", "No class takes it."), "invalid_prompt", "No class takes it."),
        (JobError("model_not_found", "It is gone."), "invalid_prompt", "It is gone."),
        (JobError("job_expired", "It has expired."), "server_error", "It has expired."),
        (None, "server_error", "The job failed."),
    ],
)
def test_a_job_that_failed_says_why(error: JobError | None, code: str, message: str) -> None:
    running, _ = jobs()
    failed = replace(running, status=JobStatus.FAILED, error=error)

    (*_, last) = Replay(JobFacts.of(running)).tell(failed, [])

    assert last["type"] == "response.failed"
    assert last["response"]["error"] == {"code": code, "message": message}


BAD = [b"{", b"[]", b'{"choices": [{"finish_reason": "stop"}']


@pytest.mark.parametrize("bad", BAD)
def test_an_answer_with_an_invalid_event_is_told_as_one_that_starts_over(bad: bytes) -> None:
    running, over = jobs()
    replay, late = Replay(JobFacts.of(running)), Replay(JobFacts.of(over))
    stored = [
        Chunk(0, 1, piece("one ") + b"data: " + bad + b"\n\n" + piece("lost ")),
        Chunk(1, 1, piece("too", "stop") + DONE),
        Chunk(2, 2, piece("again", "stop") + DONE, restarts=True),
    ]

    told = [event for chunk in stored for event in replay.tell(running, [chunk])] + replay.tell(over, [])

    deltas = [event["delta"] for event in told if event["type"] == "response.output_text.delta"]
    assert deltas == ["one ", "again"]
    assert told[-1]["type"] == "response.completed"
    assert [item["content"][0]["text"] for item in told[-1]["response"]["output"]] == ["again"]
    assert late.tell(over, stored) == told


@pytest.mark.parametrize("bad", BAD)
def test_an_answer_that_has_ended_with_an_invalid_event_has_failed(bad: bytes) -> None:
    running, over = jobs()
    broken = piece("one ") + b"data: " + bad + b"\n\n"

    (*_, last) = Replay(JobFacts.of(running)).tell(replace(over, chunks=1), [Chunk(0, 1, broken)])

    assert last["type"] == "response.failed"
    assert last["response"]["error"]["message"] == "The backend sent an invalid event."
