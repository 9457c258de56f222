"""What is read of a request body, and that everything else travels on as it was sent."""

import contextlib
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.errors import BodyTooLarge, InvalidRequest
from gateway.core.request import Endpoint, Prompt, Turn
from gateway.downstream import wire
from gateway.downstream.long_texts import LONG_BYTES, TEXT_BYTES_MAX
from gateway.downstream.reading import Received
from gateway.downstream.wire import WireRequest, WireRules, chat_prompt
from gateway.downstream.wire.chat_decoding import CHAT
from gateway.downstream.wire.chat_prompt import SOFT_TOKENS_MAX
from gateway.downstream.wire.parsing import MODEL_CHARS_MAX, ordinary_request
from gateway.ports import Arrival

RULES = WireRules(choices_max=4, drop_fields=frozenset({"priority", "chat_template"}))
PIXEL = "data:image/png;base64,iVBORw0KGgo="


def read(endpoint: Endpoint, raw: bytes, rules: WireRules) -> WireRequest:
    return wire.read(endpoint, received(raw), rules)


def received(raw: bytes) -> Received:
    return Received(Arrival("req-1", 0.0, 0.0), raw, "alice", {"x-team": "search"}, ())


def body(**fields: Any) -> bytes:
    return json.dumps(
        {"model": "gemma-4", "messages": [{"role": "user", "content": "hi"}], **fields}
    ).encode()


def chat(rules: WireRules = RULES, **fields: Any) -> WireRequest:
    return read(Endpoint.CHAT, body(**fields), rules)


def message(content: object, **fields: object) -> list[dict[str, object]]:
    return [{"role": "user", "content": content, **fields}]


# ---------------------------------------------------------------- reading


def test_a_plain_chat() -> None:
    request = chat().request

    assert request.model == "gemma-4"
    assert request.prompt == Prompt(turns=(Turn("user", ("hi",)),))
    assert (request.stream, request.max_tokens, request.seqs, request.reasoning) == (False, None, 1, None)


@pytest.mark.parametrize(
    ("fields", "attribute", "value"),
    [
        ({"stream": True}, "stream", True),
        ({"stream": None}, "stream", False),
        ({"stream": False, "n": 1.0}, "stream", False),  # the float: read member by member
        ({"stream": True, "n": 1.0}, "stream", True),
        ({"max_tokens": 7}, "max_tokens", 7),
        ({"max_completion_tokens": 9, "max_tokens": 7}, "max_tokens", 9),
        ({"max_tokens": None}, "max_tokens", None),
        ({"n": 3}, "seqs", 3),
        ({"reasoning_effort": "low"}, "reasoning", True),
        ({"reasoning_effort": "none"}, "reasoning", False),
        ({"reasoning_effort": None}, "reasoning", None),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "reasoning", True),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "reasoning", False),
        ({"chat_template_kwargs": {"level": 3}}, "reasoning", None),
        ({"tools": [{"type": "function"}, {"type": "function"}]}, "tools", 2),
        ({"stream": True, "stream_options": {"include_usage": True}}, "include_usage", True),
    ],
)
def test_what_routing_needs(fields: dict[str, Any], attribute: str, value: object) -> None:
    assert getattr(chat(**fields).request, attribute) == value


