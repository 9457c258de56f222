"""When a box swaps models: gated batches. Pure.

A box serves no requests for the minutes that a swap takes. So requests for the model that is out accumulate
until there are enough of them, or until the oldest has waited long enough. Age alone livelocks: after a swap
of five minutes both queues look overdue, and the box would swap back without having served any request. The
gate prevents that: all requests that were queued when a model came in are started before the next swap is
considered. If some of them appear only later (a job whose backend died, or that was moving between two
gateways), they cancel a swap that is still draining. The gate does not hold for a model that starts none of
them for as long as the other model's requests wait for a swap: its engine hangs, nobody works its jobs off,
or newer requests of a higher priority take every slot. Nor does it hold once a swap has been due for twice
that time, because a batch may be hundreds of jobs.

While a box drains, no request starts, and one long answer may keep the rest of the machine idle for half an
hour. Cancelling the swap is then the fastest way to serve requests for the model that is still in, because it
is a swap back at no cost. So the trigger that would bring that model back in cancels the swap instead, but
only until the oldest request for the other model has waited twice its time, so that neither model starves.
Those who give up are never old, so this is not counted by the requests alone: the box remembers since when a
swap has been due.
docs/boxes.md has the figures.
"""

from collections.abc import Mapping
from dataclasses import field
from enum import StrEnum

from gateway.core.value import valueclass

PUT_OFF_WAITS = 2.0
"""No cancellation once the oldest request for the other model has waited this many times its `wait_s`, and
neither cancellation nor gate once a swap has been due for so long. A choice: fewer swaps against how long
they may be put off (docs/boxes.md)."""

GATE_LEAST_S = 1_200.0
"""The gate may always hold for this long. A choice: four boots (docs/boxes.md), so that where
`wait_s` is short, swaps take a fifth of the time at most."""

STUCK_S = 60.0
"""A model that has work counts as stuck only after starting none of it for at least this long. A choice:
while it serves, starts are seconds apart, and a swap takes minutes."""

MOVED_S = 1.0
"""A batch has moved if its oldest request is younger by this. A choice: ages from the store are not exact."""


@valueclass(frozen=True, slots=True)
class Trigger:
    """Condition for swapping a model in. The defaults are one of the rules measured in docs/boxes.md.

    Attributes:
        jobs: This many requests waiting for it trigger a swap.
        wait_s: So does one request that has waited this many seconds.
    """

    jobs: int = 4
    wait_s: float = 600.0

    def is_met(self, wants: "Backlog", now: float) -> bool:
        """Return whether the waiting requests meet the condition."""
        if wants.oldest_at is None:
            return False
        return wants.count >= self.jobs or now - wants.oldest_at >= self.wait_s


@valueclass(frozen=True, slots=True)
class SwapRules:
    """When one box swaps, in seconds. `idle_s` and `residency_s` are choices, not measurements.

    Attributes:
        default: The backend whose model is in when there is no work.
        triggers: Per backend of the box, in its order.
        residency_s: Minimum time that a model stays in.
        idle_s: Without work for this long, the box returns to the default.
    """

    default: str
    triggers: Mapping[str, Trigger]
    residency_s: float = 300.0
    idle_s: float = 1800.0


@valueclass(frozen=True, slots=True)
class Backlog:
    """Requests that wait for one backend as their first choice.

    Attributes:
        count: Number of requests.
        oldest_at: When the oldest of them began to wait, in monotonic seconds; None if there is none.
        started_at: When, of the requests that have ended there, the latest to start did; None if none has.
    """

    count: int = 0
    oldest_at: float | None = None
    started_at: float | None = None

    def __add__(self, other: "Backlog") -> "Backlog":
        began = [at for at in (self.oldest_at, other.oldest_at) if at is not None]
        started = [at for at in (self.started_at, other.started_at) if at is not None]
        return Backlog(self.count + other.count, min(began, default=None), max(started, default=None))


