"""The names that applications send, and the classes of work behind each: `models`, `routing`."""

from typing import Annotated, Literal

from pydantic import Field

from gateway.core.values import RetryPolicy, TemplateCosts, TrafficClass, Waiting, Weights
from gateway.settings.fields import (
    Attempts,
    Comparisons,
    Count,
    CountComparisons,
    HeaderValues,
    Names,
    Positive,
    Seconds,
    Section,
    Slug,
    Text,
    Weight,
)

_COSTS = TemplateCosts()
_CLASS = TrafficClass(name="", pools=())
_WAITING, _WEIGHTS = Waiting(), Weights()


class WhenSection(Section):
    """A condition: every key that is given must hold; without any it always does."""

    prompt_tokens: Comparisons | None = None
    """The prompt's estimated length, template, tools and images included."""

    total_tokens: Comparisons | None = None
    """That plus the output: `max_tokens`, or `output_reserve_tokens` where the caller gives none."""

    max_tokens: Comparisons | None = None
    """`max_completion_tokens` or `max_tokens` as the caller gave it."""

    images: CountComparisons | None = None
    """Images in the request: true for any, false for none, or a comparison."""

    audio: CountComparisons | None = None
    """Audio parts in the request: true for any, false for none, or a comparison."""

    tools: CountComparisons | None = None
    """Tools offered to the model: true for any, false for none, or a comparison."""

    reasoning: bool | None = None
    """Whether a thought is asked for: `reasoning_effort`, `enable_thinking`, or a reasoning alias."""

    stream: bool | None = None
    """Whether the answer is streamed."""

    key: Names | None = None
    """Name of the caller's API key under `keys`: one, or a list of which any will do."""

    header: dict[str, HeaderValues] = Field(default_factory=dict)
    """Request headers by name: the value, a list of accepted values, or true where any value will do."""


class WaitingSection(Section):
    """How requests of a class wait for a place when every backend is full."""

    max_wait_s: Seconds | None = None
    """The longest a request waits; would it be longer, it is refused at once. Left out: 1.2, 900 or 600."""

    ttft_target_s: Seconds | None = None
    """Seconds from arrival in which the first token is wanted. It orders the line. Left out: 2, 60 or 600."""

    prefill_weight: Weight | None = None
    """How many times a prompt's own reading time comes on top of that. Above 1, short ones go first."""

    waiting_max: Positive = _WAITING.waiting_max
    """Requests of the class that may wait."""

    waiting_bytes_max: Positive = _WAITING.waiting_bytes_max
    """Bytes they may hold together."""

    when_late: Literal["refuse", "demote"] = "refuse"
    """What becomes of one that is late: refused with 429, or sent behind the others."""

    demoted_wait_s: Seconds | None = None
    """The longest one that was sent behind waits, in all. Left out: twice max_wait_s, and 60 at least."""

    keep_alive_after_s: Seconds | None = None
    """Seconds after which a stream without a token gets its headers, then comments. Left out: never."""

    passes_max: Count = _WAITING.passes_max
    """How many smaller requests may pass one that does not fit yet."""


class QueueSection(Section):
    """The class's chats are jobs, served in place: they wait in the store, for as long as it takes."""

    on_disconnect: Literal["cancel", "finish"] = "cancel"
    """What becomes of one whose caller leaves before its answer is complete."""


class ClassSection(Section):
    """One kind of work and where it goes. Classes are tried top to bottom; the first that matches wins."""

    name: Slug = Field(alias="class")
    """short_chat, long_document, reasoning, or a name of your own; callers see it in x-gateway-class."""

    when: WhenSection = WhenSection()
    """What makes a request one of these. Left out, everything is."""

    pools: Names
    """Pool ids, first choice first; the later ones are the spill order."""

    output_reserve_tokens: Positive = _CLASS.output_reserve_tokens
    """Output to plan for when the caller gives no `max_tokens`."""

    priority: int = _CLASS.priority
    """Among the classes that wait, the higher goes first."""

    waiting: WaitingSection = WaitingSection()
    """How its requests wait when every backend is full."""

    queue: QueueSection | None = None
    """Serve its chats as jobs, in place (docs/jobs.md). Needs `jobs`. Left out: they wait in the line."""


class PromptSection(Section):
    """Constants of the chat template that prompt length depends on (docs/measurements.md#prompt-length)."""

    image_tokens: Count = _COSTS.image
    """Soft tokens per image: the processor's budget. A request's own `max_soft_tokens` goes before it."""

    audio_tokens: Count = _COSTS.audio
    """Soft tokens of an audio part of unknown length: the most one can have."""

    empty_thought_tokens: Count = _COSTS.empty_thought
    """Tokens of the empty thought a template writes when thinking is off; 0 for templates without it."""


class ModelSection(Section):
    """A name applications send, and its classes. Each backend gets its own served name."""

    aliases: tuple[Text, ...] = ()
    """Other names that mean the same model."""

    reasoning_aliases: tuple[Text, ...] = ()
    """Names that also make a request a reasoning one."""

    classes: Annotated[tuple[ClassSection, ...], Field(min_length=1)]
    """Tried top to bottom; the first that matches wins."""

    prompt: PromptSection = PromptSection()
    """Constants of the chat template."""


class WeightsSection(Section):
    """How much each score counts when the backends of a pool are ranked; 0 switches one off."""

    spare_knee: Weight = _WEIGHTS.spare_knee
    """Prefer the backend with the largest share of its knee free."""

    speed: Weight = _WEIGHTS.speed
    """Prefer the backend whose profile decodes faster."""

    prefix_affinity: Weight = _WEIGHTS.prefix_affinity
    """Prefer the replica that holds a conversation's prefix: a tie-break (docs/measurements.md#affinity)."""

    slow_context: Weight = _WEIGHTS.slow_context
    """Keep prompts from a busy backend that stalls at their length (docs/quirks.md#context_2k_stall)."""


class RoutingSection(Section):
    """How a backend is picked."""

    weights: WeightsSection = WeightsSection()
    """How much each score counts."""

    attempts_max: Attempts = RetryPolicy().attempts_max
    """How many backends may be tried before the caller hears of a failure."""
