"""`Idempotency-Key` for synchronous requests: each runs once, and its answer is replayed byte for byte.

An answer is recorded while it is relayed, and stored before its last bytes are sent, so that a caller can
repeat the request as soon as it has received all of it. If the request fails, the key is released.

Jobs have their own idempotency (background.py), and do not use this module.
"""

from functools import partial

import anyio

from gateway.core.errors import (
    GatewayError,
    IdempotencyInProgress,
    IdempotencyKeyReused,
    OutOfResources,
    StoreUnavailable,
)
from gateway.core.idempotency import HEADER, IdempotencyClaim, KeyState, StoredAnswer, fingerprint, read_key
from gateway.core.sse import DONE
from gateway.core.usage import Ending
from gateway.core.value import valueclass
from gateway.downstream.reading import BodyReaders, Read, Received, Work, arrival_record
from gateway.downstream.relay import PIECE_BYTES, HeldAnswers, HttpDownstream
from gateway.pipeline import LEFT_STATUS, CallerStalled
from gateway.pipeline.caller import while_caller_reads
from gateway.ports import Arrival, Clock, Headers, IdempotencyStore, Recorder
from gateway.tasks import TasksBeside

RETRY_AFTER_S = 2
"""Retry-After while the answer is in progress. A choice: every OpenAI client retries after a 409, but twice
only."""

LEASE_S = 30.0
"""How long the lease of a killed gateway prevents its request from being run again. A choice: two renewals in
a row may fail (docs/idempotency.md)."""

RECORDED_BYTES_MAX = 256 * 1024 * 1024
"""Maximum memory for all answers being recorded; further ones are not stored. A choice: 32 of the largest by
default (`idempotency.max_answer_bytes`)."""

REPLAYED_HEADERS: Headers = ((b"x-gateway-replayed", b"true"),)
_REQUEST_ID = b"x-request-id"
_FIRST_REQUEST_ID = b"x-gateway-original-request-id"


@valueclass(frozen=True, slots=True)
class IdempotencyRules:
    """The store, the expiry of answers in seconds, their maximum size, and the lease time of a key."""

    store: IdempotencyStore
    ttl_s: float
    answer_bytes_max: int
    lease_s: float = LEASE_S


class IdempotentRequests:
    """Serves requests with idempotency keys; one per process."""

    def __init__(
        self, rules: IdempotencyRules, readers: BodyReaders, recorder: Recorder, clock: Clock
    ) -> None:
        """Store answers as `rules` say; report replayed requests to `recorder`."""
        self.rules = rules
        self.recorded_bytes = 0  # of all answers being recorded
        self.replayed = HeldAnswers()
        self._readers = readers
        self._recorder = recorder
        self._clock = clock

    async def read(self, received: Received, read: Read) -> Work:
        """Return the work that answers a request: that of `read`, or a replay.

        Raises:
            GatewayError: as `read`; or the key is invalid, in use, or belongs to another request.
            StoreUnavailable: a previous answer may or may not exist.
        """
        written = received.headers.get(HEADER)
        if written is None:
            return await read(received)
        arrival, key, body = received.arrival, read_key(written), received.body
        found = await self._readers.run(lambda: fingerprint(body), body)
        claim = IdempotencyClaim(received.key, arrival.route, key, found, arrival.id)
        before = await self.rules.store.begin(claim, self.rules.lease_s)
        if isinstance(before, bytes):
            return partial(self._replay, arrival, received.key, StoredAnswer.decoded(before))
        if before is KeyState.REUSED:
            raise IdempotencyKeyReused()
        if before is not KeyState.BEGUN:
            message = "The first request with this Idempotency-Key has not ended. Retry to get its answer."
            raise IdempotencyInProgress(message, retry_after_s=RETRY_AFTER_S)
        mark = HeldKey(self.rules, claim)
        try:
            async with TasksBeside(Exception) as tasks:
                tasks.start_soon(mark.renew)  # what it refers to may have to be read from a slow store
                work = await read(received)
        except BaseException:
            await mark.end(None)
            raise
        return partial(self._run, work, mark)

    async def _run(self, work: Work, mark: "HeldKey", downstream: HttpDownstream) -> None:
        """Run a request, record its answer, and store it if successful."""
        recording = Recording(downstream, mark, self)
        try:
            async with TasksBeside(GatewayError, CallerStalled, OSError) as tasks:
                tasks.start_soon(mark.renew)
                await work(recording)
        finally:
            recording.forget()
            await mark.end(None)

    async def _replay(
        self, arrival: Arrival, key: str | None, answer: StoredAnswer, downstream: HttpDownstream
    ) -> None:
        """Send a stored answer. The request, which may be long, is not held meanwhile.

        Raises:
            OutOfResources: too many are being sent already.
        """
        ending, status, code = Ending.LEFT, LEFT_STATUS, ""
        size = len(answer.body)
        try:
            if not self.replayed.has_room(size):
                message = "Too many stored answers are being sent at once. Please retry."
                raise OutOfResources(message, retry_after_s=5)
            with self.replayed.holding(size):
                await downstream.start(answer.status, _headers_again(answer, arrival.id))
                for start in range(0, size, PIECE_BYTES):
                    with while_caller_reads():
                        await downstream.send(answer.body[start : start + PIECE_BYTES])
                await downstream.finish()
            ending = Ending.REPLAYED
        except OutOfResources as error:
            ending, status, code = Ending.of(error), error.status, error.code
            raise
        finally:
            status = answer.status if downstream.is_started else status
            self._recorder.finished(arrival_record(arrival, key, ending, status, code, self._clock.now()))


