"""A job as a chat completion: what is stored, and what its caller is shown of it."""

import json
from typing import Any

import pytest

from gateway.core.chat_jobs import ChatReplay, chat_id, failure, job_id, whole
from gateway.core.errors import GatewayError
from gateway.core.jobs import Chunk, Job, JobError, JobStatus, NewJob
from gateway.core.sse import CALLS_MAX

BODY: dict[str, Any] = {"model": "gemma-4", "messages": [{"role": "user", "content": "Hi"}], "stream": True}
DONE = b"data: [DONE]\n\n"
USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


def job(status: JobStatus = JobStatus.COMPLETED, error: JobError | None = None, **body: Any) -> Job:
    new = NewJob("resp_0a", None, "gemma-4/reasoning", json.dumps(BODY | body).encode())
    return Job(new, status, created_at=1_700_000_000.9, chunks=2, error=error)


def event(index: int = 0, finish_reason: str | None = None, id: str = "cmpl-x", **delta: Any) -> bytes:
    choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
    return frame(id=id, created=1, model="gemma-4", object="chat.completion.chunk", choices=[choice])


def usage() -> bytes:
    return frame(
        id="cmpl-x", created=1, model="gemma-4", object="chat.completion.chunk", choices=[], usage=USAGE
    )


def frame(**members: Any) -> bytes:
    return b"data: " + json.dumps(members).encode() + b"\n\n"


def chunks(*data: bytes, restarts: int = -1) -> list[Chunk]:
    return [Chunk(number, 1, one, restarts=number == restarts) for number, one in enumerate(data)]


def deltas(data: bytes) -> list[Any]:
    """Return the deltas of a stream's events; usage where an event is that."""
    shown = []
    for block in data.decode().split("\n\n")[:-1]:
        told = json.loads(block.removeprefix("data: "))
        assert (told["id"], told["created"]) == ("chatcmpl-0a", 1_700_000_000)
        shown += [choice["delta"] for choice in told["choices"]] or [told["usage"]]
    return shown


def test_ids_go_both_ways() -> None:
    assert chat_id("resp_0a") == "chatcmpl-0a"
    assert job_id("chatcmpl-0a") == "resp_0a"
    assert job_id("resp_0a") is None
    assert job_id("0a") is None


# ------------------------------------------------------------------ whole


