"""Problems in a configuration file: position, description, suggestion."""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

from gateway.core.value import valueclass
from gateway.settings.yaml_tree import Path, Tree


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """An error or a warning.

    Attributes:
        file: The file as it was named.
        line, column: 1-based; 0 if it concerns the file as a whole.
        message: A sentence without its full stop.
        suggestion: What was probably meant, or "".
    """

    file: str
    line: int
    column: int
    message: str
    suggestion: str = ""

    def __str__(self) -> str:
        """Return `file:line:column: message (did you mean ...?)`: one line, in which all can be seen."""
        where = f"{self.file}:{self.line}:{self.column}" if self.line else self.file
        hint = f" (did you mean {self.suggestion}?)" if self.suggestion else ""
        return _visible(f"{where}: {self.message}{hint}")


def _visible(text: str) -> str:
    r"""Return a text with line breaks and what cannot be seen escaped, as a blank of a web page: \xa0."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


@valueclass(frozen=True, slots=True)
class Finding:
    """A problem at a path of the file. `at_key`: the key is wrong, not its value."""

    path: Path
    message: str
    suggestion: str = ""
    at_key: bool = False

    def placed(self, file: str, tree: Tree) -> Problem:
        """Return it with its position in the file."""
        mark = tree.key_mark(self.path) if self.at_key else tree.value_mark(self.path)
        return Problem(file, mark.line, mark.column, self.message, self.suggestion)


_COMPARED_MAX, _HELPED_MAX, _LISTED_MAX = 500, 20, 50
"""Among how many names one like a wrong name is looked for, for how many wrong names, and how many names a
message lists. A choice: nobody reads more, and all comparisons take a second (0.1 ms each, one x86 core)."""


class Known:
    """The names that may be referred to, and what can be said of a reference to none of them.

    That is bounded: suggestions for 300 names, among 300, took ten seconds.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)
        self._helped = 0

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def instead_of(self, name: str) -> tuple[str, str]:
        """Return what was probably meant, as a suggestion, or else a list of the names, for a message's end.

        Both are "" if there are no names, or after many other wrong ones.
        """
        self._helped += 1
        if self._helped > _HELPED_MAX or not self._names:
            return "", ""
        if len(self._names) <= _COMPARED_MAX and (suggestion := closest(name, self._names)):
            return suggestion, ""
        more = len(self._names) - _LISTED_MAX
        listed = ", ".join(sorted(self._names)[:_LISTED_MAX])
        return "", f"; there are {listed}" + (f" and {more:,} more" if more > 0 else "")


def no_such_key(name: str, suggestion: str) -> str:
    """Return what there is not: the API key of this name.

    A key may stand where its name belongs: a name is repeated only if it is like a known one.
    """
    return f'there is no API key "{name}"' if suggestion else "there is no API key of this name"


def closest(word: str, known: Iterable[str]) -> str:
    """Return the known word of which `word` is probably a misspelling, quoted; "" if there is none."""
    candidates = sorted(set(known))
    by_lower = {candidate.lower(): candidate for candidate in reversed(candidates)}
    near = difflib.get_close_matches(word.lower(), list(by_lower), n=1, cutoff=0.6)
    return f'"{by_lower[near[0]]}"' if near else ""
