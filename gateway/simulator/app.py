"""The simulated server's routes, as a plain ASGI application.

Routes ask the surrounding `Simulator` for its engine each time: it is replaced on a restart.
"""

import math
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import anyio.to_thread

from gateway.clock import SystemClock
from gateway.simulator import pieces, refusals
from gateway.simulator.calls import Call, Delivery, ParsedCall, read_chat, read_completion
from gateway.simulator.exchange import (
    JSON,
    ClientDisconnected,
    Exchange,
    Handler,
    Receive,
    Scope,
    Send,
    as_bytes,
)
from gateway.simulator.faults import NONSENSE, order_from
from gateway.simulator.host import Answer
from gateway.simulator.nonsense import spoilt
from gateway.simulator.options import Fault, FaultOrder, SimulatorOptions
from gateway.simulator.reading import Members, read_json
from gateway.simulator.refusals import Refusal
from gateway.simulator.template import Rendered, raw
from gateway.simulator.wire import DONE, Identity, StreamWriter, whole

if TYPE_CHECKING:
    from gateway.simulator.server import Simulator

VERSION = "0.33.0"  # the vLLM version whose API is simulated

_INLINE_CHARS = 65_536
"""Longer prompts are tokenised in a thread. A choice: it takes some 2 ms."""

_SLOW_HEADERS_S = 5.0
"""Engine seconds that the fault `slow_headers` lasts by default. A choice."""

_SSE = "text/event-stream; charset=utf-8"
_METRICS = "text/plain; version=1.0.0; charset=utf-8"
_GUARDED = ("/v1/", "/v2/", "/inference/")
_UNCOUNTED = frozenset(
    {"/health", "/metrics", "/ping", "/load", "/version", "/simulator/fault", "/simulator/sequences"}
)

T = TypeVar("T")