class HeldKey:
    """A request's hold on its idempotency key, until the answer is stored or the key is released."""

    def __init__(self, rules: IdempotencyRules, claim: IdempotencyClaim) -> None:
        """Hold the key of `claim`, which has been acquired."""
        self._rules = rules
        self._claim = claim
        self._is_over = False
        self._turn = anyio.Lock()  # no renewal may follow the end

    async def renew(self) -> None:
        """Renew the lease until the request ends or another one has the key."""
        while True:
            await anyio.sleep(self._rules.lease_s / 3)
            async with self._turn:
                if self._is_over:
                    return
                try:
                    if not await self._rules.store.renew(self._claim, self._rules.lease_s):
                        return
                except StoreUnavailable:
                    pass  # logged by the store; the next renewal may be in time

    async def end(self, answer: StoredAnswer | None) -> None:
        """Store the answer if possible, since the caller gets it in any case; None: release the key.

        Does nothing if that was done before.
        """
        store, claim = self._rules.store, self._claim
        with anyio.CancelScope(shield=True):  # bounded by the store's timeouts
            async with self._turn:
                if self._is_over:
                    return
                self._is_over = True
                try:
                    if answer is None:
                        await store.free(claim)
                    else:
                        await store.keep(claim, answer.encoded(), self._rules.ttl_s)
                except StoreUnavailable:
                    pass  # the lease will expire


class Recording(HttpDownstream):
    """Records the answer while relaying it, and stores it before its last bytes are sent."""

    def __init__(self, caller: HttpDownstream, mark: HeldKey, idempotency: IdempotentRequests) -> None:
        """Relay to `caller`."""
        self._caller = caller
        self._mark = mark
        self._idempotency = idempotency
        self._status = 0
        self._headers: Headers = ()
        self._length = -1  # Content-Length of the answer, if known
        self._seen_bytes = 0
        self._parts: list[bytes] | None = []  # None: it cannot be stored
        self._held_bytes = 0

    async def start(self, status: int, headers: Headers) -> None:
        """See `ports.Downstream.start`."""
        self._status, self._headers = status, tuple(headers)
        self._length = next((int(value) for name, value in headers if name == b"content-length"), -1)
        await self._caller.start(status, headers)

    async def send(self, data: bytes) -> None:
        """See `ports.Downstream.send`."""
        self._write_down(data)
        if self._seen_bytes == self._length or data.endswith(DONE):
            await self._end()
        await self._caller.send(data)

    async def send_last(self, data: bytes, *, is_good: bool) -> None:
        """See `HttpDownstream.send_last`."""
        self._write_down(data)
        if not is_good:
            self.forget()
        await self._end()
        await self._caller.send(data)

    async def fail(self, error: GatewayError, code: str) -> None:
        """See `ports.Downstream.fail`."""
        self.forget()
        await super().fail(error, code)

    async def finish(self) -> None:
        """See `HttpDownstream.finish`."""
        await self._caller.finish()

    def forget(self) -> None:
        """Stop recording, and release the memory."""
        self._idempotency.recorded_bytes -= self._held_bytes
        self._parts, self._held_bytes = None, 0

    def _write_down(self, data: bytes) -> None:
        self._seen_bytes += len(data)
        if self._parts is None:
            return
        self._parts.append(data)
        self._held_bytes += len(data)
        self._idempotency.recorded_bytes += len(data)
        is_too_long = self._held_bytes > self._idempotency.rules.answer_bytes_max
        if is_too_long or self._idempotency.recorded_bytes > RECORDED_BYTES_MAX:
            self.forget()

    async def _end(self) -> None:
        """Store the complete answer, or release the key if it cannot be stored."""
        if self._parts is None or not 200 <= self._status < 300:
            await self._mark.end(None)
        else:
            await self._mark.end(StoredAnswer(self._status, self._headers, b"".join(self._parts)))
        self.forget()


def _headers_again(answer: StoredAnswer, request_id: str) -> Headers:
    """Return the headers of a replayed answer: those of the original, with a new request id."""
    first = [(_FIRST_REQUEST_ID if name == _REQUEST_ID else name, value) for name, value in answer.headers]
    return [(_REQUEST_ID, request_id.encode()), *first, *REPLAYED_HEADERS]
