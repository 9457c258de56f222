"""The converted vocabulary against Hugging Face's own library, and counting that no text can break."""

import dataclasses
import email.message
import importlib.metadata
import inspect
import json.decoder
import random
import typing
from collections.abc import Callable
from statistics import fmean
from typing import cast

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.request import CountMode
from gateway.tokenizer import Vocabulary, count_text, exact
from gateway.tokenizer.exact import PIECE_CHARS, Counted, count_exact, pieces

Count = Callable[[str], int]
DICE = random.Random(11)


def letters(first: int, last: int, length: int) -> str:
    return "".join(chr(DICE.randrange(first, last)) for _ in range(length))


LONG = {
    "python": inspect.getsource(typing),
    "mail": inspect.getsource(email.message),
    "one-line": inspect.getsource(typing).replace("\n", " "),
    "json": json.dumps([{"id": number, "name": f"river {number}", "deep": None} for number in range(900)]),
    "csv": "".join(f"{number},{number * 7 % 1000},{number / 8:.3f}\n" for number in range(3000)),
    "digits": "0123456789" * 4000,
    "one-letter": "a" * 40_000,
    "spaces": " " * 70_000,
    "newlines": "\n" * 70_000,
    "tabs": "\t" * 70_000,
    "blank-lines": "  \n" * 20_000,
    "indented": "        return x\n" * 5000,
    "punctuation": "".join(DICE.choices("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~", k=40_000)),
    "a-z": letters(0x61, 0x7B, 40_000),
    "printable": letters(0x20, 0x7F, 40_000),
    "nul": "\0" * 40_000,
    "markers": "<|turn>user\nhi<turn|>\n<td>" * 2000,
    "half-markers": "<|turn|><|tur" * 3000,
    "u+2581": "▁" * 40_000,
    "cyrillic": "Река была широкой, и никто не переходил её. " * 900,
    "cjk-known": "河很宽，从春天起就没有人渡过。" * 2500,  # noqa: RUF001
    "cjk-random": letters(0x4E00, 0x9FFF, 20_000),
    "cjk-outside-the-bmp": letters(0x20000, 0x2A6D6, 15_000),
    "hangul-random": letters(0xAC00, 0xD7A3, 20_000),
    "private-use": letters(0xE000, 0xF8FF, 20_000),
    "bmp-random": letters(0x20, 0xD7FF, 20_000),
    "emoji": "😀👍🏽🇫🇷👨\u200d👩\u200d👧" * 2000,
    "emoji-random": letters(0x1F300, 0x1FAFF, 15_000),
    "combining": "e\u0301a\u0302\u0303\u0304" * 4000,
    "right-to-left": "النهر واسع جدا \u200fשלום " * 1500,  # noqa: RUF001
    "devanagari": "नदी बहुत चौड़ी थी " * 2000,
    "never-merged": "zqxj zqxjzqxj " * 3000,
}


