"""Runs the boxes: feeds observations to each box's state machine and carries out its orders.

core/box.py is pure and never blocks. One loop per box runs about once a second, and immediately when an
order has completed. Only the owner of a box advances its state and issues orders; all other processes read
the state that the owner publishes, at most a second later. While the store is unreachable, ownership is
uncertain, so nothing is swapped: the resident model continues to serve.

Demand for a model is counted in two places: in the waiting lines of all processes, which exchange notes, and
in the job store, which all processes read. The line is read before the store, so that a job on its way from
the store to the line is briefly missed rather than counted twice.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

import anyio
from anyio.abc import TaskGroup

from gateway.core import health, versions
from gateway.core.backends import Backend
from gateway.core.box import (
    COMMAND_TRIES,
    INSPECT_S,
    Box,
    BoxRules,
    Event,
    Inspected,
    Observation,
    Order,
    OwnershipTaken,
    State,
    Task,
    TaskEnded,
    advance,
    back_at,
    comes_at,
    is_out,
    is_outdated,
    left_alone,
    objection,
    outlook,
    unowned,
)
from gateway.core.box_demand import class_of, servers, stored_wants
from gateway.core.box_report import Hearing, note, read, read_note, written
from gateway.core.box_swaps import Swap, SwapTracker
from gateway.core.decision import Exclusion, Objection
from gateway.core.errors import StoreUnavailable
from gateway.core.jobs import Lane
from gateway.core.policy import Policy
from gateway.core.swap_policy import Backlog, Cause, Plan
from gateway.core.value import valueclass
from gateway.core.waiting import WaitingLine
from gateway.events import about
from gateway.ports import Board, BoxBoard, BoxFleet, Clock, JobStore, Ledger, Switch

log = logging.getLogger("gateway.boxes")

LOOK_S = 1.0
"""Interval between two rounds of a box in which nothing happens. A choice: short compared with a swap."""

LEAVE_S = 1.0
"""How long a process that ends may take to give up its boxes; otherwise its ownership expires. A choice: it
is one command."""

READY_S = 30.0
"""How long a model that has passed its canary may remain unknown to the health checks of this process. A
choice: many probes. After that, a model that does not answer is considered lost."""

STORE_LOST_S = 15.0
"""How long the store may be unreachable before swaps are suspended: every ownership has expired by then
(`store.boards.BOX_TTL_S`)."""

SETTLE_S = 3.0
"""Time for the owner to see the slots that processes acquired before they knew that a box is draining: one
round (`LOOK_S`), for what one knew that had called it off meanwhile, one refresh of the ledger's snapshot
(`store.redis.REFRESH_S`), and a command each."""

JOBS_SETTLE_S = 1.0
"""Time for a newly claimed job to enter the waiting line and be counted there. A choice: generous."""

_AT_WORK = frozenset({State.DRAINING, State.STOPPING, State.BOOTING, State.CHECKING})
_LOST = frozenset({health.State.BOOTING, health.State.DOWN})


@valueclass(frozen=True, slots=True)
class BoxSnapshot:
    """The state of a box for operators.

    Attributes:
        box: Its state.
        plan: Its next action.
        wants: Demand for each of its backends, in the waiting lines of all gateways.
        stored: Demand for each of its backends in the job store.
        is_owner: Whether this process owns the box.
        fence: The fencing token of that ownership; 0 if there is none.
        waits_for: While it drains, a command has failed or the store is away, what keeps it from going on, as
            far as this process knows.
        at: When this was taken, monotonic seconds.
    """

    box: Box
    plan: Plan
    wants: Mapping[str, Backlog]
    stored: Mapping[str, Backlog]
    is_owner: bool
    fence: int
    waits_for: str
    at: float


@dataclass(slots=True)
class _Kept:
    """One box, and this process's knowledge of it. Mutable: it lives as long as the process."""

    name: str
    rules: BoxRules
    backends: Mapping[str, Backend]
    boot_s: Mapping[str, float]
    box: Box
    fence: int = 0
    has_heard: bool = False  # the board has replied at least once
    has_watched: bool = False  # since this process is there, it or another one has owned the box
    heard_at: float = 0.0  # when it last did, monotonic seconds
    is_unheard: bool = False  # it did not reply to the latest question
    told: str = ""  # the state on the board as last read
    told_box: Box | None = None  # what it says: its ages count from when it was first read
    entered_at: float = 0.0  # when this process learned of the current state, monotonic seconds
    is_seen: bool = False  # since then, the resident model has passed a health check here
    reports: list[Event] = field(default_factory=list)
    own: Mapping[str, Backlog] = field(default_factory=dict)
    others: Mapping[str, Backlog] = field(default_factory=dict)
    lanes: Sequence[Lane] = ()
    lanes_at: float = 0.0  # monotonic seconds
    objections: Mapping[str, Objection | None] = field(default_factory=dict)
    why_out: Mapping[str, str] = field(default_factory=dict)  # of the backends that are out
    swaps: SwapTracker = field(default_factory=SwapTracker)
    hearing: Hearing = field(default_factory=Hearing)
    heard_s: float = inf  # see `Observation`, as of the last round in which this process was the owner
    at_work: anyio.Lock = field(default_factory=anyio.Lock)  # one order at a time is carried out
    wake: anyio.Event = field(default_factory=anyio.Event)


