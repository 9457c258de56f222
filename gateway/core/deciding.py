"""The complete decision for a request: classify, compute its demand, rank the backends. Pure.

The gateway, `explain` and `replay` all use this code, so explanations match what happens.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from gateway.core import admission, classification, selection
from gateway.core.backends import Backend
from gateway.core.decision import Decision, Exclusion
from gateway.core.errors import (
    CallerError,
    ContextExceeded,
    InvalidRequest,
    ModelNotFound,
    UpstreamUnreachable,
)
from gateway.core.health import BackendStatus, State
from gateway.core.load import NO_LOAD, Demand
from gateway.core.policy import ModelPolicy, Policy, TrafficClass
from gateway.core.quirks import RemedyRequest
from gateway.core.request import CountMode, Endpoint, Estimate, Prompt, Request
from gateway.core.selection import BackendView

ViewsOf = Callable[[TrafficClass], Mapping[str, BackendView]]
"""Returns the current state of the backends in a class's pools."""

NAMES_MAX = 20
"""Maximum names that are listed for callers who ask for an unknown model. A choice: few fleets have more."""


def decide(
    policy: Policy, model: ModelPolicy, request: Request, estimate: Estimate, views_of: ViewsOf
) -> tuple[TrafficClass, Decision]:
    """Return the class of a request, and the decision about its backends.

    Raises:
        InvalidRequest: it matches no class of the model.
    """
    matched = classification.classify(model, request, estimate)
    if matched is None:
        raise InvalidRequest(f"No class of model `{model.id}` takes this request.", code="no_class")
    traffic_class, reason = matched
    demand = Demand.of(request, estimate, classification.output_tokens(traffic_class, request))
    views = views_of(traffic_class)
    candidates = selection.ranking(policy, traffic_class, demand, views)
    if request.max_tokens is None and not candidates.may_start:
        # If only the reserve does not fit, the engine uses what is left: the caller set no limit.
        tokens = _what_fits(policy, traffic_class, demand, estimate.tokens_max + 1, views)
        if tokens < demand.total_tokens:
            demand = replace(demand, total_tokens=tokens)
            candidates = selection.ranking(policy, traffic_class, demand, views)
    return traffic_class, Decision(
        model=model.id,
        traffic_class=traffic_class.name,
        class_reason=reason,
        pools=traffic_class.pools,
        estimate=estimate,
        demand=demand,
        candidates=candidates,
    )


def _what_fits(
    policy: Policy,
    traffic_class: TrafficClass,
    demand: Demand,
    tokens_min: int,
    views: Mapping[str, BackendView],
) -> int:
    """Return with how many tokens, prompt and output, a request fits where it may run; at most its demand.

    Beside a backend that takes it, a larger one that takes nothing now, or nothing like this, does not count;
    nor beside one that is ejected, on which it may be tried.

    `tokens_min`: its prompt and one token of output.
    """
    least = replace(demand, total_tokens=tokens_min)
    ranked = selection.rank(policy, traffic_class, least, views)
    fitting = [one for one in ranked if one.excluded is None or not one.excluded.is_permanent]
    soon = [one for one in fitting if one.excluded is None or one.excluded.is_busy]
    tried = [one for one in fitting if views[one.backend].status.state is State.EJECTED]
    found = [admission.tokens_max(views[one.backend].capacity, least) for one in soon or tried or fitting]
    return min(demand.total_tokens, max(found, default=demand.total_tokens))


def model_of(policy: Policy, name: str) -> ModelPolicy:
    """Return the model with that name or alias.

    Raises:
        ModelNotFound: there is none.
    """
    model = policy.model(name)
    if model is None:
        names = [known for one in policy.models for known in one.names]
        more = ", ... (see /v1/models)" if len(names) > NAMES_MAX else "."
        known = ", ".join(names[:NAMES_MAX]) + more
        raise ModelNotFound(f"The model `{name}` does not exist. Known: {known}", param="model")
    return model