@pytest.mark.parametrize(
    ("content", "turn"),
    [
        pytest.param("hi", Turn("user", ("hi",)), id="string"),
        pytest.param(None, Turn("user", ()), id="null"),
        pytest.param([], Turn("user", ()), id="no-parts"),
        pytest.param(
            [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            Turn("user", ("a", "b")),
            id="parts",
        ),
        pytest.param(["a"], Turn("user", ("a",)), id="bare-string-part"),
        pytest.param(
            [{"type": "image_url", "image_url": {"url": PIXEL}}], Turn("user", (), images=1), id="image"
        ),
        pytest.param(
            [{"type": "image_url", "image_url": PIXEL}], Turn("user", (), images=1), id="image-string"
        ),
        pytest.param(
            [{"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}],
            Turn("user", (), audios=1),
            id="audio",
        ),
        pytest.param([{"type": "refusal", "refusal": "no"}], Turn("user", ("no",)), id="refusal"),
        pytest.param([{"type": "text", "text": "a", "uuid": None}], Turn("user", ("a",)), id="no-uuid"),
        pytest.param([{"type": "text", "text": "a", "image_url": None}], Turn("user", ("a",)), id="no-image"),
        pytest.param([{"type": "thinking", "thinking": "hm"}], Turn("user", ("hm",)), id="thinking"),
        pytest.param(
            [{"type": "text", "text": "x", "audio_url": {"url": PIXEL}}],
            Turn("user", ("x",), audios=1),
            id="media-by-key-whatever-the-type",
        ),
    ],
)
def test_content_in_all_its_forms(content: object, turn: Turn) -> None:
    assert chat(messages=message(content)).request.prompt.turns == (turn,)


def test_tool_calls_in_history_are_counted() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    calls = ["no call", call, None]
    turns = chat(messages=[{"role": "assistant", "content": None, "tool_calls": calls}]).request.prompt.turns

    assert turns == (Turn("assistant", (), tool_calls=(("f", '{"a": 1}'),)),)


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_a_thought_in_history_counts_where_a_tool_call_came_of_it(name: str) -> None:
    calls = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    history = [
        {"role": "assistant", "content": "a", name: "hm", "tool_calls": calls},
        {"role": "assistant", "content": "b", name: "dropped"},
        {"role": "assistant", "content": ["c"], name: "dropped"},
    ]

    with_call, without, nor_with_parts = chat(messages=history).request.prompt.turns

    assert with_call.texts == ("a", "hm")
    assert without.texts == ("b",)
    assert nor_with_parts.texts == ("c",)


def test_the_name_of_a_called_function_that_is_no_text_is_counted_as_one() -> None:
    called = {"role": "assistant", "tool_calls": [{"function": {"name": 5, "arguments": "{}"}}]}

    assert chat(messages=[called]).request.prompt.turns[0].tool_calls == (("5", "{}"),)


@pytest.mark.parametrize("thought", [5, ["hm"], {"text": "hm"}, True, None])
def test_a_thought_that_is_no_text_is_none(thought: object) -> None:
    called = {"role": "assistant", "content": "a", "tool_calls": [{}], "reasoning": thought}

    assert chat(messages=[called]).request.prompt.turns[0].texts == ("a",)


def test_a_requests_own_image_budget_is_honoured() -> None:
    budget = {"max_soft_tokens": 1120}

    assert chat(mm_processor_kwargs=budget).request.prompt.image_budget == 1120


@pytest.mark.parametrize(
    ("written", "counted"),
    [(0, None), (-1, None), (True, None), ("280", None), (1120.0, None), (10**400, SOFT_TOKENS_MAX)],
)
def test_an_image_budget_that_is_none_or_beyond_every_window(written: object, counted: int | None) -> None:
    incoming = chat(mm_processor_kwargs={"max_soft_tokens": written})

    assert incoming.request.prompt.image_budget == counted
    assert incoming.member("mm_processor_kwargs") == {"max_soft_tokens": written}


@pytest.mark.parametrize(
    ("prompt", "expected", "seqs"),
    [
        ("Name a river.", Prompt(raw_texts=("Name a river.",)), 1),
        (["a", "bcd"], Prompt(raw_texts=("a", "bcd")), 2),
        ([1, 2, 3], Prompt(raw_tokens=3), 1),
        ([[1, 2], [1, 2, 3]], Prompt(raw_tokens=3), 2),
        (list(range(100_000)), Prompt(raw_tokens=100_000), 1),
        ([123_456] * 100_001 + [10**30], Prompt(raw_tokens=100_002), 1),
        ([7] * 100_000 + [True], Prompt(raw_tokens=100_001), 1),  # as in a short one
        ([[1] * 40_000, [2] * 40_001], Prompt(raw_tokens=40_001), 2),
        ([[1] * 120_000, [2, 3], [4] * 110_000], Prompt(raw_tokens=120_000), 3),
        (["1"] * 40_000, Prompt(raw_texts=("1",) * 40_000), 40_000),
    ],
    ids=[
        "text",
        "texts",
        "ids",
        "lists-of-ids",
        "many-ids",
        "a-large-id",
        "no-id",
        "long-lists",
        "longer-lists",
        "many-texts",
    ],
)
def test_completions_in_all_their_forms(prompt: object, expected: Prompt, seqs: int) -> None:
    rules = replace(RULES, choices_max=40_000)
    request = read(Endpoint.COMPLETIONS, json.dumps({"model": "m", "prompt": prompt}).encode(), rules).request

    assert request.prompt == expected
    assert (request.seqs, request.choices, request.prompts) == (seqs, seqs, seqs)


@pytest.mark.parametrize("content", [None, "", []])
def test_a_message_of_nothing_is_read(content: object) -> None:
    (prefix,) = read(Endpoint.CHAT, body(messages=[{"role": "", "content": content}]), RULES).request.prefixes

    assert prefix[1] == 1


def test_tools_that_were_read_before_are_checked_against_the_rules_of_today() -> None:
    asked = body(tools=[{"type": "function", "function": {"name": "f"}}] * 3)

    assert read(Endpoint.CHAT, asked, RULES).request.tools == 3
    assert read(Endpoint.CHAT, asked, RULES).request.prompt.tools_json.count('"f"') == 3
    assert read(Endpoint.CHAT, asked, RULES).request.prompt.tools_texts == 6  # their types and names
    with pytest.raises(InvalidRequest) as caught:
        read(Endpoint.CHAT, asked, replace(RULES, tools_max=2))
    assert caught.value.code == "too_many_items"


def test_long_tools_are_not_remembered() -> None:
    def asked_twice(name: str) -> None:
        for _ in range(2):
            assert chat(tools=[{"type": "function", "function": {"name": name}}]).request.tools == 1

    before = chat_prompt._read_tools.cache_info()
    asked_twice("f" * LONG_BYTES)
    assert chat_prompt._read_tools.cache_info() == before
    asked_twice("f")
    assert chat_prompt._read_tools.cache_info().hits > before.hits


TURN: dict[str, object] = {"role": "user", "content": "x"}


def with_parts(*numbers: int, calls: int = 0) -> list[dict[str, object]]:
    """Return messages with so many parts, and `calls` tool calls each."""
    return [{"role": "user", "content": ["x"] * parts, "tool_calls": [{}] * calls} for parts in numbers]


@pytest.mark.parametrize(
    ("most", "too_many", "param"),
    [
        pytest.param([TURN] * 2, [TURN] * 3, "messages", id="messages"),
        pytest.param(
            [*with_parts(1), TURN], [*with_parts(1), TURN, TURN], "messages", id="messages-of-parts"
        ),
        pytest.param(with_parts(2), with_parts(3), "messages.0.content", id="parts"),
        pytest.param(with_parts(0, calls=2), with_parts(0, calls=3), "messages.0.tool_calls", id="calls"),
        pytest.param(with_parts(2, 1), with_parts(2, 2), "messages", id="parts-together"),
        pytest.param(with_parts(1, calls=2), with_parts(2, calls=2), "messages", id="parts-and-calls"),
    ],
)
def test_a_chat_may_have_as_many_items_as_the_rules_say_and_no_more(
    most: object, too_many: object, param: str
) -> None:
    rules = replace(RULES, messages_max=2, parts_max=3)

    assert chat(rules, messages=most).request.prompt.turns
    with pytest.raises(InvalidRequest) as caught:
        chat(rules, messages=too_many)
    assert (caught.value.code, caught.value.param) == ("too_many_items", param)


@pytest.mark.parametrize("last", [1.0, 1.5, "1", None, [1], {}])
def test_a_long_array_of_ids_and_something_else_is_refused_as_a_short_one_is(last: object) -> None:
    for count in (1, 100_000):
        prompt = json.dumps({"model": "m", "prompt": [1] * count + [last]}).encode()
        with pytest.raises(InvalidRequest) as caught:
            read(Endpoint.COMPLETIONS, prompt, RULES)
        assert caught.value.param == "prompt"


# ---------------------------------------------------------------- refusing


ODD_KINDS: list[Any] = [[], {}, 1, None]


@pytest.mark.parametrize(
    ("raw", "code", "param"),
    [
        pytest.param(b"", "invalid_json", None, id="empty"),
        pytest.param(b'{"model":', "invalid_json", None, id="cut"),
        pytest.param(body() + b"x", "invalid_json", None, id="bytes-after-the-object"),
        pytest.param(b"[1]", "invalid_request", None, id="not-an-object"),
        pytest.param(b"[" * 200_000, "invalid_request", None, id="nested-without-end"),
        pytest.param(b'{"model":"m","messages":' + b"[" * 150_000, "invalid_json", None, id="nested-inside"),
        pytest.param(b'{"model":"\xff","messages":[]}', "invalid_json", "model", id="not-utf-8"),
        pytest.param(
            b'{"messages":[{"role":"user","content":"x"}]}', "invalid_request", "model", id="no-model"
        ),
        pytest.param(body(model=3), "invalid_request", "model", id="model-number"),
        pytest.param(body(model=""), "invalid_request", "model", id="model-empty"),
        pytest.param(b'{"model":"m"}', "invalid_request", "messages", id="no-messages"),
        pytest.param(body(messages=[]), "invalid_request", "messages", id="empty-messages"),
        pytest.param(body(messages="hi"), "invalid_request", "messages", id="messages-string"),
        pytest.param(body(messages=["hi"]), "invalid_request", "messages.0", id="message-string"),
        pytest.param(body(messages=[{"content": "x"}]), "invalid_request", "messages.0.role", id="no-role"),
        pytest.param(body(messages=message(3)), "invalid_request", "messages.0.content", id="content-number"),
        pytest.param(body(stream="yes"), "invalid_request", "stream", id="stream-string"),
        pytest.param(body(max_tokens=0), "invalid_request", "max_tokens", id="no-tokens"),
        pytest.param(body(max_tokens=-1), "invalid_request", "max_tokens", id="negative-tokens"),
        pytest.param(body(max_tokens=1.5), "invalid_request", "max_tokens", id="half-a-token"),
        pytest.param(body(max_tokens=True), "invalid_request", "max_tokens", id="tokens-true"),
        pytest.param(body(n=0), "invalid_request", "n", id="no-choices"),
        pytest.param(body(n=5), "too_many_choices", "n", id="too-many-choices"),
        pytest.param(
            body(messages=message([{"type": "image_url", "image_url": {"url": "http://10.0.0.1/x.png"}}])),
            "remote_media_not_allowed",
            "messages.0.content.0",
            id="an-address-for-the-backend-to-fetch",
        ),
        pytest.param(
            body(messages=message([{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}])),
            "remote_media_not_allowed",
            "messages.0.content.0",
            id="a-file-for-the-backend-to-read",
        ),
        pytest.param(
            body(messages=message([{"type": "video_url", "video_url": {"url": PIXEL}}])),
            "unsupported_content",
            "messages.0.content.0",
            id="video",
        ),
        pytest.param(
            body(messages=message([{"image_embeds": "AAAA"}])),
            "unsupported_content",
            "messages.0.content.0",
            id="embeddings-untyped",
        ),
        pytest.param(
            body(messages=message([{"type": "text", "text": "x", "uuid": "u", "audio_embeds": "AAAA"}])),
            "unsupported_content",
            "messages.0.content.0",
            id="embeddings-beside-text",
        ),
        pytest.param(
            body(messages=message([{"type": "image_url", "image_url": {"url": PIXEL}, "uuid": "scan-1"}])),
            "unsupported_content",
            "messages.0.content.0",
            id="an-image-under-a-name-that-all-callers-share",
        ),
        pytest.param(
            body(messages=message([{"type": "image_url", "image_url": None, "uuid": "scan-1"}])),
            "unsupported_content",
            "messages.0.content.0",
            id="an-image-that-somebody-may-have-sent",
        ),
        pytest.param(
            body(messages=message([{"video_url": {"url": PIXEL}}])),
            "unsupported_content",
            "messages.0.content.0",
            id="video-without-a-type",
        ),
        pytest.param(
            body(messages=message([{"type": "something_new", "x": 1}])),
            "unsupported_content",
            "messages.0.content.0",
            id="a-part-nobody-can-count",
        ),
        *(
            pytest.param(
                body(messages=message([{"type": kind, "text": "x"}])),
                "unsupported_content",
                "messages.0.content.0",
                id=f"a-part-whose-type-is-{kind}",
            )
            for kind in ODD_KINDS
        ),
        pytest.param(
            body(messages=message([3])), "invalid_request", "messages.0.content.0", id="part-number"
        ),
        pytest.param(
            body(messages=[{"role": "assistant", "tool_calls": 5}]),
            "invalid_request",
            "messages.0.tool_calls",
            id="tool-calls-number",
        ),
        pytest.param(body(messages=[{"role": "user"}] * 5_000), "too_many_items", "messages", id="messages"),
        pytest.param(
            body(messages=message(["x"] * 5_000)), "too_many_items", "messages.0.content", id="parts"
        ),
        pytest.param(
            body(messages=[{"role": "assistant", "tool_calls": [{}] * 5_000}]),
            "too_many_items",
            "messages.0.tool_calls",
            id="tool-calls",
        ),
        pytest.param(
            body(messages=message(["x"] * 4_000) * 5), "too_many_items", "messages", id="parts-together"
        ),
        pytest.param(
            body(messages=[{"role": "assistant", "tool_calls": [{}] * 4_000}] * 5),
            "too_many_items",
            "messages",
            id="tool-calls-together",
        ),
        pytest.param(body(messages=message([{}] * 200_001)), "too_many_items", None, id="objects"),
        pytest.param(body(metadata=[[]] * 200_001), "too_many_items", None, id="arrays"),
        pytest.param(body(metadata=[0] * 200_000), "too_many_items", None, id="numbers"),
        pytest.param(body(messages=[0] * 200_000), "too_many_items", None, id="numbers-for-messages"),
        pytest.param(body(tools=[{}] * 2_000), "too_many_items", "tools", id="tools"),
        pytest.param(body(tools={}), "invalid_request", "tools", id="tools-object"),
        pytest.param(body(model="x" * 257), "invalid_request", "model", id="a-name-that-is-none"),
        pytest.param(
            body(**{f"member-{number}": 1 for number in range(600)}),
            "invalid_request",
            None,
            id="too-many-members",
        ),
    ],
)
def test_a_bad_body_says_what_is_wrong_with_it(raw: bytes, code: str, param: str | None) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(Endpoint.CHAT, raw, RULES)

    assert (caught.value.code, caught.value.param) == (code, param)


@pytest.mark.parametrize("fields", [{}, {"n": 1}], ids=["ordinary", "any-other"])
def test_the_name_of_a_model_may_be_long(fields: dict[str, Any]) -> None:
    assert chat(model="x" * MODEL_CHARS_MAX, **fields).request.model == "x" * MODEL_CHARS_MAX


def test_a_type_of_parts_that_is_not_supported_is_named_in_short() -> None:
    with pytest.raises(InvalidRequest, match=r"type 'x+' are") as caught:
        chat(messages=message([{"type": "x" * 1_000}]))

    assert len(caught.value.message) < 100


def test_an_empty_body_is_called_empty() -> None:
    with pytest.raises(InvalidRequest, match=r"not valid JSON: it is empty\.$"):
        read(Endpoint.CHAT, b" \n", RULES)


@pytest.mark.parametrize(
    "part",
    [
        pytest.param({"audio_url": {"url": "http://169.254.169.254/"}}, id="no-type"),
        pytest.param(
            {"type": "text", "text": "x", "uuid": "1", "audio_url": {"url": "http://10.0.0.1/"}}, id="text"
        ),
        pytest.param(
            {"type": "image_url", "image_url": {"url": "data:,"}, "audio_url": "http://10.0.0.1/"},
            id="beside",
        ),
        pytest.param({"type": "image_url", "image_url": {"url": " http://10.0.0.1/"}}, id="blank-before"),
        pytest.param({"type": "input_image", "image_url": "HTTP://10.0.0.1/"}, id="upper-case"),
        pytest.param({"type": "image_url", "image_url": {"url": ["http://10.0.0.1/"]}}, id="a-list"),
        pytest.param({"type": "image_url", "image_url": {"uri": "http://10.0.0.1/"}}, id="another-key"),
        pytest.param({"type": "image_url", "image_url": "http://10.0.0.1/?data:,"}, id="data-behind"),
        pytest.param(
            {"type": "image_url", "image_url": "data:,", "video_url": "data:,"}, id="a-video-beside"
        ),
        pytest.param({"type": "image_url", "image_url": ""}, id="empty"),
        pytest.param({"type": "audio_url", "audio_url": {}}, id="nothing"),
    ],
)
def test_no_spelling_makes_a_backend_fetch_an_address(part: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        chat(messages=message([part]))


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    [
                        "role",
                        "content",
                        "type",
                        "text",
                        "image_url",
                        "url",
                        "tool_calls",
                        "function",
                        "arguments",
                    ]
                ),
                inner,
                max_size=4,
            )
        ),
        max_leaves=12,
    ),
    st.sampled_from(
        ["messages", "tools", "stream_options", "n", "chat_template_kwargs", "mm_processor_kwargs"]
    ),
)
def test_whatever_a_member_holds_the_answer_is_a_request_or_a_refusal(value: object, name: str) -> None:
    with contextlib.suppress(InvalidRequest):
        read(Endpoint.CHAT, body(**{name: value}), RULES)


