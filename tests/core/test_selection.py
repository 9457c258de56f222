"""Filter, score, pick: who may be asked, in which order, and why each other one is out."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.core import admission, selection
from gateway.core.backends import Backend, Capacity, Gates, JobRoom, KneeStep, Modalities, Pool, Spill
from gateway.core.decision import Candidate, Exclusion
from gateway.core.health import BackendStatus, ProbeFault, State
from gateway.core.kv import KvFormula
from gateway.core.load import UNLIMITED, Demand, Load
from gateway.core.perf import PerfModel
from gateway.core.policy import ModelPolicy, Policy, TrafficClass, Weights, When
from gateway.core.selection import BackendView
from gateway.core.versions import bounds

T = TypeVar("T")
SMALL = Capacity(context_tokens=32_768, knee=(KneeStep(None, 64),))
LARGE = Capacity(context_tokens=262_144, knee=(KneeStep(None, 64),))
CHAT = TrafficClass("short_chat", ("light", "push"))
SHORT = Demand(seqs=1, prompt_tokens=1_000, total_tokens=2_000)
MEASURED = PerfModel(t_fixed=0, t_mem=0, kv_read=0, kv_span=0, t_seq=0, t_tok=1e-4, t_attn=0, sharp=1)
UP = BackendStatus(state=State.UP, served_models=("gemma",))


def backend(name: str, capacity: Capacity = SMALL, **fields: object) -> Backend:
    return replace(Backend(id=name, url=f"http://{name}", capacity=capacity, tokens_per_s=100.0), **fields)  # type: ignore[arg-type]


def load(seqs: int) -> Load:
    return Load(seqs=seqs, share=seqs * (admission.WHOLE // 64))


def view(
    subject: Backend, seqs: int = 0, status: BackendStatus = UP, prefix_share: float = 0.0
) -> BackendView:
    return BackendView(backend=subject, load=load(seqs), status=status, prefix_share=prefix_share)


def fleet(*views: BackendView) -> Mapping[str, BackendView]:
    defaults = [view(backend("light-0")), view(backend("light-1")), view(backend("push", LARGE))]
    return {item.backend.id: item for item in (*defaults, *views)}


def policy(weights: Weights | None = None) -> Policy:
    return Policy(
        models=(),
        pools={"light": Pool("light", ("light-0", "light-1")), "push": Pool("push", ("push",))},
        backends={},
        weights=weights or Weights(),
    )


def ranked(
    views: Mapping[str, BackendView], demand: Demand = SHORT, weights: Weights | None = None
) -> list[str]:
    candidates = selection.rank(policy(weights), CHAT, demand, views)
    return [candidate.backend for candidate in candidates if candidate.excluded is None]


def why_not(
    views: Mapping[str, BackendView], name: str, demand: Demand = SHORT
) -> tuple[Exclusion | None, str]:
    candidates = selection.rank(policy(), CHAT, demand, views)
    found = next(candidate for candidate in candidates if candidate.backend == name)
    return found.excluded, found.detail


def test_an_idle_fleet_is_ranked_as_configured() -> None:
    assert ranked(fleet()) == ["light-0", "light-1", "push"]


def test_spare_knee_decides_within_a_pool() -> None:
    assert ranked(fleet(view(backend("light-0"), seqs=10))) == ["light-1", "light-0", "push"]


def test_a_later_pool_is_a_spill_however_idle_it_is() -> None:
    busy = fleet(view(backend("light-0"), seqs=63), view(backend("light-1"), seqs=63))

    assert ranked(busy)[-1] == "push"


def test_a_full_pool_spills() -> None:
    assert ranked(fleet(view(backend("light-0"), seqs=64), view(backend("light-1"), seqs=64))) == ["push"]


@pytest.mark.parametrize(
    ("seqs", "first"),
    [
        pytest.param(0, "light-1", id="idle-affinity-decides"),
        pytest.param(9, "light-1", id="a-little-busier-still"),
        pytest.param(14, "light-0", id="too-busy-for-a-tie-break"),
    ],
)
def test_a_conversation_returns_to_its_replica_while_that_has_room(seqs: int, first: str) -> None:
    views = fleet(view(backend("light-1"), seqs=seqs, prefix_share=1.0))

    assert ranked(views)[0] == first


def test_a_replica_on_which_others_run_requests_comes_last_and_is_as_free_as_before() -> None:
    others = replace(view(backend("light-0")), seqs_taken=78)
    here, there, *_ = selection.rank(policy(), CHAT, SHORT, fleet(others, view(backend("light-1"), seqs=2)))

    assert (here.backend, here.excluded, here.detail) == ("light-1", None, "")
    assert (there.backend, there.excluded, there.detail) == ("light-0", None, "78 more in flight by others")
    assert there.scores["spare_knee"] == 0
    assert there.limits == here.limits


@pytest.mark.parametrize(("seqs", "first"), [(2, "light-0"), (4, "light-1")])
def test_what_others_run_counts_like_what_runs_from_here(seqs: int, first: str) -> None:
    views = fleet(view(backend("light-0"), seqs=seqs), replace(view(backend("light-1")), seqs_taken=3))

    assert ranked(views)[0] == first
    assert selection.ranking(policy(), CHAT, SHORT, views).first.backend == first  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("seqs", "others", "spare_knee", "first"),
    [
        pytest.param((2, 1), (90, 90), 1.0, "light-1", id="fewer-from-here"),
        pytest.param((1, 1), (90, 70), 1.0, "light-1", id="fewer-of-others"),
        pytest.param((1, 1), (90, 90), 1.0, "light-0", id="as-many"),
        pytest.param((2, 1), (90, 70), 0.0, "light-0", id="it-does-not-matter"),
    ],
)
def test_of_replicas_that_others_fill_the_one_with_fewer_comes_first(
    seqs: tuple[int, int], others: tuple[int, int], spare_knee: float, first: str
) -> None:
    """None of their knee is free: what is beyond it tells them apart."""
    views = fleet(
        *[
            replace(view(backend(name), seqs=seqs[place]), seqs_taken=others[place])
            for place, name in enumerate(("light-0", "light-1"))
        ]
    )
    alike = {name: one.backend for name, one in views.items()}
    known = replace(policy(Weights(spare_knee=spare_knee)), backends=alike)

    assert selection.rank(known, CHAT, SHORT, views)[0].backend == first
    assert selection.ranking(known, CHAT, SHORT, views).first.backend == first  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("prompt_tokens", "seqs", "first"),
    [
        pytest.param(900, 14, "light-0", id="too-short-to-count"),
        pytest.param(2_000, 14, "light-0", id="saves-0.18-s"),
        pytest.param(2_000, 16, "light-0", id="saves-0.18-s-busier"),
        pytest.param(2_000, 13, "light-1", id="saves-0.18-s-less-busy"),
        pytest.param(20_000, 30, "light-1", id="saves-1.8-s"),
        pytest.param(20_000, 40, "light-0", id="saves-1.8-s-too-busy"),
    ],
)
def test_a_long_conversation_returns_to_a_busier_replica_the_more_prefill_that_saves(
    prompt_tokens: int, seqs: int, first: str
) -> None:
    pair = [backend(name, LARGE, perf=MEASURED) for name in ("light-0", "light-1")]
    views = fleet(view(pair[0]), view(pair[1], seqs=seqs, prefix_share=0.9))
    asked = Demand(seqs=1, prompt_tokens=prompt_tokens, total_tokens=prompt_tokens + 1_000)

    assert ranked(views, asked)[0] == first
    assert selection.ranking(policy(), CHAT, asked, views).first.backend == first  # type: ignore[union-attr]


def place(name: str, prefill_ms: int, share: int = 0) -> Candidate:
    """Return where a request may start, with the prefill that it takes there, and the load in percent."""
    return Candidate(name, "light", claim=Load(prefill_ms=prefill_ms), load=Load(share=share * 10_000))


@pytest.mark.parametrize(
    ("busy", "shares", "expected"),
    [
        pytest.param([place("a", 200)], {"a": 0.9}, (["a"], 1.8), id="knows-it"),
        pytest.param([place("a", 200)], {}, ([], 0.0), id="knows-nothing"),
        pytest.param([place("a", 200)], {"b": 0.9}, ([], 0.0), id="another-knows-it"),
        pytest.param([place("a", 200)], {"a": 0.5, "start": 0.5}, ([], 0.0), id="knows-as-much"),
        pytest.param([place("a", 2000)], {"a": 0.1}, ([], 0.0), id="saves-nothing"),
        pytest.param([place("a", 9000)], {"a": 0.9}, ([], 0.0), id="slower-even-so"),
        pytest.param(
            [place("a", 900), place("b", 100), place("c", 500)],
            {"a": 0.5, "b": 0.9, "c": 0.7},
            (["b", "c", "a"], 1.9),
            id="the-one-that-saves-most",
        ),
    ],
)
def test_a_request_stays_with_the_busy_backend_that_saves_it_a_prefill(
    busy: list[Candidate], shares: dict[str, float], expected: tuple[list[str], float]
) -> None:
    start = place("start", 2000)

    found, seconds = selection.stay(busy, start, shares)
    assert ([one.backend for one in found], seconds) == expected


@pytest.mark.parametrize(
    ("share", "seconds"), [(0, 2.0), (50, 5.0), (100, 8.0), (120, 8.0)], ids=["idle", "half", "full", "above"]
)
def test_it_stays_longer_the_fuller_the_other_is(share: int, seconds: float) -> None:
    start = place("start", 2000, share=share)

    busy = place("a", 0)
    assert selection.stay([busy], start, {"a": 1.0}) == ([busy], seconds)


def test_a_slow_box_waits_behind_a_fast_one_in_its_pool() -> None:
    views = fleet(
        view(backend("light-0", tokens_per_s=6.8)), view(backend("light-1", tokens_per_s=54.0), seqs=30)
    )

    assert ranked(views)[0] == "light-1"


@pytest.mark.parametrize(
    ("rates", "speeds"),
    [
        pytest.param((50.0, 100.0), (0.5, 1.0), id="of-the-fastest"),
        pytest.param((50.0, None), (1.0, 1.0), id="one-that-is-not-known-counts-as-that"),
        pytest.param((None, None), (1.0, 1.0), id="none-is-known"),
    ],
)
def test_speed_is_a_part_of_the_fastest_in_the_pool(
    rates: tuple[float | None, ...], speeds: tuple[float, ...]
) -> None:
    slow, fast = (view(backend(f"light-{at}", tokens_per_s=rate)) for at, rate in enumerate(rates))
    found = {one.backend: one for one in selection.rank(policy(), CHAT, SHORT, fleet(slow, fast))}

    assert tuple(found[f"light-{at}"].scores["speed"] for at in range(2)) == speeds


@pytest.mark.parametrize(
    ("prompt_tokens", "seqs", "first"),
    [
        pytest.param(1_792, 6, "light-0", id="just-below"),
        pytest.param(1_793, 6, "light-1", id="the-first-of-the-bucket"),
        pytest.param(2_048, 6, "light-1", id="the-last-of-it"),
        pytest.param(2_049, 6, "light-0", id="just-above"),
        pytest.param(2_048, 0, "light-0", id="idle-it-costs-little"),
    ],
)
def test_prompts_of_a_length_that_stalls_a_busy_engine_go_elsewhere(
    prompt_tokens: int, seqs: int, first: str
) -> None:
    tpu = backend("light-0", quirks=("context_2k_stall",))
    # The other one is slower, by as much as 6 sequences are worth.
    views = fleet(view(tpu, seqs=seqs), view(backend("light-1", tokens_per_s=95.0), seqs=seqs))
    asked = Demand(seqs=1, prompt_tokens=prompt_tokens, total_tokens=3_000)

    assert ranked(views, asked)[0] == first
    assert ranked({"light-0": views["light-0"], "push": views["push"]}, asked)[0] == "light-0"
    assert ranked(views, asked, weights=Weights(slow_context=0))[0] == "light-0"


@pytest.mark.parametrize(
    ("weights", "first"),
    [(Weights(prefix_affinity=0), "light-0"), (Weights(spare_knee=0, prefix_affinity=1), "light-1")],
    ids=["affinity-off", "affinity-only"],
)
def test_weights_come_from_the_policy(weights: Weights, first: str) -> None:
    views = fleet(view(backend("light-1"), seqs=40, prefix_share=0.5))

    assert ranked(views, weights=weights)[0] == first


def test_a_backend_nobody_has_probed_is_the_last_of_its_pool() -> None:
    assert ranked(fleet(view(backend("light-0", model="gemma"), status=BackendStatus()))) == [
        "light-1",
        "light-0",
        "push",
    ]


KV = Capacity(
    context_tokens=32_768,
    knee=(KneeStep(None, 64),),
    kv=KvFormula(sliding_layers=0, global_layers=1),
    kv_blocks=1_000,
    kv_budget=0.9,
)


@pytest.mark.parametrize(
    ("subject", "demand", "reason", "detail"),
    [
        pytest.param(
            view(backend("light-0")),
            Demand(seqs=1, prompt_tokens=32_000, total_tokens=33_024),
            Exclusion.CONTEXT_EXCEEDED,
            "needs 33024 tokens, holds 32768",
            id="context",
        ),
        pytest.param(
            view(backend("light-0"), status=replace(UP, context_tokens=1_999)),
            SHORT,
            Exclusion.CONTEXT_EXCEEDED,
            "needs 2000 tokens, holds 1999",
            id="the-engine-reports-a-smaller-window",
        ),
        pytest.param(
            view(backend("light-0"), status=replace(UP, context_tokens=262_144)),
            Demand(seqs=1, prompt_tokens=32_000, total_tokens=33_024),
            Exclusion.CONTEXT_EXCEEDED,
            "needs 33024 tokens, holds 32768",
            id="the-engine-reports-a-larger-window",
        ),
        pytest.param(
            view(backend("light-0", KV)),
            Demand(seqs=1, prompt_tokens=30_000, total_tokens=30_000),
            Exclusion.KV_EXCEEDED,
            "needs 938 KV blocks, holds 900",
            id="kv",
        ),
        pytest.param(
            view(backend("light-0")),
            Demand(seqs=65, prompt_tokens=10, total_tokens=20),
            Exclusion.SEQS_EXCEEDED,
            "wants 65 sequences, knee 64",
            id="choices",
        ),
        pytest.param(
            view(backend("light-0")),
            replace(SHORT, images=1),
            Exclusion.MODALITY,
            "takes no images",
            id="text-only",
        ),
        pytest.param(
            view(backend("light-0", modalities=Modalities(images_max=4))),
            replace(SHORT, images=5),
            Exclusion.MODALITY,
            "takes 4 images, not 5",
            id="too-many-images",
        ),
        pytest.param(
            view(backend("light-0", modalities=Modalities(images_max=None))),
            replace(SHORT, audios=1),
            Exclusion.MODALITY,
            "takes no audio",
            id="no-audio",
        ),
        pytest.param(
            view(backend("light-0", drain=True)),
            SHORT,
            Exclusion.DRAINING,
            "drained by the operator",
            id="drain",
        ),
        pytest.param(
            view(backend("light-0"), status=BackendStatus(state=State.DRAINING)),
            SHORT,
            Exclusion.DRAINING,
            "the engine is stopping",
            id="engine-drains",
        ),
        pytest.param(
            view(backend("light-0"), status=BackendStatus(state=State.DRAINING, reason="answers 503")),
            SHORT,
            Exclusion.DRAINING,
            "answers 503",
            id="engine-drains-and-says-why",
        ),
        pytest.param(
            view(backend("light-0"), status=BackendStatus(state=State.EJECTED, reason="3 failures")),
            SHORT,
            Exclusion.UNHEALTHY,
            "ejected: 3 failures",
            id="ejected",
        ),
        pytest.param(
            view(backend("light-0"), status=replace(UP, is_asleep=True, reason="its engine sleeps")),
            SHORT,
            Exclusion.UNHEALTHY,
            "asleep: its engine sleeps",
            id="asleep",
        ),
        pytest.param(
            view(backend("light-0"), seqs=2, status=replace(UP, state=State.PROBATION)),
            SHORT,
            Exclusion.AT_KNEE,
            "probation: a few requests at a time until they succeed",
            id="full-for-its-probation",
        ),
        pytest.param(
            view(backend("light-0", model="gemma"), status=replace(UP, served_models=("qwen",))),
            SHORT,
            Exclusion.WRONG_MODEL,
            "serves qwen, not gemma",
            id="another-model",
        ),
        pytest.param(
            view(backend("light-0"), status=replace(UP, served_models=("a", "b"))),
            SHORT,
            Exclusion.WRONG_MODEL,
            "serves a, b: set `model` to choose one",
            id="ambiguous-model",
        ),
        pytest.param(
            view(backend("light-0"), status=BackendStatus(state=State.UP)),
            SHORT,
            Exclusion.NOT_ASKED,
            "the name of the model it serves is not known yet",
            id="model-not-known-yet",
        ),
        pytest.param(
            view(backend("light-0"), status=BackendStatus(state=State.UP, model_error="cannot tell")),
            SHORT,
            Exclusion.WRONG_MODEL,
            "cannot tell",
            id="model-not-to-be-known",
        ),
        pytest.param(
            view(backend("light-0"), seqs=64),
            SHORT,
            Exclusion.AT_KNEE,
            "64 in flight, 100% of its knee",
            id="full",
        ),
        pytest.param(
            replace(view(backend("light-0"), seqs=4), seqs_max=4),
            SHORT,
            Exclusion.AT_KNEE,
            "4 in flight, and with no more it has refused this request",
            id="has-refused-it",
        ),
        pytest.param(
            BackendView(backend=backend("light-0", KV), load=Load(kv_blocks=850), status=UP),
            SHORT,
            Exclusion.KV_FULL,
            "850 of 900 KV blocks taken",
            id="kv-full",
        ),
    ],
)
def test_every_exclusion_says_why(
    subject: BackendView, demand: Demand, reason: Exclusion, detail: str
) -> None:
    assert why_not(fleet(subject), "light-0", demand) == (reason, detail)


@pytest.mark.parametrize(
    ("takes", "running", "may_start"),
    [(4, 4, False), (4, 3, True), (0, 0, False), (UNLIMITED, 60, True)],
)
@pytest.mark.parametrize("seqs", [1, 3])
def test_one_that_has_refused_a_request_takes_it_once_fewer_run_there(
    takes: int, running: int, may_start: bool, seqs: int
) -> None:
    views = fleet(replace(view(backend("light-0"), running), takes=takes))
    seen = selection.with_refusals(views, ["light-0", "gone"])
    assert ("light-0" in ranked(seen, replace(SHORT, seqs=seqs))) == may_start
    assert "light-0" in ranked(views, replace(SHORT, seqs=seqs))


def test_a_server_of_several_models_takes_requests_for_the_one_that_is_configured() -> None:
    serving = replace(UP, served_models=("qwen", "gemma"))
    assert ranked(fleet(view(backend("light-0", model="gemma"), status=serving)))[0] == "light-0"


@pytest.mark.parametrize(
    ("fields", "status", "reason"),
    [
        pytest.param({}, UP, None, id="up"),
        pytest.param({}, replace(UP, state=State.PROBATION), None, id="probation"),
        pytest.param({}, BackendStatus(), Exclusion.UNHEALTHY, id="not-probed"),
        pytest.param({"drain": True}, UP, Exclusion.DRAINING, id="drained"),
        pytest.param({}, BackendStatus(state=State.DOWN), Exclusion.UNHEALTHY, id="down"),
        pytest.param({}, replace(UP, is_asleep=True), Exclusion.UNHEALTHY, id="asleep"),
        pytest.param({"model": "qwen"}, UP, Exclusion.WRONG_MODEL, id="another-model"),
        pytest.param({"versions": bounds(">=0.32")}, UP, Exclusion.WRONG_VERSION, id="no-version"),
    ],
)
def test_a_backend_that_gets_no_request_at_all_says_why(
    fields: dict[str, Any], status: BackendStatus, reason: Exclusion | None
) -> None:
    found = selection.unavailable_reason(backend("light-0", **fields), status)
    assert (None if found is None else found[0]) is reason


TRIED = replace(UP, state=State.EJECTED)


@pytest.mark.parametrize(
    ("fields", "status", "is_ready"),
    [
        pytest.param({}, UP, True, id="up"),
        pytest.param({}, BackendStatus(), False, id="not-probed"),
        pytest.param({}, TRIED, True, id="ejected"),
        pytest.param({}, replace(TRIED, probe_fault=ProbeFault.STATUS), True, id="unwell-by-its-own-word"),
        pytest.param({}, replace(TRIED, trials_failed=(0.0, 0.0, 0.0)), True, id="resting-between-trials"),
        pytest.param({}, replace(TRIED, probe_fault=ProbeFault.TIMEOUT), False, id="silent"),
        pytest.param({}, replace(TRIED, is_shunned=True), False, id="ejected-here-only"),
        pytest.param({"drain": True}, TRIED, False, id="drained"),
        pytest.param({"model": "qwen"}, TRIED, False, id="another-model"),
        pytest.param({}, replace(UP, state=State.HUNG), False, id="hung"),
    ],
)
def test_a_gateway_is_ready_while_a_backend_gets_requests_as_it_does_from_others(
    fields: dict[str, Any], status: BackendStatus, is_ready: bool
) -> None:
    assert selection.makes_ready(backend("light-0", **fields), status) is is_ready


def test_what_a_backend_could_take_if_it_were_idle() -> None:
    assert selection.could_take(backend("light-0"), SHORT)
    assert not selection.could_take(backend("light-0"), replace(SHORT, total_tokens=32_769))
    assert not selection.could_take(backend("light-0"), replace(SHORT, images=1))


def test_what_was_tried_for_this_request_is_out() -> None:
    candidates = selection.rank(policy(), CHAT, SHORT, fleet(), failed=frozenset({"light-0"}))

    assert [candidate.backend for candidate in candidates if candidate.excluded is None] == [
        "light-1",
        "push",
    ]
    assert candidates[-1].excluded is Exclusion.FAILED


def test_a_backend_that_left_the_configuration_is_left_out() -> None:
    views = {name: view for name, view in fleet().items() if name != "light-0"}

    assert ranked(views) == ["light-1", "push"]


def test_what_a_backend_that_left_has_seen_of_a_conversation_counts_no_more() -> None:
    views = selection.with_shares(fleet(), {"light-1": 0.5, "gone": 0.9})

    assert {name: one.prefix_share for name, one in views.items()} == {
        "light-0": 0.0,
        "light-1": 0.5,
        "push": 0.0,
    }


def test_a_backend_in_two_pools_is_considered_once() -> None:
    twice = Policy(
        models=(),
        pools={"light": Pool("light", ("light-0",)), "push": Pool("push", ("light-0", "push"))},
        backends={},
    )

    candidates = selection.rank(twice, CHAT, SHORT, fleet())

    assert [(candidate.pool, candidate.backend) for candidate in candidates] == [
        ("light", "light-0"),
        ("push", "push"),
    ]


REASONING = TrafficClass("reasoning", ("light",), When(reasoning=True))
QUICK = TrafficClass("quick", ("push",), When(reasoning=False))
LIGHT = TrafficClass("light", ("light",))


@pytest.mark.parametrize(
    ("classes", "name", "tokens"),
    [
        pytest.param([LIGHT], "gemma-4", 32_768, id="one-class"),
        pytest.param([CHAT], "gemma-4", 262_144, id="where-it-spills-to"),
        pytest.param([REASONING, CHAT], "gemma-4", 262_144, id="the-class-that-holds-most"),
        pytest.param([LIGHT, CHAT], "gemma-4", 32_768, id="behind-one-that-takes-all"),
        pytest.param([REASONING, CHAT], "gemma-4-thinking", 32_768, id="a-name-that-asks-for-a-thought"),
        pytest.param([QUICK, LIGHT], "gemma-4-thinking", 32_768, id="not-where-none-is-asked-for"),
        pytest.param([CHAT], "gpt-5", 0, id="no-model"),
    ],
)
def test_a_name_has_the_largest_window_that_its_requests_may_get(
    classes: list[TrafficClass], name: str, tokens: int
) -> None:
    backends = {one.id: one for one in (backend("light-0"), backend("light-1"), backend("push", LARGE))}
    models = (ModelPolicy("gemma-4", tuple(classes), reasoning_aliases=("gemma-4-thinking",)),)

    subject = replace(policy(), models=models, backends=backends)
    assert subject.context_tokens(name, lambda backend: backend.capacity.context_tokens) == tokens


def test_a_ranking_keeps_every_candidate_with_its_scores() -> None:
    views = fleet(view(backend("light-0"), status=BackendStatus(state=State.DOWN, reason="refused")))

    ranking = selection.ranking(policy(), CHAT, SHORT, views)

    assert [candidate.backend for candidate in ranking.eligible] == ["light-1", "push"]
    assert [candidate.backend for candidate in ranking] == ["light-1", "push", "light-0"]
    assert ranking[0].scores == {
        "spare_knee": pytest.approx(1 - 1 / 64),
        "speed": 1.0,
        "prefix_affinity": 0.0,
        "prefill_saved_s": 0.0,
        "slow_context": 0.0,
    }
    assert ranking[0].score == pytest.approx(2 - 1 / 64)


def test_what_a_backend_has_seen_scores_with_the_prefill_that_it_saves() -> None:
    views = fleet(view(backend("light-1", LARGE, perf=MEASURED), prefix_share=0.75))
    asked = Demand(seqs=1, prompt_tokens=20_000, total_tokens=21_000)

    (first, *_) = selection.ranking(policy(), CHAT, asked, views)

    assert (first.backend, first.scores["prefix_affinity"]) == ("light-1", 0.75)
    assert first.scores["prefill_saved_s"] == pytest.approx(1.5)
    assert first.score == pytest.approx(2 - 1 / 64 + 0.2 * (0.75 + 1.5))


def unscored(candidate: Candidate) -> Candidate:
    """Return a candidate as the first of a ranking is known before the others."""
    return replace(candidate, scores={}, score=0.0)


# ------------------------------------------------------------------ gates and spill

GATED = Policy(
    models=(),
    pools={
        "light": Pool("light", ("light-0", "light-1"), gates=Gates(long_prefills=0, prefill_s=0.6)),
        "push": Pool("push", ("push",), gates=Gates(long_seqs=4), spill=Spill(reserve=0.25, prefill_s=0.5)),
    },
    backends={},
)
PUSH = Capacity(context_tokens=262_144, knee=(KneeStep(16_000, 64), KneeStep(None, 16)))
DOCUMENT = Demand(seqs=1, prompt_tokens=20_000, total_tokens=21_000)
COUNTED = backend(
    "light-0",
    replace(SMALL, kv=KvFormula(sliding_layers=0, global_layers=1), kv_blocks=2_000, kv_budget=0.9),
)
ANY = TrafficClass("any", ("light", "push"))
DOCUMENTS = TrafficClass("long_document", ("push",))


def busy(name: str, load: Load, *, long_waiting: int = 0, share_max: int = admission.WHOLE) -> BackendView:
    subject = backend(name, PUSH if name == "push" else SMALL, perf=MEASURED)
    return BackendView(subject, load, UP, share_max=share_max, long_waiting=long_waiting)


def objection(
    traffic_class: TrafficClass, demand: Demand, *views: BackendView
) -> tuple[Exclusion | None, str]:
    everything = {"push": busy("push", Load())} | dict(fleet(*views))
    candidates = selection.rank(GATED, traffic_class, demand, everything)
    found = next(one for one in candidates if one.backend == views[-1].backend.id)
    return found.excluded, found.detail


@pytest.mark.parametrize(
    ("traffic_class", "demand", "subject", "reason", "detail"),
    [
        pytest.param(
            ANY,
            DOCUMENT,
            busy("light-0", load(1)),
            Exclusion.LONG_PREFILL,
            "1 in flight; a long prompt starts there only when none are",
            id="no-document-beside-chats",
        ),
        pytest.param(ANY, DOCUMENT, busy("light-0", Load()), None, "", id="a-document-where-nothing-runs"),
        pytest.param(
            ANY,
            SHORT,
            busy("light-0", Load(seqs=3, prefill_ms=600)),
            Exclusion.PREFILL_BUSY,
            "0.6 s of prompt work outstanding",
            id="prompt-work",
        ),
        pytest.param(
            DOCUMENTS,
            DOCUMENT,
            busy("push", Load(seqs=1, long_seqs=1, long_unanswered=1)),
            Exclusion.LONG_PREFILL,
            "1 of 1 long prompts being read",
            id="one-at-a-time",
        ),
        pytest.param(
            DOCUMENTS,
            DOCUMENT,
            busy("push", Load(seqs=4, long_seqs=4)),
            Exclusion.LONG_FULL,
            "4 long prompts in flight of 4",
            id="cap",
        ),
        pytest.param(
            DOCUMENTS,
            SHORT,
            busy("push", Load(seqs=1, long_seqs=1, long_unanswered=1)),
            None,
            "",
            id="own-class-beside-a-long-prompt",
        ),
        pytest.param(
            ANY,
            SHORT,
            busy("push", Load(seqs=1, long_seqs=1, long_unanswered=1)),
            Exclusion.SPILL_LONG,
            "it is prefilling a long prompt",
            id="spill-beside-a-long-prompt",
        ),
        pytest.param(
            ANY,
            SHORT,
            busy("push", Load(), long_waiting=2),
            Exclusion.SPILL_LONG,
            "2 long prompts wait for it",
            id="spill-before-a-long-prompt",
        ),
        pytest.param(
            ANY, SHORT, busy("push", Load(prefill_ms=499)), None, "", id="spill-beside-a-little-prompt-work"
        ),
        pytest.param(
            ANY,
            SHORT,
            busy("push", Load(prefill_ms=500)),
            Exclusion.SPILL_PREFILL,
            "0.5 s of prompt work outstanding",
            id="spill-beside-prompt-work",
        ),
        pytest.param(ANY, SHORT, busy("push", load(47)), None, "", id="spill-up-to-the-reserve"),
        pytest.param(
            ANY,
            SHORT,
            busy("push", load(48)),
            Exclusion.SPILL_RESERVE,
            "75% of its knee, 25% is kept for its own class",
            id="spill-into-the-reserve",
        ),
        pytest.param(
            ANY,
            SHORT,
            busy("push", replace(load(48), long_seqs=1)),
            None,
            "",
            id="a-document-uses-its-part-of-the-reserve",
        ),
        pytest.param(
            ANY, SHORT, busy("push", load(64)), Exclusion.AT_KNEE, "64 in flight, 100% of its knee", id="full"
        ),
        pytest.param(
            ANY,
            SHORT,
            busy("light-0", load(32), share_max=admission.WHOLE // 2),
            Exclusion.AT_KNEE,
            "32 in flight, 50% of its knee; the TPOT target allows 50%",
            id="a-target-for-tpot-holds-it-lower",
        ),
        pytest.param(
            ANY,
            replace(SHORT, is_job=True),
            busy("light-0", load(56)),
            Exclusion.AT_KNEE,
            "56 in flight, 88% of its knee; jobs may use 88%",
            id="jobs-leave-a-reserve",
        ),
        pytest.param(
            ANY,
            replace(SHORT, is_job=True),
            busy("light-0", load(28), share_max=admission.WHOLE // 2),
            Exclusion.AT_KNEE,
            "28 in flight, 44% of its knee; the TPOT target allows 50%; jobs may use 44%",
            id="of-what-a-target-allows",
        ),
        pytest.param(
            ANY,
            SHORT,
            replace(busy("light-0", Load(seqs=4, kv_blocks=500)), backend=COUNTED, kv_taken=1_300),
            Exclusion.KV_FULL,
            "500 of 500 KV blocks taken, 1300 more by others",
            id="what-others-hold-is-not-given-out",
        ),
    ],
)
def test_gates_and_spill(
    traffic_class: TrafficClass, demand: Demand, subject: BackendView, reason: Exclusion | None, detail: str
) -> None:
    assert objection(traffic_class, demand, subject) == (reason, detail)


def test_a_document_spills_beside_one_that_is_being_read_where_two_may_be() -> None:
    two = Pool("push", ("push",), gates=Gates(long_prefills=2))
    gated = replace(GATED, pools={**GATED.pools, "push": two})
    reading = busy("push", Load(seqs=1, long_seqs=1, long_unanswered=1))
    full = {name: busy(name, load(64)) for name in ("light-0", "light-1")}
    found = selection.rank(gated, ANY, DOCUMENT, {**full, "push": reading})
    assert [(one.backend, one.is_spill) for one in found if one.excluded is None] == [("push", True)]


READING = busy("push", Load(seqs=1, long_seqs=1, long_unanswered=1, prefill_ms=9_000), long_waiting=1)


def in_state(name: str, state: State) -> BackendView:
    return replace(busy(name, Load()), status=replace(UP, state=state))


@pytest.mark.parametrize(
    ("lights", "excluded"),
    [
        pytest.param(
            [in_state("light-0", State.EJECTED), in_state("light-1", State.BOOTING)], None, id="out"
        ),
        pytest.param(
            [replace(busy(n, Load()), backend=backend(n, SMALL, drain=True)) for n in ("light-0", "light-1")],
            None,
            id="drained",
        ),
        pytest.param(
            [in_state("light-0", State.EJECTED), busy("light-1", load(64))],
            Exclusion.SPILL_LONG,
            id="one-is-only-full",
        ),
        pytest.param(
            [
                in_state("light-0", State.EJECTED),
                replace(busy("light-1", Load()), away=(Exclusion.SWAPPED_OUT, "another model")),
            ],
            Exclusion.SPILL_LONG,
            id="one-will-be-back",
        ),
    ],
)
def test_where_no_earlier_pool_takes_it_a_request_need_not_keep_out_of_the_way_of_long_prompts(
    lights: list[BackendView], excluded: Exclusion | None
) -> None:
    views = {"push": READING} | {one.backend.id: one for one in lights}

    found = {one.backend: one for one in selection.rank(GATED, ANY, SHORT, views)}
    first = selection.ranking(GATED, ANY, SHORT, views).first

    assert (found["push"].excluded, found["push"].is_spill) == (excluded, True)
    assert (None if first is None else first.backend) == ("push" if excluded is None else None)
    if first is not None:
        assert first == unscored(found["push"])


def test_where_no_earlier_pool_takes_it_a_request_leaves_the_reserve_free_all_the_same() -> None:
    lights = {name: in_state(name, State.EJECTED) for name in ("light-0", "light-1")}

    for seqs, excluded in ((47, None), (48, Exclusion.SPILL_RESERVE)):
        push = busy("push", replace(load(seqs), prefill_ms=9_000), long_waiting=1)
        found = selection.rank(GATED, ANY, SHORT, lights | {"push": push})
        assert [one.excluded for one in found if one.backend == "push"] == [excluded]


def test_a_candidate_carries_what_the_ledger_checks() -> None:
    views = {name: busy(name, load(10)) for name in ("light-0", "light-1", "push")}

    light, _, push = selection.rank(GATED, ANY, SHORT, views)

    assert (light.is_spill, push.is_spill) == (False, True)
    assert light.claim.prefill_ms == 100
    assert light.limits.prefill_ms == 599 + 100
    assert (light.limits.share, push.limits.share) == (admission.WHOLE, 750_000)


def test_a_backend_in_probation_takes_no_more_than_it_may_even_at_once() -> None:
    subject = replace(busy("light-0", load(1)), status=replace(UP, state=State.PROBATION))
    candidates = selection.rank(GATED, ANY, SHORT, {**fleet(), "light-0": subject})
    found = next(one for one in candidates if one.backend == "light-0")

    assert admission.full(load(1), found.claim, found.limits) is None
    assert admission.full(load(2), found.claim, found.limits) is Exclusion.AT_KNEE


@pytest.mark.parametrize(("reserve", "most"), [(0.125, 1), (0.0, 2)])
def test_a_job_leaves_room_on_a_backend_in_probation_for_who_waits(reserve: float, most: int) -> None:
    subject = replace(busy("light-0", load(0)), status=replace(UP, state=State.PROBATION))
    pool = replace(policy().pools["light"], jobs=JobRoom(reserve=reserve))

    assert selection.consider(replace(SHORT, is_job=True), subject, pool).limits.seqs == most
    assert selection.consider(SHORT, subject, pool).limits.seqs == 2


def test_a_backend_whose_machine_runs_another_model_is_worth_waiting_for() -> None:
    away = (Exclusion.SWAPPED_OUT, "its model is out; qwen is resident")
    out = replace(view(backend("light-0"), status=BackendStatus(state=State.DOWN)), away=away)

    assert why_not(fleet(out), "light-0") == away
    assert away[0].is_busy
    assert not away[0].is_permanent


def test_what_never_fits_is_said_even_while_the_model_is_out() -> None:
    away = (Exclusion.SWAPPED_OUT, "its model is out")
    beyond = replace(SHORT, total_tokens=40_000)
    excluded, _ = why_not(fleet(replace(view(backend("light-0")), away=away)), "light-0", beyond)
    assert excluded is Exclusion.CONTEXT_EXCEEDED


@pytest.mark.parametrize(
    ("status", "detail"),
    [
        pytest.param(replace(UP, version="0.23.4"), None, id="allowed"),
        pytest.param(replace(UP, version="0.24.0"), "engine version 0.24.0, not < 0.24", id="too-new"),
        pytest.param(UP, "the engine does not report its version", id="silent"),
        pytest.param(
            replace(UP, served_models=()), "its engine's version is not known yet", id="not-asked-yet"
        ),
    ],
)
def test_an_engine_of_a_wrong_version_gets_no_traffic(status: BackendStatus, detail: str | None) -> None:
    subject = backend("light-0", versions=bounds(">= 0.20, < 0.24"), model="gemma")

    found = why_not(fleet(view(subject, status=status)), "light-0")
    reason = Exclusion.WRONG_VERSION if status.served_models else Exclusion.NOT_ASKED
    assert found == ((None, "") if detail is None else (reason, detail))
    assert not Exclusion.WRONG_VERSION.is_busy


# ------------------------------------------------------------------ mostly nothing objects


def mostly(usual: T, *others: T) -> st.SearchStrategy[T]:
    """Of all that may be odd about a case, one or two things are."""
    return st.sampled_from([usual] * 9 * max(1, len(others)) + list(others))


LOADS = st.builds(
    Load,
    seqs=st.integers(0, 3),
    share=mostly(0, 500_000, 750_000, 999_999, admission.WHOLE),
    kv_blocks=mostly(0, 1_700, 1_800, 2_000),
    long_seqs=mostly(0, 1, 2),
    long_unanswered=mostly(0, 1, 2),
    prefill_ms=mostly(0, 499, 500, 600, 10_000),
)
STATUSES = st.builds(
    BackendStatus,
    state=mostly(State.UP, *State),
    served_models=mostly(("gemma",), (), ("other",), ("gemma", "other")),
    version=st.sampled_from([None, "0.19.0"]),
    context_tokens=mostly(None, 1_300, 40_000),
)
VIEWS = st.builds(
    BackendView,
    st.builds(
        lambda **fields: backend("light-0", **fields),
        capacity=st.sampled_from([SMALL, COUNTED.capacity, replace(SMALL, knee=(KneeStep(None, 1_500),))]),
        model=mostly("gemma", None),
        drain=mostly(False, True),
        perf=st.sampled_from([None, MEASURED]),
        modalities=st.sampled_from([Modalities(), Modalities(images_max=0, audios_max=1)]),
        versions=mostly((), bounds(">=0.20")),
    ),
    LOADS,
    STATUSES,
    prefix_share=mostly(0.0, 0.5),
    share_max=mostly(admission.WHOLE, 500_000),
    kv_taken=mostly(0, 1_800, 3_000),
    seqs_taken=mostly(0, 20, 90),
    long_waiting=mostly(0, 1),
    away=mostly(None, (Exclusion.SWAPPED_OUT, "another model")),
    refuses=mostly(False, True),
    seqs_max=mostly(UNLIMITED, 1, 2, 3),
)
DEMANDS = st.builds(
    Demand,
    seqs=mostly(1, 2, 65, 1_501),
    prompt_tokens=st.sampled_from([10, 1_000, 20_000]),
    total_tokens=mostly(1_400, 21_000, 60_000),
    images=mostly(0, 1),
    audios=mostly(0, 1),
)
POOLS = st.builds(
    Pool,
    st.just("light"),
    st.just(("light-0",)),
    gates=st.builds(
        Gates,
        long_seqs=st.sampled_from([None, 1]),
        long_prefills=st.sampled_from([None, 0, 1]),
        prefill_s=st.sampled_from([None, 0.6]),
    ),
    spill=st.builds(Spill, reserve=st.sampled_from([0, 0.25]), prefill_s=st.sampled_from([None, 0.5])),
)


@settings(max_examples=350)
@given(DEMANDS, VIEWS, POOLS, st.booleans())
def test_nothing_objects_to_what_is_clear(
    demand: Demand, subject: BackendView, pool: Pool, is_spill: bool
) -> None:
    case = selection.consider(demand, subject, pool, is_spill=is_spill)

    if selection.is_clear(case):
        assert [rule for rule in selection.FILTERS if rule(case)] == []


@pytest.mark.parametrize("model", ["gemma", None])
def test_an_ordinary_request_is_clear_also_as_a_spill(model: str | None) -> None:
    pool, subject = policy().pools["light"], view(backend("light-0", model=model), 3)

    assert selection.is_clear(selection.consider(SHORT, subject, pool))
    assert selection.is_clear(selection.consider(SHORT, subject, pool, is_spill=True))


# ------------------------------------------------------------------ the first of all

SEVERAL = st.tuples(VIEWS, VIEWS, VIEWS, VIEWS)
RATES = st.tuples(*[st.sampled_from([None, 10.0, 40.0])] * 4)


def named(views: tuple[BackendView, ...], rates: tuple[float | None, ...]) -> dict[str, BackendView]:
    return {
        name: replace(one, backend=replace(one.backend, id=name, tokens_per_s=rate))
        for name, one, rate in zip(("a", "b", "c", "d"), views, rates, strict=True)
    }


@pytest.mark.parametrize(
    ("asked", "free"),
    [
        pytest.param(DOCUMENT, ["light-1"], id="text"),
        # One picture may be most of the bytes, and few of the tokens.
        pytest.param(replace(DOCUMENT, images=1), [], id="with-a-picture"),
        pytest.param(replace(DOCUMENT, audios=1), [], id="with-a-recording"),
    ],
)
def test_a_long_conversation_starts_beside_others_where_it_is_cached(asked: Demand, free: list[str]) -> None:
    sees = Modalities(images_max=None, audios_max=None)
    seen = {
        name: view(backend(name, modalities=sees), 1, prefix_share=share)
        for name, share in (("light-0", 0.0), ("light-1", 1.0))
    }
    light = TrafficClass("chat", ("light",))

    assert [one.backend for one in selection.rank(GATED, light, asked, seen) if not one.excluded] == free


WELL = BackendView(
    backend("light-0", model="gemma", capacity=COUNTED.capacity),
    Load(),
    BackendStatus(state=State.UP, served_models=("gemma",)),
)
"""A replica that is well."""

ODD: Mapping[str, Callable[[BackendView], BackendView]] = {
    "limited": lambda one: replace(one, share_max=500_000),
    "taken": lambda one: replace(one, kv_taken=1_800),
    "used by others": lambda one: replace(one, seqs_taken=20),
    "filled by others": lambda one: replace(one, seqs_taken=90),
    "away": lambda one: replace(one, away=(Exclusion.SWAPPED_OUT, "another model")),
    "refuses": lambda one: replace(one, refuses=True),
    "has refused": lambda one: replace(one, seqs_max=1),
    "narrow": lambda one: replace(one, status=replace(one.status, context_tokens=1_300)),
    "other model": lambda one: replace(one, status=replace(one.status, served_models=("other",))),
    "on trial": lambda one: replace(one, status=replace(one.status, state=State.PROBATION)),
    "unknown": lambda one: replace(one, status=replace(one.status, state=State.UNKNOWN)),
    "ejected": lambda one: replace(one, status=replace(one.status, state=State.EJECTED)),
    "drained": lambda one: replace(one, backend=replace(one.backend, drain=True)),
    "quick": lambda one: replace(one, backend=replace(one.backend, tokens_per_s=99.0)),
    "wide": lambda one: replace(one, backend=replace(one.backend, capacity=SMALL)),
}
SHARES = st.sampled_from([0, 15_625, 31_250, 499_999, 500_000, 984_375, 1_000_000])


def replicas(
    odd: tuple[str | None, ...], shares: tuple[int, ...], prefixes: tuple[float, ...]
) -> dict[str, BackendView]:
    """Return replicas with loads, some of which stand otherwise."""
    found = {}
    for name, what, share, prefix in zip("abcd", odd, shares, prefixes, strict=True):
        one = replace(WELL, load=Load(seqs=share // 15_625, share=share), prefix_share=prefix)
        one = one if what is None else ODD[what](one)
        found[name] = replace(one, backend=replace(one.backend, id=name))
    return found


REPLICAS = st.builds(
    replicas,
    st.tuples(*[st.sampled_from([None] * 2 * len(ODD) + list(ODD))] * 4),
    st.tuples(*[SHARES] * 4),
    st.tuples(*[st.sampled_from([0.0, 0.0, 0.5])] * 4),
)
FLEETS = st.one_of(st.builds(named, SEVERAL, RATES), REPLICAS, REPLICAS)
WEIGHTS = st.builds(
    Weights,
    spare_knee=st.sampled_from([0.0, 1e-12, 0.5, 1.0]),
    speed=st.sampled_from([0.0, 0.2, 1e6]),
    prefix_affinity=st.sampled_from([0.0, 0.6]),
    slow_context=st.sampled_from([0.0, 0.3]),
)


@settings(max_examples=400)
@example(
    demand=SHORT,
    views=replicas((None,) * 4, (500_000, 0, 0, 499_999), (0.5, 0.0, 0.0, 0.5)),
    pool=Pool("light", ("light-0",)),
    of_first=4,
    weights=Weights(spare_knee=1e-12, speed=0.0, prefix_affinity=0.6),  # in their sum, both have the same
    changed=frozenset(),
)
@example(  # others fill all: none of their knee is free
    demand=SHORT,
    views=replicas(("filled by others",) * 4, (500_000, 31_250, 15_625, 15_625), (0.0,) * 4),
    pool=Pool("light", ("light-0",)),
    of_first=4,
    weights=Weights(),
    changed=frozenset(),
)
@given(
    st.one_of(DEMANDS, st.just(SHORT), st.just(SHORT)),
    FLEETS,
    POOLS,
    st.sampled_from([4, 4, 4, 2, 1, 0]),
    WEIGHTS,
    mostly(frozenset(), *(frozenset(name) for name in "abcd")),
)
def test_who_comes_first_is_known_without_the_others(
    demand: Demand,
    views: dict[str, BackendView],
    pool: Pool,
    of_first: int,
    weights: Weights,
    changed: frozenset[str],
) -> None:
    names = tuple(views)
    pools = {
        "one": replace(pool, id="one", backends=names[:of_first]),
        "two": replace(pool, id="two", backends=names),
    }
    # What is decided with need not be what is configured: a question may be asked of another fleet.
    backends = {name: one.backend for name, one in views.items()}
    views |= {name: replace(views[name], backend=replace(backends[name], drain=True)) for name in changed}
    policy = Policy((), pools, backends, weights)
    ranked = selection.rank(policy, BOTH, demand, views)

    ranking = selection.ranking(policy, BOTH, demand, views)

    assert tuple(ranking) == ranked
    assert ranking.first == next((unscored(one) for one in ranked if one.excluded is None), None)
    looked_at = (
        {one.pool for one in ranked} if ranking.first is None or ranking.first.pool == "two" else {"one"}
    )
    assert ranking.passed_over == tuple(
        (one.backend, one.excluded) for one in ranked if one.excluded is not None and one.pool in looked_at
    )


@settings(max_examples=250)
@given(DEMANDS, VIEWS, VIEWS, POOLS, st.booleans())
def test_what_is_known_of_one_replica_is_what_would_be_found_of_the_other(
    demand: Demand, one: BackendView, other: BackendView, pool: Pool, is_spill: bool
) -> None:
    before = selection.consider(demand, one, pool, is_spill=is_spill)

    for view in (other, replace(other, backend=one.backend), replace(one, load=other.load)):
        assert selection.consider(demand, view, pool, is_spill=is_spill, before=before) == selection.consider(
            demand, view, pool, is_spill=is_spill
        )


BOTH = TrafficClass("both", ("one", "two"))
