"""One attempt on one backend: send the request, wait for the first token, relay to the last byte.

Nothing is sent to the caller before the first token, so until then a failure can still move on to the next
backend or become a real status code. A single deadline enforces all time limits: it is moved as the attempt
goes from waiting to streaming.
"""

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from math import inf

import anyio

from gateway.core import answers, deciding, quirks
from gateway.core.answers import ABORTED, BackendError, FewerChoices, InvalidAnswer, UnfitAnswer
from gateway.core.backends import Backend, Timeouts
from gateway.core.decision import Candidate
from gateway.core.errors import (
    AnswerUnfit,
    ChoicesMissing,
    Draining,
    GatewayError,
    OutOfResources,
    StreamBroken,
    UpstreamBusy,
    UpstreamFailed,
    UpstreamLost,
    UpstreamTimeout,
    UpstreamUnreachable,
)
from gateway.core.health import Outcome
from gateway.core.naming import ModelNames
from gateway.core.quirks import AssemblingReader, MendingReader, mend_whole
from gateway.core.retry_after import retry_after_s
from gateway.core.sse import StreamReader
from gateway.core.usage import AttemptRecord
from gateway.pipeline import caller
from gateway.pipeline.caller import SSE_HEADERS, CallerStalled
from gateway.pipeline.chunk_fast_path import ChunkFastPath
from gateway.pipeline.deadline import Deadline, Deadlines
from gateway.pipeline.request_context import RequestContext
from gateway.pipeline.watch import AttemptWatch
from gateway.pipeline.whole_answers import read_whole
from gateway.ports import ChunkMatch, Clock, Headers, Target, Upstream, UpstreamResponse

ANSWER_BYTES_MAX = 64 * 1024 * 1024
"""A complete answer longer than this cannot come from a language model. A choice that bounds memory."""

ERROR_BYTES_MAX = 64 * 1024
"""No more of the body of an error is read. A choice: `core.answers` uses the beginning only."""

END_OF_BODY_S = 1.0
"""How long a backend may take to close the body after `[DONE]` before the connection is dropped. A choice:
engines do so at once."""

_HELD_TO_ITS_END = InvalidAnswer("The backend answered for other choices than those asked for.")

_JSON: Headers = ((b"content-type", b"application/json"),)

_OUTCOMES: Mapping[type[GatewayError], Outcome] = {
    UpstreamUnreachable: Outcome.UNREACHABLE,
    UpstreamLost: Outcome.UNREACHABLE,
    UpstreamTimeout: Outcome.TIMEOUT,
    UpstreamBusy: Outcome.BUSY,
    OutOfResources: Outcome.CANCELLED,
}


