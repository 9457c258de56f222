"""What the events of a stream have in common: all but their text. Pure.

An engine writes every event of an answer the same way: the same id, the same model, the same nulls, and some
characters of text. So once one of them has been looked into and said nothing but its text, another one says
nothing either if it begins and ends with the same bytes and no quotation mark stands between: inside JSON
text every quotation mark is escaped, so the text ends where it did before. That is two comparisons and one
search of a few characters, where to look for each of the words that mean something takes seven searches of
the whole event.
"""

import re

LEARNED_MAX = 16
"""How often the likeness of one stream is taken. An engine whose events differ in more than their text (token
ids, say) is not looked at in this way any further."""

TOKEN_BYTES_MAX = 2_048
"""A longer event is not one more token: it is neither taken as a likeness nor known by one."""

_TEXT = re.compile(rb'("(?:content|text|reasoning|reasoning_content)"\s*:\s*")((?:[^"\\]|\\.)*)"')


class Likeness:
    """Knows an event by its beginning and its end.

    Attributes:
        applies: Whether what comes next may be judged by it.
    """

    __slots__ = ("_begin", "_end", "_least", "_left", "_shown", "applies")

    def __init__(self) -> None:
        """Know nothing."""
        self._begin: bytes | None = None
        self._end = b""
        self._least = 0
        self._shown = b""
        self._left = LEARNED_MAX
        self.applies = False

    def learn(self, event: bytes, shown: bytes) -> None:
        """Know an event that said nothing but its text, and whatever is like it; `shown` is shown of it."""
        if self._left == 0 or len(event) > TOKEN_BYTES_MAX:
            return
        self._left -= 1
        found = max(_TEXT.finditer(event), key=lambda one: one.end(2) - one.start(2), default=None)
        if found is None:
            return
        begin, rest = event[: found.end(1)], event[found.end(1) :]
        if not shown.endswith(rest):  # what is shown otherwise stands behind the text
            return
        self._begin, self._end = begin, event[found.end(2) :]
        self._least = len(self._begin) + len(self._end)
        self._shown = shown[: len(shown) - len(rest)]

    def glance(self, data: bytes, start: int, end: int) -> bytes | None:
        """Return what is shown of the event `data[start:end]`, or None if it is not like those known.

        `data` itself says: nothing is shown otherwise than it is written.
        """
        begin = self._begin
        if not self.applies or begin is None:
            return None
        if not data.startswith(begin, start) or not data.endswith(self._end, start, end):
            return None
        text_at = start + len(begin)
        if end - start < self._least or data.find(b'"', text_at, end - len(self._end)) >= 0:
            return None
        return data if self._shown == begin else self._shown + data[text_at:end]
