"""All quirks that the gateway works around, by their names in profiles and configurations."""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache

from gateway.core.policy import ReasoningField
from gateway.core.quirks import (
    channels,
    context_buckets,
    output_limit,
    thinking_default,
    tool_arguments,
    tool_choice,
    tool_markup,
    turn_marker,
)
from gateway.core.quirks.plan import Plan, RemedyRequest, Workaround
from gateway.core.quirks.reasoning_field import rename

WORKAROUNDS: Mapping[str, Workaround] = {
    # First, because it decides whether the backend is asked for a stream.
    "tool_markup_leaks": tool_markup.WORKAROUND,
    "thinking_default_differs": thinking_default.WORKAROUND,
    "max_completion_tokens_ignored": output_limit.WORKAROUND,
    "null_reasoning_content": channels.NULL_REASONING,
    "no_reasoning_parser": channels.NO_PARSER,
    "stale_chat_template": channels.STALE_TEMPLATE,
    "turn_marker_leaks": turn_marker.WORKAROUND,
    "streamed_tool_json_invalid": tool_arguments.WORKAROUND,
    "tool_choice_not_enforced": tool_choice.WORKAROUND,
    context_buckets.BUCKETS: context_buckets.BUCKETS_WORKAROUND,
    context_buckets.STALL: context_buckets.STALL_WORKAROUND,
}
"""In the order of application."""

Rule = Callable[[Plan], None]


def plan(
    quirks: tuple[str, ...],
    asked: RemedyRequest,
    reasoning: ReasoningField = ReasoningField.AS_SENT,
    *,
    reasons_by_name: bool = False,
) -> Plan:
    """Return the plan for a request on a backend with these quirks and a site's `reasoning` setting.

    `reasons_by_name`: see `deciding.reasons_by_name`.
    """
    made = Plan(asked, asked.request.prompt.thinking)
    if reasons_by_name:
        thinking_default.think(made)
    if quirks:
        every, without_tools = _rules(quirks)
        for rule in every if asked.request.tools else without_tools:
            rule(made)
    if reasoning is not ReasoningField.AS_SENT:
        rename(made, reasoning)
    return made


@lru_cache(maxsize=256)
def _rules(quirks: tuple[str, ...]) -> tuple[Sequence[Rule], Sequence[Rule]]:
    """Return the rules of these quirks, and those of them that requests without tools need."""
    rules = [
        (workaround.rule, workaround.is_for_tools)
        for name, workaround in WORKAROUNDS.items()
        if name in quirks and workaround.rule is not None
    ]
    return [rule for rule, _ in rules], [rule for rule, is_for_tools in rules if not is_for_tools]
