"""What a worker asks before it runs a job."""

from collections.abc import Callable

from gateway.core.box_demand import class_of
from gateway.core.errors import ShedError
from gateway.core.jobs import model_and_class
from gateway.core.policy import Policy, TemplateCosts
from gateway.core.request import Prompt
from gateway.pipeline.fleet_view import FleetView
from gateway.ports import Estimator

BYTES_PER_TOKEN = 4
"""Approximate bytes per token of prose: 4.2 in docs/performance.md#how-it-is-measured."""


class JobQuestions:
    """Answers the questions of a worker, under the current policy."""

    def __init__(self, policy: Callable[[], Policy], view: FleetView, estimator: Estimator) -> None:
        """`policy` returns the current policy."""
        self._policy = policy
        self._view = view
        self._estimator = estimator

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
