"""The trace context of a request: parsing and formatting of W3C Trace Context. Pure.

A request's spans are created when it has ended. So the decision which requests to keep can use everything
known about them, and a request that is not kept costs almost nothing. Before that, only ids exist. They are
sent to the backend, so that its own spans join the trace.
"""

import re

from gateway.core.value import valueclass

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")

_SAMPLED = 1
"""The flag `sampled` of a traceparent, by W3C Trace Context."""

_MASK = (1 << 64) - 1
"""The bits of a span id, by W3C Trace Context."""

_RANDOM_BITS = 56
"""Random bits of a trace id in W3C Trace Context level 2. Sampling by them is consistent across services."""


@valueclass(frozen=True, slots=True)
class SpanRef:
    """Reference to a span.

    Attributes:
        trace_id: 128 bits, not 0.
        span_id: 64 bits, not 0.
        is_sampled: The sampled flag at the time of the reference.
    """

    trace_id: int
    span_id: int
    is_sampled: bool = False

    @property
    def traceparent(self) -> str:
        """The `traceparent` header value for it."""
        return _traceparent(self.trace_id, self.span_id, self.is_sampled)


@valueclass(frozen=True, slots=True)
class Trace:
    """The position of a request in its trace.

    Attributes:
        own: The request's own span.
        parent: The caller's span, or None if the trace begins here.
        link: For a job, the span of the request that submitted it; else None.
        is_ours: Whether this gateway adds spans to the trace. If not, it only forwards the caller's context.
    """

    own: SpanRef
    parent: SpanRef | None = None
    link: SpanRef | None = None
    is_ours: bool = True

    def child_traceparent(self, number: int) -> str:
        """The `traceparent` header value for the child span with this number."""
        own = self.own
        return _traceparent(own.trace_id, _mixed(own.span_id, number), own.is_sampled)

    def child(self, number: int) -> SpanRef:
        """Return the child span with this number; the same number always gives the same span."""
        return SpanRef(self.own.trace_id, _mixed(self.own.span_id, number), self.own.is_sampled)


def passed_on(traceparent: str | None) -> Trace | None:
    """Return the trace of a request to which this gateway adds no spans: the caller's, or None."""
    caller = None if traceparent is None else parse(traceparent)
    return None if caller is None else Trace(caller, is_ours=False)


def parse(traceparent: str) -> SpanRef | None:
    """Return the span that a `traceparent` header names, or None if the header is invalid."""
    found = _TRACEPARENT.fullmatch(traceparent.strip())
    if found is None:
        return None
    version, trace_id, span_id, flags, rest = found.groups()
    if version == "ff" or (version == "00" and rest):
        return None
    ref = SpanRef(int(trace_id, 16), int(span_id, 16), bool(int(flags, 16) & _SAMPLED))
    return ref if ref.trace_id and ref.span_id else None


def is_chosen(trace_id: int, share: float) -> bool:
    """Return whether a trace is sampled at that rate. All services reach the same result for a trace id."""
    return (trace_id & ((1 << _RANDOM_BITS) - 1)) < share * (1 << _RANDOM_BITS)


def _traceparent(trace_id: int, span_id: int, is_sampled: bool) -> str:
    return f"00-{trace_id:032x}-{span_id:016x}-{'01' if is_sampled else '00'}"


def _mixed(span_id: int, number: int) -> int:
    """Return an id derived from another one with the finalizer of SplitMix64, which separates similar ids."""
    mixed = (span_id + number * 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return (mixed ^ (mixed >> 31)) or 1
