"""Streams as scripts: bytes in, bytes out, and what was learned. Cut at every byte."""

import json
import tracemalloc
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.naming import ModelNames
from gateway.core.sse import DONE, MORE_CHOICES_MAX, TOO_MANY, StreamReader
from gateway.core.usage import Usage

SERVED, PUBLIC = "gemma-4-31b-it", "gemma-4"


def event(**fields: object) -> bytes:
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": SERVED}
    return b"data: " + json.dumps({**head, **fields}, separators=(",", ":")).encode() + b"\n\n"


def delta(text: str | None = None, *, index: int = 0, finish: str | None = None, **fields: object) -> bytes:
    content = {"content": text} if text is not None else {}
    choice = {"index": index, "delta": {**content, **fields}, "logprobs": None, "finish_reason": finish}
    return event(choices=[choice])


ROLE = delta("", role="assistant")
USAGE = event(choices=[], usage={"prompt_tokens": 17, "total_tokens": 19, "completion_tokens": 2})
STREAM = ROLE + delta("Hello") + delta(" you") + delta("", finish="stop")


def reader(*, choices: int = 1, hide_usage: bool = False, names: ModelNames | None = None) -> StreamReader:
    return StreamReader(choices=choices, names=names or ModelNames(SERVED, SERVED), hide_usage=hide_usage)


def run(subject: StreamReader, pieces: Sequence[bytes]) -> bytes:
    out = b"".join(subject.feed(piece) for piece in pieces)
    return out + subject.end()


def test_an_answer_passes_untouched_wherever_it_is_cut() -> None:
    whole = STREAM + USAGE + DONE

    for cut in range(len(whole) + 1):
        subject = reader()
        assert run(subject, [whole[:cut], whole[cut:]]) == whole
        assert subject.is_complete
        assert subject.usage == Usage(prompt_tokens=17, completion_tokens=2)


@pytest.mark.parametrize(
    "spell",
    [
        bytes,
        lambda event: event.replace(b":null", b": null"),
        lambda event: event.replace(b'finish_reason":', b'finish_reason" : '),
    ],
    ids=["compact", "spaced", "wide"],
)
def test_an_answer_passes_event_by_event(spell: Callable[[bytes], bytes]) -> None:
    events = [spell(event + b"\n\n") for event in (STREAM + USAGE + DONE).split(b"\n\n") if event]
    subject = reader()

    assert run(subject, events) == b"".join(events)
    assert subject.is_complete
    assert subject.usage == Usage(prompt_tokens=17, completion_tokens=2)


TOGETHER = {
    "text": delta(" you"),
    "spaced": delta(" two").replace(b'":', b'": '),
    "quoted": delta(f'"model":"{SERVED}"'),
    "other-name": delta("!").replace(SERVED.encode(), b"other"),
    "two-names": delta("!", by={"model": "other"}),
    "comment": b": ping\n\n",
    "returns": delta("?").replace(b"\n", b"\r\n"),
    "usage": USAGE,
    "finish": delta("", finish="stop"),
    "error": event(error={"message": "boom", "code": 500}),
    "done": DONE,
}


@given(
    st.lists(st.sampled_from(list(TOGETHER)), max_size=6),
    st.sampled_from([SERVED, PUBLIC]),
    st.integers(0, 1_000),
    st.booleans(),
)
def test_events_that_come_together_are_relayed_as_if_each_came_alone(
    kinds: list[str], public: str, cut: int, hides: bool
) -> None:
    alone, together = (reader(names=ModelNames(SERVED, public), hide_usage=hides) for _ in range(2))
    events = [TOGETHER[kind] for kind in kinds]
    whole = b"".join(events)
    for subject in (alone, together):
        subject.feed(ROLE + delta("Hello"))

    passed_on = b"".join(alone.feed(one) for one in events)

    assert together.feed(whole[:cut]) + together.feed(whole[cut:]) == passed_on
    assert (together.usage, together.is_done, together.is_complete) == (
        alone.usage,
        alone.is_done,
        alone.is_complete,
    )
    assert (together.fault and together.fault.message) == (alone.fault and alone.fault.message)


