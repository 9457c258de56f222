"""Parses a request for an answer: from the body's bytes to the input of the engine and the wire format.

`read_chat` and `read_completion` check everything that can be checked without token counts; `ParsedCall.call`
takes the counts and decides the rest. Whatever vLLM accepts and ignores is accepted and ignored here.
"""

import random
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from gateway.core.class_counts import CHARS_PER_TOKEN_MAX
from gateway.core.value import valueclass
from gateway.simulator import pieces
from gateway.simulator.options import Quirk, SimulatorOptions
from gateway.simulator.reading import Members
from gateway.simulator.recall import asked_for, continued
from gateway.simulator.refusals import (
    bad_request,
    error,
    too_many_chars,
    too_many_tokens,
    unknown_model,
)
from gateway.simulator.sampling import Sampling, check_asked, check_tokens, read_sampling
from gateway.simulator.script import ChoiceRequest, Script, ToolCall, as_content, sample_json, write
from gateway.simulator.shapes import (
    check_parts,
    check_response_format,
    check_tool_use,
    note_effort,
    note_response_format,
    note_tools,
)
from gateway.simulator.template import IMAGE_TOKENS, Rendered, of_ids, raw, render

_COMPLETION_TOKENS = 16
"""Default output of /v1/completions: vLLM's, and OpenAI's."""


@valueclass(frozen=True, slots=True)
class Delivery:
    """How to send the answer.

    Attributes:
        is_chat: Chat or completion.
        stream: As events.
        include_usage: With a usage event at the end.
        continuous_usage: With usage in every event.
        interval: Tokens to collect per event, from the second one on.
        with_reasoning: Whether to include the thought.
        with_ids: Whether to include token ids.
        with_prompt_text: Whether to include the rendered prompt.
        with_prompt_details: Whether usage says how much of the prompt was cached.
        role: Role of the message.
    """

    is_chat: bool
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    interval: int = 1
    with_reasoning: bool = True
    with_ids: bool = False
    with_prompt_text: bool = False
    with_prompt_details: bool = False
    role: str = "assistant"


@valueclass(frozen=True, slots=True)
class Call:
    """An accepted request.

    Attributes:
        delivery: How to send the answer.
        prompts: One, or those of a completion.
        prompt_tokens: Length of each.
        prompt_keys: Keys of the blocks of each in the prefix cache.
        scripts: The content of each choice; those of one prompt are adjacent.
        max_tokens: The output limit, requested or default, for the metrics.
    """

    delivery: Delivery
    prompts: tuple[Rendered, ...]
    prompt_tokens: tuple[int, ...]
    prompt_keys: tuple[Sequence[int], ...]
    scripts: tuple[Script, ...]
    max_tokens: int

    @property
    def choices_per_prompt(self) -> int:
        """`n`."""
        return len(self.scripts) // len(self.prompts)

    def prompt_of(self, choice: int) -> int:
        """Return the index of a choice's prompt."""
        return choice // self.choices_per_prompt


