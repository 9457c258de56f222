from collections.abc import Mapping

import pytest

from gateway.core.swap_policy import (
    Backlog,
    Cause,
    Plan,
    Residency,
    SwapRules,
    Trigger,
    due_since,
    plan,
    should_cancel,
)

RULES = SwapRules(
    "gemma",
    {"gemma": Trigger(4, 1500.0), "qwen": Trigger(6, 600.0), "phi": Trigger(2, 100.0)},
    residency_s=300.0,
    idle_s=1800.0,
)
NOW = 10_000.0


def gemma_in(since: float = 5_000.0, idle_since: float = NOW, **wants: Backlog) -> Residency:
    return Residency("gemma", since, since, idle_since, wants, served_at=NOW)


def qwen_in(since: float = 5_000.0, idle_since: float = NOW, **wants: Backlog) -> Residency:
    return Residency("qwen", since, since, idle_since, wants, served_at=NOW)


@pytest.mark.parametrize(
    ("here", "expected"),
    [
        pytest.param(gemma_in(), Plan(), id="nobody-waits"),
        pytest.param(gemma_in(gemma=Backlog(9, NOW - 9)), Plan(), id="only-the-resident-is-wanted"),
        pytest.param(
            gemma_in(qwen=Backlog(5, NOW - 100)), Plan(Cause.AGE, "qwen", NOW + 500), id="too-few-yet"
        ),
        pytest.param(gemma_in(qwen=Backlog(6, NOW - 100)), Plan(Cause.JOBS, "qwen", NOW), id="enough-wait"),
        pytest.param(
            gemma_in(qwen=Backlog(1, NOW - 600)),
            Plan(Cause.AGE, "qwen", NOW),
            id="one-has-waited-long-enough",
        ),
        pytest.param(
            gemma_in(NOW - 100, qwen=Backlog(9, NOW - 700)),
            Plan(Cause.JOBS, "qwen", NOW + 200),
            id="it-came-in-a-moment-ago",
        ),
        pytest.param(
            gemma_in(NOW - 1000, gemma=Backlog(1, NOW - 1001), qwen=Backlog(9, NOW - 900)),
            Plan(Cause.JOBS, "qwen", None, held_by_batch=True),
            id="what-was-queued-when-it-came-in-goes-first",
        ),
        pytest.param(
            gemma_in(NOW - 1000, gemma=Backlog(9, NOW - 999), qwen=Backlog(9, NOW - 900)),
            Plan(Cause.JOBS, "qwen", NOW - 300),
            id="what-came-later-waits",
        ),
        pytest.param(
            gemma_in(qwen=Backlog(6, NOW - 300), phi=Backlog(1, NOW - 500)),
            Plan(Cause.AGE, "phi", NOW - 400),
            id="of-two-the-one-that-is-due-for-longest",
        ),
        pytest.param(
            gemma_in(phi=Backlog(2, NOW - 9), qwen=Backlog(6, NOW - 1)),
            Plan(Cause.JOBS, "qwen", NOW),
            id="of-two-that-are-due-from-now-on-the-first-of-the-box",
        ),
        pytest.param(
            Residency("gemma", 0, 0, NOW, {"qwen": Backlog(9, 0.0)}, frozenset({"qwen"})),
            Plan(),
            id="one-in-quarantine-is-not-wanted",
        ),
        pytest.param(gemma_in(idle_since=0.0), Plan(), id="idle-at-home"),
        pytest.param(
            qwen_in(idle_since=NOW - 100), Plan(Cause.IDLE, "gemma", NOW + 1700), id="idle-not-at-home"
        ),
        pytest.param(
            qwen_in(NOW - 100, NOW - 1700), Plan(Cause.IDLE, "gemma", NOW + 200), id="idle-but-just-in"
        ),
        pytest.param(
            qwen_in(idle_since=0.0, qwen=Backlog(1, NOW - 1)), Plan(), id="not-idle-while-something-waits"
        ),
        pytest.param(
            Residency("qwen", 0, 0, 0, {}, frozenset({"gemma"})), Plan(), id="no-way-home-in-quarantine"
        ),
    ],
)
def test_what_is_planned(here: Residency, expected: Plan) -> None:
    assert plan(RULES, here, NOW) == expected


@pytest.mark.parametrize(
    ("served_s", "is_stuck"), [(599, False), (600, True)], ids=["it-may-go-on", "nothing-runs"]
)
def test_a_model_that_runs_nothing_keeps_the_other_out_no_longer_than_that_waits(
    served_s: float, is_stuck: bool
) -> None:
    """Its engine hangs, say, and what waits for it cannot start."""
    wants = {"gemma": Backlog(9, NOW - 5_000), "qwen": Backlog(6, NOW - 700)}
    here = Residency("gemma", NOW - 2_000, NOW - 2_000, NOW, wants, served_at=NOW - served_s, moved_at=NOW)
    there = Plan(Cause.JOBS, "qwen", NOW - 100)

    assert plan(RULES, here, NOW) == (
        there if is_stuck else Plan(Cause.JOBS, "qwen", None, held_by_batch=True)
    )
    assert should_cancel(RULES, here, there, NOW) is not is_stuck


