"""The bytes of a chat stream in, the events of a response out. Pure.

What comes in has been relayed, and so checked, by the pipeline: it ends with `[DONE]`, or with an error event
in front of it. Comments say nothing, and bring no event.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gateway.core.responses.draft import Draft, Event

_END_OF_EVENT = re.compile(rb"\r?\n\r?\n")


@dataclass(slots=True)
class ChatStream:
    """Feeds a draft from a chat stream, cut anywhere.

    Attributes:
        draft: What is being written.
        decode: Decodes JSON; raises a ValueError for what is none.
        tail: Bytes of an event that is not complete.
    """

    draft: Draft
    decode: Callable[[bytes], Any] = json.loads
    tail: bytes = b""

    def feed(self, data: bytes, now: int) -> list[Event]:
        """Return the events that have become due with `data`, at `now`, epoch seconds."""
        *blocks, self.tail = _END_OF_EVENT.split(self.tail + data)
        events: list[Event] = []
        for block in blocks:
            if not self.draft.is_over:
                events += self._read(block, now)
        return events

    def end(self) -> list[Event]:
        """Return what is still due now that the stream has ended: a failure, unless it was over."""
        if self.draft.is_over:
            return []
        return self.draft.fail("server_error", "The answer ended before it was finished.")

    def _read(self, block: bytes, now: int) -> list[Event]:
        lines = [line[5:].strip() for line in block.splitlines() if line.startswith(b"data:")]
        payload = b"\n".join(lines)
        if not payload:
            return []
        if payload == b"[DONE]":
            return self.end() if self.draft.finish_reason is None else self.draft.complete(now)
        try:
            chunk = self.decode(payload)
        except (ValueError, RecursionError):
            chunk = None
        if not isinstance(chunk, Mapping):
            return self.draft.fail("server_error", "The backend sent an invalid event.")
        error = chunk.get("error")
        if isinstance(error, Mapping):
            return self.draft.fail(str(error.get("type")), str(error.get("message")))
        return self.draft.add(chunk)
