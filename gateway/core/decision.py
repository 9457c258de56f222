"""A decision: which backends may run a request, in which order, and why all others may not."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from enum import StrEnum
from typing import overload

from gateway.core.load import NO_LOAD, Demand, Load
from gateway.core.request import Estimate
from gateway.core.value import valueclass


class Exclusion(StrEnum):
    """Why a decision excluded a backend. A small, fixed set: each is a metric label."""

    CONTEXT_EXCEEDED = "context_exceeded"  # prompt + output can never fit its window
    KV_EXCEEDED = "kv_exceeded"  # the request needs more KV blocks than its whole budget
    SEQS_EXCEEDED = "seqs_exceeded"  # more sequences than its knee
    MODALITY = "modality"  # it does not accept these images or audios
    WRONG_MODEL = "wrong_model"  # it serves another model
    WRONG_VERSION = "wrong_version"  # its engine's version is not allowed
    NOT_ASKED = "not_asked"  # its models have not been queried yet; known in a moment
    UNHEALTHY = "unhealthy"  # down, ejected, hung, booting
    DRAINING = "draining"  # the operator or the engine is draining it
    SWAPPED_OUT = "swapped_out"  # its box runs another model now
    AT_KNEE = "at_knee"  # full now
    KV_FULL = "kv_full"  # no KV blocks free now
    LONG_FULL = "long_full"  # at its limit of long documents
    LONG_PREFILL = "long_prefill"  # at its limit of long prompts in prefill
    PREFILL_BUSY = "prefill_busy"  # too much prefill outstanding
    SPILL_LONG = "spill_long"  # as a spill: a long prompt is in prefill or waiting there
    SPILL_PREFILL = "spill_prefill"  # as a spill: too much prefill outstanding
    SPILL_RESERVE = "spill_reserve"  # as a spill: the rest of its knee is reserved for its own class
    FAILED = "failed"  # this request has already failed there

    @property
    def is_permanent(self) -> bool:
        """Whether waiting can never help, because the request itself does not fit."""
        return self in _PERMANENT

    @property
    def is_busy(self) -> bool:
        """Whether it is temporary and worth waiting for: mostly until a request there ends."""
        return self in _BUSY


Objection = tuple[Exclusion, str]
"""Why a backend is excluded: the code, and an explanation in words."""

_PERMANENT = frozenset(
    {Exclusion.CONTEXT_EXCEEDED, Exclusion.KV_EXCEEDED, Exclusion.SEQS_EXCEEDED, Exclusion.MODALITY}
)
_BUSY = frozenset(
    {
        Exclusion.SWAPPED_OUT,
        Exclusion.NOT_ASKED,
        Exclusion.AT_KNEE,
        Exclusion.KV_FULL,
        Exclusion.LONG_FULL,
        Exclusion.LONG_PREFILL,
        Exclusion.PREFILL_BUSY,
        Exclusion.SPILL_LONG,
        Exclusion.SPILL_PREFILL,
        Exclusion.SPILL_RESERVE,
    }
)


@valueclass(frozen=True, slots=True)
class Candidate:
    """One backend as evaluated in a decision.

    Attributes:
        backend: Its id.
        pool: The pool in which it was considered.
        excluded: Why it is excluded, or None.
        detail: The explanation in words, with figures; of one that is not excluded, why others come first.
        scores: Each score before weighting, in 0..1; a cost in -1..0; saved prefill in seconds.
        score: Their weighted sum.
        load: Its load at that moment.
        knee_seqs: Its knee for this request's prompt length.
        claim: The load that the request adds there.
        limits: The highest load, this request included, at which it may start; checked by `Ledger.acquire`.
        is_spill: Whether an earlier pool of the class was the first choice.
    """

    backend: str
    pool: str
    excluded: Exclusion | None = None
    detail: str = ""
    scores: Mapping[str, float] = field(default_factory=dict)
    score: float = 0.0
    load: Load = NO_LOAD
    knee_seqs: int = 0
    claim: Load = NO_LOAD
    limits: Load = NO_LOAD
    is_spill: bool = False


class Ranking(Sequence[Candidate]):
    """The backends of a decision: eligible ones, best first, then the excluded ones with their reasons.

    Most requests need only the first. The others are computed on demand, from the snapshots taken at the
    moment of the decision.

    Attributes:
        first: The best eligible backend, or None. Its scores are in `all` only.
        passed_over: Excluded backends that were evaluated before the first was found, with the reason.
    """

    __slots__ = ("_all", "_work_out", "first", "passed_over")

    def __init__(
        self,
        first: Candidate | None,
        passed_over: tuple[tuple[str, Exclusion], ...],
        work_out: Callable[[], tuple[Candidate, ...]],
    ) -> None:
        """Set the known part; `work_out` returns all candidates, and the same ones at any time."""
        self.first = first
        self.passed_over = passed_over
        self._work_out = work_out
        self._all: tuple[Candidate, ...] | None = None

    @property
    def all(self) -> tuple[Candidate, ...]:
        """All candidates."""
        if self._all is None:
            self._all = self._work_out()
        return self._all

    @property
    def may_start(self) -> bool:
        """Whether the request can start on one of them, now or after a wait."""
        return self.first is not None or any(reason.is_busy for _, reason in self.passed_over)

    @property
    def eligible(self) -> tuple[Candidate, ...]:
        """The eligible candidates, best first."""
        return tuple(candidate for candidate in self.all if candidate.excluded is None)

    @overload
    def __getitem__(self, index: int) -> Candidate: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Candidate, ...]: ...

    def __getitem__(self, index: int | slice) -> Candidate | tuple[Candidate, ...]:
        return self.all[index]

    def __len__(self) -> int:
        return len(self.all)


@valueclass(frozen=True, slots=True)
class Decision:
    """Where a request may run, in order of preference, and why every other backend is excluded.

    Attributes:
        model: Id of the model policy that applied.
        traffic_class: The class of the request, and `class_reason`: why it is in that class.
        pools: The class's pools; the later ones are spill.
        estimate: The prompt's length.
        demand: Resources that the request needs.
        candidates: The eligible backends, best first, then the excluded ones with their reasons.
    """

    model: str
    traffic_class: str
    class_reason: str
    pools: tuple[str, ...]
    estimate: Estimate
    demand: Demand
    candidates: Ranking
