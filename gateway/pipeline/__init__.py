"""The request pipeline: estimate, classify, select, admit, relay, account.

Only this package knows the order of the steps. It depends on ports and pure functions, never on an adapter.
"""

from gateway.pipeline.caller import CallerStalled, patience_s
from gateway.pipeline.fleet_view import FleetView
from gateway.pipeline.job_questions import JobQuestions
from gateway.pipeline.peers import Peers
from gateway.pipeline.pipeline import Pipeline
from gateway.pipeline.request_context import LEFT_STATUS
from gateway.pipeline.waiting_room import shed_error
from gateway.pipeline.watch import BackendSnapshot, BackendWatch

__all__ = [
    "LEFT_STATUS",
    "BackendWatch",
    "CallerStalled",
    "FleetView",
    "JobQuestions",
    "Peers",
    "Pipeline",
    "BackendSnapshot",
    "patience_s",
    "shed_error",
]
