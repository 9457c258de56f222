"""The chat template's arithmetic, held to prompt lengths that vLLM reported for Gemma 4."""

import json
from typing import Any

import pytest

from gateway.core.estimation import (
    Piece,
    Pieces,
    bound,
    image_budget,
    is_plain,
    margin_tokens,
    pieces,
    plain_texts,
    texts_in,
)
from gateway.core.policy import TemplateCosts
from gateway.core.request import CountMode, Estimate, Prompt, Turn

COSTS = TemplateCosts()
RIVER = "Name a river."
# Counts of Gemma's own vocabulary, without <bos>.
COUNTS = {
    RIVER: 4,
    "Name ariver.": 4,
    "Be brief.": 3,
    "hi": 1,
    "yes": 1,
    "go on": 2,
    "robot": 1,
}


def length(prompt: Prompt, costs: TemplateCosts = COSTS) -> int:
    parts = pieces(prompt, costs)
    return parts.total([COUNTS[piece.text] for piece in parts.texts])


def chat(*turns: Turn, thinking: bool = False, tools_json: str = "") -> Prompt:
    return Prompt(turns=turns, thinking=thinking, tools_json=tools_json, tools_texts=texts_in(tools_json))


def _tool(name: str, description: str, properties: dict[str, Any]) -> str:
    """Return the JSON of a list of one tool that needs all its properties."""
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    function = {"name": name, "description": description, "parameters": parameters}
    return json.dumps([{"type": "function", "function": function}], separators=(",", ":"))


def user(*texts: str) -> Turn:
    return Turn("user", texts)


def assistant(*texts: str) -> Turn:
    return Turn("assistant", texts)


# The last column is `usage.prompt_tokens` or /tokenize's `count`, as a vLLM server answered.
REPORTED = [
    ("one-message", chat(user(RIVER)), 17),
    ("text-parts-are-joined", chat(user("Name a", "river.")), 17),
    ("surrounding-blanks-are-stripped", chat(user(f"\n  {RIVER}\t \n")), 17),
    ("a-system-message", chat(Turn("system", ("Be brief.",)), user(RIVER)), 25),
    ("thinking-makes-a-system-turn", chat(user(RIVER), thinking=True), 20),
    ("an-unknown-role-is-counted", chat(Turn("robot", ("hi",))), 14),
    ("a-conversation", chat(user("hi"), assistant("yes"), user("go on")), 27),
    ("a-completion", Prompt(raw_texts=(RIVER,)), 5),
    ("a-completion-of-ids", Prompt(raw_tokens=3), 3),
]


@pytest.mark.parametrize(
    ("prompt", "tokens"), [row[1:] for row in REPORTED], ids=[row[0] for row in REPORTED]
)
def test_the_length_is_the_one_the_engine_reported(prompt: Prompt, tokens: int) -> None:
    assert length(prompt) == tokens


# By the template's rules, where no engine's answer was at hand.
DERIVED = [
    ("an-empty-message", chat(user("")), 13),
    ("no-content-at-all", chat(Turn("user", ())), 13),
    ("thinking-joins-the-system-turn", chat(Turn("system", ("Be brief.",)), user(RIVER), thinking=True), 23),
    ("developer-is-a-system-role", chat(Turn("developer", ("Be brief.",)), user(RIVER), thinking=True), 23),
    ("assistants-in-a-row-share-a-turn", chat(user("hi"), assistant("yes"), assistant("yes")), 8 + 6 + 6 + 3),
    ("old-thoughts-are-dropped", chat(user("hi"), assistant("<|channel>why<channel|> yes")), 8 + 6 + 6),
    ("an-open-thought-drops-the-rest", chat(user("hi"), assistant("yes<|channel>why")), 8 + 6 + 6),
    ("a-thought-that-was-open-before-is-dropped", chat(user("hi"), assistant("<channel|>yes")), 8 + 6 + 6),
    ("thoughts-of-others-are-text", chat(user("hi"), assistant("yes<channel|>")), 8 + 6 + 6),
    ("of-several-completions-the-longest", Prompt(raw_texts=("hi", RIVER, "yes")), 5),
    ("an-empty-completion", Prompt(raw_texts=("",)), 1),
    ("one-image", chat(Turn("user", (RIVER,), images=1)), 17 + 282),
    ("two-images", chat(Turn("user", (RIVER,), images=2)), 17 + 2 * 282),
    ("an-audio-of-unknown-length", chat(Turn("user", (RIVER,), audios=1)), 17 + 752),
]


