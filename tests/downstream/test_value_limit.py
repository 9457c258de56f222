"""A body of more values than can be decoded at once is known as one, and a text with many commas is not."""

import json

import pytest

from gateway.core.value_limit import (
    CONTAINERS_MAX,
    QUOTES_MAX,
    SMALL_BYTES,
    STRINGS_MAX,
    VALUES_MAX,
    is_crowded,
)
from gateway.downstream.value_limit import may_be_crowded

PROSE = "The river was wide, and nobody had crossed it since the spring. " * 40_000
TABLE = '1,22,"3,4",\\,' * (VALUES_MAX // 4)  # of five commas each


@pytest.mark.parametrize(
    ("body", "may_be", "expected"),
    [
        (b"", False, False),
        (b'"', False, False),
        (b'"\\"', False, False),
        (json.dumps([0] * VALUES_MAX + [TABLE]).encode(), None, False),
        (json.dumps([[[]]] * (VALUES_MAX - 1) + [TABLE]).encode(), None, False),
        (json.dumps([[[], []]] * (CONTAINERS_MAX // 3 + 1)).encode(), True, True),
        (json.dumps([{"a": {}}] * (CONTAINERS_MAX // 2 + 1)).encode(), True, True),
        (json.dumps("[{" * CONTAINERS_MAX).encode(), True, False),
        (json.dumps("[" * CONTAINERS_MAX + "}").encode(), True, False),
        (json.dumps([0] * (VALUES_MAX + 2)).encode(), None, True),
        (json.dumps([""] * (VALUES_MAX + 2)).encode(), None, True),
        (json.dumps({str(number): 0 for number in range(VALUES_MAX + 2)}).encode(), None, True),
        (json.dumps(PROSE).encode(), False, False),
        (json.dumps(TABLE).encode(), True, False),
        (json.dumps([TABLE, 0, TABLE, 0]).encode(), True, False),
        (json.dumps([TABLE, *[0] * (VALUES_MAX + 2)]).encode(), True, True),
        (json.dumps('",' * QUOTES_MAX).encode(), True, True),
        (b"," * (VALUES_MAX + SMALL_BYTES), True, True),
        (b'"' + b"," * (VALUES_MAX + SMALL_BYTES), True, False),
    ],
    ids=[
        "empty",
        "one-quote",
        "an-open-string",
        "just-not",
        "arrays-just-not",
        "arrays",
        "objects",
        "brackets-in-a-text",
        "nothing-but-brackets-in-a-text",
        "numbers",
        "strings",
        "members",
        "prose",
        "a-table",
        "tables",
        "numbers-behind-a-table",
        "more-quotes-than-are-looked-at",
        "no-json",
        "a-string-without-end",
    ],
)
def test_values_are_told_from_what_stands_in_texts(body: bytes, may_be: bool | None, expected: bool) -> None:
    """`may_be`: None where it is too close to be known by a few places."""
    if may_be is not None:
        assert may_be_crowded(body) is may_be
    assert is_crowded(body) is expected


def test_where_more_values_are_allowed_they_are_numbers() -> None:
    numbers = json.dumps([0] * VALUES_MAX * 3).encode()
    strings = json.dumps(["0"] * VALUES_MAX * 3).encode()

    assert not is_crowded(numbers, most=VALUES_MAX * 3)
    assert is_crowded(numbers, most=VALUES_MAX * 3 - 2)
    assert is_crowded(strings, most=VALUES_MAX * 3)
    assert VALUES_MAX * 2 <= STRINGS_MAX < VALUES_MAX * 3