def test_after_events_that_came_together_the_next_one_is_known_by_its_form() -> None:
    subject = reader()
    subject.feed(ROLE + delta("Hello"))
    subject.feed(delta(" you"))
    one = delta(" there")
    assert subject.match(one, 0, len(one)) is one

    subject.feed(delta(" a") + delta(" b"))
    assert subject.match(one, 0, len(one)) is one

    subject.feed(delta(" a") + delta(" b")[:-1])
    assert subject.match(one, 0, len(one)) is None


def test_byte_by_byte() -> None:
    whole = STREAM + DONE
    subject = reader()

    assert run(subject, [whole[i : i + 1] for i in range(len(whole))]) == whole
    assert subject.is_done


def test_events_are_let_go_only_whole() -> None:
    subject = reader()

    assert subject.feed(STREAM[:-1]) == STREAM[: STREAM.rindex(b"data:")]
    assert subject.feed(STREAM[-1:]) == STREAM[STREAM.rindex(b"data:") :]


@pytest.mark.parametrize("end", [b"\n\n\n", b"\n\n\n\n", b"\r\n\n", b"\n\r\n", b"\n\n\r\n\r\n"])
def test_more_blank_lines_than_one_between_events_do_no_harm(end: bytes) -> None:
    whole = STREAM.replace(b"\n\n", end) + USAGE + DONE

    for cut in range(len(whole) + 1):
        passed_on = run(reader(), [whole[:cut], whole[cut:]])
        assert [line for line in passed_on.splitlines() if line] == [
            line for line in whole.splitlines() if line
        ]


@pytest.mark.parametrize("has_begun", [False, True])
@pytest.mark.parametrize(
    "silence", [b"\n\n", b"\n", b"\r\n", b": ping\n\n", b": ping\r\n\r\n", b"event: x\n\n"]
)
def test_events_without_data_are_passed_in_one_step(silence: bytes, has_begun: bool) -> None:
    steps = 0

    class Counting(ModelNames):
        def in_event(self, data: bytes) -> bytes:
            nonlocal steps
            steps += 1
            return super().in_event(data)

    subject = reader(names=Counting(SERVED, SERVED))
    begun = STREAM if has_begun else ROLE
    subject.feed(begun)
    steps = 0

    out = subject.feed(silence * 10_000 + USAGE)

    assert out == silence * 10_000 + USAGE
    assert steps == 2
    assert subject.usage is not None


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\n\r\n"])
def test_events_that_begin_with_another_line_are_read(end: bytes) -> None:
    whole = (b": data: no" + end).join(
        [b"event: chunk\n" + one + end for one in STREAM.split(b"\n\n") if one]
    )

    for cut in range(len(whole) + 1):
        subject = reader()
        assert run(subject, [whole[:cut], whole[cut:]]) == whole + DONE
        assert subject.is_complete


def test_crlf_line_ends_are_events_too() -> None:
    whole = (STREAM + DONE).replace(b"\n", b"\r\n")
    subject = reader()

    out = run(subject, [whole[:100], whole[100:]])

    assert subject.is_complete
    assert out == whole[: -len(DONE) - 2] + DONE


