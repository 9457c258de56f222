"""Gateways that tell each other their facts, in any order, twice, or not at all; without a store between."""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from support.world import POLICY, StillClock

from gateway.core.admission import WHOLE
from gateway.core.backends import Gates
from gateway.core.conversations import HASHING, TOLD_MIN_TOKENS, Conversations
from gateway.core.count_check import CountTracker
from gateway.core.decision import Candidate
from gateway.core.facts import Attempts, Blocked, Facts, Learned
from gateway.core.health import BackendStatus, HealthRules, Outcome, ProbeOk, State, Verdict
from gateway.core.load import Demand, Load
from gateway.core.perf import PerfModel
from gateway.core.policy import TemplateCosts
from gateway.core.request import CountMode, Prompt, Turn
from gateway.core.selection import BackendView
from gateway.core.waiting import BLOCKED_KNOWN_S, Ticket, WaitingLine
from gateway.pipeline import BackendWatch, Peers
from gateway.store.facts import decode, encode
from gateway.store.memory import MemoryLedger
from gateway.store.prefixes import MemoryPrefixIndex
from gateway.tokenizer import PromptEstimator
from gateway.upstream.probes import Prober

MODEL = POLICY.models[0]
CHAT = MODEL.classes[1]
PROSE = Prompt(turns=(Turn("user", ("The river was wide, and nobody had crossed it. " * 60,)),))


class Gateway:
    """What one gateway process knows, joined as app.py does."""

    def __init__(self, name: str, keys: Sequence[str] = ("a", "b")) -> None:
        self.name = name
        self.clock = StillClock()
        self.fleet = Prober(POLICY.backends, HealthRules(), self.clock, secrets={}, tls={})
        self.estimator = PromptEstimator(None)
        self.line = WaitingLine()
        self.prefixes = MemoryPrefixIndex()
        self.looks = 0
        self.policy = POLICY
        self.watch = BackendWatch(lambda: self.policy, MemoryLedger(), CountTracker(), self.clock)
        self.peers = Peers(
            fleet=self.fleet,
            estimator=self.estimator,
            line=self.line,
            watch=self.watch,
            prefixes=self.prefixes,
            policy=lambda: self.policy,
            keys=keys,
            clock=self.clock,
            on_change=self._look,
        )
        for backend in POLICY.backends:
            self.fleet._observe(backend, ProbeOk(models=("served",)))

    def _look(self) -> None:
        self.looks += 1

    def hear(self, *others: "Gateway", **facts: Facts) -> None:
        said = {other.name: through_the_store(other.peers.facts()) for other in others}
        self.peers.hear({**said, **facts})

    def fail(self, backend: str, times: int = 1) -> None:
        for _ in range(times):
            self.fleet.report(backend, Outcome.FAILED, "status 500", math.inf)

    def state(self, backend: str) -> State:
        return self.fleet.statuses()[backend].state

    def wait(self, name: str, key: str) -> None:
        demand = Demand(seqs=1, prompt_tokens=100, total_tokens=1_000)
        self.line.enter(Ticket(name, MODEL.id, POLICY, CHAT, demand, key, arrived_at=10.0), 10.0)

    def ratio(self) -> float:
        before = PromptEstimator(None).estimate_now(PROSE, TemplateCosts(), 100_000)
        return self.estimator.estimate_now(PROSE, TemplateCosts(), 100_000).tokens / before.tokens

    def learn(self, ratio: float, answers: int = 200) -> None:
        estimate = PromptEstimator(None).estimate_now(PROSE, TemplateCosts(), 100_000)
        assert estimate.mode is CountMode.APPROXIMATE
        for _ in range(answers):
            self.estimator.observe(estimate, round(estimate.tokens * ratio))


def through_the_store(facts: Facts) -> Facts:
    decoded = decode(encode(facts))
    assert decoded is not None
    return decoded


def order(gateway: Gateway) -> list[str]:
    """Return in which order what waits would be started."""
    return [waiter.id for waiter in gateway.line.waiters(gateway.clock.now())]


@pytest.fixture
def here() -> Gateway:
    return Gateway("here")


@pytest.fixture
def there() -> Gateway:
    return Gateway("there")


