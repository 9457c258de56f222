"""How many long prompts wait for each backend: short requests of other classes spill to these last."""

from collections.abc import Iterable, Mapping
from math import inf
from types import MappingProxyType

from gateway.core.facts import summed
from gateway.core.selection import BackendView
from gateway.core.waiting.fairness import Entry

_NONE: Mapping[str, int] = MappingProxyType({})


class LongWaiting:
    """Counts queued long prompts, per backend of their first pool that could take them.

    Jobs do not count where they leave room for others.

    Attributes:
        here: The counts of this process.
        elsewhere: Those of all other processes.
    """

    def __init__(self) -> None:
        """Start with none."""
        self.here: dict[str, int] = {}
        self.elsewhere: Mapping[str, int] = _NONE
        self._windows: Mapping[str, int] = {}  # of backends that report less than is configured, in tokens

    def everywhere(self) -> Mapping[str, int]:
        """Return the counts of all processes."""
        return summed((self.here, self.elsewhere)) if self.here or self.elsewhere else _NONE

    def add(self, entry: Entry) -> None:
        """Count an entry that has been queued, if its prompt is long."""
        self._count(entry, 1)

    def remove(self, entry: Entry) -> None:
        """Count an entry no longer, because it has left the queue."""
        self._count(entry, -1)

    def note_windows(self, views: Mapping[str, BackendView], queued: Iterable[Entry]) -> None:
        """Count anew if backends report other windows than before: fewer prompts wait for smaller ones."""
        windows = {
            name: capacity.context_tokens
            for name, view in views.items()
            if (capacity := view.capacity) is not view.backend.capacity
        }
        if windows != self._windows:
            self._windows = windows
            self.here.clear()
            for entry in queued:
                self.add(entry)

    def _count(self, entry: Entry, change: int) -> None:
        if not entry.is_long:
            return
        ticket = entry.ticket
        demand = ticket.demand
        if demand.is_job and ticket.policy.pools[ticket.traffic_class.pools[0]].jobs.reserve:
            return  # jobs leave room for others there, so one that waits does not keep these from spilling
        for name in ticket.first_pool:
            if not ticket.may_run_on(name) or demand.total_tokens > self._windows.get(name, inf):
                continue  # it waits for the other backends
            count = self.here.get(name, 0) + change
            if count:
                self.here[name] = count
            else:
                del self.here[name]