@valueclass(frozen=True, slots=True)
class ParsedCall:
    """A valid request whose length has not been checked yet."""

    options: SimulatorOptions
    delivery: Delivery
    prompts: tuple[Rendered, ...]
    max_tokens: int | None
    sampling: Sampling
    thinking: bool = False
    calls: Sequence[ToolCall] = ()
    fixed_text: str | None = None

    @property
    def chars(self) -> int:
        """Number of characters to tokenize."""
        return sum(prompt.chars for prompt in self.prompts)

    def refuse_by_length(self) -> None:
        """Raise the `Refusal` for a prompt that is too long even to be counted."""
        window = self.options.profile.capacity.context_tokens
        chars_max = CHARS_PER_TOKEN_MAX * window
        for prompt in self.prompts:
            if self.sampling.truncate is None and prompt.chars > chars_max:
                raise too_many_chars(window, prompt.chars, chars_max)

    def counted(self) -> list[tuple[int, Sequence[int]]]:
        """Return the length of each prompt, and the keys of its blocks in the prefix cache if it has one."""
        if self.options.prefix_caching and self.sampling.truncate is None:
            return [prompt.counted() for prompt in self.prompts]
        return [(prompt.count(), ()) for prompt in self.prompts]

    def call(self, counted: Sequence[tuple[int, Sequence[int]]]) -> Call:
        """Return the call for prompts of which `counted` says this.

        An output limit that does not fit beside the prompt is silently reduced, as in vLLM.

        Raises:
            Refusal: a prompt leaves no room for a single token.
        """
        window = self.options.profile.capacity.context_tokens
        counts = [count for count, _ in counted]
        if self.sampling.truncate is not None:
            counts = [min(count, self.sampling.truncate) for count in counts]
        if max(counts) >= window:
            raise too_many_tokens(window)
        scripts = [
            self._script(prompt, min(self.max_tokens or window, window - count), index)
            for prompt, count in zip(self.prompts, counts, strict=True)
            for index in range(self.sampling.choices)
        ]
        max_tokens = self.max_tokens or window - counts[0]
        keys = tuple(keys for _, keys in counted)
        return Call(self.delivery, self.prompts, tuple(counts), keys, tuple(scripts), max_tokens)

    def _script(self, prompt: Rendered, tokens_max: int, index: int) -> Script:
        options, sampling = self.options, self.sampling
        wanted = ChoiceRequest(
            tokens_max,
            sampling.min_tokens,
            sampling.ignore_eos,
            self.thinking,
            self.calls,
            self.fixed_text,
            sampling.stops,
            sampling.keep_stop,
        )
        text = zlib.crc32(prompt.text().encode("utf-8", "replace"))
        dice = random.Random(f"{options.seed} {sampling.seed} {text} {index}")
        script = write(
            wanted, dice, answer_tokens=options.answer_tokens, thought_tokens=options.thought_tokens
        )
        return self._with_quirks(script)

    def _with_quirks(self, script: Script) -> Script:
        quirks, stream = self.options.quirks, self.delivery.stream
        if Quirk.NULL_REASONING in quirks:
            script = as_content(script, with_markers=not self.sampling.skip_special)
        is_spoken = self.delivery.is_chat and not self.thinking and not script.calls
        if Quirk.STALE_TEMPLATE in quirks and is_spoken:
            lead = "<|channel>thought\n<channel|>" + script.tokens[0]
            script = replace(script, tokens=[lead, *script.tokens[1:]])
        if Quirk.TURN_MARKER_LEAKS in quirks and stream and script.finish_reason == "stop":
            script = replace(script, tokens=[*script.tokens[:-1], script.tokens[-1] + "<turn|>"])
        if script.calls:
            if Quirk.INVALID_TOOL_JSON in quirks and stream:
                cut = [replace(call, arguments=call.arguments[:-1]) for call in script.calls]
                script = replace(script, calls=cut)
            if Quirk.TOOL_MARKUP_LEAKS in quirks and not stream:
                leaked = [f"<|tool_call>call:{one.name}{one.arguments}<tool_call|>" for one in script.calls]
                script = Script(pieces.pieces("".join(leaked)))
        return script


def read_chat(data: dict[str, Any], options: SimulatorOptions) -> ParsedCall:
    """Parse the body of /v1/chat/completions.

    Raises:
        Refusal: it is invalid, or asks for something impossible.
    """
    check_response_format(data)
    check_asked(data)
    check_tool_use(data)
    members = Members(data)
    messages = members.array("messages", required=True)
    _check_messages(members, messages)
    tools = members.array("tools")
    note_tools(members)
    note_response_format(members)
    for name in ("model", "user"):
        members.text(name)
    salt = members.text("cache_salt")
    members.boolean("parallel_tool_calls")
    kwargs = members.object("chat_template_kwargs")
    thinking = _is_thinking(members, kwargs, options)
    continue_final = members.boolean("continue_final_message")
    generation_prompt = members.boolean("add_generation_prompt", True)
    delivery = _delivery(members, options, is_chat=True)
    sampling = read_sampling(members)
    limit = members.integer("max_completion_tokens")
    fallback = members.integer("max_tokens")
    budget = members.object("mm_processor_kwargs").get("max_soft_tokens")
    members.finish()
    _check_model(data, options)
    _check_stream_options(data, delivery)
    check_parts(messages)
    max_tokens = limit if limit is not None else fallback
    sampling.check(max_tokens, options.profile.capacity.context_tokens)
    check_tokens(data)
    if not messages:
        raise bad_request(
            "Cannot apply chat template to an empty conversation. Provide at least one message."
        )
    if data.get("chat_template"):
        raise bad_request(
            "Chat template is passed with request, but --trust-request-chat-template is not set. "
            "Refused request with untrusted chat template."
        )
    if continue_final and generation_prompt:
        raise bad_request(
            "continue_final_message and add_generation_prompt are not compatible. Use "
            "continue_final_message when you want the model to continue the final message, and "
            "add_generation_prompt when you want to add a header that will prompt it to start a new "
            "assistant message instead."
        )
    _check_modalities(messages, options)
    rendered = render(
        messages,
        tools=[tool for tool in tools if isinstance(tool, Mapping)],
        thinking=thinking,
        generation_prompt=generation_prompt,
        continue_final=continue_final,
        image_tokens=budget if isinstance(budget, int) else IMAGE_TOKENS,
        salt=salt or "",
    )
    return ParsedCall(
        options,
        delivery,
        (rendered,),
        max_tokens,
        sampling,
        thinking=thinking and not continue_final,  # a continuation is part of the answer
        calls=_tool_calls(data, messages, tools, options),
        fixed_text=_fixed_text(data, messages),
    )


