"""What the overhead benchmark concludes from its figures. Its measuring is tried by running it."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.overhead import clocked, scenarios, vocabulary
from benchmarks.overhead.machine import Used, between, named
from benchmarks.overhead.verdict import (
    Count,
    Measured,
    Run,
    gate,
    goals_table,
    others_table,
    rows,
    throughput_table,
    workers_table,
)
from gateway.core.request import CountMode
from gateway.tokenizer import build, count_text, load


def result(cpu_s: float = 0.0, good: int = 1000, chunks: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "seconds": 2.0,
        "cpu_s": cpu_s,
        "counted_s": 0.0,
        "at_rest_s": 0.0,
        "good": good,
        "chunks": chunks,
        "resident_mb": 100.0,
        **more,
    }


def large(cpu_s: float) -> dict[str, Any]:
    """Return a hundred documents of which the counts took 3 s, and what goes on anyway 0.1 s."""
    return result(cpu_s, good=100, counted_s=3.0, at_rest_s=0.1)


def streams(
    cpu_s: float, count: int, delivered: float, p99_ms: float, p50_ms: float = 0.1, **more: Any
) -> dict[str, Any]:
    delay_us = {"p50": p50_ms * 1000, "p99": p99_ms * 1000}
    return result(cpu_s, chunks=round(80 * count * delivered), delay_us=delay_us, **more)


def latency(p50_us: float) -> dict[str, Any]:
    return result(latency_us={"p50": p50_us})


def gap(idle_ms: float, disturbed_ms: float) -> dict[str, Any]:
    return result(
        gap_us={"p99": idle_ms * 1000}, disturbed=result(gap_us={"p99": disturbed_ms * 1000}, bodies=40)
    )


def good_gateway() -> dict[str, dict[str, Any]]:
    return {
        "short": result(0.050),
        "latency": latency(500.0),
        "each": result(reads=100, single_reads=100),
        "streams-256": streams(0.5, 256, 1.0, 1.0),
        "streams-512": streams(0.8, 512, 0.99, 4.0),
        "streams-1024": streams(1.2, 1024, 0.99, 9.0, resident_mb=170.0),
        "large": large(3.2),
        "gap": gap(25.0, 29.0),
    }


def nginx() -> dict[str, dict[str, Any]]:
    return {
        "short": result(0.015),
        "streams-256": streams(0.45, 256, 1.0, 1.0),
        "large": result(0.1, good=100),
    }


def measured(**changed: Any) -> dict[str, Any]:
    """Return a gateway that reaches every aim, changed, beside nginx, vLLM's router and the engine itself."""
    count = Count(us=30_000, tokens=235_000, vocabulary_mb=100)
    runs = [
        Run("gateway", 0, good_gateway() | changed),
        Run("nginx", 0, nginx()),
        Run("vllm-router", 0, {"short": result(0.060)}),
        Run("direct", 0, {"latency": latency(200.0)}),
    ]
    return {
        run.target: Measured(runs, run.target, count if run.target == "gateway" else None) for run in runs
    }


def verdicts(found: Mapping[str, Any]) -> list[str]:
    return [row.verdict for row in rows(found)]


def test_who_reaches_every_aim_is_told_so() -> None:
    assert verdicts(measured()) == ["aim"] * 9


@pytest.mark.parametrize(
    ("changed", "line", "verdict"),
    [
        ({"streams-256": streams(0.59, 256, 1.0, 1.0)}, 0, "must"),
        ({"streams-256": streams(0.62, 256, 1.0, 1.0)}, 0, "missed"),
        ({"short": result(0.061)}, 1, "must"),  # 1.02 times vLLM's router
        ({"short": result(0.119)}, 1, "must"),
        ({"short": result(0.121)}, 1, "missed"),
        ({"large": large(3.29)}, 2, "must"),
        ({"large": large(3.31)}, 2, "missed"),
        ({"streams-512": streams(0.8, 512, 0.97, 4.0)}, 3, "missed"),
        ({"streams-512": streams(0.8, 512, 0.99, 5.1)}, 3, "missed"),
        ({"streams-1024": streams(0.8, 1024, 0.97, 4.0)}, 4, "missed"),
        ({"streams-1024": streams(0.8, 1024, 0.99, 10.1)}, 4, "missed"),
        ({"latency": latency(790.0)}, 5, "must"),
        ({"latency": latency(810.0)}, 5, "missed"),
        ({"gap": gap(25.0, 49.0)}, 6, "must"),
        ({"gap": gap(25.0, 51.0)}, 6, "missed"),
        ({"each": result(reads=100, single_reads=99)}, 7, "missed"),
        ({"streams-1024": streams(1.2, 1024, 0.99, 9.0, resident_mb=249.0)}, 8, "must"),
        ({"streams-1024": streams(1.2, 1024, 0.99, 9.0, resident_mb=251.0)}, 8, "missed"),
        ({"short": result(0.05, good=0)}, 1, "-"),
    ],
)
def test_each_goal_is_judged_by_its_own_figure(changed: Any, line: int, verdict: str) -> None:
    expected = ["aim"] * 9
    expected[line] = verdict

    assert verdicts(measured(**changed)) == expected