@pytest.mark.parametrize(
    ("first", "has_content"),
    [
        pytest.param(ROLE, False, id="role"),
        pytest.param(b": keep-alive\n\n", False, id="comment"),
        pytest.param(delta(), False, id="empty-delta"),
        pytest.param(delta("x"), True, id="content"),
        pytest.param(delta(reasoning="hm"), True, id="reasoning"),
        pytest.param(delta(reasoning_content="hm"), True, id="reasoning-content"),
        pytest.param(delta(tool_calls=[{"index": 0}]), True, id="tool-call"),
        pytest.param(delta("", finish="stop"), True, id="an-empty-answer-is-an-answer"),
        pytest.param(event(choices=[{"index": 0, "text": "x"}]), True, id="completion"),
        pytest.param(event(choices=[{"index": 0, "text": ""}]), False, id="empty-completion"),
    ],
)
def test_content_is_what_the_model_said(first: bytes, has_content: bool) -> None:
    subject = reader()

    assert subject.feed(first) == first
    assert subject.has_content is has_content


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        pytest.param(
            [STREAM[: STREAM.rindex(b"data:")]], "ended before it was finished", id="clean-end-without-finish"
        ),
        pytest.param([ROLE, DONE], "ended before it was finished", id="done-without-finish"),
        pytest.param([ROLE, delta("x"), DONE], "ended before it was finished", id="done-in-the-middle"),
        pytest.param([STREAM, b'data: {"choices"'], "an invalid event", id="cut-inside-an-event"),
        pytest.param([], "ended before it was finished", id="nothing-at-all"),
        pytest.param([b"<html>Sign in</html>\n"], "is not a stream of events", id="a-page"),
        pytest.param(
            [b'{"choices": [{"message": {"content": "x"}}]}'], "not a stream of events", id="in-one-piece"
        ),
        pytest.param(
            [b"\n\n: still here\n\n", b"event: ping\n\n"], "ended before it was finished", id="without-data"
        ),
        pytest.param([ROLE, b"data: <html>\n\n"], "an invalid event", id="garbage-before-content"),
        pytest.param([delta("x"), delta("y", finish="abort"), DONE], "aborted the request", id="abort"),
        pytest.param(
            [
                delta("x"),
                b'data: {"error": {"message": "EngineCore encountered an issue.", "code": 500}}\n\n',
                DONE,
            ],
            "EngineCore encountered an issue.",
            id="error-event-then-done",
        ),
        pytest.param(
            [b'event: error\ndata: {"error":"Unauthorized"}\n\n'], "Unauthorized", id="named-error-event"
        ),
    ],
)
def test_what_is_wrong_although_the_status_was_200(pieces: Sequence[bytes], message: str) -> None:
    subject = reader()

    out = run(subject, pieces)

    assert subject.fault is not None
    assert message in subject.fault.message
    assert not subject.is_complete
    assert b"[DONE]" not in out
    assert b"abort" not in out
    assert b"error" not in out


def test_the_crash_of_an_engine_is_told_from_other_errors() -> None:
    subject = reader()

    subject.feed(b'data: {"error": {"message": "EngineCore encountered an issue."}}\n\n')

    assert subject.fault is not None
    assert subject.fault.is_crash


def test_nothing_follows_a_fault() -> None:
    subject = reader()

    assert subject.feed(delta("x") + delta("", finish="abort") + delta("y")) == delta("x")
    assert subject.feed(delta("z")) == b""


@pytest.mark.parametrize("spell", [b'"finish_reason":""', b'"finish_reason" : ""'])
def test_an_empty_finish_reason_is_none(spell: bytes) -> None:
    stream = (STREAM + USAGE).replace(b'"finish_reason":null', spell)
    events = [event + b"\n\n" for event in stream.split(b"\n\n") if event]
    unread = events[2].replace(b"{", b"", 1)  # no JSON: it would be a fault if it were parsed
    subject = reader()

    subject.feed(events[0])
    assert not subject.has_content
    assert run(subject, [events[1], unread]) == events[1] + unread

    whole = reader()
    assert run(whole, events) == stream + DONE
    assert whole.is_complete


def test_every_choice_has_to_finish() -> None:
    subject = reader(choices=2)
    half = delta("a") + delta("b", index=1) + delta("", finish="stop")

    subject.feed(half)
    assert not subject.is_complete
    subject.feed(delta("", index=1, finish="length"))
    assert subject.is_complete


def test_a_last_event_may_lack_its_blank_line() -> None:
    subject = reader()

    assert run(subject, [STREAM + DONE[:-1]]) == STREAM + DONE
    assert subject.is_done


@pytest.mark.parametrize("last", [b"", DONE[:-1], DONE])
def test_a_byte_order_mark_before_the_first_event_is_dropped(last: bytes) -> None:
    whole = delta("Hello", finish="stop") + last

    for cut in range(5):
        subject = reader()
        marked = b"\xef\xbb\xbf" + whole
        assert run(subject, [marked[:cut], marked[cut:]]) == delta("Hello", finish="stop") + DONE
        assert subject.is_complete


def test_done_without_a_finish_is_found_at_once() -> None:
    subject = reader()

    subject.feed(ROLE + delta("x") + DONE)  # the connection stays open: nothing more may ever come

    assert subject.fault is not None
    assert "before it was finished" in subject.fault.message


