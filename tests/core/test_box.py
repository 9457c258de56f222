"""Boxes as scripts: what happens, and what is ordered and where the box stands after it."""

from collections.abc import Mapping
from dataclasses import replace
from math import inf
from typing import Any

import pytest

from gateway.core.box import (
    COMMAND_PAUSES_S,
    INSPECT_S,
    RESTARTS_KEPT_S,
    Box,
    BoxRules,
    Event,
    Inspected,
    Observation,
    Order,
    OwnershipTaken,
    Quarantine,
    State,
    Task,
    TaskEnded,
    advance,
    back_at,
    comes_at,
    is_out,
    left_alone,
    objection,
    outlook,
    unowned,
)
from gateway.core.decision import Exclusion
from gateway.core.swap_policy import Backlog, Cause, Plan, SwapRules, Trigger

RULES = BoxRules(
    SwapRules(
        "gemma", {"gemma": Trigger(4, 1500.0), "qwen": Trigger(2, 600.0)}, residency_s=300.0, idle_s=1800.0
    ),
    boot_budget_s=600.0,
)
QWEN_WANTED = {"qwen": Backlog(2, 1000.0)}


class Script:
    """A box that things happen to, and what it has ordered."""

    def __init__(self, box: Box | None = None, rules: BoxRules = RULES, now: float = 1000.0) -> None:
        self.box = Box(since=now) if box is None else box
        self.rules = rules
        self.now = now
        self.order: Order | None = None

    def on(self, event: Event, after_s: float = 0.0) -> "Script":
        self.now += after_s
        self.box, self.order = advance(self.box, event, self.now, self.rules)
        return self

    def look(self, after_s: float = 0.0, **seen: Any) -> "Script":
        return self.on(Observation(**seen), after_s)

    def done(self, failure: str = "", after_s: float = 0.0) -> "Script":
        return self.on(TaskEnded(self.box.number, failure), after_s)

    def found(self, *names: str) -> "Script":
        return self.on(Inspected(self.box.number, frozenset(names)))

    @property
    def at(self) -> tuple[State, str, str]:
        return self.box.state, self.box.backend, self.box.target

    @property
    def ordered(self) -> list[tuple[Task, str]]:
        return [] if self.order is None else [(self.order.task, self.order.backend)]


def gemma_resident(**fields: Any) -> Script:
    """A box that has been at gemma's for long."""
    box = Box(State.RESIDENT, 0.0, backend="gemma", number=7, busy_at=1000.0, known_restarts={"gemma": 0})
    return Script(replace(box, **fields))


# ------------------------------------------------------------------ the start


def test_a_model_that_is_in_is_asked_before_it_is_trusted() -> None:
    box = Script().on(OwnershipTaken())
    assert box.ordered == [(Task.INSPECT, "")]
    assert box.found("qwen").ordered == [(Task.CHECK, "qwen")]
    assert objection(box.box, "qwen") == (Exclusion.SWAPPED_OUT, "its model is checking")
    assert box.done().at == (State.RESIDENT, "qwen", "")
    assert objection(box.box, "qwen") is None


def test_an_empty_box_is_cleared_before_the_default_is_booted() -> None:
    box = Script().on(OwnershipTaken()).found()
    assert (box.at, box.ordered) == ((State.STOPPING, "qwen", "gemma"), [(Task.STOP, "qwen")])
    # It may be stopping still, for a gateway that was killed: an order to start it would do nothing.
    assert box.done().ordered == [(Task.STOP, "gemma")]
    assert box.done().ordered == [(Task.START, "gemma")]
    assert box.done().look(300, ready=frozenset({"gemma"})).ordered == [(Task.CHECK, "gemma")]
    assert box.done(after_s=2).at == (State.RESIDENT, "gemma", "")
    assert box.box.boot_s == {"gemma": 300.0}


def test_of_several_models_that_are_in_the_default_stays() -> None:
    box = Script().on(OwnershipTaken()).found("gemma", "qwen")
    assert box.ordered == [(Task.STOP, "qwen")]
    assert not is_out(box.box, "gemma")
    assert box.done().ordered == [(Task.CHECK, "gemma")]
    # Whatever its place.
    rules = replace(RULES, swaps=replace(RULES.swaps, default="qwen"))
    assert Script(rules=rules).on(OwnershipTaken()).found("gemma", "qwen").ordered == [(Task.STOP, "gemma")]


def test_of_several_models_that_are_in_the_one_that_was_in_stays() -> None:
    box = Script(replace(gemma_resident().box, backend="qwen")).look(lost=frozenset({"qwen"}))
    assert box.found("gemma", "qwen").ordered == [(Task.STOP, "gemma")]
    assert box.done().ordered == [(Task.CHECK, "qwen")]


def test_of_several_models_that_are_in_one_in_quarantine_is_stopped() -> None:
    box = Script(Box(quarantine={"gemma": Quarantine("canary failed", 500.0)})).on(OwnershipTaken())
    assert box.found("gemma", "qwen").ordered == [(Task.STOP, "gemma")]
    assert box.done().ordered == [(Task.CHECK, "qwen")]


def test_of_three_models_the_others_are_stopped_one_after_another() -> None:
    triggers = {**RULES.swaps.triggers, "phi": Trigger()}
    rules = replace(RULES, swaps=replace(RULES.swaps, triggers=triggers))
    box = Script(rules=rules).on(OwnershipTaken()).found()
    assert (box.at, box.ordered) == ((State.STOPPING, "qwen", "gemma"), [(Task.STOP, "qwen")])
    assert (box.done().at, box.ordered) == ((State.STOPPING, "phi", "gemma"), [(Task.STOP, "phi")])
    assert (box.done().at, box.ordered) == ((State.STOPPING, "gemma", "gemma"), [(Task.STOP, "gemma")])
    assert (box.done().at, box.ordered) == ((State.BOOTING, "gemma", ""), [(Task.START, "gemma")])


def test_a_model_that_is_in_is_not_taken_for_out_while_another_is_stopped() -> None:
    box = Script().on(OwnershipTaken()).found("gemma", "qwen")
    assert (is_out(box.box, "gemma"), is_out(box.box, "qwen")) == (False, True)
    swapping = gemma_resident().look(wants=QWEN_WANTED).look(wants=QWEN_WANTED).box
    assert swapping.state is State.STOPPING
    assert (is_out(swapping, "gemma"), is_out(swapping, "qwen")) == (True, True)
    assert is_out(Box(State.RESIDENT, backend="gemma"), "qwen") is True
    assert not is_out(Box(State.UNKNOWN), "gemma")
    assert not is_out(Box(State.FAILED), "gemma")  # whoever starts it by hand wants it to be probed


def test_where_all_are_in_quarantine_none_is_booted() -> None:
    quarantine = {name: Quarantine("canary failed", 500.0) for name in ("gemma", "qwen")}
    box = Script(Box(quarantine=quarantine)).on(OwnershipTaken()).found()
    assert (box.at, box.ordered) == ((State.FAILED, "", ""), [])
    assert box.box.reason == "every model of the box is in quarantine"


# ------------------------------------------------------------------ a swap


