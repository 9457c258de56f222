"""Remedies, which correct an answer while it is relayed: the deltas of a stream, or complete messages."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any

from gateway.core.answers import BackendError


class Remedy(ABC):
    """Corrects the answer to one request. There is one instance per attempt.

    Attributes:
        fault: A fault in the answer that cannot be corrected, or None.
        holds: Whether nothing of a stream may be relayed yet, while it is not idle.
        is_idle: Whether it has finished and needs no further events.
        marks: Bytes that an event must contain to concern it, unless the event is the last of a choice.
        whole_marks: Bytes that a non-streaming answer must contain to concern it.
    """

    fault: BackendError | None = None
    holds: bool = False
    is_idle: bool = False
    marks: bytes = b""
    whole_marks: bytes = b""

    @abstractmethod
    def part(self, index: int, part: dict[str, Any], finish: str | None) -> bool:
        """Correct a part of choice `index` in place; return whether that changed it.

        `part` is a delta, or the message of a non-streaming answer. `finish` is the `finish_reason` of the
        choice if this is its last part, else None.
        """


class Remedies:
    """The remedies of one answer, in order.

    Attributes:
        fault: The first fault that a remedy found, or None.
    """

    def __init__(self, remedies: Iterable[Remedy]) -> None:
        """Apply `remedies` in order, each to the result of the previous one."""
        self.fault: BackendError | None = None
        self._active = list(remedies)

    def concern(self, events: bytes) -> bool:
        """Return whether these events have to be parsed."""
        return any(remedy.marks in events for remedy in self._active)

    @property
    def are_idle(self) -> bool:
        """Whether all of them have finished."""
        return not self._active

    @property
    def holds(self) -> bool:
        """Whether nothing of the stream may be relayed yet."""
        return any(remedy.holds for remedy in self._active)

    def mend(self, answer: dict[str, Any]) -> bool:
        """Correct an event or a non-streaming answer in place; return whether that changed it."""
        if not self._active:
            return False
        changed = False
        for index, part, finish in _parts(answer):
            for remedy in self._active:
                changed |= remedy.part(index, part, finish)
                self.fault = self.fault or remedy.fault
        self._active = [remedy for remedy in self._active if not remedy.is_idle]
        return changed


def _parts(answer: dict[str, Any]) -> Iterator[tuple[int, dict[str, Any], str | None]]:
    choices = answer.get("choices")
    for place, choice in enumerate(choices if isinstance(choices, list) else ()):
        if not isinstance(choice, dict):
            continue
        name = "message" if "message" in choice else "delta"
        part = choice.get(name)
        if part is None and "text" not in choice:
            part = choice[name] = {}
        if isinstance(part, dict):
            index = choice.get("index")
            yield (index if isinstance(index, int) else place), part, choice.get("finish_reason") or None


def beginning(text: str, marker: str) -> str:
    """Return the longest suffix of `text` that is a proper prefix of `marker`, or ""."""
    for size in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:size]):
            return marker[:size]
    return ""
