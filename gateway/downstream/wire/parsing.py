"""Parses a request body, in one of two ways: the short one for ordinary chats, and the one for all others."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from gateway.core.errors import InvalidRequest
from gateway.core.request import Endpoint, Prefixes, Prompt, Request, Turn
from gateway.core.value_limit import VALUES_MAX
from gateway.downstream.cut_out import CutOut, cuts_of, may_hold_long_texts
from gateway.downstream.long_texts import LONG_BYTES, SLICE_BYTES, take_a_break
from gateway.downstream.reading import Received
from gateway.downstream.wire.chat_decoding import ASIDE, CHAT, TEMPLATE_KWARGS, UNFIT, Chat, chat_in
from gateway.downstream.wire.chat_prompt import NO_TOOLS, prompt_of_chat, tools_of
from gateway.downstream.wire.completion_prompt import prompt_of_completion
from gateway.downstream.wire.members import BOM, Fields, check_size, count_of, mapping_of, members_of
from gateway.downstream.wire.reassembly import put_long
from gateway.downstream.wire.request import WireRequest
from gateway.downstream.wire.rules import WireRules

MODEL_CHARS_MAX = 256
"""Maximum characters of a model's name. A choice: names are echoed, stored and displayed; longer ones are
invalid."""

_NO_PREFIXES: Prefixes = ()
_NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})
_INCLUDE_USAGE = msgspec.Raw(b'{"include_usage":true}')
_decode_kwargs = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


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
        seen = chat_in(body, at_once=not has_long and len(body) <= SLICE_BYTES)
        request = None if seen is None else ordinary_request(members, seen, received, rules)
        if request is not None:
            return _wire_request(request, members, received, rules, size_bytes=len(body))
    return read_members(endpoint, members, received, rules, size_bytes=len(body), seen=seen)


def _read_around(cut: CutOut, received: Received, rules: WireRules) -> WireRequest | None:
    """Parse a chat whose long strings were cut out. None: it must be parsed as a whole.

    That includes all invalid ones.
    """
    if len(cut.rest) > SLICE_BYTES:
        return None  # too large to be decoded at once
    try:
        members = members_of(cut.rest)
        seen = CHAT.decode(cut.rest.removeprefix(BOM))
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


# ------------------------------------------------------------------ two ways to the same request
#
# `read_members` reads every request. `ordinary_request` makes the same `Request` of an ordinary chat in fewer
# steps: what one of them learns to read, the other has to (tests/downstream/test_wire.py compares them).


def ordinary_request(
    members: Mapping[str, msgspec.Raw], chat: Chat, received: Received, rules: WireRules
) -> Request | None:
    """Return a chat of nothing but short texts, without options that are read separately: most are such.

    Returns None for every other, and for those to be rejected, in whole or in part.

    `chat`: the same members, decoded.
    """
    model, messages, most = chat.model, chat.messages, chat.max_completion_tokens
    if most is None:
        most = chat.max_tokens
    if (
        not 0 < len(model) <= MODEL_CHARS_MAX
        or not 0 < len(messages) <= rules.messages_max
        or chat.n is not None
        or (most is not None and most < 1)
        or not (ASIDE.isdisjoint(members) and rules.drop_fields.isdisjoint(members))
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
    if TEMPLATE_KWARGS in members:
        dropped = (*dropped, *_drop_template_kwargs(members, rules.drop_fields))
    fields = Fields(members)
    model = fields.text("model") if seen is None else seen.model
    if not model:
        raise InvalidRequest("`model` is required.", param="model")
    if len(model) > MODEL_CHARS_MAX:
        raise InvalidRequest(f"`model` is longer than {MODEL_CHARS_MAX} characters.", param="model")
    stream = fields.flag("stream") if seen is None else bool(seen.stream)
    options = _NO_OPTIONS
    tools = NO_TOOLS
    is_bare = ASIDE.isdisjoint(members)
    if not is_bare:
        options = mapping_of(fields.any("stream_options"))
        tools = tools_of(fields, rules.tools_max)
        if tools is NO_TOOLS:
            _drop_no_tools(fields, members)
    include_usage = bool(options.get("include_usage"))
    chat = endpoint is Endpoint.CHAT
    prompts, prefixes = 1, _NO_PREFIXES
    if chat:
        prompt, prefixes = prompt_of_chat(fields, seen, tools, rules, cut, is_bare=is_bare)
    else:
        prompt, prompts = prompt_of_completion(fields, rules)
    choices = (fields.count("n", least=1) if seen is None else count_of(seen.n, "n", 1)) or 1
    choices *= prompts
    rules.check_choices(choices)
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


def _wire_request(
    request: Request,
    members: dict[str, msgspec.Raw],
    received: Received,
    rules: WireRules,
    *,
    size_bytes: int,
    dropped: Sequence[str] = (),
    options: Mapping[str, Any] = _NO_OPTIONS,
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


# ------------------------------------------------------------------ single members


def _drop_no_tools(fields: Fields, members: dict[str, msgspec.Raw]) -> None:
    """Remove an empty array of tools, which means the same as none.

    Agent frameworks send it for agents without tools; vLLM accepted it, and refuses it since its PR #39780.
    The choice among them goes with it, unless it demands a call.
    """
    if fields.raw("tools") is not None:
        del members["tools"]
        if fields.any("tool_choice") in ("auto", "none"):
            del members["tool_choice"]


def _reasoning(fields: Fields, prompt: Prompt, *, is_bare: bool) -> bool | None:
    """Return whether a chat asks for reasoning; None if it does not say."""
    if prompt.thinking or is_bare:
        return prompt.thinking or None
    kwargs = mapping_of(fields.any(TEMPLATE_KWARGS))
    return False if "enable_thinking" in kwargs or fields.any("reasoning_effort") is not None else None


def _drop_template_kwargs(members: dict[str, msgspec.Raw], names: frozenset[str]) -> Sequence[str]:
    """Remove `names` from the arguments for the chat template. Return what was removed.

    SGLang and mlx_lm pass these on to the function that renders it, which takes the template itself from
    there, too.
    """
    try:
        kwargs = _decode_kwargs(members[TEMPLATE_KWARGS])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ()  # no object: reported where it is read, or by the backend
    found = sorted(names.intersection(kwargs))
    if found:
        kept = {name: raw for name, raw in kwargs.items() if name not in names}
        members[TEMPLATE_KWARGS] = msgspec.Raw(msgspec.json.encode(kept))
    return [f"{TEMPLATE_KWARGS}.{name}" for name in found]


def _max_tokens(fields: Fields, seen: Chat | None, *, chat: bool) -> int | None:
    if seen is not None:
        most = count_of(seen.max_completion_tokens, "max_completion_tokens", 1)
        return count_of(seen.max_tokens, "max_tokens", 1) if most is None else most
    most = fields.count("max_completion_tokens", least=1) if chat else None
    if most is None:
        most = fields.count("max_tokens", least=1 if chat else 0)
    # 0 is valid if only the prompt is scored (`echo`): vLLM generates a token that it does not return.
    return 1 if most == 0 else most