def test_a_swap_drains_stops_boots_and_checks() -> None:
    box = gemma_resident().look(wants=QWEN_WANTED, in_flight={"gemma": 2})
    assert (box.at, box.ordered) == ((State.DRAINING, "gemma", "qwen"), [])
    assert box.box.reason == "2 requests wait for qwen"
    assert objection(box.box, "gemma") == (Exclusion.SWAPPED_OUT, "draining: its box is switching to qwen")

    # Nobody is cut off, however long the last one takes.
    assert box.look(3000, wants=QWEN_WANTED, in_flight={"gemma": 1}).ordered == []
    assert box.look(1, wants=QWEN_WANTED).ordered == [(Task.STOP, "gemma")]
    assert is_out(box.box, "gemma")
    assert box.done(after_s=10).ordered == [(Task.START, "qwen")]
    assert box.box.reason == "2 requests wait for qwen; it has to boot"
    assert not is_out(box.box, "qwen")

    # A server that answers before its start was carried out is not the one that was started.
    assert box.look(1, wants=QWEN_WANTED, ready=frozenset({"qwen"})).ordered == []
    assert box.done().look(299, wants=QWEN_WANTED).ordered == []
    assert box.look(6, wants=QWEN_WANTED, ready=frozenset({"qwen"})).ordered == [(Task.CHECK, "qwen")]
    assert objection(box.box, "qwen") == (Exclusion.SWAPPED_OUT, "its model is checking")
    assert box.done(after_s=1).at == (State.RESIDENT, "qwen", "")
    assert (box.box.resident_since, box.box.swaps) == (box.now, 1)


def test_every_swap_boots_its_model() -> None:
    """That the last one was started says nothing of the next."""
    box = booting_qwen().look(300, ready=frozenset({"qwen"})).done()
    wants = {"gemma": Backlog(4, 1000.0)}
    box.look(300, wants=wants).look(1, wants=wants)
    assert (box.at, box.ordered) == ((State.STOPPING, "qwen", "gemma"), [(Task.STOP, "qwen")])
    assert (box.done().at, box.ordered) == ((State.BOOTING, "gemma", ""), [(Task.START, "gemma")])
    assert box.look(1, ready=frozenset({"gemma"})).ordered == []  # its start is still being carried out
    assert box.box.cause is Cause.NOTHING
    box.done().look(249, ready=frozenset({"gemma"}))
    assert box.box.boot_s == {"qwen": 300.0, "gemma": 250.0}


def test_before_a_boot_all_others_are_stopped_because_somebody_may_have_started_a_third() -> None:
    triggers = {**RULES.swaps.triggers, "phi": Trigger()}
    box = Script(gemma_resident().box, replace(RULES, swaps=replace(RULES.swaps, triggers=triggers)))
    assert box.look(wants=QWEN_WANTED).look(1, wants=QWEN_WANTED).ordered == [(Task.STOP, "gemma")]
    assert (box.done().at, box.ordered) == ((State.STOPPING, "phi", "qwen"), [(Task.STOP, "phi")])
    assert (box.done().at, box.ordered) == ((State.BOOTING, "qwen", ""), [(Task.START, "qwen")])
    assert box.box.reason == "2 requests wait for qwen; it has to boot"


def test_what_others_have_sent_before_they_knew_that_it_drains_is_waited_for() -> None:
    box = Script(gemma_resident().box, replace(RULES, settle_s=3.0))
    assert box.look(wants=QWEN_WANTED).at[0] is State.DRAINING
    assert box.look(60, wants=QWEN_WANTED, heard_s=-inf).ordered == []
    assert box.look(1, wants=QWEN_WANTED, heard_s=2.9).ordered == []
    assert box.look(1, wants=QWEN_WANTED, heard_s=3.1, in_flight={"gemma": 1}).ordered == []
    assert box.look(1, wants=QWEN_WANTED, heard_s=3.1).ordered == [(Task.STOP, "gemma")]


def test_a_swap_that_nobody_wants_any_more_is_called_off() -> None:
    box = gemma_resident().look(wants=QWEN_WANTED, in_flight={"gemma": 1})
    assert box.look(1, in_flight={"gemma": 1}).at == (State.RESIDENT, "gemma", "")
    assert (box.box.resident_since, box.box.cause) == (0.0, Cause.NOTHING)


def test_a_swap_is_not_called_off_for_a_model_that_is_gone() -> None:
    box = gemma_resident().look(wants=QWEN_WANTED, in_flight={"gemma": 1})
    # What it had in flight ends with it, whatever is counted still.
    gone = {"lost": frozenset({"gemma"}), "in_flight": {"gemma": 1}}
    assert box.look(1, **gone).ordered == [(Task.STOP, "gemma")]


def test_a_swap_is_called_off_for_those_that_wait_here_and_goes_on_when_they_have_started() -> None:
    box = gemma_resident().look(wants=QWEN_WANTED, in_flight={"gemma": 1})
    both = {**QWEN_WANTED, "gemma": Backlog(4, box.now + 1)}
    # However long the answer that it drains for, the model is at work.
    assert box.look(700, wants=both, in_flight={"gemma": 1}).at == (State.RESIDENT, "gemma", "")
    # Those four go first; one that came after them waits for the model to come back.
    assert box.look(1, wants=both, in_flight={"gemma": 1}).at[0] is State.RESIDENT
    later = {**QWEN_WANTED, "gemma": Backlog(1, box.now)}
    assert box.look(1, wants=later, in_flight={"gemma": 4}).at[0] is State.DRAINING


def test_a_job_of_the_batch_that_turns_up_late_calls_the_swap_off() -> None:
    box = gemma_resident(batch_at=900.0).look(wants=QWEN_WANTED, in_flight={"gemma": 1})
    newer = {**QWEN_WANTED, "gemma": Backlog(1, 901.0)}
    assert box.look(1, wants=newer, in_flight={"gemma": 1}).at[0] is State.DRAINING
    of_the_batch = {**QWEN_WANTED, "gemma": Backlog(1, 899.0)}
    assert box.look(1, wants=of_the_batch, in_flight={"gemma": 1}).at == (State.RESIDENT, "gemma", "")


@pytest.mark.parametrize("gives_up_s", [620.0, 900.0, 1100.0, 5000.0])
def test_a_steady_queue_here_does_not_keep_those_out_who_give_up(gives_up_s: float) -> None:
    """Each request for the other model leaves before the swap has been put off for as long as may be."""
    box, began_at = gemma_resident(), 1000.0
    while box.now < began_at + 20_000 and not (box.ordered and box.ordered[0] == (Task.STOP, "gemma")):
        oldest_at = max(began_at, box.now - gives_up_s)
        wants = {"qwen": Backlog(1, oldest_at), "gemma": Backlog(6, box.now - 200)}
        is_drained = box.box.state is State.DRAINING and box.now - box.box.since >= 400
        box.look(20, wants=wants, in_flight={} if is_drained else {"gemma": 4})
    # 600 s until it is due, twice that for what waits here, and at last the answers that run.
    assert box.now - began_at <= 600 + 2 * 600 + 400 + 2 * 20


def test_a_batch_of_hours_does_not_keep_the_other_model_out() -> None:
    box = gemma_resident(batch_at=1000.0, moved_at=1000.0, oldest_at=0.0)
    while box.now < 20_000 and box.at[0] is State.RESIDENT:
        oldest_at = (box.now - 1000) / 100  # of jobs that were submitted one a second, it starts one in 100 s
        wants = {"qwen": Backlog(1, box.now - 500), "gemma": Backlog(150, oldest_at)}
        if box.now > 1600:
            wants["qwen"] = Backlog(1, box.now - 600)
        box.look(10, wants=wants, in_flight={"gemma": 4})
    assert box.at == (State.DRAINING, "gemma", "qwen")
    assert 2_800 <= box.now <= 2_830  # due at 1,610 s


def test_who_has_come_in_has_all_the_time_for_its_batch() -> None:
    box = gemma_resident(due_at=10.0, batch_at=10.0).look(wants=QWEN_WANTED).look(1, wants=QWEN_WANTED)
    box.done().done().look(300, ready=frozenset({"qwen"})).done()
    assert (box.at, box.box.due_at) == ((State.RESIDENT, "qwen", ""), None)


