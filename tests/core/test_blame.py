"""Which failures count against a backend."""

from dataclasses import replace

import pytest
from support.world import POLICY

from gateway.core.blame import (
    IN_A_ROW,
    KNOWN_MAX,
    PAUSE_S,
    REPEATED_S,
    ROW_MAX,
    Blame,
    Doubts,
)

LIGHT_0 = POLICY.backends["light-0"]
BACKENDS = {**POLICY.backends, "gone": replace(LIGHT_0, id="gone")}


def test_a_request_counts_once_per_backend_until_it_is_forgotten() -> None:
    blame = Blame()
    asked = [
        ("a", b"1", 0.0, True),
        ("a", b"1", 1.0, False),
        ("b", b"1", 1.0, True),
        ("a", b"2", 2.0, True),
        ("a", b"1", REPEATED_S - 0.1, False),
        ("a", b"1", REPEATED_S, True),
        ("a", b"2", REPEATED_S, False),
    ]
    assert [blame.count(backend, request, now) for backend, request, now, _ in asked] == [
        is_new for *_, is_new in asked
    ]


def test_what_is_remembered_has_a_bound() -> None:
    blame = Blame()
    for number in range(KNOWN_MAX + 1):
        assert blame.count("a", str(number).encode(), 0.0)
    assert blame.count("a", b"0", 0.0)
    assert not blame.count("a", b"2", 0.0)


def doubts(*failures: tuple[str, str, float]) -> Doubts:
    """Return what is doubted after failures of a backend, by a request, at a time."""
    made = Doubts()
    for backend, request, now in failures:
        made.failed(BACKENDS[backend], request.encode(), now)
    return made


def in_a_row(backend: str, *, at: float = 100.0) -> list[tuple[str, str, float]]:
    return [(backend, f"{number}", at) for number in range(IN_A_ROW)]


@pytest.mark.parametrize(
    ("failures", "now", "passed_over"),
    [
        pytest.param(in_a_row("light-0"), 100.0, {"light-0": True}, id="in-a-row"),
        pytest.param(in_a_row("light-0")[1:], 100.0, {}, id="too-few"),
        pytest.param([("light-0", "1", 100.0)] * 9, 100.0, {}, id="of-one-request"),
        pytest.param(in_a_row("light-0"), 100.0 + PAUSE_S - 0.1, {"light-0": True}, id="in-the-pause"),
        pytest.param(in_a_row("light-0"), 100.0 + PAUSE_S, {"light-0": False}, id="after-the-pause"),
        pytest.param(in_a_row("light-0"), 100.0 + REPEATED_S, {}, id="long-ago"),
        pytest.param(in_a_row("light-0") + in_a_row("light-1"), 100.0, {}, id="all-replicas"),
        pytest.param(in_a_row("push"), 100.0, {}, id="without-a-replica"),
        pytest.param(in_a_row("gone"), 100.0, {}, id="no-longer-there"),
        pytest.param(
            [*in_a_row("light-0", at=30.0), ("light-0", "x", 30.0 + REPEATED_S)], 91.0, {}, id="a-new-row"
        ),
    ],
)
def test_where_other_replicas_are_preferred(
    failures: list[tuple[str, str, float]], now: float, passed_over: dict[str, bool]
) -> None:
    assert doubts(*failures).passed_over(POLICY, lambda _: True, now) == passed_over


def test_a_replica_that_is_out_is_not_preferred() -> None:
    made = doubts(*in_a_row("light-0"))
    assert made.passed_over(POLICY, {"light-0", "push"}.__contains__, 100.0) == {}
    assert made.passed_over(POLICY, {"light-1"}.__contains__, 100.0) == {"light-0": True}


def test_an_answer_ends_a_doubt() -> None:
    made = doubts(*in_a_row("light-0"))
    assert made.answered(LIGHT_0)
    assert not made.answered(BACKENDS["light-1"])
    assert not made.rows
    assert not made.failed(LIGHT_0, b"x", 100.0)
    assert not made.answered(LIGHT_0)  # there was none yet


@pytest.mark.parametrize(
    ("failures", "now", "lasted_s"),
    [
        pytest.param([*in_a_row("light-0"), ("light-0", "x", 107.0)], 108.0, 8.0, id="since-the-first"),
        pytest.param(in_a_row("light-0")[1:], 108.0, None, id="too-few"),
        pytest.param([("light-0", "1", 100.0)] * 9, 108.0, None, id="of-one-request"),
        pytest.param(in_a_row("light-0"), 100.0 + REPEATED_S, None, id="long-ago"),
        pytest.param(in_a_row("light-1"), 108.0, None, id="on-another"),
    ],
)
def test_how_long_all_have_failed_on_one_in_doubt(
    failures: list[tuple[str, str, float]], now: float, lasted_s: float | None
) -> None:
    made = doubts(*failures)
    assert made.lasted_s(LIGHT_0, now) == lasted_s
    made.answered(LIGHT_0)
    assert made.lasted_s(LIGHT_0, now) is None


def test_what_is_remembered_of_a_row_has_a_bound() -> None:
    made = doubts(*(("light-0", f"{number}", 100.0) for number in range(ROW_MAX + 5)))
    assert len(made.rows["light-0", LIGHT_0.url].requests) == ROW_MAX
    assert made.failed(LIGHT_0, b"another", 100.0)


def test_doubts_of_backends_that_are_gone_are_forgotten() -> None:
    made = doubts(*in_a_row("gone"))
    made.passed_over(POLICY, lambda _: True, 100.0)
    assert not made.rows


def test_a_server_is_in_no_doubt_for_what_the_one_at_the_former_url_did() -> None:
    moved = replace(LIGHT_0, url="http://elsewhere")
    policy = replace(POLICY, backends={**POLICY.backends, "light-0": moved})
    made = doubts(*in_a_row("light-0"))
    assert not made.passed_over(policy, lambda _: True, 100.0)
    # What has begun at the former one ends there, late.
    made.failed(LIGHT_0, b"late", 101.0)
    for request in (b"a", b"b"):
        assert not made.failed(moved, request, 102.0)
    made.answered(LIGHT_0)
    assert made.failed(moved, b"c", 103.0)
    assert made.passed_over(policy, lambda _: True, 103.0) == {"light-0": True}
