"""Idempotency keys: what is one, which are the same, and what is kept under them."""

from dataclasses import replace

import pytest

from gateway.core.errors import InvalidRequest
from gateway.core.idempotency import KEY_CHARS_MAX, IdempotencyClaim, StoredAnswer, fingerprint, read_key

UUID = "8e03978e-40d5-43dd-bc93-6894a57f9324"


@pytest.mark.parametrize(
    ("written", "key"),
    [
        (f'"{UUID}"', UUID),
        (UUID, UUID),
        (f"  {UUID}\t", UUID),
        (r'"say \"hi\" \\ now"', r'say "hi" \ now'),
        ("a/b+c==,d", "a/b+c==,d"),
        ('it"s', 'it"s'),
        ("k" * KEY_CHARS_MAX, "k" * KEY_CHARS_MAX),
        ('"' + "k" * KEY_CHARS_MAX + '"', "k" * KEY_CHARS_MAX),
        ('"' + r"\"" * KEY_CHARS_MAX + '"', '"' * KEY_CHARS_MAX),
    ],
)
def test_a_key_is_read_quoted_or_bare(written: str, key: str) -> None:
    assert read_key(written) == key


@pytest.mark.parametrize(
    "written",
    [
        "",
        "   ",
        '""',
        '"',
        '"open',
        '"a" "b"',
        '"a"; p=1',
        r'"a\n"',
        '"a"b"',
        "two words",
        "caf\xe9",
        "a\x7f",
        "a\nb",
        "k" * (KEY_CHARS_MAX + 1),
        '"' + "k" * (KEY_CHARS_MAX + 1) + '"',
    ],
)
def test_what_is_no_key_is_refused(written: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read_key(written)
    assert caught.value.code == "invalid_idempotency_key"


def test_a_promise_is_of_one_route_and_key() -> None:
    one = IdempotencyClaim("team", "/v1/chat/completions", "k", "f", "req-1")

    assert one.id == replace(one, fingerprint="g", runner="req-2", owner="other").id
    assert len({one.id, replace(one, key="l").id, replace(one, route="/v1/completions").id}) == 3
    assert replace(one, route="/v1/a", key="bc").id != replace(one, route="/v1/ab", key="c").id
    assert len(one.id) == len(replace(one, key="k" * KEY_CHARS_MAX).id)


def test_bodies_are_told_apart_byte_by_byte() -> None:
    assert fingerprint(b'{"a":1}') == fingerprint(b'{"a":1}') != fingerprint(b'{"a": 1}')


def test_an_answer_comes_out_as_it_went_in() -> None:
    answer = StoredAnswer(200, [(b"content-type", b"text/plain"), (b"x-a", b"\xe9")], b"one\ntwo\n\x00\xff")

    assert StoredAnswer.decoded(answer.encoded()) == answer
    empty = StoredAnswer(204, [], b"")
    assert StoredAnswer.decoded(empty.encoded()) == empty
