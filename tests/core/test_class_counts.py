"""Class counts: close on ordinary text, within bounds on any."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.class_counts import (
    CHARS_PER_TOKEN_MAX,
    SLICE_CHARS,
    WEIGHTS,
    TextKind,
    class_count_tokens,
    classes,
    kind_of,
    slice_tokens,
)

PROSE = (
    "The river was wide, and nobody had crossed it since the spring. Whoever wanted to reach the other side"
    " walked down to the old bridge, paid the keeper a small coin, and listened to the news of the valley. "
) * 3
RECORDS = json.dumps(
    [{"id": n, "name": f"river {n}", "wide": True, "depth": [1.5, 22.75, n * 7]} for n in range(12)]
)
CODE = (
    '''def rank(views, demand):
    """Return the views that can take the demand, best first."""
    fits = [view for view in views if view.free_blocks >= demand.blocks]
    return sorted(fits, key=lambda view: (-view.spare_seqs, view.id))
'''
    * 4
)
RUSSIAN = (
    "Река была широкой, и никто не переходил её с весны. Кто хотел попасть на другой"  # noqa: RUF001
    " берег, шёл вниз к старому мосту и платил сторожу мелкую монету. "  # noqa: RUF001
) * 4
JAPANESE = (
    "川はとても広く、春からだれも渡っていません。向こう岸へ行きたい人は、古い橋まで歩いて、番人に小さな硬貨を払いました。"
) * 4
FIGURES = "".join(f"{n * 7919 % 10007},{n * 104729 % 65537},{n / 8:.3f}\n" for n in range(40))

# The true counts are those of Gemma's own vocabulary.
TEXTS = [
    ("prose", PROSE, 133, TextKind.LATIN),
    ("json", RECORDS, 460, TextKind.SYMBOLS),
    ("code", CODE, 272, TextKind.SYMBOLS),
    ("russian", RUSSIAN, 169, TextKind.CYRILLIC),
    ("japanese", JAPANESE, 148, TextKind.EAST_ASIAN),
    ("figures", FIGURES, 667, TextKind.FIGURES),
]


@pytest.mark.parametrize(
    ("text", "tokens", "kind"), [row[1:] for row in TEXTS], ids=[row[0] for row in TEXTS]
)
def test_a_few_hundred_tokens_are_counted_within_a_fifth(text: str, tokens: int, kind: TextKind) -> None:
    assert class_count_tokens(text) == pytest.approx(tokens, rel=0.2)
    assert kind_of(text) is kind


@pytest.mark.parametrize(
    ("text", "kind"),
    [("", TextKind.LATIN), ("שלום " * 9, TextKind.OTHER_SCRIPT), ("강은 넓다 " * 9, TextKind.EAST_ASIAN)],
    ids=["nothing", "hebrew", "korean"],
)
def test_other_scripts_have_their_kind(text: str, kind: TextKind) -> None:
    assert kind_of(text) is kind


def test_a_long_text_is_judged_by_stretches_of_all_of_it() -> None:
    assert kind_of(PROSE + FIGURES * 300) is TextKind.FIGURES
    assert kind_of(PROSE * 300 + FIGURES) is TextKind.LATIN


def test_there_are_24_classes_and_20_patterns_and_every_byte_has_a_class() -> None:
    letters = set(
        classes("".join(map(chr, range(0x80)))) + classes("é\u0370Яא\u0700ก\u1000—あ中ꀀ한\ue000😀Ā")
    )

    assert letters == {pattern[0] for pattern in WEIGHTS if len(pattern) == 1}
    assert len(letters) == 24
    assert len(WEIGHTS) == 44
    assert {letter for pattern in WEIGHTS for letter in pattern} <= letters


@given(st.text(st.characters(exclude_categories=())))
def test_any_text_has_between_one_token_per_31_characters_and_one_per_byte(text: str) -> None:
    tokens = slice_tokens(text)

    assert len(text) / CHARS_PER_TOKEN_MAX <= tokens <= len(text.encode("utf-8", "surrogatepass"))


def test_a_long_text_counts_as_its_slices_do() -> None:
    text = (PROSE + CODE) * 200

    slices = [text[at : at + SLICE_CHARS] for at in range(0, len(text), SLICE_CHARS)]
    assert len(slices) > 3
    assert class_count_tokens(text) == round(sum(map(slice_tokens, slices)))
