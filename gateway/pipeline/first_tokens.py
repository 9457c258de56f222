"""Predicts first tokens that cannot be observed: non-streamed answers, and requests with several prompts.

Prefill work counts as outstanding until the first token. Without an observable first token it would count
until the end of the answer, and a backend that is decoding would seem to be prefilling. So the first token is
predicted for the time at which all prefill work outstanding at the start of the request, including its own,
should be done. It is then reported to the ledger, unless the request has already ended.
"""

from math import inf

import anyio

from gateway.ports import Clock, Ledger, Slot

OVERHEAD_S = 0.05
"""Added to each prediction: the time to receive the request, and the engine step it has to wait for. A choice
without a margin, because the limit on outstanding prefill has one."""

TOGETHER_S = 0.02
"""Predictions are reported together, up to this late. A choice: with thousands of requests per second, one is
due in every fraction of a millisecond, and most are of requests that have ended."""


class FirstTokens:
    """Reports predicted first tokens to the ledger. `run` must be running while requests are served."""

    def __init__(self, ledger: Ledger, clock: Clock) -> None:
        """Report to `ledger`."""
        self._ledger = ledger
        self._clock = clock
        self._due: dict[str, tuple[float, Slot]] = {}  # by slot id; few, since a prefill does not take long
        self._next_at = inf  # when the first of those is due that were there at the last look
        self._changed = anyio.Event()

    def expect(self, slot: Slot) -> None:
        """Predict the first token of the request in a slot. Does nothing if its prefill work is unknown."""
        if not slot.load.prefill_ms:
            return
        outstanding_s = self._ledger.load(slot.backend).prefill_ms / 1000
        due = self._clock.now() + OVERHEAD_S + outstanding_s
        self._due[slot.id] = due, slot
        if due < self._next_at:
            self._changed.set()

    def forget(self, slot: Slot) -> None:
        """Drop the prediction of a request that has ended."""
        self._due.pop(slot.id, None)

    async def run(self) -> None:
        """Report predicted first tokens when they are due, until cancelled."""
        while True:
            changed = self._changed = anyio.Event()
            await self.tell()
            with anyio.move_on_after(max(TOGETHER_S, self._next_at - self._clock.now())):
                await changed.wait()

    async def tell(self) -> None:
        """Report all predictions that are due."""
        now = self._clock.now()
        for due, slot in tuple(self._due.values()):
            if due <= now and self._due.pop(slot.id, None) is not None:
                await self._ledger.answered(slot)
        self._next_at = min([due for due, _ in self._due.values()], default=inf)
