"""The long strings of a body are cut out of it: what is read is what is read of the body as a whole."""

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from gateway.core import estimation
from gateway.core.errors import InvalidRequest
from gateway.core.policy import TemplateCosts
from gateway.core.request import Changes, Endpoint, LongText, Prompt
from gateway.downstream import long_texts, wire
from gateway.downstream.cut_out import ESCAPED_MAX, MARK, QUOTES_MAX, may_hold_long_texts
from gateway.downstream.long_texts import KEPT_BYTES, LONG_BYTES, SLICE_BYTES, long_text_at
from gateway.downstream.reading import Received
from gateway.downstream.wire import WireRequest, WireRules
from gateway.ports import Arrival

PROSE = 'The "river" was wide,\nand nobody\thad crossed it since the \\spring. '
DOCUMENT = PROSE * 3_000
PLAIN = "The river was wide. " * 4_000


def body_of(messages: object, **fields: object) -> bytes:
    return json.dumps({"model": "m", "messages": messages, **fields}, ensure_ascii=False).encode()


def message(content: object, role: str = "user", **fields: object) -> dict[str, object]:
    return {"role": role, "content": content, **fields}


def read(body: bytes, rules: WireRules | None = None) -> WireRequest:
    received = Received(Arrival("req-1", 0.0, 0.0), body, None, {}, ())
    return wire.read(Endpoint.CHAT, received, rules or WireRules())


def as_a_whole(body: bytes) -> WireRequest:
    """Read a body that has a member which is dropped: such a one is never cut."""
    assert body.endswith(b"}")
    return read(body[:-1] + b',"dropped":1}', WireRules(drop_fields=frozenset({"dropped"})))


def both_ways(body: bytes) -> tuple[WireRequest, WireRequest]:
    """Read a body that is cut, and as a whole: either way it is handed on as the same."""
    cut, whole = read(body), as_a_whole(body)
    assert cut.cut is not None
    assert whole.cut is None
    assert cut.size_bytes == len(body)
    assert cut.member("messages") == whole.member("messages")
    assert cut.body_for("served") == whole.body_for("served")
    return cut, whole


def texts_of(request: WireRequest) -> list[str]:
    return [
        "".join(turn.texts) if turn.long is None else "".join(turn.long.pieces())
        for turn in request.request.prompt.turns
    ]


