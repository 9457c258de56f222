"""A streamed answer: bytes in, bytes that may be relayed out. No I/O, and no parsing where none is needed.

The gateway relays bytes. It has to understand four things in them, and nothing else: that the first
content has come (until then another backend may still be asked), that a choice finished, what the usage
was, and that something went wrong although the status was 200. All four are announced by a few bytes
that cannot occur inside JSON text, where every quotation mark is escaped; so one search per event decides
whether it has to be parsed at all. Once content has come, an event without any of them is passed on as
it is: that it is JSON at all is then the backend's word.

An event is only let go when it is complete. Nobody could use half an event, and a caller who gets an
error must get it between two events.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from gateway.core.answers import ABORTED, BackendError, error_of, usage_of
from gateway.core.likeness import Likeness
from gateway.core.naming import ModelNames
from gateway.core.usage import Usage

DONE = b"data: [DONE]\n\n"
EVENT_BYTES_MAX = 16 * 1024 * 1024

_END_OF_EVENT = re.compile(rb"\n\n|\r\n\r\n|\n\r\n|\r\n\n")
_END_BYTES_MAX = 4
_WORTH_PARSING = re.compile(
    rb'"error"|"detail"|"object"\s*:\s*"error|"finish_reason"\s*:\s*"|"usage"\s*:\s*\{|\[DONE\]'
)
_UNFINISHED = BackendError("The answer ended before it was finished.")


class StreamReader:
    """Follows one streamed answer from its first byte to its last.

    Attributes:
        has_content: A token has come; before that, nothing of this answer may be relayed.
        usage: The last usage seen.
        fault: What is wrong with the answer, once something is. Nothing after it is let go.
    """

    def __init__(
        self,
        *,
        choices: int,
        names: ModelNames,
        hide_usage: bool,
        decode: Callable[[bytes], Any] = json.loads,
    ) -> None:
        """Follow an answer with that many choices.

        Args:
            choices: Choices the answer must finish.
            names: The backend's name for the model and the one to show instead.
            hide_usage: The gateway asked for the usage event, the caller did not: keep it back.
            decode: Decodes JSON; raises a ValueError for what is none.
        """
        self.has_content = False
        self.usage: Usage | None = None
        self.fault: BackendError | None = None
        self._done = False
        self._unfinished = choices
        self._finished: set[int] = set()
        self._names = names
        self._hide_usage = hide_usage
        self._decode = decode
        self._tail: list[bytes] = []  # of an event that is not complete
        self._tail_bytes = 0
        self._likeness = Likeness()

    @property
    def may_begin(self) -> bool:
        """Whether the answer may begin: from then on no other backend can be asked."""
        return self.has_content

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
        self._likeness.applies = False
        if self.fault is not None or self._done:
            return b""
        is_complete = data.endswith(b"\n\n")  # the common case: what arrived ends with an event's end
        if is_complete and self.has_content and not self._tail and self._says_nothing(data):
            shown = self._names.in_event(data)
            self._likeness.learn(data, shown)
            self._likeness.applies = self._sees_all
            return shown
        block = self._taken(data, b"") if is_complete else self._complete_events(data)
        return b"".join(self._inspect(block)) if block else b""

    @property
    def glance(self) -> Callable[[bytes, int, int], bytes | None]:
        """`Likeness.glance` of this stream, which need not be fed with what is known by it.

        Nearly every read of a stream is one event like the one before.
        """
        return self._likeness.glance

    @property
    def _sees_all(self) -> bool:
        """Whether nothing has to be looked for in texts."""
        return True

    def end(self) -> bytes:
        """Return what is still owed to the caller now that the body ended; sets `fault` if it ended early."""
        if self.fault is not None or self._done:
            return b""
        rest = b"".join(self._tail)
        # A last event may lack the blank line after it.
        owed = b"".join(self._inspect(rest.rstrip() + b"\n\n", parse=True)) if rest.strip() else b""
        if self.fault is None and not self.is_complete:
            self.fault = _UNFINISHED
        if self.fault is not None:
            return b""
        return owed if self._done else owed + DONE

    def _says_nothing(self, event: bytes) -> bool:
        """Return whether bytes after the first content certainly are one event that need not be parsed.

        The same as what `_WORTH_PARSING` looks for, in the form in which engines write it, and five times as
        fast. What is written otherwise is looked into.
        """
        # Not `in`: it first tries the bytes as a number, and drops the error it gets (CPython 3.11).
        find = event.find
        reasons = event.count(b'"finish_reason"')
        return (
            find(b"\n\n") == len(event) - 2
            and find(b"\r") < 0
            and find(b'"error') < 0
            and find(b'"detail"') < 0
            and find(b'"usage"') < 0
            and find(b"[DONE]") < 0
            and (
                reasons == event.count(b'"finish_reason":null')
                or reasons == event.count(b'"finish_reason": null')
            )
        )

    def _complete_events(self, data: bytes) -> bytes:
        """Return what has become complete with `data`; keep the rest. Looks at no byte more than twice."""
        overlap = self._last_bytes()
        cut = 0
        for end in _ends(overlap + data):
            cut = end - len(overlap)
        if cut > 0:
            return self._taken(data[:cut], data[cut:])
        self._tail.append(data)
        self._tail_bytes += len(data)
        if self._tail_bytes > EVENT_BYTES_MAX:
            self.fault = BackendError("An event of the answer has no end.")
        return b""

    def _last_bytes(self) -> bytes:
        """Return the end of what is kept: an event's end may begin there."""
        last = b""
        for part in reversed(self._tail):
            last = part[len(last) - _END_BYTES_MAX + 1 :] + last
            if len(last) >= _END_BYTES_MAX - 1:
                break
        return last

    def _taken(self, end: bytes, rest: bytes) -> bytes:
        block = b"".join((*self._tail, end)) if self._tail else end
        self._tail = [rest] if rest else []
        self._tail_bytes = len(rest)
        return block

    def _inspect(self, block: bytes, *, parse: bool = False) -> Iterator[bytes]:
        """Yield the events of a block that may be relayed, learning from each; `parse`: look into all."""
        for event in _split(block):
            shown = self._names.in_event(event)
            is_looked_into = parse or not self.has_content
            if not is_looked_into and (self._says_nothing(event) or _WORTH_PARSING.search(event) is None):
                yield shown
                continue
            payload = _payload(event)
            if payload is None:  # a comment, e.g. the engine's keep-alive
                yield event
                continue
            if payload == b"[DONE]":
                if not self.is_complete:
                    self.fault = _UNFINISHED
                    return
                self._done = True
                yield DONE
                return
            decoded = self._decoded(payload)
            if decoded is None:
                self.fault = BackendError("The backend sent an invalid event.")
                return
            self.fault = error_of(decoded)
            if self.fault is None:
                self._learn(decoded)
            if self.fault is None:
                shown = self._mended(shown, decoded)
            if self.fault is not None:
                return
            if not (self._hide_usage and decoded.get("choices") == [] and decoded.get("usage")):
                yield shown

    def _mended(self, event: bytes, decoded: dict[str, Any]) -> bytes:
        """Return what to show of an event that was looked into: here, all of it."""
        return event

    def _decoded(self, payload: bytes) -> dict[str, Any] | None:
        try:
            decoded = self._decode(payload)
        except (ValueError, RecursionError):
            return None
        return decoded if isinstance(decoded, dict) else None

    def _learn(self, decoded: Mapping[str, Any]) -> None:
        self.usage = usage_of(decoded.get("usage")) or self.usage
        choices = decoded.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if not isinstance(choice, Mapping):
                continue
            reason = choice.get("finish_reason")
            if reason == ABORTED:
                self.fault = BackendError("The engine aborted the request: it is stopping.", code=ABORTED)
                return
            if reason is not None:
                index = choice.get("index")
                self._finished.add(index if isinstance(index, int) else 0)
            self.has_content = self.has_content or reason is not None or _has_content(choice)


def _split(block: bytes) -> Iterator[bytes]:
    start = 0
    for end in _ends(block):
        yield block[start:end]
        start = end


def _ends(data: bytes) -> Iterator[int]:
    """Yield where the events in some bytes end."""
    if data.find(b"\r") >= 0:
        for match in _END_OF_EVENT.finditer(data):
            yield match.end()
        return
    end = data.find(b"\n\n") + 2  # as nearly all engines write it, and found ten times as fast
    while end > 1:
        yield end
        end = data.find(b"\n\n", end) + 2


def _payload(event: bytes) -> bytes | None:
    """Return the data of an event, its lines joined, or None if it has none."""
    lines = [line[5:].strip() for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None


def _has_content(choice: Mapping[str, Any]) -> bool:
    if choice.get("text"):
        return True
    delta = choice.get("delta")
    if not isinstance(delta, Mapping):
        return False
    return any(value for name, value in delta.items() if name != "role")
