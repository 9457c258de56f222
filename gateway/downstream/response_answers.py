"""Answers to requests for a response: chat completions translated, and stored if requested."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from gateway.core.errors import GatewayError, StoreUnavailable, UpstreamFailed
from gateway.core.responses.chat_stream import ChatStream
from gateway.core.responses.draft import Event
from gateway.core.sse import KEPT_BYTES_MAX, MORE_CHOICES_MAX, TOO_MANY, is_credible
from gateway.downstream.relay import HttpDownstream
from gateway.downstream.response_requests import ResponseRequest
from gateway.downstream.stored_responses import ResponseRetention
from gateway.pipeline.caller import while_caller_reads
from gateway.ports import Clock, Downstream, Headers


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
        received: Bytes of a stream so far.
    """

    downstream: HttpDownstream
    asked: ResponseRequest
    key: str | None
    retention: ResponseRetention
    clock: Clock
    head: tuple[int, Headers] = (200, ())
    parts: list[bytes] = field(default_factory=list)
    stream: ChatStream = field(init=False)
    received: int = 0

    def __post_init__(self) -> None:
        self.stream = ChatStream(self.asked.draft)

    async def start(self, status: int, headers: Headers) -> None:
        """See `ports.Downstream.start`."""
        if not self.asked.incoming.request.stream:
            self.head = status, headers
            return
        await self.downstream.start(status, headers)
        await self.downstream.send(frames_of(self.asked.draft.begin()))

    async def send(self, data: bytes) -> None:
        """See `ports.Downstream.send`. Keep-alive comments are passed on.

        Raises:
            UpstreamFailed: a stream is too long.
        """
        if not self.asked.incoming.request.stream:
            self.parts.append(data)
            return
        self.received += len(data)
        if self.received > KEPT_BYTES_MAX:
            raise UpstreamFailed("The answer of the backend is too long.")
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
            await self.downstream.send(frames_of(events))
            return
        await self._keep()  # before the last event, which says whether it is stored
        await self.downstream.send_last(frames_of(events), is_good=draft.response["status"] != "failed")

    async def _send_whole(self) -> None:
        draft = self.asked.draft
        try:
            answer = msgspec.json.decode(b"".join(self.parts))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise UpstreamFailed("The backend sent an invalid answer.") from error
        if not is_credible(answer, 1 + MORE_CHOICES_MAX):
            raise UpstreamFailed(TOO_MANY.message)
        draft.add(answer)
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


def frames_of(events: Sequence[Event]) -> bytes:
    """Encode events as server-sent events."""
    return b"".join(
        b"event: %b\ndata: %b\n\n" % (event["type"].encode(), msgspec.json.encode(event)) for event in events
    )
