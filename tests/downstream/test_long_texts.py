"""Long texts: counted where they lie in the body, piece by piece, as if they had been decoded at once."""

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.errors import InvalidRequest
from gateway.core.request import Endpoint, Turn
from gateway.downstream import long_texts, wire
from gateway.downstream.long_texts import LONG_BYTES, PIECE_BYTES, SLICE_BYTES
from gateway.downstream.reading import Received
from gateway.downstream.wire import WireRequest, WireRules
from gateway.ports import Arrival

PROSE = 'The "river" was wide,\nand nobody\thad crossed it since the \\spring. '


def read(messages: object, *, ascii_only: bool = True, rules: WireRules | None = None) -> WireRequest:
    body = json.dumps({"model": "m", "messages": messages}, ensure_ascii=ascii_only).encode()
    return read_body(body, rules or WireRules())


def read_body(body: bytes, rules: WireRules) -> WireRequest:
    return wire.read(Endpoint.CHAT, Received(Arrival("req-1", 0.0, 0.0), body, None, {}, ()), rules)


def message(content: object, role: str = "user", **fields: object) -> dict[str, object]:
    return {"role": role, "content": content, **fields}


def only_turn(incoming: WireRequest) -> Turn:
    (turn,) = incoming.request.prompt.turns
    return turn


def long_of(text: str, *, ascii_only: bool) -> list[str]:
    long = only_turn(read([message(text)], ascii_only=ascii_only)).long
    assert long is not None
    return list(long.pieces())


TEXTS: dict[str, str] = {
    "prose": PROSE * 4_000,
    "one-word": "a" * 300_000,
    "quotes": '"' * 200_000,
    "backslashes": "\\" * 200_001,
    "written-line-ends": "\\n" * 100_000,
    "line-ends": "x" + "\n" * 200_000 + "x",
    "blanks": "x" + " " * 300_000 + "x",
    "white-space-around": "\n\t " * 50_000 + PROSE * 3_000 + " \r\n" * 50_000,
    "nothing-but-white-space": " \n" * 100_000,
    "no-ascii": "Die Brücke führt über Flüsse; δάση και ουρανός. " * 3_000,
    "without-spaces": "川はとても広く春からだれも渡っていません" * 6_000,
    "emoji": "😀" * 60_000,
    "one-emoji": PROSE * 2_000 + "😀" + PROSE * 2_000,
    "control-characters": "\x00\x1f\x7f" * 40_000,
}


@pytest.mark.parametrize("ascii_only", [True, False], ids=["escaped", "as-it-is"])
@pytest.mark.parametrize("name", TEXTS)
def test_the_pieces_of_a_text_are_the_text(name: str, ascii_only: bool) -> None:
    text = TEXTS[name]

    pieces = long_of(text, ascii_only=ascii_only)

    assert "".join(pieces) == text.strip()
    assert all(pieces)


