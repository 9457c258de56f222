"""Fresh interpreters, in which the gateway's own processes run."""

import os
import sys


def command(module: str) -> list[str]:
    """Return the command that runs a module with this process's code, not the current folder's."""
    try:
        flags = [] if os.getcwd() in sys.path else ["-P"]
    except FileNotFoundError:  # it has been deleted
        flags = ["-P"]
    return [sys.executable, *flags, "-m", module]
