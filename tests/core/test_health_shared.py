"""What gateways tell each other of a backend, as scripts: events in, states out, and what is told on."""

from dataclasses import replace

import pytest

from gateway.core.health import (
    Attempt,
    BackendStatus,
    EngineSample,
    Event,
    HealthRules,
    Outcome,
    PeerAttempts,
    PeerVerdict,
    ProbeFailed,
    ProbeFault,
    ProbeOk,
    Sample,
    State,
    Verdict,
    advance,
    verdict,
)
from gateway.core.health.transitions import HEARD_MAX

RULES = HealthRules(boot_budget_s=100.0)
OK = ProbeOk()
REFUSED = ProbeFailed(ProbeFault.REFUSED, "connection refused")
SLOW = ProbeFailed(ProbeFault.TIMEOUT, "no answer in 3 s")
SERVED = Attempt(Outcome.OK)
FAILED = Attempt(Outcome.FAILED, "status 500")
SERVED_THERE = PeerAttempts(9, 0)
STOPPING = Attempt(Outcome.DRAINING, "cannot schedule new futures")
OUT = Verdict(1, State.EJECTED, "3 requests failed", 5.0, ejections=1)
STOPS = Verdict(1, State.DRAINING, "the engine is stopping", 60.0)
U, B, P, D = "up", "booting", "probation", "draining"
X, H, Q = "ejected", "hung", "unknown"


def says(what: Verdict = OUT, *, by: str = "other", **changes: float) -> PeerVerdict:
    return PeerVerdict(by, replace(what, **changes))  # type: ignore[arg-type]


def sample(tokens: float, start: float = 1e9) -> Sample:
    return Sample(EngineSample(at=0.0, running=1, kv_usage=0.5, generation_tokens=tokens, started_at=start))


def fails_here_alone(now: float) -> list[tuple[float, Event]]:
    return [(now, FAILED), (now, FAILED), (now, SERVED_THERE), (now, FAILED)]


def play(*script: tuple[float, Event], status: BackendStatus | None = None) -> list[BackendStatus]:
    seen = []
    status = status or BackendStatus()
    for now, event in script:
        status = advance(status, event, now, RULES)
        seen.append(status)
    return seen


