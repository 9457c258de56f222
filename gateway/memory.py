"""What the process does with memory that was freed: it keeps it for the next request.

glibc gives large blocks back as soon as they are freed, and the kernel clears every page of them when they
are wanted again. A long body is received, decoded and put together in such blocks: five copies of 1 MB, one
after the other, took 2.5 ms of CPU so, and 0.17 ms where what was freed is kept (one x86 core, glibc 2.36).
Setting it here does what the environment variables do (`MALLOC_TRIM_THRESHOLD_` and
`MALLOC_MMAP_THRESHOLD_`). docs/estimate.md#long-documents has what it means for a request, and how much
memory is kept.
"""

import ctypes
import gc
from collections.abc import Mapping

KEPT_BYTES = 256 * 1024 * 1024
"""Free memory that is kept at the end of the heap: 64 documents of 4 MB. What is free inside it always is."""

HEAP_BLOCK_BYTES = 32 * 1024 * 1024
"""Blocks up to this size come from the heap: as large as a body may be, and all that any glibc takes."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_OPERATORS = ("MALLOC_", "GLIBC_TUNABLES")


def keep_freed(environ: Mapping[str, str]) -> bool:
    """Keep what is freed from now on, in every thread. Returns whether that is so.

    It is not where the C library is not glibc, nor where the operator has set any of its variables, which are
    then all there is.
    """
    if any(name.startswith(_OPERATORS) for name in environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)) and bool(mallopt(_M_MMAP_THRESHOLD, HEAP_BLOCK_BYTES))


YOUNG_MAX = 20_000
"""Objects made, less those freed, after which the collector looks for cycles among them. Python's own 700 are
made by two short requests."""


def settle() -> None:
    """Never again look for garbage among what is there now: what was made at the start stays to the end.

    The collector's full rounds went through some 200,000 objects, and took an eighth of a request's CPU.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_MAX, 20, 20)
