"""One machine on which several models take turns, as a state machine: events in, orders out. Pure.

    state      what happens                                leads to
    ---------  ------------------------------------------  -----------------------------------------
    unknown    INSPECT finds one model in                  checking
               finds none                                  stopping all, then booting the default
               finds several                               stopping all but one, then checking that
    resident   the policy wants another model              draining
               lost: INSPECT finds it in again             checking
               lost: INSPECT finds another model in        checking that
               lost: INSPECT finds none, for the first     stopping all, then booting it
               restarted, for the first time               checking
               gone or restarted, again within a day       quarantine
    draining   nothing of it in flight, and all know it    stopping all but the target
               the swap is cancelled                       resident
    stopping   stopped                                     booting the target, or checking it if it is in
               failed three times                          failed
    booting    started and answers                         checking
               the command failed three times, or the
               budget is exceeded                          quarantine
    checking   the canary's answer is right                resident
               the answer or the version is wrong          quarantine
    failed     periodic INSPECT: a model is in again       checking
               none is, and all that were to be stopped
               have been at last                           booting the default

*Quarantine*: the backend is not started again. The box drains and stops it and boots the default, or another
one that is not in quarantine; if there is none, it is failed. A failed boot is never repeated: it takes
minutes, and would fail in the same way. Only a person lifts a quarantine: by restarting the gateway after
removing the cause or, on a failed box, by starting the model, which is trusted once it passes its canary.

Orders (`Order`) are carried out elsewhere, and reported with `TaskEnded` or `Inspected` under the order's
number: the report of an order that is no longer the latest is ignored. All orders are idempotent, because
another process may take the box over in the middle of one.

Times are arguments, monotonic seconds.
"""

from collections.abc import Callable, Mapping
from dataclasses import field, replace
from enum import StrEnum
from math import inf

from gateway.core.decision import Exclusion, Objection
from gateway.core.swap_policy import (
    MOVED_S,
    Backlog,
    Cause,
    Plan,
    Residency,
    SwapRules,
    due_since,
    plan,
    should_cancel,
)
from gateway.core.value import valueclass

COMMAND_TRIES = 3
"""Attempts at a command to stop or start. A choice: this is not a boot, so a failure costs seconds."""

COMMAND_PAUSES_S = (5.0, 30.0)
"""Pauses between these attempts. A guess: long enough for a network to recover."""

INSPECT_S = 30.0
"""Interval between inspections of a failed box. A choice: a model that an operator has started is found
soon."""

RESTARTS_MAX = 1
"""Unexpected restarts that are tolerated. A choice: a backend may have come back by luck."""

RESTARTS_KEPT_S = 86_400.0
"""How long a restart counts. A choice: a day."""


class State(StrEnum):
    """What a box is doing. A closed set: used as a metric label."""

    UNKNOWN = "unknown"  # not inspected yet
    RESIDENT = "resident"  # a model is in and serves
    DRAINING = "draining"  # the model finishes its requests and gets no new ones
    STOPPING = "stopping"
    BOOTING = "booting"
    CHECKING = "checking"  # the model is up, and is sent its canary
    FAILED = "failed"  # nothing serves, and a person is needed


class Task(StrEnum):
    """The kind of an order."""

    INSPECT = "inspect"  # find out which models are in
    STOP = "stop"
    START = "start"
    CHECK = "check"  # send the canary request


@valueclass(frozen=True, slots=True)
class Order:
    """A command to carry out. Its report repeats `number`; `backend` is "" for INSPECT."""

    task: Task
    backend: str
    number: int


@valueclass(frozen=True, slots=True)
class BoxRules:
    """Rules for one box.

    The default of `boot_budget_s` is a choice: nearly twice the published boot of 306 s (docs/boxes.md).

    Attributes:
        swaps: When to swap.
        boot_budget_s: Maximum time from the order to start a model to its first answer.
        settle_s: How long a drain goes on once all processes know of it, so that what they have sent is seen.
    """

    swaps: SwapRules
    boot_budget_s: float = 600.0
    settle_s: float = 0.0


