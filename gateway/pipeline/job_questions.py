"""What is asked before a job is run: whether a chat becomes one, and whether this process can run it."""

from collections.abc import Callable
from itertools import chain

from gateway.core import classification, deciding
from gateway.core.box_demand import class_of
from gateway.core.errors import ShedError
from gateway.core.jobs import Serving, model_and_class
from gateway.core.policy import Policy, TemplateCosts, TrafficClass
from gateway.core.request import Estimate, Prompt
from gateway.pipeline.fleet_view import FleetView
from gateway.ports import Estimator, Incoming

BYTES_PER_TOKEN = 4
"""Approximate bytes per token of prose: 4.2 in docs/performance.md#how-it-is-measured."""


class JobQuestions:
    """Answers questions about jobs under the current policy."""

    def __init__(self, policy: Callable[[], Policy], view: FleetView, estimator: Estimator) -> None:
        """`policy` returns the current policy."""
        self._policy = policy
        self._view = view
        self._estimator = estimator

    def may_queue(self, model: str) -> bool:
        """Return whether any class of a model queues its chats as jobs."""
        found = self._policy().model(model)
        return found is not None and any(one.queue is not None for one in found.classes)

    async def classified(self, incoming: Incoming) -> tuple[TrafficClass, Estimate] | None:
        """Return the class and the estimate of a request; None if the pipeline would reject it.

        Raises:
            ShedError: its tokens cannot be counted at the moment.
        """
        policy, request = self._policy(), incoming.request
        model = policy.model(request.model)
        if model is None:
            return None
        prompt = deciding.prompt_of(policy, incoming)
        estimate = await self._estimator.estimate(prompt, model.template, policy.window_tokens)
        matched = classification.classify(model, request, estimate)
        return None if matched is None else (matched[0], estimate)

    def serving(self) -> Serving:
        """Return which models the current policy can serve."""
        policy = self._policy()
        names = (one.names for one in policy.models)
        return Serving(policy.version, frozenset(chain.from_iterable(names)))

    def can_run_lane(self, lane: str) -> bool:
        """Return whether a backend for a lane of jobs is up, or can be swapped in by its box."""
        policy = self._policy()
        traffic_class, model = class_of(policy, lane), policy.model(model_and_class(lane)[0])
        # If the class no longer exists here, the job is classified again when it runs.
        classes = (traffic_class,) if traffic_class else model.classes if model else ()
        return any(self._view.can_serve(policy, one) for one in classes)

    async def tokens_of(self, text: str) -> int:
        """Return the number of tokens of a text that a model wrote; roughly, if many others are counted."""
        prompt, costs = Prompt(raw_texts=(text,)), TemplateCosts(bos=0)
        try:
            return (await self._estimator.estimate(prompt, costs, self._policy().window_tokens)).tokens
        except ShedError:
            return len(text.encode("utf-8", "replace")) // BYTES_PER_TOKEN
