"""A site's own profiles: a shipped one with any of its figures replaced."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import BaseModel

from gateway import profiles
from gateway.core.kv import KvFormula
from gateway.core.profile import Basis, Profile, Provenance
from gateway.settings.fields import (
    Accepted,
    Count,
    Figure,
    KneeCurve,
    Positive,
    Seconds,
    Section,
    Share,
    Sharpness,
    ShortForm,
    Text,
    curve,
)

_T = TypeVar("_T")
_KV = KvFormula(sliding_layers=0, global_layers=0)


class Sourced(Section, Generic[_T]):
    """A figure with where it comes from."""

    value: _T
    """The figure itself."""
    basis: Literal["measured", "derived", "fitted", "guessed"] = "guessed"
    """How the figure was obtained. Unset: guessed."""
    source: Text = "site configuration"
    """Who measured it, or what it was derived from."""


def _bare(written: Any) -> Any:
    return written if isinstance(written, dict) and "value" in written else {"value": written}


class WholeFigure(Sourced[Positive]):
    """A whole number of at least 1 with where it comes from."""


class OptionalWholeFigure(Sourced[Positive | None]):
    """A whole number of at least 1, or null, with where it comes from."""


class CountFigure(Sourced[Count]):
    """A whole number, or 0, with where it comes from."""


class OptionalCountFigure(Sourced[Count | None]):
    """A whole number, 0 or null, with where it comes from."""


class NumberFigure(Sourced[Figure]):
    """A number with where it comes from."""


class SharpFigure(Sourced[Sharpness]):
    """A number of at least 1 with where it comes from."""


class AcceptedFigure(Sourced[Accepted]):
    """Tokens per step, at least 1, with where they come from."""


class ShareFigure(Sourced[Share]):
    """A share, above 0 and up to 1, with where it comes from."""


class SwitchFigure(Sourced[bool]):
    """True or false with where it comes from."""


class SecondsFigure(Sourced[Seconds]):
    """Seconds with where they come from."""


class OptionalSecondsFigure(Sourced[Seconds | None]):
    """Seconds, or null, with where they come from."""


class KvSection(Section):
    """How one sequence's KV blocks are counted: see docs/measurements.md#kv-blocks."""

    sliding_layers: Count
    """Layers that keep only the last `window_tokens`."""
    global_layers: Count
    """Layers that keep every token."""
    drafter_layers: Count = _KV.drafter_layers
    """Layers of a speculative drafter; they keep every token."""
    window_tokens: Positive = _KV.window_tokens
    """Width of the sliding window."""
    sliding_block_tokens: Positive = _KV.sliding_block_tokens
    """Tokens per block of a sliding or drafter layer."""
    global_block_tokens: Positive = _KV.global_block_tokens
    """Tokens per block of a global layer."""


class KneeFigure(Sourced[KneeCurve]):
    """A knee curve with where it comes from."""


class KvFigure(Sourced[KvSection]):
    """A block count formula with where it comes from."""


_INTEGER = ShortForm(_bare, {"type": "integer"})
_INTEGER_OR_NULL = ShortForm(_bare, {"type": ["integer", "null"]})
_NUMBER = ShortForm(_bare, {"type": "number"})
_NUMBER_OR_NULL = ShortForm(_bare, {"type": ["number", "null"]})
_SWITCH = ShortForm(_bare, {"type": "boolean"})
_CURVE = ShortForm(_bare, {"type": ["integer", "array"]})
_FORMULA = ShortForm(_bare, {"type": "object"})

Whole = Annotated[WholeFigure | None, _INTEGER]
OptionalWhole = Annotated[OptionalWholeFigure | None, _INTEGER_OR_NULL]
OptionalCount = Annotated[OptionalCountFigure | None, _INTEGER_OR_NULL]
Number = Annotated[NumberFigure | None, _NUMBER]


class CapacitySection(Section):
    """What a deployment can hold."""

    context_tokens: Whole = None
    """Prompt plus output of one sequence: the engine's `--max-model-len`."""
    knee: Annotated[KneeFigure | None, _CURVE] = None
    """Sequences up to which output tokens/s still rise: a number, or a curve over prompt length."""
    kv: Annotated[KvFigure | None, _FORMULA] = None
    """How KV blocks are counted."""
    kv_blocks: OptionalWhole = None
    """KV pool size in blocks; a value of null leaves KV admission to the engine alone."""
    kv_budget: Annotated[ShareFigure | None, _NUMBER] = None
    """Share of the KV blocks that admission may plan with, above 0 and up to 1."""


