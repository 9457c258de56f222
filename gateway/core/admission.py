"""Admission: may this request start on this backend now?

A bandwidth-bound server gains nothing beyond its *knee*: total output tokens/s stays flat, while the time
per output token of every request grows. So the gateway stops at the knee, and lets requests wait or go
elsewhere. A request *claims* amounts of several integer counters, and starts if none of these would exceed
its *limit*:

* Sequences. A knee is a curve over prompt length, not a number: an H100 holds 64 short chats but about 12
  prompts of sixteen thousand tokens. So a sequence takes a share of `1 / knee(length)` of its backend, and
  all shares in flight may not exceed the whole. Shares are integers (millionths), so that all stores compute
  the same sums.
* KV blocks, by the model's own formula (core/kv.py).
* Long prompts: how many a backend prefills at once, and how many it holds.
* Outstanding prefill work, in milliseconds as predicted by the backend's latency model. A backend accepts a
  prompt of any size while less than the bound is outstanding: with a bound on the sum, small prompts would
  starve a large one.

Pure: no clock, no I/O. The store only compares and counts, atomically, and a contract test runs all stores
against one table of cases.
"""

from bisect import bisect_right
from collections.abc import Mapping
from functools import lru_cache

from gateway.core.backends import OPEN, Backend, Capacity, Gates, JobRoom, KneeStep, Spill
from gateway.core.decision import Exclusion
from gateway.core.load import NO_LOAD, UNLIMITED, Demand, Load
from gateway.core.perf import PerfModel
from gateway.core.quirks.context_buckets import padded

WHOLE = 1_000_000
"""A backend's whole knee, in units of `Load.share`: millionths, so that every store adds them up alike
(docs/decisions/0005-knee-shares.md)."""

PROMPT_TOKENS_MAX = 1_048_576
"""The longest prompt whose prefill time is predicted, chunk by chunk. A choice: four times the largest
window. Longer ones are rejected; their size is unbounded, because callers choose the token budget of their
images."""


def knee_step(capacity: Capacity, prompt_tokens: int) -> KneeStep:
    """Return the step of the knee curve for prompts of that length."""
    for step in capacity.knee:
        if step.prompt_tokens_max is None or prompt_tokens <= step.prompt_tokens_max:
            return step
    return capacity.knee[-1]


def knee_seqs(capacity: Capacity, prompt_tokens: int) -> int:
    """Return how many sequences with prompts of that length saturate the backend."""
    return knee_step(capacity, prompt_tokens).seqs


def prefill_s(backend: Backend, demand: Demand, cached: float = 0.0) -> float:
    """Return the predicted prefill time on an idle backend, in seconds; 0 without a latency model.

    For a prompt longer than `PROMPT_TOKENS_MAX`, the time of one of that length. `cached`: the share (0..1)
    of the prompt, from its beginning, that the backend has in its prefix cache.
    """
    perf = backend.perf
    if perf is None:
        return 0.0
    tokens = padded(backend.quirks, demand.prompt_tokens)
    whole_s = _prefill_s(perf, tokens, backend.batched_tokens)
    if not cached:
        return whole_s
    return max(0.0, whole_s - _prefill_s(perf, int(cached * tokens), backend.batched_tokens))


def read_alike(one: Backend, other: Backend) -> bool:
    """Return whether two backends certainly have the same prefill time for any prompt, as replicas do."""
    return (
        one.perf is other.perf  # shared by all backends with one profile
        and one.batched_tokens == other.batched_tokens
        and one.quirks == other.quirks
    )


@lru_cache(maxsize=4096)
def _prefill_s(perf: PerfModel, prompt_tokens: int, batched_tokens: int) -> float:
    """Cached: the backends of a pool are alike, and a request may be decided several times."""
    if prompt_tokens > PROMPT_TOKENS_MAX:
        return _prefill_s(perf, PROMPT_TOKENS_MAX, batched_tokens)
    return perf.prefill_s(prompt_tokens, batched_tokens)


def is_long(gates: Gates, demand: Demand) -> bool:
    """Return whether the prompt counts as long in a pool with these gates."""
    return demand.prompt_tokens >= gates.long_prompt_tokens