def test_an_idle_box_goes_home_unless_somebody_comes() -> None:
    qwen = replace(gemma_resident().box, backend="qwen", known_restarts={"qwen": 0})
    box = Script(qwen, replace(RULES, settle_s=4.0)).look(1799)
    assert box.at[0] is State.RESIDENT
    assert box.look(1).at == (State.DRAINING, "qwen", "gemma")
    assert box.look(1, wants={"qwen": Backlog(1, box.now)}).at == (State.RESIDENT, "qwen", "")
    assert box.look(1, in_flight={"qwen": 1}).at[0] is State.RESIDENT
    assert box.look(1799).at[0] is State.RESIDENT
    assert box.look(1).look(4).ordered == [(Task.STOP, "qwen")]


def test_a_model_that_somebody_waits_for_is_not_idle() -> None:
    qwen = replace(gemma_resident().box, backend="qwen", known_restarts={"qwen": 0})
    box = Script(qwen).look(1000, wants={"qwen": Backlog(1, 1500.0)})
    assert box.look(1799).at[0] is State.RESIDENT
    assert box.look(1).at == (State.DRAINING, "qwen", "gemma")


def test_a_model_that_has_just_come_in_is_not_idle() -> None:
    box = booting_qwen().look(300, ready=frozenset({"qwen"})).done()
    assert box.look(1799).at[0] is State.RESIDENT
    assert box.look(1).at == (State.DRAINING, "qwen", "gemma")


def test_a_batch_that_nobody_works_off_holds_the_swap_for_as_long_as_the_others_wait_anyway() -> None:
    waits = {"gemma": Backlog(1, 900.0), "qwen": Backlog(2, 1000.0)}
    box = gemma_resident(batch_at=950.0).look(wants=waits, in_flight={"gemma": 1})
    assert box.look(599, wants=waits).at[0] is State.RESIDENT
    assert box.look(1, wants=waits).at == (State.DRAINING, "gemma", "qwen")


@pytest.mark.parametrize(
    ("qwen_in", "wants", "reason"),
    [
        (False, {"qwen": Backlog(3, 1000.0)}, "3 requests wait for qwen"),
        (False, {"phi": Backlog(1, 1000.0)}, "a request waits for phi"),
        (False, {"qwen": Backlog(1, 400.0)}, "a request has waited 600 s for qwen"),
        (True, {}, "back to gemma: nothing waits for the resident model"),
    ],
)
def test_a_swap_says_why(qwen_in: bool, wants: Mapping[str, Backlog], reason: str) -> None:
    rules = replace(RULES, swaps=replace(RULES.swaps, triggers={**RULES.swaps.triggers, "phi": Trigger(1)}))
    box = Script(
        Box(State.RESIDENT, backend="qwen" if qwen_in else "gemma"), rules, 2000.0 if qwen_in else 1000.0
    )
    assert (box.look(wants=wants).at[0], box.box.reason) == (State.DRAINING, reason)


def test_after_a_swap_what_was_queued_goes_first_though_the_other_queue_is_overdue() -> None:
    """Age alone livelocks: the box would swap back at once, and serve nobody."""
    box = Script(Box(State.CHECKING, 900.0, backend="qwen", number=3)).done()
    both = {"qwen": Backlog(3, 400.0), "gemma": Backlog(9, 100.0)}
    assert box.look(2000, wants=both, in_flight={"qwen": 1}).at[0] is State.RESIDENT
    assert outlook(RULES, box.box, both, box.now).held_by_batch
    later = {"qwen": Backlog(3, 1000.5), "gemma": Backlog(9, 100.0)}
    assert box.look(1, wants=later).at == (State.DRAINING, "qwen", "gemma")


def test_a_batch_that_only_newer_requests_overtake_does_not_keep_the_other_model_out() -> None:
    # The machine is up for long, and when a batch last moved is hours ago.
    box = Script(Box(State.CHECKING, 8900.0, backend="qwen", number=3), now=9000.0).done()
    came_in = box.now

    def both(oldest_at: float) -> Mapping[str, Backlog]:
        # A chat that began a second ago has ended.
        return {"qwen": Backlog(3, oldest_at, box.now - 1), "gemma": Backlog(9, 100.0)}

    busy = {"qwen": 1}
    assert box.look(1, wants=both(400.0), in_flight=busy).at[0] is State.RESIDENT
    assert box.look(400, wants=both(400.0), in_flight=busy).at[0] is State.RESIDENT
    assert box.look(1098, wants=both(402.0), in_flight=busy).at[0] is State.RESIDENT
    assert box.now == came_in + 1499
    # It has moved, so it has as long again; and it has not if an age is off by a little.
    box.look(1498, wants=both(402.1), in_flight=busy)
    assert box.look(1, wants=both(402.2), in_flight=busy).at[0] is State.RESIDENT
    assert box.look(1, wants=both(402.3), in_flight=busy).at == (State.DRAINING, "qwen", "gemma")
    assert box.look(1, wants=both(402.3), in_flight=busy).at[0] is State.DRAINING


def test_one_of_a_batch_that_turns_up_after_hours_has_not_been_overtaken_for_hours() -> None:
    box = gemma_resident(batch_at=1000.0, oldest_at=1000.0, moved_at=1000.0)
    busy = {"gemma": 1}
    for _ in range(3):
        box.look(1000, wants={"gemma": Backlog(1, 1500.0, box.now)}, in_flight=busy)
    late = {"gemma": Backlog(2, 900.0, box.now), "qwen": Backlog(2, box.now - 700)}
    assert box.look(1, wants=late, in_flight=busy).at[0] is State.RESIDENT
    assert outlook(RULES, box.box, late, box.now).held_by_batch


# ------------------------------------------------------------------ what goes wrong


def test_a_report_of_an_earlier_order_changes_nothing() -> None:
    box = gemma_resident().look(wants=QWEN_WANTED).look(wants=QWEN_WANTED)
    before = box.box
    assert box.on(TaskEnded(before.number - 1)).box is before
    assert box.on(Inspected(before.number - 1, frozenset())).box is before


def test_a_report_of_an_earlier_try_changes_nothing_either() -> None:
    box = gemma_resident().look(wants=QWEN_WANTED).look(wants=QWEN_WANTED)
    first = box.box.number
    box.done("timed out").look(COMMAND_PAUSES_S[0])
    before = box.box
    assert box.on(TaskEnded(first)).box is before


def test_a_report_of_what_was_given_up_meanwhile_changes_nothing() -> None:
    checking = booting_qwen().look(300, ready=frozenset({"qwen"}))
    for box in (checking.look(1, misfits={"qwen": "engine 0.24.0"}), booting_qwen().look(600)):
        before = box.box
        assert box.done().box is before
        assert (box.at, box.order) == ((State.DRAINING, "qwen", "gemma"), None)


@pytest.mark.parametrize("found", [(), ("qwen",), ("gemma",)], ids=["none", "it", "another"])
def test_what_is_found_after_the_budget_of_a_boot_changes_nothing(found: tuple[str, ...]) -> None:
    box = booting_qwen().on(OwnershipTaken(is_first=True))
    assert box.ordered == [(Task.INSPECT, "")]
    box.look(600)
    before = box.box

    assert box.found(*found).box is before
    gemma_is_booted_instead(box)


def test_a_command_that_succeeds_at_last_is_not_the_reason_of_what_comes_next() -> None:
    box = gemma_resident().look(wants=QWEN_WANTED).look(wants=QWEN_WANTED).done("HTTP 500")
    assert (box.box.reason, box.box.failure) == ("2 requests wait for qwen", "HTTP 500")
    assert box.look(COMMAND_PAUSES_S[0]).done().at == (State.BOOTING, "qwen", "")
    assert (box.box.reason, box.box.failure) == ("2 requests wait for qwen; it has to boot", "")
    assert box.done("no route").look(COMMAND_PAUSES_S[0]).done().box.failure == ""


