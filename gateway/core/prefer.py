"""The request header `Prefer` (RFC 7240), with the preferences `respond-async` and `wait`. Pure.

Unknown or malformed preferences are ignored, never an error.
"""

import re
from collections.abc import Iterator

from gateway.core.value import valueclass

WAIT_MAX_S = 280
"""Maximum wait for an answer in place: Node's built-in fetch gives up after 300 s without headers. The 20 s
left are a choice."""

_LEXEME = re.compile(r"""[ \t]*(?:(?P<word>[!#$%&'*+.^_`|~0-9A-Za-z-]+|"(?:[^"\\]|\\.)*")|(?P<other>.))""")
"""A token, a quoted string, or any other single character; preceding blanks are skipped."""


@valueclass(frozen=True, slots=True)
class Preference:
    """Preferences of a caller.

    Attributes:
        respond_async: Whether the caller prefers the location of the answer to waiting for it.
        wait_s: Seconds that the caller would wait for the answer nevertheless; None if not given.
    """

    respond_async: bool = False
    wait_s: int | None = None

    @property
    def granted_s(self) -> int:
        """Seconds to wait for the answer: `wait_s`, at most `WAIT_MAX_S`."""
        return min(self.wait_s or 0, WAIT_MAX_S)

    @property
    def applied(self) -> str:
        """Value of `Preference-Applied`. It names `wait` only if `wait` is honored unchanged."""
        kept = self.wait_s is not None and self.wait_s == self.granted_s
        return f"respond-async, wait={self.wait_s}" if kept else "respond-async"


def preference(written: str | None) -> Preference:
    """Return the preferences in a `Prefer` header (several joined by commas). The first of a name wins."""
    found: dict[str, str] = {}
    for name, value in _preferences(written or ""):
        found.setdefault(name, value)
    wait = found.get("wait", "")
    # More than nine digits exceed any real wait, and int() limits the number of digits.
    wait_s = int(wait[:9]) if wait.isascii() and wait.isdigit() else None
    return Preference(respond_async=found.get("respond-async") == "", wait_s=wait_s)


def _preferences(written: str) -> Iterator[tuple[str, str]]:
    """Yield the well-formed preferences of a header as (name, value), names in lower case."""
    lexemes: list[str] = []
    for match in _LEXEME.finditer(written.rstrip(" \t") + ","):
        lexeme = match["word"] or match["other"]
        if lexeme == '"':
            return  # an unterminated string: the rest is ambiguous
        if lexeme != ",":
            lexemes.append(lexeme)
            continue
        head = lexemes[: lexemes.index(";")] if ";" in lexemes else lexemes
        match head:
            case [name] | [name, "="]:
                yield name.lower(), ""
            case [name, "=", value]:
                yield name.lower(), _unquoted(value)
        lexemes = []


def _unquoted(word: str) -> str:
    return re.sub(r"\\(.)", r"\1", word[1:-1]) if word.startswith('"') else word