# ------------------------------------------------------------------ health


def test_a_backend_that_failed_requests_there_is_out_here(here: Gateway, there: Gateway) -> None:
    here.hear(there)
    there.fail("push", 3)

    here.hear(there)

    status = here.fleet.statuses()["push"]
    assert status.state is State.EJECTED
    assert status.reason.startswith("seen by there: 3 failures, the last: failed: status 500")
    assert here.peers.facts().verdicts == {}
    assert here.state("light-0") is State.UP


def test_a_verdict_that_is_heard_again_and_again_counts_once(here: Gateway, there: Gateway) -> None:
    there.fail("push", 3)
    here.hear(there)
    here.clock.time += 5.0
    here.fleet._observe("push", ProbeOk())
    assert here.state("push") is State.PROBATION

    for _ in range(3):
        here.hear(there)  # its clock is late
    here.peers.hear({})  # it is gone for a while, or the store is
    here.hear(there)

    assert here.state("push") is State.PROBATION


def test_failures_here_and_there_add_up(here: Gateway, there: Gateway) -> None:
    here.hear(there)
    here.fail("push", 2)
    there.fail("push", 1)

    here.hear(there)

    assert here.state("push") is State.EJECTED
    there.hear(here)
    assert there.state("push") is State.EJECTED


def test_successes_there_forgive_failures_here(here: Gateway, there: Gateway) -> None:
    here.hear(there)
    here.fail("push", 1)
    there.fail("push", 1)
    here.hear(there)
    there.fleet.report("push", Outcome.OK, "", math.inf)
    there.fleet.report("push", Outcome.OK, "", math.inf)
    here.hear(there)

    here.fail("push", 1)

    assert here.state("push") is State.UP


def test_what_fails_from_here_alone_is_avoided_here_alone(here: Gateway, there: Gateway) -> None:
    here.hear(there)
    here.fail("push", 2)
    there.fleet.report("push", Outcome.OK, "", math.inf)
    here.hear(there)

    here.fail("push", 1)

    assert here.state("push") is State.EJECTED
    there.hear(here)
    assert there.state("push") is State.UP


def test_what_failed_there_before_it_was_heard_of_is_over(here: Gateway, there: Gateway) -> None:
    there.fail("push", 2)
    here.hear(there)
    here.fail("push", 1)

    assert here.state("push") is State.UP


# ------------------------------------------------------------------ counting


def test_what_was_learned_there_is_used_here(here: Gateway, there: Gateway) -> None:
    there.learn(1.12)

    here.hear(there)

    assert here.ratio() == pytest.approx(there.ratio())
    assert here.peers.facts().learned == Learned()
    here.peers.hear({})
    assert here.ratio() == 1.0


def test_gateways_that_hear_each_other_agree_and_count_no_answer_twice(here: Gateway, there: Gateway) -> None:
    here.learn(1.2, 100)
    there.learn(1.0, 50)
    own = here.peers.facts().learned
    for _ in range(20):
        here.hear(there)
        there.hear(here)

    assert here.ratio() == there.ratio() == pytest.approx(math.exp(math.log(1.2) * 100 / 170), abs=0.01)
    assert here.peers.facts().learned == own


# ------------------------------------------------------------------ fairness


def test_a_key_that_floods_another_gateway_is_behind_here(here: Gateway, there: Gateway) -> None:
    here.hear(there)
    here.wait("early", "a")
    here.wait("late", "b")
    assert order(here) == ["early", "late"]
    there.line._tokens_started.add((MODEL.id, CHAT.name, "a"), 50_000, 10.0)

    here.hear(there)

    assert order(here) == ["late", "early"]
    assert here.looks == 1  # what did not fit was first, and may have kept the other from starting
    here.hear(there)
    assert here.looks == 1


def charged(gateway: Gateway) -> dict[str | None, float]:
    lane = gateway.line._lanes.get((MODEL.id, CHAT.name))
    return {} if lane is None else dict(lane.shares._finish)


