"""The values that the steps of a request hand to each other. All frozen, none knows a vendor.

Read in the order of a request: what the caller sent (`Request`), how long it is (`Estimate`), what
policy says about it (`ModelPolicy`, `TrafficClass`), where it could run (`Backend`, `Pool`), what it
would take there (`Demand`, `Load`), and what was decided and why (`Decision`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any, cast, overload

from gateway.core.kv import KvFormula
from gateway.core.perf import PerfModel
from gateway.core.value import valueclass
from gateway.core.versions import VersionBound

# ------------------------------------------------------------------ what the caller sent


class Endpoint(StrEnum):
    """The two generating routes of the OpenAI API that are relayed."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"


@dataclass(frozen=True, slots=True)
class LongText:
    """A text so long that it is not kept in memory beside the body that it came in.

    Attributes:
        size_bytes: How long it was as it was sent: what it takes in UTF-8 at most.
        key: A hash of it, which means something in this process alone.
        pieces: Returns it stripped, piece by piece; cut where a token is likely to end.
    """

    size_bytes: int
    key: int
    pieces: Callable[[], Iterator[str]] = field(compare=False, repr=False)


@valueclass(frozen=True, slots=True)
class Turn:
    """One message of a chat, reduced to what its length depends on.

    Attributes:
        role: As sent; unknown roles are legal.
        texts: Its text parts, in order, unstripped.
        tool_calls: `(name, compact JSON arguments)` of each call an assistant message carries.
        images: Image parts in it.
        audios: Audio parts in it.
        long: One more text part, where that is a long one.
        texts_before_long: How many of `texts` stand before it.
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
    """What has to be counted to know a prompt's length.

    Attributes:
        turns: The messages of a chat; for /v1/completions empty.
        raw_texts: The prompt strings of /v1/completions; for a chat empty.
        raw_tokens: Prompt tokens that came as ids (/v1/completions) and need no counting.
        tools_json: The tools as compact JSON, or "".
        tools_texts: Texts in that, besides keys.
        thinking: Whether the chat template opens a thought (`enable_thinking`).
        image_budget: Soft tokens per image the request itself asks for, or None for the model's default.
        audio_tokens: Soft tokens of all audio parts, when their length is known; else 0.
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
"""Members of a request body that become something else for a backend, by path: `("stream",)` is a member,
`("stream_options", "include_usage")` a member of an object that keeps its others."""

NO_CHANGES: Changes = MappingProxyType({})


@valueclass(frozen=True, slots=True)
class Request:
    """What the gateway reads of a request. The body itself travels on as bytes.

    Attributes:
        endpoint: Which route it came in on.
        model: The name the caller sent.
        stream: Whether the answer is wanted as server-sent events.
        max_tokens: `max_completion_tokens`, else `max_tokens`, else None.
        seqs: Sequences it will occupy on a backend: `n` times the number of prompts.
        choices: Choices a complete answer has.
        prompts: Different prompts in it: 1, but for lists of them (/v1/completions).
        reasoning: `reasoning_effort` above none, or `enable_thinking`.
        images, audios, tools: Counts.
        include_usage: Whether the caller asked for the usage event of a stream.
        key: Name of the caller's API key, or None where none is configured.
        headers: The request headers policy may match on, names in lower case.
        prompt: What to count.
        is_job: It waits for as long as it takes, and nobody holds a connection open that it depends on.
        queued_s: How long it has waited, as a job, before it came here.
        handed_over_as: Name of the class that it was given when it became a job, and keeps; "" otherwise.
        prefixes: Per message boundary, shortest first: a hash of everything up to it, which means something
            in this process alone, and the share (0..1) of the conversation that is, by its length.
    """

    endpoint: Endpoint
    model: str
    prompt: Prompt
    stream: bool = False
    max_tokens: int | None = None
    seqs: int = 1
    choices: int = 1
    prompts: int = 1
    reasoning: bool = False
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
    """How a count came about."""

    EXACT = "exact"  # the site's own Gemma vocabulary
    APPROXIMATE = "approximate"  # class counts, with a band
    BOUND = "bound"  # counting stopped early: the prompt is longer than any window


@valueclass(frozen=True, slots=True)
class Estimate:
    """A prompt's length in tokens, template included.

    Attributes:
        tokens: The best single figure; classes are chosen by it.
        tokens_max: The upper end; what must fit is checked against it.
        mode: How it came about.
    """

    tokens: int
    tokens_max: int
    mode: CountMode


# ------------------------------------------------------------------ where it could run


