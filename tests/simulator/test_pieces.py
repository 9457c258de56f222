"""The simulated server's tokenizer."""

import pytest

from gateway.simulator import pieces, prose

TEXTS = [
    pytest.param("", 0, id="empty"),
    pytest.param("Name a river.", 4, id="words-and-a-full-stop"),
    pytest.param("2026", 4, id="digits-one-by-one"),
    pytest.param("unquestionably", 2, id="a-long-word-is-two"),
    pytest.param("a\n\nb", 3, id="newlines-together"),
    pytest.param("Größe", 3, id="letters-beyond-ascii"),
    pytest.param("\ud800!", 2, id="lone-surrogate"),
]


@pytest.mark.parametrize(("text", "tokens"), TEXTS)
def test_count_and_ids_agree(text: str, tokens: int) -> None:
    assert pieces.count(text) == len(pieces.ids(text)) == tokens


@pytest.mark.parametrize("text", ["Name a river.", "x" * 50_000, "one two " * 9_000, "\n" * 70], ids=repr)
def test_ids_read_back_as_the_text(text: str) -> None:
    assert "".join(pieces.pieces(text)) == text
    assert pieces.text_of(pieces.ids(text)) == text


def test_an_unknown_id_reads_as_unused() -> None:
    assert pieces.text_of([999]) == "<unused999>"


def test_markers_have_ids_of_their_own() -> None:
    assert pieces.text_of([pieces.BOS, pieces.MARKERS["<|turn>"]]) == "<bos><|turn>"
    assert len(set(pieces.MARKERS.values())) == len(pieces.MARKERS)


def test_english_prose_has_about_four_and_a_half_characters_per_token() -> None:
    import random

    text = "".join(prose.answer(random.Random(1), 2_000))

    assert len(text) / pieces.count(text) == pytest.approx(4.5, abs=0.3)


def test_cutting_a_long_text_for_counting_changes_its_count_by_almost_nothing() -> None:
    line = " the quick brown fox jumps over it"

    assert pieces.count(line * 10_000) == pytest.approx(pieces.count(line) * 10_000, rel=1e-3)