def test_a_completion_says_nothing_about_reasoning() -> None:
    options = {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": False}}
    raw = json.dumps({"model": "m", "prompt": "x", **options}).encode()

    assert read(Endpoint.COMPLETIONS, raw, RULES).request.reasoning is None


@pytest.mark.parametrize("prompt", [None, [], 3, [1, "a"], ["a", 1], {"a": 1}, [[]] * 9])
def test_a_bad_prompt(prompt: object) -> None:
    with pytest.raises(InvalidRequest):
        read(Endpoint.COMPLETIONS, json.dumps({"model": "m", "prompt": prompt}).encode(), RULES)


def test_the_scheme_of_media_may_be_written_in_capitals() -> None:
    parts = [{"type": "image_url", "image_url": {"url": PIXEL.replace("data:", "DATA:")}}]

    assert chat(messages=message(parts)).request.images == 1


def test_remote_media_may_be_allowed() -> None:
    rules = WireRules(remote_media=True)
    parts = [{"type": "image_url", "image_url": {"url": "https://example.org/x.png"}}]

    assert chat(rules, messages=message(parts)).request.images == 1


# ---------------------------------------------------------------- forwarding


def test_every_member_the_gateway_does_not_own_travels_byte_for_byte() -> None:
    raw = (
        b'{ "top_k": 64.0, "model":"gemma-4","seed":12345678901234567890,"temperature" : 1e-1,'
        b'"logit_bias": {"48": 100},"x_new":{"a":[1, 2 ,"\\u00e9\\ud83d\\ude00"]},'
        b'"messages":[{"role":"user", "content":"caf\\u00e9 \xc3\xa9","name":null}],"stop":null }'
    )

    sent = read(Endpoint.CHAT, raw, RULES).body_for("gemma-4-31b-it")

    assert sent == (
        b'{"model":"gemma-4-31b-it","top_k":64.0,"seed":12345678901234567890,"temperature":1e-1,'
        b'"logit_bias":{"48": 100},"x_new":{"a":[1, 2 ,"\\u00e9\\ud83d\\ude00"]},'
        b'"messages":[{"role":"user", "content":"caf\\u00e9 \xc3\xa9","name":null}],"stop":null}'
    )


def test_a_change_leaves_what_stands_beside_it_as_it_was() -> None:
    raw = (
        b'{"model":"m","messages":[{"role":"user","content":"x"}],"stream":false,'
        b'"chat_template_kwargs":{"level": 1e1, "x":"\\u00e9"},"stream_options":null}'
    )
    incoming = read(Endpoint.CHAT, raw, RULES)

    sent = incoming.body_for(
        "s",
        {
            ("stream",): True,
            ("stream_options", "include_usage"): True,
            ("chat_template_kwargs", "enable_thinking"): False,
            ("skip_special_tokens",): False,
        },
    )

    assert sent == (
        b'{"model":"s","messages":[{"role":"user","content":"x"}],"stream":true,'
        b'"chat_template_kwargs":{"level":1e1,"x":"\\u00e9","enable_thinking":false},'
        b'"stream_options":{"include_usage":true},"skip_special_tokens":false}'
    )


def test_a_change_within_what_is_no_object_is_left_to_the_backend_to_refuse() -> None:
    raw = b'{"model":"m","messages":[{"role":"user","content":"x"}],"chat_template_kwargs":[{}],"n":1}'
    incoming = read(Endpoint.CHAT, raw, RULES)

    sent = incoming.body_for("s", {("chat_template_kwargs", "enable_thinking"): True, ("n",): 2})

    assert sent == (
        b'{"model":"s","messages":[{"role":"user","content":"x"}],"chat_template_kwargs":[{}],"n":2}'
    )


def test_a_body_whose_nesting_could_just_be_read_is_sent_from_deeper_calls_too() -> None:
    def read_nested(depth: int) -> WireRequest | None:
        raw = body(chat_template_kwargs={"x": "HERE"}).replace(b'"HERE"', b"[" * depth + b"]" * depth)
        with contextlib.suppress(InvalidRequest):
            return read(Endpoint.CHAT, raw, RULES)
        return None

    def sent_from(calls: int, incoming: WireRequest) -> bytes:
        if calls:
            return sent_from(calls - 1, incoming)
        return incoming.body_for("s", {("chat_template_kwargs", "enable_thinking"): True})

    depth, incoming = next(
        (depth, found) for depth in range(2_000, 0, -1) if (found := read_nested(depth)) is not None
    )

    assert b"[" * depth + b"]" * depth in sent_from(50, incoming)


def test_members_are_read_one_by_one() -> None:
    incoming = chat(tool_choice="required", stop=None)

    assert incoming.member("tool_choice") == "required"
    assert incoming.member("stop") is None
    assert incoming.member("tools") is None


def test_a_member_that_cannot_be_decoded_is_left_to_the_backend_to_refuse() -> None:
    incoming = read(Endpoint.CHAT, body(stop="HERE", seed=1).replace(b"HERE", b"\xff"), RULES)

    assert incoming.member("stop") is None
    assert b'"stop":"\xff"' in incoming.body_for("s")


def test_a_duplicate_member_means_the_same_here_and_there() -> None:
    raw = b'{"model":"a","messages":[{"role":"user","content":"x"}],"model":"b"}'
    incoming = read(Endpoint.CHAT, raw, RULES)

    assert incoming.request.model == "b"
    assert incoming.body_for("s") == b'{"model":"s","messages":[{"role":"user","content":"x"}]}'


def test_members_that_reach_into_the_engine_stay_here() -> None:
    incoming = chat(priority=-5, chat_template="{{ x }}", top_k=3)

    assert incoming.dropped == ("chat_template", "priority")
    assert set(json.loads(incoming.body_for("s"))) == {"model", "messages", "top_k"}


def test_what_stays_here_is_not_read_either() -> None:
    rules = WireRules(choices_max=1, drop_fields=frozenset({"n", "max_tokens"}))

    incoming = chat(rules, n=3, max_tokens=7)

    assert (incoming.request.choices, incoming.request.max_tokens) == (1, None)
    assert set(json.loads(incoming.body_for("s"))) == {"model", "messages"}


@pytest.mark.parametrize("text", ["short", "long " * 30_000])
def test_nor_do_they_get_there_as_arguments_of_the_template(text: str) -> None:
    kwargs = '{"enable_thinking":true,"chat\\u005ftemplate":"{{ x }}","priority":1,"chat_template":"{{ y }}"}'
    messages = json.dumps([{"role": "user", "content": text}])
    raw = f'{{"model":"m","messages":{messages},"chat_template_kwargs":{kwargs}}}'

    incoming = read(Endpoint.CHAT, raw.encode(), RULES)

    assert incoming.dropped == ("chat_template_kwargs.chat_template", "chat_template_kwargs.priority")
    assert incoming.request.reasoning
    sent = json.loads(incoming.body_for("s"))
    assert sent["chat_template_kwargs"] == {"enable_thinking": True}
    assert sent["messages"][0]["content"] == text


@pytest.mark.parametrize(
    ("fields", "sent"),
    [
        ({"tools": []}, {}),
        ({"tools": [], "tool_choice": "auto", "parallel_tool_calls": True}, {"parallel_tool_calls": True}),
        ({"tools": [], "tool_choice": "none"}, {}),
        ({"tools": [], "tool_choice": None}, {"tool_choice": None}),
        ({"tools": [], "tool_choice": "required"}, {"tool_choice": "required"}),  # the backend says why not
        ({"tools": None, "tool_choice": "auto"}, {"tools": None, "tool_choice": "auto"}),
        ({"tool_choice": "auto", "stream_options": {}}, {"tool_choice": "auto", "stream_options": {}}),
    ],
)
@pytest.mark.parametrize("text", ["short", "long " * 30_000])
def test_an_empty_array_of_tools_is_sent_as_no_tools(
    fields: dict[str, Any], sent: dict[str, Any], text: str
) -> None:
    incoming = chat(messages=message(text), **fields)

    assert incoming.request.tools == 0
    assert json.loads(incoming.body_for("s")) == {"model": "s", "messages": message(text), **sent}


def test_other_arguments_of_the_template_keep_their_bytes() -> None:
    raw = b'{"model":"m","messages":[{"role":"user","content":"x"}],"chat_template_kwargs":{"a" : 1.00}}'

    incoming = read(Endpoint.CHAT, raw, RULES)

    assert not incoming.dropped
    assert b'"chat_template_kwargs":{"a" : 1.00}' in incoming.body_for("s")


@pytest.mark.parametrize(
    ("fields", "rules", "options"),
    [
        pytest.param({}, RULES, None, id="not-streamed"),
        pytest.param({"stream": True}, RULES, {"include_usage": True}, id="asked-for-on-our-account"),
        pytest.param(
            {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            RULES,
            {"continuous_usage_stats": True, "include_usage": True},
            id="beside-other-options",
        ),
        pytest.param(
            {"stream": True, "stream_options": {"include_usage": True}},
            RULES,
            {"include_usage": True},
            id="the-caller-asked",
        ),
        pytest.param({"stream": True}, WireRules(usage_in_streams=False), None, id="switched-off"),
    ],
)
def test_the_usage_event_is_asked_for(
    fields: dict[str, Any], rules: WireRules, options: dict[str, object] | None
) -> None:
    incoming = chat(rules, **fields)

    assert json.loads(incoming.body_for("s")).get("stream_options") == options
    asked_by_caller = incoming.request.include_usage
    assert incoming.usage_injected is (options is not None and not asked_by_caller)


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        ([1.5] * 200_000, "too_many_items"),
        (["1"] * 300_000, "too_many_items"),
        ([[1], ["1"] * 120_000], "too_many_items"),
        ([[1]] * 150_000, "too_many_choices"),
        ([[1]] * 5 + ["x"], "too_many_choices"),
        ([[1], 2], "invalid_request"),
    ],
    ids=["fractions", "texts", "texts-for-ids", "lists", "lists-unread", "a-list-and-an-id"],
)
def test_a_prompt_of_many_values_is_not_decoded_at_once(prompt: object, code: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(Endpoint.COMPLETIONS, json.dumps({"model": "m", "prompt": prompt}).encode(), RULES)

    assert caught.value.code == code


TOO_LONG = "a\\n" * (TEXT_BYTES_MAX // 3)  # each a character and an escape of two


@pytest.mark.parametrize(
    "fields",
    [
        {"user": TOO_LONG},
        {TOO_LONG: 1},
        {"metadata": {"a": [TOO_LONG]}},
        {"messages": [*message("hi"), {"role": "assistant", "content": TOO_LONG}]},
        {"messages": message("hi", name=TOO_LONG)},
        {"messages": message("hi", tool_calls=[{"function": {"name": "f", "arguments": TOO_LONG}}])},
        {"tools": [{"type": "function", "function": {"name": "f", "description": TOO_LONG}}]},
    ],
    ids=["member", "name-of-one", "inner-member", "assistant", "name", "arguments", "tool"],
)
def test_more_than_any_model_reads_is_not_decoded_at_once(fields: dict[str, Any]) -> None:
    with pytest.raises(BodyTooLarge) as caught:
        read(Endpoint.CHAT, body(**fields), RULES)

    assert caught.value.status == 413
    assert "8,388,608 bytes" in caught.value.message


@pytest.mark.parametrize("prompt", [TOO_LONG, [TOO_LONG], [TOO_LONG[: TEXT_BYTES_MAX // 4]] * 4])
def test_nor_is_a_prompt(prompt: object) -> None:
    with pytest.raises(BodyTooLarge) as caught:
        read(Endpoint.COMPLETIONS, json.dumps({"model": "m", "prompt": prompt}).encode(), RULES)

    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    "more", [{}, {"priority": 1}, {"n": "three"}], ids=["", "as-a-whole", "with-an-error"]
)
def test_an_image_is_no_text_however_long_it_is(more: dict[str, Any]) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "iVBO" * 2_500_000}}
    raw = body(messages=message([{"type": "text", "text": "What is this?"}, image]), **more)

    if "n" in more:
        with pytest.raises(InvalidRequest, match="`n` must be an integer"):
            read(Endpoint.CHAT, raw, RULES)
    else:
        assert read(Endpoint.CHAT, raw, RULES).request.images == 1


def test_nor_is_one_with_escaped_slashes() -> None:
    source = "data:image/png;base64," + "iVB/" * 2_500_000
    image = {"type": "image_url", "image_url": {"url": source}}
    raw = body(messages=message([image])).replace(b"/", b"\\/")
    request = read(Endpoint.CHAT, raw, RULES)

    assert request.request.images == 1
    assert request.member("messages")[0]["content"] == [image]


def frames(count: int, size: int) -> list[dict[str, Any]]:
    source = "data:image/jpeg;base64," + "iVB/+aA8" * (size // 8)
    return [{"type": "image_url", "image_url": {"url": source}}] * count


def tools(count: int) -> list[dict[str, Any]]:
    fields = {name: {"type": "string", "description": "What it is."} for name in "abcde"}
    schema = {"type": "object", "properties": fields, "required": ["a", "b"]}
    function = {"description": "It does.", "parameters": schema}
    return [{"type": "function", "function": {"name": f"f{number}", **function}} for number in range(count)]


@pytest.mark.parametrize(
    "spelled", [("", ""), ("/", r"\/"), ("+", r"\u002B")], ids=["plain", "php", "dotnet"]
)
@pytest.mark.parametrize("more", [{}, {"priority": 1}], ids=["", "as-a-whole"])
@pytest.mark.parametrize(
    ("count", "size", "tools_"),
    [(1, 8_700_000, 0), (1, 8_700_000, 300), (17, 600_000, 25), (110, 80_000, 0), (150, 60_000, 25)],
    ids=["photo", "photo-and-tools", "pages-and-tools", "frames", "small-frames-and-tools"],
)
def test_nor_are_many_whatever_is_around_them(
    count: int, size: int, tools_: int, more: dict[str, Any], spelled: tuple[str, str]
) -> None:
    messages = message([{"type": "text", "text": "What is this?"}, *frames(count, size)])
    given = body(messages=messages, **{"tools": tools(tools_)} if tools_ else {}, **more)
    character, escaped = (part.encode() for part in spelled)
    raw = given.replace(character, escaped) if character else given
    assert len(raw) > TEXT_BYTES_MAX
    request = read(Endpoint.CHAT, raw, RULES)

    assert request.request.images == count
    assert request.member("messages") == messages
    assert json.loads(request.body_for("m"))["messages"] == messages


@pytest.mark.parametrize("text", ["a\n", "a b\x7f", "ä"])
def test_what_is_named_as_an_image_and_is_none_is_text(text: str) -> None:
    source = "data:image/png;base64," + text * (TEXT_BYTES_MAX // 2)
    image = {"type": "image_url", "image_url": {"url": source}}

    with pytest.raises(BodyTooLarge):
        read(Endpoint.CHAT, body(messages=message([image]), priority=1), RULES)


def test_a_long_text_of_a_user_is_read_to_say_how_long_it_is() -> None:
    (turn,) = chat(messages=message(TOO_LONG)).request.prompt.turns

    assert turn.long is not None
    assert turn.long.size_bytes >= TEXT_BYTES_MAX


def test_a_table_in_a_text_is_no_crowd_of_values() -> None:
    table = "1,2,3;" * 200_000

    assert read(Endpoint.CHAT, body(messages=message(table)), RULES).request.prompt.turns
    assert read(Endpoint.COMPLETIONS, json.dumps({"model": "m", "prompt": [table]}).encode(), RULES)


def test_a_prompt_of_ids_is_bounded_before_it_is_decoded() -> None:
    ids = b'{"model":"m","prompt":[' + b"1," * 1_100_000 + b"1]}"

    with pytest.raises(InvalidRequest) as caught:
        read(Endpoint.COMPLETIONS, ids, RULES)

    assert caught.value.code == "too_many_items"


@pytest.mark.parametrize("prompt", [b"[1,2,3]", b"[[1],[2,3]]", b"[[1, 2], [3]]"])
def test_a_prompt_has_as_many_ids_as_the_rules_say_and_no_more(prompt: bytes) -> None:
    def ask(written: bytes) -> None:
        rules = replace(RULES, token_ids_max=3)
        read(Endpoint.COMPLETIONS, b'{"model":"m","prompt":%b}' % written, rules)

    ask(prompt)
    with pytest.raises(InvalidRequest) as caught:
        ask(prompt.replace(b"3", b"3,4"))
    assert caught.value.code == "too_many_items"


@pytest.mark.parametrize("space", [b" ", b"\n  ", b"\t" * 60])
def test_lists_of_ids_may_stand_apart(space: bytes) -> None:
    raw = b'{"model":"m","prompt":[%b[1, 2],%b[3] ]}' % (space, space)

    assert read(Endpoint.COMPLETIONS, raw, RULES).request.prompt == Prompt(raw_tokens=2)


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(b"\xef\xbb\xbf" + body(), id="byte-order-mark"),
        pytest.param(body(max_tokens=16.0), id="a-whole-float"),
        pytest.param(
            b'{"model":"m","messages":[{"role":"user","content":"cut \\ud83d"}]}', id="half-an-emoji"
        ),
        pytest.param(
            b'{"model":"m","messages":[{"role":"user","content":"x"}],"tools":[{"d":"\\ud83d"}]}',
            id="half-an-emoji-in-a-tool",
        ),
        pytest.param(
            b'{"model":"m","image":"%b","messages":[{"role":"user","content":"cut \\ud83d"}]}'
            % (b"A" * 2_000_000),
            id="half-an-emoji-beside-an-image",
        ),
    ],
)
def test_what_other_servers_take_is_taken(raw: bytes) -> None:
    assert read(Endpoint.CHAT, raw, RULES).request.prompt.turns


def test_half_an_emoji_beside_a_prompt_of_many_ids_is_taken() -> None:
    raw = b'{"model":"m","user":"\\ud83d","prompt":[' + b"1," * 150_000 + b"1]}"

    assert read(Endpoint.COMPLETIONS, raw, RULES).request.prompt == Prompt(raw_tokens=150_001)


def test_scoring_a_prompt_asks_for_no_tokens_but_takes_one() -> None:
    raw = b'{"model":"m","prompt":"x","max_tokens":0,"echo":true}'

    incoming = read(Endpoint.COMPLETIONS, raw, RULES)

    assert incoming.request.max_tokens == 1
    assert json.loads(incoming.body_for("s"))["max_tokens"] == 0


def test_true_is_no_image_budget() -> None:
    assert chat(mm_processor_kwargs={"max_soft_tokens": True}).request.prompt.image_budget is None


# ---------------------------------------------------------------- at once, or member by member


def member_by_member(raw: bytes) -> WireRequest:
    members = wire.members_of(raw)
    return wire.read_members(Endpoint.CHAT, members, received(raw), RULES, size_bytes=len(raw), seen=None)


@pytest.mark.parametrize(
    ("fields", "is_ordinary"),
    [
        pytest.param({}, True, id="plain"),
        pytest.param({"stream": True}, True, id="stream"),
        pytest.param({"max_tokens": 7}, True, id="most"),
        pytest.param({"max_tokens": 7, "max_completion_tokens": 9}, True, id="most-of-two"),
        pytest.param({"messages": [*message("a"), *message("much more"), *message("a")]}, True, id="turns"),
        pytest.param({"messages": message("")}, True, id="no-text"),
        pytest.param({"top_k": 3, "response_format": {"type": "text"}}, True, id="what-is-not-read"),
        pytest.param({"n": 1}, False, id="choices"),
        pytest.param({"messages": message(["a"])}, False, id="parts"),
        pytest.param({"messages": message("a", tool_calls=[])}, False, id="calls"),
        pytest.param({"stream_options": None}, False, id="options"),
        pytest.param({"priority": 1}, False, id="dropped"),
    ],
)
def test_an_ordinary_chat_takes_a_shorter_way_to_the_same_request(
    fields: dict[str, Any], is_ordinary: bool
) -> None:
    raw = body(**fields)

    found = ordinary_request(wire.members_of(raw), CHAT.decode(raw), received(raw), RULES)

    assert found == (member_by_member(raw).request if is_ordinary else None)


def outcome(raw: bytes, *, at_once: bool) -> object:
    """Return what is made of a body, read at once where it can be or member by member, or why nothing is."""
    try:
        found = read(Endpoint.CHAT, raw, RULES) if at_once else member_by_member(raw)
    except InvalidRequest as error:
        return error.message, error.code, error.param
    return found.request, found.dropped, found.usage_injected, found.body_for("s")


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(body(), id="plain"),
        pytest.param(body(stream=True), id="stream"),
        pytest.param(body(stream=True, stream_options=None), id="no-options"),
        pytest.param(body(stream=True, stream_options={"x": 1}), id="options"),
        pytest.param(body(n=None, max_tokens=None, max_completion_tokens=None, stream=None), id="nulls"),
        pytest.param(body(n=2.0, max_tokens=7.0), id="whole-floats"),
        pytest.param(body(max_tokens=10**30), id="a-long-number"),
        pytest.param(body(max_tokens=True), id="true-for-a-number"),
        pytest.param(body(n=0, max_tokens=0), id="the-first-of-two-faults"),
        pytest.param(body(model="", messages=[]), id="the-first-of-two-others"),
        pytest.param(body(model="m" * 300, n=99), id="a-long-name"),
        pytest.param(body(priority=1, chat_template="x"), id="dropped"),
        pytest.param(body(tools=[{"a": 1}], reasoning_effort="low"), id="aside"),
        pytest.param(body(mm_processor_kwargs={"max_soft_tokens": 70}), id="budget"),
        pytest.param(body(messages=[{"role": "user", "content": "a"}, {"role": "x"}, "z"]), id="a-bad-one"),
        pytest.param(
            body(messages=[{"role": "u", "content": [3]}, {"role": "u", "content": 3}]), id="bad-two"
        ),
        pytest.param(body(messages=[{"role": "user", "content": ""}]), id="no-text"),
        pytest.param(body(messages=[{"role": "assistant", "content": "x", "tool_calls": []}]), id="no-calls"),
        pytest.param(
            body(
                messages=[
                    {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}], "reasoning": "t"}
                ]
            ),
            id="a-call",
        ),
        pytest.param(body(messages=[{"role": "user", "content": "x", "name": "a", "y": [{}]}]), id="beside"),
        pytest.param(body(messages=[{"role": "user"}] * 5_000), id="too-many"),
        pytest.param(body(messages=[{"role": "user", "content": "{" * 150_000}]), id="long-and-many-braces"),
        pytest.param(body(messages=[{"role": "user", "content": "x" * 300_000}]), id="long"),
        pytest.param(b'{"model":3,"messages":[{"role":"u"}],"model":"b"}', id="the-last-of-two"),
        pytest.param(b'{"model":"b","messages":[{"role":"u"}],"model":3}', id="the-last-is-bad"),
        pytest.param(b'{"mod\\u0065l":"m","messages":[{"role":"u","content":"x"}]}', id="a-spelled-name"),
        pytest.param(b'{"model":"m","messages":[{"role":"u","role":3,"content":"x"}]}', id="a-role-twice"),
        pytest.param(b'{"model":"m","messages":[{"role":"u","content":"\xff"}]}', id="not-utf-8"),
        pytest.param(b'{"model":"m","messages":[{"role":"u","content":"x \\ud83d y"}]}', id="half-an-emoji"),
        pytest.param(
            b'{"model":"m","messages":[{"role":"u","name":"\xff"}]}', id="not-utf-8-in-what-is-not-read"
        ),
        pytest.param(b'{"model":"m","messages":[{"role":"u","x":1e400}]}', id="a-number-in-what-is-not-read"),
        pytest.param(b'{"model":"m","messages":[{"role":"u","content":"x"}],"n":2}}', id="bytes-after"),
    ],
)
def test_what_is_read_at_once_is_what_is_read_member_by_member(raw: bytes) -> None:
    assert outcome(raw, at_once=True) == outcome(raw, at_once=False)