SYSTEM = 'Answer in JSON, like {"answer": "a \\"word\\""}. '
FOUND: dict[str, bytes] = {
    "alone": body_of([message(DOCUMENT)]),
    "behind-a-system-prompt": body_of([message(SYSTEM, role="system"), message(DOCUMENT)]),
    "behind-a-long-system-prompt": body_of([message("Be brief. " * 4_000, role="system"), message(DOCUMENT)]),
    "a-system-prompt-itself": body_of([message(DOCUMENT, role="system"), message("What is it about?")]),
    "between-members": body_of(
        [message("a"), message(DOCUMENT, name="b"), message("c", role="assistant"), message([{"text": "d"}])],
        tools=[{"type": "function", "function": {"name": "f", "parameters": {"x": "\\"}}}],
        stream=True,
    ),
    "nothing-but-quotes": body_of([message('"' * LONG_BYTES)]),
    "nothing-but-backslashes": body_of([message("\\" * 200_001)]),
    "backslashes-at-its-ends": body_of([message("\\" * 999 + DOCUMENT + "\\" * 1_001)]),
    "emoji": body_of([message("😀" * 60_000)]),
    "escaped": json.dumps({"messages": [message("😀ä" * 60_000)], "model": "m"}).encode(),
    "behind-a-byte-order-mark": b"\xef\xbb\xbf" + body_of([message(DOCUMENT)]),
    "of-several-slices": body_of([message(DOCUMENT * 20)]),
    "an-assistants": body_of([message(DOCUMENT, role="assistant")]),
    "a-tools": body_of([message("x"), message(DOCUMENT, role="tool")]),
    "beside-calls": body_of([message(DOCUMENT, tool_calls=[])]),
    "beside-calls-and-their-thought": body_of(
        [
            message(
                DOCUMENT,
                role="assistant",
                tool_calls=[{"function": {"name": "f", "arguments": "{}"}}],
                reasoning="I call f.",
            )
        ]
    ),
    "two-without-quotes": body_of([message(PLAIN, role="system"), message(PLAIN + "x")]),
    "between-two-without-quotes": body_of([message(PLAIN), message("x"), message(DOCUMENT), message(PLAIN)]),
    "many-without-quotes": body_of([message(f"{PLAIN}{number}") for number in range(40)]),
    "short-with-many-quotes-between": body_of(
        [message(PLAIN), message('"' * ESCAPED_MAX * 2), message(PLAIN, role="tool")]
    ),
    "two-with-quotes": body_of([message(DOCUMENT), message(DOCUMENT + "x")]),
    "of-all-kinds": body_of(
        [message(text, role=role) for text in (DOCUMENT, PLAIN, "x", DOCUMENT) for role in ("user", "system")]
    ),
    "behind-a-quoting-system-prompt": body_of(
        [message('"' * (ESCAPED_MAX + 1), role="system"), message(DOCUMENT)]
    ),
    "behind-many-messages": body_of([message(str(n)) for n in range(QUOTES_MAX // 3)] + [message(DOCUMENT)]),
    "named-twice": body_of([message("x")])[:-1]
    + b',"messages":'
    + json.dumps([message(DOCUMENT)]).encode()
    + b"}",
}


@pytest.mark.parametrize("name", FOUND)
def test_a_body_with_one_long_text_is_cut_and_read_as_a_whole_one_is(name: str) -> None:
    cut, whole = both_ways(FOUND[name])

    assert cut.request == whole.request
    assert texts_of(cut) == texts_of(whole)
    changes: Changes = {("stream_options", "include_usage"): True}
    assert cut.body_for("served", changes) == whole.body_for("served", changes)


BASE64 = "iVBORw0KGgo+/" * 9_000
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + BASE64, "detail": "high"}}
QUESTION = {"type": "text", "text": " What is it about? "}
LONG_PART = {"type": "text", "text": f"\n{DOCUMENT}\n"}
IN_PARTS: dict[str, bytes] = {
    "a-text": body_of([message([LONG_PART])]),
    "before-a-text": body_of([message([LONG_PART, QUESTION])]),
    "between-texts": body_of([message([QUESTION, LONG_PART, QUESTION]), message("Hurry.")]),
    "in-a-system-prompt": body_of([message([QUESTION, LONG_PART, QUESTION], role="system"), message("Hm?")]),
    "nothing-but-blanks": body_of(
        [message([QUESTION, {"type": "text", "text": " " * LONG_BYTES}, QUESTION])]
    ),
    "a-text-beside-an-image": body_of(
        [message([{"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBO"}}, LONG_PART])]
    ),
    "an-image": body_of([message("Look."), message([QUESTION, IMAGE])]),
    "an-image-by-itself": body_of([message([{"type": "image_url", "image_url": "data:," + BASE64}])]),
    "a-recording": body_of(
        [message([QUESTION, {"type": "input_audio", "input_audio": {"data": BASE64, "format": "wav"}}])]
    ),
    "an-assistants": body_of([message([LONG_PART], role="assistant")]),
    "beside-calls": body_of([message([LONG_PART], tool_calls=[])]),
    "an-image-whose-slashes-are-escaped": body_of([message([QUESTION, IMAGE])]).replace(b"/", b"\\/"),
    "an-image-with-an-escape": body_of([message([IMAGE | {"image_url": {"url": "data:\\" + BASE64}}])]),
    "an-image-beyond-ascii": body_of([message([IMAGE | {"image_url": {"url": "data:ä" + BASE64}}])]),
    "several-images": body_of([message([QUESTION, IMAGE, IMAGE]), message([IMAGE, QUESTION])] * 5),
    "a-text-between-images": body_of([message([IMAGE, LONG_PART, IMAGE]), message("x"), message([IMAGE])]),
    "two-texts-and-an-image": body_of(
        [message([{"type": "text", "text": PLAIN}, IMAGE, QUESTION, {"type": "text", "text": PLAIN + "x"}])]
    ),
    "a-result-with-an-image": body_of([message([IMAGE, QUESTION], role="tool")]),
    "an-image-of-several-slices": body_of(
        [message([IMAGE | {"image_url": {"url": "data:image/png;base64," + BASE64 * 20}}, QUESTION])]
    ),
}


