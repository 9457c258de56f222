"""What is decided of a request beside its class and its backend: if it reasons, what output is planned."""

from dataclasses import replace
from typing import Any

import pytest
from support.engine_events import Asked

from gateway.core import admission, deciding
from gateway.core.backends import Backend, Capacity, KneeStep, Modalities, Pool
from gateway.core.errors import ContextExceeded, ModelNotFound, UpstreamUnreachable
from gateway.core.health import BackendStatus, State
from gateway.core.kv import KvFormula
from gateway.core.load import Load
from gateway.core.policy import ModelPolicy, Policy, TrafficClass
from gateway.core.request import CountMode, Endpoint, Estimate, Prompt, Request
from gateway.core.selection import BackendView

POLICY = Policy(
    models=(
        ModelPolicy(id="gemma-4", classes=(), reasoning_aliases=("gemma-4-thinking",)),
        ModelPolicy(id="other", classes=(), aliases=("another",)),
    ),
    backends={},
    pools={},
)


def asked(
    model: str = "gemma-4-thinking",
    *,
    endpoint: Endpoint = Endpoint.CHAT,
    reasoning: bool | None = None,
    **members: Any,
) -> Asked:
    prompt = Prompt(thinking=bool(reasoning))
    request = Request(endpoint=endpoint, model=model, prompt=prompt, reasoning=reasoning)
    return Asked(request, members)


@pytest.mark.parametrize(
    ("request_", "reasons"),
    [
        pytest.param(asked(), True, id="nothing-said"),
        pytest.param(asked(chat_template_kwargs={"level": 3}), True, id="nothing-said-of-it"),
        pytest.param(asked(reasoning=True), False, id="said"),
        pytest.param(asked(reasoning=False), False, id="said-not-to"),
        pytest.param(asked(chat_template_kwargs="yes"), False, id="what-the-engine-refuses"),
        pytest.param(asked(endpoint=Endpoint.COMPLETIONS), False, id="no-chat"),
        pytest.param(asked("gemma-4"), False, id="the-model"),
        pytest.param(asked("another"), False, id="an-alias"),
        pytest.param(asked("unknown"), False, id="no-model"),
    ],
)
def test_a_name_that_requests_reasoning(request_: Asked, reasons: bool) -> None:
    prompt = request_.request.prompt
    assert deciding.reasons_by_name(POLICY, request_) is reasons
    assert deciding.prompt_of(POLICY, request_) == Prompt(thinking=reasons or prompt.thinking)


def test_who_asks_for_a_model_that_there_is_not_is_told_the_names_that_there_are() -> None:
    names = tuple(f"m{number}" for number in range(deciding.NAMES_MAX + 1))
    many = replace(POLICY, models=(ModelPolicy(id=names[0], classes=(), aliases=names[1:]),))

    with pytest.raises(ModelNotFound, match=r"Known: gemma-4, gemma-4-thinking, other, another\.$"):
        deciding.model_of(POLICY, "gpt-5")
    with pytest.raises(ModelNotFound, match=rf"Known: m0, .*, {names[-2]}, \.\.\. \(see /v1/models\)$"):
        deciding.model_of(many, "gpt-5")


FORMER = Backend("light-0", "http://a", Capacity(context_tokens=4_096, knee=(KneeStep(None, 1),)))
MOVED, RENAMED = replace(FORMER, url="http://b"), replace(FORMER, model="b")


@pytest.mark.parametrize(
    ("now", "model", "expected"),
    [
        pytest.param(replace(FORMER, drain=True), None, replace(FORMER, drain=True), id="model-gone"),
        pytest.param(MOVED, "gemma-4", MOVED, id="moved"),
        pytest.param(RENAMED, "gemma-4", RENAMED, id="served-under-another-name"),
        pytest.param(MOVED, "other", None, id="moved-for-another-model"),
        pytest.param(RENAMED, "other", None, id="it-serves-another-model"),
        pytest.param(None, "gemma-4", FORMER, id="gone"),
    ],
)
def test_where_a_request_of_a_former_policy_goes(
    now: Backend | None, model: str | None, expected: Backend | None
) -> None:
    classes = (TrafficClass("short_chat", ("light",)),)
    policy = Policy(
        models=() if model is None else (ModelPolicy(model, classes), ModelPolicy("unserved", ())),
        pools={"light": Pool("light", ("light-0",))},
        backends={} if now is None else {"light-0": now},
    )
    if expected is None:
        with pytest.raises(UpstreamUnreachable):
            deciding.as_it_is_now(FORMER, policy, "gemma-4")
    else:
        assert deciding.as_it_is_now(FORMER, policy, "gemma-4") == expected


