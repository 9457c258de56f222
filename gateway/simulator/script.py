"""What one choice of an answer will be, token by token, decided before its first step.

The engine only counts tokens. A script says what each of them is worth on the wire: text of the
thought, text of the answer, a piece of a tool call, or nothing (markers and the end token).
"""

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import unquote

from gateway.core.value import valueclass
from gateway.simulator import pieces, prose

TOOL_STOP = pieces.MARKERS["<|tool_response>"]


@valueclass(frozen=True, slots=True)
class ToolCall:
    """A call at the end of a choice.

    Attributes:
        name, arguments: Of the tool, and JSON.
        name_at, arguments_at: Tokens after which they are known.
    """

    name: str
    arguments: str
    name_at: int = 0
    arguments_at: int = 0


@valueclass(frozen=True, slots=True)
class ChoiceRequest:
    """What a request asks of one choice.

    Attributes:
        tokens_max: Output limit, the window already considered.
        tokens_min: `min_tokens`.
        ignore_eos: Whether only the limit ends it.
        thinking: Whether a thought comes first.
        calls: Those it ends in.
        fixed_text: Text it consists of instead of prose, or None.
        stops: Stop strings.
        keep_stop: Whether a stop string that was met stays in the text.
    """

    tokens_max: int
    tokens_min: int = 0
    ignore_eos: bool = False
    thinking: bool = False
    calls: Sequence[ToolCall] = ()
    fixed_text: str | None = None
    stops: tuple[str, ...] = ()
    keep_stop: bool = False


@valueclass(frozen=True, slots=True)
class Script:
    """One choice, token by token.

    Attributes:
        tokens: The text of each token; "" where it has none.
        thought_end: Tokens up to here belong to the thought.
        calls: Those it ends in.
        finish_reason: stop, length or tool_calls.
        stop_reason: Stop string or token id that ended it, or None.
    """

    tokens: Sequence[str]
    thought_end: int = 0
    calls: Sequence[ToolCall] = ()
    finish_reason: str = "stop"
    stop_reason: str | int | None = None

    def thought(self, start: int, end: int) -> str:
        """Return what tokens `start` to `end` add to the thought."""
        return "".join(self.tokens[start : min(end, self.thought_end)])

    def content(self, start: int, end: int) -> str:
        """Return what tokens `start` to `end` add to the answer."""
        return "".join(self.tokens[max(start, self.thought_end) : end])

    def thought_tokens(self, end: int) -> int:
        """Return how many of the first `end` tokens count as reasoning: all but the opening marker."""
        return max(0, min(end, self.thought_end) - 1)

    def ids(self, start: int, end: int) -> list[int]:
        """Return the ids of tokens `start` to `end`."""
        return [pieces.piece_id(token) for token in self.tokens[start:end]]


def write(wanted: ChoiceRequest, dice: random.Random, *, answer_tokens: int, thought_tokens: int) -> Script:
    """Return what a choice will be. The same dice give the same text."""
    tokens: list[str] = []
    if wanted.thinking:
        # The opening marker and the word that names the channel have no text of their own.
        length = _length(dice, thought_tokens, wanted.tokens_max)
        least = length if length == wanted.tokens_max else 1
        tokens += ["", "", *prose.thought(dice, length - 3, least=least), ""]
    thought_end = len(tokens)
    if wanted.calls:
        return _cut_to_length(_ending_in(wanted.calls, tokens, thought_end), wanted)
    if wanted.fixed_text is not None:
        tokens += [*pieces.pieces(wanted.fixed_text), ""]
    else:
        left = max(1, wanted.tokens_max - len(tokens))
        length = _length(dice, answer_tokens, left)
        least = left if wanted.ignore_eos or length == left else min(wanted.tokens_min, left)
        tokens += prose.answer(dice, length - 1, least=least)
        tokens.append("")  # the end token
    if wanted.ignore_eos:
        while len(tokens) < wanted.tokens_max:
            tokens += prose.answer(dice, 0, least=wanted.tokens_max - len(tokens))
        return _stopped(Script(tokens[: wanted.tokens_max], thought_end, finish_reason="length"), wanted)
    return _stopped(_cut_to_length(Script(tokens, thought_end), wanted), wanted)


