"""Engines that pad prompts to buckets, and the bucket at which they may stall while many requests run.

These quirks change no answer. The prediction of prefill (core/admission.py) and the ranking of backends
(core/selection.py) account for them.
"""

from collections.abc import Collection

from gateway.core.quirks.plan import Workaround

BUCKETS, STALL = "token_buckets_256", "context_2k_stall"

BUCKET_TOKENS = 256
"""`VLLM_TPU_BUCKET_PADDING_GAP` of the recipe (TPU-S)."""

STALL_TOKENS = 2_048
"""The context at which 256 users waited for 132 s (TPU-S)."""


def padded(quirks: Collection[str], prompt_tokens: int) -> int:
    """Return the number of tokens that an engine with these quirks computes for a prompt."""
    return -(-prompt_tokens // BUCKET_TOKENS) * BUCKET_TOKENS if BUCKETS in quirks else prompt_tokens


def stalls(quirks: Collection[str], prompt_tokens: int) -> bool:
    """Return whether a prompt falls into the bucket at which an engine with these quirks may stall."""
    return STALL in quirks and STALL_TOKENS - BUCKET_TOKENS < prompt_tokens <= STALL_TOKENS


BUCKETS_WORKAROUND = Workaround(issue="none: the recipe (TPU-S)", versions="vLLM on TPU v6e, May 2026")
STALL_WORKAROUND = Workaround(issue="none reported (TPU-S)", versions="vLLM on TPU v6e, May 2026")
