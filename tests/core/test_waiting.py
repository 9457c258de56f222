"""The waiting line: who may start, in which order, who is refused, and what they are told."""

import gc
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from typing import Any

import pytest

from gateway.core import admission, selection
from gateway.core.backends import Backend, Capacity, Gates, JobRoom, KneeStep, Modalities, Pool
from gateway.core.decision import Exclusion
from gateway.core.facts import Blocked
from gateway.core.health import BackendStatus, ProbeFault, State
from gateway.core.kv import KvFormula
from gateway.core.load import UNLIMITED, Demand, Load
from gateway.core.perf import PerfModel
from gateway.core.policy import Policy, TrafficClass, Waiting, WhenLate
from gateway.core.selection import BackendView
from gateway.core.swap_policy import Backlog
from gateway.core.waiting import (
    LOOKAHEAD,
    PUT_BACK_TOKENS,
    Reason,
    Refused,
    Ticket,
    Turn,
    WaitingLine,
    patient,
)
from gateway.core.waiting.drain import STARTS_OVER_S, Drain
from gateway.core.waiting.expiries import SPARE as EXPIRIES_SPARE
from gateway.core.waiting.fairness import FINISH_SPARE, Entry, Shares
from gateway.core.waiting.line import AGAIN_WAIT_S, MOVED_WAIT_S
from gateway.core.waiting.placement import STAYING_MAX
from gateway.core.waiting.prefills import level

UP = BackendStatus(state=State.UP, served_models=("gemma",))
PLAIN = TrafficClass("chat", ("light",))
PATIENT = TrafficClass("chat", ("light",), waiting=Waiting(max_wait_s=60))
CHAT = TrafficClass("chat", ("light", "push"))
LONG = TrafficClass("long", ("push",), waiting=Waiting(max_wait_s=900, ttft_target_s=60, prefill_weight=1.0))


