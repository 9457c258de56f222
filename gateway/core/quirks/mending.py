"""Application of remedies to answers: to a stream event by event, or to a non-streaming answer."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

from gateway.core.answers import BackendError, InvalidAnswer
from gateway.core.decoding import decode
from gateway.core.naming import ModelNames
from gateway.core.quirks.remedy import Remedies, Remedy
from gateway.core.sse import TOO_MANY, StreamReader, is_credible

_NO_ANSWER = InvalidAnswer("The backend sent an invalid answer.")
_json = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode


def encode(value: object) -> bytes:
    """Return compact JSON, as engines write it."""
    return _json(value).encode("utf-8", "replace")


def mend_whole(remedies: Iterable[Remedy], body: bytes) -> tuple[bytes, BackendError | None]:
    """Return a non-streaming answer after applying `remedies`, and the fault they could not correct, or None.

    An unchanged answer keeps its bytes.
    """
    for remedy in remedies:
        if remedy.whole_marks in body:
            break
    else:
        return body, None
    mending = Remedies(remedies)
    try:
        answer = decode(body)
    except (ValueError, RecursionError):
        return body, _NO_ANSWER
    changed = isinstance(answer, dict) and mending.mend(answer)
    return (encode(answer) if changed else body), mending.fault


class MendingReader(StreamReader):
    """A `StreamReader` that applies remedies to its events. Unchanged events keep their bytes."""

    def __init__(
        self, remedies: Iterable[Remedy], *, choices: int, names: ModelNames, hide_usage: bool
    ) -> None:
        """Apply `remedies` in order; the other arguments are those of `StreamReader`."""
        super().__init__(choices=choices, names=names, hide_usage=hide_usage)
        self._remedies = Remedies(remedies)

    @property
    def may_begin(self) -> bool:
        """See `StreamReader`; a remedy may also hold the stream back."""
        return self.has_content and not self._remedies.holds

    @property
    def _sees_all(self) -> bool:
        return self._remedies.are_idle  # an active remedy may look for something in texts

    def _says_nothing(self, events: bytes) -> bool:
        return not self._remedies.concern(events) and super()._says_nothing(events)

    def _inspect(self, block: bytes, *, parse: bool = False) -> Iterator[bytes]:
        return super()._inspect(block, parse=parse or self._remedies.concern(block))

    def _mended(self, event: bytes, decoded: dict[str, Any]) -> bytes:
        if not is_credible(decoded, self._choices_max):
            self.fault = TOO_MANY
            return event
        changed = self._remedies.mend(decoded)
        self.fault = self._remedies.fault
        if not changed:
            return event
        return self._names.in_event(b"data: " + encode(decoded) + b"\n\n")