def test_a_command_that_fails_is_tried_again_twice() -> None:
    box = gemma_resident().look(wants=QWEN_WANTED).look(wants=QWEN_WANTED)
    for pause_s in COMMAND_PAUSES_S:
        assert box.done("exit status 255").order is None
        assert box.look(pause_s - 1, wants=QWEN_WANTED).order is None
        assert box.look(1, wants=QWEN_WANTED).ordered == [(Task.STOP, "gemma")]
    assert box.done("exit status 255").at[0] is State.FAILED
    assert objection(box.box, "gemma") == (
        Exclusion.UNHEALTHY,
        "its box failed: cannot stop gemma: exit status 255",
    )


def test_a_command_that_is_being_carried_out_is_not_given_again() -> None:
    box = gemma_resident().look(wants=QWEN_WANTED).look(wants=QWEN_WANTED).done("exit status 255")
    assert box.look(COMMAND_PAUSES_S[0], wants=QWEN_WANTED).ordered == [(Task.STOP, "gemma")]
    assert box.look(100, wants=QWEN_WANTED).order is None


def test_each_command_has_its_own_tries() -> None:
    box = gemma_resident().look(wants=QWEN_WANTED).look(wants=QWEN_WANTED)
    for pause_s in COMMAND_PAUSES_S:
        box.done("exit status 255").look(pause_s)
    assert box.done().ordered == [(Task.START, "qwen")]
    for pause_s in COMMAND_PAUSES_S:
        assert box.done("no route").look(pause_s).ordered == [(Task.START, "qwen")]


def test_a_failed_box_is_looked_at_and_what_is_in_serves_again() -> None:
    quarantine = {name: Quarantine("canary failed", 500.0, gone=True) for name in ("gemma", "qwen")}
    box = Script(Box(State.FAILED, 1000.0, quarantine=quarantine, number=4, retry_at=1000.0 + INSPECT_S))
    assert box.look(INSPECT_S - 1).order is None
    assert box.look(1).ordered == [(Task.INSPECT, "")]
    assert box.found().look(INSPECT_S).ordered == [(Task.INSPECT, "")]
    assert box.found("gemma").ordered == [(Task.CHECK, "gemma")]
    assert box.done().at == (State.RESIDENT, "gemma", "")


def cannot_stop_gemma() -> Script:
    """A box that has failed in a swap to qwen, because nobody could reach its machine."""
    box = gemma_resident().look(wants=QWEN_WANTED).look(wants=QWEN_WANTED)
    for pause_s in COMMAND_PAUSES_S:
        box.done("no route").look(pause_s)
    return box.done("no route")


def test_a_machine_that_was_away_for_longer_than_the_tries_of_a_stop_boots_its_default() -> None:
    box = cannot_stop_gemma()
    assert box.look(INSPECT_S).found().ordered == [(Task.STOP, "gemma")]
    assert box.done("no answer").order is None
    assert (box.at, box.box.reason) == ((State.FAILED, "", ""), "cannot stop gemma: no answer")
    assert box.box.pending == ()
    assert box.look(INSPECT_S - 1).order is None
    assert box.look(1).found().ordered == [(Task.STOP, "gemma")]
    # Nobody knows what is running, so nothing boots before all are stopped.
    assert box.done().ordered == [(Task.STOP, "qwen")]
    assert (box.at, box.box.tries) == ((State.FAILED, "", ""), 1)
    assert box.done().ordered == [(Task.START, "gemma")]
    assert box.at == (State.BOOTING, "gemma", "")


def test_of_a_failed_box_only_what_is_not_in_use_is_stopped() -> None:
    assert cannot_stop_gemma().look(INSPECT_S).found("gemma").ordered == [(Task.CHECK, "gemma")]
    box = cannot_stop_gemma()
    box.box = replace(box.box, quarantine={"qwen": Quarantine("canary failed", 900.0)})
    assert box.look(INSPECT_S).found("qwen").ordered == [(Task.STOP, "gemma")]
    assert box.done().done().ordered == [(Task.START, "gemma")]
    assert box.box.quarantine["qwen"].gone


def test_a_new_owner_begins_anew_with_the_stops_of_a_failed_box() -> None:
    box = cannot_stop_gemma().look(INSPECT_S).found().done()
    left = box.box
    assert left.pending == ("qwen",)
    assert box.on(OwnershipTaken()).box.pending == ()
    assert box.look().ordered == [(Task.INSPECT, "")]
    assert box.found().ordered == [(Task.STOP, "gemma")]
    restarted = Script(left, now=box.now).on(OwnershipTaken(started_at=box.now))
    assert (restarted.box.pending, restarted.ordered) == ((), [(Task.INSPECT, "")])


def test_a_box_that_has_failed_is_looked_at_from_then_on_at_intervals() -> None:
    box = cannot_stop_gemma()
    assert box.at == (State.FAILED, "", "")
    assert (box.box.cause, box.box.pending) == (Cause.NOTHING, ())
    assert box.look(INSPECT_S - 1).order is None
    assert box.look(1).ordered == [(Task.INSPECT, "")]
    assert box.found().done("no route").look(INSPECT_S - 1).order is None
    assert box.look(1).ordered == [(Task.INSPECT, "")]


def booting_qwen(**fields: Any) -> Script:
    return Script(
        replace(
            Box(
                State.BOOTING,
                1000.0,
                backend="qwen",
                number=5,
                tries=1,
                is_started=True,
                is_timed=True,
            ),
            **fields,
        )
    )


def gemma_is_booted_instead(box: Script) -> None:
    assert box.at == (State.DRAINING, "qwen", "gemma")
    assert box.look(1).ordered == [(Task.STOP, "qwen")]
    assert box.done().ordered == [(Task.START, "gemma")]
    assert objection(box.box, "qwen") is not None
    assert box.done().look(300, ready=frozenset({"gemma"})).done().at == (State.RESIDENT, "gemma", "")
    # However much it is wanted, a backend in quarantine is not started.
    assert box.look(5000, wants={"qwen": Backlog(99, 0.0)}).at[0] is State.RESIDENT


def test_a_boot_beyond_its_budget_is_not_tried_again() -> None:
    box = booting_qwen()
    assert box.look(599).order is None
    box.look(1)
    assert box.box.quarantine["qwen"].reason == "no answer 600 s after its start"
    gemma_is_booted_instead(box)


def test_a_boot_beyond_its_budget_says_what_keeps_it() -> None:
    box = booting_qwen().look(600, unready={"qwen": "/health: HTTP 503", "gemma": "connection refused"})
    assert box.box.quarantine["qwen"].reason == "not ready 600 s after its start: /health: HTTP 503"
    gemma_is_booted_instead(box)


def test_a_start_that_does_not_end_within_the_budget_is_called_that() -> None:
    box = booting_qwen(is_started=False).look(600, unready={"qwen": "connection refused"})
    assert box.box.quarantine["qwen"].reason == "its start has not ended 600 s after it was ordered"


def test_a_start_that_failed_until_the_budget_was_over_says_why() -> None:
    box = booting_qwen(is_started=False).look(590).done("no route")
    box.look(10)
    assert box.box.quarantine["qwen"].reason == "not started within 600 s: no route"
    gemma_is_booted_instead(box)


def test_a_start_that_fails_three_times_is_given_up() -> None:
    box = booting_qwen(is_started=False)
    for pause_s in COMMAND_PAUSES_S:
        assert box.done("no route").look(pause_s).ordered == [(Task.START, "qwen")]
    box.done("no route")
    assert box.box.quarantine["qwen"].reason == "cannot be started: no route"
    gemma_is_booted_instead(box)


