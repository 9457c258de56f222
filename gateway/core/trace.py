"""Which trace a request belongs to: W3C Trace Context, read and written. Pure.

A request's spans are made when it has ended, of what is known of it by then, so that the decision which
requests are worth keeping can be made with everything known, and a request that is not kept costs next to
nothing. Only ids exist before that: they travel to the backend, whose own spans join by them.
"""

import re

from gateway.core.value import valueclass

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1
_MASK = (1 << 64) - 1
_RANDOM_BITS = 56
"""Bits of a trace id that W3C Trace Context level 2 wants random: sampling by them agrees everywhere."""


@valueclass(frozen=True, slots=True)
class SpanRef:
    """A span of somebody else.

    Attributes:
        trace_id: 128 bits, not 0.
        span_id: 64 bits, not 0.
        is_sampled: Whether it is kept, as far as was known when it was named.
    """

    trace_id: int
    span_id: int
    is_sampled: bool = False

    @property
    def traceparent(self) -> str:
        """The header that names it."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.is_sampled):02x}"


@valueclass(frozen=True, slots=True)
class Trace:
    """The place of a request in its trace.

    Attributes:
        own: The request's own span.
        parent: The caller's span, or None where the trace begins here.
        link: The span of the request that handed this one over, where it is a job.
        is_ours: Whether this gateway has spans in it. If not, it only passes on what the caller sent.
    """

    own: SpanRef
    parent: SpanRef | None = None
    link: SpanRef | None = None
    is_ours: bool = True

    def child(self, number: int) -> SpanRef:
        """Return the span of a part of the request; for the same number always the same."""
        return SpanRef(self.own.trace_id, _mixed(self.own.span_id, number), self.own.is_sampled)


def passed_on(traceparent: str | None) -> Trace | None:
    """Return the place of a request where this gateway has no spans: that of its caller, if it names one."""
    caller = None if traceparent is None else parse(traceparent)
    return None if caller is None else Trace(caller, is_ours=False)


def parse(traceparent: str) -> SpanRef | None:
    """Return what a `traceparent` header names, or None where it is none that counts."""
    found = _TRACEPARENT.fullmatch(traceparent.strip())
    if found is None:
        return None
    version, trace_id, span_id, flags, rest = found.groups()
    if version == "ff" or (version == "00" and rest):
        return None
    ref = SpanRef(int(trace_id, 16), int(span_id, 16), bool(int(flags, 16) & _SAMPLED))
    return ref if ref.trace_id and ref.span_id else None


def is_chosen(trace_id: int, share: float) -> bool:
    """Return whether a trace is among that share of all, which everybody who asks decides alike."""
    return (trace_id & ((1 << _RANDOM_BITS) - 1)) < share * (1 << _RANDOM_BITS)


def _mixed(span_id: int, number: int) -> int:
    """Return an id made of another one: the finalizer of SplitMix64, which spreads neighbours."""
    mixed = (span_id + number * 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return (mixed ^ (mixed >> 31)) or 1
