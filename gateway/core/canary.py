"""The canary: a request with a known answer. Pure.

A server that has booted and reports healthy may still produce garbage: a stale chat template writes channel
markers into every answer, a broken quantization repeats one word, a reasoning parser returns no thought. So a
model is tested before it serves, at temperature 0, and its answer is judged here.
"""

import json
from collections.abc import Mapping
from typing import Any

from gateway.core.value import valueclass

MARKERS = (
    "<|channel",
    "<channel|>",
    "<|turn",
    "<turn|>",
    "<|think|>",
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
)
"""Parts of chat templates, which must not occur in an answer."""

_SHOWN = 80
"""Maximum characters of an answer that are quoted. A choice: enough to see that it is nonsense."""


@valueclass(frozen=True, slots=True)
class Canary:
    """A canary request. The defaults are choices: a question with one answer, and ample time.

    Attributes:
        prompt: The question.
        expect: Text that the answer must contain, ignoring case.
        reasoning: Whether to request a thought.
        max_tokens: Token limit, including the thought.
        timeout_s: Time limit in seconds.
    """

    prompt: str = "What is 17 + 25? Answer with the number alone."
    expect: str = "42"
    reasoning: bool = False
    max_tokens: int = 512
    timeout_s: float = 120.0


def body(canary: Canary, model: str) -> bytes:
    """Return the request body for /v1/chat/completions."""
    return json.dumps(
        {
            "model": model,
            "messages": [{"role": "user", "content": canary.prompt}],
            "temperature": 0,
            "max_tokens": canary.max_tokens,
            # Stated explicitly, because parsers and templates disagree about the default (vLLM #49955).
            "chat_template_kwargs": {"enable_thinking": canary.reasoning},
        }
    ).encode()


def fault(canary: Canary, answer: bytes) -> str:
    """Return what is wrong with a non-streamed answer; "" if it is right."""
    message = _message(answer)
    if message is None:
        return "its answer is not a chat completion"
    content = message.get("content")
    thought = message.get("reasoning") or message.get("reasoning_content")
    if not isinstance(content, str) or not content.strip():
        return "its answer is empty"
    for text in (content, thought):
        marker = next((one for one in MARKERS if isinstance(text, str) and one in text), None)
        if marker is not None:
            return f"its answer contains {marker}: {_short(str(text))}"
    if canary.reasoning and not (isinstance(thought, str) and thought.strip()):
        return "it was asked to think, but its reasoning is empty"
    if canary.expect.casefold() not in content.casefold():
        return f"expected {canary.expect!r}, it said {_short(content)}"
    return ""


def _message(answer: bytes) -> Mapping[str, Any] | None:
    try:
        document = json.loads(answer)
        message = document["choices"][0]["message"]
    except (ValueError, RecursionError, KeyError, IndexError, TypeError):
        return None
    return message if isinstance(message, dict) else None


def _short(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")
