"""Logs as they are found: torn, broken, empty, newer."""

import gzip
from collections.abc import Callable
from pathlib import Path

import pytest
from support.decisions import Configure, Written, line

from gateway.replay import reading
from gateway.replay.comparing import compare
from gateway.replay.reading import Unusable


@pytest.mark.parametrize(
    ("bent", "place", "is_torn"),
    [
        (lambda lines: [*lines[:-1], lines[-1][:-20]], 4, True),
        (lambda lines: [*lines[:2], b"\x00\xff not json\n", *lines[2:]], 3, False),
        (lambda lines: [*lines[:2], b"[]\n", *lines[2:]], 3, False),
        (lambda lines: [*lines[:2], b'{"v":1,"kind":"other"}\n', *lines[2:]], 3, False),
        (lambda lines: [*lines[:2], b'{"v":1,"kind":"request","at":"noon"}\n', *lines[2:]], 3, False),
        (lambda lines: [*lines[:2], b'{"kind":"request"}\n', *lines[2:]], 3, False),
        (lambda lines: [*lines[:2], b'{"v":1,"deep":' + b"[" * 100_000 + b"\n", *lines[2:]], 3, False),
        (lambda lines: [*lines[:2], lines[2][:40] + lines[2], *lines[3:]], 3, False),
    ],
    ids=["torn", "no JSON", "a list", "another kind", "a wrong type", "no version", "deep", "two in one"],
)
def test_a_broken_line_is_named_and_the_others_count(
    written: Written, bent: Callable[[list[bytes]], list[bytes]], place: int, is_torn: bool
) -> None:
    file = written(line(1), line(2), line(3))
    whole = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(bent(whole)))

    log = reading.read([file])

    assert [(one.file, one.line, one.is_torn) for one in log.broken] == [(str(file), place, is_torn)]
    assert len(log.entries) == len(bent(whole)) - 2
    assert len(log.policies) == 1


def test_members_that_are_not_known_yet_do_not_matter(written: Written) -> None:
    file = written(line(1))
    file.write_bytes(file.read_bytes().replace(b'"at":1.0', b'"at":1.0,"colour":"red"'))

    assert [entry.past.at for entry in reading.read([file]).entries] == [1.0]


def test_files_are_joined_by_arrival(written: Written, tmp_path: Path) -> None:
    first = written(line(1), line(4)).rename(tmp_path / "one")
    second = written(line(3), line(2))

    log = reading.read([second, first])

    assert [(Path(one.file).name, one.line) for one in log.entries] == [
        ("one", 2),
        ("decisions.jsonl", 3),
        ("decisions.jsonl", 2),
        ("one", 3),
    ]


def test_a_request_that_two_files_have_counts_once(
    written: Written, configured: Configure, tmp_path: Path
) -> None:
    first = written(line(1), line(2), line(2)).rename(tmp_path / "one")
    copy = tmp_path / "one.gz"
    copy.write_bytes(gzip.compress(first.read_bytes()))
    rest = written(line(2), line(3))

    log = reading.read([first, copy, rest])

    assert [(Path(one.file).name, one.past.at) for one in log.entries] == [
        ("one", 1.0),
        ("one", 2.0),
        ("one", 2.0),
        ("decisions.jsonl", 3.0),
    ]
    said = "4 requests are in more than one of the files: each counts once"
    assert said in compare(log, configured()).notes
    assert reading.read([first]).repeated == 0


def test_a_compressed_file_is_read_like_any_other(written: Written) -> None:
    file = written(line(1), line(2))
    before = reading.read([file])
    file.write_bytes(gzip.compress(file.read_bytes()))

    assert reading.read([file]) == before


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", r"log: there are no requests in it$"),
        (b"\n\n", r"log: there are no requests in it$"),
        (b"nonsense\nmore\n", r"log: there are no requests in it \(broken lines: 2; the first is .*log:1\)"),
        (gzip.compress(b"x" * 100, mtime=0), r"there are no requests in it \(broken lines: 1;"),
        (gzip.compress(b"x" * 100, mtime=0)[:-9], r"log: it is compressed, and damaged: .*end-of-stream"),
        (gzip.compress(b"x" * 100, mtime=0)[:12] + b"x" * 30, r"log: it is compressed, and damaged: "),
        (b'{"v":2,"kind":"request"}\n', r"log:1: this log has a newer format; .* formats up to 1"),
        (b'{"v":2,"kind":"something new"}\n', r"newer format"),
    ],
    ids=["empty", "blank", "text", "gzip", "torn gzip", "bent gzip", "newer", "newer kind"],
)
def test_what_nothing_can_be_learned_from_is_refused(tmp_path: Path, content: bytes, says: str) -> None:
    file = tmp_path / "log"
    file.write_bytes(content)

    with pytest.raises(Unusable, match=says):
        reading.read([file])


def test_a_file_of_policies_alone_is_empty(written: Written) -> None:
    with pytest.raises(Unusable, match="there are no requests in it"):
        reading.read([written()])
