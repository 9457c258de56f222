"""What a run of the routing benchmark is worth: the same figures for virtual time and for real sockets."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import inf
from statistics import fmean

from benchmarks.traffic import Kind
from benchmarks.virtual_fleet import Fate, fleet_profiles

WARM_UP_S = 120.0


@dataclass(frozen=True, slots=True)
class Score:
    """What one run measured, of requests that arrived after the warm-up.

    Attributes:
        chat, long, reasoning: Goodput: share of those offered that finished inside their objective.
        chat_60ms: The same for chat with at most 60 ms per output token.
        refused: Share of chats that were turned away.
        chat_ttft_p50_s, chat_ttft_p99_s: Of chats that had a first token.
        chat_tpot_s: Mean, of chats that finished.
        long_ttft_p50_s, long_tpot_s: The same for documents.
        tokens_per_s: Output tokens of the whole fleet.
        misfits: Requests sent where window or KV could never hold them.
        above_cap: Times a server held more than the policy's cap; 0 where it has none.
        kv_max: Highest share of a KV pool in use.
        seconds: Real time the run took.
    """

    chat: float
    long: float
    reasoning: float
    chat_60ms: float
    refused: float
    chat_ttft_p50_s: float
    chat_ttft_p99_s: float
    chat_tpot_s: float
    long_ttft_p50_s: float
    long_tpot_s: float
    tokens_per_s: float
    misfits: float
    above_cap: float
    kv_max: float
    seconds: float


def score(
    fates: Sequence[Fate],
    *,
    tokens_per_s: float,
    misfits: int,
    above_cap: int,
    kv_max: float,
    seconds: float,
    warm_up_s: float = WARM_UP_S,
) -> Score:
    """Return what became of the requests of a run; the rest is what the fleet itself counted."""
    counted = [fate for fate in fates if fate.arrival.at >= warm_up_s]
    chats = [fate for fate in counted if fate.arrival.kind is Kind.CHAT]
    documents = [fate for fate in counted if fate.arrival.kind is Kind.LONG]
    jobs = [fate for fate in counted if fate.arrival.kind is Kind.REASONING and not fate.is_undecided]
    ttfts = sorted(fate.ttft_s for fate in chats if fate.ttft_s is not None)
    document_ttfts = [
        inf if fate.ttft_s is None else fate.ttft_s
        for fate in documents
        if fate.ttft_s is not None or fate.is_undecided  # what still waits at the end is late, not absent
    ]
    return Score(
        chat=mean([is_good(fate) for fate in chats]),
        long=mean([is_good(fate) for fate in documents]),
        reasoning=mean([is_good(fate) for fate in jobs]),
        chat_60ms=mean([is_good(fate) and fate.tpot_s <= 0.06 for fate in chats]),
        refused=mean([bool(fate.refused) for fate in chats]),
        chat_ttft_p50_s=quantile(ttfts, 0.5),
        chat_ttft_p99_s=quantile(ttfts, 0.99),
        chat_tpot_s=mean([fate.tpot_s for fate in chats if fate.done_at is not None]),
        long_ttft_p50_s=quantile(sorted(document_ttfts), 0.5),
        long_tpot_s=mean([fate.tpot_s for fate in documents if fate.done_at is not None]),
        tokens_per_s=tokens_per_s,
        misfits=misfits,
        above_cap=above_cap,
        kv_max=kv_max,
        seconds=seconds,
    )


def is_good(fate: Fate) -> bool:
    """Return whether a request finished inside its objective."""
    if fate.ttft_s is None or (fate.done_at is None and not fate.is_undecided):
        return False
    match fate.arrival.kind:
        case Kind.CHAT:
            return fate.ttft_s <= 2 and fate.tpot_s <= 0.2
        case Kind.LONG:
            return fate.ttft_s <= document_ttft_s(fate)
        case Kind.REASONING:
            return fate.done_at is not None and fate.done_at - fate.arrival.at <= 3600


def document_ttft_s(fate: Fate) -> float:
    """Return the seconds in which a document's first token is wanted."""
    push = PROFILES["push"]
    return 60 + push.perf.prefill_s(fate.arrival.prompt_tokens, push.flags.max_num_batched_tokens)


PROFILES = fleet_profiles()


def mean(values: Sequence[float]) -> float:
    """Return the arithmetic mean; 0 of nothing."""
    return fmean(values) if values else 0.0


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the value that `share` of an ascending list lies below; 0 of nothing."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def averaged(scores: Sequence[Score]) -> Score:
    """Return the means over several seeds."""
    return Score(**{one.name: fmean(getattr(score, one.name) for score in scores) for one in fields(Score)})


HEAD = (
    "| mix, load | policy | chat / long / reasoning | chat, TPOT <= 60 ms | refused | chat TTFT p50 / p99 s "
    "| chat TPOT ms | long TTFT p50 s | tokens/s | misfits | above cap | KV max |"
)


def row(mix: str, load: float, policy: str, score: Score) -> str:
    """Return one line of the table."""
    return (
        f"| {mix} {load:g} | {policy} | {score.chat:.2f} / {score.long:.2f} / {score.reasoning:.2f} "
        f"| {score.chat_60ms:.2f} | {score.refused:.1%} "
        f"| {score.chat_ttft_p50_s:.1f} / {score.chat_ttft_p99_s:.1f} | {1000 * score.chat_tpot_s:.0f} "
        f"| {score.long_ttft_p50_s:.0f} | {score.tokens_per_s:.0f} | {score.misfits:.0f} "
        f"| {score.above_cap:.0f} | {score.kv_max:.0%} |"
    )
