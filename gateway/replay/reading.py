"""Reads decision logs, including rotated files, compressed ones, and those of killed writers."""

import gzip
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from io import BufferedReader
from pathlib import Path

from gateway.core import classification
from gateway.core.request import Estimate
from gateway.core.request_features import RequestFeatures
from gateway.core.value import valueclass
from gateway.telemetry import decision_lines
from gateway.telemetry.decision_lines import NewerFormat, PolicyLine, RequestLine

_GZIP = b"\x1f\x8b"


class Unusable(Exception):
    """The log contains nothing usable. The message is for people."""


@valueclass(frozen=True, slots=True)
class Broken:
    """An unreadable line. `is_torn`: it is the incomplete last line of its file."""

    file: str
    line: int
    why: str
    is_torn: bool


@valueclass(frozen=True, slots=True)
class Entry:
    """A recorded request.

    Attributes:
        file, line: Its position.
        past: Its line.
        asked: Its features; None if it ended before its prompt was counted.
    """

    file: str
    line: int
    past: RequestLine
    asked: RequestFeatures | None


@valueclass(frozen=True, slots=True)
class Log:
    """Several decision logs, merged.

    Attributes:
        files: Their names.
        entries: The requests, by arrival.
        policies: Policies found in the logs, by version.
        broken: Unreadable lines.
        repeated: Number of requests that an earlier file has, too; only the first line of each is an entry.
    """

    files: tuple[str, ...]
    entries: Sequence[Entry]
    policies: Mapping[str, PolicyLine]
    broken: Sequence[Broken]
    repeated: int = 0

    @property
    def decided(self) -> Sequence[Entry]:
        """The requests that can be decided again: their prompts were counted."""
        return [entry for entry in self.entries if entry.asked is not None]


def read(files: Sequence[Path]) -> Log:
    """Read these files, in any order.

    Raises:
        Unusable: one is unreadable or of a newer format, or there is no request.
    """
    entries: list[Entry] = []
    policies: dict[str, PolicyLine] = {}
    broken: list[Broken] = []
    earlier: set[int] = set()  # hashes of the requests of the files before
    repeated = 0
    for file in files:
        own: set[int] = set()
        try:
            for key, found in _lines(file):
                if isinstance(found, PolicyLine):
                    policies[found.version] = found
                elif isinstance(found, Broken):
                    broken.append(found)
                elif key in earlier:
                    repeated += 1
                else:
                    own.add(key)
                    entries.append(found)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise Unusable(f"{file}: it is compressed, and damaged: {error}") from error
        except OSError as error:
            raise Unusable(f"{file}: {error.strerror}") from error
        earlier |= own
    if not entries:
        names = ", ".join(map(str, files))
        first = f"{broken[0].file}:{broken[0].line}" if broken else ""
        said = f" (broken lines: {len(broken)}; the first is {first})" if broken else ""
        raise Unusable(f"{names}: there are no requests in it{said}")
    entries = [_as_it_came(entry, policies) for entry in entries]
    entries.sort(key=lambda entry: entry.past.at)
    return Log(tuple(map(str, files)), entries, policies, broken, repeated)


def _lines(file: Path) -> Iterator[tuple[int, Entry | PolicyLine | Broken]]:
    """Yield what the lines of a file hold, each with a hash of it."""
    with file.open("rb") as written, _uncompressed(written) as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield hash(line), _read(str(file), number, line)


def _uncompressed(written: BufferedReader) -> BufferedReader | gzip.GzipFile:
    """Return the file to read the lines from: this one, or what it holds compressed."""
    is_compressed = written.peek(len(_GZIP)).startswith(_GZIP)  # it may be a pipe, which goes on only
    return gzip.GzipFile(fileobj=written) if is_compressed else written


def _read(file: str, number: int, line: bytes) -> Entry | PolicyLine | Broken:
    try:
        found = decision_lines.read(line)
    except NewerFormat as error:
        raise Unusable(
            f"{file}:{number}: this log has a newer format; this program reads formats up to "
            f"{decision_lines.VERSION}"
        ) from error
    except ValueError as error:
        return Broken(file, number, str(error), is_torn=not line.endswith(b"\n"))
    return found if isinstance(found, PolicyLine) else Entry(file, number, found, _asked(found))


def _asked(past: RequestLine) -> RequestFeatures | None:
    if past.prompt is None:
        return None
    estimate = Estimate(past.prompt.tokens, past.prompt.tokens_max, past.prompt.mode)
    return RequestFeatures(estimate=estimate, **{name: getattr(past, name) for name in decision_lines.ASKED})


def _as_it_came(entry: Entry, policies: Mapping[str, PolicyLine]) -> Entry:
    """Return a job without its assigned class, if the recorded features explain the class.

    Otherwise it keeps its class under every policy with a class of that name, as in the queue.
    """
    asked = entry.asked
    known = None if asked is None else policies.get(asked.policy)
    model = None if asked is None or known is None else known.policy.model(asked.model)
    if asked is None or model is None or not asked.handed_over_as:
        return entry
    free = replace(asked, handed_over_as="")
    matched = classification.classify(model, free.request(entry.past.key), asked.estimate)
    is_explained = matched is not None and matched[0].name == asked.handed_over_as
    return replace(entry, asked=free) if is_explained else entry