@valueclass(frozen=True, slots=True)
class Quarantine:
    """Why a backend is not started any more.

    Attributes:
        reason: In words.
        at: Since when.
        gone: Whether it has been seen out since then: if it is in again, a person has started it.
    """

    reason: str
    at: float = 0.0
    gone: bool = False


@valueclass(frozen=True, slots=True)
class Box:
    """The state of a box.

    Attributes:
        state: See `State`.
        since: When it entered that state.
        reason: Why, for operators.
        backend: Whose model is in, going out, or coming in; "" for none.
        target: While draining and stopping, whose model comes in next.
        cause: Why it is swapping.
        pending: While stopping, backends to stop after `backend`; while failed, those being stopped.
        number: Of the latest order or new state: rises with each.
        fence: The number of the ownership under which that was; 0 if unknown.
        is_started: While booting, whether the start command has succeeded; while stopping, whether the
            target is in already.
        tries: Attempts at the present command.
        failure: Why the last of them failed; "" if none has.
        retry_at: When to retry it, or to inspect a failed box; None while an order is in progress.
        resident_since: When the resident model came in.
        batch_at: Requests queued for it before this time are served before the next swap.
        busy_at: When it last had requests running or waiting.
        served_at: When it last had requests running.
        moved_at: When its batch was last empty, or seen to have started its oldest request.
        oldest_at: When the oldest request of its batch began to wait; `batch_at` if it is empty.
        due_at: When a swap was first due since it came in, though put off; None if none was.
        quarantine: Backends that are not started any more.
        restarts: Times of unexpected restarts, per backend.
        known_restarts: Restarts of `backend`, by its id, that have been judged or were caused by the box.
        is_timed: While booting, whether this process has ordered the first start, and so knows its time.
        boot_s: Duration of the latest boot that one process has seen from start to end, per backend.
        swaps: Number of successful boots.
    """

    state: State = State.UNKNOWN
    since: float = 0.0
    reason: str = ""
    backend: str = ""
    target: str = ""
    cause: Cause = Cause.NOTHING
    pending: tuple[str, ...] = ()
    number: int = 0
    fence: int = 0
    is_started: bool = False
    tries: int = 0
    failure: str = ""
    retry_at: float | None = None
    resident_since: float = 0.0
    batch_at: float = 0.0
    busy_at: float = 0.0
    served_at: float = 0.0
    moved_at: float = 0.0
    oldest_at: float = 0.0
    due_at: float | None = None
    quarantine: Mapping[str, Quarantine] = field(default_factory=dict)
    restarts: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    known_restarts: Mapping[str, int] = field(default_factory=dict)
    is_timed: bool = False
    boot_s: Mapping[str, float] = field(default_factory=dict)
    swaps: int = 0


# ------------------------------------------------------------------ events


@valueclass(frozen=True, slots=True)
class Observation:
    """An observation of the world. Occurs about once a second, and after every change.

    Attributes:
        in_flight: Sequences per backend.
        wants: Demand per backend.
        ready: Backends that are up and whose served models are known.
        lost: Backends with a closed port, or that have not responded for long.
        restarts: Number of restarts noticed per backend.
        misfits: Per backend, what is wrong with its engine's version.
        unready: Per backend that is not ready, what keeps it from that, as far as its probes have shown.
        heard_s: For how long all other processes have known the state of the box; negative if they do not, or
            if what they have in flight is unknown.
    """

    in_flight: Mapping[str, int] = field(default_factory=dict)
    wants: Mapping[str, Backlog] = field(default_factory=dict)
    ready: frozenset[str] = frozenset()
    lost: frozenset[str] = frozenset()
    restarts: Mapping[str, int] = field(default_factory=dict)
    misfits: Mapping[str, str] = field(default_factory=dict)
    unready: Mapping[str, str] = field(default_factory=dict)
    heard_s: float = inf


