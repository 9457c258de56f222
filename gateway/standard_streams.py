"""Standard input, output and error, which may be closed when a process starts."""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO})


def open_closed() -> None:
    """Open closed ones on /dev/null. Call this before anything else is opened.

    Otherwise a connection would get such a descriptor, error messages would be written to it, and uvloop
    would abort the process rather than close it.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor, which is this one
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:  # it was closed when Python started
            stream = open(number, mode, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)


@contextmanager
def full_disk_told() -> Iterator[None]:
    """End the process with one line and status 1 if the block could not write, as on a full disk.

    What is left to write is written at the end of the block: where Python, as it exits, cannot write it, the
    exit status is 120.
    """
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except (OSError, BaseExceptionGroup) as group:
        error = _full(group)
        if error is None:
            raise
        _drop(1)
        sys.stderr.write(f"error: {error.filename or 'the output'}: {error.strerror}\n")
        raise SystemExit(1) from group
    finally:
        try:
            sys.stderr.flush()
        except OSError:
            _drop(2)


def _full(error: BaseException) -> OSError | None:
    """Return the error of a full disk, if there is no other one in `error`."""
    if isinstance(error, BaseExceptionGroup):
        found = [_full(member) for member in error.exceptions]
        return found[0] if None not in found else None
    return error if isinstance(error, OSError) and error.errno in _FULL else None


def _drop(number: int) -> None:
    """Let what is still written to a descriptor go nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), number)