def served(name: str, tokens: int, **fields: Any) -> BackendView:
    capacity = Capacity(tokens, knee=(KneeStep(None, 4),), **fields.pop("holds", {}))
    backend = Backend(name, f"http://{name}", capacity, model="gemma", **fields)
    return BackendView(backend, Load(), BackendStatus(state=State.UP, served_models=("gemma",)))


def busy(view: BackendView) -> BackendView:
    return replace(view, load=Load(seqs=4, share=admission.WHOLE))


def out(view: BackendView, state: State = State.EJECTED) -> BackendView:
    return replace(view, status=replace(view.status, state=state))


KV = {"kv": KvFormula(sliding_layers=0, global_layers=1), "kv_budget": 1.0}
SEES = Modalities(images_max=None)
SMALL = served("small", 8_192, modalities=SEES)
LARGE = served("large", 32_768)


@pytest.mark.parametrize(
    ("views", "fields", "goes_to", "tokens"),
    [
        pytest.param([SMALL], {}, "small", 8_192, id="what-the-window-leaves"),
        pytest.param([SMALL, LARGE], {}, "large", 8_524, id="all-of-it"),
        pytest.param([SMALL, busy(LARGE)], {}, None, 8_524, id="it-waits-for-all-of-it"),
        pytest.param([SMALL, out(LARGE)], {}, "small", 8_192, id="a-larger-one-is-out"),
        pytest.param([SMALL, served("large", 32_768, drain=True)], {}, "small", 8_192, id="drained"),
        pytest.param([SMALL, LARGE], {"images": 1}, "small", 8_192, id="a-larger-one-sees-nothing"),
        pytest.param([busy(SMALL), out(LARGE)], {}, None, 8_192, id="it-waits-where-it-fits"),
        pytest.param([out(SMALL)], {}, None, 8_192, id="the-only-one-is-out"),
        pytest.param([out(SMALL), out(LARGE)], {}, None, 8_524, id="both-are-out"),
        pytest.param([out(SMALL), out(LARGE, State.DOWN)], {}, None, 8_192, id="it-may-be-tried-on-one"),
        pytest.param([out(SMALL, State.HUNG), out(LARGE, State.DOWN)], {}, None, 8_524, id="or-on-none"),
        pytest.param(
            [served("kv", 32_768, holds={**KV, "kv_blocks": 250})],
            {},
            "kv",
            8_000,
            id="what-the-cache-leaves",
        ),
        pytest.param(
            [SMALL, served("kv", 32_768, holds={**KV, "kv_blocks": 240})], {}, "small", 8_192, id="the-larger"
        ),
        pytest.param(
            [served("kv", 32_768, holds={**KV, "kv_blocks": 500})],
            {"seqs": 2, "choices": 2},
            "kv",
            8_000,
            id="what-the-cache-leaves-of-two-choices",
        ),
    ],
)
def test_what_is_planned_for_who_sets_no_limit(
    views: list[BackendView], fields: dict[str, Any], goes_to: str | None, tokens: int
) -> None:
    """7,500 tokens and 1,024 of output: nobody is refused for the output where the prompt fits."""
    fleet = {one.backend.id: one for one in views}
    pools = {"any": Pool("any", tuple(fleet))}
    model = ModelPolicy("gemma-4", (TrafficClass("chat", ("any",)),))
    policy = Policy((model,), pools, {name: one.backend for name, one in fleet.items()})
    request = Request(endpoint=Endpoint.CHAT, model="gemma-4", prompt=Prompt(), **fields)
    estimate = Estimate(7_400, 7_500, CountMode.EXACT)

    traffic_class, decision = deciding.decide(policy, model, request, estimate, lambda _: fleet)

    first = decision.candidates.first
    assert (None if first is None else first.backend) == goes_to
    assert decision.demand.total_tokens == tokens
    assert deciding.refusal(traffic_class, decision, fleet) is None


@pytest.mark.parametrize(
    ("views", "says"),
    [
        pytest.param([served("tiny", 4_096)], "needs 8524 .7500 input . 1024 output.", id="the-prompt"),
        pytest.param(
            [served("kv", 32_768, holds={**KV, "kv_blocks": 200})], "fits into no backend's cache", id="cache"
        ),
    ],
)
def test_a_prompt_that_fits_nowhere_is_refused(views: list[BackendView], says: str) -> None:
    fleet = {one.backend.id: one for one in views}
    model = ModelPolicy("gemma-4", (TrafficClass("chat", ("any",)),))
    policy = Policy((model,), {"any": Pool("any", tuple(fleet))}, {})
    request = Request(endpoint=Endpoint.CHAT, model="gemma-4", prompt=Prompt())
    estimate = Estimate(7_400, 7_500, CountMode.EXACT)

    traffic_class, decision = deciding.decide(policy, model, request, estimate, lambda _: fleet)

    with pytest.raises(ContextExceeded, match=says):
        raise deciding.refusal(traffic_class, decision, fleet) or AssertionError
