"""Estimation: which texts to count for a prompt's length, and what the chat template adds to them.

The official Gemma 4 chat template is additive: every turn adds the same few markers, and no token spans a
marker. So the length of a prompt is a sum over its texts plus constants, and the template never has to be
rendered (which is quadratic in the number of messages). For parts that are not exactly additive, tool
declarations and tool rounds, an upper bound is used. Figures: docs/estimate.md#the-template.
"""

import math
from collections.abc import Iterator, Sequence

from gateway.core.policy import TemplateCosts
from gateway.core.request import CountMode, Estimate, LongText, Prompt, Turn
from gateway.core.value import valueclass

IMAGE_BUDGETS = (70, 140, 280, 560, 1120)
"""Supported soft tokens per image; the processor accepts no others."""

QUOTED_TOKENS = 2
"""Extra tokens per text value in JSON: the template quotes it with a token at either end, where JSON's quotes
share theirs with commas and colons."""

MARGIN_FLOOR_TOKENS = 16
EXACT_MARGIN = 0.001
"""Added to an exact count for `tokens_max`: so many tokens, and this share of it. A choice: ten times the
worst error measured, 0.01 % (docs/estimate.md). No band of an approximate count is narrower than these
tokens, either."""

APPROXIMATE_BAND = 0.10
"""Added to an approximate count, as a share of it. A choice: 86.8 % of the texts measured are within it
(docs/estimate.md)."""

LEARNED_MARGIN_MAX = 0.05
"""Limit on the learned margin of exact counts, as a share of the count. A choice: callers influence what is
learned."""

_SYSTEM_ROLES = frozenset({"system", "developer"})
_SPOKEN = frozenset({"system", "developer", "user", "assistant", "model"})
_ONE_TOKEN_ROLES = frozenset({"system", "developer", "user", "assistant", "model", "tool"})
_THOUGHT_OPENS, _THOUGHT_CLOSES = "<|channel>", "<channel|>"


