"""What a request needs of a backend, and what a backend holds, in the same counters."""

from gateway.core.request import Estimate, Request
from gateway.core.value import valueclass


@valueclass(frozen=True, slots=True)
class Demand:
    """Resources that a request needs from a backend.

    Attributes:
        seqs: Sequences it will run.
        prompts: Distinct prompts among them; the sequences of one prompt share its prefill.
        prompt_tokens: Estimated prompt length, for the knee curve.
        total_tokens: Upper bound of the prompt plus planned output, per sequence; must fit the window.
        images, audios: Counts, for the modality filter.
        is_job: Whether it is a job, which leaves room for requests whose callers are waiting.
    """

    seqs: int
    prompt_tokens: int
    total_tokens: int
    images: int = 0
    audios: int = 0
    prompts: int = 1
    is_job: bool = False

    @classmethod
    def of(cls, request: Request, estimate: Estimate, output_tokens: int) -> "Demand":
        """Return the demand of a request with `output_tokens` of planned output."""
        return cls(
            request.seqs,
            estimate.tokens,
            estimate.tokens_max + output_tokens,
            request.images,
            request.audios,
            request.prompts,
            request.is_job,
        )


@valueclass(frozen=True, slots=True)
class Load:
    """Counters of a backend: its load in flight, the claim of one request, or its limits.

    All are integers, so that every store computes the same sums. The last two counters are released at the
    first token, the others at the end of the request.

    Attributes:
        seqs: Sequences.
        share: Share of the knee that they use, in millionths (see core/admission.py).
        kv_blocks: KV blocks reserved for them.
        long_seqs: Sequences with a long prompt.
        long_unanswered: Long prompts whose first token is outstanding.
        prefill_ms: Outstanding prefill, as predicted by the backend's latency model.
    """

    seqs: int = 0
    share: int = 0
    kv_blocks: int = 0
    long_seqs: int = 0
    long_unanswered: int = 0
    prefill_ms: int = 0

    def __add__(self, other: "Load") -> "Load":
        return Load(
            self.seqs + other.seqs,
            self.share + other.share,
            self.kv_blocks + other.kv_blocks,
            self.long_seqs + other.long_seqs,
            self.long_unanswered + other.long_unanswered,
            self.prefill_ms + other.prefill_ms,
        )

    def __sub__(self, other: "Load") -> "Load":
        return Load(
            self.seqs - other.seqs,
            self.share - other.share,
            self.kv_blocks - other.kv_blocks,
            self.long_seqs - other.long_seqs,
            self.long_unanswered - other.long_unanswered,
            self.prefill_ms - other.prefill_ms,
        )

    def is_within(self, most: "Load") -> bool:
        """Return whether no counter is above its limit."""
        return NO_LOAD.has_room(self, most)

    def has_room(self, wanted: "Load", most: "Load") -> bool:
        """Return whether no counter would be above its limit with `wanted` on top."""
        return (
            self.seqs + wanted.seqs <= most.seqs
            and self.share + wanted.share <= most.share
            and self.kv_blocks + wanted.kv_blocks <= most.kv_blocks
            and self.long_seqs + wanted.long_seqs <= most.long_seqs
            and self.long_unanswered + wanted.long_unanswered <= most.long_unanswered
            and self.prefill_ms + wanted.prefill_ms <= most.prefill_ms
        )

    @property
    def after_first_token(self) -> "Load":
        """The counters that remain after the first token."""
        return Load(self.seqs, self.share, self.kv_blocks, self.long_seqs)


NO_LOAD = Load()
"""The load of a backend without requests."""

UNLIMITED = 2**53 - 1
"""Limit of an unlimited counter: the largest integer that every store represents exactly."""
