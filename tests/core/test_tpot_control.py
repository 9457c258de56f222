"""TPOT control: what the meter counts, and how the share of the knee follows from it."""

import dataclasses
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import knee as bench
from gateway.core.admission import WHOLE
from gateway.core.tpot_control import (
    DECIDE_S,
    NOTHING_SEEN,
    WINDOW_MAX_S,
    WINDOW_S,
    GapMeter,
    GapWindow,
    Move,
    TpotControl,
    TpotTarget,
    adjust,
)

SEQ = WHOLE // 64
TARGET = TpotTarget(tpot_s=0.05, seq_share=SEQ, floor_share=SEQ)
CHAT, REPORTS = (
    next(case for case in bench.CASES if case.name == name) for name in ("LIGHT chat", "LIGHT 4K/512")
)


# ------------------------------------------------------------------ the meter


def test_the_gap_is_the_mean_time_between_chunks_without_one_clock_per_chunk() -> None:
    meter = GapMeter(10.0)
    meter.opened(10.0, share=100)
    meter.opened(10.0, share=100)
    meter.answered(10.5, prompt_tokens=7)
    meter.chunks += 1  # one stream alone: a step of 0.5 s, in which the other's prompt was computed
    meter.answered(11.0, prompt_tokens=500)
    for _ in range(4):
        meter.chunks += 2  # both: four steps of 0.25 s
    meter.ended(12.0, share=100, tokens=20, chunks=5)
    meter.chunks += 3  # one again: three steps of 0.1 s
    meter.ended(12.3, share=100, tokens=12, chunks=7)

    seen = meter.close(13.0)

    assert seen is not None
    assert dataclasses.asdict(seen) == pytest.approx(
        {
            "duration_s": 3.0,
            "busy_s": 1.8,
            "decoding_seq_s": 0.5 + 2.0 + 0.3,
            "waiting_seq_s": 1.5,
            "hidden_seq_s": 0.0,
            "chunks": 12,
            "steps": 1 + 4 + 3,
            "prompt_tokens": 500,  # the first prompt delayed nobody
            "ended_tokens": 32,
            "ended_chunks": 12,
            "share_s": 2 * 100 * 2.0 + 100 * 0.3,
            "share_max": 200,
            "has_jobs": False,
            "has_spills": False,
        }
    )
    assert seen.gap_s == pytest.approx(2.8 / 12)


def test_a_window_ends_with_a_first_token_so_that_no_prompt_is_cut_in_two() -> None:
    meter = GapMeter(0.0)
    for _ in range(3):
        meter.opened(0.0, share=1)
    meter.answered(1.0, prompt_tokens=10)

    assert meter.close(WINDOW_S) is None  # two prompts are being computed

    meter.chunks += 1
    meter.answered(WINDOW_S + 1, prompt_tokens=20)
    meter.chunks += 8
    first = meter.close(WINDOW_S + 2)
    assert first is not None
    assert (first.duration_s, first.chunks, first.prompt_tokens) == (WINDOW_S + 1, 1, 20)

    assert meter.close(2 * WINDOW_S) is None
    late = meter.close(WINDOW_S + 1 + WINDOW_MAX_S)
    assert late is not None
    assert (late.duration_s, late.chunks, late.steps) == (WINDOW_MAX_S, 8, 4)


def test_answers_in_one_piece_are_neither_decoding_nor_waiting() -> None:
    meter = GapMeter(0.0)
    meter.opened(0.5, share=50, hidden_seqs=2)
    meter.ended(1.0, share=50, hidden_seqs=2)
    meter.opened(1.0, share=30)
    meter.ended(2.5, share=30, is_answered=False)

    assert meter.close(3.0) == GapWindow(
        duration_s=3.0, hidden_seq_s=1.0, waiting_seq_s=1.5, share_s=25 + 45, share_max=50
    )


def test_what_others_run_cannot_be_seen_and_counts_from_when_it_is_known() -> None:
    meter = GapMeter(0.0)
    meter.others(1.0, share=40, seqs=2)
    meter.others(2.0, share=50, seqs=2)
    meter.others(2.5, share=50, seqs=1)

    assert meter.close(3.0) == GapWindow(
        duration_s=3.0, hidden_seq_s=3.0 + 0.5, share_s=40 + 25 + 25, share_max=50
    )
    assert meter.close(4.0) == GapWindow(duration_s=1.0, hidden_seq_s=1.0, share_s=50, share_max=50)


