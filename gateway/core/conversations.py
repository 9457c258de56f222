"""Where long conversations were answered lately, as the gateways of one fleet tell each other. Pure.

The keys of a conversation (`request.Request.prefixes`) are hashes of this process. Another process has the
same ones if it hashes alike, that is, if both run the same build of Python with the same PYTHONHASHSEED: the
workers of one gateway do, and gateways that are started with one.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import field

from gateway.core.value import valueclass

HASHING = hash("gemma-gateway")
"""Tells processes apart that hash differently."""

TOLD_MIN_TOKENS = 4_000
"""Conversations that are shorter are not told of. A choice: an H100 reads as much in less than a second
(docs/measurements.md), and most requests are shorter."""

TOLD_S = 10.0
"""How long an answer is told of. A choice: ten heartbeats; what a gateway has not heard by then was lost."""

TOLD_MAX = 256
"""Maximum answers that are told of. A choice that bounds the facts of a process: 8 KB, and 25 a second."""


@valueclass(frozen=True, slots=True)
class Conversations:
    """What one process tells of its conversations.

    Attributes:
        hashing: Its `HASHING`; 0 if it tells nothing.
        answered: Per backend, `(number, key)` of what was answered there lately, oldest first. Numbers only
            grow.
    """

    hashing: int = 0
    answered: Mapping[str, tuple[tuple[int, int], ...]] = field(default_factory=dict)

    def since(self, before: "Conversations") -> Iterator[tuple[str, int]]:
        """Yield the backend and the key of each answer that was not told of `before`, oldest first."""
        known = max((told[-1][0] for told in before.answered.values() if told), default=0)
        new = ((*one, name) for name, told in self.answered.items() for one in told if one[0] > known)
        for _, key, name in sorted(new):
            yield name, key


class Answered:
    """The long conversations that this process had answered lately."""

    def __init__(self) -> None:
        """Start with none."""
        # When, number, key, backend.
        self._latest: deque[tuple[float, int, int, str]] = deque(maxlen=TOLD_MAX)
        self._number = 0

    def note(self, key: int, backend_id: str, now: float) -> None:
        """Note that a backend has answered a conversation."""
        self._number += 1
        self._latest.append((now, self._number, key, backend_id))

    def forget(self, backend_id: str) -> None:
        """Drop what a backend has answered: it holds nothing any more."""
        self._latest = deque((one for one in self._latest if one[3] != backend_id), maxlen=TOLD_MAX)

    def told(self, now: float) -> Conversations:
        """Return what to tell of it now."""
        while self._latest and self._latest[0][0] < now - TOLD_S:
            self._latest.popleft()
        found: dict[str, list[tuple[int, int]]] = {}
        for _, number, key, backend_id in self._latest:
            found.setdefault(backend_id, []).append((number, key))
        return Conversations(HASHING, {name: tuple(told) for name, told in found.items()})
