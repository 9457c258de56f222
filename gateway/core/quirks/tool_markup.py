"""Non-streaming answers that contain a tool call as text, or end a tool loop early with `stop`.

The streaming parser recognizes such calls. So the backend is asked for a stream, which is assembled into a
non-streaming answer (quirks/assembly.py).
"""

from gateway.core.quirks.plan import Plan, Workaround

NOT_IN_STREAMS = ("prompt_logprobs", "use_beam_search")
"""Members with which engines refuse to stream."""


def _rule(plan: Plan) -> None:
    request = plan.asked.request
    if not plan.is_chat or request.stream:
        return
    if any(plan.asked.member(name) for name in NOT_IN_STREAMS):
        return  # forwarded unchanged
    plan.assembles = True
    plan.changes[("stream",)] = True
    plan.changes[("stream_options",)] = {"include_usage": True}


WORKAROUND = Workaround(
    issue="vLLM #39043", versions="0.20 and before, as far as known", rule=_rule, is_for_tools=True
)
