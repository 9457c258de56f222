"""What is decided of a request beside its class and its backend: whether its model's name has it reason."""

from dataclasses import replace
from typing import Any

import pytest
from support.engine_events import Asked

from gateway.core import deciding
from gateway.core.backends import Backend, Capacity, KneeStep, Pool
from gateway.core.errors import ModelNotFound, UpstreamUnreachable
from gateway.core.policy import ModelPolicy, Policy, TrafficClass
from gateway.core.request import Endpoint, Prompt, Request

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
