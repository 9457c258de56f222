"""The health state machine, as scripts: events in, states out."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.core.health import (
    PROBATION_SEQS,
    Attempt,
    BackendStatus,
    EngineSample,
    Event,
    HealthRules,
    ModelsFailed,
    Outcome,
    PeerAttempts,
    ProbeFailed,
    ProbeFault,
    ProbeOk,
    Sample,
    SampleFailed,
    State,
    accepts,
    advance,
    awaited,
    hang_after_s,
    has_ended,
    is_last_resort,
    lost,
    may_be_tried,
    put_out,
    retry_after_s,
    served_name,
    usable,
)
from gateway.core.perf import PerfModel

RULES = HealthRules(boot_budget_s=100.0, hang_s=30.0, model="gemma")

OK = ProbeOk()
REFUSED = ProbeFailed(ProbeFault.REFUSED, "connection refused")
UNRESOLVED = ProbeFailed(ProbeFault.UNRESOLVED, "no address for push.example")
TIMEOUT = ProbeFailed(ProbeFault.TIMEOUT, "no answer in 3 s")
SERVED = Attempt(Outcome.OK)
FAILED = Attempt(Outcome.FAILED, "HTTP 500")
WRONG = Attempt(Outcome.MISCONFIGURED, "HTTP 401")
REJECTED = Attempt(Outcome.REJECTED, "HTTP 400")
STOPPING = Attempt(Outcome.DRAINING, "cannot schedule new futures")


def sample(
    tokens: float,
    *,
    running: int = 1,
    waiting: int = 0,
    kv: float = 0.5,
    start: float | None = 1e9,
    steps: float = 0.0,
    awaited: float | None = None,
    asleep: bool = False,
) -> Sample:
    """A scrape; `advance` is told the time apart from it, so `at` is filled in by `play`."""
    return Sample(
        EngineSample(
            at=0.0,
            running=running,
            waiting=waiting,
            kv_usage=kv,
            generation_tokens=tokens,
            prompt_tokens=100.0,
            steps=steps,
            started_at=start,
            is_asleep=asleep,
        ),
        awaited_since=awaited,
    )


def play(*script: tuple[float, Event], status: BackendStatus | None = None) -> list[BackendStatus]:
    """Return the status after each event of a script of (time, event)."""
    seen = []
    status = status or BackendStatus()
    for now, event in script:
        if isinstance(event, Sample):
            event = replace(event, engine=replace(event.engine, at=now))
        status = advance(status, event, now, RULES)
        seen.append(status)
    return seen


def states(*script: tuple[float, Event]) -> list[str]:
    return [status.state.value for status in play(*script)]


U, B, P, D = "up", "booting", "probation", "draining"
X, H, DOWN, Q = "ejected", "hung", "down", "unknown"

SCRIPTS: dict[str, tuple[list[tuple[float, Event]], list[str]]] = {
    "answers-at-once": ([(0, OK)], [U]),
    "a-request-proves-it-before-any-probe": ([(0, SERVED)], [U]),
    "first-boot-is-no-fault": ([(0, REFUSED), (50, REFUSED), (99, OK)], [B, B, U]),
    "boots-behind-a-proxy-that-says-503": (
        [(0, ProbeFailed(ProbeFault.STATUS, "HTTP 503")), (60, OK)],
        [B, U],
    ),
    "beyond-its-boot-budget": (
        [(0, REFUSED), (99, REFUSED), (100, REFUSED), (101, REFUSED)],
        [B, B, DOWN, DOWN],
    ),
    "a-first-boot-that-took-too-long-still-counts": ([(0, REFUSED), (100, REFUSED), (200, OK)], [B, DOWN, U]),
    "failures-before-it-boots-say-nothing-of-it": (
        [(0, FAILED), (1, FAILED), (2, REFUSED), (3, OK), (4, FAILED), (5, FAILED), (6, FAILED)],
        [Q, Q, B, U, U, U, X],
    ),
    "gone-and-back-is-probation": ([(0, OK), (1, REFUSED), (40, OK)], [U, B, P]),
    "down-and-back-is-probation": ([(0, OK), (1, REFUSED), (101, REFUSED), (500, OK)], [U, B, DOWN, P]),
    "two-slow-probes-are-forgiven": ([(0, OK), (1, TIMEOUT), (2, TIMEOUT), (3, OK), (4, TIMEOUT)], [U] * 5),
    "slow-probes-of-an-engine-that-works-are-forgiven": (
        [(0, OK), *((at, event) for at in range(1, 28) for event in (sample(5), TIMEOUT))],
        [U] * 55,
    ),
    "a-hang-whose-probes-are-slow": (
        [(0, OK), *((at, event) for at in range(1, 32) for event in (sample(5), TIMEOUT))],
        [U] * 61 + [H] * 2,
    ),
    "a-hang-whose-probes-stay-slow-is-down-in-the-end": (
        [(0, OK), (1, sample(5)), *((at, event) for at in (31, 32, 131) for event in (sample(5), TIMEOUT))],
        [U, U, H, H, H, H, H, DOWN],
    ),
    "slow-probes-of-an-idle-engine-eject": (
        [(0, OK), *((at, event) for at in range(1, 4) for event in (sample(5, running=0), TIMEOUT))],
        [U] * 6 + [X],
    ),
    "slow-probes-of-an-engine-that-worked-eject": (
        [(0, OK), (1, sample(5)), *((at, TIMEOUT) for at in range(3, 9))],
        [U] * 6 + [X] * 2,
    ),
    "slow-probes-of-an-engine-whose-metrics-fail-eject": (
        [(0, OK), (1, sample(5)), (1, SampleFailed("HTTP 503")), *((at, TIMEOUT) for at in range(2, 5))],
        [U] * 5 + [X],
    ),
    "three-slow-probes-eject": ([(0, OK), (1, TIMEOUT), (2, TIMEOUT), (3, TIMEOUT)], [U, U, U, X]),
    "a-resolver-hiccup-is-forgiven": ([(0, OK), (1, UNRESOLVED), (2, UNRESOLVED), (3, OK)], [U] * 4),
    "a-name-that-is-gone-is-a-container-that-is-gone": (
        [(0, OK), (1, UNRESOLVED), (2, UNRESOLVED), (3, UNRESOLVED), (4, OK)],
        [U, U, U, B, P],
    ),
    "silent-beyond-the-budget-is-down": (
        [(0, OK), (1, TIMEOUT), (2, TIMEOUT), (3, TIMEOUT), (100, TIMEOUT), (101, TIMEOUT)],
        [U, U, U, X, X, DOWN],
    ),
    "a-frozen-one-hangs": (
        [(0, OK), (1, sample(5)), *((at, TIMEOUT) for at in (6, 7, 8, 35, 36, 37)), (38, OK)],
        [U] * 4 + [X, X, H, H, P],
    ),
    "a-slow-probe-of-one-that-hangs-does-not-cure-it": (
        [(0, OK), (1, sample(5)), (31, sample(5)), (37, TIMEOUT), (38, OK), (39, sample(5))],
        [U, U, H, H, H, H],
    ),
    "one-without-metrics-may-be-silent-while-it-works": (
        [(0, OK), *((at, TIMEOUT) for at in (1, 2, 3, 50))],
        [U, U, U, X, X],
    ),
    "an-ejected-one-that-says-503-does-not-hang": (
        [
            *((0, OK), (1, sample(5))),
            *((at, ProbeFailed(ProbeFault.STATUS, "HTTP 503")) for at in (2, 3, 4, 50)),
        ],
        [U, U, U, U, X, X],
    ),
    "a-frozen-one-that-is-back-before-its-penalty-is-over": (
        [
            *((0, OK), (0, sample(5, running=0)), (1, FAILED), (1, FAILED), (1, FAILED), (6, OK)),
            *((7, FAILED), (17, OK), (18, FAILED), (38, OK), (39, FAILED)),
            *((at, TIMEOUT) for at in (40, 41, 42, 70)),
            *((71, OK), (79, OK)),
        ],
        [U, U, U, U, X, P, X, P, X, P, X, X, X, X, H, H, P],
    ),
    "a-host-that-reboots-keeps-booting": (
        [(0, OK), (1, REFUSED), (2, TIMEOUT), (3, TIMEOUT), (4, TIMEOUT), (5, TIMEOUT), (6, OK)],
        [U, B, B, B, B, B, P],
    ),
    "three-failed-requests-eject": ([(0, OK), (1, FAILED), (1, FAILED), (2, FAILED)], [U, U, U, X]),
    "a-success-forgives-one-failure": (
        [(0, OK), (1, FAILED), (1, FAILED), (2, SERVED), (3, FAILED), (4, FAILED)],
        [U, U, U, U, U, X],
    ),
    "what-was-lost-before-its-probation-says-nothing-about-it": (
        [
            (0, OK),
            *[(1, FAILED)] * 3,
            (7, OK),
            *[(8, Attempt(outcome, "x", started_at=0.5)) for outcome in (Outcome.TIMEOUT, Outcome.DRAINING)],
            (9, Attempt(Outcome.TIMEOUT, "x", started_at=8.5)),
        ],
        [U, U, U, X, P, P, P, X],
    ),
    "nor-what-was-lost-before-a-probation-that-is-over": (
        [
            (0, OK),
            *[(1, FAILED)] * 3,
            (7, OK),
            *[(8, SERVED)] * 3,
            *[(9, Attempt(Outcome.TIMEOUT, "x", started_at=0.5))] * 3,
            *[(10, Attempt(Outcome.TIMEOUT, "x", started_at=8.5))] * 3,
        ],
        [U, U, U, X, P, P, P, U, U, U, U, U, U, X],
    ),
    "failures-a-minute-apart-do-not-add-up": (
        [(0, OK), (1, FAILED), (2, FAILED), (62, FAILED), (63, FAILED), (64, FAILED)],
        [U, U, U, U, U, X],
    ),
    "failures-before-the-first-probe-eject-too": ([(0, FAILED), (0, FAILED), (0, FAILED)], [Q, Q, X]),
    "a-good-probe-does-not-shorten-the-penalty": (
        [(0, OK), (1, FAILED), (1, FAILED), (1, FAILED), (5.9, OK), (6, OK)],
        [U, U, U, X, X, P],
    ),
    "three-successes-end-probation": (
        [(0, OK), (1, REFUSED), (2, OK), (3, SERVED), (4, SERVED), (5, SERVED)],
        [U, B, P, P, P, U],
    ),
    "a-bad-request-is-no-success-in-probation": (
        [(0, OK), (1, REFUSED), (2, OK), (3, REJECTED), (4, REJECTED), (5, REJECTED)],
        [U, B, P, P, P, P],
    ),
    "one-failure-in-probation-ejects": ([(0, OK), (1, REFUSED), (2, OK), (3, FAILED)], [U, B, P, X]),
    "generating-for-a-while-ends-probation": (
        [(0, OK), (1, REFUSED), (2, OK), (10, sample(0)), (16, sample(50)), (17, sample(60))],
        [U, B, P, P, P, U],
    ),
    "idle-in-probation-stays-there": (
        [(0, OK), (1, REFUSED), (2, OK), (3, sample(0, running=0)), (60, sample(0, running=0))],
        [U, B, P, P, P],
    ),
    "a-hang": ([(0, OK), (1, sample(5)), (30, sample(5)), (31, sample(5))], [U, U, U, H]),
    "tokens-moving-are-no-hang": ([(0, OK), (1, sample(5)), (30, sample(6)), (59, sample(7))], [U] * 4),
    "a-long-prefill-is-no-hang": (
        [
            (0, OK),
            (1, sample(5, kv=0.1)),
            (29, sample(5, kv=0.2)),
            (57, sample(5, kv=0.3)),
            (85, sample(5, kv=0.4)),
        ],
        [U] * 5,
    ),
    "a-long-prefill-of-an-engine-that-counts-its-steps-is-no-hang": (
        [(0, OK), *[(at, sample(5, kv=0.0, steps=at)) for at in (1, 30, 59, 88)]],
        [U] * 5,
    ),
    "idle-is-no-hang": ([(0, OK), (1, sample(5, running=0)), (99, sample(5, running=0))], [U, U, U]),
    "work-after-a-long-idle-time-is-no-hang": (
        [(0, OK), (1, sample(5, running=0)), (99, sample(5, running=0)), (100, sample(5))],
        [U] * 4,
    ),
    "arrivals-are-no-progress": (
        [(0, OK), (1, sample(5)), (16, sample(5, waiting=3)), (31, sample(5, waiting=9))],
        [U, U, U, H],
    ),
    "departures-are-no-progress": (
        [
            *((0, OK), (1, sample(5, running=4, kv=0.4)), (30, sample(5, running=2, kv=0.2))),
            *((31, sample(5, running=2, kv=0.2)), (32, sample(5, running=1, kv=0.1))),
            *((36, sample(5, running=0, kv=0.0)), (37, sample(5, running=1, kv=0.1))),
        ],
        [U, U, U, H, H, P, P],
    ),
    "a-scheduler-that-starts-nothing-hangs": (
        [(0, OK), (1, sample(5, running=0, waiting=2)), (31, sample(5, running=0, waiting=2))],
        [U, U, H],
    ),
    "one-that-was-idle-when-it-hung-shows-nothing-of-what-it-got": (
        [
            *((0, OK), (50, sample(5, running=0)), (51, sample(5, running=0, awaited=50.5))),
            *((79.9, sample(5, running=0, awaited=50.5)), (80, sample(5, running=0, awaited=50.5))),
        ],
        [U, U, U, U, H],
    ),
    "callers-that-leave-sooner-and-ask-again-do-not-hide-a-hang": (
        [
            *((0, OK), (1, sample(5, running=0)), (20, sample(5, running=0, awaited=2.0))),
            *((at, sample(5, running=0, awaited=22.0)) for at in (22.5, 31.9, 32.0)),
        ],
        [U, U, U, U, U, H],
    ),
    "while-nobody-waits-an-engine-that-shows-nothing-is-idle": (
        [
            *((0, OK), (1, sample(5, running=0)), (20, sample(5, running=0, awaited=2.0))),
            *((21, sample(5, running=0)), (50, sample(5, running=0, awaited=22.0))),
            (51, sample(5, running=0, awaited=22.0)),
        ],
        [U, U, U, U, U, H],
    ),
    "refusals-at-once-are-no-hang": (
        [(0, OK), *((float(at), sample(5, running=0, awaited=at - 0.1)) for at in range(1, 99))],
        [U] * 99,
    ),
    "an-answer-awaited-while-others-come-is-no-hang": (
        [
            *((0, OK), (1, sample(5, running=0, awaited=0.5)), (30, sample(6, running=0, awaited=0.5))),
            (59, sample(7, running=0, awaited=0.5)),
        ],
        [U] * 4,
    ),
    "a-new-request-has-its-own-time": (
        [(0, OK), (1, sample(5, running=0, awaited=0.5)), (40, sample(5, running=0, awaited=39.0))],
        [U] * 3,
    ),
    "a-hang-when-idle-is-tried-again-after-its-penalty-and-takes-twice-as-long": (
        [
            *((0, OK), (1, sample(5, running=0)), (32, sample(5, running=0, awaited=2.0))),
            *((33, sample(5, running=0)), (36, sample(5, running=0)), (37, sample(5, running=0))),
            *((38, sample(5, running=0, awaited=37.5)), (68, sample(5, running=0, awaited=37.5))),
            *((at, sample(5, running=0)) for at in (69, 77, 78)),
        ],
        [U, U, H, H, H, P, P, H, H, H, P],
    ),
    "a-hang-when-idle-that-ends": (
        [(0, OK), (1, sample(5, running=0)), (32, sample(5, running=0, awaited=2.0)), (33, sample(9))],
        [U, U, H, P],
    ),
    "a-good-probe-does-not-cure-a-hang": ([(0, OK), (1, sample(5)), (31, sample(5)), (32, OK)], [U, U, H, H]),
    "a-hang-that-ends": ([(0, OK), (1, sample(5)), (31, sample(5)), (40, sample(9))], [U, U, H, P]),
    "a-hang-whose-requests-left": (
        [(0, OK), (1, sample(5)), (31, sample(5)), (40, sample(5, running=0))],
        [U, U, H, P],
    ),
    "a-hang-whose-requests-left-at-once": (
        [(0, OK), (1, sample(5)), (31, sample(5)), *((at, sample(5, running=0)) for at in (32, 35, 36))],
        [U, U, H, H, H, P],
    ),
    "a-hang-in-probation-whose-requests-left-takes-twice-as-long": (
        [
            *((0, OK), (1, sample(5)), (31, sample(5)), (36, sample(5, running=0)), (37, sample(5))),
            *((66, sample(5)), *((at, sample(5, running=0)) for at in (67, 75, 76))),
        ],
        [U, U, H, P, P, H, H, H, P],
    ),
    "a-minute-of-good-health-forgives-a-hang": (
        [
            *((0, OK), (1, sample(5)), (31, sample(5)), (36, sample(5, running=0))),
            *((37, SERVED), (37, SERVED), (37, SERVED), (96, sample(6)), (97, sample(7)), (127, sample(7))),
            *((at, sample(7, running=0)) for at in (131, 132)),
        ],
        [U, U, H, P, P, P, U, U, U, H, H, P],
    ),
    "a-hang-is-not-good-health": (
        [
            *((0, OK), (1, sample(5)), (31, sample(5)), (36, sample(5, running=0))),
            *((37, SERVED), (37, SERVED), (37, SERVED), (96, sample(7)), (126, sample(7))),
            *((at, sample(7, running=0)) for at in (131, 135, 136)),
        ],
        [U, U, H, P, P, P, U, U, H, H, H, P],
    ),
    "a-hang-whose-metrics-fell-silent": (
        [(0, OK), (1, sample(5)), (31, sample(5)), (60.9, OK), (61, OK)],
        [U, U, H, H, P],
    ),
    "a-hung-process-that-is-killed": (
        [(0, OK), (1, sample(5)), (31, sample(5)), (32, REFUSED)],
        [U, U, H, B],
    ),
    "a-hang-again-in-probation": (
        [(0, OK), (1, sample(5)), (31, sample(5)), (61, OK), (62, sample(5)), (91, sample(5))],
        [U, U, H, P, P, H],
    ),
    "a-restart-between-two-probes": (
        [(0, OK), (1, sample(5)), (2, sample(0, start=1e9 + 40))],
        [U, U, P],
    ),
    "a-restart-seen-by-counters-alone": (
        [(0, OK), (1, sample(5, start=None)), (2, sample(4, start=None))],
        [U, U, P],
    ),
    "counters-of-one-process-may-be-anything": ([(0, OK), (1, sample(5)), (2, sample(4))], [U, U, U]),
    "a-restart-ends-a-penalty": (
        [(0, OK), (1, sample(5)), (2, FAILED), (2, FAILED), (2, FAILED), (3, sample(0, start=2e9))],
        [U, U, U, U, X, P],
    ),
    "a-new-process-waits-for-its-probe": (
        [(0, OK), (1, sample(5)), (2, REFUSED), (3, sample(0, start=2e9)), (4, OK)],
        [U, U, B, B, P],
    ),
    "an-engine-that-drains-and-goes": (
        [(0, OK), (1, STOPPING), (2, OK), (9, REFUSED), (60, OK)],
        [U, D, D, B, P],
    ),
    "an-engine-that-drains-and-was-restarted": (
        [(0, OK), (1, sample(9)), (2, STOPPING), (3, sample(0, start=2e9))],
        [U, U, D, P],
    ),
    "an-engine-that-drains-in-silence-does-not-hang": (
        [(0, OK), (1, sample(5)), (2, STOPPING), *((at, TIMEOUT) for at in (10, 11, 12, 40))],
        [U, U, D, D, D, D, D],
    ),
    "an-engine-that-only-seemed-to-drain": ([(0, OK), (1, STOPPING), (60.9, OK), (61, OK)], [U, D, D, P]),
    "streams-end-well-while-it-drains": ([(0, OK), (1, STOPPING), (2, SERVED), (2, FAILED)], [U, D, D, D]),
    "a-late-report-of-draining": ([(0, OK), (1, REFUSED), (1, STOPPING)], [U, B, B]),
    "streams-that-end-well-do-not-end-a-drain-or-a-penalty": (
        [(0, OK), (1, STOPPING), *[(2, SERVED)] * 5, (3, REFUSED), (4, OK), (5, FAILED), *[(6, SERVED)] * 5],
        [U, D, D, D, D, D, D, B, P, X, X, X, X, X, X],
    ),
    "tokens-of-what-was-in-flight-do-not-end-a-drain-or-a-penalty": (
        [
            *((0, OK), (1, STOPPING), (2, sample(5)), (40, sample(50))),
            *((62, OK), (63, FAILED), (64, sample(60)), (90, sample(70))),
        ],
        [U, D, D, D, P, X, X, X],
    ),
    "what-drains-or-is-out-does-not-hang": (
        [(0, OK), (1, sample(5)), (2, STOPPING), (40, sample(5)), (90, OK), (91, FAILED), (130, sample(5))],
        [U, U, D, D, P, X, X],
    ),
    "a-hang-with-as-many-waiting-as-running": (
        [(0, OK), (1, sample(5, running=2, waiting=2)), (31, sample(5, running=2, waiting=2))],
        [U, U, H],
    ),
    "an-idle-engine-that-exports-no-start-time-has-not-restarted": (
        [(0, OK), *[(at, sample(5, start=None, running=0)) for at in (1, 2, 3)]],
        [U] * 4,
    ),
    "served-before-its-first-probe-it-was-up": ([(0, SERVED), (1, TIMEOUT), (2, TIMEOUT)], [U, U, U]),
    "a-restart-in-probation-begins-it-anew": (
        [
            *((0, OK), (1, sample(5)), (2, REFUSED), (3, OK), (4, SERVED), (5, SERVED)),
            *((6, sample(0, start=2e9)), (7, SERVED), (8, SERVED), (9, SERVED)),
        ],
        [U, U, B, P, P, P, P, P, P, U],
    ),
    "each-time-it-is-gone-it-has-its-whole-boot-budget": (
        [(0, OK), (1, REFUSED), (50, OK), (500, REFUSED), (599, REFUSED), (600, REFUSED)],
        [U, B, P, B, B, DOWN],
    ),
    "its-list-of-models-is-missing": ([(0, OK), *[(1, ModelsFailed("HTTP 404"))] * 9], [U] * 10),
    "its-list-of-models-refuses-our-key": (
        [(0, OK), *[(1, ModelsFailed("HTTP 401", key_refused=True))] * 3, (6, OK)],
        [U, U, U, X, P],
    ),
    "its-key-is-refused": (
        [(0, OK), *[(1, Attempt(Outcome.MISCONFIGURED, "HTTP 401"))] * 3],
        [U, U, U, X],
    ),
}


@pytest.mark.parametrize(("script", "expected"), SCRIPTS.values(), ids=SCRIPTS.keys())
def test_a_script_of_events_leads_to_these_states(
    script: list[tuple[float, Event]], expected: list[str]
) -> None:
    assert states(*script) == expected


def test_a_reason_that_quotes_a_sentence_is_one() -> None:
    failed = Attempt(Outcome.UNREACHABLE, "The backend cannot be reached.")
    status = play((0, OK), *[(1, failed)] * 3)[-1]
    words = "3 failures, the last: unreachable: The backend cannot be reached; out for at least 5 s"
    assert status.reason == words


@pytest.mark.parametrize("failure", [ModelsFailed("/v1/models: HTTP 401", key_refused=True), FAILED])
def test_an_ejection_says_how_many_failures_there_were_and_not_of_what(failure: Event) -> None:
    status = play((0, OK), *[(1, failure)] * 3)[-1]
    assert status.reason == f"3 failures, the last: {status.last_error}; out for at least 5 s"


def test_a_success_forgives_one_failure_from_anywhere() -> None:
    status = play((0, OK), (1, FAILED), (1, FAILED), (2, SERVED), (3, FAILED), (4, FAILED))[-1]
    assert status.reason.startswith("3 failures, the last: ")
    assert (status.is_own_verdict, status.is_shunned) == (True, False)


@pytest.mark.parametrize(
    ("script", "is_shunned"),
    [
        ([(1, FAILED)] * 3, False),
        ([(1, FAILED), (1, FAILED), (1, WRONG)], True),
        ([(1, WRONG)] * 3, True),
        ([*[(1, WRONG)] * 3, (2, SERVED), (7, OK), (8, FAILED)], True),
        ([*[(1, WRONG)] * 3, (7, OK), *[(8, SERVED)] * 3, *[(9, FAILED)] * 3], False),
        ([*[(1, FAILED)] * 3, (7, OK), (8, WRONG)], True),
    ],
)
def test_what_may_be_wrong_on_this_side_only_has_only_this_side_avoid_it(
    script: list[tuple[float, Event]], is_shunned: bool
) -> None:
    status = play((0, OK), *script)[-1]
    assert (status.state, status.is_shunned) == (State.EJECTED, is_shunned)


def test_what_began_at_a_former_url_proves_nothing_about_the_one_there_is() -> None:
    moved = BackendStatus(since=10.0, tried_since=10.0)
    for started_at, state in ((9.9, State.UNKNOWN), (10.0, State.UP)):
        assert play((11, Attempt(Outcome.OK, started_at=started_at)), status=moved)[-1].state is state


@pytest.mark.parametrize(
    "outcome", [Outcome.UNREACHABLE, Outcome.TIMEOUT, Outcome.FAILED, Outcome.MISCONFIGURED]
)
def test_every_fault_ejects(outcome: Outcome) -> None:
    last = play((0, OK), *[(1, Attempt(outcome, "x"))] * 3)[-1]
    assert (last.state, last.ejections) == (State.EJECTED, 1)
    assert last.last_error == f"{outcome.value}: x"


def test_the_penalty_doubles_up_to_a_minute_and_a_good_spell_forgives_it() -> None:
    status = play((0, OK))[-1]
    now, penalties = 0.0, []
    for _ in range(6):
        for _ in range(3):
            status = advance(status, FAILED, now, RULES)
        penalties.append(status.ejected_until - now)
        now = status.ejected_until
        status = advance(status, OK, now, RULES)
        for _ in range(3):
            status = advance(status, SERVED, now, RULES)
        assert status.state is State.UP
    assert penalties == [5, 10, 20, 40, 60, 60]

    now += RULES.penalty_max_s
    for _ in range(3):
        status = advance(status, FAILED, now, RULES)
    assert status.ejected_until - now == 5


@pytest.mark.parametrize(
    ("version", "fault", "seen"),
    [
        ("0.32.0", REFUSED, [False, False, False, True, False]),
        *(("0.32.0", fault, [False] * 5) for fault in (TIMEOUT, UNRESOLVED)),  # its network, perhaps
        ("", REFUSED, [False, False, False, False, False]),  # not vLLM: it may finish behind a closed port
    ],
)
def test_a_vllm_that_refuses_for_a_while_will_not_answer_what_it_has(
    version: str, fault: ProbeFailed, seen: list[bool]
) -> None:
    up = ProbeOk(version=version)
    script = play((0, up), (1, fault), (10.9, fault), (11, fault), (50, up))

    assert [lost(status) for status in script] == seen
    assert ("what it had not answered is lost" in script[3].reason) is seen[3]


@pytest.mark.parametrize(
    ("state", "out_s", "asked_s"),
    [
        (State.EJECTED, -30.0, 31.0),  # 30 s of its penalty are left, and then it is probed
        (State.EJECTED, -0.5, 1.5),
        (State.EJECTED, 3.0, 3.0),  # its penalty is over, and no probe has succeeded
        (State.BOOTING, 0.0, 1.0),
        (State.BOOTING, 4.0, 4.0),
        (State.DOWN, 3600.0, 10.0),
    ],
)
def test_when_to_ask_again_for_one_that_is_out(state: State, out_s: float, asked_s: float) -> None:
    since, until = (60.0, out_s) if state is State.EJECTED else (out_s, 60.0)
    idle = BackendStatus(state, 1_000.0 - since, ejected_until=1_000.0 - until, engine=EngineSample(at=900.0))

    assert retry_after_s(idle, 1_000.0) == asked_s
    assert retry_after_s(replace(idle, engine=None), 1_000.0) == asked_s


def test_when_to_ask_again_for_one_that_hung_depends_on_whether_its_requests_have_left() -> None:
    stuck = play((0, OK), (1, sample(5)), (31, sample(5)))[-1]
    idle = play((32, sample(5, running=0)), status=stuck)[-1]
    assert (stuck.state, idle.state) == (State.HUNG, State.HUNG)
    assert [retry_after_s(stuck, now) for now in (32.0, 34.0)] == [1.0, 3.0]
    assert [retry_after_s(idle, now) for now in (32.0, 34.0, 36.0)] == [5.0, 3.0, 1.0]
    queueing = play((32, sample(5, running=1, waiting=1)), status=stuck)[-1]
    assert [retry_after_s(queueing, now) for now in (32.0, 34.0)] == [1.0, 3.0]


def test_a_long_probation_is_no_good_spell() -> None:
    status = play((0, OK), *[(1, FAILED)] * 3, (6, OK), (500, FAILED))[-1]
    assert (status.ejections, status.ejected_until) == (2, 510.0)


def test_a_penalty_is_bounded_however_often_it_was_doubled() -> None:
    status = BackendStatus(state=State.PROBATION, was_up=True, ejections=5000)
    assert play((0, FAILED), status=status)[-1].ejected_until == 60.0


def test_many_failures_at_once_are_one_ejection() -> None:
    status = play((0, OK), *[(1.0, FAILED)] * 64)[-1]
    assert (status.ejections, status.ejected_until) == (1, 6.0)


def test_a_restart_forgets_the_old_process_and_is_counted() -> None:
    before = ProbeOk(models=("gemma",), context_tokens=4096, version="0.32.0")
    status = play((0, before), (1, FAILED), (2, sample(7)), (3, sample(0, start=2e9)))[-1]
    assert status.restarts == 1
    assert (status.served_models, status.context_tokens, status.version) == ((), None, "")
    assert status.recent_failures == ()
    assert status.reason == "restarted; restarts so far: 1"
    wrong = play((0, ProbeOk(models=("qwen",))), (2, sample(7)), (3, sample(0, start=2e9)))[-1]
    assert wrong.model_error == ""


@pytest.mark.parametrize("counter", ["generation_tokens", "prompt_tokens", "preemptions"])
def test_a_counter_that_fell_is_a_restart(counter: str) -> None:
    before = EngineSample(at=1.0, generation_tokens=9.0, prompt_tokens=9.0, preemptions=9.0)
    for now, restarts in ((9.0, 0), (8.0, 1)):
        after = replace(before, at=2.0, **{counter: now})  # type: ignore[arg-type]
        assert play((0, OK), (1, Sample(before)), (2, Sample(after)))[-1].restarts == restarts


def test_an_engine_may_restart_that_tells_its_start_only_at_times() -> None:
    told = [(7, 1e9), (7, 2e9), (0, None), (5, None), (0, 3e9), (0, 4e9)]
    statuses = play((0, OK), *[(at, sample(tokens, start=start)) for at, (tokens, start) in enumerate(told)])
    assert [one.restarts for one in statuses[1:]] == [0, 1, 2, 2, 3, 4]
    assert statuses[-1].shared_at is None


def test_engines_that_answer_at_one_url_by_turns_are_no_restarts() -> None:
    """As behind a load balancer: only the first turn of each looks like one."""
    turns = [sample(start * 100, start=1e9 + start) for start in (1, 2, 3, 1, 2, 3, 4, 1)]
    statuses = play((0, OK), *[(float(at), turn) for at, turn in enumerate(turns)])
    assert [one.restarts for one in statuses[1:]] == [0, 1, 2, 2, 2, 2, 2, 2]
    assert [one.shared_at is not None for one in statuses[1:]] == [False] * 3 + [True] * 5
    assert statuses[-1].metrics_error.startswith("several engines answer at its URL by turns")
    assert statuses[-1].reported is None
    served = play(*[(8, SERVED)] * 3, (9, sample(0, start=1e9 + 2)), status=statuses[-1])[-1]
    assert served.state is State.UP


def test_a_probe_that_something_before_the_engine_refuses_for_load_says_nothing_about_it() -> None:
    limited = ProbeFailed(ProbeFault.LIMITED, "/health: HTTP 429")
    up = play((0, OK), *[(at, limited) for at in range(1, 20)])[-1]
    assert (up.state, up.probe_failures, up.last_error) == (State.UP, 0, "probe: /health: HTTP 429")
    assert states((0, limited), (50, limited), (101, limited), (102, OK)) == [B, B, DOWN, U]
    assert states((0, OK), (1, REFUSED), (2, limited), (102, limited), (103, OK)) == [U, B, B, DOWN, P]


def test_what_requests_get_while_a_probe_waits_is_as_good_an_answer() -> None:
    slow = replace(TIMEOUT, is_answering=True)
    up = play((0, OK), *[(at, slow) for at in range(1, 20)])[-1]
    assert (up.state, up.probe_failures, up.last_error) == (State.UP, 0, "probe: no answer in 3 s")
    twice = [(1.0, TIMEOUT), (2.0, TIMEOUT)]
    assert states((0, OK), *twice, (3, slow), *twice, (4, TIMEOUT)) == [U] * 6 + [X]
    assert states((0, OK), *[(1, FAILED)] * 3, (2, slow), (7, slow)) == [U, U, U, X, X, P]
    unwell = ProbeFailed(ProbeFault.STATUS, "/health: HTTP 503", is_answering=True)
    assert states((0, OK), (1, unwell), (2, unwell), (3, unwell)) == [U] * 3 + [X]


def test_of_engines_that_answer_by_turns_none_is_said_to_hang() -> None:
    shared = play((0, OK), *[(1, sample(7, start=start)) for start in (1e9, 2e9, 1e9)])[-1]
    served = play(*[(2, SERVED)] * 3, *[(at, sample(7)) for at in (9, 45, 90)], status=shared)
    assert {one.state for one in served[-3:]} == {State.UP}
    hung = replace(shared, state=State.HUNG)
    assert play((9, sample(7)), status=hung)[-1].state is State.PROBATION


def test_an_engine_that_has_long_been_alone_at_its_url_may_restart_and_hang() -> None:
    """As after a rolling update, in which the old one and the new one answered for a while."""
    shared = play((0, OK), *[(1, sample(7, start=start)) for start in (1e9, 2e9, 1e9, 2e9)])[-1]
    *_, still, alone = play((600, sample(8, start=2e9)), (601, sample(9, start=2e9)), status=shared)
    assert (still.shared_at, alone.shared_at) == (1.0, None)
    assert (alone.metrics_error, alone.restarts) == ("", 1)
    assert play((602, sample(0, start=3e9)), status=alone)[-1].restarts == 2
    assert play((640, sample(9, start=2e9)), status=alone)[-1].state is State.HUNG


def test_what_an_operator_is_told_of_a_backend() -> None:
    """Each change says why; what changes nothing leaves what was said."""
    models = ProbeOk(models=("gemma",))
    told: list[tuple[tuple[float, Event], str]] = [
        ((0, models), "answers"),
        ((1, models), "answers"),
        ((2, ModelsFailed("HTTP 404")), "cannot tell what it serves: HTTP 404"),
        ((3, models), "serves the right model now"),
        ((4, models), "serves the right model now"),
        ((5, ProbeFailed(ProbeFault.REFUSED)), "refused; it has 100 s to boot"),
        ((25, ProbeFailed(ProbeFault.REFUSED, "gone")), "gone; it has 100 s to boot"),
        ((45, models), "answers again, after 40 s"),
        *[((46 + n, SERVED), "answers again, after 40 s") for n in range(2)],
        ((50, SERVED), "served 3 requests in probation"),
        ((51, SERVED), "served 3 requests in probation"),
        ((52, sample(5)), "served 3 requests in probation"),
        ((82, sample(5)), "no token in 30 s with 1 running and 0 waiting"),
        ((83, sample(5)), "no token in 30 s with 1 running and 0 waiting"),
        ((84, sample(5, kv=0.6)), "makes progress again, after 2 s"),
        ((114, sample(5, kv=0.6)), "no token in 30 s with 1 running and 0 waiting"),
        ((115, sample(6, kv=0.6)), "generates again, after 1 s"),
        ((145, sample(6, kv=0.6)), "no token in 30 s with 1 running and 0 waiting"),
        ((147, sample(6, running=0, kv=0)), "no token in 30 s with 1 running and 0 waiting"),
        (
            (205, sample(6, running=0, kv=0)),
            "was hung, has nothing left to run, and is tried again, after 60 s",
        ),
        ((206, Attempt(Outcome.DRAINING)), "the engine is stopping"),
    ]
    seen = play(*[event for event, _ in told])
    assert [status.reason for status in seen] == [reason for _, reason in told]
    assert play((0, REFUSED), (30, OK))[-1].reason == "answers, after 30 s"
    silent = play((0, OK), (1, sample(5)), (31, sample(5)), (61, OK))[-1]
    assert silent.reason == "was hung; its metrics are no longer available"
    expired = ProbeFailed(ProbeFault.TLS, "TLS: certificate has expired")
    back = play((0, OK), (1, REFUSED), (2, expired), (50, TIMEOUT), (101, expired), (102, REFUSED))
    assert [status.reason for status in back[2:]] == [
        "TLS: certificate has expired",
        "no answer in 3 s; it has 100 s to boot",
        "no answer for more than 100 s: TLS: certificate has expired",
        "no answer for more than 100 s: connection refused",
    ]
    assert play((0, Attempt(Outcome.FAILED)))[-1].last_error == "failed"
    assert play((0, TIMEOUT))[-1].last_error == "probe: no answer in 3 s"
    assert seen[13].last_error == "hung: no token in 30 s with 1 running and 0 waiting"
    frozen = play((0, OK), (1, sample(5)), *[(at, TIMEOUT) for at in (6, 7, 8, 36)])[-1]
    assert frozen.reason == "has answered nothing for 30 s"
    idle = play((0, OK), (1, sample(5, running=0)), (35, sample(5, running=0, awaited=2.0)))[-1]
    assert idle.reason == "no token in 34 s for requests of which it knows nothing"


def test_what_it_serves_is_kept_and_a_wrong_model_is_said() -> None:
    seen = play(
        (0, ProbeOk(models=("qwen",), context_tokens=65536, version="0.32.0")),
        (1, OK),
        (2, ProbeOk(models=("gemma",), context_tokens=32768)),
    )
    assert seen[0].state is State.UP
    assert (seen[0].model_error, seen[0].reason) == ("serves qwen, not gemma",) * 2
    assert seen[1].served_models == ("qwen",)  # a probe of /health alone says nothing of models
    assert (seen[2].model_error, seen[2].reason, seen[2].context_tokens) == (
        "",
        "serves the right model now",
        32768,
    )
    assert seen[2].version == "0.32.0"


@pytest.mark.parametrize(
    ("wanted", "served", "error"),
    [
        (None, ("any",), ""),
        (None, ("a", "b"), "serves 2 models: set `model` to choose one"),
        (None, (), "lists no model"),
        ("a", ("b", "a"), ""),
        ("a", (), "serves nothing, not a"),
    ],
    ids=["any-will-do", "which-of-two", "nothing-to-serve", "one-of-two", "none-at-all"],
)
def test_model_errors(wanted: str | None, served: tuple[str, ...], error: str) -> None:
    rules = replace(RULES, model=wanted)
    assert advance(BackendStatus(), ProbeOk(models=served), 0.0, rules).model_error == error


def test_a_failed_scrape_is_noted_and_judges_nothing() -> None:
    seen = play((0, OK), (1, SampleFailed("HTTP 404")), (2, sample(1)))
    assert (seen[1].state, seen[1].metrics_error) == (State.UP, "HTTP 404")
    assert seen[2].metrics_error == ""


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        (State.UP, (True, True, True, False)),
        (State.PROBATION, (True, True, False, False)),
        (State.UNKNOWN, (True, True, True, True)),
        (State.BOOTING, (False, False, False, False)),
        (State.DRAINING, (False, False, False, False)),
        (State.HUNG, (False, False, False, False)),
        (State.EJECTED, (False, False, False, False)),
        (State.DOWN, (False, False, False, False)),
    ],
    ids=lambda value: value.value if isinstance(value, State) else "",
)
def test_what_each_state_allows(state: State, expected: tuple[bool, bool, bool, bool]) -> None:
    status = BackendStatus(state=state)
    told = (
        usable(status),
        accepts(status, PROBATION_SEQS - 1),
        accepts(status, PROBATION_SEQS),
        is_last_resort(status),
    )
    assert told == expected


def test_what_a_process_had_is_gone_with_it() -> None:
    ended = {state for state in State if has_ended(BackendStatus(state=state))}
    assert ended == {State.BOOTING, State.DOWN, State.OUT}
    assert {state for state in State if lost(BackendStatus(state=state))} == {State.HUNG, State.DOWN}


def test_one_that_says_that_it_sleeps_takes_no_requests_until_it_is_awake() -> None:
    before, asleep, still, awake = play(
        *((0, OK), (1, sample(5, asleep=True, awaited=0.0)), (99, sample(5, asleep=True, awaited=0.0))),
        (100, sample(5, running=2, awaited=0.0)),
    )

    assert [usable(one) for one in (before, asleep, still, awake)] == [True, False, False, True]
    assert [accepts(one, 0) for one in (before, asleep, still, awake)] == [True, False, False, True]
    assert [lost(one) for one in (before, asleep, still, awake)] == [False, True, True, False]
    assert {one.state for one in (before, asleep, still, awake)} == {State.UP}  # it is no fault, and no hang
    assert (asleep.reason, awake.reason) == ("its engine sleeps: POST /wake_up wakes it", "is awake again")


@pytest.mark.parametrize(
    "event",
    [SampleFailed("HTTP 404"), REFUSED, sample(0, start=2e9)],
    ids=["no-metrics", "gone", "restarted"],
)
def test_one_that_does_not_say_any_longer_that_it_sleeps_is_not_taken_to_sleep(event: Event) -> None:
    asleep, after = play((0, OK), (1, sample(5, asleep=True)), (2, event))[1:]
    assert (asleep.is_asleep, after.is_asleep) == (True, False)


def test_of_engines_that_answer_by_turns_none_is_said_to_sleep() -> None:
    turns = [(at, sample(5, start=1e9 + at % 2, asleep=at % 2 == 0)) for at in range(1, 6)]
    assert [one.is_asleep for one in play((0, OK), *turns)[-3:]] == [False] * 3


@pytest.mark.parametrize(
    ("configured", "served", "name"),
    [("a", ("b",), "a"), (None, ("b",), "b"), (None, ("b", "c"), None), (None, (), None)],
    ids=["configured-wins", "the-only-one", "ambiguous", "not-known-yet"],
)
def test_the_name_to_send(configured: str | None, served: tuple[str, ...], name: str | None) -> None:
    assert served_name(configured, BackendStatus(served_models=served)) == name


SPARK = PerfModel(2.402e-2, 0.1207, 9.407e-7, 0, 2.366e-3, 4.282e-4, 8.888e-8, 6)
H200 = PerfModel(6.184e-3, 7.040e-3, 1e-9, 0, 8.267e-5, 1.0e-4, 8e-9, 1)


@pytest.mark.parametrize(
    ("perf", "context_tokens", "low_s", "high_s"),
    [(SPARK, 65_536, 80, 120), (SPARK, 2_048, 30, 30), (H200, 32_768, 30, 30)],
    ids=["long-chunks-on-a-slow-box", "short-window", "fast-box"],
)
def test_a_hang_is_longer_than_the_longest_step(
    perf: PerfModel, context_tokens: int, low_s: float, high_s: float
) -> None:
    assert low_s <= hang_after_s(perf, 8_192, context_tokens, floor_s=30) <= high_s


def test_the_longest_step_reads_the_last_chunk_of_the_longest_prompt() -> None:
    attention_alone = PerfModel(0, 0, 0, 0, 0, 0, 1e-6, 1)
    assert hang_after_s(attention_alone, 1_000, 10_000, floor_s=0) == pytest.approx(2 * 9.5)
    assert hang_after_s(attention_alone, 1_000, 100, floor_s=0) == pytest.approx(2 * 0.005)


def test_what_an_engine_reported_counts_while_it_can_be_asked() -> None:
    broken = ProbeFailed(ProbeFault.STATUS, "HTTP 503")
    seen = play((0, OK), (1, sample(5)), (2, SampleFailed("HTTP 404")), (3, sample(6)), (4, broken), (5, OK))
    assert [status.reported and status.reported.generation_tokens for status in seen] == [
        *(None, 5.0, None),
        *(6.0, None, 6.0),
    ]


# ------------------------------------------------------------------ properties

outcomes = st.builds(Attempt, st.sampled_from(Outcome), st.just("why"))
engines = st.builds(
    EngineSample,
    at=st.just(0.0),
    running=st.integers(0, 3),
    waiting=st.integers(0, 3),
    kv_usage=st.sampled_from([0.0, 0.5]),
    generation_tokens=st.integers(0, 3).map(float),
    started_at=st.sampled_from([None, 1e9, 2e9]),
)
events: st.SearchStrategy[Event] = st.one_of(
    st.builds(ProbeOk, st.sampled_from([None, (), ("gemma",), ("qwen",)])),
    st.builds(ProbeFailed, st.sampled_from(ProbeFault), st.just("why")),
    st.builds(ModelsFailed, st.just("why"), st.booleans()),
    st.builds(Sample, engines),
    st.builds(SampleFailed, st.just("why")),
    outcomes,
)
scripts = st.lists(st.tuples(st.floats(0, 60), events), max_size=40)


def history(script: list[tuple[float, Event]]) -> tuple[list[BackendStatus], float]:
    now, timed = 0.0, []
    for wait_s, event in script:
        now += wait_s
        timed.append((now, event))
    return play(*timed), now


@settings(deadline=None)
@given(scripts, st.sampled_from([Outcome.REJECTED, Outcome.CANCELLED, Outcome.BUSY]), st.integers(1, 100))
def test_neither_a_bad_request_nor_a_caller_that_left_nor_a_full_queue_changes_anything(
    script: list[tuple[float, Event]], outcome: Outcome, times: int
) -> None:
    seen, now = history(script)
    status = seen[-1] if seen else BackendStatus()
    after = play(*[(now, Attempt(outcome, "HTTP 400"))] * times, status=status)[-1]
    if outcome is Outcome.BUSY and status.state is State.EJECTED:  # a failed trial, but nothing else
        status = replace(status, successes=0, trials_failed=after.trials_failed)
    assert after == status


@settings(deadline=None)
@given(scripts)
def test_every_state_has_a_reason_and_a_time(script: list[tuple[float, Event]]) -> None:
    seen, now = history(script)
    for before, after in pairwise([BackendStatus(), *seen]):
        assert before.since <= after.since <= now
        assert after.state is State.UNKNOWN or after.reason
        assert (after.since == before.since) or after.state is not before.state
        assert after.restarts - before.restarts in (0, 1)


@settings(deadline=None)
@given(scripts)
def test_nothing_goes_straight_from_a_fault_to_up(script: list[tuple[float, Event]]) -> None:
    seen, _ = history(script)
    faulty = {State.EJECTED, State.HUNG, State.DRAINING}
    for before, after in pairwise(seen):
        assert not (before.state in faulty and after.state is State.UP)


@settings(deadline=None)
@given(scripts)
def test_whatever_happened_a_working_backend_comes_back(script: list[tuple[float, Event]]) -> None:
    seen, now = history(script)
    status = seen[-1] if seen else BackendStatus()
    for round_ in range(4):
        status = advance(status, OK, now + 61.0 * (round_ + 1), RULES)
    assert usable(status)
    for _ in range(3):
        status = advance(status, SERVED, now + 300.0, RULES)
    assert status.state is State.UP


def ejected(*events: tuple[float, Event]) -> BackendStatus:
    """Return the status of a backend that was ejected at 10 for failed requests, after what came later."""
    return play((0, OK), *[(10, FAILED)] * 3, *events)[-1]


UNWELL = ProbeFailed(ProbeFault.STATUS, "/health: HTTP 503")


def trial(outcome: Outcome, began_at: float) -> Attempt:
    return Attempt(outcome, "HTTP 500", began_at)


def test_one_that_is_ejected_may_be_tried_while_it_answers_probes() -> None:
    assert may_be_tried(ejected(), 10.0)
    assert may_be_tried(ejected((11, OK)), 11.0)
    assert may_be_tried(ejected((11, UNWELL)), 11.0)
    assert not may_be_tried(ejected((11, TIMEOUT)), 11.0)
    assert not may_be_tried(ejected((11, sample(5, asleep=True))), 11.0)
    assert not may_be_tried(play((0, OK))[-1], 0.0)


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.TIMEOUT, Outcome.BUSY])
def test_one_whose_trials_fail_rests_between_them(outcome: Outcome) -> None:
    failed = [(11, trial(outcome, 10.5))] * 3
    status = ejected(*failed)

    assert [may_be_tried(status, now) for now in (11.0, 15.9, 16.0)] == [False, False, True]
    assert (status.ejections, status.ejected_until) == (1, 15.0)
    assert not may_be_tried(ejected(*failed, (16, trial(Outcome.FAILED, 16.0))), 20.9)
    assert may_be_tried(ejected(*failed, (16, trial(Outcome.OK, 16.0))), 16.0)


@pytest.mark.parametrize("failures_max", [1, 2, 10])
def test_how_many_failures_eject_does_not_matter_for_trials(failures_max: int) -> None:
    rules = replace(RULES, failures_max=failures_max)
    status = ejected()
    for _ in range(12):
        status = advance(status, trial(Outcome.FAILED, 10.5), 11.0, rules)
    assert [may_be_tried(status, now) for now in (11.0, 16.0)] == [False, True]

    status = advance(status, trial(Outcome.OK, 11.0), 12.0, rules)
    assert may_be_tried(status, 12.0)


@pytest.mark.parametrize(
    ("outcome", "is_shunned", "told"),
    [(Outcome.FAILED, False, 1), (Outcome.MISCONFIGURED, False, 0), (Outcome.FAILED, True, 0)],
)
def test_other_gateways_are_told_of_failed_trials_as_of_those_that_succeed(
    outcome: Outcome, is_shunned: bool, told: int
) -> None:
    before = replace(ejected(), is_shunned=is_shunned)
    after = advance(before, trial(outcome, 10.5), 11.0, RULES)
    there = BackendStatus(state=State.PROBATION)

    again = advance(after, trial(Outcome.OK, 11.0), 12.0, RULES)

    served, failed = again.served - before.served, again.failed - before.failed
    assert (served, failed) == (1, told)
    counted = advance(there, PeerAttempts(served, failed), 12.0, RULES).successes
    assert counted == 1 - told


def test_trials_that_failed_before_it_answered_probes_again_do_not_count() -> None:
    failed = [(11, trial(Outcome.FAILED, 10.5))] * 3

    assert not may_be_tried(ejected((11, UNWELL), *failed, (12, UNWELL)), 12.0)
    assert may_be_tried(ejected((11, UNWELL), *failed, (12, OK)), 12.0)
    assert not may_be_tried(ejected(*failed, (12, OK)), 12.0)


def test_trials_that_failed_during_an_earlier_ejection_do_not_count() -> None:
    again = ejected(*[(11, trial(Outcome.FAILED, 10.5))] * 3, (15, OK), (15.5, FAILED))

    assert (again.state, may_be_tried(again, 15.5)) == (State.EJECTED, True)


def test_what_succeeds_late_makes_up_for_no_failed_trial() -> None:
    failed = [(11, trial(Outcome.FAILED, 10.5))] * 3

    assert not may_be_tried(ejected(*failed, (12, trial(Outcome.OK, 9.5))), 12.0)
    assert may_be_tried(ejected(*failed, (12, trial(Outcome.OK, 10.5))), 12.0)


def test_what_fails_late_is_no_failed_trial() -> None:
    status = ejected(*[(11, trial(Outcome.FAILED, 9.5))] * 3)

    assert may_be_tried(status, 11.0)


def test_trials_that_succeed_in_a_row_end_the_penalty() -> None:
    again: list[tuple[float, Event]] = [(15, OK), (15, SERVED), (15, FAILED)]  # out for another 10 s
    good, bad, late = (trial(Outcome.OK, 16.0), trial(Outcome.FAILED, 16.0), trial(Outcome.OK, 14.0))

    for trials, state in (
        ([good, good, good], State.PROBATION),
        ([good, good], State.EJECTED),
        ([good, good, bad, good], State.EJECTED),
        ([late, late, late], State.EJECTED),
    ):
        status = ejected(*again, *[(17, one) for one in trials])
        assert status.state is State.EJECTED
        assert advance(status, OK, 17.0, RULES).state is state


def test_a_penalty_that_trials_ended_does_not_double_the_next_one() -> None:
    status = ejected()
    for now in (11.0, 13.0, 15.0):
        for _ in range(4):
            status = advance(status, trial(Outcome.OK, now), now, RULES)
        status = advance(advance(status, OK, now, RULES), trial(Outcome.FAILED, now), now, RULES)
        assert (status.state, status.ejections, status.ejected_until) == (State.EJECTED, 1, now + 5.0)

    status = advance(advance(status, OK, 20.0, RULES), trial(Outcome.FAILED, 20.0), 20.0, RULES)
    assert (status.ejections, status.ejected_until) == (2, 30.0)


@pytest.mark.parametrize("word", [*State, "three failures", "process_start_time_seconds"])
def test_the_documentation_names_every_state(word: str) -> None:
    text = (Path(__file__).parents[2] / "docs" / "health.md").read_text(encoding="utf-8")
    assert word in text.lower()


def test_a_gateway_that_cannot_ask_blames_nobody() -> None:
    status = BackendStatus(state=State.UP, was_up=True)

    for second in range(10):
        event = ProbeFailed(ProbeFault.OURS, "this gateway has no file descriptors left")
        status = advance(status, event, float(second), HealthRules())

    assert status.state is State.UP
    assert "no file descriptors" in status.last_error


# ------------------------------------------------------------------ machines that change models


@pytest.mark.parametrize(
    "event",
    [
        ProbeOk(),
        ProbeFailed(ProbeFault.REFUSED),
        Sample(EngineSample(at=1.0)),
        Attempt(Outcome.FAILED),
        Attempt(Outcome.DRAINING),
        ModelsFailed("no", key_refused=True),
    ],
    ids=["answers", "refuses", "sample", "failure", "drains", "key-refused"],
)
def test_nothing_is_held_against_a_backend_whose_machine_runs_another_model(event: Event) -> None:
    out = put_out(BackendStatus(state=State.UP, restarts=2, was_up=True), 5.0, "qwen is in")
    assert (out.state, out.since, out.restarts, usable(out)) == (State.OUT, 5.0, 2, False)
    assert advance(out, event, 10_000.0, HealthRules()) is out


def test_what_is_counted_since_the_start_of_the_gateway_outlasts_a_swap() -> None:
    counted = {"restarts": 1, "served": 2, "failed": 3, "verdicts": 4, "heard": (("other", 5),)}
    up = BackendStatus(state=State.UP, version="0.32.0", **counted)  # type: ignore[arg-type]
    out = put_out(up, 5.0, "qwen is in")
    assert out == BackendStatus(State.OUT, 5.0, "qwen is in", version="0.32.0", **counted)  # type: ignore[arg-type]
    back = awaited(out, 9.0, "being started")
    assert {name: getattr(back, name) for name in counted} == counted


def test_one_that_is_started_again_has_its_whole_boot_budget_and_is_no_restart() -> None:
    before = BackendStatus(state=State.UP, was_up=True, engine=EngineSample(at=1.0, started_at=1e9))
    booting = awaited(put_out(before, 5.0, "qwen is in"), 1000.0, "being started")
    refused = advance(booting, ProbeFailed(ProbeFault.REFUSED), 1599.0, HealthRules())
    assert refused.state is State.BOOTING
    up = advance(refused, ProbeOk(), 1599.5, HealthRules())
    new = advance(up, Sample(EngineSample(at=1600.0, started_at=2e9)), 1600.0, HealthRules())
    assert (new.state, new.restarts) == (State.UP, 0)
    late = advance(refused, ProbeFailed(ProbeFault.REFUSED), 1600.0, HealthRules())
    assert late.state is State.DOWN