SCRIPTS: dict[str, tuple[list[tuple[float, Event]], list[str]]] = {
    "what-failed-elsewhere-is-out-here": ([(0, OK), (1, says())], [U, X]),
    "it-comes-back-by-a-probe-of-ones-own": (
        [(0, OK), (1, says()), (5.9, OK), (6, OK), (7, SERVED), (8, SERVED), (9, SERVED)],
        [U, X, X, P, P, P, U],
    ),
    "a-verdict-counts-once": (
        [(0, OK), (1, says()), (2, says(left_s=4.0)), (6, OK), (6, says(left_s=0.1)), (7, says())],
        [U, X, X, P, P, P],
    ),
    "the-next-verdict-counts-again": (
        [(0, OK), (1, says()), (6, OK), (7, says(number=2, left_s=10.0)), (16, OK), (17, OK)],
        [U, X, P, X, X, P],
    ),
    "verdicts-of-different-gateways-are-different": (
        [(0, OK), (1, says()), (6, OK), (6, says(by="third"))],
        [U, X, P, X],
    ),
    "a-verdict-counts-until-it-is-over": (
        [(0, OK), (1, says(left_s=0.5)), (1.4, OK), (1.5, OK)],
        [U, X, X, P],
    ),
    "a-verdict-that-is-over-is-none": ([(0, OK), (1, says(left_s=0.0)), (2, says())], [U, U, U]),
    "an-older-verdict-that-comes-late": ([(0, OK), (1, says(number=3)), (6, OK), (7, says())], [U, X, P, P]),
    "in-probation-too": ([(0, OK), (1, REFUSED), (2, OK), (3, says())], [U, B, P, X]),
    "before-the-first-probe-too": ([(0, says()), (1, OK), (5, OK)], [X, X, P]),
    "what-is-gone-is-not-merely-out": ([(0, OK), (1, REFUSED), (2, says())], [U, B, B]),
    "what-hangs-is-not-merely-out": (
        [(0, OK), (1, sample(5)), (31, sample(5)), (32, says())],
        [U, U, H, H],
    ),
    "an-engine-that-stops": ([(0, OK), (1, says(STOPS)), (2, OK), (3, REFUSED)], [U, D, D, B]),
    "an-engine-that-only-seemed-to-stop": ([(0, OK), (1, says(STOPS)), (60, OK), (61, OK)], [U, D, D, P]),
    "an-engine-that-seemed-to-stop-a-while-ago": (
        [(0, OK), (50, says(STOPS, left_s=10.0)), (59, OK), (60, OK)],
        [U, D, D, P],
    ),
    "a-new-process-ends-what-was-said-of-the-old-one": (
        [(0, OK), (1, sample(9)), (2, says(STOPS)), (3, sample(0, start=2e9)), (4, says(STOPS))],
        [U, U, D, P, P],
    ),
    "stopping-is-more-than-being-out": ([(0, OK), (1, says()), (2, says(STOPS, number=2))], [U, X, D]),
    "being-out-is-less-than-stopping": ([(0, OK), (1, says(STOPS)), (2, says(number=2))], [U, D, D]),
    "what-is-gone-does-not-stop": ([(0, OK), (1, REFUSED), (2, says(STOPS)), (102, OK)], [U, B, B, P]),
    "one-that-only-seemed-to-stop-is-tried-again-by-ones-own-rules": (
        [(0, OK), (10, says(STOPS, left_s=900.0)), (69, OK), (70, OK)],
        [U, D, D, P],
    ),
    "one-failure-more-than-successes-is-one": (
        [(0, OK), (1, PeerAttempts(4, 5)), (1, FAILED), (1, PeerAttempts(4, 5))],
        [U, U, U, X],
    ),
    "one-success-more-than-failures-forgives-one": (
        [(0, OK), (1, PeerAttempts(0, 2)), (1, PeerAttempts(5, 4)), (2, FAILED), (2, FAILED)],
        [U, U, U, U, X],
    ),
    "failures-here-and-there-add-up": ([(0, OK), (1, FAILED), (2, PeerAttempts(0, 2))], [U, U, X]),
    "and-in-the-other-order": ([(0, OK), (1, PeerAttempts(0, 2)), (2, FAILED)], [U, U, X]),
    "successes-there-forgive-failures-here": (
        [(0, OK), (1, FAILED), (1, PeerAttempts(0, 1)), (2, PeerAttempts(1, 0)), (3, FAILED), (4, FAILED)],
        [U, U, U, U, U, X],
    ),
    "but-not-all-of-them": (
        [(0, OK), (1, FAILED), (2, FAILED), (3, PeerAttempts(900, 0)), (4, FAILED)],
        [U, U, U, U, X],
    ),
    "unless-there-are-successes-here-too": (
        [(0, OK), (1, FAILED), (2, FAILED), (3, PeerAttempts(900, 0)), (4, SERVED), (5, FAILED), (6, FAILED)],
        [U, U, U, U, U, U, X],
    ),
    "or-they-are-far-apart": (
        [(0, OK), (1, FAILED), (2, FAILED), (3, PeerAttempts(900, 0)), (62, FAILED), (63, FAILED)],
        [U, U, U, U, U, U],
    ),
    "what-fails-from-here-alone-comes-back-and-is-tried-again": (
        [
            (0, OK),
            *fails_here_alone(1),
            (6, OK),
            (7, SERVED_THERE),
            *fails_here_alone(8),
            (17, OK),
            (18, OK),
        ],
        [U, U, U, U, X, P, U, U, U, U, X, X, P],
    ),
    "failures-among-successes-are-forgiven": ([(0, OK), *[(1.0, PeerAttempts(90, 3))] * 3], [U] * 4),
    "failures-a-minute-apart-do-not-add-up": (
        [(0, OK), (1, PeerAttempts(0, 2)), (62, FAILED), (63, FAILED), (64, FAILED)],
        [U, U, U, U, X],
    ),
    "successes-there-end-probation-here": (
        [(0, OK), (1, REFUSED), (2, OK), (3, SERVED), (4, PeerAttempts(2, 0))],
        [U, B, P, P, U],
    ),
    "success-with-failure-does-not": (
        [(0, OK), (1, REFUSED), (2, OK), (3, PeerAttempts(9, 1)), (4, PeerAttempts(0, 0))],
        [U, B, P, P, P],
    ),
    "what-is-out-is-not-judged-by-what-was-in-flight": (
        [(0, OK), (1, says()), (2, PeerAttempts(0, 9)), (6, OK)],
        [U, X, X, P],
    ),
}


