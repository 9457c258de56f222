"""Streamed answers: takes received bytes, returns bytes that may be relayed. No I/O, and minimal parsing.

The gateway relays bytes and detects only four things in them: the first content (until then the request can
fail over to another backend), the end of a choice, the usage, and an error despite status 200. Every event is
parsed until the first content. After that, one search per event for a few markers decides whether to parse
it. Except for `[DONE]`, the markers contain quotation marks, which are escaped inside JSON strings, so a text
cannot imitate them. An event without a marker is relayed as it is, without checking that it is valid JSON.

Only complete events are relayed: a partial event is useless to the caller, and an error must be sent between
two events.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from gateway.core.answers import ABORTED, BackendError, FewerChoices, InvalidAnswer, error_of, usage_of
from gateway.core.decoding import decode
from gateway.core.event_template import EventTemplate
from gateway.core.naming import ModelNames
from gateway.core.usage import Usage

DONE = b"data: [DONE]\n\n"

EVENT_BYTES_MAX = 16 * 1024 * 1024
"""Maximum bytes of an event without an end. A choice that bounds memory: an event of a token has some 250."""

KEPT_BYTES_MAX = 128 * 1024 * 1024
"""Maximum bytes of a stream of which everything is kept: by a response, and for a job. A choice that bounds
memory: half a million events of a token."""

MORE_CHOICES_MAX = 128
"""How many more choices than were asked for an event may have. A choice that bounds memory and time: there is
no reason for any."""

CALLS_MAX = 512
"""Maximum tool calls of a choice. A choice that bounds memory and time: OpenAI takes at most 128 tools."""

_END_OF_EVENT = re.compile(rb"\n\n|\r\n\r\n|\n\r\n|\r\n\n")

_BOM = b"\xef\xbb\xbf"
"""A byte order mark. A stream may begin with one, which is not part of its first event."""

_END_BYTES_MAX = 4
"""Bytes of the longest end of an event, `\\r\\n\\r\\n`."""

_WORTH_PARSING = re.compile(
    rb'"error"|"detail"|"object"\s*:\s*"error|"finish_reason"\s*:\s*"[^"]|"usage"\s*:\s*\{|\[DONE\]'
)
_FIELDS = (b":", b"data:", b"event:", b"id:", b"retry:")
"""How lines of a stream of events begin; a comment with a colon."""

_UNFINISHED = InvalidAnswer("The answer ended before it was finished.")
_NO_STREAM = InvalidAnswer("The answer is not a stream of events.")
TOO_MANY = InvalidAnswer("The backend answered with too many choices or tool calls.")


class StreamReader:
    """Processes one streamed answer from its first byte to its last.

    Attributes:
        has_content: Whether a token has been received; before that, nothing of this answer may be relayed.
        usage: The last usage seen.
        fault: The error in the answer, or None. Nothing after it is relayed.
    """

    def __init__(self, *, choices: int, names: ModelNames, hide_usage: bool) -> None:
        """Create a reader for an answer with that many choices.

        Args:
            choices: Number of choices that must finish.
            names: The backend's name for the model and the one to show instead.
            hide_usage: Whether to drop the usage event, because the gateway asked for it and not the caller.
        """
        self.has_content = False
        self.usage: Usage | None = None
        self.fault: BackendError | None = None
        self._done = False
        self._unfinished = choices
        self._choices_max = choices + MORE_CHOICES_MAX
        self._finished: set[int] = set()
        self._is_stream = True  # until something else has come before any content
        self._names = names
        self._hide_usage = hide_usage
        self._tail: list[bytes] = []  # pieces of an incomplete event
        self._tail_bytes = 0
        self._template = EventTemplate()

    @property
    def may_begin(self) -> bool:
        """Whether relaying may begin; after that the request cannot fail over to another backend."""
        return self.has_content

    @property
    def is_done(self) -> bool:
        """Whether `[DONE]` has been relayed, which ends the answer."""
        return self._done

    @property
    def is_complete(self) -> bool:
        """Whether every choice has finished, without a fault."""
        return self.fault is None and len(self._finished) >= self._unfinished

    def feed(self, data: bytes) -> bytes:
        """Return the complete events that may be relayed now, possibly b""."""
        self._template.applies = False
        if self.fault is not None or self._done:
            return b""
        if data.endswith(b"\n\n"):  # the common case: the data ends at the end of an event
            block = self._taken(data, b"") if self._tail else data
        else:
            block = self._complete_events(data)
        if not block:
            return b""
        if not self.has_content or not self._says_nothing(block):
            return b"".join(self._inspect(block))
        is_one = block.find(b"\n\n") == len(block) - 2
        shown = self._names.in_event(block) if is_one else self._renamed(block)
        if not self._tail:  # the next bytes are the beginning of an event, too
            if is_one:
                self._template.learn(block, shown)
            self._template.applies = self._sees_all
        return shown

    @property
    def match(self) -> Callable[[bytes, int, int], bytes | None]:
        """`EventTemplate.match` of this stream. Events that it recognizes need not be passed to `feed`.

        Nearly every read of a stream returns a single event similar to the previous one.
        """
        return self._template.match

    @property
    def _sees_all(self) -> bool:
        """Whether event texts may be skipped, because nothing has to be searched in them."""
        return True

    def end(self) -> bytes:
        """Return the remaining bytes for the caller at the end of the body; set `fault` if it ended early."""
        if self.fault is not None or self._done:
            return b""
        rest = b"".join(self._tail)
        # The last event may lack its terminating blank line.
        owed = b"".join(self._inspect(rest.rstrip() + b"\n\n", parse=True)) if rest.strip() else b""
        if self.fault is None and not self.is_complete:
            self.fault = self._missing()
        if self.fault is not None:
            return b""
        return owed if self._done else owed + DONE

    def _missing(self) -> BackendError:
        """Return what is wrong with an answer that ends before it is complete."""
        if not (self._is_stream or self.has_content):
            return _NO_STREAM
        found = len(self._finished)
        return FewerChoices(found, self._unfinished) if found else _UNFINISHED

    def _renamed(self, events: bytes) -> bytes:
        """Return events that need no parsing, with the public name of the model."""
        shown = self._names.in_events(events)
        return b"".join([self._names.in_event(one) for one in split(events)]) if shown is None else shown

    def _says_nothing(self, events: bytes) -> bool:
        """Return whether `events`, received after the first content, need no parsing.

        Checks for the same markers as `_WORTH_PARSING`, in the form that engines write, five times as fast.
        Events in any other form return False and are examined further.
        """
        # Not `in`: it first tries to convert the bytes to a number, and drops the exception (CPython 3.11).
        find = events.find
        reasons = events.count(b'"finish_reason"')
        return (
            find(b"\r") < 0
            and find(b'"error') < 0
            and find(b'"detail"') < 0
            and find(b'"usage"') < 0
            and find(b"[DONE]") < 0
            and (
                reasons == events.count(b'"finish_reason":null')
                or reasons == events.count(b'"finish_reason": null')
            )
        )

    def _complete_events(self, data: bytes) -> bytes:
        """Return the events that `data` completes and buffer the rest. Scans no byte more than twice."""
        overlap = self._last_bytes()
        cut = last_end(overlap + data) - len(overlap)
        if cut > 0:
            return self._taken(data[:cut], data[cut:])
        self._tail.append(data)
        self._tail_bytes += len(data)
        if self._tail_bytes > EVENT_BYTES_MAX:
            self.fault = InvalidAnswer("An event of the answer has no end.")
        return b""

    def _last_bytes(self) -> bytes:
        """Return the last bytes of the buffer, where an event terminator may begin."""
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
        """Yield the events of a block that may be relayed, updating the state; `parse`: parse all of them."""
        if not self.has_content:
            block = block.removeprefix(_BOM)
        for event in split(block):
            shown = self._names.in_event(event)
            is_looked_into = parse or not self.has_content
            if not is_looked_into and (self._says_nothing(event) or _WORTH_PARSING.search(event) is None):
                yield shown
                continue
            payload = payload_of(event)
            if payload is None:  # a comment, e.g. the engine's keep-alive
                self._is_stream = self._is_stream and _is_event(event)
                yield event
                continue
            if payload == b"[DONE]":
                if not self.is_complete:
                    self.fault = self._missing()
                    return
                self._done = True
                yield DONE
                return
            decoded = self._decoded(payload)
            if decoded is None:
                self.fault = InvalidAnswer("The backend sent an invalid event.")
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
        """Return the bytes to relay for a parsed event; subclasses may change them."""
        return event

    def _decoded(self, payload: bytes) -> dict[str, Any] | None:
        try:
            decoded = decode(payload)
        except (ValueError, RecursionError):
            return None
        return decoded if isinstance(decoded, dict) else None

    def _learn(self, decoded: Mapping[str, Any]) -> None:
        self.usage = usage_of(decoded.get("usage")) or self.usage
        choices = decoded.get("choices")
        if not isinstance(choices, list):
            return
        if len(choices) > self._choices_max:
            self.fault = TOO_MANY
            return
        for choice in choices:
            if not isinstance(choice, Mapping):
                continue
            reason = choice.get("finish_reason") or None  # some engines send "" before the end
            if reason == ABORTED:
                self.fault = BackendError("The engine aborted the request: it is stopping.", code=ABORTED)
                return
            if reason is not None and not self.is_complete:  # then a backend may name any number of others
                index = choice.get("index")
                self._finished.add(index if isinstance(index, int) else 0)
            self.has_content = self.has_content or reason is not None or _has_content(choice)


def split(block: bytes) -> Iterator[bytes]:
    """Yield the events of a block; those without `data:` that follow each other as one."""
    has_returns = block.find(b"\r") >= 0
    start = 0
    while start < len(block):
        if not block.startswith(b"data:", start):
            end = _end_of_silence(block, start)
        elif has_returns:
            end = _first_end(block, start)
        else:  # the form that nearly all engines write, and ten times as fast to find
            at = block.find(b"\n\n", start)
            end = len(block) if at < 0 else at + 2
        yield block[start:end]
        start = end


def _end_of_silence(block: bytes, start: int) -> int:
    """Return the end of all events from `start` that have no `data:`; that of the first event if it has."""
    said_at = block.find(b"data:", start)
    return len(block) if said_at < 0 else last_end(block, start, said_at) or _first_end(block, start)


def _first_end(block: bytes, start: int) -> int:
    match = _END_OF_EVENT.search(block, start)
    return len(block) if match is None else match.end()


def last_end(data: bytes, start: int = 0, stop: int | None = None) -> int:
    """Return the offset of the last end of an event in `data[start:stop]`; 0 if there is none."""
    at = data.rfind(b"\n\n", start, stop)
    end = at + 2 if at >= 0 else 0
    if data.find(b"\r", start, stop) >= 0 and (at := data.rfind(b"\n\r\n", start, stop)) >= 0:
        end = max(end, at + 3)  # with `\r\n`, or both
    return end


def payload_of(event: bytes) -> bytes | None:
    """Return the joined data lines of an event, or None if it has none."""
    if event.find(b"data:") < 0:
        return None
    lines = [line[5:].strip() for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None


def _is_event(piece: bytes) -> bool:
    """Return whether what has no data is of a stream of events at all, and not a page or a whole answer."""
    said = piece.lstrip()
    return not said or said.startswith(_FIELDS)


def _has_content(choice: Mapping[str, Any]) -> bool:
    if choice.get("text"):
        return True
    delta = choice.get("delta")
    if not isinstance(delta, Mapping):
        return False
    return any(value for name, value in delta.items() if name != "role")


def is_credible(answer: Mapping[str, Any], choices_max: int) -> bool:
    """Return whether the choices and tool calls of an event, or of a whole answer, are few and numbered low.

    Who keeps something of each checks this first.
    """
    choices = answer.get("choices")
    if not isinstance(choices, list):
        return True
    return len(choices) <= choices_max and all(
        _is_low(choice, choices_max) and _are_few(choice.get("delta")) and _are_few(choice.get("message"))
        for choice in choices
        if isinstance(choice, Mapping)
    )


def _are_few(part: object) -> bool:
    calls = part.get("tool_calls") if isinstance(part, Mapping) else None
    if not isinstance(calls, list):
        return True
    return len(calls) <= CALLS_MAX and all(
        _is_low(call, CALLS_MAX) for call in calls if isinstance(call, Mapping)
    )


def _is_low(numbered: Mapping[str, Any], below: int) -> bool:
    index = numbered.get("index")
    return not isinstance(index, int) or -below < index < below