class Application:
    """The ASGI application."""

    def __init__(self, server: "Simulator") -> None:
        self._server = server
        self._clock = SystemClock()
        self._fingerprint = f"vllm-{VERSION}-{uuid.uuid4().hex[:8]}"
        self._routes: dict[str, dict[str, Handler]] = {
            "/health": {"GET": self._health},
            "/ping": {"GET": self._ping, "POST": self._ping},
            "/version": {"GET": self._version},
            "/load": {"GET": self._load},
            "/metrics": {"GET": self._metrics},
            "/tokenize": {"POST": self._tokenize},
            "/detokenize": {"POST": self._detokenize},
            "/v1/models": {"GET": self._models},
            "/v1/chat/completions": {"POST": partial(self._generate, read=read_chat, prefix="chatcmpl")},
            "/v1/completions": {"POST": partial(self._generate, read=read_completion, prefix="cmpl")},
            "/simulator/fault": {"GET": self._show_fault, "POST": self._set_fault},
            "/simulator/sequences": {"GET": self._sequences, "DELETE": self._forget_sequences},
        }
        if server.options.sleep_mode:
            self._routes |= {
                "/sleep": {"POST": self._sleep},
                "/wake_up": {"POST": self._wake_up},
                "/is_sleeping": {"GET": self._is_sleeping},
            }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        exchange = Exchange(scope, receive, send, scope["state"]["connection"])
        path, method = scope["path"], scope["method"]
        try:
            await self._route(exchange, path, method)
        except ClientDisconnected:
            return
        except Refusal as refusal:
            await exchange.reply(refusal.status, refusal.body)
        if path not in _UNCOUNTED:
            handler = path if path in self._routes else "none"
            self._server.host.tally.request(handler, method, exchange.status)

    async def _route(self, exchange: Exchange, path: str, method: str) -> None:
        key = self._server.options.api_key
        if key and path.startswith(_GUARDED) and exchange.header(b"authorization") != f"Bearer {key}":
            refusal = refusals.unauthorized()
            await exchange.reply(refusal.status, refusal.body, vary=False)
            return
        methods = self._routes.get(path)
        if methods is None:
            raise refusals.detail(404, "Not Found")
        handler = methods.get(method)
        if handler is None:
            body = refusals.detail(405, "Method Not Allowed").body
            await exchange.start(405, JSON, len(body), allow=", ".join(methods))
            await exchange.write(body, more=False)
            return
        await handler(exchange)

    # -------------------------------------------------------------- about the server

    async def _health(self, exchange: Exchange) -> None:
        await exchange.reply(503 if self._server.host.is_dead else 200)

    async def _ping(self, exchange: Exchange) -> None:
        await exchange.reply(200)

    async def _version(self, exchange: Exchange) -> None:
        await exchange.reply(200, as_bytes({"version": VERSION}))

    async def _load(self, exchange: Exchange) -> None:
        await exchange.reply(200, as_bytes({"server_load": self._server.load}))

    async def _metrics(self, exchange: Exchange) -> None:
        host, options = self._server.host, self._server.options
        page = host.tally.page(
            host.engine,
            options.profile,
            options.model,
            gauges=host.gauges,
            prefix_caching=options.prefix_caching,
            sleep_level=self._server.sleep_level,
        )
        await exchange.reply(200, page, _METRICS)

    async def _models(self, exchange: Exchange) -> None:
        options = self._server.options
        created = int(self._clock.wall())
        permission = {
            "id": f"modelperm-{uuid.uuid4().hex[:16]}",
            "object": "model_permission",
            "created": created,
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": True,
            "allow_search_indices": False,
            "allow_view": True,
            "allow_fine_tuning": False,
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }
        card = {
            "id": options.model,
            "object": "model",
            "created": created,
            "owned_by": "vllm",
            "root": options.profile.checkpoint,
            "parent": None,
            "max_model_len": options.profile.capacity.context_tokens,
            "permission": [permission],
        }
        await exchange.reply(200, as_bytes({"object": "list", "data": [card]}))

    # -------------------------------------------------------------- tokens

    async def _tokenize(self, exchange: Exchange) -> None:
        data = await exchange.json()
        rendered = self._rendered(data)
        numbers = await _offload(rendered.chars, rendered.ids)
        body = {
            "count": len(numbers),
            "max_model_len": self._server.options.profile.capacity.context_tokens,
            "tokens": numbers,
            "token_strs": rendered.strings() if data.get("return_token_strs") else None,
        }
        await exchange.reply(200, as_bytes(body))

    def _rendered(self, data: dict[str, Any]) -> Rendered:
        options = self._server.options
        if "messages" in data:
            # Output limits mean nothing here; everything else is the same as for a chat.
            return read_chat(
                {key: value for key, value in data.items() if key not in ("max_tokens", "stream")}, options
            ).prompts[0]
        members = Members(data)
        text = members.text("prompt")
        if text is None and data.get("prompt") is None:
            members.problem("missing", "body.prompt", "Field required", data)
        members.finish()
        if data.get("model") not in (None, options.model):
            raise refusals.unknown_model(str(data["model"]), options.model)
        return raw(text or "")

    async def _detokenize(self, exchange: Exchange) -> None:
        members = Members(await exchange.json())
        numbers = members.array("tokens", required=True)
        members.finish()
        text = pieces.text_of([number for number in numbers if isinstance(number, int)])
        await exchange.reply(200, as_bytes({"prompt": text}))

    # -------------------------------------------------------------- answers

    async def _generate(
        self,
        exchange: Exchange,
        *,
        read: Callable[[dict[str, Any], SimulatorOptions], ParsedCall],
        prefix: str,
    ) -> None:
        server = self._server
        data = await exchange.json()
        fault = server.faults.take()
        if fault is not None and await self._met_before_answer(exchange, fault):
            return
        if server.is_draining or (fault is not None and fault.fault is Fault.DRAIN):
            refusal = refusals.internal("cannot schedule new futures after shutdown")
            await exchange.reply(refusal.status, refusal.body, vary=False)
            await exchange.connection.close()
            return
        asked = _understood(lambda: read(data, server.options))
        asked.refuse_by_length()
        counted = await _offload(asked.chars, asked.counted)
        if not all(count for count, _ in counted):
            raise refusals.bad_request("The decoder prompt cannot be empty")
        call = asked.call(counted)
        if fault is not None and fault.fault in NONSENSE:
            call = replace(call, scripts=tuple(spoilt(script, fault.fault) for script in call.scripts))
        limit = server.options.max_num_queued_reqs
        if limit is not None and server.load >= limit:
            server.host.tally.rejected += 1
            raise refusals.busy()
        name = exchange.header(b"x-request-id") or data.get("request_id") or uuid.uuid4().hex[:16]
        identity = Identity(
            f"{prefix}-{name}", int(self._clock.wall()), server.options.model, self._fingerprint
        )
        server.load += 1
        try:
            await _Generation(server, exchange, call, identity, fault).run()
        finally:
            server.load -= 1
            exchange.connection.on_lost = None

    async def _met_before_answer(self, exchange: Exchange, order: FaultOrder) -> bool:
        """Apply a fault that occurs before the answer; return whether the request is finished."""
        match order.fault:
            case Fault.GARBAGE:
                exchange.connection.write(b"\x15\x03\x01\x00\x02\x02\x46\xff\xfe not HTTP \r\n\r\n")
                await exchange.connection.close()
            case Fault.GARBLED:
                await exchange.reply(200, b"<html><body>It works!</body></html>", "text/html")
            case Fault.UNAVAILABLE:
                raise refusals.busy()
            case Fault.ERROR:
                raise refusals.internal("Internal server error")
            case Fault.SLOW_HEADERS:
                seconds = _SLOW_HEADERS_S if order.for_s is None else order.for_s
                await anyio.sleep(seconds / self._server.options.speed)
                return False
            case _:
                return False
        return True

    # -------------------------------------------------------------- operators

    async def _sequences(self, exchange: Exchange) -> None:
        sequences = self._server.host.tally.sequences
        body = {
            "held": sequences.held,
            "aborted": sequences.aborted,
            "is_whole": sequences.is_whole,
            "changes": list(sequences.changes),
        }
        await exchange.reply(200, as_bytes(body))

    async def _forget_sequences(self, exchange: Exchange) -> None:
        self._server.host.tally.sequences.forget()
        await exchange.reply(204)

    async def _sleep(self, exchange: Exchange) -> None:
        asked = exchange.query()
        try:
            await self._server.sleep(int(asked.get("level", "1")), asked.get("mode", "abort"))
        except ValueError as problem:
            raise refusals.internal(str(problem)) from problem
        await exchange.reply(200)

    async def _wake_up(self, exchange: Exchange) -> None:
        await self._server.wake_up()
        await exchange.reply(200)

    async def _is_sleeping(self, exchange: Exchange) -> None:
        await exchange.reply(200, as_bytes({"is_sleeping": self._server.sleep_level is not None}))

    async def _show_fault(self, exchange: Exchange) -> None:
        await exchange.reply(200, as_bytes(_described(self._server.faults.order)))

    async def _set_fault(self, exchange: Exchange) -> None:
        try:
            order = order_from(read_json(await exchange.body()))
        except ValueError as problem:
            raise refusals.bad_request(str(problem)) from problem
        await exchange.reply(200, as_bytes(_described(order)))
        self._server.order(order)