@pytest.mark.parametrize(("script", "expected"), SCRIPTS.values(), ids=SCRIPTS.keys())
def test_a_script_of_events_leads_to_these_states(
    script: list[tuple[float, Event]], expected: list[str]
) -> None:
    assert [status.state.value for status in play(*script)] == expected


def test_an_operator_is_told_who_found_it() -> None:
    status = play((0, OK), (1, says(by="host-ab12")))[-1]

    assert status.reason == status.last_error == "seen by host-ab12: 3 requests failed"


TOLD: dict[str, tuple[list[tuple[float, Event]], Verdict | None]] = {
    "nothing-to-tell": ([(0, OK), (3, FAILED)], None),
    "requests-failed": (
        [(0, OK), (1, FAILED), (1, FAILED), (1, FAILED), (3, OK)],
        Verdict(1, State.EJECTED, "3 failures, the last: failed: status 500; out for at least 5 s", 3, 1),
    ),
    "a-request-failed-in-probation": (
        [(0, OK), (1, REFUSED), (2, OK), (3, FAILED)],
        Verdict(1, State.EJECTED, "failed in probation: failed: status 500; out for at least 5 s", 5, 1),
    ),
    "it-said-it-was-stopping": (
        [(0, OK), (1, STOPPING), (11, OK)],
        Verdict(1, State.DRAINING, "the engine is stopping: cannot schedule new futures", 50),
    ),
    "a-second-verdict": (
        [(0, OK), *[(1, FAILED)] * 3, (6, OK), (7, FAILED)],
        Verdict(2, State.EJECTED, "failed in probation: failed: status 500; out for at least 10 s", 10, 2),
    ),
    "failures-that-added-up": (
        [(0, OK), (1, FAILED), (1, PeerAttempts(0, 2))],
        Verdict(
            1, State.EJECTED, "3 failures, some of them through other gateways; out for at least 5 s", 5, 1
        ),
    ),
    "requests-failed-from-here-alone": (
        [(0, OK), *fails_here_alone(1)],
        None,
    ),
    "one-more-from-here-alone-in-probation": (
        [(0, OK), *fails_here_alone(1), (6, OK), (7, FAILED)],
        None,
    ),
    "a-verdict-is-told-again-once-it-was-up": (
        [
            (0, OK),
            *fails_here_alone(1),
            (6, OK),
            *[(7, SERVED)] * 3,
            (8, REFUSED),
            (9, OK),
            (9, FAILED),
        ],
        Verdict(1, State.EJECTED, "failed in probation: failed: status 500; out for at least 10 s", 10, 2),
    ),
    "its-penalty-is-over": ([(0, OK), *[(1, FAILED)] * 3, (6, SLOW)], None),
    "it-was-readmitted": ([(0, OK), *[(1, FAILED)] * 3, (6, OK)], None),
    "it-is-gone": ([(0, OK), *[(1, FAILED)] * 3, (2, REFUSED)], None),
    "every-gateway-s-probes-see-it": ([(0, OK), (1, SLOW), (2, SLOW), (3, SLOW)], None),
    "every-gateway-s-probes-see-what-cannot-be-reached": (
        [(0, OK), *[(1, Attempt(Outcome.UNREACHABLE))] * 3],
        None,
    ),
    "this-gateway-s-key-may-be-the-wrong-one": (
        [(0, OK), *[(1, Attempt(Outcome.MISCONFIGURED, "status 401"))] * 3],
        None,
    ),
    "what-was-heard-is-not-passed-on": ([(0, OK), (1, says())], None),
    "what-was-heard-of-stopping-is-not-passed-on": ([(0, OK), (1, says(STOPS))], None),
}


@pytest.mark.parametrize(("script", "expected"), TOLD.values(), ids=TOLD.keys())
def test_only_verdicts_of_ones_own_are_told(
    script: list[tuple[float, Event]], expected: Verdict | None
) -> None:
    assert verdict(play(*script)[-1], script[-1][0], RULES) == expected