def test_where_a_router_is_not_installed_nginx_alone_is_the_measure() -> None:
    found = measured(short=result(0.061))
    del found["vllm-router"]

    assert verdicts(found)[1] == "must"  # 4.07 times nginx


def test_the_best_round_counts() -> None:
    slow, fast = good_gateway(), good_gateway() | {"short": result(0.040)}
    slow["streams-512"] = streams(0.8, 512, 0.97, 1.0)
    slow["gap"], fast["gap"] = gap(40.0, 32.0), gap(25.0, 60.0)
    one = Measured([Run("gateway", 0, slow), Run("gateway", 1, fast), Run("nginx", 0, nginx())], "gateway")

    assert one.cpu_us("short") == pytest.approx(40)
    held = one.streams(512)
    assert one.gap_above_idle_ms() == pytest.approx(7)
    assert held is not None
    assert held.delay_p99_ms == 4.0  # the shorter delay was of a round that lost chunks


def test_chunks_are_cheap_where_they_come_in_heaps_so_the_calmest_round_counts_for_their_cpu() -> None:
    held_up = {"streams-256": streams(0.2, 256, 1.0, 90.0, p50_ms=25.0)}
    calm = {"streams-256": streams(0.4096, 256, 1.0, 3.0, p50_ms=0.07)}
    one = Measured([Run("nginx", 0, held_up), Run("nginx", 1, calm)], "nginx")

    assert one.cpu_us("streams-256") == pytest.approx(20)


def test_the_table_has_what_was_measured_and_no_more() -> None:
    runs = [Run("gateway", 0, {"short": result(0.050)}), Run("nginx", 0, {"short": result(0.010)})]
    lines = goals_table({name: Measured(runs, name) for name in ("gateway", "nginx")})

    assert lines[0] == "| measure | must | aim | gateway | reached | nginx |"
    assert lines[2:] == [
        "| CPU per short request, 32 connections | 8 x nginx, 2 x vllm-router | 4 x nginx, 1 x vllm-router "
        "| 50.0 us, 5.00 x nginx | must | 10.0 us |"
    ]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, []),
        (
            {"short": result(0.451)},
            [
                "A short request costs the gateway 451 us of CPU, 30.07 times nginx's 15.0 us; "
                "at most 30 times is allowed."
            ],
        ),
        ({"short": result(0.449)}, []),
        (
            {"streams-256": streams(1.12, 256, 1.0, 1.0)},
            [
                "A streamed chunk costs the gateway 54.7 us of CPU, 2.49 times nginx's 22.0 us; "
                "at most 2.4 times is allowed."
            ],
        ),
        (
            {"large": large(5.6)},
            [
                "A request of 1 MB beyond its token count costs the gateway 25,000 us of CPU, 25.00 times "
                "nginx's 1,000 us; at most 24 times is allowed."
            ],
        ),
        (
            {"short": result(0.05, good=0)},
            ["What a short request costs could not be compared: the gateway or nginx was not measured."],
        ),
    ],
)
def test_the_gate_says_what_exceeds_it(changed: Any, said: list[str]) -> None:
    assert gate(measured(**changed)) == said


def test_who_answers_nothing_has_no_figures() -> None:
    nothing = {
        "short": result(0.5, good=0),
        "latency": latency(-1.0),
        "each": result(reads=0, single_reads=0),
        "streams-256": streams(0.5, 256, 0.0, -0.001, -0.001),
        "streams-512": streams(0.5, 512, 0.0, -0.001, -0.001),
        "streams-1024": streams(0.5, 1024, 0.0, -0.001, -0.001),
        "large": result(0.5, good=0),
        "gap": gap(-0.001, -0.001),
    }
    lines = goals_table(measured(**nothing))[2:]

    assert {line.split("|")[4].strip() for line in lines} == {"", "0.00 MB"}
    assert throughput_table(measured(**nothing))[2] == "| gateway |  |  |  |  |  |  |"


