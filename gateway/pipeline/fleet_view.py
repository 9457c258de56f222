"""The fleet as decisions see it: each backend with its load, its health, and what is known of its caches.

New requests, the queue and operators' questions see it through the same code, so they see the same.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from gateway.core.admission import WHOLE
from gateway.core.backends import Backend
from gateway.core.box_demand import servers
from gateway.core.count_check import CountTracker
from gateway.core.decision import Exclusion, Objection
from gateway.core.health import NOT_PROBED, BackendStatus, State
from gateway.core.load import Load
from gateway.core.policy import Policy, TrafficClass
from gateway.core.refusals import Refusal
from gateway.core.request import Prefixes
from gateway.core.selection import BackendView, unavailable_reason
from gateway.core.waiting import WaitingLine
from gateway.pipeline.failures import Failures
from gateway.pipeline.watch import BackendWatch
from gateway.ports import Clock, Fleet, Ledger, PrefixIndex

_NO_SHARES: Mapping[str, float] = MappingProxyType({})
_NO_WAITERS: Mapping[str, int] = MappingProxyType({})
_NO_OFFERS: Mapping[str, Load] = MappingProxyType({})


class FleetView:
    """Takes snapshots of backends. One per process.

    In all of them, `held` is per backend the share (0..1) of a conversation that it has already processed.

    Attributes:
        newest: The newest policy; see `use`.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        fleet: Fleet,
        ledger: Ledger,
        watch: BackendWatch,
        counts: CountTracker,
        prefixes: PrefixIndex,
        objections: Callable[[], Mapping[str, Objection]],
        failures: Failures,
        line: WaitingLine,
        clock: Clock,
    ) -> None:
        """See the fleet under `policy`. `objections`: see `Pipeline`."""
        self.newest = policy
        self._members_of: dict[tuple[str, ...], Mapping[str, Backend]] = {}  # by pools, for the newest policy
        self._fleet = fleet
        self._ledger = ledger
        self._watch = watch
        self._counts = counts
        self._prefixes = prefixes
        self._objections = objections
        self._failures = failures
        self._line = line
        self._clock = clock

    def use(self, policy: Policy) -> None:
        """Make a policy the newest one."""
        self.newest = policy
        self._members_of.clear()

    def of_class(
        self, policy: Policy, held: Mapping[str, float], traffic_class: TrafficClass
    ) -> Mapping[str, BackendView]:
        """Return the backends of a class for a new request: what is queued or offered goes before it.

        `policy` becomes the newest one.
        """
        if policy is not self.newest:
            self.use(policy)
        members = self._members_of.get(traffic_class.pools)
        if members is None:
            names = policy.backends_of(traffic_class)
            members = self._members_of[traffic_class.pools] = {name: policy.backends[name] for name in names}
        line = self._line
        return self.of(members, held, line.long_waiting(), line.offered())

    def for_operators(self, policy: Policy, held: Mapping[str, float]) -> Mapping[str, BackendView]:
        """Return the backends of a policy as a decision would see them now."""
        return self.of(policy.backends, held, self._line.long_waiting())

    def for_line(self) -> Mapping[str, BackendView]:
        """Return all backends for the waiting line, which adds its own queue and open offers to them."""
        return self.of(self.newest.backends)

    def of(
        self,
        backends: Mapping[str, Backend],
        held: Mapping[str, float] = _NO_SHARES,
        long_waiting: Mapping[str, int] = _NO_WAITERS,
        offered: Mapping[str, Load] = _NO_OFFERS,
    ) -> Mapping[str, BackendView]:
        """Return snapshots of backends."""
        statuses, load_of, shares_max = self._fleet.statuses(), self._ledger.load, self._watch.shares_max()
        counts, objections = self._counts, self._objections()
        seqs_taken, kv_taken = counts.seqs_taken, counts.kv_taken
        failures = self._failures
        if failures.doubts.rows:
            statuses, objections = failures.doubting(self.newest, statuses, objections)
        refusals = failures.refusals
        views: dict[str, BackendView] = {}
        taken = seqs_taken or kv_taken
        if not (taken or long_waiting or objections or shares_max or refusals.known):  # the usual case
            for name, backend in backends.items():
                status = statuses.get(name, NOT_PROBED)
                views[name] = BackendView(backend, load_of(name), status, held.get(name, 0.0))
        else:
            for name, backend in backends.items():
                views[name] = BackendView(
                    backend,
                    load_of(name),
                    statuses.get(name, NOT_PROBED),
                    held.get(name, 0.0),
                    shares_max.get(name, WHOLE),
                    kv_taken.get(name, 0),
                    long_waiting.get(name, 0),
                    objections.get(name),
                    seqs_taken=seqs_taken.get(name, 0),
                )
            for name, refusal in refusals.last(self.newest).items():
                if (view := views.get(name)) is not None:
                    views[name] = _refusing(view, refusal, self._clock.now())
        for name, claims in offered.items():
            if (view := views.get(name)) is not None:
                views[name] = replace(view, load=view.load + claims)
        return views

    def held(self, policy: Policy, prefixes: Prefixes) -> Mapping[str, float]:
        """Return, per backend, the share of a conversation that it has already processed."""
        return self._prefixes.held(prefixes) if policy.weights.prefix_affinity else _NO_SHARES

    def refusals(self) -> Mapping[str, Refusal]:
        """Return, by id, the last refusal because of load of each backend that has refused of late."""
        return self._failures.refusals.last(self.newest)

    def status(self, backend_id: str) -> BackendStatus:
        """Return what is known of the health of a backend."""
        return self._fleet.statuses().get(backend_id, NOT_PROBED)

    def can_serve(self, policy: Policy, traffic_class: TrafficClass) -> bool:
        """Return whether a backend for a class is up, or can be swapped in by its box."""
        objections = self._objections()
        for name in servers(policy, traffic_class):
            status, objection = self.status(name), objections.get(name)
            if objection is not None:
                if objection[0] is Exclusion.SWAPPED_OUT:
                    return True
                continue  # in quarantine, or its box has failed: no swap brings it in
            if status.state is State.UNKNOWN or unavailable_reason(policy.backends[name], status) is None:
                return True
        return False


def _refusing(view: BackendView, last: Refusal, now: float) -> BackendView:
    """Return the view of a backend whose last refusal because of load is remembered."""
    return replace(view, refuses=last.is_recent(now), takes=last.takes(now), refuses_all=last.is_of_all(now))