@given(
    st.dictionaries(
        st.sampled_from(
            ["model", "stream", "n", "max_tokens", "max_completion_tokens", "messages", "tools", "top_k"]
        ),
        st.none()
        | st.booleans()
        | st.integers(-2, 4)
        | st.floats(allow_nan=False)
        | st.sampled_from(["m", "", {}, [], [{}]])
        | st.lists(
            st.fixed_dictionaries(
                {"role": st.sampled_from(["user", "assistant", "", 3])},
                optional={
                    "content": st.sampled_from(["x", "", None, 3, ["y"], [{"type": "text", "text": "z"}]]),
                    "tool_calls": st.sampled_from([None, [], [{}], 3, [{"function": {"arguments": {}}}]]),
                    "reasoning": st.sampled_from([None, "t", 3]),
                },
            ),
            max_size=3,
        ),
    )
)
def test_whatever_a_body_holds_both_ways_of_reading_agree(fields: dict[str, Any]) -> None:
    raw = body(**fields)

    assert outcome(raw, at_once=True) == outcome(raw, at_once=False)


@given(st.dictionaries(st.text(max_size=6), st.integers() | st.text(max_size=6) | st.just({"a": [1.0]})))
def test_short_and_long_bodies_are_assembled_alike(fields: dict[str, Any]) -> None:
    fields = {"model": "m", "messages": message("hi"), **fields}
    with contextlib.suppress(InvalidRequest):
        request = read(Endpoint.CHAT, json.dumps(fields, indent=1).encode(), WireRules())

        assert request.body_for("a/b") == replace(request, size_bytes=10**6).body_for("a/b")
        assert json.loads(request.body_for("a/b")) == {**fields, "model": "a/b"}


