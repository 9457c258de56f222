"""The deployment profiles: ten ways of serving Gemma 4, as data.

Each is a YAML file beside this module. Every figure in it stands as `{value, basis, source}`;
docs/measurements.md explains the sources, docs/profiles.md shows the ten side by side.
"""

from gateway.profiles.figures import PATHS, TEXTS, Figure, override
from gateway.profiles.library import load, names
from gateway.profiles.quirks import QUIRKS

__all__ = ["names", "load", "override", "Figure", "PATHS", "TEXTS", "QUIRKS"]