@dataclass(frozen=True, slots=True)
class KneeStep:
    """One step of a backend's knee curve: up to this prompt length, this many sequences.

    `prompt_tokens_max` is None for the last step, which has no upper end.
    """

    prompt_tokens_max: int | None
    seqs: int


@dataclass(frozen=True, slots=True)
class Capacity:
    """What one backend can hold. Each figure is measured or says what it is: docs/measurements.md.

    Attributes:
        context_tokens: Prompt plus output of one sequence (the engine's `max_model_len`).
        knee: Concurrent sequences at which output tokens/s stops growing, by prompt length; ascending.
        kv: How blocks are counted, or None where the engine alone should judge.
        kv_blocks: Size of the KV pool in blocks, or None likewise.
        kv_budget: Share of `kv_blocks` that admission may plan with, 0..1.
    """

    context_tokens: int
    knee: tuple[KneeStep, ...]
    kv: KvFormula | None = None
    kv_blocks: int | None = None
    kv_budget: float = 0.9

    def __hash__(self) -> int:
        return self.context_tokens  # it is looked up by itself: one field tells enough


@dataclass(frozen=True, slots=True)
class Modalities:
    """What a deployment accepts besides text. 0: none of it. None: no limit of its own."""

    images_max: int | None = 0
    audios_max: int | None = 0


@dataclass(frozen=True, slots=True)
class Backend:
    """One server with one URL and one knee.

    Attributes:
        id: Its name in the configuration.
        url: Base URL without a trailing slash and without `/v1`.
        model: The name it serves the model under, or None to learn it from `/v1/models`.
        profile: Name of the profile its figures come from.
        capacity: What it can hold.
        modalities: What it accepts besides text.
        tokens_per_s: Decode rate of a lone stream, for the `speed` score; None when unknown.
        boot_budget_s: How long it may take to become ready before that counts as a fault.
        drain: Set by the operator: finish what runs, take nothing new.
        perf: Its latency model, to predict prompt work with; None where no profile gives one.
        batched_tokens: Prompt tokens of one engine step (`max_num_batched_tokens`).
        versions: Engine versions it may have; () for any.
        quirks: What its engine is known to do wrong, by name (docs/profiles.md lists them).
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


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long each phase of an attempt may take, in seconds.

    Attributes:
        connect_s: Opening the connection.
        first_byte_s: From sending a streamed request to the first generated token. vLLM answers
            with status 200 at admission, so headers alone prove nothing. An answer that is not
            streamed has no first byte before its last: only `total_s` bounds it.
        idle_s: Between two reads after that.
        total_s: The whole attempt; comment lines re-arm the idle timer, this they cannot.
    """

    connect_s: float = 2.0
    first_byte_s: float = 600.0
    idle_s: float = 120.0
    total_s: float = 3600.0


@dataclass(frozen=True, slots=True)
class Gates:
    """What a pool lets in beside the knee. Each figure holds per backend of the pool.

    Sources: docs/routing.md, "What each rule is for".

    Attributes:
        long_prompt_tokens: From this length on a prompt is long.
        long_prefills: Long prompts a backend may be reading at once. 0: a long prompt only starts where
            nothing else runs. None: no gate.
        long_seqs: Sequences with long prompts a backend may hold at all, or None: 4 to 6 where somebody
            reads along, 12 to 16 for throughput.
        prefill_s: A backend takes no new prompt while this much prompt work is outstanding there, in
            seconds as its latency model predicts it; None: no bound.
    """

    long_prompt_tokens: int = 16_000
    long_prefills: int | None = 1
    long_seqs: int | None = None
    prefill_s: float | None = None


OPEN = Gates(long_prefills=None)
"""No gate at all: the knee and the KV blocks are the only limits."""


@dataclass(frozen=True, slots=True)
class Spill:
    """When a pool takes work of a class whose first choice is another pool.

    Attributes:
        reserve: Share of the knee (0..1) that such work leaves free for the pool's own documents. Those
            that run use the reserve up.
        prefill_s: Prompt work outstanding there from which on it takes none, in seconds.
    """

    reserve: float = 0.125
    prefill_s: float = 0.5


@dataclass(frozen=True, slots=True)
class Pool:
    """Backends that are interchangeable, in order of preference when all else is equal.

    Attributes:
        id: Its name in the configuration.
        backends: Their ids.
        timeouts: How long each phase of an attempt there may take.
        gates: What it lets in beside the knee.
        spill: When it takes work that would rather go to an earlier pool of its class.
        tpot_target_s: Seconds per output token that its callers shall see at most, or None: its backends
            are given less than their knee while it is exceeded.
    """

    id: str
    backends: tuple[str, ...]
    timeouts: Timeouts = Timeouts()
    gates: Gates = OPEN
    spill: Spill = Spill()
    tpot_target_s: float | None = None