def test_a_wrong_answer_is_quarantine_though_the_server_is_healthy() -> None:
    box = booting_qwen().look(300, ready=frozenset({"qwen"}))
    box.done("it said '<turn|>'")
    assert box.box.quarantine["qwen"].reason == "canary failed: it said '<turn|>'"
    assert objection(box.box, "qwen") == (
        Exclusion.UNHEALTHY,
        "in quarantine: canary failed: it said '<turn|>'",
    )
    gemma_is_booted_instead(box)


def test_a_wrong_version_is_quarantine_before_any_traffic() -> None:
    box = booting_qwen().look(300, ready=frozenset({"qwen"}))
    box.look(misfits={"qwen": "engine 0.24.0, not < 0.24"})
    assert box.box.quarantine["qwen"].reason == "engine 0.24.0, not < 0.24"
    gemma_is_booted_instead(box)


def test_a_version_is_judged_only_where_the_model_is_in() -> None:
    misfits = {"misfits": {"qwen": "engine 0.24.0, not < 0.24"}}
    assert booting_qwen().look(1, **misfits).at == (State.BOOTING, "qwen", "")
    box = Script(booting_qwen().look(300, ready=frozenset({"qwen"})).box, replace(RULES, settle_s=3.0), 1300)
    assert box.look(1, **misfits, heard_s=-inf).at == (State.DRAINING, "qwen", "gemma")
    drains_since = box.box.since
    box.look(2, **misfits, heard_s=0.0)  # it is known by now: the drain does not begin anew
    assert box.box.since == drains_since
    assert box.look(3, **misfits, heard_s=3.0).ordered == [(Task.STOP, "qwen")]


def test_of_those_that_are_not_in_quarantine_the_default_comes_in() -> None:
    triggers = {"phi": Trigger(), **RULES.swaps.triggers}
    rules = replace(RULES, swaps=replace(RULES.swaps, triggers=triggers))
    box = Script(booting_qwen().box, rules).look(600)
    assert box.at == (State.DRAINING, "qwen", "gemma")


def test_one_that_fails_finishes_what_runs_on_it() -> None:
    box = gemma_resident().look(misfits={"gemma": "engine 0.19"}, in_flight={"gemma": 1})
    assert box.look(1, in_flight={"gemma": 1}).at == (State.DRAINING, "gemma", "qwen")
    assert box.look(1).ordered == [(Task.STOP, "gemma")]


def test_without_another_model_the_box_has_failed_until_somebody_starts_one() -> None:
    box = booting_qwen().look(300, ready=frozenset({"qwen"})).done("wrong").look(1).done().done("no")
    for pause_s in COMMAND_PAUSES_S:
        box.look(pause_s).done("no")
    assert box.at[0] is State.FAILED
    assert set(box.box.quarantine) == {"gemma", "qwen"}
    # What failed and was never seen out is not asked again; what somebody has started is.
    box.look(INSPECT_S).found("gemma")
    assert box.at[0] is State.FAILED
    assert box.look(INSPECT_S).found("gemma", "qwen").ordered == [(Task.CHECK, "qwen")]
    assert box.done().at == (State.RESIDENT, "qwen", "")
    assert set(box.box.quarantine) == {"gemma"}


def test_a_model_in_quarantine_that_was_stopped_and_is_in_again_was_started_by_somebody() -> None:
    box = booting_qwen().look(600).look(1).done()  # qwen has been stopped for gemma
    for pause_s in COMMAND_PAUSES_S:
        box.done("no route").look(pause_s)
    assert box.done("no route").at[0] is State.FAILED
    assert box.look(INSPECT_S).found("qwen").ordered == [(Task.CHECK, "qwen")]


def test_a_model_in_quarantine_that_was_seen_out_and_is_in_again_was_started_by_somebody() -> None:
    quarantine = {name: Quarantine("canary failed", 500.0) for name in ("gemma", "qwen")}
    box = Script(Box(State.FAILED, 900.0, "all in quarantine", quarantine=quarantine, retry_at=1000.0))
    assert box.look().found("gemma").at[0] is State.FAILED
    assert box.look(INSPECT_S).found().at[0] is State.FAILED
    assert box.look(INSPECT_S).found("gemma").ordered == [(Task.CHECK, "gemma")]


def test_a_model_that_disappeared_once_too_often_and_is_in_again_was_started_by_somebody() -> None:
    alone = {"qwen": Quarantine("canary failed", 900.0, gone=True)}
    box = gemma_resident(restarts={"gemma": (950.0,)}, quarantine=alone)
    assert box.look(lost=frozenset({"gemma"})).found().at[0] is State.FAILED
    # It was up again before the first look at the failed box.
    assert box.look(INSPECT_S).found("gemma").ordered == [(Task.CHECK, "gemma")]
    assert box.done().at == (State.RESIDENT, "gemma", "")


def test_a_model_that_restarted_once_too_often_and_never_went_was_started_by_nobody() -> None:
    box = gemma_resident(
        restarts={"gemma": (950.0,)}, quarantine={"qwen": Quarantine("canary failed", 900.0)}
    )
    assert box.look(restarts={"gemma": 1}).at[0] is State.FAILED
    assert box.look(INSPECT_S).found("gemma").at[0] is State.FAILED


def test_a_first_restart_is_asked_and_forgiven_a_second_is_not() -> None:
    box = gemma_resident().look(restarts={"gemma": 1})
    assert (box.at, box.ordered) == ((State.CHECKING, "gemma", ""), [(Task.CHECK, "gemma")])
    assert box.done().look(60, restarts={"gemma": 1}).at[0] is State.RESIDENT
    box.look(60, restarts={"gemma": 2})
    assert box.at == (State.DRAINING, "gemma", "qwen")
    assert box.box.quarantine["gemma"].reason == "gemma restarted by itself, 2 times within a day"


def test_who_gets_another_chance_has_all_of_it() -> None:
    before = {"gemma": (900.0,), "qwen": (950.0,)}
    box = gemma_resident(restarts=before).look(restarts={"gemma": 1})
    assert set(box.box.quarantine) == {"gemma"}
    assert box.box.restarts == {"qwen": (950.0,)}


def test_fewer_restarts_than_before_were_counted_anew() -> None:
    box = gemma_resident(known_restarts={"gemma": 3}).look(restarts={"gemma": 1})
    assert box.at[0] is State.RESIDENT
    assert box.look(1, restarts={"gemma": 2}).at[0] is State.CHECKING


def test_a_restart_of_yesterday_is_forgotten() -> None:
    box = gemma_resident().look(restarts={"gemma": 1}).done()
    assert box.look(RESTARTS_KEPT_S, restarts={"gemma": 2}).at[0] is State.CHECKING


def test_a_restart_of_today_is_not_forgotten_though_the_machine_is_up_for_long() -> None:
    box = Script(gemma_resident().box, now=10 * RESTARTS_KEPT_S).look(restarts={"gemma": 1}).done()
    assert box.look(RESTARTS_KEPT_S - 1, restarts={"gemma": 2}).at == (State.DRAINING, "gemma", "qwen")


@pytest.mark.parametrize("counted", [{}, {"gemma": 1}], ids=["without-metrics", "with-metrics"])
def test_one_that_is_gone_is_booted_once_and_that_is_one_restart(counted: Mapping[str, int]) -> None:
    box = gemma_resident().look(lost=frozenset({"gemma"}))
    assert box.ordered == [(Task.INSPECT, "")]
    # Somebody may have stopped it for the other, which boots still: there is memory for one.
    assert box.found().ordered == [(Task.STOP, "qwen")]
    assert is_out(box.box, "qwen")
    assert box.done().ordered == [(Task.STOP, "gemma")]
    assert box.done().ordered == [(Task.START, "gemma")]
    box.done().look(300, restarts=counted).look(1, restarts=counted, ready=frozenset({"gemma"})).done()
    assert box.look(1, restarts=counted).at == (State.RESIDENT, "gemma", "")
    assert len(box.box.restarts["gemma"]) == 1
    box.look(1, lost=frozenset({"gemma"}), restarts=counted).found()
    assert box.at == (State.DRAINING, "gemma", "qwen")
    assert box.look(1, lost=frozenset({"gemma"})).ordered == [(Task.STOP, "gemma")]


