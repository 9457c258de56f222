"""The site's own Gemma vocabulary: built from its `tokenizer.json`, loaded as a `tiktoken.Encoding`.

A Hugging Face Gemma tokenizer is a byte-fallback BPE over whole prompts: its pre-tokenizer splits nothing,
because the normalizer has replaced every space with U+2581 before. tiktoken needs a split pattern, because
otherwise a prompt would be a single word, and the cost of encoding it would explode. `PATTERN` splits only
between characters that are not adjacent in any entry of Gemma's vocabulary, so that no merge crosses a split,
and the counts equal the original's. `build` counts the entries that violate this, and warns about them.

The rank file is a text file: a header line, then one `<base64> <rank>` line per entry. This module never
opens a network connection: an Encoding is built from the file or not at all.
"""

import binascii
import hashlib
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tiktoken

from gateway.core.errors import ConfigError
from gateway.core.value import valueclass

BUILD_COMMAND = "gemma-gateway vocab build tokenizer.json -o gemma4.tiktoken"
GEMMA_ENTRIES = 262_144
"""Number of entries of the Gemma 3 and Gemma 4 vocabularies; the rank file has about as many."""

_MAGIC = "# gemma-gateway vocabulary "

_VERSION = 1
"""Version of the form of rank files."""

_SPACE = "▁"  # U+2581, SentencePiece's space

# Characters that are adjacent to a letter in some entry, although Unicode classifies them as punctuation or
# symbols: Arabic full stop, Bengali currency mark, Tibetan tsheg, Myanmar section and locative, Ethiopic full
# stop, Devanagari abbreviation sign.
_BESIDE_LETTERS = r"\x{06d4}\x{09f7}\x{0f0b}\x{104b}\x{104e}\x{1362}\x{0970}"
_LETTER = r"[[\p{L}\p{M}\p{Nd}\x{200c}\x{200d}" + _BESIDE_LETTERS + r"]--[0-9]]"
_SYMBOL = r"[^ \n\t\p{L}\p{Nd}" + _BESIDE_LETTERS + r"[\p{M}--[\x{fe0f}\x{20e3}]]]"
PATTERN = r" {31}| {2,30}|\n{1,31}|\t{1,31}|[0-9]| ?" + _LETTER + r"+| ?(?:> <|" + _SYMBOL + r")+| "
"""Splits a prompt into words. Without look-around, so the regex engine neither backtracks nor overflows."""

# Added tokens of the source that need not be special: the merges and the pattern already count runs of blanks
# correctly. As special tokens, they would only slow down the search for markers.
_NOT_SPECIAL = re.compile(r"\n+|\t+|▁+|<unused\d+>")

_NO_MARKERS: frozenset[str] = frozenset()

_SELF_TEST_GEMMA = {"Name a river.": 4, "Be brief.": 3, "The river": 2}
"""Counts by a vLLM server with Gemma 4's vocabulary. Only a full-size vocabulary is tested with them."""


@valueclass(frozen=True, slots=True)
class BuildSummary:
    """The result of `build`.

    Attributes:
        entries: Number of ranks, including single bytes and character prefixes.
        bytes: Size of the rank file.
        sha256: Hash of the rank file, as printed by `sha256sum`.
        seconds: Duration of the build.
        warnings: Findings that an operator should check before using the file; empty for Gemma's own file.
    """

    entries: int
    bytes: int
    sha256: str
    seconds: float
    warnings: tuple[str, ...] = ()


@valueclass(frozen=True, slots=True)
class Vocabulary:
    """A loaded vocabulary.

    Attributes:
        path: The file that it was loaded from.
        sha256: Hash of that file.
        entries: Number of ranks.
        encoding: The tiktoken encoding.
        characters: Characters that are an entry by themselves, and all of ASCII.
        prefixes: Incomplete UTF-8 sequences that have a rank; see `glued_tokens`.
        markers: Markers by their first character.
        chars_per_token_max: Length of the longest entry or marker, in characters.
        warnings: As in `BuildSummary`.
    """

    path: Path
    sha256: str
    entries: int
    encoding: tiktoken.Encoding
    characters: frozenset[str]
    prefixes: frozenset[bytes]
    markers: Mapping[str, tuple[str, ...]]
    chars_per_token_max: int
    warnings: tuple[str, ...] = ()

    def glued_tokens(self, character: str) -> int:
        """Return by how many tokens tiktoken undercounts a character that is not in `characters`.

        The original encodes it as one token per UTF-8 byte. tiktoken merges its first bytes if they are a
        prefix of a character that has an entry.
        """
        encoded = character.encode("utf-8", "replace")
        if encoded[:3] in self.prefixes:
            return 2
        return 1 if encoded[:2] in self.prefixes else 0


