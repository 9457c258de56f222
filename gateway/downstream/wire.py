"""Reads the members of an OpenAI request that the gateway needs; all others are forwarded unchanged.

The body is decoded one level deep: each member remains raw bytes. The body for a backend is assembled from
these, with the members that the gateway controls replaced. So unknown members, the spelling of numbers and
nested structures are preserved, while a duplicate key or data after the object cannot be interpreted
differently by gateway and backend.

The members that the gateway reads of a chat are decoded a second time, all at once, into `Chat`: a long text
is scanned twice and decoded once. A body that does not fit is decoded member by member, so that each error
names its member.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import chain
from types import MappingProxyType
from typing import Annotated, Any

import msgspec

from gateway.core.errors import BodyTooLarge, InvalidRequest
from gateway.core.estimation import texts_in
from gateway.core.request import NO_CHANGES, Changes, Endpoint, LongText, Prefixes, Prompt, Request, Turn
from gateway.core.value import valueclass
from gateway.core.value_limit import CONTAINERS_MAX, VALUES_MAX, is_crowded
from gateway.downstream import lone_surrogates
from gateway.downstream.chat_shapes import (
    CHAT,
    CONTENT,
    INSPECTED_ROLES,
    LONG_CHAT,
    LONG_MESSAGE,
    UNFIT,
    Chat,
    LongMessage,
    Message,
)
from gateway.downstream.cut_out import CutOut, bytes_beside_media, cuts_of, may_hold_long_texts
from gateway.downstream.long_texts import (
    LONG_BYTES,
    SLICE_BYTES,
    TEXT_BYTES_MAX,
    long_text,
    take_a_break,
)
from gateway.downstream.occurrences import occurrences
from gateway.downstream.reading import Received
from gateway.downstream.reassembly import put_long
from gateway.downstream.value_limit import may_be_crowded
from gateway.ports import Arrival, Headers

MODEL_CHARS_MAX = 256
"""Maximum characters of a model's name. A choice: names are echoed, stored and displayed; longer ones are
invalid."""

MEMBERS_MAX = 512
"""Maximum members of a body. A choice: no engine has nearly as many."""

SOFT_TOKENS_MAX = 1_048_576
"""Maximum tokens that a request may ask for per image. A choice, more than any window. Larger numbers are
clamped."""

_TEXTS = ("text", "refusal", "thinking")
_MEDIA = ("image_url", "audio_url", "video_url")
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

_BOM = b"\xef\xbb\xbf"
_TEMPLATE_KWARGS = "chat_template_kwargs"
_SALT = "cache_salt"
_ASIDE = frozenset(
    {"tools", "stream_options", _TEMPLATE_KWARGS, "reasoning_effort", "mm_processor_kwargs", _SALT}
)
"""Members of a chat that are read but not part of `Chat`. Most requests have none of them."""
_NO_PROMPT = "`prompt` must be a string, an array of strings or of tokens."

_NEAR = 64
"""Bytes in which the beginning of a list in a list is looked for. A choice that leaves room for white
space."""

NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})

SHORT_BYTES = 16_384
"""Up to this size, bodies are assembled by msgspec, in a buffer that it grows as needed. A choice: copying
longer ones while it grows costs more."""

_INCLUDE_USAGE = msgspec.Raw(b'{"include_usage":true}')


@valueclass(frozen=True, slots=True)
class WireRules:
    """The operator's rules for request bodies.

    Attributes:
        choices_max: Maximum choices (`n` times prompts) of a request.
        messages_max: Maximum messages, parts and tool calls of a message, and prompts, each; limits the work
            per item.
        parts_max: Maximum parts and tool calls of all messages together.
        tools_max: Maximum tools.
        token_ids_max: Maximum tokens of a prompt given as ids.
        remote_media: Whether images and audio may be URLs, which the backend fetches.
        drop_fields: Members to remove because they give access to engine internals; from
            `chat_template_kwargs`, too.
        usage_in_streams: Whether to ask backends for a usage event in every stream.
    """

    choices_max: int = 16
    messages_max: int = 4_096
    parts_max: int = 16_384
    tools_max: int = 1_024
    token_ids_max: int = 1_048_576
    remote_media: bool = False
    drop_fields: frozenset[str] = frozenset()
    usage_in_streams: bool = True


@valueclass(frozen=True, slots=True)
class WireRequest:
    """`ports.Incoming` for a parsed body."""

    arrival: Arrival
    request: Request
    forwarded: Headers
    dropped: Sequence[str]
    usage_injected: bool
    size_bytes: int
    members: Mapping[str, msgspec.Raw]
    cut: CutOut | None = None

    def member(self, name: str) -> Any:
        """See `ports.Incoming.member`."""
        raw = self.members.get(name)
        try:
            if raw is not None and self.cut is not None:
                return msgspec.json.decode(self.cut.put_back(bytes(raw)))
            return None if raw is None else msgspec.json.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None  # the backend will report the error

    def body_for(self, served_model: str, changes: Changes = NO_CHANGES) -> bytes:
        """See `ports.Incoming.body_for`."""
        members = _changed(self.members, changes) if changes else self.members
        if self.size_bytes <= SHORT_BYTES:
            body = msgspec.json.encode({"model": served_model, **members})
        else:
            body = _object({"model": msgspec.json.encode(served_model), **members})
        return body if self.cut is None else self.cut.put_back(body)  # the only copy of the body


def _object(members: Mapping[str, bytes | msgspec.Raw]) -> bytes:
    """Return what msgspec encodes as well, but without a buffer that grows: a long body is copied once."""
    parts: list[bytes | msgspec.Raw] = []
    for name, written in members.items():
        parts += (b"," if parts else b"{", msgspec.json.encode(name), b":", written)
    parts.append(b"}" if parts else b"{}")
    return b"".join(parts)


def _changed(members: Mapping[str, msgspec.Raw], changes: Changes) -> Mapping[str, msgspec.Raw]:
    """Return the members with `changes` applied; siblings of a change keep their bytes."""
    changed = dict(members)
    for (name, *inner), value in changes.items():
        raw = msgspec.Raw(msgspec.json.encode(value))
        if inner:
            held = msgspec.json.decode(changed.get(name, b"null"), type=dict[str, msgspec.Raw] | None) or {}
            raw = msgspec.Raw(msgspec.json.encode({**held, inner[0]: raw}))
        changed[name] = raw
    return changed


def read(endpoint: Endpoint, received: Received, rules: WireRules) -> WireRequest:
    """Parse a request.

    Raises:
        InvalidRequest: it is not a JSON object, or a member that the gateway reads has a wrong type.
        BodyTooLarge: decoding it would block the process for too long.
    """
    body = received.body
    is_chat = endpoint is Endpoint.CHAT
    has_long = is_chat and len(body) >= LONG_BYTES and may_hold_long_texts(body)
    for cut in cuts_of(body) if has_long else ():
        found = _read_around(cut, received, rules)
        if found is not None:
            return found
    if is_chat:
        check_size(body)
    members = members_of(body, values_max=VALUES_MAX + (0 if is_chat else rules.token_ids_max))
    take_a_break(len(body))
    seen = None
    if is_chat:
        seen = _seen(body, at_once=not has_long and len(body) <= SLICE_BYTES)
        request = None if seen is None else _ordinary(members, seen, received, rules)
        if request is not None:
            return _wire_request(request, members, received, rules, size_bytes=len(body))
    return read_members(endpoint, members, received, rules, size_bytes=len(body), seen=seen)


def _ordinary(
    members: Mapping[str, msgspec.Raw], chat: Chat, received: Received, rules: WireRules
) -> Request | None:
    """Return a chat of nothing but short texts, without options that are read separately: most are such.

    Returns None for every other, and for those to be rejected, in whole or in part.
    """
    model, messages, most = chat.model, chat.messages, chat.max_completion_tokens
    if most is None:
        most = chat.max_tokens
    if (
        not 0 < len(model) <= MODEL_CHARS_MAX
        or not 0 < len(messages) <= rules.messages_max
        or chat.n is not None
        or (most is not None and most < 1)
        or not (_ASIDE.isdisjoint(members) and rules.drop_fields.isdisjoint(members))
    ):
        return None
    turns: list[Turn] = []
    read: list[tuple[int, int]] = []
    so_far = size = 0
    for message in messages:
        role, content = message.role, message.content
        if type(content) is not str or message.tool_calls is not None:
            return None
        turns.append(Turn(role, (content,)))
        so_far = hash((so_far, role, content))
        size += len(role) + len(content) + 1
        read.append((so_far, size))
    prefixes = tuple([(upto, part / size) for upto, part in read])
    # By position, in the order of the fields: the class is wide, and keywords would cost 2 us.
    return Request(
        Endpoint.CHAT,
        model,
        Prompt(tuple(turns)),
        bool(chat.stream),
        most,
        1,
        1,
        1,
        None,
        0,
        0,
        0,
        False,
        received.key,
        received.headers,
        prefixes,
    )


def _wire_request(
    request: Request,
    members: dict[str, msgspec.Raw],
    received: Received,
    rules: WireRules,
    *,
    size_bytes: int,
    dropped: Sequence[str] = (),
    options: Mapping[str, Any] = NO_OPTIONS,
    cut: CutOut | None = None,
) -> WireRequest:
    """Return a parsed request with the members to send, which ask for usage where the rules say so.

    `options`: its `stream_options`.
    """
    inject = request.stream and rules.usage_in_streams and not request.include_usage
    if inject:
        members["stream_options"] = (
            msgspec.Raw(msgspec.json.encode({**options, "include_usage": True}))
            if options
            else _INCLUDE_USAGE
        )
    del members["model"]
    return WireRequest(
        received.arrival, request, received.forwarded, dropped, inject, size_bytes, members, cut
    )


def _read_around(cut: CutOut, received: Received, rules: WireRules) -> WireRequest | None:
    """Parse a chat whose long strings were cut out. None: it must be parsed as a whole.

    That includes all invalid ones.
    """
    if len(cut.rest) > SLICE_BYTES:
        return None  # too large to be decoded at once
    try:
        members = members_of(cut.rest)
        seen = CHAT.decode(cut.rest.removeprefix(_BOM))
    except (InvalidRequest, *UNFIT):
        return None
    if not rules.drop_fields.isdisjoint(members) or not put_long(seen.messages, cut.texts):
        return None
    try:
        return read_members(
            Endpoint.CHAT, members, received, rules, size_bytes=len(received.body), seen=seen, cut=cut
        )
    except InvalidRequest:
        return None


def read_members(
    endpoint: Endpoint,
    members: dict[str, msgspec.Raw],
    received: Received,
    rules: WireRules,
    *,
    size_bytes: int,
    seen: Chat | None,
    cut: CutOut | None = None,
) -> WireRequest:
    """Parse a request, given as the members of its body; takes ownership of `members`.

    `received`: the request; its body is not read. `seen`: the same members, if they could be decoded at once.
    `cut`: the strings that were cut out.

    Raises:
        InvalidRequest: a member the gateway reads has a wrong type.
    """
    dropped: Sequence[str] = ()
    if not rules.drop_fields.isdisjoint(members):
        dropped = tuple(sorted(name for name in members if name in rules.drop_fields))
        for name in dropped:
            del members[name]
        seen = None
    if _TEMPLATE_KWARGS in members:
        dropped = (*dropped, *_drop_template_kwargs(members, rules.drop_fields))
    fields = _Fields(members)
    model = fields.text("model") if seen is None else seen.model
    if not model:
        raise InvalidRequest("`model` is required.", param="model")
    if len(model) > MODEL_CHARS_MAX:
        raise InvalidRequest(f"`model` is longer than {MODEL_CHARS_MAX} characters.", param="model")
    stream = fields.flag("stream") if seen is None else bool(seen.stream)
    options = NO_OPTIONS
    tools = _NO_TOOLS
    is_bare = _ASIDE.isdisjoint(members)
    if not is_bare:
        options = _mapping(fields.any("stream_options"))
        tools = _tools(fields, rules.tools_max)
        if tools is _NO_TOOLS:
            _drop_no_tools(fields, members)
    include_usage = bool(options.get("include_usage"))
    chat = endpoint is Endpoint.CHAT
    prompt, prefixes, prompts = (
        _chat(fields, seen, tools, rules, cut, is_bare=is_bare) if chat else _completion(fields, rules)
    )
    choices = (fields.count("n", least=1) if seen is None else _count(seen.n, "n", 1)) or 1
    choices *= prompts
    _check_choices(choices, rules)
    images = audios = 0
    for turn in prompt.turns:
        images += turn.images
        audios += turn.audios
    request = Request(
        endpoint=endpoint,
        model=model,
        prompt=prompt,
        stream=stream,
        max_tokens=_max_tokens(fields, seen, chat=chat),
        seqs=choices,
        choices=choices,
        prompts=prompts,
        reasoning=_reasoning(fields, prompt, is_bare=is_bare or not chat),
        images=images,
        audios=audios,
        tools=tools.count,
        include_usage=include_usage,
        key=received.key,
        headers=received.headers,
        prefixes=prefixes,
    )
    return _wire_request(
        request, members, received, rules, size_bytes=size_bytes, dropped=dropped, options=options, cut=cut
    )


def _drop_no_tools(fields: "_Fields", members: dict[str, msgspec.Raw]) -> None:
    """Remove an empty array of tools, which means the same as none.

    Agent frameworks send it for agents without tools; vLLM accepted it, and refuses it since its PR #39780.
    The choice among them goes with it, unless it demands a call.
    """
    if fields.raw("tools") is not None:
        del members["tools"]
        if fields.any("tool_choice") in ("auto", "none"):
            del members["tool_choice"]


def _reasoning(fields: "_Fields", prompt: Prompt, *, is_bare: bool) -> bool | None:
    """Return whether a chat asks for reasoning; None if it does not say."""
    if prompt.thinking or is_bare:
        return prompt.thinking or None
    kwargs = _mapping(fields.any(_TEMPLATE_KWARGS))
    return False if "enable_thinking" in kwargs or fields.any("reasoning_effort") is not None else None


def _drop_template_kwargs(members: dict[str, msgspec.Raw], names: frozenset[str]) -> Sequence[str]:
    """Remove `names` from the arguments for the chat template. Return what was removed.

    SGLang and mlx_lm pass these on to the function that renders it, which takes the template itself from
    there, too.
    """
    try:
        kwargs = _decode_kwargs(members[_TEMPLATE_KWARGS])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ()  # no object: reported where it is read, or by the backend
    found = sorted(names.intersection(kwargs))
    if found:
        kept = {name: raw for name, raw in kwargs.items() if name not in names}
        members[_TEMPLATE_KWARGS] = msgspec.Raw(msgspec.json.encode(kept))
    return [f"{_TEMPLATE_KWARGS}.{name}" for name in found]


def _check_choices(choices: int, rules: WireRules) -> None:
    if choices > rules.choices_max:
        message = f"At most {rules.choices_max} choices per request."
        raise InvalidRequest(message, code="too_many_choices", param="n")


def _max_tokens(fields: "_Fields", seen: "Chat | None", *, chat: bool) -> int | None:
    if seen is not None:
        most = _count(seen.max_completion_tokens, "max_completion_tokens", 1)
        return _count(seen.max_tokens, "max_tokens", 1) if most is None else most
    most = fields.count("max_completion_tokens", least=1) if chat else None
    if most is None:
        most = fields.count("max_tokens", least=1 if chat else 0)
    # 0 is valid if only the prompt is scored (`echo`): vLLM generates a token that it does not return.
    return 1 if most == 0 else most


def check_size(body: bytes) -> None:
    """Reject a body that, without its images and recordings, is longer than any text a model can read.

    Raises:
        BodyTooLarge: it is too long.
    """
    if len(body) > TEXT_BYTES_MAX and bytes_beside_media(body) > TEXT_BYTES_MAX:
        raise BodyTooLarge(
            f"Beside its images and recordings, the request body is larger than {TEXT_BYTES_MAX:,} bytes."
        )


def members_of(body: bytes, *, values_max: int = VALUES_MAX) -> dict[str, msgspec.Raw]:
    """Return the members of a request body as raw JSON.

    Raises:
        InvalidRequest: it is not a JSON object, or has more values than any model reads.
    """
    _check_values(body, values_max)
    body = body.removeprefix(_BOM)
    try:
        return _decode_members(body)
    except msgspec.ValidationError as error:
        raise InvalidRequest(
            f"The request body must be a JSON object of at most {MEMBERS_MAX} members."
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        whole = lone_surrogates.replace_lone_surrogates(body)
        if whole is None:
            why = str(error) if body.strip() else "it is empty"
            message = f"The request body is not valid JSON: {why}."
            raise InvalidRequest(message, code="invalid_json") from error
    return members_of(whole, values_max=values_max)


def _check_values(body: bytes, values_max: int = VALUES_MAX) -> None:
    """Reject a body with too many values, whose decoding would block the process.

    Raises:
        InvalidRequest: it has too many.
    """
    if may_be_crowded(body) and is_crowded(body, values_max):
        message = f"At most {CONTAINERS_MAX:,} objects and arrays and {values_max:,} values per request."
        raise InvalidRequest(message, code="too_many_items")


# Created once: creating a decoder takes longer than decoding a short body.
_decode_members: Callable[[bytes], dict[str, msgspec.Raw]] = msgspec.json.Decoder(
    Annotated[dict[str, msgspec.Raw], msgspec.Meta(max_length=MEMBERS_MAX)]
).decode
_decode_kwargs = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_items = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_ids = msgspec.json.Decoder(list[int]).decode


class _Fields:
    """Typed access to single members; each error names its member."""

    def __init__(self, members: Mapping[str, msgspec.Raw]) -> None:
        self._members = members

    def raw(self, name: str) -> msgspec.Raw | None:
        raw = self._members.get(name)
        return None if raw is None or bytes(memoryview(raw)[:5]) == b"null" else raw

    def any(self, name: str) -> Any:
        raw = self.raw(name)
        return None if raw is None else decoded(raw, name)

    def items(self, name: str, *, most: int) -> list[msgspec.Raw]:
        """Return the items of a required array as raw JSON."""
        raw = self.raw(name)
        if raw is None:
            raise InvalidRequest(f"`{name}` is required.", param=name)
        return _items(raw, name, most)

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
        return _count(self.any(name), name, least)


def _count(value: object, name: str, least: int) -> int | None:
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidRequest(f"`{name}` must be an integer of at least {least}.", param=name)
    return value


def decoded(raw: msgspec.Raw, name: str) -> Any:
    """Decode the member `name`."""
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        message = f"`{name}` is not valid JSON: {error}."
        raise InvalidRequest(message, code="invalid_json", param=name) from error


def _items(raw: msgspec.Raw, name: str, most: int) -> list[msgspec.Raw]:
    """Return the items of an array as raw JSON."""
    try:
        items = _decode_items(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"`{name}` must be an array.", param=name) from error
    _check_length(items, name, most)
    return items


def _check_length(items: Sequence[object], name: str, most: int) -> None:
    if len(items) > most:
        raise InvalidRequest(f"`{name}` has more than {most} items.", code="too_many_items", param=name)


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


# ------------------------------------------------------------------ chat


def seen_of(members: Mapping[str, msgspec.Raw]) -> Chat | None:
    """Decode a chat from its members; None: it is long, or must be decoded member by member."""
    body = _object(members)
    return None if len(body) > SLICE_BYTES or may_hold_long_texts(body) else _seen(body, at_once=True)


def _seen(body: bytes, *, at_once: bool) -> Chat | None:
    """Decode a chat; None if it must be decoded member by member.

    `at_once`: decode all of it, in half the time of decoding its messages one by one.
    """
    try:
        if at_once:
            return CHAT.decode(body)
        chat = LONG_CHAT.decode(body)
        take_a_break(len(body))
        messages = [_opened(message) for message in chat.messages]
    except UNFIT:
        return None
    return Chat(chat.model, messages, chat.stream, chat.max_tokens, chat.max_completion_tokens, chat.n)


def _opened(message: LongMessage) -> Message:
    """Return a message with its content decoded, or as a long text.

    Content of an assistant or a tool is always decoded, because the template inspects it.

    Raises:
        msgspec.DecodeError, UnicodeDecodeError, RecursionError: it must be decoded separately.
    """
    raw = message.content
    content: Any
    if (
        len(memoryview(raw)) < LONG_BYTES
        or bytes(memoryview(raw)[:1]) != b'"'
        or message.tool_calls is not None
        or message.role in INSPECTED_ROLES
    ):
        content = CONTENT.decode(raw)
    else:
        content = long_text(raw)
    return Message(message.role, content, message.tool_calls, message.reasoning, message.reasoning_content)


def _chat(
    fields: _Fields,
    seen: Chat | None,
    tools: "_Tools",
    rules: WireRules,
    cut: CutOut | None,
    *,
    is_bare: bool,
) -> tuple[Prompt, Prefixes, int]:
    """`cut`: the strings cut out of the members. `is_bare`: all members are part of `Chat`."""
    raws: Sequence[msgspec.Raw] = ()
    if seen is None:
        raws = fields.items("messages", most=rules.messages_max)
        messages = [_message(raw, f"messages.{index}") for index, raw in enumerate(raws)]
    else:
        messages = seen.messages
        _check_length(messages, "messages", rules.messages_max)
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
            parts += _count_parts(message, f"messages.{index}", rules)
            if parts > rules.parts_max:
                complaint = f"The messages have more than {rules.parts_max} parts and tool calls together."
                raise InvalidRequest(complaint, code="too_many_items", param="messages")
            turn = _turn(message, f"messages.{index}", rules)
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
        return Prompt(turns=tuple(turns)), prefixes, 1
    budget = _mapping(fields.any("mm_processor_kwargs")).get("max_soft_tokens")
    if isinstance(budget, bool) or not isinstance(budget, int) or budget <= 0:
        budget = None
    prompt = Prompt(
        turns=tuple(turns),
        tools_json=tools.json,
        tools_texts=tools.texts,
        thinking=before.thinking,
        image_budget=None if budget is None else min(budget, SOFT_TOKENS_MAX),
    )
    return prompt, prefixes, 1


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


def _before(fields: _Fields, tools: "_Tools") -> _Before:
    kwargs = _mapping(fields.any(_TEMPLATE_KWARGS))
    effort = fields.any("reasoning_effort")
    thinking = bool(kwargs.get("enable_thinking")) or (effort is not None and effort != "none")
    salt = fields.raw(_SALT)
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
        texts = texts[: len(texts) - len(_thought(message))]
    size = len(turn.role) + sum(map(len, chain(texts, *turn.tool_calls))) + 1
    return (turn.role, *texts, *turn.tool_calls), size


@valueclass(frozen=True, slots=True)
class _Tools:
    """The number of tools of a chat, their compact JSON, and the number of texts in it."""

    count: int = 0
    json: str = ""
    texts: int = 0


_NO_TOOLS = _Tools()


def _tools(fields: _Fields, most: int) -> _Tools:
    raw = fields.raw("tools")
    if raw is None:
        return _NO_TOOLS
    written = bytes(raw)
    return _read_tools(written, most) if len(written) < LONG_BYTES else _read_tools.__wrapped__(written, most)


@lru_cache(maxsize=64)  # an application sends the same tools with every request
def _read_tools(written: bytes, most: int) -> _Tools:
    raws = _items(msgspec.Raw(written), "tools", most)
    if not raws:
        return _NO_TOOLS
    json = msgspec.json.encode([decoded(raw, "tools") for raw in raws]).decode()
    return _Tools(len(raws), json, texts_in(json))


def _message(raw: msgspec.Raw, where: str) -> Message:
    """Decode a single message."""
    if len(memoryview(raw)) >= LONG_BYTES:
        with suppress(*UNFIT):
            return _opened(LONG_MESSAGE.decode(raw))
    message = decoded(raw, where)
    if not isinstance(message, dict):
        raise InvalidRequest("A message must be an object.", param=where)
    role, content, calls = message.get("role"), message.get("content"), message.get("tool_calls")
    if not isinstance(role, str):
        raise InvalidRequest("A message needs a `role`.", param=f"{where}.role")
    if not isinstance(content, str | list | None):
        raise InvalidRequest("`content` must be a string or an array of parts.", param=f"{where}.content")
    thoughts = message.get("reasoning"), message.get("reasoning_content")
    return Message(role, content, calls, *thoughts)


def _count_parts(message: Message, where: str, rules: WireRules) -> int:
    """Return the number of parts and tool calls of a message, before any of them is examined."""
    content, calls = message.content, message.tool_calls
    parts = len(content) if isinstance(content, list) else 0
    if parts > rules.messages_max:
        complaint = f"A message has more than {rules.messages_max} parts."
        raise InvalidRequest(complaint, code="too_many_items", param=f"{where}.content")
    if not isinstance(calls, list):
        return parts
    _check_length(calls, f"{where}.tool_calls", rules.messages_max)
    return parts + len(calls)


def _turn(message: Message, where: str, rules: WireRules) -> Turn:
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
        texts += _thought(message)
    return Turn(message.role, tuple(texts), calls, images, audios, long, before)


def _thought(message: Message) -> tuple[str, ...]:
    """Return the thought that led to the tool calls of a message: the template keeps no others."""
    thought = message.reasoning or message.reasoning_content
    return (thought,) if isinstance(thought, str) else ()


def _call(call: Mapping[str, Any]) -> tuple[str, str]:
    function = _mapping(call.get("function"))
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


# ------------------------------------------------------------------ completions


def _completion(fields: _Fields, rules: WireRules) -> tuple[Prompt, Prefixes, int]:
    raw = fields.raw("prompt")
    if raw is not None and bytes(memoryview(raw)[:1]) == b"[":
        written = bytes(raw)
        if occurrences(b",", written, rules.token_ids_max) > rules.token_ids_max:
            message = f"`prompt` has more than {rules.token_ids_max} items."
            raise InvalidRequest(message, code="too_many_items", param="prompt")
        tokens = _token_ids(written)
        if tokens is not None:
            return Prompt(raw_tokens=tokens), (), 1
        if written[1:_NEAR].lstrip()[:1] == b"[":
            lists = _items(raw, "prompt", len(written))
            _check_choices(len(lists), rules)
            return Prompt(raw_tokens=max(map(_length, lists))), (), len(lists)
        _check_values(written)
    if raw is not None and len(memoryview(raw)) > TEXT_BYTES_MAX:
        raise BodyTooLarge(f"`prompt` is longer than {TEXT_BYTES_MAX:,} bytes.", param="prompt")
    prompt = None if raw is None else decoded(raw, "prompt")
    match prompt:
        case str():
            return Prompt(raw_texts=(prompt,)), (), 1
        case [int(), *_] if all(isinstance(token, int) for token in prompt):
            return Prompt(raw_tokens=len(prompt)), (), 1
        case [str(), *_] if all(isinstance(text, str) for text in prompt):
            return Prompt(raw_texts=tuple(prompt)), (), len(prompt)
    raise InvalidRequest(_NO_PROMPT, param="prompt")


def _length(raw: msgspec.Raw) -> int:
    """Return the number of token ids in an array of a list of prompts."""
    written = bytes(raw)
    tokens = _token_ids(written)
    if tokens is not None:
        return tokens
    _check_values(written)
    ids = decoded(raw, "prompt")
    if not isinstance(ids, list):
        raise InvalidRequest(_NO_PROMPT, param="prompt")
    return len(ids)


def _token_ids(written: bytes) -> int | None:
    """Return the number of token ids in a long array; None: it is short, or has other items.

    Decoding a million of them at once would hold the GIL for 30 ms.
    """
    if len(written) < LONG_BYTES or written.find(b".") >= 0:  # 1.0 is not a token id
        return None
    tokens, at = 0, 1
    while at < len(written):
        comma = written.find(b",", at + LONG_BYTES)
        end = len(written) - 1 if comma < 0 else comma
        try:
            tokens += len(_decode_ids(b"[%b]" % written[at:end]))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        at = end + 1
    return tokens
