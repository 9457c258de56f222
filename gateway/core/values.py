"""Values passed between the steps of a request. All are frozen and independent of any vendor.

In order: the caller's request (`Request`), its length (`Estimate`), where it could run (`Backend`, `Pool`),
the policy for it (`ModelPolicy`, `TrafficClass`), its resource needs (`Demand`, `Load`), and the decision
with its reasons (`Decision`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from math import inf
from types import MappingProxyType
from typing import Any, cast, overload

from gateway.core.kv import KvFormula
from gateway.core.perf import PerfModel
from gateway.core.value import valueclass
from gateway.core.versions import VersionBound

# ------------------------------------------------------------------ the caller's request


class Endpoint(StrEnum):
    """The two generation endpoints of the OpenAI API that are relayed."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"


@dataclass(frozen=True, slots=True)
class LongText:
    """A text too long to keep in memory in addition to the request body.

    Attributes:
        size_bytes: Its length in the body: an upper bound of its length in UTF-8.
        key: A hash of it, valid only in this process.
        pieces: Returns an iterator over its stripped text, split where a token is likely to end.
    """

    size_bytes: int
    key: int
    pieces: Callable[[], Iterator[str]] = field(compare=False, repr=False)


@valueclass(frozen=True, slots=True)
class Turn:
    """One message of a chat, reduced to the parts that determine its length.

    Attributes:
        role: As sent; unknown roles are legal.
        texts: Its text parts, in order, unstripped.
        tool_calls: `(name, compact JSON arguments)` of each tool call in an assistant message.
        images: Number of image parts.
        audios: Number of audio parts.
        long: One more text part if that is a long one, else None.
        texts_before_long: How many of `texts` precede it.
    """

    role: str
    texts: tuple[str, ...]
    tool_calls: tuple[tuple[str, str], ...] = ()
    images: int = 0
    audios: int = 0
    long: LongText | None = None
    texts_before_long: int = 0


@valueclass(frozen=True, slots=True)
class Prompt:
    """The parts of a request that determine the length of its prompt.

    Attributes:
        turns: The messages of a chat; empty for /v1/completions.
        raw_texts: The prompt strings of /v1/completions; empty for a chat.
        raw_tokens: Number of prompt tokens sent as ids (/v1/completions), which need no counting.
        tools_json: The tools as compact JSON, or "".
        tools_texts: Number of texts in it, without keys.
        thinking: Whether the chat template enables reasoning (`enable_thinking`).
        image_budget: Soft tokens per image set by the request, or None for the model's default.
        audio_tokens: Soft tokens of all audio parts if their length is known, else 0.
    """

    turns: tuple[Turn, ...] = ()
    raw_texts: tuple[str, ...] = ()
    raw_tokens: int = 0
    tools_json: str = ""
    tools_texts: int = 0
    thinking: bool = False
    image_budget: int | None = None
    audio_tokens: int = 0


Prefixes = tuple[tuple[int, float], ...]

Changes = Mapping[tuple[str, ...], object]
"""New values for members of a request body sent to a backend, by path: `("stream",)` is a top-level member,
`("stream_options", "include_usage")` a member of an object whose other members are kept."""

NO_CHANGES: Changes = MappingProxyType({})


