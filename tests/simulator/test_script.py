"""What an answer will be, token by token."""

import json
import random
import statistics

import pytest

from gateway.simulator.script import (
    TOOL_STOP,
    ChoiceRequest,
    Script,
    ToolCall,
    as_content,
    sample_json,
    write,
)


def script(wanted: ChoiceRequest, seed: int = 1) -> Script:
    return write(wanted, random.Random(seed), answer_tokens=200, thought_tokens=450)


def test_an_answer_ends_by_itself_at_the_end_of_a_sentence() -> None:
    answer = script(ChoiceRequest(4096))

    assert answer.finish_reason == "stop"
    assert answer.tokens[-1] == ""
    assert answer.content(0, len(answer.tokens)).endswith(".")


def test_answers_are_about_200_tokens_and_thinking_ones_600_and_more() -> None:
    plain = sorted(len(script(ChoiceRequest(9_999), seed).tokens) for seed in range(200))
    thinking = sorted(len(script(ChoiceRequest(9_999, thinking=True), seed).tokens) for seed in range(200))

    assert 180 < plain[100] < 240
    assert plain[0] < 100 < 400 < plain[-1]
    assert 600 < thinking[100] < 900


@pytest.mark.parametrize("median", [50, 100, 400])
def test_lengths_have_the_median_that_was_asked_for(median: int) -> None:
    def written(seed: int) -> Script:
        wanted = ChoiceRequest(99_999, thinking=True)
        return write(wanted, random.Random(seed), answer_tokens=median, thought_tokens=median)

    both = [written(seed) for seed in range(500)]

    thoughts = statistics.median(one.thought_end for one in both)
    answers = statistics.median(len(one.tokens) - one.thought_end for one in both)
    assert (thoughts, answers) == pytest.approx((median, median), rel=0.06)


def test_a_limit_is_reached_where_an_answer_would_be_longer() -> None:
    def cut(seed: int, limit: int) -> Script:
        return write(ChoiceRequest(limit), random.Random(seed), answer_tokens=1_000, thought_tokens=1)

    for limit in range(17, 80):
        assert {(len(one.tokens), one.finish_reason) for one in (cut(seed, limit) for seed in range(8))} == {
            (limit, "length")
        }


def test_the_same_dice_say_the_same() -> None:
    assert script(ChoiceRequest(500), 7) == script(ChoiceRequest(500), 7)
    assert script(ChoiceRequest(500), 7) != script(ChoiceRequest(500), 8)


def test_the_limit_cuts() -> None:
    assert len(script(ChoiceRequest(12)).tokens) == 12
    assert script(ChoiceRequest(12)).finish_reason == "length"


def test_without_an_end_token_the_limit_is_reached() -> None:
    answer = script(ChoiceRequest(3_000, ignore_eos=True))

    assert (len(answer.tokens), answer.finish_reason) == (3_000, "length")
    assert "" not in answer.tokens[:-1]


def test_min_tokens_are_reached() -> None:
    assert len(script(ChoiceRequest(4_096, tokens_min=1_500)).tokens) > 1_500


def test_a_thought_counts_all_but_its_opening_marker() -> None:
    thought = script(ChoiceRequest(6, thinking=True))

    assert thought.thought_tokens(6) == 5
    assert thought.thought(0, 6) != ""
    assert thought.content(0, 6) == ""


def test_thought_and_answer_are_apart() -> None:
    both = script(ChoiceRequest(4_096, thinking=True))
    end = len(both.tokens)

    assert both.thought(0, end) and both.content(0, end)
    assert both.thought(0, end) + both.content(0, end) == "".join(both.tokens)
    assert as_content(both).content(0, end) == "".join(both.tokens)


@pytest.mark.parametrize("keep", [False, True], ids=["cut-off", "kept"])
def test_a_stop_string_ends_the_answer(keep: bool) -> None:
    whole = script(ChoiceRequest(4_096)).content(0, 4_096)
    stop = whole[40:47]
    at = whole.find(stop)

    stopped = script(ChoiceRequest(4_096, stops=("no such thing", stop), keep_stop=keep))

    assert stopped.content(0, len(stopped.tokens)) == whole[: at + len(stop) * keep]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)


WEATHER, TIME = ToolCall("get_weather", '{"city": "Paris"}'), ToolCall("get_time", "{}")


def test_tool_calls_end_with_the_token_that_asks_for_their_results() -> None:
    call = script(ChoiceRequest(100, calls=(WEATHER, TIME)))
    places = [place for one in call.calls for place in (one.name_at, one.arguments_at)]

    assert 0 < places[0] < places[1] < places[2] < places[3] < len(call.tokens)
    assert (call.finish_reason, call.stop_reason) == ("tool_calls", TOOL_STOP)


