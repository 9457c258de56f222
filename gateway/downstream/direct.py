"""Chats that bypass ASGI: the same processing, directly on the connection.

Handling a request through ASGI (a scope, a task group that watches for disconnects, a message per chunk)
costs more than all decisions about it. So an ordinary chat, a POST with a Content-Length and a valid key, is
intercepted as soon as its head is complete, and becomes a `Call` like any other. Everything else is handled
by ASGI: chunked bodies, HTTP/1.0, `Expect`, pipelined requests, and requests that are rejected by their head.

This relies on uvicorn's protocol class: a call takes the place of its `RequestResponseCycle`, so that
keep-alive, pipelining, closing connections and graceful shutdown remain uvicorn's responsibility. Both paths
pass the same tests (tests/downstream/test_calls.py).
"""

import asyncio
from dataclasses import replace
from typing import Any

from gateway.core.errors import GatewayError, RequestTimeout
from gateway.core.request import Endpoint
from gateway.downstream.body_receiver import TOGETHER_MAX, WORTH_BYTES, BodyReceiver
from gateway.downstream.call_task import CallTask
from gateway.downstream.direct_call import Chats, DirectCall
from gateway.downstream.guard import GuardedProtocol
from gateway.downstream.head_template import HeadTemplate
from gateway.downstream.hosts import is_host
from gateway.downstream.relay import Head, announced_bytes

_PATH = Endpoint.CHAT.value.encode()

LEARNED_MAX = 3
"""How many heads of a connection are learned. A choice: where each differs, that would only cost more."""


