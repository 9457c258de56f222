"""What the jobs that wait in the store want of a box. Pure.

A worker brings a lane's jobs to its line a few at a time (gateway/jobs/worker.py), so the line alone shows
two of fifty. The store knows the others, by lane. All gateways see the same store: what it says is counted
once, by whoever decides, and is in no note.

Which backends could serve a lane follows from its class. A lane that somebody outside the box could serve
waits in the store because its turn has not come, not because a model is out; so does one that the model
that is in could serve. Neither asks for a swap, beyond what those of its jobs do that stand in a line.
"""

from collections.abc import Collection, Iterable, Mapping

from gateway.core.box import Box, State
from gateway.core.jobs import Lane
from gateway.core.swap_policy import Wants
from gateway.core.values import Policy, TrafficClass


def class_of(policy: Policy, lane: str) -> TrafficClass | None:
    """Return the class whose jobs queue in a lane; None where the configuration has it no more."""
    for model in policy.models:
        for traffic_class in model.classes:
            if lane == f"{model.id}/{traffic_class.name}":
                return traffic_class
    return None


def servers(policy: Policy, traffic_class: TrafficClass) -> frozenset[str]:
    """Return the backends that work of a class may go to."""
    names = (name for pool in traffic_class.pools for name in policy.pools[pool].backends)
    return frozenset(name for name in names if not policy.backends[name].drain)


def stored_wants(
    lanes: Iterable[Lane], policy: Policy, box: Box, members: Collection[str], now: float
) -> Mapping[str, Wants]:
    """Return what waits in the store for each backend of a box as its first choice.

    `lanes` as they were at `now`, monotonic seconds. The length of a job is not looked at: one that no
    backend could take was refused when it was handed over.
    """
    found = dict.fromkeys(members, Wants())
    for lane in lanes:
        traffic_class = class_of(policy, lane.name)
        if traffic_class is None or lane.oldest_s is None:
            continue
        able = servers(policy, traffic_class)
        if not able.issubset(found):
            continue
        is_in = box.state in (State.RESIDENT, State.DRAINING) and box.backend in able
        wanted = {box.backend} if is_in else able
        for name in wanted.intersection(policy.pools[traffic_class.pools[0]].backends):
            found[name] += Wants(lane.queued, now - lane.oldest_s)
    return found