@valueclass(frozen=True, slots=True)
class OwnershipTaken:
    """This process has become the owner: any order in progress is issued again.

    Quarantines from before it started (`started_at`, monotonic seconds) are lifted, because a person has
    restarted the gateway since. If it is the first owner among all current processes (`is_first`), nobody has
    watched the box in the meantime: a model that was in, drained or not, is inspected and checked again, and
    before a boot begins or is repeated, it is made sure that nobody has started another model, because there
    is memory for one. A boot that is repeated has all of its budget, because the machine may have been off.
    """

    started_at: float = float("-inf")
    is_first: bool = False


@valueclass(frozen=True, slots=True)
class Inspected:
    """INSPECT has ended: the models that are in."""

    number: int
    backends: frozenset[str]


@valueclass(frozen=True, slots=True)
class TaskEnded:
    """STOP, START or CHECK has ended; `failure` says why it failed, "" if it succeeded."""

    number: int
    failure: str = ""


Event = Observation | OwnershipTaken | Inspected | TaskEnded
Step = tuple[Box, Order | None]
"""A box after an event, and the order that follows."""


# ------------------------------------------------------------------ questions


def objection(box: Box, backend: str) -> Objection | None:
    """Return why a backend of the box may not be sent requests now, or None."""
    if backend in box.quarantine:
        return Exclusion.UNHEALTHY, f"in quarantine: {box.quarantine[backend].reason}"
    if box.state is State.FAILED:
        return Exclusion.UNHEALTHY, f"its box failed: {box.reason}"
    if box.state is State.RESIDENT and box.backend == backend:
        return None
    return Exclusion.SWAPPED_OUT, _elsewhere(box, backend)


def _elsewhere(box: Box, backend: str) -> str:
    match box.state:
        case State.UNKNOWN:
            return "its box has not been checked yet"
        case State.BOOTING | State.CHECKING if box.backend == backend:
            return f"its model is {box.state.value}"
        case State.DRAINING | State.STOPPING if box.target == backend:
            return f"its model is next; {box.backend} is {box.state.value}"
        case State.DRAINING | State.STOPPING if box.backend == backend:
            return f"{box.state.value}: its box is switching to {box.target}"
    return f"its model is out; {box.backend} is {box.state.value}"


def is_out(box: Box, backend: str) -> bool:
    """Return whether the backend's server is not expected to respond, so that silence is not a failure."""
    if box.state in (State.UNKNOWN, State.FAILED):
        return False
    if box.state is State.STOPPING:
        return backend != box.target or not box.is_started
    return box.backend != backend


def back_at(box: Box, backend: str, boot_s: Mapping[str, float], now: float) -> float:
    """Return the earliest time at which a swapped-out backend can serve: a lower bound, not a promise.

    `boot_s`: boot times according to profiles; one measured here counts only if it was shorter. A longer one
    must not count, because if no request may wait that long, nothing would ever bring the model in again.
    """
    least = {name: min(took, box.boot_s.get(name, took)) for name, took in boot_s.items()}
    return _back_at(box, backend, least, now)


def _back_at(box: Box, backend: str, took: Mapping[str, float], now: float) -> float:
    own = took.get(backend, 0.0)
    match box.state:
        case State.UNKNOWN:
            return now + 1  # it may be in
        case State.RESIDENT if box.backend == backend:
            return now
        case State.CHECKING if box.backend == backend:
            return now + 1
        case State.BOOTING if box.backend == backend:
            return max(now + 1, box.since + own)
        case State.BOOTING:  # it is stopped only once it is up
            return max(now, box.since + took.get(box.backend, 0.0)) + own
        case State.DRAINING | State.STOPPING if box.target != backend:
            return now + took.get(box.target, 0.0) + own
    return now + own


