"""The members of an OpenAI request that the gateway reads; everything else travels on as it was sent.

The body is decoded once, one level deep: each member stays the bytes it was. What goes to a backend is
the object put together again from those bytes, with the members the gateway owns replaced. So an unknown
member, a number's spelling or a nested structure arrives untouched, while a duplicate key or bytes after
the object cannot mean one thing here and another there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import msgspec

from gateway.core.errors import InvalidRequest
from gateway.core.values import Endpoint, Prefixes, Prompt, Request, Turn
from gateway.ports import Headers

AUDIO_TOKENS_PER_S = 25  # one soft token per 40 ms (docs/measurements.md#prompt-length)


@dataclass(frozen=True, slots=True)
class WireRules:
    """What the operator allows in a request body.

    Attributes:
        choices_max: Most choices (`n` times prompts) of one request.
        remote_media: Whether images and audio may be URLs that the backend fetches.
        drop_fields: Members left out because they reach into the engine.
        usage_in_streams: Ask backends for the usage event of every stream.
    """

    choices_max: int = 16
    remote_media: bool = False
    drop_fields: frozenset[str] = frozenset()
    usage_in_streams: bool = True


@dataclass(frozen=True, slots=True)
class WireRequest:
    """`ports.Incoming` for a decoded body."""

    request: Request
    forwarded: Headers
    dropped: Sequence[str]
    usage_injected: bool
    members: Mapping[str, msgspec.Raw]

    def body_for(self, served_model: str) -> bytes:
        """See `ports.Incoming.body_for`."""
        parts = [b'{"model":', msgspec.json.encode(served_model)]
        for name, raw in self.members.items():
            parts += (b",", msgspec.json.encode(name), b":", bytes(raw))
        parts.append(b"}")
        return b"".join(parts)


def read(
    endpoint: Endpoint,
    body: bytes,
    rules: WireRules,
    *,
    key: str | None = None,
    headers: Mapping[str, str] | None = None,
    forwarded: Headers = (),
) -> WireRequest:
    """Return what the gateway reads of a request body.

    Raises:
        InvalidRequest: it is not JSON, not an object, or a member the gateway reads has a wrong type.
    """
    members = _members(body)
    dropped = tuple(sorted(name for name in members if name in rules.drop_fields))
    for name in dropped:
        del members[name]
    fields = _Fields(members)
    model = fields.text("model")
    if not model:
        raise InvalidRequest("`model` is required.", param="model")
    stream = fields.flag("stream")
    include_usage = bool(_mapping(fields.any("stream_options")).get("include_usage"))
    chat = endpoint is Endpoint.CHAT
    prompt, prefixes, prompts = _chat(fields, rules) if chat else _completion(fields)
    choices = (fields.count("n", least=1) or 1) * prompts
    if choices > rules.choices_max:
        message = f"At most {rules.choices_max} choices per request."
        raise InvalidRequest(message, code="too_many_choices", param="n")
    max_tokens = fields.count("max_completion_tokens", least=1) if chat else None
    if max_tokens is None:
        max_tokens = fields.count("max_tokens", least=1)
    tools = fields.any("tools")
    request = Request(
        endpoint=endpoint,
        model=model,
        prompt=prompt,
        stream=stream,
        max_tokens=max_tokens,
        seqs=choices,
        choices=choices,
        reasoning=prompt.thinking,
        images=sum(turn.images for turn in prompt.turns),
        audios=sum(turn.audios for turn in prompt.turns),
        tools=len(tools) if isinstance(tools, list) else 0,
        include_usage=include_usage,
        key=key,
        headers=headers or {},
        prefixes=prefixes,
    )
    inject = stream and rules.usage_in_streams and not include_usage
    if inject:
        options = {**_mapping(fields.any("stream_options")), "include_usage": True}
        members["stream_options"] = msgspec.Raw(msgspec.json.encode(options))
    del members["model"]
    return WireRequest(
        request=request, forwarded=forwarded, dropped=dropped, usage_injected=inject, members=members
    )


def _members(body: bytes) -> dict[str, msgspec.Raw]:
    try:
        return msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except msgspec.ValidationError as error:
        raise InvalidRequest("The request body must be a JSON object.") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"The request body is not valid JSON: {error}.", code="invalid_json") from error


class _Fields:
    """Typed reads of single members; each complaint names its member."""

    def __init__(self, members: Mapping[str, msgspec.Raw]) -> None:
        self._members = members

    def raw(self, name: str) -> msgspec.Raw | None:
        raw = self._members.get(name)
        return None if raw is None or bytes(raw) == b"null" else raw

    def any(self, name: str) -> Any:
        raw = self.raw(name)
        return None if raw is None else _decode(raw, name)

    def text(self, name: str) -> str:
        value = self.any(name)
        if value is not None and not isinstance(value, str):
            raise InvalidRequest(f"`{name}` must be a string.", param=name)
        return value or ""

    def flag(self, name: str) -> bool:
        value = self.any(name)
        if value is not None and not isinstance(value, bool):
            raise InvalidRequest(f"`{name}` must be true or false.", param=name)
        return bool(value)

    def count(self, name: str, *, least: int) -> int | None:
        value = self.any(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InvalidRequest(f"`{name}` must be an integer of at least {least}.", param=name)
        return value


def _decode(raw: msgspec.Raw, name: str) -> Any:
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        message = f"`{name}` is not valid JSON: {error}."
        raise InvalidRequest(message, code="invalid_json", param=name) from error


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


# ------------------------------------------------------------------ chat


def _chat(fields: _Fields, rules: WireRules) -> tuple[Prompt, Prefixes, int]:
    raw = fields.raw("messages")
    if raw is None:
        raise InvalidRequest("`messages` is required.", param="messages")
    try:
        raws = msgspec.json.decode(raw, type=list[msgspec.Raw])
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest("`messages` must be an array.", param="messages") from error
    if not raws:
        raise InvalidRequest("`messages` must not be empty.", param="messages")
    turns = tuple(_turn(message, f"messages.{index}", rules) for index, message in enumerate(raws))
    thinking = bool(_mapping(fields.any("chat_template_kwargs")).get("enable_thinking"))
    effort = fields.any("reasoning_effort")
    tools = fields.any("tools")
    budget = _mapping(fields.any("mm_processor_kwargs")).get("max_soft_tokens")
    prompt = Prompt(
        turns=turns,
        tools_json=msgspec.json.encode(tools).decode() if tools else "",
        thinking=thinking or (effort is not None and effort != "none"),
        image_budget=budget if isinstance(budget, int) and budget > 0 else None,
    )
    return prompt, _prefixes(raws), 1


def _prefixes(raws: Sequence[msgspec.Raw]) -> Prefixes:
    total = sum(len(memoryview(raw)) for raw in raws)
    digest, size, prefixes = blake2b(digest_size=8), 0, []
    for raw in raws:
        digest.update(raw)
        size += len(memoryview(raw))
        prefixes.append((int.from_bytes(digest.digest(), "big"), size / total))
    return tuple(prefixes)


def _turn(raw: msgspec.Raw, where: str, rules: WireRules) -> Turn:
    message = _decode(raw, where)
    if not isinstance(message, dict):
        raise InvalidRequest("A message must be an object.", param=where)
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise InvalidRequest("A message needs a `role`.", param=f"{where}.role")
    if isinstance(content, str):
        texts, images, audios = [content], 0, 0
    elif isinstance(content, list):
        texts, images, audios = _parts(content, f"{where}.content", rules)
    elif content is None:
        texts, images, audios = [], 0, 0
    else:
        raise InvalidRequest("`content` must be a string or an array of parts.", param=f"{where}.content")
    calls = tuple(_call(call) for call in message.get("tool_calls") or () if isinstance(call, dict))
    if calls:  # the template keeps a thought only where a tool call came of it
        thought = message.get("reasoning") or message.get("reasoning_content")
        texts = [*texts, thought] if isinstance(thought, str) else texts
    return Turn(role=role, texts=tuple(texts), tool_calls=calls, images=images, audios=audios)


def _call(call: Mapping[str, Any]) -> tuple[str, str]:
    function = _mapping(call.get("function"))
    arguments = function.get("arguments")
    spelled = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
    return str(function.get("name", "")), spelled


def _parts(content: Sequence[object], where: str, rules: WireRules) -> tuple[list[str], int, int]:
    texts: list[str] = []
    images = audios = 0
    for index, part in enumerate(content):
        if isinstance(part, str):
            texts.append(part)
            continue
        fields = _mapping(part)
        kind = str(fields.get("type", ""))
        if "video" in kind:
            message = "Video is not supported."
            raise InvalidRequest(message, code="unsupported_content", param=f"{where}.{index}")
        if "image" in kind or "image_url" in fields:
            images += 1
            _check_source(fields.get("image_url"), f"{where}.{index}", rules)
        elif "audio" in kind:
            audios += 1
            _check_source(fields.get("audio_url"), f"{where}.{index}", rules)
        elif isinstance(fields.get("text"), str):
            texts.append(fields["text"])
    return texts, images, audios


def _check_source(source: object, where: str, rules: WireRules) -> None:
    """Refuse what the backend would have to fetch: it would do so from inside the operator's network."""
    url = source.get("url") if isinstance(source, Mapping) else source
    if rules.remote_media or not isinstance(url, str) or url.startswith("data:"):
        return
    raise InvalidRequest(
        "Only `data:` URLs are accepted for images and audio here. Send the content itself, base64-encoded.",
        code="remote_media_not_allowed",
        param=where,
    )


# ------------------------------------------------------------------ completions


def _completion(fields: _Fields) -> tuple[Prompt, Prefixes, int]:
    prompt = fields.any("prompt")
    match prompt:
        case str():
            return Prompt(raw_texts=(prompt,)), (), 1
        case [int(), *_] if all(isinstance(token, int) for token in prompt):
            return Prompt(raw_tokens=len(prompt)), (), 1
        case [str(), *_] if all(isinstance(text, str) for text in prompt):
            return Prompt(raw_texts=tuple(prompt)), (), len(prompt)
        case [[*_], *_] if all(isinstance(tokens, list) for tokens in prompt):
            return Prompt(raw_tokens=max(len(tokens) for tokens in prompt)), (), len(prompt)
    raise InvalidRequest("`prompt` must be a string, an array of strings or of tokens.", param="prompt")
