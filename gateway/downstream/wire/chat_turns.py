"""What a message of a chat adds to its prompt: texts, tool calls, images and recordings."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from gateway.core.errors import InvalidRequest
from gateway.core.request import LongText, Turn
from gateway.downstream.wire.chat_decoding import Message
from gateway.downstream.wire.members import check_length, mapping_of
from gateway.downstream.wire.rules import WireRules

_TEXTS = ("text", "refusal", "thinking")
_MEDIA = ("image_url", "audio_url")
_PARTS = frozenset(
    {
        "",
        "text",
        "input_text",
        "output_text",
        "refusal",
        "thinking",
        "image_url",
        "input_image",
        "audio_url",
        "input_audio",
    }
)
_UNCOUNTED = frozenset({"video_url", "image_embeds", "audio_embeds", "image_pil"})
"""Keys by which vLLM takes a part for what it does not say, if it has no `type` or has a `uuid`."""


def count_parts(message: Message, where: str, rules: WireRules) -> int:
    """Return the number of parts and tool calls of a message, before any of them is examined.

    Raises:
        InvalidRequest: it has more of either than a message may have.
    """
    content, calls = message.content, message.tool_calls
    parts = len(content) if isinstance(content, list) else 0
    if parts > rules.messages_max:
        complaint = f"A message has more than {rules.messages_max} parts."
        raise InvalidRequest(complaint, code="too_many_items", param=f"{where}.content")
    if not isinstance(calls, list):
        return parts
    check_length(calls, f"{where}.tool_calls", rules.messages_max)
    return parts + len(calls)


def turn_of(message: Message, where: str, rules: WireRules) -> Turn:
    """Return the turn that a message is; `where`: its place, for errors.

    Raises:
        InvalidRequest: a part of it is invalid, or not allowed.
    """
    content = message.content
    read: list[str | LongText] = []
    images = audios = 0
    if isinstance(content, list):
        read, images, audios = _parts(content, f"{where}.content", rules)
    elif content is not None:
        read.append(content)
    texts = [text for text in read if isinstance(text, str)]
    long, before = None, 0
    if len(texts) < len(read):
        before, long = next((at, text) for at, text in enumerate(read) if isinstance(text, LongText))
    listed: object = message.tool_calls
    if listed is not None and not isinstance(listed, list):
        raise InvalidRequest("`tool_calls` must be an array.", param=f"{where}.tool_calls")
    calls = tuple(_call(call) for call in listed or () if isinstance(call, dict))
    if calls:
        texts += thought_of(message)
    return Turn(message.role, tuple(texts), calls, images, audios, long, before)


def thought_of(message: Message) -> tuple[str, ...]:
    """Return the thought that led to the tool calls of a message: the template keeps no others."""
    thought = message.reasoning or message.reasoning_content
    return (thought,) if isinstance(thought, str) else ()


def _call(call: Mapping[str, Any]) -> tuple[str, str]:
    function = mapping_of(call.get("function"))
    arguments = function.get("arguments")
    spelled = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
    return str(function.get("name", "")), spelled


def _parts(content: Sequence[object], where: str, rules: WireRules) -> tuple[list[str | LongText], int, int]:
    texts: list[str | LongText] = []
    images = audios = 0
    for index, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
            continue
        fields = _known_part(part, f"{where}.{index}")
        # Engines go by the keys of a part as well as by its type, so all of them count.
        texts += [fields[name] for name in _TEXTS if isinstance(fields.get(name), str | LongText)]
        for name in _MEDIA:
            if fields.get(name) is not None:
                _check_source(name, fields[name], f"{where}.{index}", rules)
        images += fields.get("image_url") is not None
        audios += fields.get("audio_url") is not None or fields.get("input_audio") is not None
    return texts, images, audios


def _known_part(part: object, where: str) -> Mapping[str, Any]:
    if not isinstance(part, Mapping):
        raise InvalidRequest("A part of a message must be an object.", param=where)
    kind = min(_UNCOUNTED.intersection(part), default=part.get("type", ""))
    if not isinstance(kind, str) or kind not in _PARTS:
        message = f"Parts of type {str(kind)[:40]!r} are not supported."
        raise InvalidRequest(message, code="unsupported_content", param=where)
    if part.get("uuid") is not None:  # vLLM would use what came under it before, from whichever caller
        message = "A `uuid` of a part is not supported: send its content."
        raise InvalidRequest(message, code="unsupported_content", param=where)
    return part


def _check_source(name: str, source: object, where: str, rules: WireRules) -> None:
    """Reject URLs that the backend would have to fetch, from inside the operator's network."""
    url = source.get("url") if isinstance(source, Mapping) else source
    if not isinstance(url, str):
        raise InvalidRequest(f"`{name}` needs a `url`.", param=where)
    if rules.remote_media or url[:5].lower() == "data:":
        return
    raise InvalidRequest(
        "Only `data:` URLs are accepted for images and audio here. Send the content itself, base64-encoded.",
        code="remote_media_not_allowed",
        param=where,
    )
