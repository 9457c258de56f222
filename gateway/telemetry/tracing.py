"""Tracing: at its end, each sampled request becomes spans, exported by OTLP over HTTP.

    POST /v1/chat/completions            (server; all decisions of the gateway, as attributes)
      gateway.estimate                   reading and counting the prompt
      gateway.admission                  waiting for a slot
      chat gemma-4                       (client; one per attempt)
        gateway.connect                  connecting, unless a connection was kept alive
        gateway.first_token              until the backend's first token; next to its own spans
        gateway.decode                   from the first token to the last

A request is kept if its trace was sampled (by share, or by its caller), if it failed, or if it was slow. This
is decided at its end (tail sampling), so nothing is created before: a request that is not kept costs a random
number and a header. The backend is asked for spans only if the trace was sampled from the beginning.

Never in a span: prompts, answers, keys. Names follow OpenTelemetry's GenAI conventions, in the configured
version; `gateway.*` names are our own.
"""

import logging
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from typing import TypeAlias
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http import trace_exporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from gateway import __version__
from gateway.core import trace
from gateway.core.backends import Backend
from gateway.core.decision import Candidate, Ranking
from gateway.core.health import Outcome
from gateway.core.request import Endpoint
from gateway.core.trace import SpanRef, Trace
from gateway.core.usage import AttemptRecord, Ending, RequestRecord
from gateway.core.value import valueclass
from gateway.events import about
from gateway.ports import Recorder
from gateway.telemetry.otlp_session import session
from gateway.telemetry.receiver_status import ReceiverStatus

log = logging.getLogger("gateway.telemetry")

Value: TypeAlias = str | bool | int | float | Sequence[str]

_SCOPE = InstrumentationScope("gemma-gateway", __version__)
_ESTIMATE, _ADMISSION = 1001, 1002
"""Numbers of child spans. Attempts are 1, 2, ...; their children use the numbers below within each."""

WHOLE_MAX = 32
"""Size of the largest fleet of which every backend is in a span. A choice: ranking 200 would take a
millisecond. Of a larger fleet it is the first choice and, up to this number, those passed over before it."""

_FIRST_TOKEN, _DECODE, _CONNECT = 1, 2, 3
"""Numbers of the children of an attempt."""

_FAULTS = frozenset({Ending.FAILED, Ending.BROKEN, Ending.SHED})
"""Endings that are our fault: per OpenTelemetry, a server span is no error if its caller was at fault."""

_ERRORS = _FAULTS | {Ending.REJECTED}


END_S = 2.0
"""How long the end of the process may wait for the export of the last spans. A choice: some spans for an end
that is not held up."""


class Conventions(StrEnum):
    """Version of the GenAI conventions."""

    CURRENT = "current"  # their own repository: gen_ai.provider.name, gen_ai.response.time_to_first_chunk
    V1_41 = "1.41"  # the last one in the main conventions: gen_ai.system


class KeepReason(StrEnum):
    """Why a request is kept. A closed set: used as a metric label."""

    CHOSEN = "chosen"
    FAILED = "failed"
    SLOW = "slow"


@valueclass(frozen=True, slots=True)
class TraceRules:
    """Sampling rules.

    Attributes:
        share: The sampled share of all requests, 0..1.
        follows_callers: Whether to keep a request if its caller sampled its trace.
        slow_factor: A first token later than this multiple of its class's target is slow.
        slow_total_s: A request that takes longer is slow; None: no limit.
        conventions: Version of the naming conventions.
    """

    share: float = 0.01
    follows_callers: bool = True
    slow_factor: float = 1.0
    slow_total_s: float | None = None
    conventions: Conventions = Conventions.CURRENT


