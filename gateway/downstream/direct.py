"""Chats that never become ASGI requests: the same work, done on the connection itself.

The ASGI way of a request (a scope, a task group that listens for its caller's leaving, a message per piece)
costs more than all that is decided about it. So an ordinary chat, a POST with a length and a good key, is
taken here as soon as its head is complete, and becomes a `Call` like any other. Whatever is not ordinary
takes the ASGI way: chunked bodies, HTTP/1.0, `Expect`, requests sent before the answer to the last one, and
every one that is refused by its head.

This leans on uvicorn's protocol class: a call stands where its `RequestResponseCycle` would, so that
keep-alive, pipelining, the end of connections and the graceful end of the server stay uvicorn's business.
Both ways pass the same tests (tests/downstream/test_calls.py).
"""

import asyncio
from typing import Any

from gateway.core.errors import GatewayError, RequestTimeout
from gateway.core.values import Endpoint
from gateway.downstream.direct_call import Chats, DirectCall
from gateway.downstream.filling import TOGETHER_MAX, WORTH_BYTES, Filling
from gateway.downstream.guard import GuardedProtocol
from gateway.downstream.hosts import is_host
from gateway.downstream.relay import Head, announced_bytes

_PATH = Endpoint.CHAT.value.encode()


class DirectProtocol(GuardedProtocol):
    """uvicorn's protocol, guarded, from which ordinary chats are taken before they become ASGI requests."""

    def __init__(self, *args: Any, chats: Chats, **kwargs: Any) -> None:
        """As uvicorn calls it; `chats` answers what is taken."""
        super().__init__(*args, **kwargs)
        self._chats = chats
        self._call: Any = None  # a `DirectCall`, until its answer is complete
        self._is_receiving = False  # its body
        self._announced = 0  # bytes of that
        self._host = b""  # that the last chat was for: the next one is, too, as a rule
        self._filling: Filling | None = None  # which receives it instead
        self._body_timer: asyncio.TimerHandle | None = None

    def data_received(self, data: bytes) -> None:
        """Take bytes. A body that is not complete with those of its head has a time to be complete in."""
        super().data_received(data)
        if self._is_receiving and self._body_timer is None and not self._call.is_begun:
            self._body_timer = self.loop.call_later(self._chats.limits.within_s, self._body_overdue)
            self._fill()

    def on_headers_complete(self) -> None:
        """Take the request, or leave it to the ASGI way."""
        head = self._head_of_a_chat()
        if head is None:
            super().on_headers_complete()
            return
        self.head_is_complete()
        self.cycle = self._call = DirectCall(self, self._chats, head)  # type: ignore[assignment]
        self._is_receiving = True

    def on_body(self, body: bytes) -> None:
        """Take a piece of a body."""
        if self._is_receiving:
            self._call.take(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Answer what is complete."""
        if self._is_receiving:
            self._is_receiving, self._has_ended = False, True
            self._stop_body_timer()
            self._call.begin()
        else:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        """Go on with what came meanwhile, or wait for what comes."""
        self._call, self._is_receiving = None, False
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the work for a caller that has left."""
        self._stop_body_timer()
        self._end_filling()
        call, self._call = self._call, None
        super().connection_lost(exc)
        if call is not None:
            call.caller_left()

    def resume_writing(self) -> None:
        """Go on with an answer whose caller has read enough of it."""
        super().resume_writing()
        if self._call is not None:
            self._call.resumed()

    def answer(self, call: DirectCall) -> None:
        """Answer a call in a task of its own, which ends with the server at the latest."""
        task = self.loop.create_task(call.answer())
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)

    def receive_no_more(self) -> None:
        """Leave what still comes to the parser: the body is there, or the connection will be closed."""
        if self._filling is not None:
            self._end_filling()
            self.transport.set_protocol(self)

    def _fill(self) -> None:
        """Have the rest of a body received in one piece, if there is much of it."""
        uploads = self._chats.uploads
        if (
            self._announced - self._call.received < WORTH_BYTES
            or uploads.set_aside + self._announced > TOGETHER_MAX
            or self.transport.is_closing()
        ):
            return
        self._filling = Filling(self, uploads, self._announced, self._call.parts, self._filled)
        self._call.filling = self._filling
        self.transport.set_protocol(self._filling)

    def _filled(self, size: int, is_complete: bool) -> None:
        """Note that so much more of a body has come; answer what is complete."""
        self._call.took(size)
        if is_complete and self._filling is not None:
            self.receive_no_more()
            self.parser = self.new_parser()  # the old one still waits for this body
            self.on_message_complete()

    def _end_filling(self) -> None:
        if self._filling is not None:
            self._filling.end()
            self._filling = None

    def _head_of_a_chat(self) -> Head | None:
        """Return the head of an ordinary chat; None: it is none, or will be refused."""
        if self.url != _PATH or self.parser.get_method() != b"POST":
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
        if self._is_receiving:
            within_s = self._chats.limits.within_s
            self._call.give_up(RequestTimeout(f"The request body was not complete within {within_s:g} s."))
