"""Which class a request is, and the reason given for it."""

import copy
import pickle
from dataclasses import asdict, replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.classification import classify, mismatch, output_tokens
from gateway.core.policy import Bound, Comparison, ModelPolicy, TrafficClass, When
from gateway.core.request import CountMode, Endpoint, Estimate, Prompt, Request

REQUEST = Request(endpoint=Endpoint.CHAT, model="gemma-4", prompt=Prompt())
MODEL = ModelPolicy(
    id="gemma-4",
    reasoning_aliases=("gemma-4-thinking",),
    classes=(
        TrafficClass("reasoning", ("reasoning",), When(reasoning=True)),
        TrafficClass("long_document", ("push",), When(prompt_tokens=(Bound(Comparison.GE, 16_000),))),
        TrafficClass("short_chat", ("light", "push")),
    ),
)


def estimate(tokens: int) -> Estimate:
    return Estimate(tokens=tokens, tokens_max=tokens, mode=CountMode.EXACT)


@pytest.mark.parametrize(
    ("request_", "tokens", "name", "reason"),
    [
        pytest.param(REQUEST, 100, "short_chat", "takes everything else", id="short"),
        pytest.param(REQUEST, 15_999, "short_chat", "takes everything else", id="below-the-threshold"),
        pytest.param(REQUEST, 16_000, "long_document", "prompt_tokens 16000 >= 16000", id="on-it"),
        pytest.param(replace(REQUEST, reasoning=True), 100, "reasoning", "reasoning is true", id="reasoning"),
        pytest.param(
            replace(REQUEST, reasoning=True), 90_000, "reasoning", "reasoning is true", id="top-first"
        ),
        pytest.param(
            replace(REQUEST, model="gemma-4-thinking"),
            100,
            "reasoning",
            "reasoning is true (model name gemma-4-thinking)",
            id="by-alias",
        ),
        pytest.param(
            replace(REQUEST, model="gemma-4-thinking", reasoning=False),
            100,
            "short_chat",
            "takes everything else",
            id="not-by-alias",
        ),
        pytest.param(
            replace(REQUEST, handed_over_as="long_document"),
            100,
            "long_document",
            "the job was accepted as one",
            id="a-job-keeps-its-class",
        ),
        pytest.param(
            replace(REQUEST, handed_over_as="gone"),
            100,
            "short_chat",
            "takes everything else",
            id="class-gone",
        ),
    ],
)
def test_the_first_class_that_matches_wins(request_: Request, tokens: int, name: str, reason: str) -> None:
    matched = classify(MODEL, request_, estimate(tokens))

    assert matched is not None
    assert (matched[0].name, matched[1]) == (name, reason)


def test_the_reason_names_every_condition_that_holds() -> None:
    when = When(
        prompt_tokens=(Bound(Comparison.GE, 100), Bound(Comparison.LT, 500)),
        tools=(Bound(Comparison.EQ, 0),),
        reasoning=False,
        stream=True,
        keys=("team-a", "team-b"),
        headers=(("x-team", ("red",)),),
    )
    model = ModelPolicy(id="m", classes=(TrafficClass("picky", ("p",), when),))
    request = replace(REQUEST, stream=True, key="team-a", headers={"x-team": "red"})

    matched = classify(model, request, estimate(100))

    assert matched is not None
    assert matched[1] == (
        "prompt_tokens 100 >= 100, prompt_tokens 100 < 500, tools 0 == 0,"
        " reasoning is false, stream is true, key team-a, header x-team"
    )


def test_no_class_may_match() -> None:
    model = ModelPolicy(id="m", classes=(MODEL.classes[0],))

    assert classify(model, REQUEST, estimate(10)) is None


GE, LT, GT, EQ, LE = Comparison.GE, Comparison.LT, Comparison.GT, Comparison.EQ, Comparison.LE


