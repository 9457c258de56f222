"""First tokens that cannot be seen: of answers in one piece, and of several prompts in one request.

A prompt counts as work outstanding until its first token. Where no first token shows, the whole answer would
count, and a backend that decodes would look as if it were reading all the while. So the moment is predicted:
when the prompt work that was outstanding as the request started, its own included, should be done. It is told
to the ledger then, unless the request has ended before.
"""

from heapq import heappop, heappush
from itertools import count

import anyio

from gateway.ports import Clock, Ledger, Slot

OVERHEAD_S = 0.05
"""What is added to a prediction: receiving the request, and the step it has to wait for."""


class FirstTokens:
    """Tells the ledger of first tokens when they should have come. `run` must run as long as requests do."""

    def __init__(self, ledger: Ledger, clock: Clock) -> None:
        """Tell `ledger`."""
        self._ledger = ledger
        self._clock = clock
        self._due: list[tuple[float, int, str]] = []
        self._slots: dict[str, Slot] = {}
        self._numbers = count()
        self._changed = anyio.Event()

    def expect(self, slot: Slot) -> None:
        """Predict the first token of what runs in a slot. Where its prompt work is not known, it has none."""
        if not slot.load.prefill_ms:
            return
        outstanding_s = self._ledger.load(slot.backend).prefill_ms / 1000
        due = self._clock.now() + OVERHEAD_S + outstanding_s
        self._slots[slot.id] = slot
        is_first = not self._due or due < self._due[0][0]
        heappush(self._due, (due, next(self._numbers), slot.id))
        if is_first:  # else it is waited for long enough
            self._changed.set()

    def forget(self, slot: Slot) -> None:
        """Expect it no more: the request has ended."""
        self._slots.pop(slot.id, None)

    async def run(self) -> None:
        """Tell of each when it is due, until cancelled."""
        while True:
            changed = self._changed = anyio.Event()
            await self.tell()
            patience_s = None if not self._due else max(0.0, self._due[0][0] - self._clock.now())
            with anyio.move_on_after(patience_s):
                await changed.wait()

    async def tell(self) -> None:
        """Tell of those that are due."""
        while self._due and (self._due[0][0] <= self._clock.now() or self._due[0][2] not in self._slots):
            slot = self._slots.pop(heappop(self._due)[2], None)
            if slot is not None:
                await self._ledger.answered(slot)
