"""What must hold for the waiting line whatever happens, and in whatever order."""

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gateway.core import admission, selection
from gateway.core.backends import Backend, Capacity, Gates, KneeStep, Pool, Spill
from gateway.core.health import BackendStatus, State
from gateway.core.load import Demand, Load
from gateway.core.perf import PerfModel
from gateway.core.policy import Policy, TrafficClass, Waiting, WhenLate
from gateway.core.selection import BackendView
from gateway.core.waiting import Offer, Ticket, WaitingLine
from gateway.core.waiting.fairness import Shares

UP = BackendStatus(state=State.UP, served_models=("gemma",))
WINDOW = 262_144
SHORT_FIRST = Capacity(WINDOW, (KneeStep(2_000, 4), KneeStep(16_000, 2), KneeStep(None, 1)))
LONG_FIRST = Capacity(WINDOW, (KneeStep(16_000, 6), KneeStep(None, 3)))
READING = PerfModel(t_fixed=0, t_mem=0, kv_read=0, kv_span=0, t_seq=0, t_tok=1e-4, t_attn=0, sharp=1)
BACKENDS = {
    "light-0": Backend("light-0", "http://light-0", SHORT_FIRST, perf=READING),
    "light-1": Backend("light-1", "http://light-1", SHORT_FIRST, perf=READING),
    "push": Backend("push", "http://push", LONG_FIRST, perf=READING),
}
CLASSES = (
    TrafficClass("chat", ("light", "push"), waiting=Waiting(waiting_max=12, waiting_bytes_max=100)),
    TrafficClass(
        "patient",
        ("light",),
        priority=-1,
        waiting=Waiting(waiting_max=12, when_late=WhenLate.DEMOTE, demoted_wait_s=5.0, passes_max=2),
    ),
    TrafficClass(
        "other",
        ("light", "push"),
        priority=-1,
        waiting=Waiting(waiting_max=12, when_late=WhenLate.DEMOTE, demoted_wait_s=5.0),
    ),
    TrafficClass("document", ("push",), waiting=Waiting(max_wait_s=30, ttft_target_s=6, prefill_weight=1)),
)
POLICY = Policy(
    models=(),
    pools={
        "light": Pool("light", ("light-0", "light-1"), gates=Gates(long_prefills=0)),
        "push": Pool("push", ("push",), gates=Gates(long_seqs=2), spill=Spill(reserve=0.3)),
    },
    backends=BACKENDS,
)