@pytest.mark.parametrize("first, second", [("is_job", "is_spill"), ("is_spill", "is_job")])
def test_windows_that_end_between_two_looks_are_merged(first: str, second: str) -> None:
    meter = GapMeter(0.0)
    meter.opened(0.0, share=30, hidden_seqs=2, **{first: True})
    meter.opened(0.0, share=5)
    meter.ended(1.0, share=30, hidden_seqs=2, **{first: True})
    meter.answered(2.0, prompt_tokens=7)  # the first one ends
    meter.chunks += 4
    meter.ended(3.0, share=5, tokens=8, chunks=4)
    meter.opened(3.0, share=10, hidden_seqs=3, **{second: True})
    meter.opened(3.0, share=10)
    meter.answered(4.0, prompt_tokens=7)  # the second one ends

    seen = meter.close(4.0)

    assert seen == GapWindow(
        duration_s=4.0,
        busy_s=1.0,
        decoding_seq_s=1.0,
        waiting_seq_s=3.0,
        hidden_seq_s=2.0 + 3.0,
        chunks=4,
        steps=4.0,
        ended_tokens=8,
        ended_chunks=4,
        share_s=30 + 10 + 5 + 20,
        share_max=35,
        has_jobs=True,
        has_spills=True,
    )
    assert seen.in_flight_seq_s == 9.0


@st.composite
def lives(draw: st.DrawFn) -> list[tuple[float, int, int]]:
    """Events of requests in order of time: `(moment, request, what)` with 0 opened, 1 answered, 2 ended."""
    events = []
    for number in range(draw(st.integers(1, 6))):
        moments = sorted(draw(st.lists(st.integers(0, 4000), min_size=3, max_size=3)))
        events += [(moment / 100, number, what) for what, moment in enumerate(moments)]
    return sorted(events, key=lambda event: (event[0], event[2]))


@given(events=lives(), chunks=st.lists(st.integers(0, 9), min_size=18, max_size=18))
def test_windows_add_up_to_what_happened_wherever_they_are_cut(
    events: list[tuple[float, int, int]], chunks: list[int]
) -> None:
    meter, total, sent, live = GapMeter(0.0), NOTHING_SEEN, 0, 0
    for (moment, _, what), count in zip(events, chunks, strict=False):
        if live:
            meter.chunks += count
            sent += count
        if what == 0:
            meter.opened(moment, share=10)
        elif what == 1:
            meter.answered(moment, prompt_tokens=1)
        else:
            meter.ended(moment, share=10)
        live += {0: 0, 1: 1, 2: -1}[what]
        total += meter.close(moment) or NOTHING_SEEN
    total += meter.close(100.0) or NOTHING_SEEN

    begun = {what: sum(moment for moment, _, kind in events if kind == what) for what in range(3)}
    assert total.duration_s == pytest.approx(100)
    assert total.chunks == sent
    assert total.decoding_seq_s == pytest.approx(begun[2] - begun[1])
    assert total.waiting_seq_s == pytest.approx(begun[1] - begun[0])
    assert total.share_s == pytest.approx(10 * (begun[2] - begun[0]))
    assert total.busy_s <= total.decoding_seq_s + 1e-9


# ------------------------------------------------------------------ the rule


def window(
    tpot_ms: float, seqs: float, *, waiting: float = 0.0, most: int | None = None, span_s: float = DECIDE_S
) -> GapWindow:
    """A window with `seqs` decoding, 2.5 tokens per chunk, each a 64th of the knee."""
    gap_s = tpot_ms * 2.5e-3
    chunks = round(seqs * span_s / gap_s)
    return GapWindow(
        duration_s=span_s,
        busy_s=span_s,
        decoding_seq_s=seqs * span_s,
        waiting_seq_s=waiting * span_s,
        chunks=chunks,
        steps=span_s / gap_s,
        ended_tokens=2500,
        ended_chunks=1000,
        share_s=(seqs + waiting) * SEQ * span_s,
        share_max=round((most or seqs + waiting) * SEQ),
    )


def standstill(decoding: float, waiting: float, span_s: float) -> GapWindow:
    """A window in which an engine that all are waiting for has made no step."""
    return replace(
        window(50, decoding, waiting=waiting, span_s=span_s),
        chunks=0,
        steps=0.0,
        ended_tokens=0,
        ended_chunks=0,
    )