@pytest.mark.parametrize(
    ("moved_s", "started_s", "is_stuck"),
    [
        pytest.param(599, 1, False, id="it-may-go-on"),
        pytest.param(600, 1, True, id="others-start-instead"),
        pytest.param(600, 601, False, id="it-waits-for-long-answers-to-end"),
        pytest.param(600, None, False, id="nothing-has-ended"),
    ],
)
def test_a_batch_that_is_always_overtaken_keeps_the_other_out_no_longer_than_that_waits(
    moved_s: float, started_s: float | None, is_stuck: bool
) -> None:
    """The model serves newer requests of a higher priority, and they never end."""
    started_at = None if started_s is None else NOW - started_s
    wants = {"gemma": Backlog(9, NOW - 5_000, started_at), "qwen": Backlog(6, NOW - 700)}
    here = Residency("gemma", NOW - 2_000, NOW - 2_000, NOW, wants, served_at=NOW, moved_at=NOW - moved_s)
    there = Plan(Cause.JOBS, "qwen", NOW - 100)

    assert plan(RULES, here, NOW) == (
        there if is_stuck else Plan(Cause.JOBS, "qwen", None, held_by_batch=True)
    )
    assert should_cancel(RULES, here, there, NOW) is not is_stuck


@pytest.mark.parametrize(("since_s", "is_stuck"), [(59, False), (60, True)])
def test_a_model_that_has_come_in_has_a_minute_at_least(since_s: float, is_stuck: bool) -> None:
    wants = {"gemma": Backlog(1, NOW - 100), "qwen": Backlog(9, NOW - 90)}
    rules = SwapRules("gemma", {"gemma": Trigger(), "qwen": Trigger(1, 5.0)}, residency_s=0.0)
    here = Residency("gemma", NOW - since_s, NOW - since_s, NOW, wants, moved_at=NOW - since_s)
    assert plan(rules, here, NOW).held_by_batch is not is_stuck


@pytest.mark.parametrize(
    ("due_s", "jobs", "wait_s", "is_held"),
    [
        pytest.param(None, 99, 900.0, True, id="none-is-due"),
        pytest.param(1_799, 1, 900.0, True, id="twice-that-wait-is-not-over"),
        pytest.param(1_800, 1, 900.0, False, id="twice-that-wait-is-over"),
        pytest.param(1_199, 1, 0.0, True, id="on-demand-it-has-twenty-minutes"),
        pytest.param(1_200, 1, 0.0, False, id="on-demand-no-longer"),
    ],
)
def test_a_long_batch_holds_a_swap_that_is_due_for_so_long(
    due_s: float | None, jobs: int, wait_s: float, is_held: bool
) -> None:
    """Its jobs start one after another, for hours."""
    wants = {"gemma": Backlog(150, NOW - 5_000, NOW - 1), "qwen": Backlog(1, NOW - 950)}
    rules = SwapRules("gemma", {"gemma": Trigger(), "qwen": Trigger(jobs, wait_s)})
    here = Residency(
        "gemma",
        NOW - 4_000,
        NOW - 4_000,
        NOW,
        wants,
        served_at=NOW,
        moved_at=NOW - 1,
        due_at=None if due_s is None else NOW - due_s,
    )
    planned = plan(rules, here, NOW)
    assert (planned.held_by_batch, planned.is_due(NOW)) == (is_held, not is_held)


@pytest.mark.parametrize(
    ("due_at", "wants", "expected"),
    [
        pytest.param(None, {}, None, id="nobody-waits"),
        pytest.param(None, {"gemma": Backlog(9, NOW - 5_000)}, None, id="only-here"),
        pytest.param(None, {"qwen": Backlog(5, NOW - 599)}, None, id="too-few-yet"),
        pytest.param(None, {"qwen": Backlog(6, NOW - 1)}, NOW, id="enough-wait"),
        pytest.param(None, {"qwen": Backlog(1, NOW - 600)}, NOW, id="one-has-waited-long-enough"),
        pytest.param(None, {"phi": Backlog(9, NOW - 900)}, None, id="it-is-in-quarantine"),
        pytest.param(NOW - 70, {"qwen": Backlog(9, NOW - 900)}, NOW - 70, id="still"),
        pytest.param(NOW - 70, {"qwen": Backlog(1, NOW - 1)}, NOW - 70, id="the-others-have-given-up"),
        pytest.param(NOW - 70, {"gemma": Backlog(9, NOW)}, NOW - 70, id="all-have-given-up"),
    ],
)
def test_since_when_a_swap_is_due_though_those_who_wait_give_up(
    due_at: float | None, wants: Mapping[str, Backlog], expected: float | None
) -> None:
    here = Residency("gemma", 0, 0, NOW, wants, frozenset({"phi"}), due_at=due_at)
    assert due_since(RULES, here, NOW) == expected


