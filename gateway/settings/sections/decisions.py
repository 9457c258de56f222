"""The section `decisions` of the configuration file: the log from which another policy can be tried.

Defaults are choices: 320 MiB at most.
"""

from gateway.settings.fields import Positive, Section, Text


class DecisionsSection(Section):
    """One line per ended request, for `gemma-gateway replay` (docs/replay.md). It never holds any text."""

    file: Text
    """File to append to; relative to this file. Its folder must exist."""

    max_bytes: Positive = 64 * 1024 * 1024
    """Size in bytes at which the file is rotated to FILE.1."""

    files: Positive = 5
    """Number of files kept, including the current one; with 1, a full one is deleted."""

    key_names: bool = True
    """Whether a line holds the name of its caller's API key (never the key itself)."""
