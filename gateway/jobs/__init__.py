"""Jobs at work: whoever takes them from the store, runs them, and writes down what comes."""

from gateway.jobs.batches import BatchRules, BatchRunner
from gateway.jobs.watch import QueueWatch
from gateway.jobs.worker import Worker, WorkerRules

__all__ = ["BatchRules", "BatchRunner", "QueueWatch", "Worker", "WorkerRules"]