def test_a_tool_call_can_be_cut() -> None:
    call = script(ChoiceRequest(3, calls=(WEATHER,)))

    assert (len(call.tokens), call.finish_reason, call.stop_reason) == (3, "length", None)


def test_json_text_is_said_as_it_is() -> None:
    answer = script(ChoiceRequest(100, fixed_text='{"a": 1}'))

    assert answer.content(0, 100) == '{"a": 1}'


SCHEMAS = [
    pytest.param({"type": "string"}, "a quiet afternoon", id="string"),
    pytest.param({"type": "integer"}, 3, id="integer"),
    pytest.param({"type": ["number", "null"]}, 1.5, id="union-of-types"),
    pytest.param({"enum": ["b", "a"]}, "b", id="enum"),
    pytest.param({"const": 5}, 5, id="const"),
    pytest.param({"anyOf": [{"type": "boolean"}, {"type": "null"}]}, True, id="any-of"),
    pytest.param({"type": "array", "items": {"type": "null"}}, [None], id="array"),
    pytest.param(
        {"type": "object", "properties": {"city": {"type": "string"}, "x": {}}, "required": ["city"]},
        {"city": "Paris"},
        id="required-members-only",
    ),
    pytest.param({"type": "object", "properties": {"n": {"type": "integer"}}}, {"n": 3}, id="all-members"),
    pytest.param(
        {
            "$defs": {"City": {"properties": {"name": {"type": "string"}}}, "a/b": {"type": "integer"}},
            "properties": {
                "cities": {"type": "array", "items": {"$ref": "#/$defs/City"}},
                "n": {"allOf": [{"$ref": "#/$defs/a~1b"}]},
                "unknown": {"$ref": "#/$defs/nothing"},
            },
        },
        {"cities": [{"name": "Ada"}], "n": 3, "unknown": {}},
        id="references",
    ),
    pytest.param({"type": "number", "minimum": 0.1, "maximum": 0.9}, 0.1, id="number-in-bounds"),
    pytest.param({"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}, 0.5, id="number-between"),
    pytest.param({"type": "number", "exclusiveMinimum": 7}, 8, id="number-above"),
    pytest.param({"type": "integer", "exclusiveMinimum": 4, "maximum": 9}, 5, id="integer-in-bounds"),
    pytest.param({"type": "integer", "exclusiveMaximum": 0}, -1, id="integer-below"),
    pytest.param({"type": "integer", "minimum": "4", "maximum": True}, 3, id="bounds-that-are-none"),
    pytest.param({"type": "integer", "minimum": 10**400}, 3, id="bound-out-of-all-proportion"),
    pytest.param({"type": "string", "maxLength": 7}, "a quiet", id="short-string"),
    pytest.param({"type": "string", "minLength": 20}, "a quiet afternoon...", id="long-string"),
    pytest.param({"type": "string", "format": "email"}, "ada@example.com", id="format"),
    pytest.param({"type": "array", "minItems": 2, "items": {"type": "integer"}}, [3, 3], id="long-array"),
    pytest.param({"type": "array", "maxItems": 0, "items": {"type": "integer"}}, [], id="empty-array"),
    pytest.param({"prefixItems": [{"type": "null"}, {"const": 1}], "type": "array"}, [None, 1], id="tuple"),
    pytest.param({}, {}, id="anything"),
    pytest.param(None, {}, id="no-schema"),
]


@pytest.mark.parametrize(("schema", "value"), SCHEMAS)
def test_sample_fits_the_schema(schema: object, value: object) -> None:
    assert json.loads(sample_json(schema)) == value


NULL = {"type": "null"}
ENDS = [
    pytest.param({"anyOf": [{"$ref": "#"}, NULL]}, {"child": {"child": {"child": None}}}, id="or-null"),
    pytest.param({"type": "array", "items": {"$ref": "#"}}, {"child": [{"child": []}]}, id="array"),
]


@pytest.mark.parametrize(("child", "value"), ENDS)
def test_a_schema_that_contains_itself_ends_in_what_fits(child: object, value: object) -> None:
    schema = {"type": "object", "properties": {"child": child}, "required": ["child"]}

    assert json.loads(sample_json(schema)) == value


def test_a_schema_that_contains_itself_ends() -> None:
    schema: dict[str, object] = {"type": "object", "properties": {}}
    schema["properties"] = {"child": schema}

    assert json.loads(sample_json(schema))["child"]["child"]
    assert json.loads(sample_json({"properties": {"child": {"$ref": "#"}}}))["child"]["child"]
    assert json.loads(sample_json({"$ref": "#"})) == {}
