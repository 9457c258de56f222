"""The routes under `/v1/responses`: requests are translated to chat requests, and answers back.

The pipeline serves the chat request like any other. Its answer, status, headers and the bytes of a chat
completion, is translated event by event, and stored if requested.
"""

import re
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
from litestar import MediaType, Request, Response, delete, get, post
from litestar.handlers import BaseRouteHandler
from litestar.params import FromPath
from litestar.response import Stream

from gateway.core.errors import (
    BodyTooLarge,
    CallerError,
    GatewayError,
    InvalidRequest,
    RouteNotFound,
    StoreUnavailable,
    UpstreamFailed,
)
from gateway.core.idempotency import HEADER
from gateway.core.jobs import Job
from gateway.core.request import Endpoint
from gateway.core.responses.chat_stream import ChatStream
from gateway.core.responses.draft import Draft, Event
from gateway.core.responses.items import Item, home_of, without_references
from gateway.core.responses.replay import JobFacts
from gateway.core.responses.request import (
    READ,
    Needs,
    Translated,
    chat_param_here,
    needs,
    new_response,
    read,
    travels,
)
from gateway.core.value import valueclass
from gateway.downstream import wire
from gateway.downstream.background import Background, handover_headers, headers_kept
from gateway.downstream.callers_jobs import CallersJobs, gone
from gateway.downstream.files import limit_of, page_of
from gateway.downstream.idempotency import IdempotentRequests
from gateway.downstream.keys import KeyRing
from gateway.downstream.reading import BodyReaders, Received, Work
from gateway.downstream.relay import HttpDownstream, send_json
from gateway.pipeline import Pipeline
from gateway.pipeline.caller import KEEP_ALIVE, SSE_HEADERS, while_caller_reads
from gateway.ports import Clock, Downstream, Headers, Incoming, ResponseStore

PATH = "/v1/responses"

REFERENCES_MAX = 64
"""Maximum number of responses that a request may refer to by item ids. A choice: each is looked up."""

_NUMBER = re.compile(r"-?[0-9]{1,18}")

_DEPTH_SPARE = 200
"""Levels of nesting that are left for what surrounds an echo in an event. A choice, many times what an event
has."""

_PAGE = 20
_PAGE_MAX = 100
"""Input items per page by default and at most: OpenAI's figures."""


@valueclass(frozen=True, slots=True)
class ResponseRetention:
    """The store of responses, and their expiry in seconds."""

    store: ResponseStore
    ttl_s: float


class StoredResponse(msgspec.Struct):
    """A stored response."""

    response: msgspec.Raw


class StoredConversation(StoredResponse):
    """A stored response with its conversation: everything before its own input, and that input."""

    context: list[Any]
    input: list[Any]

    def items(self) -> list[Item]:
        """Return the whole conversation, including the answer."""
        return [*self.context, *self.input, *self.output()]

    def output(self) -> list[Item]:
        """Return the items of the answer, without incomplete calls, which cannot have been answered."""
        response = msgspec.json.decode(self.response)
        return [item for item in response["output"] if not _is_half_a_call(item)]


def _is_half_a_call(item: Item) -> bool:
    return bool(item["type"] == "function_call" and item["status"] != "completed")


@dataclass(slots=True)
class Found:
    """The stored context of a request: its conversation, items by id, and what both were decoded from.

    `records` has an item as often as the request refers to it, since each reference becomes a copy.
    """

    context: Sequence[Item] = ()
    stored: dict[str, Item] = field(default_factory=dict)
    records: list[bytes] = field(default_factory=list)


