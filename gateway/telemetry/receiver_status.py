"""Logs when an OTLP receiver becomes unreachable or reachable, instead of every attempt.

The OpenTelemetry library logs every attempt, several times in ten seconds while a receiver is unreachable.
Its messages are captured, to state the reason in a single line.
"""

import logging
from collections.abc import Callable

_QUEUE = "opentelemetry.sdk._shared_internal"
"""The logger by which the library reports dropped spans."""


class ReceiverStatus:
    """Tracks whether a receiver accepts exports, and reports changes."""

    def __init__(self, library: str, *, on_away: Callable[[str], None], on_back: Callable[[], None]) -> None:
        """Capture the messages of the logger `library` until `close`; `on_away` receives the reason."""
        self._on_away = on_away
        self._on_back = on_back
        self._is_away = False
        self._reason = ""
        self._filters = ((logging.getLogger(library), self._keep), (logging.getLogger(_QUEUE), self._passes))
        for logger, one in self._filters:
            logger.addFilter(one)

    def note(self, is_taken: bool) -> None:
        """Record the result of an export."""
        was_away, self._is_away = self._is_away, not is_taken
        reason, self._reason = self._reason or "it does not say why", ""
        if self._is_away and not was_away:
            self._on_away(reason)
        elif was_away and not self._is_away:
            self._on_back()

    def explain(self, reason: str) -> None:
        """Give the reason of a failure that will be noted, unless the library has said one."""
        self._reason = self._reason or reason

    def close(self) -> None:
        """Stop capturing the library's messages."""
        for logger, one in self._filters:
            logger.removeFilter(one)

    def _keep(self, record: logging.LogRecord) -> bool:
        self.explain(record.getMessage())  # the first message is the most specific one
        return False

    def _passes(self, _: logging.LogRecord) -> bool:
        return not self._is_away