class BoxController:
    """Controls all boxes. `run` must be running while requests are served."""

    def __init__(
        self,
        rules: Mapping[str, BoxRules],
        backends: Mapping[str, Backend],
        *,
        boot_s: Mapping[str, float],
        switch: Switch,
        board: BoxBoard,
        fleet: BoxFleet,
        ledger: Ledger,
        line: WaitingLine,
        jobs: JobStore | None,
        policy: Callable[[], Policy],
        clock: Clock,
        on_change: Callable[[], None],
        on_swap: Callable[[str, Swap], None] = lambda box_id, swap: None,
    ) -> None:
        """Wire up the ports.

        Args:
            rules: Per box.
            backends: By id; at least those of the boxes.
            boot_s: Boot time per backend according to its profile.
            switch: Carries out orders.
            board: Where processes agree on the owner of a box.
            fleet: Health of the backends.
            ledger: Requests in flight.
            line: Where requests queue.
            jobs: Where jobs queue, or None without jobs.
            policy: Returns the policy that maps jobs to backends.
            clock: Source of times.
            on_change: Called when a backend becomes eligible or ineligible because of its box.
            on_swap: Called when this process has completed a swap of a box.
        """
        self._switch, self._board, self._fleet = switch, board, fleet
        self._ledger, self._line, self._clock = ledger, line, clock
        self._jobs, self._policy = jobs, policy
        self._on_change, self._on_swap = on_change, on_swap
        self._started_at = clock.now()
        self._ended = anyio.Event()
        self._ended.set()
        self._kept = {
            name: _Kept(
                name,
                one,
                {member: backends[member] for member in one.swaps.triggers},
                {member: boot_s.get(member, 0.0) for member in one.swaps.triggers},
                Box(since=clock.now()),
            )
            for name, one in rules.items()
        }
        self._home = {member: kept for kept in self._kept.values() for member in kept.backends}
        for kept in self._kept.values():
            kept.objections = {member: objection(kept.box, member) for member in kept.backends}

    # -------------------------------------------------------------- questions

    def objections(self) -> Mapping[str, Objection]:
        """Return why a backend cannot serve now because of its box; empty for all others."""
        return {
            name: objection
            for name, kept in self._home.items()
            if (objection := kept.objections[name]) is not None
        }

    @property
    def can_serve_later(self) -> bool:
        """Whether a box is swapping a model in, so that requests may wait for it."""
        return any(kept.box.state in _AT_WORK for kept in self._kept.values())

    def snapshots(self) -> Mapping[str, BoxSnapshot]:
        """Return the state of every box."""
        now = self._clock.now()
        found = {}
        for name, kept in self._kept.items():
            wants, stored = self._in_lines(kept), self._stored(kept)
            plan = _outlook(kept, _both(wants, stored), now)
            waits_for = self._waits_for(kept, plan)
            found[name] = BoxSnapshot(
                kept.box, plan, wants, stored, kept.fence > 0, kept.fence, waits_for, now
            )
        return found

    def _waits_for(self, kept: _Kept, plan: Plan) -> str:
        if kept.is_unheard and (plan.target or kept.box.state in _AT_WORK):
            return "the store, which does not answer"
        if kept.box.failure:
            return f"another try: {kept.box.failure}"
        if kept.box.state is not State.DRAINING:
            return ""
        if self._ledger.keeps_to_part:
            return "the store, which has not said again what other gateways have in flight"
        if running := self._ledger.load(kept.box.backend).seqs:
            return "1 running sequence" if running == 1 else f"{running} running sequences"
        if not kept.fence:
            return ""
        if kept.heard_s < 0:
            return "a gateway that has not said yet that it knows of the drain"
        return "what gateways may have sent before they knew of the drain"

    def away_s(self, lane: str) -> float | None:
        """Return the seconds until a backend for a lane of jobs can serve; 0 if one can serve now.

        None if all of them are swapped out and no swap is planned.
        """
        policy, now = self._policy(), self._clock.now()
        traffic_class = class_of(policy, lane)
        times = []
        for name in () if traffic_class is None else servers(policy, traffic_class):
            kept = self._home.get(name)
            if kept is None or kept.objections[name] is None:
                return 0.0
            plan = _outlook(kept, self._wants(kept), now)
            at = comes_at(kept.box, plan, name, kept.boot_s, now)
            if at is not None:
                times.append(at - now)
        return min(times, default=None)

    # -------------------------------------------------------------- the loop

    async def run(self) -> None:
        """Run all boxes until cancelled, then release their ownership."""
        self._ended = anyio.Event()
        try:
            async with anyio.create_task_group() as tasks:
                for kept in self._kept.values():
                    tasks.start_soon(self._keep, kept, tasks)
        finally:
            with anyio.move_on_after(LEAVE_S, shield=True):
                for name in self._kept:
                    await self._board.leave(name)
            self._ended.set()

    async def wait_ended(self) -> None:
        """Wait until `run` has released everything; returns at once if it is not running."""
        await self._ended.wait()

    async def _keep(self, kept: _Kept, tasks: TaskGroup) -> None:
        while True:
            kept.wake = anyio.Event()
            before = kept.box
            orders = await self._round(kept)
            for order in orders:
                tasks.start_soon(self._carry_out, kept, order)
            self._show(kept, before)
            if kept.box.state is before.state:
                with anyio.move_on_after(LOOK_S):
                    await kept.wake.wait()

    async def _round(self, kept: _Kept) -> Sequence[Order]:
        """Settle a box's ownership with the other processes, and advance its state if this one owns it."""
        now = self._clock.now()
        kept.own = self._line.wants(kept.backends)
        board = await self._board.sync(
            kept.name,
            fence=kept.fence,
            state=written(kept.box, now) if kept.fence else "",
            note=note(kept.own, kept.box, now),
        )
        await self._read_store(kept)
        kept.is_unheard = board is None
        if board is None:
            await self._go_on_alone(kept)
            return ()
        events = self._settle(kept, board)
        return self._advance(kept, events) if kept.fence else ()

    async def _go_on_alone(self, kept: _Kept) -> None:
        """Use what this process knows of a box while the store does not answer. No model is swapped."""
        now = self._clock.now()
        kept.hearing.forget()
        if kept.box.state is State.UNKNOWN and not kept.has_heard:
            found = [name for name in self._ready(kept) if await self._switch.is_resident(name)]
            kept.box = unowned(frozenset(found), now) or kept.box
        elif now - kept.heard_at > STORE_LOST_S:
            kept.fence, kept.box = 0, left_alone(kept.box, now)

    def _settle(self, kept: _Kept, board: Board) -> Sequence[Event]:
        """Adopt the ownership and the state on a box's board. Return what has happened, for the owner."""
        now = self._clock.now()
        # An owner that has died says nothing new, though the box is its own until its lease is over.
        kept.has_watched |= kept.has_heard and board.state not in ("", kept.told)
        kept.has_heard, kept.heard_at = True, now
        notes = [read_note(text, now) for text in board.others]
        kept.others = _summed(one.wants for one in notes)
        has_gained = board.fence > 0 and board.fence != kept.fence
        kept.fence = board.fence
        if board.state and (has_gained or not kept.fence):
            _adopt(kept, board.state, now)
        if has_gained or not kept.fence:  # it may have been another's since the last round
            kept.hearing.forget()
        if not kept.fence:
            return ()
        events, kept.reports = kept.reports, []
        if has_gained:
            kept.box = replace(kept.box, fence=kept.fence)
            log.info(
                "box %s: this gateway now switches its models (fence %d)",
                kept.name,
                kept.fence,
                extra=about("box_owned", box=kept.name, fence=kept.fence),
            )
            events = [OwnershipTaken(self._started_at, is_first=not kept.has_watched and not board.others)]
        kept.heard_s = kept.hearing.heard_s(kept.box, notes, now)
        return events

    def _advance(self, kept: _Kept, events: Sequence[Event]) -> Sequence[Order]:
        """Advance the state of a box by events and an observation. Return the orders that follow."""
        orders = [order for event in events for order in self._step(kept, event)]
        # What is seen depends on the state that the events have led to.
        return [*orders, *self._step(kept, self._look(kept))]

    def _step(self, kept: _Kept, event: Event) -> Sequence[Order]:
        kept.box, order = advance(kept.box, event, self._clock.now(), kept.rules)
        if swap := kept.swaps.observe(kept.box):
            self._on_swap(kept.name, swap)
        return () if order is None else (order,)

    def _look(self, kept: _Kept) -> Observation:
        statuses = self._fleet.statuses()
        mine = {name: statuses[name] for name in kept.backends}
        known = {name: status for name, status in mine.items() if status.served_models}
        ready = self._ready(kept)
        # A model that died before this process saw it up still seems to be booting. After READY_S it is lost.
        is_long_in = self._clock.now() - kept.box.resident_since > READY_S
        return Observation(
            in_flight={name: self._ledger.load(name).seqs for name in mine},
            wants=self._wants(kept),
            ready=ready,
            lost=frozenset(
                name
                for name, one in mine.items()
                if one.state in _LOST and (one.since > kept.box.resident_since or is_long_in)
            ),
            restarts={name: one.restarts for name, one in mine.items()},
            misfits={
                name: wrong
                for name, one in known.items()
                if (wrong := versions.misfit(kept.backends[name].versions, one.version))
            },
            unready={
                name: cause.removeprefix("probe: ")
                for name, one in mine.items()
                if name not in ready and (cause := one.model_error or one.last_error)
            },
            heard_s=-inf if self._ledger.keeps_to_part else kept.heard_s,
        )

    def _ready(self, kept: _Kept) -> frozenset[str]:
        """Return the backends of a box that are up and whose served models are known."""
        statuses = self._fleet.statuses()
        return frozenset(name for name in kept.backends if _is_ready(statuses[name]))

    async def _read_store(self, kept: _Kept) -> None:
        if self._jobs is None:
            return
        try:
            kept.lanes = (await self._jobs.queue()).open_lanes
            kept.lanes_at = self._clock.now()
        except StoreUnavailable:
            if self._clock.now() - kept.lanes_at > STORE_LOST_S:
                kept.lanes = ()  # the jobs are unreachable, so they do not justify a swap

    def _wants(self, kept: _Kept) -> Mapping[str, Backlog]:
        """Return the demand for each backend of a box, over all processes, as of the last round."""
        return _both(self._in_lines(kept), self._stored(kept))

    def _in_lines(self, kept: _Kept) -> Mapping[str, Backlog]:
        return {
            name: kept.own.get(name, Backlog()) + kept.others.get(name, Backlog()) for name in kept.backends
        }

    def _stored(self, kept: _Kept) -> Mapping[str, Backlog]:
        return stored_wants(kept.lanes, self._policy(), kept.box, kept.backends, kept.lanes_at)

    # -------------------------------------------------------------- orders

    async def _carry_out(self, kept: _Kept, order: Order) -> None:
        """Carry out an order, once the one before has ended.

        A start that hangs beyond the boot's budget may succeed yet, beside the model that is started instead.
        """
        fence = kept.fence
        async with kept.at_work:
            if fence == kept.fence:  # otherwise another owner has issued the order again
                await self._carry_out_now(kept, order, fence)

    async def _carry_out_now(self, kept: _Kept, order: Order, fence: int) -> None:
        name = order.backend
        log.debug(
            "box %s: %s %s",
            kept.name,
            order.task.value,
            name or "it",
            extra=about("box_order", box=kept.name, task=order.task.value, backend=name or None),
        )
        match order.task:
            case Task.INSPECT:
                found = [member for member in kept.backends if await self._switch.is_resident(member)]
                report: Event = Inspected(order.number, frozenset(found))
            case Task.STOP | Task.START:
                command = self._switch.stop if order.task is Task.STOP else self._switch.start
                report = TaskEnded(order.number, await command(name, fence))
                if report.failure:
                    self._warn(kept, order, report.failure)
            case Task.CHECK:
                report = TaskEnded(order.number, await self._switch.ask(name))
                if not report.failure:  # queued requests must find the model known to the health checks
                    with anyio.move_on_after(READY_S):
                        await self._fleet.wait_for(lambda statuses: _is_ready(statuses[name]))
        if fence == kept.fence:  # otherwise another owner has issued the order again
            kept.reports.append(report)
        kept.wake.set()

    def _warn(self, kept: _Kept, order: Order, failure: str) -> None:
        """Log that a command has failed. After the last try, the new state is logged, too."""
        task, tries = order.task.value, kept.box.tries
        which = f"try {tries} of {COMMAND_TRIES}"
        if kept.box.state is State.FAILED:
            which = f"the box has failed: again in {INSPECT_S:g} s"
        log.warning(
            "box %s: cannot %s %s (%s): %s",
            kept.name,
            task,
            order.backend,
            which,
            failure,
            extra=about(
                "box_order_failed",
                box=kept.name,
                task=task,
                backend=order.backend,
                try_number=tries,
                reason=failure,
            ),
        )

    # -------------------------------------------------------------- publishing the state

    def _show(self, kept: _Kept, before: Box) -> None:
        """Publish a box's new state to health checks, waiting line and log."""
        box, now = kept.box, self._clock.now()
        if (box.state, box.backend) != (before.state, before.backend):
            kept.entered_at, kept.is_seen = now, False
        if box.state is not before.state:
            self._log(kept, box)
        out = frozenset(name for name in kept.backends if is_out(box, name))
        why_out = {name: _why_out(kept.name, box, name) for name in out}
        for name, reason in why_out.items():
            if kept.why_out.get(name) != reason:
                self._fleet.put_out(name, reason)
        # The owner may have a different configuration, with a backend unknown to this process.
        is_new_boot = (
            box.state is State.BOOTING and before.state is not State.BOOTING and box.backend in kept.backends
        )
        awaited = {*(kept.why_out.keys() - out), *([box.backend] if is_new_boot else [])}
        for name in awaited:
            self._fleet.await_boot(name, f"box {kept.name}: {box.reason}")
        kept.why_out = why_out
        objections = {name: objection(box, name) or self._unseen(kept, name) for name in kept.backends}
        is_news = {name for name, one in objections.items() if one is None} != {
            name for name, one in kept.objections.items() if one is None
        }
        kept.objections = objections
        self._line.expect(
            {
                name: back_at(home.box, name, home.boot_s, now)
                for name, home in self._home.items()
                for where in [home.objections[name]]
                if where is not None and where[0] is Exclusion.SWAPPED_OUT
            }
        )
        if is_news or box.state is not before.state:
            self._on_change()

    def _unseen(self, kept: _Kept, name: str) -> Objection | None:
        """Return an objection while the resident model has passed no health check of this process."""
        is_late = self._clock.now() - kept.entered_at >= READY_S
        kept.is_seen = kept.is_seen or is_late or _is_ready(self._fleet.statuses()[name])
        if kept.is_seen:
            return None
        return Exclusion.SWAPPED_OUT, "its model is in, but has not answered this gateway yet"

    def _log(self, kept: _Kept, box: Box) -> None:
        level = logging.INFO
        if box.state is State.FAILED:
            level = logging.ERROR
        elif box.backend in box.quarantine:
            level = logging.WARNING
        what = f"{box.backend} -> {box.target}" if box.target else box.backend
        log.log(
            level,
            "box %s: %s %s (%s)",
            kept.name,
            box.state.value,
            what,
            box.reason,
            extra=about(
                "box_state",
                box=kept.name,
                state=box.state.value,
                backend=box.backend or None,
                target=box.target or None,
                cause=None if box.cause is Cause.NOTHING else box.cause.value,
                reason=box.reason,
            ),
        )


