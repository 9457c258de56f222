"""The caller's request and its length, as far as the gateway interprets them. Independent of any vendor."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType

from gateway.core.value import valueclass


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


SECRET_HEADERS = frozenset({"authorization", "cookie", "proxy-authorization"})
"""Headers that no request carries here, in lower case: what is kept or shown of requests holds no secrets."""


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