@valueclass(frozen=True, slots=True)
class Request:
    """The parts of a request that the gateway interprets. The body itself is forwarded as bytes.

    Attributes:
        endpoint: The endpoint that received it.
        model: The model name that the caller sent.
        stream: Whether the caller wants server-sent events.
        max_tokens: `max_completion_tokens`, else `max_tokens`, else None.
        seqs: Sequences it occupies on a backend: `n` times the number of prompts.
        choices: Number of choices in a complete answer.
        prompts: Number of distinct prompts: 1, except for a list of prompts (/v1/completions).
        reasoning: Whether it asks for it (`reasoning_effort`, `enable_thinking`); None if it does not say.
        images, audios, tools: Counts.
        include_usage: Whether the caller asked for the usage event of a stream.
        key: Name of the caller's API key, or None if no keys are configured.
        headers: The request headers that policy may match on, names in lower case.
        prompt: The prompt, for counting its tokens.
        is_job: Whether it is a job: it may wait without a limit, and does not depend on an open connection.
        queued_s: How long it waited in the store as a job.
        handed_over_as: Name of the class it was assigned when it became a job, which it keeps; "" otherwise.
        prefixes: Per message boundary, shortest first: a hash of everything before it in the prompt, tools
            included, valid only in this process, and the share (0..1) of the prompt's length that this is.
            Before the first message there is one only if tools have a turn of their own there.
    """

    endpoint: Endpoint
    model: str
    prompt: Prompt
    stream: bool = False
    max_tokens: int | None = None
    seqs: int = 1
    choices: int = 1
    prompts: int = 1
    reasoning: bool | None = None
    images: int = 0
    audios: int = 0
    tools: int = 0
    include_usage: bool = False
    key: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    prefixes: Prefixes = ()
    is_job: bool = False
    queued_s: float = 0.0
    handed_over_as: str = ""


class CountMode(StrEnum):
    """How the tokens of a prompt were counted."""

    EXACT = "exact"  # with the site's own Gemma vocabulary, or given as token ids
    APPROXIMATE = "approximate"  # by character class counts, with an error band
    BOUND = "bound"  # counting stopped early: the prompt is longer than any window


@valueclass(frozen=True, slots=True)
class Estimate:
    """A prompt's length in tokens, including the chat template.

    Attributes:
        tokens: The best single estimate, used to choose the class.
        tokens_max: The upper bound, used to check that the request fits.
        mode: How the tokens were counted.
    """

    tokens: int
    tokens_max: int
    mode: CountMode


# ------------------------------------------------------------------ backends and pools


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


# ------------------------------------------------------------------ policy


class Comparison(StrEnum):
    """Comparison operators of a numeric condition."""

    GE = ">="
    GT = ">"
    LE = "<="
    LT = "<"
    EQ = "=="


@dataclass(frozen=True, slots=True)
class Bound:
    """One side of a numeric condition, e.g. `>= 16000`."""

    op: Comparison
    value: int


class _Derived:
    """A dataclass with slots computed from its fields. Copying or unpickling computes them again."""

    __slots__ = ()

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), tuple(getattr(self, one.name) for one in fields(cast("Any", self)))


class _DerivedOfWhen(_Derived):
    __slots__ = ("is_empty", "numeric", "tokens_least", "tokens_most")
    is_empty: bool
    numeric: tuple[str, ...]
    tokens_least: float
    tokens_most: float


@dataclass(frozen=True, slots=True)
class When(_DerivedOfWhen):
    """The condition of a class: all fields that are set must match; an empty condition always matches.

    All bounds of a numeric field must hold. Counts (`images`, `audios`, `tools`) are numeric too: `true` in
    the configuration is `> 0`, and `false` is `== 0`.

    Attributes:
        is_empty: Whether no field is set.
        numeric: Names of the numeric fields that are set.
        tokens_least, tokens_most: The range that the bounds of `prompt_tokens` leave.
    """

    prompt_tokens: tuple[Bound, ...] = ()
    total_tokens: tuple[Bound, ...] = ()
    max_tokens: tuple[Bound, ...] = ()
    images: tuple[Bound, ...] = ()
    audios: tuple[Bound, ...] = ()
    tools: tuple[Bound, ...] = ()
    reasoning: bool | None = None
    stream: bool | None = None
    keys: tuple[str, ...] = ()
    headers: tuple[tuple[str, tuple[str, ...]], ...] = ()  # (lower-case name, accepted values; () = present)

    def __post_init__(self) -> None:
        names = ("prompt_tokens", "total_tokens", "max_tokens", "images", "audios", "tools")
        object.__setattr__(self, "numeric", tuple(name for name in names if getattr(self, name)))
        is_empty = all(getattr(self, one.name) == one.default for one in fields(self))
        object.__setattr__(self, "is_empty", is_empty)
        least, most = -inf, inf
        for bound in self.prompt_tokens:
            if bound.op in (Comparison.GE, Comparison.GT, Comparison.EQ):
                least = max(least, bound.value + (bound.op is Comparison.GT))
            if bound.op in (Comparison.LE, Comparison.LT, Comparison.EQ):
                most = min(most, bound.value - (bound.op is Comparison.LT))
        object.__setattr__(self, "tokens_least", least)
        object.__setattr__(self, "tokens_most", most)