def saying(tokens: int, key: str | None = "a", model: str = MODEL.id, name: str = CHAT.name) -> Facts:
    return Facts(started={(model, name, key): tokens})


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ([{"x": saying(900)}], {}),
        ([{"x": Facts()}, {"x": saying(900)}], {"a": 900}),
        ([{"x": saying(100)}, {"x": saying(900)}, {"x": saying(900)}], {"a": 800}),
        ([{"x": saying(900)}, {"y": saying(900)}], {}),
        ([{"x": Facts()}, {}, {"x": saying(900)}], {}),
        ([{"x": Facts()}, {"x": saying(900, key="not a key of ours")}], {}),
        ([{"x": Facts()}, {"x": saying(900, key=None)}], {}),
        ([{"x": Facts()}, {"x": saying(900, model="not a model of ours")}], {}),
        ([{"x": Facts()}, {"x": saying(900, name="not a class of ours")}], {}),
    ],
    ids=[
        "what-was-before",
        "since-then",
        "repeated",
        "restarted-under-another-name",
        "gone-and-back",
        "another-key",
        "no-key",
        "another-model",
        "another-class",
    ],
)
def test_what_others_start_is_charged_once(
    here: Gateway, said: list[Mapping[str, Facts]], expected: dict[str, float]
) -> None:
    for facts in said:
        here.peers.hear(facts)

    assert charged(here) == expected
    assert set(here.line.waiting()) <= {(MODEL.id, CHAT.name)}
    assert here.peers.facts().started == {}


@pytest.mark.parametrize("is_replaced", [False, True], ids=["never-had-any", "has-none-now"])
def test_without_keys_what_others_start_is_charged_to_nobody_in_particular(is_replaced: bool) -> None:
    here = Gateway("here", keys=("a",) if is_replaced else ())
    if is_replaced:
        here.peers.replace_keys(())
    here.peers.hear({"x": Facts()})
    here.peers.hear({"x": saying(900, key=None)})

    assert charged(here) == {None: 900}


def test_keys_that_are_replaced_decide_from_then_on_who_is_charged(here: Gateway) -> None:
    here.peers.replace_keys(("b", "c"))
    here.hear(x=Facts())
    here.hear(x=Facts(started={(MODEL.id, CHAT.name, key): 900 for key in ("a", "b", "c", None)}))

    assert charged(here) == {"b": 900, "c": 900}


# ------------------------------------------------------------------ knees


def test_the_lowest_share_of_a_knee_that_another_has_found_is_kept_to(here: Gateway) -> None:
    light = replace(POLICY.pools["light"], tpot_target_s=0.3)
    here.policy = replace(POLICY, pools={**POLICY.pools, "light": light})
    here.hear(x=Facts(knee_shares={"light-0": 800_000}), y=Facts(knee_shares={"light-0": 700_000}))
    assert here.watch.share_max("light-0") == 700_000
    assert here.peers.facts().knee_shares == {}

    here.hear()
    assert here.watch.share_max("light-0") == WHOLE


# ------------------------------------------------------------------ spill


def test_long_prompts_that_wait_elsewhere_are_added_up_and_forgotten(here: Gateway) -> None:
    here.hear(x=Facts(long_waiting={"push": 1}), y=Facts(long_waiting={"push": 2}))
    assert (here.line.long_waiting(), here.looks) == ({"push": 3}, 1)
    here.hear(x=Facts(long_waiting={"push": 1}), y=Facts(long_waiting={"push": 2}))
    assert here.looks == 1
    assert here.peers.facts().long_waiting == {}

    here.hear(x=Facts(long_waiting={"push": 1}))

    assert (here.line.long_waiting(), here.looks) == ({"push": 1}, 2)


# ------------------------------------------------------------------ large requests


def test_of_what_waits_elsewhere_the_longest_keeps_its_room_until_it_has_it(here: Gateway) -> None:
    claims = {name: Load(seqs=2, share=share) for name, share in {"x": 500_000, "y": 400_000}.items()}
    told = {"x": Facts(blocked={"push": Blocked(2.0, claims["x"])})}
    here.hear(**told)
    assert (here.line.offered(), here.looks) == ({"push": claims["x"]}, 1)

    told["y"] = Facts(blocked={"push": Blocked(3.0, claims["y"])})
    here.hear(**told)
    here.hear(**told)
    assert (here.line.offered(), here.looks) == ({"push": claims["y"]}, 2)
    assert here.peers.facts().blocked == {}

    told["x"] = Facts(blocked={"push": Blocked(4.0, claims["x"])})
    here.hear(**told)
    assert (here.line.offered(), here.looks) == ({"push": claims["x"]}, 3)

    here.hear()
    assert (here.line.offered(), here.looks) == ({}, 4)


