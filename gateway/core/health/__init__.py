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
        DRAINING: the engine said it is stopping.   HUNG: it generates nothing while requests run.
        OUT: its machine runs another model (`put_out`), until that one is started again (`awaited`).

Three kinds of evidence come in. *Probes* say whether the server answers; *samples* of the engine's
own metrics say whether it makes progress and whether it is still the same process; *attempts* say
how real requests fared. No one of them is enough: a hung engine and a draining one both answer
`/health` with 200, and a caller's bad request fails on a healthy backend.

Gateways that share a store tell each other what only their own requests could show (`Verdict`,
`Elsewhere`), so that a backend that fails through one of them is out at all of them.
"""

from gateway.core.health.transitions import advance, awaited, put_out
from gateway.core.health.vocabulary import (
    PROBATION_SEQS,
    Attempt,
    BackendStatus,
    Elsewhere,
    EngineSample,
    Event,
    HealthRules,
    Heard,
    ModelsFailed,
    Outcome,
    ProbeFailed,
    ProbeFault,
    ProbeOk,
    Sample,
    SampleFailed,
    State,
    Verdict,
    accepts,
    hang_after_s,
    preference,
    served_name,
    usable,
    verdict,
)

__all__ = [
    "State",
    "Outcome",
    "BackendStatus",
    "EngineSample",
    "HealthRules",
    "hang_after_s",
    "PROBATION_SEQS",
    "Event",
    "ProbeOk",
    "ProbeFailed",
    "ProbeFault",
    "ModelsFailed",
    "Sample",
    "SampleFailed",
    "Attempt",
    "Verdict",
    "Heard",
    "Elsewhere",
    "advance",
    "put_out",
    "awaited",
    "usable",
    "accepts",
    "preference",
    "served_name",
    "verdict",
]
