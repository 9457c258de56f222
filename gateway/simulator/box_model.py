"""One model of a simulated box, and the events that the box records."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import anyio

from gateway.core.value import valueclass
from gateway.simulator.box_options import Boot
from gateway.simulator.door import Door
from gateway.simulator.options import SimulatorOptions
from gateway.simulator.server import Simulator


class State(StrEnum):
    """The state of a model."""

    STOPPED = "stopped"
    BOOTING = "booting"
    RUNNING = "running"
    SLEEPING = "sleeping"
    WAKING = "waking"
    STOPPING = "stopping"
    FAILED = "failed"


HOLDING = frozenset({State.BOOTING, State.RUNNING, State.WAKING, State.STOPPING})
"""States in which a model holds the memory. One that is falling asleep counts as running."""

SETTLED = frozenset({State.STOPPED, State.RUNNING, State.SLEEPING, State.FAILED})
"""States that persist until the next order."""


class Busy(Exception):
    """The order cannot be accepted now."""


@valueclass(frozen=True, slots=True)
class Swap:
    """A change of the answering model.

    Attributes:
        at_s: Epoch seconds.
        took_s: Engine seconds since the previous one stopped answering.
    """

    left: str
    came: str
    at_s: float
    took_s: float


@dataclass(slots=True)
class Residency:
    """A period during which a model answered.

    Attributes:
        from_s, until_s: Epoch seconds; `until_s` is None for the current one.
        engine_s: Its duration in engine seconds, once it is over.
    """

    model: str
    from_s: float
    until_s: float | None = None
    engine_s: float | None = None


@valueclass(frozen=True, slots=True)
class Violation:
    """A model needed the memory while others held it.

    Attributes:
        held_by: The models that held it.
        at_s: Epoch seconds.
        by: The order: "start" or "wake_up".
    """

    model: str
    held_by: tuple[str, ...]
    at_s: float
    by: str


class Model:
    """One model of a box. Its counters cover the whole lifetime of the box.

    Attributes:
        options: Its options, with the actual port.
        since_s: Since when it is in its state, in epoch seconds.
        reason: Why it failed; "" if it has not.
        starts: Start orders carried out.
        failed_boots: Failed boots.
        kills: How often it was killed: for lack of memory, or by an order.
        boots: Outcomes of its next boots; empty for random ones.
        server: Its process; None if there is none.
        scope: Cancel this to end the process.
        alive: Held by its process.
        changed: Set when its state changes, and replaced by a new event.
    """

    def __init__(self, name: str, options: SimulatorOptions, door: Door, boots: Sequence[Boot]) -> None:
        self.name = name
        self.options = options
        self.door = door
        self.state = State.STOPPED
        self.since_s = 0.0
        self.reason = ""
        self.starts = 0
        self.failed_boots = 0
        self.kills = 0
        self.boots = deque(boots)
        self.server: Simulator | None = None
        self.scope = anyio.CancelScope()
        self.alive = anyio.Lock()
        self.changed = anyio.Event()
        self._cut = 0  # by previous processes
        self._resident_s = 0.0
        self._began: float | None = None

    @property
    def url(self) -> str:
        """Its base URL, whether it is up or not."""
        return self.door.url

    @property
    def cut(self) -> int:
        """Number of requests cut off because it was stopped, put to sleep, killed, or died."""
        return self._cut + (self.server.cut if self.server is not None else 0)

    @property
    def is_settled(self) -> bool:
        """Whether its state persists until the next order."""
        return self.state in SETTLED

    @property
    def resident_s(self) -> float:
        """Total engine seconds during which it has answered."""
        return self._resident_s + self._answered_s()

    def begin(self) -> None:
        """Record that it begins to answer."""
        self._began = anyio.current_time()

    def end(self) -> float:
        """Record that it ceases to answer; return for how many engine seconds it did."""
        answered_s = self._answered_s()
        self._resident_s += answered_s
        self._began = None
        return answered_s

    def _answered_s(self) -> float:
        return 0.0 if self._began is None else (anyio.current_time() - self._began) * self.options.speed

    def gone(self) -> None:
        """Record the end of its process."""
        self._cut, self.server = self.cut, None

    async def settled(self) -> State:
        """Wait until no order is in progress for it; return its state."""
        while not self.is_settled:
            await self.changed.wait()
        return self.state
