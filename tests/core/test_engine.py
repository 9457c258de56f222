"""The engine model: its scheduler step by step, and every published figure it stands on."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest

from benchmarks.closed_loop import Measured, closed_loop
from benchmarks.published import POINTS, Figure, Point, value
from gateway.core.engine import Engine, StepResult
from gateway.core.kv import KvFormula
from gateway.core.perf import PerfModel
from gateway.core.profile import EngineFlags
from gateway.profiles import load

PERF = PerfModel(
    t_fixed=1.0, t_mem=2.0, kv_read=0.5, kv_span=0.25, t_seq=0.125, t_tok=4.0, t_attn=0.0625, sharp=1
)
ONE_LAYER = KvFormula(sliding_layers=0, global_layers=1, global_block_tokens=16)


def engine(
    *, seqs: int = 8, budget: int = 100, perf: PerfModel = PERF, blocks: int | None = None, isl: bool = False
) -> Engine:
    return Engine(perf, EngineFlags(seqs, budget, isl), ONE_LAYER if blocks else None, blocks)


def step(server: Engine) -> tuple[float, StepResult]:
    batch = server.schedule()
    assert batch is not None
    return batch.duration_s, server.complete()


@cache
def measured_at(point: Point) -> Measured:
    return point.run()


FIGURES = [
    pytest.param(point, figure, id=f"{point.id}-{figure.metric.replace(' ', '-')}")
    for point in POINTS
    for figure in point.figures
]


@pytest.mark.parametrize(("point", "figure"), FIGURES)
def test_engine_reproduces_the_published_figure(point: Point, figure: Figure) -> None:
    simulated = value(measured_at(point), figure.metric)

    # 1 % covers the rounding of the fitted model's own printed value (three digits).
    assert simulated == pytest.approx(figure.model, rel=0.01)
    assert simulated == pytest.approx(figure.published, rel=abs(figure.model_error) + 0.01)


def test_the_table_holds_all_101_fitted_figures_and_the_three_single_streams() -> None:
    assert sum(len(point.figures) for point in POINTS) == 104
    assert len({point.id for point in POINTS}) == len(POINTS)


def test_mean_error_over_all_published_figures_stays_below_3_percent() -> None:
    errors = [
        abs(value(measured_at(point), figure.metric) / figure.published - 1)
        for point in POINTS
        for figure in point.figures
    ]

    assert sum(errors) / len(errors) < 0.03


def test_an_idle_engine_schedules_nothing() -> None:
    assert engine().schedule() is None


def test_a_step_takes_the_formula_s_time() -> None:
    server = engine(budget=10)
    server.submit(1, prompt_tokens=12, output_tokens=5)

    assert step(server)[0] == 1 + 2 + 4 * 10 + 0.0625 * 10 * 5
    server.submit(2, prompt_tokens=3, output_tokens=5)
    assert step(server)[0] == 1 + 2 + 4 * 5 + 0.0625 * (2 * 11 + 3 * 1.5)
    # Both decode now: contexts 13 and 4, the first token included.
    assert step(server)[0] == 1 + 2 + 0.5 * 17 + 0.25 * 13 + 0.125 * 2


def test_the_first_token_comes_with_the_step_that_completes_the_prompt() -> None:
    server = engine(budget=10)
    server.submit(7, prompt_tokens=25, output_tokens=2)

    assert step(server)[1] == StepResult([], [], [])
    assert step(server)[1] == StepResult([], [], [])
    assert step(server)[1] == StepResult([(7, 1)], [7], [])
    assert step(server)[1] == StepResult([(7, 1)], [], [7])
    assert (server.running, server.waiting) == (0, 0)


def test_a_one_token_output_ends_with_its_prefill() -> None:
    server = engine()
    server.submit(1, prompt_tokens=5, output_tokens=1)

    assert step(server)[1] == StepResult([(1, 1)], [1], [1])
    assert server.schedule() is None


def test_accepted_draft_tokens_accumulate_as_fractions_and_stop_at_the_output_length() -> None:
    server = engine(perf=replace(PERF, accept=2.25, draft=3))
    server.submit(1, prompt_tokens=5, output_tokens=13)

    gained = [step(server)[1].emitted[0][1] for _ in range(7)]

    assert gained == [1, 2, 2, 2, 3, 2, 1]
    assert server.running == 0


@pytest.mark.parametrize(("prompt_tokens", "steps"), [(16, 2), (17, 3)])  # 20 - 3 * 4 of them in each
def test_decoding_sequences_use_up_one_plus_draft_tokens_of_the_budget(
    prompt_tokens: int, steps: int
) -> None:
    server = engine(budget=20, perf=replace(PERF, draft=3))
    for seq_id in range(3):
        server.submit(seq_id, prompt_tokens=5, output_tokens=50)
    step(server)
    server.submit(9, prompt_tokens=prompt_tokens, output_tokens=5)

    results = [step(server)[1] for _ in range(steps)]

    assert [len(result.emitted) for result in results] == [3] * (steps - 1) + [4]
    assert results[-1].first == [9]


def test_prefills_go_on_in_order_before_anyone_new_is_admitted() -> None:
    server = engine(budget=10)
    for seq_id, prompt in ((1, 14), (2, 8), (3, 2)):
        server.submit(seq_id, prompt_tokens=prompt, output_tokens=9)

    first, _ = server.schedule(), server.complete()
    second, result = server.schedule(), server.complete()
    third, later = server.schedule(), server.complete()

    assert first is not None and first.started == (1,)
    assert second is not None and second.started == (2,) and result.first == [1]
    assert third is not None and third.started == (3,) and later.first == [2, 3]


def test_no_more_than_max_num_seqs_run() -> None:
    server = engine(seqs=2)
    for seq_id in range(3):
        server.submit(seq_id, prompt_tokens=4, output_tokens=2)

    step(server)
    assert (server.running, server.waiting) == (2, 1)
    assert step(server)[1].finished == [0, 1]
    assert step(server)[1].first == [2]


def test_admission_is_first_come_first_served_even_when_a_later_one_would_fit() -> None:
    server = engine(blocks=10, budget=400)
    server.submit(1, prompt_tokens=96, output_tokens=10)  # 6 blocks
    server.submit(2, prompt_tokens=80, output_tokens=10)  # 5: does not fit beside it
    server.submit(3, prompt_tokens=16, output_tokens=10)

    step(server)

    assert (server.running, server.waiting) == (1, 2)
    assert server.kv_usage == pytest.approx(0.6)


@pytest.mark.parametrize(
    ("reserve", "started"), [(True, ()), (False, (2,))], ids=["whole-prompt", "by-chunk"]
)
def test_reserving_the_whole_prompt_keeps_a_long_one_in_the_queue(
    reserve: bool, started: tuple[int, ...]
) -> None:
    server = engine(blocks=10, isl=reserve, budget=64)
    server.submit(1, prompt_tokens=48, output_tokens=60)
    step(server)
    server.submit(2, prompt_tokens=150, output_tokens=5)

    batch = server.schedule()

    assert batch is not None and batch.started == started


def test_the_newest_is_preempted_when_an_older_one_needs_a_block_and_continues_without_repeating() -> None:
    server = engine(blocks=4)
    server.submit(1, prompt_tokens=30, output_tokens=20)
    server.submit(2, prompt_tokens=30, output_tokens=20)
    gained = {1: 0, 2: 0}
    preempted: list[int] = []
    first: list[int] = []
    while (batch := server.schedule()) is not None:
        preempted += batch.preempted
        result = server.complete()
        first += result.first
        for seq_id, tokens in result.emitted:
            gained[seq_id] += tokens

    assert preempted == [2]
    assert server.preemptions == 1
    assert gained == {1: 20, 2: 20}
    assert first == [1, 2]
    assert server.kv_usage == 0


def test_a_sequence_that_can_never_fit_blocks_the_queue_until_it_is_aborted() -> None:
    server = engine(blocks=4, isl=True)
    server.submit(1, prompt_tokens=100, output_tokens=5)
    server.submit(2, prompt_tokens=10, output_tokens=5)

    assert server.schedule() is None
    assert server.abort(1)
    assert step(server)[1].first == [2]


@pytest.mark.parametrize("steps", [0, 1, 2, 3], ids=["waiting", "prefilling", "prefilled", "decoding"])
def test_an_aborted_sequence_gives_everything_back(steps: int) -> None:
    server = engine(budget=20, blocks=10)
    server.submit(1, prompt_tokens=30, output_tokens=50)
    for _ in range(steps):
        step(server)

    assert server.abort(1)
    assert not server.abort(1)
    assert (server.running, server.waiting, server.kv_usage) == (0, 0, 0.0)
    assert server.schedule() is None


@pytest.mark.parametrize("prompt", [10, 100], ids=["decoding", "prefilling"])
def test_a_sequence_aborted_during_a_step_gains_nothing_from_it(prompt: int) -> None:
    server = engine(budget=20, blocks=10)
    server.submit(1, prompt_tokens=prompt, output_tokens=50)
    step(server)
    assert server.schedule() is not None
    server.abort(1)

    assert server.complete() == StepResult([], [], [])
    assert server.kv_usage == 0.0


def test_a_prefill_chunk_holds_its_tokens_in_every_sliding_layer_only_while_it_runs() -> None:
    kv = KvFormula(sliding_layers=1, global_layers=1, window_tokens=32, global_block_tokens=16)
    server = Engine(PERF, EngineFlags(8, 160, False), kv, 100)
    server.submit(1, prompt_tokens=160, output_tokens=9)

    assert server.schedule() is not None
    assert server.kv_usage == pytest.approx((10 + 1 + 10) / 100)
    server.complete()
    assert server.kv_usage == pytest.approx((2 + 1 + 10) / 100)


def test_the_16k_prefill_chunk_of_two_cards_holds_5_8_percent_of_the_pool() -> None:
    server = Engine.of(load("h100-tp2-push"))
    server.submit(1, prompt_tokens=200_000, output_tokens=10)
    for _ in range(2):
        step(server)
    server.schedule()

    sliding = 50 * (-(-(1023 + 16384) // 16) + 1)
    assert sliding / 933_361 == pytest.approx(0.058, abs=0.001)
    assert server.kv_usage > 0.058


@pytest.mark.parametrize(
    ("profile", "prompt", "seconds"),
    [
        ("h100-tp1-light", 2048, 0.37),
        ("h100-tp1-light", 16384, 4.7),
        ("h100-tp2-push", 16384, 2.5),
        ("h100-tp2-push", 131_072, 64),
        ("h100-tp2-push", 200_000, 139),
        ("spark-fp8", 16384, 19.0),
    ],
    ids=["light-2k", "light-16k", "push-16k", "push-128k", "push-200k", "spark-16k"],
)
def test_unloaded_prefill_takes_as_long_as_the_fit_says(profile: str, prompt: int, seconds: float) -> None:
    measured = closed_loop(load(profile), prompt_tokens=prompt, output_tokens=1, concurrency=1, requests=1)

    assert measured.duration_s == pytest.approx(seconds, rel=0.05)


def test_a_running_benchmark_of_a_sequence_that_cannot_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot hold"):
        closed_loop(load("spark-nvfp4"), prompt_tokens=800_000, output_tokens=2, concurrency=1, requests=1)


@pytest.mark.parametrize(("prompt", "output"), [(0, 1), (1, 0)], ids=["empty-prompt", "no-output"])
def test_lengths_below_one_are_refused(prompt: int, output: int) -> None:
    with pytest.raises(ValueError, match="at least one"):
        engine().submit(1, prompt, output)


def test_an_id_cannot_be_in_the_engine_twice() -> None:
    server = engine()
    server.submit(1, 5, 5)
    with pytest.raises(ValueError, match="already"):
        server.submit(1, 5, 5)


def test_steps_are_scheduled_and_completed_in_turn() -> None:
    server = engine()
    with pytest.raises(RuntimeError, match="no step"):
        server.complete()
    server.submit(1, 5, 5)
    server.schedule()
    with pytest.raises(RuntimeError, match="not been completed"):
        server.schedule()


def test_a_prompt_that_was_computed_before_is_found_but_for_its_last_block() -> None:
    """As vLLM 0.32 with Gemma 4: 512 of a repeated prompt of 613 tokens (`prefix_cache.BLOCK_TOKENS`)."""
    server = engine(budget=1000)
    for seq_id in (1, 2):
        server.submit(seq_id, prompt_tokens=613, output_tokens=1, keys=range(4))
        assert server.schedule() is not None
        assert server.cached_tokens(seq_id) == (0, 512)[seq_id - 1]
        assert server.complete().first == [seq_id]

    assert (server.queried_tokens, server.found_tokens) == (2 * 613, 512)


def test_what_is_found_is_not_computed_again() -> None:
    server = engine(budget=1000)
    server.submit(1, prompt_tokens=300, output_tokens=1, keys=[7, 8])
    step(server)
    server.submit(2, prompt_tokens=400, output_tokens=1, keys=[7, 8, 9])

    assert step(server)[0] == 1 + 2 + 4 * 144 + 0.0625 * 144 * (256 + 72)


def test_a_prompt_of_whole_blocks_computes_the_last_one_again() -> None:
    server = engine(budget=1000)
    for seq_id in (1, 2):
        server.submit(seq_id, prompt_tokens=256, output_tokens=1, keys=[7, 8])
        step(server)

    assert server.found_tokens == 128


def test_a_prompt_is_found_from_its_beginning_on_or_not_at_all() -> None:
    server = engine(budget=1000)
    server.submit(1, prompt_tokens=400, output_tokens=1, keys=[1, 2, 3])
    step(server)
    server.submit(2, prompt_tokens=400, output_tokens=1, keys=[4, 2, 3])
    step(server)

    assert server.found_tokens == 0


def test_two_with_the_same_beginning_in_one_step_share_it() -> None:
    server = engine(budget=1000)
    for seq_id in (1, 2):
        server.submit(seq_id, prompt_tokens=300, output_tokens=1, keys=[7, 8])
    step(server)

    assert server.found_tokens == 256


def test_an_answer_whose_keys_are_known_is_found_with_its_prompt() -> None:
    server = engine(budget=1000)
    server.submit(1, prompt_tokens=130, output_tokens=130, keys=[1, 2])
    while server.running or server.waiting:
        step(server)
    server.submit(2, prompt_tokens=300, output_tokens=1, keys=[1, 2])
    step(server)

    assert server.found_tokens == 256


BASE, OTHER, THIRD = range(30), [*range(15), *range(100, 130)], [*range(15), *range(200, 230)]
"""Keys of the blocks of three prompts, of which the second and third share the first 2,000 tokens."""

RESUMED = {
    "again": [(3000, 1, BASE, 0), (3000, 1, BASE, 2944)],
    "extended": [(3000, 1, BASE, 0), (3200, 1, BASE, 2944)],
    "ends sooner": [(3000, 1, BASE, 0), (2500, 1, BASE, 0), (2500, 1, BASE, 2432)],
    "ends in the first window": [(1000, 1, BASE, 0), (500, 1, BASE, 384)],
    "branches": [(3000, 1, BASE, 0), (3000, 1, OTHER, 0), (3000, 1, THIRD, 1920), (3000, 1, BASE, 2944)],
    "turns": [(1400, 300, BASE, 0), (1800, 300, BASE, 1280), (2200, 300, BASE, 1792), (2600, 1, BASE, 2176)],
}
"""As found by vLLM 0.32 with Gemma 4: tokens of prompt and answer, keys, tokens found."""


@pytest.mark.parametrize("prompts", RESUMED.values(), ids=RESUMED)
def test_with_sliding_layers_a_prompt_goes_on_where_one_ended_or_two_have_parted(
    prompts: list[tuple[int, int, Sequence[int], int]],
) -> None:
    server = Engine(PERF, EngineFlags(8, 512, False), KvFormula(sliding_layers=1, global_layers=1), 10_000)
    found: list[int] = []
    for seq_id, (prompt, output, keys, _) in enumerate(prompts):
        server.submit(seq_id, prompt, output, keys)
        step(server)
        found.append(server.found_tokens - sum(found))
        while server.running:
            step(server)

    assert found == [expected for *_, expected in prompts]


def test_blocks_that_others_need_are_given_up_the_least_recently_used_and_the_end_first() -> None:
    server = engine(budget=1000, blocks=40)  # of 16 tokens
    for seq_id, keys in ((1, [11, 12]), (2, [21, 22]), (3, [31])):
        server.submit(seq_id, prompt_tokens=16 * len(keys) * 8, output_tokens=1, keys=keys)
        step(server)
    server.submit(4, prompt_tokens=8, output_tokens=1)  # needs one; the others keep forty
    step(server)
    found = []
    for seq_id, keys in ((5, [31, 0]), (6, [21, 22, 0]), (7, [11, 0])):
        server.submit(seq_id, prompt_tokens=128 * len(keys) - 100, output_tokens=1, keys=keys)
        assert server.schedule() is not None
        found.append(server.cached_tokens(seq_id))
        server.abort(seq_id)
        server.complete()

    assert found == [128, 256, 128]


def test_a_sequence_keeps_what_it_found_when_it_takes_the_last_blocks() -> None:
    server = engine(budget=1000, blocks=17)
    server.submit(1, prompt_tokens=256, output_tokens=1, keys=[1, 2])
    step(server)
    server.submit(2, prompt_tokens=260, output_tokens=1, keys=[1, 2])
    assert server.schedule() is not None

    assert server.cached_tokens(2) == 256
    assert server.kv_usage == 1.0


def test_a_preempted_sequence_finds_what_nobody_has_taken_since() -> None:
    server = engine(budget=1000, blocks=34)
    server.submit(1, prompt_tokens=250, output_tokens=40)  # takes a block of the other's when that has left
    server.submit(2, prompt_tokens=257, output_tokens=30, keys=[11, 12])
    again: float | None = None
    preempted: list[int] = []
    while (batch := server.schedule()) is not None:
        preempted += batch.preempted
        again = batch.duration_s if preempted and batch.started else again
        server.complete()

    assert preempted == [2]
    assert again == 1 + 2 + 4 * (273 - 128) + 0.0625 * (273 - 128) * (128 + (273 - 128) / 2)
    assert (server.found_tokens, server.kv_usage) == (0, 0)  # of the prompt, nothing when it was admitted


def test_a_forgotten_prompt_is_computed_again() -> None:
    server = engine(budget=1000)
    server.submit(1, prompt_tokens=300, output_tokens=1, keys=[7, 8])
    step(server)
    server.forget_prefixes()
    server.submit(2, prompt_tokens=300, output_tokens=1, keys=[7, 8])
    step(server)

    assert server.found_tokens == 0


def test_an_aborted_sequence_leaves_what_it_computed() -> None:
    server = engine(budget=150)
    server.submit(1, prompt_tokens=600, output_tokens=1, keys=[1, 2, 3, 4])
    step(server)
    step(server)
    server.abort(1)
    server.submit(2, prompt_tokens=600, output_tokens=1, keys=[1, 2, 3, 4])
    server.schedule()

    assert server.cached_tokens(2) == 256