class _Contents(NamedTuple):
    """What a vocabulary is made of: ranks, texts of markers, and what an operator should check."""

    ranks: dict[bytes, int]
    specials: tuple[str, ...]
    warnings: tuple[str, ...]


# ------------------------------------------------------------------ build


def build(tokenizer_json: Path, out: Path) -> BuildSummary:
    """Convert a Hugging Face Gemma `tokenizer.json` to a rank file at `out`, and return a summary of it.

    The file is written atomically. Raises ConfigError if the source cannot be read or is not a tokenizer like
    Gemma's, or if `out` cannot be written, or may not be replaced: a device, or the source itself.
    """
    started_s = time.perf_counter()
    if out.exists() and (not out.is_file() or out.samefile(tokenizer_json)):
        raise ConfigError(f"{out}: would be replaced by the vocabulary: name another file to write")
    source = _read(tokenizer_json)
    contents = _convert(tokenizer_json, source)
    ranks = contents.ranks
    encode = binascii.b2a_base64
    body = b"".join(b"%s %d\n" % (encode(token, newline=False), rank) for token, rank in ranks.items())
    header = {
        "version": _VERSION,
        "entries": len(ranks),
        "source_sha256": hashlib.sha256(source).hexdigest(),
        "body_sha256": hashlib.sha256(body).hexdigest(),
        "specials": contents.specials,
        "warnings": contents.warnings,
    }
    data = (_MAGIC + json.dumps(header, separators=(",", ":")) + "\n").encode() + body
    sha256 = hashlib.sha256(data).hexdigest()
    _assemble(tokenizer_json, sha256, contents)  # raises now if loading the file would fail
    partial = out.with_name(out.name + ".partial")
    try:
        partial.write_bytes(data)
        os.replace(partial, out)
    except OSError as error:
        raise ConfigError(f"{out}: cannot be written: {error.strerror or error}") from error
    return BuildSummary(
        entries=len(ranks),
        bytes=len(data),
        sha256=sha256,
        seconds=time.perf_counter() - started_s,
        warnings=contents.warnings,
    )


def _convert(path: Path, source: bytes) -> _Contents:
    """Return the contents of a `tokenizer.json`."""
    try:
        document = json.loads(source)
    except ValueError as error:
        raise ConfigError(f"{path}: is not JSON: {error}") from error
    try:
        if problem := _not_gemma(document):
            raise ConfigError(f"{path}: is not a Gemma tokenizer.json: {problem}")
        ranks = _ranks(document["model"]["vocab"], document["model"]["merges"])
        specials = tuple(
            token["content"]
            for token in document.get("added_tokens") or []
            if token["content"].encode() and not _NOT_SPECIAL.fullmatch(token["content"])
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{path}: is not a Gemma tokenizer.json: {type(error).__name__}: {error}"
        ) from error
    warnings = []
    if len(ranks) < GEMMA_ENTRIES * 0.9:
        warnings.append(
            f"{len(ranks)} entries, where Gemma's vocabulary has {GEMMA_ENTRIES}: is this the right file?"
        )
    cut, unreachable = _misfits(ranks)
    if cut * 1000 > max(len(ranks), 1000):
        warnings.append(f"{cut} entries span characters that Gemma's never join: counts will be high")
    for token in unreachable:
        del ranks[token]
    return _Contents(ranks, specials, tuple(warnings))


