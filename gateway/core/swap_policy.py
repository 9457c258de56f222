"""When a box changes models: gated batches. Pure.

A swap costs minutes in which nobody is served, so work for the model that is out gathers until enough of
it waits, or until the oldest has waited long enough. Age alone livelocks: after a swap of five minutes both
queues look overdue, and the box would swap back without having served anything. So there is a gate:
everything that was queued when a model came in is started before the next swap is considered. What of it
turns up later (a job whose backend died, or that was between two gateways) calls off a swap that drains.

While a box drains, nothing new starts, and one long answer may keep the rest of the machine idle for half an
hour. Who waits for the model that is still in is served soonest by calling the swap off: that is a swap
back at no cost. So the same trigger that would bring the model back in does so before it is out; but only
until the oldest that waits for the other model has waited twice its time, so that neither starves.
docs/boxes.md has the figures.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

CALL_OFF_UNTIL = 2.0
"""Times its `wait_s` that the oldest for the other model has waited when a swap is called off no more."""


@dataclass(frozen=True, slots=True)
class Trigger:
    """What brings a model in.

    Attributes:
        jobs: As many requests waiting for it start a swap.
        wait_s: So does one that has waited this long.
    """

    jobs: int = 4
    wait_s: float = 600.0

    def is_met(self, wants: "Wants", now: float) -> bool:
        """Return whether what waits is enough."""
        if wants.oldest_at is None:
            return False
        return wants.count >= self.jobs or now - wants.oldest_at >= self.wait_s


@dataclass(frozen=True, slots=True)
class SwapRules:
    """When one box swaps. Seconds; `idle_s` and `residency_s` are choices, none is measured.

    Attributes:
        default: Whose model is in when nobody wants anything.
        triggers: Per backend of the box, in its order.
        residency_s: A model that came in stays at least this long.
        idle_s: Without work for this long, the box goes back to the default.
    """

    default: str
    triggers: Mapping[str, Trigger]
    residency_s: float = 300.0
    idle_s: float = 1800.0


@dataclass(frozen=True, slots=True)
class Wants:
    """What waits for one backend as its first choice.

    Attributes:
        count: Requests.
        oldest_at: When the oldest of them began to wait, monotonic seconds; None where there is none.
    """

    count: int = 0
    oldest_at: float | None = None

    def __add__(self, other: "Wants") -> "Wants":
        known = [at for at in (self.oldest_at, other.oldest_at) if at is not None]
        return Wants(self.count + other.count, min(known, default=None))


@dataclass(frozen=True, slots=True)
class Residency:
    """Whose model is in, and what it has to do.

    Attributes:
        backend: Whose.
        since: When it came in, monotonic seconds.
        batch_at: What was queued for it then is started before a swap is considered.
        idle_since: When it was last seen with something running or waiting.
        wants: What waits, per backend.
        barred: Backends that must not be started.
    """

    backend: str
    since: float
    batch_at: float
    idle_since: float
    wants: Mapping[str, Wants] = field(default_factory=dict)
    barred: frozenset[str] = frozenset()

    @property
    def batch_is_served(self) -> bool:
        """Whether everything that was queued when the model came in has been started."""
        oldest_at = self.wants.get(self.backend, Wants()).oldest_at
        return oldest_at is None or oldest_at > self.batch_at


class Cause(StrEnum):
    """Why a swap is planned, or why none is. Few and fixed: a metric label."""

    JOBS = "jobs"  # enough requests wait for the other model
    AGE = "age"  # one has waited long enough for it
    IDLE = "idle"  # nobody wants the model that is in
    NOTHING = "nothing"  # no swap is planned


@dataclass(frozen=True, slots=True)
class Plan:
    """What the box does next, as far as is known.

    Attributes:
        cause: See `Cause`.
        target: Whose model comes in; "" where no swap is planned.
        at: The earliest time it may begin, monotonic seconds; None where that depends on the batch.
        held_by_batch: Whether what was queued for the present model has to start first.
    """

    cause: Cause = Cause.NOTHING
    target: str = ""
    at: float | None = None
    held_by_batch: bool = False

    def is_due(self, now: float) -> bool:
        """Return whether the swap begins now."""
        return bool(self.target) and self.at is not None and self.at <= now


def plan(rules: SwapRules, here: Residency, now: float) -> Plan:
    """Return what the box does next if nothing else happens."""
    wishes = []
    for place, (name, trigger) in enumerate(rules.triggers.items()):
        wants = here.wants.get(name, Wants())
        if name == here.backend or name in here.barred or wants.oldest_at is None:
            continue
        by_age = wants.oldest_at + trigger.wait_s
        if wants.count >= trigger.jobs:
            wishes.append((min(now, by_age), place, name, Cause.JOBS))
        else:
            wishes.append((by_age, place, name, Cause.AGE))
    if not wishes:
        return _going_home(rules, here)
    # Among several that are due, the one that has been due for longest.
    at, _, target, cause = min(wishes)
    if not here.batch_is_served:
        return Plan(cause, target, None, held_by_batch=True)
    return Plan(cause, target, max(at, here.since + rules.residency_s))


def is_called_off(rules: SwapRules, here: Residency, planned: Plan, now: float) -> bool:
    """Return whether a swap that still drains is not worth it any more."""
    own = here.wants.get(here.backend, Wants())
    other = here.wants.get(planned.target, Wants())
    if other.oldest_at is None:
        return planned.cause is not Cause.IDLE or own.count > 0
    last_at = other.oldest_at + CALL_OFF_UNTIL * rules.triggers[planned.target].wait_s
    is_wanted = rules.triggers[here.backend].is_met(own, now) or not here.batch_is_served
    return now < last_at and is_wanted


def _going_home(rules: SwapRules, here: Residency) -> Plan:
    is_home = here.backend == rules.default
    if is_home or rules.default in here.barred or here.wants.get(here.backend, Wants()).count:
        return Plan()
    return Plan(
        Cause.IDLE, rules.default, max(here.idle_since + rules.idle_s, here.since + rules.residency_s)
    )
