"""A vLLM engine in virtual time: which sequences share a step, how long it takes, which gain tokens.

Pure: it has no clock. Its owner asks for the next step (`schedule`), lets the step's duration pass in its own
time (the simulated backend sleeps, a benchmark adds it up), and then fetches the tokens that were produced
(`complete`). Sequences may be submitted and aborted at any time in between.

The scheduler is vLLM V1's, as far as throughput and latency depend on it:

    1. running sequences decode first; each takes 1 + draft tokens of the step's token budget
    2. then unfinished prefills, in the order of admission, one chunk each
    3. then waiting sequences, first come first served, while the token budget, max_num_seqs and
       free KV blocks allow; the first that does not fit stops the admission
    4. if the cache of a running sequence has to grow and no block is free, the newest running
       sequence is preempted: it loses its blocks and is recomputed from the front of the queue

A sequence's first token comes at the end of the step that completes its prompt; from then on it gains
`accept` tokens per step. A sequence that can never fit the cache blocks the queue behind it forever, as in
vLLM (#39734).

Of a prompt submitted with the keys of its blocks, those in the prefix cache are not computed again. A
sequence counts the KV blocks of its whole context nevertheless, also of what it shares with others.
"""

from collections import deque
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Protocol

from gateway.core.backends import Capacity
from gateway.core.kv import KvFormula
from gateway.core.perf import PerfModel
from gateway.core.prefix_cache import BLOCK_TOKENS, PrefixCache
from gateway.core.profile import EngineFlags
from gateway.core.value import valueclass

DEFAULT_MAX_NUM_SEQS = 256
"""Maximum batch for recipes without `--max-num-seqs`: vLLM's own default."""


class Deployment(Protocol):
    """Parameters of a server's engine; `Profile` implements it."""

    @property
    def capacity(self) -> Capacity:
        """Its capacity."""

    @property
    def perf(self) -> PerfModel:
        """Its latency model."""

    @property
    def flags(self) -> EngineFlags:
        """Its launch flags."""


@dataclass(slots=True, eq=False)
class _Seq:
    """The state of one sequence. Mutable: it lives as long as the request."""

    id: int
    prompt: int
    output: int
    generated: int = 0
    target: int = 0  # tokens to compute before it decodes: the prompt, plus those discarded by a preemption
    computed: int = 0  # of these, computed
    credit: float = 0.0  # fraction of a token still due from speculative decoding
    held: int = 0  # KV blocks
    room: int = 0  # context length for which its blocks suffice
    aborted: bool = False
    keys: SequenceOf[int] = ()  # of its blocks in the prefix cache
    cached: int = 0  # how many of these it uses
    found_tokens: int = 0  # of the prompt, when it was first admitted
    common: int = 0  # how many blocks were kept when it was admitted, whether or not it could go on there

    @property
    def context(self) -> int:
        return self.prompt + self.generated


@valueclass(frozen=True, slots=True)
class Batch:
    """A scheduled step.

    Attributes:
        duration_s: Its duration.
        started: Ids of sequences that left the queue for it.
        preempted: Ids of sequences that lost their blocks to it.
    """

    duration_s: float
    started: tuple[int, ...] = ()
    preempted: tuple[int, ...] = ()


@valueclass(frozen=True, slots=True)
class StepResult:
    """The result of a step.

    Attributes:
        emitted: `(id, new tokens)` per sequence that gained any, oldest first.
        first: Ids whose first token is among them.
        finished: Ids that reached their output length; they have left the engine.
    """

    emitted: SequenceOf[tuple[int, int]] = ()
    first: SequenceOf[int] = ()
    finished: SequenceOf[int] = ()