def test_what_waits_elsewhere_keeps_its_room_for_as_long_as_it_is_told(here: Gateway) -> None:
    claim = Load(seqs=2, share=500_000)
    for waited_s in range(2, 2 + 2 * round(BLOCKED_KNOWN_S)):
        here.hear(x=Facts(blocked={"push": Blocked(float(waited_s), claim)}))
        assert (here.line.offered(), here.looks) == ({"push": claim}, 1)
        here.clock.time += 1


def test_what_a_gateway_that_is_gone_has_waited_for_is_soon_free(here: Gateway) -> None:
    told = Facts(blocked={"push": Blocked(2.0, Load(seqs=2, share=500_000))})
    for _ in range(4):
        here.hear(x=told)
        here.clock.time += 1
    assert here.looks == 2
    assert here.line.offered() == {}


# ------------------------------------------------------------------ forecasts


def test_what_others_read_is_told_and_heard(here: Gateway, there: Gateway) -> None:
    document = next(one for one in MODEL.classes if one.pools[0] == "push")
    demand = Demand(seqs=1, prompt_tokens=20_000, total_tokens=21_000)
    perf = PerfModel(t_fixed=0, t_mem=0, kv_read=0, kv_span=0, t_seq=0, t_tok=1e-3, t_attn=0, sharp=1)
    backend = replace(POLICY.backends["push"], perf=perf)
    gated = replace(POLICY.pools["push"], gates=Gates(long_prefills=1))
    policy = replace(
        POLICY, backends={**POLICY.backends, "push": backend}, pools={**POLICY.pools, "push": gated}
    )
    ticket = Ticket("reads", MODEL.id, policy, document, demand, "a", arrived_at=0.0)
    claim = Load(seqs=1, long_seqs=1, long_unanswered=1, prefill_ms=30_000)
    views = {"push": BackendView(backend, claim, BackendStatus(state=State.UP, served_models=("gemma-4",)))}

    def wait_s() -> float | None:
        return here.line.foresee(replace(ticket, id="waits"), here.clock.now(), views).wait_s

    there.line.start_at_once(ticket, Candidate("push", "push", claim=claim), there.clock.now())
    there.clock.time += 20.0
    facts = there.peers.facts()
    assert facts.reading == {"push": 10.0}
    unheard_s = wait_s()

    here.hear(there=through_the_store(facts), other=Facts(reading={"not a backend of ours": 5.0}))

    assert (unheard_s, wait_s()) == (30.0, 10.0)
    assert here.peers.facts().reading == {}
    here.hear()
    assert wait_s() == 30.0


# ------------------------------------------------------------------ for operators


def test_an_operator_sees_what_the_others_tell(here: Gateway, there: Gateway) -> None:
    there.fail("push", 3)
    there.learn(1.12, 20)
    facts = replace(
        there.peers.facts(),
        long_waiting={"push": 1},
        reading={"push": 2.5},
        started={(MODEL.id, CHAT.name, "a"): 700},
        knee_shares={"push": 900_000},
        blocked={"push": Blocked(2.5, Load(seqs=2, share=500_000))},
    )
    here.hear(there=facts)

    seen = here.peers.view()["there"]

    assert seen["verdicts"]["push"].startswith("3 failures")
    assert {name: seen[name] for name in seen if name != "verdicts"} == {
        "requests_judged": 3,
        "answers_learned_from": 20,
        "margin_tokens": 0,
        "tokens_started": 700,
        "long_waiting": {"push": 1},
        "reading": {"push": 2.5},
        "knee_shares": {"push": 0.9},
        "blocked": {"push": 2.5},
        "conversations": 0,
        "hashes_alike": True,
    }


