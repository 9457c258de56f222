"""The routing policy: models, their classes, and how their requests wait. An immutable snapshot."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from math import inf
from typing import Any, cast

from gateway.core.backends import Backend, Pool
from gateway.core.value import valueclass


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


def range_of(bounds: Iterable[Bound]) -> tuple[int, float]:
    """Return the least and the greatest count within all of these bounds; inf: there is no greatest one."""
    least, most = 0, inf
    for bound in bounds:
        if bound.op in (Comparison.GE, Comparison.GT, Comparison.EQ):
            least = max(least, bound.value + (bound.op is Comparison.GT))
        if bound.op in (Comparison.LE, Comparison.LT, Comparison.EQ):
            most = min(most, bound.value - (bound.op is Comparison.LT))
    return least, most


class _Derived:
    """A dataclass with slots computed from its fields. Copying or unpickling computes them again."""

    __slots__ = ()

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), tuple(getattr(self, one.name) for one in fields(cast("Any", self)))


COUNTED = ("prompt_tokens", "total_tokens", "max_tokens", "images", "audios", "tools")
"""The numeric fields of `When`."""


class _DerivedOfWhen(_Derived):
    __slots__ = ("is_empty", "numeric", "tokens_least", "tokens_most")
    is_empty: bool
    numeric: tuple[str, ...]
    tokens_least: int
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
        object.__setattr__(self, "numeric", tuple(name for name in COUNTED if getattr(self, name)))
        is_empty = all(getattr(self, one.name) == one.default for one in fields(self))
        object.__setattr__(self, "is_empty", is_empty)
        least, most = range_of(self.prompt_tokens)
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

    def pools_of(self, backend_id: str) -> Sequence[Pool]:
        """Return the pools that a backend is in, in their order."""
        return [pool for pool in self.pools.values() if backend_id in pool.backends]

    def tpot_target_s(self, backend_id: str) -> float | None:
        """Return the lowest target among the pools of a backend, or None if none of them has one."""
        targets = (pool.tpot_target_s for pool in self.pools_of(backend_id))
        return min((target for target in targets if target is not None), default=None)

    def job_reserve(self, backend_id: str) -> float:
        """Return the largest part of its knee that jobs leave free in a pool of a backend (0..1)."""
        return max((pool.jobs.reserve for pool in self.pools_of(backend_id)), default=0.0)

    def spill_reserve(self, backend_id: str) -> float:
        """Return the largest part of its knee that spills leave free in a pool of a backend (0..1)."""
        return max((pool.spill.reserve for pool in self.pools_of(backend_id)), default=0.0)
