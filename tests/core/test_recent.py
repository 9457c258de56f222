"""The last minutes: percentiles within their bins, flows, and what is forgotten."""

import random
from dataclasses import replace

import pytest
from support.rankings import ranking_of

from gateway.core.decision import Decision
from gateway.core.load import Demand
from gateway.core.recent import (
    FLOW_SLICES,
    SLICE_S,
    SLICES,
    SPAN_SLICES,
    DurationHistogram,
    Flow,
    Recent,
    quantiles,
)
from gateway.core.request import CountMode, Estimate
from gateway.core.usage import Ending, RequestRecord, Usage

DECISION = Decision(
    model="gemma-4",
    traffic_class="chat",
    class_reason="",
    pools=("light",),
    estimate=Estimate(10, 12, CountMode.EXACT),
    demand=Demand(seqs=1, prompt_tokens=10, total_tokens=110),
    candidates=ranking_of(),
)


def record(ended_at: float, *, ttft_s: float | None = 0.5, **fields: object) -> RequestRecord:
    """Return a stream on `light` that took a second after its first token."""
    received_at = ended_at - 1.0 - (ttft_s or 0.0)
    found = RequestRecord(
        id="req",
        model="gemma-4",
        stream=True,
        ending=Ending.COMPLETED,
        status=200,
        error_code="",
        key=None,
        wall_at=0.0,
        received_at=received_at,
        ended_at=ended_at,
        first_byte_at=None if ttft_s is None else received_at + ttft_s,
        decision=DECISION,
        backend="light",
        pool="light",
        usage=Usage(10, 11),
    )
    return replace(found, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("scale", [0.0005, 0.02, 1.0, 300.0])
def test_a_quantile_is_off_by_half_a_bin_at_most(scale: float) -> None:
    dice = random.Random(1)
    values = sorted(scale * dice.lognormvariate(0, 1) for _ in range(2001))
    spread = DurationHistogram()
    for value in values:
        spread.add(value)

    for share, found in zip((0.5, 0.95), quantiles([spread]) or (), strict=True):
        exact = values[int(share * 2000)]
        assert found / exact == pytest.approx(1.0, abs=0.046)


def test_there_are_few_bins_whatever_comes() -> None:
    spread = DurationHistogram()
    for power in range(-40, 40):
        for step in range(50):
            spread.add(2.0**power * (1 + step / 50))
    spread.add(0.0)

    assert len(spread._bins) <= 241
    assert sum(spread._bins.values()) == 4001
    assert quantiles([DurationHistogram()]) is None


def test_a_point_speaks_for_the_last_slices() -> None:
    recent = Recent()
    recent.note(record(1000.0, ttft_s=0.1))
    recent.note(record(1000.0 + SLICE_S, ttft_s=4.0))
    lines = recent.history(1000.0 + SLICE_S).lines["light"]

    assert len(lines.ttft_p50) == SLICES
    assert lines.ttft_p50[-3] is None
    assert lines.ttft_p95[-2] == pytest.approx(0.1, rel=0.05)
    assert lines.ttft_p95[-1] == pytest.approx(4.0, rel=0.05)
    assert lines.tpot_p50[-1] == pytest.approx(0.1, rel=0.05)
    later = recent.history(1000.0 + SPAN_SLICES * SLICE_S).lines["light"]
    assert later.ttft_p50[-1] == pytest.approx(4.0, rel=0.05)  # only the second


def test_what_is_old_is_forgotten() -> None:
    recent = Recent()
    recent.note(record(1000.0))
    assert recent.history(1000.0 + (SLICES - 1) * SLICE_S).lines
    assert not recent.history(1000.0 + SLICES * SLICE_S).lines
    for minute in range(100):
        recent.note(record(5000.0 + 60 * minute))
    assert len(recent._slices) == SLICES


@pytest.mark.parametrize(
    "what",
    [
        record(1000.0, stream=False),
        record(1000.0, ttft_s=None),
        record(1000.0, backend=""),
    ],
    ids=["not streamed", "no token", "not served"],
)
def test_what_has_no_first_token_of_its_own_has_no_line_but_flows(what: RequestRecord) -> None:
    recent = Recent()
    recent.note(what)
    history = recent.history(1000.0)

    assert history.lines == {}
    assert [count for _, count in history.flows] == [1]


def test_flows_are_counted_by_class_backend_and_ending() -> None:
    recent = Recent()
    for _ in range(3):
        recent.note(record(1000.0))
    recent.note(record(1000.0, backend="", ending=Ending.SHED))
    recent.note(record(1000.0, backend="", ending=Ending.REJECTED, decision=None, model="whatever one sends"))

    assert dict(recent.history(1000.0).flows) == {
        Flow("gemma-4", "chat", "light", Ending.COMPLETED): 3,
        Flow("gemma-4", "chat", "", Ending.SHED): 1,
        Flow("", "", "", Ending.REJECTED): 1,
    }
    assert recent.history(1000.0 + FLOW_SLICES * SLICE_S).flows == []


def test_what_is_kept_is_bounded_though_nobody_looks() -> None:
    recent = Recent()
    for number in range(5 * SLICES):
        recent.note(record(1000.0 + number * SLICE_S))
    assert len(recent._points) <= SLICES
    lines = recent.history(1000.0 + (5 * SLICES - 1) * SLICE_S).lines["light"]
    assert None not in lines.ttft_p50
