"""The name of the reasoning member: `reasoning` as in vLLM since 0.18, `reasoning_content`, or both.

This is not a bug but a renamed member: clients that look for the other name see no reasoning at all.
"""

from typing import Any

from gateway.core.policy import ReasoningField
from gateway.core.quirks.plan import Plan
from gateway.core.quirks.remedy import Remedy

_NAMES = (ReasoningField.REASONING.value, ReasoningField.REASONING_CONTENT.value)


class RenameReasoning(Remedy):
    """Renames the reasoning member, whichever of the two names the backend uses."""

    marks = b'"reasoning'

    def __init__(self, field: ReasoningField) -> None:
        """Rename it as configured by `field`, which must not be `AS_SENT`."""
        self._shown = _NAMES if field is ReasoningField.BOTH else (field.value,)

    def part(self, index: int, part: dict[str, Any], finish: str | None) -> bool:
        """See `Remedy`."""
        came = [name for name in _NAMES if name in part]
        if not came or tuple(came) == self._shown:
            return False
        thought = next((part[name] for name in came if part[name] is not None), None)
        for name in came:
            del part[name]
        part.update(dict.fromkeys(self._shown, thought))
        return True


def rename(plan: Plan, field: ReasoningField) -> None:
    """Add the renaming configured by `field`, which is not `AS_SENT`, to the plan of a chat."""
    if plan.is_chat:
        plan.remedies.append(RenameReasoning(field))