def comes_at(box: Box, planned: Plan, backend: str, boot_s: Mapping[str, float], now: float) -> float | None:
    """Return the earliest time at which a swapped-out backend can serve; None if no swap to it is planned.

    `planned`: the box's outlook; `boot_s`: boot times according to profiles, overridden by measured ones.
    """
    if backend in box.quarantine:
        return None
    took = {**boot_s, **box.boot_s}
    match box.state:
        case State.RESIDENT if planned.target == backend and planned.at is not None:
            return _back_at(box, backend, took, max(now, planned.at))
        case State.DRAINING | State.STOPPING if box.target == backend:
            return _back_at(box, backend, took, now)
        case State.BOOTING | State.CHECKING if box.backend == backend:
            return _back_at(box, backend, took, now)
    return None


def outlook(rules: BoxRules, box: Box, wants: Mapping[str, Backlog], now: float) -> Plan:
    """Return the box's next action: the swap in progress, or else what the policy plans."""
    if box.state in (State.DRAINING, State.STOPPING):  # nobody knows how long an answer takes to end
        return Plan(box.cause, box.target)
    if box.state is not State.RESIDENT:
        return Plan()
    return plan(rules.swaps, _residency(box, wants), now)


def _residency(box: Box, wants: Mapping[str, Backlog]) -> Residency:
    return Residency(
        box.backend,
        box.resident_since,
        box.batch_at,
        box.busy_at,
        wants,
        frozenset(box.quarantine),
        box.served_at,
        box.moved_at,
        box.due_at,
    )


def unowned(found: frozenset[str], now: float) -> Box | None:
    """Return the box for a process that has never heard of an owner, because the store is unreachable.

    It uses the single model that is in, and does not swap. None if that is not clear.
    """
    if len(found) != 1:
        return None
    (name,) = found
    box = Box(State.RESIDENT, now, "found running; the store is unavailable", name)
    return _begun(replace(box, resident_since=now, busy_at=now), now)


def is_outdated(told: Box, known: Box) -> bool:
    """Return whether a state that the store has is older than the one that a process knows.

    So it is after a restart from an old snapshot, or a failover to a lagging replica. Numbers of ownerships
    rise, and so do those of an owner's orders and states.
    """
    return told.fence > 0 and (told.fence, told.number) < (known.fence, known.number)


def left_alone(box: Box, now: float) -> Box:
    """Return the box for a process that has long not heard from its owner, because the store is away.

    Then no process continues a swap: a model that is still in serves; a swap beyond that point is suspended.
    """
    if box.state is not State.DRAINING or box.backend in box.quarantine:
        return box
    box = replace(box, target="", cause=Cause.NOTHING)
    left = _enter(box, State.RESIDENT, now, "the store is unavailable")
    return replace(left, number=box.number)  # what its owner says next is no older


# ------------------------------------------------------------------ transitions


def advance(box: Box, event: Event, now: float, rules: BoxRules) -> Step:
    """Return the box after `event`, which happened at `now`, and the order that follows."""
    match event:
        case Observation():
            return _observed(box, event, now, rules)
        case OwnershipTaken():
            return _taken_over(box, event, now, rules)
        case Inspected(number, found) if number == box.number and box.state in _INSPECTING:
            return _inspected(box, found, now, rules)
        case TaskEnded(number, failure) if number == box.number:
            return _task_ended(box, failure, now, rules)
    return box, None


_INSPECTING = frozenset({State.UNKNOWN, State.BOOTING, State.FAILED})
"""In another state, what was found is of no use any more: a boot's budget was over before it was known."""


def _enter(box: Box, state: State, now: float, reason: str) -> Box:
    number = box.number + 1
    return replace(
        box, state=state, since=now, reason=reason, number=number, tries=0, failure="", retry_at=None
    )


def _order(box: Box, task: Task, backend: str = "") -> Step:
    box = replace(box, number=box.number + 1, tries=box.tries + 1, retry_at=None)
    return box, Order(task, backend, box.number)


