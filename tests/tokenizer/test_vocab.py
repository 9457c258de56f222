"""What is built from a tokenizer.json, and what is refused."""

import copy
import hashlib
import json
import os
from collections.abc import Callable, Sized
from pathlib import Path
from typing import Any

import pytest

from gateway.core.errors import ConfigError
from gateway.tokenizer import Vocabulary, build, load
from gateway.tokenizer.vocab import BUILD_COMMAND

Change = Callable[[dict[str, Any]], object]


def test_the_summary_describes_the_file_that_was_written(source: Path, tmp_path: Path) -> None:
    summary = build(source, tmp_path / "out.tiktoken")

    data = (tmp_path / "out.tiktoken").read_bytes()
    assert summary.bytes == len(data)
    assert summary.sha256 == hashlib.sha256(data).hexdigest()
    assert summary.entries == len(data.splitlines()) - 1
    assert summary.seconds > 0
    assert list(tmp_path.iterdir()) == [tmp_path / "out.tiktoken"]


def test_building_twice_writes_the_same_bytes(source: Path, rank_file: Path, tmp_path: Path) -> None:
    build(source, tmp_path / "again.tiktoken")

    assert (tmp_path / "again.tiktoken").read_bytes() == rank_file.read_bytes()


def test_a_rank_file_and_its_source_load_alike(source: Path, rank_file: Path) -> None:
    built, direct = load(rank_file), load(source)

    assert built.sha256 == hashlib.sha256(rank_file.read_bytes()).hexdigest()
    assert direct.sha256 == hashlib.sha256(source.read_bytes()).hexdigest()
    assert built.entries == direct.entries
    assert built.encoding.special_tokens_set == direct.encoding.special_tokens_set
    assert built.characters == direct.characters
    assert built.chars_per_token_max == direct.chars_per_token_max >= 31


def test_markers_become_special_and_runs_of_blanks_do_not(vocabulary: Vocabulary) -> None:
    assert "<|turn>" in vocabulary.encoding.special_tokens_set
    assert "<td>" in vocabulary.encoding.special_tokens_set
    assert "\n\n" not in vocabulary.encoding.special_tokens_set
    assert "<unused0>" not in vocabulary.encoding.special_tokens_set


def test_the_entries_are_held_once(vocabulary: Vocabulary) -> None:
    # tiktoken needs its own table of them; the one that it was given took half as much again.
    held = [value for value in vars(vocabulary.encoding).values() if isinstance(value, Sized)]
    assert max(map(len, held)) < vocabulary.entries / 2


def test_a_vocabulary_that_is_not_gemmas_size_is_loaded_with_a_warning(vocabulary: Vocabulary) -> None:
    assert any("262144" in warning for warning in vocabulary.warnings)


def test_merges_written_as_one_string_are_read_too(
    document: dict[str, Any], rank_file: Path, tmp_path: Path
) -> None:
    changed = copy.deepcopy(document)
    changed["model"]["merges"] = [" ".join(merge) for merge in changed["model"]["merges"]]
    (tmp_path / "tokenizer.json").write_text(json.dumps(changed))

    assert load(tmp_path / "tokenizer.json").entries == load(rank_file).entries


def test_a_vocabulary_that_joins_what_gemmas_never_joins_is_warned_of(
    document: dict[str, Any], tmp_path: Path
) -> None:
    changed = copy.deepcopy(document)
    changed["model"]["merges"] += [[letter, digit] for letter in "abcdef" for digit in "0123456789"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(changed))

    summary = build(tmp_path / "tokenizer.json", tmp_path / "out.tiktoken")

    assert any("60 entries span" in warning for warning in summary.warnings)
    assert load(tmp_path / "out.tiktoken").warnings == summary.warnings


REFUSED: list[tuple[str, Change, str]] = [
    ("no-model", lambda d: d.pop("model"), "has no `model`"),
    ("word-pieces", lambda d: d["model"].update(type="WordPiece"), "not BPE"),
    ("no-merges", lambda d: d["model"].pop("merges"), "not BPE"),
    ("no-byte-fallback", lambda d: d["model"].update(byte_fallback=False), "byte fallback"),
    ("merges-ignored", lambda d: d["model"].update(ignore_merges=True), "ignores merges"),
    ("no-normalizer", lambda d: d.update(normalizer=None), "normalizer"),
    (
        "llama-adds-a-space-in-front",
        lambda d: d.update(
            normalizer={"type": "Sequence", "normalizers": [{"type": "Prepend"}, d["normalizer"]]}
        ),
        "normalizer",
    ),
    ("byte-level", lambda d: d.update(pre_tokenizer={"type": "ByteLevel"}), "pre-tokenizer"),
    ("broken-merge", lambda d: d["model"]["merges"].append(["a"]), "ValueError"),
    ("broken-added-token", lambda d: d["added_tokens"].append({"id": 1}), "KeyError"),
    ("half-a-character", lambda d: d["added_tokens"].append({"content": "\ud83d"}), "UnicodeEncodeError"),
    ("broken-normalizer", lambda d: d.update(normalizer="x"), "AttributeError"),
    ("broken-pre-tokenizer", lambda d: d.update(pre_tokenizer=["x"]), "AttributeError"),
]