def as_content(script: Script, *, with_markers: bool = False) -> Script:
    """Return the script of an engine that takes the thought for a part of the answer.

    `with_markers`: the tokens that open and close a thought are written out.
    """
    tokens = list(script.tokens)
    if with_markers and script.thought_end:
        tokens[:2] = ["<|channel>", "thought\n"][: script.thought_end]
        if script.thought_end > 2 and not tokens[script.thought_end - 1]:
            tokens[script.thought_end - 1] = "<channel|>"
    return replace(script, tokens=tokens, thought_end=0)


def _length(dice: random.Random, median: int, limit: int) -> int:
    """Return a lognormal length (sigma 0.5, a guess) within 16 and the limit."""
    return max(1, min(limit, max(16, round(median * math.exp(dice.gauss(0.0, 0.5))))))


def _ending_in(calls: Sequence[ToolCall], tokens: list[str], thought_end: int) -> Script:
    placed, end = [], len(tokens)
    for call in calls:
        name_at = end + 1 + pieces.count(f"call:{call.name}")
        end = name_at + pieces.count(call.arguments) + 1
        placed.append(replace(call, name_at=name_at, arguments_at=end))
    tokens = tokens + [""] * (end + 1 - len(tokens))
    return Script(tokens, thought_end, placed, finish_reason="tool_calls", stop_reason=TOOL_STOP)


def _cut_to_length(script: Script, wanted: ChoiceRequest) -> Script:
    if len(script.tokens) <= wanted.tokens_max:
        return script
    return replace(
        script,
        tokens=script.tokens[: wanted.tokens_max],
        thought_end=min(script.thought_end, wanted.tokens_max),
        finish_reason="length",
        stop_reason=None,
    )


def _stopped(script: Script, wanted: ChoiceRequest) -> Script:
    """Return the script, cut at the first stop string in its answer."""
    text = script.content(0, len(script.tokens))
    found = [(at, stop) for stop in wanted.stops if stop and (at := text.find(stop)) >= 0]
    if not found:
        return script
    at, stop = min(found)
    length = 0
    tokens = list(script.tokens[: script.thought_end])
    for token in script.tokens[script.thought_end :]:
        tokens.append(token)
        length += len(token)
        if length >= at + len(stop):
            break
    visible = at + len(stop) if wanted.keep_stop else at
    _trim(tokens, length - visible)
    return replace(script, tokens=tokens, finish_reason="stop", stop_reason=stop)


def _trim(tokens: list[str], chars: int) -> None:
    """Take the last `chars` characters off the tokens, which stay as many."""
    index = len(tokens) - 1
    while chars > 0:
        taken = min(chars, len(tokens[index]))
        tokens[index] = tokens[index][: len(tokens[index]) - taken]
        chars -= taken
        index -= 1


# ------------------------------------------------------------------ values that fit a JSON schema

_SAMPLES = {
    "city": "Paris",
    "location": "Paris",
    "place": "Paris",
    "query": "rivers of France",
    "name": "Ada",
}
_FORMATS = {
    "date": "2026-11-21",
    "time": "18:02:11Z",
    "date-time": "2026-11-21T18:02:11Z",
    "duration": "PT90S",
    "email": "ada@example.com",
    "uri": "https://example.com/",
    "uuid": "5f0c1c1e-6a0e-4b7e-9d5b-2f6f3a3c8a11",
}
_SCALARS: dict[object, object] = {"boolean": True, "null": None}

_DEPTH_MAX = 6
"""Levels of a schema that are filled in. A choice: schemas may refer to themselves."""

_DEEP = 3
"""Levels below which whatever may be absent, empty or null is. A choice, below `_DEPTH_MAX`."""

_FAR, _ITEMS_MAX, _LENGTH_MAX = 1e15, 8, 4096
"""Limits to what a schema can ask for. Choices: a sample is short."""

_CHOICES = ("enum", "examples")
_SAYS_MORE = frozenset({"const", *_CHOICES})
"""What is taken before a reference or a union that stands beside it."""


def sample_json(schema: object) -> str:
    """Return JSON text that fits a schema, as far as types, enums, references, bounds and lengths go."""
    return json.dumps(_Sampler(schema).value(schema, "", 0), ensure_ascii=False)