# ---------------------------------------------------------------- affinity


@pytest.mark.parametrize(
    "after",
    [
        pytest.param([{"role": "user", "content": [{"type": "text", "text": "c"}]}], id="parts"),
        pytest.param([{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}], id="a-call"),
        pytest.param([{"role": "user", "content": "c", "name": "n"}], id="more-of-a-message"),
    ],
)
def test_what_comes_after_leaves_the_prefixes_before_it_as_they_were(after: list[Any]) -> None:
    first = [{"role": "system", "content": "s"}, {"role": "user", "content": ["a", "b"]}]
    short = chat(messages=first).request.prefixes
    long = chat(messages=[*first, *after], n=1.0).request.prefixes  # the float: read member by member

    assert [key for key, _ in short] == [key for key, _ in long[:2]]
    assert len({key for key, _ in long}) == 3


@pytest.mark.parametrize(
    "other",
    [
        [{"role": "user", "content": "a"}, {"role": "user", "content": "c"}],
        [{"role": "user", "content": "ab"}],
        [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}],
        [{"role": "user", "content": ["a", "b"]}],
        [{"role": "user", "content": ["a", ""]}, {"role": "user", "content": "b"}],
        [{"role": "user", "content": "b"}, {"role": "user", "content": "a"}],
    ],
)
def test_what_differs_anywhere_has_another_hash(other: list[Any]) -> None:
    one = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]

    assert chat(messages=one).request.prefixes[-1][0] != chat(messages=other).request.prefixes[-1][0]


