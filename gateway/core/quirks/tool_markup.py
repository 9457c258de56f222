"""Non-streamed answers with tools in which the call stands as text, or ends the loop early with `stop`.

The parser of streams finds such calls. So the backend is asked for a stream, and the answer that the caller
wants in one piece is assembled here.
"""

from gateway.core.quirks.plan import Plan, Workaround

NOT_IN_STREAMS = ("prompt_logprobs", "use_beam_search")
"""Members with which an engine refuses to stream."""


def _rule(plan: Plan) -> None:
    request = plan.asked.request
    if not plan.is_chat or request.stream or not request.tools:
        return
    if any(plan.asked.member(name) for name in NOT_IN_STREAMS):
        return  # it goes as it is
    plan.assembles = True
    plan.changes[("stream",)] = True
    plan.changes[("stream_options",)] = {"include_usage": True}


WORKAROUND = Workaround(issue="vLLM #39043", versions="0.20 and before, as far as known", rule=_rule)