def test_the_slots_that_become_free_are_shared_with_those_that_are_heard(here: Gateway) -> None:
    def rate() -> float | None:
        here.wait("next", "b")
        here.line.turn(10.0, views)
        return here.line.drains_per_s(10.0)[MODEL.id, CHAT.name]

    views = {
        name: BackendView(backend, Load(seqs=6, share=WHOLE), here.fleet.statuses()[name])
        for name, backend in POLICY.backends.items()
    }
    demand = Demand(seqs=1, prompt_tokens=100, total_tokens=1_000)
    for name in ("ended", "running"):
        ticket = Ticket(name, MODEL.id, POLICY, CHAT, demand, "a", arrived_at=0.0)
        here.line.start_at_once(ticket, Candidate("light-0", "light"), 0.0)
    here.line.released("ended", "light-0", 10.0)

    assert rate() == pytest.approx(1 / 10)
    here.hear(x=Facts(), y=Facts())
    assert rate() == pytest.approx(12 / 3 / 10)  # twelve run on the first pool of the class
    here.hear()
    assert rate() == pytest.approx(1 / 10)


def test_what_is_said_of_a_backend_that_is_not_configured_here_is_ignored(here: Gateway) -> None:
    elsewhere = Facts(
        verdicts={"theirs": Verdict(1, State.EJECTED, "x", 5.0)}, attempts={"theirs": Attempts(1, 1)}
    )
    here.hear(x=Facts())
    here.hear(x=elsewhere)

    assert set(here.fleet.statuses()) == set(POLICY.backends)


# ------------------------------------------------------------------ conversations

FIRST_TURN = ((1, 0.4), (2, 1.0))
NEXT_TURN = ((1, 0.3), (2, 0.7), (3, 1.0))


def test_a_long_conversation_is_known_where_it_was_not_served(here: Gateway, there: Gateway) -> None:
    there.prefixes.remember(FIRST_TURN, "light-1", TOLD_MIN_TOKENS, 0.0)
    here.hear(there)

    assert here.prefixes.held(NEXT_TURN) == {"light-1": 0.7}
    assert here.peers.facts().conversations.answered == {}  # nothing is passed on
    assert here.peers.view()["there"]["conversations"] == 1
    assert here.peers.view()["there"]["hashes_alike"]


def test_a_short_one_is_not(here: Gateway, there: Gateway) -> None:
    there.prefixes.remember(FIRST_TURN, "light-1", TOLD_MIN_TOKENS - 1, 0.0)
    here.hear(there)

    assert here.prefixes.held(NEXT_TURN) == {}


def test_what_a_backend_has_lost_does_not_come_back_by_being_heard_again(
    here: Gateway, there: Gateway
) -> None:
    there.prefixes.remember(FIRST_TURN, "light-1", TOLD_MIN_TOKENS, 0.0)
    here.hear(there)
    here.prefixes.forget("light-1")
    here.hear(there)

    assert here.prefixes.held(NEXT_TURN) == {}


def test_a_backend_that_is_not_in_the_configuration_holds_nothing(here: Gateway, there: Gateway) -> None:
    there.prefixes.remember(FIRST_TURN, "elsewhere", TOLD_MIN_TOKENS, 0.0)
    here.hear(there)

    assert here.prefixes.held(NEXT_TURN) == {}


def test_keys_of_a_process_that_hashes_differently_are_not_read(
    here: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gateway.store")
    answered = {"light-1": ((1, 2),)}
    for _ in range(2):
        here.hear(x=Facts(conversations=Conversations(HASHING + 1, answered)), y=Facts())

    assert here.prefixes.held(NEXT_TURN) == {}
    assert not here.peers.view()["x"]["hashes_alike"]
    fields = [record.__dict__.get("fields") or {} for record in caplog.records]
    assert [one["gateway"] for one in fields if one.get("event") == "conversations_unshared"] == ["x"]

    here.hear()
    here.hear(x=Facts(conversations=Conversations(HASHING + 1, answered)))  # it was away
    fields = [record.__dict__.get("fields") or {} for record in caplog.records]
    assert [one.get("event") for one in fields] == ["conversations_unshared"] * 2
