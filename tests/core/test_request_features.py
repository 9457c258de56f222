"""What is kept of a request to decide about it again: features, and no word of its caller's."""

from dataclasses import replace

import pytest

from gateway.core import classification
from gateway.core.policy import ModelPolicy, Policy, TrafficClass, When
from gateway.core.request import CountMode, Endpoint, Estimate, Prompt, Request, Turn
from gateway.core.request_features import OTHER, RequestFeatures

CLASSES = (
    TrafficClass("team", ("p",), When(headers=(("x-team", ("red", "blue")),))),
    TrafficClass("urgent", ("p",), When(headers=(("x-urgent", ()),))),
    TrafficClass("rest", ("p",)),
)
POLICY = Policy((ModelPolicy("gemma", CLASSES),), {}, {}, version="abc")
ESTIMATE = Estimate(10, 26, CountMode.EXACT)
REQUEST = Request(
    Endpoint.COMPLETIONS,
    "gemma",
    Prompt(turns=(Turn("user", ("a secret",)),), tools_json="a secret"),
    stream=True,
    max_tokens=7,
    seqs=4,
    choices=4,
    prompts=2,
    reasoning=True,
    images=1,
    audios=2,
    tools=3,
    key="nightly",
)


@pytest.mark.parametrize(
    ("sent", "kept", "name"),
    [
        ({}, {}, "rest"),
        ({"x-team": "red"}, {"x-team": "red"}, "team"),
        ({"x-team": "a secret"}, {"x-team": OTHER}, "rest"),
        ({"x-urgent": "a secret"}, {"x-urgent": OTHER}, "urgent"),
        ({"x-other": "a secret", "x-team": "blue"}, {"x-team": "blue"}, "team"),
    ],
)
def test_only_headers_that_conditions_name_are_kept_and_only_values_that_they_name(
    sent: dict[str, str], kept: dict[str, object], name: str
) -> None:
    request = replace(REQUEST, headers=sent)

    asked = RequestFeatures.of(POLICY.version, POLICY.models[0], request, ESTIMATE)

    assert asked.headers == kept
    assert "secret" not in repr(asked)
    for one in (request, asked.request("nightly")):
        matched = classification.classify(POLICY.models[0], one, ESTIMATE)
        assert matched is not None
        assert matched[0].name == name


def test_everything_else_that_a_decision_reads_is_the_same_again() -> None:
    version, model = POLICY.version, POLICY.models[0]

    again = RequestFeatures.of(version, model, REQUEST, ESTIMATE, size_bytes=9, patience_s=3.0).request(
        "nightly"
    )

    assert again == replace(REQUEST, prompt=Prompt())