@pytest.mark.parametrize("size", [1, 7, 4096])
def test_a_large_event_in_small_reads_is_looked_at_once(size: int) -> None:
    ids = event(choices=[], prompt_token_ids=list(range(10_000)))
    whole = ids + STREAM + DONE
    looked_at = 0

    class Counting(bytes):
        def endswith(self, *arguments: object) -> bool:
            nonlocal looked_at
            looked_at += len(self)
            return super().endswith(*arguments)  # type: ignore[arg-type]

    subject = reader()
    out = run(subject, [Counting(whole[at : at + size]) for at in range(0, len(whole), size)])

    assert out == whole
    assert looked_at == len(whole)


def test_a_missing_done_is_owed() -> None:
    subject = reader()

    assert run(subject, [STREAM]) == STREAM + DONE


def test_words_that_look_like_markers_are_only_words() -> None:
    tricky = 'He said "finish_reason":"abort" and {"error":"x"} and [DONE] and "usage":{'
    whole = ROLE + delta("x") + delta(tricky) + delta("", finish="stop") + DONE
    subject = reader()

    assert run(subject, [whole]) == whole
    assert subject.is_complete


def test_a_usage_event_nobody_asked_for_is_kept_back() -> None:
    subject = reader(hide_usage=True)

    assert run(subject, [STREAM, USAGE, DONE]) == STREAM + DONE
    assert subject.usage == Usage(prompt_tokens=17, completion_tokens=2)


def test_usage_in_every_event_stays_where_it_is() -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 2}}
    choice = {"index": 0, "delta": {"content": "x"}, "finish_reason": None}
    continuous = event(choices=[choice], usage=usage)
    subject = reader(hide_usage=True)

    assert subject.feed(continuous) == continuous
    assert subject.usage == Usage(prompt_tokens=3, completion_tokens=1, cached_tokens=2)


def test_the_model_is_shown_by_its_public_name() -> None:
    spoof = delta('"model":"gemma-4-31b-it"')
    subject = reader(names=ModelNames(SERVED, PUBLIC))

    out = run(subject, [STREAM + spoof + DONE])

    assert (
        out
        == STREAM.replace(b'"model":"gemma-4-31b-it"', b'"model":"gemma-4"')
        + spoof.replace(b'"model":"gemma-4-31b-it"', b'"model":"gemma-4"', 1)
        + DONE
    )
    assert b'\\"model\\":\\"gemma-4-31b-it\\"' in out


@pytest.mark.parametrize(
    "member",
    [b'"model":"gemma-4-31b-it"', b'"model" : "other-name"', b'"model":"na\\"me"', '"model":"é"'.encode()],
    ids=["served", "another-of-its-names", "quoted", "not-ascii"],
)
def test_whatever_the_backend_calls_the_model_it_is_shown_by_its_public_name(member: bytes) -> None:
    first = b'data: {"id":"x",' + member + b',"choices":[{"index":0,"delta":{"content":"hi"}}]}\n\n'
    subject = reader(names=ModelNames(SERVED, PUBLIC))

    assert subject.feed(first) == first.replace(member, b'"model":"gemma-4"')


def test_an_event_without_an_end_is_not_kept_for_ever() -> None:
    subject = reader()
    megabyte = b"x" * 1024 * 1024

    subject.feed(b"data: ")
    for _ in range(17):
        subject.feed(megabyte)

    assert subject.fault is not None
    assert "no end" in subject.fault.message


def test_choices_that_nobody_asked_for_take_no_memory(without_collector: None) -> None:
    subject = reader()
    subject.feed(event(choices=[{"index": 0, "delta": {"content": "hi"}}]))
    endings = [event(choices=[{"index": at, "delta": {}, "finish_reason": "stop"}]) for at in range(20_000)]
    tracemalloc.start()
    for ending in endings:
        subject.feed(ending)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert subject.is_complete
    assert held < 100_000


def test_an_event_with_more_choices_than_is_credible_is_a_fault() -> None:
    choices = [{"index": at, "delta": {"content": "hi"}} for at in range(1 + MORE_CHOICES_MAX)]
    fit, unfit = reader(), reader()

    assert fit.feed(event(choices=choices))
    assert unfit.feed(event(choices=[*choices, {}])) == b""

    assert fit.fault is None
    assert unfit.fault is TOO_MANY
