import pytest

from gateway.demo import words


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""),
        (0.0, "0.00s"),
        (0.094, "0.09s"),
        (0.996, "1.0s"),
        (8.26, "8.3s"),
        (99.96, "100s"),
        (1398.0, "1,398s"),
    ],
    ids=str,
)
def test_seconds(value: float | None, text: str) -> None:
    assert words.seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, ""), (6.83, "6.8/s"), (9.96, "10/s"), (171.4, "171/s"), (1234.0, "1,234/s")],
    ids=str,
)
def test_rate(value: float | None, text: str) -> None:
    assert words.rate(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(None, ""), (0.0, "0%"), (0.001, "<1%"), (0.42, "42%"), (1.0, "100%")], ids=str
)
def test_share(value: float | None, text: str) -> None:
    assert words.share(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (9_949, "9,949"), (9_950, "9.9K"), (112_571, "112.6K"), (2_340_000, "2.3M")],
    ids=str,
)
def test_thousands(value: float, text: str) -> None:
    assert words.thousands(value) == text


@pytest.mark.parametrize(
    ("text", "width", "cut"),
    [("whole", 5, "whole"), ("longer", 5, "long…"), ("two words", 5, "two…"), ("x", 0, ""), ("xy", 1, "…")],
    ids=["fits", "too-long", "no-blank-before-the-ellipsis", "no-room", "room-for-the-ellipsis"],
)
def test_cut(text: str, width: int, cut: str) -> None:
    assert words.cut(text, width) == cut


def test_clock_and_plural() -> None:
    assert [words.clock(0.9), words.clock(67.0), words.clock(3600.0)] == ["0:00", "1:07", "60:00"]
    assert [words.plural(1, "request"), words.plural(1200, "request")] == ["1 request", "1,200 requests"]