@valueclass(frozen=True, slots=True)
class Piece:
    """A text to count, and the weight of its tokens in the prompt, in percent.

    A long text is in `long`, and `text` is empty.

    Attributes:
        comes_again: Whether it is likely to recur in unrelated requests, like a system prompt.
    """

    text: str
    percent: int = 100
    long: LongText | None = None
    comes_again: bool = False

    def weigh(self, tokens: int) -> int:
        """Return what `tokens` of this text add to the prompt, rounded up."""
        return -(-tokens * self.percent // 100)


@valueclass(frozen=True, slots=True)
class Pieces:
    """The components of a prompt's length.

    Attributes:
        fixed_tokens: Tokens that need no counting: markers, images, audio, prompts given as ids.
        texts: Texts to count.
        alternatives: Whether the texts are separate prompts (a list in /v1/completions). Each runs as its own
            sequence, so the longest one determines the length.
    """

    fixed_tokens: int
    texts: tuple[Piece, ...]
    alternatives: bool = False

    def total(self, counts: Sequence[int]) -> int:
        """Return the prompt's tokens, given the tokens of `texts` in order."""
        weighed = [piece.weigh(tokens) for piece, tokens in zip(self.texts, counts, strict=True)]
        if self.alternatives:
            return self.fixed_tokens + max(weighed, default=0)
        return self.fixed_tokens + sum(weighed)


def pieces(prompt: Prompt, costs: TemplateCosts) -> Pieces:
    """Return the texts of `prompt` to count, and the tokens of everything else.

    Exact for text chats. Tool declarations and rounds are upper bounds, an image counts as its whole budget.
    """
    if not prompt.turns:
        return _completion(prompt, costs)
    fixed = costs.bos
    images = audios = 0
    texts: list[Piece] = []
    if prompt.thinking:
        fixed += costs.think_marker
    if prompt.tools_json:
        fixed += QUOTED_TOKENS * prompt.tools_texts
        texts.append(Piece(prompt.tools_json, comes_again=True))
    if (prompt.thinking or prompt.tools_json) and prompt.turns[0].role not in _SYSTEM_ROLES:
        fixed += costs.per_turn  # an additional system turn for the tools
    previous: Turn | None = None  # the last one that is not a tool's result
    calls_open = 0  # calls of that turn without a result so far
    for turn in prompt.turns:
        role = turn.role
        images += turn.images
        audios += turn.audios
        if role == "tool":
            # A result is inside the round of its call. One without a call costs a round of its own.
            fixed += 0 if calls_open else costs.tool_round
            calls_open = max(0, calls_open - 1)
            texts.append(Piece("".join(turn.texts)))
            continue
        fixed += costs.per_turn
        if role == "assistant" and previous is not None and previous.role == "assistant":
            fixed -= costs.generation_prompt  # it continues in the same turn, without opening another
        if role not in _ONE_TOKEN_ROLES:
            fixed -= 1
            texts.append(Piece(role))
        texts.append(_piece(turn))
        for name, arguments in turn.tool_calls:
            fixed += costs.tool_round + QUOTED_TOKENS * texts_in(arguments)
            texts += (Piece(name, 200), Piece(arguments))  # the name occurs in both call and result
        calls_open = len(turn.tool_calls)
        previous = turn
    if previous is None or not previous.tool_calls:
        # After a tool's result the model continues after its call; otherwise a turn is opened for it.
        fixed += costs.generation_prompt + (0 if prompt.thinking else costs.empty_thought)
    if images or audios:
        fixed += _media(prompt, costs, images, audios)
    return Pieces(fixed, tuple([piece for piece in texts if piece.text or piece.long is not None]))


def plain_texts(
    prompt: Prompt, costs: TemplateCosts, chars_max: int
) -> tuple[int, list[tuple[str, bool]]] | None:
    """Return the result of `pieces` for a short chat of nothing but text, at a quarter of the cost.

    These are the fixed tokens, and each text with its `comes_again`. Most requests are such chats. For any
    other, and for one of more than `chars_max` characters, returns None.
    """
    turns = prompt.turns
    if not turns or prompt != Prompt(turns):
        return None
    fixed = costs.bos + costs.per_turn * len(turns) + costs.generation_prompt + costs.empty_thought
    texts = []
    role = ""
    for turn in turns:
        before, role = role, turn.role
        if role not in _SPOKEN or turn != Turn(role, turn.texts):
            return None
        for text in turn.texts:
            chars_max -= len(text)
        if chars_max < 0:
            return None
        if role != "assistant" and len(turn.texts) == 1:
            text = turn.texts[0].strip()
        else:
            text = _content(turn)
            if role == before == "assistant":
                fixed -= costs.generation_prompt
        if text:
            texts.append((text, role in _SYSTEM_ROLES))
    return fixed, texts


def texts_in(json: str) -> int:
    """Return the number of texts in some JSON, without keys, which the template does not quote."""
    strings = (json.count('"') - json.count('\\"')) // 2
    keys = json.count('":') - json.count('\\":')
    return max(0, strings - keys)


def _completion(prompt: Prompt, costs: TemplateCosts) -> Pieces:
    """Return the pieces of a /v1/completions prompt: `<bos>` and the unchanged text or ids."""
    texts = tuple(Piece(text) for text in prompt.raw_texts if text)
    return Pieces(costs.bos if prompt.raw_texts else prompt.raw_tokens, texts, alternatives=True)


def _media(prompt: Prompt, costs: TemplateCosts, images: int, audios: int) -> int:
    """Return the tokens of images and audio: a budget each, regardless of their size."""
    audio_tokens = prompt.audio_tokens or audios * costs.audio
    return (
        images * (image_budget(prompt, costs) + costs.image_markers)
        + audio_tokens
        + audios * costs.audio_markers
    )


def image_budget(prompt: Prompt, costs: TemplateCosts) -> int:
    """Return the maximum soft tokens of an image in this prompt."""
    return costs.image if prompt.image_budget is None else prompt.image_budget


def _piece(turn: Turn) -> Piece:
    if turn.long is not None:
        return Piece("", 100, _around(turn, turn.long))
    return Piece(_content(turn), 100, None, turn.role in _SYSTEM_ROLES)


def _content(turn: Turn) -> str:
    """Return a turn's text as the template renders it: parts stripped, old thoughts of the model dropped."""
    if turn.role == "assistant":
        return "".join([without_thoughts(text) for text in turn.texts])
    if len(turn.texts) == 1:
        return turn.texts[0].strip()
    return _joint(turn).join(text.strip() for text in turn.texts)


def _joint(turn: Turn) -> str:
    """Return the separator that the template inserts between two texts."""
    return " " if turn.role in _SYSTEM_ROLES else ""


def _around(turn: Turn, long: LongText) -> LongText:
    """The same for a turn with a long text. Never an assistant's, whose text is always decoded."""
    if not turn.texts:
        return long
    joint = _joint(turn)
    before = "".join([text.strip() + joint for text in turn.texts[: turn.texts_before_long]])
    after = "".join([joint + text.strip() for text in turn.texts[turn.texts_before_long :]])

    def pieces() -> Iterator[str]:
        held = before
        for index, piece in enumerate(long.pieces()):
            if index:
                yield held
            held = piece if index else held + piece
        yield held + after

    size_bytes = long.size_bytes + 4 * (len(before) + len(after))
    return LongText(size_bytes, hash((before, long.key, after)), pieces)


def without_thoughts(text: str) -> str:
    """Return a text of the model as the template renders it: stripped, without earlier reasoning."""
    if _THOUGHT_OPENS not in text and _THOUGHT_CLOSES not in text:
        return text.strip()
    kept = []
    start = 0
    closes = 0
    while closes >= 0:  # step by step, because splitting megabytes of markers at once would hold the GIL
        closes = text.find(_THOUGHT_CLOSES, start)
        end = closes if closes >= 0 else len(text)
        opens = text.find(_THOUGHT_OPENS, start, end)
        if part := text[start : opens if opens >= 0 else end]:
            kept.append(part)
        start = end + len(_THOUGHT_CLOSES)
    return "".join(kept).strip()


def is_plain(prompt: Prompt) -> bool:
    """Return whether a backend's own count should equal the estimate: a single prompt of text only.

    Tools are counted as a bound, media as a budget, and a list of prompts is reported as a sum, so none of
    them says anything about how well text is counted.
    """
    if not prompt.turns:
        return len(prompt.raw_texts) == 1
    if prompt.tools_json:
        return False
    for turn in prompt.turns:
        if turn.role == "tool" or turn.images or turn.audios or turn.tool_calls:
            return False
    return True


def margin_tokens(tokens: int, mode: CountMode, learned_p99_tokens: float = 0.0) -> int:
    """Return how far above `tokens` the true length may be.

    Exact: 16 tokens + 0.1 %, or the 99th percentile of how much longer prompts were than counted, capped at
    5 %. Approximate: the 10 % band of class counts, at least 16 tokens. A bound needs no margin.
    """
    if mode is CountMode.BOUND:
        return 0
    if mode is CountMode.APPROXIMATE:
        return max(MARGIN_FLOOR_TOKENS, math.ceil(APPROXIMATE_BAND * tokens))
    learned = min(learned_p99_tokens, LEARNED_MARGIN_MAX * tokens)
    return math.ceil(max(MARGIN_FLOOR_TOKENS + EXACT_MARGIN * tokens, learned))


def bound(at_least_tokens: int, limit_tokens: int) -> Estimate:
    """Return the estimate for a prompt longer than any window: a lower bound above `limit_tokens`."""
    tokens = max(at_least_tokens, limit_tokens + 1)
    return Estimate(tokens, tokens, CountMode.BOUND)
