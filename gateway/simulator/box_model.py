"""One model of a simulated box, and what the box remembers about all of them."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import anyio

from gateway.simulator.box_options import Boot
from gateway.simulator.door import Door
from gateway.simulator.options import SimulatorOptions
from gateway.simulator.server import Simulator


class State(StrEnum):
    """Where a model is between off and on."""

    STOPPED = "stopped"
    BOOTING = "booting"
    RUNNING = "running"
    SLEEPING = "sleeping"
    WAKING = "waking"
    STOPPING = "stopping"
    FAILED = "failed"


HOLDING = frozenset({State.BOOTING, State.RUNNING, State.WAKING, State.STOPPING})
"""States in which a model holds the memory. One that falls asleep is running until it sleeps."""

SETTLED = frozenset({State.STOPPED, State.RUNNING, State.SLEEPING, State.FAILED})
"""States that last until the next order."""


class Busy(Exception):
    """An order that cannot be taken now."""


@dataclass(frozen=True, slots=True)
class Swap:
    """A change of the model that answers.

    Attributes:
        left: Who answered before.
        came: Who answers now.
        at_s: When, in epoch seconds.
        took_s: Engine seconds since the other one stopped answering.
    """

    left: str
    came: str
    at_s: float
    took_s: float


@dataclass(slots=True)
class Residency:
    """A time during which a model answered.

    Attributes:
        model: Its name.
        from_s, until_s: Epoch seconds; `until_s` is None of the one that answers now.
        engine_s: Its length in engine seconds, once it is over.
    """

    model: str
    from_s: float
    until_s: float | None = None
    engine_s: float | None = None


@dataclass(frozen=True, slots=True)
class Violation:
    """A model that needed the memory while others held it.

    Attributes:
        model: Its name.
        held_by: Those that held it.
        at_s: When, in epoch seconds.
        by: The order: "start" or "wake_up".
    """

    model: str
    held_by: tuple[str, ...]
    at_s: float
    by: str


class Model:
    """One model of a box. What it counts, it counts for as long as the box runs.

    Attributes:
        name: As the box calls it.
        options: As given, with the port it has.
        state: Where it is.
        since_s: Since when, in epoch seconds.
        reason: Why it failed; "" if it has not.
        starts: Orders to start that were carried out.
        failed_boots: Boots that ended in failure.
        kills: Times it was killed: because memory ran out, or by an order.
        boots: How its next boots end; empty for chance.
        server: Its process; None if there is none.
        scope: To be cancelled when that shall end.
        alive: Held by its process.
        changed: Set when its state changes, and then replaced.
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
        self._cut = 0  # by processes that are gone
        self._resident_s = 0.0
        self._began: float | None = None

    @property
    def url(self) -> str:
        """Its base URL, whether it answers or not."""
        return self.door.url

    @property
    def cut(self) -> int:
        """Requests that were not finished because it was stopped, put to sleep, killed, or died."""
        return self._cut + (self.server.cut if self.server is not None else 0)

    @property
    def is_settled(self) -> bool:
        """Whether it stays as it is until the next order."""
        return self.state in SETTLED

    @property
    def resident_s(self) -> float:
        """Engine seconds for which it has answered so far."""
        return self._resident_s + self._answered_s()

    def begin(self) -> None:
        """Note that it answers from now on."""
        self._began = anyio.current_time()

    def end(self) -> float:
        """Note that it does not answer any more; return for how many engine seconds it did."""
        answered_s = self._answered_s()
        self._resident_s += answered_s
        self._began = None
        return answered_s

    def _answered_s(self) -> float:
        return 0.0 if self._began is None else (anyio.current_time() - self._began) * self.options.speed

    def gone(self) -> None:
        """Note that its process has ended."""
        self._cut, self.server = self.cut, None

    async def settled(self) -> State:
        """Wait until nothing is under way with it; return its state."""
        while not self.is_settled:
            await self.changed.wait()
        return self.state
