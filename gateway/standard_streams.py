"""Standard input, output and error, which whoever starts a process may have closed."""

import os
import sys


def open_closed() -> None:
    """Open those that are closed as nothing (/dev/null). To be called before anything else is opened.

    Otherwise a connection gets such a number, which whoever writes an error then writes to, and uvloop ends
    the process rather than close it.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free: this one
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:  # it was closed when Python started
            stream = open(number, mode, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)