def test_one_that_was_only_out_of_reach_is_asked_and_nothing_is_held_against_it() -> None:
    box = gemma_resident().look(lost=frozenset({"gemma"})).found("gemma")
    assert box.ordered == [(Task.CHECK, "gemma")]
    assert box.done().look(1).at[0] is State.RESIDENT
    assert box.box.restarts == {}


def test_one_that_restarted_as_it_drained_is_asked_if_its_swap_is_called_off() -> None:
    restarted: Mapping[str, Any] = {"restarts": {"gemma": 1}}
    busy: Mapping[str, Any] = {"wants": QWEN_WANTED, "in_flight": {"gemma": 1}}
    box = gemma_resident().look(**busy).look(1, **restarted, **busy)
    assert box.at[0] is State.DRAINING
    assert box.look(1, **restarted).at == (State.RESIDENT, "gemma", "")
    assert box.look(1, **restarted).ordered == [(Task.CHECK, "gemma")]


def test_one_that_was_back_before_anybody_looked_has_restarted() -> None:
    restarted: Mapping[str, Any] = {"restarts": {"gemma": 1}}
    lost: Mapping[str, Any] = {"lost": frozenset({"gemma"})}
    inspected = gemma_resident().look(**lost).look(1, **lost, **restarted).look(1, **restarted).found("gemma")
    checked = gemma_resident().look(**lost).found("gemma").look(**restarted)
    for box in (inspected, checked):
        assert box.done().look(1, **restarted).at[0] is State.CHECKING
        assert len(box.box.restarts["gemma"]) == 1


def test_a_restart_of_one_that_is_gone_is_judged_when_it_is_in_again() -> None:
    box = gemma_resident().look(lost=frozenset({"gemma"}), restarts={"gemma": 1})
    assert box.ordered == [(Task.INSPECT, "")]
    assert box.found("gemma").done().look(1, restarts={"gemma": 1}).at[0] is State.CHECKING


def test_models_that_somebody_changed_by_hand_are_taken_as_they_are() -> None:
    box = gemma_resident().look(lost=frozenset({"gemma"})).found("qwen")
    assert box.ordered == [(Task.CHECK, "qwen")]
    assert box.box.restarts == {}


# ------------------------------------------------------------------ another owner


@pytest.mark.parametrize(
    ("box", "ordered"),
    [
        pytest.param(Box(), [(Task.INSPECT, "")], id="unknown"),
        pytest.param(Box(State.RESIDENT, backend="gemma"), [], id="resident"),
        pytest.param(Box(State.DRAINING, backend="gemma", target="qwen"), [], id="draining"),
        pytest.param(
            Box(State.STOPPING, backend="gemma", target="qwen"), [(Task.STOP, "gemma")], id="stopping"
        ),
        pytest.param(
            Box(State.BOOTING, backend="qwen", is_started=True), [(Task.START, "qwen")], id="booting"
        ),
        pytest.param(Box(State.CHECKING, backend="qwen"), [(Task.CHECK, "qwen")], id="checking"),
    ],
)
def test_a_new_owner_goes_on_where_the_last_one_was(box: Box, ordered: list[tuple[Task, str]]) -> None:
    assert Script(box).on(OwnershipTaken()).ordered == ordered


def test_a_new_owner_has_tries_of_its_own() -> None:
    left = Box(State.STOPPING, backend="gemma", target="qwen", tries=2, failure="no route")
    box = Script(left).on(OwnershipTaken())
    assert box.box.failure == ""
    for pause_s in COMMAND_PAUSES_S:
        assert box.done("exit status 255").look(pause_s).ordered == [(Task.STOP, "gemma")]
    assert box.done("exit status 255").at[0] is State.FAILED


def test_a_new_owner_looks_at_a_failed_box_at_once() -> None:
    box = Script(Box(State.FAILED, 900.0, "cannot stop gemma")).on(OwnershipTaken(started_at=500.0))
    assert box.look(1).ordered == [(Task.INSPECT, "")]


def test_a_new_owner_does_not_take_a_server_for_started_before_its_own_start_was_carried_out() -> None:
    box = Script(Box(State.BOOTING, 900.0, backend="qwen", is_started=True)).on(OwnershipTaken())
    assert box.look(1, ready=frozenset({"qwen"})).at[0] is State.BOOTING
    assert box.done().look(1, ready=frozenset({"qwen"})).at[0] is State.CHECKING


def test_a_new_owner_goes_on_with_the_stop_of_a_model_in_quarantine() -> None:
    held = {"qwen": Quarantine("canary failed", 500.0)}
    draining = Box(State.DRAINING, 900.0, backend="qwen", target="gemma", quarantine=held)
    assert Script(draining).on(OwnershipTaken(started_at=400.0)).at == (State.DRAINING, "qwen", "gemma")
    # Once its stop has begun, another chance for it begins with the next boot.
    stopping = Script(replace(draining, state=State.STOPPING)).on(OwnershipTaken(started_at=600.0))
    assert (stopping.box.quarantine, stopping.ordered) == ({}, [(Task.STOP, "qwen")])


def test_a_box_that_failed_in_a_boot_boots_when_all_get_another_chance() -> None:
    box = booting_qwen(quarantine={"gemma": Quarantine("canary failed", 500.0)}).look(600)
    assert box.at[0] is State.FAILED
    assert box.on(OwnershipTaken(started_at=box.now + 1), 2).found().ordered == [(Task.STOP, "qwen")]
    assert box.done().done().ordered == [(Task.START, "gemma")]


def test_a_model_that_nobody_has_watched_is_asked_before_it_is_trusted_again() -> None:
    box = gemma_resident().on(OwnershipTaken(is_first=True))
    assert box.ordered == [(Task.INSPECT, "")]
    assert box.found("gemma").ordered == [(Task.CHECK, "gemma")]
    assert box.done("it said '!!'").at == (State.DRAINING, "gemma", "qwen")
    # The machine was off, too: that is no fault of the model's.
    box = gemma_resident().on(OwnershipTaken(is_first=True)).found()
    assert box.ordered == [(Task.STOP, "qwen")]
    assert box.done().ordered == [(Task.STOP, "gemma")]
    assert box.done().ordered == [(Task.START, "gemma")]
    assert box.box.restarts == {}


def test_a_model_that_nobody_has_watched_is_asked_though_it_was_being_drained() -> None:
    draining = Box(State.DRAINING, 900.0, backend="gemma", target="qwen", cause=Cause.JOBS)
    box = Script(draining).on(OwnershipTaken(is_first=True))
    assert box.ordered == [(Task.INSPECT, "")]
    # Those who waited for qwen are gone with the last gateway: its swap would be called off.
    assert box.look(1).found("gemma").ordered == [(Task.CHECK, "gemma")]
    assert box.done("it said '!!'").at == (State.DRAINING, "gemma", "qwen")
    # Somebody has swapped the models by hand.
    box = Script(draining).on(OwnershipTaken(is_first=True)).found("qwen")
    assert (box.at, box.ordered) == ((State.CHECKING, "qwen", ""), [(Task.CHECK, "qwen")])
    assert box.box.cause is Cause.NOTHING


def test_a_model_that_nobody_has_watched_at_its_canary_is_looked_for_first() -> None:
    box = Script(Box(State.CHECKING, backend="qwen")).on(OwnershipTaken(is_first=True))
    assert box.ordered == [(Task.INSPECT, "")]
    assert box.found("gemma").ordered == [(Task.CHECK, "gemma")]
    assert box.box.quarantine == {}


