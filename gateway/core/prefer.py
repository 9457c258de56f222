"""The request header `Prefer` (RFC 7240), as far as it means anything here: `respond-async` and `wait`. Pure.

A preference is no demand: one that is not known, or not well-formed, is as good as absent, never an error.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

WAIT_MAX_S = 280
"""The longest that a caller is kept waiting: Node's own fetch gives up after 300 s without headers."""

_LEXEME = re.compile(r"""[ \t]*(?:(?P<word>[!#$%&'*+.^_`|~0-9A-Za-z-]+|"(?:[^"\\]|\\.)*")|(?P<other>.))""")
"""A token, a quoted string, or else a single character; spaces before it are left out."""


@dataclass(frozen=True, slots=True)
class Preference:
    """What a caller prefers.

    Attributes:
        respond_async: To be told where the answer will be, rather than to wait for it.
        wait_s: Seconds it waits for the answer nevertheless; None: it does not say.
    """

    respond_async: bool = False
    wait_s: int | None = None

    @property
    def waited_s(self) -> int:
        """Seconds that it is kept waiting."""
        return min(self.wait_s or 0, WAIT_MAX_S)

    @property
    def applied(self) -> str:
        """What `Preference-Applied` says of it; `wait` only where it is kept to as it was asked for."""
        kept = self.wait_s is not None and self.wait_s == self.waited_s
        return f"respond-async, wait={self.wait_s}" if kept else "respond-async"


def preference(written: str | None) -> Preference:
    """Return what a `Prefer` header says; several are joined by commas. Of equal names the first counts."""
    found: dict[str, str] = {}
    for name, value in _preferences(written or ""):
        found.setdefault(name, value)
    wait = found.get("wait", "")
    # More digits than that are a number of seconds that nobody waits, and int() has a limit of its own.
    wait_s = int(wait[:9]) if wait.isascii() and wait.isdigit() else None
    return Preference(respond_async=found.get("respond-async") == "", wait_s=wait_s)


def _preferences(written: str) -> Iterator[tuple[str, str]]:
    """Yield the preferences of a header that are well-formed, names in lower case, as (name, value)."""
    lexemes: list[str] = []
    for match in _LEXEME.finditer(written.rstrip(" \t") + ","):
        lexeme = match["word"] or match["other"]
        if lexeme == '"':
            return  # a string without an end: what is in it cannot be told from what is not
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
