"""When callers that are refused should ask again: one after another, as slots become free. Pure.

SDKs come back after exactly the time they are told, at most twice, and not at all if that does not help. If a
crowd that is refused in one moment were told the same time, all of it would come back in one moment, for a
queue that takes a part of it.
"""

RETRY_AFTER_MAX_S = 59.0
"""Some SDKs ignore a Retry-After of more than a minute and retry at once (docs/errors.md)."""


class Returns:
    """The times at which the callers refused by one group of classes were told to ask again."""

    __slots__ = ("_latest_at",)

    def __init__(self) -> None:
        """Start without any."""
        self._latest_at = 0.0

    def next_s(self, wait_s: float, each_s: float, now: float) -> float:
        """Return in how many seconds another caller should ask again, 1..59.

        That is when its turn would have come, but `each_s` after the one that was told before it. What lies
        beyond a minute begins at its turn again.

        Args:
            wait_s: How long it would have to wait.
            each_s: Time after which another one's turn comes.
            now: Monotonic seconds.
        """
        at = max(now + wait_s, self._latest_at + each_s)
        if at > now + RETRY_AFTER_MAX_S:
            at = now + wait_s
        self._latest_at = at
        return max(1.0, min(RETRY_AFTER_MAX_S, at - now))