def test_a_boot_that_nobody_has_watched_goes_on_if_no_other_model_is_in() -> None:
    for found in ((), ("qwen",)):
        box = booting_qwen(is_started=True).on(OwnershipTaken(is_first=True))
        assert box.ordered == [(Task.INSPECT, "")]
        assert box.found(*found).ordered == [(Task.START, "qwen")]
        for pause_s in COMMAND_PAUSES_S:
            assert box.done("exit status 255").look(pause_s).ordered == [(Task.START, "qwen")]


def test_no_boot_is_repeated_beside_a_model_that_somebody_has_started_while_no_gateway_was_there() -> None:
    box = booting_qwen().on(OwnershipTaken(is_first=True)).found("gemma")
    assert box.ordered == [(Task.CHECK, "gemma")]
    assert box.done().at == (State.RESIDENT, "gemma", "")
    # The one that booted has come up, too.
    box = booting_qwen().on(OwnershipTaken(is_first=True)).found("gemma", "qwen")
    assert box.ordered == [(Task.STOP, "qwen")]
    assert box.done().ordered == [(Task.CHECK, "gemma")]
    # It is one that must not serve.
    held = {"gemma": Quarantine("canary failed", 500.0)}
    box = booting_qwen(quarantine=held).on(OwnershipTaken(is_first=True)).found("gemma")
    assert box.ordered == [(Task.STOP, "gemma")]
    assert box.done().done().ordered == [(Task.START, "qwen")]


def test_a_boot_that_nobody_has_watched_has_all_of_its_budget_again() -> None:
    box = booting_qwen(is_started=True).look(590).on(OwnershipTaken(is_first=True))
    assert box.look(10).at[0] is State.BOOTING
    assert box.found().done().look(589).at[0] is State.BOOTING
    assert box.look(1).at == (State.DRAINING, "qwen", "gemma")


def test_a_boot_that_another_gateway_has_watched_has_the_rest_of_its_budget() -> None:
    box = booting_qwen(is_started=True).look(590).on(OwnershipTaken())
    assert box.look(10).at == (State.DRAINING, "qwen", "gemma")


@pytest.mark.parametrize("backend", ["gemma", "qwen"])
def test_a_model_that_somebody_has_started_while_no_gateway_was_there_is_stopped_before_a_boot(
    backend: str,
) -> None:
    """All but the last had been stopped before: phi and, on an empty box, gemma."""
    triggers = {**RULES.swaps.triggers, "phi": Trigger()}
    rules = replace(RULES, swaps=replace(RULES.swaps, triggers=triggers))
    left = Box(State.STOPPING, 900.0, backend=backend, target="qwen", number=7)
    stopped = []
    box = Script(left, rules).on(OwnershipTaken(is_first=True))
    while box.at[0] is State.STOPPING:
        stopped += box.ordered
        box.done()
    assert sorted(stopped) == [(Task.STOP, name) for name in sorted({backend, "gemma", "phi"})]
    assert box.ordered == [(Task.START, "qwen")]
    # One that has a predecessor knows what that has stopped.
    assert Script(left, rules).on(OwnershipTaken()).done().ordered == [(Task.START, "qwen")]


def test_a_model_that_nobody_has_watched_is_looked_for_though_it_was_in_as_another_was_stopped() -> None:
    left = Box(State.STOPPING, 900.0, backend="qwen", target="gemma", is_started=True, pending=("phi",))
    left_rules = replace(
        RULES, swaps=replace(RULES.swaps, triggers={**RULES.swaps.triggers, "phi": Trigger()})
    )
    box = Script(left, left_rules).on(OwnershipTaken(is_first=True))
    assert (box.at, box.ordered) == ((State.UNKNOWN, "", ""), [(Task.INSPECT, "")])
    assert box.box.reason == "gemma was in when the last gateway left"
    assert (box.box.pending, box.box.is_started) == ((), False)
    # The machine was off, too: that is no fault of the model's.
    box.found().done().done().done()
    assert (box.ordered, box.box.quarantine) == ([(Task.START, "gemma")], {})


def test_who_restarts_the_gateway_gives_a_backend_in_quarantine_another_chance() -> None:
    quarantine = {"qwen": Quarantine("canary failed", 500.0), "gemma": Quarantine("canary failed", 900.0)}
    failed = Box(State.FAILED, 900.0, "all in quarantine", quarantine=quarantine)
    kept = Script(failed).on(OwnershipTaken(started_at=400.0))
    assert (kept.at[0], set(kept.box.quarantine)) == (State.FAILED, {"gemma", "qwen"})
    later = Script(failed).on(OwnershipTaken(started_at=950.0))
    assert (later.box.quarantine, later.ordered) == ({}, [(Task.INSPECT, "")])
    assert later.found().ordered == [(Task.STOP, "qwen")]
    resident = Box(State.RESIDENT, 600.0, backend="gemma", quarantine={"qwen": quarantine["qwen"]})
    assert Script(resident).on(OwnershipTaken(started_at=600.0)).box.quarantine == {}


def test_another_chance_begins_with_the_canary_though_the_box_drains() -> None:
    box = booting_qwen().look(300, ready=frozenset({"qwen"})).done("it said '!!'")
    assert box.at == (State.DRAINING, "qwen", "gemma")
    # Nobody waits for gemma, so nothing speaks against calling the swap off.
    assert box.on(OwnershipTaken(started_at=box.now + 1), 2).ordered == [(Task.INSPECT, "")]
    assert box.look(1).at[0] is State.UNKNOWN
    assert box.found("qwen").ordered == [(Task.CHECK, "qwen")]
    box.done("it said '!!'")
    assert box.box.quarantine["qwen"].reason == "canary failed: it said '!!'"
    gemma_is_booted_instead(box)


@pytest.mark.parametrize(
    "left",
    [
        pytest.param(Box(State.RESIDENT, backend="phi"), id="resident"),
        pytest.param(Box(State.DRAINING, backend="phi", target="gemma"), id="draining"),
        pytest.param(Box(State.DRAINING, backend="gemma", target="phi"), id="draining-for"),
        pytest.param(
            Box(State.STOPPING, backend="gemma", target="qwen", pending=("phi",), cause=Cause.JOBS),
            id="stopping",
        ),
        pytest.param(Box(State.BOOTING, backend="phi", is_started=True), id="booting"),
        pytest.param(Box(State.CHECKING, backend="phi"), id="checking"),
    ],
)
def test_a_box_left_by_another_configuration_is_looked_at_anew(left: Box) -> None:
    box = Script(left).on(OwnershipTaken())
    assert (box.at, box.ordered) == ((State.UNKNOWN, "", ""), [(Task.INSPECT, "")])
    assert (box.box.pending, box.box.cause) == ((), Cause.NOTHING)
    assert box.box.reason == "phi is no longer a backend of this box"
    assert box.found("gemma").ordered == [(Task.CHECK, "gemma")]
    assert box.done().look(1, wants=QWEN_WANTED).at[0] is State.RESIDENT
    # Whatever it had begun to do, an empty box is cleared and booted.
    box = Script(left).on(OwnershipTaken()).found()
    assert box.ordered == [(Task.STOP, "qwen")]
    assert box.done().done().ordered == [(Task.START, "gemma")]


def test_without_an_owner_the_one_model_that_is_in_is_used() -> None:
    box = unowned(frozenset({"qwen"}), 1000.0)
    assert box is not None
    assert objection(box, "qwen") is None
    # All that is known of it begins now.
    assert outlook(RULES, box, {}, 1000.0) == Plan(Cause.IDLE, "gemma", 2800.0)
    waits = {"qwen": Backlog(1, 1001.0), "gemma": Backlog(4, 900.0)}
    assert outlook(RULES, box, waits, 1002.0) == Plan(Cause.JOBS, "gemma", 1300.0)
    waits["qwen"] = Backlog(1, 999.0)
    assert outlook(RULES, box, waits, 1002.0).held_by_batch
    assert unowned(frozenset(), 1000.0) is None
    assert unowned(frozenset({"qwen", "gemma"}), 1000.0) is None


