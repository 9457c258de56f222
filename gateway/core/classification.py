"""Classification: the first class whose condition holds wins.

Every result includes its reason, because operators always ask for it.
"""

import operator
from collections.abc import Callable, Mapping
from typing import Any

from gateway.core.policy import Comparison, ModelPolicy, TrafficClass
from gateway.core.request import Estimate, Request

_OPERATORS: Mapping[Comparison, Callable[[int, int], bool]] = {
    Comparison.GE: operator.ge,
    Comparison.GT: operator.gt,
    Comparison.LE: operator.le,
    Comparison.LT: operator.lt,
    Comparison.EQ: operator.eq,
}


def classify(model: ModelPolicy, request: Request, estimate: Estimate) -> tuple[TrafficClass, str] | None:
    """Return the first matching class and the reason, or None.

    A job keeps its class: it runs as a stream, and without most headers of the original request.
    """
    if request.handed_over_as:
        for traffic_class in model.classes:
            if traffic_class.name == request.handed_over_as:
                return traffic_class, "the job was accepted as one"
    tokens, reasons = estimate.tokens, is_reasoning(model, request)
    for traffic_class in model.classes:
        when = traffic_class.when
        # These two decide most cases.
        if tokens < when.tokens_least or tokens > when.tokens_most or when.reasoning is (not reasons):
            continue
        if when.is_empty:
            return traffic_class, "takes everything else"
        if _missed(model, traffic_class, request, estimate) is None:
            return traffic_class, _reason(model, traffic_class, request, estimate)
    return None


def is_reasoning(model: ModelPolicy, request: Request) -> bool:
    """Return whether the request asks for reasoning: its body, or if that does not say, its model's name."""
    return request.model in model.reasoning_aliases if request.reasoning is None else request.reasoning


def output_tokens(traffic_class: TrafficClass, request: Request) -> int:
    """Return the output tokens to plan for: the caller's limit, or else the class's reserve."""
    return request.max_tokens if request.max_tokens is not None else traffic_class.output_reserve_tokens


def mismatch(
    model: ModelPolicy, traffic_class: TrafficClass, request: Request, estimate: Estimate
) -> str | None:
    """Return the first condition of the class that does not hold, in words, or None if all do."""
    missed = _missed(model, traffic_class, request, estimate)
    return None if missed is None else missed[0].format(*missed[1:])


def _missed(
    model: ModelPolicy, traffic_class: TrafficClass, request: Request, estimate: Estimate
) -> tuple[Any, ...] | None:
    """Return the same unformatted, because most mismatches are never shown."""
    when = traffic_class.when
    for name in when.numeric:
        value = _FIGURES[name](traffic_class, request, estimate)
        for bound in getattr(when, name):
            if value is None:
                return "{} is not given, needs {} {}", _SHOWN[name], bound.op, bound.value
            if not _OPERATORS[bound.op](value, bound.value):
                return "{} {} is not {} {}", _SHOWN[name], value, bound.op, bound.value
    if when.reasoning is not None and when.reasoning is not (actual := is_reasoning(model, request)):
        return "reasoning is {}", str(actual).lower()
    if when.stream is not None and when.stream is not request.stream:
        return "stream is {}", str(request.stream).lower()
    if when.keys and request.key not in when.keys:
        return "key {} is not one of {}", request.key or "none", ", ".join(when.keys)
    for name, accepted in when.headers:
        if name not in request.headers:
            return "header {} is absent", name
        if accepted and request.headers[name] not in accepted:
            return "header {} is not one of {}", name, ", ".join(accepted)
    return None


_FIGURES: Mapping[str, Callable[[TrafficClass, Request, Estimate], int | None]] = {
    "prompt_tokens": lambda _, __, estimate: estimate.tokens,
    "total_tokens": lambda one, request, estimate: estimate.tokens + output_tokens(one, request),
    "max_tokens": lambda _, request, __: request.max_tokens,
    "images": lambda _, request, __: request.images,
    "audios": lambda _, request, __: request.audios,
    "tools": lambda _, request, __: request.tools,
}
"""The value of a request for each numeric condition of `When`."""

_SHOWN: Mapping[str, str] = {name: "audio" if name == "audios" else name for name in _FIGURES}
"""The names of these conditions as operators write them."""


def _reason(model: ModelPolicy, traffic_class: TrafficClass, request: Request, estimate: Estimate) -> str:
    when = traffic_class.when
    held = [
        f"{_SHOWN[name]} {_FIGURES[name](traffic_class, request, estimate)} {bound.op} {bound.value}"
        for name in when.numeric
        for bound in getattr(when, name)
    ]
    if when.reasoning is not None:
        by_name = request.model in model.reasoning_aliases and request.reasoning is None
        held.append(
            f"reasoning is {str(when.reasoning).lower()}{f' (model name {request.model})' if by_name else ''}"
        )
    if when.stream is not None:
        held.append(f"stream is {str(when.stream).lower()}")
    if when.keys:
        held.append(f"key {request.key}")
    held += [f"header {name}" for name, _ in when.headers]
    return ", ".join(held)
