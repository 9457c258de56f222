"""Admission: may this request start on this backend now?

A bandwidth-bound server gains nothing past its *knee*: output tokens/s stays flat while every
request's time per output token grows. So the gateway stops at the knee and lets the caller wait or
try elsewhere. Two limits hold at once:

* Sequences. A knee is a curve over prompt length, not a number: an H100 holds 64 short chats but
  about 12 sixteen-thousand-token prompts. A sequence therefore takes the share `1 / knee(length)` of
  its backend, and the shares of what is in flight may not exceed the whole. Shares are integers
  (millionths), so that every store adds them up to the same sum.
* KV blocks, by the model's own formula (core/kv.py).

Pure: no clock, no I/O. The store applies the same limits atomically, and a contract test holds the
two to one table of cases.
"""

from collections.abc import Mapping

from gateway.core.values import UNLIMITED, Capacity, Demand, Exclusion, Load

WHOLE = 1_000_000
"""A backend's knee in units of `Load.share`."""


def knee_seqs(capacity: Capacity, prompt_tokens: int) -> int:
    """Return how many sequences with prompts of that length the backend runs before it saturates."""
    for step in capacity.knee:
        if step.prompt_tokens_max is None or prompt_tokens <= step.prompt_tokens_max:
            return step.seqs
    return capacity.knee[-1].seqs


def claim(capacity: Capacity, demand: Demand) -> Load:
    """Return what a request takes of a backend while it runs there."""
    knee = knee_seqs(capacity, demand.prompt_tokens)
    # Floor division lets exactly `knee` sequences fit, for every knee below 1,000.
    share = demand.seqs * (WHOLE // knee)
    blocks = 0 if capacity.kv is None else demand.seqs * capacity.kv.blocks(demand.total_tokens)
    return Load(seqs=demand.seqs, share=share, kv_blocks=blocks)


def limits(capacity: Capacity) -> Load:
    """Return the most a backend may hold, counter by counter."""
    planned = blocks_planned(capacity)
    return Load(
        seqs=UNLIMITED,
        share=WHOLE,
        kv_blocks=UNLIMITED if planned is None else planned,
        long_seqs=UNLIMITED,
        long_unanswered=UNLIMITED,
        prefill_ms=UNLIMITED,
    )


COUNTERS: Mapping[str, Exclusion] = {
    "seqs": Exclusion.AT_KNEE,
    "share": Exclusion.AT_KNEE,
    "kv_blocks": Exclusion.KV_FULL,
    "long_seqs": Exclusion.LONG_FULL,
    "long_unanswered": Exclusion.LONG_PREFILL,
    "prefill_ms": Exclusion.PREFILL_BUSY,
}
"""Each counter of `Load`, and what it means when it is the one that is full. In the order of checking."""


def full(load: Load, wanted: Load, most: Load) -> Exclusion | None:
    """Return the first counter that `wanted` on top of `load` would take above `most`, or None.

    A counter that `wanted` does not touch is not checked: a chat is not refused for documents that run.
    """
    for name, reason in COUNTERS.items():
        extra = getattr(wanted, name)
        if extra and getattr(load, name) + extra > getattr(most, name):
            return reason
    return None


def blocks_planned(capacity: Capacity) -> int | None:
    """Return the KV blocks admission may hand out, or None where the engine alone judges."""
    if capacity.kv is None or capacity.kv_blocks is None:
        return None
    return int(capacity.kv_blocks * capacity.kv_budget)


def misfit(capacity: Capacity, demand: Demand) -> Exclusion | None:
    """Return why the request could never run here, or None: waiting cannot change this."""
    if demand.total_tokens > capacity.context_tokens:
        return Exclusion.CONTEXT_EXCEEDED
    if demand.seqs > knee_seqs(capacity, demand.prompt_tokens):
        return Exclusion.SEQS_EXCEEDED
    planned = blocks_planned(capacity)
    if planned is not None and claim(capacity, demand).kv_blocks > planned:
        return Exclusion.KV_EXCEEDED
    return None


def refusal(capacity: Capacity, load: Load, demand: Demand) -> Exclusion | None:
    """Return why the request may not start, or None to admit it.

    The permanent reason is checked first: a request that can never fit must not be told to retry.
    """
    never = misfit(capacity, demand)
    if never is not None:
        return never
    return full(load, claim(capacity, demand), limits(capacity))


def retry_after_s(load: Load, residence_s: float, ahead: int = 0) -> float:
    """Return the seconds until a slot frees for a caller with `ahead` others before it.

    Little's law: sequences that stay `residence_s` on average leave at seqs / residence_s per second.
    """
    return (ahead + 1) * residence_s / max(1, load.seqs)