@pytest.mark.parametrize(
    ("box", "said"),
    [
        (Box(State.RESIDENT, backend="gemma"), "its model is out; gemma is resident"),
        (Box(State.DRAINING, backend="gemma", target="qwen"), "its model is next; gemma is draining"),
        (Box(State.STOPPING, backend="qwen", target="gemma"), "stopping: its box is switching to gemma"),
        (Box(State.STOPPING, backend="gemma", target="qwen"), "its model is next; gemma is stopping"),
        (Box(State.STOPPING, backend="phi", target="gemma"), "its model is out; phi is stopping"),
        (Box(State.BOOTING, backend="gemma"), "its model is out; gemma is booting"),
        (Box(State.BOOTING, backend="qwen"), "its model is booting"),
        (Box(State.UNKNOWN), "its box has not been checked yet"),
    ],
)
def test_where_a_model_is_instead_of_in(box: Box, said: str) -> None:
    assert objection(box, "qwen") == (Exclusion.SWAPPED_OUT, said)


def test_a_model_that_is_still_in_serves_while_nobody_hears_of_the_owner() -> None:
    draining = Box(
        State.DRAINING, 900.0, backend="gemma", target="qwen", cause=Cause.JOBS, resident_since=5.0
    )
    box = left_alone(draining, 1000.0)
    assert (objection(box, "gemma"), box.resident_since, box.target) == (None, 5.0, "")
    assert box.cause is Cause.NOTHING
    for state in (State.STOPPING, State.BOOTING, State.CHECKING, State.FAILED):
        other = replace(draining, state=state)
        assert left_alone(other, 1000.0) is other
    wrong = replace(draining, quarantine={"gemma": Quarantine("canary failed")})
    assert left_alone(wrong, 1000.0) is wrong


def test_restarts_that_another_process_counted_are_not_compared_with_ones_own() -> None:
    box = gemma_resident(known_restarts={"gemma": 3}).on(OwnershipTaken()).look(restarts={"gemma": 5})
    assert box.at[0] is State.RESIDENT
    assert box.look(1, restarts={"gemma": 6}).at[0] is State.CHECKING


# ------------------------------------------------------------------ what others are told


@pytest.mark.parametrize(
    ("box", "backend", "expected"),
    [
        pytest.param(Box(State.UNKNOWN), "gemma", 1001.0, id="not-checked-yet-and-perhaps-in"),
        pytest.param(Box(State.RESIDENT, backend="gemma"), "gemma", 1000.0, id="in"),
        pytest.param(Box(State.RESIDENT, backend="gemma"), "qwen", 1200.0, id="a-boot-as-the-profile-says"),
        pytest.param(
            Box(State.RESIDENT, backend="gemma", boot_s={"qwen": 90.0}), "qwen", 1090.0, id="as-measured"
        ),
        pytest.param(
            Box(State.RESIDENT, backend="gemma", boot_s={"qwen": 500.0}), "qwen", 1200.0, id="but-not-slower"
        ),
        pytest.param(Box(State.BOOTING, 900.0, backend="qwen"), "qwen", 1100.0, id="booting"),
        pytest.param(Box(State.BOOTING, 0.0, backend="qwen"), "qwen", 1001.0, id="late"),
        pytest.param(Box(State.CHECKING, 0.0, backend="qwen"), "qwen", 1001.0, id="checking"),
        pytest.param(
            Box(State.DRAINING, 0.0, backend="gemma", target="qwen"), "gemma", 1500.0, id="there-and-back"
        ),
        pytest.param(Box(State.DRAINING, 0.0, backend="gemma", target="qwen"), "qwen", 1200.0, id="next"),
        pytest.param(
            Box(State.STOPPING, 0.0, backend="gemma", target="qwen"), "gemma", 1500.0, id="out-and-back"
        ),
        pytest.param(Box(State.BOOTING, 900.0, backend="qwen"), "gemma", 1400.0, id="while-another-boots"),
        pytest.param(Box(State.BOOTING, 0.0, backend="qwen"), "gemma", 1300.0, id="which-is-late"),
        pytest.param(
            Box(State.CHECKING, 0.0, backend="qwen"), "gemma", 1300.0, id="while-another-is-checked"
        ),
    ],
)
def test_when_a_model_can_be_back_at_the_earliest(box: Box, backend: str, expected: float) -> None:
    assert back_at(box, backend, {"gemma": 300.0, "qwen": 200.0}, 1000.0) == expected


@pytest.mark.parametrize(
    ("box", "plan", "expected"),
    [
        pytest.param(Box(State.RESIDENT, backend="gemma"), Plan(), None, id="no-swap-is-planned"),
        pytest.param(
            Box(State.RESIDENT, backend="gemma"), Plan(Cause.AGE, "qwen", 1500.0), 1700.0, id="one-is-planned"
        ),
        pytest.param(
            Box(State.RESIDENT, backend="gemma"), Plan(Cause.JOBS, "qwen", 900.0), 1200.0, id="one-is-due"
        ),
        pytest.param(
            Box(State.RESIDENT, backend="gemma", boot_s={"qwen": 500.0}),
            Plan(Cause.JOBS, "qwen", 900.0),
            1500.0,
            id="as-measured",
        ),
        pytest.param(
            Box(State.RESIDENT, backend="gemma"),
            Plan(Cause.JOBS, "qwen", None, held_by_batch=True),
            None,
            id="held-by-a-batch-of-unknown-length",
        ),
        pytest.param(
            Box(State.RESIDENT, backend="phi"), Plan(Cause.AGE, "gemma", 1500.0), None, id="to-a-third"
        ),
        pytest.param(Box(State.DRAINING, backend="gemma", target="qwen"), Plan(), 1200.0, id="under-way"),
        pytest.param(Box(State.DRAINING, backend="qwen", target="gemma"), Plan(), None, id="going-out"),
        pytest.param(Box(State.BOOTING, 950.0, backend="qwen"), Plan(), 1150.0, id="booting"),
        pytest.param(Box(State.CHECKING, 950.0, backend="qwen"), Plan(), 1001.0, id="checking"),
        pytest.param(Box(State.BOOTING, 950.0, backend="gemma"), Plan(), None, id="another-boots"),
        pytest.param(
            Box(State.DRAINING, backend="gemma", target="qwen", quarantine={"qwen": Quarantine("wrong")}),
            Plan(),
            None,
            id="in-quarantine",
        ),
        pytest.param(Box(State.FAILED), Plan(), None, id="failed"),
    ],
)
def test_when_something_brings_a_model_in(box: Box, plan: Plan, expected: float | None) -> None:
    assert comes_at(box, plan, "qwen", {"gemma": 300.0, "qwen": 200.0}, 1000.0) == expected


def test_the_outlook_is_what_is_under_way_or_what_the_policy_plans() -> None:
    waits = {"qwen": Backlog(1, 900.0)}
    resident = gemma_resident().box
    assert outlook(RULES, resident, waits, 1000.0).at == 1500.0
    draining = replace(resident, state=State.DRAINING, since=990.0, target="qwen", cause=Cause.AGE)
    for state in (State.DRAINING, State.STOPPING):
        under_way = outlook(RULES, replace(draining, state=state), waits, 1000.0)
        assert under_way == Plan(Cause.AGE, "qwen")  # when it comes in depends on the answers that run
    assert outlook(RULES, replace(resident, state=State.BOOTING), waits, 1000.0).target == ""
