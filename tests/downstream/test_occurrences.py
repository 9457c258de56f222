"""How often a character stands in a body."""

import pytest

from gateway.downstream.occurrences import COUNTED_BYTES, FOUND_MAX, occurrences


@pytest.mark.parametrize(
    ("body", "most", "expected"),
    [
        (b"", 10, 0),
        (b"abc", 10, 0),
        (b"{}", 10, 1),
        (b"{" * 10, 10, 10),
        (b"{" * 20, 10, 11),
        (b"{" * 20, -1, 0),
        (b"{" * FOUND_MAX, 10_000, FOUND_MAX),
        (b"{" * (FOUND_MAX + 1) + b"}", 10_000, FOUND_MAX + 1),
        (b"{ " * FOUND_MAX * 2 + b" " * 3 * COUNTED_BYTES + b"{", 10_000, FOUND_MAX * 2 + 1),
    ],
    ids=["empty", "none", "one", "as-many", "more", "nothing-left", "found", "one-counted", "far-apart"],
)
def test_it_is_exact_up_to_what_is_asked(body: bytes, most: int, expected: int) -> None:
    assert occurrences(b"{", body, most) == expected


def test_it_stops_soon_after_what_is_asked() -> None:
    assert 5_000 < occurrences(b"[", b"[" * 1_000_000, 5_000) <= 5_000 + COUNTED_BYTES