@pytest.fixture(scope="module")
def errors(vocabulary: Vocabulary, true_count: Count) -> dict[str, float]:
    """Relative error of every long text, cut eight times as often as it would be."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact, "PIECE_CHARS", PIECE_CHARS // 8)
        patch.setattr(exact, "BEYOND_ASCII_CHARS", exact.BEYOND_ASCII_CHARS // 8)
        return {
            name: count_exact(vocabulary, text).tokens / true_count(text) - 1
            for name, text in LONG.items()
            if true_count(text) > 1000
        }


def test_every_text_is_long_enough_to_judge_by(errors: dict[str, float]) -> None:
    assert errors.keys() == LONG.keys()


@pytest.mark.parametrize("name", LONG)
def test_no_long_text_is_off_by_one_percent(name: str, errors: dict[str, float]) -> None:
    assert abs(errors[name]) <= 0.01


def test_long_texts_are_off_by_a_thousandth_on_average(errors: dict[str, float]) -> None:
    assert fmean(map(abs, errors.values())) <= 0.001


SHORT = {
    "nothing": "",
    "a-word": "river",
    "a-space": " ",
    "a-sentence": "The river was wide, and nobody had crossed it since the spring.",
    "a-run-of-31": "x" + " " * 31 + "y",
    "a-run-of-32": "x" + " " * 32 + "y",
    "two-runs": "\n" * 31 + "\t" * 33,
    "a-marker": "<|turn>user\n",
    "half-a-marker": "<|turn",
    "a-character-without-entry": "\U00020000",
    "between-known-ones": "a\ue000b",
    "digits-after-letters": "v123",
    "other-digits": "१२३ ²½Ⅷ",
    "an-entry-that-merging-never-reaches": "zqxj",
}


@pytest.mark.parametrize("name", SHORT)
def test_short_texts_count_as_the_original_does(name: str, vocabulary: Vocabulary, true_count: Count) -> None:
    assert count_exact(vocabulary, SHORT[name]) == Counted(true_count(SHORT[name]))


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_string_of_entries_counts_as_the_original_does(
    data: st.DataObject, vocabulary: Vocabulary, true_count: Count
) -> None:
    characters = sorted(vocabulary.characters - {"\r"})
    text = data.draw(st.text(st.sampled_from(characters), max_size=200)).replace("<", "(")

    assert count_exact(vocabulary, text).tokens == true_count(text)


@settings(max_examples=300, deadline=None)
@given(text=st.text(st.characters(exclude_categories=())))
def test_no_text_raises_or_counts_more_than_its_bytes(text: str, vocabulary: Vocabulary) -> None:
    counted = count_exact(vocabulary, text)

    assert counted.complete
    assert not counted.guessed_tokens
    assert (len(text) > 0) <= counted.tokens <= len(text.encode("utf-8", "surrogatepass"))


@pytest.mark.parametrize(
    "text",
    ["\ud800", "a\udfff", "\ud83d\ude00", "\udc80" * 50_000],
    ids=["high", "low", "a-pair-in-two-halves", "many"],
)
def test_lone_surrogates_are_counted_as_replacement_characters(
    text: str, vocabulary: Vocabulary, true_count: Count
) -> None:
    replaced = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

    assert count_exact(vocabulary, text).tokens == true_count(replaced)


# ------------------------------------------------------------------ pieces


@settings(max_examples=50, deadline=None)
@given(st.text(st.sampled_from("ab \n"), min_size=1, max_size=20), st.integers(1, 20_000))
def test_pieces_are_bounded_and_lose_nothing(unit: str, times: int) -> None:
    text = (unit * times)[: 3 * PIECE_CHARS + 7]
    cut = list(pieces(text))

    assert "".join(cut) == text
    assert all(0 < len(piece) <= PIECE_CHARS for piece in cut)


def test_a_text_is_cut_after_a_line() -> None:
    first, second, *_ = pieces("some words and\n" * 40_000)

    assert first.endswith("and\n")
    assert second.startswith("some")


def test_a_line_is_cut_before_the_space_that_belongs_to_the_next_word() -> None:
    first, second, *_ = pieces("words without end " * 40_000)

    assert not first.endswith(" ")
    assert second.startswith((" w", " e"))


# ------------------------------------------------------------------ what can go wrong


class RecordingEncoding:
    """Stands in for tiktoken's: counts one token per 10 characters, and notes what it is asked."""

    def __init__(self, failure: BaseException | None = None, fails_on: str = "") -> None:
        self.sizes: list[int] = []
        self._failure, self._fails_on = failure, fails_on

    def encode(self, text: str, **_: object) -> list[int]:
        self.sizes.append(len(text))
        if self._failure is not None and self._fails_on in text:
            raise self._failure
        return [0] * (len(text) // 10)


def with_encoding(vocabulary: Vocabulary, encoding: object) -> Vocabulary:
    return dataclasses.replace(vocabulary, encoding=cast(tiktoken.Encoding, encoding))


class PanicException(BaseException):
    """What a panic in Rust arrives as: no Exception."""


@pytest.mark.parametrize("failure", [PanicException("stack overflow"), ValueError(), MemoryError()], ids=repr)
def test_a_piece_that_cannot_be_encoded_is_guessed(failure: BaseException, vocabulary: Vocabulary) -> None:
    broken = with_encoding(vocabulary, RecordingEncoding(failure, fails_on="crash"))
    text = "x" * PIECE_CHARS + "crash " * 5000

    counted = count_exact(broken, text)

    assert counted.complete
    assert 0 < counted.guessed_tokens < 30_000
    assert counted.tokens == PIECE_CHARS // 10 + counted.guessed_tokens
    assert count_text(broken, text) == (counted.tokens, CountMode.APPROXIMATE)


@pytest.mark.parametrize("failure", [KeyboardInterrupt, SystemExit])
def test_a_request_to_stop_is_not_swallowed(failure: type[BaseException], vocabulary: Vocabulary) -> None:
    with pytest.raises(failure):
        count_exact(with_encoding(vocabulary, RecordingEncoding(failure())), "text")


def test_counting_stops_with_the_piece_that_exceeds_the_limit(vocabulary: Vocabulary) -> None:
    encoding = RecordingEncoding()

    counted = count_exact(
        with_encoding(vocabulary, encoding), "x" * 10 * PIECE_CHARS, stop_above_tokens=30_000
    )

    assert counted == Counted(2 * (PIECE_CHARS // 10), complete=False)
    assert len(encoding.sizes) == 2


def test_a_long_unbroken_run_is_encoded_in_bounded_pieces(vocabulary: Vocabulary) -> None:
    encoding = RecordingEncoding()

    count_exact(with_encoding(vocabulary, encoding), "a" * 262_144)

    assert sum(encoding.sizes) == 262_144
    assert max(encoding.sizes) <= PIECE_CHARS


def test_tiktoken_is_one_whose_long_words_are_not_quadratic() -> None:
    installed = tuple(int(part) for part in importlib.metadata.version("tiktoken").split(".")[:2])
    required = [
        text for text in importlib.metadata.requires("gemma-gateway") or () if text.startswith("tiktoken")
    ]

    assert installed >= (0, 13)
    assert any(">=0.13" in text for text in required)