class WhenLate(StrEnum):
    """How to handle a request that would wait, or has waited, longer than its class allows."""

    REFUSE = "refuse"
    DEMOTE = "demote"  # move it behind all others of its class


@valueclass(frozen=True, slots=True)
class Waiting:
    """Queueing rules of a class.

    The defaults are for chat, and choices. docs/routing.md measures them with other weights; `max_wait_s`
    leaves a part of the target for the prefill; `waiting_max` and `waiting_bytes_max` bound memory.

    Attributes:
        max_wait_s: Maximum time in the queue.
        ttft_target_s: Target for the time to first token, counted from arrival: the deadline that orders the
            queue.
        prefill_weight: Multiple of the prompt's own prefill time on an idle backend that is added to the
            target. 1 suits documents, because callers do not expect a prefill of 200,000 tokens to be
            immediate. Higher values favor short prompts when there is not enough time for all, so that more
            callers are served.
        waiting_max: Maximum number of queued requests of the class; twice that for keys with none queued.
        waiting_bytes_max: Maximum total bytes held by them; likewise.
        when_late: Whether late requests are refused or demoted.
        demoted_wait_s: Maximum total wait of a demoted request. None: twice `max_wait_s`, and at least a
            minute.
        passes_max: How many times a request that does not fit may be overtaken by smaller ones.
        keep_alive_after_s: A stream without a token this long after its arrival gets its headers and then
            periodic comments, so that proxies do not close it as idle. From then on a failure is reported as
            an event, not as a status. None: never.
    """

    max_wait_s: float = 1.2
    ttft_target_s: float = 2.0
    prefill_weight: float = 4.0
    waiting_max: int = 1_000
    waiting_bytes_max: int = 256 * 1024 * 1024
    when_late: WhenLate = WhenLate.REFUSE
    demoted_wait_s: float | None = None
    passes_max: int = 0
    keep_alive_after_s: float | None = None

    @property
    def longest_wait_s(self) -> float:
        """The maximum total wait of a request, including the time after a demotion."""
        if self.when_late is WhenLate.REFUSE:
            return self.max_wait_s
        return max(60.0, 2 * self.max_wait_s) if self.demoted_wait_s is None else self.demoted_wait_s


class OnDisconnect(StrEnum):
    """What to do with a job served in place when its caller leaves."""

    CANCEL = "cancel"
    FINISH = "finish"


@valueclass(frozen=True, slots=True)
class TrafficClass:
    """A kind of request, and the pools that serve it.

    The default of `output_reserve_tokens` is a choice: blocks held in vain against blocks that run out.

    Attributes:
        name: short_chat, long_document, reasoning, or the site's own name.
        pools: Pool ids, first choice first; the later ones are the spill order.
        when: The condition for a request to be in this class.
        output_reserve_tokens: Output tokens to plan for if the caller sends no `max_tokens`.
        priority: Queued requests of higher priority start first.
        waiting: Queueing rules.
        queue: If set, its chats are jobs served in place; the value says what to do when the caller leaves.
            None: its chats wait in the queue of the process.
    """

    name: str
    pools: tuple[str, ...]
    when: When = When()
    output_reserve_tokens: int = 1024
    priority: int = 0
    waiting: Waiting = Waiting()
    queue: OnDisconnect | None = None


@dataclass(frozen=True, slots=True)
class TemplateCosts:
    """Token costs of a model's chat template.

    Sources: the official Gemma 4 chat template (docs/estimate.md#the-template).
    """

    bos: int = 1
    per_turn: int = 5  # <|turn> role \n ... <turn|> \n
    generation_prompt: int = 3  # <|turn>model\n
    empty_thought: int = 4  # <|channel>thought\n<channel|>; absent in E-variants and edited templates
    think_marker: int = 2  # <|think|>\n
    image: int = 280  # soft tokens per image; the processor's default budget
    image_markers: int = 2
    audio: int = 750  # soft tokens of an audio part of unknown length: the maximum
    audio_markers: int = 2
    tool_round: int = 22  # per tool call with its result, without their own text; an upper bound


