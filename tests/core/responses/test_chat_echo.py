"""A chat request as the response for it repeats it."""

import pytest

from gateway.core.responses.chat_echo import echo_of_chat


def test_a_chat_request_is_echoed_as_a_response_has_it() -> None:
    function = {"name": "look", "parameters": {"type": "object"}}
    members = {
        "max_completion_tokens": 9,
        "metadata": {"a": "b", "c": 1},
        "reasoning_effort": "high",
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {}}},
        "temperature": 0.5,
        "tool_choice": {"type": "function", "function": {"name": "look"}},
        "tools": [{"type": "function", "function": function}],
        "user": "u",
    }

    echo = echo_of_chat(members.get, "gemma-4", store=True)

    assert echo["max_output_tokens"] == 9
    assert echo["metadata"] == {"a": "b"}
    assert echo["reasoning"] == {"effort": "high", "summary": None}
    assert echo["text"] == {"format": {"type": "json_schema", "name": "s", "schema": {}}}
    assert echo["temperature"] == 0.5
    assert echo["tool_choice"] == {"type": "function", "name": "look"}
    assert echo["tools"] == [{"type": "function", "description": None, "strict": None, **function}]
    assert (echo["user"], echo["store"], echo["model"]) == ("u", True, "gemma-4")


@pytest.mark.parametrize("wrong", [True, [1], {"a": {"b": 1}}, "x", 1.5, None])
def test_what_is_of_another_type_is_left_to_the_backend(wrong: object) -> None:
    echo = echo_of_chat(lambda _: wrong, "gemma-4", store=False)

    assert echo["max_output_tokens"] is None
    assert echo["metadata"] == {}
    assert echo["text"] == {"format": {"type": "text"}}
    assert echo["tools"] == []
    assert echo["reasoning"] == {"effort": None, "summary": None}