def counted(request: WireRequest) -> list[str]:
    """Return the texts that are counted."""
    texts = estimation.pieces(request.request.prompt, TemplateCosts()).texts
    return [piece.text if piece.long is None else "".join(piece.long.pieces()) for piece in texts]


@pytest.mark.parametrize("name", IN_PARTS)
def test_so_is_one_whose_long_text_is_a_part_or_no_text(name: str) -> None:
    cut, whole = both_ways(IN_PARTS[name])

    assert counted(cut) == counted(whole)
    assert estimation.pieces(cut.request.prompt, TemplateCosts()).fixed_tokens == (
        estimation.pieces(whole.request.prompt, TemplateCosts()).fixed_tokens
    )
    assert replace(cut.request, prompt=Prompt()) == replace(whole.request, prompt=Prompt())


def test_a_part_is_known_again_only_among_the_same_texts() -> None:
    def key(*parts: dict[str, str]) -> object:
        (piece,) = estimation.pieces(read(body_of([message(parts)])).request.prompt, TemplateCosts()).texts
        assert piece.long is not None
        return piece.long.size_bytes, piece.long.key

    assert key(LONG_PART, QUESTION) == key(LONG_PART, QUESTION)
    assert len({key(LONG_PART), key(LONG_PART, QUESTION), key(QUESTION, LONG_PART)}) == 3


def test_recordings_that_could_be_taken_for_one_are_counted_each() -> None:
    recording = {"type": "input_audio", "input_audio": {"data": DOCUMENT}}

    assert read(body_of([message([recording, recording])])).request.audios == 2


@pytest.mark.parametrize("slash", [b"/", b"\\/"])
def test_an_image_from_elsewhere_is_refused_however_long_its_address(slash: bytes) -> None:
    body = body_of([message([IMAGE | {"image_url": {"url": "https://example.com/" + BASE64}}])])
    with pytest.raises(InvalidRequest) as caught:
        read(body.replace(b"/", slash))

    assert caught.value.code == "remote_media_not_allowed"


def test_an_image_with_a_line_break_in_it_is_no_json() -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(body_of([message([IMAGE])]).replace(b"+/iV", b"+/\niV", 1))

    assert caught.value.code == "invalid_json"