class Site:
    """One light server of `knee` places, one push server of 10, and a line before them."""

    def __init__(self, knee: int = 1) -> None:
        window = 262_144
        steps = (KneeStep(2_000, knee), KneeStep(None, max(1, knee // 2)))
        self.backends = {
            "light": Backend("light", "http://light", Capacity(window, steps)),
            "push": Backend(
                "push",
                "http://push",
                Capacity(window, (KneeStep(None, 10),)),
                modalities=Modalities(images_max=None),
            ),
        }
        self.policy = Policy(
            models=(),
            pools={"light": Pool("light", ("light",)), "push": Pool("push", ("push",), gates=Gates())},
            backends=self.backends,
        )
        self.status = dict.fromkeys(self.backends, UP)
        self.loads = dict.fromkeys(self.backends, Load())
        self.taken: dict[str, tuple[str, Load]] = {}
        self.line = WaitingLine()
        self.numbers = 0

    def ticket(
        self,
        name: str,
        now: float = 0.0,
        *,
        traffic_class: TrafficClass = PLAIN,
        prompt: int = 100,
        key: str | None = None,
        is_job: bool = False,
        **fields: object,
    ) -> Ticket:
        demand = Demand(seqs=1, prompt_tokens=prompt, total_tokens=prompt + 100, is_job=is_job)
        ticket = Ticket(name, "gemma", self.policy, traffic_class, demand, key, arrived_at=now)
        return replace(ticket, **fields)  # type: ignore[arg-type]

    def enter(self, name: str, now: float = 0.0, **fields: object) -> Refused | None:
        return self.line.enter(self.ticket(name, now, **fields), now)  # type: ignore[arg-type]

    def views(self) -> Mapping[str, BackendView]:
        return {n: BackendView(b, self.loads[n], self.status[n]) for n, b in self.backends.items()}

    def turn(self, now: float = 0.0) -> Turn:
        return self.line.turn(now, self.views())

    def start(self, now: float = 0.0) -> list[str]:
        """Take a turn, and take every place it offers."""
        turn = self.turn(now)
        for offer in turn.offers:
            candidate = offer.candidates[0]
            assert admission.full(self.loads[candidate.backend], candidate.claim, candidate.limits) is None
            self.loads[candidate.backend] += candidate.claim
            self.taken[offer.ticket.id] = (candidate.backend, candidate.claim)
            self.line.started(offer.ticket.id, candidate.backend, now)
        return [offer.ticket.id for offer in turn.offers]

    def answered(self, name: str) -> None:
        backend, claim = self.taken[name]
        self.loads[backend] += claim.after_first_token - claim
        self.taken[name] = (backend, claim.after_first_token)

    def end(self, name: str, now: float = 0.0, *, answered: bool = True) -> None:
        backend, claim = self.taken.pop(name)
        self.loads[backend] -= claim
        self.line.released(name, backend, now, answered=answered)

    def served(self, names: Iterable[str], now: float = 0.0) -> list[str]:
        """End one after another whatever runs, until all of `names` have started; return their order."""
        order: list[str] = []
        wanted = set(names)
        while wanted:
            for name in list(self.taken):
                self.end(name, now)
            begun = self.start(now)
            assert begun, f"nobody starts, {wanted} wait"
            order += begun
            wanted -= set(begun)
        return order


def test_who_comes_to_an_idle_fleet_starts_at_once() -> None:
    site = Site()

    assert site.enter("a") is None
    assert site.start() == ["a"]
    assert len(site.line) == 0
    assert site.turn().next_turn_at is None


def at_once(site: Site, name: str, now: float = 0.0, **fields: object) -> bool:
    """Have a place offered without a turn, and take it. Returns whether there was an offer."""
    ticket = site.ticket(name, now, **fields)  # type: ignore[arg-type]
    ranked = selection.rank(ticket.policy, ticket.traffic_class, ticket.demand, site.views())
    able = tuple(one for one in ranked if one.excluded is None)
    offer = site.line.offer_at_once(ticket, able, now)
    if offer is None:
        return False
    assert offer.candidates == able
    site.loads[able[0].backend] += able[0].claim
    site.taken[name] = (able[0].backend, able[0].claim)
    site.line.started(name, able[0].backend, now)
    return True


def in_one_step(site: Site, name: str, now: float = 0.0, **fields: object) -> bool:
    """Take a place before it is noted that it was. Returns whether there was one to be taken."""
    ticket = site.ticket(name, now, **fields)  # type: ignore[arg-type]
    ranked = selection.rank(ticket.policy, ticket.traffic_class, ticket.demand, site.views())
    if ranked[0].excluded is not None or not site.line.may_start_at_once(ticket, now):
        return False
    site.loads[ranked[0].backend] += ranked[0].claim
    site.taken[name] = (ranked[0].backend, ranked[0].claim)
    site.line.start_at_once(ticket, ranked[0], now)
    return True


def test_keys_without_an_advantage_are_forgotten() -> None:
    shares = Shares([])
    for number in range(100 * FINISH_SPARE):
        shares.start(str(number), 1)
        shares.start("of many", 2)  # by which time goes on

    assert len(shares._finish) < 4 * FINISH_SPARE
    assert (shares.begin("0"), shares.begin("of many")) == (shares.begin("new"), shares.begin("new") + 2)


def test_time_does_not_go_back_where_offers_are_taken_in_another_order() -> None:
    shares = Shares([])
    shares.advance(100)
    shares.advance(50)

    assert shares.begin("new") == 100


def test_a_start_elsewhere_takes_time_no_further_than_its_own_key() -> None:
    shares = Shares([])
    shares.join("waits")
    shares.charge("waits", 100)

    shares.charge_elsewhere("another", 10)

    assert [shares.begin(key) for key in ("new", "another", "waits")] == [0, 10, 100]


def test_a_start_elsewhere_takes_time_no_further_than_what_waits_here() -> None:
    shares = Shares([])
    shares.join("waits")
    shares.charge("waits", 100)

    for _ in range(2):
        shares.charge_elsewhere("another", 1000)

    assert [shares.begin(key) for key in ("new", "another", "waits")] == [100, 2000, 100]


def test_a_start_elsewhere_gives_nothing_back_of_what_a_key_has_started_here() -> None:
    shares = Shares([])
    shares.join("waits")
    shares.start("a", 2 * PUT_BACK_TOKENS)  # several answers to one long prompt

    shares.charge_elsewhere("a", 10)

    assert shares.begin("a") == 2 * PUT_BACK_TOKENS


def test_an_account_takes_over_how_far_keys_were_ahead_in_another() -> None:
    other, shares = Shares([]), Shares([])
    for _ in range(2):
        other.start("a", 1000)

    shares.absorb(other)

    assert [shares.begin(key) for key in ("new", "a")] == [0, 1000]


def test_who_has_left_is_not_kept_for_as_long_as_it_might_have_waited() -> None:
    site = Site()
    site.enter("runs")
    assert site.start() == ["runs"]
    site.enter("stays", traffic_class=replace(PLAIN, waiting=Waiting(max_wait_s=60)))
    for number in range(10 * EXPIRIES_SPARE):
        site.enter(str(number), traffic_class=LONG)
        site.line.leave(str(number))

    assert sum(isinstance(one, Entry) for one in gc.get_objects()) < 2 * EXPIRIES_SPARE
    assert [refused.id for refused in site.turn(60.0).refused] == ["stays"]


def test_who_has_waited_too_long_is_refused_in_time_though_many_have_left() -> None:
    site = Site()
    site.enter("runs")
    assert site.start() == ["runs"]
    for name, max_wait_s in (("left", 1), ("slow", 50), ("quick", 2)):
        site.enter(name, traffic_class=replace(PLAIN, waiting=Waiting(max_wait_s=max_wait_s)))
    site.line.leave("left")
    for number in range(2 * EXPIRIES_SPARE):
        site.enter(str(number), traffic_class=LONG)
        site.line.leave(str(number))

    assert [refused.id for refused in site.turn(2.0).refused] == ["quick"]


def test_who_is_moved_to_a_class_that_waits_less_is_not_refused_where_a_place_is_free() -> None:
    """It has waited in its old class for longer than in the new one anybody may."""
    site = Site()
    for name in ("first", "second"):
        moved = site.ticket(name, arrived_at=-100.0, waited_s=100.0)
        assert moved.waited_s > moved.traffic_class.waiting.max_wait_s
        site.line.enter(moved, 0.0, has_waited=True)

    assert site.start() == ["first"]
    assert not site.turn(MOVED_WAIT_S / 2).refused
    assert [refused.id for refused in site.turn(MOVED_WAIT_S).refused] == ["second"]


def test_a_deadline_holds_for_who_is_moved_to_another_class() -> None:
    site = Site()
    site.enter("runs")
    assert site.start() == ["runs"]
    moved = site.ticket("late", arrived_at=-100.0, waited_s=100.0, deadline=MOVED_WAIT_S / 2)
    site.line.enter(moved, 0.0, has_waited=True)

    (refused,) = site.turn(MOVED_WAIT_S / 2).refused
    assert refused.reason is Reason.DEADLINE


@pytest.mark.parametrize("start", [at_once, in_one_step])
def test_where_nobody_waits_a_place_is_had_without_a_turn(start: Callable[..., bool]) -> None:
    site = Site(knee=2)
    assert start(site, "a")
    assert start(site, "b")
    assert not start(site, "c")  # full
    site.enter("c")
    site.end("a")
    assert not start(site, "d")  # c waits
    assert site.start() == ["c"]


def test_what_started_without_a_turn_is_charged_as_after_one() -> None:
    """One key has had a lot, by either way: whoever has had less goes first."""
    patient_class = replace(PLAIN, waiting=Waiting(max_wait_s=900))

    def in_turn(site: Site, name: str, **fields: object) -> None:
        assert site.enter(name, 0.0, **fields) is None
        assert site.start() == [name]

    for way in (at_once, in_one_step, in_turn):
        site = Site(knee=1)
        for number in range(3):
            way(site, f"{number}", key="noisy", traffic_class=patient_class)
            site.end(f"{number}", 100.0)
        assert site.line.tokens_started(1.0) == {("gemma", "chat", "noisy"): 600}
        in_turn(site, "busy", key="other", traffic_class=patient_class)
        assert site.line.drains_per_s(0.0)["gemma", "chat"] == 3 / STARTS_OVER_S  # all ways count as starts
        for name in ("noisy", "quiet"):
            assert site.enter(name, key=name, traffic_class=patient_class) is None
        assert site.served(["noisy", "quiet"]) == ["quiet", "noisy"]


def test_a_place_is_offered_without_a_turn_only_where_nothing_is_under_way() -> None:
    site = Site(knee=2)
    ticket = site.ticket("a", deadline=1.0)
    ranked = selection.rank(ticket.policy, ticket.traffic_class, ticket.demand, site.views())
    assert site.line.offer_at_once(ticket, ranked, 2.0) is None  # its caller has given up
    assert not site.line.may_start_at_once(ticket, 2.0)
    assert site.line.offer_at_once(ticket, (), 0.0) is None
    offer = site.line.offer_at_once(ticket, ranked, 0.0)
    assert offer is not None
    assert site.line.is_offered("a")
    assert site.line.offered() == {"light": ranked[0].claim}
    site.line.missed("a", ["light"], 0.0)
    assert site.line.position("a") == 1
    site.line.leave("a")
    assert site.line.offer_at_once(site.ticket("b"), ranked, 0.01) is None  # the place was gone a moment ago
    assert not site.line.may_start_at_once(site.ticket("b"), 0.01)


def test_who_comes_to_a_full_fleet_waits_until_something_ends() -> None:
    site = Site()
    site.enter("a")
    site.start()

    site.enter("b", 0.1)
    assert site.start(0.1) == []
    assert site.turn(0.1).next_turn_at == pytest.approx(0.1 + 1.2)

    site.end("a", 0.5)
    assert site.start(0.5) == ["b"]


def test_a_newcomer_does_not_pass_those_that_wait() -> None:
    site = Site()
    site.enter("a")
    site.start()
    site.enter("b", 0.1)
    site.end("a", 0.2)

    site.enter("newcomer", 0.2)

    assert site.start(0.2) == ["b"]


# ------------------------------------------------------------------ order

PATIENT = TrafficClass(
    "chat", ("light",), waiting=Waiting(max_wait_s=900, ttft_target_s=2, prefill_weight=0.0)
)


@pytest.mark.parametrize(
    ("now", "order"),
    [
        pytest.param(1.0, ["early", "middle", "newest"], id="all-can-be-met: by deadline"),
        pytest.param(2.05, ["middle", "newest", "early"], id="the-first-cannot: behind those that can"),
        pytest.param(9.0, ["newest", "middle", "early"], id="none-can: the shortest first"),
    ],
)
def test_the_earliest_deadline_that_can_be_met_then_the_shortest(now: float, order: list[str]) -> None:
    site = Site()
    site.enter("running")
    site.start()
    site.enter("early", 0.1, traffic_class=PATIENT, prefill_s=0.3)
    site.enter("middle", 0.3, traffic_class=PATIENT, prefill_s=0.2)
    site.enter("newest", 0.5, traffic_class=PATIENT, prefill_s=0.1)

    assert site.served(order, now) == order


@pytest.mark.parametrize(
    ("now", "first"), [(1.9, "slow"), (1.9001, "quick")], ids=["just-in-time", "just-too-late"]
)
def test_whether_a_deadline_can_be_met_counts_the_prompts_own_prefill(now: float, first: str) -> None:
    site = Site()
    site.enter("running")
    site.start()
    site.enter("slow", 0.0, traffic_class=PATIENT, prefill_s=0.1)
    site.enter("quick", 0.5, traffic_class=PATIENT)

    assert site.served([first], now)[0] == first


@pytest.mark.parametrize("key", ["of large", "another"])
def test_who_waits_for_a_request_that_comes_first_starts_once_that_one_is_late(key: str) -> None:
    """Time alone changes the order, and nothing else may happen for as long as an answer takes."""
    site = Site(knee=2)
    site.enter("running")
    site.start()
    site.enter("large", traffic_class=PATIENT, prompt=3_000, key="of large")  # takes all of light
    site.enter("small", 0.5, traffic_class=PATIENT, key="of large")
    site.enter("newest", 0.6, traffic_class=PATIENT, key=key)
    turn = site.turn(0.6)
    assert not turn.offers
    assert turn.next_turn_at is not None
    assert turn.next_turn_at == pytest.approx(2.0)

    assert site.start(turn.next_turn_at) == ["small"]


def test_who_comes_first_now_that_another_key_has_had_its_share_starts_at_once() -> None:
    site = Site(knee=2)
    mini = Backend("mini", "http://mini", Capacity(1_000, (KneeStep(None, 10),)))
    site.backends["mini"], site.status["mini"], site.loads["mini"] = mini, UP, Load()
    pools = {"light": Pool("light", ("light", "mini"))}
    site.policy = replace(site.policy, pools=pools, backends=site.backends)
    site.enter("running", traffic_class=PATIENT, key="a", prompt=1_500)
    assert site.start() == ["running"]
    site.enter("large", traffic_class=PATIENT, key="b", prompt=3_000)  # takes all of light
    site.enter("small", traffic_class=PATIENT, key="a", prompt=1_500)
    site.enter(
        "quick", traffic_class=PATIENT, key="b", demand=Demand(seqs=9, prompt_tokens=100, total_tokens=900)
    )

    turn = site.turn(0.1)

    assert [offer.ticket.id for offer in turn.offers] == ["quick"]
    assert turn.next_turn_at == 0.1
    site.line.started("quick", "mini", 0.1)
    assert site.start(0.1) == ["small"]


def test_nobody_is_looked_at_for_being_late_where_nothing_is_held() -> None:
    site = Site()
    site.enter("running")
    site.start()
    site.enter("a", traffic_class=PATIENT)
    site.enter("b", traffic_class=PATIENT)

    assert site.turn().next_turn_at == PATIENT.waiting.max_wait_s


def test_a_document_has_its_own_prefill_on_top_of_the_target() -> None:
    site = Site()
    ticket = site.ticket("doc", 10.0, traffic_class=LONG, prompt=100_000, prefill_s=40.0)

    assert ticket.due_at == 110.0
    assert replace(ticket, deadline=90.0).due_at == 90.0
    assert replace(ticket, deadline=130.0).due_at == 110.0


def test_the_higher_priority_goes_first() -> None:
    site = Site()
    site.enter("running")
    site.start()
    low = TrafficClass("batch", ("light",), priority=-1)
    site.enter("batch", 0.0, traffic_class=low)
    site.enter("chat", 0.5)

    assert site.served(["chat", "batch"], 1.0) == ["chat", "batch"]


def test_classes_of_one_priority_take_turns_by_deadline() -> None:
    site = Site()
    site.enter("running")
    site.start()
    other = TrafficClass("other", ("light",))
    for number in range(3):
        site.enter(f"a{number}", 0.2 * number)
        site.enter(f"b{number}", 0.2 * number + 0.1, traffic_class=other)

    assert site.served(["b2"], 0.6) == ["a0", "b0", "a1", "b1", "a2", "b2"]


# ------------------------------------------------------------------ fairness


def test_a_noisy_key_does_not_starve_the_others() -> None:
    site = Site()
    site.enter("running", key="noisy")
    site.start()
    for number in range(20):
        site.enter(f"noisy-{number}", 0.01 * number, key="noisy")
    site.enter("quiet-0", 0.5, key="quiet")
    site.enter("quiet-1", 0.5, key="quiet")

    order = site.served(["quiet-1"], 0.6)

    assert order.index("quiet-0") <= 1
    assert order.index("quiet-1") <= 3


def test_a_noisy_key_does_not_starve_one_of_another_class_either() -> None:
    reasoning = TrafficClass(
        "reasoning", ("light",), waiting=Waiting(max_wait_s=600, ttft_target_s=600, prefill_weight=1)
    )
    site = Site()
    site.enter("running", key="noisy")
    site.start()
    for number in range(20):
        site.enter(f"noisy-{number}", 0.01 * number, key="noisy", traffic_class=PATIENT)
    site.enter("quiet-0", 0.5, key="quiet", traffic_class=reasoning)
    site.enter("quiet-1", 0.5, key="quiet", traffic_class=reasoning)

    order = site.served(["quiet-1"], 0.6)

    assert order.index("quiet-0") <= 1
    assert order.index("quiet-1") <= 3


def test_within_a_key_the_deadline_decides_among_classes() -> None:
    late = TrafficClass("late", ("light",), waiting=Waiting(max_wait_s=600, ttft_target_s=600))
    site = Site()
    site.enter("running")
    site.start()
    for key in ("a", "b"):
        site.enter(f"{key}-late", 0.1, key=key, traffic_class=late)
        site.enter(f"{key}-soon", 0.2, key=key, traffic_class=PATIENT)

    order = site.served(["a-late", "b-late"], 0.3)

    assert order == ["a-soon", "b-soon", "a-late", "b-late"]


def test_what_a_key_starts_in_another_first_pool_is_not_held_against_it() -> None:
    site = Site()
    site.enter("running")
    site.enter("doc", traffic_class=LONG, prompt=50_000, key="a")
    site.start()
    site.enter("a", 0.1, key="a")
    site.enter("b", 0.2, key="b")

    assert site.served(["a", "b"], 0.3) == ["a", "b"]


def test_what_a_key_starts_at_another_priority_is_not_held_against_it() -> None:
    site = Site(knee=2)
    site.enter("urgent", traffic_class=TrafficClass("urgent", ("light",), priority=1), key="a")
    site.enter("running")
    site.start()
    site.enter("a", 0.1, key="a")
    site.enter("b", 0.2, key="b")
    site.end("running", 0.3)

    assert site.start(0.3) == ["a"]


@pytest.mark.parametrize("is_known", [True, False], ids=["known", "before its first request"])
def test_what_other_processes_started_in_one_class_counts_in_those_that_share_its_pool(
    is_known: bool,
) -> None:
    other = TrafficClass("other", ("light",), waiting=PATIENT.waiting)
    site = Site()
    site.enter("running")
    site.start()
    if is_known:
        site.enter("past", traffic_class=other)
        site.line.leave("past")
    site.line.charge("gemma", "other", "a", 10_000)
    site.enter("a", 0.0, key="a", traffic_class=PATIENT)
    site.enter("b", 0.1, key="b", traffic_class=PATIENT)
    site.enter("other", 0.2, key="b", traffic_class=other)

    assert site.served(["a", "b", "other"], 0.3) == ["b", "other", "a"]


def test_a_class_that_moves_to_another_pool_takes_what_waits_along() -> None:
    site = Site()
    site.enter("running")
    site.start()
    for number in range(3):
        site.enter(f"noisy-{number}", 0.0, key="noisy", traffic_class=PATIENT)
    site.enter("doc", 0.0, key="noisy", traffic_class=LONG, prompt=50_000)
    moved = replace(PATIENT, pools=("push",))
    site.enter("quiet", 0.1, key="quiet", traffic_class=moved)

    order = site.served(["quiet", "doc", "noisy-2"], 0.2)

    assert sorted(order) == ["doc", "noisy-0", "noisy-1", "noisy-2", "quiet"]
    assert len(site.line) == 0


def test_a_class_that_moves_to_another_pool_leaves_nothing_where_it_was() -> None:
    other = TrafficClass("other", ("light",), waiting=PATIENT.waiting)
    site = Site()
    site.enter("running")
    site.start()
    for number in range(2):
        site.enter(f"moving-{number}", key="a", traffic_class=PATIENT)
        site.enter(f"staying-{number}", key="b", traffic_class=other)
    site.enter("moving-b", key="b", traffic_class=PATIENT)
    site.policy = replace(site.policy)  # as after a reload
    site.enter("mover", 0.1, key="c", traffic_class=replace(PATIENT, pools=("push",)))

    assert [site.line.position(name) for name in ("staying-0", "staying-1", "mover")] == [1, 2, 3]
    assert sorted(one.id for one in site.line.waiters(0.2)) == [
        *("mover", "moving-0", "moving-1", "moving-b"),
        *("staying-0", "staying-1"),
    ]
    for number in range(3):
        site.enter(f"new-{number}", 0.3, key="d", traffic_class=other)
    assert site.line.position("new-2") == 2 + 2 + 1  # its own two, and those of b that stay


def test_what_a_key_has_in_a_class_that_moves_counts_where_it_has_more() -> None:
    other = TrafficClass("other", ("push",), waiting=PATIENT.waiting)
    site = Site()
    for number in range(2):
        site.enter(f"moving-{number}", key="b", traffic_class=PATIENT)
    site.enter("there", key="b", traffic_class=other)
    site.policy = replace(site.policy)  # as after a reload
    for number in range(3):
        site.enter(f"new-{number}", 0.1, key="d", traffic_class=replace(PATIENT, pools=("push",)))

    assert site.line.position("new-2") == 2 + 3 + 1


def test_a_class_that_is_alone_in_its_pool_takes_all_along_when_the_pool_changes() -> None:
    site = Site()
    site.enter("running")
    site.start()
    site.enter("a", 0.1, traffic_class=PATIENT)
    pools = {**site.policy.pools, "light": Pool("light", ("light", "push"))}
    site.policy = replace(site.policy, pools=pools)
    site.enter("b", 0.2, traffic_class=PATIENT)

    assert [one.id for one in site.line.waiters(0.2)] == ["a", "b"]
    site.end("running", 0.3)
    assert site.start(0.3) == ["a", "b"]


@pytest.mark.parametrize("how", ["missed", "left"])
def test_an_offer_that_is_open_when_its_class_moves_costs_nothing_if_it_is_not_taken(how: str) -> None:
    other = TrafficClass("other", ("push",), waiting=LONG.waiting)
    site = Site()
    site.enter("other", key="c", traffic_class=other)
    site.start()
    site.enter("offered", key="a", traffic_class=PATIENT, prompt=50_000)
    assert [offer.ticket.id for offer in site.turn().offers] == ["offered"]
    site.policy = replace(site.policy)  # as after a reload
    moved = replace(PATIENT, pools=("push",))
    site.enter("b", 0.1, key="b", traffic_class=moved)
    if how == "missed":
        site.line.missed("offered", ["light"], 0.1)
    site.line.leave("offered")
    site.enter("a", 0.2, key="a", traffic_class=moved)
    site.enter("b-2", 0.3, key="b", traffic_class=moved)

    assert [one.id for one in site.line.waiters(0.3)] == ["b", "a", "b-2"]


def test_who_comes_after_a_reload_is_not_kept_where_one_of_before_it_is() -> None:
    site = Site()
    site.enter("running")
    site.start()
    site.enter("before", 0.1, traffic_class=PATIENT)
    pools = {**site.policy.pools, "light": Pool("light", ("light", "push"))}
    site.policy = replace(site.policy, pools=pools)
    site.enter("after", 0.2, traffic_class=PATIENT)

    assert site.start(0.2) == ["after"]


def test_one_that_was_sent_behind_comes_after_all_others_of_its_class_whoever_sent_them() -> None:
    demoting = bounded(when_late=WhenLate.DEMOTE)
    other = TrafficClass("other", ("light",), waiting=PATIENT.waiting)
    site = Site()
    site.enter("running")
    site.start()
    site.enter("a-late", 0.0, key="a", traffic_class=demoting)
    site.enter("b-late", 0.0, key="b", traffic_class=demoting)
    site.turn(1.5)
    for number in range(3):
        site.enter(f"b-{number}", 1.6, key="b", traffic_class=demoting)
    site.enter("b-other", 1.7, key="b", traffic_class=other)

    order = site.served(["a-late", "b-late", "b-other"], 1.8)

    assert order[:4] == ["b-0", "b-1", "b-2", "a-late"]


def test_the_jobs_of_a_class_come_after_its_others_and_the_keys_alternate_among_them() -> None:
    other = TrafficClass("other", ("light",), waiting=PATIENT.waiting)
    site = Site(knee=64)
    site.loads["light"] = Load(seqs=64, share=admission.WHOLE)
    for name in ("a-job", "b-job", "b-job-2", "c-job"):
        site.enter(name, key=name[0], traffic_class=PATIENT, is_job=True)
    for name in ("a-chat", "a-chat-2"):
        site.enter(name, 0.1, key="a", traffic_class=PATIENT)
    for name in ("c-other", "c-other-2"):
        site.enter(name, 0.1, key="c", traffic_class=other)

    shown = [one.id for one in site.line.waiters(0.2)]

    # b has only jobs, which come in turn once the last chat of their class has been.
    assert shown == ["a-chat", "c-other", "a-chat-2", "b-job", "c-job", "b-job-2", "a-job", "c-other-2"]
    site.loads["light"] = Load()
    assert site.start(0.2) == shown


def test_the_job_of_a_key_that_has_no_chat_left_comes_after_the_chats_of_others() -> None:
    site = Site(knee=64)
    site.loads["light"] = Load(seqs=64, share=admission.WHOLE)
    site.enter("a-job", key="a", traffic_class=PATIENT, is_job=True)
    for name in ("a-chat", "b-chat", "b-chat-2", "b-chat-3"):
        site.enter(name, 0.1, key=name[0], traffic_class=PATIENT)
    site.loads["light"] = Load()

    assert site.start(0.2) == ["a-chat", "b-chat", "b-chat-2", "b-chat-3", "a-job"]


def test_the_job_of_a_key_that_has_had_much_comes_in_the_same_turn_as_those_of_others() -> None:
    other = TrafficClass("other", ("light",), waiting=PATIENT.waiting)
    site = Site(knee=64)
    site.enter("c-other", key="c", traffic_class=other)
    site.line.charge("gemma", "other", "c", 10_000)
    for name in ("a-job", "c-job"):
        site.enter(name, key=name[0], traffic_class=PATIENT, is_job=True)

    assert site.start(0.2) == ["a-job", "c-other", "c-job"]


def test_who_has_had_much_lately_comes_after_who_has_not() -> None:
    site = Site(knee=5)
    for number in range(5):
        site.enter(f"noisy-{number}", key="noisy")
    site.start()
    site.enter("noisy-again", 0.1, key="noisy")
    site.enter("quiet", 0.2, key="quiet")
    site.end("noisy-0", 0.3)

    assert site.start(0.3) == ["quiet"]


def after_a_turn(site: Site, name: str, now: float = 0.0, **fields: object) -> bool:
    """Queue, and take the place that the next turn offers."""
    return site.enter(name, now, **fields) is None and site.start(now) == [name]


def assert_no_credit(site: Site) -> None:
    """Check that a key that comes back takes turns with a busy one."""
    for number in range(3):
        site.enter(f"back-{number}", 0.0, traffic_class=PATIENT, key="back")
        site.enter(f"busy-{number}", 0.0, traffic_class=PATIENT, key="busy")

    order = site.served(["busy-2", "back-2"], 0.1)

    assert [name.split("-")[0] for name in order[:3]].count("busy") == 1


@pytest.mark.parametrize("start", [at_once, in_one_step, after_a_turn])
@pytest.mark.parametrize("last", ["busy", "new"])
def test_a_long_absence_is_no_credit(start: Callable[..., bool], last: str) -> None:
    site = Site()
    for number, key in enumerate(["busy"] * 20 + [last]):
        assert start(site, f"early-{number}", traffic_class=PATIENT, key=key)
        if number < 20:
            site.end(f"early-{number}")
    assert_no_credit(site)


def test_a_long_absence_is_no_credit_against_what_others_started_either() -> None:
    site = Site()
    site.enter("running", key="running")
    site.start()
    for _ in range(20):
        site.line.charge("gemma", "chat", "busy", 200)
    assert_no_credit(site)


def test_who_has_left_is_not_counted_among_the_keys_that_wait() -> None:
    other = TrafficClass("other", ("light",), waiting=PATIENT.waiting)
    site = Site()
    site.enter("running")
    site.start()
    for name, one in (("a-0", PATIENT), ("a-1", other)):  # one key, in two classes
        site.enter(name, key="a", traffic_class=one)
    for number in range(2):
        site.enter(f"b-{number}", key="b", traffic_class=PATIENT)
    assert site.line.position("b-1") == 4  # the keys alternate
    site.line.leave("a-0")
    assert site.line.position("b-1") == 3
    site.line.leave("a-1")

    assert [site.line.position(f"b-{number}") for number in range(2)] == [1, 2]


def test_what_other_processes_started_for_a_key_counts_too() -> None:
    site = Site()
    site.enter("running")
    site.start()
    site.enter("a", 0.0, key="a")
    site.enter("b", 0.1, key="b")
    site.line.charge("gemma", "chat", "a", 10_000)

    assert site.served(["a", "b"], 0.2) == ["b", "a"]


def test_what_others_started_for_one_key_gives_those_who_wait_no_lead_over_a_third() -> None:
    site = Site()
    site.enter("running", traffic_class=PATIENT)
    site.start()
    for number in range(4):
        site.enter(f"early-{number}", 0.0, traffic_class=PATIENT, key="early")
    for _ in range(10):
        site.line.charge("gemma", "chat", "flood", 100_000)
    for number in range(4):
        site.enter(f"late-{number}", 0.1, traffic_class=PATIENT, key="late")

    order = site.served(["early-3", "late-3"], 0.2)

    assert [name.split("-")[0] for name in order[:4]].count("late") == 2


def test_a_key_is_put_back_by_one_very_large_request_at_most() -> None:
    site = Site()
    site.enter("running", traffic_class=PATIENT)
    site.start()
    for number in range(20):
        site.enter(f"b-{number}", 0.0, traffic_class=PATIENT, prompt=50_000, key="b")
    for _ in range(100):
        site.line.charge("gemma", "chat", "a", 1_000_000)
    site.enter("a", 0.1, traffic_class=PATIENT, prompt=50_000, key="a")

    assert site.served(["a"], 0.2).index("a") == 1 + PUT_BACK_TOKENS // 50_100


def test_an_offer_that_was_missed_does_not_make_who_comes_next_wait_longer() -> None:
    site = Site()
    site.line.charge("gemma", "chat", "a", 10_000)
    site.enter("a", 0.0, key="a")
    site.turn(0.0)
    site.line.missed("a", ["light"], 0.0)
    site.enter("b", 0.1, key="b")

    assert site.served(["a", "b"], 0.2) == ["b", "a"]


@pytest.mark.parametrize("ends_with", ["missed", "left"])
def test_an_offer_that_was_not_taken_is_not_charged(ends_with: str) -> None:
    site = Site(knee=2)
    site.enter("runs", key="b", prompt=400, traffic_class=PATIENT)
    assert site.start() == ["runs"]
    for number in range(9):
        site.enter(f"a-{number}", 0.1 * number, key="a", traffic_class=PATIENT)
        assert [offer.ticket.id for offer in site.turn(0.1 * number).offers] == [f"a-{number}"]
        if ends_with == "missed":
            site.line.missed(f"a-{number}", ["light"], 0.1 * number)
        site.line.leave(f"a-{number}")
    site.enter("b", 1.0, key="b", traffic_class=PATIENT)
    site.enter("a", 1.0, key="a", traffic_class=PATIENT)

    assert site.start(1.0) == ["a"]  # b has had 500 tokens, and a none


def test_what_was_started_here_is_told_and_what_others_started_is_not() -> None:
    site = Site()
    site.enter("one", key="a")
    site.enter("other", key="b")
    site.line.charge("gemma", "chat", "c", 10_000)
    site.start(1.0)

    assert site.line.tokens_started(1.0) == {("gemma", "chat", "a"): 200}


def test_an_offer_that_was_missed_was_no_start() -> None:
    site = Site()
    site.enter("one", key="a")
    (offer,) = site.line.turn(0.0, site.views()).offers
    site.line.missed(offer.ticket.id, ["light"], 0.0)

    assert site.line.tokens_started(0.0) == {}


# ------------------------------------------------------------------ who blocks whom


def test_one_that_does_not_fit_is_not_passed_by_smaller_ones() -> None:
    site = Site(knee=4)
    for number in range(3):
        site.enter(f"short-{number}", traffic_class=PATIENT)
    site.start()
    site.enter("big", 0.1, traffic_class=PATIENT, prompt=3_000)  # needs two of four places
    site.enter("small", 0.2, traffic_class=PATIENT)

    assert site.start(0.3) == []
    site.end("short-0", 0.4)
    assert site.start(0.4) == ["big"]
    site.end("short-1", 0.5)
    assert site.start(0.5) == ["small"]


def test_one_that_was_tried_elsewhere_is_not_waited_for_by_one_that_was_not() -> None:
    site = Site()
    site.loads["push"] = Load(seqs=10, share=admission.WHOLE)
    site.enter("tried", 0.0, traffic_class=CHAT, failed=frozenset({"light"}))
    site.enter("fresh", 0.1, traffic_class=CHAT)

    assert site.start(0.1) == ["fresh"]
    assert site.taken["fresh"][0] == "light"


@pytest.mark.parametrize(
    ("passes", "running", "begun"),
    [
        pytest.param(0, 4, ["fresh"], id="it-holds-nothing"),
        pytest.param(1, 4, ["fresh"], id="it-may-be-passed"),
        pytest.param(0, 3, ["refused", "fresh"], id="one-has-ended"),
        pytest.param(0, 10, [], id="at-the-knee"),
    ],
)
def test_who_has_been_refused_waits_in_turn_until_fewer_run(
    passes: int, running: int, begun: Sequence[str]
) -> None:
    rules = replace(PATIENT, waiting=replace(PATIENT.waiting, passes_max=passes))
    site = Site(knee=10)
    site.loads["light"] = Load(seqs=running, share=100_000 * running)
    site.enter("refused", 0.0, traffic_class=rules, refused=frozenset({"light"}))
    site.enter("fresh", 0.2, traffic_class=rules)

    views = {name: replace(view, takes=4) for name, view in site.views().items()}
    assert [offer.ticket.id for offer in site.line.turn(0.2, views).offers] == begun


@pytest.mark.parametrize("refused", [frozenset({"light"}), frozenset({"push"}), frozenset()], ids=str)
def test_who_has_been_refused_holds_what_has_no_room_for_it_in_any_case(refused: frozenset[str]) -> None:
    site = Site(knee=10)
    site.loads["light"] = Load(seqs=9, share=900_000)
    site.enter("large", 0.0, traffic_class=PATIENT, refused=refused, demand=Demand(2, 100, 200))
    site.enter("fresh", 0.2, traffic_class=PATIENT)

    views = {name: replace(view, takes=4) for name, view in site.views().items()}
    assert not site.line.turn(0.2, views).offers


def test_who_has_been_refused_holds_nothing_for_what_is_full_there_that_it_does_not_use() -> None:
    site = Site(knee=10)
    pools = {**site.policy.pools, "light": Pool("light", ("light",), gates=Gates(long_seqs=1))}
    site.policy = replace(site.policy, pools=pools)
    site.loads["light"] = Load(seqs=4, share=400_000, long_seqs=2)  # two answers to one document
    site.enter("refused", 0.0, traffic_class=PATIENT, refused=frozenset({"light"}))
    site.enter("fresh", 0.2, traffic_class=PATIENT)

    views = {name: replace(view, takes=4) for name, view in site.views().items()}
    assert [offer.ticket.id for offer in site.line.turn(0.2, views).offers] == ["fresh"]


def test_a_long_prompt_that_has_been_refused_holds_nothing_against_short_ones() -> None:
    site = Site(knee=10)
    pools = {**site.policy.pools, "light": Pool("light", ("light",), gates=Gates(long_seqs=1))}
    site.policy = replace(site.policy, pools=pools)
    site.loads["light"] = Load(seqs=1, share=200_000, long_seqs=1)
    site.enter("long", 0.0, traffic_class=PATIENT, prompt=50_000, refused=frozenset({"light"}))
    site.enter("short", 0.2, traffic_class=PATIENT)

    assert site.start(0.2) == ["short"]
    site.loads["light"] = Load()
    assert site.start(0.3) == ["long"]


@pytest.mark.parametrize("refuses_all", [True, False])
def test_who_has_been_refused_does_not_wait_for_one_that_refuses_all(refuses_all: bool) -> None:
    site = Site(knee=10)
    site.enter("refused", 0.0, traffic_class=PATIENT, refused=frozenset({"light", "gone"}))
    site.enter("other", 0.0, traffic_class=PATIENT, refused=frozenset({"light", "push"}))
    site.status["push"] = BackendStatus(state=State.DOWN)

    views = {name: replace(view, takes=0) for name, view in site.views().items()}
    views["light"] = replace(views["light"], refuses_all=refuses_all)
    turn = site.line.turn(0.0, views)
    assert not turn.offers
    assert [one.reason for one in turn.refused] == [Reason.NO_BACKEND] * (2 if refuses_all else 0)


def test_of_those_that_were_refused_as_many_start_as_may() -> None:
    site = Site(knee=10)
    site.loads["light"] = Load(seqs=4, share=400_000)
    for number in range(5):
        site.enter(f"{number}", 0.0, traffic_class=PATIENT, refused=frozenset({"light"}))

    for takes, starts in ((4, ""), (5, "0"), (7, "012"), (UNLIMITED, "01234")):
        views = {name: replace(view, takes=takes) for name, view in site.views().items()}
        begun = [offer.ticket.id for offer in site.line.turn(0.0, views).offers]
        assert "".join(begun) == starts
        for name in begun:
            site.line.missed(name, (), 0.0)


@pytest.mark.parametrize(
    "two", [Demand(2, 100, 200), Demand(1, 3_000, 3_100)], ids=["two-choices", "a-longer-prompt"]
)
def test_who_needs_one_place_is_not_kept_where_one_that_needs_two_is(two: Demand) -> None:
    allowing = replace(PATIENT, waiting=replace(PATIENT.waiting, passes_max=1))
    site = Site(knee=4)
    site.loads["light"] = Load(seqs=3, share=750_000)
    site.enter("two", 0.0, traffic_class=allowing, demand=two)
    site.enter("one", 0.1, traffic_class=allowing, demand=Demand(1, 100, 3_100))

    assert site.start(0.1) == ["one"]


def test_being_passed_on_one_backend_is_counted_once() -> None:
    allowing = replace(PATIENT, waiting=replace(PATIENT.waiting, passes_max=3))
    site = Site(knee=4)
    pools = {**site.policy.pools, "light": Pool("light", ("light", "push"))}
    site.policy = replace(site.policy, pools=pools)
    site.loads = {"light": Load(seqs=3, share=750_000), "push": Load(seqs=8, share=800_000)}
    big = Demand(seqs=3, prompt_tokens=100, total_tokens=200)
    site.enter("big", 0.0, traffic_class=allowing, demand=big)
    for number in range(4):
        site.enter(f"small-{number}", 0.1, traffic_class=allowing)

    assert site.start(0.1) == ["small-0", "small-1", "small-2"]


def test_a_conversation_goes_where_it_has_been_seen() -> None:
    site = Site(knee=10)
    pools = {**site.policy.pools, "light": Pool("light", ("light", "push"))}
    site.policy = replace(site.policy, pools=pools)
    for number, seen in enumerate(({}, {"light": 1.0}, {"light": 1.0})):
        site.enter(str(number), 0.1 * number, traffic_class=PATIENT, prefix_shares=seen)
    site.start(0.4)

    assert [site.taken[str(number)][0] for number in range(3)] == ["light", "light", "light"]


READ_IN_A_SECOND = PerfModel(t_fixed=0, t_mem=0, kv_read=0, kv_span=0, t_seq=0, t_tok=1e-4, t_attn=0, sharp=1)
"""10,000 tokens."""


def two_that_read(site: Site) -> Site:
    """Return the site with one pool of two backends, of 1 and 10 places, that read 10,000 tokens a second."""
    site.backends = {name: replace(backend, perf=READ_IN_A_SECOND) for name, backend in site.backends.items()}
    pools = {**site.policy.pools, "light": Pool("light", ("light", "push"))}
    site.policy = replace(site.policy, pools=pools, backends=site.backends)
    return site


def three_that_read() -> Site:
    """Return a site with one pool of three backends, of 1, 1 and 10 places: "light", "other" and "push"."""
    site = Site()
    site.backends = {"light": site.backends["light"], "other": site.backends["light"], **site.backends}
    site.backends["other"] = replace(site.backends["light"], id="other", url="http://other")
    site.status, site.loads = dict.fromkeys(site.backends, UP), dict.fromkeys(site.backends, Load())
    two_that_read(site)
    pools = {**site.policy.pools, "light": Pool("light", ("light", "other", "push"))}
    site.policy = replace(site.policy, pools=pools)
    return site


@pytest.mark.parametrize(
    ("prompt", "max_wait_s", "shares", "until"),
    [
        (10_000, 20.0, {"light": 0.8}, 2.1),  # 0.8 s of prefill, 2.4 s more if the other one were full
        (10_000, 20.0, {"push": 0.8}, None),
        (10_000, 1.0, {"light": 0.8}, 1.5),  # half of what it may wait
        (900, 20.0, {"light": 0.8}, None),  # nothing of it counts as cached
        (10_000, 20.0, {}, None),
    ],
    ids=["saves-a-prefill", "has-room", "has-no-time", "is-short", "is-new"],
)
def test_a_conversation_waits_for_its_busy_backend_as_long_as_that_pays(
    prompt: int, max_wait_s: float, shares: Mapping[str, float], until: float | None
) -> None:
    site = two_that_read(Site())
    site.loads["light"], site.loads["push"] = Load(1, 1_000_000), Load(1, 125_000)
    waiting = TrafficClass("chat", ("light",), waiting=Waiting(max_wait_s=max_wait_s))
    assert site.enter("turn", 1.0, traffic_class=waiting, prompt=prompt, prefix_shares=shares) is None

    turn = site.turn(1.0)
    if until is None:
        assert [offer.candidates[0].backend for offer in turn.offers] == ["push"]
        return
    assert turn.offers == []
    assert turn.next_turn_at == pytest.approx(until)
    assert [one.stays_for for one in site.line.waiters(1.0)] == ["light"]
    assert site.start(until - 0.01) == []
    assert site.start(until) == ["turn"]
    assert site.taken["turn"][0] == "push"


@pytest.mark.parametrize(
    "asked",
    [
        Demand(seqs=1, prompt_tokens=900, total_tokens=1_000),
        Demand(seqs=1, prompt_tokens=10_000, total_tokens=10_100, images=1),
    ],
    ids=["is-short", "has-an-image"],
)
def test_a_conversation_of_which_nothing_counts_as_cached_does_not_wait_for_a_faster_backend(
    asked: Demand,
) -> None:
    site = two_that_read(Site())
    slower = replace(READ_IN_A_SECOND, t_tok=2e-4)
    site.backends["light"] = replace(site.backends["light"], modalities=Modalities(images_max=None))
    site.backends["push"] = replace(site.backends["push"], perf=slower)
    site.policy = replace(site.policy, backends=site.backends)
    site.loads["light"] = Load(1, 1_000_000)
    site.enter("turn", traffic_class=PATIENT, demand=asked, prefix_shares={"light": 0.8})

    assert site.start() == ["turn"]
    assert site.taken["turn"][0] == "push"


def test_what_a_conversation_waits_before_another_has_room_costs_it_nothing() -> None:
    """With more callers than slots, all wait for longer than a prefill takes before any slot is free."""
    site = two_that_read(Site())
    site.loads["light"], site.loads["push"] = Load(1, 1_000_000), Load(10, 1_000_000)
    site.enter("turn", 0.0, traffic_class=PATIENT, prompt=10_000, prefix_shares={"light": 0.9})
    assert site.start(20.0) == []

    site.loads["push"] = Load(9, 900_000)
    turn = site.turn(20.0)
    assert not turn.offers
    assert turn.next_turn_at == pytest.approx(20.0 + 3.7 * 0.9)
    site.loads["push"] = Load(10, 1_000_000)
    assert site.start(22.0) == []
    site.loads["push"] = Load(9, 900_000)
    assert site.start(23.0) == []  # its time goes on, and does not begin anew
    assert site.start(23.4) == ["turn"]


def test_however_many_wait_for_their_backend_others_start_where_there_is_room() -> None:
    site = two_that_read(Site())
    site.loads = {"light": Load(1, 1_000_000), "push": Load(8, 800_000)}
    for number in range(2 * LOOKAHEAD):
        site.enter(f"turn-{number}", 0.0, traffic_class=PATIENT, prompt=10_000, prefix_shares={"light": 0.9})
    site.enter("chat", 0.0, traffic_class=PATIENT)

    started = site.start(0.1)
    assert started == [f"turn-{STAYING_MAX}", f"turn-{STAYING_MAX + 1}"]
    assert [one.stays_for for one in site.line.waiters(0.1)].count("light") == STAYING_MAX


def test_a_conversation_that_waits_for_its_backend_starts_there_before_a_later_request() -> None:
    site = two_that_read(Site())
    site.loads["light"], site.loads["push"] = Load(1, 1_000_000), Load(8, 800_000)
    site.enter("turn", 0.1, traffic_class=PATIENT, prompt=10_000, prefix_shares={"light": 0.9})
    site.enter("short", 0.1, traffic_class=PATIENT, prefix_shares={"light": 0.9})  # has nothing cached

    assert site.start(0.2) == ["short"]
    site.enter("later", 0.3, traffic_class=PATIENT)
    site.loads["light"] = Load()
    assert site.start(0.3) == ["turn", "later"]
    assert [site.taken[name][0] for name in ("short", "turn", "later")] == ["push", "light", "push"]


@pytest.mark.parametrize(
    "changes",
    [
        {"status": replace(UP, state=State.EJECTED)},
        {"status": replace(UP, state=State.DRAINING)},
        {"away": (Exclusion.SWAPPED_OUT, "its box serves another model")},
    ],
    ids=["ejected", "draining", "swapped-out"],
)
def test_a_conversation_does_not_wait_for_a_backend_that_is_out(changes: dict[str, Any]) -> None:
    site = two_that_read(Site())
    site.enter("turn", traffic_class=PATIENT, prompt=10_000, prefix_shares={"light": 0.9})
    views = dict(site.views())
    views["light"] = replace(views["light"], **changes)

    assert [offer.candidates[0].backend for offer in site.line.turn(0.0, views).offers] == ["push"]


def test_a_conversation_that_has_spilled_does_not_wait_for_the_later_pool() -> None:
    site = two_that_read(Site())
    site.policy = replace(site.policy, pools={**site.policy.pools, "light": Pool("light", ("light",))})
    site.loads["push"] = Load(10, 1_000_000)
    two_pools = replace(PATIENT, pools=("light", "push"))
    site.enter("turn", traffic_class=two_pools, prompt=10_000, prefix_shares={"push": 0.9})

    assert site.start() == ["turn"]
    assert site.taken["turn"][0] == "light"


def test_a_conversation_does_not_wait_for_a_later_pool_that_is_held_for_another_either() -> None:
    site = two_that_read(Site())
    site.policy = replace(site.policy, pools={**site.policy.pools, "light": Pool("light", ("light",))})
    site.loads["push"] = Load(5, 500_000)
    six = Demand(seqs=6, prompt_tokens=100, total_tokens=200)
    site.enter("before", traffic_class=replace(PATIENT, name="six", pools=("push",)), demand=six)
    two_pools = replace(PATIENT, pools=("light", "push"))
    site.enter("turn", 0.1, traffic_class=two_pools, prompt=10_000, prefix_shares={"push": 0.9})

    assert site.start(0.1) == ["turn"]
    assert site.taken["turn"][0] == "light"


def test_a_conversation_starts_on_whichever_of_those_that_have_it_is_free_first() -> None:
    site = three_that_read()
    site.loads = {"light": Load(1, 1_000_000), "other": Load(1, 1_000_000), "push": Load()}
    seen = {"light": 0.9, "other": 0.8}
    site.enter("turn", traffic_class=PATIENT, prompt=10_000, prefix_shares=seen)
    assert site.start(0.1) == []
    assert [one.stays_for for one in site.line.waiters(0.1)] == ["light"]

    site.loads["other"] = Load()
    assert site.start(0.2) == ["turn"]
    assert site.taken["turn"][0] == "other"


@pytest.mark.parametrize(
    "limited",
    [{"status": replace(UP, state=State.PROBATION)}, {"share_max": 250_000}, {"kv_taken": 900}],
    ids=["probation", "tpot-target", "kv-taken-by-others"],
)
def test_a_conversation_starts_where_it_is_known_once_that_may_take_more(limited: dict[str, Any]) -> None:
    site = two_that_read(Site(knee=8))
    formula = KvFormula(sliding_layers=0, global_layers=1)
    capacity = replace(site.backends["light"].capacity, kv=formula, kv_blocks=1_000)
    site.backends["light"] = replace(site.backends["light"], capacity=capacity)
    site.policy = replace(site.policy, backends=site.backends)
    site.loads["light"] = Load(2, 250_000, kv_blocks=300)
    site.enter("turn", traffic_class=PATIENT, prompt=10_000, prefix_shares={"light": 0.9})
    views = dict(site.views())
    assert not site.line.turn(0.1, {**views, "light": replace(views["light"], **limited)}).offers
    assert [one.stays_for for one in site.line.waiters(0.1)] == ["light"]

    assert site.start(0.2) == ["turn"]
    assert site.taken["turn"][0] == "light"


@pytest.mark.parametrize(
    ("gates", "others"),
    [
        (Gates(prefill_s=0.6), Load(1, 500_000, prefill_ms=900)),
        (Gates(long_seqs=1), Load(2, 500_000, long_seqs=2)),  # two answers to one document
    ],
    ids=["all-of-it-is-cached", "it-is-short"],
)
def test_a_conversation_starts_on_its_backend_whatever_is_full_there_that_it_does_not_use(
    gates: Gates, others: Load
) -> None:
    site = two_that_read(Site(knee=4))
    pools = {**site.policy.pools, "light": replace(site.policy.pools["light"], gates=gates)}
    site.policy = replace(site.policy, pools=pools)
    site.loads["light"] = replace(others, share=1_000_000)
    site.enter("turn", traffic_class=PATIENT, prompt=10_000, prefix_shares={"light": 1.0})
    assert site.start(0.1) == []
    assert [one.stays_for for one in site.line.waiters(0.1)] == ["light"]

    site.loads["light"] = others
    assert site.start(0.2) == ["turn"]
    assert site.taken["turn"][0] == "light"


def test_a_conversation_that_has_waited_for_its_backend_starts_there_although_another_is_emptier() -> None:
    site = two_that_read(Site())
    site.loads = {"light": Load(1, 1_000_000), "push": Load()}
    site.enter("turn", traffic_class=PATIENT, prompt=10_000, prefix_shares={"light": 0.9})
    assert site.start(0.1) == []

    site.loads["light"] = Load()
    assert site.start(0.2) == ["turn"]
    assert site.taken["turn"][0] == "light"


def test_a_conversation_that_has_waited_for_a_backend_in_doubt_by_now_starts_on_another() -> None:
    site = two_that_read(Site())
    site.loads = {"light": Load(1, 1_000_000), "push": Load()}
    site.enter("turn", traffic_class=PATIENT, prompt=10_000, prefix_shares={"light": 0.9})
    assert site.start(0.1) == []

    site.loads["light"], site.status["light"] = Load(), replace(UP, state=State.PROBATION)
    assert site.start(0.2) == ["turn"]
    assert site.taken["turn"][0] == "push"


def test_who_waits_learns_that_a_backend_has_lost_its_conversation() -> None:
    site = two_that_read(Site())
    site.loads["light"], site.loads["push"] = Load(1, 1_000_000), Load(1, 125_000)
    site.enter("turn", traffic_class=PATIENT, prompt=10_000, prefix_shares={"light": 0.9})
    assert site.start(0.1) == []
    site.line.forget_prefixes("light")

    assert site.line.waiters(0.1)[0].stays_for == ""
    assert site.start(0.2) == ["turn"]
    assert site.taken["turn"][0] == "push"


def test_whose_offered_slot_was_gone_learns_that_too() -> None:
    site = two_that_read(Site(knee=8))
    site.enter("turn", traffic_class=PATIENT, prompt=10_000, prefix_shares={"light": 0.9})
    (offer,) = site.turn().offers
    site.line.forget_prefixes("light")
    site.line.missed("turn", [one.backend for one in offer.candidates], 0.0)
    site.loads["light"] = Load(2, 250_000)

    assert site.start(1.0) == ["turn"]
    assert site.taken["turn"] == ("push", Load(1, 100_000, prefill_ms=1_000))


@pytest.mark.parametrize(
    ("prompt", "seen", "offered", "until"),
    [
        (15_000, {"light": 0.9}, {"light"}, 0.1 + 2.5 * 1.35),
        (15_000, {"light": 0.9, "other": 0.9}, {"light", "other"}, 0.1 + 2.5 * 1.35),
        (15_000, {}, {"light", "other", "push"}, None),
        (900, {"light": 0.9}, {"light", "other", "push"}, None),
    ],
    ids=["one-has-it", "two-have-it", "new", "short"],
)
@pytest.mark.parametrize("at_once", [True, False])
def test_a_conversation_whose_slot_was_gone_waits_as_if_it_had_been_so_before(
    prompt: int, seen: Mapping[str, float], offered: set[str], until: float | None, at_once: bool
) -> None:
    """Another gateway has taken it. To fall back on any other slot, it would be read again there."""
    site = three_that_read()
    site.loads["push"] = Load(5, 500_000)
    ticket = site.ticket("turn", traffic_class=PATIENT, prompt=prompt, prefix_shares=seen)
    views = selection.with_shares(site.views(), seen)
    if at_once:
        ranked = selection.ranking(site.policy, PATIENT, ticket.demand, views)
        offer = site.line.offer_at_once(ticket, ranked.eligible, 0.0)
    else:
        site.line.enter(ticket, 0.0)
        (offer,) = site.turn().offers
    assert offer is not None
    assert {one.backend for one in offer.candidates} == offered
    if until is not None:
        site.line.missed("turn", list(offered), 0.0)
        site.loads |= dict.fromkeys(offered, Load(1, 1_000_000))
        assert site.start(0.1) == []
        assert site.start(until - 0.01) == []
        assert site.start(until) == ["turn"]


def test_a_conversation_waits_for_its_backend_while_that_is_held_for_another() -> None:
    site = two_that_read(Site(knee=8))
    site.policy = replace(site.policy, pools={**site.policy.pools, "only": Pool("only", ("light",))})
    site.loads = {"light": Load(7, 875_000), "push": Load(9, 900_000)}
    two_seqs = Demand(seqs=2, prompt_tokens=100, total_tokens=200)
    site.enter("before", traffic_class=replace(PATIENT, name="only", pools=("only",)), demand=two_seqs)
    fields = {"traffic_class": PATIENT, "prompt": 1_500, "prefix_shares": {"light": 0.9}}
    site.enter("turn", 0.1, **fields)

    turn = site.turn(0.1)
    assert not turn.offers
    assert turn.next_turn_at == pytest.approx(0.1 + 3.7 * 0.135)
    site.line.leave("before")
    assert site.start(0.1) == ["turn"]
    assert site.taken["turn"][0] == "light"


def test_a_conversation_that_waits_for_its_backend_is_not_passed_there_by_smaller_ones() -> None:
    site = two_that_read(Site(knee=8))
    site.policy = replace(site.policy, pools={**site.policy.pools, "only": Pool("only", ("light",))})
    site.loads = {"light": Load(7, 875_000), "push": Load(5, 500_000)}
    site.enter("turn", traffic_class=PATIENT, prompt=10_000, prefix_shares={"light": 0.9})
    site.enter("small", 0.1, traffic_class=replace(PATIENT, name="only", pools=("only",)))

    assert site.start(0.2) == []
    assert [one.stays_for for one in site.line.waiters(0.2)] == ["light", ""]
    site.loads["light"] = Load(6, 750_000)
    assert site.start(0.3) == ["turn"]
    assert site.taken["turn"][0] == "light"


def test_a_conversation_that_waits_for_a_backend_that_is_configured_no_more_starts_on_another() -> None:
    site = two_that_read(Site())
    site.loads["light"] = Load(1, 1_000_000)
    site.enter("turn", traffic_class=PATIENT, prompt=10_000, prefix_shares={"light": 0.9})
    assert site.start(0.1) == []

    del site.backends["light"]
    assert site.start(0.2) == ["turn"]
    assert site.taken["turn"][0] == "push"


def test_a_long_conversation_waits_for_no_long_prefill_where_it_is_cached() -> None:
    site = Site()
    pools = {**site.policy.pools, "push": Pool("push", ("push",), gates=Gates(long_prefills=1))}
    site.policy = replace(site.policy, pools=pools)
    site.enter("document", traffic_class=LONG, prompt=50_000)
    assert site.start() == ["document"]
    site.enter("new", 0.1, traffic_class=LONG, prompt=50_000)
    site.enter("next-turn", 0.2, traffic_class=LONG, prompt=60_000, prefix_shares={"push": 0.9})

    assert site.start(0.3) == ["next-turn"]
    assert site.start(0.4) == []

    site.answered("document")
    assert site.start(0.5) == ["new"]


def test_jobs_come_after_all_others_of_their_class() -> None:
    site = Site()
    site.enter("running")
    site.start()
    site.enter("job", 0.0, traffic_class=PATIENT, is_job=True)
    site.enter("chat", 0.1, traffic_class=PATIENT)
    site.enter("other-job", 0.2, traffic_class=PATIENT, is_job=True)
    site.enter("late-chat", 0.3, traffic_class=PATIENT)

    assert site.served(["other-job"], 0.4) == ["chat", "late-chat", "job", "other-job"]


def test_a_job_that_waits_keeps_no_slot_from_others_and_holds_it_against_jobs() -> None:
    site = Site(knee=8)
    for number in range(6):
        site.enter(f"job-{number}", traffic_class=PATIENT, is_job=True)
    site.start()
    site.enter("big-job", 0.1, traffic_class=PATIENT, is_job=True, prompt=3_000)  # needs two of seven
    site.enter("small-job", 0.2, traffic_class=PATIENT, is_job=True)
    assert site.start(0.3) == []

    site.enter("chat", 0.4)
    assert site.start(0.4) == ["chat"]
    site.end("job-0", 0.5)
    assert site.start(0.5) == []
    site.end("chat", 0.6)
    assert site.start(0.6) == ["big-job"]


def test_a_job_that_waits_keeps_no_slot_from_those_that_were_sent_behind_either() -> None:
    demoting = bounded(when_late=WhenLate.DEMOTE)
    jobs = replace(demoting, waiting=patient(demoting.waiting))
    site = Site(knee=8)
    for number in range(7):
        site.enter(f"job-{number}", traffic_class=jobs, is_job=True)
    site.start()
    site.enter("chat", traffic_class=demoting)
    site.start()
    site.enter("job", traffic_class=jobs, is_job=True)
    site.enter("late", traffic_class=demoting)
    site.turn(1.5)

    site.end("chat", 1.6)

    assert site.start(1.6) == ["late"]


@pytest.mark.parametrize("priority", [0, 1])
def test_the_jobs_that_wait_are_not_before_others(priority: int) -> None:
    """Otherwise a chat would be refused for a wait that it does not have."""
    site = Site(knee=8)
    for number in range(7):
        site.enter(f"job-{number}", traffic_class=PATIENT, is_job=True)
    site.start()
    site.end("job-0", 60.0)
    jobs = replace(PATIENT, name="jobs", priority=priority)
    for number in range(2):
        site.enter(f"waiting-{number}", 60.0, traffic_class=jobs, is_job=True, prompt=3_000)
    assert site.start(60.0) == []

    assert site.enter("chat", 60.0) is None
    assert site.line.position("chat") == 1
    assert site.start(60.0) == ["chat"]


def two_reads_on_push(*, light: Load) -> Site:
    """Push may read two long prompts at once, and reads one."""
    site = Site(knee=64)
    pools = {
        "light": Pool("light", ("light",), gates=Gates(long_prompt_tokens=100_000)),
        "push": Pool("push", ("push",), gates=Gates(long_prefills=2)),
    }
    site.policy = replace(site.policy, pools=pools)
    reads = Load(seqs=1, share=admission.WHOLE // 10, long_seqs=1, long_unanswered=1)
    site.loads = {"light": light, "push": reads}
    return site


def test_a_long_one_is_not_kept_where_a_short_one_of_its_class_is() -> None:
    """Where it would spill to, the short one would wait behind long prompts."""
    site = two_reads_on_push(light=Load(seqs=64, share=admission.WHOLE))
    everything = replace(CHAT, waiting=Waiting(max_wait_s=600, ttft_target_s=60))
    site.enter("short", 0.0, traffic_class=everything)
    site.enter("long", 1.0, traffic_class=everything, prompt=50_000)
    assert site.start(1.0) == ["long"]


def test_several_choices_of_one_prompt_are_not_kept_where_several_prompts_are() -> None:
    site = two_reads_on_push(light=Load())
    for name, prompts in (("two-prompts", 2), ("two-choices", 1)):
        demand = Demand(seqs=2, prompt_tokens=50_000, total_tokens=50_100, prompts=prompts)
        site.line.enter(site.ticket(name, 0.0, traffic_class=LONG, demand=demand), 0.0)
    assert site.start(0.0) == ["two-choices"]


def test_the_line_of_another_class_does_not_pass_it_either() -> None:
    site = Site(knee=4)
    for number in range(3):
        site.enter(f"short-{number}", traffic_class=PATIENT)
    site.start()
    site.enter("big", 0.1, traffic_class=PATIENT, prompt=3_000)
    site.enter("small", 0.2, traffic_class=TrafficClass("other", ("light",), priority=-1))

    assert site.start(0.3) == []


@pytest.mark.parametrize("passes", [1, 2])
def test_a_class_may_allow_being_passed_that_often(passes: int) -> None:
    allowing = replace(PATIENT, waiting=replace(PATIENT.waiting, passes_max=passes))
    site = Site(knee=4)
    for number in range(3):
        site.enter(f"short-{number}", traffic_class=allowing)
    site.start()
    site.enter("big", 0.1, traffic_class=allowing, prompt=3_000)
    for number in range(3):
        site.enter(f"small-{number}", 0.2, traffic_class=allowing)

    passed = []
    for number in range(2):
        passed += site.start(0.3)
        site.end(f"short-{number}", 0.3)
    passed += site.start(0.3)

    assert passed.index("big") == passes if "big" in passed else passes == 2
    assert [name for name in passed if name.startswith("small")] == [f"small-{n}" for n in range(passes)]


def test_a_document_that_waits_for_another_to_be_read_blocks_no_chat() -> None:
    site = Site()
    short_on_push = TrafficClass("other", ("push",))
    site.enter("reading", traffic_class=LONG, prompt=50_000)
    assert site.start() == ["reading"]

    site.enter("next", 0.1, traffic_class=LONG, prompt=50_000)
    site.enter("chat", 0.2, traffic_class=short_on_push)

    assert site.start(0.3) == ["chat"]
    site.answered("reading")
    assert site.start(0.4) == ["next"]


def test_a_chat_does_not_spill_while_a_document_waits_there() -> None:
    site = Site()
    site.enter("running", traffic_class=CHAT)
    site.start()
    site.enter("reading", traffic_class=LONG, prompt=50_000)
    site.start()
    site.enter("next", traffic_class=LONG, prompt=50_000)
    site.enter("chat", 0.1, traffic_class=CHAT)
    assert site.line.long_waiting() == {"push": 1}
    assert site.start(0.1) == []

    site.line.leave("next")
    site.answered("reading")

    assert site.line.long_waiting() == {}
    assert site.start(0.2) == ["chat"]
    assert site.taken["chat"][0] == "push"


def test_a_document_keeps_spills_only_from_backends_that_could_take_it() -> None:
    site = Site()
    site.policy = replace(site.policy, pools={**site.policy.pools, "both": Pool("both", ("light", "push"))})
    site.loads["push"] = Load(seqs=10, share=admission.WHOLE)
    scan = Demand(seqs=1, prompt_tokens=50_000, total_tokens=50_100, images=1)
    site.enter("scan", traffic_class=replace(LONG, pools=("both",)), demand=scan)
    site.enter("chat", 0.1, traffic_class=TrafficClass("chat", ("push", "light")))

    assert site.line.long_waiting() == {"push": 1}  # light takes no images
    assert site.start(0.1) == ["chat"]
    assert site.taken["chat"][0] == "light"

    site.line.leave("scan")
    assert site.line.long_waiting() == {}


def with_two_push(*, window: int | None = None) -> Site:
    """A site with another push server, `push-1`, that reports this window."""
    site = Site()
    site.backends["push-1"] = replace(site.backends["push"], id="push-1", url="http://push-1")
    pools = {**site.policy.pools, "push": Pool("push", ("push", "push-1"), gates=Gates())}
    site.policy = replace(site.policy, pools=pools, backends=site.backends)
    site.status["push-1"] = replace(UP, context_tokens=window)
    site.loads["push-1"] = Load()
    return site


def test_once_a_document_starts_chats_spill_to_the_other_servers_it_waited_for() -> None:
    site = with_two_push()
    site.enter("running", traffic_class=CHAT)
    for name in ("reading", "reading too"):
        site.enter(name, traffic_class=LONG, prompt=50_000)
    assert len(site.start()) == 3
    site.enter("next", traffic_class=LONG, prompt=50_000)
    site.enter("chat", traffic_class=CHAT)
    assert site.start() == []
    site.answered("reading")
    site.answered("reading too")

    turn = site.turn(0.5)
    (offer,) = turn.offers
    site.loads[offer.candidates[0].backend] += offer.candidates[0].claim
    site.line.started("next", offer.candidates[0].backend, 0.5)

    assert turn.next_turn_at == 0.5
    assert site.start(0.5) == ["chat"]
    assert {site.taken["chat"][0], offer.candidates[0].backend} == {"push", "push-1"}


def test_a_document_does_not_keep_spills_from_a_server_that_came_up_with_a_smaller_window() -> None:
    site = with_two_push()
    site.enter("running", traffic_class=CHAT)
    site.start()
    site.loads["push"] = site.loads["push-1"] = Load(seqs=10, share=admission.WHOLE)
    site.enter("document", traffic_class=LONG, prompt=50_000)
    site.enter("chat", traffic_class=CHAT)
    assert site.start() == []
    assert site.line.long_waiting() == {"push": 1, "push-1": 1}

    site.status["push-1"], site.loads["push-1"] = replace(UP, context_tokens=32_768), Load()

    assert site.start(0.1) == ["chat"]
    assert site.line.long_waiting() == {"push": 1}
    site.line.leave("document")
    assert site.line.long_waiting() == {}


def test_who_does_not_fit_a_smaller_window_is_told_though_others_wait_for_that_server() -> None:
    site = with_two_push(window=32_768)
    site.status["push"] = replace(UP, state=State.DOWN)
    site.loads["push-1"] = Load(seqs=10, share=admission.WHOLE)
    site.enter("fits", traffic_class=LONG, prompt=20_000)
    site.enter("does not", 0.1, traffic_class=LONG, prompt=50_000)

    (refused,) = site.turn(0.1).refused

    assert (refused.id, refused.reason) == ("does not", Reason.NO_BACKEND)
    assert site.line.position("fits") == 1


@pytest.mark.parametrize(("reserve", "started"), [(0.125, ["chat"]), (0.0, [])])
def test_a_long_job_that_waits_keeps_spills_out_only_where_jobs_leave_nothing_free(
    reserve: float, started: list[str]
) -> None:
    site = Site()
    steps = (KneeStep(16_000, 24), KneeStep(None, 3))
    push = site.backends["push"] = replace(site.backends["push"], capacity=Capacity(262_144, steps))
    pool = Pool("push", ("push",), gates=Gates(), jobs=JobRoom(reserve=reserve))
    site.policy = replace(
        site.policy,
        pools={**site.policy.pools, "push": pool},
        backends={**site.policy.backends, "push": push},
    )
    documents = replace(LONG, name="documents")
    site.enter("running", traffic_class=CHAT)
    site.start()
    for name in ("document-0", "document-1"):
        site.enter(name, traffic_class=documents, prompt=50_000)
        site.start()
        site.answered(name)
    site.loads["push"] += Load(1, admission.WHOLE // 24)
    site.enter("job", traffic_class=LONG, prompt=50_000, is_job=True)
    assert site.start() == []

    site.enter("chat", 0.1, traffic_class=CHAT)

    assert site.start(0.1) == started
    site.line.leave("job")
    assert site.line.long_waiting() == {}


def test_what_is_waited_for_is_every_backend_that_those_who_wait_may_go_to() -> None:
    site = Site()
    assert site.line.waited_for() == frozenset()

    site.enter("chat", traffic_class=CHAT)
    assert site.line.waited_for() == {"light", "push"}
    assert site.start() == ["chat"]
    assert site.line.waited_for() == frozenset()
    site.enter("document", traffic_class=LONG, prompt=50_000)
    assert site.line.waited_for() == {"push"}


def test_a_chat_does_not_spill_while_a_document_waits_there_at_another_gateway() -> None:
    site = Site()
    site.enter("running", traffic_class=CHAT)
    site.start()
    site.line.note_long_waiting({"push": 2, "of another fleet": 1})
    site.enter("chat", 0.1, traffic_class=CHAT)
    assert site.line.long_waiting()["push"] == 2
    assert site.line.long_waiting_here() == {}
    assert site.start(0.1) == []

    site.line.note_long_waiting({})

    assert site.start(0.2) == ["chat"]


# ------------------------------------------------------------------ large requests of other processes


def of_two(large: str = "large", *, is_job: bool = False, at: float = 0.0, waited_s: float = 0.0) -> Site:
    """Return a site with two of four places taken, where a request for all four waits."""
    site = Site(knee=4)
    site.loads["light"] = Load(seqs=2, share=500_000)
    demand = Demand(seqs=4, prompt_tokens=100, total_tokens=200, is_job=is_job)
    site.enter(large, at, demand=demand, traffic_class=PATIENT, waited_s=waited_s)
    assert site.start(at) == []
    return site


def test_a_large_request_that_waits_is_told_to_others_after_a_second() -> None:
    site = of_two()
    assert site.line.blocked_here(0.9) == {}
    assert site.line.blocked_here(1.5) == {"light": Blocked(1.5, Load(seqs=4, share=1_000_000))}

    site.loads["light"] = Load()
    assert site.start(2.0) == ["large"]

    assert site.line.blocked_here(2.0) == {}


@pytest.mark.parametrize(("total_tokens", "is_told"), [(17_600, True), (12_800, False)])
def test_what_is_large_where_no_blocks_are_left_is_told_by_its_blocks(
    total_tokens: int, is_told: bool
) -> None:
    """It takes no more of the knee than those that run, which have 400 blocks each."""
    site = Site(knee=4)
    formula = KvFormula(sliding_layers=0, global_layers=1)
    capacity = replace(site.backends["light"].capacity, kv=formula, kv_blocks=1_000, kv_budget=1.0)
    site.backends["light"] = replace(site.backends["light"], capacity=capacity)
    site.policy = replace(site.policy, backends=site.backends)
    site.loads["light"] = Load(2, 500_000, kv_blocks=800)
    demand = Demand(seqs=1, prompt_tokens=100, total_tokens=total_tokens)
    site.enter("waits", demand=demand, traffic_class=PATIENT)
    assert site.start() == []

    claim = Load(1, 250_000, kv_blocks=formula.blocks(total_tokens))
    assert site.line.blocked_here(1.5) == ({"light": Blocked(1.5, claim)} if is_told else {})


def test_of_two_large_ones_the_one_that_comes_first_is_told() -> None:
    site = of_two()
    three = Demand(seqs=3, prompt_tokens=100, total_tokens=200)
    site.enter("second", 0.5, demand=three, traffic_class=PATIENT)
    assert site.start(0.5) == []

    assert site.line.blocked_here(2.0) == {"light": Blocked(2.0, Load(seqs=4, share=1_000_000))}


@pytest.mark.parametrize("is_job", [False, True])
def test_what_any_end_makes_room_for_is_not_told_and_no_job(is_job: bool) -> None:
    site = of_two(is_job=True) if is_job else Site()
    if not is_job:
        site.enter("running")
        site.start()
        site.enter("next")
        assert site.start() == []

    assert site.line.blocked_here(5.0) == {}


def test_small_requests_leave_room_to_a_large_one_that_waits_at_another_gateway() -> None:
    there, here = of_two(at=1.0), Site(knee=4)
    here.loads["light"] = there.loads["light"]
    here.line.note_blocked(there.line.blocked_here(3.0), 3.0)
    assert here.line.offered() == {"light": Load(seqs=4, share=1_000_000)}
    here.enter("small", 3.0)
    assert here.start(3.0) == []

    here.line.note_blocked({}, 4.0)

    assert here.start(4.0) == ["small"]


def test_it_leaves_that_room_no_longer_than_it_hears_of_it() -> None:
    there, here = of_two(at=1.0), Site(knee=4)
    here.loads["light"] = there.loads["light"]
    here.line.note_blocked(there.line.blocked_here(3.0), 3.0)
    here.enter("small", 4.5, traffic_class=PATIENT)
    turn = here.turn(4.5)
    assert (turn.offers, turn.next_turn_at) == ([], 6.0)

    assert here.start(6.0) == ["small"]


@pytest.mark.parametrize(
    ("there_at", "waited_s", "first"), [(1.0, 0.0, "there"), (2.0, 0.0, "here"), (2.0, 1.0, "there")]
)
def test_of_two_large_ones_at_two_gateways_the_one_that_waits_longer_goes_first(
    there_at: float, waited_s: float, first: str
) -> None:
    there, here = of_two("there", at=there_at, waited_s=waited_s), of_two("here", at=1.5)
    here.line.note_blocked(there.line.blocked_here(4.0), 4.0)
    there.line.note_blocked(here.line.blocked_here(4.0), 4.0)
    here.loads["light"] = there.loads["light"] = Load()

    assert here.start(4.0) + there.start(4.0) == [first]


def test_a_spill_holds_nothing_of_the_other_pool() -> None:
    site = Site()
    site.enter("running", traffic_class=CHAT)
    site.start()
    site.loads["push"] = Load(seqs=9, share=900_000)
    site.enter("chat", 0.1, traffic_class=CHAT)  # what is left on push is kept for documents
    site.enter("doc", 0.2, traffic_class=LONG, prompt=50_000)

    assert site.start(0.3) == ["doc"]


def test_a_spill_holds_nothing_of_the_other_pool_though_that_is_at_its_knee_for_it() -> None:
    site = Site()
    site.enter("running", traffic_class=CHAT)
    site.start()
    site.loads["push"] = Load(seqs=9, share=900_000)
    two = Demand(seqs=2, prompt_tokens=100, total_tokens=200)
    site.status["light"] = replace(UP, state=State.DOWN)
    site.enter("chats", 0.1, traffic_class=CHAT, demand=two)
    site.enter("doc", 0.2, traffic_class=LONG, prompt=50_000)

    assert site.start(0.3) == ["doc"]


# ------------------------------------------------------------------ bounds and shedding


def bounded(**rules: object) -> TrafficClass:
    return TrafficClass("chat", ("light",), waiting=Waiting(**rules))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rules", "sizes", "reasons"),
    [
        pytest.param({"waiting_max": 2}, [1, 1, 1], [None, None, Reason.QUEUE_FULL], id="number"),
        pytest.param({"waiting_bytes_max": 10}, [5, 5, 1], [None, None, Reason.QUEUE_FULL], id="bytes"),
        pytest.param({"waiting_bytes_max": 10}, [50, 1], [None, Reason.QUEUE_FULL], id="one-always-may"),
    ],
)
def test_the_line_is_bounded(
    rules: dict[str, object], sizes: list[int], reasons: list[Reason | None]
) -> None:
    site = Site()
    verdicts = [
        site.enter(str(number), traffic_class=bounded(**rules), size_bytes=size)
        for number, size in enumerate(sizes)
    ]

    assert [verdict and verdict.reason for verdict in verdicts] == reasons


def test_who_comes_back_from_a_refusal_finds_its_place_though_others_have_filled_the_line() -> None:
    site = Site()
    few = bounded(waiting_max=2)
    for name in "ab":
        site.enter(name, traffic_class=few)

    assert site.enter("refused", traffic_class=few, refused=frozenset({"light"})) is None
    late = site.enter("late", traffic_class=few)
    assert late is not None and late.reason is Reason.QUEUE_FULL


def beside_a_full_one(rules: Mapping[str, object]) -> tuple[Site, TrafficClass]:
    """Return two that wait for the larger backend, as many as may, while the smaller one is idle."""
    site = Site(knee=10)
    light = site.backends["light"]
    site.backends["light"] = replace(light, capacity=replace(light.capacity, context_tokens=2_048))
    site.loads["push"] = Load(seqs=10, share=1_000_000)
    either = TrafficClass("all", ("light", "push"), waiting=Waiting(max_wait_s=60.0, **rules))  # type: ignore[arg-type]
    for name in ("large", "larger"):
        assert site.enter(name, traffic_class=either, prompt=10_000, size_bytes=5) is None
    assert site.start() == []
    return site, either


FULL = pytest.mark.parametrize(
    "rules", [{"waiting_max": 2}, {"waiting_bytes_max": 10}], ids=["number", "bytes"]
)


def came(site: Site, name: str, traffic_class: TrafficClass, prompt: int = 100) -> Reason | None:
    """Enter with a fresh ranking, as whoever is new does."""
    ticket = site.ticket(name, traffic_class=traffic_class, prompt=prompt, size_bytes=5)
    ranking = selection.ranking(ticket.policy, traffic_class, ticket.demand, site.views())
    foreseen = site.line.foresee(ticket, 0.0, site.views(), ranking).refused
    refused = site.line.enter(ticket, 0.0, ranking=ranking)
    assert (foreseen and foreseen.reason) == (refused and refused.reason)
    return None if refused is None else refused.reason


@FULL
def test_a_full_line_keeps_nobody_from_a_backend_for_which_none_of_it_waits(
    rules: dict[str, object],
) -> None:
    site, either = beside_a_full_one(rules)

    assert came(site, "small", either) is None
    assert came(site, "as large", either, prompt=10_000) is Reason.QUEUE_FULL
    assert site.start() == ["small"]


@FULL
def test_who_comes_to_a_full_line_and_finds_no_slot_is_refused_by_the_next_turn(
    rules: dict[str, object],
) -> None:
    site, either = beside_a_full_one(rules)
    site.loads["light"] = Load(seqs=9, share=900_000)
    assert [came(site, name, either) for name in ("first", "second", "third")] == [None] * 3

    turn = site.turn()
    assert [offer.ticket.id for offer in turn.offers] == ["first"]
    assert [(one.id, one.reason) for one in turn.refused] == [
        ("third", Reason.QUEUE_FULL),
        ("second", Reason.QUEUE_FULL),
    ]
    assert len(site.line) == 2


@FULL
def test_who_came_to_a_full_line_stays_if_there_is_a_place_meanwhile(rules: dict[str, object]) -> None:
    site, either = beside_a_full_one(rules)
    site.loads["light"] = Load(seqs=9, share=900_000)
    assert [came(site, name, either) for name in ("first", "second", "third")] == [None] * 3
    site.line.leave("large")

    turn = site.turn()
    assert [offer.ticket.id for offer in turn.offers] == ["first"]
    assert [one.id for one in turn.refused] == ["third"]
    site.loads["light"] = Load(seqs=10, share=1_000_000)
    site.line.started("first", "light", 0.0)
    assert not site.turn().refused
    assert {waiter.id for waiter in site.line.waiters(0.0)} == {"larger", "second"}


def test_a_backend_that_is_held_for_another_lets_nobody_into_a_full_line() -> None:
    site = Site(knee=10)
    site.loads["light"] = Load(seqs=1, share=500_000)
    few = bounded(waiting_max=1, max_wait_s=60.0)
    assert site.enter("wide", traffic_class=few, demand=Demand(6, 600, 1_200)) is None
    assert site.start() == []

    assert came(site, "narrow", few) is Reason.QUEUE_FULL


def test_no_more_come_into_a_full_line_than_a_turn_looks_at() -> None:
    site, either = beside_a_full_one({"waiting_max": 2})

    verdicts = [came(site, str(number), either) for number in range(LOOKAHEAD + 1)]

    assert verdicts == [None] * LOOKAHEAD + [Reason.QUEUE_FULL]


@FULL
def test_one_key_cannot_keep_the_others_out(rules: dict[str, object]) -> None:
    site = Site()
    one = bounded(**rules)

    def enter(name: str, key: str) -> Reason | None:
        refused = site.enter(name, traffic_class=one, key=key, size_bytes=5)
        return None if refused is None else refused.reason

    assert [enter(name, "greedy") for name in "abc"] == [None, None, Reason.QUEUE_FULL]
    assert [enter(name, "modest") for name in "de"] == [None, Reason.QUEUE_FULL]
    site.line.leave("d")
    assert [enter(name, "modest") for name in "fg"] == [None, Reason.QUEUE_FULL]
    assert [enter(key, key) for key in ("third", "fourth")] == [None, Reason.QUEUE_FULL]


def test_the_bounds_do_not_count_jobs() -> None:
    site = Site()
    both = bounded(waiting_max=2, waiting_bytes_max=10)
    jobs = replace(both, waiting=patient(both.waiting))
    for number in range(3):
        site.enter(f"job-{number}", traffic_class=jobs, is_job=True, size_bytes=50)

    verdicts = [site.enter(name, traffic_class=both, size_bytes=5) for name in ("a", "b", "c")]

    assert [verdict and verdict.reason for verdict in verdicts] == [None, None, Reason.QUEUE_FULL]


@FULL
def test_who_has_left_or_started_counts_no_longer_against_the_bounds(rules: dict[str, object]) -> None:
    site = Site()
    one = bounded(**rules)
    site.enter("runs", traffic_class=one, size_bytes=10)
    assert site.start() == ["runs"]
    site.enter("left", traffic_class=one, size_bytes=10)
    site.line.leave("left")
    site.enter("job", traffic_class=replace(one, waiting=patient(one.waiting)), is_job=True, size_bytes=99)
    site.line.leave("job")

    verdicts = [site.enter(name, traffic_class=one, size_bytes=5) for name in ("a", "b", "c")]

    assert [verdict and verdict.reason for verdict in verdicts] == [None, None, Reason.QUEUE_FULL]


@pytest.mark.parametrize(
    ("now", "reasons"),
    [(1.19, []), (1.2, [Reason.WAITED_TOO_LONG])],
    ids=["not-yet", "to-the-moment"],
)
def test_nobody_waits_longer_than_its_class_allows(now: float, reasons: list[Reason]) -> None:
    site = Site()
    site.enter("a")
    site.start()
    site.enter("b", 0.0)

    assert [refused.reason for refused in site.turn(now).refused] == reasons
    assert len(site.line) == 1 - len(reasons)


def test_one_that_is_tried_again_waits_no_longer_in_all() -> None:
    site = Site()
    site.enter("running")
    site.start()
    site.enter("again", 5.0, waited_s=0.9)

    assert site.turn(5.29).refused == []
    (refused,) = site.turn(5.3).refused
    assert refused.reason is Reason.WAITED_TOO_LONG
    assert refused.waited_s == pytest.approx(1.2)


def test_one_that_has_failed_somewhere_may_wait_as_long_as_any_other() -> None:
    site = Site()
    site.enter("running")
    site.start()
    site.enter("again", 5.0, failed=frozenset({"push"}))

    assert site.turn(6.19).refused == []
    assert [one.id for one in site.turn(6.2).refused] == ["again"]


def test_one_that_is_tried_again_is_sent_behind_and_refused_by_all_it_has_waited() -> None:
    demoting = bounded(when_late=WhenLate.DEMOTE, demoted_wait_s=10.0)
    site = Site()
    site.enter("running", traffic_class=demoting)
    site.start()
    site.enter("new", 5.0, traffic_class=demoting)
    site.enter("again", 5.0, traffic_class=demoting, arrived_at=0.0, waited_s=4.0)
    assert site.turn(5.0).refused == []
    assert site.line.position("again") == 2

    assert "again" not in [refused.id for refused in site.turn(10.9).refused]
    assert "again" in [refused.id for refused in site.turn(11.0).refused]


@pytest.mark.parametrize(
    "before", [{"failed": frozenset({"push"})}, {"refused": frozenset({"push"})}], ids=str
)
@pytest.mark.parametrize(("is_free", "outcome"), [(True, ["again"]), (False, [Reason.WAITED_TOO_LONG])])
def test_one_that_is_tried_again_gets_a_turn_though_its_wait_is_used_up(
    is_free: bool, outcome: Sequence[object], before: dict[str, Any]
) -> None:
    site = Site()
    if not is_free:
        site.enter("running")
        site.start()
    used_up = PLAIN.waiting.max_wait_s + 0.01
    assert site.enter("again", 5.0, arrived_at=0.0, waited_s=used_up, **before) is None

    begun = site.start(5.0)

    assert begun + [refused.reason for refused in site.turn(5.0 + 2 * AGAIN_WAIT_S).refused] == outcome


@pytest.mark.parametrize(
    ("when_late", "order", "refused_at"),
    [(WhenLate.DEMOTE, ["timely", "late"], 10.0), (WhenLate.REFUSE, ["late", "timely"], 2.0)],
)
def test_who_was_demoted_before_it_is_decided_again_stays_behind(
    when_late: WhenLate, order: Sequence[str], refused_at: float
) -> None:
    rules = bounded(max_wait_s=2.0, when_late=when_late, demoted_wait_s=10.0)
    site = Site()
    site.enter("running")
    site.start()
    late = site.ticket("late", traffic_class=rules, is_demoted=True)
    site.line.enter(late, 0.0, has_waited=True)
    site.enter("timely", 0.0, traffic_class=rules, arrived_at=0.5)

    assert [waiter.id for waiter in site.line.waiters(0.0)] == order
    assert site.line.is_demoted("late") == (when_late is WhenLate.DEMOTE)
    assert "late" not in [one.id for one in site.turn(refused_at - 0.1).refused]
    assert "late" in [one.id for one in site.turn(refused_at).refused]


def test_a_job_is_not_demoted_though_it_is_behind() -> None:
    site = Site()
    site.enter("running")
    site.start()
    site.enter("job", is_job=True)

    assert not site.line.is_demoted("job")


def test_a_callers_own_deadline_ends_the_wait_before() -> None:
    site = Site()
    site.enter("a")
    site.start()
    site.enter("b", 0.0, deadline=0.5)

    (refused,) = site.turn(0.5).refused

    assert refused.reason is Reason.DEADLINE
    assert refused.sentence() == "No slot became free before the request's own deadline (position 1)."


def test_a_callers_later_deadline_does_not_prolong_the_wait() -> None:
    site = Site()
    site.enter("a")
    site.start()
    site.enter("b", 0.0, deadline=5.0)

    assert [refused.reason for refused in site.turn(1.2).refused] == [Reason.WAITED_TOO_LONG]


def test_who_was_queued_before_is_let_in_again_whatever_the_bounds_and_the_forecast_say() -> None:
    site = Site()
    drained(site, 10.0)
    full = bounded(waiting_max=1)
    site.enter("a", 120.0, traffic_class=full)
    again = site.ticket("again", 120.0, traffic_class=full)

    assert site.line.enter(again, 120.0, has_waited=True) is None
    assert site.line.position("again") == 2


def drained(site: Site, residence_s: float) -> None:
    """Let ten requests have stayed `residence_s` each, and one more be running."""
    for number in range(10):
        at = number * residence_s
        site.enter(f"past-{number}", at)
        assert site.start(at) == [f"past-{number}"]
        site.end(f"past-{number}", at + residence_s)
    site.enter("running", 10 * residence_s)
    site.start(10 * residence_s)


def test_a_wait_that_is_known_to_be_too_long_is_refused_at_once_with_the_truth() -> None:
    patient = bounded(max_wait_s=15.0)
    site = Site()
    drained(site, 10.0)
    assert site.enter("next", 120.0, traffic_class=patient) is None
    site.turn(120.0)

    refused = site.enter("second", 120.0, traffic_class=patient)

    assert refused is not None
    assert (refused.reason, refused.position) == (Reason.WAIT_TOO_LONG, 2)
    assert refused.expected_wait_s == pytest.approx(20.0)
    assert refused.retry_after_s == pytest.approx(20.0)
    assert refused.sentence() == "A slot would become free too late (position 2, about 20.0 s to wait)."


@pytest.mark.parametrize(
    ("peers", "expected_wait_s"), [(0, 10.0), (1, 2.0), (4, 5.0), (19, 10.0)], ids=lambda one: f"{one:g}"
)
def test_a_forecast_counts_the_even_part_of_the_slots_that_other_processes_free(
    peers: int, expected_wait_s: float
) -> None:
    site = Site(knee=10)
    drained(site, 10.0)  # of ten that run for 10 s each, one is this process's
    site.loads["light"] = sum([site.loads["light"]] * 10, Load())
    site.line.note_peers(peers)
    site.enter("next", 120.0, traffic_class=bounded(max_wait_s=1.0))

    (refused,) = site.turn(120.0).refused

    assert refused.reason is Reason.WAIT_TOO_LONG
    assert refused.expected_wait_s == pytest.approx(expected_wait_s)
    site.turn(130.0)  # nobody waits: what the others run is not looked at any longer
    assert site.line.drains_per_s(130.0)["gemma", "chat"] == pytest.approx(1 / 10)


@pytest.mark.parametrize("start", ["in-a-turn", "at-once"])
def test_a_forecast_counts_the_slots_that_spilled_requests_free(start: str) -> None:
    """Eight chats that stay 2 s each have spilled to push, which leaves two slots to its own class."""
    site = Site()
    own = TrafficClass("own", ("push",), waiting=Waiting(max_wait_s=1.0))

    def begin(name: str, now: float, traffic_class: TrafficClass) -> None:
        if start == "at-once":
            assert in_one_step(site, name, now, traffic_class=traffic_class)
        else:
            site.enter(name, now, traffic_class=traffic_class)
            assert site.start(now) == [name]

    begin("past", 0.0, own)
    site.end("past", 50.0)
    for number in range(9):
        begin(f"chat-{number}", 50.0, CHAT)
    site.end("chat-8", 52.0)
    begin("chat-9", 52.0, CHAT)
    begin("own-0", 52.0, own)
    begin("own-1", 52.0, own)
    assert [backend for backend, _ in site.taken.values()].count("push") == 10

    assert site.enter("next", 52.0, traffic_class=own) is None
    assert not site.turn(52.0).refused
    assert site.line.drains_per_s(52.0) == {
        ("gemma", "chat"): pytest.approx(9 / 2),
        ("gemma", "own"): pytest.approx(8 / 2 + 2 / 50),
    }
    site.line.leave("next")
    for name in [name for name in site.taken if name.startswith("chat")]:
        site.end(name, 54.0)
    assert site.line.drains_per_s(90.0)["gemma", "own"] == pytest.approx(2 / 50)


def test_who_is_next_waits_for_a_slot_of_another_process() -> None:
    site = Site(knee=10)
    drained(site, 3.0)
    site.loads["light"] = sum([site.loads["light"]] * 10, Load())
    site.line.note_peers(1)

    assert site.enter("next", 35.0, traffic_class=bounded(max_wait_s=1.2)) is None
    assert not site.turn(35.0).refused
    site.loads["light"] = Load()
    assert site.start(35.3) == ["next"]


def test_one_that_has_waited_too_long_is_told_of_no_wait_to_come() -> None:
    patient = bounded(max_wait_s=15.0)
    site = Site()
    drained(site, 10.0)
    assert site.enter("next", 120.0, traffic_class=patient) is None

    (refused,) = site.turn(135.0).refused

    assert refused.reason is Reason.WAITED_TOO_LONG
    assert refused.expected_wait_s is not None
    assert refused.sentence() == "No slot became free within 15.0 s (position 1)."


def test_what_arrived_since_the_last_turn_is_judged_by_the_next_one() -> None:
    """A forecast says when slots become free, not whether one is free now."""
    site = Site(knee=8)
    drained(site, 10.0)
    verdicts = [site.enter(f"{number:02}", 120.0) for number in range(10)]

    turn = site.turn(120.0)

    assert verdicts == [None] * 10
    assert [offer.ticket.id for offer in turn.offers] == [f"{number:02}" for number in range(7)]
    assert [(refused.id, refused.reason) for refused in turn.refused] == [
        (name, Reason.WAIT_TOO_LONG) for name in ("07", "08", "09")
    ]


def test_nobody_is_refused_by_a_turn_since_which_slots_have_become_free() -> None:
    site = Site(knee=6)
    drained(site, 10.0)
    for name in "abcde":
        site.enter(name, 120.0)
    assert site.start(120.0) == [*"abcde"]
    site.enter("waits", 120.0, traffic_class=bounded(max_wait_s=15.0))
    assert not site.start(120.0)
    assert site.enter("too late", 120.0) is not None

    for name in "abcd":
        site.end(name, 120.5)
    assert [site.enter(name, 120.5) for name in "xyz"] == [None] * 3

    assert site.start(120.5) == ["waits", *"xyz"]


def test_where_something_is_free_nobody_of_a_burst_is_refused_on_a_forecast() -> None:
    """More come at once than a turn looks at. By the ends of what runs, nearly all would wait too long."""
    site = Site(knee=3 * LOOKAHEAD)
    drained(site, 10.0)
    burst = [f"{number:03}" for number in range(2 * LOOKAHEAD)]

    assert [site.enter(name, 120.0) for name in burst] == [None] * len(burst)
    assert [*site.start(120.0), *site.start(120.0)] == burst


def test_a_burst_to_a_full_fleet_is_refused_to_its_end_once_one_of_it_has_found_no_slot() -> None:
    site = Site()
    drained(site, 10.0)
    burst = [f"{number:03}" for number in range(2 * LOOKAHEAD)]
    assert [site.enter(name, 120.0) for name in burst] == [None] * len(burst)

    found = site.turn(120.0).refused

    assert {one.id: one.reason for one in found} == dict.fromkeys(burst, Reason.WAIT_TOO_LONG)


def test_those_of_a_burst_that_a_full_fleet_serves_in_time_are_not_refused_with_the_others() -> None:
    site = Site()
    drained(site, 0.1)
    waits = bounded(max_wait_s=0.1 * LOOKAHEAD * 3 / 2)
    burst = [f"{number:03}" for number in range(2 * LOOKAHEAD)]
    for name in burst:
        site.enter(name, 1.0, traffic_class=waits)

    first, rest = site.turn(1.0), site.turn(1.0)

    assert rest.refused == []
    assert [one.id for one in first.refused] == burst[LOOKAHEAD * 3 // 2 :]


@pytest.mark.parametrize("kept_busy_by", ["document", "job"])
def test_a_request_that_waits_for_something_else_does_not_refuse_those_with_a_free_slot(
    kept_busy_by: str,
) -> None:
    site = Site(knee=8)
    drained(site, 10.0)
    if kept_busy_by == "document":  # the second waits until the first has been read
        for name in ("reading", "waiting"):
            site.enter(name, 120.0, traffic_class=LONG, prompt=50_000)
            site.start(120.0)
    else:  # the last slot is kept for others than jobs
        jobs = replace(PLAIN, waiting=patient(PLAIN.waiting))
        for number in range(7):
            site.enter(f"job-{number}", 120.0, traffic_class=jobs, is_job=True)
        site.start(120.0)
        site.end("running", 120.0)
    assert len(site.line) == 1

    verdicts = [site.enter(name, 121.0, key=name) for name in ("a", "b")]

    assert verdicts == [None, None]
    assert site.start(121.0)[0] == "a"


@pytest.mark.parametrize("failed_s", [0.005, 70.0], ids=["at once", "after long silence"])
def test_tries_that_fail_say_nothing_of_how_fast_places_come_free(failed_s: float) -> None:
    site = Site()
    drained(site, 60.0)
    site.end("running", 660.0)
    now = 660.0
    for number in range(15):
        site.enter(f"failing-{number}", now)
        site.start(now)
        now += failed_s
        site.end(f"failing-{number}", now, answered=False)
    site.enter("running again", now)
    site.start(now)

    rate = site.line.drains_per_s(now)["gemma", "chat"]
    site.enter("next", now)
    [refused] = site.turn(now).refused

    assert rate == pytest.approx(1 / 60, rel=0.01)
    assert refused is not None
    assert (refused.reason, refused.retry_after_s) == (Reason.WAIT_TOO_LONG, 59.0)


def test_a_forecast_counts_what_was_waited_before() -> None:
    site = Site()
    patient = bounded(max_wait_s=30.0)
    drained(site, 10.0)
    site.enter("next", 120.0, traffic_class=patient)
    site.turn(120.0)

    fresh = site.enter("fresh", 120.0, traffic_class=patient)
    site.line.leave("fresh")
    again = site.enter("again", 120.0, traffic_class=patient, waited_s=11.0)

    assert fresh is None
    assert again is not None
    assert (again.reason, again.waited_s) == (Reason.WAIT_TOO_LONG, 11.0)


def test_before_anything_was_answered_nothing_is_forecast() -> None:
    site = Site()
    site.enter("failing")
    site.start()
    site.end("failing", 1000.0, answered=False)
    site.enter("running", 1000.0)
    site.start(1000.0)

    assert site.line.drains_per_s(1000.0)["gemma", "chat"] is None
    assert ("gemma", "of which nobody came") not in site.line.drains_per_s(1000.0)


def test_while_nothing_runs_no_slot_is_forecast() -> None:
    """Who waits then does so for another reason, as after a refusal."""
    site = Site(knee=2)
    for name in ("a", "b"):
        site.enter(name)
    assert site.start() == ["a", "b"]
    site.end("a", 2.0)
    next_one = site.ticket("next", 2.0, refused=frozenset({"light"}))
    assert site.line.drains_per_s(2.0)["gemma", "chat"] == 1 / 2.0
    assert site.line.foresee(next_one, 2.0).refused is not None
    site.end("b", 2.0)
    assert site.line.foresee(next_one, 2.0).refused is None
    assert site.line.drains_per_s(2.0)["gemma", "chat"] is None


def test_who_is_next_is_refused_as_soon_as_it_found_no_place() -> None:
    site = Site()
    drained(site, 1000.0)

    assert site.enter("next", 10_500.0) is None
    (refused,) = site.turn(10_500.0).refused

    assert (refused.reason, refused.position) == (Reason.WAIT_TOO_LONG, 1)
    assert refused.expected_wait_s == pytest.approx(1000.0)
    assert site.turn(10_500.0).next_turn_at is None


def test_who_is_next_is_sent_behind_as_soon_as_it_found_no_place() -> None:
    demoting = bounded(when_late=WhenLate.DEMOTE)
    site = Site()
    drained(site, 10.0)
    site.enter("next", 105.0, traffic_class=demoting)

    assert site.turn(105.0).refused == []
    site.enter("new", 105.0, traffic_class=bounded(max_wait_s=100.0))
    assert (site.line.position("next"), site.line.position("new")) == (2, 1)
    assert site.turn(164.9).refused == []
    assert [refused.id for refused in site.turn(165.0).refused] == ["next"]


def test_one_that_would_wait_too_long_is_sent_behind_as_it_comes() -> None:
    demoting = bounded(max_wait_s=15.0, when_late=WhenLate.DEMOTE, demoted_wait_s=50.0)
    site = Site()
    drained(site, 10.0)
    for name in ("next", "late"):
        assert site.enter(name, 120.0, traffic_class=demoting) is None
        site.turn(120.0)
    site.enter("new", 121.0, traffic_class=bounded(max_wait_s=100.0))

    assert [site.line.position(name) for name in ("next", "new", "late")] == [1, 2, 3]
    assert "late" not in [refused.id for refused in site.turn(169.9).refused]
    assert "late" in [refused.id for refused in site.turn(170.0).refused]


def test_one_that_cannot_make_its_own_deadline_is_refused_and_not_sent_behind() -> None:
    demoting = bounded(max_wait_s=5.0, when_late=WhenLate.DEMOTE)
    site = Site()
    drained(site, 10.0)
    assert site.enter("next", 120.0, traffic_class=demoting, deadline=125.0) is None

    assert [refused.reason for refused in site.turn(120.0).refused] == [Reason.DEADLINE]


def test_a_class_that_was_full_is_not_once_nobody_waits() -> None:
    site = Site(knee=4)
    drained(site, 100.0)
    site.loads["light"] = Load(seqs=4, share=admission.WHOLE)
    site.enter("left", 1200.0, traffic_class=PATIENT)
    site.turn(1200.0)
    site.line.leave("left")
    assert site.enter("first", 1200.0) is None  # nobody is before it: the next turn will tell
    site.line.leave("first")
    site.turn(1201.0)
    site.loads["light"] = Load()

    assert [site.enter(name, 1202.0) for name in ("a", "b")] == [None, None]
    assert site.start(1202.0) == ["a", "b"]


def test_where_something_is_free_nobody_who_is_next_is_refused_on_a_forecast() -> None:
    site = Site(knee=2)
    drained(site, 1000.0)

    assert site.enter("next", 10_500.0) is None
    assert site.start(10_500.0) == ["next"]


def test_who_was_let_wait_first_is_not_refused_on_a_later_forecast() -> None:
    site = Site()
    site.enter("running")
    site.start()
    site.enter("next", 0.0, traffic_class=bounded(max_wait_s=20.0))
    assert site.turn(0.0).refused == []
    site.end("running", 15.0)
    site.enter("quick", 15.0, deadline=15.5)
    site.start(15.0)

    assert site.turn(15.0).refused == []
    assert len(site.line) == 1


def test_who_holds_a_place_and_is_refused_gives_it_to_the_next_at_once() -> None:
    site = Site(knee=4)
    for number in range(3):
        site.enter(f"running-{number}")
    site.start()
    site.enter("past", 0.0)
    site.start()
    site.end("past", 100.0)
    site.enter("big", 100.0, prompt=3_000)  # needs two of four places
    site.enter("small", 100.0, traffic_class=TrafficClass("other", ("light",), priority=-1))

    turn = site.turn(100.0)

    assert (list(turn.offers), [refused.id for refused in turn.refused]) == ([], ["big"])
    assert turn.next_turn_at == 100.0
    assert site.start(100.0) == ["small"]


@pytest.mark.parametrize(("state", "refusals"), [(State.UP, 1), (State.PROBATION, 0)])
def test_a_backend_on_probation_has_more_room_soon_than_the_rate_says(state: State, refusals: int) -> None:
    site = Site(knee=8)
    drained(site, 60.0)
    site.status["light"] = replace(UP, state=state)
    site.loads["light"] += Load(seqs=7, share=admission.WHOLE * 7 // 8)
    site.enter("next", 661.0)

    turn = site.turn(661.0)

    assert (len(turn.offers), len(turn.refused)) == (0, refusals)


def test_who_waits_for_a_prompt_to_be_read_does_not_wait_for_an_end() -> None:
    site = Site()
    hurried = TrafficClass("long", ("push",), waiting=Waiting(max_wait_s=30))
    site.enter("past", 0.0, traffic_class=hurried, prompt=50_000)
    site.start()
    site.end("past", 200.0)
    site.enter("reading", 200.0, traffic_class=hurried, prompt=50_000)
    site.start(200.0)
    site.enter("next", 201.0, traffic_class=hurried, prompt=50_000)

    assert site.turn(201.0).refused == []
    site.answered("reading")
    assert site.start(202.0) == ["next"]


def test_who_is_next_of_its_class_is_not_refused_for_one_of_another_that_waits_for_something_else() -> None:
    site = Site()
    chat = TrafficClass("chat", ("push",))
    site.enter("past", 0.0, traffic_class=LONG, prompt=50_000)
    site.start()
    site.end("past", 200.0)
    site.enter("reading", 200.0, traffic_class=LONG, prompt=50_000)
    site.start(200.0)
    site.enter("next", 201.0, traffic_class=LONG, prompt=50_000, key="other")
    site.start(201.0)

    assert site.enter("chat", 202.0, traffic_class=chat) is None
    assert site.start(202.0) == ["chat"]


def test_places_that_other_classes_free_in_the_same_pool_are_forecast_too() -> None:
    site = Site(knee=4)
    other = TrafficClass("other", ("light",), waiting=PATIENT.waiting)
    elsewhere = TrafficClass("elsewhere", ("push",))
    drained(site, 60.0)
    for number in range(3):
        site.enter(f"other-{number}", 600.0, traffic_class=other)
    site.enter("elsewhere", 600.0, traffic_class=elsewhere)
    site.start(600.0)
    site.end("other-0", 602.0)
    site.end("elsewhere", 602.0)
    site.enter("other-0", 602.0, traffic_class=other)
    site.start(602.0)

    rates = [site.line.drains_per_s(660.0)["gemma", name] for name in ("chat", "other", "elsewhere")]

    assert rates == [pytest.approx(1 / 60 + 3 / 2), pytest.approx(1 / 60 + 3 / 2), None]
    together = site.line.drains_per_s(660.0)
    assert [together["gemma", name] for name in ("chat", "other", "elsewhere")] == rates


def test_all_forecasts_together_look_at_each_class_once(monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site(knee=4)
    for number in range(50):
        site.enter(f"{number}", 0.0, traffic_class=TrafficClass(f"class-{number}", ("light",)))
    looked: list[int] = []
    monkeypatch.setattr(Drain, "per_s", lambda drains, *_: looked.append(len(drains)))

    assert len(site.line.drains_per_s(1.0)) == 50
    assert sum(looked) == 50


def test_a_class_of_which_none_has_ended_is_taken_to_stay_as_long_as_the_others() -> None:
    site = Site(knee=4)
    drained(site, 10.0)
    for number in range(3):
        site.enter(
            f"other-{number}", 100.0, traffic_class=TrafficClass("other", ("light",), waiting=PATIENT.waiting)
        )
    site.start(100.0)

    assert site.line.drains_per_s(150.0)["gemma", "other"] == pytest.approx(4 / 10)


def test_a_class_stays_as_long_as_the_others_did_though_none_of_them_runs() -> None:
    site = Site(knee=4)
    drained(site, 10.0)
    site.end("running", 110.0)
    for number in range(3):
        site.enter(
            f"other-{number}", 110.0, traffic_class=TrafficClass("other", ("light",), waiting=PATIENT.waiting)
        )
    site.start(110.0)

    assert site.line.drains_per_s(150.0)["gemma", "other"] == pytest.approx(3 / 10)


def test_a_class_stays_as_long_as_the_others_did_on_average() -> None:
    site = Site(knee=4)
    for name, stay_s in (("short", 10.0), ("long", 20.0)):
        site.enter(name, 0.0, traffic_class=replace(PATIENT, name=name))
        site.start(0.0)
        site.end(name, stay_s)
    for number in range(3):
        site.enter(f"{number}", 100.0, traffic_class=replace(PATIENT, name="other"))
    site.start(100.0)

    assert site.line.drains_per_s(150.0)["gemma", "other"] == pytest.approx(3 / 15)


def test_how_long_requests_stay_is_a_moving_average() -> None:
    site = Site()
    drained(site, 10.0)
    site.end("running", 130.0)  # after 30 s
    site.enter("next", 130.0)
    site.start(130.0)

    assert site.line.drains_per_s(190.0)["gemma", "chat"] == pytest.approx(1 / 12)


def test_a_burst_of_starts_is_a_rate_that_fades() -> None:
    site = Site(knee=64)
    for number in range(41):
        site.enter(f"{number}", 0.0)
    site.start(0.0)
    site.end("0", 60.0)
    for number in range(20):
        site.enter(f"again-{number}", 60.0)
    site.start(60.0)

    rates = [site.line.drains_per_s(now)["gemma", "chat"] for now in (60.0, 65.0, 70.0)]

    assert rates[0] == pytest.approx((20 - 1) / 5, rel=0.01)
    assert rates[1] == pytest.approx((20 / math.e - 1) / 5, rel=0.01)
    assert rates[2] == pytest.approx(60 / 60)  # what runs over how long it stays is more by now


def test_a_start_that_failed_is_undone_as_far_as_it_counts_still() -> None:
    site = Site(knee=64)
    drained(site, 60.0)
    for number in range(20):
        site.enter(f"{number}", 700.0)
    site.start(700.0)
    for number in range(10):
        site.end(f"{number}", 705.0, answered=False)

    assert site.line.drains_per_s(705.0)["gemma", "chat"] == pytest.approx((10 / math.e - 1) / 5, rel=0.01)
    for number in range(10, 20):  # long after they counted
        site.end(f"{number}", 790.0, answered=False)
    assert site.line.drains_per_s(790.0)["gemma", "chat"] == pytest.approx(1 / 60)


def test_a_forecast_beyond_the_callers_deadline_is_refused_at_once() -> None:
    site = Site()
    drained(site, 10.0)
    site.enter("next", 120.0, traffic_class=PATIENT)
    site.turn(120.0)
    lane = replace(PATIENT, waiting=replace(PATIENT.waiting, max_wait_s=900))

    assert site.enter("patient", 120.0, traffic_class=lane) is None
    assert site.enter("in time", 120.0, traffic_class=lane, deadline=151.0) is None
    site.line.leave("in time")
    refused = site.enter("hurried", 120.0, traffic_class=lane, deadline=149.0, prefill_s=100.0)

    assert refused is not None
    assert refused.reason is Reason.DEADLINE
    assert refused.sentence().startswith("A slot would become free only after the request's own deadline (")


@pytest.mark.parametrize(
    ("residence_s", "retry_after_s"),
    [(0.01, 1.0), (4.0, 8.0), (500.0, 59.0)],
    ids=["least", "middle", "most"],
)
def test_retry_after_stays_between_a_second_and_a_minute(residence_s: float, retry_after_s: float) -> None:
    site = Site()
    drained(site, residence_s)
    now = 10 * residence_s + 60
    full = bounded(waiting_max=1, max_wait_s=9000.0)
    site.enter("next", now, traffic_class=full)

    refused = site.enter("second", now, traffic_class=full)

    assert refused is not None
    assert refused.retry_after_s == pytest.approx(retry_after_s, rel=0.01)


def test_a_crowd_that_is_refused_in_one_moment_is_told_to_come_back_one_after_another() -> None:
    site = Site()
    drained(site, 10.0)  # one slot, so one every ten seconds
    full = bounded(waiting_max=1, max_wait_s=9000.0)
    site.enter("next", 160.0, traffic_class=full)

    crowd = [site.enter(f"{number}", 160.0, traffic_class=full) for number in range(8)]
    later = site.enter("later", 220.0, traffic_class=full)

    # Two turns away, and each ten seconds after the one before; what is beyond a minute begins again.
    told = [None if one is None else one.retry_after_s for one in crowd]
    assert told == pytest.approx([20.0, 30.0, 40.0, 50.0, 20.0, 30.0, 40.0, 50.0])
    assert [None if one is None else one.expected_wait_s for one in crowd] == pytest.approx([20.0] * 8)
    assert later is not None
    assert later.retry_after_s == pytest.approx(20.0)


def test_of_a_crowd_that_tries_three_times_nearly_all_are_answered() -> None:
    """As SDKs do, by default. If all were told to come after the same time, 41 would be answered."""
    site = Site(knee=16)
    drained(site, 10.0)
    site.end("running", 110.0)
    chat = bounded(waiting_max=24, max_wait_s=9000.0)
    tries: Counter[str] = Counter()
    coming = [(110.0, f"{number}") for number in range(150)]
    ends: list[tuple[float, str]] = []
    answered = 0
    while coming or ends:
        now, name = heappop(min((heap for heap in (ends, coming) if heap), key=lambda heap: heap[0]))
        if name in site.taken:
            site.end(name, now)
            answered += 1
        else:
            tries[name] += 1
            refused = site.enter(name, now, traffic_class=chat)
            if refused is not None and tries[name] < 3:
                heappush(coming, (now + round(refused.retry_after_s), name))
        for started in site.start(now):
            heappush(ends, (now + 10.0, started))

    assert answered > 130


def test_a_question_moves_nobody_who_is_told_to_come_back() -> None:
    site = Site()
    drained(site, 10.0)
    full = bounded(waiting_max=1, max_wait_s=9000.0)
    site.enter("next", 160.0, traffic_class=full)

    for _ in range(3):
        foreseen = site.line.foresee(site.ticket("asked", 160.0, traffic_class=full), 160.0).refused
        assert foreseen is not None
        assert foreseen.retry_after_s == pytest.approx(20.0)
    refused = site.enter("comes", 160.0, traffic_class=full)

    assert refused is not None
    assert refused.retry_after_s == pytest.approx(20.0)


def test_before_anything_is_known_a_refusal_says_so() -> None:
    site = Site()
    full = bounded(waiting_max=1)
    site.enter("a", traffic_class=full)

    refused = site.enter("b", traffic_class=full)

    assert refused is not None
    assert (refused.expected_wait_s, refused.retry_after_s) == (None, 5.0)
    assert refused.sentence() == "The queue for requests like this one is full (position 2)."
    following = site.enter("c", traffic_class=full)
    assert following is not None
    assert following.retry_after_s == pytest.approx(7.5)  # two would have their turns within five seconds


def test_a_class_may_send_late_ones_behind_instead() -> None:
    demoting = bounded(when_late=WhenLate.DEMOTE, demoted_wait_s=10.0)
    site = Site()
    site.enter("running", traffic_class=demoting)
    site.start()
    site.enter("late", 0.0, traffic_class=demoting)
    assert site.turn(1.5).refused == []
    site.enter("new", 2.0, traffic_class=demoting)
    assert site.line.position("late") == 2

    assert site.served(["new", "late"], 2.1) == ["new", "late"]


@pytest.mark.parametrize(
    ("rules", "longest_s"),
    [
        pytest.param(Waiting(), 1.2, id="refused"),
        pytest.param(Waiting(when_late=WhenLate.DEMOTE), 60.0, id="a-minute-at-least"),
        pytest.param(Waiting(max_wait_s=900, when_late=WhenLate.DEMOTE), 1800.0, id="twice"),
        pytest.param(
            Waiting(max_wait_s=900, when_late=WhenLate.DEMOTE, demoted_wait_s=950), 950.0, id="given"
        ),
        pytest.param(Waiting(max_wait_s=900, demoted_wait_s=950), 900.0, id="refused-though-given"),
    ],
)
def test_being_sent_behind_never_shortens_the_wait(rules: Waiting, longest_s: float) -> None:
    site = Site()
    site.enter("running")
    site.start()
    site.enter("late", traffic_class=TrafficClass("chat", ("light",), waiting=rules))
    site.turn(rules.max_wait_s)

    assert rules.longest_wait_s == longest_s
    assert site.turn(longest_s - 0.01).refused == []
    assert len(site.line) == (rules.when_late is WhenLate.DEMOTE)
    site.turn(longest_s)
    assert len(site.line) == 0


def test_one_that_was_sent_behind_is_refused_in_the_end() -> None:
    demoting = bounded(when_late=WhenLate.DEMOTE, demoted_wait_s=10.0)
    site = Site()
    site.enter("running")
    site.start()
    site.enter("late", 0.0, traffic_class=demoting)
    site.turn(1.2)

    assert site.turn(9.9).refused == []
    assert [refused.id for refused in site.turn(10.0).refused] == ["late"]


@pytest.mark.parametrize(
    ("state", "reasons"),
    [(State.DOWN, [Reason.NO_BACKEND]), (State.PROBATION, [])],
    ids=["down", "a-few-at-a-time"],
)
def test_waiting_for_a_backend_that_is_gone_ends_at_once(state: State, reasons: list[Reason]) -> None:
    site = Site(knee=4)
    for number in range(2):
        site.enter(str(number))
    site.start()
    site.status["light"] = replace(UP, state=state)
    site.enter("a", 0.1)

    turn = site.turn(0.1)

    assert (list(turn.offers), [refused.reason for refused in turn.refused]) == ([], reasons)


DOWN = BackendStatus(State.DOWN, since=-100.0)
EITHER = TrafficClass("chat", ("light", "push"))


@pytest.mark.parametrize(
    ("light", "push", "retry_after_s"),
    [
        (replace(DOWN, state=State.EJECTED, ejected_until=4.0), DOWN, 5.0),
        (replace(DOWN, state=State.EJECTED, ejected_until=90.0), DOWN, 10.0),
        (replace(DOWN, state=State.EJECTED, ejected_until=90.0), UP, 59.0),  # drained by an operator, say
        (DOWN, replace(DOWN, since=-3.0), 3.0),
        (UP, UP, 1.0),
    ],
)
def test_who_finds_no_backend_is_told_when_the_first_may_be_back(
    light: BackendStatus, push: BackendStatus, retry_after_s: float
) -> None:
    site = Site()
    site.status = {"light": light, "push": push}
    failed = frozenset(name for name, status in site.status.items() if status is UP)
    site.enter("a", traffic_class=EITHER, failed=failed)

    assert [(one.reason, one.retry_after_s) for one in site.turn().refused] == [
        (Reason.NO_BACKEND, retry_after_s)
    ]


EJECTED = replace(UP, state=State.EJECTED, ejected_until=90.0)


def test_who_finds_no_backend_is_tried_on_ejected_ones_a_few_at_a_time() -> None:
    site = Site(knee=5)
    site.status = {"light": EJECTED, "push": DOWN}
    for name in ("a", "b", "c"):
        site.enter(name, traffic_class=EITHER)

    turn = site.turn()

    assert [(offer.ticket.id, offer.candidates[0].backend) for offer in turn.offers] == [
        ("a", "light"),
        ("b", "light"),
    ]
    assert [(refused.id, refused.reason) for refused in turn.refused] == [("c", Reason.NO_BACKEND)]


@pytest.mark.parametrize(
    "light",
    [
        replace(EJECTED, probe_fault=ProbeFault.TIMEOUT),
        replace(EJECTED, trials_failed=(-2.0, -1.0, 0.0)),  # all its trials have failed
        replace(EJECTED, served_models=("gemma", "other")),  # which one is wanted is not known
        replace(EJECTED, state=State.HUNG),
    ],
)
def test_who_finds_no_backend_is_tried_on_none_that_would_fail(light: BackendStatus) -> None:
    site = Site()
    site.status = {"light": light, "push": DOWN}
    site.enter("a", traffic_class=EITHER)

    assert [refused.reason for refused in site.turn().refused] == [Reason.NO_BACKEND]


def test_those_that_are_tried_in_one_turn_are_so_where_each_has_room() -> None:
    site = Site(knee=5)
    site.status = {"light": EJECTED, "push": EJECTED}
    for name in ("a", "b", "c", "d"):
        site.enter(name, traffic_class=EITHER)

    assert site.start() == ["a", "b", "c", "d"]
    assert Counter(backend for backend, _ in site.taken.values()) == {"light": 2, "push": 2}


def test_nobody_is_tried_on_an_ejected_one_while_another_is_up() -> None:
    site = Site()
    site.status = {"light": EJECTED, "push": UP}
    site.loads["push"] = Load(seqs=10, share=admission.WHOLE)
    site.enter("a", traffic_class=EITHER)

    turn = site.turn()

    assert (list(turn.offers), list(turn.refused)) == ([], [])


def test_no_job_is_tried_on_an_ejected_one() -> None:
    site = Site()
    site.status = {"light": EJECTED, "push": DOWN}
    site.enter("a", traffic_class=EITHER, is_job=True)

    assert [refused.reason for refused in site.turn().refused] == [Reason.NO_BACKEND]


def test_who_failed_on_an_ejected_one_is_not_tried_there_again() -> None:
    site = Site()
    site.status = {"light": EJECTED, "push": EJECTED}
    site.enter("a", traffic_class=EITHER, failed=frozenset({"light"}))
    (offer,) = site.turn().offers

    assert [one.backend for one in offer.candidates] == ["push"]


def test_one_that_could_never_take_a_request_says_nothing_of_when_to_come_back() -> None:
    site = Site()
    site.status = {"light": replace(DOWN, since=-2.0), "push": replace(DOWN, since=-7.0)}
    site.backends["light"] = replace(site.backends["light"], capacity=Capacity(50, (KneeStep(None, 1),)))
    site.policy = replace(site.policy, backends=site.backends)
    site.enter("a", traffic_class=EITHER)

    assert [one.retry_after_s for one in site.turn().refused] == [7.0]


def test_what_a_turn_has_not_looked_at_is_looked_at_by_the_next_one_at_once() -> None:
    """A turn looks at so many of a class; those behind them may have a free place or none at all."""
    many = bounded(waiting_max=1000)
    site = Site(knee=2 * LOOKAHEAD)
    for number in range(LOOKAHEAD + 1):
        site.enter(str(number), traffic_class=many)
    turn = site.turn()
    assert (len(turn.offers), turn.next_turn_at) == (LOOKAHEAD, 0.0)
    turn = site.turn()
    assert (len(turn.offers), turn.next_turn_at) == (1, None)

    site.status["light"] = replace(UP, state=State.DOWN)
    for number in range(LOOKAHEAD + 1):
        site.enter(f"again-{number}", traffic_class=many)
    turn = site.turn()
    assert (len(turn.refused), turn.next_turn_at) == (LOOKAHEAD, 0.0)
    turn = site.turn()
    assert (len(turn.refused), turn.next_turn_at) == (1, None)


def test_each_backend_of_a_pool_is_wanted_by_those_it_could_take_and_has_not_failed() -> None:
    site = Site(knee=100)
    site.policy = replace(site.policy, pools={"both": Pool("both", ("light", "push"))})
    both = replace(PATIENT, pools=("both",))
    for number, since in enumerate((30.0, 10.0, 20.0)):
        site.enter(f"text-{number}", since, traffic_class=both)
    ticket = site.ticket("image", 5.0, traffic_class=both)
    site.line.enter(replace(ticket, demand=replace(ticket.demand, images=1)), 5.0)  # light takes none
    failed = site.ticket("failed", 2.0, traffic_class=both, failed=frozenset({"push"}))
    site.line.enter(failed, 40.0, has_waited=True)

    wanted = site.line.wants({"light", "push", "other"})
    assert site.line.wants({"light"}) == {"light": wanted["light"]}  # push is of no box

    assert wanted == {"light": Backlog(4, 10.0), "push": Backlog(4, 5.0), "other": Backlog()}


def test_however_many_documents_wait_a_chat_behind_them_is_looked_at() -> None:
    site, patient = Site(), replace(LONG, waiting=Waiting(max_wait_s=9_000, ttft_target_s=9_000))
    short_wait = replace(LONG, waiting=Waiting(max_wait_s=60, ttft_target_s=9_000))
    for number in range(2 * LOOKAHEAD):
        site.enter(f"document-{number}", traffic_class=patient, prompt=40_000)
    for number in range(10):  # one in 20 s is what the forecast knows
        assert site.start(20.0 * number) == [f"document-{number}"]
        site.end(f"document-{number}", 20.0 * number + 20)
    assert site.start(200.0) == ["document-10"]

    refused = site.enter("document", 201.0, traffic_class=short_wait, prompt=40_000)
    assert refused is not None
    assert refused.reason is Reason.WAIT_TOO_LONG
    assert site.enter("chat", 201.0, traffic_class=short_wait) is None
    assert site.start(201.0) == ["chat"]
    assert len(site.line) == 2 * LOOKAHEAD - 11


def test_however_many_wait_for_one_backend_of_their_pool_others_are_looked_at() -> None:
    site = Site(knee=100)
    site.policy = replace(site.policy, pools={"both": Pool("both", ("light", "push"))})
    site.loads["push"] = Load(10, admission.WHOLE)
    both = replace(PATIENT, pools=("both",))
    for number in range(2 * LOOKAHEAD):
        ticket = site.ticket(f"image-{number}", traffic_class=both)
        only_push = replace(ticket.demand, images=1)
        assert site.line.enter(replace(ticket, demand=only_push), 0.0) is None
    assert site.start() == []

    assert site.enter("text", 1.0, traffic_class=both) is None
    assert site.start(1.0) == ["text"]


def test_however_many_have_failed_on_a_backend_that_is_back_others_are_looked_at() -> None:
    site = Site(knee=100)
    site.policy = replace(site.policy, pools={"both": Pool("both", ("light", "push"))})
    site.loads["push"] = Load(10, admission.WHOLE)
    both = replace(PATIENT, pools=("both",))
    for number in range(2 * LOOKAHEAD):
        site.enter(f"failed-{number}", traffic_class=both, failed=frozenset({"light"}))
    assert site.start() == []

    assert site.enter("other", 1.0, traffic_class=both) is None
    assert site.start(1.0) == ["other"]


def test_however_many_wait_after_a_refusal_others_are_looked_at() -> None:
    site = Site(knee=100)
    site.loads["light"] = Load(1, admission.WHOLE // 100)
    for number in range(2 * LOOKAHEAD):
        site.enter(f"refused-{number}", traffic_class=PATIENT, refused=frozenset({"light"}))
    views = {name: replace(view, takes=1) for name, view in site.views().items()}
    assert not site.line.turn(0.0, views).offers

    assert site.enter("other", 1.0, traffic_class=PATIENT) is None
    assert [offer.ticket.id for offer in site.line.turn(1.0, views).offers] == ["other"]


def test_what_was_sent_behind_comes_when_all_that_a_turn_looks_at_have_come() -> None:
    """Documents beyond what a turn looks at do not keep it from the chats that are behind."""
    site = Site()
    demoting = Waiting(max_wait_s=10, demoted_wait_s=900, when_late=WhenLate.DEMOTE)
    for number in range(2 * LOOKAHEAD):
        site.enter(f"document-{number}", traffic_class=LONG, prompt=40_000, key=str(number))
    site.enter("behind", traffic_class=replace(LONG, waiting=demoting), is_job=True)

    assert site.start() == ["document-0", "behind"]


def test_a_turn_that_looked_at_all_is_the_last_until_something_happens() -> None:
    site = Site()
    for name in ("a", "b"):
        site.enter(name)
    turn = site.turn()
    assert (len(turn.offers), turn.next_turn_at) == (1, PLAIN.waiting.max_wait_s)


@pytest.mark.parametrize("spills", [(), ("light",)], ids=["nowhere-else", "or-for-a-slot-elsewhere"])
def test_who_waits_for_the_end_of_a_prefill_is_not_refused_on_a_forecast_of_slots(
    spills: tuple[str, ...],
) -> None:
    site = Site()
    site.loads["light"] = Load(seqs=1, share=admission.WHOLE)
    pools = {**site.policy.pools, "push": Pool("push", ("push",), gates=Gates(long_prefills=1))}
    site.policy = replace(site.policy, pools=pools)
    waiting = Waiting(max_wait_s=30.0, ttft_target_s=60.0)
    hasty = replace(LONG, pools=("push", *spills), waiting=waiting)
    for name, at in (("past", 0.0), ("read-now", 60.0)):
        site.enter(name, at, traffic_class=hasty, prompt=50_000)
        assert site.start(at) == [name]
        if name == "past":
            site.end(name, at + 60.0)

    for name in ("next", "second"):
        assert site.enter(name, 61.0, traffic_class=hasty, prompt=50_000) is None
        assert list(site.turn(61.0).refused) == []

    site.answered("read-now")
    assert site.start(62.0) == ["next"]


def test_nor_are_those_that_wait_for_the_same_prompt_work() -> None:
    site = Site(knee=4)
    site.backends["light"] = replace(site.backends["light"], perf=READ_IN_A_SECOND)
    gated = Pool("light", ("light",), gates=Gates(prefill_s=0.5))
    pools = {**site.policy.pools, "light": gated}
    site.policy = replace(site.policy, pools=pools, backends=site.backends)
    drained(site, 60.0)
    site.loads["light"] += Load(prefill_ms=600)
    for name in ("first", "second"):
        assert site.enter(name, 660.0) is None

    turn = site.turn(660.0)
    assert (turn.offers, turn.refused) == ([], [])
    site.loads["light"] -= Load(prefill_ms=600)
    assert site.start(661.0) == ["first", "second"]


@pytest.mark.parametrize("holds", [True, False], ids=["held", "its-slot-was-gone"])
def test_a_newcomer_is_refused_on_a_forecast_where_another_request_holds_the_free_slot(holds: bool) -> None:
    site = Site(knee=4)
    drained(site, 60.0)
    site.loads["light"] += Load(seqs=2, share=admission.WHOLE // 2)
    if holds:  # the one slot that is free is one of the two that it needs
        site.line.enter(site.ticket("big", 660.0, prompt=3_000), 660.0, has_waited=True)
    else:
        site.line.missed("another", ["light"], 660.0)
    site.line.enter(site.ticket("small", 660.0), 660.0, has_waited=True)
    assert site.start(660.0) == []

    refused = site.enter("newcomer", 660.0)

    assert (refused is not None and refused.reason is Reason.WAIT_TOO_LONG) is holds


def test_who_finds_one_pool_full_and_the_other_down_is_refused_on_a_forecast() -> None:
    site = Site()
    drained(site, 60.0)
    site.status["push"] = replace(UP, state=State.DOWN)
    site.enter("next", 660.0, traffic_class=CHAT)

    assert [refused.reason for refused in site.turn(660.0).refused] == [Reason.WAIT_TOO_LONG]


def test_a_request_waits_for_a_backend_that_has_not_said_yet_what_it_serves() -> None:
    site = Site()
    site.status["light"] = BackendStatus()
    site.enter("early")

    turn = site.turn()
    assert (list(turn.offers), list(turn.refused)) == ([], [])
    site.status["light"] = UP
    assert site.start(0.01) == ["early"]


# ------------------------------------------------------------------ offers


def test_what_is_offered_is_not_offered_again_and_its_place_is_taken() -> None:
    site = Site()
    site.enter("a")
    site.enter("b")

    assert [offer.ticket.id for offer in site.turn().offers] == ["a"]
    assert list(site.turn().offers) == []

    site.line.leave("a")
    assert [offer.ticket.id for offer in site.turn().offers] == ["b"]


def test_a_place_that_was_gone_puts_the_request_back_first() -> None:
    site = Site(knee=2)
    site.enter("a", 0.0, key="k")
    site.enter("b", 0.1, key="k")
    turn = site.turn(0.2)
    assert [offer.ticket.id for offer in turn.offers] == ["a", "b"]

    site.line.missed("b", ["light"], 0.2)
    site.line.missed("a", ["light"], 0.2)
    paused = site.turn(0.21)

    assert list(paused.offers) == []
    assert paused.next_turn_at == pytest.approx(0.25)
    assert [offer.ticket.id for offer in site.turn(0.25).offers] == ["a", "b"]


def test_a_release_ends_the_pause_after_a_place_was_gone() -> None:
    site = Site()
    site.enter("a")
    site.turn()
    site.line.missed("a", ["light"], 0.0)
    assert list(site.turn(0.01).offers) == []

    site.line.released("elsewhere", "light", 0.01)

    assert [offer.ticket.id for offer in site.turn(0.01).offers] == ["a"]


def test_a_pause_that_nobody_waits_for_wants_no_turn() -> None:
    site = Site()
    site.enter("a", deadline=0.01)
    site.turn()
    site.line.missed("a", ["light"], 0.0)

    turn = site.turn(0.01)
    assert ([refused.id for refused in turn.refused], turn.next_turn_at) == (["a"], None)


def test_a_waiter_that_leaves_is_gone_at_once() -> None:
    site = Site()
    site.enter("a")
    site.start()
    site.enter("b", 0.1, size_bytes=7)
    site.line.leave("b")
    site.line.leave("b")

    assert (len(site.line), site.line.waiting()) == (0, {("gemma", "chat"): 0})
    assert site.turn(0.1).next_turn_at is None


def test_positions_count_what_would_start_before() -> None:
    site = Site()
    site.enter("running")
    site.start()
    for number in range(3):
        site.enter(str(number), 0.1 * number)

    assert [site.line.position(str(number)) for number in range(3)] == [1, 2, 3]
    assert site.line.position("running") is None


def test_a_late_one_comes_after_those_of_its_key_that_are_due_before_the_last_timely_one_of_its_class() -> (
    None
):
    site = Site()
    site.enter("running")
    site.start()
    for name, target_s, class_name in (("late", 1, "chat"), ("timely", 10, "chat"), ("other", 5, "other")):
        rules = Waiting(max_wait_s=60.0, ttft_target_s=target_s)
        site.enter(name, 0.0, traffic_class=TrafficClass(class_name, ("light",), waiting=rules))
    site.turn(2.0)

    assert [one.id for one in site.line.waiters(2.0)] == ["other", "timely", "late"]
    assert [site.line.position(name) for name in ("other", "timely", "late")] == [1, 2, 3]


@pytest.mark.parametrize(
    ("demoted", "in_turn", "position"),
    [
        (["a", "a", "a"], [], 4),
        (["b", "b", "b"], [], 1),
        (["a", "b", "b", "b"], [], 3),
        (["a", "a"], ["a"], 4),
    ],
    ids=["its-key", "another-key", "both", "after-those-in-turn"],
)
def test_positions_count_those_of_other_classes_that_come_first_though_they_are_demoted(
    demoted: Sequence[str], in_turn: Sequence[str], position: int
) -> None:
    """Between classes, the one that is due first goes first, even if it has been demoted."""
    site = Site()
    bulk = replace(bounded(max_wait_s=1.0, when_late=WhenLate.DEMOTE, demoted_wait_s=900.0), name="bulk")
    site.enter("running")
    site.start()
    for number, key in enumerate(demoted):
        site.enter(f"late-{number}", 0.0, traffic_class=bulk, key=key)
    site.turn(1.1)
    for number, key in enumerate(in_turn):
        site.enter(f"new-{number}", 1.1, traffic_class=bulk, key=key)
    site.enter("chat", 1.2, traffic_class=PATIENT, key="a")

    assert site.line.position("chat") == position
    assert [one.id for one in site.line.waiters(1.2)].index("chat") == position - 1
    entry = site.line._waiting["chat"]
    lane = site.line._lane(entry.ticket)
    assert len(list(lane.shares.those_ahead_of(lane, entry))) == position - 1


def test_who_would_wait_for_demoted_ones_is_refused_at_once() -> None:
    site = Site()
    bulk = replace(bounded(max_wait_s=1.0, when_late=WhenLate.DEMOTE, demoted_wait_s=900.0), name="bulk")
    drained(site, 1.0)
    for number in range(20):
        site.enter(f"late-{number}", 100.0, traffic_class=bulk)
    site.turn(100.0)
    site.turn(101.5)

    chat = bounded(max_wait_s=5.0)
    refused = site.enter("chat", 102.0, traffic_class=chat) or site.turn(102.0).refused[0]

    assert (refused.reason, refused.position) == (Reason.WAIT_TOO_LONG, 21)
    assert refused.retry_after_s > 15


def test_positions_count_those_of_other_classes_that_want_the_same_pool() -> None:
    site = Site()
    site.enter("running")
    site.start()
    urgent = TrafficClass("urgent", ("light",), priority=1, waiting=PATIENT.waiting)
    later = TrafficClass("later", ("light",), waiting=Waiting(max_wait_s=900, ttft_target_s=60))
    behind = TrafficClass("behind", ("light",), priority=-1, waiting=PATIENT.waiting)
    for number in range(3):
        site.enter(f"urgent-{number}", 0.1, traffic_class=urgent)
        site.enter(f"doc-{number}", 0.1, traffic_class=LONG, prompt=50_000)
        site.enter(f"behind-{number}", 0.1, traffic_class=behind)
    site.enter("later", 0.1, traffic_class=later)
    site.enter("soon", 0.2, traffic_class=PATIENT)

    names = ["urgent-0", "soon", "later", "behind-2", "doc-0"]

    assert [site.line.position(name) for name in names] == [1, 4, 5, 8, 1]
    assert site.served(["later", "behind-2"], 0.3)[-2:] == ["behind-1", "behind-2"]


def test_a_refusal_tells_of_all_that_come_before() -> None:
    urgent = TrafficClass("urgent", ("light",), priority=1, waiting=PATIENT.waiting)
    site = Site()
    drained(site, 1.0)
    for number in range(20):
        site.enter(f"urgent-{number}", 30.0, traffic_class=urgent)
    site.enter("low", 30.0)

    (refused,) = site.turn(30.0).refused

    assert (refused.reason, refused.position) == (Reason.WAIT_TOO_LONG, 21)
    assert refused.expected_wait_s == pytest.approx(21.0)
    assert refused.retry_after_s == pytest.approx(21.0)


def test_one_that_comes_too_late_for_its_deadline_is_told_of_those_that_can_still_meet_theirs() -> None:
    full = replace(PATIENT, waiting=replace(PATIENT.waiting, waiting_max=3))
    site = Site()
    for name in ("running", "a", "b", "c"):
        site.enter(name, 100.0, traffic_class=full)
        if name == "running":
            site.start(100.0)

    refused = site.enter("tried again", 100.0, traffic_class=full, arrived_at=0.0)

    assert refused is not None
    assert (refused.reason, refused.position) == (Reason.QUEUE_FULL, 4)
    refused = site.enter("more urgent", 100.0, traffic_class=full, deadline=101.0)
    assert refused is not None
    assert (refused.reason, refused.position) == (Reason.QUEUE_FULL, 1)


def test_images_are_placed_where_they_are_taken() -> None:
    site = Site()
    demand = Demand(seqs=1, prompt_tokens=100, total_tokens=200, images=1)
    site.enter("picture", traffic_class=CHAT, demand=demand)

    site.start()

    assert site.taken["picture"][0] == "push"


# ------------------------------------------------------------------ machines that change models


def out(site: Site, name: str) -> Mapping[str, BackendView]:
    away = (Exclusion.SWAPPED_OUT, "its model is out")
    return {**site.views(), name: replace(site.views()[name], away=away)}


def test_who_wants_a_model_that_is_out_waits_for_it() -> None:
    site = Site()
    site.enter("a", traffic_class=bounded(max_wait_s=900))

    assert site.line.turn(1.0, out(site, "light")) == Turn([], [], 900.0)
    assert site.start(2.0) == ["a"]


def test_who_waits_for_a_model_that_is_out_keeps_nobody_from_another() -> None:
    site = Site()
    site.enter("a", traffic_class=bounded(max_wait_s=900))
    site.enter("long", traffic_class=LONG)

    turn = site.line.turn(1.0, out(site, "light"))
    assert [offer.ticket.id for offer in turn.offers] == ["long"]


def test_what_waits_is_counted_for_each_backend_of_the_first_pool_that_could_take_it() -> None:
    site = Site()
    site.enter("a", 1.0, traffic_class=CHAT)
    site.enter("b", 2.0, traffic_class=CHAT)
    site.enter("tried", 0.0, traffic_class=CHAT, failed=frozenset({"light"}))
    site.enter("beyond-its-window", 0.0, traffic_class=CHAT, prompt=300_000)
    image = Demand(seqs=1, prompt_tokens=10, total_tokens=20, images=1)
    site.enter("an-image", 0.0, traffic_class=CHAT, demand=image)

    assert site.line.wants({"light", "push"}) == {"light": Backlog(2, 1.0), "push": Backlog()}
    assert site.line.wants({"push"}) == {"push": Backlog()}  # of another box


def test_of_what_has_ended_somewhere_the_latest_to_start_is_known() -> None:
    site = Site()
    for name, at in (("first", 1.0), ("second", 2.0)):
        in_one_step(site, name, at, traffic_class=CHAT)
    site.line.released("second", "light", 3.0)
    site.line.released("first", "light", 4.0)

    assert site.line.wants({"light", "push"}) == {"light": Backlog(started_at=2.0), "push": Backlog()}


def test_what_waited_in_the_store_or_on_another_try_is_as_old_as_that() -> None:
    site = Site()
    site.enter("a-job", 1000.0, traffic_class=CHAT, waited_s=400.0)
    site.enter("b", 900.0, traffic_class=CHAT)

    assert site.line.wants({"light"}) == {"light": Backlog(2, 600.0)}
    patiently = replace(CHAT, waiting=patient(CHAT.waiting))
    site.enter("patient", 0.0, traffic_class=patiently)
    assert site.line.oldest_waits_s(1010.0) == {("gemma", "chat"): 410.0}
    for name in ("a-job", "b"):
        site.line.leave(name)
    assert site.line.oldest_waits_s(1010.0) == {("gemma", "chat"): 0.0}


@pytest.mark.parametrize(
    ("back_at", "traffic_class", "refused"),
    [
        pytest.param({"light": 300.0}, bounded(max_wait_s=299), (Reason.WAIT_TOO_LONG, 300.0), id="too-late"),
        pytest.param({"light": 300.0}, bounded(max_wait_s=300), None, id="in-time"),
        pytest.param({"light": 300.0}, CHAT, None, id="another-pool-of-its-class-is-in"),
        pytest.param({"light": 300.0, "push": 200.0}, CHAT, (Reason.WAIT_TOO_LONG, 200.0), id="none-is-in"),
    ],
)
def test_a_model_that_cannot_be_back_in_time_is_not_waited_for(
    back_at: Mapping[str, float], traffic_class: TrafficClass, refused: tuple[Reason, float] | None
) -> None:
    site = Site()
    site.line.expect(back_at)

    found = site.enter("a", traffic_class=traffic_class)
    assert (None if found is None else (found.reason, found.expected_wait_s)) == refused
    assert found is None or found.retry_after_s == 59.0


def drained_for_good(site: Site, name: str) -> None:
    """Have the operator drain a backend."""
    site.backends[name] = replace(site.backends[name], drain=True)
    site.policy = replace(site.policy, backends=site.backends)


def test_no_model_is_waited_for_that_the_operator_drains_while_it_is_out() -> None:
    """No wait would help: there is no backend."""
    site = Site()
    drained_for_good(site, "light")
    site.line.expect({"light": 300.0})

    assert site.enter("a") is None
    (refused,) = site.line.turn(0.0, out(site, "light")).refused
    assert refused.reason is Reason.NO_BACKEND


def test_a_drained_model_that_is_in_does_not_shorten_the_wait_for_another() -> None:
    site = Site()
    drained_for_good(site, "light")
    site.line.expect({"push": 200.0})

    refused = site.enter("a", traffic_class=CHAT)
    assert refused is not None
    assert (refused.reason, refused.expected_wait_s) == (Reason.WAIT_TOO_LONG, 200.0)


def test_a_model_that_is_in_does_not_count_for_what_it_could_not_take() -> None:
    site = Site()
    site.line.expect({"push": 200.0})
    image = Demand(seqs=1, prompt_tokens=10, total_tokens=20, images=1)

    refused = site.enter("an image", traffic_class=CHAT, demand=image)
    assert refused is not None
    assert (refused.reason, refused.expected_wait_s) == (Reason.WAIT_TOO_LONG, 200.0)


def test_who_waited_in_vain_for_a_model_is_not_told_to_come_back_at_once() -> None:
    site = Site()
    site.enter("a", traffic_class=bounded(max_wait_s=400))
    site.line.expect({"light": 430.0})

    (refused,) = site.line.turn(400.0, out(site, "light")).refused
    assert (refused.reason, refused.retry_after_s) == (Reason.WAITED_TOO_LONG, 30.0)


def test_all_who_are_refused_for_a_model_that_is_out_may_come_when_it_is_back() -> None:
    site = Site()
    site.line.expect({"light": 40.0})

    told = [site.enter(name, traffic_class=bounded(max_wait_s=9)) for name in "abc"]
    assert [None if one is None else one.retry_after_s for one in told] == [40.0, 40.0, 40.0]


def test_the_longer_of_two_waits_counts_for_a_model_that_is_out() -> None:
    site = Site()
    drained(site, 10.0)
    for back_at, wait_s in ((420.0, 300.0), (123.0, 10.0)):
        site.line.expect({"light": back_at})
        refused = site.enter("a", 120.0, traffic_class=bounded(max_wait_s=9))
        assert refused is not None
        assert refused.expected_wait_s == pytest.approx(wait_s)


def test_a_model_that_was_to_be_back_by_now_may_be_in() -> None:
    site = Site()
    drained(site, 10.0)
    site.line.expect({"light": 119.0})
    assert site.enter("a", 120.0) is None  # the next turn will tell
    tried = site.enter("tried everywhere", 120.0, traffic_class=PATIENT, failed=frozenset({"light"}))
    assert tried is None


# ------------------------------------------------------------------ what operators see


def test_waiters_are_shown_in_the_order_in_which_they_start() -> None:
    site = Site(knee=1)
    site.enter("runs")
    site.start()
    for name, key in (("a-1", "a"), ("a-2", "a"), ("b-1", "b"), ("a-3", "a")):
        site.enter(name, 1.0, key=key, traffic_class=PATIENT)
    shown = site.line.waiters(3.5)
    started = []
    for _ in shown:
        (running,) = [name for name, (backend, _) in site.taken.items() if backend == "light"]
        site.end(running, 4.0)
        started += site.start(4.0)

    assert [one.id for one in shown] == started
    assert [one.position for one in shown] == [1, 2, 3, 4]
    assert [one.key for one in shown[:2]] == ["a", "b"]  # each key in turn
    assert {one.waited_s for one in shown} == {2.5}
    assert {(one.traffic_class, one.pool, one.is_behind, one.tries) for one in shown} == {
        ("chat", "light", False, 0)
    }
    assert shown[0].due_in_s == pytest.approx(1.0 + PATIENT.waiting.ttft_target_s - 3.5)


def test_looking_at_waiters_changes_nothing_and_is_bounded() -> None:
    site = Site(knee=1)
    site.enter("runs")
    site.start()
    for number in range(200):
        site.enter(f"w-{number}", 1.0, traffic_class=PATIENT)

    assert len(site.line.waiters(2.0)) == LOOKAHEAD
    assert len(site.line.waiters(2.0, most=7)) == 7
    assert site.line.waiters(2.0) == site.line.waiters(2.0)
    assert len(site.line) == 200
    assert WaitingLine().waiters(0.0) == []


def test_of_each_class_so_many_are_looked_at_however_many_wait_in_another() -> None:
    other = TrafficClass("other", ("light",), waiting=PATIENT.waiting)
    site = Site(knee=1)
    for number in range(LOOKAHEAD + 10):
        site.enter(f"chat-{number}", traffic_class=PATIENT)
    for number in range(3):
        site.enter(f"other-{number}", 1.0, traffic_class=other)

    shown = [one.id for one in site.line.waiters(2.0, most=1000)]

    assert shown == [f"chat-{number}" for number in range(LOOKAHEAD)] + [f"other-{n}" for n in range(3)]


def test_a_document_waits_for_no_backend_that_it_was_tried_on() -> None:
    site = Site()
    site.enter("busy", traffic_class=PLAIN)
    assert site.start() == ["busy"]
    either = replace(LONG, pools=("push", "light"))
    site.enter("document", traffic_class=either, prompt=20_000, failed=frozenset({"push"}))
    assert site.start() == []
    assert site.line.long_waiting() == {}

    site.enter("chat", traffic_class=CHAT)

    assert site.start() == ["chat"]  # push is idle, and nobody else wants it
    site.line.leave("document")
    assert site.line.long_waiting() == {}


def test_no_key_takes_what_is_looked_at_of_another_class() -> None:
    other = TrafficClass("other", ("light",), waiting=PATIENT.waiting)
    site = Site(knee=1)
    for number in range(LOOKAHEAD):
        for each in range(2):
            site.enter(f"{number}/{each}", key=str(number), traffic_class=PATIENT)
    for number in range(3):
        site.enter(f"other-{number}", key="another", traffic_class=other)

    shown = [one.id for one in site.line.waiters(0.0, most=1000)]

    assert shown == [f"{number}/0" for number in range(LOOKAHEAD)] + [f"other-{n}" for n in range(3)]


class Name(str):
    """A name of which it can be seen whether anybody still has it."""


def test_nothing_is_kept_of_work_without_a_limit_that_has_left_while_somebody_else_waits_on() -> None:
    site = Site()
    site.enter("busy")
    assert site.start() == ["busy"]
    site.enter("waits on")
    name = Name("job")
    kept = weakref.ref(name)
    site.enter(name, traffic_class=replace(PLAIN, waiting=patient(PLAIN.waiting)))
    site.turn()
    assert site.line.position(name) == 2

    site.line.leave(name)
    del name

    assert site.turn().next_turn_at == PLAIN.waiting.max_wait_s
    assert kept() is None


def test_who_can_run_nowhere_does_not_wait_behind_somebody_who_can() -> None:
    """It has failed on every backend, say: a turn tells that, though one that asks no more waits too."""
    site = Site()
    site.enter("runs", 0.0)
    site.start(0.0)
    site.enter("waits", 1.0)
    site.enter("hopeless", 2.0, failed=frozenset({"light"}))

    turn = site.turn(2.0)

    assert [(refused.id, refused.reason) for refused in turn.refused] == [("hopeless", Reason.NO_BACKEND)]
    assert site.line.position("waits") == 1


@pytest.mark.parametrize(
    "asked",
    [
        Demand(seqs=1, prompt_tokens=100, total_tokens=200, images=1),
        Demand(seqs=1, prompt_tokens=100, total_tokens=200, audios=1),
        Demand(seqs=1, prompt_tokens=100, total_tokens=20_000),
    ],
    ids=["image", "audio", "long-answer"],
)
def test_a_newcomer_that_asks_less_than_those_without_room_is_not_refused_for_them(asked: Demand) -> None:
    """They wait for the only backend that takes them; short texts run on the other one of the pool."""
    site = Site()
    knee = (KneeStep(None, 1),)
    site.backends = {
        "sees": Backend("sees", "http://sees", Capacity(262_144, knee), modalities=Modalities(None, None)),
        "reads": Backend("reads", "http://reads", Capacity(10_000, knee), modalities=Modalities(0, 0)),
    }
    site.policy = Policy(models=(), pools={"light": Pool("light", ("sees", "reads"))}, backends=site.backends)
    site.status = dict.fromkeys(site.backends, UP)
    site.loads = dict.fromkeys(site.backends, Load())
    hasty = replace(PLAIN, waiting=Waiting(max_wait_s=1.0))
    for number in range(4):  # so that a slot is expected to take longer than anybody's patience
        site.enter(f"before-{number}", 20.0 * number, traffic_class=hasty, demand=asked)
        site.start(20.0 * number)
        site.end(f"before-{number}", 20.0 * number + 20.0)
    site.enter("runs", 80.0, traffic_class=hasty, demand=asked)
    site.start(80.0)
    site.line.enter(site.ticket("waits", 80.0, traffic_class=hasty, demand=asked), 80.0, has_waited=True)
    assert site.start(80.0) == []

    assert site.enter("another", 80.0, traffic_class=hasty, demand=asked, key="b") is not None
    assert site.enter("text", 80.0, traffic_class=hasty, key="b") is None
    assert site.start(80.0) == ["text"]


def test_a_key_with_one_request_is_ahead_of_nobody_with_more_than_that() -> None:
    site = Site()
    site.enter("runs", 0.0)
    site.start(0.0)
    names = [("A", 30), *((f"single-{number}", 1) for number in range(20)), ("B", 3)]
    for key, count in names:
        for number in range(count):
            site.enter(f"{key}/{number}", 1.0, key=key)

    # Its own two, three of A's, and each of the twenty.
    assert site.line.position("B/2") == 2 + 3 + 20 + 1
    # Which is what it will be.
    assert [one.position for one in site.line.waiters(1.0) if one.id == "B/2"] == [26]
    order = site.served(["B/2"], 1.0)
    assert order.index("B/2") + 1 <= 26


# ------------------------------------------------------------ forecasts for long prompts

READS_1000_PER_S = PerfModel(t_fixed=0, t_mem=0, kv_read=0, kv_span=0, t_seq=0, t_tok=1e-3, t_attn=0, sharp=1)


class Library(Site):
    """The same servers; those of the pool push read 1,000 tokens a second."""

    def __init__(self, push: int = 1, **gates: object) -> None:
        super().__init__()
        names = ["push", *(f"push-{number}" for number in range(1, push))]
        for name in names:
            self.backends[name] = replace(self.backends["push"], id=name, perf=READS_1000_PER_S)
        pool = Pool("push", tuple(names), gates=Gates(**gates))  # type: ignore[arg-type]
        pools = {**self.policy.pools, "push": pool}
        self.policy = replace(self.policy, pools=pools, backends=dict(self.backends))
        self.status = dict.fromkeys(self.backends, UP)
        self.loads = dict.fromkeys(self.backends, Load())

    def document(self, name: str, now: float, tokens: int, **fields: object) -> Refused | None:
        wanted = {"traffic_class": LONG, "prompt": tokens, "prefill_s": tokens / 1000, **fields}
        return self.enter(name, now, **wanted)

    def read(self, name: str, now: float) -> None:
        """Let a server emit the first token of a document."""
        backend, _ = self.taken[name]
        self.line.prefilled(name, backend, now)
        self.answered(name)

    def wait_s(self, now: float, **fields: object) -> float | None:
        wanted = {"traffic_class": LONG, "prompt": 100_000, "prefill_s": 100.0, **fields}
        return self.line.foresee(self.ticket("asks", now, **wanted), now).wait_s  # type: ignore[arg-type]


def hasty(max_wait_s: float) -> TrafficClass:
    return replace(LONG, waiting=replace(LONG.waiting, max_wait_s=max_wait_s))


def test_a_document_waits_for_what_is_read_before_it_and_not_for_a_slot() -> None:
    site = Library()
    chat = TrafficClass("chat", ("push",))
    for number in range(10):  # a slot becomes free each second
        site.enter(f"chat-{number}", float(number), traffic_class=chat)
        site.start(float(number))
        site.end(f"chat-{number}", number + 1.0)
    site.document("read-now", 10.0, 40_000)
    assert site.start(10.0) == ["read-now"]
    site.document("second", 20.0, 20_000)

    assert site.start(20.0) == []
    assert site.wait_s(20.0) == pytest.approx(30 + 20)  # the rest of the one, and the other
    assert site.wait_s(45.0) == pytest.approx(5 + 20)
    assert site.wait_s(60.0) == pytest.approx(4 + 20)  # it takes longer than it should
    site.read("read-now", 50.0)
    assert site.start(50.0) == ["second"]


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"traffic_class": hasty(29.0)}, Reason.WAIT_TOO_LONG),
        ({"traffic_class": hasty(31.0)}, None),
        ({"deadline": 39.0}, Reason.DEADLINE),
        ({"deadline": 41.0}, None),
    ],
    ids=["max-wait", "in-time", "deadline", "before-it"],
)
def test_who_would_wait_too_long_for_a_prefill_is_told_at_once(
    asked: Mapping[str, object], reason: Reason | None
) -> None:
    site = Library()
    site.document("read-now", 0.0, 40_000)
    site.start()
    site.document("next", 10.0, 20_000, **asked)

    refused = site.turn(10.0).refused

    assert [one.reason for one in refused] == ([] if reason is None else [reason])
    for one in refused:
        assert one.expected_wait_s == pytest.approx(30.0)
        assert one.retry_after_s == pytest.approx(30.0)


def test_of_documents_that_come_at_once_each_waits_for_those_before_it() -> None:
    site = Library()
    site.document("past", 0.0, 20_000)
    site.start()
    site.read("past", 20.0)
    site.end("past", 30.0)
    for number in range(4):
        site.document(f"document-{number}", 500.0, 20_000, traffic_class=hasty(50.0))

    turn = site.turn(500.0)

    assert [offer.ticket.id for offer in turn.offers] == ["document-0"]
    assert [one.id for one in turn.refused] == ["document-3"]
    assert turn.refused[0].expected_wait_s == pytest.approx(60.0)


@pytest.mark.parametrize("others", [0, 1])
def test_a_document_without_a_slot_is_told_the_same_before_it_asks(others: int) -> None:
    site = Library(long_seqs=2)
    now = 0.0
    for number in range(4):
        site.document(f"document-{number}", now, 20_000)
        site.start(now)
        now += 20.0
        site.read(f"document-{number}", now)
        if number < 2:  # the other two go on
            now += 280.0
            site.end(f"document-{number}", now)
    for number in range(others):
        site.document(f"other-{number}", now, 20_000)
        assert site.start(now) == []
    asked = site.ticket("asks", now, traffic_class=LONG, prompt=20_000, prefill_s=20.0)

    before = site.line.foresee(asked, now, site.views()).wait_s
    site.line.enter(asked, now)
    site.turn(now)

    assert site.line.position("asks") == others + 1
    assert before == site.line.foresee(asked, now).wait_s == pytest.approx((others + 1) * 300 / 2)


def test_the_first_document_of_a_class_is_told_what_those_of_others_wait_for() -> None:
    site = Library()
    site.document("read-now", 0.0, 40_000)
    site.start()
    site.document("second", 0.0, 20_000)
    site.start()
    beside, below = replace(LONG, name="beside"), replace(LONG, name="below", priority=-1)

    assert site.wait_s(10.0, traffic_class=beside) == pytest.approx(30 + 20)
    assert site.wait_s(10.0, traffic_class=below) == pytest.approx(30 + 20)
    assert site.line.waiting() == {("gemma", "long"): 1}


def test_chats_that_end_make_no_room_for_a_document_where_documents_have_a_limit() -> None:
    site = Library(long_seqs=1)
    chat = TrafficClass("chat", ("push",))
    site.document("past", 0.0, 20_000)
    site.start()
    site.read("past", 20.0)
    site.end("past", 120.0)
    site.document("goes-on", 120.0, 20_000)
    site.start(120.0)
    site.read("goes-on", 140.0)
    for number in range(20):  # one each second
        site.enter(f"chat-{number}", 140.0 + number, traffic_class=chat)
        site.start(140.0 + number)
        site.end(f"chat-{number}", 141.0 + number)
    for number in range(10):  # of which one waits
        site.enter(f"runs-{number}", 160.0, traffic_class=chat)
    site.document("first", 160.0, 20_000)
    site.start(160.0)

    site.document("second", 160.0, 20_000)
    site.turn(160.0)

    assert site.wait_s(160.0) == pytest.approx(3 * 120)  # of documents, one ends every two minutes
    site.line.note_peers(1)
    assert site.wait_s(160.0) == pytest.approx(3 * 120)
    site.loads["push"] += Load(long_seqs=3)  # they run more, of which its even part is two
    site.turn(160.0)
    assert site.wait_s(160.0) == pytest.approx(3 * 120 / 2)


def test_a_forecast_learns_how_long_prefills_take() -> None:
    site = Library()
    now = 0.0
    for number in range(30):
        site.document(f"past-{number}", now, 40_000)
        site.start(now)
        now += 80.0
        site.read(f"past-{number}", now)
        site.end(f"past-{number}", now)
    site.document("read-now", now, 40_000)
    site.start(now)
    site.document("second", now, 20_000)
    site.start(now)

    assert site.wait_s(now) == pytest.approx(2 * (40 + 20), rel=0.01)


@pytest.mark.parametrize(
    "asked",
    [
        {"traffic_class": TrafficClass("chat", ("push",)), "prompt": 2_000},
        {"prompt": 80_000, "prefix_shares": {"push": 0.975}},
    ],
    ids=["a-chat", "the-next-turn-of-a-long-conversation"],
)
def test_what_starts_beside_a_document_does_not_make_it_take_longer(asked: Mapping[str, Any]) -> None:
    site = Library()
    site.document("read-now", 0.0, 40_000)
    site.start()
    site.document("beside", 30.0, asked["prompt"], **asked)
    assert site.start(30.0) == ["beside"]
    assert site.line.reading_here(30.0) == {"push": 10.0}
    site.document("second", 35.0, 20_000)
    site.start(35.0)

    assert site.wait_s(35.0) == pytest.approx(5 + 20)


def test_a_document_that_starts_before_a_chat_keeps_the_next_chat_from_spilling_no_longer() -> None:
    site = Library(push=2)
    site.document("read-now", 0.0, 40_000, traffic_class=replace(LONG, priority=1))
    for name in ("chat", "spills"):
        site.enter(name, traffic_class=CHAT)
    assert site.turn().next_turn_at == 0.0


def test_a_document_is_read_where_it_has_started_though_another_was_offered_first() -> None:
    site = Library(push=2)
    site.document("read-now", 0.0, 40_000)
    (offer,) = site.turn().offers
    assert [one.backend for one in offer.candidates] == ["push", "push-1"]
    site.line.started("read-now", "push-1", 0.0)

    assert site.line.reading_here(10.0) == {"push-1": pytest.approx(30)}


def test_where_two_are_read_at_once_a_third_waits_for_the_first_of_them() -> None:
    site = Library(long_prefills=2)
    site.document("first", 0.0, 40_000)
    site.document("second", 0.0, 60_000)
    assert len(site.start()) == 2
    site.document("third", 10.0, 20_000)
    site.start(10.0)

    assert site.wait_s(10.0) == pytest.approx(30 + 20)
    site.read("first", 40.0)
    assert site.start(40.0) == ["third"]
    site.document("fourth", 50.0, 20_000)
    site.start(50.0)
    assert site.wait_s(50.0) == pytest.approx(50 + 20)  # the second one's turn came when the first was read


def test_a_document_whose_caller_leaves_or_whose_place_was_gone_is_not_read() -> None:
    site = Library()
    site.document("leaves", 0.0, 80_000)
    site.start()
    site.end("leaves", 50.0, answered=False)
    site.document("missed", 50.0, 80_000)
    site.turn(50.0)
    site.line.missed("missed", ["push"], 50.0)
    assert site.line.reading_here(60.0) == {}
    site.start(60.0)
    site.document("second", 70.0, 20_000)
    site.start(70.0)

    assert site.line.reading_here(70.0) == {"push": 70.0}
    assert site.wait_s(70.0) == pytest.approx(70 + 20)


def test_where_no_first_token_is_seen_the_latest_document_is_the_one_that_is_read() -> None:
    site = Library()
    site.document("read", 0.0, 100_000)
    site.start()
    site.answered("read")  # by prediction
    site.document("read-now", 100.0, 40_000)
    site.start(100.0)
    site.document("second", 110.0, 20_000)
    site.start(110.0)

    assert site.wait_s(110.0) == pytest.approx(30 + 20)


def test_what_another_process_sent_is_read_as_long_as_it_says() -> None:
    site = Library()
    site.document("past", 0.0, 20_000)
    site.start()
    site.read("past", 20.0)
    site.end("past", 30.0)
    site.loads["push"] = Load(seqs=1, long_seqs=1, long_unanswered=1, prefill_ms=100_000)
    site.document("second", 500.0, 20_000)
    site.start(500.0)
    assert site.wait_s(500.0) == pytest.approx(100 + 20)  # of which it knows nothing else yet

    site.line.note_reading({"push": {"other": 510.0, "one of which it is over": 490.0}})

    assert site.wait_s(500.0) == pytest.approx(10 + 20)
    assert site.wait_s(520.0) == pytest.approx(20)
    assert site.line.reading_here(500.0) == {}
    site.line.note_reading({})
    assert site.wait_s(500.0) == pytest.approx(100 + 20)


def test_one_prompt_that_was_held_up_does_not_change_forecasts_much() -> None:
    site = Library()
    site.document("held-up", 0.0, 16_000)
    site.start()
    site.read("held-up", 32.0)
    site.document("read-now", 100.0, 40_000)
    site.start(100.0)
    site.document("second", 100.0, 20_000)
    site.start(100.0)

    assert site.wait_s(100.0) == pytest.approx(60 * 40 / 24)


def test_another_key_has_its_turn_before_a_key_with_many_documents() -> None:
    site = Library()
    site.document("read-now", 0.0, 40_000)
    site.start()
    for number in range(5):
        site.document(f"many-{number}", 1.0, 20_000, key="many")
    site.document("other", 1.0, 30_000, key="other")
    site.start(1.0)

    assert site.wait_s(10.0, key="many") == pytest.approx(30 + 5 * 20 + 30)
    assert site.wait_s(10.0, key="other") == pytest.approx(30 + 2 * 20 + 30)
    assert site.wait_s(10.0, key="new") == pytest.approx(30 + 20 + 30)


def test_documents_of_other_classes_of_the_pool_are_read_before_it_too() -> None:
    site = Library()
    site.document("read-now", 0.0, 40_000)
    site.start()
    urgent = replace(LONG, name="urgent", priority=1)
    beside = replace(LONG, name="beside")
    elsewhere = replace(LONG, name="elsewhere", pools=("light",))
    for number, one in enumerate((urgent, beside, elsewhere)):
        site.document(f"document-{number}", 1.0, 20_000 * (number + 1), traffic_class=one)
    site.document("job", 1.0, 80_000, traffic_class=beside, is_job=True)
    site.document("own", 1.0, 16_000)
    site.start(1.0)

    assert site.wait_s(10.0) == pytest.approx(30 + 20 + 40 + 16)
    assert site.wait_s(10.0, is_job=True) == pytest.approx(30 + 20 + 40 + 16)


def test_the_first_of_several_backends_that_has_read_what_it_has_takes_it() -> None:
    site = Library(push=2)
    for number, tokens in enumerate((40_000, 100_000)):
        site.document(f"read-now-{number}", 0.0, tokens)
    assert len(site.start()) == 2
    site.document("second", 0.0, 20_000)
    site.start()

    assert site.wait_s(10.0) == pytest.approx(30 + 20)
    site.document("third", 10.0, 80_000)
    assert site.wait_s(10.0) == pytest.approx((30 + 90 + 20 + 80) / 2)
    site.status["push"] = replace(UP, state=State.DOWN)
    site.turn(10.0)
    assert site.wait_s(10.0) == pytest.approx(90 + 20 + 80)


@pytest.mark.parametrize(
    ("gates", "asked", "wait_s"),
    [
        ({}, {"prefix_shares": {"push": 0.9}}, None),  # it is no long prefill there
        ({}, {"prefix_shares": {"push": 0.5}}, 30 + 20),
        ({"long_prefills": None}, {}, None),
        ({"long_prefills": 2}, {}, 0.0),
    ],
    ids=["cached", "half-of-it-cached", "no-gate", "open"],
)
def test_who_does_not_wait_for_the_gate_is_not_told_to(
    gates: Mapping[str, object], asked: Mapping[str, object], wait_s: float | None
) -> None:
    site = Library(**gates)  # type: ignore[arg-type]
    site.document("read-now", 0.0, 40_000)
    site.start()
    if wait_s != 0.0:
        site.document("second", 1.0, 80_000, prefix_shares={"push": 0.75})  # 20,000 tokens are left
    site.turn(1.0)

    assert site.wait_s(10.0, **asked) == (None if not wait_s else pytest.approx(wait_s))


def test_a_document_with_images_waits_for_the_gate_whatever_its_backend_has_seen_of_it() -> None:
    site = Library()
    site.document("read-now", 0.0, 40_000)
    site.start()
    site.document("second", 1.0, 20_000)
    site.turn(1.0)

    asked = Demand(seqs=1, prompt_tokens=80_000, total_tokens=80_100, images=1)
    assert site.wait_s(10.0, demand=asked, prefix_shares={"push": 0.9}) == pytest.approx(30 + 20)


def test_who_finds_the_gate_of_one_backend_open_does_not_wait_for_that_of_another() -> None:
    site = Library(push=2)
    site.document("read-now", 0.0, 40_000)
    site.start()
    site.loads["push-1"] = Load(seqs=1, prefill_ms=2_000)
    for name in ("runs", "waits"):  # elsewhere
        site.enter(name, 1.0)
        site.start(1.0)

    assert site.wait_s(10.0) is None


@pytest.mark.parametrize(
    ("pools", "failed", "wait_s"), [(("light", "push"), "light", 30), (("push", "light"), "push", 50 + 20)]
)
def test_a_document_waits_for_the_gate_of_the_first_pool_that_could_take_it(
    pools: tuple[str, ...], failed: str, wait_s: float
) -> None:
    site = Library(push=2)
    for number, tokens in enumerate((40_000, 60_000)):
        site.document(f"read-now-{number}", 0.0, tokens)
    assert len(site.start()) == 2
    site.document("second", 1.0, 20_000)
    site.start(1.0)

    asked = {"traffic_class": replace(LONG, name="both", pools=pools), "failed": frozenset({failed})}
    assert site.wait_s(10.0, **asked) == pytest.approx(wait_s)


def test_a_document_waits_for_a_model_that_is_out_as_others_do() -> None:
    site = Library()
    site.line.expect({"push": 300.0})

    refused = site.document("a", 0.0, 40_000, traffic_class=hasty(299.0))
    assert refused is not None
    assert (refused.reason, refused.expected_wait_s) == (Reason.WAIT_TOO_LONG, 300.0)


def test_a_document_that_its_backend_has_lost_is_read_as_a_whole_before_others() -> None:
    site = Library()
    site.document("read-now", 0.0, 40_000)
    site.start()
    site.document("lost", 1.0, 80_000, prefix_shares={"push": 0.75})
    site.start(1.0)

    site.line.forget_prefixes("push")

    assert site.wait_s(10.0) == pytest.approx(30 + 80)


@pytest.mark.parametrize(
    ("amounts", "more", "found"),
    [
        ((), 10.0, 0.0),
        ((5.0,), 0.0, 5.0),
        ((5.0,), 10.0, 15.0),
        ((9.0, 0.0), 0.0, 0.0),
        ((9.0, 0.0), 4.0, 4.0),
        ((9.0, 0.0), 9.0, 9.0),
        ((9.0, 0.0), 11.0, 10.0),
        ((1.0, 2.0, 50.0), 7.0, 5.0),
    ],
    ids=str,
)
def test_work_goes_to_the_backend_that_is_free_first(
    amounts: tuple[float, ...], more: float, found: float
) -> None:
    assert level(amounts, more) == pytest.approx(found)