def _taken_over(box: Box, event: OwnershipTaken, now: float, rules: BoxRules) -> Step:
    started_at = event.started_at
    kept = {name: held for name, held in box.quarantine.items() if held.at >= started_at}
    is_lifted = box.backend in box.quarantine and box.backend not in kept
    # Restarts were counted by the previous owner.
    box = replace(box, tries=0, failure="", known_restarts={}, quarantine=kept)
    strangers = {box.backend, box.target, *box.pending} - {"", *rules.swaps.triggers}
    if strangers:  # left by a process with another configuration: nobody here can stop or start them
        why = f"{min(strangers)} is no longer a backend of this box"
        box = replace(box, backend="", target="", pending=(), is_started=False, cause=Cause.NOTHING)
        return _order(_enter(box, State.UNKNOWN, now, why), Task.INSPECT)
    if box.state is State.DRAINING and is_lifted:  # no requests may be sent to it before it is checked again
        why = f"{box.backend} is tried again: the gateway has been restarted"
        return _order(_enter(replace(box, target=""), State.UNKNOWN, now, why), Task.INSPECT)
    match box.state:
        case State.STOPPING if event.is_first and not box.is_started:
            # Somebody may have started one that had been stopped already.
            settled = (box.backend, box.target, *box.pending)
            again = tuple(name for name in rules.swaps.triggers if name not in settled)
            return _order(replace(box, pending=(*box.pending, *again)), Task.STOP, box.backend)
        case State.RESIDENT | State.DRAINING | State.CHECKING | State.STOPPING if event.is_first:
            why = f"{box.target if box.is_started else box.backend} was in when the last gateway left"
            box = replace(box, backend="", target="", pending=(), is_started=False, cause=Cause.NOTHING)
            return _order(_enter(box, State.UNKNOWN, now, why), Task.INSPECT)
        case State.FAILED if box.since < started_at:
            return _order(_enter(replace(box, pending=()), State.UNKNOWN, now, box.reason), Task.INSPECT)
        case State.UNKNOWN:
            return _order(box, Task.INSPECT)
        case State.STOPPING:
            return _order(box, Task.STOP, box.backend)
        case State.BOOTING if event.is_first:  # if the machine was off, too, it begins with nothing
            return _order(replace(box, is_started=False, since=now), Task.INSPECT)
        case State.BOOTING:
            return _order(replace(box, is_started=False), Task.START, box.backend)
        case State.CHECKING:
            return _order(box, Task.CHECK, box.backend)
        case State.FAILED:
            return replace(box, pending=(), retry_at=now), None
    return box, None


# ---- transitions by observations


def _observed(box: Box, look: Observation, now: float, rules: BoxRules) -> Step:
    box, has_restarted = _judged(box, look)
    if box.state in (State.CHECKING, State.RESIDENT) and look.misfits.get(box.backend):
        return _quarantined(box, look.misfits[box.backend], now, rules)
    match box.state:
        case State.RESIDENT if has_restarted:
            return _restarted(box, f"{box.backend} restarted by itself", now, rules, is_in=True)
        case State.RESIDENT:
            return _resident(box, look, now, rules)
        case State.DRAINING:
            return _draining(box, look, now, rules)
        case State.STOPPING if _is_time(box, now):
            return _order(box, Task.STOP, box.backend)
        case State.BOOTING:
            return _booting(box, look, now, rules)
        case State.FAILED if _is_time(box, now):
            return _order(box, Task.INSPECT)
    return box, None


def _judged(box: Box, look: Observation) -> tuple[Box, bool]:
    """Update the restart count of the resident backend. Also return whether a restart must be judged.

    Restarts while the box boots a model are its own. One that is noticed while the backend is lost, drained
    or checked is judged once it is resident again.
    """
    name = box.backend
    count, known = look.restarts.get(name, 0), box.known_restarts.get(name)
    has_restarted = known is not None and count > known and box.state is not State.BOOTING
    if has_restarted and (box.state is not State.RESIDENT or name in look.lost):
        return box, False
    return replace(box, known_restarts={name: count}), has_restarted


