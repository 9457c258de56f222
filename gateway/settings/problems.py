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
        """Return `file:line:column: message (did you mean ...?)`."""
        where = f"{self.file}:{self.line}:{self.column}" if self.line else self.file
        hint = f" (did you mean {self.suggestion}?)" if self.suggestion else ""
        return f"{where}: {self.message}{hint}"


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


def closest(word: str, known: Iterable[str]) -> str:
    """Return the known word of which `word` is probably a misspelling, quoted; "" if there is none."""
    candidates = sorted(set(known))
    by_lower = {candidate.lower(): candidate for candidate in reversed(candidates)}
    near = difflib.get_close_matches(word.lower(), list(by_lower), n=1, cutoff=0.6)
    return f'"{by_lower[near[0]]}"' if near else ""
