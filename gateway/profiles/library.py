"""The profiles that ship with the gateway, read from the YAML files beside this module."""

from collections.abc import Iterator, Mapping
from functools import cache
from importlib import resources
from typing import Any

import yaml

from gateway.core.profile import Basis, Profile, Provenance
from gateway.profiles.figures import TEXTS, Figure, assemble, knee_curve


@cache
def names() -> tuple[str, ...]:
    """Return the names of all shipped profiles, sorted."""
    files = resources.files(__package__).iterdir()
    return tuple(sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml")))


@cache
def load(name: str) -> Profile:
    """Return the shipped profile of that name.

    Raises:
        KeyError: there is no such profile; the message lists those there are.
    """
    if name not in names():
        raise KeyError(f"no profile {name!r}; there are {', '.join(names())}")
    data = yaml.safe_load(resources.files(__package__).joinpath(f"{name}.yaml").read_text(encoding="utf-8"))
    texts = {key: str(data.pop(key)) for key in TEXTS}
    quirks = tuple(data.pop("quirks", ()))
    return assemble(name, texts, dict(_figures(data)), quirks)


def _figures(data: Mapping[str, Any]) -> Iterator[tuple[str, Figure]]:
    """Yield `(path, figure)` for every figure of a profile file."""
    for key, entry in data.items():
        if isinstance(entry, Mapping) and "value" not in entry:
            for path, figure in _figures(entry):
                yield f"{key}.{path}", figure
        elif key == "knee":
            yield key, knee_curve(entry)
        elif entry is None:  # not published: there is no source to name
            yield key, Figure(None, None)
        else:
            yield key, Figure(entry["value"], Provenance(Basis(entry["basis"]), entry["source"]))
