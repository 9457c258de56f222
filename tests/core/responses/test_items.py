"""Items in, messages out: what Gemma's chat template takes."""

import time
from typing import Any

import pytest

from gateway.core.errors import InvalidRequest
from gateway.core.responses.items import home_of, item_id, messages_of, read_input, references, with_own_ids

TOKEN = "0123456789abcdef" * 2
PNG = "data:image/png;base64,AAAA"


def chat(items: Any, instructions: str | None = None) -> list[dict[str, Any]]:
    read = read_input(items, TOKEN, {})
    return messages_of(read, instructions, own=len(read))


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def call(name: str = "f", call_id: str = "c1") -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": "{}"}


def called(name: str = "f", call_id: str = "c1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": "{}"}}


def said(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


def thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def pictured(call_id: str, *parts: str) -> dict[str, Any]:
    """Return the result of a call in which each part is a text, or the picture."""
    output = [
        {"type": "input_image", "image_url": part} if part == PNG else {"type": "input_text", "text": part}
        for part in parts
    ]
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def shown(title: str) -> list[dict[str, Any]]:
    """Return the parts that the picture becomes in a chat."""
    return [
        {"type": "text", "text": title},
        {"type": "image_url", "image_url": {"url": PNG, "detail": "auto"}},
    ]


RESULT = {"type": "function_call_output", "call_id": "c1", "output": "42"}


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        pytest.param("Hi", [user("Hi")], id="a-string"),
        pytest.param([user("Hi")], [user("Hi")], id="a-message-without-a-type"),
        pytest.param([user([{"type": "input_text", "text": "Hi"}])], [user("Hi")], id="one-part"),
        pytest.param(
            [user([{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}])],
            [user([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])],
            id="two-texts-stay-parts",
        ),
        pytest.param(
            [
                user(
                    [
                        {"type": "input_text", "text": "a"},
                        {"type": "input_image", "image_url": PNG},
                        {"type": "input_image", "image_url": PNG, "detail": "low"},
                    ]
                )
            ],
            [
                user(
                    [
                        {"type": "text", "text": "a"},
                        {"type": "image_url", "image_url": {"url": PNG, "detail": "auto"}},
                        {"type": "image_url", "image_url": {"url": PNG, "detail": "low"}},
                    ]
                )
            ],
            id="a-picture",
        ),
        pytest.param(
            [user([{"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}}])],
            [user([{"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}}])],
            id="audio",
        ),
        pytest.param(
            [{"role": "developer", "content": "Be kind."}, user("Hi")],
            [{"role": "system", "content": "Be kind."}, user("Hi")],
            id="a-developer-is-the-system",
        ),
        pytest.param(
            [user("Hi"), {"role": "developer", "content": "Be kind."}, {"role": "system", "content": "x"}],
            [user("Hi"), {"role": "system", "content": "Be kind."}, {"role": "system", "content": "x"}],
            id="system-text-that-is-not-at-the-head-stays-where-it-is",
        ),
        pytest.param(
            [user("Hi"), said("Ho"), said("Hu")],
            [
                user("Hi"),
                {"role": "assistant", "content": "Ho"},
                {"role": "assistant", "content": "Hu"},
            ],
            id="answers",
        ),
        pytest.param(
            [{"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}],
            [{"role": "assistant", "content": "No."}],
            id="a-refusal",
        ),
        pytest.param(
            [thought("Hm."), said("Ho"), user("Hi")],
            [{"role": "assistant", "content": "Ho"}, user("Hi")],
            id="a-thought-before-words-is-left-out",
        ),
        pytest.param(
            [thought("Hm."), call(), RESULT],
            [
                {"role": "assistant", "content": None, "tool_calls": [called()], "reasoning": "Hm."},
                {"role": "tool", "tool_call_id": "c1", "name": "f", "content": "42"},
            ],
            id="a-thought-before-a-call-stays",
        ),
        pytest.param(
            [thought("Hm."), said("Let me see."), call("f", "c1"), call("g", "c2")],
            [
                {
                    "role": "assistant",
                    "content": "Let me see.",
                    "tool_calls": [called("f", "c1"), called("g", "c2")],
                    "reasoning": "Hm.",
                }
            ],
            id="one-turn-is-one-message",
        ),
        pytest.param(
            [thought("Hm."), user("Hi"), call()],
            [user("Hi"), {"role": "assistant", "content": None, "tool_calls": [called()]}],
            id="a-thought-does-not-outlive-its-turn",
        ),
        pytest.param(
            [call(), RESULT, thought("So."), call("g", "c2")],
            [
                {"role": "assistant", "content": None, "tool_calls": [called()]},
                {"role": "tool", "tool_call_id": "c1", "name": "f", "content": "42"},
                {"role": "assistant", "content": None, "tool_calls": [called("g", "c2")], "reasoning": "So."},
            ],
            id="two-steps",
        ),
        pytest.param(
            [call(), {**RESULT, "output": [{"type": "input_text", "text": t} for t in "ab"]}],
            [
                {"role": "assistant", "content": None, "tool_calls": [called()]},
                {"role": "tool", "tool_call_id": "c1", "name": "f", "content": "a\nb"},
            ],
            id="a-result-in-parts",
        ),
        pytest.param(
            [
                call("look", "c1"),
                call("f", "c2"),
                pictured("c1", "Two:", PNG, PNG),
                pictured("c2", PNG),
                said("I see."),
                call("look", "c3"),
                pictured("c3", PNG),
            ],
            [
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [called("look", "c1"), called("f", "c2")],
                },
                {
                    "role": "tool",
                    "tool_call_id": "c1",
                    "name": "look",
                    "content": "Two:\n[image 1]\n[image 2]",
                },
                {"role": "tool", "tool_call_id": "c2", "name": "f", "content": "[image 3]"},
                user(
                    [
                        *shown("[image 1] of look:"),
                        *shown("[image 2] of look:"),
                        *shown("[image 3] of f:"),
                    ]
                ),
                {"role": "assistant", "content": "I see.", "tool_calls": [called("look", "c3")]},
                {"role": "tool", "tool_call_id": "c3", "name": "look", "content": "[image 1]"},
                user(shown("[image 1] of look:")),
            ],
            id="pictures-stand-behind-the-results-they-are-in",
        ),
        pytest.param(
            [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "In short."}]}, call()],
            [{"role": "assistant", "content": None, "tool_calls": [called()], "reasoning": "In short."}],
            id="a-summary-where-there-is-no-thought",
        ),
    ],
)
def test_items_become_messages(items: Any, messages: list[dict[str, Any]]) -> None:
    assert chat(items) == messages


def test_all_system_text_at_the_head_is_one_message() -> None:
    items = [
        {"role": "system", "content": [{"type": "input_text", "text": t} for t in ("b", "c")]},
        {"role": "developer", "content": "d"},
        user("Hi"),
    ]

    assert chat(items, "a") == [{"role": "system", "content": "a\n\nb\nc\n\nd"}, user("Hi")]


@pytest.mark.parametrize(
    ("item", "code", "param"),
    [
        (7, "invalid_request", "input.1"),
        ({"type": "web_search_call"}, "unsupported_content", "input.1.type"),
        ({"type": ["message"]}, "unsupported_content", "input.1.type"),
        ({"role": "tool", "content": "x"}, "invalid_request", "input.1.role"),
        ({"role": ["user"], "content": "x"}, "invalid_request", "input.1.role"),
        ({"role": "user"}, "invalid_request", "input.1.content"),
        (user(["x"]), "invalid_request", "input.1.content.0"),
        (user([{"type": "input_text"}]), "invalid_request", "input.1.content.0.text"),
        (user([{"type": "input_file", "file_id": "f"}]), "unsupported_content", "input.1.content.0.type"),
        (user([{"type": ["text"]}]), "unsupported_content", "input.1.content.0.type"),
        (
            user([{"type": "input_image", "file_id": "f"}]),
            "unsupported_content",
            "input.1.content.0.file_id",
        ),
        (user([{"type": "input_image"}]), "invalid_request", "input.1.content.0.image_url"),
        (
            user([{"type": "input_image", "image_url": PNG, "detail": 1}]),
            "invalid_request",
            "input.1.content.0.detail",
        ),
        (
            user([{"type": "input_audio", "input_audio": "x"}]),
            "invalid_request",
            "input.1.content.0.input_audio",
        ),
        (
            user([{"type": "input_audio", "input_audio": {"data": [], "format": "wav"}}]),
            "invalid_request",
            "input.1.content.0.input_audio.data",
        ),
        ({**call(), "arguments": {}}, "invalid_request", "input.1.arguments"),
        ({**call(), "id": 1}, "invalid_request", "input.1.id"),
        (RESULT, "invalid_request", "input.1.call_id"),
        ({**RESULT, "output": None}, "invalid_request", "input.1.output"),
        (
            {**RESULT, "output": [{"type": "input_file", "file_id": "f"}]},
            "unsupported_content",
            "input.1.output.0.type",
        ),
        ({"type": "reasoning", "content": "x"}, "invalid_request", "input.1.content"),
        ({"type": "item_reference", "id": "msg_1"}, "item_not_found", "input.1.id"),
        ({"type": "item_reference"}, "item_not_found", "input.1.id"),
    ],
)
def test_what_is_no_item_is_named(item: Any, code: str, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat([user("Hi"), item])

    assert (caught.value.code, caught.value.param) == (code, param)


@pytest.mark.parametrize(
    ("item", "name"), [({"role": "user"}, "content"), ({**RESULT, "output": 1}, "output")]
)
def test_the_message_names_the_field_too_for_sdks_show_nothing_else(item: Any, name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"`{name}` must be a string or an array of parts"):
        chat([call(), item])


def test_the_refusal_of_a_part_of_a_chat_names_those_that_are_taken() -> None:
    with pytest.raises(InvalidRequest, match=r"'image_url' are not supported here, only .*input_image"):
        chat([user([{"type": "image_url", "image_url": {"url": PNG}}])])


def test_a_result_is_matched_with_calls_of_the_conversation_before() -> None:
    before = read_input([call()], TOKEN, {})
    own = read_input([RESULT], TOKEN, {})

    assert messages_of([*before, *own], None, own=1)[1]["name"] == "f"
    with pytest.raises(InvalidRequest) as caught:
        messages_of([*own, *before], None, own=1)
    assert caught.value.param == "previous_response_id"


def test_words_behind_a_call_join_its_message() -> None:
    for before, words in (([said("Well.")], "Well.One moment."), ([], "One moment.")):
        messages = chat([user("Hi"), *before, call(), said("One moment."), {**RESULT, "output": "7"}])
        assert [message["role"] for message in messages] == ["user", "assistant", "tool"]
        assert messages[1]["content"] == words
        assert messages[1]["tool_calls"] == [called()]


def test_words_do_not_join_a_picture_nor_a_picture_words() -> None:
    picture = {"role": "assistant", "content": [{"type": "input_image", "image_url": PNG}]}
    for items in ([picture, call(), said("One moment.")], [call(), picture]):
        messages = chat([user("Hi"), *items, RESULT])
        assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]


def test_a_result_stands_directly_behind_its_call() -> None:
    second = {**RESULT, "call_id": "c2", "output": "8"}
    items = [user("Hi"), call(), call("g", "c2"), user("Wait."), {**RESULT, "output": "7"}, second]
    messages = chat(items)
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool", "user"]
    assert [message["content"] for message in messages[2:4]] == ["7", "8"]


@pytest.mark.parametrize(
    "items",
    [
        [call(), *[said("One moment. " * 200)] * 1_000],
        [
            *[call(call_id=f"c{n}") for n in range(4_000)],
            *[{**RESULT, "call_id": f"c{n}"} for n in range(4_000)],
        ],
    ],
    ids=["words", "results"],
)
def test_a_turn_with_calls_is_no_more_work_than_any_others_however_long(items: list[dict[str, Any]]) -> None:
    """Compared in time of the CPU: each further item must not cost as much as all before it."""

    def work_s(items: list[dict[str, Any]]) -> float:
        read = read_input(items, TOKEN, {})
        begun = time.thread_time()
        messages_of(read, None, own=len(read))
        return time.thread_time() - begun

    assert work_s(items) < 20 * work_s([user("x")] * len(items))


def test_ids_are_unique_in_a_conversation() -> None:
    before = read_input([{**user("a"), "id": "msg_x"}], TOKEN, {})
    read = read_input(
        [{**user("b"), "id": "msg_x"}, {**user("c"), "id": "msg_y"}, {**user("d"), "id": "msg_y"}], TOKEN, {}
    )
    own = with_own_ids(read, before, TOKEN)
    assert len({item["id"] for item in (*before, *own)}) == 4
    assert own[1]["id"] == "msg_y"
    assert [item["content"] for item in own] == [item["content"] for item in read]


def test_items_are_kept_in_one_form() -> None:
    items = read_input([user("Hi"), {**said("Ho"), "id": "msg_theirs"}, call(), thought("Hm.")], TOKEN, {})

    assert items[0] == {
        "id": f"msg_{TOKEN}0000",
        "type": "message",
        "role": "user",
        "status": "completed",
        "content": [{"type": "input_text", "text": "Hi"}],
    }
    assert items[1]["id"] == "msg_theirs"
    assert items[1]["content"] == [{"type": "output_text", "text": "Ho", "annotations": []}]
    assert [item["id"] for item in items[2:]] == [f"fc_{TOKEN}0002", f"rs_{TOKEN}0003"]
    assert read_input(items, TOKEN, {}) == items


def test_references_are_found_and_put_in_place() -> None:
    written = [
        user("Hi"),
        {"type": "item_reference", "id": "msg_1"},
        {"id": "msg_2"},
        {"type": "item_reference"},
        {**said("Ho"), "id": "msg_3"},  # the item itself
        "no item",
    ]
    item = read_input([said("Ho")], TOKEN, {})[0]

    assert references(written) == ["msg_1", "msg_2"]
    assert references("Hi") == references(None) == []
    assert read_input(written[:3], TOKEN, {"msg_1": item, "msg_2": item})[1:] == [item, item]


def test_an_items_id_names_its_response() -> None:
    for kind in ("message", "reasoning", "function_call", "function_call_output"):
        assert home_of(item_id(kind, TOKEN, 70_000)) == f"resp_{TOKEN}"
    for id_ in ("msg_1", f"resp_{TOKEN}", f"msg_{TOKEN}", f"msg_{TOKEN}000g", f"x_{TOKEN}0000", ""):
        assert home_of(id_) is None
