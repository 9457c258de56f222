"""Compares two policies on a decision log: changed routes, refusals, and waiting times.

Routes are compared for an idle fleet, as by `explain`: there they depend only on the request, so any change
is due to the policy. The effect of load is simulated for both the recorded policy and the other one: both
results have the same error, whose size shows in the comparison of the former with what was recorded.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from gateway.core.value import valueclass
from gateway.replay import figures, simulating
from gateway.replay.figures import Side
from gateway.replay.moving import Move, Moves, Refusal
from gateway.replay.notes import notes
from gateway.replay.reading import Entry, Log
from gateway.settings import Settings
from gateway.telemetry.decision_lines import PolicyLine


@valueclass(frozen=True, slots=True)
class Report:
    """The result of `gemma-gateway replay`.

    Attributes:
        files: The files read.
        requests: Number of requests in them; `decided`: of those that could be decided again.
        undecided: The others, by how they ended.
        first_at, last_at: Epoch seconds of the first and last arrival.
        recorded_policy, other_policy: Versions of the compared policies.
        broken: Positions of unreadable lines, with the reason.
        notes: Caveats about the figures.
        moved: Requests with a different class, first pool or first backend.
        moves: The same by what changes (`class`, `pool`, `backend`), from where to where.
        refusals: What the other policy refuses immediately.
        accepted: Requests that were refused immediately, and would not be.
        recorded: Recorded results.
        simulated: Simulated results of the recorded policy; None if it is not in the log.
        predicted: Simulated results of the other policy.
        same_pool_share: Share of the served requests that the first simulation serves in the recorded pool.
    """

    files: tuple[str, ...]
    requests: int
    decided: int
    undecided: Mapping[str, int]
    first_at: float
    last_at: float
    recorded_policy: str
    other_policy: str
    broken: Sequence[str]
    notes: Sequence[str]
    moved: int
    moves: Mapping[str, Sequence[Move]]
    refusals: Sequence[Refusal]
    accepted: int
    recorded: Side
    simulated: Side | None
    predicted: Side
    same_pool_share: float | None


def compare(log: Log, tried: Settings) -> Report:
    """Compare the policy of a configuration with the recorded one on the requests of a log."""
    other = tried.policy()
    decided = log.decided
    undecided = dict(Counter(entry.past.ending.value for entry in log.entries if entry.asked is None))
    base = _base(log, decided)
    moves = Moves(log, other)
    for entry in decided:
        moves.add(entry)
    pasts = simulating.arrivals(log.entries)
    before = None if base is None else simulating.run(base.policy, base.engines, pasts)
    after = simulating.run(other, tried.engines(), pasts)
    targets = figures.targets(other if base is None else base.policy)
    return Report(
        files=log.files,
        requests=len(log.entries),
        decided=len(decided),
        undecided=undecided,
        first_at=log.entries[0].past.at,
        last_at=log.entries[-1].past.at,
        recorded_policy="" if base is None else base.version,
        other_policy=other.version,
        broken=[
            f"{one.file}:{one.line}: {'it is incomplete' if one.is_torn else one.why}" for one in log.broken
        ],
        notes=[*notes(log, base, other, tried.box_members(), pasts), *moves.notes()],
        moved=moves.moved,
        moves=moves.moves(),
        refusals=moves.refusals(),
        accepted=moves.accepted,
        recorded=figures.recorded(decided, targets),
        simulated=None if before is None else figures.simulated(before),
        predicted=figures.simulated(after),
        same_pool_share=None if before is None else figures.same_pool_share(before),
    )


def _base(log: Log, decided: Sequence[Entry]) -> PolicyLine | None:
    """Return the policy under which most requests were decided, among those in the log."""
    counted = Counter(entry.past.policy for entry in decided if entry.past.policy in log.policies)
    return log.policies[counted.most_common(1)[0][0]] if counted else None
