"""One text, with a vocabulary and without."""

import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.class_counts import SLICE_CHARS, class_count_tokens
from gateway.core.estimation import margin_tokens
from gateway.core.request import CountMode
from gateway.tokenizer import Vocabulary, count_text, counting, measure
from gateway.tokenizer.counting import chars_per_token_max, count_approximate
from gateway.tokenizer.exact import count_exact

TEXT = "The river was wide, and nobody had crossed it since the spring. " * 40


def test_a_vocabulary_counts_exactly(vocabulary: Vocabulary) -> None:
    assert count_text(vocabulary, TEXT) == (count_exact(vocabulary, TEXT).tokens, CountMode.EXACT)


def test_without_one_the_count_says_that_it_is_approximate() -> None:
    assert count_text(None, TEXT) == (class_count_tokens(TEXT), CountMode.APPROXIMATE)


@given(st.text(st.characters(exclude_categories=())))
def test_no_text_makes_the_approximate_count_raise(text: str) -> None:
    counted = count_approximate(text)

    assert 0 <= counted.tokens <= len(text.encode("utf-8", "surrogatepass"))


def test_approximate_counting_stops_with_the_slice_that_exceeds_the_limit() -> None:
    text = "a river " * 100_000
    one_slice = count_approximate(text[:SLICE_CHARS]).tokens

    counted = count_approximate(text, stop_above_tokens=one_slice + 1)

    assert counted.tokens == pytest.approx(2 * one_slice, abs=2)
    assert not counted.complete


def test_approximate_counting_works_in_slices_and_gives_way_between_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps: list[int] = []

    def slice_tokens(text: str) -> float:
        steps.append(len(text))
        return 1.0

    monkeypatch.setattr(counting, "slice_tokens", slice_tokens)
    monkeypatch.setattr(time, "sleep", lambda seconds: steps.append(-1 if seconds == 0 else 0))

    count_approximate("a" * (2 * SLICE_CHARS + 5))

    assert steps == [SLICE_CHARS, -1, SLICE_CHARS, -1, 5]


def test_no_token_stands_for_more_than_the_longest_entry(vocabulary: Vocabulary) -> None:
    assert chars_per_token_max(None) == 31
    assert chars_per_token_max(vocabulary) == max(31, vocabulary.chars_per_token_max)


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "approximate"])
def test_a_file_is_measured(exact: bool, vocabulary: Vocabulary, tmp_path: Path) -> None:
    path = tmp_path / "río.txt"
    path.write_bytes("río ".encode() * 100 + b"\xff")

    found = measure(path, vocabulary if exact else None)

    assert found.path == path
    assert (found.bytes, found.chars) == (501, 401)
    assert found.mode is (CountMode.EXACT if exact else CountMode.APPROXIMATE)
    assert found.tokens_max == found.tokens + margin_tokens(found.tokens, found.mode)
    assert found.seconds > 0


def test_two_threads_count_alike(vocabulary: Vocabulary) -> None:
    found: list[int] = []
    threads = [
        threading.Thread(target=lambda: found.append(count_exact(vocabulary, TEXT).tokens)) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert set(found) == {count_exact(vocabulary, TEXT).tokens}
