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
