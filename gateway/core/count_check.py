"""Compares the gateway's count of requests with the engine's own.

The gateway counts requests from admission to their end; the engine reports what it runs and queues, and how
full its cache is. The two are never sampled at the same moment, so a single difference means nothing. A
difference in every sample of a minute is no coincidence: somebody else uses that server, or the gateway holds
slots for requests that have long ended.

Admission continues to use the gateway's count: two gateways that do not know of each other would else
starve each other. But what others run lowers the backend's score (`core.selection`). The cache is treated
differently: blocks held by others are not available, and the pool that admission plans with is reduced by
them.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from gateway.core.backends import Backend
from gateway.core.health import EngineSample
from gateway.core.kv import KvFormula
from gateway.core.load import Load
from gateway.core.value import valueclass

WINDOW_S = 60.0
"""How long a difference must last. A choice: a request that is being received, or whose last bytes are in
flight, is counted on one side only for milliseconds, about equally often on either."""

SAMPLES_MIN = 10
"""Minimum number of samples in that time. A choice: a sixth of what the default interval of probes brings."""

SAMPLES = 5
"""The minimum excess of this many latest samples is taken by others. A choice: the gateway's count is up to
one sample ahead."""


class Cause(StrEnum):
    """The meaning of a lasting difference."""

    NONE = "none"
    OTHERS = "others"  # the engine has more
    HELD = "held"  # the gateway counts more

    def sentence(self) -> str:
        """Return the meaning as a sentence for operators."""
        match self:
            case Cause.OTHERS:
                return "something else uses this server: another gateway without the same store, or a client"
            case Cause.HELD:
                return (
                    "slots are held for requests that the engine does not show: "
                    "it hangs or sleeps, callers are slow, or a leak"
                )
        return "no difference has lasted for a minute"


@valueclass(frozen=True, slots=True)
class CountDrift:
    """The difference between an engine's count and the gateway's.

    Attributes:
        backend: Its id.
        seqs: Sequences in the engine beyond those counted here, at the latest sample; negative for fewer.
        lasting_seqs: The part of it in every sample of the last minute; 0 while unknown.
        seqs_taken: The part of it in each of the latest few samples; at least 0.
        kv_blocks: Blocks in use beyond those reserved here, in each of the latest few samples; at least 0.
    """

    backend: str
    seqs: int = 0
    lasting_seqs: int = 0
    seqs_taken: int = 0
    kv_blocks: int = 0

    @property
    def cause(self) -> Cause:
        """The meaning of the lasting difference."""
        if self.lasting_seqs == 0:
            return Cause.NONE
        return Cause.OTHERS if self.lasting_seqs > 0 else Cause.HELD


@dataclass(slots=True)
class _Seen:
    seqs: deque[tuple[float, int]] = field(default_factory=deque)
    latest_seqs: deque[int] = field(default_factory=lambda: deque(maxlen=SAMPLES))
    kv_blocks: deque[int] = field(default_factory=lambda: deque(maxlen=SAMPLES))


class CountTracker:
    """Compares the two counts per backend, as samples arrive. Not thread-safe.

    Attributes:
        seqs_taken: Sequences run by others, for backends with any. Read-only.
        kv_taken: KV blocks held by others, likewise.
    """

    def __init__(self) -> None:
        self.seqs_taken: dict[str, int] = {}
        self.kv_taken: dict[str, int] = {}
        self._seen: dict[str, _Seen] = {}
        self._drifts: dict[str, CountDrift] = {}

    def observe(self, engine: EngineSample, load: Load, backend: Backend) -> tuple[CountDrift, CountDrift]:
        """Process a sample and the gateway's count at that time. Return the drift before and after."""
        backend_id, capacity = backend.id, backend.capacity
        seen = self._seen.setdefault(backend_id, _Seen())
        excess_seqs = engine.running + engine.waiting - load.seqs
        seen.seqs.append((engine.at, excess_seqs))
        seen.latest_seqs.append(excess_seqs)
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
            seqs_taken=_taken(seen.latest_seqs),
            kv_blocks=_taken(seen.kv_blocks),
        )
        self._drifts[backend_id] = after
        _set(self.seqs_taken, backend_id, after.seqs_taken)
        _set(self.kv_taken, backend_id, after.kv_blocks)
        return before, after

    def forget(self, backend_id: str) -> None:
        """Discard the history, because the gateway's own count was incomplete."""
        self._seen.pop(backend_id, None)
        self._drifts.pop(backend_id, None)
        self.seqs_taken.pop(backend_id, None)
        self.kv_taken.pop(backend_id, None)

    def drift(self, backend_id: str) -> CountDrift:
        """Return the current drift of a backend."""
        return self._drifts.get(backend_id) or CountDrift(backend_id)

    def drifts(self) -> Mapping[str, CountDrift]:
        """Return the current drift of all sampled backends, by id."""
        return dict(self._drifts)


def _taken(excess: deque[int]) -> int:
    return max(0, min(excess)) if len(excess) == SAMPLES else 0


def _set(taken: dict[str, int], backend_id: str, amount: int) -> None:
    if amount:
        taken[backend_id] = amount
    else:
        taken.pop(backend_id, None)


def _chunk_blocks(kv: KvFormula, batched_tokens: int) -> int:
    """Return the blocks that a chunk of a prompt takes in the sliding layers, beyond their window."""
    context_tokens = kv.window_tokens + batched_tokens
    return kv.boot_blocks(context_tokens, batched_tokens) - kv.blocks(context_tokens)


def _lasting(seqs: deque[tuple[float, int]]) -> int:
    # Nine tenths, because samples are not taken exactly at the ends of the minute.
    if len(seqs) < SAMPLES_MIN or seqs[-1][0] - seqs[0][0] < 0.9 * WINDOW_S:
        return 0
    least, most = min(excess for _, excess in seqs), max(excess for _, excess in seqs)
    return max(0, least) + min(0, most)
