"""The way of an answer through remedies: what they change is written anew, all else keeps its bytes."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from support.engine_events import DONE, NAMES, at_every_cut, decoded, delta, event, role, through, usage

from gateway.core.answers import BackendError
from gateway.core.naming import ModelNames
from gateway.core.quirks import AssemblingReader, MendingReader, mend_whole
from gateway.core.quirks.remedy import Remedy
from gateway.core.quirks.tool_arguments import ToolArguments
from gateway.core.quirks.turn_marker import TurnMarker
from gateway.core.sse import CALLS_MAX, MORE_CHOICES_MAX, TOO_MANY


class Louder(Remedy):
    """Shouts the first word of each answer, and is done."""

    def part(self, index: int, part: dict[str, Any], finish: str | None) -> bool:
        if not part.get("content"):
            return False
        part["content"] = part["content"].upper()
        self.is_idle = True
        return True


class Waiting(Remedy):
    """Lets nothing go before the word `now`, and cannot stand `never`."""

    holds = True

    def part(self, index: int, part: dict[str, Any], finish: str | None) -> bool:
        if part.get("content") == "never":
            self.fault = BackendError("It said never.")
        self.holds = self.holds and part.get("content") != "now"
        return False


FIRST, SECOND, LAST = delta(content="caf\u00e9"), delta(content=" \u00e0 la cr\u00e8me"), delta(finish="stop")


def test_what_no_remedy_changes_keeps_its_bytes() -> None:
    spaced = FIRST.replace(b'"choices":', b'"choices" :  ')
    whole = role() + delta(content="caf\u00e9") + spaced + SECOND + LAST + usage() + DONE

    out = at_every_cut(lambda: [Louder()], whole)

    assert out == whole.replace("caf\u00e9".encode(), "CAF\u00c9".encode(), 1)


def test_an_idle_remedy_looks_into_nothing_more() -> None:
    broken = b'data: {"choices" as long as nobody looks\n\n'

    out, reader = through([Louder()], [role() + FIRST, broken + LAST + DONE])

    assert broken in out
    assert reader.is_complete


def test_what_is_written_anew_goes_by_the_public_name() -> None:
    reader = MendingReader([Louder()], choices=1, names=ModelNames("gemma-4", "ours"), hide_usage=False)

    assert {one["model"] for one in decoded(reader.feed(role() + FIRST + SECOND))} == {"ours"}


def test_nothing_begins_while_a_remedy_holds() -> None:
    reader = MendingReader([Waiting()], choices=1, names=NAMES, hide_usage=False)

    reader.feed(role() + FIRST)
    assert (reader.has_content, reader.may_begin) == (True, False)
    reader.feed(delta(content="now"))
    assert reader.may_begin


def test_nothing_begins_without_content() -> None:
    reader = MendingReader([Louder()], choices=1, names=NAMES, hide_usage=False)

    reader.feed(role())
    assert not reader.may_begin
    reader.feed(FIRST)
    assert reader.may_begin


def test_nothing_follows_what_cannot_be_mended() -> None:
    out, reader = through([Waiting(), Louder()], [role() + delta(content="never") + LAST + DONE])

    assert out == role()
    assert reader.fault == BackendError("It said never.")


def test_a_whole_answer_goes_through_the_same_remedies() -> None:
    message = {"role": "assistant", "content": "caf\u00e9"}
    body = json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}).encode()

    assert mend_whole([Waiting()], body) == (body, None)
    mended, fault = mend_whole([Louder()], body)
    assert json.loads(mended)["choices"][0]["message"]["content"] == "CAF\u00c9"
    assert fault is None


def test_a_whole_answer_that_cannot_be_read_is_none() -> None:
    body, fault = mend_whole([Louder()], b'{"choices":[')

    assert body == b'{"choices":['
    assert fault is not None


def test_a_whole_answer_that_is_no_object_keeps_its_bytes() -> None:
    assert mend_whole([Louder()], b'["choices"]') == (b'["choices"]', None)


CREDIBLE = 1 + MORE_CHOICES_MAX


@pytest.mark.parametrize("make", [ToolArguments, TurnMarker])
@pytest.mark.parametrize(
    "more",
    [
        pytest.param(lambda at: delta(at, content="<", tool_calls=[{"index": 0}]), id="choices"),
        pytest.param(lambda at: delta(-at, content="<", tool_calls=[{"index": 0}]), id="negative"),
        pytest.param(lambda at: delta(content="<", tool_calls=[{"index": at}]), id="calls"),
        pytest.param(lambda at: delta(content="<", tool_calls=[{}] * at), id="calls-at-once"),
    ],
)
def test_ever_new_choices_and_calls_are_a_fault(
    make: Callable[[], Remedy], more: Callable[[int], bytes]
) -> None:
    pieces = [role(), *[more(at) for at in range(CALLS_MAX + 2)]]
    assembling = AssemblingReader([make()], choices=1, names=NAMES)
    for piece in pieces:
        assembling.feed(piece)

    assert assembling.fault is TOO_MANY
    assert through([make()], pieces)[1].fault is TOO_MANY
    assert through([make()], pieces[:CREDIBLE])[1].fault is not TOO_MANY


def test_what_is_not_numbered_is_no_fault() -> None:
    strange = [{"index": "x", "delta": {"tool_calls": ["x", {"index": None}]}}, None, {"delta": None}]

    assert through([ToolArguments()], [role(), event(choices=strange)])[1].fault is not TOO_MANY