def test_a_conversation_shares_its_prefixes_with_its_next_turn() -> None:
    first = [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]
    after = [*first, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]

    short, long = chat(messages=first).request.prefixes, chat(messages=after).request.prefixes

    assert [key for key, _ in short] == [key for key, _ in long[:2]]
    assert len(long) == 4
    assert [share for _, share in long] == sorted(share for _, share in long)
    assert long[-1][1] == 1.0


def keys(messages: list[Any], **fields: Any) -> list[int]:
    return [key for key, _ in chat(messages=messages, **fields).request.prefixes]


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


SYSTEM_AND_USER = [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [tool("f")]},
        {"tools": [tool("f"), tool("g")]},
        {"tools": [tool("g"), tool("f")]},
        {"reasoning_effort": "low"},
        {"chat_template_kwargs": {"enable_thinking": True}, "tools": [tool("f")]},
        {"cache_salt": "1"},
        {"cache_salt": "2"},
    ],
)
def test_a_conversation_with_something_else_before_its_messages_is_another(fields: dict[str, Any]) -> None:
    others: list[dict[str, Any]] = [{}, {"tools": [tool("f")], "cache_salt": "1"}, {"tools": [tool("h")]}]

    for other in others:
        assert set(keys(SYSTEM_AND_USER, **fields)).isdisjoint(keys(SYSTEM_AND_USER, **other))