ASIDE: dict[str, bytes] = {
    "short": body_of([message("x" * (LONG_BYTES - 3))]),
    "two-long-parts": body_of([message([{"type": "text", "text": DOCUMENT + end} for end in "ab"])]),
    "a-bare-part": body_of([message([DOCUMENT])]),
    "a-refusal": body_of([message([{"type": "refusal", "refusal": DOCUMENT}])]),
    "a-part-of-a-part": body_of([message([IMAGE | {"text": {"a": {"b": DOCUMENT}}}])]),
    "no-message": body_of([message("x")], user=DOCUMENT),
    "too-much-before-it": body_of([message([QUESTION] * (QUOTES_MAX // 3) + [LONG_PART])]),
    "what-looks-like-the-next-message": body_of([message(DOCUMENT + '"content'), message(DOCUMENT)]),
    "many-messages": body_of([message(PROSE * 20) for _ in range(200)]),
    "what-stands-for-a-text": body_of([message(MARK), message(DOCUMENT)]),
}


@pytest.mark.parametrize("name", ASIDE)
def test_any_other_body_is_read_as_a_whole(name: str) -> None:
    body = ASIDE[name]

    found, whole = read(body), as_a_whole(body)

    assert found.cut is None
    assert found.request == whole.request
    assert texts_of(found) == texts_of(whole)
    assert found.body_for("served") == whole.body_for("served")


LONG = "x " * LONG_BYTES
BAD: dict[str, tuple[bytes, str]] = {
    "a-line-break": (b'{"model":"m","messages":[{"role":"user","content":"%b\n%b"}]}', "invalid_json"),
    "an-escape": (b'{"model":"m","messages":[{"role":"user","content":"%b\\x%b"}]}', "invalid_json"),
    "no-utf-8": (b'{"model":"m","messages":[{"role":"user","content":"%b\xff%b"}]}', "invalid_json"),
    "a-quote": (b'{"model":"m","messages":[{"role":"user","content":"%b" %b"}]}', "invalid_json"),
    "no-end": (b'{"model":"m","messages":[{"role":"user","content":"%b%b', "invalid_json"),
    "no-end-of-it": (b'{"model":"m","messages":[{"role":"user","content":"%b%b\\"}]}', "invalid_json"),
    "something-behind": (b'{"model":"m","messages":[{"role":"user","content":"%b%b"}]} 1', "invalid_json"),
    "no-model": (b'{"messages":[{"role":"user","content":"%b%b"}]}', "invalid_request"),
    "no-number": (
        b'{"model":"m","max_tokens":"1","messages":[{"role":"user","content":"%b%b"}]}',
        "invalid_request",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_with_a_body_is_said_as_of_any_other(name: str) -> None:
    form, code = BAD[name]
    with pytest.raises(InvalidRequest) as caught:
        read(form % (LONG.encode(), LONG.encode()))
    with pytest.raises(InvalidRequest) as short:
        read(form % (b"x", b"x"))

    assert caught.value.code == short.value.code == code
    assert MARK not in caught.value.message


def test_half_a_character_is_mended_as_ever() -> None:
    body = b'{"model":"m","messages":[{"role":"user","content":"%b\\ud83d"}]}' % LONG.encode()

    (text,) = texts_of(read(body))

    assert text == LONG + "\N{REPLACEMENT CHARACTER}"


PARTS = ['"', "\\", "\n", "word ", "ä", "},{", '","', "😀"]


@cache
def drawn() -> list[str]:
    """Return many parts in random order."""
    return random.Random(6).choices(PARTS, k=200_000)


def mixed(dice: random.Random, count: int) -> str:
    """Return a text of so many parts, from anywhere among those that were drawn."""
    at = dice.randrange(len(drawn()) - count)
    return "".join(drawn()[at : at + count])


def test_wherever_the_ends_are_guessed_what_is_read_is_right() -> None:
    """Bodies of strings of all lengths, with quotes and backslashes at random: cut or not, read the same."""
    dice = random.Random(3)
    cut = 0
    for _ in range(200):
        contents = [mixed(dice, dice.choice([1, 9, 700, 40_000])) for _ in range(dice.randrange(1, 4))]
        body = body_of([message(text) for text in contents], user=dice.choice(["", '"', "\\"]))
        found = read(body)
        cut += found.cut is not None
        assert [text.strip() for text in texts_of(found)] == [text.strip() for text in contents]
        assert found.request == as_a_whole(body).request
        assert json.loads(found.body_for("m")) == json.loads(body)
    assert 20 < cut < 180


def test_in_parts_as_well() -> None:
    dice = random.Random(4)
    cut = 0
    for _ in range(150):
        texts = [mixed(dice, dice.choice([1, 9, 700, 40_000])) for _ in range(dice.randrange(1, 5))]
        parts = [{"type": "text", "text": text} for text in texts]
        body = body_of([message(parts, role=dice.choice(["user", "system"])), message("Well?")])
        found, whole = read(body), as_a_whole(body)
        cut += found.cut is not None
        assert counted(found) == counted(whole)
        assert found.request.prefixes == whole.request.prefixes
        assert json.loads(found.body_for("m")) == json.loads(body)
    assert 20 < cut < 130


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (body_of([message("x" * 9)]), False),
        (body_of([message(PROSE * 20) for _ in range(200)]), False),
        (json.dumps({"messages": [message(PROSE * 20)] * 200}, separators=(",", ":")).encode(), False),
        (body_of([message("x" * 9)] * 5_000), False),
        (body_of([message("x")] * 3_000 + [message(DOCUMENT)] + [message("x")] * 3_000), True),
        (body_of([message(DOCUMENT)]), True),
        (body_of([message('", "' * LONG_BYTES)]), True),
        (json.dumps([message("x")] * 3_000, indent="\t").replace(" ", "").encode(), True),  # not seen: fine
    ],
    ids=["short", "many", "compact", "tiny", "between", "one", "like-an-array", "written-with-tabs"],
)
def test_where_no_text_can_be_long_none_is_looked_for(body: bytes, expected: bool) -> None:
    assert may_hold_long_texts(body) is expected


def test_no_long_text_is_overlooked() -> None:
    dice = random.Random(5)
    short = [mixed(dice, dice.randrange(30)) for _ in range(18_000)]
    for _ in range(200):
        at = dice.randrange(9_000)
        before = json.dumps(short[at : at + dice.randrange(9_000)])
        content = json.dumps(mixed(dice, LONG_BYTES))
        content = content[: LONG_BYTES - 2].rstrip("\\").ljust(LONG_BYTES - 1, "x") + '"'
        assert may_hold_long_texts(f"[{before}, {content}]".encode())


# ---------------------------------------------------------------- what is decoded by now


@pytest.fixture
def kept() -> Iterator[Any]:
    """What is kept, which is nothing before and behind."""
    assert long_texts._kept.bytes == 0
    yield long_texts._kept
    assert long_texts._kept.bytes == 0


def new_text(size: int) -> tuple[str, LongText]:
    text = random.randbytes(4 * size // 9).hex(" ", 4)
    found = long_text_at(memoryview(text.encode()))
    assert found is not None
    return text, found


def test_a_new_text_is_kept_decoded_until_it_is_counted(kept: Any) -> None:
    text, found = new_text(300_000)
    assert len(text) <= kept.bytes <= 1.1 * len(text)
    assert "".join(found.pieces()) == text
    assert kept.bytes == 0
    assert "".join(found.pieces()) == text  # decoded anew


def test_a_text_whose_request_is_gone_is_not_kept(kept: Any) -> None:
    _, found = new_text(300_000)
    assert kept.bytes
    del found
    assert kept.bytes == 0


def test_a_text_that_was_met_before_is_not_decoded_before_it_is_asked_for(kept: Any) -> None:
    text, found = new_text(300_000)
    list(found.pieces())
    again = long_text_at(memoryview(text.encode()))

    assert again is not None
    assert again == found
    assert kept.bytes == 0
    assert "".join(again.pieces()) == text


def test_all_requests_together_keep_no_more_than_that(kept: Any) -> None:
    found = [new_text(SLICE_BYTES) for _ in range(KEPT_BYTES // SLICE_BYTES + 3)]

    assert KEPT_BYTES - 2 * SLICE_BYTES < kept.bytes <= KEPT_BYTES
    assert all("".join(long.pieces()) == text for text, long in found)


def test_a_text_too_long_to_be_kept_is_decoded_when_it_is_counted(kept: Any) -> None:
    text = PROSE.replace('"', "").replace("\\", "").replace("\n", " ").replace("\t", " ") * (KEPT_BYTES // 60)
    found = long_text_at(memoryview(text.encode()))

    assert found is not None
    assert kept.bytes == 0
    assert "".join(found.pieces()) == text.strip()