@pytest.mark.parametrize(
    ("share_seqs", "seen", "expected_seqs", "move"),
    [
        (32, window(30, 32), 34, Move.UP),
        (32, window(44, 32), 34, Move.UP),
        (32, window(46, 32), 32, Move.HELD_IN_BAND),
        (32, window(49.9, 32), 32, Move.HELD_IN_BAND),
        (40, window(50.2, 40), 36, Move.DOWN),
        (40, window(500, 40, span_s=90), 36, Move.DOWN),
        (64, window(30, 64), 64, Move.HELD_AT_LIMIT),
        (63, window(30, 63), 64, Move.UP),
        (1, window(80, 1), 1, Move.HELD_AT_LIMIT),
        (32, window(80, 20), 32, Move.HELD_NOT_FULL),
        (32, window(30, 20), 32, Move.HELD_NOT_FULL),
        (32, window(30, 20, most=32), 34, Move.UP),
        (32, window(80, 40), 32, Move.WATCHING),
        (32, window(80, 32, span_s=8), 32, Move.WATCHING),
        (32, window(70, 32, span_s=9), 32, Move.WATCHING),
        (32, window(200, 32, span_s=12), 32, Move.WATCHING),
        (32, window(80, 32, span_s=12), 28.8, Move.DOWN),
        (32, window(55, 32, span_s=12), 32, Move.WATCHING),
        (32, window(60, 0), 32, Move.HELD_NOT_FULL),
        (32, window(45, 20, waiting=12), 20, Move.DOWN_ENGINE_QUEUE),
        (32, window(47, 24, waiting=8), 32, Move.HELD_IN_BAND),
        (2, window(46, 1, waiting=1), 2, Move.HELD_IN_BAND),
        (32, window(45, 20, waiting=12, span_s=5), 32, Move.WATCHING),
        (32, standstill(0, 32, span_s=20), 32, Move.WATCHING),
        (32, standstill(0, 32, span_s=40), 32, Move.HELD_UNSEEN),
        (32, standstill(2, 30, span_s=20), 32, Move.WATCHING),
    ],
    ids=[
        "far-below",
        "below",
        "in-band",
        "at-target",
        "above",
        "far-above",
        "ceiling",
        "last-step-up",
        "floor",
        "not-full-slow",
        "not-full-fast",
        "full-for-a-moment",
        "streams-from-before",
        "too-short",
        "too-short-for-many-steps-too",
        "too-few-steps",
        "short-but-far",
        "short-and-near",
        "idle",
        "engine-queues",
        "few-wait",
        "one-prompt-is-no-queue",
        "engine-queues-too-short",
        "standstill",
        "long-standstill",
        "standstill-while-some-decode",
    ],
)
def test_where_the_share_goes(share_seqs: float, seen: GapWindow, expected_seqs: float, move: Move) -> None:
    state = adjust(TpotControl(share=round(share_seqs * SEQ)), seen, TARGET)

    assert state.share == pytest.approx(min(WHOLE, expected_seqs * SEQ), abs=2)
    assert state.move is move


@pytest.mark.parametrize(
    ("share_seqs", "seen", "has_jobs", "expected_seqs", "move"),
    [
        pytest.param(64, window(80, 56), True, 57.6, Move.DOWN, id="jobs-fill-all-but-the-reserve"),
        pytest.param(64, window(80, 54), True, 64, Move.HELD_NOT_FULL, id="jobs-would-still-fit"),
        pytest.param(64, window(80, 56), False, 64, Move.HELD_NOT_FULL, id="chats-would-still-fit"),
        pytest.param(32, window(30, 28), True, 34, Move.UP, id="the-reserve-is-a-part-of-the-share"),
        pytest.param(32, window(30, 26), True, 32, Move.HELD_NOT_FULL, id="and-not-more"),
    ],
)
def test_a_backend_is_full_where_no_job_fits_any_more(
    share_seqs: float, seen: GapWindow, has_jobs: bool, expected_seqs: float, move: Move
) -> None:
    state = TpotControl(share=round(share_seqs * SEQ))
    state = adjust(state, replace(seen, has_jobs=has_jobs), replace(TARGET, reserve=0.125))

    assert state.share == pytest.approx(expected_seqs * SEQ, abs=2)
    assert state.move is move


