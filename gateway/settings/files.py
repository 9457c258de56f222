"""Reads the files that a configuration consists of: its own, and those with secrets."""

import errno
import os
import stat
from pathlib import Path


def read(path: Path) -> bytes:
    """Read a file.

    Raises:
        OSError: it cannot be read, or is not a regular file: reading a pipe might block forever.
    """
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        return file.read()


def file_fault(file: Path) -> str:
    """Return why a file cannot be read; "" if it can."""
    if os.access(file, os.R_OK):
        return "" if file.is_file() else f"there is no file {file}"
    try:
        file.stat()
    except FileNotFoundError:
        return f"there is no file {file}"
    except OSError as error:
        return f"{file} cannot be read: {error.strerror}"
    return f"{file} cannot be read: {os.strerror(errno.EACCES)}"