def _is_time(box: Box, now: float) -> bool:
    return box.retry_at is not None and box.retry_at <= now


def _resident(box: Box, look: Observation, now: float, rules: BoxRules) -> Step:
    name = box.backend
    if name in look.lost:
        why = f"{name} is gone, but this gateway did not stop it"
        return _order(_enter(box, State.UNKNOWN, now, why), Task.INSPECT)
    if look.in_flight.get(name) or look.wants.get(name, Backlog()).count:
        box = replace(box, busy_at=now)
    box = _noticed(box, look, now, rules)
    planned = plan(rules.swaps, _residency(box, look.wants), now)
    if not planned.is_due(now):
        return box, None
    reason = _why(planned, look.wants, now)
    return _enter(replace(box, target=planned.target, cause=planned.cause), State.DRAINING, now, reason), None


def _why(planned: Plan, wants: Mapping[str, Backlog], now: float) -> str:
    wanted = wants.get(planned.target, Backlog())
    match planned.cause:
        case Cause.JOBS:
            what = "a request waits" if wanted.count == 1 else f"{wanted.count} requests wait"
            return f"{what} for {planned.target}"
        case Cause.AGE:
            return f"a request has waited {now - (wanted.oldest_at or now):.0f} s for {planned.target}"
    return f"back to {planned.target}: nothing waits for the resident model"


def _begun(box: Box, now: float) -> Box:
    """Return the box with everything that waits for the resident model as its batch."""
    return replace(box, batch_at=now, moved_at=now, oldest_at=now)


def _noticed(box: Box, look: Observation, now: float, rules: BoxRules) -> Box:
    """Return the box knowing whether anything runs, a swap is due, and whether its batch has moved."""
    box = replace(box, due_at=due_since(rules.swaps, _residency(box, look.wants), now))
    oldest_at = look.wants.get(box.backend, Backlog()).oldest_at
    if oldest_at is None or oldest_at > box.batch_at:
        box = replace(box, moved_at=now, oldest_at=box.batch_at)
    elif oldest_at > box.oldest_at + MOVED_S:
        box = replace(box, moved_at=now, oldest_at=oldest_at)
    elif oldest_at < box.oldest_at:  # one has come back
        box = replace(box, oldest_at=oldest_at)
    return replace(box, served_at=now) if look.in_flight.get(box.backend) else box


def _draining(box: Box, look: Observation, now: float, rules: BoxRules) -> Step:
    name, box = box.backend, _noticed(box, look, now, rules)
    is_sound = name not in look.lost and name not in box.quarantine
    under_way = Plan(box.cause, box.target, box.since)
    if is_sound and should_cancel(rules.swaps, _residency(box, look.wants), under_way, now):
        why = f"swap to {box.target} called off for now"
        box = _begun(replace(box, target="", cause=Cause.NOTHING), now)
        return _enter(box, State.RESIDENT, now, why), None
    is_empty = not look.in_flight.get(name) or name in look.lost
    if not is_empty or look.heard_s < rules.settle_s:
        return box, None
    # Of three models, somebody may have started the third meanwhile: nobody looks at one that is out.
    others = tuple(other for other in rules.swaps.triggers if other not in (name, box.target))
    return _stop(box, (name, *others), box.target, now, box.reason)


def _booting(box: Box, look: Observation, now: float, rules: BoxRules) -> Step:
    if box.is_started and box.backend in look.ready:
        box = replace(box, swaps=box.swaps + 1)
        if not box.is_timed:  # nobody may have been there for most of it
            return _check(box, now, "answers")
        box = replace(box, boot_s={**box.boot_s, box.backend: now - box.since})
        return _check(box, now, f"answers, after {now - box.since:.0f} s")
    if now - box.since >= rules.boot_budget_s:
        return _quarantined(box, _why_not_ready(box, look, rules), now, rules)
    if _is_time(box, now):
        return _order(box, Task.START, box.backend)
    return box, None