def test_an_operator_is_told_that_it_fails_from_here_only() -> None:
    status = play((0, OK), *fails_here_alone(1))[-1]

    assert status.reason == (
        "3 failures from here, though it serves other gateways; the last: failed: status 500; "
        "out for at least 5 s"
    )


def test_two_gateways_that_tell_each_other_everything_come_to_rest() -> None:
    here = play((0, OK), *[(1, FAILED)] * 3)[-1]
    there = play((0, OK))[-1]
    told = []
    for now in range(1, 30):
        of_here, of_there = verdict(here, now, RULES), verdict(there, now, RULES)
        told.append((of_here is not None, of_there is not None))
        for of, by in ((of_here, "here"), (of_there, "there")):
            if of is not None:
                here = advance(here, PeerVerdict(by, of), now, RULES) if by == "there" else here
                there = advance(there, PeerVerdict(by, of), now, RULES) if by == "here" else there
        here, there = advance(here, OK, now, RULES), advance(there, OK, now, RULES)

    assert told == [(True, False)] * 5 + [(False, False)] * 24
    assert (here.state, there.state) == (State.PROBATION, State.PROBATION)


def test_the_longer_of_two_penalties_counts_and_the_next_one_doubles_it() -> None:
    status = play((0, OK), *[(1, FAILED)] * 3, (2, says(left_s=20.0, ejections=3)), (22, OK), (23, FAILED))

    assert status[4].ejected_until == 22.0
    assert status[-1].ejected_until - 23 == 40.0


def test_a_first_penalty_elsewhere_counts_for_the_next_one_here() -> None:
    status = play((0, OK), (2, says(left_s=20.0, ejections=3)), (22, OK), (23, FAILED))[-1]
    assert (status.ejections, status.ejected_until) == (4, 63.0)
    status = play((0, OK), *[(1, FAILED)] * 3, (2, says(left_s=4.0, ejections=0)))[-1]
    assert status.ejections == 1


def test_what_is_said_of_a_backend_that_is_out_is_heard_and_changes_nothing() -> None:
    out = BackendStatus(state=State.OUT, was_up=True)
    for what in (OUT, STOPS):
        heard = advance(out, says(what), 1.0, RULES)
        assert (heard.state, heard.heard) == (State.OUT, (("other", 1),))
        assert advance(replace(heard, state=State.UP), says(what), 2.0, RULES).state is State.UP


def test_a_shorter_penalty_elsewhere_shortens_none() -> None:
    assert play((0, OK), *[(1, FAILED)] * 3, (2, says(left_s=1.0)))[-1].ejected_until == 6.0


def test_no_gateway_can_keep_a_backend_out_for_longer_than_the_longest_penalty() -> None:
    assert play((0, OK), (1, says(left_s=1e9)))[-1].ejected_until == 1 + RULES.penalty_max_s


def test_only_requests_that_other_gateways_cannot_judge_by_themselves_are_counted() -> None:
    status = play(
        (0, OK),
        (1, SERVED),
        (1, FAILED),
        (1, Attempt(Outcome.TIMEOUT)),
        (1, SERVED),
        *[(1.0, Attempt(outcome)) for outcome in (Outcome.REJECTED, Outcome.BUSY, Outcome.CANCELLED)],
        (1, Attempt(Outcome.UNREACHABLE)),
        (1, PeerAttempts(50, 1)),
    )[-1]

    assert (status.served, status.failed) == (2, 2)


def test_failures_after_it_is_out_are_not_counted() -> None:
    late = Attempt(Outcome.FAILED, "HTTP 500", 0.5)  # sent before that
    assert play((0, OK), *[(1, FAILED)] * 3, *[(2, late)] * 6)[-1].failed == 3


def test_gateways_heard_of_are_remembered_up_to_a_bound() -> None:
    status = BackendStatus()
    for number in range(2 * HEARD_MAX):
        status = advance(status, says(by=f"gateway-{number}", left_s=0.0), 0.0, RULES)

    assert len(status.heard) == HEARD_MAX
    assert status.heard[-1] == (f"gateway-{2 * HEARD_MAX - 1}", 1)
