"""The options of a simulated box: its models, and how their boots end."""

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from enum import StrEnum
from typing import Any

from gateway.core.profile import Basis, Profile, Provenance
from gateway.core.value import valueclass
from gateway.simulator.options import SimulatorOptions

BOOT_S = 306.0
"""Published for spark-nvfp4: cold, with compilation and graph capture (docs/profiles.md). A warm boot is
not."""

QWEN = "qwen"

_QWEN_TOKENS_PER_S = 30.0
"""Speed of a single stream. A choice: a placeholder until there is a measurement (docs/boxes.md)."""


class Boot(StrEnum):
    """How a boot ends. The last three come up and answer 200, with the fault of that name."""

    OK = "ok"
    FAIL = "fail"
    CHANNEL_MARKERS = "channel_markers"
    EMPTY_ANSWER = "empty_answer"
    WRONG_TEXT = "wrong_text"


@valueclass(frozen=True, slots=True)
class BoxOptions:
    """Options of a simulated box.

    Attributes:
        models: Its models by name, each with its own port and `boot_s`. They share memory for one of them.
        host, port: Address of the control port; port 0 for any free one.
        resident: Model that is up when the box starts, without a boot. If it uses sleep mode, the other
            models with sleep mode are loaded too, and asleep.
        stop_s: Engine seconds from the order to stop until the process has ended and its memory is free.
        boots: Outcomes of the first boots of a model, in order.
        fail_chance: Probability of failure of boots not listed in `boots`.
        seed: Random seed, independent per model.
    """

    models: Mapping[str, SimulatorOptions]
    host: str = "127.0.0.1"
    port: int = 0
    resident: str | None = None
    stop_s: float = 0.7
    boots: Mapping[str, Sequence[Boot]] = field(default_factory=dict)
    fail_chance: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Reject unknown names of models."""
        for name in (*self.boots, *filter(None, [self.resident])):
            if name not in self.models:
                raise ValueError(f"there is no model {name!r}; there are {', '.join(self.models)}")


def qwen() -> Profile:
    """Return a stand-in for the Qwen model of the box: the Gemma profile at Qwen's reported speed."""
    gemma = profile("spark-nvfp4")
    perf = gemma.perf
    shorter = perf.lone_tokens_per_s() / _QWEN_TOKENS_PER_S
    times = ("t_fixed", "t_mem", "kv_read", "kv_span", "t_seq", "t_tok", "t_attn")
    source = f"spark-nvfp4, all times x {shorter:.3f}: {_QWEN_TOKENS_PER_S:g} tokens/s of one stream, assumed"
    return replace(
        gemma,
        name=QWEN,
        title="A stand-in for Qwen on one DGX Spark",
        checkpoint="Qwen",
        served_model="qwen",
        perf=replace(perf, **{name: getattr(perf, name) * shorter for name in times}),
        provenance={f"perf.{name}": Provenance(Basis.GUESSED, source) for name in times},
    )


def profile(name: str) -> Profile:
    """Return a profile by name: a shipped one, or the stand-in for Qwen.

    Raises:
        KeyError: it does not exist; the message lists all names.
    """
    from gateway import profiles

    return qwen() if name == QWEN else profiles.load(name)


def spark_pair(**options: Any) -> dict[str, SimulatorOptions]:
    """Return the two models that take turns on one DGX Spark; `options` apply to both."""
    defaults: dict[str, Any] = {"boot_s": BOOT_S, **options}
    return {
        "gemma": SimulatorOptions(profile("spark-nvfp4"), **defaults),
        "qwen": SimulatorOptions(profile(QWEN), **defaults),
    }
