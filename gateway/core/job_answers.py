"""The stored part of a job's answer: its content, how it ended, and how to continue it after an interruption.

An answer is a sequence of chat events, stored as they came from one backend or, after a failure, from
several. Together they form one answer: texts are concatenated.

A continuation uses `continue_final_message`: the text so far is put into the request as the beginning of the
answer, and only the rest has to be generated. With the chat template that the large Gemma 4 models ship, this
yields plausible text, but not the answer that would have come: the template inserts an empty thought before
an answer, but not before a continued one, and drops the original thought. If there is only a thought so far,
or the text is valid only as a whole (a tool call, JSON), the job starts over.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from gateway.core.decoding import decode
from gateway.core.jobs import Chunk, JobStatus
from gateway.core.sse import TOO_MANY, is_credible, payload_of, split
from gateway.core.value import valueclass


@valueclass(frozen=True, slots=True)
class AnswerSoFar:
    """The stored part of an answer.

    Attributes:
        content: Its text.
        calls_tools: Whether it contains the beginning of a tool call.
        finish_reason: How it ended; None if any of its choices has not.
        thought: The thought before its text.
    """

    content: str = ""
    calls_tools: bool = False
    finish_reason: str | None = None
    thought: str = ""

    @property
    def status(self) -> JobStatus:
        """The final status of a job with this answer."""
        return JobStatus.INCOMPLETE if self.finish_reason == "length" else JobStatus.COMPLETED


def current(chunks: Iterable[Chunk]) -> list[Chunk]:
    """Return the valid chunks: those since the answer last started over."""
    kept: list[Chunk] = []
    for chunk in chunks:
        if chunk.restarts:
            kept.clear()
        kept.append(chunk)
    return kept


def answer_so_far(chunks: Iterable[Chunk], choices: int = 1) -> AnswerSoFar:
    """Combine stored chunks of an answer with that many choices."""
    content: list[str] = []
    thought: list[str] = []
    calls_tools = False
    finish_reasons: dict[int, str] = {}
    for event in events(current(chunks)):
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            content.append(delta.get("content") or "")
            thought.append(delta.get("reasoning") or delta.get("reasoning_content") or "")
            calls_tools = calls_tools or bool(delta.get("tool_calls"))
            if reason := choice.get("finish_reason"):
                finish_reasons[choice.get("index") or 0] = reason
    # An answer is truncated if any of its choices is.
    reasons = sorted(finish_reasons.values(), key="length".__eq__)
    finish_reason = reasons[-1] if len(reasons) >= choices else None
    return AnswerSoFar("".join(content), calls_tools, finish_reason, "".join(thought))


CHOICES_MAX = 16_384
"""Maximum choices of an answer. A choice that bounds memory: vLLM makes as many (`VLLM_MAX_N_SEQUENCES`)."""

INVALID_EVENT = (ValueError, TypeError, AttributeError, RecursionError)
"""What reading stored events raises if one is invalid: a stream is relayed without parsing all of it."""


def events(chunks: Iterable[Chunk]) -> Iterable[Mapping[str, Any]]:
    """Yield the decoded events of chunks, in order. Raises one of `INVALID_EVENT`."""
    for chunk in chunks:
        for event in split(chunk.data):
            payload = payload_of(event)
            if payload and payload != b"[DONE]":
                decoded = decode(payload)
                if not is_credible(decoded, CHOICES_MAX):
                    raise ValueError(TOO_MANY.message)
                yield decoded


def choices(body: bytes) -> int:
    """Return the number of choices that a chat request asks for."""
    wanted = json.loads(body).get("n")
    return int(wanted) if isinstance(wanted, int | float) and wanted > 0 else 1


def continuation(body: bytes, answer: AnswerSoFar, spent_tokens: int) -> bytes | None:
    """Return the chat request that continues an answer; None if the job must start over.

    `spent_tokens`: length of the answer so far, including its thought; taken off the request's limits.
    """
    request = json.loads(body)
    messages = request.get("messages")
    if not answer.content.strip() or answer.calls_tools or not isinstance(messages, list):
        return None
    if request.get("continue_final_message") or (request.get("n") or 1) != 1 or _has_form(request):
        return None
    limits = {
        name: max(least, request[name] - spent_tokens)
        for name, least in (("max_tokens", 1), ("max_completion_tokens", 1), ("min_tokens", 0))
        if isinstance(request.get(name), int)
    }
    more = {
        "messages": [*messages, {"role": "assistant", "content": answer.content}],
        "continue_final_message": True,
        "add_generation_prompt": False,
    }
    return json.dumps({**request, **limits, **more}, separators=(",", ":")).encode()


def _has_form(request: Mapping[str, Any]) -> bool:
    form = request.get("response_format")
    is_text = form is None or (isinstance(form, Mapping) and form.get("type") == "text")
    return not is_text or any(request.get(name) for name in ("structured_outputs", "logprobs", "echo"))
