"""The routing benchmark in small: in a few virtual minutes policies differ as they do in hours.

And over HTTP, for a few seconds: what it configures is what virtual time plays, and everybody is answered.
"""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from benchmarks import routing
from benchmarks.http_fleet import Engine, Meter, Run, above_knee, config_text, measure
from benchmarks.http_load import Heard, request_body
from benchmarks.routers import site
from benchmarks.scoring import Score, score
from benchmarks.traffic import Arrival, Kind
from benchmarks.virtual_fleet import Fate
from gateway import settings
from gateway.core.backends import Capacity, Gates, KneeStep
from gateway.core.class_counts import class_count_tokens
from gateway.simulator.template import render


@cache
def run(mix: str, load: float, policy: str) -> Score:
    return routing.run(mix, load, 7, policy, 300.0, reasoning=False)


def test_in_overload_the_gateway_serves_more_than_a_cap_and_that_more_than_nothing() -> None:
    gateway, capped, least = (run("A", 1.2, policy) for policy in ("gateway", "ctx-429", "ctx-least"))

    assert gateway.chat > capped.chat + 0.02
    assert capped.chat > least.chat + 0.2
    assert gateway.chat_ttft_p99_s < 2.5 < capped.chat_ttft_p99_s
    assert gateway.tokens_per_s > 0.95 * least.tokens_per_s


def test_nothing_is_sent_where_it_cannot_run_and_no_cap_is_passed() -> None:
    gateway, blind = run("A", 1.0, "gateway"), run("A", 1.0, "least-in-flight")

    assert (gateway.misfits, gateway.above_cap) == (0, 0)
    assert gateway.kv_max < 0.97
    assert gateway.long >= blind.long
    assert blind.misfits > 0


def test_a_lower_cap_buys_tpot() -> None:
    usual, tight = run("A", 1.0, "gateway"), run("A", 1.0, "gateway-40")

    assert tight.chat_tpot_s < usual.chat_tpot_s
    assert tight.chat_60ms > usual.chat_60ms


def test_documents_wait_about_as_long_as_they_are_told() -> None:
    times = routing.forecasts("C", 1.5, 7, 500.0)["long_document"]

    assert len(times) > 20
    assert 0.7 < median(times) < 1.5


# ------------------------------------------------------------------ over HTTP


def configured(folder: Path, speed: float) -> Any:
    """Return the policy that a gateway reads from the benchmark's configuration."""
    urls = {name: f"http://{name}" for name in site().backends}
    path = folder / f"{speed:g}.json"
    path.write_text(config_text(site(), urls, speed))
    return settings.load(path).policy()


def test_at_speed_1_the_gateway_is_configured_as_in_virtual_time(tmp_path: Path) -> None:
    virtual, real = site(), configured(tmp_path, 1)

    assert real.models == virtual.models
    for name, backend in virtual.backends.items():
        same = ("capacity", "perf", "batched_tokens", "tokens_per_s", "url")
        assert {key: getattr(real.backends[name], key) for key in same} == {
            key: getattr(backend, key) for key in same
        }
    for name, pool in virtual.pools.items():
        open_gates = Gates(long_prefills=1_000_000)
        gates = open_gates if pool.gates.long_prefills is None else pool.gates
        assert replace(real.pools[name], timeouts=pool.timeouts) == replace(pool, gates=gates)


def test_at_another_speed_everything_in_seconds_is_scaled(tmp_path: Path) -> None:
    real, fast = configured(tmp_path, 1), configured(tmp_path, 4)

    for name, backend in real.backends.items():
        for prompt in (100, 20_000):
            assert fast.backends[name].perf.prefill_s(prompt, 8192) == pytest.approx(
                backend.perf.prefill_s(prompt, 8192) / 4
            )
    for one, other in zip(real.models[0].classes, fast.models[0].classes, strict=True):
        waiting = one.waiting
        assert other.waiting == replace(
            waiting, max_wait_s=waiting.max_wait_s / 4, ttft_target_s=waiting.ttft_target_s / 4
        )
    assert fast.pools["light"].gates.prefill_s == 0.15
    assert fast.pools["push"].spill.prefill_s == 0.125
    assert fast.pools["push"].timeouts.first_byte_s == 150


