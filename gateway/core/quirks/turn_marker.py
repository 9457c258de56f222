"""Streams whose text ends with the end-of-turn marker.

Text that could be the beginning of the marker is held back until the next event of its choice. A complete
marker is dropped at the end of the choice, and is ordinary text anywhere else.
"""

from typing import Any

from gateway.core.quirks.plan import Plan, Workaround
from gateway.core.quirks.remedy import Remedy, beginning

MARKER = "<turn|>"

_BEFORE_ALL = frozenset({"role", "content"})
_BEFORE_WORDS = _BEFORE_ALL | {"reasoning", "reasoning_content"}


class TurnMarker(Remedy):
    """Removes a trailing marker from every choice."""

    def __init__(self) -> None:
        """Start without held text."""
        self._held: dict[int, str] = {}

    def part(self, index: int, part: dict[str, Any], finish: str | None) -> bool:
        """See `Remedy`."""
        content = part.get("content")
        said = content if isinstance(content, str) else ""
        text = self._held.pop(index, "") + said
        if finish is not None:
            kept = text.removesuffix(MARKER)
        else:
            # A call or reasoning after the held text shows that this was not the end. An event without
            # either leaves that open. Reasoning in the same event as text precedes the text.
            before = _BEFORE_WORDS if said else _BEFORE_ALL
            follows = any(value for name, value in part.items() if name not in before)
            held = "" if follows else _held(text)
            kept = text.removesuffix(held)
            if held:
                self._held[index] = held
        if kept == said:
            return False
        part["content"] = kept
        return True


def _held(text: str) -> str:
    return MARKER if text.endswith(MARKER) else beginning(text, MARKER)


def _rule(plan: Plan) -> None:
    if plan.is_chat and plan.is_streamed and not any(isinstance(one, TurnMarker) for one in plan.remedies):
        plan.remedies.append(TurnMarker())


WORKAROUND = Workaround(issue="vLLM #49955", versions="0.25.1 and 0.26.0", rule=_rule)
