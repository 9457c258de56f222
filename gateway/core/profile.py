"""A deployment profile: everything known about one way of serving Gemma 4. Data, with provenance.

The profiles themselves are YAML files in gateway/profiles/; each figure there says whether it was
measured, derived, fitted or guessed, and by whom.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from gateway.core.perf import PerfModel
from gateway.core.values import Capacity, Modalities


class Basis(StrEnum):
    """How a figure came about."""

    MEASURED = "measured"  # printed by its source
    DERIVED = "derived"  # arithmetic on measured figures
    FITTED = "fitted"  # a model parameter that reproduces measured figures
    GUESSED = "guessed"  # replace when measured


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where a figure comes from."""

    basis: Basis
    source: str


@dataclass(frozen=True, slots=True)
class EngineFlags:
    """The launch flags a deployment's behaviour depends on.

    Attributes:
        max_num_seqs: Sequences it runs at once; None where the recipe does not set it.
        max_num_batched_tokens: Token budget of one step; vLLM's default where the recipe does not set it.
        reserve_full_isl: Whether a prompt must fit into free KV as a whole before it is started.
    """

    max_num_seqs: int | None
    max_num_batched_tokens: int
    reserve_full_isl: bool = True


@dataclass(frozen=True, slots=True)
class Profile:
    """One deployment.

    Attributes:
        name: e.g. `h100-tp1-light`.
        title: What it is, in one line.
        hardware: e.g. "1x H100 SXM5 80 GB".
        checkpoint: Public name of the weights it serves.
        served_model: Name it usually serves them under; what the simulated backend answers to.
        engine_version: vLLM version it was measured with.
        capacity, modalities: What it can hold and take.
        flags: Launch flags that matter.
        perf: The latency model.
        boot_s: Cold boot, seconds, as measured; None where nobody published it.
        boot_budget_s: How long to wait for readiness before calling it a fault.
        quirks: Names of known quirks (docs/profiles.md lists them).
        provenance: Per field path (`capacity.knee`, `perf.t_mem`, ...) where it comes from.
    """

    name: str
    title: str
    hardware: str
    checkpoint: str
    served_model: str
    engine_version: str
    capacity: Capacity
    modalities: Modalities
    flags: EngineFlags
    perf: PerfModel
    boot_s: float | None
    boot_budget_s: float
    quirks: tuple[str, ...] = ()
    provenance: Mapping[str, Provenance] = field(default_factory=dict)
