"""How what several gateways say adds up: in any order, however often it is said."""

from collections.abc import Mapping

import pytest

from gateway.core.class_counts import TextKind
from gateway.core.facts import (
    STARTED_IDLE_S,
    STARTED_MAX,
    Learned,
    Ratio,
    StartedTokens,
    increases,
    least,
    pooled,
    summed,
)

LATIN, CYRILLIC = TextKind.LATIN, TextKind.CYRILLIC


def learned(answers: int, mean_log: float, p99_tokens: int = 0) -> Learned:
    return Learned({LATIN: Ratio(answers, mean_log)}, p99_tokens)


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([], Learned()),
        ([learned(100, 0.25)], learned(100, 0.25)),
        ([learned(100, 0.25), Learned()], learned(100, 0.25)),
        ([learned(150, 0.25), learned(50, -0.25)], learned(200, 0.125)),
        ([learned(0, 0.25)], Learned()),
        ([learned(8, 0.25, 30), learned(8, 0.25, 90), learned(8, 0.25, 20)], learned(24, 0.25, 90)),
        (
            [learned(8, 0.25), Learned({CYRILLIC: Ratio(4, -0.125)})],
            Learned({LATIN: Ratio(8, 0.25), CYRILLIC: Ratio(4, -0.125)}),
        ),
    ],
    ids=[
        "nobody",
        "one",
        "one-who-knows-nothing",
        "by-answers",
        "no-answers",
        "largest-margin",
        "kinds-apart",
    ],
)
def test_what_several_have_learned(parts: list[Learned], expected: Learned) -> None:
    assert pooled(parts) == expected
    assert pooled(reversed(parts)) == expected


def test_counts_are_added_up() -> None:
    assert summed([{"a": 1, "b": 2}, {}, {"b": 3}]) == {"a": 1, "b": 5}


def test_of_several_counts_the_lowest_is_known() -> None:
    assert least([{"a": 1, "b": 3}, {}, {"b": 2}, {"b": 4}]) == {"a": 1, "b": 2}


@pytest.mark.parametrize(
    ("before", "now", "grown"),
    [
        (None, {"a": 10**9}, {}),
        ({}, {"a": 5}, {"a": 5}),
        ({"a": 5}, {"a": 5}, {}),
        ({"a": 5}, {"a": 12}, {"a": 7}),
        ({"a": 5}, {"a": 2}, {"a": 2}),
        ({"a": 5}, {"a": 0}, {}),
        ({"a": 5}, {}, {}),
        ({"a": 5}, {"a": 6, "b": 1}, {"a": 1, "b": 1}),
    ],
    ids=["never-seen", "first", "repeated", "more", "began-again", "at-nothing", "left-out", "another"],
)
def test_by_how_much_counters_have_grown(
    before: Mapping[str, int] | None, now: Mapping[str, int], grown: Mapping[str, int]
) -> None:
    assert increases(before, now) == grown


def test_starts_are_counted_per_flow_until_they_are_idle() -> None:
    started, chat, other = StartedTokens(), ("gemma", "chat", "a"), ("gemma", "chat", None)
    started.add(chat, 100, now=0.0)
    started.add(other, 5, now=1.0)
    started.add(chat, 20, now=2.0)

    assert started.totals(2.0) == {chat: 120, other: 5}
    assert started.totals(1.0 + STARTED_IDLE_S) == {chat: 120}
    assert started.totals(2.0 + STARTED_IDLE_S) == {}
    started.add(chat, 1, now=400.0)
    assert started.totals(400.0) == {chat: 1}


def test_so_many_flows_and_no_more_are_counted() -> None:
    started = StartedTokens()
    for number in range(2 * STARTED_MAX):
        started.add(("gemma", "chat", "steady"), 1, now=number)
        started.add(("gemma", "chat", f"key-{number}"), 1, now=number)

    totals = started.totals(2.0 * STARTED_MAX)
    assert len(totals) == STARTED_MAX
    assert totals["gemma", "chat", "steady"] == 2 * STARTED_MAX