def read_completion(data: dict[str, Any], options: SimulatorOptions) -> ParsedCall:
    """Parse the body of /v1/completions. Raises as `read_chat`."""
    members = Members(data)
    delivery = _delivery(members, options, is_chat=False)
    sampling = read_sampling(members)
    max_tokens = members.integer("max_tokens")
    members.finish()
    _check_model(data, options)
    _check_stream_options(data, delivery)
    sampling.check(max_tokens, options.profile.capacity.context_tokens)
    check_tokens(data)
    if max_tokens is None:
        max_tokens = _COMPLETION_TOKENS
    prompts = _prompts(data.get("prompt"))
    if not prompts:
        raise bad_request("Either prompt or prompt_embeds must be provided and non-empty.")
    return ParsedCall(options, delivery, prompts, max_tokens, sampling)


# ------------------------------------------------------------------ common to both


def _delivery(members: Members, options: SimulatorOptions, *, is_chat: bool) -> Delivery:
    stream_options = members.object("stream_options")
    messages = members.data.get("messages")
    role = "assistant"
    if not members.boolean("add_generation_prompt", True) and isinstance(messages, list) and messages:
        last = messages[-1]
        role = str(last.get("role", role)) if isinstance(last, Mapping) else role
    return Delivery(
        is_chat=is_chat,
        stream=members.boolean("stream"),
        include_usage=bool(stream_options.get("include_usage")),
        continuous_usage=bool(stream_options.get("continuous_usage_stats")),
        interval=max(1, members.integer("stream_interval") or options.stream_interval),
        with_reasoning=members.boolean("include_reasoning", True),
        with_ids=members.boolean("return_token_ids"),
        with_prompt_text=members.boolean("return_prompt_text"),
        with_prompt_details=options.prompt_tokens_details,
        role=role,
    )


def _check_model(data: Mapping[str, Any], options: SimulatorOptions) -> None:
    asked = data.get("model")
    if asked is not None and asked != options.model:
        raise unknown_model(str(asked), options.model)


def _check_stream_options(data: Mapping[str, Any], delivery: Delivery) -> None:
    if data.get("stream_options") and not delivery.stream:
        raise bad_request("Stream options can only be defined when `stream=True`.", "stream_options")


# ------------------------------------------------------------------ chat


def _is_thinking(members: Members, kwargs: Mapping[str, Any], options: SimulatorOptions) -> bool:
    effort = note_effort(members)
    asked = kwargs.get("enable_thinking")
    if asked is None and effort is None:
        return Quirk.THINKS_UNASKED in options.quirks
    return bool(asked) if asked is not None else effort != "none"


_KINDS = {"user": "User", "system": "System", "developer": "Developer", "tool": "Tool"}


def _check_messages(members: Members, messages: Sequence[Any]) -> None:
    for index, message in enumerate(messages):
        where = f"body.messages.{index}"
        if not isinstance(message, Mapping):
            members.problem("dict_type", where, "Input should be a valid dictionary", message)
        elif "role" not in message:
            members.problem("missing", f"{where}.role", "Field required", message)
        elif message.get("content") is None and (kind := _KINDS.get(str(message["role"]))):
            location = f"{where}.ChatCompletion{kind}MessageParam.content"
            members.problem("string_type", location, "Input should be a valid string", None)
        elif not isinstance(message.get("content"), str | list | None):
            location = f"{where}.content"
            members.problem("string_type", location, "Input should be a valid string", message["content"])