class Attempt:
    """An attempt on one backend. Call `run` once; `give_up` and `cut` may be called while it runs."""

    _reader: StreamReader
    _fast_path: ChunkFastPath
    _started_at = 0.0
    _connected_at: float | None = None
    _first_byte_at: float | None = None
    _outcome: Outcome | None = None
    _detail = ""
    _is_given_up = False
    _is_cut = False
    _is_relayed = False  # the whole answer was relayed; the backend's body may still be open
    _is_stalled = False  # waiting for the caller to read
    _last_moment = 0.0

    def __init__(
        self,
        context: RequestContext,
        candidate: Candidate,
        backend: Backend,
        served_model: str,
        clock: Clock,
        on_answer: Callable[[], Awaitable[None]],
        watch: AttemptWatch,
        deadlines: Deadlines,
    ) -> None:
        """Prepare an attempt of `context` on `backend`, which serves the model under the name `served_model`.

        `on_answer` is awaited when the first token arrives, before it is relayed; `watch` is notified of
        every read after that. `deadlines` are those of the running event loop.
        """
        self._context = context
        self._candidate = candidate
        self._backend = backend
        self._timeouts: Timeouts = context.policy.pools[candidate.pool].timeouts
        self._idle_s = self._timeouts.idle_s
        self._served_model = served_model
        self._names = ModelNames(served_model, context.incoming.request.model)
        policy = context.policy
        self._plan = quirks.plan(
            backend.quirks,
            context.incoming,
            policy.reasoning_field,
            reasons_by_name=deciding.reasons_by_name(policy, context.incoming),
        )
        self._clock = clock
        self._on_answer = on_answer
        self._watch = watch
        self._now = deadlines.loop.time
        self._deadline = Deadline(deadlines, inf)
        self._held: list[bytes] = []  # comments and empty first events, held back until there is content

    @property
    def is_job(self) -> bool:
        """Whether its request is a job, whose caller is the store."""
        return self._context.incoming.request.is_job

    @property
    def awaited_since(self) -> float | None:
        """Since when it waits for the first token, in monotonic seconds; None if it does no longer."""
        return self._started_at if self._first_byte_at is None else None

    @property
    def silence_s(self) -> float:
        """For how long nothing of its answer has come, in seconds; `inf` if that is not known."""
        if self._first_byte_at is None or self._is_stalled or self._is_relayed:
            return inf
        return self._now() + self._idle_s - self._deadline.at

    def give_up(self, silence_s: float) -> None:
        """End the attempt because its backend is lost.

        An answer that has begun ends if its backend is silent for another `silence_s`. One that waits for its
        caller goes on.
        """
        if self._is_stalled:
            return
        ends_at = self._now() + silence_s if self._context.is_answered else -inf
        if ends_at < self._deadline.at:
            self._is_given_up = True
            self._deadline.move(ends_at)

    def cut(self) -> None:
        """End the attempt, answered or not, because this process is shutting down: its caller is told."""
        self._is_cut = True
        self._deadline.move(-inf)
        self._deadline.expire()  # now: whatever arrives before the next look would move it again

    async def run(self, upstream: Upstream) -> None:
        """Relay the answer to its end. However the attempt ends, its record is added to the context.

        Raises:
            UpstreamError: the attempt failed; if the response has begun, the caller has an incomplete answer.
            BackendRejected: the backend rejected the content of the request.
            OutOfResources: this process could not open a connection.
            Draining: it was cut before the response had begun.
            CallerStalled: the caller has stopped reading.
        """
        context = self._context
        assert context.decision is not None
        context.served_by = self._candidate
        started_at = self._started_at = self._clock.now()
        # The default outcome does not count against the backend.
        outcome, detail = Outcome.CANCELLED, "the gateway failed"
        try:
            await self._within_limits(upstream)
            outcome, detail = Outcome.OK, ""
        except GatewayError as error:
            outcome = self._outcome or _OUTCOMES.get(type(error), Outcome.FAILED)
            detail = self._detail or _detail_of(error)
            context.crashes += isinstance(error, UpstreamLost)
            raise
        except (anyio.get_cancelled_exc_class(), CallerStalled, OSError):
            if self._is_relayed:  # a caller may leave as soon as it has everything
                outcome, detail = Outcome.OK, ""
            else:
                detail = self._detail or context.cancelled_detail
            raise
        finally:
            context.attempts.append(
                AttemptRecord(
                    request_id=context.incoming.arrival.id,
                    backend=self._backend.id,
                    pool=self._candidate.pool,
                    traffic_class=context.decision.traffic_class,
                    outcome=outcome,
                    detail=detail,
                    started_at=started_at,
                    first_byte_at=self._first_byte_at,
                    ended_at=self._clock.now(),
                    connected_at=self._connected_at,
                )
            )

    async def _within_limits(self, upstream: Upstream) -> None:
        started, limits, deadline = self._now(), self._timeouts, self._deadline
        self._last_moment = started + limits.total_s
        deadline.latest = self._last_moment
        deadline.at = started + (limits.first_byte_s if self._plan.is_streamed else limits.total_s)
        with deadline:
            try:
                await self._exchange(upstream)
            except UpstreamFailed:  # what breaks behind the whole answer does not spoil it
                if not self._is_relayed or self._is_stalled:  # its end may be too much to be kept
                    raise
        if not deadline.has_passed or self._is_relayed:
            return
        if self._is_stalled:
            self._detail = (
                "the caller was not reading as this gateway shut down"
                if self._is_cut
                else caller.stalled_detail()
            )
            raise CallerStalled
        if self._is_cut:
            self._outcome = Outcome.CANCELLED
            raise StreamBroken("This gateway is shutting down.") if self._context.is_answered else Draining
        self._outcome = Outcome.TIMEOUT
        raise UpstreamTimeout("The backend stopped responding.") if self._is_given_up else self._overdue()

    def _overdue(self) -> GatewayError:
        limits = self._timeouts
        if self._first_byte_at is not None:
            late = self._now() >= self._last_moment
            what = f"finish within {limits.total_s:g} s" if late else f"send anything for {limits.idle_s:g} s"
            return UpstreamTimeout(f"The backend did not {what}.")
        waited = limits.first_byte_s if self._plan.is_streamed else limits.total_s
        return UpstreamTimeout(f"The backend did not answer within {waited:g} s.")

    async def _send(self, sending: Awaitable[None]) -> None:
        """Await `sending`, which waits for the caller to read. Call `resumed` if there is more to come."""
        self._context.chunks += 1
        self.stalled()
        await sending
        self._is_stalled = False

    async def _exchange(self, upstream: Upstream) -> None:
        async with upstream.open(self._target(), self._timeouts) as response:
            self._connected_at = self._started_at + response.connect_s
            if response.status != 200:
                raise await self._refused(response)
            if self._plan.assembles:
                await self._relay_assembled(response)
            elif self._context.incoming.request.stream:
                await self._relay_stream(response)
            else:
                await self._relay_whole(response)

    def _target(self) -> Target:
        incoming = self._context.incoming
        body = incoming.body_for(self._served_model, self._plan.changes)
        return Target(self._backend, incoming.request.endpoint, self._headers(), body)

    def _headers(self) -> Headers:
        """Return the headers, with the trace context that makes the backend's spans children of this one."""
        arrival, forwarded = self._context.incoming.arrival, self._context.incoming.forwarded
        trace, named = arrival.trace, (b"x-request-id", arrival.id.encode())
        if trace is None or not trace.is_ours:
            return (*forwarded, named)
        own = b"traceparent", trace.child_traceparent(len(self._context.attempts) + 1).encode()
        if not forwarded:
            return own, named
        return (own, *[pair for pair in forwarded if pair[0] != b"traceparent"], named)

    # -------------------------------------------------------------- answers

    async def _relay_stream(self, response: UpstreamResponse) -> None:
        context, reader = self._context, self._new_reader()
        self._reader = reader
        try:
            if await self._relay_beginning(response):
                await self._stream_rest(response)
            await self._relay_end()
        finally:
            context.usage = reader.usage
        if reader.fault is not None:
            raise self._faulty(reader.fault)
        if not self._context.is_answered:
            raise self._faulty(_HELD_TO_ITS_END)

    async def _stream_rest(self, response: UpstreamResponse) -> None:
        fast_path = self._fast_path = ChunkFastPath(
            self._reader.match, self._watch.counter, self._deadline, self._idle_s, self._now
        )
        try:
            await self._context.downstream.relay(response, self)
        finally:
            self._context.chunks += fast_path.chunks
            self._watch.counted(fast_path.chunks)

    def _new_reader(self) -> StreamReader:
        remedies, incoming = self._plan.remedies, self._context.incoming
        kind = partial(MendingReader, remedies) if remedies else StreamReader
        return kind(
            choices=incoming.request.choices,
            names=self._names,
            hide_usage=incoming.usage_injected,
        )

    async def _relay_beginning(self, response: UpstreamResponse) -> bool:
        """Relay until the response to the caller has begun. Return whether there may be more to relay."""
        reader, held = self._reader, 0
        while data := await response.read():
            ready = reader.feed(data)
            self._watch.chunk()
            self._held.append(ready)
            held += len(ready)
            if held > ANSWER_BYTES_MAX:
                raise self._faulty(InvalidAnswer("The answer does not begin."))
            if reader.fault is not None:
                return False
            if not reader.has_content:
                continue
            await self._note_first_token()
            if reader.may_begin:
                await self._begin_stream()
                await self._send(self._context.downstream.send(self._take_held()))
                self.resumed()
                return True
            if reader.is_done:
                return False
            self._await_more()
        return False

    async def _relay_end(self) -> None:
        """Send the reader's remaining output after the last read."""
        owed = self._reader.end()
        if owed:
            if not self._context.is_answered:
                await self._begin_stream()
            await self._send(self._context.downstream.send(self._take_held() + owed))

    def _take_held(self) -> bytes:
        held = b"".join(self._held)
        self._held.clear()
        return held

    def _await_more(self) -> None:
        """Restart the idle timeout for the next read."""
        reader = self._reader
        self._is_relayed = reader.is_done
        self._deadline.move(self._now() + (END_OF_BODY_S if reader.is_done else self._idle_s))

    # -------------------------------------------------------------- `ports.StreamTransform`

    @property
    def is_over(self) -> bool:
        """See `ports.StreamTransform.is_over`. Nothing is relayed after a fault."""
        return self._reader.fault is not None

    def take(self, data: bytes) -> bytes:
        """See `ports.StreamTransform.take`. Called for every read of a stream: keep it minimal."""
        self._watch.chunk()
        reader = self._reader
        ready = reader.feed(data)
        if ready:
            self._context.chunks += 1
        if not reader.is_done:
            self._deadline.at = self._now() + self._idle_s
        elif not self._is_relayed:  # what follows `[DONE]` gets no more time
            self._await_more()
        return ready

    @property
    def match(self) -> ChunkMatch:
        """See `ports.StreamTransform.match`."""
        return self._fast_path.match

    def stalled(self) -> None:
        """See `ports.StreamTransform.stalled`. Waiting for the caller is not charged to the backend."""
        self._is_stalled = True
        self._deadline.latest = inf
        self._deadline.move(self._now() + caller.CALLER_STALL_S)

    def resumed(self) -> None:
        """See `ports.StreamTransform.resumed`."""
        self._is_stalled = False
        self._await_more()
        self._deadline.bound(self._last_moment)

    async def _relay_whole(self, response: UpstreamResponse) -> None:
        body = await response.read_whole(ANSWER_BYTES_MAX)
        answer = read_whole(body)
        if answer is None:
            raise self._faulty(InvalidAnswer("The backend sent an invalid answer."))
        context = self._context
        if (fault := answer.fault(context.incoming.request.choices)) is not None:
            raise self._faulty(fault)
        if self._plan.remedies:
            body, fault = mend_whole(self._plan.remedies, body)
            if fault is not None:
                raise self._faulty(fault)
        context.usage = answer.usage
        await self._send_whole(self._names.in_event(body))

    async def _relay_assembled(self, response: UpstreamResponse) -> None:
        """Assemble a streamed answer for a caller that did not ask for a stream."""
        reader = AssemblingReader(
            self._plan.remedies,
            choices=self._context.incoming.request.choices,
            names=self._names,
        )
        size = 0
        while data := await response.read():
            size += len(data)
            reader.feed(data)
            if reader.fault is not None or size > ANSWER_BYTES_MAX:
                break
            if reader.has_content and not self._is_relayed:
                await self._note_first_token()
                self._deadline.move(self._now() + self._idle_s)
            if reader.is_done and not self._is_relayed:
                await self._send_assembled(reader)
        reader.end()
        if reader.fault is not None:
            raise self._faulty(reader.fault)
        if not self._is_relayed:
            await self._send_assembled(reader)

    async def _send_assembled(self, reader: AssemblingReader) -> None:
        self._context.usage = reader.usage
        await self._send_whole(reader.whole())
        self._deadline.move(self._now() + END_OF_BODY_S)

    async def _send_whole(self, body: bytes) -> None:
        await self._note_first_token()
        await self._send(self._context.send_whole(_JSON, body))
        self._is_relayed = True

    async def _note_first_token(self) -> None:
        """Record the time of the first token, once."""
        if self._first_byte_at is None:
            self._first_byte_at = self._clock.now()
            await self._on_answer()

    async def _begin_stream(self) -> None:
        """Start a streamed response. It may wait until the caller has read a keep-alive comment."""
        await self._note_first_token()
        self.stalled()
        await self._context.start(200, SSE_HEADERS)

    # -------------------------------------------------------------- failures

    async def _refused(self, response: UpstreamResponse) -> GatewayError:
        error = answers.read_error(await response.read_whole(ERROR_BYTES_MAX))
        return self._verdict(response.status, error, retry_after_s(response.retry_after, self._clock.wall()))

    def _verdict(self, status: int, error: BackendError, again_s: float | None = None) -> GatewayError:
        failure, self._outcome = answers.verdict(status, error, again_s)
        self._detail = f"status {status}" + (f": {error.gist}" if error.gist else "")
        self._context.crashes += error.is_crash
        failure.message = self._names.in_text(failure.message)
        return failure

    def _faulty(self, fault: BackendError) -> GatewayError:
        """Return the error for a 200 response that is invalid, or does not match the request."""
        if isinstance(fault, UnfitAnswer):
            self._outcome = Outcome.UNFIT
            if self._context.is_answered:
                return StreamBroken(fault.message)
            if isinstance(fault, FewerChoices):
                return ChoicesMissing(fault.message)
            return AnswerUnfit(fault.message, code=fault.code)
        if fault.status is not None and not self._context.is_answered:
            return self._verdict(fault.status, fault)
        self._detail = fault.gist or "status 200, but an error in the answer"
        self._context.crashes += fault.is_crash
        is_stopping = fault.code == ABORTED
        if is_stopping:
            self._detail = "the engine aborted the request: it is stopping"
        self._outcome = Outcome.DRAINING if is_stopping else Outcome.FAILED
        if self._context.is_answered:
            return StreamBroken("The backend failed before the answer was complete.")
        if is_stopping:
            return UpstreamBusy("The backend is stopping.", retry_after_s=1)
        return UpstreamFailed("The backend failed before it answered.")


def _detail_of(error: GatewayError) -> str:
    """Return an error for operators: what the caller is told, and what was wrong with TLS."""
    cause = error.cause if isinstance(error, UpstreamUnreachable) else ""
    return f"{error.message.removesuffix('.')} ({cause})" if cause else error.message