def test_other_long_requests_are_compared_where_they_were_measured() -> None:
    found = measured(
        agent=result(0.4, counted_s=0.1, at_rest_s=0.1), image=result(0.3, counted_s=0, at_rest_s=0)
    )

    assert others_table(measured()) == []
    assert others_table(found)[2] == "| gateway | 200 us | 300 us |"


def test_what_went_wrong_is_said() -> None:
    found = measured(short=result(0.05, bad=3, broken=0), gap=gap(25, 26) | {"left_behind": 2})

    assert found["gateway"].unclean() == ["short: 3 bad", "gap: 2 left behind"]


def test_what_a_unit_costs_with_several_processes_and_who_did_it() -> None:
    processes = [
        ["gateway.worker 0", 0.6],
        ["gateway.worker 1", 0.5],
        ["valkey-server", 0.1],
        ["gateway", 0.0],
    ]
    other = [["gateway.worker 0", 0.4], ["gateway.worker 1", 0.5], ["valkey-server", 0.1]]
    runs = [
        Run("gateway", 0, {"paced": result(1.2, good=1000, processes=processes)}),
        Run("gateway", 1, {"paced": result(1.0, good=1000, processes=other)}),
    ]

    assert workers_table({2: Measured(runs, "gateway")})[2] == (
        "| 2 | short request | 1,000 us | gateway.worker 0 45 %, gateway.worker 1 45 %, valkey-server 9 % |"
    )


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["/x/bin/python", "-m", "gateway.worker", "1", ""], "gateway.worker 1"),
        (["/x/bin/python3", "-m", "gateway", "serve", "-c", "gateway.yaml"], "gateway"),
        (["/x/bin/python", "-I", "-S", "/x/store/embedded_watch.py", "/tmp/1"], "embedded_watch"),
        (["/x/valkey-server unixsocket:/tmp/valkey.sock", ""], "valkey-server"),
        (["nginx: worker process"], "nginx"),
        ([], ""),
    ],
)
def test_a_process_is_known_by_what_it_runs(words: list[str], name: str) -> None:
    assert named(words) == name


def test_cpu_of_threads_that_ended_is_not_lost() -> None:
    before = {1: Used(10.0, 10.0, "gateway"), 2: Used(5.0, 5.0, "worker")}
    after = {1: Used(10.512, 10.50, "gateway"), 2: Used(5.1, 6.0, "worker"), 3: Used(0.25, 0.25, "new")}

    assert between(before, after) == pytest.approx({1: 0.512, 2: 1.0, 3: 0.25})


def test_the_clock_runs_while_tokens_are_counted_and_at_no_other_time(tmp_path: Path) -> None:
    import tiktoken.core

    clock = clocked.made(tmp_path / "clock")
    engine = tiktoken.core._tiktoken.CoreBPE  # type: ignore[attr-defined]
    ranks, text = {bytes([one]): one for one in range(256)}, "The river was wide. " * 10_000
    try:
        clocked.put_around_counts(clock)
        encoding = tiktoken.Encoding("bytes", pat_str=r"\w+|\W+", mergeable_ranks=ranks, special_tokens={})
        assert clocked.read_s(clock) == 0
        before_s = time.thread_time()
        assert len(encoding.encode(text)) == len(text)
        counted_s = clocked.read_s(clock)
        assert 0 < counted_s < time.thread_time() - before_s
        assert encoding.decode_bytes([65, 66]) == b"AB"
        assert clocked.read_s(clock) == counted_s
    finally:
        tiktoken.core._tiktoken.CoreBPE = engine  # type: ignore[attr-defined]


def test_the_vocabulary_made_here_counts_english_as_gemmas_does(tmp_path: Path) -> None:
    vocabulary.write(tmp_path / "tokenizer.json")
    summary = build(tmp_path / "tokenizer.json", tmp_path / "made.tiktoken")
    text = vocabulary.prose()[:100_000]
    tokens, mode = count_text(load(tmp_path / "made.tiktoken"), text)

    assert summary.warnings == ()
    assert mode is CountMode.EXACT
    assert 3.8 < len(text) / tokens < 4.6
    for body in (scenarios.large(), scenarios.agent(), scenarios.image()):
        assert body.count(b"serial=00000000") == 1
    assert len(scenarios.large()) == pytest.approx(1_000_000, rel=0.05)
