"""All quirks that the gateway works around, by their names in profiles and configurations."""

from collections.abc import Callable, Collection, Mapping
from functools import cache

from gateway.core.quirks import (
    channels,
    context_buckets,
    thinking_default,
    tool_arguments,
    tool_choice,
    tool_markup,
    turn_marker,
)
from gateway.core.quirks.plan import Plan, RemedyRequest, Workaround
from gateway.core.quirks.reasoning_field import rename
from gateway.core.values import ReasoningField

WORKAROUNDS: Mapping[str, Workaround] = {
    # First, because it decides whether the backend is asked for a stream.
    "tool_markup_leaks": tool_markup.WORKAROUND,
    "thinking_default_differs": thinking_default.WORKAROUND,
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


def plan(
    quirks: Collection[str], asked: RemedyRequest, reasoning: ReasoningField = ReasoningField.AS_SENT
) -> Plan:
    """Return the plan for a request on a backend with these quirks and a site's `reasoning` setting."""
    made = Plan(asked)
    if quirks:
        for rule in _rules(frozenset(quirks)):
            rule(made)
    rename(made, reasoning)
    return made


@cache
def _rules(quirks: frozenset[str]) -> tuple[Callable[[Plan], None], ...]:
    """Return the rules of these quirks. The cache is small: it has one entry per kind of backend."""
    return tuple(
        workaround.rule
        for name, workaround in WORKAROUNDS.items()
        if name in quirks and workaround.rule is not None
    )
