"""Engines whose chat template and parser have different defaults for `enable_thinking`.

Every chat therefore sets it explicitly.
"""

from collections.abc import Mapping

from gateway.core.quirks.plan import Plan, Workaround

_KWARGS, _SWITCH = "chat_template_kwargs", "enable_thinking"


def think(plan: Plan) -> None:
    """Have the engine reason."""
    plan.thinks = plan.changes[_KWARGS, _SWITCH] = True


def _rule(plan: Plan) -> None:
    if not plan.is_chat:
        return
    kwargs = plan.asked.member(_KWARGS)
    if kwargs is not None and not isinstance(kwargs, Mapping):
        return  # the engine will refuse it
    if _SWITCH not in (kwargs or {}):
        plan.changes[_KWARGS, _SWITCH] = plan.thinks


WORKAROUND = Workaround(issue="vLLM #49955", versions="0.25.1 and 0.26.0", rule=_rule)