class ProfileModalitiesSection(Section):
    """What a deployment accepts besides text."""

    images_max: OptionalCount = None
    """Images per request; 0 for none, a value of null for no limit."""
    audios_max: OptionalCount = None
    """Audio parts per request; 0 for none, a value of null for no limit."""


class FlagsSection(Section):
    """Launch flags that matter to the simulated backend."""

    max_num_seqs: OptionalWhole = None
    """Sequences the engine runs at once; null if its command line does not say."""
    max_num_batched_tokens: Whole = None
    """Token budget of one engine step."""
    reserve_full_isl: Annotated[SwitchFigure | None, _SWITCH] = None
    """Whether a whole prompt must fit into free KV before it starts."""


class PerfSection(Section):
    """The latency model: see docs/measurements.md#latency-model."""

    t_fixed: Number = None
    """Fixed seconds per step."""
    t_mem: Number = None
    """Seconds per step to read the weights."""
    kv_read: Number = None
    """Seconds per token of context of all decoding sequences."""
    kv_span: Number = None
    """Seconds per token of the longest context."""
    t_seq: Number = None
    """Seconds per decoding sequence."""
    t_tok: Number = None
    """Seconds per prompt token."""
    t_attn: Number = None
    """Seconds per unit of prefill attention."""
    sharp: Annotated[SharpFigure | None, _NUMBER] = None
    """How completely memory time and compute time overlap; 1 adds them."""
    accept: Annotated[AcceptedFigure | None, _NUMBER] = None
    """Tokens a sequence gains per step; above 1 with speculative decoding. Also scales the speed score."""
    draft: Annotated[CountFigure | None, _INTEGER] = None
    """Draft tokens per step."""
    overhead_s: Number = None
    """Seconds before the first token that the engine does not account for."""


class SiteProfileSection(Section):
    """A shipped profile with some figures replaced. Each is a bare value or {value, basis, source}."""

    extends: Text
    """The shipped profile it starts from (docs/profiles.md)."""
    title: Text | None = None
    """What it is, in one line."""
    hardware: Text | None = None
    """What it runs on."""
    checkpoint: Text | None = None
    """Public name of the weights."""
    served_model: Text | None = None
    """Name under which it usually serves them; the simulated backend answers to it."""
    engine_version: Text | None = None
    """vLLM version its figures were measured with."""
    capacity: CapacitySection = CapacitySection()
    """What it can hold."""
    modalities: ProfileModalitiesSection = ProfileModalitiesSection()
    """What it accepts besides text."""
    flags: FlagsSection = FlagsSection()
    """Launch flags that matter."""
    perf: PerfSection = PerfSection()
    """The latency model."""
    boot_s: Annotated[OptionalSecondsFigure | None, _NUMBER_OR_NULL] = None
    """Measured cold boot in seconds; a value of null if nobody measured it."""
    boot_budget_s: Annotated[SecondsFigure | None, _NUMBER] = None
    """Seconds it may take to become ready before that counts as a fault."""


def profile(name: str, section: SiteProfileSection) -> Profile:
    """Return the site profile `name`; its `extends` is known to name a shipped one."""
    own = {key: text for key in profiles.TEXTS if (text := getattr(section, key)) is not None}
    return profiles.override(profiles.load(section.extends), name, dict(_figures(section, "")), own)


def _figures(section: BaseModel, prefix: str) -> Iterator[tuple[str, profiles.Figure]]:
    for key in type(section).model_fields:
        written = getattr(section, key)
        if isinstance(written, Sourced):
            told = Provenance(Basis(written.basis), written.source)
            yield f"{prefix}{key}", profiles.Figure(_plain(written.value), told)
        elif isinstance(written, BaseModel):
            yield from _figures(written, f"{prefix}{key}.")


def _plain(value: Any) -> Any:
    if isinstance(value, KvSection):
        return KvFormula(**value.model_dump())
    if isinstance(value, tuple):
        return curve(value)
    return value


def resolve(sections: Mapping[str, SiteProfileSection], name: str) -> Profile:
    """Return the profile of that name: the site's own if there is one, else the shipped one."""
    return profile(name, sections[name]) if name in sections else profiles.load(name)
