"""Job workers: they claim jobs from the store, run them, and store their answers."""

from gateway.jobs.batches import BatchRules, BatchRunner
from gateway.jobs.revoking import Revocations
from gateway.jobs.watch import QueueWatch
from gateway.jobs.worker import Worker, WorkerRules

__all__ = ["BatchRules", "BatchRunner", "QueueWatch", "Revocations", "Worker", "WorkerRules"]
