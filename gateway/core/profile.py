"""Deployment profiles: the known figures of one way of serving Gemma 4, with their provenance.

The profiles themselves are YAML files in gateway/profiles/. Each figure there states whether it was
measured, derived, fitted or guessed, and its source.
"""

from collections.abc import Mapping
from dataclasses import field
from enum import StrEnum

from gateway.core.backends import Capacity, Modalities
from gateway.core.perf import PerfModel
from gateway.core.value import valueclass


class Basis(StrEnum):
    """How a figure was obtained."""

    MEASURED = "measured"  # printed by its source
    DERIVED = "derived"  # arithmetic on measured figures
    FITTED = "fitted"  # a model parameter that reproduces measured figures
    GUESSED = "guessed"  # to be replaced by a measurement


@valueclass(frozen=True, slots=True)
class Provenance:
    """Origin of a figure."""

    basis: Basis
    source: str


@valueclass(frozen=True, slots=True)
class EngineFlags:
    """The launch flags that affect a deployment's behavior.

    Attributes:
        max_num_seqs: Maximum concurrent sequences; None if the recipe does not set it.
        max_num_batched_tokens: Token budget of one step; vLLM's default if the recipe does not set it.
        reserve_full_isl: Whether a whole prompt must fit into free KV before it starts.
    """

    max_num_seqs: int | None
    max_num_batched_tokens: int
    reserve_full_isl: bool = True


@valueclass(frozen=True, slots=True)
class Profile:
    """One deployment.

    Attributes:
        name: e.g. `h100-tp1-light`.
        title: One-line description.
        hardware: e.g. "1x H100 SXM5 80 GB".
        checkpoint: Public name of the weights it serves.
        served_model: Usual name under which it serves them; also the model name of a simulated backend.
        engine_version: vLLM version it was measured with.
        capacity, modalities: Its capacity, and the inputs it accepts besides text.
        flags: Relevant launch flags.
        perf: The latency model.
        boot_s: Measured cold start in seconds; None if no figure is published.
        boot_budget_s: How long it may take to boot before that counts as a fault.
        quirks: Names of known quirks (listed in docs/profiles.md).
        provenance: Origin of each figure by field path (`capacity.knee`, `perf.t_mem`, ...).
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
