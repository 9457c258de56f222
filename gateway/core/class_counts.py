"""Class counts: an approximate token count from the classes of a text's bytes, without a vocabulary.

Every byte of the UTF-8 text belongs to one of 24 classes (lower case, digit, blank, punctuation, the lead
byte of a script, ...). The count is a weighted sum of the numbers of bytes per class and of 20 short patterns
of classes that detect the boundaries of words, numbers and runs of symbols. The weights are a least-squares
fit of the relative error over 87 kinds of text; `python benchmarks/estimate.py --fit tokenizer.json`
reproduces them, docs/estimate.md has the errors.
"""

from enum import StrEnum

SLICE_CHARS = 65_536
"""Characters per step. A choice, so that no step holds the GIL for a millisecond (docs/estimate.md#time)."""

CHARS_PER_TOKEN_MAX = 31
"""The longest entry of Gemma's vocabulary, a run of blanks. vLLM rejects long texts based on this number."""

_CLASSES: dict[bytes, tuple[range, ...]] = {
    b"l": (range(0x61, 0x7B),),  # lower case
    b"u": (range(0x41, 0x5B),),  # upper case
    b"d": (range(0x30, 0x3A),),  # digit
    b"s": (range(0x20, 0x21),),  # space
    b"n": (range(0x0A, 0x0B),),  # newline
    b"t": (range(0x09, 0x0A),),  # tab
    b"p": (range(0x21, 0x30), range(0x3A, 0x41), range(0x5B, 0x61), range(0x7B, 0x7F)),  # punctuation
    b"c": (range(0x09), range(0x0B, 0x20), range(0x7F, 0x80)),  # control
    b"z": (range(0x80, 0xC0),),  # continuation
    b"A": (range(0xC0, 0xC4),),  # lead bytes: Latin-1
    b"B": (range(0xC4, 0xCC),),  # Latin extended, phonetic
    b"C": (range(0xCC, 0xD0),),  # combining marks, Greek
    b"D": (range(0xD0, 0xD6),),  # Cyrillic, Armenian
    b"E": (range(0xD6, 0xD8),),  # Hebrew
    b"F": (range(0xD8, 0xE0),),  # Arabic, Syriac, Thaana
    b"G": (range(0xE0, 0xE1),),  # India, Thai, Lao
    b"H": (range(0xE1, 0xE2),),  # Georgian, Ethiopic, Khmer, Vietnamese
    b"I": (range(0xE2, 0xE3),),  # typographic punctuation, symbols
    b"J": (range(0xE3, 0xE4),),  # kana, CJK punctuation
    b"K": (range(0xE4, 0xEA),),  # CJK
    b"L": (range(0xEA, 0xEB),),  # Hangul, first part
    b"M": (range(0xEB, 0xEE),),  # Hangul, the rest
    b"N": (range(0xEE, 0xF0),),  # private use, full-width forms
    b"O": (range(0xF0, 0x100),),  # emoji, rare CJK
}

WEIGHTS: dict[bytes, float] = {
    b"l": 0.194,
    b"u": 0.171,
    b"d": 1.537,
    b"s": 0.042,
    b"n": 2.051,
    b"t": 0.200,
    b"p": 0.193,
    b"c": 0.644,
    b"z": 0.148,
    b"A": 0.898,
    b"B": 0.933,
    b"C": 0.254,
    b"D": 0.578,
    b"E": 0.349,
    b"F": 0.189,
    b"G": 0.012,
    b"H": 0.085,
    b"I": 0.706,
    b"J": 0.056,
    b"K": 0.946,
    b"L": 0.275,
    b"M": 0.332,
    b"N": 0.947,
    b"O": 0.619,
    b"pppppp": 2.368,
    b"up": 1.680,
    b"pl": 1.562,
    b"pnpu": 3.670,
    b"DzDzDzDzDzDz": -4.254,
    b"llllllllllllllll": 5.201,
    b"ddd": -1.244,
    b"ps": 0.963,
    b"nn": -2.133,
    b"pll": -0.755,
    b"uul": 3.838,
    b"nH": 1.502,
    b"pppppppppppp": -4.251,
    b"lss": 2.391,
    b"pA": 5.952,
    b"lpnp": -2.081,
    b"KzzKzz": -1.457,
    b"lspl": 1.465,
    b"uups": -3.377,
    b"ulp": 2.849,
}
"""Tokens per occurrence of a class or a pattern; occurrences of a pattern do not overlap. Fitted to Gemma's
vocabulary by `benchmarks/estimate.py --fit`; the errors are in docs/estimate.md."""


def _table() -> bytes:
    table = bytearray(256)
    for letter, ranges in _CLASSES.items():
        for codes in ranges:
            for code in codes:
                table[code] = letter[0]
    return bytes(table)


_TABLE = _table()


def classes(text: str) -> bytes:
    """Return the class of every UTF-8 byte of the text, as one letter each."""
    return text.encode("utf-8", "surrogatepass").translate(_TABLE)


def slice_tokens(text: str) -> float:
    """Return the approximate number of tokens in at most SLICE_CHARS characters.

    At least one per 31 characters and at most one per byte, which holds for any text.
    """
    letters = classes(text)
    tokens = sum(weight * letters.count(pattern) for pattern, weight in WEIGHTS.items())
    return min(max(tokens, len(text) / CHARS_PER_TOKEN_MAX), float(len(letters)))


def class_count_tokens(text: str) -> int:
    """Return the approximate number of tokens in a text of any length."""
    return round(sum(slice_tokens(text[at : at + SLICE_CHARS]) for at in range(0, len(text), SLICE_CHARS)))


class TextKind(StrEnum):
    """The predominant kind of a text, for a ratio learned per kind. A closed set: used as a label."""

    LATIN = "latin"
    CYRILLIC = "cyrillic"
    EAST_ASIAN = "east_asian"
    OTHER_SCRIPT = "other_script"
    SYMBOLS = "symbols"  # code, markup, JSON
    FIGURES = "figures"  # numbers, logs, tables


_SCRIPTS = {TextKind.CYRILLIC: b"D", TextKind.EAST_ASIAN: b"JKLMN", TextKind.OTHER_SCRIPT: b"CEFGHO"}

SAMPLE_CHARS = 1024
SAMPLES = 4
"""Length and number of the samples that tell a text's kind. A choice: classifying so little takes no time,
and a heading alone does not decide."""


def kind_of(text: str) -> TextKind:
    """Classify a text by four samples of 1,024 characters spread over it.

    The thresholds are guesses: a text is in a script if more than a quarter of its bytes are; it is figures
    above 15 % digits, symbols above 12 % punctuation.
    """
    if len(text) > SAMPLES * SAMPLE_CHARS:
        stride = (len(text) - SAMPLE_CHARS) // (SAMPLES - 1)
        text = "".join(text[at * stride : at * stride + SAMPLE_CHARS] for at in range(SAMPLES))
    letters = classes(text)
    if letters.count(b"z") * 4 > len(letters):
        counts = {kind: sum(letters.count(lead) for lead in leads) for kind, leads in _SCRIPTS.items()}
        return max(counts, key=counts.__getitem__)
    if letters.count(b"d") * 100 > len(letters) * 15:
        return TextKind.FIGURES
    if letters.count(b"p") * 100 > len(letters) * 12:
        return TextKind.SYMBOLS
    return TextKind.LATIN