@pytest.mark.parametrize(
    ("share_seqs", "seen", "has_spills", "has_jobs", "expected_seqs", "move"),
    [
        pytest.param(64, window(80, 56), True, False, 57.6, Move.DOWN, id="spills-fill-all-but-the-reserve"),
        pytest.param(64, window(80, 54), True, False, 64, Move.HELD_NOT_FULL, id="spills-would-still-fit"),
        pytest.param(64, window(80, 56), False, False, 64, Move.HELD_NOT_FULL, id="others-would-still-fit"),
        pytest.param(64, window(80, 48), True, True, 57.6, Move.DOWN, id="jobs-leave-more"),
    ],
)
def test_a_backend_is_full_where_no_spill_fits_any_more(
    share_seqs: float, seen: GapWindow, has_spills: bool, has_jobs: bool, expected_seqs: float, move: Move
) -> None:
    state = TpotControl(share=round(share_seqs * SEQ))
    seen = replace(seen, has_spills=has_spills, has_jobs=has_jobs)
    state = adjust(state, seen, replace(TARGET, reserve=0.25, spill_reserve=0.125))

    assert state.share == pytest.approx(expected_seqs * SEQ, abs=2)
    assert state.move is move


@pytest.mark.parametrize("kind", ["job", "spill"])
def test_a_window_has_jobs_or_spills_while_any_runs(kind: str) -> None:
    it = {f"is_{kind}": True}
    meter = GapMeter(0.0)
    meter.opened(0.0, share=1)
    meter.opened(1.0, share=1, **it)
    meter.ended(2.0, share=1, is_answered=False, **it)
    seen = [meter.close(3.0 + WINDOW_MAX_S)]
    meter.opened(30.0, share=1, hidden_seqs=1, **it)
    seen += [meter.close(31.0 + WINDOW_MAX_S)]
    meter.ended(32.0 + WINDOW_MAX_S, share=1, is_answered=False)
    seen += [meter.close(60.0 + WINDOW_MAX_S)]
    meter.ended(90.0, share=1, hidden_seqs=1, **it)
    seen += [meter.close(91.0 + WINDOW_MAX_S), meter.close(120.0 + WINDOW_MAX_S)]

    assert [one is not None and getattr(one, f"has_{kind}s") for one in seen] == [
        True,
        True,
        True,
        True,
        False,
    ]
    assert not any(one is None or (one.has_jobs and one.has_spills) for one in seen)


@pytest.mark.parametrize("decoding", [0, 2])
def test_an_engine_that_has_stood_still_counts_as_slow_and_not_as_queueing(decoding: int) -> None:
    state = TpotControl(share=WHOLE)
    for seen in [standstill(decoding, 64 - decoding, span_s=20), *5 * [window(50, 64, span_s=2)]]:
        state = adjust(state, seen, TARGET)

    assert state.share >= round(0.9 * WHOLE)
    assert state.move is not Move.DOWN_ENGINE_QUEUE


def test_nothing_moves_until_a_stream_has_told_its_tokens() -> None:
    silent = replace(window(100, 32), ended_tokens=0, ended_chunks=0)
    state = adjust(TpotControl(share=32 * SEQ), silent, TARGET)

    assert (state.share, state.move) == (32 * SEQ, Move.WATCHING)
    assert adjust(state, window(100, 32), TARGET).move is Move.DOWN


def test_long_requests_fill_the_share_although_a_short_one_would_still_fit() -> None:
    # Three documents of a twelfth each; a fourth would exceed the share.
    document = WHOLE // 12
    seen = replace(window(80, 3), share_s=3 * document * DECIDE_S, share_max=3 * document)

    assert adjust(TpotControl(share=round(3.9 * document)), seen, TARGET).move is Move.DOWN