@pytest.mark.parametrize(
    ("kind", "prompt_tokens", "estimate_tokens"),
    [("chat", 16, 16), ("chat", 900, 1000), ("long", 100_000, 88_000), ("reasoning", 2_000, 2_100)],
)
def test_a_prompt_is_as_long_as_planned_and_misjudged_as_planned(
    kind: str, prompt_tokens: int, estimate_tokens: int
) -> None:
    body = json.loads(request_body(Arrival(7, 0.0, Kind(kind), prompt_tokens, 5, estimate_tokens)))
    rendered = render(body["messages"], thinking="reasoning_effort" in body)
    text = body["messages"][0]["content"]
    around = render([{"role": "user", "content": ""}], thinking="reasoning_effort" in body).count()

    assert rendered.count() == prompt_tokens
    assert class_count_tokens(text) + around == pytest.approx(estimate_tokens, rel=0.002, abs=1)


def test_over_http_everybody_is_answered_and_nothing_is_sent_where_it_cannot_run() -> None:
    # Seed 203: some thirty chats, one short document, one job that is longer than the run.
    run = measure("C", 1.0, 203, duration_s=12, speed=5, warm_up_s=0)
    fates = {kind: [fate for fate in run.fates if fate.arrival.kind is kind] for kind in Kind}
    answered = [fate for fate in fates[Kind.CHAT] if fate.done_at is not None]

    assert run.heard.flaws == []
    assert run.heard.prompt_errors == 0
    assert all(fate.output_tokens == fate.arrival.output_tokens for fate in answered)
    assert len(answered) + sum(fate.refused == "429" for fate in fates[Kind.CHAT]) == len(fates[Kind.CHAT])
    assert len(answered) > len(fates[Kind.CHAT]) / 2  # a busy machine refuses some
    assert [fate.backend for fate in fates[Kind.LONG]] == ["push"]
    assert [(fate.backend, fate.is_undecided) for fate in fates[Kind.REASONING]] == [("tpu", True)]
    assert (run.score.misfits, run.score.above_cap) == (0, 0)
    assert 0 < run.score.kv_max < 0.97
    assert [engine.preemptions for engine in run.engines.values()] == [0] * 5
    assert run.meter.used.keys() in (set(), {"callers", "gateway", *run.engines})


def test_more_than_the_knee_of_the_prompts_at_hand_is_noticed_from_outside() -> None:
    def held(prompt_tokens: int, since: float, until: float) -> Fate:
        arrival = Arrival(0, since, Kind.CHAT, prompt_tokens, 100, prompt_tokens)
        return Fate(arrival, "light-0", sent_at=since, first_at=since, done_at=until)

    capacity = Capacity(32_768, (KneeStep(2_000, 4), KneeStep(None, 2)))
    full = [held(100, 0, 10), held(100, 1, 10), held(5_000, 2, 9)]

    assert above_knee(capacity, "light-0", full, 0.1) == 0
    assert above_knee(capacity, "light-0", [*full, held(100, 8.85, 12)], 0.1) == 0  # at the same moment
    assert above_knee(capacity, "light-0", [*full, held(100, 8, 12)], 0.1) == 1
    assert above_knee(capacity, "push", [*full, held(100, 8, 12)], 0.1) == 0


def test_a_run_on_a_machine_that_did_not_keep_up_is_not_believed() -> None:
    nothing = score([], tokens_per_s=0, misfits=0, above_cap=0, kv_max=0, seconds=0)
    engine = Engine(tokens=0, peak=0, kv_peak=0, preemptions=0, rejected_4xx=0, lag_peak_s=0.3, lost_s=0.3)
    clean = Run(nothing, (), Heard(lags_s=[0.001] * 100), {"push": engine}, Meter({}, seconds=100), speed=4)
    busy = Meter({}, used={"gateway": 0.9, "push": 0.1}, waited={"gateway": 0.01, "push": 0.2}, seconds=100)
    flawed = Heard(lags_s=[0.001] * 98 + [0.1] * 2, flaws=["chat 3 at 7.0 s: 502 upstream_error"])

    assert clean.doubts() == []
    assert replace(
        clean, heard=flawed, meter=busy, engines={"push": replace(engine, lost_s=0.6)}
    ).doubts() == [
        "arrivals late by 0.40 s (p99)",
        "gateway used 90% of a core",
        "push waited for a core 20% of the time",
        "push lost 0.6 s of the clock",
        "1 broken answers, the first: chat 3 at 7.0 s: 502 upstream_error",
    ]
