"""Retry: an attempt failed before its first byte reached the caller. May another backend be asked?"""

from gateway.core.values import RetryPolicy

CRASHES_MAX = 2
"""A request during which this many engines died is not shown a third: it may be what kills them."""


def may_retry(policy: RetryPolicy, attempts: int, crashes: int) -> bool:
    """Return whether to try once more after `attempts` tries, of which `crashes` took an engine with them."""
    return attempts < policy.attempts_max and crashes < CRASHES_MAX