class _Generation:
    """One answer, from admission to its last byte."""

    def __init__(
        self,
        server: "Simulator",
        exchange: Exchange,
        call: Call,
        identity: Identity,
        fault: FaultOrder | None,
    ) -> None:
        self._options = server.options
        self._exchange = exchange
        self._call = call
        self._identity = identity
        self._fault = fault if fault is not None and fault.fault in _MID_ANSWER else None
        self._host = server.host
        self._answer = Answer(call, lambda: exchange.connection.was_left)

    async def run(self) -> None:
        """Answer, unless the client disconnects first."""
        exchange = self._exchange
        exchange.connection.on_lost = self._answer.leave
        if exchange.connection.is_lost:  # while its prompt was read
            return
        if self._delivery.stream:
            # The status is sent on admission, long before the first token.
            await exchange.start(200, _SSE, None)
        tally = self._host.tally
        for _ in self._call.scripts:
            tally.observe("request_params_max_tokens", self._call.max_tokens)
        self._host.submit(self._answer)
        try:
            await (self._stream() if self._delivery.stream else self._in_one_piece())
        finally:
            self._host.withdraw(self._answer)

    @property
    def _delivery(self) -> Delivery:
        return self._call.delivery

    async def _first_token(self) -> None:
        """Wait for the first token and the model's overhead, which applies only to that one."""
        answer, options = self._answer, self._options
        while not (answer.has_begun or answer.is_dead or answer.has_left):
            await answer.news()
        if answer.has_begun:
            overhead_s = options.profile.perf.overhead_s / options.speed
            since = min(seat.first for seat in answer.seats if seat.gained or seat.finish)
            await anyio.sleep_until(since + overhead_s)

    async def _stream(self) -> None:
        exchange, answer = self._exchange, self._answer
        writer = StreamWriter(self._call, answer, self._identity)
        sent = 0
        await self._first_token()
        while not writer.is_finished:
            if answer.has_left:
                return
            if answer.is_dead:
                await exchange.write(writer.broken())
                await exchange.write(DONE, more=False)
                return
            if self._fault is None:
                for event in writer.events():
                    await exchange.write(event)
                if not writer.is_finished:
                    await answer.news()
                continue
            due = list(writer.events())
            if writer.is_finished or sent + len(due) >= self._fault.after_chunks:
                spared = len(due) - 1 if writer.is_finished else len(due)
                await self._break_off(self._fault, writer, due[:spared])
                return
            for event in due:
                await exchange.write(event)
            sent += len(due)
            await answer.news()
        for event in writer.closing():
            await exchange.write(event, more=event is not DONE)

    async def _break_off(self, order: FaultOrder, writer: StreamWriter, due: list[bytes]) -> None:
        exchange = self._exchange
        for event in due:
            await exchange.write(event)
        match order.fault:
            case Fault.DIE_MID_STREAM:
                await exchange.connection.close(abort=True)
            case Fault.TRUNCATE:
                await exchange.write(b"", more=False)
            case _:
                for event in (*writer.aborted(), *writer.closing()):
                    await exchange.write(event, more=event is not DONE)

    async def _in_one_piece(self) -> None:
        exchange, answer = self._exchange, self._answer
        await self._first_token()
        for seat in answer.seats:
            seat.due = math.inf
        while not answer.is_finished and self._fault is None:
            if answer.has_left:
                return
            if answer.is_dead:
                raise refusals.engine_dead()
            await answer.news()
        if self._fault is not None and self._fault.fault is Fault.DIE_MID_STREAM:
            await exchange.connection.close(abort=True)
            return
        if self._fault is not None:
            for seat in answer.seats:
                seat.finish = "abort"
        body = whole(self._call, answer, self._identity)
        if self._fault is not None and self._fault.fault is Fault.TRUNCATE:
            await exchange.start(200, JSON, len(body))
            await exchange.write(body[: len(body) // 2])
            await exchange.connection.close()
            return
        await exchange.reply(200, body)


_MID_ANSWER = frozenset({Fault.DIE_MID_STREAM, Fault.TRUNCATE, Fault.ABORT})


async def _offload(chars: int, work: Callable[[], T]) -> T:
    """Return the result of `work`, run in a thread if there are many characters to process."""
    if chars <= _INLINE_CHARS:
        return work()
    return await anyio.to_thread.run_sync(work)


def _understood(read: Callable[[], T]) -> T:
    """Return the result of `read`; errors in it mean a type that vLLM's models reject."""
    try:
        return read()
    except (TypeError, AttributeError, ValueError, ArithmeticError, LookupError) as error:
        problem = refusals.field_problem("type_error", "body", str(error), None)
        raise refusals.malformed([problem]) from error


def _described(order: FaultOrder | None) -> Mapping[str, object]:
    if order is None:
        return {"fault": None}
    return {
        "fault": order.fault,
        "count": order.count,
        "for_s": order.for_s,
        "after_chunks": order.after_chunks,
    }
