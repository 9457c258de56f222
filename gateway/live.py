"""The data for the console: current state, waiting requests, finished requests, and the last minutes."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gateway import __version__
from gateway.core.policy import Policy
from gateway.core.recent import History
from gateway.core.usage import RequestRecord
from gateway.core.waiting import WaitingLine
from gateway.ports import Clock
from gateway.telemetry.journal import Journal, is_notable

WAITERS_MAX = 50
"""Maximum queued requests that the console shows. A choice: each is sent to every reader once a second."""


class Live:
    """The console's data source in one gateway process. It contains no text of requests."""

    def __init__(
        self,
        *,
        views: Mapping[str, Callable[[], Any]],
        policy: Callable[[], Policy],
        line: WaitingLine,
        journal: Journal,
        is_leaving: Callable[[], bool],
        clock: Clock,
    ) -> None:
        """Show these parts; `views` are those of `gateway.views`. `is_leaving`: is it about to stop?"""
        self._views = views
        self._policy = policy
        self._line = line
        self._journal = journal
        self._is_leaving = is_leaving
        self._clock = clock

    def snapshot(self) -> Mapping[str, Any]:
        """Return the current state."""
        policy, replicas = self._policy(), self._views["replicas"]()
        return {
            "at": round(self._clock.wall(), 3),
            "gateway": __version__,
            "policy": policy.version,
            "owner": replicas["owner"],
            "replicas": replicas["replicas"],
            "store": replicas["mode"],
            "is_leaving": self._is_leaving(),
            "backends": self._views["backends"](),
            "boxes": self._views["boxes"](),
            "waiting": self._waiting(policy),
            "ended": self._journal.count,
        }

    def history(self) -> History:
        """Return statistics of the last minutes."""
        return self._journal.history(self._clock.now())

    def ended(self, since: int) -> tuple[int, Sequence[Mapping[str, Any]]]:
        """Return the number of finished requests, and the kept ones after number `since`, newest first."""
        rows = [_row(number, record) for number, record in self._journal.since(since)]
        return self._journal.count, rows

    def request(self, request_id: str) -> RequestRecord | None:
        """Return the full record of a request, or None."""
        return self._journal.find(request_id)

    def _waiting(self, policy: Policy) -> Mapping[str, Any]:
        now, counts = self._clock.now(), self._line.waiting()
        rates = self._line.drains_per_s(now)
        return {
            "total": len(self._line),
            "classes": [
                {
                    "model": model.id,
                    "class": one.name,
                    "waiting": counts.get((model.id, one.name), 0),
                    "max_wait_s": one.waiting.max_wait_s,
                    "drain_per_s": rates.get((model.id, one.name)),
                }
                for model, one in policy.classes()
            ],
            "line": self._line.waiters(now, WAITERS_MAX),
        }


def _row(number: int, record: RequestRecord) -> Mapping[str, Any]:
    decision, usage = record.decision, record.usage
    first_at = record.first_byte_at if record.stream else None
    return {
        "number": number,
        "id": record.id,
        "at": record.wall_at,
        "model": "" if decision is None else decision.model,
        "class": "" if decision is None else decision.traffic_class,
        "key": record.key,
        "backend": record.backend,
        "is_spill": record.is_spill,
        "ending": record.ending.value,
        "status": record.status,
        "code": record.error_code,
        "stream": record.stream,
        "tries": len(record.attempts),
        "is_notable": is_notable(record),
        "prompt_tokens": None if decision is None else decision.estimate.tokens,
        "completion_tokens": None if usage is None else usage.completion_tokens,
        "waited_s": record.queue_s,
        "ttft_s": None if first_at is None else first_at - record.received_at,
        "tpot_s": record.tpot_s if record.stream else None,
        "total_s": record.ended_at - record.received_at,
        "ttft_target_s": record.ttft_target_s,
    }