def test_a_conversation_in_which_the_model_thinks_is_another_with_the_same_tools() -> None:
    thinking = keys(SYSTEM_AND_USER, tools=[tool("f")], reasoning_effort="low")

    assert set(thinking).isdisjoint(keys(SYSTEM_AND_USER, tools=[tool("f")]))


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [], "temperature": 0.5},
        {"reasoning_effort": "none"},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"cache_salt": None},
    ],
)
def test_what_does_not_change_the_prompt_changes_no_conversation(fields: dict[str, Any]) -> None:
    assert keys(SYSTEM_AND_USER, **fields) == keys(SYSTEM_AND_USER)


def test_tools_count_with_the_system_prompt_or_alone_where_there_is_none() -> None:
    tools = [tool("f" * 900)]

    (_, with_system), _ = chat(messages=SYSTEM_AND_USER, tools=tools).request.prefixes
    alone, question = chat(messages=message("a"), tools=tools).request.prefixes
    again, other = chat(messages=message("b"), tools=tools).request.prefixes

    assert with_system > 0.9
    assert alone == again
    assert alone[1] > 0.9
    assert question[0] != other[0]


def test_the_first_line_of_a_developer_stands_behind_the_tools_like_that_of_a_system() -> None:
    first = [[{"role": role, "content": "s"}, *message("a")] for role in ("system", "developer", "user")]

    assert [len(keys(one, tools=[tool("f")])) for one in first] == [2, 2, 3]


