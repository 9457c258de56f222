"""Servers that know `max_tokens`, but ignore `max_completion_tokens`, its successor: no limit holds.

Seen with `transformers serve` 5.19, and in the sources of Ollama. They are sent both.
"""

from gateway.core.quirks.plan import Plan, Workaround

_NEW, _OLD = "max_completion_tokens", "max_tokens"


def _rule(plan: Plan) -> None:
    asked = plan.asked
    if plan.is_chat and asked.member(_OLD) is None and (limit := asked.member(_NEW)) is not None:
        plan.changes[_OLD,] = limit


WORKAROUND = Workaround(
    issue="none: Ollama, `transformers serve`", versions="any, as far as known", rule=_rule
)