class DirectProtocol(GuardedProtocol):
    """uvicorn's protocol, guarded, which intercepts ordinary chats before they become ASGI requests."""

    __slots__ = (
        "_announced",
        "_body_timer",
        "_call",
        "_chats",
        "_host",
        "_may_learn",
        "_receiver",
        "_receiving",
        "_task",
        "_template",
    )

    def __init__(self, *args: Any, chats: Chats, **kwargs: Any) -> None:
        """Called by uvicorn; `chats` answers intercepted requests."""
        super().__init__(*args, **kwargs)
        self._chats = chats
        self._call: DirectCall | None = None  # until its answer is complete
        self._receiving: DirectCall | None = None  # the same, while its body is received
        self._announced = 0  # its Content-Length
        self._host = b""  # of the last chat, already validated: usually the next one has the same
        self._receiver: BodyReceiver | None = None  # receives the rest of a long body
        self._body_timer: asyncio.TimerHandle | None = None
        self._template: HeadTemplate | None = None  # of the head that this connection repeats
        self._may_learn = LEARNED_MAX
        self._task: CallTask | None = None  # answers all calls of this connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a connection, whose answers are written together with others'."""
        super().connection_made(self._chats.cohort.coalesce(transport, self.loop))

    def data_received(self, data: bytes) -> None:
        """Process received bytes. An incomplete body must be completed within a time limit."""
        if self._template is not None and self._is_repeated(data, self._template):
            return
        is_at_head = self.is_between_requests() or self.cycle is None
        super().data_received(data)
        if is_at_head and self._may_learn and self._call is not None and self._head_bytes == 0:
            self._learn(data, self._call)
        call = self._receiving
        if call is not None and self._body_timer is None and not call.is_begun:
            self._body_timer = self.loop.call_later(self._chats.limits.within_s, self._body_overdue)
            self._fill(call)

    def _is_repeated(self, data: bytes, template: HeadTemplate) -> bool:
        """Answer a request whose head is the previous one's. Return whether these bytes were one."""
        if not self.is_between_requests() or (found := template.body_of(data)) is None:
            return False
        length, body = found
        head = self._chats.head_again(template.head, length.decode())
        if head is None or len(body) > self._chats.limits.bytes_max:
            self._template = None
            return False
        self.cycle = self._call = call = DirectCall(self, self._chats, head)  # type: ignore[assignment]
        call.parts.append(body)  # whole: it takes no more room among what is being received
        call.begin()
        return True

    def _learn(self, data: bytes, call: DirectCall) -> None:
        """Learn the head of the call that has just begun with `data`, unless heads vary here."""
        head = call.head
        self._may_learn -= 1
        own = replace(head, headers=head.headers.copy())  # the other is the request's
        self._template = HeadTemplate.learned(data, b"POST %b HTTP/1.1" % _PATH, call.headers, own)

    def on_headers_complete(self) -> None:
        """Intercept the request, or leave it to ASGI."""
        head = None if self.has_refused() else self._head_of_a_chat()
        if head is None:
            super().on_headers_complete()
            return
        self.head_is_complete()
        call = DirectCall(self, self._chats, head, self.headers)
        self.cycle = self._call = self._receiving = call  # type: ignore[assignment]

    def on_body(self, body: bytes) -> None:
        """Process a part of a body."""
        if self._receiving is not None:
            self._receiving.take(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Answer a complete request."""
        call, self._receiving = self._receiving, None
        if call is not None:
            self._has_ended = True
            self._stop_body_timer()
            call.begin()
        else:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """Continue with data received in the meantime, or wait for more."""
        self._call = self._receiving = None
        self._idle_since = self.loop.time()
        if self.timeout_keep_alive_task is None or self.pipeline or self.transport.is_closing():
            super().on_response_complete()
        else:  # the timer of the previous pause is still set
            self.server_state.total_requests += 1
            self.flow.resume_reading()

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection, unless a request has come since the timer was set."""
        self.timeout_keep_alive_task = None
        left_s = self._idle_since + self.timeout_keep_alive - self.loop.time()
        if self._call is not None:
            return  # the timer is set again when it is answered
        if left_s > 0:
            self.timeout_keep_alive_task = self.loop.call_later(left_s, self.timeout_keep_alive_handler)
        else:
            super().timeout_keep_alive_handler()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the call of a disconnected caller."""
        self._stop_body_timer()
        self._end_filling()
        call, self._call, self._receiving = self._call, None, None
        super().connection_lost(exc)
        if call is not None:
            call.caller_left()
        if self._task is not None:
            self._task.end()

    def resume_writing(self) -> None:
        """Continue an answer once the write buffer has drained."""
        super().resume_writing()
        if self._call is not None:
            self._call.resumed()

    def answer(self, call: DirectCall) -> None:
        """Answer a call in a task, which the server cancels at shutdown at the latest."""
        if self._task is None:
            self._task = CallTask(self.loop, self.tasks)
        self._chats.cohort.size += 1
        self._task.answer(call)

    def receive_no_more(self) -> None:
        """Return further data to the parser: the body is complete, or the connection will be closed."""
        if self._receiver is not None:
            self._end_filling()
            self.transport.set_protocol(self)

    def _fill(self, call: DirectCall) -> None:
        """Receive the rest of a body into a single buffer, if it is long."""
        uploads = self._chats.uploads
        if (
            self._announced - call.received < WORTH_BYTES
            or uploads.reserved_bytes + self._announced > TOGETHER_MAX
            or self.transport.is_closing()
        ):
            return
        self._receiver = BodyReceiver(self, uploads, self._announced, call.parts, self._filled)
        call.receiver = self._receiver
        self.transport.set_protocol(self._receiver)

    def _filled(self, size: int, is_complete: bool) -> None:
        """Note that `size` more bytes of a body were received; answer it if complete."""
        if self._receiving is not None:
            self._receiving.took(size)
        if is_complete and self._receiver is not None:
            self.receive_no_more()
            self.parser = self.new_parser()  # the old parser still expects this body
            self.on_message_complete()

    def _end_filling(self) -> None:
        if self._receiver is not None:
            self._receiver.end()
            self._receiver = None

    def _head_of_a_chat(self) -> Head | None:
        """Return the head of an ordinary chat; None: it is not one, or will be rejected."""
        if self.url != _PATH or self.parser.get_method() != b"POST" or self.has_long_head():
            return None
        if self.cycle is not None and not self.cycle.response_complete:
            return None
        if self.expect_100_continue or self.parser.should_upgrade() or not self.parser.should_keep_alive():
            return None
        announced = b""
        host, hosts = b"", 0
        for name, value in self.headers:
            if name == b"content-length":
                announced = value
            elif name == b"host":
                host, hosts = value, hosts + 1
            elif name == b"transfer-encoding":
                return None
        if not announced.isdigit() or self.parser.get_http_version() != "1.1":
            return None
        if hosts != 1 or (host != self._host and not is_host(host)):
            return None
        self._host = host
        self._announced = announced_bytes(announced)
        if self._announced > self._chats.limits.bytes_max:
            return None
        try:
            return self._chats.head(self.headers)
        except GatewayError:
            return None

    def _stop_body_timer(self) -> None:
        if self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None

    def _body_overdue(self) -> None:
        self._body_timer = None
        call, within_s = self._receiving, self._chats.limits.within_s
        if call is not None:
            call.give_up(RequestTimeout(f"The request body was not complete within {within_s:g} s."))
