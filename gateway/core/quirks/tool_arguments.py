"""Streamed tool calls with invalid JSON arguments, caused by the engine's streaming parser.

The arguments cannot be repaired, but the caller must not act on them. If nothing has been sent yet, the
request is retried on another backend; otherwise the stream ends with an error instead of its last event.
"""

import json
from typing import Any

from gateway.core.answers import UnfitAnswer
from gateway.core.quirks.plan import Plan, Workaround
from gateway.core.quirks.remedy import Remedy

_FAULT = UnfitAnswer(
    "The backend's tool call has arguments that are not a JSON object.", code="tool_arguments_invalid"
)


class ToolArguments(Remedy):
    """Collects the arguments of every call, and validates them when its choice has finished."""

    marks = b'"tool_calls"'

    def __init__(self) -> None:
        """Start with no calls."""
        self._calls: dict[tuple[int, int], list[str]] = {}

    def part(self, index: int, part: dict[str, Any], finish: str | None) -> bool:
        """See `Remedy`. A choice that was cut at its token limit (`length`) is not checked."""
        calls = part.get("tool_calls")
        for place, call in enumerate(calls if isinstance(calls, list) else ()):
            if isinstance(call, dict):
                at = call.get("index")
                key = index, at if isinstance(at, int) else place
                self._calls.setdefault(key, []).append(_arguments(call))
        if finish is not None and finish != "length":
            mine = (parts for (choice, _), parts in self._calls.items() if choice == index)
            if not all(_is_object("".join(parts)) for parts in mine):
                self.fault = _FAULT
        return False


def _arguments(call: dict[str, Any]) -> str:
    function = call.get("function")
    arguments = function.get("arguments") if isinstance(function, dict) else None
    return arguments if isinstance(arguments, str) else ""


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _rule(plan: Plan) -> None:
    if plan.is_chat:
        plan.remedies.append(ToolArguments())


WORKAROUND = Workaround(
    issue="vLLM #38946", versions="0.19, fixed by PR #38992", rule=_rule, is_for_tools=True
)