@settings(max_examples=30, deadline=None)
@given(st.text(min_size=1, max_size=40), st.integers(0, 9), st.booleans())
def test_whatever_a_text_holds_its_pieces_are_the_text(unit: str, shift: int, ascii_only: bool) -> None:
    text = "x" * shift + unit * (2 * PIECE_BYTES // len(unit))

    assert "".join(long_of(text, ascii_only=ascii_only)) == text.strip()


def test_a_text_is_cut_behind_its_lines_and_before_its_words() -> None:
    lines = long_of("one two three four five six\n" * 40_000, ascii_only=True)
    words = long_of("river " * 200_000, ascii_only=True)

    assert len(lines) > 3
    assert all(piece.endswith("six") for piece in lines[:-1])  # the line's end begins the next piece
    assert all(piece.startswith("\none") for piece in lines[1:])
    assert all(piece.startswith(" river") for piece in words[1:])
    assert all(piece.endswith("river") for piece in words)


def test_only_a_long_text_is_left_where_it_lies() -> None:
    short, long = "x" * (LONG_BYTES - 3), "x" * LONG_BYTES

    first, second = read([message(short), message(long)]).request.prompt.turns

    assert (first.texts, first.long) == ((short,), None)
    assert (second.texts, second.long is not None) == ((), True)


@pytest.mark.parametrize(
    ("sent", "texts"),
    [
        (message(PROSE * 2_000, role="assistant"), (PROSE * 2_000,)),
        (message(PROSE * 2_000, role="tool"), (PROSE * 2_000,)),
        (message([PROSE * 2_000, "x"]), (PROSE * 2_000, "x")),
        (message(None, x=PROSE * 2_000), ()),
    ],
    ids=["an-assistants", "a-tools", "parts", "elsewhere"],
)
def test_what_is_more_than_a_text_is_decoded(sent: dict[str, Any], texts: tuple[str, ...]) -> None:
    turn = only_turn(read([sent]))

    assert (turn.texts, turn.long) == (texts, None)


@pytest.mark.parametrize("at", [0, LONG_BYTES, SLICE_BYTES - 1, SLICE_BYTES + 5])
def test_what_is_not_utf_8_is_refused_wherever_it_stands(at: int) -> None:
    body = b'{"model":"m","messages":[{"role":"user","content":"%b\xff%b"}]}' % (b"x" * at, b"y" * LONG_BYTES)

    with pytest.raises(InvalidRequest) as caught:
        read_body(body, WireRules())

    assert (caught.value.code, caught.value.param) == ("invalid_json", "messages.0")


def test_a_character_may_stand_across_two_slices() -> None:
    text = "x" * (SLICE_BYTES - 2) + "川" * 40_000

    assert "".join(long_of(text, ascii_only=False)) == text


def different(text: str) -> list[str]:
    """Return texts as long as this one, each with one other character, somewhere."""
    dice = random.Random(5)
    places = [0, len(text) // 2, len(text) - 1, *(dice.randrange(len(text)) for _ in range(20))]
    return [text[:at] + ("y" if text[at] != "y" else "z") + text[at + 1 :] for at in places]


def test_texts_that_differ_anywhere_have_different_keys() -> None:
    text = PROSE * 40_000  # several slices

    def key(text: str) -> int:
        long = only_turn(read([message(text)])).long
        assert long is not None
        return long.key

    assert key(text) == key(text)
    assert key(text) not in {key(other) for other in different(text)}


@pytest.mark.parametrize(
    "changed",
    [
        lambda first, after: [first, *after, message([{"type": "text", "text": "more"}])],
        lambda first, after: [first, *after, message("x", n=1), message("y" * LONG_BYTES)],
    ],
    ids=["parts-follow", "a-long-one-follows"],
)
def test_a_long_text_is_a_prefix_of_what_follows_it(changed: Callable[[Any, Any], Any]) -> None:
    first, after = message(PROSE * 3_000, role="system"), [message("a")]

    short = read([first, *after]).request.prefixes
    long = read(changed(first, after)).request.prefixes
    other = read([message(PROSE * 3_000 + "x", role="system"), *after]).request.prefixes

    assert [key for key, _ in short] == [key for key, _ in long[:2]]
    assert [key for key, _ in short] != [key for key, _ in other]
    assert short[0][1] > 0.9


def test_a_text_is_the_same_read_at_once_or_member_by_member() -> None:
    dropped = WireRules(drop_fields=frozenset({"messages_"}))
    body = json.dumps({"model": "m", "messages_": 1, "messages": [message(PROSE * 3_000)]}).encode()
    by_member = read_body(body, dropped)

    assert by_member.request.prompt == read([message(PROSE * 3_000)]).request.prompt
    assert by_member.dropped == ("messages_",)


def test_calls_are_a_prefix_of_what_follows_them_however_they_are_read() -> None:
    def calls(name: str) -> dict[str, object]:
        function = {"name": name, "arguments": '{"a": 1}'}
        return message(None, role="assistant", tool_calls=[{"type": "function", "function": function}])

    short = read([message("x"), calls("f")]).request.prefixes
    long = read([message("x"), calls("f"), message("y", role="tool")]).request.prefixes
    other = read([message("x"), calls("g")]).request.prefixes
    dropped = WireRules(drop_fields=frozenset({"messages_"}))
    body = json.dumps({"model": "m", "messages_": 1, "messages": [message("x"), calls("f")]}).encode()
    by_member = read_body(body, dropped).request.prefixes

    assert [key for key, _ in short] == [key for key, _ in long[:2]] == [key for key, _ in by_member]
    assert short[0] == other[0]
    assert short[1] != other[1]
    assert long[1][1] < short[1][1] == 1


def test_the_texts_used_last_are_remembered_as_well_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_texts, "WELL_FORMED_MAX", 2)
    known = long_texts._WellFormed()
    known.add((1, 1))
    known.add((2, 2))
    assert known.holds((1, 1))
    known.add((3, 3))
    assert [known.holds((one, one)) for one in (1, 2, 3)] == [True, False, True]


def test_a_long_body_travels_on_as_it_was_sent() -> None:
    messages = [message(TEXTS["one-emoji"]), message("x")]

    sent = json.loads(read(messages).body_for("s"))

    assert sent == {"model": "s", "messages": messages}


def test_a_chat_is_decoded_at_once_only_if_it_is_short() -> None:
    def seen(messages: object) -> bool:
        body = json.dumps({"model": "m", "messages": messages}).encode()
        return wire.chat_of(wire.members_of(body)) is not None

    assert seen([message(PROSE)] * 10)
    assert not seen([message("x" * 2 * LONG_BYTES)])
    assert not seen([message(PROSE)] * (SLICE_BYTES // len(PROSE)))
