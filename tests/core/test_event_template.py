"""Recognizing an event by a template gives the same result as parsing it, or none."""

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from core.test_sse import PUBLIC, ROLE, SERVED, STREAM, USAGE, delta, event, reader
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.event_template import LEARNED_MAX, TOKEN_BYTES_MAX, EventTemplate
from gateway.core.naming import ModelNames
from gateway.core.quirks import MendingReader
from gateway.core.quirks.remedy import Remedy
from gateway.core.sse import DONE, StreamReader

KNOWN = delta("Hello")


def knowing(known: bytes, shown: bytes | None = None) -> EventTemplate:
    template = EventTemplate()
    template.learn(known, known if shown is None else shown)
    template.applies = True
    return template


def match(template: EventTemplate, data: bytes) -> bytes | None:
    return template.match(data, 0, len(data))


@pytest.mark.parametrize(
    "text", ["Hello", "", " you", "error", "[DONE]", "data: ", "\n\n", "back\\slash", "é 🙂", "a" * 1000]
)
def test_an_event_that_differs_only_in_its_text_is_known(text: str) -> None:
    like = delta(text)

    assert match(knowing(KNOWN), like) is like


@pytest.mark.parametrize(
    "other",
    [
        delta('he said "no"'),  # a quotation mark, though it is escaped
        delta("", finish="stop"),
        delta("Hello", index=1),
        delta("Hello", role="assistant"),
        USAGE,
        DONE,
        b": keep-alive\n\n",
        b'data: {"error":{"message":"x"}}\n\n',
        KNOWN + KNOWN,
        KNOWN + DONE,
        KNOWN[:-1],
        KNOWN[: len(KNOWN) // 2],
        KNOWN.replace(b"Hello", b"").replace(b'"}', b"}"),
        event(choices=[]),
        b"",
    ],
)
def test_any_other_event_is_to_be_looked_into(other: bytes) -> None:
    assert match(knowing(KNOWN), other) is None


def test_beginning_and_end_do_not_overlap() -> None:
    template = knowing(b'data: {"text":"aXYXY"}\n\n')

    assert match(template, b'data: {"text":"\n\n') is None
    assert match(knowing(b'{"text":"a"text":"'), b'{"text":"') is None


def test_it_looks_at_its_part_of_the_bytes_alone() -> None:
    inside = b"f3\r\n" + KNOWN + b"\r\n"

    assert knowing(KNOWN).match(inside, 4, len(inside) - 2) is inside
    assert knowing(KNOWN).match(inside, 3, len(inside) - 2) is None
    assert knowing(KNOWN).match(inside, 4, len(inside)) is None


def test_what_is_shown_otherwise_is_shown_otherwise_again() -> None:
    names = ModelNames(SERVED, PUBLIC)
    template = knowing(KNOWN, names.in_event(KNOWN))
    like = delta("Bye")

    assert names.in_event(like) != like
    assert template.match(b"12" + like, 2, 2 + len(like)) == names.in_event(like)


def test_a_name_behind_the_text_is_not_shown_otherwise() -> None:
    known = b'data: {"choices":[{"delta":{"content":"a"}}],"model":"%b"}\n\n' % SERVED.encode()

    assert match(knowing(known, ModelNames(SERVED, PUBLIC).in_event(known)), known) is None


def test_the_longest_text_is_what_differs() -> None:
    known = event(choices=[{"index": 0, "delta": {"content": "", "reasoning": "why"}, "finish_reason": None}])
    like = known.replace(b"why", b"because")

    assert match(knowing(known), like) is like


def test_a_long_event_changes_nothing() -> None:
    template = knowing(KNOWN)
    long = delta("Hello" * TOKEN_BYTES_MAX, role="assistant")
    for _ in range(LEARNED_MAX):
        template.learn(long, long)

    assert match(template, delta("you")) is not None
    assert match(template, delta("you", role="assistant")) is None


def test_what_always_differs_is_not_learned_for_ever() -> None:
    template = EventTemplate()
    for number in range(LEARNED_MAX + 1):
        known = event(choices=[{"delta": {"content": "a"}}], number=number)
        template.learn(known, known)
        template.applies = True

    assert match(template, known) is None


class Shouting(Remedy):
    marks = b"<shout>"

    def part(self, index: int, part: dict[str, Any], finish: str | None) -> bool:
        return False


TEXTS = st.text() | st.sampled_from(
    ['"error"', "[DONE]", '"usage":{', '"finish_reason":"stop"', "\n\n", "\\"]
)
EVENTS = st.one_of(
    st.builds(delta, TEXTS),
    st.builds(delta, TEXTS, index=st.sampled_from([0, 1])),
    st.builds(delta, TEXTS, finish=st.sampled_from(["stop", "length", "abort"])),
    st.builds(lambda text: delta(None, reasoning=text), TEXTS),
    st.sampled_from(
        [USAGE, DONE, ROLE, b": ping\n\n", b'data: {"error":{"message":"x"}}\n\n', b"data: {\n\n"]
    ),
)


def fed(subject: StreamReader, pieces: Sequence[bytes], *, with_matching: bool) -> list[bytes]:
    out = []
    for piece in pieces:
        chunk = b"1\r\n" + piece + b"\r\n"
        seen = subject.match(chunk, 3, len(chunk) - 2) if with_matching else None
        if seen is None:
            out.append(subject.feed(piece))
        else:
            out.append(piece if seen is chunk else seen)
    return [*out, subject.end()]


def told(subject: StreamReader) -> Sequence[Any]:
    fault = subject.fault
    return subject.usage, subject.is_done, subject.is_complete, None if fault is None else str(fault)


@given(st.lists(EVENTS), st.sampled_from([SERVED, PUBLIC]), st.integers(1, 2), st.data())
def test_a_stream_is_the_same_with_matching_and_without(
    events: list[bytes], public: str, choices: int, data: st.DataObject
) -> None:
    whole = b"".join(events)
    cuts = data.draw(st.lists(st.integers(0, len(whole)), max_size=3))
    places = sorted({0, len(whole), *cuts})
    by_event = data.draw(st.booleans())
    pieces = events if by_event else [whole[a:b] for a, b in pairwise(places)]
    with_it, without = (reader(choices=choices, names=ModelNames(SERVED, public)) for _ in range(2))

    assert fed(with_it, pieces, with_matching=True) == fed(without, pieces, with_matching=False)
    assert told(with_it) == told(without)


def test_most_of_a_stream_is_recognized_by_its_template() -> None:
    subject = reader()
    for piece in (ROLE, delta("Hello"), delta(" you")):
        subject.feed(piece)
    like = delta("!")

    assert subject.match(like, 0, len(like)) is like
    assert json.loads(like[6:])["choices"][0]["delta"] == {"content": "!"}


@pytest.mark.parametrize(
    "before", [STREAM, STREAM + USAGE + DONE, b'data: {"error":{"message":"x"}}\n\n', b"data: half"]
)
def test_after_anything_else_a_stream_is_looked_into(before: bytes) -> None:
    subject = reader(choices=2)
    for piece in (ROLE, delta("Hello"), delta(" you"), before):
        subject.feed(piece)
    like = delta("!")

    assert subject.match(like, 0, len(like)) is None


def test_while_remedies_look_at_events_so_does_the_reader() -> None:
    remedy = Shouting()
    subject = MendingReader([remedy], choices=1, names=ModelNames(SERVED, SERVED), hide_usage=False)
    for piece in (ROLE, delta("Hello"), delta(" you")):
        subject.feed(piece)
    like = delta("!")
    assert subject.match(like, 0, len(like)) is None

    remedy.is_idle = True
    for piece in (delta("<shout>"), delta("you")):
        subject.feed(piece)
    assert subject.match(like, 0, len(like)) is like
