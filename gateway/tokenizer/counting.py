"""Counts the tokens of a text, with a vocabulary or by class counts."""

import time
from pathlib import Path

from gateway.core.class_counts import CHARS_PER_TOKEN_MAX, SLICE_CHARS, slice_tokens
from gateway.core.estimation import margin_tokens
from gateway.core.request import CountMode
from gateway.core.value import valueclass
from gateway.tokenizer.exact import Counted, count_exact
from gateway.tokenizer.vocab import Vocabulary


def count_approximate(text: str, stop_above_tokens: int | None = None) -> Counted:
    """Return the approximate number of tokens in `text`, by class counts. Stops early like `count_exact`.

    The GIL is released between slices, so that a worker thread never blocks the event loop for longer than
    one slice takes, about 3 ms.
    """
    tokens = 0.0
    for at in range(0, len(text), SLICE_CHARS):
        if at:
            time.sleep(0)
        tokens += slice_tokens(text[at : at + SLICE_CHARS])
        if stop_above_tokens is not None and tokens > stop_above_tokens:
            return Counted(round(tokens), complete=False)
    return Counted(round(tokens))


def count(vocabulary: Vocabulary | None, text: str, stop_above_tokens: int | None = None) -> Counted:
    """Return the tokens in `text`, exactly if there is a vocabulary. Never raises because of the text."""
    if vocabulary is None:
        return count_approximate(text, stop_above_tokens)
    return count_exact(vocabulary, text, stop_above_tokens)


def chars_per_token_max(vocabulary: Vocabulary | None) -> int:
    """Return the maximum number of characters in a token."""
    longest = 0 if vocabulary is None else vocabulary.chars_per_token_max
    return max(CHARS_PER_TOKEN_MAX, longest)


def count_text(vocabulary: Vocabulary | None, text: str) -> tuple[int, CountMode]:
    """Return the number of tokens in `text`, without `<bos>`, and how it was counted."""
    counted = count(vocabulary, text)
    exact = vocabulary is not None and not counted.guessed_tokens
    return counted.tokens, CountMode.EXACT if exact else CountMode.APPROXIMATE


@valueclass(frozen=True, slots=True)
class Measurement:
    """The length of a file, and how long counting it took.

    Attributes:
        path: The file.
        bytes, chars: Its size; invalid UTF-8 is read as U+FFFD.
        tokens, tokens_max: Its count, and the upper end of the mode's error band.
        mode: How it was counted.
        seconds: Wall time of the count.
    """

    path: Path
    bytes: int
    chars: int
    tokens: int
    tokens_max: int
    mode: CountMode
    seconds: float


def measure(path: Path, vocabulary: Vocabulary | None) -> Measurement:
    """Measure a text file. Raises OSError if it cannot be read."""
    data = path.read_bytes()
    text = data.decode("utf-8", "replace")
    started_s = time.perf_counter()
    tokens, mode = count_text(vocabulary, text)
    seconds = time.perf_counter() - started_s
    return Measurement(
        path=path,
        bytes=len(data),
        chars=len(text),
        tokens=tokens,
        tokens_max=tokens + margin_tokens(tokens, mode),
        mode=mode,
        seconds=seconds,
    )