def _why_not_ready(box: Box, look: Observation, rules: BoxRules) -> str:
    """Return why a boot has taken longer than its budget, as far as that is known."""
    budget, cause = f"{rules.boot_budget_s:.0f} s", look.unready.get(box.backend)
    if box.is_started and cause:
        return f"not ready {budget} after its start: {cause}"
    if box.is_started:
        return f"no answer {budget} after its start"
    if box.failure:
        return f"not started within {budget}: {box.failure}"
    return f"its start has not ended {budget} after it was ordered"


# ---- transitions by reports


def _inspected(box: Box, found: frozenset[str], now: float, rules: BoxRules) -> Step:
    gone = {name: replace(held, gone=held.gone or name not in found) for name, held in box.quarantine.items()}
    box = replace(box, quarantine=gone)
    members = tuple(rules.swaps.triggers)
    # A model in quarantine counts only if a person has started it since.
    usable = [name for name in members if name in found and (name not in gone or gone[name].gone)]
    if box.state is State.FAILED:
        if usable:
            return _check(replace(box, backend=usable[0]), now, "found running")
        if _fallback(box, rules):  # so one could not be stopped; the whole machine may have been away
            return _order(replace(box, pending=members, tries=0), Task.STOP, members[0])
        return replace(box, retry_at=now + INSPECT_S), None
    if box.state is State.BOOTING:
        if found <= {box.backend}:
            return _order(replace(box, tries=0), Task.START, box.backend)
        box = replace(box, backend="")  # somebody has started another one
    was = box.backend
    if not usable and was:  # it was in, and is lost
        return _restarted(box, box.reason, now, rules, is_in=False)
    if not usable:
        home = _fallback(box, rules)
        if not home:
            return _failed(box, "every model of the box is in quarantine", now)
        return _afresh(box, home, now, "found no model running", rules)
    kept = next((name for name in (was, rules.swaps.default) if name in usable), usable[0])
    others = tuple(name for name in members if name in found and name != kept)
    if others:
        box, order = _stop(box, others, kept, now, f"found {len(found)} models running")
        return replace(box, is_started=True), order
    return _check(replace(box, backend=kept), now, "found running")


def _task_ended(box: Box, failure: str, now: float, rules: BoxRules) -> Step:
    match box.state:
        case State.STOPPING if failure:
            return _again(
                box, failure, now, lambda: _failed(box, f"cannot stop {box.backend}: {failure}", now)
            )
        case State.STOPPING:
            return _stopped(box, now)
        case State.BOOTING if failure:
            return _again(
                box, failure, now, lambda: _quarantined(box, f"cannot be started: {failure}", now, rules)
            )
        case State.BOOTING:
            return replace(box, is_started=True, reason="started", failure=""), None
        case State.CHECKING if failure:
            return _quarantined(box, f"canary failed: {failure}", now, rules)
        case State.CHECKING:
            trusted = {name: held for name, held in box.quarantine.items() if name != box.backend}
            box = replace(box, quarantine=trusted, resident_since=now, busy_at=now, due_at=None)
            return _enter(_begun(box, now), State.RESIDENT, now, "answers correctly"), None
        case State.FAILED if box.pending:
            return _stopped_at_last(box, failure, now, rules)
    return box, None


def _again(box: Box, failure: str, now: float, give_up: Callable[[], Step]) -> Step:
    if box.tries >= COMMAND_TRIES:
        return give_up()
    return replace(box, failure=failure, retry_at=now + COMMAND_PAUSES_S[box.tries - 1]), None


def _stopped_at_last(box: Box, failure: str, now: float, rules: BoxRules) -> Step:
    """Go on after the stop of a failed box's first pending model: with the next one, or else with a boot.

    The box counts as failed until then, because nothing serves.
    """
    name, *rest = box.pending
    if failure:
        why = f"cannot stop {name}: {failure}"
        return replace(box, reason=why, pending=(), retry_at=now + INSPECT_S), None
    box = _seen_out(box, name)
    if rest:
        return _order(replace(box, pending=tuple(rest), tries=0), Task.STOP, rest[0])
    box = replace(box, backend=_fallback(box, rules), pending=())
    return _boot(box, now, "all models of the failed box are stopped")