@pytest.mark.parametrize(("prompt", "tokens"), [row[1:] for row in DERIVED], ids=[row[0] for row in DERIVED])
def test_the_length_follows_the_template(prompt: Prompt, tokens: int) -> None:
    assert length(prompt) == tokens


@pytest.mark.parametrize(
    "prompt", [row[1] for row in REPORTED + DERIVED], ids=[row[0] for row in REPORTED + DERIVED]
)
def test_a_plain_chat_has_the_same_length_either_way(prompt: Prompt) -> None:
    whole = pieces(prompt, COSTS)
    same = (whole.fixed_tokens, [(piece.text, piece.comes_again) for piece in whole.texts])

    is_other = not prompt.turns or not is_plain(prompt) or prompt.thinking or prompt.turns[0].role == "robot"
    assert plain_texts(prompt, COSTS, 1_000) == (None if is_other else same)


def test_a_chat_is_short_up_to_the_limit() -> None:
    prompt = chat(user("four", "four"), user("four"))

    assert plain_texts(prompt, COSTS, 12) is not None
    assert plain_texts(prompt, COSTS, 11) is None


def test_a_thought_in_the_middle_leaves_what_stands_around_it() -> None:
    parts = pieces(chat(assistant(" a<|channel>b<channel|>c<channel|>d<|channel>e<|channel>f ")), COSTS)

    assert parts.texts == (Piece("acd"),)


def test_system_parts_are_joined_with_a_space_and_others_with_nothing() -> None:
    parts = pieces(chat(Turn("system", (" a ", "b")), Turn("user", (" a ", "b"))), COSTS)

    assert [piece.text for piece in parts.texts] == ["a b", "ab"]


def test_the_requests_own_image_budget_wins() -> None:
    prompt = Prompt(turns=(Turn("user", (RIVER,), images=1),), image_budget=1120)

    assert image_budget(prompt, COSTS) == 1120
    assert length(prompt) == 17 + 1122


def test_a_known_audio_length_replaces_the_most_one_can_have() -> None:
    prompt = Prompt(turns=(Turn("user", (RIVER,), audios=2),), audio_tokens=100)

    assert length(prompt) == 17 + 100 + 4


def test_every_constant_of_the_template_is_used() -> None:
    doubled = TemplateCosts(bos=2, per_turn=10, generation_prompt=6, empty_thought=0)

    assert length(chat(user(RIVER)), doubled) == 2 + 10 + 4 + 6


def test_tools_are_counted_at_a_bound_in_a_system_turn() -> None:
    parts = pieces(chat(user(RIVER), tools_json="[{}]"), COSTS)

    assert parts.fixed_tokens == 1 + 5 + 5 + 3 + 4
    assert parts.texts == (Piece("[{}]", comes_again=True), Piece(RIVER))


