"""A streamed answer: bytes in, bytes that may be relayed out. No I/O, and no parsing where none is needed.

The gateway relays bytes. It has to understand four things in them, and nothing else: that the first
content has come (until then another backend may still be asked), that a choice finished, what the usage
was, and that something went wrong although the status was 200. All four are announced by a few bytes
that cannot occur inside JSON text, where every quotation mark is escaped; so one search per read decides
whether an event has to be parsed at all.

An event is only let go when it is complete. Nobody could use half an event, and a caller who gets an
error must get it between two events.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from gateway.core.answers import ABORTED, BackendError, error_of, usage_of
from gateway.core.naming import ModelNames
from gateway.core.usage import Usage

DONE = b"data: [DONE]\n\n"

_END_OF_EVENT = re.compile(rb"\r?\n\r?\n")
_WORTH_PARSING = re.compile(rb'"error"|"finish_reason"\s*:\s*"|"usage"\s*:\s*\{|\[DONE\]')
_EVENT_BYTES_MAX = 16 * 1024 * 1024


class StreamReader:
    """Follows one streamed answer from its first byte to its last.

    Attributes:
        has_content: A token has come; before that, nothing of this answer may be relayed.
        usage: The last usage seen.
        fault: What is wrong with the answer, once something is. Nothing after it is let go.
    """

    def __init__(self, *, choices: int, names: ModelNames, hide_usage: bool) -> None:
        """Follow an answer with that many choices.

        Args:
            choices: Choices the answer must finish.
            names: The backend's name for the model and the one to show instead.
            hide_usage: The gateway asked for the usage event, the caller did not: keep it back.
        """
        self.has_content = False
        self.usage: Usage | None = None
        self.fault: BackendError | None = None
        self._done = False
        self._unfinished = choices
        self._finished: set[int] = set()
        self._hide_usage = hide_usage
        self._tail = b""
        self._names = names

    @property
    def is_done(self) -> bool:
        """Whether `[DONE]` has been let go: nothing more is owed to the caller."""
        return self._done

    @property
    def is_complete(self) -> bool:
        """Whether every choice has finished, properly."""
        return self.fault is None and len(self._finished) >= self._unfinished

    def feed(self, data: bytes) -> bytes:
        """Return the complete events that may be relayed now, possibly b""."""
        if self.fault is not None or self._done:
            return b""
        block = self._complete_events(data)
        if not block:
            return b""
        block = self._names.in_json(block)
        if self.has_content and _WORTH_PARSING.search(block) is None:
            return block
        return b"".join(self._inspect(block))

    def end(self) -> bytes:
        """Return what is still owed to the caller now that the body ended; sets `fault` if it ended early."""
        if self.fault is None and self._tail.strip():
            self.fault = BackendError("The answer ended inside an event.")
        elif self.fault is None and not self.is_complete:
            self.fault = BackendError("The answer ended before it was finished.")
        return b"" if self.fault is not None or self._done else DONE

    def _complete_events(self, data: bytes) -> bytes:
        buffer = self._tail + data if self._tail else data
        # The common case: what arrived ends with an event's end.
        if buffer.endswith(b"\n\n"):
            self._tail = b""
            return buffer
        cut = 0
        for match in _END_OF_EVENT.finditer(buffer):
            cut = match.end()
        self._tail = buffer[cut:]
        if len(self._tail) > _EVENT_BYTES_MAX:
            self.fault = BackendError("An event of the answer has no end.")
            return b""
        return buffer[:cut]

    def _inspect(self, block: bytes) -> Iterator[bytes]:
        """Yield the events of a block that may be relayed, learning from each."""
        for event in _split(block):
            payload = _payload(event)
            if payload is None:  # a comment, e.g. the engine's keep-alive
                yield event
                continue
            if payload == b"[DONE]":
                if self.is_complete:
                    self._done = True
                    yield DONE
                # Otherwise held back: end() says what is missing.
                return
            decoded = _decode(payload)
            if decoded is None:
                self.fault = BackendError("The backend sent something that is not an event.")
                return
            self.fault = error_of(decoded)
            if self.fault is None:
                self._learn(decoded)
            if self.fault is not None:
                return
            if not (self._hide_usage and decoded.get("choices") == [] and decoded.get("usage")):
                yield event

    def _learn(self, decoded: Mapping[str, Any]) -> None:
        self.usage = usage_of(decoded.get("usage")) or self.usage
        choices = decoded.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if not isinstance(choice, Mapping):
                continue
            reason = choice.get("finish_reason")
            if reason == ABORTED:
                self.fault = BackendError("The engine gave up the request: it is stopping.", code=ABORTED)
                return
            if reason is not None:
                index = choice.get("index")
                self._finished.add(index if isinstance(index, int) else 0)
            self.has_content = self.has_content or reason is not None or _has_content(choice)


def _split(block: bytes) -> Iterator[bytes]:
    start = 0
    for match in _END_OF_EVENT.finditer(block):
        yield block[start : match.end()]
        start = match.end()


def _payload(event: bytes) -> bytes | None:
    """Return the data of an event, its lines joined, or None if it has none."""
    lines = [line[5:].strip() for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None


def _decode(payload: bytes) -> Mapping[str, Any] | None:
    try:
        decoded = json.loads(payload)
    except (ValueError, RecursionError):
        return None
    return decoded if isinstance(decoded, Mapping) else None


def _has_content(choice: Mapping[str, Any]) -> bool:
    if choice.get("text"):
        return True
    delta = choice.get("delta")
    if not isinstance(delta, Mapping):
        return False
    return any(value for name, value in delta.items() if name != "role")
