"""A trailing `<turn|>` never reaches the caller, however it is cut; every other text does, and in time."""

import itertools

import pytest
from support.engine_events import (
    DONE,
    NAMES,
    at_every_cut,
    decoded,
    delta,
    name_of_call,
    plan_for,
    role,
    said,
    through,
)

from gateway.core.quirks import MendingReader
from gateway.core.quirks.channels import Channels
from gateway.core.quirks.turn_marker import MARKER, TurnMarker
from gateway.core.request import Endpoint

MARKS = "<turn|>"
ENDS = {
    "with-the-last-text": lambda text: [delta(finish="stop", stop=106, content=text)],
    "alone": lambda text: [delta(content=text), delta(finish="stop", stop=106)],
    "with-an-empty-text": lambda text: [delta(content=text), delta(finish="stop", stop=106, content="")],
}


def streamed(*texts: str) -> bytes:
    return role() + b"".join(delta(content=text) for text in texts) + delta(finish="stop") + DONE


@pytest.mark.parametrize("end", ENDS)
def test_a_trailing_marker_is_gone_wherever_the_bytes_are_cut(end: str) -> None:
    wire = role() + delta(content="caf\u00e9 ") + b"".join(ENDS[end]("<b>" + MARKS)) + DONE

    out = at_every_cut(lambda: [TurnMarker()], wire)

    assert said(out) == "caf\u00e9 <b>"
    assert decoded(out)[-1]["choices"][0]["finish_reason"] == "stop"
    assert len(decoded(out)) == len(decoded(wire))


@pytest.mark.parametrize("end", ENDS)
def test_a_marker_in_an_event_with_the_end_of_a_thought(end: str) -> None:
    wire = role() + b"".join(ENDS[end]("<|channel>thought\nHm.<channel|>Yes." + MARKS)) + DONE

    out = at_every_cut(lambda: [Channels(plan_for().asked), TurnMarker()], wire)

    assert said(out) == "Yes."
    assert said(out, "reasoning") == "Hm."


@pytest.mark.parametrize("cuts", [cut for n in (1, 2, 3) for cut in itertools.combinations(range(7), n)])
def test_a_marker_in_several_events(cuts: tuple[int, ...]) -> None:
    whole = "a" + MARKS
    at = [0, *(cut + 1 for cut in cuts), len(whole)]
    texts = [whole[start:end] for start, end in itertools.pairwise(at)]

    out, reader = through([TurnMarker()], [streamed(*texts)])

    assert said(out) == "a"
    assert reader.is_complete


@pytest.mark.parametrize(
    "texts",
    [
        pytest.param(["x < y"], id="less-than"),
        pytest.param(["x <", " y"], id="less-than-at-an-end"),
        pytest.param(["<tu", "rn", "|", ">>"], id="nearly"),
        pytest.param(["a<turn|", "a"], id="all-but-the-last"),
        pytest.param(["a<turn|>", "b"], id="in-the-middle"),
        pytest.param(["<turn|> opens what `<|turn>` closes", "."], id="talked-about"),
        pytest.param(["<<", "<t", "<turn"], id="a-beginning-at-the-end"),
        pytest.param(["<turn|>", "<turn|"], id="twice-nearly"),
        pytest.param(["\U0001f30a<", "\u2028"], id="beyond"),
    ],
)
def test_any_other_text_arrives_as_it_was(texts: list[str]) -> None:
    wire = streamed(*texts)

    assert said(at_every_cut(lambda: [TurnMarker()], wire)) == "".join(texts)


def test_text_that_cannot_begin_the_marker_is_never_held() -> None:
    reader = MendingReader([TurnMarker()], choices=1, names=NAMES, hide_usage=False)
    sent, got = "", ""

    for text in ["a", " <", "b", "<turn", "|x", "c<", "<", "t", "d"]:
        sent += text
        got += said(reader.feed(delta(content=text)))
        late = sent.removeprefix(got)
        assert sent.startswith(got)
        assert MARKER.startswith(late)
    assert got == sent


def test_an_event_without_the_marker_keeps_its_bytes() -> None:
    wire = streamed("caf\u00e9", " <b>", "x").replace(b'"choices":', b'"choices" : ')

    assert at_every_cut(lambda: [TurnMarker()], wire) == wire


def test_each_choice_has_an_end_of_its_own() -> None:
    wire = role() + role(1) + delta(content="a<tu") + delta(1, content="b<turn|>") + delta(content="rn|>")
    wire += delta(1, "stop") + delta(content="c") + delta(finish="length", content="<turn|>") + DONE

    out = at_every_cut(lambda: [TurnMarker()], wire, choices=2)

    assert (said(out), said(out, index=1)) == ("a<turn|>c", "b")


def test_what_stands_before_a_call_is_not_held_for_it() -> None:
    out, _ = through([TurnMarker()], [role() + delta(content="x<") + name_of_call()])

    last = decoded(out)[-1]["choices"][0]["delta"]
    assert last["content"] == "<"
    assert last["tool_calls"][0]["function"]["name"] == "get_weather"


def test_which_answers_it_is_for() -> None:
    assert [type(one) for one in plan_for("turn_marker_leaks", stream=True).remedies] == [TurnMarker]
    assert plan_for("turn_marker_leaks").remedies == []
    assert plan_for("turn_marker_leaks", stream=True, endpoint=Endpoint.COMPLETIONS).remedies == []
    assembled = plan_for("turn_marker_leaks", "tool_markup_leaks", tools=1)
    assert [type(one) for one in assembled.remedies] == [TurnMarker]
