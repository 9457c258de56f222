"""Classification: what kind of work is this? The first class whose condition holds wins.

Every answer comes with its reason, because the operator's question is never "which class" alone.
"""

import operator
from collections.abc import Callable, Mapping, Sequence

from gateway.core.values import Bound, Comparison, Estimate, ModelPolicy, Request, TrafficClass

_OPERATORS: Mapping[Comparison, Callable[[int, int], bool]] = {
    Comparison.GE: operator.ge,
    Comparison.GT: operator.gt,
    Comparison.LE: operator.le,
    Comparison.LT: operator.lt,
    Comparison.EQ: operator.eq,
}


def classify(model: ModelPolicy, request: Request, estimate: Estimate) -> tuple[TrafficClass, str] | None:
    """Return the first class that matches and why, or None where none does.

    A job keeps its class: it is run as a stream, without most headers of the request that it was.
    """
    if request.handed_over_as:
        for traffic_class in model.classes:
            if traffic_class.name == request.handed_over_as:
                return traffic_class, "was handed over as one"
    for traffic_class in model.classes:
        if mismatch(model, traffic_class, request, estimate) is None:
            return traffic_class, _reason(model, traffic_class, request, estimate)
    return None


def is_reasoning(model: ModelPolicy, request: Request) -> bool:
    """Return whether the request asks for reasoning: by its body, or by an alias declared so."""
    return request.reasoning or request.model in model.reasoning_aliases


def output_tokens(traffic_class: TrafficClass, request: Request) -> int:
    """Return the output to plan for: what the caller allows, else the class's reserve."""
    return request.max_tokens if request.max_tokens is not None else traffic_class.output_reserve_tokens


def mismatch(
    model: ModelPolicy, traffic_class: TrafficClass, request: Request, estimate: Estimate
) -> str | None:
    """Return the first condition of the class that does not hold, in words, or None if all do."""
    when = traffic_class.when
    for name, bounds, value in _numbers(traffic_class, request, estimate):
        for bound in bounds:
            if value is None:
                return f"{name} is not given, needs {_spell(bound)}"
            if not _OPERATORS[bound.op](value, bound.value):
                return f"{name} {value} is not {_spell(bound)}"
    if when.reasoning is not None and when.reasoning is not (actual := is_reasoning(model, request)):
        return f"reasoning is {str(actual).lower()}"
    if when.stream is not None and when.stream is not request.stream:
        return f"stream is {str(request.stream).lower()}"
    if when.keys and request.key not in when.keys:
        return f"key {request.key or 'none'} is not one of {', '.join(when.keys)}"
    for name, accepted in when.headers:
        if name not in request.headers:
            return f"header {name} is absent"
        if accepted and request.headers[name] not in accepted:
            return f"header {name} is not one of {', '.join(accepted)}"
    return None


def _numbers(
    traffic_class: TrafficClass, request: Request, estimate: Estimate
) -> Sequence[tuple[str, tuple[Bound, ...], int | None]]:
    """Return the figures that a class has conditions on: name, conditions, and what the request has there."""
    when = traffic_class.when
    found: list[tuple[str, tuple[Bound, ...], int | None]] = []
    if when.prompt_tokens:
        found.append(("prompt_tokens", when.prompt_tokens, estimate.tokens))
    if when.total_tokens:
        total_tokens = estimate.tokens + output_tokens(traffic_class, request)
        found.append(("total_tokens", when.total_tokens, total_tokens))
    if when.max_tokens:
        found.append(("max_tokens", when.max_tokens, request.max_tokens))
    if when.images:
        found.append(("images", when.images, request.images))
    if when.audios:
        found.append(("audio", when.audios, request.audios))
    if when.tools:
        found.append(("tools", when.tools, request.tools))
    return found


def _reason(model: ModelPolicy, traffic_class: TrafficClass, request: Request, estimate: Estimate) -> str:
    when = traffic_class.when
    held = [
        f"{name} {value} {_spell(bound)}"
        for name, bounds, value in _numbers(traffic_class, request, estimate)
        for bound in bounds
    ]
    if when.reasoning is not None:
        by_name = request.model in model.reasoning_aliases and not request.reasoning
        held.append(
            f"reasoning is {str(when.reasoning).lower()}{f' (model name {request.model})' if by_name else ''}"
        )
    if when.stream is not None:
        held.append(f"stream is {str(when.stream).lower()}")
    if when.keys:
        held.append(f"key {request.key}")
    held += [f"header {name}" for name, _ in when.headers]
    return ", ".join(held) or "takes everything else"


def _spell(bound: Bound) -> str:
    return f"{bound.op.value} {bound.value}"