@pytest.mark.parametrize(("barred", "expected"), [({"qwen", "phi"}, None), (set(), NOW)])
def test_a_swap_is_due_if_one_of_the_others_that_may_come_in_is_wanted(
    barred: set[str], expected: float | None
) -> None:
    here = Residency("gemma", 0, 0, NOW, {"phi": Backlog(2, NOW)}, frozenset(barred))
    assert due_since(RULES, here, NOW) == expected


@pytest.mark.parametrize(
    ("due_s", "waited_s", "expected"),
    [
        pytest.param(1_199, 500, True, id="due-for-a-while"),
        pytest.param(1_200, 500, False, id="due-for-too-long"),
        pytest.param(600, 1_200, False, id="one-has-waited-for-too-long"),
    ],
)
def test_a_swap_is_called_off_no_longer_than_that_though_those_who_wait_for_it_give_up(
    due_s: float, waited_s: float, expected: bool
) -> None:
    """So the oldest request for the other model never gets old."""
    wants = {"qwen": Backlog(6, NOW - waited_s), "gemma": Backlog(4, NOW)}
    here = Residency("gemma", 0, 0, NOW, wants, served_at=NOW, due_at=NOW - due_s)
    assert should_cancel(RULES, here, Plan(Cause.JOBS, "qwen", NOW), NOW) is expected


def test_a_plan_is_due_at_its_time_and_not_while_the_batch_holds_it() -> None:
    assert Plan(Cause.AGE, "qwen", NOW).is_due(NOW)
    assert not Plan(Cause.AGE, "qwen", NOW + 1).is_due(NOW)
    assert not Plan(Cause.AGE, "qwen", None, held_by_batch=True).is_due(NOW)
    assert not Plan().is_due(NOW)


@pytest.mark.parametrize(
    ("cause", "wants", "expected"),
    [
        pytest.param(Cause.JOBS, {"qwen": Backlog(6, NOW - 100)}, False, id="nobody-waits-here"),
        pytest.param(Cause.JOBS, {}, True, id="nobody-wants-the-other-any-more"),
        pytest.param(Cause.IDLE, {}, False, id="home-though-nobody-is-there"),
        pytest.param(Cause.IDLE, {"qwen": Backlog(1, NOW)}, True, id="idle-no-more"),
        pytest.param(
            Cause.JOBS,
            {"qwen": Backlog(6, NOW - 100), "gemma": Backlog(3, NOW - 1499)},
            False,
            id="too-little-waits-here",
        ),
        pytest.param(
            Cause.JOBS,
            {"qwen": Backlog(6, NOW - 1199), "gemma": Backlog(4, NOW)},
            True,
            id="enough-waits-here-to-swap-back",
        ),
        pytest.param(
            Cause.JOBS,
            {"qwen": Backlog(6, NOW - 1199), "gemma": Backlog(1, NOW - 1500)},
            True,
            id="one-waits-here-for-long-enough-to-swap-back",
        ),
        pytest.param(
            Cause.AGE,
            {"qwen": Backlog(1, NOW - 1200), "gemma": Backlog(9, 0.0)},
            False,
            id="the-other-has-waited-twice-its-time",
        ),
    ],
)
def test_when_a_swap_that_drains_is_called_off(
    cause: Cause, wants: Mapping[str, Backlog], expected: bool
) -> None:
    here, target = ("qwen", "gemma") if cause is Cause.IDLE else ("gemma", "qwen")
    there = Residency(here, 0, 0, NOW, wants, served_at=NOW)
    assert should_cancel(RULES, there, Plan(cause, target, NOW), NOW) is expected


@pytest.mark.parametrize(
    ("gemma_at", "qwen_at", "expected"),
    [
        pytest.param(NOW - 501, NOW - 100, True, id="one-of-the-batch"),
        pytest.param(NOW - 499, NOW - 100, False, id="one-that-came-later"),
        pytest.param(NOW - 501, NOW - 1200, False, id="the-other-has-waited-twice-its-time"),
    ],
)
def test_what_of_the_batch_turns_up_late_calls_a_swap_off(
    gemma_at: float, qwen_at: float, expected: bool
) -> None:
    wants = {"qwen": Backlog(6, qwen_at), "gemma": Backlog(1, gemma_at)}
    here = Residency("gemma", 0, NOW - 500, NOW, wants, served_at=NOW, moved_at=NOW)
    assert should_cancel(RULES, here, Plan(Cause.JOBS, "qwen", NOW), NOW) is expected


def test_what_waits_in_two_places_adds_up() -> None:
    assert Backlog(2, 5.0) + Backlog(1, 3.0) == Backlog(3, 3.0)
    assert Backlog() + Backlog(1, 3.0) == Backlog(1, 3.0)
    assert Backlog(0, None, 5.0) + Backlog(0, None, 7.0) == Backlog(0, None, 7.0)
    assert Backlog() + Backlog() == Backlog()