# ------------------------------------------------------------------ what policy says


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
    """A value that has worked something out of itself, beside its fields. A copy of it is made anew."""

    __slots__ = ()

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), tuple(getattr(self, one.name) for one in fields(cast("Any", self)))


class _DerivedOfWhen(_Derived):
    __slots__ = ("numeric",)
    numeric: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class When(_DerivedOfWhen):
    """The condition of a class: every field that is set must hold; an empty one always does.

    Numeric fields are bounds that must all hold. Counts (`images`, `audios`, `tools`) are numeric
    too; the configuration's `true` is `> 0` and its `false` is `== 0`.

    Attributes:
        numeric: Names of the numeric fields that are set.
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


class WhenLate(StrEnum):
    """What becomes of a request that would wait, or has waited, for longer than its class allows."""

    REFUSE = "refuse"
    DEMOTE = "demote"  # it goes behind all others of its class


@dataclass(frozen=True, slots=True)
class Waiting:
    """How requests of a class wait for a backend when all are full.

    Attributes:
        max_wait_s: The longest one waits.
        ttft_target_s: First token wanted within this time of arrival: the deadline that orders the line.
        prefill_weight: How many times a prompt's own unloaded prefill comes on top of it. 1 states the
            deadline of a document: nobody expects 200,000 tokens to be read at once. More lets short
            prompts go before long ones where there is not time for all, so that more callers are served.
        waiting_max: Requests of the class that may wait.
        waiting_bytes_max: Bytes they may hold together.
        when_late: Refused, or sent behind the others.
        demoted_wait_s: The longest one that was sent behind waits, in all. None: twice `max_wait_s`, and a
            minute at least.
        passes_max: How many times one that does not fit may be passed by smaller ones that do.
        keep_alive_after_s: A stream that has no token this long after its arrival gets its headers, and
            comments from then on, so that nothing in between takes it for dead. From there on a failure is an
            event, not a status. None: never.
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
        """The longest a request waits in all, sent behind where that is what becomes of late ones."""
        if self.when_late is WhenLate.REFUSE:
            return self.max_wait_s
        return max(60.0, 2 * self.max_wait_s) if self.demoted_wait_s is None else self.demoted_wait_s


class OnDisconnect(StrEnum):
    """What becomes of a request in the queue whose caller has left."""

    CANCEL = "cancel"
    FINISH = "finish"