LANGUAGES = '["en","de","fr","es","it","pt","nl","sv","da","no","fi","pl","cs","el","tr","ru","uk","ar","he"]'
FIELDS = ("street", "city", "county", "country", "phone", "email", "fax", "site")
# JSON, its tokens, and those of what the official template makes of it, both by Gemma's own vocabulary.
DECLARED = [
    ("nothing-but-a-name", '[{"type":"function","function":{"name":"now"}}]', 13, 11),
    (
        "figures",
        _tool("add", "Adds.", {one: {"type": "number"} for one in "xyz"}),
        57,
        61,
    ),
    (
        "a-list-of-words",
        _tool(
            "translate",
            "Translates the last answer.",
            {"to": {"type": "string", "enum": json.loads(LANGUAGES)}},
        ),
        83,
        119,
    ),
    (
        "many-described-fields",
        _tool(
            "change",
            "Changes an address.",
            {one: {"type": "string", "description": f"The {one} to write to."} for one in FIELDS},
        ),
        168,
        211,
    ),
]


@pytest.mark.parametrize(
    ("tools_json", "written", "declared"), [row[1:] for row in DECLARED], ids=[row[0] for row in DECLARED]
)
def test_declarations_are_never_longer_than_the_bound(tools_json: str, written: int, declared: int) -> None:
    parts = pieces(chat(user(RIVER), tools_json=tools_json), COSTS)

    bound_tokens = parts.total([written, 4]) - (1 + 5 + 5 + 4 + 3 + 4)
    assert declared <= bound_tokens <= 1.5 * declared + 8


CALL = Turn("assistant", (), tool_calls=(("get_weather", '{"city":"Paris"}'),))
RESULT = Turn("tool", (" sunny\n",))


def test_a_tool_round_takes_its_bound_and_its_texts() -> None:
    parts = pieces(chat(user("hi"), CALL, RESULT), COSTS)

    assert parts.texts == (
        Piece("hi"),
        Piece("get_weather", 200),
        Piece('{"city":"Paris"}'),
        Piece(" sunny\n"),
    )
    # No generation prompt and no empty thought: the model goes on in the turn of its call. Paris is quoted.
    assert parts.fixed_tokens == 1 + 5 + 5 + 22 + 2


# Arguments, their tokens, and those of the whole round f(arguments) -> ok, by the official template.
CALLED = [
    ("words", f'{{"tags":{LANGUAGES}}}', 41, 96),
    ("rows", '{"rows":[' + ",".join(['{"name":"bob","city":"rome"}'] * 10) + "]}", 84, 141),
]


@pytest.mark.parametrize(
    ("arguments", "written", "rendered"), [row[1:] for row in CALLED], ids=[row[0] for row in CALLED]
)
def test_arguments_are_never_longer_than_the_bound(arguments: str, written: int, rendered: int) -> None:
    call = Turn("assistant", (), tool_calls=(("f", arguments),))

    parts = pieces(chat(user("hi"), call, Turn("tool", ("ok",))), COSTS)

    bound_tokens = parts.total([1, 1, written, 1]) - (1 + 6 + 5)
    assert rendered <= bound_tokens <= 1.5 * rendered


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        ("{}", 0),
        ("", 0),
        ('{"a":1,"b":[true,null]}', 0),
        ('{"a":"b"}', 1),
        ('{"a": "b", "c": ["d", "e"]}', 3),
        ('{"a":"say \\"b\\": \\"c\\""}', 1),
        ('{"a":""}', 1),
        ('":":":":":"', 0),  # no JSON, and nothing that shortens the prompt
    ],
)
def test_texts_are_told_from_keys_and_from_quotes_within_them(arguments: str, texts: int) -> None:
    call = Turn("assistant", (), tool_calls=(("f", arguments),))

    assert pieces(chat(user("hi"), call), COSTS).fixed_tokens == 1 + 5 + 5 + 22 + 2 * texts


def test_the_answer_after_a_tool_round_stands_in_the_same_turn() -> None:
    ended = pieces(chat(user("hi"), CALL, RESULT, assistant("yes")), COSTS)
    asked = pieces(chat(user("hi"), CALL, RESULT, assistant("yes"), user("hi")), COSTS)

    assert ended.fixed_tokens == 1 + 5 + 5 + 22 + 2 + 2 + 7
    assert asked.fixed_tokens == ended.fixed_tokens + 5


