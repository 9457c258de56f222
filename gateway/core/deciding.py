"""The whole decision for one request: classify, say what it needs, rank the backends. Pure.

The gateway and `explain` both decide here, so that what is explained is what happens.
"""

from collections.abc import Callable, Mapping

from gateway.core import classification, selection
from gateway.core.errors import InvalidRequest
from gateway.core.selection import BackendView
from gateway.core.values import Decision, Demand, Estimate, ModelPolicy, Policy, Request, TrafficClass

Views = Callable[[TrafficClass], Mapping[str, BackendView]]
"""Returns how the backends of a class's pools stand at this moment."""


def decide(
    policy: Policy, model: ModelPolicy, request: Request, estimate: Estimate, views: Views
) -> tuple[TrafficClass, Decision]:
    """Return the class of a request, and where it may go and why.

    Raises:
        InvalidRequest: no class of the model takes it.
    """
    matched = classification.classify(model, request, estimate)
    if matched is None:
        raise InvalidRequest(f"No class of model `{model.id}` takes this request.", code="no_class")
    traffic_class, reason = matched
    demand = Demand.of(request, estimate, classification.output_tokens(traffic_class, request))
    seen = views(traffic_class)
    return traffic_class, selection.decide(policy, model.id, traffic_class, reason, estimate, demand, seen)
