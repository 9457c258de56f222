"""A remedy mends one answer while it passes: the deltas of its events, or its whole messages."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import Any

from gateway.core.answers import BackendError


class Remedy(ABC):
    """Mends the answer to one request. It lives as long as the attempt does.

    Attributes:
        fault: What is wrong with the answer and cannot be mended, once something is.
        holds: Nothing of a stream may be relayed yet.
        is_idle: It has nothing left to do: what follows need not be looked into for its sake.
        marks: Bytes without which an event does not concern it, unless it is the last of a choice.
        whole_marks: Bytes without which a whole answer does not concern it.
    """

    fault: BackendError | None = None
    holds: bool = False
    is_idle: bool = False
    marks: bytes = b""
    whole_marks: bytes = b""

    @abstractmethod
    def part(self, index: int, part: dict[str, Any], finish: str | None) -> bool:
        """Mend what choice `index` says, in place; return whether that changed it.

        `part` is a delta, or the whole message of an answer that is not streamed; with `finish`, its
        `finish_reason`, it is the last one of its choice.
        """


class Remedies:
    """The remedies of one answer, in order.

    Attributes:
        fault: As in `Remedy`, of the first that has one.
    """

    def __init__(self, remedies: Iterable[Remedy]) -> None:
        """Apply `remedies`, each to what the one before it left."""
        self.fault: BackendError | None = None
        self._active = list(remedies)

    def concern(self, events: bytes) -> bool:
        """Return whether these events have to be looked into."""
        return any(remedy.marks in events for remedy in self._active)

    @property
    def are_idle(self) -> bool:
        """Whether none of them has anything left to do."""
        return not self._active

    def concern_whole(self, answer: bytes) -> bool:
        """Return whether a whole answer has to be looked into."""
        return any(remedy.whole_marks in answer for remedy in self._active)

    @property
    def holds(self) -> bool:
        """Whether nothing of the stream may be relayed yet."""
        return any(remedy.holds for remedy in self._active)

    def mend(self, answer: dict[str, Any]) -> bool:
        """Mend an event of a stream, or a whole answer, in place; return whether that changed it."""
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
            yield (index if isinstance(index, int) else place), part, choice.get("finish_reason")


def beginning(text: str, marker: str) -> str:
    """Return the longest end of `text` that `marker` begins with but does not end with, or ""."""
    for size in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:size]):
            return marker[:size]
    return ""
