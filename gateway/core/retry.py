"""Retries: whether a request may be tried on another backend after a failure before its first byte."""

from gateway.core.values import RetryPolicy

CRASHES_MAX = 2
"""A request is not retried once this many engines have crashed while serving it. A choice: one may be chance,
with two it may be the cause."""


def may_retry(policy: RetryPolicy, attempts: int, crashes: int) -> bool:
    """Return whether to retry after this many attempts, `crashes` of which ended with an engine crash."""
    return attempts < policy.attempts_max and crashes < CRASHES_MAX
