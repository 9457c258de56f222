"""Whole answers; reading an ordinary one at once finds what reading it member by member does."""

import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.answers import TOKENS_MAX, Answer, error_of, usage_of
from gateway.core.usage import Usage
from gateway.pipeline.whole_answers import MEMBER_BYTES_MAX, read_by_member, read_whole

COUNTS = st.sampled_from([0, 7, -1, TOKENS_MAX, TOKENS_MAX + 1, 2**70, 1.0, True, None, "3"])
DETAILS = st.none() | st.dictionaries(st.sampled_from(["cached_tokens", "reasoning_tokens"]), COUNTS)
USAGES = st.none() | st.fixed_dictionaries(
    {},
    optional={
        "prompt_tokens": COUNTS,
        "completion_tokens": COUNTS,
        "prompt_tokens_details": DETAILS,
        "completion_tokens_details": DETAILS,
    },
)
REASONS = st.sampled_from(["stop", "length", "abort", "", None, 3])
CHOICES = st.none() | st.lists(
    st.fixed_dictionaries({}, optional={"finish_reason": REASONS, "index": COUNTS}) | st.none(), max_size=3
)
UNUSUAL: st.SearchStrategy[Any] = st.sampled_from([None, "", "error", {}, {"message": "boom"}, [], 0])


def read(decoded: object) -> Answer | None:
    return read_whole(msgspec.json.encode(decoded))


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "choices": CHOICES,
            "usage": USAGES,
            "object": st.sampled_from(["chat.completion", "error", None, 3]),
            "error": UNUSUAL,
            "detail": UNUSUAL,
            "message": UNUSUAL,
        },
    )
)
def test_both_ways_of_reading_agree(answer: dict[str, Any]) -> None:
    body = msgspec.json.encode(answer)

    found = read_by_member(body)
    assert read_whole(body) == found
    if found is not None:
        choices = answer.get("choices") or ()
        assert found.finish_reasons == tuple(choice["finish_reason"] for choice in choices)
        assert found.error == error_of({name: answer[name] for name in answer.keys() - {"detail"}})
        assert found.usage == usage_of(answer.get("usage"))


def test_what_is_not_an_answer_is_none() -> None:
    for body in (b"", b"{", b"[]", b"3", b'{"choices":[{"finish_reason":"stop"}]', b"\xff", b"{}"):
        assert read_whole(body) is None


def test_an_ordinary_answer_is_read() -> None:
    body = (
        b'{"id":"x","object":"chat.completion","choices":[{"index":0,"message":{"content":"hi"},'
        b'"finish_reason":"stop"}],"usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5,'
        b'"prompt_tokens_details":{"cached_tokens":1}}}'
    )

    answer = read_whole(body)

    assert answer is not None
    assert answer.usage is not None
    assert answer.finish_reasons == ("stop",)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 2)
    assert (answer.usage.cached_tokens, answer.usage.reasoning_tokens) == (1, 0)


@pytest.mark.parametrize("more", [b'"error":{"message":"boom"}', b'"object":"error","message":"boom"'])
def test_an_answer_that_holds_an_error_is_no_ordinary_one(more: bytes) -> None:
    body = b'{"choices":[{"finish_reason":"stop"}],"usage":{"prompt_tokens":3},%s}' % more

    answer = read_whole(body)

    assert answer is not None
    assert (answer.finish_reasons, answer.usage) == (("stop",), Usage(3, 0))
    assert answer.error is not None
    assert answer.error.message == "boom"


def test_a_whole_answer() -> None:
    answer = read(
        {
            "choices": [{"index": 0, "message": {"content": "x"}, "finish_reason": "length"}],
            "usage": {
                "prompt_tokens": 20,
                "completion_tokens": 24,
                "prompt_tokens_details": None,
                "completion_tokens_details": {"reasoning_tokens": 14},
            },
        }
    )

    assert answer is not None
    assert answer.finish_reasons == ("length",)
    assert answer.usage == Usage(prompt_tokens=20, completion_tokens=24, reasoning_tokens=14)
    assert answer.fault(choices=1) is None


