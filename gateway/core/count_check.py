"""Truth check: does an engine hold what the gateway thinks it does?

The gateway counts what it has admitted and not seen the end of; the engine says what it runs and queues, and
how full its cache is. The two are never read at the same moment, so a single difference says nothing. What
is there at every sample of a minute is no coincidence: somebody else uses that server, or the gateway holds
places for requests that are long over.

The gateway's count stays what admission goes by. The cache is different: blocks that others hold are not
there to be given out, and the pool that admission plans with shrinks by them.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from gateway.core.health import EngineSample
from gateway.core.kv import KvFormula
from gateway.core.values import Backend, Load

WINDOW_S = 60.0
"""How long a difference must last. A request that is being received, or whose last bytes are on their way, is
counted here and not there for milliseconds, and about as often the other way round."""

SAMPLES_MIN = 10
"""Fewer samples in that time say nothing."""

KV_SAMPLES = 5
"""The smallest excess of the last so many samples counts: the gateway's count is up to a sample ahead."""


class Cause(StrEnum):
    """What a lasting difference means."""

    NONE = "none"
    OTHERS = "others"  # the engine has more
    HELD = "held"  # the gateway counts more

    def sentence(self) -> str:
        """Return the same for an operator."""
        match self:
            case Cause.OTHERS:
                return "something else uses this server: another gateway without the same store, or a client"
            case Cause.HELD:
                return "slots are held for requests that the engine does not have: slow callers, or a leak"
        return "the counts agree"


@dataclass(frozen=True, slots=True)
class CountDrift:
    """How an engine's count differs from the gateway's.

    Attributes:
        backend: Its id.
        seqs: Sequences the engine had beyond those counted here, at the last sample; negative for fewer.
        lasting_seqs: What of that was there at every sample of the last minute; 0 while that is not known.
        kv_blocks: Blocks in use beyond those reserved here, at each of the last few samples; never negative.
    """

    backend: str
    seqs: int = 0
    lasting_seqs: int = 0
    kv_blocks: int = 0

    @property
    def cause(self) -> Cause:
        """What the lasting difference means."""
        if self.lasting_seqs == 0:
            return Cause.NONE
        return Cause.OTHERS if self.lasting_seqs > 0 else Cause.HELD


@dataclass(slots=True)
class _Seen:
    seqs: deque[tuple[float, int]] = field(default_factory=deque)
    kv_blocks: deque[int] = field(default_factory=lambda: deque(maxlen=KV_SAMPLES))


class CountTracker:
    """Compares the two counts, backend by backend, as samples come in. Not thread-safe.

    Attributes:
        kv_taken: KV blocks that others hold, of the backends where there are any; to be read.
    """

    def __init__(self) -> None:
        self.kv_taken: dict[str, int] = {}
        self._seen: dict[str, _Seen] = {}
        self._drifts: dict[str, CountDrift] = {}

    def observe(self, engine: EngineSample, load: Load, backend: Backend) -> tuple[CountDrift, CountDrift]:
        """Note a backend's sample, and what was counted as it came. Returns the drift before and after."""
        backend_id, capacity = backend.id, backend.capacity
        seen = self._seen.setdefault(backend_id, _Seen())
        excess_seqs = engine.running + engine.waiting - load.seqs
        seen.seqs.append((engine.at, excess_seqs))
        while seen.seqs[0][0] < engine.at - WINDOW_S:
            seen.seqs.popleft()
        if capacity.kv is not None and capacity.kv_blocks is not None:
            chunk = _chunk_blocks(capacity.kv, backend.batched_tokens)
            own = load.kv_blocks + (chunk if load.seqs else 0)
            seen.kv_blocks.append(int(engine.kv_usage * capacity.kv_blocks) - own)
        before = self.drift(backend_id)
        after = CountDrift(
            backend=backend_id,
            seqs=excess_seqs,
            lasting_seqs=_lasting(seen.seqs),
            kv_blocks=max(0, min(seen.kv_blocks)) if len(seen.kv_blocks) == KV_SAMPLES else 0,
        )
        self._drifts[backend_id] = after
        if after.kv_blocks:
            self.kv_taken[backend_id] = after.kv_blocks
        else:
            self.kv_taken.pop(backend_id, None)
        return before, after

    def forget(self, backend_id: str) -> None:
        """Begin anew: the gateway's own count has not been the whole of it."""
        self._seen.pop(backend_id, None)
        self._drifts.pop(backend_id, None)
        self.kv_taken.pop(backend_id, None)

    def drift(self, backend_id: str) -> CountDrift:
        """Return how a backend's counts differ now."""
        return self._drifts.get(backend_id) or CountDrift(backend_id)

    def drifts(self) -> Mapping[str, CountDrift]:
        """Return the same for every backend that has been sampled, by id."""
        return dict(self._drifts)


def _chunk_blocks(kv: KvFormula, batched_tokens: int) -> int:
    """Return the blocks that a chunk of a prompt takes in the sliding layers, beside their window."""
    context_tokens = kv.window_tokens + batched_tokens
    return kv.boot_blocks(context_tokens, batched_tokens) - kv.blocks(context_tokens)


def _lasting(seqs: deque[tuple[float, int]]) -> int:
    # Nine tenths: samples do not come at the very ends of the minute.
    if len(seqs) < SAMPLES_MIN or seqs[-1][0] - seqs[0][0] < 0.9 * WINDOW_S:
        return 0
    least, most = min(excess for _, excess in seqs), max(excess for _, excess in seqs)
    return max(0, least) + min(0, most)