@pytest.mark.parametrize(
    ("when", "request_", "why_not"),
    [
        pytest.param(When(total_tokens=(Bound(GT, 1_524),)), REQUEST, None, id="total-counts-the-reserve"),
        pytest.param(
            When(total_tokens=(Bound(GT, 1_525),)),
            REQUEST,
            "total_tokens 1525 is not > 1525",
            id="total-edge",
        ),
        pytest.param(
            When(total_tokens=(Bound(EQ, 510),)),
            replace(REQUEST, max_tokens=10),
            None,
            id="total-with-max-tokens",
        ),
        pytest.param(
            When(max_tokens=(Bound(GE, 4_000),)),
            REQUEST,
            "max_tokens is not given, needs >= 4000",
            id="no-max",
        ),
        pytest.param(When(max_tokens=(Bound(LE, 99),)), replace(REQUEST, max_tokens=99), None, id="max"),
        pytest.param(
            When(prompt_tokens=(Bound(GE, 100), Bound(LT, 500))),
            REQUEST,
            "prompt_tokens 500 is not < 500",
            id="every-bound-holds",
        ),
        pytest.param(When(images=(Bound(GT, 0),)), REQUEST, "images 0 is not > 0", id="no-images"),
        pytest.param(When(images=(Bound(GT, 0),)), replace(REQUEST, images=1), None, id="images"),
        pytest.param(
            When(audios=(Bound(EQ, 0),)), replace(REQUEST, audios=1), "audio 1 is not == 0", id="audio"
        ),
        pytest.param(When(tools=(Bound(GE, 2),)), replace(REQUEST, tools=2), None, id="tools"),
        pytest.param(When(stream=True), REQUEST, "stream is false", id="not-streamed"),
        pytest.param(When(stream=False), REQUEST, None, id="stream-false-is-a-condition"),
        pytest.param(
            When(reasoning=False), replace(REQUEST, reasoning=True), "reasoning is true", id="reasons"
        ),
        pytest.param(When(keys=("team-a",)), REQUEST, "key none is not one of team-a", id="nobody"),
        pytest.param(When(keys=("a", "team-a")), replace(REQUEST, key="team-a"), None, id="key"),
        pytest.param(When(headers=(("x-team", ("red",)),)), REQUEST, "header x-team is absent", id="absent"),
        pytest.param(
            When(headers=(("x-team", ("red", "blue")),)),
            replace(REQUEST, headers={"x-team": "green"}),
            "header x-team is not one of red, blue",
            id="other-value",
        ),
        pytest.param(
            When(headers=(("x-team", ()),)), replace(REQUEST, headers={"x-team": ""}), None, id="present"
        ),
    ],
)
def test_every_condition_says_why_it_does_not_hold(
    when: When, request_: Request, why_not: str | None
) -> None:
    traffic_class = TrafficClass("c", ("p",), when, output_reserve_tokens=1_025)

    assert mismatch(MODEL, traffic_class, request_, estimate(500)) == why_not


def test_the_callers_limit_goes_before_the_reserve() -> None:
    traffic_class = TrafficClass("c", ("p",), output_reserve_tokens=1_024)

    assert output_tokens(traffic_class, REQUEST) == 1_024
    assert output_tokens(traffic_class, replace(REQUEST, max_tokens=7)) == 7


def test_a_copied_condition_knows_its_figures() -> None:
    when = When(prompt_tokens=(Bound(Comparison.GE, 3),), tools=(Bound(Comparison.GT, 0),), stream=True)
    for made in (when, copy.deepcopy(when), pickle.loads(pickle.dumps(when)), replace(when, stream=False)):
        assert made.numeric == ("prompt_tokens", "tools")
        assert (made.tokens_least, made.tokens_most, made.is_empty) == (3, inf, False)
    assert "numeric" not in asdict(when)
    assert copy.deepcopy(When()).is_empty


def test_a_copied_model_knows_the_headers_in_its_conditions() -> None:
    named = tuple(
        TrafficClass(str(place), ("pool",), When(headers=(("x-team", teams),)))
        for place, teams in enumerate((("a",), ("b", "c"), ()))
    )
    model = replace(MODEL, classes=named)
    for made in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert made.headers == {"x-team": {"a", "b", "c"}}


BOUNDS = st.lists(st.builds(Bound, st.sampled_from(Comparison), st.integers(0, 4)), max_size=2).map(tuple)
WHENS = st.builds(
    When,
    prompt_tokens=BOUNDS,
    max_tokens=st.just(()) | BOUNDS,
    reasoning=st.sampled_from([None, True, False]),
    stream=st.sampled_from([None, True]),
)


@given(
    st.lists(WHENS, min_size=1, max_size=4),
    st.integers(0, 5),
    st.sampled_from([None, 0, 3]),
    st.sampled_from(["gemma-4", "gemma-4-thinking"]),
    st.sampled_from([None, True, False]),
)
def test_the_class_is_the_first_without_a_mismatch(
    whens: list[When], tokens: int, max_tokens: int | None, name: str, flag: bool | None
) -> None:
    classes = tuple(TrafficClass(str(place), ("pool",), when) for place, when in enumerate(whens))
    model = replace(MODEL, classes=classes)
    request = replace(REQUEST, model=name, max_tokens=max_tokens, reasoning=flag, stream=not flag)
    fitting = [one for one in classes if mismatch(model, one, request, estimate(tokens)) is None]

    matched = classify(model, request, estimate(tokens))

    assert (matched and matched[0]) == (fitting[0] if fitting else None)
