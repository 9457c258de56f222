"""Per-backend measurements from the gateway's side, and the limits derived from them.

For each backend: the gap between chunks while it decodes (core/tpot_control.py), the share of its knee that
is in force if its pool promises a TPOT, and an estimate of its knee from its own steps
(core/knee_estimate.py). All state is in memory and bounded by the number of backends. A chunk costs one
counter increment.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import anyio

from gateway.core.admission import WHOLE, blocks_planned, knee_step
from gateway.core.backends import Backend, KneeStep
from gateway.core.count_check import CountTracker
from gateway.core.knee_estimate import ClassShape, KneeEstimate, StepFit, estimate
from gateway.core.load import Demand
from gateway.core.policy import Policy
from gateway.core.tpot_control import WINDOW_S, GapMeter, Move, TpotControl, TpotTarget, adjust
from gateway.core.usage import Usage
from gateway.core.value import valueclass
from gateway.pipeline.chunk_fast_path import Counter, NullCounter
from gateway.ports import Clock, Ledger, Slot

JUDGED_S = 120.0
"""How long a judgement of the current share remains valid. A choice: four of the control's intervals
(`core.tpot_control.DECIDE_S`)."""

_JUDGEMENTS = frozenset({Move.UP, Move.DOWN, Move.DOWN_ENGINE_QUEUE, Move.HELD_IN_BAND, Move.HELD_AT_LIMIT})


@dataclass(slots=True)
class _Watched:
    meter: GapMeter
    control: TpotControl = field(default_factory=TpotControl)
    fit: StepFit = field(default_factory=StepFit)
    shapes: dict[KneeStep, ClassShape] = field(default_factory=dict)
    judged_at: float | None = None  # when the current share was last confirmed or changed


@valueclass(frozen=True, slots=True)
class BackendSnapshot:
    """Measurements of one backend.

    Attributes:
        share: The share of its knee in force, 0..1.
        tpot_target_s: The TPOT promised by its pools, or None.
        control: State of the TPOT control.
        knees: Estimated knee per step of its knee curve. Advisory.
    """

    share: float
    tpot_target_s: float | None
    control: TpotControl
    knees: Mapping[KneeStep, KneeEstimate]


class AttemptWatch:
    """Observes one attempt. Only a stream with one choice reveals engine steps; all others are hidden."""

    __slots__ = (
        "_backend",
        "_chunks",
        "_demand",
        "_hidden_seqs",
        "_is_answered",
        "_is_spill",
        "_now",
        "_share",
        "_watched",
    )

    def __init__(
        self,
        watched: _Watched,
        backend: Backend,
        slot: Slot,
        demand: Demand,
        now: Callable[[], float],
        *,
        is_visible: bool,
        is_spill: bool,
    ) -> None:
        """Record that a request is being sent to `backend`, in `slot`."""
        self._watched = watched
        self._backend = backend
        self._demand = demand
        self._now = now
        self._share = slot.load.share
        self._hidden_seqs = 0 if is_visible else slot.load.seqs
        self._is_answered = False
        self._chunks = 0
        self._is_spill = is_spill
        watched.meter.opened(
            now(),
            share=self._share,
            hidden_seqs=self._hidden_seqs,
            is_job=demand.is_job,
            is_spill=is_spill,
        )

    def answered(self) -> None:
        """Record the first token."""
        if not self._hidden_seqs and not self._is_answered:
            self._is_answered = True
            self._watched.meter.answered(self._now(), prompt_tokens=self._demand.prompt_tokens)

    def chunk(self) -> None:
        """Record a read after the first token."""
        if self._is_answered:
            self._chunks += 1
            self._watched.meter.chunks += 1

    @property
    def counter(self) -> Counter:
        """The counter to increment per chunk, which saves a method call for each of them."""
        return self._watched.meter if self._is_answered else NullCounter()

    def counted(self, chunks: int) -> None:
        """Record the number of chunks counted with `counter`."""
        if self._is_answered:
            self._chunks += chunks

    def ended(self, usage: Usage | None) -> None:
        """Record the end of the attempt. `usage` is None if the answer was incomplete."""
        if usage is not None and (not self._is_answered or usage.completion_tokens < 2):
            usage = None  # it says nothing of the gaps between tokens
        self._watched.meter.ended(
            self._now(),
            share=self._share,
            hidden_seqs=self._hidden_seqs,
            is_job=self._demand.is_job,
            is_spill=self._is_spill,
            is_answered=self._is_answered,
            tokens=None if usage is None else usage.completion_tokens - 1,
            chunks=self._chunks,
        )
        if usage is not None:
            self._learn(usage)

    def _learn(self, usage: Usage) -> None:
        capacity = self._backend.capacity
        total_tokens = usage.prompt_tokens + usage.completion_tokens
        step = knee_step(capacity, usage.prompt_tokens)
        shapes = self._watched.shapes
        shapes[step] = shapes.get(step, ClassShape()).with_stream(
            prompt_tokens=usage.prompt_tokens,
            chunks=self._chunks,
            kv_blocks=0 if capacity.kv is None else capacity.kv.blocks(total_tokens),
        )


class BackendWatch:
    """Observes all backends of one gateway process. `run` must be running while requests are served."""

    def __init__(
        self, policy: Callable[[], Policy], ledger: Ledger, counts: CountTracker, clock: Clock
    ) -> None:
        """Observe the backends of `policy`, whose slots are counted by `ledger`.

        `counts` says what their engines have besides.
        """
        self._policy = policy
        self._ledger = ledger
        self._counts = counts
        self._clock = clock
        self._on_more: list[Callable[[], None]] = []
        self._watched: dict[str, _Watched] = {}
        self._elsewhere: dict[str, int] = {}
        self._seen_policy: Policy | None = None
        self._targeted: Sequence[str] = ()  # backends of that policy with a TPOT target

    def on_share_raised(self, callback: Callable[[], None]) -> None:
        """Register a callback for when more of a backend's knee may be used than before."""
        self._on_more.append(callback)

    def opened(
        self, backend: Backend, slot: Slot, demand: Demand, *, is_visible: bool, is_spill: bool = False
    ) -> AttemptWatch:
        """Record the start of an attempt. `is_visible`: whether it reveals engine steps."""
        watched = self._watched.get(backend.id)
        if watched is None:
            watched = self._watched[backend.id] = _Watched(GapMeter(self._clock.now()))
        if not self._ledger.is_local:
            self._note_others(backend.id, watched)
        return AttemptWatch(
            watched, backend, slot, demand, self._clock.now, is_visible=is_visible, is_spill=is_spill
        )

    def forget(self, backend_id: str) -> None:
        """Discard what was measured on a backend, because it is another server now."""
        self._watched.pop(backend_id, None)

    def share_max(self, backend_id: str) -> int:
        """Return how much of a backend's knee may be used, in millionths.

        This is the minimum over all gateways that could judge it recently. The gateway with the lowest share
        finds the backend full at that share and adjusts it; the others cannot judge it, and follow.
        """
        watched = self._watched.get(backend_id)
        own = WHOLE if watched is None else watched.control.share
        elsewhere = self._elsewhere.get(backend_id)
        if elsewhere is None or self._policy().tpot_target_s(backend_id) is None:
            return own
        return min(own, elsewhere) if self._has_judged(watched) else elsewhere

    def shares_max(self) -> Mapping[str, int]:
        """Return `share_max` per backend that a TPOT target keeps below its whole knee."""
        policy = self._policy()
        if policy is not self._seen_policy:
            self._seen_policy = policy
            self._targeted = [name for name in policy.backends if policy.tpot_target_s(name) is not None]
        shares = {}
        for name in self._targeted:
            share = self.share_max(name)
            if share < WHOLE:
                shares[name] = share
        return shares

    def shares(self) -> Mapping[str, int]:
        """Return the shares that this process's recent measurements led to, in millionths."""
        return {name: one.control.share for name, one in self._watched.items() if self._has_judged(one)}

    def note_shares(self, elsewhere: Mapping[str, int]) -> None:
        """Apply the lowest shares found by other gateways, replacing those noted before."""
        before, self._elsewhere = self._elsewhere, dict(elsewhere)
        if any(name not in elsewhere or elsewhere[name] > share for name, share in before.items()):
            self._more()

    def snapshots(self) -> Mapping[str, BackendSnapshot]:
        """Return the measurements of every backend that has served a request, by id."""
        policy = self._policy()
        return {
            name: _snapshot(self._watched[name], backend, policy.tpot_target_s(name), self.share_max(name))
            for name, backend in policy.backends.items()
            if name in self._watched
        }

    async def run(self) -> None:
        """Evaluate all backends periodically, until cancelled."""
        while True:
            await anyio.sleep(WINDOW_S)
            self.look()

    def look(self) -> None:
        """Close the measurement windows that are complete, and adjust the shares in force."""
        policy, now = self._policy(), self._clock.now()
        self._watched = {name: one for name, one in self._watched.items() if name in policy.backends}
        for name, watched in self._watched.items():
            self._note_others(name, watched)
            window = watched.meter.close(now)
            if window is None:
                continue
            strangers = max(0, self._counts.drift(name).lasting_seqs)
            watched.fit = watched.fit.with_window(window.beside(strangers))
            target_s = policy.tpot_target_s(name)
            before = watched.control.share
            if target_s is None:
                watched.control, watched.judged_at = TpotControl(), None
            else:
                self._follow(name, watched)
                target = TpotTarget.of(
                    policy.backends[name].capacity,
                    target_s,
                    policy.job_reserve(name),
                    policy.spill_reserve(name),
                )
                watched.control = adjust(watched.control, window, target)
                if watched.control.move in _JUDGEMENTS:
                    watched.judged_at = now
            if watched.control.share > before:
                self._more()

    def _has_judged(self, watched: _Watched | None) -> bool:
        if watched is None or watched.judged_at is None:
            return False
        return self._clock.now() - watched.judged_at < JUDGED_S

    def _follow(self, backend_id: str, watched: _Watched) -> None:
        """Adopt the share found by other gateways if there is no recent judgement here."""
        elsewhere = self._elsewhere.get(backend_id)
        if elsewhere is not None and not self._has_judged(watched):
            watched.control = replace(watched.control, share=elsewhere)

    def _more(self) -> None:
        for callback in self._on_more:
            callback()

    def _note_others(self, backend_id: str, watched: _Watched) -> None:
        others = self._ledger.others(backend_id)
        watched.meter.others(self._clock.now(), share=others.share, seqs=others.seqs)


def _snapshot(
    watched: _Watched, backend: Backend, tpot_target_s: float | None, share_max: int
) -> BackendSnapshot:
    planned = blocks_planned(backend.capacity)
    return BackendSnapshot(
        share=share_max / WHOLE,
        tpot_target_s=tpot_target_s,
        control=watched.control,
        knees={
            step: estimate(watched.fit, watched.shapes[step], planned)
            for step in backend.capacity.knee
            if step in watched.shapes
        },
    )