@dataclass(frozen=True, slots=True)
class TrafficClass:
    """What kind of work a request is, and where that work goes.

    Attributes:
        name: short_chat, long_document, reasoning, or the site's own.
        pools: Pool ids, first choice first; the later ones are the spill order.
        when: What makes a request one of these.
        output_reserve_tokens: Output to plan for when the caller gives no `max_tokens`.
        priority: Among those that wait, the higher goes first.
        waiting: How they wait.
        queue: Its chats are jobs, served in place; and what becomes of one whose caller leaves. None: they
            wait in the line.
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
    """Constants of a model's chat template that a prompt's length depends on, in tokens.

    Sources: the official Gemma 4 chat template (docs/measurements.md#prompt-length).
    """

    bos: int = 1
    per_turn: int = 5  # <|turn> role \n ... <turn|> \n
    generation_prompt: int = 3  # <|turn>model\n
    empty_thought: int = 4  # <|channel>thought\n<channel|>; absent in E-variants and edited templates
    think_marker: int = 2  # <|think|>\n
    image: int = 280  # soft tokens per image; the processor's default budget
    image_markers: int = 2
    audio: int = 750  # soft tokens of an audio part of unknown length: the most one can have
    audio_markers: int = 2
    tool_round: int = 22  # per tool call with its result, beside their own text; an upper bound


@dataclass(frozen=True, slots=True)
class ModelPolicy:
    """One public model name: its aliases, its classes, and how its prompts are counted."""

    id: str
    classes: tuple[TrafficClass, ...]
    aliases: tuple[str, ...] = ()
    reasoning_aliases: tuple[str, ...] = ()  # names that make a request a reasoning one
    template: TemplateCosts = TemplateCosts()


@dataclass(frozen=True, slots=True)
class Weights:
    """How much each score counts when backends of one pool are ranked. 0 switches one off.

    `spare_knee` leads; `speed` keeps a slow box behind a fast one that shares its pool;
    `prefix_affinity` is a tie-break, as the routing study found it to be worth
    (docs/measurements.md#affinity). `slow_context` is a cost, on engines alone that stall at one length of
    prompt: docs/quirks.md.
    """

    spare_knee: float = 1.0
    speed: float = 1.0
    prefix_affinity: float = 0.2
    slow_context: float = 1.0


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often a failed attempt may be tried elsewhere before the caller hears of it."""

    attempts_max: int = 3


class ReasoningField(StrEnum):
    """The member of a message or delta in which callers find the thought."""

    AS_SENT = "as_sent"  # wherever the backend put it
    REASONING = "reasoning"
    REASONING_CONTENT = "reasoning_content"
    BOTH = "both"


class _DerivedOfPolicy(_Derived):
    __slots__ = ("distinct", "kinds", "window_tokens")
    kinds: Mapping[str, int]
    distinct: Mapping[str, tuple[Backend, ...]]
    window_tokens: int


@dataclass(frozen=True, slots=True)
class Policy(_DerivedOfPolicy):
    """Everything that decides where a request goes: one immutable snapshot of the configuration.

    Attributes:
        kinds: Per backend, a number: the same for replicas, which differ in nothing but name and address.
        distinct: Per pool, one backend of each kind that is in it.
        window_tokens: The largest window of the fleet: no prompt beyond it can be served.
    """

    models: tuple[ModelPolicy, ...]
    pools: Mapping[str, Pool]
    backends: Mapping[str, Backend]
    weights: Weights = Weights()
    retry: RetryPolicy = RetryPolicy()
    reasoning_field: ReasoningField = ReasoningField.AS_SENT
    version: str = ""  # short hash of the file it came from

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
        object.__setattr__(self, "window_tokens", max(windows, default=0))

    def model(self, name: str) -> ModelPolicy | None:
        """Return the model that answers to `name` (its id or an alias), or None."""
        for model in self.models:
            if name == model.id or name in model.aliases or name in model.reasoning_aliases:
                return model
        return None

    def context_tokens(
        self, name: str, window_of: Callable[[Backend], int] = lambda backend: backend.capacity.context_tokens
    ) -> int:
        """Return the most tokens, prompt and output, that a request for this name may have.

        It is the window of the largest backend of any class that such a request may be of; 0 for no model.
        `window_of` says how long that is, if it is not what is configured.
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
            if one.when == When() or (reasons and one.when == When(reasoning=True)):
                break
        backends = [backend for pool in pools for backend in self.distinct.get(pool, ())]
        return max(map(window_of, backends), default=0)

    def tpot_target_s(self, backend_id: str) -> float | None:
        """Return the lowest target of the pools that a backend belongs to, or None where none has one."""
        targets = (pool.tpot_target_s for pool in self.pools.values() if backend_id in pool.backends)
        return min((target for target in targets if target is not None), default=None)


# ------------------------------------------------------------------ what it takes, what was decided


@valueclass(frozen=True, slots=True)
class Demand:
    """What a request asks of a backend.

    Attributes:
        seqs: Sequences it will run.
        prompts: Different prompts among them; the sequences of one prompt share its reading.
        prompt_tokens: The estimate, for the knee curve.
        total_tokens: Prompt at its upper end plus output, per sequence: what must fit.
        images, audios: Counts, for the modality filter.
    """

    seqs: int
    prompt_tokens: int
    total_tokens: int
    images: int = 0
    audios: int = 0
    prompts: int = 1

    @classmethod
    def of(cls, request: Request, estimate: Estimate, output_tokens: int) -> "Demand":
        """Return the demand of a request whose output is planned at `output_tokens`."""
        return cls(
            seqs=request.seqs,
            prompt_tokens=estimate.tokens,
            total_tokens=estimate.tokens_max + output_tokens,
            images=request.images,
            audios=request.audios,
            prompts=request.prompts,
        )


@valueclass(frozen=True, slots=True)
class Load:
    """Counters of a backend: what is in flight there, what one request takes of it, or what it may hold.

    All integers, so that every store adds them up to the same sums. The last two end with the first
    token, the others with the last.

    Attributes:
        seqs: Sequences.
        share: How much of the knee they use, in millionths (see core/admission.py).
        kv_blocks: KV blocks reserved for them.
        long_seqs: Sequences with a long prompt.
        long_unanswered: Those of them that have not had their first token.
        prefill_ms: Prompt work outstanding, as the backend's latency model predicts it.
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
        """The same once the prompt has been answered."""
        return Load(self.seqs, self.share, self.kv_blocks, self.long_seqs)


_NOTHING = Load()

UNLIMITED = 2**53 - 1
"""A counter without a limit: the largest integer that every store counts exactly."""


class Exclusion(StrEnum):
    """Why a backend was left out of a decision. Few and fixed: each is a metric label."""

    CONTEXT_EXCEEDED = "context_exceeded"  # prompt + output can never fit its window
    KV_EXCEEDED = "kv_exceeded"  # its whole KV pool could not hold it
    SEQS_EXCEEDED = "seqs_exceeded"  # more parallel choices than its knee
    MODALITY = "modality"  # it does not take images or audio
    WRONG_MODEL = "wrong_model"  # it serves another model
    WRONG_VERSION = "wrong_version"  # its engine is of a version that was not allowed
    NOT_ASKED = "not_asked"  # what it serves is being asked: known in a moment
    UNHEALTHY = "unhealthy"  # down, ejected, hung, booting
    DRAINING = "draining"  # the operator or the engine is emptying it
    SWAPPED_OUT = "swapped_out"  # its box runs another model at the moment
    AT_KNEE = "at_knee"  # full right now
    KV_FULL = "kv_full"  # no blocks right now
    LONG_FULL = "long_full"  # as many long documents as it may have
    LONG_PREFILL = "long_prefill"  # it is reading a long document: one at a time
    PREFILL_BUSY = "prefill_busy"  # too much prompt work outstanding
    SPILL_LONG = "spill_long"  # as a spill: it reads a long document, or one waits for it
    SPILL_PREFILL = "spill_prefill"  # as a spill: too much prompt work outstanding
    SPILL_RESERVE = "spill_reserve"  # as a spill: what is left is kept for its own class
    FAILED = "failed"  # it was tried for this very request

    @property
    def is_permanent(self) -> bool:
        """Whether waiting could never help: the request itself does not fit."""
        return self in _PERMANENT

    @property
    def is_busy(self) -> bool:
        """Whether it goes away by itself, mostly when something there ends: worth waiting for."""
        return self in _BUSY


Objection = tuple[Exclusion, str]
"""Why a backend is left out, for a program and in words."""

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
    """One backend as a decision saw it.

    Attributes:
        backend: Its id.
        pool: The pool it was considered in.
        excluded: Why it is out, or None.
        detail: The same in a few words with the figures.
        scores: Each score in 0..1, before weights; a cost in -1..0.
        score: Their weighted sum.
        load: What it held.
        knee_seqs: Its knee for this request's length.
        claim: What the request takes there.
        limits: The most it may hold for this request to start: what `Ledger.acquire` checks.
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
    """The backends of a decision: those that may be tried, best first; then those that may not, and why.

    A request needs the first of them. The others are worked out when somebody asks, which is mostly never,
    from how they stood at the moment of the decision.

    Attributes:
        first: The best that may be tried; None where none may.
        passed_over: Those that were looked at before the first was found, and may not be tried.
    """

    __slots__ = ("_all", "_work_out", "first", "passed_over")

    def __init__(
        self,
        first: Candidate | None,
        passed_over: tuple[tuple[str, Exclusion], ...],
        work_out: Callable[[], tuple[Candidate, ...]],
    ) -> None:
        """Know the beginning; `work_out` returns them all, the same whenever it is called."""
        self.first = first
        self.passed_over = passed_over
        self._work_out = work_out
        self._all: tuple[Candidate, ...] | None = None

    @classmethod
    def of(cls, *candidates: Candidate) -> "Ranking":
        """Return one of which all is known, in its order."""
        first = next((one for one in candidates if one.excluded is None), None)
        passed_over = tuple((one.backend, one.excluded) for one in candidates if one.excluded is not None)
        return cls(first, passed_over, lambda: candidates)

    @property
    def all(self) -> tuple[Candidate, ...]:
        """All of them."""
        if self._all is None:
            self._all = self._work_out()
        return self._all

    @property
    def eligible(self) -> tuple[Candidate, ...]:
        """Those that may be tried, best first."""
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
    """Where a request may go, in order, and why each other backend is out.

    Attributes:
        model: Id of the model policy that applied.
        traffic_class: Its class, and `class_reason`: why it is one of those.
        pools: The class's pools; the later ones are spill.
        estimate: The prompt's length.
        demand: What it asks of a backend.
        candidates: Its backends, best first, and why each other one is out.
    """

    model: str
    traffic_class: str
    class_reason: str
    pools: tuple[str, ...]
    estimate: Estimate
    demand: Demand
    candidates: Ranking