def test_an_answer_of_two_attempts_is_one() -> None:
    first = event(role="assistant", content="") + event(reasoning="Let me see. ") + event(content="The sky ")
    then = event(role="assistant", content="", id="cmpl-y") + event(content="is blue.", id="cmpl-y")
    stored = chunks(first, then + event(finish_reason="stop", id="cmpl-y") + usage() + DONE)

    answer = json.loads(whole(job(), stored))

    assert (answer["id"], answer["object"]) == ("chatcmpl-0a", "chat.completion")
    assert (answer["created"], answer["model"], answer["usage"]) == (1_700_000_000, "gemma-4", USAGE)
    [choice] = answer["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["reasoning"] == "Let me see. "
    assert choice["message"]["content"] == "The sky is blue."


def test_what_is_void_is_not_in_it() -> None:
    stored = chunks(event(content="It is 41"), event(content="42") + event(finish_reason="stop"), restarts=1)

    [choice] = json.loads(whole(job(), stored))["choices"]

    assert choice["message"]["content"] == "42"


def test_one_with_more_calls_than_are_credible_is_none() -> None:
    call = {"index": CALLS_MAX, "function": {"name": "f"}}

    with pytest.raises(ValueError, match="too many"):
        whole(job(), chunks(event(tool_calls=[call]), event(finish_reason="tool_calls") + DONE))


def test_every_choice_is_in_it() -> None:
    said = event(1, content="B") + event(0, content="A") + event(1, "length") + event(0, "stop") + DONE

    answer = json.loads(whole(job(n=2), chunks(said)))

    assert [(one["index"], one["message"]["content"], one["finish_reason"]) for one in answer["choices"]] == [
        (0, "A", "stop"),
        (1, "B", "length"),
    ]


def test_one_of_many_choices_is_in_it() -> None:
    answer = json.loads(whole(job(n=200), chunks(event(199, "stop", content="B") + DONE)))

    assert [(one["index"], one["message"]["content"]) for one in answer["choices"]] == [(199, "B")]


# ------------------------------------------------------------------ a stream


def test_a_stream_says_its_role_once_and_its_usage_only_if_asked() -> None:
    first = event(role="assistant", content="") + event(content="The ")
    then = event(role="assistant", content="") + event(role="assistant", content="sky") + event()
    stored = chunks(first, b": keep-alive\n\n" + then + event(finish_reason="stop") + usage() + DONE)

    told = [ChatReplay(job(), include_usage=wanted).tell(stored) for wanted in (False, True)]

    assert deltas(told[0]) == [
        {"role": "assistant", "content": ""},
        {"content": "The "},
        {"content": "sky"},
        {},
    ]
    assert deltas(told[1]) == [*deltas(told[0]), USAGE]


def test_a_word_that_comes_with_usage_is_told_whether_usage_was_asked_for_or_not() -> None:
    said = event(content="A")[:-3] + b', "usage": {"completion_tokens": 1}}\n\n'

    assert deltas(ChatReplay(job(), include_usage=False).tell(chunks(said))) == [{"content": "A"}]


def test_what_has_no_words_is_told_unless_it_is_usage() -> None:
    other = frame(choices=[], prompt_filter_results=[]), frame(choices=None, usage=None)
    end = frame(choices=[{"index": None, "delta": None, "finish_reason": "stop"}])
    stored = chunks(event(role="assistant"), *other, usage(), end)

    told = ChatReplay(job(), include_usage=False).tell(stored)

    shown = [json.loads(one.removeprefix("data: ")) for one in told.decode().split("\n\n")[:-1]]
    assert [bool(one["choices"]) for one in shown] == [True, False, False, True]
    assert shown[1]["prompt_filter_results"] == []
    assert shown[-1]["choices"] == [{"index": None, "delta": None, "finish_reason": "stop"}]


def test_a_choice_without_a_number_is_the_first() -> None:
    first = frame(choices=[{"delta": {"role": "assistant"}}])
    said = first + event(role="assistant", content="A")

    assert deltas(ChatReplay(job(), include_usage=False).tell(chunks(said))) == [
        {"role": "assistant"},
        {"content": "A"},
    ]


def test_of_several_choices_each_says_its_role() -> None:
    said = event(0, role="assistant") + event(1, role="assistant") + event(1, role="assistant", content="B")

    assert deltas(ChatReplay(job(n=2), include_usage=False).tell(chunks(said))) == [
        {"role": "assistant"},
        {"role": "assistant"},
        {"content": "B"},
    ]


def test_a_stream_that_has_spoken_has_so_whatever_it_told_last() -> None:
    replay = ChatReplay(job(), include_usage=False)
    said, silence = chunks(event(content="It is 41"), b": keep-alive\n\n")

    assert replay.tell([said]) != b""
    assert (replay.tell([silence]), replay.last) == (b"", silence)
    assert (replay.tell([]), replay.last, replay.has_spoken) == (b"", silence, True)
    assert replay.tell(chunks(event(content="42"), restarts=0)) == b""
    assert replay.is_broken


def test_an_answer_that_begins_anew_breaks_a_stream_that_has_spoken() -> None:
    replay = ChatReplay(job(), include_usage=False)

    told = [
        (replay.tell(chunks(*more, restarts=1)) != b"", replay.is_broken, replay.chunks)
        for more in (
            [event(content="It is 41")],
            [event(content=", or"), event(content="42")],
            [event(content="!")],
        )
    ]

    assert told == [(True, False, 1), (False, True, 3), (False, True, 4)]


@pytest.mark.parametrize("bad", [b"data: {\n\n", b"data: []\n\n", b'data: {"choices": [1]}\n\n'])
def test_an_answer_with_an_invalid_event_breaks_a_stream_that_has_spoken(bad: bytes) -> None:
    replay = ChatReplay(job(), include_usage=False)
    assert replay.tell(chunks(event(role="assistant") + bad)) == b""
    assert replay.tell(chunks(event(content="the rest of it"))) == b""
    assert not replay.is_broken
    told = replay.tell(chunks(event(role="assistant"), event(content="It is 41"), restarts=0))
    assert deltas(told) == [{"role": "assistant"}, {"content": "It is 41"}]
    assert replay.tell(chunks(bad)) == b""
    assert replay.is_broken


def test_what_was_void_before_anything_was_sent_is_not_shown() -> None:
    replay = ChatReplay(job(), include_usage=False)

    assert replay.tell([]) == b""
    told = replay.tell(chunks(event(content="It is 41"), event(content="42"), restarts=1))

    assert deltas(told) == [{"content": "42"}]
    assert not replay.is_broken


# ------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("code", "status", "type", "comes_again"),
    [
        ("context_length_exceeded", 400, "invalid_request_error", True),
        ("invalid_request", 400, "invalid_request_error", True),
        ("no_class", 400, "invalid_request_error", True),
        ("model_not_found", 404, "invalid_request_error", True),
        ("job_expired", 504, "server_error", False),
        ("job_poisoned", 502, "server_error", False),
    ],
)
def test_a_failed_job_is_the_error_that_its_caller_would_have_got(
    code: str, status: int, type: str, comes_again: bool
) -> None:
    error = failure(job(JobStatus.FAILED, JobError(code, "Why.", "top_p")))

    assert isinstance(error, GatewayError)
    assert error.param == "top_p"
    assert (error.status, error.type, error.code, error.message) == (status, type, code, "Why.")
    assert ((b"x-should-retry", b"false") not in error.headers) is comes_again


def test_other_ends() -> None:
    cancelled = failure(job(JobStatus.CANCELLED))

    assert isinstance(cancelled, GatewayError)
    assert (cancelled.status, cancelled.code) == (410, "job_cancelled")
    unknown = failure(job(JobStatus.FAILED))
    assert isinstance(unknown, GatewayError)
    assert (unknown.status, unknown.code) == (500, "internal_error")
    for status in (JobStatus.COMPLETED, JobStatus.INCOMPLETE, JobStatus.QUEUED, JobStatus.IN_PROGRESS):
        assert failure(job(status)) is None