def _adopt(kept: _Kept, state: str, now: float) -> None:
    """Adopt the state on a box's board, unless this process knows a newer one.

    While another process owns the box, only one of the same ownership is known to be newer: a store that has
    lost its data may number ownerships anew.
    """
    if state != kept.told:  # an owner that has died says nothing new
        kept.told, kept.told_box = state, read(state, now)
    told = kept.told_box
    if told is not None:
        is_comparable = kept.fence > 0 or told.fence == kept.box.fence
        if not (is_comparable and is_outdated(told, kept.box)):
            kept.box = told
    kept.swaps.observe(kept.box)  # a swap is counted by the owner that completes it


def _is_ready(status: health.BackendStatus) -> bool:
    is_there = status.down_since is None and status.state not in _LOST and not status.is_asleep
    return is_there and bool(status.served_models)


def _outlook(kept: _Kept, wants: Mapping[str, Backlog], now: float) -> Plan:
    """Return a box's next action. Nobody knows when a swap begins while the store is away."""
    plan = outlook(kept.rules, kept.box, wants, now)
    return replace(plan, at=None) if kept.is_unheard else plan


def _both(wants: Mapping[str, Backlog], more: Mapping[str, Backlog]) -> Mapping[str, Backlog]:
    return {name: one + more[name] for name, one in wants.items()}


def _summed(notes: Iterable[Mapping[str, Backlog]]) -> Mapping[str, Backlog]:
    total: dict[str, Backlog] = {}
    for one in notes:
        for name, wants in one.items():
            total[name] = total.get(name, Backlog()) + wants
    return total


def _why_out(name: str, box: Box, backend: str) -> str:
    """Return why a backend of the box is out, for people."""
    if backend in box.quarantine:
        return f"in quarantine: {box.quarantine[backend].reason}"
    return f"the box {name} is for another model now"
