"""Reads logs of decisions: whole ones, set aside ones, and ones whose writer was killed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gateway.core import classification
from gateway.core.asked import Asked
from gateway.core.values import Estimate
from gateway.telemetry import decision_lines
from gateway.telemetry.decision_lines import NewerFormat, PolicyLine, RequestLine


class Unusable(Exception):
    """A log that nothing can be learned from. The message is for a person."""


@dataclass(frozen=True, slots=True)
class Broken:
    """A line that cannot be read. `is_torn`: the last of its file, and without an end."""

    file: str
    line: int
    why: str
    is_torn: bool


@dataclass(frozen=True, slots=True)
class Entry:
    """A request of the past.

    Attributes:
        file, line: Where it stands.
        past: What is written of it.
        asked: What it asked, or None where it ended before its prompt was counted.
    """

    file: str
    line: int
    past: RequestLine
    asked: Asked | None


@dataclass(frozen=True, slots=True)
class Log:
    """Logs of decisions, joined.

    Attributes:
        files: Their names.
        entries: The requests, by arrival.
        policies: The policies that they were decided under, as far as they are there, by version.
        broken: The lines that could not be read.
    """

    files: tuple[str, ...]
    entries: Sequence[Entry]
    policies: Mapping[str, PolicyLine]
    broken: Sequence[Broken]


def read(files: Sequence[Path]) -> Log:
    """Return what stands in these files, in whatever order they are given.

    Raises:
        Unusable: one cannot be read, is of a newer format, or they hold no request.
    """
    entries: list[Entry] = []
    policies: dict[str, PolicyLine] = {}
    broken: list[Broken] = []
    for file in files:
        try:
            with file.open("rb") as lines:
                for number, line in enumerate(lines, 1):
                    _take(str(file), number, line, entries, policies, broken)
        except OSError as error:
            raise Unusable(f"{file}: {error.strerror}") from error
    if not entries:
        names = ", ".join(map(str, files))
        said = f" ({len(broken)} broken lines, the first is {_place(broken[0])})" if broken else ""
        raise Unusable(f"{names}: there are no requests in it{said}")
    entries = [_as_it_came(entry, policies) for entry in entries]
    entries.sort(key=lambda entry: entry.past.at)
    return Log(tuple(map(str, files)), entries, policies, broken)


def _take(
    file: str,
    number: int,
    line: bytes,
    entries: list[Entry],
    policies: dict[str, PolicyLine],
    broken: list[Broken],
) -> None:
    if not line.strip():
        return
    try:
        found = decision_lines.read(line)
    except NewerFormat as error:
        raise Unusable(
            f"{file}:{number}: this log has a newer format; this program reads formats up to "
            f"{decision_lines.VERSION}"
        ) from error
    except ValueError as error:
        broken.append(Broken(file, number, str(error), is_torn=not line.endswith(b"\n")))
        return
    if isinstance(found, PolicyLine):
        policies[found.version] = found
    else:
        entries.append(Entry(file, number, found, _asked(found)))


def _asked(past: RequestLine) -> Asked | None:
    if past.prompt is None:
        return None
    estimate = Estimate(past.prompt.tokens, past.prompt.tokens_max, past.prompt.mode)
    return Asked(estimate=estimate, **{name: getattr(past, name) for name in decision_lines.ASKED})


def _as_it_came(entry: Entry, policies: Mapping[str, PolicyLine]) -> Entry:
    """Return a job without the class that it was handed over as, where what is known of it explains that.

    Otherwise it keeps its class under every policy that has one of that name, as it does in the queue.
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


def _place(broken: Broken) -> str:
    return f"{broken.file}:{broken.line}"
