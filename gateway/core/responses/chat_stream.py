"""Translation of a chat stream's bytes to the events of a response. Pure.

The pipeline has relayed, and thereby checked, the stream: it ends with `[DONE]`, or with an error event and
`[DONE]`. Comments are ignored.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from gateway.core.decoding import decode
from gateway.core.responses.draft import Draft, Event
from gateway.core.sse import MORE_CHOICES_MAX, is_credible, last_end, payload_of, split


@dataclass(slots=True)
class ChatStream:
    """Feeds a draft from a chat stream that arrives in arbitrary pieces.

    Attributes:
        draft: The draft of the response.
        tail: Bytes of an incomplete event.
    """

    draft: Draft
    tail: bytes = b""

    def feed(self, data: bytes, now: int) -> list[Event]:
        """Return the events that result from `data`, received at `now` (epoch seconds)."""
        received = self.tail + data
        end = last_end(received)
        self.tail = received[end:]
        events: list[Event] = []
        for event in split(received[:end]):
            if not self.draft.is_over:
                events += self._read(event, now)
        return events

    def end(self) -> list[Event]:
        """Return the events at the end of the stream: a failure, unless the response was already over."""
        if self.draft.is_over:
            return []
        return self.draft.fail("server_error", "The answer ended before it was finished.")

    def _read(self, event: bytes, now: int) -> list[Event]:
        payload = payload_of(event)
        if not payload:
            return []
        if payload == b"[DONE]":
            return self.end() if self.draft.finish_reason is None else self.draft.complete(now)
        try:
            chunk = decode(payload)
        except (ValueError, RecursionError):
            chunk = None
        if not isinstance(chunk, Mapping) or not is_credible(chunk, 1 + MORE_CHOICES_MAX):
            return self.draft.fail("server_error", "The backend sent an invalid event.")
        error = chunk.get("error")
        if isinstance(error, Mapping):
            return self.draft.fail(str(error.get("type")), str(error.get("message")))
        return self.draft.add(chunk)
