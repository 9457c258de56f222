"""The `gemma-gateway` command, which is also `python -m gateway`."""

from gateway.cli import main as cli
from gateway.exiting import bounded_exit
from gateway.standard_streams import full_disk_told


def main() -> None:
    """Run the command, and exit."""
    with bounded_exit(), full_disk_told():
        cli()


if __name__ == "__main__":
    main()