@dataclass(slots=True)
class Engine:
    """The engine of one server. See the module docstring for what it models.

    Attributes:
        perf: Its step-time model.
        flags: Its launch flags.
        kv: The formula for blocks; None for an unlimited cache.
        kv_blocks: Size of the block pool; None likewise.
        preemptions: Sequences preempted since the start.
        queried_tokens: Prompt tokens admitted since the start.
        found_tokens: How many of these were in the prefix cache.
    """

    perf: PerfModel
    flags: EngineFlags
    kv: KvFormula | None = None
    kv_blocks: int | None = None
    preemptions: int = 0
    queried_tokens: int = 0
    found_tokens: int = 0
    _prefixes: PrefixCache = field(init=False)
    _decoding: list[_Seq] = field(default_factory=list)  # in order of admission
    _prefilling: list[_Seq] = field(default_factory=list)  # all newer than every decoding one
    _waiting: deque[_Seq] = field(default_factory=deque)
    _seqs: dict[int, _Seq] = field(default_factory=dict)
    _growing: list[_Seq] = field(default_factory=list)  # decoding, and out of blocks
    _used: int = 0  # blocks held by all sequences
    _step_decoding: list[_Seq] = field(default_factory=list)
    _step_chunks: list[tuple[_Seq, int]] = field(default_factory=list)
    _in_step: bool = False

    def __post_init__(self) -> None:
        kv = self.kv
        self._prefixes = PrefixCache(kv.window_tokens if kv is not None and kv.sliding_layers else 0)

    @classmethod
    def of(cls, profile: Deployment) -> "Engine":
        """Return the engine of a deployment."""
        capacity = profile.capacity
        return cls(profile.perf, profile.flags, capacity.kv, capacity.kv_blocks)

    # -------------------------------------------------------------- gauges

    @property
    def running(self) -> int:
        """Number of sequences in the batch, decoding or prefilling."""
        return len(self._decoding) + len(self._prefilling)

    @property
    def waiting(self) -> int:
        """Number of sequences in the queue."""
        return len(self._waiting)

    @property
    def kv_usage(self) -> float:
        """Share of the KV blocks in use, 0..1; 0 for an unlimited cache."""
        return self._used / self.kv_blocks if self.kv_blocks else 0.0

    @property
    def max_num_seqs(self) -> int:
        """Maximum number of sequences it runs at once."""
        return self.flags.max_num_seqs or DEFAULT_MAX_NUM_SEQS

    # -------------------------------------------------------------- requests

    def submit(self, seq_id: int, prompt_tokens: int, output_tokens: int, keys: SequenceOf[int] = ()) -> None:
        """Queue a sequence of `prompt_tokens` that will end after `output_tokens` (both at least 1).

        `keys`: of each whole block (`prefix_cache.BLOCK_TOKENS`) of the prompt, and of the output as far as
        they are known: a key stands for everything up to the end of its block. Without, nothing is cached.
        """
        if seq_id in self._seqs:
            raise ValueError(f"sequence {seq_id} is already in the engine")
        if prompt_tokens < 1 or output_tokens < 1:
            raise ValueError("a sequence has at least one prompt and one output token")
        seq = _Seq(seq_id, prompt_tokens, output_tokens, target=prompt_tokens, keys=keys)
        self._seqs[seq_id] = seq
        self._waiting.append(seq)

    def abort(self, seq_id: int) -> bool:
        """Remove a sequence and free its blocks at once; return whether it existed.

        A step in progress is not shortened, but the sequence gains nothing from it.
        """
        seq = self._seqs.pop(seq_id, None)
        if seq is None:
            return False
        seq.aborted = True
        self._free(seq)
        for members in (self._decoding, self._prefilling, self._waiting, self._growing):
            if seq in members:
                members.remove(seq)
        return True

    def cached_tokens(self, seq_id: int) -> int:
        """Return how many prompt tokens of a sequence were in the prefix cache when it left the queue."""
        return self._seqs[seq_id].found_tokens

    def forget_prefixes(self) -> None:
        """Empty the prefix cache, except for what sequences use."""
        self._prefixes.clear()

    # -------------------------------------------------------------- steps

    def schedule(self) -> Batch | None:
        """Form the next step; None if nothing can run (idle, or blocked forever).

        Every `schedule` that returns a batch must be followed by one `complete`.
        """
        if self._in_step:
            raise RuntimeError("the step before has not been completed")
        preempted = self._grow()
        budget = self.flags.max_num_batched_tokens
        cost = 1 + self.perf.draft
        self._step_decoding = self._decoding[: budget // cost]
        budget -= len(self._step_decoding) * cost
        self._step_chunks = []
        budget, blocked = self._continue_prefills(budget)
        started = [] if blocked or preempted else self._admit(budget)
        if not self._step_decoding and not self._step_chunks:
            return None
        self._in_step = True
        self.preemptions += len(preempted)
        return Batch(self._duration_s(), tuple(started), tuple(preempted))

    def complete(self) -> StepResult:
        """Complete the scheduled step, and return what it produced."""
        if not self._in_step:
            raise RuntimeError("no step has been scheduled")
        self._in_step = False
        emitted: list[tuple[int, int]] = []
        finished: list[_Seq] = []
        accept = self.perf.accept
        for seq in self._step_decoding:
            if seq.aborted:
                continue
            credit = seq.credit + accept
            gained = int(credit)
            seq.credit = credit - gained
            if gained:
                self._gain(seq, gained, emitted, finished)
        first = self._complete_prefills(emitted, finished)
        if finished:
            done = set(map(id, finished))
            self._decoding = [seq for seq in self._decoding if id(seq) not in done]
            for seq in finished:
                self._free(seq)
                del self._seqs[seq.id]
        return StepResult(emitted, first, [seq.id for seq in finished])

    # -------------------------------------------------------------- internals

    def _gain(self, seq: _Seq, tokens: int, emitted: list[tuple[int, int]], finished: list[_Seq]) -> None:
        left = seq.output - seq.generated
        if tokens >= left:
            tokens = left
            finished.append(seq)
        seq.generated += tokens
        emitted.append((seq.id, tokens))
        if tokens < left and seq.prompt + seq.generated > seq.room:
            self._growing.append(seq)

    def _complete_prefills(self, emitted: list[tuple[int, int]], finished: list[_Seq]) -> list[int]:
        first: list[int] = []
        for seq, chunk in self._step_chunks:
            if seq.aborted:
                continue
            seq.computed += chunk
            # The sliding layers free what the chunk held beyond their window.
            self._hold(seq, seq.computed)
            if seq.computed < seq.target:
                continue
            self._prefilling.remove(seq)
            self._decoding.append(seq)
            if seq.generated == 0:
                first.append(seq.id)
            self._gain(seq, 1, emitted, finished)
        return first

    def _grow(self) -> list[int]:
        """Allocate blocks to growing sequences, preempting the newest while none are free."""
        preempted: list[int] = []
        growing, self._growing = self._growing, []
        for seq in growing:
            if seq.held == 0:
                continue  # it has just been preempted for an older one
            while not self._take(seq, self._blocks(seq.context)):
                victim = self._preempt_newest()
                preempted.append(victim.id)
                if victim is seq:
                    break
            else:
                self._note_room(seq, seq.context)
        return preempted

    def _preempt_newest(self) -> _Seq:
        victim = (self._prefilling or self._decoding).pop()
        self._free(victim)
        victim.computed = 0
        victim.credit = 0.0
        victim.target = victim.context
        self._waiting.appendleft(victim)
        return victim

    def _continue_prefills(self, budget: int) -> tuple[int, bool]:
        """Process a chunk of unfinished prefills; return the remaining budget and whether one is stuck."""
        for seq in self._prefilling:
            if budget == 0:
                return 0, True
            chunk = min(budget, seq.target - seq.computed)
            if not self._take(seq, self._chunk_blocks(seq.computed, chunk)):
                return budget, True
            self._step_chunks.append((seq, chunk))
            self._note_cached(seq, seq.computed + chunk)
            budget -= chunk
        return budget, False

    def _admit(self, budget: int) -> list[int]:
        started: list[int] = []
        while self._waiting and budget > 0 and self.running < self.max_num_seqs:
            seq = self._waiting[0]
            if self.flags.reserve_full_isl and self._blocks(seq.target) > self._free_blocks():
                break
            # The last token is always computed: the next one follows from it.
            blocks_found, seq.common = self._prefixes.found(seq.keys[: (seq.target - 1) // BLOCK_TOKENS])
            found = blocks_found * BLOCK_TOKENS
            chunk = min(budget, seq.target - found)
            blocks = self._chunk_blocks(found, chunk)
            if blocks > self._free_blocks():
                break
            self._note_found(seq, found)  # before it takes blocks, which may be these
            self._take(seq, blocks)
            self._waiting.popleft()
            self._prefilling.append(seq)
            self._step_chunks.append((seq, chunk))
            self._note_cached(seq, found + chunk)
            started.append(seq.id)
            budget -= chunk
        return started

    def _note_found(self, seq: _Seq, tokens: int) -> None:
        seq.computed = tokens
        self._note_cached(seq, tokens)
        if seq.generated == 0:
            seq.found_tokens = tokens
            self.queried_tokens += seq.prompt
            self.found_tokens += tokens

    def _note_cached(self, seq: _Seq, computed: int) -> None:
        """Use the blocks that are computed, from now on: vLLM finds them in the same step already."""
        whole = min(len(seq.keys), computed // BLOCK_TOKENS)
        if whole > seq.cached:
            self._prefixes.use(seq.keys[seq.cached : whole])
            seq.cached = whole
            for end in ((seq.prompt - 1) // BLOCK_TOKENS, seq.common):
                self._prefixes.keep_window(seq.keys, end, whole)

    def _duration_s(self) -> float:
        attention = sum(chunk * (seq.computed + chunk / 2) for seq, chunk in self._step_chunks)
        contexts = [seq.prompt + seq.generated for seq in self._step_decoding]
        return self.perf.step_s(
            decoding=len(contexts),
            context_sum=sum(contexts),
            context_max=max(contexts, default=0),
            prefill_tokens=sum(chunk for _, chunk in self._step_chunks),
            prefill_attn=attention,
        )

    # -------------------------------------------------------------- blocks

    def _blocks(self, context: int) -> int:
        return self.kv.blocks(context) if self.kv is not None else 0

    def _chunk_blocks(self, computed: int, chunk: int) -> int:
        """Return the blocks held during a chunk: every sliding layer keeps its window plus the chunk."""
        return self.kv.boot_blocks(computed + chunk, chunk) if self.kv is not None else 0

    def _free_blocks(self) -> int:
        return self.kv_blocks - self._used if self.kv_blocks is not None else 1 << 62

    def _take(self, seq: _Seq, blocks: int) -> bool:
        """Let a sequence hold `blocks` in total, if the pool has them."""
        if blocks - seq.held > self._free_blocks():
            return False
        self._used += blocks - seq.held
        seq.held = blocks
        self._prefixes.shrink(self._free_blocks())
        return True

    def _hold(self, seq: _Seq, context: int) -> None:
        blocks = self._blocks(context)
        self._used += blocks - seq.held
        seq.held = blocks
        self._note_room(seq, context)

    def _note_room(self, seq: _Seq, context: int) -> None:
        if self.kv is None:
            seq.room = 1 << 62
        else:
            page = self.kv.sliding_block_tokens
            seq.room = -(-context // page) * page

    def _free(self, seq: _Seq) -> None:
        if seq.cached:
            tokens = seq.cached * BLOCK_TOKENS
            if seq.computed == seq.target:  # with its output
                tokens = seq.context
                self._note_cached(seq, tokens)
            self._prefixes.release(seq.keys[: seq.cached], seq.held * BLOCK_TOKENS / tokens)
            seq.cached = 0
        self._used -= seq.held
        seq.held = 0