class _DerivedOfModel(_Derived):
    __slots__ = ("headers",)
    headers: Mapping[str, frozenset[str]]


@dataclass(frozen=True, slots=True)
class ModelPolicy(_DerivedOfModel):
    """One public model name: its aliases, classes and chat template costs.

    Attributes:
        headers: The headers in conditions of its classes, with all values that they are compared with.
    """

    id: str
    classes: tuple[TrafficClass, ...]
    aliases: tuple[str, ...] = ()
    reasoning_aliases: tuple[str, ...] = ()  # other names that also request reasoning
    template: TemplateCosts = TemplateCosts()

    def __post_init__(self) -> None:
        headers: dict[str, frozenset[str]] = {}
        for one in self.classes:
            for name, values in one.when.headers:
                headers[name] = headers.get(name, frozenset()).union(values)
        object.__setattr__(self, "headers", headers)

    @property
    def names(self) -> tuple[str, ...]:
        """All names by which callers can ask for it."""
        return (self.id, *self.aliases, *self.reasoning_aliases)


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights of the scores that rank the backends of one pool. 0 disables a score.

    `spare_knee` dominates. `speed` ranks a slow server behind a fast one in the same pool. `prefix_affinity`
    is a tie-break for chats, in line with the benefit measured in the routing study
    (docs/measurements.md#affinity), and more for long conversations (docs/routing.md#conversations).
    `slow_context` is a cost that applies only to engines that stall at one prompt length (docs/quirks.md).
    """

    spare_knee: float = 1.0
    speed: float = 1.0
    prefix_affinity: float = 0.2
    slow_context: float = 1.0


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How many attempts a request gets in total before the caller receives an error.

    The default is a choice: SDKs repeat a failed request twice, which multiplies it.
    """

    attempts_max: int = 3

    def allows_more(self, attempts: int, crashes: int) -> bool:
        """Return whether to retry after this many attempts, `crashes` of which ended with an engine crash."""
        return attempts < self.attempts_max and crashes < CRASHES_MAX


CRASHES_MAX = 2
"""A request is not retried once this many engines have crashed while serving it. A choice: one may be chance,
with two it may be the cause."""


class ReasoningField(StrEnum):
    """The member of a message or delta that carries the reasoning text to callers."""

    AS_SENT = "as_sent"  # as sent by the backend
    REASONING = "reasoning"
    REASONING_CONTENT = "reasoning_content"
    BOTH = "both"


class _DerivedOfPolicy(_Derived):
    __slots__ = ("distinct", "kinds", "named", "reasoning_names", "window_tokens")
    kinds: Mapping[str, int]
    distinct: Mapping[str, tuple[Backend, ...]]
    named: Mapping[str, ModelPolicy]
    reasoning_names: frozenset[str]
    window_tokens: int


@dataclass(frozen=True, slots=True)
class Policy(_DerivedOfPolicy):
    """All routing configuration: an immutable snapshot.

    Attributes:
        kinds: A number per backend, equal for replicas, which differ only in name and address.
        distinct: Per pool, one backend of each kind in it.
        named: The models by their ids and aliases.
        reasoning_names: The reasoning aliases of all models.
        window_tokens: The largest context window of the fleet. Longer prompts cannot be served.
    """

    models: tuple[ModelPolicy, ...]
    pools: Mapping[str, Pool]
    backends: Mapping[str, Backend]
    weights: Weights = Weights()
    retry: RetryPolicy = RetryPolicy()
    reasoning_field: ReasoningField = ReasoningField.AS_SENT
    version: str = ""  # short hash of the configuration file

    def __post_init__(self) -> None:
        kinds: list[Backend] = []
        of: dict[str, int] = {}
        for name, backend in self.backends.items():
            kind = replace(backend, id="", url="")
            if kind not in kinds:
                kinds.append(kind)
            of[name] = kinds.index(kind)
        windows = [kind.capacity.context_tokens for kind in kinds]
        distinct = {
            name: tuple({of[one]: self.backends[one] for one in pool.backends if one in of}.values())
            for name, pool in self.pools.items()
        }
        object.__setattr__(self, "kinds", of)
        object.__setattr__(self, "distinct", distinct)
        named = {
            name: model
            for model in reversed(self.models)  # of two with one name, the first has it
            for name in model.names
        }
        object.__setattr__(self, "named", named)
        names = frozenset(name for model in self.models for name in model.reasoning_aliases)
        object.__setattr__(self, "reasoning_names", names)
        object.__setattr__(self, "window_tokens", max(windows, default=0))

    def model(self, name: str) -> ModelPolicy | None:
        """Return the model with this name (its id or an alias), or None."""
        return self.named.get(name)

    def classes(self) -> Iterator[tuple[ModelPolicy, TrafficClass]]:
        """Yield the classes of all models, each with its model."""
        for model in self.models:
            for traffic_class in model.classes:
                yield model, traffic_class

    def context_tokens(self, name: str, window_of: Callable[[Backend], int]) -> int:
        """Return the maximum number of tokens, prompt and output, of a request for this model name.

        This is the largest window among the backends of all classes that such a request can be in if it does
        not say whether to reason, or 0 for an unknown model. `window_of` returns the window of a backend.
        """
        model = self.model(name)
        if model is None:
            return 0
        reasons = name in model.reasoning_aliases
        pools: set[str] = set()
        for one in model.classes:
            if reasons and one.when.reasoning is False:
                continue
            pools.update(one.pools)
            if one.when.is_empty or (reasons and one.when == When(reasoning=True)):
                break
        backends = [backend for pool in pools for backend in self.distinct.get(pool, ())]
        return max(map(window_of, backends), default=0)

    def backends_of(self, traffic_class: TrafficClass) -> Sequence[str]:
        """Return the backends in the pools of a class, in the order of its pools, each once."""
        return list(dict.fromkeys(name for pool in traffic_class.pools for name in self.pools[pool].backends))

    def tpot_target_s(self, backend_id: str) -> float | None:
        """Return the lowest target among the pools of a backend, or None if none of them has one."""
        targets = (pool.tpot_target_s for pool in self.pools.values() if backend_id in pool.backends)
        return min((target for target in targets if target is not None), default=None)

    def job_reserve(self, backend_id: str) -> float:
        """Return the largest part of its knee that jobs leave free in a pool of a backend (0..1)."""
        return max(
            [pool.jobs.reserve for pool in self.pools.values() if backend_id in pool.backends], default=0.0
        )

    def spill_reserve(self, backend_id: str) -> float:
        """Return the largest part of its knee that spills leave free in a pool of a backend (0..1)."""
        return max(
            [pool.spill.reserve for pool in self.pools.values() if backend_id in pool.backends], default=0.0
        )


# ------------------------------------------------------------------ resource needs and decisions


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
        return _NOTHING.has_room(self, most)

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


_NOTHING = Load()

UNLIMITED = 2**53 - 1
"""Limit of an unlimited counter: the largest integer that every store represents exactly."""


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
        detail: The explanation in words, with figures.
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
    load: Load = _NOTHING
    knee_seqs: int = 0
    claim: Load = _NOTHING
    limits: Load = _NOTHING
    is_spill: bool = False


class Ranking(Sequence[Candidate]):
    """The backends of a decision: eligible ones, best first, then the excluded ones with their reasons.

    Most requests need only the first. The others are computed on demand, from the snapshots taken at the
    moment of the decision.

    Attributes:
        first: The best eligible backend, or None.
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

    @classmethod
    def of(cls, *candidates: Candidate) -> "Ranking":
        """Return a ranking of these candidates, in this order."""
        first = next((one for one in candidates if one.excluded is None), None)
        passed_over = tuple((one.backend, one.excluded) for one in candidates if one.excluded is not None)
        return cls(first, passed_over, lambda: candidates)

    @property
    def all(self) -> tuple[Candidate, ...]:
        """All candidates."""
        if self._all is None:
            self._all = self._work_out()
        return self._all

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
