"""The prompt of a chat, and a hash of the conversation up to each of its turns."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain

import msgspec

from gateway.core.errors import InvalidRequest
from gateway.core.estimation import texts_in
from gateway.core.request import LongText, Prefixes, Prompt, Turn
from gateway.core.value import valueclass
from gateway.downstream.cut_out import CutOut
from gateway.downstream.long_texts import LONG_BYTES
from gateway.downstream.wire.chat_decoding import SALT, TEMPLATE_KWARGS, Chat, Message, message_of
from gateway.downstream.wire.chat_turns import count_parts, thought_of, turn_of
from gateway.downstream.wire.members import Fields, check_length, decoded, items_of, mapping_of
from gateway.downstream.wire.rules import WireRules

SOFT_TOKENS_MAX = 1_048_576
"""Maximum tokens that a request may ask for per image. A choice, more than any window. Larger numbers are
clamped."""


@valueclass(frozen=True, slots=True)
class Tools:
    """The number of tools of a chat, their compact JSON, and the number of texts in it."""

    count: int = 0
    json: str = ""
    texts: int = 0


NO_TOOLS = Tools()


def tools_of(fields: Fields, most: int) -> Tools:
    """Return the tools of a chat, at most `most`; `NO_TOOLS` itself if it has none.

    Raises:
        InvalidRequest: they are more, or no array.
    """
    raw = fields.raw("tools")
    if raw is None:
        return NO_TOOLS
    written = bytes(raw)
    return _read_tools(written, most) if len(written) < LONG_BYTES else _read_tools.__wrapped__(written, most)


@lru_cache(maxsize=64)  # an application sends the same tools with every request
def _read_tools(written: bytes, most: int) -> Tools:
    raws = items_of(msgspec.Raw(written), "tools", most)
    if not raws:
        return NO_TOOLS
    json = msgspec.json.encode([decoded(raw, "tools") for raw in raws]).decode()
    return Tools(len(raws), json, texts_in(json))


def prompt_of_chat(
    fields: Fields,
    seen: Chat | None,
    tools: Tools,
    rules: WireRules,
    cut: CutOut | None,
    *,
    is_bare: bool,
) -> tuple[Prompt, Prefixes]:
    """Return the prompt of a chat, and its prefixes.

    `cut`: the strings cut out of the members. `is_bare`: all members are part of `Chat`.

    Raises:
        InvalidRequest: there is no message, or one is invalid.
    """
    raws: Sequence[msgspec.Raw] = ()
    if seen is None:
        raws = fields.items("messages", most=rules.messages_max)
        messages = [message_of(raw, f"messages.{index}") for index, raw in enumerate(raws)]
    else:
        messages = seen.messages
        check_length(messages, "messages", rules.messages_max)
    if not messages:
        raise InvalidRequest("`messages` must not be empty.", param="messages")
    before = _NOTHING if is_bare else _before(fields, tools)
    asked = 0 if before.keeps_thoughts else _last_of_user(messages)
    turns: list[Turn] = []
    read: list[tuple[int, int]] = []  # per turn, a hash of the conversation up to it, and its size
    key, size = before.key, len(tools.json)
    if size and messages[0].role not in ("system", "developer"):
        read.append((key, size))  # a turn of nothing but the tools
    parts = 0
    for index, message in enumerate(messages):
        role = message.role
        content: object = message.content
        if type(content) is str and message.tool_calls is None:
            turns.append(Turn(role, (content,)))
            key = hash((key, role, content))
            size += len(role) + len(content) + 1
        elif type(content) is LongText:
            turns.append(Turn(role, (), long=content))
            key = hash((key, role, content.key))
            size += content.size_bytes
        else:
            parts += count_parts(message, f"messages.{index}", rules)
            if parts > rules.parts_max:
                complaint = f"The messages have more than {rules.parts_max} parts and tool calls together."
                raise InvalidRequest(complaint, code="too_many_items", param="messages")
            turn = turn_of(message, f"messages.{index}", rules)
            turns.append(turn)
            spelled = b""
            if isinstance(content, list):
                raws = raws or fields.items("messages", most=rules.messages_max)
                spelled = bytes(raws[index]) if cut is None else cut.put_back(bytes(raws[index]))
            told, length = _told(turn, message, spelled, drops_thought=index < asked)
            key = hash((key, *told))
            size += length
        read.append((key, size))
    prefixes = tuple([(key, upto / size) for key, upto in read])
    if is_bare:
        return Prompt(turns=tuple(turns)), prefixes
    budget = mapping_of(fields.any("mm_processor_kwargs")).get("max_soft_tokens")
    if isinstance(budget, bool) or not isinstance(budget, int) or budget <= 0:
        budget = None
    prompt = Prompt(
        turns=tuple(turns),
        tools_json=tools.json,
        tools_texts=tools.texts,
        thinking=before.thinking,
        image_budget=None if budget is None else min(budget, SOFT_TOKENS_MAX),
    )
    return prompt, prefixes


@valueclass(frozen=True, slots=True)
class _Before:
    """What decides what stands in a prompt before its messages.

    Attributes:
        key: A hash of it: of two prompts where it differs, an engine finds nothing of one for the other.
        thinking: Whether the model is asked to think, which it is told in the first line.
        keeps_thoughts: Whether the template keeps thoughts of earlier turns, too.
    """

    key: int = 0
    thinking: bool = False
    keeps_thoughts: bool = False


_NOTHING = _Before()


def _before(fields: Fields, tools: Tools) -> _Before:
    kwargs = mapping_of(fields.any(TEMPLATE_KWARGS))
    effort = fields.any("reasoning_effort")
    thinking = bool(kwargs.get("enable_thinking")) or (effort is not None and effort != "none")
    salt = fields.raw(SALT)
    key = 0
    if thinking or tools.json or salt is not None:
        key = hash((thinking, tools.json, b"" if salt is None else bytes(salt)))
    return _Before(key, thinking, bool(kwargs.get("preserve_thinking")))


def _last_of_user(messages: Sequence[Message]) -> int:
    """Return the index of the user's last message: the template drops the thoughts before it."""
    return next((at for at in reversed(range(len(messages))) if messages[at].role == "user"), 0)


def _told(
    turn: Turn, message: Message, spelled: bytes, *, drops_thought: bool
) -> tuple[Sequence[object], int]:
    """Return what a message with parts or tool calls adds to the prompt, and its size.

    `spelled`: the message as it came, if it has parts. Short texts count, not how their parts are spelled:
    clients mark the last message to have it cached, another one each time, and some write a text as a part
    only to do that.
    """
    if turn.images or turn.audios or len(spelled) >= LONG_BYTES:
        return (spelled,), len(spelled)
    texts = turn.texts
    if drops_thought and turn.tool_calls:
        texts = texts[: len(texts) - len(thought_of(message))]
    size = len(turn.role) + sum(map(len, chain(texts, *turn.tool_calls))) + 1
    return (turn.role, *texts, *turn.tool_calls), size
