"""The state of one request on its way through the pipeline."""

from collections.abc import Awaitable, Callable
from functools import cached_property
from hashlib import blake2b

from gateway.core.decision import Candidate, Decision
from gateway.core.policy import Policy
from gateway.core.request import Estimate
from gateway.core.request_features import RequestFeatures
from gateway.core.usage import AttemptRecord, Ending, RequestRecord, Usage
from gateway.core.waiting import Ticket
from gateway.pipeline.caller import KeepAlive, patience_s
from gateway.ports import Downstream, Headers, Incoming

LEFT_STATUS = 499
"""Logged as the status when the caller left before the response began (nginx's convention); never sent."""

_WHERE = frozenset({b"x-gateway-pool", b"x-gateway-backend"})


class RequestContext:
    """The state of one request. Owned by a single coroutine; it ends as a `RequestRecord`.

    Attributes:
        incoming: The request as received.
        downstream: Where the response goes.
        policy: The policy under which it is served.
        estimated_at, admitted_at: As in `RequestRecord`.
        estimate: Its prompt length, once counted.
        decision: The eligible backends and the reasons, once decided.
        ticket: Its ticket in the waiting line, once decided.
        served_by: The candidate of the current or the successful attempt.
        attempts: All finished attempts, in order.
        unreported: Failed attempts not yet reported to the fleet, because the request may be at fault.
        crashes: How many attempts crashed an engine.
        refusals: How many attempts were refused because of load, and do not count: the request waited on.
        lacks_slot: Whether the request, if it waits, waits for a slot: False if the last backend for which it
            waits on has refused it while it ran nothing.
        usage: Token usage as the backend reported it.
        keep_alive: Sends SSE comments while the request waits; None if it does not send any.
        is_answered: Whether the response has begun, after which no other backend can take over.
        cancelled_detail: Why its attempt ends if it is cancelled, for operators.
        chunks: Number of reads relayed.
        status: Status of the response once it has begun; 0 before.
        ending: How it ended; FAILED until set, as after an internal error.
        error_code: `error.code` as sent to the caller.
    """

    estimated_at: float | None = None
    admitted_at: float | None = None
    estimate: Estimate | None = None
    decision: Decision | None = None
    ticket: Ticket | None = None
    served_by: Candidate | None = None
    crashes = 0
    refusals = 0
    lacks_slot = True
    usage: Usage | None = None
    keep_alive: KeepAlive | None = None
    is_answered = False
    cancelled_detail = "the caller left"
    chunks = 0
    status = 0
    ending = Ending.FAILED
    error_code = ""

    def __init__(
        self,
        incoming: Incoming,
        downstream: Downstream,
        policy: Policy,
        on_admitted: Callable[[bool], None] | None,
    ) -> None:
        """Start with the request alone. `on_admitted`: see `Pipeline.run`."""
        self.incoming = incoming
        self.downstream = downstream
        self.policy = policy
        self._on_admitted = on_admitted
        self.attempts: list[AttemptRecord] = []
        self.unreported: list[AttemptRecord] = []

    @property
    def tries(self) -> int:
        """How many attempts count against the most that a request may have."""
        return len(self.attempts) - self.refusals

    @cached_property
    def digest(self) -> bytes:
        """What tells the request from others, and is the same if a caller repeats it.

        Computed once, if ever: that takes 90 ms for a body of 32 MB, in which every stream stands still.
        """
        return blake2b(self.incoming.body_for(""), digest_size=16).digest()

    def admitted(self, at: float) -> None:
        """Note that the request was given a slot at `at` (monotonic seconds)."""
        self.admitted_at = self.admitted_at or at
        if self._on_admitted is not None:
            self._on_admitted(True)

    def waits_on(self, *, is_try: bool, lacks_slot: bool) -> None:
        """Note that the last attempt was refused because of load, and the request is still waiting.

        `is_try`: whether that attempt counts against the most that it may have.
        """
        self.refusals += not is_try
        self.lacks_slot = lacks_slot
        self.admitted_at = None
        if self._on_admitted is not None:
            self._on_admitted(False)

    async def start(self, status: int, headers: Headers) -> None:
        """Begin the response: send the status and headers, unless keep-alive comments already have."""
        if self.keep_alive is not None:
            await self.keep_alive.stop()
        self.is_answered = True
        if not self.status:
            await self.open(status, headers)

    def send_whole(self, headers: Headers, body: bytes) -> Awaitable[None]:
        """Send a complete successful answer. Keep-alive comments are for streams only."""
        self.is_answered = True
        self.status = 200
        return self.downstream.send_whole(200, (*headers, *self.headers()), body)

    async def open(self, status: int, headers: Headers) -> None:
        """Send the status and headers, including those that describe the decision."""
        self.status = status
        facts = self.headers()
        if not self.is_answered:  # a later attempt may be served by another backend
            facts = [fact for fact in facts if fact[0] not in _WHERE]
        await self.downstream.start(status, (*headers, *facts))

    def headers(self) -> Headers:
        """Return the response headers that describe the decision and the last backend tried."""
        facts = [(b"x-request-id", self.incoming.arrival.id.encode())]
        if self.decision is not None:
            facts.append((b"x-gateway-class", self.decision.traffic_class.encode()))
            facts.append((b"x-gateway-prompt-tokens", b"%d" % self.decision.estimate.tokens))
        if self.admitted_at is not None and self.estimated_at is not None:
            waited_ms = round(1000 * (self.admitted_at - self.estimated_at))
            facts.append((b"x-gateway-queue-ms", b"%d" % waited_ms))
        if self.served_by is not None:
            facts.append((b"x-gateway-pool", self.served_by.pool.encode()))
            facts.append((b"x-gateway-backend", self.served_by.backend.encode()))
        if self.incoming.dropped:
            facts.append((b"x-gateway-dropped", ", ".join(self.incoming.dropped).encode()))
        return facts

    def record(self, ended_at: float) -> RequestRecord:
        """Return the final record of the request."""
        incoming, placed, ticket = self.incoming, self.served_by, self.ticket
        request, arrival = incoming.request, incoming.arrival
        waiting = None if ticket is None else ticket.traffic_class.waiting
        # By position, in the order of the fields: the class is wide, and keywords would cost 2 us.
        return RequestRecord(
            arrival.id,
            request.model,
            request.stream,
            self.ending,
            self.status or LEFT_STATUS,
            self.error_code,
            request.key,
            arrival.wall_at,
            arrival.received_at,
            ended_at,
            self.estimated_at,
            self.admitted_at,
            self.attempts[-1].first_byte_at if self.is_answered else None,
            self.decision,
            placed,
            placed is not None and placed.is_spill,
            "" if placed is None else placed.backend,
            "" if placed is None else placed.pool,
            tuple(self.attempts),
            self.usage,
            self.chunks,
            None if waiting is None else waiting.ttft_target_s,
            None if ticket is None else ticket.due_s,
            arrival.trace,
            arrival.route,
            arrival.job,
            self._asked(),
        )

    def _asked(self) -> RequestFeatures | None:
        """Return the features of the request for its record, which are computed only at its end."""
        if self.estimate is None:
            return None
        incoming = self.incoming
        model = self.policy.model(incoming.request.model)
        assert model is not None  # its prompt was counted as one for it
        return RequestFeatures.of(
            self.policy.version,
            model,
            incoming.request,
            self.estimate,
            incoming.size_bytes,
            patience_s(incoming.request.headers),
        )
