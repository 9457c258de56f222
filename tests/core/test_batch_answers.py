"""What a batch's line gets of its job: an answer, a refusal, or nothing."""

import json
from typing import Any

import pytest

from gateway.core.batch_answers import answer_of
from gateway.core.jobs import Chunk, Job, JobError, JobStatus, NewJob
from gateway.core.responses.replay import JobFacts
from gateway.core.responses.request import new_response

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
FACTS = JobFacts(new_response({"model": "m", "store": False}, "0" * 32, 1), "0" * 32, 1, {}, {})


def job(status: JobStatus, error: JobError | None = None, body: bytes = b'{"model":"m"}') -> Job:
    new = NewJob("resp_1", "alice", "m/light", body, facts=FACTS.encoded())
    return Job(new, status, attempt=1, chunks=2, created_at=5.5, ended_at=9.0, error=error)


def chunk(number: int, text: str, reason: str | None = None, restarts: bool = False, **more: Any) -> Chunk:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": reason, **more}
    data = json.dumps({"id": "x", "created": 1, "model": "m", "choices": [choice]})
    return Chunk(number, 1, f"data: {data}\n\n".encode(), restarts)


def test_a_chat_is_put_together_under_the_jobs_own_name() -> None:
    chunks = [chunk(0, "void"), chunk(1, "Hel", restarts=True), chunk(2, "lo", "stop")]
    answer = answer_of(CHAT, job(JobStatus.COMPLETED), chunks)
    assert answer is not None
    status, body = answer[0], json.loads(answer[1])
    assert (status, body["object"], body["id"], body["created"]) == (200, "chat.completion", "chatcmpl-1", 5)
    assert body["choices"][0]["message"]["content"] == "Hello"
    assert body["choices"][0]["finish_reason"] == "stop"


def test_a_chat_has_all_its_choices() -> None:
    chunks = [chunk(0, "a", "stop"), chunk(1, "b", "length", index=1)]
    answer = answer_of(CHAT, job(JobStatus.COMPLETED, body=b'{"model":"m","n":2}'), chunks)
    assert answer is not None
    choices = json.loads(answer[1])["choices"]
    assert [(one["message"]["content"], one["finish_reason"]) for one in choices] == [
        ("a", "stop"), ("b", "length"),
    ]  # fmt: skip


def test_a_response_says_what_its_request_would_have_got() -> None:
    answer = answer_of(RESPONSES, job(JobStatus.COMPLETED), [chunk(0, "Hel"), chunk(1, "lo", "stop")])
    assert answer is not None
    status, body = answer[0], json.loads(answer[1])
    assert (status, body["status"], body["created_at"], body["store"]) == (200, "completed", 5, False)
    assert body["output"][0]["content"][0]["text"] == "Hello"


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("context_length_exceeded", 400, "invalid_request_error"),
        ("bad_word_of_a_backend", 400, "invalid_request_error"),
        ("model_not_found", 404, "invalid_request_error"),
        ("job_poisoned", 502, "server_error"),
    ],
)
@pytest.mark.parametrize("endpoint", [CHAT, RESPONSES])
def test_a_job_that_failed_is_the_error_its_request_would_have_got(
    endpoint: str, code: str, status: int, kind: str
) -> None:
    answer = answer_of(endpoint, job(JobStatus.FAILED, JobError(code, "No.")), [])
    assert answer is not None
    assert answer[0] == status
    assert json.loads(answer[1]) == {"error": {"message": "No.", "type": kind, "param": None, "code": code}}


@pytest.mark.parametrize("endpoint", [CHAT, RESPONSES])
def test_what_was_never_done_has_no_answer(endpoint: str) -> None:
    assert answer_of(endpoint, job(JobStatus.CANCELLED), [chunk(0, "Hel")]) is None
    assert answer_of(endpoint, job(JobStatus.FAILED, JobError("job_expired", "Over.")), []) is None
