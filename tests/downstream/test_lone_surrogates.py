"""Half characters are replaced wherever they stand, and nothing else changes."""

import json
from itertools import product

import pytest

from gateway.downstream import lone_surrogates
from gateway.downstream.lone_surrogates import LOOKS_MAX, replace_lone_surrogates
from gateway.downstream.long_texts import SLICE_BYTES

PIECES = (rb"\ud83d", rb"\uDE00", rb"\\", rb"\"", b"ud83d", b"a", rb"\u0041")


@pytest.mark.parametrize("slice_bytes", [7, SLICE_BYTES])
def test_every_half_is_found_and_no_pair(monkeypatch: pytest.MonkeyPatch, slice_bytes: int) -> None:
    monkeypatch.setattr(lone_surrogates, "SLICE_BYTES", slice_bytes)
    for pieces in product(PIECES, repeat=4):
        body = b'{"k":"%b"}' % b"".join(pieces)
        text = json.loads(body)["k"]

        found = replace_lone_surrogates(body)

        assert (found is None) == text.isprintable()  # half a character is not
        whole = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        assert json.loads(found or body)["k"] == whole


def test_all_else_keeps_its_bytes() -> None:
    body = rb'{ "a": 1.10, "b":"\u00e9\ud83d\ude00\ud83d", "a": 1e400}'

    assert replace_lone_surrogates(body) == body.replace(rb'\ud83d"', rb'\ufffd"')


def test_a_half_far_into_a_long_body_is_found() -> None:
    body = b'{"a":"%b","b":"cut \\ud83d"}' % (b"A" * 3 * SLICE_BYTES)

    assert replace_lone_surrogates(body) == body.replace(rb"\ud83d", rb"\ufffd")


@pytest.mark.parametrize("found", [rb"\ud83d", rb"\\ud83d"], ids=["halves", "what-looks-like-them"])
def test_a_body_of_nothing_else_is_left_as_it_is(found: bytes) -> None:
    body = b'{"a":"%b","b":"cut \\ud83d"}'

    assert replace_lone_surrogates(body % (found * (LOOKS_MAX - 1))) is not None
    assert replace_lone_surrogates(body % (found * LOOKS_MAX)) is None