def claim(
    capacity: Capacity, demand: Demand, gates: Gates = OPEN, prefill_s: float = 0.0, cached: float = 0.0
) -> Load:
    """Return what a request occupies on a backend while it runs there.

    `prefill_s` is the prefill time of one of its prompts. Several sequences of one prompt count as a single
    prefill: the engine processes the prompt once and shares its blocks. `cached`: the share (0..1) of the
    prompt in the backend's prefix cache. It needs a slot and blocks like the rest, but no prefill.
    """
    knee = knee_seqs(capacity, demand.prompt_tokens)
    long = is_long(gates, demand)
    prefills_long = long and (1 - cached) * demand.prompt_tokens >= gates.long_prompt_tokens
    return Load(
        demand.seqs,
        # Rounding down lets exactly `knee` sequences fit, for every knee below 1,000.
        demand.seqs * (WHOLE // knee),
        0 if capacity.kv is None else demand.seqs * capacity.kv.blocks(demand.total_tokens),
        demand.seqs if long else 0,
        demand.prompts if prefills_long else 0,
        round(1000 * prefill_s * demand.prompts),
    )


def limits(
    capacity: Capacity,
    wanted: Load = NO_LOAD,
    gates: Gates = OPEN,
    share_max: int = WHOLE,
    kv_taken: int = 0,
) -> Load:
    """Return the maximum load of a backend after a request that claims `wanted` has started there.

    `share_max` is the usable part of the knee, `kv_taken` the blocks in use by others. Where a limit is below
    what a single fitting request needs, that request may still run alone.
    """
    planned = blocks_planned(capacity)
    blocks = UNLIMITED if planned is None else max(planned - kv_taken, min(planned, wanted.kv_blocks))
    # A long prompt in a pool without concurrent prefills starts only on an empty backend.
    alone = gates.long_prefills == 0 and wanted.long_unanswered > 0
    return Load(
        wanted.seqs if alone else UNLIMITED,
        max(share_max, min(WHOLE, wanted.share)),
        blocks,
        UNLIMITED if gates.long_seqs is None else max(gates.long_seqs, wanted.long_seqs),
        UNLIMITED if gates.long_prefills is None else max(1, gates.long_prefills, wanted.long_unanswered),
        _below(gates.prefill_s, wanted),
    )


def spill_limits(
    capacity: Capacity,
    most: Load,
    wanted: Load,
    load: Load,
    gates: Gates,
    rules: Spill,
    share_max: int = WHOLE,
) -> Load:
    """Return `most` reduced for requests whose first choice was another pool.

    The reserve is a part of the usable share `share_max` of the knee. It is meant for the pool's own long
    documents: those in `load` use it up instead of adding to it. A request that needs more than the rest may
    run alone, because otherwise it would wait forever.
    """
    own = load.long_seqs * (WHOLE // knee_seqs(capacity, gates.long_prompt_tokens + 1))
    reserved = max(0, round(rules.reserve * share_max) - own)
    return Load(
        most.seqs,
        min(most.share, max(share_max - reserved, min(WHOLE, wanted.share))),
        most.kv_blocks,
        most.long_seqs,
        most.long_unanswered,
        min(most.prefill_ms, _below(rules.prefill_s, wanted)),
    )


def job_reserve(share_max: int, seq_share: int, reserve: float) -> int:
    """Return what jobs leave free of a usable share of the knee, in millionths.

    It is a part `reserve` (0..1) of it, rounded down to whole sequences with short prompts, which take
    `seq_share` each: a backend with a knee of 4 has none.
    """
    return int(reserve * min(WHOLE, share_max) / seq_share) * seq_share


def job_limits(capacity: Capacity, most: Load, wanted: Load, rules: JobRoom) -> Load:
    """Return `most` reduced for jobs, so that requests whose callers are waiting find room at once.

    A job that needs more than the rest may run alone.
    """
    reserved = job_reserve(most.share, WHOLE // knee_seqs(capacity, 0), rules.reserve)
    blocks = most.kv_blocks
    if blocks != UNLIMITED:
        blocks = max(blocks - int(rules.reserve * blocks), min(blocks, wanted.kv_blocks))
    return Load(
        most.seqs,
        max(most.share - reserved, min(WHOLE, wanted.share)),
        blocks,
        most.long_seqs,
        most.long_unanswered,
        min(most.prefill_ms, _below(rules.prefill_s, wanted)),
    )


def _below(bound_s: float | None, wanted: Load) -> int:
    """Return the limit on `prefill_ms` that admits any prompt while less than the bound is outstanding."""
    return UNLIMITED if bound_s is None else max(1, round(1000 * bound_s)) - 1 + wanted.prefill_ms


COUNTERS: Mapping[str, Exclusion] = {
    "seqs": Exclusion.AT_KNEE,
    "share": Exclusion.AT_KNEE,
    "kv_blocks": Exclusion.KV_FULL,
    "long_seqs": Exclusion.LONG_FULL,
    "long_unanswered": Exclusion.LONG_PREFILL,
    "prefill_ms": Exclusion.PREFILL_BUSY,
}
"""The counters of `Load` in the order of checking, with the exclusion for each if it is full."""


def full(load: Load, wanted: Load, most: Load) -> Exclusion | None:
    """Return the first counter of `load` that `wanted` would take above `most`, or None.

    Counters that `wanted` does not use are not checked: a chat is not refused because of running documents.
    """
    if load.has_room(wanted, most):  # the common case
        return None
    for name, reason in COUNTERS.items():
        extra = getattr(wanted, name)
        if extra and getattr(load, name) + extra > getattr(most, name):
            return reason
    return None


def blocks_planned(capacity: Capacity) -> int | None:
    """Return the KV blocks that may be used, or None if only the engine decides."""
    if capacity.kv is None or capacity.kv_blocks is None:
        return None
    return int(capacity.kv_blocks * capacity.kv_budget)


def tokens_max(capacity: Capacity, demand: Demand) -> int:
    """Return how many tokens, prompt and output, each sequence of a request may have at most."""
    window, planned = capacity.context_tokens, blocks_planned(capacity)
    if planned is None or capacity.kv is None:
        return window
    return bisect_right(range(window + 1), planned // demand.seqs, key=capacity.kv.blocks) - 1


def misfit(capacity: Capacity, demand: Demand, kv_blocks: int | None = None) -> Exclusion | None:
    """Return why the request could never run here, or None. Waiting cannot change this.

    `kv_blocks`: the blocks it claims, if already known.
    """
    if demand.total_tokens > capacity.context_tokens:
        return Exclusion.CONTEXT_EXCEEDED
    if demand.seqs > knee_seqs(capacity, demand.prompt_tokens):
        return Exclusion.SEQS_EXCEEDED
    planned = blocks_planned(capacity)
    if planned is None:
        return None
    if (claim(capacity, demand).kv_blocks if kv_blocks is None else kv_blocks) > planned:
        return Exclusion.KV_EXCEEDED
    return None
