"""A vocabulary of Gemma's form and size, made on the spot: Gemma's own is the site's and in no repository.

The merges are trained by byte pair encoding on English prose that every Python brings, its own language
reference, which is what the benchmark's prompts are cut from, too. Some thousand merges are enough for about
four characters a token, as English has with Gemma's. What is missing to Gemma's size are pairs of ideographs:
they lie in the tables as Gemma's other languages do and match nothing that is sent.
"""

import heapq
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import pairwise, product
from pathlib import Path
from pydoc_data.topics import topics

ENTRIES = 262_144
TRAINED = 6_000
SPACE = "▁"
MARKERS = ("<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>", "<|channel>", "<channel|>")

_ALWAYS = ("Name a river.", "Be brief.", "The river")
"""What the gateway counts when it loads a vocabulary of this size, and Gemma's entries for it."""

_WORD = re.compile(r" ?[A-Za-z]+| ?[^A-Za-z0-9\s]+|[0-9]|\n+| +")
_IDEOGRAPHS = range(0x4E00, 0x9F00)

Pair = tuple[str, str]


def prose() -> str:
    """Return some hundred thousand characters of English with a little code in it, in a fixed order."""
    return "\n".join(text for _, text in sorted(topics.items())).encode("ascii", "ignore").decode()


def train(text: str, count: int) -> list[Pair]:
    """Return up to `count` merges of byte pair encoding, the most useful first."""
    words = Counter(found.replace(" ", SPACE) for found in _WORD.findall(text))
    for always in _ALWAYS:
        for found in _WORD.findall(always):
            words[found.replace(" ", SPACE)] += 100_000
    spelled = [list(word) for word in words]
    weights = list(words.values())
    pairs: Counter[Pair] = Counter()
    places: defaultdict[Pair, set[int]] = defaultdict(set)
    for index, parts in enumerate(spelled):
        for pair in pairwise(parts):
            pairs[pair] += weights[index]
            places[pair].add(index)
    heap = [(-weight, pair) for pair, weight in pairs.items()]
    heapq.heapify(heap)
    merges: list[Pair] = []
    while heap and len(merges) < count:
        weight, best = heapq.heappop(heap)
        if not weight or -weight != pairs[best]:
            continue  # it has changed since, and lies in the heap again as it is now
        merges.append(best)
        changed = set()
        for index in places.pop(best):
            before = spelled[index]
            after = list(_merged(before, best))
            for parts, sign in ((before, -1), (after, 1)):
                for pair in pairwise(parts):
                    pairs[pair] += sign * weights[index]
                    changed.add(pair)
                    if sign > 0:
                        places[pair].add(index)
            spelled[index] = after
        pairs[best] = 0
        for pair in changed - {best}:
            heapq.heappush(heap, (-pairs[pair], pair))
    return merges


def _merged(parts: list[str], pair: Pair) -> Iterator[str]:
    at = 0
    while at < len(parts):
        if tuple(parts[at : at + 2]) == pair:
            yield parts[at] + parts[at + 1]
            at += 2
        else:
            yield parts[at]
            at += 1


def document(merges: list[Pair], entries: int = ENTRIES) -> dict[str, object]:
    """Return a tokenizer.json of that many entries with these merges before all others."""
    runs = [blank * length for length in range(31, 1, -1) for blank in ("\n", SPACE, "\t")]
    merges = [(run[:-1], run[-1]) for run in reversed(runs)] + merges
    listed = dict.fromkeys(MARKERS)
    listed |= dict.fromkeys(f"<0x{value:02X}>" for value in range(256))
    listed |= dict.fromkeys(
        chr(code) for code in range(127) if chr(code).isprintable() or chr(code) in "\n\t"
    )
    listed[SPACE] = None
    listed |= dict.fromkeys(chr(code) for code in _IDEOGRAPHS)
    listed |= dict.fromkeys(left + right for left, right in merges)
    for left, right in product(_IDEOGRAPHS[:512], repeat=2):
        if len(listed) >= entries:
            break
        merges.append((chr(left), chr(right)))
        listed[chr(left) + chr(right)] = None
    vocab = {entry: index for index, entry in enumerate(listed)}
    return {
        "version": "1.0",
        "added_tokens": [{"id": vocab[marker], "content": marker, "special": True} for marker in MARKERS],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
        "pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious"},
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": merges,
        },
    }


def write(path: Path) -> None:
    """Write a tokenizer.json."""
    path.write_text(json.dumps(document(train(prose(), TRAINED))))