class Responses:
    """The routes for responses; one per process."""

    def __init__(
        self,
        *,
        pipeline: Pipeline,
        keys: KeyRing,
        rules: wire.WireRules,
        readers: BodyReaders,
        body_bytes_max: int,
        retention: ResponseRetention,
        idempotency: IdempotentRequests,
        background: Background | None,
        clock: Clock,
    ) -> None:
        """Serve responses with `pipeline`, and background ones with `background`, if there is one.

        `body_bytes_max` limits a request together with everything stored that it refers to.
        """
        self._pipeline = pipeline
        self._keys = keys
        self._rules = rules
        self._readers = readers
        self._body_bytes_max = body_bytes_max
        self._retention = retention
        self._idempotency = idempotency
        self._background = background
        self._clock = clock

    async def read(self, received: Received) -> Work:
        """Return the work that answers a request to create a response. See `reading.Read`."""
        raws, members = await self._readers.run(lambda: _members(received.body), received.body)
        background = self._background_of(members)
        read_on = partial(self._read_on, raws=raws, members=members, background=background)
        if background is not None:
            return await read_on(received)
        return await self._idempotency.read(received, read_on)

    async def _read_on(
        self,
        received: Received,
        *,
        raws: Mapping[str, msgspec.Raw],
        members: Mapping[str, Any],
        background: Background | None,
    ) -> Work:
        key, token = received.key, secrets.token_hex(16)
        asked = await self._asked(received, raws, members, token)
        if background is not None:
            return await self._handed_over(background, asked, received, token)

        async def work(downstream: HttpDownstream) -> None:
            answer = Answer(downstream, asked, key, self._retention, self._clock)
            try:
                await self._pipeline.run(asked.incoming, answer)
            except GatewayError as error:
                error.param = chat_param_here(error.param)
                raise
            await answer.finish()

        return work

    async def line(self, received: Received, token: str) -> tuple[Incoming, JobFacts]:
        """Return the chat request for a batch's line, and the facts to store with its job."""
        raws, members = await self._readers.run(lambda: _members(received.body), received.body)
        asked = await self._asked(received, raws, members, token)
        return asked.incoming, await self._facts(asked, received, token, {"store": False})

    async def _facts(
        self, asked: "ResponseRequest", received: Received, token: str, says: Mapping[str, Any]
    ) -> JobFacts:
        kept = asked.conversation or b""
        return await self._readers.run(lambda: asked.facts(received, token, says), kept)

    async def _asked(
        self,
        received: Received,
        raws: Mapping[str, msgspec.Raw],
        members: Mapping[str, Any],
        token: str,
    ) -> "ResponseRequest":
        found = await self._look_up(received, needs(members, self._rules.messages_max))
        return await self._readers.run(
            lambda: _translated(received, self._rules, raws, members, token, found),
            received.body,
            *found.records,
        )

    # -------------------------------------------------------------- background

    def _background_of(self, members: Mapping[str, Any]) -> Background | None:
        """Return the job service if the request asks for a background response, or else None.

        Raises:
            InvalidRequest: it asks for one, but there are no jobs; or `background` is invalid.
        """
        wanted = _wants_background(members, has_jobs=self._background is not None)
        return self._background if wanted else None

    async def _handed_over(
        self, background: Background, asked: "ResponseRequest", received: Received, token: str
    ) -> Work:
        store = asked.conversation is not None
        facts = await self._facts(asked, received, token, {"background": True, "store": store})
        try:
            job, known = await background.submit(
                asked.incoming,
                facts,
                id=asked.draft.response["id"],
                store=store,
                idempotency_key=received.headers.get(HEADER),
                route=PATH,
                body=received.body,
            )
        except GatewayError as error:
            error.param = chat_param_here(error.param)
            raise

        headers = handover_headers(asked.incoming, job)

        async def follow(downstream: HttpDownstream) -> None:
            await downstream.start(200, (*SSE_HEADERS, *headers))
            await self._follow(background.jobs, job, -1, downstream.send)
            await downstream.finish()

        if asked.incoming.request.stream:
            return follow
        response = await background.jobs.response(job, known)
        return partial(send_json, response, headers=headers)

    async def _follow(
        self, jobs: CallersJobs, job: Job, after: int, send: Callable[[bytes], Awaitable[None]]
    ) -> None:
        """Send the events of a job as they arrive, with keep-alive comments in between.

        Raises:
            CallerStalled: the caller does not read.
        """
        async for events in jobs.events(job, after):
            with while_caller_reads():
                await send(_frames(events) or KEEP_ALIVE)

    async def _job(self, key: str | None, id: str) -> Job | None:
        return None if self._background is None else await self._background.jobs.get(key, id)

    async def _look_up(self, received: Received, wanted: Needs) -> Found:
        """Return the conversation that a request continues, and the stored items it refers to.

        Raises:
            BodyTooLarge: a chat with all of it would be larger than a body may be.
        """
        key, found = received.key, Found()
        if wanted.previous is not None:
            record = await self._record(key, wanted.previous, "previous_response_id")
            self._add(found, [record], received)
            found.context = (await self._opened(record)).items()
        uses = Counter(wanted.items)
        homes = {home for item in uses if (home := home_of(item)) is not None}
        if len(homes) > REFERENCES_MAX:
            message = f"`input` refers to items of more than {REFERENCES_MAX} responses."
            raise InvalidRequest(message, code="too_many_items", param="input")
        for home in homes:
            items: Sequence[tuple[Item, bytes]] = ()
            with suppress(CallerError):  # it is not kept, or has no items yet
                kept = await self._record(key, home)
                items = await self._readers.run(partial(_named, kept, uses), kept)
            for item, written in items:
                self._add(found, [written] * uses[item["id"]], received)
                found.stored[item["id"]] = item
        return found

    def _add(self, found: Found, records: Sequence[bytes], received: Received) -> None:
        found.records += records
        if len(received.body) + sum(map(len, found.records)) > self._body_bytes_max:
            message = f"With the responses it refers to, it is larger than {self._body_bytes_max} bytes."
            raise BodyTooLarge(message)

    async def _record(self, key: str | None, id: str, param: str | None = None) -> bytes:
        record = await self._retention.store.get(key, id)
        job = None if record is not None else await self._job(key, id)
        if job is not None and self._background is not None and job.status.is_final:
            return await self._background.jobs.record(job, param)
        if job is not None:
            message = "That response has not ended yet."
            raise InvalidRequest(message, code="response_not_finished", param=param)
        if record is None:
            raise gone(id, param)
        return record

    async def _opened(self, record: bytes) -> StoredConversation:
        return await self._readers.run(partial(_conversation_in, record), record)

    # -------------------------------------------------------------- stored responses

    def handlers(self) -> Sequence[BaseRouteHandler]:
        """Return the route handlers for stored responses."""

        @get(PATH + "/{response_id:str}")
        async def retrieve(request: Request[Any, Any, Any], response_id: FromPath[str]) -> Response[bytes]:
            key = self._keys.name_of(request.headers)
            job = await self._job(key, response_id)
            if job is not None and self._background is not None:
                return await self._shown(self._background.jobs, job, request)
            record = await self._record(key, response_id)
            if _wants_stream(request.query_params):
                message = "Only background responses can be streamed again."
                raise InvalidRequest(message, code="unsupported_parameter", param="stream")
            response = msgspec.json.decode(record, type=StoredResponse).response
            return Response(bytes(response), media_type=MediaType.JSON)

        @get(PATH + "/{response_id:str}/input_items")
        async def input_items(
            request: Request[Any, Any, Any], response_id: FromPath[str]
        ) -> Mapping[str, Any]:
            key = self._keys.name_of(request.headers)
            kept = await self._opened(await self._record(key, response_id))
            return _page([*kept.context, *kept.input], request.query_params)

        @delete(PATH + "/{response_id:str}", status_code=200)
        async def forget(request: Request[Any, Any, Any], response_id: FromPath[str]) -> dict[str, Any]:
            key = self._keys.name_of(request.headers)
            is_job = self._background is not None and await self._background.jobs.delete(key, response_id)
            if not is_job and not await self._retention.store.delete(key, response_id):
                raise gone(response_id)
            return {"id": response_id, "object": "response", "deleted": True}

        @post(PATH + "/{response_id:str}/cancel", status_code=200)
        async def cancel(request: Request[Any, Any, Any], response_id: FromPath[str]) -> Response[bytes]:
            key = self._keys.name_of(request.headers)
            job = None if self._background is None else await self._background.jobs.cancel(key, response_id)
            if job is None or self._background is None:
                await self._record(key, response_id)
                message = "Only background responses can be cancelled."
                raise InvalidRequest(message, code="not_in_background")
            return Response(
                msgspec.json.encode(await self._background.jobs.response(job)), media_type=MediaType.JSON
            )

        @post([PATH + "/compact", PATH + "/input_tokens"])
        async def elsewhere(request: Request[Any, Any, Any]) -> None:
            # Unsupported routes of OpenAI's API. Without this handler, they would match as response ids, and
            # be answered with 405.
            raise RouteNotFound(f"There is nothing at {request.scope['path']}.")

        return [retrieve, input_items, forget, cancel, elsewhere]

    async def _shown(self, jobs: CallersJobs, job: Job, request: Request[Any, Any, Any]) -> Response[Any]:
        """Return a job's current response, or its events from some number on."""
        query = request.query_params
        if not _wants_stream(query):
            response = await jobs.response(job)
            answer = Response(msgspec.json.encode(response), media_type=MediaType.JSON)
            if not job.status.is_final:
                answer.headers["retry-after"] = str(jobs.retry_after_s(response))
            return answer
        after = str(query.get("starting_after", "-1"))
        if not _NUMBER.fullmatch(after):
            raise InvalidRequest("`starting_after` must be the number of an event.", param="starting_after")

        async def frames() -> AsyncIterator[bytes]:
            async for events in jobs.events(job, int(after)):
                yield _frames(events) or KEEP_ALIVE

        headers = {name.decode(): value.decode() for name, value in SSE_HEADERS}
        return Stream(frames(), headers=headers, media_type="text/event-stream; charset=utf-8")


