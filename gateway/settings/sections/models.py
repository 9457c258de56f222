"""The names that applications send, and the classes of work behind each: `models`, `routing`."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from gateway.core.policy import RetryPolicy, TemplateCosts, TrafficClass, Waiting, Weights
from gateway.settings.fields import (
    Attempts,
    Comparisons,
    Count,
    CountComparisons,
    Headers,
    Names,
    Positive,
    Seconds,
    Section,
    Slug,
    Text,
    Weight,
    number,
)

_COSTS = TemplateCosts()
_CLASS = TrafficClass(name="", pools=())
_WAITING, _WEIGHTS = Waiting(), Weights()


class WhenSection(Section):
    """A condition: every key given must hold; an empty one always holds."""

    prompt_tokens: Comparisons | None = None
    """Estimated prompt length, including template, tools and images."""

    total_tokens: Comparisons | None = None
    """Prompt plus output: `max_tokens`, or `output_reserve_tokens` if the caller gives none."""

    max_tokens: Comparisons | None = None
    """`max_completion_tokens` or `max_tokens` as sent by the caller."""

    images: CountComparisons | None = None
    """Images in the request: true for any, false for none, or a comparison."""

    audio: CountComparisons | None = None
    """Audio parts in the request: true for any, false for none, or a comparison."""

    tools: CountComparisons | None = None
    """Tools offered to the model: true for any, false for none, or a comparison."""

    reasoning: bool | None = None
    """Whether reasoning is requested: `reasoning_effort`, `enable_thinking`, or else a reasoning alias."""

    stream: bool | None = None
    """Whether the answer is streamed."""

    key: Names | None = None
    """Name of the caller's API key under `keys`: one, or a list of accepted names."""

    header: Headers = Field(default_factory=dict)
    """Request headers by name, none with secrets: the value, a list of accepted values, or true for any."""


class WaitingSection(Section):
    """How requests of a class wait for a slot when every backend is full."""

    max_wait_s: Seconds | None = None
    """Longest wait; longer forecasts are refused. Unset: by kind (docs/configuration.md#kinds-of-classes)."""

    ttft_target_s: Seconds | None = None
    """Target seconds to the first token; orders the queue. Unset: by the kind of class."""

    prefill_weight: Weight | None = None
    """Multiples of a prompt's own prefill time added to that target. Above 1, short prompts go first.
    Unset: by the kind of class."""

    waiting_max: Positive = _WAITING.waiting_max
    """How many requests of the class may wait."""

    waiting_bytes_max: Positive = _WAITING.waiting_bytes_max
    """Total bytes that they may hold."""

    when_late: Literal["refuse", "demote"] = "refuse"
    """What happens to a late request: refused with 429, or moved behind the others of its class."""

    demoted_wait_s: Seconds | None = None
    """Longest total wait of a demoted request. Unset: twice max_wait_s, and at least 60."""

    keep_alive_after_s: Seconds | None = None
    """Seconds after which a stream without a token gets its headers, then comments. Unset: never."""

    passes_max: Count = _WAITING.passes_max
    """How many smaller requests may overtake one that does not fit yet."""


class QueueSection(Section):
    """The class's chats run as jobs while their callers wait: they queue in the store, with no time limit."""

    on_disconnect: Literal["cancel", "finish"] = "cancel"
    """What happens to one whose caller leaves before its answer is complete."""


class ClassSection(Section):
    """One kind of work and where it goes. Classes are tried top to bottom; the first match wins."""

    name: Slug = Field(alias="class")
    """A name of your own; callers see it in x-gateway-class. What a class is for, only `when` says."""

    when: WhenSection = WhenSection()
    """Which requests belong to it. Unset: all."""

    pools: Names
    """Pool ids, first choice first; the later ones are the spill order."""

    output_reserve_tokens: Positive = _CLASS.output_reserve_tokens
    """Output tokens to plan for when the caller gives no `max_tokens`: fewer where only these do not fit."""

    priority: Annotated[int, BeforeValidator(number)] = _CLASS.priority
    """Among waiting classes, the higher goes first."""

    waiting: WaitingSection = WaitingSection()
    """How its requests wait when every backend is full."""

    queue: QueueSection | None = None
    """Run its chats as jobs, with the caller waiting (docs/jobs.md). Needs `jobs`. Unset: a normal wait."""


class PromptSection(Section):
    """Constants of the chat template that prompt length depends on (docs/estimate.md#the-template)."""

    image_tokens: Count = _COSTS.image
    """Soft tokens per image: the processor's budget. A request's own `max_soft_tokens` overrides it."""

    audio_tokens: Count = _COSTS.audio
    """Soft tokens per audio part: the maximum, since its length is not read."""

    empty_thought_tokens: Count = _COSTS.empty_thought
    """Tokens of the empty thought a template writes when thinking is off; 0 for templates without it."""


class ModelSection(Section):
    """A name applications send, and its classes. Each backend gets its own served name."""

    aliases: tuple[Text, ...] = ()
    """Other names of the same model."""

    reasoning_aliases: tuple[Text, ...] = ()
    """Other names that also request reasoning, with `enable_thinking`, of a chat that does not say."""

    classes: Annotated[tuple[ClassSection, ...], Field(min_length=1)]
    """Tried top to bottom; the first match wins."""

    prompt: PromptSection = PromptSection()
    """Constants of the chat template."""


class WeightsSection(Section):
    """How much each score counts when the backends of a pool are ranked; 0 turns a score off."""

    spare_knee: Weight = _WEIGHTS.spare_knee
    """Prefer the backend with the largest share of its knee free, by what all run there."""

    speed: Weight = _WEIGHTS.speed
    """Prefer the backend whose profile decodes faster."""

    prefix_affinity: Weight = _WEIGHTS.prefix_affinity
    """Prefer the replica that holds a conversation's prefix, the more the longer reading it again would take.
    With 0, nothing counts as cached, as with engines that cache no prefixes
    (docs/routing.md#conversations)."""

    slow_context: Weight = _WEIGHTS.slow_context
    """Keep prompts away from a busy backend that stalls at their length (docs/quirks.md#context_2k_stall)."""


class RoutingSection(Section):
    """How a backend is chosen."""

    weights: WeightsSection = WeightsSection()
    """How much each score counts."""

    attempts_max: Attempts = RetryPolicy().attempts_max
    """How many backends may be tried before the caller sees a failure; at most 10. If they crash, two.
    One that refuses because of load while it runs others does not count (docs/health.md#ejection)."""
