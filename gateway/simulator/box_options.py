"""What a simulated box is told at its start: its models, and how their boots end."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from gateway.core.profile import Basis, Profile, Provenance
from gateway.simulator.options import SimulatorOptions

BOOT_S = (
    306.0  # spark-nvfp4's: cold, compile and graph capture (docs/profiles.md); a warm boot is not published
)
QWEN = "qwen"
_QWEN_TOKENS_PER_S = 30.0  # of a lone stream; a placeholder until somebody measures it


class Boot(StrEnum):
    """How a boot ends. The last three come up and answer 200; the names are those of the faults."""

    OK = "ok"
    FAIL = "fail"
    CHANNEL_MARKERS = "channel_markers"
    EMPTY_ANSWER = "empty_answer"
    WRONG_TEXT = "wrong_text"


@dataclass(frozen=True, slots=True)
class BoxOptions:
    """How to run one simulated box.

    Attributes:
        models: What can run on it, by name; each with its own port and `boot_s`. They share one memory,
            which holds one of them.
        host, port: Where it takes orders; port 0 for any free one.
        resident: Model that is up when the box starts, without a boot. With a model in sleep mode, the
            others that have it are loaded too, and asleep.
        stop_s: Engine seconds from the order to stop until the process is gone and its memory free.
        boots: How the first boots of a model end, in order.
        fail_chance: Probability that a boot fails about which `boots` says nothing.
        seed: Of that chance, for each model by itself.
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
        """Refuse names that no model has."""
        for name in (*self.boots, *filter(None, [self.resident])):
            if name not in self.models:
                raise ValueError(f"there is no model {name!r}; there are {', '.join(self.models)}")


def qwen() -> Profile:
    """Return a stand-in for the Qwen model of the box: the Gemma profile, as fast as it is said to be."""
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
    """Return the profile of that name: a shipped one, or the stand-in for Qwen.

    Raises:
        KeyError: there is none; the message lists those there are.
    """
    from gateway import profiles

    return qwen() if name == QWEN else profiles.load(name)


def spark_pair(**options: Any) -> dict[str, SimulatorOptions]:
    """Return the two models that take turns on one DGX Spark; `options` are of both."""
    defaults: dict[str, Any] = {"boot_s": BOOT_S, **options}
    return {
        "gemma": SimulatorOptions(profile("spark-nvfp4"), **defaults),
        "qwen": SimulatorOptions(profile(QWEN), **defaults),
    }
