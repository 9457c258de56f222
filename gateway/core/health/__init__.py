"""A backend's health as a state machine: events in, status out. Pure.

                   probe ok                    3 failures
        UNKNOWN ------------> UP <--------+  -----------------> EJECTED
           |                   ^          |                        | penalty over, probe ok
           | refused           | first    | 3 successes            v
           v                   | boot     +------------------- PROBATION <--- restart noticed,
        BOOTING ---------------+                                   ^          tokens move again
           | boot budget over                                      |
           v                     probe ok                          |
         DOWN -----------------------------------------------------+
        DRAINING: the engine reported that it is stopping.   HUNG: no progress while requests run.
        OUT: its box runs another model (`put_out`), until its own is started again (`awaited`).

The evidence is of three kinds. *Probes* show whether the server answers. *Samples* of the engine's own
metrics show whether it makes progress and whether it is still the same process. *Attempts* show how
real requests ended. None of them is sufficient alone: a hung engine and a draining one both answer
`/health` with 200, and a caller's bad request fails on a healthy backend.

Gateways that share a store exchange the evidence that only their own requests provide (`Verdict`,
`PeerAttempts`), so that a backend that fails through one gateway is out of service at all of them.
"""

from gateway.core.health.questions import (
    PROBATION_SEQS,
    RETRY_AFTER_UNKNOWN_MAX_S,
    accepts,
    hang_after_s,
    has_ended,
    is_last_resort,
    is_tried,
    lost,
    may_be_tried,
    retry_after_s,
    served_name,
    usable,
    verdict,
)
from gateway.core.health.transitions import advance, awaited, put_out
from gateway.core.health.vocabulary import (
    GONE_S,
    NOT_PROBED,
    Attempt,
    BackendStatus,
    EngineSample,
    Event,
    HealthRules,
    ModelsFailed,
    Outcome,
    PeerAttempts,
    PeerVerdict,
    ProbeFailed,
    ProbeFault,
    ProbeOk,
    Sample,
    SampleFailed,
    State,
    Verdict,
)

__all__ = [
    "State",
    "Outcome",
    "BackendStatus",
    "NOT_PROBED",
    "EngineSample",
    "HealthRules",
    "hang_after_s",
    "has_ended",
    "lost",
    "GONE_S",
    "PROBATION_SEQS",
    "RETRY_AFTER_UNKNOWN_MAX_S",
    "Event",
    "ProbeOk",
    "ProbeFailed",
    "ProbeFault",
    "ModelsFailed",
    "Sample",
    "SampleFailed",
    "Attempt",
    "Verdict",
    "PeerVerdict",
    "PeerAttempts",
    "advance",
    "put_out",
    "awaited",
    "usable",
    "accepts",
    "is_last_resort",
    "is_tried",
    "may_be_tried",
    "retry_after_s",
    "served_name",
    "verdict",
]
