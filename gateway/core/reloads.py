"""What reloading the configuration changes, and the versions that were in force. Pure."""

from gateway.core.value import valueclass


@valueclass(frozen=True, slots=True)
class Changes:
    """The differences between two configurations.

    Attributes:
        now: Those that can take effect at once.
        at_start: Those that need a restart: sections read once, and backends of boxes.
    """

    now: tuple[str, ...] = ()
    at_start: tuple[str, ...] = ()


@valueclass(frozen=True, slots=True)
class Version:
    """A configuration that was in force.

    Attributes:
        id: Short hash of the file.
        source: Contents of the file.
        at: Epoch seconds at which it was applied.
        by: What triggered it: start, signal, file, put or rollback.
        needs_restart: Sections whose changes take effect only after a restart.
    """

    id: str
    source: bytes
    at: float
    by: str
    needs_restart: tuple[str, ...] = ()


@valueclass(frozen=True, slots=True)
class Reload:
    """The result of a reload, or its preview.

    Attributes:
        version: Of the new configuration; "" if it is invalid.
        changes: What changes.
        warnings: Valid settings that are probably mistakes.
        error: Why it is invalid, one problem per line; "" if it is valid.
    """

    version: str = ""
    changes: Changes = Changes()
    warnings: tuple[str, ...] = ()
    error: str = ""
