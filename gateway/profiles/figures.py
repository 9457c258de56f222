"""From single figures to a `Profile`, and from a profile and a site's own figures to another one.

A figure is addressed by its path (`capacity.kv_blocks`, `perf.t_mem`, `boot_s`); `PATHS` lists them all.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from gateway.core.backends import Capacity, KneeStep, Modalities
from gateway.core.kv import KvFormula
from gateway.core.perf import PerfModel
from gateway.core.profile import Basis, EngineFlags, Profile, Provenance
from gateway.core.value import valueclass

_WEAKNESS = (Basis.MEASURED, Basis.DERIVED, Basis.FITTED, Basis.GUESSED)
_UP_TO = re.compile(r"\s*<=\s*([\d_]+)\s*")


@valueclass(frozen=True, slots=True)
class Figure:
    """One figure of a profile.

    Attributes:
        value: The figure; None means unknown, or no limit, as the field it goes to says.
        provenance: Where it comes from; None only where `value` is None because nobody published it.
        parts: Provenance of the parts of a compound figure (the steps of a knee curve).
    """

    value: Any
    provenance: Provenance | None
    parts: tuple[Provenance, ...] = ()


def prompt_tokens_max(text: str) -> int:
    """Return the upper end of a knee step's `prompt_tokens`, written "<= 2000".

    Raises:
        ValueError: it is written otherwise.
    """
    match = _UP_TO.fullmatch(text)
    if match is None:
        raise ValueError(f'{text!r} is not an upper bound; write it as "<= 2000"')
    return int(match.group(1))


def knee_curve(steps: Iterable[Mapping[str, Any]]) -> Figure:
    """Return a knee curve as one figure whose basis is the weakest of its steps'."""
    curve: list[KneeStep] = []
    parts: list[Provenance] = []
    for step in steps:
        upper = step.get("prompt_tokens")
        curve.append(KneeStep(None if upper is None else prompt_tokens_max(upper), step["seqs"]))
        parts.append(Provenance(Basis(step["basis"]), step["source"]))
    weakest = max((part.basis for part in parts), key=_WEAKNESS.index)
    sources = " | ".join(f"{step.seqs}: {part.source}" for step, part in zip(curve, parts, strict=True))
    return Figure(tuple(curve), Provenance(weakest, sources), tuple(parts))


_CAPACITY: Mapping[str, Callable[[Any], Any]] = {
    "context_tokens": int,
    "knee": tuple,
    "kv": lambda value: value if value is None or isinstance(value, KvFormula) else KvFormula(**value),
    "kv_blocks": lambda value: value,
    "kv_budget": float,
}
_MODALITIES = ("images_max", "audios_max")
_FLAGS = ("max_num_seqs", "max_num_batched_tokens", "reserve_full_isl")
_PERF: Mapping[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("t_fixed", "t_mem", "kv_read", "kv_span", "t_seq", "t_tok", "t_attn", "sharp"), float),
    "accept": float,
    "draft": int,
    "overhead_s": float,
}

PATHS: tuple[str, ...] = (
    *(f"capacity.{name}" for name in _CAPACITY),
    *(f"modalities.{name}" for name in _MODALITIES),
    *(f"flags.{name}" for name in _FLAGS),
    *(f"perf.{name}" for name in _PERF),
    "boot_s",
    "boot_budget_s",
)
"""Every figure a profile has."""

TEXTS = ("title", "hardware", "checkpoint", "served_model", "engine_version")
"""What a profile says about itself."""


def assemble(
    name: str, texts: Mapping[str, str], figures: Mapping[str, Figure], quirks: tuple[str, ...]
) -> Profile:
    """Return the profile that these texts and figures make up.

    Raises:
        ValueError: a figure is missing, or one is named that no profile has.
    """
    if set(figures) != set(PATHS):
        wrong = ", ".join(sorted(set(figures) ^ set(PATHS)))
        raise ValueError(f"profile {name}: missing or unknown figures: {wrong}")
    value = {path: figure.value for path, figure in figures.items()}
    boot_s = value["boot_s"]
    return Profile(
        name=name,
        title=texts["title"],
        hardware=texts["hardware"],
        checkpoint=texts["checkpoint"],
        served_model=texts["served_model"],
        engine_version=texts["engine_version"],
        capacity=Capacity(**{key: convert(value[f"capacity.{key}"]) for key, convert in _CAPACITY.items()}),
        modalities=Modalities(**{key: value[f"modalities.{key}"] for key in _MODALITIES}),
        flags=EngineFlags(**{key: value[f"flags.{key}"] for key in _FLAGS}),
        perf=PerfModel(**{key: convert(value[f"perf.{key}"]) for key, convert in _PERF.items()}),
        boot_s=None if boot_s is None else float(boot_s),
        boot_budget_s=float(value["boot_budget_s"]),
        quirks=quirks,
        provenance=_provenance(figures),
    )


def override(
    base: Profile, name: str, figures: Mapping[str, Figure], texts: Mapping[str, str] | None = None
) -> Profile:
    """Return `base` under another name, with these figures (by path) and texts in place of its own.

    Raises:
        ValueError: a figure is named that no profile has.
    """
    merged = {path: Figure(_at(base, path), None) for path in PATHS} | dict(figures)
    own = {key: getattr(base, key) for key in TEXTS}
    profile = assemble(name, own | dict(texts or {}), merged, base.quirks)
    kept = {key: told for key, told in base.provenance.items() if not _replaced(key, figures)}
    return replace(profile, provenance=kept | dict(profile.provenance))


def _at(profile: Profile, path: str) -> Any:
    found: Any = profile
    for name in path.split("."):
        found = getattr(found, name)
    return found


def _replaced(key: str, figures: Mapping[str, Figure]) -> bool:
    return any(key == path or key.startswith(f"{path}.") for path in figures)


def _provenance(figures: Mapping[str, Figure]) -> dict[str, Provenance]:
    told: dict[str, Provenance] = {}
    for path, figure in figures.items():
        if figure.provenance is not None:
            told[path] = figure.provenance
        told.update({f"{path}.{index}": part for index, part in enumerate(figure.parts)})
    return told