def is_for_others(former: Backend, policy: Policy, model_id: str) -> bool:
    """Return whether a backend of a former policy is one for other models under this one.

    It is if there is another server in its place, or another name, and not for that model.
    """
    backend = policy.backends.get(former.id, former)
    if (backend.url, backend.model) == (former.url, former.model):
        return False
    model = policy.model(model_id)
    classes = () if model is None else model.classes
    return not any(former.id in policy.backends_of(one) for one in classes)


def as_it_is_now(former: Backend, policy: Policy, model_id: str) -> Backend:
    """Return a backend of a former policy as it is under this one, for a request for that model.

    Raises:
        UpstreamUnreachable: it is one for other models.
    """
    if is_for_others(former, policy, model_id):
        raise UpstreamUnreachable("The backend does not serve this model any more.")
    return policy.backends.get(former.id, former)


def reasons_by_name(policy: Policy, asked: RemedyRequest) -> bool:
    """Return whether a chat reasons because its model's name is a reasoning alias, and for no other reason.

    An engine does not see that name, so it has to be told. What the body says itself goes first.
    """
    request = asked.request
    if (
        request.model not in policy.reasoning_names
        or request.endpoint is not Endpoint.CHAT
        or request.reasoning is not None
    ):
        return False
    kwargs = asked.member("chat_template_kwargs")
    return kwargs is None or isinstance(kwargs, Mapping)  # otherwise the engine will refuse it


def prompt_of(policy: Policy, asked: RemedyRequest) -> Prompt:
    """Return the prompt of a request as it will be sent to a backend."""
    prompt = asked.request.prompt
    return replace(prompt, thinking=True) if reasons_by_name(policy, asked) else prompt


def idle(policy: Policy) -> Mapping[str, BackendView]:
    """Return the backends of a fleet as configured: all up and without load."""
    return {
        name: BackendView(
            backend=replace(backend, versions=()),  # assume the right version
            load=NO_LOAD,
            status=BackendStatus(state=State.UP, served_models=(backend.model or "served",)),
        )
        for name, backend in policy.backends.items()
    }


def refusal(
    traffic_class: TrafficClass, decision: Decision, views: Mapping[str, BackendView]
) -> CallerError | None:
    """Return the error for a request that no backend of its class could ever take, or None.

    `views`: of these backends; only their capacity is read.
    """
    excluded = decision.candidates.passed_over  # all of them, if there is no first
    reasons = {reason for _, reason in excluded}
    if decision.candidates.first is not None or not reasons or not all(one.is_permanent for one in reasons):
        return None
    if Exclusion.MODALITY in reasons:
        name = traffic_class.name
        return InvalidRequest(
            f"No backend for {name} requests takes this combination of images, audio and length.",
            code="unsupported_modality",
            param="messages",
        )
    if Exclusion.SEQS_EXCEEDED in reasons:
        message = "No backend runs that many choices at once."
        return InvalidRequest(message, code="too_many_choices", param="n")
    window = max(views[name].capacity.context_tokens for name, _ in excluded)
    return _overlong(decision, window, is_kv=Exclusion.CONTEXT_EXCEEDED not in reasons)


def _overlong(decision: Decision, window: int, *, is_kv: bool) -> CallerError:
    """Return the error for an overlong request, in the words by which clients recognize a context overflow.

    Clients then shorten the conversation and retry. They should not if the output alone is too long.
    """
    demand, estimate = decision.demand, decision.estimate
    output = demand.total_tokens - estimate.tokens_max
    if output >= window and not is_kv:
        return InvalidRequest(
            f"{output} output tokens are too many: this model holds {window} tokens, prompt and output "
            "together. Please request fewer.",
            param="max_tokens",
        )
    about = "at least " if estimate.mode is CountMode.BOUND else ""
    cache = " and fits into no backend's cache" if is_kv else ""
    return ContextExceeded(
        f"This model's maximum context length is {window} tokens, but the request needs {about}"
        f"{demand.total_tokens} ({estimate.tokens_max} input + {output} output){cache}. "
        "Input tokens exceed the configured limit [context_length_exceeded].",
        param="messages",
    )