@valueclass(frozen=True, slots=True)
class Residency:
    """The model that is in, and the waiting requests.

    Attributes:
        backend: The backend whose model is in.
        since: When it came in, in monotonic seconds.
        batch_at: Requests queued for it at this time are started before a swap is considered.
        idle_since: When it was last seen with running or waiting requests.
        served_at: When it was last seen with running requests.
        moved_at: When its batch was last seen to be empty, or to have started its oldest request.
        due_at: When a swap was first due since then, whatever put it off; None if none was.
        wants: Waiting requests per backend.
        barred: Backends that must not be started.
    """

    backend: str
    since: float
    batch_at: float
    idle_since: float
    wants: Mapping[str, Backlog] = field(default_factory=dict)
    barred: frozenset[str] = frozenset()
    served_at: float = 0.0
    moved_at: float = 0.0
    due_at: float | None = None

    @property
    def batch_is_served(self) -> bool:
        """Whether all requests that were queued when the model came in have been started."""
        oldest_at = self.wants.get(self.backend, Backlog()).oldest_at
        return oldest_at is None or oldest_at > self.batch_at

    def is_stuck(self, wait_s: float, now: float) -> bool:
        """Return whether what waits here does not start for as long as a request for another model waits.

        Either nothing runs here at all, for reasons that the box does not know, or what does run has
        overtaken the batch. (A batch that waits for long answers to end is not stuck.)
        """
        patience_s = max(wait_s, STUCK_S)
        if now - max(self.since, self.served_at) >= patience_s:
            return True
        if self.batch_is_served or now - self.moved_at < patience_s:
            return False
        started_at = self.wants[self.backend].started_at
        return started_at is not None and started_at > self.moved_at

    def has_gate(self, wait_s: float, now: float) -> bool:
        """Return whether its batch goes first, though a request for the other model waits."""
        if self.batch_is_served or self.is_stuck(wait_s, now):
            return False
        return self.due_at is None or now - self.due_at < max(PUT_OFF_WAITS * wait_s, GATE_LEAST_S)


class Cause(StrEnum):
    """Why a swap is planned. A small, fixed set: a metric label."""

    JOBS = "jobs"  # enough requests wait for the other model
    AGE = "age"  # one request has waited long enough for it
    IDLE = "idle"  # the model that is in has no work
    NOTHING = "nothing"  # no swap is planned


@valueclass(frozen=True, slots=True)
class Plan:
    """The next swap of the box, as far as it can be planned.

    Attributes:
        cause: See `Cause`.
        target: The backend whose model comes in; "" if no swap is planned.
        at: The earliest time it may begin, in monotonic seconds; None if that depends on the batch, or it
            has begun.
        held_by_batch: Whether requests queued for the current model have to start first.
    """

    cause: Cause = Cause.NOTHING
    target: str = ""
    at: float | None = None
    held_by_batch: bool = False

    def is_due(self, now: float) -> bool:
        """Return whether the swap begins now."""
        return self.at is not None and self.at <= now


def plan(rules: SwapRules, here: Residency, now: float) -> Plan:
    """Return the next swap of the box, given its current state."""
    wishes = []
    for place, (name, trigger) in enumerate(rules.triggers.items()):
        wants = here.wants.get(name, Backlog())
        if name == here.backend or name in here.barred or wants.oldest_at is None:
            continue
        by_age = wants.oldest_at + trigger.wait_s
        if wants.count >= trigger.jobs:
            wishes.append((min(now, by_age), place, name, Cause.JOBS))
        else:
            wishes.append((by_age, place, name, Cause.AGE))
    if not wishes:
        return _going_home(rules, here)
    # If several are due, the one that has been due the longest.
    at, _, target, cause = min(wishes)
    if here.has_gate(rules.triggers[target].wait_s, now):
        return Plan(cause, target, None, held_by_batch=True)
    return Plan(cause, target, max(at, here.since + rules.residency_s))


def due_since(rules: SwapRules, here: Residency, now: float) -> float | None:
    """Return when a swap was first due since the model came in, even if all who waited for it gave up."""
    if here.due_at is not None:
        return here.due_at
    is_due = any(
        trigger.is_met(here.wants.get(name, Backlog()), now)
        for name, trigger in rules.triggers.items()
        if name != here.backend and name not in here.barred
    )
    return now if is_due else None


def should_cancel(rules: SwapRules, here: Residency, planned: Plan, now: float) -> bool:
    """Return whether a swap that is still draining should be cancelled."""
    own = here.wants.get(here.backend, Backlog())
    other = here.wants.get(planned.target, Backlog())
    if other.oldest_at is None:
        return planned.cause is not Cause.IDLE or own.count > 0
    if here.is_stuck(rules.triggers[planned.target].wait_s, now):
        return False
    # Those for whom it became due may have given up since.
    since = other.oldest_at if here.due_at is None else min(other.oldest_at, here.due_at)
    last_at = since + PUT_OFF_WAITS * rules.triggers[planned.target].wait_s
    is_wanted = rules.triggers[here.backend].is_met(own, now) or not here.batch_is_served
    return now < last_at and is_wanted


def _going_home(rules: SwapRules, here: Residency) -> Plan:
    is_home = here.backend == rules.default
    if is_home or rules.default in here.barred or here.wants.get(here.backend, Backlog()).count:
        return Plan()
    return Plan(
        Cause.IDLE, rules.default, max(here.idle_since + rules.idle_s, here.since + rules.residency_s)
    )