@pytest.mark.parametrize(
    "first",
    [
        pytest.param({"content": "x" * 900}, id="text"),
        pytest.param({"content": ["x" * 900]}, id="part"),
        pytest.param({"tool_calls": [{"function": {"name": "f", "arguments": "x" * 900}}]}, id="call"),
        pytest.param({"content": [{"image_url": f"data:,{'x' * 900}"}]}, id="image"),
    ],
)
def test_whatever_a_message_has_counts_for_its_share(first: dict[str, Any]) -> None:
    messages = [{"role": "assistant", **first}, *message("a")]

    (_, share), _ = chat(messages=messages, n=1).request.prefixes

    assert 0.9 < share < 1


def test_another_call_of_a_tool_makes_another_message() -> None:
    def called(name: str, arguments: str) -> list[Any]:
        return [{"role": "assistant", "tool_calls": [{"function": {"name": name, "arguments": arguments}}]}]

    asked = [called("f", "{}"), called("g", "{}"), called("f", "[]")]
    assert len({keys(one)[0] for one in asked}) == 3


def test_a_message_is_the_same_whether_it_is_marked_to_be_cached_or_not() -> None:
    text = {"type": "text", "text": "a"}
    marked = {**text, "cache_control": {"type": "ephemeral"}}

    assert keys(message("a")) == keys(message([text])) == keys(message([marked]))
    assert keys(message([text, text])) == keys(message([text, marked]))


def test_the_images_and_recordings_of_all_messages_count_together() -> None:
    image, recording = {"image_url": PIXEL}, {"input_audio": {"data": "AAAA", "format": "wav"}}
    request = chat(messages=[*message([image, recording]), *message([recording, recording, image])]).request

    assert (request.images, request.audios) == (2, 3)


def test_an_image_makes_another_message() -> None:
    def picture(data: str) -> dict[str, Any]:
        return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}

    text = {"type": "text", "text": "a"}
    asked = [message([text]), message([text, picture("AAAA")]), message([text, picture("BBBB")])]
    assert len({keys(one)[0] for one in asked}) == 3


def test_so_does_a_recording() -> None:
    def recording(data: str) -> dict[str, Any]:
        return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}

    assert keys(message([recording("AAAA")])) != keys(message([recording("BBBB")]))


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_thoughts_are_in_the_prompt_until_the_user_says_something_else(name: str) -> None:
    def told(thought: str) -> list[Any]:
        call = {"role": "assistant", "content": None, "tool_calls": [tool("f")], name: thought}
        return [*SYSTEM_AND_USER, call, {"role": "tool", "content": "1"}]

    after = [{"role": "assistant", "content": "c"}, {"role": "user", "content": "d"}]

    assert keys([*told("x"), *told("y")[2:]])[:4] == keys(told("x"))
    assert keys(told("x"))[2:] != keys(told("y"))[2:]
    assert keys([*told("x"), *after])[:2] == keys(told("x"))[:2]
    assert set(keys([*told("x"), *after])[2:]).isdisjoint(keys(told("x")))
    assert keys([*told("x"), *after]) == keys([*told("y"), *after])

    kept = {"chat_template_kwargs": {"preserve_thinking": True}}
    assert keys([*told("x"), *after], **kept)[:4] == keys(told("x"), **kept)


def test_thoughts_are_in_the_prompt_where_no_user_has_said_anything() -> None:
    def told(thought: str) -> list[Any]:
        return [{"role": "assistant", "content": None, "tool_calls": [tool("f")], "reasoning": thought}]

    assert keys(told("x")) != keys(told("y"))


def test_a_text_beside_a_thought_without_calls_is_in_the_prompt() -> None:
    def told(text: str) -> list[Any]:
        return [{"role": "assistant", "content": [text], "reasoning": "x"}, *message("d")]

    assert keys(told("a")) != keys(told("b"))


def test_other_conversations_share_nothing() -> None:
    one = chat(messages=[{"role": "user", "content": "a"}]).request.prefixes
    other = chat(messages=[{"role": "user", "content": "b"}]).request.prefixes

    assert one[0][0] != other[0][0]
