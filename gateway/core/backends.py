"""Backends, and pools of them: where requests can run, with their limits. Independent of any vendor."""

from dataclasses import dataclass

from gateway.core.kv import KvFormula
from gateway.core.perf import PerfModel
from gateway.core.value import valueclass
from gateway.core.versions import VersionBound


@dataclass(frozen=True, slots=True)
class KneeStep:
    """One step of a backend's knee curve: up to this prompt length, this many sequences.

    `prompt_tokens_max` is None for the last step, which has no upper end.
    """

    prompt_tokens_max: int | None
    seqs: int


@dataclass(frozen=True, slots=True)
class Capacity:
    """Capacity of one backend. Each figure is measured, or labelled if not: docs/measurements.md.

    Attributes:
        context_tokens: Prompt plus output of one sequence (the engine's `max_model_len`).
        knee: Concurrent sequences at which output tokens/s stops growing, by prompt length; ascending.
        kv: Formula that counts KV blocks, or None to leave KV admission to the engine.
        kv_blocks: Size of the KV pool in blocks, or None to leave KV admission to the engine.
        kv_budget: Share of `kv_blocks` that admission may use, 0..1.
    """

    context_tokens: int
    knee: tuple[KneeStep, ...]
    kv: KvFormula | None = None
    kv_blocks: int | None = None
    kv_budget: float = 0.9

    def __hash__(self) -> int:
        return self.context_tokens  # cheap, and selective enough: capacities are cache keys


@valueclass(frozen=True, slots=True)
class Modalities:
    """Inputs a deployment accepts besides text. 0: not accepted. None: no limit."""

    images_max: int | None = 0
    audios_max: int | None = 0


@valueclass(frozen=True, slots=True)
class Backend:
    """One server with one URL and one knee.

    Attributes:
        id: Its name in the configuration.
        url: Base URL without a trailing slash and without `/v1`.
        model: The name under which it serves the model, or None to learn it from `/v1/models`.
        profile: Name of the profile its figures come from.
        capacity: How much load it can hold.
        modalities: Inputs it accepts besides text.
        tokens_per_s: Decode rate of a single stream, for the `speed` score; None if unknown.
        boot_budget_s: How long it may take to boot before that counts as a fault.
        drain: Set by the operator: finish running requests, take no new ones.
        perf: Its latency model, to predict prefill time; None if its profile has none.
        batched_tokens: Prompt tokens of one engine step (`max_num_batched_tokens`).
        versions: Allowed engine versions; () for any.
        quirks: Names of known faults of its engine (listed in docs/profiles.md).
    """

    id: str
    url: str
    capacity: Capacity
    model: str | None = None
    profile: str = ""
    modalities: Modalities = Modalities()
    tokens_per_s: float | None = None
    boot_budget_s: float = 600.0
    drain: bool = False
    perf: PerfModel | None = None
    batched_tokens: int = 8192
    versions: tuple[VersionBound, ...] = ()
    quirks: tuple[str, ...] = ()


@valueclass(frozen=True, slots=True)
class Timeouts:
    """Timeouts for each phase of an attempt, in seconds.

    The defaults are choices. `first_byte_s` is nearly twice the longest published first token (319 s), and
    `idle_s` longer than the longest step that a latency model predicts (48 s, see `health.hang_after_s`).

    Attributes:
        connect_s: Opening the connection.
        first_byte_s: From sending a streamed request to the first generated token. Headers do not count,
            because vLLM sends status 200 at admission. A non-streaming answer has no first token before its
            end, so only `total_s` bounds it.
        idle_s: Between two reads after the first token. Comment lines reset it.
        total_s: The whole attempt, regardless of comment lines.
    """

    connect_s: float = 2.0
    first_byte_s: float = 600.0
    idle_s: float = 120.0
    total_s: float = 3600.0


@valueclass(frozen=True, slots=True)
class Gates:
    """Admission limits of a pool in addition to the knee. Each applies per backend.

    The defaults are choices, whose worth `benchmarks/routing.py` measures (docs/routing.md).

    Attributes:
        long_prompt_tokens: A prompt of at least this length is long.
        long_prefills: Long prompts that a backend may prefill at once. 0: a long prompt starts only on an
            idle backend. None: no limit.
        long_seqs: Sequences with long prompts that a backend may hold, or None for no limit: 4 to 6 for
            interactive readers, 12 to 16 for throughput.
        prefill_s: A backend takes no new prompt while at least this much prefill is outstanding, in seconds
            predicted by its latency model; None: no limit.
    """

    long_prompt_tokens: int = 16_000
    long_prefills: int | None = 1
    long_seqs: int | None = None
    prefill_s: float | None = None


OPEN = Gates(long_prefills=None)
"""No gates: the knee and the KV blocks are the only limits."""


@valueclass(frozen=True, slots=True)
class Spill:
    """Conditions for a pool to take requests of a class whose first choice is another pool.

    The defaults are choices: looser ones moved chat by 0.2 points of goodput (docs/routing.md).

    Attributes:
        reserve: Share of the knee (0..1) that such requests leave free for the pool's own documents. Running
            documents count towards the reserve.
        prefill_s: Seconds of outstanding prefill at which a backend takes no more such requests.
    """

    reserve: float = 0.125
    prefill_s: float = 0.5


@valueclass(frozen=True, slots=True)
class JobRoom:
    """What jobs leave free on each backend of a pool, for requests whose callers are waiting.

    The defaults are those of `Spill`; docs/routing.md#jobs measures what they are worth.

    Attributes:
        reserve: Share of the knee, in whole sequences, and of the KV blocks (0..1). Above 0, jobs also leave
            one of the sequences of a backend in probation.
        prefill_s: Seconds of outstanding prefill at which a backend takes no more jobs. None: no limit.
    """

    reserve: float = 0.125
    prefill_s: float | None = 0.5


@valueclass(frozen=True, slots=True)
class Pool:
    """Backends that are interchangeable, in order of preference when all else is equal.

    Attributes:
        id: Its name in the configuration.
        backends: Their ids.
        timeouts: Timeouts of attempts in this pool.
        gates: Its admission limits in addition to the knee.
        spill: When it takes requests whose first choice is an earlier pool of their class.
        jobs: What jobs leave free.
        tpot_target_s: Target for the seconds per output token, or None. While it is exceeded, backends are
            loaded below their knee.
    """

    id: str
    backends: tuple[str, ...]
    timeouts: Timeouts = Timeouts()
    gates: Gates = OPEN
    spill: Spill = Spill()
    jobs: JobRoom = JobRoom()
    tpot_target_s: float | None = None
