"""Requests to create a response, translated to chats."""

import secrets
from collections.abc import Mapping
from typing import Any

import msgspec

from gateway.core.errors import GatewayError, InvalidRequest
from gateway.core.request import Endpoint
from gateway.core.responses.draft import Draft
from gateway.core.responses.items import without_references
from gateway.core.responses.replay import JobFacts
from gateway.core.responses.request import (
    READ,
    Translated,
    chat_param_here,
    needs,
    new_response,
    read,
    travels,
)
from gateway.core.value import valueclass
from gateway.downstream import wire
from gateway.downstream.background import headers_kept
from gateway.downstream.reading import Received
from gateway.downstream.stored_responses import Found

_DEPTH_SPARE = 200
"""Levels of nesting that are left for what surrounds an echo in an event. A choice, many times what an event
has."""


@valueclass(frozen=True, slots=True)
class ResponseRequest:
    """A parsed request.

    Attributes:
        incoming: The chat request it was translated to.
        draft: Its response, still empty.
        conversation: JSON members to store, as in `StoredConversation`; None: do not store the response.
    """

    incoming: wire.WireRequest
    draft: Draft
    conversation: bytes | None

    def facts(self, received: Received, token: str, says: Mapping[str, Any]) -> JobFacts:
        """Return the facts to store with its job. `says`: further members of its response."""
        return JobFacts(
            response={**self.draft.response, **says},
            token=token,
            first_index=self.draft.first_index,
            headers=headers_kept(received.headers),
            conversation=msgspec.json.decode(b"{%b}" % (self.conversation or b"")),
        )


def members_in(body: bytes) -> tuple[dict[str, msgspec.Raw], dict[str, Any]]:
    """Return all members of a body as received, and those that are read, decoded.

    Raises:
        InvalidRequest: it is not a JSON object, or has more values than any model reads.
        BodyTooLarge: it is longer than any text a model can read.
    """
    wire.check_size(body)
    raws = wire.members_of(body)
    return raws, {name: wire.decoded(raw, name) for name, raw in raws.items() if name in READ}


def request_of(
    received: Received,
    rules: wire.WireRules,
    raws: Mapping[str, msgspec.Raw],
    members: Mapping[str, Any],
    token: str,
    found: Found,
) -> ResponseRequest:
    """Parse a request, of which `members` are those that are read, and `found` what it refers to.

    Raises:
        GatewayError: it is rejected.
    """
    translated = read(members, token=token, context=found.context, stored=found.stored)
    response = new_response(translated.echo, token, int(received.arrival.wall_at))
    check_depth(response)
    conversation = _conversation(translated) if translated.store else None
    # Copies: a reference would keep the whole body in memory.
    chat = {name: raw.copy() for name, raw in raws.items() if travels(name)}
    chat |= {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in translated.chat.items()}
    size = sum(len(memoryview(raw)) for raw in chat.values()) + len(conversation or b"")
    try:
        incoming = wire.read_members(
            Endpoint.CHAT, chat, received, rules, size_bytes=size, seen=wire.chat_of(chat)
        )
    except GatewayError as error:
        error.param = chat_param_here(error.param)
        raise
    return ResponseRequest(incoming, Draft(response, token, len(translated.items)), conversation)


def _conversation(translated: Translated) -> bytes:
    return b'"context":%b,"input":%b' % (
        msgspec.json.encode(translated.context),
        msgspec.json.encode(translated.items),
    )


def check_depth(response: Mapping[str, Any]) -> None:
    """Reject a request whose echo would be too deeply nested to be encoded within an event later.

    Raises:
        InvalidRequest: it would be.
    """
    nested: object = response
    for _ in range(_DEPTH_SPARE):
        nested = [nested]
    try:
        msgspec.json.encode(nested)
    except RecursionError as error:
        raise InvalidRequest("The request is nested too deeply.") from error


def wants_background(members: Mapping[str, Any], *, has_jobs: bool) -> bool:
    """Return whether a request asks for a background response.

    Raises:
        InvalidRequest: it asks for one, but there are no jobs; or `background` is invalid.
    """
    wanted = members.get("background")
    if wanted is not None and not isinstance(wanted, bool):
        raise InvalidRequest("`background` must be true or false.", param="background")
    if wanted and not has_jobs:
        message = "Background responses are not available: the gateway has no `jobs`."
        raise InvalidRequest(message, code="background_not_supported", param="background")
    return bool(wanted)


@valueclass(frozen=True, slots=True)
class ReadAlone:
    """A request that was parsed without the store.

    Attributes:
        incoming: The chat request it was translated to.
        is_background: Whether it asks to run in the background.
        refers: Whether it refers to what is stored, which is missing in the chat.
    """

    incoming: wire.WireRequest
    is_background: bool
    refers: bool


def read_alone(received: Received, rules: wire.WireRules, *, has_jobs: bool) -> ReadAlone:
    """Parse a request without the conversation it continues and the stored items it refers to.

    Raises:
        GatewayError: it would be rejected.
    """
    raws, members = members_in(received.body)
    is_background = wants_background(members, has_jobs=has_jobs)
    wanted, found = needs(members, rules.messages_max), Found()
    refers = wanted.previous is not None or bool(wanted.items)
    if refers and isinstance(members.get("input"), list):
        members["input"], found.context = without_references(members["input"])
    asked = request_of(received, rules, raws, members, secrets.token_hex(16), found)
    return ReadAlone(asked.incoming, is_background, refers)