class Sender(SpanExporter):
    """Exports spans to an OTLP receiver, with retries; shutting it down aborts an export in progress."""

    def __init__(self, endpoint: str, headers: Mapping[str, str]) -> None:
        """Export to the base URL `endpoint`, with `headers`; `/v1/traces` is appended."""
        self._exporter = OTLPSpanExporter(
            f"{endpoint.rstrip('/')}/v1/traces", headers=dict(headers), timeout=10, session=session()
        )
        self._receiver_status = ReceiverStatus(trace_exporter.__name__, on_away=_say_away, on_back=_say_back)
        self._is_shut = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Export spans."""
        try:
            result = self._exporter.export(spans)
        except Exception as error:  # noqa: BLE001 - older exporters raise what their session raises
            self._receiver_status.explain(str(error))
            result = SpanExportResult.FAILURE
        if not self._is_shut:
            self._receiver_status.note(result is SpanExportResult.SUCCESS)
        return result

    def shutdown(self) -> None:
        """Export nothing more. Idempotent."""
        if not self._is_shut:
            self._is_shut = True
            self._exporter.shutdown()  # type: ignore[no-untyped-call]
            self._receiver_status.close()


def _say_away(reason: str) -> None:
    log.warning(
        "the OTLP receiver does not accept traces (%s); the gateway keeps trying",
        reason,
        extra=about("traces_not_taken", reason=reason),
    )


def _say_back() -> None:
    log.info("the OTLP receiver accepts traces again", extra=about("traces_taken"))


class Tracing(Recorder):
    """Assigns requests to traces, and is the `ports.Recorder` that creates their spans."""

    def __init__(
        self,
        rules: TraceRules,
        sender: SpanExporter,
        service: str,
        backends: Callable[[], Mapping[str, Backend]],
        on_kept: Callable[[KeepReason], None] = lambda _: None,
    ) -> None:
        """Export kept requests through `sender`, in batches, from a separate thread.

        `service` is the gateway's service name; `on_kept` receives the reason for each kept request.
        """
        self._rules = rules
        self._sender = sender
        self._processor = BatchSpanProcessor(sender)
        self._resource = Resource.create({"service.name": service, "service.version": __version__})
        self._backends = backends
        self._on_kept = on_kept
        self._random = random.Random()  # ids must be unique, not secret

    def begin(self, traceparent: str | None, link: SpanRef | None = None) -> Trace:
        """Return a request's place in its caller's trace, or in a new one.

        `link`: the request that submitted this one as a job.
        """
        parent = None if traceparent is None else trace.parse(traceparent)
        bits = self._random.getrandbits(192)
        trace_id = parent.trace_id if parent else (bits >> 64) or 1
        wanted = parent is not None and parent.is_sampled and self._rules.follows_callers
        chosen = wanted or trace.is_chosen(trace_id, self._rules.share)
        own = SpanRef(trace_id, bits & ((1 << 64) - 1) or 1, chosen)
        return Trace(own, parent, link)

    def finished(self, record: RequestRecord) -> None:
        """See `ports.Recorder.finished`."""
        if record.trace is None:
            return
        why = self._why_kept(record)
        if why is None:
            return
        self._on_kept(why)
        for span in _Spans(record, record.trace, self._rules.conventions, self._resource, self._backends()):
            self._processor.on_end(span)

    def close(self) -> None:
        """Export what is left, and shut down. An unreachable receiver delays this by `END_S`."""
        # The library's shutdown does not interrupt a pending request; the interpreter's exit ends the thread.
        ending = threading.Thread(target=self._processor.shutdown, name="OTLP traces", daemon=True)
        with suppress(RuntimeError):  # no thread can be started
            ending.start()
            ending.join(END_S)
        self._sender.shutdown()

    def _why_kept(self, record: RequestRecord) -> KeepReason | None:
        assert record.trace is not None
        if record.ending in _ERRORS:
            return KeepReason.FAILED
        if self._is_slow(record):
            return KeepReason.SLOW
        return KeepReason.CHOSEN if record.trace.own.is_sampled else None

    def _is_slow(self, record: RequestRecord) -> bool:
        rules, total_s = self._rules, record.ended_at - record.received_at
        if rules.slow_total_s is not None and total_s > rules.slow_total_s:
            return True
        if record.ttft_target_s is None or not record.stream or not record.route:  # nobody is watching a job
            return False
        first_s = total_s if record.first_byte_at is None else record.first_byte_at - record.received_at
        return first_s > rules.slow_factor * record.ttft_target_s


class _Spans:
    """The spans of one request, its own last."""

    def __init__(
        self,
        record: RequestRecord,
        place: Trace,
        conventions: Conventions,
        resource: Resource,
        backends: Mapping[str, Backend],
    ) -> None:
        self._record = record
        self._trace = place
        self._conventions = conventions
        self._resource = resource
        self._backends = backends

    def __iter__(self) -> Iterator[ReadableSpan]:
        record, own = self._record, self._trace.own
        if record.estimated_at is not None:
            span = self._trace.child(_ESTIMATE)
            yield self._span("gateway.estimate", span, own, record.received_at, record.estimated_at)
        if record.estimated_at is not None and record.ending is not Ending.HANDED_OVER:
            until = record.admitted_at or record.ended_at
            wait = {"gateway.spill": record.is_spill}
            span = self._trace.child(_ADMISSION)
            yield self._span("gateway.admission", span, own, record.estimated_at, until, wait)
        for number, attempt in enumerate(record.attempts, 1):
            yield from self._attempt(number, attempt)
        yield self._span(
            f"POST {record.route}" if record.route else "gateway.job",
            own,
            self._trace.parent,
            record.received_at,
            record.ended_at,
            self._facts(),
            kind=SpanKind.SERVER if record.route else SpanKind.CONSUMER,
            error=record.error_code if record.ending in _FAULTS else "",
            links=[] if self._trace.link is None else [Link(_context(self._trace.link))],
            events=self._classified(),
        )

    def _attempt(self, number: int, attempt: AttemptRecord) -> Iterator[ReadableSpan]:
        ref = self._trace.child(number)
        within = Trace(ref)
        first, asked_at = attempt.first_byte_at, attempt.connected_at or attempt.started_at
        if asked_at > attempt.started_at:
            yield self._span("gateway.connect", within.child(_CONNECT), ref, attempt.started_at, asked_at)
        if first is not None:
            part = within.child(_FIRST_TOKEN)
            yield self._span("gateway.first_token", part, ref, asked_at, first)
            yield self._span("gateway.decode", within.child(_DECODE), ref, first, attempt.ended_at)
        yield self._span(
            f"{self._operation_name()} {self._model()}",
            ref,
            self._trace.own,
            attempt.started_at,
            attempt.ended_at,
            self._attempt_facts(number, attempt),
            kind=SpanKind.CLIENT,
            error=attempt.outcome.value if attempt.outcome.is_fault else "",
            detail=attempt.detail,
            events=[] if first is None else [Event("first_token", timestamp=self._ns(first))],
        )

    def _classified(self) -> list[Event]:
        record, decision = self._record, self._record.decision
        if decision is None or record.estimated_at is None:
            return []
        facts = {"gateway.class": decision.traffic_class, "gateway.class_reason": decision.class_reason}
        return [Event("classified", facts, timestamp=self._ns(record.estimated_at))]

    # ------------------------------------------------------------ attributes

    def _facts(self) -> dict[str, Value | None]:
        record, decision = self._record, self._record.decision
        facts: dict[str, Value | None] = {
            "http.request.method": "POST" if record.route else None,
            "http.route": record.route or None,
            "http.response.status_code": record.status if record.route else None,
            "gateway.request_id": record.id,
            "gateway.ending": record.ending.value,
            "error.type": record.error_code or None,
            "gateway.key": record.key,
            "gateway.stream": record.stream,
            "gateway.backend": record.backend or None,
            "gateway.pool": record.pool or None,
            "gateway.spill": record.is_spill,
            "gateway.attempts": len(record.attempts),
            **self._genai(),
        }
        if decision is not None:
            facts |= {
                "gateway.class": decision.traffic_class,
                "gateway.class_reason": decision.class_reason,
                "gateway.estimated_input_tokens": decision.estimate.tokens,
                "gateway.estimated_input_tokens_max": decision.estimate.tokens_max,
                "gateway.estimate_mode": decision.estimate.mode.value,
                "gateway.candidates": considered(decision.candidates, len(self._backends)),
            }
            if record.usage is not None and decision.demand.prompts == 1:  # of several, a sum
                facts["gateway.estimate_error_tokens"] = record.usage.prompt_tokens - decision.estimate.tokens
        if (queue_s := record.queue_s) is not None:
            facts["gateway.queue_s"] = round(queue_s, 6)
        if record.placed is not None:
            facts["gateway.knee_seqs"] = record.placed.knee_seqs
            facts["gateway.in_flight_at_admission"] = record.placed.load.seqs
        return facts

    def _attempt_facts(self, number: int, attempt: AttemptRecord) -> dict[str, Value | None]:
        backend = self._backends.get(attempt.backend)
        address = urlsplit(backend.url) if backend else None
        facts: dict[str, Value | None] = {
            "gateway.backend": attempt.backend,
            "gateway.pool": attempt.pool,
            "gateway.outcome": attempt.outcome.value,
            "server.address": address.hostname if address else None,
            "server.port": address.port if address else None,
            "http.request.resend_count": number - 1 or None,
            "gen_ai.request.model": self._model(),
            **self._operation(),
        }
        if attempt.outcome is Outcome.OK:
            facts |= self._genai()
        # The first chunk of a non-streamed answer is also its last one.
        first = attempt.first_byte_at if self._record.stream else None
        if first is not None and self._conventions is Conventions.CURRENT:
            facts["gen_ai.response.time_to_first_chunk"] = round(first - attempt.started_at, 6)
        return facts

    def _operation(self) -> dict[str, Value | None]:
        provider = {
            Conventions.CURRENT: "gen_ai.provider.name",
            Conventions.V1_41: "gen_ai.system",
        }[self._conventions]
        return {"gen_ai.operation.name": self._operation_name(), provider: "vllm"}

    def _operation_name(self) -> str:
        """Return the operation name of the conventions: chat, except for one route."""
        return "text_completion" if self._record.route == Endpoint.COMPLETIONS else "chat"

    def _genai(self) -> dict[str, Value | None]:
        usage = self._record.usage
        facts = {"gen_ai.request.model": self._model(), **self._operation()}
        if usage is not None:
            facts["gen_ai.usage.input_tokens"] = usage.prompt_tokens
            facts["gen_ai.usage.output_tokens"] = usage.completion_tokens
            if self._conventions is Conventions.CURRENT:
                facts["gen_ai.usage.reasoning.output_tokens"] = usage.reasoning_tokens
                facts["gen_ai.usage.cache_read.input_tokens"] = usage.cached_tokens
        return facts

    def _model(self) -> str:
        """Return the model by its configured name: an unknown name sent by a caller must not name a span."""
        return self._record.decision.model if self._record.decision else "unknown"

    # ------------------------------------------------------------ one span

    def _span(
        self,
        name: str,
        ref: SpanRef,
        parent: SpanRef | None,
        started_at: float,
        ended_at: float,
        attributes: Mapping[str, Value | None] | None = None,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        error: str = "",
        detail: str = "",
        links: Sequence[Link] = (),
        events: Sequence[Event] = (),
    ) -> ReadableSpan:
        facts = {name: value for name, value in (attributes or {}).items() if value is not None}
        if error:
            facts["error.type"] = error
        return ReadableSpan(
            name,
            context=_context(ref),
            parent=None if parent is None else _context(parent),
            resource=self._resource,
            attributes=facts,
            kind=kind,
            links=links,
            events=events,
            status=Status(StatusCode.ERROR, detail or error) if error else Status(StatusCode.UNSET),
            start_time=self._ns(started_at),
            end_time=max(self._ns(started_at), self._ns(ended_at)),
            instrumentation_scope=_SCOPE,
        )

    def _ns(self, at: float) -> int:
        """Convert monotonic seconds to nanoseconds since the epoch."""
        return int((self._record.wall_at + (at - self._record.received_at)) * 1e9)


def _context(ref: SpanRef) -> SpanContext:
    # Exporters drop unsampled spans; at this point the span is to be kept.
    return SpanContext(ref.trace_id, ref.span_id, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))


def considered(ranking: Ranking, backends: int) -> Sequence[str]:
    """Return the candidates of a decision in words, where the fleet has so many backends; see `WHOLE_MAX`."""
    if backends <= WHOLE_MAX:
        return [_words(candidate) for candidate in ranking]
    first = [] if ranking.first is None else [f"{ranking.first.backend}: first choice"]
    return [*first, *(f"{name}: {reason.value}" for name, reason in ranking.passed_over[:WHOLE_MAX])]


def _words(candidate: Candidate) -> str:
    if candidate.excluded is not None:
        return f"{candidate.backend}: {candidate.excluded.value} ({candidate.detail})"
    return f"{candidate.backend}: score {candidate.score:.2f}"