@pytest.mark.parametrize(
    "decoded",
    [
        *(None, [], "x", {"object": "list"}, {"choices": 3}),
        *({"choices": [1]}, {"choices": [{}]}, {"choices": [{"finish_reason": "stop"}, {}]}),
    ],
)
def test_what_is_no_answer(decoded: object) -> None:
    assert read(decoded) is None


@pytest.mark.parametrize(
    ("choices", "wanted", "fault"),
    [
        pytest.param([{"finish_reason": "stop"}], 1, None, id="finished"),
        pytest.param([{"finish_reason": "abort"}], 1, "aborted the request", id="abort"),
        pytest.param([], 1, "incomplete", id="no-choice"),
        pytest.param([{"finish_reason": None}], 1, "incomplete", id="no-reason"),
        pytest.param([{"finish_reason": ""}], 1, "incomplete", id="an-empty-reason"),
        pytest.param([{"finish_reason": "stop"}], 2, "1 of 2 choices", id="one-of-two"),
        pytest.param(
            [{"finish_reason": "stop"}, {"finish_reason": None}], 3, "incomplete", id="one-unfinished"
        ),
        pytest.param([{"finish_reason": "stop"}, {"finish_reason": "length"}], 2, None, id="two-of-two"),
    ],
)
def test_success_is_not_taken_from_a_200(choices: list[object], wanted: int, fault: str | None) -> None:
    answer = read({"choices": choices})

    assert answer is not None
    found = answer.fault(wanted)
    assert (found is None) is (fault is None)
    assert found is None or (fault or "") in found.message


@pytest.mark.parametrize("nothing", [None, "", {}, False])
def test_an_error_that_says_nothing_is_none(nothing: object) -> None:
    answer = read({"choices": [{"finish_reason": "stop"}], "error": nothing})

    assert answer is not None
    assert answer.fault(1) is None


def test_an_error_under_200_is_an_error() -> None:
    answer = read({"error": {"message": "boom"}})

    assert answer is not None
    assert answer.fault(1) == answer.error
    assert answer.error is not None
    assert answer.error.message == "boom"


@pytest.mark.parametrize(
    "usage",
    [
        None,
        {},
        {"prompt_tokens": "3"},
        [],
        {"prompt_tokens": None},
        {"prompt_tokens": -1},
        {"prompt_tokens": TOKENS_MAX + 1},
    ],
)
def test_a_usage_that_says_nothing(usage: object) -> None:
    answer = read({"choices": [], "usage": usage})

    assert answer is not None
    assert answer.usage is None


@pytest.mark.parametrize("value", [b'"\xff"', b"[" * 100_000], ids=["not-utf-8", "nested"])
def test_an_answer_that_cannot_be_decoded_is_none(value: bytes) -> None:
    assert read_whole(b'{"usage":%s' % value) is None
    assert read_whole(b'{"choices":[{"finish_reason":%s' % value) is None


@pytest.mark.parametrize(
    "body",
    [
        b'{"choices":[%s{}]}' % (b"{}," * 300_000),
        b'{"choices":[%s{"finish_reason":0}]}' % (b'{"finish_reason":0},' * 150_000),
        b'{"choices":[{"finish_reason":"stop"}],"usage":[%s[]]}' % (b"[]," * 1_000_000),
        b'{"choices":[{"finish_reason":"stop"}],"error":[%s[]]}' % (b"[]," * 1_000_000),
    ],
    ids=["choices", "reasons", "usage", "error"],
)
def test_no_answer_takes_many_times_its_size(body: bytes, without_collector: None) -> None:
    tracemalloc.start()
    answer = read_whole(body)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert answer is None or answer.usage is None
    assert peak < 4 * len(body)


def test_an_error_that_quotes_a_long_prompt_is_read() -> None:
    body = b'{"error":{"message":"no: %s"}}' % (b"x" * (MEMBER_BYTES_MAX // 2))

    answer = read_whole(body)

    assert answer is not None
    assert answer.error is not None
    assert answer.error.message.startswith("no: x")
