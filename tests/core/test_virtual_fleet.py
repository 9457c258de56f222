"""A fleet in virtual time: a request ends with its last sequence, and callers leave when they leave."""

from dataclasses import dataclass, field
from math import inf

import pytest

from gateway.core.backends import Capacity, KneeStep
from gateway.core.perf import PerfModel
from gateway.core.profile import EngineFlags
from gateway.core.virtual_fleet import Fate, Fleet, Patience

FOREVER = Patience()
CAPACITY = Capacity(100, (KneeStep(None, 4),))
A_SECOND_PER_STEP = PerfModel(1.0, 0, 0, 0, 0, 0, 0, 1)
FOUR_AT_ONCE = EngineFlags(4, 100)


@dataclass(frozen=True)
class Call:
    id: int
    at: float
    prompt_tokens: int = 10
    output_tokens: int = 5
    seqs: int = 1
    patience: Patience = FOREVER
    prefix_keys: tuple[int, ...] = ()


@dataclass(frozen=True)
class Server:
    capacity: Capacity = CAPACITY
    perf: PerfModel = A_SECOND_PER_STEP
    flags: EngineFlags = FOUR_AT_ONCE


@dataclass
class Everything:
    """Sends everything to the one server, at once or after `after_s`."""

    after_s: float = 0.0
    heard: list[tuple[str, int, float]] = field(default_factory=list)
    waiting: list[Call] = field(default_factory=list)

    def arrive(self, fleet: Fleet[Call], arrival: Call) -> None:
        self.waiting.append(arrival)
        fleet.look_at(fleet.now + self.after_s)

    def look(self, fleet: Fleet[Call]) -> None:
        while self.waiting:
            fleet.send(self.waiting.pop(0), "one")

    def answered(self, fleet: Fleet[Call], fate: Fate[Call]) -> None:
        self.heard.append(("answered", fate.arrival.id, fleet.now))

    def ended(self, fleet: Fleet[Call], fate: Fate[Call]) -> None:
        self.heard.append(("ended", fate.arrival.id, fleet.now))

    def left(self, fleet: Fleet[Call], fate: Fate[Call]) -> None:
        self.heard.append(("left", fate.arrival.id, fleet.now))
        self.waiting = [one for one in self.waiting if one.id != fate.arrival.id]


@dataclass
class Comeback(Everything):
    """Adds another request two seconds after the first has ended."""

    patience: Patience = FOREVER

    def ended(self, fleet: Fleet[Call], fate: Fate[Call]) -> None:
        super().ended(fleet, fate)
        if fate.arrival.id == 0:
            fleet.add(Call(1, fleet.now + 2.0, patience=self.patience))


def run(router: Everything, *calls: Call) -> Fleet[Call]:
    fleet = Fleet[Call](router, calls, {"one": Server()}, lambda call: call.patience)
    fleet.run()
    assert fleet.boxes["one"].in_flight == 0
    assert fleet.boxes["one"].engine.running == 0
    return fleet


@pytest.mark.parametrize("seqs", [1, 3])
def test_a_request_is_answered_once_and_ends_once_whatever_it_occupies(seqs: int) -> None:
    router = Everything()

    fleet = run(router, Call(0, 0.0, seqs=seqs))

    assert router.heard == [("answered", 0, 1.0), ("ended", 0, 5.0)]
    assert (fleet.fates[0].ttft_s, fleet.fates[0].done_at) == (1.0, 5.0)
    assert fleet.boxes["one"].tokens == 5 * seqs


def test_sequences_beyond_what_the_engine_runs_wait_in_it() -> None:
    router = Everything()

    fleet = run(router, Call(0, 0.0, seqs=5))

    assert router.heard == [("answered", 0, 1.0), ("ended", 0, 10.0)]  # the fifth begins when four are done
    assert fleet.boxes["one"].tokens == 25


@pytest.mark.parametrize(
    ("patience", "after_s", "heard"),
    [
        (Patience(0.5), 0.0, [("ended", 0, 0.5)]),
        (Patience(0.5), 2.0, [("left", 0, 0.5)]),
        (Patience(2.5), 0.0, [("answered", 0, 1.0), ("ended", 0, 5.0)]),
        (Patience(2.5, is_for_all=True), 0.0, [("answered", 0, 1.0), ("ended", 0, 2.5)]),
        (Patience(inf), 0.0, [("answered", 0, 1.0), ("ended", 0, 5.0)]),
    ],
)
def test_callers_leave_when_they_have_waited_long_enough(
    patience: Patience, after_s: float, heard: list[tuple[str, int, float]]
) -> None:
    router = Everything(after_s)

    fleet = run(router, Call(0, 0.0, seqs=2, patience=patience))

    assert router.heard == heard
    assert fleet.fates[0].left is (fleet.fates[0].done_at is None)


def test_a_request_may_be_added_while_others_run() -> None:
    router = Comeback()

    fleet = run(router, Call(0, 0.0))

    assert router.heard == [("answered", 0, 1.0), ("ended", 0, 5.0), ("answered", 1, 8.0), ("ended", 1, 12.0)]
    assert [fate.ttft_s for fate in fleet.fates] == [1.0, 1.0]


def test_a_request_that_is_added_has_its_own_patience() -> None:
    router = Comeback(patience=Patience(0.5))

    run(router, Call(0, 0.0))

    assert router.heard[-1] == ("ended", 1, 7.5)


def test_what_two_prompts_have_in_common_is_computed_once() -> None:
    reading = PerfModel(0, 0, 0, 0, 0, 0.01, 0, 1)
    calls = [Call(number, 10.0 * number, 300, 1, prefix_keys=(7, 8)) for number in range(2)]
    server = Server(Capacity(1_000, CAPACITY.knee), reading, EngineFlags(4, 1_000))
    fleet = Fleet[Call](Everything(), calls, {"one": server}, lambda call: call.patience)
    fleet.run()

    assert [fate.ttft_s for fate in fleet.fates] == [pytest.approx(3.0), pytest.approx(0.44)]


def test_what_no_window_holds_comes_back_at_once() -> None:
    fleet = run(Everything(), Call(0, 0.0, prompt_tokens=100))

    assert fleet.fates[0].refused == "400"
