"""Forced tool choices that the engine does not enforce, so that it may answer with text.

A stream is held back until every choice has made its call, so that the request can still be retried elsewhere
if one does not. Text before a call is legal, so only the end of a choice shows that the call is missing.
"""

from typing import Any

from gateway.core.answers import UnfitAnswer
from gateway.core.quirks.plan import Plan, Workaround
from gateway.core.quirks.remedy import Remedy

_FAULT = UnfitAnswer(
    "The backend did not make the tool call that `tool_choice` demands.", code="tool_call_missing"
)


class ForcedCall(Remedy):
    """Holds a stream back until every choice has made the forced call."""

    holds = True

    def __init__(self, choices: int, name: str | None) -> None:
        """Expect that many choices to call the function `name`, or any function if it is None."""
        self._name = name
        self._waiting = set(range(choices))
        self._has_text: set[int] = set()

    def part(self, index: int, part: dict[str, Any], finish: str | None) -> bool:
        """See `Remedy`."""
        if index not in self._waiting:
            return False
        content = part.get("content")
        if isinstance(content, str) and content.strip():
            self._has_text.add(index)
        # A choice cut at its token limit before any text is accepted: it might still have made the call.
        if self._is_called(part.get("tool_calls")) or (finish == "length" and index not in self._has_text):
            self._waiting.remove(index)
        elif finish is not None:
            self.fault = _FAULT
        self.is_idle = not self._waiting
        return False

    def _is_called(self, calls: object) -> bool:
        return any(
            self._name is None or function.get("name") == self._name
            for call in (calls if isinstance(calls, list) else ())
            if isinstance(call, dict) and isinstance(function := call.get("function"), dict)
        )


def _rule(plan: Plan) -> None:
    request = plan.asked.request
    if not plan.is_chat:
        return
    match plan.asked.member("tool_choice"):
        case "required":
            plan.remedies.append(ForcedCall(request.choices, None))
        case {"function": {"name": str(name)}}:
            plan.remedies.append(ForcedCall(request.choices, name))


WORKAROUND = Workaround(
    issue="vLLM #50477",
    versions="0.26.0 to 0.33.0; named choices worked on 0.21.0",
    rule=_rule,
    is_for_tools=True,
)
