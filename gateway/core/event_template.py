"""A fast path that recognizes plain token events of a stream by their common prefix and suffix. Pure.

An engine writes every event of an answer in the same form: the same id, model and nulls, and a few characters
of text. Once one event has been found to carry only text, another event with the same prefix and suffix, and
no quotation mark in between, also carries only text: quotation marks inside a JSON string are escaped, so the
text ends at the same place. This takes two comparisons and a search of a few characters, instead of seven
searches of the whole event, one for each marker.
"""

import re

LEARNED_MAX = 16
"""How many events of one stream are learned. A choice: the limit saves the effort for engines whose events
differ in more than their text (in token ids, for example)."""

TOKEN_BYTES_MAX = 2_048
"""Longer events are more than one token: they are neither learned nor passed to `EventTemplate.match`. A
choice, well above the 250 bytes of an engine's events."""

_TEXT = re.compile(rb'("(?:content|text|reasoning|reasoning_content)"\s*:\s*")((?:[^"\\]|\\.)*)"')


class EventTemplate:
    """Recognizes token events by the prefix and suffix of a learned event.

    Attributes:
        applies: Whether the next bytes may be checked against it.
    """

    __slots__ = ("_begin", "_end", "_least", "_left", "_shown", "applies")

    def __init__(self) -> None:
        """Start without a learned event."""
        self._begin: bytes | None = None
        self._end = b""
        self._least = 0
        self._shown = b""
        self._left = LEARNED_MAX
        self.applies = False

    def learn(self, event: bytes, shown: bytes) -> None:
        """Learn an event that carries only text; `shown` is the event as relayed to the caller."""
        if self._left == 0 or len(event) > TOKEN_BYTES_MAX:
            return
        self._left -= 1
        found = max(_TEXT.finditer(event), key=lambda one: one.end(2) - one.start(2), default=None)
        if found is None:
            return
        begin, rest = event[: found.end(1)], event[found.end(1) :]
        if not shown.endswith(rest):  # the relayed event differs after the start of the text
            return
        self._begin, self._end = begin, event[found.end(2) :]
        self._least = len(self._begin) + len(self._end)
        self._shown = shown[: len(shown) - len(rest)]

    def match(self, data: bytes, start: int, end: int) -> bytes | None:
        """Return the bytes to relay for the event `data[start:end]`, or None if it is not recognized.

        Returns `data` itself if the event is relayed unchanged.
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