class _Sampler:
    """Finds values that fit the parts of a schema."""

    def __init__(self, root: object) -> None:
        self._root = root

    def value(self, schema: object, name: str, depth: int) -> object:
        """Return a value of the member `name` that fits."""
        schema = self._followed(schema, depth >= _DEEP)
        if not isinstance(schema, Mapping) or depth > _DEPTH_MAX:
            return {}
        if "const" in schema:
            constant: object = schema["const"]
            return constant
        for choices in _CHOICES:
            if isinstance(schema.get(choices), list) and schema[choices]:
                first: object = schema[choices][0]
                return first
        kind = schema.get("type")
        if isinstance(kind, list) and kind:
            kind = "null" if depth >= _DEEP and "null" in kind else kind[0]
        if kind == "string":
            return _text(schema, name)
        if kind in ("integer", "number"):
            return _number(schema, kind == "integer")
        if kind == "array":
            return self._array(schema, name, depth)
        return _SCALARS[kind] if kind in _SCALARS else self._object(schema, depth)

    def _followed(self, schema: object, is_deep: bool) -> object:
        """Return the schema that another stands for, through references and one of each union."""
        for _ in range(_DEPTH_MAX):
            if not isinstance(schema, Mapping) or not _SAYS_MORE.isdisjoint(schema):
                return schema
            part = self._referred(schema["$ref"]) if "$ref" in schema else _one_of_a_union(schema, is_deep)
            if part is None:
                return schema
            schema = part
        return {}

    def _referred(self, reference: object) -> object:
        """Return the part of the schema that a reference such as `#/$defs/City` names, or None."""
        start, *path = str(reference).split("/")
        found = self._root if start == "#" else None
        for step in path:
            step = unquote(step).replace("~1", "/").replace("~0", "~")
            found = found.get(step) if isinstance(found, Mapping) else None
        return found

    def _array(self, schema: Mapping[str, Any], name: str, depth: int) -> list[object]:
        firsts = schema.get("prefixItems")
        items = list(firsts) if isinstance(firsts, list) else []
        least = _bound(schema, "minItems", 0 if depth >= _DEEP else 1)
        wanted = min(least, _bound(schema, "maxItems", least), _ITEMS_MAX)
        items += [schema.get("items")] * (int(wanted) - len(items))
        return [self.value(item, name, depth + 1) for item in items]

    def _object(self, schema: Mapping[str, Any], depth: int) -> dict[str, object]:
        properties = schema.get("properties")
        if not isinstance(properties, Mapping):
            return {}
        required = schema.get("required")
        names = required if isinstance(required, list) else []
        if not names and depth < _DEEP:
            names = list(properties)
        return {str(key): self.value(properties.get(key), str(key), depth + 1) for key in names}


def _one_of_a_union(schema: Mapping[str, Any], is_deep: bool) -> object:
    """Return the first of a union's parts; in the depth null, if that is one of them."""
    for union in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(union), list) and schema[union]:
            parts: list[object] = schema[union]
            nulls = [part for part in parts if isinstance(part, Mapping) and part.get("type") == "null"]
            return nulls[0] if is_deep and nulls else parts[0]
    return None


def _text(schema: Mapping[str, Any], name: str) -> str:
    """Return a string of the format, or the length, that a schema asks for."""
    named = _FORMATS.get(str(schema.get("format")))
    if named is not None:
        return named
    text = _SAMPLES.get(name, "a quiet afternoon")
    missing = min(_bound(schema, "minLength", 0), _LENGTH_MAX) - len(text)
    return (text + "." * int(missing))[: int(max(_bound(schema, "maxLength", _LENGTH_MAX), 0))]


def _number(schema: Mapping[str, Any], is_whole: bool) -> float:
    """Return a number within the bounds of a schema, if it is easily found."""
    low, high = _bound(schema, "minimum", -_FAR), _bound(schema, "maximum", _FAR)
    above, below = _bound(schema, "exclusiveMinimum", -_FAR), _bound(schema, "exclusiveMaximum", _FAR)
    usual: float = 3 if is_whole else 1.5
    ends: list[float] = [low, high, (above + below) / 2, above + 1, below - 1]
    if is_whole:
        ends = [math.ceil(low), math.floor(high), math.floor(above) + 1, math.ceil(below) - 1]
    tries = [usual, *sorted(ends, key=abs)]
    return next((each for each in tries if low <= each <= high and above < each < below), usual)


def _bound(schema: Mapping[str, Any], name: str, otherwise: float) -> float:
    """Return a figure of a schema, if it is one and not out of all proportion."""
    figure = schema.get(name)
    if not isinstance(figure, int | float) or isinstance(figure, bool):
        return otherwise
    return figure if -_FAR < figure < _FAR else otherwise