def _not_gemma(document: Any) -> str:
    """Return how a tokenizer differs in kind from Gemma's, or "". Others cannot be converted correctly."""
    model = document.get("model") if isinstance(document, dict) else None
    if not isinstance(model, dict):
        return "it has no `model`"
    if model.get("type", "BPE") != "BPE" or "merges" not in model or not isinstance(model.get("vocab"), dict):
        return f"its model is {model.get('type')!r}, not BPE with merges"
    if not model.get("byte_fallback"):
        return "its model has no byte fallback"
    if model.get("ignore_merges"):
        return "its model ignores merges"
    normalizer = document.get("normalizer") or {}
    if normalizer.get("type") == "Sequence" and len(normalizer.get("normalizers") or ()) == 1:
        normalizer = normalizer["normalizers"][0]
    if normalizer.get("type") != "Replace" or (normalizer.get("pattern"), normalizer.get("content")) != (
        {"String": " "},
        _SPACE,
    ):
        return "its normalizer does something other than writing a space as U+2581"
    splitter = document.get("pre_tokenizer")
    if splitter is not None and (splitter.get("type"), splitter.get("pattern")) != ("Split", {"String": " "}):
        return "its pre-tokenizer splits text"
    return ""


def _ranks(vocab: Mapping[str, int], merges: Sequence[str | Sequence[str]]) -> dict[bytes, int]:
    """Return ranks by bytes: single bytes, then prefixes of characters by length, then merges in order."""
    ranks = {bytes([value]): value for value in range(256)}
    characters = [entry.encode() for entry in vocab if len(entry) == 1 and entry != _SPACE and entry > "\x7f"]
    for length in (2, 3, 4):
        for encoded in characters:
            ranks.setdefault(encoded[:length], len(ranks))
    for merge in merges:
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        ranks.setdefault((left + right).replace(_SPACE, " ").encode(), len(ranks))
    return ranks


def _misfits(ranks: Mapping[bytes, int]) -> tuple[int, list[bytes]]:
    """Return how many entries the pattern splits, and all entries that merging never produces.

    tiktoken encodes a word that is an entry as one token, even if no sequence of merges produces it; the
    original does not. Such entries must be removed, or a text of " yyyy" is counted at a third of its length.
    Appending a character that no entry contains bypasses this shortcut. Two are tried, one for each class of
    the pattern (letters, symbols). Of Gemma's 236,339 merged entries, the pattern splits 9, and merging does
    not produce 4 more.
    """
    encode = _encoding("candidate", ranks, ()).encode_ordinary
    strangers = [(stranger, len(encode(stranger))) for stranger in ("\U0002fa1d", "\U0010fffd")]
    cut = 0
    unreachable = []
    for token in ranks:
        text = _text(token)
        if text is None or len(text) < 2:
            continue
        if any(len(encode(text + stranger)) - tokens > 1 for stranger, tokens in strangers):
            unreachable.append(token)
            cut += len(encode(text)) > 1
    return cut, unreachable


# ------------------------------------------------------------------ load


def load(path: Path) -> Vocabulary:
    """Load a vocabulary from a rank file written by `build`, or directly from a `tokenizer.json`.

    A rank file takes about 0.5 s to load, a tokenizer.json about 2 s and three times the memory. Raises
    ConfigError if the file is missing, damaged or of another kind, or if it fails its self-test.
    """
    data = _read(path)
    sha256 = hashlib.sha256(data).hexdigest()
    if data.lstrip()[:1] == b"{":
        return _assemble(path, sha256, _convert(path, data))
    return _assemble(path, sha256, _parse(path, data))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise ConfigError(
            f"{path}: no such file. Build it beside the model's weights: {BUILD_COMMAND}"
        ) from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error


