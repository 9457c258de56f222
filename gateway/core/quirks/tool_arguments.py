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


_TOO_LONG = UnfitAnswer(
    "The backend's tool calls have arguments without an end.", code="tool_arguments_invalid"
)

ARGUMENTS_CHARS_MAX = 16 * 1024 * 1024
"""Maximum characters of the arguments of all calls. A choice that bounds memory: models write far less."""


class ToolArguments(Remedy):
    """Collects the arguments of every call, and validates them when its choice has finished."""

    marks = b'"tool_calls"'

    def __init__(self) -> None:
        """Start with no calls."""
        self._calls: dict[tuple[int, int], list[str]] = {}
        self._chars = 0

    def part(self, index: int, part: dict[str, Any], finish: str | None) -> bool:
        """See `Remedy`. A choice that was cut at its token limit (`length`) is not checked."""
        calls = part.get("tool_calls")
        for place, call in enumerate(calls if isinstance(calls, list) else ()):
            if isinstance(call, dict):
                at = call.get("index")
                key = index, at if isinstance(at, int) else place
                said, parts = _arguments(call), self._calls.setdefault(key, [])
                if said:
                    parts.append(said)
                    self._chars += len(said)
        if self._chars > ARGUMENTS_CHARS_MAX:
            self.fault = _TOO_LONG
        elif finish is not None:
            self._end(index, is_cut=finish == "length")
        return False

    def _end(self, index: int, *, is_cut: bool) -> None:
        """Check the calls of a choice that has finished, once."""
        mine = [key for key in self._calls if key[0] == index]
        written = ["".join(self._calls.pop(key)) for key in mine]
        if not is_cut and not all(_is_object(text) for text in written):
            self.fault = _FAULT


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
