"""The `gemma-gateway` command, which is also `python -m gateway`."""

import sys

from gateway.exiting import bounded_exit, hear_early_signals
from gateway.standard_streams import full_disk_told

SERVING = (["serve"], ["worker"])
"""Commands that reload on a signal, and let requests finish on another."""


def main() -> None:
    """Run the command, and exit."""
    if sys.argv[1:2] in SERVING:
        hear_early_signals()  # before all other modules: loading them takes longer than a signal
    with bounded_exit(), full_disk_told():
        from gateway.cli import main as cli

        cli()


if __name__ == "__main__":
    main()
