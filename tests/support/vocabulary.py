"""A small vocabulary of Gemma's kind, trained here: nothing of Gemma's own is in this repository."""

import argparse
import inspect
import json
import textwrap
from typing import Any

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

SPACE = "▁"
RUN_MAX = 31
MARKERS = (
    "<pad>",
    "<eos>",
    "<bos>",
    "<unk>",
    "<|turn>",
    "<turn|>",
    "<|channel>",
    "<channel|>",
    "<unused0>",
    "<td>",
)
LANGUAGES = """
The river was wide, and nobody had crossed it since the spring.
Der Fluss führt im Frühjahr viel Wasser; niemand überquert ihn gern.
La rivière était si large que personne ne la traversait plus.
Река была широкой, и никто не переходил её с весны.
Ποτάμι, θάλασσα και ουρανός.
川はとても広く、春からだれも渡っていません。
河很宽，从春天起就没有人渡过。
नदी बहुत चौड़ी थी और वसंत के बाद किसी ने उसे पार नहीं किया।
강은 아주 넓어서 봄부터 아무도 건너지 못했다.
النهر واسع جدا ولم يعبره أحد منذ الربيع.
{"id": 17, "name": "river", "wide": true, "depth": [1.5, 22.75, 103]}
if (a != b && c >= 0x7f) { return x->y[i++]; } // 😀 👍🏽 — “quoted” … €5
"""  # noqa: RUF001  several scripts on purpose


def _trained() -> tuple[dict[str, int], list[str]]:
    """Return the characters and the merged entries, best first, that a training run finds."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    words = Regex(rf"[0-9]|{SPACE}?[\p{{L}}\p{{M}}]+|{SPACE}?[^\s{SPACE}\p{{L}}\p{{M}}\p{{N}}]+|{SPACE}|\s")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(words, "isolated")
    trainer = trainers.BpeTrainer(vocab_size=1500, show_progress=False)
    texts = [inspect.getsource(argparse), inspect.getsource(textwrap), *[LANGUAGES] * 4]
    tokenizer.train_from_iterator(texts, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    characters = {entry: 0 for entry in model["vocab"] if len(entry) == 1}
    merged = [
        "".join(merge) if isinstance(merge, list) else merge.replace(" ", "", 1) for merge in model["merges"]
    ]
    return characters, merged


def gemma_like() -> dict[str, Any]:
    """Return a tokenizer.json as Gemma's is: every split of an entry is a merge, runs of blanks first."""
    characters, merged = _trained()
    runs = [blank * length for length in range(RUN_MAX, 1, -1) for blank in ("\n", SPACE, "\t")]
    # The last entry is one that merging never reaches: "qx" always forms first.
    entries = [*runs, *dict.fromkeys(merged), "qx", "zq", "xj", "zqxj"]
    known = {*characters, *entries, "\n", "\t", *"zqxj"}
    merges = [
        [entry[:at], entry[at:]]
        for entry in dict.fromkeys(entries)
        for at in range(len(entry) - 1, 0, -1)
        if entry[:at] in known and entry[at:] in known
    ]
    listed = [*MARKERS, *(f"<0x{byte:02X}>" for byte in range(256)), *sorted(known)]
    vocab = {entry: index for index, entry in enumerate(listed)}
    added = [*MARKERS, *(run for run in runs if run[0] == "\n")]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": vocab[content],
                "content": content,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": content in MARKERS,
            }
            for content in added
        ],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"String": " "},
            "behavior": "MergedWithPrevious",
            "invert": False,
        },
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": merges,
        },
    }