@pytest.mark.parametrize(("change", "reason"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_another_kind_of_tokenizer_is_refused(
    change: Change, reason: str, document: dict[str, Any], tmp_path: Path
) -> None:
    changed = copy.deepcopy(document)
    change(changed)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(changed))

    with pytest.raises(ConfigError, match=reason) as refused:
        build(path, tmp_path / "out.tiktoken")
    assert str(path) in str(refused.value)
    with pytest.raises(ConfigError, match=reason):
        load(path)
    assert not (tmp_path / "out.tiktoken").exists()


@pytest.mark.parametrize("wrapped", [True, False], ids=["in-a-sequence", "bare"])
def test_equivalent_spellings_of_the_normalizer_are_accepted(
    wrapped: bool, document: dict[str, Any], vocabulary: Vocabulary, tmp_path: Path
) -> None:
    changed = copy.deepcopy(document)
    if wrapped:
        changed["normalizer"] = {"type": "Sequence", "normalizers": [changed["normalizer"]]}
    changed["pre_tokenizer"] = None
    (tmp_path / "tokenizer.json").write_text(json.dumps(changed))

    assert load(tmp_path / "tokenizer.json").entries == vocabulary.entries


def test_a_missing_file_says_how_to_build_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file") as missing:
        load(tmp_path / "gemma4.tiktoken")
    assert BUILD_COMMAND in str(missing.value)


def test_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path)


def test_an_output_that_cannot_be_written_is_a_configuration_error(source: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        build(source, tmp_path / "no" / "such" / "folder.tiktoken")


@pytest.mark.parametrize("kind", ["pipe", "source", "link to the source"])
def test_build_replaces_neither_a_device_nor_its_source(source: Path, tmp_path: Path, kind: str) -> None:
    own = tmp_path / "tokenizer.json"
    own.write_bytes(source.read_bytes())
    out = own if kind == "source" else tmp_path / "out"
    if kind == "pipe":
        os.mkfifo(out)
    elif kind == "link to the source":
        out.symlink_to(own)

    with pytest.raises(ConfigError, match="name another file to write"):
        build(own, out)

    assert own.read_bytes() == source.read_bytes()
    assert out.is_fifo() == (kind == "pipe")


DAMAGE: list[tuple[str, Callable[[bytes], bytes], str]] = [
    ("cut-short", lambda data: data[:-100], "damaged or cut short"),
    ("one-entry-changed", lambda data: data.replace(b" 300\n", b" 301\n"), "damaged or cut short"),
    ("header-cut", lambda data: data.replace(b'"version"', b"version", 1), "header is damaged"),
    (
        "header-without-specials",
        lambda data: data.replace(b'"specials"', b'"special"', 1),
        "header is damaged",
    ),
    ("other-format", lambda data: data.replace(b'"version":1', b'"version":2', 1), "has format 2"),
    ("wrong-entry-count", lambda data: data.replace(b'"entries":1', b'"entries":9', 1), "its header says"),
    ("somebody-elses-rank-file", lambda data: data.partition(b"\n")[2], "neither a tokenizer.json nor"),
    ("empty", lambda data: b"", "neither a tokenizer.json nor"),
    ("not-json", lambda data: b"{" + data, "is not JSON"),
    ("binary", lambda data: bytes(range(256)), "neither a tokenizer.json nor"),
]


@pytest.mark.parametrize(("damage", "reason"), [row[1:] for row in DAMAGE], ids=[row[0] for row in DAMAGE])
def test_a_damaged_rank_file_is_refused(
    damage: Callable[[bytes], bytes], reason: str, rank_file: Path, tmp_path: Path
) -> None:
    path = tmp_path / "damaged.tiktoken"
    path.write_bytes(damage(rank_file.read_bytes()))

    with pytest.raises(ConfigError, match=reason):
        load(path)


def test_a_vocabulary_that_counts_wrongly_fails_its_self_test(
    document: dict[str, Any], tmp_path: Path
) -> None:
    changed = copy.deepcopy(document)
    changed["added_tokens"].append({"content": "2024"})  # a marker that hides four digits
    (tmp_path / "tokenizer.json").write_text(json.dumps(changed))

    for read in (load, lambda path: build(path, tmp_path / "small.tiktoken")):
        with pytest.raises(ConfigError, match="fails its self-test: '2024' counts 1 tokens"):
            read(tmp_path / "tokenizer.json")
    assert not (tmp_path / "small.tiktoken").exists()
