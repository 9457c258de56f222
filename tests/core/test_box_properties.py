"""What must hold for a box whatever happens to it, and in whatever order."""

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.core.box import (
    COMMAND_TRIES,
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
    objection,
)
from gateway.core.box_report import read, written
from gateway.core.swap_policy import Backlog, Cause, SwapRules, Trigger

NAMES = ("gemma", "qwen", "phi")
RULES = BoxRules(SwapRules("qwen", {name: Trigger(2, 600.0) for name in NAMES}), settle_s=4.0)
SWAPPING = (State.DRAINING, State.STOPPING)

name = st.sampled_from(NAMES)
seconds = st.sampled_from([1, 5, 30, 300, 700])


class Machine(RuleBasedStateMachine):
    """A box, the machine that it stands for, and people who interfere."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 10_000.0
        self.box = Box(since=self.now)
        self.order: Order | None = None  # what is being carried out
        self.last_number = 0
        self.inside: set[str] = set()
        self.left: set[str] = set()  # of these, started by somebody, or left where the box failed
        self.trusted: set[str] = set()  # whose last canary was right, and version, as far as known
        self.restarts = dict.fromkeys(NAMES, 0)
        self.happens(OwnershipTaken(self.now, is_first=True))

    def happens(self, event: Event) -> None:
        self.box, order = advance(self.box, event, self.now, RULES)
        if self.box.state is State.FAILED:
            self.left |= self.inside
        if order is not None:
            assert order.number > self.last_number
            self.last_number, self.order = order.number, order
            if order.task is Task.START:
                assert self.inside <= self.left | {order.backend}, "there is memory for one"
                assert order.backend not in self.box.quarantine

    def look(self, after_s: float, **seen: Any) -> None:
        self.now += after_s
        lost = {self.box.backend} - {"", *self.inside}
        self.happens(
            Observation(
                ready=frozenset(self.inside), lost=frozenset(lost), restarts={**self.restarts}, **seen
            )
        )

    def report(self, failure: str) -> None:
        order, self.order = self.order, None
        assert order is not None
        if order.task is Task.INSPECT:
            self.happens(Inspected(order.number, frozenset(self.inside)))
            return
        if order.task is Task.CHECK:
            failure = failure if order.backend in self.inside else "no connection"
            (self.trusted.discard if failure else self.trusted.add)(order.backend)
        elif not failure:
            (self.inside.discard if order.task is Task.STOP else self.inside.add)(order.backend)
            self.left.discard(order.backend)
        self.happens(TaskEnded(order.number, failure))

    # -------------------------------------------------------- what happens

    @rule(after_s=seconds, wanted=st.sets(name), busy=st.booleans(), waited_s=seconds)
    def time_passes(self, after_s: float, wanted: set[str], busy: bool, waited_s: float) -> None:
        in_flight = {self.box.backend: 1} if busy and self.box.backend in self.inside else {}
        wants = {one: Backlog(2, self.now - waited_s) for one in wanted}
        self.look(after_s, wants=wants, in_flight=in_flight)

    @precondition(lambda self: self.order is not None)
    @rule()
    def an_order_is_carried_out(self) -> None:
        self.report("")

    @precondition(lambda self: self.order is not None)
    @rule()
    def an_order_fails(self) -> None:
        self.report("exit status 1")

    @precondition(lambda self: self.order is not None)
    @rule()
    def an_order_fails_each_time(self) -> None:
        state = self.box.state
        for _ in range(COMMAND_TRIES):
            if self.order is not None and self.box.state is state:
                self.report("exit status 1")
                self.look(30)

    @rule(number=st.integers(0, 50), found=st.sets(name))
    def an_earlier_order_is_reported(self, number: int, found: set[str]) -> None:
        if number < self.box.number:
            before = self.box
            self.happens(TaskEnded(number))
            self.happens(Inspected(number, frozenset(found)))
            assert self.box is before

    @rule(one=name)
    def a_version_is_wrong(self, one: str) -> None:
        if self.box.backend == one and self.box.state in (State.RESIDENT, State.CHECKING):
            self.trusted.discard(one)
        self.look(1, misfits={one: "engine 0.19"})

    @rule(one=name)
    def a_model_dies(self, one: str) -> None:
        self.inside.discard(one)

    @precondition(lambda self: self.inside)
    @rule()
    def a_model_restarts(self) -> None:
        self.restarts[min(self.inside)] += 1

    @rule(one=name)
    def somebody_starts_a_model(self, one: str) -> None:
        self.inside.add(one)
        self.left.add(one)

    @rule(is_first=st.booleans(), is_new=st.booleans())
    def another_gateway_takes_over(self, is_first: bool, is_new: bool) -> None:
        """What the last one was carrying out is over by then, and its report is lost."""
        box = read(written(self.box, self.now), self.now)
        assert box is not None
        self.box, self.order = box, None
        self.restarts = dict.fromkeys(NAMES, 0)
        self.happens(OwnershipTaken(self.now if is_new else 0.0, is_first))

    # -------------------------------------------------------- what holds

    @invariant()
    def it_knows_what_it_needs_in_its_state_and_nothing_of_the_last(self) -> None:
        box, state = self.box, self.box.state
        assert bool(box.target) is (state in SWAPPING)
        assert box.cause is Cause.NOTHING or state in SWAPPING
        assert not box.pending or state in (State.STOPPING, State.FAILED)
        assert not box.is_started or state in (State.STOPPING, State.BOOTING)
        assert (box.backend in NAMES) is (state is not State.FAILED) or state is State.UNKNOWN

    @invariant()
    def something_leads_on(self) -> None:
        box = self.box
        if box.state not in (State.RESIDENT, State.DRAINING):
            waits_for_answer = box.state is State.BOOTING and box.is_started
            assert self.order is not None or box.retry_at is not None or waits_for_answer

    @invariant()
    def only_the_one_that_is_trusted_serves(self) -> None:
        serving = {one for one in NAMES if objection(self.box, one) is None}
        assert serving == ({self.box.backend} if self.box.state is State.RESIDENT else set())
        assert serving <= self.trusted
        assert not serving & self.box.quarantine.keys()

    def teardown(self) -> None:
        """Where nothing goes wrong any more, a model serves, unless none may: then somebody starts one."""
        for is_helped in (False, True):
            if is_helped and self.box.state is State.FAILED:
                self.inside.clear()
                self.settle()
                self.somebody_starts_a_model("phi")
            self.settle()
        assert self.box.state is State.RESIDENT

    def settle(self) -> None:
        for _ in range(40):
            self.look(30)
            while self.order is not None:
                self.report("")


Machine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
TestWhateverHappensToABox = Machine.TestCase