def _seen_out(box: Box, name: str) -> Box:
    held = box.quarantine.get(name)
    if held is None:
        return box
    return replace(box, quarantine={**box.quarantine, name: replace(held, gone=True)})


def _stopped(box: Box, now: float) -> Step:
    box = _seen_out(box, box.backend)
    if box.pending:
        return _stop(box, box.pending, box.target, now, box.reason)
    target, is_in = box.target, box.is_started
    box = replace(box, backend=target, target="", cause=Cause.NOTHING)
    return _check(box, now, "found running") if is_in else _boot(box, now, f"{box.reason}; it has to boot")


# ---- steps shared by several transitions


def _stop(box: Box, backends: tuple[str, ...], target: str, now: float, reason: str) -> Step:
    box = replace(box, backend=backends[0], pending=backends[1:], target=target)
    return _order(_enter(box, State.STOPPING, now, reason), Task.STOP, backends[0])


def _afresh(box: Box, backend: str, now: float, reason: str, rules: BoxRules) -> Step:
    """Boot a backend on a box where no model responds, and nobody knows what it was doing.

    Another model may be booting, which holds the memory but does not respond yet; and this one may still be
    stopping, so that an order to start it would find it running and do nothing. So all are stopped first.
    """
    others = tuple(name for name in rules.swaps.triggers if name != backend)
    return _stop(box, (*others, backend), backend, now, reason)


def _boot(box: Box, now: float, reason: str) -> Step:
    return _order(_enter(replace(box, is_timed=True), State.BOOTING, now, reason), Task.START, box.backend)


def _check(box: Box, now: float, reason: str) -> Step:
    box = replace(box, is_started=False)
    return _order(_enter(box, State.CHECKING, now, reason), Task.CHECK, box.backend)


def _restarted(box: Box, reason: str, now: float, rules: BoxRules, *, is_in: bool) -> Step:
    """Judge an unexpected restart: the first is tolerated after a canary, the next is not."""
    name = box.backend
    kept = (at for at in box.restarts.get(name, ()) if now - at < RESTARTS_KEPT_S)
    times = (*kept, now)
    box = replace(box, restarts={**box.restarts, name: times})
    if len(times) > RESTARTS_MAX:
        why = f"{reason}, {len(times)} times within a day"
        return _quarantined(box, why, now, rules, is_gone=not is_in)
    if is_in:
        return _check(box, now, reason)
    return _afresh(box, name, now, reason, rules)


def _quarantined(box: Box, reason: str, now: float, rules: BoxRules, *, is_gone: bool = False) -> Step:
    name = box.backend
    rest = {other: times for other, times in box.restarts.items() if other != name}
    held = Quarantine(reason, now, is_gone)
    box = replace(box, quarantine={**box.quarantine, name: held}, restarts=rest)
    home = _fallback(box, rules)
    if not home:
        return _failed(box, f"{name} is in quarantine ({reason}), and the box has no other model to run", now)
    box = replace(box, target=home, is_started=False)
    return _enter(box, State.DRAINING, now, f"{name} is in quarantine: {reason}"), None


def _fallback(box: Box, rules: BoxRules) -> str:
    """Return the backend to boot after a failure: the default, or else the first usable one; "" for none."""
    able = [name for name in rules.swaps.triggers if name not in box.quarantine]
    return rules.swaps.default if rules.swaps.default in able else next(iter(able), "")


def _failed(box: Box, reason: str, now: float) -> Step:
    box = replace(box, backend="", target="", pending=(), is_started=False, cause=Cause.NOTHING)
    return replace(_enter(box, State.FAILED, now, reason), retry_at=now + INSPECT_S), None