def _conversation_in(record: bytes) -> StoredConversation:
    return msgspec.json.decode(record, type=StoredConversation)


def _named(record: bytes, ids: Container[str]) -> list[tuple[Item, bytes]]:
    """Return the items with these ids in a record, each with its JSON."""
    items = {item["id"]: item for item in _conversation_in(record).items() if item["id"] in ids}
    return [(item, msgspec.json.encode(item)) for item in items.values()]


def _wants_stream(query: Mapping[str, Any]) -> bool:
    return query.get("stream", "false").lower() not in ("false", "0", "")


def _page(items: Sequence[Item], query: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a page of items according to `limit`, `order` and `after`."""
    limit, order = limit_of(query, _PAGE, _PAGE_MAX), query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest("`order` must be asc or desc.", param="order")
    ordered = list(items) if order == "asc" else list(reversed(items))
    if (after := query.get("after")) is not None:
        ids = [item["id"] for item in ordered]
        if after not in ids:
            raise InvalidRequest("There is no such item.", param="after")
        ordered = ordered[ids.index(after) + 1 :]
    return page_of(ordered, limit)


# ------------------------------------------------------------------ requests


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


def _wants_background(members: Mapping[str, Any], *, has_jobs: bool) -> bool:
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


def is_response(body: bytes) -> bool:
    """Return whether the body of an unknown route is one for /v1/responses, and not for chat completions.

    Raises:
        InvalidRequest: it is not a JSON object.
    """
    if b'"input"' not in body:
        return False
    members = wire.members_of(body)
    return "input" in members and "messages" not in members


def read_alone(received: Received, rules: wire.WireRules, *, has_jobs: bool) -> ReadAlone:
    """Parse a request without the conversation it continues and the stored items it refers to.

    Raises:
        GatewayError: it would be rejected.
    """
    raws, members = _members(received.body)
    is_background = _wants_background(members, has_jobs=has_jobs)
    wanted, found = needs(members, rules.messages_max), Found()
    refers = wanted.previous is not None or bool(wanted.items)
    if refers and isinstance(members.get("input"), list):
        members["input"], found.context = without_references(members["input"])
    asked = _translated(received, rules, raws, members, secrets.token_hex(16), found)
    return ReadAlone(asked.incoming, is_background, refers)


def _members(body: bytes) -> tuple[dict[str, msgspec.Raw], dict[str, Any]]:
    """Return all members of a body as received, and those that are read, decoded."""
    wire.check_size(body)
    raws = wire.members_of(body)
    return raws, {name: wire.decoded(raw, name) for name, raw in raws.items() if name in READ}


def _translated(
    received: Received,
    rules: wire.WireRules,
    raws: Mapping[str, msgspec.Raw],
    members: Mapping[str, Any],
    token: str,
    found: Found,
) -> ResponseRequest:
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
            Endpoint.CHAT, chat, received, rules, size_bytes=size, seen=wire.seen_of(chat)
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
    """Reject a request whose echo would be too deeply nested to be encoded within an event later."""
    nested: object = response
    for _ in range(_DEPTH_SPARE):
        nested = [nested]
    try:
        msgspec.json.encode(nested)
    except RecursionError as error:
        raise InvalidRequest("The request is nested too deeply.") from error


# ------------------------------------------------------------------ answers


@dataclass(slots=True)
class Answer(Downstream):
    """`ports.Downstream` that translates a chat completion to a response.

    Attributes:
        downstream: The caller.
        asked: The request.
        key: Name of its API key.
        retention: Where to store the response, and for how long.
        clock: Source of the time of completion.
        head: Status and headers of a non-streamed answer, held back until its body is complete.
        parts: That body so far.
        stream: Translates a stream.
    """

    downstream: HttpDownstream
    asked: ResponseRequest
    key: str | None
    retention: ResponseRetention
    clock: Clock
    head: tuple[int, Headers] = (200, ())
    parts: list[bytes] = field(default_factory=list)
    stream: ChatStream = field(init=False)

    def __post_init__(self) -> None:
        self.stream = ChatStream(self.asked.draft)

    async def start(self, status: int, headers: Headers) -> None:
        """See `ports.Downstream.start`."""
        if not self.asked.incoming.request.stream:
            self.head = status, headers
            return
        await self.downstream.start(status, headers)
        await self.downstream.send(_frames(self.asked.draft.begin()))

    async def send(self, data: bytes) -> None:
        """See `ports.Downstream.send`. Keep-alive comments are passed on."""
        if not self.asked.incoming.request.stream:
            self.parts.append(data)
            return
        events = self.stream.feed(data, self._now())
        if events:
            await self._send(events)
        elif data.startswith(b":"):  # events of the chat that mean nothing here may follow
            await self.downstream.send(data.splitlines()[0] + b"\n\n")

    async def fail(self, error: GatewayError, code: str) -> None:
        """See `ports.Downstream.fail`. In this API, an error is the final state of a response."""
        await self._send(self.asked.draft.fail(error.type, error.message))

    async def finish(self) -> None:
        """Complete the answer at the end of the chat completion.

        Raises:
            UpstreamFailed: the chat completion is invalid.
            CallerStalled: the caller does not read.
        """
        with while_caller_reads():
            if self.asked.incoming.request.stream:
                if events := self.stream.end():
                    await self._send(events)
            else:
                await self._send_whole()
            await self.downstream.finish()

    async def _send(self, events: Sequence[Event]) -> None:
        draft = self.asked.draft
        if not draft.is_over:
            await self.downstream.send(_frames(events))
            return
        await self._keep()  # before the last event, which says whether it is stored
        await self.downstream.send_last(_frames(events), is_good=draft.response["status"] != "failed")

    async def _send_whole(self) -> None:
        draft = self.asked.draft
        try:
            draft.add(msgspec.json.decode(b"".join(self.parts)))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise UpstreamFailed("The backend sent an invalid answer.") from error
        draft.complete(self._now())
        await self._keep()
        body = msgspec.json.encode(draft.response)
        status, headers = self.head
        rest = [pair for pair in headers if pair[0] != b"content-length"]
        await self.downstream.send_whole(status, rest, body)

    async def _keep(self) -> None:
        """Store the response if requested. If that fails, set its `store` to false."""
        response, conversation = self.asked.draft.response, self.asked.conversation
        if conversation is None:
            return
        record = b'{"response":%b,%b}' % (msgspec.json.encode(response), conversation)
        try:
            response["store"] = await self.retention.store.put(
                self.key, response["id"], record, self.retention.ttl_s
            )
        except StoreUnavailable:
            response["store"] = False

    def _now(self) -> int:
        return int(self.clock.wall())


def _frames(events: Sequence[Event]) -> bytes:
    """Encode events as server-sent events."""
    return b"".join(
        b"event: %b\ndata: %b\n\n" % (event["type"].encode(), msgspec.json.encode(event)) for event in events
    )
