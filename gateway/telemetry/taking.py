"""Whether an OTLP receiver takes what it is sent: said when that changes, and not with each try.

The library logs every try, several times in ten seconds for as long as a receiver is away. Its words are
kept for the one line that says why.
"""

import logging
from collections.abc import Callable

_QUEUE = "opentelemetry.sdk._shared_internal"
"""Where the library says that spans are dropped."""


class Taking:
    """Tells when a receiver stops taking what it is sent, and when it takes it again."""

    def __init__(self, library: str, *, on_away: Callable[[str], None], on_back: Callable[[], None]) -> None:
        """Keep what the logger `library` says for `on_away`, which is told why, until `close`."""
        self._on_away = on_away
        self._on_back = on_back
        self._is_away = False
        self._reason = ""
        self._filters = ((logging.getLogger(library), self._keep), (logging.getLogger(_QUEUE), self._passes))
        for logger, one in self._filters:
            logger.addFilter(one)

    def note(self, is_taken: bool) -> None:
        """Note how sending ended."""
        was_away, self._is_away = self._is_away, not is_taken
        reason, self._reason = self._reason or "it does not say why", ""
        if self._is_away and not was_away:
            self._on_away(reason)
        elif was_away and not self._is_away:
            self._on_back()

    def close(self) -> None:
        """Let the library speak for itself again."""
        for logger, one in self._filters:
            logger.removeFilter(one)

    def _keep(self, record: logging.LogRecord) -> bool:
        self._reason = self._reason or record.getMessage()  # the first says more than that it was the last
        return False

    def _passes(self, _: logging.LogRecord) -> bool:
        return not self._is_away