def _check_modalities(messages: Sequence[Mapping[str, Any]], options: SimulatorOptions) -> None:
    images, audios = (
        sum(
            isinstance(part, Mapping) and part.get("type") in kinds
            for message in messages
            if isinstance(message.get("content"), list)
            for part in message["content"]
        )
        for kinds in (("image_url", "image", "input_image"), ("input_audio", "audio_url", "audio"))
    )
    accepted = options.profile.modalities
    if images + audios > 0 and accepted.images_max == 0 and accepted.audios_max == 0:
        raise error(400, "BadRequestError", f"{options.model} is not a multimodal model")
    for name, found, most in (("image", images, accepted.images_max), ("audio", audios, accepted.audios_max)):
        if most is not None and found > most:
            raise bad_request(f"At most {most} {name}(s) may be provided in one prompt.")


def _tool_calls(
    data: Mapping[str, Any],
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any],
    options: SimulatorOptions,
) -> list[ToolCall]:
    """Return the tool calls at the end of the answer: a forced one, or of all tools that the user named.

    If free to choose, it calls no tool twice in a turn while others are left, so that an agent's loop ends.
    """
    functions = {
        str(tool["function"].get("name")): tool["function"]
        for tool in tools
        if isinstance(tool, Mapping) and isinstance(tool.get("function"), Mapping)
    }
    choice = data.get("tool_choice")
    names: list[str] = []
    called = _called_in_this_turn(messages)
    if isinstance(choice, Mapping) and isinstance(choice.get("function"), Mapping):
        names = [str(choice["function"].get("name"))]
    elif choice == "required":
        names = ([known for known in functions if known not in called] or list(functions)[-1:])[:1]
    if names:
        if Quirk.TOOL_CHOICE_IGNORED in options.quirks:
            return []
    elif choice != "none" and messages[-1].get("role") == "user":
        said = str(messages[-1].get("content")).casefold()
        names = [tool for tool in functions if tool not in called and _names(said, tool.casefold())]
        if not data.get("parallel_tool_calls", True):
            names = names[:1]
    return [ToolCall(name, sample_json(functions[name].get("parameters") or {})) for name in names]


def _names(said: str, tool: str) -> bool:
    """Return whether a text has the name of a tool, and not only as a part of another one's."""
    if tool not in said:
        return False
    return re.search(rf"(?<!\w){re.escape(tool)}(?!\w)", said, re.ASCII) is not None


def _called_in_this_turn(messages: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the tools that were called since the assistant's last final answer."""
    called: set[str] = set()
    for message in reversed(messages):
        if message.get("role") != "assistant":
            continue
        calls = message.get("tool_calls")
        if not isinstance(calls, list) or not calls:
            break
        functions = [call.get("function") for call in calls if isinstance(call, Mapping)]
        called |= {str(function.get("name")) for function in functions if isinstance(function, Mapping)}
    return called


def _fixed_text(data: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> str | None:
    """Return an answer that is not prose: JSON of a given schema, or one that can be checked."""
    text = _json_text(data)
    if text is None and (asked := _said_by("user", messages[-1])) is not None:
        return asked_for(asked)
    if text is None and len(messages) > 1 and data.get("continue_final_message"):
        asked, so_far = _said_by("user", messages[-2]), _said_by("assistant", messages[-1])
        return None if asked is None or so_far is None else continued(asked, so_far)
    return text


def _said_by(role: str, message: Mapping[str, Any]) -> str | None:
    """Return the text of a message with that role; None if it has another role, or is not a single text."""
    content = message.get("content")
    if isinstance(content, list) and len(content) == 1 and isinstance(content[0], Mapping):
        content = content[0].get("text")
    return content if message.get("role") == role and isinstance(content, str) else None


def _json_text(data: Mapping[str, Any]) -> str | None:
    wanted = data.get("response_format")
    if not isinstance(wanted, Mapping):
        return None
    if wanted.get("type") == "json_object":
        return sample_json({"type": "object", "properties": {"answer": {"type": "string"}}})
    if wanted.get("type") != "json_schema":
        return None
    return sample_json(wanted["json_schema"].get("schema") or {})


# ------------------------------------------------------------------ completions


def _prompts(prompt: object) -> tuple[Rendered, ...]:
    """Parse the prompts of a completion: text, ids, or a list of either."""
    if isinstance(prompt, str):
        return (raw(prompt),)
    if not isinstance(prompt, list) or not prompt:
        return ()
    if all(isinstance(item, int) for item in prompt):
        return (of_ids(prompt),)
    return tuple(of_ids(item) if isinstance(item, list) else raw(str(item)) for item in prompt)
