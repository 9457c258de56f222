"""Which of the processes of a test run is given which test."""

import re
from contextlib import suppress

from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

HEAVY = re.compile(
    r"tests/(demo/test_demo|e2e/test_processes|e2e/test_\w*chaos)\.py::"
    r"|tests/test_routing_benchmark\.py::test_over_http_"
)
"""Tests that want more than a core for themselves: one runs at a time, in the order of its file."""


class OneHeavyAtATime(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """Gives each test to whoever is free, but the heavy ones to one worker, and those first."""

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith("tests/node/"):
            return "node"  # its checks share a gateway and a process per group
        if nodeid.startswith("tests/browser/"):
            return "browser"  # likewise, with a page
        return "heavy" if HEAVY.match(nodeid) else nodeid

    def mark_test_complete(self, node: WorkerController, item_index: int, duration: float = 0) -> None:
        """Note that a test has run, and forget its unit with the unit's last one.

        xdist keeps all that a process has done: with each test it counts it again, which takes seconds of ten
        thousand tests. Where the process dies it gives it out again, too, as tests of which no result ever
        comes: the run would not end. A test that is tried again is complete more than once.
        """
        units = self.assigned_work[node]
        scope = self._split_scope(self.registered_collections[node][item_index])
        if scope in units:
            super().mark_test_complete(node, item_index, duration)
            if all(units[scope].values()):
                del units[scope]

    def _reschedule(self, node: WorkerController) -> None:
        """Give a process what it needs to go on: a test beside its last one, or word that none comes.

        A process runs a test only once it knows what comes after it. xdist gives one that replaces a dead
        one a single test; if all the others have ended by then, nothing happens that would bring a second.
        """
        super()._reschedule(node)
        if self._pending_of(self.assigned_work[node]) == 1:
            super()._reschedule(node)

    def _assign_work_unit(self, node: WorkerController) -> None:
        """Give a process the next tests; they are taken back from one that turns out to be dead."""
        with suppress(OSError):
            super()._assign_work_unit(node)
