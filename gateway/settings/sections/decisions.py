"""The section `decisions` of the configuration file: the log from which another policy can be tried."""

from gateway.settings.fields import Positive, Section, Text


class DecisionsSection(Section):
    """One line per request that ended, for `gemma-gateway replay` (docs/replay.md). Never any text."""

    file: Text
    """Where they are appended; relative to this file. Its folder must be there."""

    max_bytes: Positive = 64 * 1024 * 1024
    """Bytes at which the file is set aside, as FILE.1, and another one begun."""

    files: Positive = 5
    """Files that are kept, the one that is written to among them."""

    key_names: bool = True
    """Whether a line holds the name (never more) of its caller's API key."""