class Line(RuleBasedStateMachine):
    """Requests come, start, are answered, end, leave and miss their places; time passes."""

    @initialize()
    def begin(self) -> None:
        self.line = WaitingLine()
        self.now = 0.0
        self.count = 0
        self.waiting: dict[str, tuple[Ticket, float]] = {}
        self.running: dict[str, tuple[str, Load]] = {}
        self.loads = dict.fromkeys(BACKENDS, Load())
        self.offers: list[Offer] = []  # made, and not answered yet
        self.offered: set[str] = set()  # who was ever made one: if the place was gone, it is let in again
        self.is_settled = True  # nothing happened since the last turn, and all it offered was taken
        self.is_quiet = True  # nothing happened since the last turn
        self.look_at: float | None = None

    def views(self) -> dict[str, BackendView]:
        return {name: BackendView(backend, self.loads[name], UP) for name, backend in BACKENDS.items()}

    @rule(
        traffic_class=st.sampled_from(CLASSES),
        prompt=st.sampled_from([100, 3_000, 20_000]),
        seqs=st.sampled_from([1, 1, 1, 2]),
        key=st.sampled_from(["a", "b", None]),
        size=st.integers(0, 40),
        patience=st.sampled_from([None, None, 0.5, 4.0]),
        is_job=st.sampled_from([False, False, True]),
        seen_by=st.sampled_from([None, None, *BACKENDS]),
    )
    def arrive(
        self,
        traffic_class: TrafficClass,
        prompt: int,
        seqs: int,
        key: str | None,
        size: int,
        patience: float | None,
        is_job: bool = False,
        seen_by: str | None = None,
    ) -> None:
        self.count += 1
        demand = Demand(seqs=seqs, prompt_tokens=prompt, total_tokens=prompt + 100, is_job=is_job)
        ticket = Ticket(
            str(self.count),
            "gemma",
            POLICY,
            traffic_class,
            demand,
            key,
            self.now,
            prefill_s=prompt / 10_000,
            size_bytes=size,
            deadline=None if patience is None else self.now + patience,
            prefix_shares={} if seen_by is None else {seen_by: 0.9},
        )
        refused = self.line.enter(ticket, self.now)
        if refused is None:
            self.waiting[ticket.id] = (ticket, self.now)
            self.is_settled = self.is_quiet = False
        else:
            assert refused.position >= 1
            assert 1 <= refused.retry_after_s <= 59

    @rule(seen_by=st.sampled_from(["light-0", "light-1"]))
    def converse(self, seen_by: str) -> None:
        self.arrive(CLASSES[0], 3_000, 1, "a", 0, None, False, seen_by)

    @precondition(lambda self: not self.offers)
    @rule()
    def turn(self) -> None:
        turn = self.line.turn(self.now, self.views())
        for refused in turn.refused:
            del self.waiting[refused.id]
            assert 1 <= refused.retry_after_s <= 59
        self.offers = list(turn.offers)
        self.offered |= {offer.ticket.id for offer in turn.offers}
        self.is_quiet = True
        self.is_settled = not self.offers
        self.look_at = turn.next_turn_at

    @precondition(lambda self: self.offers)
    @rule(misses=st.booleans())
    def take(self, misses: bool) -> None:
        """Take the place first offered, unless it is gone or its caller has left meanwhile."""
        offer = self.offers.pop(0)
        candidate = offer.candidates[0]
        if offer.ticket.id not in self.waiting:
            return
        # The ledger's own check: what the line offers is never above a limit.
        assert admission.full(self.loads[candidate.backend], candidate.claim, candidate.limits) is None
        if misses:
            self.is_quiet = False
            self.line.missed(offer.ticket.id, [candidate.backend], self.now)
            return
        self.loads[candidate.backend] += candidate.claim
        self.running[offer.ticket.id] = (candidate.backend, candidate.claim)
        self.line.started(offer.ticket.id, candidate.backend, self.now)
        del self.waiting[offer.ticket.id]
        self.is_settled = self.is_quiet and not self.offers

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.running)))
        backend, held = self.running[name]
        self.loads[backend] += held.after_first_token - held
        self.running[name] = (backend, held.after_first_token)
        self.is_settled = self.is_quiet = False

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.running)))
        backend, held = self.running.pop(name)
        self.loads[backend] -= held
        self.line.released(name, backend, self.now)
        self.is_settled = self.is_quiet = False

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.waiting)))
        self.line.leave(name)
        del self.waiting[name]
        self.is_settled = self.is_quiet = False

    @rule(seconds=st.sampled_from([0.01, 0.3, 1.3, 7.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.is_settled = self.is_quiet = False

    # ------------------------------------------------------------ what must hold

    @invariant()
    def nothing_is_above_its_limit(self) -> None:
        for name, load in self.loads.items():
            assert 0 <= load.share <= admission.WHOLE, name
            assert load.long_unanswered <= 1
        assert self.loads["push"].long_seqs <= 2

    @invariant()
    def the_line_and_its_owner_agree(self) -> None:
        offered = {offer.ticket.id for offer in self.offers}
        waiting = [ticket for ticket, _ in self.waiting.values() if ticket.id not in offered]
        assert len(self.line) == len(waiting)
        assert sum(self.line.waiting().values()) == len(waiting)
        callers = [ticket for ticket in waiting if not ticket.demand.is_job]
        long_ones = sum(1 for ticket in callers if ticket.is_long and "push" in ticket.first_pool)
        assert self.line.long_waiting().get("push", 0) == long_ones

    @invariant()
    def a_class_knows_how_many_entries_of_each_kind_it_has(self) -> None:
        """A turn ends when it has seen them all: with too high a count, it would ask every key for more."""
        for lane in self.line._lanes.values():
            kinds = [entry.is_ordinary for entry in lane.entries.values()]
            assert lane.counts == [kinds.count(False), kinds.count(True)]

    @invariant()
    def it_is_bounded(self) -> None:
        callers = [ticket for ticket, _ in self.waiting.values() if not ticket.demand.is_job]
        waiting = [ticket for ticket in callers if ticket.id not in self.offered]
        for traffic_class in CLASSES:
            keys = Counter(
                ticket.key for ticket in waiting if ticket.traffic_class.name == traffic_class.name
            )
            most = traffic_class.waiting.waiting_max
            assert keys.total() <= min(most + len(keys), 2 * most)
        chats = [ticket for ticket in waiting if ticket.traffic_class.name == "chat"]
        assert len(chats) < 2 or sum(ticket.size_bytes for ticket in chats) <= 2 * 100

    @invariant()
    def after_a_turn_nobody_has_waited_too_long(self) -> None:
        if not self.is_settled:
            return
        for ticket, entered in self.waiting.values():
            assert self.now - entered < ticket.traffic_class.waiting.longest_wait_s
            assert ticket.deadline is None or self.now < ticket.deadline
        assert (self.look_at is None) == (not self.waiting)

    @invariant()
    def after_a_turn_an_idle_backend_leaves_nobody_waiting(self) -> None:
        """With nothing in flight at all, somebody of every class must have started."""
        if self.is_settled and not self.running and self.look_at is not None:
            paused = self.look_at <= self.now + 0.05
            assert paused or not self.waiting

    @invariant()
    def after_a_turn_who_would_be_first_has_no_place(self) -> None:
        if not self.is_settled or not self.waiting or (self.look_at or 0) <= self.now + 0.05:
            return
        first = min(self.waiting, key=lambda name: (-self.waiting[name][0].traffic_class.priority, int(name)))
        if len({ticket.traffic_class.priority for ticket, _ in self.waiting.values()}) > 1:
            return
        ticket = self.waiting[first][0]
        if len(self.waiting) == 1:
            long_waiting = int(ticket.is_long and "push" in ticket.first_pool)
            views = {
                name: BackendView(
                    backend, self.loads[name], UP, long_waiting=long_waiting if name == "push" else 0
                )
                for name, backend in BACKENDS.items()
            }
            ranked = selection.rank(POLICY, ticket.traffic_class, ticket.demand, views)
            (waiter,) = self.line.waiters(self.now)
            assert waiter.stays_for or all(candidate.excluded is not None for candidate in ranked)

    @invariant()
    def after_a_turn_who_stays_for_a_backend_is_looked_at_before_its_time_is_over(self) -> None:
        if not self.is_settled:
            return
        for waiter in self.line.waiters(self.now):
            if waiter.stays_for:
                ticket, entered = self.waiting[waiter.id]
                assert ticket.prefix_shares == {waiter.stays_for: 0.9}
                expires_at = entered + ticket.traffic_class.waiting.longest_wait_s
                most = min((self.now + expires_at) / 2, self.now + 4 * ticket.prefill_s)
                assert self.look_at is not None
                assert self.now <= self.look_at <= most + 1e-6

    def teardown(self) -> None:
        """When everything ends, whoever waits is started, and every place is to be had again."""
        while self.offers:
            self.take(False)
        self.go_idle()
        while self.waiting:
            waiting = len(self.waiting)
            self.turn()
            assert self.offers or len(self.waiting) < waiting, "stuck"
            while self.offers:
                self.take(False)
            self.go_idle()
        for _ in range(8):  # both chat servers, to the last place: offered, and not taken yet
            self.arrive(CLASSES[0], 100, 1, None, 0, None)
            self.turn()
            assert len(self.offers) == 1

    def go_idle(self) -> None:
        """End all that runs, and let the pause after a miss pass."""
        for name, (backend, held) in self.running.items():
            self.loads[backend] -= held
            self.line.released(name, backend, self.now)
        self.running.clear()
        self.now += 0.06


Line.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestLine = pytest.mark.filterwarnings("default")(Line.TestCase)


@settings(max_examples=60, deadline=None)
@given(
    backlog=st.lists(st.sampled_from(["a", "b", "c"]), min_size=30, max_size=60),
    prompts=st.lists(st.integers(50, 1_500), min_size=60, max_size=60),
)
def test_keys_that_both_wait_get_equal_shares(backlog: Sequence[str], prompts: Sequence[int]) -> None:
    """Start-time fair queueing: two keys with work waiting differ by no more than their largest requests."""
    line = WaitingLine()
    rules = Waiting(max_wait_s=900, ttft_target_s=900, prefill_weight=0)
    traffic_class = TrafficClass("chat", ("light",), waiting=rules)
    one_place = {"light-0": Backend("light-0", "http://light", Capacity(WINDOW, (KneeStep(None, 1),)))}
    policy = Policy(models=(), pools={"light": Pool("light", ("light-0",))}, backends=one_place)
    left = Counter(backlog)
    cost: dict[str, int] = {}
    for number, key in enumerate(backlog):
        demand = Demand(seqs=1, prompt_tokens=prompts[number], total_tokens=prompts[number])
        ticket = Ticket(f"{number}", "gemma", policy, traffic_class, demand, key, arrived_at=0.0)
        assert line.enter(ticket, 0.0) is None
        cost[ticket.id] = prompts[number]
    had = dict.fromkeys(left, 0)
    largest = max(cost.values())
    for step in range(len(backlog)):
        (offer,) = line.turn(float(step), {"light-0": BackendView(one_place["light-0"], Load(), UP)}).offers
        line.started(offer.ticket.id, "light-0", float(step))
        line.released(offer.ticket.id, "light-0", float(step))
        key = str(offer.ticket.key)
        left[key] -= 1
        had[key] += cost[offer.ticket.id]
        if min(left.values()) == 0:
            break
        assert max(had.values()) - min(had.values()) <= 2 * largest


@settings(max_examples=100, deadline=None)
@given(
    arrivals=st.lists(
        st.tuples(
            st.sampled_from(["soon", "late", "demoted", "elsewhere"]), st.integers(0, 30), st.integers(0, 40)
        ),
        max_size=40,
    )
)
def test_with_one_key_the_deadline_alone_decides_among_classes(
    arrivals: Sequence[tuple[str, int, int]],
) -> None:
    """Each class in its own order, and of their next the one that is due first."""
    now = 4.0
    rules = {
        "soon": Waiting(max_wait_s=900, ttft_target_s=2, prefill_weight=1),
        "late": Waiting(max_wait_s=900, ttft_target_s=60, prefill_weight=1),
        "demoted": Waiting(max_wait_s=2, ttft_target_s=1, prefill_weight=1, when_late=WhenLate.DEMOTE),
        "elsewhere": Waiting(max_wait_s=900, ttft_target_s=30, prefill_weight=1),
    }
    wide = Capacity(WINDOW, (KneeStep(None, 1_000),))
    backends = {name: Backend(name, f"http://{name}", wide) for name in ("here", "there")}
    policy = Policy(models=(), pools={name: Pool(name, (name,)) for name in backends}, backends=backends)
    classes = {
        name: TrafficClass(name, ("there" if name == "elsewhere" else "here",), waiting=waiting)
        for name, waiting in rules.items()
    }
    line = WaitingLine()
    lanes: dict[str, list[tuple[int, float, int, float]]] = {name: [] for name in rules}
    for number, (name, arrived, prefill) in enumerate(arrivals):
        at, prefill_s = arrived / 10, prefill / 10
        ticket = Ticket(
            str(number), "gemma", policy, classes[name], Demand(1, 100, 200), "a", at, prefill_s=prefill_s
        )
        assert line.enter(ticket, at) is None
        standing = int(now > ticket.due_at - prefill_s)
        if name == "demoted" and at + 2 <= now:
            standing = 2
        lanes[name].append((standing, (ticket.due_at, prefill_s, number)[standing], number, ticket.due_at))

    turn = line.turn(now, {name: BackendView(backend, Load(), UP) for name, backend in backends.items()})

    queues = [sorted(lane) for lane in lanes.values() if lane]
    expected = []
    while queues:
        first = min(queues, key=lambda queue: (queue[0][3], queue[0][2]))
        expected.append(str(first.pop(0)[2]))
        queues = [queue for queue in queues if queue]
    assert [offer.ticket.id for offer in turn.offers] == expected


@given(st.lists(st.tuples(st.sampled_from(["a", "b", None]), st.integers(1, 9), st.booleans()), max_size=120))
def test_a_start_without_waiting_is_charged_like_one_that_waited(
    starts: list[tuple[str | None, int, bool]],
) -> None:
    one, other = Shares([]), Shares([])
    for key, cost, advances in starts:
        if advances:
            one.start(key, cost)
            other.advance(other.charge(key, cost))
        else:
            one.charge(key, cost)
            other.charge(key, cost)
        assert [one.begin(name) for name in ("a", "b", None)] == [
            other.begin(name) for name in ("a", "b", None)
        ]