@pytest.mark.parametrize(
    ("turns", "rounds"),
    [
        ((CALL,), 1),
        ((CALL, RESULT), 1),
        ((CALL, RESULT, RESULT), 2),
        ((RESULT,), 1),
        ((RESULT, RESULT), 2),
        ((Turn("assistant", (), tool_calls=CALL.tool_calls * 2), RESULT, RESULT), 2),
        ((CALL, RESULT, CALL, RESULT), 2),
    ],
    ids=[
        "unanswered",
        "answered",
        "a-result-too-many",
        "a-result-without-call",
        "two-without-call",
        "two-at-once",
        "twice",
    ],
)
def test_no_call_and_no_result_is_free(turns: tuple[Turn, ...], rounds: int) -> None:
    dear = TemplateCosts(tool_round=1000)

    assert pieces(chat(user("hi"), *turns), dear).fixed_tokens // 1000 == rounds


def test_results_alone_are_a_prompt() -> None:
    assert pieces(chat(RESULT), COSTS).fixed_tokens == 1 + 22 + 7


def test_alternatives_take_the_longest_and_sums_take_all() -> None:
    texts = (Piece("a"), Piece("b", 150))

    assert Pieces(10, texts).total([3, 3]) == 18
    assert Pieces(10, texts, alternatives=True).total([3, 3]) == 15
    assert Pieces(10, (), alternatives=True).total([]) == 10


PLAIN = [
    ("text", chat(user(RIVER)), True),
    ("text-with-thinking", chat(user(RIVER), thinking=True), True),
    ("a-completion", Prompt(raw_texts=(RIVER,)), True),
    ("several-completions", Prompt(raw_texts=(RIVER, RIVER)), False),
    ("ids", Prompt(raw_tokens=3), False),
    ("tools", chat(user(RIVER), tools_json="[{}]"), False),
    ("a-call", chat(user(RIVER), CALL), False),
    ("a-result", chat(user(RIVER), RESULT), False),
    ("an-image", chat(Turn("user", (), images=1)), False),
    ("an-audio", chat(Turn("user", (), audios=1)), False),
]


@pytest.mark.parametrize(("prompt", "plain"), [row[1:] for row in PLAIN], ids=[row[0] for row in PLAIN])
def test_only_text_alone_can_be_compared_with_usage(prompt: Prompt, plain: bool) -> None:
    assert is_plain(prompt) is plain


MARGINS = [
    ("exact-short", 100, CountMode.EXACT, 0.0, 17),
    ("exact-long", 100_000, CountMode.EXACT, 0.0, 116),
    ("exact-learned", 10_000, CountMode.EXACT, 300.0, 300),
    ("exact-learned-at-most-5-percent", 10_000, CountMode.EXACT, 9000.0, 500),
    ("exact-learned-on-a-short-prompt", 100, CountMode.EXACT, 9000.0, 17),
    ("approximate-short", 100, CountMode.APPROXIMATE, 0.0, 16),
    ("approximate-long", 10_000, CountMode.APPROXIMATE, 300.0, 1000),
    ("bound", 10_000, CountMode.BOUND, 300.0, 0),
]


@pytest.mark.parametrize(
    ("tokens", "mode", "learned", "margin"), [row[1:] for row in MARGINS], ids=[row[0] for row in MARGINS]
)
def test_the_margin_is_as_wide_as_the_count_is_uncertain(
    tokens: int, mode: CountMode, learned: float, margin: int
) -> None:
    assert margin_tokens(tokens, mode, learned) == margin


@pytest.mark.parametrize(("at_least", "tokens"), [(5000, 5000), (900, 1001)], ids=["known", "just-above"])
def test_a_bound_lies_above_the_limit(at_least: int, tokens: int) -> None:
    assert bound(at_least, 1000) == Estimate(tokens, tokens, CountMode.BOUND)
