"""Demand for a box from jobs queued in the store. Pure.

A worker moves only a few jobs of a lane to the waiting line at a time (gateway/jobs/worker.py), so the line
shows two of fifty. The store knows the others, by lane. All gateways read the same store, so its jobs are
counted once, by the process that decides, and are not part of the notes that processes exchange.

The backends that could serve a lane follow from its class. If one of them is outside the box, or is resident,
the lane's jobs wait because it is not their turn, not because a model is out. They do not justify a swap,
except for those that are already in a waiting line. Nor do jobs that no running worker would take.
"""

from collections.abc import Collection, Iterable, Mapping

from gateway.core.box import Box, State
from gateway.core.jobs import Lane, lane_of
from gateway.core.policy import Policy, TrafficClass
from gateway.core.swap_policy import Backlog


def class_of(policy: Policy, lane: str) -> TrafficClass | None:
    """Return the class whose jobs are queued in a lane; None if the configuration no longer has it."""
    return next((one for model, one in policy.classes() if lane == lane_of(model.id, one.name)), None)


def servers(policy: Policy, traffic_class: TrafficClass) -> frozenset[str]:
    """Return the backends that may serve a class."""
    names = policy.backends_of(traffic_class)
    return frozenset(name for name in names if not policy.backends[name].drain)


def stored_wants(
    lanes: Iterable[Lane], policy: Policy, box: Box, members: Collection[str], now: float
) -> Mapping[str, Backlog]:
    """Return the jobs queued in the store for each backend of a box as its first choice.

    `lanes` as of `now`, monotonic seconds. The length of a job is not checked: jobs that no backend could
    take were rejected on submission.
    """
    found = dict.fromkeys(members, Backlog())
    for lane in lanes:
        traffic_class = class_of(policy, lane.name)
        if traffic_class is None or lane.oldest_s is None or not lane.is_worked:
            continue
        able = servers(policy, traffic_class)
        if not able.issubset(found):
            continue
        is_in = box.state in (State.RESIDENT, State.DRAINING) and box.backend in able
        wanted = {box.backend} if is_in else able
        for name in wanted.intersection(policy.pools[traffic_class.pools[0]].backends):
            found[name] += Backlog(lane.queued, now - lane.oldest_s)
    return found