def test_the_target_of_a_curve_steps_by_its_shortest_class_and_stops_at_its_longest() -> None:
    target = TpotTarget.of(CHAT.profile.capacity, 0.06)

    assert target == TpotTarget(0.06, seq_share=WHOLE // 64, floor_share=WHOLE // 12)


windows = st.builds(
    GapWindow,
    duration_s=st.floats(0.01, 600),
    busy_s=st.floats(0, 600),
    decoding_seq_s=st.floats(0, 1e5),
    waiting_seq_s=st.floats(0, 1e5),
    hidden_seq_s=st.floats(0, 1e5),
    chunks=st.integers(0, 10**6),
    steps=st.floats(0, 10**5),
    prompt_tokens=st.integers(0, 10**7),
    ended_tokens=st.integers(0, 10**6),
    ended_chunks=st.integers(0, 10**6),
    share_s=st.floats(0, 1e9),
    share_max=st.integers(0, WHOLE),
)
shares = st.integers(SEQ, WHOLE)


@given(share=shares, seen=st.lists(windows, max_size=30), floor=st.integers(1, WHOLE // 4))
def test_the_share_stays_between_floor_and_ceiling(share: int, seen: list[GapWindow], floor: int) -> None:
    target = TpotTarget(0.05, SEQ, floor)
    state = TpotControl(share=max(share, floor))
    for one in seen:
        before, state = state, adjust(state, one, target)
        assert floor <= state.share <= WHOLE
        if state.move in (Move.HELD_NOT_FULL, Move.WATCHING, Move.HELD_IN_BAND, Move.HELD_AT_LIMIT):
            assert state.share == before.share
        if state.move is Move.UP:
            assert before.share < state.share <= before.share + WHOLE // 32
        if state.move in (Move.DOWN, Move.DOWN_ENGINE_QUEUE):
            assert state.share < before.share


@given(share=shares, seen=st.lists(windows, max_size=20))
def test_a_backend_that_is_not_full_never_moves_it(share: int, seen: list[GapWindow]) -> None:
    state = TpotControl(share=share)
    for one in seen:
        calm = replace(
            one, share_max=share // 2, share_s=min(one.share_s, one.in_flight_seq_s * (share // 2))
        )
        state = adjust(state, calm, TARGET)
        assert (state.share, state.move) == (share, Move.HELD_NOT_FULL)


# ------------------------------------------------------------------ with a server

AT_TARGET_SEQS = 42  # in flight of LIGHT chat at 50 ms, by `python benchmarks/knee.py --control`


@pytest.mark.parametrize("start", [8, 64])
@pytest.mark.parametrize("seed", [1, 2])
def test_it_settles_within_5_minutes_from_either_start(start: int, seed: int) -> None:
    run = bench.control(bench.server_of(CHAT, None, seed), TARGET, start, span_s=1200)

    settled_s = run.settled_s(0.8 * AT_TARGET_SEQS, 1.05 * AT_TARGET_SEQS)
    assert settled_s is not None
    assert settled_s <= 300
    assert 0.9 * TARGET.tpot_s * 0.97 <= run.mean_tpot_s(300) <= TARGET.tpot_s
    assert run.range_seqs(0)[1] <= 64


def test_a_target_that_is_always_met_leads_to_the_ceiling_and_stays_there() -> None:
    run = bench.control(bench.server_of(CHAT, None, 3), replace(TARGET, tpot_s=0.2), 40, span_s=500)

    assert run.range_seqs(300) == (64, 64)


def test_traffic_that_does_not_fill_the_share_never_moves_it() -> None:
    server = bench.server_of(CHAT, 0.5, seed=4)
    run = bench.control(server, replace(TARGET, tpot_s=0.001), 50, span_s=900)

    assert server.in_flight_max < 49
    assert run.moves == 0


def test_it_converges_again_after_the_traffic_has_changed() -> None:
    # 4K/512 at 50 ms allows 19 in flight, chat 42.
    server = bench.server_of(CHAT, None, seed=5)
    run = bench.control(server, TARGET, 40, span_s=1500, change=(600, REPORTS.traffic))

    assert 0.8 * AT_TARGET_SEQS <= run.mean_seqs(300, 600) <= 1.05 * AT_TARGET_SEQS
    assert 0.8 * 19 <= run.mean_seqs(1000) <= 1.05 * 19
    assert run.mean_tpot_s(1000) <= TARGET.tpot_s


def test_an_engine_that_queues_by_itself_is_given_less() -> None:
    flags = replace(CHAT.profile.flags, max_num_seqs=16)
    server = bench.server_of(replace(CHAT, profile=replace(CHAT.profile, flags=flags)), None, seed=6)
    run = bench.control(server, replace(TARGET, tpot_s=1.0), 64, span_s=300)

    # 30 % of those in flight may wait: 16 run, so 23 are the most that is no queue. Two more is a step up.
    assert run.range_seqs(200)[1] <= 26
