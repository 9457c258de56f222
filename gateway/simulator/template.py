"""The chat template: what a list of messages becomes before it is tokenised.

Gemma 4's turn format. The number of tokens around the messages is the official template's: 1 + 5 per
turn + 3, and 4 for the empty thought when thinking is off (docs/estimate.md#the-template).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from gateway.core.estimation import without_thoughts
from gateway.core.prefix_cache import BLOCK_TOKENS
from gateway.core.value import valueclass
from gateway.simulator import pieces

IMAGE_TOKENS = 280
"""Soft tokens per image: the image processor's default budget (`core.estimation.IMAGE_BUDGETS`)."""

AUDIO_TOKENS = 750
"""Soft tokens per audio part: the most one can have."""

_UNREAD = frozenset({"<|image_token|>", "<|audio_token|>"})
"""Tokens that stand for what is not read here."""


class Token(NamedTuple):
    """One token whose id is given rather than found: a marker, or a prompt sent as ids.

    Attributes:
        text: What it reads as.
        id: Its id.
        times: How often it stands in a row.
    """

    text: str
    id: int
    times: int = 1


Part = str | Token


@valueclass(frozen=True, slots=True)
class Rendered:
    """A prompt as the engine gets it.

    Attributes:
        parts: What it consists of.
        salt: In the prefix cache, it is found for prompts with the same one only.
    """

    parts: tuple[Part, ...]
    salt: str = ""

    @property
    def chars(self) -> int:
        """Characters of its text, markers included."""
        return sum(len(part) if isinstance(part, str) else len(part.text) * part.times for part in self.parts)

    def count(self) -> int:
        """Return its length in tokens."""
        return sum(pieces.count(part) if isinstance(part, str) else part.times for part in self.parts)

    def ids(self) -> list[int]:
        """Return its token ids."""
        numbers: list[int] = []
        for part in self.parts:
            if isinstance(part, str):
                numbers += pieces.ids(part)
            else:
                numbers += [part.id] * part.times
        return numbers

    def strings(self) -> list[str]:
        """Return the text of each of its tokens."""
        found: list[str] = []
        for part in self.parts:
            found += pieces.pieces(part) if isinstance(part, str) else [part.text] * part.times
        return found

    def counted(self) -> tuple[int, list[int]]:
        """Return its length in tokens, and the keys of its whole blocks in the prefix cache.

        Blocks from the first image or recording on have none: their content is not in the tokens.
        """
        tokens = self.strings()
        keys: list[int] = []
        key = hash(self.salt)
        for end in range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS):
            block = tuple(tokens[end - BLOCK_TOKENS : end])
            if not _UNREAD.isdisjoint(block):
                break
            key = hash((key, block))
            keys.append(key)
        return len(tokens), keys

    def text(self) -> str:
        """Return it as one string."""
        return "".join(part if isinstance(part, str) else part.text * part.times for part in self.parts)


def render(
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    thinking: bool = False,
    generation_prompt: bool = True,
    continue_final: bool = False,
    image_tokens: int = IMAGE_TOKENS,
    salt: str = "",
) -> Rendered:
    """Return the prompt of a chat.

    Args:
        messages: As in the request; at least one.
        tools: As in the request.
        thinking: Whether the model may think first.
        generation_prompt: Whether the model's turn is opened.
        continue_final: Whether the last message is left open, to be continued.
        image_tokens: Soft tokens of an image.
        salt: See `Rendered`.
    """
    parts: list[Part] = [_mark("<bos>")]
    rest = list(messages)
    has_system = rest[0].get("role") in ("system", "developer")
    if has_system or tools or thinking:
        parts += [_mark("<|turn>"), "system", "\n"]
        if thinking:
            parts += [_mark("<|think|>"), "\n"]
        if has_system:
            parts += _content(rest.pop(0), image_tokens)
        for tool in tools:
            declaration = json.dumps(tool.get("function", tool), separators=(",", ":"), ensure_ascii=False)
            parts += [_mark("<|tool>"), declaration, _mark("<tool|>")]
        parts += [_mark("<turn|>"), "\n"]
    asked = max((at for at, message in enumerate(rest) if message.get("role") == "user"), default=-1)
    is_open = False  # a model turn that goes on: its tool's answer is part of it
    before = ""  # the role of the last message that is not a tool's
    for index, message in enumerate(rest):
        if message.get("role") == "tool":
            parts += _tool_response(message, image_tokens)
            is_open = True
            continue
        role = "model" if message.get("role") == "assistant" else str(message.get("role"))
        if not (role == "model" and (is_open or before == "model")):  # consecutive ones share a turn
            parts += [_mark("<|turn>"), role, "\n"]
        before = role
        if index > asked:
            parts += _thought(message)
        parts += _tool_calls(message)
        parts += _content(message, image_tokens)
        is_open = bool(message.get("tool_calls"))
        if not is_open and not (continue_final and index == len(rest) - 1):
            parts += [_mark("<turn|>"), "\n"]
    if generation_prompt and not is_open:
        parts += [_mark("<|turn>"), "model", "\n"]
        if not thinking:
            parts += [_mark("<|channel>"), "thought", "\n", _mark("<channel|>")]
    return Rendered(tuple(part for part in parts if part), salt)


def raw(text: str) -> Rendered:
    """Return the prompt of a completion: the text as it is, with a start marker."""
    return Rendered((_mark("<bos>"), text) if text else (_mark("<bos>"),))


def of_ids(numbers: Sequence[int]) -> Rendered:
    """Return the prompt of a completion that came as ids."""
    return Rendered(tuple(Token(pieces.text_of([number]), number) for number in numbers))


def _mark(name: str, times: int = 1) -> Token:
    return Token(name, pieces.MARKERS[name], times)


def _content(message: Mapping[str, Any], image_tokens: int) -> Iterator[Part]:
    content = message.get("content")
    rendered = without_thoughts if message.get("role") == "assistant" else str.strip
    if isinstance(content, str):
        yield rendered(content)
        return
    for part in content or ():
        if isinstance(part, str):
            yield rendered(part)
            continue
        match part.get("type"):
            case "text" | "input_text" | "output_text" | "refusal":
                yield rendered(str(part.get("text") or part.get("refusal") or ""))
            case "image_url" | "image" | "input_image" | "image_pil":
                yield from (_mark("<|image>"), _mark("<|image_token|>", image_tokens), _mark("<image|>"))
            case "input_audio" | "audio_url" | "audio":
                yield from (_mark("<|audio>"), _mark("<|audio_token|>", AUDIO_TOKENS), _mark("<audio|>"))


def _thought(message: Mapping[str, Any]) -> Iterator[Part]:
    """Yield the thought that led to a tool call, which is kept until the user says something."""
    thought = message.get("reasoning") or message.get("reasoning_content")
    if isinstance(thought, str) and message.get("tool_calls"):
        yield from (_mark("<|channel>"), f"thought\n{thought}\n", _mark("<channel|>"))


def _tool_calls(message: Mapping[str, Any]) -> Iterator[Part]:
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        arguments = function.get("arguments") or ""
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, separators=(",", ":"), ensure_ascii=False)
        yield from (
            _mark("<|tool_call>"),
            f"call:{function.get('name', '')}",
            arguments,
            _mark("<tool_call|>"),
        )


def _tool_response(message: Mapping[str, Any], image_tokens: int) -> Iterator[Part]:
    yield from (_mark("<|tool_response>"), f"response:{message.get('name') or 'tool'}", "{value:")
    yield from _content(message, image_tokens)
    yield from ("}", _mark("<tool_response|>"))