def _parse(path: Path, data: bytes) -> _Contents:
    """Return the contents of a rank file."""
    line, _, body = data.partition(b"\n")
    if not line.startswith(_MAGIC.encode()):
        raise ConfigError(
            f"{path}: is neither a tokenizer.json nor a file this gateway built. Run: {BUILD_COMMAND}"
        )
    try:
        header = json.loads(line[len(_MAGIC) :])
        version, entries, expected = header["version"], header["entries"], header["body_sha256"]
        specials = tuple(str(special) for special in header["specials"])
        warnings = tuple(str(warning) for warning in header["warnings"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: its header is damaged. Build it again: {BUILD_COMMAND}") from error
    if version != _VERSION:
        raise ConfigError(
            f"{path}: has format {version}, this gateway reads {_VERSION}. Run: {BUILD_COMMAND}"
        )
    if hashlib.sha256(body).hexdigest() != expected:
        raise ConfigError(
            f"{path}: is damaged or cut short (its sha256 differs). Build it again: {BUILD_COMMAND}"
        )
    decode = binascii.a2b_base64
    ranks: dict[bytes, int] = {}
    for entry in body.splitlines():
        token, _, rank = entry.partition(b" ")
        ranks[decode(token)] = int(rank)
    if len(ranks) != entries:
        raise ConfigError(f"{path}: holds {len(ranks)} entries, its header says {entries}")
    return _Contents(ranks, specials, warnings)


def _assemble(path: Path, sha256: str, contents: _Contents) -> Vocabulary:
    """Return a vocabulary that has passed its self-test."""
    ranks, specials, warnings = contents
    characters = {chr(code) for code in range(128)}
    prefixes: set[bytes] = set()
    longest = max((len(special) for special in specials), default=1)
    for token in ranks:
        text = _text(token)
        if text is not None:
            longest = max(longest, len(text))
            if len(text) == 1:
                characters.add(text)
        else:
            prefixes.add(token)
    vocabulary = Vocabulary(
        path=path,
        sha256=sha256,
        entries=len(ranks),
        encoding=_encoding(f"gemma-{sha256[:12]}", ranks, specials),
        characters=frozenset(characters),
        prefixes=frozenset(prefixes),
        markers={
            start: tuple(special for special in specials if special[0] == start)
            for start in {special[0] for special in specials}
        },
        chars_per_token_max=longest,
        warnings=warnings,
    )
    _self_test(vocabulary)
    return vocabulary


def _encoding(name: str, ranks: Mapping[bytes, int], specials: Sequence[str]) -> tiktoken.Encoding:
    first = max(ranks.values()) + 1
    markers = {special: first + index for index, special in enumerate(specials)}
    given = dict(ranks)
    encoding = tiktoken.Encoding(name=name, pat_str=PATTERN, mergeable_ranks=given, special_tokens=markers)
    given.clear()  # kept by the encoding, but used only to pickle it: a third of its memory
    return encoding


def ids_in(encoding: tiktoken.Encoding, text: str, *, with_markers: bool) -> int:
    """Return the number of ids that a text is encoded as; `with_markers`: its markers count as one id each.

    Encodes to a buffer, as tiktoken does for numpy, because `encode` builds a list of Python integers, which
    takes 3 of 35 ms per MB and holds the GIL. Falls back to `encode` if tiktoken has no such method.
    """
    encode = getattr(getattr(encoding, "_core_bpe", None), "encode_to_tiktoken_buffer", None)
    if encode is None:
        allowed = encoding.special_tokens_set if with_markers else _NO_MARKERS
        return len(encoding.encode(text, allowed_special=allowed, disallowed_special=()))
    return memoryview(encode(text, encoding.special_tokens_set if with_markers else _NO_MARKERS)).nbytes // 4


def _text(token: bytes) -> str | None:
    """Return an entry as text; None for a non-ASCII byte or a prefix of a character."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return None


def _self_test(vocabulary: Vocabulary) -> None:
    """Raise ConfigError unless a few texts have the expected counts."""
    expected = dict.fromkeys(vocabulary.encoding.special_tokens_set, 1)
    expected |= {"": 0, "\n": 1, " ": 1, "2024": 4, "\x00": 1}
    if vocabulary.entries >= GEMMA_ENTRIES * 0.9:
        expected |= _SELF_TEST_GEMMA
    for text, tokens in expected.items():
        counted = ids_in(vocabulary.encoding, text, with_markers=True)
        if counted != tokens:
            raise ConfigError(
                f"{vocabulary.path}: fails its self-test: {text!r} counts {counted} tokens, not {tokens}"
            )
